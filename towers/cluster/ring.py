"""Gradients over the machines of a ring, by TensorFlow's collective operations.

Each worker has a session of its own, which sees this worker's devices alone. All workers run the
same collective operations; TensorFlow brings them together by their keys. Dense gradients share
buffers, which are filled in the reverse order of the variables: a backward pass computes the
gradients of the last variables first, so that the first buffers are sent while the backward pass
goes on.

Sparse gradients are sent as rows. A message costs half a millisecond whatever is in it, and a model
may have dozens of embeddings. So the numbers of rows of all gradients travel together, then all
indices, and then the rows of each type; the first two mostly before the backward pass is through. A
worker with fewer rows of a variable than another fills up with rows that are cut off again.
"""

import tensorflow.compat.v1 as tf

from towers import compat
from towers.cluster import data_end
from towers.cluster.collectives import Collectives
from towers.cluster.machines import Machines
from towers.cluster.session_steps import SessionBegun
from towers.errors import ClusterError
from towers.placement.variable_device import only_device
from towers.reduce import all_reduce
from towers.reduce.sparse_rows import each_row_once, scaled


class RingMachines(Machines):
    """Combines the gradients of one build over the workers of a ring."""

    def _combined(self, gradients, shares, loss):
        for gradient, variable in gradients:
            if gradient.dtype.is_complex:
                raise ClusterError(
                    'the gradient of %r is of type %s, which a ring cannot add up: hold the real '
                    'and the imaginary parts in a variable of a floating type each.' % (
                        variable.op.name, gradient.dtype.base_dtype.name))
        ring, begun = Collectives(self._cluster), SessionBegun()
        with only_device('/cpu:0'), tf.name_scope('ring'):
            first = begun.check()
            if shares.are_weighted:  # known when the batch is, before the backward pass
                with tf.control_dependencies([first]):
                    first = ring.reduce(tf.reshape(shares.own_examples(), [1]))
                total = first[0]
            weight = shares.weight(total) if shares.are_weighted else shares.constant
            # Dense and sparse gradients form two chains, each in the same order on all workers.
            sums, last = _add_dense(ring, gradients, weight, not shares.are_weighted
                                    and shares.is_mean, first)
            rows, last_rows = _add_rows(ring, gradients, weight, first)
            # The end comes after all reductions, for which the other workers would wait.
            with tf.control_dependencies([last, last_rows]):
                ended = data_end.raise_at_end(total <= 0.) if shares.are_weighted else tf.no_op()
            sums.update(rows)
            gradients = data_end.after(ended, [(sums[variable.op.name], variable)
                                               for _, variable in gradients])
        return (gradients, [] if self._cluster.active is None else [ended],
                lambda session: session.run(begun.begin))

    def broadcast(self, variables):
        """See `Machines`."""
        return Collectives(self._cluster).broadcast(variables)


def _add_dense(ring, gradients, weight, mean, last):
    """Adds up the dense ones among all workers' gradients.

    Args:
      ring: `Collectives`.
      gradients: list of `(gradient, variable)`.
      weight: number by which this worker's are multiplied; with `mean` nothing is.
      mean: whether to take the mean instead.
      last: what the first message waits for.

    Returns:
      `(dict from names of variables to sums, the last message)`.
    """
    dense, sums = [(variable, [(0, gradient)]) for gradient, variable in gradients
                   if not isinstance(gradient, tf.IndexedSlices)], {}
    for buffer in all_reduce.buffers_of(dense, ring.buffer_bytes):
        variables = [variable for variable, _ in buffer]
        packed = buffer[0][1][0][1] if len(buffer) == 1 else tf.concat(
            [tf.reshape(gradient, [-1]) for _, [(_, gradient)] in buffer], 0)
        packed, last = ring.reduce_gradient(packed if mean else scaled(packed, weight), mean, last)
        pieces = [packed] if len(buffer) == 1 else all_reduce.unpacked(packed, variables)
        sums.update(zip((variable.op.name for variable in variables), pieces))
    return sums, last


def _add_rows(ring, gradients, weight, last):
    """Adds up the sparse ones; as `_add_dense`. The sums are `IndexedSlices` with each row once."""
    sparse = [(gradient, variable, _row_shape(gradient, variable)) for gradient, variable in
              gradients if isinstance(gradient, tf.IndexedSlices)]
    if not sparse:
        return {}, last
    found = [tf.unique(slices.indices) for slices, _, _ in sparse]
    sizes = [tf.size(indices) for indices, _ in found]
    with tf.control_dependencies([last]):
        counts = ring.gather(tf.stack(sizes)[tf.newaxis])
    most = tf.unstack(tf.maximum(tf.reduce_max(counts, 0), 1), len(sparse))
    indices, last = _gathered(ring, [tf.cast(each, tf.int64) for each, _ in found], most, counts)
    by_type, rows = {}, {}
    for place, (slices, _, _) in enumerate(sparse):
        dtype = slices.values.dtype.base_dtype
        by_type.setdefault(dtype if dtype in compat.COLLECTIVE_DTYPES else tf.float32,
                           []).append(place)
    for dtype, places in sorted(by_type.items(), key=lambda item: item[0].name):
        own = [tf.cast(tf.reshape(tf.math.unsorted_segment_sum(
            scaled(sparse[place][0], weight).values, found[place][1], sizes[place]),
            [-1] + sparse[place][2]), dtype) for place in places]
        values, last = _gathered(ring, own, [most[place] for place in places], last)
        rows.update(zip(places, values))
    sums = {}
    for place, (slices, variable, _) in enumerate(sparse):
        is_row = tf.reshape(tf.sequence_mask(counts[:, place], most[place]), [-1])
        sums[variable.op.name] = each_row_once(tf.IndexedSlices(
            tf.cast(tf.boolean_mask(rows[place], is_row), slices.values.dtype),
            tf.cast(tf.boolean_mask(indices[place], is_row), slices.indices.dtype),
            slices.dense_shape))
    return sums, last


def _gathered(ring, tensors, most, last):
    """Tensors [n, …] of one type of all W workers, in one message.

    Args:
      ring: `Collectives`.
      tensors: list of tensors, static but for n, which differs by worker.
      most: list of the largest n of each, on any worker.
      last: what the message waits for.

    Returns:
      `(list of tensors [W * most, …], the message)`; each worker's rows come first among its own.
    """
    padded = [tf.pad(each, [[0, count - tf.shape(each)[0]]] + [[0, 0]] * (each.shape.ndims - 1))
              for each, count in zip(tensors, most)]
    with tf.control_dependencies([last]):
        received = ring.gather(tf.concat([tf.reshape(each, [-1]) for each in padded], 0))
    parts = tf.split(tf.reshape(received, [ring.num_workers, -1]),
                     tf.stack([tf.size(each) for each in padded]), 1, num=len(padded))
    return [tf.reshape(part, [-1] + each.shape.as_list()[1:])
            for part, each in zip(parts, tensors)], received


def _row_shape(slices, variable):
    """The static shape of a row, a list."""
    shape = slices.values.shape[1:] if slices.values.shape.ndims else tf.TensorShape(None)
    shape = shape.merge_with(variable.get_shape()[1:])
    if not shape.is_fully_defined():
        raise ClusterError('the sparse gradient of %r has rows of unknown shape, which cannot be '
                           'sent: give the variable a static shape.' % variable.op.name)
    return shape.as_list()
