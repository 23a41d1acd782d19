"""What workers do between two steps, where each makes the update itself: they check that all have
the same weights (`DriftHook`), or take the mean of everyone's own (`AveragingHook`)."""

import typing

import tensorflow.compat.v1 as tf

from towers.cluster.collectives import Collectives
from towers.cluster.machines import builds_of, shared_variables
from towers.errors import ClusterError
from towers.placement.variable_device import only_device

_MOST = 1 << 26  # numbers of a variable that are looked at: fewer than 2 GB, as `serialize` takes


def replica_refreshes(built: typing.Any) -> typing.List[tf.Operation]:
    """The operations that give towers' replicas what the variables are now."""
    return [each.replicas.refresh() for each in builds_of(built) if each.replicas is not None]


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
        self._steps = 0  # of the session, when the connection was looked at last

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator) -> None:
        """Begins to count the steps of a new session."""
        self._steps = 0

    def after_run(self, run_context: tf.train.SessionRunContext,
                  run_values: tf.train.SessionRunValues) -> None:
        """Looks whether the call was a step; it may be a look by one worker alone."""
        if self._steps != self._connection.steps_made:
            self._steps = self._connection.steps_made
            self.after_step(run_context.session, self._steps)

    def after_step(self, session: tf.Session, steps: int) -> None:
        """Does it, after so many `steps` of the session."""
        raise NotImplementedError


class DriftHook(_AfterSteps):
    """Compares checksums of what the update writes: after steps 1, 2, 4, 8, … of a session, and
    after the first step from each checkpoint on. An update that is computed from random numbers or
    the time would let the workers' weights drift apart."""

    def begin(self) -> None:
        """Makes the operations, when all variables are there."""
        variables = self._compared_variables()
        self._names = [variable.op.name for variable in variables]
        self._checksums: typing.List[tf.Tensor] = []
        with only_device('/cpu:0'), tf.name_scope('checksums'):
            for variable in variables:
                last = self._checksums[-1:]
                with tf.control_dependencies(last):  # a copy of one variable at a time
                    value = tf.reshape(variable.read_value(), [-1])[:_MOST]
                    self._checksums.append(tf.strings.to_hash_bucket_fast(
                        tf.io.serialize_tensor(value), 1 << 52))

    def _compared_variables(self) -> typing.List[tf.Variable]:
        """The variables that the update writes, or worker 0 gives to the others; those that are
        trained come first. Programs that mean to differ may have other slots, which do not
        count."""
        builds = builds_of(self._built)
        trained = {variable.op.name for each in builds for _, variable in each.gradients}
        names = set(trained)
        if self._cluster.compare == 'program':
            for each in builds:
                names.update(each.machines.written)
                names.update(variable.op.name for variable in each.machines.state)
        variables = [variable for variable in shared_variables(self._built)
                     if variable.op.name in names]
        return sorted(variables, key=lambda variable: variable.op.name not in trained)

    def after_step(self, session: tf.Session, steps: int) -> None:
        """Compares if it is time; raises `ClusterError` about the first variable that differs."""
        is_power_of_two = steps & (steps - 1) == 0
        if not is_power_of_two and not self._connection.checks:
            return
        checksums = [[name, int(checksum)] for name, checksum in
                     zip(self._names, session.run(self._checksums))]
        if self._connection.differing(checksums) is None:
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
        """The name of the first variable that differs, and the rank of the first worker whose
        `[name, checksum]` is not that of worker 0; all workers ask alike."""
        for name_and_checksum in checksums:
            rank = self._connection.differing(name_and_checksum)
            if rank is not None:
                return name_and_checksum[0], rank
        raise ClusterError('the weights of the workers differ, and a worker has left while they '
                           'looked for the variable: see what that one says.')


class AskForCheck(tf.train.CheckpointSaverListener):
    """Makes the chief ask for a check after the next step when it has saved."""

    def __init__(self, connection: typing.Any):
        """Takes the chief's `Connection`, by which it asks."""
        self._connection = connection

    def after_save(self, session: tf.Session, global_step_value: int) -> None:
        """Asks."""
        self._connection.ask(check=True)


class AveragingHook(_AfterSteps):
    """Local steps: each worker updates its own weights by its own gradients. After every K steps of
    a session, and at its end, v <- (v_0 + … + v_{W-1}) / W over the W workers, of weights,
    optimizer state and moving averages alike (Stich, "Local SGD Converges Fast and Communicates
    Little", 2019)."""

    def begin(self) -> None:
        """Makes the operations, when all variables are there."""
        ring = Collectives(self._cluster)
        awaited: typing.Any = tf.no_op()
        assignments = []
        for variable in shared_variables(self._built):
            if not variable.dtype.is_floating:
                continue  # counters, which all workers count alike
            with only_device('/cpu:0'), tf.name_scope('average'):
                with tf.control_dependencies([awaited]):  # a copy of one variable at a time
                    value = variable.read_value()
                    mean, awaited = ring.reduce_in_pieces(value, awaited, mean=True)
                assignments.append(tf.assign(variable, mean).op)
        self._operations = [tf.group(*assignments)] + replica_refreshes(self._built)

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator) -> None:
        """Begins to count the steps of a new session."""
        super(AveragingHook, self).after_create_session(session, coord)
        self._averaged = 0  # the number of the last step that was begun before an average

    def after_step(self, session: tf.Session, steps: int) -> None:
        """Averages if it is time, as it is at the end."""
        if steps % self._cluster.every == 0:
            self._average(session)

    def end(self, session: tf.Session) -> None:
        """Averages the steps since the last time: the last checkpoint has the mean."""
        self._connection.leave()  # the others may wait for one more step
        if self._connection.steps_begun != self._averaged:  # all have begun it, one may have failed
            self._average(session)

    def _average(self, session: tf.Session) -> None:
        """Gives all workers the mean."""
        self._averaged = self._connection.steps_begun
        for operation in self._operations:
            session.run(operation)
