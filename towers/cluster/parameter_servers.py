"""Synchronous and asynchronous training on TensorFlow's parameter servers.

Synchronous training: each worker adds its gradient to TensorFlow's accumulators on the servers. The
chief takes the sums when all gradients have come, makes the one update, and gives every other
worker a token, for which it waits before its step ends. Other than in `SyncReplicasOptimizer`, a
worker adds exactly one gradient a step, and gradients are clipped once, over all workers.

A *round* is a step of all workers. Its number grows with the time, so that gradients and tokens
that an earlier run has left on the servers have lower numbers, and are dropped. A *token* is the
number of the round that the chief has ended. It has a minus sign where the data of all workers have
ended, such as -7 in the round 7.
"""

import functools
import time
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.cluster import worker_step
from towers.cluster.engine import Engine, EngineGradients, EngineStep, Pairs
from towers.cluster.server_placement import device_of_server, tasks_by_size
from towers.cluster.worker_step import COLLECTIONS, Weighting, without_gradient
from towers.gradients.gradient_pairs import cast, each_row_once, rows_once, tensors_of, times
from towers.graph.graph_walk import bytes_of
from towers.placement.variable_device import only_device

_FIRST_SERVER = device_of_server(0)

_SCOPE = 'served/'
"""A name scope at the root of the graph. Workers find accumulators and queues by their names, and
the name scopes around a build may differ."""


class _Sum(typing.NamedTuple):
    """The sum over the workers of one gradient, or of the numbers of their examples."""
    accumulator: typing.Any  # adds up on a server
    push: tf.Operation  # adds this worker's summand
    total: typing.Any  # takes the sum out of the accumulator; the chief alone runs it


class _Sums(typing.NamedTuple):
    """What the workers add up in a step."""
    gradients: typing.List[_Sum]
    examples: typing.Optional[_Sum]  # None where all workers have the same number of examples

    def listed(self) -> typing.List[_Sum]:
        """All sums."""
        return self.gradients if self.examples is None else [self.examples] + self.gradients


def begin_step(cluster: typing.Any, weighting: Weighting) -> EngineStep:
    """Begins a step of the workers on servers. The losses get no weight.

    Instead each worker's gradients are multiplied by its number of examples, and the sum of the
    gradients is divided by the number of all examples. So no worker waits for the others' numbers
    of examples before it has its losses.

    Args:
      cluster: the `Cluster`.
      weighting: how this worker's gradients are weighted.
    """
    return EngineStep(functools.partial(_combine, cluster, weighting))


def _combine(cluster: typing.Any, weighting: Weighting, gradients: Pairs,
             loss: typing.Optional[tf.Tensor], values: typing.Sequence[tf.Tensor]
             ) -> EngineGradients:
    """Adds up the gradients in the accumulators on the servers; see `StepOfWorkers.combine`.

    The chief gets the gradients over all machines, for the one update. Every other worker gets its
    own gradients back. From these it makes the operations of an update, too, but never runs them:
    they are made so that the updates of the workers' programs can be compared.

    Args:
      cluster: the `Cluster`.
      weighting: how this worker's gradients are weighted.
      gradients: this worker's `(gradient, variable)` pairs.
      loss: the loss of this worker's batch, or None.
      values: none, since workers on servers exchange no values.
    """
    del values
    # The chief writes the variables as soon as all gradients are there. So another worker sends its
    # gradients when it has its loss: else it could still have to read variables for the loss then.
    awaited = []
    if loss is not None and not cluster.is_chief:
        awaited = [loss]
    with tf.name_scope(_SCOPE):
        rounds = _Rounds(cluster)
        sums = _sums(cluster, weighting, gradients, rounds, awaited)
        if cluster.is_chief:
            result = _gradients_of_chief(cluster, gradients, weighting, rounds, sums)
            begin_session = rounds.beginning([each.accumulator for each in sums.listed()])
        else:
            # Made by the same operations as the chief's gradients of the update, in `_combined`.
            like_sums = [(_as_sum(gradient, variable), variable)
                         for gradient, variable in gradients]
            result = EngineGradients(rows_once(like_sums), conditions=[])
            begin_session = rounds.begin_after_chief
        pushes = [each.push for each in sums.listed()]
        return result._replace(
            begin_session=begin_session,
            operation_of_step=functools.partial(_end_of_step, cluster, rounds, pushes))


def _end_of_step(cluster: typing.Any, rounds: '_Rounds', pushes: typing.List[tf.Operation],
                 update: tf.Operation) -> tf.Operation:
    """The operation that ends a step of this worker.

    The chief's operation makes the update, and sends the number of the round to all others as a
    token. The operation of another worker waits for that token. With `Cluster(active=…)` a token
    below 0 says that the data of all workers have ended, and the operation raises.

    Args:
      cluster: the `Cluster`.
      rounds: this worker's count of the rounds.
      pushes: the operations that add this worker's summands.
      update: the operation of the update.
    """
    with tf.name_scope(_SCOPE), only_device('/cpu:0'):
        if cluster.is_chief:
            with tf.control_dependencies([update] + pushes):
                tokens_sent = rounds.send_tokens(rounds.own.read_value())
            with tf.control_dependencies([tokens_sent]):
                return tf.assign_add(rounds.own, 1).op
        token, next_round = rounds.receive_token(pushes)
        data_may_end = cluster.active is not None
        if not data_may_end:
            return next_round.op
        with tf.control_dependencies([next_round]):
            return worker_step.raise_at_end(token < 0)


# ---- rounds --------------------------------------------------------------------------------------

class _Rounds:
    """The number of the round, and the queues in which the chief sends it to the other workers.

    The chief puts the number of the first round on the first server. Every other worker takes the
    number up from there when its session begins. Then each worker counts by itself.

    Attributes:
      own: the variable with the number of this worker's round.
    """

    def __init__(self, cluster: typing.Any):
        """Makes the variables and the queues of a `Cluster`."""
        self._rank = cluster.rank
        # These variables are in no collection of TensorFlow's, so that no session initializes them,
        # and no checkpoint has them.
        with only_device(_FIRST_SERVER):
            self._shared = tf.Variable(tf.zeros([], tf.int64), trainable=False, use_resource=True,
                                       collections=['towers_rounds'], name='round')
            self._queues = {}  # {rank of a worker but the chief: the queue of its tokens}
            for rank in range(1, cluster.num_workers):
                name = 'tokens_%d' % rank
                self._queues[rank] = tf.FIFOQueue(-1, tf.int64, [[]], name=name,
                                                  shared_name=_SCOPE + name)
        with only_device('/cpu:0'):
            self.own = tf.Variable(
                tf.zeros([], tf.int64), trainable=False, use_resource=True, name='own_round',
                collections=COLLECTIONS)
            self._take_up = tf.assign(self.own, self._shared.read_value()).op

    def begin_after_chief(self, session: tf.Session) -> None:
        """Begins the rounds of a worker other than the chief, when the chief has begun its own:
        takes up the number of the first round from the server."""
        session.run(self._take_up)

    def beginning(self, accumulators: typing.List[typing.Any]) -> typing.Callable:
        """Makes the operations by which the chief begins its rounds, before the others do. The
        operations also drop the gradients that another run has left in the accumulators.

        Returns:
          A function of a session, which runs the operations.
        """
        with only_device(_FIRST_SERVER):
            first_round = tf.placeholder(tf.int64, [])
            num_dropped = tf.placeholder(tf.int32, [])
            # An accumulator drops a gradient whose `local_step` is lower than its global step.
            refuse_older = tf.group(*[accumulator.set_global_step(first_round)
                                      for accumulator in accumulators])
            counts = [accumulator.num_accumulated() for accumulator in accumulators]
            dropped = [_take(accumulator, num_dropped) for accumulator in accumulators]
        # `/cpu:0` names no job. `spread_over_servers` puts each assignment where its variable is:
        # `_shared` is on the first server, `own` on this worker.
        with only_device('/cpu:0'):
            set_round = tf.group(tf.assign(self._shared, first_round),
                                 tf.assign(self.own, first_round))
        beginning = _Beginning(first_round=first_round, refuse_older=refuse_older, counts=counts,
                               num_dropped=num_dropped, dropped=dropped, set_round=set_round)
        return beginning.run

    def send_tokens(self, token: tf.Tensor) -> tf.Operation:
        """The operation by which the chief gives each other worker a token."""
        with only_device(_FIRST_SERVER):
            return tf.group(*[queue.enqueue([token]) for _, queue in sorted(self._queues.items())])

    def receive_token(self, pushes: typing.List[tf.Operation]
                      ) -> typing.Tuple[tf.Tensor, tf.Tensor]:
        """Waits for the token of this round, when this worker has added its summands.

        Args:
          pushes: the operations that add this worker's summands.

        Returns:
          `(the token, the number of the next round)`.
        """
        queue = self._queues[self._rank]
        with tf.control_dependencies(pushes):
            own = self.own.read_value()
        # Takes tokens until one has the number of this round: lower numbers are left from another
        # run, and a 0 comes in each step where data may end (`_raise_when_all_ended`). A token with
        # a minus sign ends the training: its absolute value is the round.
        with compat.control_flow_v1():  # a loop of control flow v2 cannot take a queue
            token = tf.while_loop(lambda token: tf.abs(token) < own,
                                  lambda token: queue.dequeue(), [tf.zeros([], tf.int64)])
        with tf.control_dependencies([token]):
            return token, tf.assign_add(self.own, 1)


class _Beginning(typing.NamedTuple):
    """The operations by which the chief begins its rounds in a session."""
    first_round: tf.Tensor  # a placeholder of the number of the first round
    refuse_older: tf.Operation
    """Gives the accumulators the number of the first round: they drop gradients of lower rounds."""
    counts: typing.List[tf.Tensor]  # how many gradients each accumulator holds
    num_dropped: tf.Tensor  # a placeholder of the number of gradients to drop
    dropped: typing.List[typing.Any]  # for each accumulator, takes that many gradients out of it
    set_round: tf.Operation  # gives the server and this worker the number of the first round

    def run(self, session: tf.Session) -> None:
        """Begins the rounds.

        First the accumulators get the number of the first round, so that no accumulator takes
        another old gradient. Then the old gradients are taken out, which raises an accumulator's
        number by 1. So the accumulators get the number of the first round again. Only then that
        number goes to the server, where the other workers find it.

        The number is the time in microseconds, which is above the number of any round of an earlier
        run.
        """
        feed = {self.first_round: int(time.time() * 1e6)}
        session.run(self.refuse_older, feed)
        for dropped, count in zip(self.dropped, session.run(self.counts)):
            if count:
                fetch = getattr(dropped, 'indices', dropped)  # one tensor of a sparse gradient
                session.run(fetch, {self.num_dropped: count})
        session.run([self.refuse_older, self.set_round], feed)


# ---- sums ----------------------------------------------------------------------------------------

class _Summand(typing.NamedTuple):
    """What a worker adds to a sum."""
    value: typing.Any  # a tensor or `tf.IndexedSlices`
    shape: typing.Any  # of the sum
    name: str  # by which all workers find the accumulator
    device: str  # the server of the accumulator


def _sums(cluster: typing.Any, weighting: Weighting, gradients: Pairs, rounds: _Rounds,
          awaited: typing.List[tf.Tensor]) -> _Sums:
    """Makes the sums of a step.

    Args:
      cluster: the `Cluster`.
      weighting: how this worker's gradients are weighted.
      gradients: this worker's `(gradient, variable)` pairs.
      rounds: this worker's count of the rounds.
      awaited: what this worker's summands wait for.
    """
    if weighting.is_constant:
        factor: typing.Any = weighting.constant
        sum_of_examples = None
    else:  # the chief divides by the sum of the examples
        factor = weighting.own_examples()
        summand_of_examples = _Summand(value=factor, shape=[], name='examples',
                                       device=_FIRST_SERVER)
        sum_of_examples = _sum(cluster, rounds, summand_of_examples, awaited)
    summands = _summands(cluster, gradients, factor)
    sums = [_sum(cluster, rounds, summand, awaited) for summand in summands]
    return _Sums(gradients=sums, examples=sum_of_examples)


def _summands(cluster: typing.Any, gradients: Pairs, factor: typing.Any
              ) -> typing.List[_Summand]:
    """What this worker adds to the sum of each gradient: the gradient times a factor.

    Args:
      cluster: the `Cluster`.
      gradients: this worker's `(gradient, variable)` pairs.
      factor: a float or a float64 scalar.
    """
    summands = []
    sizes = {variable.op.name: bytes_of(variable) for _, variable in gradients}
    tasks = tasks_by_size(sizes, len(cluster.ps))
    for gradient, variable in gradients:
        name = variable.op.name
        dtype = gradient.dtype.base_dtype
        # A number of 16 bits times the number of examples may overflow; and accumulators do not
        # take all of these types.
        if dtype in (tf.float16, tf.bfloat16):
            dtype = tf.float32
        with only_device('/cpu:0'):
            weighted = times(cast(gradient, dtype), factor)
            # An accumulator adds up the rows of one index over the workers. If one worker sent
            # several rows of one index, the accumulator would give the chief each of these rows.
            if isinstance(weighted, tf.IndexedSlices):
                weighted = each_row_once(weighted)
        summands.append(_Summand(value=weighted, shape=variable.get_shape(), name='sums/' + name,
                                 device=device_of_server(tasks[name])))
    return summands


def _sum(cluster: typing.Any, rounds: _Rounds, summand: _Summand,
         awaited: typing.List[tf.Tensor]) -> _Sum:
    """The sum of one summand of each worker.

    Args:
      cluster: the `Cluster`.
      rounds: this worker's count of the rounds.
      summand: what this worker adds to the sum.
      awaited: what the summand waits for.
    """
    is_sparse = isinstance(summand.value, tf.IndexedSlices)
    accumulator_type = tf.ConditionalAccumulator
    if is_sparse:
        accumulator_type = tf.SparseConditionalAccumulator
    with only_device(summand.device):
        accumulator = accumulator_type(
            summand.value.dtype.base_dtype, summand.shape, shared_name=_SCOPE + summand.name,
            reduction_type='SUM')
        add = accumulator.apply_indexed_slices_grad if is_sparse else accumulator.apply_grad
        own_round = rounds.own.read_value()
        with tf.control_dependencies(awaited):
            # The accumulator drops the summand if its round is lower than the chief's first one.
            push = add(summand.value, local_step=own_round)
        with tf.control_dependencies([push]):
            total = _take(accumulator, cluster.num_workers)
            # `own`: the accumulator has no edge back to this worker's gradients. Without `own`, a
            # gradient of the total would be None, and raise no error, see `without_gradient`.
            total = without_gradient(total, own=summand.value)
    return _Sum(accumulator, push, total)


def _as_sum(gradient: typing.Any, variable: tf.Variable) -> typing.Any:
    """A gradient of a variable with the types and static shapes that a server's sum has.

    The chief makes its update of servers' sums, and another worker builds the same update of its
    own gradients. So that both have the same operations, both go through this function.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    indices = tf.cast(gradient.indices, tf.int64)
    indices.set_shape([None])
    shape_of_values = tf.TensorShape([None]).concatenate(variable.get_shape()[1:])
    gradient.values.set_shape(shape_of_values)
    dense_shape = tf.cast(tf.shape(variable), tf.int64)
    # A server's sum has a dense shape that nothing is known of before a step.
    dense_shape = tf.placeholder_with_default(dense_shape, None)
    return tf.IndexedSlices(gradient.values, indices, dense_shape)


def _take(accumulator: typing.Any, count: typing.Any) -> typing.Any:
    """Takes the sum of `count` gradients out of an accumulator; waits until they are there."""
    if isinstance(accumulator, tf.SparseConditionalAccumulator):
        return accumulator.take_indexed_slices_grad(count)
    return accumulator.take_grad(count)


def _gradients_of_chief(cluster: typing.Any, gradients: Pairs, weighting: Weighting,
                        rounds: _Rounds, sums: _Sums) -> EngineGradients:
    """The sums over all workers as the chief's gradients, and what its writes have to wait for:
    that all workers' gradients are there; with `Cluster(active=…)` also that the data go on.

    Args:
      cluster: the `Cluster`.
      gradients: this worker's `(gradient, variable)` pairs.
      weighting: how this worker's gradients are weighted.
      rounds: this worker's count of the rounds.
      sums: what the workers add up.
    """
    with only_device('/cpu:0'):  # one operation, which every write of the step waits for
        tensors = tensors_of([(each.total, None) for each in sums.listed()])
        all_gradients = tf.group(*tensors, name='all_gradients')
    combined = _combined(gradients, weighting, sums)
    data_may_end = cluster.active is not None
    if not data_may_end:
        return EngineGradients(combined, conditions=[all_gradients])
    num_examples = sums.examples.total  # type: ignore[union-attr]  # data that may end are counted
    ended = _raise_when_all_ended(rounds, all_gradients, num_examples)
    return EngineGradients(worker_step.after(ended, combined), conditions=[ended])


def _combined(gradients: Pairs, weighting: Weighting, sums: _Sums) -> Pairs:
    """The gradients over all workers, in the types of this worker's gradients.

    Args:
      gradients: this worker's `(gradient, variable)` pairs.
      weighting: how this worker's gradients are weighted.
      sums: what the workers add up.
    """
    totals = [each.total for each in sums.gradients]
    if sums.examples is not None:  # each worker has multiplied its gradients by its examples
        with only_device(_FIRST_SERVER):
            factor = weighting.factor_of_one_example(sums.examples.total)
        totals = [times(total, factor) for total in totals]
    with only_device('/cpu:0'):
        combined = []
        for total, (gradient, variable) in zip(totals, gradients):
            total = cast(total, gradient.dtype.base_dtype)
            combined.append((_as_sum(total, variable), variable))
        # An accumulator adds up the rows of one index only where all workers send their rows in
        # ascending order.
        return rows_once(combined)


def _raise_when_all_ended(rounds: _Rounds, all_gradients: tf.Operation,
                          num_examples: tf.Tensor) -> tf.Operation:
    """The operation that ends the chief's training in a step in which no worker has an example.
    Before that, it sends the others a token below 0, by which they end, too.

    Args:
      rounds: this worker's count of the rounds.
      all_gradients: the operation that waits for the gradients of all workers.
      num_examples: the examples of all workers in the step, a scalar.
    """
    with only_device(_FIRST_SERVER):
        is_over = num_examples <= 0.
    # This token is sent in every step. In the last step it is minus the number of the round; in any
    # other step it is 0, which a worker passes over.
    with tf.control_dependencies([all_gradients]), only_device('/cpu:0'):
        token = -rounds.own.read_value() * tf.cast(is_over, tf.int64)
        token_sent = rounds.send_tokens(token)
    with tf.control_dependencies([token_sent]):
        return worker_step.raise_at_end(is_over)


def _configure(cluster: typing.Any, config: tf.ConfigProto) -> None:
    """Lets a worker's session see the servers and itself: a worker that is gone must not keep the
    others from making a session."""
    own_job = '/job:worker'
    if cluster.job == 'worker':
        own_job = '/job:worker/task:%d' % cluster.rank
    config.device_filters.extend(['/job:ps', own_job])


ENGINE = Engine(name='parameter servers', arguments=['ps', 'synchronous'],
                begin_step=begin_step, broadcast=None, configure=_configure)
