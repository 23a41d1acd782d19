"""Initial values that are computed from other variables.

A session runs all initializers at the same time. A program may yet compute the initial value of a
variable from another variable: weight norm's `get_variable('g', initializer=tf.norm(v))`, or an
optimizer's `tf.Variable(p * 0)`. TensorFlow orders this for reference variables alone. Here such an
initial value is a copy of the program's computation, which reads in the place of the variable v

    v, where v is initialized;  the initial value of v, where it is not

so that the order of the initializers does not matter.
"""

import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import SharedVariableError
from towers.graph import graph_walk
from towers.graph.edit import tell_apart
from towers.graph.op_types import BRANCHES_V2, HAND_ON, LEAD_IN, SETS, VARIABLE_OPS
from towers.graph.variable_access import is_variable, variable_op
from towers.placement.variable_device import only_device

_IS_INITIALIZED = frozenset(['VarIsInitializedOp', 'IsVariableInitialized'])

_VALUE_OF_READER = {
    'ReadVariableOp': lambda op, value: value,
    'Identity': lambda op, value: value,  # of a reference variable
    'ResourceGather': lambda op, value: tf.gather(
        value, op.inputs[1], batch_dims=op.get_attr('batch_dims')),
    'ResourceGatherNd': lambda op, value: tf.gather_nd(value, op.inputs[1]),
    'VariableShape': lambda op, value: tf.shape(value, out_type=op.get_attr('out_type'))}
"""By the type of an operation that reads a variable: a function of the operation and of another
value of the variable, to what the operation gives for that value."""


def value_or_initial_value(variable: tf.Variable) -> tf.Tensor:
    """The value of a variable where it is initialized, and its initial value where it is not."""
    initializer = compat.initializer_of(variable)
    # The initializer's, since `tf.train.init_from_checkpoint` exchanges the initializer.
    initial_value = initializer.inputs[1] if initializer.type in SETS else variable.initial_value
    with tf.control_dependencies(None), only_device(variable.device), compat.control_flow_v1():
        value = tf.cond(tf.is_variable_initialized(variable), variable.read_value,
                        lambda: initial_value)
    value.set_shape(variable.get_shape())
    return value


def after_other_variables(initial_value: typing.Any, dtype: typing.Any = None) -> typing.Any:
    """The `initial_value` of a `tf.Variable`, or a function that makes it, such that the variables
    that it is computed from are initialized first.

    Raises `SharedVariableError` where a variable is read within a loop, a branch or a function.
    """
    if hasattr(initial_value, 'checkpoint_position'):  # TensorFlow's, of a deferred restore
        return initial_value
    if callable(initial_value):
        return lambda: after_other_variables(initial_value(), dtype)
    if isinstance(initial_value, compat.VARIABLE_TYPES):
        return value_or_initial_value(initial_value)
    if not isinstance(initial_value, tf.Tensor):
        if not graph_walk.fetches_in(initial_value):  # numbers
            return initial_value
        initial_value = tf.convert_to_tensor(initial_value, dtype=dtype)
    return _Computation(initial_value).that_can_be_first()


class _Computation:
    """The operations that compute an initial value, a tensor, and which of them read a variable.

    Where the value is computed in a branch (v1) in which the variable is made, no initializer can
    run these operations, and a copy is outside of that branch.
    """

    def __init__(self, tensor: tf.Tensor):
        self._tensor = tensor
        self._branches_to_leave = compat.contexts_around(tensor.op) if (
            compat.in_branches_alone(tensor.op)) else []
        self._operations = graph_walk.reached([tensor.op], self._computed_from)
        known = {variable.op.name: variable
                 for variable in tf.global_variables() + tf.local_variables()
                 if variable.initializer is not None}
        self._readers = {op.name: known[variable.name] for op in self._operations.values()
                         for variable in _variables_taken(op) if variable.name in known}

    def that_can_be_first(self) -> tf.Tensor:
        """The tensor, or a copy, that an initializer may compute before all others."""
        if not self._readers and not self._branches_to_leave:
            return self._tensor
        reading = [self._operations[name] for name in self._readers]
        for op in reading:
            self._check_is_known_read(op)
        variables = {variable.op.name: variable for variable in self._readers.values()}
        values = {name: value_or_initial_value(each) for name, each in variables.items()}
        instead = {}  # name of a reader's tensor: what is read in its place
        for op in reading:
            value = values[self._readers[op.name].op.name]
            instead[op.outputs[0].name] = _VALUE_OF_READER[op.type](op, value)
        if self._tensor.name in instead:
            return instead[self._tensor.name]
        depending = graph_walk.reachable_from(reading, self._operations.values())
        copied = [op for name, op in self._operations.items() if name not in self._readers and (
            name in depending or graph_walk.is_control_flow(op))]  # loops and branches as a whole
        return self._copy(copied, instead)

    def _computed_from(self, op):
        """The operations that an operation takes values of; in loops and branches (v1) those that
        it waits for, too, which tell it whether it is to run."""
        if op.type in VARIABLE_OPS:
            return []
        taken = [tensor.op for tensor in self._inputs(op)]
        if compat.in_control_flow(op) and not self._is_in_branch_to_leave(op):
            taken += op.control_inputs
        return taken

    def _inputs(self, op):
        """The inputs of an operation; those from outside of a branch that is left, from there."""
        inputs = []
        for tensor in op.inputs:
            while tensor.op.type in ('Switch', 'RefSwitch') and (
                    self._is_in_branch_to_leave(tensor.op)):
                tensor = tensor.op.inputs[0]
            inputs.append(tensor)
        return inputs

    def _is_in_branch_to_leave(self, op):
        return compat.control_flow_context(op) in self._branches_to_leave

    def _check_is_known_read(self, op):
        is_within = compat.in_control_flow(op) and not self._is_in_branch_to_leave(op)
        if is_within or op.type not in _VALUE_OF_READER:
            raise SharedVariableError(
                'the initial value of a variable is computed from another variable, which '
                'operation %s (%s) reads within a loop, a branch or a function, so that it may '
                "come before that variable is initialized: compute it from the other variable's "
                'initial_value.' % (op.name, op.type))

    def _copy(self, operations, instead):
        """A copy of the tensor and of the operations that compute it, with other tensors in place
        of some inputs: `instead` is a dict by their names."""
        tensor, graph, graph_def, outside = self._tensor, self._tensor.graph, tf.GraphDef(), {}
        graph_def.versions.CopyFrom(graph.graph_def_versions)
        names = {op.name: '%s_%d' % (op.name.split('/')[-1], number)
                 for number, op in enumerate(operations)}
        with tf.name_scope('from_initialized') as root:
            pass
        # In the order in which they were made, which an import of loops needs.
        in_order = [op for op in graph.get_operations() if op.name in names]
        for op in in_order:
            node = graph_def.node.add()
            node.CopyFrom(op.node_def)
            node.name = names[op.name]
            node.attr.pop('_class', None)  # what it is colocated with may be no part of the copy
            tell_apart(node, root)
            del node.input[:]
            for each in self._inputs(op):
                if each.op.name in names:
                    node.input.append('%s:%d' % (names[each.op.name], each.value_index))
                else:
                    key = '__outside__/%d:0' % len(outside)
                    outside[key] = instead.get(each.name, each)
                    node.input.append(key)
            node.input.extend('^' + names[other.name] for other in op.control_inputs
                              if other.name in names)
        result = '%s:%d' % (names[tensor.op.name], tensor.value_index)
        with tf.control_dependencies(None), compat.free_of_variable(graph):
            copy, = tf.import_graph_def(graph_def, outside, [result], name=root)
        copy.set_shape(tensor.shape)
        return copy


def _variables_taken(op):
    """The operations of the variables that an operation takes, but to hand them on, or where the
    program itself asks first whether they are initialized."""
    predicates = [predicate for predicate, _, _ in compat.branches_around(op)]
    if op.type in BRANCHES_V2:
        predicates.append(op.inputs[0])
    if op.type in _IS_INITIALIZED or any(
            graph_walk.behind(each, LEAD_IN).op.type in _IS_INITIALIZED for each in predicates):
        return []
    if op.type in HAND_ON and is_variable(op.outputs[0]):
        return []
    taken = [variable_op(tensor) for tensor in op.inputs if is_variable(tensor)]
    return [variable for variable in taken if variable is not None]
