"""Rules for embeddings that look up each word once: the words of a sparse tensor, as
`tf.nn.embedding_lookup_sparse` does in feature columns; and the words of any tensor, as
`embedding_lookup_unique` of TensorFlow 1's `tf.contrib.layers` does.

    words    a sparse tensor [n, …] of word numbers; each example has any number of words
    different, which = tf.unique(words.values)       each word once; each value's place in these
    table_rows = tf.gather(table, different)
    positions = words.indices[:, 0]                  the example of each value
    tf.sparse.segment_sum(table_rows, which, positions)    the sum of the rows of each example

The sum has p + 1 rows, where p is the position of the last example with a value. It is certain that
these are n rows only after `SparseFillEmptyRows`, which gives each example a value.

Words of other modules: a state with `is_alike_on_towers` is INDEPENDENT and has no mark.
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
from towers.proof.rules.rows import are_sparse_indices, is_sparse_batch
from towers.proof.rules.totals import for_examples, not_linear
from towers.proof.sizes import Sizes, product_of_all, quotient, sizes_in
from towers.proof.states import (
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

@for_examples
def sparse_reshape(op: tf.Operation, states: _States, view: View) -> Results:
    """`tf.sparse.reshape`: from the shape (n, 4, 5) to (n, 20), the index vector (e, 2, 3) becomes
    (e, 13).

    The example's position e stays the first number of the vector, if both shapes begin with n and
    have constants behind it.

    Returns:
      The states of the new index vectors and of the new shape; or one state for both.
    """
    indices, shape_state, new_shape_state = states
    if not are_sparse_indices(indices):
        return unknown(op, _NOT_OF_EXAMPLES)
    before = required(sizes_in(op.inputs[1], shape_state, view), op, _NOT_OF_EXAMPLES)
    new_shape = required(sizes_in(op.inputs[2], new_shape_state, view), op, _NOT_OF_EXAMPLES)
    after = _with_rest(op, before, new_shape)
    if not begins_with_examples(before) or not begins_with_examples(after):
        return unknown(op, _NOT_OF_EXAMPLES)
    if product_of_all(before) != product_of_all(after):
        return unknown(op, 'has another number of entries for each example')
    return [indices, sizes_state(after)]


def _with_rest(op: tf.Operation, before: Sizes, after: Sizes) -> Sizes:
    """The shape after a reshape, with a length in the place of -1: (n, 20), where the shape
    (n, 4, 5) becomes (n, -1). TensorFlow refuses a second -1.

    Args:
      op: the reshape.
      before: the shape before the reshape.
      after: the new shape, maybe with a -1.

    Raises:
      NotKnown: the length is not known.
    """
    if after.count(_AS_MANY_AS_ARE_LEFT) != 1:
        return after
    place = after.index(_AS_MANY_AS_ARE_LEFT)
    others = after[:place] + after[place + 1:]
    entries = required(product_of_all(before), op, _NOT_OF_EXAMPLES)
    entries_of_others = required(product_of_all(others), op, _NOT_OF_EXAMPLES)
    rest = required(quotient(entries, entries_of_others), op, _NOT_OF_EXAMPLES)
    return after[:place] + (rest,) + after[place + 1:]


def fill_empty_rows(op: tf.Operation, states: _States, view: View) -> Results:
    """`tf.sparse.fill_empty_rows`: the rows of a sparse tensor [n, …], and one new row for each
    example that has none.

    Returns:
      The states of the four results: the indices and the values of the new sparse tensor, whose
      rows have this operation as their selection; whether an example had no row, [n]; the number of
      the new row for each old row. Or one state for all four.
    """
    indices, values, shape_state, value_of_new_rows = states
    shape = sizes_in(op.inputs[2], shape_state, view)
    is_shared_value = value_of_new_rows.is_alike_on_towers
    if not is_sparse_batch(indices, values, shape) or not is_shared_value:
        return unknown(op, 'fills rows that are not known to be of the examples')
    new_indices = State(Kind.INDICES, selection=op.name)
    new_values = rows(0, op.name)
    had_none = per_example(0)
    new_rows = unknown(op, 'tells the rows of the shard')  # another shard has other row numbers
    return [new_indices, new_values, had_none, new_rows]


# ---- sums of rows of a table ---------------------------------------------------------------------

def segment_rows(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.sparse.segment_sum(rows, row_numbers, positions)`: [n, 4], the sum or mean of the rows of
    each example. The result is known in two cases:

        rows                row_numbers    the rows of an example are
        the table itself    values         the table's rows at the values of this example
        table[different]    which          the same; see `tf.nn.embedding_lookup_sparse`

    In the second case `different` and `which` are the results of `tf.unique(values)`. Each shard
    numbers its different values, so that `which` itself is UNKNOWN; but `different[which]` are the
    values, whatever these numbers are.
    """
    rows_tensor, row_numbers_tensor, _ = op.inputs
    # Between the `tf.unique` and this operation, `which` may be cast to another wide integer type.
    maybe_which = same_numbers_behind(row_numbers_tensor)
    maybe_gather = graph_walk.source_through(rows_tensor, ('Identity',)).op
    rows_state, row_numbers, positions = states
    if _is_lookup_of(maybe_which, maybe_gather, view):
        table = view.state(maybe_gather.inputs[0])
        values = view.state(maybe_which.op.inputs[0])
        return _sums_of_examples(op, table, values, positions, view)
    not_known = first_unknown(states)
    if not_known is not None:
        return not_known
    if not tell_of_examples(states):  # such as rows of a variable, by constant numbers
        return not_linear(op, states, view)
    return _sums_of_examples(op, rows_state, row_numbers, positions, view)


def _sums_of_examples(op: tf.Operation, table: State, values: State, positions: State,
                      view: View) -> State:
    """The state of sums [n, 4]: for each example, the sum of the table's rows at the values of this
    example. The sums are unknown, unless each example is known to have a value, and all examples
    share the table.

    Args:
      op: the operation.
      table: the state of the table.
      values: the state of the values, each the number of a row of the table.
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
    return unknown(op, 'adds up rows that are not known to be of each example')


def once_looked_up(op: tf.Operation, view: View) -> typing.Optional[typing.List[State]]:
    """The table and the values of a lookup that takes each different value's row once. `op` has to
    be the outer gather of:

        different, which = tf.unique(values)
        tf.gather(tf.gather(table, different), which)

    Each shard numbers its different values. But `different[which]` are the values, whatever these
    numbers are. So the result equals `tf.gather(table, values)`.

    Returns:
      The states of the table and of the values, a vector; None for any other gather.
    """
    which = same_numbers_behind(op.inputs[1])
    gather = graph_walk.source_through(op.inputs[0], ('Identity',)).op
    if not _is_lookup_of(which, gather, view) or not takes_whole_rows(op, view):
        return None
    return [view.state(gather.inputs[0]), view.state(which.op.inputs[0])]


def _is_lookup_of(which: tf.Tensor, gather: tf.Operation, view: View) -> bool:
    """Whether an operation takes the rows of the different values of a `tf.unique`, each row once,
    from a table that all towers share.

    Args:
      which: a tensor that may be the second result of the `tf.unique`: for each value, its place
        among the different values.
      gather: the operation that may take the rows.
      view: `View`.
    """
    is_of_unique = which.op.type == 'Unique' and which.value_index == 1
    is_lookup = gather.type in _GATHERS and takes_whole_rows(gather, view)
    if not is_of_unique or not is_lookup:
        return False
    # If the forward pass writes to the table before the gather reads it, the rows may depend on
    # the examples.
    if gather.name in view.reads_of_written:
        return False
    different = which.op.outputs[0]
    return same_numbers_behind(gather.inputs[1]).name == different.name


def _has_row_of_each(selection: str, view: View) -> bool:
    """Whether a selection is known to have at least one row of each example."""
    is_operation = view.has_operation(selection)  # else it is an input of the batch, named `x:0`
    if not is_operation:
        return False
    return view.graph.get_operation_by_name(selection).type == 'SparseFillEmptyRows'


# ---- rows of rows --------------------------------------------------------------------------------

def rows_of_rows(op: tf.Operation, params: State, positions: State, view: View) -> State:
    """`tf.gather(rows, tf.where(keep [rows]))`: the state of the rows that a mask [rows] keeps.

    Args:
      op: the operation that gathers.
      params: the state of the rows, or of the index vectors of a sparse tensor.
      positions: the state of the positions, ROW_POSITION; its selection names the `Where`.
      view: `View`.
    """
    if params.kind not in (Kind.INDICES, Kind.ROWS) or params.axis != 0:
        return unknown(op, _ROWS_BY_PLACES)
    takes_rows_in_order = view.rank(op.inputs[1]) == 1 and takes_whole_rows(op, view)
    where = view.graph.get_operation_by_name(positions.selection)
    mask = view.state(where.inputs[0])
    # The mask has an entry for each row only if the rows and the mask have the same selection.
    is_mask_of_rows = params.selection == mask.selection
    if not is_mask_of_rows or not takes_rows_in_order:
        return unknown(op, _ROWS_BY_PLACES)
    kept = State(params.kind, selection=positions.selection)
    return kept.with_marks_of(params, positions)
