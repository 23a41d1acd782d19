"""The connection of a worker of parameter servers, whose chief may go and come again."""

import socket
import threading
import time

import tensorflow.compat.v1 as tf

from towers.cluster.connection import Connection, Notice, meet
from towers.cluster.coordinator import AGAIN, FIRST, silence_of
from towers.cluster.ports import all_answers, split_address
from towers.errors import ClusterError, WorkerLostError

_PAUSE = 1.  # seconds from one look to the next


class ServedConnection(Connection):
    """As `Connection`; steps ask for nothing, and worker 0 is looked for where it is gone.

    A session that has begun waits for a chief that is gone: it goes on from its last checkpoint.

    Attributes:
      chief_gone: how the chief has ended, in words, while it is gone; else ''.
    """

    def __init__(self, cluster, lines, dead_after, say, on_lost, fingerprint, address):
        """
        Args:
          cluster, lines, dead_after, say, on_lost: as for `Connection`.
          fingerprint: of this worker, see `signature.signature`.
          address: where worker 0 listens.
        """
        self.chief_gone = ''
        self._fingerprint, self._address = fingerprint, address
        self._signalled = self._said = None  # when
        self._since, self._looked, self._waits_for = time.monotonic(), 0., ''
        super(ServedConnection, self).__init__(cluster, lines, dead_after, say, on_lost)

    def begin_session(self, digest=''):
        """Notes that this worker's session has begun."""
        self._has_begun, self._in_step, self._since = True, False, time.monotonic()
        return True

    def begin_step(self, builds):
        """Notes that a step begins."""
        self.steps, self.builds = self.steps + 1, builds
        self._in_step, self._since, self._said = True, time.monotonic(), None

    def step_ended(self):
        """Notes that the step has been made."""
        super(ServedConnection, self).step_ended()
        self._since = time.monotonic()

    def leave(self):
        """Says that this session makes no more steps."""
        self._has_begun = False
        self._send({'type': 'left'})

    def stop(self, number):
        """Says that this worker got a signal: it ends where its step waits for one that is gone."""
        self._signalled = time.monotonic()
        super(ServedConnection, self).stop(number)

    def finish(self):
        """Says that this worker has ended in good order."""
        self._send({'type': 'done'})
        self.close()

    @property
    def waits_since(self):
        """`(time, whether in a step)`: when the newest step, or the pause after it, began; None
        without a session."""
        return (self._since, self._in_step) if self._has_begun else None

    def lose(self, error):
        """Has the process end by an error."""
        self._closed.set()
        self._on_lost(error)

    def _take(self, message):
        kind = message['type']
        if kind == 'stop':
            self.stopped_by = (message.get('rank', 0), message.get('number', 0))
        elif kind == 'over':
            self.is_over = True
        elif kind == 'lost' and message.get('rank') == 0 and self._has_begun:
            self.chief_gone = message.get('why', '')
        else:
            if kind == 'waiting':
                self._waits_for = message.get('why', '')
            super(ServedConnection, self)._take(message)

    def _is_cut(self, why):
        self.chief_gone = self.chief_gone or why
        self._lines.close()

    def _look(self, silence):
        now = time.monotonic()
        if self._is_closed():
            if not self.is_over and now - self._looked > _PAUSE:
                self._looked = now
                self._meet_again()
            self._closed.wait(0.1)
        elif silence < self.dead_after and self.chief_gone == silence_of(self.dead_after):
            self.chief_gone = ''
        elif silence > self.dead_after:
            self.chief_gone = self.chief_gone or silence_of(self.dead_after)
        takes = now - self._since
        if self.chief_gone and self._has_begun and self._in_step and takes > FIRST and (
                self._cluster.synchronous and not self.is_over):
            self._waits_for = '%s, the chief: %s' % (self._cluster.who(0), self.chief_gone)
            if self._said is None or now - self._said > AGAIN:
                self._said = now
                self._say('waiting        for %s. Start it again, and the run goes on'
                          % self._waits_for)
        if self._signalled is not None and self._in_step and (
                now - max(self._signalled, self._since) > self.dead_after):
            self.lose(WorkerLostError(
                '%s was told to stop, and its step takes more than %g seconds: %s. It ends without '
                'saving. Started again, all go on from the last checkpoint.' % (
                    self._cluster.who(self._cluster.rank), self.dead_after,
                    self._waits_for or 'a server or a worker is slow, or gone')))

    def _meet_again(self):
        try:
            connected = socket.create_connection(split_address(self._address), timeout=1.)
        except OSError:
            return
        try:
            lines = meet(self._cluster, self._fingerprint, connected, time.monotonic() + 5.,
                         lambda line: None)
        except ClusterError as error:
            if 'refuses' in str(error):
                self.lose(error)
            return
        with self._sends:
            self._lines = lines
        self._heard, self.chief_gone = time.monotonic(), ''


class ChiefWait:
    """A wait for something that the chief does; a line says so, and where it is gone, it ends."""

    def __init__(self, cluster, connection, whom, start_timeout, say):
        """
        Args:
          cluster, connection: of a worker that is not the chief.
          whom: who is waited for, in words.
          start_timeout: seconds in which a chief that is gone has to come, before the session of
            this worker has begun.
          say: called with lines.
        """
        self._cluster, self._connection = cluster, connection
        self._whom, self._start_timeout = whom, start_timeout
        self._begun, self._notice = time.monotonic(), Notice(say, start_timeout)

    def pause(self, seconds):
        """Waits between two looks.

        Raises:
          WorkerLostError: the chief has failed before its first session, or does not come.
        """
        now, lost = time.monotonic(), self._connection.lost
        why = lost[1] if lost is not None else ''
        if now - self._begun > self._start_timeout and not self._connection.waits_since:
            why = why or self._connection.chief_gone
        if why:
            raise WorkerLostError(
                '%s cannot begin: the session of %s, the chief, has not begun, and %s. When that '
                'is mended, start the workers again.' % (
                    self._cluster.who(self._cluster.rank), self._cluster.who(0), why))
        gone = self._connection.chief_gone
        self._notice.look(self._whom + (gone and ', which is gone: ' + gone))
        time.sleep(seconds)


class WaitingCreator(tf.train.SessionCreator):
    """Makes sessions when the chief has initialised or restored the variables.

    It looks every second; `tf.train.WorkerSessionCreator` looks every 30 seconds, without a word.
    """

    def __init__(self, scaffold, target, config, make_wait):
        """
        Args:
          scaffold, target, config: as for `tf.train.WorkerSessionCreator`.
          make_wait: function from words to a `ChiefWait`.
        """
        self._scaffold, self._target, self._config = scaffold, target, config
        self._make_wait = make_wait

    def create_session(self):
        self._scaffold.finalize()
        manager = tf.train.SessionManager(
            local_init_op=self._scaffold.local_init_op, ready_op=self._scaffold.ready_op,
            ready_for_local_init_op=self._scaffold.ready_for_local_init_op,
            graph=tf.get_default_graph(), recovery_wait_secs=1)
        wait = self._make_wait('the session of ')
        while True:
            try:
                return manager.wait_for_session(self._target, config=self._config,
                                                max_wait_secs=0.)
            except tf.errors.DeadlineExceededError:  # not ready
                wait.pause(_PAUSE)


class ServerWatch:
    """A thread that says which server does not answer when a step, or a pause, takes long."""

    def __init__(self, cluster, connection, seconds, say):
        """
        Args:
          cluster: `Cluster` with parameter servers.
          connection: `ServedConnection` of this worker.
          seconds: how long a step may take before a line is written.
          say: called with the lines, in the thread.
        """
        self._cluster, self._connection, self._say = cluster, connection, say
        self._seconds, self._stop = seconds, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name='towers-servers')
        self._thread.start()

    def close(self):
        """Ends the thread."""
        self._stop.set()

    def _run(self):
        said_at = said = None
        while not self._stop.wait(min(self._seconds / 5., _PAUSE)):
            at = self._connection.waits_since
            if at is None or time.monotonic() - at[0] < self._seconds:
                continue
            silent = silent_servers(self._cluster, ' does not answer: start it again, and the run '
                                    'goes on', ' takes connections and says nothing: its process '
                                    'is frozen')
            now, is_new = time.monotonic(), said_at is None or at[0] > said_at
            if silent and at == self._connection.waits_since and (
                    is_new or silent != said or now - said_at > AGAIN):
                said, said_at = silent, now
                self._say('waiting        %s more than %g seconds; %s' % (
                    'the step takes' if at[1] else 'no step for', self._seconds, silent))


def silent_servers(cluster, gone='', frozen=''):
    """The parameter servers that do not answer, in words; '' if all do.

    Args:
      cluster: `Cluster`.
      gone, frozen: what to say behind the name of one that takes no connection, or is silent.
    """
    return '; '.join(cluster.who(rank, 'ps') + (gone if answer is False else frozen)
                     for rank, answer in enumerate(all_answers(cluster.ps)) if answer is not True)
