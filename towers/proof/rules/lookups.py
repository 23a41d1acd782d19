"""Rules for embeddings of sparse tensors: `tf.nn.embedding_lookup_sparse`, in feature columns.

The rows of a sparse tensor [n, …] are looked up in a table, each different one once, and the rows
of each example are added up. TensorFlow adds them up into as many rows as the last example that has
any; these are n where each example was given a row (`SparseFillEmptyRows`), and only then.
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
    per_example,
    rows,
    sizes_state,
    unknown,
)
from towers.proof.view import View

_States = typing.Sequence[State]

_EACH_EXAMPLE = Size(0, 1)  # the size n
_SAME = ('Identity', 'Cast')
_NOT_OF_EXAMPLES = 'has a shape that is not known to be of the examples'
_GATHERS = ('Gather', 'GatherV2', 'ResourceGather')


def sparse_reshape(op: tf.Operation, states: _States, view: View) -> typing.List[State]:
    """`tf.sparse.reshape`: index vectors (e, 2, 3) become (e, 13), and the example's position e
    stays, where the shape before and after has n first and constants behind it."""
    indices, shape = states[:2]
    if indices.kind is not Kind.INDICES:
        return [not_linear(op, states, view)] * 2
    before = sizes_in(op.inputs[1], shape, view)
    after = sizes_in(op.inputs[2], states[2], view)
    if before is None or after is None or indices.selection == EVERY_EXAMPLE:
        return [unknown(op, _NOT_OF_EXAMPLES)] * 2
    after = _with_rest(before, after)
    if not _has_examples_first(before) or not _has_examples_first(after):
        return [unknown(op, _NOT_OF_EXAMPLES)] * 2
    if product_of_all(before) != product_of_all(after):
        return [unknown(op, 'has another number of entries for each example')] * 2
    return [indices, sizes_state(after)]


def _with_rest(before: Sizes, after: Sizes) -> Sizes:
    """The shape after a reshape, with the number of entries that are left in the place of a -1."""
    others = [size for size in after if size != Size(-1)]
    total, known = product_of_all(before), product_of_all(others)
    if len(others) != len(after) - 1 or total is None or known is None:
        return after
    rest = quotient(total, known)
    if rest is None:
        return after
    return tuple(rest if size == Size(-1) else size for size in after)


def _has_examples_first(sizes: typing.Optional[Sizes]) -> bool:
    """Whether a shape is (n, 3, …), of lengths that are all known."""
    if not sizes or sizes[0] != _EACH_EXAMPLE:
        return False
    return not any(size.per_example or size.constant < 0 for size in sizes[1:])


def fill_empty_rows(op: tf.Operation, states: _States, view: View) -> typing.List[State]:
    """`tf.sparse.fill_empty_rows`: the rows of a sparse tensor [n, …], and one row for each example
    that has none; whether it has none, [n]."""
    indices, values, shape, default = states
    is_of_examples = is_sparse(indices, values) and default.is_alike_on_towers and (
        _has_examples_first(sizes_in(op.inputs[2], shape, view)))
    if not is_of_examples:
        return [unknown(op, 'fills rows that are not known to be of the examples')] * 4
    return [State(Kind.INDICES, selection=op.name), rows(0, op.name), per_example(0),
            unknown(op, 'tells the rows of the shard')]


def segment_rows(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.sparse.segment_sum(table[different], which, positions)`: [n, 4], the sum or mean of the
    rows that the values of each example have in a table that all towers share.

    `different` and `which` are the results of `tf.unique(values)`, so that `different[which]` are
    the values: which numbers the shard gives them is of no account. Or the values themselves are
    looked up: `tf.sparse.segment_sum(table, values, positions)`.
    """
    table_rows, which, positions = op.inputs
    unique = graph_walk.source_through(which, _SAME)
    gather = graph_walk.source_through(table_rows, ('Identity',)).op
    table, values, segments = states
    if _is_lookup_of(unique, gather, view):
        table, values = view.state(gather.inputs[0]), view.state(unique.op.inputs[0])
    elif table.kind is not Kind.INDEPENDENT or values.kind is not Kind.ROWS:
        return _first_unknown(states) or _sums_of_others(op, states, view)
    if segments.kind is Kind.UNKNOWN:
        return segments
    is_of_same_rows = segments.kind is Kind.POSITION and (
        values.layout == rows(0, segments.selection).layout)
    is_of_each = is_of_same_rows and _has_row_of_each(segments.selection, view)
    if not is_of_each or table.kind is not Kind.INDEPENDENT:
        return unknown(op, 'adds up rows that not each example is known to have')
    return per_example(0).with_marks_of(table, values, segments)


def _is_lookup_of(which: tf.Tensor, gather: tf.Operation, view: View) -> bool:
    """Whether an operation looks up the different values that `which` numbers, in a table that the
    forward pass has not written before."""
    is_number = which.op.type == 'Unique' and which.value_index == 1
    is_lookup = gather.type in _GATHERS and gather.name not in view.reads_of_written
    if not is_number or not is_lookup or not _takes_first_dimension(gather, view):
        return False
    return graph_walk.source_through(gather.inputs[1], _SAME).name == which.op.outputs[0].name


def _sums_of_others(op: tf.Operation, states: _States, view: View) -> State:
    """The state of a sum by segments that are not of the examples."""
    if any(state.is_by_example or state.is_position for state in states):
        return unknown(op, 'adds up rows by their numbers')
    return not_linear(op, states, view)


def _first_unknown(states: _States) -> typing.Optional[State]:
    """The first state of which nothing is known; None where all are known."""
    for state in states:
        if state.kind is Kind.UNKNOWN:
            return state
    return None


def _takes_first_dimension(gather: tf.Operation, view: View) -> bool:
    """Whether entries along the first dimension are gathered."""
    if gather.type != 'GatherV2':
        return True
    axis = view.value(gather.inputs[2])
    return axis is not None and int(axis) == 0 and not gather.get_attr('batch_dims')


def _has_row_of_each(selection: str, view: View) -> bool:
    """Whether a selection has at least one row of each example."""
    return view.has_operation(selection) and (
        view.graph.get_operation_by_name(selection).type == 'SparseFillEmptyRows')


# ---- rows of rows --------------------------------------------------------------------------------

def rows_of_rows(op: tf.Operation, params: State, positions: State, view: View) -> State:
    """`tf.gather(rows, tf.where(keep [rows]))`: those of the rows that a mask of them keeps.

    Args:
      op: the operation that gathers along the first dimension.
      params: the state of the rows, or of the index vectors of a sparse tensor.
      positions: of the kind ROW_POSITION.
      view: `View`.
    """
    mask = view.graph.get_operation_by_name(positions.selection).inputs[0]
    is_of_mask = params.selection == view.state(mask).selection and params.axis == 0
    rank = view.rank(op.inputs[1])
    if not is_of_mask or rank != 1 or not _takes_first_dimension(op, view):
        return unknown(op, 'takes rows by their places')
    if params.kind is Kind.INDICES:
        return State(Kind.INDICES, selection=positions.selection).with_marks_of(params, positions)
    if params.kind is not Kind.ROWS:
        return unknown(op, 'takes rows by their places')
    return rows(0, positions.selection).with_marks_of(params, positions)
