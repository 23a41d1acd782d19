"""Which workers of a synchronous training on parameter servers have ended in good order.

A worker notes it in a variable on the first server, which is found by its name there from every
graph. So the others can tell a worker that will not come back, and that they wait for in vain, from
one that was killed, and joins again when it is started again.
"""

import threading

import tensorflow.compat.v1 as tf

from towers.placement.variable_device import only_device

_SERVER = '/job:ps/task:0/device:CPU:0'
_NAME = 'towers_ended_workers'


def note_begin(cluster):
    """The operation by which a worker notes that it trains; the chief's, that all do.

    The chief's has to be the first one that is run on a server: it makes the variable.
    """
    with only_device(_SERVER):
        if cluster.is_chief:
            return tf.raw_ops.AssignVariableOp(
                resource=_handle(cluster), value=tf.zeros([cluster.num_workers], tf.int32))
        return _noted(cluster, 0)


def note_end(cluster):
    """The operation by which a worker notes that it has ended its training."""
    with only_device(_SERVER):
        return _noted(cluster, 1)


def have_ended(cluster):
    """int32 vector: whether each worker has ended; an error before the chief's `note_begin`."""
    with only_device(_SERVER):
        return tf.raw_ops.ReadVariableOp(resource=_handle(cluster), dtype=tf.int32)


class EndedWorkers:
    """Asks the first server, from any thread, which workers have ended."""

    def __init__(self, cluster, target, config, seconds=5.):
        """
        Args:
          cluster, target, config: of this worker's sessions.
          seconds: how long to wait for an answer: TensorFlow waits without end for a server that
            is gone or frozen.
        """
        self._cluster, self._target, self._config = cluster, target, config
        self._seconds, self._thread, self._found = seconds, None, []

    def __call__(self):
        """List of the other workers that have ended; empty where the server does not answer."""
        if self._thread is None or not self._thread.is_alive():
            self._found = []
            self._thread = threading.Thread(target=self._ask, daemon=True, name='towers-ended')
            self._thread.start()
        self._thread.join(self._seconds)
        return [] if self._thread.is_alive() else self._found

    def _ask(self):
        try:
            with tf.Graph().as_default():
                value = have_ended(self._cluster)
                with tf.Session(self._target, config=self._config) as session:
                    ended = session.run(value)
        except tf.errors.OpError:  # the server has been started again, and knows nothing yet
            return
        self._found = [rank for rank, has_ended in enumerate(ended)
                       if has_ended and rank != self._cluster.rank]


def _handle(cluster):
    return tf.raw_ops.VarHandleOp(dtype=tf.int32, shape=[cluster.num_workers], shared_name=_NAME)


def _noted(cluster, value):
    return tf.raw_ops.ResourceScatterUpdate(
        resource=_handle(cluster), indices=tf.constant([cluster.rank]),
        updates=tf.constant([value]))
