"""Each rule by examples: the state that it gives, and numbers that agree with the state.

A case is a line: what it computes of a batch of n examples, and the state that is expected. The
numbers of two shards, put together as the state says, have to be those of the batch. To test a new
rule, add a line for each answer that it has.
"""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from towers.proof.analysis import analyse
from towers.proof.states import (
    INDEPENDENT,
    ONE_EXAMPLE,
    Kind,
    Size,
    State,
    per_example,
    sizes_state,
)

EXAMPLES, SPLIT = 6, 2  # of the batch, and how many of them are in the first shard
MEAN, SUM, SHARE = [State(kind) for kind in (Kind.MEAN, Kind.SUM, Kind.SHARE)]
UNKNOWN, ROWS = State(Kind.UNKNOWN), State(Kind.ROWS)
EACH, SECOND = per_example(0), per_example(1)  # the examples along dimension 0, or 1
STATISTIC = 'a statistic of the shard'


class Batch:
    """The tensors of a batch of n examples, and what all towers share."""

    def __init__(self):
        self.x = tf.placeholder(tf.float64, [None, 4])
        self.seq = tf.placeholder(tf.float64, [None, 3, 4])
        self.ids = tf.placeholder(tf.int32, [None])
        self.image = tf.placeholder(tf.float64, [None, 4, 4, 3])
        self.square = tf.placeholder(tf.float64, [None, 3, 3])
        self.w = tf.constant(np.random.RandomState(0).randn(4, 4))
        self.n = tf.shape(self.x)[0]
        self.count = tf.cast(self.n, tf.float64)
        self.mean = tf.reduce_mean(self.x)
        self.total = tf.reduce_sum(self.x)

    @property
    def inputs(self):
        return [self.x, self.seq, self.ids, self.image, self.square]

    def values(self):
        """An array for each input."""
        rng = np.random.RandomState(1)
        return [rng.randn(EXAMPLES, 4), rng.randn(EXAMPLES, 3, 4), rng.randint(0, 4, EXAMPLES),
                rng.randn(EXAMPLES, 4, 4, 3), rng.randn(EXAMPLES, 3, 3) + 3 * np.eye(3)]


def to_the_longest(b, step):
    """Values [n, 4] after as many steps as the longest example has, at most 3."""
    end = tf.minimum(3, tf.reduce_max(b.ids))
    return tf.while_loop(lambda t, _: t < end, lambda t, h: (t + 1, step(t, h)),
                         [0, tf.zeros_like(b.x)])[1]


def outputs_to_the_longest(b, at_end):
    """Values [3, n, 4] of 3 steps, `at_end` behind the length of an example."""
    end = tf.minimum(3, tf.reduce_max(b.ids))
    made = tf.TensorArray(tf.float64, 3, element_shape=[None, 4])
    return tf.while_loop(
        lambda t, _: t < end,
        lambda t, made: (t + 1, made.write(t, tf.where(
            t >= b.ids, at_end, tf.tanh(b.x * tf.cast(t + 1, tf.float64))))),
        [0, made])[1].stack()


def each_by_its_number(b):
    made = tf.TensorArray(tf.float64, b.n)
    return tf.while_loop(lambda e, _: e < b.n, lambda e, made: (e + 1, made.write(e, 2 * b.x[e])),
                         [0, made])[1].stack()


def elements(b):
    return tf.TensorArray(tf.float64, b.n).unstack(b.x)


def columns_by_number(b):
    """For the example e, the column e of a table: of other examples in a shard than in the batch."""
    made = tf.TensorArray(tf.float64, b.n)
    return tf.while_loop(
        lambda e, _: e < b.n,
        lambda e, made: (e + 1, made.write(e, tf.gather(b.w, 0, axis=e))), [0, made])[1].stack()


def ctc_losses(b, lengths):
    """A loss of each sequence of 3 steps, whose labels are its numbers in `ids`."""
    ids = b.ids[:, None]
    indices = tf.where(ids >= 0)
    labels = tf.SparseTensor(indices, tf.gather_nd(ids % 3, indices),
                             tf.cast(tf.stack([b.n, 1]), tf.int64))
    logits = tf.cast(tf.transpose(b.seq, [1, 0, 2]), tf.float32)
    return tf.nn.ctc_loss(labels, logits, lengths)


def looked_up(b, is_filled):
    """Sums of rows of a table, of the places where x is positive."""
    indices = tf.where(b.x > 0)
    words = tf.SparseTensor(indices, tf.gather_nd(tf.tile(b.ids[:, None], [1, 4]), indices),
                            tf.shape(b.x, out_type=tf.int64))
    if is_filled:
        words = tf.sparse.fill_empty_rows(words, tf.constant(1))[0]
    return tf.nn.embedding_lookup_sparse(b.w, words, None, combiner='sum')


def of_one_mask(mask, *factors):
    """The product of the rows of some factors that one mask leaves."""
    product = 1.
    for factor in factors:
        product *= tf.boolean_mask(factor, mask)
    return product


def sparse(b):
    """The entries of x above 0, as a sparse tensor."""
    places = tf.where(b.x > 0)
    return tf.SparseTensor(places, tf.gather_nd(b.x, places), tf.shape(b.x, out_type=tf.int64))


def repeated_dimensions(b, shape):
    """The dimensions along which a product of x and a tensor of a shape repeats either."""
    return tf.raw_ops.BroadcastGradientArgs(s0=tf.shape(b.x), s1=shape)


def gradient(factor, repeated):
    """The gradient, with respect to a factor that broadcasting repeats, of a sum of products."""
    return tf.gradients(tf.reduce_sum(tf.tanh(factor * repeated)), repeated)[0]


def looked_up_once(table, ids, narrow=None):
    """The rows of a table, each different one of which is gathered once; by numbers in which the
    different ids are not more than a narrow type holds."""
    different, which = tf.unique(ids)
    if narrow is not None:
        which = tf.cast(tf.cast(which, narrow), tf.int32)
    return tf.gather(tf.gather(table, different), which)


def hidden(number):
    """A number whose value no graph tells."""
    return tf.placeholder_with_default(number, [])


def complex_of(x):
    return tf.complex(x, 2 * x)


def signal_of(b):
    """12 samples of each example, of the type that every TensorFlow transforms."""
    return tf.reshape(tf.cast(b.seq, tf.float32), [-1, 12])


def diagonals(values, numbers, padding):
    """Matrices with these diagonals: their first and last number, as TensorFlow 1.15 has it."""
    return tf.raw_ops.MatrixDiagV2(diagonal=values, k=numbers, num_rows=-1, num_cols=-1,
                                   padding_value=tf.cast(padding, tf.float64))


def floats(x):
    return tf.cast(x, tf.float32)


def lstm(x, state, weights=None):
    """The next state of a cell in one kernel."""
    if weights is None:
        weights = tf.constant(np.random.RandomState(2).randn(7, 12), tf.float32)
    peepholes = tf.zeros([3])
    return tf.raw_ops.LSTMBlockCell(
        x=x, cs_prev=state, h_prev=state, w=weights, wci=peepholes, wcf=peepholes, wco=peepholes,
        b=tf.zeros([12])).h


def lstm_over_time(b, x, steps=3):
    weights, peepholes = tf.fill([7, 12], .1), tf.zeros([3])
    first = floats(b.seq[:, :, 0])
    return tf.raw_ops.BlockLSTM(
        seq_len_max=tf.cast(steps, tf.int64), x=floats(x), cs_prev=first, h_prev=first, w=weights,
        wci=peepholes, wcf=peepholes, wco=peepholes, b=tf.zeros([12])).h


def max_pool_gradient(b, images, gradient=None):
    return tf.raw_ops.MaxPoolGrad(
        orig_input=images, orig_output=images, grad=images if gradient is None else gradient,
        ksize=[1, 1, 1, 1], strides=[1, 1, 1, 1], padding='SAME')


def set_diagonals(matrices, values, number):
    return tf.raw_ops.MatrixSetDiagV2(input=matrices, diagonal=values, k=number)


def parts_of(matrices, numbers, padding):
    """Diagonals of matrices: their first and last number, as TensorFlow 1.15 has it."""
    return tf.raw_ops.MatrixDiagPartV2(input=matrices, k=numbers,
                                       padding_value=tf.cast(padding, tf.float64))


def digit_of(b, begin, length):
    """Some digits of numbers of two digits, one number for each example."""
    return tf.string_to_number(tf.strings.substr(tf.as_string(b.ids + 10), begin, length))


def of_blocks(b, places):
    return tf.gather(tf.reshape(b.seq, [-1, 4]), tf.range(b.n) * 3 + places)


CASES = {
    # ---- entries
    'exp': (lambda b: tf.exp(b.x), EACH),
    'exp_of_mean': (lambda b: tf.exp(b.mean), STATISTIC),
    'plus_weights': (lambda b: b.x + b.w[0], EACH),
    'plus_other_rows': (lambda b: b.x + tf.placeholder_with_default(b.w, [None, 4]), UNKNOWN),
    'minus_mean': (lambda b: b.x - b.mean, STATISTIC),
    'of_two_dimensions': (lambda b: b.x[None] * b.x[:, None], UNKNOWN),
    'cast_of_mean': (lambda b: tf.cast(b.mean, tf.int32), STATISTIC),
    'mean_cast_to_complex': (lambda b: tf.cast(b.mean, tf.complex128), MEAN),
    'mean_of_complex_means': (lambda b: tf.reduce_mean(tf.cast(
        tf.reduce_mean(b.x, 0), tf.complex128)), MEAN),
    'count_cast_to_complex': (
        lambda b: tf.cast(b.total, tf.complex128) / tf.cast(b.n, tf.complex128), MEAN),
    'where': (lambda b: tf.where(b.x > 0, b.x, 2 * b.x), EACH),
    'where_of_rows': (lambda b: tf.where(b.ids > 1, b.x, 2 * b.x), EACH),
    'fake_quantized': (lambda b: tf.quantization.fake_quant_with_min_max_args(
        tf.cast(b.x, tf.float32), -2., 2.), EACH),
    'fake_quantized_by_mean': (lambda b: tf.quantization.fake_quant_with_min_max_vars(
        tf.cast(b.x, tf.float32), -2., tf.cast(b.mean + 2., tf.float32)), STATISTIC),
    'fake_quantized_channels': (
        lambda b: tf.quantization.fake_quant_with_min_max_vars_per_channel(
            tf.cast(b.seq, tf.float32), -tf.ones([4]), tf.ones([4])), EACH),
    'fake_quantized_mean': (lambda b: tf.quantization.fake_quant_with_min_max_args(
        tf.cast(b.mean, tf.float32), -2., 2.), STATISTIC),
    'strings_cut': (lambda b: digit_of(b, 1, 1), EACH),
    'strings_cut_at_places_of_each': (lambda b: digit_of(b, b.ids % 2, tf.ones_like(b.ids)), EACH),
    'shared_string_cut_at_places_of_each': (lambda b: tf.string_to_number(tf.strings.substr(
        ['12345'], b.ids, tf.ones_like(b.ids))), EACH),
    'strings_cut_at_other_places': (lambda b: digit_of(
        b, *[tf.placeholder_with_default([1] * 6, [None]) for _ in range(2)]), UNKNOWN),
    'strings_cut_at_positions': (lambda b: digit_of(b, tf.range(b.n), tf.ones_like(b.ids)), UNKNOWN),
    'strings_cut_at_the_number_of_examples': (lambda b: digit_of(b, b.n - 1, 1), STATISTIC),
    'strings_replaced': (lambda b: tf.string_to_number(tf.strings.regex_replace(
        tf.as_string(b.ids), '2', '7')), EACH),
    'strings_replaced_by_the_number_of_examples': (lambda b: tf.string_to_number(
        tf.strings.regex_replace(tf.as_string(b.ids), '2', tf.as_string(b.n))), STATISTIC),
    'lengths_of_strings': (lambda b: tf.strings.length(tf.as_string(b.ids * 5)), EACH),
    # ---- totals
    'mean_plus_constant': (lambda b: b.mean + b.w[0, 0], MEAN),
    'mean_plus_sum': (lambda b: b.mean + b.total, STATISTIC),
    'sum_over_count': (lambda b: b.total / b.count, MEAN),
    'sum_over_rest': (lambda b: b.total / (b.count - 1), STATISTIC),
    'sum_times_share': (lambda b: b.total * (2. / b.count), MEAN),
    'share': (lambda b: 2. / b.count, SHARE),
    'share_plus_constant': (lambda b: 2. / b.count + b.w[0, 0], STATISTIC),
    'mean_times_count': (lambda b: b.mean * b.count, SUM),
    'mean_times_mean': (lambda b: b.mean * b.mean, STATISTIC),
    'mean_times_sum': (lambda b: b.mean * b.total, STATISTIC),
    'count_over_count': (lambda b: (2 * b.count) / b.count, INDEPENDENT),
    # ---- reductions
    'mean_of_rows': (lambda b: tf.reduce_mean(b.seq, 1), EACH),
    'mean_over_examples': (lambda b: tf.reduce_mean(b.seq, 0), MEAN),
    'sum_over_examples': (lambda b: tf.reduce_sum(b.seq, [0, 2]), SUM),
    'max_over_examples': (lambda b: tf.reduce_max(b.x, 0), STATISTIC),
    'mean_of_ones': (lambda b: tf.reduce_mean(tf.ones_like(b.x)), INDEPENDENT),
    'mean_of_integers': (lambda b: tf.reduce_mean(b.ids), STATISTIC),
    'half_of_squares': (lambda b: tf.nn.l2_loss(b.x), SUM),
    'softmax': (lambda b: tf.nn.softmax(b.x), EACH),
    'softmax_over_examples': (lambda b: tf.nn.softmax(tf.transpose(b.x)), STATISTIC),
    'largest': (lambda b: tf.nn.top_k(b.x, 2)[0], EACH),
    'classes_drawn': (lambda b: tf.multinomial(1e4 * tf.one_hot(b.ids, 4), 2), EACH),
    'classes_drawn_by_mean': (lambda b: tf.multinomial(
        tf.reduce_mean(b.x, 0, keepdims=True), 2), STATISTIC),
    'classes_drawn_over_examples': (lambda b: tf.multinomial(tf.transpose(b.x), 2), UNKNOWN),
    'as_many_classes_drawn_as_examples': (lambda b: tf.multinomial(b.x, b.n), UNKNOWN),
    'classes_drawn_by_a_number_of_each': (lambda b: tf.multinomial(
        b.x, tf.placeholder_with_default(b.ids, None)), UNKNOWN),
    # ---- products
    'matmul': (lambda b: tf.matmul(b.x, b.w), EACH),
    'gram': (lambda b: tf.matmul(b.x, b.x, transpose_a=True), SUM),
    'similarities': (lambda b: tf.matmul(b.x, b.x, transpose_b=True), UNKNOWN),
    'einsum': (lambda b: tf.einsum('bti,ij->btj', b.seq, b.w), EACH),
    'einsum_with_other_rows': (lambda b: tf.einsum(
        'bi,bi->b', b.x, tf.placeholder_with_default(b.w, [None, 4])), UNKNOWN),
    'einsum_on_diagonal': (lambda b: tf.raw_ops.Einsum(inputs=[tf.placeholder_with_default(
        b.x[:, 0], [None])], equation='b->bb'), UNKNOWN),
    'einsum_over_examples': (lambda b: tf.einsum('bti,btj->ij', b.seq, b.seq), SUM),
    'cross': (lambda b: tf.linalg.cross(b.square[:, 0], b.x[:, :3]), EACH),
    'cross_of_means': (lambda b: tf.linalg.cross(
        tf.reduce_mean(b.square[:, 0], 0), tf.reduce_mean(b.x[:, :3], 0)), STATISTIC),
    'cross_of_mean_and_weights': (lambda b: tf.linalg.cross(
        tf.reduce_mean(b.x[:, :3], 0), b.w[0, :3]), MEAN),
    'cross_with_other_rows': (lambda b: tf.linalg.cross(
        b.x[:, :3], tf.placeholder_with_default(b.w[:, :3], [None, 3])), UNKNOWN),
    'cross_over_examples': (lambda b: tf.linalg.cross(*[tf.placeholder_with_default(
        tf.transpose(x[:, :3]), [3, None]) for x in (b.x, b.x * b.x)]), UNKNOWN),
    'solved': (lambda b: tf.linalg.solve(b.square, b.seq), EACH),
    'solved_of_each_by_shared_numbers': (lambda b: tf.linalg.triangular_solve(
        b.square, tf.broadcast_to(b.w[:3], [b.n, 3, 4])), EACH),
    'solved_by_columns': (lambda b: tf.linalg.triangular_solve(b.w, tf.transpose(b.x)), SECOND),
    'solved_by_columns_with_matrix_of_the_shard': (lambda b: tf.linalg.solve(
        tf.reduce_mean(b.square, 0), tf.transpose(b.x[:, :3])), UNKNOWN),
    'solved_for_mean': (lambda b: tf.linalg.triangular_solve(
        b.w, tf.reduce_mean(b.x, 0)[:, None]), MEAN),
    'solved_with_mean': (lambda b: tf.linalg.solve(tf.reduce_mean(b.square, 0), b.w[:3]), STATISTIC),
    'solved_for_sum': (lambda b: tf.linalg.solve(
        b.w, tf.reduce_sum(b.x, 0)[:, None]) / b.count, MEAN),
    'solved_with_other_matrices': (lambda b: tf.linalg.solve(
        tf.placeholder_with_default(np.ones([6, 3, 3]), [None, 3, 3]), b.seq), UNKNOWN),
    'solved_for_examples': (lambda b: tf.linalg.solve(
        tf.placeholder_with_default(np.eye(6), [None, None]), b.x), UNKNOWN),
    'solved_with_matrix_of_examples': (lambda b: tf.linalg.solve(
        tf.placeholder_with_default(b.x, [None, None]), tf.placeholder_with_default(
            b.x, [None, None])), UNKNOWN),
    # ---- recurrent cells
    'lstm_cell': (lambda b: lstm(floats(b.x), floats(b.seq[:, :, 0])), EACH),
    'lstm_cell_from_zeros': (lambda b: lstm(floats(b.x), tf.zeros([b.n, 3])), EACH),
    'lstm_cell_from_other_rows': (lambda b: lstm(
        floats(b.x), tf.placeholder_with_default(np.zeros([6, 3], np.float32), [None, 3])), UNKNOWN),
    'lstm_cell_from_other_examples': (lambda b: lstm(floats(b.x), tf.reshape(
        tf.tile(floats(b.ids)[None], [3, 1]), [-1, 3])), UNKNOWN),
    'lstm_cell_along_examples': (lambda b: lstm(*[tf.placeholder_with_default(
        tf.transpose(floats(x)), [4, None]) for x in (b.x, b.x * b.x)]), UNKNOWN),
    'lstm_cell_with_weights_of_the_shard': (lambda b: lstm(
        floats(b.x), tf.zeros([b.n, 3]), floats(b.mean) * tf.ones([7, 12])), UNKNOWN),
    'lstm_cell_of_mean': (lambda b: lstm(
        floats(tf.reduce_mean(b.x, 0)[None]), tf.zeros([1, 3])), STATISTIC),
    'gru_cell': (lambda b: tf.raw_ops.GRUBlockCell(
        x=floats(b.x), h_prev=floats(b.seq[:, :, 0]), w_ru=tf.ones([7, 6]), w_c=tf.ones([7, 3]),
        b_ru=tf.zeros([6]), b_c=tf.zeros([3])).h, EACH),
    'lstm_over_time': (lambda b: lstm_over_time(b, tf.transpose(b.seq, [1, 0, 2])), SECOND),
    'lstm_over_examples': (lambda b: lstm_over_time(b, b.seq), UNKNOWN),
    'lstm_to_the_longest': (lambda b: lstm_over_time(
        b, tf.transpose(b.seq, [1, 0, 2]), tf.reduce_max(b.ids)), STATISTIC),
    # ---- shapes
    'shape': (lambda b: tf.shape(b.x), sizes_state([Size(0, 1), Size(4)])),
    'twice_and_one': (lambda b: 2 * b.n + 1, sizes_state([Size(1, 2)])),
    'half': (lambda b: b.n // 2, STATISTIC),
    'sizes_gathered': (
        lambda b: tf.gather(tf.shape(b.seq), [2, 0]), sizes_state([Size(4), Size(0, 1)])),
    'sizes_stacked': (lambda b: tf.stack([b.n, 4]), sizes_state([Size(0, 1), Size(4)])),
    'sizes_stacked_in_columns': (lambda b: tf.stack([[b.n, 4], [3, 2]], 1), STATISTIC),
    'sizes_beside_a_mean': (lambda b: tf.stack([b.count, b.mean]), STATISTIC),
    'sizes_joined': (lambda b: tf.concat([[b.n], [4, 2]], 0),
                     sizes_state([Size(0, 1), Size(4), Size(2)])),
    'sizes_unstacked': (lambda b: tf.unstack(tf.shape(b.x))[1], sizes_state([Size(4)])),
    'sizes_sliced': (lambda b: tf.slice(tf.shape(b.seq), [1], [-1]),
                     sizes_state([Size(3), Size(4)])),
    'sizes_in_brackets': (lambda b: tf.shape(b.seq)[:2], sizes_state([Size(0, 1), Size(3)])),
    'last_size': (lambda b: tf.shape(b.x)[-1], sizes_state([Size(4)])),
    'product_of_sizes': (lambda b: tf.reduce_prod(tf.shape(b.x)), sizes_state([Size(0, 4)])),
    'product_of_counts': (lambda b: tf.reduce_prod(tf.stack([b.n, b.n])), STATISTIC),
    'sum_of_sizes': (lambda b: tf.reduce_sum(tf.stack([b.n, b.n])), SUM),
    'number_of_entries': (lambda b: tf.size(b.x), sizes_state([Size(0, 4)])),
    'rank': (lambda b: tf.raw_ops.Rank(input=b.seq), sizes_state([Size(3)])),
    'short_range': (lambda b: tf.range(1, 6, 2) + 0, sizes_state([Size(1), Size(3), Size(5)])),
    'range_of_two_rounds': (lambda b: tf.range(2 * b.n), UNKNOWN),
    'filled_with_count': (lambda b: tf.fill([b.n], b.count), UNKNOWN),
    'filled_with_rank': (lambda b: tf.fill([b.n], tf.raw_ops.Rank(input=b.x)), EACH),
    'ones': (lambda b: tf.ones([2 * b.n, 4]), per_example(0, inner=2)),
    'ones_of_square': (lambda b: tf.ones([b.n, b.n]), UNKNOWN),
    'ones_of_one_more': (lambda b: tf.ones([b.n + 1]), UNKNOWN),
    'rounded_down': (lambda b: tf.reshape(b.x, [b.n * (tf.shape(b.x)[1] // 3), 4]), EACH),
    'rounded_up': (lambda b: tf.reshape(b.x, [b.n * -(-tf.shape(b.x)[1] // 3), 2]),
                   per_example(0, inner=2)),
    'rounded_number_of_examples': (
        lambda b: b.total / tf.cast(b.n // 2, tf.float64), STATISTIC),
    'minus_the_number_of_examples': (
        lambda b: b.total / -tf.cast(-(-b.n), tf.float64), MEAN),
    'broadcast_to_a_hidden_shape': (lambda b: b.x * tf.reduce_sum(tf.broadcast_to(
        b.w[0], tf.placeholder_with_default([3, 4], [None]))), EACH),
    'broadcast_to_a_shape_of_the_shard': (lambda b: tf.reduce_sum(tf.broadcast_to(
        b.w[0], tf.stack([b.n // 2, 4]))), STATISTIC),
    'broadcast': (lambda b: tf.broadcast_to(b.w[0], [b.n, 4]), EACH),
    'broadcast_rows': (lambda b: tf.broadcast_to(
        tf.placeholder_with_default(b.w, [None, 4]), [b.n, 4]), UNKNOWN),
    'repeated_dimensions': (lambda b: repeated_dimensions(b, [1, 4])[1], sizes_state([Size(0)])),
    'dimensions_of_equal_shapes': (
        lambda b: repeated_dimensions(b, tf.shape(b.x))[0], sizes_state([])),
    'dimensions_of_two_lengths': (lambda b: repeated_dimensions(b, [4, 4])[1], UNKNOWN),
    'dimensions_of_any_operation': (lambda b: repeated_dimensions(b, [1, 4])[1] + 1, UNKNOWN),
    'gradient_of_a_row_of_each': (lambda b: gradient(b.seq, b.x[:, None]), EACH),
    'gradient_of_one_row': (lambda b: gradient(b.x, tf.reshape(b.w[0], [b.n // b.n, 4])), SUM),
    'positions_in_an_array': (lambda b: tf.gather(b.x, tf.placeholder_with_default(tf.reshape(
        tf.TensorArray(tf.int32, 2, element_shape=[None], infer_shape=False).write(
            0, tf.range(b.n)).write(1, tf.range(b.n)).stack(), [-1]), [None])), UNKNOWN),
    # ---- layout
    'heads': (lambda b: tf.reshape(b.seq, [-1, 4]), per_example(0, inner=3)),
    'flat': (lambda b: tf.reshape(b.seq, [-1, 12]), EACH),
    'flat_of_transposed': (lambda b: tf.reshape(tf.transpose(b.x), [-1]), per_example(0, outer=4)),
    'rows_of_two_examples': (lambda b: tf.reshape(b.x, [-1, 8]), UNKNOWN),
    'time_major': (lambda b: tf.transpose(b.seq, [1, 0, 2]), SECOND),
    'expanded': (lambda b: b.x[None], SECOND),
    'squeezed': (lambda b: tf.squeeze(b.x[None], [0]), EACH),
    'squeezed_by_length': (lambda b: tf.squeeze(b.x[None]), UNKNOWN),
    'tiled': (lambda b: tf.tile(b.x, [2, 1]), per_example(0, outer=2)),
    'tiled_by_narrow_numbers': (lambda b: tf.tile(b.x, tf.cast(tf.cast(tf.stack(
        [2, tf.placeholder_with_default(1, [])]), tf.bool), tf.int32)), UNKNOWN),
    'tiled_weights': (lambda b: tf.tile(b.w[:1], [b.n, 1]), EACH),
    'tiled_rows': (lambda b: tf.tile(b.w, [b.n, 1]), UNKNOWN),
    'padded': (lambda b: tf.pad(b.x, [[0, 0], [1, 1]]), EACH),
    'padded_examples': (lambda b: tf.pad(b.x, [[1, 0], [0, 0]]), UNKNOWN),
    'padded_with_ones': (
        lambda b: tf.pad(b.x, [[0, 0], [1, 1]], constant_values=1), EACH),
    'padded_examples_with_ones': (
        lambda b: tf.pad(b.x, [[1, 0], [0, 0]], constant_values=1), UNKNOWN),
    'padded_with_mean': (
        lambda b: tf.pad(b.x, [[0, 0], [1, 1]], constant_values=b.mean), UNKNOWN),
    'mean_padded_with_ones': (lambda b: tf.pad(
        tf.reduce_mean(b.x, 0), [[1, 1]], constant_values=1), MEAN),
    'sum_padded_with_ones': (lambda b: tf.pad(
        tf.reduce_sum(b.x, 0), [[1, 1]], constant_values=1) / b.count, STATISTIC),
    'sum_padded_with_given_zeros': (lambda b: tf.raw_ops.PadV2(
        input=tf.reduce_sum(b.x, 0), paddings=[[1, 1]],
        constant_values=tf.constant(0., tf.float64)) / b.count, MEAN),
    'padded_with_mean_by_sum': (lambda b: tf.pad(
        tf.reduce_sum(b.x, 0), [[1, 1]], constant_values=b.mean), UNKNOWN),
    'padded_by_number_of_examples': (lambda b: tf.pad(b.x, [[0, 0], [0, b.n]]), STATISTIC),
    'padded_by_joined_rows': (lambda b: tf.pad(
        b.x, tf.concat([tf.zeros([1, 2], tf.int32), [[0, hidden(2)]]], 0)), EACH),
    'padded_by_rows_of_hidden_number': (lambda b: tf.pad(b.x, tf.concat(
        [tf.placeholder_with_default(np.zeros([1, 2], np.int32), [None, 2]), [[0, 2]]], 0)), UNKNOWN),
    'padded_by_columns': (lambda b: tf.pad(b.x, tf.stack([[0, 0], tf.stack([0, hidden(2)])], 1)),
                          EACH),
    'padded_examples_by_columns': (
        lambda b: tf.pad(b.x, tf.stack([[0, 0], tf.stack([hidden(2), 0])], 1)), UNKNOWN),
    'cumulated': (lambda b: tf.cumsum(b.x, 1), EACH),
    'cumulated_examples': (lambda b: tf.cumsum(b.x, 0), UNKNOWN),
    'inverse': (lambda b: tf.matrix_inverse(b.square), EACH),
    'log_determinant': (lambda b: tf.linalg.slogdet(b.square)[1], EACH),
    'log_determinant_of_mean': (
        lambda b: tf.linalg.slogdet(tf.reduce_mean(b.square, 0))[1], STATISTIC),
    'log_determinant_over_examples': (lambda b: tf.linalg.slogdet(tf.placeholder_with_default(
        tf.transpose(b.square, [1, 0, 2]), [3, None, 3]))[1], UNKNOWN),
    'fourier': (lambda b: tf.signal.fft(complex_of(b.x)), EACH),
    'fourier_of_mean': (lambda b: tf.signal.ifft(tf.reduce_mean(complex_of(b.x), 0)), MEAN),
    'fourier_of_sum': (lambda b: tf.signal.fft(tf.reduce_sum(complex_of(b.x), 0)), SUM),
    'spectrum': (lambda b: tf.abs(tf.signal.fft(complex_of(b.x))) + tf.angle(
        complex_of(b.x)), EACH),
    'magnitude_of_mean': (lambda b: tf.abs(tf.reduce_mean(complex_of(b.x))), STATISTIC),
    'fourier_over_examples': (lambda b: tf.signal.fft(tf.transpose(complex_of(b.x))), UNKNOWN),
    'fourier_time_major': (
        lambda b: tf.signal.ifft(tf.transpose(complex_of(b.seq), [1, 0, 2])), SECOND),
    'fourier_of_images': (lambda b: tf.signal.fft2d(complex_of(b.seq)), EACH),
    'fourier_of_images_over_examples': (
        lambda b: tf.signal.fft2d(tf.transpose(complex_of(b.seq), [1, 0, 2])), UNKNOWN),
    'fourier_of_rows': (
        lambda b: tf.signal.fft(tf.boolean_mask(complex_of(b.x), b.ids > 1)), ROWS),
    'fourier_of_reals': (lambda b: tf.signal.irfft(tf.signal.rfft(
        tf.cast(b.x, tf.float32), [6])), EACH),
    'fourier_of_share': (lambda b: b.total * tf.real(tf.signal.fft(
        tf.cast(b.w[0] / b.count, tf.complex128))), MEAN),
    'spectrum_of_mean': (
        lambda b: tf.abs(tf.signal.fft(tf.reduce_mean(complex_of(b.x), 0))), STATISTIC),
    'short_time_fourier': (lambda b: tf.signal.stft(signal_of(b), 4, 2), EACH),
    'short_time_fourier_padded': (
        lambda b: tf.signal.stft(signal_of(b), 5, 3, 8, pad_end=True), EACH),
    'short_time_fourier_of_examples': (
        lambda b: tf.signal.stft(tf.transpose(signal_of(b)), 4, 2), UNKNOWN),
    'frames_of_examples': (lambda b: tf.signal.frame(b.x, 2, 1, axis=0), UNKNOWN),
    'frames_padded_by_mean': (lambda b: tf.signal.frame(
        b.x, 3, 2, pad_end=True, pad_value=b.mean), UNKNOWN),
    'signal_of_frames': (lambda b: tf.signal.overlap_and_add(b.seq, 2), EACH),
    'signal_of_frames_of_examples': (
        lambda b: tf.signal.overlap_and_add(tf.transpose(b.seq, [1, 0, 2]), 2), UNKNOWN),
    'mean_signal_of_frames': (
        lambda b: tf.signal.overlap_and_add(tf.reduce_mean(b.seq, 0), 2), MEAN),
    'back_from_short_time_fourier': (lambda b: tf.signal.inverse_stft(
        tf.signal.stft(signal_of(b), 4, 2), 4, 2,
        window_fn=tf.signal.inverse_stft_window_fn(2)), EACH),
    'mel_spectrum': (lambda b: tf.tensordot(
        tf.abs(tf.signal.stft(signal_of(b), 4, 2)),
        tf.signal.linear_to_mel_weight_matrix(3, 3, 8000), 1), EACH),
    'fourier_of_reals_of_any_length': (lambda b: tf.signal.rfft(
        tf.cast(b.x, tf.float32), b.n[None]), UNKNOWN),
    'diagonal_matrices': (lambda b: tf.linalg.diag(b.seq), EACH),
    'diagonal_of_examples': (lambda b: tf.linalg.diag(tf.transpose(b.x)), UNKNOWN),
    'diagonal_of_examples_of_hidden_number': (lambda b: tf.linalg.diag(
        tf.placeholder_with_default(tf.transpose(b.x), [4, None])), UNKNOWN),
    'diagonal_of_mean': (lambda b: tf.linalg.diag(tf.reduce_mean(b.x, 0)), MEAN),
    'diagonal_of_sum': (lambda b: tf.linalg.diag(tf.reduce_sum(b.x, 0)), SUM),
    'three_diagonals': (lambda b: diagonals(b.seq, [-1, 1], 1.), EACH),
    'diagonals_of_unknown_number': (lambda b: diagonals(
        b.seq, tf.placeholder_with_default([-1, 1], [2]), 0.), UNKNOWN),
    'three_diagonals_of_mean': (
        lambda b: diagonals(tf.reduce_mean(b.seq, 0), [-1, 1], 2.), MEAN),
    'three_diagonals_of_sum': (lambda b: diagonals(tf.reduce_sum(b.seq, 0), [-1, 1], 0.), SUM),
    'padded_diagonals_of_sum': (
        lambda b: diagonals(tf.reduce_sum(b.seq, 0), [-1, 1], 2.) / b.count, STATISTIC),
    'diagonal_padded_by_mean': (lambda b: diagonals(b.x, 0, b.mean), UNKNOWN),
    'with_diagonal': (lambda b: tf.linalg.set_diag(b.square, b.x[:, :3]), EACH),
    'with_diagonal_of_mean': (lambda b: tf.linalg.set_diag(
        tf.reduce_mean(b.square, 0), tf.reduce_mean(b.x[:, :3], 0)), MEAN),
    'with_shared_diagonal': (lambda b: tf.linalg.set_diag(
        b.square, tf.placeholder_with_default(b.w[:, :3], [None, 3])), UNKNOWN),
    'with_diagonal_of_sum': (lambda b: set_diagonals(
        tf.reduce_sum(b.square, 0), tf.reduce_sum(b.x[:, :3], 0), 0), SUM),
    'mean_with_diagonal_of_a_number_of_the_shard': (lambda b: set_diagonals(
        tf.reduce_mean(b.square, 0), b.w[0, :2], tf.cast(b.mean > 0, tf.int32)), STATISTIC),
    'with_diagonal_of_a_number_of_each': (lambda b: set_diagonals(
        tf.ones([2, 3, 3], tf.float64), b.w[:2, :2], b.ids), UNKNOWN),
    'diagonal': (lambda b: tf.linalg.diag_part(b.square), EACH),
    'trace_of_mean': (lambda b: tf.linalg.trace(tf.reduce_mean(b.square, 0)), MEAN),
    'trace_of_sum': (lambda b: tf.linalg.trace(tf.reduce_sum(b.square, 0)), SUM),
    'trace_over_count': (lambda b: tf.linalg.trace(tf.reduce_sum(b.square, 0)) / b.count, MEAN),
    'diagonal_over_examples': (lambda b: tf.linalg.diag_part(tf.placeholder_with_default(
        tf.transpose(b.square, [1, 0, 2]), [3, None, 3])), UNKNOWN),
    'two_diagonals': (lambda b: parts_of(b.square, [0, 1], 2.), EACH),
    'two_diagonals_of_mean': (lambda b: parts_of(tf.reduce_mean(b.square, 0), [0, 1], 2.), MEAN),
    'two_diagonals_of_sum': (lambda b: parts_of(
        tf.reduce_sum(b.square, 0), [0, 1], 0.) / b.count, MEAN),
    'two_padded_diagonals_of_sum': (lambda b: parts_of(
        tf.reduce_sum(b.square, 0), [0, 1], 2.) / b.count, STATISTIC),
    'two_diagonals_padded_by_mean': (lambda b: parts_of(b.square, [0, 1], b.mean), UNKNOWN),
    'diagonal_of_a_number_of_each': (lambda b: parts_of(b.square, b.ids, 0.), UNKNOWN),
    # ---- slices
    'column': (lambda b: b.seq[:, 1], EACH),
    'reversed_columns': (lambda b: b.x[:, ::-1], EACH),
    'reversed_examples': (lambda b: b.x[::-1], UNKNOWN),
    'but_the_first': (lambda b: b.x[1:], UNKNOWN),
    'first_example': (lambda b: b.x[0], UNKNOWN),
    'dotted': (lambda b: b.seq[..., None, 1], EACH),
    'dotted_time_major': (lambda b: tf.transpose(b.seq, [1, 0, 2])[..., 0], SECOND),
    'with_new_axis': (lambda b: b.x[None, ..., 1:], SECOND),
    'to_the_last_example': (lambda b: b.x[:b.n], EACH),
    'to_the_last_example_and_column': (
        lambda b: tf.strided_slice(b.x, tf.zeros([2], tf.int32), tf.stack([b.n, 3])), EACH),
    'to_the_last_row': (lambda b: tf.reshape(b.seq, [-1, 4])[:3 * b.n], per_example(0, inner=3)),
    'to_the_last_of_other_rows': (lambda b: tf.reshape(b.seq, [-1, 4])[:b.n], UNKNOWN),
    'to_the_last_of_mask': (lambda b: tf.boolean_mask(b.x, b.ids > 1)[:b.n], UNKNOWN),
    'to_the_last_but_one': (lambda b: b.x[:b.n - 1], UNKNOWN),
    'every_second_to_the_last': (lambda b: b.x[:b.n:2], UNKNOWN),
    'as_many_columns_as_examples': (lambda b: b.x[:, :b.n], UNKNOWN),
    'as_many_columns_of_all_examples': (lambda b: b.x[:b.n, :b.n], UNKNOWN),
    'columns_from_the_number_of_examples': (lambda b: b.x[:, b.n:], UNKNOWN),
    'steps_of_the_number_of_examples': (lambda b: b.x[:, ::b.n], UNKNOWN),
    'as_many_columns_as_examples_time_major': (lambda b: tf.transpose(b.x)[:b.n], UNKNOWN),
    'slice': (lambda b: tf.slice(b.x, [0, 1], [-1, 2]), EACH),
    # ---- joining
    'unstacked': (lambda b: tf.unstack(b.seq, axis=1)[1], EACH),
    'split': (lambda b: tf.split(b.x, 2, 1)[0], EACH),
    'split_examples': (lambda b: tf.split(b.x, 2, 0)[0], UNKNOWN),
    'split_sizes': (lambda b: tf.reshape(b.seq, tf.concat(
        [tf.split(tf.shape(b.seq), [1, -1])[0], [12]], 0)), EACH),
    'split_sizes_behind_examples': (lambda b: tf.reshape(b.seq, tf.concat(
        [[-1], tf.split(tf.shape(b.seq), [1, 1, 1])[2]], 0)), per_example(0, inner=3)),
    'equal_parts_of_sizes': (lambda b: tf.reshape(
        b.x, tf.concat([[2, 2], tf.split(tf.shape(b.x), 2)[0]], 0)), UNKNOWN),
    'equal_parts_of_sizes_in_order': (lambda b: tf.reshape(
        b.x, tf.concat([tf.split(tf.shape(b.x), 2)[0], [2, 2]], 0)), EACH),
    'split_rounds': (lambda b: tf.split(tf.concat([b.x, 2 * b.x], 0), 2, 0)[1], EACH),
    'beside': (lambda b: tf.concat([b.x, 2 * b.x], 1), EACH),
    'beside_other_rows': (lambda b: tf.concat(
        [b.x, tf.placeholder_with_default(b.w, [None, 4])], 1), UNKNOWN),
    'rounds': (lambda b: tf.concat([b.x, 2 * b.x], 0), per_example(0, outer=2)),
    'with_other_rows': (lambda b: tf.concat([b.x, b.w], 0), UNKNOWN),
    'stacked': (lambda b: tf.stack([b.x, 2 * b.x], 0), SECOND),
    # ---- gathers, rows
    'embedded': (lambda b: tf.gather(b.w, b.ids), EACH),
    'columns_of_examples': (lambda b: tf.gather(b.x, [2, 0], axis=1), EACH),
    'examples_by_index': (lambda b: tf.gather(b.x, b.ids), UNKNOWN),
    'all_by_position': (lambda b: tf.gather(b.x, tf.range(b.n)), EACH),
    'entry_of_each': (lambda b: tf.gather_nd(b.x, tf.stack([tf.range(b.n), b.ids], 1)), EACH),
    'one_hot': (lambda b: tf.one_hot(b.ids, 4), EACH),
    'rows_of_mask': (lambda b: tf.boolean_mask(b.x, b.ids > 1), ROWS),
    'sum_of_rows_of_mask': (lambda b: tf.reduce_sum(tf.boolean_mask(b.x, b.ids > 1)), SUM),
    'mean_of_rows_of_mask': (lambda b: tf.reduce_mean(tf.boolean_mask(b.x, b.ids > 1)), STATISTIC),
    'rows_of_one_mask_twice': (lambda b: of_one_mask(b.ids > 1, b.x, b.seq[:, 0]), ROWS),
    'rows_of_two_masks': (lambda b: tf.boolean_mask(b.x, b.ids > 1) + tf.boolean_mask(
        b.x, b.ids > 2), UNKNOWN),
    'rows_summed_by_class': (lambda b: tf.math.unsorted_segment_sum(b.x, b.ids, 4), SUM),
    'rows_summed_by_class_of_others': (lambda b: tf.math.unsorted_segment_sum(
        tf.boolean_mask(b.x, b.ids > 1), tf.boolean_mask(b.ids, b.ids < 2), 4), UNKNOWN),
    'rows_summed_by_as_many_classes': (lambda b: tf.math.unsorted_segment_sum(
        b.x, b.ids, b.n), UNKNOWN),
    'largest_by_class': (lambda b: tf.math.unsorted_segment_max(b.x, b.ids, 4), UNKNOWN),
    'confusion_matrix': (lambda b: tf.math.confusion_matrix(
        b.ids, tf.argmax(b.x, 1), 4, dtype=tf.float64), SUM),
    'counts_by_class': (lambda b: tf.scatter_nd(
        b.ids[:, None], tf.ones([b.n], tf.float64), [4]), SUM),
    'places_of_columns': (lambda b: tf.scatter_nd(
        tf.tile(b.ids[None], [4, 1])[:, :, None], tf.transpose(b.x), [4]), UNKNOWN),
    'row_of_each_block': (lambda b: of_blocks(b, tf.argmax(
        b.seq[:, :, 0], 1, output_type=tf.int32)), EACH),
    'row_of_each_block_of_wide_numbers': (lambda b: of_blocks(b, tf.cast(tf.argmax(
        b.seq[:, :, 0], 1), tf.int32)), EACH),
    'row_of_each_block_of_narrow_numbers': (lambda b: tf.gather(
        tf.reshape(b.seq, [-1, 4]), tf.cast(tf.cast(tf.range(b.n), tf.int8) * 3, tf.int32) +
        tf.argmax(b.seq[:, :, 0], 1, output_type=tf.int32)), UNKNOWN),
    'row_at_any_place': (lambda b: of_blocks(b, b.ids), UNKNOWN),
    'columns_by_number': (columns_by_number, UNKNOWN),
    'ctc': (lambda b: ctc_losses(b, tf.fill([b.n], 3)), EACH),
    'ctc_by_number': (lambda b: ctc_losses(b, tf.range(b.n)), UNKNOWN),
    'sum_of_sparse_rows': (lambda b: tf.sparse.reduce_sum(sparse(b), 1), EACH),
    'sum_of_sparse_columns': (lambda b: tf.sparse.reduce_sum(sparse(b), -2), SUM),
    'sum_of_all_sparse': (lambda b: tf.sparse.reduce_sum(sparse(b)), SUM),
    'sum_of_sparse_dimension': (lambda b: tf.sparse.reduce_sum(
        sparse(b), tf.placeholder_with_default(1, [])), UNKNOWN),
    'sum_of_sparse_of_two_masks': (lambda b: tf.sparse.reduce_sum(
        tf.SparseTensor(sparse(b).indices, tf.boolean_mask(b.x, b.x > 1), sparse(b).dense_shape),
        1), UNKNOWN),
    'shared_sparse_matrix': (lambda b: tf.matmul(b.x, tf.sparse.to_dense(tf.SparseTensor(
        [[0, 1], [2, 3]], b.w[0, :2], [4, 4]))), EACH),
    'sparse_matrix_of_means': (lambda b: tf.sparse.to_dense(tf.SparseTensor(
        [[0, 1], [2, 3]], tf.reduce_mean(b.x[:, :2], 0), [4, 4])), STATISTIC),
    'looked_up': (lambda b: looked_up(b, True), EACH),
    'looked_up_once': (lambda b: looked_up_once(b.w, b.ids), EACH),
    'looked_up_once_of_mask': (lambda b: looked_up_once(b.w, tf.boolean_mask(b.ids, b.ids > 1)), ROWS),
    'looked_up_by_narrow_numbers': (
        lambda b: looked_up_once(b.w, b.ids, narrow=tf.int8), UNKNOWN),
    'looked_up_in_examples': (lambda b: looked_up_once(b.x, b.ids), UNKNOWN),
    'looked_up_without_all_rows': (lambda b: looked_up(b, False), UNKNOWN),
    # ---- images
    'pooled': (lambda b: tf.nn.max_pool(b.image, 2, 2, 'SAME'), EACH),
    'gradient_of_mean_pooling': (lambda b: tf.gradients(
        tf.square(tf.nn.avg_pool(b.image, 2, 2, 'SAME')), b.image)[0], EACH),
    'gradient_of_mean_pooling_of_frames': (lambda b: tf.gradients(
        tf.square(tf.nn.avg_pool3d(floats(b.image[..., None]), 2, 2, 'SAME')), b.image)[0], EACH),
    'gradient_of_mean_pooling_of_features': (lambda b: tf.gradients(
        tf.square(tf.nn.avg_pool(b.x[None, :, :, None], 2, 2, 'SAME')), b.x)[0], UNKNOWN),
    'gradient_of_mean_pooling_of_a_number': (lambda b: tf.raw_ops.AvgPoolGrad(
        orig_input_shape=tf.stack([b.n, 4, 4, b.n // 3]), grad=b.image, ksize=[1, 1, 1, 1],
        strides=[1, 1, 1, 1], padding='SAME'), STATISTIC),
    'gradient_of_max_pooling': (lambda b: tf.gradients(
        tf.square(tf.nn.max_pool(b.image, 2, 2, 'SAME')), b.image)[0], EACH),
    'gradient_of_max_pooling_of_frames': (lambda b: tf.gradients(tf.square(tf.nn.max_pool3d(
        floats(b.image[..., None]), 2, 2, 'SAME')), b.image)[0], EACH),
    'gradient_of_max_pooling_of_features': (lambda b: max_pool_gradient(b, b.x[None, :, :, None]),
                                            UNKNOWN),
    'gradient_of_max_pooling_of_others': (lambda b: max_pool_gradient(
        b, b.image, tf.placeholder_with_default(np.ones([6, 4, 4, 3]), [None, 4, 4, 3])), UNKNOWN),
    'gradient_of_max_pooling_by_a_mean': (lambda b: tf.raw_ops.MaxPoolGradV2(
        orig_input=b.image, orig_output=b.image, grad=b.image, strides=[1, 1, 1, 1],
        ksize=tf.cast(tf.reduce_mean(b.image, [0, 1, 2, 3]), tf.int32) * [0, 0, 0, 0] + 1,
        padding='SAME'), STATISTIC),
    'blocks': (lambda b: tf.space_to_batch_nd(b.image, [2, 2], [[0, 0], [0, 0]]),
               per_example(0, outer=4)),
    'blocks_together': (lambda b: tf.batch_to_space_nd(tf.space_to_batch_nd(
        b.image, [2, 2], [[0, 0], [0, 0]]), [2, 2], [[0, 0], [0, 0]]), EACH),
    'sequences_reversed': (lambda b: tf.reverse_sequence(b.seq, b.ids % 4, seq_axis=1), EACH),
    # ---- loops
    'elements_that_a_mask_leaves': (lambda b: elements(b).gather(
        tf.squeeze(tf.cast(tf.where(b.ids > 1), tf.int32), [1])), UNKNOWN),
    'mapped': (lambda b: tf.map_fn(lambda e: e * 2, b.x), EACH),
    'mapped_of_all': (lambda b: tf.map_fn(lambda e: e * b.mean, b.x), STATISTIC),
    'scanned': (lambda b: tf.scan(lambda state, e: state + e, b.x), UNKNOWN),
    'looped': (lambda b: tf.while_loop(
        lambda i, h: i < 3, lambda i, h: (i + 1, tf.tanh(h)), [0, b.x])[1], EACH),
    'looped_to_count': (lambda b: tf.while_loop(
        lambda i, h: i < b.n, lambda i, h: (i + 1, tf.tanh(h)), [0, b.w])[1], UNKNOWN),
    'each_by_its_number': (each_by_its_number, EACH),
    'kept_to_the_longest': (lambda b: to_the_longest(b, lambda t, h: tf.where(
        t >= b.ids, h, tf.tanh(h + b.x))), EACH),
    'changed_to_the_longest': (lambda b: to_the_longest(
        b, lambda t, h: tf.tanh(h + b.x)), STATISTIC),
    'zeros_to_the_longest': (lambda b: outputs_to_the_longest(b, tf.zeros_like(b.x)), SECOND),
    'others_to_the_longest': (lambda b: outputs_to_the_longest(b, b.x), STATISTIC),
    'branch': (lambda b: tf.cond(b.w[0, 0] > 0, lambda: b.x, lambda: 2 * b.x), EACH),
    'branch_by_mean': (lambda b: tf.cond(b.mean > 0, lambda: b.x, lambda: 2 * b.x), STATISTIC),
}


def together(state, parts):
    """The numbers of the batch by those of shards of some sizes: `parts` is [(size, array)]."""
    if state.kind is Kind.MEAN:
        return sum(size * part for size, part in parts) / EXAMPLES
    if state.kind is Kind.SUM:
        return sum(part for _, part in parts)
    if state.kind is Kind.PER_EXAMPLE:
        blocks = []
        for size, part in parts:  # [..., outer, size, inner, ...]
            shape = part.shape[:state.axis] + (state.outer, size, state.inner) + part.shape[
                state.axis + 1:]
            blocks.append(part.reshape(shape))
        joined = np.concatenate(blocks, state.axis + 1)
        whole = parts[0][1].shape
        return joined.reshape(whole[:state.axis] + (-1,) + whole[state.axis + 1:])
    if state.kind is Kind.ROWS:
        return np.concatenate([part for _, part in parts], state.axis)
    return parts[0][1]


def is_as_expected(state, expected):
    if expected == STATISTIC:
        return bool(state.shard_statistics) and state.kind is not Kind.UNKNOWN
    if expected is UNKNOWN:
        return state.kind is Kind.UNKNOWN
    if state.shard_statistics or state.kind is not expected.kind:
        return False
    return expected.layout == state._replace(selection='').layout and expected.sizes == state.sizes


# Programs of a hundred operations and more, by rules that shorter cases have.
LONG = ('short_time_fourier_padded', 'short_time_fourier_of_examples',
        'signal_of_frames_of_examples', 'back_from_short_time_fourier', 'mel_spectrum')


@pytest.mark.parametrize('version, names', [
    ('v1', [name for name in CASES if name not in LONG]),
    pytest.param('v1', list(CASES), marks=pytest.mark.slow),
    pytest.param('v2', list(CASES), marks=pytest.mark.slow)], ids=['v1 short', 'v1', 'v2'])
def test_rules_by_examples(version, names):
    was_v2 = tf.control_flow_v2_enabled()
    (tf.enable_control_flow_v2 if version == 'v2' else tf.disable_control_flow_v2)()
    try:
        batch = Batch()
        tensors = {}
        for name in names:
            with tf.name_scope(name):
                tensors[name] = tf.convert_to_tensor(CASES[name][0](batch))
    finally:
        (tf.enable_control_flow_v2 if was_v2 else tf.disable_control_flow_v2)()
    operations = tf.get_default_graph().get_operations()
    analysis = analyse(operations, batch.inputs, list(tensors.values()))
    states = {name: analysis.state(tensor) for name, tensor in tensors.items()}
    wrong = {name: state for name, state in states.items()
             if not is_as_expected(state, CASES[name][1])}
    assert wrong == {}

    proven = {name: tensors[name] for name, state in states.items() if not (
        state.shard_statistics or state.kind in (Kind.UNKNOWN, Kind.SHARE, Kind.SIZES))}
    values = batch.values()
    with tf.Session() as session:
        def run(begin, end):
            return session.run(proven, {
                tensor: value[begin:end] for tensor, value in zip(batch.inputs, values)})
        whole, first, rest = run(0, EXAMPLES), run(0, SPLIT), run(SPLIT, EXAMPLES)
    for name in proven:
        parts = [(SPLIT, first[name]), (EXAMPLES - SPLIT, rest[name])]
        # Some kernels are for float32 alone. A product of matrices rounds by their sizes.
        rounding = {'rtol': 1e-5, 'atol': 1e-6} if whole[name].dtype == np.float32 else {'rtol': 1e-9}
        np.testing.assert_allclose(
            whole[name], together(states[name], parts), err_msg=name, **rounding)


def test_the_state_of_an_iteration_is_one_example():
    x = tf.placeholder(tf.float32, [None, 4])
    inside = []
    was_v2 = tf.control_flow_v2_enabled()
    tf.disable_control_flow_v2()
    try:
        def count(e):
            # As many ones as the example has entries above 0: they are no other example's.
            inside.extend([tf.exp(e), tf.ones_like(tf.boolean_mask(e, e > 0))])
            return tf.reduce_sum(inside[1])
        mapped = tf.map_fn(count, x)
    finally:
        if was_v2:
            tf.enable_control_flow_v2()
    analysis = analyse(tf.get_default_graph().get_operations(), x, [mapped, inside[0]])
    assert [analysis.state(tensor).kind for tensor in inside] == [ONE_EXAMPLE.kind] * 2
