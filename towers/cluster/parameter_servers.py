"""Synchronous and asynchronous training on TensorFlow's parameter servers.

Synchronous training: each worker adds its gradient to TensorFlow's accumulators on the servers. The
chief takes the accumulators' sums when all gradients have come, makes the one update, and gives
every other worker a token, for which the worker waits before its step ends.
`tf.train.SyncReplicasOptimizer` works alike, with these differences. Here a worker adds exactly one
gradient a step; gradients are transformed (clipped) once, over all workers; rows of sparse
gradients are weighted like dense gradients (`SyncReplicasOptimizer` divides a row by the number of
workers that have it); batches may be uneven; and the chief needs no thread.

The number of a round grows with the time of day, so that what another run has left on the servers
is older, and is dropped. A token is the number of the round that is made; its negative in the round
in which no worker has data.
"""

import time

import tensorflow.compat.v1 as tf

from towers import compat
from towers.cluster import data_end
from towers.cluster.machines import Machines, Shares, without_gradient
from towers.cluster.server_placement import tasks_by_size
from towers.cluster.session_steps import COLLECTIONS, SessionBegun
from towers.graph.graph_walk import bytes_of
from towers.placement.variable_device import only_device
from towers.reduce.sparse_rows import each_row_once, rows_once, scaled
from towers.tower.objectives import tensors_of

FIRST_SERVER = '/job:ps/task:0/device:CPU:0'

_SCOPE = 'served/'
"""The name scope of what workers find by its name on the servers. It stands at the root of the
graph: the caller's name scope may be another one on each worker."""


class ServedMachines(Machines):
    """Combines the gradients of one build over the workers of parameter servers.

    Attributes:
      sums_up: whether the servers sum up the gradients of several workers.
    """

    def __init__(self, cluster, examples, reduction):
        """See `Cluster.machines`."""
        self._cluster = cluster
        self._shares = Shares(cluster, examples, reduction)
        self._accumulators, self._pushes = [], []
        self.sums_up = cluster.synchronous and cluster.num_workers > 1

    def _over_machines(self, gradients, loss):
        """The gradients for the update: list of `(gradient, variable)`.

        In a synchronous training the chief gets the gradients over all machines. Every other
        worker, and each worker of an asynchronous training, gets its own gradients back. It sends
        them when it has computed its `loss`, too: the update may begin as soon as it has.
        """
        if not self.sums_up:
            return self._of_this_worker(gradients)
        with tf.name_scope(_SCOPE):
            self._make_rounds()
            after = [] if self._cluster.is_chief or loss is None else [loss]
            sums = [self._summed(each, after) for each in self._to_sum(gradients)]
            if not self._cluster.is_chief:
                return gradients
            self._make_drops()
            return self._for_update(gradients, sums)

    def _of_this_worker(self, gradients):
        """The gradients of an asynchronous worker, or of the only one."""
        cluster = self._cluster
        gradients, self.gates = data_end.own_data(cluster, rows_once(gradients))
        if cluster.num_workers == 1:
            return gradients
        begun = SessionBegun()
        self.begin = begun.begin
        return data_end.after(begun.check(), gradients)

    def _to_sum(self, gradients):
        """List of `(weighted gradient, shape of the sum, name, server)`; first the examples."""
        cluster, shares = self._cluster, self._shares
        weight = shares.own_examples() if shares.are_weighted else None
        factor = shares.constant() if weight is None else weight
        tasks = tasks_by_size({variable.op.name: bytes_of(variable)
                               for _, variable in gradients}, [0] * len(cluster.ps))
        to_sum = [] if weight is None else [(weight, [], _SCOPE + 'examples', FIRST_SERVER)]
        for gradient, variable in gradients:
            with only_device('/cpu:0'):
                gradient = scaled(_as(gradient, _summed_dtype(gradient)), factor)
                if isinstance(gradient, tf.IndexedSlices):
                    gradient = each_row_once(gradient)
            to_sum.append((gradient, variable.get_shape(), _SCOPE + 'sums/' + variable.op.name,
                           '/job:ps/task:%d/device:CPU:0' % tasks[variable.op.name]))
        return to_sum

    def _for_update(self, gradients, sums):
        """The sums over all workers as the chief's gradients, and the `gates` of its writes."""
        cluster, shares = self._cluster, self._shares
        with only_device('/cpu:0'):  # one operation, which every write of the step waits for
            self.gates = [tf.group(*tensors_of([(each, None) for each in sums]),
                                   name='all_gradients')]
        if shares.are_weighted:
            with only_device(FIRST_SERVER):
                total, sums = sums[0], sums[1:]
                is_over = total <= 0.
                total = tf.maximum(total, 1.)
            of_all = (1. if shares.is_mean else float(cluster.num_workers)) / total
            sums = [scaled(each, of_all) for each in sums]
        # An accumulator adds up equal rows of two workers only where both send them in ascending
        # order.
        with only_device('/cpu:0'):
            sums = rows_once([(_as(each, gradient.dtype.base_dtype), variable)
                              for each, (gradient, variable) in zip(sums, gradients)])
        if cluster.active is None:
            return sums
        self.gates = [self._end_all(is_over)]
        return data_end.after(self.gates[0], sums)

    @property
    def updates_here(self):
        """Whether this worker makes the update: in a synchronous training the chief alone does."""
        return not self.sums_up or self._cluster.is_chief

    def counted(self, examples):
        """The number of examples that this worker adds to the count of all workers in a step."""
        if not self.sums_up:
            return examples
        return examples * self._cluster.num_workers if self._cluster.is_chief else 0

    def begin_session(self, session):
        """The chief begins the rounds, before other workers take them up."""
        if not self.sums_up:
            super(ServedMachines, self).begin_session(session)
            return
        if not self._cluster.is_chief:
            session.run(self._take_up)
            return
        first = {self._first: int(time.time() * 1e6)}
        session.run(self._set_steps, first)  # from here on older gradients are refused
        for drop, count in zip(self._drops, session.run(self._counts)):
            if count:
                session.run(drop, {self._drop_count: count})
        session.run([self._set_steps, self._set_round], first)

    def train_op(self, update, before=(), replicated=()):
        """The operation of a step: on the chief with the update, elsewhere without."""
        if not self.sums_up:
            self.note_update(update, before)
            return update
        with tf.name_scope(_SCOPE), only_device('/cpu:0'):
            if self._cluster.is_chief:
                with tf.control_dependencies([update] + self._pushes):
                    done = self._tell(self._own_round.read_value())
                with tf.control_dependencies([done]):
                    return tf.assign_add(self._own_round, 1).op
            with tf.control_dependencies(self._pushes):
                own = self._own_round.read_value()
            # Tokens of another run are passed over. A queue takes part in no loop of control flow
            # v2.
            queue = self._tokens[self._cluster.rank]
            with compat.control_flow_v1():
                token = tf.while_loop(lambda token: tf.abs(token) < own,
                                      lambda token: queue.dequeue(), [tf.zeros([], tf.int64)])
            with tf.control_dependencies([token]):
                done = tf.assign_add(self._own_round, 1)
            if self._cluster.active is None:
                return done.op
            with tf.control_dependencies([done]):
                return data_end.raise_at_end(token < 0)

    def _tell(self, token):
        """The operation that gives all other workers a token."""
        with only_device(FIRST_SERVER):
            return tf.group(*[queue.enqueue([token])
                              for _, queue in sorted(self._tokens.items())])

    def _end_all(self, is_over):
        """The operation that ends the chief's training when no worker has data.

        It has all gradients of the step taken before, and the other workers told.
        """
        # A step takes no branch: with data, the token is 0, which workers pass over.
        with tf.control_dependencies(self.gates), only_device('/cpu:0'):
            told = self._tell(-self._own_round.read_value() * tf.cast(is_over, tf.int64))
        with tf.control_dependencies([told]):
            return data_end.raise_at_end(is_over)

    def _make_rounds(self):
        """Makes the round's number, on the first server and on this worker, and token queues."""
        with only_device(FIRST_SERVER):
            shared = tf.Variable(tf.zeros([], tf.int64), trainable=False, use_resource=True,
                                 collections=['towers_rounds'], name='round')
            self._tokens = {rank: tf.FIFOQueue(-1, tf.int64, [[]], name='tokens_%d' % rank,
                                               shared_name='%stokens_%d' % (_SCOPE, rank))
                            for rank in range(1, self._cluster.num_workers)}
            self._first = tf.placeholder(tf.int64, [])
        with only_device('/cpu:0'):
            self._own_round = tf.Variable(
                tf.zeros([], tf.int64), trainable=False, use_resource=True, name='own_round',
                collections=COLLECTIONS)
            self._take_up = tf.assign(self._own_round, shared.read_value()).op
            self._set_round = tf.group(tf.assign(shared, self._first),
                                       tf.assign(self._own_round, self._first))

    def _make_drops(self):
        """Makes what drops the gradients that another run has left in the accumulators."""
        with only_device(FIRST_SERVER):
            self._set_steps = tf.group(*[each.set_global_step(self._first)
                                         for each in self._accumulators])
            self._counts = [each.num_accumulated() for each in self._accumulators]
            self._drop_count = tf.placeholder(tf.int32, [])
            self._drops = [
                (each.take_indexed_slices_grad(self._drop_count).indices
                 if isinstance(each, tf.SparseConditionalAccumulator) else
                 each.take_grad(self._drop_count)) for each in self._accumulators]

    def _summed(self, to_sum, after):
        """Adds a gradient to an accumulator, after some operations.

        Args:
          to_sum: one of `_to_sum`.
          after: list of what else this worker has to have computed from the weights before.

        Returns:
          The accumulator's sum of all workers' gradients, which the chief alone takes.
        """
        gradient, shape, name, server = to_sum
        count, is_sparse = self._cluster.num_workers, isinstance(gradient, tf.IndexedSlices)
        kind = tf.SparseConditionalAccumulator if is_sparse else tf.ConditionalAccumulator
        fields = (tf.cast(gradient.indices, tf.int64), gradient.values,
                  gradient.dense_shape) if is_sparse else (gradient,)
        with only_device(server):
            accumulator = kind(gradient.dtype.base_dtype, shape, shared_name=name,
                               reduction_type='SUM')
            own_round = self._own_round.read_value()
            with tf.control_dependencies(after):
                self._pushes.append(accumulator.apply_grad(*fields, local_step=own_round))
            self._accumulators.append(accumulator)
            with tf.control_dependencies(self._pushes[-1:]):
                taken = (accumulator.take_indexed_slices_grad(count) if is_sparse else
                         accumulator.take_grad(count))
                return without_gradient(taken, gradient)


def _summed_dtype(gradient):
    """The type in which workers' gradients are added up: a worker's gradient times its number of
    examples may be no float16, and TensorFlow's accumulators take no bfloat16."""
    dtype = gradient.dtype.base_dtype
    return tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype


def _as(gradient, dtype):
    """A gradient, dense or sparse, in another type."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(tf.cast(gradient.values, dtype), gradient.indices,
                                gradient.dense_shape)
    return tf.cast(gradient, dtype)
