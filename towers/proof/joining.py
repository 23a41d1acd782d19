"""Rules for operations that take tensors apart, or put them together: where the examples go.

Tensors with the examples along one dimension go beside each other along another one; along that of
the examples, all of them come after all of them (`outer` rounds).
"""

from towers.proof.arithmetic import joined_totals
from towers.proof.layout import NOT_STATIC, moves
from towers.proof.sizes import arranged, sizes_state, used
from towers.proof.states import INDEPENDENT, Kind, State, unknown


def unpack(op, states, view):
    """`tf.unstack`: sizes one by one; entries of another dimension than the examples'."""
    if states[0].kind is Kind.SIZES and len(op.outputs) == len(states[0].sizes):
        return [sizes_state([size]) for size in states[0].sizes]
    return _unpack(op, states, view)


@moves
def _unpack(op, state, view):
    rank = view.rank(op.inputs[0])
    if rank is None:
        return unknown(op, 'has a rank that is not static')
    place = op.get_attr('axis') % rank
    if place == state.axis:
        return unknown(op, 'takes the examples apart')
    return state._replace(axis=state.axis - (place < state.axis))


def split(op, states, view):
    """`tf.split`: of another dimension than the examples', or into whole rounds of all examples."""
    is_even = op.type == 'Split'
    place = view.value(op.inputs[0 if is_even else 2])
    tensor, state = op.inputs[1 if is_even else 0], states[1 if is_even else 0]
    if state.kind is Kind.SIZES:
        state = used(op, state, view)
    if not state.is_by_example or state.kind is Kind.ONE_EXAMPLE:
        return state
    rank = view.rank(tensor)
    if place is None or rank is None:
        return unknown(op, NOT_STATIC)
    if int(place) % rank != state.axis:
        return state
    if is_even and state.kind is Kind.PER_EXAMPLE and state.outer % len(op.outputs) == 0:
        return state._replace(outer=state.outer // len(op.outputs))
    return unknown(op, 'takes the examples apart')


def concat(op, states, view):
    """`tf.concat`: along another dimension than the examples', or rounds of all examples."""
    sizes = arranged(op, states, view) if any(s.kind is Kind.SIZES for s in states) else None
    if sizes is not None:
        return sizes
    parts = [used(op, state, view) for state in states[:-1]]
    tensors = list(op.inputs)[:-1]
    if not any(state.is_by_example for state in parts):
        return joined_totals(op, parts, view)
    place, rank = view.value(op.inputs[-1]), view.rank(op.outputs[0])
    if place is None or rank is None:
        return unknown(op, NOT_STATIC)
    by_examples = [state for state in parts if state.is_by_example]
    first = by_examples[0]
    is_along_examples = first.kind is not Kind.ONE_EXAMPLE and int(place) % rank == first.axis
    if not is_along_examples:
        return _beside(op, parts, tensors, first.axis, view)
    layouts = {(state.kind, state.axis, state.inner) for state in by_examples}
    if len(layouts) > 1:
        return unknown(op, 'brings examples together with each other')
    if first.kind is not Kind.PER_EXAMPLE or len(by_examples) < len(parts):
        return unknown(op, 'joins the examples with rows of others')
    rounds = sum(state.outer for state in parts)
    return first._replace(outer=rounds, is_constant=False).marked(parts)


def pack(op, states, view):
    """`tf.stack`: a dimension more."""
    sizes = arranged(op, states, view) if any(s.kind is Kind.SIZES for s in states) else None
    if sizes is not None:
        return sizes
    parts = [used(op, state, view) for state in states]
    if any(state.kind in (Kind.NUMBER, Kind.PLACES) for state in parts):
        return places_of_each(op, parts)
    if not any(state.is_by_example for state in parts):
        return joined_totals(op, parts, view)
    rank = view.rank(op.outputs[0])
    if rank is None:
        return unknown(op, 'has a rank that is not static')
    axis = next(state.axis for state in parts if state.is_by_example)
    beside = _beside(op, parts, list(op.inputs), axis, view)
    if beside.kind in (Kind.UNKNOWN, Kind.ONE_EXAMPLE):
        return beside
    place = op.get_attr('axis') % rank
    return beside._replace(axis=axis + (place <= axis))


def places_of_each(op, parts):
    """`tf.stack([tf.range(n), column, …], 1)`: a place for each example, its own number first."""
    number, columns = parts[0], parts[1:]
    is_of_each = number.kind is Kind.NUMBER and (
        number.outer, number.inner, number.rows_of) == (1, 1, '')
    for column in columns:
        is_of_each = is_of_each and (column.kind is Kind.INDEPENDENT or (
            column.kind is Kind.PER_EXAMPLE and column[:4] == (Kind.PER_EXAMPLE, 0, 1, 1)))
    if op.type != 'Pack' or op.get_attr('axis') not in (1, -1) or not is_of_each:
        return unknown(op, 'computes with the numbers of the examples')
    return State(Kind.PLACES).marked(parts)


def _beside(op, parts, tensors, axis, view):
    """Tensors beside each other, all of them with the examples along the same dimension."""
    marks = INDEPENDENT.marked(parts)
    if any(state.is_total for state in parts):
        return unknown(op, 'puts a value of all examples beside those of each')
    layouts = set()
    for tensor, state in zip(tensors, parts):
        if state.is_by_example:
            layouts.add(state[:5])
        elif not any(part.kind is Kind.ONE_EXAMPLE for part in parts):
            return unknown(op, 'joins the examples with a tensor that has a size of its own there')
    if len(layouts) > 1:
        return unknown(op, 'brings examples together with each other')
    state = next(state for state in parts if state.is_by_example)
    return state._replace(is_constant=False, estimated=frozenset()).marked([marks])
