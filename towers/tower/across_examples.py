"""Operations that compute a value across the examples of a batch, told from the graph.

A value of one example (its features, its distance from a center) is the same in a shard as in the
batch. A value that is counted, added up or compared over the examples of a shard is another one
than that of the batch, unless it is taken over all towers (`batch_values`).
"""

import tensorflow.compat.v1 as tf

from towers.graph.op_types import QUOTIENTS, SIZES
from towers.tower.batch_values import is_batch_value

_REDUCTIONS = frozenset(['Sum', 'Mean', 'Prod', 'Max', 'Min', 'All', 'Any', 'ArgMax', 'ArgMin'])
_ESTIMATES = frozenset(['Mean', 'Max', 'Min', 'ArgMax', 'ArgMin', 'All', 'Any'])
_COUNTS = frozenset(['Bincount', 'DenseBincount', 'Unique', 'UniqueV2', 'UniqueWithCounts',
                     'UniqueWithCountsV2', 'Cumsum', 'Cumprod'])
_DATA_FIRST = frozenset(['Reshape', 'BroadcastTo', 'Tile', 'Slice', 'StridedSlice', 'Pad', 'PadV2',
                         'MirrorPad', 'ExpandDims', 'Squeeze', 'Transpose'])
"""Types whose further inputs say places and sizes."""
_WITHOUT_VALUES = frozenset(['Range', 'ZerosLike', 'OnesLike', 'BroadcastGradientArgs'])


def added_up(tensor, from_examples):
    """The operation that adds up the examples a statistic is computed from; or None.

    A mean over the examples, or their maximum, of a shard estimates that of the batch; a sum does
    not. A sum that is divided by what is computed from the examples, too, is a mean.

    Args:
      tensor: computed from the examples.
      from_examples: names of the operations that depend on the shard.
    """
    def look(op):
        if op.type in _ESTIMATES and _is_over_examples(op) or op.type.startswith('FusedBatchNorm'):
            return ()
        divisors = [each for each in op.inputs if each.op.type in ('Reciprocal', 'Inv')]
        if op.type in QUOTIENTS:
            divisors = op.inputs[1:]
        if any(each.op.name in from_examples for each in divisors):
            return ()
        return None if op.type in ('Sum', 'Prod') and _is_over_examples(op) or (
            _counts_examples(op, from_examples)) else op.inputs
    return _first(tensor, from_examples, look)


def mixed(tensor, from_examples, of_batch_norm):
    """The operation by which a value of one example depends on the others; or None.

    Args:
      tensor, from_examples: as of `added_up`.
      of_batch_norm: names of the operations that compute the statistics of batch norms, by which
        examples may depend on each other.
    """
    def look(op):
        if op.name in of_batch_norm or op.type in _WITHOUT_VALUES:
            return ()
        if op.type in _REDUCTIONS and _is_over_examples(op) or op.type in SIZES or (
                _counts_examples(op, from_examples)):
            return None
        if op.type == 'Fill':
            return op.inputs[1:]
        return op.inputs[:1] if op.type in _DATA_FIRST or op.type in _REDUCTIONS else op.inputs
    return _first(tensor, from_examples, look)


def _first(tensor, from_examples, look):
    """The first operation behind a tensor for which `look` returns None, and not its inputs."""
    stack, seen = [tensor.op], set()
    while stack:
        op = stack.pop()
        if op.name in seen or op.name not in from_examples or is_batch_value(op):
            continue
        seen.add(op.name)
        inputs = look(op)
        if inputs is None:
            return op
        stack.extend(each.op for each in inputs)
    return None


def _is_over_examples(op):
    """Whether a reduction is over the first dimension, as far as is known."""
    axes, rank = tf.get_static_value(op.inputs[1]), op.inputs[0].shape.ndims
    if axes is None:
        return True
    axes = [int(axis) for axis in axes.reshape([-1])]
    return 0 in axes or any(axis < 0 and rank in (None, -axis) for axis in axes)


def _counts_examples(op, from_examples):
    return op.type in _COUNTS or 'Segment' in op.type or op.type == 'MatMul' and all(
        each.op.name in from_examples for each in op.inputs)
