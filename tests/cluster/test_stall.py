"""A step that takes long: who does not answer."""

import os
import signal
import time
import types

import pytest
import tensorflow.compat.v1 as tf

import towers
from towers import Cluster, StopTogetherHook
from towers.cluster import stall
from towers.cluster.stall import StallWatch
from towers.cluster.worker_notes import FAILED, JOINED, Note, REFUSED


class Heard:
    """A `StallWatch` of worker 0, in the middle of a step, and what it says and does."""

    def __init__(self, monkeypatch, workers=2, backup_workers=0, seconds=0.1, start_timeout=0.3,
                 again=30., silent=(), notes=None, told=(), ended=()):
        monkeypatch.setattr(stall, 'AGAIN', again)
        monkeypatch.setattr(stall, '_all_answers',
                            lambda addresses: [each not in silent for each in addresses])
        self.lines, self.missing, self.notes, self.told, self.over = [], [], notes, [], []
        cluster = Cluster('ps', ['w:%d' % (1 + each) for each in range(workers)], ['ps:1'],
                          backup_workers=backup_workers)
        self.watch = StallWatch(cluster, seconds, self.lines.append, lambda: list(ended),
                                self.over.append,
                                told_to_stop=lambda: bool(told), on_told=self.told.append,
                                notes=lambda: self.notes, start_timeout=start_timeout,
                                on_missing=self.missing.append)

    def until_all_came(self):
        self.until(lambda: self.watch._all_came, close=False)

    def until(self, is_so, close=True):
        deadline = time.time() + 60
        while not is_so() and time.time() < deadline:
            time.sleep(0.01)
        if close:
            self.watch.close()
        return self.lines


@pytest.mark.parametrize('ended, backup_workers, in_vain', [
    ([1], 0, True), ([1], 1, False), ([0], 1, True)])
def test_a_step_that_waits_for_a_worker_that_has_ended_is_over(
        monkeypatch, ended, backup_workers, in_vain):
    """One of three workers that is not needed may end; the chief, which makes the update, not."""
    heard = Heard(monkeypatch, 3, backup_workers, ended=ended)
    heard.watch.step_begins()
    heard.until(lambda: heard.lines or heard.over)
    assert (len(heard.lines), heard.over) == ((0, [ended]) if in_vain else (1, []))


def test_a_process_that_was_told_to_stop_waits_no_longer(monkeypatch):
    told = []
    heard = Heard(monkeypatch, silent=('w:2',), told=told)
    heard.watch.step_begins()
    heard.until(lambda: heard.lines, close=False)
    assert not heard.told  # without a signal it waits on, and says so
    told.append(True)
    heard.until(lambda: heard.told)
    assert heard.told == ['worker 1 (w:2) does not answer']


@pytest.mark.parametrize('note, why', [
    (Note(REFUSED, 'its model is another one'), 'worker 1 was refused: its model is another one'),
    (Note('', ''), 'there is no word of worker 1 (w:2) within start_timeout: start it, or give a '
     'longer one')])
def test_a_first_step_whose_worker_never_comes_ends(monkeypatch, note, why):
    heard = Heard(monkeypatch, notes={0: Note(JOINED, ''), 1: note})
    heard.watch.step_begins()
    lines = heard.until(lambda: heard.missing)
    assert heard.missing == [why]
    waiting = ['waiting        for worker 1 (w:2)%s, start_timeout is 0.3 s' % (
        ' (which was refused: it joins when it is started again as worker 0 is)' * bool(note.kind))]
    refused = ['refused        worker 1: its model is another one'] * bool(note.kind)
    assert lines == refused + waiting  # not: start it again, or one of them is slow


@pytest.mark.parametrize('note, text', [
    (Note(FAILED, 'ValueError: shape (5,).'), 'worker 1 (w:2) has ended: ValueError: shape (5,). '
     'When that is mended, start it again, and the run goes on'),
    (Note(REFUSED, 'its reduction is sum'), 'worker 1 (w:2) was refused: its reduction is sum. It '
     'joins when it is started as worker 0 is')])
def test_why_a_worker_has_ended_is_said_and_no_wrong_advice(monkeypatch, note, text):
    heard = Heard(monkeypatch, silent=('w:2',), notes={0: Note(JOINED, ''), 1: Note(JOINED, '')})
    heard.until_all_came()
    heard.notes[1] = note
    heard.watch.step_begins()
    assert heard.until(lambda: heard.lines)[-1] == (
        'waiting        the step takes more than 0.1 seconds; ' + text)


@pytest.mark.parametrize('backup_workers, rank, said', [
    pytest.param(1, 1, False, marks=pytest.mark.slow), (1, 0, True)])
def test_an_error_of_a_worker_is_said_before_dead_after(monkeypatch, backup_workers, rank, said):
    """Of one that the step needs: the chief, or more of the others than may be left out."""
    monkeypatch.setattr(stall, 'FIRST', 0.2)
    monkeypatch.setattr(stall, '_PAUSE', 0.05)
    notes = {each: Note(JOINED, '') for each in range(3)}
    heard = Heard(monkeypatch, 3, backup_workers, seconds=60., notes=notes)
    heard.watch._cluster = heard.watch._cluster._replace(rank=2)
    heard.until_all_came()
    notes[rank] = Note(FAILED, 'CheckpointError: No space left on device.')
    heard.watch.step_begins()
    assert heard.until(lambda: heard.lines or not said and time.sleep(0.6) is None) == [
        'waiting        the step takes more than 0.2 seconds; worker %d (w:%d) has ended: '
        'CheckpointError: No space left on device. When that is mended, start it again, and the '
        'run goes on' % (rank, rank + 1)] * said


@pytest.mark.parametrize('silent, said', [(('ps:1',), True), (('w:2',), False)])
def test_between_two_steps_a_server_is_waited_for_and_no_worker(monkeypatch, silent, said):
    """A checkpoint, or another session, needs the servers alone."""
    heard = Heard(monkeypatch, silent=silent)
    heard.watch.step_ends()
    time.sleep(0.25)
    heard.watch.close()
    assert heard.lines == ['waiting        no step for more than 0.1 seconds; ps 0 (ps:1) does not '
                           'answer: start it again, and the run goes on'] * said


@pytest.mark.parametrize('answer, said', [
    (False, 'worker 1 (w:2), ps 0 (ps:1) do not answer: start them again, and the run goes on'),
    (None, 'worker 1 (w:2), ps 0 (ps:1) take connections and say nothing: their processes are '
     'frozen')])
def test_several_that_do_not_answer(monkeypatch, answer, said):
    heard = Heard(monkeypatch)
    monkeypatch.setattr(stall, '_all_answers', lambda addresses: [answer] * len(addresses))
    heard.watch.step_begins()
    assert heard.until(lambda: heard.lines)[-1] == (
        'waiting        the step takes more than 0.1 seconds; ' + said)


def hook_of(cluster):
    built = towers.build_towers(lambda x: tf.reduce_mean(x * tf.get_variable('w', [])),
                                tf.ones([2]), tf.train.GradientDescentOptimizer(.1), 1,
                                cluster=cluster)
    hook, stopped = StopTogetherHook(cluster, built), []
    hook._coordinator = types.SimpleNamespace(request_stop=lambda: stopped.append(True))
    return hook, stopped


def test_the_watch_of_a_step_on_parameter_servers_learns_of_a_signal_at_once():
    """In another thread: the main one may be in a step that never ends."""
    hook, _ = hook_of(towers.Cluster('ps', ['a:1', 'b:2'], ['c:3']))
    hook.after_create_session(None, hook._coordinator)
    try:
        assert not hook._machines.told_to_stop
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.time() + 10
        while not hook._machines.told_to_stop and time.time() < deadline:
            time.sleep(0.01)
        assert hook._machines.told_to_stop
    finally:
        hook.restore()


@pytest.mark.parametrize('cluster', [
    towers.Cluster('ring', ['a:1']),
    towers.Cluster('ps', ['a:1', 'b:2'], ['c:3'], synchronous=False)])
def test_where_workers_do_not_wait_for_each_other_each_stops_by_itself(cluster):
    hook, stopped = hook_of(cluster)
    hook.step_done(None)
    assert not stopped
    hook.stop(signal.SIGTERM)
    hook.step_done(None)
    assert stopped == [True] and hook.received == signal.SIGTERM
