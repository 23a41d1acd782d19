"""Gradients, dense or sparse, and lists of `(gradient, variable)` pairs."""

import collections

import numpy as np
import tensorflow.compat.v1 as tf

from towers.graph.graph_walk import behind, reached
from towers.graph.op_types import SAME_NUMBERS


def listed_pairs(pairs):
    """An iterable of pairs, such as a `zip`, as a list of tuples; None for anything else."""
    try:
        listed = list(pairs)
    except (TypeError, RuntimeError):  # the latter for a tensor
        return None
    if not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in listed):
        return None
    return [tuple(pair) for pair in listed]


def tensors_of(pairs):
    """The tensors of `(gradient, variable)` pairs, as a flat list."""
    return [tensor for tensor in tf.nest.flatten([gradient for gradient, _ in pairs],
                                                 expand_composites=True) if tensor is not None]


def map_values(function, gradient):
    """Calls a function on the numbers of a gradient; of `IndexedSlices`, on its rows."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(function(gradient.values), gradient.indices, gradient.dense_shape)
    return function(gradient)


def times(gradient, factor):
    """A gradient, dense or sparse, times a number, a float or a scalar, in its own dtype."""
    if isinstance(factor, float) and factor == 1.:
        return gradient
    return map_values(lambda values: values * (
        tf.cast(factor, values.dtype) if isinstance(factor, tf.Tensor) else factor), gradient)


def cast(gradient, dtype):
    """A gradient, dense or sparse, as one of another dtype."""
    return map_values(lambda values: tf.cast(values, dtype), gradient)


def may_be_gradient_of(gradient, variable):
    """Whether a gradient is None, or one of the graph, the dtype and the shape of a variable."""
    if gradient is None:
        return True
    if not isinstance(gradient, (tf.Tensor, tf.IndexedSlices)) or (
            gradient.graph is not variable.graph
            or gradient.dtype.base_dtype != variable.dtype.base_dtype):
        return False
    shape = variable.get_shape()
    if isinstance(gradient, tf.IndexedSlices):  # rows of the variable; TF 1.15 gives it no shape
        return shape.ndims is None or gradient.values.shape[1:].is_compatible_with(shape[1:])
    return gradient.shape.is_compatible_with(shape)


def expected_gradient(variable):
    """The shape and dtype that a gradient of a variable has to have, for the text of an error."""
    return ('expected a tensor or an IndexedSlices of this graph, of shape %s and dtype %s, or '
            'None' % (variable.get_shape(), variable.dtype.base_dtype.name))


# ---- rows of sparse gradients --------------------------------------------------------------------

Lookup = collections.namedtuple('Lookup', 'slices is_unique')
"""`tf.IndexedSlices` that come from one lookup, and whether it takes each row once."""

# Operations with an output in which no number occurs twice, and the output's index. The gradients
# of segment sums are the gradients of `embedding_lookup_sparse` on later TensorFlows.
_UNIQUE = {'Range': 0, 'Unique': 0, 'UniqueV2': 0, 'UniqueWithCounts': 0, 'UniqueWithCountsV2': 0,
           'SparseSegmentSumGradV2': 1, 'SparseSegmentMeanGradV2': 1,
           'SparseSegmentSqrtNGradV2': 1}
# How a lookup in a variable of several parts computes a row's place in its part.
_IN_PARTS = SAME_NUMBERS | frozenset([
    'FloorDiv', 'FloorMod', 'Sub', 'Maximum', 'Select', 'SelectV2', 'AddV2',
    'Add', 'Less', 'Mod'])


def lookups_of(slices):
    """The lookups that a sparse gradient's rows come from, which TensorFlow puts one after the
    other: list of `Lookup`, at least one."""
    indices = slices.indices
    lookups = list(indices.op.inputs)[:-1] if indices.op.type == 'ConcatV2' else [indices]
    unique = [_is_unique(each) for each in lookups]
    if len(lookups) == 1 or not any(unique):
        return [Lookup(slices, len(lookups) == 1 and unique[0])]
    values = tf.split(slices.values, [tf.shape(each)[0] for each in lookups])
    return [Lookup(tf.IndexedSlices(rows, each, slices.dense_shape), is_unique)
            for rows, each, is_unique in zip(values, lookups, unique)]


def _is_unique(indices):
    """Whether no two of these indices are equal, as far as the operations tell."""
    tensor = behind(indices, SAME_NUMBERS)
    if tensor.op.type == 'DynamicPartition':
        return _follows_from_unique(tensor.op.inputs[0])
    if tensor.op.type == 'Const':  # such as the places of words in a text
        numbers = tf.get_static_value(tensor)
        return np.unique(numbers).size == numbers.size
    return _UNIQUE.get(tensor.op.type) == tensor.value_index


def _follows_from_unique(tensor):
    """Whether places in parts of a variable are computed from numbers that are all different."""
    found = reached([tensor], lambda each: each.op.inputs if each.op.type in _IN_PARTS else ())
    return any(_UNIQUE.get(each.op.type) == each.value_index for each in found.values())


def each_row_once(slices):
    """The same sparse gradient with its rows added up, each once, in the order of first occurrence.

    Kernels that apply repeated rows may add them up in any order, with other bits.
    """
    rows, place = tf.unique(slices.indices)
    return tf.IndexedSlices(
        tf.math.unsorted_segment_sum(slices.values, place, tf.shape(rows)[0]), rows,
        slices.dense_shape)


def rows_once(gradients):
    """`each_row_once` for the sparse ones among `(gradient, variable)` pairs."""
    return [(each_row_once(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient,
             variable) for gradient, variable in gradients]
