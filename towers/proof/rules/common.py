"""Functions that most rules use: questions about states, operations and sizes; new dimensions.

    by example      the entries are of single examples: PER_EXAMPLE, ROWS, ONE_EXAMPLE
    of the batch    the tensor has entries of all examples of the shard, along the dimension
                    `State.axis`: PER_EXAMPLE, ROWS
"""

import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers.proof.sizes import Sizes
from towers.proof.states import (
    NO_STATIC_ARGUMENT,
    NO_STATIC_RANK,
    Kind,
    Layout,
    Size,
    State,
    unknown,
)
from towers.proof.view import View

Results = typing.Union[State, typing.List[State]]
"""What a rule returns: one state for all results of an operation, or a list with the state of each
result."""

OWN_ARGUMENTS = 'has arguments that are computed from the examples'
COUPLES_EXAMPLES = 'brings examples together with each other'
TAKES_APART = 'takes the examples apart'
GOES_ALONG_EXAMPLES = 'goes along the examples'
COMPUTES_WITH_POSITIONS = 'computes with the positions of the examples'
TAKES_BY_PLACES = 'takes elements by their places'
"""Why a proof ends, where several rules have the same reason."""


# ---- questions about states ----------------------------------------------------------------------

def any_by_example(states: typing.Iterable[State]) -> bool:
    """Whether at least one of the states has entries of single examples."""
    return any(state.is_by_example for state in states)


def any_of_kind(states: typing.Iterable[State], *kinds: Kind) -> bool:
    """Whether at least one of the states is of one of these kinds."""
    return any(state.kind in kinds for state in states)


def any_position(states: typing.Iterable[State]) -> bool:
    """Whether at least one of the states tells positions of examples."""
    return any(state.is_position for state in states)


def tell_of_examples(states: typing.Sequence[State]) -> bool:
    """Whether at least one of the states has entries of single examples, or their positions."""
    return any_by_example(states) or any_position(states)


def kinds_of(states: typing.Iterable[State]) -> typing.Set[Kind]:
    """The kinds of the states, each once."""
    return {state.kind for state in states}


def layouts_of_examples(states: typing.Iterable[State]) -> typing.Set[Layout]:
    """The layouts of the values that have entries of single examples. It is one layout, if all of
    these values have the examples in the same place."""
    return {state.layout for state in states if state.is_by_example}


def is_of_batch(state: State) -> bool:
    """Whether a value has the entries of all examples of the shard along a dimension."""
    return state.kind in (Kind.PER_EXAMPLE, Kind.ROWS)


def has_examples_first(state: State) -> bool:
    """Whether a value has entries of each example along dimension 0, the same number of each."""
    return state.kind is Kind.PER_EXAMPLE and state.axis == 0


def are_shared_arguments(states: typing.Sequence[State]) -> bool:
    """Whether all examples of the shard have the same arguments, such as an axis.

    An argument may depend on all examples together, as a mean does: then `by_table` marks the
    result.
    """
    return not tell_of_examples(states)


def is_same_on_towers(state: State) -> bool:
    """Whether a number is the same on every tower, however many examples each tower has."""
    return state.kind in (Kind.INDEPENDENT, Kind.SIZES) and not state.depends_on_size


def fits_examples_as_built(state: State, view: View) -> bool:
    """Whether a value without examples may be combined with the examples, one entry with each.

    There are two kinds of analyses. A proof is about batches of any size: ones [8, 4] fit batches
    of 8 examples alone, and the answer is False. The analysis of a graph as built, with a static
    batch of 8 examples, only finds out where these 8 examples are (`static_batch`). There ones
    [8, 4] count as ones for each of the 8 examples, and the answer is True.
    """
    return view.is_as_built and state.is_uniform


def is_shared_or_at(state: State, layout: Layout) -> bool:
    """Whether an argument is the same on every tower, or has a number for each example in a given
    layout. Examples are lengths of sequences: one length for all, or [n], a length for each.

    In a vector of another layout, an example would get the number of another example: in [2 n] with
    two neighbouring numbers of each example, or in rows that a mask leaves.
    """
    return state.kind is Kind.INDEPENDENT or state.layout == layout


def vector_along_examples(state: State) -> State:
    """The state of a vector with one entry for each step of a value along the examples' dimension:
    for x [4, 3 n], a vector [3 n].

    Args:
      state: the state of the value: of the batch, or positions.
    """
    return State(Kind.PER_EXAMPLE, axis=0, outer=state.outer, inner=state.inner)


# ---- questions about sizes, and about lengths ----------------------------------------------------

def is_multiple_of_examples(size: Size) -> bool:
    """Whether a size is a multiple of the number of examples: 2 n, and neither 4 nor n + 1; nor -n,
    as of the difference 0 - n."""
    return size.per_example > 0 and size.constant == 0


def axes_of_examples(shape: Sizes) -> typing.List[int]:
    """The dimensions of a shape whose lengths contain the number of examples: [1] for the shape
    (4, 2 n)."""
    return [axis for axis, size in enumerate(shape) if size.per_example]


def begins_with_examples(shape: typing.Optional[Sizes], entries_of_each: int = 1) -> bool:
    """Whether a shape is known to begin with `entries_of_each` times the number of examples, and to
    have this number nowhere else: (3 n, 4), with 3 entries of each example.

    Args:
      shape: the shape; None where it is not known.
      entries_of_each: how many entries each example has along the first dimension.
    """
    if shape is None or axes_of_examples(shape) != [0]:
        return False
    return shape[0] == Size(constant=0, per_example=entries_of_each)


def has_one_entry_along(axis: int, tensor: tf.Tensor, view: View) -> bool:
    """Whether it is certain that a tensor has the length 1 along a dimension, so that broadcasting
    gives this one entry to each example.

    Args:
      axis: the dimension; a negative one counts from the last, -1.
      tensor: the tensor, which has this dimension.
      view: `View`.
    """
    shape = view.shape(tensor)
    return shape is not None and shape[axis] == 1


def is_broadcast_along(axis_from_end: int, tensor: tf.Tensor, view: View) -> bool:
    """Whether it is certain that a tensor has one entry along a dimension, or lacks the dimension,
    so that broadcasting repeats the tensor along it.

    Args:
      axis_from_end: the dimension, counted from the last, -1.
      tensor: the tensor.
      view: `View`.
    """
    rank = view.rank(tensor)
    if rank is None:
        return False
    lacks_dimension = rank < -axis_from_end
    return lacks_dimension or has_one_entry_along(axis_from_end, tensor, view)


def has_examples_last(state: State, rank: int) -> bool:
    """Whether a tensor of this rank has the examples along its last dimension, as [4, n] has."""
    return is_of_batch(state) and state.axis == rank - 1


# ---- what is known -------------------------------------------------------------------------------

class NotKnown(Exception):
    """The proof ends at an operation, since a value that its rule needs is not known.

    `by_table`, which asks the rules, takes `state` of this exception for the rule's answer. Where
    the `of_sizes` of a row raises it, the result is no size, and `by_table` asks the rule.
    """

    def __init__(self, op: tf.Operation, why: str):
        """Takes the operation, and the predicate of a sentence about it."""
        super().__init__(why)
        self.state = unknown(op, why)


_Value = typing.TypeVar('_Value')


def required(value: typing.Optional[_Value], op: tf.Operation, why: str) -> _Value:
    """Returns a value that the rule of an operation needs, such as a shape, if it is known.

    Args:
      value: the value; None where it is not known.
      op: the operation; the proof ends here if the value is not known.
      why: the predicate of a sentence about the operation: 'has a shape that is not static'.

    Raises:
      NotKnown: the value is not known.
    """
    if value is None:
        raise NotKnown(op, why)
    return value


def static_rank(tensor: tf.Tensor, op: tf.Operation, view: View) -> int:
    """The number of dimensions of an input or a result of an operation.

    Raises:
      NotKnown: the rank is not static, so that the proof ends at the operation.
    """
    return required(view.rank(tensor), op, NO_STATIC_RANK)


def static_value(tensor: tf.Tensor, op: tf.Operation, view: View) -> np.ndarray:
    """The value of an argument of an operation, such as an axis.

    Raises:
      NotKnown: the value is not static, so that the proof ends at the operation.
    """
    return required(view.value(tensor), op, NO_STATIC_ARGUMENT)


def static_axes(tensor: tf.Tensor, rank: int, op: tf.Operation, view: View) -> typing.List[int]:
    """The dimensions that an argument of an operation names, counted from 0.

    Args:
      tensor: the argument, a number or a vector of numbers; a negative one counts from the last.
      rank: the number of dimensions there are.
      op: the operation.
      view: `View`.

    Raises:
      NotKnown: the dimensions are not static, so that the proof ends at the operation.
    """
    return [int(axis) % rank for axis in np.ravel(static_value(tensor, op, view))]


def static_entry(tensor: tf.Tensor, place: int, op: tf.Operation, view: View) -> np.ndarray:
    """The value of one entry of a vector, or of one row of a matrix, that is an argument of an
    operation. The other entries or rows need not be static.

    Raises:
      NotKnown: the entry is not static, so that the proof ends at the operation.
    """
    return required(view.entry(tensor, place), op, NO_STATIC_ARGUMENT)


def are_zeros(tensor: tf.Tensor, view: View) -> bool:
    """Whether all entries of a tensor are known to be 0."""
    value = view.value(tensor)
    return value is not None and not value.any()


# ---- questions about operations ------------------------------------------------------------------

def is_set(op: tf.Operation, attribute: str) -> bool:
    """Whether an operation has an attribute, and the attribute is neither False nor 0. Operations
    of some types, or of some TensorFlows, lack an attribute, such as `batch_dims`."""
    return attribute in op.node_def.attr and bool(op.get_attr(attribute))


def takes_whole_rows(gather: tf.Operation, view: View) -> bool:
    """Whether a `tf.gather` takes entries along the first dimension, x[i], and so whole rows.

    Only the type `GatherV2` has an axis, its third input, and the attribute `batch_dims`: how many
    of the first dimensions `params` and `indices` have in common, as b in x[b, indices[b, i]].
    """
    if gather.type != 'GatherV2':
        return True
    is_along_first = view.value(gather.inputs[2]) == 0  # False for a value that is not static
    return bool(is_along_first) and not gather.get_attr('batch_dims')


# ---- the examples' dimension ---------------------------------------------------------------------

def state_of_layout(layout: Layout) -> State:
    """The state of values with a given layout, without any other property, and without marks."""
    return State(layout.kind, layout.axis, layout.outer, layout.inner, layout.selection)


def with_new_dimension(state: State, place: int) -> State:
    """The state of values of the batch after a new dimension is inserted at a place.

    Inserted at 0, [n, 4] becomes [1, n, 4], with the examples along dimension 1. Inserted at 1, it
    becomes [n, 1, 4], with the examples still along dimension 0.
    """
    if place > state.axis:
        return state
    return state._replace(axis=state.axis + 1)


def without_dimensions(state: State, dropped: typing.Iterable[int]) -> State:
    """The state of values of the batch after some dimensions are dropped, but not the examples'.

    [1, n, 4] without dimension 0 is [n, 4], with the examples along dimension 0.
    """
    dropped_before = [axis for axis in dropped if axis < state.axis]
    return state._replace(axis=state.axis - len(dropped_before))
