"""What a worker adds to a step: the weight of its losses, and what keeps a step from being made.

No step is made before the session has begun together with the sessions of all workers: in a plain
`tf.Session` each worker would train by itself, without a word. So a step reads a variable to which
only the hooks that begin a session give a value; TensorFlow's initializers leave it out.

No step is made when the data of all workers have ended: that step raises, and changes nothing.
Before that step, a worker whose own data have ended takes part in the steps, and gives no gradient.
"""

import functools
import re
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.arguments import check_instance
from towers.errors import ClusterError, InputError, TowersError, reason_of
from towers.gradients.gradient_pairs import map_values
from towers.placement.variable_device import only_device
from towers.whole_batch.workers import Workers

COLLECTIONS = ['towers_begun']  # of the variables that the hooks alone give a value to
HOW_TO_BEGIN = (
    'Make it by member.session(hooks), or, to save as well, by towers.training_session(directory, '
    '…, member=member) on the chief')

_BEGUN = 'session_begun'  # the name of the variable that a session's hooks give a value to
# In TensorFlow's error about a variable without a value: the variables that hooks give a value to.
_WITHOUT_VALUE = re.compile(r'\b(?:own_round|%s)\b' % _BEGUN)
_EMPTY = 'towers: no batch for until_all_end'  # in the error of an assertion
# In the error of an assertion of `split_batch`.
_TOO_FEW = re.compile(r'towers: (a batch for \d+ [\w-]+ needs at least \d+ examples and has)'
                      r'\]? \[?(\d+)')

_NO_GRADIENT = ("a gradient of the gradient over several machines would be of one machine's "
                "examples: put second derivatives into the model function's loss")


class Feed(typing.NamedTuple):
    """A worker's batches, see `until_all_end`.

    Attributes:
      inputs: the tensors of a batch, for `build_towers`.
      active: float32 scalar, 0 when this worker has no batch left, for
        `cluster._replace(active=…)`.
      initializer: the operation that begins the data; `tf.train.MonitoredSession` runs it itself.
    """

    inputs: typing.Any
    active: tf.Tensor
    initializer: tf.Operation


class SessionGuard(typing.NamedTuple):
    """Keeps steps from being made in a session that has not begun as sessions of a cluster do."""
    check: tf.Operation  # fails in a session until `begin` was called with it; steps wait for it
    begin: typing.Callable  # function of a session, which lets steps be made in it


def session_guard() -> SessionGuard:
    """Makes the operations of a `SessionGuard`: a variable, which a session does not initialize by
    itself, and its read."""
    with only_device('/cpu:0'):
        begun = tf.Variable(0., trainable=False, collections=COLLECTIONS, name=_BEGUN)
        check = tf.identity(begun.read_value()).op
        return SessionGuard(check, lambda session: session.run(begun.initializer))


def explained(error: Exception) -> typing.Optional[TowersError]:
    """The error in words where TensorFlow's `error` says that the session of a step has not begun,
    or that this worker has no data; None for any other error."""
    is_without_value = isinstance(error, tf.errors.FailedPreconditionError)
    if is_without_value and _WITHOUT_VALUE.search(reason_of(error)):
        return ClusterError(
            'a step was run in a session that has not begun as those of a cluster do, with the '
            'initial values of worker 0. A plain tf.Session does not. %s.' % HOW_TO_BEGIN)
    too_few = _TOO_FEW.search(str(error))
    if too_few is not None:
        return InputError('%s %s, on this worker: give each worker some in every step. One whose '
                          'data end early goes on by until_all_end(dataset).' % too_few.groups())
    if _EMPTY in str(error):
        return InputError(
            'the data set that this worker gave to until_all_end has no batch: expected one at '
            'least. Share out examples by dataset.shard(cluster.num_workers, cluster.rank).')
    return None


def raise_at_end(is_over: tf.Tensor) -> tf.Operation:
    """An operation that raises `tf.errors.OutOfRangeError` when a bool scalar is true: it asks an
    empty data set for an element then."""
    # In control flow v2, an operation that waits for the branch would wait for the condition alone.
    # In v1 it waits for the operations in the branch, which raise.
    # Sessions on one server share iterators of one name. The name scope makes a name that a program
    # does not have.
    with only_device('/cpu:0'), compat.control_flow_v1(), tf.name_scope('towers_no_data'):
        no_data = tf.data.make_one_shot_iterator(tf.data.Dataset.range(0))
        number = tf.cond(is_over, no_data.get_next, lambda: tf.constant(0, tf.int64))
        return tf.identity(number).op


def after(operation: tf.Operation, gradients: typing.Iterable) -> list:
    """The same `(gradient, variable)` pairs; each gradient waits for an operation."""
    with tf.control_dependencies([operation]):
        return [(map_values(tf.identity, gradient), variable) for gradient, variable in gradients]


def empty_at_end(gradients: typing.Iterable, active: tf.Tensor) -> list:
    """The gradients of a worker, without effect when its data have ended.

    The worker computes its first batch again then, with a weight of 0. That is not enough: momentum
    moves the rows that a sparse gradient has, whatever their values; and 0 times infinity is NaN,
    so that the sum over all workers would be NaN, too.

    Args:
      gradients: `(gradient, variable)` pairs.
      active: a scalar, 0 when the data of this worker have ended, else 1.

    Returns:
      The same pairs; where `active` is 0, dense gradients are zeros, and sparse gradients have no
      row.
    """
    with only_device('/cpu:0'):
        has_batch = active >= .5
        one_if_batch = tf.cast(has_batch, tf.int32)
    pairs = []
    for gradient, variable in gradients:
        values = getattr(gradient, 'values', gradient)
        with only_device(values.device or None), tf.name_scope('empty_at_end'):
            if isinstance(gradient, tf.IndexedSlices):
                num_rows = one_if_batch * tf.shape(gradient.indices)[0]
                gradient = tf.IndexedSlices(values[:num_rows], gradient.indices[:num_rows],
                                            gradient.dense_shape)
            else:
                gradient = tf.where_v2(has_batch, gradient, tf.zeros_like(gradient))
        pairs.append((gradient, variable))
    return pairs


def until_all_end(dataset: typing.Any) -> Feed:
    """Batches until the last worker's data ends; a worker without data does not hold up the rest.

        feed = towers.until_all_end(dataset.shard(cluster.num_workers, cluster.rank))
        cluster = cluster._replace(active=feed.active)
        built = towers.build_towers(model_fn, feed.inputs, optimizer, cluster=cluster)

    A worker whose data has ended computes its first batch again. Its gradients are zeros (sparse
    gradients have no row), and it leaves out its `UPDATE_OPS`. The step in which no worker has data
    raises `tf.errors.OutOfRangeError` on all workers, as the end of the data does, and changes
    nothing. But writes of the forward pass itself are made in both kinds of steps.

    Use it on all workers, or on none.

    Args:
      dataset: a `tf.data.Dataset` of this worker's batches, at least one.

    Raises:
      InputError: within `join`, in the first step: the dataset is empty.
    """
    check_instance('dataset', dataset, compat.DATASET_TYPES, 'a tf.data.Dataset')
    with tf.device('/cpu:0'):
        own_batches = dataset.map(functools.partial(_with_mark, 1.))
        first_again = dataset.take(1).cache().repeat().map(functools.partial(_with_mark, 0.))
        iterator = tf.data.make_initializable_iterator(own_batches.concatenate(first_again))
        # This goes on for ever, unless the data set is empty.
        batch = tf.data.experimental.get_next_as_optional(iterator)
        has_batch = tf.raw_ops.Assert(condition=batch.has_value(), data=[_EMPTY])
        with tf.control_dependencies([has_batch]):
            inputs, active = tf.nest.map_structure(
                tf.identity, batch.get_value(), expand_composites=True)
        # `tf.train.MonitoredSession` runs the operations of this collection when it begins.
        tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
    return Feed(inputs, active, iterator.initializer)


def _with_mark(active: float, *components: typing.Any) -> tuple:
    """A batch, as one value, and the mark `active`.

    Args:
      active: 1 for a batch of the data, 0 for the first batch again.
      *components: the batch: one nest, or several if it is a tuple, as `Dataset.map` gives it.
    """
    batch = components if len(components) > 1 else components[0]
    return batch, tf.constant(active, tf.float32)


class Weighting:
    """The factor of a worker's losses with which the workers' gradients add up to the gradient of
    all examples.

    It is n_w / n for the mean, W n_w / n for the sum, where worker w has n_w examples (0 when its
    data have ended), and all W workers have n. If all workers have to have the same number of
    examples, the factor is constant; else each step adds up n.

    Attributes:
      is_mean: whether the gradient is a mean over the examples.
      same_examples: n_w where all workers have to have the same number, an int; else None.
      is_constant: whether all workers have to have the same number of examples.
      constant: the factor if `is_constant`: 1 / W for the mean, 1 for the sum.
    """

    def __init__(self, cluster: typing.Any, examples: typing.Any, reduction: str):
        """
        Args:
          cluster: the `Cluster`.
          examples: the number of examples of this worker, an int or an int scalar tensor.
          reduction: `'mean'` or `'sum'`.
        """
        self._cluster = cluster
        self._examples = examples
        self.is_mean = reduction == 'mean'
        is_static = isinstance(examples, int)
        data_may_end = cluster.active is not None  # then examples are 0 from some step on
        # Other workers with another number are refused at the start, by the signature.
        self.is_constant = is_static and not cluster.uneven and not data_may_end
        self.same_examples: typing.Optional[int] = examples if self.is_constant else None
        self.constant = 1. / cluster.num_workers if self.is_mean else 1.

    def own_examples(self) -> tf.Tensor:
        """n_w in a step, a float64 scalar: 0 when the data of this worker have ended."""
        examples = tf.cast(self._examples, tf.float64)
        active = self._cluster.active  # 1, or 0 when the data have ended; None if it is always 1
        if active is not None:
            examples *= tf.cast(active, tf.float64)
        return examples

    def factor_of_one_example(self, num_examples: tf.Tensor) -> tf.Tensor:
        """The factor of a worker with one example: 1 / n for the mean, W / n for the sum. A float64
        scalar; `num_examples` is n. If n is 0 it counts as 1: there is no gradient then."""
        numerator = 1. if self.is_mean else float(self._cluster.num_workers)
        return numerator / tf.maximum(num_examples, 1.)

    def factor_in_step(self, num_examples: tf.Tensor) -> tf.Tensor:
        """The factor of this worker in a step, a float64 scalar; `num_examples` is n."""
        return self.own_examples() * self.factor_of_one_example(num_examples)

    def workers(self, loss_weight: typing.Any, add_up: typing.Callable) -> Workers:
        """The `Workers` with which this worker exchanges values of the forward pass.

        Args:
          loss_weight: the factor of this worker's losses in a step, a float or a float64 scalar.
          add_up: see `Workers`.
        """
        fraction = loss_weight
        if not self.is_mean:
            fraction = loss_weight / self._cluster.num_workers
        has_batch = None
        if self._cluster.active is not None:
            has_batch = self._cluster.active >= .5
        return Workers(num_workers=self._cluster.num_workers, rank=self._cluster.rank,
                       fraction=fraction, has_batch=has_batch, add_up=add_up)


def without_gradient(gradient: typing.Any, own: typing.Any = None) -> typing.Any:
    """The same gradient, which cannot be differentiated: TensorFlow raises a `LookupError`.

    Args:
      gradient: a gradient over all workers.
      own: this machine's summand of a gradient that comes out of a server's accumulator. From there
        no edge of the graph leads back to the variables: without `own`, whose edges do,
        TensorFlow would give None and not raise. None for other gradients.
    """
    def without(values: tf.Tensor) -> tf.Tensor:
        """The same values, which cannot be differentiated."""
        with only_device(values.device or None):
            if own is not None:
                own_values = getattr(own, 'values', own)  # of a sparse gradient its `values`
                values = tf.identity_n([values, own_values])[0]
            return tf.raw_ops.PreventGradient(input=values, message=_NO_GRADIENT)
    return map_values(without, gradient)
