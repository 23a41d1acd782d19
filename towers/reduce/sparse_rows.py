"""Sparse gradients row by row and lookup by lookup."""

import collections

import numpy as np
import tensorflow.compat.v1 as tf

from towers.graph.graph_walk import behind, reached
from towers.graph.op_types import SAME_NUMBERS

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
