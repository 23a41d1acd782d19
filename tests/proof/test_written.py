"""How a written value depends on the variable's value before."""

import pytest
import tensorflow.compat.v1 as tf
from tensorflow.python.framework import function

from towers.proof.analysis import analyse
from towers.proof.written import Dependence


@pytest.mark.parametrize('value, expected', [
    (lambda v, mean: mean, Dependence.NONE),
    (lambda v, mean: v + mean, Dependence.RUNNING_SUM),
    (lambda v, mean: v - mean, Dependence.RUNNING_SUM),
    (lambda v, mean: mean - v, Dependence.LINEAR),
    (lambda v, mean: .9 * v + .1 * mean, Dependence.LINEAR),
    (lambda v, mean: v - (v - mean) * .1, Dependence.LINEAR),
    (lambda v, mean: (v + mean) / 2., Dependence.LINEAR),
    (lambda v, mean: -v, Dependence.LINEAR),
    (lambda v, mean: v * mean, Dependence.OTHER),  # no average of v and of a statistic
    (lambda v, mean: v / mean, Dependence.OTHER),
    (lambda v, mean: mean / v, Dependence.OTHER),
    (lambda v, mean: v * v, Dependence.OTHER),
    (lambda v, mean: tf.maximum(v, mean), Dependence.OTHER)])
def test_dependence(value, expected):
    x = tf.placeholder(tf.float32, [None])
    v = tf.get_variable('v', [], initializer=tf.ones_initializer(), use_resource=True)
    update = tf.assign(v, value(v.read_value(), tf.reduce_mean(x)))
    analysis = analyse(tf.get_default_graph().get_operations(), x, [update])
    [[written]] = analysis.writes.values()
    assert (written.variable, written.sets, written.dependence) == ('v', True, expected)


def test_a_function_is_no_write_of_rows_by_its_name():
    """The type of the operation that calls a `Defun` is the function's name."""
    x = tf.placeholder(tf.float32, [None])
    v = tf.get_variable('v', [], initializer=tf.ones_initializer(), use_resource=True)

    @function.Defun(tf.resource)
    def ScatterUpdateOfV(handle):
        return tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)
    result = tf.reduce_mean(x * ScatterUpdateOfV(v.handle))
    analysis = analyse(tf.get_default_graph().get_operations(), x, [result])
    assert analysis.writes == {}
