"""Refuses a product of an input with values of the shard, where the input has a column for each
example of the whole batch: the adjacency matrix of a graph whose nodes are the examples.

    A [n, n]                  an input, cut along its first dimension: A_k [n_k, n]
    A_k h_k,  h_k [n_k, m]    fails in the step, since n is not n_k
    A_k batch_concat(h_k)     the rows of A h that are the tower's
"""

import typing

import tensorflow.compat.v1 as tf

from towers.errors import ModelFunctionError
from towers.graph.op_types import PLACEHOLDERS
from towers.proof.analysis import Analysis
from towers.proof.states import Kind


class _Factor(typing.NamedTuple):
    """A factor of a matrix product."""
    tensor: tf.Tensor  # the dense shape of a sparse factor, as its shape tells what is asked here
    summed_axis: int  # the dimension that the product adds up over, counted from the last (-1)
    rank: typing.Optional[int]


def check_products_with_inputs(operations: typing.Iterable[tf.Operation], analysis: Analysis,
                               shard: typing.Container[str]) -> None:
    """Raises `ModelFunctionError` for a product of an input, with a column for each example of the
    batch, with values of the examples of one shard.

    Args:
      operations: those of the forward pass.
      analysis: the analysis of this forward pass.
      shard: the names of the operations that give the shard.
    """
    for op in operations:
        factors = _factors(op)
        for one, other in zip(factors, reversed(factors)):
            if _is_whole(one, shard) and _is_over_examples(other, analysis):
                raise ModelFunctionError(
                    '%s (%s) multiplies %s, which has a column for each example of the batch, with '
                    'values of the examples of one shard, %s: put towers.batch_concat around '
                    'these, for those of all shards.' % (
                        op.name, op.type, one.tensor.name, other.tensor.name))


def _factors(op: tf.Operation) -> typing.List[_Factor]:
    """The two factors of a matrix product; of other operations none."""
    if op.type == 'MatMul':
        first, second = op.inputs
        is_first_transposed = op.get_attr('transpose_a')
        is_second_transposed = op.get_attr('transpose_b')
        rank = first.shape.ndims
    elif op.type == 'SparseTensorDenseMatMul':
        _, _, first, second = op.inputs  # indices, values, dense shape; the dense factor
        is_first_transposed = op.get_attr('adjoint_a')
        is_second_transposed = op.get_attr('adjoint_b')
        rank = 2
    else:
        return []
    return [_Factor(first, -2 if is_first_transposed else -1, rank),
            _Factor(second, -1 if is_second_transposed else -2, second.shape.ndims)]


def _is_whole(factor: _Factor, shard: typing.Container[str]) -> bool:
    """Whether a factor is an input, or is fed, and is not cut along the dimension that the product
    adds up over."""
    op = factor.tensor.op
    if op.name in shard:
        # An input of the model function is cut along its first dimension.
        return factor.rank is not None and factor.summed_axis != -factor.rank
    return op.type in PLACEHOLDERS


def _is_over_examples(factor: _Factor, analysis: Analysis) -> bool:
    """Whether the product adds up over the dimension of a factor that has the shard's examples."""
    state = analysis.state(factor.tensor)
    if state.kind is not Kind.PER_EXAMPLE or factor.rank is None:
        return False
    return state.axis == factor.rank + factor.summed_axis
