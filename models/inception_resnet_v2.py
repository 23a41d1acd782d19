"""Inception-ResNet-v2, with the functions, variable names and endpoints of slim's.

From "Inception-v4, Inception-ResNet and the Impact of Residual Connections on Learning", Szegedy,
Ioffe, Vanhoucke and Alemi, 2016, https://arxiv.org/abs/1602.07261. Where the published checkpoints
differ from the paper's figures (the widths of the stem and of `Mixed_5b`; ten, twenty and ten
blocks instead of five, ten and five), the checkpoints win: every variable here has the name and
the shape that it has there.

The maps shrink on the way from a 299 x 299 image: 35 x 35 where the block35s are, 17 x 17 for the
block17s, 8 x 8 for the block8s. Layers that shrink are padded `'VALID'`, so small images run out of
pixels: the least side is 75 for the whole network without auxiliary logits and 107 with them.
`inception_resnet_v2_base(align_feature_maps=True)` pads everything and takes any size.

This file needs only TensorFlow and tf_slim, so that it can be copied into another code base.
"""

import tensorflow.compat.v1 as tf
import tf_slim as slim

# A layer is (scope, depth). Its scope says what it is and how large its window is, as in
# 'Conv2d_0b_1x7': a convolution, one pixel high and seven wide. Depth is None for a pooling layer.
# A mixture is one list of layers a branch; what its branches end in is concatenated by depth.
_BLOCK35 = (
    [('Conv2d_1x1', 32)],
    [('Conv2d_0a_1x1', 32), ('Conv2d_0b_3x3', 32)],
    [('Conv2d_0a_1x1', 32), ('Conv2d_0b_3x3', 48), ('Conv2d_0c_3x3', 64)],
)
_BLOCK17 = (
    [('Conv2d_1x1', 192)],
    [('Conv2d_0a_1x1', 128), ('Conv2d_0b_1x7', 160), ('Conv2d_0c_7x1', 192)],
)
_BLOCK8 = (
    [('Conv2d_1x1', 192)],
    [('Conv2d_0a_1x1', 192), ('Conv2d_0b_1x3', 224), ('Conv2d_0c_3x1', 256)],
)
_MIXED_5B = (
    [('Conv2d_1x1', 96)],
    [('Conv2d_0a_1x1', 48), ('Conv2d_0b_5x5', 64)],
    [('Conv2d_0a_1x1', 64), ('Conv2d_0b_3x3', 96), ('Conv2d_0c_3x3', 96)],
    [('AvgPool_0a_3x3', None), ('Conv2d_0b_1x1', 64)],
)
_MIXED_6A = (
    [('Conv2d_1a_3x3', 384)],
    [('Conv2d_0a_1x1', 256), ('Conv2d_0b_3x3', 256), ('Conv2d_1a_3x3', 384)],
    [('MaxPool_1a_3x3', None)],
)
_MIXED_7A = (
    [('Conv2d_0a_1x1', 256), ('Conv2d_1a_3x3', 384)],
    [('Conv2d_0a_1x1', 256), ('Conv2d_1a_3x3', 288)],
    [('Conv2d_0a_1x1', 256), ('Conv2d_0b_3x3', 288), ('Conv2d_1a_3x3', 320)],
    [('MaxPool_1a_3x3', None)],
)
# (scope, depth, stride, whether it is padded even where the others are not)
_STEM = (
    ('Conv2d_1a_3x3', 32, 2, False),
    ('Conv2d_2a_3x3', 32, 1, False),
    ('Conv2d_2b_3x3', 64, 1, True),
    ('MaxPool_3a_3x3', None, 2, False),
    ('Conv2d_3b_1x1', 80, 1, False),
    ('Conv2d_4a_3x3', 192, 1, False),
    ('MaxPool_5a_3x3', None, 2, False),
)
# The endpoints in the order of the network: any of them can be the final one.
_END_POINTS = tuple(scope for scope, _, _, _ in _STEM) + (
    'Mixed_5b', 'Mixed_6a', 'PreAuxLogits', 'Mixed_7a', 'Conv2d_7b_1x1')


def block35(net, scale=1.0, activation_fn=tf.nn.relu, scope=None, reuse=None):
    """The 35 x 35 residual block (Inception-ResNet-A): `activation_fn(net + scale * mixture)`.

    Args:
        net: a float tensor [batch, height, width, depth]; the depth is static.
        scale: the factor of the mixture (section 3.3 of the paper).
        activation_fn: activation of the sum; None leaves it linear. With `tf.nn.relu6` the mixture
            is clipped to [-6, 6], too, as in slim, so that quantised nets keep their range.
        scope: variable scope, 'Block35' (made unique) when None.
        reuse: whether the variables are shared with an earlier call; needs a scope.

    Returns:
        A tensor like `net`.
    """
    return _residual(net, _BLOCK35, scale, activation_fn, scope, 'Block35', reuse)


def block17(net, scale=1.0, activation_fn=tf.nn.relu, scope=None, reuse=None):
    """The 17 x 17 residual block (Inception-ResNet-B). Arguments and result: see `block35`."""
    return _residual(net, _BLOCK17, scale, activation_fn, scope, 'Block17', reuse)


def block8(net, scale=1.0, activation_fn=tf.nn.relu, scope=None, reuse=None):
    """The 8 x 8 residual block (Inception-ResNet-C). Arguments and result: see `block35`."""
    return _residual(net, _BLOCK8, scale, activation_fn, scope, 'Block8', reuse)


def inception_resnet_v2_base(inputs, final_endpoint='Conv2d_7b_1x1', output_stride=16,
                             align_feature_maps=False, scope=None, activation_fn=tf.nn.relu):
    """The convolutional part of Inception-ResNet-v2, up to an endpoint.

    Args:
        inputs: float images [batch, height, width, channels]; only the channels must be static.
        final_endpoint: the last one; one of 'Conv2d_1a_3x3', 'Conv2d_2a_3x3', 'Conv2d_2b_3x3',
            'MaxPool_3a_3x3', 'Conv2d_3b_1x1', 'Conv2d_4a_3x3', 'MaxPool_5a_3x3', 'Mixed_5b',
            'Mixed_6a', 'PreAuxLogits', 'Mixed_7a', 'Conv2d_7b_1x1'.
        output_stride: 16, or 8 to keep the maps from 'Mixed_6a' on at twice the resolution, with
            dilated convolutions (for dense prediction). 8 goes no further than 'PreAuxLogits'.
        align_feature_maps: True pads every layer ('SAME'), so that maps of all strides have
            their centres in line and every image size works.
        scope: variable scope, 'InceptionResnetV2' (made unique) when None.
        activation_fn: activation of the residual blocks. The arg_scope sets that of other layers.

    Returns:
        (net, end_points): the final endpoint's activation, and a dict of all up to it by name.

    Raises:
        ValueError: an endpoint or output stride that there is not, or images too small to reach
            the final endpoint. Nothing has been added to the graph by then.
    """
    if output_stride not in (8, 16):
        raise ValueError('output_stride must be 8 or 16, not %r.' % (output_stride,))
    if final_endpoint not in _END_POINTS:
        raise ValueError('final_endpoint (%s) not recognized: use one of %s.'
                         % (final_endpoint, ', '.join(_END_POINTS)))
    if output_stride == 8 and _is_after(final_endpoint, 'PreAuxLogits'):
        raise ValueError('output_stride=8 is only supported up to the PreAuxLogits end point, '
                         'not to %s.' % final_endpoint)
    if not align_feature_maps:
        _check_image_size(inputs, _least_side(final_endpoint, output_stride),
                          'to reach %s' % final_endpoint,
                          'Enlarge them, stop earlier, or give align_feature_maps=True.')

    padding = 'SAME' if align_feature_maps else 'VALID'
    end_points = {}
    with tf.variable_scope(scope, 'InceptionResnetV2', [inputs]):
        for name, net in _stages(inputs, padding, output_stride == 8, activation_fn):
            end_points[name] = net
            if name == final_endpoint:
                return net, end_points


def inception_resnet_v2(inputs, num_classes=1001, is_training=True, dropout_keep_prob=0.8,
                        reuse=None, scope='InceptionResnetV2', create_aux_logits=True,
                        activation_fn=tf.nn.relu):
    """The whole Inception-ResNet-v2: base, pooling, dropout, logits, auxiliary logits.

    Build it inside `slim.arg_scope(inception_resnet_v2_arg_scope())`: without it there is neither
    batch norm nor weight decay.

    Args:
        inputs: float images [batch, height, width, channels], 299 x 299 by default, at least
            107 x 107 with auxiliary logits and 75 x 75 without. Height and width may be unknown
            only without auxiliary logits, whose last convolution is as large as its input: at
            another size than 299 x 299 its weights may have another shape than [5, 5, 128, 768].
        num_classes: the number of classes, with the background class where there is one
            (published checkpoints have 1001); 0 or None gives the pooled activations.
        is_training: bool, or a bool scalar tensor: batch norm by the batch's statistics, dropout.
        dropout_keep_prob: the share of activations that dropout keeps before the logits.
        reuse: whether the variables are shared with an earlier call; needs a scope.
        scope: variable scope, 'InceptionResnetV2' (made unique) when None.
        create_aux_logits: whether to add logits half-way, for an auxiliary loss.
        activation_fn: the activation of the residual blocks.

    Returns:
        (logits, end_points): logits [batch, num_classes], and a dict with the endpoints of
        `inception_resnet_v2_base`, 'AuxLogits' [batch, num_classes] where asked for,
        'global_pool' [batch, 1, 1, 1536], 'PreLogitsFlatten' [batch, 1536] (after dropout),
        'Logits' and 'Predictions' (the softmax). With no classes: ('global_pool', end_points).

    Raises:
        ValueError: images too small, or of unknown size with auxiliary logits. Nothing has been
            added to the graph by then.
    """
    if create_aux_logits and num_classes:
        # Their pooling window is 5 x 5.
        _check_image_size(inputs, _least_side('PreAuxLogits', side=5), 'for auxiliary logits',
                          'Set it, or give create_aux_logits=False.', may_be_unknown=False)
    else:
        _check_image_size(inputs, _least_side('Conv2d_7b_1x1'), 'to have any pixel left at the end',
                          'Enlarge them.')

    with tf.variable_scope(scope, 'InceptionResnetV2', [inputs], reuse=reuse) as own_scope:
        with slim.arg_scope([slim.batch_norm, slim.dropout], is_training=is_training):
            net, end_points = inception_resnet_v2_base(
                inputs, scope=own_scope, activation_fn=activation_fn)
            if create_aux_logits and num_classes:
                with tf.variable_scope('AuxLogits'):
                    end_points['AuxLogits'] = _aux_logits(end_points['PreAuxLogits'], num_classes)
            with tf.variable_scope('Logits'):
                net = end_points['global_pool'] = _global_pool(net)
                if not num_classes:
                    return net, end_points
                net = slim.dropout(slim.flatten(net), dropout_keep_prob, scope='Dropout')
                end_points['PreLogitsFlatten'] = net
                logits = slim.fully_connected(net, num_classes, activation_fn=None, scope='Logits')
                end_points['Logits'] = logits
                end_points['Predictions'] = tf.nn.softmax(logits, name='Predictions')
    return logits, end_points


inception_resnet_v2.default_image_size = 299


def inception_resnet_v2_arg_scope(weight_decay=0.00004, batch_norm_decay=0.9997,
                                  batch_norm_epsilon=0.001, activation_fn=tf.nn.relu,
                                  batch_norm_updates_collections=tf.GraphKeys.UPDATE_OPS,
                                  batch_norm_scale=False):
    """The arg_scope to build the network in: L2 on weights and biases, batch norm, activation.

    Args:
        weight_decay: factor of the L2 loss of all weights and biases.
        batch_norm_decay: the decay of the moving averages.
        batch_norm_epsilon: added to the variance.
        activation_fn: the activation of every convolution with batch norm.
        batch_norm_updates_collections: where batch norm's update ops go; None runs them in place.
        batch_norm_scale: whether batch norm has a gamma too (published checkpoints have none).

    Returns:
        A slim arg_scope.
    """
    batch_norm_params = {
        'decay': batch_norm_decay,
        'epsilon': batch_norm_epsilon,
        'updates_collections': batch_norm_updates_collections,
        'scale': batch_norm_scale,
    }
    l2 = slim.l2_regularizer(weight_decay)
    with slim.arg_scope([slim.conv2d, slim.fully_connected],
                        weights_regularizer=l2, biases_regularizer=l2):
        with slim.arg_scope([slim.conv2d], activation_fn=activation_fn,
                            normalizer_fn=slim.batch_norm,
                            normalizer_params=batch_norm_params) as arg_scope:
            return arg_scope


def _stages(net, padding, dilated, activation_fn):
    """Yields (endpoint, activation) in order; what follows is built only when it is asked for."""
    for layer, depth, stride, always_padded in _STEM:
        net = _layer(net, layer, depth, stride, 'SAME' if always_padded else padding)
        yield layer, net
    with tf.variable_scope('Mixed_5b'):
        net = _mixture(net, _MIXED_5B)
    yield 'Mixed_5b', net
    net = _repeat(net, 'Repeat', 10, block35, scale=0.17, activation_fn=activation_fn)
    with tf.variable_scope('Mixed_6a'):
        net = _mixture(net, _MIXED_6A, 1 if dilated else 2, padding)
    yield 'Mixed_6a', net
    with slim.arg_scope([slim.conv2d], rate=2 if dilated else 1):
        net = _repeat(net, 'Repeat_1', 20, block17, scale=0.10, activation_fn=activation_fn)
    yield 'PreAuxLogits', net
    with tf.variable_scope('Mixed_7a'):
        net = _mixture(net, _MIXED_7A, 2, padding)
    yield 'Mixed_7a', net
    net = _repeat(net, 'Repeat_2', 9, block8, scale=0.20, activation_fn=activation_fn)
    # The last block is at full scale and linear: what pools it should see negative values too.
    net = block8(net, activation_fn=None, scope='Block8')
    yield 'Conv2d_7b_1x1', _layer(net, 'Conv2d_7b_1x1', 1536)


def _layer(net, scope, depth, stride=1, padding='SAME'):
    """One convolution or pooling layer, of the kind and window that its scope says."""
    kind = scope.split('_')[0]
    window = _window(scope)
    if kind == 'Conv2d':
        return slim.conv2d(net, depth, window, stride=stride, padding=padding, scope=scope)
    pool = {'MaxPool': slim.max_pool2d, 'AvgPool': slim.avg_pool2d}[kind]
    return pool(net, window, stride=stride, padding=padding, scope=scope)


def _window(scope):
    """'Conv2d_0b_1x7' -> [1, 7]: height, width."""
    return [int(side) for side in scope.split('_')[-1].split('x')]


def _mixture(net, branches, stride=1, padding='SAME'):
    """Every branch of `net`, side by side; stride and padding are those of their last layers."""
    ends = []
    for index, layers in enumerate(branches):
        with tf.variable_scope('Branch_%d' % index):
            end = net
            for scope, depth in layers[:-1]:
                end = _layer(end, scope, depth)
            scope, depth = layers[-1]
            ends.append(_layer(end, scope, depth, stride, padding))
    return tf.concat(ends, 3)


def _residual(net, branches, scale, activation_fn, scope, default_scope, reuse):
    """A residual block: `activation_fn(net + scale * mixture of the branches)`."""
    with tf.variable_scope(scope, default_scope, [net], reuse=reuse):
        # A linear 1x1 convolution brings the mixture to the depth of what it is added to.
        added = slim.conv2d(_mixture(net, branches), net.get_shape().as_list()[3], 1,
                            normalizer_fn=None, activation_fn=None, scope='Conv2d_1x1') * scale
        if activation_fn == tf.nn.relu6:
            added = tf.clip_by_value(added, -6.0, 6.0)
        net += added
        return activation_fn(net) if activation_fn else net


def _repeat(net, scope, times, block, **block_args):
    """`block` applied to `net` several times, in scopes with the numbers 1, 2, …."""
    # Named in full rather than by default_name, whose counter depends on what else was built.
    with tf.variable_scope(scope):
        for index in range(times):
            net = block(net, scope='%s_%d' % (block.__name__, index + 1), **block_args)
    return net


def _aux_logits(net, num_classes):
    """The auxiliary logits [batch, num_classes], from the end point 'PreAuxLogits'."""
    # The scopes are those of the checkpoints: 1a is a pooling layer, and 2a's window covers all
    # that is left, 5 x 5 only at the default image size.
    net = slim.avg_pool2d(net, 5, stride=3, padding='VALID', scope='Conv2d_1a_3x3')
    net = slim.conv2d(net, 128, 1, scope='Conv2d_1b_1x1')
    net = slim.conv2d(net, 768, net.get_shape().as_list()[1:3], padding='VALID',
                      scope='Conv2d_2a_5x5')
    return slim.fully_connected(slim.flatten(net), num_classes, activation_fn=None, scope='Logits')


def _global_pool(net):
    """The mean over height and width: [batch, 1, 1, depth]."""
    window = net.get_shape().as_list()[1:3]
    if None in window:
        return tf.reduce_mean(net, [1, 2], keepdims=True, name='global_pool')
    return slim.avg_pool2d(net, window, padding='VALID', scope='AvgPool_1a_8x8')


def _is_after(end_point, other):
    """Whether one end point comes after another one in the network."""
    return _END_POINTS.index(end_point) > _END_POINTS.index(other)


def _least_side(end_point, output_stride=16, side=1):
    """The least height or width of an image whose `end_point` has at least `side` pixels a side."""
    shrinking = [(scope, _window(scope)[0], stride)
                 for scope, _, stride, always_padded in _STEM if not always_padded]
    shrinking += [('Mixed_6a', 3, output_stride // 8), ('Mixed_7a', 3, 2)]
    for name, window, stride in reversed(shrinking):
        if not _is_after(name, end_point):
            side = (side - 1) * stride + window
    return side


def _check_image_size(inputs, least, purpose, advice, may_be_unknown=True):
    """Raises `ValueError` for images that are smaller than `least` pixels a side."""
    # Without convert_to_tensor, which would leave an op behind when the check fails.
    shape = tf.TensorShape(inputs.get_shape() if hasattr(inputs, 'get_shape') else inputs.shape)
    if shape.ndims != 4:
        raise ValueError('Inception-ResNet-v2 needs images of shape [batch, height, width, '
                         'channels], not %s.' % shape)
    sides = shape.as_list()[1:3]
    if None in sides and not may_be_unknown:
        raise ValueError('Inception-ResNet-v2 needs images of known height and width %s, not '
                         '%s. %s' % (purpose, shape, advice))
    if any(side is not None and side < least for side in sides):
        raise ValueError('Inception-ResNet-v2 needs images of at least %d x %d pixels %s, not '
                         '%s. %s' % (least, least, purpose, shape, advice))
