"""`batch_norm='sync'`: batch norms normalize by the statistics of the whole batch.

The recorded forward pass is rewritten before it is differentiated. A batch norm takes the mean over
the examples of its shard, and the mean of the squared distance from this mean; `proof.batch_norms`
proves that both are means over the examples. Each of the two becomes its mean over all towers
(`batch_mean`); a mean over rows, of which examples have different numbers, is weighted by the rows.
All readers of the statistics, moving averages included, then read the batch's statistics.
TensorFlow's fused kernel takes the statistics and normalizes in one operation. This operation is
taken apart, and its statistics are exchanged together (`batch_moments`):

    mean = E[x]    variance = E[(x - mean)^2]    y = (x - mean) / sqrt(variance + epsilon) g + b

and for the moving average the kernel multiplies the variance by n / (n - 1), of all n numbers.

Its test is `tests/whole_batch/test_batch_values.py`.
"""

import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import ModelFunctionError
from towers.graph.edit import Library
from towers.graph.graph_walk import by_name, names_of, operation_of
from towers.graph.op_types import BRANCHES_V2, LOOPS_V2, is_fused_batch_norm
from towers.proof.analysis import Analysis
from towers.proof.batch_norms import BatchNorms, find_batch_norms, is_variance_node, same_means
from towers.proof.states import Kind, State
from towers.whole_batch.batch_values import batch_mean, batch_moments, batch_sum


class Synchronized(typing.NamedTuple):
    """The batch norms that normalize by the statistics of the whole batch."""
    number: int  # how many they are
    substitutes: typing.Dict[str, tf.Tensor]  # {name of a tensor: the tensor that took its place}


def synchronize(operations: typing.List[tf.Operation], analysis: Analysis,
                graph: tf.Graph) -> Synchronized:
    """Rewrites the batch norms of an analysed forward pass.

    Args:
      operations: list of the operations of the forward pass.
      analysis: its `Analysis`.
      graph: the `tf.Graph` that it is in.

    Raises:
      ModelFunctionError: a batch norm is in a loop or in a function, where towers cannot meet; or a
        gradient was taken through it already.
    """
    library = Library(graph)
    _check_functions(operations, library)
    _check_loops_v2(operations, analysis, library)
    batch_norms = find_batch_norms(analysis, operations)
    means = _means_of(batch_norms, operations)
    _check_places(list(map(operation_of, means)) + batch_norms.fused)
    variances = [moments.variance.op for moments in batch_norms.moments]
    _check_gradients(variances + batch_norms.fused, operations)
    substitutes = {}
    for mean in means:
        state_of_input = analysis.state(mean.op.inputs[0])
        substitutes[mean.name] = _replace_by_batch_mean(mean, state_of_input)
    for op in batch_norms.fused:
        with compat.within_branch(op):
            substitutes.update(_take_apart(op))
    return Synchronized(batch_norms.number, substitutes)


def _means_of(batch_norms: BatchNorms,
              operations: typing.List[tf.Operation]) -> typing.List[tf.Tensor]:
    """The means over the examples of a shard that are to become means over the batch's, each once.

    They are the mean and the variance (the mean of squared distances) of each batch norm that is
    made of single operations; and other means of the same tensor: a program may compute one for the
    normalization, and a second one for the moving average.
    """
    means = {}
    for moments in batch_norms.moments:
        for statistic in (moments.mean, moments.variance):
            for tensor in [statistic] + same_means(statistic, operations):
                means[tensor.name] = tensor
    return list(means.values())


def _check_functions(operations: typing.Iterable[tf.Operation], library: Library) -> None:
    """Raises `ModelFunctionError` for a batch norm in a branch of control flow v2, or in another
    function that the forward pass calls."""
    # 'Call' is in the types `PartitionedCall` and `StatefulPartitionedCall`.
    calls = [op.node_def for op in operations if op.type in BRANCHES_V2 or 'Call' in op.type]
    for name, function in library.reached_from(calls).items():
        batch_norms = _batch_norms_in(function)
        if batch_norms:
            raise ModelFunctionError(
                "batch_norm='sync', and batch norm %s is in a function or a branch of control "
                'flow v2 (%s), where towers cannot meet: call tf.disable_control_flow_v2(), or '
                "pass batch_norm='shard'." % (batch_norms[0], name))


def _batch_norms_in(function: typing.Any) -> typing.List[str]:
    """Names of the nodes of a `FunctionDef` that may be batch norms: kernels in training mode, and
    the variances of normalizations."""
    nodes = by_name(function.node_def)
    names = []
    for node in function.node_def:
        is_fused_training = is_fused_batch_norm(node.op) and node.attr['is_training'].b
        if is_fused_training or is_variance_node(node, nodes):
            names.append(node.name)
    return names


def _check_loops_v2(operations: typing.Iterable[tf.Operation], analysis: Analysis,
                    library: Library) -> None:
    """Raises `ModelFunctionError` for a batch norm over the examples in a loop of control flow v2.
    A normalization of each example alone, as in a `tf.map_fn`, may stay."""
    # `analysis.means` names the operations that take means over the examples. If such an operation
    # is in a function, the name is made of the names of the call and of the node:
    # 'while/body/moments/variance'.
    means_in_functions = analysis.means - names_of(operations)
    if not means_in_functions:
        return
    loops = [op.node_def for op in operations if op.type in LOOPS_V2]
    for function in library.reached_from(loops).values():
        for batch_norm in _batch_norms_in(function):
            suffix = '/' + batch_norm
            is_over_examples = any(name.endswith(suffix) for name in means_in_functions)
            if is_over_examples:
                raise _in_loop(batch_norm)


def _check_places(statistics: typing.Iterable[tf.Operation]) -> None:
    """Raises `ModelFunctionError` for a statistic of a batch norm in a loop of control flow v1."""
    for op in statistics:
        if compat.in_loop(op):
            raise _in_loop(op.name)


def _in_loop(statistic: str) -> ModelFunctionError:
    """The error for a batch norm in a loop; `statistic` is the operation that takes its statistics.
    """
    return ModelFunctionError(
        "batch_norm='sync', and the statistics of a batch norm (%s) are taken in a loop, where "
        "towers cannot meet: take it out of the loop, or pass batch_norm='shard'." % statistic)


def _check_gradients(batch_norms: typing.Iterable[tf.Operation],
                     operations: typing.Iterable[tf.Operation]) -> None:
    """Raises `ModelFunctionError` where the forward pass has taken a gradient through a batch norm,
    which used the shard's statistics.

    Args:
      batch_norms: an operation of each batch norm.
      operations: the operations of the forward pass.
    """
    # TensorFlow makes the gradient of the operation 'x/y' in the name scope 'gradients/x/y_grad'.
    names_of_gradients = [op.name for op in operations if '_grad/' in op.name]
    for op in batch_norms:
        scope = '/%s_grad/' % op.name
        has_gradient = any(scope in name for name in names_of_gradients)
        if has_gradient:
            raise ModelFunctionError(
                "batch_norm='sync', and the model function takes a gradient through batch norm %s "
                "(tf.gradients inside): leave that batch norm out, or pass batch_norm='shard'."
                % op.name)


def _replace_by_batch_mean(mean: tf.Tensor, state_of_input: State) -> tf.Tensor:
    """Makes all operations that read a mean of the shard read the mean of the batch, which is
    returned.

    Args:
      mean: the mean of the shard.
      state_of_input: the state of the tensor whose mean it is.
    """
    readers = list(mean.consumers())  # before `batch_mean` makes a reader of its own
    with compat.within_branch(mean.op), tf.name_scope('sync_batch_norm/'):
        if state_of_input.kind is Kind.ROWS:
            mean_of_batch = _mean_over_rows(mean)
        else:
            mean_of_batch = batch_mean(mean)
    compat.replace_tensor(mean, mean_of_batch, readers)
    return mean_of_batch


def _mean_over_rows(mean: tf.Tensor) -> tf.Tensor:
    """The mean over the rows of all towers, from a mean over a shard's rows. An example may have
    any number of rows, so towers are weighted by their rows, not by their examples.

    The rows are counted as a sum of ones, since the proof knows such a sum as a sum over the
    examples. It does not know this of a number of rows in `tf.shape`.
    """
    rows, axes = mean.op.inputs
    keepdims = mean.op.get_attr('keep_dims')
    total = tf.reduce_sum(rows, axes, keepdims=keepdims)
    # In float64, since a sum of ones in float16 ends at 2,048.
    ones = tf.cast(tf.raw_ops.OnesLike(x=rows), tf.float64)
    count = tf.cast(tf.reduce_sum(ones, axes, keepdims=keepdims), rows.dtype)
    return batch_sum(total) / batch_sum(count)


def _take_apart(op: tf.Operation) -> typing.Dict[str, tf.Tensor]:
    """Replaces a fused batch norm in training mode by operations with the statistics of the whole
    batch: `{name of an output: its substitute}`."""
    attributes = op.node_def.attr
    averages_itself = ('exponential_avg_factor' in attributes
                       and attributes['exponential_avg_factor'].f != 1.)
    if averages_itself:
        raise ModelFunctionError("batch_norm='sync', and the kernel of batch norm %s averages by "
                                 'itself: leave exponential_avg_factor= out.' % op.name)
    readers_of_outputs = [list(output.consumers()) for output in op.outputs]
    with tf.name_scope('sync_batch_norm/'):
        substitutes = _normalized_by_batch(op)
    # The kernel has more outputs, reserved for its gradient, which nothing reads yet.
    by_name = {}
    for output, substitute, readers in zip(op.outputs, substitutes, readers_of_outputs):
        substitute.set_shape(output.shape)
        compat.replace_tensor(output, substitute, readers)
        by_name[output.name] = substitute
    return by_name


class _BatchMoments(typing.NamedTuple):
    """Statistics of the C channels of the whole batch."""
    mean: tf.Tensor  # [C]
    variance: tf.Tensor  # [C]
    count: tf.Tensor  # how many numbers of a channel they are over, a scalar


def _normalized_by_batch(op: tf.Operation) -> typing.List[tf.Tensor]:
    """The first three outputs of a fused batch norm, with the statistics of the whole batch: the
    normalized input, the mean, and the variance for the moving average."""
    x, scale, offset = op.inputs[:3]
    data_format = op.get_attr('data_format').decode()
    axes = [axis for axis, letter in enumerate(data_format) if letter != 'C']
    numbers = tf.cast(x, scale.dtype)  # the statistics of a float16 input are float32
    batch = _moments_of_batch(numbers, axes)
    epsilon = op.get_attr('epsilon')
    factor = scale * tf.rsqrt(batch.variance + epsilon)
    y = _scaled_distances(x, batch.mean, factor, offset, epsilon, data_format)
    unbiased_variance = batch.variance * (batch.count / tf.maximum(batch.count - 1., 1.))
    # TensorFlow has no gradient of the kernel's mean and variance: on one device a loss that takes
    # them takes constants.
    return [y, tf.stop_gradient(batch.mean), tf.stop_gradient(unbiased_variance)]


def _scaled_distances(x: tf.Tensor, mean: tf.Tensor, factor: tf.Tensor, offset: tf.Tensor,
                      epsilon: float, data_format: str) -> tf.Tensor:
    """(x - mean) factor + offset, by the kernel of batch norm, which does it in one pass.

    Not in training, the kernel computes (x - mean) / sqrt(variance + epsilon) scale + offset. It is
    given the variance 1 - epsilon, so that it divides by 1, and the factor as the scale. Its
    gradient takes the mean for a constant. So the gradient of the mean goes by the offset, to which
    (mean - mean) factor = 0 is added.

    Args:
      x: the input, of any floating type.
      mean, factor, offset: vectors, an entry for each channel.
      epsilon: a small number that the kernel takes; it cancels out.
      data_format: which dimension of x has the channels, such as `'NHWC'`.
    """
    constant_mean = tf.stop_gradient(mean)
    offset_with_gradient = offset - (mean - constant_mean) * factor
    return tf.raw_ops.FusedBatchNormV3(
        x=x, scale=factor, offset=offset_with_gradient, mean=constant_mean,
        variance=tf.ones_like(factor) - epsilon, epsilon=epsilon, data_format=data_format,
        is_training=False)[0]


def _moments_of_batch(numbers: tf.Tensor, axes: typing.List[int]) -> _BatchMoments:
    """The statistics of the whole batch.

    Args:
      numbers: the numbers of the shard, a tensor of any rank.
      axes: the dimensions of `numbers` to take the statistics over, all but the channels'.
    """
    sizes = [tf.shape(numbers)[axis] for axis in axes]
    mean = tf.reduce_mean(numbers, axes, keepdims=True)
    # The gradient of the variance with respect to the mean need not be computed: it is 0, since the
    # distances from the mean add up to 0.
    squared_distances = tf.squared_difference(numbers, tf.stop_gradient(mean))
    variance = tf.reduce_mean(squared_distances, axes)
    count = tf.cast(tf.reduce_prod(sizes), numbers.dtype)
    shard = tf.concat([tf.reshape(mean, [-1]), variance, count[tf.newaxis]], 0)
    batch = batch_moments(shard)  # of the same layout
    num_channels = tf.size(variance)
    return _BatchMoments(mean=batch[:num_channels], variance=batch[num_channels:-1],
                         count=batch[-1])
