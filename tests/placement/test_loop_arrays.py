"""TensorArrays of loops of control flow v1 that take tensors of another stage."""

import numpy as np
import pytest
from sample_models import switched
import tensorflow.compat.v1 as tf

import towers
from towers import compat
from towers.errors import InvalidArgumentError
from towers.reduce.micro_batches import check_order

X = np.random.RandomState(0).randn(12, 4)


def mapped(x):
    with towers.stage(0):
        w = tf.get_variable('w', [4, 4], tf.float64, tf.random_normal_initializer(seed=1))
        x = tf.tanh(tf.matmul(x, w))
    with towers.stage(1):
        x = tf.map_fn(lambda row: tf.sin(2. * row), x)
    return tf.reduce_mean(tf.square(x))  # in no stage: where its data are, on the last one


@pytest.mark.parametrize('options', [
    dict(devices='/cpu:0+/cpu:1'), dict(devices=2)] + [
        pytest.param(options, marks=pytest.mark.slow) for options in (
            dict(devices='/cpu:0+/cpu:1,/cpu:2+/cpu:3', copies='reuse'),
            dict(devices='/cpu:0+/cpu:1,/cpu:2+/cpu:3', copies='clone',
                 pipeline=towers.Pipeline(micro_batches=3)))],
                         ids=lambda options: '-'.join(map(str, options.values())))
@pytest.mark.slow
def test_the_array_is_with_the_loop_that_reads_it(options):
    with switched('control_flow_v2', False):
        x = tf.constant(X)
        w = X[:4] / 3
        built = towers.build_towers(mapped, x, tf.train.GradientDescentOptimizer(1.),
                                    reduction='mean', **options)
        with tf.Session(config=towers.session_config(built.devices)) as session:
            session.run(tf.global_variables_initializer())
            built.variables[0].load(w, session)
            (gradient,), = session.run([[gradient for gradient, _ in built.gradients]])
            session.run(built.train_op)
            after = session.run(built.variables[0])
    hidden = np.tanh(X.dot(w))
    wanted = X.T.dot(2 * np.sin(2 * hidden) * np.cos(2 * hidden) * 2 * (1 - hidden ** 2)) / X.size
    np.testing.assert_allclose(gradient, wanted, rtol=1e-12)
    np.testing.assert_allclose(after, w - wanted, rtol=1e-12)


def time_major(x):
    """Two recurrent layers, each a loop over the first dimension, a layer a stage."""
    net = tf.transpose(x[:, :, None], [1, 0, 2])
    for layer in range(2):
        with towers.stage(layer), tf.variable_scope('layer%d' % layer):
            w = tf.get_variable('w', [], tf.float64, tf.constant_initializer(0.5))
            net = tf.scan(lambda state, row: tf.tanh(w * (state + row)), net,
                          tf.zeros_like(net[0]))
    return tf.reduce_mean(tf.square(net[-1] - 1))


@pytest.mark.slow
@pytest.mark.parametrize('copies, micro_batches', [('clone', 2), ('reuse', 1)])
def test_loops_over_time_a_layer_a_stage(copies, micro_batches):
    with switched('control_flow_v2', False):
        report = towers.check_towers(
            time_major, X, devices=[['/cpu:0', '/cpu:1'], ['/cpu:2', '/cpu:3']], copies=copies,
            pipeline=towers.Pipeline(micro_batches=micro_batches))
    assert report.equal, report


@pytest.mark.parametrize('schedule', [
    'one_forward_one_backward', pytest.param('all_forward', marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_loop_of_more_turns_than_run_at_once_does_not_wait_for_its_gradient(schedule):
    """A turn waits for the pushes of the tenth or 32nd one before it, onto the gradient's stacks."""
    with switched('control_flow_v2', False):
        report = towers.check_towers(
            time_major, np.random.RandomState(0).randn(6, 50), steps=1,
            pipeline=towers.Pipeline(micro_batches=3, schedule=schedule),
            devices=[['/cpu:0', '/cpu:1']])
    assert report.equal, report


def test_a_circle_through_a_loop_is_found():
    """The way out of a loop waits for all that its turns take, not for what enters it alone."""
    with switched('control_flow_v2', False):
        gate = tf.no_op('gate')
        with tf.control_dependencies([gate]):
            taken = tf.identity(tf.ones([]), 'taken')
        _, total, _ = tf.while_loop(  # nothing takes the last value: no step computes it
            lambda turn, *_: turn < 3,
            lambda turn, total, last: (turn + 1, total + taken, 2 * total), [0, 0., 0.])
    check_order([total])
    compat.add_control_inputs(gate, [total.op])
    with pytest.raises(InvalidArgumentError, match='wait for a later one'):
        check_order([total])
