"""Sockets of a cluster's processes: addresses, ports that are free, tasks that answer, and the
messages between workers: one JSON object a line, nothing else."""

import contextlib
import errno
import hashlib
import json
import random
import re
import selectors
import socket
import time
from concurrent.futures import ThreadPoolExecutor

from towers.arguments import check_count
from towers.errors import ClusterError

FIRST, AGAIN = 5., 30.  # seconds to the first line about a wait, and from one line to the next
_PAUSE = 0.2  # seconds between two tries
_PATIENCE = 2.  # seconds for an answer

# ---- addresses and ports ------------------------------------------------------------------------

_LASTING = range(20000, 32768)  # the system gives these ports to no outgoing connection
_ADDRESS = re.compile(r'(\[[^\s/\[\]]+\]|[^\s/:\[\]]+):([0-9]{1,5})')


def free_ports(count: int) -> list:
    """Numbers of ports of this machine that nobody uses at the moment.

    They are of a range that the system gives to no outgoing connection: else one that some process
    opens before the ports are bound could take one of them.

    Args:
      count: how many ports.

    Returns:
      List of ints, all different.

    Raises:
      ClusterError: there are not so many ports.
      InvalidArgumentError: a count below 1.
    """
    check_count('count', count)
    # Not the module's generator: programs that seed it alike would all draw the same ports.
    drawn, found = random.SystemRandom().sample(_LASTING, len(_LASTING)), []
    with contextlib.ExitStack() as stack:
        while len(found) < count and drawn:
            try:
                taken = stack.enter_context(contextlib.closing(socket.socket()))
                taken.bind(('127.0.0.1', drawn.pop()))
                found.append(taken.getsockname()[1])
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    break  # this process has too many sockets
    if len(found) < count:
        raise ClusterError('count=%d: %d ports are free for this process.' % (count, len(found)))
    return found


def split_address(address):
    """`('host', port)` of `'host:port'`; `ClusterError` for what is no address."""
    found = _ADDRESS.fullmatch(str(address))
    if found is None or not found.group(1).isprintable() or not 0 < int(found.group(2)) < 65536:
        raise ClusterError("%.200r is no address: expected 'host:port', such as '10.0.0.1:2222' or "
                           "'[::1]:2222'." % (address,))
    return found.group(1).strip('[]'), int(found.group(2))


def listen(address):
    """A socket that listens on the port of an address of this process, on all interfaces as
    TensorFlow's servers do: the host may be a name that leads here from elsewhere alone, such as a
    service of Kubernetes. `ClusterError` if another process uses the port."""
    host, port = split_address(address)
    listener = socket.socket(socket.AF_INET6 if ':' in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(('', port))
        listener.listen(64)
    except OSError as error:
        listener.close()
        raise ClusterError('%s cannot be listened at: %s. Another process uses the port: give this '
                           'task another one.' % (address, error.strerror)) from None
    return listener


# ---- tasks that answer --------------------------------------------------------------------------

# The preface of a connection of HTTP/2, which gRPC speaks, and an empty frame of settings.
_HTTP2 = b'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n' + b'\0\0\0\x04\0\0\0\0\0'
_SETTINGS = b'\x04'  # the type of the frame that a server answers with
_MOST_LOOKS = 16  # at servers at a time: that of a machine that is off takes seconds


def why_silent(address, timeout=_PATIENCE):
    """Why what is at an address is no server of TensorFlow's at work, in words; '' if it is one. It
    is asked as gRPC asks: the system takes connections for a frozen process, and says nothing."""
    received, data = b'', b'-'
    try:
        with socket.create_connection(split_address(address), timeout=timeout) as connection:
            connection.sendall(_HTTP2)
            while data and len(received) < 4:
                data = connection.recv(64)
                received += data
    except socket.timeout:
        return 'takes connections and says nothing: its process is frozen, or its machine is off'
    except OSError as error:
        return _does_not_answer(error)
    return '' if received[3:4] == _SETTINGS else (
        "is no server of TensorFlow's: another program uses the port, or the address is wrong")


def _does_not_answer(error):
    return 'does not answer: %s' % (
        'the name of its host is not known here' if isinstance(error, socket.gaierror) else
        error.strerror or error)


def silent_servers(cluster):
    """The parameter servers that do not work, in words, with the reason; '' if all do."""
    with ThreadPoolExecutor(min(max(len(cluster.ps), 1), _MOST_LOOKS)) as pool:
        reasons = list(pool.map(why_silent, cluster.ps))
    return '; '.join('%s %s' % (cluster.who(rank, 'ps'), why)
                     for rank, why in enumerate(reasons) if why)


def wait_for_servers(cluster, deadline, say):
    """Waits until all parameter servers work; see `connect`."""
    _until(lambda: (None, silent_servers(cluster)), deadline, say)


def connect(address, who, deadline, say):
    """A socket that is connected with the task `who` at an address; `ClusterError` when there is
    none at the deadline, by `time.monotonic()`. `say` is called with lines about the wait."""
    place = split_address(address)

    def attempt():
        try:
            return socket.create_connection(place, timeout=_PATIENCE), ''
        except OSError as error:
            return None, '%s %s' % (who, _does_not_answer(error))
    return _until(attempt, deadline, say)


def _until(attempt, deadline, say):
    """What `attempt()` gives, `(result, '')`, tried again while it gives `(None, why not)`."""
    timeout = deadline - time.monotonic()
    say_at = deadline - timeout + FIRST
    while True:
        result, why = attempt()
        now = time.monotonic()
        if not why:
            return result
        if now > deadline:
            raise ClusterError('%s. Start it, correct its address, or give a longer start_timeout.'
                               % why)
        if now > say_at:
            say_at = now + AGAIN
            say('waiting        %s, start_timeout is %.3g s' % (why, timeout))
        time.sleep(_PAUSE)


# ---- messages -----------------------------------------------------------------------------------

MOST_OF_WORKER_0 = 64 << 20  # bytes of a message with its fingerprint, a line for each operation
_MOST_BYTES = 64 << 10  # of a message of anyone else
_KEYS = {'type': str, 'rank': int, 'why': str, 'digest': str, 'fingerprint': dict, 'session': int,
         'number': int, 'is_last': bool, 'checks': bool, 'in_step': bool}
_OF_WORKERS = ('hello', 'alive', 'begin', 'left', 'done', 'failed')
_OF_WORKER_0 = ('compare', 'welcome', 'refused', 'waiting', 'alive', 'go', 'over', 'differs',
                'gone', 'lost', 'end')
_MOST_NUMBER, _LONGEST = 1 << 53, 8000


class Lines:
    """JSON objects over a connected socket: nothing that is received is executed or unpickled."""

    def __init__(self, connection, most=_MOST_BYTES):
        self.socket, self.is_open, self._most = connection, True, most
        if connection.family in (socket.AF_INET, socket.AF_INET6):  # or an answer takes 40 ms
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = b''

    def send(self, message):
        """Sends a dict. Who reads finds out that a connection is broken."""
        if 'why' in message:
            message = dict(message, why=printable(message['why']))
        with contextlib.suppress(OSError):
            self.socket.settimeout(10.)
            self.socket.sendall(json.dumps(message).encode('utf-8') + b'\n')

    def take(self):
        """List of the messages that have arrived; empty where there is none, yet. `OSError` if the
        other side has closed the connection, `ClusterError` for anything but a message."""
        self.socket.settimeout(5.)
        data = self.socket.recv(1 << 16)
        if not data:
            raise ConnectionError('closed')
        lines = (self._received + data).split(b'\n')
        self._received = lines.pop()
        if any(len(line) > self._most for line in lines + [self._received]):
            raise ClusterError('a message of more than %d bytes' % self._most)
        return [_parsed(line) for line in lines]

    def close(self):
        """Closes the connection."""
        self.is_open = False
        self.socket.close()


def readable(sockets, seconds):
    """The sockets of a list that can be read from within some seconds: data has come, or the other
    side has closed."""
    with selectors.DefaultSelector() as selector:
        for each in sockets:
            selector.register(each, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(seconds)]


def printable(text):
    """A text for a line of a log, without what moves a terminal's cursor or begins a line."""
    return ''.join(each if each.isprintable() else ' ' for each in str(text)[:_LONGEST])


def digest_of(value):
    """A short text that is another one for another value, of JSON's types."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode('utf-8')).hexdigest()


def _parsed(line):
    try:
        message = json.loads(line.decode('utf-8'))
    except (ValueError, RecursionError):
        message = None
    if not (isinstance(message, dict) and message.get('type') in _OF_WORKERS + _OF_WORKER_0
            and all(type(value) is _KEYS.get(key) for key, value in message.items())
            and all(0 <= value < _MOST_NUMBER for value in message.values() if type(value) is int)
            and message.get('why', '').isprintable()):
        raise ClusterError('%.40r is no message' % line)
    return message
