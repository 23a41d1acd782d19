"""Refuses a product of an input with values of the shard, where the input has a column for each
example of the whole batch: the adjacency matrix of a graph whose nodes are the examples.

    A [n, n]                  an input, cut along its first dimension: A_k [n_k, n]
    A_k h_k,  h_k [n_k, m]    fails in the step, since n is not n_k
    A_k batch_concat(h_k)     gives the tower's rows of A h
"""

import typing

import tensorflow.compat.v1 as tf

from towers.errors import ModelFunctionError
from towers.graph.op_types import PLACEHOLDERS
from towers.proof.analysis import Analysis
from towers.proof.states import Kind


class _Factor(typing.NamedTuple):
    """A factor of a matrix product."""
    # the factor; for a sparse factor its `dense_shape`, which is fed when the sparse tensor is fed
    tensor: tf.Tensor
    summed_axis: int  # the dimension that the product adds up over, counted from the last (-1)
    rank: typing.Optional[int]


def check_products_with_inputs(operations: typing.Iterable[tf.Operation], analysis: Analysis,
                               shard: typing.Container[str]) -> None:
    """Raises `ModelFunctionError` for a product A_k h_k of the module's docstring: A_k has a column
    for each example of the batch, and h_k a row for each example of one shard.

    Args:
      operations: the operations of the forward pass.
      analysis: the analysis of this forward pass.
      shard: the names of the operations that give the shard.
    """
    for op in operations:
        factors = _factors(op)
        for one, other in zip(factors, reversed(factors)):  # of A B: (A, B), and (B, A)
            if _is_whole(one, shard) and _is_over_examples(other, analysis):
                raise ModelFunctionError(
                    '%s (%s) multiplies %s, which has a column for each example of the batch, with '
                    'values of the examples of one shard, %s: put towers.batch_concat around '
                    'these, for those of all shards.' % (
                        op.name, op.type, one.tensor.name, other.tensor.name))


def _factors(op: tf.Operation) -> typing.List[_Factor]:
    """The two factors of a matrix product; [] for any other operation."""
    if op.type == 'MatMul':
        first, second = op.inputs
        is_first_transposed = op.get_attr('transpose_a')
        is_second_transposed = op.get_attr('transpose_b')
        rank_of_first = first.shape.ndims
    elif op.type == 'SparseTensorDenseMatMul':
        # A sparse matrix is three inputs; its `dense_shape` stands for it, see `_Factor`.
        _unused_indices, _unused_values, first, second = op.inputs
        is_first_transposed = op.get_attr('adjoint_a')
        is_second_transposed = op.get_attr('adjoint_b')
        rank_of_first = 2
    else:
        return []
    # A B adds up over the last dimension of A, and over the one before the last of B.
    summed_axis_of_first = -2 if is_first_transposed else -1
    summed_axis_of_second = -1 if is_second_transposed else -2
    return [_Factor(first, summed_axis_of_first, rank_of_first),
            _Factor(second, summed_axis_of_second, second.shape.ndims)]


def _is_whole(factor: _Factor, shard: typing.Container[str]) -> bool:
    """Whether a factor is what the program feeds, and is whole along the dimension that the product
    adds up over."""
    op = factor.tensor.op
    is_in_inputs = op.name in shard
    if not is_in_inputs:
        return op.type in PLACEHOLDERS  # every tower gets the whole of what is fed beside inputs
    # An input is cut along its first dimension, and whole along the others.
    if factor.rank is None:  # which dimension is the first one is not known
        return False
    first_axis = -factor.rank  # counted from the last one, as `summed_axis` is
    return factor.summed_axis != first_axis


def _is_over_examples(factor: _Factor, analysis: Analysis) -> bool:
    """Whether the product adds up over the dimension of a factor that has the shard's examples."""
    state = analysis.state(factor.tensor)
    if state.kind is not Kind.PER_EXAMPLE or factor.rank is None:
        return False
    return state.axis == factor.rank + factor.summed_axis
