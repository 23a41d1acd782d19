"""Rules for operations over dimensions: means, sums, maxima, softmax, the largest entries.

Over another dimension than the examples', the result has an entry of each example. Over that of the
examples, the mean and the sum have states of their own; all else is a statistic of the shard.
"""

import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers.proof.rules.entries import (
    by_example,
    elementwise,
    of_equal_lengths,
)
from towers.proof.rules.shapes import prod_of_sizes
from towers.proof.rules.totals import (
    any_by_example,
    any_of_kind,
    not_linear,
    shard_statistic,
    total,
)
from towers.proof.sizes import as_number, as_numbers
from towers.proof.states import HAS_OWN_SIZE, INDEPENDENT, NO_STATIC_RANK, Kind, State, unknown
from towers.proof.view import View

_States = typing.Sequence[State]

_OVER_EXAMPLES = 'is taken over the examples of the shard'


def reduce(op: tf.Operation, states: _States, view: View) -> State:
    """Reductions: of x [n, 4], over dimension 1 a value for each example, over 0 one of all.

    The mean over dimension 1 of a mean over the examples is a mean over them, since both are
    linear.
    """
    state = states[0]
    if state.kind is Kind.SIZES:
        sizes = prod_of_sizes(op, list(states), view)
        if sizes is not None:
            return sizes
        state = as_number(op, state, view)
    is_linear = op.type == 'Sum' or op.type == 'Mean' and op.outputs[0].dtype.is_floating
    if state.kind is Kind.ONE_EXAMPLE or state.is_total and is_linear:
        return state.with_marks_of(*states)
    if not state.is_by_example:
        return not_linear(op, [state] + list(states[1:]), view)
    axes = _axes(op, view)
    if axes is None:
        return unknown(op, 'reduces dimensions that are not static')
    if state.axis in axes:
        return reduce_examples(op, state, view).with_marks_of(*states)
    keeps_dimensions = 'keep_dims' in op.node_def.attr and op.get_attr('keep_dims')
    dropped = 0 if keeps_dimensions else sum(axis < state.axis for axis in axes)
    is_constant = state.is_constant and op.type in ('Mean', 'Sum')
    found = state._replace(axis=state.axis - dropped, is_constant=is_constant)
    return found.with_marks_of(*states)


def _axes(op: tf.Operation, view: View) -> typing.Optional[typing.List[int]]:
    """The dimensions that a reduction is over, from 0; None where they are not static."""
    rank = view.rank(op.inputs[0])
    axes = view.value(op.inputs[1])
    if axes is None or rank is None:
        return None
    return [int(axis) % rank for axis in np.ravel(axes)]


def reduce_examples(op: tf.Operation, state: State, view: View) -> State:
    """The reduction of entries of single examples, over their dimension.

    The mean of x [n, 4] over dimension 0 is a mean over the examples. That of rows, of which
    examples have different numbers, divides by the number of rows of the shard. The mean of ones
    [n] is 1, whatever n is.
    """
    if op.type == 'Mean' and op.outputs[0].dtype.is_integer:
        return shard_statistic(op, [], view, 'is a mean of integers, which is rounded')
    if op.type == 'Mean' and state.kind is Kind.ROWS:
        return shard_statistic(
            op, [], view, 'is a mean over rows of which examples have different numbers')
    if op.type == 'Sum':
        return total(Kind.SUM, op, state.is_constant)
    if state.is_constant and op.type in ('Mean', 'Max', 'Min', 'All', 'Any'):
        return INDEPENDENT
    if op.type == 'Mean':
        return total(Kind.MEAN, op)
    return shard_statistic(op, [], view, _OVER_EXAMPLES)


def l2_loss(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.nn.l2_loss`: half the sum of the squares of all entries, and so of all examples."""
    state = as_number(op, states[0], view)
    if state.kind in (Kind.PER_EXAMPLE, Kind.ROWS):
        return total(Kind.SUM, op).with_marks_of(state)
    if state.kind is Kind.ONE_EXAMPLE:
        return state
    return not_linear(op, [state], view)


def bias_add_gradient(op: tf.Operation, states: _States, view: View) -> State:
    """The gradient of a bias [d]: the sum of [n, …, d] over all dimensions but the last."""
    state = states[0]
    rank = view.rank(op.inputs[0])
    is_of_examples = state.kind is Kind.PER_EXAMPLE and state.axis == 0
    if not is_of_examples or rank is None or rank < 2:
        return unknown(op, 'has no rule for where the examples are in its inputs')
    return total(Kind.SUM, op).with_marks_of(*states)


# ---- along the last dimension --------------------------------------------------------------------

def along_last(op: tf.Operation, states: _States, view: View) -> State:
    """Softmax and its losses: each row of x [n, 4] along the last dimension by itself.

    A loss takes logits [n, 4] and labels [n] or [n, 4], which have the examples in the same place.
    """
    numbers = as_numbers(op, states, view)
    if not any_by_example(numbers):
        return not_linear(op, numbers, view)
    if any_of_kind(numbers, Kind.ONE_EXAMPLE):
        return by_example(op, numbers, view)
    layouts = set()
    for tensor, state in zip(op.inputs, numbers):
        if view.rank(tensor) is None:
            return unknown(op, NO_STATIC_RANK)
        if state.is_by_example:
            layouts.add(state.layout)
        elif not _has_one_row(tensor, view):
            return unknown(op, HAS_OWN_SIZE)
    layouts = of_equal_lengths(layouts)
    if len(layouts) > 1:
        return unknown(op, 'brings examples together with each other')
    found = State(*layouts.pop()).with_marks_of(*numbers)
    if not _is_over_examples(op, numbers, view):
        return found
    if op.type not in ('Softmax', 'LogSoftmax'):
        return unknown(op, _OVER_EXAMPLES)
    view.note(op.name, op, _OVER_EXAMPLES)
    return found.with_shard_statistics([op.name])


def _has_one_row(tensor: tf.Tensor, view: View):
    """Whether a tensor is a scalar, or is broadcast along its first dimension."""
    shape = view.shape(tensor)
    return shape is not None and (not shape or shape[0] == 1)


def _is_over_examples(op: tf.Operation, states: _States, view: View):
    """Whether the examples are along the last dimension of an input, labels [n] left out."""
    tensors = list(op.inputs)
    if op.type.startswith('Sparse'):
        tensors = tensors[:1]
    for tensor, state in zip(tensors, states):
        rank = view.rank(tensor)
        if state.is_by_example and rank is not None and state.axis == rank - 1:
            return True
    return False


def largest(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.nn.top_k`, `tf.nn.in_top_k`: of each row of x [n, 4] along the last dimension."""
    state = states[0]
    if state.kind is Kind.ONE_EXAMPLE or not state.is_by_example:
        return elementwise(op, states, view)
    rank = view.rank(op.inputs[0])
    if rank is None or state.axis == rank - 1:
        return shard_statistic(op, states, view, 'chooses among the examples of the shard')
    if op.type.startswith('InTopK'):
        labels = states[1]
        if labels.layout != state.layout:
            return unknown(op, 'has labels that are not known to be of the same examples')
    return state._replace(is_constant=False).with_marks_of(*states)
