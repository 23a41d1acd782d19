"""Rules for numbers computed from shapes: a table of sums and products of the number of examples.

A size is `constant + per_example * n`. What is not of this form (a square of n, a rounded quotient,
a comparison with a number) has no rule here, and a value that depends on it is marked: on a shard
it is another number than on the batch.
"""

import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers.proof.states import INDEPENDENT, Kind, Size, State, per_example, unknown

LEAST_STAND_IN = 13000  # lengths that are not static are primes from here on (`scratch`)
_FEW = 64  # numbers that are followed one by one

_USES = 'uses the number of examples'


def shape_of(op, states, view):
    """`tf.shape`, `tf.size`, `tf.shape_n`: the shape of each input."""
    found = [_shape_state(op, tensor, state, view) for tensor, state in zip(op.inputs, states)]
    return found if len(op.outputs) > 1 else found[0]


def _shape_state(op, tensor, state, view):
    if op.type == 'Rank':
        rank = view.rank(tensor)
        return INDEPENDENT if rank is None else sizes_state([Size(rank)])
    lengths = sizes_of_dimensions(tensor, state, view)
    if lengths is None:
        if state.kind is Kind.ROWS:
            return unknown(op, 'counts rows of which examples have different numbers')
        return unknown(op, 'is a size that is not static')
    if op.type != 'Size':
        return sizes_state(lengths)
    total = _product_of(lengths)
    if total is None:
        return unknown(op, 'multiplies the number of examples with itself')
    return sizes_state([total])


def sizes_of_dimensions(tensor, state: State, view) -> typing.Optional[typing.Tuple[Size, ...]]:
    """The shape of a tensor as `Size`s; None where a dimension is not known."""
    shape = view.shape(tensor)
    if shape is None or None in shape or state.kind in (Kind.UNKNOWN, Kind.ROWS):
        return None
    lengths = [Size(length) for length in shape]
    if state.kind is Kind.PER_EXAMPLE:
        lengths[state.axis] = Size(0, state.outer * state.inner)
    return tuple(lengths)


def sizes_state(sizes) -> State:
    """The state of a tensor of these sizes."""
    return State(Kind.SIZES, sizes=tuple(sizes))


def sizes_in(tensor, state: State, view) -> typing.Optional[typing.Tuple[Size, ...]]:
    """The numbers of a tensor of sizes, or of static integers; else None."""
    if state.kind is Kind.SIZES:
        return state.sizes
    if state.kind is not Kind.INDEPENDENT:
        return None
    value = view.value(tensor)
    if value is None or not np.issubdtype(value.dtype, np.integer):
        return None
    return tuple(Size(int(number)) for number in np.ravel(value))


# ---- arithmetic of sizes -------------------------------------------------------------------------

def plus(one: Size, other: Size) -> Size:
    """The sum of two sizes."""
    return Size(one.constant + other.constant, one.per_example + other.per_example)


def minus(one: Size, other: Size) -> Size:
    """The difference of two sizes."""
    return Size(one.constant - other.constant, one.per_example - other.per_example)


def product(one: Size, other: Size) -> typing.Optional[Size]:
    """The product of two sizes, one of which is constant; else None."""
    if one.per_example and other.per_example:
        return None
    factor, size = (other.constant, one) if one.per_example else (one.constant, other)
    return Size(factor * size.constant, factor * size.per_example)


def quotient(one: Size, other: Size) -> typing.Optional[Size]:
    """The quotient of two sizes where it leaves no remainder whatever n is; else None."""
    if _may_stand_in(one) and _may_stand_in(other):
        return None
    if not other.per_example and other.constant > 0:
        if one.constant % other.constant or one.per_example % other.constant:
            return None
        return Size(one.constant // other.constant, one.per_example // other.constant)
    is_ratio = not one.constant and not other.constant and other.per_example
    if is_ratio and one.per_example % other.per_example == 0:
        return Size(one.per_example // other.per_example)
    return None


def _may_stand_in(size: Size) -> bool:
    """Whether a size may have a length in it that is not static, for which a prime stands in."""
    return max(abs(size.constant), abs(size.per_example)) >= LEAST_STAND_IN


def larger(one: Size, other: Size) -> typing.Optional[Size]:
    """The maximum of two sizes, where it is the same one for every n from 1 on; else None."""
    if _may_stand_in(one) or _may_stand_in(other):
        return None
    difference = minus(one, other)
    if difference.per_example >= 0 and difference.per_example + difference.constant >= 0:
        return one
    if difference.per_example <= 0 and difference.per_example + difference.constant <= 0:
        return other
    return None


_ARITHMETIC = {'Add': plus, 'AddV2': plus, 'Sub': minus, 'Mul': product, 'FloorDiv': quotient,
               'Div': quotient, 'Maximum': larger}


def arithmetic_of_sizes(op, states, view) -> typing.Optional[State]:
    """The sum, product, quotient, … of sizes and static integers; None where there is no rule."""
    function = _ARITHMETIC.get(op.type)
    if function is None or op.outputs[0].dtype not in (tf.int32, tf.int64):
        return None
    one, other = [sizes_in(tensor, state, view) for tensor, state in zip(op.inputs, states)]
    if one is None or other is None or not one or not other:
        return None
    length = max(len(one), len(other))
    if min(len(one), len(other)) not in (1, length):
        return None
    if max(view.rank(tensor) or 0 for tensor in op.inputs) > 1:
        return None
    found = [function(left, right) for left, right in zip(
        one * (length // len(one)), other * (length // len(other)))]
    return None if None in found else sizes_state(found)


def prod_of_sizes(op, states, view) -> typing.Optional[State]:
    """`tf.reduce_prod` of all numbers of a vector of sizes; None where there is no rule."""
    if op.type != 'Prod' or view.rank(op.inputs[0]) != 1 or not states[0].sizes:
        return None
    total = _product_of(states[0].sizes)
    return None if total is None else sizes_state([total])


def _product_of(sizes) -> typing.Optional[Size]:
    """The product of sizes, at most one of which is not constant; else None."""
    total: typing.Optional[Size] = Size(1)
    for size in sizes:
        total = None if total is None else product(total, size)
    return total


# ---- picking and joining sizes -------------------------------------------------------------------

def arranged(op, states, view) -> typing.Optional[State]:
    """Sizes that are picked, joined or put into another shape; None where there is no rule."""
    tensors = list(op.inputs)
    if op.type in ('Pack', 'ConcatV2'):
        parts = tensors[:-1] if op.type == 'ConcatV2' else tensors
        found = []
        for tensor, state in zip(parts, states):
            found.append(sizes_in(tensor, state, view))
        if None in found or max(view.rank(tensor) or 0 for tensor in parts) > 1:
            return None
        if op.type == 'Pack' and any(view.rank(tensor) != 0 for tensor in parts):
            return None
        return sizes_state(size for sizes in found for size in sizes or ())
    sizes = sizes_in(tensors[0], states[0], view)
    if sizes is None or len(sizes) > _FEW:
        return None
    picked = _picked(op, len(sizes), view)
    if picked is None:
        return None
    return sizes_state(sizes[place] for place in picked)


def _picked(op, count, view):
    """The places, among the numbers of the first input, that an operation hands on; or None."""
    places = np.arange(count)
    if op.type in ('Identity', 'Cast', 'Reshape', 'ExpandDims', 'Squeeze', 'StopGradient'):
        return places
    if view.rank(op.inputs[0]) != 1:
        return None
    others = [view.value(tensor) for tensor in list(op.inputs)[1:]]
    if any(value is None for value in others):
        return None
    if op.type == 'StridedSlice':
        begin, end, strides = [int(np.ravel(value)[0]) for value in others]
        if op.get_attr('new_axis_mask') or op.get_attr('ellipsis_mask') or np.size(others[0]) != 1:
            return None
        if op.get_attr('shrink_axis_mask'):
            return places[begin:][:1]
        begin = None if op.get_attr('begin_mask') else begin
        end = None if op.get_attr('end_mask') else end
        return places[begin:end:strides]
    if op.type == 'Slice':
        begin, size = [int(np.ravel(value)[0]) for value in others]
        return places[begin:] if size < 0 else places[begin:begin + size]
    if op.type in ('Gather', 'GatherV2'):
        return np.ravel(places[others[0]])
    return None


# ---- tensors of a shape --------------------------------------------------------------------------

def filled(op, states, view):
    """`tf.fill`, `tf.zeros`: the same value for every example, where a dimension is theirs."""
    value = states[1]
    if value.kind not in (Kind.INDEPENDENT, Kind.SIZES) or value.depends_on_size:
        return unknown(op, 'repeats %s' % value.kind.value)
    return of_shape(op, sizes_in(op.inputs[0], states[0], view), states[0]).marked(states)


def of_shape(op, shape, shape_state: State) -> State:
    """The state of a tensor of a given shape whose values do not depend on the examples."""
    if shape is None:
        if shape_state.kind is Kind.INDEPENDENT:
            return INDEPENDENT._replace(is_uniform=True)
        return unknown(op, 'has a shape that is not known to be of the examples')
    axes = [axis for axis, size in enumerate(shape) if size.per_example]
    if not axes:
        return INDEPENDENT._replace(is_uniform=True)
    if len(axes) > 1 or shape[axes[0]].constant:
        return unknown(op, 'has a shape that is not a multiple of the number of examples')
    return per_example(axes[0], inner=shape[axes[0]].per_example, is_constant=True)


def like(op, states, view):
    """`tf.zeros_like`, `tf.ones_like`: the same value for every example."""
    state = states[0]
    if state.kind is Kind.PER_EXAMPLE:
        return per_example(state.axis, state.outer, state.inner, is_constant=True)
    if state.kind is Kind.ROWS:
        return state
    if state.kind is Kind.UNKNOWN:
        return state
    return INDEPENDENT._replace(is_uniform=True).marked(states)  # whose shape may be of marks


def random(op, states, view):
    """Random numbers of a shape: each example has its own, where a dimension is theirs."""
    shape = sizes_in(op.inputs[0], states[0], view)
    if any(state.kind is not Kind.INDEPENDENT for state in states[1:]):
        return unknown(op, 'draws from a distribution of the examples')
    return of_shape(op, shape, states[0])._replace(
        is_constant=False, is_random=True).marked(states)


def numbered(op, states, view):
    """`tf.range`: numbers the examples, where its length is theirs."""
    if any(state.kind not in (Kind.INDEPENDENT, Kind.SIZES) for state in states):
        return unknown(op, 'has a length that is computed from the examples')
    limits = [sizes_in(tensor, state, view) for tensor, state in zip(op.inputs, states)]
    if not any(state.depends_on_size for state in states):
        return _counted(limits) or INDEPENDENT.marked(states)
    if limits == [(Size(0),), (Size(0, 1),), (Size(1),)]:
        return State(Kind.NUMBER)
    return unknown(op, 'numbers the examples of the shard')


def _counted(limits):
    """The state of the numbers of a short range between static limits; None for any other."""
    if None in limits:
        return None
    numbers = range(*[limit[0].constant for limit in limits])
    return sizes_state(map(Size, numbers)) if len(numbers) <= _FEW else None


def broadcast(op, states, view):
    """`tf.broadcast_to`: a value that is the same for all, repeated for each example."""
    shape = sizes_in(op.inputs[1], states[1], view)
    if shape is None:
        return unknown(op, 'has a shape that is not known to be of the examples')
    value = states[0]
    rank = view.rank(op.inputs[0])
    if value.kind is Kind.PER_EXAMPLE and rank is not None:
        axis = value.axis + len(shape) - rank
        others = [size for place, size in enumerate(shape) if place != axis]
        if any(size.per_example for size in others):
            return unknown(op, 'repeats the examples')
        return value._replace(axis=axis)
    if value.kind is not Kind.INDEPENDENT:
        return unknown(op, 'repeats %s' % value.kind.value)
    state = of_shape(op, shape, states[1])
    if state.kind is Kind.PER_EXAMPLE and rank:
        lengths = view.shape(op.inputs[0])
        place = state.axis - (len(shape) - rank)
        if place >= 0 and (lengths is None or lengths[place] != 1):
            return unknown(op, 'has another size of its own along the examples')
    return state.marked(states)


def used(op, state: State, view) -> State:
    """Sizes that go into a computation of numbers: constant ones are the same on every tower; the
    number of examples marks what depends on it, but for its multiples, which are counts."""
    if state.kind is not Kind.SIZES:
        return state
    if not state.depends_on_size:
        return INDEPENDENT.marked([state])
    if state.is_count:
        return State(Kind.SUM, is_constant=True, statistics=frozenset([op.name])).marked([state])
    view.note(op.name, op, _USES)
    return INDEPENDENT._replace(estimated=state.estimated | {op.name})
