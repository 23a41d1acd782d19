"""Blocks that a model marks to be recomputed in the backward pass."""

import collections
import functools
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import InvalidArgumentError
from towers.graph.graph_walk import Recording

MARK = '_recomputed_block'
"""The attribute of operations with the number of their block. TensorFlow ignores attributes that
begin with an underscore."""


def recompute(block: typing.Callable) -> typing.Callable:
    """Wraps `block` so that the backward pass of `build_towers` computes it again.

    The inputs of the block are kept, and the tensors that other operations take from it; nothing in
    between. Weights, updates, random numbers and results are the same as without: see
    `recomputation.rewrite`. Variables may be new or reused. Outside a model function of
    `build_towers`, and where `recompute=` says for the whole model what to keep, the wrapped
    function is the block itself.

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
            compat.set_text_attribute(op, MARK, made.operations[0].name)
        return result
    return marked


def blocks_among(forward):
    """The marked blocks among operations: list of lists of operations, in order."""
    found = collections.OrderedDict()
    for op in forward:
        if MARK in op.node_def.attr:
            found.setdefault(op.get_attr(MARK), []).append(op)
    return list(found.values())
