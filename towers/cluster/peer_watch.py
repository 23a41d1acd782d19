"""Notices that another worker has ended, or does not answer any more, and names it.

TensorFlow's ring does not notice: on 1.15 a step whose peer is gone never ends, and a step whose
peer is frozen (a machine that swaps, SIGSTOP) ends on no version.
"""

import threading
import time

from towers.cluster.json_messages import readable
from towers.errors import ClusterError

_BEATS = 5  # messages that a worker sends within `dead_after`


class Watch:
    """A thread that says that this worker is alive, and hears whether the others are.

    Worker 0 is connected with all others, and tells them which worker is lost.

    Attributes:
      lost: None, or `(rank, why)` of the worker that is gone.
    """

    def __init__(self, cluster, connections, dead_after, on_lost):
        """
        Args:
          cluster: `Cluster`.
          connections: dict from ranks to `Lines`, see `meet`.
          dead_after: seconds of silence after which a worker is gone.
          on_lost: called once, in the thread, with rank and reason, when a worker is lost.
        """
        self.lost = None
        self._cluster, self._connections = cluster, dict(connections)
        self._dead_after, self._on_lost = dead_after, on_lost
        self._heard = dict.fromkeys(connections, time.monotonic())
        self._done = {}  # rank -> when it said that it has ended in good order
        self._lock = threading.Lock()
        self._found, self._all_done, self._stop = (threading.Event() for _ in range(3))
        self._in_step_since = None
        self._thread = threading.Thread(target=self._run, daemon=True, name='towers-watch')
        self._thread.start()

    def step_begins(self):
        """Notes that this worker is in a step, which needs all others."""
        self._in_step_since = time.monotonic()

    def step_ends(self):
        """Notes that this worker is in no step."""
        self._in_step_since = None

    def session_ends(self):
        """Notes that no step comes for now."""
        self.step_ends()

    def wait_for_loss(self, seconds):
        """Waits until a worker is known to be lost; `lost`."""
        self._found.wait(seconds)
        return self.lost

    def finish(self):
        """Says that this worker has ended in good order, and waits until all have."""
        if self._cluster.rank != 0:
            self._send(0, {'type': 'done'})
        while not (self._cluster.rank == 0 and len(self._done) == len(self._heard)
                   or self._all_done.is_set() or self._found.is_set()):
            time.sleep(0.02)
        if self._cluster.rank == 0 and not self._found.is_set():
            for rank in self._heard:
                self._send(rank, {'type': 'end'})
        self._close()

    def fail(self, why):
        """Says why this worker ends before the others."""
        for rank in self._heard:
            self._send(rank, {'type': 'failed', 'why': why})
        self._close()

    def _close(self):
        self._stop.set()
        self._thread.join(5.)
        for lines in self._connections.values():
            lines.close()

    def _send(self, rank, message):
        with self._lock:
            try:
                self._connections[rank].send(message)
            except OSError:
                pass  # `_listen` finds out what is wrong

    def _run(self):
        pause, beat_at = self._dead_after / _BEATS, 0.
        while not self._stop.is_set() and self.lost is None and not self._all_done.is_set():
            now = time.monotonic()
            if now >= beat_at:
                beat_at = now + pause
                for rank in list(self._heard):
                    self._send(rank, {'type': 'alive'})
            sockets = {lines.socket: rank for rank, lines in self._connections.items()
                       if rank not in self._done}
            if not sockets:
                time.sleep(min(pause, 0.05))
            for ready in readable(list(sockets), min(pause, 0.5)) if sockets else ():
                self._listen(sockets[ready])
            self._look_for_silence(now)

    def _listen(self, rank):
        try:
            for message in self._connections[rank].take():
                self._heard[rank] = time.monotonic()
                kind = message.get('type')
                if kind == 'done':
                    self._done[rank] = time.monotonic()
                elif kind == 'end':
                    self._all_done.set()
                    return
                elif kind == 'failed':
                    self._lose(rank, 'it ended: %s' % message.get('why'))
                elif kind == 'lost':
                    self._lose(message.get('rank'), message.get('why'))
        except (EOFError, OSError):
            self._lose(rank, 'its process has ended, or its machine cut the connection')
        except ClusterError as error:
            self._lose(rank, 'it sent %s' % error)

    def _look_for_silence(self, looked_at):
        # A process that was frozen itself has heard nobody meanwhile: it gives all another chance.
        now = time.monotonic()
        if now - looked_at > self._dead_after / 2:
            self._heard = dict.fromkeys(self._heard, now)
            return
        for rank, heard in self._heard.items():
            if rank not in self._done and now - heard > self._dead_after:
                self._lose(rank, 'there is no sign of life from it for %.0f seconds' %
                           self._dead_after)
        since = self._in_step_since
        for rank, done in self._done.items():
            if since is not None and now - max(since, done) > self._dead_after:
                self._lose(rank, 'it has ended its training, perhaps for lack of data, and this '
                           'worker has not: see until_all_end')

    def _lose(self, rank, why):
        if self.lost is not None:
            return
        if not isinstance(rank, int) or not 0 <= rank < self._cluster.num_workers:
            rank, why = 0, 'it sent the number %.40r of a worker' % (rank,)
        self.lost = (rank, why)
        self._found.set()
        if self._cluster.rank == 0:
            for other in self._heard:
                if other != rank:
                    self._send(other, {'type': 'lost', 'rank': rank, 'why': why})
                elif other in self._done:  # in good order: it need not wait for the end of all
                    self._send(other, {'type': 'end'})
        self._on_lost(rank, why)
