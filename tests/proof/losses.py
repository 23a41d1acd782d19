"""Small losses whose answer is known by hand: `COUPLED` ones are no mean over the examples, or their
gradient is none; `INDEPENDENT` ones are.

The parameters of a loss name its inputs, which `make_inputs` makes; it makes its own variables.
"""

import inspect

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.python.framework import function

import towers

# name: (type, dimensions behind that of the examples)
INPUTS = {
    'x': (tf.float32, [6]),
    'z': (tf.float32, [6]),
    'y': (tf.int64, []),  # one of 3 classes
    'key': (tf.int64, []),  # 0 to 3
    'label': (tf.float32, []),  # 0 or 1
    'weight': (tf.float32, []),  # from 0.2 to 2
    'ids': (tf.int64, [5]),  # of 10 words
    'lengths': (tf.int64, []),  # 1 to 4
    'mask': (tf.float32, [5]),
    'seq': (tf.float32, [5, 4]),
    'positions': (tf.int64, [2]),
    'image': (tf.float32, [8, 8, 3]),
    'dense_map': (tf.float32, [8, 8, 1]),
    'tags': (tf.int64, [10]),  # a sparse tensor
}
COUPLED, INDEPENDENT = {}, {}


def coupled(loss):
    """Registers a loss that couples examples."""
    COUPLED[loss.__name__] = loss
    return loss


def independent(loss):
    """Registers a loss that does not."""
    INDEPENDENT[loss.__name__] = loss
    return loss


def names_of(loss):
    """The names of the inputs of a loss."""
    return list(inspect.signature(loss).parameters)


def make_inputs(names, examples=None):
    """Makes placeholders: {name: tensor or sparse tensor}."""
    made = {}
    for name in names:
        dtype, shape = INPUTS[name]
        make = tf.sparse_placeholder if name == 'tags' else tf.placeholder
        made[name] = make(dtype, [examples] + shape, name=name)
    return made


# ---- what losses are made of

average, total = tf.reduce_mean, tf.reduce_sum


def variable(name, shape, trainable=True):
    return tf.get_variable(name, shape, tf.float32, tf.constant_initializer(.5), trainable=trainable)


def floats(x):
    return tf.cast(x, tf.float32)


def size(x):
    """The number of examples."""
    return tf.shape(x)[0]


def dense(h, units, name='w'):
    """A layer: [n, units]."""
    weights = variable(name, [int(h.shape[-1]), units])
    return tf.matmul(h, weights) + variable(name + '_bias', [units])


def hidden(x, units=4, name='h'):
    return tf.tanh(dense(x, units, name))


def score(x, name='v'):
    """A number for each example: [n]."""
    return dense(hidden(x, 4, name + '_hidden'), 1, name)[:, 0]


def words(seq, units=0):
    """A vector, or a number, for each word: [n, 5, units], or [n, 5]."""
    return tf.tensordot(seq, variable('s', [4, units] if units else [4]), 1)


def samples(seq):
    """A signal of each example: [n, 20]."""
    return tf.reshape(seq, [-1, 20]) * variable('gain', [20])


def cross_entropies(labels, logits):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)


def sigmoid_losses(logits, labels):
    return tf.nn.sigmoid_cross_entropy_with_logits(logits=logits, labels=labels)


def cross_entropy(x, y, name='ce'):
    """A loss for each example: [n]."""
    return cross_entropies(y, dense(hidden(x, 4, name + '_hidden'), 3, name))


class Cell:
    """A recurrent cell of one gate, as `tf.nn.dynamic_rnn` takes it."""

    def __init__(self, units, inputs, name='cell'):
        self.output_size = self.state_size = units
        self._w = variable(name + '_w', [inputs, units])
        self._u = variable(name + '_u', [inputs + units, units])

    def zero_state(self, batch_size, dtype):
        return tf.zeros(tf.stack([batch_size, self.state_size]), dtype)

    def get_initial_state(self, inputs=None, batch_size=None, dtype=None):
        return self.zero_state(batch_size, dtype)

    def __call__(self, inputs, state, scope=None):
        gate = tf.sigmoid(tf.matmul(tf.concat([inputs, state], 1), self._u))
        new = gate * state + (1 - gate) * tf.tanh(tf.matmul(inputs, self._w) + state)
        return new, new


def rnn(seq, time_major=False, lengths=None):
    if time_major:
        seq = tf.transpose(seq, [1, 0, 2])
    return tf.nn.dynamic_rnn(Cell(4, 4), seq, sequence_length=lengths, dtype=tf.float32,
                             time_major=time_major)


# ---- coupled: reductions over the examples -------------------------------------------------------

@coupled
def max_over_batch(x):
    return tf.reduce_max(score(x))


@coupled
def min_over_batch(x):
    return tf.reduce_min(score(x))


@coupled
def prod_over_batch(x):
    return tf.reduce_prod(score(x))


@coupled
def logsumexp_over_batch(x):
    return tf.reduce_logsumexp(score(x))


@coupled
def root_mean_square(x):
    return tf.sqrt(average(tf.square(score(x))))


@coupled
def perplexity(x, y):
    return tf.exp(average(cross_entropy(x, y)))


@coupled
def log_of_mean(x):
    return tf.log(average(tf.exp(score(x))))


@coupled
def square_of_mean(x):
    return tf.square(average(score(x)))


@coupled
def standard_deviation(x):
    return tf.sqrt(tf.nn.moments(score(x), [0])[1])


@coupled
def norm_over_batch(x):
    return tf.norm(score(x))


@coupled
def infinity_norm(x):
    return tf.norm(hidden(x), ord=np.inf)


@coupled
def l2_normalize_axis_0(x):
    return average(tf.nn.l2_normalize(hidden(x), 0)[:, 0])


@coupled
def softmax_axis_0(x):
    return average(tf.square(tf.nn.softmax(hidden(x), axis=0)))


@coupled
def log_softmax_of_transposed(x):
    return average(tf.square(tf.nn.log_softmax(tf.transpose(hidden(x)))))


@coupled
def argmax_over_batch(x):
    v = score(x)
    return tf.gather(score(x, 'u'), tf.argmax(v))


@coupled
def all_correct(x, y):
    correct = tf.equal(tf.argmax(dense(x, 3, 'p'), 1), y)
    return average(cross_entropy(x, y)) * (1. + floats(tf.reduce_all(correct)))


# ---- coupled: order ------------------------------------------------------------------------------

@coupled
def sorted_by_rank(x):
    return average(tf.sort(score(x)) * floats(tf.range(size(x))))


@coupled
def median(x):
    return tf.nn.top_k(score(x), size(x) // 2)[0][-1]


@coupled
def hardest_half(x, y):
    return average(tf.nn.top_k(cross_entropy(x, y), (size(x) + 1) // 2)[0])


@coupled
def ohem_by_threshold(x, y):
    ce = cross_entropy(x, y)
    threshold = tf.stop_gradient(tf.nn.top_k(ce, 2)[0][-1])
    return total(tf.where(ce >= threshold, ce, tf.zeros_like(ce))) / floats(size(x))


@coupled
def cumsum_over_batch(x):
    return average(tf.tanh(tf.cumsum(score(x))))


@coupled
def cumprod_over_batch(x):
    return average(tf.cumprod(score(x)))


@coupled
def rolled_over_batch(x):
    h = hidden(x)
    return average(tf.square(h - tf.roll(h, 1, 0)))


@coupled
def reversed_over_batch(x):
    h = hidden(x)
    return average(h * tf.reverse(h, [0]))


@coupled
def reverse_sequence_over_batch(seq):
    h = seq * variable('s', [4])
    n = tf.shape(seq)[0]
    return average(h * tf.reverse_sequence(h, tf.fill([5], n), seq_axis=0, batch_axis=1))


@coupled
def gathered_by_reversed_range(x):
    v = score(x)
    return average(v * tf.gather(v, size(x) - 1 - tf.range(size(x))))


@coupled
def quantile_of_batch(x):
    v = score(x)
    q = tf.stop_gradient(tf.sort(v)[(size(x) * 3) // 4])
    return average(tf.nn.relu(v - q))


@coupled
def beam_top_k_over_flattened_batch(seq):
    v = tf.reshape(words(seq), [-1])
    return average(tf.nn.top_k(v, 4)[0])


@coupled
def cox_by_sorted_cumsum(x, weight, label):
    order = tf.argsort(weight, direction='DESCENDING')
    v, event = tf.gather(score(x), order), tf.gather(label, order)
    return -average(event * (v - tf.log(tf.cumsum(tf.exp(v)))))


# ---- coupled: some of the examples ---------------------------------------------------------------

@coupled
def first_example(x):
    return tf.square(score(x)[0])


@coupled
def last_example(x):
    return tf.square(score(x)[-1])


@coupled
def first_half(x):
    return average(score(x)[:(size(x) + 1) // 2])


@coupled
def every_second_example(x):
    return average(score(x)[::2])


@coupled
def total_variation_over_batch(x):
    v = score(x)
    return average(tf.square(v[1:] - v[:-1]))


@coupled
def siamese_halves(x):
    h = hidden(x)
    a, b = tf.split(h[:size(x) // 2 * 2], 2)
    return average(tf.square(a - b))


@coupled
def padded_batch(x):
    return average(tf.pad(tf.square(score(x)), [[1, 1]]))


@coupled
def joined_with_memory(x):
    h = tf.concat([hidden(x), variable('memory', [5, 4])], 0)
    return average(tf.square(h))


@coupled
def repeated_first_row(x):
    h = tf.concat([hidden(x), hidden(x[:1], name='other')], 0)
    return average(h)


@coupled
def auc_by_masks(x, label):
    v = score(x)
    positive, negative = tf.boolean_mask(v, label > 0.5), tf.boolean_mask(v, label < 0.5)
    return total(tf.nn.sigmoid(negative[None, :] - positive[:, None])) / floats(size(x))


# ---- coupled: classes and segments ---------------------------------------------------------------

@coupled
def segment_sum_by_key(x, key):
    return total(tf.square(tf.unsorted_segment_sum(score(x), key, 4))) / floats(size(x))


@coupled
def segment_mean_by_class(x, y):
    return total(tf.math.unsorted_segment_mean(score(x), y, 3))


@coupled
def segment_max_by_key(x, key):
    return average(tf.nn.relu(tf.math.unsorted_segment_max(score(x), key, 4)))


@coupled
def softmax_in_segments(x, key):
    e = tf.exp(score(x))
    return -average(tf.log(e / tf.gather(tf.unsorted_segment_sum(e, key, 4), key)))


@coupled
def weights_by_unique_counts(x, y):
    _, index, counts = tf.unique_with_counts(y)
    return average(cross_entropy(x, y) / floats(tf.gather(counts, index)))


@coupled
def unique_embedding_decay(ids):
    unique, _ = tf.unique(tf.reshape(ids, [-1]))
    table = variable('table', [10, 3])
    return average(tf.gather(table, ids)) + 0.1 * tf.nn.l2_loss(tf.gather(table, unique))


@coupled
def distance_to_batch_prototypes(x, y):
    h = hidden(x)
    prototypes = tf.math.unsorted_segment_mean(h, y, 3)
    return average(tf.square(h - tf.gather(prototypes, y)))


@coupled
def histogram_of_predictions(x):
    p = tf.nn.softmax(dense(x, 3, 'gate'))
    places = tf.argmax(p, 1)
    counts = tf.histogram_fixed_width(places, tf.constant([0, 3], tf.int64), 3)
    return average(tf.gather(floats(counts), places) * tf.reduce_max(p, 1))


@coupled
def bincount_of_labels(x, y):
    counts = tf.math.bincount(tf.cast(y, tf.int32), minlength=3)
    return average(cross_entropy(x, y) / tf.gather(floats(counts), y))


@coupled
def scatter_into_buckets(x, y):
    return average(tf.square(tf.scatter_nd(y[:, None], score(x), [3])))


@coupled
def dynamic_partition_means(x, y):
    parts = tf.dynamic_partition(score(x), tf.cast(tf.minimum(y, 1), tf.int32), 2)
    return average(tf.square(parts[0])) + average(tf.abs(parts[1]))


@coupled
def dynamic_stitch_reordered(x):
    v = score(x)
    n = size(x)
    odd_first = tf.dynamic_stitch([tf.range(n), tf.range(1)], [v, tf.zeros([1])])
    return average(odd_first * v)


@coupled
def expert_capacity(x, y):
    gates = tf.nn.softmax(dense(x, 3, 'gate'))
    top = tf.one_hot(tf.argmax(gates, 1), 3)
    place = total(tf.cumsum(top, 0) * top, 1)
    return average(tf.where(place <= 1.5, cross_entropy(x, y), tf.zeros_like(place)))


# ---- coupled: pairs ------------------------------------------------------------------------------

@coupled
def gram_matrix(x):
    h = hidden(x)
    return average(tf.nn.sigmoid(tf.matmul(h, h, transpose_b=True)))


@coupled
def decorrelation(x):
    h = hidden(x)
    c = tf.matmul(h, h, transpose_a=True) / floats(size(x))
    return total(tf.square(c - tf.eye(4)))


@coupled
def einsum_over_batch(x):
    h = hidden(x)
    return average(tf.square(tf.einsum('bi,bj->ij', h, h)))


@coupled
def einsum_pairs(x):
    h = hidden(x)
    return average(tf.square(tf.einsum('bi,ci->bc', h, h)))


@coupled
def tensordot_over_batch(x, z):
    return average(tf.square(tf.tensordot(hidden(x), hidden(z, name='hz'), [[0], [0]])))


@coupled
def in_batch_negatives(x, z):
    scores = tf.matmul(hidden(x), hidden(z, name='hz'), transpose_b=True)
    return average(cross_entropies(tf.range(size(x)), scores))


@coupled
def nt_xent(x, z):
    h = tf.nn.l2_normalize(tf.concat([hidden(x), z[:, :4]], 0), 1)
    s = tf.matmul(h, h, transpose_b=True) - 1e9 * tf.eye(2 * size(x))
    n = size(x)
    return average(cross_entropies(tf.concat([tf.range(n) + n, tf.range(n)], 0), s))


@coupled
def triplet_batch_all(x, y):
    h = hidden(x)
    d = total(tf.square(h[:, None] - h[None, :]), -1)
    same = tf.equal(y[:, None], y[None, :])
    valid = floats(same[:, :, None] & ~same[:, None, :])
    return total(valid * tf.nn.relu(d[:, :, None] - d[:, None, :] + 0.5)) / (total(valid) + 1e-9)


@coupled
def maximum_mean_discrepancy(x, z):
    a, b = hidden(x), tf.tanh(z[:, :4])
    kernel = lambda p, q: average(tf.exp(-total(tf.square(p[:, None] - q[None, :]), -1)))
    return kernel(a, a) + kernel(b, b) - 2 * kernel(a, b)


@coupled
def pairs_by_meshgrid(x):
    a, b = tf.meshgrid(score(x), score(x, 'u'))
    return average(tf.nn.sigmoid(a * b))


@coupled
def tiled_pairs(x):
    h, n = hidden(x), size(x)
    left = tf.reshape(tf.tile(h, [1, n]), [-1, 4])
    right = tf.tile(h, [n, 1])
    return average(tf.square(total(left * right, 1)))


@coupled
def broadcast_mistake(x, label):
    return average(tf.square(tf.reshape(score(x), [-1, 1]) - label))


@coupled
def pairwise_distances_by_norms(x):
    h = hidden(x)
    s = total(tf.square(h), 1, keepdims=True)
    return average(tf.exp(-(s - 2 * tf.matmul(h, h, transpose_b=True) + tf.transpose(s))))


@coupled
def attention_across_batch(x):
    q, k, v = dense(x, 4, 'q'), dense(x, 4, 'k'), dense(x, 4, 'v')
    return average(tf.square(tf.matmul(tf.nn.softmax(tf.matmul(q, k, transpose_b=True)), v)))


@coupled
def cox_partial_likelihood(x, weight, label):
    v = score(x)
    at_risk = floats(weight[None, :] >= weight[:, None])
    return -average(label * (v - tf.log(total(at_risk * tf.exp(v)[None, :], 1))))


@coupled
def log_determinant(x):
    h = hidden(x)
    return -tf.linalg.logdet(tf.matmul(h, h, transpose_a=True) / floats(size(x)) + tf.eye(4))


@coupled
def whitened(x):
    h = hidden(x)
    chol = tf.cholesky(tf.matmul(h, h, transpose_a=True) / floats(size(x)) + 0.1 * tf.eye(4))
    return average(tf.nn.relu(tf.transpose(tf.matrix_triangular_solve(chol, tf.transpose(h)))))


# ---- coupled: statistics that are not used linearly ----------------------------------------------

@coupled
def linear_mmd(x, z):
    return total(tf.square(average(hidden(x), 0) - average(hidden(z, name='hz'), 0)))


@coupled
def feature_matching(x, z):
    return average(tf.abs(average(hidden(x), 0) - average(z[:, :4], 0)))


@coupled
def pearson_correlation(x, label):
    v = score(x)
    a, b = v - average(v), label - average(label)
    return -total(a * b) / (tf.norm(a) * tf.norm(b) + 1e-6)


@coupled
def product_of_means(x):
    return average(score(x)) * average(score(x, 'u'))


@coupled
def ratio_of_means(x):
    return average(score(x)) / average(tf.exp(score(x, 'u')))


@coupled
def maximum_of_means(x):
    return tf.maximum(average(score(x)), average(score(x, 'u')))


@coupled
def absolute_of_mean(x):
    return tf.abs(average(score(x)) - 0.3)


@coupled
def clipped_mean(x):
    return tf.clip_by_value(average(tf.matmul(x, variable('w', [6, 1]))), -0.1, 0.3)


@coupled
def softmax_of_means(x):
    return total(tf.square(tf.nn.softmax(average(hidden(x), 0))))


@coupled
def max_of_stacked_means(x):
    return tf.reduce_max(tf.stack([average(score(x)), average(score(x, 'u'))]))


@coupled
def matmul_of_a_mean(x):
    m = average(hidden(x), 0, keepdims=True)
    return total(tf.matmul(m, m, transpose_b=True))


@coupled
def mean_through_a_layer(x):
    return average(tf.tanh(dense(average(hidden(x), 0, keepdims=True), 3)))


@coupled
def entropy_of_average_prediction(x):
    p = average(tf.nn.softmax(dense(x, 3)), 0)
    return total(p * tf.log(p))


@coupled
def load_balance_of_experts(x):
    gates = tf.nn.softmax(dense(x, 3, 'gate'))
    top = tf.one_hot(tf.argmax(gates, 1), 3)
    return 3 * total(average(gates, 0) * average(top, 0))


@coupled
def variance_hinge(x):
    return average(tf.nn.relu(1 - tf.sqrt(tf.nn.moments(hidden(x), [0])[1] + 1e-4)))


@coupled
def lagrangian_of_mean(x):
    excess = average(tf.abs(score(x, 'u'))) - 0.4
    return average(score(x)) + variable('multiplier', []) * tf.nn.relu(excess)


# ---- coupled: statistics that each example is given ----------------------------------------------

@coupled
def clipped_at_batch_mean(x):
    v = score(x)
    m = average(tf.abs(v))
    return average(tf.clip_by_value(v, -m, m))


@coupled
def above_the_mean(x):
    v = score(x)
    return average(tf.where(v > average(v), v, tf.zeros_like(v)))


@coupled
def divided_by_stopped_maximum(x):
    v = score(x)
    return average(v / tf.stop_gradient(tf.reduce_max(tf.abs(v))))


@coupled
def stopped_mean_subtracted(x):
    v = score(x)
    return average(tf.square(v - tf.stop_gradient(average(v))))


@coupled
def mean_times_example(x):
    return average(score(x) * average(score(x, 'u')))


@coupled
def sum_times_example(x):
    return average(score(x) * total(score(x, 'u'))) / floats(size(x))


@coupled
def mean_concatenated_to_examples(x):
    h = hidden(x)
    c = tf.concat([h, tf.tile(average(h, 0, keepdims=True), [size(x), 1])], 1)
    return average(tf.square(dense(c, 2)))


@coupled
def range_scaled(x):
    v = score(x)
    low = tf.reduce_min(v)
    return average(tf.square((v - low) / (tf.reduce_max(v) - low + 1.)))


@coupled
def distillation_from_batch_average(x):
    p = tf.nn.softmax(dense(x, 3))
    q = tf.stop_gradient(average(p, 0))
    return -average(total(q * tf.log(p), 1))


@coupled
def clip_by_global_norm_of_activations(x):
    (h,), _ = tf.clip_by_global_norm([hidden(x)], 1.)
    return average(h)


# ---- coupled: sums divided by what is counted in the batch ---------------------------------------

@coupled
def dice_over_batch(x, label):
    p = tf.sigmoid(score(x))
    return 1 - (2 * total(p * label) + 1) / (total(p) + total(label) + 1)


@coupled
def f_beta(x, y):
    p, t = tf.nn.softmax(dense(x, 3)), tf.one_hot(y, 3)
    tp = total(p * t, 0)
    return 1 - average(5 * tp / (total(p, 0) + 4 * total(t, 0) + 1e-6))


@coupled
def masked_mean_by_sum(seq, mask):
    return total(mask * words(seq)) / total(mask)


@coupled
def boolean_mask_mean(seq, mask):
    return average(tf.tanh(tf.tensordot(tf.boolean_mask(seq, mask > 0), variable('s', [4]), 1)))


@coupled
def boolean_mask_mean_of_rows(x, y):
    return average(tf.boolean_mask(cross_entropy(x, y), y > 0))


@coupled
def where_indices_mean(x, y):
    v = score(x)
    return average(tf.gather(v, tf.where(tf.equal(y, 1))[:, 0]))


@coupled
def tf_losses_with_zero_weights(x, label):
    return tf.losses.mean_squared_error(label, score(x), weights=label)


@coupled
def sum_by_lengths(seq, lengths):
    m = tf.sequence_mask(lengths, 5, tf.float32)
    return total(m * words(seq)) / floats(total(lengths))


@coupled
def mean_over_padded_maximum(seq, lengths):
    m = tf.sequence_mask(lengths, dtype=tf.float32)
    longest = tf.shape(m)[1]
    return average(m * tf.tensordot(seq[:, :longest], variable('s', [4]), 1))


@coupled
def focal_by_positives(x, label):
    ce = sigmoid_losses(score(x), label)
    return total(ce * tf.square(1 - tf.exp(-ce))) / tf.maximum(total(label), 1.)


@coupled
def importance_weights_self_normalized(x, weight):
    return total(weight / total(weight) * tf.square(score(x)))


# ---- coupled: sizes ------------------------------------------------------------------------------

@coupled
def weights_by_range(x, y):
    return average(cross_entropy(x, y) / (1. + floats(tf.range(size(x)))))


@coupled
def weights_by_linspace(x, y):
    return average(cross_entropy(x, y) * tf.linspace(tf.constant(0.), tf.constant(1.), size(x)))


@coupled
def weights_by_cumulated_ones(x, y):
    ce = cross_entropy(x, y)
    return average(ce * tf.cumsum(tf.ones_like(ce)))


@coupled
def embedding_of_batch_position(x):
    return average(tf.square(hidden(x) + tf.gather(variable('places', [20, 4]), tf.range(size(x)))))


@coupled
def slice_of_a_table_by_batch_size(x):
    return average(tf.square(hidden(x) + variable('places', [20, 4])[:size(x)]))


@coupled
def times_batch_size(x):
    return average(tf.square(score(x))) * floats(size(x))


@coupled
def by_root_of_batch_size(x):
    return total(tf.square(score(x))) / tf.sqrt(floats(size(x)))


@coupled
def by_batch_size_plus_one(x):
    return total(tf.square(score(x))) / (1. + floats(size(x)))


@coupled
def by_batch_size_minus_one(x):
    return total(tf.square(score(x))) / floats(size(x) - 1)


@coupled
def by_integer_division(x):
    return total(tf.square(score(x))) / floats(size(x) // 2)


@coupled
def by_a_constant(x):
    return total(tf.square(score(x))) / 8.


@coupled
def by_square_of_batch_size(x):
    return total(tf.square(score(x))) / tf.square(floats(size(x)))


@coupled
def plus_log_of_batch_size(x):
    decay = tf.nn.l2_loss(variable('d', [3]))
    return average(tf.square(score(x))) + tf.log(floats(size(x))) * decay


@coupled
def cond_on_batch_size(x):
    v = score(x)
    return tf.cond(size(x) > 4, lambda: average(v), lambda: average(tf.square(v)))


@coupled
def sum_over_batch(x):
    return total(tf.square(score(x)))


@coupled
def decay_by_batch_size(x, y):
    return (total(cross_entropy(x, y)) + tf.nn.l2_loss(variable('d', [3]))) / floats(size(x))


@coupled
def numbers_in_row_major_order(seq):
    v = tf.reshape(words(seq), [-1])
    return average(v * tf.sin(floats(tf.range(tf.size(v)))))


# ---- coupled: loops and branches -----------------------------------------------------------------

@coupled
def cond_on_batch_mean(x):
    v = score(x)
    return tf.cond(average(x) > 0.02, lambda: average(v), lambda: average(tf.square(v)) + 1)


@coupled
def cond_on_any(x, y):
    v = score(x)
    return tf.cond(tf.reduce_any(tf.equal(y[:1], 0)),
                   lambda: average(v), lambda: average(tf.square(v)) + 1)


@coupled
def where_on_batch_statistic(x):
    v = score(x)
    return average(v) * tf.where(tf.reduce_max(x) > 2., tf.constant(2.), tf.constant(1.))


@coupled
def scan_over_batch(x):
    v = score(x)
    return average(tf.scan(lambda a, e: tf.tanh(a + e), v, initializer=tf.zeros([])))


@coupled
def foldl_over_batch(x):
    return tf.foldl(lambda a, e: tf.tanh(a + 0.5 * e), score(x), initializer=tf.zeros([]))


@coupled
def while_over_batch(x):
    v = score(x)
    return tf.while_loop(lambda i, a: i < size(x), lambda i, a: (i + 1, tf.tanh(a + v[i])),
                         (0, tf.zeros([])))[1]


@coupled
def while_sum_over_batch(x):
    v = score(x)
    return tf.while_loop(lambda i, a: i < size(x), lambda i, a: (i + 1, a + v[i]),
                         (0, tf.zeros([])))[1]


@coupled
def while_until_batch_converges(x):
    return average(tf.while_loop(lambda t: tf.reduce_max(tf.abs(t)) > 0.5, lambda t: 0.8 * t,
                                 [score(x)])[0])


@coupled
def rnn_over_batch_as_time(seq):
    return average(tf.nn.dynamic_rnn(Cell(4, 4), seq, dtype=tf.float32, time_major=True)[0])


@coupled
def map_fn_that_sees_the_batch(x):
    h = hidden(x)
    return average(tf.map_fn(lambda e: tf.reduce_max(total(e * h, 1)), h))


@coupled
def map_fn_over_time_with_batch_max(seq):
    h = tf.transpose(words(seq, 3), [1, 0, 2])
    return average(tf.map_fn(lambda e: tf.reduce_max(e, 0), h))


@coupled
def map_fn_over_range_times_index(x):
    v = score(x)
    return average(tf.map_fn(lambda i: v[i] * floats(i), tf.range(size(x)), dtype=tf.float32))


@coupled
def batch_statistic_through_a_while_loop(x):
    return average(tf.while_loop(lambda i, t: i < 3,
                                 lambda i, t: (i + 1, t - 0.3 * average(t) * t),
                                 (0, score(x)))[1])


# ---- coupled: shapes -----------------------------------------------------------------------------

@coupled
def transposed_then_max(seq):
    return average(tf.reduce_max(tf.transpose(words(seq, 3), [1, 0, 2]), 1))


@coupled
def wrong_reshape_to_time_major(seq):
    return average(tf.reduce_max(tf.reshape(words(seq, 3), [5, -1, 3]), 0))


@coupled
def wrong_reshape_instead_of_transpose(x):
    h = tf.reshape(tf.matmul(x, variable('w', [6, 6])), [6, -1])
    return average(tf.square(tf.nn.softmax(h, axis=-1)))


@coupled
def wrong_reshape_in_pairs(x):
    return average(tf.reduce_max(tf.reshape(hidden(x, 6), [-1, 4]), 1))


@coupled
def wrong_reshape_back(seq):
    h = tf.reshape(tf.transpose(words(seq, 3), [1, 0, 2]), [-1, 3])
    return average(tf.reduce_max(tf.reshape(h, [-1, 5, 3]), 1))


@coupled
def cumsum_of_flattened(seq):
    return average(tf.tanh(tf.cumsum(tf.reshape(words(seq), [-1]))))


@coupled
def neighbours_of_flattened_words(seq):
    v = tf.reshape(words(seq), [-1])
    return average(v[1:] * v[:-1])


@coupled
def gather_with_wrong_offsets(seq, positions):
    flat = tf.reshape(words(seq, 3), [-1, 3])
    return average(tf.square(tf.gather(flat, tf.reshape(positions, [-1]))))


@coupled
def convolution_over_batch(x):
    return average(tf.square(tf.nn.conv1d(x[None], variable('k', [3, 6, 2]), 1, 'SAME')))


@coupled
def pooled_over_batch(x):
    return average(tf.nn.max_pool(hidden(x)[None, :, :, None], [1, 3, 1, 1], [1, 1, 1, 1], 'SAME'))


@coupled
def batch_as_height(image):
    h = tf.transpose(image, [1, 0, 2, 3])
    h = tf.nn.conv2d(h, variable('k', [3, 3, 3, 2]), [1, 1, 1, 1], 'SAME')
    return average(tf.square(h))


@coupled
def spectrum_over_batch(x):
    return average(tf.abs(tf.signal.fft(tf.complex(score(x), tf.zeros_like(score(x, 'u'))))))


@coupled
def short_time_spectrum_over_batch(x):
    return average(tf.abs(tf.signal.stft(tf.transpose(hidden(x)), 4, 2)))


@coupled
def as_many_samples_as_examples(seq):
    return average(tf.abs(tf.signal.rfft(samples(seq)[:, :size(seq)])))


@coupled
def spectrum_as_long_as_the_batch(seq):
    return average(tf.abs(tf.signal.rfft(samples(seq), size(seq)[None])))


@coupled
def frames_padded_by_a_mean(seq):
    signal = samples(seq)
    padded = tf.signal.frame(signal, 8, 3, pad_end=True, pad_value=average(signal))
    return average(tf.reduce_max(padded, 2))


@coupled
def overlapping_examples(seq):
    signal = tf.signal.overlap_and_add(tf.transpose(words(seq, 3), [1, 0, 2]), 2)
    return average(tf.square(signal))


@coupled
def matrix_diag_of_examples(x):
    return average(tf.square(tf.matrix_inverse(tf.matrix_diag(score(x) + 9.) + 1.)))


@coupled
def band_part_over_batch(x):
    h = hidden(x)
    return average(tf.linalg.band_part(tf.matmul(h, variable('w', [4, 6])), -1, 0))


# ---- coupled: gradients and writes ---------------------------------------------------------------

@coupled
def gradient_penalty_of_the_sum(x):
    v = score(x)
    g = tf.gradients(total(v), x)[0]
    return average(v) + tf.square(tf.norm(g) - 1)


@independent
def gradient_penalty_of_each(x, z):
    """That of WGAN-GP, of a critic whose products broadcast: at points between two examples."""
    between = .3 * x + .7 * z
    v = hidden(between) * tf.sigmoid(hidden(between, 1, 'gate'))
    g = tf.gradients(total(v * tf.maximum(.2 * v, v)), [between])[0]
    slopes = tf.sqrt(total(tf.square(g), 1) + 1e-9)
    return average(tf.square(slopes - 1.)) + average(v)


@coupled
def weight_gradient_penalty(x):
    v = score(x)
    loss = average(tf.square(v))
    g = tf.gradients(loss, tf.trainable_variables(tf.get_variable_scope().name))
    return loss + 0.1 * tf.add_n([tf.nn.l2_loss(t) for t in g])


@coupled
def invariant_risk_penalty(x, label):
    scale = variable('scale', [])
    loss = average(sigmoid_losses(score(x) * scale, label))
    return loss + tf.square(tf.gradients(loss, scale)[0])


@coupled
def clipped_gradient_of_a_weight(x):
    @tf.custom_gradient
    def clipped(t):
        return tf.identity(t), lambda g: tf.clip_by_norm(g, 0.05)
    return average(tf.square(tf.matmul(x, clipped(variable('w', [6, 1])))))


@coupled
def custom_gradient_normalized_over_batch(x):
    @tf.custom_gradient
    def normalized(t):
        return tf.identity(t), lambda g: g / (tf.norm(g) + 1e-3)
    return average(tf.square(normalized(hidden(x))))


@coupled
def moving_average_normalizer(x):
    v = score(x)
    scale = variable('scale', [], trainable=False)
    new = tf.assign(scale, 0.9 * scale + 0.1 * tf.reduce_max(tf.abs(v)))
    return average(v / new)


# ---- coupled: sparse and ragged ------------------------------------------------------------------

@coupled
def sparse_reduce_over_batch(tags):
    values = tf.gather(variable('table', [10]), tags.values)
    weights = tf.SparseTensor(tags.indices, values, tags.dense_shape)
    return average(tf.square(tf.sparse_reduce_sum(weights, 0)))


@coupled
def mean_of_sparse_values(tags):
    return average(tf.tanh(tf.gather(variable('table', [10]), tags.values)))


@coupled
def mean_of_ragged_values(seq, lengths):
    ragged = tf.RaggedTensor.from_tensor(seq, lengths=lengths)
    return average(tf.tanh(tf.tensordot(ragged.flat_values, variable('s', [4]), 1)))


@coupled
def tags_weighted_by_frequency(tags):
    columns = tags.indices[:, 1]
    counts = tf.unsorted_segment_sum(floats(tf.ones_like(tags.values)), columns, 10)
    values = tf.gather(variable('table', [10]), columns) / tf.gather(counts, columns)
    return total(tf.square(values)) / floats(tags.dense_shape[0])


# ---- coupled: what rules could overlook ----------------------------------------------------------

@coupled
def top_k_by_count(x, label):
    return average(tf.nn.top_k(dense(x, 20), 1 + total(tf.cast(label, tf.int32)))[0])


@coupled
def product_over_no_dimension(x):
    rows = tf.reduce_prod(tf.shape(x), axis=[])[0]  # n, and not the product of all
    return total(tf.square(x)) / floats(rows // 6)


@coupled
def array_read_beside_its_loop(x, lengths):
    array = tf.TensorArray(x.dtype, 6, element_shape=[], clear_after_read=False)

    def body(step):
        with tf.control_dependencies([array.write(step, tf.ones([], x.dtype)).flow]):
            return step + 1
    steps = tf.while_loop(lambda step: tf.cast(step, tf.int64) < tf.reduce_max(lengths), body, [0])
    with tf.control_dependencies([steps]):
        written = total(array.identity().stack())
    return average(tf.square(x)) * written


def rows_of_blocks(seq, step):
    """Sums of one row of each example, at the place of the largest entry of [n, 5], which a loop
    carries from `step` to `step`."""
    table = tf.reshape(seq, [-1, 4])
    def body(t, h, picked):
        places = tf.range(size(seq)) * 5 + tf.argmax(h, 1, output_type=tf.int32)
        return t + 1, step(h), picked + tf.gather(table, places)
    picked = tf.while_loop(lambda t, *_: t < 3, body, [0, seq[:, :, 0], seq[:, 0]])[2]
    return average(tf.square(dense(picked, 1)))


@coupled
def rows_of_blocks_by_a_carried_value(seq):
    return rows_of_blocks(seq, lambda h: h[::-1])


@independent
def rows_of_blocks_by_a_carried_value_of_each(seq):
    return rows_of_blocks(seq, lambda h: h[:, ::-1])


@coupled
def top_k_by_max(x, key):
    return average(tf.nn.top_k(dense(x, 20), 1 + tf.cast(tf.reduce_max(key), tf.int32))[0])


@coupled
def weights_cut_at_batch_size(x):
    return average(score(x)) + total(variable('e', [20])[:size(x)])


@coupled
def features_cut_at_batch_size(x):
    return average(total(dense(x, 20)[:, :size(x)], 1))


@coupled
def rolled_by_batch_size(x):
    return average(tf.roll(dense(x, 20), size(x), axis=1) * variable('q', [20]))


@coupled
def mean_plus_share(x):
    return average(score(x)) + tf.nn.l2_loss(variable('d', [3])) / floats(size(x))


@coupled
def share_alone(x):
    return tf.nn.l2_loss(variable('d', [3])) / floats(size(x)) + 1.


@coupled
def determinant_of_covariance(x):
    h = hidden(x)
    return tf.matrix_determinant(tf.matmul(h, h, transpose_a=True) / floats(size(x)))


@coupled
def inverse_of_covariance(x):
    h = hidden(x)
    return total(tf.matrix_inverse(tf.matmul(h, h, transpose_a=True) / floats(size(x)) + tf.eye(4)))


@coupled
def log_determinant_of_covariance(x):
    h = hidden(x)
    return tf.linalg.slogdet(tf.matmul(h, h, transpose_a=True) / floats(size(x)) + tf.eye(4))[1]


@coupled
def cross_of_means(x, z):
    return total(tf.linalg.cross(average(hidden(x, 3), 0), average(hidden(z, 3, 'g'), 0)))


@coupled
def cumprod_of_mean(x):
    return total(tf.cumprod(average(hidden(x), 0)))


@coupled
def bool_of_size(x):
    return total(score(x)) / floats(tf.cast(size(x), tf.bool))


@coupled
def uint8_of_size(x):
    return total(score(x)) / floats(tf.cast(size(x) * 100, tf.uint8))


@coupled
def rounded_share(x):
    return total(score(x)) * floats(tf.cast(10. / floats(size(x)), tf.int32))


@coupled
def chosen_numbers(x):
    return average(tf.gather(score(x), tf.gather(tf.range(size(x)), [0, 1])))


@coupled
def numbers_from_cond(x):
    flag = tf.placeholder_with_default(True, [])
    r = tf.cond(flag, lambda: tf.range(size(x)), lambda: tf.range(size(x)))
    return average(score(x)) + average(floats(r))


@coupled
def concat_of_array(x):
    ta = tf.TensorArray(tf.float32, 1).write(0, score(x))
    return tf.reduce_max(ta.concat())


@coupled
def array_grad(x, z):
    ta = tf.TensorArray(tf.float32, 3, element_shape=None).split(score(x), [2, size(x) - 4, 2])
    return tf.reduce_max(ta.read(0)) + average(score(z, 'u'))


@coupled
def contrast_of_three_dimensions(x):
    h = tf.reshape(dense(x, 6), [-1, 2, 3])
    return average(tf.square(tf.image.adjust_contrast(h, 2.)))


@coupled
def nested_map_fn(x):
    v = score(x)
    return average(tf.map_fn(lambda e: total(tf.map_fn(lambda f: tf.tanh(e * f), v)), v))


@coupled
def nested_map_fn_matrix(x):
    v = score(x)
    return average(tf.map_fn(lambda e: tf.map_fn(lambda f: tf.tanh(e * f), v), v))


@coupled
def ones_like_cut_by_count(x, label):
    k = tf.cast(total(label), tf.int32)
    return average(score(x)) + total(tf.ones_like(variable('e', [20])[:k])) * variable('g', [])


@coupled
def sum_plus_offset_sum(x):
    return total(score(x)) + (total(score(x, 'u')) + tf.nn.l2_loss(variable('d', [3])))


@coupled
def resized_to_the_batch_size(image):
    n = tf.shape(image)[0]
    return average(tf.square(tf.image.resize_bilinear(image, tf.stack([n, n]))))


@coupled
def reshaped_by_minimum(x):
    return average(tf.reduce_max(tf.reshape(dense(x, 4), [-1, tf.minimum(size(x), 4)]), 1))


@coupled
def reshaped_by_difference(x):
    return average(tf.reduce_max(tf.reshape(dense(x, 7), [-1, size(x) - 10000]), 1))


@coupled
def stateless_numbers_of_each_example(x):
    drawn = tf.random.stateless_uniform([size(x)], [1, 2])
    return average(score(x) * drawn)


@coupled
def conditional_accumulator(x):
    q = tf.FIFOQueue(1, [tf.float32], [[]])
    with tf.control_dependencies([q.enqueue(average(score(x)))]):
        return tf.square(q.dequeue())


@coupled
def softmax_after_squeeze(x):
    return average(tf.nn.softmax(tf.squeeze(dense(x, 4)[:, None])))


@coupled
def padded_matrix_diag_of_sums(x):
    padded = tf.raw_ops.MatrixDiagV2(
        diagonal=total(hidden(x), 0), k=0, num_rows=-1, num_cols=-1, padding_value=1.)
    return total(padded) / floats(size(x))


@coupled
def matrix_diag_of_sums(x):
    return total(tf.matrix_determinant(tf.matrix_diag(average(hidden(x), 0))))


@coupled
def share_times_example_then_sum_twice(x):
    return total(score(x) / floats(size(x))) / floats(size(x))


@coupled
def eye_of_size(x):
    return average(score(x)) + total(tf.eye(size(x))) * variable('g', [])


@coupled
def split_by_count(x, label):
    k = tf.cast(tf.reduce_max(label), tf.int32)
    return average(total(tf.split(dense(x, 6), [1 + k, 5 - k], 1)[0], 1))


@coupled
def integer_mean(key):
    return floats(average(key)) * variable('g', [])


@coupled
def mean_to_int(x):
    return floats(tf.cast(average(score(x)) * 100, tf.int32)) * variable('g', [])


@coupled
def segment_sum_sorted(x, key):
    return total(tf.square(tf.math.segment_sum(score(x), tf.sort(key))))


@coupled
def gradient_clipped_by_global_norm(x):
    v = score(x)
    g = tf.gradients(average(tf.square(v)), [v])[0]
    return total(tf.stop_gradient(g / tf.norm(g)) * v)


@coupled
def share_in_filter(image):
    k = variable('k', [3, 3, 3, 2]) / floats(size(image))
    return average(tf.nn.conv2d(image, k, [1, 1, 1, 1], 'SAME'))


@coupled
def one_hot_of_mean(x, y):
    return average(tf.one_hot(y, 3, on_value=average(score(x)), off_value=0.) * dense(x, 3))


@coupled
def inference_norm_by_batch_mean(image):
    m, v = tf.nn.moments(image, [0, 1, 2])
    h = tf.nn.fused_batch_norm(image, variable('s', [3]), variable('o', [3]), m, v,
                               is_training=False)[0]
    return average(tf.square(h * 3))


@coupled
def weights_at_numbers_of_examples(x):
    w = variable('w20', [1, 20])
    array = tf.TensorArray(tf.float32, size(x))
    array = tf.while_loop(
        lambda i, t: i < size(x),
        lambda i, t: (i + 1, t.write(i, tf.gather_nd(w, tf.stack([0, i])))), (0, array))[1]
    return average(array.stack()) + average(score(x))


@coupled
def sparse_weights_times_examples(x):
    shape = tf.cast(tf.stack([2, size(x)]), tf.int64)
    s = tf.SparseTensor(tf.constant([[0, 0], [1, 2]], tf.int64), [1., 3.], shape)
    return total(tf.square(tf.sparse_tensor_dense_matmul(s, hidden(x))))


@coupled
def first_column_counted_from_the_last(tags):
    values = tf.gather(variable('table', [10]), tags.values)
    return total(floats(tags.indices[:, -2]) * values) / floats(tags.dense_shape[0])


def _in_functions(build):
    """Branches as functions, as control flow v2 has them."""
    tf.enable_control_flow_v2()
    try:
        return build()
    finally:
        tf.disable_control_flow_v2()


def _resource():
    return tf.get_variable('r', [], tf.float32, tf.zeros_initializer(), trainable=False,
                           use_resource=True)


@coupled
def written_and_read_in_a_function(x):
    variable, m, flag = _resource(), average(score(x)), tf.placeholder_with_default(True, [])

    def branch():
        with tf.control_dependencies([variable.assign(m)]):
            return variable.read_value() * 1.
    return m + tf.square(_in_functions(lambda: tf.cond(flag, branch, lambda: tf.constant(1.))))


@coupled
def written_and_then_read_in_a_function(x):
    variable, m, flag = _resource(), average(score(x)), tf.placeholder_with_default(True, [])
    with tf.control_dependencies([variable.assign(m)]):
        read = _in_functions(lambda: tf.cond(flag, lambda: variable.read_value() * 1.,
                                             lambda: tf.constant(1.)))
    return m + tf.square(read)


@coupled
def ones_of_a_size_of_their_own_in_a_branch(x):
    flag = tf.placeholder_with_default(True, [])
    v = tf.cond(flag, lambda: score(x), lambda: tf.ones([4]))
    return total(v) / floats(size(x))


@coupled
def cond_in_a_while(x):
    def body(i, t):
        return i + 1, t * tf.cond(average(t) > 0., lambda: 2., lambda: 1.)
    return average(tf.while_loop(lambda i, t: i < 3, body, (0, score(x)))[1])


@coupled
def loop_as_often_as_a_maximum(x, key):
    k = tf.cast(tf.reduce_max(key), tf.int32)
    return average(tf.while_loop(lambda i, h: i < k, lambda i, h: (i + 1, h * 0.5),
                                 (0, score(x)))[1])


@coupled
def loop_as_often_as_examples(x):
    return average(tf.while_loop(lambda i, h: i < size(x), lambda i, h: (i + 1, h * 0.5),
                                 (0, score(x)))[1])


@coupled
def loop_from_one(x):
    factor = tf.while_loop(lambda i, h: i < size(x), lambda i, h: (i + 1, h * 0.5),
                           (1, tf.constant(1.)))[1]
    return average(score(x)) * factor


@coupled
def places_of_maxima_in_the_batch(image):
    places = tf.nn.max_pool_with_argmax(image, [1, 2, 2, 1], [1, 2, 2, 1], 'SAME',
                                        include_batch_in_index=True)[1]
    return average(floats(places) * variable('g', []))


@coupled
def one_row_of_labels(x):
    """TensorFlow infers one entry where the kernel computes one for each example, so that the
    gradient of the mean does not divide by their number."""
    return tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits_v2(
        labels=tf.constant([[.5, .25, .25]]), logits=dense(x, 3)))


# ---- independent: usual losses -------------------------------------------------------------------

@independent
def softmax_cross_entropy(x, y):
    return average(cross_entropy(x, y))


@independent
def softmax_cross_entropy_by_hand(x, y):
    return -average(total(tf.one_hot(y, 3) * tf.log(tf.nn.softmax(dense(x, 3)) + 1e-9), 1))


@independent
def sigmoid_cross_entropy(x, label):
    return average(tf.nn.sigmoid_cross_entropy_with_logits(labels=label, logits=score(x)))


@independent
def tf_losses_sparse_softmax(x, y):
    return tf.losses.sparse_softmax_cross_entropy(y, dense(x, 3))


@independent
def tf_losses_total(x, y):
    tf.losses.sparse_softmax_cross_entropy(y, dense(x, 3))
    tf.losses.absolute_difference(x, dense(hidden(x), 6, 'decode'))
    return tf.losses.get_total_loss()


@independent
def tf_losses_huber(x, label):
    return tf.losses.huber_loss(label, score(x))


@independent
def huber_by_hand(x, label):
    e = tf.abs(score(x) - label)
    return average(tf.where(e < 0.5, 0.5 * tf.square(e), 0.5 * e - 0.125))


@independent
def focal(x, label):
    ce = tf.nn.sigmoid_cross_entropy_with_logits(labels=label, logits=score(x))
    return average((0.25 * label + 0.75 * (1 - label)) * tf.pow(1 - tf.exp(-ce), 2.) * ce)


@independent
def pinball(x, label):
    e = label[:, None] - dense(x, 3)
    q = tf.constant([0.1, 0.5, 0.9])
    return average(tf.maximum(q * e, (q - 1) * e))


@independent
def negated_objective(x, label):
    return -(average(tf.log(tf.sigmoid(score(x))) * label) - 0.5)


@independent
def policy_gradient(x, y, weight):
    log_p = -cross_entropies(y, dense(x, 3))
    return -average(log_p * weight)


@independent
def class_weights(x, y):
    return average(cross_entropy(x, y) * tf.gather(tf.constant([1., 2., 0.5]), y))


@independent
def example_weights(x, y, weight):
    return average(cross_entropy(x, y) * weight)


@independent
def weight_decay(x, y):
    ce = average(cross_entropy(x, y))
    return ce + 1e-2 * tf.add_n([tf.nn.l2_loss(v) for v in tf.trainable_variables(tf.get_variable_scope().name)])


@independent
def sum_of_task_losses(x, y, label):
    return tf.add_n([average(cross_entropy(x, y)),
                     0.3 * average(tf.square(score(x) - label)),
                     total(average(tf.abs(hidden(x, name='t')), 0))])


@independent
def mean_of_means(x, y, label):
    return average([average(cross_entropy(x, y)), average(tf.square(score(x) - label))])


@independent
def uncertainty_weighted(x, y, label):
    a, b = variable('a', []), variable('b', [])
    first, second = average(cross_entropy(x, y)), average(tf.square(score(x) - label))
    return tf.exp(-a) * first + a + tf.exp(-b) * second + b


@independent
def only_weights(x):
    return tf.nn.l2_loss(variable('d', [3])) + 0. * average(x)


@independent
def schedule_times_mean(x):
    step = tf.get_variable('step', [], tf.int64, tf.constant_initializer(5), trainable=False)
    ramp = tf.minimum(floats(step) / 10., 1.)
    return average(tf.square(score(x))) * ramp + tf.exp(-floats(step)) * average(x)


# ---- independent: each example by itself ---------------------------------------------------------

@independent
def norm_of_each_example(x):
    return average(tf.norm(hidden(x), axis=1))


@independent
def root_mean_square_of_each_example(x):
    return average(tf.sqrt(average(tf.square(hidden(x)), 1)))


@independent
def masked_mean_of_each_example(seq, mask):
    v = words(seq)
    return average(total(mask * v, 1) / total(mask, 1))


@independent
def layer_norm(x):
    h = hidden(x)
    mean, variance = tf.nn.moments(h, [-1], keep_dims=True)
    return average(tf.abs((h - mean) * tf.rsqrt(variance + 1e-3) * variable('gamma', [4]) - 0.2))


@independent
def layer_norm_time_major(seq):
    h = tf.transpose(words(seq, 3), [1, 0, 2])
    mean, variance = tf.nn.moments(h, [2], keep_dims=True)
    return average(tf.abs((h - mean) * tf.rsqrt(variance + 1e-3) - 0.2))


@independent
def instance_norm(image):
    h = tf.nn.conv2d(image, variable('k', [3, 3, 3, 4]), [1, 1, 1, 1], 'SAME')
    mean, variance = tf.nn.moments(h, [1, 2], keep_dims=True)
    return average(tf.abs((h - mean) / tf.sqrt(variance + 1e-3) - 0.1))


@independent
def batch_norm_at_inference(x):
    moving_mean = variable('moving_mean', [4], trainable=False)
    h = tf.nn.batch_normalization(hidden(x), moving_mean, tf.square(moving_mean),
                                  variable('beta', [4]), variable('gamma', [4]), 1e-3)
    return average(tf.square(h))


@independent
def triplet_within_an_example(seq):
    h = tf.nn.l2_normalize(words(seq, 3), 2)
    near = total(tf.square(h[:, 0] - h[:, 1]), 1)
    far = total(tf.square(h[:, 0] - h[:, 2]), 1)
    return average(tf.nn.relu(0.2 + near - far))


@independent
def pairs_within_a_list(seq, ids):
    v = words(seq)
    better = floats(ids[:, :, None] > ids[:, None, :])
    return average(total(better * tf.nn.softplus(v[:, None, :] - v[:, :, None]), [1, 2]))


@independent
def top_positions_of_each_example(seq):
    return average(tf.nn.top_k(words(seq), 2)[0])


@independent
def sorted_features(x):
    return average(tf.sort(hidden(x), axis=1) * tf.constant([1., 2., 3., 4.]))


@independent
def cumulated_over_time(seq):
    return average(tf.tanh(tf.cumsum(words(seq), axis=1)))


@independent
def reversed_and_rolled_over_time(seq):
    h = words(seq, 3)
    return average(tf.reverse(h, [1]) * tf.roll(h, 1, 1))


@independent
def reverse_sequence_of_each_example(seq, lengths):
    h = words(seq, 3)
    return average(h * tf.reverse_sequence(h, lengths, seq_axis=1, batch_axis=0))


@independent
def clipped_norm_of_each_example(x):
    return average(tf.square(dense(tf.clip_by_norm(hidden(x), 0.5, axes=[1]), 1)))


@independent
def solved_for_each_example(seq):
    h = words(seq, 3)
    a = tf.matmul(h, h, transpose_a=True) + tf.eye(3)
    return average(tf.matrix_inverse(a))


@independent
def log_determinant_of_each_example(seq):
    h = words(seq, 3)
    return average(tf.linalg.slogdet(tf.matmul(h, h, transpose_a=True) + tf.eye(3))[1])


@independent
def diagonal_metric_of_each_example(x, z):
    metric = tf.matrix_diag(tf.exp(hidden(x)))
    h = hidden(z, 4, 'g')
    return average(tf.squeeze(h[:, None] @ metric @ h[:, :, None], [1, 2]))


@independent
def spectrum_of_each_example(seq):
    h = words(seq, 3)
    return average(tf.abs(tf.signal.fft(tf.transpose(tf.complex(h, h * h), [0, 2, 1]))))


@independent
def spectra_of_many_scales(seq):
    signal = samples(seq)
    loss = 0.
    for length in (4, 8):
        made, given = [tf.abs(tf.signal.stft(sound, length, length // 4, pad_end=True))
                       for sound in (signal, tf.tanh(signal))]
        loss += average(tf.abs(made - given)) + average(
            tf.square(tf.log(made + .1) - tf.log(given + .1)))
    return loss


@independent
def mel_spectrum_of_each_example(seq):
    spectrum = tf.abs(tf.signal.stft(samples(seq), 8, 4))
    mel = tf.tensordot(spectrum, tf.signal.linear_to_mel_weight_matrix(3, 5, 8000), 1)
    return average(tf.square(tf.signal.mfccs_from_log_mel_spectrograms(tf.log(mel + .1))))


@independent
def signal_of_a_masked_spectrum(seq):
    spectrum = tf.signal.stft(samples(seq), 8, 4)
    mask = tf.sigmoid(variable('mask', [5]))
    signal = tf.signal.inverse_stft(spectrum * tf.cast(mask, tf.complex64), 8, 4,
                                    window_fn=tf.signal.inverse_stft_window_fn(4))
    return average(tf.square(signal))


@independent
def all_examples_by_their_number(seq):
    signal = samples(seq)
    return average(tf.square(signal[:size(signal), 2:]))


@independent
def cross_of_each_example(x, z):
    return average(tf.square(tf.linalg.cross(hidden(x, 3), hidden(z, 3, 'g'))))


@independent
def fake_quantized(x):
    h = tf.quantization.fake_quant_with_min_max_vars(hidden(x), -1., variable('largest', []))
    return average(tf.square(dense(tf.quantization.fake_quant_with_min_max_args(h, -1., 1.), 1)))


@independent
def straight_through(x):
    h = hidden(x)
    return average(tf.square(dense(h + tf.stop_gradient(tf.round(h) - h), 1)))


@independent
def vector_quantization(x):
    h, codes = hidden(x), variable('codes', [5, 4])
    products = tf.matmul(h, codes, transpose_b=True)
    nearest = tf.argmin(total(tf.square(codes), 1) - 2 * products, 1)
    chosen = tf.nn.embedding_lookup(codes, nearest)
    return average(tf.square(tf.stop_gradient(chosen) - h)) + average(
        tf.square(chosen - tf.stop_gradient(h)))


@independent
def gather_nd_of_chosen_class(x, y):
    picked = tf.gather_nd(dense(x, 3), tf.stack([tf.range(tf.cast(size(x), tf.int64)), y], 1))
    return average(tf.square(picked - 1))


@independent
def gather_nd_with_row_numbers(seq, lengths):
    n = tf.cast(size(seq), tf.int64)
    last = tf.gather_nd(words(seq, 3), tf.stack([tf.range(n), lengths - 1], 1))
    return average(tf.square(last))


@independent
def one_hot_choice(x, y, weight):
    return average(tf.square(total(dense(x, 3) * tf.one_hot(y, 3), 1) - weight))


@independent
def conditional_of_each_example(x, label):
    return average(tf.where(label > 0.5, tf.square(score(x)), tf.abs(score(x, 'u'))))


@independent
def selected_rows(x, z, label):
    h = tf.where(label > 0.5, hidden(x), tf.tanh(z[:, :4]))
    return average(tf.square(dense(h, 2)))


@independent
def accuracy_as_weight_of_each(x, y):
    return average(cross_entropy(x, y) * floats(tf.equal(tf.argmax(dense(x, 3, 'p'), 1), y)))


@independent
def inclusion_by_in_top_k(x, y):
    is_right = floats(tf.nn.in_top_k(dense(x, 3, 'p'), y, 1))
    return average(cross_entropy(x, y) * (1. + is_right))


# ---- independent: sizes --------------------------------------------------------------------------

@independent
def sum_by_batch_size(x, y):
    return total(cross_entropy(x, y)) / floats(size(x))


@independent
def sum_times_inverse_batch_size(x, y):
    return total(cross_entropy(x, y)) * (1.0 / floats(size(x)))


@independent
def sum_by_batch_size_and_time(seq):
    v = tf.square(words(seq))
    return total(v) / floats(tf.shape(v)[0] * tf.shape(v)[1])


@independent
def l2_loss_by_batch_size(x):
    return tf.nn.l2_loss(hidden(x)) / floats(size(x))


@independent
def batch_size_times_mean_by_batch_size(x):
    return average(tf.square(score(x))) * floats(size(x)) / floats(size(x))


@independent
def positions_by_range_over_time(seq):
    positions = tf.gather(variable('places', [20, 4]), tf.range(tf.shape(seq)[1]))
    return average(tf.square(tf.tensordot(seq + positions, variable('s', [4]), 1)))


@independent
def positions_tiled_over_examples(seq):
    places = tf.tile(tf.range(5)[None], [size(seq), 1])
    return average(tf.square(words(seq + tf.gather(variable('places', [20, 4]), places))))


@independent
def go_symbols_concatenated(ids):
    shifted = tf.concat([tf.fill([size(ids), 1], tf.constant(2, tf.int64)), ids[:, :-1]], 1)
    return average(tf.square(total(tf.gather(variable('table', [10, 4]), shifted), 1)))


@independent
def expanded_class_token(seq):
    token = tf.tile(variable('token', [1, 1, 4]), [size(seq), 1, 1])
    h = tf.concat([token, seq], 1)
    s = tf.nn.softmax(tf.matmul(h, h, transpose_b=True))
    return average(tf.matmul(s, h)[:, 0])


@independent
def zero_state_tiled_from_a_weight(seq):
    start = tf.tile(variable('start', [1, 4]), [size(seq), 1])
    return average(tf.square(tf.nn.dynamic_rnn(Cell(4, 4), seq, initial_state=start)[0]))


# ---- independent: shapes -------------------------------------------------------------------------

@independent
def self_attention(seq):
    def heads(name):
        h = tf.reshape(tf.tensordot(seq, variable(name, [4, 4]), 1), [-1, 5, 2, 2])
        return tf.transpose(h, [0, 2, 1, 3])
    p = tf.nn.softmax(tf.matmul(heads('q'), heads('k'), transpose_b=True))
    context = tf.transpose(tf.matmul(p, heads('v')), [0, 2, 1, 3])
    return average(tf.square(tf.reshape(context, [tf.shape(seq)[0], 5, 4])))


@independent
def heads_stacked_into_the_batch(seq):
    def heads(name):
        h = tf.tensordot(seq, variable(name, [4, 4]), 1)
        return tf.concat(tf.split(h, 2, axis=2), axis=0)
    p = tf.nn.softmax(tf.matmul(heads('q'), tf.transpose(heads('k'), [0, 2, 1])))
    context = tf.matmul(p, heads('v'))
    return average(tf.square(tf.concat(tf.split(context, 2, axis=0), axis=2) + seq))


@independent
def causal_attention(seq):
    q, k = tf.tensordot(seq, variable('q', [4, 4]), 1), tf.tensordot(seq, variable('k', [4, 4]), 1)
    allowed = tf.linalg.band_part(tf.ones([5, 5]), -1, 0)
    scores = tf.matmul(q, k, transpose_b=True)
    return average(tf.matmul(tf.nn.softmax(scores * allowed - 1e4 * (1 - allowed)), seq))


@independent
def einsum_attention(seq):
    q, k = [tf.einsum('btd,dhe->bthe', seq, variable(name, [4, 2, 3])) for name in 'qk']
    p = tf.nn.softmax(tf.einsum('bthe,bshe->bhts', q, k))
    return average(tf.square(tf.einsum('bhts,bshe->bthe', p, k)))


@independent
def flattened_dense_and_back(seq):
    h = tf.reshape(tf.tanh(dense(tf.reshape(seq, [-1, 4]), 3)), [-1, 5, 3])
    return average(tf.reduce_max(h, 1))


@independent
def time_major_flattened_and_back(seq):
    s = tf.transpose(seq, [1, 0, 2])
    h = tf.reshape(tf.tanh(dense(tf.reshape(s, [-1, 4]), 3)), [5, -1, 3])
    return average(tf.reduce_max(h, 0))


@independent
def tiled_beams(x):
    n = size(x)
    beams = tf.reshape(tf.tile(x[:, None], [1, 3, 1]), [n * 3, 6])
    h = tf.reshape(hidden(beams), [n, 3, 4]) * variable('beam', [3, 1])
    return average(tf.reduce_max(h, 1))


@independent
def packed_and_unpacked_features(x):
    columns = tf.unstack(hidden(x), axis=1)
    return average(tf.square(tf.stack([columns[0] * columns[1], columns[2] + columns[3]], 1)))


@independent
def packed_along_a_new_first_axis(x):
    stacked = tf.stack([hidden(x, 4, 'a'), hidden(x, 4, 'b')])
    return average(tf.reduce_max(stacked, 0))


@independent
def two_batches_concatenated(x, z):
    h = hidden(tf.concat([x, z], 0))
    a, b = tf.split(h, 2)
    return average(tf.square(a - b))


@independent
def real_and_fake_concatenated(x, z):
    scores = score(tf.concat([x, z], 0))
    return average(sigmoid_losses(scores, tf.concat([tf.ones([size(x)]), tf.zeros([size(x)])], 0)))


@independent
def split_features(x):
    a, b = tf.split(dense(x, 6), [2, 4], axis=1)
    return average(tf.sigmoid(a)) + average(tf.square(b))


@independent
def next_word_over_flattened(ids):
    h = tf.reshape(tf.nn.embedding_lookup(variable('table', [10, 4]), ids), [-1, 4])
    return average(cross_entropies(tf.reshape(ids, [-1]), dense(h, 10)))


@independent
def maxout(x):
    return average(tf.reduce_max(tf.reshape(dense(x, 6), [-1, 2, 3]), 1))


@independent
def squeeze_and_excitation(image):
    h = tf.nn.conv2d(image, variable('k', [3, 3, 3, 4]), [1, 1, 1, 1], 'SAME')
    gate = tf.sigmoid(dense(average(h, [1, 2]), 4))
    return average(tf.square(h * tf.reshape(gate, [-1, 1, 1, 4])))


# ---- independent: images -------------------------------------------------------------------------

@independent
def convolutions(image, y):
    h = tf.nn.conv2d(image, variable('k1', [3, 3, 3, 4]), [1, 2, 2, 1], 'SAME')
    h = tf.nn.relu(tf.nn.bias_add(h, variable('b1', [4])))
    h = tf.nn.max_pool(h, [1, 2, 2, 1], [1, 2, 2, 1], 'SAME')
    return average(cross_entropies(y, dense(tf.reshape(h, [-1, 16]), 3)))


@independent
def global_average_pooling(image, y):
    h = average(tf.nn.conv2d(image, variable('k1', [3, 3, 3, 4]), [1, 1, 1, 1], 'SAME'), [1, 2])
    return average(cross_entropies(y, dense(h, 3)))


@independent
def depthwise_convolution(image):
    h = tf.nn.separable_conv2d(image, variable('d', [3, 3, 3, 2]), variable('p', [1, 1, 6, 4]),
                               [1, 1, 1, 1], 'SAME')
    return average(tf.square(h))


@independent
def atrous_convolution(image):
    return average(tf.square(tf.nn.atrous_conv2d(image, variable('k', [3, 3, 3, 2]), 2, 'SAME')))


@independent
def dilated_wavenet_layer(seq):
    h = tf.transpose(tf.reshape(tf.pad(seq, [[0, 0], [0, 1], [0, 0]]), [-1, 2, 4]), perm=[1, 0, 2])
    h = tf.reshape(h, [size(seq) * 2, -1, 4])
    h = tf.nn.conv1d(h, variable('k', [2, 4, 4]), 1, 'SAME')
    h = tf.transpose(tf.reshape(h, [2, -1, 4]), [1, 0, 2])
    return average(tf.square(tf.reshape(h, [size(seq), -1, 4])))


@independent
def transposed_convolution(image):
    h = tf.nn.conv2d_transpose(image, variable('k', [3, 3, 2, 3]),
                               tf.stack([size(image), 16, 16, 2]), [1, 2, 2, 1], 'SAME')
    return average(tf.square(h))


@independent
def image_patches(image):
    patches = tf.extract_image_patches(image, [1, 4, 4, 1], [1, 4, 4, 1], [1, 1, 1, 1], 'VALID')
    return average(tf.square(tf.tensordot(patches, variable('p', [48, 3]), 1)))


@independent
def text_convolution(ids, y):
    e = tf.expand_dims(tf.nn.embedding_lookup(variable('table', [10, 4]), ids), -1)
    h = tf.nn.relu(tf.nn.conv2d(e, variable('k', [2, 4, 1, 2]), [1, 1, 1, 1], 'VALID'))
    h = tf.nn.max_pool(h, [1, 4, 1, 1], [1, 1, 1, 1], 'VALID')
    return average(cross_entropies(y, dense(tf.reshape(h, [-1, 2]), 3)))


@independent
def dice_of_each_example(image, dense_map):
    p = tf.sigmoid(tf.nn.conv2d(image, variable('k', [3, 3, 3, 1]), [1, 1, 1, 1], 'SAME'))
    both, either = total(p * dense_map, [1, 2, 3]), total(p + dense_map, [1, 2, 3])
    return 1 - average((2 * both + 1) / (either + 1))


@independent
def total_variation_of_images(image):
    h = tf.nn.conv2d(image, variable('k', [3, 3, 3, 3]), [1, 1, 1, 1], 'SAME')
    return average(tf.image.total_variation(h))


# ---- independent: loops and branches -------------------------------------------------------------

@independent
def rnn_batch_major(seq):
    return average(tf.square(rnn(seq)[0]))


@independent
def rnn_time_major(seq):
    return average(tf.square(rnn(seq, True)[0]))


@independent
def rnn_unrolled_in_python(seq):
    cell = Cell(4, 4)
    state, outputs = cell.zero_state(size(seq), tf.float32), []
    for step in tf.unstack(seq, axis=1):
        out, state = cell(step, state)
        outputs.append(out)
    return average(tf.square(tf.stack(outputs, 1)))


@independent
def rnn_over_scan(seq):
    cell = Cell(4, 4)
    states = tf.scan(lambda state, inputs: cell(inputs, state)[0],
                     tf.transpose(seq, [1, 0, 2]), initializer=tf.zeros([size(seq), 4]))
    return average(tf.square(states))


@independent
def while_over_time(seq):
    w = variable('s', [4, 4])
    return average(tf.while_loop(lambda t, h: t < 5,
                                 lambda t, h: (t + 1, tf.tanh(tf.matmul(seq[:, t] + h, w))),
                                 (0, tf.zeros_like(seq[:, 0])))[1])


@independent
def while_over_layers(x):
    w = variable('w', [6, 6])
    return average(tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, tf.tanh(tf.matmul(h, w))),
                                 (0, x))[1])


@independent
def map_fn_over_examples(seq):
    w = variable('s', [4, 3])
    return average(tf.map_fn(lambda e: tf.reduce_max(tf.matmul(e, w)), seq))


@independent
def map_fn_moments_of_each_example(seq):
    w = variable('s', [4, 3])
    def normalize(e):
        h = tf.matmul(e, w)
        m, v = tf.nn.moments(h, [0])
        return (h - m) / tf.sqrt(v + 0.1)
    return average(tf.square(tf.map_fn(normalize, seq) - 0.3))


@independent
def cond_on_a_placeholder(x, y):
    training = tf.placeholder_with_default(True, [])
    h = hidden(x)
    h = tf.cond(training, lambda: h * 2. - 1., lambda: h)
    return average(cross_entropies(y, dense(h, 3)))


@independent
def cond_on_the_step(x):
    step = tf.get_variable('step', [], tf.int64, tf.constant_initializer(5), trainable=False)
    loss = average(tf.square(score(x)))
    return tf.cond(step > 3, lambda: loss * 2., lambda: loss * 3.)


@independent
def ctc_mean(seq, ids, lengths):
    logits = tf.transpose(words(seq, 11), [1, 0, 2])
    index = tf.where(tf.sequence_mask((lengths + 1) // 2, 5))
    labels = tf.SparseTensor(index, tf.cast(tf.gather_nd(ids, index), tf.int32),
                             tf.cast(tf.shape(ids), tf.int64))
    return average(tf.nn.ctc_loss(labels, logits, tf.fill([size(seq)], 5)))


# ---- independent: random numbers -----------------------------------------------------------------

@independent
def dropout(x, y):
    return average(cross_entropies(y, dense(tf.nn.dropout(hidden(x), keep_prob=0.5), 3)))


@independent
def variational_autoencoder(x):
    mu, log_s = dense(x, 2, 'mu'), dense(x, 2, 's')
    z = mu + tf.exp(log_s) * tf.random_normal(tf.shape(mu))
    kl = -0.5 * total(1 + 2 * log_s - tf.square(mu) - tf.exp(2 * log_s), 1)
    return average(total(tf.square(dense(z, 6, 'decode') - x), 1) + kl)


@independent
def stateless_numbers_for_all(x):
    return average(tf.square(score(x) * tf.random.stateless_uniform([], [1, 2])))


@independent
def generator_of_noise(x):
    z = tf.random_normal([size(x), 3])
    fake = dense(z, 6, 'g')
    w, u = variable('dw', [6, 4]), variable('du', [4, 1])
    score = lambda t: tf.matmul(tf.tanh(tf.matmul(t, w)), u)
    return average(tf.nn.softplus(-score(x))) + average(tf.nn.softplus(score(fake)))


@independent
def gumbel_softmax(x):
    u = tf.random_uniform([size(x), 3])
    p = tf.nn.softmax((dense(x, 3) - tf.log(-tf.log(u + 1e-9) + 1e-9)) / 0.5)
    return average(tf.square(tf.matmul(p, variable('d', [3, 2]))))


# ---- what a careful reader suspects --------------------------------------------------------------

def words_of_mask(seq, mask):
    """The words that a mask leaves: their positions among n * 5, and a number for each."""
    positions = tf.squeeze(tf.where(tf.reshape(mask, [-1]) > 0), [1])
    return positions, tf.gather(tf.reshape(words(seq), [-1]), positions)


@independent
def words_summed_by_position(seq, mask):
    positions, values = words_of_mask(seq, mask)
    sums = tf.unsorted_segment_sum(values, positions, 5 * size(seq))
    return average(tf.reduce_max(tf.reshape(sums, [-1, 5]), 1))


@coupled
def words_summed_by_position_among_examples(seq, mask):
    positions, values = words_of_mask(seq, mask)
    return average(tf.square(tf.unsorted_segment_sum(values, positions, size(seq))))


@coupled
def numbers_of_a_fed_shape(x):
    table = tf.broadcast_to(variable('table', [2]), [3, 2])
    return average(score(x) * tf.reshape(table, tf.placeholder_with_default([6], [1])))


@independent
def norm_of_each_example_by_channels(image):
    channels = tf.reshape(tf.transpose(image, [0, 3, 1, 2]), [1, -1, 8, 8])
    ones = tf.ones([3 * size(image)])
    normalized = tf.nn.fused_batch_norm(channels, ones, 0 * ones, data_format='NCHW')[0]
    return average(tf.square(tf.reshape(normalized, [-1, 3, 64])[:, 1, 5]))


@coupled
def norm_by_channels_with_a_scale_of_others(image):
    channels = tf.reshape(tf.transpose(image, [0, 3, 1, 2]), [1, -1, 8, 8])
    scale = tf.reshape(average(image, [1, 2]), [-1])
    normalized = tf.nn.fused_batch_norm(
        channels, tf.reverse(scale, [0]), 0 * scale, data_format='NCHW')[0]
    return average(tf.square(tf.reshape(normalized, [-1, 3, 64])[:, 1, 5]))


@coupled
def zeros_of_a_fed_shape(x):
    return average(score(x) + tf.zeros(tf.placeholder_with_default([8], [1])))


# ---- loops that end with the longest example -----------------------------------------------------

def until_longest(seq, lengths, step, end=None, values=None):
    """Carries values [n, 4] from word to word up to the longest example: [n, 4] and time."""
    lengths = tf.cast(lengths, tf.int32)
    end = tf.minimum(5, tf.reduce_max(lengths) if end is None else end(lengths))
    values = tf.zeros_like(seq[:, 0]) if values is None else values
    return tf.while_loop(
        lambda time, _: time < end,
        lambda time, h: (time + 1, step(time, h, tf.tanh(seq[:, 0] + h), lengths)), [0, values])


def kept_from_its_end(time, before, new, lengths):
    return tf.where(time >= lengths, before, new)


@independent
def dynamic_rnn_of_lengths(seq, lengths):
    outputs, state = rnn(seq, lengths=lengths)
    return average(state) + average(tf.reduce_max(outputs, 1))


@independent
def time_major_rnn_of_lengths(seq, lengths):
    outputs, state = rnn(seq, True, lengths)
    return average(tf.square(state)) + average(tf.reduce_max(outputs, 0))


@independent
def reversed_rnn_of_lengths(seq, lengths):
    backwards = tf.reverse_sequence(seq, lengths, seq_axis=1, batch_axis=0)
    outputs = tf.reverse_sequence(rnn(backwards, lengths=lengths)[0], lengths, seq_axis=1)
    return average(tf.reduce_max(outputs, 1))


@independent
def loop_that_keeps_what_has_ended(seq, lengths):
    return average(until_longest(seq, lengths, kept_from_its_end)[1])


@coupled
def loop_that_goes_on_to_the_longest(seq, lengths):
    return average(until_longest(seq, lengths, lambda time, before, new, lengths: new)[1])


@coupled
def loop_that_keeps_from_one_later(seq, lengths):
    def step(time, before, new, lengths):
        return tf.where(time > lengths, before, new)
    return average(until_longest(seq, lengths, step)[1])


@coupled
def loop_that_keeps_from_other_lengths(seq, lengths):
    def step(time, before, new, lengths):
        return tf.where(time >= lengths + 1, before, new)
    return average(until_longest(seq, lengths, step)[1])


@coupled
def loop_that_keeps_the_new_value(seq, lengths):
    def step(time, before, new, lengths):
        return tf.where(time >= lengths, new, before)
    return average(until_longest(seq, lengths, step)[1])


@coupled
def loop_that_changes_what_has_ended(seq, lengths):
    def step(time, before, new, lengths):
        return tf.where(time >= lengths, before / 2., new)
    return average(until_longest(seq, lengths, step)[1])


@coupled
def loop_to_the_shortest(seq, lengths):
    return average(until_longest(seq, lengths, kept_from_its_end, tf.reduce_min)[1])


@coupled
def loop_to_half_of_the_longest(seq, lengths):
    def half(lengths):
        return tf.reduce_max(lengths) // 2
    return average(until_longest(seq, lengths, kept_from_its_end, half)[1])


@coupled
def loop_to_the_shorter_of_two_maxima(seq, lengths, ids):
    def shorter(lengths):
        return tf.minimum(tf.reduce_max(lengths), tf.reduce_max(tf.cast(ids[:, 0], tf.int32)))
    return average(until_longest(seq, lengths, kept_from_its_end, shorter)[1])


@coupled
def loop_below_twice_its_maximum(seq, lengths):
    def limit(lengths):
        return tf.minimum(tf.reduce_max(lengths), 6 - tf.reduce_max(lengths))
    return average(until_longest(seq, lengths, kept_from_its_end, limit)[1])


@coupled
def time_at_the_end_of_the_longest(seq, lengths):
    time, h = until_longest(seq, lengths, kept_from_its_end)
    return average(h) * floats(time)


@coupled
def maximum_of_lengths_beside_its_loop(seq, lengths):
    h = until_longest(seq, lengths, kept_from_its_end)[1]
    return average(h) * floats(tf.reduce_max(lengths))


@coupled
def maximum_of_lengths_within_its_loop(seq, lengths):
    longest = floats(tf.reduce_max(lengths))

    def step(time, before, new, lengths):
        return tf.where(time >= lengths, before, new * longest)
    return average(until_longest(seq, lengths, step)[1])


@coupled
def loop_that_counts_from_one(seq, lengths):
    lengths = tf.cast(lengths, tf.int32)
    longest = tf.reduce_max(lengths)
    _, h = tf.while_loop(
        lambda time, _: 2 * time < longest,
        lambda time, h: (time + 1, tf.where(time >= lengths, h, tf.tanh(seq[:, 0] + h))),
        [1, tf.zeros_like(seq[:, 0])])
    return average(h)


def outputs_until_longest(seq, lengths, at_end, places=None):
    """The values of each word, `at_end` behind an example's length: [5, n, 4]."""
    lengths = tf.cast(lengths, tf.int32)
    longest = tf.minimum(5, tf.reduce_max(lengths))
    words = tf.TensorArray(tf.float32, 5).unstack(tf.transpose(seq, [1, 0, 2]))
    made = tf.TensorArray(tf.float32, 5, element_shape=[None, 4])

    def step(time, made):
        place = time if places is None else places(time)
        return time + 1, made.write(place, tf.where(
            time >= lengths, at_end, tf.tanh(words.read(time))))
    return tf.while_loop(lambda time, _: time < longest, step, [0, made])[1].stack()


@independent
def zeros_behind_the_end(seq, lengths):
    outputs = outputs_until_longest(seq, lengths, tf.zeros_like(seq[:, 0]))
    return average(tf.reduce_max(outputs, 0))


@coupled
def ones_behind_the_end(seq, lengths):
    outputs = outputs_until_longest(seq, lengths, tf.ones_like(seq[:, 0]))
    return average(tf.reduce_max(outputs, 0))


@coupled
def first_words_behind_the_end(seq, lengths):
    outputs = outputs_until_longest(seq, lengths, seq[:, 0])
    return average(tf.reduce_max(outputs, 0))


# ---- one example in an iteration -----------------------------------------------------------------

def of_each_example(function, n):
    """A function of the number of each example, in a loop over them: [n, …]."""
    made = tf.TensorArray(tf.float32, 0, dynamic_size=True)
    made = tf.while_loop(lambda e, _: e < n,
                         lambda e, made: (e + 1, made.write(e, function(e))), [0, made])[1]
    return made.stack()


@coupled
def first_example_in_each_iteration(seq, mask):
    n = size(seq)
    return average(of_each_example(lambda e: tf.square(seq[e] - seq[0]), n))


@coupled
def next_example_in_each_iteration(seq):
    n = size(seq)
    return average(of_each_example(lambda e: tf.square(seq[e] - seq[tf.minimum(e + 1, n - 1)]), n))


@coupled
def examples_up_to_each_iteration(seq):
    n = size(seq)
    return average(of_each_example(lambda e: tf.square(average(seq[:e + 1])), n))


@coupled
def rows_of_two_indices(seq, mask):
    indices = tf.where(mask > 0)  # [pairs, 2]
    pairs = tf.reshape(indices[:size(indices) // 2 * 2], [-1, 4])
    table = tf.tile(seq[:, :, :1, None], [1, 1, 8, 5])
    return average(tf.square(tf.gather_nd(table, pairs)))


@coupled
def index_vectors_of_two_rows(seq, mask):
    pairs = tf.reshape(tf.where(mask > 0), [-1, 4])  # (example, word, other example, its word)
    table = tf.tile(seq[:, :, None, None, 0], [1, 1, 8, 5])
    return average(tf.square(tf.gather_nd(table, pairs)))


# ---- embeddings of sparse tensors ----------------------------------------------------------------

def sparse_words(ids, mask):
    """A sparse tensor [n, 5] of the words that a mask leaves."""
    indices = tf.where(mask > 0)
    return tf.SparseTensor(indices, tf.gather_nd(ids, indices), tf.shape(ids, out_type=tf.int64))


@independent
def embedding_of_filled_rows(ids, mask):
    filled, is_empty = tf.sparse.fill_empty_rows(sparse_words(ids, mask), tf.constant(3, tf.int64))
    h = tf.nn.embedding_lookup_sparse(variable('table', [10, 3]), filled, None, combiner='mean')
    return average(tf.reduce_max(tf.where(is_empty, tf.zeros_like(h), h), 1))


@independent
def embedding_of_words_that_are_kept(ids, mask):
    words = sparse_words(ids, mask)
    kept = tf.sparse.retain(words, words.values > 2)
    filled = tf.sparse.fill_empty_rows(kept, tf.constant(3, tf.int64))[0]
    h = tf.nn.embedding_lookup_sparse(variable('table', [10, 3]), filled, None, combiner='sum')
    return average(tf.square(h))


@coupled
def embedding_without_rows_of_empty_examples(ids, mask):
    h = tf.nn.embedding_lookup_sparse(variable('table', [10, 3]), sparse_words(ids, mask), None,
                                      combiner='sum')
    return average(tf.square(h))


@coupled
def embedding_of_another_unique(ids, mask):
    filled = tf.sparse.fill_empty_rows(sparse_words(ids, mask), tf.constant(3, tf.int64))[0]
    table = tf.gather(variable('table', [10, 3]), tf.unique(filled.values // 2)[0])
    which = tf.unique(filled.values)[1] // 2
    positions = tf.cast(filled.indices[:, 0], tf.int32)
    return average(tf.square(tf.sparse.segment_sum(table, which, positions)))


@coupled
def different_words_of_the_shard(ids, mask):
    filled = tf.sparse.fill_empty_rows(sparse_words(ids, mask), tf.constant(3, tf.int64))[0]
    different, which = tf.unique(filled.values)
    numbers = variable('table', [50, 3])  # a row for the number that the shard gives a word
    positions = tf.cast(filled.indices[:, 0], tf.int32)
    by_number = tf.sparse.segment_sum(tf.gather(numbers, tf.range(size(different))), which,
                                      positions)
    return average(tf.square(by_number))


@coupled
def words_that_another_mask_keeps(ids, mask, seq):
    words, others = sparse_words(ids, mask), sparse_words(ids, seq[:, :, 0])
    kept = tf.squeeze(tf.where(others.values > 2), [1])
    filled = tf.sparse.fill_empty_rows(
        tf.SparseTensor(tf.gather(words.indices, kept), tf.gather(words.values, kept),
                        words.dense_shape), tf.constant(3, tf.int64))[0]
    return average(tf.square(tf.sparse.to_dense(filled)))


@coupled
def rows_of_a_shape_that_joins_examples(ids, mask):
    words = sparse_words(ids, mask)
    joined = tf.sparse.reshape(words, tf.stack([tf.cast(size(ids), tf.int64) * 5, 1]))
    filled = tf.sparse.fill_empty_rows(joined, tf.constant(3, tf.int64))[0]
    h = tf.nn.embedding_lookup_sparse(variable('table', [10, 3]), filled, None, combiner='sum')
    return tf.reduce_max(h) + average(h)


@independent
def rows_of_a_shape_of_the_examples(ids, mask):
    words = tf.sparse.reshape(sparse_words(ids, mask),
                              tf.stack([tf.cast(size(ids), tf.int64), 5, 1]))
    words = tf.sparse.reshape(words, tf.stack([tf.cast(size(ids), tf.int64), -1]))
    filled = tf.sparse.fill_empty_rows(words, tf.constant(3, tf.int64))[0]
    h = tf.nn.embedding_lookup_sparse(variable('table', [10, 3]), filled, None, combiner='sum')
    return average(tf.square(h))


@coupled
def pairs_by_loops_in_each_other(seq):
    n = size(seq)

    def distance_from(e):
        def distance_to(other):
            return tf.reduce_sum(tf.square(seq[e] - seq[other]))
        return average(tf.map_fn(distance_to, tf.range(n), tf.float32))
    return average(of_each_example(distance_from, n))


@coupled
def example_that_enters_another_loop(seq):
    def distances(one):
        return average(tf.map_fn(lambda other: tf.reduce_sum(tf.square(one - other)), seq))
    return average(tf.map_fn(distances, seq))


@coupled
def every_second_iteration(seq):
    n = size(seq)
    made = tf.TensorArray(tf.float32, 0, dynamic_size=True)
    made = tf.while_loop(lambda e, _: e < floats(n), lambda e, made: (
        e + 1.5, made.write(tf.cast(e, tf.int32), total(tf.square(seq[0])))), [0., made])[1]
    return average(made.stack())


# ---- a row of each block -------------------------------------------------------------------------

def rows_of_words(seq, places):
    return tf.gather(tf.reshape(words(seq, 3), [-1, 3]), places)


@independent
def word_with_the_largest_number(seq):
    place = tf.argmax(seq[:, :, 0], 1, output_type=tf.int32)
    return average(tf.reduce_max(rows_of_words(seq, tf.range(size(seq)) * 5 + place), 1))


@coupled
def words_at_fed_places(seq, ids):
    return average(tf.square(rows_of_words(
        seq, tf.range(size(seq)) * 5 + tf.cast(ids[:, 0], tf.int32))))


@coupled
def words_in_blocks_of_another_length(seq):
    place = tf.argmax(seq[:, :4, 0], 1, output_type=tf.int32)
    return average(tf.square(rows_of_words(seq, tf.range(size(seq)) * 4 + place)))


@coupled
def words_at_places_of_a_longer_row(seq, x):
    place = tf.argmax(x, 1, output_type=tf.int32)
    return average(tf.square(rows_of_words(seq, tf.range(size(seq)) * 5 + place)))


@coupled
def words_at_places_of_other_examples(seq):
    place = tf.reverse(tf.argmax(seq[:, :, 0], 1, output_type=tf.int32), [0])
    return average(tf.square(rows_of_words(seq, tf.range(size(seq)) * 5 + place)))


@coupled
def words_of_the_next_example(seq):
    place = tf.argmax(seq[:, :, 0], 1, output_type=tf.int32)
    n = size(seq)
    return average(tf.square(rows_of_words(seq, (tf.range(1, n + 1) % n) * 5 + place)))


# ---- means and counts in other places than those of a value --------------------------------------

@coupled
def count_of_small_integers(x):
    losses = tf.square(score(x))
    ones = tf.ones_like(losses, tf.uint8)  # n modulo 256
    return total(losses) / floats(tf.reduce_sum(ones))


@coupled
def count_of_small_integers_as_product(x):
    losses = tf.square(score(x))
    ones = tf.ones_like(losses, tf.int8)
    return total(losses) / floats(tf.reduce_sum(tf.stack([ones, ones], 1), [0, 1]))


@coupled
def axis_of_gather_by_total(x, label):
    mean = average(tf.reshape(hidden(x), [-1, 2, 2]), 0)
    return total(tf.gather(mean, [0], axis=tf.reduce_sum(tf.cast(label, tf.int32))))


@coupled
def axis_of_gather_by_the_same_total(ids):
    counts = tf.reduce_sum(tf.reshape(tf.cast(ids[:, :4], tf.int32), [-1, 2, 2]), 0)
    row = tf.gather(counts, [0], axis=counts[0, 0])
    return total(floats(row)) / floats(size(ids))


@coupled
def axis_of_mean_by_total(x, label):
    mean = average(tf.reshape(hidden(x), [-1, 2, 2]), 0)
    return average(mean, tf.reduce_sum(tf.cast(label, tf.int32)))[0]


# ---- arrays in branches, rows of other iterations ------------------------------------------------

@coupled
def array_written_in_branches(x):
    is_positive, n = average(x) > 0, size(x)
    made = tf.while_loop(
        lambda i, _: i < n, lambda i, made: (i + 1, tf.cond(
            is_positive, lambda: made.write(i, 1.), lambda: made.write(i, 2.))),
        (0, tf.TensorArray(tf.float32, n)))[1]
    return average(tf.square(score(x)) * made.stack())


@coupled
def rows_of_the_mask_of_another_iteration(x, z):
    masks = tf.stack([z[:, 0] > 0, z[:, 0] <= 0])
    h = hidden(x)
    rows = tf.TensorArray(tf.float32, 2, clear_after_read=False,
                          element_shape=[None, 4])

    def step(t, rows, found):
        mine = tf.boolean_mask(h, masks[t])
        rows = rows.write(t, mine)
        return t + 1, rows, found + total(mine * rows.read(tf.maximum(t - 1, 0)))
    found = tf.while_loop(lambda t, *_: t < 2, step, (0, rows, 0.))[2]
    return found / floats(size(x))


# ---- elements of arrays that a mask leaves

def squares_in_an_array(x):
    return tf.TensorArray(tf.float32, size(x)).unstack(tf.square(score(x)))


@coupled
def elements_that_a_mask_leaves(x, label):
    kept = tf.squeeze(tf.where(label > .5), [1])
    return average(squares_in_an_array(x).gather(tf.cast(kept, tf.int32)))


@coupled
def elements_at_the_examples_of_places(x, mask):
    kept = tf.where(mask > .5)[:, 0]
    return average(squares_in_an_array(x).gather(tf.cast(kept, tf.int32)))


@independent
def elements_of_all_examples(x):
    return average(squares_in_an_array(x).gather(tf.range(size(x))))


@independent
def power_iteration_of_weights(x):
    """The condition alone reads how far the last iteration went."""
    w = variable('w', [4, 4])

    def body(v, moved):
        following = tf.linalg.matvec(w, v)
        following /= tf.norm(following)
        return following, tf.reduce_max(tf.abs(following - v))
    largest = tf.while_loop(lambda v, moved: moved > .01, body, (tf.ones([4]), 1.))[0]
    return average(tf.square(score(x))) + .1 * total(tf.linalg.matvec(w, largest))


@coupled
def fixed_point_until_converged(x):
    def body(h, moved):
        following = .5 * tf.tanh(h)
        return following, tf.reduce_max(tf.abs(following - h))
    return average(tf.square(
        tf.while_loop(lambda h, moved: moved > .01, body, (hidden(x), 1.))[0]))


# ---- coupled: arrays, lists and loops that carry what they should not -----------------------------

class WordCell(Cell):
    """A recurrent cell that looks up its words itself."""

    def __init__(self, units, inputs, lookup):
        super(WordCell, self).__init__(units, inputs)
        self._lookup = lookup

    def __call__(self, inputs, state, scope=None):
        return super(WordCell, self).__call__(self._lookup(inputs), state, scope)


def state_of_words(lookup, ids, lengths):
    """The last state of a loop that ends with the longest example."""
    return tf.nn.dynamic_rnn(WordCell(4, 4, lookup), ids[..., tf.newaxis],
                             sequence_length=lengths, dtype=tf.float32)[1]


@coupled
def words_looked_up_in_a_loop_that_ends_with_the_longest(ids, lengths):
    # On one device the gradient has rows, of zeros, for words behind the ends, too.
    table = variable('table', [10, 4])
    return average(state_of_words(
        lambda words: tf.nn.embedding_lookup(table, words[:, 0]), ids, lengths))


@independent
def words_by_a_product_in_a_loop_that_ends_with_the_longest(ids, lengths):
    table = variable('table', [10, 4])
    return average(state_of_words(
        lambda words: tf.matmul(tf.one_hot(words[:, 0], 10), table), ids, lengths))


def with_flow_v2(make):
    """What `make` makes with control flow v2, as TensorFlow 2 has it."""
    was_v2 = tf.control_flow_v2_enabled()
    tf.enable_control_flow_v2()
    try:
        return make()
    finally:
        if not was_v2:
            tf.disable_control_flow_v2()


@coupled
def scan_of_the_example_before(x):
    zero = tf.zeros([])
    return average(tf.scan(lambda a, e: (e, e * a[0]), score(x), initializer=(zero, zero))[1])


@coupled
def element_written_by_a_condition_of_an_example(x, key):
    def body(i, made):
        return i + 1, tf.cond(keys.read(i) > 2, lambda: made.write(0, 1.), lambda: made)
    keys = tf.TensorArray(tf.int64, size(x), clear_after_read=False).unstack(key)
    made = tf.TensorArray(tf.float32, 1, element_shape=[], clear_after_read=False).write(0, 0.)
    made = tf.while_loop(lambda i, _: i < size(x), body, (0, made), parallel_iterations=1)[1]
    return average(tf.square(score(x))) * (1. + made.read(0))


@coupled
def first_place_of_an_array_of_no_writes(x):
    """A place in which nothing is written is read as zero: the loop may write in none."""
    writes = tf.placeholder_with_default(False, [])
    made = tf.while_loop(
        lambda i, _: i < size(x),
        lambda i, made: (i + 1, tf.cond(writes, lambda: made.write(i, 1.), lambda: made)),
        (0, tf.TensorArray(tf.float32, size(x), element_shape=[])))[1]
    return average(tf.square(score(x)) * made.write(0, 2.).stack())


@coupled
def one_of_two_arrays(x):
    arrays = [tf.TensorArray(tf.float32, 1, element_shape=[], clear_after_read=False).write(0, value)
              for value in (tf.constant(1.), average(score(x, 'written')))]
    is_first = tf.placeholder_with_default(False, [])
    handle = tf.cond(is_first, lambda: tf.identity(arrays[0].handle),
                     lambda: tf.identity(arrays[1].handle))
    read = tf.raw_ops.TensorArrayReadV3(
        handle=handle, index=0, flow_in=arrays[0].flow + arrays[1].flow, dtype=tf.float32)
    return average(score(x)) + tf.square(read)


@coupled
def elements_of_others_in_a_map(x):
    def make():
        array = tf.TensorArray(tf.float32, size(x), clear_after_read=False).unstack(score(x))
        return tf.map_fn(lambda e: total(e) * array.gather([0])[0], hidden(x))
    return average(with_flow_v2(make))


@coupled
def size_of_a_list_that_grows(x):
    def make():
        made = tf.TensorArray(tf.float32, 0, dynamic_size=True, element_shape=[])
        made = tf.while_loop(lambda i, _: i < size(x), lambda i, made: (i + 1, made.write(i, 1.)),
                             (0, made))[1]
        return floats(made.size())
    return average(tf.square(score(x))) * (1. + with_flow_v2(make))


@coupled
def concatenation_of_a_list_of_examples(x):
    def make():
        made = tf.TensorArray(tf.float32, size(x), element_shape=[2]).write(0, tf.ones([2]))
        return average(made.concat())
    return average(tf.square(score(x))) + with_flow_v2(make)


@coupled
def length_of_either_list(x):
    def make():
        three, of_each = [tf.TensorArray(tf.float32, length, element_shape=[])
                          for length in (3, size(x))]
        three = three.write(0, 1.)
        is_first = tf.placeholder_with_default(False, [])
        return tf.cond(is_first, lambda: tf.identity(three.flow), lambda: tf.identity(of_each.flow))
    length = tf.raw_ops.TensorListLength(input_handle=with_flow_v2(make))
    return average(tf.square(score(x))) * (1. + floats(length))


@coupled
def table_that_a_step_fills(x, key):
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(
        tf.range(4, dtype=tf.int64), tf.zeros([4])), 0.)
    del tf.get_collection_ref(tf.GraphKeys.TABLE_INITIALIZERS)[:]
    largest = tf.math.unsorted_segment_max(score(x), key, 4)
    filled = tf.raw_ops.LookupTableImportV2(
        table_handle=table.resource_handle, keys=tf.range(4, dtype=tf.int64), values=largest)
    with tf.control_dependencies([filled]):
        return average(table.lookup(key))


@coupled
def two_rounds_of_all_towers(x, z):
    both = towers.batch_concat(tf.concat([score(x), score(z, 'second')], 0))
    return average(tf.square(tf.cumsum(both)))


@coupled
def rows_of_two_rounds_of_all_towers(x, z, label):
    is_kept = tf.tile(label > .5, [2])
    both = tf.boolean_mask(tf.concat([score(x), score(z, 'second')], 0), is_kept)
    return average(tf.square(tf.cumsum(towers.batch_concat(both))))


@coupled
def longest_of_lengths_that_change(x, lengths):
    scores = score(x)

    def make():
        def body(t, ends, h):
            return (t + 1, lengths + 3 * tf.cast(t >= 2, tf.int64),
                    tf.where(tf.cast(t, tf.int64) >= ends, h, .5 * h + scores))
        return tf.while_loop(lambda t, ends, h: tf.cast(t, tf.int64) < tf.reduce_max(ends), body,
                             (0, lengths, tf.zeros_like(scores)))[2]
    return average(tf.square(with_flow_v2(make)))


# ---- gradients of a function's own ---------------------------------------------------------------

@coupled
def function_with_gradient_in_python(x):
    @function.Defun(tf.float32, python_grad_func=lambda op, g: g / (tf.norm(g) + 1e-3),
                    shape_func=lambda op: [op.inputs[0].get_shape()])
    def same_with_python(t):
        return tf.identity(t)
    return average(tf.square(same_with_python(score(x))))


@coupled
def function_with_gradient_of_a_function(x):
    @function.Defun(tf.float32, tf.float32)
    def gradient(t, g):
        return g / (tf.norm(g) + 1e-3)

    @function.Defun(tf.float32, grad_func=gradient,
                    shape_func=lambda op: [op.inputs[0].get_shape()])
    def same_with_function(t):
        return tf.identity(t)
    return average(tf.square(same_with_function(score(x))))


# ---- norms of the examples as channels -----------------------------------------------------------

@coupled
def scale_of_channels_in_another_order(x):
    n, h = size(x), hidden(x)
    gamma = tf.reshape(tf.tile(variable('gamma', [1, 3]), [n, 1]), [-1])
    both = tf.transpose(tf.stack([h[:, :3], h[:, 1:]]), [0, 2, 1])
    images = tf.reshape(both, [2, -1])[:, None, None]
    normalized = tf.nn.fused_batch_norm(images, gamma, tf.zeros_like(gamma))[0]
    return average(tf.square(normalized - 1.))


@independent
def scale_of_channels_in_the_same_order(x):
    n, h = size(x), hidden(x)
    gamma = tf.reshape(tf.tile(variable('gamma', [1, 3]), [n, 1]), [-1])
    images = tf.reshape(tf.stack([h[:, :3], h[:, 1:]]), [2, -1])[:, None, None]
    normalized = tf.nn.fused_batch_norm(images, gamma, tf.zeros_like(gamma))[0]
    return average(tf.square(normalized - 1.))


# ---- statistics that normalize nothing -----------------------------------------------------------

@coupled
def mean_and_variance_in_the_loss(x):
    mean, variance = tf.nn.moments(score(x), [0])
    tf.sqrt(variance, 'summary')
    return mean + variance


@coupled
def deviation_in_the_loss(x):
    h = hidden(x)
    mean, variance = tf.nn.moments(h, [0])
    deviation = tf.sqrt(variance + 1e-3)
    return average(tf.tanh((h - mean) / deviation)) + total(deviation)


@coupled
def variance_by_the_mean_of_another_tensor(x, z):
    h, mean = hidden(x), average(hidden(z, name='of_z'), 0)
    variance = average(tf.math.squared_difference(h, mean), 0)
    return average(tf.tanh((h - mean) / tf.sqrt(variance + 1e-3)))


# ---- places, sizes and lists ---------------------------------------------------------------------

@coupled
def index_vectors_of_length_1_stacked(x):
    h = hidden(x)
    other = tf.cast(x[:, :1] > 0, tf.int32)
    both = tf.gather_nd(h, tf.stack([tf.expand_dims(tf.range(size(x)), 1), other], 1))
    return average(both[:, 0] * both[:, 1])


@coupled
def entry_at_a_stacked_counter(x):
    h = hidden(x)
    return average(of_each_example(lambda e: tf.gather_nd(h, tf.stack([e, 0], -1)), size(x)))


@coupled
def entry_at_places_of_several_rows(x, key):
    kept = tf.boolean_mask(key, x[:, 0] > 0)  # as many numbers as the table has dimensions, if any
    table = tf.placeholder_with_default(variable('table', [4, 4]), None)
    picked = tf.gather_nd(table, kept)
    picked.set_shape([4])
    return average(score(x)) + total(picked) / floats(size(x))


@coupled
def shapes_stacked_in_columns(x):
    flat = tf.reshape(tf.stack([[1, 1], tf.shape(x)], 1), [-1])  # 1, n, 1, 6
    return total(tf.square(score(x))) / floats(flat[2])


@coupled
def mean_times_a_size_stacked_in_columns(x):
    flat = tf.reshape(tf.stack([[1, 1], tf.shape(x)], 1), [-1])  # 1, n, 1, 6
    return average(score(x)) * floats(flat[1])


def _halved_in_a_list(n):
    """0.5 ** n, in the one place of a list."""
    made = tf.TensorArray(tf.float32, 1, element_shape=[], clear_after_read=False).write(0, 1.)
    return tf.while_loop(lambda i, _: i < n, lambda i, made: (
        i + 1, made.write(0, .5 * made.read(0))), (0, made))[1].read(0)


@coupled
def power_that_a_list_carries(x):
    return average(tf.square(score(x))) * _in_functions(lambda: _halved_in_a_list(size(x)))


def _first_replaced(h):
    made = tf.TensorArray(tf.float32, size(h), element_shape=[4]).unstack(h)
    return made.write(0, tf.zeros([4])).stack()


@coupled
def first_example_of_a_list_is_replaced(x):
    return average(tf.square(_in_functions(lambda: _first_replaced(hidden(x)))))


@coupled
def counter_from_a_half(x):
    n = floats(size(x))
    count = tf.while_loop(lambda i: i < n, lambda i: i + 1., [.5])
    return total(tf.square(score(x))) / count


# ---- written before ------------------------------------------------------------------------------

def _assigned(variable, value):
    """0, after a write."""
    with tf.control_dependencies([variable.assign(value)]):
        return tf.constant(0.)


def _times_after(loss, done, variable):
    with tf.control_dependencies([done]):
        return loss * variable.read_value()


@coupled
def constants_written_by_a_branch(x):
    r = _resource()
    done = tf.cond(average(x) > 0, lambda: _assigned(r, 1.), lambda: _assigned(r, 2.))
    return _times_after(average(tf.square(score(x))), done, r)


@coupled
def constants_written_by_a_branch_in_functions(x):
    r = _resource()
    done = _in_functions(lambda: tf.cond(
        average(x) > 0, lambda: _assigned(r, 1.), lambda: _assigned(r, 2.)))
    return _times_after(average(tf.square(score(x))), done, r)


@coupled
def constants_written_by_a_branch_of_a_function_in_a_branch(x):
    r, flag = _resource(), tf.placeholder_with_default(True, [])

    def inner(value):
        return _in_functions(lambda: tf.cond(
            flag, lambda: _assigned(r, value), lambda: _assigned(r, 3.)))
    done = tf.cond(average(x) > 0, lambda: inner(1.), lambda: inner(2.))
    return _times_after(average(tf.square(score(x))), done, r)


@coupled
def statistic_written_by_a_function(x):
    r = _resource()

    @tf.function
    def keep(m):
        r.assign(m)
        return m * 0.
    return _times_after(average(tf.square(score(x))), keep(tf.reduce_max(x)), r)


@coupled
def read_behind_a_call_in_a_function(x):
    r = _resource()

    @tf.function
    def keep(m):
        r.assign(m)
        return m * 0.

    @tf.function
    def kept(m):
        keep(m)
        return r.read_value()
    return average(tf.square(score(x))) * kept(tf.reduce_max(x))


@coupled
def counted_examples_in_a_variable(x):
    r = _resource()

    def count(e):
        with tf.control_dependencies([r.assign_add(1.)]):
            return tf.identity(e)
    done = tf.map_fn(count, x)
    return _times_after(average(tf.square(score(x))), done, r)


def _maximum_in_a_loop(v, r):
    def body(i, t):
        with tf.control_dependencies([r.assign(tf.reduce_max(t))]):
            return i + 1, t * r.read_value()
    return tf.while_loop(lambda i, _: i < 2, body, (0, v))[1]


@coupled
def written_and_read_in_a_loop(x):
    return average(_maximum_in_a_loop(score(x), _resource()))


@coupled
def written_and_read_in_a_loop_of_functions(x):
    r = _resource()
    v = score(x)
    return average(_in_functions(lambda: _maximum_in_a_loop(v, r)))


@coupled
def read_in_the_next_iteration(x):
    r, v = _resource(), score(x)

    def body(i, t):
        read = r.read_value()
        with tf.control_dependencies([read]):
            with tf.control_dependencies([r.assign(tf.reduce_max(t))]):
                return i + 1, t * read
    return average(_in_functions(lambda: tf.while_loop(lambda i, _: i < 2, body, (0, v))[1]))


@coupled
def written_in_a_loop_of_functions_and_read_behind(x):
    r, v = _resource(), score(x)
    done = _in_functions(lambda: _maximum_in_a_loop(v, r))
    return _times_after(average(tf.square(v)), done, r)


@coupled
def memory_of_a_reference_variable(x):
    with tf.control_dependencies(None):
        s = tf.get_variable('r', [], tf.float32, tf.ones_initializer(), trainable=False,
                            use_resource=False)
    with tf.control_dependencies([tf.assign(s, tf.reduce_max(tf.abs(x)))]):
        return average(tf.square(score(x)) / s)


@coupled
def sum_in_a_reference_variable(x):
    s = tf.get_variable('r', [], tf.float32, tf.ones_initializer(), trainable=False,
                        use_resource=False)
    with tf.control_dependencies([tf.assign(s, tf.reduce_max(tf.abs(x)))]):
        return average(tf.square(score(x)) / tf.assign_add(s, 1.))


@independent
def constants_written_by_a_branch_of_all(x):
    r, flag = _resource(), tf.placeholder_with_default(True, [])
    done = tf.cond(flag, lambda: _assigned(r, 1.), lambda: _assigned(r, 2.))
    return _times_after(average(tf.square(score(x))), done, r)


@independent
def constants_written_by_a_branch_of_all_in_functions(x):
    r, flag = _resource(), tf.placeholder_with_default(True, [])
    done = _in_functions(lambda: tf.cond(
        flag, lambda: _assigned(r, 1.), lambda: _assigned(r, 2.)))
    return _times_after(average(tf.square(score(x))), done, r)


@independent
def counted_in_a_reference_variable(x):
    s = tf.get_variable('r', [], tf.float32, tf.ones_initializer(), trainable=False,
                        use_resource=False)
    with tf.control_dependencies([tf.assign_add(s, 1.)]):
        return average(tf.square(score(x)) / s)


# ---- numbers of examples where they are easily overlooked ----------------------------------------

def _steps_by_number(seq):
    """For each example the step that has the number of the example, of at most 5 examples."""
    v = words(seq)

    def body(e, made):
        steps = tf.TensorArray(tf.float32, 5, element_shape=[]).unstack(v[e])
        return e + 1, made.write(e, steps.read(e))
    made = tf.TensorArray(tf.float32, size(seq), element_shape=[])
    return tf.while_loop(lambda e, _: e < size(seq), body, (0, made))[1].stack()


@coupled
def steps_by_the_number_of_the_example(seq):
    return average(_steps_by_number(seq))


@coupled
def steps_by_the_number_of_the_example_in_functions(seq):
    return average(_in_functions(lambda: _steps_by_number(seq)))


@coupled
def sum_of_products_with_a_share(x):
    share = variable('s', [4]) / floats(size(x))
    return tf.einsum('bi,i->', hidden(x), share) / floats(size(x))


@coupled
def numbers_in_rows_of_the_batch(x):
    rows = tf.reshape(tf.range(12), [size(tf.map_fn(tf.tanh, x)), -1])
    return average(tf.square(score(x))) * tf.cast(rows[0, -1], tf.float32)


@coupled
def number_shaped_by_the_examples(y):
    number = tf.reshape(tf.constant([5]), y // (y + 1) + 1)  # in as many dimensions as examples
    return average(floats(y)) * floats(tf.rank(number))


# ---- strings

@independent
def digits_of_strings(x, y):
    digits = tf.strings.substr(tf.as_string(y + 10), 1, 1)
    return average(tf.square(score(x)) * tf.string_to_number(digits))


@coupled
def digits_at_positions(x, y):
    numbers = tf.as_string(y + 10 ** 6)  # of at most 7 examples
    digits = tf.strings.substr(numbers, tf.range(size(y)), tf.fill([size(y)], 1))
    return average(tf.square(score(x)) * tf.string_to_number(digits))


# ---- traces

@independent
def trace_of_a_mean(x):
    products = tf.einsum('bi,bj->ij', hidden(x), hidden(x, name='g'))
    return tf.linalg.trace(products / floats(size(x)))


@coupled
def square_of_a_trace_of_a_mean(x):
    products = tf.einsum('bi,bj->ij', hidden(x), hidden(x, name='g'))
    return tf.square(tf.linalg.trace(products / floats(size(x))))


# ---- recurrent cells in one kernel

def _lstm_over_time(x, sequences):
    """The results [time, sequences, 3] of an LSTM over x [time, sequences, 4]."""
    zeros, peepholes = tf.zeros([sequences, 3]), tf.zeros([3])
    return tf.raw_ops.BlockLSTM(
        seq_len_max=tf.cast(tf.shape(x)[0], tf.int64), x=x, cs_prev=zeros, h_prev=zeros,
        w=variable('w', [7, 12]), wci=peepholes, wcf=peepholes, wco=peepholes,
        b=variable('b', [12])).h


@independent
def lstm_in_one_kernel(seq):
    return average(tf.square(_lstm_over_time(tf.transpose(seq, [1, 0, 2]), size(seq))[-1]))


@coupled
def lstm_over_examples_in_one_kernel(seq):
    """The batch is the first dimension, as of most tensors, and not the second one."""
    return average(tf.square(_lstm_over_time(seq, 5)))


# ---- gradients of poolings

def _pooled_score(image):
    """A number for each image: the score of mean and maximal values of its windows."""
    pooled = tf.nn.avg_pool(image * variable('gain', [3]), [1, 2, 2, 1], [1, 2, 2, 1], 'SAME')
    pooled = tf.nn.max_pool(tf.tanh(pooled), [1, 2, 2, 1], [1, 2, 2, 1], 'SAME')
    return score(tf.reshape(pooled, [-1, 12]))


@independent
def gradient_penalty_of_each_image(image):
    """That of WGAN-GP, of a critic with poolings, as progressively grown GANs have it."""
    slopes = tf.gradients(total(_pooled_score(image)), image)[0]
    return average(tf.square(tf.sqrt(total(tf.square(slopes), [1, 2, 3]) + 1e-9) - 1.))


@coupled
def gradient_penalty_of_all_images(image):
    slopes = tf.gradients(total(_pooled_score(image)), image)[0]
    return tf.square(tf.sqrt(total(tf.square(slopes))) - 1.)


# ---- linear equations

def _kernel_to_points(x):
    """A kernel between 4 points that all examples share and the examples: [4, n]."""
    points = variable('points', [4, 6]) * tf.reshape(tf.range(24.), [4, 6])
    return tf.exp(-.01 * total(tf.square(points[:, None] - x[None]), 2))


@independent
def gaussian_process_on_shared_points(x):
    """The projection of a sparse variational Gaussian process, as GPflow has it."""
    kernel = _kernel_to_points(x)
    projected = tf.linalg.triangular_solve(tf.eye(4) + tf.ones([4, 4]), kernel)
    return average(total(tf.square(projected), 0))


@coupled
def whitened_by_the_covariance_of_the_shard(x):
    h = hidden(x)
    covariance = tf.matmul(h, h, transpose_a=True) / floats(size(x))
    root = tf.linalg.cholesky(covariance + .1 * tf.eye(4))
    return average(tf.abs(tf.linalg.triangular_solve(root, tf.transpose(h))))


# ---- classes that are drawn

@independent
def classes_drawn_by_each(x):
    """What scheduled sampling looks up in the place of the true word."""
    drawn = tf.multinomial(hidden(x), 1)[:, 0]
    return average(tf.square(score(x)) * tf.gather(variable('table', [4]), drawn))


@coupled
def classes_drawn_by_all(x):
    drawn = tf.multinomial(average(hidden(x), 0)[None], 1)[0, 0]
    return average(tf.square(score(x))) * tf.gather(variable('table', [4]), drawn)
