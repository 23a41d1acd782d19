"""Gradients over the machines of a ring, by TensorFlow's collective operations.

Each worker has a session of its own, which sees this worker's devices alone. All workers run the
same collective operations; TensorFlow brings them together by their keys. Dense gradients share
buffers, which are filled in the reverse order of the variables: a backward pass computes the
gradients of the last variables first, so that the first buffers are sent while the backward pass
goes on.

Of sparse gradients rows are sent, of all in one message a type: a message costs half a millisecond
whatever is in it, and a model may have dozens of embeddings. Their numbers travel before them, with
those of examples where they are known as early, and their indices. A worker with fewer rows of a
variable than another fills up with rows that are cut off again.
"""

import tensorflow.compat.v1 as tf

from towers import compat
from towers.cluster import data_end
from towers.cluster.collectives import Collectives, broadcast_variables
from towers.cluster.machines import Machines, Shares
from towers.cluster.session_steps import SessionBegun
from towers.cluster.shared_state import share_state
from towers.errors import ClusterError
from towers.graph.graph_walk import step_operations
from towers.placement.variable_device import only_device
from towers.reduce import all_reduce
from towers.reduce.sparse_rows import each_row_once, rows_once, scaled

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
            # Dense gradients wait for each other, and so do sparse ones, in one order on all
            # workers; the backward pass ends with both.
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
        return data_end.raise_at_end(self.examples <= 0.)


_LATE = ('Enter', 'Exit', 'While', 'StatelessWhile', 'Stack', 'TensorArray', 'TensorList', 'Var',
         'ReadVariableOp', 'ResourceGather')
"""Beginnings of types of operations whose results may come as late as the backward pass."""


class SparseGradients:
    """The sparse gradients of one worker, to be added up over all workers.

    Attributes:
      counts: float64 [v * W]: the number of this worker's rows of each of v gradients, in the place
        of this worker of W; zeros in the places of the others. To be added up over the workers.
      are_counted_early: whether `counts` is known when the batch is: as far as the operations tell,
        nothing of the model has to be computed for it.
    """

    def __init__(self, gradients, rank, num_workers):
        """
        Args:
          gradients: list of `(IndexedSlices, variable)`, at least one.
          rank, num_workers: of this worker, and how many there are.

        Raises:
          ClusterError: a gradient that cannot be sent.
        """
        self._gradients, self._workers = gradients, num_workers
        for slices, variable in gradients:
            if _row_shape(slices, variable) is None:
                raise ClusterError('the sparse gradient of %r has rows of unknown shape, which '
                                   'cannot be sent: give the variable a static shape.'
                                   % variable.op.name)
        # Of each: the rows' indices, each once, and the place of each given row among them.
        self._found = [tf.unique(slices.indices) for slices, _ in gradients]
        own = tf.cast(tf.stack([tf.size(rows) for rows, _ in self._found]), tf.float64)
        self.counts = tf.reshape(own[:, tf.newaxis] * tf.one_hot(
            rank, num_workers, dtype=tf.float64), [-1])
        self.are_counted_early = not any(
            op.type.startswith(_LATE) for op in step_operations([self.counts]))

    def gathered(self, ring, weight, counts, last):
        """The rows of all workers.

        Args:
          ring: `Collectives`.
          weight: number by which this worker's rows are multiplied, see `sparse_rows.scaled`.
          counts: the sum of all workers' `counts`.
          last: list of the tensors that the first message has to wait for; then of the last
            message.

        Returns:
          Dict from names of variables to `tf.IndexedSlices`, each row once; the same on every
          worker bit for bit.
        """
        counts = tf.reshape(tf.cast(tf.round(counts), tf.int32), [-1, self._workers])
        most = [tf.maximum(tf.reduce_max(each), 1) for each in tf.unstack(counts)]
        by_type, result = {}, {}
        for place, (slices, _) in enumerate(self._gradients):
            by_type.setdefault(_sent_type(slices), []).append(place)
        indices = self._sent(ring, [
            _filled(tf.cast(rows, tf.int64), most[place])
            for place, (rows, _) in enumerate(self._found)], last)
        for dtype, places in sorted(by_type.items(), key=lambda item: item[0].name):
            parts = self._sent(ring, [self._packed(place, weight, dtype, most[place])
                                      for place in places], last)
            for place, part in zip(places, parts):
                is_row = tf.reshape(tf.sequence_mask(counts[place], most[place]), [-1])
                slices, variable = self._gradients[place]
                shape = _row_shape(slices, variable).as_list()
                values = tf.boolean_mask(tf.reshape(part, [-1] + shape), is_row)
                result[variable.op.name] = each_row_once(tf.IndexedSlices(
                    tf.cast(values, slices.values.dtype), tf.cast(
                        tf.boolean_mask(tf.reshape(indices[place], [-1]), is_row),
                        slices.indices.dtype), slices.dense_shape))
        return result

    def _sent(self, ring, vectors, last):
        """Each of some vectors [n] of one type as [W, n], of all workers; in one message."""
        packed = tf.concat(vectors, 0) if len(vectors) > 1 else vectors[0]
        with tf.control_dependencies(last):
            received = ring.gather(packed)
        last[:] = [received]
        return tf.split(tf.reshape(received, [self._workers, -1]),
                        tf.stack([tf.size(each) for each in vectors]), 1, num=len(vectors))

    def _packed(self, place, weight, dtype, rows):
        """A gradient's rows, each once, and so many in all: [rows * width], flat."""
        slices, variable = self._gradients[place]
        indices, of_row = self._found[place]
        values = tf.math.unsorted_segment_sum(scaled(slices, weight).values, of_row,
                                              tf.size(indices))
        width = _row_shape(slices, variable).num_elements()
        return _filled(tf.cast(tf.reshape(values, [-1]), dtype), rows * width)


def _filled(vector, count):
    """A vector with zeros behind it, so many numbers in all."""
    return tf.pad(vector, [[0, count - tf.size(vector)]])


def _row_shape(slices, variable):
    """The static shape of a row; None where it is not known."""
    shape = slices.values.shape[1:] if slices.values.shape.ndims else tf.TensorShape(None)
    shape = shape.merge_with(variable.get_shape()[1:])
    return shape if shape.is_fully_defined() else None


def _sent_type(slices):
    """The type in which a gradient's rows travel."""
    dtype = slices.values.dtype.base_dtype
    return dtype if dtype in compat.COLLECTIVE_DTYPES else tf.float32
