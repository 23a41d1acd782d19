"""Rules for operations that take tensors apart, or put them together: where the examples go.

Tensors with the examples along one dimension go beside each other along another one; along that of
the examples, all of them come after all of them (`outer` rounds).
"""

import typing

import tensorflow.compat.v1 as tf

from towers.proof.rules.layout import moves_entries
from towers.proof.rules.shapes import rearranged_sizes
from towers.proof.rules.totals import any_by_example, any_of_kind, sum_of_totals
from towers.proof.sizes import as_number, as_numbers
from towers.proof.states import (
    HAS_OWN_SIZE,
    NO_STATIC_ARGUMENT,
    NO_STATIC_RANK,
    ROW_OF_EACH_EXAMPLE,
    Kind,
    State,
    sizes_state,
    unknown,
)
from towers.proof.view import View

_States = typing.Sequence[State]
_Found = typing.Union[State, typing.List[State]]

_APART = 'takes the examples apart'
_TOGETHER = 'brings examples together with each other'


# ---- apart ---------------------------------------------------------------------------------------

def unpack(op: tf.Operation, states: _States, view: View) -> _Found:
    """`tf.unstack(x [n, 3], axis=1)`: three tensors [n]; of sizes (n, 3), the sizes n and 3."""
    sizes = states[0].sizes
    if states[0].kind is Kind.SIZES and len(op.outputs) == len(sizes):
        return [sizes_state([size]) for size in sizes]
    return _unpack(op, states, view)


@moves_entries
def _unpack(op: tf.Operation, state: State, view: View) -> State:
    """Entries of another dimension than the examples'."""
    rank = view.rank(op.inputs[0])
    if rank is None:
        return unknown(op, NO_STATIC_RANK)
    axis = op.get_attr('axis') % rank
    if axis == state.axis:
        return unknown(op, _APART)
    is_before = axis < state.axis
    return state._replace(axis=state.axis - is_before)


def split(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.split`: of [n, 4] along dimension 1; or of [2 n], two rounds of all examples,
    into [n] and [n]."""
    is_even = op.type == 'Split'
    place = 1 if is_even else 0  # of the tensor among the inputs
    axis = view.value(op.inputs[0 if is_even else 2])
    state = as_number(op, states[place], view)
    arguments = list(states[:place]) + list(states[place + 1:])
    if any(argument.is_total for argument in arguments):
        return unknown(op, 'has parts whose sizes are computed from the examples')
    if not state.is_by_example or state.kind is Kind.ONE_EXAMPLE:
        return state
    rank = view.rank(op.inputs[place])
    if axis is None or rank is None:
        return unknown(op, NO_STATIC_ARGUMENT)
    if int(axis) % rank != state.axis:
        return state
    parts = len(op.outputs)
    is_of_rounds = state.kind is Kind.PER_EXAMPLE and state.outer % parts == 0
    if is_even and is_of_rounds:
        return state._replace(outer=state.outer // parts)
    return unknown(op, _APART)


# ---- together ------------------------------------------------------------------------------------

def concat(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.concat`: [n, 4] and [n, 2] are [n, 6]; along dimension 0, [n] and [n] are [2 n], in which
    all examples come after all of them."""
    if any_of_kind(states, Kind.SIZES):
        sizes = rearranged_sizes(op, list(states), view)
        if sizes is not None:
            return sizes
    parts = as_numbers(op, states[:-1], view)
    if not any_by_example(parts):
        return sum_of_totals(op, parts, view)
    axis = view.value(op.inputs[-1])
    rank = view.rank(op.outputs[0])
    if axis is None or rank is None:
        return unknown(op, NO_STATIC_ARGUMENT)
    examples = [state for state in parts if state.is_by_example]
    first = examples[0]
    is_along_examples = first.kind is not Kind.ONE_EXAMPLE and int(axis) % rank == first.axis
    if is_along_examples:
        return _one_after_the_other(op, parts)
    return _beside(op, parts, view)


def _one_after_the_other(op: tf.Operation, parts: typing.List[State]):
    """Tensors along the examples' dimension: all examples after all of them."""
    layouts = {state.layout._replace(outer=1) for state in parts if state.is_by_example}
    if len(layouts) > 1:
        return unknown(op, _TOGETHER)
    first = parts[0]
    are_all_of_examples = all(state.kind is Kind.PER_EXAMPLE for state in parts)
    if not are_all_of_examples:
        return unknown(op, 'joins the examples with rows of others')
    rounds = sum(state.outer for state in parts)
    return first._replace(outer=rounds, is_constant=False).with_marks_of(*parts)


def pack(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.stack([x [n], y [n]], axis=1)`: [n, 2], with the examples where they were."""
    if any_of_kind(states, Kind.SIZES):
        sizes = rearranged_sizes(op, list(states), view)
        if sizes is not None:
            return sizes
    parts = as_numbers(op, states, view)
    if any(part.is_position for part in parts):
        return _indices_of_each(op, parts, view)
    if not any_by_example(parts):
        return sum_of_totals(op, parts, view)
    rank = view.rank(op.outputs[0])
    if rank is None:
        return unknown(op, NO_STATIC_RANK)
    beside = _beside(op, parts, view)
    if beside.kind in (Kind.UNKNOWN, Kind.ONE_EXAMPLE):
        return beside
    axis = op.get_attr('axis') % rank
    is_before = axis <= beside.axis
    return beside._replace(axis=beside.axis + is_before)


def _indices_of_each(op: tf.Operation, parts: typing.List[State], view: View):
    """`tf.stack([tf.range(n), column [n], …], 1)`: for each example an index vector, its own
    position first. Positions [n, 1] would give [n, 2, 1], in which the second vector of an example
    is the position of any other."""
    positions = parts[0]
    is_of_each = positions.layout == State(Kind.POSITION).layout and view.rank(op.inputs[0]) == 1
    for column in parts[1:]:
        is_shared = column.kind is Kind.INDEPENDENT
        is_of_each = is_of_each and (is_shared or column.layout == ROW_OF_EACH_EXAMPLE)
    if op.get_attr('axis') not in (1, -1) or not is_of_each:
        return unknown(op, 'computes with the numbers of the examples')
    return State(Kind.INDICES).with_marks_of(*parts)


def _beside(op: tf.Operation, parts: typing.List[State], view: View):
    """Tensors beside each other, all of them with the examples along the same dimension."""
    if any(state.is_total for state in parts):
        return unknown(op, 'puts a value of all examples beside those of each')
    examples = [state for state in parts if state.is_by_example]
    is_in_loop = any_of_kind(parts, Kind.ONE_EXAMPLE)  # over examples, where sizes are static
    are_others_alike = view.is_as_built and all(
        state.is_by_example or state.is_uniform for state in parts)
    if len(examples) < len(parts) and not is_in_loop and not are_others_alike:
        return unknown(op, HAS_OWN_SIZE)
    layouts = {state.layout for state in examples}
    if len(layouts) > 1:
        return unknown(op, _TOGETHER)
    beside = examples[0]._replace(is_constant=False)
    return beside.with_marks_of(*parts)
