"""How TensorFlow's kernels use memory: which pass it on, write into inputs, or need scratch.

This was read from the kernels' sources and compared with the allocations that a FULL_TRACE run
records, on TF 1.15.5 and 2.21. A type of operation that is not named here allocates its outputs and
nothing else.
"""

import os

import tensorflow.compat.v1 as tf

from towers.graph.op_types import HAND_ON, RESHAPES

# The output is the input's memory.
PASSES_ON = HAND_ON | RESHAPES | {
    'CheckNumericsV2', 'Snapshot', 'PlaceholderWithDefault', 'EnsureShape', 'Bitcast', 'LoopCond',
    'TensorArrayWriteV3', 'StackPushV2', 'StackPush'}

# The outputs are parts of the input along its first dimension, in the input's memory.
CUTS = frozenset(['Split', 'SplitV', 'Slice', 'StridedSlice', 'Unpack'])

# These write their output into an input of the same size that no other operation needs any more.
_UNARY = ['Abs', 'Acos', 'Acosh', 'Asin', 'Asinh', 'Atan', 'Atanh', 'Ceil', 'Conj', 'Cos', 'Cosh',
          'Digamma', 'Elu', 'Erf', 'Erfc', 'Exp', 'Expm1', 'Floor', 'Inv', 'Invert', 'LeakyRelu',
          'Lgamma', 'Log', 'Log1p', 'LogSoftmax', 'LogicalNot', 'Neg', 'Reciprocal', 'Relu',
          'Relu6', 'Rint', 'Round', 'Rsqrt', 'Selu', 'Sigmoid', 'Sign', 'Sin', 'Sinh', 'Softmax',
          'Softplus', 'Softsign', 'Sqrt', 'Square', 'Tan', 'Tanh']
_BINARY = ['Add', 'AddV2', 'Atan2', 'BitwiseAnd', 'BitwiseOr', 'Div', 'DivNoNan', 'FloorDiv',
           'FloorMod', 'LogicalAnd', 'LogicalOr', 'Maximum', 'Minimum', 'Mod', 'Mul', 'MulNoNan',
           'Pow', 'RealDiv', 'SquaredDifference', 'Sub', 'TruncateDiv', 'Xdivy', 'Xlogy',
           'EluGrad', 'InvGrad', 'LeakyReluGrad', 'ReciprocalGrad', 'Relu6Grad', 'ReluGrad',
           'RsqrtGrad', 'SeluGrad', 'SigmoidGrad', 'SoftplusGrad', 'SoftsignGrad', 'SqrtGrad',
           'TanhGrad']
# Type: {number of an output: numbers of the inputs that it may be written into}.
REUSES = dict([(kind, {0: (0,)}) for kind in _UNARY] + [(kind, {0: (0, 1)}) for kind in _BINARY])
REUSES.update({
    'AddN': {0: tuple(range(10000))}, 'AccumulateNV2': {0: tuple(range(10000))},
    'BiasAdd': {0: (0,)}, 'BiasAddV1': {0: (0,)}, 'Select': {0: (1, 2)}, 'SelectV2': {0: (1, 2)},
    'ClipByValue': {0: (0,)}, 'FusedBatchNorm': {0: (0,)}, 'FusedBatchNormV2': {0: (0,)},
    'FusedBatchNormV3': {0: (0,)}, 'SoftmaxCrossEntropyWithLogits': {1: (0,)},
    'SparseSoftmaxCrossEntropyWithLogits': {1: (0,)}, 'TensorScatterUpdate': {0: (0,)}})

# These write a resource variable; its old memory is left to operations that still read it.
UPDATES = ('ResourceApply', 'AssignVariableOp', 'AssignAddVariableOp', 'AssignSubVariableOp',
           'ResourceScatter', 'ResourceSparseApply')

_CACHE_FLOATS = (30 << 20) // 4  # floats that a convolution's gradient works on at a time


def is_update(kind):
    """Whether a type of operation writes a resource variable."""
    return kind.startswith(UPDATES)


def updated_inputs(node):
    """Numbers of the inputs with the handles of the variables that an update writes in place."""
    if node.type == 'AssignVariableOp':
        return ()  # the variable takes over the value's memory
    return [number for number, tensor in enumerate(node.op.inputs) if tensor.dtype == tf.resource]


def is_variable(kind):
    """Whether a type of operation is a variable."""
    return kind in ('VarHandleOp', 'VariableV2', 'Variable', 'TemporaryVariable')


def is_fed(kind):
    """Whether a type of operation stands for a fed value, which the caller holds for the step."""
    return kind in ('Placeholder', 'PlaceholderV2')


def variable_bytes(node):
    """Bytes of the variable that an operation is; 0 where its shape is not known."""
    shape = tf.TensorShape(node.op.get_attr('shape'))
    dtype = tf.as_dtype(node.op.get_attr('dtype'))
    return (shape.num_elements() or 0) * dtype.size if shape.is_fully_defined() else 0


def variable_of(node):
    """The node of a handle's variable; nodes that pass the handle on are skipped."""
    while node.inputs and not is_variable(node.type):
        node = node.inputs[0][0]
    return node


def passes_on(node):
    """Whether a node's outputs are memory of its input."""
    if node.idle:
        return False
    if node.type in PASSES_ON:
        return True
    if any(tensor.dtype != tensor.dtype.base_dtype for tensor in node.op.outputs):
        return True  # a reference variable, which is written in place
    return node.type in CUTS and _cuts_first_dimension(node)


def _cuts_first_dimension(node):
    """Whether each output is a run of rows of the input, or all of its rows."""
    number = 1 if node.type == 'Split' else 0
    whole, parts = _shape(node, number), node.shapes
    if whole is None or any(part is None for part in parts):
        return False
    if node.type == 'Unpack':
        return node.op.get_attr('axis') == 0
    if any(len(part) != len(whole) for part in parts):
        return False
    return all(part[1:] == whole[1:] for part in parts) and len(whole) > 0


def scratch(node, onednn=False):
    """Bytes that a kernel on a CPU takes for itself while it runs, without oneDNN.

    A convolution's gradient lays out the patches of some images at a time, of as many as fill 30 MB
    together with the other factors (`conv_grad_filter_ops.cc`, `conv_grad_input_ops.h`). The
    gradient of a maximum pooling looks for the maxima again (`maxpooling_op.cc`).

    Args:
      node: `Node`.
      onednn: whether oneDNN's convolutions run, which take next to nothing.
    """
    if node.idle:
        return 0
    if node.type == 'MaxPoolGrad' and node.sizes:
        elements = node.inputs[1][0].sizes[node.inputs[1][1]] // 4
        return 8 * elements  # places, int64; the maxima go where the output was
    if onednn or node.type not in ('Conv2DBackpropFilter', 'Conv2DBackpropInput'):
        return 0
    gradient = _shape(node, 2)
    weights = node.shapes[0] if node.type.endswith('Filter') else _shape(node, 1)
    if gradient is None or weights is None or len(gradient) != 4:
        return 0
    if node.op.get_attr('data_format') != b'NHWC':
        return 0
    places = gradient[1] * gradient[2]
    patch = weights[0] * weights[1] * weights[2]
    depth = weights[3]
    work = places * depth + patch * depth + places * patch
    if not work:
        return 0
    images = -(-_CACHE_FLOATS // work)
    if node.type.endswith('Input') and (
            gradient[0] == 1 or work // (os.cpu_count() or 1) >= (256 << 10) // 4):
        images = 1
    return 4 * images * places * patch


def _shape(node, number):
    other, index = node.inputs[number]
    return other.shapes[index]
