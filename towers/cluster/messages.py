"""Messages between the processes of a cluster: one JSON object a line, nothing else."""

import json
import select
import socket
import time

from towers.errors import ClusterError

MOST_OF_WORKER_0 = 64 << 20  # bytes of a message with its fingerprint, a line for each operation
_MOST_BYTES = 64 << 10  # of a message of anyone else
_KEYS = {'type': str, 'rank': int, 'why': str, 'digest': str, 'fingerprint': dict, 'session': int,
         'step': int, 'number': int, 'is_last': bool, 'checks': bool, 'in_step': bool}
OF_WORKERS = ('hello', 'compared', 'alive', 'begin', 'stop', 'check', 'left', 'done', 'failed')
OF_WORKER_0 = ('compare', 'welcome', 'refused', 'waiting', 'alive', 'go', 'over', 'differs', 'gone',
               'lost', 'end')
_MOST_NUMBER, _LONGEST = 1 << 53, 8000


class Lines:
    """JSON objects over a connected socket.

    What is not a JSON object ends the connection; nothing that is received is ever executed or
    unpickled.
    """

    def __init__(self, connection, most=_MOST_BYTES):
        self.socket, self._most = connection, most
        self.socket.setblocking(True)
        if connection.family in (socket.AF_INET, socket.AF_INET6):  # or an answer takes 40 ms
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.later = []  # messages that came with one that was received
        self._received = b''

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
    if not (isinstance(message, dict) and message.get('type') in OF_WORKERS + OF_WORKER_0
            and all(type(value) is _KEYS.get(key) for key, value in message.items())
            and all(0 <= value < _MOST_NUMBER for value in message.values() if type(value) is int)
            and message.get('why', '').isprintable()):
        raise ClusterError('%.40r is no message' % line)
    return message
