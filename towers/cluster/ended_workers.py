"""Which workers of a synchronous training on parameter servers have ended in good order.

A worker notes it in a variable on the first server, which is found by its name there from every
graph. So the others can tell a worker that will not come back, and that they wait for in vain, from
one that was killed, and joins again when it is started again.
"""

import threading

import tensorflow.compat.v1 as tf

from towers.cluster.ports import answers
from towers.cluster.worker_notes import FIRST_SERVER, noted, notes_of, only_first
from towers.placement.variable_device import only_device

_NAME = 'towers_ended_workers'


def note_begin(cluster, first):
    """The operation by which a worker notes that it trains; the chief's, that all do.

    The chief's has to be the first one that is run on a server: it makes the variable.

    Args:
      cluster: `Cluster`.
      first: int64 scalar, on the chief: the number of the first round of its session.
    """
    with only_device(FIRST_SERVER):
        if cluster.is_chief:
            return tf.raw_ops.AssignVariableOp(resource=_handle(cluster), value=tf.concat(
                [tf.zeros([cluster.num_workers], tf.int64), tf.reshape(first, [1])], 0))
        return _noted(cluster, 0)


def note_end(cluster):
    """The operation by which a worker notes that it has ended its training."""
    with only_device(FIRST_SERVER):
        return _noted(cluster, 1)


def have_ended(cluster):
    """Which workers have ended since the chief's newest session began; an error before the first.

    Returns:
      `(bool vector, int64 scalar)`; the scalar is the number of the session's first round.
    """
    with only_device(FIRST_SERVER):
        noted = tf.raw_ops.ReadVariableOp(resource=_handle(cluster), dtype=tf.int64)
        return noted[:-1] > 0, noted[-1]


class EndedWorkers:
    """Asks the first server, from any thread, which workers have ended.

    Attributes:
      notes: what the workers had noted when it was asked last: dict from ranks to `Note`s; None
        where the server did not answer.
    """

    def __init__(self, cluster, target, config, seconds=5.):
        """
        Args:
          cluster, target, config: of this worker's sessions.
          seconds: how long to wait for an answer: TensorFlow waits without end for a server that
            is gone or frozen.
        """
        self._cluster, self._target, self._config = cluster, target, only_first(config)
        self._seconds, self._thread, self._found = seconds, None, []
        self.notes = self._read = None

    def __call__(self):
        """List of the other workers that have ended; empty where the server does not answer."""
        self.notes = None
        if answers(self._cluster.ps[0]) is not True:  # or TensorFlow waits for it
            return []
        if self._thread is None or not self._thread.is_alive():
            self._found, self._read = [], None
            self._thread = threading.Thread(target=self._ask, daemon=True, name='towers-ended')
            self._thread.start()
        self._thread.join(self._seconds)
        if self._thread.is_alive():
            return []
        self.notes = self._read
        return self._found

    def _ask(self):
        try:
            with tf.Graph().as_default():
                notes, (value, _) = noted(self._cluster), have_ended(self._cluster)
                with tf.Session(self._target, config=self._config) as session:
                    self._read = notes_of(session.run(notes))
                    ended = session.run(value)
        except tf.errors.OpError:  # the server has been started again, and knows nothing yet
            return
        self._found = [rank for rank, has_ended in enumerate(ended)
                       if has_ended and rank != self._cluster.rank]


def _handle(cluster):
    return tf.raw_ops.VarHandleOp(dtype=tf.int64, shape=[cluster.num_workers + 1],
                                  shared_name=_NAME)


def _noted(cluster, value):
    return tf.raw_ops.ResourceScatterUpdate(
        resource=_handle(cluster), indices=tf.constant([cluster.rank]),
        updates=tf.constant([value], tf.int64))
