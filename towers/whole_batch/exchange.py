"""The exchange of values of the whole batch: connects what the towers have marked.

`batch_values` has the formulas, and the marks. In each tower several operations may have the same
mark: a value may be recomputed, and its gradient be taken more than once.

Each kind of exchange is a class, made of the towers' values: `value` is what every tower gets, and
`gradients` computes each tower's gradient from the sum of all towers' gradients. With a cluster,
each exchange also adds up over the workers: the value takes one message (two if the numbers of rows
have to be exchanged first), and each gradient takes one.

Its tests are `tests/whole_batch/test_batch_values.py` and `tests/whole_batch/test_workers.py`.
"""

import collections
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import ModelFunctionError
from towers.placement.variable_device import only_device
from towers.shards.cut_batch import weighted, zero_if_empty
from towers.whole_batch.batch_values import Mark, is_batch_value, mark_of
from towers.whole_batch.workers import Workers

Marks = typing.Dict[Mark, typing.List[tf.Operation]]
"""{mark: the operations of one tower that have it, in the order of making}."""

OperationsByTower = typing.List[typing.List[tf.Operation]]
"""For each tower its operations with one mark, in the order of making."""


class _Batch(typing.NamedTuple):
    """How the examples of a step are shared out among the towers, and among the workers."""
    machine_weights: typing.Sequence  # of the towers: their parts of this machine's examples
    workers: typing.Optional[Workers]  # None: this machine has all examples

    @property
    def weights(self) -> typing.List[typing.Any]:
        """The weight of each tower of this machine: its part of all machines' examples."""
        if self.workers is None:
            return list(self.machine_weights)
        return [weight * self.workers.fraction for weight in self.machine_weights]

    def sum(self, total: tf.Tensor) -> tf.Tensor:
        """The sum over all machines, from the sum over this machine's towers."""
        return total if self.workers is None else self.workers.sum(total)


def exchange(towers: typing.Sequence, weights: typing.Sequence, device: str,
             workers: typing.Optional[Workers] = None) -> typing.List[tf.Tensor]:
    """Gives all marked operations their values, over all towers.

    Args:
      towers: the `Tower`s.
      weights: the towers' parts of this machine's examples.
      device: where the values are computed.
      workers: the workers whose towers take part; None for this worker alone.

    Returns:
      The exchanged values and gradients that every step computes. In a cluster a worker's step has
      to compute all of them before it ends, since the other workers wait for this worker's part.

    Raises:
      ModelFunctionError: towers ask for different values, or a tower has no rows to concatenate.
    """
    marks_of_towers = _marks_of(towers)
    _check_alike(towers, marks_of_towers)
    if not marks_of_towers[0]:
        return []
    batch = _Batch(weights, workers)
    exchanges: typing.Dict[int, _Exchange] = {}
    exchanged: typing.List[tf.Tensor] = []
    # Outside of the caller's control dependencies: a value is computed when a tower needs it.
    with tf.control_dependencies(None), tf.name_scope('batch_values'), only_device(device):
        # In the order of their numbers. Of two marks with one number, the mark of the value comes
        # before the mark of the gradient, which needs the exchange of the value.
        for mark in sorted(marks_of_towers[0]):
            operations_by_tower = [marks[mark] for marks in marks_of_towers]
            if mark.is_gradient:
                values = _put_gradients(operations_by_tower, exchanges[mark.number], batch)
            else:
                exchange_of_value = _exchange_of_kind(mark.kind, operations_by_tower, batch)
                exchanges[mark.number] = exchange_of_value
                values = [_put_value(operations_by_tower, exchange_of_value)]
            first_operation = operations_by_tower[0][0]
            # A step may leave out a branch, and the values in it. (Values in loops were refused.)
            is_in_branch = compat.in_control_flow(first_operation)
            if not is_in_branch:
                exchanged += values
    return exchanged


def _exchange_of_kind(kind: str, operations_by_tower: OperationsByTower,
                      batch: _Batch) -> '_Exchange':
    """Exchanges the values that the operations with one mark hand on so far: the towers' own."""
    # A tower has several such operations where the value is recomputed; all hand on one value.
    own_values = [operations[0].inputs[0] for operations in operations_by_tower]
    return _EXCHANGES[kind](own_values, batch)


def _put_value(operations_by_tower: OperationsByTower,
               exchange_of_value: '_Exchange') -> tf.Tensor:
    """Makes the operations of a mark hand on the value over all towers, which is returned."""
    value = exchange_of_value.value
    for operations in operations_by_tower:
        for op in operations:
            compat.replace_input(op, 0, value)
    return value


def _put_gradients(operations_by_tower: OperationsByTower, exchange_of_value: '_Exchange',
                   batch: _Batch) -> typing.List[tf.Tensor]:
    """Makes the operations of a mark of a gradient hand on the gradient of each tower's own value.

    What they take so far is each tower's gradient of the value over all towers: g_j on tower j,
    where `batch_sum` has given S = x_0 + x_1. In its place every tower gets dx_k = g_0 + g_1.

    Args:
      operations_by_tower: the operations.
      exchange_of_value: the exchange of the value whose gradient this is.
      batch: how the examples are shared out.

    Returns:
      The sums of the gradients over all towers; several, if the towers take the gradient several
      times.
    """
    sums = []
    for operations in zip(*operations_by_tower):  # all towers' first operations, then their second
        total = batch.sum(tf.add_n([op.inputs[0] for op in operations]))
        for op, gradient in zip(operations, exchange_of_value.gradients(total)):
            compat.replace_input(op, 0, gradient)
        sums.append(total)
    return sums


def _marks_of(towers: typing.Sequence) -> typing.List[Marks]:
    """The marks of each of the `Tower`s."""
    marks_of_towers: typing.List[Marks] = [collections.defaultdict(list) for _ in towers]
    for op in filter(is_batch_value, tf.get_default_graph().get_operations()):
        for tower, marks in zip(towers, marks_of_towers):
            if tower.has(op.name):
                marks[mark_of(op)].append(op)
    for marks in marks_of_towers:
        for operations in marks.values():
            operations.sort(key=_place_in_tower)
    return marks_of_towers


def _place_in_tower(op: tf.Operation) -> typing.Tuple[int, str]:
    """Key by which the operations of a mark are sorted into the order in which tower 0 made them.
    An import does not keep that order, but it keeps the names, which TensorFlow numbers:
    'batch_sum_9' was made before 'batch_sum_10', and is shorter."""
    return len(op.name), op.name


def _check_alike(towers: typing.Sequence, marks_of_towers: typing.Sequence[Marks]) -> None:
    """Raises `ModelFunctionError` where the `Tower`s do not all have the same marks, which happens
    if the model function is called once for each tower."""
    first = _num_operations(marks_of_towers[0])
    for tower, marks in zip(towers, marks_of_towers):
        if _num_operations(marks) != first:
            raise ModelFunctionError(
                'tower %d asks for other values of the whole batch than tower 0 (batch_sum, '
                'batch_mean, batch_concat): ask for the same ones in every call of the model '
                'function.' % tower.index)


def _num_operations(marks: Marks) -> typing.Dict[Mark, int]:
    """How many operations of a tower have each mark."""
    return {mark: len(operations) for mark, operations in marks.items()}


# ---- kinds of exchange ---------------------------------------------------------------------------

class _Exchange:
    """One value over all towers.

    A tower without examples has computed its own value from padding: its summand has to be made
    neutral, which for a sum is 0 (`zero_if_empty`).

    Attributes:
      value: what every tower gets.
    """
    value: tf.Tensor

    def __init__(self, values: typing.List[tf.Tensor], batch: _Batch):
        """Exchanges the values of this machine's towers."""
        raise NotImplementedError

    def gradients(self, total: tf.Tensor) -> typing.List[tf.Tensor]:
        """The gradient of the loss with respect to each tower's own value.

        Args:
          total: the sum over the towers of the gradients with respect to `value`.
        """
        raise NotImplementedError


class _Sum(_Exchange):
    """`batch_sum`."""

    def __init__(self, values: typing.List[tf.Tensor], batch: _Batch):
        self._weights = batch.weights
        # A tower without examples has computed its value from padding. (`machine_weights`, since
        # `batch.sum` leaves out a machine without a batch by itself.)
        own_sum = tf.add_n(list(map(zero_if_empty, values, batch.machine_weights)))
        self.value = batch.sum(own_sum)

    def gradients(self, total: tf.Tensor) -> typing.List[tf.Tensor]:
        return [zero_if_empty(total, weight) for weight in self._weights]


class _Mean(_Exchange):
    """`batch_mean`."""

    def __init__(self, values: typing.List[tf.Tensor], batch: _Batch):
        self._weights = batch.weights
        self.value = batch.sum(tf.add_n(list(map(weighted, values, self._weights))))

    def gradients(self, total: tf.Tensor) -> typing.List[tf.Tensor]:
        return [weighted(total, weight) for weight in self._weights]


class _RowRange(typing.NamedTuple):
    """Where this worker's rows are among the rows of all workers; ints, or int32 scalars."""
    begin: typing.Any  # how many rows the workers of lower rank have
    size: typing.Any  # how many rows this worker has; 0 when it has no batch
    total: typing.Any  # how many rows all workers have


class _Concat(_Exchange):
    """`batch_concat`."""

    def __init__(self, values: typing.List[tf.Tensor], batch: _Batch):
        self._num_rows = tf.stack([tf.shape(rows)[0] for rows in values])  # of each tower
        self._row_range: typing.Optional[_RowRange] = None  # set where there are other workers
        with tf.control_dependencies(_assertions_of_examples(batch.machine_weights)):
            rows = tf.concat(values, 0)
            if batch.workers is not None:
                row_range = _find_row_range(rows, batch.workers)
                self._row_range = row_range
                rows_handed_in = rows[:row_range.size]  # all, or none by a worker without a batch
                rows = batch.workers.concat(
                    rows_handed_in, num_before=row_range.begin, num_rows=row_range.total)
            # The marked operations take the rows of one tower so far, and will take all rows.
            self.value = _of_any_size(rows)

    def gradients(self, total: tf.Tensor) -> typing.List[tf.Tensor]:
        if self._row_range is not None:
            total = self._rows_of_this_worker(total, self._row_range)
        gradients_of_towers = tf.split(total, self._num_rows)
        return list(map(_of_any_size, gradients_of_towers))

    def _rows_of_this_worker(self, total: tf.Tensor, row_range: _RowRange) -> tf.Tensor:
        """The gradients of the rows that this worker's towers have computed, out of the gradients
        of all workers' rows."""
        gradients = total[row_range.begin:row_range.begin + row_range.size]
        # In a worker without a batch the towers have computed rows as well, say 8. But its
        # `row_range.size` is 0 and no row was handed in: the gradients of the 8 rows are zeros.
        num_not_handed_in = tf.reduce_sum(self._num_rows) - row_range.size
        other_axes = [[0, 0]] * (gradients.shape.ndims - 1)
        return tf.pad(gradients, [[0, num_not_handed_in]] + other_axes)


def _find_row_range(rows: tf.Tensor, workers: Workers) -> _RowRange:
    """Finds where this worker's `rows` are among the rows of all workers. This takes a message
    where the numbers of rows are not static, or may differ from worker to worker."""
    static_size = rows.shape.as_list()[0]
    if static_size is not None and workers.have_equal_batches:
        return _RowRange(begin=static_size * workers.rank, size=static_size,
                         total=static_size * workers.num_workers)
    size = tf.shape(rows)[0]
    if workers.has_batch is not None:
        size *= tf.cast(workers.has_batch, tf.int32)
    # The sum of vectors in which each worker has filled in the number of its own rows.
    sizes = workers.sum(tf.one_hot(workers.rank, workers.num_workers, size, 0))
    return _RowRange(begin=tf.reduce_sum(sizes[:workers.rank]), size=size,
                     total=tf.reduce_sum(sizes))


class _Moments(_Exchange):
    """`batch_moments`: one vector of the means, variances and number of a batch norm."""

    def __init__(self, values: typing.List[tf.Tensor], batch: _Batch):
        # A tower without examples has zeros in the place of its vector, and so a count of 0, which
        # is its weight in `joined`.
        vectors = tf.stack(list(map(zero_if_empty, values, batch.machine_weights)))
        self._moments_of_towers = _ChannelMoments.of(vectors)
        joined = self._moments_of_towers.joined()
        if batch.workers is not None:
            # Each worker has one row: the moments of all of its towers.
            vectors_of_workers = batch.workers.concat(
                joined.vectors(), num_before=batch.workers.rank,
                num_rows=batch.workers.num_workers)
            joined = _ChannelMoments.of(vectors_of_workers).joined()
        self._moments_of_batch = joined
        self.value = joined.vectors()[0]

    def gradients(self, total: tf.Tensor) -> typing.List[tf.Tensor]:
        # The formulas of dm_k and dv_k are in the docstring of `batch_values`. `total` is laid out
        # as the value is, so that its parts are the sums of gm_j and of gv_j.
        total_gradients = _ChannelMoments.of(total[tf.newaxis])
        moments = self._moments_of_towers
        weight = moments.count / self._moments_of_batch.count  # p_k
        distance = moments.mean - self._moments_of_batch.mean  # m_k - M
        gradient_of_variance = weight * total_gradients.variance
        gradient_of_mean = weight * (
            total_gradients.mean + 2. * distance * total_gradients.variance)
        gradients = _ChannelMoments(
            mean=gradient_of_mean, variance=gradient_of_variance,
            count=tf.zeros_like(moments.count))  # a count is computed from shapes alone
        return tf.unstack(gradients.vectors())


class _ChannelMoments(typing.NamedTuple):
    """Means and variances over N groups of examples, and how many numbers each of them is over."""
    mean: tf.Tensor  # [N, C]
    variance: tf.Tensor  # [N, C]
    count: tf.Tensor  # [N, 1]

    @classmethod
    def of(cls, vectors: tf.Tensor) -> '_ChannelMoments':
        """From `[mean; variance; count]` of each group, [N, 2 C + 1]."""
        length: typing.Any = vectors.shape.as_list()[1]
        if length is None:
            length = tf.shape(vectors)[1]
        num_channels = (length - 1) // 2
        return cls(*tf.split(vectors, [num_channels, num_channels, 1], 1))

    def vectors(self) -> tf.Tensor:
        """`[mean; variance; count]` of each group, [N, 2 C + 1]."""
        return tf.concat(self, 1)

    def joined(self) -> '_ChannelMoments':
        """The moments over the examples of all groups, with N = 1. At least one group must have
        examples."""
        count = tf.reduce_sum(self.count, 0, keepdims=True)
        weight = self.count / count
        mean = tf.reduce_sum(weight * self.mean, 0, keepdims=True)
        squared_distances = self.variance + tf.squared_difference(self.mean, mean)
        variance = tf.reduce_sum(weight * squared_distances, 0, keepdims=True)
        return _ChannelMoments(mean, variance, count)


_EXCHANGES = {'sum': _Sum, 'mean': _Mean, 'concat': _Concat, 'moments': _Moments}


def _of_any_size(rows: tf.Tensor) -> tf.Tensor:
    """The same rows, but without a static number of rows: as an input of an operation, they can
    take the place of any other number of rows."""
    return tf.placeholder_with_default(rows, tf.TensorShape([None]).concatenate(rows.shape[1:]))


def _assertions_of_examples(weights: typing.Sequence) -> typing.List[tf.Operation]:
    """Assertions that all towers have examples, for weights that only a step knows. Raises
    `ModelFunctionError` for a tower that never has an example."""
    assertions = []
    for weight in weights:
        if isinstance(weight, tf.Tensor):
            assertions.append(tf.Assert(weight > 0., [
                'towers: batch_concat needs an example for each tower']))
        elif not weight:
            raise ModelFunctionError('batch_concat, and the batch has fewer examples than there '
                                     'are towers: pass a larger batch, or fewer devices.')
    return assertions
