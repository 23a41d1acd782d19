"""`batch_norm='sync'`: batch norms normalize by the statistics of the whole batch.

The recorded forward pass is rewritten before it is differentiated. A batch norm takes the mean over
the examples of its shard, and that of the squared distance from it. Each mean over the examples by
which examples are computed becomes its mean over all towers (`batch_mean`), and all that reads it,
moving averages included, reads the batch's. Norms of each example stay. The fused kernel becomes

    mean = E[x]    variance = E[(x - mean)^2]    y = (x - mean) / sqrt(variance + epsilon) g + b

and for the moving average the kernel multiplies the variance by n / (n - 1), of all n numbers.
"""

import numpy as np
import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import ModelFunctionError
from towers.graph.edit import Library, producer
from towers.graph.op_types import is_fused_batch_norm
from towers.tower.batch_values import batch_mean, batch_sum


def synchronize(operations, examples, graph):
    """Rewrites batch norms in training mode: `(how many, {name of a tensor: its stand-in})`."""
    _check_functions(operations, graph)
    over_examples = [each for each in examples.statistics if any(
        examples.axes.get(given.name) is not None for given in each.op.inputs)]
    means = [each for each in over_examples if each.op.type == 'Mean']
    # Where the channels are the examples, the kernel normalizes each of them by itself.
    fused = [op for op in operations if is_fused_batch_norm(op.type) and op.get_attr('is_training')
             and op.get_attr('data_format').decode().find('C') != examples.axes.get(
                 op.inputs[0].name, -1)]
    _check_statistics(examples, over_examples, [mean.op for mean in means] + fused, operations)
    roots, instead = examples.roots(means), {}
    for mean in means:
        readers = list(mean.consumers())
        with compat.within_branch(mean.op), tf.name_scope('sync_batch_norm/'):
            whole = instead[mean.name] = batch_mean(mean)
        compat.replace_tensor(mean, whole, readers)
    for op in fused:
        with compat.within_branch(op):
            instead.update(_take_apart(op))
    return len(fused) + len(roots or means), instead


def _check_statistics(examples, over_examples, used, operations):
    """Refuses statistics of a shard whose mean over the towers is not the batch's, and gradients
    that are there already, which use the shard's."""
    why = used and examples.unclear and (
        "the dimension of a shard's one example is unknown after %s: pass a batch of unknown "
        'size, [None, …]' % examples.unclear)
    gradients = [op.name for op in operations if '_grad/' in op.name]
    for op in used:
        if op.inputs[0].name in examples.chosen:
            why = ('%s is a statistic of chosen examples (tf.boolean_mask): divide the batch_sum '
                   'of their sum by that of their number' % op.name)
        if any('/%s_grad/' % op.name in name for name in gradients):
            why = ('the model function takes a gradient through batch norm %s (tf.gradients '
                   'inside): leave that batch norm out' % op.name)
    for each in over_examples:
        if each.op.type == 'Sum' and examples.roots([each]):
            why = ('%s normalizes the examples by a sum over the shard: take tf.reduce_mean, or '
                   'towers.batch_sum' % each.op.name)
    if why:
        raise ModelFunctionError("batch_norm='sync', and %s; or pass batch_norm='shard'." % why)


def _check_functions(operations, graph):
    for name, function in Library(graph).reached_from([op.node_def for op in operations]).items():
        nodes = {node.name: node for node in function.node_def}
        for node in function.node_def:
            if is_fused_batch_norm(node.op) and node.attr['is_training'].b or (
                    _is_variance(node, nodes)):
                raise ModelFunctionError(
                    "batch_norm='sync', and batch norm %s is in a function or a branch of control "
                    'flow v2 (%s), where towers cannot meet: call tf.disable_control_flow_v2(), or '
                    "pass batch_norm='shard'." % (node.name, name))


def _is_variance(node, nodes):
    """Whether a `NodeDef` of a function is a mean of squared distances over the examples."""
    squares, axes = [nodes.get(producer(text)) for text in list(node.input)[:2]] if (
        node.op == 'Mean') else (None, None)
    return squares is not None and squares.op == 'SquaredDifference' and (
        axes is None or axes.op != 'Const' or
        0 in np.ravel(tf.make_ndarray(axes.attr['value'].tensor)))


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
