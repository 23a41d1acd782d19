"""Operations that compute a value across the examples of a batch, told from the graph.

A value of one example (its features, its distance from a center) is the same in a shard as in the
batch; a value that is counted, added up or compared over the examples of a shard is not, unless it
is taken over all towers (`batch_values`).

Where a loss divides by a number that is counted in the batch, takes a root of its mean, or
multiplies examples with each other, the mean of the towers' losses is not the loss of the batch.
The plan says where a graph shows such a loss; `check_towers` measures the difference.
"""

import tensorflow.compat.v1 as tf

from towers.graph import graph_walk
from towers.graph.op_types import (CHOICES, QUOTIENTS, SAME_NUMBERS, SIZES, SUMS,
                                   is_fused_batch_norm)
from towers.tower.batch_values import is_batch_value
from towers.tower.objectives import flat

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


# ---- losses that are not the mean of the towers' losses -----------------------------------------

_LINEAR = SAME_NUMBERS | SUMS | CHOICES | {'Neg', 'Mul'}
_BENT = frozenset(['Sqrt', 'Rsqrt', 'Square', 'Pow', 'Log', 'Log1p', 'Exp', 'Reciprocal', 'Inv'])


def whole_batch_line(recorded, reduction):
    """The plan's line about a loss that is not the mean of the towers' losses: a text, or None."""
    by_value = graph_walk.reachable_from(
        recorded.sources, [op for op in recorded.operations if op.type not in SIZES
                             and not is_batch_value(op)])
    choices = [op for op in recorded.operations if op.name in by_value and _chooses(op)]
    of_choices, found = graph_walk.reachable_from(choices, recorded.operations), []
    for loss in flat(recorded.output.loss):
        found += _in_scalars(loss, by_value)
        if reduction == 'mean':
            found += _sums(loss, by_value)
        needed = graph_walk.ancestors([loss])
        found += [('multiplies examples with each other', op.name) for op in recorded.operations
                  if op.type == 'MatMul' and op.name in needed
                  and all(tensor.op.name in by_value for tensor in op.inputs)]
        if any(op.type == 'Mean' and op.name in of_choices & needed for op in recorded.operations):
            found += [('chooses among the examples of the shard', op.name) for op in choices
                      if op.name in needed]
    if not found:
        return None
    more = '' if len(found) == 1 else ' and %d more' % (len(found) - 1)
    return ('the loss %s (%s%s), and each tower has its shard alone: N towers are not one device; '
            'see towers.batch_sum' % (found[0] + (more,)))


def _chooses(op):
    """Whether an operation takes the best examples, or examples by a mask (`tf.boolean_mask`)."""
    return op.type == 'TopKV2' and op.inputs[0].shape.ndims == 1 or (
        op.type in ('Gather', 'GatherV2')
        and graph_walk.behind(op.inputs[1], SAME_NUMBERS).op.type == 'Where')


def _sums(loss, by_value):
    """`[(text, name of the operation)]` of sums over the examples that a loss has as they are."""
    def is_sum(op):
        return op.name in by_value and op.type == 'Sum' and (
            mixed(op.inputs[0], by_value, ()) is None)
    found = graph_walk.reached([loss.op], lambda op: [each.op for each in op.inputs] if (
        (op.type in SUMS or op.type in SAME_NUMBERS) and not is_sum(op)) else ())
    return [("adds up the examples of the shard, and the towers' mean is taken", op.name)
            for op in found.values() if is_sum(op)]


def _in_scalars(loss, by_value):
    """`[(text, name of the operation)]` of a loss's arithmetic on scalars of all examples."""
    stack, seen, found = [loss], set(), []
    while stack:
        op = stack.pop().op
        if op.name in seen or op.name not in by_value:
            continue
        seen.add(op.name)
        inputs = [tensor for tensor in op.inputs if tensor.shape.ndims == 0]
        if op.type in QUOTIENTS:
            if op.inputs[1].op.name in by_value and op.inputs[1].shape.ndims == 0:
                found.append(('divides by a number that is counted in the shard', op.name))
            stack.append(op.inputs[0])
        elif op.type in _BENT and inputs:
            found.append(('has a %s of a mean over the shard' % op.type, op.name))
        elif op.type in _LINEAR:
            stack.extend(inputs)
    return found
