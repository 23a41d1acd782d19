"""Several sessions one after the other in one `join`."""

import pytest
import tensorflow.compat.v1 as tf

import towers
from one_process import StopWithoutSignals, addresses, serve, together


@pytest.mark.parametrize('leaves', [0, pytest.param(1, marks=pytest.mark.slow)])
def test_in_a_ring_one_worker_ends_each_session(leaves):
    """TensorFlow counts steps beyond sessions, and does not count the one that was not made. Each
    step takes the mean of 1 and 3 off the weight, and each session begins with 0."""
    workers = addresses(2)

    def work(rank):
        with tf.Graph().as_default():
            cluster = towers.Cluster('ring', workers, rank=rank)
            built = towers.build_towers(
                lambda x: tf.reduce_mean(x) * tf.get_variable(
                    'w', [], tf.float64, tf.zeros_initializer()),
                tf.constant([1. + 2. * rank], tf.float64),
                tf.train.GradientDescentOptimizer(1.), 1, 'mean', cluster=cluster)
            seen = []
            with towers.join(cluster, built, start_timeout=30., dead_after=10.) as member:
                for steps in (3, 2):
                    stop, made = StopWithoutSignals(cluster, built), 0
                    with member.session([stop]) as session:
                        while not session.should_stop() and (rank != leaves or made < steps):
                            session.run(built.train_op)
                            made += 1
                            value = session.run(built.variables[0])
                    seen.append((made, stop.is_told, value))
            return seen
    assert together(work, 2) == [[(3, True, -6.), (2, True, -4.)]] * 2


@pytest.mark.parametrize('synchronous', [True, pytest.param(False, marks=pytest.mark.slow)])
def test_parameter_servers_take_one_session(graph, synchronous):
    cluster = serve(1, synchronous=synchronous)(0)
    built = towers.build_towers(
        lambda x: tf.reduce_mean(x) * tf.get_variable('w', []), tf.ones([2]),
        tf.train.GradientDescentOptimizer(1.), 1, 'mean', cluster=cluster)
    with towers.join(cluster, built, start_timeout=30.) as member:
        with member.session() as session:
            session.run(built.train_op)
        with pytest.raises(towers.ClusterError, match='join with parameter servers is for one '
                           'session, and this is the second one'):
            member.session()
