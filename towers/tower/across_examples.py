"""Operations that compute a value across the examples of a batch, told from the graph.

A value of one example (its features, its distance from a center) is the same in a shard as in the
batch; a value that is counted, added up or compared over the examples of a shard is not, unless it
is taken over all towers (`batch_values`).
"""

import tensorflow.compat.v1 as tf

from towers.graph import graph_walk
from towers.graph.op_types import QUOTIENTS, SIZES, is_fused_batch_norm
from towers.tower.batch_values import is_batch_value

_ESTIMATES = frozenset(['Mean', 'Max', 'Min', 'ArgMax', 'ArgMin', 'All', 'Any'])
_REDUCTIONS = _ESTIMATES | {'Sum', 'Prod'}
_COUNTS = frozenset(['Bincount', 'DenseBincount', 'Unique', 'UniqueV2', 'UniqueWithCounts',
                     'UniqueWithCountsV2', 'Cumsum', 'Cumprod'])
_DATA_FIRST = frozenset(['Reshape', 'BroadcastTo', 'Tile', 'Slice', 'StridedSlice', 'Pad', 'PadV2',
                         'MirrorPad', 'ExpandDims', 'Squeeze', 'Transpose'])
"""Types whose further inputs say places and sizes."""
_WITHOUT_VALUES = frozenset(['Range', 'ZerosLike', 'OnesLike', 'BroadcastGradientArgs'])


def is_added_up(tensor, examples):
    """Whether a statistic adds up examples, which estimates nothing of the batch, as a mean does. A
    sum that is divided by a value computed from the examples is a mean."""
    def look(op):
        if op.type in _ESTIMATES and _is_over_examples(op) or is_fused_batch_norm(op.type):
            return ()
        divisors = [each for each in op.inputs if each.op.type in ('Reciprocal', 'Inv')]
        if op.type in QUOTIENTS:
            divisors = op.inputs[1:]
        if any(each.op.name in examples for each in divisors):
            return ()
        return None if op.type in ('Sum', 'Prod') and _is_over_examples(op) or (
            _counts_examples(op, examples)) else op.inputs
    return _first(tensor, examples, look) is not None


def mixed(tensor, examples, of_batch_norm):
    """The operation by which a value of one example depends on the others; or None. By the
    operations `of_batch_norm`, its statistics, examples may depend on each other."""
    def look(op):
        if op.name in of_batch_norm or op.type in _WITHOUT_VALUES:
            return ()
        if op.type in _REDUCTIONS and _is_over_examples(op) or op.type in SIZES or (
                _counts_examples(op, examples)):
            return None
        if op.type == 'Fill':
            return op.inputs[1:]
        return op.inputs[:1] if op.type in _DATA_FIRST or op.type in _REDUCTIONS else op.inputs
    return _first(tensor, examples, look)


def _first(tensor, examples, look):
    """The operation at which `look` stops, by None; else it returns the inputs to search."""
    def inputs(op):
        return [each.op for each in look(op) or () if counts(each.op)]

    def counts(op):
        return op.name in examples and not is_batch_value(op)
    found = graph_walk.reached(filter(counts, [tensor.op]), inputs)
    return next((op for op in found.values() if look(op) is None), None)


def _is_over_examples(op):
    """Whether a reduction is over the first dimension, as far as is known."""
    axes, rank = tf.get_static_value(op.inputs[1]), op.inputs[0].shape.ndims
    if axes is None:
        return True
    axes = [int(axis) for axis in axes.reshape([-1])]
    return 0 in axes or any(axis < 0 and rank in (None, -axis) for axis in axes)


def _counts_examples(op, examples):
    return op.type in _COUNTS or 'Segment' in op.type or op.type == 'MatMul' and all(
        each.op.name in examples for each in op.inputs)
