"""The operations that a finished operation is colocated with.

TensorFlow keeps their names as `loc:@name` in an attribute; an operation that is colocated with
none is in a group of its own.
"""

import tensorflow.compat.v1 as tf

from towers import compat

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
