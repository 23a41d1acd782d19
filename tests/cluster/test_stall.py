"""A step on parameter servers that takes long: who is waited for, and when nobody waits longer."""

import os
import signal
import time
import types

import pytest
import tensorflow.compat.v1 as tf

import towers
from towers import Cluster, StopTogetherHook
from towers.cluster.connection import connect, meet
from towers.cluster.coordinator import Coordinator
from towers.cluster.ports import listen
from towers.cluster.served_connection import ServedConnection
from towers.errors import ClusterError
from one_process import addresses

SAME = {'kind of cluster': 'ps', 'reduction': 'mean', '_settings': {}, '_builds': []}


class Workers:
    """Workers of parameter servers in this process: worker 0 in the middle of a step, and others.

    Attributes:
      said, losses: lines of worker 0, and of its coordinator; and errors by which it would end.
    """

    def __init__(self, count=2, backup_workers=0, dead_after=0.2, start_timeout=60.):
        self.said, self.losses, self._count = [], [], count
        self._address, self._dead_after = addresses(1)[0], dead_after
        self._backup_workers = backup_workers
        self.coordinator = Coordinator(
            self.cluster(0), SAME, listen(self._address, print), dead_after, start_timeout,
            self.said.append)
        self.chief = self._connection(0, self.coordinator.own_end, self.said, self.losses)
        self.chief.begin_session()

    def cluster(self, rank):
        return Cluster('ps', ['w:%d' % (1 + each) for each in range(self._count)], ['ps:1'],
                       rank=rank, backup_workers=self._backup_workers)

    def _connection(self, rank, connected, said, losses, fingerprint=SAME):
        cluster = self.cluster(rank)
        lines = meet(cluster, fingerprint, connected, time.monotonic() + 60, said.append)
        return ServedConnection(cluster, lines, self._dead_after, said.append, losses.append,
                                fingerprint, self._address)

    def come(self, rank, fingerprint=SAME):
        """Another worker's connection."""
        connected = connect(self.cluster(rank), self._address, time.monotonic() + 60, print)
        return self._connection(rank, connected, [], [], fingerprint)

    def says(self, text):
        until(lambda: any(text in line for line in self.said))
        assert any(text in line for line in self.said), self.said

    def loses(self, text):
        until(lambda: self.losses)
        assert text in str(self.losses[0])


def until(is_so):
    deadline = time.monotonic() + 60
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.parametrize('rank, backup_workers, in_vain', [
    (1, 0, True), (1, 1, False), pytest.param(0, 1, True, marks=pytest.mark.slow)])
def test_a_step_that_waits_for_a_worker_that_has_ended_is_over(rank, backup_workers, in_vain):
    """One of three workers that is not needed may end; the chief, which makes the update, not."""
    workers = Workers(3, backup_workers)
    others = [workers.come(1), workers.come(2)]
    waits = others[1] if rank == 0 else workers.chief
    waits.begin_step('0')
    (workers.chief if rank == 0 else others[0]).leave()
    if rank == 0:
        until(lambda: waits.is_over)
        assert waits.is_over
    elif in_vain:
        workers.loses('worker 1 (w:2) is lost: it has ended its training, perhaps for lack of data')
    else:
        workers.says('all workers are alive, so one of them is slow')
        assert not workers.losses


def test_a_first_step_whose_worker_never_comes_ends():
    workers = Workers(start_timeout=0.5)
    workers.chief.begin_step('0')
    workers.says('waiting        for worker 1 (w:2), start_timeout is 0.5 s')
    workers.loses('there is no word of it within start_timeout: start it, or give a longer one')


def test_a_worker_that_is_refused_is_waited_for_and_named():
    workers = Workers(start_timeout=1.)
    with pytest.raises(ClusterError, match='its reduction is sum, and that of worker 0 mean'):
        workers.come(1, dict(SAME, reduction='sum'))
    workers.chief.begin_step('0')
    workers.says('for worker 1 (w:2), which was refused: its reduction is sum, and that of ')
    workers.loses('it was refused: its reduction is sum')


def test_a_process_that_was_told_to_stop_waits_no_longer():
    workers = Workers()
    workers.come(1).fail('killed')
    workers.chief.begin_step('0')
    workers.says('killed')
    assert not workers.losses  # without a signal it waits on, and says so
    workers.chief.stop(15)
    workers.loses('worker 0 (w:1) was told to stop, and its step takes more than 0.2 seconds: '
                  'worker 1 (w:2): it has ended: killed')


def test_a_chief_that_is_gone_is_looked_for():
    workers, said = Workers(dead_after=600.), []
    other = workers.come(1)
    other.begin_session()
    workers.chief.close()
    workers.coordinator.close()
    until(lambda: other.chief_gone)
    assert other.chief_gone.startswith('its process has ended')
    again = Coordinator(workers.cluster(0), SAME, listen(workers._address, print), 600., 60., print)
    until(lambda: not other.chief_gone)
    assert not other.chief_gone and again._workers[1].lines is not None


def hook_of(cluster):
    built = towers.build_towers(lambda x: tf.reduce_mean(x * tf.get_variable('w', [])),
                                tf.ones([2]), tf.train.GradientDescentOptimizer(.1), 1,
                                cluster=cluster)
    hook, stopped = StopTogetherHook(cluster, built), []
    hook._coordinator = types.SimpleNamespace(request_stop=lambda: stopped.append(True))
    return hook, built, stopped


def test_the_others_learn_of_a_signal_at_once():
    """In another thread: the main one may be in a step that never ends."""
    hook, built, _ = hook_of(towers.Cluster('ps', ['a:1', 'b:2'], ['c:3']))
    told = []
    built.machines.join(types.SimpleNamespace(stop=told.append))
    hook.after_create_session(None, hook._coordinator)
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: told)
        assert told == [signal.SIGTERM]
    finally:
        hook.restore()


@pytest.mark.parametrize('cluster', [
    towers.Cluster('ring', ['a:1']),
    towers.Cluster('ps', ['a:1', 'b:2'], ['c:3'], synchronous=False, rank=1)])
def test_where_workers_do_not_wait_for_each_other_each_stops_by_itself(cluster):
    hook, built, stopped = hook_of(cluster)
    built.machines.join(types.SimpleNamespace(is_over=False, stopped_by=None))
    hook.after_run(hook._coordinator, None)
    assert not stopped
    hook.stop(signal.SIGTERM)
    hook.after_run(hook._coordinator, None)
    assert stopped == [True] and hook.received == signal.SIGTERM
