"""Rules for embeddings that look up each word once: of sparse tensors, as
`tf.nn.embedding_lookup_sparse` does in feature columns; and of any, as `embedding_lookup_unique` of
TensorFlow 1's `tf.contrib.layers`.

    words    a sparse tensor [n, …] of numbers of words, any number of them for each example
    different, which = tf.unique(words.values)       each word once; the place of each value in it
    table_rows = tf.gather(table, different)
    positions = words.indices[:, 0]                  the example of each value
    tf.sparse.segment_sum(table_rows, which, positions)    the sum of the rows of each example

The sum has as many rows as the position of the last example with a value demands. This is certain
to be n only where each example was given a value (`SparseFillEmptyRows`).

Words of other modules: index vectors and positions have the `selection` `EVERY_EXAMPLE` if nothing
selected them; `is_alike_on_towers` is what is INDEPENDENT and has no mark.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.graph import graph_walk
from towers.proof.rules.common import (
    Results,
    begins_with_examples,
    required,
    takes_whole_rows,
    tell_of_examples,
)
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
from towers.proof.view import View, same_numbers_behind

_States = typing.Sequence[State]

_AS_MANY_AS_ARE_LEFT = Size(-1)  # in a new shape
_GATHERS = ('Gather', 'GatherV2', 'ResourceGather')
_NOT_OF_EXAMPLES = 'has a shape that is not known to be of the examples'
_ROWS_BY_PLACES = 'takes rows by their places'


# ---- the shape of a sparse tensor ----------------------------------------------------------------

def sparse_reshape(op: tf.Operation, states: _States, view: View) -> Results:
    """`tf.sparse.reshape`: of the shape (n, 4, 5) as (n, 20), index vectors (e, 2, 3) become
    (e, 13). The example's position e stays, where n is first before and after, and constants are
    behind it.

    Returns:
      The states of the new index vectors, and of the new shape; or one state of both.
    """
    indices, shape_state, new_shape_state = states
    if indices.kind is not Kind.INDICES:
        return not_linear(op, states, view)
    # Those of `tf.stack([tf.range(n), y], 1)`, one for each example, are of no sparse tensor.
    is_of_sparse_tensor = indices.selection != EVERY_EXAMPLE
    if not is_of_sparse_tensor:
        return unknown(op, _NOT_OF_EXAMPLES)
    before = required(sizes_in(op.inputs[1], shape_state, view), op, _NOT_OF_EXAMPLES)
    new_shape = required(sizes_in(op.inputs[2], new_shape_state, view), op, _NOT_OF_EXAMPLES)
    after = _with_rest(before, new_shape)
    if not _is_shape_of_examples(before) or not _is_shape_of_examples(after):
        return unknown(op, _NOT_OF_EXAMPLES)
    if product_of_all(before) != product_of_all(after):
        return unknown(op, 'has another number of entries for each example')
    return [indices, sizes_state(after)]


def _with_rest(before: Sizes, after: Sizes) -> Sizes:
    """The shape after a reshape, with the length that is left in the place of its -1: of the shape
    (n, 4, 5) as (n, -1), it is (n, 20).

    The new shape is returned unchanged where it has no -1, or the length is not known.
    """
    if after.count(_AS_MANY_AS_ARE_LEFT) != 1:
        return after
    place = after.index(_AS_MANY_AS_ARE_LEFT)
    entries = product_of_all(before)
    entries_of_others = product_of_all(after[:place] + after[place + 1:])
    if entries is None or entries_of_others is None:
        return after
    rest = quotient(entries, entries_of_others)
    if rest is None:
        return after
    return after[:place] + (rest,) + after[place + 1:]


def _is_shape_of_examples(shape: typing.Optional[Sizes]) -> bool:
    """Whether a shape is (n, 3, …), of lengths that are all known, and n at no other place."""
    if shape is None or not begins_with_examples(shape):
        return False
    return all(size.constant >= 0 for size in shape)  # without the -1 of a new shape


def fill_empty_rows(op: tf.Operation, states: _States, view: View) -> Results:
    """`tf.sparse.fill_empty_rows`: the rows of a sparse tensor [n, …], and one row for each example
    that has none.

    Returns:
      The states of the indices and the values of the new sparse tensor, whose rows have this
      operation as their selection; of whether an example had none, [n]; and of the number of the
      new row for each old one. Or one state of all four.
    """
    indices, values, shape_state, value_of_new_rows = states
    shape = sizes_in(op.inputs[2], shape_state, view)
    is_of_examples = is_sparse(indices, values) and _is_shape_of_examples(shape)
    is_shared_value = value_of_new_rows.is_alike_on_towers
    if not is_of_examples or not is_shared_value:
        return unknown(op, 'fills rows that are not known to be of the examples')
    new_indices = State(Kind.INDICES, selection=op.name)
    new_values = rows(0, op.name)
    had_none = per_example(0)
    new_rows = unknown(op, 'tells the rows of the shard')  # of another shard, other numbers
    return [new_indices, new_values, had_none, new_rows]


# ---- sums of rows of a table ---------------------------------------------------------------------

def segment_rows(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.sparse.segment_sum(table, values, positions)`: [n, 4], the sum or mean of the rows that
    the values of each example have in a table that all towers share.

    Or, as `tf.nn.embedding_lookup_sparse` does, `tf.sparse.segment_sum(table[different], which,
    positions)`, where `different` and `which` are the results of `tf.unique(values)`. The shard
    numbers its different values, so that `which` itself is UNKNOWN; but `different[which]` are the
    values, whatever these numbers are.
    """
    table_rows, which, _ = op.inputs
    numbers_by_unique = same_numbers_behind(which)
    gather = graph_walk.source_through(table_rows, ('Identity',)).op
    table, values, positions = states
    if _is_lookup_of(numbers_by_unique, gather, view):
        table = view.state(gather.inputs[0])
        values = view.state(numbers_by_unique.op.inputs[0])
        return _sums_of_examples(op, table, values, positions, view)
    not_known = first_unknown(states)
    if not_known is not None:
        return not_known
    if table.kind is Kind.INDEPENDENT and values.kind is Kind.ROWS:
        return _sums_of_examples(op, table, values, positions, view)
    if tell_of_examples(states):
        return unknown(op, 'adds up rows by their numbers')
    return not_linear(op, states, view)


def _sums_of_examples(op: tf.Operation, table: State, values: State, positions: State,
                      view: View) -> State:
    """The state of the sums of the rows that the values of each example have in a table: [n, 4], if
    each example is known to have a value.

    Args:
      op: the operation.
      table: the state of the table.
      values: the state of the values, which are the numbers of rows of the table.
      positions: the state of the position of each value's example.
      view: `View`.
    """
    if positions.kind is Kind.UNKNOWN:
        return positions
    selection = positions.selection
    are_positions = positions.kind is Kind.POSITION and _has_row_of_each(selection, view)
    are_rows_at_positions = values.layout == rows(0, selection).layout
    is_shared_table = table.kind is Kind.INDEPENDENT
    if are_positions and are_rows_at_positions and is_shared_table:
        return per_example(0).with_marks_of(table, values, positions)
    return unknown(op, 'adds up rows that not each example is known to have')


def once_looked_up(op: tf.Operation, view: View) -> typing.Optional[typing.List[State]]:
    """The table and the values, where `op` is the second gather of a lookup of each value once:

        different, which = tf.unique(values)
        tf.gather(tf.gather(table, different), which)

    The shard numbers its different values, but `different[which]` are the values, whatever these
    numbers are; so the result is `tf.gather(table, values)`.

    Returns:
      The states of the table and of the values, a vector; None of any other gather.
    """
    which = same_numbers_behind(op.inputs[1])
    gather = graph_walk.source_through(op.inputs[0], ('Identity',)).op
    if not _is_lookup_of(which, gather, view) or not takes_whole_rows(op, view):
        return None
    return [view.state(gather.inputs[0]), view.state(which.op.inputs[0])]


def _is_lookup_of(which: tf.Tensor, gather: tf.Operation, view: View) -> bool:
    """Whether an operation looks up the different values that a `tf.unique` has found, each once,
    in a table that all towers share.

    Args:
      which: a tensor that may be the second result of the `tf.unique`, the places of all values
        among the different ones.
      gather: the operation that may look them up.
      view: `View`.
    """
    is_of_unique = which.op.type == 'Unique' and which.value_index == 1
    is_lookup = gather.type in _GATHERS and takes_whole_rows(gather, view)
    if not is_of_unique or not is_lookup:
        return False
    # What the forward pass has written to a table before it reads it may be of the examples.
    if gather.name in view.reads_of_written:
        return False
    different = which.op.outputs[0]
    return same_numbers_behind(gather.inputs[1]).name == different.name

def _has_row_of_each(selection: str, view: View) -> bool:
    """Whether a selection is known to have at least one row of each example."""
    is_operation = view.has_operation(selection)  # or else an input of the batch, named `x:0`
    if not is_operation:
        return False
    return view.graph.get_operation_by_name(selection).type == 'SparseFillEmptyRows'


# ---- rows of rows --------------------------------------------------------------------------------

def rows_of_rows(op: tf.Operation, params: State, positions: State, view: View) -> State:
    """`tf.gather(rows, tf.where(keep [rows]))`: the state of those rows that a mask of them keeps.

    Args:
      op: the operation that gathers.
      params: the state of the rows, or of the index vectors of a sparse tensor.
      positions: of the kind ROW_POSITION; its selection is the `Where`.
      view: `View`.
    """
    if params.kind not in (Kind.INDICES, Kind.ROWS) or params.axis != 0:
        return unknown(op, _ROWS_BY_PLACES)
    takes_rows_in_order = view.rank(op.inputs[1]) == 1 and takes_whole_rows(op, view)
    where = view.graph.get_operation_by_name(positions.selection)
    mask = view.state(where.inputs[0])
    # The mask has an entry for each of the rows only if the same selection left both.
    is_mask_of_rows = params.selection == mask.selection
    if not is_mask_of_rows or not takes_rows_in_order:
        return unknown(op, _ROWS_BY_PLACES)
    kept = State(params.kind, selection=positions.selection)
    return kept.with_marks_of(params, positions)
