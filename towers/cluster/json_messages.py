"""Messages between the processes of a cluster: one JSON object a line, nothing else."""

import json
import select
import time

from towers.errors import ClusterError

MOST_OF_WORKER_0 = 64 << 20  # bytes of a message with its fingerprint, a line for each operation
_MOST_BYTES = 64 << 10  # of a message of anyone else
_TYPES = ('hello', 'who', 'compare', 'compared', 'welcome', 'refused', 'ready', 'go', 'alive',
          'done', 'end', 'failed', 'lost')
_KEYS = {'type': str, 'rank': int, 'why': str, 'digest': str, 'fingerprint': dict}
_MOST_RANK, _LONGEST = 1 << 20, 8000


class Lines:
    """JSON objects over a connected socket.

    What is not a JSON object ends the connection; nothing that is received is ever executed or
    unpickled.
    """

    def __init__(self, connection, most=_MOST_BYTES):
        self.socket, self._most = connection, most
        self.socket.setblocking(True)
        self.later = []  # messages that came with one that was received
        self._received = b''

    @property
    def has_received(self):
        """Whether the beginning of a message has come, and its end has not."""
        return bool(self._received)

    def send(self, message, timeout=10.):
        """Sends a dict.

        Raises:
          OSError: the other side is gone, or takes nothing.
        """
        if 'why' in message:
            message = dict(message, why=printable(message['why']))
        self.socket.settimeout(timeout)
        self.socket.sendall(json.dumps(message).encode('utf-8') + b'\n')

    def take(self):
        """The messages that have arrived, a list of dicts; empty where there is none, yet.

        Call it when the socket is readable.

        Raises:
          EOFError: the other side has closed the connection.
          ClusterError: something else came than a message with the keys and types of one.
          OSError: the connection is broken.
        """
        self.socket.settimeout(5.)
        data = self.socket.recv(1 << 16)
        if not data:
            raise EOFError
        lines = (self._received + data).split(b'\n')
        self._received = lines.pop()
        for line in lines + [self._received]:
            if len(line) > self._most:
                raise ClusterError('a message of more than %d bytes' % self._most)
        earlier, self.later = self.later, []
        return earlier + [_parsed(line) for line in lines]

    def receive(self, deadline):
        """The next message, or None when the deadline passes first; raises as `take`."""
        while not self.later:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            if readable([self.socket], min(0.5, left)):
                self.later = self.take()
        return self.later.pop(0)

    def close(self):
        """Closes the connection."""
        self.socket.close()


def readable(sockets, seconds):
    """The sockets that can be read from: data has come, or the other side has closed.

    Args:
      sockets: list of `socket.socket`.
      seconds: how long to wait for one.
    """
    if not hasattr(select, 'poll'):  # Windows
        return select.select(sockets, [], [], seconds)[0]
    poll = select.poll()  # `select` has no place for numbers above 1023
    by_number = {each.fileno(): each for each in sockets}
    for number in by_number:
        poll.register(number, select.POLLIN)
    return [by_number[number] for number, _ in poll.poll(int(seconds * 1000))]


def printable(text):
    """A text for a line of a log, without what moves a terminal's cursor or begins a line."""
    return ''.join(each if each.isprintable() else ' ' for each in str(text)[:_LONGEST])


def _parsed(line):
    try:
        message = json.loads(line.decode('utf-8'))
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict) or message.get('type') not in _TYPES or not all(
            type(value) is _KEYS.get(key) for key, value in message.items()) or not (
                0 <= message.get('rank', 0) < _MOST_RANK and message.get('why', '').isprintable()):
        raise ClusterError('%.40r is no message' % line)
    return message
