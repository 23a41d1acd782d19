"""What every combination of gradients over machines notes for the comparison of the workers."""

from towers.cluster.gradient_kinds import kinds_of


class Machines:
    """Combines the gradients of one build over machines; for `Cluster.machines`.

    Attributes:
      kinds: `kinds_of` the gradients of this machine.
      combined: list of `(gradient, variable)`, what `combine` returned.
    """
    kinds, combined = (), ()

    def combine(self, gradients, loss=None):
        """The gradients for the update.

        Args:
          gradients: list of `(gradient, variable)` of this machine's towers, combined.
          loss: of this machine's batch. It reads the weights before any machine changes them.

        Returns:
          Such a list; in a ring and by Horovod the same on every worker bit for bit.
        """
        self.kinds = kinds_of(self._cluster, gradients)
        self.combined = self._over_machines(gradients, loss)
        return self.combined
