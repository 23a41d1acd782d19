"""The access to variables: which variable a tensor is, or has the value of; which operations read
and write a variable.

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
from towers.graph.edit import Library
from towers.graph.function_variables import FunctionWrites
from towers.graph.graph_walk import (
    names_of,
    of_types,
    producers_of,
    reached,
    tensors_taken,
    variables_by_name,
    without_names,
)
from towers.graph.op_types import (
    ACCESS_ROWS,
    HAND_ON,
    HAND_ON_MEMORY,
    LEAVE_UNCHANGED,
    VARIABLE_OPS,
)

# Operations whose output is the value of a variable that they take: they read it, hand it on, or,
# of a partitioned variable, join the values of its parts.
_GIVE_VALUE = HAND_ON | {'ReadVariableOp', 'ConcatV2', 'Concat'}

REFERENCE_VARIABLES = frozenset(['Variable', 'VariableV2', 'TemporaryVariable'])


def is_reference(variable: tf.Variable) -> bool:
    """Whether a variable is a reference variable: its value is its memory, which writes change."""
    return variable.op.type in REFERENCE_VARIABLES


def variable_op(tensor: tf.Tensor) -> typing.Optional[tf.Operation]:
    """The operation of the variable whose handle or reference a tensor is; None for any other
    tensor. Goes back through the operations that hand the handle into loops and branches."""
    seen = set()
    while tensor.op.name not in seen:  # a loop leads back to its beginning
        op = tensor.op
        if op.type in VARIABLE_OPS:
            return op
        # An `Identity` of a reference variable does not hand on the variable, but its value: the
        # output is no reference.
        hands_on_variable = op.type in HAND_ON and is_variable(tensor)
        if not hands_on_variable:
            return None
        seen.add(op.name)
        # All but an `IdentityN` hand on their first input.
        position = tensor.value_index if op.type == 'IdentityN' else 0
        tensor = op.inputs[position]
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
    def sources_of_value(op: tf.Operation) -> typing.Sequence[tf.Operation]:
        if op.type in _GIVE_VALUE:
            return producers_of(op)
        return ()  # it computes a new value

    found = reached([tensor.op], sources_of_value)
    return of_types(found.values(), VARIABLE_OPS)


def variables_read(
        operations: typing.Iterable[tf.Operation], owned: typing.Container[str] = (),
        others: typing.Iterable[tf.Variable] = ()) -> typing.List[tf.Variable]:
    """Finds the variables that operations take, as handles and references or as values.

    Args:
      operations: the operations.
      owned: names of the operations, among `operations`, that a variable is made of: its initial
        value, its initializer, its read. The variables that these take do not count: an initial
        value may be computed from another variable, which a step does not read for it. But an
        operation that takes the result of such a read takes the variable's value, and counts.
      others: variables to look for besides the variables in the graph's collections.

    Returns:
      List of the variables, each once.
    """
    not_owned = without_names(operations, owned)
    names_not_owned = names_of(not_owned)
    names_read = set()  # of the variables' operations
    for tensor in tensors_taken(not_owned):
        # A tensor that one of these operations has computed needs no look: what that operation
        # takes is looked at itself.
        is_made_outside = tensor.op.name not in names_not_owned
        if is_made_outside or tensor.op.type in VARIABLE_OPS:
            names_read |= names_of(read_from(tensor))
    return [variable for variable in _variables_of_graph(others) if variable.op.name in names_read]


def _variables_of_graph(others: typing.Iterable[tf.Variable]) -> typing.List[tf.Variable]:
    """List of the variables of the graph's collections, then of `others`, each once."""
    in_collections = tf.global_variables() + tf.local_variables() + tf.trainable_variables()
    variables: typing.Dict[str, tf.Variable] = collections.OrderedDict()  # by name
    for variable in in_collections + list(others):
        variables.setdefault(variable.op.name, variable)
    return list(variables.values())


def is_variable(tensor: tf.Tensor) -> bool:
    """Whether a tensor may be a variable itself: its type is a resource or a reference."""
    return tensor.dtype == tf.resource or tensor.dtype != tensor.dtype.base_dtype


def metric_variables() -> typing.Dict[str, tf.Variable]:
    """{name: variable} of the counters of metrics, which all towers share."""
    return variables_by_name(tf.get_collection(tf.GraphKeys.METRIC_VARIABLES))


def initializers() -> typing.Set[str]:
    """Set of the names of the operations that give the graph's variables their initial values."""
    names = set()
    for variable in tf.global_variables() + tf.local_variables():
        if variable.initializer is not None:
            names.add(compat.initializer_of(variable).name)
    return names


# ---- writes -------------------------------------------------------------------------------------

class Writes:
    """Finds the operations of a graph that read and write its variables.

    In control flow v2 branch and body are functions; the operation that calls them counts as
    writing, whether or not a step runs the write.
    """

    def __init__(self, graph: tf.Graph):
        """Looks into the functions of `graph` when they are first needed."""
        self._library = Library(graph)
        self._function_writes = FunctionWrites(self._library)

    def written_by(self, op: tf.Operation) -> typing.List[str]:
        """List of the names of the variables' operations that one operation may write."""
        if op.type in LEAVE_UNCHANGED:
            return []
        written = []
        for position, tensor in enumerate(op.inputs):
            variable = variable_taken(tensor)
            if variable is not None and self._may_write(op, position):
                written.append(variable.name)
        return written

    def _may_write(self, op: tf.Operation, position: int) -> bool:
        """Whether an operation may write the variable that it takes as the input at a position."""
        if op.inputs[position].dtype != tf.resource:
            return _takes_reference(op, position)
        functions = self._library.called_by(op.node_def)
        if not functions:
            return True  # it is not known to leave a variable unchanged
        position_from_end = position - len(op.inputs)  # as the arguments of functions are counted
        return self._function_writes.any_writes(functions, position_from_end)

    def writes_any(self, op: tf.Operation, names: typing.Container[str]) -> bool:
        """Whether an operation may write any of the variables of these names."""
        return any(name in names for name in self.written_by(op))

    def writers_of(self, variable: tf.Variable) -> typing.List[tf.Operation]:
        """List of the operations that may write a `tf.Variable`, its initializer among them."""
        return [op for op in self.takers(variable.op) if variable.op.name in self.written_by(op)]

    def takers(self, variable: tf.Operation) -> list:
        """List of the operations that take a variable itself, to read or write it, without
        operations that hand it on into loops and branches."""
        return self._find_takers(variable, follows_results=False)

    def has_rows_accessed(self, variable: tf.Operation) -> bool:
        """Whether operations of the graph access rows of a resource variable: gather them, or write
        them. Operations in functions are not looked at."""
        return any(op.type in ACCESS_ROWS or op.type.startswith('ResourceSparseApply')
                   for op in self.takers(variable))

    def takers_of_memory(self, variable: tf.Operation) -> list:
        """List of the operations that take a variable itself, and of the operations that may read
        the memory of a reference variable late.

        Many kernels return the memory that they take as their result (`Identity`, `Reshape`). An
        operation that takes the result then reads the variable, later than the program says. So all
        operations that are computed from a reference variable count. An operation that takes the
        result of a write of the variable, such as an `AssignAdd`, does not count: it is meant to
        read what has been written.
        """
        return self._find_takers(variable, follows_results=variable.type in REFERENCE_VARIABLES)

    def _find_takers(self, variable: tf.Operation, follows_results: bool) -> list:
        """List of the operations that take a variable.

        Args:
          variable: the operation of the variable.
          follows_results: whether operations that take the results of these operations also count,
            as `takers_of_memory` says.
        """
        tensors = list(variable.outputs)  # whose takers are still to be found
        seen = set()
        takers = []
        while tensors:
            for op in tensors.pop().consumers():
                if op.name in seen:
                    continue
                seen.add(op.name)
                handed_on = _variables_handed_on(op)
                if handed_on:
                    tensors += handed_on
                    continue
                takers.append(op)
                if follows_results and variable.name not in self.written_by(op):
                    tensors += op.outputs
        return takers

    def readers(self, variable: tf.Operation,
                write: typing.Optional[tf.Operation] = None) -> list:
        """Finds the operations that compute with a variable.

        Args:
          variable: the operation of the variable.
          write: an operation that writes it; or None. Operations in a branch (v1) that does not run
            in the steps of this write do not count.

        Returns:
          For a resource variable, list of the operations that take its handle. For a reference
          variable, list of the operations that read its memory: they take the variable, or the
          result of an operation that only hands its memory on, such as an `Identity`.
        """
        if variable.type not in REFERENCE_VARIABLES:
            return self.takers(variable)
        not_running: typing.Set[Branch] = set()
        if write is not None:
            not_running = branches_not_running(write)

        def takers_of_memory(op: tf.Operation) -> typing.List[tf.Operation]:
            """The operations that take an output of `op` which may be the variable's memory."""
            has_memory = op is variable or op.type in HAND_ON_MEMORY
            if not has_memory:
                return []
            takers: typing.List[tf.Operation] = []
            for output in op.outputs:
                # One output of a `Switch` may lead into a branch that does not run.
                leads_into_other_branch = branch_of(output) in not_running
                if not leads_into_other_branch:
                    takers += output.consumers()
            return takers

        found = reached([variable], takers_of_memory)
        del found[variable.name]  # where the walk began
        return [op for op in found.values() if op.type not in HAND_ON_MEMORY]

    def calls_functions(self, op: tf.Operation) -> bool:
        """Whether an operation calls functions: what it writes is then written within these."""
        return bool(self._library.called_by(op.node_def))

    def functions(self, op: tf.Operation) -> list:
        """List of the `FunctionDef`s of the functions that an operation calls."""
        return list(map(self._library.function, self._library.called_by(op.node_def)))


def _takes_reference(op: tf.Operation, position: int) -> bool:
    """Whether an operation takes its input at that position as a reference, not as its value."""
    arguments = op.op_def.input_arg
    # One argument may be a list of several inputs, as the argument of `AddN` is.
    takes_lists = len(arguments) != len(op.inputs)
    if takes_lists:
        return False  # such an operation takes values, or hands on references, as `RefMerge` does
    return arguments[position].is_ref


def _variables_handed_on(op: tf.Operation) -> typing.List[tf.Tensor]:
    """List of the outputs of an operation that are a variable which it takes, handed on."""
    if op.type not in HAND_ON:
        return []
    return [tensor for tensor in op.outputs if is_variable(tensor)]


class Branch(typing.NamedTuple):
    """A branch (v1) of a `tf.cond`."""
    condition: str  # name of the condition
    runs_if: int  # the value of the condition, 0 or 1, with which the branch runs


def branches_not_running(op: tf.Operation) -> typing.Set[Branch]:
    """Set of the branches (v1) that do not run in a step in which an operation runs: for each
    `tf.cond` around the operation, the branch that the operation is not in."""
    not_running: typing.Set[Branch] = set()
    is_in_loop = compat.in_loop(op)
    if is_in_loop:
        return not_running  # empty: each iteration may take another branch
    for around in compat.branches_around(op):
        other_value = 1 - around.runs_if
        not_running.add(Branch(_original(around.condition).name, other_value))
    return not_running


def branch_of(tensor: tf.Tensor) -> typing.Optional[Branch]:
    """The branch (v1) that a tensor is led into by a `Switch`; None for other tensors. Output 0 of
    a `Switch` goes into the branch that runs if the condition is false, output 1 into the other."""
    if tensor.op.type not in ('Switch', 'RefSwitch'):
        return None
    condition = tensor.op.inputs[1]
    return Branch(_original(condition).name, runs_if=tensor.value_index)


def _original(condition: tf.Tensor) -> tf.Tensor:
    """The tensor by which a condition is compared with other conditions. `tf.cond` makes identities
    of its condition p, `identity(p)` and `identity(identity(p))`: for each of them this is p.

    Where p is a reference variable, a write may change it between two reads. So its identities are
    returned as they are, and none equals another.
    """
    source = condition
    while source.op.type == 'Identity':
        source = source.op.inputs[0]
        is_memory = source.dtype != source.dtype.base_dtype
        if is_memory:
            return condition
    return source
