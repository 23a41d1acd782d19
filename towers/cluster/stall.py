"""Says who does not answer when a step on parameter servers takes long."""

import socket
import threading
import time

from towers.cluster.ports import speaks_as_server, split_address


class StallWatch:
    """A thread that says which process does not answer, once in each step that takes too long.

    A synchronous step waits for every worker, without a message from TensorFlow. A worker or server
    that was killed is waited for: started again, it joins the run. A worker that has ended in good
    order does not come back, so that the step never ends. And once this process has been told to
    stop, it waits no longer.
    """

    def __init__(self, cluster, seconds, say, ended=None, on_ended=None, told_to_stop=bool,
                 on_told=None):
        """
        Args:
          cluster: `Cluster` with parameter servers.
          seconds: how long a step may take before a line is written.
          say: called with the line, in the thread.
          ended: called for a list of the other workers that have ended; None where no step waits
            for other workers.
          on_ended: called with that list, once, when a step waits for one of them.
          told_to_stop: called for whether a signal has told this process to stop.
          on_told: called, once, with words that say for whom a step of such a process waits.
        """
        self._cluster, self._seconds, self._say = cluster, seconds, say
        self._ended, self._on_ended = ended, on_ended
        self._told_to_stop, self._on_told = told_to_stop, on_told
        self._since = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name='towers-stall')
        self._thread.start()

    def step_begins(self):
        """Notes that a step begins now."""
        self._since = time.monotonic()

    def step_ends(self):
        """Notes that no step is under way."""
        self._since = None

    def close(self):
        """Ends the thread."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self):
        spoken_of = seen_in = None
        while not self._stop.wait(self._seconds / 5.):
            since = self._since
            if since is None or time.monotonic() - since <= self._seconds:
                continue
            ended = [] if self._ended is None else self._ended()
            in_vain = 0 in ended or len(ended) > self._cluster.backup_workers
            if in_vain or self._told_to_stop():
                # A process that was frozen itself has one more look to find its step done.
                if since == seen_in and since == self._since:
                    if in_vain:
                        self._on_ended(ended)
                    else:
                        self._on_told(self._who())
                    return
                seen_in = since
            elif since != spoken_of:
                spoken_of = since
                self._say('waiting        the step takes more than %g seconds; %s' % (
                    self._seconds, self._who(': start it again, and the run goes on')))

    def _who(self, advice=''):
        others = [(job, rank) for job, addresses in (('worker', self._cluster.workers),
                                                     ('ps', self._cluster.ps))
                  for rank in range(len(addresses))
                  if (job, rank) != (self._cluster.job, self._cluster.rank)]
        addresses = {'worker': self._cluster.workers, 'ps': self._cluster.ps}
        found = {(job, rank): _answers(addresses[job][rank]) for job, rank in others}
        silent, mute = [', '.join(self._cluster.who(rank, job) for job, rank in others
                                  if found[job, rank] is answer) for answer in (False, None)]
        parts = ['%s does not answer%s' % (silent, advice)] * bool(silent)
        if mute:
            parts.append('%s takes connections and says nothing: its process is frozen' % mute)
        return '; '.join(parts) or (
            'all workers and servers answer, so one of them is slow, or has run built.gradients '
            'without the step')


def _answers(address, seconds=2.):
    """Whether a server speaks at an address; None if it takes a connection, and says nothing."""
    try:
        with socket.create_connection(split_address(address), timeout=seconds) as connection:
            # What speaks as no server is another program, which has not got this step, either.
            return speaks_as_server(connection, time.monotonic() + seconds)
    except OSError:
        return False


def silent_servers(cluster):
    """The parameter servers that do not answer, in words; all, if each does."""
    everyone = range(len(cluster.ps))
    silent = [rank for rank in everyone if _answers(cluster.ps[rank]) is not True]
    return ', '.join(cluster.who(rank, 'ps') for rank in silent or everyone)
