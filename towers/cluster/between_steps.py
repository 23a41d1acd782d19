"""What workers do between two steps, where each makes the update itself: they check that all have
the same weights (`DriftHook`), or take the mean of everyone's own (`AveragingHook`)."""

import tensorflow.compat.v1 as tf

from towers.cluster.machines import builds_of, shared_variables
from towers.cluster.ring import Collectives
from towers.errors import ClusterError
from towers.placement.variable_device import only_device

_MOST = 1 << 26  # numbers of a variable that are looked at: fewer than 2 GB, as `serialize` takes


def replica_refreshes(built):
    """List of the operations that give towers' replicas what the variables are now."""
    return [each.replicas.refresh() for each in builds_of(built) if each.replicas is not None]


class _AfterSteps(tf.train.SessionRunHook):
    """Does something after the same steps of a session on all workers: `after_step(session, n)`."""

    def __init__(self, cluster, built, connection):
        self._cluster, self._built, self._connection, self._steps = cluster, built, connection, 0

    def after_create_session(self, session, coord):
        """Steps are counted within a session."""
        self._steps = self._averaged = 0

    def after_run(self, run_context, run_values):
        """A call was made: a step, or a look by one worker alone."""
        if self._steps != self._connection.steps_made:
            self._steps = self._connection.steps_made
            self.after_step(run_context.session, self._steps)


class DriftHook(_AfterSteps):
    """Compares checksums of what the update writes: after steps 1, 2, 4, 8, … of a session, and
    after the first step from each checkpoint on. An update that is computed from random numbers or
    the time would let the workers' weights drift apart."""

    def begin(self):
        """Makes the operations, when all variables are there."""
        builds = builds_of(self._built)
        trained = {variable.op.name for each in builds for _, variable in each.gradients}
        names = set(trained)
        for each in builds if self._cluster.compare == 'program' else ():  # others have other slots
            names.update(each.machines.written, [one.op.name for one in each.machines.state])
        variables = sorted(
            (each for each in shared_variables(self._built) if each.op.name in names),
            key=lambda each: each.op.name not in trained)
        self._names, self._sums = [variable.op.name for variable in variables], []
        with only_device('/cpu:0'), tf.name_scope('checksums'):
            for variable in variables:
                with tf.control_dependencies(self._sums[-1:]):  # a copy of one variable at a time
                    value = tf.reshape(variable.read_value(), [-1])[:_MOST]
                    self._sums.append(tf.strings.to_hash_bucket_fast(
                        tf.io.serialize_tensor(value), 1 << 52))

    def after_step(self, session, steps):
        """Compares if it is time; raises `ClusterError` about the first variable that differs."""
        if not self._connection.checks and steps & (steps - 1):
            return
        sums = [[name, int(each)] for name, each in
                zip(self._names, session.run(self._sums))]
        if self._connection.differing(sums) is None:
            return
        name, worker = next((each[0], worker) for each, worker in (
            (each, self._connection.differing(each)) for each in sums) if worker is not None)
        counted = self._built.global_step
        raise ClusterError(
            'after step %d the variable %r of %s is not that of worker 0: each worker '
            'makes the update itself. Compute it from gradients, variables and the global step '
            '(noise by tf.random.stateless_normal(shape, seed=[1, global_step])), and write the '
            'same on every worker between steps.' % (session.run(
                counted) if counted is not None else steps, name, self._cluster.who(worker)))


class AskForCheck(tf.train.CheckpointSaverListener):
    """Has the chief ask for a check after the next step when it has saved."""

    def __init__(self, connection):
        self._connection = connection

    def after_save(self, session, global_step_value):
        """Asks."""
        self._connection.ask(check=True)


class AveragingHook(_AfterSteps):
    """Local steps: each worker updates its own weights by its own gradients. After every K steps of
    a session, and at its end, v <- (v_0 + … + v_{W-1}) / W over the W workers, of weights,
    optimizer state and moving averages alike (Stich, "Local SGD Converges Fast and Communicates
    Little", 2019)."""

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
        self._operations = [tf.group(*written)] + replica_refreshes(self._built)

    def after_step(self, session, steps):
        """Averages if it is time, as it is at the end."""
        if steps % self._cluster.every == 0:
            self._average(session)

    def end(self, session):
        """Averages the steps since the last time: the last checkpoint has the mean."""
        self._connection.leave()  # the others may wait for one more step
        if self._connection.steps_begun != self._averaged:  # all have begun it, one may have failed
            self._average(session)

    def _average(self, session):
        self._averaged = self._connection.steps_begun
        for operation in self._operations:
            session.run(operation)
