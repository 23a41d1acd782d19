"""Which normalizations are batch norms, and what else may be done with their statistics."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.proof.analysis import analyse
from towers.proof.batch_norms import find_batch_norms

X = np.random.RandomState(0).randn(8, 4)


def norms_of(normalize, *shape):
    x = tf.placeholder(tf.float32, [None, *shape])
    found = normalize(x)
    operations = tf.get_default_graph().get_operations()
    return find_batch_norms(analyse(operations, x, [found]), operations)


def by_moments(x, axes):
    mean, variance = tf.nn.moments(x, axes, keep_dims=True)
    return (x - mean) / tf.sqrt(variance + .1)


@pytest.mark.parametrize('normalize, shape, number', [
    (lambda x: by_moments(x, [0]), [4], 1),
    (lambda x: by_moments(x, [1]), [4], 0),  # of each example
    (lambda x: by_moments(tf.transpose(x, [1, 0, 2]), [0]), [3, 4], 0),  # of each, time-major
    (lambda x: by_moments(tf.transpose(x, [1, 0, 2]), [1]), [3, 4], 1),
    (lambda x: x - tf.reduce_mean(x, 0), [4], 0),  # without a variance
    (lambda x: tf.nn.fused_batch_norm(x, tf.ones([3]), tf.zeros([3]))[0], [4, 4, 3], 1)])
def test_a_batch_norm_takes_a_mean_and_a_variance_over_the_examples(normalize, shape, number):
    norms = norms_of(normalize, *shape)
    assert (norms.number, norms.unproven) == (number, [])


def test_a_mean_of_which_nothing_is_proven_is_named():
    norms = norms_of(lambda x: by_moments(tf.cumsum(x, 0), [0]), 4)
    assert (norms.number, len(norms.unproven)) == (0, 1)


def loss_with_variance(x):
    """A loss with a batch norm, whose variance goes into the loss by itself, too."""
    w = tf.get_variable('w', [4, 3], tf.float64, tf.constant_initializer(
        np.random.RandomState(1).randn(4, 3)))
    h = tf.matmul(x, w)
    mean, variance = tf.nn.moments(h, [0])
    normalized = (h - mean) / tf.sqrt(variance + .1)
    return tf.reduce_mean(tf.tanh(normalized)) + tf.reduce_sum(tf.sqrt(variance))


@pytest.mark.slow
def test_in_sync_a_variance_that_goes_elsewhere_is_the_batchs_too():
    x = tf.placeholder(tf.float64, [None, 4])
    built = towers.build_towers(
        loss_with_variance, x, tf.train.GradientDescentOptimizer(1.), devices=2, reduction='mean',
        batch_norm='sync')
    assert built.plan.line('one device').startswith('proven: ')
    with tf.Session(config=tf.ConfigProto(device_count={'CPU': 2})) as session:
        session.run(tf.global_variables_initializer())
        session.run(built.train_op, {x: X})
        [updated] = session.run(tf.trainable_variables())
    with tf.Graph().as_default(), tf.Session() as session:
        x = tf.placeholder(tf.float64, [None, 4])
        step = tf.train.GradientDescentOptimizer(1.).minimize(loss_with_variance(x))
        session.run(tf.global_variables_initializer())
        session.run(step, {x: X})
        [expected] = session.run(tf.trainable_variables())
    np.testing.assert_allclose(updated, expected, rtol=1e-12)


def line_of_each_shard(loss):
    x = tf.placeholder(tf.float64, [None, 4])
    built = towers.build_towers(loss, x, tf.train.GradientDescentOptimizer(1.), devices=2,
                                reduction='mean')
    return built.plan.line('one device')


def test_of_each_shard_it_is_proven_but_for_the_batch_norm():
    w = tf.get_variable('w', [4, 3], tf.float64)
    line = line_of_each_shard(lambda x: tf.reduce_mean(tf.tanh(by_moments(tf.matmul(x, w), [0]))))
    assert line.startswith('proven, but for 1 batch norm')


def test_of_each_shard_a_variance_that_goes_elsewhere_is_no_batch_norm_alone():
    assert line_of_each_shard(loss_with_variance).startswith('not proven: ')
