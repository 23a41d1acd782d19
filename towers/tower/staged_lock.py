"""One run at a time takes a batch out of the buffers and stages the next one.

Threads that share a session may run steps, or the loss, at the same time: summaries and monitors of
older programs do. Each run has to find the buffers as another one leaves them, and not half-way.

The lock is TF's `MutexLock`. It is held while its tensor lives, which is until all operations have
run that take it, or until the run fails. `ConsumeMutexLock` is such an operation, and the only one
that no optimization of the graph takes for one without an effect.
"""

import tensorflow.compat.v1 as tf


class Lock:
    """A lock of a build's buffers, taken by each run that has `acquired` in it.

    Attributes:
      acquired: the operation after which this run has the lock.
    """

    def __init__(self, name):
        """
        Args:
          name: that no other build's lock has. On a server it is the server's.
        """
        with tf.device('/cpu:0'):
            mutex = tf.raw_ops.MutexV2(container='', shared_name=name)
            self._held = tf.raw_ops.MutexLock(mutex=mutex)
        self.acquired = self._held.op

    def held_until(self, operations):
        """Keeps the lock until these have run: an operation, for the run to have in it.

        Of several such operations the last one that is in the run gives the lock back.
        """
        with tf.device('/cpu:0'), tf.control_dependencies(operations):
            return tf.raw_ops.ConsumeMutexLock(mutex_lock=self._held)
