"""Rules for operations that take tensors apart, or put them together: where the examples go.

Tensors that are joined along another dimension than the examples' are beside each other: [n, 4] and
[n, 2] give [n, 6]. Along the dimension of the examples, one tensor follows the other: x [n] and
y [n] give [2 n], with x of all examples first, then y of all examples. These are two rounds of the
examples (`State.outer`).

Where no input has entries of single examples, each entry of the result is an entry of one of the
inputs. The result has the state of a choice among the inputs: `sum_of_totals` gives it for means
and sums.

A result has `is_constant=False` where the rule does not follow whether the entries are the same for
each example; this is always sound (`State.is_constant`).
"""

import typing

import tensorflow.compat.v1 as tf

from towers.proof.rules.common import (
    COMPUTES_WITH_POSITIONS,
    COUPLES_EXAMPLES,
    OWN_ARGUMENTS,
    TAKES_APART,
    any_by_example,
    any_of_kind,
    any_position,
    are_shared_arguments,
    fits_examples_as_built,
    is_of_batch,
    is_shared_or_at,
    kinds_of,
    layouts_of_examples,
    state_of_layout,
    static_rank,
    static_value,
    with_new_dimension,
    without_dimensions,
)
from towers.proof.rules.moves import moves_entries
from towers.proof.rules.totals import sum_of_totals
from towers.proof.states import (
    HAS_OWN_SIZE,
    ROW_OF_EACH_EXAMPLE,
    Kind,
    State,
    unknown,
)
from towers.proof.view import View

_States = typing.Sequence[State]


# ---- apart ---------------------------------------------------------------------------------------

@moves_entries
def unpack(op: tf.Operation, state: State, view: View) -> State:
    """`tf.unstack(x [n, 3], axis=1)`: three tensors [n]. Along another dimension than the examples'
    each result has entries of all examples."""
    rank = static_rank(op.inputs[0], op, view)
    axis = op.get_attr('axis') % rank
    if axis == state.axis:
        return unknown(op, TAKES_APART)
    return without_dimensions(state, [axis])


class _SplitInputs(typing.NamedTuple):
    """The places of two inputs of a `tf.split`: the tensor that is split, and the axis."""
    value: int
    axis: int


_INPUTS_OF_SPLIT = {'Split': _SplitInputs(value=1, axis=0),
                    'SplitV': _SplitInputs(value=0, axis=2)}
"""{type of an operation: the places of its inputs}. `Split`(axis, value) makes parts of equal
lengths, `SplitV`(value, lengths, axis) makes parts of the given lengths."""


def split(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.split`: [n, 4] along dimension 1 into [n, 2] and [n, 2]; or [2 n], two rounds of all
    examples, into [n] and [n].

    A part of a mean over the examples is a mean over the examples, and a part of the values of one
    example belongs to that example.
    """
    inputs = _INPUTS_OF_SPLIT[op.type]
    arguments = list(states)
    state = arguments.pop(inputs.value)  # of the tensor that is split
    if not kinds_of(arguments) <= {Kind.INDEPENDENT}:  # each tower would have parts of other sizes
        return unknown(op, 'has parts whose sizes are computed from the examples')
    if not is_of_batch(state):
        return state
    axis = static_value(op.inputs[inputs.axis], op, view)
    rank = static_rank(op.inputs[inputs.value], op, view)
    is_along_examples = int(axis) % rank == state.axis
    if not is_along_examples:  # each part has all of the examples
        return state
    return _split_rounds(op, state)


def _split_rounds(op: tf.Operation, state: State) -> State:
    """The state of equal parts along the examples: 4 rounds of all examples in 2 parts are 2 rounds
    in each part. Any other part would lack some of the examples, and is refused.

    Args:
      op: the operation.
      state: the state of the tensor that is split, PER_EXAMPLE or ROWS.
    """
    parts = len(op.outputs)
    are_parts_equal = op.type == 'Split'  # `SplitV` gets the length of each part
    are_parts_whole_rounds = state.outer % parts == 0  # of ROWS, one part alone
    if not are_parts_equal or not are_parts_whole_rounds:
        return unknown(op, TAKES_APART)
    return state._replace(outer=state.outer // parts)


# ---- together ------------------------------------------------------------------------------------

def concat(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.concat`: [n, 4] and [n, 2] along dimension 1 give [n, 6]; x [n] and y [n] along dimension
    0 give [2 n], with x of all examples first, then y of all examples."""
    parts = list(states[:-1])
    axis_state = states[-1]
    if not are_shared_arguments([axis_state]):
        return unknown(op, OWN_ARGUMENTS)
    if not any_by_example(parts):
        return sum_of_totals(op, parts, view)
    axis = static_value(op.inputs[-1], op, view)
    rank = static_rank(op.outputs[0], op, view)
    axis_of_parts = int(axis) % rank
    # A value of ONE_EXAMPLE, in a loop over the examples, has no dimension of the examples.
    axes_of_examples = {part.axis for part in parts if is_of_batch(part)}
    if axis_of_parts in axes_of_examples:
        return _one_after_the_other(op, parts)
    return _beside(op, parts, view)


def _one_after_the_other(op: tf.Operation, parts: typing.List[State]) -> State:
    """The state of tensors that are joined along the examples: [n] and [n] as [2 n], [2 n] and [n]
    as [3 n].

    Each part has to have all examples, in the same order, in any number of rounds. The rounds of
    the parts add up.
    """
    layouts_of_a_round = {part.layout._replace(outer=1) for part in parts if part.is_by_example}
    if len(layouts_of_a_round) > 1:
        return unknown(op, COUPLES_EXAMPLES)
    have_all_examples = all(part.kind is Kind.PER_EXAMPLE for part in parts)
    if not have_all_examples:  # rows that a mask leaves, or a tensor without examples
        return unknown(op, 'joins the examples with rows of others')
    rounds = sum(part.outer for part in parts)
    return parts[0]._replace(outer=rounds, is_constant=False).with_marks_of(*parts)


def pack(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.stack([x [n], y [n]], axis=1)`: [n, 2], with the examples where they were."""
    parts = list(states)
    if any_position(parts):
        return _indices_of_each(op, parts, view)
    if not any_by_example(parts):
        return sum_of_totals(op, parts, view)
    rank = static_rank(op.outputs[0], op, view)
    beside = _beside(op, parts, view)
    if not is_of_batch(beside):  # not known, or of one example: no dimension has the examples
        return beside
    place_of_new_dimension = op.get_attr('axis') % rank
    return with_new_dimension(beside, place_of_new_dimension)


def _indices_of_each(op: tf.Operation, parts: typing.List[State], view: View) -> State:
    """`tf.stack([tf.range(n), column [n], …], 1)`: an index vector for each example, which begins
    with the position of the example."""
    positions = parts[0]
    columns = parts[1:]
    if not positions.is_position_of_each:
        return unknown(op, COMPUTES_WITH_POSITIONS)
    # Positions [n, 1] would give [n, 2, 1]: the vectors along the last dimension have one number
    # each, and a column's number would be taken for the position of an example.
    are_vectors = view.rank(op.inputs[0]) == 1
    are_columns = op.get_attr('axis') in (1, -1)  # along axis 0, they would be rows of [2, n]
    if not are_vectors or not are_columns:
        return unknown(op, COMPUTES_WITH_POSITIONS)
    if not all(is_shared_or_at(column, ROW_OF_EACH_EXAMPLE) for column in columns):
        return unknown(op, COMPUTES_WITH_POSITIONS)
    return State(Kind.INDICES).with_marks_of(*parts)


def _beside(op: tf.Operation, parts: typing.List[State], view: View) -> State:
    """The state of tensors that are joined along another dimension than the examples'.

    All tensors must have the examples along the same dimension. A tensor without the examples has
    a fixed length along this dimension, so that it fits batches of one size only. In a loop over
    the examples this does not hold: a value [4] of one example may be joined with a tensor [2] that
    all examples share, and gives [6].
    """
    if any_of_kind(parts, Kind.MEAN, Kind.SUM):
        return unknown(op, 'puts a value of all examples beside those of each')
    are_of_one_example = any_of_kind(parts, Kind.ONE_EXAMPLE)
    if not are_of_one_example and not _have_place_of_each(parts, view):
        return unknown(op, HAS_OWN_SIZE)
    layouts = layouts_of_examples(parts)
    if len(layouts) > 1:
        return unknown(op, COUPLES_EXAMPLES)
    return state_of_layout(layouts.pop()).with_marks_of(*parts)


def _have_place_of_each(parts: typing.List[State], view: View) -> bool:
    """Whether each tensor has entries of each example, or fits these as `fits_examples_as_built`
    says."""
    return all(part.is_by_example or fits_examples_as_built(part, view) for part in parts)
