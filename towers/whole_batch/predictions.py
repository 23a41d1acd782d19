"""The towers' predictions as those of the batch, by what is proven of each.

    values of examples along a dimension      joined along that dimension, in the batch's order
    a mean over the examples                  the mean, weighted by the towers' examples
    a sum or a count of examples              the sum
    the same on every tower                   tower 0's

Everything else is none of the batch's, whatever is done to the towers' values, and is refused.
"""

import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import ModelFunctionError
from towers.model.outputs import weighted_sum
from towers.proof.states import Kind, State
from towers.shards.cut_batch import Size, zero_if_empty

_WHAT_TO_DO = ('return a tensor with the examples of the shard along one dimension, a mean over '
               'them, or take it from built.towers[k].predictions')


class RowsOfExamples(typing.NamedTuple):
    """Predictions whose author says that they are rows of examples, [shard, ...], wherever nothing
    is proven of them: outputs of a Keras model, of an Estimator's model function."""
    rows: typing.Any  # a nest of tensors


def merge_predictions(predictions: list, weights: list, padded: typing.Optional[list],
                      proven: typing.Any) -> typing.Any:
    """Merges the predictions of the towers.

    Args:
      predictions: list of N nests, of the towers.
      weights: list of the towers' parts of the batch's examples.
      padded: list of the sizes of the shards, where a shard without an example holds padding, whose
        rows are left out; else None.
      proven: `Proven`, of the first tower's forward pass.

    Returns:
      A nest like each tower's.

    Raises:
      ModelFunctionError: the nests differ, or a leaf that is no tensor, or that is not known to be
        made of the batch's examples.
    """
    predictions_by_leaf: typing.List[tuple] = []
    try:
        tf.nest.map_structure(lambda *leaves: predictions_by_leaf.append(leaves), *predictions)
    except (ValueError, TypeError) as error:
        raise ModelFunctionError('the predictions of the towers differ in structure: %s'
                                 % str(error).split('\n', 1)[0]) from None
    is_of_rows = isinstance(predictions[0], RowsOfExamples)
    merged = []
    for by_tower in predictions_by_leaf:
        _check_is_tensor(by_tower[0])
        merged.append(_merged(list(by_tower), weights, padded, proven, is_of_rows))
    return tf.nest.pack_sequence_as(predictions[0], merged)


_LEAVES = (tf.Tensor, tf.SparseTensor, bool, int, float, str, bytes, np.ndarray,
           np.generic) + compat.VARIABLE_TYPES


def _check_is_tensor(leaf: typing.Any) -> None:
    """Raises `ModelFunctionError` for what is neither a tensor nor a number, a string or None."""
    if leaf is not None and not isinstance(leaf, _LEAVES):
        raise ModelFunctionError('the model function returned %.80r of type %s among its '
                                 'predictions: expected tensors [shard, ...], or scalars.'
                                 % (leaf, type(leaf).__name__))


def _merged(by_tower: list, weights: list, padded: typing.Optional[list], proven: typing.Any,
            is_of_rows: bool) -> typing.Any:
    """Merges one prediction of the towers. That it depends on the shard by the statistics of batch
    norms alone does not stop this: the loss differs from one device's by them, too.

    Args:
      by_tower: list of the towers' predictions.
      weights: list of the towers' parts of the batch's examples.
      padded: the sizes of the shards, where one without an example holds padding; else None.
      proven: `Proven`, of the first tower's forward pass.
      is_of_rows: whether its author says that it is rows of examples, where nothing is proven.
    """
    first = by_tower[0]
    if first is None:
        return None
    if isinstance(first, tf.SparseTensor):
        return _joined_sparse(by_tower, padded, proven, is_of_rows)
    tensors = _as_tensors(by_tower)
    if len(tensors) == 1:
        return tensors[0]
    if not isinstance(first, tf.Tensor):  # a number, or a variable
        return tf.identity(tensors[0])
    merged = merged_tensor(tensors, weights, padded, proven)
    if merged is None and is_of_rows and first.shape.ndims != 0:
        state = proven.analysis.state(first)
        axis = state.axis if state.is_by_example else 0
        merged = _joined(tensors, axis, padded)
    if merged is None:
        raise _refusal(first, why_not_merged(first, proven))
    return merged


def merged_tensor(by_tower: typing.List[tf.Tensor], weights: list, padded: typing.Optional[list],
                  proven: typing.Any) -> typing.Optional[tf.Tensor]:
    """The batch's value of the towers' tensors; None where nothing is proven by which they could be
    merged. The arguments are those of `merge_predictions`, with one tensor a tower."""
    if len(by_tower) == 1:
        return by_tower[0]
    state = proven.analysis.state(by_tower[0])
    if state.shard_statistics - proven.batch_norms.statistics():
        return None
    return _merged_by_proof(by_tower, state, weights, padded)


def why_not_merged(of_first: tf.Tensor, proven: typing.Any) -> str:
    """Why `merged_tensor` finds nothing for a tensor of the first tower, in words."""
    state = proven.analysis.state(of_first)
    # Statistics of the shard on which the tensor depends, beside those of batch norms.
    statistics = proven.analysis.in_order(
        state.shard_statistics - proven.batch_norms.statistics())
    reason = state.reason
    if reason is None and statistics:
        reason = proven.analysis.reasons[statistics[0]]
    if reason is not None:
        return "'%s' (%s) %s" % reason
    text = 'it is %s' % state.kind.value
    if state.outer > 1:
        text += ', %d times after each other' % state.outer
    return text


def _merged_by_proof(tensors: typing.List[tf.Tensor], state: State, weights: list,
                     padded: typing.Optional[list]) -> typing.Optional[tf.Tensor]:
    """The batch's value of the towers' tensors, by the state of the first one; None where there is
    none. `weights` are the towers' parts of the examples; `padded` has the sizes of the shards,
    where one without an example holds padding, else None."""
    is_same_on_every_tower = (
        state.kind is Kind.INDEPENDENT
        or state.kind is Kind.SIZES and not state.depends_on_size)
    if is_same_on_every_tower:
        return tf.identity(tensors[0])
    is_along_examples = (
        state.kind is Kind.ROWS
        or state.kind is Kind.PER_EXAMPLE and state.outer == 1)
    if is_along_examples:
        return _joined(tensors, state.axis, padded)
    if state.kind is Kind.MEAN:
        return weighted_sum(tensors, weights)
    is_sum = state.is_count or state.kind is Kind.SUM and not state.has_offset
    if is_sum:
        return tf.add_n(list(map(zero_if_empty, tensors, weights)))
    return None


def _as_tensors(by_tower: list) -> typing.List[tf.Tensor]:
    """Numbers, strings and variables as tensors."""
    try:
        return list(map(tf.convert_to_tensor, by_tower))
    except (TypeError, ValueError) as error:  # a number or a text that no tensor holds
        raise ModelFunctionError('the prediction %.80r of the model function cannot be made a '
                                 'tensor: %.200s.' % (by_tower[0], error)) from None


def _refusal(tensor: tf.Tensor, why: str) -> ModelFunctionError:
    """The error for a prediction that has no value of the whole batch, and why."""
    return ModelFunctionError(
        'the prediction %r of shape %s is not known to be one of the batch (%s): %s.' % (
            tensor.name, tensor.shape, why, _WHAT_TO_DO))


# ---- values of examples --------------------------------------------------------------------------

def _joined(tensors: typing.List[tf.Tensor], axis: int,
            padded: typing.Optional[list]) -> tf.Tensor:
    """The examples of all towers, along a dimension, without padding, see `merge_predictions`."""
    if padded is None:
        return tf.concat(tensors, axis)
    without_padding = []
    for tensor, size in zip(tensors, padded):
        length = _length_unless_padding(tf.shape(tensor)[axis], size)
        without_padding.append(_up_to(tensor, axis, length))
    return tf.concat(without_padding, axis)


def _up_to(tensor: tf.Tensor, axis: int, length: tf.Tensor) -> tf.Tensor:
    """The first entries of a tensor along a dimension, so many as `length` says."""
    if axis == 0:
        return tensor[:length]
    rank = tensor.shape.ndims
    sizes = [-1] * rank
    sizes[axis] = length
    return tf.slice(tensor, [0] * rank, tf.stack(sizes))


def _joined_sparse(by_tower: typing.List[tf.SparseTensor], padded: typing.Optional[list],
                   proven: typing.Any, is_of_rows: bool) -> tf.SparseTensor:
    """The rows of the sparse tensors of all towers; the arguments are those of `_merged`."""
    if len(by_tower) == 1:
        return by_tower[0]
    indices = proven.analysis.state(by_tower[0].indices)
    values = proven.analysis.state(by_tower[0].values)
    are_rows_at_places = indices.kind is Kind.INDICES and values.kind is Kind.ROWS
    is_of_examples = are_rows_at_places and indices.selection == values.selection
    if not is_of_examples and not is_of_rows:
        raise _refusal(by_tower[0].values, why_not_merged(by_tower[0].values, proven))
    if padded is not None:
        by_tower = list(map(_without_padding, by_tower, padded))
    # Shards may differ in the other dimensions, as the texts of a decoder do in length.
    return tf.sparse.concat(0, by_tower, expand_nonconcat_dim=True)


def _without_padding(rows: tf.SparseTensor, size: Size) -> tf.SparseTensor:
    """A sparse tensor without rows, if its shard of that size has no example."""
    length = tf.cast(_length_unless_padding(rows.dense_shape[0], size), tf.int64)
    shape = tf.concat([[length], rows.dense_shape[1:]], 0)
    return tf.sparse.slice(rows, tf.zeros_like(rows.dense_shape), shape)


def _length_unless_padding(length: tf.Tensor, size: Size) -> tf.Tensor:
    """How many entries count, of that length: none if the example of the shard, of that size, is
    padding, else all."""
    if isinstance(size, int):
        return length if size else tf.zeros_like(length)
    return tf.where(size > 0, length, tf.zeros_like(length))
