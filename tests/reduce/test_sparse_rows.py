"""Sparse gradients row by row: which lookups have each row once, and sums that keep it so."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.gradients import gradient_pairs

IDS = np.array([[0, 1], [1, 1], [2, 0], [1, 2], [0, 1], [1, 1], [2, 0], [1, 2]])
TARGETS = np.arange(8.)[:, None]


def run(nest):
    with tf.Session(config=towers.session_config(2)) as session:
        session.run(tf.global_variables_initializer())
        return session.run(nest)


def in_pieces(ids, in_piece, pieces):
    """The places, in the first piece, of the ids that are there."""
    return tf.dynamic_partition(ids // in_piece, ids % pieces, pieces)[0]


def in_uneven_pieces(ids, in_small, in_small_of_places):
    """The places, in the first piece, of the ids that are there: it has one id more than others."""
    in_small, places_in_small, large = map(tf.constant, (in_small, in_small_of_places, 1))
    piece = tf.maximum(ids // (in_small + 1), (ids - large) // in_small)
    place = tf.where(piece < large, ids % (places_in_small + 1), (ids - large) % in_small)
    return tf.dynamic_partition(place, piece, 2)[0]


def looked_up(ids, strategy):
    """The rows that a lookup takes from the first of two pieces of a table."""
    table = [tf.get_variable('first', [2, 1]), tf.get_variable('second', [1, 1])]
    found = tf.nn.embedding_lookup(table, ids, partition_strategy=strategy)
    return tf.gradients(found, table)[0].indices


@pytest.mark.parametrize('make, is_unique', [
    (lambda ids: tf.unique(ids)[0], True),
    (lambda ids: tf.reshape(tf.cast(tf.unique(ids)[0], tf.int64), [-1]), True),
    (lambda ids: tf.unique(ids)[1], False),  # places, which repeat
    (lambda ids: tf.unique_with_counts(ids)[0], True),
    (lambda ids: tf.unique_with_counts(ids)[2], False),  # how often each is there
    (lambda ids: tf.raw_ops.UniqueV2(x=ids, axis=[0])[0], True),
    (lambda ids: tf.raw_ops.UniqueWithCountsV2(x=ids, axis=[0])[0], True),
    (lambda ids: ids, False),
    (lambda ids: tf.range(tf.shape(ids)[0]), True),
    (lambda ids: tf.reshape(tf.constant([[3, 1], [0, 2]]), [-1]), True),
    (lambda ids: tf.tile(tf.range(3), [2]), False),
    (lambda ids: in_pieces(tf.unique(ids)[0], 2, 2), True),
    (lambda ids: in_pieces(ids, 2, 2), False),
    (lambda ids: in_pieces(tf.unique(ids)[0], 2, 3), False),  # 0 and 3 have one place in piece 0
    (lambda ids: tf.dynamic_partition(tf.unique(ids)[0] // 2, ids, 3)[1], False),
    (lambda ids: in_uneven_pieces(tf.unique(ids)[0], 3, 3), True),
    (lambda ids: in_uneven_pieces(tf.unique(ids)[0], 3, 1), False),  # 0 and 2 have one place
    (lambda ids: looked_up(tf.unique(ids)[0], 'mod'), True),
    (lambda ids: looked_up(tf.unique(ids)[0], 'div'), True),
    (lambda ids: looked_up(ids, 'div'), False),
    (lambda ids: tf.unique(ids)[0] // 2, False)])
def test_which_indices_are_of_different_rows(make, is_unique):
    lookup, = gradient_pairs.lookups_of(
        tf.IndexedSlices(tf.ones([1]), make(tf.constant([1, 1, 2]))))
    assert lookup.is_unique == is_unique


def test_towers_with_other_numbers_of_lookups_keep_all_their_rows():
    """One tower has one lookup that takes each row once, the other one such and one more."""
    table = tf.get_variable('table', [4, 1], initializer=tf.zeros_initializer())
    once = tf.unique(tf.constant([2, 0, 2]))[0]
    one = tf.IndexedSlices(tf.constant([[1.], [2.]]), once)
    two = tf.IndexedSlices(tf.constant([[4.], [8.], [16.], [32.]]),
                           tf.concat([once, tf.constant([3, 3])], 0))
    for towers_ in ([one, two], [two, one]):
        (total, _), = towers.combine_gradients([[(each, table)] for each in towers_])
        np.testing.assert_array_equal(
            run(tf.unsorted_segment_sum(total.values, total.indices, 4)),
            [[10.], [0.], [5.], [48.]])


def lookup(ids, table, kind):
    """What a model takes of a table for its ids [n, 2]: [n, 3]."""
    places = tf.where(tf.greater_equal(ids, 0))

    def sparse(ids):
        return tf.SparseTensor(places, tf.gather_nd(ids, places), tf.shape(ids, out_type=tf.int64))
    if kind == 'weighted':
        weights = tf.SparseTensor(places, tf.cast(sparse(ids).values + 1, tf.float64),
                                  sparse(ids).dense_shape)
        return tf.nn.embedding_lookup_sparse(table, sparse(ids), weights, combiner='sum')
    found = tf.nn.embedding_lookup_sparse(table, sparse(ids), None, combiner='mean',
                                          partition_strategy='div' if kind != 'mod' else 'mod')
    if kind == 'twice':
        found += tf.nn.embedding_lookup_sparse(table, sparse(ids + 1), None, combiner='sqrtn')
    if kind == 'and gather':
        found *= tf.nn.embedding_lookup(table, ids[:, 0])
    return found


def by_place(ids, table, kind):
    """What a model takes of a table for the two places of its ids [n, 2]: [n, 3]."""
    places = tf.constant([3, 1]) if kind == 'two places' else tf.range(tf.shape(ids)[1])
    found = tf.nn.embedding_lookup(table, places)
    return tf.reduce_sum(tf.cast(ids, tf.float64)[:, :, None] * found, 1)


FOUR_TOWERS, ACCUMULATED = {'num_towers': 4}, {'num_towers': 2,
                                               'memory': towers.Memory(accumulate=2)}


@pytest.mark.parametrize('kind, parts, options', [
    ('and gather', 1, FOUR_TOWERS)] + [
        pytest.param(*case, marks=pytest.mark.slow) for case in [
            ('twice', 1, FOUR_TOWERS), ('mod', 2, FOUR_TOWERS), ('weighted', 2, ACCUMULATED),
            ('two places', 1, FOUR_TOWERS), ('places', 2, ACCUMULATED)]])
def test_a_norm_of_sparse_gradients_is_that_of_one_device(kind, parts, options):
    def model_fn(ids, targets):
        table = tf.get_variable('table', [7, 3], tf.float64, tf.random_normal_initializer(seed=1),
                                partitioner=tf.fixed_size_partitioner(parts) if parts > 1 else None)
        found = (by_place if 'places' in kind else lookup)(ids, table, kind)
        return tf.reduce_mean(tf.square(tf.reduce_sum(found, 1, keepdims=True) - targets))

    def clip(pairs):
        clipped, _ = tf.clip_by_global_norm([gradient for gradient, _ in pairs], 0.1)
        return [(gradient, variable) for gradient, (_, variable) in zip(clipped, pairs)]
    report = towers.check_towers(
        model_fn, (IDS, TARGETS), lambda: towers.Objective(
            tf.train.GradientDescentOptimizer(0.1), transform_gradients=clip), steps=2, **options)
    assert report.equal, report


def test_rows_of_a_plain_gather_repeat_as_on_one_device():
    def model_fn(ids):
        table = tf.get_variable('table', [7, 3], tf.float64, tf.ones_initializer())
        return tf.reduce_mean(tf.gather(table, ids))
    built = towers.build_towers(model_fn, tf.constant(IDS), tf.train.GradientDescentOptimizer(0.1),
                                2, 'mean')
    assert run(built.gradients[0][0].indices).tolist() == IDS.ravel().tolist()
