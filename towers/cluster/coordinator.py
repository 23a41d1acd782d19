"""Worker 0's side of the coordinator: it listens, and knows what becomes of each worker.

Every worker, worker 0 among them, says over a `Connection`: it is here and trains this (`hello`),
it is about to begin something (`begin`: a session, a step, or a comparison between two steps), its
session makes no more steps (`left`), its training is over (`done`), it ends by an error (`failed`),
it is alive.

All begin together, or none does: the answer to `begin` is `go` when all have said it, `differs`
where they would begin other things, and `over` when a worker has left the session. A signal comes
with `begin`, and `go` says to all that this step is the last one. A worker that is lost is lost to
all.

Asynchronous workers wait for worker 0's session, and for no step. They are told `over` when worker
0 has left; one that is lost is named, and the others train on.
"""

import socket
import threading
import time

from towers.cluster.addresses import AGAIN, FIRST
from towers.cluster.connection import CUT, SILENT, Lines, digest_of, pause_of, readable
from towers.errors import ClusterError

_ENDED_EARLY = 'it has ended its training, perhaps for lack of data, others not: see until_all_end'


class _Worker:
    """What worker 0 knows of a worker: what the worker has said itself."""

    def __init__(self, rank, lines=None):
        self.rank, self.lines = rank, lines  # of its connection; None before it has come
        self.has_come = lines is not None  # though it may have gone again
        self.session = self.left = 0  # its newest one, and the newest that makes no more steps
        self.begins = None  # the digest of what it waits to begin
        self.checks = False  # whether it asks that all compare their weights after that
        self.signal = 0  # the number of the signal that it got in this session
        self.in_step = False  # when it said last that it is alive
        self.done = None  # when it said that its training was over
        self.begin_to_wait()

    def begin_to_wait(self):
        """It is heard of, and is to be told after a while for whom it waits."""
        self.heard = time.monotonic()
        self.tell_at = self.heard + FIRST

    def take(self, message):
        """Notes what the worker says."""
        kind, self.heard = message['type'], time.monotonic()
        if kind == 'alive':
            self.in_step = message.get('in_step', False)
        elif kind == 'begin':
            self.begin_to_wait()
            self.session, self.begins = message.get('session', 0), message.get('digest', '')
            self.checks, self.signal = message.get('checks', False), message.get('signal', 0)
        elif kind == 'left':
            self.left, self.signal = message.get('session', 0), message.get('signal', 0)
        elif kind == 'done':
            self.retire()

    def retire(self):
        """It makes no more steps, or is lost to others that go on without it."""
        self.begin_to_wait()
        self.done, self.in_step = self.heard, False

    def answer(self, message):
        """Answers `begin`."""
        self.begins = None
        self.lines.send(message)


class Coordinator:
    """A thread of worker 0 that answers all workers; worker 0 itself by the socket `own_end`."""

    def __init__(self, cluster, signature, listener, dead_after, say):
        """`signature` is worker 0's; `listener` is closed when all are there; see also `join`."""
        self._cluster, self._listener, self._say = cluster, listener, say
        self._signature, self._digest = signature, digest_of(signature)
        self._dead_after, self._beat = dead_after, pause_of(dead_after)
        self._workers = [_Worker(rank) for rank in range(cluster.num_workers)]
        self._is_complete, self._is_lost, self._beat_at = False, False, 0.
        self._began = self._lasted = 0.  # when all began something last; how long the last one took
        own, self.own_end = socket.socketpair()
        self._own = Lines(own)
        self._connections = [self._own]
        self._thread = threading.Thread(target=self._run, daemon=True, name='towers-coordinator')
        self._thread.start()

    def missing(self):
        """`ClusterError` about the workers that have not come."""
        gone = [each for each in self._workers[1:] if each.lines is None]
        return ClusterError(
            '%s did not join within start_timeout: start each one, correct the address, see why '
            'it was refused, or give a longer one.' % (self._named(
                [each for each in gone if not each.has_come] or gone) or 'the last worker'))

    def close(self):
        """Ends the thread when worker 0 has closed `own_end`, and all are told what it said."""
        self._thread.join(10.)

    def _run(self):
        """Hears all until worker 0 has closed its end, and the others theirs: closing a connection
        with something unread would lose the last words."""
        pause, until = min(0.5, self._beat), float('inf')
        while self._connections and time.monotonic() < until:
            looked_at = time.monotonic()
            if not self._own.is_open:
                until = min(until, looked_at + 0.5)
            by_socket = {each.socket: each for each in self._connections}
            for ready in readable(list(by_socket) + (
                    [] if self._is_complete else [self._listener]), pause):
                if ready in by_socket:
                    self._hear(by_socket[ready])
                    continue
                try:
                    self._connections.append(Lines(self._listener.accept()[0]))
                except OSError:  # it is gone already, or this process has too many connections
                    time.sleep(0.01)
            self._look(looked_at)
            self._connections = [each for each in self._connections if each.is_open]
        for each in [self._listener] + self._connections:
            each.close()

    def _hear(self, lines):
        """Takes what has come over a connection, of a worker or of a stranger."""
        messages, why = [], ''
        try:
            messages = lines.take()
        except OSError:
            why = CUT
        except ClusterError as error:
            why = 'it sent %s' % error
        for message in messages:
            worker = next((each for each in self._workers if each.lines is lines), None)
            if worker is not None:
                self._take(worker, message)
            elif lines.is_open:
                self._judge(lines, message)
        if why:
            lines.close()
            for worker in [each for each in self._workers if each.lines is lines]:
                if not self._is_complete:
                    worker.lines = None  # it may come again
                elif worker.done is None:
                    self._lose(worker, why)

    def _judge(self, lines, message):
        """Answers a message of one that is no member yet."""
        rank, why, count = message.get('rank'), message.get('why'), len(self._workers)
        has_signature, differs = message.get('digest') == self._digest, False
        if message['type'] != 'hello' or rank is None:
            lines.close()
            return
        if not (0 < rank < count or lines is self._own):
            why = 'its rank is %d, and the cluster has %d workers' % (rank, count)
        elif self._workers[rank].lines is not None:
            why = ('worker %d is here already: two processes have the same place in the cluster'
                   % rank)
        elif why:
            differs = has_signature  # this one's, with which it has compared its own
        elif not has_signature:
            # The worker finds the difference: no stranger makes worker 0 read much.
            lines.send({'type': 'compare', 'signature': self._signature})
            return
        if why:
            self._say('refused        %s: %s' % (
                self._cluster.who(rank) if rank < count else 'worker %d' % rank, why))
            refused = {'type': 'refused', 'rank': rank, 'why': why}
            lines.send(refused)
            lines.close()
            if differs:  # no run begins
                self._send_all(refused)
            return
        self._workers[rank] = _Worker(rank, lines)
        if all(each.lines is not None for each in self._workers):
            self._is_complete = True
            self._listener.close()  # TensorFlow's server of worker 0 may need the port
            for each in self._workers:
                each.begin_to_wait()
                each.lines.send({'type': 'welcome'})

    def _take(self, worker, message):
        worker.take(message)
        if message['type'] == 'lost':  # worker 0 itself, which was frozen
            self._own.send(message)
        elif message['type'] == 'failed':
            self._lose(worker, 'it has ended: %s' % message.get('why', '').rstrip('.'))
        elif message['type'] != 'alive':
            self._let_begin()

    def _let_begin(self):
        """Answers those who wait to begin: all say so, or some worker never will."""
        together, chief = self._cluster.synchronous, self._workers[0]
        if all(each.done is not None for each in self._workers):
            self._send_all({'type': 'end'})
        stop = next(({'rank': each.rank, 'signal': each.signal} for each in
                     self._workers[:None if together else 1] if each.signal), {})
        waiting = [each for each in self._workers if each.begins is not None]
        if not together:
            if chief.left or chief.done is not None:
                self._send_all(dict(stop, type='over'))
            for worker in waiting if chief.session else ():
                worker.answer({'type': 'go'})
            for worker in [each for each in self._workers[1:] if each.done is not None]:
                worker.lines.send({'type': 'end'})
            return
        left = max(each.left for each in self._workers)
        for worker in [each for each in waiting if each.session <= left]:
            worker.answer(dict(stop, type='over'))
            waiting.remove(worker)
        if len(waiting) == len(self._workers):
            other = next((each.rank for each in waiting if each.begins != chief.begins), None)
            answer = {'type': 'differs', 'rank': other} if other is not None else dict(
                stop, type='go', checks=any(each.checks for each in waiting), is_last=bool(stop))
            now = time.monotonic()
            self._began, self._lasted = now, now - self._began if self._began else 0.
            for worker in waiting:
                worker.answer(answer)

    def _lose(self, worker, why):
        if self._is_lost or worker.done is not None and not self._cluster.synchronous:
            return
        goes_on = worker.rank and not self._cluster.synchronous
        self._send_all({'type': 'gone' if goes_on else 'lost', 'rank': worker.rank, 'why': why},
                       worker)
        if goes_on:
            worker.retire()
            self._let_begin()
            return
        self._is_lost = True
        if worker.done is not None:
            worker.lines.send({'type': 'end'})  # it need not wait for the end of all

    def _look(self, looked_at):
        """Tells who waits for whom, shows that worker 0 is alive, and looks for silence."""
        now = time.monotonic()
        was_frozen = now - looked_at > self._dead_after / 2.  # itself, and has heard nobody
        for worker in self._workers:
            if was_frozen:
                worker.begin_to_wait()
            why = self._why_waits(worker, now) if now >= worker.tell_at else ''
            if why:
                worker.tell_at = now + AGAIN
                worker.lines.send({'type': 'waiting', 'why': why})
        if not self._is_complete or self._is_lost:
            return
        if now >= self._beat_at:
            self._beat_at = now + self._beat
            self._send_all({'type': 'alive'})
        done = [worker for worker in self._workers if worker.done is not None]
        if done and self._cluster.synchronous and now - done[0].done > self._dead_after and any(
                worker.in_step or worker.begins is not None for worker in self._workers):
            self._lose(done[0], _ENDED_EARLY)
        for worker in self._workers:
            if worker.done is None and now - worker.heard > self._dead_after:
                why = SILENT % self._dead_after
                worker.lines.send({'type': 'lost', 'rank': worker.rank, 'why': why})  # if it thaws
                self._lose(worker, why)

    def _why_waits(self, worker, now):
        """What a worker waits for, in words; '' if for nothing."""
        silence, waited = max(FIRST, 1.5 * self._beat), []
        if worker.lines is None:
            return ''
        if not self._is_complete:
            waited = [each for each in self._workers if each.lines is None]
        elif worker.done is not None:
            waited = [each for each in self._workers if each.done is None]
        elif not self._cluster.synchronous:
            waited = [] if worker.begins is None else self._workers[:1]
        elif worker.begins is not None:
            waited = [each for each in self._workers if each.begins is None]
        else:
            waited = [each for each in self._workers if (
                now - each.heard > silence if each.done is None else worker.in_step)]
            is_long = now - self._began > FIRST + min(2. * self._lasted, AGAIN)
            if is_long and not waited and worker.in_step and self._cluster.waits:
                return ('for the end of a step that all have begun %.0f s ago: it is a long one, '
                        'or some worker has no input' % (now - self._began))
        return 'for ' + self._named(waited) if waited else ''

    def _named(self, workers):
        return ', '.join(self._cluster.who(worker.rank) for worker in workers)

    def _send_all(self, message, but=None):
        for worker in reversed(self._workers):  # worker 0 may end by it
            if worker.lines is not None and worker is not but:
                worker.lines.send(message)
