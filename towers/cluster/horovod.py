"""Horovod, an optional package: gradients over its processes, the broadcast at the start.

Horovod's launcher starts the processes, one a worker, and gives each its rank. Each process adds up
its towers' gradients; Horovod adds up these sums over all processes.

Words of `worker_step` used here: a `Weighting` says by which factor a worker's losses are
multiplied, and is constant where all workers have one static number of examples; a `SessionGuard`
fails in a session that has not begun together with the sessions of all workers.
"""

import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers.cluster import worker_step
from towers.cluster.engine import Engine, EngineGradients, EngineStep, Pairs
from towers.cluster.ring_rows import has_few_static_rows
from towers.cluster.sent_types import (
    type_of_sent_gradient,
    type_of_sent_value,
    type_of_sent_variable,
)
from towers.errors import ClusterError, MissingPackageError, reason_of
from towers.gradients.gradient_pairs import cast, each_row_once, tensors_of
from towers.placement.variable_device import only_device

_SCOPE = 'towers_shared/'
"""A name scope at the root of the graph. Horovod brings together the tensors that have the same
name on all processes, and the name scopes around a build may differ."""


def _load() -> typing.Any:
    """The module `horovod.tensorflow`, initialised; raises `MissingPackageError` if it cannot be
    loaded."""
    try:
        import horovod.tensorflow as hvd
        hvd.init()
    # It is not installed; or it was built for another TensorFlow, and misses something in this one.
    except (ImportError, ValueError, AttributeError) as error:
        first_line = str(error).split('\n', 1)[0]
        raise MissingPackageError(
            "kind='horovod' needs Horovod, which cannot be loaded: %s. Install it with `pip "
            'install horovod` (the extra horovod), which builds for TensorFlow 1.15 to 2.18; or '
            "use kind='ring', TensorFlow's own, which needs nothing." % first_line) from None
    return hvd


def begin_step(cluster: typing.Any, weighting: worker_step.Weighting) -> EngineStep:
    """Begins a step of Horovod's processes, before this machine's towers have losses.

    Args:
      cluster: the `Cluster`.
      weighting: how this worker's losses are weighted.
    """
    guard = worker_step.session_guard()
    messages = _Messages(_load(), guard.check)
    num_examples = None
    loss_weight: typing.Any = weighting.constant
    if not weighting.is_constant:
        # The losses have their weight before the backward pass, so the numbers of examples cannot
        # be added up with the gradients.
        with only_device('/cpu:0'), tf.name_scope(_SCOPE):
            own_examples = tf.reshape(weighting.own_examples(), [1])
            num_examples = messages.sum(own_examples, name='towers_numbers')[0]
            loss_weight = weighting.factor_in_step(num_examples)
    step = _HorovodStep(messages=messages, guard=guard, num_examples=num_examples,
                        data_may_end=cluster.active is not None)
    return EngineStep(step.combine, loss_weight=loss_weight,
                      workers=weighting.workers(loss_weight, messages.sum_of_values))


class _Messages:
    """Makes the messages of a step: operations by which Horovod adds up, or gathers, the tensors of
    one name on all processes.

    TensorFlow takes Horovod's operations for functions of their input, which it may simplify. It
    would run the message of a constant, such as a static number of rows, a single time, when it
    prepares the session. Of two messages with the same input it would run one. Each process
    simplifies by itself, so that one process could wait for a message that another process has left
    out. Hence `_known_in_step`.
    """

    def __init__(self, hvd: typing.Any, check: tf.Operation):
        """Makes no message yet.

        Args:
          hvd: Horovod's module.
          check: the check of the `SessionGuard`, whose value all messages need.
        """
        self._hvd = hvd
        with only_device('/cpu:0'):
            # True in each step. But TensorFlow cannot compute it before the step, since the check
            # reads a variable: so it cannot simplify what depends on it.
            self._has_begun = check.outputs[0] >= 0.

    def sum(self, tensor: tf.Tensor, name: typing.Optional[str] = None) -> tf.Tensor:
        """The sum of the processes' tensors, of one shape.

        Args:
          tensor: of this process.
          name: the name of the operation in the present name scope; where it is in use already,
            TensorFlow adds a number. None: Horovod makes a name of the tensor's.
        """
        return self._hvd.allreduce(self._known_in_step(tensor), op=self._hvd.Sum, name=name)

    def sum_of_values(self, tensor: tf.Tensor) -> tf.Tensor:
        """The sum of the processes' values of the forward pass, or of the gradients of such
        values."""
        summand = tf.cast(tensor, type_of_sent_value(tensor))
        total = self.sum(summand, name='towers_value')
        return tf.cast(total, tensor.dtype)

    def sum_of_gradients(self, gradient: typing.Any, variable: tf.Variable) -> typing.Any:
        """The sum of the processes' gradients of a variable, in the type in which they are sent.

        For sparse gradients, Horovod gathers the rows of all processes, and adds no rows up. So the
        gathered rows of one index are added up here. Where many rows of this process may have one
        index, this process also adds them up before it sends them.
        """
        sent = cast(gradient, type_of_sent_gradient(gradient.dtype))
        if not isinstance(sent, tf.IndexedSlices):
            return self.sum(sent)
        rows = sent
        may_have_many_rows_of_one_index = not has_few_static_rows(sent, variable)
        if may_have_many_rows_of_one_index:
            rows = each_row_once(sent)
        rows = tf.IndexedSlices(self._known_in_step(rows.values),
                                self._known_in_step(rows.indices), rows.dense_shape)
        return each_row_once(self._hvd.allreduce(rows, op=self._hvd.Sum))

    def _known_in_step(self, tensor: tf.Tensor) -> tf.Tensor:
        """The same values, in a tensor that keeps TensorFlow from simplifying the message that
        takes it. The values come out of one of two branches, so they are no constant. The tensor is
        a new placeholder, so no other message has the same input."""
        branches = tf.raw_ops.Switch(data=tensor, pred=self._has_begun)
        values = tf.raw_ops.Merge(inputs=list(branches)).output
        return tf.placeholder_with_default(values, tensor.shape)


class _HorovodStep(typing.NamedTuple):
    """A step of Horovod's processes, before its gradients."""
    messages: _Messages
    guard: worker_step.SessionGuard
    num_examples: typing.Any
    """The examples of all processes in the step, a scalar; None where all have the same static
    number."""
    data_may_end: bool  # whether `until_all_end` tells which processes have data

    def combine(self, gradients: Pairs, loss: typing.Optional[tf.Tensor],
                values: typing.Sequence[tf.Tensor]) -> EngineGradients:
        """Adds up the gradients over the processes; see `StepOfWorkers.combine`."""
        del loss  # parameter servers alone wait for it
        combined = _combined(self.messages, gradients)
        if not self.data_may_end:
            return EngineGradients(combined, conditions=[], begin_session=self.guard.begin)
        # The error by which the training ends waits for all messages: a process that raised it
        # before one of them would leave the others waiting in that message.
        messages = tensors_of(combined) + list(values)
        with tf.control_dependencies(messages):
            ended = worker_step.raise_at_end(self.num_examples <= 0.)
        return EngineGradients(worker_step.after(ended, combined), conditions=[ended],
                               begin_session=self.guard.begin)


def _combined(messages: _Messages, gradients: Pairs) -> Pairs:
    """The sums of the processes' gradients. Horovod adds up the gradients whose operations have the
    same name on all processes; here the name is made of the variable's name."""
    combined = []
    for gradient, variable in gradients:
        scope = '%ssums/%s/' % (_SCOPE, variable.op.name)
        with only_device(variable.device or None), tf.name_scope(scope):
            total = cast(messages.sum_of_gradients(gradient, variable), gradient.dtype.base_dtype)
            combined.append((total, variable))
    return combined


def broadcast(unused_cluster: typing.Any, variables: typing.Iterable[tf.Variable]) -> tf.Operation:
    """The operation by which all processes get the values that variables have on rank 0."""
    hvd = _load()
    assignments = []
    for variable in variables:
        with only_device('/cpu:0'), tf.name_scope('%sstate/%s/' % (_SCOPE, variable.op.name)):
            own_value = tf.cast(variable.read_value(), type_of_sent_variable(variable))
            value = hvd.broadcast(own_value, 0, name='of_rank_0')
            value = tf.cast(value, variable.dtype.base_dtype)
            assignments.append(tf.assign(variable, value).op)
    return tf.group(*assignments)


def gathered_lines(text: str, config: tf.ConfigProto) -> typing.List[str]:
    """The texts of all processes, by rank. They are sent as bytes: nothing is unpickled.

    Args:
      text: of this process.
      config: of the sessions of this process.
    """
    hvd = _load()
    # All sessions of a process share the threads that its first session asks for, and this is the
    # first one. But it is without GPUs: it would hold their memory, which the program's needs.
    config_without_gpus = tf.ConfigProto()
    config_without_gpus.CopyFrom(config)
    config_without_gpus.device_count['GPU'] = 0
    text_bytes = np.frombuffer(text.encode('utf-8'), np.uint8)
    with tf.Graph().as_default(), tf.device('/cpu:0'):
        own_size = tf.constant(np.array([text_bytes.size], np.int64))
        fetches = [hvd.allgather(own_size, name='towers_sizes'),
                   hvd.allgather(tf.constant(text_bytes), name='towers_texts')]
        try:
            with tf.Session(config=config_without_gpus) as session:
                sizes, texts = session.run(fetches)
        except tf.errors.OpError as error:
            raise ClusterError('Horovod lost a process before all had joined; see what that one '
                               'says: %s' % reason_of(error)) from None
    ends = np.cumsum(sizes)  # `texts` has the bytes of all processes, one after the other
    return [texts[end - size:end].tobytes().decode('utf-8') for size, end in zip(sizes, ends)]


def _configure(unused_cluster: typing.Any, config: tf.ConfigProto) -> None:
    """Gives each process of a machine a GPU of its own, and leaves the processors that all share to
    those that work: a thread that waits for work, as one does in each message, looks for it in a
    loop at first, unless TensorFlow is told not to."""
    hvd = _load()
    if hvd.local_size() > 1:
        config.gpu_options.visible_device_list = str(hvd.local_rank())
        config.experimental.disable_thread_spinning = True


def _place() -> typing.Tuple[int, int]:
    """The number of processes, and the rank of this process."""
    hvd = _load()
    return hvd.size(), hvd.rank()


ENGINE = Engine(name='Horovod', arguments=[], begin_step=begin_step, broadcast=broadcast,
                configure=_configure, place=_place, gathered=gathered_lines)
