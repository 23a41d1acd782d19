"""Horovod, an optional package: gradients over its processes, the broadcast at the start."""

import numpy as np
import tensorflow.compat.v1 as tf

from towers.cluster import worker_step
from towers.cluster.machines import Combined, Engine
from towers.cluster.ring import sent_as
from towers.errors import ClusterError, MissingPackageError, reason_of
from towers.placement.variable_device import only_device
from towers.tower.gradient_pairs import cast, each_row_once, map_values, tensors_of, times

_SCOPE = 'towers_shared/'
"""At the root of the graph: Horovod brings together by name, and callers' scopes may differ."""


def _load():
    """`horovod.tensorflow`, initialised; `MissingPackageError` where it cannot be loaded."""
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


def combine(cluster, gradients, shares):
    """The `Combined` of a machine's gradients by Horovod's all-reduce, by the variables' names."""
    hvd, weight, average = _load(), shares.constant, shares.is_mean
    check, begin = worker_step.session_begun()
    if shares.are_weighted:
        with only_device('/cpu:0'), tf.name_scope(_SCOPE):  # before the backward pass
            examples = tf.reshape(shares.own_examples(), [1])
            with tf.control_dependencies([check]):
                total = hvd.allreduce(examples, op=hvd.Sum, name='towers_numbers')[0]
            weight, average = shares.weight(total), False
    operation, combined = hvd.Average if average else hvd.Sum, []
    for gradient, variable in worker_step.after(check, gradients):
        with only_device(variable.device or None), tf.name_scope(
                '%ssums/%s/' % (_SCOPE, variable.op.name)):
            dtype = gradient.dtype.base_dtype
            sent = tf.float64 if dtype == tf.float64 else tf.float32  # as in a ring
            gradient = map_values(tf.identity, cast(
                gradient if average else times(gradient, weight), sent))
            # Horovod gathers rows and adds none: each is sent once, and those of all are added.
            total_of_all = (
                each_row_once(hvd.allreduce(each_row_once(gradient), op=operation))
                if isinstance(gradient, tf.IndexedSlices) else
                hvd.allreduce(gradient, op=operation))
            combined.append((cast(total_of_all, dtype), variable))
    if cluster.active is None:
        return Combined(combined, [], begin)
    with tf.control_dependencies(tensors_of(combined)):  # which the other workers wait for
        ended = worker_step.raise_at_end(total <= 0.)
    return Combined(worker_step.after(ended, combined), [ended], begin)


def broadcast(unused_cluster, variables):
    """The operation by which all processes get these variables of rank 0."""
    done = []
    for variable in variables:
        with only_device('/cpu:0'), tf.name_scope('%sstate/%s/' % (_SCOPE, variable.op.name)):
            value = _load().broadcast(
                tf.cast(variable.read_value(), sent_as(variable)), 0, name='of_rank_0')
            done.append(tf.assign(variable, tf.cast(value, variable.dtype.base_dtype)).op)
    return tf.group(*done)


def gathered_lines(text):
    """The texts of all processes, by rank. They are sent as bytes: nothing is unpickled."""
    hvd = _load()
    data = np.frombuffer(text.encode('utf-8'), np.uint8)
    with tf.Graph().as_default(), tf.device('/cpu:0'):
        fetches = [hvd.allgather(tf.constant(np.array([data.size], np.int64)), name='towers_sizes'),
                   hvd.allgather(tf.constant(data), name='towers_texts')]
        try:
            with tf.Session(config=tf.ConfigProto(device_count={'GPU': 0})) as session:
                sizes, together = session.run(fetches)
        except tf.errors.OpError as error:
            raise ClusterError('Horovod lost a process before all had joined; see what that one '
                               'says: %s' % reason_of(error)) from None
    ends = np.cumsum(sizes)
    return [together[end - size:end].tobytes().decode('utf-8') for size, end in zip(sizes, ends)]


def _configure(unused_cluster, config):
    hvd = _load()
    if hvd.local_size() > 1:
        config.gpu_options.visible_device_list = str(hvd.local_rank())


ENGINE = Engine('Horovod', [], combine, broadcast, _configure,
                lambda: (_load().size(), _load().rank()), gathered_lines)
