"""Gradients over the machines of a ring, by TensorFlow's collective operations.

Each worker has a session of its own, which sees this worker's devices alone. All workers run the
same collective operations; TensorFlow brings them together by their keys. Dense gradients share
buffers, filled in the reverse order of the variables, as a backward pass computes them: the first
are sent while it goes on. With `Cluster(wire=…)` they travel as 16-bit numbers: every worker
gathers those of all, and adds them up in float32, in one order, so that the sums are the same bits.

Sparse gradients are sent as rows: the numbers of rows of all gradients together, then all indices,
then the rows of each type. A worker with fewer rows fills up with rows that are cut off again.
"""

import tensorflow.compat.v1 as tf

from towers import compat
from towers.cluster import worker_step
from towers.cluster.machines import Combined, Engine
from towers.errors import ClusterError
from towers.graph.graph_walk import bytes_of
from towers.placement.variable_device import only_device
from towers.tower.gradient_pairs import each_row_once, times

BUFFER_MB = 4.  # MiB of gradients that travel together; larger ones in pieces
WIRES = {'float16': tf.float16, 'bfloat16': tf.bfloat16}
MOST_GATHERED = 3
"""Workers W up to which 2 (W - 1) bytes a gathered number are fewer than a ring's 8 (W - 1) / W."""

_GROUP = 7919  # no group that a program's own collectives are likely to use
_HALVED = 1 << 20  # bytes from which one half of a tensor is added up while the other is sent
_ADDED_UP = (tf.float32, tf.float64)  # a sum of float16 overflows where the mean does not
_SENT = (  # types that every version sends, and what each of them holds without loss
    (tf.float32, (tf.float32, tf.float16, tf.bfloat16)), (tf.float64, (tf.float64,)),
    (tf.int32, (tf.int32, tf.bool, tf.uint8, tf.int8, tf.int16, tf.uint16)),
    (tf.int64, (tf.int64, tf.uint32)))


def combine(cluster, gradients, shares):
    """The `Combined` of a machine's gradients over the workers of a ring."""
    for _, variable in gradients:
        sent_as(variable)  # no complex gradient is added up
    ring, (first, begin) = Collectives(cluster), worker_step.session_begun()
    with only_device('/cpu:0'), tf.name_scope('ring'):
        if shares.are_weighted:  # known when the batch is, before the backward pass
            first = ring.reduce(tf.reshape(shares.own_examples(), [1]), first)
            total = first[0]
        weight = shares.weight(total) if shares.are_weighted else shares.constant
        # Dense and sparse gradients form two chains, each in the same order on all workers.
        sums, last = _add_dense(ring, gradients, weight, not shares.are_weighted
                                and shares.is_mean, first)
        rows, last_rows = _add_rows(ring, gradients, weight, first)
        # The end comes after all reductions, for which the other workers would wait.
        with tf.control_dependencies([last, last_rows]):
            ended = worker_step.raise_at_end(total <= 0.) if shares.are_weighted else tf.no_op()
        sums.update(rows)
        gradients = worker_step.after(ended, [(sums[variable.op.name], variable)
                                           for _, variable in gradients])
    return Combined(gradients, [] if cluster.active is None else [ended], begin)


def _add_dense(ring, gradients, weight, mean, last):
    """Adds up the dense gradients, by their weights or for the mean; the first message waits for
    `last`. Returns `(dict from names of variables to sums, the last message)`."""
    dense, sums = [pair for pair in gradients if not isinstance(pair[0], tf.IndexedSlices)], {}
    for buffer in buffers_of(dense, ring.buffer_bytes):
        packed = buffer[0][0] if len(buffer) == 1 else tf.concat(
            [tf.reshape(gradient, [-1]) for gradient, _ in buffer], 0)
        packed, last = ring.reduce_gradient(packed if mean else times(packed, weight), mean, last)
        shapes = [variable.get_shape() for _, variable in buffer]
        pieces = [packed] if len(buffer) == 1 else map(tf.reshape, tf.split(
            packed, [shape.num_elements() for shape in shapes]), [
                shape.as_list() for shape in shapes])
        sums.update(zip((variable.op.name for _, variable in buffer), pieces))
    return sums, last


def buffers_of(pairs, most):
    """Lists of `(gradient, variable)` that travel together, in `most` bytes; a larger gradient
    travels alone. Those made last come first."""
    buffers, open_ones = [], {}  # dtype -> (the buffer to be filled, bytes in it)
    for gradient, variable in reversed(pairs):
        dtype, size = gradient.dtype.base_dtype, bytes_of(variable)
        is_alone = size > most or not variable.get_shape().is_fully_defined()
        buffer, used = ([], 0) if is_alone else open_ones.get(dtype, ([], 0))
        if used + size > most:
            buffer, used = [], 0
        buffers += [] if buffer else [buffer]
        buffer.append((gradient, variable))
        if not is_alone:
            open_ones[dtype] = (buffer, used + size)
    return buffers


def _add_rows(ring, gradients, weight, last):
    """Adds up the sparse ones; as `_add_dense`. The sums are `IndexedSlices` with each row once."""
    sparse = [(gradient, variable, variable.get_shape()[1:].as_list()) for gradient, variable in
              gradients if isinstance(gradient, tf.IndexedSlices)]
    if not sparse:
        return {}, last
    found = [tf.unique(slices.indices) for slices, _, _ in sparse]
    sizes = [tf.size(indices) for indices, _ in found]
    counts = ring.gather(tf.stack(sizes)[tf.newaxis], last)
    most = tf.unstack(tf.maximum(tf.reduce_max(counts, 0), 1), len(sparse))
    indices, last = _gathered(ring, [tf.cast(each, tf.int64) for each, _ in found], most, counts)
    by_type, rows = {}, {}
    for place, (slices, _, _) in enumerate(sparse):
        dtype = slices.values.dtype.base_dtype
        by_type.setdefault(dtype if dtype in _ADDED_UP else tf.float32,
                           []).append(place)
    for dtype, places in sorted(by_type.items(), key=lambda item: item[0].name):
        own = [tf.cast(tf.reshape(tf.math.unsorted_segment_sum(
            times(sparse[place][0], weight).values, found[place][1], sizes[place]),
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
    """`(list of tensors [W * most, …], the message)`: tensors [n, …] of one type of all W workers,
    each worker's rows first, in one message, which waits for `last`; `most` is the largest n."""
    padded = [tf.pad(each, [[0, count - tf.shape(each)[0]]] + [[0, 0]] * (each.shape.ndims - 1))
              for each, count in zip(tensors, most)]
    received = ring.gather(tf.concat([tf.reshape(each, [-1]) for each in padded], 0), last)
    parts = tf.split(tf.reshape(received, [ring.num_workers, -1]),
                     tf.stack([tf.size(each) for each in padded]), 1, num=len(padded))
    return [tf.reshape(part, [-1] + each.shape.as_list()[1:])
            for part, each in zip(parts, tensors)], received


def sent_as(variable):
    """The type that a variable has on its way from worker 0, without loss; or `ClusterError`."""
    dtype, shape = variable.dtype.base_dtype, variable.get_shape()
    sent = next((sent for sent, dtypes in _SENT if dtype in dtypes), None)
    if sent is None or not shape.is_fully_defined():
        raise ClusterError(
            'variable %r is %s of shape %s, which worker 0 cannot send to the others: make it a '
            'local variable, or one of a number type and a static shape.' % (
                variable.op.name, dtype.name, shape))
    return sent


class Collectives:
    """Makes the collective operations of one worker, with keys that count on within a graph. Each
    waits for the one before it (`last`) by an edge of its own: TensorFlow drops edges of constants
    with the operations that it simplifies."""

    def __init__(self, cluster):
        self.rank, self.num_workers = cluster.rank, cluster.num_workers
        self._wire = WIRES.get(cluster.wire)
        self.buffer_bytes = max(1, int(cluster.buffer_mb * (1 << 20)))
        keys = [op.get_attr('instance_key') for op in tf.get_default_graph().get_operations()
                if op.type.startswith('Collective') and 'group_key' in op.node_def.attr
                and op.get_attr('group_key') == _GROUP]
        self._key = max(keys or [0])

    def reduce(self, tensor, last, mean=False):
        """The sum, or the mean, of the workers' tensors of one shape."""
        with tf.control_dependencies([last]):
            reduced = tf.raw_ops.CollectiveReduce(
                input=tensor, merge_op='Add', final_op='Div' if mean else 'Id',
                subdiv_offsets=[0, 0] if bytes_of(tensor) >= _HALVED else [0], **self._next())
        reduced.set_shape(tensor.shape)
        return reduced

    def reduce_gradient(self, gradient, mean, last):
        """`(sum or mean of the workers' dense gradients of one static shape, the last message)`. A
        large one is sent in several pieces: in one, 64 MB take twice as long."""
        dtype = gradient.dtype.base_dtype
        tensor = gradient if dtype in _ADDED_UP else tf.cast(gradient, tf.float32)
        turns, pieces, reduced = -(-bytes_of(tensor) // self.buffer_bytes), [tensor], []
        if turns > 1:
            count = tensor.shape.num_elements()
            pieces = tf.split(tf.reshape(tensor, [-1]), [
                count * (turn + 1) // turns - count * turn // turns for turn in range(turns)])
        for piece in pieces:
            if self._wire is not None and piece.shape.is_fully_defined():
                piece, last = self._reduce_16(piece, last, mean)
            else:
                piece = last = self.reduce(piece, last, mean)
            reduced.append(piece)
        total = reduced[0] if turns < 2 else tf.reshape(tf.concat(reduced, 0), tensor.shape)
        return tf.cast(total, dtype), last

    def _reduce_16(self, tensor, last, mean):
        """As `reduce`, with the message; 16-bit numbers travel in pairs, by their bits."""
        count, own = tensor.shape.num_elements(), tf.cast(tf.reshape(tensor, [-1]), self._wire)
        pairs = tf.reshape(tf.pad(own, [[0, count % 2]]), [1, -1, 2])
        shape = [self.num_workers, pairs.shape[1]]
        pairs = tf.bitcast(pairs, tf.int32)
        with tf.control_dependencies([last]):
            gathered = tf.raw_ops.CollectiveGather(input=pairs, shape=shape, **self._next())
        gathered.set_shape(shape)
        total = sum(tf.cast(each, tf.float32) for each in tf.unstack(
            tf.bitcast(gathered, self._wire)))
        total = tf.reshape(tf.reshape(total, [-1])[:count], tensor.shape)
        return tf.cast(total / self.num_workers if mean else total, tensor.dtype), gathered

    def gather(self, rows, last):
        """The workers' tensors `rows` [n, …], of one n in a step, one after the other: [W n, …]."""
        if compat.GATHERS_ANY_ROWS:
            with tf.control_dependencies([last]):
                return tf.raw_ops.CollectiveGather(
                    input=rows, shape=[None] + rows.shape.as_list()[1:], **self._next())
        return tf.cast(self.reduce(
            compat.among_zeros(rows, self.rank, self.num_workers), last), rows.dtype)

    def broadcast(self, variables):
        """An operation that gives variables, the same on all workers, their values on worker 0."""
        last, done = [], []
        for variable in sorted(variables, key=lambda each: each.op.name):
            dtype, shape, sent = variable.dtype.base_dtype, variable.get_shape(), sent_as(variable)
            with only_device('/cpu:0'), tf.name_scope('broadcast'):
                with tf.control_dependencies(last):
                    value = tf.raw_ops.CollectiveBcastSend(
                        input=tf.cast(variable.read_value(), sent), shape=shape, **self._next()
                    ) if self.rank == 0 else tf.raw_ops.CollectiveBcastRecv(
                        T=sent, shape=shape, **self._next())
                last = [value]
                done.append(value.op if self.rank == 0 else
                            tf.assign(variable, tf.cast(value, dtype)).op)
        return tf.group(*done)

    def _next(self):
        """The attributes by which TensorFlow brings this operation of all workers together."""
        self._key += 1
        return {'group_size': self.num_workers, 'group_key': _GROUP, 'instance_key': self._key}


def _configure(cluster, config):
    # Without this filter, TF 1.15 waits for the devices of all workers, and hangs.
    config.device_filters.append('/job:%s/task:%d' % (cluster.job, cluster.rank))
    config.experimental.collective_group_leader = '/job:worker/replica:0/task:0'


ENGINE = Engine(
    "TensorFlow's ring", ['buffer_mb', 'every', 'wire'], combine,
    lambda cluster, variables: Collectives(cluster).broadcast(variables), _configure)
