"""Of what the gradients of a tower are taken: of the whole loss, wherever a part may differ."""

import types

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from sample_models import objective

X = np.arange(8.).reshape(4, 2)
RATE = 0.125  # which is exact in float32 as well
SGD = tf.train.GradientDescentOptimizer


def regularized(x):
    """Gradient of the mean of x w + 3 |w|^2 / 2: the columns' means and 3 w, (3, 4) + (3, 3)."""
    w = tf.get_variable('w', initializer=np.ones([2, 1]))
    return tf.reduce_mean(tf.matmul(x, w)) + 3 * tf.nn.l2_loss(w)


def after_a_step(optimizer, **options):
    built = towers.build_towers(regularized, tf.constant(X), objective(optimizer, options), 2,
                                'mean', **options)
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run(tf.global_variables_initializer())
        session.run(built.train_op)
        return session.run(built.variables[0]).ravel()


class Clipping(SGD):
    def compute_gradients(self, *args, **kwargs):
        return [(tf.clip_by_value(gradient, -1., 1.), variable) for gradient, variable
                in super(Clipping, self).compute_gradients(*args, **kwargs)]


def test_an_optimizer_that_changes_gradients_gets_those_of_the_whole_loss():
    """By an attribute of one object, as programs have it that wrap what they are given."""
    optimizer = SGD(RATE)
    optimizer.compute_gradients = types.MethodType(Clipping.compute_gradients, Clipping(RATE))
    weights = after_a_step(optimizer)  # of the batch, and all of the loss: at least 2, clipped to 1
    np.testing.assert_allclose(weights, 1. - RATE, rtol=1e-12)


def test_a_variable_of_another_graph_is_named():
    with tf.Graph().as_default():
        other = tf.get_variable('other', [])
    with pytest.raises(towers.InvalidArgumentError) as error:
        after_a_step(SGD(RATE), var_list=[other])
    assert str(error.value) == "var_list holds 'other', which belongs to another graph."
