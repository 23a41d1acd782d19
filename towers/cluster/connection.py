"""A worker's side of the coordinator: its connection with worker 0, see `Coordinator`."""

import threading
import time

import tensorflow.compat.v1 as tf

from towers.cluster.coordinator import beat, digest_of, silence_of
from towers.cluster.signature import difference
from towers.cluster.messages import MOST_OF_WORKER_0, OF_WORKER_0, Lines, readable
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
    lines = Lines(connected, MOST_OF_WORKER_0)
    timeout = deadline - time.monotonic()
    try:
        lines.send({'type': 'hello', 'rank': cluster.rank, 'digest': digest_of(fingerprint)})
        answer = _answer(cluster, lines, deadline)
        while answer['type'] != 'welcome':
            if answer['type'] == 'compare':
                lines.send(_compared(cluster.rank, answer.get('fingerprint'), fingerprint))
            elif answer['type'] == 'waiting':
                say('waiting        for %s, start_timeout is %.3g s' % (
                    answer.get('why', ''), timeout))
            elif answer['type'] == 'refused':
                raise ClusterError('%s refuses %s: %s.' % (
                    cluster.who(0), cluster.who(cluster.rank),
                    answer.get('why', '').rstrip('.')))
            elif answer['type'] == 'lost':
                raise ClusterError('%s has ended, or gave up waiting for others: see what it says.'
                                   % cluster.who(0))
            answer = _answer(cluster, lines, deadline)
        return lines
    except (EOFError, OSError):
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


def _compared(rank, theirs, own):
    """The answer to worker 0's fingerprint."""
    try:
        why = difference(theirs, own)
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError):
        why = 'worker 0 sends no fingerprint of a worker'
    return {'type': 'compared', 'rank': rank, 'digest': digest_of(theirs), 'why': why or ''}


class Connection:
    """A thread that hears what worker 0 says, and the words of this worker to it.

    Attributes:
      dead_after: seconds of silence after which worker 0 is gone.
      lost: None, or `(rank, why)` of the worker that is gone.
      stopped_by: None, or `(rank, number)` of the worker that got a signal, and the signal's.
      is_over: whether this session makes no step after the one that it has begun last.
      checks: whether all workers compare their weights after that step.
      steps, made: how many steps this session has begun, and made.
      since: when the newest session or step began, or ended.
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
        self.lost = self.stopped_by = None
        self.is_over = self.checks = False
        self.steps, self.made, self.builds, self.since = 0, 0, '', time.monotonic()
        self._cluster, self._lines, self._say = cluster, lines, say
        self.dead_after, self._on_lost = dead_after, on_lost
        self._session, self._has_begun, self._in_step = 0, False, False
        self._answer = None  # of worker 0, to what this worker is about to begin
        self._differs = 0  # the rank of the worker that would begin something else
        self._heard, self._ended, self._closed = time.monotonic(), False, threading.Event()
        self._changed, self._sends = threading.Condition(), threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True, name='towers-connection')
        self._thread.start()

    # ---- a session, and its steps ---------------------------------------------------------------

    def begin_session(self, value=()):
        """Waits until the sessions of all workers begin; compares a value as `differing`."""
        self._session += 1
        self.steps, self.made, self.stopped_by, self.is_over = 0, 0, None, False
        worker = self.differing(value)
        self._has_begun, self.since = worker is None, time.monotonic()
        return worker

    def differing(self, value):
        """Compares a value between two steps, which all workers do at the same place.

        Args:
          value: of JSON's types.

        Returns:
          None, or the rank of the first worker whose value is not that of worker 0.

        Raises:
          WorkerLostError: a worker is gone.
        """
        answer, self._in_step = self._ask(digest_of(value)), False
        return self._differs if answer == 'differs' else None

    def begin_step(self, builds):
        """Waits until all workers begin this step.

        Args:
          builds: the numbers of its builds, in words.

        Raises:
          tf.errors.OutOfRangeError: some worker makes no more steps, and nobody makes this one.
          ClusterError: the workers begin other steps.
          WorkerLostError: a worker is gone.
        """
        answer = 'over'
        if self._has_begun:
            self.steps, self._in_step = self.steps + 1, True
            answer = self._ask(builds) if self._cluster.waits else 'go'
        if answer == 'over':
            self._has_begun = False
            raise tf.errors.OutOfRangeError(
                None, None, 'another worker has ended its steps, and this one is not made.')
        if answer == 'differs':
            raise ClusterError('the workers begin steps of other builds, or of other sessions: '
                               'make the same steps in the same order on all workers.')
        self.builds, self.since = builds, time.monotonic()

    def step_ended(self):
        """Notes that the step has been made."""
        self.made, self._in_step, self.since = self.made + 1, False, time.monotonic()

    def leave(self):
        """Says that this session makes no more steps.

        Not after a step that has failed here, such as by the end of this worker's data: the others
        may be in it, and only the end of their own tells that it was no loss.
        """
        self._has_begun = False
        if not self._in_step and not self.is_over:
            self.is_over = True
            self._send({'type': 'left', 'session': self._session})

    def stop(self, number):
        """Says that this worker got a signal; all stop after the step that they begin next."""
        self._send({'type': 'stop', 'number': number})

    def ask_for_check(self):
        """Has all workers compare their weights after the step that they begin next."""
        self._send({'type': 'check'})

    def _ask(self, digest):
        """Says that this worker is about to begin something; waits for the type of the answer."""
        with self._changed:
            self._answer = None
        self._send({'type': 'begin', 'session': self._session, 'step': self.steps,
                    'digest': digest})
        with self._changed:
            while self._answer is None and self.lost is None:
                self._changed.wait(1.)
        if self._answer is None:
            raise self.error()
        return self._answer

    # ---- the end --------------------------------------------------------------------------------

    def error(self, seconds=0.):
        """`WorkerLostError` about the worker that is gone, or None.

        Args:
          seconds: how long to wait until a loss is known.
        """
        deadline = time.monotonic() + seconds
        with self._changed:
            while self.lost is None and time.monotonic() < deadline:
                self._changed.wait(deadline - time.monotonic())
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
            while not self._ended and self.lost is None:
                self._changed.wait(1.)
        self.close()

    def fail(self, why):
        """Says why this worker ends before the others."""
        self._send({'type': 'failed', 'why': why})
        self.close()

    def close(self):
        """Closes the connection."""
        with self._changed:
            self._closed.set()
            self._changed.notify_all()
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
                self._send({'type': 'alive', 'step': self.steps, 'in_step': self._in_step})
            try:
                if readable([self._lines.socket], min(pause, 0.2)):
                    for message in self._lines.take():
                        self._heard = time.monotonic()
                        self._take(message)
            except (EOFError, OSError):
                if not self._closed.is_set():
                    self._lose(0, 'its process has ended, or its machine cut the connection')
            except ClusterError as error:
                self._lose(0, 'it sent %s' % error)
            if time.monotonic() - now > self.dead_after / 2.:
                self._heard = time.monotonic()  # this process was frozen itself
            if time.monotonic() - self._heard > self.dead_after:
                self._lose(0, silence_of(self.dead_after))

    def _take(self, message):
        kind = message['type']
        if kind in ('go', 'over', 'differs'):
            with self._changed:
                if message.get('is_last') or kind == 'over':
                    self.is_over = True
                if 'number' in message:
                    self.stopped_by = (message.get('rank', 0), message['number'])
                self.checks, self._in_step = message.get('checks', False), kind == 'go'
                self._answer, self._differs = kind, message.get('rank', 0)
                self._changed.notify_all()
        elif kind == 'waiting':
            self._say('waiting        for %s' % message.get('why', ''))
        elif kind == 'gone':
            self._say('gone           worker %d, and the others train on without it: %s' % (
                message.get('rank', 0), message.get('why', '')))
        elif kind == 'lost':
            self._lose(message.get('rank', 0), message.get('why', ''))
        elif kind == 'end':
            with self._changed:
                self._ended = True
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
            try:
                self._lines.send(message)
            except OSError:
                pass  # the thread finds out what is wrong
