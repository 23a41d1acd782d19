"""Tensors in nests of inputs and outputs, and the memory that they take."""

import tensorflow.compat.v1 as tf

from towers import compat


def leaves_of(nest):
    """The tensors of a nest of inputs, those of sparse ones by themselves: a list."""
    return [leaf for leaf in tf.nest.flatten(nest, expand_composites=True) if leaf is not None]


def fetches_in(nest):
    """The tensors, variables and operations of a nest, without its numbers: a list."""
    return [leaf for leaf in tf.nest.flatten(nest, expand_composites=True)
            if isinstance(getattr(leaf, 'op', leaf), tf.Operation)]


def map_leaves(function, nest):
    """`tf.nest.map_structure` that takes sparse tensors apart, and variables not."""
    def on_leaf(leaf):
        if leaf is None or isinstance(leaf, (tf.Tensor, tf.Operation) + compat.VARIABLE_TYPES):
            return None if leaf is None else function(leaf)
        if isinstance(leaf, tf.IndexedSlices):
            return tf.IndexedSlices(*map(on_leaf, (leaf.values, leaf.indices, leaf.dense_shape)))
        if isinstance(leaf, (tf.SparseTensor, tf.RaggedTensor)):
            return tf.nest.map_structure(on_leaf, leaf, expand_composites=True)
        return leaf  # a number, say
    return tf.nest.map_structure(on_leaf, nest)


def bytes_of(value):
    """The size of a tensor or a variable; 0 where its shape is not known."""
    return (value.get_shape().num_elements() or 0) * value.dtype.base_dtype.size
