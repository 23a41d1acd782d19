"""A step that takes long: who does not answer."""

import contextlib
import socket
import threading
import time

import pytest

from towers import Cluster
from towers.cluster import stall
from towers.cluster.stall import StallWatch
from towers.cluster.watch import Watch
from one_process import addresses


def said(cluster):
    lines = []
    watch = StallWatch(cluster, 0.2, lines.append)
    watch.step_begins()
    watch.step_ends()
    time.sleep(0.5)
    assert lines == []  # between steps nothing is said
    watch.step_begins()
    deadline = time.time() + 20
    while not lines and time.time() < deadline:
        time.sleep(0.02)
    time.sleep(0.5)
    watch.close()
    (line,) = lines  # once a step
    return line


@contextlib.contextmanager
def server(address, speaks):
    """What answers connections as TensorFlow's server does; or, as a frozen one, takes them."""
    host, port = address.split(':')
    with contextlib.closing(socket.socket()) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, int(port)))
        listener.listen(5)

        def answer():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with contextlib.closing(connection):
                        connection.sendall(b'\0\0\0\x04\0\0\0\0\0')  # settings of HTTP/2
        if speaks:
            threading.Thread(target=answer, daemon=True).start()
        yield


def test_who_does_not_answer_is_named():
    workers, ps = addresses(2, 1)
    with server(ps[0], speaks=True):
        line = said(Cluster('ps', workers, ps))
    assert line.endswith('; worker 1 (%s) does not answer: start it again, and the run goes on'
                         % workers[1])


def test_one_that_is_frozen_is_named(monkeypatch):
    """The system takes the connection, and the process says nothing."""
    workers, ps = addresses(1, 2)
    monkeypatch.setattr(stall._answers, '__defaults__', (0.3,))
    with server(ps[0], speaks=False), server(ps[1], speaks=True):
        line = said(Cluster('ps', workers, ps))
    assert line.endswith('; ps 0 (%s) takes connections and says nothing: its process is frozen'
                         % ps[0])


@pytest.mark.version_independent
@pytest.mark.parametrize('ended, backup_workers, in_vain', [
    ([1], 0, True), ([1], 1, False), ([0], 1, True), ([1, 2], 1, True), ([], 0, False)])
def test_a_step_that_waits_for_a_worker_that_has_ended(ended, backup_workers, in_vain):
    """One of three workers that is not needed may end; the chief, which makes the update, not."""
    workers, ps = addresses(3, 1)
    lines, found = [], []
    watch = StallWatch(Cluster('ps', workers, ps, backup_workers=backup_workers), 0.1,
                       lines.append, lambda: ended, found.append)
    watch.step_begins()
    deadline = time.time() + 20
    while not lines and not found and time.time() < deadline:
        time.sleep(0.02)
    time.sleep(0.1)
    watch.close()
    assert (len(lines), found) == ((0, [ended]) if in_vain else (1, []))


@pytest.mark.version_independent
def test_a_process_that_was_told_to_stop_waits_no_longer():
    workers, ps = addresses(2, 1)
    lines, told, found = [], [], []
    with server(ps[0], speaks=True):
        watch = StallWatch(Cluster('ps', workers, ps), 0.1, lines.append,
                           told_to_stop=lambda: bool(told), on_told=found.append)
        watch.step_begins()
        deadline = time.time() + 20
        while not lines and time.time() < deadline:
            time.sleep(0.02)
        assert lines and not found  # without a signal it waits on, and says so once
        told.append(True)
        while not found and time.time() < deadline:
            time.sleep(0.02)
        watch.close()
    assert len(lines) == 1
    assert found == ['worker 1 (%s) does not answer' % workers[1]]


@pytest.mark.slow
@pytest.mark.version_independent
def test_where_all_answer_one_is_slow():
    workers, ps = addresses(1, 1)
    with server(ps[0], speaks=True):
        assert said(Cluster('ps', workers, ps)).endswith('; all workers and servers answer, so one '
                                                         'of them is slow, or has run '
                                                         'built.gradients without the step')


def test_servers_that_are_waited_for():
    workers, ps = addresses(1, 2)
    cluster = Cluster('ps', workers, ps)
    with server(ps[1], speaks=True):
        assert stall.silent_servers(cluster) == 'ps 0 (%s)' % ps[0]
        with server(ps[0], speaks=True):
            assert stall.silent_servers(cluster) == 'ps 0 (%s), ps 1 (%s)' % tuple(ps)


def test_a_worker_that_has_just_ended_its_training_is_waited_for():
    """However long the step takes that this worker is in: it may be the last one of both."""
    watch, lost = Watch.__new__(Watch), []
    now = time.monotonic()
    watch._dead_after, watch._heard, watch._done = 5., {1: now}, {1: now - 1.}
    watch._lose = lambda rank, why: lost.append(rank)
    watch._in_step_since = now - 100.
    watch._look_for_silence(now)
    assert lost == []
    watch._done = {1: now - 6.}
    watch._look_for_silence(now)
    assert lost == [1]
    watch._in_step_since = now - 4.
    watch._look_for_silence(now)
    assert lost == [1]
