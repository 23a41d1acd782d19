"""Copies of finished operations, and operations that take the copies instead."""

import tensorflow.compat.v1 as tf

from towers import compat


def copied_operations(operations):
    """Makes each operation again: dict from names to the copies.

    Args:
      operations: list of operations of the default graph, in the order in which they were made; of
        no loop or branch of control flow v1. Among themselves the copies take copies.
    """
    copies, graph = {}, tf.get_default_graph()
    for op in operations:
        inputs = [_instead(tensor, copies) for tensor in op.inputs]
        attributes = {name: value for name, value in op.node_def.attr.items() if name != '_class'}
        with tf.device(None), tf.device(op.device or None), tf.control_dependencies(None), \
                tf.control_dependencies([copies.get(other.name, other)
                                         for other in op.control_inputs]):
            copies[op.name] = graph.create_op(
                op.type, inputs, [tensor.dtype for tensor in op.outputs], name='copies/' + op.name,
                attrs=attributes, op_def=op.op_def)
        for tensor, copy in zip(op.outputs, copies[op.name].outputs):
            copy.set_shape(tensor.shape)
    return copies


def take_instead(op, copies):
    """Makes an operation take, and wait for, copies (dict from names) of what it takes."""
    for position, tensor in enumerate(op.inputs):
        if tensor.op.name in copies:
            compat.replace_input(op, position, _instead(tensor, copies))
    if any(other.name in copies for other in op.control_inputs):
        compat.set_control_inputs(op, [copies.get(other.name, other)
                                       for other in op.control_inputs])


def _instead(tensor, copies):
    copy = copies.get(tensor.op.name)
    return tensor if copy is None else copy.outputs[tensor.value_index]
