"""towers.graph.same_value: which tensors are computed as another one is, whatever they are called."""

import pytest
import tensorflow.compat.v1 as tf

from towers.graph.same_value import is_computed_from


def l2(weight, factor=0.5):
    return factor * tf.reduce_sum(tf.square(weight))


@pytest.mark.parametrize('use_resource', [False, True])
def test_the_same_operations_from_the_same_variable(graph, use_resource):
    weight, other = (tf.get_variable(name, [2, 3], use_resource=use_resource) for name in 'ab')
    x = tf.placeholder(tf.float32, [])
    loss = tf.cond(x > 0, lambda: x, lambda: -x) + tf.reduce_mean([l2(weight), x])
    assert is_computed_from([loss], l2(weight))
    assert is_computed_from([x, loss], l2(tf.identity(weight)))
    for part in (l2(other), l2(weight, 0.25), tf.reduce_sum(tf.abs(weight)), l2(weight) * 2,
                 l2(tf.transpose(weight)), tf.placeholder(tf.float32, [])):
        assert not is_computed_from([loss], part)
    first, second = tf.split(weight, 2)  # one output of several is not another
    assert not is_computed_from([l2(tf.identity(first))], l2(tf.identity(second)))
    third = tf.unstack(tf.transpose(weight))[2]  # of three outputs, where `weight` has two
    assert not is_computed_from(tf.unstack(weight), third)


def test_random_numbers_are_never_the_same_and_loops_are_computed_from_their_start(graph):
    weight = tf.get_variable('weight', [2])

    def noisy():
        return tf.reduce_sum(weight * tf.random_uniform([2], seed=1))
    assert not is_computed_from([noisy()], noisy())
    loss = tf.while_loop(lambda turn, _: turn < 2,
                         lambda turn, total: (turn + 1, total + l2(weight)),
                         [0, l2(weight)])[1]
    assert is_computed_from([loss], l2(weight))
