"""Gradients over the machines of a ring, by TensorFlow's collective operations.

Each worker has a session of its own, which sees this worker's devices alone. All workers run the
same collective operations; TensorFlow brings them together by their keys. Dense gradients share
buffers, which are filled in the reverse order of the variables: a backward pass computes the
gradients of the last variables first, so that the first buffers are sent while the backward pass
goes on. Sparse gradients are sent as rows.
"""

import tensorflow.compat.v1 as tf

from towers.cluster import data_end
from towers.cluster.collectives import Collectives, broadcast_variables
from towers.cluster.machines import Machines, Shares
from towers.cluster.ring_rows import SparseGradients
from towers.cluster.session_steps import SessionBegun
from towers.cluster.shared_state import share_state
from towers.errors import ClusterError
from towers.placement.variable_device import only_device
from towers.reduce.combination import buffers_of, unpacked
from towers.reduce.sparse_rows import rows_once
from towers.tower.objectives import times

_CPU = '/cpu:0'


class RingMachines(Machines):
    """Combines the gradients of one build over the workers of a ring.

    Attributes:
      examples: float64 scalar: the number of examples of this step on all workers; None where each
        worker has the same number, so that nothing is counted.
    """

    def __init__(self, cluster, examples, reduction):
        """See `Cluster.machines`."""
        self._cluster = cluster
        self._shares = Shares(cluster, examples, reduction)
        self._is_alone = cluster.workers_a_step == 1
        self.examples = None
        self._own = []  # the gradients of this machine, with their variables

    def _over_machines(self, gradients, loss):
        if self._is_alone:
            gradients, self.gates = data_end.own_data(self._cluster, rows_once(gradients))
            return gradients
        for gradient, variable in gradients:
            if gradient.dtype.is_complex:
                raise ClusterError(
                    'the gradient of %r is of type %s, which a ring cannot add up: hold the real '
                    'and the imaginary parts in a variable of a floating type each.' % (
                        variable.op.name, gradient.dtype.base_dtype.name))
        self._own = list(gradients)
        ring = Collectives(self._cluster)
        with only_device(_CPU), tf.name_scope('ring'):
            dense = [(variable, [(0, gradient)]) for gradient, variable in gradients
                     if not isinstance(gradient, tf.IndexedSlices)]
            sparse = [(gradient, variable) for gradient, variable in gradients
                      if isinstance(gradient, tf.IndexedSlices)]
            rows = SparseGradients(sparse, ring.rank, ring.num_workers) if sparse else None
            begun = SessionBegun()
            self.begin, begun = begun.begin, begun.check()
            weight, counts, first = self._count(ring, rows, begun)
            # Dense and sparse gradients form two chains, each in the same order on all workers.
            last, last_rows = [first], [first]
            reduced = self._dense(ring, dense, weight, last)
            if rows is not None:
                if counts is None:
                    with tf.control_dependencies(last_rows):
                        counts = ring.reduce(rows.counts)
                    last_rows = [counts]
                reduced.update(rows.gathered(
                    ring, self._shares.constant() if weight is None else weight, counts,
                    last_rows))
                last += last_rows
            with tf.control_dependencies(last):
                ended = self._ended() or tf.no_op()
            if self._cluster.active is not None:
                self.gates = [ended]
            return data_end.after(ended, [(reduced[variable.op.name], variable)
                                          for _, variable in gradients])

    updates_here = True
    """Whether this worker makes the update; on parameter servers the chief alone does."""

    def counted(self, examples):
        """The number of examples that this worker adds to the count of all workers in a step."""
        return examples * self._cluster.workers_a_step

    def broadcast(self, variables):
        """An operation that gives all workers these variables of worker 0."""
        return broadcast_variables(self._cluster, variables)

    def train_op(self, update, before=(), replicated=()):
        """The operation of a step: the update, which every worker makes.

        What training reads of worker 0's state goes to the others, see `share_state`.
        """
        if self._is_alone:
            return update
        self.note_update(update, before)
        update, self.state = share_state(
            update, before, self._own, self.combined,
            lambda variable: self.broadcast([variable]), replicated)
        return update

    def _count(self, ring, rows, begun):
        """Adds up the numbers that are known when the batch is.

        The reduction waits for the batch alone, and so ends before the backward pass does.

        Args:
          ring: `Collectives`.
          rows: `SparseGradients`, or None.
          begun: operation that fails where the session has not begun.

        Returns:
          `(weight, counts, first)`: the weight of this worker's gradient, None where all weigh the
          same; the sum of `rows.counts`, None where they are not known yet; and what all that is
          sent later waits for.
        """
        shares, own = self._shares, []
        if shares.are_weighted:
            own.append(tf.reshape(shares.own_examples(), [1]))
        counted = rows is not None and rows.are_counted_early
        if counted:
            own.append(rows.counts)
        if not own:
            return None, None, begun
        with tf.control_dependencies([begun]):
            total = ring.reduce(tf.concat(own, 0))
        counts = total[-rows.counts.shape.num_elements():] if counted else None
        if not shares.are_weighted:
            return None, counts, total
        self.examples = total[0]
        return shares.weight(self.examples), counts, total

    def _dense(self, ring, dense, weight, last):
        """Dict from names of variables to reduced gradients."""
        reduced = {}
        for buffer in buffers_of(dense, ring.buffer_bytes):
            variables = [variable for variable, _ in buffer]
            added = [present[0][1] for _, present in buffer]
            packed = added[0] if len(added) == 1 else tf.concat(
                [tf.reshape(each, [-1]) for each in added], 0)
            if weight is not None:
                packed = times(packed, weight)
            packed = ring.reduce_gradient(packed, weight is None and self._shares.is_mean, last)
            pieces = [packed] if len(added) == 1 else unpacked(packed, variables)
            reduced.update(zip((variable.op.name for variable in variables), pieces))
        return reduced

    def _ended(self):
        """An operation that raises `OutOfRangeError` in the step in which no worker has examples.

        None where batches are always full. It runs after all collective operations of the step:
        the other workers would wait for these.
        """
        if self.examples is None:
            return None
        return data_end.raise_at_end(self.examples <= 0.)
