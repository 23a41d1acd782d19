"""The models that every contender trains: one source of model code, weights and data for all.

A model is a TF1 function of its shard that returns the shard's mean loss; its variables come from
`get_variable` (or slim, which calls that), so that every contender can place them its own way.
There is no dropout and no regularization: whatever trains a workload has to compute the same.
"""

import collections
import zlib

import numpy as np
import tensorflow.compat.v1 as tf

MOMENTUM = 0.9


class Workload(collections.namedtuple('Workload', [
        'name', 'what', 'arrays', 'model', 'learning_rate', 'batch', 'per_tower', 'towers',
        'batch_norm', 'convolutional', 'large', 'deep'])):
    """A model with its data.

    Fields:
      name: for the command line and the results.
      what: the model in a few words, for the table.
      arrays: function from a batch size to the batch, a tuple of numpy arrays [batch, …].
      model: function from a shard, a tuple of tensors, to its mean loss.
      learning_rate: of the mean gradient.
      batch: the least global batch.
      per_tower: the least examples of a tower.
      towers: the numbers of towers that are measured unless the command line says.
      batch_norm: whether statistics are of a tower's shard, so that one device on the whole batch
        computes another loss.
      convolutional: whether the aim for conv nets applies.
      large: whether a contender takes gigabytes.
      deep: whether it takes tens of seconds to start, too.
    """
    __slots__ = ()

    def batch_size(self, num_towers):
        """Examples of a step on that many towers; divides among them."""
        return max(-(-self.batch // num_towers), self.per_tower) * num_towers


def optimizer(learning_rate):
    """The optimizer of every contender: it is linear in the gradient."""
    return tf.train.MomentumOptimizer(learning_rate, MOMENTUM)


def initial_value(name, shape):
    """float32 array: the same weights for a variable of this name wherever it is made."""
    random = np.random.Generator(np.random.Philox(zlib.crc32(name.encode())))
    last = name.split('/')[-1]
    if last in ('gamma', 'moving_variance'):
        return np.ones(shape, np.float32)
    if len(shape) < 2:
        return np.zeros(shape, np.float32)
    scale = 0.05 if last == 'table' else np.sqrt(2. / np.prod(shape[:-1]))
    values = random.standard_normal(shape, np.float32)
    values *= np.float32(scale)
    return values


# ---- data ---------------------------------------------------------------------------------------

def _images(size, channels, classes=10):
    def arrays(batch):
        random = np.random.RandomState(batch)
        return (random.rand(batch, size, size, channels).astype(np.float32),
                random.randint(classes, size=batch).astype(np.int64))
    return arrays


def features(width, classes):
    """Function from a batch size to (float32 [batch, width], int64 labels [batch])."""
    def arrays(batch):
        random = np.random.RandomState(batch)
        return (random.rand(batch, width).astype(np.float32),
                random.randint(classes, size=batch).astype(np.int64))
    return arrays


def _tokens(vocabulary, length, classes):
    def arrays(batch):
        random = np.random.RandomState(batch)
        return (random.randint(vocabulary, size=(batch, length)).astype(np.int64),
                random.randint(classes, size=batch).astype(np.int64))
    return arrays


# ---- models -------------------------------------------------------------------------------------

def _mean_loss(logits, labels):
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))


def _network(name, **options):
    """A network of models/registry, without weight decay and dropout."""
    def model(images, labels):
        from models import registry  # with tf_slim, which the other workloads do without
        logits, _ = registry.get_network(name).build(images, 10, weight_decay=0, **options)
        return _mean_loss(logits, labels)
    return model


def _dense(inputs, width, name, activation=tf.nn.relu):
    with tf.variable_scope(name):
        weights = tf.get_variable('weights', [inputs.get_shape().as_list()[-1], width])
        biases = tf.get_variable('biases', [width])
    outputs = tf.nn.bias_add(tf.matmul(inputs, weights), biases)
    return outputs if activation is None else activation(outputs)


def _small_conv(images, labels):
    net = images
    for index, width in enumerate((32, 64)):
        with tf.variable_scope('conv%d' % index):
            weights = tf.get_variable('weights', [3, 3, net.get_shape().as_list()[-1], width])
            biases = tf.get_variable('biases', [width])
        net = tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(net, weights, [1, 1, 1, 1], 'SAME'), biases))
        net = tf.nn.max_pool(net, [1, 2, 2, 1], [1, 2, 2, 1], 'SAME')
    net = tf.reshape(net, [-1, np.prod(net.get_shape().as_list()[1:])])
    return _mean_loss(_dense(_dense(net, 128, 'hidden'), 10, 'logits', None), labels)


def dense_stack(layers, width):
    """A model of so many layers of width x width weights and no more; the last gives logits."""
    def model(features, labels):
        for index in range(layers):
            features = _dense(features, width, 'dense%d' % index,
                              tf.nn.relu if index + 1 < layers else None)
        return _mean_loss(features, labels)
    return model


def _embedding(rows, width):
    def model(tokens, labels):
        table = tf.get_variable('embedding/table', [rows, width])
        net = tf.reduce_mean(tf.gather(table, tokens), 1)
        return _mean_loss(_dense(_dense(net, 64, 'hidden'), 2, 'logits', None), labels)
    return model


def _lstm(vocabulary, width):
    def model(tokens, labels):
        table = tf.get_variable('words/table', [vocabulary, width])
        weights = tf.get_variable('lstm/weights', [2 * width, 4 * width])
        biases = tf.get_variable('lstm/biases', [4 * width])
        words = tf.unstack(tf.gather(table, tokens), axis=1)
        state = output = tf.zeros_like(words[0])
        for word in words:
            gates = tf.nn.bias_add(tf.matmul(tf.concat([word, output], 1), weights), biases)
            entry, new, keep, exit_ = tf.split(gates, 4, 1)
            state = tf.sigmoid(keep + 1.) * state + tf.sigmoid(entry) * tf.tanh(new)
            output = tf.sigmoid(exit_) * tf.tanh(state)
        return _mean_loss(_dense(output, 10, 'logits', None), labels)
    return model


def _conv_stack(layers, width):
    """As many 3 x 3 convolutions of one width, so that half of them is half of the work."""
    def model(images, labels):
        for index in range(layers):
            with tf.variable_scope('conv%d' % index):
                weights = tf.get_variable('weights', [3, 3, width, width])
                biases = tf.get_variable('biases', [width])
            images = tf.nn.relu(tf.nn.bias_add(
                tf.nn.conv2d(images, weights, [1, 1, 1, 1], 'SAME'), biases))
        return _mean_loss(tf.reduce_mean(images, [1, 2]), labels)
    return model


_ALL = (1, 2, 4, 8)
WORKLOADS = collections.OrderedDict((workload.name, workload) for workload in (
    Workload('digits', 'digits network, 8 x 8', _images(8, 1),
             _network('digits', dropout_keep_prob=1.), 0.01, 96, 8, _ALL, True, True, False, False),
    Workload('small_conv', 'two convolutions, 32 x 32', _images(32, 3), _small_conv, 0.01, 64, 8,
             _ALL, False, True, False, False),
    # A low rate for the deep ones: at 1e-3 rounding alone has losses 3 % apart in the third step.
    Workload('resnet50', 'ResNet-50, 64 px', _images(64, 3), _network('resnet_v1_50'), 1e-5, 64,
             8, _ALL, True, True, True, True),
    # Eight towers take minutes to build in every contender: asked for by --towers=8 alone.
    Workload('inception_resnet', 'InceptionResNet-v2, 96 px', _images(96, 3),
             _network('inception_resnet_v2', create_aux_logits=False, dropout_keep_prob=1.),
             1e-5, 32, 8, (2, 4), True, True, True, True),
    Workload('dense', 'three 4096-wide dense layers, 50 M parameters', features(4096, 4096),
             dense_stack(3, 4096), 0.001, 16, 16, _ALL, False, False, True, False),
    Workload('embedding', 'a million rows of 32, sparse gradients', _tokens(10 ** 6, 20, 2),
             _embedding(10 ** 6, 32), 0.1, 256, 32, _ALL, False, False, False, False),
    Workload('lstm', 'LSTM of 128, 20 steps', _tokens(1000, 20, 10), _lstm(1000, 128), 0.1, 64, 8,
             _ALL, False, False, False, False),
    Workload('tiny', 'one dense layer of 16, for tests', features(16, 16), dense_stack(1, 16),
             0.1, 16, 2, (1, 2), False, False, False, False),
    # Of equal halves, for a pipeline of two stages.
    Workload('dense_halves', 'eight dense layers of 1024', features(1024, 1024),
             dense_stack(8, 1024), 0.001, 512, 512, (1,), False, False, False, False),
    Workload('conv_halves', 'eight convolutions of 64, 28 x 28', _images(28, 64),
             _conv_stack(8, 64), 0.001, 64, 64, (1,), False, True, False, False),
))
# The deep ones last: they take most of the time.
DEFAULT = tuple(sorted((name for name in WORKLOADS
                        if name not in ('tiny', 'dense_halves', 'conv_halves')),
                       key=lambda name: WORKLOADS[name].deep))
