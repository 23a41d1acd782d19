"""Rules for rows of which examples have different numbers: masks, sparse tensors, segments.

The name of the operation that selected the rows is in `State.selection`. Two tensors with the same
selection have the same rows in the same order. So tensors of the rows of one mask can be combined
entry by entry, and can be put back at the places where the mask found the rows. The rows of two
masks cannot be combined.

    mask [n]                             selects rows
    positions = tf.where(mask)           POSITION: the position of each row's example
    x_rows = tf.gather(x, positions)     ROWS
    tf.scatter_nd(positions, x_rows, …)  the rows back at their places: [n, 4] again

A sparse tensor [n, 20] is a triple: its indices [rows, 2], index vectors whose first number is the
position of the example (INDICES); its values [rows] (ROWS); and its shape (n, 20).

Where no input tells anything of single examples, `not_linear` gives the state of the result: the
same on every tower, or marked with the means and sums that it is computed from. A rule below
`for_examples` is not asked about such inputs.

Words of other modules: `EVERY_EXAMPLE` is the `selection` of a state whose examples nothing has
selected; `ROW_OF_EACH_EXAMPLE` is the layout of x [n, …], whose row e is of example e.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.graph import graph_walk
from towers.proof.rules.common import (
    Results,
    are_zeros,
    axes_of_examples,
    begins_with_examples,
    has_one_entry_along,
    is_of_batch,
    is_shared_or_at,
    required,
    static_axes,
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

        mask [n]       the positions of the examples whose mask is true, in the examples' order
        mask [n, 4]    index vectors (position of the example, place in the row of the example)
        mask [rows]    the numbers of the rows whose mask is true
    """
    mask = states[0]
    selection = _selection_by_mask(op, view)
    is_vector = view.rank(op.inputs[0]) == 1
    if is_vector and is_of_batch(mask):
        kind = Kind.ROW_POSITION if mask.kind is Kind.ROWS else Kind.POSITION
        positions = State(kind, outer=mask.outer, inner=mask.inner, selection=selection)
        return positions.with_marks_of(mask)
    if mask.layout == ROW_OF_EACH_EXAMPLE:
        return State(Kind.INDICES, selection=selection).with_marks_of(mask)
    return unknown(op, 'finds places in more than one dimension')


def _selection_by_mask(op: tf.Operation, view: View) -> str:
    """The name for the selection of a `Where`: its own name, or the selection of another `Where` of
    the same mask, if the other one has a state already.

    `tf.boolean_mask(logits, mask)` and `tf.boolean_mask(labels, mask)` make a `Where` each, of the
    mask reshaped to a vector. A reshape keeps the order of the entries, so that both `Where`s
    select the same rows in the same order.
    """
    if view.is_in_loop(op):  # each iteration may have another mask
        return op.name
    mask = graph_walk.source_through(op.inputs[0], ('Reshape',))
    for other in graph_walk.of_types(_takers_of_entries(mask), ['Where']):
        # A `Where` in the state UNKNOWN, as before the analysis comes to it, has no selection.
        state = view.state_so_far(other.outputs[0])
        if state.selection != EVERY_EXAMPLE:
            return state.selection
    return op.name


def _takers_of_entries(tensor: tf.Tensor) -> typing.List[tf.Operation]:
    """The operations that take a tensor, either itself or a reshape of it."""
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
    """`tf.scatter_nd(positions [rows, 1], x [rows, 4], (n, 4))`: [n, 4], with the rows of the
    examples back at their places, and zeros for the examples that a mask left out.

    `tf.math.confusion_matrix` makes a tensor of a shape that all towers share, such as (10, 10), in
    which each example adds its value at a place computed from the example. This result is a sum
    over the examples.
    """
    positions, values, shape_state = states
    shape = sizes_in(op.inputs[2], shape_state, view)
    if _are_added_up(positions, values, shape):
        return total(Kind.SUM, op).with_marks_of(*states)
    are_vectors_of_one = has_one_entry_along(-1, op.inputs[0], view)  # [rows, 1]: a position alone
    if are_vectors_of_one and _are_put_back(positions, values, shape):
        return vector_along_examples(positions).with_marks_of(*states)
    return unknown(op, _BY_PLACES)


@for_examples
def segment_sum(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.math.unsorted_segment_sum(x [rows, 4], positions [rows], n)`: [n, 4], the sum of the rows
    of each example.

    With `(x [rows, 4], classes [rows], 10)`, each row is added to the row of its class. The result
    [10, 4] is a sum over the examples.
    """
    values, segments, number_state = states
    # The third input is the number of segments, a scalar: the first length of the result. The two
    # functions below get this length in the place of a shape.
    length_of_result = sizes_in(op.inputs[2], number_state, view)
    if _are_added_up(segments, values, length_of_result):
        return total(Kind.SUM, op).with_marks_of(*states)
    if _are_put_back(segments, values, length_of_result):
        return vector_along_examples(segments).with_marks_of(*states)
    return unknown(op, 'adds up rows by their numbers')


@for_examples
def sparse_dense_add(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.sparse.add` of a sparse tensor and a dense tensor that all towers share: a sum over the
    examples, to which each example adds a value at its place. TensorFlow 1's
    `tf.math.confusion_matrix` adds to zeros. If the dense tensor is not known to be zeros, the sum
    has an offset."""
    places, values, shape_state, dense = states
    shape = sizes_in(op.inputs[2], shape_state, view)
    if not _are_added_up(places, values, shape) or not dense.is_alike_on_towers:
        return unknown(op, _BY_PLACES)
    has_offset = not are_zeros(op.inputs[3], view)
    return total(Kind.SUM, op)._replace(has_offset=has_offset).with_marks_of(*states)


def _are_put_back(positions: State, values: State, shape: typing.Optional[Sizes]) -> bool:
    """Whether rows that a mask of examples left are put at the places where the mask found them, in
    a tensor as long as the mask.

    Args:
      positions: the state of the places, one for each row.
      values: the state of the rows.
      shape: the shape of the tensor, or its first length alone; None where it is not known.
    """
    if positions.kind is not Kind.POSITION:
        return False
    are_rows_of_mask = values.layout == rows(0, positions.selection).layout
    entries_of_mask = positions.outer * positions.inner  # of each example: 3 in a mask [3 n]
    return are_rows_of_mask and begins_with_examples(shape, entries_of_mask)


def _are_added_up(places: State, values: State, shape: typing.Optional[Sizes]) -> bool:
    """Whether each row is added at a place that is computed from the row's own example, in a tensor
    of a shape that is the same on every tower. Then the tensor is a sum over the examples.

    Args:
      places: the state of the places, one for each row.
      values: the state of the rows.
      shape: the shape of the tensor, or its first length alone; None where it is not known.
    """
    if shape is None or axes_of_examples(shape):
        return False
    if not is_of_batch(places):  # the places are not computed from each example
        return False
    # With the examples along another dimension than 0, the numbers of one place would be of several
    # examples.
    return places.axis == 0 and values.layout == places.layout


# ---- sparse tensors ------------------------------------------------------------------------------

def are_sparse_indices(state: State) -> bool:
    """Whether this is the state of the indices of a sparse tensor [n, …].

    INDICES without a selection, as of `tf.stack([tf.range(n), column], 1)`, are one index vector
    for each example. They do not count as the indices of a sparse tensor.
    """
    return state.kind is Kind.INDICES and state.selection != EVERY_EXAMPLE


def is_sparse(indices: State, values: State) -> bool:
    """Whether these are the states of the indices and the values of a sparse tensor [n, …].

    The indices and the values must have the same selection (a part of the values' layout). Then row
    i of the values is at index vector i.
    """
    has_value_of_each = values.layout == rows(0, indices.selection).layout
    return are_sparse_indices(indices) and has_value_of_each


def is_sparse_batch(indices: State, values: State, shape: typing.Optional[Sizes]) -> bool:
    """Whether these belong to a sparse tensor with a row for each example, of the shape (n, 20)."""
    return is_sparse(indices, values) and begins_with_examples(shape)


@for_examples
def sparse_product(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.sparse.sparse_dense_matmul(x [n, 20], w [20, 4])`: [n, 4], each row of a sparse tensor
    times a matrix that all towers share."""
    indices, values, shape_state, matrix = states
    shape = sizes_in(op.inputs[2], shape_state, view)
    is_transposed = op.get_attr('adjoint_a')  # [20, n]: a product over the examples
    is_batch = is_sparse_batch(indices, values, shape) and not is_transposed
    is_shared_matrix = matrix.kind is Kind.INDEPENDENT
    if not is_batch or not is_shared_matrix:
        return unknown(op, 'multiplies a sparse tensor that is not known to be of the examples')
    return per_example(0).with_marks_of(*states)


@for_examples
def sparse_sum(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.sparse.reduce_sum(x [n, 20], axis=1)`: [n], the sum of each row of a sparse tensor. With
    axis=0, the result [20] is a sum over the examples."""
    indices, values, shape_state = states[:3]
    shape = required(sizes_in(op.inputs[2], shape_state, view), op, _NO_SPARSE_BATCH)
    reduced = static_axes(op.inputs[3], len(shape), op, view)
    if not is_sparse_batch(indices, values, shape):
        return unknown(op, _NO_SPARSE_BATCH)
    is_over_examples = not reduced or 0 in reduced  # without axes, over all dimensions
    result = total(Kind.SUM, op) if is_over_examples else per_example(0)
    return result.with_marks_of(*states)


@for_examples
def sparse_to_dense(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.sparse.to_dense`: [n, 20], a row for each row of a sparse tensor of the examples."""
    indices, shape_state, values, default = states
    shape = sizes_in(op.inputs[1], shape_state, view)
    if not is_sparse_batch(indices, values, shape) or default.kind is not Kind.INDEPENDENT:
        return unknown(op, 'fills in values at places that are not known to be of the examples')
    return per_example(0).with_marks_of(*states)


@for_examples
def ctc_loss(op: tf.Operation, states: _States, view: View) -> Results:
    """`tf.nn.ctc_loss`: a loss [n], computed from the sequences [time, n, classes] and the sparse
    labels of each example.

    Returns:
      The states of the loss, and of the gradient of the sequences; or one state for both.
    """
    sequences, indices, values, lengths = states
    is_time_major = sequences.layout == per_example(1).layout
    if not is_time_major or not is_sparse(indices, values):
        return unknown(op, 'has sequences or labels that are not known to be of the examples')
    # Positions, `tf.range(n)`, are refused here, too: an example has another position in the batch
    # than in its shard.
    if not is_shared_or_at(lengths, ROW_OF_EACH_EXAMPLE):
        return unknown(op, 'has lengths that are not known to be of the examples')
    loss = per_example(0).with_marks_of(*states)
    gradient = per_example(1).with_marks_of(*states)
    return [loss, gradient]
