"""Decorators for the rules of operations that move entries: transposes, slices, reshapes.

Such an operation gives the entries of its first input, or some of these entries, at other places.
Its other inputs are arguments, such as an axis. For values of the batch each operation has a
function of its own. For all other values the answer is the same for all operations: the decorators
`moves_entries` and `computes_entries` add it to the function.
"""

import functools
import typing

import tensorflow.compat.v1 as tf

from towers.proof.rules.common import (
    COMPUTES_WITH_POSITIONS,
    is_of_batch,
    kinds_of,
    required,
)
from towers.proof.rules.totals import not_linear
from towers.proof.sizes import as_number, as_numbers
from towers.proof.states import Kind, State, unknown
from towers.proof.view import View

_States = typing.Sequence[State]

_KEEP_ORDER = ('ExpandDims', 'Reshape', 'Squeeze')
"""Types of operations that keep the row-major order of the entries."""

_KEEP_UNIFORM = ('Reshape', 'ExpandDims', 'Squeeze', 'Transpose', 'StridedSlice', 'Slice', 'Tile',
                 'Unpack', 'ReverseV2')
"""Types of operations whose result has entries of the first input alone: a `Pad` adds others."""


def moves_entries(rule: typing.Callable) -> typing.Callable:
    """Decorator: makes the rule of an operation that moves entries, for all inputs, from a function
    for values of the batch.

        values of the batch    the result of the function
        positions [n]          positions, if the result is [n, 1] or [1, n]
        one example            the same example: all entries are of this example
        a mean or a sum        a mean or a sum: the mean of moved entries is the moved mean

    Args:
      rule: function of the operation, the state of its first input, which is PER_EXAMPLE or ROWS,
        and the view. It returns one state for all results.
    """
    @functools.wraps(rule)
    def whole_rule(op: tf.Operation, states: _States, view: View) -> State:
        """The rule for inputs of any state."""
        state = as_number(op, states[0], view)
        arguments = _arguments(op, state, states[1:], view)
        if not kinds_of(arguments) <= {Kind.INDEPENDENT, Kind.SIZES}:
            return unknown(op, 'moves entries to places that are computed from the examples')
        return _moved_entries(rule, op, state, view).with_marks_of(*arguments)
    return whole_rule


def computes_entries(rule: typing.Callable) -> typing.Callable:
    """Decorator: makes the rule of an operation that is not linear, for all inputs, from a function
    for values of the batch.

    Values of the examples are treated as in `moves_entries`. For all other values `not_linear`
    gives the state: the inverse of a mean of matrices is not the mean of the examples' inverses.

    Args:
      rule: as in `moves_entries`.
    """
    rule_for_examples = moves_entries(rule)

    @functools.wraps(rule)
    def whole_rule(op: tf.Operation, states: _States, view: View) -> State:
        """The rule for inputs of any state."""
        if states[0].is_by_example:
            return rule_for_examples(op, states, view)
        return not_linear(op, states, view)
    return whole_rule


def _arguments(op: tf.Operation, state: State, arguments: _States,
               view: View) -> typing.Sequence[State]:
    """The states of the arguments of an operation. Only the new shape of a reshape of the batch,
    such as (n, 4), and the limits in the brackets of a slice of the batch, `x[:n]`, stay SIZES;
    their rules look for n. (The limits of a `tf.slice` do not.)

    In any other argument, n would put the entries at other places on each tower. There `as_numbers`
    converts n to a sum over the examples, and the caller refuses an argument that is a sum.

    Args:
      op: the operation.
      state: the state of the entries that it moves.
      arguments: the states of the arguments.
      view: `View`.
    """
    looks_for_examples = op.type in ('Reshape', 'StridedSlice') and is_of_batch(state)
    if looks_for_examples:
        return arguments
    return as_numbers(op, arguments, view)


def _moved_entries(rule: typing.Callable, op: tf.Operation, state: State, view: View) -> State:
    """The state of the results, by the state of the entries. The caller has checked the arguments.

    Args:
      rule: the function for values of the batch; see `moves_entries`.
      op: the operation.
      state: the state of the entries, which are no sizes.
      view: `View`.
    """
    if is_of_batch(state):
        return rule(op, state, view)
    if state.is_position:
        return _moved_positions(op, state, view)
    # The entries are of one example, a mean, a sum, or the same on every tower: moved entries keep
    # this state.
    is_uniform = state.is_uniform and op.type in _KEEP_UNIFORM
    return state._replace(is_uniform=is_uniform)


def _moved_positions(op: tf.Operation, state: State, view: View) -> State:
    """The state of positions [n] of examples as [n, 1] or [1, n]: each is still the position of the
    same example.

    The state is unknown after any other operation, which may put the position of one example in the
    place of another one. It is unknown for index vectors (INDICES), too: a move could separate the
    position, a vector's first number, from its other numbers.
    """
    shape = required(view.shape(op.outputs[0]), op, COMPUTES_WITH_POSITIONS)
    is_one_number_of_each = state.kind in (Kind.POSITION, Kind.ROW_POSITION)
    if not is_one_number_of_each or op.type not in _KEEP_ORDER:
        return unknown(op, COMPUTES_WITH_POSITIONS)
    # In [n, 1] only one dimension has another length than 1: all positions are along it. Positions
    # [2 n] in the shape [2, n] are along two dimensions.
    axes_of_positions = [axis for axis, length in enumerate(shape) if length != 1]
    if len(axes_of_positions) != 1:
        return unknown(op, COMPUTES_WITH_POSITIONS)
    return state._replace(axis=axes_of_positions[0])
