"""`check_towers` of a finished model."""

import numpy as np
import pytest
import sample_models as samples
import tensorflow.compat.v1 as tf

import towers
from sample_models import momentum

X, Y = samples.vectors(8)


def program(make_loss):
    """`(loss, x, y, rate)` of a program with a count of steps, a loop and a fed number."""
    x, y = tf.placeholder(tf.float64, [None, 6], 'x'), tf.placeholder(tf.float64, [None, 3], 'y')
    scale = tf.placeholder(tf.float64, [], 'scale')
    h = tf.matmul(x, tf.get_variable('a', [6, 3], tf.float64)) * scale
    h = tf.while_loop(lambda i, _: i < 2, lambda i, h: (i + 1, tf.tanh(h)), (0, h))[1]
    count = tf.get_variable('count', [], tf.float64, tf.zeros_initializer(), trainable=False)
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign_add(count, 1.))
    return make_loss(h, y), x, y, scale


def mean(h, y):
    return tf.reduce_mean(tf.square(h - y))


def total(h, y):
    return tf.reduce_sum(tf.square(h - y))


def two_losses(h, y):
    return {'one': mean(h, y), 'two': tf.reduce_mean(tf.abs(h))}


@pytest.mark.parametrize('make_loss, make_optimizer', [
    (mean, momentum), pytest.param(two_losses, lambda: {'one': momentum(), 'two': momentum()},
                                 marks=pytest.mark.slow)])
def test_equal(make_loss, make_optimizer):
    loss, x, y, scale = program(make_loss)
    operations = len(tf.get_default_graph().get_operations())
    report = towers.check_towers(loss, {x: X, y: Y}, make_optimizer, 3, remainder='weight',
                                 feed={scale: .5})
    assert report.equal, str(report)
    assert len(tf.get_default_graph().get_operations()) == operations


@pytest.mark.slow
def test_a_sum_is_reported():
    loss, x, y, scale = program(total)
    report = towers.check_towers(loss, {x: X, y: Y}, momentum, feed={scale: .5})
    assert not report.equal


def custom_gradient(h, y):
    @tf.custom_gradient
    def same(value):
        return tf.identity(value), lambda upstream: upstream
    return mean(same(h), y)


@pytest.mark.parametrize('error, text, change', [
    (towers.InputError, 'expected a dict from its placeholders', dict(inputs=(X, Y))),
    (towers.InputError, 'expected a dict from its placeholders', dict(feed={'scale': 1.})),
    (towers.InvalidArgumentError, 'the model is finished', dict(cluster='ring')),
    (towers.StepError, 'takes it in feed={placeholder: value}', dict(feed=None)),
    (towers.ModelFunctionError, 'bound to its graph', dict(make_loss=custom_gradient))])
def test_refusals(error, text, change):
    loss, x, y, scale = program(change.pop('make_loss', mean))
    given = dict(inputs={x: X, y: Y}, feed={scale: .5})
    given.update(change)
    with pytest.raises(error, match=text) as caught:
        towers.check_towers(loss, given.pop('inputs'), momentum, **given)
    assert '\n' not in str(caught.value)


def test_a_feed_is_for_finished_models():
    with pytest.raises(towers.InvalidArgumentError, match='feed= is for'):
        towers.check_towers(samples.linear, (X, Y), momentum, feed={'x': np.zeros(1)})


def test_a_graph_with_towers_is_refused():
    loss, x, y, scale = program(mean)
    towers.build_towers(loss, (x, y), momentum(), devices=2)
    with pytest.raises(towers.InvalidArgumentError, match='call check_towers before build_towers'):
        towers.check_towers(loss, {x: X, y: Y}, feed={scale: .5})
