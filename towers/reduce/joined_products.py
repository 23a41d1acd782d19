"""Gradients of wide dense layers: one product of all towers' examples in place of one a tower.

Tower k's gradient of a dense layer's weights [m, n] is the product of the layer's inputs x_k [r_k,
m] and the gradient y_k [r_k, n] of its outputs, a row an example. The sum over the towers is

    sum_k x_k^T y_k  =  [x_1; …; x_N]^T [y_1; …; y_N]

With few examples a tower, N products as large as the weights need not be made, and read again to
be added up (the "sufficient factors" of Xie et al., UAI 2016). The towers' own products stay in the
graph; TensorFlow's optimizer drops them from a step that fetches none of them.
"""

import tensorflow.compat.v1 as tf

from towers.graph.graph_walk import ancestors
from towers.graph.variable_access import REFERENCE_VARIABLES

# Measured on two cores, see benchmarks/results/speed.md: from 64 examples a tower on, towers that
# multiply side by side are as fast. No more rows in all than were measured.
_MOST_ROWS, _MOST_JOINT_ROWS = 32, 128
_LEAST_ELEMENTS = 2 ** 20


def joined_product(gradients, variable):
    """The sum of the towers' gradients of a variable [m, n] as one product, on the current device;
    None where one gradient is no product of thin static matrices, something else reads it, XLA
    compiles it, the weights are small, or the devices are not CPUs of one process."""
    elements = variable.get_shape().num_elements() or 0
    if len(gradients) < 2 or elements < _LEAST_ELEMENTS or not all(
            isinstance(gradient, tf.Tensor) for gradient in gradients):
        return None
    products, waits_for = [gradient.op for gradient in gradients], []
    for place, op in enumerate(products):
        while op.type == 'Identity':  # tf.gradients puts an identity after an output of several
            waits_for += op.control_inputs
            products[place] = op = op.inputs[0].op
        waits_for += op.control_inputs
    if not all(_is_thin_product(op, elements) for op in products):
        return None
    (transpose_a, transpose_b), *others = [
        (op.get_attr('transpose_a'), op.get_attr('transpose_b')) for op in products]
    rows = [op.inputs[0].shape.as_list()[0 if transpose_a else 1] for op in products]
    if (any(other != (transpose_a, transpose_b) for other in others) or max(rows) > _MOST_ROWS
            or sum(rows) > _MOST_JOINT_ROWS
            or not _are_cpus_of_one_process([variable.device] + [op.device for op in products])):
        return None
    with tf.control_dependencies(waits_for):
        a = tf.concat([op.inputs[0] for op in products], 0 if transpose_a else 1)
        b = tf.concat([op.inputs[1] for op in products], 1 if transpose_b else 0)
        return tf.matmul(a, b, transpose_a=transpose_a, transpose_b=transpose_b)


def _is_thin_product(op, elements):
    """Whether joining pays: each factor is read and written once more, and the products are not.

    What may be the memory of a reference variable is left: its update waits for a tower's product.
    """
    return (op.type == 'MatMul' and '_XlaCompile' not in op.node_def.attr
            and not _is_read(op.outputs[0])
            and all(tensor.shape.is_fully_defined() for tensor in op.inputs)
            and 2 * sum(tensor.shape.num_elements() for tensor in op.inputs) <= elements
            and not any(op.graph.get_operation_by_name(name).type in REFERENCE_VARIABLES
                        for name in ancestors(op.inputs)))


def _is_read(tensor):
    """Whether an operation reads a tensor, other than to pass it on."""
    return any(op.type != 'Identity' or _is_read(op.outputs[0]) for op in tensor.consumers())


def _are_cpus_of_one_process(devices):
    specs = [tf.DeviceSpec.from_string(device) for device in devices]
    return (all(spec.device_type == 'CPU' for spec in specs)
            and len({(spec.job, spec.replica, spec.task) for spec in specs}) == 1)
