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
from towers.graph.variable_access import is_variable, variable_taken
from towers.placement.variable_device import only_device

_IS_INITIALIZED = frozenset(['VarIsInitializedOp', 'IsVariableInitialized'])


# Each of these functions makes the result that an operation which reads a variable would have, if
# the variable had the value `value`.

def _whole_value(op: tf.Operation, value: tf.Tensor) -> tf.Tensor:
    """The result of a read of the whole value."""
    return value


def _rows(op: tf.Operation, value: tf.Tensor) -> tf.Tensor:
    """The result of a look-up of rows, whose indices are input 1 of `op`."""
    return tf.gather(value, op.inputs[1], batch_dims=op.get_attr('batch_dims'))


def _entries(op: tf.Operation, value: tf.Tensor) -> tf.Tensor:
    """The result of a look-up of entries, whose indices are input 1 of `op`."""
    return tf.gather_nd(value, op.inputs[1])


def _shape(op: tf.Operation, value: tf.Tensor) -> tf.Tensor:
    """The shape of the value."""
    return tf.shape(value, out_type=op.get_attr('out_type'))


_VALUE_OF_READER = {
    'ReadVariableOp': _whole_value,
    'Identity': _whole_value,  # of a reference variable
    'ResourceGather': _rows,
    'ResourceGatherNd': _entries,
    'VariableShape': _shape}
"""{type of an operation that reads a variable: its function}."""


def value_or_initial_value(variable: tf.Variable) -> tf.Tensor:
    """Makes a tensor that has the value of a variable, if the variable is initialized when the
    tensor is computed; else the variable's initial value."""
    initializer = compat.initializer_of(variable)  # the operation that sets the initial value
    if initializer.type in SETS:
        # `tf.train.init_from_checkpoint` changes the initializer, but not `initial_value`.
        initial_value = initializer.inputs[1]
    else:
        initial_value = variable.initial_value
    # Control flow v1: an `If` (v2) would take the value of a reference variable as its input, and
    # TensorFlow fails to read a variable that is not initialized.
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
      The same value or function, if it needs no other variables; else the value or function to
      take in its place.

    Raises:
      SharedVariableError: a variable is read within a loop, a branch or a function.
    """
    if hasattr(initial_value, 'checkpoint_position'):
        return initial_value  # it stands for a value in a checkpoint, which TensorFlow puts in
    if callable(initial_value):
        return lambda: after_other_variables(initial_value(), dtype)
    if isinstance(initial_value, compat.VARIABLE_TYPES):
        return value_or_initial_value(initial_value)
    if not isinstance(initial_value, tf.Tensor):
        has_tensors = bool(graph_walk.fetches_in(initial_value))
        if not has_tensors:  # numbers
            return initial_value
        initial_value = tf.convert_to_tensor(initial_value, dtype=dtype)
    return _Computation(initial_value).in_any_order()


class _Computation:
    """The operations that compute an initial value, and which of them read other variables.

    A *reader* is an operation that reads another variable: for `w = tf.Variable(2. * v)` the
    operation that reads `v`. The initializer of `w` may run before the initializer of `v`. So the
    multiplication is copied. In the place of the reader's result the copy takes the value of `v` if
    `v` is initialized, else the initial value of `v`.

    If a variable is made in a branch (v1), and its initial value is computed there, no initializer
    can run the operations in the branch. So their copy is made outside: it *leaves* the branch.
    """

    def __init__(self, tensor: tf.Tensor):
        """`tensor` is the initial value."""
        self._tensor = tensor
        # TensorFlow's objects for the branches (v1) around the tensor. The tensor's copy is made
        # outside of these branches. [] if a loop is around the tensor: the tensor has another value
        # in each iteration, which no copy outside of the loop could have.
        self._branches_to_leave: list = []
        if not compat.in_loop(tensor.op):
            self._branches_to_leave = compat.contexts_around(tensor.op)
        # {name: operation that the tensor is computed from}
        self._operations = graph_walk.reached([tensor.op], self._computed_from)
        self._readers = self._find_readers()

    def _find_readers(self) -> typing.Dict[str, tf.Variable]:
        """{name of an operation: the variable that it reads}.

        Only variables with an initializer count: others have no initial value to compute with.
        """
        # {name of an operation: the operations of the variables that it reads}
        variables_read = {name: _variables_read(op) for name, op in self._operations.items()}
        if not any(variables_read.values()):
            return {}  # as for most initial values; the search below takes long for many variables
        variables = graph_walk.variables_by_name(tf.global_variables() + tf.local_variables())
        readers = {}
        for name, operations_of_variables in variables_read.items():
            for variable_op in operations_of_variables:
                variable = variables.get(variable_op.name)
                has_initializer = variable is not None and variable.initializer is not None
                if has_initializer:
                    # One variable for each operation is enough. An operation that reads several,
                    # such as a call of a function, is refused in any case (`_check_is_known_read`).
                    readers[name] = variable
        return readers

    def in_any_order(self) -> tf.Tensor:
        """The initial value as a tensor that initializers may compute in any order.

        It is the tensor itself, if the tensor needs no other variable and leaves no branch; else a
        copy.

        Raises:
          SharedVariableError: a variable is read within a loop, a branch or a function.
        """
        if not self._readers and not self._branches_to_leave:
            return self._tensor
        for name in self._readers:
            self._check_is_known_read(self._operations[name])
        substitutes = self._values_for_readers()
        if self._tensor.name in substitutes:
            return substitutes[self._tensor.name]  # the tensor is a read: `tf.Variable(v.value())`
        return self._copy(self._operations_to_copy(), substitutes)

    def _operations_to_copy(self) -> typing.List[tf.Operation]:
        """List of the operations between the reads of variables and the tensor, without the reads.

        The list has all operations of loops and branches, since a loop or a branch is copied as a
        whole. No other operation, such as one that draws random numbers, is copied: the copy takes
        the result of the program's own operation.
        """
        reads = [self._operations[name] for name in self._readers]
        after_reads = graph_walk.reachable_from(reads, self._operations.values())
        to_copy = []
        for name, op in self._operations.items():
            is_needed = name in after_reads or graph_walk.is_control_flow(op)
            if is_needed and name not in self._readers:
                to_copy.append(op)
        return to_copy

    def _values_for_readers(self) -> typing.Dict[str, tf.Tensor]:
        """{name of a tensor that was read from a variable: the tensor that a copy takes in its
        place}."""
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
        """List of the operations that an operation needs: the operations whose results it takes. In
        a loop or a branch (v1) that is copied, the list also has the operations that it waits for:
        a constant in a branch, say, waits for the branch to be taken."""
        if op.type in VARIABLE_OPS:
            return []
        sources = [tensor.op for tensor in self._inputs(op)]
        if self._is_within(op):
            sources += op.control_inputs
        return sources

    def _inputs(self, op: tf.Operation) -> typing.List[tf.Tensor]:
        """List of the inputs of an operation, as its copy takes them. A branch gets a tensor from
        outside by a `Switch`: a copy that leaves the branch takes the tensor itself."""
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

    def _is_within(self, op: tf.Operation) -> bool:
        """Whether an operation is in a loop or a branch (v1) that is copied as a whole, since the
        copy does not leave it."""
        return compat.in_control_flow(op) and not self._is_in_branch_to_leave(op)

    def _check_is_known_read(self, op: tf.Operation) -> None:
        """Raises `SharedVariableError` for a reader in whose place no other value can be put: it
        has no entry in `_VALUE_OF_READER`, or is within a loop or a branch that is copied."""
        if self._is_within(op) or op.type not in _VALUE_OF_READER:
            raise SharedVariableError(
                'the initial value of a variable is computed from another variable, which '
                'operation %s (%s) reads within a loop, a branch or a function, so that it may '
                "come before that variable is initialized: compute it from the other variable's "
                'initial_value.' % (op.name, op.type))

    def _copy(self, operations: typing.Sequence[tf.Operation],
              substitutes: typing.Dict[str, tf.Tensor]) -> tf.Tensor:
        """Copies the tensor and operations that compute it, by an import into the graph.

        Args:
          operations: the operations to copy. A copy takes the result of an operation that is not
            copied, or the substitute of that result.
          substitutes: {name of a tensor: the tensor that copies take in its place}.

        Returns:
          The copy of the tensor.
        """
        tensor = self._tensor
        graph = tensor.graph
        # {name of an operation: name of its copy}; the number makes the copy's name unique
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
        # Around an initial value TensorFlow colocates new operations with the variable, which may
        # have no operation yet.
        with tf.control_dependencies(None), compat.free_of_variable(graph):
            copy, = tf.import_graph_def(graph_def, outside, [result], name=root)
        copy.set_shape(tensor.shape)
        return copy

    def _add_node(self, node: tf.NodeDef, op: tf.Operation, names: typing.Dict[str, str],
                  outside: typing.Dict[str, tf.Tensor],
                  substitutes: typing.Dict[str, tf.Tensor]) -> None:
        """Makes a node the copy of an operation.

        The inputs of a node are texts: `'a:0'` for the output 0 of the operation a; `'^a'` to wait
        for a. Waits for operations that are not copied are left out: an initial value is computed
        before any step.

        Args:
          node: a new `NodeDef`.
          op: the operation.
          names: {name of a copied operation: name of its copy}.
          outside: {name in the import: tensor of the graph}, for inputs that no copy computes. This
            function adds the inputs of `op`.
          substitutes: {name of an input: the tensor that copies take in its place}.
        """
        node.CopyFrom(op.node_def)
        node.name = names[op.name]
        node.attr.pop('_class', None)  # the operation that it is colocated with may have no copy
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


def _variables_read(op: tf.Operation) -> typing.List[tf.Operation]:
    """List of the operations of the variables that an operation reads, and that have to be
    initialized before it runs. A read that the program does only if the variable is initialized
    does not count."""
    if _asks_whether_initialized(op):
        return []
    hands_variable_on = op.type in HAND_ON and is_variable(op.outputs[0])
    if hands_variable_on:  # `op` itself reads nothing; an operation that takes its output may
        return []
    variables = map(variable_taken, op.inputs)
    return [variable for variable in variables if variable is not None]


def _asks_whether_initialized(op: tf.Operation) -> bool:
    """Whether an operation asks if a variable is initialized, or runs by the answer, as the read in
    `tf.cond(tf.is_variable_initialized(v), v.read_value, lambda: v.initial_value)` does."""
    if op.type in _IS_INITIALIZED:
        return True
    # LEAD_IN: a condition may have been handed on, into a branch within the branch.
    sources = [graph_walk.source_through(condition, LEAD_IN) for condition in _conditions_of(op)]
    return any(source.op.type in _IS_INITIALIZED for source in sources)


def _conditions_of(op: tf.Operation) -> typing.List[tf.Tensor]:
    """List of the conditions of the branches (v1) around an operation; and, for an operation that
    is a branch itself (v2, an `If`), its own condition."""
    conditions = [condition for condition, _, _ in compat.branches_around(op)]
    if op.type in BRANCHES_V2:
        conditions.append(op.inputs[0])
    return conditions
