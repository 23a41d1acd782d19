"""The rule for `tf.reshape`: entries keep their row-major order, so an example keeps its stride.

The stride is the number of entries from one example to the next: 12 in [n, 3, 4]. In [3 n, 4] a
stride of 12 entries is a step of 3 rows, so that 3 neighbouring rows are of one example. In the
scratch graph the number of examples is a prime that divides no other length (`scratch`), so that
only one dimension of a shape can have the examples.

Where a length is not static, these cases are tried in this order:

    1. [n, L, 4] as [-1, 4], each example a block of L x 4 entries    `_reshaped_blocks`
    2. [n, L, 4] as [n, L, 2, 2]: a reshape behind the examples       `_reshaped_with_unknown`
    3. [n, L] as [-1, 5], supposing that each example has 5 numbers   `_reshaped_if`

Words of other modules: `view.examples` is the number of examples in the scratch graph, a prime. If
`view.has_stand_ins` is true, further primes stand for the lengths of inputs that are not static. So
a length L that is not static in the program may be static in the scratch graph.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.proof.rules.common import axes_of_examples, is_multiple_of_examples, required
from towers.proof.rules.moves import moves_entries
from towers.proof.sizes import Sizes, sizes_in, sizes_of_dimensions
from towers.proof.states import (
    ROW_OF_EACH_EXAMPLE,
    Kind,
    Size,
    State,
    per_example,
    unknown,
)
from towers.proof.view import View

_Lengths = typing.List[typing.Optional[int]]

_NOT_STATIC_SHAPE = 'has a shape that is not static'


@moves_entries
def reshape(op: tf.Operation, state: State, view: View) -> State:
    """`tf.reshape`: [n, 3, 4] becomes [3 n, 4], with 3 neighbouring rows of each example."""
    before = required(view.shape(op.inputs[0]), op, _NOT_STATIC_SHAPE)
    # `view.shape` would ask for the state of the result, which this rule is to find.
    after = required(view.shape_by_inference(op.outputs[0]), op, _NOT_STATIC_SHAPE)
    # TensorFlow infers `after` from the primes that stand for lengths. If the new shape is not
    # known as sizes, as a difference of two lengths is not, a run may have other lengths.
    if view.has_stand_ins:
        required(_new_shape(op, view), op, _NOT_STATIC_SHAPE)
    if state.kind is Kind.ROWS:
        return _reshaped_rows(op, state, before, after)
    if None in before + after:
        return _reshaped_with_unknown(op, state, before, after, view)
    return _reshaped_by_stride(op, state, before, after, view)


def _new_shape(op: tf.Operation, view: View) -> typing.Optional[Sizes]:
    """The new shape that a reshape gets, as sizes, such as (n, -1); None where it is not known as
    sizes."""
    return sizes_in(op.inputs[1], view.state(op.inputs[1]), view)


# ---- where all lengths are static ----------------------------------------------------------------

class _Place(typing.NamedTuple):
    """A dimension that may have the examples."""
    axis: int
    inner: int  # how many neighbouring entries along it belong to one example


def _reshaped_by_stride(op: tf.Operation, state: State, before: typing.List[int],
                        after: typing.List[int], view: View) -> State:
    """The state after a reshape between static shapes, by the stride of an example.

    Let [2 n, 4], two rounds of the examples, become [2 n, 2, 2]. The stride is 4 entries, one step
    along dimension 0. So `inner` is 1, a round has n steps, and the 2 n steps are two rounds.

    Args:
      op: the operation.
      state: the state of the values, PER_EXAMPLE.
      before: the lengths of the values' dimensions.
      after: the lengths of the result's dimensions.
      view: `View`.
    """
    stride = state.inner * _product(before[state.axis + 1:])
    places = _places_of_stride(stride, after, view.examples)
    has_one_place = len(places) == 1
    if not has_one_place:
        return unknown(op, 'spreads an example over several dimensions')
    axis, inner = places[0]
    if view.has_stand_ins and not _is_for_all_lengths(op, state, before, after, axis, view):
        return unknown(op, _NOT_STATIC_SHAPE)
    if not has_examples_at(axis, op.inputs[1], view):
        return unknown(op, 'has a shape that is another one for another number of examples')
    steps_of_a_round = view.examples * inner
    outer = after[axis] // steps_of_a_round
    return per_example(axis, outer, inner, state.is_constant)


def _is_for_all_lengths(op: tf.Operation, state: State, before: typing.List[int],
                        after: typing.List[int], axis: int, view: View) -> bool:
    """Whether the entries of an example are a whole number of steps along a dimension of the
    result, for all values of the lengths that are not static.

    The scratch graph alone does not tell this. In it [n, L - 1] can be reshaped to [-1, 2], since
    the prime that stands for L is odd; but L may be even.

        [n, L] as (n, -1, 2)      yes: the new shape has n at this dimension
        [n, L, 4] as [-1, 2]      yes: a step is 2 entries, so that 4 L entries are 2 L steps
        [n, 3, L] as [-1, L]      yes: a step is L entries, so that 3 L entries are 3 steps
        any other reshape         not known: False

    Args:
      op: the operation.
      state: the state of the values, PER_EXAMPLE.
      before: the lengths of the values' dimensions.
      after: the lengths of the result's dimensions.
      axis: the dimension of the result.
      view: `View`.
    """
    shape = required(_new_shape(op, view), op, _NOT_STATIC_SHAPE)
    is_told_by_shape = shape[axis].per_example > 0  # (n, …), and not (-1, …)
    if is_told_by_shape:
        return True
    entries_of_step = _product(after[axis + 1:])
    lengths_of_example = before[state.axis + 1:]
    count_of_static = min(view.number_of_static_lengths(op.inputs[0]), len(lengths_of_example))
    static_lengths = lengths_of_example[len(lengths_of_example) - count_of_static:]
    if _product(static_lengths) % entries_of_step == 0:
        return True
    # The products of the last one, the last two, … of these factors: in [n, 3, L] of L, and of 3 L.
    factors = [state.inner, *lengths_of_example]
    products_of_last = [_product(factors[place:]) for place in range(len(factors))]
    return entries_of_step in products_of_last


def _places_of_stride(stride: int, lengths: typing.List[int],
                      examples: int) -> typing.List[_Place]:
    """The dimensions along which a whole number of steps goes from one example to the next.

    Let the stride be 12 entries in [3 n, 4]:

        dimension 0    a step goes over 4 entries. 3 steps go to the next example; the length 3 n is
                       3 steps for each of n examples, so that this dimension is a place
        dimension 1    a step goes over 1 entry. 12 steps would go to the next example; the length 4
                       is not 12 steps for each of n examples, so that this dimension is no place

    Args:
      stride: the number of entries from one example to the next.
      lengths: the lengths of the dimensions.
      examples: the number of examples.
    """
    places = []
    for axis, length in enumerate(lengths):
        entries_of_step = _product(lengths[axis + 1:])
        if 0 in (stride, entries_of_step, length):  # without entries, nothing tells a place
            continue
        steps, rest = divmod(stride, entries_of_step)
        steps_of_a_round = examples * steps
        if rest == 0 and length % steps_of_a_round == 0:
            places.append(_Place(axis, inner=steps))
    return places


def has_examples_at(axis: int, shape: tf.Tensor, view: View) -> bool:
    """Whether a shape may have the examples along a dimension: the length of this dimension is a
    multiple of the number of examples n, or does not depend on n, as -1; and no other length
    depends on n. A shape such as (n, n) for x [n, 4] fits batches of one size, 4, alone.

    If the numbers are not known as sizes, the answer is True: either they do not depend on n, or
    they depend on n in another way than sizes do. In the second case they have a mark
    (`sizes.as_number`), with which no loss is proven.

    Args:
      axis: the dimension.
      shape: a tensor of sizes, such as (2 n, 4).
      view: `View`.
    """
    sizes = sizes_in(shape, view.state(shape), view)
    if sizes is None or not axes_of_examples(sizes):
        return True
    return axes_of_examples(sizes) == [axis] and is_multiple_of_examples(sizes[axis])


def _product(lengths: typing.Iterable) -> int:
    """The number of entries in dimensions of these lengths.

    The product is computed with Python's integers: a large prime stands for each length that is not
    static, and the product of several primes may exceed an int64 of numpy.
    """
    product = 1
    for length in lengths:
        product *= length
    return product


# ---- where some lengths are not static -----------------------------------------------------------

def _reshaped_with_unknown(op: tf.Operation, state: State, before: _Lengths, after: _Lengths,
                           view: View) -> State:
    """The state after a reshape where some lengths are not static.

    Args:
      op: the operation.
      state: the state of the values, PER_EXAMPLE.
      before: the lengths of the values' dimensions, None where a length is not static.
      after: the lengths of the result's dimensions, in the same way.
      view: `View`.
    """
    blocks = _reshaped_blocks(op, state, view)
    if blocks is not None:
        return blocks
    # If all dimensions up to the examples' keep their lengths, the examples stay where they are.
    lengths_before = before[:state.axis + 1]
    lengths_after = after[:state.axis + 1]
    if None not in lengths_before and lengths_before == lengths_after:
        return state
    return _reshaped_if(op, state, view)


def _reshaped_blocks(op: tf.Operation, state: State, view: View) -> typing.Optional[State]:
    """The state after a reshape of [n, L, 4], where the entries of each example are neighbours.

    Even in the scratch graph, some lengths of the values or of the result are not static. To each
    such length of the values, such as L, `sizes_of_dimensions` gives a prime of its own.

    Returns:
      The state, with the examples along dimension 0; None where it is not known that each example
      has the same number of rows of the result.
    """
    are_neighbours = state.layout == per_example(0, inner=state.inner).layout
    lengths = sizes_of_dimensions(op.inputs[0], state, view)
    shape = _new_shape(op, view)
    if not are_neighbours or lengths is None or not shape:
        return None
    number_of_rows = shape[0]
    lengths_of_row = shape[1:]
    if axes_of_examples(lengths_of_row):  # such as (-1, n): the lengths of a row depend on n
        return None
    row = [size.constant for size in lengths_of_row]
    entries_of_each = state.inner * _product(size.constant for size in lengths[1:])
    rows_of_each = _rows_of_each(number_of_rows, row, entries_of_each)
    if rows_of_each is None:
        return None
    return per_example(0, inner=rows_of_each, is_constant=state.is_constant)


def _rows_of_each(number: Size, row: typing.List[int], entries: int) -> typing.Optional[int]:
    """How many rows of the result belong to each example.

        shape (k n, 4)    k rows, since a reshape keeps the number of entries
        shape (-1, 4)     a fourth of the entries of an example, if 4 divides their number
        any other shape   None: not known

    Args:
      number: the first number of the shape, the number of rows or -1.
      row: the other numbers of the shape, the lengths of a row. If `number` is not -1, one of them
        may be -1, which stands once in a shape for the length that is left.
      entries: the number of entries of each example.
    """
    if 0 in row:  # rows without entries, of which there may be any number
        return None
    takes_all_rows = number == Size(-1)
    if takes_all_rows:
        rows, rest = divmod(entries, _product(row))
        return rows if rest == 0 else None
    return number.per_example if is_multiple_of_examples(number) else None


def _reshaped_if(op: tf.Operation, state: State, view: View) -> State:
    """The state of [n, L] as (-1, 5): a row for each example, if each example has 5 numbers.

    The graph does not tell whether each example has 5 numbers. So the result is marked with this
    operation, and the verdict of a proof that needs the result names this supposition.

    Args:
      op: the operation.
      state: the state of the values, PER_EXAMPLE.
      view: `View`.
    """
    shape = required(view.value(op.inputs[1]), op, _NOT_STATIC_SHAPE)
    is_as_rows = len(shape) >= 2 and shape[0] == -1  # (-1, 5), as many rows as there are
    if state.layout != ROW_OF_EACH_EXAMPLE or not is_as_rows:
        return unknown(op, _NOT_STATIC_SHAPE)
    view.suppose(op, 'takes %d numbers of each example' % _product(shape[1:]))
    return state.with_shard_statistics([op.name])


def _reshaped_rows(op: tf.Operation, state: State, before: _Lengths, after: _Lengths) -> State:
    """The state of rows [rows, 3, 4] as [rows, 12], or [1, rows, 12].

    Each row has to keep its number of entries. The entries of a row have to be neighbours before
    and after the reshape, so that all dimensions before the rows must have length 1: in
    [2, rows, 4] a row is in two pieces.

    Args:
      op: the operation.
      state: the state of the values, ROWS.
      before: the lengths of the values' dimensions.
      after: the lengths of the result's dimensions; only the number of rows is not static.
    """
    if after.count(None) != 1:
        return unknown(op, _NOT_STATIC_SHAPE)
    axis = after.index(None)
    lengths_before_rows = before[:state.axis] + after[:axis]
    are_all_1 = set(lengths_before_rows) <= {1}
    row_before = before[state.axis + 1:]
    row_after = after[axis + 1:]
    if not are_all_1 or None in row_before:
        return unknown(op, _NOT_STATIC_SHAPE)
    if _product(row_before) != _product(row_after):
        return unknown(op, _NOT_STATIC_SHAPE)
    return state._replace(axis=axis)
