"""Rules for shapes and other numbers computed from them, and for tensors of a given shape.

For a tensor [n, 4], `tf.shape` gives the sizes n and 4, and `proof.sizes` computes with them. A
tensor that is made with a shape (2 n, 4) has entries of the examples along its first dimension.
"""

import itertools
import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers import compat
from towers.graph import graph_walk
from towers.graph.op_types import ADDS, SETS
from towers.proof import sizes
from towers.proof.contexts import NUMBER_OF_EXAMPLES
from towers.proof.rules.common import (
    NotKnown,
    Results,
    axes_of_examples,
    is_broadcast_along,
    is_multiple_of_examples,
    is_same_on_towers,
    kinds_of,
    required,
    static_rank,
    static_value,
)
from towers.proof.sizes import Sizes, as_number, sizes_in, sizes_of_dimensions
from towers.proof.states import (
    INDEPENDENT,
    Kind,
    Size,
    State,
    per_example,
    sizes_state,
    unknown,
)
from towers.proof.traced_numbers import has_item_for_each_dimension
from towers.proof.view import View, is_wide

_States = typing.Sequence[State]

_COUNTS_ROWS = 'counts rows of which examples have different numbers'
_NO_STATIC_SIZE = 'is a size that is not static'
_NO_SHAPE_OF_EXAMPLES = 'has a shape that is not known to be of the examples'
_IS_NO_SIZE = 'gives no size'
_UNIFORM = INDEPENDENT._replace(is_uniform=True)
"""The state of a tensor that is the same on every tower, and has equal entries."""


# ---- the shape of a tensor -----------------------------------------------------------------------

def shape_of(op: tf.Operation, states: _States, view: View) -> typing.List[State]:
    """`tf.shape`, `tf.shape_n`: the sizes of each input.

    The sizes are known: the examples are along one dimension, and all other dimensions have the
    same length on every tower. [n, 4] has the shape (n, 4).
    """
    return [_shape_of_one(op, tensor, state, view) for tensor, state in zip(op.inputs, states)]


def _shape_of_one(op: tf.Operation, tensor: tf.Tensor, state: State, view: View) -> State:
    """The shape of one tensor."""
    if state.kind is Kind.ROWS:
        return unknown(op, _COUNTS_ROWS)
    lengths = sizes_of_dimensions(tensor, state, view)
    return unknown(op, _NO_STATIC_SIZE) if lengths is None else sizes_state(lengths)


def number_of_entries(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.size`: the product of the sizes in a shape, 4 n for [n, 4]."""
    shape = _shape_of_one(op, op.inputs[0], states[0], view)
    if shape.kind is Kind.UNKNOWN:
        return shape
    entries = sizes.product_of_all(shape.sizes)
    return sizes_state([required(entries, op, 'multiplies the number of examples with itself')])


def rank_of(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.rank`: the same on every tower, even where the rank is not known before the program
    runs."""
    rank = view.rank(op.inputs[0])
    return INDEPENDENT if rank is None else sizes_state([Size(rank)])


# ---- sizes from sizes ----------------------------------------------------------------------------

# The functions of this section are the `of_sizes` of rows in the table: `by_table` asks them before
# the rule. They raise `NotKnown` where the result is no size, or the inputs have no sizes.

_ARITHMETIC = {'Add': sizes.plus, 'AddV2': sizes.plus, 'Sub': sizes.minus, 'Mul': sizes.product,
               'FloorDiv': sizes.quotient, 'Div': sizes.quotient, 'FloorMod': sizes.remainder,
               'Maximum': sizes.larger}
"""{type of an operation: the function that computes its result from two sizes}"""


def arithmetic(op: tf.Operation, states: _States, view: View) -> State:
    """The sum, product, quotient or maximum of two scalars or vectors of sizes: `2 * n + 1`."""
    function = required(_ARITHMETIC.get(op.type), op, _IS_NO_SIZE)
    if op.type == 'FloorDiv' and not view.has_stand_ins:
        function = sizes.floor_quotient  # else a rounded number may be another one in a run
    if not is_wide(op.outputs[0]):
        raise NotKnown(op, _IS_NO_SIZE)
    left, right = _numbers_in_each(op, op.inputs, states, view)
    count = max(len(left), len(right))
    pairs = zip(_repeated(left, count), _repeated(right, count))
    return sizes_state([required(function(*pair), op, _IS_NO_SIZE) for pair in pairs])


def negative_sizes(op: tf.Operation, states: _States, view: View) -> State:
    """`-shape`, as in `-(-length // step)`, a quotient that is rounded up."""
    if not is_wide(op.outputs[0]):
        raise NotKnown(op, _IS_NO_SIZE)
    numbers = _numbers_in_first(op, states, view)
    return sizes_state(Size(-size.constant, -size.per_example) for size in numbers)


def _repeated(numbers: Sizes, count: int) -> Sizes:
    """The numbers of a vector after broadcasting to `count` numbers: a single number is repeated.

    TensorFlow refuses a vector whose length is neither 1 nor `count`, but for an empty vector and a
    single number: then the result is empty.
    """
    return numbers * count if len(numbers) == 1 else numbers


def product_of_sizes(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.reduce_prod` of sizes, (n, 4): 4 n.

    A result of one number is the product of all numbers. A result of several numbers is not: with
    axis=[], a product over no dimension, a vector stays as it is.
    """
    is_one_number = view.shape(op.outputs[0]) in ([], [1])
    if not is_one_number:
        raise NotKnown(op, _IS_NO_SIZE)
    product = sizes.product_of_all(_numbers_in_first(op, states, view))
    return sizes_state([required(product, op, _IS_NO_SIZE)])


def same_sizes(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.reshape`, `tf.expand_dims`, `tf.squeeze`: all numbers, in the same order.

    The new shape has to be the same on every tower: of `tf.reshape([1, 2, 3, 4], (n, -1))` the
    numbers are the same, but the last one of the first row depends on n.
    """
    if not all(map(is_same_on_towers, states[1:])):
        raise NotKnown(op, _IS_NO_SIZE)
    return sizes_state(_numbers_in_first(op, states, view))


def stacked_sizes(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.stack([n, 4])`: (n, 4). Vectors that are stacked along another axis than 0 give no sizes:
    the numbers of one vector are then not neighbours in the result."""
    are_scalars = view.rank(op.outputs[0]) == 1
    if op.get_attr('axis') != 0 and not are_scalars:
        raise NotKnown(op, _IS_NO_SIZE)
    return _one_after_the_other(op, op.inputs, states, view)


def joined_sizes(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.concat([[n], [4, 2]], 0)`: (n, 4, 2)."""
    all_but_the_axis = list(op.inputs)[:-1]
    return _one_after_the_other(op, all_but_the_axis, states, view)


def _one_after_the_other(op: tf.Operation, tensors: typing.Iterable[tf.Tensor], states: _States,
                         view: View) -> State:
    """The sizes in scalars or vectors, one after the other."""
    numbers_in_each = _numbers_in_each(op, tensors, states, view)
    return sizes_state(itertools.chain.from_iterable(numbers_in_each))


def unstacked_sizes(op: tf.Operation, states: _States, view: View) -> typing.List[State]:
    """`tf.unstack` of (n, 3): the sizes n and 3.

    Each result is one row. Only in a vector each row is one number: a matrix of sizes has more
    numbers than rows.
    """
    numbers = _numbers_in_first(op, states, view)
    if len(op.outputs) != len(numbers):
        raise NotKnown(op, _IS_NO_SIZE)
    return [sizes_state([number]) for number in numbers]


def sizes_in_equal_parts(op: tf.Operation, states: _States, view: View) -> typing.List[State]:
    """`tf.split(shape, 2)` of (n, 3, 800, 2): the parts (n, 3) and (800, 2)."""
    numbers = _numbers_in_vector(op, states, view, place=1)  # behind the axis
    number_of_parts = len(op.outputs)
    length = len(numbers) // number_of_parts
    return _in_parts(numbers, [length] * number_of_parts)


def sizes_in_parts(op: tf.Operation, states: _States, view: View) -> typing.List[State]:
    """`tf.split(shape, [1, 2])` of (n, 800, 2): the parts (n) and (800, 2)."""
    numbers = _numbers_in_vector(op, states, view)
    lengths = static_value(op.inputs[1], op, view).tolist()
    if -1 in lengths:  # at one place, for what the other parts leave
        sum_of_others = sum(lengths) + 1
        lengths[lengths.index(-1)] = len(numbers) - sum_of_others
    return _in_parts(numbers, lengths)


def _in_parts(numbers: Sizes, lengths: typing.List[int]) -> typing.List[State]:
    """The states of parts of these lengths, one after the other."""
    parts = []
    begin = 0
    for length in lengths:
        parts.append(sizes_state(numbers[begin:begin + length]))
        begin += length
    return parts


def sliced_sizes(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.slice(shape, [begin], [length])`; a length of -1 takes all numbers from `begin` on."""
    numbers = _numbers_in_vector(op, states, view)
    begin, length = _limits_of_slice(op, view)
    is_to_the_end = length < 0
    return sizes_state(numbers[begin:] if is_to_the_end else numbers[begin:begin + length])


def sizes_in_brackets(op: tf.Operation, states: _States, view: View) -> State:
    """`shape[begin:end:stride]`, or `shape[begin]`; but not `shape[None]`.

    Each bit of the masks of a `StridedSlice` describes one item in the brackets; a vector has one
    item, and so one bit.
    """
    numbers = _numbers_in_vector(op, states, view)
    has_one_item = view.shape(op.inputs[1]) == [1]
    if not has_one_item or not has_item_for_each_dimension(op):
        raise NotKnown(op, _IS_NO_SIZE)
    begin, end, stride = _limits_of_slice(op, view)
    is_index = op.get_attr('shrink_axis_mask')
    if is_index:
        return sizes_state(numbers[begin:][:1])  # for begin=-1, numbers[begin:begin + 1] is empty
    first = None if op.get_attr('begin_mask') else begin  # left out, as in [:2]
    past_last = None if op.get_attr('end_mask') else end  # left out, as in [1:]
    return sizes_state(numbers[first:past_last:stride])


def _limits_of_slice(op: tf.Operation, view: View) -> typing.List[int]:
    """The limits of a slice of a vector, such as begin and length: all inputs but the first, each a
    vector of one number."""
    limits = [static_value(tensor, op, view) for tensor in list(op.inputs)[1:]]
    return [int(limit[0]) for limit in limits]


def gathered_sizes(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.gather(shape, indices)`. A vector has one axis, so that the axis tells nothing."""
    numbers = _numbers_in_vector(op, states, view)
    indices = np.ravel(static_value(op.inputs[1], op, view))
    number_at = dict(enumerate(numbers))  # without the places before 0, which a tuple would have
    return sizes_state([required(number_at.get(place), op, _IS_NO_SIZE) for place in indices])


def sizes_of_range(op: tf.Operation, states: _States, view: View) -> State:
    """A short range between static integers: it may be a list of axes, or of places in a shape."""
    if not op.outputs[0].dtype.is_integer:
        raise NotKnown(op, _IS_NO_SIZE)
    limits = [int(static_value(tensor, op, view)) for tensor in op.inputs]
    counted = range(*limits)
    if len(counted) > sizes.MOST_NUMBERS:
        raise NotKnown(op, _IS_NO_SIZE)
    return sizes_state(map(Size, counted))


def _numbers_in_first(op: tf.Operation, states: _States, view: View) -> Sizes:
    """The numbers in the first input, a tensor of sizes or of static integers.

    Raises:
      NotKnown: it is another tensor.
    """
    return required(sizes_in(op.inputs[0], states[0], view), op, _IS_NO_SIZE)


def _numbers_in_vector(op: tf.Operation, states: _States, view: View, place: int = 0) -> Sizes:
    """The numbers in an input that is a vector. The caller picks some of them by place: in a matrix
    a place is a row, and not one number.

    Args:
      op: the operation.
      states: the states of its inputs.
      view: `View`.
      place: the place of the vector among the inputs.

    Raises:
      NotKnown: it is no vector of sizes.
    """
    vector = op.inputs[place]
    if view.rank(vector) != 1:
        raise NotKnown(op, _IS_NO_SIZE)
    return required(sizes_in(vector, states[place], view), op, _IS_NO_SIZE)


def _numbers_in_each(op: tf.Operation, tensors: typing.Iterable[tf.Tensor], states: _States,
                     view: View) -> typing.List[Sizes]:
    """The numbers in each of some scalars or vectors.

    Args:
      op: the operation that takes the tensors.
      tensors: its inputs, or the first ones.
      states: the states of its inputs.
      view: `View`.

    Raises:
      NotKnown: one of them is another tensor.
    """
    found = []
    for tensor, state in zip(tensors, states):
        if view.rank(tensor) not in (0, 1):
            raise NotKnown(op, _IS_NO_SIZE)
        found.append(required(sizes_in(tensor, state, view), op, _IS_NO_SIZE))
    return found


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
    one, other = [required(sizes_in(*shape, view), op, 'compares shapes that are not known')
                  for shape in zip(op.inputs, states)]
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

    Raises:
      NotKnown: the shape is not known, and may depend on the examples.
    """
    if shape_state.kind is Kind.INDEPENDENT:  # even where the shape is not static
        return _UNIFORM
    known_shape = required(shape, op, _NO_SHAPE_OF_EXAMPLES)
    axes = axes_of_examples(known_shape)
    if not axes:
        return _UNIFORM
    axis = axes[0]
    length = known_shape[axis]
    if len(axes) > 1 or not is_multiple_of_examples(length):
        return unknown(op, 'has a shape that is not a multiple of the number of examples')
    return per_example(axis, inner=length.per_example, is_constant=True)


def repeated(op: tf.Operation, tensor: tf.Tensor, value: State, shape: typing.Optional[Sizes],
             shape_state: State, view: View) -> State:
    """The state of a value that an operation repeats along the dimensions of a shape: w [1, 4]
    becomes [n, 4], the same row for each example.

    The value must have one entry along the examples' dimension of the shape, or lack the dimension.
    Three rows, w [3, 4], fit batches of one size only; or the result would have them in turn, so
    that an example would get another row in another shard.

    Args:
      op: the operation.
      tensor: the value.
      value: its state, with sizes as numbers.
      shape: the shape; of a tile, the numbers of repetitions; None where it is not known.
      shape_state: the state of the shape.
      view: `View`.
    """
    if value.kind is not Kind.INDEPENDENT:
        return unknown(op, 'repeats %s' % value.kind.value)
    result = tensor_of_shape(op, shape, shape_state).with_marks_of(value, shape_state)
    if result.kind is Kind.PER_EXAMPLE:
        axis_from_end = result.axis - static_rank(op.outputs[0], op, view)
        if not is_broadcast_along(axis_from_end, tensor, view):
            return unknown(op, 'repeats several entries as often as there are examples')
        return result
    # `tensor_of_shape` supposes equal entries. The entries of a vector (1, 2) are not equal.
    has_equal_entries = value.is_uniform or view.rank(tensor) == 0
    return result._replace(is_uniform=result.is_uniform and has_equal_entries)


def fill(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.fill`, `tf.zeros`: the same value for every example, if a dimension of the shape is the
    examples'. The value must not depend on the shard, not even on the number of examples."""
    shape_state, value_state = states
    shape = sizes_in(op.inputs[0], shape_state, view)
    value = as_number(op, value_state, view)
    return repeated(op, op.inputs[1], value, shape, shape_state, view)


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
    device.

    Numbers that a stateless operation computes from a seed are the same on every tower, if the
    towers have the seed in common: those for the examples by their places in the shard, so that the
    first examples of all shards get the same numbers.
    """
    shape_state = states[0]
    parameters = states[1:]
    if not kinds_of(parameters) <= {Kind.INDEPENDENT}:
        return unknown(op, 'draws from a distribution of the examples')
    shape = sizes_in(op.inputs[0], shape_state, view)
    result = tensor_of_shape(op, shape, shape_state)
    if op.type.startswith('Stateless') and not _has_seed_of_each_tower(op, parameters, view):
        if result.kind is not Kind.INDEPENDENT:
            return unknown(op, 'draws the same numbers for the examples of each shard')
        return result._replace(is_uniform=False).with_marks_of(*states)
    # `tensor_of_shape` supposes one value for all examples. Here each example draws its own.
    return result._replace(is_constant=False, is_random=True).with_marks_of(*states)


def _has_seed_of_each_tower(op: tf.Operation, parameters: _States, view: View) -> bool:
    """Whether a stateless random operation has another seed on each tower: the seed is drawn by the
    tower; or it is computed from a variable that the forward pass counts up, as in Keras 3, so that
    `gradients.stateless_random.give_own_seeds` gives each tower a seed of its own."""
    if any(state.is_random for state in parameters):
        return True
    if compat.in_control_flow(op):  # there `give_own_seeds` leaves the seed as it is
        return False
    before_seed = graph_walk.ancestors(list(op.inputs)[1:])
    return any(other.type in SETS | ADDS and other.inputs[0].op.name in before_seed
               for other in view.graph.get_operations())


def range_of(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.range(n)`: the numbers 0, 1, …, n - 1 are the positions of the examples in the shard.

    A range between limits that all towers share is the same on every tower. Any other range that
    depends on n, such as `tf.range(2 n)`, is unknown.
    """
    if all(map(is_same_on_towers, states)):
        return INDEPENDENT.with_marks_of(*states)
    if not kinds_of(states) <= {Kind.INDEPENDENT, Kind.SIZES}:
        return unknown(op, 'has a length that is computed from the examples')
    if end_of_count(op.inputs, states, view) == NUMBER_OF_EXAMPLES:
        return State(Kind.POSITION)
    return unknown(op, 'numbers the examples of the shard')


def end_of_count(limits: typing.Iterable[tf.Tensor], states: typing.Iterable[State],
                 view: View) -> typing.Optional[Sizes]:
    """The end of a range that counts from 0 in steps of 1: (n,) for `tf.range(n)`. None for any
    other range, and where the end is not known.

    Args:
      limits: the begin, end and step of the range, each a scalar.
      states: their states.
      view: `View`.
    """
    begin, end, step = [sizes_in(*limit, view) for limit in zip(limits, states)]
    is_from_0_by_1 = begin == (Size(0),) and step == (Size(1),)
    return end if is_from_0_by_1 else None


# ---- broadcasting to a shape ---------------------------------------------------------------------

def broadcast_to(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.broadcast_to`.

    A value [4] or [1, 4] that is the same on every tower becomes a value [n, 4] with a row for each
    example. A value [n, 4] of the examples may get new dimensions, as [2, n, 4].
    """
    value_state, shape_state = states
    shape = sizes_in(op.inputs[1], shape_state, view)
    value = as_number(op, value_state, view)
    if value.kind is Kind.PER_EXAMPLE:
        shape = required(shape, op, _NO_SHAPE_OF_EXAMPLES)
        rank = static_rank(op.inputs[0], op, view)
        new_dimensions = len(shape) - rank  # broadcasting puts these first
        return _broadcast_examples(op, value, shape, new_dimensions)
    return repeated(op, op.inputs[0], value, shape, shape_state, view)


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
    if axes_of_examples(shape) not in ([axis], []):
        return unknown(op, 'repeats the examples')
    return value._replace(axis=axis)
