"""Rules for entries at indices: rows of tables that all towers share, rows of the examples.

Rows of examples may be taken by the examples' own positions alone: `tf.gather(x [n, 4],
tf.range(n))` is x, and a gather at the positions that a mask leaves gives the rows of the mask. At
any other indices, an example would get the row of another example, which may be in another shard.

A gather takes rows of its first input, which TensorFlow calls `params`. The second input is the
indices.

Words of other modules: positions have the `selection` `EVERY_EXAMPLE` unless a mask left them;
`ROW_OF_EACH_EXAMPLE` is the layout of x [n, …], whose row e is of example e.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.graph import graph_walk
from towers.proof.rules.blocks import row_of_each_block
from towers.proof.rules.common import (
    COMPUTES_WITH_POSITIONS,
    OWN_ARGUMENTS,
    any_by_example,
    any_of_kind,
    are_shared_arguments,
    has_examples_last,
    has_one_entry_along,
    is_of_batch,
    is_set,
    static_rank,
    static_value,
    takes_whole_rows,
    vector_along_examples,
    with_new_dimension,
)
from towers.proof.rules.entries import by_example, elementwise
from towers.proof.rules.lookups import once_looked_up, rows_of_rows
from towers.proof.rules.totals import not_linear
from towers.proof.sizes import as_numbers
from towers.proof.states import (
    EVERY_EXAMPLE,
    INDEPENDENT,
    ROW_OF_EACH_EXAMPLE,
    Kind,
    State,
    first_unknown,
    per_example,
    rows,
    unknown,
)
from towers.proof.view import View

_States = typing.Sequence[State]

_BY_PLACES = 'takes examples by their places'


# ---- tf.gather -----------------------------------------------------------------------------------

def gather(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.gather(table [20, 4], x [n])`: [n, 4], a row of the table for each example; or
    `tf.gather(x [n, 4], [2, 0], axis=1)`: [n, 2], two columns of each example.

    If the indices are UNKNOWN, the operations that compute them may tell the result: therefore this
    rule's row in `TABLE` has the flag `takes_unknown`.
    """
    indices = states[1]
    if indices.kind is Kind.UNKNOWN:
        return _gathered_at_unknown(op, states, view)
    return _gathered_at_known(op, states, view)


def _gathered_at_unknown(op: tf.Operation, states: _States, view: View) -> State:
    """The state of rows at indices whose state is UNKNOWN, by the operations that compute them.

    Indices `tf.range(n) * 8 + place` may take one row of each block of 8 rows. And of
    `different, places = tf.unique(values)`, where `places` has the place of each value in
    `different`: `tf.gather(tf.gather(table, different), places)` is `tf.gather(table, values)`.

    Args:
      op: the operation.
      states: the states of its inputs.
      view: `View`.
    """
    params = states[0]
    row_of_each = row_of_each_block(op, params, view)
    if row_of_each is not None:
        return row_of_each
    table_and_values = once_looked_up(op, view)
    if table_and_values is not None:
        axis_argument = states[2:]
        states = [*table_and_values, *axis_argument]
    return _gathered_at_known(op, states, view)


def _gathered_at_known(op: tf.Operation, states: _States, view: View) -> State:
    """The state of rows at indices, by the states of all inputs: params, indices and, if the
    operation has one, the axis."""
    not_known = first_unknown(states)
    if not_known is not None:
        return not_known
    axis_argument = states[2:]  # [] for `Gather` and `ResourceGather`
    if not are_shared_arguments(axis_argument):
        return unknown(op, OWN_ARGUMENTS)
    # Sizes count as numbers: if the result were a shape, the rule would not be asked.
    params, indices = as_numbers(op, states[:2], view)
    return _gathered(op, params, indices, view)


def _gathered(op: tf.Operation, params: State, indices: State, view: View) -> State:
    """The state of rows at indices, by the state of the indices.

        positions of examples    the rows of these examples
        of one example           of this example, in a loop over the examples
        of the batch             by the places of the examples in params and indices
        a mean or a sum          a value of the shard chooses the row, which gets the value's mark
        the same on every tower  the state of the params: a row of a mean is a mean

    Args:
      op: the operation.
      params: the state of the tensor whose rows are taken.
      indices: the state of the indices.
      view: `View`.
    """
    if indices.kind is Kind.ROW_POSITION:  # positions of the rows that a mask [rows] keeps
        return rows_of_rows(op, params, indices, view)
    if params.is_position or indices.kind is Kind.INDICES:
        return unknown(op, COMPUTES_WITH_POSITIONS)
    if indices.kind is Kind.POSITION:  # positions of all examples, or of those that a mask keeps
        return _rows_at_positions(op, params, indices, rank=1, view=view)
    if any_of_kind([params, indices], Kind.ONE_EXAMPLE):
        return by_example(op, [params, indices], view)
    if any_by_example([params, indices]):
        return _gathered_of_batch(op, params, indices, view)
    if indices.is_total:
        return not_linear(op, [params, indices], view)
    return params.with_marks_of(indices)


def _gathered_of_batch(op: tf.Operation, params: State, indices: State, view: View) -> State:
    """The state of rows where the params or the indices, or both, are values of the batch.

    The result has the dimensions of the indices in the place of the params' dimension `axis`:

        a table [20, 4] at x [n], axis 0         [n, 4]: the dimension of the indices' examples
        x [n, 4] at [2, 0], axis 1               [n, 2]: the examples stay along dimension 0
        x [3, n] at [[2, 0], [1, 1]], axis 0     [2, 2, n]: the examples move from dimension 1 to 2
        x [n, 4] at y [n, 2], `batch_dims` 1     [n, 2]: each example at its own indices
        x [n, 4] at any indices, axis 0          unknown: an example may get another one's row

    Args:
      op: the operation.
      params: the state of the tensor whose rows are taken.
      indices: the state of the indices.
      view: `View`.
    """
    axis = _axis_of_gather(op, view)
    if is_set(op, 'batch_dims'):
        return _gathered_of_each(op, params, indices)
    if params.kind is Kind.INDEPENDENT:
        return indices._replace(axis=axis + indices.axis).with_marks_of(params)
    if indices.kind is not Kind.INDEPENDENT or axis == params.axis:
        return unknown(op, _BY_PLACES)
    if axis > params.axis:
        return params.with_marks_of(indices)
    # The dimensions of the indices replace one dimension of the params, before the examples'.
    new_dimensions = static_rank(op.inputs[1], op, view) - 1
    return params._replace(axis=params.axis + new_dimensions).with_marks_of(indices)


def _gathered_of_each(op: tf.Operation, params: State, indices: State) -> State:
    """The state of rows with `batch_dims`, the number of first dimensions that the params and the
    indices have in common. The gather treats each entry along these dimensions by itself. One of
    these dimensions has to be the examples'.

    The result has `is_constant=False`: of params that are (1, 2, 3, 4) for each example, two
    examples with different indices get different entries.
    """
    are_of_same_examples = params.kind is Kind.PER_EXAMPLE and params.layout == indices.layout
    is_dimension_common = params.axis < op.get_attr('batch_dims')
    if not are_of_same_examples or not is_dimension_common:
        return unknown(op, _BY_PLACES)
    return params._replace(is_constant=False).with_marks_of(indices)


def _axis_of_gather(op: tf.Operation, view: View) -> int:
    """The dimension along which a gather takes rows.

    Raises:
      NotKnown: the axis is not static, so that the proof ends at the operation.
    """
    if op.type != 'GatherV2':  # `Gather` and `ResourceGather` have no argument `axis`
        return 0
    axis = static_value(op.inputs[2], op, view)
    rank = static_rank(op.inputs[0], op, view)
    return int(axis) % rank


def _rows_at_positions(op: tf.Operation, params: State, positions: State, rank: int,
                       view: View) -> State:
    """The state of examples' rows at the examples' own positions: all rows, or the rows of a mask.

    Args:
      op: the operation that gathers the rows.
      params: the state of the tensor whose rows are taken, [n, …].
      positions: the state of the positions.
      rank: how many dimensions they have: [n] of `tf.gather`, [n, 1] of `tf.gather_nd`.
      view: `View`.
    """
    are_one_after_the_other = positions.axis == 0 and view.rank(op.inputs[1]) == rank
    if not are_one_after_the_other or not takes_whole_rows(op, view):
        return unknown(op, _BY_PLACES)
    # A position is the number of its example's row only if the params have one row for each entry
    # of the range or of the mask, in the same order.
    rows_of_positions = vector_along_examples(positions)
    if params.layout != rows_of_positions.layout:
        return unknown(op, _BY_PLACES)
    if positions.selection == EVERY_EXAMPLE:
        return params.with_marks_of(positions)
    return rows(0, positions.selection).with_marks_of(params, positions)


# ---- tf.gather_nd --------------------------------------------------------------------------------

def gather_nd(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.gather_nd(x, indices)`: entries, or rows, at the index vectors along the last dimension.

        x [n, 4] at [tf.range(n), y] [n, 2]    INDICES: [n], the entry y of each example
        x [n, 4] at tf.range(n) [n, 1]         POSITION: [n, 4], the row of each example
        a table [20, 4] at y [n, 2]            [n]: the entry of the table for each example
    """
    params, indices = states
    if indices.kind is Kind.POSITION:
        return _rows_at_vectors(op, params, indices, view)
    if indices.kind is Kind.INDICES:
        if params.layout != ROW_OF_EACH_EXAMPLE:  # row e of the params is not of example e
            return unknown(op, _BY_PLACES)
        return values_at(indices).with_marks_of(params, indices)
    if not any_by_example(states):
        return not_linear(op, states, view)
    if params.kind is Kind.INDEPENDENT:
        return _entries_of_table(op, params, indices, view)
    return unknown(op, _BY_PLACES)


def _rows_at_vectors(op: tf.Operation, params: State, positions: State, view: View) -> State:
    """The state of rows at positions [n, 1], each of which is an index vector of one number."""
    if not has_one_entry_along(-1, op.inputs[1], view):
        return unknown(op, _BY_PLACES)
    # `_rows_at_positions` refuses index vectors in any other shape than [n, 1].
    return _rows_at_positions(op, params, positions, rank=2, view=view)


def _entries_of_table(op: tf.Operation, table: State, indices: State, view: View) -> State:
    """The state of entries of a table that all towers share, at index vectors of the examples.

    Index vectors are along the last dimension of the indices [n, 2]. In indices [2, n] a vector
    would have numbers of several examples. The result has `is_constant=False`, which is always
    sound.
    """
    rank = static_rank(op.inputs[1], op, view)
    if has_examples_last(indices, rank):
        return unknown(op, 'takes entries by places of several examples')
    return indices._replace(is_constant=False).with_marks_of(table)


def values_at(indices: State) -> State:
    """The state of values [rows, …], one value at each index vector of [rows, k]."""
    if indices.selection == EVERY_EXAMPLE:
        return per_example(0)
    return rows(0, indices.selection)


# ---- numbers of classes --------------------------------------------------------------------------

def one_hot(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.one_hot(x [n], 10)`: [n, 10], a row for each example.

    If all examples have the same index, they have the same row. This is not followed: the result
    has `is_constant=False`, which is always sound.
    """
    indices = states[0]
    arguments = states[1:]
    if not are_shared_arguments(arguments):
        return unknown(op, OWN_ARGUMENTS)
    if indices.is_total:  # a mean of the shard chooses the place of the one
        return not_linear(op, [indices], view)
    if not is_of_batch(indices):  # of one example, or the same on every tower
        return indices.with_marks_of(*arguments)
    rank = static_rank(op.outputs[0], op, view)
    place = op.get_attr('axis') % rank
    result = with_new_dimension(indices, place)._replace(is_constant=False)
    return result.with_marks_of(*arguments)


def table_lookup(op: tf.Operation, states: _States, view: View) -> State:
    """`table.lookup(x [n, 4])`: the value that a table has for each entry.

    The table has to be filled before the first step and not changed afterwards. So it is the same
    on every tower.
    """
    if _table_of(op, view).type not in ('HashTable', 'HashTableV2'):
        return unknown(op, 'looks up a table to which a step may write')
    return elementwise(op, states, view)


def _table_of(lookup: tf.Operation, view: View) -> tf.Operation:
    """The operation that made the table of a lookup.

    Where a model takes its table from outside, the scratch graph has a placeholder for the table.
    Then the table is found from the same lookup in the program's graph. A lookup in the body of a
    function has no such original in the program: there the result is the placeholder.
    """
    handed_on = ('Identity', 'Enter', 'Switch')
    table = graph_walk.source_through(lookup.inputs[0], handed_on).op
    original = view.program_op(lookup)
    if table.type != 'Placeholder' or original is None:
        return table
    return graph_walk.source_through(original.inputs[0], handed_on).op


def candidate_sampler(op: tf.Operation, states: _States, view: View) -> typing.List[State]:
    """Sampled classes, as `tf.nn.sampled_softmax_loss` draws them. The draw does not depend on the
    input, the examples' own classes [n, 1].

    Returns:
      The states of the sampled classes, of the expected counts of each example's own classes, and
      of the expected counts of the sampled classes.
    """
    drawn = INDEPENDENT._replace(is_random=True)
    counts_of_own_classes = states[0]._replace(is_random=True)
    return [drawn, counts_of_own_classes, drawn]
