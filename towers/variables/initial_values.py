"""Initial values that are computed from other variables.

A session runs all initializers at the same time. A program may yet compute the initial value of a
variable from another variable: weight norm's `get_variable('g', initializer=tf.norm(v))`, or an
optimizer's `tf.Variable(p * 0)`. TensorFlow orders this only for reference variables. Here such an
initial value is a copy of the program's computation, which reads in the place of the variable v

    v, where v is initialized;  the initial value of v, where it is not

so that the order of the initializers does not matter.
"""

import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import SharedVariableError
from towers.graph import graph_walk
from towers.graph.edit import make_names_unique
from towers.graph.op_types import BRANCHES_V2, HAND_ON, LEAD_IN, SETS, VARIABLE_OPS
from towers.graph.variable_access import is_variable, variable_op
from towers.placement.variable_device import only_device

_IS_INITIALIZED = frozenset(['VarIsInitializedOp', 'IsVariableInitialized'])


def _whole_value(op: tf.Operation, value: tf.Tensor) -> tf.Tensor:
    """The result of a read of the variable, if it had another value."""
    return value


def _rows(op: tf.Operation, value: tf.Tensor) -> tf.Tensor:
    """The result of a look-up of rows, if the variable had another value."""
    return tf.gather(value, op.inputs[1], batch_dims=op.get_attr('batch_dims'))


def _entries(op: tf.Operation, value: tf.Tensor) -> tf.Tensor:
    """The result of a look-up of entries, if the variable had another value."""
    return tf.gather_nd(value, op.inputs[1])


def _shape(op: tf.Operation, value: tf.Tensor) -> tf.Tensor:
    """The result of an operation that asks for the shape, if the variable had another value."""
    return tf.shape(value, out_type=op.get_attr('out_type'))


_VALUE_OF_READER = {
    'ReadVariableOp': _whole_value,
    'Identity': _whole_value,  # of a reference variable
    'ResourceGather': _rows,
    'ResourceGatherNd': _entries,
    'VariableShape': _shape}
"""{type of an operation that reads a variable: function `(op, value)` that makes the result which
the operation would have, if the variable had that value}."""


def value_or_initial_value(variable: tf.Variable) -> tf.Tensor:
    """Makes a tensor that has the value of a variable, if this is initialized when the tensor is
    computed, else the variable's initial value."""
    initializer = compat.initializer_of(variable)
    if initializer.type in SETS:
        # `tf.train.init_from_checkpoint` changes the initializer, but not `initial_value`.
        initial_value = initializer.inputs[1]
    else:
        initial_value = variable.initial_value
    with tf.control_dependencies(None), only_device(variable.device), compat.control_flow_v1():
        value = tf.cond(tf.is_variable_initialized(variable), variable.read_value,
                        lambda: initial_value)
    value.set_shape(variable.get_shape())
    return value


def after_other_variables(initial_value: typing.Any, dtype: typing.Any = None) -> typing.Any:
    """Makes an initial value that can be computed before the other variables are initialized.

    Args:
      initial_value: the argument of `tf.Variable`: a value, or a function that makes one.
      dtype: the dtype of the variable; or None.

    Returns:
      The same value or function, if it needs no other variables; else one in its place.

    Raises:
      SharedVariableError: a variable is read within a loop, a branch or a function.
    """
    if hasattr(initial_value, 'checkpoint_position'):  # a restore that TensorFlow has put off
        return initial_value
    if callable(initial_value):
        return lambda: after_other_variables(initial_value(), dtype)
    if isinstance(initial_value, compat.VARIABLE_TYPES):
        return value_or_initial_value(initial_value)
    if not isinstance(initial_value, tf.Tensor):
        if not graph_walk.fetches_in(initial_value):  # numbers
            return initial_value
        initial_value = tf.convert_to_tensor(initial_value, dtype=dtype)
    return _Computation(initial_value).in_any_order()


class _Computation:
    """The operations that compute an initial value, and which of them read other variables.

    If a variable is made in a branch (v1), and its initial value is computed there, no initializer
    can run these operations: a copy is made outside of that branch.
    """

    def __init__(self, tensor: tf.Tensor):
        """`tensor` is the initial value."""
        self._tensor = tensor
        self._branches_to_leave: list = []
        if compat.in_branches_alone(tensor.op):
            self._branches_to_leave = compat.contexts_around(tensor.op)
        self._operations = graph_walk.reached([tensor.op], self._computed_from)
        self._readers = self._found_readers()

    def _found_readers(self) -> typing.Dict[str, tf.Variable]:
        """{name of an operation: the variable that it reads}, of variables with an initializer."""
        taken_by = {}
        for op in self._operations.values():
            taken = _variables_taken(op)
            if taken:
                taken_by[op.name] = taken
        if not taken_by:
            return {}  # of most variables; the rest takes time with the number of variables
        variables = {}
        for variable in tf.global_variables() + tf.local_variables():
            if variable.initializer is not None:
                variables[variable.op.name] = variable
        readers = {}
        for name, taken in taken_by.items():
            for variable_operation in taken:
                if variable_operation.name in variables:
                    readers[name] = variables[variable_operation.name]
        return readers

    def in_any_order(self) -> tf.Tensor:
        """The initial value as a tensor that initializers may compute in any order.

        That is the tensor itself, if it needs no other variable; else a copy. Only operations
        between a read and the tensor are copied; the others, such as random numbers, are shared
        with the program's own computation.

        Raises:
          SharedVariableError: a variable is read within a loop, a branch or a function.
        """
        if not self._readers and not self._branches_to_leave:
            return self._tensor
        for name in self._readers:
            self._check_is_known_read(self._operations[name])
        substitutes = self._values_for_readers()
        if self._tensor.name in substitutes:
            return substitutes[self._tensor.name]
        reading = [self._operations[name] for name in self._readers]
        from_readers = graph_walk.reachable_from(reading, self._operations.values())
        copied = []
        for name, op in self._operations.items():
            # Loops and branches are copied as a whole.
            is_needed = name in from_readers or graph_walk.is_control_flow(op)
            if is_needed and name not in self._readers:
                copied.append(op)
        return self._copy(copied, substitutes)

    def _values_for_readers(self) -> typing.Dict[str, tf.Tensor]:
        """{name of a tensor that was read from a variable: what a copy takes in its place}."""
        values: typing.Dict[str, tf.Tensor] = {}  # by name of the variable
        substitutes = {}
        for name, variable in self._readers.items():
            if variable.op.name not in values:
                values[variable.op.name] = value_or_initial_value(variable)
            op = self._operations[name]
            make_result = _VALUE_OF_READER[op.type]
            substitutes[op.outputs[0].name] = make_result(op, values[variable.op.name])
        return substitutes

    def _computed_from(self, op: tf.Operation) -> typing.List[tf.Operation]:
        """List of the operations that an operation takes values of; in loops and branches (v1) also
        those that it waits for, which tell it whether it is to run."""
        if op.type in VARIABLE_OPS:
            return []
        sources = [tensor.op for tensor in self._inputs(op)]
        if compat.in_control_flow(op) and not self._is_in_branch_to_leave(op):
            sources += op.control_inputs
        return sources

    def _inputs(self, op: tf.Operation) -> typing.List[tf.Tensor]:
        """List of the inputs of an operation. In the place of a tensor that leads into a branch
        which the copy is outside of, it has the tensor outside of the branch."""
        inputs = []
        for tensor in op.inputs:
            while self._leads_into_branch_to_leave(tensor.op):
                tensor = tensor.op.inputs[0]
            inputs.append(tensor)
        return inputs

    def _leads_into_branch_to_leave(self, op: tf.Operation) -> bool:
        """Whether an operation leads a tensor into a branch that the copy is outside of."""
        return op.type in ('Switch', 'RefSwitch') and self._is_in_branch_to_leave(op)

    def _is_in_branch_to_leave(self, op: tf.Operation) -> bool:
        """Whether an operation is in a branch that the copy is outside of."""
        return compat.control_flow_context(op) in self._branches_to_leave

    def _check_is_known_read(self, op: tf.Operation) -> None:
        """Raises `SharedVariableError` for a read that has no entry in `_VALUE_OF_READER`, or is
        within a loop or a branch."""
        is_within = compat.in_control_flow(op) and not self._is_in_branch_to_leave(op)
        if is_within or op.type not in _VALUE_OF_READER:
            raise SharedVariableError(
                'the initial value of a variable is computed from another variable, which '
                'operation %s (%s) reads within a loop, a branch or a function, so that it may '
                "come before that variable is initialized: compute it from the other variable's "
                'initial_value.' % (op.name, op.type))

    def _copy(self, operations: typing.Sequence[tf.Operation],
              substitutes: typing.Dict[str, tf.Tensor]) -> tf.Tensor:
        """Copies the tensor and operations that compute it.

        Args:
          operations: the operations to copy; the copies take the results of others as they are.
          substitutes: {name of an input: the tensor that copies take in its place}.

        Returns:
          The copy of the tensor.
        """
        tensor = self._tensor
        graph = tensor.graph
        names = {op.name: '%s_%d' % (op.name.split('/')[-1], number)
                 for number, op in enumerate(operations)}
        with tf.name_scope('from_initialized') as root:
            pass  # only to get a scope that no other operation has
        graph_def = tf.GraphDef()
        graph_def.versions.CopyFrom(graph.graph_def_versions)
        outside: typing.Dict[str, tf.Tensor] = {}
        for op in graph.get_operations():
            if op.name in names:  # in the order of making, which an import of loops needs
                self._add_node(graph_def.node.add(), op, names, outside, substitutes)
                make_names_unique(graph_def.node[-1], root)
        result = '%s:%d' % (names[tensor.op.name], tensor.value_index)
        with tf.control_dependencies(None), compat.free_of_variable(graph):
            copy, = tf.import_graph_def(graph_def, outside, [result], name=root)
        copy.set_shape(tensor.shape)
        return copy

    def _add_node(self, node: tf.NodeDef, op: tf.Operation, names: typing.Dict[str, str],
                  outside: typing.Dict[str, tf.Tensor],
                  substitutes: typing.Dict[str, tf.Tensor]) -> None:
        """Makes a node the copy of an operation.

        Args:
          node: a new `NodeDef`.
          op: the operation.
          names: {name of a copied operation: name of its copy}.
          outside: {name in the copy: tensor of the graph} of the inputs from outside, which is
            added to.
          substitutes: {name of an input: the tensor that copies take in its place}.
        """
        node.CopyFrom(op.node_def)
        node.name = names[op.name]
        node.attr.pop('_class', None)  # what it is colocated with may be no part of the copy
        del node.input[:]
        for tensor in self._inputs(op):
            if tensor.op.name in names:
                node.input.append('%s:%d' % (names[tensor.op.name], tensor.value_index))
            else:
                key = '__outside__/%d:0' % len(outside)
                outside[key] = substitutes.get(tensor.name, tensor)
                node.input.append(key)
        for other in op.control_inputs:
            if other.name in names:
                node.input.append('^' + names[other.name])


def _variables_taken(op: tf.Operation) -> typing.List[tf.Operation]:
    """List of the operations of the variables that an operation reads.

    Without operations that only hand a variable on, and without reads that the program does only if
    the variable is initialized.
    """
    if _asks_whether_initialized(op):
        return []
    if op.type in HAND_ON and is_variable(op.outputs[0]):
        return []
    variables = map(variable_op, filter(is_variable, op.inputs))
    return [variable for variable in variables if variable is not None]


def _asks_whether_initialized(op: tf.Operation) -> bool:
    """Whether an operation asks if a variable is initialized, or is in a branch, or is a branch,
    whose condition asks that."""
    if op.type in _IS_INITIALIZED:
        return True
    conditions = [condition for condition, _, _ in compat.branches_around(op)]
    if op.type in BRANCHES_V2:
        conditions.append(op.inputs[0])
    for condition in conditions:
        if graph_walk.source_through(condition, LEAD_IN).op.type in _IS_INITIALIZED:
            return True
    return False
