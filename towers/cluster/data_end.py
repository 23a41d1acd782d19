"""Gates of a step: no step is made before its session has begun, nor when all data have ended.

In a plain `tf.Session` nobody would give the workers of a ring the initial values of worker 0, and
on parameter servers nobody would have put the variables on the servers: each worker would train by
itself, without a word. So a step reads a variable that has no value but from the hooks that begin
a session. It is in no collection of TensorFlow's, so that no initializer of a program writes it.

A worker whose data have ended gives no gradient. The step in which no worker has data raises, and
changes nothing.
"""

import re

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import ClusterError
from towers.placement.variable_device import only_device
from towers.tensorflow_errors import reason_of

COLLECTIONS = ['towers_begun']
"""For the variables that the hooks alone give a value to."""

HOW = ('Make it by member.session(hooks), or, to save as well, by towers.training_session('
       'directory, …, member=member) on the chief')
"""What to do about a session that is none of a cluster."""

_NAMES = ('own_round', 'session_begun')
_FOUND = re.compile(r'\b(?:%s)\b' % '|'.join(_NAMES))


class SessionBegun:
    """A variable that says that the session has begun, for steps that read no other one of
    `COLLECTIONS`; a hook runs the operation `begin`."""

    def __init__(self):
        with only_device('/cpu:0'):
            self._value = tf.Variable(0., trainable=False, collections=COLLECTIONS,
                                      name=_NAMES[-1])
            self.begin = self._value.initializer

    def check(self):
        """An operation that fails where it has not."""
        with only_device('/cpu:0'):
            return tf.identity(self._value.read_value()).op


def explained(error):
    """The `ClusterError` about a session that has not begun; None where it was something else."""
    if not (isinstance(error, tf.errors.FailedPreconditionError)
            and _FOUND.search(reason_of(error))):
        return None
    return ClusterError(
        'a step was run in a session that has not begun as those of a cluster do: with the initial '
        'values of worker 0, and with the variables on the servers where there are some. A plain '
        'tf.Session does not. %s.' % HOW)


def raise_at_end(is_over):
    """An operation that raises `tf.errors.OutOfRangeError` when a bool scalar is true: a queue that
    is closed and empty does, as a `tf.data` iterator at its end; in each step from then on."""
    # An operation waits for all of a branch of control flow v1, and for the condition alone of v2.
    with only_device('/cpu:0'), compat.control_flow_v1():
        data = tf.FIFOQueue(1, tf.int32, [[]], name='no_data_left')

        def close():
            with tf.control_dependencies([data.close()]):
                return tf.constant(0)

        def end():
            closed = [tf.cond(data.is_closed(), lambda: tf.constant(0), close)]
            with tf.control_dependencies(closed):
                return data.dequeue()
        return tf.identity(tf.cond(is_over, end, lambda: tf.constant(0)), name='data_goes_on').op


def after(operation, gradients):
    """The same `(gradient, variable)` pairs; each gradient waits for an operation."""
    with tf.control_dependencies([operation]):
        return [(same(gradient), variable) for gradient, variable in gradients]


def own_data(cluster, gradients):
    """`(gradients, [operation])` of the only worker of a cluster: the operation ends its training.
    Without `cluster.active` the gradients as they are, and `[]`."""
    if cluster.active is None:
        return gradients, []
    ended = raise_at_end(cluster.active < .5)
    return after(ended, gradients), [ended]


def of_batches(gradients, active):
    """Gradients of a worker that computes its first batch again: where `active` is 0, dense ones
    are zeros, and sparse ones have no row.

    A weight of 0 is not enough. An optimizer updates the rows that a sparse gradient has, also
    where they are zeros: momentum moves them on. And 0 times infinity, of weights for which nobody
    has looked at that batch, is NaN in the sum of all workers.
    """
    with only_device('/cpu:0'):
        has_batch = active >= .5
        of_rows = tf.cast(has_batch, tf.int32)
    found = []
    for gradient, variable in gradients:
        values = getattr(gradient, 'values', gradient)
        with only_device(values.device or None), tf.name_scope('of_batches'):
            if isinstance(gradient, tf.IndexedSlices):
                rows = of_rows * tf.shape(gradient.indices)[0]
                gradient = tf.IndexedSlices(values[:rows], gradient.indices[:rows],
                                            gradient.dense_shape)
            else:
                gradient = tf.where_v2(has_batch, gradient, tf.zeros_like(gradient))
        found.append((gradient, variable))
    return found


def same(gradient):
    """An identity of a gradient, dense or sparse, on the current device."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(tf.identity(gradient.values), tf.identity(gradient.indices),
                                gradient.dense_shape)
    return tf.identity(gradient)
