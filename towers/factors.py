"""Gradients of dense layers, combined by their factors instead of as products.

The gradient that tower k has of a dense layer's weights [m, n] is a product of two thin matrices:
the layer's inputs x_k [r_k, m] and the gradient of its outputs y_k [r_k, n], a row an example. The
sum of the towers' products is one product of the joined factors,

    sum_k x_k^T y_k  =  [x_1; …; x_N]^T [y_1; …; y_N]

so with few examples a tower the N products, each as large as the weights, need not be made, kept,
and read again to be added up. These factors are what Xie et al., "Lighter-Communication Distributed
Machine Learning via Sufficient Factor Broadcasting" (UAI 2016), send between machines. Towers on
the CPUs of one machine have nothing to send; here the traffic to memory is what is saved.

The towers' own products stay in the graph for whoever fetches them. A step that does not leaves
them out: grappler's dependency optimizer, which is on unless a config turns it off, drops a result
that nothing but control edges use.
"""

import collections

import tensorflow.compat.v1 as tf

# Measured on two cores, layers 4096 wide (benchmarks, BUILD_NOTES.md): up to 32 examples a tower one
# product was faster than several and their sum; from 64 on the towers gain more by multiplying side
# by side. Smaller weights stay in the cores' caches, where adding them up costs next to nothing.
_MOST_ROWS = 32
_LEAST_ELEMENTS = 2 ** 20

Product = collections.namedtuple('Product', 'gradient op waits_for')
"""A gradient, the MatMul that it is, and the operations that it has to wait for beside that."""


def join_products(gradients, device):
    """Puts one product in the place of the towers' products, where that pays.

    Args:
      gradients: list of gradients of one variable, tensors or `IndexedSlices`.
      device: of the variable; the current device, too.

    Returns:
      A list of gradients with the same sum: the joint product, and those that have no part in it
      (that of the regularization, say); or the list as given.
    """
    products = products_of(gradients, device)
    if not products:
        return gradients
    transpose_a, transpose_b = _transposed(products[0])
    with tf.control_dependencies([op for product in products for op in product.waits_for]):
        a = tf.concat([product.op.inputs[0] for product in products], 0 if transpose_a else 1)
        b = tf.concat([product.op.inputs[1] for product in products], 1 if transpose_b else 0)
        joint = tf.matmul(a, b, transpose_a=transpose_a, transpose_b=transpose_b)
    return [joint] + [gradient for gradient in gradients
                      if not any(gradient is product.gradient for product in products)]


def products_of(gradients, device):
    """The products among gradients of one variable, where joining them pays; makes no operation.

    Left out are products of other sizes than static ones, of small weights and of many rows, and
    what XLA compiles.

    Args:
      gradients, device: as for `join_products`.

    Returns:
      List of `Product`, of two at least, or empty; empty also unless variable and towers are on
      CPUs of one process.
    """
    products = [product for product in map(_product, gradients)
                if product is not None and _is_thin(product.op)]
    products = [product for product in products
                if _transposed(product) == _transposed(products[0])]
    alone = len(products) < 2 or not _on_cpus_of_one_process(
        [device] + [product.op.device for product in products])
    return [] if alone else products


def _product(gradient):
    """`Product`, or None where a gradient is something else."""
    if not isinstance(gradient, tf.Tensor):
        return None
    op, waits_for = gradient.op, []
    while op.type == 'Identity':  # tf.gradients puts one after what an operation has several of
        waits_for += op.control_inputs
        op = op.inputs[0].op
    if op.type != 'MatMul' or '_XlaCompile' in op.node_def.attr:
        return None
    return Product(gradient, op, waits_for)


def _transposed(product):
    return product.op.get_attr('transpose_a'), product.op.get_attr('transpose_b')


def _is_thin(matmul):
    """Whether its factors are thin, and the product large."""
    shapes = [tensor.shape for tensor in matmul.inputs]
    if not all(shape.is_fully_defined() for shape in shapes):
        return False
    rows = shapes[0].as_list()[0 if matmul.get_attr('transpose_a') else 1]
    elements = matmul.outputs[0].shape.num_elements()
    of_factors = sum(shape.num_elements() for shape in shapes)
    return rows <= _MOST_ROWS and elements >= max(_LEAST_ELEMENTS, 2 * of_factors)


def _on_cpus_of_one_process(devices):
    specs = [tf.DeviceSpec.from_string(device) for device in devices]
    return (all(spec.device_type == 'CPU' for spec in specs)
            and len({(spec.job, spec.replica, spec.task) for spec in specs}) == 1)
