"""Rules for shapes and other numbers computed from them, and for tensors of a given shape.

Of a tensor [n, 4], `tf.shape` gives the sizes n and 4, with which `proof.sizes` computes. A tensor
that is made with a shape (2 n, 4) has entries of the examples along its first dimension.
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

_States = typing.Sequence[State]

_MOST_NUMBERS = 64  # of a tensor whose numbers are followed one by one, as those of a shape
_NO_SHAPE_OF_EXAMPLES = 'has a shape that is not known to be of the examples'
_UNIFORM = INDEPENDENT._replace(is_uniform=True)
"""The state of a tensor that is the same on every tower, and all of whose entries are equal."""


# ---- the shape of a tensor -----------------------------------------------------------------------

def shape_of(op: tf.Operation, states: _States, view: View) -> typing.List[State]:
    """`tf.shape`, `tf.size`, `tf.rank`, `tf.shape_n`: the sizes of each input.

    They are known, since the examples have one dimension, and all others have the same length on
    every tower: [n, 4] has the shape (n, 4), and the size 4 n.
    """
    return [_shape_of_one(op, tensor, state, view) for tensor, state in zip(op.inputs, states)]


def _shape_of_one(op: tf.Operation, tensor: tf.Tensor, state: State, view: View) -> State:
    """The shape, the number of entries or the number of dimensions of one tensor."""
    if op.type == 'Rank':
        rank = view.rank(tensor)  # static or not, it is the same on every tower
        return INDEPENDENT if rank is None else sizes_state([Size(rank)])
    lengths = sizes_of_dimensions(tensor, state, view)
    if lengths is None:
        if state.kind is Kind.ROWS:
            return unknown(op, 'counts rows of which examples have different numbers')
        return unknown(op, 'is a size that is not static')
    if op.type != 'Size':
        return sizes_state(lengths)
    entries = sizes.product_of_all(lengths)
    if entries is None:
        return unknown(op, 'multiplies the number of examples with itself')
    return sizes_state([entries])


# ---- arithmetic ----------------------------------------------------------------------------------

_ARITHMETIC = {'Add': sizes.plus, 'AddV2': sizes.plus, 'Sub': sizes.minus, 'Mul': sizes.product,
               'FloorDiv': sizes.quotient, 'Div': sizes.quotient, 'FloorMod': sizes.remainder,
               'Maximum': sizes.larger}
"""{type of an operation: the function that computes it of two sizes}"""


def arithmetic_of_sizes(op: tf.Operation, states: _States, view: View) -> typing.Optional[State]:
    """The sum, product, quotient or maximum of two scalars or vectors of sizes: `2 * n + 1`.

    Returns:
      The state of the sizes; None for other operations, and where the result is no size.
    """
    function = _ARITHMETIC.get(op.type)
    if function is None or op.outputs[0].dtype not in (tf.int32, tf.int64):
        return None
    if not _are_vectors(op.inputs, view):
        return None
    left = sizes_in(op.inputs[0], states[0], view)
    right = sizes_in(op.inputs[1], states[1], view)
    if not left or not right:
        return None
    length = max(len(left), len(right))
    if min(len(left), len(right)) not in (1, length):  # of which none broadcasts to the other
        return None
    results = []
    for one, other in zip(_repeated(left, length), _repeated(right, length)):
        result = function(one, other)
        if result is None:
            return None
        results.append(result)
    return sizes_state(results)


def _repeated(numbers: Sizes, length: int) -> Sizes:
    """The numbers of a vector of a length, to which a scalar, or a vector, broadcasts."""
    return numbers * (length // len(numbers))


def _are_vectors(tensors: typing.Iterable[tf.Tensor], view: View) -> bool:
    """Whether tensors are scalars or vectors."""
    return all(view.rank(tensor) in (0, 1) for tensor in tensors)


def prod_of_sizes(op: tf.Operation, states: _States, view: View) -> typing.Optional[State]:
    """`tf.reduce_prod` of a vector of sizes, (n, 4): 4 n. None where the result is no size."""
    factors = states[0].sizes
    is_of_vector = op.type == 'Prod' and view.rank(op.inputs[0]) == 1
    if not is_of_vector or not factors:
        return None
    product = sizes.product_of_all(factors)
    return None if product is None else sizes_state([product])


# ---- picking and joining -------------------------------------------------------------------------

_SAME_NUMBERS = ('Identity', 'Cast', 'Reshape', 'ExpandDims', 'Squeeze', 'StopGradient')
"""Types of operations that give all numbers of the first input, in the same order."""


def rearranged_sizes(op: tf.Operation, states: _States, view: View) -> typing.Optional[State]:
    """Sizes that are picked, joined or put into another shape: `tf.stack([n, 4])`, `shape[0]`.

    Returns:
      The state of the sizes; None where an input has no sizes, and for other operations.
    """
    if op.type == 'Pack':
        return _stacked_sizes(op, states, view)
    if op.type == 'ConcatV2':
        return _joined_sizes(list(op.inputs)[:-1], states, view)  # all inputs but the axis
    numbers = sizes_in(op.inputs[0], states[0], view)
    if numbers is None or len(numbers) > _MOST_NUMBERS:
        return None
    places = _picked_places(op, len(numbers), view)
    if places is None:
        return None
    return sizes_state(numbers[place] for place in places)


def _stacked_sizes(op: tf.Operation, states: _States, view: View) -> typing.Optional[State]:
    """The sizes of `tf.stack([n, 4])`; None of vectors that are stacked along another axis than 0,
    since their numbers do not come one after the other."""
    are_scalars = all(view.rank(tensor) == 0 for tensor in op.inputs)
    if op.get_attr('axis') != 0 and not are_scalars:
        return None
    return _joined_sizes(list(op.inputs), states, view)


def _joined_sizes(tensors: typing.List[tf.Tensor], states: _States,
                  view: View) -> typing.Optional[State]:
    """The sizes of scalars or vectors, one after the other; None where one of them is unknown."""
    if not _are_vectors(tensors, view):
        return None
    joined: Sizes = ()
    for tensor, state in zip(tensors, states):
        numbers = sizes_in(tensor, state, view)
        if numbers is None:
            return None
        joined += numbers
    return sizes_state(joined)


def _picked_places(op: tf.Operation, count: int, view: View) -> typing.Optional[np.ndarray]:
    """The places of the numbers that an operation picks of a vector: `shape[1:]` of 3 numbers picks
    those at 1 and 2.

    Args:
      op: the operation, whose first input is the vector.
      count: how many numbers that has.
      view: `View`.

    Returns:
      Array of int; None for other operations, and where the places are not static.
    """
    places = np.arange(count)
    if op.type in _SAME_NUMBERS:
        return places
    arguments: typing.List[typing.Any] = [view.value(tensor) for tensor in list(op.inputs)[1:]]
    if view.rank(op.inputs[0]) != 1 or any(value is None for value in arguments):
        return None
    if op.type == 'StridedSlice':
        return _slice_of(places, op, arguments)
    if op.type == 'Slice':
        begin, length = [int(np.ravel(value)[0]) for value in arguments]
        is_to_the_end = length < 0
        return places[begin:] if is_to_the_end else places[begin:begin + length]
    if op.type in ('Gather', 'GatherV2'):
        return np.ravel(places[arguments[0]])
    return None


def _slice_of(places: np.ndarray, op: tf.Operation,
              limits: typing.List[np.ndarray]) -> typing.Optional[np.ndarray]:
    """`places[begin:end:stride]`, or `places[begin]`, as an array; None for `places[None]`.

    Args:
      places: array of int.
      op: the operation `StridedSlice`. The bits of its masks say what stands in the brackets; here
        there is one item, and so one bit.
      limits: its arguments begin, end and strides.
    """
    has_other_items = op.get_attr('new_axis_mask') or op.get_attr('ellipsis_mask')
    if has_other_items or np.size(limits[0]) != 1:
        return None
    begin, end, stride = [int(np.ravel(value)[0]) for value in limits]
    is_index = op.get_attr('shrink_axis_mask')
    if is_index:
        return places[begin:][:1]
    has_no_begin = op.get_attr('begin_mask')
    has_no_end = op.get_attr('end_mask')
    return places[slice(None if has_no_begin else begin, None if has_no_end else end, stride)]


# ---- tensors of a shape --------------------------------------------------------------------------

def tensor_of_shape(op: tf.Operation, shape: typing.Optional[Sizes], shape_state: State) -> State:
    """The state of a tensor of a given shape whose values do not depend on the examples.

    Ones of shape (2 n, 4) are of the examples, two entries of each; of (3, 4) they are the same on
    every tower; of (n, n) or (n + 1,) they are neither.

    Args:
      op: the operation that makes the tensor.
      shape: its shape, where that is known.
      shape_state: the state of the tensor that tells the shape.
    """
    if shape is None:
        if shape_state.kind is Kind.INDEPENDENT:  # not static, but the same on every tower
            return _UNIFORM
        return unknown(op, _NO_SHAPE_OF_EXAMPLES)
    axes = [axis for axis, size in enumerate(shape) if size.per_example]
    if not axes:
        return _UNIFORM
    axis = axes[0]
    if len(axes) > 1 or shape[axis].constant:
        return unknown(op, 'has a shape that is not a multiple of the number of examples')
    return per_example(axis, inner=shape[axis].per_example, is_constant=True)


def fill(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.fill`, `tf.zeros`: the same value for every example, where a dimension is theirs."""
    shape_state, value = states
    is_shared = value.kind in (Kind.INDEPENDENT, Kind.SIZES) and not value.depends_on_size
    if not is_shared:
        return unknown(op, 'repeats %s' % value.kind.value)
    shape = sizes_in(op.inputs[0], shape_state, view)
    return tensor_of_shape(op, shape, shape_state).with_marks_of(*states)


def zeros_like(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.zeros_like`, `tf.ones_like`: the same value for every example of x [n, 4]; of a tensor
    without a dimension of the examples, the same on every tower."""
    state = states[0]
    if state.kind is Kind.PER_EXAMPLE:
        return per_example(state.axis, state.outer, state.inner, is_constant=True)
    if state.kind in (Kind.ROWS, Kind.ONE_EXAMPLE):  # whose number of entries is its own
        return state
    return _UNIFORM.with_marks_of(*states)  # a statistic of the shard may have decided the shape


def random_numbers(op: tf.Operation, states: _States, view: View) -> State:
    """Random numbers of a shape: of (n, 4) each example has its own 4, as on one device."""
    shape_state = states[0]
    parameters = states[1:]
    if any(state.kind is not Kind.INDEPENDENT for state in parameters):
        return unknown(op, 'draws from a distribution of the examples')
    shape = sizes_in(op.inputs[0], shape_state, view)
    result = tensor_of_shape(op, shape, shape_state)
    return result._replace(is_constant=False, is_random=True).with_marks_of(*states)


def range_of(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.range`: the numbers 0, 1, …, n - 1 are the positions of the examples in the shard.

    A range between static limits has the same numbers on every tower.
    """
    if any(state.kind not in (Kind.INDEPENDENT, Kind.SIZES) for state in states):
        return unknown(op, 'has a length that is computed from the examples')
    limits = [sizes_in(tensor, state, view) for tensor, state in zip(op.inputs, states)]
    if not any(state.depends_on_size for state in states):
        return _static_range(limits) or INDEPENDENT.with_marks_of(*states)
    from_0_to_n = [(Size(0),), (Size(0, 1),), (Size(1),)]  # begin, end, step
    if limits == from_0_to_n:
        return State(Kind.POSITION)
    return unknown(op, 'numbers the examples of the shard')


def _static_range(limits: typing.List[typing.Optional[Sizes]]) -> typing.Optional[State]:
    """The numbers of a short range between static limits, as sizes: the range may be a list of
    axes, or of places in a shape. None for any other range.

    Args:
      limits: begin, end and step, each a constant scalar; None of one that is not known.
    """
    numbers = []
    for limit in limits:
        if limit is None:
            return None
        numbers.append(limit[0].constant)
    counted = range(*numbers)
    if len(counted) > _MOST_NUMBERS:
        return None
    return sizes_state(Size(number) for number in counted)


# ---- broadcasting to a shape ---------------------------------------------------------------------

def broadcast_to(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.broadcast_to`.

    A value [4] or [1, 4] that is the same on every tower becomes a value [n, 4] with a row for each
    example. A value [n, 4] of the examples may get new dimensions, as [2, n, 4].
    """
    value, shape_state = states
    shape = sizes_in(op.inputs[1], shape_state, view)
    rank = view.rank(op.inputs[0])
    if shape is None:
        return unknown(op, _NO_SHAPE_OF_EXAMPLES)
    if value.kind is Kind.PER_EXAMPLE and rank is not None:
        return _broadcast_examples(op, value, shape, rank)
    if value.kind is not Kind.INDEPENDENT:
        return unknown(op, 'repeats %s' % value.kind.value)
    result = tensor_of_shape(op, shape, shape_state)
    if result.kind is Kind.PER_EXAMPLE and rank:
        axis_in_value = result.axis - (len(shape) - rank)
        if _has_own_length(op.inputs[0], axis_in_value, view):  # it fits batches of one size only
            return unknown(op, 'has another size of its own along the examples')
    is_uniform = result.is_uniform and (rank == 0 or value.is_uniform)
    return result._replace(is_uniform=is_uniform).with_marks_of(*states)


def _has_own_length(tensor: tf.Tensor, axis: int, view: View) -> bool:
    """Whether a tensor may have another length than 1 along a dimension; one that it lacks, and
    gets by broadcasting, is negative."""
    if axis < 0:
        return False
    lengths = view.shape(tensor)
    return lengths is None or lengths[axis] != 1


def _broadcast_examples(op: tf.Operation, value: State, shape: Sizes, rank: int) -> State:
    """The state of values of the examples that are broadcast to a shape.

    Args:
      op: the operation.
      value: the state of the values, PER_EXAMPLE.
      shape: the shape, which begins with the new dimensions.
      rank: the number of dimensions before.
    """
    axis = value.axis + len(shape) - rank
    for place, size in enumerate(shape):
        if place != axis and size.per_example:
            return unknown(op, 'repeats the examples')
    return value._replace(axis=axis)
