"""The exchange of values of the whole batch: connects what the towers have marked.

The formulas stand in `batch_values`. A mark has a number, which the call of `batch_sum` and its
like has in the model function, and a role: the kind of exchange for the value, and the same with
`'_gradient'` for its gradient. In each tower there may be several marks alike: a gradient may be
taken more than once, and a value recomputed.

Each kind of exchange is a class, made of the towers' values: `value` is what every tower gets, and
`gradients` gives each tower its own from the sum of all towers'. With a cluster, each adds up over
the workers, too: values in one message (rows of unknown numbers in two), gradients in one.

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


class _Batch(typing.NamedTuple):
    """The parts of the batch whose values are exchanged."""
    weights: typing.Sequence  # the towers' parts of this machine's examples
    workers: typing.Optional[Workers]  # None: this machine has all examples

    @property
    def parts(self) -> typing.List[typing.Any]:
        """The towers' parts of all examples."""
        if self.workers is None:
            return list(self.weights)
        return [weight * self.workers.fraction for weight in self.weights]

    def sum(self, total: tf.Tensor) -> tf.Tensor:
        """The sum over all machines, from that over this machine's towers."""
        return total if self.workers is None else self.workers.sum(total)


def exchange(towers: typing.Sequence, weights: typing.Sequence, device: str,
             workers: typing.Optional[Workers] = None) -> typing.List[tf.Tensor]:
    """Gives all marked operations their values, over all towers.

    Args:
      towers: the `Tower`s.
      weights: the towers' parts of this machine's examples.
      device: where the values are computed.
      workers: the workers whose towers take part; None for this one alone.

    Returns:
      The exchanged values and gradients, but for those of branches, which a step may leave out.

    Raises:
      ModelFunctionError: towers ask for different values, or a tower has no rows to concatenate.
    """
    marks_of_towers = _marks_of(towers)
    _check_alike(towers, marks_of_towers)
    if not marks_of_towers[0]:
        return []
    batch = _Batch(weights, workers)
    exchanges: typing.Dict[int, typing.Any] = {}
    exchanged: typing.List[tf.Tensor] = []
    with tf.control_dependencies(None), tf.name_scope('batch_values'), only_device(device):
        for mark in sorted(marks_of_towers[0]):  # 'sum' comes before 'sum_gradient'
            operations = [marks[mark] for marks in marks_of_towers]
            if mark.role in _EXCHANGES:
                own_values = [alike[0].inputs[0] for alike in operations]
                exchanges[mark.number] = _EXCHANGES[mark.role](own_values, batch)
                value = exchanges[mark.number].value
                for op in sum(operations, []):  # what is recomputed is the same
                    compat.replace_input(op, 0, value)
                values = [value]
            else:
                values = _put_gradients(operations, exchanges[mark.number], batch)
            if not compat.in_control_flow(operations[0][0]):
                exchanged += values
    return exchanged


def _put_gradients(operations: typing.List[typing.List[tf.Operation]],
                   exchange_of_value: typing.Any, batch: _Batch) -> typing.List[tf.Tensor]:
    """Gives the operations of one mark of a gradient, a list for each tower, their values, and
    returns the sums that these are taken from."""
    values = []
    for alike in zip(*operations):
        total = batch.sum(tf.add_n([op.inputs[0] for op in alike]))
        for op, value in zip(alike, exchange_of_value.gradients(total)):
            compat.replace_input(op, 0, value)
        values.append(total)
    return values


def _marks_of(towers: typing.Sequence) -> typing.List[Marks]:
    """The marks of each of the `Tower`s."""
    marks_of_towers: typing.List[Marks] = [collections.defaultdict(list) for _ in towers]
    for op in filter(is_batch_value, tf.get_default_graph().get_operations()):
        for tower, marks in zip(towers, marks_of_towers):
            if tower.has(op.name):
                marks[mark_of(op)].append(op)
    for marks in marks_of_towers:
        for operations in marks.values():  # an import changes the order of operations
            operations.sort(key=lambda op: (len(op.name), op.name))
    return marks_of_towers


def _check_alike(towers: typing.Sequence, marks_of_towers: typing.Sequence[Marks]) -> None:
    """Raises `ModelFunctionError` where the `Tower`s do not all have the same marks."""
    first = {mark: len(operations) for mark, operations in marks_of_towers[0].items()}
    for tower, marks in zip(towers, marks_of_towers):
        if {mark: len(operations) for mark, operations in marks.items()} != first:
            raise ModelFunctionError(
                'tower %d asks for other values of the whole batch than tower 0 (batch_sum, '
                'batch_mean, batch_concat): ask for the same ones in every call of the model '
                'function.' % tower.index)


class _Sum:
    """`batch_sum`."""

    def __init__(self, values: typing.List[tf.Tensor], batch: _Batch):
        self._parts = batch.parts
        self.value = batch.sum(tf.add_n(list(map(zero_if_empty, values, batch.weights))))

    def gradients(self, total: tf.Tensor) -> typing.List[tf.Tensor]:
        """Each tower's gradient, from the sum of all."""
        return [zero_if_empty(total, part) for part in self._parts]


class _Mean:
    """`batch_mean`."""

    def __init__(self, values: typing.List[tf.Tensor], batch: _Batch):
        self._parts = batch.parts
        self.value = batch.sum(tf.add_n(list(map(weighted, values, batch.parts))))

    def gradients(self, total: tf.Tensor) -> typing.List[tf.Tensor]:
        """Each tower's gradient, from the sum of all."""
        return [weighted(total, part) for part in self._parts]


class _Concat:
    """`batch_concat`. The rows of a machine that has no batch are none of the batch's."""

    def __init__(self, values: typing.List[tf.Tensor], batch: _Batch):
        self._num_rows = tf.stack([tf.shape(rows)[0] for rows in values])
        self._workers = batch.workers
        with tf.control_dependencies(_assertions_of_examples(batch.weights)):
            rows = tf.concat(values, 0)
            if batch.workers is not None:
                rows = self._of_all_workers(rows, batch.workers)
            self.value = _of_any_size(rows)

    def _of_all_workers(self, rows: tf.Tensor, workers: Workers) -> tf.Tensor:
        """The rows of all workers, from those of this one."""
        static_size = rows.shape.as_list()[0]
        if static_size is not None and isinstance(workers.fraction, float):  # all have as many
            self._size = static_size
            self._begin = static_size * workers.rank
            return workers.concat(rows, self._begin, static_size * workers.num_workers)
        self._size = tf.shape(rows)[0]
        if workers.has_batch is not None:
            self._size *= tf.cast(workers.has_batch, tf.int32)
        sizes = workers.sum(tf.one_hot(workers.rank, workers.num_workers, self._size, 0))
        self._begin = tf.reduce_sum(sizes[:workers.rank])
        return workers.concat(rows[:self._size], self._begin, tf.reduce_sum(sizes))

    def gradients(self, total: tf.Tensor) -> typing.List[tf.Tensor]:
        """Each tower's gradient, from the sum of all."""
        if self._workers is not None:
            total = total[self._begin:self._begin + self._size]
            missing = [[0, tf.reduce_sum(self._num_rows) - self._size]]  # where there is no batch
            total = tf.pad(total, missing + [[0, 0]] * (total.shape.ndims - 1))
        return list(map(_of_any_size, tf.split(total, self._num_rows)))


class _Moments:
    """`batch_moments`: one vector of the means, variances and number of a batch norm."""

    def __init__(self, values: typing.List[tf.Tensor], batch: _Batch):
        vectors = tf.stack(list(map(zero_if_empty, values, batch.weights)))
        self._of_towers = _ChannelMoments.of(vectors)
        self._joined = self._of_towers.joined()
        if batch.workers is not None:
            of_workers = batch.workers.concat(
                self._joined.vectors(), batch.workers.rank, batch.workers.num_workers)
            self._joined = _ChannelMoments.of(of_workers).joined()
        self.value = self._joined.vectors()[0]

    def gradients(self, total: tf.Tensor) -> typing.List[tf.Tensor]:
        """Each tower's gradient, from the sum of all."""
        of_batch = _ChannelMoments.of(total[tf.newaxis])
        moments = self._of_towers
        part = moments.count / self._joined.count
        distance = moments.mean - self._joined.mean
        gradients = _ChannelMoments(part * (of_batch.mean + 2. * distance * of_batch.variance),
                                    part * of_batch.variance, tf.zeros_like(moments.count))
        return tf.unstack(gradients.vectors())


class _ChannelMoments(typing.NamedTuple):
    """Means and variances over N groups of examples, and how many numbers each of them is over."""
    mean: tf.Tensor  # [N, C]
    variance: tf.Tensor  # [N, C]
    count: tf.Tensor  # [N, 1]

    @classmethod
    def of(cls, vectors: tf.Tensor) -> '_ChannelMoments':
        """From `[mean; variance; count]` of each group, [N, 2 C + 1]."""
        size = vectors.shape.as_list()[1]
        num_channels: typing.Any = (tf.shape(vectors)[1] - 1) // 2
        if size is not None:
            num_channels = (size - 1) // 2
        return cls(*tf.split(vectors, [num_channels, num_channels, 1], 1))

    def vectors(self) -> tf.Tensor:
        """`[mean; variance; count]` of each group, [N, 2 C + 1]."""
        return tf.concat(self, 1)

    def joined(self) -> '_ChannelMoments':
        """The moments over the examples of all groups, with N = 1; at least one group has some."""
        count = tf.reduce_sum(self.count, 0, keepdims=True)
        part = self.count / count
        mean = tf.reduce_sum(part * self.mean, 0, keepdims=True)
        squares = self.variance + tf.squared_difference(self.mean, mean)
        return _ChannelMoments(mean, tf.reduce_sum(part * squares, 0, keepdims=True), count)


_EXCHANGES = {'sum': _Sum, 'mean': _Mean, 'concat': _Concat, 'moments': _Moments}


def _of_any_size(rows: tf.Tensor) -> tf.Tensor:
    """Rows of no static number, which can take the place of any other number of rows."""
    return tf.placeholder_with_default(rows, tf.TensorShape([None]).concatenate(rows.shape[1:]))


def _assertions_of_examples(weights: typing.Sequence) -> typing.List[tf.Operation]:
    """Assertions that all towers have examples, for weights that only a step knows. Raises
    `ModelFunctionError` for a tower that never has one."""
    assertions = []
    for weight in weights:
        if isinstance(weight, tf.Tensor):
            assertions.append(tf.Assert(weight > 0., [
                'towers: batch_concat needs an example for each tower']))
        elif not weight:
            raise ModelFunctionError('batch_concat, and the batch has fewer examples than there '
                                     'are towers: pass a larger batch, or fewer devices.')
    return assertions
