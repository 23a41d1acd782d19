"""Rules for entries at places: tables that all towers share, and the numbers of the examples."""

from towers.proof.arithmetic import by_example, estimate
from towers.proof.layout import NOT_STATIC
from towers.proof.sizes import arranged, used
from towers.proof.states import Kind, rows, unknown


def gather(op, states, view):
    """`tf.gather`: rows of a table that all towers share, or places within each example."""
    params, indices = states[0], states[1]
    if params.kind is Kind.SIZES:
        sizes = arranged(op, states, view)
        if sizes is not None:
            return sizes
    params, indices = used(op, params, view), used(op, indices, view)
    if Kind.PLACES in (params.kind, indices.kind) or params.kind is Kind.NUMBER:
        return unknown(op, 'computes with the numbers of the examples')
    if indices.kind is Kind.NUMBER:
        return numbered_rows(op, params, indices, view)
    if not params.is_by_example and not indices.is_by_example:
        if indices.is_total:
            return estimate(op, [params, indices], view)
        return params.marked([indices])
    if Kind.ONE_EXAMPLE in (params.kind, indices.kind):
        return by_example(op, [params, indices], view)
    return _gathered(op, params, indices, view)


def _gathered(op, params, indices, view):
    """Rows along a dimension, of a table or of examples, by places along another dimension."""
    place = view.value(op.inputs[2]) if op.type == 'GatherV2' else 0
    batch_dims = op.get_attr('batch_dims') if 'batch_dims' in op.node_def.attr else 0
    rank, rank_of_indices = view.rank(op.inputs[0]), view.rank(op.inputs[1])
    if op.type == 'ResourceGather':  # of a handle, along the first dimension of its variable
        rank = 1
    if place is None or rank is None or rank_of_indices is None:
        return unknown(op, NOT_STATIC)
    place = int(place) % rank
    if batch_dims:
        is_inside = params.kind is Kind.PER_EXAMPLE and params[:4] == indices[:4] and (
            params.axis < batch_dims <= place)
        if is_inside:
            return params._replace(is_constant=False).marked([indices])
        return unknown(op, 'takes examples by their places')
    if params.kind is Kind.INDEPENDENT:
        return indices._replace(axis=place + indices.axis).marked([params])
    if indices.kind is Kind.INDEPENDENT and place != params.axis:
        moved = rank_of_indices - 1 if place < params.axis else 0
        return params._replace(axis=params.axis + moved).marked([indices])
    return unknown(op, 'takes examples by their places')


def numbered_rows(op, params, numbers, view):
    """The rows of examples at numbers that are their own: all of them, or those of a mask."""
    place = view.value(op.inputs[2]) if op.type == 'GatherV2' else 0
    is_own = params.kind is Kind.PER_EXAMPLE and params.axis == 0 == place and (
        (params.outer, params.inner) == (numbers.outer, numbers.inner))
    rank = 2 if op.type.endswith('GatherNd') else 1  # [numbers, 1], or [numbers]
    if not is_own or numbers.axis != 0 or view.rank(op.inputs[1]) != rank:
        return unknown(op, 'takes examples by their places')
    if not numbers.rows_of:
        return params.marked([numbers])
    return rows(0, numbers.rows_of).marked([params, numbers])


def one_hot(op, states, view):
    """`tf.one_hot`: a dimension more."""
    indices = states[0]
    if not indices.is_by_example or indices.kind is Kind.ONE_EXAMPLE:
        return estimate(op, [indices], view) if indices.is_total else indices.marked(states[1:])
    rank = view.rank(op.outputs[0])
    if rank is None:
        return unknown(op, 'has a rank that is not static')
    place = op.get_attr('axis') % rank
    return indices._replace(axis=indices.axis + (place <= indices.axis),
                            is_constant=False).marked(states[1:])
