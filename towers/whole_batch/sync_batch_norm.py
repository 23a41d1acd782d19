"""`batch_norm='sync'`: batch norms normalize by the statistics of the whole batch.

The recorded forward pass is rewritten before it is differentiated. A batch norm takes the mean over
the examples of its shard, and the mean of the squared distance from it; that they are such means is
proven (`proof.batch_norms`). Each of these two becomes its mean over all towers (`batch_mean`); a
mean over rows, of which examples have different numbers, is weighted by the rows. All readers of
the statistics, moving averages included, then read the batch's. TensorFlow's fused kernel does both
in one operation, which is taken apart:

    mean = E[x]    variance = E[(x - mean)^2]    y = (x - mean) / sqrt(variance + epsilon) g + b

and for the moving average the kernel multiplies the variance by n / (n - 1), of all n numbers.
"""

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import ModelFunctionError
from towers.graph.edit import Library
from towers.graph.op_types import BRANCHES_V2, is_fused_batch_norm
from towers.proof.batch_norms import find_batch_norms, is_variance_node, same_means
from towers.proof.states import Kind
from towers.whole_batch.batch_values import batch_mean, batch_sum


def synchronize(operations, analysis, graph):
    """Rewrites the batch norms of an analysed forward pass.

    Args:
      operations: list of the operations of the forward pass.
      analysis: its `Analysis`.
      graph: the `tf.Graph` that it is in.

    Returns:
      `(number of batch norms, {name of a tensor: the tensor that took its place})`.

    Raises:
      ModelFunctionError: a batch norm is in a loop or in a function, where towers cannot meet; or a
        gradient was taken through it already.
    """
    _check_functions(operations, graph)
    batch_norms = find_batch_norms(analysis, operations)
    statistics = {}
    for moments in batch_norms.moments:
        for statistic in moments:
            for tensor in [statistic] + same_means(statistic, operations):
                statistics[tensor.name] = tensor
    _check_places([tensor.op for tensor in statistics.values()] + batch_norms.fused)
    _check_gradients([each.variance.op for each in batch_norms.moments] + batch_norms.fused,
                     operations)
    instead = {}
    for tensor in statistics.values():
        instead[tensor.name] = _of_whole_batch(tensor, analysis.of(tensor.op.inputs[0]))
    for op in batch_norms.fused:
        with compat.within_branch(op):
            instead.update(_take_apart(op))
    return len(batch_norms), instead


def _check_functions(operations, graph):
    """Refuses batch norms in branches of control flow v2, and in functions."""
    calls = [op.node_def for op in operations if op.type in BRANCHES_V2 or 'Call' in op.type]
    for name, function in Library(graph).reached_from(calls).items():
        nodes = {node.name: node for node in function.node_def}
        for node in function.node_def:
            is_fused = is_fused_batch_norm(node.op) and node.attr['is_training'].b
            if is_fused or is_variance_node(node, nodes):
                raise ModelFunctionError(
                    "batch_norm='sync', and batch norm %s is in a function or a branch of control "
                    'flow v2 (%s), where towers cannot meet: call tf.disable_control_flow_v2(), or '
                    "pass batch_norm='shard'." % (node.name, name))


def _check_places(batch_norms):
    """Refuses batch norms in loops of control flow v1."""
    for op in batch_norms:
        if not compat.in_branches_alone(op):
            raise ModelFunctionError(
                "batch_norm='sync', and the statistics of a batch norm (%s) are taken in a loop, "
                "where towers cannot meet: take it out of the loop, or pass batch_norm='shard'."
                % op.name)


def _check_gradients(batch_norms, operations):
    """Refuses gradients that are there already: they use the shard's statistics."""
    gradients = [op.name for op in operations if '_grad/' in op.name]
    for op in batch_norms:
        if any('/%s_grad/' % op.name in name for name in gradients):
            raise ModelFunctionError(
                "batch_norm='sync', and the model function takes a gradient through batch norm %s "
                "(tf.gradients inside): leave that batch norm out, or pass batch_norm='shard'."
                % op.name)


def _of_whole_batch(statistic, given):
    """Has all that reads a mean of the shard read the batch's, which is returned.

    Args:
      statistic: the mean, a tensor.
      given: the `State` of the tensor that it is the mean of.
    """
    readers = list(statistic.consumers())
    with compat.within_branch(statistic.op), tf.name_scope('sync_batch_norm/'):
        whole = _by_rows(statistic) if given.kind is Kind.ROWS else batch_mean(statistic)
    compat.replace_tensor(statistic, whole, readers)
    return whole


def _by_rows(statistic):
    """The mean over the rows of all towers, which have different numbers of rows."""
    rows, axes = statistic.op.inputs
    total = tf.reduce_sum(rows, axes, keepdims=statistic.op.get_attr('keep_dims'))
    lengths = tf.gather(tf.shape(rows), tf.reshape(axes, [-1]))
    count = batch_sum(tf.cast(tf.reduce_prod(lengths), rows.dtype))
    return tf.reshape(batch_sum(total) / count, tf.shape(statistic))


def _take_apart(op):
    """Replaces a fused batch norm in training mode: {name of an output: its substitute}."""
    x, scale, offset = op.inputs[:3]
    attributes = op.node_def.attr
    if 'exponential_avg_factor' in attributes and attributes['exponential_avg_factor'].f != 1.:
        raise ModelFunctionError("batch_norm='sync', and the kernel of batch norm %s averages by "
                                 'itself: leave exponential_avg_factor= out.' % op.name)
    axes = [axis for axis, letter in enumerate(op.get_attr('data_format').decode())
            if letter != 'C']
    readers = [list(output.consumers()) for output in op.outputs]
    with tf.name_scope('sync_batch_norm/'):
        numbers = tf.cast(x, scale.dtype)  # statistics of float16 are float32
        mean = batch_mean(tf.reduce_mean(numbers, axes, keepdims=True))
        constant_mean = tf.stop_gradient(mean)
        variance = batch_mean(tf.reduce_mean(
            tf.squared_difference(numbers, constant_mean), axes))
        mean, constant_mean = tf.reshape(mean, [-1]), tf.reshape(constant_mean, [-1])
        epsilon = op.get_attr('epsilon')
        factor = scale * tf.rsqrt(variance + epsilon)
        # One pass of the kernel for (x - mean) factor + offset. It takes its mean for a constant,
        # so the offset carries the mean's gradient.
        y = tf.raw_ops.FusedBatchNormV3(
            x=x, scale=factor, offset=offset - (mean - constant_mean) * factor,
            mean=constant_mean, variance=tf.ones_like(scale) - epsilon, epsilon=epsilon,
            data_format=op.get_attr('data_format'), is_training=False)[0]
        count = tf.cast(tf.reduce_prod([tf.shape(x)[axis] for axis in axes]), scale.dtype)
        count = batch_sum(count)
        outputs = [y, mean, variance * (count / tf.maximum(count - 1., 1.))]
    for some, old, new in zip(readers, op.outputs, outputs):
        new.set_shape(old.shape)
        compat.replace_tensor(old, new, some)
    return {old.name: new for old, new in zip(op.outputs, outputs)}
