"""The access to variables: which one a tensor is or has the value of, and what reads and writes it.

The graph tells, and never names. A variable is an operation (`VariableV2`, `VarHandleOp`). An
operation that takes its output takes the variable itself, and may read or write it; after a read,
operations take its value. Where `tf.cond`, `tf.while_loop` and functions take a variable, it is
followed to the operations inside. An operation that is not known to leave a variable unchanged
counts as writing it.
"""

import collections
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.graph.edit import Library, producer_name
from towers.graph.graph_walk import names_of, producers_of, reached
from towers.graph.op_types import ADDS, HAND_ON, HAND_ON_MEMORY, READS, SETS, VARIABLE_OPS

# Operations whose output is the value, or a part of the value, of the variable that they take.
_READ = frozenset(['ReadVariableOp', 'ConcatV2', 'Concat'])

REFERENCE_VARIABLES = frozenset(['Variable', 'VariableV2', 'TemporaryVariable'])


def is_reference(variable: tf.Variable) -> bool:
    """Whether a variable is a reference variable: its value is its memory, which writes change."""
    return variable.op.type in REFERENCE_VARIABLES


def variable_op(tensor: tf.Tensor) -> typing.Optional[tf.Operation]:
    """The operation of the variable whose handle or reference a tensor is; else None."""
    seen = set()
    while tensor.op.name not in seen:
        op = tensor.op
        if op.type in VARIABLE_OPS:
            return op
        if op.type not in HAND_ON or not is_variable(tensor):
            return None
        seen.add(op.name)
        tensor = op.inputs[tensor.value_index if op.type == 'IdentityN' else 0]
    return None


def variable_taken(tensor: tf.Tensor) -> typing.Optional[tf.Operation]:
    """The operation of the variable that an operation gets by taking a tensor as an input: the
    variable itself, to read or write it. None if the tensor is a value."""
    if not is_variable(tensor):
        return None
    return variable_op(tensor)


def read_from(tensor: tf.Tensor) -> typing.List[tf.Operation]:
    """List of the operations of the variables whose value a tensor is: read, handed on, or joined
    from the parts of a partitioned variable. [] for a tensor that is computed."""
    def sources(op):
        is_passed_on = op.type in HAND_ON or op.type in _READ
        return producers_of(op) if is_passed_on else ()
    found = reached([tensor.op], sources)
    return [op for op in found.values() if op.type in VARIABLE_OPS]


def variables_read(
        operations: typing.Iterable[tf.Operation], owned: typing.Container[str] = (),
        others: typing.Iterable[tf.Variable] = ()) -> typing.List[tf.Variable]:
    """Finds the variables that some operations take, themselves or by their values.

    Args:
      operations: the operations.
      owned: names of the operations that do not count, since they belong to the variables: initial
        values, reads.
      others: variables that are looked for besides those of the graph's collections.

    Returns:
      List of the variables, each once.
    """
    made = names_of(operations)
    read = set()
    # A value that one of the operations has made adds nothing: that operation's own inputs count.
    # The operations in `owned` are passed over, so what they give counts here.
    for op in operations:
        if op.name in owned:
            continue
        for tensor in op.inputs:
            source = tensor.op
            is_from_outside = source.name not in made or source.name in owned
            if is_from_outside or source.type in VARIABLE_OPS:
                read |= names_of(read_from(tensor))
    known: typing.Dict[str, tf.Variable] = collections.OrderedDict()
    in_collections = tf.global_variables() + tf.local_variables() + tf.trainable_variables()
    for variable in in_collections + list(others):
        known.setdefault(variable.op.name, variable)  # it may be in several collections
    return [variable for name, variable in known.items() if name in read]


def is_variable(tensor: tf.Tensor) -> bool:
    """Whether a tensor may be a variable itself: its type is a resource or a reference."""
    return tensor.dtype == tf.resource or tensor.dtype != tensor.dtype.base_dtype


def metric_variables() -> typing.Dict[str, tf.Variable]:
    """{name: variable} of the counters of metrics, which all towers share."""
    return {variable.op.name: variable
            for variable in tf.get_collection(tf.GraphKeys.METRIC_VARIABLES)}


def initializers() -> typing.Set[str]:
    """Set of the names of the operations that give the graph's variables their initial values."""
    return {compat.initializer_of(variable).name
            for variable in tf.global_variables() + tf.local_variables()
            if variable.initializer is not None}


# ---- writes -------------------------------------------------------------------------------------

_LEAVE_UNCHANGED = HAND_ON | READS | {
    '_ReadVariablesOp', 'VarIsInitializedOp', 'VariableShape', 'IsVariableInitialized', 'RefSelect'}
"""Types of operations that take a resource variable and leave it unchanged."""


class Writes:
    """Finds the operations of a graph that read and write its variables.

    In control flow v2 branch and body are functions; the operation that calls them counts as
    writing, whether or not a step runs the write.
    """

    def __init__(self, graph: tf.Graph):
        """Looks into the functions of `graph` when they are first needed."""
        self._library = Library(graph)
        # (name of a function, position of an argument): whether the function writes it
        self._known: typing.Dict[typing.Tuple[str, int], bool] = {}

    def of(self, op: tf.Operation) -> typing.List[str]:
        """List of the names of the variables' operations that one operation may write."""
        if op.type in _LEAVE_UNCHANGED:
            return []
        taken = {}  # {position of an input: the variable that is taken there}
        for position, tensor in enumerate(op.inputs):
            variable = variable_taken(tensor)
            if variable is not None:
                taken[position] = variable
        if not taken:
            return []
        functions = self._library.called_by(op.node_def)
        written = []
        for position, variable in taken.items():
            if op.inputs[position].dtype != tf.resource:
                may_write = _takes_reference(op, position)
            elif functions:
                may_write = self._any_writes(functions, position - len(op.inputs))
            else:
                may_write = True
            if may_write:
                written.append(variable.name)
        return written

    def writes_any(self, op: tf.Operation, names: typing.Container[str]) -> bool:
        """Whether an operation may write any of the variables of these names."""
        return any(name in names for name in self.of(op))

    def to(self, variable: tf.Variable) -> typing.List[tf.Operation]:
        """List of the operations that may write a `tf.Variable`, its initializer among them."""
        return [op for op in self.takers(variable.op) if variable.op.name in self.of(op)]

    def takers(self, variable: tf.Operation, memory: bool = False) -> list:
        """Finds the operations that take a variable itself, to read or write it.

        Args:
          variable: the operation of the variable.
          memory: whether operations that take a value computed from a reference variable count,
            too: its value is its memory, which many kernels hand on (`Identity`, `Reshape`) to
            operations that read it later.

        Returns:
          List of the operations, without those that hand the variable on into loops and branches.
        """
        follows_values = memory and variable.type in REFERENCE_VARIABLES
        stack = list(variable.outputs)
        seen = set()
        takers = []
        while stack:
            for op in stack.pop().consumers():
                if op.name in seen:
                    continue
                seen.add(op.name)
                handed_on = _variables_handed_on(op)
                if handed_on:
                    stack += handed_on
                    continue
                takers.append(op)
                if follows_values and variable.name not in self.of(op):
                    stack += op.outputs
        return takers

    def readers(self, variable: tf.Operation,
                write: typing.Optional[tf.Operation] = None) -> list:
        """Finds the operations that compute with a variable.

        Args:
          variable: the operation of the variable.
          write: an operation that writes it; or None. Operations do not count that take the memory
            out of a branch (v1) which does not run where the write does.

        Returns:
          List of the operations that take the variable itself. Of a reference variable, of those
          that take its memory, through operations that hand it on.
        """
        if variable.type not in REFERENCE_VARIABLES:
            return self.takers(variable)
        not_running = set() if write is None else branches_not_running(write)

        def takers_of_memory(op: tf.Operation) -> typing.List[tf.Operation]:
            """The operations that take an output of `op` which may be the variable's memory."""
            takers: typing.List[tf.Operation] = []
            if op is variable or op.type in HAND_ON_MEMORY:
                for output in op.outputs:
                    if branch_of(output) not in not_running:
                        takers += output.consumers()
            return takers

        found = reached([variable], takers_of_memory)
        del found[variable.name]
        return [op for op in found.values() if op.type not in HAND_ON_MEMORY]

    def within_function(self, op: tf.Operation) -> bool:
        """Whether an operation calls functions, so that these do what it writes."""
        return bool(self._library.called_by(op.node_def))

    def functions(self, op: tf.Operation) -> list:
        """The `FunctionDef`s of the functions that an operation calls."""
        return [self._library.function(name) for name in self._library.called_by(op.node_def)]

    def _any_writes(self, functions: typing.Iterable[str], position: int) -> bool:
        """Whether any of the functions of these names writes its argument at that position."""
        return any(self._writes_argument(name, position) for name in functions)

    def _writes_argument(self, name: str, position: int) -> bool:
        """Whether a function writes its argument at that position, counted from the last (-1)."""
        key = name, position
        if key not in self._known:
            self._known[key] = False  # for functions that call themselves
            self._known[key] = self._look_into(self._library.function(name), position)
        return self._known[key]

    def _look_into(self, function: typing.Any, position: int) -> bool:
        """Finds what `_writes_argument` returns, in the nodes of a `FunctionDef`."""
        arguments = function.signature.input_arg
        if len(arguments) < -position:
            return False
        handles = _handles(function, {arguments[position].name})
        return any(self._node_writes(node, handles) for node in function.node_def)

    def _node_writes(self, node: tf.NodeDef, handles: typing.Set[str]) -> bool:
        """Whether a node of a function writes the variable of any of `handles`, see `_handles`."""
        if node.op in _LEAVE_UNCHANGED:
            return False
        inputs = _data_inputs(node)
        positions = [index - len(inputs) for index, text in enumerate(inputs)
                     if producer_name(text) in handles]
        if not positions:
            return False
        functions = self._library.called_by(node)
        if not functions:
            return True
        return any(self._any_writes(functions, position) for position in positions)


def _takes_reference(op: tf.Operation, position: int) -> bool:
    """Whether an operation takes its input at that position as a reference, not as its value."""
    arguments = op.op_def.input_arg
    return len(arguments) == len(op.inputs) and arguments[position].is_ref


def _variables_handed_on(op: tf.Operation) -> typing.List[tf.Tensor]:
    """List of the outputs of an operation that are a variable which it takes, handed on."""
    if op.type not in HAND_ON:
        return []
    return [tensor for tensor in op.outputs if is_variable(tensor)]


Branch = typing.Tuple[str, int]
"""The name of a condition, and the value of it at which the branch runs, 0 or 1."""


def branches_not_running(op: tf.Operation) -> typing.Set[Branch]:
    """Set of the branches (v1) that do not run in a step in which an operation runs; none for an
    operation in a loop, where a condition may change from turn to turn."""
    not_running: typing.Set[Branch] = set()
    if not compat.in_branches_alone(op):
        return not_running
    for condition, taken, _ in compat.branches_around(op):
        not_running.add((_original(condition).name, 1 - taken))
    return not_running


def branch_of(tensor: tf.Tensor) -> typing.Optional[Branch]:
    """The branch (v1) that a tensor is led into by a `Switch`; None for other tensors."""
    if tensor.op.type not in ('Switch', 'RefSwitch'):
        return None
    return _original(tensor.op.inputs[1]).name, tensor.value_index


def _original(condition: tf.Tensor) -> tf.Tensor:
    """The tensor that a condition is: `tf.cond` hands it on to each use. One that is the memory of
    a variable, and so may change between two uses, is itself."""
    source = condition
    while source.op.type == 'Identity':
        source = source.op.inputs[0]
        if source.dtype != source.dtype.base_dtype:
            return condition
    return source


def _handles(function: typing.Any, arguments: typing.Set[str]) -> typing.Set[str]:
    """Set of names in a `FunctionDef` by which nodes take variables: those of some `arguments`,
    which are handles of variables, and of the nodes that hand one on."""
    def inputs_handed_on(node):
        return _data_inputs(node) if node.op in HAND_ON else ()
    return _with_followers(arguments, function, inputs_handed_on)


def _with_followers(names: typing.Iterable[str], function: typing.Any,
                    inputs_of_node: typing.Callable) -> typing.Set[str]:
    """Finds all nodes of a function that follow from some nodes or arguments.

    Args:
      names: names of the nodes or arguments.
      function: `FunctionDef`, whose nodes are in any order.
      inputs_of_node: function from a node to those of its inputs that count.

    Returns:
      Set of these names, and of the names of the nodes that follow, directly or not.
    """
    found = set(names)
    size_before = None
    while size_before != len(found):
        size_before = len(found)
        for node in function.node_def:
            if _takes_any(inputs_of_node(node), found):
                found.add(node.name)
    return found


def _takes_any(inputs: typing.Iterable[str], names: typing.Container[str]) -> bool:
    """Whether any of some inputs of a node comes from the nodes or arguments of these names."""
    return any(producer_name(text) in names for text in inputs)


def _data_inputs(node: tf.NodeDef) -> typing.List[str]:
    """List of the inputs of a node, without its control inputs."""
    return [text for text in node.input if not text.startswith('^')]


def without_writes(function: typing.Any, positions: typing.Iterable[int]) -> typing.Any:
    """Copies a function, and leaves out the operations that assign to some of its arguments.

    Args:
      function: `FunctionDef`.
      positions: positions of arguments that are handles of variables, counted from the last (-1).

    Returns:
      The new `FunctionDef`; None if the writes cannot be left out: the function returns a value
      that it has read after a write, or writes in another way than by an assignment of its own.
    """
    arguments = function.signature.input_arg
    argument_names = {arguments[position].name for position in positions}
    handles = _handles(function, argument_names)
    takers = [node for node in function.node_def if _takes_any(_data_inputs(node), handles)]
    writes = names_of(node for node in takers if node.op in SETS | ADDS)
    reads = [node for node in takers if node.name not in writes]
    if any(node.op not in _LEAVE_UNCHANGED for node in reads):
        return None
    after_writes = _with_followers(writes, function, lambda node: node.input)
    # Without the writes these would read another value.
    late_reads = after_writes & names_of(reads)
    computed_from_late_reads = _with_followers(late_reads, function, _data_inputs)
    if _takes_any(function.ret.values(), computed_from_late_reads):
        return None
    changed = type(function)()
    changed.CopyFrom(function)
    _remove_nodes(changed, writes)
    return changed


def _remove_nodes(function: typing.Any, names: typing.Container[str]) -> None:
    """Removes the nodes of these names from a `FunctionDef`, and the waits for them. No node takes
    their results."""
    for node in list(function.node_def):
        if node.name in names:
            function.node_def.remove(node)
            continue
        inputs = [text for text in node.input if text.lstrip('^') not in names]
        del node.input[:]
        node.input.extend(inputs)
    for name, node_name in list(function.control_ret.items()):
        if node_name in names:
            del function.control_ret[name]
            function.signature.control_output.remove(name)
