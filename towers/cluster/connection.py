"""A worker's side of the coordinator: its connection with worker 0, see `Coordinator`."""

import threading
import time

import tensorflow.compat.v1 as tf

from towers.cluster.coordinator import CUT, beat, silence_of
from towers.cluster.signature import difference
from towers.cluster.sockets import MOST_OF_WORKER_0, OF_WORKER_0, Lines, digest_of, readable
from towers.errors import ClusterError, WorkerLostError


def meet(cluster, fingerprint, connected, deadline, say):
    """Tells worker 0 who this worker is; waits until all are there and train the same.

    Args:
      cluster: `Cluster`.
      fingerprint: of this worker, see `signature.signature`.
      connected: socket that is connected with worker 0.
      deadline: `time.monotonic()` at which to give up.
      say: called with lines about who is waited for.

    Returns:
      `Lines` with worker 0.

    Raises:
      ClusterError: this worker is refused, or worker 0 does not answer in time.
    """
    lines, timeout = Lines(connected, MOST_OF_WORKER_0), deadline - time.monotonic()
    hello = {'type': 'hello', 'rank': cluster.rank, 'digest': digest_of(fingerprint)}
    try:
        lines.send(hello)
        while True:
            answer = _answer(cluster, lines, deadline)
            kind, why = answer['type'], answer.get('why', '').rstrip('.')
            if kind == 'welcome':
                return lines
            if kind == 'compare':
                lines.send(dict(hello, **_compared(answer.get('fingerprint'), fingerprint)))
            elif kind == 'waiting':
                say('waiting        %s, start_timeout is %.3g s' % (why, timeout))
            elif kind == 'refused':
                raise ClusterError('%s refuses %s: %s.' % (
                    cluster.who(0), cluster.who(cluster.rank), why))
    except OSError:
        lines.close()
        raise ClusterError('%s has closed the connection: it is at work already, or was ended: see '
                           'what it says.' % cluster.who(0)) from None
    except ClusterError:
        lines.close()
        raise


def _answer(cluster, lines, deadline):
    """What worker 0 says next."""
    try:
        answer = lines.receive(deadline)
        if answer is not None and answer['type'] not in OF_WORKER_0:
            raise ClusterError('a message of a worker')
    except ClusterError as error:
        raise ClusterError('what answers at the address of %s is no worker: %s. Another program '
                           'uses the port, or the address is wrong.' % (
                               cluster.who(0), error)) from None
    if answer is None:
        raise ClusterError('%s waits for other workers, or is frozen, and start_timeout is over: '
                           'see what it says, start them, or give a longer one.' % cluster.who(0))
    return answer


def _compared(theirs, own):
    """What to say to worker 0's fingerprint: its digest, and what this worker's differs by."""
    try:
        why = difference(theirs, own)
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError):
        why = 'worker 0 sends no fingerprint of a worker'
    return {'digest': digest_of(theirs), 'why': why or ''}


class Connection:
    """A thread that hears what worker 0 says, and the words of this worker to it.

    Attributes:
      dead_after: seconds of silence after which worker 0 is gone.
      lost: None, or `(rank, why)` of the worker that is gone.
      stopped_by: None, or `(rank, number)` of the worker that got a signal, and the signal's.
      is_over: whether this session makes no step after the one that it has begun last.
      checks: whether all workers compare their weights after that step.
      made: how many steps this session has made.
      builds: the numbers of the builds of the newest one, in words: `'0'`, `'0 1'`.
    """

    def __init__(self, cluster, lines, dead_after, say, on_lost):
        """
        Args:
          cluster: `Cluster`.
          lines: `Lines`, see `meet`.
          dead_after: seconds of silence after which worker 0 is gone.
          say: called with lines about who is waited for, in the thread.
          on_lost: called once with a `WorkerLostError`, in the thread, when a worker is lost.
        """
        self.lost, self.dead_after, self.builds = None, dead_after, ''
        self._cluster, self._lines, self._say, self._on_lost = cluster, lines, say, on_lost
        self._session, self._in_step, self._answer = 0, False, None
        self._begin_steps()
        self._heard, self._ended, self._closed = time.monotonic(), False, threading.Event()
        self._changed, self._sends = threading.Condition(), threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True, name='towers-connection')
        self._thread.start()

    # ---- a session, and its steps ---------------------------------------------------------------

    def _begin_steps(self):
        self.made, self.stopped_by, self.is_over, self.checks = 0, None, False, False
        self._signal, self._wants_check = 0, False

    def begin_session(self, value=()):
        """Waits until the sessions of all workers begin; compares a value as `differing`."""
        self._session += 1
        self._begin_steps()
        return self.differing(value)

    def differing(self, value):
        """Compares a value between two steps, which all workers do at the same place.

        Args:
          value: of JSON's types.

        Returns:
          None, or the rank of the first worker whose value is not that of worker 0.

        Raises:
          WorkerLostError: a worker is gone.
        """
        answer = self._ask(['value', value])
        return answer.get('rank', 0) if answer['type'] == 'differs' else None

    def begin_step(self, builds):
        """Waits until all workers begin this step.

        Args:
          builds: the numbers of its builds, in words.

        Raises:
          tf.errors.OutOfRangeError: some worker makes no more steps, and nobody makes this one.
          ClusterError: the workers begin other steps.
          WorkerLostError: a worker is gone.
        """
        if self._cluster.waits:
            answer = self._ask(['step', self.made, builds], checks=self._wants_check)
            if answer['type'] == 'over':
                raise tf.errors.OutOfRangeError(
                    None, None, 'another worker has ended its steps, and this one is not made.')
            if answer['type'] == 'differs':
                raise ClusterError('the workers begin steps of other builds, or of other sessions: '
                                   'make the same steps in the same order on all workers.')
            self.checks, self._wants_check = answer.get('checks', False), False
        self.builds, self._in_step = builds, True

    def step_ended(self):
        """Notes that the step has been made."""
        self.made, self._in_step = self.made + 1, False

    def leave(self):
        """Says that this session makes no more steps.

        Not after a step that has failed here, such as by the end of this worker's data: the others
        may be in it, and only the end of their own tells that it was no loss.
        """
        if not self._in_step and not self.is_over:
            self.is_over = True
            self._send({'type': 'left', 'session': self._session, 'number': self._signal})

    def stop(self, number):
        """Notes that this worker got a signal: all stop after the step that they begin next."""
        self._signal = number

    def ask_for_check(self):
        """Has all workers compare their weights after the step that they begin next."""
        self._wants_check = True

    def _ask(self, what, **fields):
        """Worker 0's answer to what this worker is about to begin."""
        with self._changed:
            self._answer = None
        self._send(dict(fields, type='begin', session=self._session, number=self._signal,
                        digest=digest_of([self._session, what])))
        with self._changed:
            self._changed.wait_for(lambda: self._answer is not None or self.lost is not None)
        if self._answer is None:
            raise self.error()
        return self._answer

    # ---- the end --------------------------------------------------------------------------------

    def error(self, seconds=0.):
        """`WorkerLostError` about the worker that is gone, or None.

        Args:
          seconds: how long to wait until a loss is known.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.lost is not None, seconds)
        if self.lost is None:
            return None
        rank, why = self.lost
        return WorkerLostError(
            '%s is lost: %s. The others cannot go on without it: start all workers again, and they '
            'go on from the last checkpoint.' % (self._cluster.who(rank), why.rstrip('.')))

    def finish(self):
        """Says that this worker has ended in good order, and waits until all have."""
        self._send({'type': 'done'})
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self.lost is not None)
        self.close()

    def fail(self, why):
        """Says why this worker ends before the others."""
        self._send({'type': 'failed', 'why': why})
        self.close()

    def close(self):
        """Closes the connection."""
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(5.)
        self._lines.close()

    # ---- the thread -----------------------------------------------------------------------------

    def _run(self):
        pause, beat_at = beat(self.dead_after), 0.
        while not (self._closed.is_set() or self._ended or self.lost is not None):
            now = time.monotonic()
            if now >= beat_at:
                beat_at = now + pause
                self._send({'type': 'alive', 'in_step': self._in_step})
            try:
                if readable([self._lines.socket], min(pause, 0.2)):
                    for message in self._lines.take():
                        self._heard = time.monotonic()
                        self._take(message)
            except OSError:
                if not self._closed.is_set():
                    self._lose(0, CUT)
            except ClusterError as error:
                self._lose(0, 'it sent %s' % error)
            if time.monotonic() - now > self.dead_after / 2.:
                self._heard = time.monotonic()  # this process was frozen itself
            if time.monotonic() - self._heard > self.dead_after:
                self._lose(0, silence_of(self.dead_after))

    def _take(self, message):
        kind, rank, why = message['type'], message.get('rank', 0), message.get('why', '')
        if kind == 'waiting':
            self._say('waiting        %s' % why)
        elif kind == 'gone':
            self._say('gone           worker %d, and the others train on without it: %s' % (
                rank, why))
        elif kind == 'lost':
            self._lose(rank, why)
        with self._changed:
            if kind in ('go', 'over', 'differs'):
                self._answer = message
                self.is_over = self.is_over or kind == 'over' or message.get('is_last', False)
                if 'number' in message:
                    self.stopped_by = (rank, message['number'])
            self._ended = self._ended or kind == 'end'
            self._changed.notify_all()

    def _lose(self, rank, why):
        if self.lost is not None or self._ended:
            return
        if not 0 <= rank < self._cluster.num_workers:
            rank, why = 0, 'it sent the number %d of a worker' % rank
        with self._changed:
            self.lost = (rank, why)
            self._changed.notify_all()
        self._on_lost(self.error())

    def _send(self, message):
        with self._sends:
            self._lines.send(message)
