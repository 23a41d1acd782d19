"""A step that is run in a session which has not begun as those of a cluster do.

In a plain `tf.Session` nobody would give the workers of a ring the initial values of worker 0, and
on parameter servers nobody would have put the variables on the servers: each worker would train by
itself, without a word. So a step reads a variable that has no value but from the hooks that begin
a session. It is in no collection of TensorFlow's, so that no initializer of a program writes it.
"""

import re

import tensorflow.compat.v1 as tf

from towers.errors import ClusterError
from towers.placement.variable_device import only_device
from towers.tensorflow_errors import reason_of

COLLECTIONS = ['towers_begun']
"""For the variables that the hooks alone give a value to."""

_NAMES = ('own_round', 'session_begun')
_FOUND = re.compile(r'\b(?:%s)\b' % '|'.join(_NAMES))


class SessionBegun:
    """A variable that says so, for steps that read no other one of `COLLECTIONS`.

    Attributes:
      begin: operation by which a hook notes that the session has begun.
    """

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
        'tf.Session does not. Make it by member.session(hooks), or, to save as well, by '
        'towers.training_session(directory, …, member=member) on the chief.')


def not_by_member():
    """The `ClusterError` about a session on parameter servers that `Member` has no part in."""
    return ClusterError(
        'this session is not made by the member of the cluster, which puts the variables on the '
        'parameter servers when the graph is complete: without that, all operations of all workers '
        'would be on one server. Make it by member.session(hooks), or, to save as well, by '
        'towers.training_session(directory, …, member=member) on the chief, and not by '
        'tf.train.MonitoredTrainingSession.')
