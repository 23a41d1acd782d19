"""Synchronous and asynchronous training on TensorFlow's parameter servers.

Synchronous training: each worker adds its gradient to TensorFlow's accumulators on the servers. The
chief takes the accumulators' sums when enough gradients have come, makes the one update, and gives
every other worker a token, for which the worker waits before its next step.
`tf.train.SyncReplicasOptimizer` works alike, with these differences. Here a worker adds exactly one
gradient a step, since each worker has its own tokens; gradients are transformed (clipped) once,
over all workers; rows of sparse gradients are weighted like dense gradients
(`SyncReplicasOptimizer` divides a row by the number of workers that have it); batches may be
uneven; and the chief needs no thread.

The number of a round is a multiple of 4 and grows with the time of day, so that gradients and
tokens from before a restart of the chief are always older than new ones, and are dropped. An odd
token is the last one: the round's number and 1 where the chief has ended, and 3 where no worker has
data.
"""


import tensorflow.compat.v1 as tf

from towers import compat
from towers.cluster import data_end
from towers.cluster.machines import Machines, Shares, without_gradient
from towers.cluster.server_placement import tasks_by_size
from towers.cluster.synchronous_rounds import FIRST_SERVER, RoundsHook, SentGradients
from towers.cluster.session_guard import COLLECTIONS, SessionBegun
from towers.errors import ClusterError
from towers.graph.nests import bytes_of
from towers.placement.variable_device import only_device
from towers.reduce.sparse_rows import each_row_once, rows_once, scaled
from towers.tower.objectives import tensors_of

_SCOPE = 'served/'
"""The name scope of what workers find by its name on the servers. It stands at the root of the
graph: the caller's name scope may be another one on each worker."""

_NO_DATA = 3  # what the last token of a training without data is more than its round


class ServedMachines(Machines):
    """Combines the gradients of one build over the workers of parameter servers.

    Attributes:
      hook: hook that every session of a synchronous training needs; None for an asynchronous one.
      chief_has_ended: whether a step was not made since the chief had ended its training.
    """

    def __init__(self, cluster, examples, reduction):
        """See `Cluster.machines`."""
        self._cluster = cluster
        self._shares = Shares(cluster, examples, reduction)
        self._accumulators, self._pushes = [], []
        self.hook = None

    chief_has_ended = property(lambda self: self.hook is not None and self.hook.chief_has_ended)

    def _over_machines(self, gradients, loss):
        """The gradients for the update: list of `(gradient, variable)`.

        In a synchronous training the chief gets the gradients over all machines. Every other
        worker, and each worker of an asynchronous training, gets its own gradients back. It sends
        them when it has computed its `loss`, too: the update may begin as soon as it has.
        """
        cluster = self._cluster
        if not cluster.synchronous or cluster.num_workers == 1:
            return self._of_this_worker(gradients)
        needed = cluster.workers_a_step
        with tf.name_scope(_SCOPE):
            self._make_rounds()
            sums = self._all_summed(self._to_sum(gradients, needed), needed,
                                    [] if loss is None else [loss])
            self.hook = RoundsHook(cluster, self._round, self._own_round, self._first_round,
                                   self._accumulators, self._tokens, self._sent_gradients)
            return self._for_update(gradients, sums) if cluster.is_chief else gradients

    def _of_this_worker(self, gradients):
        """The gradients of an asynchronous worker, or of the only one."""
        cluster = self._cluster
        gradients, self.gates = data_end.own_data(cluster, rows_once(gradients))
        if cluster.num_workers == 1:
            return gradients
        begun = SessionBegun()
        self.begin = begun.begin
        return data_end.after(begun.check(), gradients)

    def _to_sum(self, gradients, needed):
        """List of `(weighted gradient, shape of the sum, name, server)`; first the examples."""
        cluster, shares = self._cluster, self._shares
        weight = shares.own_examples() if shares.are_weighted else None
        factor = weight
        if weight is None:
            factor = 1. if shares.is_mean else float(needed)
            # With backup workers more gradients may come than are needed, so the accumulators
            # divide by the number that came.
            factor /= 1 if cluster.backup_workers else needed
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
        return self.hook is None or self._cluster.is_chief

    def counted(self, examples):
        """The number of examples that this worker adds to the count of all workers in a step."""
        if self.hook is None:
            return examples
        return examples * self._cluster.num_workers if self._cluster.is_chief else 0

    def join(self, connection, make_wait=None):
        """As `Machines.join`; the rounds wait for the chief by `make_wait`, see `RoundsHook`."""
        super(ServedMachines, self).join(connection)
        if self.hook is not None:
            self.hook.join(connection, make_wait)

    def train_op(self, update, before=(), replicated=()):
        """The operation of a step: on the chief with the update, elsewhere without."""
        if self.hook is None:
            self.note_update(update, before)
            return update
        with tf.name_scope(_SCOPE), only_device('/cpu:0'):
            if self._cluster.is_chief:
                with tf.control_dependencies(
                        [update, self._sent_gradients.begun_now] + self._pushes):
                    next_round = tf.identity(tf.assign_add(self._own_round, 4))
                with only_device(FIRST_SERVER):
                    round_set = tf.assign(self._round, next_round)
                    with tf.control_dependencies([round_set]):
                        return tf.group(round_set, *[queue.enqueue([next_round]) for _, queue in
                                                 sorted(self._tokens.items())])
            queue, before = self._tokens[self._cluster.rank], tf.identity(self._own_round)
            with tf.control_dependencies([self._sent_gradients.all_sent]):
                before = tf.identity(before)
            # Skips the tokens of earlier rounds. A queue takes part in no loop of control flow v2.
            with compat.control_flow_v1():
                newest = tf.while_loop(lambda token: token <= before, lambda token: queue.dequeue(),
                                       [before])
            with tf.control_dependencies([tf.assign(self._own_round, newest),
                                          self.hook.detect_anew(before, newest)]):
                newest = self._own_round.read_value()
            over = self.hook.raise_if_over(newest)
            if self._cluster.active is None:
                return over
            with tf.control_dependencies([over]):
                newest = tf.identity(newest)
            return data_end.raise_at_end(tf.equal(newest % 4, _NO_DATA))

    def _end_all(self, is_over):
        """The operation that ends the chief's training when no worker has data.

        It has all gradients of the step taken before, and the other workers told.
        """
        with tf.control_dependencies(self.gates), only_device('/cpu:0'):
            last, count = self._own_round.read_value() + _NO_DATA, tf.cast(is_over, tf.int32)
            last = tf.fill([count], last)  # none in other steps, which takes no branch
        with only_device(FIRST_SERVER):
            told = [queue.enqueue_many([last]) for _, queue in sorted(self._tokens.items())]
        with tf.control_dependencies(told):
            return data_end.raise_at_end(is_over)

    def _make_rounds(self):
        """Makes the round's number, on the first server and on this worker, and token queues."""
        with only_device(FIRST_SERVER):
            self._round = tf.Variable(tf.zeros([], tf.int64), trainable=False, use_resource=True,
                                      collections=['towers_rounds'], name='round')
            self._first_round = tf.Variable(
                tf.zeros([], tf.int64), trainable=False, use_resource=True,
                collections=['towers_rounds'], name='first_round')
            self._tokens = {rank: tf.FIFOQueue(-1, tf.int64, [[]], name='tokens_%d' % rank,
                                               shared_name='%stokens_%d' % (_SCOPE, rank))
                            for rank in range(1, self._cluster.num_workers)}
        with only_device('/cpu:0'):
            self._own_round = tf.Variable(
                tf.zeros([], tf.int64), trainable=False, use_resource=True, name='own_round',
                collections=COLLECTIONS)
        self._sent_gradients = SentGradients(self._cluster)

    def _all_summed(self, to_sum, needed, computed):
        """Adds gradients to accumulators, and records on the first server what has been sent.

        Args:
          to_sum: list of `(gradient, shape of the sum, name, server)`.
          needed: number of gradients in a sum.
          computed: list of what else this worker has to have computed from the weights before.

        Returns:
          List of the accumulators' sums, which the chief alone takes.
        """
        gradients = [gradient for gradient, _, _, _ in to_sum]
        begun = []
        if not self._cluster.is_chief:
            # The servers have them all before the first one is added: a worker that is killed on
            # the way has given none, and what is left is the time of adding up. Nothing is sent
            # later for it: a server takes a gradient as soon as the backward pass has it.
            for place, (gradient, _, _, server) in enumerate(to_sum):
                with only_device(server):
                    gradients[place] = data_end.same(gradient)
            begun = tensors_of([(gradient, None) for gradient in gradients]) + computed
        begun = self._sent_gradients.record_begun(begun, self._own_round.read_value())
        sums = []
        for gradient, (_, shape, name, server) in zip(gradients, to_sum):
            with only_device(server):
                sums.append(self._summed(gradient, shape, name, needed,
                                         [] if self._cluster.is_chief else [begun]))
        self._sent_gradients.record_sent(self._pushes, self._own_round.read_value())
        return sums

    def _summed(self, gradient, shape, name, needed, after):
        """Adds a gradient to an accumulator on the current device, after some operations.

        Returns:
          The accumulator's sum of `needed` gradients, which the chief alone takes.
        """
        local_round = self._own_round.read_value()
        if isinstance(gradient, tf.IndexedSlices):
            if self._cluster.backup_workers:
                raise ClusterError(
                    'backup_workers=%d, and the gradient %r is sparse: TensorFlow does not tell '
                    'how many workers the sum of its rows is of. Leave backup_workers out.' % (
                        self._cluster.backup_workers, name))
            accumulator = tf.SparseConditionalAccumulator(
                gradient.dtype.base_dtype, shape, shared_name=name, reduction_type='SUM')
            fields = (tf.cast(gradient.indices, tf.int64), gradient.values, gradient.dense_shape)
        else:
            accumulator = tf.ConditionalAccumulator(
                gradient.dtype.base_dtype, shape, shared_name=name,
                reduction_type='MEAN' if self._cluster.backup_workers else 'SUM')
            fields = (gradient,)
        with tf.control_dependencies(after):
            self._pushes.append(accumulator.apply_grad(*fields, local_step=local_round))
        self._accumulators.append(accumulator)
        with tf.control_dependencies([self._pushes[-1]]):
            taken = (accumulator.take_indexed_slices_grad(needed)
                     if isinstance(gradient, tf.IndexedSlices) else accumulator.take_grad(needed))
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
