"""Models that people cut into stages, as TF1 model functions of `(inputs, targets)`.

Where they say nothing of stages, `stages='auto'` cuts them. None has batch norm or dropout: their
gradients are those of one device, to be held against it.
"""

import collections

import numpy as np
import tensorflow.compat.v1 as tf

import towers

StageModel = collections.namedtuple('StageModel', 'what model arrays counts stages')
"""Fields:
  what: in words, for the table.
  model: function of inputs and targets to the mean loss.
  arrays: function of a dtype to `(inputs, targets)`.
  counts: the numbers of stages to measure.
  stages: of `Pipeline`.
"""


def _mean_loss(logits, targets):
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels=targets, logits=logits))


def _conv(net, name, width, size=3, stride=1, padding='SAME'):
    with tf.variable_scope(name):
        channels = net.shape.as_list()[-1]
        weights = tf.get_variable('weights', [size, size, channels, width], net.dtype)
        biases = tf.get_variable('biases', [width], net.dtype)
    return tf.nn.relu(tf.nn.bias_add(
        tf.nn.conv2d(net, weights, [1, stride, stride, 1], padding), biases))


def _dense(net, name, width):
    with tf.variable_scope(name):
        weights = tf.get_variable('weights', [net.shape.as_list()[-1], width], net.dtype)
        biases = tf.get_variable('biases', [width], net.dtype)
    flat = tf.matmul(tf.reshape(net, [-1, net.shape.as_list()[-1]]), weights)
    return tf.reshape(tf.nn.bias_add(flat, biases),
                      tf.concat([tf.shape(net)[:-1], [width]], 0)) if (
                          net.shape.ndims > 2) else tf.nn.bias_add(flat, biases)


def inception_v3_front(images, targets):
    """The stem of InceptionV3 on the first device, its first mixed blocks on the second."""
    with towers.stage(0):
        net = _conv(images, 'conv1a', 32, stride=2, padding='VALID')
        net = _conv(net, 'conv2a', 32, padding='VALID')
        net = _conv(net, 'conv2b', 64)
        net = tf.nn.max_pool(net, [1, 3, 3, 1], [1, 2, 2, 1], 'VALID')
        net = _conv(net, 'conv3b', 80, 1)
        net = _conv(net, 'conv4a', 192, padding='VALID')
        net = tf.nn.max_pool(net, [1, 3, 3, 1], [1, 2, 2, 1], 'VALID')
    with towers.stage(1):
        for name, pooled in (('mixed5b', 32), ('mixed5c', 64), ('mixed5d', 64)):
            with tf.variable_scope(name):
                pool = tf.nn.avg_pool(net, [1, 3, 3, 1], [1, 1, 1, 1], 'SAME')
                net = tf.concat([
                    _conv(net, 'one', 64, 1),
                    _conv(_conv(net, 'five1', 48, 1), 'five2', 64, 5),
                    _conv(_conv(_conv(net, 'three1', 64, 1), 'three2', 96), 'three3', 96),
                    _conv(pool, 'pool', pooled, 1)], 3)
        return _mean_loss(_dense(tf.reduce_mean(net, [1, 2]), 'logits', 10), targets)


def inception_resnet_v2(images, targets):
    """InceptionResNet-v2 without its batch norm."""
    import tf_slim as slim
    from models.inception_resnet_v2 import inception_resnet_v2 as network
    with slim.arg_scope([slim.conv2d, slim.fully_connected],
                        weights_initializer=tf.variance_scaling_initializer(1.)):
        logits, _ = network(images, 10, dropout_keep_prob=1., create_aux_logits=False)
    return _mean_loss(logits, targets)


def lstm_layers(layers, width):
    """Layers of LSTM cells over the words of a text, a layer a device."""
    def model(words, targets):
        steps = tf.unstack(words, axis=1)
        for layer in range(layers):
            with towers.stage(layer), tf.variable_scope('lstm%d' % layer):
                dtype = words.dtype
                kernel = tf.get_variable('kernel', [
                    steps[0].shape.as_list()[-1] + width, 4 * width], dtype)
                bias = tf.get_variable('bias', [4 * width], dtype)
                state = output = tf.zeros([tf.shape(words)[0], width], dtype)
                outputs = []
                for step in steps:
                    gates = tf.nn.bias_add(tf.matmul(tf.concat([step, output], 1), kernel), bias)
                    entry, new, keep, leave = tf.split(gates, 4, 1)
                    state = tf.sigmoid(keep + 1) * state + tf.sigmoid(entry) * tf.tanh(new)
                    output = tf.sigmoid(leave) * tf.tanh(state)
                    outputs.append(output)
                steps = outputs
        return _mean_loss(_dense(steps[-1], 'logits', 10), targets)
    return model


def gpt_blocks(blocks, width, heads):
    """Blocks as GPT-2's: layer norm, causal attention, layer norm, two dense layers; residual."""
    def norm(net, name):
        with tf.variable_scope(name):
            gain = tf.get_variable('gain', [width], net.dtype, tf.ones_initializer())
            bias = tf.get_variable('bias', [width], net.dtype, tf.zeros_initializer())
        mean, variance = tf.nn.moments(net, [-1], keep_dims=True)
        return (net - mean) * tf.rsqrt(variance + 1e-5) * gain + bias

    def attention(net, words):
        shape = [-1, words, heads, width // heads]
        query, key, value = (tf.transpose(tf.reshape(each, shape), [0, 2, 1, 3])
                             for each in tf.split(_dense(net, 'qkv', 3 * width), 3, 2))
        scores = tf.matmul(query, key, transpose_b=True) * (width // heads) ** -0.5
        mask = tf.constant(np.tril(np.ones([words, words])), net.dtype)
        weights = tf.nn.softmax(scores * mask - 1e9 * (1 - mask))
        merged = tf.transpose(tf.matmul(weights, value), [0, 2, 1, 3])
        return _dense(tf.reshape(merged, [-1, words, width]), 'merge', width)

    def model(net, targets):
        words = net.shape.as_list()[1]
        for block in range(blocks):
            with tf.variable_scope('block%d' % block):
                net += attention(norm(net, 'norm1'), words)
                net += _dense(tf.nn.relu(_dense(norm(net, 'norm2'), 'wide', 4 * width)), 'narrow',
                              width)
        return _mean_loss(_dense(norm(net[:, -1], 'norm'), 'logits', 10), targets)
    return model


def _arrays(*shape):
    def arrays(dtype):
        random = np.random.RandomState(0)
        return random.randn(*shape).astype(dtype), random.randint(10, size=shape[0])
    return arrays


STAGE_MODELS = collections.OrderedDict([
    ('inception_v3_front', StageModel('InceptionV3, stem and first mixed blocks, 149 px, batch 8',
                                      inception_v3_front, _arrays(8, 149, 149, 3), (2,), None)),
    ('inception_resnet_v2', StageModel('InceptionResNet-v2, 107 px, batch 8', inception_resnet_v2,
                                       _arrays(8, 107, 107, 3), (2, 4), 'auto')),
    ('lstm', StageModel('4 layers of 256 LSTM cells, 40 words, batch 64', lstm_layers(4, 256),
                        _arrays(64, 40, 256), (4,), None)),
    ('gpt', StageModel('8 blocks as GPT-2\'s of 256, 64 words, batch 16', gpt_blocks(8, 256, 8),
                       _arrays(16, 64, 256), (2, 4), 'auto'))])
