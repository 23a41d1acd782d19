"""Rules for rows: masks, sparse tensors, and places that are told by the numbers of examples."""

from towers.graph import graph_walk
from towers.proof import layout
from towers.proof.arithmetic import elementwise, estimate
from towers.proof.places import numbered_rows
from towers.proof.sizes import sizes_in, used
from towers.proof.states import INDEPENDENT, Kind, Size, State, per_example, rows, unknown


def where(op, states, view):
    """`tf.where(mask)`: the places that a mask leaves, of each example in turn."""
    mask = states[0]
    if not mask.is_by_example:
        return estimate(op, [used(op, mask, view)], view)
    if mask.kind is Kind.PER_EXAMPLE and mask.axis == 0 and view.rank(op.inputs[0]) == 1:
        return State(Kind.NUMBER, 0, mask.outer, mask.inner, op.name).marked(states)
    if mask.kind is Kind.PER_EXAMPLE and mask[:4] == (Kind.PER_EXAMPLE, 0, 1, 1):
        return State(Kind.PLACES, rows_of=op.name).marked(states)
    return unknown(op, 'finds places in more than one dimension')


def column_of_places(op, states, view):
    """`indices[:, 0]`: the number of the example of each row; or None for another slice."""
    spec = [view.value(tensor) for tensor in list(op.inputs)[1:]]
    if any(value is None or len(value) != 2 for value in spec):
        return unknown(op, 'computes with the numbers of the examples')
    is_column = op.get_attr('begin_mask') & 1 and op.get_attr('end_mask') & 1 and (
        op.get_attr('shrink_axis_mask') == 2 and int(spec[2][0]) == 1) and (
            not op.get_attr('begin_mask') & 2 and int(spec[0][1]) >= 0)
    if not is_column:
        return unknown(op, 'computes with the numbers of the examples')
    state = states[0]
    if int(spec[0][1]) == 0:
        return state._replace(kind=Kind.NUMBER)
    return per_example(0).marked([state]) if not state.rows_of else (
        rows(0, state.rows_of).marked([state]))


def gather_nd(op, states, view):
    """`tf.gather_nd`: an entry of each example at a place within it."""
    params, indices = used(op, states[0], view), states[1]
    if indices.kind is Kind.NUMBER:
        shape = view.shape(op.inputs[1])
        if shape is None or shape[-1] != 1:
            return unknown(op, 'takes examples by their places')
        return numbered_rows(op, params, indices._replace(axis=0), view)
    if indices.kind is Kind.PLACES:
        if params[:4] != (Kind.PER_EXAMPLE, 0, 1, 1):
            return unknown(op, 'takes examples by their places')
        found = rows(0, indices.rows_of) if indices.rows_of else per_example(0)
        return found.marked([params, indices])
    rank = view.rank(op.inputs[1])
    if params.kind is Kind.INDEPENDENT and indices.is_by_example:
        if rank is None or indices.kind is Kind.PER_EXAMPLE and indices.axis == rank - 1:
            return unknown(op, 'takes entries by places of several examples')
        return indices._replace(is_constant=False).marked([params])
    if not params.is_by_example and not indices.is_by_example:
        return estimate(op, [params, indices], view)
    return unknown(op, 'takes examples by their places')


def looked_up(op, states, view):
    """`table.lookup`: of a table that is filled before the first step, and never after."""
    table = graph_walk.behind(op.inputs[0], ('Identity', 'Enter', 'Switch')).op
    if table.type not in ('HashTable', 'HashTableV2'):
        return unknown(op, 'looks up a table to which a step may write')
    return elementwise(op, states, view)


def scatter_nd(op, states, view):
    """`tf.scatter_nd`: rows of the examples back to their places, and zeros for those left out."""
    numbers, values, shape = states
    sizes, lengths = sizes_in(op.inputs[2], shape, view), view.shape(op.inputs[0])
    if not any(state.is_by_example or state.kind in (Kind.NUMBER, Kind.PLACES)
               for state in states):
        return estimate(op, states, view)
    is_back = numbers.kind is Kind.NUMBER and values.kind is Kind.ROWS and values.axis == 0 and (
        numbers.rows_of == values.rows_of) and lengths is not None and lengths[-1] == 1
    if not is_back or not sizes or sizes[0] != Size(0, numbers.outer * numbers.inner) or any(
            size.per_example for size in sizes[1:]):
        return unknown(op, 'adds up rows by their places')
    return per_example(0, numbers.outer, numbers.inner).marked(states)


def _is_sparse(indices, values):
    """Whether these are the indices and the values of a sparse tensor [n, …]."""
    return indices.kind is Kind.PLACES and indices.rows_of and values.kind is Kind.ROWS and (
        values.axis == 0 and values.rows_of == indices.rows_of)


def sparse_product(op, states, view):
    """`tf.sparse.sparse_dense_matmul`: of a row for each example and a matrix that all share."""
    indices, values, shape, matrix = states
    if not any(state.kind in (Kind.PLACES, Kind.ROWS) for state in states[:2]):
        return estimate(op, [used(op, state, view) for state in states], view)
    sizes = sizes_in(op.inputs[2], shape, view)
    if not _is_sparse(indices, values) or matrix.kind is not Kind.INDEPENDENT or sizes is None or (
            sizes[0] != Size(0, 1)) or op.get_attr('adjoint_a'):
        return unknown(op, 'multiplies a sparse tensor that is not known to be of the examples')
    return per_example(0).marked(states)


def sparse_to_dense(op, states, view):
    """`tf.sparse.to_dense`: a row for each example."""
    indices, shape, values, default = states
    sizes = sizes_in(op.inputs[1], shape, view)
    if not _is_sparse(indices, values) or default.kind is not Kind.INDEPENDENT or sizes is None or (
            sizes[0] != Size(0, 1)):
        return unknown(op, 'fills in values at places that are not known to be of the examples')
    return per_example(0).marked(states)


def sums_by_number(op, states, view):
    """`tf.math.unsorted_segment_sum` by the numbers of the examples: the rows of each example."""
    values, numbers, count = states
    sizes = sizes_in(op.inputs[2], count, view)
    if not any(state.is_by_example for state in states) and numbers.kind is not Kind.NUMBER:
        return estimate(op, states, view)
    is_of_examples = values.kind is Kind.ROWS and numbers.kind is Kind.NUMBER and (
        values.rows_of == numbers.rows_of) and sizes == (Size(0, 1),) and values.axis == 0
    if not is_of_examples:
        return unknown(op, 'adds up rows by their numbers')
    return per_example(0).marked(states)


def sampled(op, states, view):
    """Sampled classes, the expected counts of each example's own classes, and of the sampled."""
    drawn = INDEPENDENT._replace(is_random=True)
    return [drawn, states[0]._replace(is_random=True), drawn]


def ctc_loss(op, states, view):
    """`tf.nn.ctc_loss`: a loss for each example, of its sequence [time, n, classes] and labels."""
    inputs, indices, values, lengths = states
    if inputs[:4] != (Kind.PER_EXAMPLE, 1, 1, 1) or not _is_sparse(indices, values):
        return unknown(op, 'has sequences or labels that are not known to be of the examples')
    if lengths.is_total or lengths.kind is Kind.PER_EXAMPLE and (
            lengths[:4] != (Kind.PER_EXAMPLE, 0, 1, 1)):
        return unknown(op, 'has lengths that are not known to be of the examples')
    return [per_example(0).marked(states), per_example(1).marked(states)]


def strided_slice(op, states, view):
    """`x[:, 1]` of numbers, of places, or of anything else."""
    if states[0].kind is Kind.PLACES:
        return column_of_places(op, states, view)
    if states[0].kind is Kind.NUMBER:
        return unknown(op, 'computes with the numbers of the examples')
    return layout.strided_slice(op, states, view)
