"""Rules for shapes and other numbers computed from them, and for tensors of a given shape.

For a tensor [n, 4], `tf.shape` gives the sizes n and 4, and `proof.sizes` computes with them. A
tensor that is made with a shape (2 n, 4) has entries of the examples along its first dimension.
"""

import itertools
import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers.proof import sizes
from towers.proof.contexts import NUMBER_OF_EXAMPLES
from towers.proof.rules.common import (
    Results,
    all_known,
    axes_of_examples,
    has_one_entry_along,
    is_multiple_of_examples,
    is_same_on_towers,
    required,
    static_rank,
)
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

_MOST_NUMBERS = 64  # a tensor with more numbers is taken for no shape, and not followed as sizes
_COUNTS_ROWS = 'counts rows of which examples have different numbers'
_NO_SHAPE_OF_EXAMPLES = 'has a shape that is not known to be of the examples'
_UNIFORM = INDEPENDENT._replace(is_uniform=True)
"""The state of a tensor that is the same on every tower, and has equal entries."""


# ---- the shape of a tensor -----------------------------------------------------------------------

def shape_of(op: tf.Operation, states: _States, view: View) -> typing.List[State]:
    """`tf.shape`, `tf.size`, `tf.rank`, `tf.shape_n`: the sizes of each input.

    The sizes are known: the examples are along one dimension, and all other dimensions have the
    same length on every tower. [n, 4] has the shape (n, 4), and the size 4 n.
    """
    return [_shape_of_one(op, tensor, state, view) for tensor, state in zip(op.inputs, states)]


def _shape_of_one(op: tf.Operation, tensor: tf.Tensor, state: State, view: View) -> State:
    """The shape, the number of entries or the number of dimensions of one tensor."""
    if op.type == 'Rank':
        return _rank_of(tensor, view)
    if state.kind is Kind.ROWS:
        return unknown(op, _COUNTS_ROWS)
    lengths = sizes_of_dimensions(tensor, state, view)
    if lengths is None:
        return unknown(op, 'is a size that is not static')
    if op.type != 'Size':
        return sizes_state(lengths)
    entries = sizes.product_of_all(lengths)
    if entries is None:
        return unknown(op, 'multiplies the number of examples with itself')
    return sizes_state([entries])


def _rank_of(tensor: tf.Tensor, view: View) -> State:
    """The state of the rank of a tensor. It is the same on every tower, even where the rank is not
    known before the program runs."""
    rank = view.rank(tensor)
    return INDEPENDENT if rank is None else sizes_state([Size(rank)])


# ---- arithmetic ----------------------------------------------------------------------------------

_ARITHMETIC = {'Add': sizes.plus, 'AddV2': sizes.plus, 'Sub': sizes.minus, 'Mul': sizes.product,
               'FloorDiv': sizes.quotient, 'Div': sizes.quotient, 'FloorMod': sizes.remainder,
               'Maximum': sizes.larger}
"""{type of an operation: the function that computes its result from two sizes}"""


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
    left, right = _sizes_in_each(op.inputs, states, view)
    if not left or not right:  # None, not known; or (), a vector without a number
        return None
    count = max(len(left), len(right))
    results = all_known(map(function, _repeated(left, count), _repeated(right, count)))
    return None if results is None else sizes_state(results)


def _repeated(numbers: Sizes, count: int) -> Sizes:
    """The numbers of a vector after broadcasting to `count` numbers: a single number is repeated.

    TensorFlow refuses a vector whose length is neither 1 nor `count`.
    """
    return numbers * count if len(numbers) == 1 else numbers


def _are_vectors(tensors: typing.Iterable[tf.Tensor], view: View) -> bool:
    """Whether tensors are scalars or vectors."""
    return all(view.rank(tensor) in (0, 1) for tensor in tensors)


def prod_of_sizes(op: tf.Operation, states: _States, view: View) -> typing.Optional[State]:
    """`tf.reduce_prod` of a vector of sizes, (n, 4): 4 n.

    Returns:
      The state of the size; None for other operations, and where the result is no size, as n * n.
    """
    is_product_of_vector = op.type == 'Prod' and view.rank(op.inputs[0]) == 1
    # With axis=[], a product over no dimension, the result is the vector itself.
    is_one_number = view.shape(op.outputs[0]) in ([], [1])
    if not is_product_of_vector or not is_one_number:
        return None
    product = sizes.product_of_all(states[0].sizes)
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
    # A large constant of integers is taken for no shape: to follow each number would take long.
    if numbers is None or len(numbers) > _MOST_NUMBERS:
        return None
    places = _picked_places(op, len(numbers), view)
    if places is None:
        return None
    return sizes_state(numbers[place] for place in places)


def _stacked_sizes(op: tf.Operation, states: _States, view: View) -> typing.Optional[State]:
    """The sizes of `tf.stack([n, 4])`. None for vectors that are stacked along another axis than 0:
    the numbers of one vector are then not neighbours in the result."""
    are_scalars = all(view.rank(tensor) == 0 for tensor in op.inputs)
    if op.get_attr('axis') != 0 and not are_scalars:
        return None
    return _joined_sizes(list(op.inputs), states, view)


def _joined_sizes(tensors: typing.List[tf.Tensor], states: _States,
                  view: View) -> typing.Optional[State]:
    """The sizes of scalars or vectors, one after the other; None where one of them is unknown."""
    if not _are_vectors(tensors, view):
        return None
    numbers_of_each = all_known(_sizes_in_each(tensors, states, view))
    if numbers_of_each is None:
        return None
    return sizes_state(itertools.chain.from_iterable(numbers_of_each))


def _sizes_in_each(tensors: typing.Iterable[tf.Tensor], states: _States,
                   view: View) -> typing.List[typing.Optional[Sizes]]:
    """For each tensor, the result of `sizes_in`: its numbers, or None."""
    return [sizes_in(tensor, state, view) for tensor, state in zip(tensors, states)]


def _picked_places(op: tf.Operation, count: int, view: View) -> typing.Optional[np.ndarray]:
    """The places of the numbers that an operation picks from its first input: `shape[1:]` of 3
    numbers picks the numbers at the places 1 and 2.

    Args:
      op: the operation.
      count: how many numbers its first input has, in row-major order.
      view: `View`.

    Returns:
      Array of int; None for other operations, and where the places are not static.
    """
    places = np.arange(count)
    if op.type in _SAME_NUMBERS:
        return places
    picks_numbers = op.type in _PICKS and view.rank(op.inputs[0]) == 1  # else it picks rows
    if not picks_numbers:
        return None
    arguments = all_known(map(view.value, list(op.inputs)[1:]))
    if arguments is None:
        return None
    return _PICKS[op.type](places, op, arguments)


def _picked_by_slice(places: np.ndarray, op: tf.Operation,
                     limits: typing.List[np.ndarray]) -> np.ndarray:
    """`tf.slice(places, [begin], [length])`; a length of -1 takes all places from `begin` on.

    Args:
      places: array of int.
      op: the operation `Slice`.
      limits: its arguments begin and length, each of one number.
    """
    begin, length = [int(np.ravel(value)[0]) for value in limits]
    is_to_the_end = length < 0
    return places[begin:] if is_to_the_end else places[begin:begin + length]


def _picked_by_brackets(places: np.ndarray, op: tf.Operation,
                        limits: typing.List[np.ndarray]) -> typing.Optional[np.ndarray]:
    """`places[begin:end:stride]`, or `places[begin]`, as an array; None for `places[None]`.

    Args:
      places: array of int.
      op: the operation `StridedSlice`. Each bit of its masks describes one item in the brackets;
        a vector has one item, and so one bit.
      limits: its arguments begin, end and strides.
    """
    has_other_items = op.get_attr('new_axis_mask') or op.get_attr('ellipsis_mask')
    if has_other_items or np.size(limits[0]) != 1:
        return None
    begin, end, stride = [int(np.ravel(value)[0]) for value in limits]
    is_index = op.get_attr('shrink_axis_mask')
    if is_index:
        return places[begin:][:1]  # for begin=-1, places[begin:begin + 1] is empty
    first = None if op.get_attr('begin_mask') else begin  # left out, as in [:2]
    past_last = None if op.get_attr('end_mask') else end  # left out, as in [1:]
    return places[first:past_last:stride]


def _picked_by_indices(places: np.ndarray, op: tf.Operation,
                       arguments: typing.List[np.ndarray]) -> np.ndarray:
    """`tf.gather(places, indices)`, as a vector.

    Args:
      places: array of int.
      op: the operation `Gather` or `GatherV2`.
      arguments: the indices and, for `GatherV2`, the axis.
    """
    indices = arguments[0]
    return np.ravel(places[indices])


_PICKS: typing.Dict[str, typing.Callable] = {
    'StridedSlice': _picked_by_brackets, 'Slice': _picked_by_slice,
    'Gather': _picked_by_indices, 'GatherV2': _picked_by_indices}
"""{type of an operation that picks numbers from a vector: the function that picks places}"""


# ---- dimensions that broadcasting repeats --------------------------------------------------------

def broadcast_gradient_args(op: tf.Operation, states: _States, view: View) -> Results:
    """The dimensions over which the gradient of each factor of a product is summed: for
    x [n, 4] * w [4], no dimension for x; and dimension 0 for w, which broadcasting repeats along
    this dimension.

    In a batch of one example, the length of x along dimension 0 is 1, and TensorFlow sums the
    gradient of x over dimension 0, too. This changes no number, if the sum keeps its dimensions, or
    is reshaped to the shape of x afterwards. If any other operation takes the dimensions, nothing
    is proven.

    Returns:
      The states of the two vectors of dimensions; or one state for both.
    """
    one, other = [required(shape, op, 'compares shapes that are not known')
                  for shape in _sizes_in_each(op.inputs, states, view)]
    if not all(map(_goes_to_reshaped_sums, op.outputs)):
        return unknown(op, 'tells dimensions to another operation than the sum of a gradient')
    if one == other:  # then TensorFlow names no dimension, not even one of length 1
        return [sizes_state([]), sizes_state([])]
    rank = max(len(one), len(other))
    one = _with_rank(one, rank)
    other = _with_rank(other, rank)
    if not all(map(_go_together, one, other)):
        return unknown(op, 'compares lengths that are not known to be equal')
    return [_axes_of_one_entry(one), _axes_of_one_entry(other)]


_ONE = Size(1)


def _with_rank(shape: Sizes, rank: int) -> Sizes:
    """A shape of a given rank: with dimensions of length 1 in front, as many as the shape lacks."""
    return (_ONE,) * (rank - len(shape)) + shape


def _go_together(length: Size, other_length: Size) -> bool:
    """Whether two lengths are known to be equal, or one length is 1, so that it broadcasts."""
    return length == other_length or _ONE in (length, other_length)


def _axes_of_one_entry(shape: Sizes) -> State:
    """The dimensions of a factor that have the length 1, as sizes: broadcasting repeats the factor
    along these dimensions."""
    return sizes_state(Size(axis) for axis, length in enumerate(shape) if length == _ONE)


def _goes_to_reshaped_sums(axes: tf.Tensor) -> bool:
    """Whether only sums of the form `_is_reshaped_sum` take a vector of dimensions."""
    return all(map(_is_reshaped_sum, axes.consumers()))


def _is_reshaped_sum(op: tf.Operation) -> bool:
    """Whether an operation is a sum that keeps its dimensions, or that only `Reshape`s take."""
    if op.type != 'Sum':
        return False
    takers = op.outputs[0].consumers()
    return op.get_attr('keep_dims') or all(taker.type == 'Reshape' for taker in takers)


# ---- tensors of a shape --------------------------------------------------------------------------

def tensor_of_shape(op: tf.Operation, shape: typing.Optional[Sizes], shape_state: State) -> State:
    """The state of a tensor of a given shape whose values do not depend on the examples.

    Ones of the shape (2 n, 4) are of the examples, with two entries of each example. Ones of the
    shape (3, 4) are the same on every tower. Ones of the shape (n, n) or (n + 1,) are unknown.

    Args:
      op: the operation that makes the tensor.
      shape: its shape; None where it is not known.
      shape_state: the state of the input that has the shape.
    """
    if shape is None:
        # A shape may be the same on every tower though it is not static.
        is_shared_shape = shape_state.kind is Kind.INDEPENDENT
        return _UNIFORM if is_shared_shape else unknown(op, _NO_SHAPE_OF_EXAMPLES)
    axes = axes_of_examples(shape)
    if not axes:
        return _UNIFORM
    axis = axes[0]
    length = shape[axis]
    if len(axes) > 1 or not is_multiple_of_examples(length):
        return unknown(op, 'has a shape that is not a multiple of the number of examples')
    return per_example(axis, inner=length.per_example, is_constant=True)


def fill(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.fill`, `tf.zeros`: the same value for every example, if a dimension of the shape is the
    examples'. The value must not depend on the shard, not even on the number of examples."""
    shape_state, value = states
    if not is_same_on_towers(value):
        return unknown(op, 'repeats %s' % value.kind.value)
    shape = sizes_in(op.inputs[0], shape_state, view)
    return tensor_of_shape(op, shape, shape_state).with_marks_of(*states)


def zeros_like(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.zeros_like`, `tf.ones_like`: zeros or ones of the shape of a tensor.

        like x [n, 4]                  PER_EXAMPLE, constant
        like x [rows, 4]               ROWS, as many of each example as in x
        like a value of one example    ONE_EXAMPLE, since each example may have another shape
        like a mean, …                 the same on every tower, with equal entries

    The result has the marks of the tensor, since a statistic of the shard may have decided its
    shape.
    """
    state = states[0]
    if state.kind is Kind.PER_EXAMPLE:
        return state._replace(is_constant=True)
    if state.kind in (Kind.ROWS, Kind.ONE_EXAMPLE):
        return state
    return _UNIFORM.with_marks_of(state)


def random_numbers(op: tf.Operation, states: _States, view: View) -> State:
    """Random numbers of a shape: for (n, 4) each example has 4 numbers of its own, as on one
    device."""
    shape_state = states[0]
    parameters = states[1:]
    if any(state.kind is not Kind.INDEPENDENT for state in parameters):
        return unknown(op, 'draws from a distribution of the examples')
    shape = sizes_in(op.inputs[0], shape_state, view)
    result = tensor_of_shape(op, shape, shape_state)
    # `tensor_of_shape` supposes one value for all examples. Here each example draws its own.
    return result._replace(is_constant=False, is_random=True).with_marks_of(*states)


def range_of(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.range(n)`: the numbers 0, 1, …, n - 1 are the positions of the examples in the shard.

    A range between limits that all towers share is the same on every tower. Any other range that
    depends on n, such as `tf.range(2 n)`, is unknown.
    """
    limits = _sizes_in_each(op.inputs, states, view)
    if all(is_same_on_towers(state) for state in states):
        return _static_range(limits) or INDEPENDENT.with_marks_of(*states)
    if any(state.kind not in (Kind.INDEPENDENT, Kind.SIZES) for state in states):
        return unknown(op, 'has a length that is computed from the examples')
    if end_of_count(limits) == NUMBER_OF_EXAMPLES:
        return State(Kind.POSITION)
    return unknown(op, 'numbers the examples of the shard')


_Limits = typing.List[typing.Optional[Sizes]]
"""The begin, end and step of a range, each a scalar; None for a limit that is not known."""


def end_of_count(limits: _Limits) -> typing.Optional[Sizes]:
    """The end of a range that counts from 0 in steps of 1: (n,) for `tf.range(n)`. None for any
    other range, and where the end is not known."""
    begin, end, step = limits
    is_from_0_by_1 = begin == (Size(0),) and step == (Size(1),)
    return end if is_from_0_by_1 else None


def _static_range(limits: _Limits) -> typing.Optional[State]:
    """The numbers of a short range between static limits, as sizes: the range may be a list of
    axes, or of places in a shape. None for any other range.

    Args:
      limits: the limits as in `range_of`; none depends on the number of examples.
    """
    known_limits = all_known(limits)
    if known_limits is None:
        return None
    begin, end, step = [limit[0].constant for limit in known_limits]
    counted = range(begin, end, step)
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
    shape = required(sizes_in(op.inputs[1], shape_state, view), op, _NO_SHAPE_OF_EXAMPLES)
    rank = static_rank(op.inputs[0], op, view)
    new_dimensions = len(shape) - rank  # broadcasting puts these first
    if value.kind is Kind.PER_EXAMPLE:
        return _broadcast_examples(op, value, shape, new_dimensions)
    if value.kind is not Kind.INDEPENDENT:
        return unknown(op, 'repeats %s' % value.kind.value)
    result = tensor_of_shape(op, shape, shape_state).with_marks_of(*states)
    if result.kind is Kind.PER_EXAMPLE:
        axis_of_value = result.axis - new_dimensions
        if not _is_repeated_along(axis_of_value, op.inputs[0], view):
            return unknown(op, 'has another size of its own along the examples')
        return result
    # `tensor_of_shape` supposes equal entries. The entries of a vector (1, 2) are not equal.
    has_equal_entries = rank == 0 or value.is_uniform
    return result._replace(is_uniform=result.is_uniform and has_equal_entries)


def _is_repeated_along(axis: int, tensor: tf.Tensor, view: View) -> bool:
    """Whether it is certain that a tensor has one entry along a dimension, which broadcasting
    repeats. With more entries the tensor fits batches of one size only.

    Args:
      axis: the dimension; negative for a dimension that the tensor lacks and broadcasting adds.
      tensor: the tensor.
      view: `View`.
    """
    is_new_dimension = axis < 0
    return is_new_dimension or has_one_entry_along(axis, tensor, view)


def _broadcast_examples(op: tf.Operation, value: State, shape: Sizes, new_dimensions: int) -> State:
    """The state of values of the examples that are broadcast to a shape.

    The examples' dimension in the shape must be the examples' dimension of the values. An n in
    another dimension, as in the shape (n, n) for x [n] or [n, 1], would repeat the examples.

    Args:
      op: the operation.
      value: the state of the values, PER_EXAMPLE.
      shape: the shape.
      new_dimensions: how many dimensions the shape has before the dimensions of the values.
    """
    axis = value.axis + new_dimensions
    if any(axis_in_shape != axis for axis_in_shape in axes_of_examples(shape)):
        return unknown(op, 'repeats the examples')
    return value._replace(axis=axis)
