"""The batch norms of a forward pass: normalizations by statistics that are proven to be means over
the examples.

In single operations, a batch norm takes a mean over the examples and the mean of the squared
distances from it, which goes into a root; the fused kernel is one operation. A normalization by a
statistic of one example alone (a layer norm) is no batch norm, whatever its dimensions are called.

Words of other modules used here: `SAME_NUMBERS`: the types of the operations that give the numbers
of their first input, in another shape or type perhaps; `Analysis.is_mean`: whether an operation is
a mean over the examples; of a state, `is_by_example`: its entries belong to single examples.
"""

import functools
import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers.graph import graph_walk
from towers.graph.edit import producer_name
from towers.graph.graph_walk import source_through
from towers.graph.op_types import BRANCHES_V2, SAME_NUMBERS, is_fused_batch_norm
from towers.proof.analysis import Analysis
from towers.proof.states import Kind

_SAME_ENTRIES = ('Identity', 'Cast', 'StopGradient')
_ROOTS = ('Rsqrt', 'Sqrt', 'Pow')
# Operations between a variance and its root: an epsilon, a correction, a choice.
_TO_ROOT = SAME_NUMBERS | BRANCHES_V2 | {
    'Add', 'AddV2', 'Switch', 'Merge', 'Select', 'SelectV2', 'Maximum'}
_STEPS_TO_ROOT = 8  # such operations between a variance and its root


class Moments(typing.NamedTuple):
    """The statistics of a batch norm of single operations."""
    mean: tf.Tensor
    variance: tf.Tensor


class BatchNorms(typing.NamedTuple):
    """The normalizations of a forward pass in training mode."""
    # the statistics of the batch norms of single operations
    moments: typing.List[Moments]
    # the batch norms in one kernel
    fused: typing.List[tf.Operation]
    # the kernels, and the operations that compute a variance, for which it is not proven whether
    # their statistics are over the examples
    unproven: typing.List[tf.Operation]

    @property
    def number(self) -> int:
        """How many batch norms take statistics over the examples."""
        return len(self.moments) + len(self.fused)

    def statistics(self) -> typing.Set[str]:
        """The names of all operations that compute statistics over the examples."""
        names = graph_walk.names_of(self.fused)
        for mean, variance in self.moments:
            names.update([mean.op.name, variance.op.name])
        return names


NO_BATCH_NORMS = BatchNorms([], [], [])


def find_batch_norms(analysis: Analysis, operations: typing.Iterable[tf.Operation]) -> BatchNorms:
    """Finds the batch norms among the operations of a forward pass that was analysed."""
    found = BatchNorms([], [], [])
    analysed = analysis.analysed
    for op in operations:
        if op.name not in analysed:  # neither the losses nor any other fetch needs it
            continue
        if is_fused_batch_norm(op.type):
            _add_fused(op, analysis, found)
        else:
            _add_moments(op, analysis, found)
    return found


def _add_fused(op: tf.Operation, analysis: Analysis, found: BatchNorms) -> None:
    """Adds a batch norm in one kernel, if it is in training mode, and its statistics are over the
    examples.

    Args:
      op: the kernel.
      analysis: `Analysis` of the forward pass.
      found: `BatchNorms`, to which it is added.
    """
    if not op.get_attr('is_training'):
        return
    # Where its statistics are over the examples, they are statistics of the shard, for which the
    # rule of the kernel notes a reason (`images.fused_batch_norm`). It notes none where each
    # example is normalized by itself.
    is_over_examples = op.name in analysis.reasons
    if _is_unknown(op.outputs[0], analysis):
        found.unproven.append(op)
    elif is_over_examples:
        found.fused.append(op)


def _add_moments(op: tf.Operation, analysis: Analysis, found: BatchNorms) -> None:
    """Adds the mean and the variance, if an operation computes the variance of a normalization, and
    both are over the examples.

    Args:
      op: the operation.
      analysis: `Analysis` of the forward pass.
      found: `BatchNorms`, to which they are added.
    """
    moments = _moments_of(op)
    if moments is None:
        return
    are_over_examples = (
        analysis.is_mean(moments.mean.op) and analysis.is_mean(moments.variance.op))
    if _is_unknown(moments.mean, analysis) or _is_unknown(moments.variance, analysis):
        found.unproven.append(op)
    elif are_over_examples:  # else they are of one example alone, as in a layer norm
        found.moments.append(moments)


def statistics_of_normalizations(batch_norms: BatchNorms, losses: typing.List[tf.Tensor],
                                 analysis: Analysis) -> typing.Set[str]:
    """The names of the operations that take the statistics of batch norms, as far as a statistic
    goes into the losses by normalized values of the examples alone.

    If a loss also adds a variance up, neither this variance nor its mean are among them, whatever
    they normalize.

    Args:
      batch_norms: `BatchNorms`.
      losses: list of scalars of the analysed forward pass; or of other results, of which some may
        be the normalized values themselves.
      analysis: its `Analysis`.
    """
    into_losses = _ways_into(losses)
    found = {op.name for op in batch_norms.fused
             if _kernel_only_normalizes(op, into_losses, analysis)}
    for mean, variance in batch_norms.moments:
        # Another analysis may have found the batch norms. By this one they may be unproven.
        if not analysis.is_mean(mean.op) or not analysis.is_mean(variance.op):
            continue
        # The variance is computed from the mean: if a loss adds the variance up, it also depends
        # on the mean by more than normalized values.
        mean_normalizes = _only_normalizes(mean, into_losses, analysis, needs_root=False)
        variance_normalizes = _only_normalizes(variance, into_losses, analysis, needs_root=True)
        if mean_normalizes and variance_normalizes:
            found.update([mean.op.name, variance.op.name])
    return found


def _kernel_only_normalizes(op: tf.Operation, ways: '_Ways', analysis: Analysis) -> bool:
    """Whether a batch norm in one kernel goes into the losses by its first result, the normalized
    values, and not by the statistics that it returns beside them."""
    # The kernel has taken the root of the variance itself.
    only_normalizes = functools.partial(
        _only_normalizes, ways=ways, analysis=analysis, needs_root=False)
    return all(map(only_normalizes, op.outputs[1:]))


class _Ways(typing.NamedTuple):
    """The ways of values into the losses."""
    losses: typing.Set[str]  # names of the losses
    operations: typing.Set[str]  # names of the operations that compute the losses


def _ways_into(losses: typing.List[tf.Tensor]) -> _Ways:
    """The operations that compute losses; an operation that these only wait for is not among
    them."""
    return _Ways(graph_walk.names_of(losses), graph_walk.ancestors(losses))


def _only_normalizes(statistic: tf.Tensor, ways: _Ways, analysis: Analysis,
                     needs_root: bool) -> bool:
    """Whether every way of a statistic into the losses leads through values of the examples, as it
    does if the statistic normalizes them.

    Args:
      statistic: the mean or the variance.
      ways: `_Ways` into the losses.
      analysis: `Analysis` of the forward pass.
      needs_root: whether a root has to be taken on the way, as for a variance.
    """
    to_values = functools.partial(_results_before_values, ways, analysis)
    on_ways = graph_walk.reached([statistic], to_values).values()
    before_values = [tensor for tensor in on_ways if not analysis.state(tensor).is_by_example]
    reaches_a_loss = not ways.losses.isdisjoint(graph_walk.names_of(before_values))
    if reaches_a_loss:
        return False
    if not needs_root:
        return True
    to_values_or_roots = functools.partial(_results_before_values, ways, analysis, ends=_ROOTS)
    before_root = graph_walk.reached([statistic], to_values_or_roots).values()
    return not any(analysis.state(tensor).is_by_example for tensor in before_root)


def _results_before_values(ways: _Ways, analysis: Analysis, tensor: tf.Tensor,
                           ends: typing.Container[str] = ()) -> typing.List[tf.Tensor]:
    """The tensors that operations compute from a tensor on its ways into the losses; [] for a value
    of the examples, at which a way ends.

    Args:
      ways: `_Ways` into the losses.
      analysis: `Analysis` of the forward pass.
      tensor: the tensor.
      ends: types of operations whose results do not count.
    """
    if analysis.state(tensor).is_by_example:
        return []
    results: typing.List[tf.Tensor] = []
    for op in graph_walk.with_names(tensor.consumers(), ways.operations):
        if op.type not in ends:
            results += op.outputs
    return results


def _is_unknown(tensor: tf.Tensor, analysis: Analysis) -> bool:
    """Whether nothing is proven of a tensor."""
    return analysis.state(tensor).kind is Kind.UNKNOWN


def _moments_of(op: tf.Operation) -> typing.Optional[Moments]:
    """The mean and the variance, where an operation computes the variance of a normalization.

        mean = Mean(x, axes)
        variance = Mean(SquaredDifference(x, mean), axes), or Mean(Square(Sub(x, mean)), axes)

    The variance goes into a root, and both means are of the same tensor, over the same dimensions.
    """
    difference = _difference_from_mean(op)
    if difference is None:
        return None
    variance = op.outputs[0]
    mean = source_through(difference.inputs[1], SAME_NUMBERS)
    if mean.op.type != 'Mean' or not _goes_into_a_root(variance):
        return None
    # The mean may come in another shape, as a vector. The values may not: in another shape, the
    # axes of the two means would be other dimensions.
    values = source_through(difference.inputs[0], _SAME_ENTRIES)
    values_of_mean = source_through(mean.op.inputs[0], _SAME_ENTRIES)
    if values.name != values_of_mean.name:
        return None
    axes = _static_axes(op)
    if axes is None or axes != _static_axes(mean.op):
        return None
    return Moments(mean, variance)


def _static_axes(mean: tf.Operation) -> typing.Optional[typing.List[int]]:
    """The dimensions over which a `Mean` is taken, counted from the first one, in order; None where
    they are not static. 0, [0] and [-2] are the same dimension of a matrix."""
    axes = tf.get_static_value(mean.inputs[1])
    if axes is None:
        return None
    numbers = np.ravel(axes)
    rank = mean.inputs[0].shape.ndims
    if rank:
        numbers = numbers % rank
    return sorted(numbers.tolist())


def _difference_from_mean(op: tf.Operation) -> typing.Optional[tf.Operation]:
    """The operation that takes the difference `x - mean`, where `op` takes the mean of its squares;
    None for any other operation."""
    if op.type != 'Mean':
        return None
    squares = op.inputs[0].op
    if squares.type == 'SquaredDifference':
        return squares
    if squares.type == 'Square' and squares.inputs[0].op.type == 'Sub':
        return squares.inputs[0].op
    return None


def _goes_into_a_root(variance: tf.Tensor) -> bool:
    """Whether a tensor goes into a root, in a few steps of arithmetic."""
    takers = graph_walk.by_name(variance.consumers())
    for _ in range(_STEPS_TO_ROOT):
        if graph_walk.of_types(takers.values(), _ROOTS):
            return True
        on_the_way = graph_walk.of_types(takers.values(), _TO_ROOT)
        takers = graph_walk.by_name(graph_walk.takers_of_results(on_the_way))
    return bool(graph_walk.of_types(takers.values(), _ROOTS))


def same_means(statistic: tf.Tensor, operations: list) -> typing.List[tf.Tensor]:
    """The results of all operations that compute the same mean, the statistic itself among them:
    two calls of `tf.nn.moments` make two such operations. The shapes of the results may differ, by
    `keepdims`: the caller puts the batch's mean in the place of each result.

    Args:
      statistic: the mean.
      operations: list of the operations among which to look.
    """
    if statistic.op.type != 'Mean':
        return []
    values, axes = statistic.op.inputs
    static_axes = _static_axes(statistic.op)
    found = []
    for op in graph_walk.of_types(operations, ['Mean']):
        is_of_same_values = op.inputs[0].name == values.name
        has_equal_axes = static_axes is not None and _static_axes(op) == static_axes
        has_same_axes = has_equal_axes or op.inputs[1].name == axes.name
        if is_of_same_values and has_same_axes:
            found.append(op.outputs[0])
    return found


def is_variance_node(node: tf.NodeDef, nodes: typing.Dict[str, tf.NodeDef]) -> bool:
    """Whether a node of a function may be a mean of squared distances over its first dimension: the
    variance of a batch norm, which `batch_norm='sync'` refuses in a function.

    Args:
      node: a node of a `FunctionDef`.
      nodes: {name: node} of all nodes of that function.
    """
    if node.op != 'Mean':
        return False
    squares = nodes.get(producer_name(node.input[0]))
    axes = nodes.get(producer_name(node.input[1]))
    if squares is None or squares.op != 'SquaredDifference':
        return False
    if axes is None or axes.op != 'Const':  # any dimensions, perhaps the first one
        return True
    return 0 in np.ravel(tf.make_ndarray(axes.attr['value'].tensor))
