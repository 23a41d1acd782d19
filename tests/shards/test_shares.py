"""Batches that are cut by `shares`, or by the caller: one device's numbers, whatever the parts."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from case_marks import first_fast

import towers

X = np.random.RandomState(0).randn(16, 3)
Y = np.random.RandomState(1).rand(16)


def model(x, y):
    """A loss over the examples that count, behind a batch norm."""
    hidden = tf.matmul(x, tf.get_variable(
        'w', [3, 2], tf.float64, tf.constant_initializer(np.arange(6).reshape(3, 2) / 10)))
    mean, variance = tf.nn.moments(hidden, [0])
    hidden = tf.nn.batch_normalization(hidden, mean, variance, None, None, 1e-3)
    counted = tf.cast(y > .4, tf.float64)
    total = tf.reduce_sum(counted * tf.square(tf.reduce_sum(hidden ** 3, 1) - y))
    return towers.batch_sum(total) / towers.batch_sum(tf.reduce_sum(counted))


def weights_after_three_steps(train_op, session, feed=None):
    session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
    for _ in range(3):
        session.run(train_op, feed)
    return session.run(tf.trainable_variables()[-1])


def one_device(count=16):
    with tf.Graph().as_default(), tf.Session() as session:
        loss = model(tf.constant(X[:count]), tf.constant(Y[:count]))
        train_op = tf.train.MomentumOptimizer(.1, .9).minimize(loss)
        return weights_after_three_steps(train_op, session)


def on_towers(inputs, num_towers, feed=None, **options):
    built = towers.build_towers(model, inputs, tf.train.MomentumOptimizer(.1, .9), num_towers,
                                'mean', **dict(dict(batch_norm='sync'), **options))
    with tf.Session(config=towers.session_config(built.devices)) as session:
        return weights_after_three_steps(built.train_op, session, feed), built


@pytest.mark.parametrize('shares, options, sizes', first_fast(1, [
    ([5, 3, 2], {'remainder': 'weight'}, [9, 4, 3]),
    ([3, 1], {}, [12, 4]),
    ([6, 2], {'variables': towers.VariablePlacement('replicated')}, [12, 4]),
    ([3, 1], {'copies': 'reuse'}, [12, 4])]))
def test_a_batch_is_cut_by_the_shares_and_its_numbers_are_those_of_one_device(
        shares, options, sizes):
    weights, built = on_towers((tf.constant(X), tf.constant(Y)), len(shares), shares=shares,
                               **options)
    assert [tower.size for tower in built.towers] == sizes
    np.testing.assert_allclose(weights, one_device(), rtol=0, atol=1e-13)
    assert 'batch 16 = ' + ' + '.join(map(str, sizes)) in str(built.plan)


@pytest.mark.slow
def test_a_batch_of_any_size_is_cut_by_the_shares():
    inputs = tf.placeholder(tf.float64, [None, 3]), tf.placeholder(tf.float64, [None])
    weights, built = on_towers(inputs, 2, dict(zip(inputs, (X, Y))), shares=[3, 2],
                               remainder='drop')
    np.testing.assert_allclose(weights, one_device(15), rtol=0, atol=1e-13)
    assert 'shares 3 : 2' in str(built.plan)
    with tf.Session(config=towers.session_config(built.devices)) as session:
        assert session.run([tower.size for tower in built.towers],
                           dict(zip(inputs, (X, Y)))) == [9, 6]


def test_micro_batches_are_of_a_towers_share():
    def mean(x):
        w = tf.get_variable('w', [3], tf.float64, tf.zeros_initializer())
        return tf.reduce_mean(tf.square(tf.reduce_sum(x * w, 1) - 1.))
    built = towers.build_towers(mean, tf.constant(X), tf.train.GradientDescentOptimizer(1.), 2,
                                'mean', memory=towers.Memory(accumulate=2), shares=[3, 1])
    assert [part.size for part in built.towers] == [6, 6, 2, 2]
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run(tf.global_variables_initializer())
        session.run(built.train_op)
        np.testing.assert_allclose(session.run(built.variables[0]), 2. * X.mean(0), atol=1e-13)


@pytest.mark.parametrize('shares', [[3], [3, 0], '31', [True, 1]])
def test_shares_that_are_none(shares):
    with pytest.raises(towers.InvalidArgumentError, match='^shares=.* for 2 towers: expected a '
                                                          'list with a whole number of at least 1'):
        on_towers((tf.constant(X), tf.constant(Y)), 2, shares=shares)


@pytest.mark.slow
def test_batches_that_the_caller_has_cut():
    parts = [(tf.constant(X[:9]), Y[:9]), (tf.constant(X[9:]), Y[9:])]
    weights, built = on_towers(towers.Shards(parts), 2)
    assert [tower.size for tower in built.towers] == [9, 7]
    np.testing.assert_allclose(weights, one_device(), rtol=0, atol=1e-13)


def test_each_tower_takes_its_own_batch_of_any_size_from_a_queue():
    queue = tf.FIFOQueue(9, [tf.float64, tf.float64])
    feed = tf.placeholder(tf.float64, [None, 3]), tf.placeholder(tf.float64, [None])
    enqueue = queue.enqueue(feed)
    parts = [queue.dequeue() for _ in range(2)]
    for x, y in parts:
        x.set_shape([None, 3])
        y.set_shape([None])
    built = towers.build_towers(
        lambda x, y: tf.reduce_mean(tf.square(tf.reduce_sum(x * tf.get_variable(
            'w', [3], tf.float64, tf.ones_initializer()), 1) - y)),
        towers.Shards(parts), tf.train.GradientDescentOptimizer(.125), 2, 'mean')
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run(tf.global_variables_initializer())
        for first, last in ((0, 5), (5, 16)):
            session.run(enqueue, dict(zip(feed, (X[first:last], Y[first:last]))))
        loss, _ = session.run([built.loss, built.train_op])
        error = X.sum(1) - Y
        np.testing.assert_allclose(loss, np.mean(error ** 2), rtol=1e-13)
        np.testing.assert_allclose(session.run(built.variables[0]),
                                   1. - .25 * (error[:, None] * X).mean(0), rtol=1e-13)


def test_a_shard_without_an_example_is_named_when_the_step_runs():
    parts = [tf.placeholder(tf.float64, [None, 3]) for _ in range(2)]
    built = towers.build_towers(lambda x: tf.reduce_mean(x * tf.get_variable(
        'w', [3], tf.float64)), towers.Shards(parts), tf.train.GradientDescentOptimizer(1.), 2)
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run(tf.global_variables_initializer())
        with pytest.raises(tf.errors.InvalidArgumentError, match='shard 1 of Shards has no exam'):
            session.run(built.train_op, dict(zip(parts, (X, X[:0]))))


def test_the_largest_batch_is_a_multiple_of_the_sum_of_the_shares():
    built = towers.build_towers(
        lambda x: tf.reduce_mean(x * tf.get_variable('w', [3], tf.float64)),
        tf.placeholder(tf.float64, [None, 3]), tf.train.GradientDescentOptimizer(1.), 2,
        shares=[3, 1])
    fitted = towers.largest_batch(built, 10 ** 9, most=15)
    assert (fitted.batch_size, fitted.per_tower) == (12, 9)


@pytest.mark.slow
def test_shards_that_are_no_shards_of_a_build():
    x = tf.constant(X)
    looked_up = tf.gather(tf.get_variable('embedding', [9, 3], tf.float64), [1, 2])
    for parts, count, options, message in (
            ([x], 2, {}, 'the inputs of 1 towers, and there are 2 devices'),
            ([x, (x, x)], 2, {}, 'shard 1 has another structure than shard 0'),
            ([x, tf.constant(X, tf.float32)], 2, {}, 'expected one type'),
            ([x, x[:0]], 2, {}, 'shard 1 has no example'),
            ([np.ones([2, 3], np.float32), np.ones([2, 3])], 2, {}, 'expected one type'),
            ([x, x], 2, {'shares': [3, 1]}, 'cut into shards already: leave shares= out'),
            ([x, x], 2, {'remainder': 'weight'}, 'cut into shards already: leave remainder= out'),
            ([x, x], 2, {'memory': towers.Memory(2), 'batch_norm': 'shard'},
             'accumulate= or micro_batches= cut each into 2'),
            ([x, looked_up], 2, {}, 'computed from the variable embedding, which may be')):
        with pytest.raises(towers.InputError, match=message):
            on_towers(towers.Shards(parts), count, **options)
    with pytest.raises(towers.InputError, match='expected a list with the inputs of each tower'):
        towers.Shards([])
    on_towers(towers.Shards([(each, Y[:2]) for each in (
        x[:2], tf.stop_gradient(looked_up))]), 2)


def test_an_evaluation_cuts_its_batches_by_the_shares():
    from towers.run.evaluation import Evaluation
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16, drop_remainder=True)
    evaluation = Evaluation(lambda x, y: tf.reduce_mean(y), dataset, 2, shares=[3, 1])
    assert [tower.size for tower in evaluation.built.towers] == [12, 4]
    with tf.Session(config=towers.session_config(evaluation.built.devices)) as session:
        assert evaluation.run(session)['loss'] == pytest.approx(Y.mean(), rel=1e-12)
