"""What every combination of gradients over machines does.

A worker without data gives none, and what has to be the same on all is noted for the comparison.
"""

from towers.cluster import data_end, several_builds
from towers.cluster.gradient_kinds import kinds_of


class Machines:
    """Combines the gradients of one build over machines; for `Cluster.machines`.

    Attributes:
      kinds: `kinds_of` the gradients of this machine.
      combined: list of `(gradient, variable)`, what `combine` returned.
      gates: list of operations that every write of a step waits for, of the optimizer and of
        updates that ride on the train op. On the chief of synchronous parameter servers all
        gradients of all workers have come then, since the others read what it writes. With data
        that end it is known then that the step is one. Else empty: what is written is this
        worker's own.
      begin: operation to be run when a session has begun, without which no step is made; or None.
      compared: names of variables that are not trained, and whose writes have to be the same on all
        workers, see `Shared`.
      redirects: list of functions to be called when the program has made all of its operations,
        see `reduce.riding`.
      made: names of the operations that send state to the other workers, and get theirs. No two
        workers need have the same ones.
    """
    kinds, combined, gates, begin, redirects = (), (), (), None, ()
    compared = made = frozenset()

    def combine(self, gradients, loss=None):
        """The gradients for the update.

        Args:
          gradients: list of `(gradient, variable)` of this machine's towers, combined.
          loss: of this machine's batch. It reads the weights before any machine changes them.

        Returns:
          Such a list; in a ring and by Horovod the same on every worker bit for bit.
        """
        self.kinds = kinds_of(self._cluster, gradients)
        if self._cluster.active is not None and self._cluster.num_workers > 1:
            gradients = data_end.of_batches(gradients, self._cluster.active)
        self.combined = self._over_machines(gradients, loss)
        return self.combined

    def note(self, built):
        """Notes the build, when it is complete, for the comparison of the workers."""
        several_builds.note(built)
