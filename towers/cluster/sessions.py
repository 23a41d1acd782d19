"""Sessions of a cluster's workers: how one begins, which calls are its steps, what is done after
steps, and how all stop.

Every worker of a ring, and of Horovod, makes the update by itself. One that is computed from random
numbers, the time, or what one worker alone knows would let their weights drift apart without an
error. So all workers compare checksums of what the update writes: after steps 1, 2, 4, 8, … of a
session, and after the first step from each checkpoint on, for which the chief asks.
"""

import functools
import signal
import typing

import tensorflow.compat.v1 as tf

from towers.api.built import BuiltTowers
from towers.arguments import check_instance
from towers.cluster.cluster import Cluster
from towers.cluster.data_end import HOW
from towers.cluster.machines import builds_of, shared_variables
from towers.cluster.ring import Collectives
from towers.cluster.server_placement import spread
from towers.errors import ClusterError
from towers.graph.graph_walk import step_operations
from towers.placement.variable_device import only_device
from towers.run.stopping import StopOnSignalHook

_MOST = 1 << 26  # numbers of a variable that are looked at: fewer than 2 GB, as `serialize` takes
_SIZE = 1 << 52  # how many checksums there are


def check_built(built):
    """Raises for what is no build with a cluster."""
    check_instance('built', built, BuiltTowers, 'what build_towers returned')
    if built.machines is None:
        raise ClusterError('built was made without a cluster: pass cluster= to build_towers, too.')


class BeginHook(tf.train.SessionRunHook):
    """Begins a session on all workers together, and lets its steps be made.

    `tf.train.MonitoredTrainingSession`, the idiom of programs for TensorFlow's parameter servers,
    knows nothing of `creator`. There the others wait for the chief's variables, and in a ring,
    where each worker has its own, they would wait for ever: they initialise theirs here.
    """

    def __init__(self, cluster, built, target, config, connection, lost):
        """
        Args:
          cluster, built, target, config, connection: as for `Member`.
          lost: function that returns the `WorkerLostError` about a lost session.
        """
        self._cluster, self._built, self._connection = cluster, built, connection
        self._target, self._config, self._lost = target, config, lost
        self._is_by_member = self._has_begun = self._was_served = False
        self._operations, self._names = [], []

    def creator(self, creator, scaffold):
        """The `tf.train.SessionCreator` for `Member.session_creator`."""
        if self._was_served:
            raise ClusterError(
                'join with parameter servers is for one session, and this is the second one: train '
                'in one, and evaluate its checkpoints in another process.')
        self._is_by_member, self._was_served = True, self._cluster.is_served

        def create():
            if self._cluster.is_served:
                spread(self._cluster, self._built, scaffold)
                if not self._cluster.is_chief:  # the chief's is there before
                    self._connection.begin_session()
            return creator.create_session()
        return _OneSession(create, self._lost)

    def begin(self):
        """Makes the operations that worker 0's values go to the others by.

        Raises:
          ClusterError: a session on parameter servers that is not made by the member.
        """
        by_member, self._is_by_member, self._has_begun = self._is_by_member, False, False
        if not by_member and self._cluster.is_served:
            raise ClusterError(
                'this session is not made by the member of the cluster, which puts the variables '
                'on the parameter servers when the graph is complete: without that, all operations '
                'of all workers would be on one server. %s, and not by '
                'tf.train.MonitoredTrainingSession.' % HOW)
        if not by_member and self._cluster.has_addresses and not self._cluster.is_chief:
            # They live in the server of this process, and so are there in the session to come.
            with tf.Session(self._target, config=self._config) as session:
                session.run([variable.initializer for variable in tf.global_variables()])
        if self._cluster.has_copies:
            variables = shared_variables(self._built)
            self._names = [variable.op.name for variable in variables]
            self._operations = [self._built.machines.broadcast(variables)] + _refreshes(self._built)

    def after_create_session(self, session, coord):
        """Waits for the sessions of all workers, and lets steps be made.

        Raises:
          ClusterError: the workers have other variables, and would wait for each other for ever.
          WorkerLostError: a worker is gone, or the session, which is made again.
        """
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
            own = [name for name in self._names if name not in models]
            raise ClusterError(
                'the workers have other variables, besides those of the model; this one has %s%s: '
                'worker 0 gives them to all. Make the same ones on every worker, or what one of '
                'them needs for itself in collections=[tf.GraphKeys.LOCAL_VARIABLES].' % (
                    ', '.join(own[:5]) or 'none', ', …' if len(own) > 5 else ''))
        for operation in self._operations:
            session.run(operation)
        _begin_together(session, builds, self._connection)


class _OneSession(tf.train.SessionCreator):
    """Makes one session. When it is asked for another one, a machine is lost: `MonitoredSession`
    would go on, and a cluster cannot."""

    def __init__(self, create, lost):
        self._create, self._lost, self._made = create, lost, False

    def create_session(self):
        """The session; raises `WorkerLostError` when it is asked for again."""
        if self._made:
            raise self._lost()
        self._made = True
        return self._create()


def _refreshes(built):
    """List of the operations that give towers' replicas what the variables are now."""
    return [each.replicas.refresh() for each in builds_of(built) if each.replicas is not None]


def _begin_together(session, builds, connection):
    """Has the steps of a session begin on all workers or on none, and refuses parts of them.

    Args:
      session: the `tf.Session` of which the hooks are told: what they fetch is seen nowhere else.
        One worker alone may look at something else.
      builds: list of the `BuiltTowers` whose steps count.
      connection: `Connection`.
    """
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
            return ' '.join(map(str, range(len(builds))))

    def made(steps, step):
        if not steps:
            return step()
        connection.begin_step(steps)
        result = step()
        connection.step_ended()
        return result

    @functools.wraps(run)
    def checked(fetches, *given, **named):
        return made(steps_of(fetches), lambda: run(fetches, *given, **named))

    @functools.wraps(make_callable)
    def checked_callable(fetches, *given, **named):
        steps, step = steps_of(fetches), make_callable(fetches, *given, **named)
        return lambda *fed, **options: made(steps, lambda: step(*fed, **options))
    session.run, session.make_callable = checked, checked_callable


def _steps_of(fetched, builds):
    """The numbers of the builds whose train op some fetches run, in words: `'0'`, `'0 1'`; or ''.

    Raises:
      ClusterError: they take sums of all workers' gradients without their step: the other workers
        would wait, or take these sums for those of their next step.
    """
    graph = builds[0].train_op.graph
    elements = [graph.as_graph_element(each) for each in fetched]
    names = {op.name for op in step_operations([getattr(each, 'op', each) for each in elements])}
    left_out = [built for built in builds if built.train_op.name not in names]
    if any(not names.isdisjoint(built.machines.sums) for built in left_out):
        raise ClusterError(
            "session.run takes built.gradients, the sums of all workers' gradients, without the "
            'step, which alone brings the workers together: fetch them, or a summary of them, with '
            'built.train_op. Beside a hook that fetches them in every call, look at other things '
            'by session.run_step_fn(lambda step_context: step_context.session.run(…)).')
    return ' '.join(str(place) for place, built in enumerate(builds) if built not in left_out)


class _AfterSteps(tf.train.SessionRunHook):
    """Does something after the same steps of a session on all workers: `after_step(session, n)`."""

    def __init__(self, cluster, built, connection):
        """The arguments are those of `Member`."""
        self._cluster, self._built, self._connection = cluster, built, connection
        self._session, self._steps = None, 0

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


class AskForCheck(tf.train.CheckpointSaverListener):
    """Has the chief ask for a check after the next step when it has saved."""

    def __init__(self, connection):
        self._connection = connection

    def after_save(self, session, global_step_value):
        """Asks."""
        self._connection.ask_for_check()


class AveragingHook(_AfterSteps):
    """Local steps: averages the variables of all workers after every K steps of a session, and at
    its end.

    Each worker updates its own weights by its own gradients, and nothing travels in a step. Then

        v  <-  (v_0 + … + v_{W-1}) / W

    over the W workers, of weights, optimizer state and moving averages alike (local SGD: Stich,
    "Local SGD Converges Fast and Communicates Little", 2019; K is 100 in speech recognition by
    RETURNN). The result is no longer the gradient of one device on all examples.
    """

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
        self._operations = [tf.group(*written)] + _refreshes(self._built)

    def after_step(self, session, steps):
        """Averages if it is time, as it is at the end."""
        if steps % self._cluster.every == 0:
            self._average(session)

    def end(self, session):
        """Averages the steps since the last time: the last checkpoint has the mean."""
        self._connection.leave()  # the others may wait for one more step
        if self._connection.made % self._cluster.every:
            self._average(session)

    def _average(self, session):
        for operation in self._operations:
            session.run(operation)


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
        check_built(built)
        super(StopTogetherHook, self).__init__(stream)
        self._cluster, self._machines, self._connection = cluster, built.machines, None
        self._own = str([each.machines for each in builds_of(built)].index(built.machines))
        self._made = 0  # steps, when the connection was looked at last

    @property
    def is_told(self):
        """Whether this worker stops because a worker, perhaps itself, has said so."""
        return self._connection is not None and self._connection.is_over

    @property
    def stopped_by(self):
        """None, or `(rank, number)` of the worker that got a signal, and the signal's."""
        return None if self._connection is None else self._connection.stopped_by

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
        """A session begins, whose steps are counted anew; `ClusterError` if not within `join`."""
        self._connection, self._made = self._machines.connection, 0
        if self._connection is None:
            raise ClusterError('StopTogetherHook is for sessions within towers.join: make the '
                               'session there.')

    def before_run(self, run_context):
        """Says a signal, if there was one."""
        if self.received is not None:
            self._connection.stop(self.received)

    def after_run(self, run_context, run_values):
        """Asks the session to stop when all do: after a step that ends a round."""
        connection, made = self._connection, self._made
        self._made = connection.made
        if (connection.is_over and made < self._made and self._own in connection.builds.split()
                if self._cluster.waits else connection.is_over or self.received is not None):
            run_context.request_stop()

    def end(self, session):
        """Tells the others that this session makes no more steps."""
        self.before_run(None)
        self._connection.leave()
        super(StopTogetherHook, self).end(session)
