"""State: local variables that the forward pass writes, one set for each tower.

The state of an RNN that goes on from step to step belongs to one tower's part of the batch. The
first tower's state is the variable that the model makes, under the model's own name; tower k > 0
has `<name>_tower_<k>`, a local variable that starts with the same value, which its copy of the
graph reads and writes in place of the first tower's (`Substitution`).

Shared are: counters of `tf.metrics`, which count over all towers; global variables, unless they are
the state of a stateful Keras layer; and variables whose value is the same in every tower, such as a
count of steps.
"""

import collections

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import SharedVariableError
from towers.graph import graph_walk
from towers.graph.op_types import VARIABLE_OPS
from towers.graph.variable_access import is_variable
from towers.graph.variable_writes import Writes
from towers.placement.variable_device import only_device


class OwnState(collections.namedtuple('OwnState', 'variables of_towers of_one_tower')):
    """The state variables of all towers.

    Attributes:
      variables: the state variables of the first tower.
      of_towers: dict from the name of each to the variables of tower 1, 2, …
      of_one_tower: the state variables where there is one tower, about which nothing is to be done.
    """
    __slots__ = ()

    @property
    def of_other_towers(self):
        """List of the state variables of the towers after the first."""
        return sum(self.of_towers.values(), [])

    def in_tower(self, tower):
        """{name of a state variable: the variable of tower number `tower`, from 1}."""
        return {name: others[tower - 1] for name, others in self.of_towers.items()}

    def of_all_towers(self):
        """List of the variables of all towers, by variable and then by tower."""
        return self.of_one_tower + [
            each for variable in self.variables
            for each in [variable] + self.of_towers[variable.op.name]]


def own_state(recorded, step, counted, num_towers):
    """Finds the first tower's state among the variables it writes; makes the others': `OwnState`.

    Args:
      recorded: `Recorded`. An operation that writes what depends on the shard is run by the step,
        or else by the program itself.
      step: names of the operations that a step of this tower runs, its updates included.
      counted: names of the operations that `(value, update_op)` metrics run: their counters are
        shared.
      num_towers: how many towers there are.

    Raises:
      SharedVariableError: state that is trained; or a write of state that the step does not run.
    """
    choices, from_shard = _choices(recorded.keras_states), recorded.from_shard
    initializers = {compat.initializer_of(variable).name for variable in choices.values()}
    graph, writes = tf.get_default_graph(), collections.OrderedDict()
    finder = Writes(graph)
    for op in recorded.operations:
        if op.name in initializers or op.name not in step and (
                op.name in counted or op.name not in from_shard):
            continue
        for name in finder.of(op):
            if name in choices:
                writes.setdefault(name, []).append(op)
    if not writes:
        return OwnState([], {}, [])
    # What is computed from constants and shared variables alone, as a counter of steps is, is the
    # same in all towers; what has state otherwise may draw random numbers or examples.
    differing = [graph.get_operation_by_name(name) for name in from_shard] + [
        op for op in recorded.operations if op.op_def.is_stateful
        and op.type not in VARIABLE_OPS and not any(map(is_variable, op.inputs))]
    names, before = set(), None
    while before != len(names):  # state may follow from other state
        before = len(names)
        reached = graph_walk.reachable_from(
            differing + [choices[name].op for name in names], recorded.operations,
            control=compat.in_control_flow)  # which branch is taken
        names.update(name for name, ops in writes.items() if any(
            compat.in_control_flow(op) or finder.within_function(op) or op.name in reached
            for op in ops))
    variables = [choices[name] for name in writes if name in names]
    if num_towers == 1:
        return OwnState([], {}, variables)
    there = {variable.op.name: variable for variable in tf.local_variables()}
    of_towers = collections.OrderedDict(
        (variable.op.name, [_there_or_new(variable, tower, there)
                            for tower in range(1, num_towers)]) for variable in variables)
    not_in_step = [op.name for name in names for op in writes[name] if op.name not in step]
    if not_in_step:
        raise SharedVariableError(
            'operation %s, which the step does not run, writes state of a tower, and there are '
            '%d towers: return it in updates, or put it into UPDATE_OPS.' % (
                not_in_step[0], num_towers))
    for variable in variables:
        if any(variable is each for each in tf.trainable_variables()):
            raise SharedVariableError(
                'variable %s is state that each tower has of its own, since the forward pass '
                'writes it, and it is trained, which all towers do together: make it with '
                'trainable=False.' % variable.op.name)
    return OwnState(variables, of_towers, [])


def _choices(keras_states):
    """{name: variable} of the variables that may be state.

    These are local variables that are no counters of metrics, and the state of Keras layers.
    """
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
    with tf.control_dependencies(None), tf.name_scope(None), only_device(variable.device or None):
        other = tf.Variable(
            variable.initial_value, trainable=False, name=name,
            collections=[tf.GraphKeys.LOCAL_VARIABLES], dtype=variable.dtype.base_dtype,
            use_resource=variable.op.type == 'VarHandleOp',
            validate_shape=variable.shape.is_fully_defined())
        compat.initialize_with(other, variable.initial_value)
    return other
