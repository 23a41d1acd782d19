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
import typing

from towers.cluster.addresses import AGAIN, FIRST
from towers.cluster.connection import CUT, SILENT, Lines, digest_of, pause_of, readable
from towers.errors import ClusterError

_ENDED_EARLY = 'it has ended its training, perhaps for lack of data, others not: see until_all_end'


class _Worker:
    """What worker 0 knows of a worker: what the worker has said itself.

    Attributes:
      rank: its number.
      lines: the `Lines` of its connection; None before it has come.
      has_come: whether it has come, though it may have gone again.
      session: the number of its newest session.
      left: the number of its newest session that makes no more steps.
      begins: the digest of what it waits to begin; None if it does not wait.
      checks: whether it asks that all compare their weights after that.
      signal: the number of the signal that it got in this session; or 0.
      in_step: whether it was in a step when it said last that it is alive.
      done: when it said that its training was over; or None.
      heard: when it said something last.
      tell_at: when to tell it for whom it waits.
    """

    def __init__(self, rank: int, lines: typing.Optional[Lines] = None):
        self.rank = rank
        self.lines = lines
        self.has_come = lines is not None
        self.session = 0
        self.left = 0
        self.begins: typing.Optional[str] = None
        self.checks = False
        self.signal = 0
        self.in_step = False
        self.done: typing.Optional[float] = None
        self.begin_to_wait()

    @property
    def is_here(self) -> bool:
        """Whether it has a connection."""
        return self.lines is not None

    @property
    def waits(self) -> bool:
        """Whether it waits to begin something."""
        return self.begins is not None

    @property
    def has_ended(self) -> bool:
        """Whether its training is over."""
        return self.done is not None

    def begin_to_wait(self) -> None:
        """Notes that it is heard of, and is to be told after a while for whom it waits."""
        self.heard = time.monotonic()
        self.tell_at = self.heard + FIRST

    def take(self, message: dict) -> None:
        """Notes what the worker says."""
        kind = message['type']
        self.heard = time.monotonic()
        if kind == 'alive':
            self.in_step = message.get('in_step', False)
        elif kind == 'begin':
            self.begin_to_wait()
            self.session = message.get('session', 0)
            self.begins = message.get('digest', '')
            self.checks = message.get('checks', False)
            self.signal = message.get('signal', 0)
        elif kind == 'left':
            self.left = message.get('session', 0)
            self.signal = message.get('signal', 0)
        elif kind == 'done':
            self.retire()

    def retire(self) -> None:
        """Notes that it makes no more steps, or is lost to others that go on without it."""
        self.begin_to_wait()
        self.done = self.heard
        self.in_step = False

    def send(self, message: dict) -> None:
        """Sends a message to it, if it is there."""
        if self.lines is not None:
            self.lines.send(message)

    def answer(self, message: dict) -> None:
        """Answers its `begin`."""
        self.begins = None
        self.send(message)


class Coordinator:
    """A thread of worker 0 that answers all workers.

    Attributes:
      own_end: the socket by which worker 0 itself is connected with it.
    """

    def __init__(self, cluster: typing.Any, signature: dict, listener: socket.socket,
                 dead_after: float, say: typing.Callable):
        """Starts the thread.

        Args:
          cluster: the `Cluster`.
          signature: of worker 0.
          listener: the socket at which the others come; it is closed when all are there.
          dead_after: as for `join`.
          say: called by the thread with a line about a worker that is refused.
        """
        self._cluster = cluster
        self._signature = signature
        self._digest = digest_of(signature)
        self._listener = listener
        self._dead_after = dead_after
        self._say = say
        self._workers = [_Worker(rank) for rank in range(cluster.num_workers)]
        self._is_complete = False  # whether all have come
        self._is_lost = False  # whether a worker is lost, and with it all
        self._beat = pause_of(dead_after)  # seconds from one sign of life to the next
        self._beat_at = 0.
        self._began = 0.  # when all began something last, such as a step
        self._lasted = 0.  # how long the one before that took
        own, self.own_end = socket.socketpair()
        self._own = Lines(own)
        self._connections = [self._own]
        self._thread = threading.Thread(target=self._run, daemon=True, name='towers-coordinator')
        self._thread.start()

    def missing(self) -> ClusterError:
        """The error about the workers that have not come."""
        missing = [worker for worker in self._workers[1:] if not worker.is_here]
        never_came = [worker for worker in missing if not worker.has_come]
        return ClusterError(
            '%s did not join within start_timeout: start each one, correct the address, see why '
            'it was refused, or give a longer one.' % (
                self._named(never_came or missing) or 'the last worker'))

    def close(self) -> None:
        """Ends the thread when worker 0 has closed `own_end`, and all are told what it said."""
        self._thread.join(10.)

    def _run(self) -> None:
        """The thread: hears all until worker 0 has closed its end, and the others theirs. Closing a
        connection with something unread would lose the last words."""
        pause = min(0.5, self._beat)
        end_at = float('inf')
        while self._connections and time.monotonic() < end_at:
            started = time.monotonic()
            if not self._own.is_open:
                end_at = min(end_at, started + 0.5)
            self._hear_all(pause)
            self._look(started)
            self._connections = [lines for lines in self._connections if lines.is_open]
        self._listener.close()
        for lines in self._connections:
            lines.close()

    def _hear_all(self, seconds: float) -> None:
        """Takes what comes over connections within some seconds, and new connections."""
        by_socket = {lines.socket: lines for lines in self._connections}
        sockets = list(by_socket)
        if not self._is_complete:
            sockets.append(self._listener)
        for ready in readable(sockets, seconds):
            if ready in by_socket:
                self._hear(by_socket[ready])
            else:
                self._accept()

    def _accept(self) -> None:
        """Takes a new connection."""
        try:
            self._connections.append(Lines(self._listener.accept()[0]))
        except OSError:  # it is gone already, or this process has too many connections
            time.sleep(0.01)

    def _hear(self, lines: Lines) -> None:
        """Takes what has come over a connection, of a worker or of a stranger."""
        messages: typing.List[dict] = []
        why_broken = ''
        try:
            messages = lines.take()
        except OSError:
            why_broken = CUT
        except ClusterError as error:
            why_broken = 'it sent %s' % error
        for message in messages:
            worker = self._worker_of(lines)
            if worker is not None:
                self._take(worker, message)
            elif lines.is_open:
                self._judge(lines, message)
        if why_broken:
            self._drop(lines, why_broken)

    def _drop(self, lines: Lines, why: str) -> None:
        """Closes a broken connection; its worker is lost, or may come again before all are
        there."""
        lines.close()
        worker = self._worker_of(lines)
        if worker is None:
            return
        if not self._is_complete:
            worker.lines = None
        elif not worker.has_ended:
            self._lose(worker, why)

    def _worker_of(self, lines: Lines) -> typing.Optional[_Worker]:
        """The worker with this connection; None for a stranger's."""
        for worker in self._workers:
            if worker.lines is lines:
                return worker
        return None

    def _judge(self, lines: Lines, message: dict) -> None:
        """Answers a message of one that is no member yet: takes it in, refuses it, or has it
        compare what it trains."""
        rank = message.get('rank')
        if message['type'] != 'hello' or rank is None:
            lines.close()
            return
        has_compared = message.get('digest') == self._digest  # with worker 0's signature
        number = len(self._workers)
        if not 0 < rank < number and lines is not self._own:
            self._refuse(lines, rank, 'its rank is %d, and the cluster has %d workers' % (
                rank, number))
        elif self._workers[rank].is_here:
            self._refuse(lines, rank, 'worker %d is here already: two processes have the same '
                         'place in the cluster' % rank)
        elif message.get('why'):
            refused = self._refuse(lines, rank, message['why'])
            if has_compared:  # it trains something else: no run begins
                self._send_all(refused)
        elif not has_compared:
            # The worker finds the difference: no stranger makes worker 0 read much.
            lines.send({'type': 'compare', 'signature': self._signature})
        else:
            self._take_in(lines, rank)

    def _refuse(self, lines: Lines, rank: int, why: str) -> dict:
        """Refuses one that says it is the worker of that rank; returns the message that says so."""
        is_in_cluster = rank < len(self._workers)
        name = self._cluster.who(rank) if is_in_cluster else 'worker %d' % rank
        self._say('refused        %s: %s' % (name, why))
        refused = {'type': 'refused', 'rank': rank, 'why': why}
        lines.send(refused)
        lines.close()
        return refused

    def _take_in(self, lines: Lines, rank: int) -> None:
        """Makes one that trains the same the worker of that rank; welcomes all when all have
        come."""
        self._workers[rank] = _Worker(rank, lines)
        if not all(worker.is_here for worker in self._workers):
            return
        self._is_complete = True
        self._listener.close()  # TensorFlow's server of worker 0 may need the port
        for worker in self._workers:
            worker.begin_to_wait()
            worker.send({'type': 'welcome'})

    def _take(self, worker: _Worker, message: dict) -> None:
        """Does what a message of a worker says."""
        worker.take(message)
        kind = message['type']
        if kind == 'lost':  # worker 0 itself, which was frozen
            self._own.send(message)
        elif kind == 'failed':
            self._lose(worker, 'it has ended: %s' % message.get('why', '').rstrip('.'))
        elif kind != 'alive':
            self._let_begin()

    def _let_begin(self) -> None:
        """Answers those who wait to begin: all say so, or some worker never will."""
        if all(worker.has_ended for worker in self._workers):
            self._send_all({'type': 'end'})
        if self._cluster.synchronous:
            self._let_begin_together()
        else:
            self._let_begin_alone()

    def _let_begin_together(self) -> None:
        """Lets synchronous workers begin when all wait for it; ends a session that one has left."""
        signal = _signal_of(self._workers)
        last_left = max(worker.left for worker in self._workers)
        waiting = []
        for worker in self._workers:
            if not worker.waits:
                continue
            if worker.session <= last_left:
                worker.answer(dict(signal, type='over'))
            else:
                waiting.append(worker)
        if len(waiting) < len(self._workers):
            return
        now = time.monotonic()
        self._lasted = now - self._began if self._began else 0.
        self._began = now
        answer = self._answer_to_all(signal)
        for worker in waiting:
            worker.answer(answer)

    def _answer_to_all(self, signal: dict) -> dict:
        """The answer to all workers, which wait to begin; `signal` as `_signal_of` them."""
        for worker in self._workers:
            if worker.begins != self._workers[0].begins:
                return {'type': 'differs', 'rank': worker.rank}
        checks = any(worker.checks for worker in self._workers)
        return dict(signal, type='go', checks=checks, is_last=bool(signal))

    def _let_begin_alone(self) -> None:
        """Lets asynchronous workers begin once the chief has begun a session.

        When the chief has left, all are told that the training is over, and their sessions end. A
        worker that has ended its own training may leave at once.
        """
        chief = self._workers[0]
        waiting = [worker for worker in self._workers if worker.waits]
        if chief.left or chief.has_ended:
            self._send_all(dict(_signal_of([chief]), type='over'))
        if chief.session:
            for worker in waiting:
                worker.answer({'type': 'go'})
        for worker in self._workers[1:]:
            if worker.has_ended:
                worker.send({'type': 'end'})

    def _lose(self, worker: _Worker, why: str) -> None:
        """Tells the others that a worker is lost: the loss of all, but for asynchronous workers
        that lose another one than the chief."""
        is_asynchronous = not self._cluster.synchronous
        if self._is_lost or (is_asynchronous and worker.has_ended):
            return
        goes_on = is_asynchronous and worker.rank > 0
        self._send_all({'type': 'gone' if goes_on else 'lost', 'rank': worker.rank, 'why': why},
                       worker)
        if goes_on:
            worker.retire()
            self._let_begin()
            return
        self._is_lost = True
        if worker.has_ended:
            worker.send({'type': 'end'})  # it need not wait for the end of all

    def _look(self, started: float) -> None:
        """Tells who waits for whom, shows that worker 0 is alive, and looks for silence; `started`
        is when this round of the thread began."""
        now = time.monotonic()
        if now - started > self._dead_after / 2.:  # it was frozen itself, and has heard nobody
            for worker in self._workers:
                worker.begin_to_wait()
        for worker in self._workers:
            self._tell_waiting(worker, now)
        if not self._is_complete or self._is_lost:
            return
        if now >= self._beat_at:
            self._beat_at = now + self._beat
            self._send_all({'type': 'alive'})
        self._look_for_early_end(now)
        for worker in self._workers:
            if not worker.has_ended and now - worker.heard > self._dead_after:
                why = SILENT % self._dead_after
                worker.send({'type': 'lost', 'rank': worker.rank, 'why': why})  # if it thaws
                self._lose(worker, why)

    def _tell_waiting(self, worker: _Worker, now: float) -> None:
        """Tells a worker for whom it waits, if it is time."""
        if now < worker.tell_at:
            return
        why = self._why_waits(worker, now)
        if why:
            worker.tell_at = now + AGAIN
            worker.send({'type': 'waiting', 'why': why})

    def _look_for_early_end(self, now: float) -> None:
        """Loses a synchronous worker that has ended its training long before others, who wait for
        it in a step, or to begin one."""
        ended = [(worker, worker.done) for worker in self._workers if worker.done is not None]
        if not ended or not self._cluster.synchronous:
            return
        first, ended_at = ended[0]
        others_wait = any(worker.in_step or worker.waits for worker in self._workers)
        if others_wait and now - ended_at > self._dead_after:
            self._lose(first, _ENDED_EARLY)

    def _why_waits(self, worker: _Worker, now: float) -> str:
        """What a worker waits for, in words; '' if for nothing."""
        if not worker.is_here:
            return ''
        waited_for = self._waited_for(worker, now)
        if waited_for:
            return 'for ' + self._named(waited_for)
        is_in_step_of_all = (self._is_complete and self._cluster.waits and worker.in_step
                             and not worker.has_ended and not worker.waits)
        seconds = now - self._began
        if is_in_step_of_all and seconds > FIRST + min(2. * self._lasted, AGAIN):
            return ('for the end of a step that all have begun %.0f s ago: it is a long one, '
                    'or some worker has no input' % seconds)
        return ''

    def _waited_for(self, worker: _Worker, now: float) -> typing.List[_Worker]:
        """The workers that a worker waits for, of whom its log tells the user."""
        if not self._is_complete:
            return [each for each in self._workers if not each.is_here]
        if worker.has_ended:
            return [each for each in self._workers if not each.has_ended]
        if self._cluster.synchronous:
            return self._held_up_by(worker, now)
        if worker.waits:
            return self._workers[:1]
        return []

    def _held_up_by(self, worker: _Worker, now: float) -> typing.List[_Worker]:
        """The workers that hold up one that trains in step with all others: who have not come to
        what it waits to begin; else who are silent, and in a step who have ended, too."""
        if worker.waits:
            return [each for each in self._workers if not each.waits]
        silence = max(FIRST, 1.5 * self._beat)
        waited_for = []
        for each in self._workers:
            if each is worker:
                holds_up = False
            elif each.has_ended:
                holds_up = worker.in_step
            else:
                holds_up = now - each.heard > silence
            if holds_up:
                waited_for.append(each)
        return sorted(waited_for, key=lambda each: each.rank)

    def _named(self, workers: typing.Iterable[_Worker]) -> str:
        """Workers in words."""
        return ', '.join(self._cluster.who(worker.rank) for worker in workers)

    def _send_all(self, message: dict, but: typing.Optional[_Worker] = None) -> None:
        """Sends a message to all workers `but` one; to worker 0 last, which may end by it."""
        for worker in reversed(self._workers):
            if worker is not but:
                worker.send(message)


def _signal_of(workers: typing.Iterable[_Worker]) -> dict:
    """The first of these workers that got a signal, and that, as fields of a message; none where
    none did."""
    for worker in workers:
        if worker.signal:
            return {'rank': worker.rank, 'signal': worker.signal}
    return {}
