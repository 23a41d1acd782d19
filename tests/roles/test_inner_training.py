"""A model function that trains by an optimizer of its own: refused, whichever way it is run."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from case_marks import first_fast

SGD = tf.train.GradientDescentOptimizer


def weight():
    return tf.get_variable('w', [3, 1])


def loss_of(x):
    return tf.reduce_mean(tf.matmul(x, weight()) ** 2)


def built_of(model_fn, optimizer):
    return towers.build_towers(model_fn, np.ones([4, 3], np.float32), optimizer, 2)


def by_hand(loss):
    variable, = tf.trainable_variables()
    gradient, = tf.gradients(loss, [variable])
    return tf.assign_sub(variable, 0.1 * gradient)


def by_optimizer(loss):
    return SGD(0.1).minimize(loss)


@pytest.mark.parametrize('train, way', first_fast(1, [
    (by_optimizer, 'collection'), (by_optimizer, 'loss'), (by_hand, 'updates'),
    (by_hand, 'unused')]))
def test_an_update_within_a_tower(train, way):
    def model_fn(x):
        loss = loss_of(x)
        train_op = train(loss)
        if way == 'collection':
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, train_op)
        elif way == 'loss':
            with tf.control_dependencies([train_op]):
                loss = tf.identity(loss)
        return {'loss': loss, 'updates': [train_op] if way == 'updates' else []}
    if way != 'loss':  # without an optimizer, no step runs the updates
        with tf.Graph().as_default():
            assert built_of(model_fn, None).loss is not None
    if way == 'unused':
        assert built_of(model_fn, SGD(0.1)).train_op is not None
        return
    with pytest.raises(towers.GradientError, match=(
            "the model function trains 'w' by the update .*pass the optimizer to build_towers")):
        built_of(model_fn, SGD(0.1))


def test_weights_that_are_written_without_a_gradient_are_the_models():
    def model_fn(x):
        loss = loss_of(x)
        with tf.variable_scope('', reuse=True):
            w = weight()
        return {'loss': loss, 'updates': [tf.assign(w, tf.clip_by_norm(w, 1.))]}
    assert built_of(model_fn, SGD(0.1)).train_op is not None
