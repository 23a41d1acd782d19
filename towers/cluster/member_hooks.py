"""Hooks of the sessions of a cluster's workers: `Member.hooks`; and the maker of sessions.

Every worker of a ring, and of Horovod, makes the update by itself. One that is computed from random
numbers, the time, or what one worker alone knows would let their weights drift apart without an
error. So all workers compare checksums of what the update writes: after steps 1, 2, 4, 8, … of a
session, and after the first step from each checkpoint on, for which the chief asks.
"""

import tensorflow.compat.v1 as tf

from towers.cluster.ring import Collectives
from towers.cluster.machines import builds_of, shared_variables
from towers.cluster.server_placement import spread
from towers.cluster.session_steps import begin_together, not_by_member
from towers.errors import ClusterError
from towers.placement.variable_device import only_device

_MOST = 1 << 26  # numbers of a variable that are looked at: fewer than 2 GB, as `serialize` takes
_SIZE = 1 << 52  # how many checksums there are


class BeginHook(tf.train.SessionRunHook):
    """Begins a session on all workers together, and lets its steps be made.

    `tf.train.MonitoredTrainingSession`, the idiom of programs for TensorFlow's parameter servers,
    knows nothing of `Member.session_creator`. There the others wait for the chief's variables, and
    in a ring, where each worker has its own, they would wait for ever: they initialise theirs here.

    Attributes:
      is_by_member: whether the creator of the session to begin is `Member.session_creator`'s.
    """

    def __init__(self, cluster, built, target, config, connection, lost):
        """
        Args:
          cluster, built, target, config, connection: as for `Member`.
          lost: function that returns the `WorkerLostError` about a lost session.
        """
        self.is_by_member = self._has_begun = False
        self._cluster, self._built, self._connection = cluster, built, connection
        self._target, self._config, self._lost = target, config, lost
        self._operations, self._names = [], []

    def begin(self):
        """Makes the operations that worker 0's values go to the others by.

        Raises:
          ClusterError: a session on parameter servers that is not made by the member.
        """
        by_member, self.is_by_member, self._has_begun = self.is_by_member, False, False
        if not by_member and self._cluster.kind == 'ps':
            raise not_by_member()
        if not by_member and self._cluster.kind == 'ring' and not self._cluster.is_chief:
            # They live in the server of this process, and so are there in the session to come.
            with tf.Session(self._target, config=self._config) as session:
                session.run([variable.initializer for variable in tf.global_variables()])
        if self._cluster.has_copies:
            variables = shared_variables(self._built)
            self._names = [variable.op.name for variable in variables]
            self._operations = [self._built.machines.broadcast(variables)] + [
                built.replicas.refresh() for built in builds_of(self._built)
                if built.replicas is not None]

    def after_create_session(self, session, coord):
        """Waits for the sessions of all workers, and lets steps be made.

        Raises:
          ClusterError: the workers have other variables, and would wait for each other for ever.
          WorkerLostError: a worker is gone, or the session, which is made again.
        """
        if self._has_begun:
            raise self._lost()
        self._has_begun = True
        for built in builds_of(self._built):
            built.machines.begin_session(session)
        # Other workers of parameter servers have waited for the chief, see `MemberCreator`.
        waits = self._cluster.kind != 'ps' or self._cluster.is_chief
        if waits and self._connection.begin_session(self._names) is not None:
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
        begin_together(session, builds_of(self._built), self._connection)


class MemberCreator(tf.train.SessionCreator):
    """Makes one session. When it is asked for another one, a machine is lost: `MonitoredSession`
    would go on, and a cluster cannot."""

    def __init__(self, cluster, built, creator, scaffold, connection, lost):
        """
        Args:
          cluster, built, connection, lost: as for `BeginHook`.
          creator: the `tf.train.SessionCreator` that makes the session.
          scaffold: the creator's `tf.train.Scaffold`.
        """
        self._cluster, self._built, self._connection = cluster, built, connection
        self._creator, self._scaffold, self._lost = creator, scaffold, lost
        self._made = False

    def create_session(self):
        """The session; on parameter servers the chief's is there before the others'.

        Raises:
          WorkerLostError: it is asked for again, or another worker is gone.
        """
        if self._made:
            raise self._lost()
        self._made = True
        if self._cluster.kind == 'ps':
            spread(self._cluster, self._built, self._scaffold)
            if not self._cluster.is_chief:
                self._connection.begin_session()
        return self._creator.create_session()


class _AfterSteps(tf.train.SessionRunHook):
    """Does something after the same steps of a session on all workers: `after_step(session, n)`."""

    def __init__(self, connection):
        self._connection, self._session, self._steps = connection, None, 0

    def after_create_session(self, session, coord):
        """Steps are counted from the beginning of a session, which is one on all workers."""
        self._session, self._steps = session, 0

    def after_run(self, run_context, run_values):
        """A call was made, a step or a look at something else by one worker alone."""
        if self._steps != self._connection.made:
            self._steps = self._connection.made
            self.after_step(self._session, self._steps)


class DriftHook(_AfterSteps):
    """Compares the workers' checksums."""

    def __init__(self, built, connection):
        """
        Args:
          built, connection: as for `Member`.
        """
        super(DriftHook, self).__init__(connection)
        self._built, self._names, self._sums = built, [], []

    def begin(self):
        """Makes the operations, when all variables are there."""
        builds = builds_of(self._built)
        trained = {variable.op.name for each in builds for _, variable in each.gradients}
        names = {name for each in builds for name in each.machines.written}
        names |= {variable.op.name for each in builds for variable in each.machines.state}
        variables = sorted(
            (each for each in shared_variables(self._built) if each.op.name in names),
            key=lambda each: each.op.name not in trained)
        self._names, self._sums = [variable.op.name for variable in variables], []
        with only_device('/cpu:0'), tf.name_scope('checksums'):
            for variable in variables:
                with tf.control_dependencies(self._sums[-1:]):  # a copy of one variable at a time
                    value = tf.reshape(variable.read_value(), [-1])[:_MOST]
                    self._sums.append(tf.strings.to_hash_bucket_fast(
                        tf.io.serialize_tensor(value), _SIZE))

    def after_step(self, session, steps):
        """Compares if it is time.

        Raises:
          ClusterError: a variable is another one on some worker.
        """
        if not self._connection.checks and steps & (steps - 1):
            return
        sums = [[name, int(each)] for name, each in
                zip(self._names, session.run(self._sums))]
        if self._connection.differing(sums) is None:
            return
        for each in sums:
            worker = self._connection.differing(each)
            if worker is not None:
                break
        counted = self._built.global_step
        raise ClusterError(
            'after step %d the variable %r of worker %d is not that of worker 0: each worker '
            'makes the update itself, and has computed it from something else, or the program '
            'has written it between two steps. Compute the update from gradients, variables '
            'and the global step (noise by tf.random.stateless_normal(shape, seed=[1, '
            'global_step])); let UPDATE_OPS write what else it needs to a variable, which then '
            "has worker 0's value; and write between two steps the same on every worker." % (
                steps if counted is None else session.run(counted), each[0], worker))


class AveragingHook(_AfterSteps):
    """Local steps: averages the variables of all workers after every K steps of a session, and at
    its end.

    Each worker updates its own weights by its own gradients, and nothing travels in a step. Then

        v  <-  (v_0 + … + v_{W-1}) / W

    over the W workers, of weights, optimizer state and moving averages alike (local SGD: Stich,
    "Local SGD Converges Fast and Communicates Little", 2019; K is 100 in speech recognition by
    RETURNN). The result is no longer the gradient of one device on all examples.
    """

    def __init__(self, cluster, built, connection):
        """
        Args:
          cluster, built, connection: as for `Member`.
        """
        super(AveragingHook, self).__init__(connection)
        self._cluster, self._built, self._operations = cluster, built, []

    def begin(self):
        """Makes the operations, when all variables are there."""
        ring, last, written = Collectives(self._cluster), tf.no_op(), []
        for variable in shared_variables(self._built):
            if not variable.dtype.is_floating:
                continue  # counters, which all workers count alike
            with only_device('/cpu:0'), tf.name_scope('average'):
                with tf.control_dependencies([last]):  # a copy of one variable at a time
                    mean, last = ring.reduce_gradient(variable.read_value(), True, last)
                written.append(tf.assign(variable, mean).op)
        self._operations = [tf.group(*written)]
        self._operations += [built.replicas.refresh() for built in builds_of(self._built)
                             if built.replicas is not None]

    def after_step(self, session, steps):
        """Averages if it is time."""
        if steps % self._cluster.every == 0:
            self._average(session)

    def end(self, session):
        """Averages the steps since the last time: the last checkpoint has the mean."""
        if self._connection.made % self._cluster.every:
            self._average(session)

    def _average(self, session):
        for operation in self._operations:
            session.run(operation)


class AskForCheck(tf.train.CheckpointSaverListener):
    """Has the chief ask for a check when it has saved."""

    def __init__(self, connection):
        self._connection = connection

    def after_save(self, session, global_step_value):
        """Asks, for after the next step."""
        self._connection.ask_for_check()
