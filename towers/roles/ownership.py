"""Ownership: one table of the roles of variables for the towers; copy, order, update read it.

A local variable that the forward pass writes, as the state of an RNN that goes on from step to
step, belongs to one tower's part of the batch, and so does the state of a stateful Keras layer. The
first tower's is the variable that the model makes; tower k > 0 has `<name>_tower_<k>`, a local
variable that starts with the same value, which its copy reads and writes instead (`Substitution`).
To counters of `tf.metrics` all towers add. Of global variables there is one, which tower 0 writes
for all, or every tower in turn: see `written_values`.

A model function that trains by an optimizer of its own, within the towers' step, is refused: the
update would have the gradient of one tower's part of the batch. `replicate_model_fn` is for these.
"""

import collections
import re
import typing

import tensorflow.compat.v1 as tf

from towers.capture.record import Recorded
from towers.errors import GradientError, SharedVariableError
from towers.graph.graph_walk import ancestors, names_of, operation_names, step_operations
from towers.graph.variable_access import metric_variables
from towers.model.outputs import fetches_of, metrics_by_kind
from towers.model.request import Request
from towers.optimizers import OPTIMIZER_UPDATES
from towers.roles.inline_updates import InlineUpdates, Write, inline_updates, writes_by, writes_of
from towers.roles.own_state import find_own_state, make_own_state
from towers.roles.written_values import proven_writers

FIRST = 'first'  # tower 0 writes for all
EVERY = 'every'  # every tower writes, in turn
OWN = 'own'  # one variable for each tower
METRIC = 'metric'  # every tower adds to the counters of a `(value, update_op)`

_IN_WORDS = collections.OrderedDict([
    (FIRST, 'averages and counters'),
    (EVERY, 'rows and counts of examples'),
    (OWN, 'state'),
    (METRIC, 'metrics')])
"""{role: what the plan calls the variables that have it}; a step writes these before the update."""


class VariableRole(typing.NamedTuple):
    """Who writes a variable, and why.

    Attributes:
      variable: its name.
      writer: who writes it, such as `'tower 0 alone'`.
      reason: what makes it so, such as `'it is a moving average of a statistic of the examples'`.
    """
    variable: str
    writer: str
    reason: str


class Roles(typing.NamedTuple):
    """The role of each variable for the towers.

    Attributes:
      trained: {name of an objective: list of the variables that its loss trains}.
      written: {name of a variable that a step writes before the update: its role}; of several roles
        the first of `OWN`, `METRIC`, `EVERY`, `FIRST`.
      reasons: {name of such a variable: why it has this role, in words}.
      own_state: {name of a local variable that the forward pass writes: list of the variables
        of the towers, the first is the model's own}.
      inline_updates: shared variables that the forward pass writes.
      replicas: `Replicas` of the trained variables; or None.
    """
    trained: typing.Dict[typing.Optional[str], typing.List[tf.Variable]]
    written: typing.Dict[str, str]
    reasons: typing.Dict[str, str]
    own_state: typing.Dict[str, typing.List[tf.Variable]]
    inline_updates: InlineUpdates
    replicas: typing.Any

    @property
    def trainable(self) -> typing.List[tf.Variable]:
        """List of the variables that are trained, each once."""
        trained = {}
        for variables in self.trained.values():
            for variable in variables:
                trained[variable.op.name] = variable
        return list(trained.values())

    def names(self, role: str) -> typing.List[str]:
        """Sorted list of the names of the variables of a role."""
        return sorted(name for name in self.written if self.written[name] == role)

    def in_tower(self, part: int, micro_batches: int) -> typing.Dict[str, tf.Variable]:
        """The variables that a copy of tower 0 uses in the place of tower 0's: {name of a variable:
        the copy's}.

        Args:
          part: the index of the copy among the micro-batches of all towers.
          micro_batches: how many of them each tower has.
        """
        variables = {}
        if self.replicas is not None:
            variables.update(self.replicas.in_tower(part // micro_batches))
        for name, of_towers in self.own_state.items():
            variables[name] = of_towers[part]
        return variables

    def own_variables(self, first: int = 0) -> typing.List[tf.Variable]:
        """List of the state variables, by variable and then by tower.

        Args:
          first: index of the first tower whose variables are listed.
        """
        return sum([of_towers[first:] for of_towers in self.own_state.values()], [])

    def describe(self, request: Request) -> typing.Optional[str]:
        """The plan's line: who writes what, in the build of a `Request`; None where the update
        alone writes."""
        if not self.written:
            return None
        writers = _writers_in_words(request)
        rows = [(self._trainers(), len(self.trainable), 'trained')]
        for role, called in _IN_WORDS.items():
            rows.append((writers[role], len(self.names(role)), called))
        return '; '.join('%s: %d %s' % row for row in rows if row[1])

    def explain(self, request: Request) -> typing.List[VariableRole]:
        """Who writes each variable in the build of a `Request`, and why: first the trained
        variables, then those that a step writes before the update, in the order of their names."""
        explained = []
        for objective in request.training.objectives:
            reason = 'the loss trains it'
            if objective.name is not None:
                reason = 'the loss %r trains it' % objective.name
            if objective.var_list is None:
                reason += ', since it is trainable'
            else:
                reason += ', since var_list has it'
            for variable in self.trained[objective.name]:
                explained.append(VariableRole(variable.op.name, self._trainers(), reason))
        writers = _writers_in_words(request)
        for role in _IN_WORDS:
            for name in self.names(role):
                explained.append(VariableRole(name, writers[role], self.reasons[name]))
        return explained

    def _trainers(self) -> str:
        """Who writes the trained variables, in words."""
        if self.replicas is None:
            return 'all towers together'
        return 'all towers together, a replica each'


def _writers_in_words(request: Request) -> typing.Dict[str, str]:
    """{role: who writes the variables that have it}, in the build of a `Request`."""
    part = 'tower' if request.split.accumulate == 1 else 'micro-batch'
    writers_by_update_ops = {'first': 'tower 0 alone', 'none': 'nobody', 'all': 'every %s' % part}
    return {
        FIRST: writers_by_update_ops[request.training.update_ops],
        EVERY: 'every %s, one after the other' % part,
        METRIC: 'every %s adds to' % part,
        OWN: 'each %s its own' % part}


class _Runs(typing.NamedTuple):
    """Names of the operations of the model function that are run, by what runs them.

    Attributes:
      forward: run for the results of the model function, without updates and `tf.metrics` pairs.
      step: run for these, and for the updates.
      counted: run for the update_ops of metrics.
      in_build: run by what the build makes: `step`, but without an optimizer `forward`.
    """
    forward: typing.Set[str]
    step: typing.Set[str]
    counted: typing.Set[str]
    in_build: typing.Set[str]


def ownership(recorded: Recorded, request: Request,
              trained: typing.Dict[typing.Optional[str], typing.List[tf.Variable]],
              optimizer_fetches: typing.Sequence = (),
              make_replicas: typing.Optional[typing.Callable] = None) -> Roles:
    """Finds the role of each variable, and gives the towers what the roles ask for.

    That is: a variable for each tower where state is each tower's own; replicas of trained
    variables; and writes that become updates are taken out of the forward pass.

    Args:
      recorded: the forward pass of tower 0.
      request: `Request` of the build.
      trained: {name of an objective: list of the variables that its loss trains}.
      optimizer_fetches: tensors and operations of the model function's own optimizer calls, which a
        step runs, too.
      make_replicas: function `(variables, devices) -> Replicas`; None where trained variables have
        no replicas.

    Returns:
      `Roles`.

    Raises:
      SharedVariableError: a write that is no tower's.
      GradientError: the model function trains by itself.
    """
    scalars, _ = metrics_by_kind(recorded.output.metrics)
    fetches = fetches_of(recorded.output._replace(metrics=scalars)) + list(optimizer_fetches)
    runs = _runs(recorded, fetches, bool(request.training.objectives))
    found = _find_roles(recorded, request, runs)
    # From here on variables are made, and the forward pass is changed.
    own_state = make_own_state(recorded, found.state_writes, runs.step, request.parts_a_call)
    replicas = None
    replicated: typing.FrozenSet[str] = frozenset()
    if make_replicas is not None:
        replicas = make_replicas(recorded.variables, request.devices)
        replicated = frozenset(replicas.of_variable)
    updates = inline_updates(found.first_writes, recorded.operations, fetches, request, replicated)
    return Roles(trained, found.written, found.reasons, own_state, updates, replicas)


class _FoundRoles(typing.NamedTuple):
    """The roles of the variables that a step writes before the update.

    Attributes:
      written: {name of a variable: its role}.
      reasons: {name of a variable: why it has this role}.
      state_writes: {name of a variable that is each tower's own state: the operations that write
        it}.
      first_writes: the writes of the forward pass that tower 0 does for all towers.
    """
    written: typing.Dict[str, str]
    reasons: typing.Dict[str, str]
    state_writes: typing.Dict[str, typing.List[tf.Operation]]
    first_writes: typing.List[Write]


def _find_roles(recorded: Recorded, request: Request, runs: _Runs) -> _FoundRoles:
    """Finds the roles of the variables that a step writes; nothing is changed.

    Args:
      recorded: the forward pass of tower 0.
      request: `Request` of the build.
      runs: the operations that are run.

    Raises:
      SharedVariableError, GradientError: see `ownership`.
    """
    writes = writes_of(recorded)
    has_call_for_each_tower = request.call.copies == 'reuse'
    if has_call_for_each_tower:
        _check_not_written(writes_by(writes, runs.forward | runs.counted), 'the forward pass')
    if request.training.objectives.optimizer_calls is None:
        _check_trains_nothing(writes_by(writes, runs.in_build))
    state_writes = find_own_state(recorded, writes, runs.step, runs.counted)
    counters = set(metric_variables())
    for write in writes_by(writes, runs.counted - runs.step):
        counters.update(write.variables)
    shared = _without(writes, state_writes.keys() | counters)
    proven = proven_writers(recorded, writes_by(shared, runs.in_build), request)
    every = proven.every_tower
    if has_call_for_each_tower:
        writes_of_every_tower = [
            write for write in writes if not every.isdisjoint(write.variables)]
        _check_not_written(writes_of_every_tower, 'an update by the examples')
    # With copies='reuse' all calls share one variable, so that nothing is a tower's own.
    has_own_state = request.parts_a_call == len(request.split.parts)
    written = _roles_of(writes_by(writes, runs.step | runs.counted),
                        {OWN: state_writes.keys() if has_own_state else (),
                         METRIC: counters, EVERY: every})
    reasons = _reasons_of(written, proven.reasons, request)
    first_writes = writes_by(_without(shared, every), runs.forward)
    return _FoundRoles(written, reasons, state_writes, first_writes)


def _runs(recorded: Recorded, fetches: list, is_trained: bool) -> _Runs:
    """Finds the operations that are run.

    Args:
      recorded: the forward pass of tower 0.
      fetches: what a step fetches, without updates and `tf.metrics` pairs.
      is_trained: whether there is an optimizer.
    """
    _, pairs = metrics_by_kind(recorded.output.metrics)
    forward = names_of(step_operations(fetches))
    step = names_of(step_operations(fetches + recorded.updates))
    counted = names_of(step_operations([update for _, update in pairs]))
    return _Runs(forward, step, counted, in_build=step if is_trained else forward)


def _without(writes: typing.Iterable[Write],
             names: typing.Container[str]) -> typing.List[Write]:
    """The writes without the variables of these names; a write of these only is left out."""
    others = []
    for write in writes:
        variables = [variable for variable in write.variables if variable not in names]
        if variables:
            others.append(Write(write.op, variables))
    return others


def _roles_of(writes: typing.Iterable[Write],
              names_by_role: typing.Dict[str, typing.Container[str]]) -> typing.Dict[str, str]:
    """The role of each written variable.

    Args:
      writes: the writes.
      names_by_role: {role: names of the variables that may have it}; the first one counts.

    Returns:
      {name of a variable: its role}, `FIRST` if it is among none of the names.
    """
    written = {}
    for write in writes:
        for variable in write.variables:
            roles = [role for role, names in names_by_role.items() if variable in names]
            written[variable] = roles[0] if roles else FIRST
    return written


def _reasons_of(written: typing.Dict[str, str], proven_reasons: typing.Dict[str, str],
                request: Request) -> typing.Dict[str, str]:
    """{name of a written variable: why it has its role}.

    Args:
      written: {name of a variable: its role}.
      proven_reasons: {name of a variable: what is proven of its new value}.
      request: `Request` of the build.
    """
    update_ops = request.training.update_ops
    if update_ops == 'first':
        reason_of_first = 'one tower does all of the batch'
    else:
        reason_of_first = 'update_ops=%r says so' % update_ops
    reasons = {}
    for name, role in written.items():
        if role == OWN:
            reasons[name] = 'it is state that the forward pass writes from its own examples'
        elif role == METRIC:
            reasons[name] = 'it is a counter that only update_ops of metrics write'
        else:
            reasons[name] = proven_reasons.get(name, reason_of_first)
    return reasons


def _check_not_written(writes: typing.Iterable[Write], called: str) -> None:
    """Refuses the writes, with `copies='reuse'`: each call of the model function would write a
    variable that all calls share. `called` is what writes, for the error."""
    for op, names in writes:
        raise SharedVariableError(
            "copies='reuse', and %s writes variable %s (operation %s), which all towers have in "
            'common: put the update into the collection UPDATE_OPS, unless it counts or stores '
            "examples, or pass copies='clone'." % (called, names[0], op.name))


OF_GRADIENTS = re.compile(r'(^|/)gradients(_\d+)?/')
"""The name scope of the operations that `tf.gradients` makes."""


def _check_trains_nothing(writes: typing.Iterable[Write]) -> None:
    """Refuses writes by which the model function trains a variable itself: by an operation of
    TensorFlow's optimizers, or by a value computed from `tf.gradients`."""
    trainable = operation_names(tf.trainable_variables())
    for op, names in writes:
        for name in trainable.intersection(names):
            if OPTIMIZER_UPDATES.search(op.type) or _is_computed_from_gradients(op, name):
                raise GradientError(
                    'the model function trains %r by the update %r, which a step would run in a '
                    'tower, by the gradient of its part of the batch alone: leave the update out '
                    'and pass the optimizer to build_towers; for several losses a dict of '
                    'optimizers by name.' % (name, op.name))


def _is_computed_from_gradients(op: tf.Operation, variable: str) -> bool:
    """Whether an operation writes a value that is computed from gradients to the variable of this
    name."""
    values = [tensor for tensor in op.inputs if tensor.op.name != variable]
    return any(map(OF_GRADIENTS.search, ancestors(values)))
