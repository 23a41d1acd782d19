"""Gradients over the machines of a ring, by TensorFlow's collective operations.

Each worker has a session of its own, which sees this worker's devices alone. `collectives` has the
messages between the workers.

Dense gradients share buffers, filled in the reverse order of the variables, as a backward pass
computes them: the first buffer is sent while the backward pass goes on. A large buffer goes as
tensors, by `tensor_exchange`, and a small one as a message. With `Cluster(wire=…)` they travel as
16-bit numbers: every worker gathers the numbers of all workers, and adds them up in float32, in one
order, so that the sums have the same bits on all workers. Sparse gradients are sent as rows, by
`ring_rows`, with small dense gradients beside them.

Words of `worker_step` used here: a `Weighting` says by which factor a worker's losses are
multiplied, and is constant where all workers have one static number of examples; a `SessionGuard`
fails in a session that has not begun together with the sessions of all workers.
"""

import functools
import typing

import tensorflow.compat.v1 as tf

from towers.cluster import tensor_exchange, worker_step
from towers.cluster.collectives import Collectives, Received
from towers.cluster.engine import Engine, EngineGradients, EngineStep, Pairs
from towers.cluster.ring_rows import Sums, add_rows, dense_beside_rows
from towers.cluster.sent_types import type_of_sent_value, type_of_sent_variable
from towers.cluster.tensor_exchange import TensorExchange
from towers.gradients.gradient_pairs import variables_of
from towers.graph.graph_walk import bytes_of, operation_names
from towers.placement.variable_device import only_device

BUFFER_MB = 4.  # MiB of gradients that travel together; a larger gradient travels in pieces


def begin_step(cluster: typing.Any, weighting: worker_step.Weighting) -> EngineStep:
    """Begins a step of the workers of a ring, before this machine's towers have losses.

    Args:
      cluster: the `Cluster`.
      weighting: how this worker's losses are weighted.
    """
    ring = Collectives(cluster)
    with tf.name_scope('ring'):
        guard = worker_step.session_guard()
        awaited: typing.Any = guard.check
        num_examples = None
        loss_weight: typing.Any = weighting.constant
        if not weighting.is_constant:
            # The losses have their weight before the backward pass, so the numbers of examples
            # cannot be added up with the gradients.
            with only_device('/cpu:0'):
                own_examples = tf.reshape(weighting.own_examples(), [1])
                sum_of_examples = ring.reduce(own_examples, awaited)
                awaited = sum_of_examples  # this message comes before the gradients
                num_examples = sum_of_examples[0]
                loss_weight = weighting.factor_in_step(num_examples)
    add_up = functools.partial(_sum_of_values, ring, guard.check)
    step = _RingStep(cluster=cluster, ring=ring, guard=guard, awaited=awaited,
                     num_examples=num_examples, have_equal_batches=weighting.is_constant,
                     data_may_end=cluster.active is not None)
    return EngineStep(step.combine, loss_weight=loss_weight,
                      workers=weighting.workers(loss_weight, add_up))


def _sum_of_values(ring: Collectives, awaited: typing.Any, tensor: tf.Tensor) -> tf.Tensor:
    """The sum of the workers' values of the forward pass, or of the gradients of such values.

    These messages wait for `awaited` and not for each other: TensorFlow brings them together by
    their keys, in whatever order each worker comes to them.
    """
    summand = tf.cast(tensor, type_of_sent_value(tensor))
    # TensorFlow's reduction of a tensor without numbers is a segmentation fault: where the shape
    # does not exclude that, a zero goes with the numbers.
    surely_has_numbers = bool(tensor.shape.num_elements())  # None if not static
    if surely_has_numbers:
        total = ring.reduce(summand, awaited)
    else:
        vector = tf.pad(tf.reshape(summand, [-1]), [[0, 1]])
        total = tf.reshape(ring.reduce(vector, awaited)[:-1], tf.shape(tensor))
    return tf.cast(total, tensor.dtype)


class _RingStep(typing.NamedTuple):
    """A step of the workers of a ring, before its gradients."""
    cluster: typing.Any
    ring: Collectives
    guard: worker_step.SessionGuard
    awaited: typing.Any  # the message, or operation, that the first gradients wait for
    num_examples: typing.Any
    """The examples of all workers in the step, a scalar; None where all have the same static
    number."""
    have_equal_batches: bool  # whether all workers have the same static number of examples
    data_may_end: bool  # whether `until_all_end` tells which workers have data

    def combine(self, gradients: Pairs, loss: typing.Optional[tf.Tensor],
                values: typing.Sequence[tf.Tensor]) -> EngineGradients:
        """Adds up the gradients over the workers.

        Args:
          gradients: the gradients of this worker, with their variables.
          loss: not needed here; parameter servers alone wait for it.
          values: the messages with values of the forward pass, such as a `batch_sum`.
        """
        del loss
        _check_can_be_sent(gradients)
        with only_device('/cpu:0'), tf.name_scope('ring'):
            # Dense and sparse gradients form two chains, each in the same order on all workers.
            beside_rows = dense_beside_rows(self.ring, gradients, self.have_equal_batches)
            names_beside_rows = operation_names(variables_of(beside_rows))
            others = [(gradient, variable) for gradient, variable in gradients
                      if variable.op.name not in names_beside_rows]
            tensors = TensorExchange(self.cluster, self.ring)
            dense = _add_dense(self.ring, tensors, others, self.awaited)
            sparse = add_rows(self.ring, gradients, beside_rows, self.awaited,
                              self.have_equal_batches)
            # All messages come before the end of the step, by which the training may end: a worker
            # that ended before a message would leave the others waiting in that message.
            messages = [dense.message, sparse.message] + list(values)
            with tf.control_dependencies(messages):
                end_of_messages = self._end_of_messages()
            sums = dict(dense.values, **sparse.values)
            gradients = [(sums[variable.op.name], variable) for _, variable in gradients]
            gradients = worker_step.after(end_of_messages, gradients)
        # Where the data may end, the model's own writes wait for the end of the messages, too: the
        # step that finds no data changes nothing.
        conditions = [end_of_messages] if self.data_may_end else []
        return EngineGradients(gradients, conditions, begin_session=self.guard.begin)

    def _end_of_messages(self) -> tf.Operation:
        """The operation for which the update waits. Where the data may end, it raises an error in
        the step in which the data of all workers have ended: that ends the training."""
        if not self.data_may_end:
            return tf.no_op()
        return worker_step.raise_at_end(self.num_examples <= 0.)


def _check_can_be_sent(gradients: Pairs) -> None:
    """Raises `ClusterError` for a gradient that the workers cannot add up: of complex numbers, or
    of a variable whose shape is not static."""
    for variable in variables_of(gradients):
        type_of_sent_variable(variable)  # raises for such a gradient


def _add_dense(ring: Collectives, tensors: TensorExchange, gradients: Pairs,
               awaited: typing.Any) -> Received:
    """Adds up the dense gradients over the workers: large buffers as tensors, each as soon as it
    is there, and the others by messages, one after the other.

    Args:
      ring: makes the messages.
      tensors: makes the operations that send and receive tensors.
      gradients: of this worker; the sparse ones are left out.
      awaited: the message, or operation, for which the first message and all tensors wait.

    Returns:
      `Received` with `Sums`.
    """
    dense = [(gradient, variable) for gradient, variable in gradients
             if not isinstance(gradient, tf.IndexedSlices)]
    sums: Sums = {}
    message = awaited
    for buffer in buffers_of(dense, ring.buffer_bytes):
        packed = _packed(buffer)
        if bytes_of(packed) >= tensor_exchange.LEAST_BYTES:
            total = tensors.total(packed, awaited)
        else:
            total, message = ring.reduce_in_pieces(packed, message)
        variables = variables_of(buffer)
        for variable, gradient in zip(variables, _unpacked(total, variables)):
            sums[variable.op.name] = gradient
    if tensors.arrived:  # when this last message comes, all workers have all tensors
        message = ring.reduce(tf.zeros([1]), tf.group(message, *tensors.arrived))
    return Received(sums, message)


def _packed(buffer: Pairs) -> tf.Tensor:
    """The numbers of several gradients as one vector; a single gradient as it is. The static shape,
    by which large buffers are told, is that of the variables: it is the same on all workers."""
    if len(buffer) == 1:
        gradient, variable = buffer[0]
        return tf.reshape(gradient, variable.get_shape())
    return tf.concat([tf.reshape(gradient, [-1]) for gradient, _ in buffer], 0)


def _unpacked(packed: tf.Tensor, variables: typing.List[tf.Variable]) -> typing.List[tf.Tensor]:
    """The gradients of these variables, taken out of what `_packed` made of the gradients."""
    if len(variables) == 1:
        return [packed]
    shapes = [variable.get_shape() for variable in variables]
    vectors = tf.split(packed, [shape.num_elements() for shape in shapes])
    return [tf.reshape(vector, shape.as_list()) for vector, shape in zip(vectors, shapes)]


def buffers_of(pairs: Pairs, max_bytes: int) -> typing.List[Pairs]:
    """Sorts dense gradients into the messages in which they travel together.

    Args:
      pairs: `(gradient, variable)` pairs. The backward pass computes the last pair first, so the
        buffers are filled from the last pair on.
      max_bytes: the size of a buffer. A gradient that is larger travels alone.

    Returns:
      A list of buffers, each a list of pairs whose gradients have one type.
    """
    buffers: typing.List[Pairs] = []
    open_buffers: typing.Dict[tf.DType, Pairs] = {}  # of each type, the buffer that is being filled
    bytes_used: typing.Dict[tf.DType, int] = {}  # of the open buffer of each type
    for gradient, variable in reversed(pairs):
        size = bytes_of(variable)
        if size > max_bytes:
            buffers.append([(gradient, variable)])
            continue
        dtype = gradient.dtype.base_dtype
        if dtype not in open_buffers or bytes_used[dtype] + size > max_bytes:
            open_buffers[dtype] = []
            bytes_used[dtype] = 0
            buffers.append(open_buffers[dtype])
        open_buffers[dtype].append((gradient, variable))
        bytes_used[dtype] += size
    return buffers


def _broadcast(cluster: typing.Any, variables: typing.Iterable[tf.Variable]) -> tf.Operation:
    """The operation by which all workers of a `Cluster` get the variables of worker 0."""
    return Collectives(cluster).broadcast(variables)


def _configure(cluster: typing.Any, config: tf.ConfigProto) -> None:
    """Adds to a session's config what the messages of a `Cluster` need."""
    # Without this filter, TF 1.15 waits for the devices of all workers, and hangs.
    config.device_filters.append('/job:%s/task:%d' % (cluster.job, cluster.rank))
    # This worker brings the members of a group together.
    config.experimental.collective_group_leader = '/job:worker/replica:0/task:0'


ENGINE = Engine(name="TensorFlow's ring", arguments=['buffer_mb', 'every', 'wire'],
                begin_step=begin_step, broadcast=_broadcast, configure=_configure,
                connect=tensor_exchange.connect)
