"""How TensorFlow's kernels use memory, by their sources and by FULL_TRACE runs on 1.15.5 and 2.21.

A type of operation that is not named here allocates its outputs and nothing else. The functions
take a `Node` of a `StepGraph`.

Words of `graph/op_types.py` used here: `HAND_ON` are operations that give their input on unchanged,
such as `Identity` and `Enter`; `RESHAPES` give its value in another shape.
"""

import os
import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers import compat
from towers.graph.op_types import HAND_ON, RESHAPES
from towers.memory.node import Node

# Types of operations whose output is the input's memory.
_PASSES_ON = HAND_ON | RESHAPES | {
    'CheckNumericsV2', 'Snapshot', 'PlaceholderWithDefault', 'EnsureShape', 'Bitcast', 'LoopCond',
    'TensorArrayWriteV3', 'StackPushV2', 'StackPush'}
# {type of an operation whose outputs are parts of an input: the position of that input}. Parts
# along the first dimension are in the input's memory. (Input 0 of a `Split` is the axis.)
CUTS = {'Split': 1, 'SplitV': 0, 'Slice': 0, 'StridedSlice': 0, 'Unpack': 0}

# Types of operations that write their output into an input of the same size that no other operation
# needs any more. `_UNARY` write into the first input, `_BINARY` into the first or the second.
_UNARY = ['Abs', 'Acos', 'Acosh', 'Asin', 'Asinh', 'Atan', 'Atanh', 'Ceil', 'Conj', 'Cos', 'Cosh',
          'Digamma', 'Elu', 'Erf', 'Erfc', 'Exp', 'Expm1', 'Floor', 'Inv', 'Invert', 'LeakyRelu',
          'Lgamma', 'Log', 'Log1p', 'LogSoftmax', 'LogicalNot', 'Neg', 'Reciprocal', 'Relu',
          'Relu6', 'Rint', 'Round', 'Rsqrt', 'Selu', 'Sigmoid', 'Sign', 'Sin', 'Sinh', 'Softmax',
          'Softplus', 'Softsign', 'Sqrt', 'Square', 'Tan', 'Tanh', 'BiasAdd', 'BiasAddV1',
          'ClipByValue', 'FusedBatchNorm', 'FusedBatchNormV2', 'FusedBatchNormV3',
          'TensorScatterUpdate']
_BINARY = ['Add', 'AddV2', 'Atan2', 'BitwiseAnd', 'BitwiseOr', 'Div', 'DivNoNan', 'FloorDiv',
           'FloorMod', 'LogicalAnd', 'LogicalOr', 'Maximum', 'Minimum', 'Mod', 'Mul', 'MulNoNan',
           'Pow', 'RealDiv', 'SquaredDifference', 'Sub', 'TruncateDiv', 'Xdivy', 'Xlogy',
           'EluGrad', 'InvGrad', 'LeakyReluGrad', 'ReciprocalGrad', 'Relu6Grad', 'ReluGrad',
           'RsqrtGrad', 'SeluGrad', 'SigmoidGrad', 'SoftplusGrad', 'SoftsignGrad', 'SqrtGrad',
           'TanhGrad']
_ANY_INPUT = range(1 << 20)  # no operation has so many inputs
# {type: {index of an output: indices of the inputs that it may be written into}}
REUSES: typing.Dict[str, typing.Dict[int, typing.Container[int]]] = {}
REUSES.update(dict.fromkeys(_UNARY, {0: (0,)}))
REUSES.update(dict.fromkeys(_BINARY, {0: (0, 1)}))
REUSES.update({
    'AddN': {0: _ANY_INPUT}, 'AccumulateNV2': {0: _ANY_INPUT},
    'Select': {0: (1, 2)}, 'SelectV2': {0: (1, 2)},
    'SoftmaxCrossEntropyWithLogits': {1: (0,)},
    'SparseSoftmaxCrossEntropyWithLogits': {1: (0,)}})

_FLOAT_BYTES = 4
_INT64_BYTES = 8
# The floats, of three matrices, on which a convolution's gradient works at a time.
_CACHE_FLOATS = (30 << 20) // _FLOAT_BYTES
# If an image has so many floats for each core, or more, the gradient of the images works on one
# image at a time.
_FLOATS_A_CORE = (256 << 10) // _FLOAT_BYTES


def passes_on(node: Node) -> bool:
    """Whether a node's outputs are the memory of its input, so that they take no more memory."""
    if node.type in _PASSES_ON or _has_reference(node):
        return True
    return node.type in CUTS and _cuts_along_rows(node)


def _has_reference(node: Node) -> bool:
    """Whether an output of a node is a reference to a variable, which is written in place."""
    return any(tensor.dtype != tensor.dtype.base_dtype for tensor in node.op.outputs)


def _cuts_along_rows(node: Node) -> bool:
    """Whether each output of a node of a type in `CUTS` is whole rows of the input, one after the
    other, so that the output can be a piece of the input's memory.

    Rows 2 to 5 of a [8, 3] tensor are such a piece. A column is not: its entries lie apart.
    """
    cut_shape = node.inputs[CUTS[node.type]].shape
    if not cut_shape:
        return False  # a shape that is not known, or a number
    if node.type == 'StridedSlice':
        steps = tf.get_static_value(node.op.inputs[3])
        takes_neighbours = steps is not None and np.all(steps == 1)
        if not takes_neighbours:  # the rows of `x[::2]` lie apart
            return False
    if node.type == 'Unpack':  # each output is one row, without the dimension of the rows
        return None not in node.shapes and node.op.get_attr('axis') == 0
    return all(_is_of_rows(shape, cut_shape) for shape in node.shapes)


def _is_of_rows(shape: typing.Optional[tuple], cut_shape: tuple) -> bool:
    """Whether a part of a tensor is whole rows of it.

    Args:
      shape: the shape of the part; None where it is not known.
      cut_shape: the shape of the tensor, of one dimension or more.
    """
    if shape is None or len(shape) != len(cut_shape):
        return False  # in `x[3]` the dimension of the rows is dropped
    return shape[1:] == cut_shape[1:]


def scratch(node: Node) -> int:
    """Bytes that a node's kernel takes for itself while it runs.

    These bytes are known for max pooling and convolutions on CPUs, and count as 0 elsewhere. With
    oneDNN, convolutions take almost no scratch.
    """
    if 'CPU' not in node.device:
        return 0
    if node.type == 'MaxPoolGrad':
        return _places_of_maxima(node)
    if node.type in ('Conv2DBackpropFilter', 'Conv2DBackpropInput') and not compat.uses_onednn():
        return _patches(node)
    return 0


def _places_of_maxima(node: Node) -> int:
    """Bytes of the positions of all maxima, in the gradient of a max pooling (`MaxPoolGrad`).

    Its kernel does the pooling once more, in order to know where each maximum is. It writes the
    positions into memory of its own, and the maxima over its input 1, the result of the pooling
    (`maxpooling_op.cc`).
    """
    pooled = node.inputs[1]
    num_maxima = pooled.size // _FLOAT_BYTES  # as if they were float32
    return _INT64_BYTES * num_maxima


def _patches(node: Node) -> int:
    """Bytes of the patches of images that a convolution's gradient lays out as a matrix (im2col):
    at each place of the output one row, with the part of the image that the kernel covers there.

        bytes = 4 * images * (height * width) * (kernel height * kernel width * channels)

    Source: `conv_grad_filter_ops.cc`, `conv_grad_input_ops.h`. 0 where a shape is not known.
    """
    convolution = _convolution_of(node)
    # An empty tensor has no floats, by whose number `_images_at_a_time` would divide.
    if convolution is None or not convolution.floats_an_image:
        return 0
    images = _images_at_a_time(node, convolution)
    return _FLOAT_BYTES * images * convolution.places * convolution.patch


class _Convolution(typing.NamedTuple):
    """The sizes of a convolution, whose gradient a kernel computes by products of matrices.

    Attributes:
      batch: the number of images.
      places: the places of the output in an image: height times width.
      patch: the floats of the part of an image that the kernel covers at one place.
      filters: the channels of the output.
    """
    batch: int
    places: int
    patch: int
    filters: int

    @property
    def floats_an_image(self) -> int:
        """The floats of the three matrices of the product for one image: the gradient of the
        output, the weights, and the patches."""
        output = self.places * self.filters
        weights = self.patch * self.filters
        patches = self.places * self.patch
        return output + weights + patches


def _convolution_of(node: Node) -> typing.Optional[_Convolution]:
    """The `_Convolution` whose gradient a node computes; None where a shape is not known, and for
    NCHW, for which only oneDNN has a kernel on CPUs."""
    if node.type == 'Conv2DBackpropFilter':
        weights_shape = node.shapes[0]  # the result has the shape of the weights
    else:
        weights_shape = node.inputs[1].shape
    gradient_shape = node.inputs[2].shape  # of the convolution's output, in both operations
    if gradient_shape is None or weights_shape is None:
        return None
    if node.op.get_attr('data_format') != b'NHWC':
        return None
    batch, height, width, _ = gradient_shape
    kernel_height, kernel_width, channels, filters = weights_shape
    return _Convolution(batch, places=height * width,
                        patch=kernel_height * kernel_width * channels, filters=filters)


def _images_at_a_time(node: Node, convolution: _Convolution) -> int:
    """For how many images a kernel has memory for patches: for as many as fill 30 MB with the
    three matrices, rounded up, also where the batch has fewer images.

    The gradient of the images has memory for one image alone, if the batch has one image, or if
    one image is enough work for all cores (`conv_grad_input_ops.h`).
    """
    if node.type == 'Conv2DBackpropInput':
        floats_a_core = convolution.floats_an_image // (os.cpu_count() or 1)
        if convolution.batch == 1 or floats_a_core >= _FLOATS_A_CORE:
            return 1
    return -(-_CACHE_FLOATS // convolution.floats_an_image)
