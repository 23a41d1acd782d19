"""TensorFlow's collective operations of one worker of a ring, and the types of what they carry.

Their kernels take few types of numbers. The values of variables of the others travel as one of
these that holds them without loss. With `Cluster(wire=…)` dense gradients travel as 16-bit numbers:
every worker gathers those of all, and adds them up in float32, in one order. So each is rounded
once, and the sums are the same bits on all workers.
"""

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import ClusterError
from towers.graph.graph_walk import bytes_of
from towers.placement.variable_device import only_device

BUFFER_MB = 4.
"""Gradients travel together up to this, in MiB, and larger ones in pieces: see `Cluster`."""

WIRES = {'float16': tf.float16, 'bfloat16': tf.bfloat16}
MOST_GATHERED = 3
"""Workers up to which gathering 16-bit numbers takes fewer bytes than a ring of float32: each sends
2 (W - 1) bytes a number, and in a ring 8 (W - 1) / W."""

_GROUP = 7919  # no group of `all_reduce`, whose keys count from 1
_HALVED = 1 << 20  # bytes from which one half of a tensor is added up while the other is sent
_CPU = '/cpu:0'

_SENT = (  # types that every version sends, and what each of them holds without loss
    (tf.float32, (tf.float32, tf.float16, tf.bfloat16)), (tf.float64, (tf.float64,)),
    (tf.int32, (tf.int32, tf.bool, tf.uint8, tf.int8, tf.int16, tf.uint16)),
    (tf.int64, (tf.int64, tf.uint32)))


class Collectives:
    """Makes the collective operations of one worker, with the same keys on all workers.

    Keys are counted on within a graph, so that no two builds of one graph use the same key.
    """

    def __init__(self, cluster):
        self.rank, self.num_workers = cluster.rank, cluster.num_workers
        self._wire = WIRES.get(cluster.wire)
        self.buffer_bytes = int(cluster.buffer_mb * (1 << 20))
        keys = [op.get_attr('instance_key') for op in tf.get_default_graph().get_operations()
                if op.type.startswith('Collective') and 'group_key' in op.node_def.attr
                and op.get_attr('group_key') == _GROUP]
        self._key = max(keys or [0])

    def reduce(self, tensor, mean=False):
        """The sum, or the mean, of the workers' tensors of one shape."""
        reduced = tf.raw_ops.CollectiveReduce(
            input=tensor, group_size=self.num_workers, group_key=_GROUP,
            instance_key=self._next(), merge_op='Add', final_op='Div' if mean else 'Id',
            subdiv_offsets=[0, 0] if bytes_of(tensor) >= _HALVED else [0])
        reduced.set_shape(tensor.shape)
        return reduced

    def reduce_gradient(self, gradient, mean, last):
        """The sum, or the mean, of the workers' gradients of one static shape, in their own type.

        A tensor of 64 MB takes twice as long in one piece: a large one is sent in several.

        Args:
          gradient: a dense tensor.
          mean: as for `reduce`.
          last: list of the tensors that the first piece has to wait for; then of the last piece.
        """
        dtype, tensor = gradient.dtype.base_dtype, _to_added(gradient)
        turns = -(-bytes_of(tensor) // self.buffer_bytes)
        flat = tensor if turns < 2 else tf.reshape(tensor, [-1])
        pieces = [flat] if turns < 2 else tf.split(
            flat, _even_sizes(flat.shape.num_elements(), turns))
        reduced = []
        for piece in pieces:
            with tf.control_dependencies(last):
                if self._wire is not None and piece.shape.is_fully_defined():
                    reduced.append(self._reduce_16(piece, mean, last))
                else:
                    reduced.append(self.reduce(piece, mean))
                    last[:] = reduced[-1:]
        total = reduced[0] if turns < 2 else tf.reshape(tf.concat(reduced, 0), tensor.shape)
        return tf.cast(total, dtype)

    def _reduce_16(self, tensor, mean, last):
        """As `reduce`; the numbers travel as 16-bit ones, in pairs, by their bits."""
        count, own = tensor.shape.num_elements(), tf.cast(tf.reshape(tensor, [-1]), self._wire)
        pairs = tf.reshape(tf.pad(own, [[0, count % 2]]), [1, -1, 2])
        gathered = tf.raw_ops.CollectiveGather(
            input=tf.bitcast(pairs, tf.int32), group_size=self.num_workers, group_key=_GROUP,
            instance_key=self._next(), shape=[self.num_workers, pairs.shape[1]])
        last[:] = [gathered]
        gathered.set_shape([self.num_workers, pairs.shape[1]])
        total = 0.
        for each in tf.unstack(tf.bitcast(gathered, self._wire)):
            total += tf.cast(each, tf.float32)
        total = tf.reshape(tf.reshape(total, [-1])[:count], tensor.shape)
        return tf.cast(total / self.num_workers if mean else total, tensor.dtype)

    def gather(self, rows):
        """The workers' tensors `rows` [n, …] one after the other: [W n, …] for W workers.

        n may differ from step to step, and has to be the same on all workers in a step.
        """
        if compat.GATHERS_ANY_ROWS:
            return tf.raw_ops.CollectiveGather(
                input=rows, group_size=self.num_workers, group_key=_GROUP,
                instance_key=self._next(), shape=[None] + rows.shape.as_list()[1:])
        # On 1.15 that kernel takes the first step's number of rows for ever. So each worker's rows
        # stand among zeros here, and are summed up.
        dtype, count = rows.dtype, tf.shape(rows)[0]
        if dtype not in compat.COLLECTIVE_DTYPES:
            rows = tf.cast(rows, tf.float64)
        padding = [[count * self.rank, count * (self.num_workers - 1 - self.rank)]] + (
            [[0, 0]] * (rows.shape.ndims - 1))
        return tf.cast(self.reduce(tf.pad(rows, padding)), dtype)

    def broadcast(self, tensor, shape, dtype):
        """Worker 0's tensor, of static shape, on every worker."""
        common = dict(group_size=self.num_workers, group_key=_GROUP, instance_key=self._next(),
                      shape=shape)
        if self.rank == 0:
            return tf.raw_ops.CollectiveBcastSend(input=tensor, **common)
        return tf.raw_ops.CollectiveBcastRecv(T=dtype, **common)

    def _next(self):
        self._key += 1
        return self._key


def broadcast_variables(cluster, variables):
    """An operation that gives variables their values on worker 0.

    All workers have to run it at the same time.

    Args:
      cluster: `Cluster`, a ring.
      variables: list of variables, the same on every worker, in any order.

    Raises:
      ClusterError: a variable whose type or shape cannot be sent.
    """
    ring = Collectives(cluster)
    last, done = [], []
    for variable in sorted(variables, key=lambda each: each.op.name):
        dtype, shape = variable.dtype.base_dtype, variable.get_shape()
        sent = next((sent for sent, dtypes in _SENT if dtype in dtypes), None)
        if sent is None or not shape.is_fully_defined():
            raise ClusterError(
                'variable %r is %s of shape %s, which a ring cannot send to the other workers: '
                'make it a local variable, or one of a number type and a static shape.' % (
                    variable.op.name, dtype.name, shape))
        with only_device(_CPU), tf.name_scope('broadcast'):
            with tf.control_dependencies(last):
                value = tf.cast(variable.read_value(), sent) if cluster.rank == 0 else None
                value = ring.broadcast(value, shape, sent)
            last = [value]
            done.append(value.op if cluster.rank == 0 else
                        tf.assign(variable, tf.cast(value, dtype)).op)
    return tf.group(*done)


def _to_added(gradient):
    """A dense gradient as numbers of a type that can be added up over the workers."""
    dtype = gradient.dtype.base_dtype
    return gradient if dtype in compat.COLLECTIVE_DTYPES else tf.cast(gradient, tf.float32)


def _even_sizes(count, number):
    """The sizes of so many pieces of `count` things, as equal as possible."""
    return [count // number + (place < count % number) for place in range(number)]
