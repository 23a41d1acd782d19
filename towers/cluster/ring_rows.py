"""Sparse gradients over the machines of a ring: the rows of all of them in one message a type.

A message costs half a millisecond whatever is in it, and a model may have dozens of embeddings. So
the numbers of rows of all sparse gradients travel together, with those of examples where they are
known as early; and then all rows, each with its index behind it, as numbers of the gradient's type
that hold the index exactly. A worker with fewer rows of a variable than another fills up with rows
that are cut off again.
"""

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import ClusterError
from towers.graph.graph_walk import step_operations
from towers.reduce.sparse_rows import each_row_once
from towers.tower.objectives import times

_INDEX_BITS = 48
_EXACT_BITS = {tf.float16: 11, tf.bfloat16: 8, tf.float32: 24, tf.float64: 53}
"""Types of gradients, and up to how many bits they hold every whole number."""

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
        by_type, result = {}, {}
        for place, (slices, _) in enumerate(self._gradients):
            by_type.setdefault(_sent_type(slices), []).append(place)
        for dtype, places in sorted(by_type.items(), key=lambda item: item[0].name):
            most = [tf.maximum(tf.reduce_max(counts[place]), 1) for place in places]
            vectors = [self._packed(place, weight, dtype, rows)
                       for place, rows in zip(places, most)]
            packed = tf.concat(vectors, 0) if len(vectors) > 1 else vectors[0]
            with tf.control_dependencies(last):
                received = ring.gather(packed)
            last[:] = [received]
            received = tf.reshape(received, [self._workers, -1])
            sizes = tf.stack([tf.size(each) for each in vectors])
            for place, rows, part in zip(places, most, tf.split(received, sizes, 1,
                                                                num=len(places))):
                slices, variable = self._gradients[place]
                is_row = tf.reshape(tf.sequence_mask(counts[place], rows), [-1])
                result[variable.op.name] = self._unpacked(place, part, is_row)
        return result

    def _packed(self, place, weight, dtype, rows):
        """A gradient's rows and their indices, and so many rows in all: [rows * width], flat."""
        slices, variable = self._gradients[place]
        indices, of_row = self._found[place]
        shape = _row_shape(slices, variable)
        values = tf.math.unsorted_segment_sum(times(slices, weight).values, of_row,
                                              tf.size(indices))
        values = tf.cast(tf.reshape(values, [-1, shape.num_elements()]), dtype)
        packed = tf.concat([values] + _digits(indices, dtype), 1)
        return tf.reshape(tf.pad(packed, [[0, rows - tf.size(indices)], [0, 0]]), [-1])

    def _unpacked(self, place, flat, is_row):
        """The `tf.IndexedSlices` of all workers' packed rows [W, rows * width]."""
        slices, variable = self._gradients[place]
        shape, dtype = _row_shape(slices, variable), flat.dtype
        width = shape.num_elements()
        received = tf.boolean_mask(
            tf.reshape(flat, [-1, width + _num_digits(dtype)]), is_row)
        indices = _number(received[:, width:], dtype, slices.indices.dtype)
        values = tf.cast(tf.reshape(received[:, :width], [-1] + shape.as_list()),
                         slices.values.dtype)
        return each_row_once(tf.IndexedSlices(values, indices, slices.dense_shape))


def _row_shape(slices, variable):
    """The static shape of a row; None where it is not known."""
    shape = slices.values.shape[1:] if slices.values.shape.ndims else tf.TensorShape(None)
    shape = shape.merge_with(variable.get_shape()[1:])
    return shape if shape.is_fully_defined() else None


def _sent_type(slices):
    """The type in which a gradient's rows travel."""
    dtype = slices.values.dtype.base_dtype
    return dtype if dtype in compat.COLLECTIVE_DTYPES else tf.float32


def _num_digits(dtype):
    return -(-_INDEX_BITS // _EXACT_BITS[dtype])


def _digits(indices, dtype):
    """Indices [n] as a list of digits [n, 1] of a type, the lowest first."""
    base, digits = 2 ** min(_EXACT_BITS[dtype], _INDEX_BITS), []
    indices = tf.cast(indices, tf.int64)[:, tf.newaxis]
    for _ in range(_num_digits(dtype)):
        digits.append(tf.cast(indices % base, dtype))
        indices //= base
    return digits


def _number(digits, dtype, index_type):
    """The indices [n] of digits [n, d]."""
    base = 2 ** min(_EXACT_BITS[dtype], _INDEX_BITS)
    digits = tf.cast(digits, tf.int64)
    return tf.cast(sum(digits[:, place] * base ** place for place in range(_num_digits(dtype))),
                   index_type)
