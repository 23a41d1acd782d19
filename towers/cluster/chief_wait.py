"""Workers of parameter servers that wait for the chief's first session, and when they give up.

Between `join` and its first step the chief may fail: a checkpoint of another optimizer, a folder
that it cannot write. It notes why on the first server, where the others look while they wait. A
chief that was killed notes nothing, and does not answer. Both may come again, and so may the note
be of an earlier start: a worker gives up at once only where it has seen the chief join, else after
`start_timeout`. One that answers is slow, with a large checkpoint, say, and is waited for.
"""

import time

import tensorflow.compat.v1 as tf

from towers import compat
from towers.cluster.ports import answers
from towers.cluster.wait_notice import Waiting
from towers.cluster.worker_notes import FAILED, FIRST_SERVER, JOINED
from towers.errors import WorkerLostError
from towers.placement.variable_device import only_device

_PAUSE = 1.  # seconds from one look to the next


class AwaitedChief:
    """What a worker knows of the chief until its own first session has begun.

    Attributes:
      has_begun: whether it has; then nobody looks any more: a chief that is lost later is waited
        for, since it goes on from its last checkpoint.
    """

    def __init__(self, cluster, asked, start_timeout, say):
        """
        Args:
          cluster: `Cluster` of a worker that is not the chief.
          asked: `EndedWorkers`, for this use alone.
          start_timeout: seconds from now on in which the chief's session has to begin, if the chief
            has failed or does not answer.
          say: called with lines.
        """
        self.has_begun = False
        self._cluster, self._asked, self._say = cluster, asked, say
        self._start_timeout, self._begun = start_timeout, time.monotonic()
        self._has_joined, self._why, self._looked_at = False, '', None

    def waiting(self):
        """Context in which lines say for whom this worker waits."""
        return Waiting(self._whom, self._start_timeout, self._say)

    def look(self):
        """Looks for the chief, at most once a second.

        Raises:
          WorkerLostError: its session will not begin.
        """
        now = time.monotonic()
        if self.has_begun or self._looked_at is not None and now - self._looked_at < _PAUSE:
            return
        self._asked()
        self._looked_at = time.monotonic()
        note = (self._asked.notes or {}).get(0)
        self._why = note.why.rstrip('.') if note is not None and note.kind == FAILED else ''
        self._has_joined = self._has_joined or note is not None and note.kind == JOINED
        is_late = now - self._begun > self._start_timeout
        why = None
        if self._why and (self._has_joined or is_late):
            why = 'it has ended: %s' % self._why
        elif is_late:
            answer = answers(self._cluster.workers[0])
            if answer is not True:
                why = ('it does not answer' if answer is False else
                       'it takes connections and says nothing: its process is frozen')
        if why is not None:
            raise WorkerLostError(
                '%s cannot begin: the session of %s, the chief, has not begun, and %s. When that '
                'is mended, start the workers again.' % (
                    self._cluster.who(self._cluster.rank), self._cluster.who(0), why))

    def _whom(self):
        return 'the session of %s, the chief%s' % (
            self._cluster.who(0), self._why and ', which has ended: ' + self._why)


class WaitingCreator(tf.train.SessionCreator):
    """Makes sessions when the chief has initialised or restored the variables.

    It looks every second; `tf.train.WorkerSessionCreator` looks every 30 seconds, without a word.
    """

    def __init__(self, scaffold, target, config, chief):
        """
        Args:
          scaffold, target, config: as for `tf.train.WorkerSessionCreator`.
          chief: `AwaitedChief`.
        """
        self._scaffold, self._target, self._config = scaffold, target, config
        self._chief = chief

    def create_session(self):
        self._scaffold.finalize()
        manager = tf.train.SessionManager(
            local_init_op=self._scaffold.local_init_op, ready_op=self._scaffold.ready_op,
            ready_for_local_init_op=self._scaffold.ready_for_local_init_op,
            graph=tf.get_default_graph(), recovery_wait_secs=1)
        if self._chief.has_begun:
            return manager.wait_for_session(self._target, config=self._config)
        with self._chief.waiting():
            while True:
                try:
                    return manager.wait_for_session(self._target, config=self._config,
                                                    max_wait_secs=0.)
                except tf.errors.DeadlineExceededError:  # not ready
                    self._chief.look()
                    time.sleep(_PAUSE)


class ChiefEnd:
    """Whether the chief of asynchronous servers has ended: a variable on the first server.

    Its workers wait for nobody, so that no step tells them. Without a chief nothing is saved, and a
    worker that does not count the steps itself would train for ever.

    Attributes:
      begin: operation by which the chief records that its session has begun.
      end: operation by which the chief records that it has ended.
      has_ended: bool scalar; False before the chief's first session, too, or where the server has
        been started again, and the chief has not yet another session.
    """

    def __init__(self):
        with only_device(FIRST_SERVER):
            ended = tf.Variable(False, trainable=False, use_resource=True,
                                collections=['towers_rounds'], name='chief_has_ended')
            self.begin, self.end = ended.initializer, tf.assign(ended, True).op
            with compat.control_flow_v1():
                self.has_ended = tf.cond(tf.is_variable_initialized(ended), ended.read_value,
                                         lambda: tf.constant(False))
