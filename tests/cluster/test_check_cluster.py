"""`check_cluster`: the contract over machines, held against a plain program on one device."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from test_ring import batches, sparse_and_dense

BATCH = batches([12])[0]


def momentum():
    return tf.train.MomentumOptimizer(0.125, 0.5)


@pytest.mark.parametrize('kind, shares, num_towers, reduction', [
    ('ring', (1, 1), 2, 'mean'), ('ps', (1, 3), 1, 'sum'),
    pytest.param('ring', (1, 3, 2), 1, 'sum', marks=pytest.mark.slow),
    pytest.param('ps', (1, 3, 2), 2, 'mean', marks=pytest.mark.slow)])
def test_machines_are_one_device(kind, shares, num_towers, reduction):
    report = towers.check_cluster(sparse_and_dense, BATCH, momentum, kind, shares, num_towers, 2, 2,
                                  reduction, tolerance=1e-12)
    assert report.equal, str(report)
    assert report.towers == len(shares) * num_towers
    assert report.compared == 2 + 4 + 4 + 4  # losses, gradients, variables, slots


@pytest.mark.parametrize('kind, options', [('ring', {'variable_device': 'replicated'}), ('ps', {})])
def test_weights_of_half_precision(kind, options):
    """TensorFlow's accumulators take no bfloat16, its broadcast on 1.15 no float16 either."""
    def model_fn(numbers):
        product = sum(tf.cast(tf.get_variable(dtype.name, [3], dtype, tf.ones_initializer()),
                              tf.float64) for dtype in (tf.bfloat16, tf.float16))
        return tf.reduce_mean(tf.square(tf.reduce_sum(numbers * product, 1)))
    numbers = np.random.RandomState(5).randn(8, 3)
    report = towers.check_cluster(model_fn, numbers, momentum, kind, (1, 3), 2, steps=2, **options)
    assert report.equal and report.tolerance == 0.1, str(report)


@pytest.mark.parametrize('kind', ['ring', 'ps'])
def test_a_gradient_of_half_precision_times_its_examples_is_too_large(kind):
    """20,000 from 2 and from 6 examples; 6 times that is infinite in float16."""
    def model_fn(numbers):
        weight = tf.get_variable('w', [], tf.float16, tf.zeros_initializer())
        return tf.reduce_mean(tf.cast(weight, tf.float64) * numbers)
    report = towers.check_cluster(
        model_fn, np.full([8], 2e4), lambda: tf.train.GradientDescentOptimizer(0.125), kind, (1, 3),
        steps=1)
    assert report.equal and report.not_finite is None, str(report)


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['ring', 'ps'])
def test_micro_batches_and_a_forward_pass_that_is_computed_again(kind):
    report = towers.check_cluster(sparse_and_dense, BATCH, momentum, kind, (1, 2), 2, steps=2,
                                  tolerance=1e-12, accumulate=2, recompute='auto')
    assert report.equal, str(report)


def test_several_losses_are_refused():
    def model_fn(numbers):
        weight = tf.get_variable('w', [], tf.float64, tf.ones_initializer())
        loss = tf.reduce_mean(weight * numbers)
        return {'loss': {'one': loss, 'other': 2 * loss}}
    with pytest.raises(towers.InvalidArgumentError, match='several .one, other.'):
        towers.check_cluster(model_fn, np.arange(1., 9.), lambda: {
            'one': momentum(), 'other': momentum()})


@pytest.mark.slow
def test_a_clipped_gradient_is_clipped_once_over_all_machines():
    def clip(pairs):
        clipped, _ = tf.clip_by_global_norm([gradient for gradient, _ in pairs], 0.01)
        return [(gradient, variable) for gradient, (_, variable) in zip(clipped, pairs)]
    def dense(numbers):
        weights = tf.get_variable('w', [3], tf.float64, tf.ones_initializer())
        return tf.reduce_mean(tf.square(tf.reduce_sum(numbers * weights, 1)))
    numbers = np.random.RandomState(5).randn(12, 3)
    for kind in ('ring', 'ps'):
        report = towers.check_cluster(dense, numbers, momentum, kind, (1, 2), steps=2,
                                      transform_gradients=clip)
        assert report.equal, str(report)


@pytest.mark.slow
@pytest.mark.version_independent
def test_a_loss_that_is_a_sum_is_found():
    def model_fn(numbers):
        weight = tf.get_variable('w', [], tf.float64, tf.ones_initializer())
        return tf.reduce_sum(weight * numbers)
    report = towers.check_cluster(model_fn, np.arange(1., 9.), momentum)
    assert not report.equal and 'sums over the batch' in report.cause


def test_shares_that_do_not_divide_are_refused():
    with pytest.raises(towers.InvalidArgumentError, match='of 12 examples'):
        towers.check_cluster(sparse_and_dense, BATCH, shares=(5, 2))


def square(inputs):
    weight = tf.get_variable('weight', [], tf.float64, tf.constant_initializer(.5))
    return tf.reduce_mean(tf.square(weight * inputs - 1.))


def test_moving_averages_are_each_workers_own():
    """Worker 0 saves its own, of its part of the batch; that the others' differ is no fault."""
    def model_fn(inputs):
        mean = tf.get_variable('mean', [], tf.float64, tf.zeros_initializer(), trainable=False)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign(mean, tf.reduce_mean(inputs)))
        return square(inputs)
    report = towers.check_cluster(model_fn, (np.arange(8.),), steps=1)
    assert not report.equal and report.not_finite is None
    # 3.5 on one device; 1.5 of the first four.
    assert (report.first.what, report.first.name) == ('variable', 'mean')
    assert report.first.relative == pytest.approx(2. / 3.5)


def test_weights_that_differ_from_worker_to_worker_are_said_to():
    draws = iter(range(100))

    def noisy(pairs):
        noise = tf.numpy_function(lambda: float(next(draws)), [], tf.float64)
        return [(gradient + tf.reshape(noise, []), variable) for gradient, variable in pairs]
    report = towers.check_cluster(square, (np.arange(8.),), transform_gradients=noisy)
    assert not report.equal and report.first.name == 'weight'
    assert 'the workers do not have the same values of weight' in str(report)
    assert 'NaN' not in str(report)
