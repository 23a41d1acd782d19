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
from towers.cluster.session_guard import SessionBegun
from towers.cluster.stop_codes import Codes
from towers.cluster.shared_state import share_state
from towers.placement.variable_device import only_device
from towers.reduce import all_reduce
from towers.reduce.sparse_rows import rows_once, scaled

_CPU = '/cpu:0'


class RingMachines(Machines):
    """Combines the gradients of one build over the workers of a ring.

    Attributes:
      stops: int32 [W]: of each worker the number of the signal for which it wants to stop after
        this step, or 0; the same on all of them. None for a ring of one.
      watch: `Watch` of this worker, while it is a member; or None.
      codes: `Codes`, by which a worker says that it wants to stop, or has stopped; or None.
      data_ended: bool variable, True after the step in which no worker had an example; None where
        every worker always has examples.
      examples: float64 scalar: the number of examples of this step on all workers; None where each
        worker has the same number, so that nothing is counted.
    """

    def __init__(self, cluster, examples, reduction, num_towers):
        """See `Cluster.machines`."""
        self._cluster = cluster
        self._shares = Shares(cluster, examples, reduction)
        self.stops = self.codes = self.examples = self.data_ended = None
        self.hook = None
        self._own = []  # the gradients of this machine, with their variables
        self.watch = None

    def _over_machines(self, gradients, loss):
        if self._cluster.num_workers == 1:
            gradients, self.gates = data_end.own_data(self._cluster, rows_once(gradients))
            return gradients
        self._own = list(gradients)
        ring = Collectives(self._cluster)
        with only_device(_CPU), tf.name_scope('ring'):
            dense = [(variable, [(0, gradient)]) for gradient, variable in gradients
                     if not isinstance(gradient, tf.IndexedSlices)]
            sparse = [(gradient, variable) for gradient, variable in gradients
                      if isinstance(gradient, tf.IndexedSlices)]
            rows = SparseGradients(sparse, ring.rank, ring.num_workers) if sparse else None
            weight, counts = self._count(ring, rows)
            # Dense gradients wait for each other, and so do sparse ones, in one order on all
            # workers; the backward pass ends with both.
            last, last_rows = [self.stops], [self.stops]
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
        return examples * self._cluster.num_workers

    def added_up(self, numbers, name):
        """The sum of all workers' float64 numbers, a tensor; made in the same order on all."""
        with only_device(_CPU), tf.name_scope(name):
            return Collectives(self._cluster).reduce(numbers)

    def told_others(self, session, together=()):
        """Tells the other workers that this one runs no more steps; waits until they know.

        Args:
          together: the objects of other builds whose steps the others make in the same call.

        Returns:
          The codes of all workers, see `Codes`.
        """
        try:
            if self.watch is not None:
                self.watch.step_begins()  # another worker may have ended without a word
            # One is enough to end that call, and ends it before the other's reduction is made.
            told = session.run([self.codes.tell] + [each.codes.skip for each in together])
            return told[0][0].round()[:self._cluster.num_workers]
        finally:
            if self.watch is not None:
                self.watch.step_ends()

    def train_op(self, update, before=(), replicated=()):
        """The operation of a step: the update, which every worker makes.

        What training reads of worker 0's state goes to the others, see `share_state`.
        """
        if self._cluster.num_workers == 1:
            return update
        self.note_update(update, before)
        update, self.state = share_state(
            update, before, self._own, self.combined,
            lambda variable: broadcast_variables(self._cluster, [variable]), replicated)
        self.codes.finish(update, _CPU)
        return update

    def _count(self, ring, rows):
        """Adds up the numbers that are known when the batch is; sets `stops`.

        The reduction waits for the batch alone, and so ends before the backward pass does.

        Args:
          ring: `Collectives`.
          rows: `SparseGradients`, or None.

        Returns:
          `(weight, counts)`: the weight of this worker's gradient, None where all weigh the same;
          the sum of `rows.counts`, None where they are not known yet.
        """
        self.codes, shares, begun = Codes(ring.rank, ring.num_workers), self._shares, SessionBegun()
        self.begin = begun.begin
        own = [self.codes.own()]
        if shares.are_weighted:
            own.append(tf.reshape(shares.own_examples(), [1]))
        counted = rows is not None and rows.are_counted_early
        if counted:
            own.append(rows.counts)
        with tf.control_dependencies([begun.check()]):
            own = tf.concat(own, 0)
        total = ring.reduce(own)
        self.codes.read(total)
        self.stops = self.codes.stops
        counts = total[-rows.counts.shape.num_elements():] if counted else None
        if not shares.are_weighted:
            return None, counts
        self.examples = total[ring.num_workers]
        return shares.weight(self.examples), counts

    def _dense(self, ring, dense, weight, last):
        """Dict from names of variables to reduced gradients."""
        reduced = {}
        for buffer in all_reduce.buffers_of(dense, ring.buffer_bytes):
            variables = [variable for variable, _ in buffer]
            added = [present[0][1] for _, present in buffer]
            packed = added[0] if len(added) == 1 else tf.concat(
                [tf.reshape(each, [-1]) for each in added], 0)
            if weight is not None:
                packed = scaled(packed, weight)
            packed = ring.reduce_gradient(packed, weight is None and self._shares.is_mean, last)
            pieces = [packed] if len(added) == 1 else all_reduce.unpacked(packed, variables)
            reduced.update(zip((variable.op.name for variable in variables), pieces))
        return reduced

    def _ended(self):
        """An operation that raises `OutOfRangeError` in the step in which no worker has examples.

        None where batches are always full. It runs after all collective operations of the step:
        the other workers would wait for these.
        """
        if self.examples is None:
            return None
        self.data_ended = tf.Variable(False, trainable=False, use_resource=True, name='data_ended',
                                      collections=[tf.GraphKeys.LOCAL_VARIABLES])
        return data_end.raise_at_end(self.examples <= 0., self.data_ended)

