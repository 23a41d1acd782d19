"""The workers of a ring meet, and watch each other; sockets of one process, without TensorFlow."""

import contextlib
import socket
import threading
import time

import pytest

from towers import Cluster
from towers.cluster import handshake
from towers.cluster.json_messages import Lines
from towers.cluster.handshake import _judge, all_ready, check_port, meet
from towers.cluster.ports import split_address, wait_for
from towers.cluster.peer_watch import Watch
from towers.errors import ClusterError
from one_process import addresses, together

SAME = {'kind': 'ring', 'workers': [], 'towers': 2, 'variables': [['w', 'float32', '(2,)']],
        'gradients': [['w', 'dense float32']], 'update': {'operations': [], 'shapes': ''},
        'settings': {'--seed': 1}}


def met(fingerprints, seconds=20., workers=None, say=None):
    """Connections of each worker, or the text of its error."""
    workers = workers or addresses(len(fingerprints))

    def work(rank):
        cluster = Cluster('ring', workers, rank=rank)
        try:
            connections = meet(cluster, fingerprints[rank], time.monotonic() + seconds,
                               say or (lambda line: None))
            all_ready(cluster, connections, time.monotonic() + seconds)
            return connections
        except ClusterError as error:
            return str(error)
    return workers, together(work, len(fingerprints))


def test_workers_that_agree_are_connected():
    _, connections = met([SAME] * 3)
    assert [sorted(each) for each in connections] == [[1, 2], [0], [0]]


@pytest.mark.parametrize('change, expected', [
    (dict(towers=3), 'its number of towers is 3, and that of worker 0 2'),
    (dict(workers=['x:1']), 'its list of workers is x:1'),
    (dict(variables=[['w', 'float32', '(3,)']]),
     "another one: variable 'w' is float32 (3,), and that of worker 0 float32 (2,)"),
    (dict(variables=[]), "variable 'w' is missing"),
    (dict(settings={'--seed': 2}), 'its --seed is 2, and that of worker 0 1'),
    (dict(settings={'--seed': 1, '--rate': 3}), 'its --rate is 3, and that of worker 0 not given')])
def test_a_worker_that_trains_something_else_is_refused_by_name(change, expected):
    said, workers = [], addresses(2)

    def work(rank):
        cluster = Cluster('ring', workers, rank=rank)
        if rank == 0:
            return sorted(meet(cluster, SAME, time.monotonic() + 60, said.append))
        with pytest.raises(ClusterError) as refused:
            meet(cluster, dict(SAME, **change), time.monotonic() + 60)
        meet(cluster, SAME, time.monotonic() + 60)  # the right one, for which worker 0 has waited
        return str(refused.value)
    ranks, text = together(work, 2)
    assert 'refuses worker 1' in text and expected in text
    assert ranks == [1] and len(said) == 1 and expected in said[0]


def test_a_worker_that_does_not_come_is_named():
    workers = addresses(3)
    with pytest.raises(ClusterError, match=r'no word of worker 1 \(%s\), worker 2' % workers[1]):
        meet(Cluster('ring', workers), SAME, time.monotonic() + 0.3)


def alone(rank, workers, seconds=0.6):
    """`(lines, error)` of a worker to which nobody comes."""
    lines = []
    with pytest.raises(ClusterError) as error:
        meet(Cluster('ring', workers, rank=rank), SAME, time.monotonic() + seconds, lines.append)
    return lines, str(error.value)


@pytest.mark.slow
@pytest.mark.version_independent
def test_those_that_wait_say_so():
    workers = addresses(2)
    for own, other in ((0, 1), (1, 0)):
        (line,), _ = alone(own, workers)
        assert line.startswith('waiting        for worker %d (%s), start_timeout is 0.' % (
            other, workers[other]))

    def work(rank):
        return alone(rank, workers, 2. - rank)[0]  # worker 1 gives up first
    workers = addresses(3)
    assert together(work, 2)[1][-1].startswith(
        'waiting        for the other workers, as worker 0 (%s) does, start_timeout' % workers[0])


@pytest.mark.slow
def test_worker_0_says_that_its_address_is_of_another_machine():
    for host, reason in (('203.0.113.9', 'assign requested address'), ('no.invalid', 'known')):
        workers = ['%s:%s' % (host, addresses(1)[0].split(':')[1])] + addresses(1)
        (first, _), error = alone(0, workers)
        for text in (first, error):
            assert ('%s cannot be listened at: ' % workers[0] in text and reason in text
                    and 'the host is not this machine: give this task another address' in text)
        assert error.startswith(workers[0]) and 'no word of worker 1' in error


@pytest.mark.slow
@pytest.mark.version_independent
def test_an_address_that_others_reach_is_not_blamed():
    """A name that leads here from elsewhere only: worker 1 has come, worker 2 is missing."""
    here = addresses(1)[0]
    workers = ['203.0.113.9:' + here.split(':')[1]] + addresses(2)

    def work(rank):
        if rank == 0:
            return alone(0, workers, 2.)[1]
        with contextlib.closing(Lines(wait_for(here, 'worker 0', time.monotonic() + 20))) as lines:
            lines.send({'type': 'hello', 'rank': 1, 'fingerprint': SAME})
            return lines.receive(time.monotonic() + 20)
    error, answer = together(work, 2)
    assert error.startswith('there is no word of worker 2 (%s) within' % workers[2])
    assert answer['type'] == 'refused'


@pytest.mark.slow
def test_a_name_that_is_not_known_is_said():
    lines, error = alone(0, addresses(1) + ['no.invalid:5'])
    for text in lines + [error]:
        assert 'worker 1 (no.invalid:5) (the name of its host is not known here: ' in text
    _, error = alone(1, ['no.invalid:5'] + addresses(1))
    assert 'the name of its host is not known here (' in error


@pytest.mark.slow
def test_a_refusal_is_repeated_at_the_end():
    workers = addresses(2)

    def work(rank):
        if rank == 0:
            return alone(0, workers, 1.)[1]
        with pytest.raises(ClusterError):
            meet(Cluster('ring', workers, rank=1), dict(SAME, towers=3), time.monotonic() + 20)
    assert together(work, 2)[0] == (
        'worker 1 was refused: its number of towers is 3, and that of worker 0 2.')


@pytest.mark.version_independent
def test_a_worker_that_was_refused_is_waited_for_in_words():
    """It may be started again as it should be."""
    missing = handshake._Missing(Cluster('ring', addresses(3)), {})
    missing.refused[1] = 'its number of towers is 3, and that of worker 0 2'
    first, second = missing.look().split(', worker 2 ')
    assert first.endswith(') (which was refused: it joins when it is started again as worker 0 is)')
    assert second.endswith(')') and '(which' not in second


@pytest.mark.version_independent
@pytest.mark.parametrize('says, expected', [
    (b'HTTP/1.0 400 Bad request\n', ' (something else answers there: another program, or a worker '
     'of an earlier start)'),
    (b'\0\0\x12\x04', ' (something else answers there: another program, or a worker of an earlier '
     'start)'),
    (b'', '')])
def test_another_program_at_the_address_of_another_worker(says, expected):
    address, = addresses(1)
    with _listening(address) as listener:
        def answer():
            connection, _ = listener.accept()
            connection.recv(100)
            connection.sendall(says)
            connection.close()
        thread = threading.Thread(target=answer)
        thread.start()
        assert handshake._what_is_at(address) == expected
        thread.join()


@pytest.mark.slow
@pytest.mark.version_independent
def test_a_program_that_takes_connections_and_says_nothing():
    address, = addresses(1)
    with _listening(address):
        assert handshake._what_is_at(address) == (
            ' (something else takes connections there: another program, or a worker of an earlier '
            'start)')
    assert handshake._what_is_at(address) == ''


def _listening(address):
    listener = socket.socket()
    listener.bind(split_address(address))
    listener.listen(5)
    return listener


@pytest.mark.slow
@pytest.mark.version_independent
def test_swapped_lists_are_said():
    workers = addresses(2)

    def work(which):
        return alone(0, workers[::1 - 2 * which], 1. + which)
    lines, error = together(work, 2)[0]
    for text in lines + [error]:
        assert 'worker 1 (%s) (a worker 0 answers there: the lists' % workers[1] in text


@pytest.mark.slow
@pytest.mark.version_independent
def test_two_with_the_same_place():
    workers = addresses(3)

    def work(number):
        cluster = Cluster('ring', workers, rank=[0, 1][min(number, 1)])
        time.sleep(0.3 * number)  # the second of them comes later
        try:
            meet(cluster, SAME, time.monotonic() + 2.)
        except ClusterError as error:
            return str(error)
    texts = together(work, 3)
    assert 'two processes have the same place' in texts[2]


@pytest.mark.parametrize('rank', [0, 2, -1, '1', None])
def test_a_rank_that_is_none_of_the_others(rank):
    said, (one, other) = [], socket.socketpair()
    with contextlib.closing(one), contextlib.closing(other):
        welcome, cluster = {}, Cluster('ring', ['a:1', 'b:2'])
        _judge(cluster, SAME, {'type': 'hello', 'rank': rank, 'fingerprint': SAME}, Lines(one),
               welcome, said.append)
        answer, = Lines(other).take()
    assert not welcome and answer == {
        'type': 'refused', 'why': 'its rank is %r, and the ring has 2 workers' % (rank,)}
    assert said == ['refused        worker %s: %s' % (rank, answer['why'])]


def test_a_rank_that_is_here_already_is_refused():
    said, (one, other) = [], socket.socketpair()
    with contextlib.closing(one), contextlib.closing(other):
        first, cluster = object(), Cluster('ring', ['a:1', 'b:2'])
        welcome = {1: first}
        _judge(cluster, SAME, {'type': 'hello', 'rank': 1, 'fingerprint': SAME}, Lines(one),
               welcome, said.append)
        answer, = Lines(other).take()
    assert welcome == {1: first} and answer['type'] == 'refused'
    assert answer['why'].startswith('worker 1 is here already: two processes have the same place')


def test_a_worker_that_ends_before_its_server_is_up_is_named():
    one, other = socket.socketpair()
    with contextlib.closing(one):
        other.close()
        with pytest.raises(ClusterError,
                           match=r'^worker 1 \(b:2\) has ended before the first step'):
            all_ready(Cluster('ring', ['a:1', 'b:2']), {1: Lines(one)}, time.monotonic() + 20)


def test_a_worker_whose_server_is_not_up_in_time_is_named():
    one, other = socket.socketpair()
    with contextlib.closing(one), contextlib.closing(other):
        with pytest.raises(ClusterError, match=r'^worker 1 \(b:2\) has not started its server in '
                           'time: give a longer start_timeout'):
            all_ready(Cluster('ring', ['a:1', 'b:2']), {1: Lines(one)}, time.monotonic() + 0.1)


def test_a_worker_that_comes_when_worker_0_is_at_work_is_told_so():
    with contextlib.closing(socket.socket()) as listener:
        listener.bind(('127.0.0.1', 0))
        listener.listen(1)
        threading.Thread(target=lambda: listener.accept()[0].close(), daemon=True).start()
        workers = ['127.0.0.1:%d' % listener.getsockname()[1]] + addresses(1)
        with pytest.raises(ClusterError, match=r'^worker 0 \(.*\) has closed the connection: it is '
                           'at work already, or was ended'):
            meet(Cluster('ring', workers, rank=1), SAME, time.monotonic() + 20)


def test_a_port_in_use_is_a_message():
    with contextlib.closing(socket.socket()) as taken:
        taken.bind(('127.0.0.1', 0))
        taken.listen(1)
        with pytest.raises(ClusterError, match='Address already in use'):
            check_port('127.0.0.1:%d' % taken.getsockname()[1])


def test_a_host_that_does_not_answer_is_a_message_in_time():
    cluster = Cluster('ring', addresses(2), rank=1)
    begin = time.monotonic()
    with pytest.raises(ClusterError, match=r'worker 0 \(127.0.0.1:\d+\) at .* does not answer'):
        meet(cluster, SAME, begin + 0.5)


def test_another_program_at_the_address_of_worker_0():
    with contextlib.closing(socket.socket()) as listener:
        listener.bind(('127.0.0.1', 0))
        listener.listen(1)
        threading.Thread(target=lambda: listener.accept()[0].sendall(
            b'HTTP/1.1 400 Bad Request\r\n\r\n'), daemon=True).start()
        workers = ['127.0.0.1:%d' % listener.getsockname()[1]] + addresses(1)
        with pytest.raises(ClusterError, match=r'at the address of worker 0 .* is no worker: .*'
                           r'Another program uses the port'):
            meet(Cluster('ring', workers, rank=1), SAME, time.monotonic() + 20)


def test_strangers_are_not_listened_to():
    workers = addresses(2)
    host, port = workers[0].split(':')

    def work(rank):
        if rank < 2:
            return meet(Cluster('ring', workers, rank=rank), SAME, time.monotonic() + 20)
        for data in (b'GET / HTTP/1.1\n', b'[1]\n', b'{"type": "hello"}\n', b'\x80\x04N.\n'):
            for _ in range(100):
                with contextlib.suppress(OSError), socket.create_connection(
                        (host, int(port)), 0.5) as stranger:
                    stranger.sendall(data)
                    break
    results = together(work, 3)
    assert sorted(results[0]) == [1] and sorted(results[1]) == [0]


@pytest.mark.parametrize('change', [
    {'variables': 5}, {'variables': [1]}, {'variables': [[]]}, {'gradients': 'w'},
    {'gradients': [3]}, {'settings': [1]}, {'update': [[1]]}, {'servers': 7}])
def test_a_fingerprint_of_any_other_form_is_refused(change):
    why = []
    left, right = socket.socketpair()
    with contextlib.closing(left), contextlib.closing(right):
        _judge(Cluster('ring', addresses(2)), SAME, {'type': 'hello', 'rank': 1, 'fingerprint':
               dict(SAME, **change)}, Lines(left), {}, why.append)
    assert len(why) == 1 and why[0].startswith('refused        worker 1: '), why


def watched(count, dead_after):
    """A `Watch` for each worker, and the lists of what they have noticed."""
    workers, connections = met([SAME] * count)
    noticed = [[] for _ in range(count)]
    return [Watch(Cluster('ring', workers, rank=rank), connections[rank], dead_after,
                  lambda lost, why, rank=rank: noticed[rank].append((lost, why)))
            for rank in range(count)], noticed


def test_the_end_of_a_process_is_told_to_all():
    watches, noticed = watched(3, 30.)
    watches[2]._stop.set()
    watches[2]._thread.join()
    watches[2]._connections[0].close()
    assert watches[0].wait_for_loss(20) == watches[1].wait_for_loss(20) == (
        2, 'its process has ended, or its machine cut the connection')
    for rank in (0, 1):
        watches[rank]._thread.join(20)  # the last that it does is to tell
    assert [len(each) for each in noticed] == [1, 1, 0]


def test_one_that_was_frozen_itself_gives_the_others_time():
    """It has heard nobody meanwhile; their messages are still to be read."""
    lost, own = [], Cluster('ring', ['a:1', 'b:2'])
    watch = Watch(own, {}, 10., lambda rank, why: lost.append(rank))
    watch._stop.set()
    watch._thread.join()
    now = time.monotonic()
    watch._heard = {1: now - 100.}
    watch._look_for_silence(now - 6.)  # when it looked last
    assert not lost and watch._heard[1] >= now
    watch._heard = {1: now - 100.}
    watch._look_for_silence(time.monotonic())
    assert lost == [1] and watch.lost == (1, 'there is no sign of life from it for 10 seconds')


def test_silence_is_noticed():
    watches, _ = watched(3, 0.5)
    watches[1]._stop.set()  # it sends nothing more, and its connection stays
    assert watches[2].wait_for_loss(20)[0] == 1
    assert watches[0].wait_for_loss(20) == (1, 'there is no sign of life from it for 0 seconds')


def test_a_worker_that_fails_says_why():
    watches, _ = watched(2, 30.)
    watches[1].fail('NonFiniteError: a NaN')
    assert watches[0].wait_for_loss(20) == (1, 'it ended: NonFiniteError: a NaN')


def test_a_worker_that_has_ended_while_others_are_in_a_step_is_noticed():
    watches, noticed = watched(2, 0.3)
    watches[0].step_begins()
    together(lambda which: watches[1].finish() if which else watches[0].wait_for_loss(20), 2)
    assert watches[0].lost[0] == 1 and 'perhaps for lack of data' in watches[0].lost[1]
    assert noticed[1] == [] and watches[1].lost is None  # worker 0 is not lost to it


@pytest.mark.slow
@pytest.mark.version_independent
def test_all_end_together_however_long_the_chief_takes():
    watches, noticed = watched(3, 0.4)
    together(lambda rank: (time.sleep(1.2 if rank == 0 else 0.), watches[rank].finish()), 3)
    assert noticed == [[], [], []]


def test_what_is_no_message_ends_a_connection():
    one, other = socket.socketpair()
    one.sendall(b'\x80\x04\x95 a pickle\n')
    with pytest.raises(ClusterError, match='is no message'):
        Lines(other).receive(time.monotonic() + 5)
    one.close()
    other.close()
