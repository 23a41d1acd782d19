"""Rules for operations on single entries: `tf.exp`, `a + b`, `a * b`, a choice, a change of type.

Each entry of the result is a function of the entries at its place, by broadcasting. So the examples
stay where they are: of x [n, 4] and y [n, 1], both with the examples along dimension 0, entry
(e, i) of the result belongs to example e.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.proof.rules.shapes import arithmetic_of_sizes
from towers.proof.rules.totals import (
    any_by_example,
    any_of_kind,
    marks_of_totals,
    not_linear,
    product_of_totals,
    quotient_of_totals,
    sum_of_totals,
)
from towers.proof.sizes import as_numbers
from towers.proof.stand_ins import LEAST_STAND_IN
from towers.proof.states import (
    HAS_OWN_SIZE,
    NO_STATIC_RANK,
    Kind,
    Layout,
    State,
    per_example,
    unknown,
)
from towers.proof.view import View

_States = typing.Sequence[State]

_WIDE_INTEGERS = (tf.int32, tf.int64)


def elementwise(op: tf.Operation, states: _States, view: View) -> State:
    """A function of single entries, not known to be linear: `tf.exp`, `tf.maximum`.

    exp(f(example)) is a function of the example; exp of a mean is no mean.
    """
    return _entry_by_entry(op, states, view, not_linear)


def add(op: tf.Operation, states: _States, view: View) -> State:
    """Sums and differences: f + g of an example; the sum of means is a mean, of sums a sum."""
    return _entry_by_entry(op, states, view, sum_of_totals)


def multiply(op: tf.Operation, states: _States, view: View) -> State:
    """Products: f g of an example; a factor that is the same on every tower keeps a mean a mean."""
    return _entry_by_entry(op, states, view, product_of_totals)


def _entry_by_entry(op: tf.Operation, states: _States, view: View,
                    of_totals: typing.Callable) -> State:
    """The result of an operation on single entries.

    Args:
      op: the operation.
      states: of its inputs.
      view: `View`.
      of_totals: the rule for inputs none of which has entries of single examples.
    """
    sizes = arithmetic_of_sizes(op, list(states), view)
    if sizes is not None:
        return sizes
    numbers = as_numbers(op, states, view)
    if any_by_example(numbers):
        return by_example(op, numbers, view)
    return of_totals(op, numbers, view)


def linear(op: tf.Operation, states: _States, view: View) -> State:
    """A function of one input that is linear, `-x`: the mean of -f is minus the mean of f."""
    state = states[0]
    if len(states) > 1 or state.kind is Kind.SIZES:
        return elementwise(op, states, view)
    return state


def cast(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.cast`: linear between types of numbers that do not round.

    A mean stays a mean as a float of another width, but not as an integer: rounding is not linear.
    """
    state = states[0]
    dtype = op.outputs[0].dtype
    is_exact = dtype in _WIDE_INTEGERS
    if state.is_position:
        return state if is_exact else unknown(op, 'rounds the numbers of the examples')
    if state.kind is Kind.SIZES:
        return state if is_exact or dtype.is_floating else not_linear(op, states, view)
    if state.is_over_all and not dtype.is_floating:
        return not_linear(op, states, view)
    return state


def divide(op: tf.Operation, states: _States, view: View) -> State:
    """Quotients: f / g of an example; a sum divided by the number of examples is a mean."""
    if op.outputs[0].dtype.is_integer:  # which rounds
        return elementwise(op, states, view)
    numbers = as_numbers(op, states, view)
    if any_by_example(numbers):
        return by_example(op, numbers, view)
    dividend, divisor = numbers
    return quotient_of_totals(op, dividend, divisor, view)


def select(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.where` with two values: by a condition [n, 4] each entry of x or of y [n, 4].

    By a condition that is the same on every tower, all of them choose the same of two means.
    """
    numbers = as_numbers(op, states, view)
    condition = numbers[0]
    values = numbers[1:]
    if any_by_example(numbers):
        is_of_rows = op.type == 'Select' and view.rank(op.inputs[0]) == 1
        if is_of_rows and condition.kind is Kind.PER_EXAMPLE:
            return _select_rows(op, condition, values)
        return by_example(op, numbers, view)
    if condition.is_alike_on_towers:
        return sum_of_totals(op, values, view).with_marks_of(condition)
    return not_linear(op, numbers, view)


def _select_rows(op: tf.Operation, condition: State, values: _States):
    """`tf.where(condition [n], x [n, 4], y [n, 4])`: chooses whole rows."""
    row = per_example(0, condition.outer, condition.inner)
    for state in values:
        if state.layout != row.layout:
            return unknown(op, 'chooses rows that are not known to be of the same examples')
    return row.with_marks_of(condition, *values)


def by_example(op: tf.Operation, states: _States, view: View) -> State:
    """A function of single entries, at least one input of which has entries of single examples.

    All inputs that have examples have them along the same dimension, counted from the last as
    broadcasting does; all others have one entry there, which goes to each example: x [n, 4] and a
    weight [4] or [1, 4], but not one [8, 4].

    Args:
      op: the operation.
      states: of its inputs.
      view: `View`.
    """
    marks = marks_of_totals(op, states, view, "gives each example a value of all examples ('%s')")
    if any_of_kind(states, Kind.ONE_EXAMPLE):
        if any_of_kind(states, Kind.PER_EXAMPLE, Kind.ROWS):
            return unknown(op, 'joins one example with the whole batch')
        return State(Kind.ONE_EXAMPLE).with_marks_of(marks)
    layouts = _layouts_from_end(op, states, view)
    if layouts is not None:
        layouts = of_equal_lengths(layouts)
    rank = view.rank(op.outputs[0])
    if layouts is None or rank is None:
        return unknown(op, NO_STATIC_RANK)
    if len(layouts) > 1:
        return unknown(op, 'brings examples together with each other')
    layout = layouts.pop()
    for tensor, state in zip(op.inputs, states):
        is_alike = state.is_by_example or view.is_as_built and state.is_uniform
        if not is_alike and not _is_broadcast_along(tensor, layout.axis, view):
            return unknown(op, HAS_OWN_SIZE)
    found = State(*layout._replace(axis=rank + layout.axis))
    return found._replace(is_constant=_are_constant(states)).with_marks_of(marks)


def of_equal_lengths(layouts: typing.Set[Layout]) -> typing.Set[Layout]:
    """The layouts of values that have equal lengths along the examples, as an operation on them
    demands: [n · k] and [n · m] have the same number of entries of each example, so that a number k
    that is not static is the other one."""
    numbers = sorted(layout.inner for layout in layouts)  # static ones first
    inner = numbers[0] if numbers else 1
    return {layout if layout.inner < LEAST_STAND_IN else layout._replace(inner=inner)
            for layout in layouts}


def _layouts_from_end(op: tf.Operation, states: _States,
                      view: View) -> typing.Optional[typing.Set[Layout]]:
    """The layouts of the inputs that have examples, with the axis counted from the last dimension,
    -1; None where a rank is not static."""
    layouts = set()
    for tensor, state in zip(op.inputs, states):
        if not state.is_by_example:
            continue
        rank = view.rank(tensor)
        if rank is None:
            return None
        layouts.add(state.layout._replace(axis=state.axis - rank))
    return layouts


def _are_constant(states: _States) -> bool:
    """Whether a function of these values is the same for every example."""
    for state in states:
        is_of_examples = state.is_by_example or state.is_total
        if is_of_examples and not state.is_constant:
            return False
    return True


def _is_broadcast_along(tensor: tf.Tensor, axis_from_end: int, view: View) -> bool:
    """Whether a tensor has one entry along a dimension, counted from the last (-1), or lacks it."""
    shape = view.shape(tensor)
    if shape is None:
        return False
    return len(shape) < -axis_from_end or shape[axis_from_end] == 1
