"""The gradient of a wide dense layer as one product over the examples of all towers.

Tower k's gradient of a dense layer's weights is the product of the layer's inputs x_k [r_k, m] and
the gradient y_k [r_k, n] of its outputs, a row an example. The sum over the towers is

    sum_k x_k^T y_k  =  [x_1; …; x_N]^T [y_1; …; y_N]

With few examples a tower, this saves making N products as large as the weights, and reading them
again to add them up (the "sufficient factors" of Xie et al., UAI 2016). The towers' own products
stay in the graph; TensorFlow's optimizer drops them from a step that fetches none of them.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.graph.graph_walk import ancestors, operations_named
from towers.graph.variable_access import REFERENCE_VARIABLES

# Measured on two cores, see benchmarks/results/speed.md: from 64 examples a tower on, towers that
# multiply side by side are as fast. More than 128 rows in all were not measured.
_MOST_ROWS = 32  # of one tower
_MOST_JOINT_ROWS = 128  # of all towers
_LEAST_ELEMENTS = 2 ** 20  # of the variable


def joined_product(gradients: typing.List[typing.Any],
                   variable: tf.Variable) -> typing.Optional[tf.Tensor]:
    """The sum of the towers' gradients of a variable [m, n] as one product, on the current device.

    Args:
      gradients: the gradients, one a tower.
      variable: the variable.

    Returns:
      The sum. None where it cannot be one product; where one product would not be faster, see
      `_can_be_replaced`; or where the devices are not CPUs of one process.
    """
    if len(gradients) < 2:
        return None
    products = []
    devices = [variable.device]
    awaited: typing.List[tf.Operation] = []
    for gradient in gradients:
        if not isinstance(gradient, tf.Tensor):
            return None  # a sparse gradient
        source = _source_of(gradient)
        products.append(source.op)
        devices.append(source.op.device)
        awaited += source.control_inputs
    if not _are_cpus_of_one_process(devices) or not _can_be_replaced(products, variable):
        return None
    factors = _factors(products)
    if factors is None or not factors.have_few_rows:
        return None
    with tf.control_dependencies(awaited):  # what the towers' own products wait for
        # The rows of all towers, one below another: [sum of r_k, m] and [sum of r_k, n]; or the
        # transposes of these.
        x = tf.concat(factors.inputs, axis=factors.axis_of_rows_of_x)
        y = tf.concat(factors.output_gradients, axis=factors.axis_of_rows_of_y)
        return tf.matmul(x, y, transpose_a=factors.transpose_x, transpose_b=factors.transpose_y)


class _Factors(typing.NamedTuple):
    """The two factors of every tower's product `tf.matmul(x_k, y_k, transpose_x, transpose_y)`.

    Attributes:
      inputs: x_k of each tower, the layer's inputs; [r_k, m] if `transpose_x`, else [m, r_k].
      output_gradients: y_k of each tower, the gradients of the layer's outputs; [n, r_k] if
        `transpose_y`, else [r_k, n].
      transpose_x: whether the products transpose x.
      transpose_y: whether the products transpose y.
    """

    inputs: typing.List[tf.Tensor]
    output_gradients: typing.List[tf.Tensor]
    transpose_x: bool
    transpose_y: bool

    @property
    def axis_of_rows_of_x(self) -> int:
        """The dimension of x_k along which the r_k examples of a tower are."""
        if self.transpose_x:
            return 0
        return 1

    @property
    def axis_of_rows_of_y(self) -> int:
        """The dimension of y_k along which the r_k examples of a tower are."""
        if self.transpose_y:
            return 1
        return 0

    @property
    def have_few_rows(self) -> bool:
        """Whether the towers have so few examples that one product of all of them is faster."""
        row_counts = [x.shape.as_list()[self.axis_of_rows_of_x] for x in self.inputs]  # r_k
        return max(row_counts) <= _MOST_ROWS and sum(row_counts) <= _MOST_JOINT_ROWS


class _Source(typing.NamedTuple):
    """Where a tensor comes from."""
    op: tf.Operation  # the operation that computes it, and not only hands it on
    control_inputs: typing.List[tf.Operation]  # what `op` and the `Identity`s after it wait for


def _source_of(tensor: tf.Tensor) -> _Source:
    """The operation that computes a tensor: the operation before all `Identity`s.

    Where a gradient function gives several gradients, as `MatMul`'s does, `tf.gradients` puts an
    `Identity` after each gradient, which waits for all of these gradients.
    """
    op = tensor.op
    control_inputs = list(op.control_inputs)
    while op.type == 'Identity':
        op = op.inputs[0].op
        control_inputs += op.control_inputs
    return _Source(op, control_inputs)


def _can_be_replaced(products: typing.List[tf.Operation], variable: tf.Variable) -> bool:
    """Whether the operations that compute the towers' gradients of a variable are products of thin
    matrices, of a large variable, that a step can do without."""
    elements = variable.get_shape().num_elements() or 0  # None for a shape that is not static
    if elements < _LEAST_ELEMENTS:
        return False
    return all(_is_thin_product(op, elements) and _can_be_left_out(op) for op in products)


def _factors(products: typing.List[tf.Operation]) -> typing.Optional[_Factors]:
    """The factors of the towers' products; None where the products do not all transpose the same
    factors."""
    transpositions = {(op.get_attr('transpose_a'), op.get_attr('transpose_b')) for op in products}
    if len(transpositions) > 1:
        return None
    [(transpose_x, transpose_y)] = transpositions
    inputs = [op.inputs[0] for op in products]
    output_gradients = [op.inputs[1] for op in products]
    return _Factors(inputs, output_gradients, transpose_x, transpose_y)


def _is_thin_product(op: tf.Operation, elements: int) -> bool:
    """Whether an operation is a product of matrices of static shapes that are much smaller than the
    product.

    Joining the towers' products reads and writes each factor once more, and saves reading and
    writing the products. It pays where the factors have at most half of a product's elements.

    Args:
      op: the operation that computes a tower's gradient.
      elements: the number of elements of the variable, and so of the product.
    """
    if op.type != 'MatMul':
        return False
    elements_of_factors = 0
    for factor in op.inputs:
        if not factor.shape.is_fully_defined():
            return False
        elements_of_factors += factor.shape.num_elements()
    return 2 * elements_of_factors <= elements


def _can_be_left_out(product: tf.Operation) -> bool:
    """Whether a step may do without a tower's own product, if it computes the joined one: XLA does
    not compile it with the rest of its tower, no operation reads it, and nothing goes by the time
    at which it is computed."""
    is_compiled_by_xla = '_XlaCompile' in product.node_def.attr
    if is_compiled_by_xla or _is_read(product.outputs[0]):
        return False
    # The product may read the memory of a reference variable V upstream. `tf.gradients` makes the
    # gradients of a product's factors wait for each other, so that the gradient of V, and with it
    # the update of V, comes after the tower's own product. It would not come after the joined one.
    upstream = operations_named(product.graph, ancestors(product.inputs))
    types_upstream = {op.type for op in upstream}
    return types_upstream.isdisjoint(REFERENCE_VARIABLES)


def _is_read(tensor: tf.Tensor) -> bool:
    """Whether an operation computes with a tensor, directly or through identities."""
    for op in tensor.consumers():
        if op.type != 'Identity' or _is_read(op.outputs[0]):
            return True
    return False


def _are_cpus_of_one_process(devices: typing.Iterable[str]) -> bool:
    """Whether all these devices are CPUs, and of one task. On GPUs, and across processes, it was
    not measured whether one product is faster."""
    kinds = set()  # 'CPU', 'GPU'
    tasks = set()  # processes
    for device in devices:
        spec = tf.DeviceSpec.from_string(device)
        kinds.add(spec.device_type)
        tasks.add((spec.job, spec.replica, spec.task))
    return kinds == {'CPU'} and len(tasks) == 1
