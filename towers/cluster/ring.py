"""Gradients over the machines of a ring, by TensorFlow's collective operations.

Each worker has a session of its own, which sees this worker's devices alone. All workers run the
same collective operations; TensorFlow brings them together by their keys. Dense gradients share
buffers, filled in the reverse order of the variables, as a backward pass computes them: the first
are sent while it goes on. With `Cluster(wire=…)` they travel as 16-bit numbers: every worker
gathers those of all, and adds them up in float32, in one order, so that the sums are the same bits.

Sparse gradients are sent as rows. Where the number of rows is static, as of a lookup of
`[batch, ids]`, all go in one message of each type, their indices as bits in front of their rows.
Else three messages: the numbers of rows of all gradients together, then all indices, then the rows
of each type. A worker with fewer rows fills up with rows that are cut off again.
"""

import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.cluster import worker_step
from towers.cluster.machines import Begun, Engine, Exchanged, Pairs
from towers.errors import ClusterError
from towers.gradients.gradient_pairs import each_row_once
from towers.graph.graph_walk import bytes_of
from towers.placement.variable_device import only_device
from towers.whole_batch.workers import Workers

BUFFER_MB = 4.  # MiB of gradients that travel together; larger ones in pieces
WIRES = {'float16': tf.float16, 'bfloat16': tf.bfloat16}
MOST_GATHERED = 3
"""Workers W up to which 2 (W - 1) bytes a gathered number are fewer than a ring's 8 (W - 1) / W."""

_GROUP = 7919  # no group that a program's own collectives are likely to use
_HALVED = 1 << 20  # bytes from which one half of a tensor is added up while the other is sent
_ADDED_UP = (tf.float32, tf.float64)  # a sum of float16 overflows where the mean does not
# Types that every version sends, and what each of them holds without loss.
_SENT = {
    tf.float32: (tf.float32, tf.float16, tf.bfloat16),
    tf.float64: (tf.float64,),
    tf.int32: (tf.int32, tf.bool, tf.uint8, tf.int8, tf.int16, tf.uint16),
    tf.int64: (tf.int64, tf.uint32),
}

Sums = typing.Dict[str, typing.Any]
"""The sum over the workers of each gradient, by the name of its variable."""


class Sent(typing.NamedTuple):
    """What becomes of a message between all workers."""
    values: typing.Any  # a tensor, or what the function says that returns this
    last: typing.Any  # the last message of it, for which the next one waits


def begin_step(cluster: typing.Any, shares: worker_step.Shares) -> Begun:
    """The `Begun` of a step of the workers of a ring. `cluster` is the `Cluster`, and `shares` have
    the weight of this worker."""
    ring = Collectives(cluster)
    with tf.name_scope('ring'):
        begun = worker_step.session_begun()
        first = begun.check
        weight: typing.Any = shares.constant
        total = None
        if shares.are_weighted:  # known when the batch is, before the backward pass
            with only_device('/cpu:0'):
                first = ring.reduce(tf.reshape(shares.own_examples(), [1]), first)
                total = first[0]
                weight = shares.weight(total)

    def combine(gradients, loss, values):
        del loss  # of parameter servers
        has_equal_rows = shares.same_examples is not None
        return _combined(ring, gradients, begun, first, total, values, has_equal_rows)

    workers = Workers(
        cluster.num_workers, cluster.rank, shares.part_of_batch(weight), shares.has_batch(),
        lambda tensor: _sum_of_values(ring, tensor, begun.check))
    return Begun(combine, weight, workers)


def _sum_of_values(ring: 'Collectives', tensor: tf.Tensor, last: typing.Any) -> tf.Tensor:
    """The sum of the workers' values of the forward pass, or of their gradients; waits for `last`.
    TensorFlow brings them together by their keys, in whatever order each worker has them."""
    sent = sent_type(tensor.dtype)
    if sent is None:
        raise no_sum(tensor)
    summand = tf.cast(tensor, sent)
    if tensor.shape.num_elements():
        return tf.cast(ring.reduce(summand, last), tensor.dtype)
    # TensorFlow's reduction of no number at all is a segmentation fault: one more goes with them.
    vector = tf.pad(tf.reshape(summand, [-1]), [[0, 1]])
    total = tf.reshape(ring.reduce(vector, last)[:-1], tf.shape(tensor))
    return tf.cast(total, tensor.dtype)


def no_sum(tensor: tf.Tensor) -> ClusterError:
    """The error for a value of a type that workers do not add up."""
    return ClusterError('value %r of the whole batch is %s, which workers cannot add up: cast it '
                        'to a float, or to int64.' % (tensor.op.name, tensor.dtype.name))


def _combined(ring: 'Collectives', gradients: Pairs, begun: worker_step.SessionBegun,
              first: typing.Any, total: typing.Optional[tf.Tensor],
              values: typing.Sequence[tf.Tensor], has_equal_rows: bool) -> Exchanged:
    """The `Exchanged` of a machine's gradients over the workers of a ring.

    Args:
      ring: makes the operations.
      gradients: of this worker.
      begun: keeps steps from being made in a session that has not begun.
      first: the message, or operation, for which the first message waits.
      total: the number of examples of all workers, where it is not static.
      values: exchanged values that each step computes.
      has_equal_rows: whether a static number of rows is that of all workers.
    """
    for _, variable in gradients:
        sent_as(variable)  # no complex gradient is added up
    with only_device('/cpu:0'), tf.name_scope('ring'):
        # Dense and sparse gradients form two chains, each in the same order on all workers.
        dense = _add_dense(ring, gradients, first)
        sparse = _add_rows(ring, gradients, first, has_equal_rows)
        # The end comes after all messages, for which the other workers would wait.
        with tf.control_dependencies([dense.last, sparse.last] + list(values)):
            ended = tf.no_op() if total is None else worker_step.raise_at_end(total <= 0.)
        sums = dict(dense.values, **sparse.values)
        gradients = worker_step.after(ended, [(sums[variable.op.name], variable)
                                              for _, variable in gradients])
    conditions = [] if ring.active is None else [ended]
    return Exchanged(gradients, conditions, begun.begin)


def _add_dense(ring: 'Collectives', gradients: Pairs, last: typing.Any) -> Sent:
    """Adds up the dense gradients: a `Sent` with `Sums`.

    Args:
      ring: makes the operations.
      gradients: of this worker.
      last: the message, or operation, for which the first message waits.
    """
    dense = [pair for pair in gradients if not isinstance(pair[0], tf.IndexedSlices)]
    sums: Sums = {}
    for buffer in buffers_of(dense, ring.buffer_bytes):
        packed = _packed([gradient for gradient, _ in buffer])
        packed, last = ring.reduce_tensor(packed, last)
        variables = [variable for _, variable in buffer]
        for variable, gradient in zip(variables, _unpacked(packed, variables)):
            sums[variable.op.name] = gradient
    return Sent(sums, last)


def _packed(gradients: typing.List[tf.Tensor]) -> tf.Tensor:
    """The numbers of several gradients as one vector; of one gradient as it is."""
    if len(gradients) == 1:
        return gradients[0]
    return tf.concat([tf.reshape(gradient, [-1]) for gradient in gradients], 0)


def _unpacked(packed: tf.Tensor, variables: typing.List[tf.Variable]) -> typing.List[tf.Tensor]:
    """The gradients of these variables from what `_packed` made of them."""
    if len(variables) == 1:
        return [packed]
    shapes = [variable.get_shape() for variable in variables]
    vectors = tf.split(packed, [shape.num_elements() for shape in shapes])
    return [tf.reshape(vector, shape.as_list()) for vector, shape in zip(vectors, shapes)]


def buffers_of(pairs: Pairs, most: int) -> typing.List[Pairs]:
    """Lists of `(gradient, variable)` that travel together, in `most` bytes; a larger gradient
    travels alone. Those made last come first."""
    buffers: typing.List[Pairs] = []
    open_buffers: typing.Dict[tf.DType, Pairs] = {}  # one of each type is filled
    bytes_used: typing.Dict[tf.DType, int] = {}
    for gradient, variable in reversed(pairs):
        size = bytes_of(variable)
        if size > most or not variable.get_shape().is_fully_defined():
            buffers.append([(gradient, variable)])
            continue
        dtype = gradient.dtype.base_dtype
        if dtype not in open_buffers or bytes_used[dtype] + size > most:
            open_buffers[dtype] = []
            bytes_used[dtype] = 0
            buffers.append(open_buffers[dtype])
        open_buffers[dtype].append((gradient, variable))
        bytes_used[dtype] += size
    return buffers


class _Rows(typing.NamedTuple):
    """A sparse gradient of this worker, with each row once."""
    slices: tf.IndexedSlices
    variable: tf.Variable
    indices: tf.Tensor  # [n], all different
    places: tf.Tensor  # of each row of the slices, its place among the indices
    size: tf.Tensor  # n, an int scalar


def _add_rows(ring: 'Collectives', gradients: Pairs, last: typing.Any,
              has_equal_rows: bool) -> Sent:
    """Adds up the sparse gradients, each to `IndexedSlices` with each row once: a `Sent` with
    `Sums`.

    Args:
      ring: makes the operations.
      gradients: of this worker.
      last: the message, or operation, for which the first message waits.
      has_equal_rows: whether a static number of rows is that of all workers.
    """
    static: Pairs = []
    dynamic: Pairs = []
    for slices, variable in gradients:
        if not isinstance(slices, tf.IndexedSlices):
            continue
        if has_equal_rows and _has_few_static_rows(slices, variable):
            static.append((slices, variable))
        else:
            dynamic.append((slices, variable))
    sums: Sums = {}
    for dtype, pairs in _by_sent_type(static):
        of_type, last = _add_static_rows(ring, pairs, dtype, last)
        sums.update(of_type)
    of_dynamic, last = _add_dynamic_rows(ring, dynamic, last)
    return Sent(dict(sums, **of_dynamic), last)


def _has_few_static_rows(slices: tf.IndexedSlices, variable: tf.Variable) -> bool:
    """Whether a sparse gradient has a static number of rows, and no more of them than the variable:
    of more, many are the same row, which is sent once then."""
    num_rows = slices.indices.shape.num_elements()
    return bool(num_rows) and num_rows <= variable.get_shape().as_list()[0]


def _by_sent_type(pairs: Pairs) -> typing.List[typing.Tuple[tf.DType, Pairs]]:
    """The sparse gradients that are sent in each type, sorted by the type's name."""
    by_type: typing.Dict[tf.DType, Pairs] = {}
    for slices, variable in pairs:
        dtype = slices.values.dtype.base_dtype
        sent = dtype if dtype in _ADDED_UP else tf.float32
        by_type.setdefault(sent, []).append((slices, variable))
    return sorted(by_type.items(), key=lambda item: item[0].name)


def _add_static_rows(ring: 'Collectives', pairs: Pairs, dtype: tf.DType, last: typing.Any) -> Sent:
    """Adds up sparse gradients of static numbers of rows in one message, as `_add_rows`; their
    rows are sent in a type."""
    own = [_with_indices(slices, variable, dtype) for slices, variable in pairs]
    sizes = [matrix.shape.num_elements() for matrix in own]
    vector = tf.concat([tf.reshape(matrix, [-1]) for matrix in own], 0)
    received = ring.gather_static(vector, last)
    by_worker = tf.reshape(received, [ring.num_workers, -1])
    sums: Sums = {}
    for piece, matrix, (slices, variable) in zip(tf.split(by_worker, sizes, 1), own, pairs):
        matrices = tf.reshape(piece, [-1, matrix.shape.as_list()[1]])
        of_all = _without_indices(matrices, slices, variable)
        sums[variable.op.name] = each_row_once(of_all)
    return Sent(sums, received)


def _with_indices(slices: tf.IndexedSlices, variable: tf.Variable, dtype: tf.DType) -> tf.Tensor:
    """The n rows of a sparse gradient as a matrix of a type: in front of each row the bits of its
    index, one number or two."""
    num_rows = slices.indices.shape.num_elements()
    indices = slices.indices
    if indices.dtype.size < dtype.size:
        indices = tf.cast(indices, tf.int64)
    bits = tf.reshape(tf.bitcast(indices, dtype), [num_rows, -1])
    num_numbers = variable.get_shape()[1:].num_elements()
    rows = tf.reshape(tf.cast(slices.values, dtype), [num_rows, num_numbers])
    return tf.concat([bits, rows], 1)


def _without_indices(matrix: tf.Tensor, like: tf.IndexedSlices,
                     variable: tf.Variable) -> tf.IndexedSlices:
    """The sparse gradient of rows with the bits of their indices, of the types of another one."""
    num_numbers = variable.get_shape()[1:].num_elements()
    num_bits = matrix.shape.as_list()[1] - num_numbers
    index_type = tf.int64 if num_bits * matrix.dtype.size == tf.int64.size else tf.int32
    bits, rows = tf.split(matrix, [num_bits, num_numbers], 1)
    if num_bits == 1:
        bits = tf.reshape(bits, [-1])
    indices = tf.cast(tf.bitcast(bits, index_type), like.indices.dtype)
    row_shape = variable.get_shape()[1:].as_list()
    values = tf.cast(tf.reshape(rows, [-1] + row_shape), like.values.dtype)
    return tf.IndexedSlices(values, indices, like.dense_shape)


def _add_dynamic_rows(ring: 'Collectives', sparse: Pairs, last: typing.Any) -> Sent:
    """Adds up sparse gradients whose numbers of rows differ from worker to worker.

    Three kinds of messages: the numbers of rows; the indices; the rows, one message for each type.

    Returns:
      `Sent` with the sums, `tf.IndexedSlices` with each row once.
    """
    if not sparse:
        return Sent({}, last)
    unique = [tf.unique(slices.indices) for slices, _ in sparse]
    sizes = [tf.size(indices) for indices, _ in unique]
    own = [_Rows(slices, variable, indices, places, size)
           for (slices, variable), (indices, places), size in zip(sparse, unique, sizes)]
    counts = ring.gather(tf.stack(sizes)[tf.newaxis], last)  # [W, number of gradients]
    # All workers pad to the most rows of any worker; at least one, as a message is never empty.
    most_rows = tf.unstack(tf.maximum(tf.reduce_max(counts, 0), 1), len(sparse))
    all_indices, last = _gathered(ring, [tf.cast(each.indices, tf.int64) for each in own],
                                  most_rows, counts)
    rows_by_position: typing.Dict[int, tf.Tensor] = {}
    for dtype, positions in _positions_by_type(own):
        sums_of_rows = [_sums_of_rows(own[position], dtype) for position in positions]
        most_of_type = [most_rows[position] for position in positions]
        gathered, last = _gathered(ring, sums_of_rows, most_of_type, last)
        rows_by_position.update(zip(positions, gathered))
    sums: Sums = {}
    for position, rows in enumerate(own):
        # The rows without the padding.
        is_row = tf.reshape(tf.sequence_mask(counts[:, position], most_rows[position]), [-1])
        of_all = tf.IndexedSlices(
            tf.cast(tf.boolean_mask(rows_by_position[position], is_row),
                    rows.slices.values.dtype),
            tf.cast(tf.boolean_mask(all_indices[position], is_row), rows.slices.indices.dtype),
            rows.slices.dense_shape)
        sums[rows.variable.op.name] = each_row_once(of_all)
    return Sent(sums, last)


def _positions_by_type(own: typing.List[_Rows]
                       ) -> typing.List[typing.Tuple[tf.DType, typing.List[int]]]:
    """The positions in `own` of the gradients that are sent in each type, sorted by the type's
    name."""
    positions: typing.Dict[tf.DType, typing.List[int]] = {}
    for position, rows in enumerate(own):
        dtype = rows.slices.values.dtype.base_dtype
        sent = dtype if dtype in _ADDED_UP else tf.float32
        positions.setdefault(sent, []).append(position)
    return sorted(positions.items(), key=lambda item: item[0].name)


def _sums_of_rows(rows: _Rows, dtype: tf.DType) -> tf.Tensor:
    """The values of a worker's gradient, [n, …] with each row once, in a type."""
    sums = tf.math.unsorted_segment_sum(rows.slices.values, rows.places, rows.size)
    row_shape = rows.variable.get_shape()[1:].as_list()
    return tf.cast(tf.reshape(sums, [-1] + row_shape), dtype)


def _gathered(ring: 'Collectives', tensors: typing.List[tf.Tensor], most: typing.List[tf.Tensor],
              last: typing.Any) -> Sent:
    """The tensors of all W workers in one message: a `Sent` with a list of tensors [W * most, …],
    each worker's rows first.

    Args:
      ring: makes the operations.
      tensors: of this worker, each [n, …], of one type.
      most: the largest n of all workers, for each of the tensors.
      last: the message for which this one waits.
    """
    padded = []
    for tensor, count in zip(tensors, most):
        missing = [[0, count - tf.shape(tensor)[0]]]
        padded.append(tf.pad(tensor, missing + [[0, 0]] * (tensor.shape.ndims - 1)))
    received = ring.gather(tf.concat([tf.reshape(each, [-1]) for each in padded], 0), last)
    by_worker = tf.reshape(received, [ring.num_workers, -1])
    sizes = tf.stack([tf.size(each) for each in padded])
    pieces = tf.split(by_worker, sizes, 1, num=len(padded))
    gathered = [tf.reshape(piece, [-1] + tensor.shape.as_list()[1:])
                for piece, tensor in zip(pieces, padded)]
    return Sent(gathered, received)


def sent_type(dtype: tf.DType) -> typing.Optional[tf.DType]:
    """The type that numbers of a type have on their way, without loss; None if there is none."""
    for sent, held in _SENT.items():
        if dtype in held:
            return sent
    return None


def sent_as(variable: tf.Variable) -> tf.DType:
    """The type that a variable has on its way from worker 0, without loss; or `ClusterError`."""
    dtype = variable.dtype.base_dtype
    sent = sent_type(dtype)
    if sent is not None and variable.get_shape().is_fully_defined():
        return sent
    raise ClusterError(
        'variable %r is %s of shape %s, which worker 0 cannot send to the others: make it a '
        'local variable, or one of a number type and a static shape.' % (
            variable.op.name, dtype.name, variable.get_shape()))


class Collectives:
    """Makes the collective operations of one worker, with keys that count on within a graph. Each
    waits for the one before it (`last`) by an edge of its own: TensorFlow drops edges of constants
    with the operations that it simplifies.

    Attributes:
      num_workers: how many take part.
      buffer_bytes: the size of a buffer of gradients.
      active: see `Cluster`.
    """

    def __init__(self, cluster: typing.Any):
        self.num_workers = cluster.num_workers
        self.active = cluster.active
        self.buffer_bytes = max(1, int(cluster.buffer_mb * (1 << 20)))
        self._rank = cluster.rank
        self._wire = WIRES.get(cluster.wire)
        self._key = max([0] + _keys_in_use(tf.get_default_graph()))

    def reduce(self, tensor: tf.Tensor, last: typing.Any, mean: bool = False) -> tf.Tensor:
        """The sum, or the mean, of the workers' tensors of one shape; waits for `last`."""
        offsets = [0, 0] if bytes_of(tensor) >= _HALVED else [0]  # an offset a half
        with tf.control_dependencies([last]):
            reduced = tf.raw_ops.CollectiveReduce(
                input=tensor, merge_op='Add', final_op='Div' if mean else 'Id',
                subdiv_offsets=offsets, **self._next())
        reduced.set_shape(tensor.shape)
        return reduced

    def reduce_tensor(self, given: tf.Tensor, last: typing.Any, mean: bool = False) -> Sent:
        """The sum or mean of the workers' dense gradients, or weights, of one static shape; waits
        for `last`. A large one is sent in several pieces: in one, 64 MB take twice as long."""
        dtype = given.dtype.base_dtype
        tensor = given if dtype in _ADDED_UP else tf.cast(given, tf.float32)
        pieces = self._pieces(tensor)
        reduced = []
        for piece in pieces:
            if self._wire is not None and piece.shape.is_fully_defined():
                piece, last = self._reduce_16(piece, last)
            else:
                piece = last = self.reduce(piece, last, mean)
            reduced.append(piece)
        total = reduced[0]
        if len(pieces) > 1:
            total = tf.reshape(tf.concat(reduced, 0), tensor.shape)
        return Sent(tf.cast(total, dtype), last)

    def _pieces(self, tensor: tf.Tensor) -> typing.List[tf.Tensor]:
        """A tensor in pieces that fit a buffer, about equally large; one that fits, as it is."""
        num_pieces = -(-bytes_of(tensor) // self.buffer_bytes)  # rounded up
        if num_pieces <= 1:
            return [tensor]
        count = tensor.shape.num_elements()
        ends = [count * number // num_pieces for number in range(num_pieces + 1)]
        sizes = [end - start for start, end in zip(ends, ends[1:])]
        return tf.split(tf.reshape(tensor, [-1]), sizes)

    def _reduce_16(self, tensor: tf.Tensor, last: typing.Any) -> Sent:
        """The sum as by `reduce`, in 16 bits on the way; they travel in pairs, by their bits."""
        count = tensor.shape.num_elements()
        own = tf.cast(tf.reshape(tensor, [-1]), self._wire)
        pairs = tf.reshape(tf.pad(own, [[0, count % 2]]), [1, -1, 2])
        shape = [self.num_workers, pairs.shape[1]]
        pairs = tf.bitcast(pairs, tf.int32)
        with tf.control_dependencies([last]):
            gathered = tf.raw_ops.CollectiveGather(input=pairs, shape=shape, **self._next())
        gathered.set_shape(shape)
        of_workers = tf.unstack(tf.bitcast(gathered, self._wire))
        total = sum(tf.cast(each, tf.float32) for each in of_workers)
        total = tf.reshape(tf.reshape(total, [-1])[:count], tensor.shape)
        return Sent(tf.cast(total, tensor.dtype), gathered)

    def gather(self, rows: tf.Tensor, last: typing.Any) -> tf.Tensor:
        """The workers' tensors `rows` [n, …], of one n in a step, one after the other: [W n, …];
        waits for `last`."""
        if compat.GATHERS_ANY_ROWS:
            shape = [None] + rows.shape.as_list()[1:]
            with tf.control_dependencies([last]):
                return tf.raw_ops.CollectiveGather(input=rows, shape=shape, **self._next())
        alone = compat.among_zeros(rows, self._rank, self.num_workers)
        return tf.cast(self.reduce(alone, last), rows.dtype)

    def gather_static(self, vector: tf.Tensor, last: typing.Any) -> tf.Tensor:
        """The workers' vectors of one static size, one after the other, bit by bit; waits for
        `last`."""
        shape = [self.num_workers * vector.shape.as_list()[0]]
        with tf.control_dependencies([last]):
            gathered = tf.raw_ops.CollectiveGather(input=vector, shape=shape, **self._next())
        gathered.set_shape(shape)
        return gathered

    def broadcast(self, variables: typing.Iterable[tf.Variable]) -> tf.Operation:
        """An operation that gives variables, the same on all workers, their values on worker 0."""
        operations = []
        last: typing.List[tf.Tensor] = []
        for variable in sorted(variables, key=lambda each: each.op.name):
            with only_device('/cpu:0'), tf.name_scope('broadcast'):
                with tf.control_dependencies(last):
                    value = self._from_worker_0(variable)
                last = [value]
                if self._rank == 0:
                    operations.append(value.op)
                else:
                    value = tf.cast(value, variable.dtype.base_dtype)
                    operations.append(tf.assign(variable, value).op)
        return tf.group(*operations)

    def _from_worker_0(self, variable: tf.Variable) -> tf.Tensor:
        """The value of a variable on worker 0, which sends it, in the type of `sent_as`."""
        sent = sent_as(variable)
        shape = variable.get_shape()
        if self._rank == 0:
            return tf.raw_ops.CollectiveBcastSend(
                input=tf.cast(variable.read_value(), sent), shape=shape, **self._next())
        return tf.raw_ops.CollectiveBcastRecv(T=sent, shape=shape, **self._next())

    def _next(self) -> typing.Dict[str, int]:
        """The attributes by which TensorFlow brings this operation of all workers together."""
        self._key += 1
        return {'group_size': self.num_workers, 'group_key': _GROUP, 'instance_key': self._key}


def _keys_in_use(graph: tf.Graph) -> typing.List[int]:
    """The keys of the collective operations that towers has made in a graph."""
    keys = []
    for op in graph.get_operations():
        if op.type.startswith('Collective') and 'group_key' in op.node_def.attr:
            if op.get_attr('group_key') == _GROUP:
                keys.append(op.get_attr('instance_key'))
    return keys


def _broadcast(cluster: typing.Any, variables: typing.Iterable[tf.Variable]) -> tf.Operation:
    """The operation by which all workers get these variables of worker 0."""
    return Collectives(cluster).broadcast(variables)


def _configure(cluster: typing.Any, config: tf.ConfigProto) -> None:
    """Adds to a session's config what the collectives of this cluster need."""
    # Without this filter, TF 1.15 waits for the devices of all workers, and hangs.
    config.device_filters.append('/job:%s/task:%d' % (cluster.job, cluster.rank))
    config.experimental.collective_group_leader = '/job:worker/replica:0/task:0'


ENGINE = Engine(name="TensorFlow's ring", arguments=['buffer_mb', 'every', 'wire'],
                begin_step=begin_step, broadcast=_broadcast, configure=_configure)
