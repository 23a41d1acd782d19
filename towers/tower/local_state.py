"""State: local variables that the forward pass writes, one set for each tower.

The state of an RNN that goes on from step to step belongs to one tower's part of the batch. The
first tower's state is the variable that the model makes, under the model's own name; tower k > 0
has `<name>_tower_<k>`, a local variable that starts with the same value. The graph of each tower is
finished with the first tower's variable in it, by a call or as a clone; then its reads and writes
are moved to the tower's own variable. So it does not matter which call made the variable, or
whether the model function keeps it from its first call.

Shared are: counters of `tf.metrics`, which count over all towers; global variables, unless they are
the state of a stateful Keras layer; and variables whose value is the same in every tower, such as a
count of steps.
"""

import collections

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import SharedVariableError
from towers.graph import graph_walk
from towers.graph.frames import Frames
from towers.graph.variable_access import VARIABLE_OPS, is_variable, read_from, variable_op
from towers.graph.variable_writes import Writes
from towers.placement.variable_device import only_device
from towers.tower.variables import owner_by_name


class OwnState:
    """The state variables of all towers.

    Attributes:
      variables: the state variables of the first tower.
      of_other_towers: the state variables of the other towers.
      not_in_step: names of operations that write state and that no step runs: the program runs
        them itself.
    """

    def __init__(self, num_towers, graph):
        self.variables = []
        self.of_other_towers = []
        self.not_in_step = []
        self._graph = graph
        self._num_towers = num_towers
        self._of_towers = {}  # name of the first tower's variable -> [variable of tower 1, 2, …]
        self._of_one_tower = []
        self._origin = {}  # name of another tower's variable -> the first tower's variable

    def find(self, operations, step, data_operations, counted, keras_states):
        """Finds the first tower's state among the variables it writes; makes the other towers'.

        Args:
          operations: the operations that the model function made.
          step: names of the operations that a step of this tower runs, its updates included.
          data_operations: names of the operations that depend on the tower's shard. An operation
            that writes such a value is run by the step, or else by the program itself.
          counted: names of the operations that `(value, update_op)` metrics run: their counters are
            shared.
          keras_states: variables that Keras layers call their state.
        """
        choices = _choices(keras_states)
        initializers = {compat.initializer_of(variable).name for variable in choices.values()}
        finder, writes = Writes(self._graph), collections.OrderedDict()
        for op in operations:
            if op.name in initializers or op.name not in step and (
                    op.name in counted or op.name not in data_operations):
                continue
            for name in finder.of(op):
                if name in choices:
                    writes.setdefault(name, []).append(op)
        made = {op.name for op in operations}
        names, before = set(), None
        while before != len(names):  # state may follow from other state
            before = len(names)
            names.update(name for name, ops in writes.items() if name not in names and any(
                compat.in_control_flow(op) or finder.within_function(op)
                or _differs(op, made, data_operations, names) for op in ops))
        if self._num_towers == 1:  # nothing is to be done about it
            self._of_one_tower = [choices[name] for name in writes if name in names]
            return
        there = {variable.op.name: variable for variable in tf.local_variables()}
        for name in writes:
            if name in names and name not in self._of_towers:
                self._make(choices[name], there)
        self.not_in_step = [op.name for name in names for op in writes[name]
                            if op.name not in step]

    def _make(self, variable, there):
        self.variables.append(variable)
        others = [_there_or_new(variable, tower, there)
                  for tower in range(1, self._num_towers)]
        self._of_towers[variable.op.name] = others
        self._origin.update((other.op.name, variable) for other in others)
        self.of_other_towers += others

    def of_tower(self, variable, tower):
        """Tower number `tower`'s state for the first tower's variable; a shared variable as is."""
        others = self._of_towers.get(variable.op.name) if tower else None
        return others[tower - 1] if others else variable

    def of_all_towers(self):
        """List of the variables of all towers, by variable and then by tower."""
        return self._of_one_tower + [
            each for variable in self.variables
            for each in [variable] + self._of_towers[variable.op.name]]

    def originals(self, variables):
        """The first tower's variables for these variables of any tower, each once."""
        return list({v.op.name: v for v in (
            self._origin.get(each.op.name, each) for each in variables)}.values())

    def is_state(self, variable):
        return variable.op.name in self._of_towers

    def counterpart(self, tensor, tower):
        """The tensor that tower number `tower` reads in place of one from outside of the towers.

        Args:
          tensor: a tensor that was made before that tower.
          tower: its number, from 1.

        Returns:
          For the first tower's variable, that tower's variable; for the first tower's value, that
          tower's value; else the tensor itself.

        Raises:
          SharedVariableError: the tensor was computed from the first tower's state.
        """
        sources = [op.name for op in read_from(tensor) if op.name in self._of_towers]
        if not sources:
            return tensor
        other = self._of_towers[sources[0]][tower - 1]
        if variable_op(tensor) is not None:
            return other.op.outputs[0]
        if len(sources) == 1 and tensor.shape.is_compatible_with(other.shape):
            return other.value()
        raise SharedVariableError(
            'variable %s is state of each tower, and %s, made from it before tower %d, is of the '
            'first: read it within the model function.' % (sources[0], tensor.name, tower))

    def move_to(self, tower, operations):
        """Makes finished operations of tower number `tower` read and write that tower's state.

        Args:
          tower: the tower's number, from 1.
          operations: the operations that the tower's call of the model function made.
        """
        if not self._of_towers:
            return
        made = {op.name for op in operations}
        with tf.control_dependencies(None):
            for op in operations:
                for position, tensor in enumerate(op.inputs):
                    if tensor.op.name not in made:
                        other = self.counterpart(tensor, tower)
                        if other is not tensor:
                            compat.replace_input(op, position, other)
                groups = [group.decode()[len('loc:@'):] for group in op.colocation_groups()]
                if any(name in self._of_towers for name in groups):
                    compat.set_colocation(op, [('loc:@' + self._name_in(name, tower)).encode()
                                               for name in groups])

    def operations_of(self, tower):
        """{name of an operation of the first tower's state: the operation of that tower's}."""
        return {name: others[tower - 1].op for name, others in self._of_towers.items()}

    def updates(self, towers):
        """The updates of the towers after the first that write these towers' own state."""
        writes, found = Writes(self._graph), []
        names = {other.op.name for other in self.of_other_towers}
        for tower in towers[1:] if names else ():
            frames = Frames(graph_walk.step_operations(tower.updates))
            for update in tower.updates:
                for op in graph_walk.step_operations([update]):
                    if names.intersection(writes.of(op)):
                        found += frames.ends(op) or [getattr(update, 'op', update)]
        return sorted(set(found), key=lambda op: op.name)

    def slot_creator(self, next_creator, **kwargs):
        """A creator for `tf.variable_creator_scope`: slots of other towers' state are local."""
        by_name = {variable.op.name: variable for variable in self.of_other_towers + self.variables}
        owner = owner_by_name(kwargs.get('name') or '', by_name)
        if owner is not None and owner.op.name in self._origin:
            kwargs.update(collections=[tf.GraphKeys.LOCAL_VARIABLES], trainable=False)
        return next_creator(**kwargs)

    def _name_in(self, name, tower):
        return self._of_towers[name][tower - 1].op.name if name in self._of_towers else name


def _choices(keras_states):
    """{name: variable} of the variables that may be state.

    These are local variables that are no counters of metrics, and the state of Keras layers.
    """
    shared = {id(variable) for key in (tf.GraphKeys.METRIC_VARIABLES, tf.GraphKeys.GLOBAL_VARIABLES)
              for variable in tf.get_collection(key)}
    choices = {v.op.name: v for v in tf.local_variables() if id(v) not in shared}
    choices.update((variable.op.name, variable) for variable in keras_states)
    return choices


def _differs(op, made, data_operations, state):
    """Whether the value that an operation writes may differ from tower to tower.

    It does not differ if it is computed from constants and shared variables only: a counter of
    steps is the same for all towers.
    """
    stack, seen = [op], {op.name}
    while stack:
        op = stack.pop()
        if op.name in data_operations or op.name in state:
            return True
        if op.name not in made or op.type in VARIABLE_OPS:
            continue
        if op.op_def.is_stateful and not any(is_variable(tensor) for tensor in op.inputs):
            return True  # it may draw random numbers or examples
        others = [tensor.op for tensor in op.inputs]
        if compat.in_control_flow(op):
            others += op.control_inputs  # which branch is taken
        for other in others:
            if other.name not in seen:
                seen.add(other.name)
                stack.append(other)
    return False


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
