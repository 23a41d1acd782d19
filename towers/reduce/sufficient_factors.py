"""Gradients of dense layers, combined by their factors instead of as products.

The gradient that tower k has of a dense layer's weights [m, n] is a product of two thin matrices:
the layer's inputs x_k [r_k, m] and the gradient of its outputs y_k [r_k, n], a row an example. The
sum of the towers' products is one product of the joined factors,

    sum_k x_k^T y_k  =  [x_1; …; x_N]^T [y_1; …; y_N]

so with few examples a tower the N products, each as large as the weights, need not be made, kept,
and read again to be added up. These factors are what Xie et al., "Lighter-Communication Distributed
Machine Learning via Sufficient Factor Broadcasting" (UAI 2016), send between machines. Towers on
the CPUs of one machine have nothing to send; here the traffic to memory is what is saved.

The towers' own products stay in the graph and can be fetched (to feed one changes nothing here). A
step that does not fetch them does not compute them: grappler's dependency optimizer, which is on
unless a config turns it off, drops a result that only control edges use.
"""

import collections

import tensorflow.compat.v1 as tf

from towers.graph.reference_memory import may_be_of_reference_variable

# Measured on two cores (benchmarks/results/speed.md): up to 32 examples a tower this was the faster
# way, but for a model of one layer alone; from 64 on towers gain more by multiplying side by side.
# So would more cores, which were not there: hence no more rows in all than were measured.
_MOST_ROWS, _MOST_JOINT_ROWS = 32, 128
_LEAST_ELEMENTS = 2 ** 20

Product = collections.namedtuple('Product', 'gradient op rows waits_for')
"""A gradient, the MatMul that it is, the rows of its factors, and operations to wait for."""


def join_products(products):
    """The sum of products as one product of their joined factors, on the current device.

    Args:
      products: as `products_of` returns them; one at least.

    Returns:
      A tensor of the variable's shape.
    """
    transpose_a, transpose_b = _transposed(products[0].op)
    with tf.control_dependencies([op for product in products for op in product.waits_for]):
        a = tf.concat([product.op.inputs[0] for product in products], 0 if transpose_a else 1)
        b = tf.concat([product.op.inputs[1] for product in products], 1 if transpose_b else 0)
        return tf.matmul(a, b, transpose_a=transpose_a, transpose_b=transpose_b)


def products_of(gradients, variable):
    """The products among gradients of a variable, where joining them pays; makes no operation.

    Left out are products whose sizes are not static, products of small weights or of many rows,
    products that XLA compiles, and products that another operation reads already (a summary, an
    assertion): these have to be computed in any case.

    Args:
      gradients: list of the towers' gradients of the variable, tensors or `IndexedSlices`.
      variable: the variable.

    Returns:
      List of `Product`, of two at least, or empty; empty also unless variable and towers are on
      CPUs of one process.
    """
    elements = variable.get_shape().num_elements() or 0
    if elements < _LEAST_ELEMENTS:
        return []
    products = [product for product in map(_product, gradients) if product is not None
                and product.rows <= _MOST_ROWS and _is_thin(product.op, elements)]
    products = [product for product in products
                if _transposed(product.op) == _transposed(products[0].op)]
    if len(products) < 2 or sum(product.rows for product in products) > _MOST_JOINT_ROWS:
        return []
    devices = [variable.device] + [product.op.device for product in products]
    return products if _are_cpus_of_one_process(devices) else []


def _product(gradient):
    """`Product`, or None where a gradient is something else, or of a size that is not static."""
    if not isinstance(gradient, tf.Tensor):
        return None
    op, waits_for = gradient.op, []
    while op.type == 'Identity':  # tf.gradients puts an identity after an output of several
        waits_for += op.control_inputs
        op = op.inputs[0].op
    if op.type != 'MatMul' or '_XlaCompile' in op.node_def.attr or _is_read(op.outputs[0]):
        return None
    if not all(tensor.shape.is_fully_defined() for tensor in op.inputs):
        return None
    # The update of such a variable waits for the tower's own product, not for the joint one.
    if any(may_be_of_reference_variable(tensor) for tensor in op.inputs):
        return None
    rows = op.inputs[0].shape.as_list()[0 if op.get_attr('transpose_a') else 1]
    return Product(gradient, op, rows, waits_for + list(op.control_inputs))


def _is_read(tensor):
    """Whether an operation reads a tensor, other than to pass it on."""
    return any(op.type != 'Identity' or _is_read(op.outputs[0]) for op in tensor.consumers())


def _transposed(op):
    return op.get_attr('transpose_a'), op.get_attr('transpose_b')


def _is_thin(matmul, elements):
    """Whether the factors of a product are small compared with its elements.

    Joining reads and writes each factor once more; adding up reads and writes each product.
    """
    return 2 * sum(tensor.shape.num_elements() for tensor in matmul.inputs) <= elements


def _are_cpus_of_one_process(devices):
    specs = [tf.DeviceSpec.from_string(device) for device in devices]
    return (all(spec.device_type == 'CPU' for spec in specs)
            and len({(spec.job, spec.replica, spec.task) for spec in specs}) == 1)
