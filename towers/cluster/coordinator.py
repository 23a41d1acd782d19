"""Worker 0's side of the coordinator: it listens, and knows what becomes of each worker.

Every worker, worker 0 among them, has one connection with it and says what it does: it is here and
trains this (`hello`), it is about to begin a step (`begin`), it got a signal (`stop`), its session
makes no more steps (`left`), its training is over (`done`), it ends by an error (`failed`), it is
alive.

In a ring, and with Horovod, a step begins on all workers or on none: who says `begin` waits for
the answer, which is `go` when all have said it, and `over` when a worker has left. So whoever
stops, all have made the same steps. A worker that is lost is lost to all.

On parameter servers workers come and go, and ask for no step. Those that are gone are named to
those whose step waits, and whoever waits in vain is told to end.
"""

import hashlib
import json
import socket
import threading
import time

from towers.cluster.messages import Lines, readable
from towers.errors import ClusterError

FIRST, AGAIN = 5., 30.  # seconds to the first line about a wait, and from one line to the next
_BEATS = 5  # messages that a worker sends within `dead_after`
_LINGER = 0.5  # seconds
_MOST_STRANGERS = 256  # connections of processes that have not said who they are
_CUT = 'its process has ended, or its machine cut the connection'
_ENDED_EARLY = ('it has ended its training, perhaps for lack of data, and others have not: see '
                'until_all_end')


def digest_of(fingerprint):
    """A short text that is another one for another fingerprint."""
    text = json.dumps(fingerprint, sort_keys=True)
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
      gone: how its last process ended, if it did, and not in good order; else ''.
      begins: what it waits to begin: `(session, step, digest)`, 0 as the step for the session
        itself; or None.
      since: when it began to wait, for others or for the step to begin; or when it began its step.
      told: when it was told last for whom it waits; or None.
      step, in_step: its newest step, and whether it is in it, as far as is known.
      left: the number of the newest of its sessions that makes no more steps.
      done: when it said that its training was over; or None.
    """

    def __init__(self, rank, lines=None):
        self.rank, self.lines, self.refused, self.gone = rank, lines, '', ''
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
          listener: socket that listens; in a ring it is closed when all workers are there.
          dead_after: seconds of silence after which a worker is lost.
          start_timeout: seconds that workers have to come.
          say: called with a line about a worker that is refused.
        """
        self._cluster, self._listener, self._say = cluster, listener, say
        self._fingerprint, self._digest = fingerprint, digest_of(fingerprint)
        self._dead_after, self._start_timeout = dead_after, start_timeout
        self._first = min(FIRST, start_timeout / 2., dead_after)
        self._are_together = cluster.kind != 'ps'
        self._workers = [_Worker(rank) for rank in range(cluster.num_workers)]
        self._is_complete = self._checks = False
        self._stop = self._lost = None  # (rank, number of a signal); (rank, why)
        self._beat_at, self._begun = 0., time.monotonic()
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
        if worker.rank and not (self._is_complete and self._are_together):
            worker.lines, worker.in_step = None, False  # it may come again
            if worker.done is None and not self._are_together:
                worker.gone = worker.gone or why
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
        elif self._is_here(self._workers[rank]):
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
            if 0 < rank < count and not self._is_here(self._workers[rank]):
                self._workers[rank].refused = why
            self._send(lines, {'type': 'refused', 'why': why})
            self._drop(lines)
            return
        self._strangers.remove(lines)
        self._welcome(rank, lines)

    def _is_here(self, worker):
        """Whether a worker is; where they come and go, one whose machine is off is not."""
        return worker.lines is not None and (
            self._are_together or time.monotonic() - worker.heard < 2 * beat(self._dead_after))

    def _welcome(self, rank, lines):
        if self._workers[rank].lines is not None:
            self._workers[rank].lines.close()
        self._workers[rank] = _Worker(rank, lines)
        if not self._are_together:
            self._is_complete = True
            self._send(lines, {'type': 'welcome'})
        elif all(each.lines is not None for each in self._workers):
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
            if not self._are_together:
                self._send_all({'type': 'stop', 'rank': self._stop[0], 'number': self._stop[1]})
        elif kind == 'check':
            self._checks = True
        elif kind == 'left' and self._are_together:
            worker.left = message.get('session', 0)
            self._let_begin()
        elif kind in ('left', 'done'):
            self._has_ended(worker)
        elif kind == 'failed':
            worker.gone = 'it has ended: %s' % message.get('why', '').rstrip('.')
            if self._are_together or worker.rank == 0:
                self._lose(worker, worker.gone)

    def _has_ended(self, worker):
        """Notes that a worker's training is over, in good order."""
        worker.done, worker.in_step = worker.done or time.monotonic(), False
        if self._are_together:
            self._let_begin()
            if all(each.done is not None for each in self._workers):
                self._send_all({'type': 'end'})
        elif worker.rank == 0:
            self._send_all({'type': 'over'})

    def _let_begin(self):
        """Answers those who wait to begin a step: all say so, or some worker never will."""
        stop = {}
        if self._stop is not None:
            stop = {'rank': self._stop[0], 'number': self._stop[1]}
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

    def _answer(self, stop):
        """Lets all begin; unless they would begin something else each."""
        of_all = {each.begins for each in self._workers}
        answer = {'type': 'differs'}
        if len(of_all) == 1:
            [(_, step, _)] = of_all
            if step == 0:
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
        self._end_waits_in_vain(now)
        for worker in self._workers if self._are_together else ():
            if worker.done is None and now - worker.heard > self._dead_after:
                self._lose(worker, silence_of(self._dead_after))

    def _stops(self, workers):
        """Whether no step can be done without some workers."""
        needed = self._cluster.synchronous and bool(workers)
        return needed and (workers[0].rank == 0 or len(workers) > self._cluster.backup_workers)

    def _end_waits_in_vain(self, now):
        """Loses those without whom the step of others never ends."""
        done = [worker for worker in self._workers if worker.done is not None]
        missing = [worker for worker in self._workers if worker.lines is None and not worker.gone
                   and worker.done is None]
        waiting = [worker for worker in self._workers if worker.in_step]
        if self._stops(done) and any(
                now - max([worker.since] + [each.done for each in done]) > self._dead_after
                for worker in waiting):
            self._lose(done[0], _ENDED_EARLY)  # in a ring: in the step of the others
        elif self._stops(missing) and waiting and now - self._begun > self._start_timeout:
            self._lose(missing[0], 'there is no word of it within start_timeout%s' % (
                ', and it was refused: ' + missing[0].refused if missing[0].refused else
                ': start it, or give a longer one'))

    def _tell_who_is_waited_for(self, now):
        for worker in self._workers:
            takes = now - worker.since
            if worker.lines is None or takes < self._first or (
                    worker.told is not None and now - worker.told < AGAIN):
                continue
            if not self._is_complete:
                whom = self._named([each for each in self._workers if each.lines is None])
            elif self._are_together:
                silence = max(FIRST, 1.5 * beat(self._dead_after))
                whom = self._named([each for each in self._workers if (
                    each.begins is None if worker.begins is not None else
                    worker.in_step and each.done is None and now - each.heard > silence)])
            else:
                whom = worker.in_step and self._of_servers(takes, now)
            if whom:
                worker.told = now
                self._send(worker.lines, {'type': 'waiting', 'why': whom})

    def _of_servers(self, takes, now):
        """For whom a step on parameter servers waits, in words; '' where nothing is wrong."""
        clauses, who = [], self._cluster.who
        for worker in self._workers if self._cluster.synchronous else ():
            if worker.refused:
                clauses.append('%s, which was refused: %s. It joins when it is started as worker 0 '
                               'is' % (who(worker.rank), worker.refused.rstrip('.')))
            elif worker.gone:
                clauses.append('%s: %s. Start it again, and the run goes on' % (
                    who(worker.rank), worker.gone))
            elif worker.lines is None and worker.done is None:
                clauses.append('%s, start_timeout is %.3g s' % (
                    who(worker.rank), self._start_timeout))
            elif worker.done is None and now - worker.heard > self._dead_after:
                clauses.append('%s: %s' % (who(worker.rank), silence_of(self._dead_after)))
        if not clauses and takes > self._dead_after and self._cluster.synchronous:
            return 'a step of %g seconds; all workers are alive, so one of them is slow' % takes
        return '; '.join(clauses)

    def _lose(self, worker, why):
        if self._lost is not None:
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
