"""Workers of parameter servers that end before the others, or whose chief does."""

import queue
import threading
import time

import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.errors import WorkerLostError
from one_process import StopWithoutSignals, halving, let_workers_come_again, serve, together


@pytest.mark.slow
def test_a_worker_stops_with_the_chief_and_waits_for_that_of_the_next_run(monkeypatch):
    """Of two runs on the same server; the chief makes 3 steps in each, two of them when the other
    has made 5, and joins the second run late."""
    let_workers_come_again(monkeypatch)
    make = serve(2, synchronous=False)

    def work(rank, other_trains, pause):
        if rank == 0:
            time.sleep(pause)
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
    for pause in (0., 1.5):
        event = threading.Event()
        chief, other = together(lambda rank: work(rank, event, pause), 2)
        assert chief == (False, 3)
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
    assert dict(errors)[1].startswith('worker 1 (%s) cannot begin' % cluster_of(0).workers[1])
    assert 'it has ended: OSError: no such folder' in dict(errors)[1]


class Gone(Exception):
    """What ends a worker before the others."""


@pytest.mark.slow
@pytest.mark.parametrize('in_good_order', [True, False])
def test_a_worker_that_has_ended_is_named_and_one_that_is_gone_is_waited_for(
        in_good_order, monkeypatch):
    """Of three steps the second worker makes two, and the third when it is started again."""
    let_workers_come_again(monkeypatch)
    cluster_of, lost, said, weights = serve(2), queue.Queue(), queue.Queue(), []

    def work(rank, steps, ends=True):
        with tf.Graph().as_default():
            cluster = cluster_of(rank)
            built = halving(cluster)
            with towers.join(cluster, built, dead_after=1., say=said.put,
                             on_lost=lost.put) as joined, joined.session() as session:
                for _ in range(steps):
                    session.run(built.train_op)
                if not ends:
                    raise Gone('a reason')
                if rank == 0:
                    weights.append(session.run_step_fn(
                        lambda step_context: step_context.session.run(built.variables[0])))
    chief = threading.Thread(target=work, args=(0, 3), daemon=True)
    chief.start()
    other = cluster_of(0).workers[1]
    if in_good_order:
        work(1, 2)
        assert str(lost.get(timeout=60)).startswith(
            'worker 1 (%s) is lost: it has ended its training, perhaps for lack of data' % other)
    else:
        with pytest.raises(Gone):
            work(1, 2, ends=False)
        expected = ('worker 1 (%s): it has ended: Gone: a reason. Start it again, and the run goes '
                    'on' % other)
        while not said.get(timeout=60).endswith(expected):
            pass
        assert lost.empty()
    work(1, 1)
    chief.join(60)
    assert weights == [1.]
