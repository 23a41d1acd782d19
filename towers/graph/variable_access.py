"""Which variable a tensor stands for, or has the value of, and which operations write a variable.

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
from towers.graph.edit import Library, producer
from towers.graph.graph_walk import reached
from towers.graph.op_types import ADDS, HAND_ON, READS, SETS, VARIABLE_OPS

# Operations whose output is the value, or a part of the value, of the variable that they take.
_READ = frozenset(['ReadVariableOp', 'ConcatV2', 'Concat'])

REFERENCE_VARIABLES = frozenset(['Variable', 'VariableV2', 'TemporaryVariable'])


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


def read_from(tensor: tf.Tensor) -> typing.List[tf.Operation]:
    """The operations of the variables whose values a tensor consists of: passed on, cached, or
    joined from parts, but not computed. An empty list if there is none."""
    found = reached([tensor.op], lambda op: [each.op for each in op.inputs] if (
        op.type in HAND_ON or op.type in _READ) else ())
    return [op for op in found.values() if op.type in VARIABLE_OPS]


def variables_read(operations, owned=(), others=()) -> typing.List[tf.Variable]:
    """The variables, of the collections and `others`, that any of some operations takes, itself or
    by its value: a list. Operations `owned` do not count, since they belong to the variables
    (initial values, reads)."""
    made, names = {op.name for op in operations}, set()
    for op in operations:
        for tensor in op.inputs if op.name not in owned else ():
            if tensor.op.name not in made or tensor.op.name in owned or (
                    tensor.op.type in VARIABLE_OPS):
                names.update(source.name for source in read_from(tensor))
    known = collections.OrderedDict()
    for variable in (tf.global_variables() + tf.local_variables() + tf.trainable_variables()
                     + list(others)):
        known.setdefault(variable.op.name, variable)
    return [variable for name, variable in known.items() if name in names]


def is_variable(tensor: tf.Tensor) -> bool:
    """Whether a tensor may be a variable itself: its type is a resource or a reference."""
    return tensor.dtype == tf.resource or tensor.dtype != tensor.dtype.base_dtype


def metric_variables() -> typing.Dict[str, tf.Variable]:
    """{name: variable} of the counters of metrics, which all towers share."""
    return {variable.op.name: variable
            for variable in tf.get_collection(tf.GraphKeys.METRIC_VARIABLES)}


def initializers() -> typing.Set[str]:
    """The names of the operations that give the graph's variables their initial values: a set."""
    return {compat.initializer_of(variable).name
            for variable in tf.global_variables() + tf.local_variables()
            if variable.initializer is not None}


# ---- writes -------------------------------------------------------------------------------------

_LEAVE = HAND_ON | READS | {
    '_ReadVariablesOp', 'VarIsInitializedOp', 'VariableShape', 'IsVariableInitialized', 'RefSelect'}
"""Types of operations that take a resource variable and leave it unchanged."""


class Writes:
    """Which operations of a graph write which of its variables.

    In control flow v2 branch and body are functions; the operation that calls them counts as
    writing, whether or not a step runs the write.
    """

    def __init__(self, graph: tf.Graph):
        self._library = Library(graph)
        self._known = {}

    def of(self, op: tf.Operation) -> typing.List[str]:
        """The names of the operations of the variables that one operation may write."""
        if op.type in _LEAVE:
            return []
        found, called, arguments = [], None, None
        for position, tensor in enumerate(op.inputs):
            if not is_variable(tensor):
                continue
            source = variable_op(tensor)
            if source is None:
                continue
            if tensor.dtype != tf.resource:
                arguments = arguments or op.op_def.input_arg
                if len(arguments) != len(op.inputs) or not arguments[position].is_ref:
                    continue
            else:
                if called is None:
                    called = self._library.called_by(op.node_def)
                if called and not any(self._writes_argument(
                        name, position - len(op.inputs)) for name in called):
                    continue
            found.append(source.name)
        return found

    def to(self, variable: tf.Variable) -> typing.List[tf.Operation]:
        """The operations that may write a `tf.Variable`, its initializer among them: a list."""
        return [op for op in self.takers(variable.op) if variable.op.name in self.of(op)]

    def takers(self, variable: tf.Operation, memory: bool = False) -> list:
        """The operations that take a variable itself, but for those that hand it on: a list.

        With `memory`, all that is computed from a reference variable counts, too: its value is its
        memory, which many kernels pass on (`Identity`, `Reshape`) to what reads it later.
        """
        memory = memory and variable.type in REFERENCE_VARIABLES
        stack, seen, found = list(variable.outputs), set(), []
        while stack:
            for op in stack.pop().consumers():
                if op.name in seen:
                    continue
                seen.add(op.name)
                handed_on = [each for each in op.outputs if is_variable(each)] if (
                    op.type in HAND_ON) else []
                if not handed_on:
                    found.append(op)
                stack += handed_on or (list(op.outputs) if memory and (
                    variable.name not in self.of(op)) else [])
        return found

    def within_function(self, op: tf.Operation) -> bool:
        """Whether an operation writes through a function that it calls."""
        return bool(self._library.called_by(op.node_def))

    def functions(self, op: tf.Operation) -> list:
        """The `FunctionDef`s of the functions that an operation calls."""
        return list(map(self._library.function, self._library.called_by(op.node_def)))

    def _writes_argument(self, name, position):
        """Whether a function writes its argument at that position, counted from the last (-1)."""
        key = name, position
        if key not in self._known:
            self._known[key] = False  # for functions that call themselves
            self._known[key] = self._look_into(self._library.function(name), position)
        return self._known[key]

    def _look_into(self, function, position):
        arguments = function.signature.input_arg
        if len(arguments) < -position:
            return False
        handles = _handles(function, {arguments[position].name})
        for node in function.node_def:
            taken = [place for place, text in enumerate(_data_inputs(node))
                     if producer(text) in handles]
            if not taken or node.op in _LEAVE:
                continue
            called = self._library.called_by(node)
            count = len(_data_inputs(node))
            if not called or any(self._writes_argument(name, place - count)
                                 for name in called for place in taken):
                return True
        return False


def _handles(function, arguments):
    """The names of arguments that are handles of variables, and of the nodes that pass one on."""
    return _spread(arguments, function,
                   lambda node: _data_inputs(node) if node.op in HAND_ON else ())


def _spread(names, function, taken):
    """The names, and those of all nodes that have one among their inputs `taken`: a set."""
    names, before = set(names), None
    while before != len(names):
        before = len(names)
        names.update(node.name for node in function.node_def
                     if names.intersection(map(producer, taken(node))))
    return names


def _data_inputs(node):
    """The inputs of a `NodeDef` but for what it waits for."""
    return [text for text in node.input if not text.startswith('^')]


def without_writes(function, positions):
    """The `FunctionDef` without the operations that assign to some of its arguments, the handles of
    variables at these positions, counted from the last (-1). None where the function returns a
    value that it has read after a write, or writes otherwise than by an assignment of its own."""
    handles = _handles(function, {
        function.signature.input_arg[position].name for position in positions})
    takers = [node for node in function.node_def
              if handles.intersection(map(producer, _data_inputs(node)))]
    writes = {node.name for node in takers if node.op in SETS or node.op in ADDS}
    if any(node.op not in _LEAVE and node.name not in writes for node in takers):
        return None
    late = _spread(writes, function, lambda node: node.input).intersection(
        node.name for node in takers) - writes
    if not _spread(late, function, _data_inputs).isdisjoint(map(producer, function.ret.values())):
        return None
    changed = type(function)()
    changed.CopyFrom(function)
    for node in list(changed.node_def):
        if node.name in writes:
            changed.node_def.remove(node)
            continue
        kept = [text for text in node.input if text.lstrip('^') not in writes]
        del node.input[:]
        node.input.extend(kept)
    for name in [key for key, value in changed.control_ret.items() if value in writes]:
        del changed.control_ret[name]
        changed.signature.control_output.remove(name)
    return changed
