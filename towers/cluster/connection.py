"""A worker's side of the coordinator: its connection with worker 0, see `Coordinator`."""

import threading
import time

import tensorflow.compat.v1 as tf

from towers.cluster.coordinator import CUT, SILENT, beat
from towers.cluster.signature import difference
from towers.cluster.sockets import MOST_OF_WORKER_0, Lines, digest_of, readable
from towers.errors import ClusterError, WorkerLostError


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
      dead_after: as for `join`.
      lost: None, or `(rank, why)` of the worker that is gone.
      stopped_by: None, or `(rank, number)` of the worker that got a signal, and the signal's.
      is_over: whether this session makes no step after the one that it has begun last.
      checks: whether all workers compare their weights after that step.
      made: how many steps this session has made.
      builds: the numbers of the builds of the newest one, in words: `'0'`, `'0 1'`.
    """

    def __init__(self, cluster, fingerprint, connected, dead_after, say, on_lost):
        """
        Args:
          fingerprint: of this worker, see `signature.signature`.
          connected: socket that is connected with worker 0.
          cluster, dead_after, say, on_lost: as for `join`; the thread calls the last two.
        """
        self.lost, self.dead_after, self.builds = None, dead_after, ''
        self._cluster, self._fingerprint = cluster, fingerprint
        self._lines, self._say, self._on_lost = Lines(connected, MOST_OF_WORKER_0), say, on_lost
        self._hello = {'type': 'hello', 'rank': cluster.rank, 'digest': digest_of(fingerprint)}
        self._is_member = False
        self._session, self._in_step, self._answer = 0, False, None
        self._begin_steps()
        self._heard, self._ended, self._closed = time.monotonic(), False, threading.Event()
        self._changed, self._sends = threading.Condition(), threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True, name='towers-connection')
        self._thread.start()

    def meet(self, deadline):
        """Tells worker 0 who this worker is; waits until all are there and train the same.

        Raises:
          ClusterError: this worker is refused, or not all are there at the deadline.
        """
        self._send(self._hello)
        with self._changed:
            self._changed.wait_for(lambda: self._is_member or self.lost is not None,
                                   max(0., deadline - time.monotonic()))
        if self._is_member:
            return
        self.close()
        why = 'it waits for other workers, or is frozen, and start_timeout is over'
        raise ClusterError('%s does not take %s in: %s.' % (
            self._cluster.who(0), self._cluster.who(self._cluster.rank),
            why if self.lost is None else self.lost[1].rstrip('.')))

    # ---- a session, and its steps ---------------------------------------------------------------

    def _begin_steps(self):
        self.made, self.stopped_by, self.is_over, self.checks = 0, None, False, False
        self._signal, self._wants_check, self._has_failed = 0, False, False

    def begin_session(self, value=()):
        """Waits until the sessions of all workers begin; compares a value as `differing`."""
        self._session += 1
        self._begin_steps()
        return self.differing(value)

    def differing(self, value):
        """Compares a value of JSON's types between two steps, as all workers do at that place;
        returns None, or the rank of the first worker whose value is not that of worker 0."""
        answer = self._ask(['value', value])
        return answer.get('rank', 0) if answer['type'] == 'differs' else None

    def begin_step(self, builds):
        """Waits until all workers begin this step of some builds.

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

    def step_ended(self, is_made=True):
        """Notes that the step has been made, or has failed."""
        self.made, self._in_step, self._has_failed = self.made + is_made, False, not is_made

    def leave(self):
        """Says that this session makes no more steps.

        Not after a step that has failed here, such as by the end of this worker's data: the others
        may be in it, and only the end of their own tells that it was no loss.
        """
        if not self._has_failed and not self.is_over:
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
        """`WorkerLostError` about the worker that is gone, or None; waits some seconds for it."""
        with self._changed:
            self._changed.wait_for(lambda: self.lost is not None, seconds)
        if self.lost is None:
            return None
        rank, why = self.lost
        return WorkerLostError(
            '%s is lost: %s. The others cannot go on without it: start all workers again, and they '
            'go on from the last checkpoint.' % (self._cluster.who(rank), why.rstrip('.')))

    def finish(self):
        """Says that this worker has ended in good order, and waits until all have; an asynchronous
        one that is not the chief does not wait."""
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
            if self._is_member and now >= beat_at:
                beat_at = now + pause
                self._send({'type': 'alive', 'in_step': self._in_step})
            try:
                if readable([self._lines.socket], min(pause, 0.2)):
                    for message in self._lines.take():
                        self._heard = time.monotonic()
                        self._take(message)
            except OSError:
                if not self._closed.is_set():
                    self._lose(0, CUT if self._is_member else CUT + ': see what it says')
            except ClusterError as error:
                self._lose(0, 'it sent %s: another program may use its port' % error)
            if time.monotonic() - now > self.dead_after / 2.:
                self._heard = time.monotonic()  # this process was frozen itself
            if self._is_member and time.monotonic() - self._heard > self.dead_after:
                self._lose(0, SILENT % self.dead_after)

    def _take(self, message):
        kind, rank, why = message['type'], message.get('rank', 0), message.get('why', '')
        if kind == 'compare':
            self._send(dict(self._hello, **_compared(message.get('fingerprint'),
                                                     self._fingerprint)))
        elif kind == 'waiting':
            self._say('waiting        %s' % why)
        elif kind == 'gone':
            self._say('gone           worker %d, and the others train on without it: %s' % (
                rank, why))
        elif kind in ('refused', 'lost'):
            self._lose(rank, why)
        with self._changed:
            self._is_member = self._is_member or kind == 'welcome'
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
        with self._changed:
            self.lost = (rank, why)
            self._changed.notify_all()
        if self._is_member:
            self._on_lost(self.error())

    def _send(self, message):
        with self._sends:
            self._lines.send(message)
