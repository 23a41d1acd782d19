"""A model function that trains by an optimizer of its own: refused, whichever way it is run."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers


@pytest.fixture(autouse=True)
def new_graph():
    with tf.Graph().as_default():
        yield


def _by_hand(loss):
    variable, = tf.trainable_variables()
    gradient, = tf.gradients(loss, [variable])
    return tf.assign_sub(variable, 0.1 * gradient)


@pytest.mark.parametrize('train', [
    lambda loss: tf.train.GradientDescentOptimizer(0.1).minimize(loss),
    pytest.param(lambda loss: tf.train.AdamOptimizer(0.1).minimize(loss), marks=pytest.mark.slow),
    pytest.param(_by_hand, marks=pytest.mark.slow)])
@pytest.mark.parametrize('way', ['updates', 'collection', 'loss', 'unused'])
def test_an_update_within_a_tower(train, way):
    def model_fn(x):
        loss = tf.reduce_mean(tf.matmul(x, tf.get_variable('w', [3, 1])) ** 2)
        train_op = train(loss)
        if way == 'collection':
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, train_op)
        elif way == 'loss':
            with tf.control_dependencies([train_op]):
                loss = tf.identity(loss)
        return {'loss': loss, 'updates': [train_op] if way == 'updates' else []}

    def build(optimizer):
        return towers.build_towers(model_fn, tf.constant(np.ones([4, 3], np.float32)), optimizer, 2)
    if way != 'loss':  # without an optimizer, no step runs the updates
        with tf.Graph().as_default():
            assert build(None).loss is not None
    optimizer = tf.train.GradientDescentOptimizer(0.1)
    if way == 'unused':
        assert build(optimizer).train_op is not None
        return
    with pytest.raises(towers.GradientError) as raised:
        build(optimizer)
    assert "the model function trains 'w' by the update" in str(raised.value)
    assert 'pass the optimizer to build_towers' in str(raised.value)
    assert not tf.global_variables() and not tf.get_collection(tf.GraphKeys.UPDATE_OPS)


def test_weights_that_are_written_without_a_gradient_are_the_models():
    def model_fn(x):
        w = tf.get_variable('w', [3, 1])
        loss = tf.reduce_mean(tf.matmul(x, w) ** 2)
        return {'loss': loss, 'updates': [tf.assign(w, tf.clip_by_norm(w, 1.))]}
    assert towers.build_towers(model_fn, tf.constant(np.ones([4, 3], np.float32)),
                               tf.train.GradientDescentOptimizer(0.1), 2).train_op is not None
