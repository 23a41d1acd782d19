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

from towers.errors import GradientError, SharedVariableError
from towers.graph import graph_walk
from towers.graph.variable_access import metric_variables
from towers.model.outputs import fetches_of, metrics_by_kind
from towers.optimizers import OPTIMIZER_UPDATES
from towers.roles.inline_updates import inline_updates, writes_of
from towers.roles.written_values import written_by_every_tower
from towers.variables.new_variables import local_variable

FIRST, EVERY, OWN, METRIC = 'first', 'every', 'own', 'metric'
_IN_WORDS = collections.OrderedDict([
    (FIRST, 'averages and counters'),  # tower 0 writes for all
    (EVERY, 'rows and counts of examples'),  # every tower writes, in turn
    (OWN, 'state'),  # one for each tower
    (METRIC, 'metrics')])  # every tower adds to the counters of a `(value, update_op)`
"""The roles of variables that a step writes before the update."""


class Roles(collections.namedtuple('Roles', 'trained written own_state inline_updates replicas')):
    """The role of each variable for the towers.

    Attributes:
      trained: {name of an objective: list of the variables that its loss trains}.
      written: {name of a variable that a step writes before the update: its role}; of several roles
        the first of `OWN`, `METRIC`, `EVERY`, `FIRST`.
      own_state: {name of a local variable that the forward pass writes: list of the variables
        of the towers, the first is the model's own}.
      inline_updates: `InlineUpdates`: shared variables that the forward pass writes.
      replicas: `Replicas` of the trained variables; or None.
    """
    __slots__ = ()

    @property
    def trainable(self) -> list:
        """List of the variables that are trained, each once."""
        return list({each.op.name: each for some in self.trained.values()
                     for each in some}.values())

    def names(self, role: str) -> typing.List[str]:
        """Sorted list of the names of the variables of a role."""
        return sorted(name for name, each in self.written.items() if each == role)

    def in_tower(self, part: int, micro_batches: int) -> dict:
        """{name of a variable: the variable of part number `part`, among the micro-batches of all
        towers}."""
        found = {} if self.replicas is None else self.replicas.in_tower(part // micro_batches)
        found.update((name, of_towers[part]) for name, of_towers in self.own_state.items())
        return found

    def own_variables(self, first: int = 0) -> list:
        """List of the state of tower number `first` and of the towers after it, by variable."""
        return [each for of_towers in self.own_state.values() for each in of_towers[first:]]

    def describe(self, request: typing.Any) -> typing.Optional[str]:
        """The plan's line: who writes what; None where the update alone writes."""
        if not self.written:
            return None
        who = {FIRST: {'first': 'tower 0 writes', 'none': 'not written',
                       'all': 'every tower writes'}[request.training.update_ops],
               EVERY: 'every tower writes, in turn', METRIC: 'every tower adds',
               OWN: 'one per %s' % ('tower' if request.split.accumulate == 1 else 'micro-batch')}
        rows = [('trained', 'all towers' if self.replicas is None else 'a replica per tower',
                 len(self.trainable))] + [(_IN_WORDS[role], who[role], len(self.names(role)))
                              for role in _IN_WORDS]
        return '; '.join('%s: %s, %d' % row for row in rows if row[2])


def ownership(recorded, request, trained, taken=(), make_replicas=None):
    """Finds the role of each variable; makes replicas and the towers' own state: `Roles`.

    `taken` are tensors and operations that the step runs
    and the model function did not return: its optimizer calls. `make_replicas` is a function of
    variables and devices, or None.
    """
    scalars, pairs = metrics_by_kind(recorded.output.metrics)
    fetches = fetches_of(recorded.output._replace(metrics=scalars)) + list(taken)
    forward, step, counted = [{op.name for op in graph_walk.step_operations(each)} for each in (
        fetches, fetches + recorded.updates, [update for _, update in pairs])]
    runs = step if request.training.objectives else forward  # no step runs updates in an evaluation
    writes, is_recipe = writes_of(recorded), request.call.copies == 'reuse'
    if is_recipe:
        _check_recipe([each for each in writes if each.op.name in forward | counted],
                      'the forward pass')
    of_metrics = set(metric_variables()).union(*(
        write.variables for write in writes if write.op.name in counted - step))
    if request.training.objectives.optimizer_calls is None:
        _check_trains_nothing(writes, runs)
    state = _own_state(recorded, writes, step, counted, request.parts_a_call)
    replicas = None if make_replicas is None else make_replicas(
        recorded.variables, request.devices)
    shared = _without(writes, state.keys() | of_metrics)
    every = written_by_every_tower(
        recorded, [write for write in shared if write.op.name in runs], request)
    if is_recipe:
        _check_recipe([each for each in writes if every.intersection(each.variables)],
                      'an update by the examples')
    updates = inline_updates(
        [write for write in _without(shared, every) if write.op.name in forward],
        recorded.operations, fetches, request,
        frozenset(() if replicas is None else replicas.of_variable))
    # With copies='reuse' all calls share one variable, so that nothing is a tower's own.
    roles = [(state if request.parts_a_call == len(request.split.parts) else (), OWN),
             (of_metrics, METRIC), (every, EVERY)]
    written = {name: next((role for names, role in roles if name in names), FIRST)
               for write in writes if write.op.name in step | counted for name in write.variables}
    return Roles(trained, written, state, updates, replicas)


def _check_recipe(writes, called):
    """Refuses writes of variables that towers share by their names, each a call of its own."""
    for op, names in writes:
        raise SharedVariableError(
            "copies='reuse', and %s writes variable %s (operation %s), which all towers have in "
            'common: put the update into the collection UPDATE_OPS, unless it counts or stores '
            "examples, or pass copies='clone'." % (called, names[0], op.name))


def _without(writes, names):
    """The writes of other variables than these."""
    left = [write._replace(variables=[each for each in write.variables if each not in names])
            for write in writes]
    return [write for write in left if write.variables]


def _own_state(recorded, writes, step, counted, num_towers):
    """Makes the other towers' state beside the first one's: as of `Roles`. A write that depends on
    the shard makes the variable the tower's own, whoever runs it. A write that only an update_op of
    a metric runs, `counted`, leaves it shared."""
    choices, of_state = _choices(recorded.keras_states), collections.OrderedDict()
    for op, names in writes:
        if op.name in step or op.name not in counted and op.name in recorded.from_shard:
            for name in [each for each in names if each in choices]:
                of_state.setdefault(name, []).append(op)
    if num_towers > 1:
        _check_state(choices, of_state, step, num_towers)
    there = {variable.op.name: variable for variable in tf.local_variables()}
    return collections.OrderedDict(
        (name, [choices[name]] + [_there_or_new(choices[name], tower, there)
                                  for tower in range(1, num_towers)]) for name in of_state)


def _check_state(choices, of_state, step, num_towers):
    trainable = set(map(id, tf.trainable_variables()))
    for name, writers in of_state.items():
        for op in writers:
            if op.name not in step:
                raise SharedVariableError(
                    'operation %s, which the step does not run, writes state of a tower, and there '
                    'are %d towers: return it in updates, or put it into UPDATE_OPS.' % (
                        op.name, num_towers))
        if id(choices[name]) in trainable:
            raise SharedVariableError(
                'variable %s is state that each tower has of its own, since the forward pass '
                'writes it, and it is trained, which all towers do together: make it with '
                'trainable=False.' % name)


def _choices(keras_states):
    """{name: variable} of variables that may be state: local variables, but no counters of metrics,
    and the state of Keras layers."""
    shared = {id(variable) for key in (tf.GraphKeys.METRIC_VARIABLES, tf.GraphKeys.GLOBAL_VARIABLES)
              for variable in tf.get_collection(key)}
    choices = {v.op.name: v for v in tf.local_variables() if id(v) not in shared}
    choices.update((variable.op.name, variable) for variable in keras_states)
    return choices


def _there_or_new(variable, tower, there):
    """A tower's own variable: one that an earlier build made for the same state, or a new one."""
    name = '%s_tower_%d' % (variable.op.name, tower)
    found = there.get(name)
    if found is not None and found.shape == variable.shape and found.dtype == variable.dtype:
        return found
    return local_variable(variable, name, variable.initial_value, variable.initial_value,
                          variable.device or None, trainable=False)


OF_GRADIENTS = re.compile(r'(^|/)gradients(_\d+)?/')
"""The name scope of the operations that `tf.gradients` makes."""


def _check_trains_nothing(writes, step):
    """Refuses a step that trains a variable within a tower: by an operation of TensorFlow's
    optimizers, or any write of a trainable variable by gradients (`tf.gradients`)."""
    trainable = {variable.op.name for variable in tf.trainable_variables()}
    for op, names in writes:
        for name in trainable.intersection(names) if op.name in step else ():
            if OPTIMIZER_UPDATES.search(op.type) or any(map(
                    OF_GRADIENTS.search, graph_walk.ancestors(
                        [tensor for tensor in op.inputs if tensor.op.name != name]))):
                raise GradientError(
                    'the model function trains %r by the update %r, which a step would run in a '
                    'tower, by the gradient of its part of the batch alone: leave the update out '
                    'and pass the optimizer to build_towers; for several losses a dict of '
                    'optimizers by name.' % (name, op.name))
