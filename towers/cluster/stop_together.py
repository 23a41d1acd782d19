"""All workers stop after the same step, whichever of them is told to."""

import typing

import tensorflow.compat.v1 as tf

from towers.arguments import check_instance
from towers.build.built import BuiltTowers
from towers.cluster.cluster import Cluster
from towers.errors import InvalidArgumentError
from towers.run.stopping import StopOnSignalHook


class StopTogetherHook(StopOnSignalHook):
    """`StopOnSignalHook` for a cluster: the first signal to any worker makes all stop, and save.

    Without it a worker that stops leaves the others waiting for it in their next step. Use it on
    all workers, among the hooks that come last. Then only one of them has to know how many steps
    there are: in a ring all workers stop when one does, on parameter servers when the chief does,
    whatever the reason. The end of a worker's data is no such stop, see `until_all_end`.

    Attributes:
      received: as in `StopOnSignalHook`; None in a worker that stops because another one does.
    """

    def __init__(self, cluster: typing.Any, built: typing.Any, stream: typing.Any = None):
        """
        Args:
          cluster: `Cluster`.
          built: `BuiltTowers`.
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
        self._cluster, self._train_op, self._machines = cluster, built.train_op, built.machines
        self._has_said = self._is_told = False
        self._session = None

    def after_create_session(self, session, coord):
        """Installs the handlers, once."""
        super(StopTogetherHook, self).after_create_session(session, coord)
        self._session = session

    def always_fetched(self):
        """The tensor to fetch with every step: whether a worker wants to stop, alike on all."""
        return self._machines.stops

    def before_run(self, run_context):
        """Has that tensor fetched with the step."""
        self._say_so()
        return None if self._machines.stops is None else tf.train.SessionRunArgs(
            self._machines.stops)

    def after_run(self, run_context, run_values):
        """Asks the session to stop when all do."""
        if self._is_time(run_values.results):
            run_context.request_stop()

    def is_due(self):
        """Never: `step_done` can end the session as well."""
        self._say_so()
        return False

    def step_done(self, fetched):
        """Asks the session to stop when all do."""
        if self._is_time(fetched):
            self._coordinator.request_stop()

    def end(self, session):
        """In a ring, a worker that stops by itself runs one more step, which tells the others.

        That step is not saved. Other workers may stop by themselves after the same step; they then
        run one more, too.
        """
        if (self._cluster.kind == 'ring' and not self._is_told
                and self._machines.stops is not None):
            ended = self._machines.data_ended
            if ended is None or not session.run(ended):
                session.run(self._machines.stop)
                try:
                    session.run(self._train_op)
                except (tf.errors.OutOfRangeError, tf.errors.CancelledError):
                    pass  # the data have ended, here or on another worker that stops, too
        super(StopTogetherHook, self).end(session)

    def noticed(self):
        """On parameter servers, lets the watch of a step know that nobody wants to wait long."""
        if self._cluster.kind == 'ps':
            self._machines.told_to_stop = True

    def _say_so(self):
        if self.received is not None and not self._has_said and self._machines.stop is not None:
            self._session.run(self._machines.stop)
            self._has_said = True

    def _is_time(self, stops):
        if stops is None:
            return self.received is not None
        self._is_told = self._is_told or int(stops) > 0
        return self._is_told
