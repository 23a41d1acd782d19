"""Rules for operations that put entries elsewhere: where the examples go.

The entries of a tensor are in row-major order, and an example is found in it by its stride, the
number of entries from one example to the next. In the scratch graph (`scratch`) the number of
examples is a prime that divides no other length, so that exactly one dimension has the examples.
"""

import functools
import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers.proof.rules.shapes import rearranged_sizes
from towers.proof.rules.totals import any_by_example, not_linear, sum_of_totals
from towers.proof.sizes import as_number, as_numbers, sizes_in, sizes_of_dimensions
from towers.proof.states import (
    NO_STATIC_ARGUMENT,
    NO_STATIC_RANK,
    ROW_OF_EACH_EXAMPLE,
    Kind,
    Size,
    State,
    per_example,
    unknown,
)
from towers.proof.view import View

_States = typing.Sequence[State]
_Found = typing.Union[State, typing.List[State]]
_Lengths = typing.List[typing.Optional[int]]

_KEEP_UNIFORM = ('Reshape', 'ExpandDims', 'Squeeze', 'Transpose', 'StridedSlice', 'Slice', 'Tile',
                 'Unpack', 'ReverseV2')
_NOT_STATIC_SHAPE = 'has a shape that is not static'
_GOES_ALONG = 'goes along the examples'


# ---- what these rules have in common -------------------------------------------------------------

def moves_entries(rule: typing.Callable) -> typing.Callable:
    """Makes a whole rule of one for values of the examples, where an operation moves entries.

    The first input has the entries; the others are arguments such as `axis`. All other values than
    those of the examples keep their states: a mean of moved entries is the moved mean. Sizes and
    static integers stay sizes.

    Args:
      rule: function of the operation, the state of its first input, which is PER_EXAMPLE or ROWS,
        and the view. It returns the state of the results, or a list of them.
    """
    @functools.wraps(rule)
    def whole_rule(op: tf.Operation, states: _States, view: View) -> _Found:
        """The rule for inputs of any state."""
        return _moved(rule, op, states, view)
    return whole_rule


def _moved(rule: typing.Callable, op: tf.Operation, states: _States, view: View) -> _Found:
    """The states of the results of an operation that moves entries; see `moves_entries`."""
    sizes = _moved_sizes(op, states, view)
    if sizes is not None:
        return sizes
    state = as_number(op, states[0], view)
    arguments = list(states[1:])
    is_of_batch = state.kind in (Kind.PER_EXAMPLE, Kind.ROWS)
    has_shape_of_examples = op.type == 'Reshape' and is_of_batch
    if not has_shape_of_examples:
        arguments = as_numbers(op, arguments, view)
    for argument in arguments:
        if argument.kind not in (Kind.INDEPENDENT, Kind.SIZES):
            return unknown(op, 'moves entries to places that are computed from the examples')
    if state.is_position:
        return _moved_positions(op, state, view)
    if not state.is_by_example or state.kind is Kind.ONE_EXAMPLE:
        is_uniform = state.is_uniform and op.type in _KEEP_UNIFORM
        return state._replace(is_uniform=is_uniform).with_marks_of(*arguments)
    found = rule(op, state, view)
    if isinstance(found, State):
        return found.with_marks_of(*arguments)
    return [each.with_marks_of(*arguments) for each in found]


def _moved_sizes(op: tf.Operation, states: _States, view: View) -> typing.Optional[State]:
    """The sizes that an operation moves, or static integers that may be sizes; None of others."""
    state = states[0]
    is_integer = op.inputs[0].dtype.is_integer and state.kind is Kind.INDEPENDENT
    if state.kind is not Kind.SIZES and not is_integer:
        return None
    return rearranged_sizes(op, list(states), view)


def computes_entries(rule: typing.Callable) -> typing.Callable:
    """Makes a whole rule as `moves_entries` does, for an operation that is not linear in the
    entries: means and sums do not stay such."""
    of_examples = moves_entries(rule)

    @functools.wraps(rule)
    def whole_rule(op: tf.Operation, states: _States, view: View) -> _Found:
        """The rule for inputs of any state."""
        if states[0].is_by_example:
            return of_examples(op, states, view)
        return not_linear(op, states, view)
    return whole_rule


def _moved_positions(op: tf.Operation, state: State, view: View):
    """Positions [n] of examples stay positions as [n, 1] or [1, n]."""
    shape = view.shape(op.outputs[0])
    is_vector = state.kind in (Kind.POSITION, Kind.ROW_POSITION)
    has_same_entries = is_vector and op.type in ('ExpandDims', 'Reshape', 'Squeeze')
    if has_same_entries and shape is not None and shape.count(1) == len(shape) - 1:
        axes = [axis for axis, length in enumerate(shape) if length != 1]
        return state._replace(axis=axes[0])
    return unknown(op, 'computes with the numbers of the examples')


# ---- the same entries in another shape -----------------------------------------------------------

@moves_entries
def reshape(op: tf.Operation, state: State, view: View) -> State:
    """`tf.reshape`: the entries keep their order, so the stride of an example is the same before
    and after: [n, 3, 4] becomes [3 n, 4], with 3 neighbouring rows of each example."""
    before = view.shape(op.inputs[0])
    after = view.shape_by_inference(op.outputs[0])
    if before is None or after is None:
        return unknown(op, _NOT_STATIC_SHAPE)
    if state.kind is Kind.ROWS:
        return _reshaped_rows(op, state, before, after)
    if None in before or None in after:
        blocks = _reshaped_blocks(op, state, view)
        if blocks is not None:
            return blocks
        return _reshaped_behind(op, state, before, after, view)
    stride = state.inner * _product(before[state.axis + 1:])
    axes = {}  # {dimension that may have the examples: number of neighbouring entries of one}
    for axis, length in enumerate(after):
        behind = _product(after[axis + 1:])
        if not behind or not stride or stride % behind:
            continue
        inner = stride // behind
        if length and length % (view.examples * inner) == 0:
            axes[axis] = inner
    if len(axes) != 1:
        return unknown(op, 'spreads an example over several dimensions')
    [(axis, inner)] = axes.items()
    if not has_examples_at(axis, op.inputs[1], view):
        return unknown(op, 'has a shape that is another one for another number of examples')
    outer = after[axis] // (view.examples * inner)
    return per_example(axis, outer, inner, state.is_constant)


def _exact_product(lengths) -> int:
    """The product of lengths, among which are stand-ins for those that are not static."""
    total = 1
    for length in lengths:
        total *= length
    return total


def _product(lengths) -> int:
    """The number of entries in dimensions of these lengths."""
    return int(np.prod(lengths, dtype=np.int64))


def has_examples_at(axis: int, shape: tf.Tensor, view: View) -> bool:
    """Whether a shape, as far as it is known, has the number of examples in one dimension alone.

    Args:
      axis: the dimension.
      shape: a tensor of sizes, such as (2 n, 4).
      view: `View`.
    """
    sizes = sizes_in(shape, view.state(shape), view)
    for place, size in enumerate(sizes or ()):
        if size.per_example and (place != axis or size.constant):
            return False
    return True


def _reshaped_behind(op: tf.Operation, state: State, before: _Lengths, after: _Lengths,
                     view: View):
    """A reshape of dimensions some of which are not static: [n, None, 4] as [n, None, 2, 2]; right
    where all dimensions up to that of the examples keep their lengths."""
    kept = before[:state.axis + 1]
    if None not in kept and kept == after[:state.axis + 1]:
        return state
    return _reshaped_if(op, state, after, view)


def _reshaped_blocks(op: tf.Operation, state: State, view: View) -> typing.Optional[State]:
    """A reshape of [n, L, 4], where each example is a block of entries, whose lengths need not be
    static; None where that is not known.

    As [k n, 4] with a number n of examples in it, it has k rows of each example, since the number
    of entries is the same before and after. As [-1, 4], it has as many rows of each example as 4
    divides the entries of one.
    """
    lengths = sizes_of_dimensions(op.inputs[0], state, view)
    shape = sizes_in(op.inputs[1], view.state(op.inputs[1]), view)
    is_of_blocks = state.axis == 0 and state.outer == 1
    if not is_of_blocks or lengths is None or not shape:
        return None
    if any(size.per_example for size in shape[1:]):
        return None
    rest = [size.constant for size in shape[1:]]
    entries = state.inner * _exact_product([size.constant for size in lengths[1:]])
    inner = _rows_of_each(shape[0], rest, entries)
    return None if inner is None else per_example(0, inner=inner, is_constant=state.is_constant)


def _rows_of_each(first: Size, rest: typing.List[int], entries: int) -> typing.Optional[int]:
    """How many rows of a shape belong to each example; None where that is not known.

    Args:
      first: the number of rows, k n, or -1 for as many as there are.
      rest: the lengths behind it, of which one may be -1 where the first is not.
      entries: the number of entries of each example.
    """
    if first.per_example and not first.constant:
        is_known = all(length > 0 or length == -1 for length in rest)
        return first.per_example if is_known else None
    width = _exact_product(rest)
    if first != Size(-1) or min(rest, default=1) <= 0 or entries % width:
        return None
    return entries // width


def _reshaped_if(op: tf.Operation, state: State, after: _Lengths, view: View):
    """A reshape of [n, None] as [-1, 5]: a row for each example, if each has 5 numbers; a proof
    that needs it says so."""
    shape = view.value(op.inputs[1])
    if state.layout != ROW_OF_EACH_EXAMPLE or shape is None:
        return unknown(op, _NOT_STATIC_SHAPE)
    if len(shape) < 2 or shape[0] != -1 or None in after[1:]:
        return unknown(op, _NOT_STATIC_SHAPE)
    view.suppose(op, 'takes %d numbers of each example' % _product(after[1:]))
    return state.with_shard_statistics([op.name])


def _reshaped_rows(op: tf.Operation, state: State, before: _Lengths, after: _Lengths):
    """A reshape of rows: right where each keeps its number of entries, and none is beside them."""
    if after.count(None) != 1:
        return unknown(op, _NOT_STATIC_SHAPE)
    axis = after.index(None)
    entries_before = before[state.axis + 1:]
    entries_after = after[axis + 1:]
    beside = set(before[:state.axis] + after[:axis])
    if not beside <= {1} or None in entries_before:
        return unknown(op, _NOT_STATIC_SHAPE)
    if _product(entries_before) != _product(entries_after):
        return unknown(op, _NOT_STATIC_SHAPE)
    return state._replace(axis=axis)


@moves_entries
def expand_dims(op: tf.Operation, state: State, view: View) -> State:
    """`tf.expand_dims(x [n, 4], 0)`: [1, n, 4] has the examples along dimension 1."""
    axis = view.value(op.inputs[1])
    rank = view.rank(op.inputs[0])
    if axis is None or rank is None:
        return unknown(op, NO_STATIC_ARGUMENT)
    place = int(np.ravel(axis)[0]) % (rank + 1)
    is_before = place <= state.axis
    return state._replace(axis=state.axis + is_before)


@moves_entries
def squeeze(op: tf.Operation, state: State, view: View) -> State:
    """`tf.squeeze(x [1, n, 4], [0])`: [n, 4]. The dimensions to drop have to be named, as a shard
    may have one example."""
    rank = view.rank(op.inputs[0])
    if rank is None:
        return unknown(op, NO_STATIC_RANK)
    dropped = [axis % rank for axis in op.get_attr('squeeze_dims')]
    if not dropped:
        return unknown(op, 'drops every dimension of length 1, and so that of a single example: '
                           'pass axis=')
    if state.axis in dropped:
        return unknown(op, "drops the examples' dimension")
    dropped_before = sum(axis < state.axis for axis in dropped)
    return state._replace(axis=state.axis - dropped_before)


@moves_entries
def transpose(op: tf.Operation, state: State, view: View) -> State:
    """`tf.transpose(x [n, 3, 4], [1, 0, 2])`: [3, n, 4], with the examples along dimension 1."""
    order = view.value(op.inputs[1])
    if order is None:
        return unknown(op, NO_STATIC_ARGUMENT)
    return state._replace(axis=[int(axis) for axis in order].index(state.axis))


# ---- more entries --------------------------------------------------------------------------------

@moves_entries
def pad(op: tf.Operation, state: State, view: View) -> State:
    """`tf.pad`: of other dimensions than the examples'; zeros around a mean are means of zeros."""
    widths = view.entry(op.inputs[1], state.axis)
    if widths is None:
        return unknown(op, NO_STATIC_ARGUMENT)
    if widths.any():
        return unknown(op, 'pads the examples')
    return state._replace(is_constant=False)


def tile(op: tf.Operation, states: _States, view: View) -> _Found:
    """`tf.tile`: w [1, 4], the same on every tower, becomes [n, 4], the same for each example.

    Of x [n, 4], along dimension 0, all examples come after all of them; along another one, each has
    more entries.
    """
    state, multiples = as_number(op, states[0], view), states[1]
    if state.is_by_example or multiples.kind is not Kind.SIZES:
        return _tile_examples(op, states, view)
    if state.kind is not Kind.INDEPENDENT:
        return unknown(op, 'repeats %s' % state.kind.value)
    axes = [axis for axis, size in enumerate(multiples.sizes) if size.per_example]
    if not axes:
        return state
    axis = axes[0]
    times = multiples.sizes[axis]
    shape = view.shape(op.inputs[0])
    has_one_entry = len(axes) == 1 and shape is not None and shape[axis] == 1
    if not has_one_entry or times.constant:
        return unknown(op, 'repeats several entries as often as there are examples')
    return per_example(axis, inner=times.per_example, is_constant=True).with_marks_of(*states)


@moves_entries
def _tile_examples(op: tf.Operation, state: State, view: View) -> State:
    """A tile of values of the examples."""
    multiple = view.entry(op.inputs[1], state.axis)
    if multiple is None:
        return unknown(op, NO_STATIC_ARGUMENT)
    times = int(multiple)
    if times != 1 and state.kind is not Kind.PER_EXAMPLE:
        return unknown(op, 'repeats rows of which examples have different numbers')
    return state._replace(outer=state.outer * times)


# ---- along dimensions ----------------------------------------------------------------------------

def _along_axes(op: tf.Operation, state: State, view: View) -> State:
    """`tf.reverse`, `tf.roll`, `tf.cumsum`, `tf.math.cumprod`: along another dimension than the
    examples', each of them by itself."""
    axes = view.value(op.inputs[2 if op.type == 'Roll' else 1])
    rank = view.rank(op.inputs[0])
    if axes is None or rank is None:
        return unknown(op, NO_STATIC_ARGUMENT)
    if state.axis in [int(axis) % rank for axis in np.ravel(axes)]:
        return unknown(op, _GOES_ALONG)
    return state._replace(is_constant=False)


# The first three are linear, a product is not.
along_axes, cumulative_product = moves_entries(_along_axes), computes_entries(_along_axes)


def _on_matrices(op: tf.Operation, state: State, view: View) -> State:
    """`tf.matrix_band_part`, `tf.matrix_diag`, `tf.matrix_inverse`: of x [n, 3, 3] each matrix by
    itself, in the last two dimensions."""
    rank = view.rank(op.inputs[0])
    if rank is None:
        return unknown(op, NO_STATIC_RANK)
    if state.axis >= rank - 2:
        return unknown(op, _GOES_ALONG)
    return state._replace(is_constant=False)


# The first two are linear, an inverse is not.
matrix_band, matrix_function = moves_entries(_on_matrices), computes_entries(_on_matrices)


def matrix_with_diagonal(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.linalg.set_diag(x [n, 3, 3], d [n, 3])`: each matrix with its own diagonal.

    Of two means the entries of one and of the other are means.
    """
    numbers = as_numbers(op, states, view)
    matrices, diagonals = numbers[:2]
    if not any_by_example(numbers):
        return sum_of_totals(op, numbers, view)
    rank = view.rank(op.inputs[0])
    if rank is None or matrices.layout != diagonals.layout or matrices.axis >= rank - 2:
        return unknown(op, 'sets diagonals that are not known to be of the same examples')
    return matrices._replace(is_constant=False).with_marks_of(*numbers)
