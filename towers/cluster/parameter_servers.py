"""Synchronous and asynchronous training on TensorFlow's parameter servers.

Synchronous training: each worker adds its gradient to TensorFlow's accumulators on the servers. The
chief takes the sums when all gradients have come, makes the one update, and gives every other
worker a token, for which it waits before its step ends. Other than in `SyncReplicasOptimizer`, a
worker adds exactly one gradient a step, and gradients are clipped once, over all workers.

The number of a round grows with the time of day, so that what another run has left on the servers
is older, and is dropped. A token is the number of the round; its negative at the end of all data.
"""

import functools
import time
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.cluster import worker_step
from towers.cluster.machines import Begun, Engine, Exchanged, Pairs
from towers.cluster.server_placement import device_of_server, tasks_by_size
from towers.cluster.worker_step import COLLECTIONS, Shares, without_gradient
from towers.gradients.gradient_pairs import cast, each_row_once, rows_once, tensors_of, times
from towers.graph.graph_walk import bytes_of
from towers.placement.variable_device import only_device

_FIRST_SERVER = device_of_server(0)

_SCOPE = 'served/'
"""At the root of the graph: workers find things by name, and callers' scopes may differ."""


class _Sum(typing.NamedTuple):
    """The sum over the workers of one gradient, or of the numbers of their examples."""
    accumulator: typing.Any
    push: tf.Operation  # adds this worker's summand
    total: typing.Any  # for the chief alone


def begin_step(cluster: typing.Any, shares: Shares) -> Begun:
    """The `Begun` of a step on servers, where the gradients are multiplied by the numbers of
    examples, and the sum is divided by that of all: no worker waits for them before its losses.
    `cluster` is the `Cluster`, and `shares` have the weight of this machine."""
    return Begun(functools.partial(_combine, cluster, shares))


def _combine(cluster: typing.Any, shares: Shares, gradients: Pairs,
             loss: typing.Optional[tf.Tensor], values: typing.Sequence[tf.Tensor]) -> Exchanged:
    """The `Exchanged` by the accumulators on the servers: the chief gets the gradients over all
    machines, every other worker its own back. There are no exchanged `values`."""
    del values
    # Other workers send when they have their loss, too: the update may begin as soon as they have.
    after = [] if cluster.is_chief or loss is None else [loss]
    with tf.name_scope(_SCOPE):
        rounds = _Rounds(cluster)
        sums = [_sum(cluster, rounds, summand, after)
                for summand in _summands(cluster, gradients, shares)]
        step = functools.partial(_step, cluster, rounds, [each.push for each in sums])
        if not cluster.is_chief:
            own = rows_once([(_as_sum(gradient, variable), variable)
                             for gradient, variable in gradients])
            return Exchanged(own, [], lambda session: session.run(rounds.take_up), step)
        begin = rounds.beginning([each.accumulator for each in sums])
        return _for_update(cluster, gradients, shares, rounds, sums)._replace(
            begin_session=begin, step=step)


def _step(cluster: typing.Any, rounds: '_Rounds', pushes: typing.List[tf.Operation],
          update: tf.Operation) -> tf.Operation:
    """The operation that ends a step.

    The chief's makes the update, and gives all workers the number of the round as a token; the
    others' wait for it. With `Cluster(active=…)` a token below 0 says that the data of all workers
    have ended, and raises.

    Args:
      cluster: the `Cluster`.
      rounds: this worker's count of the rounds.
      pushes: the operations that add this worker's summands.
      update: the operation of the update.
    """
    with tf.name_scope(_SCOPE), only_device('/cpu:0'):
        if cluster.is_chief:
            with tf.control_dependencies([update] + pushes):
                tokens_sent = rounds.tell(rounds.own.read_value())
            with tf.control_dependencies([tokens_sent]):
                return tf.assign_add(rounds.own, 1).op
        token, next_round = rounds.wait(pushes)
        if cluster.active is None:
            return next_round.op
        with tf.control_dependencies([next_round]):
            return worker_step.raise_at_end(token < 0)


class _Rounds:
    """The number of the round, on the first server and on this worker, and queues of tokens.

    Attributes:
      own: the variable with this worker's number.
      take_up: the operation that gives it a value, which begins the session.
    """

    def __init__(self, cluster: typing.Any):
        self._rank = cluster.rank
        with only_device(_FIRST_SERVER):
            self._shared = tf.Variable(tf.zeros([], tf.int64), trainable=False, use_resource=True,
                                       collections=['towers_rounds'], name='round')
            self._tokens = {}  # the queue of each worker but the chief, by rank
            for rank in range(1, cluster.num_workers):
                name = 'tokens_%d' % rank
                self._tokens[rank] = tf.FIFOQueue(-1, tf.int64, [[]], name=name,
                                                  shared_name=_SCOPE + name)
        with only_device('/cpu:0'):
            self.own = tf.Variable(
                tf.zeros([], tf.int64), trainable=False, use_resource=True, name='own_round',
                collections=COLLECTIONS)
            self.take_up = tf.assign(self.own, self._shared.read_value()).op

    def beginning(self, accumulators: typing.List[typing.Any]) -> typing.Callable:
        """Function of a session by which the chief begins its rounds, before others take them up.
        It drops the gradients that another run has left in the accumulators."""
        with only_device(_FIRST_SERVER):
            first = tf.placeholder(tf.int64, [])
            num_dropped = tf.placeholder(tf.int32, [])
            refuse_older = tf.group(*[each.set_global_step(first) for each in accumulators])
            counts = [each.num_accumulated() for each in accumulators]
            dropped = [_take(each, num_dropped) for each in accumulators]
            drops = [getattr(each, 'indices', each) for each in dropped]
        with only_device('/cpu:0'):
            set_round = tf.group(tf.assign(self._shared, first), tf.assign(self.own, first))

        def begin(session: tf.Session) -> None:
            """Gives all accumulators the number of the first round, which is the time of day."""
            feed = {first: int(time.time() * 1e6)}
            session.run(refuse_older, feed)
            for drop, count in zip(drops, session.run(counts)):
                if count:
                    session.run(drop, {num_dropped: count})
            session.run([refuse_older, set_round], feed)
        return begin

    def tell(self, token: tf.Tensor) -> tf.Operation:
        """The operation that gives all other workers a token."""
        with only_device(_FIRST_SERVER):
            return tf.group(*[queue.enqueue([token]) for _, queue in sorted(self._tokens.items())])

    def wait(self, pushes: typing.List[tf.Operation]) -> typing.Tuple[tf.Tensor, tf.Tensor]:
        """`(this worker's token of the round, the number of the next round)`, after some pushes;
        tokens of another run are passed over."""
        queue = self._tokens[self._rank]
        with tf.control_dependencies(pushes):
            own = self.own.read_value()
        with compat.control_flow_v1():  # a queue takes part in no loop of control flow v2
            token = tf.while_loop(lambda token: tf.abs(token) < own,
                                  lambda token: queue.dequeue(), [tf.zeros([], tf.int64)])
        with tf.control_dependencies([token]):
            return token, tf.assign_add(self.own, 1)


class _Summand(typing.NamedTuple):
    """What a worker adds to a sum."""
    value: typing.Any  # a tensor or `tf.IndexedSlices`
    shape: typing.Any  # of the sum
    name: str  # by which all workers find the accumulator
    device: str  # the server of the accumulator


def _summands(cluster: typing.Any, gradients: Pairs, shares: Shares) -> typing.List[_Summand]:
    """What this worker adds to the sum of each gradient: the gradient times the number of its
    examples, where these weigh, and before them that number; else times the constant weight.

    Args:
      cluster: the `Cluster`.
      gradients: this worker's `(gradient, variable)` pairs.
      shares: with the weight of this worker's gradients.
    """
    summands = []
    factor: typing.Any = shares.constant
    if shares.are_weighted:
        factor = shares.own_examples()
        summands.append(_Summand(factor, [], 'examples', _FIRST_SERVER))
    sizes = {variable.op.name: bytes_of(variable) for _, variable in gradients}
    tasks = tasks_by_size(sizes, len(cluster.ps))
    for gradient, variable in gradients:
        name = variable.op.name
        dtype = gradient.dtype.base_dtype
        if dtype in (tf.float16, tf.bfloat16):  # times examples may overflow; and no accumulator's
            dtype = tf.float32
        with only_device('/cpu:0'):
            weighted = times(cast(gradient, dtype), factor)
            if isinstance(weighted, tf.IndexedSlices):
                weighted = each_row_once(weighted)
        summands.append(_Summand(weighted, variable.get_shape(), 'sums/' + name,
                                 device_of_server(tasks[name])))
    return summands


def _sum(cluster: typing.Any, rounds: _Rounds, summand: _Summand,
         after: typing.List[tf.Tensor]) -> _Sum:
    """The `_Sum` of the summands of all workers.

    Args:
      cluster: the `Cluster`.
      rounds: this worker's count of the rounds.
      summand: what this worker adds to the sum.
      after: what it waits for.
    """
    is_sparse = isinstance(summand.value, tf.IndexedSlices)
    kind = tf.SparseConditionalAccumulator if is_sparse else tf.ConditionalAccumulator
    with only_device(summand.device):
        accumulator = kind(summand.value.dtype.base_dtype, summand.shape,
                           shared_name=_SCOPE + summand.name, reduction_type='SUM')
        add = accumulator.apply_indexed_slices_grad if is_sparse else accumulator.apply_grad
        own_round = rounds.own.read_value()
        with tf.control_dependencies(after):
            push = add(summand.value, local_step=own_round)
        with tf.control_dependencies([push]):
            total = without_gradient(_take(accumulator, cluster.num_workers), summand.value)
    return _Sum(accumulator, push, total)


def _as_sum(gradient: typing.Any, variable: tf.Variable) -> typing.Any:
    """A gradient of a variable with types and static shapes that are the same on the chief, where
    it is a server's sum, and elsewhere, where it is the worker's own. So all workers make the
    update, which they compare, of the same operations."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    indices = tf.cast(gradient.indices, tf.int64)
    shape = tf.cast(tf.shape(variable), tf.int64)
    indices.set_shape([None])
    gradient.values.set_shape(tf.TensorShape([None]).concatenate(variable.get_shape()[1:]))
    return tf.IndexedSlices(gradient.values, indices, tf.placeholder_with_default(shape, None))


def _take(accumulator: typing.Any, count: typing.Any) -> typing.Any:
    """The sum of `count` gradients, which leaves the accumulator."""
    if isinstance(accumulator, tf.SparseConditionalAccumulator):
        return accumulator.take_indexed_slices_grad(count)
    return accumulator.take_grad(count)


def _for_update(cluster: typing.Any, gradients: Pairs, shares: Shares, rounds: _Rounds,
                sums: typing.List[_Sum]) -> Exchanged:
    """The sums over all workers as the chief's gradients, and the conditions of its writes.

    Args:
      cluster: the `Cluster`.
      gradients: this worker's `(gradient, variable)` pairs.
      shares: with the weight of this worker's gradients.
      rounds: this worker's count of the rounds.
      sums: the sums of all workers' gradients; where gradients are weighted by their numbers of
        examples, the sum of these comes first.
    """
    totals = [each.total for each in sums]
    with only_device('/cpu:0'):  # one operation, which every write of the step waits for
        tensors = tensors_of([(total, None) for total in totals])
        all_gradients = tf.group(*tensors, name='all_gradients')
    if shares.are_weighted:
        num_examples = totals.pop(0)
        with only_device(_FIRST_SERVER):
            of_all = shares.of_all(num_examples)
            is_over = num_examples <= 0.
        totals = [times(total, of_all) for total in totals]
    # An accumulator adds up equal rows of two workers only where both send them in ascending order.
    with only_device('/cpu:0'):
        combined = []
        for total, (gradient, variable) in zip(totals, gradients):
            of_dtype = cast(total, gradient.dtype.base_dtype)
            combined.append((_as_sum(of_dtype, variable), variable))
        combined = rows_once(combined)
    if cluster.active is None:
        return Exchanged(combined, [all_gradients])
    # In every step the chief enqueues a token: minus the round at the end of all data, else 0.
    with tf.control_dependencies([all_gradients]), only_device('/cpu:0'):
        told = rounds.tell(-rounds.own.read_value() * tf.cast(is_over, tf.int64))
    with tf.control_dependencies([told]):
        ended = worker_step.raise_at_end(is_over)
    return Exchanged(worker_step.after(ended, combined), [ended])


def _configure(cluster: typing.Any, config: tf.ConfigProto) -> None:
    """Lets a worker's session see the servers and itself: a worker that is gone must not keep the
    others from making a session."""
    own_job = '/job:worker'
    if cluster.job == 'worker':
        own_job = '/job:worker/task:%d' % cluster.rank
    config.device_filters.extend(['/job:ps', own_job])


ENGINE = Engine(name='parameter servers', arguments=['ps', 'synchronous'],
                begin_step=begin_step, broadcast=None, configure=_configure)
