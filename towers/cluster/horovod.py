"""Horovod, an optional package: gradients over its processes, the broadcast at the start."""

import numpy as np
import tensorflow.compat.v1 as tf

from towers.cluster import data_end
from towers.cluster.machines import Machines, Shares, shared_scope
from towers.cluster.shared_state import share_state
from towers.compat import TF_VERSION
from towers.errors import MissingPackageError, WorkerLostError
from towers.placement.variable_device import only_device
from towers.reduce.sparse_rows import each_row_once
from towers.tower.objectives import tensors_of, times


_BEGIN = 'towers_begin/'  # the scope of what sessions begin with, at the root, see `shared_scope`
_NEWEST = (2, 18)  # version of TensorFlow for which Horovod builds


def load_horovod():
    """`horovod.tensorflow`, initialised.

    Raises:
      MissingPackageError: Horovod is not installed, or not built for this TensorFlow.
    """
    try:
        import horovod.tensorflow as hvd
        hvd.init()
    except (ImportError, ValueError, AttributeError) as error:
        # From there on its sources do not compile, so that to install it would be bad advice.
        what_to_do = ('Install it with `pip install horovod` (the extra horovod; it builds for '
                      "TensorFlow 1.15 to 2.18), or use" if TF_VERSION <= _NEWEST else
                      'It does not build for TensorFlow %d.%d, only for 1.15 to 2.18: use' %
                      TF_VERSION)
        raise MissingPackageError(
            "kind='horovod' needs Horovod, which cannot be loaded: %s. %s kind='ring', "
            "TensorFlow's own, which needs nothing." % (
                str(error).split('\n', 1)[0], what_to_do)) from None
    return hvd


class HorovodMachines(Machines):
    """Combines gradients by Horovod's all-reduce; see `RingMachines`.

    Attributes:
      state: as in `RingMachines`.
    """
    updates_here = True

    def __init__(self, cluster, examples, reduction):
        self._cluster = cluster
        self._shares = Shares(cluster, examples, reduction)
        self._hvd = load_horovod()
        self._own = []  # as in `RingMachines`
        self._scope = None  # of all that Horovod brings together by its name

    def _over_machines(self, gradients, loss):
        shares = self._shares
        self._scope = shared_scope('towers_shared')
        self._own = list(gradients)
        with only_device('/cpu:0'), tf.name_scope(self._scope):
            total = self._count() if shares.are_weighted else None
            weight = None if total is None else shares.weight(total)
        combined = []
        for gradient, variable in gradients:
            with only_device(variable.device or None), tf.name_scope(
                    '%ssums/%s/' % (self._scope, variable.op.name)):
                if weight is not None:
                    gradient = times(gradient, weight)
                # Horovod brings together what has one name, and names it by what it is given: by
                # the variable here, and not by operations that each worker may have others of.
                gradient = data_end.same(gradient)
                combined.append((self._reduced(gradient, weight is None and shares.is_mean),
                                 variable))
        if self._cluster.active is None:
            return combined
        with tf.control_dependencies(tensors_of(combined)):  # which the other workers wait for
            ended = data_end.raise_at_end(total <= 0.)
        self.gates = [ended]
        return data_end.after(ended, combined)

    def _count(self):
        """The examples of all workers, float64; added up when the batch is known."""
        own = tf.reshape(self._shares.own_examples(), [1])
        return self._hvd.allreduce(own, op=self._hvd.Sum, name='towers_numbers')[0]

    def _reduced(self, gradient, average):
        hvd = self._hvd
        operation = hvd.Average if average else hvd.Sum
        if not isinstance(gradient, tf.IndexedSlices):
            return hvd.allreduce(gradient, op=operation)
        # Horovod gathers rows and adds none: each is sent once, and those of all machines added.
        return each_row_once(hvd.allreduce(each_row_once(gradient), op=operation))

    def counted(self, examples):
        """As `RingMachines.counted`."""
        return examples * self._cluster.num_workers

    def train_op(self, update, before=(), replicated=()):
        """As `RingMachines.train_op`."""
        if self._cluster.num_workers == 1:
            return update
        self.note_update(update, before)
        update, self.state = share_state(
            update, before, self._own, self.combined, self._of_rank_0, replicated)
        return update

    def _of_rank_0(self, variable):
        with only_device('/cpu:0'), tf.name_scope(
                '%sstate/%s/' % (self._scope, variable.op.name)):
            return tf.assign(variable, self._hvd.broadcast(
                variable.read_value(), 0, name='of_rank_0')).op

    def broadcast(self, variables):
        """An operation that gives all processes these variables of rank 0."""
        with tf.name_scope(_BEGIN):
            return self._hvd.broadcast_variables(variables, 0)


def explained(error):
    """A `WorkerLostError` for an error of Horovod's, of which another process is gone; or None."""
    if not any(text in str(error) for text in _LOST):
        return None
    return WorkerLostError(
        'a worker of Horovod has ended before this one, whose step needs all workers: killed, by '
        'an error, or since its steps or its data were over: see what it says. With '
        'StopTogetherHook on every worker all stop after the same step. Started again, they go on '
        'from the last checkpoint.')


_LOST = ('Horovod has been shut down', 'gloo/transport')


def gathered_lines(text):
    """The texts of all processes. They are sent as bytes of UTF-8: nothing is unpickled.

    Args:
      text: this process's string.

    Returns:
      List of strings, in the order of ranks.
    """
    hvd = load_horovod()
    data = np.frombuffer(text.encode('utf-8'), np.uint8)
    with tf.Graph().as_default(), tf.device('/cpu:0'):
        fetches = [hvd.allgather(tf.constant(np.array([data.size], np.int64)), name='towers_sizes'),
                   hvd.allgather(tf.constant(data), name='towers_texts')]
        with tf.Session(config=tf.ConfigProto(device_count={'GPU': 0})) as session:
            sizes, together = session.run(fetches)
    ends = np.cumsum(sizes)
    return [together[end - size:end].tobytes().decode('utf-8') for size, end in zip(sizes, ends)]
