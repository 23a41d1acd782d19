"""What a build says of itself."""

import tensorflow.compat.v1 as tf

import towers


def built(cluster=None):
    return towers.build_towers(
        lambda x: tf.reduce_mean(x * tf.get_variable('w', [])), tf.zeros([4]),
        tf.train.GradientDescentOptimizer(0.1), 1, 'mean', cluster=cluster)


def test_who_updates_the_variables():
    """Without a cluster and in a ring each process has variables of its own; on parameter servers
    the chief alone updates them."""
    servers = [towers.Cluster('ps', ['a:1', 'b:1'], ['c:1'], rank=rank) for rank in range(2)]
    clusters = [None, towers.Cluster('ring', ['a:1', 'b:1'], rank=1)] + servers
    for cluster, updates_here in zip(clusters, [True, True, True, False]):
        with tf.Graph().as_default():
            assert built(cluster).updates_here is updates_here
