"""Gradients of loops of control flow v1 that read resource variables of another device."""

import numpy as np
import pytest
import sample_models as samples
from sample_models import switched
import tensorflow.compat.v1 as tf

import towers


def nested(x, y):
    w = tf.get_variable('w', [6, 3], tf.float64, tf.glorot_uniform_initializer(seed=1))

    def inner(i, total):
        return i + 1, total + tf.tanh(tf.matmul(x, w) * total)

    def outer(i, total):
        return i + 1, tf.while_loop(lambda i, _: i < 2, inner, (0, total))[1]
    total = tf.while_loop(lambda i, _: i < 2, outer, (0, tf.ones_like(y)))[1]
    return samples.mean_squared_error(total, y)


def in_a_branch(x, y):
    w = tf.get_variable('w', [6, 3], tf.float64, tf.glorot_uniform_initializer(seed=1))

    def step(i, total):
        return i + 1, tf.cond(i > 0, lambda: total * tf.matmul(x, w), lambda: total + 1)
    return samples.mean_squared_error(
        tf.while_loop(lambda i, _: i < 3, step, (0, tf.ones_like(y)))[1], y)


def of_its_own_gradients(x, y):
    """A loss of which a term is weighted by a gradient that the model takes itself."""
    w = tf.get_variable('w', [6, 3], tf.float64, tf.glorot_uniform_initializer(seed=1))
    shift = tf.get_variable('shift', [3], tf.float64, tf.zeros_initializer())
    _, total = tf.while_loop(lambda i, _: i < 2, lambda i, total: (i + 1, total * shift + y),
                             (0, tf.matmul(x, w)))
    weights = tf.stop_gradient(tf.gradients(tf.reduce_sum(total, 0), shift)[0])
    return tf.reduce_mean(tf.square(total)) + samples.mean_squared_error(
        total + 0. * weights, y)


def gradients(model_fn, arrays, devices, **options):
    with tf.Graph().as_default(), switched('resource_variables', True), switched(
            'control_flow_v2', False):
        tf.set_random_seed(3)
        inputs = tuple(map(tf.constant, arrays))
        if devices is None:
            loss = model_fn(*inputs)
            optimizer = tf.train.GradientDescentOptimizer(0.125)
            pairs = optimizer.compute_gradients(loss)
            train_op = optimizer.apply_gradients(pairs)
        else:
            built = towers.build_towers(model_fn, inputs, tf.train.GradientDescentOptimizer(0.125),
                                        devices, 'mean', **options)
            assert not towers.audit(built).broken
            pairs, train_op = built.gradients, built.train_op
        with tf.Session(config=towers.session_config(3)) as session:
            session.run(tf.global_variables_initializer())
            values = {}
            for number, v in enumerate(tf.trainable_variables()):  # the same in every graph
                values[v] = np.random.RandomState(number).randn(*v.shape.as_list())
                v.load(values[v], session)
            found = session.run({v.op.name: gradient for gradient, v in pairs})
            session.run(train_op)
            for v, before in values.items():
                np.testing.assert_allclose(
                    session.run(v), before - found[v.op.name] / 8, rtol=1e-12)
            return found


@pytest.mark.parametrize('model_fn, make, options', [
    (nested, samples.vectors, dict(variables=towers.VariablePlacement('balanced')))] + [
        pytest.param(*case, marks=pytest.mark.slow) for case in [
            (in_a_branch, samples.vectors, dict(copies='clone')),
            (samples.while_loop_rnn, samples.sequences, dict(copies='clone')),
            (samples.while_loop_rnn, samples.sequences, dict(copies='reuse')),
            (of_its_own_gradients, samples.vectors, dict(copies='reuse')),
            (of_its_own_gradients, samples.vectors,
                dict(variables=towers.VariablePlacement('balanced')))]])
def test_as_on_one_device(model_fn, make, options):
    if model_fn is in_a_branch and tf.version.VERSION < '2':
        pytest.skip('TF 1.15 has no gradient of a variable that is read in a branch in a loop')
    expected = gradients(model_fn, make(6), None)
    found = gradients(model_fn, make(6), ['/cpu:1', '/cpu:2'], **options)
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-10, atol=1e-12, err_msg=name)


@pytest.mark.slow
def test_a_loop_of_one_stage_whose_weights_are_on_the_stages():
    def model_fn(x, y):
        net = x
        with tf.variable_scope('net', use_resource=True):
            for layer in range(3):
                with tf.variable_scope('layer%d' % layer):
                    weights = tf.get_variable('weights', [net.shape[-1], 4], tf.float64)
                    again = tf.get_variable('again', [4, 4], tf.float64)
                _, net = tf.while_loop(
                    lambda turn, net: turn < 3,
                    lambda turn, net, again=again: (turn + 1, tf.tanh(tf.matmul(net, again))),
                    [0, tf.tanh(tf.matmul(net, weights))])
        return tf.reduce_mean(tf.square(tf.reduce_sum(net, 1) - y))
    random = np.random.RandomState(0)
    with switched('control_flow_v2', False):
        report = towers.check_towers(
            model_fn, (random.randn(8, 3), random.randn(8)),
            pipeline=towers.Pipeline(stages='auto'),
            variables=towers.VariablePlacement('stage'),
            devices=[['/cpu:0', '/cpu:1'], ['/cpu:2', '/cpu:3']])
    assert report.equal, report
