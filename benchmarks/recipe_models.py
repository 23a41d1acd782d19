"""Stand-ins of the programs that docs/recipes.md names: their layers and their losses, a few units
wide, so that their graphs are built in a moment.

    recipe = RECIPES['bert']
    built = towers.build_towers(recipe.model_fn, recipe.placeholders(16), recipe.optimizer(), 2,
                                reduction='mean')
"""

import collections
import typing

import numpy as np
import tensorflow
import tensorflow.compat.v1 as tf
import tf_slim as slim

import towers

_WORDS = 50  # of a vocabulary
_LENGTH = 8  # words of an example
_WIDTH = 16  # of a word's vector
_HEADS = 2
_CLASSES = 10


class Recipe(typing.NamedTuple):
    """A program with the inputs of its model function.

    Attributes:
      program: the public program that it stands for.
      model_fn: the model function.
      inputs: list of (shape of an example, dtype).
      optimizer: a function that makes what `build_towers` takes as `optimizer`.
      without_kernel: types of the operations of the program that have no GPU kernel.
    """
    program: str
    model_fn: typing.Callable
    inputs: typing.List[tuple]
    optimizer: typing.Callable
    without_kernel: typing.Tuple[str, ...] = ()

    def placeholders(self, examples):
        """A placeholder for each of the inputs, with so many examples."""
        return tuple(tf.placeholder(dtype, [examples] + shape) for shape, dtype in self.inputs)


# ---- layers --------------------------------------------------------------------------------------

def _weights(name, shape):
    return tf.get_variable(name, shape, initializer=tf.glorot_uniform_initializer())


def _dense(x, units, name, activation=None):
    biases = tf.get_variable(name + '/biases', [units], initializer=tf.zeros_initializer())
    y = tf.tensordot(x, _weights(name + '/weights', [int(x.shape[-1]), units]), 1) + biases
    return y if activation is None else activation(y)


def _layer_norm(x, name):
    size = int(x.shape[-1])
    mean, variance = tf.nn.moments(x, [-1], keepdims=True)
    return tf.nn.batch_normalization(
        x, mean, variance, tf.get_variable(name + '/beta', [size]),
        tf.get_variable(name + '/gamma', [size]), 1e-12)


def _instance_norm(x, name):
    size = int(x.shape[-1])
    mean, variance = tf.nn.moments(x, [1, 2], keepdims=True)
    scale = tf.get_variable(name + '/scale', [size])
    return scale * (x - mean) * tf.rsqrt(variance + 1e-5) + tf.get_variable(name + '/offset', [size])


def _gelu(x):
    return .5 * x * (1. + tf.tanh(np.sqrt(2. / np.pi) * (x + .044715 * tf.pow(x, 3))))


def _heads(x):
    """[examples, words, width] to [examples, heads, words, width of a head]."""
    split = tf.reshape(x, [-1, int(x.shape[1]), _HEADS, _WIDTH // _HEADS])
    return tf.transpose(split, [0, 2, 1, 3])


def _attention(x, memory, name, mask):
    queries = _heads(_dense(x, _WIDTH, name + '/query'))
    keys = _heads(_dense(memory, _WIDTH, name + '/key'))
    values = _heads(_dense(memory, _WIDTH, name + '/value'))
    scores = tf.matmul(queries, keys, transpose_b=True) / np.sqrt(_WIDTH / _HEADS)
    shares = tf.nn.dropout(tf.nn.softmax(scores + mask), rate=.1)
    mixed = tf.transpose(tf.matmul(shares, values), [0, 2, 1, 3])
    return _dense(tf.reshape(mixed, [-1, int(x.shape[1]), _WIDTH]), _WIDTH, name + '/output')


def _block(x, name, mask):
    """A layer of a transformer."""
    x = _layer_norm(x + _attention(x, x, name + '/attention', mask), name + '/norm_1')
    hidden = _dense(x, 4 * _WIDTH, name + '/hidden', _gelu)
    return _layer_norm(x + _dense(hidden, _WIDTH, name + '/back'), name + '/norm_2')


def _causal_mask(queries, keys):
    """[queries, keys]: a large negative number for each word that comes after."""
    later = tf.range(keys) - (keys - queries) > tf.range(queries)[:, tf.newaxis]
    return -1e10 * tf.cast(later, tf.float32)


def _leaky(x):
    return tf.maximum(.2 * x, x)


def _cross_entropy(labels, logits):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)


def _lstm_step(x, state, output, name):
    """One step of an LSTM: its new state and output."""
    gates = _dense(tf.concat([x, output], 1), 4 * int(state.shape[-1]), name)
    entry, new, keep, exit_ = tf.split(gates, 4, 1)
    state = tf.sigmoid(keep + 1.) * state + tf.sigmoid(entry) * tf.tanh(new)
    return state, tf.sigmoid(exit_) * tf.tanh(state)


# ---- language ------------------------------------------------------------------------------------

def _bert(words, segments, masked, labels, weights):
    table = _weights('embeddings/words', [_WORDS, _WIDTH])
    segment_table = _weights('embeddings/segments', [2, _WIDTH])
    places = _weights('embeddings/positions', [2 * _LENGTH, _WIDTH])
    x = tf.nn.embedding_lookup(table, words)
    kinds = tf.matmul(tf.one_hot(tf.reshape(segments, [-1]), 2), segment_table)
    x += tf.reshape(kinds, [-1, _LENGTH, _WIDTH])
    x += tf.slice(places, [0, 0], [_LENGTH, -1])[tf.newaxis]
    x = tf.nn.dropout(_layer_norm(x, 'embeddings/norm'), rate=.1)
    padding = tf.cast(tf.equal(words, 0), tf.float32)
    mask = -1e4 * padding[:, tf.newaxis, tf.newaxis, :]
    for layer in range(2):
        x = _block(x, 'layer_%d' % layer, mask)
    first_rows = _LENGTH * tf.range(tf.shape(words)[0])[:, tf.newaxis]
    rows = tf.gather(tf.reshape(x, [-1, _WIDTH]), tf.reshape(masked + first_rows, [-1]))
    rows = _layer_norm(_dense(rows, _WIDTH, 'predictions', _gelu), 'predictions/norm')
    logits = tf.nn.bias_add(tf.matmul(rows, table, transpose_b=True),
                            tf.get_variable('predictions/bias', [_WORDS]))
    chosen = tf.one_hot(tf.reshape(labels, [-1]), _WORDS)
    losses = -tf.reduce_sum(tf.nn.log_softmax(logits) * chosen, -1)
    weights = tf.reshape(weights, [-1])
    return towers.batch_sum(tf.reduce_sum(weights * losses)) / (
        towers.batch_sum(tf.reduce_sum(weights)) + 1e-5)


def _gpt_2(words, following):
    table = _weights('wte', [_WORDS, _WIDTH])
    x = tf.gather(table, words) + tf.gather(_weights('wpe', [_LENGTH, _WIDTH]), tf.range(_LENGTH))
    for layer in range(2):
        x = _block(x, 'h%d' % layer, _causal_mask(_LENGTH, _LENGTH))
    flat = tf.reshape(_layer_norm(x, 'ln_f'), [-1, _WIDTH])
    logits = tf.reshape(tf.matmul(flat, table, transpose_b=True), [-1, _LENGTH, _WORDS])
    return tf.reduce_mean(_cross_entropy(following, logits))


def _transformer_xl(words, following, memory):
    x = tf.nn.embedding_lookup(_weights('table', [_WORDS, _WIDTH]), words)
    before = tf.stop_gradient(x)
    joined = tf.concat([memory, x], 1)
    content = tf.einsum('bid,bjd->bij', _dense(x, _WIDTH, 'query'), _dense(joined, _WIDTH, 'key'))
    distances = _weights('distances', [2 * _LENGTH, _WIDTH])
    scores = tf.einsum('bid,jd->bij', x, distances)
    padded = tf.pad(scores, [[0, 0], [0, 0], [1, 0]])  # the shift by the relative position
    shifted = tf.reshape(padded, [-1, 2 * _LENGTH + 1, _LENGTH])[:, 1:]
    scores = content + tf.reshape(shifted, [-1, _LENGTH, 2 * _LENGTH])
    shares = tf.nn.softmax(scores + _causal_mask(_LENGTH, 2 * _LENGTH))
    x = _layer_norm(x + tf.einsum('bij,bjd->bid', shares, _dense(joined, _WIDTH, 'value')), 'norm')
    losses = _cross_entropy(following, _dense(x, _WORDS, 'logits'))
    return {'loss': tf.reduce_mean(losses), 'predictions': before}


def _transformer(sources, targets):
    mask = -1e9 * tf.cast(tf.equal(sources, 0), tf.float32)[:, tf.newaxis, tf.newaxis, :]
    table = _weights('table', [_WORDS, _WIDTH])
    read = _block(tf.nn.embedding_lookup(table, sources) * _WIDTH ** .5, 'encoder', mask)
    begun = tf.concat([tf.ones_like(targets[:, :1]), targets[:, :-1]], 1)
    x = tf.nn.embedding_lookup(table, begun)
    x = _layer_norm(x + _attention(x, x, 'own', _causal_mask(_LENGTH, _LENGTH)), 'norm')
    x = x + _attention(x, read, 'across', mask)
    chosen = .9 * tf.one_hot(targets, _WORDS) + .1 / _WORDS
    losses = tf.nn.softmax_cross_entropy_with_logits_v2(
        labels=chosen, logits=_dense(x, _WORDS, 'logits'))
    weights = tf.cast(tf.not_equal(targets, 0), tf.float32)
    return towers.batch_sum(tf.reduce_sum(losses * weights)) / towers.batch_sum(
        tf.reduce_sum(weights))


def _sampled_softmax(words, following):
    """An LSTM that is unrolled, and a softmax over some of the words."""
    x = tf.nn.embedding_lookup(_weights('table', [_WORDS, _WIDTH]), words)
    state = output = tf.zeros_like(x[:, 0])
    outputs = []
    with tf.variable_scope('lstm', reuse=tf.AUTO_REUSE):
        for word in tf.unstack(x, axis=1):
            state, output = _lstm_step(word, state, output, 'cell')
            outputs.append(output)
    hidden = tf.reshape(tf.stack(outputs, 1), [-1, _WIDTH])
    losses = tf.nn.sampled_softmax_loss(
        _weights('softmax', [_WORDS, _WIDTH]), tf.get_variable('bias', [_WORDS]),
        tf.reshape(following, [-1, 1]), hidden, 5, _WORDS)
    return tf.reduce_mean(losses)


def _loop(words, following):
    """An LSTM in a loop, as `tf.nn.dynamic_rnn` is one: char-rnn, nematus, bilm-tf, the tagger."""
    x = tf.transpose(tf.nn.embedding_lookup(_weights('table', [_WORDS, _WIDTH]), words), [1, 0, 2])
    read = tf.TensorArray(tf.float32, _LENGTH).unstack(x)
    written = tf.TensorArray(tf.float32, _LENGTH)
    start = tf.zeros_like(x[0])
    with tf.variable_scope('lstm', reuse=tf.AUTO_REUSE):
        def step(number, state, output, array):
            state, output = _lstm_step(read.read(number), state, output, 'cell')
            return number + 1, state, output, array.write(number, output)
        _, _, _, written = tf.while_loop(
            lambda number, *_: number < _LENGTH, step, (0, start, start, written),
            maximum_iterations=_LENGTH)
    hidden = tf.transpose(written.stack(), [1, 0, 2])
    hidden.set_shape([None, _LENGTH, _WIDTH])
    return tf.reduce_mean(_cross_entropy(following, _dense(hidden, _WORDS, 'logits')))


def _text_cnn(words, labels):
    x = tf.nn.embedding_lookup(_weights('W', [_WORDS, _WIDTH]), words)[..., tf.newaxis]
    pooled = []
    for size in (3, 4):
        filters = _weights('filter_%d' % size, [size, _WIDTH, 1, 6])
        features = tf.nn.conv2d(x, filters, [1, 1, 1, 1], 'VALID')
        features = tf.nn.relu(tf.nn.bias_add(features, tf.get_variable('b_%d' % size, [6])))
        pooled.append(tf.nn.max_pool(
            features, [1, _LENGTH - size + 1, 1, 1], [1, 1, 1, 1], 'VALID'))
    flat = tf.nn.dropout(tf.reshape(tf.concat(pooled, 3), [-1, 12]), rate=.5)
    scores = _dense(flat, _CLASSES, 'output')
    hits = tf.equal(tf.argmax(scores, 1), labels)
    return {'loss': tf.reduce_mean(_cross_entropy(labels, scores)),
            'metrics': {'accuracy': tf.reduce_mean(tf.cast(hits, tf.float32))}}


def _speech(frames, texts):
    """A bidirectional network with the loss of DeepSpeech, over texts of different lengths."""
    hidden = tf.minimum(tf.nn.relu(_dense(frames, _WIDTH, 'h1')), 20.)
    both = []
    for name, sequence in (('forward', hidden), ('backward', tf.reverse(hidden, [1]))):
        state = output = tf.zeros_like(sequence[:, 0])
        with tf.variable_scope(name, reuse=tf.AUTO_REUSE):
            for frame in tf.unstack(sequence, axis=1):
                state, output = _lstm_step(frame, state, output, 'cell')
        both.append(output)
    logits = _dense(hidden + _dense(tf.concat(both, 1), _WIDTH, 'h2')[:, tf.newaxis], 29, 'h6')
    places = tf.where(tf.greater(texts, 0))
    sparse = tf.SparseTensor(places, tf.gather_nd(texts, places),
                             tf.cast(tf.shape(texts), tf.int64))
    lengths = tf.fill(tf.shape(frames)[:1], _LENGTH)
    losses = tf.nn.ctc_loss(sparse, tf.transpose(logits, [1, 0, 2]), lengths)
    return tf.reduce_mean(losses)


# ---- recommendation ------------------------------------------------------------------------------

def _deep_fm(fields, values, labels):
    table = tf.Variable(tf.random_normal([_WORDS, 4]), name='feature_embeddings')
    bias = tf.Variable(tf.random_uniform([_WORDS, 1]), name='feature_bias')
    vectors = tf.nn.embedding_lookup(table, fields) * values[..., tf.newaxis]
    first = tf.nn.dropout(
        tf.reduce_sum(tf.nn.embedding_lookup(bias, fields) * values[..., tf.newaxis], 2), rate=.1)
    second = .5 * (tf.square(tf.reduce_sum(vectors, 1)) - tf.reduce_sum(tf.square(vectors), 1))
    deep = tf.reshape(vectors, [-1, 4 * _LENGTH])
    for layer in range(2):
        weights = tf.Variable(tf.random_normal([int(deep.shape[1]), 8]), name='layer_%d' % layer)
        deep = slim.batch_norm(tf.matmul(deep, weights), is_training=True, scope='bn_%d' % layer)
        deep = tf.nn.relu(deep)
    out = tf.sigmoid(tf.reduce_sum(first, 1) + tf.reduce_sum(second, 1) + tf.reduce_sum(deep, 1))
    return towers.ModelOutput(tf.losses.log_loss(labels, out), predictions=out)


def _interest_network(history, lengths, item, labels):
    table = _weights('items', [_WORDS, _WIDTH])
    past = tf.nn.embedding_lookup(table, history)
    wanted = tf.nn.embedding_lookup(table, item)
    queries = tf.tile(wanted[:, tf.newaxis], [1, _LENGTH, 1])
    pairs = tf.concat([queries, past, queries - past, queries * past], -1)
    scores = _dense(_dense(pairs, 8, 'attention_1', tf.sigmoid), 1, 'attention_2')[..., 0]
    mask = tf.sequence_mask(lengths, _LENGTH)
    shares = tf.nn.softmax(tf.where(mask, scores, tf.ones_like(scores) * (-2 ** 32 + 1)))
    interest = tf.reduce_sum(past * shares[..., tf.newaxis], 1)
    bias = tf.gather(tf.get_variable('item_b', [_WORDS]), item)
    joined = slim.batch_norm(tf.concat([interest, wanted], 1), is_training=True, scope='bn')
    logits = _dense(joined, 1, 'logits')[:, 0] + bias
    return tf.reduce_mean(
        tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits))


def _factorization(users, items, ratings):
    rows = tf.nn.embedding_lookup(_weights('P', [_WORDS, 4]), users)
    columns = tf.nn.embedding_lookup(_weights('Q', [_WORDS, 4]), items)
    predicted = tf.reduce_sum(rows * columns, 1)
    penalty = .01 * (tf.nn.l2_loss(rows) + tf.nn.l2_loss(columns))
    return towers.batch_sum(tf.reduce_sum(tf.square(ratings - predicted)) + penalty)


# ---- images --------------------------------------------------------------------------------------

def _slim_network(images, labels):
    l2 = slim.l2_regularizer(.01)
    with slim.arg_scope([slim.conv2d], normalizer_fn=slim.batch_norm, weights_regularizer=l2):
        net = slim.conv2d(images, 8, [3, 3], scope='conv1')
        net = slim.max_pool2d(net, [2, 2], scope='pool1')
        net = slim.separable_conv2d(net, 8, [3, 3], 1, scope='conv2')
    net = slim.dropout(slim.flatten(net), .5)
    logits = slim.fully_connected(net, _CLASSES, activation_fn=None, weights_regularizer=l2)
    tf.losses.sparse_softmax_cross_entropy(labels, logits)
    return tf.losses.get_total_loss()


def _keras_network(images, labels):
    layers = tensorflow.keras.layers
    net = layers.Conv2D(8, 3, activation='relu', name='conv')(images)
    net = layers.BatchNormalization(name='norm')(net, training=True)
    net = layers.Dense(_CLASSES, name='logits')(layers.Flatten()(net))
    return tf.reduce_mean(_cross_entropy(labels, net))


def _u_net(images, masks):
    down = slim.conv2d(images, 8, [3, 3], scope='down')
    net = slim.conv2d(slim.max_pool2d(down, [2, 2]), 16, [3, 3], scope='bottom')
    net = slim.conv2d_transpose(net, 8, [2, 2], 2, activation_fn=None, scope='up')
    height, width = tf.unstack(tf.shape(net)[1:3])
    kept = tf.slice(down, [0, 0, 0, 0], [-1, height, width, -1])
    logits = slim.conv2d(tf.concat([kept, net], 3), 2, [1, 1], activation_fn=None, scope='out')
    flat = tf.reshape(logits, [-1, 2])
    losses = tf.nn.softmax_cross_entropy_with_logits_v2(
        labels=tf.one_hot(tf.reshape(masks, [-1]), 2), logits=flat)
    return towers.ModelOutput(tf.reduce_mean(losses), predictions=tf.nn.softmax(logits))


def _generator(noise):
    net = tf.reshape(_dense(noise, 4 * 4 * 8, 'g_h0'), [-1, 4, 4, 8])
    net = tf.nn.relu(slim.batch_norm(net, is_training=True, scope='g_bn0'))
    filters = _weights('g_h1', [5, 5, 4, 8])
    net = tf.nn.conv2d_transpose(
        net, filters, tf.stack([tf.shape(noise)[0], 8, 8, 4]), [1, 2, 2, 1])
    net = tf.nn.relu(slim.batch_norm(tf.reshape(net, [-1, 8, 8, 4]), is_training=True,
                                     scope='g_bn1'))
    return tf.tanh(slim.conv2d_transpose(net, 3, [5, 5], 2, activation_fn=None, scope='g_h2'))


def _discriminator(images):
    net = _leaky(slim.conv2d(images, 4, [5, 5], 2, activation_fn=None, scope='d_h0'))
    net = slim.conv2d(net, 8, [5, 5], 2, activation_fn=None, scope='d_h1')
    return _dense(slim.flatten(_leaky(_instance_norm(net, 'd_norm'))), 1, 'd_logit')


def _dcgan(images, noise):
    fake = _generator(noise)
    with tf.variable_scope('', reuse=tf.AUTO_REUSE):
        of_real = _discriminator(images)
        of_fake = _discriminator(fake)
    entropy = tf.nn.sigmoid_cross_entropy_with_logits
    d_loss = tf.reduce_mean(entropy(labels=tf.ones_like(of_real), logits=of_real)
                            + entropy(labels=tf.zeros_like(of_fake), logits=of_fake))
    g_loss = tf.reduce_mean(entropy(labels=tf.ones_like(of_fake), logits=of_fake))
    return {'loss': {'d': d_loss, 'g': g_loss}}


def _wasserstein(images, noise, mixture):
    """A critic with a gradient penalty."""
    fake = tf.stop_gradient(tf.reshape(_dense(noise, 16 * 16 * 3, 'g'), [-1, 16, 16, 3]))
    with tf.variable_scope('', reuse=tf.AUTO_REUSE):
        distance = _discriminator(fake) - _discriminator(images)
        mixed = images + mixture[:, tf.newaxis, tf.newaxis] * (fake - images)
        slopes = tf.gradients(_discriminator(mixed), [mixed])[0]
    norms = tf.sqrt(1e-12 + tf.reduce_sum(tf.square(slopes), [1, 2, 3]))
    return tf.reduce_mean(distance) + 10. * tf.reduce_mean(tf.square(norms - 1.))


def _cycle_gan(images):
    net = tf.pad(images, [[0, 0], [3, 3], [3, 3], [0, 0]], 'REFLECT')
    net = slim.conv2d(net, 4, [7, 7], padding='VALID', activation_fn=None, scope='c1')
    net = tf.nn.relu(_instance_norm(net, 'c1_norm'))
    inner = slim.conv2d(net, 4, [3, 3], activation_fn=None, scope='r1')
    net = net + _instance_norm(inner, 'r1_norm')
    net = slim.conv2d_transpose(net, 4, [3, 3], 2, activation_fn=None, scope='d1')
    net = slim.conv2d(net, 3, [7, 7], 2, activation_fn=tf.tanh, scope='out')
    return 10. * tf.reduce_mean(tf.abs(net - images))


def _autoencoder(images, chance):
    hidden = tf.nn.elu(_dense(images, 16, 'encoder'))
    mean, scale = tf.split(_dense(hidden, 8, 'codes'), 2, 1)
    scale = 1e-6 + tf.nn.softplus(scale)
    decoded = _dense(tf.tanh(_dense(mean + scale * chance, 16, 'decoder')), 64, 'pixels', tf.sigmoid)
    decoded = tf.clip_by_value(decoded, 1e-8, 1 - 1e-8)
    likelihood = tf.reduce_sum(
        images * tf.log(decoded) + (1 - images) * tf.log(1 - decoded), 1)
    divergence = .5 * tf.reduce_sum(
        tf.square(mean) + tf.square(scale) - tf.log(1e-8 + tf.square(scale)) - 1, 1)
    return tf.reduce_mean(divergence) - tf.reduce_mean(likelihood)


def _squash(x):
    norm = tf.reduce_sum(tf.square(x), -2, keepdims=True)
    return norm / (1 + norm) / tf.sqrt(norm + 1e-9) * x


def _capsules(images, labels):
    net = slim.conv2d(images, 8, [9, 9], 2, padding='VALID', scope='primary')
    capsules = _squash(tf.reshape(net, [-1, 32, 1, 4, 1]))
    weights = _weights('W', [1, 32, _CLASSES, 4, 4])
    votes = tf.reduce_sum(tf.tile(capsules, [1, 1, _CLASSES, 1, 4]) * weights, 3, keepdims=True)
    votes = tf.transpose(votes, [0, 1, 2, 4, 3])
    routes = tf.zeros_like(votes[..., :1, :1])
    for _ in range(2):
        out = _squash(tf.reduce_sum(tf.nn.softmax(routes, 2) * votes, 1, keepdims=True))
        routes += tf.reduce_sum(tf.stop_gradient(votes) * out, 3, keepdims=True)
    lengths = tf.sqrt(tf.reduce_sum(tf.square(out), 3) + 1e-9)[:, 0, :, 0]
    chosen = tf.one_hot(labels, _CLASSES)
    losses = (chosen * tf.square(tf.maximum(0., .9 - lengths))
              + .5 * (1 - chosen) * tf.square(tf.maximum(0., lengths - .1)))
    return tf.reduce_mean(tf.reduce_sum(losses, 1))


def _yolo(images, boxes):
    net = _leaky(slim.conv2d(images, 8, [3, 3], 2, activation_fn=None, scope='conv1',
                             normalizer_fn=slim.batch_norm))
    deep = _leaky(slim.conv2d(net, 8, [3, 3], 2, activation_fn=None, scope='conv2',
                              normalizer_fn=slim.batch_norm))
    up = tf.image.resize_nearest_neighbor(deep, tf.shape(net)[1:3])
    raw = slim.conv2d(tf.concat([up, net], 3), 5, [1, 1], activation_fn=None, scope='head')
    columns, rows = tf.meshgrid(tf.range(8), tf.range(8))
    grid = tf.cast(tf.stack([columns, rows], -1), tf.float32)[tf.newaxis]
    centres = (tf.sigmoid(raw[..., :2]) + grid) * 2.
    sizes = tf.exp(raw[..., 2:4])
    predicted = tf.concat([centres, sizes], -1)
    wanted = boxes[..., :4]
    low = tf.maximum(predicted[..., :2] - sizes / 2, wanted[..., :2] - wanted[..., 2:] / 2)
    high = tf.minimum(predicted[..., :2] + sizes / 2, wanted[..., :2] + wanted[..., 2:] / 2)
    shared = tf.reduce_prod(tf.maximum(high - low, 0.), -1)
    whole = tf.reduce_prod(sizes, -1) + tf.reduce_prod(wanted[..., 2:], -1) - shared
    has_box = boxes[..., 4]
    confidence = tf.nn.sigmoid_cross_entropy_with_logits(labels=has_box, logits=raw[..., 4])
    return tf.reduce_mean(tf.reduce_sum(
        has_box * (1. - shared / (whole + 1e-9)) + confidence, [1, 2]))


def _point_net(points, labels):
    net = slim.conv2d(points[..., tf.newaxis], 8, [1, 3], padding='VALID', scope='tconv1',
                      normalizer_fn=slim.batch_norm)
    net = slim.flatten(slim.max_pool2d(net, [16, 1], padding='VALID'))
    turn = tf.reshape(_dense(net, 9, 'transform'), [-1, 3, 3])
    turned = tf.matmul(points, turn)[..., tf.newaxis]
    net = slim.conv2d(turned, 8, [1, 3], padding='VALID', scope='conv1',
                      normalizer_fn=slim.batch_norm)
    net = slim.flatten(slim.max_pool2d(net, [16, 1], padding='VALID'))
    gap = tf.matmul(turn, tf.transpose(turn, [0, 2, 1])) - tf.eye(3)
    loss = tf.reduce_mean(_cross_entropy(labels, _dense(net, _CLASSES, 'logits')))
    return loss + .001 * towers.batch_sum(tf.nn.l2_loss(gap))


# ---- decisions, physics --------------------------------------------------------------------------

def _deep_q(states, rewards, following, actions):
    with tf.variable_scope('eval_net'):
        values = _dense(_dense(states, 16, 'l1', tf.nn.relu), 4, 'q')
    with tf.variable_scope('target_net'):
        later = _dense(_dense(following, 16, 'l1', tf.nn.relu), 4, 'q')
    wanted = tf.stop_gradient(rewards + .9 * tf.reduce_max(later, 1))
    places = tf.stack([tf.range(tf.shape(actions)[0], dtype=tf.int32), actions], 1)
    return tf.reduce_mean(tf.squared_difference(wanted, tf.gather_nd(values, places)))


def _policy(states, actions, advantages):
    """The clipped objective of PPO."""
    hidden = _dense(states, 16, 'l1', tf.nn.relu)
    mean = 2. * _dense(hidden, 1, 'mean', tf.nn.tanh)
    deviation = _dense(hidden, 1, 'deviation', tf.nn.softplus) + 1e-3
    surprise = .5 * tf.square((actions - mean) / deviation) + tf.log(deviation)
    ratio = tf.exp(tf.stop_gradient(surprise) - surprise)
    return -tf.reduce_mean(tf.minimum(
        ratio * advantages, tf.clip_by_value(ratio, .8, 1.2) * advantages))


def _molecule(coordinates, energies, forces):
    hidden = _dense(coordinates, 16, 'net', tf.tanh)
    predicted = tf.reduce_sum(tf.square(_dense(hidden, 4, 'fit')), 1)
    of_force = -tf.gradients(predicted, coordinates)[0]
    return tf.reduce_mean(tf.square(predicted - energies)) + tf.reduce_mean(
        tf.square(of_force - forces))


# ---- optimizers, and the list --------------------------------------------------------------------

def _momentum():
    return tf.train.MomentumOptimizer(.01, .9)


def _adam():
    return tf.train.AdamOptimizer(.001)


def _clipped():
    def clip(pairs):
        gradients, variables = zip(*pairs)
        return list(zip(tf.clip_by_global_norm(gradients, 1.)[0], variables))
    return towers.Objective(_adam(), transform_gradients=clip)


def _adversaries():
    def beginning_with(letter):
        return lambda variables: [each for each in variables if each.name.startswith(letter)]
    return {letter: towers.Objective(_adam(), beginning_with(letter)) for letter in 'dg'}


def _evaluated():
    return towers.Objective(
        tf.train.RMSPropOptimizer(.01),
        lambda variables: [each for each in variables if each.name.startswith('eval_net')])


_TEXT = ([_LENGTH], tf.int32)
_NUMBER = ([], tf.float32)
_LABEL = ([], tf.int64)
_IMAGE = ([16, 16, 3], tf.float32)
_GRAY = ([64], tf.float32)

RECIPES = collections.OrderedDict([
    ('bert', Recipe('google-research/bert', _bert, [
        _TEXT, _TEXT, ([2], tf.int32), ([2], tf.int32), ([2], tf.float32)], _clipped)),
    ('gpt_2', Recipe('nshepperd/gpt-2', _gpt_2, [_TEXT, _TEXT], _adam)),
    ('transformer_xl', Recipe('kimiyoung/transformer-xl', _transformer_xl, [
        _TEXT, _TEXT, ([_LENGTH, _WIDTH], tf.float32)], _clipped)),
    ('transformer', Recipe('Kyubyong/transformer', _transformer, [_TEXT, _TEXT], _adam)),
    ('sampled_softmax', Recipe('rafaljozefowicz/lm', _sampled_softmax, [_TEXT, ([
        _LENGTH], tf.int64)], lambda: tf.train.AdagradOptimizer(.2),
        ('ComputeAccidentalHits', 'LogUniformCandidateSampler'))),
    ('loop', Recipe('sherjilozair/char-rnn-tensorflow', _loop, [_TEXT, _TEXT], _clipped)),
    ('text_cnn', Recipe('dennybritz/cnn-text-classification-tf', _text_cnn, [_TEXT, _LABEL],
                        _adam)),
    ('speech', Recipe('mozilla/DeepSpeech', _speech, [
        ([_LENGTH, 13], tf.float32), ([4], tf.int32)], _adam, ('CTCLoss',))),
    ('deep_fm', Recipe('ChenglongChen/tensorflow-DeepFM', _deep_fm, [
        _TEXT, ([_LENGTH], tf.float32), _NUMBER], _adam)),
    ('interest_network', Recipe('zhougr1993/DeepInterestNetwork', _interest_network, [
        _TEXT, ([], tf.int32), ([], tf.int32), _NUMBER], _clipped)),
    ('factorization', Recipe('cheungdaven/DeepRec', _factorization, [
        ([], tf.int32), ([], tf.int32), _NUMBER], _adam)),
    ('slim_network', Recipe('tensorflow/models, research/slim', _slim_network, [_IMAGE, _LABEL],
                            _momentum)),
    ('keras_network', Recipe('a Keras model', _keras_network, [_IMAGE, _LABEL], _momentum)),
    ('u_net', Recipe('jakeret/tf_unet', _u_net, [_IMAGE, ([16, 16], tf.int32)], _momentum)),
    ('dcgan', Recipe('carpedm20/DCGAN-tensorflow', _dcgan, [_IMAGE, ([10], tf.float32)],
                     _adversaries)),
    ('wasserstein', Recipe('igul222/improved_wgan_training', _wasserstein, [
        _IMAGE, ([10], tf.float32), ([1], tf.float32)], _adam)),
    ('cycle_gan', Recipe('xhujoy/CycleGAN-tensorflow', _cycle_gan, [_IMAGE], _adam)),
    ('autoencoder', Recipe('hwalsuklee/tensorflow-mnist-VAE', _autoencoder, [
        _GRAY, ([4], tf.float32)], _adam)),
    ('capsules', Recipe('naturomics/CapsNet-Tensorflow', _capsules, [_IMAGE, _LABEL], _adam)),
    ('yolo', Recipe('YunYang1994/tensorflow-yolov3', _yolo, [
        _IMAGE, ([8, 8, 5], tf.float32)], _momentum)),
    ('point_net', Recipe('charlesq34/pointnet', _point_net, [
        ([16, 3], tf.float32), _LABEL], _adam)),
    ('deep_q', Recipe('MorvanZhou, DQN', _deep_q, [
        _GRAY, _NUMBER, _GRAY, ([], tf.int32)], _evaluated)),
    ('policy', Recipe('MorvanZhou, PPO', _policy, [
        _GRAY, ([1], tf.float32), ([1], tf.float32)], _adam)),
    ('molecule', Recipe('deepmodeling/deepmd-kit', _molecule, [
        ([12], tf.float32), _NUMBER, ([12], tf.float32)], _adam)),
])
