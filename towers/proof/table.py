"""The table of rules: one row for each kind of operation, with the sentence that justifies it.

To add an operation, add its type to the row whose sentence holds for it, or a row with a rule of
its own; and lines in `tests/proof/test_rules.py` (docs/proof.md has the steps). Of the results of
an operation in no row nothing is proven, unless none of its inputs depends on the examples.
"""

import typing

from towers.proof.rules import (
    arrays,
    broadcast_gradients,
    entries,
    fills,
    gathers,
    images,
    joining,
    layout,
    lookups,
    loops,
    products,
    recurrent,
    reductions,
    reshapes,
    rows,
    shapes,
    slices,
    tensor_lists,
)

_FIRST = slice(0, 1)
_FIRST_TWO = slice(0, 2)
_ALL = slice(None)
_ALL_BUT_FIRST = slice(1, None)
_ALL_BUT_LAST = slice(None, -1)
"""Places of inputs, for `Row.linear_in`: a result that is linear in an input is a mean where the
input is. All other inputs are arguments, such as an axis: a result is not known to be linear in an
argument."""


class Row(typing.NamedTuple):
    """What is known of operations of some types.

    The flags say for which inputs the rule has an answer, and what `by_table` adds to the answer.
    """
    # the types, with spaces between them
    types: str
    # (operation, states of its inputs, view) -> the state of all its results, or a list of states
    rule: typing.Callable
    # why the rule holds
    because: str
    # whether the rule has an answer for POSITION, ROW_POSITION and INDICES; if False, the results
    # of such inputs are unknown
    takes_positions: bool = False
    # a second function of the same arguments, which is asked before the rule: the states of the
    # results as sizes, where all inputs are sizes, or static integers, which may become lengths of
    # a shape later. It raises `NotKnown` where a result is no size. None: no result ever is a size
    of_sizes: typing.Optional[typing.Callable] = None
    # whether the rule has an answer for SIZES; if False, sizes are taken as numbers before the rule
    # is asked (`sizes.as_number`), unless the rule `takes_unknown`
    takes_sizes: bool = False
    # whether the rule has an answer for an UNKNOWN input, or an input whose state is not there yet
    # (a None); if False, the results are unknown, or not there. If True, the rule gets all states
    # as they are, and may ask the view for states further upstream (`Transfer.looks_further`)
    takes_unknown: bool = False
    # whether the rule says itself what becomes of means, sums and shares; if False, a result is
    # marked with the means, sums and shares among the inputs, but for what `linear_in` says
    accounts_for_totals: bool = False
    # the places of the inputs in which a result is linear, where it is a mean, a sum or a share
    # itself: such a result is not marked with the means, sums and shares at these places. The first
    # input alone, if a row says nothing
    linear_in: slice = _FIRST
    # whether `by_table` adds the marks of the inputs to the results; if False, the rule adds them
    keeps_marks: bool = True
    # whether a result is uniform where the inputs are uniform, since each entry is computed by
    # itself
    keeps_uniform: bool = False


_Flags = typing.Dict[str, typing.Any]  # of a `Row`
_BY_ENTRY: _Flags = dict(of_sizes=shapes.arithmetic, keeps_uniform=True)
_HANDED_ON: _Flags = dict(takes_positions=True, takes_sizes=True, accounts_for_totals=True)
_CONTROL_FLOW: _Flags = dict(takes_unknown=True, keeps_marks=False, **_HANDED_ON)
"""Rules of control flow take what is not known in a branch, and mark what they hand on."""

TABLE = [
    # ---- element by element
    Row('Identity Snapshot StopGradient PreventGradient CheckNumerics EnsureShape Print PrintV2 '
        'DeepCopy RefIdentity PlaceholderWithDefault',
        loops.identity,
        'The value itself.',
        **_HANDED_ON),
    Row('IdentityN', loops.identities,
        'The values themselves.',
        **_HANDED_ON),
    Row('Conj Real Imag', entries.linear,
        'The mean of f is f of the mean, since f is linear.', keeps_uniform=True),
    Row('Neg', entries.linear,
        'The mean of -f is minus the mean of f.', of_sizes=shapes.negative_sizes,
        keeps_uniform=True),
    Row('Cast', entries.cast,
        'Exact but for rounding, except to integers.', takes_positions=True, takes_sizes=True,
        keeps_uniform=True),
    Row('Add AddV2 Sub AddN AccumulateNV2', entries.add,
        'A sum of means is a mean, a sum of sums a sum; a mean plus a constant is a mean.',
        **_BY_ENTRY, linear_in=_ALL),
    Row('Mul', entries.multiply,
        'A constant times a mean is a mean; a mean times the number of examples is a sum.',
        **_BY_ENTRY, accounts_for_totals=True),
    Row('RealDiv Div DivNoNan', entries.divide,
        'A sum divided by the number of examples is a mean; by a constant it stays a sum.',
        **_BY_ENTRY, accounts_for_totals=True),
    Row('Select SelectV2', entries.select,
        'By a condition that is the same on every tower all towers take the same value.',
        keeps_uniform=True, linear_in=_ALL_BUT_FIRST),
    Row('Maximum Minimum FloorDiv Pow SquaredDifference FloorMod Mod TruncateDiv TruncateMod '
        'Atan2 Xdivy Xlogy Xlog1py MulNoNan NextAfter Abs Sign Square Sqrt Rsqrt Reciprocal Inv '
        'Exp Expm1 Log Log1p Sigmoid Tanh Sin Cos Tan Asin Acos Atan Sinh Cosh Asinh Acosh Atanh '
        'Floor Ceil Round Rint Erf Erfc Erfinv Ndtri Lgamma Digamma Igamma Igammac Zeta '
        'Polygamma Betainc '
        'Relu Relu6 Elu Selu Softplus Softsign LeakyRelu Greater GreaterEqual Less LessEqual '
        'Equal NotEqual ApproximateEqual LogicalAnd LogicalOr LogicalNot IsFinite IsNan IsInf '
        'ClipByValue BitwiseAnd BitwiseOr BitwiseXor Invert LeftShift RightShift Complex '
        'ComplexAbs Angle '
        'ReluGrad Relu6Grad LeakyReluGrad EluGrad SeluGrad SoftplusGrad SoftsignGrad SigmoidGrad '
        'TanhGrad SqrtGrad RsqrtGrad ReciprocalGrad InvGrad Bucketize AsString StringToNumber '
        'StringToHashBucket StringToHashBucketFast StringToHashBucketStrong StringJoin Substr '
        'StringLength StringLower StringUpper StringStrip RegexReplace StaticRegexReplace '
        'RegexFullMatch StaticRegexFullMatch BesselI0e BesselI1e '
        'FakeQuantWithMinMaxArgs FakeQuantWithMinMaxVars FakeQuantWithMinMaxVarsPerChannel',
        entries.elementwise,
        'Each entry of the result is a function of the entries at its place.',
        **_BY_ENTRY),
    Row('LookupTableFind LookupTableFindV2', gathers.table_lookup,
        'Each entry of the result is what a table has for the entry at its place.'),
    Row('BiasAdd', images.bias_add,
        'A vector is added to each entry along the dimension of the channels.', linear_in=_ALL),
    Row('Softmax LogSoftmax SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits '
        'L2Normalize',
        reductions.along_last,
        'Each row along the last dimension by itself.'),
    Row('TopK TopKV2 InTopK InTopKV2', reductions.largest,
        'Each row along the last dimension by itself.'),
    Row('Multinomial', reductions.drawn_classes,
        'Classes drawn for each row by itself.'),
    # ---- over dimensions
    Row('Mean Sum Max Min All Any ArgMax ArgMin EuclideanNorm', reductions.reduce,
        "Over the examples' dimension, a mean or a sum over them; over others, each by itself."),
    Row('Prod', reductions.reduce,
        "Over other dimensions than the examples', each by itself.",
        of_sizes=shapes.product_of_sizes),
    Row('L2Loss', reductions.l2_loss,
        'Half the sum of the squares of all entries.'),
    Row('BiasAddGrad', reductions.bias_add_gradient,
        'The sum over all dimensions but that of the channels.'),
    Row('MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3', products.matmul,
        'Row by row; over the examples of both factors, the sum of their products.',
        linear_in=_ALL),
    Row('Einsum', products.einsum,
        'Letter by letter; over the examples of all factors, the sum of their products.',
        linear_in=_ALL),
    Row('MatrixSolve MatrixTriangularSolve', products.solution,
        'The equations of each example, or each column by itself; linear in the right side.',
        linear_in=_ALL_BUT_FIRST),
    Row('Cross', products.cross,
        'Each vector along the last dimension by itself; linear in each of the two.',
        linear_in=_ALL),
    Row('LSTMBlockCell GRUBlockCell', recurrent.cell,
        'Each row of x and of the state by itself.'),
    Row('BlockLSTM BlockLSTMV2', recurrent.lstm_over_time,
        'Each sequence by itself, along the first dimension.'),
    # ---- sizes, and tensors of a size
    Row('Shape ShapeN', shapes.shape_of,
        'The examples have one dimension, and all others are the same on every tower.',
        takes_sizes=True),
    Row('Size', shapes.number_of_entries,
        'The product of the lengths of all dimensions.', takes_sizes=True),
    Row('Rank', shapes.rank_of,
        'The same on every tower.', takes_sizes=True),
    Row('BroadcastGradientArgs', broadcast_gradients.broadcast_gradient_args,
        'A factor is repeated along the dimensions that it lacks, or has with one entry.',
        takes_sizes=True),
    Row('Fill', fills.fill,
        'All entries are one value.', takes_sizes=True, linear_in=_ALL_BUT_FIRST),
    Row('ZerosLike OnesLike', fills.zeros_like,
        'All entries are one value.', takes_sizes=True),
    Row('BroadcastTo', fills.broadcast_to,
        'A value without the examples is the same for all of them.', takes_sizes=True),
    Row('Range', fills.range_of,
        'Counts.', of_sizes=shapes.sizes_of_range, takes_sizes=True),
    Row('RandomUniform RandomStandardNormal TruncatedNormal RandomUniformInt RandomGamma '
        'StatelessRandomUniform StatelessRandomUniformV2 StatelessRandomNormal '
        'StatelessRandomNormalV2 StatelessTruncatedNormal StatelessTruncatedNormalV2 '
        'StatelessRandomUniformInt StatelessRandomUniformIntV2',
        fills.random_numbers,
        'Numbers drawn for each entry, so for each example where the shape has the examples.',
        takes_sizes=True),
    # ---- the same entries elsewhere
    Row('Reshape', reshapes.reshape,
        'The entries keep their order, and an example its stride.', of_sizes=shapes.same_sizes,
        takes_positions=True, takes_sizes=True),
    Row('ExpandDims', layout.expand_dims,
        'A dimension more.', of_sizes=shapes.same_sizes, takes_positions=True),
    Row('Squeeze', layout.squeeze,
        'Fewer dimensions of length 1.', of_sizes=shapes.same_sizes, takes_positions=True),
    Row('Transpose ConjugateTranspose', layout.transpose,
        'The dimensions in another order.'),
    Row('Pad MirrorPad', layout.pad,
        'More entries along other dimensions; zeros around a sum are sums of zeros.'),
    Row('PadV2', layout.pad_with,
        'A constant around each example, or around a mean; zeros around a sum are sums of zeros.'),
    Row('Tile', layout.tile,
        'The same entries again.', takes_sizes=True),
    Row('StridedSlice', slices.strided_slice,
        'All of the examples, and a part of the other dimensions; or the example of an iteration.',
        of_sizes=shapes.sizes_in_brackets, takes_positions=True, takes_sizes=True,
        takes_unknown=True),
    Row('StridedSliceGrad', slices.strided_slice_gradient,
        'The gradient of a slice of all examples is of all of them, with zeros around.',
        takes_sizes=True),
    Row('Slice', slices.slice_,
        'All of the examples, and a part of the other dimensions.',
        of_sizes=shapes.sliced_sizes),
    Row('ReverseV2 Roll Cumsum', layout.along_axes,
        'Along other dimensions, each example by itself; linear.'),
    Row('Cumprod CumulativeLogsumexp', layout.cumulative_product,
        'Along other dimensions, each example by itself.'),
    Row('FFT FFT2D FFT3D IFFT IFFT2D IFFT3D RFFT RFFT2D RFFT3D IRFFT IRFFT2D IRFFT3D',
        layout.fourier,
        'Along the last dimensions, each example by itself; linear.'),
    Row('MatrixBandPart MatrixDiagPart', layout.matrix_band,
        'On the last two dimensions, each example by itself; linear.'),
    Row('MatrixDiag MatrixDiagV2 MatrixDiagV3', layout.matrix_of_diagonal,
        'Each vector on the diagonal of a matrix of its own, with a padding around it.'),
    Row('MatrixDiagPartV2 MatrixDiagPartV3', layout.diagonals_of_matrices,
        'The diagonals of each matrix; linear, and a padding behind the shorter ones.'),
    Row('MatrixInverse MatrixDeterminant LogMatrixDeterminant Cholesky', layout.matrix_function,
        'On the last two dimensions, each example by itself.'),
    Row('MatrixSetDiag MatrixSetDiagV2 MatrixSetDiagV3', layout.matrix_with_diagonal,
        'Each matrix with its own diagonal.', linear_in=_FIRST_TWO),
    Row('Unpack', joining.unpack,
        'Parts along another dimension have the examples where they were.',
        of_sizes=shapes.unstacked_sizes),
    Row('Split', joining.split,
        'Parts along another dimension have the examples where they were.',
        of_sizes=shapes.sizes_in_equal_parts, linear_in=_ALL_BUT_FIRST),
    Row('SplitV', joining.split,
        'Parts along another dimension have the examples where they were.',
        of_sizes=shapes.sizes_in_parts),
    Row('ConcatV2', joining.concat,
        'Beside each other along another dimension; all examples after all examples.',
        of_sizes=shapes.joined_sizes, linear_in=_ALL_BUT_LAST),
    Row('Pack', joining.pack,
        'Beside each other along a new dimension.', of_sizes=shapes.stacked_sizes,
        takes_positions=True, linear_in=_ALL),
    Row('Gather GatherV2 ResourceGather', gathers.gather,
        'Rows of a table that all towers share, by places of the examples.',
        of_sizes=shapes.gathered_sizes, takes_positions=True, takes_sizes=True,
        takes_unknown=True),
    Row('GatherNd ResourceGatherNd', gathers.gather_nd,
        'Entries of each example, by its own number.', takes_positions=True),
    Row('OneHot', gathers.one_hot,
        'A dimension more.'),
    Row('ReverseSequence', images.reverse_sequence,
        'Along the sequence of each example.'),
    Row('Where', rows.where,
        'The places that a mask leaves, in the order of the examples.'),
    Row('LogUniformCandidateSampler UniformCandidateSampler',
        gathers.candidate_sampler,
        'Draws classes whatever the examples are; and how often it expects those of each example.'),
    # ---- images
    Row('Conv2D DepthwiseConv2dNative Conv3D MaxPool MaxPoolV2 AvgPool MaxPool3D AvgPool3D LRN '
        'ResizeBilinear ResizeNearestNeighbor ResizeBicubic ResizeArea SpaceToDepth DepthToSpace '
        'ExtractImagePatches Dilation2D RGBToHSV HSVToRGB AdjustHue AdjustSaturation',
        images.images,
        'Each image by itself.'),
    Row('AdjustContrastv2', images.adjusted_contrast,
        'Each image by itself, where the batch has images.'),
    Row('MaxPoolWithArgmax', images.largest_places,
        'Each image by itself.'),
    Row('Conv2DBackpropInput Conv3DBackpropInputV2 DepthwiseConv2dNativeBackpropInput AvgPoolGrad '
        'AvgPool3DGrad',
        images.images_of_shape,
        'Each image by itself.', takes_sizes=True),
    Row('MaxPoolGrad MaxPoolGradV2 MaxPool3DGrad', images.gradient_of_maxima,
        'Each image by itself.'),
    Row('SpaceToBatchND', images.space_to_batch,
        'All images of the first block, then all of the next.'),
    Row('BatchToSpaceND', images.batch_to_space,
        'The blocks of an image, which are all images apart.'),
    Row('FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3', images.fused_batch_norm,
        'Per channel, by the mean and the variance of all images.'),
    # ---- rows
    Row('SparseTensorDenseMatMul', rows.sparse_product,
        'A row of the product for each row of the sparse tensor.', takes_positions=True,
        takes_sizes=True),
    Row('SparseToDense', rows.sparse_to_dense,
        'A row for each row of the sparse tensor.', takes_positions=True, takes_sizes=True),
    Row('ScatterNd', rows.scatter_nd,
        'The rows of each example at their places; or all, added up at places that they tell.',
        takes_positions=True, takes_sizes=True),
    Row('SparseReduceSum', rows.sparse_sum,
        'The sum of each row of the sparse tensor; or of all rows, which is one over the examples.',
        takes_positions=True, takes_sizes=True, accounts_for_totals=True),
    Row('SparseTensorDenseAdd', rows.sparse_dense_add,
        'The rows of all examples, added up at places that they tell.', takes_sizes=True),
    Row('UnsortedSegmentSum', rows.segment_sum,
        'The sum of the rows of each example; or of all of a class.', takes_positions=True,
        takes_sizes=True),
    Row('SparseReshape', lookups.sparse_reshape,
        'The first number of each index vector stays, where n entries are n again.',
        takes_positions=True, takes_sizes=True),
    Row('SparseFillEmptyRows', lookups.fill_empty_rows,
        'The rows of each example, and one where it has none.', takes_positions=True,
        takes_sizes=True),
    Row('SparseSegmentSum SparseSegmentMean SparseSegmentSqrtN', lookups.segment_rows,
        'The sum of the rows of each example, in a table that all towers share.',
        takes_positions=True, takes_unknown=True),
    Row('CTCLoss', rows.ctc_loss,
        'The loss of each sequence by itself.', takes_positions=True),
    # ---- loops and branches
    Row('Enter RefEnter', loops.enter,
        'The value itself.',
        **_HANDED_ON),
    Row('NextIteration', loops.identity,
        'The value itself.',
        **_HANDED_ON),
    Row('LoopCond', loops.identity,
        'The value itself.',
        **_CONTROL_FLOW),
    Row('Switch RefSwitch', loops.switch,
        'The value itself, in the branch that is taken.',
        **_CONTROL_FLOW),
    Row('Merge RefMerge', loops.merge,
        'One of two values.',
        **_CONTROL_FLOW),
    Row('Exit', loops.exit_loop,
        'The value after the last iteration.',
        **_CONTROL_FLOW),
    Row('TensorArrayV3 TensorArraySizeV3 TensorArrayScatterV3 TensorArrayWriteV3 '
        'TensorArrayReadV3 TensorArrayGatherV3',
        arrays.array,
        'An array has the state of its elements.',
        **_CONTROL_FLOW),
    Row('TensorListReserve', tensor_lists.empty_list,
        'Nothing is written yet.', takes_sizes=True),
    Row('TensorListFromTensor', tensor_lists.list_from_tensor,
        'An element for each entry along the first dimension.'),
    Row('TensorListLength', tensor_lists.list_length,
        'The number of places that the list was made with.'),
    Row('TensorListGetItem', tensor_lists.list_item,
        'The element, at a place that all towers know.', takes_positions=True, takes_sizes=True),
    Row('TensorListSetItem', tensor_lists.list_with_item,
        'The elements before, or the new one.',
        **_HANDED_ON),
    Row('TensorListStack', tensor_lists.list_stack,
        'The elements along a new dimension.'),
]

RULES: typing.Dict[str, Row] = {}
"""{type of an operation: its row}"""

for _row in TABLE:
    for _type in _row.types.split():
        RULES[_type] = _row
