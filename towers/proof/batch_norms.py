"""The batch norms of a forward pass: normalizations by statistics that are proven to be means over
the examples.

In single operations, a batch norm takes a mean over the examples and the mean of the squared
distances from it, which goes into a root; the fused kernel is one operation. A normalization by a
statistic of one example alone (a layer norm) is none, whatever its dimensions are called.
"""

import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers.graph.edit import producer
from towers.graph.graph_walk import behind
from towers.graph.op_types import BRANCHES_V2, SAME_NUMBERS, is_fused_batch_norm
from towers.proof.states import Kind

_STEPS_TO_ROOT = 8  # additions, choices and branches between a variance and its root


class Moments(typing.NamedTuple):
    """The statistics of a batch norm of single operations."""
    mean: tf.Tensor
    variance: tf.Tensor


class BatchNorms(typing.NamedTuple):
    """The normalizations of a forward pass in training mode."""
    moments: typing.List[Moments]  # those by statistics over the examples, of single operations
    fused: typing.List[tf.Operation]  # those by the fused kernel
    unproven: typing.List[tf.Operation]  # statistics of which nothing is proven

    def __len__(self):
        """How many batch norms take statistics over the examples."""
        return len(self.moments) + len(self.fused)

    def statistics(self) -> typing.Set[str]:
        """The names of all operations that compute statistics over the examples."""
        names = {op.name for op in self.fused}
        for mean, variance in self.moments:
            names.update([mean.op.name, variance.op.name])
        return names


NO_BATCH_NORMS = BatchNorms([], [], [])


def find_batch_norms(analysis, operations: list) -> BatchNorms:
    """Finds the batch norms among the operations of a forward pass that was analysed."""
    moments, fused, unproven = [], [], []
    for op in operations:
        if op.name not in analysis.looked_at:
            continue
        if is_fused_batch_norm(op.type) and op.get_attr('is_training'):
            if analysis.of(op.outputs[0]).kind is Kind.UNKNOWN:
                unproven.append(op)
            elif op.name in analysis.reasons:
                fused.append(op)
            continue
        found = _moments_of(op)
        if found is None:
            continue
        if _is_unknown(found.mean, analysis) or _is_unknown(found.variance, analysis):
            unproven.append(op)
        elif analysis.is_average(found.mean.op) and analysis.is_average(found.variance.op):
            moments.append(found)
    return BatchNorms(moments, fused, unproven)


def _is_unknown(tensor, analysis):
    return analysis.of(tensor).kind is Kind.UNKNOWN


def _moments_of(op) -> typing.Optional[Moments]:
    """The mean and the variance, where an operation computes the variance of a normalization."""
    if op.type != 'Mean' or op.inputs[0].op.type not in ('SquaredDifference', 'Square'):
        return None
    distance = op.inputs[0].op
    if distance.type == 'Square':
        distance = distance.inputs[0].op
        if distance.type != 'Sub':
            return None
    mean = behind(distance.inputs[1], SAME_NUMBERS)
    if mean.op.type != 'Mean' or not _goes_into_a_root(op.outputs[0]):
        return None
    axes = [tf.get_static_value(each.inputs[1]) for each in (op, mean.op)]
    if any(each is None for each in axes) or not np.array_equal(
            np.ravel(axes[0]), np.ravel(axes[1])):
        return None
    return Moments(mean, op.outputs[0])


def _goes_into_a_root(variance):
    """Whether a tensor goes into a root, in a few steps of arithmetic."""
    stack, seen = [(variance, 0)], set()
    while stack:
        tensor, steps = stack.pop()
        for op in tensor.consumers():
            if op.type in ('Rsqrt', 'Sqrt', 'Pow'):
                return True
            if op.name in seen or steps >= _STEPS_TO_ROOT:
                continue
            hands_on = op.type in SAME_NUMBERS | BRANCHES_V2 or op.type in (
                'Add', 'AddV2', 'Switch', 'Merge', 'Select', 'SelectV2', 'Maximum')
            if hands_on:
                seen.add(op.name)
                stack += [(output, steps + 1) for output in op.outputs]
    return False


def same_means(statistic: tf.Tensor, operations: list) -> typing.List[tf.Tensor]:
    """The same mean, computed once more, as by two calls of `tf.nn.moments`."""
    if statistic.op.type != 'Mean':
        return []
    axes = tf.get_static_value(statistic.op.inputs[1])
    return [op.outputs[0] for op in operations
            if op.type == 'Mean' and op.inputs[0].name == statistic.op.inputs[0].name
            and np.array_equal(tf.get_static_value(op.inputs[1]), axes)]


def is_variance_node(node: tf.NodeDef, nodes: typing.Dict[str, tf.NodeDef]) -> bool:
    """Whether a node of a function is a mean of squared distances over its first dimension.

    Args:
      node: of a `FunctionDef`.
      nodes: {name: node} of all nodes of that function.
    """
    if node.op != 'Mean':
        return False
    squares, axes = [nodes.get(producer(text)) for text in list(node.input)[:2]]
    if squares is None or squares.op != 'SquaredDifference':
        return False
    if axes is None or axes.op != 'Const':
        return True
    return 0 in np.ravel(tf.make_ndarray(axes.attr['value'].tensor))
