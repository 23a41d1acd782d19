"""The table of rules: one row for each kind of operation, with the sentence that justifies it.

To add an operation, add its type to the row whose sentence holds for it, or a row with a rule of
its own; and a test that compares towers with one device. An operation in no row gives results of
which nothing is proven, unless none of its inputs depends on the examples.
"""

import typing

from towers.proof import arithmetic, images, joining, layout, loops, loops_v2, places, rows, sizes


class Row(typing.NamedTuple):
    """What is known of operations of some types."""
    types: str  # the types, with spaces between them
    rule: typing.Callable  # (operation, states of its inputs, view) -> state, or a list of states
    because: str  # why the rule holds
    takes_numbers: bool = False  # whether the rule knows NUMBER and PLACES
    takes_unknown: bool = False  # whether the rule looks at inputs of which nothing is proven
    by_entry: bool = False  # whether each entry of the result is made of those at its place alone
    takes_sizes: bool = False  # whether the rule knows SIZES; for others they are counts or marks
    cancels: bool = False  # whether the rule says what is left of each mean, sum and share
    looks_at_values: bool = True  # whether the marks of the inputs are those of the result, too


TABLE = [
    # ---- element by element
    Row('Identity Snapshot StopGradient PreventGradient CheckNumerics EnsureShape Print PrintV2 '
        'DeepCopy RefIdentity PlaceholderWithDefault',
        loops.handed_on,
        'The value itself.', takes_numbers=True, takes_sizes=True),
    Row('IdentityN', loops.all_handed_on,
        'The values themselves.', takes_numbers=True, takes_sizes=True, cancels=True),
    Row('Neg Conj Real Imag', arithmetic.linear,
        'The mean of f is f of the mean, since f is linear.', by_entry=True),
    Row('Cast', arithmetic.cast,
        'Exact but for rounding, except to integers.', takes_numbers=True, takes_sizes=True,
        by_entry=True),
    Row('Add AddV2 Sub AddN AccumulateNV2', arithmetic.add,
        'A sum of means is a mean, a sum of sums a sum; a mean plus a constant is a mean.',
        takes_sizes=True, by_entry=True),
    Row('Mul', arithmetic.multiply,
        'A constant times a mean is a mean; a mean times the number of examples is a sum.',
        takes_sizes=True, by_entry=True, cancels=True),
    Row('RealDiv Div DivNoNan', arithmetic.divide,
        'A sum divided by the number of examples is a mean; by a constant it stays a sum.',
        takes_sizes=True, by_entry=True, cancels=True),
    Row('Select SelectV2', arithmetic.select,
        'By a condition that is the same on every tower all towers take the same value.',
        by_entry=True),
    Row('Maximum Minimum FloorDiv Pow SquaredDifference FloorMod Mod TruncateDiv TruncateMod '
        'Atan2 Xdivy Xlogy Xlog1py MulNoNan NextAfter Abs Sign Square Sqrt Rsqrt Reciprocal Inv '
        'Exp Expm1 Log Log1p Sigmoid Tanh Sin Cos Tan Asin Acos Atan Sinh Cosh Asinh Acosh Atanh '
        'Floor Ceil Round Rint Erf Erfc Erfinv Ndtri Lgamma Digamma Igamma Igammac Zeta '
        'Polygamma Betainc '
        'Relu Relu6 Elu Selu Softplus Softsign LeakyRelu Greater GreaterEqual Less LessEqual '
        'Equal NotEqual ApproximateEqual LogicalAnd LogicalOr LogicalNot IsFinite IsNan IsInf '
        'ClipByValue BitwiseAnd BitwiseOr BitwiseXor Invert LeftShift RightShift Complex '
        'ReluGrad Relu6Grad LeakyReluGrad EluGrad SeluGrad SoftplusGrad SoftsignGrad SigmoidGrad '
        'TanhGrad SqrtGrad RsqrtGrad ReciprocalGrad InvGrad Bucketize AsString StringToNumber '
        'StringToHashBucketFast StringToHashBucketStrong StringJoin BesselI0e BesselI1e '
        'FakeQuantWithMinMaxArgs',
        arithmetic.elementwise,
        'Each entry of the result is a function of the entries at its place.', takes_sizes=True,
        by_entry=True),
    Row('LookupTableFind LookupTableFindV2', rows.looked_up,
        'Each entry of the result is what a table has for the entry at its place.'),
    Row('BiasAdd', images.bias_add,
        'A vector is added to each entry along the dimension of the channels.'),
    Row('Softmax LogSoftmax SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits '
        'L2Normalize',
        arithmetic.along_last,
        'Each row along the last dimension by itself.'),
    Row('TopK TopKV2 InTopK InTopKV2', arithmetic.largest,
        'Each row along the last dimension by itself.'),
    # ---- over dimensions
    Row('Mean Sum Max Min Prod All Any ArgMax ArgMin EuclideanNorm', arithmetic.reduce,
        "Over the examples' dimension, a mean or a sum over them; over others, each by itself.",
        takes_sizes=True),
    Row('L2Loss', arithmetic.l2_loss,
        'Half the sum of the squares of all entries.'),
    Row('BiasAddGrad', arithmetic.bias_add_gradient,
        'The sum over all dimensions but that of the channels.'),
    Row('MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3', arithmetic.matmul,
        'Row by row; over the examples of both factors, the sum of their products.'),
    Row('Einsum', arithmetic.einsum,
        'Letter by letter; over the examples of all factors, the sum of their products.'),
    # ---- sizes, and tensors of a size
    Row('Shape Size Rank ShapeN', sizes.shape_of,
        'The examples have one dimension, and all others are the same on every tower.',
        takes_sizes=True),
    Row('Fill', sizes.filled,
        'All entries are one value.', takes_sizes=True),
    Row('ZerosLike OnesLike', sizes.like,
        'All entries are one value.', takes_sizes=True),
    Row('BroadcastTo', sizes.broadcast,
        'A value without the examples is the same for all of them.', takes_sizes=True),
    Row('Range', sizes.numbered,
        'Counts.', takes_sizes=True),
    Row('RandomUniform RandomStandardNormal TruncatedNormal RandomUniformInt RandomGamma '
        'StatelessRandomUniform StatelessRandomUniformV2 StatelessRandomNormal '
        'StatelessRandomNormalV2 StatelessTruncatedNormal StatelessTruncatedNormalV2 '
        'StatelessRandomUniformInt StatelessRandomUniformIntV2',
        sizes.random,
        'Numbers drawn for each entry, so for each example where the shape has the examples.',
        takes_sizes=True),
    # ---- the same entries elsewhere
    Row('Reshape', layout.reshape,
        'The entries keep their order, and an example its stride.', takes_numbers=True,
        takes_sizes=True),
    Row('ExpandDims', layout.expand_dims,
        'A dimension more.', takes_numbers=True, takes_sizes=True),
    Row('Squeeze', layout.squeeze,
        'Fewer dimensions of length 1.', takes_numbers=True, takes_sizes=True),
    Row('Transpose ConjugateTranspose', layout.transpose,
        'The dimensions in another order.'),
    Row('Pad MirrorPad', layout.pad,
        'More entries along other dimensions; zeros around a sum are sums of zeros.'),
    Row('Tile', layout.tile,
        'The same entries again.', takes_sizes=True),
    Row('StridedSlice', rows.strided_slice,
        'All of the examples, and a part of the other dimensions.', takes_numbers=True,
        takes_sizes=True),
    Row('StridedSliceGrad', layout.strided_slice_gradient,
        'The gradient of a slice of all examples is of all of them, with zeros around.',
        takes_sizes=True),
    Row('Slice', layout.slice_,
        'All of the examples, and a part of the other dimensions.', takes_sizes=True),
    Row('ReverseV2 Roll Cumsum', layout.in_order,
        'Along other dimensions, each example by itself; linear.'),
    Row('Cumprod CumulativeLogsumexp', layout.accumulated,
        'Along other dimensions, each example by itself.'),
    Row('MatrixBandPart MatrixDiag MatrixDiagPart', layout.band,
        'On the last two dimensions, each example by itself; linear.'),
    Row('MatrixDiagV3 MatrixDiagPartV3 MatrixInverse MatrixDeterminant Cholesky',
        layout.of_matrices,
        'On the last two dimensions, each example by itself.'),
    Row('Unpack', joining.unpack,
        'Parts along another dimension have the examples where they were.', takes_sizes=True),
    Row('Split SplitV', joining.split,
        'Parts along another dimension have the examples where they were.'),
    Row('ConcatV2', joining.concat,
        'Beside each other along another dimension; all examples after all examples.',
        takes_sizes=True),
    Row('Pack', joining.pack,
        'Beside each other along a new dimension.', takes_numbers=True, takes_sizes=True),
    Row('Gather GatherV2 ResourceGather', places.gather,
        'Rows of a table that all towers share, by places of the examples.', takes_numbers=True,
        takes_sizes=True),
    Row('GatherNd ResourceGatherNd', rows.gather_nd,
        'Entries of each example, by its own number.', takes_numbers=True),
    Row('OneHot', places.one_hot,
        'A dimension more.'),
    Row('ReverseSequence', images.reverse_sequence,
        'Along the sequence of each example.'),
    Row('Where', rows.where,
        'The places that a mask leaves, in the order of the examples.'),
    Row('LogUniformCandidateSampler UniformCandidateSampler',
        rows.sampled,
        'Draws classes whatever the examples are; and how often it expects those of each example.'),
    # ---- images
    Row('Conv2D DepthwiseConv2dNative Conv3D MaxPool MaxPoolV2 AvgPool MaxPool3D AvgPool3D LRN '
        'ResizeBilinear ResizeNearestNeighbor ResizeBicubic ResizeArea SpaceToDepth DepthToSpace '
        'ExtractImagePatches Dilation2D RGBToHSV HSVToRGB AdjustContrastv2 AdjustHue '
        'AdjustSaturation',
        images.images(0),
        'Each image by itself.'),
    Row('MaxPoolWithArgmax', images.largest_places,
        'Each image by itself.'),
    Row('Conv2DBackpropInput Conv3DBackpropInputV2 DepthwiseConv2dNativeBackpropInput',
        images.transposed_convolution,
        'Each image by itself.', takes_sizes=True),
    Row('SpaceToBatchND', images.space_to_batch,
        'All images of the first block, then all of the next.'),
    Row('BatchToSpaceND', images.batch_to_space,
        'The blocks of an image, which are all images apart.'),
    Row('FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3', images.fused_batch_norm,
        'Per channel, by the mean and the variance of all images.'),
    # ---- rows
    Row('SparseTensorDenseMatMul', rows.sparse_product,
        'A row of the product for each row of the sparse tensor.', takes_numbers=True,
        takes_sizes=True),
    Row('SparseToDense', rows.sparse_to_dense,
        'A row for each row of the sparse tensor.', takes_numbers=True, takes_sizes=True),
    Row('ScatterNd', rows.scatter_nd,
        'The rows of each example at their places.', takes_numbers=True, takes_sizes=True),
    Row('UnsortedSegmentSum', rows.sums_by_number,
        'The sum of the rows of each example.', takes_numbers=True, takes_sizes=True),
    Row('CTCLoss', rows.ctc_loss,
        'The loss of each sequence by itself.', takes_numbers=True),
    # ---- loops and branches
    Row('Enter RefEnter', loops.entered,
        'The value itself.', takes_numbers=True, takes_sizes=True, cancels=True),
    Row('NextIteration', loops.handed_on,
        'The value itself.', takes_numbers=True, takes_sizes=True,
        cancels=True),
    Row('LoopCond', loops.handed_on,
        'The value itself.', takes_numbers=True, takes_sizes=True,
        cancels=True, takes_unknown=True,
        looks_at_values=False),
    Row('Switch RefSwitch', loops.switch,
        'The value itself, in the branch that is taken.', takes_numbers=True, takes_sizes=True,
        cancels=True, takes_unknown=True,
        looks_at_values=False),
    Row('Merge RefMerge', loops.merge,
        'One of two values.', takes_numbers=True, takes_sizes=True,
        cancels=True, takes_unknown=True,
        looks_at_values=False),
    Row('Exit', loops.left,
        'The value after the last iteration.', takes_numbers=True, takes_sizes=True,
        cancels=True, takes_unknown=True,
        looks_at_values=False),
    Row('TensorArrayV3 TensorArraySizeV3 TensorArrayScatterV3 TensorArrayWriteV3 '
        'TensorArrayReadV3 TensorArrayGatherV3',
        loops.array,
        'An array has the state of its elements.', takes_numbers=True, takes_sizes=True,
        cancels=True, takes_unknown=True,
        looks_at_values=False),
    Row('TensorListReserve EmptyTensorList', loops_v2.made,
        'Nothing is written yet.', takes_sizes=True),
    Row('TensorListFromTensor', loops_v2.from_tensor,
        'An element for each entry along the first dimension.'),
    Row('TensorListLength', loops_v2.length,
        'The number of places that the list was made with.'),
    Row('TensorListGetItem', loops_v2.item,
        'The element, at a place that all towers know.', takes_numbers=True, takes_sizes=True),
    Row('TensorListSetItem', loops_v2.set_item,
        'The elements before, or the new one.', takes_numbers=True, takes_sizes=True,
        cancels=True),
    Row('TensorListStack', loops_v2.stacked,
        'The elements along a new dimension.'),
]

RULES = {kind: row for row in TABLE for kind in row.types.split()}
