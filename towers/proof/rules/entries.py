"""Rules for operations on single entries: `tf.exp`, `a + b`, `a * b`, a choice, a change of type.

Each entry of the result is a function of the entries of the inputs at the same place, after
broadcasting. So the examples stay where they are. For x [n, 4] and y [n, 1], both with the examples
along dimension 0, entry (e, i) of the result belongs to example e.

An input may have entries of single examples. Any other input is the same on every tower, or a mean,
a sum or a share over the examples (`totals`); of a cast, it may also have sizes, or positions.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.proof.rules.common import (
    COUPLES_EXAMPLES,
    any_by_example,
    any_of_kind,
    fits_examples_as_built,
    is_broadcast_along,
    state_of_layout,
    static_rank,
    vector_along_examples,
)
from towers.proof.rules.totals import (
    marks_of_totals,
    not_linear,
    product_of_totals,
    quotient_of_totals,
    sum_of_totals,
)
from towers.proof.stand_ins import LEAST_STAND_IN
from towers.proof.states import (
    HAS_OWN_SIZE,
    ONE_EXAMPLE,
    Kind,
    Layout,
    State,
    unknown,
)
from towers.proof.view import View, is_wide

_States = typing.Sequence[State]


# ---- functions of any number of inputs -----------------------------------------------------------

def elementwise(op: tf.Operation, states: _States, view: View) -> State:
    """A function of single entries, not known to be linear: `tf.exp`, `tf.maximum`.

    exp(f(example)) is a function of the example; exp of a mean is no mean.
    """
    return _entry_by_entry(op, states, view, not_linear)


def add(op: tf.Operation, states: _States, view: View) -> State:
    """Sums and differences: f + g of an example; a sum of means is a mean, a sum of sums a sum."""
    return _entry_by_entry(op, states, view, sum_of_totals)


def multiply(op: tf.Operation, states: _States, view: View) -> State:
    """Products: f g of an example; a mean times a factor that all towers share is a mean."""
    return _entry_by_entry(op, states, view, product_of_totals)


def _entry_by_entry(op: tf.Operation, states: _States, view: View,
                    rule_without_examples: typing.Callable) -> State:
    """The state of the result of an operation on single entries.

    Args:
      op: the operation.
      states: the states of its inputs.
      view: `View`.
      rule_without_examples: the rule for the case that no input has entries of single examples.
    """
    rule = by_example if any_by_example(states) else rule_without_examples
    return rule(op, states, view)


# ---- functions of certain inputs -----------------------------------------------------------------

def linear(op: tf.Operation, states: _States, view: View) -> State:
    """A linear function of one input, `-x`: the mean of -f is minus the mean of f."""
    return states[0]


def cast(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.cast`: the same numbers in another type have the same state, if the type can hold them.

        positions              only to wide integers: a rounded position is the position of another
                               example
        sizes                  only to wide integers, or to floats: a proof neglects rounding errors
        means, sums, shares    only to floats or complex numbers: to an integer the cast cuts the
                               fraction off, which is not linear
        any other state        to any type: each entry is cast by itself
    """
    state = states[0]
    dtype = op.outputs[0].dtype
    holds_all_sizes = is_wide(op.outputs[0])
    holds_fractions = dtype.is_floating or dtype.is_complex
    if state.is_position and not holds_all_sizes:
        return unknown(op, 'rounds the positions of the examples')
    if state.kind is Kind.SIZES:
        if holds_all_sizes or holds_fractions:
            return state
        return not_linear(op, states, view)
    if state.is_total_or_share and not holds_fractions:
        return not_linear(op, states, view)
    return state


def divide(op: tf.Operation, states: _States, view: View) -> State:
    """Quotients: f / g of an example; a sum divided by the number of examples is a mean.

    A quotient of integers is rounded, so that it is not linear in the dividend.
    """
    is_rounded = op.outputs[0].dtype.is_integer
    rule_without_examples = not_linear if is_rounded else quotient_of_totals
    return _entry_by_entry(op, states, view, rule_without_examples)


def select(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.where(condition, x, y)`: by a condition [n, 4] each entry of x or of y [n, 4].

    By a condition that is the same on every tower, all towers choose the same one of two means.
    """
    condition, *values = states
    if any_by_example(states):
        # `Select` chooses whole rows by a condition [n]. Any other operation would broadcast a
        # vector along the last dimension of the values.
        chooses_rows = op.type == 'Select' and view.rank(op.inputs[0]) == 1
        if chooses_rows and condition.kind is Kind.PER_EXAMPLE:
            return _selected_rows(op, condition, values)
        return by_example(op, states, view)
    if condition.is_alike_on_towers:
        # All towers choose the mean of f, or all choose the mean of g: the result is a mean, as
        # the sum of the two means is.
        return sum_of_totals(op, values, view).with_marks_of(condition)
    return not_linear(op, states, view)


def _selected_rows(op: tf.Operation, condition: State, values: _States) -> State:
    """`Select(condition [n], x [n, 4], y [n, 4])`: each example's row of x, or its row of y."""
    row_of_each = vector_along_examples(condition)
    if any(state.layout != row_of_each.layout for state in values):
        return unknown(op, 'chooses rows that are not known to be of the same examples')
    return row_of_each.with_marks_of(condition, *values)


# ---- values of the examples ----------------------------------------------------------------------

def by_example(op: tf.Operation, states: _States, view: View) -> State:
    """The state of a function of single entries, where at least one input has entries of single
    examples.

    Args:
      op: the operation.
      states: the states of its inputs, with sizes as numbers.
      view: `View`.
    """
    # A mean of the shard that is broadcast to an example makes the result of this example depend on
    # all examples of the shard.
    marks = marks_of_totals(op, states, view, 'gives each example a value of all examples (%s)')
    if not any_of_kind(states, Kind.ONE_EXAMPLE):
        return _by_example_of_batch(op, states, view).with_marks_of(marks)
    if any_of_kind(states, Kind.PER_EXAMPLE, Kind.ROWS):
        return unknown(op, 'joins one example with the whole batch')
    return ONE_EXAMPLE.with_marks_of(marks)


def _by_example_of_batch(op: tf.Operation, states: _States, view: View) -> State:
    """The state of a function of single entries of values of the batch.

    All inputs that have examples must have them along the same dimension, counted from the last
    dimension as broadcasting counts. All other inputs must have one entry along this dimension,
    which goes to each example: x [n, 4] fits a weight [4] or [1, 4], but no weight [8, 4].

    Args:
      op: the operation.
      states: the states of its inputs, at least one of which is PER_EXAMPLE or ROWS.
      view: `View`.
    """
    layouts = of_equal_lengths(_layouts_from_end(op, states, view))
    rank = static_rank(op.outputs[0], op, view)
    if len(layouts) > 1:
        return unknown(op, COUPLES_EXAMPLES)
    layout = layouts.pop()
    axis_from_end = layout.axis
    for tensor, state in zip(op.inputs, states):
        has_entry_of_each = state.is_by_example or fits_examples_as_built(state, view)
        if not has_entry_of_each and not is_broadcast_along(axis_from_end, tensor, view):
            return unknown(op, HAS_OWN_SIZE)
    result = state_of_layout(layout._replace(axis=rank + axis_from_end))
    return result._replace(is_constant=_are_constant(states))


def _layouts_from_end(op: tf.Operation, states: _States, view: View) -> typing.Set[Layout]:
    """The layouts of the inputs that have examples, with the axis counted from the last dimension,
    -1: x [n, 4] and y [3, n, 4] both have the examples along -2.

    Raises:
      NotKnown: a rank is not static, so that the proof ends at the operation.
    """
    layouts = set()
    for tensor, state in zip(op.inputs, states):
        if state.is_by_example:
            rank = static_rank(tensor, op, view)
            layouts.add(state.layout._replace(axis=state.axis - rank))
    return layouts


def of_equal_lengths(layouts: typing.Set[Layout]) -> typing.Set[Layout]:
    """The layouts of tensors that an operation takes together, and that therefore have equal
    lengths along the examples: else TensorFlow refuses the step.

    Let x [n L] have L entries of each example, where the length L is not static. In the layout of x
    `inner` is a large prime that stands for L (`stand_ins`). The sum of x and y [n 8] demands that
    L is 8: both layouts get 8 as `inner`. The sum of x and z [n M], where another prime stands for
    M, demands that L is M: both layouts get the smaller one of the primes.

    Args:
      layouts: the layouts of at least one tensor.
    """
    # The smallest `inner` is a static number, if any layout has a static one: all primes that stand
    # for lengths are larger (`LEAST_STAND_IN`).
    smallest_inner = min(layout.inner for layout in layouts)
    equal = set()
    for layout in layouts:
        is_static = layout.inner < LEAST_STAND_IN
        equal.add(layout if is_static else layout._replace(inner=smallest_inner))
    return equal


def _are_constant(states: _States) -> bool:
    """Whether a function of values with these states is the same for each example: each value is
    constant, as ones [n] are, or does not depend on the examples."""
    return all(state.is_constant for state in states if state.kind is not Kind.INDEPENDENT)
