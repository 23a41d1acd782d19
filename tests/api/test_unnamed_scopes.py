"""A build that shares an earlier one's variables finds those of layers without a name."""

import contextlib

import pytest
import tensorflow.compat.v1 as tf

import towers


def unnamed(x, size):
    with tf.variable_scope(None, 'dense'):
        return tf.matmul(x, tf.get_variable('w', [x.shape[1], size]))


def model_fn(x):
    return tf.reduce_mean(unnamed(unnamed(x, 3), 1))


@pytest.mark.parametrize('scope', [None, 'model'])
def test_scopes_without_a_name_are_numbered_as_in_the_earlier_build(scope):
    x = tf.stop_gradient(unnamed(tf.ones([4, 2]), 3))  # before the model, and of its names
    with tf.variable_scope(scope) if scope else contextlib.nullcontext():
        built = towers.build_towers(model_fn, (x,), towers.Objective(
            tf.train.GradientDescentOptimizer(0.1), var_list=lambda made: made[1:]), 2)
    known = tf.trainable_variables()
    for name in ('test', 'again'):
        tested = towers.build_towers(model_fn, (x,), None, 2, reuse=built)
        assert tested.variables == known[1:]
    assert tf.trainable_variables() == known
    # What the program makes next has the number that it has without towers.
    unnamed(x, 1)
    assert tf.trainable_variables()[-1].op.name == 'dense_%d/w' % (3 if scope is None else 1)
