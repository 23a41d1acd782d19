"""Rules for values over all examples: means, sums and shares, and statistics of the shard.

    MEAN    (1/n) sum over e of f(example e)
    SUM     sum over e of f(example e), plus a constant if it has an offset
    SHARE   a constant divided by n

An operation that is linear in them gives one of them again, by arithmetic on these formulas. Any
other operation gives a value of the shard: it goes on as the same on every tower, with a mark that
names the statistic (`State.shard_statistics`), and no loss with such a mark is proven.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.proof.sizes import as_numbers
from towers.proof.states import INDEPENDENT, Kind, State, unknown
from towers.proof.view import View

_States = typing.Sequence[State]


def any_by_example(states: typing.Iterable[State]) -> bool:
    """Whether one of the states at least has entries of single examples."""
    return any(state.is_by_example for state in states)


def any_of_kind(states: typing.Iterable[State], *kinds: Kind) -> bool:
    """Whether any of some states is of one of some kinds."""
    return any(state.kind in kinds for state in states)


def reductions_of(states: typing.Iterable[State]) -> typing.FrozenSet[str]:
    """The names of all operations that took means, sums and shares over the examples."""
    names: typing.FrozenSet[str] = frozenset()
    for state in states:
        names |= state.reductions
    return names


def total(kind: Kind, op: tf.Operation, is_constant: bool = False) -> State:
    """The state of a mean, a sum or a share that an operation takes over the examples."""
    return State(kind, reductions=frozenset([op.name]), is_constant=is_constant)


# ---- what is not linear --------------------------------------------------------------------------

def not_linear(op: tf.Operation, states: _States, view: View,
               why: typing.Optional[str] = None) -> State:
    """A value that depends on means and sums of the shard otherwise than linearly: `mean ** 2`.

    The square of the mean of a shard is not linear in the shards, so that no combination of the
    towers' squares is the square of the batch's mean. Without any mean or sum among the inputs, the
    value is the same on every tower.

    Args:
      op: the operation.
      states: of its inputs, none of which has entries of single examples.
      view: `View`, in which the use of the statistics is noted.
      why: the predicate of a sentence about the operation; without it, that it is not linear.
    """
    numbers = as_numbers(op, states, view)
    for state in numbers:
        if state.kind is Kind.UNKNOWN:
            return state
        if state.is_by_example or state.is_position:
            return unknown(op, 'has no rule for where the examples are in its inputs')
    if why is None:
        what = 'a mean' if any_of_kind(numbers, Kind.MEAN) else 'a sum'
        why = 'is not linear in %s over the examples' % what
    return marks_of_totals(op, numbers, view, why)


def marks_of_totals(op: tf.Operation, states: _States, view: View, why: str) -> State:
    """The marks of some states, and one more for each mean, sum and share among them.

    Args:
      op: the operation that uses them.
      states: the states.
      view: `View`, in which the use is noted.
      why: the predicate of a sentence about the operation; `'%s'` in it is for the statistic.
    """
    totals = [state for state in states if state.is_over_all]
    names = reductions_of(totals)
    for name in names:
        view.note(name, op, why % name if '%s' in why else why)
    return INDEPENDENT.with_marks_of(*states).with_shard_statistics(names)


def shard_statistic(op: tf.Operation, states: _States, view: View, why: str) -> State:
    """A value of all examples that is neither their mean nor their sum: `tf.reduce_max(x, 0)`.

    Args:
      op: the operation that computes it.
      states: those whose marks it has.
      view: `View`, in which it is noted.
      why: the predicate of a sentence about the operation.
    """
    view.note(op.name, op, why)
    return INDEPENDENT.with_marks_of(*states).with_shard_statistics([op.name])


# ---- sums ----------------------------------------------------------------------------------------

def sum_of_totals(op: tf.Operation, states: _States, view: View) -> State:
    """The sum of means, sums and constants, or one of them by a choice that all towers make.

    The sum of two means is the mean of f + g; of a mean and a constant c, the mean of f + c; of two
    sums, the sum of f + g. A sum plus a constant has an offset, which towers that add up would add
    more than once. A mean plus a sum is neither.

    Args:
      op: the operation, to which a refusal points.
      states: of its inputs, none of which has entries of single examples.
      view: `View`.
    """
    marks = INDEPENDENT.with_marks_of(*states)
    totals = [state for state in states if state.is_total]
    shares = [state for state in states if state.kind is Kind.SHARE]
    reductions = reductions_of(totals + shares)
    if shares:
        if len(shares) == len(states):
            return State(Kind.SHARE, reductions=reductions).with_marks_of(marks)
        return not_linear(op, states, view, 'adds a part for each example to what is none')
    if not totals:
        return marks
    kinds = {state.kind for state in totals}
    if len(kinds) > 1:
        return not_linear(op, states, view, 'joins a mean and a sum over the examples')
    if kinds == {Kind.MEAN}:
        return State(Kind.MEAN, reductions=reductions).with_marks_of(marks)
    is_sum_alone = len(totals) == len(states)
    is_constant = is_sum_alone and all(state.is_constant for state in totals)
    has_offset = not is_sum_alone or any(state.has_offset for state in totals)
    found = State(Kind.SUM, reductions=reductions, is_constant=is_constant, has_offset=has_offset)
    return found.with_marks_of(marks)


# ---- products ------------------------------------------------------------------------------------

def product_of_totals(op: tf.Operation, states: _States, view: View) -> State:
    """The product of a mean, a sum or a share, and constants: c mean(f) is the mean of c f.

    Two of them may be multiplied where the number of examples cancels: a mean by that number is a
    sum, a sum by a share is a mean.

    Args:
      op: the operation, to which a refusal points.
      states: of its inputs, none of which has entries of single examples.
      view: `View`.
    """
    factors = [state for state in states if state.is_over_all]
    if len(factors) == 1:
        return factors[0].with_marks_of(*states)
    by_kind = {state.kind: state for state in factors}
    if len(factors) == 2 and set(by_kind) == {Kind.MEAN, Kind.SUM}:
        return _times_count(op, by_kind[Kind.MEAN], by_kind[Kind.SUM], view)
    if len(factors) == 2 and set(by_kind) == {Kind.SUM, Kind.SHARE}:
        return _times_share(op, by_kind[Kind.SUM], by_kind[Kind.SHARE], view)
    return not_linear(op, states, view)


def _times_count(op: tf.Operation, mean: State, count: State, view: View):
    """A mean times a sum: a sum, where that sum is a multiple of the number of examples."""
    if not count.is_count:
        return not_linear(op, [mean, count], view)
    return State(Kind.SUM, reductions=mean.reductions).with_marks_of(mean, count)


def _times_share(op: tf.Operation, sum_: State, share: State, view: View):
    """A sum times a constant divided by the number of examples: a mean."""
    if sum_.has_offset:
        return not_linear(op, [sum_, share], view)
    if sum_.is_constant:
        return INDEPENDENT.with_marks_of(sum_, share)
    return total(Kind.MEAN, op).with_marks_of(sum_, share)


def quotient_of_totals(op: tf.Operation, dividend: State, divisor: State, view: View) -> State:
    """The quotient of two values without the examples: a sum divided by their number is a mean.

    `tf.reduce_sum(f) / n` is the mean of f; `1 / n` is a share, by which a sum may be multiplied.

    Args:
      op: the operation, to which a refusal points.
      dividend: the state of the first input.
      divisor: the state of the second one.
      view: `View`.
    """
    if divisor.kind is Kind.INDEPENDENT and dividend.is_over_all:
        return dividend.with_marks_of(divisor)
    if divisor.is_count:
        if dividend.kind is Kind.INDEPENDENT:
            return total(Kind.SHARE, op).with_marks_of(dividend, divisor)
        if dividend.is_count:
            return INDEPENDENT.with_marks_of(dividend, divisor)
        if dividend.kind is Kind.SUM and not dividend.has_offset:
            return total(Kind.MEAN, op).with_marks_of(dividend, divisor)
    elif divisor.kind is Kind.SUM:
        return not_linear(op, [dividend, divisor], view,
                          'divides by a sum over the examples of the shard')
    return not_linear(op, [dividend, divisor], view)
