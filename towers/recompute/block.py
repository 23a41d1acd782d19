"""Blocks that a model marks to be recomputed in the backward pass."""

import collections
import functools
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import InvalidArgumentError
from towers.graph.graph_walk import Recording

MARK = '_recomputed_block'
"""The attribute that marks the operations of a block: the name of the block's first operation.
TensorFlow ignores attributes whose name begins with an underscore."""


def recompute(block: typing.Callable) -> typing.Callable:
    """Wraps `block` so that the backward pass of `build_towers` computes it again.

    Only the block's inputs, and the tensors that other operations take from the block, are kept in
    memory until the backward pass. Weights, updates, random numbers and results stay the same: see
    `recompute.rewrite`. Variables may be new or reused. The wrapper changes nothing outside of
    a model function of `build_towers`, nor where `recompute=` of the build says for the whole model
    what to keep.

    >>> for width in widths:
    ...     images = towers.recompute(residual_block)(images, width)

    Args:
      block: a function that makes a part of a graph.

    Returns:
      A function with the same arguments and results.

    Raises:
      InvalidArgumentError: `block` cannot be called.
    """
    if not callable(block):
        raise InvalidArgumentError('recompute(%.80r): expected a function that makes a part of a '
                                   'model.' % (block,))

    @functools.wraps(block, assigned=[name for name in functools.WRAPPER_ASSIGNMENTS
                                      if hasattr(block, name)])
    def marked(*args, **kwargs):
        with Recording(tf.get_default_graph()) as made:
            result = block(*args, **kwargs)
        for op in made.operations:
            compat.set_attribute(op, MARK, tf.AttrValue(s=made.operations[0].name.encode()))
        return result
    return marked


def blocks_among(forward):
    """The operations of each marked block: list of lists, in the order of `forward`."""
    found = collections.OrderedDict()
    for op in forward:
        if MARK in op.node_def.attr:
            found.setdefault(op.get_attr(MARK), []).append(op)
    return list(found.values())
