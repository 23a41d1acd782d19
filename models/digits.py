"""A small convolutional network for small images, such as 8 x 8 handwritten digits.

Its test is tests/models/test_registry.py.
"""

import tensorflow.compat.v1 as tf
import tf_slim as slim


def digits(inputs, num_classes=10, is_training=True, dropout_keep_prob=0.75, reuse=None,
           scope='Digits'):
    """Three 3x3 convolutions, two of them followed by a 2x2 maximum, then one linear layer.

    58,314 trainable parameters at the default size (8 x 8 x 1, ten classes). Build it inside
    `slim.arg_scope(digits_arg_scope())`: without it there is neither batch norm nor weight decay.

    Args:
        inputs: float images [batch, height, width, channels], values from 0 to 1; height, width and
            channels are static, height and width at least 4.
        num_classes: how many logits there are.
        is_training: bool, or a bool scalar tensor: batch norm by the batch's statistics, dropout.
        dropout_keep_prob: the share of activations that dropout keeps before the logits.
        reuse: whether the variables are shared with an earlier call; needs a scope.
        scope: variable scope, 'Digits' (made unique) when None.

    Returns:
        (logits, end_points): logits [batch, num_classes], and a dict with 'conv1' [batch, h, w,
        32], 'conv2' [batch, h, w, 64], 'pool2' [batch, h/2, w/2, 64], 'conv3', 'pool3' [batch,
        h/4, w/4, 64], 'Logits' and 'Predictions' (the softmax), both [batch, num_classes].

    Raises:
        ValueError: images of another rank, or too small. Nothing has been added to the graph then.
    """
    shape = inputs.get_shape()
    if shape.ndims != 4 or any(side is None or side < 4 for side in shape.as_list()[1:3]):
        raise ValueError('The digits network needs images [batch, height, width, channels] of '
                         'known size, at least 4 x 4, not %s.' % shape)
    end_points = {}
    with tf.variable_scope(scope, 'Digits', [inputs], reuse=reuse):
        with slim.arg_scope([slim.batch_norm, slim.dropout], is_training=is_training):
            net = end_points['conv1'] = slim.conv2d(inputs, 32, 3, scope='conv1')
            net = end_points['conv2'] = slim.conv2d(net, 64, 3, scope='conv2')
            net = end_points['pool2'] = slim.max_pool2d(net, 2, scope='pool2')
            net = end_points['conv3'] = slim.conv2d(net, 64, 3, scope='conv3')
            net = end_points['pool3'] = slim.max_pool2d(net, 2, scope='pool3')
            net = slim.dropout(slim.flatten(net), dropout_keep_prob, scope='dropout')
            logits = slim.fully_connected(net, num_classes, activation_fn=None, scope='logits')
        end_points['Logits'] = logits
        end_points['Predictions'] = tf.nn.softmax(logits, name='Predictions')
    return logits, end_points


digits.default_image_size = 8


def digits_arg_scope(weight_decay=0.0005, use_batch_norm=True, batch_norm_decay=0.9):
    """The arg_scope to build `digits` in: L2 on the weights, batch norm on the convolutions.

    Args:
        weight_decay: factor of the L2 loss of all weights; not of biases and betas.
        use_batch_norm: False gives the convolutions biases instead. Then a step on N towers is
            exactly a step on one device; batch norm sees one tower's shard at a time.
        batch_norm_decay: the decay of the moving averages; small, for runs of a few hundred steps.

    Returns:
        A slim arg_scope.
    """
    batch_norm = {
        'normalizer_fn': slim.batch_norm,
        'normalizer_params': {'decay': batch_norm_decay},
    }
    with slim.arg_scope([slim.conv2d, slim.fully_connected],
                        weights_regularizer=slim.l2_regularizer(weight_decay)):
        with slim.arg_scope([slim.conv2d], **(batch_norm if use_batch_norm else {})) as arg_scope:
            return arg_scope
