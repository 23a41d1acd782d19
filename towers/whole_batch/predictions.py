"""The batch's predictions from the towers' predictions, by what is proven of each prediction.

    values of examples along a dimension      joined along that dimension, in the batch's order
    a mean over the examples                  the mean, weighted by the towers' examples
    a sum or a count of examples              the sum
    the same on every tower                   tower 0's

Any other prediction is refused: no combination of the towers' values is known to be the batch's.

Words of `proof/` used here, of the state of a tensor: its `kind` says how it depends on the
examples, as the rows of the table do; its `axis` is the dimension along which the examples are; its
`outer` says in how many rounds all examples follow each other along this dimension; its `selection`
names what has chosen rows of some examples; its `shard_statistics` are the statistics of the shard
on which the tensor depends, but not linearly.
"""

import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import ModelFunctionError
from towers.model.outputs import weighted_sum
from towers.proof.batch_norms import statistics_of_normalizations
from towers.proof.states import Kind, State
from towers.shards.cut_batch import CutBatch, Size, zero_if_empty

_WHAT_TO_DO = ('return a tensor with the examples of the shard along one dimension, a mean over '
               'them, or take it from built.towers[k].predictions')


class RowsOfExamples(typing.NamedTuple):
    """Predictions whose author says that they are rows of examples, [shard, ...], wherever nothing
    is proven of them: outputs of a Keras model, of an Estimator's model function."""
    rows: typing.Any  # a nest of tensors


def merge_predictions(predictions: list, batch: CutBatch, proven: typing.Any) -> typing.Any:
    """Merges the predictions of the towers.

    Args:
      predictions: list of N nests, of the towers.
      batch: the batch that was cut into the towers' shards.
      proven: `Proven`, of the first tower's forward pass.

    Returns:
      A nest like each tower's.

    Raises:
      ModelFunctionError: the nests differ in structure; or a leaf is no tensor, or is not known to
        be made of the batch's examples.
    """
    _check_structures(predictions)
    are_rows = isinstance(predictions[0], RowsOfExamples)
    leaves_of_towers = list(map(tf.nest.flatten, predictions))
    merged = []
    for by_tower in zip(*leaves_of_towers):  # the first leaf of each tower, then the second
        _check_is_tensor(by_tower[0])
        merged.append(_merged(list(by_tower), batch, proven, are_rows))
    return tf.nest.pack_sequence_as(predictions[0], merged)


def _check_structures(predictions: list) -> None:
    """Raises `ModelFunctionError` where the towers' nests differ in structure."""
    try:
        for nest in predictions:
            tf.nest.assert_same_structure(predictions[0], nest)
    except (ValueError, TypeError) as error:
        raise ModelFunctionError('the predictions of the towers differ in structure: %s'
                                 % str(error).split('\n', 1)[0]) from None


_LEAVES = (tf.Tensor, tf.SparseTensor, bool, int, float, str, bytes, np.ndarray,
           np.generic) + compat.VARIABLE_TYPES


def _check_is_tensor(leaf: typing.Any) -> None:
    """Raises `ModelFunctionError` for a prediction that is neither a tensor nor a number, a string
    or None."""
    if leaf is not None and not isinstance(leaf, _LEAVES):
        raise ModelFunctionError('the model function returned %.80r of type %s among its '
                                 'predictions: expected tensors [shard, ...], or scalars.'
                                 % (leaf, type(leaf).__name__))


def _merged(by_tower: list, batch: CutBatch, proven: typing.Any, are_rows: bool) -> typing.Any:
    """Merges one prediction of the towers.

    Args:
      by_tower: list of the towers' predictions.
      batch: the batch that was cut into the towers' shards.
      proven: `Proven`, of the first tower's forward pass.
      are_rows: whether their author says that they are rows of examples, see `RowsOfExamples`.
    """
    first = by_tower[0]
    if first is None:
        return None
    if isinstance(first, tf.SparseTensor):
        return _joined_sparse(by_tower, batch, proven, are_rows)
    tensors = _as_tensors(by_tower)
    if len(tensors) == 1:
        return tensors[0]
    if not isinstance(first, tf.Tensor):  # a number, or a variable: the same on every tower
        return tf.identity(tensors[0])
    merged = merged_tensor(tensors, batch, proven)
    if merged is not None:
        return merged
    return _merged_unproven(tensors, batch, proven, are_rows)


def _merged_unproven(tensors: typing.List[tf.Tensor], batch: CutBatch, proven: typing.Any,
                     are_rows: bool) -> tf.Tensor:
    """Merges one prediction of the towers by the word of its author, where the proof does not.

    The arguments are those of `_merged`. Raises `ModelFunctionError` where there is no such word.
    """
    first = tensors[0]
    is_scalar = first.shape.ndims == 0  # it has no rows, whatever its author says
    if not are_rows or is_scalar:
        raise _refusal(first, why_not_merged(first, proven))
    # If the dimension of the examples is proven, the predictions are joined along it; else along
    # the first dimension, where the author says that the examples are.
    state = proven.analysis.state(first)
    axis = state.axis if state.is_by_example else 0
    return _joined(tensors, axis, batch)


def merged_tensor(by_tower: typing.List[tf.Tensor], batch: CutBatch,
                  proven: typing.Any) -> typing.Optional[tf.Tensor]:
    """The batch's value of the towers' tensors; None where nothing is proven by which they could be
    merged. The arguments are those of `merge_predictions`, with one tensor a tower."""
    if len(by_tower) == 1:
        return by_tower[0]
    state = proven.analysis.state(by_tower[0])  # the towers are alike: all have this state
    depends_on_shard = bool(_statistics_beside_normalizations(by_tower[0], proven))
    if depends_on_shard:  # one device would have other values
        return None
    if state.kind is Kind.ROWS and not _are_of_one_round(by_tower[0], proven.analysis):
        return None
    return _merged_by_proof(by_tower, state, batch)


def _are_of_one_round(rows: tf.Tensor, analysis: typing.Any) -> bool:
    """Whether rows were selected from one round of all examples (a state's `outer` is the number of
    rounds).

    `concat([x, z])`, of two tensors of the examples, has two rounds. A mask leaves some rows of x,
    and after them some rows of z. If shards were joined, the rows of z of one shard would be before
    the rows of x of the next shard.

    The selection of rows is the name of the `Where` that has made places of a mask; or, for a
    sparse input of the batch, the name of a tensor ('x/values:0'). A second mask may leave some of
    the rows that a first mask has left. Then the first mask tells the rounds.
    """
    selection = analysis.state(rows).selection
    while not _is_of_sparse_input(selection):
        try:
            where = rows.graph.get_operation_by_name(selection)
        except KeyError:  # it is in the body of a function, whose states are not asked for here
            return False
        places = analysis.state(where.outputs[0])
        is_second_mask = places.kind is Kind.ROW_POSITION
        if not is_second_mask:
            return places.outer == 1
        selection = analysis.state(where.inputs[0]).selection
    return True


def _is_of_sparse_input(selection: str) -> bool:
    """Whether the selection of rows is a sparse input: it names a tensor, not an operation."""
    return ':' in selection


def _statistics_beside_normalizations(tensor: tf.Tensor, proven: typing.Any) -> typing.Set[str]:
    """The names of the statistics of the shard that a tensor depends on, without the statistics by
    which batch norms normalize the examples that it is computed from. These do not stop a merge:
    they make the loss differ from one device's in the same way. But the variance itself, and what
    is computed from it, such as a standard deviation, have no value of the batch."""
    statistics = proven.analysis.state(tensor).shard_statistics
    return set(statistics - statistics_of_normalizations(
        proven.batch_norms, [tensor], proven.analysis))


def why_not_merged(first: tf.Tensor, proven: typing.Any) -> str:
    """Why `merged_tensor` returns None, in words; `first` is the first tower's tensor."""
    state = proven.analysis.state(first)
    reason = state.reason  # where the proof of this tensor ended; None where it did not
    statistics = proven.analysis.in_order(_statistics_beside_normalizations(first, proven))
    if reason is None and statistics:
        reason = proven.analysis.reasons[statistics[0]]
    if reason is not None:
        return "'%s' (%s) %s" % (reason.operation, reason.type, reason.why)
    # The tensor's kind is proven, but tensors of this kind, or in these rounds, cannot be merged.
    text = 'it is %s' % state.kind.value
    if state.outer > 1:  # all examples are there more than once
        text += ', %d times after each other' % state.outer
    elif state.kind is Kind.ROWS:  # `_are_of_one_round` is False for these rows
        text += ', which are not known to be chosen from all examples once'
    return text


def _merged_by_proof(tensors: typing.List[tf.Tensor], state: State,
                     batch: CutBatch) -> typing.Optional[tf.Tensor]:
    """The batch's value of the towers' tensors, by the state of the first one: a row of the table
    at the top of this module; None where no row fits."""
    if _is_same_on_towers(state):
        return tf.identity(tensors[0])
    if _can_be_joined(state):
        return _joined(tensors, state.axis, batch)
    if state.kind is Kind.MEAN:
        return weighted_sum(tensors, batch.weights)
    if _adds_up(state):
        return tf.add_n(list(map(zero_if_empty, tensors, batch.weights)))
    return None


def _is_same_on_towers(state: State) -> bool:
    """Whether a value does not depend on the examples; or is a number computed from shapes without
    the number of examples in it, such as the number of features."""
    is_size_without_examples = state.kind is Kind.SIZES and not state.depends_on_size
    return state.kind is Kind.INDEPENDENT or is_size_without_examples


def _can_be_joined(state: State) -> bool:
    """Whether joining the towers' values of examples gives the values of the batch, in the batch's
    order. It does not if a tensor has the shard's examples in two rounds, one after the other
    (`outer` is 2)."""
    has_examples_once = state.kind is Kind.PER_EXAMPLE and state.outer == 1
    return state.kind is Kind.ROWS or has_examples_once


def _adds_up(state: State) -> bool:
    """Whether the towers' values add up to the batch's value: a count of examples does, and a sum
    over the examples without an offset. (Every tower would have added the offset.)"""
    is_plain_sum = state.kind is Kind.SUM and not state.has_offset
    return is_plain_sum or state.is_count


def _as_tensors(by_tower: list) -> typing.List[tf.Tensor]:
    """The predictions of the towers, which may be numbers, strings and variables, as tensors."""
    try:
        return list(map(tf.convert_to_tensor, by_tower))
    except (TypeError, ValueError) as error:  # a number or a text that no tensor holds
        raise ModelFunctionError('the prediction %.80r of the model function cannot be made a '
                                 'tensor: %.200s.' % (by_tower[0], error)) from None


def _refusal(tensor: tf.Tensor, why: str) -> ModelFunctionError:
    """The error for a prediction that has no value of the whole batch; `why` is said in it."""
    return ModelFunctionError(
        'the prediction %r of shape %s is not known to be one of the batch (%s): %s.' % (
            tensor.name, tensor.shape, why, _WHAT_TO_DO))


# ---- values of examples --------------------------------------------------------------------------

def _joined(tensors: typing.List[tf.Tensor], axis: int, batch: CutBatch) -> tf.Tensor:
    """The examples of all towers along a dimension, without the padding of shards that have no
    example."""
    if not batch.pads:
        return tf.concat(tensors, axis)
    without_padding = []
    for tensor, size in zip(tensors, batch.sizes):
        length = _length_unless_padding(tf.shape(tensor)[axis], size)
        without_padding.append(_up_to(tensor, axis, length))
    return tf.concat(without_padding, axis)


def _up_to(tensor: tf.Tensor, axis: int, length: tf.Tensor) -> tf.Tensor:
    """The first `length` entries of a tensor along a dimension."""
    if axis == 0:  # also of a tensor whose rank is not known
        return tensor[:length]
    rank = tensor.shape.ndims
    sizes = [-1] * rank
    sizes[axis] = length
    return tf.slice(tensor, [0] * rank, tf.stack(sizes))


def _joined_sparse(by_tower: typing.List[tf.SparseTensor], batch: CutBatch, proven: typing.Any,
                   are_rows: bool) -> tf.SparseTensor:
    """The rows of the sparse tensors of all towers; the arguments are those of `_merged`."""
    if len(by_tower) == 1:
        return by_tower[0]
    if not are_rows and not _has_rows_of_examples(by_tower[0], proven.analysis):
        raise _refusal(by_tower[0].values, why_not_merged(by_tower[0].values, proven))
    if batch.pads:
        by_tower = list(map(_without_padding, by_tower, batch.sizes))
    # Shards may differ in other dimensions than the first, as the texts of a decoder do in length.
    return tf.sparse.concat(0, by_tower, expand_nonconcat_dim=True)


def _has_rows_of_examples(tensor: tf.SparseTensor, analysis: typing.Any) -> bool:
    """Whether it is proven that row i of a sparse tensor has the values of example i: each index
    vector begins with the position of an example (`Kind.INDICES`), and the value at this index is
    of the same example, since one selection has made the indices and the values."""
    indices = analysis.state(tensor.indices)
    values = analysis.state(tensor.values)
    are_rows_at_places = indices.kind is Kind.INDICES and values.kind is Kind.ROWS
    return are_rows_at_places and indices.selection == values.selection


def _without_padding(rows: tf.SparseTensor, size: Size) -> tf.SparseTensor:
    """The rows of a shard's sparse tensor; no rows if `size`, the number of the shard's examples,
    is 0."""
    length = tf.cast(_length_unless_padding(rows.dense_shape[0], size), tf.int64)
    shape = tf.concat([[length], rows.dense_shape[1:]], 0)
    return tf.sparse.slice(rows, tf.zeros_like(rows.dense_shape), shape)


def _length_unless_padding(length: tf.Tensor, size: Size) -> tf.Tensor:
    """How many entries of a shard's tensor belong to examples: all, or none if they are padding.

    Args:
      length: how many entries there are along the dimension of the examples.
      size: the number of examples of the shard; 0 if it holds padding.
    """
    if isinstance(size, int):
        return length if size else tf.zeros_like(length)
    return tf.where(size > 0, length, tf.zeros_like(length))
