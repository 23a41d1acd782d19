"""The workers of a ring meet, and watch each other; sockets of one process, without TensorFlow."""

import contextlib
import json
import random
import socket
import threading
import time

import pytest

import towers
from towers import Cluster
from towers.cluster.handshake import _compared, _judge, all_ready, check_port, meet
from towers.cluster.json_messages import Lines
from towers.cluster.peer_watch import Watch
from towers.cluster.ports import _lasting_ports, check_server, split_address
from towers.errors import ClusterError
from one_process import addresses, together

PATIENCE = 120.  # seconds that a loaded machine may take for what comes at once
SAME = {'kind of cluster': 'ring', 'number of towers': 2, '_settings': {'--seed': 1}, '_builds': [{
    '_variables': [['w', 'float32 (2,)']], '_gradients': [['w', 'dense float32']], '_state': [],
    '_shapes': [], '_loss': [], '_update': []}]}


def met(fingerprints, seconds=PATIENCE, workers=None, say=None):
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


def test_a_worker_that_trains_something_else_is_refused_by_name():
    said, workers = [], addresses(2)
    expected = 'its number of towers is 3, and that of worker 0 2'

    def work(rank):
        cluster = Cluster('ring', workers, rank=rank)
        if rank == 0:
            return sorted(meet(cluster, SAME, time.monotonic() + 60, said.append))
        with pytest.raises(ClusterError) as refused:
            meet(cluster, dict(SAME, **{'number of towers': 3}), time.monotonic() + 60)
        meet(cluster, SAME, time.monotonic() + 60)  # the right one, for which worker 0 has waited
        return str(refused.value)
    ranks, text = together(work, 2)
    assert 'refuses worker 1' in text and expected in text
    assert ranks == [1] and len(said) == 1 and expected in said[0]


def alone(rank, workers, seconds=0.6):
    """`(lines, error)` of a worker to which nobody comes."""
    lines = []
    with pytest.raises(ClusterError) as error:
        meet(Cluster('ring', workers, rank=rank), SAME, time.monotonic() + seconds, lines.append)
    return lines, str(error.value)


@pytest.mark.slow
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


def test_a_rank_that_is_here_already_is_refused():
    said, (one, other) = [], socket.socketpair()
    with contextlib.closing(one), contextlib.closing(other):
        first, cluster = object(), Cluster('ring', ['a:1', 'b:2'])
        welcome = {1: first}
        _judge(cluster, SAME, {'type': 'hello', 'rank': 1}, Lines(one), welcome, said.append)
        answer, = Lines(other).take()
    assert welcome == {1: first} and answer['type'] == 'refused'
    assert answer['why'].startswith('worker 1 is here already: two processes have the same place')


@pytest.mark.parametrize('says, expected', [
    (b'', r'worker 0 \(.*\) has closed the connection: it is at work already, or was ended'),
    (b'HTTP/1.1 400 Bad Request\r\n\r\n', 'at the address of worker 0 .* is no worker: .*Another '
     'program uses the port')])
def test_what_else_is_at_the_address_of_worker_0_is_said(says, expected):
    def answer():
        connection, _ = listener.accept()
        connection.sendall(says)
        connection.close()
    with contextlib.closing(socket.socket()) as listener:
        listener.bind(('127.0.0.1', 0))
        listener.listen(1)
        threading.Thread(target=answer, daemon=True).start()
        workers = ['127.0.0.1:%d' % listener.getsockname()[1]] + addresses(1)
        with pytest.raises(ClusterError, match=expected):
            meet(Cluster('ring', workers, rank=1), SAME, time.monotonic() + PATIENCE)


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


def test_strangers_are_not_listened_to():
    workers = addresses(2)
    host, port = workers[0].split(':')

    def work(rank):
        if rank < 2:
            return meet(Cluster('ring', workers, rank=rank), SAME, time.monotonic() + PATIENCE)
        for data in (b'GET / HTTP/1.1\n', b'[1]\n', b'{"type": "hello"}\n', b'\x80\x04N.\n'):
            for _ in range(100):
                with contextlib.suppress(OSError), socket.create_connection(
                        (host, int(port)), 0.5) as stranger:
                    stranger.sendall(data)
                    break
    results = together(work, 3)
    assert sorted(results[0]) == [1] and sorted(results[1]) == [0]


def test_what_workers_may_differ_by_is_found_by_the_worker():
    """More than 64 KB of it, which worker 0 would take from nobody."""
    own = dict(SAME, _builds=[dict(SAME['_builds'][0], _loss=[
        ['Mul', '%d:0' % (line + 1), '', 'name %d' % line] for line in range(5000)])])
    renamed = json.loads(json.dumps(own).replace('name', 'other'))
    _, connections = met([own, renamed])
    assert [sorted(each) for each in connections] == [[1], [0]]


@pytest.mark.parametrize('change', [
    {'_builds': [[]]}, {'_builds': [3]}, {'_settings': [1]}, {'_builds': [{'_gradients': 1}]},
    {'servers': 7}])
def test_a_fingerprint_of_any_other_form_is_refused(change):
    why = _compared(Cluster('ring', ['a:1', 'b:2'], rank=1), dict(SAME, **change), SAME)['why']
    assert why == 'worker 0 sends no fingerprint of a worker'


def watched(count, dead_after):
    """A `Watch` for each worker, and the lists of what they have noticed."""
    workers, connections = met([SAME] * count)
    noticed = [[] for _ in range(count)]
    return [Watch(Cluster('ring', workers, rank=rank), connections[rank], dead_after,
                  lambda lost, why, rank=rank: noticed[rank].append((lost, why)))
            for rank in range(count)], noticed


def test_the_end_of_a_process_is_told_to_all():
    watches, noticed = watched(3, 600.)  # on a loaded machine silence is no end
    watches[2]._close()
    assert watches[0].wait_for_loss(PATIENCE) == watches[1].wait_for_loss(PATIENCE) == (
        2, 'its process has ended, or its machine cut the connection')
    for rank in (0, 1):
        watches[rank]._thread.join(PATIENCE)  # the last that it does is to tell
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


@pytest.mark.slow
def test_silence_is_noticed():
    watches, _ = watched(3, 0.5)
    watches[1]._stop.set()  # it sends nothing more, and its connection stays
    assert watches[2].wait_for_loss(PATIENCE)[0] == 1
    assert watches[0].wait_for_loss(PATIENCE) == (
        1, 'there is no sign of life from it for 0 seconds')


@pytest.mark.slow
def test_a_worker_that_fails_says_why():
    watches, _ = watched(2, 30.)
    watches[1].fail('NonFiniteError: a NaN')
    assert watches[0].wait_for_loss(PATIENCE) == (1, 'it ended: NonFiniteError: a NaN')


def test_a_worker_that_has_ended_while_others_are_in_a_step_is_noticed():
    watches, noticed = watched(2, 0.3)
    watches[0].step_begins()
    together(lambda which: watches[1].finish() if which else watches[0].wait_for_loss(PATIENCE), 2)
    assert watches[0].lost[0] == 1 and 'perhaps for lack of data' in watches[0].lost[1]
    assert noticed[1] == [] and watches[1].lost is None  # worker 0 is not lost to it


@pytest.mark.slow
def test_all_end_together_however_long_the_chief_takes():
    watches, noticed = watched(3, 0.4)
    together(lambda rank: (time.sleep(1.2 if rank == 0 else 0.), watches[rank].finish()), 3)
    assert noticed == [[], [], []]


@contextlib.contextmanager
def connected():
    one, other = socket.socketpair()
    with contextlib.closing(one), contextlib.closing(other):
        yield one, Lines(other)


def of_rank(rank):
    return {'type': 'lost', 'rank': rank}


def test_a_message_may_come_in_pieces_and_several_at_once():
    with connected() as (sender, receiver):
        first, second, third = [json.dumps(of_rank(rank)).encode() + b'\n' for rank in (1, 2, 3)]
        sender.sendall(first + second + third[:5])
        assert receiver.take() == [of_rank(1), of_rank(2)]
        sender.sendall(third[5:9])
        assert receiver.take() == []
        sender.sendall(third[9:])
        assert receiver.take() == [of_rank(3)]
        sender.sendall(first + second)
        soon = time.monotonic() + PATIENCE
        assert receiver.receive(soon) == of_rank(1)
        Lines(sender).send(of_rank(4))
        assert receiver.take() == [of_rank(2), of_rank(4)]


def test_of_ten_thousand_messages_of_strangers_none_does_more_than_close_its_connection():
    draw, said = random.Random(0), []
    values = [True, -1, 1, 1 << 70, 1.5, None, [], {}, '', '\x1b[2J', 'a\nb', 'hello', 'lost',
              'who', 'compared', 'a' * 64, SAME]
    keys = ['type', 'rank', 'why', 'digest', 'fingerprint', 'other']
    deep = [b'[' * 30000, b'{"type": "hello", "fingerprint": {"a":' + b'[' * 30000, b'9' * 5000,
            b'x' * 100000, b'{"type": "who"}']
    cluster, taken, welcome = Cluster('ring', ['a:1', 'b:2']), 0, {}
    one = None
    for number in range(10000):
        if one is None:
            one, other = socket.socketpair()
            receiver = Lines(other)
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
        one.sendall(line + b'\n')
        try:
            messages = receiver.take()
        except ClusterError:
            messages = None
        for message in messages or ():
            taken += 1
            assert type(message.get('rank', 0)) is int and message.get('why', '').isprintable()
            _judge(cluster, SAME, message, receiver, welcome, said.append)
        if messages is None or messages or receiver.has_received:
            one.close()
            other.close()
            one = None
    assert 100 < taken < 5000 and said and not welcome and all(each.isprintable() for each in said)


@pytest.mark.parametrize('line', [
    b'[1]', b'{', b'\xff', b'{"type": "hello", "rank": true}'])
def test_a_line_that_is_no_object(line):
    with connected() as (sender, receiver), pytest.raises(ClusterError, match='is no message'):
        sender.sendall(line + b'\n')
        receiver.take()


@pytest.mark.parametrize('address, expected', [
    ('a:1', ('a', 1)), ('10.0.0.1:65535', ('10.0.0.1', 65535)), ('[::1]:2222', ('::1', 2222))])
def test_host_and_port(address, expected):
    assert split_address(address) == expected


@pytest.mark.parametrize('address', [
    'a', ':1', 'a:b', 'a:0', 'a:65536', 'a:1.5', None, 'http://a:1', 'a b:5', 'a:5\n', 'a:+5',
    'a:\u0663\u0663'])
def test_what_is_no_address(address):
    with pytest.raises(ClusterError, match="is no address: expected 'host:port', such as"):
        split_address(address)


def test_an_ipv6_address_stands_in_brackets():
    with pytest.raises(ClusterError, match=r"is no address: .* such as '\[::1\]:2222'"):
        split_address('::1:5')


def test_no_outgoing_connection_gets_a_free_port():
    ports = towers.free_ports(5)
    assert len(set(ports)) == 5
    if _lasting_ports():
        assert all(port in _lasting_ports() for port in ports)


@pytest.mark.parametrize('says, expected', [
    (None, 'takes connections and does not answer: its process is frozen'),
    (b'HTTP/1.1 400 Bad Request\r\n\r\n', "is no server of TensorFlow's: another program"),
    (b'', "is no server of TensorFlow's: another program")])
@pytest.mark.slow
def test_what_answers_for_a_server_and_is_none(says, expected):
    with contextlib.closing(socket.socket()) as listener:
        listener.bind(('127.0.0.1', 0))
        listener.listen(1)

        def answer():
            connection, _ = listener.accept()
            with contextlib.closing(connection):
                connection.recv(100)
                if says is None:
                    time.sleep(1.)
                else:
                    connection.sendall(says)
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        address = '127.0.0.1:%d' % listener.getsockname()[1]
        with pytest.raises(ClusterError, match=expected) as error:
            check_server(address, 'ps 0', time.monotonic() + 0.5)
        assert address in str(error.value) and 'ps 0' in str(error.value)
        thread.join()
