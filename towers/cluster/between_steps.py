"""What workers do between two steps in a cluster where each worker makes the update itself: they
check that all have the same weights (`DriftHook`), or take the mean of their weights, which differ
(`AveragingHook`)."""

import typing

import tensorflow.compat.v1 as tf

from towers.cluster.checksums import checksum
from towers.cluster.collectives import Collectives
from towers.cluster.machines import builds_of, shared_variables
from towers.errors import ClusterError
from towers.gradients.gradient_pairs import variables_of
from towers.graph.graph_walk import operation_names
from towers.placement.variable_device import only_device


def replica_refreshes(built: typing.Any) -> typing.List[tf.Operation]:
    """The operations that give towers' replicas the present values of their variables."""
    return [build.replicas.refresh() for build in builds_of(built) if build.replicas is not None]


class _AfterSteps(tf.train.SessionRunHook):
    """Does something after the same steps of a session on all workers: `after_step(session, n)`."""

    def __init__(self, cluster: typing.Any, built: typing.Any, connection: typing.Any):
        """
        Args:
          cluster: the `Cluster`.
          built: one of the builds of the graph.
          connection: the `Connection` of this worker.
        """
        self._cluster = cluster
        self._built = built
        self._connection = connection
        self._steps = 0  # that the session had made at the last call of `after_run`

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator) -> None:
        """Begins to count the steps of a new session."""
        self._steps = 0

    def after_run(self, run_context: tf.train.SessionRunContext,
                  run_values: tf.train.SessionRunValues) -> None:
        """Calls `after_step` if the call of the session was a step. A fetch that this worker makes
        alone is no step."""
        has_made_step = self._connection.steps_made > self._steps
        if has_made_step:
            self._steps = self._connection.steps_made
            self.after_step(run_context.session, self._steps)

    def after_step(self, session: tf.Session, steps: int) -> None:
        """Does the work of the hook; called after each step, with the number of `steps` that the
        session has made."""
        raise NotImplementedError


class DriftHook(_AfterSteps):
    """Compares the workers' checksums of the variables that the update writes: after steps 1, 2, 4,
    8, … of a session, and after the first step that follows each checkpoint. An update that is
    computed from random numbers or the time would let the workers' weights drift apart."""

    def begin(self) -> None:
        """Makes the checksums, when all variables are there."""
        variables = self._compared_variables()
        self._names = [variable.op.name for variable in variables]
        self._checksums: typing.List[tf.Tensor] = []
        with only_device('/cpu:0'), tf.name_scope('checksums'):
            for variable in variables:
                previous = self._checksums[-1:]
                with tf.control_dependencies(previous):  # one variable at a time
                    self._checksums.append(checksum(variable))

    def _compared_variables(self) -> typing.List[tf.Variable]:
        """The variables whose checksums are compared, in the order of the search for a difference.
        The trained variables come first, since a difference in another variable is likely to come
        from them."""
        trained_names = set()
        for build in builds_of(self._built):
            trained_names.update(operation_names(variables_of(build.gradients)))
        trained = []
        others = []
        names_of_others = self._names_of_compared_state()
        for variable in shared_variables(self._built):
            if variable.op.name in trained_names:
                trained.append(variable)
            elif variable.op.name in names_of_others:
                others.append(variable)
        return trained + others

    def _names_of_compared_state(self) -> typing.Set[str]:
        """Names of variables, trained ones among them, that are the same on all workers: the
        variables that the update writes, such as slots, and the variables whose values worker 0
        gives to the others in each step. The set is empty with `compare='variables'`: then workers
        may have different optimizers, and so different slots."""
        names: typing.Set[str] = set()
        if self._cluster.compare == 'variables':
            return names
        for build in builds_of(self._built):
            written_by_update = build.machines.written
            given_by_worker_0 = build.machines.state
            names.update(written_by_update)
            names.update(operation_names(given_by_worker_0))
        return names

    def after_step(self, session: tf.Session, steps: int) -> None:
        """Compares after the steps that the class names; raises `ClusterError` about the first
        variable that differs."""
        is_power_of_two = steps & (steps - 1) == 0
        was_asked_for = self._connection.checks  # by the chief, which has saved a checkpoint
        if not is_power_of_two and not was_asked_for:
            return
        checksums = [[name, int(checksum)] for name, checksum in
                     zip(self._names, session.run(self._checksums))]
        rank_of_different = self._connection.differing(checksums)
        if rank_of_different is None:  # all have worker 0's checksums, or a worker has left
            return
        name, rank = self._first_difference(checksums)
        global_step = self._built.global_step
        step = steps if global_step is None else session.run(global_step)
        raise ClusterError(
            'after step %d the variable %r of %s is not that of worker 0: each worker '
            'makes the update itself. Compute it from gradients, variables and the global step '
            '(noise by tf.random.stateless_normal(shape, seed=[1, global_step])), and write the '
            'same on every worker between steps.' % (step, name, self._cluster.who(rank)))

    def _first_difference(self, checksums: typing.List[list]) -> typing.Tuple[str, int]:
        """The name of the first variable that differs, and the rank of the first worker where it
        does. All workers call this when their lists of checksums differ, and compare the variables
        one after the other.

        Args:
          checksums: `[name, checksum]` of each variable on this worker.
        """
        for name_and_checksum in checksums:
            rank = self._connection.differing(name_and_checksum)
            if rank is not None:
                return name_and_checksum[0], rank
        raise ClusterError('the weights of the workers differ, and a worker has left while they '
                           'looked for the variable: see what that one says.')


class AskForCheck(tf.train.CheckpointSaverListener):
    """Makes the chief, when it has saved a checkpoint, ask for a comparison of weights after the
    next step."""

    def __init__(self, connection: typing.Any):
        """Takes the chief's `Connection`, by which it asks."""
        self._connection = connection

    def after_save(self, session: tf.Session, global_step_value: int) -> None:
        """Asks for the comparison."""
        self._connection.ask(check=True)


class AveragingHook(_AfterSteps):
    """Local steps: each worker updates its own weights by its own gradients. After every K steps of
    a session, and at its end, each variable gets its mean over the W workers, (v_0 + … + v_{W-1}) /
    W: weights, optimizer state and moving averages alike (Stich, "Local SGD Converges Fast and
    Communicates Little", 2019)."""

    def begin(self) -> None:
        """Makes the operations that average, when all variables are there."""
        ring = Collectives(self._cluster)
        awaited: typing.Any = tf.no_op()
        assignments = []
        for variable in shared_variables(self._built):
            if not variable.dtype.is_floating:  # a counter, which all workers count alike
                continue
            with only_device('/cpu:0'), tf.name_scope('average'):
                # Each variable is read when the message before has come: memory holds a copy of one
                # variable at a time.
                with tf.control_dependencies([awaited]):
                    value = variable.read_value()
                    mean, awaited = ring.reduce_in_pieces(value, awaited, mean=True)
                assignments.append(tf.assign(variable, mean).op)
        average = tf.group(*assignments)
        self._operations = [average] + replica_refreshes(self._built)

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator) -> None:
        """Begins to count the steps of a new session."""
        super(AveragingHook, self).after_create_session(session, coord)
        self._steps_averaged = 0  # how many steps had been begun at the newest average

    def after_step(self, session: tf.Session, steps: int) -> None:
        """Averages after every K steps."""
        if steps % self._cluster.every == 0:
            self._average(session)

    def end(self, session: tf.Session) -> None:
        """Averages what has changed since the newest average, so that the last checkpoint has the
        mean."""
        # First this worker says that it makes no more steps. Else the others, which may wait for it
        # to begin one more step, would never come to this average, which needs all workers.
        self._connection.leave()
        # Steps are begun by all workers or by none. So all decide the same here, also where the
        # newest step has failed on one of them.
        has_begun_steps_since = self._connection.steps_begun != self._steps_averaged
        if has_begun_steps_since:
            self._average(session)

    def _average(self, session: tf.Session) -> None:
        """Gives all workers the mean of their variables."""
        self._steps_averaged = self._connection.steps_begun
        for operation in self._operations:
            session.run(operation)
