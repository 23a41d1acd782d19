"""Rules for shapes and other numbers computed from them.

For a tensor [n, 4], `tf.shape` gives the sizes n and 4, and `proof.sizes` computes with them.
"""

import itertools
import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers.proof import sizes
from towers.proof.rules.common import (
    NotKnown,
    is_same_on_towers,
    required,
    static_value,
)
from towers.proof.sizes import Sizes, sizes_in, sizes_of_dimensions
from towers.proof.states import (
    INDEPENDENT,
    Kind,
    Size,
    State,
    sizes_state,
    unknown,
)
from towers.proof.traced_numbers import has_item_for_each_dimension
from towers.proof.view import View, is_wide

_States = typing.Sequence[State]

_COUNTS_ROWS = 'counts rows of which examples have different numbers'
_NO_STATIC_SIZE = 'is a size that is not static'
_IS_NO_SIZE = 'gives no size'


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
