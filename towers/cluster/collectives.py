"""TensorFlow's collective operations, by which the workers of a ring exchange messages.

A *message* is one collective operation that all workers run: each worker gives a tensor, and gets
the sum of all workers' tensors, or all these tensors. TensorFlow brings together the operations
that have the same key on all workers.

Messages with gradients form chains: each message waits for the message before it, and the order is
the same on all workers. Else one worker could wait in a message for a worker that waits in another
message, or end its training while another worker waits for it. So each method of `Collectives`
takes `awaited`: the message, or operation, that the new message waits for.

Its test is `tests/cluster/test_ring.py`.
"""

import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.cluster.sent_types import type_of_sent_gradient, type_of_sent_variable
from towers.graph.graph_walk import bytes_of
from towers.placement.variable_device import only_device

WIRES = {'float16': tf.float16, 'bfloat16': tf.bfloat16}  # the words of `Cluster(wire=…)`
MOST_GATHERED = 3
"""The number of workers up to which a gather of 16-bit numbers sends fewer bytes than a ring sends
for float32 numbers. Of W workers, each sends 2 (W - 1) bytes a number in a gather, and
8 (W - 1) / W in a ring: 4 and 5.3 with 3 workers, 6 and 6 with 4."""

_GROUP = 7919  # of all messages: an arbitrary number, which a program's own collectives hardly use
_BYTES_TO_HALVE = 1 << 20  # see `reduce`; a smaller tensor is added up in no time


class Received(typing.NamedTuple):
    """What a worker gets from all workers."""
    values: typing.Any  # a tensor, or what the docstring of the function says
    message: typing.Any  # the last message that the values came by; the next message waits for it


class Collectives:
    """Makes the messages of this worker in the default graph.

    Each message waits for `awaited` by a control edge of its own, and not by an edge of its input:
    the input may be a constant, such as a shape, and TensorFlow drops the control edges of a
    constant when it simplifies the operations that take it.

    Attributes:
      num_workers: how many workers take part, W.
      buffer_bytes: bytes of gradients that travel in one message.
      wire: the 16-bit type in which dense gradients travel; None if they travel as they are.
    """

    def __init__(self, cluster: typing.Any):
        """The new messages get the keys that follow the keys in the graph. `cluster` is the
        `Cluster`."""
        self.num_workers = cluster.num_workers
        self.buffer_bytes = max(1, int(cluster.buffer_mb * (1 << 20)))  # `_pieces` divides by it
        self.wire: typing.Optional[tf.DType] = WIRES.get(cluster.wire)
        self._rank = cluster.rank
        self._last_key = max([0] + _keys_in_use(tf.get_default_graph()))

    @property
    def sends_16_bits(self) -> bool:
        """Whether dense gradients travel as 16-bit numbers."""
        return self.wire is not None

    def reduce(self, tensor: tf.Tensor, awaited: typing.Any, mean: bool = False) -> tf.Tensor:
        """The sum, or with `mean` the mean, of the workers' tensors, which have one shape."""
        # TensorFlow cuts a tensor into as many pieces as there are offsets, and adds up one piece
        # while it sends the other.
        offsets = [0, 0] if bytes_of(tensor) >= _BYTES_TO_HALVE else [0]
        with tf.control_dependencies([awaited]):
            reduced = tf.raw_ops.CollectiveReduce(
                input=tensor, merge_op='Add', final_op='Div' if mean else 'Id',
                subdiv_offsets=offsets, **self._next_key())
        reduced.set_shape(tensor.shape)
        return reduced

    def reduce_in_pieces(self, large: tf.Tensor, awaited: typing.Any,
                         mean: bool = False) -> Received:
        """The sum of the workers' dense gradients of a variable, or the mean of their weights.

        A tensor that does not fit a buffer is sent in several messages: 64 MB in one message take
        twice as long.

        Args:
          large: the tensor of this worker; all workers' tensors have one shape.
          awaited: the message, or operation, for which the first message waits.
          mean: whether to take the mean: of the weights, in local steps. With these `Cluster`
            refuses `wire`, so that only sums travel in 16 bits.
        """
        dtype = large.dtype.base_dtype
        tensor = tf.cast(large, type_of_sent_gradient(dtype))
        reduced = []
        for piece in self._pieces(tensor):
            # Numbers of 16 bits are gathered, and a gather needs the static shape of its result.
            has_static_shape = piece.shape.is_fully_defined()
            if self.sends_16_bits and has_static_shape:
                received = self._reduce_in_16_bits(piece, awaited)  # a sum: see `mean`
            else:
                reduced_piece = self.reduce(piece, awaited, mean)
                received = Received(reduced_piece, message=reduced_piece)
            reduced.append(received.values)
            awaited = received.message
        total = reduced[0]
        if len(reduced) > 1:
            total = tf.reshape(tf.concat(reduced, 0), tensor.shape)
        return Received(tf.cast(total, dtype), awaited)

    def _pieces(self, tensor: tf.Tensor) -> typing.List[tf.Tensor]:
        """A tensor as about equally long vectors that fit a buffer; as it is, if it fits itself."""
        # Rounded up. 0 where the shape is not static: such a tensor cannot be cut, and goes whole.
        num_pieces = -(-bytes_of(tensor) // self.buffer_bytes)
        if num_pieces <= 1:
            return [tensor]
        num_elements = tensor.shape.num_elements()
        ends = [num_elements * number // num_pieces for number in range(num_pieces + 1)]
        sizes = [end - start for start, end in zip(ends, ends[1:])]
        return tf.split(tf.reshape(tensor, [-1]), sizes)

    def _reduce_in_16_bits(self, tensor: tf.Tensor, awaited: typing.Any) -> Received:
        """The sum of the workers' tensors, which travel as 16-bit numbers.

        TensorFlow's reductions would not only send, but also add up in 16 bits. So every worker
        gathers the numbers of all workers, and adds them up in float32, in the same order on all
        workers. Two 16-bit numbers travel as the bits of an int32.
        """
        count = tensor.shape.num_elements()
        own_numbers = tf.cast(tf.reshape(tensor, [-1]), self.wire)
        is_odd = count % 2
        own_numbers = tf.pad(own_numbers, [[0, is_odd]])  # a zero for the last of an odd count
        own_pairs = tf.bitcast(tf.reshape(own_numbers, [1, -1, 2]), tf.int32)  # [1, pairs]
        num_pairs = own_pairs.shape.as_list()[1]
        gathered = self._gather(own_pairs, [self.num_workers, num_pairs], awaited)
        numbers = tf.bitcast(gathered, self.wire)  # [W, pairs, 2]
        total = sum(tf.cast(of_worker, tf.float32) for of_worker in tf.unstack(numbers))
        total = tf.reshape(tf.reshape(total, [-1])[:count], tensor.shape)  # without the zero
        return Received(tf.cast(total, tensor.dtype), gathered)

    def gather(self, rows: tf.Tensor, awaited: typing.Any) -> tf.Tensor:
        """The workers' tensors `rows`, [n, …], one after the other: [W n, …]. n is the same on all
        workers, and may differ from step to step."""
        if compat.GATHERS_ANY_ROWS:
            with tf.control_dependencies([awaited]):
                return tf.raw_ops.CollectiveGather(
                    input=rows, shape=[None] + rows.shape.as_list()[1:], **self._next_key())
        # TF 1.15 keeps the n of the first step in a gather. So here the result is a sum, for which
        # each worker has zeros in the places of the others' rows.
        with_zeros = compat.among_zeros(rows, self._rank, self.num_workers)
        # `among_zeros` turns types that TensorFlow does not add up into float64.
        return tf.cast(self.reduce(with_zeros, awaited), rows.dtype)

    def gather_static(self, vector: tf.Tensor, awaited: typing.Any) -> tf.Tensor:
        """The workers' vectors of one static size, one after the other, with all their bits."""
        return self._gather(vector, [self.num_workers * vector.shape.as_list()[0]], awaited)

    def _gather(self, tensor: tf.Tensor, shape: typing.List[int], awaited: typing.Any) -> tf.Tensor:
        """The workers' tensors of one static shape, one after the other along axis 0: a tensor of
        `shape`."""
        with tf.control_dependencies([awaited]):
            gathered = tf.raw_ops.CollectiveGather(input=tensor, shape=shape, **self._next_key())
        gathered.set_shape(shape)
        return gathered

    def broadcast(self, variables: typing.Iterable[tf.Variable]) -> tf.Operation:
        """An operation by which variables get, on all workers, the values that they have on worker
        0. All workers have the same variables. There is one message for each variable, one after
        the other, in the order of the variables' names."""
        operations = []
        awaited: typing.List[tf.Tensor] = []
        for variable in sorted(variables, key=lambda each: each.op.name):
            with only_device('/cpu:0'), tf.name_scope('broadcast'):
                with tf.control_dependencies(awaited):
                    value = self._value_of_worker_0(variable)
                awaited = [value]
                if self._rank == 0:  # worker 0 sends its value, and keeps it
                    operations.append(value.op)
                else:
                    value = tf.cast(value, variable.dtype.base_dtype)
                    operations.append(tf.assign(variable, value).op)
        return tf.group(*operations)

    def _value_of_worker_0(self, variable: tf.Variable) -> tf.Tensor:
        """The value of a variable on worker 0, as it is sent: worker 0 sends it, and every other
        worker receives it."""
        sent = type_of_sent_variable(variable)
        shape = variable.get_shape()
        if self._rank == 0:
            own_value = tf.cast(variable.read_value(), sent)
            return tf.raw_ops.CollectiveBcastSend(
                input=own_value, shape=shape, **self._next_key())
        return tf.raw_ops.CollectiveBcastRecv(T=sent, shape=shape, **self._next_key())

    def _next_key(self) -> typing.Dict[str, int]:
        """The attributes by which TensorFlow brings together the operations of one message."""
        return {'group_size': self.num_workers, 'group_key': _GROUP,
                'instance_key': self.next_key()}

    def next_key(self) -> int:
        """A number that the graph does not use yet for a message or a tensor; all workers get the
        same numbers in the same order."""
        self._last_key += 1
        return self._last_key


def _keys_in_use(graph: tf.Graph) -> typing.List[int]:
    """The keys of the messages that another build has made in the graph."""
    keys = []
    for op in graph.get_operations():
        if op.type.startswith('Collective') and 'group_key' in op.node_def.attr:
            if op.get_attr('group_key') == _GROUP:
                keys.append(op.get_attr('instance_key'))
    return keys
