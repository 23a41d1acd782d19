"""towers.graph_walk: what draws random numbers, and what computes the same."""

import pytest
import tensorflow.compat.v1 as tf

from towers.graph import graph_walk
from towers.graph.graph_walk import is_computed_from


RANDOM = [
    lambda: tf.random.uniform([2], maxval=5, dtype=tf.int32), lambda: tf.random.normal([2]),
    lambda: tf.random.truncated_normal([2]), lambda: tf.random.gamma([2], 1.),
    lambda: tf.random.poisson(1., [2]), lambda: tf.random.categorical([[.1, .2]], 2),
    lambda: tf.random_shuffle([1, 2]), lambda: tf.nn.dropout(tf.ones([2]), rate=.5),
    lambda: tf.random.experimental.Generator.from_seed(1).normal([2]),
    lambda: tf.random.experimental.Generator.from_seed(1).uniform([2]),
    lambda: tf.nn.log_uniform_candidate_sampler(tf.constant([[1]], tf.int64), 1, 1, True, 10),
    lambda: tf.image.sample_distorted_bounding_box([9, 9, 3], [[[0., 0., 1., 1.]]], seed=1),
    lambda: tf.nn.fractional_max_pool(tf.zeros([1, 9, 9, 1]), [1., 1.4, 1.4, 1.]),
    lambda: tf.nn.fractional_avg_pool(tf.zeros([1, 9, 9, 1]), [1., 1.4, 1.4, 1.]),
    lambda: tf.image.extract_glimpse(tf.zeros([1, 9, 9, 1]), [4, 4], [[1., 1.]])]


def test_what_draws_random_numbers(graph):
    x = tf.random.stateless_normal([2], [1, 2])  # the same numbers in every tower
    w = tf.get_variable('w', [2], initializer=tf.zeros_initializer())
    tf.gradients(tf.reduce_sum(tf.nn.softmax(x * w)), w)
    assert not any(graph_walk.is_random(op) for op in graph.get_operations())
    for number, make in enumerate(RANDOM):
        with graph_walk.Recording(graph) as made:
            make()
        assert sum(graph_walk.is_random(op) for op in made.operations) == 1, number


# ---- which tensors are computed as another one is, whatever they are called ----------------------

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


def test_random_numbers_are_never_the_same_and_loops_are_computed_from_their_start(graph):
    weight = tf.get_variable('weight', [2])

    def noisy():
        return tf.reduce_sum(weight * tf.random_uniform([2], seed=1))
    assert not is_computed_from([noisy()], noisy())
    loss = tf.while_loop(lambda turn, _: turn < 2,
                         lambda turn, total: (turn + 1, total + l2(weight)),
                         [0, l2(weight)])[1]
    assert is_computed_from([loss], l2(weight))
