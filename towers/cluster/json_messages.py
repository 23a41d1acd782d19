"""Messages between the processes of a cluster: one JSON object a line, nothing else."""

import json
import select
import time

from towers.errors import ClusterError

_MOST_BYTES = 64 << 20  # of one message: a line for each variable of the largest models fits


class Lines:
    """JSON objects over a connected socket.

    What is not a JSON object ends the connection; nothing that is received is ever executed or
    unpickled.
    """

    def __init__(self, connection):
        self.socket = connection
        self.socket.setblocking(True)
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
        self.socket.settimeout(timeout)
        self.socket.sendall(json.dumps(message).encode('utf-8') + b'\n')

    def take(self):
        """The messages that have arrived, a list of dicts; empty where there is none, yet.

        Call it when the socket is readable.

        Raises:
          EOFError: the other side has closed the connection.
          ClusterError: something else than a JSON object came.
          OSError: the connection is broken.
        """
        self.socket.settimeout(5.)
        data = self.socket.recv(1 << 16)
        if not data:
            raise EOFError
        lines = (self._received + data).split(b'\n')
        self._received = lines.pop()
        if len(self._received) > _MOST_BYTES:
            raise ClusterError('a message of more than %d bytes' % _MOST_BYTES)
        return [_parsed(line) for line in lines]

    def receive(self, deadline):
        """The next message, or None when the deadline passes first; raises as `take`."""
        while time.monotonic() < deadline:
            if readable([self.socket], min(0.5, max(0., deadline - time.monotonic()))):
                messages = self.take()
                if messages:  # one at a time: an answer is waited for before the next one is sent
                    return messages[0]
        return None

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


def _parsed(line):
    try:
        message = json.loads(line.decode('utf-8'))
    except ValueError:
        message = None
    if not isinstance(message, dict):
        raise ClusterError('%.40r is no message' % line)
    return message
