"""Rules for embeddings of sparse tensors: `tf.nn.embedding_lookup_sparse`, in feature columns.

    words    a sparse tensor [n, …] of numbers of words, any number of them for each example
    different, which = tf.unique(words.values)       each word once; the place of each value in it
    table_rows = tf.gather(table, different)
    positions = words.indices[:, 0]                  the example of each value
    tf.sparse.segment_sum(table_rows, which, positions)    the sum of the rows of each example

The sum has as many rows as the position of the last example with a value demands. This is certain
to be n only where each example was given a value (`SparseFillEmptyRows`).
"""

import typing

import tensorflow.compat.v1 as tf

from towers.graph import graph_walk
from towers.proof.rules.rows import is_sparse
from towers.proof.rules.totals import not_linear
from towers.proof.sizes import Sizes, product_of_all, quotient, sizes_in
from towers.proof.states import (
    EVERY_EXAMPLE,
    Kind,
    Size,
    State,
    first_unknown,
    per_example,
    rows,
    sizes_state,
    unknown,
)
from towers.proof.view import View

_States = typing.Sequence[State]

_EACH_EXAMPLE = Size(0, 1)  # the size n
_AS_MANY_AS_ARE_LEFT = Size(-1)  # in a new shape
_SAME = ('Identity', 'Cast')  # types of operations that give the same whole numbers
_GATHERS = ('Gather', 'GatherV2', 'ResourceGather')
_NOT_OF_EXAMPLES = 'has a shape that is not known to be of the examples'
_ROWS_BY_PLACES = 'takes rows by their places'


# ---- the shape of a sparse tensor ----------------------------------------------------------------

def sparse_reshape(op: tf.Operation, states: _States, view: View) -> typing.List[State]:
    """`tf.sparse.reshape`: of the shape (n, 4, 5) as (n, 20), index vectors (e, 2, 3) become
    (e, 13). The example's position e stays, where n is first before and after, and constants are
    behind it.

    Returns:
      The states of the new index vectors, and of the new shape.
    """
    indices, shape_state, new_shape_state = states
    if indices.kind is not Kind.INDICES:
        return [not_linear(op, states, view)] * 2
    before = sizes_in(op.inputs[1], shape_state, view)
    after = sizes_in(op.inputs[2], new_shape_state, view)
    # Those of `tf.stack([tf.range(n), y], 1)`, one for each example, are of no sparse tensor.
    is_of_sparse_tensor = indices.selection != EVERY_EXAMPLE
    if before is None or after is None or not is_of_sparse_tensor:
        return [unknown(op, _NOT_OF_EXAMPLES)] * 2
    after = _with_rest(before, after)
    if not _has_examples_first(before) or not _has_examples_first(after):
        return [unknown(op, _NOT_OF_EXAMPLES)] * 2
    if product_of_all(before) != product_of_all(after):
        return [unknown(op, 'has another number of entries for each example')] * 2
    return [indices, sizes_state(after)]


def _with_rest(before: Sizes, after: Sizes) -> Sizes:
    """The shape after a reshape, with the number of entries that are left in the place of its -1.

    The new shape is returned unchanged where it has no -1, or the number is not known.
    """
    others = [size for size in after if size != _AS_MANY_AS_ARE_LEFT]
    entries = product_of_all(before)
    entries_of_others = product_of_all(others)
    has_one_left = len(others) == len(after) - 1
    if not has_one_left or entries is None or entries_of_others is None:
        return after
    rest = quotient(entries, entries_of_others)
    if rest is None:
        return after
    return tuple(rest if size == _AS_MANY_AS_ARE_LEFT else size for size in after)


def _has_examples_first(shape: typing.Optional[Sizes]) -> bool:
    """Whether a shape is (n, 3, …), of lengths that are all known."""
    if not shape or shape[0] != _EACH_EXAMPLE:
        return False
    return not any(size.per_example or size.constant < 0 for size in shape[1:])


def fill_empty_rows(op: tf.Operation, states: _States, view: View) -> typing.List[State]:
    """`tf.sparse.fill_empty_rows`: the rows of a sparse tensor [n, …], and one row for each example
    that has none.

    Returns:
      The states of the indices and the values of the new sparse tensor, whose rows have this
      operation as their selection; of whether an example had none, [n]; and of the number of the
      new row for each old one.
    """
    indices, values, shape_state, default = states
    shape = sizes_in(op.inputs[2], shape_state, view)
    is_of_examples = is_sparse(indices, values) and _has_examples_first(shape)
    if not is_of_examples or not default.is_alike_on_towers:  # the value of the new rows
        return [unknown(op, 'fills rows that are not known to be of the examples')] * 4
    new_indices = State(Kind.INDICES, selection=op.name)
    new_values = rows(0, op.name)
    had_none = per_example(0)
    new_rows = unknown(op, 'tells the rows of the shard')  # of another shard, other numbers
    return [new_indices, new_values, had_none, new_rows]


# ---- sums of rows of a table ---------------------------------------------------------------------

def segment_rows(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.sparse.segment_sum(table[different], which, positions)`: [n, 4], the sum or mean of the
    rows that the values of each example have in a table that all towers share.

    `different` and `which` are the results of `tf.unique(values)`, so that `different[which]` are
    the values: which numbers the shard gives them is of no account. Or the values themselves are
    looked up: `tf.sparse.segment_sum(table, values, positions)`.
    """
    table_rows, which, _ = op.inputs
    unique = graph_walk.source_through(which, _SAME)
    gather = graph_walk.source_through(table_rows, ('Identity',)).op
    table, values, positions = states
    if _is_lookup_of(unique, gather, view):
        table = view.state(gather.inputs[0])
        values = view.state(unique.op.inputs[0])
    elif table.kind is not Kind.INDEPENDENT or values.kind is not Kind.ROWS:
        return first_unknown(states) or _sums_of_others(op, states, view)
    if positions.kind is Kind.UNKNOWN:
        return positions
    selection = positions.selection
    are_of_same_rows = positions.kind is Kind.POSITION and (
        values.layout == rows(0, selection).layout)
    is_shared_table = table.kind is Kind.INDEPENDENT
    if not are_of_same_rows or not is_shared_table or not _has_row_of_each(selection, view):
        return unknown(op, 'adds up rows that not each example is known to have')
    return per_example(0).with_marks_of(table, values, positions)


def _is_lookup_of(which: tf.Tensor, gather: tf.Operation, view: View) -> bool:
    """Whether an operation looks up the different values that `which` numbers, in a table that the
    forward pass has not written before."""
    is_of_unique = which.op.type == 'Unique' and which.value_index == 1
    is_lookup = gather.type in _GATHERS and gather.name not in view.reads_of_written
    if not is_of_unique or not is_lookup or not _takes_first_dimension(gather, view):
        return False
    different = which.op.outputs[0]
    return graph_walk.source_through(gather.inputs[1], _SAME).name == different.name


def _sums_of_others(op: tf.Operation, states: _States, view: View) -> State:
    """The state of a sum by segments that are not of the examples."""
    if any(state.is_by_example or state.is_position for state in states):
        return unknown(op, 'adds up rows by their numbers')
    return not_linear(op, states, view)


def _takes_first_dimension(gather: tf.Operation, view: View) -> bool:
    """Whether entries along the first dimension are gathered."""
    if gather.type != 'GatherV2':  # which alone has another one, as an input
        return True
    axis = view.value(gather.inputs[2])
    return axis is not None and int(axis) == 0 and not gather.get_attr('batch_dims')


def _has_row_of_each(selection: str, view: View) -> bool:
    """Whether a selection has at least one row of each example."""
    if not view.has_operation(selection):  # but the name of an input of the batch
        return False
    return view.graph.get_operation_by_name(selection).type == 'SparseFillEmptyRows'


# ---- rows of rows --------------------------------------------------------------------------------

def rows_of_rows(op: tf.Operation, params: State, positions: State, view: View) -> State:
    """`tf.gather(rows, tf.where(keep [rows]))`: the state of those rows that a mask of them keeps.

    Args:
      op: the operation that gathers along the first dimension.
      params: the state of the rows, or of the index vectors of a sparse tensor.
      positions: of the kind ROW_POSITION; its selection is the `Where`.
      view: `View`.
    """
    mask = view.graph.get_operation_by_name(positions.selection).inputs[0]
    is_mask_of_rows = params.selection == view.state(mask).selection and params.axis == 0
    are_whole_rows = view.rank(op.inputs[1]) == 1 and _takes_first_dimension(op, view)
    if not is_mask_of_rows or not are_whole_rows:
        return unknown(op, _ROWS_BY_PLACES)
    if params.kind is Kind.INDICES:
        kept = State(Kind.INDICES, selection=positions.selection)
    elif params.kind is Kind.ROWS:
        kept = rows(0, positions.selection)
    else:
        return unknown(op, _ROWS_BY_PLACES)
    return kept.with_marks_of(params, positions)
