"""Several builds of one graph with `cluster=`, such as the two of a GAN."""

import signal

import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.cluster.cluster import Cluster
from towers.cluster.machines import builds_of
from towers.errors import ClusterError
from one_process import StopWithoutSignals, addresses, in_sessions, together


def two_builds(cluster, batch):
    """Builds of `u`, and of `v` and `w`: the product of the batch's mean and a square of sums."""
    def of(*names):
        return lambda x: tf.reduce_mean(x) * tf.square(tf.add_n([tf.get_variable(
            name, [], tf.float64, tf.constant_initializer(1. + 'uvw'.index(name)))
            for name in names])) / 2.
    return [towers.build_towers(of(*names), batch, tf.train.GradientDescentOptimizer(.5), 1, 'mean',
                                cluster=cluster)
            for names, name in (('u', 'first'), ('vw', 'second'))]


@pytest.mark.slow
def test_two_builds_train_by_turns_in_a_ring():
    """Each step of the first takes half off `u`, of the second half of `v + w` off both."""
    workers = addresses(2)

    def work(session, built, rank):
        builds = builds_of(built)
        for place in (0, 1, 1, 0, 0):
            session.run(builds[place].train_op)
        return session.run([variable for each in builds for variable in each.variables])
    found = in_sessions(lambda rank: Cluster('ring', workers, rank=rank), work, lambda cluster:
                        two_builds(cluster, tf.constant([.5 + cluster.rank], tf.float64))[1])
    # 2 + 3 = 5; each step of v and w takes half of their sum off each, and so the sum to 0.
    assert found == [[.125, -.5, .5]] * 2


def stepped(rounds, leaves_after=None, signal_after=None):
    """Of two workers their numbers of calls, and whether they were told to stop.

    A round is a list of calls, a call the place of a build, or a tuple of places. Worker 0 makes
    the first `leaves_after` rounds alone; worker 1 gets a signal after `signal_after` calls."""
    workers = addresses(2)

    def work(rank):
        with tf.Graph().as_default():
            cluster = Cluster('ring', workers, rank=rank)
            builds = two_builds(cluster, tf.constant([.5 + rank], tf.float64))
            stop, made = StopWithoutSignals(cluster, builds[1]), 0
            with towers.join(cluster, builds[1], start_timeout=30., dead_after=10.) as member:
                with member.session([stop]) as session:
                    for calls in rounds[:None if rank else leaves_after]:
                        if session.should_stop():
                            break
                        for places in calls:
                            session.run([builds[place].train_op for place in
                                         (places if isinstance(places, tuple) else (places,))])
                            made += 1
                            if rank and made == signal_after:
                                stop.stop(signal.SIGTERM)
            return made, stop.is_told
    return together(work, 2)


@pytest.mark.slow
@pytest.mark.parametrize('rounds, leaves_after, calls', [
    ([[0, 1], [0, 0, 1, 1], [0, 1], [0, 1]], 2, 6), ([[0, 1]] * 4, 0, 0),
    ([[(0, 1)]] * 4, 2, 2)])
def test_a_worker_that_leaves_between_two_rounds_ends_the_others(rounds, leaves_after, calls):
    assert stepped(rounds, leaves_after) == [(calls, True)] * 2


@pytest.mark.slow
def test_a_signal_ends_all_after_the_same_round():
    assert stepped([[0, 0, 1]] * 4, signal_after=4) == [(6, True)] * 2


@pytest.mark.parametrize('count, synchronous', [(2, False), (1, True)])
def test_parameter_servers_take_one_build(graph, count, synchronous):
    cluster = Cluster('ps', ['127.0.0.1:1', '127.0.0.1:2'][:count], ['127.0.0.1:3'],
                      synchronous=synchronous)
    with pytest.raises(ClusterError, match="has a build with cluster= already, and parameter "
                       "servers take one a graph: use kind='ring'"):
        two_builds(cluster, tf.ones([4], tf.float64))
