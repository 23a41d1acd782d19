"""Sparse gradients over the workers of a ring, which are sent as rows.

Every worker gathers the rows of all workers, and adds up those with one index. Where the number of
rows is static and the same on all workers, as in a lookup of `[batch, ids]`, all gradients of a
type go in one message, their indices as bits beside their rows; small dense gradients of that type
go with them, and need no message of their own. Else there are three kinds of messages: the numbers
of rows of all gradients together, then all indices, then the rows of each type. Since a message has
one size on all workers, a worker with fewer rows adds padding, which is cut off again.

Its test is `tests/cluster/test_ring.py`.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.cluster.collectives import Collectives, Received
from towers.cluster.engine import Pairs
from towers.cluster.sent_types import type_of_sent_gradient
from towers.gradients.gradient_pairs import each_row_once, variables_of
from towers.graph.graph_walk import bytes_of

_MOST_BESIDE_ROWS = 1 << 16
"""Bytes of dense gradients that go in a message of rows. Of W workers, each sends them W - 1 times,
and to the ring of a sum 2 (W - 1) / W times: where they are small, a message costs more."""

Sums = typing.Dict[str, typing.Any]
"""The sum over the workers of each gradient, by the name of its variable."""


def add_rows(ring: Collectives, gradients: Pairs, beside_rows: Pairs, awaited: typing.Any,
             have_equal_batches: bool) -> Received:
    """Adds up the sparse gradients over the workers, and dense ones that travel with them.

    Args:
      ring: makes the messages.
      gradients: all gradients of this worker.
      beside_rows: what `dense_beside_rows` returned for these gradients.
      awaited: the message, or operation, for which the first message waits.
      have_equal_batches: whether all workers have the same static number of examples, so that a
        static number of rows is the same on all workers, too.

    Returns:
      `Received` with `Sums`; a sum of sparse gradients is `tf.IndexedSlices` with each row once.
    """
    sums: Sums = {}
    of_static_number = _pairs_of_static_rows(gradients, have_equal_batches)
    for sent, pairs in _by_sent_type(of_static_number):
        dense = _of_sent_type(beside_rows, sent)
        sums_of_type, awaited = _add_static_rows(ring, pairs, dense, sent, awaited)
        sums.update(sums_of_type)
    of_any_number = [(slices, variable) for slices, variable in gradients
                     if isinstance(slices, tf.IndexedSlices) and variable.op.name not in sums]
    if of_any_number:
        other_sums, awaited = _add_dynamic_rows(ring, of_any_number, awaited)
        sums.update(other_sums)
    return Received(sums, awaited)


def dense_beside_rows(ring: Collectives, gradients: Pairs, have_equal_batches: bool) -> Pairs:
    """The dense gradients that travel in a message of static rows: all dense gradients of a type in
    which such rows are sent, where together they are small. Sent in 16 bits (`Cluster.wire`), dense
    gradients have messages of their own.

    The arguments are those of `add_rows`.
    """
    if ring.sends_16_bits:
        return []
    dense = [(gradient, variable) for gradient, variable in gradients
             if not isinstance(gradient, tf.IndexedSlices)]
    beside_rows: Pairs = []
    for sent, _ in _by_sent_type(_pairs_of_static_rows(gradients, have_equal_batches)):
        of_type = _of_sent_type(dense, sent)
        if sum(bytes_of(variable) for variable in variables_of(of_type)) <= _MOST_BESIDE_ROWS:
            beside_rows.extend(of_type)
    return beside_rows


def _pairs_of_static_rows(gradients: Pairs, have_equal_batches: bool) -> Pairs:
    """The sparse gradients that are sent with a static number of rows, and their variables; the
    arguments are those of `add_rows`."""
    if not have_equal_batches:
        return []
    return [(slices, variable) for slices, variable in gradients
            if isinstance(slices, tf.IndexedSlices) and has_few_static_rows(slices, variable)]


def has_few_static_rows(slices: tf.IndexedSlices, variable: tf.Variable) -> bool:
    """Whether a sparse gradient has a static number of rows, at most as many as its variable has.

    Of 1,000 rows for a variable of 50 rows, many have the same index. It is cheaper to add up the
    rows of one index before they are sent; the number of rows that remain is not static.
    """
    num_rows = slices.indices.shape.num_elements()
    if num_rows is None or not variable.get_shape().is_fully_defined():
        return False
    if num_rows == 0:  # a message must not be empty: messages of dynamic rows have padding
        return False
    return num_rows <= variable.get_shape().as_list()[0]


def _by_sent_type(pairs: Pairs) -> typing.List[typing.Tuple[tf.DType, Pairs]]:
    """The sparse gradients that are sent in each type, in the same order on all workers: sorted by
    the name of the type."""
    by_type: typing.Dict[tf.DType, Pairs] = {}
    for slices, variable in pairs:
        by_type.setdefault(type_of_sent_gradient(slices.dtype), []).append((slices, variable))
    return sorted(by_type.items(), key=lambda item: item[0].name)


def _of_sent_type(pairs: Pairs, sent: tf.DType) -> Pairs:
    """Those of some gradients, with their variables, that are sent in a type."""
    return [(gradient, variable) for gradient, variable in pairs
            if type_of_sent_gradient(gradient.dtype) == sent]


# ---- static numbers of rows ----------------------------------------------------------------------

def _add_static_rows(ring: Collectives, pairs: Pairs, dense: Pairs, sent: tf.DType,
                     awaited: typing.Any) -> Received:
    """Adds up sparse gradients that have static numbers of rows, in one message.

    Args:
      ring: makes the message.
      pairs: this worker's `(gradient, variable)` pairs.
      dense: pairs with dense gradients, which travel with them; may be empty.
      sent: the type in which the rows are sent.
      awaited: the message, or operation, for which this one waits.

    Returns:
      `Received` with `Sums`.
    """
    vectors: typing.List[tf.Tensor] = []  # indices and values of each gradient in turn
    for slices, variable in pairs:
        vectors.extend(vectors_of(slices, variable, sent))
    if dense:
        vectors.append(_packed(dense, sent))
    received = ring.gather_static(tf.concat(vectors, 0), awaited)
    by_worker = tf.reshape(received, [ring.num_workers, -1])
    sizes = [vector.shape.num_elements() for vector in vectors]
    vectors_of_workers = tf.split(by_worker, sizes, 1)  # for each of `vectors` [W, its size]
    sums: Sums = {}
    if dense:
        of_workers = tf.unstack(vectors_of_workers.pop())
        sums.update(_unpacked(tf.add_n(of_workers), dense))  # in one order on all workers
    indices_of_workers = vectors_of_workers[0::2]
    values_of_workers = vectors_of_workers[1::2]
    for (slices, variable), bits, values in zip(pairs, indices_of_workers, values_of_workers):
        sums[variable.op.name] = each_row_once(slices_of(bits, values, slices, variable))
    return Received(sums, received)


def _packed(dense: Pairs, sent: tf.DType) -> tf.Tensor:
    """The numbers of dense gradients as one vector of the type `sent`."""
    return tf.concat([tf.reshape(tf.cast(gradient, sent), [-1]) for gradient, _ in dense], 0)


def _unpacked(packed: tf.Tensor, dense: Pairs) -> Sums:
    """The dense gradients of which `packed` has the numbers, as `_packed` put them there; `dense`
    are gradients of the same types and shapes."""
    sizes = [variable.get_shape().num_elements() for variable in variables_of(dense)]
    unpacked: Sums = {}
    for vector, (gradient, variable) in zip(tf.split(packed, sizes), dense):
        values = tf.reshape(vector, variable.get_shape().as_list())
        unpacked[variable.op.name] = tf.cast(values, gradient.dtype)
    return unpacked


class _Vectors(typing.NamedTuple):
    """A sparse gradient as two vectors of one type."""
    bits: tf.Tensor
    """The n indices, as their bits: [n], or [2 n] where an index has 64 bits and the type 32."""
    values: tf.Tensor  # [n * numbers of a row]


def vectors_of(slices: tf.IndexedSlices, variable: tf.Variable, sent: tf.DType) -> _Vectors:
    """The indices and the values of a sparse gradient.

    They are two vectors, since large pieces are copied faster than the many short rows of a matrix
    that has an index in front of each row.

    Args:
      slices: the gradient, of n rows.
      variable: its variable.
      sent: the type of the vectors, a float of 32 or 64 bits.
    """
    indices = slices.indices
    # `tf.bitcast` makes two floats of 32 bits from an index of 64 bits, but no float of 64 bits
    # from an index of 32 bits: then the index is cast to 64 bits first.
    if indices.dtype.size < sent.size:
        indices = tf.cast(indices, tf.int64)
    bits = tf.reshape(tf.bitcast(indices, sent), [-1])
    num_rows = slices.indices.shape.num_elements()
    num_values = num_rows * variable.get_shape()[1:].num_elements()
    values = tf.reshape(tf.cast(slices.values, sent), [num_values])
    return _Vectors(bits, values)


def slices_of(bits: tf.Tensor, values: tf.Tensor, like: tf.IndexedSlices,
              variable: tf.Variable) -> tf.IndexedSlices:
    """The sparse gradient that has the rows of W workers.

    Args:
      bits: `_Vectors.bits` of each worker, [W, …].
      values: `_Vectors.values` of each worker, [W, …].
      like: a gradient of the same types, and of as many rows as each worker has.
      variable: its variable.
    """
    floats_per_index = bits.shape.as_list()[1] // like.indices.shape.num_elements()
    indices = _indices_in(bits, floats_per_index)
    row_shape = variable.get_shape()[1:].as_list()
    rows = tf.cast(tf.reshape(values, [-1] + row_shape), like.values.dtype)
    return tf.IndexedSlices(rows, tf.cast(indices, like.indices.dtype), like.dense_shape)


def _indices_in(bits: tf.Tensor, floats_per_index: int) -> tf.Tensor:
    """The indices, int32 or int64, of all workers, one after the other.

    Args:
      bits: the bits of the indices, as floats of 32 or 64 bits.
      floats_per_index: 2 where an index has 64 bits and a float has 32, else 1.
    """
    if floats_per_index == 2:
        return tf.bitcast(tf.reshape(bits, [-1, 2]), tf.int64)
    index_type = tf.int64 if bits.dtype == tf.float64 else tf.int32
    return tf.bitcast(tf.reshape(bits, [-1]), index_type)


# ---- numbers of rows that only a step knows ------------------------------------------------------

class _Rows(typing.NamedTuple):
    """A sparse gradient of this worker, with the indices of its rows."""
    slices: tf.IndexedSlices
    variable: tf.Variable
    indices: tf.Tensor  # [n], each index of the slices once
    positions: tf.Tensor  # for each row of the slices, the position of its index in `indices`
    num_rows: tf.Tensor  # n, an int scalar


def _add_dynamic_rows(ring: Collectives, pairs: Pairs, awaited: typing.Any) -> Received:
    """Adds up sparse gradients whose numbers of rows differ from worker to worker.

    Args:
      ring: makes the messages.
      pairs: this worker's `(gradient, variable)` pairs.
      awaited: the message, or operation, for which the first message waits.

    Returns:
      `Received` with `Sums`.
    """
    own = [_rows_of(slices, variable) for slices, variable in pairs]
    own_counts = tf.stack([rows.num_rows for rows in own])  # [number of gradients]
    counts = ring.gather(own_counts[tf.newaxis], awaited)  # [W, number of gradients]
    # All workers pad to the most rows of any worker; at least to one row, since a message must not
    # be empty.
    most_rows = tf.unstack(tf.maximum(tf.reduce_max(counts, 0), 1), len(own))
    own_indices = [tf.cast(rows.indices, tf.int64) for rows in own]
    indices, awaited = _gathered(ring, own_indices, most_rows, awaited=counts)
    values, awaited = _gathered_values(ring, own, most_rows, awaited)
    sums: Sums = {}
    for position, rows in enumerate(own):
        is_row = tf.sequence_mask(counts[:, position], most_rows[position])  # [W, most rows]
        is_row = tf.reshape(is_row, [-1])  # False for padding
        values_of_all = tf.boolean_mask(values[position], is_row)
        indices_of_all = tf.boolean_mask(indices[position], is_row)
        slices = tf.IndexedSlices(tf.cast(values_of_all, rows.slices.values.dtype),
                                  tf.cast(indices_of_all, rows.slices.indices.dtype),
                                  rows.slices.dense_shape)
        sums[rows.variable.op.name] = each_row_once(slices)
    return Received(sums, awaited)


def _rows_of(slices: tf.IndexedSlices, variable: tf.Variable) -> _Rows:
    """The `_Rows` of a sparse gradient."""
    indices, positions = tf.unique(slices.indices)
    return _Rows(slices, variable, indices, positions, tf.size(indices))


def _gathered_values(ring: Collectives, own: typing.List[_Rows],
                     most_rows: typing.List[tf.Tensor], awaited: typing.Any) -> Received:
    """The values of the rows of all workers, one message for each type in which they are sent.

    Args:
      ring: makes the messages.
      own: this worker's gradients.
      most_rows: of each gradient, the most rows that a worker has.
      awaited: the message for which the first of these messages waits.

    Returns:
      `Received` with a list of tensors, one for each of `own`, as `_gathered` gives them.
    """
    positions_of_types: typing.Dict[tf.DType, typing.List[int]] = {}  # in `own`
    for position, rows in enumerate(own):
        sent = type_of_sent_gradient(rows.slices.dtype)
        positions_of_types.setdefault(sent, []).append(position)
    values: typing.Dict[int, tf.Tensor] = {}  # by the position of the gradient in `own`
    # Sorted, as all workers have to send in the same order.
    for sent in sorted(positions_of_types, key=lambda dtype: dtype.name):
        positions = positions_of_types[sent]
        sums_of_rows = [_sums_of_rows(own[position], sent) for position in positions]
        most_of_type = [most_rows[position] for position in positions]
        gathered, awaited = _gathered(ring, sums_of_rows, most_of_type, awaited)
        values.update(zip(positions, gathered))
    return Received([values[position] for position in range(len(own))], awaited)


def _sums_of_rows(rows: _Rows, sent: tf.DType) -> tf.Tensor:
    """The values of a worker's gradient, [n, …], in the type in which they are sent: the rows
    of one index are added up."""
    sums = tf.math.unsorted_segment_sum(rows.slices.values, rows.positions, rows.num_rows)
    row_shape = rows.variable.get_shape()[1:].as_list()
    return tf.cast(tf.reshape(sums, [-1] + row_shape), sent)


def _gathered(ring: Collectives, tensors: typing.List[tf.Tensor],
              most_rows: typing.List[tf.Tensor], awaited: typing.Any) -> Received:
    """The tensors of all W workers in one message.

    Args:
      ring: makes the message.
      tensors: of this worker, each [n, …], of one type.
      most_rows: for each of the tensors, the largest n of all workers.
      awaited: the message for which this one waits.

    Returns:
      `Received` with a list of tensors [W * most_rows, …]: in each, worker after worker, the rows
      of a worker and then its padding.
    """
    padded = []
    for tensor, most in zip(tensors, most_rows):
        padding = [[0, most - tf.shape(tensor)[0]]]
        padded.append(tf.pad(tensor, padding + [[0, 0]] * (tensor.shape.ndims - 1)))
    vector = tf.concat([tf.reshape(tensor, [-1]) for tensor in padded], 0)
    received = ring.gather(vector, awaited)
    by_worker = tf.reshape(received, [ring.num_workers, -1])
    sizes = tf.stack([tf.size(tensor) for tensor in padded])
    numbers_by_tensor = tf.split(by_worker, sizes, 1, num=len(padded))  # each [W, size]
    gathered = []
    for numbers, tensor in zip(numbers_by_tensor, padded):
        row_shape = tensor.shape.as_list()[1:]
        gathered.append(tf.reshape(numbers, [-1] + row_shape))
    return Received(gathered, received)
