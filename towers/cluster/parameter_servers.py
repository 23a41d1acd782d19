"""Synchronous and asynchronous training on TensorFlow's parameter servers.

Synchronous training: each worker adds its gradient to TensorFlow's accumulators on the servers. The
chief takes the sums when all gradients have come, makes the one update, and gives every other
worker a token, for which it waits before its step ends. Other than in `SyncReplicasOptimizer`, a
worker adds exactly one gradient a step, and gradients are clipped once, over all workers.

The number of a round grows with the time of day, so that what another run has left on the servers
is older, and is dropped. A token is the number of the round; its negative at the end of all data.
"""

import collections
import functools
import time

import tensorflow.compat.v1 as tf

from towers import compat
from towers.cluster import worker_step
from towers.cluster.machines import Combined, Engine
from towers.cluster.server_placement import device_of_server, tasks_by_size
from towers.cluster.worker_step import COLLECTIONS, without_gradient
from towers.graph.graph_walk import bytes_of
from towers.placement.variable_device import only_device
from towers.tower.gradient_pairs import cast, each_row_once, rows_once, tensors_of, times

_FIRST_SERVER = device_of_server(0)

_SCOPE = 'served/'
"""At the root of the graph: workers find things by name, and callers' scopes may differ."""


def combine(cluster, gradients, shares):
    """The `Combined` by the accumulators on the servers: the chief gets the gradients over all
    machines, every other worker its own back."""
    with tf.name_scope(_SCOPE):
        rounds = _Rounds(cluster)
        sums = _sums(gradients, shares, cluster, rounds.own)
        step = functools.partial(_step, cluster, rounds, [each.push for each in sums])
        if not cluster.is_chief:
            own = rows_once([(_as_sum(*each), each[1]) for each in gradients])
            return Combined(own, [], lambda session: session.run(rounds.take_up), step)
        begin = rounds.beginning([each.accumulator for each in sums])
        gradients, gates = _for_update(gradients, [each.total for each in sums], shares, cluster,
                                       rounds)
        return Combined(gradients, gates, begin, step)


def _step(cluster, rounds, pushes, update):
    """The operation of a step, on the chief with the update, elsewhere without."""
    with tf.name_scope(_SCOPE), only_device('/cpu:0'):
        if cluster.is_chief:
            with tf.control_dependencies([update] + pushes):
                done = rounds.tell(rounds.own.read_value())
            with tf.control_dependencies([done]):
                return tf.assign_add(rounds.own, 1).op
        token, done = rounds.wait(pushes)
        if cluster.active is None:
            return done.op
        with tf.control_dependencies([done]):
            return worker_step.raise_at_end(token < 0)


class _Rounds:
    """The number of the round, on the first server and on this worker (`own`, without a value until
    the operation `take_up` has begun the session), and queues of tokens."""

    def __init__(self, cluster):
        self._rank = cluster.rank
        with only_device(_FIRST_SERVER):
            self._shared = tf.Variable(tf.zeros([], tf.int64), trainable=False, use_resource=True,
                                       collections=['towers_rounds'], name='round')
            self._tokens = {rank: tf.FIFOQueue(-1, tf.int64, [[]], name='tokens_%d' % rank,
                                               shared_name='%stokens_%d' % (_SCOPE, rank))
                            for rank in range(1, cluster.num_workers)}
        with only_device('/cpu:0'):
            self.own = tf.Variable(
                tf.zeros([], tf.int64), trainable=False, use_resource=True, name='own_round',
                collections=COLLECTIONS)
            self.take_up = tf.assign(self.own, self._shared.read_value()).op

    def beginning(self, accumulators):
        """Function by which the chief begins the rounds of a session, before others take them up.
        It drops the gradients that another run has left in the accumulators."""
        with only_device(_FIRST_SERVER):
            first, dropped = tf.placeholder(tf.int64, []), tf.placeholder(tf.int32, [])
            refuse_older = tf.group(*[each.set_global_step(first) for each in accumulators])
            counts = [each.num_accumulated() for each in accumulators]
            drops = [_take(each, dropped) for each in accumulators]
            drops = [getattr(each, 'indices', each) for each in drops]
        with only_device('/cpu:0'):
            set_round = tf.group(tf.assign(self._shared, first), tf.assign(self.own, first))

        def begin(session):
            fed = {first: int(time.time() * 1e6)}
            session.run(refuse_older, fed)
            for drop, count in zip(drops, session.run(counts)):
                if count:
                    session.run(drop, {dropped: count})
            session.run([refuse_older, set_round], fed)
        return begin

    def tell(self, token):
        """The operation that gives all other workers a token."""
        with only_device(_FIRST_SERVER):
            return tf.group(*[queue.enqueue([token]) for _, queue in sorted(self._tokens.items())])

    def wait(self, pushes):
        """`(this worker's token of the round, the number of the next round)`, after some pushes;
        tokens of another run are passed over."""
        with tf.control_dependencies(pushes):
            own, queue = self.own.read_value(), self._tokens[self._rank]
        with compat.control_flow_v1():  # a queue takes part in no loop of control flow v2
            token = tf.while_loop(lambda token: tf.abs(token) < own,
                                  lambda token: queue.dequeue(), [tf.zeros([], tf.int64)])
        with tf.control_dependencies([token]):
            return token, tf.assign_add(self.own, 1)


_Sum = collections.namedtuple('_Sum', 'accumulator push total')
_Sum.__doc__ = "An accumulator, the push of this worker's part, the total, for the chief alone."


def _sums(gradients, shares, cluster, own_round):
    """List of `_Sum`: of the workers' examples, where these weigh, and of each gradient."""
    # Other workers send when they have their loss, too: the update may begin as soon as they have.
    after = [] if cluster.is_chief or shares.loss is None else [shares.loss]
    factor = shares.own_examples() if shares.are_weighted else shares.constant
    tasks = tasks_by_size({variable.op.name: bytes_of(variable) for _, variable in gradients},
                          len(cluster.ps))
    parts = [(factor, [], 'examples', _FIRST_SERVER)] if shares.are_weighted else []
    for gradient, variable in gradients:
        dtype = gradient.dtype.base_dtype
        if dtype in (tf.float16, tf.bfloat16):  # times examples may overflow; and no accumulator's
            dtype = tf.float32
        with only_device('/cpu:0'):
            gradient = times(cast(gradient, dtype), factor)
            if isinstance(gradient, tf.IndexedSlices):
                gradient = each_row_once(gradient)
        name, shape = variable.op.name, variable.get_shape()
        parts.append((gradient, shape, 'sums/' + name, device_of_server(tasks[name])))
    return [_sum(*part, after, cluster.num_workers, own_round) for part in parts]


def _sum(part, shape, name, device, after, count, own_round):
    """The `_Sum` of the parts of `count` workers; this one is pushed after some operations."""
    is_sparse = isinstance(part, tf.IndexedSlices)
    kind = tf.SparseConditionalAccumulator if is_sparse else tf.ConditionalAccumulator
    with only_device(device):
        accumulator = kind(part.dtype.base_dtype, shape, shared_name=_SCOPE + name,
                           reduction_type='SUM')
        add = accumulator.apply_indexed_slices_grad if is_sparse else accumulator.apply_grad
        own_round = own_round.read_value()
        with tf.control_dependencies(after):
            push = add(part, local_step=own_round)
        with tf.control_dependencies([push]):
            return _Sum(accumulator, push, without_gradient(_take(accumulator, count), part))


def _as_sum(gradient, variable):
    """A gradient of the same types and static shapes on the chief, of servers' sums, and elsewhere:
    the update, which all workers compare, is of the same operations."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    indices, shape = tf.cast(gradient.indices, tf.int64), tf.cast(tf.shape(variable), tf.int64)
    indices.set_shape([None])
    gradient.values.set_shape(tf.TensorShape([None]).concatenate(variable.get_shape()[1:]))
    return tf.IndexedSlices(gradient.values, indices, tf.placeholder_with_default(shape, None))


def _take(accumulator, count):
    """The sum of `count` gradients, which leaves the accumulator."""
    if isinstance(accumulator, tf.SparseConditionalAccumulator):
        return accumulator.take_indexed_slices_grad(count)
    return accumulator.take_grad(count)


def _for_update(gradients, sums, shares, cluster, rounds):
    """`(the sums over all workers as the chief's gradients, the gates of its writes)`."""
    with only_device('/cpu:0'):  # one operation, which every write of the step waits for
        gates = [tf.group(*tensors_of([(each, None) for each in sums]), name='all_gradients')]
    if shares.are_weighted:
        with only_device(_FIRST_SERVER):
            total, sums = sums[0], sums[1:]
            of_all, is_over = shares.of_all(total), total <= 0.
        sums = [times(each, of_all) for each in sums]
    # An accumulator adds up equal rows of two workers only where both send them in ascending order.
    with only_device('/cpu:0'):
        sums = rows_once([(_as_sum(cast(each, gradient.dtype.base_dtype), variable), variable)
                          for each, (gradient, variable) in zip(sums, gradients)])
    if cluster.active is None:
        return sums, gates
    # In every step the chief enqueues a token: minus the round at the end of all data, else 0.
    with tf.control_dependencies(gates), only_device('/cpu:0'):
        told = rounds.tell(-rounds.own.read_value() * tf.cast(is_over, tf.int64))
    with tf.control_dependencies([told]):
        ended = worker_step.raise_at_end(is_over)
    return worker_step.after(ended, sums), [ended]


def _configure(cluster, config):
    # A worker that is gone must not keep the others from making a session.
    config.device_filters.extend(['/job:ps', '/job:worker/task:%d' % cluster.rank
                                  if cluster.job == 'worker' else '/job:worker'])


ENGINE = Engine('parameter servers', ['ps', 'synchronous'], combine, None, _configure)
