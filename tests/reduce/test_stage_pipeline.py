"""Micro-batches through stages: loops, branches and counters in a model; the rows of a schedule."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from sample_models import switched
from towers.reduce.schedules import stage_order

X, Y = np.random.RandomState(0).rand(12, 6), np.random.RandomState(1).rand(12, 2)
ONE = [['/cpu:0', '/cpu:1']]
TWO = [['/cpu:0', '/cpu:1'], ['/cpu:2', '/cpu:3']]


def variable(name, shape):
    value = np.random.RandomState(len(name) + sum(shape)).randn(*shape) * .3
    return tf.get_variable(name, shape, tf.float64, tf.constant_initializer(value))


def dense(x, name, size):
    return tf.tanh(tf.matmul(x, variable(name, [int(x.shape[1]), size])))


def loss_of(x, y):
    return tf.reduce_mean(tf.square(dense(x, 'out', 2) - y))


def branch(x, y):
    """The branch that is not taken never runs: nothing may wait for it."""
    with towers.stage(0):
        x = dense(x, 'first', 6)
        one, other = variable('one', [6, 6]), variable('other', [6, 6])
        x = tf.cond(tf.reduce_sum(tf.ones([2])) > 1, lambda: tf.tanh(tf.matmul(x, one)),
                    lambda: tf.tanh(tf.matmul(x, other)))
    with towers.stage(1):
        return loss_of(x, y)


def loop(stage):
    def model(x, y):
        with towers.stage(0):
            x = dense(x, 'first', 6)
        with towers.stage(stage):
            weights = variable('weights', [6, 6])
            x = tf.while_loop(
                lambda i, _: i < 3, lambda i, each: (i + 1, tf.tanh(tf.matmul(
                    tf.concat([each[:, :3], each[:, 3:]], 1), weights))), (tf.constant(0), x))[1]
        with towers.stage(1):
            return loss_of(x, y)
    return model


@pytest.mark.slow
@pytest.mark.parametrize('model_fn, devices, options, version', [
    (branch, ONE, dict(pipeline=towers.Pipeline(micro_batches=3)), 'v1'),
    (loop(0), 1, dict(memory=towers.Memory(accumulate=3)), 'v1'),
    (branch, TWO, dict(pipeline=towers.Pipeline(micro_batches=3, schedule='all_forward')), 'v2'),
    (loop(0), ONE, dict(pipeline=towers.Pipeline(micro_batches=2)), 'v2')],
                         ids=['branch', 'loop', 'branch on two', 'loop in the first stage'])
def test_loops_and_branches(model_fn, devices, options, version):
    if version == 'v2' and model_fn is not branch and tf.version.VERSION < '2':
        pytest.skip('on TF 1 such a loop has to be on the device of its variables')
    with switched('control_flow_v2', version == 'v2'):
        report = towers.check_towers(model_fn, (X, Y), devices=devices, **options)
    assert report.equal and report.worst.relative < 1e-9, report


def test_the_row_of_each_stage():
    def row(*arguments):
        return ' '.join('%s%d' % (what[0], number) for what, number in stage_order(*arguments))
    assert row('all_forward', 0, 2, 3) == row('all_forward', 1, 2, 3) == 'f0 f1 f2 b2 b1 b0'
    name = 'one_forward_one_backward'
    assert row(name, 0, 3, 4) == 'f0 f1 f2 b0 f3 b1 b2 b3'
    assert row(name, 1, 3, 4) == 'f0 f1 b0 f2 b1 f3 b2 b3'
    assert row(name, 2, 3, 4) == 'f0 b0 f1 b1 f2 b2 f3 b3'
    assert row(name, 0, 3, 1) == 'f0 b0' and row(name, 0, 1, 2) == 'f0 b0 f1 b1'
