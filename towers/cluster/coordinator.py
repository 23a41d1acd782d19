"""Worker 0's side of the coordinator: it listens, and knows what becomes of each worker.

Every worker, worker 0 among them, says over a `Connection`: it is here and trains this (`hello`),
it is about to begin something (`begin`: a session, a step, or a comparison between two steps), a
step has failed (`raised`), its session makes no more steps (`left`), its training is over (`done`),
it ends by an error (`failed`), it is alive. `messages` has the list.

All begin together, or none does: the answer to `begin` is `go` when all have said it, `differs`
where they would begin other things, and `over` when a worker has left the session. A signal comes
with `begin`, and `go` says to all that this step is the last one. A worker that is lost is lost to
all.

Asynchronous workers wait for worker 0's session, and for no step. They are told `over` when worker
0 has left. A worker that is lost is named to the others (`gone`), which train on.
"""

import math
import socket
import threading
import time
import typing

from towers.cluster.addresses import FIRST_LINE_AFTER, NEXT_LINE_AFTER
from towers.cluster.messages import (
    WHY_CUT,
    WHY_SILENT,
    Lines,
    Watched,
    digest_of,
    line_of,
    seconds_between_signs,
)
from towers.errors import ClusterError

_PAUSE = 0.2  # seconds from one look at who is silent to the next, at most
_SECONDS_TO_CLOSE = 0.5  # for the other workers, when worker 0 has closed its connection
_FAILED_ALONE = ('a step has failed on it, and others wait in that step: %s (a program that '
                 'catches such an error cannot go on: skip bad examples in the input)')
_ENDED_EARLY = 'it has ended its training, perhaps for lack of data, others not: see until_all_end'


class _Worker:
    """What worker 0 knows of a worker: what the worker has said itself.

    Attributes:
      rank: its number.
      lines: the `Lines` of its connection; None before it has come.
      has_come: whether it has ever come; it may be gone.
      session: the number of its newest session; 0 before the first.
      session_left: the number of its newest session that makes no more steps; 0 before the first.
      begins: the digest of what it waits to begin; None if it does not wait.
      checks: whether it asks that all compare their weights after what it waits to begin.
      signals: dict from the number of a session to that of the signal that it got in the session.
      in_step: whether it was in a step when it said last that it is alive.
      raised: why its newest step has failed; None if it has not failed, or when a step begins.
      raised_at: when it said so.
      ended_at: when it said that its training was over, or was lost to others that go on; or None.
      is_given_up: whether it was lost to others that go on.
      heard_at: when it said something last.
      tell_at: when to tell it for whom it waits.
    """

    def __init__(self, rank: int, lines: typing.Optional[Lines] = None):
        """A worker that has come over a connection; without `lines` a worker that has not come."""
        self.rank = rank
        self.lines = lines
        self.has_come = lines is not None
        self.session = 0
        self.session_left = 0
        self.begins: typing.Optional[str] = None
        self.checks = False
        self.signals: typing.Dict[int, int] = {}
        self.in_step = False
        self.raised: typing.Optional[str] = None
        self.raised_at = 0.
        self.ended_at: typing.Optional[float] = None
        self.is_given_up = False
        self.restart_clocks()

    @property
    def is_here(self) -> bool:
        """Whether it has a connection."""
        return self.lines is not None

    @property
    def waits_to_begin(self) -> bool:
        """Whether it waits to begin something."""
        return self.begins is not None

    @property
    def has_ended(self) -> bool:
        """Whether its training is over."""
        return self.ended_at is not None

    def restart_clocks(self) -> None:
        """Begins to count anew how long it is silent, and how long it waits."""
        self.in_step = False  # until its next sign of life says so
        self.heard_at = time.monotonic()
        self.tell_at = self.heard_at + FIRST_LINE_AFTER

    def take(self, message: dict) -> None:
        """Notes what the worker says of itself. What others have to be told is done by
        `Coordinator._take`."""
        kind = message['type']
        self.heard_at = time.monotonic()
        if kind == 'alive':
            self.in_step = message.get('in_step', False)
        elif kind == 'begin':
            self.restart_clocks()
            self.session = message.get('session', 0)
            self.begins = message.get('digest', '')
            self.checks = message.get('checks', False)
            self._note_signal(message)
        elif kind == 'raised':
            self.in_step = False
            self.raised = message.get('why', '')
            self.raised_at = self.heard_at
        elif kind == 'left':
            self.session_left = message.get('session', 0)
            self._note_signal(message)
        elif kind == 'done':
            self.retire()

    def _note_signal(self, message: dict) -> None:
        """Notes the signal in a message, if there is one."""
        signal = message.get('signal', 0)
        if signal:
            self.signals[message.get('session', 0)] = signal

    def retire(self) -> None:
        """Notes that it makes no more steps, or is lost to others that go on without it."""
        self.restart_clocks()
        self.ended_at = self.heard_at

    def send(self, message: dict) -> None:
        """Sends a message to it, if it is there."""
        if self.lines is not None:
            self.lines.send(message)

    def answer(self, line: bytes) -> None:
        """Answers its `begin` by a line, see `Lines.send_line`."""
        self.begins = self.raised = None
        if self.lines is not None:
            self.lines.send_line(line)


class Coordinator:
    """Answers all workers, in the process of worker 0.

    While the main thread of worker 0 waits for an answer, it hears and answers all by `serve`: so
    no other thread has to wake it, and to hand over Python's lock, in each step. While it trains, a
    thread hears all a few times a second. That is enough: without worker 0, nothing begins. Either
    holds `_turn` meanwhile: so all methods from `_hear_all` on are called with `_turn` held.

    Attributes:
      own_end: the socket by which worker 0 itself is connected with the coordinator.
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
        self._between_signs = seconds_between_signs(dead_after)
        self._sign_at = 0.  # when to give the next sign of life
        self._pause = min(self._between_signs / 2., _PAUSE)  # between two looks at who is silent
        self._looked_at = time.monotonic()  # when it was
        self._turn = threading.Lock()  # held by the thread that hears and answers
        self._worker_0_ends = threading.Event()
        self._began_at = 0.  # when all began something together last, such as a step; 0 if never
        self._last_duration = 0.  # seconds between the last two such times
        own, self.own_end = socket.socketpair()
        self._own = Lines(own)  # the connection with worker 0 itself
        self._connections = [self._own]  # of workers, and of strangers
        self._sockets: typing.List[socket.socket] = []  # that `_watched` waits for
        self._watched = Watched([])
        self._answer: typing.Optional[dict] = None  # the newest to all; `_line` is that as a line
        self._line = b''
        self._thread = threading.Thread(target=self._run, daemon=True, name='towers-coordinator')
        self._thread.start()

    def give_up(self) -> ClusterError:
        """Ends the wait for missing workers, at the end of `start_timeout`: tells the workers that
        are here of one missing worker, and returns the error about all missing workers."""
        with self._turn:
            missing = self._missing()
            if missing:
                refused = {'type': 'refused', 'rank': missing[0].rank,
                           'why': 'it did not join within start_timeout: start it, correct its '
                                  'address, or see why it was refused'}
                for worker in self._workers[1:]:
                    worker.send(refused)
        # `missing` is empty if the last worker has come just now, too late.
        names = self._named(missing) or 'the last worker'
        return ClusterError(
            '%s did not join within start_timeout: start each one, correct the address, see why '
            'it was refused, or give a longer one.' % names)

    def _missing(self) -> typing.List[_Worker]:
        """The workers that the others wait for in vain: the workers that have never come; if all
        have come once, the workers that have left again. While some have never come, a worker
        that has left does not count: its own `start_timeout` may have ended a moment earlier."""
        not_here = [worker for worker in self._workers[1:] if not worker.is_here]
        never_came = [worker for worker in not_here if not worker.has_come]
        return never_came or not_here

    def close(self) -> None:
        """Waits, 10 seconds at most, until all are told what worker 0 has said, and the thread has
        ended. Worker 0 has to close `own_end` before."""
        self._worker_0_ends.set()
        self._thread.join(10.)

    def serve(self, seconds: float) -> bool:
        """Hears all for some seconds, or until there is an answer for worker 0: then it returns
        True. The answer is at `own_end`, and is left to the caller to read."""
        with self._turn:
            has_answer = self._hear_all(seconds, until=self.own_end)
            if time.monotonic() >= self._looked_at + self._pause:
                self._look()
        return has_answer

    def _run(self) -> None:
        """The thread: hears all workers until worker 0 has closed its end.

        Then it leaves the others half a second to close theirs: what this side has said last may be
        lost to a worker whose connection this side closes first.
        """
        end_at = math.inf  # known when worker 0 has closed its end
        while self._connections and time.monotonic() < end_at:
            worker_0_ends = self._worker_0_ends.wait(self._pause)
            if not self._turn.acquire(blocking=False):  # `serve` hears and looks
                continue
            try:
                # At the end `wait` does not wait any more, so that `_hear_all` has to.
                self._hear_all(self._pause if worker_0_ends else 0.)
                self._look()
            finally:
                self._turn.release()
            worker_0_has_closed = not self._own.is_open
            if worker_0_has_closed and end_at == math.inf:
                end_at = time.monotonic() + _SECONDS_TO_CLOSE
        self._listener.close()
        for lines in self._connections:
            lines.close()

    def _hear_all(self, seconds: float, until: typing.Optional[socket.socket] = None) -> bool:
        """Takes what comes over connections, and new connections, until something comes or some
        seconds are over.

        Args:
          seconds: how long to wait.
          until: a socket, too, that ends the wait, and is not read; or None.

        Returns:
          Whether `until` has data.
        """
        sockets = [lines.socket for lines in self._connections]
        if not self._is_complete:
            sockets.append(self._listener)
        if until is not None:
            sockets.append(until)
        if self._sockets != sockets:
            self._sockets = sockets
            self._watched = Watched(sockets)
        is_over = False
        for ready in self._watched.ready(seconds):
            if ready is until:
                is_over = True
            elif ready is self._listener:
                self._accept()
            else:
                self._hear(self._connections[sockets.index(ready)])
        self._connections = [lines for lines in self._connections if lines.is_open]
        return is_over

    def _accept(self) -> None:
        """Takes a new connection."""
        try:
            self._connections.append(Lines(self._listener.accept()[0]))
        except OSError:  # it is gone already, or this process has too many connections
            time.sleep(0.01)

    def _hear(self, lines: Lines) -> None:
        """Takes what has come over a connection, of a worker or of a stranger."""
        try:
            messages = lines.take()
        except OSError:
            self._drop(lines, WHY_CUT)
            return
        except ClusterError as error:
            self._drop(lines, 'it sent %s' % error)
            return
        for message in messages:
            worker = self._worker_of(lines)
            if worker is not None:
                self._take(worker, message)
            elif lines.is_open:  # a stranger; closed if an earlier message got it refused
                self._judge(lines, message)

    def _drop(self, lines: Lines, why: str) -> None:
        """Closes a broken connection. Its worker is lost, unless it has ended its training; before
        all are there, it may come again."""
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
        """Answers a message of a process that is no worker yet: takes it in, refuses it, or has it
        compare what it trains. A process that says why it cannot join is refused; if it knows the
        signature of worker 0, it is a worker of this run, and all are told.

        Args:
          lines: the connection.
          message: what has come over it.
        """
        rank = message.get('rank')
        if message['type'] != 'hello' or rank is None:
            lines.close()
            return
        why_no_place = self._why_no_place(lines, rank)
        if why_no_place:
            self._refuse(lines, rank, why_no_place)
            return
        # A process knows the digest of worker 0's signature if it has the same signature itself, or
        # if it has compared the two.
        knows_signature = message.get('digest') == self._digest
        why_it_cannot_join = message.get('why')  # by its own account: it trains something else, say
        if why_it_cannot_join:
            refused = self._refuse(lines, rank, why_it_cannot_join)
            if knows_signature:  # no other worker can begin without it
                self._send_all(refused)
            return
        if not knows_signature:
            # The process itself compares, and says hello again. So worker 0 does not read long
            # signatures of strangers.
            lines.send({'type': 'compare', 'signature': self._signature})
            return
        self._take_in(lines, rank)

    def _why_no_place(self, lines: Lines, rank: int) -> str:
        """Why a process cannot be the worker of the rank that it says over a connection; '' if it
        can."""
        num_workers = len(self._workers)
        is_worker_0 = lines is self._own  # no other process is worker 0, whatever rank it says
        may_have_rank = is_worker_0 or 0 < rank < num_workers
        if not may_have_rank:
            return 'its rank is %d, and the cluster has %d workers' % (rank, num_workers)
        if self._workers[rank].is_here:
            return ('worker %d is here already: two processes have the same place in the cluster'
                    % rank)
        return ''

    def _refuse(self, lines: Lines, rank: int, why: str) -> dict:
        """Refuses a process that says it is the worker of that rank; returns the message to it."""
        is_in_cluster = 0 <= rank < len(self._workers)
        name = self._cluster.who(rank) if is_in_cluster else 'worker %d' % rank
        self._say('refused        %s: %s' % (name, why))
        refused = {'type': 'refused', 'rank': rank, 'why': why}
        lines.send(refused)
        lines.close()
        return refused

    def _take_in(self, lines: Lines, rank: int) -> None:
        """Makes a process that trains the same the worker of that rank; welcomes all workers when
        all have come."""
        self._workers[rank] = _Worker(rank, lines)
        if not all(worker.is_here for worker in self._workers):
            return
        self._is_complete = True
        self._listener.close()  # TensorFlow's server of worker 0 may need the port
        for worker in self._workers:
            worker.restart_clocks()
            worker.send({'type': 'welcome'})

    def _take(self, worker: _Worker, message: dict) -> None:
        """Does what a message of a worker says.

        What a worker says that others have given up counts no more. Its network may have been cut,
        so that it has given up worker 0, too: worker 0 would end by that message.
        """
        if worker.is_given_up:
            return
        worker.take(message)
        kind = message['type']
        if kind == 'lost':
            # This worker has lost worker 0, whose process was frozen, and this thread in it. Now
            # that the process goes on, worker 0 is told so.
            self._own.send(message)
        elif kind == 'failed':
            self._lose(worker, 'it has ended: %s' % message.get('why', '').rstrip('.'))
        elif kind == 'raised':
            self._tell_if_raised_by_all()
        elif kind != 'alive':  # others may wait for it
            self._let_begin()

    def _tell_if_raised_by_all(self) -> None:
        """Tells all workers when their newest step has failed on each of them: then no worker is
        lost, and no worker waits for the news of a loss. A lost server is found by other means."""
        has_failed_on_all = all(worker.raised is not None for worker in self._workers)
        if has_failed_on_all and not self._cluster.is_served:
            self._send_all({'type': 'raised'})

    def _let_begin(self) -> None:
        """Answers the workers that wait to begin something, when the answer is known: when all wait
        to begin, or a worker never will. When all are lost, nothing begins any more."""
        if self._is_lost:
            return
        if all(worker.has_ended for worker in self._workers):
            self._send_all({'type': 'end'})
        if self._cluster.synchronous:
            self._let_begin_together()
        else:
            self._let_begin_alone()

    def _let_begin_together(self) -> None:
        """Lets synchronous workers begin when all wait to begin; ends a session that a worker has
        left."""
        self._end_sessions_that_were_left()
        if not all(worker.waits_to_begin for worker in self._workers):
            return
        now = time.monotonic()
        has_begun_before = self._began_at > 0.
        if has_begun_before:
            self._last_duration = now - self._began_at
        self._began_at = now
        answer = self._answer_to_all()
        if answer != self._answer:  # mostly it is that of the step before
            self._answer = answer
            self._line = line_of(answer)
        for worker in reversed(self._workers):
            worker.answer(self._line)

    def _end_sessions_that_were_left(self) -> None:
        """Answers workers that wait to begin something in a session in which another worker makes
        no more steps. Sessions have the same numbers on all workers: 1, 2, …"""
        newest_left = max(worker.session_left for worker in self._workers)
        if newest_left == 0:
            return
        over = line_of(dict(_signal_of(self._workers, newest_left), type='over'))
        for worker in self._workers:
            if worker.waits_to_begin and worker.session <= newest_left:
                worker.answer(over)

    def _answer_to_all(self) -> dict:
        """The answer to all workers when all wait to begin. After a signal to any worker, what they
        begin is the last thing."""
        for worker in self._workers:
            if worker.begins != self._workers[0].begins:
                return {'type': 'differs', 'rank': worker.rank}
        checks = any(worker.checks for worker in self._workers)
        signal = _signal_of(self._workers, self._workers[0].session)
        has_signal = bool(signal)
        return dict(signal, type='go', checks=checks, is_last=has_signal)

    def _let_begin_alone(self) -> None:
        """Lets asynchronous workers begin their sessions once the chief has begun its own, in which
        the variables get their values.

        When the chief makes no more steps, all are told that the training is over, and which signal
        has ended it, if it was a signal. Their sessions end then. A worker that has ended its own
        training may leave at once.
        """
        chief = self._workers[0]
        has_chief_left_session = chief.session_left > 0  # on servers each worker has one session
        chief_makes_no_more_steps = has_chief_left_session or chief.has_ended
        if chief_makes_no_more_steps:
            self._send_all(dict(_signal_of([chief], chief.session), type='over'))
        has_chief_begun = chief.session > 0
        if has_chief_begun:
            for worker in self._workers:
                if worker.waits_to_begin:
                    worker.answer(line_of({'type': 'go'}))
        for worker in self._workers[1:]:
            if worker.has_ended:
                worker.send({'type': 'end'})

    def _lose(self, worker: _Worker, why: str) -> None:
        """Tells the others that a worker is lost. All workers are lost with it; but asynchronous
        workers go on if the lost worker is not the chief.

        Args:
          worker: the worker.
          why: why it is lost.
        """
        if self._is_lost:  # all have been told of the first loss
            return
        is_asynchronous = not self._cluster.synchronous
        if is_asynchronous and worker.has_ended:  # nobody needs it any more
            return
        others_go_on = is_asynchronous and worker.rank > 0
        if others_go_on:
            self._send_all({'type': 'gone', 'rank': worker.rank, 'why': why}, but=worker)
            worker.retire()
            worker.is_given_up = True
            self._let_begin()  # it may be the last one that others have waited for
            return
        self._send_all({'type': 'lost', 'rank': worker.rank, 'why': why}, but=worker)
        self._is_lost = True
        # It has done its part, and ends in good order: the end of all, for which it waits, does not
        # come.
        if worker.has_ended:
            worker.send({'type': 'end'})

    def _look(self) -> None:
        """Tells workers for whom they wait, shows that worker 0 is alive, and looks for lost
        workers."""
        now = time.monotonic()
        was_frozen = now - self._looked_at > self._dead_after / 2.  # there are looks all the time
        self._looked_at = now
        if was_frozen:  # this process itself, so that it has heard nobody
            for worker in self._workers:
                worker.restart_clocks()
        for worker in self._workers:
            self._tell_waiting(worker, now)
        if not self._is_complete or self._is_lost:  # no worker can be lost yet; or all are
            return
        if now >= self._sign_at:
            self._sign_at = now + self._between_signs
            self._send_all({'type': 'alive'})
        self._look_for_early_end(now)
        self._look_for_failed_step()
        self._look_for_silence(now)

    def _look_for_failed_step(self) -> None:
        """Loses the worker on which a step has failed first, if another worker is still in that
        step, which cannot end any more: whether the program of the first one has caught the error,
        or looks for its reason."""
        failed = [worker for worker in self._workers if worker.raised is not None]
        if not failed or not self._cluster.waits:
            return
        first = min(failed, key=lambda worker: worker.raised_at)
        if self._has_failed_alone(first):
            why = _FAILED_ALONE % first.raised
            first.send({'type': 'lost', 'rank': first.rank, 'why': why})
            self._lose(first, why)

    def _has_failed_alone(self, failed: _Worker) -> bool:
        """Whether another worker is still in the step that has failed on a worker, after the time
        that a step may take, and all others have given a sign of life since it failed.

        A step may fail on all workers alike, on one a bit later than on another. And what has
        failed may be the loss of a worker, or server, whose silence is not long enough yet.
        """
        seconds = self._usual_seconds()
        if self._cluster.is_served:
            seconds = max(seconds, self._dead_after)
        waits_since = max(failed.raised_at, self._began_at + seconds)
        is_awaited = False
        for worker in self._workers:
            if worker is failed or worker.has_ended:
                continue
            if worker.heard_at <= failed.raised_at:
                return False
            if worker.in_step and worker.heard_at > waits_since:
                is_awaited = True
        return is_awaited

    def _look_for_silence(self, now: float) -> None:
        """Loses the workers that have been silent for `dead_after`. A worker whose process was
        frozen reads the message about its loss when the process goes on."""
        for worker in self._workers:
            if not worker.has_ended and now - worker.heard_at > self._dead_after:
                why = WHY_SILENT % self._dead_after
                worker.send({'type': 'lost', 'rank': worker.rank, 'why': why})
                self._lose(worker, why)

    def _tell_waiting(self, worker: _Worker, now: float) -> None:
        """Tells a worker for whom it waits, if it is time."""
        if now < worker.tell_at:
            return
        why = self._why_waits(worker, now)
        if why:
            worker.tell_at = now + NEXT_LINE_AFTER
            worker.send({'type': 'waiting', 'why': why})

    def _look_for_early_end(self, now: float) -> None:
        """Loses a synchronous worker that ended its training more than `dead_after` ago, while
        other workers wait for it in a step, or to begin a step."""
        others_wait = any(worker.in_step or worker.waits_to_begin for worker in self._workers)
        if not self._cluster.synchronous or not others_wait:
            return
        for worker in self._workers:
            if worker.ended_at is not None and now - worker.ended_at > self._dead_after:
                self._lose(worker, _ENDED_EARLY)
                return  # with one worker all are lost

    def _why_waits(self, worker: _Worker, now: float) -> str:
        """What a worker waits for, in words; '' if for nothing."""
        if not worker.is_here:  # nobody to tell
            return ''
        waited_for = self._waited_for(worker, now)
        if waited_for:
            return 'for ' + self._named(waited_for)
        if self._is_in_long_step(worker, now):
            return ('for the end of a step that all have begun %.0f s ago: it is a long one, '
                    'or some worker has no input' % (now - self._began_at))
        return ''

    def _is_in_long_step(self, worker: _Worker, now: float) -> bool:
        """Whether a worker is in a step that all have begun together, and that takes longer than
        usual."""
        # `waits` of a cluster: its workers begin a step all together.
        steps_together = self._is_complete and self._cluster.waits
        # `in_step` is from the last sign of life: the worker may have said `begin` or `done` since.
        is_in_step = worker.in_step and not worker.waits_to_begin and not worker.has_ended
        if not steps_together or not is_in_step:
            return False
        return now - self._began_at > self._usual_seconds()

    def _usual_seconds(self) -> float:
        """The seconds after which a step is a long one: 5, and twice those of the step before. The
        latter are 30 at most: so a hang is told of after 35, even if that step took an hour."""
        return FIRST_LINE_AFTER + min(2. * self._last_duration, NEXT_LINE_AFTER)

    def _waited_for(self, worker: _Worker, now: float) -> typing.List[_Worker]:
        """The workers that a worker waits for, as its log is to tell the user."""
        if not self._is_complete:  # it waits until all have come
            return [each for each in self._workers if not each.is_here]
        if worker.has_ended:  # it waits until all have ended
            return [each for each in self._workers if not each.has_ended]
        if self._cluster.synchronous:
            return self._held_up_by(worker, now)
        if worker.waits_to_begin:  # an asynchronous worker waits for the chief's session
            return self._workers[:1]
        return []

    def _held_up_by(self, worker: _Worker, now: float) -> typing.List[_Worker]:
        """The workers that hold up a synchronous worker that has not ended its training. While it
        waits to begin something, these are all workers that do not wait to begin."""
        if worker.waits_to_begin:
            return [other for other in self._workers if not other.waits_to_begin]
        others = [other for other in self._workers if other is not worker]
        return [other for other in others if self._cannot_go_on_with(other, worker, now)]

    def _cannot_go_on_with(self, other: _Worker, worker: _Worker, now: float) -> bool:
        """Whether `worker`, which does not wait to begin anything, is held up by `other`."""
        # An `other` that has ended takes part in no step any more. It holds up a worker that is in
        # a step, and not yet one that is between two steps.
        if other.has_ended:
            return worker.in_step
        # Each worker gives a sign of life every `_between_signs` seconds; it may come a bit late.
        long_silence = max(FIRST_LINE_AFTER, 1.5 * self._between_signs)
        return now - other.heard_at > long_silence

    def _named(self, workers: typing.Iterable[_Worker]) -> str:
        """Workers in words."""
        return ', '.join(self._cluster.who(worker.rank) for worker in workers)

    def _send_all(self, message: dict, but: typing.Optional[_Worker] = None) -> None:
        """Sends a message to all workers `but` one. Worker 0 gets it last: the message may end
        worker 0, and this thread with it."""
        for worker in reversed(self._workers):
            if worker is not but:
                worker.send(message)


def _signal_of(workers: typing.Iterable[_Worker], session: int) -> dict:
    """The rank of the first of these workers that got a signal in a session, and the signal's
    number, as fields of a message; no fields where no worker got a signal."""
    for worker in workers:
        if session in worker.signals:
            return {'rank': worker.rank, 'signal': worker.signals[session]}
    return {}
