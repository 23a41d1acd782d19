"""Rules for rows of which examples have different numbers: masks, sparse tensors, segments.

What made the rows names them (`State.selection`): two tensors with the same selection have the same
rows in the same order. So the rows of a mask go together with each other, and back to the places
where the mask found them, but not with those of another mask.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.proof.rules.totals import any_by_example, any_of_kind, not_linear, total
from towers.proof.sizes import sizes_in
from towers.proof.states import (
    EVERY_EXAMPLE,
    ROW_OF_EACH_EXAMPLE,
    Kind,
    Size,
    State,
    per_example,
    rows,
    unknown,
)
from towers.proof.view import View

_States = typing.Sequence[State]

_EACH_EXAMPLE = Size(0, 1)  # the size n


# ---- masks ---------------------------------------------------------------------------------------

def where(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.where(mask [n])`: the positions of the examples that a mask leaves, in their order; of a
    mask [n, 4], index vectors (position of the example, place in its row); of a mask of rows, the
    positions of those that it leaves among them."""
    mask = states[0]
    if not mask.is_by_example:
        return not_linear(op, [mask], view)
    is_along_first = mask.kind is Kind.PER_EXAMPLE and mask.axis == 0
    if is_along_first and view.rank(op.inputs[0]) == 1:
        found = State(Kind.POSITION, 0, mask.outer, mask.inner, op.name)
        return found.with_marks_of(mask)
    if mask.layout == ROW_OF_EACH_EXAMPLE:
        return State(Kind.INDICES, selection=op.name).with_marks_of(mask)
    if mask.kind is Kind.ROWS and mask.axis == 0 and view.rank(op.inputs[0]) == 1:
        return State(Kind.ROW_POSITION, selection=op.name).with_marks_of(mask)
    return unknown(op, 'finds places in more than one dimension')


def scatter_nd(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.scatter_nd(positions [rows, 1], x [rows, 4], [n, 4])`: [n, 4], rows of the examples back
    at their places, and zeros for the examples that a mask left out.

    At places that each example tells, as in `tf.math.confusion_matrix`, in a tensor of a shape that
    all towers share, it is the sum of what each example adds at its place.
    """
    positions, values, shape = states
    if not any_by_example(states) and not any(state.is_position for state in states):
        return not_linear(op, states, view)
    lengths = view.shape(op.inputs[0])
    has_vectors_of_one = lengths is not None and lengths[-1] == 1
    is_of_same_rows = positions.kind is Kind.POSITION and (
        values.layout == rows(0, positions.selection).layout)
    sizes = sizes_in(op.inputs[2], shape, view)
    entries = Size(0, positions.outer * positions.inner)  # in which the mask found the rows
    is_back = has_vectors_of_one and is_of_same_rows and _is_of_examples(sizes, entries)
    if not is_back and _are_added_up(positions, values, sizes):
        return total(Kind.SUM, op).with_marks_of(*states)
    if not is_back:
        return unknown(op, 'adds up rows by their places')
    return per_example(0, positions.outer, positions.inner).with_marks_of(*states)


def _is_of_examples(sizes: typing.Optional[typing.Tuple[Size, ...]], first: Size) -> bool:
    """Whether a shape is known, begins with a size, and has the examples there alone."""
    if not sizes or sizes[0] != first:
        return False
    return not any(size.per_example for size in sizes[1:])


def segment_sum(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.math.unsorted_segment_sum(x [rows, 4], positions [rows], n)`: [n, 4], the sum of the rows
    of each example. By classes [rows] of which there are 10, a sum over the examples: [10, 4]."""
    values, positions, count = states
    if not any_by_example(states) and positions.kind is not Kind.POSITION:
        return not_linear(op, states, view)
    is_of_same_rows = positions.kind is Kind.POSITION and (
        values.layout == rows(0, positions.selection).layout)
    entries = Size(0, positions.outer * positions.inner)  # in which the mask found the rows
    sizes = sizes_in(op.inputs[2], count, view)
    if _are_added_up(positions, values, sizes):
        return total(Kind.SUM, op).with_marks_of(*states)
    if not is_of_same_rows or sizes != (entries,):
        return unknown(op, 'adds up rows by their numbers')
    return per_example(0, positions.outer, positions.inner).with_marks_of(*states)


def sparse_dense_add(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.sparse.add` of a sparse tensor and a dense one that all towers share: the sum of what
    each example adds at its place, as in TensorFlow 1's `tf.math.confusion_matrix`, and an offset
    where the dense one is not known to be zeros."""
    places, values, shape, dense = states
    sizes = sizes_in(op.inputs[2], shape, view)
    if not any_by_example(states):
        return not_linear(op, states, view)
    if not _are_added_up(places, values, sizes) or not dense.is_alike_on_towers:
        return unknown(op, 'adds up rows by their places')
    numbers = view.value(op.inputs[3])
    has_offset = numbers is None or bool(numbers.any())
    return total(Kind.SUM, op)._replace(has_offset=has_offset).with_marks_of(*states)


def _are_added_up(places: State, values: State,
                  sizes: typing.Optional[typing.Tuple[Size, ...]]) -> bool:
    """Whether each row of some values is added at the place that the same example tells, in a
    tensor of a shape that is the same on every tower."""
    is_of_each = places.is_by_example and places.kind is not Kind.ONE_EXAMPLE
    is_shared_shape = sizes is not None and not any(size.per_example for size in sizes)
    return is_of_each and is_shared_shape and places.axis == 0 and values.layout == places.layout


# ---- sparse tensors ------------------------------------------------------------------------------

def is_sparse(indices: State, values: State) -> bool:
    """Whether these are the indices and the values of a sparse tensor [n, …]."""
    if indices.kind is not Kind.INDICES or indices.selection == EVERY_EXAMPLE:
        return False
    return values.layout == rows(0, indices.selection).layout


def sparse_product(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.sparse.sparse_dense_matmul(x [n, 20], w [20, 4])`: [n, 4], the product of each row of a
    sparse tensor and a matrix that all towers share."""
    indices, values, shape, matrix = states
    if not any_of_kind([indices, values], Kind.INDICES, Kind.ROWS):
        return not_linear(op, states, view)
    sizes = sizes_in(op.inputs[2], shape, view)
    has_row_of_each = is_sparse(indices, values) and sizes is not None and (
        sizes[0] == _EACH_EXAMPLE)
    if not has_row_of_each or matrix.kind is not Kind.INDEPENDENT or op.get_attr('adjoint_a'):
        return unknown(op, 'multiplies a sparse tensor that is not known to be of the examples')
    return per_example(0).with_marks_of(*states)


def sparse_to_dense(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.sparse.to_dense`: [n, 20], a row for each row of a sparse tensor of the examples."""
    indices, shape, values, default = states
    sizes = sizes_in(op.inputs[1], shape, view)
    has_row_of_each = is_sparse(indices, values) and sizes is not None and (
        sizes[0] == _EACH_EXAMPLE)
    if not has_row_of_each or default.kind is not Kind.INDEPENDENT:
        return unknown(op, 'fills in values at places that are not known to be of the examples')
    return per_example(0).with_marks_of(*states)


def ctc_loss(op: tf.Operation, states: _States, view: View) -> typing.Union[
        State, typing.List[State]]:
    """`tf.nn.ctc_loss`: a loss [n], of the sequences [time, n, classes] and the sparse labels of
    each example; beside it the gradient of the sequences."""
    sequences, indices, values, lengths = states
    is_of_examples = sequences.layout == per_example(1).layout and is_sparse(indices, values)
    if not is_of_examples:
        return unknown(op, 'has sequences or labels that are not known to be of the examples')
    is_of_others = lengths.kind is Kind.PER_EXAMPLE and lengths.layout != ROW_OF_EACH_EXAMPLE
    if lengths.is_total or is_of_others:
        return unknown(op, 'has lengths that are not known to be of the examples')
    return [per_example(0).with_marks_of(*states), per_example(1).with_marks_of(*states)]
