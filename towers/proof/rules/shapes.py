"""Rules for shapes and other numbers computed from them, and for tensors of a given shape.

Of a tensor [n, 4], `tf.shape` gives the sizes n and 4, with which `proof.sizes` computes. A tensor
that is made with a shape [2 n, 4] has entries of the examples along its first dimension.
"""

import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers.proof import sizes
from towers.proof.sizes import Sizes, sizes_in, sizes_of_dimensions
from towers.proof.states import (
    INDEPENDENT,
    Kind,
    Size,
    State,
    per_example,
    sizes_state,
    unknown,
)
from towers.proof.view import View

_States = typing.List[State]
_MOST_NUMBERS = 64  # that are followed one by one


# ---- the shape of a tensor -----------------------------------------------------------------------

def shape_of(op: tf.Operation, states: _States, view: View) -> typing.List[State]:
    """`tf.shape`, `tf.size`, `tf.shape_n`: the sizes of each input.

    They are known, since the examples have one dimension, and all others have the same length on
    every tower: [n, 4] has the shape (n, 4), and the size 4 n.
    """
    return [_shape_of(op, tensor, state, view) for tensor, state in zip(op.inputs, states)]


def _shape_of(op: tf.Operation, tensor: tf.Tensor, state: State, view: View):
    """The shape, the number of entries or the number of dimensions of one tensor."""
    if op.type == 'Rank':
        rank = view.rank(tensor)
        return INDEPENDENT if rank is None else sizes_state([Size(rank)])
    lengths = sizes_of_dimensions(tensor, state, view)
    if lengths is None and state.kind is Kind.ROWS:
        return unknown(op, 'counts rows of which examples have different numbers')
    if lengths is None:
        return unknown(op, 'is a size that is not static')
    if op.type != 'Size':
        return sizes_state(lengths)
    total = sizes.product_of_all(lengths)
    if total is None:
        return unknown(op, 'multiplies the number of examples with itself')
    return sizes_state([total])


# ---- arithmetic ----------------------------------------------------------------------------------

_ARITHMETIC = {'Add': sizes.plus, 'AddV2': sizes.plus, 'Sub': sizes.minus, 'Mul': sizes.product,
               'FloorDiv': sizes.quotient, 'Div': sizes.quotient, 'FloorMod': sizes.remainder,
               'Maximum': sizes.larger}


def arithmetic_of_sizes(op: tf.Operation, states: _States, view: View) -> typing.Optional[State]:
    """The sum, product, quotient or maximum of two scalars or vectors of sizes: `2 * n + 1`.

    Returns:
      The state of the sizes; None for other operations, and where the result is no size.
    """
    function = _ARITHMETIC.get(op.type)
    if function is None or op.outputs[0].dtype not in (tf.int32, tf.int64):
        return None
    one, other = [sizes_in(tensor, state, view) for tensor, state in zip(op.inputs, states)]
    if not one or not other:
        return None
    length = max(len(one), len(other))
    is_broadcast = min(len(one), len(other)) in (1, length)
    if not is_broadcast or not _are_vectors(op.inputs, view):
        return None
    one = one * (length // len(one))
    other = other * (length // len(other))
    found = []
    for left, right in zip(one, other):
        size = function(left, right)
        if size is None:
            return None
        found.append(size)
    return sizes_state(found)


def _are_vectors(tensors: typing.Iterable[tf.Tensor], view: View) -> bool:
    """Whether tensors are scalars or vectors."""
    return all(view.rank(tensor) in (0, 1) for tensor in tensors)


def _have_rank(rank: int, tensors: typing.Iterable[tf.Tensor], view: View) -> bool:
    """Whether all tensors have so many dimensions."""
    return all(view.rank(tensor) == rank for tensor in tensors)


def prod_of_sizes(op: tf.Operation, states: _States, view: View) -> typing.Optional[State]:
    """`tf.reduce_prod` of a vector of sizes, (n, 4): 4 n. None where the result is no size."""
    is_of_vector = op.type == 'Prod' and view.rank(op.inputs[0]) == 1
    if not is_of_vector or not states[0].sizes:
        return None
    total = sizes.product_of_all(states[0].sizes)
    return None if total is None else sizes_state([total])


# ---- picking and joining -------------------------------------------------------------------------

def rearranged_sizes(op: tf.Operation, states: _States, view: View) -> typing.Optional[State]:
    """Sizes that are picked, joined or put into another shape: `tf.stack([n, 4])`, `shape[0]`.

    Returns:
      The state of the sizes; None where an input is none of sizes, and for other operations.
    """
    if op.type == 'Pack':
        is_in_order = op.get_attr('axis') == 0 or _have_rank(0, op.inputs, view)
        return _joined(list(op.inputs), states, view) if is_in_order else None
    if op.type == 'ConcatV2':
        return _joined(list(op.inputs)[:-1], states, view)
    numbers = sizes_in(op.inputs[0], states[0], view)
    if numbers is None or len(numbers) > _MOST_NUMBERS:
        return None
    places = _places(op, len(numbers), view)
    if places is None:
        return None
    return sizes_state(numbers[place] for place in places)


def _joined(tensors: typing.List[tf.Tensor], states: _States, view: View):
    """The sizes of tensors one after the other: scalars that are stacked, vectors concatenated."""
    if not _are_vectors(tensors, view):
        return None
    joined: Sizes = ()
    for tensor, state in zip(tensors, states):
        numbers = sizes_in(tensor, state, view)
        if numbers is None:
            return None
        joined += numbers
    return sizes_state(joined)


_SAME_NUMBERS = ('Identity', 'Cast', 'Reshape', 'ExpandDims', 'Squeeze', 'StopGradient')


def _places(op: tf.Operation, count: int, view: View):
    """The places, among the `count` numbers of the first input, of those that an operation gives.

    Returns:
      Array of int; None for other operations, and where they are not static.
    """
    places = np.arange(count)
    if op.type in _SAME_NUMBERS:
        return places
    arguments: typing.List[typing.Any] = [view.value(each) for each in list(op.inputs)[1:]]
    if view.rank(op.inputs[0]) != 1 or any(value is None for value in arguments):
        return None
    if op.type == 'StridedSlice':
        return _slice_of(places, op, arguments)
    if op.type == 'Slice':
        begin, length = [int(np.ravel(value)[0]) for value in arguments]
        end = count if length < 0 else begin + length
        return places[begin:end]
    if op.type in ('Gather', 'GatherV2'):
        return np.ravel(places[arguments[0]])
    return None


def _slice_of(places, op: tf.Operation, limits: typing.List[np.ndarray]):
    """`places[begin:end:strides]`, or `places[begin]`, as an array; None for `places[None]`.

    Args:
      places: array of int.
      op: the operation `StridedSlice`.
      limits: its arguments begin, end and strides.
    """
    has_other_dimensions = op.get_attr('new_axis_mask') or op.get_attr('ellipsis_mask')
    if has_other_dimensions or np.size(limits[0]) != 1:
        return None
    begin, end, stride = [int(np.ravel(value)[0]) for value in limits]
    if op.get_attr('shrink_axis_mask'):
        return places[begin:][:1]
    return places[slice(None if op.get_attr('begin_mask') else begin,
                        None if op.get_attr('end_mask') else end, stride)]


# ---- tensors of a shape --------------------------------------------------------------------------

def tensor_of_shape(op: tf.Operation, shape: typing.Optional[Sizes], shape_state: State) -> State:
    """The state of a tensor of a given shape whose values do not depend on the examples.

    Ones of shape [2 n, 4] are of the examples, two entries of each; of [3, 4] they are the same on
    every tower; of [n, n] or [n + 1] they are neither.

    Args:
      op: the operation that makes the tensor.
      shape: its shape, where that is known.
      shape_state: the state of the tensor that tells the shape.
    """
    uniform = INDEPENDENT._replace(is_uniform=True)
    if shape is None:
        if shape_state.kind is Kind.INDEPENDENT:
            return uniform
        return unknown(op, 'has a shape that is not known to be of the examples')
    axes = [axis for axis, size in enumerate(shape) if size.per_example]
    if not axes:
        return uniform
    axis = axes[0]
    if len(axes) > 1 or shape[axis].constant:
        return unknown(op, 'has a shape that is not a multiple of the number of examples')
    return per_example(axis, inner=shape[axis].per_example, is_constant=True)


def fill(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.fill`, `tf.zeros`: the same value for every example, where a dimension is theirs."""
    shape, value = states
    if value.kind not in (Kind.INDEPENDENT, Kind.SIZES) or value.depends_on_size:
        return unknown(op, 'repeats %s' % value.kind.value)
    found = tensor_of_shape(op, sizes_in(op.inputs[0], shape, view), shape)
    return found.with_marks_of(*states)


def zeros_like(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.zeros_like`, `tf.ones_like`: the same value for every example of x [n, 4]."""
    state = states[0]
    if state.kind is Kind.PER_EXAMPLE:
        return per_example(state.axis, state.outer, state.inner, is_constant=True)
    if state.kind in (Kind.ROWS, Kind.UNKNOWN):
        return state
    uniform = INDEPENDENT._replace(is_uniform=True)
    return uniform.with_marks_of(*states)  # on which the shape may depend


def random_numbers(op: tf.Operation, states: _States, view: View) -> State:
    """Random numbers of a shape: of [n, 4] each example has its own 4, as on one device."""
    shape, parameters = states[0], states[1:]
    if any(state.kind is not Kind.INDEPENDENT for state in parameters):
        return unknown(op, 'draws from a distribution of the examples')
    found = tensor_of_shape(op, sizes_in(op.inputs[0], shape, view), shape)
    drawn = found._replace(is_constant=False, is_random=True)
    return drawn.with_marks_of(*states)


def range_of(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.range`: the numbers 0, 1, …, n - 1 are the positions of the examples in the shard.

    A range between static limits has the same numbers on every tower.
    """
    if any(state.kind not in (Kind.INDEPENDENT, Kind.SIZES) for state in states):
        return unknown(op, 'has a length that is computed from the examples')
    limits = [sizes_in(tensor, state, view) for tensor, state in zip(op.inputs, states)]
    if not any(state.depends_on_size for state in states):
        return _static_range(limits) or INDEPENDENT.with_marks_of(*states)
    if limits == [(Size(0),), (Size(0, 1),), (Size(1),)]:
        return State(Kind.POSITION)
    return unknown(op, 'numbers the examples of the shard')


def _static_range(limits: typing.List[typing.Optional[Sizes]]) -> typing.Optional[State]:
    """The sizes in a short range between static limits; None for any other."""
    numbers = []
    for limit in limits:
        if limit is None:
            return None
        numbers.append(limit[0].constant)
    found = range(*numbers)
    if len(found) > _MOST_NUMBERS:
        return None
    return sizes_state(Size(number) for number in found)


def broadcast_to(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.broadcast_to`.

    A value [4] or [1, 4] that is the same on every tower becomes a value [n, 4] with a row for each
    example. A value [n, 4] of the examples may get new dimensions, as [2, n, 4].
    """
    value, shape_state = states
    shape = sizes_in(op.inputs[1], shape_state, view)
    rank = view.rank(op.inputs[0])
    if shape is None:
        return unknown(op, 'has a shape that is not known to be of the examples')
    if value.kind is Kind.PER_EXAMPLE and rank is not None:
        return _examples_broadcast(op, value, shape, rank)
    if value.kind is not Kind.INDEPENDENT:
        return unknown(op, 'repeats %s' % value.kind.value)
    found = tensor_of_shape(op, shape, shape_state)
    if found.kind is Kind.PER_EXAMPLE and rank:
        # The dimension of the value that becomes the examples'; negative where that is a new one.
        axis = found.axis - (len(shape) - rank)
        lengths = view.shape(op.inputs[0])
        has_own_size = axis >= 0 and (lengths is None or lengths[axis] != 1)
        if has_own_size:  # it fits batches of this size only
            return unknown(op, 'has another size of its own along the examples')
    is_uniform = found.is_uniform and (rank == 0 or value.is_uniform)
    return found._replace(is_uniform=is_uniform).with_marks_of(*states)


def _examples_broadcast(op: tf.Operation, value: State, shape: Sizes, rank: int):
    """The state of values of the examples, of `rank` dimensions, that are broadcast to a shape."""
    axis = value.axis + len(shape) - rank
    for place, size in enumerate(shape):
        if place != axis and size.per_example:
            return unknown(op, 'repeats the examples')
    return value._replace(axis=axis)
