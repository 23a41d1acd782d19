"""Horovod, an optional package: gradients over its processes, the broadcast at the start."""

import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers.cluster import worker_step
from towers.cluster.machines import Begun, Engine, Exchanged, Pairs
from towers.cluster.ring import no_sum, sent_as, sent_type
from towers.errors import ClusterError, MissingPackageError, reason_of
from towers.gradients.gradient_pairs import cast, each_row_once, map_values, tensors_of
from towers.placement.variable_device import only_device
from towers.whole_batch.workers import Workers

_SCOPE = 'towers_shared/'
"""At the root of the graph: Horovod brings together by name, and callers' scopes may differ."""


def _load() -> typing.Any:
    """`horovod.tensorflow`, initialised; raises `MissingPackageError` if it cannot be loaded."""
    try:
        import horovod.tensorflow as hvd
        hvd.init()
    except (ImportError, ValueError, AttributeError) as error:
        raise MissingPackageError(
            "kind='horovod' needs Horovod, which cannot be loaded: %s. Install it with `pip "
            'install horovod` (the extra horovod), which builds for TensorFlow 1.15 to 2.18; or '
            "use kind='ring', TensorFlow's own, which needs nothing." % (
                str(error).split('\n', 1)[0])) from None
    return hvd


def begin_step(cluster: typing.Any, shares: worker_step.Shares) -> Begun:
    """The `Begun` of a step of Horovod's processes. `cluster` is the `Cluster`, and `shares` have
    the weight of this worker."""
    hvd = _load()
    begun = worker_step.session_begun()
    weight: typing.Any = shares.constant
    total = None
    if shares.are_weighted:
        with only_device('/cpu:0'), tf.name_scope(_SCOPE):  # before the backward pass
            examples = _of_a_step(tf.reshape(shares.own_examples(), [1]))
            with tf.control_dependencies([begun.check]):
                total = hvd.allreduce(examples, op=hvd.Sum, name='towers_numbers')[0]
            weight = shares.weight(total)

    def combine(gradients, loss, values):
        del loss  # of parameter servers
        combined = _combined(hvd, worker_step.after(begun.check, gradients))
        if cluster.active is None:
            return Exchanged(combined, [], begun.begin)
        # Other workers wait for all messages of this one.
        with tf.control_dependencies(tensors_of(combined) + list(values)):
            ended = worker_step.raise_at_end(total <= 0.)
        return Exchanged(worker_step.after(ended, combined), [ended], begun.begin)

    workers = Workers(
        cluster.num_workers, cluster.rank, shares.part_of_batch(weight), shares.has_batch(),
        lambda tensor: _sum_of_values(hvd, tensor, begun.check))
    return Begun(combine, weight, workers)


def _sum_of_values(hvd: typing.Any, tensor: tf.Tensor, check: tf.Operation) -> tf.Tensor:
    """The sum of the processes' values of the forward pass, or of their gradients, which Horovod
    brings together by name; waits for `check`."""
    sent = sent_type(tensor.dtype)
    if sent is None:
        raise no_sum(tensor)
    name = tensor.graph.unique_name('towers_value')
    with tf.control_dependencies([check]):
        total = hvd.allreduce(_of_a_step(tf.cast(tensor, sent)), op=hvd.Sum, name=name)
    return tf.cast(total, tensor.dtype)


def _of_a_step(tensor: tf.Tensor) -> tf.Tensor:
    """The same values, which TensorFlow does not take for constants.

    Horovod's all-reduce counts as an operation without state. Of a constant, such as a static
    number of examples, TensorFlow would compute it while it infers shapes, before there is a step,
    and wait for the other processes.
    """
    return tf.placeholder_with_default(tensor, tensor.shape)


def _combined(hvd: typing.Any, gradients: Pairs) -> Pairs:
    """The sums of the processes' gradients, by the variables' names."""
    combined = []
    for gradient, variable in gradients:
        with only_device(variable.device or None), tf.name_scope(
                '%ssums/%s/' % (_SCOPE, variable.op.name)):
            total = cast(_summed(hvd, gradient), gradient.dtype.base_dtype)
            combined.append((total, variable))
    return combined


def _summed(hvd: typing.Any, gradient: typing.Any) -> typing.Any:
    """The sum of the processes' gradients of a variable, in float32; in float64 if they are.
    Horovod gathers sparse rows and adds none: each is sent once, and those of all are added."""
    sent = tf.float64 if gradient.dtype.base_dtype == tf.float64 else tf.float32  # as in a ring
    gradient = map_values(tf.identity, cast(gradient, sent))
    if isinstance(gradient, tf.IndexedSlices):
        return each_row_once(hvd.allreduce(each_row_once(gradient), op=hvd.Sum))
    return hvd.allreduce(gradient, op=hvd.Sum)


def broadcast(unused_cluster: typing.Any, variables: typing.Iterable[tf.Variable]) -> tf.Operation:
    """The operation by which all processes get these variables of rank 0."""
    assignments = []
    for variable in variables:
        with only_device('/cpu:0'), tf.name_scope('%sstate/%s/' % (_SCOPE, variable.op.name)):
            own_value = tf.cast(variable.read_value(), sent_as(variable))
            value = _load().broadcast(own_value, 0, name='of_rank_0')
            assignments.append(
                tf.assign(variable, tf.cast(value, variable.dtype.base_dtype)).op)
    return tf.group(*assignments)


def gathered_lines(text: str) -> typing.List[str]:
    """The texts of all processes, by rank. They are sent as bytes: nothing is unpickled."""
    hvd = _load()
    data = np.frombuffer(text.encode('utf-8'), np.uint8)
    with tf.Graph().as_default(), tf.device('/cpu:0'):
        size = tf.constant(np.array([data.size], np.int64))
        fetches = [hvd.allgather(size, name='towers_sizes'),
                   hvd.allgather(tf.constant(data), name='towers_texts')]
        try:
            with tf.Session(config=tf.ConfigProto(device_count={'GPU': 0})) as session:
                sizes, together = session.run(fetches)
        except tf.errors.OpError as error:
            raise ClusterError('Horovod lost a process before all had joined; see what that one '
                               'says: %s' % reason_of(error)) from None
    ends = np.cumsum(sizes)
    return [together[end - size:end].tobytes().decode('utf-8') for size, end in zip(sizes, ends)]


def _configure(unused_cluster: typing.Any, config: tf.ConfigProto) -> None:
    """Gives each process of a machine a GPU of its own."""
    hvd = _load()
    if hvd.local_size() > 1:
        config.gpu_options.visible_device_list = str(hvd.local_rank())


def _place() -> typing.Tuple[int, int]:
    """The number of processes, and the rank of this one."""
    hvd = _load()
    return hvd.size(), hvd.rank()


ENGINE = Engine(name='Horovod', arguments=[], begin_step=begin_step, broadcast=broadcast,
                configure=_configure, place=_place, gathered=gathered_lines)
