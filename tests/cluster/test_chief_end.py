"""Asynchronous workers end when the chief does, also those that count no steps."""

import threading
import time

import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.cluster.member import start_server
from towers.errors import WorkerLostError
from one_process import StopWithoutSignals, addresses, together


@pytest.mark.slow
@pytest.mark.parametrize('kind_of_variables', [False, True])
def test_a_worker_stops_with_the_chief_and_begins_again_with_it(kind_of_variables):
    """Two sessions, one after the other; the chief makes 3 steps in each, two of them when
    the other has made 5."""
    workers, ps = addresses(2, 1)
    make = lambda job, rank: towers.Cluster('ps', workers, ps, job, rank, synchronous=False)
    server = start_server(make('ps', 0), make('ps', 0).session_config(tf.ConfigProto()))
    assert server
    other_trains = [threading.Event() for _ in range(2)]

    def work(rank):
        with tf.Graph().as_default(), tf.variable_scope('', use_resource=kind_of_variables):
            cluster = make('worker', rank)
            built = towers.build_towers(
                lambda x: tf.reduce_mean(x) * tf.get_variable(
                    'w', [], tf.float64, tf.zeros_initializer()),
                tf.constant([1. + rank], tf.float64), tf.train.GradientDescentOptimizer(.5), 1,
                'mean', cluster=cluster)
            told, counts = [], []
            with towers.join(cluster, built, start_timeout=30., dead_after=20.) as member:
                for turn in range(2):
                    stop, made = StopWithoutSignals(cluster, built), 0
                    with member.session([stop]) as session:
                        while not session.should_stop() and (rank or made < 3):
                            if rank == 0 and made == 1:
                                assert other_trains[turn].wait(30.)
                            session.run(built.train_op)
                            made += 1
                            if rank and made == 5:
                                other_trains[turn].set()
                    if rank == 0:  # the other is there before the next session begins
                        time.sleep(1.)
                    told.append(stop.is_told)
                    counts.append(made)
            return told, counts
    chief, other = together(work, 2)
    assert chief == ([False, False], [3, 3])
    assert other[0] == [True, True] and min(other[1]) >= 5


@pytest.mark.slow
def test_a_worker_that_comes_too_late_is_told_so():
    workers, ps = addresses(2, 1)
    make = lambda job, rank: towers.Cluster('ps', workers, ps, job, rank, synchronous=False)
    server = start_server(make('ps', 0), make('ps', 0).session_config(tf.ConfigProto()))
    assert server
    over, said = threading.Event(), []

    def work(rank):
        with tf.Graph().as_default():
            cluster = make('worker', rank)
            built = towers.build_towers(
                lambda x: tf.reduce_mean(x) * tf.get_variable('w', []), tf.ones([2]),
                tf.train.GradientDescentOptimizer(.5), 1, 'mean', cluster=cluster)
            if rank:
                assert over.wait(30.)
            with towers.join(cluster, built, start_timeout=30. if rank == 0 else 2.,
                             say=said.append) as member:
                with member.session([StopWithoutSignals(cluster, built)]) as session:
                    session.run(built.train_op)
                over.set()
    with pytest.raises(WorkerLostError, match=r'worker 1 \(.*\) comes when worker 0 \(.*\), the chief'
                                              ', has ended its training, and no other session'):
        together(work, 2)
