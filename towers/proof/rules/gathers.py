"""Rules for entries at indices: rows of tables that all towers share, rows of the examples.

Examples may be taken by their own positions alone: `tf.gather(x [n, 4], tf.range(n))` is x, and by
the positions that a mask leaves it is the rows of the mask. By any other indices, an example would
get the row of another one, which may be in another shard.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.graph import graph_walk
from towers.proof.rules.blocks import row_of_each_block
from towers.proof.rules.entries import by_example, elementwise
from towers.proof.rules.lookups import rows_of_rows
from towers.proof.rules.shapes import rearranged_sizes
from towers.proof.rules.totals import any_by_example, not_linear
from towers.proof.sizes import as_number, as_numbers
from towers.proof.states import (
    EVERY_EXAMPLE,
    INDEPENDENT,
    NO_STATIC_ARGUMENT,
    NO_STATIC_RANK,
    ROW_OF_EACH_EXAMPLE,
    Kind,
    State,
    per_example,
    rows,
    unknown,
)
from towers.proof.view import View

_States = typing.Sequence[State]

_BY_PLACES = 'takes examples by their places'
_WITH_POSITIONS = 'computes with the numbers of the examples'


def gather(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.gather(table [20, 4], x [n])`: [n, 4], a row for each example; or columns of examples."""
    if states[1].kind is Kind.UNKNOWN:
        row_of_each = row_of_each_block(op, states[0], view)
        if row_of_each is not None:
            return row_of_each
    for state in states:
        if state.kind is Kind.UNKNOWN:
            return state
    return _gather_known(op, states, view)


def _gather_known(op: tf.Operation, states: _States, view: View) -> State:
    """Rows at indices of which something is known."""
    if states[0].kind is Kind.SIZES:
        sizes = rearranged_sizes(op, list(states), view)
        if sizes is not None:
            return sizes
    params, indices = as_numbers(op, states[:2], view)
    if indices.kind is Kind.ROW_POSITION:
        return rows_of_rows(op, params, indices, view)
    if params.is_position or indices.kind is Kind.INDICES:
        return unknown(op, _WITH_POSITIONS)
    if indices.kind is Kind.POSITION:
        return rows_at_positions(op, params, indices, view)
    if not any_by_example([params, indices]):
        if indices.is_total:
            return not_linear(op, [params, indices], view)
        return params.with_marks_of(indices)
    if Kind.ONE_EXAMPLE in (params.kind, indices.kind):
        return by_example(op, [params, indices], view)
    return _gathered(op, params, indices, view)


def _gathered(op: tf.Operation, params: State, indices: State, view: View):
    """Rows along a dimension, of a table or of examples, by indices along another dimension.

    Args:
      op: the operation.
      params: the state of what rows are taken of.
      indices: the state of their indices; one of both has entries of single examples.
      view: `View`.
    """
    axis = _axis_of_gather(op, view)
    rank_of_indices = view.rank(op.inputs[1])
    if axis is None or rank_of_indices is None:
        return unknown(op, NO_STATIC_ARGUMENT)
    batch_dims = op.get_attr('batch_dims') if 'batch_dims' in op.node_def.attr else 0
    if batch_dims:
        is_of_same = params.kind is Kind.PER_EXAMPLE and params.layout == indices.layout
        if is_of_same and params.axis < batch_dims <= axis:
            return params._replace(is_constant=False).with_marks_of(indices)
        return unknown(op, _BY_PLACES)
    if params.kind is Kind.INDEPENDENT:
        return indices._replace(axis=axis + indices.axis).with_marks_of(params)
    if indices.kind is Kind.INDEPENDENT and axis != params.axis:
        moved = rank_of_indices - 1 if axis < params.axis else 0
        return params._replace(axis=params.axis + moved).with_marks_of(indices)
    return unknown(op, _BY_PLACES)


def _axis_of_gather(op: tf.Operation, view: View) -> typing.Optional[int]:
    """The dimension along which a gather takes rows; None where it is not static."""
    if op.type != 'GatherV2':  # along the first one; `ResourceGather` has a variable's handle
        return 0 if op.type == 'ResourceGather' or view.rank(op.inputs[0]) is not None else None
    axis = view.value(op.inputs[2])
    rank = view.rank(op.inputs[0])
    if axis is None or rank is None:
        return None
    return int(axis) % rank


def gather_nd(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.gather_nd(x [n, 4], tf.stack([tf.range(n), y], 1))`: [n], the entry y of each example."""
    params = as_number(op, states[0], view)
    indices = states[1]
    if indices.kind is Kind.POSITION:
        shape = view.shape(op.inputs[1])
        if shape is None or shape[-1] != 1:
            return unknown(op, _BY_PLACES)
        return rows_at_positions(op, params, indices._replace(axis=0), view)
    if indices.kind is Kind.INDICES:
        if params.layout != ROW_OF_EACH_EXAMPLE:
            return unknown(op, _BY_PLACES)
        return values_at(indices).with_marks_of(params, indices)
    if params.kind is Kind.INDEPENDENT and indices.is_by_example:
        rank = view.rank(op.inputs[1])
        if rank is None:
            return unknown(op, NO_STATIC_RANK)
        if indices.kind is not Kind.ONE_EXAMPLE and indices.axis == rank - 1:
            return unknown(op, 'takes entries by places of several examples')
        return indices._replace(is_constant=False).with_marks_of(params)
    if not any_by_example([params, indices]):
        return not_linear(op, [params, indices], view)
    return unknown(op, _BY_PLACES)


def rows_at_positions(op: tf.Operation, params: State, positions: State, view: View) -> State:
    """The rows of examples at positions that are their own: all of them, or those of a mask.

    Args:
      op: the operation that gathers them.
      params: the state of what rows are taken of, [n, …].
      positions: the state of the positions, [n] or [n, 1].
      view: `View`.
    """
    axis = view.value(op.inputs[2]) if op.type == 'GatherV2' else 0
    own_rows = per_example(0, positions.outer, positions.inner)
    is_own = axis == 0 and params.layout == own_rows.layout
    rank = 2 if op.type.endswith('GatherNd') else 1
    if not is_own or positions.axis != 0 or view.rank(op.inputs[1]) != rank:
        return unknown(op, _BY_PLACES)
    if positions.selection == EVERY_EXAMPLE:
        return params.with_marks_of(positions)
    return rows(0, positions.selection).with_marks_of(params, positions)


def values_at(indices: State) -> State:
    """The state of values [rows, …], one at each of some index vectors [rows, k]."""
    if indices.selection == EVERY_EXAMPLE:
        return per_example(0)
    return rows(0, indices.selection)


def one_hot(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.one_hot(x [n], 10)`: [n, 10], each row of its example."""
    indices = states[0]
    arguments = states[1:]
    if indices.is_total:
        return not_linear(op, [indices], view)
    if not indices.is_by_example or indices.kind is Kind.ONE_EXAMPLE:
        return indices.with_marks_of(*arguments)
    rank = view.rank(op.outputs[0])
    if rank is None:
        return unknown(op, NO_STATIC_RANK)
    place = op.get_attr('axis') % rank
    is_before = place <= indices.axis
    found = indices._replace(axis=indices.axis + is_before, is_constant=False)
    return found.with_marks_of(*arguments)


def table_lookup(op: tf.Operation, states: _States, view: View) -> State:
    """`table.lookup(x [n, 4])`: each entry's value, by a table that is filled before the first step
    and never after, so that it is the same on every tower."""
    table = graph_walk.source_through(op.inputs[0], ('Identity', 'Enter', 'Switch')).op
    if table.type not in ('HashTable', 'HashTableV2'):
        return unknown(op, 'looks up a table to which a step may write')
    return elementwise(op, states, view)


def candidate_sampler(op: tf.Operation, states: _States, view: View) -> typing.List[State]:
    """Sampled classes, as of `tf.nn.sampled_softmax_loss`: drawn whatever the examples [n, 1] are.

    Returns:
      The states of the sampled classes, of the expected counts of each example's own classes, and
      of those of the sampled ones.
    """
    drawn = INDEPENDENT._replace(is_random=True)
    return [drawn, states[0]._replace(is_random=True), drawn]
