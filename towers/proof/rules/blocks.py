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

_SAME = ('Identity', 'Cast')


class _Places(typing.NamedTuple):
    """The places of rows, one of each block."""
    blocks: int  # of each example
    rows: int  # of each block
    within: tf.Tensor  # the place in each block


def row_of_each_block(op: tf.Operation, params: State, view: View) -> typing.Optional[State]:
    """The state of a `tf.gather` of one row of each block of rows: [n, 4] of x [8 n, 4].

    Args:
      op: the operation.
      params: the state of what it takes rows of.
      view: `View`.

    Returns:
      The state; None where it is not known that one row of each block is taken.
    """
    places = _places(op.inputs[1], view)
    if places is None or not _is_along_first(op, view):
        return None
    within = view.state(places.within)
    blocks = per_example(0, inner=places.blocks)
    rows = per_example(0, inner=places.blocks * places.rows)
    if params.layout != rows.layout or within.layout != blocks.layout:
        return None
    return blocks.with_marks_of(params, within)


def _is_along_first(op: tf.Operation, view: View) -> bool:
    """Whether rows along the first dimension are gathered."""
    if op.type == 'Gather':
        return True
    axis = view.value(op.inputs[2]) if op.type == 'GatherV2' else None
    return axis is not None and int(axis) == 0 and not op.get_attr('batch_dims')


def _places(tensor: tf.Tensor, view: View) -> typing.Optional[_Places]:
    """The places `range(k n) * rows + argmax`; None of any other tensor."""
    total = graph_walk.source_through(tensor, _SAME).op
    if total.type not in ('Add', 'AddV2') or not total.outputs[0].dtype.is_integer:
        return None
    terms = [graph_walk.source_through(term, _SAME) for term in total.inputs]
    for offsets, within in (terms, terms[::-1]):
        blocks = _offsets(offsets, view)
        if blocks is None or within.op.type not in ('ArgMax', 'ArgMin'):
            continue
        count, rows = blocks
        longest = _length_of_argmax(within.op, view)
        if longest is not None and longest <= rows:
            return _Places(count, rows, within)
    return None


def _offsets(tensor, view):
    """`(k, rows)` of the first places of blocks, `range(k n) * rows`; None of any other tensor."""
    if tensor.op.type != 'Mul':
        return None
    factors = list(tensor.op.inputs)
    for numbers, factor in (factors, factors[::-1]):
        counted = graph_walk.source_through(numbers, _SAME).op
        rows = view.value(factor)
        if counted.type != 'Range' or rows is None or rows.shape or rows < 1:
            continue
        start, limit, step = [sizes_in(each, view.state(each), view) for each in counted.inputs]
        is_count = start == (Size(0),) and step == (Size(1),) and limit is not None
        if is_count and limit[0].per_example > 0 and not limit[0].constant:
            return limit[0].per_example, int(rows)
    return None


def _length_of_argmax(op, view):
    """The length of the dimension of which a place is taken; None where it is not static."""
    axis, shape = view.value(op.inputs[1]), view.shape(op.inputs[0])
    state = view.state(op.inputs[0])
    if axis is None or shape is None or state.kind is not Kind.PER_EXAMPLE:
        return None
    place = int(axis) % len(shape)
    return None if place == state.axis else shape[place]
