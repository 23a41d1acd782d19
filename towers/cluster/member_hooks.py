"""Hooks of the sessions of a cluster's workers: `Member.hooks`."""

import tensorflow.compat.v1 as tf

from towers.cluster.collectives import broadcast_variables
from towers.cluster.coordinator import digest_of
from towers.cluster.machines import builds_of, shared_variables
from towers.cluster.session_guard import not_by_member
from towers.cluster.step_fetches import begin_together
from towers.errors import ClusterError, WorkerLostError


class BeginHook(tf.train.SessionRunHook):
    """Lets the steps of a session be made, and looks at how the session is made.

    `tf.train.MonitoredTrainingSession`, the idiom of programs for TensorFlow's parameter servers,
    knows nothing of `Member.session_creator`. There the others wait for the chief's variables, and
    in a ring, where each worker has its own, they would wait for ever: they initialise theirs here.

    Attributes:
      is_by_member: whether the creator of the session to begin is `Member.session_creator`'s.
    """

    def __init__(self, cluster, built, target, config, step_fetches, connection, lost):
        """
        Args:
          cluster, built, target, config: as for `Member`.
          step_fetches: `StepFetches` of all builds.
          connection: `Connection`, by which steps begin on all workers; or None.
          lost: function that returns the `WorkerLostError` about the worker that is gone, or None.
        """
        self.is_by_member = self._has_begun = False
        self._cluster, self._built, self._lost = cluster, built, lost
        self._target, self._config, self._step_fetches = target, config, step_fetches
        self._connection = connection

    def begin(self):
        """Initialises the variables of a worker whose session would wait for them.

        Raises:
          ClusterError: a session on parameter servers that is not made by the member.
        """
        by_member, self.is_by_member, self._has_begun = self.is_by_member, False, False
        if by_member:
            return
        if self._cluster.kind == 'ps':
            raise not_by_member()
        if self._cluster.kind == 'ring' and not self._cluster.is_chief:
            # They live in the server of this process, and so are there in the session to come.
            with tf.Session(self._target, config=self._config) as session:
                session.run([variable.initializer for variable in tf.global_variables()])

    def after_create_session(self, session, coord):
        """Lets steps be made, and has what needs all workers be made in steps alone.

        Raises:
          WorkerLostError, ClusterError: the session of a ring is made again, see `_OnceCreator`.
        """
        if self._has_begun and self._cluster.kind == 'ring':
            raise self._lost() or lost_session(self._cluster)
        self._has_begun = True
        for built in builds_of(self._built):
            if built.machines.begin is not None:
                session.run(built.machines.begin)
        begin_together(session, self._step_fetches, self._connection)


def lost_session(cluster):
    """`WorkerLostError` about a ring whose session TensorFlow has lost."""
    return WorkerLostError(
        'TensorFlow lost the session of %s, and a ring cannot go on without it: start all '
        'workers again.' % cluster.name)


class TogetherHook(tf.train.SessionRunHook):
    """Begins a session on all workers together, with the variables of worker 0, which restored or
    initialised them."""

    def __init__(self, cluster, built, connection):
        self._cluster, self._built, self._connection = cluster, built, connection
        self._operations, self._names = [], []

    def begin(self):
        """Makes the operations, when all variables are there."""
        variables = shared_variables(self._built)
        self._names = [variable.op.name for variable in variables]
        self._operations = [
            broadcast_variables(self._cluster, variables) if self._cluster.kind == 'ring'
            else self._built.machines.broadcast(variables)]
        self._operations += [built.replicas.refresh() for built in builds_of(self._built)
                             if built.replicas is not None]

    def after_create_session(self, session, coord):
        """Broadcasts, when the sessions of all workers begin.

        Raises:
          ClusterError: they have other variables, and would wait for each other for ever.
          WorkerLostError: a worker is gone.
        """
        if not self._connection.begin_session(digest_of(self._names)):
            models = {variable.op.name for built in builds_of(self._built)
                      for variable in built.variables}
            own = [name for name in self._names if name not in models]
            raise ClusterError(
                'the workers have other variables, besides those of the model; this one has %s%s: '
                'worker 0 gives them to all. Make the same ones on every worker, or what one of '
                'them needs for itself in collections=[tf.GraphKeys.LOCAL_VARIABLES].' % (
                    ', '.join(own[:5]) or 'none', ', …' if len(own) > 5 else ''))
        for operation in self._operations:
            session.run(operation)


class BegunAnewHook(tf.train.SessionRunHook):
    """Says that this worker's session has been made again, and from where it goes on.

    A session that is lost with a server is made again without a word of TensorFlow's.
    """

    def __init__(self, cluster, rounds, say, connection):
        """
        Args:
          cluster: `Cluster` with parameter servers.
          rounds: `RoundsHook`, called before this one; None of asynchronous workers.
          say: called with the line.
          connection: `ServedConnection`, to be told that the session has begun.
        """
        self._cluster, self._rounds, self._say = cluster, rounds, say
        self._connection = connection
        self._is_first, self._global_step = True, None
        self._said = None  # since the last step: one lost server may cost several sessions

    def begin(self):
        self._global_step = tf.train.get_global_step()

    def after_create_session(self, session, coord):
        self._connection.begin_session()
        if not self._is_first:
            step = None if self._global_step is None else int(session.run(self._global_step))
            line = 'beginning anew ' + self._what(step)
            if line != self._said:
                self._say(line)
            self._said = line
        self._is_first = False

    def after_run(self, run_context, run_values):
        """The session has made a step."""
        self._said = None

    def _what(self, step):
        own, chief = self._cluster.who(self._cluster.rank), self._cluster.who(0)
        if self._cluster.is_chief:
            return ('%s, the chief, has lost its session with the servers, and begins again at '
                    '%s' % (own, _place(step)))
        if self._rounds is not None and self._rounds.chief_is_anew:
            return '%s has begun again at %s, and so does %s' % (chief, _place(step), own)
        return '%s has lost its session with the servers, and goes on%s' % (
            own, '' if step is None else ' after step %d' % step)


def _place(step):
    """Where a chief begins that has lost what the servers had."""
    if step == 0:
        return 'step 0'
    return 'its last checkpoint%s' % ('' if step is None else ', of step %d' % step)
