"""Which operations follow a tower to its device, by the scopes that they were made in."""

import contextlib

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from case_marks import first_fast

import towers
from sample_models import switched
from towers.placement.tower_device import TowerDevice, device_like, follows_tower


@pytest.mark.parametrize('scopes, follows', [
    ([], True),
    (['/job:worker'], True),  # says nothing of the device
    (['/cpu:0'], False),
    (['/gpu:1', '/job:worker'], False),
    ([None], False),
    (['/device:CPU:0'], False),  # perhaps the device of another operation
    ([lambda op: ''], False),
    (['/cpu:0', lambda op: ''], False),
    ([lambda op: '', '/cpu:0'], False)])
def test_scopes_inside_that_of_a_tower(scopes, follows):
    with contextlib.ExitStack() as stack:
        for scope in [TowerDevice('/device:CPU:0')] + scopes:
            stack.enter_context(tf.device(scope))
        op = tf.constant(1.).op
    assert follows_tower(op) is follows
    assert device_like(op) == op.device
    assert isinstance(device_like(op), TowerDevice) == follows


# ---- reads in loops ------------------------------------------------------------------------------

def loop_that_reads(x):
    factor = tf.global_variables()[0]
    return tf.reduce_mean(tf.while_loop(
        lambda turn, _: turn < 3, lambda turn, y: (turn + 1, y * factor.read_value()), [0, x])[1])


def test_a_reference_variable_that_is_read_in_a_loop_is_refused(graph):
    """It would wait for ever; a resource variable is read."""
    def build():
        return towers.build_towers(
            loop_that_reads, tf.constant([1., 3.], tf.float64),
            tf.train.GradientDescentOptimizer(0.125), ['/cpu:1', '/cpu:2'], 'mean')
    with switched('control_flow_v2', False):
        with tf.device('/cpu:0'):  # a reference variable comes from outside of the build alone
            tf.get_variable('factor', initializer=tf.constant(1.5, tf.float64), use_resource=False)
        with pytest.raises(towers.SharedVariableError, match='within a loop, reads the reference '
                           'variable factor, which is on another device: make that with use_res'):
            build()
        with tf.Graph().as_default(), tf.device('/cpu:0'):
            tf.get_variable('factor', initializer=tf.constant(1.5, tf.float64), use_resource=True)
            built = build()
            with tf.Session(config=towers.session_config(built.devices)) as session:
                session.run(tf.global_variables_initializer())
                assert session.run([built.loss, built.train_op])[0] == 2 * 1.5 ** 3


@pytest.mark.parametrize('devices', first_fast(1, [
    [['/cpu:0', '/cpu:1'], ['/cpu:2', '/cpu:3']], ['/cpu:1', '/cpu:2']]))
def test_rows_of_gathered_rows_of_a_resource_variable(devices):
    """TensorFlow 2 colocates a shape in the gradient with the first gather, then moves that."""
    def model(ids):
        table = tf.get_variable('table', [5, 3], tf.float64, tf.ones_initializer(),
                                use_resource=True)
        words, places = tf.unique(ids)
        return tf.reduce_mean(tf.gather(tf.gather(table, words), places))
    built = towers.build_towers(model, tf.constant(np.arange(8) % 3),
                                tf.train.GradientDescentOptimizer(1.), devices, 'mean',
                                variables=towers.VariablePlacement('/cpu:0'))
    assert not towers.audit(built).broken
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run(tf.global_variables_initializer())
        session.run(built.train_op)
        found = session.run(built.variables[0])
    np.testing.assert_allclose(found[:, 0], 1 - np.array([3, 3, 2, 0, 0]) / 24., atol=1e-12)
