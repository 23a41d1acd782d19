"""A worker's side of the coordinator: its connection with worker 0, see `Coordinator`; and the
messages between the two: one JSON object a line, nothing else."""

import contextlib
import hashlib
import json
import selectors
import socket
import threading
import time

import tensorflow.compat.v1 as tf

from towers.cluster.addresses import AGAIN, FIRST
from towers.cluster.signature import difference
from towers.errors import ClusterError, WorkerLostError, shown

CUT = 'its process has ended, or its machine cut the connection'
START_AGAIN = 'Start all again, and the run goes on from the last checkpoint'
SILENT = 'there is no sign of life from it for %.0f seconds'
MOST_OF_WORKER_0 = 64 << 20  # bytes of a message with its signature, a line for each operation
_MOST_BYTES = 64 << 10  # of a message of anyone else
_KEYS = {'type': str, 'rank': int, 'why': str, 'digest': str, 'signature': dict, 'session': int,
         'signal': int, 'is_last': bool, 'checks': bool, 'in_step': bool}
_TYPES = ('hello alive begin left done failed '  # of workers; and of worker 0:
          'compare welcome refused waiting go over differs gone lost end').split()
_MOST_NUMBER, _LONGEST = 1 << 53, 4000


def pause_of(dead_after):
    """Seconds from one sign of life to the next, of each side."""
    return min(dead_after / 5., FIRST)


class Lines:
    """JSON objects over a connected socket: nothing that is received is executed or unpickled."""

    def __init__(self, connection, most=_MOST_BYTES):
        self.socket, self.is_open, self._most = connection, True, most
        if connection.family in (socket.AF_INET, socket.AF_INET6):  # or an answer takes 40 ms
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received, self._sends = bytearray(), threading.Lock()

    def send(self, message):
        """Sends a dict. Who reads finds out that a connection is broken."""
        if 'why' in message:
            message = dict(message, why=shown(message['why'])[:_LONGEST])
        with self._sends, contextlib.suppress(OSError):
            self.socket.settimeout(10.)
            try:
                self.socket.sendall(_json(message) + b'\n')
            except OSError:  # after a part of a line nothing else makes sense
                self.socket.shutdown(socket.SHUT_RDWR)

    def take(self):
        """The messages that have come. `OSError` at the end, `ClusterError` for what is none."""
        self.socket.settimeout(5.)
        data = self.socket.recv(1 << 16)
        if not data:
            raise ConnectionError('closed')
        self._received += data
        *lines, rest = self._received.split(b'\n') if b'\n' in data else [self._received]
        self._received = rest
        if any(len(line) > self._most for line in lines + [rest]):
            raise ClusterError('a message of more than %d bytes' % self._most)
        return [_parsed(bytes(line)) for line in lines]

    def close(self):
        """Closes it."""
        self.is_open = False
        self.socket.close()


def readable(sockets, seconds):
    """The sockets that have data, or whose other side has closed, within some seconds."""
    with selectors.PollSelector() as selector:  # it needs no descriptor of its own
        for each in sockets:
            selector.register(each, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(seconds)]


def digest_of(value):
    """The SHA-256 of a value of JSON's types."""
    return hashlib.sha256(_json(value)).hexdigest()


def _json(value):
    return json.dumps(value, sort_keys=True, default=str).encode('utf-8')  # numbers of numpy


def _parsed(line):
    try:
        message = json.loads(line.decode('utf-8'))
    except (ValueError, RecursionError):
        message = None
    if not (isinstance(message, dict) and message.get('type') in _TYPES
            and all(type(value) is _KEYS.get(key) for key, value in message.items())
            and all(0 <= value < _MOST_NUMBER for value in message.values() if type(value) is int)
            and message.get('why', '') == shown(message.get('why', ''))):
        raise ClusterError('%.40r is no message' % line)
    return message


def _compared(theirs, own):
    """The answer to worker 0's signature: its digest, and how this worker's differs."""
    try:
        why = difference(theirs, own)
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError):
        why = 'worker 0 sends no signature of a worker'
    return {'digest': digest_of(theirs), 'why': why or ''}


class Connection:
    """A thread that hears what worker 0 says, and the words of this worker to it.

    Attributes:
      lost: None, or `(rank, why)` of the worker that is gone; of a server `(None, why)`.
      stopped_by: None, or `(rank, number)` of the worker that got a signal, and the signal's.
      is_over: whether this session ends after the step, or round of steps, that it has begun last.
      checks: whether all workers compare their weights after that step.
      steps_begun, steps_made: how many steps this session has begun, and made.
      builds: list of the numbers of the builds of the newest one.
    """

    def __init__(self, cluster, signature, connected, dead_after, say, on_lost):
        """`connected` is a socket connected with worker 0. The thread calls `say` and `on_lost`."""
        self.lost, self.dead_after, self.builds = None, dead_after, []
        self._cluster, self._signature = cluster, signature
        self._lines, self._say, self._on_lost = Lines(connected, MOST_OF_WORKER_0), say, on_lost
        self._hello = {'type': 'hello', 'rank': cluster.rank, 'digest': digest_of(signature)}
        self._session, self._answer = 0, None
        self._is_member = self._in_step = self._all_ended = False
        self._begin_steps()
        self._heard, self._closed = time.monotonic(), threading.Event()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True, name='towers-connection')
        self._thread.start()

    def meet(self, deadline):
        """Waits until all are there and train the same; else raises `ClusterError`."""
        self._lines.send(self._hello)
        with self._changed:
            self._changed.wait_for(lambda: self._is_member or self.lost is not None,
                                   max(0., deadline - time.monotonic()))
        if self._is_member:
            return
        rank, why = self.lost or (0, 'it waits for others, or is frozen, and start_timeout is over')
        raise ClusterError('%s does not take %s in: %s.' % (
            self._cluster.who(0), self._cluster.who(rank or self._cluster.rank), why.rstrip('.')))

    def _begin_steps(self):
        self.steps_begun, self.steps_made, self.stopped_by, self._signal = 0, 0, None, 0
        self.is_over = self.checks = self._wants_check = self._step_failed = False

    def ask(self, signal=0, check=False):
        """Has all stop after their next step, by a signal's number, or compare weights then."""
        self._signal, self._wants_check = signal or self._signal, check or self._wants_check

    def begin_session(self, value=()):
        """Waits until the sessions of all workers begin; compares a value as `differing`."""
        self._session += 1
        self._begin_steps()
        return self.differing(value)

    def differing(self, value):
        """The rank of the first worker whose value is not that of worker 0; None where all have the
        same, or a worker has left. All compare at the same place."""
        answer = self._ask(['value', value])
        return answer.get('rank', 0) if answer['type'] == 'differs' else None

    @contextlib.contextmanager
    def step(self, builds):
        """A step of some builds, which begins when all workers begin it. `OutOfRangeError` if some
        worker makes no more steps, `ClusterError` if the workers begin other steps."""
        if self._cluster.waits:
            answer = self._ask(['step', self.steps_made, builds], checks=self._wants_check)
            if answer['type'] == 'over':
                raise tf.errors.OutOfRangeError(
                    None, None, 'another worker has ended its steps, and this one is not made.')
            if answer['type'] == 'differs':
                raise ClusterError('the workers begin steps of other builds, or of other sessions: '
                                   'make the same steps in the same order on all workers.')
            self.checks, self._wants_check = answer.get('checks', False), False
        elif self.lost is not None:
            raise self.error()
        self.builds, self._in_step, self._step_failed = builds, True, True
        self.steps_begun += 1
        try:
            yield
            self.steps_made, self._step_failed = self.steps_made + 1, False
        finally:
            self._in_step = False

    def leave(self):
        """Says that this session makes no more steps; not after one that has failed here, such as
        by the end of this worker's data: the others may be in it, but for local steps."""
        if not self.is_over and (self._cluster.has_local_steps or not self._step_failed):
            self.is_over = True
            self._lines.send({'type': 'left', 'session': self._session, 'signal': self._signal})

    def _ask(self, what, **fields):
        """Worker 0's answer to what this worker is about to begin."""
        with self._changed:
            self._answer = None
        self._lines.send(dict(fields, type='begin', session=self._session, signal=self._signal,
                              digest=digest_of([self._session, what])))
        with self._changed:
            self._changed.wait_for(lambda: self._answer is not None or self.lost is not None
                                   or not self._lines.is_open)
        if self._answer is None:
            raise self.error() or ClusterError('the worker has left the cluster: make sessions and '
                                               'steps within towers.join.')
        return self._answer

    def error(self, seconds=0.):
        """`WorkerLostError` about the worker that is gone, or None; waits some seconds for it."""
        with self._changed:
            self._changed.wait_for(lambda: self.lost is not None, seconds)
        if self.lost is None:
            return None
        rank, why = self.lost
        return WorkerLostError('%s%s. %s.' % (
            '' if rank is None else self._cluster.who(rank) + ' is lost: ', why.rstrip('.'),
            START_AGAIN))

    def lose(self, rank, why):
        """Notes why a worker is gone, or a server, with None for the rank; the first one counts."""
        with self._changed:
            if self.lost is not None or self._all_ended:
                return
            self.lost = (rank, why)
            self._changed.notify_all()
        if self._is_member:
            self._on_lost(self.error())

    def finish(self):
        """Says that this worker has ended in good order, and waits until worker 0 lets it go."""
        self._lines.send({'type': 'done'})
        with self._changed:
            self._changed.wait_for(lambda: self._all_ended or self.lost is not None)

    def fail(self, why):
        """Says why this worker ends before the others."""
        self._lines.send({'type': 'failed', 'why': why})
        self.close()

    def close(self):
        """Closes the connection."""
        self._closed.set()
        self._thread.join(5. if self.lost is None else 0.)  # it may wait for the process to end
        self._lines.close()

    def _run(self):
        pause, beat_at, say_at = pause_of(self.dead_after), 0., 0.
        while not (self._closed.is_set() or self._all_ended or self.lost is not None):
            now = time.monotonic()
            if self._is_member and now >= beat_at:
                beat_at = now + pause
                self._lines.send({'type': 'alive', 'in_step': self._in_step})
            try:
                if readable([self._lines.socket], min(pause, 0.2)):
                    for message in self._lines.take():
                        self._heard = time.monotonic()
                        self._take(message)
            except OSError:
                if not self._closed.is_set():
                    self.lose(0, CUT if self._is_member else CUT + ': see what it says')
            except ClusterError as error:
                self.lose(0, 'it sent %s: another program may use its port' % error)
            if time.monotonic() - now > self.dead_after / 2.:
                self._heard = time.monotonic()  # this process was frozen itself
            if self._is_member and time.monotonic() - self._heard > self.dead_after:
                gone = {'type': 'lost', 'rank': 0, 'why': SILENT % self.dead_after}
                self._lines.send(gone)  # if it thaws
                self.lose(0, gone['why'])
            elif self._is_member and now - self._heard > 1.5 * FIRST and now > say_at:
                say_at = now + AGAIN
                self._say('waiting        for %s' % self._cluster.who(0))

    def _take(self, message):
        kind, rank, why = message['type'], message.get('rank', 0), message.get('why', '')
        if kind == 'compare':
            self._lines.send(dict(self._hello, **_compared(message.get('signature'),
                                                           self._signature)))
        elif kind == 'waiting':
            self._say('waiting        %s' % why)
        elif kind == 'gone':
            self._say('gone           %s, and the others train on without it: %s' % (
                self._cluster.who(rank), why))
        elif kind in ('refused', 'lost'):
            self.lose(rank, why)
        with self._changed:
            self._is_member = self._is_member or kind == 'welcome'
            if kind in ('go', 'over', 'differs'):
                self._answer = message
                self.is_over = self.is_over or kind == 'over' or message.get('is_last', False)
                if 'signal' in message:
                    self.stopped_by = (rank, message['signal'])
            self._all_ended = self._all_ended or kind == 'end'
            self._changed.notify_all()
