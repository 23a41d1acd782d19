"""`batch_norm='sync'`: batch norms normalize by the statistics of the whole batch.

The recorded forward pass is rewritten before it is differentiated. A batch norm takes the mean over
the examples of its shard, and the mean of the squared distance from it; each of these two becomes
its mean over all towers (`batch_mean`). All readers of the statistics, moving averages included,
then read the batch's. TensorFlow's fused kernel does both in one operation, which is taken apart:

    mean = E[x]    variance = E[(x - mean)^2]    y = (x - mean) / sqrt(variance + epsilon) g + b

and for the moving average the kernel multiplies the variance by n / (n - 1), of all n numbers.
"""

import numpy as np
import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import ModelFunctionError
from towers.graph.graph_walk import behind
from towers.graph.edit import Library, producer
from towers.graph.op_types import BRANCHES_V2, SAME_NUMBERS, is_fused_batch_norm
from towers.tower.batch_values import batch_mean, batch_sum

_KEEP_DIMENSIONS = frozenset(
    'Identity Cast Relu Relu6 LeakyRelu Elu Selu Tanh Sigmoid Softplus Softmax Square Sqrt Rsqrt '
    'Add AddV2 Sub Mul RealDiv Maximum Minimum SquaredDifference BiasAdd Conv2D Conv3D MaxPool '
    'AvgPool Pad MirrorPad DepthwiseConv2dNative Select SelectV2 StopGradient ConcatV2'.split())


def synchronize(operations, inputs, graph):
    """Rewrites batch norms in training mode: `(how many, {name of a tensor: its stand-in})`."""
    _check_functions(operations, graph)
    known, instead = _dimensions(operations, inputs), {}
    moments = [(mean, variance) for mean, variance in _moments(operations)
               if not _is_of_each_example(mean, known)]
    fused = [op for op in operations if is_fused_batch_norm(op.type) and op.get_attr('is_training')
             and not _normalizes_each_example(op, known)]
    _check_gradients([variance.op for _, variance in moments] + fused, operations)
    for tensor in {each.name: each for pair in moments for statistic in pair
                   for each in [statistic] + _same_means(statistic, operations)}.values():
        instead[tensor.name] = _of_whole_batch(tensor)
    for op in fused:
        with compat.within_branch(op):
            instead.update(_take_apart(op))
    return len(moments) + len(fused), instead


def statistics_of(operations):
    """Names of the operations that compute the statistics of batch norms of single operations."""
    return {tensor.op.name for pair in _moments(operations) for tensor in pair}


def _check_functions(operations, graph):
    functions = Library(graph).reached_from([op.node_def for op in operations])
    for name, function in functions.items():
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


def _check_gradients(batch_norms, operations):
    """Refuses gradients that are there already: they use the shard's statistics."""
    gradients = [op.name for op in operations if '_grad/' in op.name]
    for op in batch_norms:
        if any('/%s_grad/' % op.name in name for name in gradients):
            raise ModelFunctionError(
                "batch_norm='sync', and the model function takes a gradient through batch norm %s "
                "(tf.gradients inside): leave that batch norm out, or pass batch_norm='shard'."
                % op.name)


def _moments(operations):
    """`[(mean, variance)]` of the batch norms that are made of single operations.

    The variance is the mean of the squared rest over the same dimensions, and goes into a root.
    """
    found = []
    for op in operations:
        if op.type != 'Mean' or op.inputs[0].op.type not in ('SquaredDifference', 'Square'):
            continue
        inner = op.inputs[0].op
        if inner.type == 'Square':
            inner = inner.inputs[0].op
            if inner.type != 'Sub':
                continue
        mean = behind(inner.inputs[1], SAME_NUMBERS)
        axes = [tf.get_static_value(each.inputs[1]) for each in (op, mean.op)
                if each.type == 'Mean']
        axes = [list(np.ravel(each)) for each in axes if each is not None]
        if len(axes) == 2 and 0 in axes[0] and axes[0] == axes[1] and (
                _is_normalized_by(op.outputs[0])):
            found.append((mean, op.outputs[0]))
    return found


def _is_normalized_by(variance):
    """Whether a tensor goes into a root, in a few steps of arithmetic."""
    stack, seen = [(variance, 0)], set()
    while stack:
        tensor, steps = stack.pop()
        for op in tensor.consumers():
            if op.type in ('Rsqrt', 'Sqrt', 'Pow'):
                return True
            if op.name not in seen and steps < 8 and (
                    op.type in SAME_NUMBERS | BRANCHES_V2 or op.type in (
                        'Add', 'AddV2', 'Switch', 'Merge', 'Select', 'SelectV2', 'Maximum')):
                seen.add(op.name)
                stack += [(output, steps + 1) for output in op.outputs]
    return False


def _same_means(statistic, operations):
    """The same statistic, computed once more, as by two calls of `tf.nn.moments`: a list."""
    return [op.outputs[0] for op in operations if op.type == statistic.op.type == 'Mean'
            and op.inputs[0].name == statistic.op.inputs[0].name and np.array_equal(
                tf.get_static_value(op.inputs[1]), tf.get_static_value(statistic.op.inputs[1]))]


def _is_of_each_example(mean, known):
    """Whether the dimension of the examples is `known`, and this mean is not over it."""
    axes, found = tf.get_static_value(mean.op.inputs[1]), known.get(mean.op.inputs[0].name)
    return axes is not None and found is not None and found.isdisjoint(
        {int(axis) % mean.op.inputs[0].shape.ndims for axis in np.ravel(axes)})


def _normalizes_each_example(op, known):
    """Whether the channels of a fused batch norm are the examples, as in Keras' layer norm."""
    channel, found = op.get_attr('data_format').decode().find('C'), known.get(
        op.inputs[0].name, ())
    if channel in found and len(found) > 1:
        raise ModelFunctionError(
            "batch_norm='sync', and the shard has one example: whether %s normalizes it alone is "
            "unknown. Pass a batch of unknown size ([None, …]), or batch_norm='shard'." % op.name)
    return channel in found


def _dimensions(operations, inputs):
    """{name of a tensor: its dimensions that may have the examples}: one as a rule, several of size
    1 where a shard has one example; tensors for which it is not known are left out."""
    known = {tensor.name: {0} for tensor in inputs if tensor.shape.ndims}
    is_one = any(tensor.shape.as_list()[0] == 1 for tensor in inputs if tensor.shape.ndims)
    for op in operations:
        given = [each for each in op.inputs if each.name in known]
        if not given or not op.outputs or op.outputs[0].shape.ndims is None:
            continue
        found, rank = known[given[0].name], op.outputs[0].shape.ndims
        if op.type in _KEEP_DIMENSIONS:
            found = next((known[each.name] for each in given if each.shape.ndims == rank), None)
        elif op.type == 'MatMul':
            found = found & {0} if given[0].name == op.inputs[0].name and (
                not op.get_attr('transpose_a')) else None
        elif op.type == 'Transpose':
            order = tf.get_static_value(op.inputs[1])
            found = None if order is None else {list(order).index(each) for each in found}
        elif op.type in ('Reshape', 'ExpandDims') and (found == {0} or is_one and 0 in found):
            first = ([length != 1 for length in op.outputs[0].shape.as_list()] + [True]).index(True)
            # A dimension of size 1 may be any of those, or be in the next one.
            found = set(range(first + 1)) if is_one else {first}
        else:
            found = None
        if found:
            known[op.outputs[0].name] = found
    return known


def _of_whole_batch(statistic):
    """Has all that reads a statistic of the shard read the batch's, which is returned."""
    readers = list(statistic.consumers())
    with compat.within_branch(statistic.op), tf.name_scope('sync_batch_norm/'):
        whole = batch_mean(statistic)
    compat.replace_tensor(statistic, whole, readers)
    return whole


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
