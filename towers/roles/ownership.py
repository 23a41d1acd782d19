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
from towers.optimizers import OPTIMIZER_UPDATES
from towers.roles.inline_updates import InlineUpdates, Write, inline_updates, writes_by, writes_of
from towers.roles.own_state import find_own_state, make_own_state
from towers.roles.written_values import written_by_every_tower

FIRST = 'first'  # tower 0 writes for all
EVERY = 'every'  # every tower writes, in turn
OWN = 'own'  # one variable for each tower
METRIC = 'metric'  # every tower adds to the counters of a `(value, update_op)`

_IN_WORDS = collections.OrderedDict([
    (FIRST, 'averages and counters'),
    (EVERY, 'rows and counts of examples'),
    (OWN, 'state'),
    (METRIC, 'metrics')])
"""What the plan calls the variables of a role, which a step writes before the update."""


class Roles(typing.NamedTuple):
    """The role of each variable for the towers.

    Attributes:
      trained: {name of an objective: list of the variables that its loss trains}.
      written: {name of a variable that a step writes before the update: its role}; of several roles
        the first of `OWN`, `METRIC`, `EVERY`, `FIRST`.
      own_state: {name of a local variable that the forward pass writes: list of the variables
        of the towers, the first is the model's own}.
      inline_updates: shared variables that the forward pass writes.
      replicas: `Replicas` of the trained variables; or None.
    """
    trained: typing.Dict[typing.Optional[str], typing.List[tf.Variable]]
    written: typing.Dict[str, str]
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
        """{name of a variable: the variable of part number `part`, among the micro-batches of all
        towers}; each tower has so many `micro_batches`."""
        variables = {}
        if self.replicas is not None:
            variables.update(self.replicas.in_tower(part // micro_batches))
        for name, of_towers in self.own_state.items():
            variables[name] = of_towers[part]
        return variables

    def own_variables(self, first: int = 0) -> typing.List[tf.Variable]:
        """List of the state of tower number `first` and of the towers after it, by variable."""
        return sum([of_towers[first:] for of_towers in self.own_state.values()], [])

    def describe(self, request: typing.Any) -> typing.Optional[str]:
        """The plan's line: who writes what, in the build of a `Request`; None where the update
        alone writes."""
        if not self.written:
            return None
        part = 'tower' if request.split.accumulate == 1 else 'micro-batch'
        writers = {
            FIRST: _WRITERS[request.training.update_ops],
            EVERY: 'every tower, one after the other',
            METRIC: 'every tower adds to',
            OWN: 'each %s its own' % part}
        together = 'all towers together'
        if self.replicas is not None:
            together += ', a replica each'
        rows = [(together, len(self.trainable), 'trained')]
        for role, called in _IN_WORDS.items():
            rows.append((writers[role], len(self.names(role)), called))
        return '; '.join('%s: %d %s' % row for row in rows if row[1])


_WRITERS = {'first': 'tower 0 alone', 'none': 'nobody', 'all': 'every tower'}
"""By `update_ops=`: who writes the variables of the role `FIRST`."""


class _Runs(typing.NamedTuple):
    """Names of the operations of the model function that are run, by what runs them.

    Attributes:
      forward: the results of the model function, but for updates and metrics that are pairs.
      step: these, and the updates.
      counted: the update_ops of metrics.
      in_build: what the build runs by itself: the step, but in an evaluation no updates.
    """
    forward: typing.Set[str]
    step: typing.Set[str]
    counted: typing.Set[str]
    in_build: typing.Set[str]


def ownership(recorded: Recorded, request: typing.Any,
              trained: typing.Dict[typing.Optional[str], typing.List[tf.Variable]],
              further_fetches: typing.Sequence = (),
              make_replicas: typing.Optional[typing.Callable] = None) -> Roles:
    """Finds the role of each variable; then makes the towers' own variables, and takes writes that
    become updates out of the forward pass.

    Args:
      recorded: the forward pass of tower 0.
      request: `Request` of the build.
      trained: {name of an objective: list of the variables that its loss trains}.
      further_fetches: tensors and operations that the step runs and the model function did not
        return: its optimizer calls.
      make_replicas: function of variables and devices, where trained variables have replicas.

    Raises:
      SharedVariableError: a write that is no tower's.
      GradientError: the model function trains by itself.
    """
    scalars, _ = metrics_by_kind(recorded.output.metrics)
    fetches = fetches_of(recorded.output._replace(metrics=scalars)) + list(further_fetches)
    runs = _runs(recorded, fetches, bool(request.training.objectives))
    writes = writes_of(recorded)
    has_call_for_each_tower = request.call.copies == 'reuse'
    if has_call_for_each_tower:
        _check_not_written(writes_by(writes, runs.forward | runs.counted), 'the forward pass')
    if request.training.objectives.optimizer_calls is None:
        _check_trains_nothing(writes_by(writes, runs.in_build))
    # What is whose?
    state_writes = find_own_state(recorded, writes, runs.step, runs.counted)
    counters = set(metric_variables())
    for write in writes_by(writes, runs.counted - runs.step):
        counters.update(write.variables)
    shared = _without(writes, state_writes.keys() | counters)
    every = written_by_every_tower(recorded, writes_by(shared, runs.in_build), request)
    if has_call_for_each_tower:
        of_every = [write for write in writes if every.intersection(write.variables)]
        _check_not_written(of_every, 'an update by the examples')
    # With copies='reuse' all calls share one variable, so that nothing is a tower's own.
    has_own_state = request.parts_a_call == len(request.split.parts)
    written = _roles_of(writes_by(writes, runs.step | runs.counted),
                        {OWN: state_writes.keys() if has_own_state else (),
                         METRIC: counters, EVERY: every})
    # From here on variables are made, and the forward pass is changed.
    own_state = make_own_state(recorded, state_writes, runs.step, request.parts_a_call)
    replicas = None
    replicated: typing.FrozenSet[str] = frozenset()
    if make_replicas is not None:
        replicas = make_replicas(recorded.variables, request.devices)
        replicated = frozenset(replicas.of_variable)
    first_writes = writes_by(_without(shared, every), runs.forward)
    updates = inline_updates(first_writes, recorded.operations, fetches, request, replicated)
    return Roles(trained, written, own_state, updates, replicas)


def _runs(recorded: Recorded, fetches: list, is_trained: bool) -> _Runs:
    """The operations that are run, where a step fetches `fetches` besides updates and metrics."""
    _, pairs = metrics_by_kind(recorded.output.metrics)
    forward = names_of(step_operations(fetches))
    step = names_of(step_operations(fetches + recorded.updates))
    counted = names_of(step_operations([update for _, update in pairs]))
    return _Runs(forward, step, counted, in_build=step if is_trained else forward)


def _without(writes: typing.Iterable[Write],
             names: typing.Container[str]) -> typing.List[Write]:
    """The writes of other variables than those of these names."""
    others = []
    for write in writes:
        variables = [variable for variable in write.variables if variable not in names]
        if variables:
            others.append(Write(write.op, variables))
    return others


def _roles_of(writes: typing.Iterable[Write],
              names_by_role: typing.Dict[str, typing.Container[str]]) -> typing.Dict[str, str]:
    """{name of a written variable: its role}: the first whose names it is among, else `FIRST`."""
    written = {}
    for write in writes:
        for variable in write.variables:
            roles = [role for role, names in names_by_role.items() if variable in names]
            written[variable] = roles[0] if roles else FIRST
    return written


def _check_not_written(writes: typing.Iterable[Write], called: str) -> None:
    """Refuses writes that each of several calls of the model function would make to a variable that
    they share; errors say what writes, which is `called` so."""
    for op, names in writes:
        raise SharedVariableError(
            "copies='reuse', and %s writes variable %s (operation %s), which all towers have in "
            'common: put the update into the collection UPDATE_OPS, unless it counts or stores '
            "examples, or pass copies='clone'." % (called, names[0], op.name))


OF_GRADIENTS = re.compile(r'(^|/)gradients(_\d+)?/')
"""The name scope of the operations that `tf.gradients` makes."""


def _check_trains_nothing(writes: typing.Iterable[Write]) -> None:
    """Refuses writes that train a variable within a tower: by an operation of TensorFlow's
    optimizers, or of a trainable variable by gradients (`tf.gradients`)."""
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
    """Whether what an operation writes to the variable of that name is computed from gradients."""
    values = [tensor for tensor in op.inputs if tensor.op.name != variable]
    return any(map(OF_GRADIENTS.search, ancestors(values)))
