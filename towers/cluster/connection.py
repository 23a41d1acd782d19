"""A worker's side of the coordinator: its connection with worker 0, see `Coordinator`; and the
messages between the two: one JSON object a line, nothing else.

A message has a `type`, and further fields that go with it. A worker says

    hello     it is here: `rank`, `digest` of the signature that it knows: its own, or after
              `compare` worker 0's, with `why` its own differs
    alive     it is at work: `in_step`
    begin     it waits to begin something: `session`, `digest` of what, `signal`, `checks`
    left      its session makes no more steps: `session`, `signal`
    done      its training is over
    failed    it ends by an error: `why`

and worker 0

    compare   look how you differ: its `signature`
    welcome   all are there
    refused   a worker does not fit: `rank`, `why`
    waiting   you wait for others: `why`
    alive     it is at work
    go        begin: `signal` and its `rank`, `is_last`, `checks`
    differs   the worker `rank` would begin something else
    over      a worker has left this session
    gone      an asynchronous worker is lost, and the others go on: `rank`, `why`
    lost      a worker is lost, and with it all: `rank`, `why`
    end       all have said that their training is over
"""

import contextlib
import hashlib
import json
import selectors
import socket
import threading
import time
import typing

import tensorflow.compat.v1 as tf

from towers.cluster.addresses import AGAIN, FIRST, why_silent
from towers.cluster.signature import difference
from towers.errors import ClusterError, WorkerLostError, shown

CUT = 'its process has ended, or its machine cut the connection'
START_AGAIN = 'Start all again, and the run goes on from the last checkpoint'
SILENT = 'there is no sign of life from it for %.0f seconds'

MOST_OF_WORKER_0 = 64 << 20  # bytes of a message with its signature, a line for each operation
_MOST_BYTES = 64 << 10  # of a message of anyone else
_MOST_CHARACTERS = 4000  # of a text in a message
_MOST_NUMBER = 1 << 53  # above it JSON's numbers are not exact everywhere
# The types of the fields of a message, and the types of messages: of workers, and of worker 0.
_FIELDS = {'type': str, 'rank': int, 'why': str, 'digest': str, 'signature': dict, 'session': int,
           'signal': int, 'is_last': bool, 'checks': bool, 'in_step': bool}
_TYPES = (
    ['hello', 'alive', 'begin', 'left', 'done', 'failed']
    + ['compare', 'welcome', 'refused', 'waiting', 'go', 'over', 'differs', 'gone', 'lost', 'end'])


def pause_of(dead_after: float) -> float:
    """Seconds from one sign of life to the next, of each side, where `dead_after` seconds of
    silence count as the loss of a worker."""
    return min(dead_after / 5., FIRST)


class Lines:
    """JSON objects over a connected socket: nothing that is received is executed or unpickled.

    Attributes:
      socket: the connected one.
      is_open: whether it is not closed on this side.
    """

    def __init__(self, connection: socket.socket, most: int = _MOST_BYTES):
        """Takes a connected socket; `most` are the bytes of a message that is received."""
        self.socket = connection
        self.is_open = True
        self._most = most
        if connection.family in (socket.AF_INET, socket.AF_INET6):  # or an answer takes 40 ms
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = bytearray()
        self._is_sending = threading.Lock()

    def send(self, message: dict) -> None:
        """Sends a message. Who reads finds out that a connection is broken."""
        if 'why' in message:
            message = dict(message, why=shown(message['why'])[:_MOST_CHARACTERS])
        with self._is_sending, contextlib.suppress(OSError):
            self.socket.settimeout(10.)
            try:
                self.socket.sendall(_json(message) + b'\n')
            except OSError:  # after a part of a line nothing else makes sense
                self.socket.shutdown(socket.SHUT_RDWR)

    def take(self) -> typing.List[dict]:
        """The messages that have come. `OSError` at the end, `ClusterError` for what is none."""
        self.socket.settimeout(5.)
        data = self.socket.recv(1 << 16)
        if not data:
            raise ConnectionError('closed')
        self._received += data
        lines: typing.List[bytearray] = []
        if b'\n' in data:
            *lines, self._received = self._received.split(b'\n')
        if any(len(line) > self._most for line in lines + [self._received]):
            raise ClusterError('a message of more than %d bytes' % self._most)
        return [_parsed(bytes(line)) for line in lines]

    def close(self) -> None:
        """Closes it."""
        self.is_open = False
        self.socket.close()


def readable(sockets: typing.Iterable[socket.socket],
             seconds: float) -> typing.List[typing.Any]:
    """The sockets that have data, or whose other side has closed, within some seconds."""
    with selectors.PollSelector() as selector:  # it needs no descriptor of its own
        for each in sockets:
            selector.register(each, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(seconds)]


def digest_of(value: typing.Any) -> str:
    """The SHA-256 of a value of JSON's types."""
    return hashlib.sha256(_json(value)).hexdigest()


def _json(value: typing.Any) -> bytes:
    """A value of JSON's types, or with numbers of numpy, as JSON."""
    return json.dumps(value, sort_keys=True, default=str).encode('utf-8')


def _parsed(line: bytes) -> dict:
    """The message in a line; raises `ClusterError` for what is none."""
    try:
        message = json.loads(line.decode('utf-8'))
    except (ValueError, RecursionError):
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
        if type(field) is not _FIELDS.get(name):
            return False
        if type(field) is int and not 0 <= field < _MOST_NUMBER:
            return False
    text = value.get('why', '')
    return text == shown(text)


def _compared(signature_of_worker_0: typing.Any, own: dict) -> dict:
    """The answer to worker 0's signature: its digest, and how this worker's `own` differs."""
    try:
        reason = difference(signature_of_worker_0, own)
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError):
        reason = 'worker 0 sends no signature of a worker'
    return {'digest': digest_of(signature_of_worker_0), 'why': reason or ''}


def say_refusal(rank: int, signature: dict, why: str, connected: socket.socket) -> None:
    """Tells worker 0 that the worker of a rank, with that signature, cannot join, and why; closes
    the socket that is connected with worker 0."""
    lines = Lines(connected)
    lines.send({'type': 'hello', 'rank': rank, 'digest': digest_of(signature), 'why': why})
    with contextlib.suppress(OSError, ClusterError):
        lines.take()  # to close it before an answer might lose the message
    lines.close()


class Connection:
    """A thread that hears what worker 0 says, and the words of this worker to it.

    Attributes:
      lost: None, or `(rank, why)` of the worker that is gone; of a server `(None, why)`.
      dead_after: seconds of silence after which worker 0 is lost.
      stopped_by: None, or `(rank, number)` of the worker that got a signal, and the signal's.
      is_over: whether this session ends after the step, or round of steps, that it has begun last.
      checks: whether all workers compare their weights after that step.
      steps_begun: how many steps this session has begun.
      steps_made: how many steps this session has made.
      builds: list of the positions of the builds of the newest step.
    """

    def __init__(self, cluster: typing.Any, signature: dict, connected: socket.socket,
                 dead_after: float, say: typing.Callable, on_lost: typing.Callable):
        """Starts the thread.

        Args:
          cluster: the `Cluster`.
          signature: of this worker.
          connected: a socket that is connected with worker 0.
          dead_after: as for `join`.
          say: called by the thread with lines about waits.
          on_lost: called by the thread with a `WorkerLostError`.
        """
        self.lost: typing.Optional[typing.Tuple[typing.Optional[int], str]] = None
        self.dead_after = dead_after
        self.builds: typing.List[int] = []
        self._cluster = cluster
        self._signature = signature
        self._lines = Lines(connected, MOST_OF_WORKER_0)
        self._say = say
        self._on_lost = on_lost
        self._hello = {'type': 'hello', 'rank': cluster.rank, 'digest': digest_of(signature)}
        self._session = 0  # its number
        self._answer: typing.Optional[dict] = None  # to what this worker is about to begin
        self._is_member = False
        self._in_step = False
        self._all_ended = False
        self._begin_steps()
        self._heard = time.monotonic()  # when worker 0 said something last
        self._say_at = 0.  # when to say next that this worker waits for worker 0
        self._awaited = 'for others, or is frozen'  # for whom worker 0 waits, as it has said last
        self._closed = threading.Event()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True, name='towers-connection')
        self._thread.start()

    def meet(self, deadline: float) -> None:
        """Waits until all are there and train the same, at most until a deadline by
        `time.monotonic()`; else raises `ClusterError`."""
        self._lines.send(self._hello)
        with self._changed:
            self._changed.wait_for(lambda: self._is_member or self.lost is not None,
                                   max(0., deadline - time.monotonic()))
        if self._is_member:
            return
        refused_rank = self._cluster.rank
        reason = ('it waits %s, and start_timeout is over: start all, see why one was refused, or '
                  'give a longer one' % self._awaited)
        if self.lost is not None:
            rank, reason = self.lost
            if rank:  # another worker is refused; 0 is the connection of this one
                refused_rank = rank
            elif reason == CUT and self._has_begun_without_this():
                reason = ('its run has begun, so that worker %d is here already: two processes '
                          'have the same place in the cluster' % refused_rank)
            elif reason == CUT:
                reason += ': see what it says'
        raise ClusterError('%s does not take %s in: %s.' % (
            self._cluster.who(0), self._cluster.who(refused_rank), reason.rstrip('.')))

    def _has_begun_without_this(self) -> bool:
        """Whether worker 0's port is its TensorFlow server's already, which begins when all workers
        are there."""
        return self._cluster.has_addresses and not why_silent(self._cluster.workers[0])

    def _begin_steps(self) -> None:
        """Sets what is of one session to its beginning."""
        self.steps_begun = 0
        self.steps_made = 0
        self.stopped_by: typing.Optional[typing.Tuple[int, int]] = None
        self.is_over = False
        self.checks = False
        self._signal = 0
        self._wants_check = False
        self._step_failed = False

    def ask(self, signal: int = 0, check: bool = False) -> None:
        """Asks all to stop after their next step, by a signal's number, or, with `check`, to
        compare weights then."""
        self._signal = signal or self._signal
        self._wants_check = check or self._wants_check

    def begin_session(self, value: typing.Any = ()) -> typing.Optional[int]:
        """Waits until the sessions of all workers begin; compares a value as `differing`."""
        self._session += 1
        self._begin_steps()
        return self.differing(value)

    def differing(self, value: typing.Any) -> typing.Optional[int]:
        """The rank of the first worker whose value is not that of worker 0; None where all have the
        same, or a worker has left. All compare at the same place."""
        answer = self._ask(['value', value])
        return answer.get('rank', 0) if answer['type'] == 'differs' else None

    @contextlib.contextmanager
    def step(self, builds: typing.List[int]) -> typing.Iterator[None]:
        """A step of the builds of these numbers, which begins when all workers begin it.
        `OutOfRangeError` if some worker makes no more steps, `ClusterError` if the workers begin
        other steps."""
        if self._cluster.waits:
            self._begin_together(builds)
        elif self.lost is not None:
            raise self._lost_error(self.lost)
        self.builds = builds
        self.steps_begun += 1
        self._in_step = True
        self._step_failed = True  # unless it comes to its end
        try:
            yield
            self.steps_made += 1
            self._step_failed = False
        finally:
            self._in_step = False

    @contextlib.contextmanager
    def first_values(self) -> typing.Iterator[None]:
        """What a session does with all others before its first step; who waits is told."""
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False

    def _begin_together(self, builds: typing.List[int]) -> None:
        """Waits until all workers begin the next step, of these builds."""
        answer = self._ask(['step', self.steps_made, builds], checks=self._wants_check)
        if answer['type'] == 'over':
            raise tf.errors.OutOfRangeError(
                None, None, 'another worker has ended its steps, and this one is not made.')
        if answer['type'] == 'differs':
            raise ClusterError('the workers begin steps of other builds, or of other sessions: '
                               'make the same steps in the same order on all workers.')
        self.checks = answer.get('checks', False)
        self._wants_check = False

    def leave(self) -> None:
        """Says that this session makes no more steps; not after one that has failed here, such as
        by the end of this worker's data: the others may be in it, but for local steps."""
        may_say = self._cluster.has_local_steps or not self._step_failed
        if may_say and not self.is_over:
            self.is_over = True
            self._lines.send({'type': 'left', 'session': self._session, 'signal': self._signal})

    def _ask(self, what: list, **fields: typing.Any) -> dict:
        """Worker 0's answer to what this worker is about to begin; `fields` go with the message."""
        with self._changed:
            self._answer = None
        self._lines.send(dict(fields, type='begin', session=self._session, signal=self._signal,
                              digest=digest_of([self._session, what])))
        with self._changed:
            self._changed.wait_for(lambda: self._answer is not None or self.lost is not None
                                   or not self._lines.is_open)
        if self._answer is not None:
            return self._answer
        if self.lost is not None:
            raise self._lost_error(self.lost)
        raise ClusterError('the worker has left the cluster: make sessions and steps within '
                           'towers.join.')

    def error(self, seconds: float = 0.) -> typing.Optional[WorkerLostError]:
        """`WorkerLostError` about the worker that is gone, or None; waits some seconds for it."""
        with self._changed:
            self._changed.wait_for(lambda: self.lost is not None, seconds)
        return None if self.lost is None else self._lost_error(self.lost)

    def _lost_error(self, lost: typing.Tuple[typing.Optional[int], str]) -> WorkerLostError:
        """The error about the worker, or server, that is `lost`."""
        rank, reason = lost
        text = '' if rank is None else self._cluster.who(rank) + ' is lost: '
        text += reason.rstrip('.') + '.'
        if START_AGAIN not in text:  # as it is in what another worker has said
            text += ' %s.' % START_AGAIN
        return WorkerLostError(text)

    def lose(self, rank: typing.Optional[int], why: str) -> None:
        """Notes why a worker is gone, or a server, with None for the rank; the first one counts."""
        with self._changed:
            if self.lost is not None or self._all_ended:
                return
            self.lost = (rank, why)
            self._changed.notify_all()
        if self._is_member:
            self._on_lost(self._lost_error((rank, why)))

    def finish(self) -> None:
        """Says that this worker has ended in good order, and waits until worker 0 lets it go."""
        self._lines.send({'type': 'done'})
        with self._changed:
            self._changed.wait_for(lambda: self._all_ended or self.lost is not None)

    def fail(self, why: str) -> None:
        """Says why this worker ends before the others."""
        self._lines.send({'type': 'failed', 'why': why})
        self.close()

    def close(self) -> None:
        """Closes the connection."""
        self._closed.set()
        self._thread.join(5. if self.lost is None else 0.)  # it may wait for the process to end
        self._lines.close()

    def _run(self) -> None:
        """The thread: hears worker 0, and shows it that this worker is alive."""
        pause = pause_of(self.dead_after)
        beat_at = 0.
        while not (self._closed.is_set() or self._all_ended or self.lost is not None):
            started = time.monotonic()
            if self._is_member and started >= beat_at:
                beat_at = started + pause
                self._lines.send({'type': 'alive', 'in_step': self._in_step})
            self._hear(min(pause, 0.2))
            if time.monotonic() - started > self.dead_after / 2.:
                self._heard = time.monotonic()  # this process was frozen itself
            if self._is_member:
                self._look_for_silence(started)

    def _hear(self, seconds: float) -> None:
        """Takes what worker 0 says within some seconds."""
        try:
            if readable([self._lines.socket], seconds):
                for message in self._lines.take():
                    self._heard = time.monotonic()
                    self._take(message)
        except OSError:
            if not self._closed.is_set():
                self.lose(0, CUT)
        except ClusterError as error:
            self.lose(0, 'it sent %s: another program may use its port' % error)

    def _look_for_silence(self, started: float) -> None:
        """Loses worker 0 after a long silence, and says that this worker waits after a shorter one;
        `started` is when this look began."""
        if time.monotonic() - self._heard > self.dead_after:
            reason = SILENT % self.dead_after
            self._lines.send({'type': 'lost', 'rank': 0, 'why': reason})  # if it thaws
            self.lose(0, reason)
        elif started - self._heard > 1.5 * FIRST and started > self._say_at:
            self._say_at = started + AGAIN
            self._say('waiting        for %s' % self._cluster.who(0))

    def _take(self, message: dict) -> None:
        """Does what a message of worker 0 says."""
        kind = message['type']
        rank = message.get('rank', 0)
        reason = message.get('why', '')
        if kind == 'compare':
            self._lines.send(dict(self._hello, **_compared(message.get('signature'),
                                                           self._signature)))
        elif kind == 'waiting':
            self._awaited = reason
            self._say('waiting        %s' % reason)
        elif kind == 'gone':
            self._say('gone           %s, and the others train on without it: %s' % (
                self._cluster.who(rank), reason))
        elif kind in ('refused', 'lost'):
            self.lose(rank, reason)
        with self._changed:
            if kind == 'welcome':
                self._is_member = True
            elif kind == 'end':
                self._all_ended = True
            elif kind in ('go', 'over', 'differs'):
                self._take_answer(message)
            self._changed.notify_all()

    def _take_answer(self, message: dict) -> None:
        """Notes the answer to what this worker is about to begin."""
        self._answer = message
        if message['type'] == 'over' or message.get('is_last', False):
            self.is_over = True
        if 'signal' in message:
            self.stopped_by = (message.get('rank', 0), message['signal'])
