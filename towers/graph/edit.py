"""Edits of finished graphs: what operations are colocated with; functions without some writes.

TensorFlow keeps the names of the operations that one is colocated with as `loc:@name` in an
attribute; an operation that is colocated with none is in a group of its own.
"""

import tensorflow.compat.v1 as tf

from towers import compat
from towers.graph.op_types import ADDS, SETS
from towers.graph.variable_writes import LEAVE, data_inputs, passed_on

_PREFIX = 'loc:@'


def group_of(op):
    """The names of the operations that `op` is colocated with, or else its own: a list."""
    return [group.decode()[len(_PREFIX):] for group in op.colocation_groups()]


def names_beside(op):
    """The names of the other operations that `op` is colocated with: a list."""
    return [name for name in group_of(op) if name != op.name]


def beside(op):
    """The other operations that `op` is colocated with: a list."""
    return [op.graph.get_operation_by_name(name) for name in names_beside(op)]


def is_free(op):
    """Whether an operation is colocated with no other one."""
    return not names_beside(op)


def colocate(op, names):
    """Colocates a finished operation with those of these names, and with no others."""
    groups = [(_PREFIX + name).encode() for name in names]
    compat.set_attribute(op, '_class', tf.AttrValue(list=tf.AttrValue.ListValue(s=groups)))


def group_in_node(node):
    """The names that a `NodeDef` says; an empty list where it says none."""
    if '_class' not in node.attr:
        return []
    return [group.decode()[len(_PREFIX):] for group in node.attr['_class'].list.s
            if group.startswith(_PREFIX.encode())]


def without_writes(function, positions):
    """The function without the operations that assign to some of its arguments.

    Args:
      function: a `FunctionDef`.
      positions: of the arguments, which are handles of variables, counted from the last (-1).

    Returns:
      A `FunctionDef`; or None where the function returns a value that it has read after a write, or
      writes otherwise than by an assignment of its own.
    """
    handles = passed_on(function.node_def, {
        function.signature.input_arg[position].name for position in positions})
    takers = [node for node in function.node_def
              if handles.intersection(_producers(data_inputs(node)))]
    writes = {node.name for node in takers if node.op in SETS or node.op in ADDS}
    if any(node.op not in LEAVE and node.name not in writes for node in takers):
        return None
    late = _that_wait_for(writes, function.node_def).intersection(node.name for node in takers)
    if late - writes and not late.isdisjoint(_returned(function)):
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


def _producers(inputs):
    return [text.lstrip('^').split(':')[0] for text in inputs]


def _that_wait_for(names, nodes):
    """The names, and those of all nodes that wait for one, by data or by control."""
    found, before = set(names), None
    while before != len(found):
        before = len(found)
        found.update(node.name for node in nodes if found.intersection(_producers(node.input)))
    return found


def _returned(function):
    """Names of the nodes that the function's results are computed from."""
    nodes = {node.name: node for node in function.node_def}
    stack, found = _producers(function.ret.values()), set()
    while stack:
        name = stack.pop()
        if name in nodes and name not in found:
            found.add(name)
            stack.extend(_producers(data_inputs(nodes[name])))
    return found
