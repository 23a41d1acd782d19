"""A rule for one row of each block of rows: `tf.gather(x, tf.range(n) * 8 + tf.argmax(y, 1))`.

Of x [8 n, 4], with a block of 8 rows for each example, one row of each block is taken. Its place in
the block has to be below 8 for all data: another one is a row of another example. Places that are
fed, such as BERT's of masked words, may be any number, and have no rule.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.graph import graph_walk
from towers.proof.sizes import sizes_in
from towers.proof.states import Kind, Size, State, per_example
from towers.proof.view import View

_SAME = ('Identity', 'Cast')  # types of operations that give the same whole numbers


class _Blocks(typing.NamedTuple):
    """The first rows of all blocks: 0, 8, 16, … of blocks of 8 rows."""
    of_each: int  # the number of blocks of each example
    rows: int  # the number of rows of each block


class _RowNumbers(typing.NamedTuple):
    """The numbers of the rows that are taken, one of each block."""
    blocks: _Blocks
    places: tf.Tensor  # the place within each block, below `blocks.rows`


def row_of_each_block(op: tf.Operation, params: State, view: View) -> typing.Optional[State]:
    """The state of a `tf.gather` of one row of each block of rows: [n, 4] of x [8 n, 4].

    Args:
      op: the operation.
      params: the state of what it takes rows of.
      view: `View`.

    Returns:
      The state; None where it is not known that one row of each block is taken.
    """
    numbers = _row_numbers(op.inputs[1], view)
    if numbers is None or not _is_along_first(op, view):
        return None
    blocks = numbers.blocks
    rows_of_examples = per_example(0, inner=blocks.of_each * blocks.rows)
    blocks_of_examples = per_example(0, inner=blocks.of_each)
    place_state = view.state(numbers.places)
    if params.layout != rows_of_examples.layout:
        return None
    if place_state.layout != blocks_of_examples.layout:
        return None
    return blocks_of_examples.with_marks_of(params, place_state)


def _is_along_first(op: tf.Operation, view: View) -> bool:
    """Whether rows of a tensor along its first dimension are gathered; False of `ResourceGather`,
    which takes those of a variable, and so of no examples."""
    if op.type == 'Gather':
        return True
    if op.type != 'GatherV2':
        return False
    axis = view.value(op.inputs[2])
    return axis is not None and int(axis) == 0 and not op.get_attr('batch_dims')


def _row_numbers(tensor: tf.Tensor, view: View) -> typing.Optional[_RowNumbers]:
    """The numbers `range(k n) * rows + argmax` of rows; None of any other tensor."""
    sum_ = graph_walk.source_through(tensor, _SAME).op
    if sum_.type not in ('Add', 'AddV2') or not sum_.outputs[0].dtype.is_integer:
        return None
    left, right = [graph_walk.source_through(term, _SAME) for term in sum_.inputs]
    return _row_numbers_of_terms(left, right, view) or _row_numbers_of_terms(right, left, view)


def _row_numbers_of_terms(first_rows: tf.Tensor, places: tf.Tensor,
                          view: View) -> typing.Optional[_RowNumbers]:
    """The sum of `range(k n) * rows` and an argmax over at most as many `rows`; None of others.

    Args:
      first_rows: the term that may be the first rows of the blocks.
      places: the term that may be the places within the blocks.
      view: `View`.
    """
    blocks = _first_rows_of_blocks(first_rows, view)
    if blocks is None or places.op.type not in ('ArgMax', 'ArgMin'):
        return None
    length = _length_of_argmax(places.op, view)
    if length is None or length > blocks.rows:
        return None
    return _RowNumbers(blocks, places)


def _first_rows_of_blocks(tensor: tf.Tensor, view: View) -> typing.Optional[_Blocks]:
    """The first rows of blocks, `range(k n) * rows`; None of any other tensor."""
    if tensor.op.type != 'Mul':
        return None
    left, right = tensor.op.inputs
    return _blocks_by_factors(left, right, view) or _blocks_by_factors(right, left, view)


def _blocks_by_factors(block_numbers: tf.Tensor, rows: tf.Tensor,
                       view: View) -> typing.Optional[_Blocks]:
    """The product of `range(k n)` and a static number of rows; None of any other.

    Args:
      block_numbers: the factor that may be the range.
      rows: the factor that may be the number of rows.
      view: `View`.
    """
    range_ = graph_walk.source_through(block_numbers, _SAME).op
    rows_of_block = view.value(rows)
    if range_.type != 'Range' or rows_of_block is None:
        return None
    is_scalar = not rows_of_block.shape
    if not is_scalar or rows_of_block < 1:
        return None
    start, limit, step = [sizes_in(each, view.state(each), view) for each in range_.inputs]
    counts_from_0 = start == (Size(0),) and step == (Size(1),)
    if not counts_from_0 or limit is None:
        return None
    count = limit[0]
    if count.per_example <= 0 or count.constant:
        return None
    return _Blocks(count.per_example, int(rows_of_block))


def _length_of_argmax(op: tf.Operation, view: View) -> typing.Optional[int]:
    """The length of the dimension over which an argmax goes, so that its places are below it; None
    where the length is not static, or the argmax goes over the examples."""
    axis = view.value(op.inputs[1])
    shape = view.shape(op.inputs[0])
    state = view.state(op.inputs[0])
    if axis is None or shape is None or state.kind is not Kind.PER_EXAMPLE:
        return None
    argmax_axis = int(axis) % len(shape)
    if argmax_axis == state.axis:
        return None
    return shape[argmax_axis]
