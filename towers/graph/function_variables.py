"""The variables that functions use: `Defun`s, and the branches and bodies of control flow v2.

A function gets the handle of a variable as an argument. Within it the handle is a name, the
argument's, or the name of a node that hands the handle on. Positions of arguments are counted from
the last one (-1), since an `If` takes its condition before what its functions take.
"""

import copy
import typing

import tensorflow.compat.v1 as tf

from towers.graph.edit import Library, producer_name
from towers.graph.op_types import ADDS, HAND_ON, LEAVE_UNCHANGED, SETS


class FunctionWrites:
    """Tells whether functions of a graph write a variable that they get as an argument."""

    def __init__(self, library: Library):
        """`library` has the functions."""
        self._library = library
        # (name of a function, position of an argument): whether the function writes it
        self._known: typing.Dict[typing.Tuple[str, int], bool] = {}

    def any_writes(self, functions: typing.Iterable[str], position: int) -> bool:
        """Whether any of the functions of these names writes its argument at that position."""
        return any(self._writes_argument(name, position) for name in functions)

    def _writes_argument(self, name: str, position: int) -> bool:
        """Whether the function of that name writes its argument at that position."""
        key = name, position
        if key not in self._known:
            # Where a function calls itself, this is asked again within. The call is no reason of
            # its own: it writes the argument only if another node of the function does.
            self._known[key] = False
            self._known[key] = self._look_into(self._library.function(name), position)
        return self._known[key]

    def _look_into(self, function: typing.Any, position: int) -> bool:
        """Whether any node of a `FunctionDef` writes the function's argument at that position."""
        arguments = function.signature.input_arg
        has_argument = len(arguments) >= -position
        if not has_argument:
            return False  # a function with fewer arguments does not get this one
        handles = _handles(function, {arguments[position].name})
        return any(self._node_writes(node, handles) for node in function.node_def)

    def _node_writes(self, node: tf.NodeDef, handles: typing.Set[str]) -> bool:
        """Whether a node of a function writes a variable.

        Args:
          node: the node.
          handles: the names in the function that are the variable's handle.
        """
        if node.op in LEAVE_UNCHANGED:
            return False
        inputs = _data_inputs(node)
        if not _takes_any(inputs, handles):
            return False
        called = self._library.called_by(node)
        if not called:
            return True  # an operation that is not known to leave the variable unchanged
        # The node writes the variable if a function writes it that gets it from the node.
        for index, text in enumerate(inputs):
            is_handle = producer_name(text) in handles
            position_from_end = index - len(inputs)
            if is_handle and self.any_writes(called, position_from_end):
                return True
        return False


def without_writes(function: typing.Any, positions: typing.Iterable[int]) -> typing.Any:
    """Copies a function, and leaves out the operations that assign to some of its arguments.

    Needed for variables that tower 0 alone writes: the other towers call such a copy.

    Args:
      function: `FunctionDef`.
      positions: positions of the arguments that are handles of these variables.

    Returns:
      The new `FunctionDef`; None if the writes cannot be left out: the function returns a value
      that it has read after a write, or writes in another way than by an assignment of its own.
    """
    arguments = function.signature.input_arg
    handles = _handles(function, {arguments[position].name for position in positions})
    writes = set()  # names of nodes that assign to the variables
    reads = set()  # names of nodes that take the variables, and leave them unchanged
    for node in function.node_def:
        if not _takes_any(_data_inputs(node), handles):
            continue
        if node.op in SETS | ADDS:
            writes.add(node.name)
        elif node.op in LEAVE_UNCHANGED:
            reads.add(node.name)
        else:
            return None  # it adds rows (`ResourceScatterAdd`), say, or calls a function
    # A read that waits for a write would give another value without it.
    after_writes = _with_followers(writes, function, _all_inputs)
    late_reads = reads & after_writes
    computed_from_late_reads = _with_followers(late_reads, function, _data_inputs)
    if _takes_any(function.ret.values(), computed_from_late_reads):
        return None
    changed = copy.deepcopy(function)
    _remove_nodes(changed, writes)
    return changed


def _remove_nodes(function: typing.Any, names: typing.Set[str]) -> None:
    """Removes the nodes of these names from a `FunctionDef`, and the waits for them. No node takes
    their results."""
    waits = {'^' + name for name in names}  # as control inputs are written
    for node in list(function.node_def):
        if node.name in names:
            function.node_def.remove(node)
            continue
        for wait in waits.intersection(node.input):
            node.input.remove(wait)
    # `control_ret` is {name of an output: node}, of nodes that the function runs although no result
    # is computed from them. The signature lists the names of these outputs once more.
    for output, node_name in list(function.control_ret.items()):
        if node_name in names:
            del function.control_ret[output]
            function.signature.control_output.remove(output)


# ---- from node to node of a function -------------------------------------------------------------

def _handles(function: typing.Any, arguments: typing.Set[str]) -> typing.Set[str]:
    """Set of the names in a `FunctionDef` by which its nodes take some variables: the names of the
    arguments that are the variables' handles, and the names of the nodes that hand a handle on."""
    def inputs_handed_on(node: tf.NodeDef) -> typing.Iterable[str]:
        if node.op not in HAND_ON:
            return ()
        return _data_inputs(node)
    return _with_followers(arguments, function, inputs_handed_on)


def _with_followers(names: typing.Iterable[str], function: typing.Any,
                    inputs_of_node: typing.Callable) -> typing.Set[str]:
    """Finds all nodes of a function that take the results of given nodes or arguments, directly or
    not.

    Args:
      names: names of the nodes or arguments.
      function: `FunctionDef`, whose nodes are in any order.
      inputs_of_node: function from a node to the inputs of it that count.

    Returns:
      Set of these names, and of the names of the nodes that were found.
    """
    found = set(names)
    size_before = None
    while size_before != len(found):  # another round, as long as the last one has found a node
        size_before = len(found)
        for node in function.node_def:
            if _takes_any(inputs_of_node(node), found):
                found.add(node.name)
    return found


def _takes_any(inputs: typing.Iterable[str], names: typing.Set[str]) -> bool:
    """Whether any of some inputs of a node comes from the nodes or arguments of these names."""
    return not names.isdisjoint(map(producer_name, inputs))


def _all_inputs(node: tf.NodeDef) -> typing.Iterable[str]:
    """The inputs of a node, its control inputs included."""
    return node.input


def _data_inputs(node: tf.NodeDef) -> typing.List[str]:
    """List of the inputs of a node, without its control inputs."""
    return [text for text in node.input if not text.startswith('^')]
