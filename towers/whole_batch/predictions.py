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
from towers.model.outputs import weighted_mean
from towers.proof.states import Kind, State
from towers.shards.cut_batch import zero_if_empty

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
    columns: typing.List[tuple] = []
    try:
        tf.nest.map_structure(lambda *column: columns.append(column), *predictions)
    except (ValueError, TypeError) as error:
        raise ModelFunctionError('the predictions of the towers differ in structure: %s'
                                 % str(error).split('\n', 1)[0]) from None
    merged = []
    for column in columns:
        _check_is_tensor(column[0])
        merged.append(_merged(list(column), weights, padded, proven,
                              isinstance(predictions[0], RowsOfExamples)))
    return tf.nest.pack_sequence_as(predictions[0], merged)


def _check_is_tensor(leaf):
    """Raises `ModelFunctionError` for what is neither a tensor nor a number, a string or None."""
    if leaf is not None and not isinstance(leaf, (
            tf.Tensor, tf.SparseTensor, bool, int, float, str, bytes, np.ndarray,
            np.generic) + compat.VARIABLE_TYPES):
        raise ModelFunctionError('the model function returned %.80r of type %s among its '
                                 'predictions: expected tensors [shard, ...], or scalars.'
                                 % (leaf, type(leaf).__name__))


def _merged(parts, weights, padded, proven, is_of_rows):
    """One prediction of all towers; batch norms of each shard count as nothing here.

    Args:
      parts: list of the towers' predictions.
      weights, padded, proven: as of `merge_predictions`.
      is_of_rows: whether its author says that it is rows of examples, where nothing is proven.
    """
    if parts[0] is None:
        return None
    if isinstance(parts[0], tf.SparseTensor):
        return _joined_sparse(parts, padded, proven.analysis, is_of_rows)
    is_number = not isinstance(parts[0], tf.Tensor)
    state = State(Kind.INDEPENDENT) if is_number else proven.analysis.of(parts[0])
    parts = _as_tensors(parts)
    if len(parts) == 1:
        return parts[0]
    merged = None
    if not state.estimated - proven.batch_norms.statistics():
        merged = _merged_by_proof(parts, state, weights, padded)
    if merged is None and is_of_rows and parts[0].shape.ndims != 0:
        merged = _joined(parts, state.axis if state.is_by_example else 0, padded)
    if merged is None:
        raise _refusal(parts[0], state, proven.analysis)
    return merged


def _merged_by_proof(parts, state, weights, padded):
    """The batch's value, by the state of the first tower's; None where there is none."""
    if state.kind is Kind.INDEPENDENT:
        return tf.identity(parts[0])
    if state.kind is Kind.SIZES and not state.depends_on_size:
        return tf.identity(parts[0])
    if state.kind is Kind.ROWS or state.kind is Kind.PER_EXAMPLE and state.outer == 1:
        return _joined(parts, state.axis, padded)
    if state.kind is Kind.MEAN:
        return weighted_mean(parts, weights)
    if state.is_count or state.kind is Kind.SUM and not state.has_offset:
        return tf.add_n([zero_if_empty(part, weight) for part, weight in zip(parts, weights)])
    return None


def _as_tensors(parts):
    """Numbers, strings and variables as tensors."""
    try:
        return [tf.convert_to_tensor(part) for part in parts]
    except (TypeError, ValueError) as error:  # a number or a text that no tensor holds
        raise ModelFunctionError('the prediction %.80r of the model function cannot be made a '
                                 'tensor: %.200s.' % (parts[0], error)) from None


def _refusal(tensor, state: State, analysis):
    estimated = analysis.in_order(state.estimated)
    if state.kind is Kind.UNKNOWN:
        why = "'%s' (%s) %s" % state.reason
    elif estimated:
        why = "'%s' (%s) %s" % analysis.reasons[estimated[0]]
    else:
        why = 'it is %s, %d times after each other' % (state.kind.value, state.outer)
    return ModelFunctionError(
        'the prediction %r of shape %s is not known to be one of the batch (%s): %s.' % (
            tensor.name, tensor.shape, why, _WHAT_TO_DO))


def _joined(parts, axis, padded):
    """The examples of all towers, along a dimension."""
    if padded is not None:
        parts = [_up_to(part, axis, _length_unless_padding(tf.shape(part)[axis], size))
                 for part, size in zip(parts, padded)]
    return tf.concat(parts, axis)


def _up_to(tensor, axis, length):
    """The first entries of a tensor along a dimension."""
    rank = tensor.shape.ndims
    if axis == 0:
        return tensor[:length]
    sizes = [-1] * rank
    sizes[axis] = length
    return tf.slice(tensor, [0] * rank, tf.stack(sizes))


def _joined_sparse(parts, padded, analysis, is_of_rows):
    """The rows of the sparse tensors of all towers."""
    if len(parts) == 1:
        return parts[0]
    indices, values = analysis.of(parts[0].indices), analysis.of(parts[0].values)
    is_of_examples = indices.kind is Kind.PLACES and values.kind is Kind.ROWS and (
        indices.rows_of == values.rows_of)
    if not is_of_examples and not is_of_rows:
        raise _refusal(parts[0].values, values, analysis)
    if padded is not None:
        parts = [_without_padding(part, size) for part, size in zip(parts, padded)]
    # Shards may differ in the other dimensions, as the texts of a decoder do in length.
    return tf.sparse.concat(0, parts, expand_nonconcat_dim=True)


def _without_padding(part, size):
    """A sparse tensor without rows, if its shard has no example."""
    rows = tf.cast(_length_unless_padding(part.dense_shape[0], size), tf.int64)
    shape = tf.concat([[rows], part.dense_shape[1:]], 0)
    return tf.sparse.slice(part, tf.zeros_like(part.dense_shape), shape)


def _length_unless_padding(length, size):
    """How many entries count: none if the example of the shard is padding, else all."""
    if isinstance(size, int):
        return length if size else tf.zeros_like(length)
    return tf.where(size > 0, length, tf.zeros_like(length))
