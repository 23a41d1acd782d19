"""Whether all workers of a ring are in the same step.

The collective operations of a ring meet by their keys, whatever step runs them. If one worker alone
runs `built.gradients` between two steps, its gradient meets that of another worker's next step, and
the two are a step apart from then on. So each worker sends how many steps it has made, with the
counts of the step.
"""

import re

import tensorflow.compat.v1 as tf

from towers.cluster.session_guard import COLLECTIONS
from towers.errors import ClusterError

_TEXT = 'towers: workers in different steps, here'
_FOUND = re.compile(re.escape(_TEXT) + r'\]? \[?(\d+)\]? \[?of\]? \[?(\d+)')


class SameStep:
    """Counts the steps of this worker and compares them with those of the others.

    Attributes:
      begin: operation by which a session begins to count; without it a step fails.
    """

    def __init__(self, num_workers):
        self._num_workers = num_workers
        self._done = tf.Variable(0., trainable=False, dtype=tf.float64, name='steps_done',
                                 collections=COLLECTIONS)
        self.begin = self._done.initializer

    def own(self):
        """How many steps this worker has made, a float64 scalar."""
        return tf.identity(self._done)

    def check(self, own, total):
        """An operation that raises where `total`, the sum of `own` over all workers, tells of other
        numbers of steps."""
        same = tf.abs(own * self._num_workers - total) < .5
        return tf.raw_ops.Assert(condition=same, data=[
            _TEXT, tf.cast(own, tf.int64), 'of', tf.cast(tf.round(total), tf.int64)])

    def counted(self, update):
        """The operation of a step, which counts it."""
        with tf.control_dependencies([update]):
            return tf.group(tf.assign_add(self._done, 1.))


def explained(error):
    """The `ClusterError` about workers in different steps; None where it was something else."""
    found = _FOUND.search(str(error))
    return None if found is None else ClusterError(
        'the workers of the ring are in different steps: this one has made %s, all of them '
        'together %s. Some of them alone have run what needs all of them, such as built.gradients, '
        'between two steps. Run it on all workers at the same time, or fetch it with the step.'
        % found.groups())
