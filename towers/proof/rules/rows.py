"""Rules for rows of which examples have different numbers: masks, sparse tensors, segments.

What made the rows names them (`State.selection`): two tensors with the same selection have the same
rows in the same order. So the rows of a mask go together with each other, and back to the places
where the mask found them, but not with those of another mask.

    mask [n]                             selects rows
    positions = tf.where(mask)           POSITION: of the example of each row
    x_rows = tf.gather(x, positions)     ROWS
    tf.scatter_nd(positions, x_rows, …)  the rows back at their places: [n, 4] again

A sparse tensor [n, 20] is a triple: its indices [rows, 2], index vectors whose first number is the
position of the example (INDICES); its values [rows] (ROWS); and its shape (n, 20).

Where no input tells anything of single examples, `not_linear` says what the result is: the same on
every tower, or marked with the means and sums that it is computed from. A rule below `for_examples`
is asked about all other inputs alone.

Words of other modules: `EVERY_EXAMPLE` is the selection of what nothing has selected;
`ROW_OF_EACH_EXAMPLE` the layout of x [n, …], whose row e is of example e.
"""

import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers.graph import graph_walk
from towers.proof.rules.common import (
    Results,
    axes_of_examples,
    begins_with_examples,
    has_examples_first,
    is_of_batch,
    is_shared_or_at,
    required,
    vector_along_examples,
)
from towers.proof.rules.totals import for_examples, total
from towers.proof.sizes import Sizes, sizes_in
from towers.proof.states import (
    EVERY_EXAMPLE,
    ROW_OF_EACH_EXAMPLE,
    Kind,
    State,
    per_example,
    rows,
    unknown,
)
from towers.proof.view import View

_States = typing.Sequence[State]

_BY_PLACES = 'adds up rows by their places'
_NO_SPARSE_BATCH = 'adds up a sparse tensor that is not known to be of the examples'


# ---- masks ---------------------------------------------------------------------------------------

@for_examples
def where(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.where(mask)`: the index vectors of the places where a mask is true, in row-major order.

        mask [n]       the positions of the examples where it is true, in the order of the examples
        mask [n, 4]    index vectors (position of the example, place in the row of the example)
        mask [rows]    the numbers of the rows where it is true
    """
    mask = states[0]
    selection = _selection_by_mask(op, view)
    is_vector = view.rank(op.inputs[0]) == 1
    if is_vector and has_examples_first(mask):
        positions = State(Kind.POSITION, axis=0, outer=mask.outer, inner=mask.inner,
                          selection=selection)
        return positions.with_marks_of(mask)
    if mask.layout == ROW_OF_EACH_EXAMPLE:
        return State(Kind.INDICES, selection=selection).with_marks_of(mask)
    if is_vector and mask.kind is Kind.ROWS:
        return State(Kind.ROW_POSITION, selection=selection).with_marks_of(mask)
    return unknown(op, 'finds places in more than one dimension')


def _selection_by_mask(op: tf.Operation, view: View) -> str:
    """The name of what a `Where` selects: its own, or that of a `Where` of the same mask that has a
    state already.

    `tf.boolean_mask(logits, mask)` and `tf.boolean_mask(labels, mask)` make a `Where` each, of the
    mask as a vector. A reshape leaves the order of the entries as it is, so that both select the
    same rows in the same order.
    """
    if view.is_in_loop(op):  # where each iteration has a mask of its own
        return op.name
    mask = graph_walk.source_through(op.inputs[0], ('Reshape',))
    for other in _takers_of_entries(mask):
        if other.type != 'Where':
            continue
        state = view.state_or_none(other.outputs[0])  # None where its turn comes later
        # The state of a `Where` of which nothing is proven, UNKNOWN, has no selection.
        if state is not None and state.selection != EVERY_EXAMPLE:
            return state.selection
    return op.name


def _takers_of_entries(tensor: tf.Tensor) -> typing.List[tf.Operation]:
    """The operations that take a tensor, as it is or reshaped."""
    takers: typing.List[tf.Operation] = []
    for op in tensor.consumers():
        if op.type == 'Reshape' and op.inputs[0].name == tensor.name:
            takers += _takers_of_entries(op.outputs[0])
        else:
            takers.append(op)
    return takers


# ---- rows that are put back, or added up ---------------------------------------------------------

@for_examples
def scatter_nd(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.scatter_nd(positions [rows, 1], x [rows, 4], (n, 4))`: [n, 4], rows of the examples back
    at their places, and zeros for the examples that a mask left out.

    In a tensor whose shape all towers share, at places that are computed from each example, as in
    `tf.math.confusion_matrix`, the result is a sum over the examples: each adds its value at its
    place.
    """
    positions, values, shape_state = states
    shape = sizes_in(op.inputs[2], shape_state, view)
    if _are_added_up(positions, values, shape):
        return total(Kind.SUM, op).with_marks_of(*states)
    lengths = view.shape(op.inputs[0])
    are_vectors_of_one = lengths is not None and lengths[-1] == 1  # [rows, 1]: a position alone
    if are_vectors_of_one and _are_put_back(positions, values, shape):
        return vector_along_examples(positions).with_marks_of(*states)
    return unknown(op, _BY_PLACES)


@for_examples
def segment_sum(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.math.unsorted_segment_sum(x [rows, 4], positions [rows], n)`: [n, 4], the sum of the rows
    of each example. By the classes [rows] of the rows, 10 different ones, the result [10, 4] is a
    sum over the examples."""
    values, segments, number_state = states
    # The third input is the number of segments, a scalar: its one size is the result's first
    # length. What the two questions ask of a shape, they ask of this length alone.
    length_of_result = sizes_in(op.inputs[2], number_state, view)
    if _are_added_up(segments, values, length_of_result):
        return total(Kind.SUM, op).with_marks_of(*states)
    if _are_put_back(segments, values, length_of_result):
        return vector_along_examples(segments).with_marks_of(*states)
    return unknown(op, 'adds up rows by their numbers')


@for_examples
def sparse_dense_add(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.sparse.add` of a sparse tensor and a dense one that all towers share: the sum of what
    each example adds at its place, as in TensorFlow 1's `tf.math.confusion_matrix`, and an offset
    where the dense one is not known to be zeros."""
    places, values, shape_state, dense = states
    shape = sizes_in(op.inputs[2], shape_state, view)
    if not _are_added_up(places, values, shape) or not dense.is_alike_on_towers:
        return unknown(op, _BY_PLACES)
    dense_value = view.value(op.inputs[3])
    has_offset = dense_value is None or bool(dense_value.any())
    return total(Kind.SUM, op)._replace(has_offset=has_offset).with_marks_of(*states)


def _are_put_back(positions: State, values: State, shape: typing.Optional[Sizes]) -> bool:
    """Whether rows that a mask of examples left are put at the places where the mask found them, in
    a tensor as long as the mask.

    Args:
      positions: the state of the places, one for each row.
      values: the state of the rows.
      shape: of the tensor, or its length alone; None where it is not known.
    """
    if positions.kind is not Kind.POSITION:
        return False
    are_rows_of_mask = values.layout == rows(0, positions.selection).layout
    entries_of_mask = positions.outer * positions.inner  # for each example: 3 of a mask [3 n]
    return are_rows_of_mask and begins_with_examples(shape, entries_of_mask)


def _are_added_up(places: State, values: State, shape: typing.Optional[Sizes]) -> bool:
    """Whether each row of values is added at a place of the same example, in a tensor of a shape
    that is the same on every tower: then the tensor is a sum over the examples.

    Args:
      places: the state of the places, one for each row.
      values: the state of the rows.
      shape: of the tensor; None where it is not known.
    """
    if shape is None or axes_of_examples(shape):
        return False
    if not is_of_batch(places):  # the places are not computed from each example
        return False
    # Along another dimension than 0, the numbers of one place would be of several examples.
    return places.axis == 0 and values.layout == places.layout


# ---- sparse tensors ------------------------------------------------------------------------------

def is_sparse(indices: State, values: State) -> bool:
    """Whether these are the indices and the values of a sparse tensor [n, …].

    They are where one selection made the rows of both, so that row i of the values is at index
    vector i: the selection is a part of the layout of the values.

    INDICES without a selection, as `tf.stack([tf.range(n), column], 1)`, are an index vector for
    each example. They are not taken for those of a sparse tensor.
    """
    if indices.kind is not Kind.INDICES or indices.selection == EVERY_EXAMPLE:
        return False
    return values.layout == rows(0, indices.selection).layout


def _is_sparse_batch(indices: State, values: State, shape: typing.Optional[Sizes]) -> bool:
    """Whether these are the parts of a sparse tensor with a row for each example, (n, 20)."""
    return is_sparse(indices, values) and begins_with_examples(shape)


@for_examples
def sparse_product(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.sparse.sparse_dense_matmul(x [n, 20], w [20, 4])`: [n, 4], the product of each row of a
    sparse tensor and a matrix that all towers share."""
    indices, values, shape_state, matrix = states
    shape = sizes_in(op.inputs[2], shape_state, view)
    is_transposed = op.get_attr('adjoint_a')  # [20, n]: a product over the examples
    is_batch = _is_sparse_batch(indices, values, shape) and not is_transposed
    is_shared_matrix = matrix.kind is Kind.INDEPENDENT
    if not is_batch or not is_shared_matrix:
        return unknown(op, 'multiplies a sparse tensor that is not known to be of the examples')
    return per_example(0).with_marks_of(*states)


@for_examples
def sparse_sum(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.sparse.reduce_sum(x [n, 20], axis=1)`: [n], the sum of each row of a sparse tensor; over
    dimension 0, [20], a sum over the examples."""
    indices, values, shape_state = states[:3]
    shape = required(sizes_in(op.inputs[2], shape_state, view), op, _NO_SPARSE_BATCH)
    axes = required(view.value(op.inputs[3]), op, _NO_SPARSE_BATCH)
    if not _is_sparse_batch(indices, values, shape):
        return unknown(op, _NO_SPARSE_BATCH)
    reduced = [int(axis) % len(shape) for axis in np.ravel(axes)]
    is_over_examples = not reduced or 0 in reduced  # without any dimension, TensorFlow takes all
    result = total(Kind.SUM, op) if is_over_examples else per_example(0)
    return result.with_marks_of(*states)


def sparse_to_dense(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.sparse.to_dense`: [n, 20], a row for each row of a sparse tensor of the examples."""
    indices, shape_state, values, default = states
    shape = sizes_in(op.inputs[1], shape_state, view)
    if not _is_sparse_batch(indices, values, shape) or default.kind is not Kind.INDEPENDENT:
        return unknown(op, 'fills in values at places that are not known to be of the examples')
    return per_example(0).with_marks_of(*states)


def ctc_loss(op: tf.Operation, states: _States, view: View) -> Results:
    """`tf.nn.ctc_loss`: a loss [n], of the sequences [time, n, classes] and the sparse labels of
    each example; beside it the gradient of the sequences."""
    sequences, indices, values, lengths = states
    is_time_major = sequences.layout == per_example(1).layout
    if not is_time_major or not is_sparse(indices, values):
        return unknown(op, 'has sequences or labels that are not known to be of the examples')
    # Positions, `tf.range(n)`, are no lengths either: in the batch they are others.
    if not is_shared_or_at(lengths, ROW_OF_EACH_EXAMPLE):
        return unknown(op, 'has lengths that are not known to be of the examples')
    loss = per_example(0).with_marks_of(*states)
    gradient = per_example(1).with_marks_of(*states)
    return [loss, gradient]
