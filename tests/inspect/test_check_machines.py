"""`check_towers(cluster=…)`: the contract over machines, beside a plain program."""

import re

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from machine_samples import batches, sparse_and_dense

BATCH = batches([12])[0]


def momentum():
    return tf.train.MomentumOptimizer(0.125, 0.5)


@pytest.mark.slow
@pytest.mark.parametrize('kind, shares, num_towers, reduction', [
    ('ring', (1, 1), 1, 'mean'), pytest.param('ring', (1, 3, 2), 2, 'sum', marks=pytest.mark.slow),
    pytest.param('ps', (1, 3, 2), 2, 'mean', marks=pytest.mark.slow)])
def test_machines_are_one_device(kind, shares, num_towers, reduction):
    report = towers.check_towers(
        sparse_and_dense, BATCH, momentum, num_towers, 2, reduction, tolerance=1e-12, cluster=kind,
        shares=shares)
    assert report.equal, str(report)
    assert report.towers == len(shares) * num_towers and report.workers == len(shares)
    assert '%d towers of %d workers against one device' % (
        report.towers, len(shares)) in str(report)
    assert report.compared == 2 + 4 + 4 + 4  # losses, gradients, variables, slots


@pytest.mark.slow
@pytest.mark.parametrize('kind, device', [('ring', 'replicated'), ('ps', None)])
def test_weights_of_half_precision(kind, device):
    """TensorFlow's accumulators take no bfloat16, its broadcast on 1.15 no float16 either."""
    def model_fn(numbers):
        product = sum(tf.cast(tf.get_variable(dtype.name, [3], dtype, tf.ones_initializer()),
                              tf.float64) for dtype in (tf.bfloat16, tf.float16))
        return tf.reduce_mean(tf.square(tf.reduce_sum(numbers * product, 1)))
    numbers = np.random.RandomState(5).randn(8, 3)
    report = towers.check_towers(model_fn, numbers, momentum, steps=2, cluster=kind, shares=(1, 3),
                                 variables=towers.VariablePlacement(device))
    assert report.equal and report.tolerance == 0.1, str(report)


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['ring', 'ps'])
def test_a_gradient_of_half_precision_times_its_examples_is_too_large(kind):
    """20,000 from 2 and from 6 examples; 6 times that is infinite in float16."""
    def model_fn(numbers):
        weight = tf.get_variable('w', [], tf.float16, tf.zeros_initializer())
        return tf.reduce_mean(tf.cast(weight, tf.float64) * numbers)
    report = towers.check_towers(
        model_fn, np.full([8], 2e4), lambda: tf.train.GradientDescentOptimizer(0.125), 1, steps=1,
        cluster=kind, shares=(1, 3))
    assert report.equal and report.not_finite is None, str(report)


def test_several_losses_are_refused():
    def model_fn(numbers):
        weight = tf.get_variable('w', [], tf.float64, tf.ones_initializer())
        loss = tf.reduce_mean(weight * numbers)
        return {'loss': {'one': loss, 'other': 2 * loss}}
    with pytest.raises(towers.InvalidArgumentError, match='several .one, other.'):
        towers.check_towers(model_fn, np.arange(1., 9.), lambda: {
            'one': momentum(), 'other': momentum()}, cluster='ring')


@pytest.mark.parametrize('arguments, said', [
    ({'cluster': 'ring', 'shares': (5, 2)}, 'of 12 examples'),
    ({'cluster': 'ring', 'shares': (1,)}, 'two or more workers'),
    ({'cluster': 'ring', 'shares': (3, 1), 'same_shards': True}, 'the workers have equal parts'),
    ({'cluster': 'rings'}, "cluster='rings': expected one of 'ring', "),
    ({'shares': (1,)}, 'for 2 towers'),
    ({'shares': (3, 1), 'same_shards': True}, 'the towers have equal parts'),
    ({'cluster': 'ring', 'devices': 2}, 'devices= and cluster='),
    ({'cluster': 'ring', 'remainder': 'weight'}, 'remainder= and cluster=')])
def test_refused(arguments, said):
    with pytest.raises(towers.InvalidArgumentError, match=re.escape(said)):
        towers.check_towers(sparse_and_dense, BATCH, **arguments)


@pytest.mark.slow
def test_the_same_shards_for_batch_norm():
    """The statistics of each shard are those of the batch, so that workers agree with one device;
    the first worker's moving mean is that of all."""
    def model_fn(numbers, targets):
        mean, variance = tf.nn.moments(numbers, [0])
        average = tf.get_variable('mean', [2], tf.float64, tf.zeros_initializer(), trainable=False)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign(average, average / 2 + mean / 2))
        weights = tf.get_variable('weights', [2], tf.float64, tf.ones_initializer())
        normal = (numbers - mean) * tf.rsqrt(variance + 0.125)
        return tf.reduce_mean(tf.square(tf.reduce_sum(normal * weights, 1) - targets))
    numbers = np.random.RandomState(3).randn(16, 2)
    batch = {'numbers': numbers, 'targets': numbers[:, 0] * 3}
    alike = towers.check_towers(lambda each: model_fn(**each), batch, momentum, 2, tolerance=1e-12,
                                same_shards=True, cluster='ring')
    assert alike.equal and alike.compared == 3 + 1 + 2 + 1, str(alike)
    unlike = towers.check_towers(lambda each: model_fn(**each), batch, momentum, 2, cluster='ring')
    assert unlike.first.what == 'loss' and 'same_shards=True' in unlike.cause, str(unlike)


def square(inputs):
    weight = tf.get_variable('weight', [], tf.float64, tf.constant_initializer(.5))
    return tf.reduce_mean(tf.square(weight * inputs - 1.))


@pytest.mark.slow
def test_a_loss_that_sums_is_named_with_two_towers_a_worker():
    """The losses of all four towers add up to the batch's; those of the workers, which are means
    over two towers, add up to half of it."""
    def that_sums(inputs):
        weight = tf.get_variable('weight', [], tf.float64, tf.constant_initializer(.5))
        return tf.reduce_sum(tf.square(weight * inputs - 1.))
    report = towers.check_towers(that_sums, (np.arange(8.),), steps=1, cluster='ring')
    assert 'the loss sums over the batch' in report.cause, str(report)


@pytest.mark.slow
def test_moving_averages_are_each_workers_own():
    """Worker 0 saves its own, of its part of the batch; that the others' differ is no fault."""
    def model_fn(inputs):
        mean = tf.get_variable('mean', [], tf.float64, tf.zeros_initializer(), trainable=False)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign(mean, tf.reduce_mean(inputs)))
        return square(inputs)
    report = towers.check_towers(model_fn, (np.arange(8.),), num_towers=1, steps=1, cluster='ring')
    assert not report.equal and report.not_finite is None
    # 3.5 on one device; 1.5 of the first four.
    assert (report.first.what, report.first.name) == ('variable', 'mean')
    assert report.first.relative == pytest.approx(2. / 3.5)
