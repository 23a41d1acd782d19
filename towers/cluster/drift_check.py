"""Finds weights and optimizer state that differ on some worker of a ring, or of Horovod.

Every worker makes the update by itself. One that is computed from random numbers, the time, or what
one worker alone knows would let their weights drift apart without an error. So all workers compare
checksums of what the update writes: after steps 1, 2, 4, 8, … of a session, and after the first
step from each checkpoint on, for which the chief asks.
"""

import numpy as np
import tensorflow.compat.v1 as tf

from towers.cluster.machines import builds_of, shared_variables
from towers.errors import ClusterError
from towers.placement.variable_device import only_device

_MOST = 1 << 26  # numbers of a variable that are looked at: fewer than 2 GB, as `serialize` takes
_SIZE = 1 << 52  # how many checksums there are; each is a float64 without loss


class DriftHook(tf.train.SessionRunHook):
    """Compares the workers' checksums; they do so together, after the same steps."""

    def __init__(self, cluster, built, connection):
        """
        Args:
          cluster, built: as for `Member`.
          connection: `Connection`, which knows whether a call was a step.
        """
        self._cluster, self._built, self._connection = cluster, built, connection
        self._names, self._all, self._session, self._steps = [], None, None, 0

    def begin(self):
        """Makes the operations, when all variables are there."""
        builds = builds_of(self._built)
        written = {name for each in builds for name in each.machines.written}
        written |= {variable.op.name for each in builds for variable in each.machines.state}
        variables, sums = shared_variables(self._built), []
        self._names = [variable.op.name for variable in variables]
        with only_device('/cpu:0'), tf.name_scope('checksums'):
            for variable in variables:
                with tf.control_dependencies(sums[-1:]):  # a copy of one variable at a time
                    sums.append(_checksum(variable) if variable.op.name in written else
                                tf.zeros([], tf.float64))
            own = tf.one_hot(self._cluster.rank, self._cluster.num_workers, dtype=tf.float64)
            own = own[:, None] * tf.stack(sums)
        self._all = self._built.machines.added_up(own, 'towers_checksums')

    def after_create_session(self, session, coord):
        """Steps are counted from the beginning of a session, which is one on all workers."""
        self._session, self._steps = session, 0

    def after_run(self, run_context, run_values):
        """Compares if it is time.

        Raises:
          ClusterError: a variable is another one on some worker.
        """
        if self._steps == self._connection.made:
            return  # a look at something else, by one worker alone
        self._steps = self._connection.made
        if not self._connection.checks and self._steps & (self._steps - 1):
            return
        counted = [] if self._built.global_step is None else [self._built.global_step]
        found, *step = self._session.run([self._all] + counted)
        workers, places = np.nonzero(found != found[0])
        if places.size:
            trained = {variable.op.name for each in builds_of(self._built)
                       for _, variable in each.gradients}
            place = min(places, key=lambda each: (self._names[each] not in trained, each))
            raise ClusterError(
                'after step %d the variable %r of worker %d is not that of worker 0: each worker '
                'makes the update itself, and has computed it from something else, or the program '
                'has written it between two steps. Compute the update from gradients, variables '
                'and the global step (noise by tf.random.stateless_normal(shape, seed=[1, '
                'global_step])); let UPDATE_OPS write what else it needs to a variable, which then '
                "has worker 0's value; and write between two steps the same on every worker." % (
                    (step or [self._steps])[0], self._names[place], workers[places == place][0]))


class AskForCheck(tf.train.CheckpointSaverListener):
    """Has the chief ask for a check when it has saved."""

    def __init__(self, connection):
        self._connection = connection

    def after_save(self, session, global_step_value):
        """Asks, for after the next step."""
        self._connection.ask_for_check()


def _checksum(variable):
    value = tf.reshape(variable.read_value(), [-1])[:_MOST]
    return tf.cast(tf.strings.to_hash_bucket_fast(tf.io.serialize_tensor(value), _SIZE), tf.float64)
