"""The exchange of values of the whole batch: connects what the towers have marked.

The formulas stand in `batch_values`. A mark has a number, which the call of `batch_sum` and its
like has in the model function, and a role: `'sum'`, `'mean'` or `'concat'` for the value, and the
same with `'_gradient'` for its gradient. In each tower there may be several marks alike, since a
gradient may be taken more than once.

Its test is `tests/whole_batch/test_batch_values.py`.
"""

import collections
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import ModelFunctionError
from towers.placement.variable_device import only_device
from towers.shards.cut_batch import weighted, zero_if_empty
from towers.whole_batch.batch_values import Mark, is_batch_value, mark_of

Marks = typing.Dict[Mark, typing.List[tf.Operation]]
"""{mark: the operations of one tower that have it, in the order of making}."""


def exchange(towers: typing.Sequence, weights: typing.Sequence, device: str) -> None:
    """Gives all marked operations their values: sums, means and rows over all towers.

    Args:
      towers: the `Tower`s.
      weights: the towers' parts of the batch's examples.
      device: where the values are computed.

    Raises:
      ModelFunctionError: towers ask for different values, or a tower has no rows to concatenate.
    """
    marks_of_towers = _marks_of(towers)
    _check_alike(towers, marks_of_towers)
    if not marks_of_towers[0]:
        return
    with tf.control_dependencies(None), tf.name_scope('batch_values'), only_device(device):
        num_rows = _num_rows(marks_of_towers)
        for mark in sorted(marks_of_towers[0]):
            for alike in zip(*[marks[mark] for marks in marks_of_towers]):
                own_values = [op.inputs[0] for op in alike]
                values = _exchanged(mark.role, own_values, weights, num_rows.get(mark.number))
                for op, value in zip(alike, values):
                    compat.replace_input(op, 0, value)


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


def _num_rows(marks_of_towers: typing.Sequence[Marks]) -> typing.Dict[int, tf.Tensor]:
    """{number of a `batch_concat`: [N], how many rows each tower adds}."""
    num_rows = {}
    for mark in sorted(marks_of_towers[0]):
        if mark.role != 'concat':
            continue
        own_rows = [marks[mark][0].inputs[0] for marks in marks_of_towers]
        num_rows[mark.number] = tf.stack([tf.shape(rows)[0] for rows in own_rows])
    return num_rows


def _exchanged(role: str, values: typing.List[tf.Tensor], weights: typing.Sequence,
               num_rows: typing.Optional[tf.Tensor]) -> typing.List[tf.Tensor]:
    """What the towers get for their values.

    Args:
      role: `'sum'`, `'mean'` or `'concat'`, or one of these with `'_gradient'`.
      values: one from each tower.
      weights: the towers' parts of the batch's examples.
      num_rows: [N], how many rows each tower adds to a `'concat'`.
    """
    if role == 'concat':
        with tf.control_dependencies(_assertions_of_examples(weights)):
            return [_of_any_size(tf.concat(values, 0))] * len(values)
    if role in ('sum', 'mean'):
        counted = weighted if role == 'mean' else zero_if_empty
        return [tf.add_n(list(map(counted, values, weights)))] * len(values)
    total = tf.add_n(values)
    if role == 'concat_gradient':
        return list(map(_of_any_size, tf.split(total, num_rows)))
    counted = weighted if role == 'mean_gradient' else zero_if_empty
    return [counted(total, weight) for weight in weights]


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
