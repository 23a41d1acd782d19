"""Rules for values over all examples: means, sums and shares, and statistics of the shard.

    MEAN    (1/n) sum over e of f(example e)
    SUM     sum over e of f(example e), plus a constant if it has an offset
    SHARE   a constant divided by n

An operation that is linear in means, sums and shares gives a mean, a sum or a share again, by
arithmetic on these formulas. Any other operation gives a value of the shard. Its state is
INDEPENDENT, with a mark that names the statistic (`State.shard_statistics`); no loss with such a
mark is proven.

The inputs of the rules in this module have no entries of single examples: each is a mean, a sum, a
share, or the same on every tower (INDEPENDENT).

Words of other modules: a state with `is_count` is a multiple of the number of examples, such as
2 n. A SUM with `is_constant` is a sum to which each example adds the same number; it is a count,
unless it `has_offset`.
"""

import functools
import typing

import tensorflow.compat.v1 as tf

from towers.proof.rules.common import (
    Results,
    any_of_kind,
    kinds_of,
    tell_of_examples,
)
from towers.proof.sizes import as_numbers
from towers.proof.states import INDEPENDENT, Kind, State, first_unknown, unknown
from towers.proof.view import View

_States = typing.Sequence[State]


def total(kind: Kind, op: tf.Operation, is_constant: bool = False) -> State:
    """The state of a mean, a sum or a share that an operation takes over the examples.

    Args:
      kind: MEAN, SUM or SHARE.
      op: the operation.
      is_constant: whether each example adds the same number to a sum, as in the sum of ones [n].
    """
    return State(kind, reductions=frozenset([op.name]), is_constant=is_constant)


def reductions_of(states: typing.Iterable[State]) -> typing.FrozenSet[str]:
    """The names of all operations that took means, sums and shares over the examples."""
    names: typing.FrozenSet[str] = frozenset()
    for state in states:
        names |= state.reductions
    return names


# ---- what is not linear --------------------------------------------------------------------------

def not_linear(op: tf.Operation, states: _States, view: View,
               why: typing.Optional[str] = None) -> State:
    """The state of a value that an operation does not compute linearly: `tf.exp(m)`, `m ** 2`.

    By the inputs of the operation the result is:

        inputs that are the same on every tower    the same on every tower
        a mean or a sum m of the shard             INDEPENDENT, but marked with m: no combination of
                                                   the towers' squares of their means is the square
                                                   of the batch's mean
        an unknown input                           unknown
        entries of single examples, positions      unknown: the rule that has called this function
                                                   has no answer for where the examples are

    Args:
      op: the operation.
      states: the states of its inputs.
      view: `View`, in which the use of the means and sums is noted.
      why: the reason, the predicate of a sentence about the operation; by default 'is not linear in
        a mean over the examples', or 'in a sum'.
    """
    states = as_numbers(op, states, view)
    not_known = first_unknown(states)
    if not_known is not None:
        return not_known
    if tell_of_examples(states):
        return unknown(op, 'has no rule for where the examples are in its inputs')
    if why is None:
        statistic = 'a mean' if any_of_kind(states, Kind.MEAN) else 'a sum'
        why = 'is not linear in %s over the examples' % statistic
    return marks_of_totals(op, states, view, why)


def for_examples(rule: typing.Callable) -> typing.Callable:
    """Decorator: makes the rule of an operation that is not linear, for all inputs, from a function
    for inputs that tell of single examples. Where no input tells of single examples, `not_linear`
    gives the state of the result.

    Args:
      rule: function of the operation, the states of its inputs, and the view. At least one input
        has entries of single examples, or positions.
    """
    @functools.wraps(rule)
    def whole_rule(op: tf.Operation, states: _States, view: View) -> Results:
        """The rule for inputs of any state."""
        if tell_of_examples(states):
            return rule(op, states, view)
        return not_linear(op, states, view)
    return whole_rule


def marks_of_totals(op: tf.Operation, states: _States, view: View, why: str) -> State:
    """The state INDEPENDENT, with the marks of all inputs, and one more mark for each mean, sum and
    share among the inputs. A caller returns this state for a result, or adds its marks to another
    state.

    Args:
      op: the operation that uses the means, sums and shares, but not linearly.
      states: the states of its inputs.
      view: `View`, in which the reason of each mark is noted.
      why: the reason, the predicate of a sentence about the operation. It may have a place `%s` for
        the name of the mean, the sum or the share: "gives each example a value of all (%s)".
    """
    statistics = reductions_of(states)
    for name in statistics:
        # The number of examples has the name of the operation that uses it as a number.
        total = 'their number' if name == op.name else repr(name)
        view.note(name, op, why.replace('%s', total))
    return INDEPENDENT.with_marks_of(*states).with_shard_statistics(statistics)


def shard_statistic(op: tf.Operation, states: _States, view: View, why: str) -> State:
    """The state of a value of all examples that is neither their mean nor their sum, such as
    `tf.reduce_max(x, 0)`: INDEPENDENT, with a mark by the name of the operation.

    Args:
      op: the operation that computes the value.
      states: the states of inputs whose marks the value gets as well; [] where the caller adds the
        marks of all inputs itself.
      view: `View`, in which the reason of the mark is noted.
      why: the reason, the predicate of a sentence about the operation.
    """
    view.note(op.name, op, why)
    return INDEPENDENT.with_marks_of(*states).with_shard_statistics([op.name])


# ---- sums ----------------------------------------------------------------------------------------

def sum_of_totals(op: tf.Operation, states: _States, view: View) -> State:
    """The state of a sum of means, sums, shares and constants; or of a choice among such values
    that all towers make alike.

        constants                 the same on every tower
        mean of f + mean of g     the mean of f + g
        mean of f + constant c    the mean of f + c
        sum of f + sum of g       the sum of f + g
        sum of f + constant c     a sum with the offset c, which N towers would add N times
        share + share             a share: c / n + d / n = (c + d) / n
        any other                 not linear: a mean plus a sum is neither a mean nor a sum, and
                                  a share plus a constant is no share; unknown, with positions

    Args:
      op: the operation, to which a refusal points.
      states: the states of its inputs, none of which has entries of single examples.
      view: `View`.
    """
    kinds = kinds_of(states)
    if kinds == {Kind.SHARE}:
        return State(Kind.SHARE, reductions=reductions_of(states)).with_marks_of(*states)
    if Kind.SHARE in kinds:
        return not_linear(op, states, view,
                          'adds a part for each example, such as 1 / n, to a value of another kind')
    if kinds <= {Kind.INDEPENDENT}:
        return INDEPENDENT.with_marks_of(*states)
    if kinds <= {Kind.MEAN, Kind.INDEPENDENT}:
        return State(Kind.MEAN, reductions=reductions_of(states)).with_marks_of(*states)
    if kinds <= {Kind.SUM, Kind.INDEPENDENT}:
        return _sum_of_sums(states)
    return not_linear(op, states, view, 'joins a mean and a sum over the examples')


def _sum_of_sums(states: _States) -> State:
    """The state of the sum of sums over the examples and, maybe, constants.

        2 n + 3 n    5 n, a sum to which each example adds 5: constant, without an offset
        2 n + 1      a sum with the offset 1, and so no multiple of n: not constant

    Args:
      states: the states of the terms: sums over the examples, and constants.
    """
    adds_constants = Kind.INDEPENDENT in kinds_of(states)
    has_offset = adds_constants or any(state.has_offset for state in states)
    is_multiple_of_n = all(state.is_count for state in states)
    result = State(Kind.SUM, reductions=reductions_of(states), is_constant=is_multiple_of_n,
                   has_offset=has_offset)
    return result.with_marks_of(*states)


# ---- products ------------------------------------------------------------------------------------

def product_of_totals(op: tf.Operation, states: _States, view: View) -> State:
    """The state of a product: a constant c times the mean of f is the mean of c f.

    A constant times a sum or a share stays a sum or a share. The product of two means, sums or
    shares is linear only where the number of examples cancels: a mean times the number of examples
    is a sum, and a sum times a share is a mean. The product of two constants is the same on every
    tower, as `not_linear` says.

    Args:
      op: the operation, to which a refusal points.
      states: the states of its two inputs, neither of which has entries of single examples.
      view: `View`.
    """
    factors = [state for state in states if state.is_total_or_share]  # all but the constants
    if len(factors) == 1:
        return factors[0].with_marks_of(*states)
    factor_by_kind = {state.kind: state for state in factors}
    kinds = set(factor_by_kind)  # has one kind, where both factors are means, or sums, or shares
    if kinds == {Kind.MEAN, Kind.SUM}:
        return _mean_times_sum(op, factor_by_kind[Kind.MEAN], factor_by_kind[Kind.SUM], view)
    if kinds == {Kind.SUM, Kind.SHARE}:
        return _sum_times_share(op, factor_by_kind[Kind.SUM], factor_by_kind[Kind.SHARE], view)
    return not_linear(op, states, view)


def _mean_times_sum(op: tf.Operation, mean: State, sum_: State, view: View) -> State:
    """The state of a mean times a sum: the mean of f times c n is c times the sum of f.

    A mean times any other sum is not linear.
    """
    if not sum_.is_count:
        return not_linear(op, [mean, sum_], view)
    return State(Kind.SUM, reductions=mean.reductions).with_marks_of(mean, sum_)


def _sum_times_share(op: tf.Operation, sum_: State, share: State, view: View) -> State:
    """The state of a sum times a share: the sum of f times c / n is c times the mean of f; the sum
    d n times c / n is the constant d c.

    A sum with an offset gives no mean: (sum of f + d) times c / n contains d c / n, which depends
    on n.
    """
    if sum_.has_offset:
        return not_linear(op, [sum_, share], view)
    if sum_.is_constant:
        return INDEPENDENT.with_marks_of(sum_, share)
    return total(Kind.MEAN, op).with_marks_of(sum_, share)


# ---- quotients -----------------------------------------------------------------------------------

def quotient_of_totals(op: tf.Operation, states: _States, view: View) -> State:
    """The state of the quotient of two values without entries of single examples.

    A sum divided by the number of examples is a mean.

    A mean, a sum, a share or a constant divided by a constant stays what it is.

    Args:
      op: the operation, to which a refusal points.
      states: the states of the dividend and the divisor.
      view: `View`.
    """
    dividend, divisor = states
    if divisor.kind is Kind.INDEPENDENT:
        return dividend.with_marks_of(divisor)
    if divisor.is_count:
        return _divided_by_count(op, dividend, divisor, view)
    if divisor.kind is Kind.SUM:
        return not_linear(op, states, view, 'divides by a sum over the examples of the shard')
    return not_linear(op, states, view)


def _divided_by_count(op: tf.Operation, dividend: State, count: State, view: View) -> State:
    """The state of a quotient by c n, a multiple of the number of examples.

        constant / c n         a share, by which a sum may be multiplied
        d n / c n              a constant
        sum of f / c n         the mean of f / c
        any other              not linear: a mean, or a sum with an offset

    Args:
      op: the operation.
      dividend: the state of the first input.
      count: the state of the second input, c n.
      view: `View`.
    """
    if dividend.kind is Kind.INDEPENDENT:
        return total(Kind.SHARE, op).with_marks_of(dividend, count)
    if dividend.is_count:
        return INDEPENDENT.with_marks_of(dividend, count)
    if dividend.kind is Kind.SUM and not dividend.has_offset:
        return total(Kind.MEAN, op).with_marks_of(dividend, count)
    return not_linear(op, [dividend, count], view)
