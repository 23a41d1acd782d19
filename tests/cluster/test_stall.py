"""A step that takes long: who does not answer."""

import contextlib
import socket
import time

import pytest

from towers import Cluster
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


def test_who_does_not_answer_is_named():
    workers, ps = addresses(2, 1)
    with contextlib.closing(socket.socket()) as server:
        host, port = ps[0].split(':')
        server.bind((host, int(port)))
        server.listen(5)
        line = said(Cluster('ps', workers, ps))
    assert 'worker 1 (%s) does not answer: start it again' % workers[1] in line
    assert 'ps 0' not in line
    assert 'worker 0' not in line  # itself, whose port nobody listens at here


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


@pytest.mark.slow
@pytest.mark.version_independent
def test_where_all_answer_one_is_slow():
    ps = addresses(1)
    with contextlib.closing(socket.socket()) as server:
        host, port = ps[0].split(':')
        server.bind((host, int(port)))
        server.listen(5)
        assert 'frozen, or slow' in said(Cluster('ps', addresses(1), ps))


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
