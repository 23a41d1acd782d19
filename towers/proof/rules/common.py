"""What most rules ask of states, what they do to the examples' dimension, and reasons of refusals.

    by example      the entries are of single examples: PER_EXAMPLE, ROWS, ONE_EXAMPLE
    of the batch    the same of all examples of the shard, along the dimension `State.axis`:
                    PER_EXAMPLE, ROWS
"""

import typing

from towers.proof.states import Kind, Layout, State
from towers.proof.view import View

OWN_ARGUMENTS = 'has arguments that are computed from the examples'
COUPLES_EXAMPLES = 'brings examples together with each other'
TAKES_APART = 'takes the examples apart'
GOES_ALONG_EXAMPLES = 'goes along the examples'
COMPUTES_WITH_POSITIONS = 'computes with the numbers of the examples'
TAKES_BY_PLACES = 'takes elements by their places'
"""Why a proof ends, where several rules have the same reason."""


# ---- questions about states ----------------------------------------------------------------------

def any_by_example(states: typing.Iterable[State]) -> bool:
    """Whether one of the states at least has entries of single examples."""
    return any(state.is_by_example for state in states)


def any_of_kind(states: typing.Iterable[State], *kinds: Kind) -> bool:
    """Whether one of the states at least is of one of these kinds."""
    return any(state.kind in kinds for state in states)


def is_of_batch(state: State) -> bool:
    """Whether a value has the entries of all examples of the shard along a dimension."""
    return state.kind in (Kind.PER_EXAMPLE, Kind.ROWS)


def has_examples_first(state: State) -> bool:
    """Whether a value has entries of each example along dimension 0, the same number of each."""
    return state.kind is Kind.PER_EXAMPLE and state.axis == 0


def are_shared_arguments(states: typing.Iterable[State]) -> bool:
    """Whether arguments, such as an axis, neither tell positions nor belong to single examples: all
    examples have them alike. Those that are computed from a mean get marks from `by_table`."""
    return not any(state.is_by_example or state.is_position for state in states)


def fits_examples_as_built(state: State, view: View) -> bool:
    """Whether a value without examples may go beside the examples, an entry to each of them.

    Ones [8, 4] fit a batch of 8 examples alone, so that they prove nothing of other batches. But
    the analysis of a static batch as built (`static_batch` has the reason for it) is of 8 examples
    alone, and its states only tell where these are: there ones [8, 4] are as good as ones for each
    of the 8 examples. For this analysis alone states have the field `is_uniform`.
    """
    return view.is_as_built and state.is_uniform


# ---- the examples' dimension ---------------------------------------------------------------------

def state_of_layout(layout: Layout) -> State:
    """The state of values that have the examples where a layout says."""
    return State(layout.kind, layout.axis, layout.outer, layout.inner, layout.selection)


def with_new_dimension(state: State, place: int) -> State:
    """The state of values of the batch after a dimension is put in at a place.

    [n, 4] with a new dimension at 0 is [1, n, 4], with the examples along dimension 1; at 1 it is
    [n, 1, 4], with the examples where they were.
    """
    if place > state.axis:
        return state
    return state._replace(axis=state.axis + 1)


def without_dimensions(state: State, dropped: typing.Iterable[int]) -> State:
    """The state of values of the batch without some dimensions, none of them the examples'.

    [1, n, 4] without dimension 0 is [n, 4], with the examples along dimension 0.
    """
    dropped_before = [axis for axis in dropped if axis < state.axis]
    return state._replace(axis=state.axis - len(dropped_before))
