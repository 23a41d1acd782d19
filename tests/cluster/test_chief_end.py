"""Asynchronous workers end when the chief does, also those that count no steps."""

import threading
import time

import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.errors import WorkerLostError
from one_process import StopWithoutSignals, let_workers_come_again, serve, together


@pytest.mark.slow
def test_a_worker_stops_with_the_chief_and_waits_for_the_chief_of_the_next_run(
        monkeypatch):
    """Of two runs on the same server; the chief makes 3 steps in each, two of them when the other
    has made 5, and joins the second run late."""
    let_workers_come_again(monkeypatch)
    make = serve(2, synchronous=False)

    def work(rank, other_trains, pause):
        if rank == 0:
            time.sleep(pause)
        with tf.Graph().as_default():
            cluster = make(rank)
            built = towers.build_towers(
                lambda x: tf.reduce_mean(x) * tf.get_variable(
                    'w', [], tf.float64, tf.zeros_initializer()),
                tf.constant([1. + rank], tf.float64), tf.train.GradientDescentOptimizer(.5), 1,
                'mean', cluster=cluster)
            stop, made = StopWithoutSignals(cluster, built), 0
            with towers.join(cluster, built, start_timeout=30., dead_after=20.) as joined:
                with joined.session([stop]) as session:
                    while not session.should_stop() and (rank or made < 3):
                        if rank == 0 and made == 1:
                            assert other_trains.wait(30.)
                        session.run(built.train_op)
                        made += 1
                        if rank and made == 5:
                            other_trains.set()
            return stop.is_told, made
    for pause in (0., 1.5):
        event = threading.Event()
        chief, other = together(lambda rank: work(rank, event, pause), 2)
        assert chief == (False, 3)
        assert other[0] and other[1] >= 5


@pytest.mark.slow
def test_a_worker_that_comes_too_late_is_told_so():
    make = serve(2, synchronous=False)
    over, said = threading.Event(), []

    def work(rank):
        with tf.Graph().as_default():
            cluster = make(rank)
            built = towers.build_towers(
                lambda x: tf.reduce_mean(x) * tf.get_variable('w', []), tf.ones([2]),
                tf.train.GradientDescentOptimizer(.5), 1, 'mean', cluster=cluster)
            if rank:
                assert over.wait(30.)
            with towers.join(cluster, built, start_timeout=30. if rank == 0 else 2.,
                             say=said.append) as joined:
                with joined.session([StopWithoutSignals(cluster, built)]) as session:
                    session.run(built.train_op)
                over.set()
    with pytest.raises(WorkerLostError, match=(
            r'worker 1 \(.*\) comes when worker 0 \(.*\), the chief, has ended its training, and '
            'no other session')):
        together(work, 2)
