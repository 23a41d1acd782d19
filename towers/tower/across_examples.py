"""Operations that compute a value across the examples of a batch, told from the graph.

A value of one example (its features, its distance from a center) is the same in a shard as in the
batch; a value that is counted, added up or compared over the examples of a shard is not, unless it
is taken over all towers (`batch_values`).

Where a loss divides by a number that is counted in the batch, takes a root of its mean, or
multiplies examples with each other, the mean of the towers' losses is not the loss of the batch.
The plan says where a graph shows such a loss; `check_towers` measures the difference.
"""

import numpy as np
import tensorflow.compat.v1 as tf

from towers.graph import graph_walk
from towers.graph.graph_walk import is_random
from towers.graph.op_types import (CHOICES, CONTROL_FLOW, CONTROL_FLOW_V2, QUOTIENTS,
                                   SAME_NUMBERS, SIZES, SUMS, is_fused_batch_norm)
from towers.tower.batch_values import is_batch_value
from towers.tower.objectives import flat

_ESTIMATES = frozenset(['Mean', 'Max', 'Min', 'ArgMax', 'ArgMin', 'All', 'Any'])
_REDUCTIONS = _ESTIMATES | {'Sum', 'Prod'}
_COUNTS = frozenset(['Bincount', 'DenseBincount', 'Unique', 'UniqueV2', 'UniqueWithCounts',
                     'UniqueWithCountsV2', 'Cumsum', 'Cumprod'])
_DATA_FIRST = frozenset(['Reshape', 'BroadcastTo', 'Tile', 'Slice', 'StridedSlice', 'Pad', 'PadV2',
                         'MirrorPad', 'ExpandDims', 'Squeeze', 'Transpose'])
"""Types whose further inputs say places and sizes."""
_OF_ARRAYS = {'TensorArrayScatterV3': -1, 'TensorListFromTensor': -1, 'TensorArrayGatherV3': 1,
              'TensorListStack': 1}  # what they add to the dimension that has the examples
_WITHOUT_VALUES = frozenset(['Range', 'ZerosLike', 'OnesLike', 'BroadcastGradientArgs'])


def is_added_up(tensor, examples, axes):
    """Whether a statistic adds up examples, which estimates nothing of the batch, as a mean does. A
    sum that is divided by a value computed from the examples is a mean."""
    def look(op):
        if op.type in _ESTIMATES and axes.is_over(op) or is_fused_batch_norm(op.type):
            return ()
        divisors = [each for each in op.inputs if each.op.type in ('Reciprocal', 'Inv')]
        if op.type in QUOTIENTS:
            divisors = op.inputs[1:]
        if any(each.op.name in examples for each in divisors):
            return ()
        return None if op.type in ('Sum', 'Prod') and axes.is_over(op) or (
            _counts_examples(op, examples)) else op.inputs
    return _first(tensor, examples, look) is not None


def mixed(tensor, examples, axes, of_batch_norm=()):
    """The operation by which a value of one example depends on the others; or None. By the
    operations `of_batch_norm`, its statistics, examples may depend on each other."""
    def look(op):
        if op.name in of_batch_norm or op.type in _WITHOUT_VALUES:
            return ()
        if op.type in _REDUCTIONS and axes.is_over(op) or op.type in SIZES or (
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


def _counts_examples(op, examples):
    return op.type in _COUNTS or 'Segment' in op.type or op.type == 'MatMul' and all(
        each.op.name in examples for each in op.inputs)


# ---- the dimension of the examples ---------------------------------------------------------------

class ExampleAxes:
    """Which dimension of each tensor of a forward pass has the examples, followed from the inputs.

    Attributes:
      axes: dict from names of tensors to dimensions, or to None of a value over the examples.
      statistics: list of the values over the examples by which examples are computed, as by a mean.
      unclear: name of an operation that hides the dimension of a single example; or None.
      chosen: names of tensors of chosen examples (`tf.boolean_mask`), a number of a tower's own.
    """

    def __init__(self, sources, operations):
        """`sources` are tensors whose first dimension has the examples."""
        self.axes, self.unclear, self.chosen = {each.name: 0 for each in sources}, None, set()
        met, known, has_branches = {}, None, any(op.type in CONTROL_FLOW for op in operations)
        while known is None or has_branches and known != len(self.axes):
            known = len(self.axes)  # tf.cond makes a Switch after what takes its output
            for op in operations:
                inputs = [each for each in op.inputs if each.name in self.axes]
                if not (inputs or is_random(op)) or op.type in SIZES or is_batch_value(op):
                    continue
                by_example = [each for each in inputs if self.axes[each.name] is not None]
                if by_example:
                    met.update((each.name, each) for each in inputs if self.axes[each.name] is None)
                for output in op.outputs:
                    self.axes[output.name] = self._axis(op, output, inputs, by_example) if (
                        by_example) else 0 if not inputs else None
                if by_example and not op.type.startswith('Scatter') and (
                        _chooses(op) or any(each.name in self.chosen for each in by_example)):
                    self.chosen.update(output.name for output in op.outputs)
        self.statistics = list(graph_walk.reached(met.values(), lambda tensor: [
            each for each in tensor.op.inputs if self.axes.get(each.name, 0) is None]).values())

    def is_over(self, op):
        """Whether an operation goes over the examples, as far as is known."""
        return self.axes.get(op.outputs[0].name) is None

    def _axis(self, op, output, inputs, by_example):
        """The dimension of a result that has the examples of the inputs `by_example`."""
        if op.type in CONTROL_FLOW_V2 or op.type.endswith('PartitionedCall'):
            return next((self.axes[each.name] for each in inputs
                         if each.shape.ndims and each.shape == output.shape), 0)
        tensor = max(by_example, key=lambda each: each.shape.ndims or 0)
        axis, before, after = self.axes[tensor.name], tensor.shape, output.shape
        if op.type in _REDUCTIONS:
            axes = tf.get_static_value(op.inputs[1])
            if axes is None or before.ndims is None:
                return None
            axes = {int(each) % before.ndims for each in np.ravel(axes)}
            gone = 0 if after.ndims == before.ndims else sum(each < axis for each in axes)
            return None if axis in axes else axis - gone
        if op.type in CONTROL_FLOW or op.type.startswith(('TensorArray', 'TensorList')):
            return max(0, axis + _OF_ARRAYS.get(op.type, 0))
        if None in (before.ndims, after.ndims):
            return axis
        if op.type in ('Transpose', 'ConjugateTranspose'):
            order = tf.get_static_value(op.inputs[1])
            return axis if order is None else list(order).index(axis)
        if op.type in ('Reshape', 'ExpandDims', 'Squeeze'):
            return self._reshaped(op, before.as_list(), after.as_list(), axis)
        if op.type == 'StridedSlice':
            return _sliced(op, before.ndims, axis)
        if op.type in ('Pack', 'Unpack'):
            ahead = op.get_attr('axis') % max(before.ndims, after.ndims)
            return axis + (ahead <= axis) if op.type == 'Pack' else max(0, axis - (ahead < axis))
        if op.type == 'MatMul':
            is_first = tensor.name == op.inputs[0].name
            kept = op.get_attr('transpose_a') if is_first else not op.get_attr('transpose_b')
            return None if axis != kept else int(not is_first)
        if 'Gather' not in op.type and any(each.shape.ndims == after.ndims for each in op.inputs):
            return axis + after.ndims - before.ndims  # it may broadcast
        return axis if axis < after.ndims else 0 if after.ndims else None

    def _reshaped(self, op, before, after, axis):
        """The dimension that has the examples of dimension `axis`, alone or with others."""
        if before == after:
            return axis
        if None in before[:axis]:
            return axis if len(before) == len(after) else 0
        place, size, found = int(np.prod(before[:axis])), 1, []
        for number, length in enumerate(after):
            if length is None or size <= place < size * length or (
                    size == place and before[axis] == length == 1):
                found.append(number)
            if length is None or size * length > place:
                break
            size *= length
        if before[axis] == 1 and [after[number] for number in found].count(1) > 1:
            self.unclear = op.name
        return found[0] if found else None

    def roots(self, statistics):
        """Names of the roots that are computed from statistics, the examples left out: a set."""
        found = graph_walk.reached([each.op for each in statistics], lambda op: [
            taker for output in op.outputs for taker in output.consumers()
            if taker.outputs and self.axes.get(taker.outputs[0].name, 0) is None])
        return {op.name for op in found.values() if op.type in ('Rsqrt', 'Sqrt')
                or op.type == 'Pow' and (tf.get_static_value(op.inputs[1]) or 0) < 1}

    def of_batch_norms(self):
        """Names of the operations of means and variances of batch norms, but for those in kernels."""
        names = set()
        for each in self.statistics:
            squares = each.op.inputs[0].op if each.op.type == 'Mean' else each.op
            squares = squares.inputs[0].op if squares.type == 'Square' else squares
            if squares.type in ('SquaredDifference', 'Sub') and self.roots([each]):
                names |= {each.op.name, graph_walk.behind(squares.inputs[1], SAME_NUMBERS).op.name}
        return names


def _sliced(op, rank, axis):
    """The dimension that has the examples of dimension `axis` after a slice, such as x[:, None]."""
    count, place, result = op.inputs[1].shape.num_elements() or 0, 0, 0
    new, rest, gone = map(op.get_attr, ('new_axis_mask', 'ellipsis_mask', 'shrink_axis_mask'))
    for number in range(count):
        bit = 1 << number
        covered = 0 if new & bit else 1
        if rest & bit:
            covered = rank - sum(not (new | rest) >> each & 1 for each in range(count))
        if place <= axis < place + covered:
            return result + axis - place
        place += covered
        result += 1 if new & bit else 0 if gone & bit else covered
    return result + axis - place


# ---- losses that are not the mean of the towers' losses -----------------------------------------

_LINEAR = SAME_NUMBERS | SUMS | CHOICES | {'Neg', 'Mul'}
_BENT = frozenset(['Sqrt', 'Rsqrt', 'Square', 'Pow', 'Log', 'Log1p', 'Exp', 'Reciprocal', 'Inv'])


def whole_batch_line(recorded, request):
    """The plan's line about a loss that is not the mean of the towers' losses: a text, or None."""
    by_value = graph_walk.reachable_from(recorded.sources, [
        op for op in recorded.operations if op.type not in SIZES and not is_batch_value(op)])
    choices = [op for op in recorded.operations if op.name in by_value and _chooses(op)]
    of_choices, found = graph_walk.reachable_from(choices, recorded.operations), []
    for loss in flat(recorded.output.loss):
        found += _in_scalars(loss, by_value)
        if request.reduction == 'mean':
            found += _sums(loss, by_value, recorded.axes)
        needed = graph_walk.ancestors([loss])
        found += [('multiplies examples with each other', op.name) for op in recorded.operations
                  if op.type == 'MatMul' and op.name in needed
                  and all(tensor.op.name in by_value for tensor in op.inputs)]
        if any(op.type == 'Mean' and op.name in of_choices & needed for op in recorded.operations):
            found += [('chooses among the examples of the shard', op.name) for op in choices
                      if op.name in needed]
    told = recorded.axes.of_batch_norms()
    found += [('compares examples with a statistic of the shard', each.op.name)
              for each in recorded.axes.statistics if each.dtype.is_floating
              and each.op.type in ('Sum', 'Mean' if request.batch_norm == 'shard' else 'Sum')
              and each.op.name not in told]
    if not found:
        return None
    more = '' if len(found) == 1 else ' and %d more' % (len(found) - 1)
    return ('the loss %s (%s%s), and each tower has its shard alone: N towers are not one device; '
            'see towers.batch_sum' % (found[0] + (more,)))


def _chooses(op):
    """Whether an operation takes the best examples, or examples by a mask (`tf.boolean_mask`)."""
    return op.type == 'DynamicPartition' or (
        op.type == 'TopKV2' and op.inputs[0].shape.ndims == 1) or (
        op.type in ('Gather', 'GatherV2')
        and graph_walk.behind(op.inputs[1], SAME_NUMBERS).op.type == 'Where')


def _sums(loss, by_value, axes):
    """`[(text, name of the operation)]` of sums over the examples that a loss has as they are."""
    def is_sum(op):
        return op.name in by_value and op.type == 'Sum' and (
            mixed(op.inputs[0], by_value, axes) is None)
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
