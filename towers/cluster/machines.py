"""What every combination of gradients over machines does.

A worker without data gives none, and what has to be the same on all is recorded for the comparison.
"""

import tensorflow.compat.v1 as tf

from towers import compat
from towers.cluster import data_end, several_builds
from towers.cluster.gradient_kinds import kinds_of
from towers.errors import ClusterError
from towers.placement.variable_device import only_device

_NO_GRADIENT = 'TowersGradientOverMachines'


class Machines:
    """Combines the gradients of one build over machines; for `Cluster.machines`.

    Attributes:
      kinds: `kinds_of` the gradients of this machine.
      combined: list of `(gradient, variable)`, what `combine` returned.
      sums: names of the operations of `combined` where all workers make one step together; else
        empty.
      gates: list of operations that every write of a step waits for, of the optimizer and of
        updates that ride on the train op. On the chief of synchronous parameter servers all
        gradients of all workers have come then, since the others read what it writes. With data
        that end it is known then that the step is one. Else empty: what is written is this
        worker's own.
      begin: operation to be run when a session has begun, without which no step is made; or None.
      redirect: function to be called when the program has made all of its operations, see
        `reduce.update_order`; or None.
      chief_has_ended: whether a step was not made since the chief of parameter servers has ended.
      connection: `Connection` of this worker while it is a member; else None.
      update: `signature_of_update` where each worker makes the update; else None.
    """
    kinds, combined, gates, begin, redirect = (), (), (), None, None
    update = connection = None
    chief_has_ended = False
    sums = frozenset()

    def combine(self, gradients, loss=None):
        """The gradients for the update.

        Args:
          gradients: list of `(gradient, variable)` of this machine's towers, combined.
          loss: of this machine's batch. It reads the weights before any machine changes them.

        Returns:
          Such a list; in a ring and by Horovod the same on every worker bit for bit. A gradient of
          these, for an optimizer of second order, is a `ClusterError`: TensorFlow would go on to
          this machine's part alone, or to none.
        """
        self.kinds = kinds_of(self._cluster, gradients)
        if self._cluster.active is not None and self._cluster.num_workers > 1:
            gradients = data_end.of_batches(gradients, self._cluster.active)
        self.combined = self._over_machines(gradients, loss)
        if self._cluster.synchronous and self._cluster.num_workers > 1:
            self.combined = [(without_gradient(gradient), variable)
                             for gradient, variable in self.combined]
            self.sums = frozenset(getattr(gradient, 'values', gradient).op.name
                                  for gradient, _ in self.combined)
        return self.combined

    def join(self, connection, make_wait=None):
        """Notes that this worker is a member.

        Args:
          connection: `Connection`.
          make_wait: function from words to a `ChiefWait`, on parameter servers.
        """
        self.connection = connection

    def note(self, built, redirect):
        """Records the build, when it is complete, for the comparison of the workers.

        Args:
          built: `BuiltTowers`.
          redirect: see the class.
        """
        self.redirect = redirect
        several_builds.record_build(built)


def without_gradient(gradient, beside=None):
    """The same gradient, dense or sparse, which cannot be differentiated.

    Args:
      gradient: a tensor, or `IndexedSlices`.
      beside: where it is not computed from the variables, in TensorFlow's eyes, such as what comes
        from a server: this machine's part of it, by which TensorFlow finds the way to them.
    """
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            without_gradient(gradient.values, None if beside is None else beside.values),
            gradient.indices, gradient.dense_shape)
    compat.register_gradient(_NO_GRADIENT, _refuse_gradient)
    with only_device(gradient.device or None), gradient.graph.gradient_override_map(
            {'Identity': _NO_GRADIENT, 'IdentityN': _NO_GRADIENT}):
        return tf.identity(gradient) if beside is None else tf.identity_n([gradient, beside])[0]


def _refuse_gradient(op, *unused_gradients):
    raise ClusterError(
        'a gradient of %r, the gradient over several machines, is taken: it would be of one '
        "machine's examples. Take second derivatives in the model function, of its loss, and put "
        'them into the loss; or train on one machine.' % op.name)
