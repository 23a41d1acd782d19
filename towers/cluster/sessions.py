"""Sessions of a cluster's workers: how one begins, which calls are its steps, and how all stop."""

import contextlib
import types
import typing

import tensorflow.compat.v1 as tf

from towers.api.built import BuiltTowers
from towers.arguments import check_instance
from towers.cluster.between_steps import replica_refreshes
from towers.cluster.cluster import Cluster
from towers.cluster.machines import builds_of, shared_variables
from towers.cluster.server_placement import spread
from towers.cluster.worker_step import HOW_TO_BEGIN
from towers.errors import ClusterError
from towers.graph.graph_walk import step_operations
from towers.run.stopping import StopOnSignalHook


def check_built(built):
    """Raises for what is no build with a cluster."""
    check_instance('built', built, BuiltTowers, 'the result of build_towers')
    if built.machines is None:
        raise ClusterError('built was made without a cluster: pass cluster= to build_towers, too.')


class BeginHook(tf.train.SessionRunHook):
    """Begins a session on all workers together, and lets its steps be made."""

    def __init__(self, cluster, built, target, config, connection, lost):
        self._cluster, self._built, self._connection = cluster, built, connection
        self._target, self._config, self._lost = target, config, lost
        self._is_by_member = self._has_begun = self._was_served = False
        self._operations, self._names = [], []

    def creator(self, creator, scaffold):
        """See `Member.session_creator`."""
        if self._was_served:
            raise ClusterError(
                'join with parameter servers is for one session, and this is the second one: train '
                'in one, and evaluate its checkpoints in another process.')
        self._is_by_member, self._was_served, made = True, self._cluster.is_served, []

        def create():
            if made:  # `MonitoredSession` asks for another one when a machine is lost
                raise self._lost()
            made.append(True)
            if self._cluster.is_served:
                spread(self._cluster, self._built, scaffold)
                if not self._cluster.is_chief:  # the chief's is there before
                    self._connection.begin_session()
            return creator.create_session()
        return types.SimpleNamespace(create_session=create)

    def begin(self):
        """Makes the operations that worker 0's values go to the others by."""
        by_member, self._is_by_member, self._has_begun = self._is_by_member, False, False
        if not by_member and self._cluster.is_served:
            raise ClusterError(
                'this session is not made by the member of the cluster, which puts the variables '
                'on the parameter servers when the graph is complete. %s, and not by '
                'tf.train.MonitoredTrainingSession.' % HOW_TO_BEGIN)
        if not by_member and self._cluster.has_addresses and not self._cluster.is_chief:
            # MonitoredTrainingSession waits for the chief's initializers; in a ring each worker's
            # variables live in its own server, for the session to come.
            with tf.Session(self._target, config=self._config) as session:
                session.run([variable.initializer for variable in tf.global_variables()])
        if self._cluster.has_copies:
            variables = shared_variables(self._built)
            self._names = [variable.op.name for variable in variables]
            self._operations = [self._cluster.engine.broadcast(self._cluster, variables)] + (
                replica_refreshes(self._built))

    def after_create_session(self, session, coord):
        """Waits for the sessions of all workers, and lets steps be made. Raises for a session that
        was lost, and for workers with other variables, which would wait for ever."""
        if self._has_begun:
            raise self._lost()
        self._has_begun = True
        builds = builds_of(self._built)
        for built in builds:
            built.machines.begin_session(session)
        # Other workers of parameter servers have waited for the chief, see `creator`.
        waits = not self._cluster.is_served or self._cluster.is_chief
        if waits and self._connection.begin_session(self._names) is not None:
            models = {variable.op.name for built in builds for variable in built.variables}
            raise ClusterError(
                'the workers have other variables, besides those of the model; this one has '
                '%.300s: worker 0 gives them to all. Make the same ones on every worker, or what '
                'one needs for itself in collections=[tf.GraphKeys.LOCAL_VARIABLES].' % (
                    ', '.join(name for name in self._names if name not in models) or 'none'))
        for operation in self._operations:
            session.run(operation)
        _begin_together(session, builds, self._connection)


def _begin_together(session, builds, connection):
    """Has the steps of some builds begin on all workers or on none, in the session of hooks."""
    run, make_callable, known = session.run, session.make_callable, {}

    def steps_of(fetches):
        try:
            fetched = [getattr(leaf, 'op', leaf) for leaf in
                       tf.nest.flatten(fetches, expand_composites=True)]
            key = tuple(op.name if isinstance(op, tf.Operation) else op for op in fetched)
            if key not in known:
                known[key] = _steps_of(fetched, builds)
            return known[key]
        except (TypeError, ValueError, KeyError):  # an object of its own, or a name of nothing
            return list(range(len(builds)))

    def made(steps, step):
        with connection.step(steps) if steps else contextlib.nullcontext():
            return step()

    def checked(fetches, *given, **named):
        return made(steps_of(fetches), lambda: run(fetches, *given, **named))

    def checked_callable(fetches, *given, **named):
        steps, step = steps_of(fetches), make_callable(fetches, *given, **named)
        return lambda *fed, **options: made(steps, lambda: step(*fed, **options))
    session.run, session.make_callable = checked, checked_callable


def _steps_of(fetched, builds):
    """List of the numbers of the builds whose train op some fetches run. `ClusterError` for sums of
    all workers' gradients without their step, which the others do not make."""
    graph = builds[0].train_op.graph
    elements = [graph.as_graph_element(each) for each in fetched]
    names = {op.name for op in step_operations([getattr(each, 'op', each) for each in elements])}
    left_out = [built for built in builds if built.train_op.name not in names]
    if any(not names.isdisjoint(built.machines.names_of_sums) for built in left_out):
        raise ClusterError(
            "session.run takes built.gradients, the sums of all workers' gradients, without the "
            'step: fetch them with built.train_op.')
    return [place for place, built in enumerate(builds) if built not in left_out]


class StopTogetherHook(StopOnSignalHook):
    """`StopOnSignalHook` for a cluster: the first signal to any worker makes all stop, and save.

    Use it on all workers, among the hooks that come last. Then all stop when one does, whatever the
    reason; of asynchronous workers all when the chief does, and another one alone. The end of a
    worker's data is no such stop, see `until_all_end`.

    A worker that would begin one more step gets `tf.errors.OutOfRangeError`, for MonitoredSession
    the end of the training. `received` is None in a worker that stops because another one does.
    """

    def __init__(self, cluster: typing.Any, built: typing.Any, stream: typing.Any = None):
        """
        Args:
          cluster: `Cluster`.
          built: `BuiltTowers`; of several in one graph the one after whose step all stop.
          stream: as for `StopOnSignalHook`.

        Raises:
          ClusterError: `built` was made without a cluster.
        """
        check_instance('cluster', cluster, Cluster, 'a Cluster')
        check_built(built)
        super(StopTogetherHook, self).__init__(stream)
        self._cluster, self._machines, self._connection = cluster, built.machines, None
        self._own = [each.machines for each in builds_of(built)].index(built.machines)
        self._made = 0  # steps, when the connection was looked at last

    @property
    def is_told(self) -> bool:
        """Whether this worker stops because a worker, perhaps itself, has said so."""
        return self._connection is not None and self._connection.is_over

    @property
    def stopped_by(self) -> typing.Tuple[typing.Optional[int], typing.Optional[int]]:
        """`(rank, number)` of the worker that got a signal, and the signal's; or `(None, None)`."""
        if self.received is not None:
            return self._cluster.rank, self.received
        return self._connection and self._connection.stopped_by or (None, None)

    @property
    def stopping_signal(self) -> typing.Optional[int]:
        """The number of the signal that ended the run, of whichever worker; or None."""
        return self.stopped_by[1]

    @property
    def status(self) -> int:
        """The exit status that says so: 128 plus that number; 0 without a signal."""
        return 0 if self.stopping_signal is None else 128 + self.stopping_signal

    def begin(self):
        """A session begins; `ClusterError` if not within `join`."""
        self._connection, self._made = self._machines.connection, 0
        if self._connection is None:
            raise ClusterError('StopTogetherHook is for sessions within towers.join: make the '
                               'session there.')

    def before_run(self, run_context):
        """Says a signal, if there was one."""
        if self.received is not None:
            self._connection.ask(self.received)

    def after_run(self, run_context, run_values):
        """Asks the session to stop when all do: after a step that ends a round."""
        connection, made = self._connection, self._made
        self._made = connection.steps_made
        if (connection.is_over and made < self._made and self._own in connection.builds
                if self._cluster.waits else connection.is_over or self.received is not None):
            run_context.request_stop()

    def end(self, session):
        """Tells the others that this session makes no more steps."""
        self.before_run(None)
        self._connection.leave()
        super(StopTogetherHook, self).end(session)
