"""Messages between a worker and worker 0: one JSON object a line, nothing else.

A message has a `type`, and further fields that go with it. A worker says

    hello     it is here: `rank`, `digest` of its own signature; after `compare`, the `digest` of
              worker 0's signature, and `why` its own signature differs
    alive     it is at work: `in_step`
    begin     it waits to begin something: `session`, `digest` of what, `signal`, `checks`
    raised    a step has failed here, and others may wait in it: `why`
    left      its session makes no more steps: `session`, `signal`
    done      its training is over
    failed    it ends by an error: `why`
    lost      it has heard nothing of worker 0 for `dead_after`, and ends; worker 0 reads this if it
              was frozen and goes on: `rank` of worker 0, `why`

and worker 0

    compare   look how you differ from worker 0: its `signature`
    welcome   all are there
    refused   a worker does not fit: `rank`, `why`
    waiting   you wait for others: `why`
    alive     it is at work
    go        begin: `signal` and its `rank`, `is_last`, `checks`
    differs   the worker `rank` would begin something else
    raised    your newest step has failed on each worker
    over      a worker has left this session
    gone      an asynchronous worker is lost, and the others go on: `rank`, `why`
    lost      a worker is lost, and with it all: `rank`, `why`
    end       all have said that their training is over

Anyone who reaches the port may send anything: what is no message is refused, and nothing that is
received is executed or unpickled.

Its test is `tests/cluster/test_connection.py`.
"""

import contextlib
import hashlib
import json
import select
import socket
import threading
import typing

from towers.cluster.addresses import FIRST_LINE_AFTER
from towers.errors import ClusterError, shown

WHY_CUT = 'its process has ended, or its machine cut the connection'
WHY_SILENT = 'there is no sign of life from it for %.0f seconds'

MOST_OF_WORKER_0 = 64 << 20  # bytes of a message with its signature, a line for each operation
_MOST_BYTES = 64 << 10  # of a message that anyone else sends
_MOST_CHARACTERS = 4000  # of a text in a message
_MOST_NUMBER = 1 << 53  # above it JSON's numbers are not exact everywhere
_SECONDS_TO_WAIT = 10.  # until a socket takes data, or has some, which it mostly does at once

# {field of a message: the type of its value}
_FIELDS = {'type': str, 'rank': int, 'why': str, 'digest': str, 'signature': dict, 'session': int,
           'signal': int, 'is_last': bool, 'checks': bool, 'in_step': bool}
_TYPES_OF_WORKERS = ['hello', 'alive', 'begin', 'raised', 'left', 'done', 'failed',
                     'lost']
_TYPES_OF_WORKER_0 = ['compare', 'welcome', 'refused', 'waiting', 'alive', 'go', 'over', 'differs',
                      'raised', 'gone', 'lost', 'end']  # some types are said by both sides
# A list and no set: a stranger may send a `type` without a hash, such as [], and `in` a set would
# raise.
_TYPES = _TYPES_OF_WORKERS + _TYPES_OF_WORKER_0

_ENCODER = json.JSONEncoder(sort_keys=True, default=str)  # `json.dumps` would make one each time


def seconds_between_signs(dead_after: float) -> float:
    """Seconds from one sign of life (`alive`) to the next, of each side, where `dead_after` seconds
    of silence count as the loss of a worker."""
    return min(dead_after / 5., FIRST_LINE_AFTER)


class Lines:
    """Messages over a connected socket.

    Attributes:
      socket: the connected socket.
      is_open: whether this side has not closed it.
    """

    def __init__(self, connected: socket.socket, most: int = _MOST_BYTES):
        """Takes a connected socket; a message that is received has at most `most` bytes."""
        self.socket = connected
        self.is_open = True
        self._most = most
        goes_over_network = connected.family in (socket.AF_INET, socket.AF_INET6)
        if goes_over_network:  # unlike the connection of worker 0 with its own coordinator
            # Without this, the system waits up to 40 ms for more to send along.
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = bytearray()  # the beginning of a line whose end has not come
        self._newest = b''  # the newest data that were whole lines, and the messages in them
        self._messages: typing.List[dict] = []
        self._sending = threading.Lock()  # held while the main thread, or another one, sends
        # With a timeout, Python would poll before each call. So the socket does not block, and
        # `_send_all` and `take` poll after a `BlockingIOError` alone.
        connected.setblocking(False)
        self._watched = Watched([connected])

    def send(self, message: dict) -> None:
        """Sends a message. On a broken connection nothing is raised: the thread that takes messages
        finds out."""
        self.send_line(line_of(message))

    def send_line(self, line: bytes) -> None:
        """Sends the message that `line_of` has turned into a line, as `send` does."""
        with self._sending:
            try:
                self._send_all(line)
            except OSError:
                # Perhaps a part of the line was sent. The other side would take the next message
                # for the rest of the line: so no other message is sent, and both sides find the
                # connection broken.
                with contextlib.suppress(OSError):
                    self.socket.shutdown(socket.SHUT_RDWR)

    def _send_all(self, data: bytes) -> None:
        """Sends data. Raises `OSError` if the socket takes nothing for a few seconds."""
        while data:
            try:
                data = data[self.socket.send(data):]
            except BlockingIOError:
                writable = Watched([self.socket], select.POLLOUT).ready(_SECONDS_TO_WAIT)
                if not writable:
                    raise socket.timeout('timed out') from None

    def has_data(self, seconds: float) -> bool:
        """Whether data come, or the other side closes the connection, within some seconds."""
        return bool(self._watched.ready(seconds))

    def take(self) -> typing.List[dict]:
        """The messages that have come, to be read and not changed. Waits a few seconds if the
        socket has no data.

        Raises:
          OSError: the other side has closed the connection, or it is broken.
          ClusterError: what has come is no message.
        """
        data = self._data()
        is_at_beginning = not self._received
        # The same bytes, from the beginning of a line to the end of one, are the same messages, as
        # in each step.
        if is_at_beginning and data == self._newest:
            return self._messages
        self._received += data
        lines: typing.List[bytearray] = []
        if b'\n' in data:
            *lines, self._received = self._received.split(b'\n')
        if any(len(line) > self._most for line in lines + [self._received]):
            raise ClusterError('a message of more than %d bytes' % self._most)
        messages = [_parsed(bytes(line)) for line in lines]
        if is_at_beginning and not self._received:
            self._newest = data
            self._messages = messages
        return messages

    def _data(self) -> bytes:
        """Data that have come. Waits a few seconds if there are none; raises `OSError` if there are
        none then, or if the other side has closed the connection."""
        try:
            data = self.socket.recv(1 << 16)
        except BlockingIOError:
            self.has_data(_SECONDS_TO_WAIT)
            data = self.socket.recv(1 << 16)
        if not data:
            raise ConnectionError('closed')
        return data

    def close(self) -> None:
        """Ends the connection, also where a child process has a copy of the socket."""
        self.is_open = False
        with contextlib.suppress(OSError):  # the other side has closed it
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


class Watched:
    """Sockets that are waited for. (Without `selectors`, whose objects would double the cost of a
    wait.)"""

    def __init__(self, sockets: typing.Iterable[socket.socket], event: int = select.POLLIN):
        """Waits for data of the sockets, or for another event of `select.poll`."""
        self._by_number = {each.fileno(): each for each in sockets}
        self._poll = select.poll()
        for number in self._by_number:
            self._poll.register(number, event)

    def ready(self, seconds: float) -> typing.List[typing.Any]:
        """The sockets of which it, or the end of the connection, comes within some seconds."""
        return [self._by_number[number] for number, _ in self._poll.poll(1000. * seconds)]


def line_of(message: dict) -> bytes:
    """A message as it is sent."""
    if 'why' in message:  # what `shown` gives stays the same in `shown`, also where it is cut
        message = dict(message, why=shown(message['why'])[:_MOST_CHARACTERS])
    return _json(message) + b'\n'


def digest_of(value: typing.Any) -> str:
    """The SHA-256 of a value of JSON's types: equal values have equal digests."""
    return hashlib.sha256(_json(value)).hexdigest()


def _json(value: typing.Any) -> bytes:
    """A value of JSON's types as JSON. Numbers of numpy in it become texts."""
    return _ENCODER.encode(value).encode('utf-8')


def _parsed(line: bytes) -> dict:
    """The message in a line; raises `ClusterError` if there is none in it."""
    try:
        message = json.loads(line.decode('utf-8'))
    except (ValueError, RecursionError):  # no JSON, or one nested thousands deep
        message = None
    if not _is_message(message):
        raise ClusterError('%.40r is no message' % line)
    return message


def _is_message(value: typing.Any) -> bool:
    """Whether a value is a dict of a known type, with known fields of their types, numbers in
    range, and a text in one printable line."""
    if not isinstance(value, dict) or value.get('type') not in _TYPES:
        return False
    for name, field in value.items():
        if type(field) is not _FIELDS.get(name):  # which is None for a field that is not known
            return False
        if type(field) is int and not 0 <= field < _MOST_NUMBER:
            return False
    why = value.get('why', '')
    is_one_printable_line = why == shown(why)  # `shown` escapes all other characters
    return is_one_printable_line
