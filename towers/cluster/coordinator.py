"""Worker 0's side of the coordinator: it listens, and knows what becomes of each worker.

Every worker, worker 0 among them, has one connection with it and says what it does: it is here and
trains this (`hello`), it is about to begin a session or a step (`begin`), it got a signal (`stop`),
its session makes no more steps (`left`), its training is over (`done`), it ends by an error
(`failed`), it is alive.

All begin together, or none does: who says `begin` waits for the answer, which is `go` when all have
said it, `differs` where they would begin other things, and `over` when a worker has left. So
whoever stops, all have made the same steps. A worker that is lost is lost to all.

Asynchronous workers wait for worker 0's session, and for no step. They are told `over` when worker
0 has left; one that is lost is named, and the others train on.
"""

import hashlib
import json
import socket
import threading
import time

from towers.cluster.messages import Lines, readable
from towers.cluster.ports import AGAIN, FIRST
from towers.errors import ClusterError

_BEATS = 5  # messages that a worker sends within `dead_after`
_LINGER = 0.5  # seconds
_MOST_STRANGERS = 256  # connections of processes that have not said who they are
_CUT = 'its process has ended, or its machine cut the connection'
_ENDED_EARLY = ('it has ended its training, perhaps for lack of data, and others have not: see '
                'until_all_end')


def digest_of(value):
    """A short text that is another one for another value, of JSON's types."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode('utf-8')).hexdigest()


def beat(dead_after):
    """Seconds from one sign of life to the next."""
    return dead_after / _BEATS


def silence_of(dead_after):
    """Why a worker is lost that says nothing, in words."""
    return 'there is no sign of life from it for %.0f seconds' % dead_after


class _Worker:
    """What worker 0 knows of a worker.

    Attributes:
      rank: its number.
      lines: `Lines` of its connection; None before it has come.
      refused: why the last process that said that it was this worker was refused; or ''.
      heard: when it sent its last message.
      begins: what it waits to begin: `(session, step, digest)`, 0 as the step for the session
        itself; or None.
      since: when it began to wait, for others or for the step to begin; or when it began its step.
      told: when it was told last for whom it waits; or None.
      step, in_step: its newest step, and whether it is in it, as far as is known.
      left: the number of the newest of its sessions that makes no more steps.
      done: when it said that its training was over, or was lost to asynchronous others; or None.
    """

    def __init__(self, rank, lines=None):
        self.rank, self.lines, self.refused = rank, lines, ''
        self.heard = self.since = time.monotonic()
        self.begins, self.told, self.left, self.done = None, None, 0, None
        self.step, self.in_step = 0, False


class Coordinator:
    """A thread of worker 0 that answers all workers.

    Attributes:
      own_end: connected socket, by which worker 0 itself takes part.
    """

    def __init__(self, cluster, fingerprint, listener, dead_after, start_timeout, say):
        """
        Args:
          cluster: `Cluster`.
          fingerprint: of worker 0, see `signature.signature`.
          listener: socket that listens; it is closed when all workers are there.
          dead_after: seconds of silence after which a worker is lost.
          start_timeout: seconds that workers have to come.
          say: called with a line about a worker that is refused.
        """
        self._cluster, self._listener, self._say = cluster, listener, say
        self._fingerprint, self._digest = fingerprint, digest_of(fingerprint)
        self._dead_after = dead_after
        self._first = min(FIRST, start_timeout / 2., dead_after)
        self._workers = [_Worker(rank) for rank in range(cluster.num_workers)]
        self._is_complete = self._has_begun = self._checks = False
        self._stop = self._lost = None  # (rank, number of a signal); (rank, why)
        self._beat_at = 0.
        own, self.own_end = socket.socketpair()
        self._own = Lines(own)
        self._strangers = [self._own]
        self._thread = threading.Thread(target=self._run, daemon=True, name='towers-coordinator')
        self._thread.start()

    def missing(self):
        """`ClusterError` about the workers that have not come."""
        silent = [worker for worker in self._workers
                  if worker.lines is None and not worker.refused]
        clauses = []
        if silent:
            clauses.append('there is no word of %s within start_timeout: start %s, correct the '
                           'address, or give a longer one' % (
                               self._named(silent), 'it' if len(silent) == 1 else 'them'))
        clauses += ['worker %d was refused: %s' % (worker.rank, worker.refused.rstrip('.'))
                    for worker in self._workers if worker.lines is None and worker.refused][:8]
        return ClusterError('. '.join(clauses) + '.')

    def close(self):
        """Ends the thread when worker 0 has closed `own_end`, and all are told what it said."""
        self._thread.join(10.)

    # ---- who talks ------------------------------------------------------------------------------

    def _run(self):
        pause, closed = min(0.5, beat(self._dead_after)), None
        while self._is_heard(closed):
            looked_at = time.monotonic()
            if closed is None and self._own.socket.fileno() < 0:
                closed = looked_at
            for ready in readable(self._sockets(), pause):
                self._hear(ready)
            self._look(looked_at)
        for lines in [self._listener] + self._strangers + [
                worker.lines for worker in self._workers if worker.lines is not None]:
            lines.close()

    def _is_heard(self, closed):
        """Whether to go on: until worker 0 has closed its end, and the others have theirs. A
        connection that is closed with something unread is cut, and the last words are lost."""
        return closed is None or time.monotonic() - closed < _LINGER and any(
            worker.lines is not None and worker.lines.socket.fileno() >= 0
            for worker in self._workers[1:])

    def _sockets(self):
        known = [lines.socket for lines in self._strangers] + [
            worker.lines.socket for worker in self._workers if worker.lines is not None]
        return [each for each in [self._listener] + known if each.fileno() >= 0]

    def _hear(self, ready):
        if ready is self._listener:
            try:
                self._strangers.append(Lines(self._listener.accept()[0]))
            except OSError:  # it is gone already, or this process has too many connections
                time.sleep(0.01)
            if len(self._strangers) > _MOST_STRANGERS:
                self._drop(next(each for each in self._strangers if each is not self._own))
            return
        for lines in [each for each in self._strangers if each.socket is ready]:
            try:
                for message in lines.take():
                    if lines in self._strangers:
                        self._judge(lines, message)
            except (EOFError, OSError, ClusterError):  # no worker, but a stranger
                self._drop(lines)
            return
        for worker in self._workers:
            if worker.lines is not None and worker.lines.socket is ready:
                self._hear_worker(worker)

    def _hear_worker(self, worker):
        try:
            messages = worker.lines.take()
        except (EOFError, OSError):
            self._has_gone(worker, _CUT)
            return
        except ClusterError as error:
            self._has_gone(worker, 'it sent %s' % error)
            return
        worker.heard = time.monotonic()
        for message in messages:
            self._take(worker, message)

    def _has_gone(self, worker, why):
        worker.lines.close()
        if worker.rank and not self._is_complete:
            worker.lines = None  # it may come again
        elif worker.done is None:
            self._lose(worker, why)

    def _drop(self, lines):
        self._strangers.remove(lines)
        lines.close()

    # ---- who belongs to the cluster -------------------------------------------------------------

    def _judge(self, lines, message):
        """Answers a message of one that is no member yet."""
        rank, kind, count = message.get('rank'), message['type'], len(self._workers)
        if kind not in ('hello', 'compared') or rank is None:
            self._drop(lines)
            return
        why = message.get('why')
        if not (0 < rank < count or lines is self._own):
            why = 'its rank is %d, and the cluster has %d workers' % (rank, count)
        elif self._workers[rank].lines is not None:
            why = ('worker %d is here already: two processes have the same place in the cluster'
                   % rank)
        elif message.get('digest') != self._digest:
            # The worker finds the difference: no stranger makes worker 0 read much.
            if kind == 'hello':
                self._send(lines, {'type': 'compare', 'fingerprint': self._fingerprint})
                return
            why = 'it has compared something else'
        if why:
            self._say('refused        worker %d: %s' % (rank, why))
            if 0 < rank < count and self._workers[rank].lines is None:
                self._workers[rank].refused = why
            self._send(lines, {'type': 'refused', 'why': why})
            self._drop(lines)
            return
        self._strangers.remove(lines)
        self._workers[rank] = _Worker(rank, lines)
        if all(each.lines is not None for each in self._workers):
            self._listener.close()  # TensorFlow's server of worker 0 may need the port
            self._is_complete = True
            for each in self._workers:
                each.heard, each.told = time.monotonic(), None
                self._send(each.lines, {'type': 'welcome'})

    # ---- what workers say -----------------------------------------------------------------------

    def _take(self, worker, message):
        kind = message['type']
        if kind == 'alive':
            worker.in_step = message.get('in_step', False)
            if message.get('step', 0) != worker.step:
                worker.step, worker.told = message.get('step', 0), None
                worker.since = time.monotonic()
        elif kind == 'begin':
            worker.since, worker.told = time.monotonic(), None
            worker.step = message.get('step', 0)
            worker.begins = (message.get('session', 0), message.get('step', 0),
                             message.get('digest', ''))
            self._let_begin()
        elif kind == 'stop' and (self._cluster.synchronous or worker.rank == 0):
            self._stop = self._stop or (worker.rank, message.get('number', 0))
        elif kind == 'check':
            self._checks = True
        elif kind == 'left':
            worker.left = message.get('session', 0)
            self._let_begin()
        elif kind == 'done':
            self._note_end(worker)
            self._let_begin()
        elif kind == 'failed':
            self._lose(worker, 'it has ended: %s' % message.get('why', '').rstrip('.'))

    def _note_end(self, worker):
        worker.done, worker.in_step = worker.done or time.monotonic(), False
        if all(each.done is not None for each in self._workers):
            self._send_all({'type': 'end'})

    def _let_begin(self):
        """Answers those who wait to begin: all say so, or some worker never will."""
        stop = {}
        if self._stop is not None:
            stop = {'rank': self._stop[0], 'number': self._stop[1]}
        if not self._cluster.synchronous:
            self._let_begin_alone(stop)
            return
        left = max(each.left for each in self._workers)
        for worker in self._workers:
            if worker.begins is not None and worker.begins[0] <= left:
                worker.begins = None
                self._send(worker.lines, dict(stop, type='over'))
        waiting = [each for each in self._workers if each.begins is not None]
        ended = [each for each in self._workers if each.done is not None]
        if ended and waiting:
            self._lose(ended[0], _ENDED_EARLY)
        elif len(waiting) == len(self._workers):
            self._answer(stop)

    def _let_begin_alone(self, stop):
        """Lets asynchronous workers begin their sessions behind worker 0's, and end with it."""
        chief = self._workers[0]
        self._has_begun = self._has_begun or chief.begins is not None
        if chief.left or chief.done is not None:
            self._send_all(dict(stop, type='over'))
        for worker in self._workers if self._has_begun else ():
            if worker.begins is not None:
                worker.begins = None
                self._send(worker.lines, {'type': 'go'})

    def _answer(self, stop):
        """Lets all begin; unless they would begin something else each."""
        of_all = [each.begins for each in self._workers]
        others = [rank for rank, begins in enumerate(of_all) if begins != of_all[0]]
        if others:
            answer = {'type': 'differs', 'rank': others[0]}
        else:
            if of_all[0][1] == 0:  # a session
                self._stop, stop = None, {}
            answer = dict(stop, type='go', checks=self._checks, is_last=bool(stop))
            self._checks = False
        for worker in self._workers:
            worker.begins, worker.in_step = None, True
            self._send(worker.lines, answer)

    # ---- who is lost, and who is waited for -----------------------------------------------------

    def _look(self, looked_at):
        """Looks for silence, tells who waits for whom, and shows that worker 0 is alive."""
        now = time.monotonic()
        self._tell_who_is_waited_for(now)
        if not self._is_complete or self._lost is not None:
            return
        if now >= self._beat_at:
            self._beat_at = now + beat(self._dead_after)
            self._send_all({'type': 'alive'})
        if now - looked_at > self._dead_after / 2.:
            # It was frozen itself, and has heard nobody: it gives all another chance.
            for worker in self._workers:
                worker.heard = now
        done = [worker for worker in self._workers if worker.done is not None]
        if done and self._cluster.synchronous and any(
                worker.in_step and now - max(worker.since, done[0].done) > self._dead_after
                for worker in self._workers):
            self._lose(done[0], _ENDED_EARLY)  # in the step of the others
        for worker in self._workers:
            if worker.done is None and now - worker.heard > self._dead_after:
                self._lose(worker, silence_of(self._dead_after))

    def _tell_who_is_waited_for(self, now):
        together, silence = self._cluster.synchronous, max(FIRST, 1.5 * beat(self._dead_after))
        for worker in self._workers:
            if worker.lines is None or now - worker.since < self._first or (
                    worker.told is not None and now - worker.told < AGAIN):
                continue
            if not self._is_complete:
                waited = [each for each in self._workers if each.lines is None]
            elif worker.begins is not None:
                waited = [each for each in self._workers[:None if together else 1]
                          if each.begins is None]
            else:
                waited = [each for each in self._workers if together and worker.in_step
                          and each.done is None and now - each.heard > silence]
            if waited:
                worker.told = now
                self._send(worker.lines, {'type': 'waiting', 'why': self._named(waited)})

    def _lose(self, worker, why):
        if self._lost is not None or worker.done is not None and not self._cluster.synchronous:
            return
        if worker.rank and not self._cluster.synchronous:
            self._send_all({'type': 'gone', 'rank': worker.rank, 'why': why})
            self._note_end(worker)
            return
        self._lost = (worker.rank, why)
        for other in self._workers:
            if other is not worker and other.lines is not None:
                self._send(other.lines, {'type': 'lost', 'rank': worker.rank, 'why': why})
            elif other.lines is not None and worker.done is not None:
                self._send(other.lines, {'type': 'end'})  # it need not wait for the end of all

    def _named(self, workers):
        return ', '.join(self._cluster.who(worker.rank) + (
            ' (which was refused: it joins when it is started again as worker 0 is)'
            if worker.refused else '') for worker in workers)

    def _send_all(self, message):
        for worker in reversed(self._workers):  # worker 0 may end by it
            if worker.lines is not None:
                self._send(worker.lines, message)

    def _send(self, lines, message):
        try:
            lines.send(message)
        except OSError:
            pass  # `_hear` finds out what is wrong
