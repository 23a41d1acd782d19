"""All workers stop after the same step, whichever of them is told to."""

import signal
import typing

from towers.arguments import check_instance
from towers.api.built import BuiltTowers
from towers.cluster.cluster import Cluster
from towers.cluster.machines import builds_of
from towers.errors import ClusterError
from towers.run.stopping import StopOnSignalHook


class StopTogetherHook(StopOnSignalHook):
    """`StopOnSignalHook` for a cluster: the first signal to any worker makes all stop, and save.

    Without it a worker that stops leaves the others waiting for it in their next step. Use it on
    all workers, among the hooks that come last. Then only one of them has to know how many steps
    there are: all stop when one does, whatever the reason; asynchronous workers when the chief
    does, after the step in which they see it. The end of a worker's data is no such stop, see
    `until_all_end`.

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
          InvalidArgumentError: an argument of another kind.
          ClusterError: `built` was made without a cluster.
        """
        check_instance('cluster', cluster, Cluster, 'a Cluster')
        check_instance('built', built, BuiltTowers, 'what build_towers returned')
        if built.machines is None:
            raise ClusterError('built was made without a cluster: pass cluster= to build_towers, '
                               'too.')
        super(StopTogetherHook, self).__init__(stream)
        self.stopped_by = None
        self._cluster, self._machines = cluster, built.machines
        self._own = str([each.machines for each in builds_of(built)].index(built.machines))
        self.is_told = self._has_said = False
        self._steps = 0  # made when the connection was looked at last

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
        self._steps = 0

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
            self._machines.connection.leave()
            self._learn()
        super(StopTogetherHook, self).end(session)

    def _tell(self):
        connection, number = self._machines.connection, self.received
        if number is not None and not self._has_said and connection is not None:
            self._has_said = True
            connection.stop(number)

    def _is_time(self):
        if self._machines.connection is None:
            return self.received is not None
        self._learn()
        if self._cluster.waits:
            return self._has_ended_a_round() and self.is_told
        return self.is_told or self.received is not None

    def _learn(self):
        connection = self._machines.connection
        self.is_told = self.is_told or connection.is_over
        self.stopped_by = self.stopped_by or connection.stopped_by

    def _has_ended_a_round(self):
        """Whether the call was a step of this hook's build."""
        connection = self._machines.connection
        if connection.made == self._steps:
            return False
        self._steps = connection.made
        return self._own in connection.builds.split()
