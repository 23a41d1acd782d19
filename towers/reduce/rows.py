"""Sparse gradients row by row, and gradients times a number."""

import tensorflow.compat.v1 as tf


def each_row_once(slices):
    """The same sparse gradient with its rows added up, each once, in the order of first occurrence.

    Args:
      slices: `tf.IndexedSlices`, whose indices may repeat.

    Returns:
      `tf.IndexedSlices` without repeated indices. On the same rows in the same order it is the same
      bit for bit, where the kernels that apply repeated rows may add them up in any order.
    """
    rows, place = tf.unique(slices.indices)
    return tf.IndexedSlices(
        tf.math.unsorted_segment_sum(slices.values, place, tf.shape(rows)[0]), rows,
        slices.dense_shape)


def scaled(gradient, factor):
    """A gradient times a number, dense or sparse, in its own dtype.

    Args:
      gradient: a tensor, or `tf.IndexedSlices`, whose values alone are multiplied.
      factor: a float, or a float scalar.
    """
    if isinstance(factor, float) and factor == 1.:
        return gradient
    dtype = gradient.dtype.base_dtype
    factor = tf.cast(factor, dtype) if isinstance(factor, tf.Tensor) else tf.constant(factor, dtype)
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor
