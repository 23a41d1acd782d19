"""All workers stop after the same step, whichever of them is told to."""

import signal
import typing

from towers.arguments import check_instance
from towers.api.built import BuiltTowers
from towers.cluster.cluster import Cluster
from towers.cluster.machines import builds_of
from towers.errors import ClusterError, InvalidArgumentError
from towers.run.stopping import StopOnSignalHook


class StopTogetherHook(StopOnSignalHook):
    """`StopOnSignalHook` for a cluster: the first signal to any worker makes all stop, and save.

    Without it a worker that stops leaves the others waiting for it in their next step. Use it on
    all workers, among the hooks that come last. Then only one of them has to know how many steps
    there are: in a ring, and with Horovod, all workers stop when one does, on parameter servers
    when the chief does, whatever the reason (asynchronous workers after the step in which they see
    it). The end of a worker's data is no such stop, see `until_all_end`.

    A worker that would begin one more step gets `tf.errors.OutOfRangeError`, which
    `tf.train.MonitoredSession` takes for the end of the training, as at the end of the data.

        with …session(hooks=[stop]) as session:
            while not session.should_stop():
                session.run(built.train_op)
        sys.exit(stop.status)

    Attributes:
      received: as in `StopOnSignalHook`; None in a worker that stops because another one does.
      is_told: whether this worker stops because a worker, perhaps itself, has said so.
      stopped_by: None, or `(rank, number)` of the worker that got a signal, and the signal's, as
        soon as this worker knows of it.
    """

    def __init__(self, cluster: typing.Any, built: typing.Any, stream: typing.Any = None):
        """
        Args:
          cluster: `Cluster`.
          built: `BuiltTowers`. Of several builds in one graph, which all workers step in the same
            order, it is the one that each round of steps ends with: all stop after its step when a
            worker got a signal. A worker ends its loop between two rounds, all of which begin with
            the same steps.
          stream: as for `StopOnSignalHook`.

        Raises:
          InvalidArgumentError: an argument of another kind; `built` was made without a cluster.
        """
        check_instance('cluster', cluster, Cluster, 'a Cluster')
        check_instance('built', built, BuiltTowers, 'what build_towers returned')
        if built.machines is None:
            raise InvalidArgumentError('built was made without a cluster: pass cluster= to '
                                       'build_towers, too.')
        super(StopTogetherHook, self).__init__(stream)
        self.stopped_by = None
        self._cluster, self._machines = cluster, built.machines
        self._built = built
        self._own = str([each.machines for each in builds_of(built)].index(built.machines))
        self.is_told = self._has_said = False
        # Steps made when the connection was looked at last; the builds of the first and the newest.
        self._steps, self._first, self._latest = 0, None, None

    @property
    def stopping_signal(self):
        """The number of the signal that ended the run, to whichever worker it was sent; or None."""
        if self.received is not None:
            return self.received
        return None if self.stopped_by is None else self.stopped_by[1]

    @property
    def status(self):
        """The exit status by which this worker says so: 128 plus that number; 0 without a signal.
        """
        return 0 if self.stopping_signal is None else 128 + self.stopping_signal

    def reason(self):
        """Who was told to stop, in words: `'worker 1 was told to stop (SIGTERM)'`; or None."""
        number = self.stopping_signal
        if number is None:
            return None
        rank = self._cluster.rank if self.received is not None else self.stopped_by[0]
        return 'worker %d was told to stop (%s)' % (rank, signal.Signals(number).name)

    def begin(self):
        """A session begins, whose steps are counted anew."""
        self._steps, self._first, self._latest = 0, None, None

    def before_run(self, run_context):
        """Says a signal, if there was one."""
        self._tell()

    def after_run(self, run_context, run_values):
        """Asks the session to stop when all do."""
        if self._is_time():
            run_context.request_stop()

    def end(self, session):
        """Tells the others that this session makes no more steps."""
        if self._machines.connection is not None:
            self._learn()
            self.is_told = self.is_told or self._machines.chief_has_ended
            self._machines.connection.leave()
            if self._cluster.has_copies:
                self._learn()
        super(StopTogetherHook, self).end(session)

    def noticed(self):
        """Tells the others at once: a step may be under way that waits for one that is gone."""
        self._tell()

    def _tell(self):
        connection, number = self._machines.connection, self.received
        if number is not None and not self._has_said and connection is not None:
            self._has_said = True
            connection.stop(number)

    def _is_time(self):
        if self._machines.connection is None:
            return self.received is not None
        self._learn()
        if self._cluster.has_copies:
            return self._has_ended_a_round() and self.is_told
        is_asked = self._cluster.is_chief and self.stopped_by is not None
        return self.is_told or is_asked or self.received is not None and (
            self._cluster.is_chief or not self._cluster.synchronous)

    def _learn(self):
        connection = self._machines.connection
        self.is_told = self.is_told or connection.is_over
        self.stopped_by = self.stopped_by or connection.stopped_by

    def _has_ended_a_round(self):
        """Whether the call was a step of this hook's build.

        Raises:
          ClusterError: rounds begin with another step, or do not end with this hook's build.
        """
        connection = self._machines.connection
        if connection.made == self._steps:
            return False
        self._steps, builds = connection.made, connection.builds
        self._first = self._first or builds
        if self._latest is not None and self._own in self._latest.split() and (
                self._own not in builds.split() and builds != self._first):
            raise ClusterError(
                'a step of the build that trains %r comes after the build that trains %r, which '
                'StopTogetherHook has, and the first step of the session was another one: give '
                'the hook the build that each round of steps ends with, and begin the session and '
                'all rounds with the same step, on all workers.' % tuple(
                    each.gradients[0][1].op.name for each in (
                        builds_of(self._built)[int(builds.split()[0])], self._built)))
        self._latest = builds
        return self._own in builds.split()
