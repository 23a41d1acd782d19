"""Rules for arithmetic: element by element, over dimensions, and products of matrices.

An operation on single entries keeps the examples where they are. A mean or a sum over the examples
stays one where the operation is linear in it; else its result is marked with the statistic.
"""

import numpy as np
import tensorflow.compat.v1 as tf

from towers.proof.sizes import arithmetic_of_sizes, prod_of_sizes, used
from towers.proof.states import INDEPENDENT, Kind, State, per_example, unknown

_BY_ITSELF = 'is not linear in %s over the examples'
_ROUNDS = 'rounds the numbers of the examples'
_WIDE_INTEGERS = (tf.int32, tf.int64)


# ---- element by element --------------------------------------------------------------------------

def elementwise(op, states, view):
    """A function of single entries, not known to be linear: `tf.exp`, `tf.maximum`, …"""
    sizes = arithmetic_of_sizes(op, states, view)
    if sizes is not None:
        return sizes
    states = [used(op, state, view) for state in states]
    if any(state.is_by_example for state in states):
        return by_example(op, states, view)
    return estimate(op, states, view)


def linear(op, states, view):
    """A function of one input that is linear: a mean of its results is the result of the mean."""
    state = states[0]
    if len(states) > 1 or state.kind is Kind.SIZES:
        return elementwise(op, states, view)
    return state


def cast(op, states, view):
    """`tf.cast`: linear between types of numbers that do not round."""
    state, dtype = states[0], op.outputs[0].dtype
    if state.kind is Kind.NUMBER:
        return state if dtype in _WIDE_INTEGERS else unknown(op, _ROUNDS)
    if state.kind is Kind.SIZES:
        return state if dtype in _WIDE_INTEGERS or dtype.is_floating else estimate(op, states, view)
    if state.is_total or state.kind is Kind.SHARE:
        return state if dtype.is_floating else estimate(op, states, view)
    return state


def add(op, states, view):
    """Sums and differences: the sum of means is a mean, the sum of sums a sum."""
    sizes = arithmetic_of_sizes(op, states, view)
    if sizes is not None:
        return sizes
    states = [used(op, state, view) for state in states]
    if any(state.is_by_example for state in states):
        return by_example(op, states, view)
    return joined_totals(op, states, view)


def joined_totals(op, states, view):
    """The sum of means, sums and constants, or one of them by a choice that all towers make."""
    marks = INDEPENDENT.marked(states)
    totals = [state for state in states if state.is_total]
    shares = [state for state in states if state.kind is Kind.SHARE]
    if shares:
        if len(shares) == len(states):
            statistics = frozenset().union(*(state.statistics for state in shares))
            return State(Kind.SHARE, statistics=statistics).marked([marks])
        return estimate(op, states, view, 'adds a part for each example to what is none')
    if not totals:
        return marks
    if len({state.kind for state in totals}) > 1:
        return estimate(op, states, view, 'joins a mean and a sum over the examples')
    statistics = frozenset().union(*(state.statistics for state in totals))
    if totals[0].kind is Kind.MEAN:
        return State(Kind.MEAN, statistics=statistics).marked([marks])
    is_all = len(totals) == len(states)
    return State(Kind.SUM, statistics=statistics,
                 is_constant=is_all and all(state.is_constant for state in totals),
                 has_offset=not is_all or any(state.has_offset for state in totals)).marked([marks])


def multiply(op, states, view):
    """Products: a factor that is the same on every tower keeps a mean a mean."""
    sizes = arithmetic_of_sizes(op, states, view)
    if sizes is not None:
        return sizes
    states = [used(op, state, view) for state in states]
    if any(state.is_by_example for state in states):
        return by_example(op, states, view)
    totals = [state for state in states if state.is_total]
    shares = [state for state in states if state.kind is Kind.SHARE]
    factors = totals + shares
    if len(factors) == 1:
        return factors[0].marked(states)
    if len(totals) == 1 and len(shares) == 1:
        return _times_share(op, totals[0], shares[0], view)
    if [state.kind for state in factors] in ([Kind.MEAN, Kind.SUM], [Kind.SUM, Kind.MEAN]):
        return _times_count(op, factors, view)
    return estimate(op, states, view)


def _times_count(op, states, view):
    """A mean times a sum: a sum, where that sum is a multiple of the number of examples."""
    mean, total = sorted(states, key=lambda state: state.kind is Kind.SUM)
    if total.is_count:
        return State(Kind.SUM, statistics=mean.statistics).marked(states)
    return estimate(op, states, view)


def _times_share(op, total, share, view):
    """A sum times a constant divided by the number of examples: a mean."""
    if total.kind is not Kind.SUM or total.has_offset:
        return estimate(op, [total, share], view)
    if total.is_constant:
        return INDEPENDENT.marked([total, share])
    return State(Kind.MEAN, statistics=frozenset([op.name])).marked([total, share])


def divide(op, states, view):
    """Quotients: a sum divided by the number of examples is a mean."""
    if op.outputs[0].dtype.is_integer:  # which rounds
        return elementwise(op, states, view)
    dividend, divisor = [used(op, state, view) for state in states]
    if dividend.is_by_example or divisor.is_by_example:
        return by_example(op, [dividend, divisor], view)
    marks = INDEPENDENT.marked([dividend, divisor])
    if divisor.kind is Kind.INDEPENDENT and (dividend.is_total or dividend.kind is Kind.SHARE):
        return dividend.marked([divisor])
    if dividend.kind is Kind.INDEPENDENT and divisor.is_count:
        return State(Kind.SHARE, statistics=frozenset([op.name])).marked([marks])
    if dividend.kind is Kind.SUM and divisor.is_count and not dividend.has_offset:
        if dividend.is_constant:
            return marks
        return State(Kind.MEAN, statistics=frozenset([op.name])).marked([marks])
    if divisor.kind is Kind.SUM and not divisor.is_count:
        return estimate(op, [dividend, divisor], view,
                        'divides by a sum over the examples of the shard')
    return estimate(op, [dividend, divisor], view)


def select(op, states, view):
    """`tf.where` with two values: a choice between them that all towers make alike keeps both."""
    condition, values = states[0], [used(op, state, view) for state in states[1:]]
    condition = used(op, condition, view)
    if any(state.is_by_example for state in [condition] + values):
        if op.type == 'Select' and view.rank(op.inputs[0]) == 1 and (
                condition.kind is Kind.PER_EXAMPLE):
            return _chosen_rows(op, condition, values, view)
        return by_example(op, [condition] + values, view)
    if condition.kind is Kind.INDEPENDENT and not condition.estimated:
        return joined_totals(op, values, view).marked([condition])
    return estimate(op, [condition] + values, view)


def _chosen_rows(op, condition, values, view):
    """`tf.where(condition [n], x [n, …], y [n, …])`: chooses whole rows."""
    for state in values:
        if state.kind is not Kind.PER_EXAMPLE or (state.axis, state.outer, state.inner) != (
                0, condition.outer, condition.inner):
            return unknown(op, 'chooses rows that are not known to be of the same examples')
    return per_example(0, condition.outer, condition.inner).marked([condition] + values)


def by_example(op, states, view):
    """A function of single entries, at least one input of which has entries of single examples."""
    marks = _marks_of_totals(op, states, view, "gives each example a value of all examples ('%s')")
    pairs = [(tensor, state) for tensor, state in zip(op.inputs, states) if state.is_by_example]
    if any(state.kind is Kind.ONE_EXAMPLE for _, state in pairs):
        if any(state.kind is not Kind.ONE_EXAMPLE for _, state in pairs):
            return unknown(op, 'joins one example with the whole batch')
        return State(Kind.ONE_EXAMPLE).marked([marks])
    rank = view.rank(op.outputs[0])
    layouts = set()
    for tensor, state in pairs:
        if rank is None or view.rank(tensor) is None:
            return unknown(op, 'has a rank that is not static')
        layouts.add((state.kind, state.axis - view.rank(tensor), state.outer, state.inner,
                     state.rows_of))
    if len(layouts) > 1:
        return unknown(op, 'brings examples together with each other')
    kind, axis_from_end, outer, inner, rows_of = layouts.pop()
    for tensor, state in zip(op.inputs, states):
        is_alike = state.is_uniform or _is_alike_along(tensor, axis_from_end, view)
        if not state.is_by_example and not is_alike:
            return unknown(op, 'joins the examples with a tensor that has a size of its own there')
    is_constant = all(state.is_constant or not state.is_by_example and not state.is_total
                      for state in states)
    return State(kind, rank + axis_from_end, outer, inner, rows_of,
                 is_constant=is_constant).marked([marks])


def _marks_of_totals(op, states, view, why):
    """The marks of some states, and each mean, sum and share among them as one."""
    marks = INDEPENDENT.marked(states)
    for state in states:
        if not state.is_total and state.kind is not Kind.SHARE:
            continue
        for name in state.statistics:
            view.note(name, op, why % name if '%s' in why else why)
        marks = marks._replace(estimated=marks.estimated | state.statistics)
    return marks


def _is_alike_along(tensor, axis_from_end, view):
    """Whether a tensor is broadcast along a dimension, counted from the last (-1)."""
    shape = view.shape(tensor)
    if shape is None:
        return False
    return len(shape) < -axis_from_end or shape[axis_from_end] == 1


def estimate(op, states, view, why=None):
    """A value that depends on statistics of the shard otherwise than linearly; without any of them,
    it is the same on every tower."""
    states = [used(op, state, view) for state in states]
    for state in states:
        if state.kind is Kind.UNKNOWN:
            return state
        if state.is_by_example or state.kind in (Kind.NUMBER, Kind.PLACES):
            return unknown(op, 'has no rule for where the examples are in its inputs')
    if why is not None:
        return _marks_of_totals(op, states, view, why)
    has_mean = any(state.kind is Kind.MEAN for state in states)
    return _marks_of_totals(op, states, view, _BY_ITSELF % ('a mean' if has_mean else 'a sum'))


def statistic(op, states, view, why):
    """A value of all examples of the shard that is neither their mean nor their sum."""
    view.note(op.name, op, why)
    return INDEPENDENT.marked(states)._replace(
        estimated=INDEPENDENT.marked(states).estimated | {op.name})


# ---- over dimensions -----------------------------------------------------------------------------

def reduce(op, states, view):
    """Reductions: a mean or a sum over the examples' dimension, or over others."""
    state = states[0]
    if state.kind is Kind.SIZES:
        total = prod_of_sizes(op, states, view)
        if total is not None:
            return total
        state = used(op, state, view)
    marks = INDEPENDENT.marked(states)
    is_linear = op.type == 'Sum' or op.type == 'Mean' and op.outputs[0].dtype.is_floating
    if state.is_total and is_linear:
        return state.marked([marks])
    if not state.is_by_example:
        return estimate(op, [state] + list(states[1:]), view)
    if state.kind is Kind.ONE_EXAMPLE:
        return state.marked([marks])
    axes = _axes(op, view)
    if axes is None:
        return unknown(op, 'reduces dimensions that are not static')
    if state.axis in axes:
        return over_examples(op, state, view).marked([marks])
    is_kept = 'keep_dims' in op.node_def.attr and op.get_attr('keep_dims')
    before = sum(axis < state.axis for axis in axes)
    is_constant = state.is_constant and op.type in ('Mean', 'Sum')
    return state._replace(axis=state.axis if is_kept else state.axis - before,
                          is_constant=is_constant).marked([marks])


def _axes(op, view):
    """The dimensions that a reduction is over, from 0; None where they are not static."""
    rank, axes = view.rank(op.inputs[0]), view.value(op.inputs[1])
    if axes is None or rank is None:
        return None
    return [int(axis) % rank for axis in np.ravel(axes)]


def over_examples(op, state, view):
    """The reduction of entries of single examples, over their dimension."""
    statistics = frozenset([op.name])
    if op.type == 'Mean' and op.outputs[0].dtype.is_integer:
        return statistic(op, [], view, 'is a mean of integers, which is rounded')
    if op.type == 'Sum':
        return State(Kind.SUM, statistics=statistics, is_constant=state.is_constant)
    if op.type == 'Mean' and state.kind is Kind.PER_EXAMPLE:
        return INDEPENDENT if state.is_constant else State(Kind.MEAN, statistics=statistics)
    if op.type == 'Mean':
        return statistic(op, [], view, 'is a mean over rows of which examples have different '
                                       'numbers')
    if state.is_constant and op.type in ('Max', 'Min', 'All', 'Any'):
        return INDEPENDENT
    return statistic(op, [], view, 'is taken over the examples of the shard')


def l2_loss(op, states, view):
    """`tf.nn.l2_loss`: half the sum of the squares of all entries."""
    state = used(op, states[0], view)
    if state.kind in (Kind.PER_EXAMPLE, Kind.ROWS):
        return State(Kind.SUM, statistics=frozenset([op.name])).marked([state])
    return state if state.kind is Kind.ONE_EXAMPLE else estimate(op, [state], view)


def bias_add_gradient(op, states, view):
    """The gradient of a bias: the sum over all dimensions but that of the channels."""
    state, rank = states[0], view.rank(op.inputs[0])
    if state.kind is not Kind.PER_EXAMPLE or rank is None or state.axis != 0 or rank < 2:
        return unknown(op, 'has no rule for where the examples are in its inputs')
    return State(Kind.SUM, statistics=frozenset([op.name])).marked(states)


def along_last(op, states, view):
    """Softmax and its losses: over the last dimension of each input, element by element before."""
    states = [used(op, state, view) for state in states]
    if not any(state.is_by_example for state in states):
        return estimate(op, states, view)
    if any(state.kind is Kind.ONE_EXAMPLE for state in states):
        return by_example(op, states, view)
    for tensor, state in zip(op.inputs, states):
        if view.rank(tensor) is None:
            return unknown(op, 'has a rank that is not static')
        if not state.is_by_example and not _has_one_row(tensor, view):
            return unknown(op, 'joins the examples with a tensor that has a size of its own there')
    by_examples = [state for state in states if state.is_by_example]
    if len({state[:5] for state in by_examples}) > 1:
        return unknown(op, 'brings examples together with each other')
    state = by_examples[0]._replace(is_constant=False).marked(states)
    if not _is_over_examples(op, states, view):
        return state
    if op.type not in ('Softmax', 'LogSoftmax'):
        return unknown(op, 'is taken over the examples of the shard')
    view.note(op.name, op, 'is taken over the examples of the shard')
    return state._replace(estimated=state.estimated | {op.name})


def _has_one_row(tensor, view):
    """Whether a tensor is a scalar, or is broadcast along its first dimension."""
    shape = view.shape(tensor)
    return shape is not None and (not shape or shape[0] == 1)


def _is_over_examples(op, states, view):
    """Whether the examples are along the last dimension of an input, labels [n] left out."""
    tensors = list(op.inputs)
    if op.type.startswith('Sparse'):
        tensors = tensors[:1]
    for tensor, state in zip(tensors, states):
        if state.is_by_example and state.axis == view.rank(tensor) - 1:
            return True
    return False


def largest(op, states, view):
    """`tf.nn.top_k`, `tf.nn.in_top_k`: over the last dimension."""
    state = states[0]
    if state.kind is Kind.ONE_EXAMPLE or not state.is_by_example:
        return elementwise(op, states, view)
    if view.rank(op.inputs[0]) is None or state.axis == view.rank(op.inputs[0]) - 1:
        return statistic(op, states, view, 'chooses among the examples of the shard')
    if op.type.startswith('InTopK'):
        labels = states[1]
        if labels.kind is not Kind.PER_EXAMPLE or labels[:4] != state[:4]:
            return unknown(op, 'has labels that are not known to be of the same examples')
    return state._replace(is_constant=False).marked(states)


# ---- products of matrices ------------------------------------------------------------------------

_MIXES = 'multiplies examples with each other'


def matmul(op, states, view):
    """Products of matrices, as the product of letters `bij,bjk->bik`."""
    factors = [used(op, state, view) for state in states[:2]]
    ranks = [view.rank(tensor) for tensor in list(op.inputs)[:2]]
    if not any(state.is_by_example for state in factors):
        return multiply(op, factors, view)
    if any(state.kind is Kind.ONE_EXAMPLE for state in factors):
        return by_example(op, factors, view)
    if None in ranks:
        return unknown(op, 'has a rank that is not static')
    left_is_transposed, right_is_transposed = _transposes(op)
    batch = 'abcdefgh'[:max(ranks) - 2]
    left = batch[len(batch) - (ranks[0] - 2):] + ('ji' if left_is_transposed else 'ij')
    right = batch[len(batch) - (ranks[1] - 2):] + ('kj' if right_is_transposed else 'jk')
    return _product(op, factors, [left, right], batch + 'ik', view)


def _transposes(op):
    """`(whether the left factor is transposed, whether the right one is)`."""
    if op.type == 'MatMul':
        return op.get_attr('transpose_a'), op.get_attr('transpose_b')
    return op.get_attr('adj_x'), op.get_attr('adj_y')


def einsum(op, states, view):
    """`tf.einsum`: products and sums by letters."""
    factors = [used(op, state, view) for state in states]
    equation = op.get_attr('equation').decode().replace(' ', '')
    if not any(state.is_by_example for state in factors):
        return multiply(op, factors, view) if len(factors) == 2 else estimate(op, factors, view)
    if any(state.kind is Kind.ONE_EXAMPLE for state in factors):
        return by_example(op, factors, view)
    if '.' in equation:
        return unknown(op, 'has an equation with an ellipsis')
    terms, result = equation.split('->')
    return _product(op, factors, terms.split(','), result, view)


def _product(op, factors, terms, result, view):
    """The product of tensors whose dimensions are letters, summed over those not in the result.

    The examples have a letter. In the result, they are where it is; if it is summed over, and all
    factors have the examples there, the result is a sum of one product for each example.
    """
    if any(state.is_total for state in factors):
        return unknown(op, 'multiplies examples with a value of all of them')
    layouts = set()
    for state, term in zip(factors, terms):
        if state.is_by_example:
            layouts.add((term[state.axis], state.kind, state.outer, state.inner, state.rows_of))
    if len(layouts) > 1:
        return unknown(op, _MIXES)
    letter, kind, outer, inner, rows_of = layouts.pop()
    for tensor, state, term in zip(op.inputs, factors, terms):
        is_broadcast = letter in term and _length(tensor, term.index(letter), view) == 1
        if not state.is_by_example and letter in term and not is_broadcast:
            return unknown(op, 'joins the examples with a tensor that has a size of its own there')
    marks = INDEPENDENT.marked(factors)
    if letter in result:
        return State(kind, result.index(letter), outer, inner, rows_of).marked([marks])
    if not all(state.is_by_example or letter not in term for state, term in zip(factors, terms)):
        return unknown(op, 'adds up over the examples')
    return State(Kind.SUM, statistics=frozenset([op.name])).marked([marks])


def _length(tensor, axis, view):
    """The length of a dimension, or None."""
    shape = view.shape(tensor)
    return None if shape is None else shape[axis]
