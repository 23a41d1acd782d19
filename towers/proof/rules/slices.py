"""Rules for slices: `x[:, 1]`, `x[..., None]`, `tf.slice`.

A slice keeps the state if it takes all examples in their order. It may take any part of the other
dimensions. The slice `x[1:]` of x [n, 4] is refused: it drops the first example of each shard.

The brackets hold a list of items, separated by commas. TensorFlow's `StridedSlice` has three
vectors, `begin`, `end` and `strides`, with a number for each item. It also has five masks. Bit i of
three masks tells the form of item i (`_form`); bit i of the other two tells that the begin, or the
end, of item i is left out.
"""

import enum
import typing

import tensorflow.compat.v1 as tf

from towers.proof.rules.common import (
    COMPUTES_WITH_POSITIONS,
    Results,
    axes_of_examples,
    is_same_on_towers,
    required,
    static_entry,
    static_rank,
)
from towers.proof.rules.gathers import values_at
from towers.proof.rules.moves import moves_entries
from towers.proof.sizes import Sizes, as_number, sizes_in
from towers.proof.states import (
    NO_STATIC_ARGUMENT,
    ONE_EXAMPLE,
    ROW_OF_EACH_EXAMPLE,
    TAKES_SOME,
    Kind,
    Size,
    State,
    first_unknown,
    unknown,
)
from towers.proof.view import View

_States = typing.Sequence[State]

_WITHOUT_END = 2 ** 31 - 1  # the largest int32; an end this large reaches the end of any dimension


# ---- the items in brackets -----------------------------------------------------------------------

class _Form(enum.Enum):
    """The forms of an item in brackets."""
    RANGE = '1:3'
    INDEX = '1'
    NEW_AXIS = 'None'
    ELLIPSIS = '...'


class _Item(typing.NamedTuple):
    """An item in the brackets of `x[:, 1, ..., None]`."""
    form: _Form
    begin: typing.Optional[int]  # None where it is not static
    reaches_end: bool  # whether a range ends with any dimension, however long it is
    end: typing.Optional[Size]  # the number in the vector of ends; None where it is not known
    stride: typing.Optional[int]  # None where it is not static

    def takes_all(self, lengths: typing.Sequence[Size] = ()) -> bool:
        """Whether it takes a whole dimension in its order.

        Args:
          lengths: what the length of the dimension is known to be.
        """
        ends_with_dimension = self.reaches_end or self.end in lengths
        is_range_from_first = self.form is _Form.RANGE and self.begin == 0
        return is_range_from_first and ends_with_dimension and self.stride == 1


_WHOLE = _Item(_Form.RANGE, begin=0, reaches_end=True, end=None, stride=1)
"""The item `:`."""


def _items(op: tf.Operation, limits: typing.List[tf.Tensor],
           view: View) -> typing.List[_Item]:
    """The items in the brackets of a slice.

    Args:
      op: the operation, whose masks tell the form of each item.
      limits: its arguments begin, end and strides, each a vector with a number for each item.
      view: `View`.

    Raises:
      NotKnown: the number of the items is not static.
    """
    shape = required(view.shape(limits[0]), op, NO_STATIC_ARGUMENT)
    number_of_items = required(shape[0], op, NO_STATIC_ARGUMENT)
    begins, ends, strides = limits
    sizes_of_ends = sizes_in(ends, view.state(ends), view)  # n may be among them
    items = []
    for place in range(number_of_items):
        items.append(_Item(
            form=_form(op, place),
            begin=_begin(op, place, _number_at(place, begins, view)),
            reaches_end=_reaches_end(op, place, _number_at(place, ends, view)),
            end=None if sizes_of_ends is None else sizes_of_ends[place],
            stride=_number_at(place, strides, view)))
    return items


def _number_at(place: int, vector: tf.Tensor, view: View) -> typing.Optional[int]:
    """The number at a place in a vector; None where it is not static."""
    number = view.entry(vector, place)
    return None if number is None else int(number)


def _begin(op: tf.Operation, place: int, number: typing.Optional[int]) -> typing.Optional[int]:
    """Where the item at a place begins; None where that is not known.

    Args:
      op: the slice.
      place: the place of the item in the brackets.
      number: the item's number in the vector of begins; None where it is not static.
    """
    is_left_out = _is_in_mask(op, 'begin_mask', place)
    if not is_left_out:
        return number
    if _form(op, place) is _Form.RANGE:  # `:3` begins at 0
        return 0
    return None  # an index without a begin: Python has none, and TensorFlow's result is not known


def _reaches_end(op: tf.Operation, place: int, number: typing.Optional[int]) -> bool:
    """Whether the item at a place ends with the dimension: the mask says that its end is left out,
    as in `1:`, or its end is a number that no dimension reaches.

    Args:
      op: the slice.
      place: the place of the item in the brackets.
      number: the item's number in the vector of ends; None where it is not static.
    """
    is_left_out = _is_in_mask(op, 'end_mask', place)
    is_past_any_end = number is not None and number >= _WITHOUT_END
    return is_left_out or is_past_any_end


def _form(op: tf.Operation, place: int) -> _Form:
    """The form of the item at a place in the brackets."""
    if _is_in_mask(op, 'ellipsis_mask', place):
        return _Form.ELLIPSIS
    if _is_in_mask(op, 'new_axis_mask', place):
        return _Form.NEW_AXIS
    if _is_in_mask(op, 'shrink_axis_mask', place):
        return _Form.INDEX
    return _Form.RANGE


def _is_in_mask(op: tf.Operation, mask: str, place: int) -> bool:
    """Whether a mask of a slice has the bit of the item at a place."""
    return bool(op.get_attr(mask) & 1 << place)


def _for_each_dimension(items: typing.List[_Item], rank: int) -> typing.List[_Item]:
    """The items for `rank` dimensions. Each dimension that the brackets do not name gets a whole
    range: in the place of the ellipsis, or at the end. The item `None` is for no dimension of x."""
    forms = [item.form for item in items]
    named_dimensions = forms.count(_Form.RANGE) + forms.count(_Form.INDEX)
    rest = [_WHOLE] * (rank - named_dimensions)
    if _Form.ELLIPSIS not in forms:
        return items + rest
    place = forms.index(_Form.ELLIPSIS)
    return items[:place] + rest + items[place + 1:]


# ---- slices of the examples ----------------------------------------------------------------------

def strided_slice(op: tf.Operation, states: _States, view: View) -> Results:
    """`x[:, 1]`: takes all examples, and a part of the other dimensions: [n] of x [n, 4].

    The column `[:, 0]` of index vectors [rows, 2] has the positions of examples. In the iteration
    e of a loop over the examples, `x[e]` is one example. The limits of this slice are
    `tf.stack([e, …])` and `tf.stack([e + 1, …])`, whose state is UNKNOWN. Therefore this rule's row
    in `TABLE` has the flag `takes_unknown`, and the rule checks for UNKNOWN inputs itself.
    """
    if _is_at_counter(op, states[0], view):
        return ONE_EXAMPLE.with_marks_of(*states)
    not_known = first_unknown(states)
    if not_known is not None:
        return not_known
    if states[0].kind is Kind.INDICES:
        return _column_of_indices(op, states[0], view)
    return _slice_of_batch(op, states, view)


@moves_entries
def _slice_of_batch(op: tf.Operation, state: State, view: View) -> State:
    """A slice of values of the batch, by the items in the brackets."""
    rank = static_rank(op.inputs[0], op, view)
    limits = list(op.inputs)[1:]
    return _sliced(op, state, rank, limits, view)


def _sliced(op: tf.Operation, state: State, rank: int, limits: typing.List[tf.Tensor],
            view: View) -> State:
    """The state of a slice of values with the examples along a dimension.

    The number of examples n may be the end of the range over the examples, as in
    `tf.strided_slice(x [n, 4], (0, 0), (n, 3))`. It may be no other limit: `x[:, :n]` takes another
    part of each example in another shard.

    Args:
      op: the operation.
      state: the state of the values, PER_EXAMPLE or ROWS.
      rank: the number of the values' dimensions.
      limits: the arguments begin, end and strides.
      view: `View`.
    """
    items_in_brackets = _items(op, limits, view)
    items = _for_each_dimension(items_in_brackets, rank)
    place = _place_of_dimension(items, state.axis)
    item_of_examples = items[place]
    if not item_of_examples.takes_all(_lengths_of_examples(state, view)):
        return unknown(op, TAKES_SOME)
    begins, _, strides = limits
    other_ends = [item.end for item in items_in_brackets if item is not item_of_examples]
    have_number_of_examples = [view.state(begins).depends_on_size,
                               view.state(strides).depends_on_size,
                               any(end is not None and end.per_example for end in other_ends)]
    if any(have_number_of_examples):
        return unknown(op, 'takes another part of each example for another number of examples')
    return state._replace(axis=_dimensions_of_result(items[:place]))


def _lengths_of_examples(state: State, view: View) -> typing.List[Size]:
    """What the length of the examples' dimension is known to be: 2 n, with two entries of each
    example; in a graph as it was built, with a static batch of 8, also 16. [] of rows of which
    examples have different numbers."""
    if state.kind is not Kind.PER_EXAMPLE:
        return []
    lengths = [Size(constant=0, per_example=state.entries_of_each)]
    if view.is_as_built:
        lengths.append(Size(state.entries_of_each * view.examples))
    return lengths


def _place_of_dimension(items: typing.List[_Item], dimension: int) -> int:
    """The place of the item for a dimension of x in the list of items. The place may be larger than
    the dimension: `None`s, which are for no dimension of x, may stand before the item."""
    places = [place for place, item in enumerate(items) if item.form is not _Form.NEW_AXIS]
    return places[dimension]


def _dimensions_of_result(items: typing.List[_Item]) -> int:
    """How many dimensions some items give to the result: a range keeps its dimension, an index
    drops its dimension, `None` adds a dimension."""
    dimensions_kept = [item for item in items if item.form is not _Form.INDEX]
    return len(dimensions_kept)


@moves_entries
def slice_(op: tf.Operation, state: State, view: View) -> State:
    """`tf.slice(x, [0, 1], [-1, 2])`: takes all examples, and a part of the other dimensions.

    Along the examples, the slice has to begin at 0 and to have the size -1, which is all entries.
    Any other size would take all examples of batches of one size only.
    """
    begin = static_entry(op.inputs[1], state.axis, op, view)
    size = static_entry(op.inputs[2], state.axis, op, view)
    if int(begin) != 0 or int(size) != -1:
        return unknown(op, TAKES_SOME)
    return state


# ---- other slices --------------------------------------------------------------------------------

def _is_at_counter(op: tf.Operation, state: State, view: View) -> bool:
    """Whether a slice is `x[e]` or `x[e, …]`, where e is the number of the iteration of a loop over
    the examples.

    Then `begin` and `end` are `tf.stack([e, …])` and `tf.stack([e + 1, …])`. The end of the index
    is not checked: TensorFlow takes the entry at the begin of an index, whatever its end is.

    Args:
      op: the slice.
      state: the state of x.
      view: `View`.
    """
    _, begin, end, strides = op.inputs
    are_stacked = begin.op.type == 'Pack' and end.op.type == 'Pack'
    if not are_stacked or state.layout != ROW_OF_EACH_EXAMPLE:
        return False
    first_begin, *other_begins = begin.op.inputs
    _, *other_ends = end.op.inputs
    if not _is_counter(first_begin, view) or not _begins_with_index(op):
        return False
    # The part of the other dimensions may depend on example e, but on no other example.
    other_limits = [*other_begins, *other_ends, strides]
    return all(_is_of_one_or_shared(view.state(tensor)) for tensor in other_limits)


def _is_counter(tensor: tf.Tensor, view: View) -> bool:
    """Whether a tensor is the number of the iteration of a loop over the examples."""
    return view.state(tensor).is_position_of_each and view.rank(tensor) == 0


def _begins_with_index(op: tf.Operation) -> bool:
    """Whether the first item in the brackets of a slice is an index with a begin, `x[e, …]`."""
    return _form(op, 0) is _Form.INDEX and not _is_in_mask(op, 'begin_mask', 0)


def _is_of_one_or_shared(state: State) -> bool:
    """Whether a number is of the example of the iteration, or the same on every tower."""
    return state.kind is Kind.ONE_EXAMPLE or is_same_on_towers(state)


def _column_of_indices(op: tf.Operation, indices: State, view: View) -> State:
    """A column of index vectors [rows, k] of a sparse tensor.

    For each row, `indices[:, 0]` is the position of the row's example, and `indices[:, 1]` is any
    other number of this example.
    """
    items = _items(op, list(op.inputs)[1:], view)
    if len(items) != 2:  # not `[:, column]`
        return unknown(op, COMPUTES_WITH_POSITIONS)
    rows, column = items
    is_column = rows.takes_all() and column.form is _Form.INDEX
    # A column that is counted from the end, such as -1, may be the column of the positions: it is
    # column 0, if the vectors have one number.
    if not is_column or column.begin is None or column.begin < 0:
        return unknown(op, COMPUTES_WITH_POSITIONS)
    if column.begin == 0:
        return indices._replace(kind=Kind.POSITION)
    return values_at(indices).with_marks_of(indices)


def strided_slice_gradient(op: tf.Operation, states: _States, view: View) -> State:
    """The gradient of a slice such as `x[:, 1]`: [n] becomes [n, 4], the shape of x, with zeros
    where the slice took nothing.

    The inputs are the shape of x, the begin, the end and the strides of the slice, and the gradient
    of its result.
    """
    shape_state, *limit_states, gradient_state = states
    gradient = as_number(op, gradient_state, view)
    shape = required(sizes_in(op.inputs[0], shape_state, view), op, NO_STATIC_ARGUMENT)
    if not all(map(is_same_on_towers, limit_states)):
        return unknown(op, NO_STATIC_ARGUMENT)
    axes = axes_of_examples(shape)
    has_one_axis = len(axes) == 1  # in (n, n) the examples could be along either dimension
    if has_one_axis and gradient.kind is Kind.PER_EXAMPLE:
        return _gradient_of_examples(op, gradient, shape, axes[0], view)
    if not axes and not gradient.is_by_example:
        return _gradient_without_examples(op, gradient)
    return unknown(op, TAKES_SOME)


def _gradient_without_examples(op: tf.Operation, gradient: State) -> State:
    """The state of a gradient without entries of single examples, with zeros around it.

    Zeros around a mean are means of zeros. But zeros around a sum with an offset, such as
    sum(f) + 1, are not sums with this offset.
    """
    if gradient.has_offset:
        return unknown(op, TAKES_SOME)
    return gradient


def _gradient_of_examples(op: tf.Operation, gradient: State, shape: Sizes, axis: int,
                          view: View) -> State:
    """The state of the gradient of a slice of x: it is of the examples of x, if the slice took all
    examples of x.

    To find out whether the slice took all examples, a state with the shape of x is sliced by the
    same limits. The examples of the result have to be along the gradient's dimension of the
    examples.

    Args:
      op: the operation.
      gradient: the state of the gradient of the slice, PER_EXAMPLE.
      shape: the shape of x.
      axis: the dimension of x with the examples.
      view: `View`.
    """
    entries_of_each = gradient.outer * gradient.inner
    length_of_all = Size(constant=0, per_example=entries_of_each)
    if shape[axis] != length_of_all:
        return unknown(op, TAKES_SOME)
    result = gradient._replace(axis=axis, is_constant=False)
    limits = list(op.inputs)[1:4]
    sliced_again = _sliced(op, result, len(shape), limits, view)
    if sliced_again.layout != gradient.layout:  # UNKNOWN, for a slice of some of the examples
        return unknown(op, TAKES_SOME)
    return result
