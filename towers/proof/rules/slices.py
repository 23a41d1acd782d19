"""Rules for slices: `x[:, 1]`, `x[..., None]`, `tf.slice`.

A slice keeps the state if it takes all of the examples, in their order; of the other dimensions it
may take any part. `x[1:]` of x [n, 4] drops the first example of each shard.
"""

import enum
import typing

import tensorflow.compat.v1 as tf

from towers.proof.rules.gathers import values_at
from towers.proof.rules.layout import moves_entries
from towers.proof.sizes import as_number, sizes_in
from towers.proof.states import (
    NO_STATIC_ARGUMENT,
    NO_STATIC_RANK,
    ONE_EXAMPLE,
    ROW_OF_EACH_EXAMPLE,
    Kind,
    State,
    unknown,
)
from towers.proof.view import View

_States = typing.Sequence[State]
_Found = typing.Union[State, typing.List[State]]

_WITHOUT_END = 2 ** 31 - 1  # an end that no dimension reaches
_TAKES_SOME = 'takes some of the examples'
_WITH_POSITIONS = 'computes with the numbers of the examples'


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
    reaches_end: bool  # whether a range ends with the dimension
    stride: typing.Optional[int]  # None where it is not static

    @property
    def is_whole(self) -> bool:
        """Whether it takes all entries, with any stride."""
        return self.form is _Form.RANGE and self.begin == 0 and self.reaches_end


_WHOLE = _Item(_Form.RANGE, 0, True, 1)


def _items(op: tf.Operation, limits: typing.List[tf.Tensor],
           view: View) -> typing.Optional[typing.List[_Item]]:
    """The items in the brackets of a slice; None where their number is not static.

    Args:
      op: the operation, whose masks tell the form of each item.
      limits: its arguments begin, end and strides, each a vector with a number for each item.
      view: `View`.
    """
    begins, ends, strides = [view.value(tensor) for tensor in limits]
    shape = view.shape(limits[0])
    if shape is None or shape[0] is None:
        return None
    found = []
    for place in range(shape[0]):
        begin = None if begins is None else int(begins[place])
        end = None if ends is None else int(ends[place])
        stride = None if strides is None else int(strides[place])
        form = _form(op, place)
        has_no_begin = _is_in_mask(op, 'begin_mask', place)
        if has_no_begin:
            begin = 0 if form is _Form.RANGE else None
        has_no_end = _is_in_mask(op, 'end_mask', place) or end is not None and end >= _WITHOUT_END
        found.append(_Item(form, begin, has_no_end, stride))
    return found


def _form(op: tf.Operation, place: int):
    """The form of the item at a place in the brackets."""
    if _is_in_mask(op, 'ellipsis_mask', place):
        return _Form.ELLIPSIS
    if _is_in_mask(op, 'new_axis_mask', place):
        return _Form.NEW_AXIS
    if _is_in_mask(op, 'shrink_axis_mask', place):
        return _Form.INDEX
    return _Form.RANGE


def _is_in_mask(op: tf.Operation, name: str, place: int):
    """Whether a mask of a slice has the bit of an item."""
    return bool(op.get_attr(name) & 1 << place)


def _for_each_dimension(items: typing.List[_Item], rank: int) -> typing.List[_Item]:
    """The items for `rank` dimensions: whole ranges in the place of the ellipsis, or at the end."""
    forms = [item.form for item in items]
    dimensions = forms.count(_Form.RANGE) + forms.count(_Form.INDEX)
    rest = [_WHOLE] * (rank - dimensions)
    if _Form.ELLIPSIS not in forms:
        return items + rest
    place = forms.index(_Form.ELLIPSIS)
    return items[:place] + rest + items[place + 1:]


def _sliced(op: tf.Operation, state: State, rank: int, limits: typing.List[tf.Tensor],
            view: View) -> State:
    """The state of a slice of values with the examples along a dimension.

    Args:
      op: the operation.
      state: of the values, PER_EXAMPLE or ROWS.
      rank: the number of their dimensions.
      limits: the arguments begin, end and strides.
      view: `View`.
    """
    items = _items(op, limits, view)
    if items is None:
        return unknown(op, NO_STATIC_ARGUMENT)
    dimension = 0  # of the values
    axis = 0  # of the result
    for item in _for_each_dimension(items, rank):
        if item.form is _Form.NEW_AXIS:
            axis += 1
            continue
        if dimension == state.axis:
            if not item.is_whole:
                return unknown(op, _TAKES_SOME)
            if item.stride != 1:
                return unknown(op, 'takes some of the examples, or changes their order')
            return state._replace(axis=axis)
        dimension += 1
        if item.form is _Form.RANGE:
            axis += 1
    return unknown(op, NO_STATIC_RANK)


def strided_slice(op: tf.Operation, states: _States, view: View) -> _Found:
    """`x[:, 1]`: all of the examples, and a part of the other dimensions, keep [n, 4] as [n].

    Of index vectors [rows, 2], the column `[:, 0]` has the positions of examples. In the iteration
    e of a loop over the examples, `x[e]` is one example.
    """
    if _is_at_counter(op, states[0], view):
        return ONE_EXAMPLE.with_marks_of(*states)
    for state in states:
        if state.kind is Kind.UNKNOWN:
            return state
    if states[0].kind is Kind.INDICES:
        return _column_of_indices(op, states[0], view)
    if states[0].is_position:
        return unknown(op, _WITH_POSITIONS)
    return _strided_slice(op, states, view)


@moves_entries
def _strided_slice(op: tf.Operation, state: State, view: View) -> State:
    """A slice of values of the examples."""
    rank = view.rank(op.inputs[0])
    if rank is None:
        return unknown(op, NO_STATIC_RANK)
    return _sliced(op, state, rank, list(op.inputs)[1:], view)


def _is_at_counter(op: tf.Operation, state: State, view: View) -> bool:
    """Whether a slice is `x[e]` or `x[e, …]`, of the number e of an iteration over the examples.

    The end of an index is not looked at: TensorFlow takes the entry at its begin.
    """
    begin, end = op.inputs[1].op, op.inputs[2].op
    is_index = _form(op, 0) is _Form.INDEX and not _is_in_mask(op, 'begin_mask', 0)
    is_index = is_index and begin.type == end.type == 'Pack'
    if not is_index or state.layout != ROW_OF_EACH_EXAMPLE:
        return False
    number = view.state(begin.inputs[0])
    if number.kind is not Kind.POSITION or view.rank(begin.inputs[0]) != 0:
        return False
    limits = list(begin.inputs)[1:] + list(end.inputs)[1:] + list(op.inputs)[3:]
    others = [view.state(tensor) for tensor in limits]
    return all(other.kind in (Kind.INDEPENDENT, Kind.ONE_EXAMPLE, Kind.SIZES) and (
        not other.depends_on_size) for other in others)


def _column_of_indices(op: tf.Operation, indices: State, view: View):
    """`indices[:, 0]`: the position of the example of each row; of another column, a number."""
    items = _items(op, list(op.inputs)[1:], view)
    if items is None or len(items) != 2:
        return unknown(op, _WITH_POSITIONS)
    rows, column = items
    is_column = rows == _WHOLE and column.form is _Form.INDEX
    if not is_column or column.begin is None or column.begin < 0:
        return unknown(op, _WITH_POSITIONS)
    if column.begin == 0:
        return indices._replace(kind=Kind.POSITION)
    return values_at(indices).with_marks_of(indices)


def strided_slice_gradient(op: tf.Operation, states: _States, view: View) -> State:
    """The gradient of `x[:, 1]`: [n] becomes [n, 4], with zeros around, if the slice took all of
    the examples."""
    shape, limits, gradient = states[0], states[1:-1], as_number(op, states[-1], view)
    sizes = sizes_in(op.inputs[0], shape, view)
    if sizes is None or not _are_constant(limits):
        return unknown(op, NO_STATIC_ARGUMENT)
    axes = [axis for axis, size in enumerate(sizes) if size.per_example]
    if not axes and not gradient.is_by_example and not gradient.has_offset:
        return gradient
    if len(axes) != 1 or gradient.kind is not Kind.PER_EXAMPLE:
        return unknown(op, _TAKES_SOME)
    axis = axes[0]
    if sizes[axis].constant or sizes[axis].per_example != gradient.outer * gradient.inner:
        return unknown(op, _TAKES_SOME)
    before = gradient._replace(axis=axis, is_constant=False)
    sliced = _sliced(op, before, len(sizes), list(op.inputs)[1:4], view)
    if sliced.kind is Kind.UNKNOWN or sliced.axis != gradient.axis:
        return unknown(op, _TAKES_SOME)
    return before


def _are_constant(limits: _States) -> bool:
    """Whether limits are the same on every tower, whatever the number of their examples."""
    for limit in limits:
        if limit.kind not in (Kind.INDEPENDENT, Kind.SIZES) or limit.depends_on_size:
            return False
    return True


@moves_entries
def slice_(op: tf.Operation, state: State, view: View) -> State:
    """`tf.slice(x, [0, 1], [-1, 2])`: all of the examples, from the first to the last."""
    begin = view.entry(op.inputs[1], state.axis)
    size = view.entry(op.inputs[2], state.axis)
    if begin is None or size is None:
        return unknown(op, NO_STATIC_ARGUMENT)
    if int(begin) != 0 or int(size) != -1:
        return unknown(op, _TAKES_SOME)
    return state
