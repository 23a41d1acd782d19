"""The role of each variable: the update writes it, tower 0 for all towers, every tower in turn, or
each tower has a variable of its own.

A local variable that the forward pass writes, as the state of an RNN that goes on from step to
step, belongs to one tower's part of the batch, and so does the state of a stateful Keras layer. The
first tower's state is the variable that the model makes; tower k > 0 has `<name>_tower_<k>`, a
local variable that starts with the same value, which its copy reads and writes instead
(`Substitution`). All towers add to the counters of `tf.metrics`. All towers share each global
variable: tower 0 writes it for all, or every tower in turn, see `written_values`.

`ownership` gives the table of roles, `Roles`, and changes the graph as the roles ask for. The
copies, the order of writes, the update and the plan go by the table.

Its test is `tests/roles/test_ownership.py`.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.capture.record import Recorded
from towers.errors import SharedVariableError
from towers.graph.graph_walk import (
    names_of,
    operation_of,
    reachable_from,
    step_operations,
)
from towers.graph.order import fetches_for
from towers.graph.variable_access import metric_variables
from towers.model.outputs import fetches_of, metric_updates, metrics_by_kind
from towers.model.request import Request
from towers.roles.inline_updates import InlineUpdates, SharedWrites, inline_updates
from towers.roles.inner_training import check_trains_nothing
from towers.roles.own_state import StateWrites, find_own_state, make_own_state
from towers.roles.variable_roles import EVERY, FIRST, METRIC, OWN, Roles
from towers.roles.writes import (
    Write,
    writes_among,
    writes_by,
    writes_not_by,
    writes_of_call,
    writes_to,
)
from towers.roles.written_values import is_divided, proven_writers
from towers.whole_batch.batch_values import is_batch_value


class _Runs(typing.NamedTuple):
    """Names of the operations of the model function that are run, by what runs them.

    Attributes:
      forward: run for the results of the model function, without update ops and `tf.metrics` pairs.
      step: run for the same results, and for the update ops.
      for_metrics: run for the update_ops of metrics, as in an evaluation.
      in_build: run by a step of this build: `step`; but `forward` in a build without an optimizer,
        where no update op runs.
    """
    forward: typing.Set[str]
    step: typing.Set[str]
    for_metrics: typing.Set[str]
    in_build: typing.Set[str]


def ownership(recorded: Recorded, request: Request,
              trained: typing.Dict[typing.Optional[str], typing.List[tf.Variable]],
              optimizer_fetches: typing.Sequence = (),
              make_replicas: typing.Optional[typing.Callable] = None) -> Roles:
    """Finds the role of each variable, and changes the graph as the roles ask for.

    Three changes: state that is each tower's own gets a variable for each tower; trained variables
    get replicas; and writes that become update ops, or that nobody makes, are taken out of the
    forward pass.

    Args:
      recorded: the forward pass of tower 0.
      request: `Request` of the build.
      trained: {name of an objective: list of the variables that its loss trains}.
      optimizer_fetches: tensors and operations of the optimizers that the model function of an
        Estimator calls; a step also runs these.
      make_replicas: function `(variables, devices) -> Replicas`; None where trained variables have
        no replicas.

    Returns:
      `Roles`.

    Raises:
      SharedVariableError: a write that neither tower 0 nor every tower can make.
      GradientError: the model function trains by itself.
    """
    # A step computes the metrics that are scalars. The update_ops of `(value, update_op)` pairs are
    # run by an evaluation alone.
    scalars, _ = metrics_by_kind(recorded.output.metrics)
    fetches = fetches_of(recorded.output._replace(metrics=scalars)) + list(optimizer_fetches)
    runs = _find_runs(recorded, fetches, is_trained=bool(request.training.objectives))
    found = _find_roles(recorded, request, runs)
    # From here on variables are made, and the forward pass is changed.
    own_state = make_own_state(recorded, found.state_writes, runs.step,
                               num_parts=request.num_parts_of_call)
    replicas = None
    replicated: typing.FrozenSet[str] = frozenset()
    if make_replicas is not None:
        replicas = make_replicas(recorded.variables, request.devices)
        replicated = frozenset(replicas.of_variable)
        _check_no_tower_writes_a_replica(found.role_of, replicated)
    every_tower = _update_ops_of_every_tower(recorded.updates, found.role_of, request)
    forward_writes = writes_by(found.first_writes, runs.forward)
    other_fetches = _fetches_beside_forward(recorded, every_tower.writers, request)
    update_writes = _writes_beside_forward(found, other_fetches, runs)
    if request.call.copies == 'reuse':
        # `_find_roles` has refused update ops that every tower runs, and `_check_writes` writes for
        # metrics. So it is a value of the whole batch that waits for these writes.
        _check_not_awaited(update_writes)
    inline = inline_updates(SharedWrites(forward_writes, update_writes), recorded.operations,
                            fetches + other_fetches, request, replicated)
    unwritten = _unwritten(found, forward_writes, inline, request)
    reason_of = dict(found.reason_of)
    reason_of.update(_reasons_without_updates(found, unwritten, request))
    return Roles(trained, found.role_of, reason_of, unwritten, own_state, inline,
                 every_tower.update_ops, replicas)


def _check_no_tower_writes_a_replica(role_of: typing.Dict[str, str],
                                     replicated: typing.AbstractSet[str]) -> None:
    """Refuses variables with replicas that every tower writes: each would write its own replica.

    Args:
      role_of: {name of a variable that the model function writes: its role}.
      replicated: names of the variables that have replicas.
    """
    for name in sorted(replicated & role_of.keys()):
        if role_of[name] != FIRST:
            raise SharedVariableError(
                "VariablePlacement('replicated'), and every tower writes the trainable variable %s "
                'in turn, but each has a replica of its own: make the variable with '
                'trainable=False, which has no replicas; or use another VariablePlacement.' % name)


class _UpdateOpsOfEveryTower(typing.NamedTuple):
    """The update ops that a step runs in every tower.

    Attributes:
      update_ops: the update ops, as the program gives them.
      writers: with `update_ops='first'`, what a step runs for them in the towers after the first.
        With `'all'` it is [], though these towers run all of their update ops: the writers are
        needed to find what they wait for, and with `'all'` nothing of that is tower 0's alone.
    """
    update_ops: list
    writers: typing.List[tf.Operation]


def _update_ops_of_every_tower(update_ops: list, role_of: typing.Dict[str, str],
                               request: Request) -> _UpdateOpsOfEveryTower:
    """Finds the update ops that a step runs in every tower.

    With `update_ops='first'` they are the update ops of variables that each tower has for itself,
    of the counters of metrics, and of variables that every tower writes in turn.

    Args:
      update_ops: the update ops of tower 0.
      role_of: {name of a variable: its role}.
      request: `Request` of the build.
    """
    if request.training.update_ops == 'all':
        return _UpdateOpsOfEveryTower(update_ops, writers=[])
    has_train_op = bool(request.training.objectives)  # with which the update ops would run
    if request.training.update_ops == 'none' or not has_train_op:
        return _UpdateOpsOfEveryTower([], writers=[])
    written_by_every = set(metric_variables())
    for name, role in role_of.items():
        if role in (OWN, EVERY):
            written_by_every.add(name)
    if not written_by_every:
        return _UpdateOpsOfEveryTower([], writers=[])
    operations = step_operations(update_ops)
    writers = [write.op for write in writes_to(writes_among(operations), written_by_every)]
    # An update op need not be the operation that writes: it may be a group of such operations, or
    # what reads the variable after the write. It waits for the write then.
    waiting_for_writers = reachable_from(writers, operations, control=True)
    of_every_tower = [each for each in update_ops if operation_of(each).name in waiting_for_writers]
    if request.call.copies == 'reuse':  # each call of the model function makes all update ops
        of_every_tower = update_ops
    return _UpdateOpsOfEveryTower(of_every_tower, fetches_for(writers, operations))


def _fetches_beside_forward(recorded: Recorded, writers: typing.List[tf.Operation],
                            request: Request) -> list:
    """What a step or an evaluation runs in every tower besides the results of the forward pass. It
    may wait for a write that tower 0 alone is to make, or nobody.

    These are the update ops of every tower; the values of the whole batch, since every tower gives
    its part of them, even if an update op of tower 0 alone needs the value; and the update_ops of
    metrics.

    Args:
      recorded: the forward pass of tower 0.
      writers: the operations that every tower runs for its update ops.
      request: `Request` of the build.
    """
    if request.training.update_ops == 'all':  # every tower makes all writes that it waits for
        return []
    for_metrics = metric_updates(recorded.output.metrics)
    if request.training.update_ops == 'none':
        # No step runs update ops, nor a value of the whole batch for them. An evaluation still runs
        # the update_ops of metrics.
        return for_metrics
    batch_values = [op for op in recorded.operations if is_batch_value(op)]
    return writers + batch_values + for_metrics


def _writes_beside_forward(found: '_FoundRoles', fetches: list,
                           runs: _Runs) -> typing.List[Write]:
    """List of tower 0's writes, not in the forward pass, that other towers would make for the
    `fetches` of `_fetches_beside_forward`.

    Args:
      found: the roles of the variables.
      fetches: what every tower runs besides the results of the forward pass.
      runs: the operations that are run.
    """
    run_by_every_tower = names_of(step_operations(fetches))
    return writes_by(found.first_writes, run_by_every_tower - runs.forward)


def _unwritten(found: '_FoundRoles', forward_writes: typing.List[Write], inline: InlineUpdates,
               request: Request) -> typing.FrozenSet[str]:
    """Names of the variables with the role `FIRST` that no step of this build writes.

    Args:
      found: `_FoundRoles`.
      forward_writes: the writes of these variables in the forward pass.
      inline: what became of these writes.
      request: `Request` of the build.
    """
    trains = bool(request.training.objectives)
    if request.training.update_ops == 'none':
        # No step runs update ops, nor the writes of the forward pass that `left_out` names.
        writes_in_step = writes_not_by(forward_writes, inline.left_out)
    elif not trains:
        # No step runs update ops. The forward pass of tower 0 has all of its writes: `left_out`
        # names the writes that the copies leave out.
        writes_in_step = forward_writes
    else:
        return frozenset()
    unwritten = found.first_names
    for write in writes_in_step:
        unwritten.difference_update(write.variables)
    return frozenset(unwritten)


def _reasons_without_updates(found: '_FoundRoles', unwritten: typing.AbstractSet[str],
                             request: Request) -> typing.Dict[str, str]:
    """{name of a variable: why it is written or not, in words}, for the variables with the role
    `FIRST` whose reason changes where no step of this build runs update ops; {} where a step does.

    With `update_ops='none'` the reason of all variables is so far that `update_ops` says so. This
    explains why nobody writes a variable, but not why tower 0 writes another one. Without an
    optimizer the reasons so far say who writes: they do not explain why a variable is unwritten.

    Args:
      found: `_FoundRoles`.
      unwritten: names of the variables that no step writes.
      request: `Request` of the build.
    """
    if request.training.update_ops == 'none':
        # Tower 0 makes a write in spite of 'none' if the loss needs the new value.
        written = found.first_names - unwritten
        return dict.fromkeys(written, 'the forward pass uses its new value')
    return dict.fromkeys(
        unwritten, 'update ops alone write it, and without an optimizer no step runs them')


class _FoundRoles(typing.NamedTuple):
    """The roles of the variables that the model function writes.

    Attributes:
      role_of: {name of a variable: its role}.
      reason_of: {name of a variable: why it has this role}.
      state_writes: {name of a variable that is each tower's own state: the operations that write
        it}.
      first_writes: the writes of the variables with the role `FIRST`, which tower 0 makes for all.
    """
    role_of: typing.Dict[str, str]
    reason_of: typing.Dict[str, str]
    state_writes: StateWrites
    first_writes: typing.List[Write]

    @property
    def first_names(self) -> typing.Set[str]:
        """Set of the names of the variables that have the role `FIRST`."""
        return {name for name, role in self.role_of.items() if role == FIRST}


def _find_roles(recorded: Recorded, request: Request, runs: _Runs) -> _FoundRoles:
    """Finds the roles of the variables that the model function writes; changes nothing.

    Args:
      recorded: the forward pass of tower 0.
      request: `Request` of the build.
      runs: the operations that are run.

    Raises:
      SharedVariableError: a write that neither tower 0 nor every tower can make.
      GradientError: the model function trains by itself.
    """
    writes = writes_of_call(recorded)
    _check_writes(writes, runs, request)
    # First the variables whose role needs no proof: state of a tower, and counters of metrics. Who
    # writes the other variables is proven.
    state_writes = find_own_state(recorded, writes, runs.step, runs.for_metrics)
    run_for_metrics_alone = runs.for_metrics - runs.step
    counters = _counters(writes_by(writes, run_for_metrics_alone))
    names_without_proof = state_writes.keys() | counters
    to_prove = _without(writes, names_without_proof)
    # Without an optimizer no step runs an update op, and nothing has to be proven of update ops.
    # The proof also gets the writes that need none: such a variable has something of the examples,
    # and a value that is computed from it has so, too.
    proven = proven_writers(recorded, writes_by(to_prove, runs.in_build),
                            writes_to(writes, names_without_proof), request)
    if request.call.copies == 'reuse':
        _check_not_written(writes_to(writes, proven.every_tower), 'an update by the examples')
    # All written variables get a role, also variables that only an update op or a metric writes.
    writes_by_any_run = writes_by(writes, runs.step | runs.for_metrics)
    role_of = _roles_of_written(writes_by_any_run, [
        (EVERY, proven.every_tower),
        (METRIC, counters),
        (OWN, _state_of_copies(state_writes, request))])
    reason_of = _reasons(role_of, proven.reasons, request)
    others = {name for name, role in role_of.items() if role != FIRST}
    first_writes = _without(writes, others)
    return _FoundRoles(role_of, reason_of, state_writes, first_writes)


def _state_of_copies(state_writes: StateWrites, request: Request) -> typing.Set[str]:
    """Set of the names of the variables in whose place each tower gets a variable of its own: all
    state. The set is empty for several towers with `copies='reuse'`: each of them is a call of the
    model function, and all calls share all variables. State then has the role `FIRST`, and only
    update ops write it: `_check_writes` has refused writes in the forward pass."""
    makes_all_parts = request.num_parts_of_call == len(request.split.parts)
    return set(state_writes) if makes_all_parts else set()


def _check_writes(writes: typing.Sequence[Write], runs: _Runs, request: Request) -> None:
    """Refuses writes that no tower may make, whatever value they write: with `copies='reuse'`,
    writes in the forward pass; and writes by which the model function trains by itself.

    Args:
      writes: the writes of the model function.
      runs: the operations that are run.
      request: `Request` of the build.
    """
    if request.call.copies == 'reuse':
        # Each call of the model function would write into the one variable that all calls share.
        _check_not_written(writes_by(writes, runs.forward | runs.for_metrics), 'the forward pass')
    # An Estimator's model function calls its optimizers itself: `fronts` makes one update of these
    # calls, with the gradients of all towers.
    is_trained_by_own_calls = request.training.objectives.optimizer_calls is not None
    if not is_trained_by_own_calls:
        check_trains_nothing(writes_by(writes, runs.in_build))


def _find_runs(recorded: Recorded, fetches: list, is_trained: bool) -> _Runs:
    """Finds the operations of the model function that are run, by what runs them.

    Args:
      recorded: the forward pass of tower 0.
      fetches: what a step fetches, without update ops and `tf.metrics` pairs.
      is_trained: whether there is an optimizer, so that a step runs the update ops.
    """
    forward = names_of(step_operations(fetches))
    step = names_of(step_operations(fetches + recorded.updates))
    for_metrics = names_of(step_operations(metric_updates(recorded.output.metrics)))
    in_build = step if is_trained else forward
    return _Runs(forward, step, for_metrics, in_build)


def _counters(writes_of_metrics: typing.Iterable[Write]) -> typing.Set[str]:
    """Set of the names of the counters of metrics.

    Args:
      writes_of_metrics: the writes that update_ops of metrics run, and a step does not.
    """
    counters = set(metric_variables())
    # A metric that the model function has written itself may not be in the collection.
    for write in writes_of_metrics:
        counters.update(write.variables)
    return counters


def _without(writes: typing.Iterable[Write],
             names: typing.Container[str]) -> typing.List[Write]:
    """The writes, without the variables of these names. An operation that writes such variables
    alone is left out."""
    others = []
    for write in writes:
        variables = [variable for variable in write.variables if variable not in names]
        if variables:
            others.append(Write(write.op, variables))
    return others


def _roles_of_written(writes: typing.Iterable[Write],
                      roles: typing.Sequence[typing.Tuple[str, typing.Set[str]]]
                      ) -> typing.Dict[str, str]:
    """Gives each written variable its role.

    Args:
      writes: the writes.
      roles: `(role, names of the variables that may have it)`. Of several roles that a variable may
        have, it gets the last one.

    Returns:
      {name of a variable: its role}, `FIRST` for a variable that is among none of the names.
    """
    role_of: typing.Dict[str, str] = {}
    for write in writes:
        role_of.update(dict.fromkeys(write.variables, FIRST))
    for role, names in roles:
        role_of.update(dict.fromkeys(role_of.keys() & names, role))
    return role_of


_REASON_OF_ROLE = {
    OWN: 'it is state that the forward pass writes from its own examples',
    METRIC: 'it is a counter that only update_ops of metrics write'}
"""{role: why a variable has this role, in words}; the proof gives the reasons for other roles."""


def _reasons(role_of: typing.Dict[str, str], proven_reasons: typing.Dict[str, str],
             request: Request) -> typing.Dict[str, str]:
    """{name of a variable: why it has its role, in words}, for `built.plan.explain()`.

    Args:
      role_of: {name of a variable: its role}.
      proven_reasons: {name of a variable: what is proven of its new value}. It lacks variables
        whose new values were not judged: with one tower, all of them.
      request: `Request` of the build.
    """
    reason_without_proof = _reason_without_proof(request)
    reason_of = {}
    for name, role in role_of.items():
        if role in _REASON_OF_ROLE:
            reason_of[name] = _REASON_OF_ROLE[role]
        else:
            reason_of[name] = proven_reasons.get(name, reason_without_proof)
    return reason_of


def _reason_without_proof(request: Request) -> str:
    """The reason for the role of a variable of whose new value nothing is proven, in words."""
    if request.training.update_ops != 'first':
        return 'update_ops=%r says so' % request.training.update_ops
    if is_divided(request):  # all variables that a step writes have a proven reason
        return 'no operation of a step writes it'
    return 'one tower does all of the batch'


def _check_not_written(writes: typing.Sequence[Write], writer: str) -> None:
    """Refuses the writes, with `copies='reuse'`: each call of the model function would write a
    variable that all calls share. `writer` is what writes, for the text of the error."""
    if not writes:
        return
    op, names = writes[0]
    raise SharedVariableError(
        "copies='reuse', and %s writes variable %s (operation %s), which all towers have in "
        'common: put the update into the collection UPDATE_OPS, unless it counts or stores '
        "examples, or pass copies='clone'." % (writer, names[0], op.name))


def _check_not_awaited(writes: typing.Sequence[Write]) -> None:
    """Refuses writes of update ops for which a value of the whole batch waits, with
    `copies='reuse'`: every tower's part of the value would wait for a write by that tower."""
    if not writes:
        return
    op, names = writes[0]
    raise SharedVariableError(
        "copies='reuse', and a value of the whole batch (towers.batch_sum, or a sum in a moving "
        'average) waits for a write of variable %s (operation %s), which all towers have in '
        "common: compute it outside of tf.control_dependencies, or pass copies='clone'." % (
            names[0], op.name))
