"""Large dense gradients over the workers of a ring, which go as tensors from worker to worker.

TensorFlow's collective operations copy numbers several times on their way: into strings of 4 KiB,
into a protocol buffer, and out of it. A tensor that one process sends to another by a pair of the
operations `Send` and `Recv` is not copied so.

Each worker sends to the next one, and worker 0 comes after the last one. TensorFlow brings `Send`
and `Recv` together by three things:

- Names, which all workers give out in the same order.
- The number of the step. Steps with collective operations have one number on all workers, and other
  steps a number of each worker's own. A step that ends drops what another worker has still to
  receive. So one collective operation has to come after all tensors of a step, see `ring`.
- The *incarnation* of the device that sends: a number that TensorFlow draws when a server starts.
  The graph is made before that, and `connect` fills the number in.

Its test is `tests/cluster/test_tensor_exchange.py`.
"""

import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.cluster.collectives import Collectives
from towers.cluster.sent_types import type_of_sent_gradient
from towers.graph.graph_walk import bytes_of

LEAST_BYTES = 1 << 20  # of a tensor that goes so; the copies of a smaller one take next to no time

_OPERATIONS = ('__towers_sent_tensors',)  # the key of a collection; see `machines.BUILDS`
_BYTES_OF_ROW = 64  # TensorFlow cuts a tensor with rows of this size without copying it


class TensorExchange:
    """Makes the operations by which this worker exchanges tensors, in the default graph.

    Attributes:
      arrived: the tensors that this worker receives; each comes after one that it sends. They have
        to be there before a step may end.
    """

    def __init__(self, cluster: typing.Any, ring: Collectives):
        """
        Args:
          cluster: the `Cluster`.
          ring: gives keys out, and says of how many bytes a message is, and in which type it goes.
        """
        self.arrived: typing.List[tf.Tensor] = []
        self._cluster = cluster
        self._num_workers = cluster.num_workers
        self._ring = ring

    def total(self, gradient: tf.Tensor, awaited: typing.Any) -> tf.Tensor:
        """The sum of the workers' gradients of one static shape; the same bits on all workers.

        Args:
          gradient: of this worker.
          awaited: the message, or operation, that the tensors wait for.
        """
        added_type = type_of_sent_gradient(gradient.dtype)
        sent = tf.cast(gradient, self._ring.wire or added_type)
        # For each number of a gradient, a worker sends W - 1 numbers of the sent type in a gather,
        # and 2 (W - 1) / W of the type in which they are added up in a ring, which has more hops.
        gathers = self._num_workers * sent.dtype.size <= 2 * added_type.size
        num_parts = -(-bytes_of(sent) // self._ring.buffer_bytes)  # rounded up
        sums: typing.List[tf.Tensor] = []
        if gathers:
            for part in parts_of(sent, num_parts):
                sums.append(self._sum_of_gathered(part, added_type, awaited))
        else:
            num_rounds = -(-num_parts // self._num_workers)  # rounded up
            parts = parts_of(sent, num_rounds * self._num_workers)
            for first in range(0, len(parts), self._num_workers):
                sums.extend(self._sums_by_ring(parts[first:first + self._num_workers], awaited))
        total = tf.reshape(tf.concat(sums, 0), gradient.shape)
        return tf.cast(total, gradient.dtype)

    def _sum_of_gathered(self, part: tf.Tensor, added_type: tf.DType,
                         awaited: typing.Any) -> tf.Tensor:
        """The sum of the workers' parts: each worker gets the parts of all, and adds them up in a
        type, in the order of the workers."""
        num_workers, rank = self._num_workers, self._cluster.rank
        of_workers = [part] * num_workers
        for hop in range(1, num_workers):
            part = self._exchange(part, part.shape, awaited)
            of_workers[(rank - hop) % num_workers] = part
        total = tf.cast(of_workers[0], added_type)
        for of_worker in of_workers[1:]:
            total += tf.cast(of_worker, added_type)
        return total

    def _sums_by_ring(self, parts: typing.List[tf.Tensor],
                      awaited: typing.Any) -> typing.List[tf.Tensor]:
        """The sums of the workers' parts, of which there are as many as workers. Each begins at
        another worker, is added up on its way round, and then goes round again as the sum."""
        num_workers, rank = self._num_workers, self._cluster.rank
        sums = list(parts)
        travelling = parts[rank]
        for hop in range(1, num_workers):
            own = parts[(rank - hop) % num_workers]
            travelling = self._exchange(travelling, own.shape, awaited) + own
        sums[(rank + 1) % num_workers] = travelling
        for hop in range(1, num_workers):
            position = (rank + 1 - hop) % num_workers
            travelling = self._exchange(travelling, parts[position].shape, awaited)
            sums[position] = travelling
        return sums

    def _exchange(self, tensor: tf.Tensor, shape: tf.TensorShape,
                  awaited: typing.Any) -> tf.Tensor:
        """Sends a tensor to the next worker, and gives the one, of this shape, that the worker
        before has sent."""
        name = 'towers_%d' % self._ring.next_key()
        own_device = self._device(self._cluster.rank)
        with tf.control_dependencies([awaited]):
            send = compat.send(tensor, name, own_device, self._device(self._cluster.rank + 1))
        with tf.control_dependencies([send]):  # memory has no other gradient before the own one
            received = compat.receive(
                tensor.dtype, name, self._device(self._cluster.rank - 1), own_device)
        received.set_shape(shape)
        self.arrived.append(received)
        tensor.graph.get_collection_ref(_OPERATIONS).extend([send, received.op])
        return received

    def _device(self, rank: int) -> str:
        """The full name of the device of a worker that sends and receives; ranks go round."""
        return '/job:%s/replica:0/task:%d/device:CPU:0' % (
            self._cluster.job, rank % self._num_workers)


def parts_of(tensor: tf.Tensor, count: int) -> typing.List[tf.Tensor]:
    """A tensor as so many matrices of about equally many rows. They share its memory where its
    numbers make rows of `_BYTES_OF_ROW`, and are copies else."""
    num_elements = tensor.shape.num_elements()
    row_size = _BYTES_OF_ROW // tensor.dtype.size
    if num_elements % row_size:
        row_size = 1
    num_rows = num_elements // row_size
    ends = [num_rows * number // count for number in range(count + 1)]
    sizes = [end - start for start, end in zip(ends, ends[1:])]
    return tf.split(tf.reshape(tensor, [-1, row_size]), sizes)


def operations_that_exchange(graph: tf.Graph) -> typing.List[tf.Operation]:
    """The operations of a graph that send tensors to other workers, or receive tensors."""
    return graph.get_collection(_OPERATIONS)


def connect(cluster: typing.Any, graph: tf.Graph, target: str, config: tf.ConfigProto) -> None:
    """Fills in the incarnations of the devices that send the tensors of a graph.

    Args:
      cluster: the `Cluster`; the servers of all workers are there.
      graph: of the builds; no session has run it.
      target, config: of this worker's sessions.
    """
    operations = operations_that_exchange(graph)
    if not operations:
        return
    config_with_sender = tf.ConfigProto()
    config_with_sender.CopyFrom(config)
    sender = (cluster.rank - 1) % cluster.num_workers
    config_with_sender.device_filters.append('/job:%s/task:%d' % (cluster.job, sender))
    with tf.Graph().as_default(), tf.Session(target, config=config_with_sender) as session:
        # The session begins with its first call, which waits for the server of the sender.
        # `list_devices` would wait with Python's lock held: no thread would see that worker lost.
        session.run(tf.no_op())
        incarnations = {device.name: device.incarnation for device in session.list_devices()}
    for op in operations:
        compat.set_incarnation(op, incarnations)
