"""Which operations write which variables: also in branches, in loops and in functions.

An operation that takes a variable itself, and not its value, may read or write it. `tf.cond`,
`tf.while_loop` and functions take the variable itself when an operation inside of them uses it; the
variable is then followed to the operations inside. An operation that is not known to leave a
variable unchanged counts as writing it.
"""

import tensorflow.compat.v1 as tf

from towers.graph.library import Library
from towers.graph.op_types import HAND_ON, READS
from towers.graph.variable_access import is_variable, variable_op

LEAVE = HAND_ON | READS | {
    '_ReadVariablesOp', 'VarIsInitializedOp', 'VariableShape', 'IsVariableInitialized', 'RefSelect'}
"""Types of operations that take a resource variable and leave it unchanged."""


class Writes:
    """Which operations of a graph write which of its variables.

    In control flow v1 the operation that writes is in the branch or the loop's body. In control
    flow v2 branch and body are functions; the operation that calls them counts as writing, whether
    or not a step runs the write.
    """

    def __init__(self, graph):
        self._library = Library(graph)
        self._known = {}

    def of(self, op):
        """The names of the operations of the variables that one operation may write."""
        if op.type in LEAVE:
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

    def to(self, variable):
        """The operations that may write a variable, its initializer among them.

        Args:
          variable: a `tf.Variable` of the graph, reference or resource.

        Returns:
          List of operations.
        """
        stack, seen, found = list(variable.op.outputs), set(), {}
        while stack:
            tensor = stack.pop()
            if tensor.name in seen or not is_variable(tensor):
                continue
            seen.add(tensor.name)
            for op in tensor.consumers():
                if op.type in HAND_ON:
                    stack.extend(op.outputs)
                elif variable.op.name in self.of(op):
                    found[op.name] = op
        return list(found.values())

    def within_function(self, op):
        """Whether an operation writes through a function that it calls."""
        return bool(self._library.called_by(op.node_def))

    def functions(self, op):
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
        handles = passed_on(function.node_def, {arguments[position].name})
        for node in function.node_def:
            taken = [place for place, text in enumerate(data_inputs(node))
                     if text.split(':')[0] in handles]
            if not taken or node.op in LEAVE:
                continue
            called = self._library.called_by(node)
            count = len(data_inputs(node))
            if not called or any(self._writes_argument(name, place - count)
                                 for name in called for place in taken):
                return True
        return False


def passed_on(nodes, handles):
    """Names of handles of variables in a function, with the names of all nodes that pass one on."""
    handles, before = set(handles), None
    while before != len(handles):
        before = len(handles)
        handles.update(node.name for node in nodes if node.op in HAND_ON and any(
            text.split(':')[0] in handles for text in data_inputs(node)))
    return handles


def data_inputs(node):
    """The inputs of a `NodeDef` but for what it waits for."""
    return [text for text in node.input if not text.startswith('^')]
