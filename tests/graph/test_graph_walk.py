"""towers.graph.graph_walk: what draws random numbers."""

import tensorflow.compat.v1 as tf

from towers.graph import graph_walk


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
