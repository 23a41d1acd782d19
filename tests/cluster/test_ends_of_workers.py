"""Workers of parameter servers that end before the others, or whose chief does."""

import signal
import threading
import time
import types

import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.errors import WorkerLostError
from one_process import StopWithoutSignals, halving, serve, together


@pytest.mark.slow
def test_asynchronous_workers_stop_with_the_chief():
    """It makes 3 steps, two of them when the other has made 5."""
    make, other_trains = serve(2, synchronous=False), threading.Event()

    def work(rank):
        with tf.Graph().as_default():
            cluster = make(rank)
            built = halving(cluster)
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
    chief, other = together(work, 2)
    assert chief == (True, 3)
    assert other[0] and other[1] >= 5


@pytest.mark.slow
@pytest.mark.parametrize('synchronous', [True, False])
def test_a_chief_that_fails_before_its_session_ends_the_others(synchronous):
    cluster_of, errors = serve(2, synchronous=synchronous), []

    def work(rank):
        with tf.Graph().as_default():
            cluster = cluster_of(rank)
            built = halving(cluster)
            with pytest.raises((WorkerLostError, IOError)) as raised:
                with towers.join(cluster, built, start_timeout=5., say=lambda line: None) as joined:
                    if cluster.is_chief:
                        time.sleep(1.)
                        raise IOError('no such folder')
                    with joined.session() as session:
                        session.run(built.train_op)
            errors.append((rank, str(raised.value)))
    together(work, 2)
    assert dict(errors)[0] == 'no such folder'
    assert dict(errors)[1].startswith('worker 0 (%s) is lost: ' % cluster_of(0).workers[0])
    assert 'it has ended: OSError: no such folder' in dict(errors)[1]


@pytest.mark.parametrize('cluster', [
    towers.Cluster('ring', ['a:1']),
    towers.Cluster('ps', ['a:1', 'b:2'], ['c:3'], synchronous=False, rank=1)])
def test_where_workers_do_not_wait_for_each_other_each_stops_by_itself(cluster):
    built = halving(cluster)
    hook = towers.StopTogetherHook(cluster, built)
    with pytest.raises(towers.ClusterError, match='is for sessions within towers.join'):
        hook.begin()
    built.machines.join(types.SimpleNamespace(is_over=False, stopped_by=None, made=0))
    hook.begin()
    stopped = []
    context = types.SimpleNamespace(request_stop=lambda: stopped.append(True))
    hook.after_run(context, None)
    assert not stopped
    hook.stop(signal.SIGTERM)
    hook.after_run(context, None)
    assert stopped == [True] and hook.received == signal.SIGTERM
