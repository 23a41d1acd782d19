"""A worker's side of the coordinator: its connection with worker 0, see `Coordinator`.

The main thread, which runs the training, asks before each thing that all workers begin together (a
session, a step, a comparison between two steps). It hears worker 0 itself until the answer is
there: a thread that heard the answer would have to wake it, and to hand over Python's lock, in each
step. Beside it, a thread shows worker 0 that this worker is alive, hears worker 0 a few times a
second, and tells of a loss.
"""

import contextlib
import socket
import threading
import time
import typing

import tensorflow.compat.v1 as tf

from towers.cluster.addresses import FIRST_LINE_AFTER, NEXT_LINE_AFTER, why_silent
from towers.cluster.messages import (
    MOST_OF_WORKER_0,
    WHY_CUT,
    WHY_SILENT,
    Lines,
    digest_of,
    line_of,
    seconds_between_signs,
)
from towers.cluster.signature import difference
from towers.errors import ClusterError, TowersError, WorkerLostError, reason_of

_PAUSE = 0.2  # seconds from one look of a connection's thread to the next, at most
START_AGAIN = 'Start all again, and the run goes on from the last checkpoint'


def _answer_to_signature(signature_of_worker_0: typing.Any, own: dict) -> dict:
    """The fields of the answer to worker 0's signature: its digest, and why this worker's `own`
    signature differs, '' if it does not."""
    try:
        reason = difference(signature_of_worker_0, own)
    # Another program at worker 0's port may have sent anything, which `difference` does not check.
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError):
        reason = 'worker 0 sends no signature of a worker'
    return {'digest': digest_of(signature_of_worker_0), 'why': reason or ''}


def text_for_others(error: BaseException) -> str:
    """What other workers are told of an error of this one: an error of `towers` says by itself what
    is wrong; for any other error the type is named, too."""
    why = reason_of(error)
    if isinstance(error, TowersError):
        return why
    return '%s: %s' % (type(error).__name__, why)


# In TensorFlow's error of a step that waits for a tensor of another worker, when that worker's step
# has failed; the reason of the failure stands beside it.
_OF_OTHER_WORKER = ('RecvTensor', 'GRPC error information')


def _is_of_other_worker(error: BaseException) -> bool:
    """Whether a step in a ring has failed because another worker's step has."""
    if not isinstance(error, tf.errors.OpError):
        return False
    return any(words in error.message for words in _OF_OTHER_WORKER)


def say_refusal(rank: int, signature: dict, why: str, connected: socket.socket) -> None:
    """Tells worker 0 that this worker cannot join.

    Args:
      rank: of this worker.
      signature: of this worker.
      why: why it cannot join.
      connected: a socket that is connected with worker 0; it is closed.
    """
    lines = Lines(connected)
    lines.send({'type': 'hello', 'rank': rank, 'digest': digest_of(signature), 'why': why})
    with contextlib.suppress(OSError, ClusterError):
        lines.take()  # a socket that is closed with an unread answer may lose what it has sent
    lines.close()


class Lost(typing.NamedTuple):
    """A worker, or a parameter server, that is gone."""
    rank: typing.Optional[int]  # of the worker; None of a server
    why: str


class Connection:
    """This worker's connection with worker 0.

    Attributes:
      lost: the `Lost` worker or server, the first of several; None if none is lost.
      dead_after: seconds of silence after which worker 0 is lost.
      stopped_by: `(rank, number)`: the rank of the worker that got a signal, and the number of the
        signal; None without a signal.
      is_over: whether this session ends after the step, or round of steps, that it has begun last.
      checks: whether all workers compare their weights after that step.
      raised: why the newest step has failed, as others are told; None if it has not.
      is_raised_by_other: whether it has failed because it has failed on another worker.
      steps_begun: how many steps this session has begun.
      steps_made: how many steps this session has made.
      builds: list of the positions, in `builds_of` their graph, of the builds whose train ops the
        newest step runs.
    """

    def __init__(self, cluster: typing.Any, signature: dict, connected: socket.socket,
                 dead_after: float, say: typing.Callable, on_lost: typing.Callable,
                 serve: typing.Optional[typing.Callable] = None):
        """Starts the thread.

        Args:
          cluster: the `Cluster`.
          signature: of this worker.
          connected: a socket that is connected with worker 0.
          dead_after: as for `join`.
          say: called with lines about waits.
          on_lost: called by the thread with a `WorkerLostError`.
          serve: on worker 0 `Coordinator.serve`; None on other workers.
        """
        self.lost: typing.Optional[Lost] = None
        self.dead_after = dead_after
        self.builds: typing.List[int] = []
        self.raised: typing.Optional[str] = None
        self.is_raised_by_other = False
        self._cluster = cluster
        self._signature = signature
        self._lines = Lines(connected, MOST_OF_WORKER_0)
        self._say = say
        self._on_lost = on_lost
        self._serve = serve
        self._hello = {'type': 'hello', 'rank': cluster.rank, 'digest': digest_of(signature)}
        self._session = 0  # the number of the newest session
        self._asks = False  # whether it waits for an answer, or such a wait was interrupted
        self._asked: typing.Any = None  # by the newest `begin`
        self._line = b''  # the newest `begin`
        self._answer: typing.Optional[dict] = None  # to the newest `begin`; None until it comes
        self._is_member = False  # whether worker 0 has said that all are there, and train the same
        self._in_step = False
        self._has_failed_on_all = False  # whether the newest step has failed on each worker
        self._all_ended = False  # whether all have said that their training is over
        self._reset_session()
        self._heard_at = time.monotonic()  # when worker 0 said something last
        self._say_at = 0.  # when to say next that this worker waits for worker 0
        # What worker 0 waits for, as it has said last. An error puts it after 'it waits'.
        self._awaited = 'for others, or is frozen'
        self._is_closed = False
        self._hears = threading.Lock()  # held by the thread that hears worker 0
        self._changed = threading.Condition()  # notified of what `error` waits for
        # Between two looks of the thread. `close` and a loss end the pause.
        self._pause = min(seconds_between_signs(dead_after) / 2., _PAUSE)
        self._ends_pause = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name='towers-connection')
        self._thread.start()

    def meet(self, deadline: float) -> None:
        """Says hello, and waits until all are there and train the same.

        Args:
          deadline: by `time.monotonic()`, until when to wait.

        Raises:
          ClusterError: not all are there by then, or a worker is refused.
        """
        self._lines.send(self._hello)
        self._hear_until(lambda: self._is_member or time.monotonic() >= deadline)
        if not self._is_member:
            rank, reason = self._why_not_taken_in()
            raise ClusterError('%s does not take %s in: %s.' % (
                self._cluster.who(0), self._cluster.who(rank), reason.rstrip('.')))

    def _why_not_taken_in(self) -> typing.Tuple[int, str]:
        """The rank of the worker that worker 0 does not take in, and why."""
        own_rank = self._cluster.rank
        if self.lost is None:
            return own_rank, ('it waits %s, and start_timeout is over: start all, see why one was '
                              'refused, or give a longer one' % self._awaited)
        rank = self.lost.rank or 0  # None would be a server, and nobody watches the servers yet
        reason = self.lost.why
        if rank > 0:  # worker 0 has refused this worker, or another one
            return rank, reason
        # From here on worker 0 itself is lost to this worker.
        if reason != WHY_CUT:  # then the reason says enough, such as that it is silent
            return own_rank, reason
        if self._has_begun_without_this():
            return own_rank, ('its run has begun, so that worker %d is here already: two processes '
                              'have the same place in the cluster' % own_rank)
        return own_rank, reason + ': see what it says'

    def _has_begun_without_this(self) -> bool:
        """Whether TensorFlow's server answers at worker 0's address. The server gets this port when
        all workers are there: so the run has begun."""
        return self._cluster.has_addresses and not why_silent(self._cluster.workers[0])

    def _reset_session(self) -> None:
        """Sets the attributes that are about one session to their values at its beginning."""
        self.steps_begun = 0
        self.steps_made = 0
        self.stopped_by: typing.Optional[typing.Tuple[int, int]] = None
        self.is_over = False
        self.checks = False
        self._signal = 0  # the number of the signal that this worker got; 0 if none
        self._wants_check = False  # whether this worker asks for a comparison after its next step
        self._step_failed = False  # whether the newest step has not come to its end

    def ask(self, signal: int = 0, check: bool = False) -> None:
        """Asks something of all workers. A signal is sent when this worker next begins something,
        or leaves; a check is asked for when this worker begins its next step.

        Args:
          signal: the number of a signal, by which all stop after their next step; 0 for none.
          check: whether all are to compare their weights after their next step.
        """
        self._signal = signal or self._signal
        self._wants_check = check or self._wants_check

    def begin_session(self, value: typing.Any = ()) -> typing.Optional[int]:
        """Waits until the sessions of all workers begin, and compares the `value` that each worker
        passes; returns what `differing` returns."""
        self._session += 1
        self._reset_session()
        return self.differing(value)

    def differing(self, value: typing.Any) -> typing.Optional[int]:
        """Compares a value of JSON's types with the values that the other workers pass at the same
        place of the program; waits for these.

        Returns:
          The rank of the first worker whose value is not worker 0's value; None where all values
          are the same, or a worker has left.
        """
        self._asked = None  # equal values may be different in JSON, such as 0.0 and -0.0
        answer = self._ask(['value', value])
        if answer['type'] == 'differs':
            return answer.get('rank', 0)
        return None

    @contextlib.contextmanager
    def step(self, builds: typing.List[int]) -> typing.Iterator[None]:
        """The context of a step, which begins when all workers begin it; asynchronous workers do
        not wait.

        Args:
          builds: the positions of the builds whose train ops are run.

        Raises:
          tf.errors.OutOfRangeError: a worker makes no more steps.
          ClusterError: the workers begin other steps.
          WorkerLostError: a worker is gone.
        """
        begins_on_all_or_none = self._cluster.waits
        if begins_on_all_or_none:
            self._begin_together(builds)
        else:
            # This worker asks worker 0 nothing, so that no answer tells it of a loss.
            self.raise_if_lost()
        self.builds = builds
        self.steps_begun += 1
        self._in_step = True
        self._step_failed = True  # unless it comes to its end
        self.raised = None
        self._has_failed_on_all = False
        self.is_raised_by_other = False
        try:
            yield
            self.steps_made += 1
            self._step_failed = False
        except BaseException as error:
            self.raised = text_for_others(error)
            is_ring = self._cluster.kind == 'ring'
            self.is_raised_by_other = is_ring and _is_of_other_worker(error)
            # The end of the data mostly ends the training of all, and another worker says itself
            # why its step has failed: both are told if this one goes on.
            is_told_later = isinstance(error, tf.errors.OutOfRangeError) or self.is_raised_by_other
            if not is_told_later:
                self._tell_raised()
            raise
        finally:
            # This worker still waits for an end of the step if another one's error has ended it.
            self._in_step = self.is_raised_by_other

    def _tell_raised(self) -> None:
        """Tells worker 0 that a step has failed here, in which others may wait for ever."""
        step_needs_all = self._cluster.waits and not self._cluster.has_local_steps
        if step_needs_all:
            self._lines.send({'type': 'raised', 'why': self.raised})

    @contextlib.contextmanager
    def first_values(self) -> typing.Iterator[None]:
        """The context in which a session gets its first values together with all others, before its
        first step. It counts as a step, so that a worker that waits in it for another worker is
        told so."""
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False

    def _begin_together(self, builds: typing.List[int]) -> None:
        """Waits until all workers begin the next step, of these `builds`."""
        # The number of steps is compared, too. Workers that have made different numbers of steps
        # are at different places of the program: then the answer is `differs`. All have begun
        # equally many, so that equal numbers of failed ones are equal numbers of made ones. The
        # former is mostly 0, so that `begin` is the same bytes in each step.
        num_failed = self.steps_begun - self.steps_made
        answer = self._ask(['step', num_failed, builds], self._wants_check)
        if answer['type'] == 'over':
            raise tf.errors.OutOfRangeError(
                None, None, 'another worker has ended its steps, and this one is not made.')
        if answer['type'] == 'differs':
            raise ClusterError('the workers begin steps of other builds, or of other sessions: '
                               'make the same steps in the same order on all workers.')
        self.checks = answer.get('checks', False)
        self._wants_check = False

    def leave(self) -> None:
        """Says `left`: this session makes no more steps.

        This method says nothing after a step that has failed here alone, such as by the end of this
        worker's data. The others may hang in that step: then the coordinator has to find that this
        worker has ended too early, and `left` would tell the coordinator that all is in order.
        """
        if self.is_over:  # all have been told `over`, or that their newest step is the last one
            return
        step_needs_all = not self._cluster.has_local_steps
        others_may_hang = self._step_failed and step_needs_all
        if others_may_hang:
            return
        self.is_over = True
        self._lines.send({'type': 'left', 'session': self._session, 'signal': self._signal})

    def _ask(self, what: list, checks: bool = False) -> dict:
        """Asks worker 0 to begin something together with all workers, and waits for the answer.

        Args:
          what: what to begin, of JSON's types; the same on all workers.
          checks: whether all are to compare their weights after what they begin.

        Returns:
          The answer: a message of type `go`, `differs` or `over`.
        """
        if self._asks:
            # The answer to what was asked then would be taken for the answer to this.
            raise ClusterError('a wait for the other workers was interrupted, by Ctrl-C say: '
                               'leave towers.join, and start all again.')
        self._asks = True
        self._answer = None
        if self.raised is not None:
            self._in_step = False
            self._tell_raised()
        asked = [self._session, what, self._signal, checks]
        if asked != self._asked:  # a step mostly asks what the step before has asked
            self._asked = asked
            digest = digest_of([self._session, what])  # tells worker 0 whether all begin the same
            self._line = line_of({'type': 'begin', 'session': self._session, 'digest': digest,
                                  'signal': self._signal, 'checks': checks})
        self._lines.send_line(self._line)
        self._hear_until(lambda: self._answer is not None)
        self._asks = False
        # What all begin cannot be made without a worker that was lost at the same moment.
        is_made_by_all = self._answer is None or self._answer['type'] == 'go'
        if is_made_by_all:
            self.raise_if_lost()
        if self._answer is not None:
            return self._answer
        # The connection is closed, as at the end of `join`.
        raise ClusterError('the worker has left the cluster: make sessions and steps within '
                           'towers.join.')

    def error(self, seconds: float = 0.) -> typing.Optional[WorkerLostError]:
        """The error about the worker, or server, that is gone; None if none is gone. Waits up to
        `seconds` for a loss: it may become known later than the errors that it has caused. Does not
        wait when the newest step has failed on each worker, since none was lost then."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.lost is not None or self._has_failed_on_all, seconds)
        return None if self.lost is None else self._lost_error(self.lost)

    @property
    def is_lost_by_own_step(self) -> bool:
        """Whether this worker is lost to all since its step has failed."""
        is_own = self.lost is not None and self.lost.rank == self._cluster.rank
        return is_own and self.raised is not None

    def raise_if_lost(self) -> None:
        """Raises `WorkerLostError` if a worker, or a server, is gone."""
        if self.lost is not None:
            raise self._lost_error(self.lost)

    def _lost_error(self, lost: Lost) -> WorkerLostError:
        """The error about a worker, or a server, that is gone."""
        text = ''
        if lost.rank is not None:  # the words about a server name it
            text = self._cluster.who(lost.rank) + ' is lost: '
        text += lost.why.rstrip('.') + '.'
        if START_AGAIN not in text:  # another worker's error, which is the reason, may have it
            text += ' %s.' % START_AGAIN
        return WorkerLostError(text)

    def lose(self, rank: typing.Optional[int], why: str) -> None:
        """Notes that a worker, or a server, is gone; the first one counts.

        Args:
          rank: of the worker; None for a server.
          why: why it is gone.
        """
        with self._changed:
            if self.lost is not None or self._all_ended:
                return
            self.lost = Lost(rank, why)
            self._changed.notify_all()
        self._ends_pause.set()  # the thread tells of it

    def finish(self) -> None:
        """Says that this worker has ended in good order, and waits until worker 0 lets it go."""
        self._lines.send({'type': 'done'})
        self._hear_until(lambda: self._all_ended)

    def fail(self, why: str) -> None:
        """Says why this worker ends before the others."""
        self._lines.send({'type': 'failed', 'why': why})
        self.close()

    def close(self) -> None:
        """Closes the connection."""
        self._is_closed = True
        self._ends_pause.set()
        # The thread ends soon. But if a worker is lost, the thread is in `on_lost`, which may wait
        # for the end of the process, and so for the thread that calls this method.
        seconds_to_wait = 5. if self.lost is None else 0.
        self._thread.join(seconds_to_wait)
        with self._hears:
            self._lines.close()

    def _run(self) -> None:
        """The thread: shows worker 0 that this worker is alive, and hears worker 0 while the main
        thread does not; at last it tells of a loss."""
        sign_at = 0.
        while not (self._is_closed or self._all_ended or self.lost is not None):
            started = time.monotonic()
            if self._is_member and started >= sign_at:
                sign_at = started + seconds_between_signs(self.dead_after)
                self._lines.send({'type': 'alive', 'in_step': self._in_step})
            self._ends_pause.wait(self._pause)
            if self._hears.acquire(blocking=False):
                try:
                    self._hear(self._lines.has_data, 0.)
                finally:
                    self._hears.release()
            was_frozen = time.monotonic() - started > self.dead_after / 2.
            if was_frozen:  # this process itself, so that it has heard nobody
                self._heard_at = time.monotonic()
            if self._is_member:
                self._look_for_silence()
        if self.lost is not None and self._is_member:  # before, `meet` raises
            self._on_lost(self._lost_error(self.lost))

    def _hear_until(self, is_over: typing.Callable) -> None:
        """Hears worker 0 until something is over, or a worker or the connection is lost."""
        while not is_over() and self.lost is None and self._lines.is_open:
            with self._hears:
                self._hear(self._serve or self._lines.has_data, self._pause)

    def _hear(self, has_data: typing.Callable, seconds: float) -> None:
        """Takes what worker 0 says within some seconds. The caller holds `_hears`.

        Args:
          has_data: function of these seconds, which waits and tells whether worker 0 has said
            something: that of the `Lines`, or `Coordinator.serve`.
          seconds: how long to wait.
        """
        messages: typing.List[dict] = []
        try:
            if self._lines.is_open and has_data(seconds):
                messages = self._lines.take()
        except OSError:
            if not self._is_closed:  # else this side has closed the connection
                self.lose(0, WHY_CUT)
        except ClusterError as error:
            self.lose(0, 'it sent %s: another program may use its port' % error)
        for message in messages:
            self._heard_at = time.monotonic()
            self._take(message)

    def _look_for_silence(self) -> None:
        """Loses worker 0 after a long silence, and says that this worker waits for it after a
        shorter one."""
        now = time.monotonic()
        silence = now - self._heard_at
        # Worker 0 gives a sign of life at least each `FIRST_LINE_AFTER` seconds.
        is_late = silence > 1.5 * FIRST_LINE_AFTER
        if silence > self.dead_after:
            reason = WHY_SILENT % self.dead_after
            # If worker 0's process was frozen, it reads this message when it goes on.
            self._lines.send({'type': 'lost', 'rank': 0, 'why': reason})
            self.lose(0, reason)
        elif is_late and now > self._say_at:
            self._say_at = now + NEXT_LINE_AFTER
            self._say('waiting        for %s' % self._cluster.who(0))

    def _take(self, message: dict) -> None:
        """Does what a message of worker 0 says."""
        kind = message['type']
        rank = message.get('rank', 0)
        reason = message.get('why', '')
        if kind == 'compare':  # then this worker says hello again, with the result
            answer = _answer_to_signature(message.get('signature'), self._signature)
            self._lines.send(dict(self._hello, **answer))
        elif kind == 'waiting':
            self._awaited = reason
            self._say('waiting        %s' % reason)
        elif kind == 'gone':
            self._say('gone           %s, and the others train on without it: %s' % (
                self._cluster.who(rank), reason))
        elif kind in ('refused', 'lost'):
            self.lose(rank, reason)
        else:
            self._take_news(message)

    def _take_news(self, message: dict) -> None:
        """Notes what the main thread waits for."""
        kind = message['type']
        if kind == 'welcome':
            self._is_member = True
        elif kind == 'raised':
            with self._changed:
                self._has_failed_on_all = True
                self._changed.notify_all()
        elif kind == 'end':
            self._all_ended = True
        elif kind in ('go', 'over', 'differs'):
            self._take_answer(message)

    def _take_answer(self, message: dict) -> None:
        """Notes worker 0's answer to what this worker is about to begin."""
        self._answer = message
        if message['type'] == 'over' or message.get('is_last', False):
            self.is_over = True
        if 'signal' in message:
            self.stopped_by = (message.get('rank', 0), message['signal'])
