"""Worker 0's coordinator and its connections: sockets of one process, without TensorFlow."""

import contextlib
import json
import os
import random
import re
import signal
import socket
import threading
import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from towers import Cluster
from towers.cluster import addresses as addresses_module, coordinator as coordinator_module
from towers.cluster.connection import Connection
from towers.cluster.coordinator import Coordinator
from towers.cluster.addresses import connect, listen
from towers.cluster.messages import Lines, digest_of
from towers.errors import ClusterError, WorkerLostError
from case_marks import first_fast
from cluster_runs import NO_WORKER, answering, wait_until
from one_process import addresses, together

PATIENCE = 120.  # seconds that a loaded machine may take for what comes at once
SAME = {'values': {'kind of cluster': 'ring', 'every': 2}, 'settings': {'--seed': 1}, 'builds': [{
    'values': {}, 'variables': {'w': 'float32 (2,)'}, 'gradients': {'w': 'dense float32'},
    'state': {}, 'shapes': [], 'loss': [], 'update': []}]}


@pytest.fixture(autouse=True)
def frequent_looks(monkeypatch):
    """The coordinator's thread looks more often: many tests wait for its next look."""
    monkeypatch.setattr(coordinator_module, '_PAUSE', .02)


class Member:
    """A worker: its `Connection`, the coordinator of worker 0, and what both say."""

    def __init__(self, workers, rank, signature=SAME, seconds=PATIENCE, dead_after=600.,
                 said=None, cluster=None):
        self.said, self.losses = [] if said is None else said, []
        cluster, deadline = cluster or Cluster('ring', workers), time.monotonic() + seconds
        cluster, serve = cluster._replace(rank=rank), None
        if rank == 0:
            listener = listen(workers[0])
            self.coordinator = Coordinator(cluster, signature, listener, dead_after,
                                           self.said.append)
            connected, serve = self.coordinator.own_end, self.coordinator.serve
        else:
            connected = connect(workers[0], cluster.who(0), deadline, self.said.append)
        self.connection = Connection(cluster, signature, connected, dead_after,
                                     self.said.append, self.losses.append, serve)
        try:
            self.connection.meet(deadline)
        except ClusterError:
            error = None
            if rank == 0 and self.connection.lost is None:
                error = self.coordinator.give_up()
            self.connection.close()
            if error is not None:
                self.coordinator.close()
                raise error
            raise

    def lost(self):
        """Waits until a worker is lost; `(rank, why)`."""
        assert self.connection.error(PATIENCE)
        return self.connection.lost


def make_step(connection, builds=(0,)):
    with connection.step(builds):
        pass


def members(count, **options):
    workers = addresses(count)
    return together(lambda rank: Member(workers, rank, **options), count)


def test_a_step_begins_on_all_workers_or_on_none():
    """Three workers take turns to end their loops and to get signals, at any time."""
    of_all = members(3)
    draw = random.Random(0)
    plans = [(draw.randrange(3), draw.randrange(8), draw.random() < .5) for _ in range(20)]

    def work(rank):
        connection, made = of_all[rank].connection, []
        for who, last, is_signal in plans:
            assert connection.begin_session() is None
            steps = 0
            with contextlib.suppress(tf.errors.OutOfRangeError):
                while not connection.is_over and not (
                        rank == who and not is_signal and steps == last):
                    if rank == who and is_signal and steps == last:
                        connection.ask(15)
                    make_step(connection)
                    steps += 1
            connection.leave()
            made.append((steps, connection.stopped_by))
        connection.finish()
        return made
    found = together(work, 3, seconds=PATIENCE)
    assert found[0] == found[1] == found[2] == [
        (last + is_signal, (who, 15) if is_signal else None) for who, last, is_signal in plans]
    assert not any(each.losses or each.said for each in of_all)


def test_equal_values_that_json_tells_apart_differ():
    of_all = members(2)
    zeros = [[0., 0.], [-0., 0.]]

    def work(rank):
        connection = of_all[rank].connection
        connection.begin_session()
        return [connection.differing([zero]) for zero in zeros[rank]]
    assert together(work, 2) == [[1, None]] * 2


def test_a_signal_that_ends_a_session_is_told_though_the_next_session_waits():
    of_all = members(2)

    def work(rank):
        connection = of_all[rank].connection
        connection.begin_session()
        if rank == 1:
            connection.ask(15)
            connection.leave()
        else:
            wait_until(lambda: of_all[0].coordinator._workers[1].session == 2, PATIENCE)
            with pytest.raises(tf.errors.OutOfRangeError):
                make_step(connection)
            assert connection.stopped_by == (1, 15)
        connection.begin_session()
        make_step(connection)
        assert not connection.is_over and connection.stopped_by is None
    together(work, 2)


def test_after_a_wait_that_was_interrupted_nothing_begins():
    """The first answer would be taken for the second one."""
    of_all = members(2)
    first, second = [each.connection for each in of_all]

    def interrupt(is_over):
        raise KeyboardInterrupt
    second._hear_until = interrupt
    with pytest.raises(KeyboardInterrupt):
        second.begin_session()
    del second._hear_until
    with pytest.raises(ClusterError, match='a wait for the other workers was interrupted'):
        second.begin_session()
    second.fail('a reason')
    assert of_all[0].lost() == (1, 'it has ended: a reason')
    with pytest.raises(WorkerLostError):
        first.begin_session()


def test_nothing_begins_after_a_loss():
    """Worker 2 waits to begin when it fails, and worker 0 did so before: worker 1 begins last."""
    workers = addresses(3)
    with contextlib.ExitStack() as stack:
        cluster = Cluster('ring', workers)
        coordinator = Coordinator(cluster, SAME, listen(workers[0]), 600., print)
        connected = [coordinator.own_end] + [socket.create_connection(
            workers[0].split(':')) for _ in range(2)]
        lines = [Lines(each) for each in connected]
        for rank, each in enumerate(lines):
            stack.callback(each.close)
            each.send({'type': 'hello', 'rank': rank, 'digest': digest_of(SAME)})
        for each in lines:
            wait_for(each, 'welcome')
        for rank in (0, 2):
            lines[rank].send({'type': 'begin', 'session': 1, 'digest': 'a'})
        lines[2].send({'type': 'failed', 'why': 'a reason'})
        wait_for(lines[1], 'lost')
        lines[1].send({'type': 'begin', 'session': 1, 'digest': 'a'})
        assert not lines[1].has_data(.1)


def wait_for(lines, kind):
    """Takes messages until one of a kind comes."""
    while not any(message['type'] == kind for message in lines.take()):
        pass


@pytest.mark.skipif(not hasattr(os, 'fork'), reason='there are no forked processes')
def test_a_child_process_keeps_no_connection():
    """A child with a copy of the socket, such as one that loads data."""
    of_all = members(2)
    child = os.fork()
    if child == 0:
        time.sleep(PATIENCE)
        os._exit(0)
    try:
        together(lambda rank: of_all[rank].connection.finish(), 2)
        of_all[1].connection.close()
        of_all[0].connection.close()
        started = time.monotonic()
        of_all[0].coordinator.close()
        assert time.monotonic() - started < 5. and not of_all[0].coordinator._thread.is_alive()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_what_workers_have_alike_is_compared_and_the_first_that_differs_is_named():
    of_all = members(3)

    def work(rank):
        connection = of_all[rank].connection
        assert connection.begin_session(['w']) is None
        make_step(connection)
        found = [connection.differing(value) for value in ([1], ['w', rank == 2], [rank])]
        with pytest.raises(ClusterError, match='begin steps of other builds, or of other sessions'):
            make_step(connection, [rank])
        return found
    assert together(work, 3) == [[None, 2, 1]] * 3


def test_asynchronous_workers_wait_for_the_chiefs_session_and_go_on_without_one_that_is_lost():
    workers = addresses(4)
    cluster = Cluster('ps', workers, ['127.0.0.1:1'], synchronous=False)
    of_all = together(lambda rank: Member(workers, rank, cluster=cluster), 4)
    chief, other, lost, early = [each.connection for each in of_all]
    begins = threading.Thread(target=other.begin_session, daemon=True)
    begins.start()
    begins.join(.1)
    assert begins.is_alive()
    chief.begin_session()
    begins.join(PATIENCE)
    lost.fail('a reason')
    wait_until(lambda: of_all[0].said and of_all[1].said, PATIENCE)
    assert of_all[0].said == of_all[1].said == [
        'gone           worker 2 (%s), and the others train on without it: it has ended: a reason'
        % workers[2]]
    assert of_all[2].said == []
    together(lambda rank: early.finish(), 1)  # it does not wait for the others
    for _ in range(3):
        make_step(other)
    chief.leave()
    wait_until(lambda: other.is_over, PATIENCE)
    together(lambda rank: of_all[rank].connection.finish(), 2)
    assert not of_all[0].losses and not of_all[1].losses


def test_an_asynchronous_worker_that_was_frozen_is_told_that_it_is_given_up():
    """And ends by itself: the others would not count it, nor tell it of their end."""
    workers = addresses(3)
    cluster = Cluster('ps', workers, ['127.0.0.1:1'], synchronous=False)
    of_all = together(lambda rank: Member(workers, rank, cluster=cluster), 3)
    connection = of_all[1].connection

    def is_given_up():
        of_all[0].coordinator._workers[1].heard_at -= 1000.
        return connection.lost is not None
    wait_until(is_given_up, PATIENCE)
    error = connection.error()
    assert re.match(r'worker 1 \(.*\) is lost: there is no sign of life from it for 600 seconds. '
                    'Start all again', str(error))
    with pytest.raises(WorkerLostError, match='worker 1 .* is lost: there is no sign of life'):
        make_step(connection)
    wait_until(lambda: of_all[2].said, PATIENCE)
    assert re.match(r'gone           worker 1 \(.*\), and the others train on', of_all[2].said[0])
    assert not of_all[2].losses and len(of_all[1].losses) == 1 and not of_all[1].said


def test_what_a_worker_says_that_was_given_up_does_not_end_the_others():
    """Its network was cut, so that it has given up worker 0 meanwhile, too."""
    workers = addresses(3)
    cluster = Cluster('ps', workers, ['127.0.0.1:1'], synchronous=False)
    of_all = together(lambda rank: Member(workers, rank, cluster=cluster), 3)

    def is_given_up():
        of_all[0].coordinator._workers[1].heard_at -= 1000.
        return of_all[2].said
    wait_until(is_given_up, PATIENCE)
    for message in ({'type': 'lost', 'rank': 0, 'why': 'silence'}, {'type': 'failed', 'why': 'it'}):
        of_all[1].connection._lines.send(message)
    of_all[1].connection.close()
    wait_until(lambda: len(of_all[0].coordinator._connections) == 2, PATIENCE)
    for each in of_all[0], of_all[2]:
        each.connection.begin_session()
        make_step(each.connection)
    assert not of_all[0].losses and not of_all[2].losses


def test_worker_0_is_told_that_the_others_have_given_it_up():
    """Else it would train on alone, of asynchronous workers, where another run may begin."""
    cluster = Cluster('ps', addresses(2), ['127.0.0.1:1'], synchronous=False)
    chief, other = [each.connection for each in together(
        lambda rank: Member(cluster.workers, rank, cluster=cluster), 2)]

    def is_given_up():
        other._heard_at -= 1000.
        return other.lost is not None
    wait_until(is_given_up, PATIENCE)
    assert chief.error(PATIENCE) and other.error()
    assert chief.lost == other.lost == (0, 'there is no sign of life from it for 600 seconds')


def test_a_worker_that_has_ended_is_told_for_whom_it_waits(monkeypatch):
    monkeypatch.setattr(coordinator_module, 'FIRST_LINE_AFTER', 0.1)
    of_all = members(2)
    ends = threading.Thread(target=of_all[1].connection.finish, daemon=True)
    ends.start()
    wait_until(lambda: of_all[1].said, PATIENCE)
    assert of_all[1].said[0].startswith('waiting        for worker 0 (127.0.0.1:')
    of_all[0].connection.finish()
    ends.join(PATIENCE)
    of_all[1].connection.close()
    with pytest.raises(ClusterError, match='the worker has left the cluster'):
        of_all[1].connection.begin_session()


def test_who_has_ended_long_before_others_is_lost_though_another_one_has_just_ended():
    of_all = members(3)
    for rank in (1, 2):
        threading.Thread(target=of_all[rank].connection.finish, daemon=True).start()
    records = of_all[0].coordinator._workers
    wait_until(lambda: records[1].has_ended and records[2].has_ended, PATIENCE)
    records[2].ended_at -= 1000.

    def wait_for_others():
        with contextlib.suppress(WorkerLostError):
            of_all[0].connection.begin_session()
    threading.Thread(target=wait_for_others, daemon=True).start()
    assert of_all[0].lost()[0] == 2


def test_a_step_that_does_not_end_is_said_by_all_who_are_in_it(monkeypatch):
    monkeypatch.setattr(coordinator_module, 'FIRST_LINE_AFTER', 0.1)
    of_all = members(2, dead_after=1.)

    def work(rank):
        of_all[rank].connection.begin_session()
        with of_all[rank].connection.step([0]):
            wait_until(lambda: any(re.match(
                r'waiting        for the end of a step that all have begun \d+ s ago: it is a long '
                'one, or some worker has no input$', line) for line in of_all[rank].said), PATIENCE)
    together(work, 2)


@pytest.mark.parametrize('error, does', first_fast(1, [
    (tf.errors.InvalidArgumentError(None, None, '0007.jpg is no JPEG'), 'a step'),
    (ValueError('0007.jpg is no JPEG'), 'nothing'),
    (tf.errors.OutOfRangeError(None, None, 'End of sequence'), 'a session')]))
def test_a_step_that_fails_on_one_worker_ends_the_run_though_it_goes_on(monkeypatch, error, does):
    monkeypatch.setattr(coordinator_module, 'FIRST_LINE_AFTER', 0.1)
    of_all = members(3, dead_after=2.)

    def work(rank):
        connection = of_all[rank].connection
        connection.begin_session()
        make_step(connection)
        with contextlib.suppress(type(error)), connection.step([0]):
            if rank == 1:
                raise error
            of_all[rank].lost()
        begin = {'a step': lambda: make_step(connection), 'nothing': of_all[rank].lost,
                 'a session': connection.begin_session}[does if rank == 1 else 'a step']
        with pytest.raises(WorkerLostError) if begin != of_all[rank].lost else (
                contextlib.nullcontext()):
            begin()
        return str(connection.error())
    for text in together(work, 3):
        assert re.match(r'worker 1 \(.*\) is lost: a step has failed on it, and others wait in that '
                        r'step: %s: %s \(.*skip bad examples in the input\). Start all again' % (
                            type(error).__name__, error.args[-1]
                            if isinstance(error, ValueError) else error.message), text), text


@pytest.mark.slow
@pytest.mark.parametrize('type_of_error', [ValueError, tf.errors.OutOfRangeError])
def test_workers_on_which_a_step_fails_alike_go_on(monkeypatch, type_of_error):
    monkeypatch.setattr(coordinator_module, 'FIRST_LINE_AFTER', 1.)
    of_all = members(2, dead_after=1.)

    def work(rank):
        connection = of_all[rank].connection
        connection.begin_session()
        for pause in (.5, 0.):  # the step fails; and one of them does something else afterwards
            with contextlib.suppress(type_of_error), connection.step([0]):
                time.sleep(pause * rank)
                raise type_of_error(*['it is bad'] * (1 if type_of_error is ValueError else 3))
            time.sleep(2. * rank)
        make_step(connection)
        connection.begin_session()
        make_step(connection)
        connection.finish()
    together(work, 2)
    assert not any(each.losses for each in of_all)


@pytest.mark.parametrize('is_served', first_fast(1, [False, True]))
def test_after_an_error_of_all_workers_none_waits_for_the_news_of_a_lost_one(is_served):
    """A lost server would have been the reason of the errors of all."""
    workers = addresses(2)
    cluster = Cluster('ps', workers, ['127.0.0.1:1']) if is_served else None
    of_all = together(lambda rank: Member(workers, rank, cluster=cluster), 2)

    def work(rank):
        connection = of_all[rank].connection
        connection.begin_session()
        with contextlib.suppress(tf.errors.UnknownError), connection.step([0]):
            assert connection.error(rank * .2) is None  # the other one has failed, and this not yet
            raise tf.errors.UnknownError(None, None, 'no route')
        started = time.monotonic()
        assert connection.error(.3 if is_served else PATIENCE) is None
        waited = time.monotonic() - started
        assert waited >= .3 if is_served else waited < PATIENCE / 2.
        with connection.step([0]):
            started = time.monotonic()
            assert connection.error(.2) is None and time.monotonic() - started >= .2
    together(work, 2)


@pytest.mark.slow
def test_who_waits_for_a_step_is_told_for_whom(monkeypatch):
    monkeypatch.setattr(coordinator_module, 'FIRST_LINE_AFTER', 0.1)
    of_all = members(2)
    together(lambda rank: of_all[rank].connection.begin_session(), 2)
    step = threading.Thread(target=make_step, args=(of_all[1].connection,), daemon=True)
    step.start()
    wait_until(lambda: of_all[1].said, PATIENCE)
    assert of_all[1].said[0].startswith('waiting        for worker 0 (127.0.0.1:')
    make_step(of_all[0].connection)
    step.join(PATIENCE)


def test_a_worker_that_trains_something_else_is_refused_by_name_on_all_workers():
    """Worker 2 trains the same, and waits; nobody waits until the time is over."""
    workers, is_here = addresses(3), threading.Event()

    def work(rank):
        said = []
        signature = SAME if rank != 1 else dict(
            SAME, values={'kind of cluster': 'ring', 'every': 3})
        if rank == 1:
            assert is_here.wait(PATIENCE)
        elif rank == 2:
            threading.Timer(0.1, is_here.set).start()
        with pytest.raises(ClusterError, match=r'does not take worker 1 \(.* in: its every is 3, '
                                               'and that of worker 0 2'):
            Member(workers, rank, signature, said=said)
        return said
    started = time.monotonic()
    [line], *others = together(work, 3)
    assert line == 'refused        worker 1 (%s): its every is 3, and that of worker 0 2' % workers[1]
    assert others == [[], []] and time.monotonic() - started < PATIENCE / 2.


def alone(rank, workers, seconds=0.6):
    """`(lines, error)` of a worker to which nobody comes."""
    said = []
    with pytest.raises(ClusterError) as error:
        Member(workers, rank, seconds=seconds, said=said)
    return said, str(error.value)


@pytest.mark.slow
def test_those_that_wait_say_so(monkeypatch):
    for module in (coordinator_module, addresses_module):
        monkeypatch.setattr(module, 'FIRST_LINE_AFTER', 0.3)
    workers = addresses(2)
    for own, other in ((0, 1), (1, 0)):
        (line,), error = alone(own, workers)
        assert own or 'worker 1 (%s) did not join within start_timeout' % workers[1] in error
        assert line.startswith('waiting        %sworker %d (%s)' % (
            '' if own else 'for ', other, workers[other]))
    workers = addresses(3)
    _, (said, error) = together(lambda rank: alone(rank, workers, 2. - rank / 2.), 2)
    assert said[-1].startswith('waiting        for worker 2 (%s)' % workers[2])
    assert 'it waits for worker 2 (%s), and start_timeout is over' % workers[2] in error
    _, (_, error) = together(lambda rank: alone(rank, workers, 2. + rank), 2)
    assert 'does not take worker 2 (%s) in: it did not join' % workers[2] in error


@pytest.mark.slow
def test_a_rank_that_is_here_already_is_refused(monkeypatch):
    monkeypatch.setattr(coordinator_module, 'FIRST_LINE_AFTER', 0.1)
    workers, said = addresses(3), []

    def work(rank):
        if rank < 2:
            return Member(workers, rank, said=said if rank else None)
        wait_until(lambda: said, PATIENCE)  # that it waits: it is there
        with pytest.raises(ClusterError, match='worker 1 is here already: two processes have the'):
            Member(workers, 1)
        return Member(workers, 2)
    together(work, 3)


@pytest.mark.slow
@pytest.mark.parametrize('says, expected', [
    (b'', 'its process has ended, or its machine cut the connection: see what it says'),
    (NO_WORKER, "it sent b'HTTP.*' is no message: another program may use its port")])
def test_what_else_is_at_the_address_of_worker_0_is_said(says, expected):
    with answering(says) as address, pytest.raises(ClusterError, match=expected):
        Member([address] + addresses(1), 1)


def test_settings_may_be_numbers_of_numpy():
    workers = addresses(2)
    together(lambda rank: Member(workers, rank, dict(SAME, settings={
        'rate': np.float32(.5), 'steps': np.int64(3)})), 2)


def test_what_workers_may_differ_by_is_found_by_the_worker():
    """More than 64 KB of it, which worker 0 would take from nobody."""
    own = dict(SAME, builds=[dict(SAME['builds'][0], loss=[
        ['Mul', '%d:0' % (line + 1), '', 'name %d' % line] for line in range(5000)])])
    renamed = json.loads(json.dumps(own).replace('name', 'other'))
    workers = addresses(2)
    together(lambda rank: Member(workers, rank, [own, renamed][rank]), 2)


def test_the_end_of_a_process_is_told_to_all():
    of_all = members(3)  # on a loaded machine silence is no end
    of_all[2].connection.close()
    assert of_all[0].lost() == of_all[1].lost() == (
        2, 'its process has ended, or its machine cut the connection')
    for each in of_all[:2]:
        each.connection._thread.join(PATIENCE)  # the last that it does is to tell
    assert [len(each.losses) for each in of_all] == [1, 1, 0]
    assert isinstance(of_all[0].losses[0], WorkerLostError)


@pytest.mark.slow
def test_silence_is_noticed_but_by_one_that_was_frozen_itself():
    of_all = members(3, dead_after=0.5)
    of_all[1].connection._lines.send = lambda message: None
    assert of_all[2].lost() == of_all[0].lost() == (
        1, 'there is no sign of life from it for 0 seconds')
    other = members(2, dead_after=10.)[0].coordinator
    for worker in other._workers:
        worker.heard_at -= 100.
    other._looked_at -= 6.
    other._look()
    assert not other._is_lost


@pytest.mark.parametrize('in_step', [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_worker_that_has_ended_while_others_are_in_a_step_is_named(in_step):
    """And while they wait to begin one."""
    of_all = members(2, dead_after=0.5)

    def work(rank):
        connection = of_all[rank].connection
        connection.begin_session()
        with connection.step([0]) if in_step else contextlib.nullcontext():
            if rank:
                connection.finish()
            elif in_step:
                of_all[0].lost()
            else:
                with pytest.raises(WorkerLostError, match='worker 1 .* perhaps for lack of data'):
                    make_step(connection)
    together(work, 2)
    assert 'perhaps for lack of data' in of_all[0].connection.lost[1]
    assert of_all[1].connection.lost is None  # worker 0 is not lost to it


@pytest.mark.slow
def test_all_end_together_however_long_the_chief_takes():
    of_all = members(3, dead_after=0.4)
    together(lambda rank: (time.sleep(1.2 if rank == 0 else 0.),
                           of_all[rank].connection.finish()), 3)
    assert not any(each.losses for each in of_all)


@pytest.mark.slow
def test_of_ten_thousand_messages_of_strangers_none_does_more_than_close_its_connection():
    draw, workers = random.Random(0), addresses(2)
    values = [True, -1, 1, 1 << 70, 1.5, None, [], {}, '', '\x1b[2J', 'a\nb', 'hello', 'lost',
              'begin', 'compared', 'a' * 64, SAME]
    keys = ['type', 'rank', 'why', 'digest', 'signature', 'other']
    deep = [b'[' * 30000, b'{"type": "hello", "signature": {"a":' + b'[' * 30000, b'9' * 5000,
            b'x' * 100000, b'{"type": "done"}']
    lines = []
    for number in range(10000):
        line = json.dumps({key: draw.choice(values) for key in draw.sample(keys, 3)}).encode()
        if number % 500 == 0:
            line = deep[number // 500 % len(deep)]
        elif number % 3 == 0:
            place = draw.randrange(len(line))
            line = line[:place] + bytes([draw.randrange(256)]) + line[place + 1:]
        elif number % 3 == 1:
            line = json.dumps({'type': draw.choice(['hello', 'compared']),
                               'rank': draw.choice(values[:4]), draw.choice(['why', 'digest']):
                               draw.choice(values)}).encode()
        lines.append(line + b'\n')
    said = []

    def work(rank):
        if rank == 0:
            return Member(workers, 0, said=said)
        host, port = workers[0].split(':')
        stranger = None
        while lines:
            try:
                stranger = stranger or socket.create_connection((host, int(port)), 1.)
                stranger.settimeout(5.)
                stranger.sendall(lines.pop())
                stranger.settimeout(0.0005)
                if not stranger.recv(1 << 16):
                    stranger = None
            except socket.timeout:
                pass
            except OSError:
                stranger = None
        return Member(workers, 1)
    of_all = together(work, 2, seconds=PATIENCE)
    assert said and all(each.isprintable() for each in said)
    assert not any(each.losses for each in of_all)
