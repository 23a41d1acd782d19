"""A rule for one row of each block of rows: `tf.gather(x, tf.range(n) * 8 + tf.argmax(y, 1))`.

x [8 n, 4] has a block of 8 rows for each example, and the gather takes one row of each block. The
row's place in the block has to be below 8 for all data: a larger place is a row of another example.
The places may be fed, such as the places of masked words in BERT. A fed place may be any number, so
that there is no rule for it.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.proof.rules.common import is_multiple_of_examples, takes_whole_rows
from towers.proof.rules.fills import end_of_count
from towers.proof.states import State, per_example
from towers.proof.view import View, is_wide, same_numbers_behind


class _Blocks(typing.NamedTuple):
    """The first rows of all blocks, such as 0, 8, 16, … of blocks of 8 rows."""
    of_each: int  # the number of blocks of each example
    rows: int  # the number of rows of each block


class _RowNumbers(typing.NamedTuple):
    """The numbers of the rows that are taken, one row of each block."""
    blocks: _Blocks
    places: tf.Tensor  # the place within each block, below `blocks.rows`


def row_of_each_block(op: tf.Operation, params: State, view: View) -> typing.Optional[State]:
    """The state of a `tf.gather` of one row of each block of rows: [n, 4] of x [8 n, 4].

    Args:
      op: the operation.
      params: the state of the tensor whose rows are taken.
      view: `View`.

    Returns:
      The state; None where it is not known that one row of each block is taken.
    """
    is_of_variable = op.type == 'ResourceGather'  # whose rows belong to no examples
    if is_of_variable or not takes_whole_rows(op, view):
        return None
    numbers = _row_numbers(op.inputs[1], view)
    if numbers is None:
        return None
    blocks = numbers.blocks
    entry_of_each_block = per_example(0, inner=blocks.of_each)
    entry_of_each_row = per_example(0, inner=blocks.of_each * blocks.rows)
    places = view.state(numbers.places)
    has_rows_of_blocks = params.layout == entry_of_each_row.layout
    has_place_in_each_block = places.layout == entry_of_each_block.layout
    if not has_rows_of_blocks or not has_place_in_each_block:
        return None
    return entry_of_each_block.with_marks_of(params, places)


def _row_numbers(tensor: tf.Tensor, view: View) -> typing.Optional[_RowNumbers]:
    """The row numbers `tf.range(n) * 8 + argmax`, with the terms in either order; None for other
    tensors."""
    sum_ = same_numbers_behind(tensor).op
    may_overflow = not is_wide(sum_.outputs[0])
    if sum_.type not in ('Add', 'AddV2') or may_overflow:
        return None
    left, right = [same_numbers_behind(term) for term in sum_.inputs]
    return _row_numbers_of_terms(left, right, view) or _row_numbers_of_terms(right, left, view)


def _row_numbers_of_terms(first_rows: tf.Tensor, places: tf.Tensor,
                          view: View) -> typing.Optional[_RowNumbers]:
    """The row numbers that are the sum of two terms: `tf.range(n) * 8`, the first rows of blocks of
    8 rows; and a place in each block, the result of an argmax over at most 8 entries, which is
    below 8 for all data.

    Args:
      first_rows: the term that may be the first rows of the blocks.
      places: the term that may be the places within the blocks.
      view: `View`.

    Returns:
      `_RowNumbers`; None for other terms.
    """
    if first_rows.op.type != 'Mul' or places.op.type not in ('ArgMax', 'ArgMin'):
        return None
    left, right = first_rows.op.inputs
    blocks = _blocks_by_factors(left, right, view) or _blocks_by_factors(right, left, view)
    entries_of_argmax = _length_of_argmax(places.op, view)
    if blocks is None or entries_of_argmax is None or entries_of_argmax > blocks.rows:
        return None
    return _RowNumbers(blocks, places)


def _blocks_by_factors(block_numbers: tf.Tensor, rows: tf.Tensor,
                       view: View) -> typing.Optional[_Blocks]:
    """The blocks whose first rows are the product of two factors: `tf.range(n)`, the numbers of the
    blocks, or `tf.range(2 n)` for two blocks of each example; and a static number of rows, 8.

    Args:
      block_numbers: the factor that may be the range.
      rows: the factor that may be the number of rows.
      view: `View`.

    Returns:
      `_Blocks`; None for other factors.
    """
    blocks_of_each = _count_of_range(same_numbers_behind(block_numbers).op, view)
    is_scalar = view.rank(rows) == 0
    rows_of_block = view.value(rows)
    if blocks_of_each is None or not is_scalar or rows_of_block is None:
        return None
    return _Blocks(of_each=blocks_of_each, rows=int(rows_of_block))


def _count_of_range(op: tf.Operation, view: View) -> typing.Optional[int]:
    """How many numbers a range from 0 on has for each example: 2 for `tf.range(2 n)`; None for
    other ranges and operations."""
    if op.type != 'Range':
        return None
    end = end_of_count(op.inputs, map(view.state, op.inputs), view)
    if end is None or not is_multiple_of_examples(end[0]):  # the end of a range is a scalar
        return None
    return end[0].per_example


def _length_of_argmax(op: tf.Operation, view: View) -> typing.Optional[int]:
    """The length of the dimension over which an argmax goes: 8 for values [n, 8] of the examples.
    The results of the argmax are below this length. None where it is not static.

    Of an argmax over the examples, or over values of other kinds, the results have not the state
    that `row_of_each_block` asks of the places.
    """
    axis = view.value(op.inputs[1])
    shape = view.shape(op.inputs[0])
    if axis is None or shape is None:
        return None
    return shape[int(axis)]
