"""Rules for operations that put entries elsewhere: where the examples go.

The entries of a tensor are in row-major order, and an example is found in it by its stride, the
number of entries from one example to the next. In the scratch graph (`scratch`) the number of
examples is a prime that divides no other length, so that exactly one dimension has the examples.
"""

import numpy as np

from towers.proof.arithmetic import by_example, elementwise, estimate, joined_totals
from towers.proof.sizes import arranged, used
from towers.proof.states import INDEPENDENT, Kind, State, per_example, rows, unknown

_NOT_STATIC = 'has an argument that is not static'


def _moves(rule):
    """A rule about the first input's entries, for examples along a dimension; all other states are
    handed on: a mean of moved entries is the moved mean."""
    def guarded(op, states, view):
        state = states[0]
        is_number = op.inputs[0].dtype.is_integer and state.kind is Kind.INDEPENDENT
        if state.kind is Kind.SIZES or is_number:
            sizes = arranged(op, states, view)
            if sizes is not None:
                return sizes
            state = used(op, state, view)
        marks = INDEPENDENT.marked(states[1:])
        if any(other.is_by_example or other.is_total for other in states[1:]):
            return unknown(op, 'moves entries to places that are computed from the examples')
        if state.kind is Kind.NUMBER:
            return _moved_numbers(op, state, view)
        if not state.is_by_example or state.kind is Kind.ONE_EXAMPLE:
            return state.marked([marks])
        return _each_marked(rule(op, state, view), marks)
    guarded.__doc__ = rule.__doc__
    return guarded


def _each_marked(found, marks):
    if isinstance(found, list):
        return [state.marked([marks]) for state in found]
    return found.marked([marks])


def _moved_numbers(op, state, view):
    """Numbers of examples stay numbers where a dimension of length 1 is added or dropped."""
    if op.type in ('ExpandDims', 'Reshape', 'Squeeze', 'Identity'):
        shape = view.shape(op.outputs[0])
        if shape is not None and shape.count(1) == len(shape) - 1:
            axis = next((place for place, length in enumerate(shape) if length != 1), 0)
            return state._replace(axis=axis)
    return unknown(op, 'computes with the numbers of the examples')


# ---- the same entries in another shape -----------------------------------------------------------

@_moves
def reshape(op, state, view):
    """`tf.reshape`: the example's stride is the same before and after."""
    if state.kind is Kind.ROWS:
        return _reshaped_rows(op, state, view)
    before, after = view.shape(op.inputs[0]), view.shape(op.outputs[0])
    if before is None or after is None or None in before or None in after:
        return _reshaped_behind(op, state, before, after)
    stride = state.inner * int(np.prod(before[state.axis + 1:], dtype=np.int64))
    found = []
    for axis, length in enumerate(after):
        behind = int(np.prod(after[axis + 1:], dtype=np.int64))
        if not behind or stride % behind or not stride:
            continue
        inner = stride // behind
        if length and length % (view.examples * inner) == 0:
            found.append(per_example(
                axis, length // (view.examples * inner), inner, state.is_constant))
    if len(found) != 1:
        return unknown(op, 'spreads an example over several dimensions')
    return found[0]


def _reshaped_behind(op, state, before, after):
    """A reshape of dimensions some of which are not static: right where all dimensions up to that
    of the examples keep their lengths."""
    upto = state.axis + 1
    is_static = before is not None and after is not None
    if is_static and None not in before[:upto] and before[:upto] == after[:upto]:
        return state
    return unknown(op, 'has a shape that is not static')


def _reshaped_rows(op, state, view):
    """A reshape of rows: right where all but the rows' dimension keep their lengths."""
    before, after = view.shape(op.inputs[0]), view.shape(op.outputs[0])
    if before is not None and after is not None and state.axis == 0:
        if after and after[0] is None and None not in after[1:] and None not in before[1:]:
            if np.prod(after[1:], dtype=np.int64) == np.prod(before[1:], dtype=np.int64):
                return state
    return unknown(op, 'has a shape that is not static')


@_moves
def expand_dims(op, state, view):
    """`tf.expand_dims`: a dimension more."""
    place, rank = view.value(op.inputs[1]), view.rank(op.inputs[0])
    if place is None or rank is None:
        return unknown(op, _NOT_STATIC)
    place = int(np.ravel(place)[0]) % (rank + 1)
    return state._replace(axis=state.axis + (place <= state.axis))


@_moves
def squeeze(op, state, view):
    """`tf.squeeze`: fewer dimensions; those to drop have to be named, as a shard may have one
    example."""
    rank = view.rank(op.inputs[0])
    if rank is None:
        return unknown(op, 'has a rank that is not static')
    dropped = [axis % rank for axis in op.get_attr('squeeze_dims')]
    if not dropped:
        return unknown(op, 'drops every dimension of length 1, and so that of a single example: '
                           'pass axis=')
    if state.axis in dropped:
        return unknown(op, "drops the examples' dimension")
    return state._replace(axis=state.axis - sum(axis < state.axis for axis in dropped))


@_moves
def transpose(op, state, view):
    """`tf.transpose`: the dimensions in another order."""
    order = view.value(op.inputs[1])
    if order is None:
        return unknown(op, _NOT_STATIC)
    return state._replace(axis=[int(axis) for axis in order].index(state.axis))


# ---- parts of a dimension ------------------------------------------------------------------------

@_moves
def pad(op, state, view):
    """`tf.pad`: of other dimensions than the examples'."""
    widths = view.value(op.inputs[1])
    if widths is None:
        return unknown(op, _NOT_STATIC)
    if widths[state.axis].any():
        return unknown(op, 'pads the examples')
    return state._replace(is_constant=False)


def tile(op, states, view):
    """`tf.tile`: of other dimensions than the examples', or of what is the same for all examples."""
    state, multiples = states[0], states[1]
    if state.is_by_example or multiples.kind is not Kind.SIZES:
        return _tile_examples(op, states, view)
    if state.kind is not Kind.INDEPENDENT:
        return unknown(op, 'repeats %s' % state.kind.value)
    shape = view.shape(op.inputs[0])
    axes = [axis for axis, size in enumerate(multiples.sizes) if size.per_example]
    if not axes:
        return state
    if len(axes) > 1 or shape is None or shape[axes[0]] != 1 or multiples.sizes[axes[0]].constant:
        return unknown(op, 'repeats several entries as often as there are examples')
    return per_example(axes[0], inner=multiples.sizes[axes[0]].per_example,
                       is_constant=True).marked(states)


@_moves
def _tile_examples(op, state, view):
    multiples = view.value(op.inputs[1])
    if multiples is None:
        return unknown(op, _NOT_STATIC)
    times = int(multiples[state.axis])
    if times != 1 and state.kind is not Kind.PER_EXAMPLE:
        return unknown(op, 'repeats rows of which examples have different numbers')
    return state._replace(outer=state.outer * times)


@_moves
def strided_slice(op, state, view):
    """`x[:, 1]`, `x[..., None]`: all of the examples, and a part of the other dimensions."""
    spec = [view.value(tensor) for tensor in list(op.inputs)[1:]]
    rank = view.rank(op.inputs[0])
    if rank is None:
        return unknown(op, 'has a rank that is not static')
    length = np.size(spec[0]) if spec[0] is not None else view.shape(op.inputs[1])[0]
    if length is None:
        return unknown(op, _NOT_STATIC)
    masks = {name: op.get_attr(name + '_mask') for name in (
        'begin', 'end', 'ellipsis', 'new_axis', 'shrink_axis')}
    new_axes = bin(masks['new_axis'] & ((1 << length) - 1)).count('1')
    has_ellipsis = bool(masks['ellipsis'])
    dimension, result = 0, 0
    for place in range(length):
        bit = 1 << place
        if masks['ellipsis'] & bit:
            skipped = rank - (length - new_axes - has_ellipsis)
            if dimension <= state.axis < dimension + skipped:
                return state._replace(axis=result + state.axis - dimension)
            dimension += skipped
            result += skipped
        elif masks['new_axis'] & bit:
            result += 1
        elif dimension == state.axis:
            is_whole = masks['begin'] & bit and masks['end'] & bit and not masks['shrink_axis'] & bit
            if not is_whole and not _takes_all(spec, place, masks, bit, state, view, op):
                return unknown(op, 'takes some of the examples')
            if spec[2] is None or int(spec[2][place]) != 1:
                return unknown(op, 'takes some of the examples, or changes their order')
            return state._replace(axis=result)
        else:
            dimension += 1
            result += 0 if masks['shrink_axis'] & bit else 1
    return state._replace(axis=result + state.axis - dimension)


def _takes_all(spec, place, masks, bit, state, view, op):
    """Whether a slice of the examples' dimension begins at 0 and is as long as that dimension."""
    if masks['shrink_axis'] & bit:
        return False
    begins = masks['begin'] & bit or spec[0] is not None and int(spec[0][place]) == 0
    ends = masks['end'] & bit or spec[1] is not None and int(spec[1][place]) >= 2 ** 31 - 1
    return bool(begins and ends)


@_moves
def slice_(op, state, view):
    """`tf.slice`: all of the examples."""
    begin, size = view.value(op.inputs[1]), view.value(op.inputs[2])
    if begin is None or size is None:
        return unknown(op, _NOT_STATIC)
    if int(begin[state.axis]) != 0 or int(size[state.axis]) != -1:
        return unknown(op, 'takes some of the examples')
    return state


@_moves
def in_order(op, state, view):
    """`tf.reverse`, `tf.roll`, `tf.cumsum`: along other dimensions than the examples'."""
    axes = view.value(op.inputs[2 if op.type == 'Roll' else 1])
    rank = view.rank(op.inputs[0])
    if axes is None or rank is None:
        return unknown(op, _NOT_STATIC)
    if state.axis in [int(axis) % rank for axis in np.ravel(axes)]:
        return unknown(op, 'goes along the examples')
    return state._replace(is_constant=False)


@_moves
def band(op, state, view):
    """`tf.matrix_band_part`: of the last two dimensions."""
    if state.axis >= view.rank(op.inputs[0]) - 2:
        return unknown(op, 'goes along the examples')
    return state._replace(is_constant=False)


# ---- apart and together --------------------------------------------------------------------------

@_moves
def unpack(op, state, view):
    """`tf.unstack`: of another dimension than the examples'."""
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
        return unknown(op, _NOT_STATIC)
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
        return unknown(op, _NOT_STATIC)
    place = int(place) % rank
    layouts = {(state.kind, state.axis, state.inner, state.rows_of)
               for state in parts if state.is_by_example}
    if len(layouts) > 1:
        return unknown(op, 'brings examples together with each other')
    kind, axis, _, _ = layouts.pop()
    first = next(state for state in parts if state.is_by_example)
    if kind is not Kind.ONE_EXAMPLE and place == axis:
        if kind is Kind.PER_EXAMPLE and all(state.is_by_example for state in parts):
            return first._replace(outer=sum(state.outer for state in parts),
                                  is_constant=False).marked(parts)
        return unknown(op, 'joins the examples with rows of others')
    return _beside(op, parts, tensors, axis, view)


def pack(op, states, view):
    """`tf.stack`: a dimension more."""
    sizes = arranged(op, states, view) if any(s.kind is Kind.SIZES for s in states) else None
    if sizes is not None:
        return sizes
    parts = [used(op, state, view) for state in states]
    if parts[0].kind is Kind.NUMBER:
        return places(op, parts)
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


def places(op, parts):
    """`tf.stack([tf.range(n), column, …], 1)`: a place for each example, its own number first."""
    number, columns = parts[0], parts[1:]
    is_of_each = (number.outer, number.inner, number.rows_of) == (1, 1, '')
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


# ---- rows by their places ------------------------------------------------------------------------

def gather(op, states, view):
    """`tf.gather`: rows of a table that all towers share, or places within each example."""
    params, indices = states[0], states[1]
    if params.kind is Kind.SIZES:
        sizes = arranged(op, states, view)
        if sizes is not None:
            return sizes
    params, indices = used(op, params, view), used(op, indices, view)
    if indices.kind is Kind.NUMBER:
        return numbered_rows(op, params, indices, view)
    marks = INDEPENDENT.marked([params, indices])
    if not params.is_by_example and not indices.is_by_example:
        return estimate(op, [params, indices], view) if indices.is_total else params.marked([marks])
    if Kind.ONE_EXAMPLE in (params.kind, indices.kind):
        return by_example(op, [params, indices], view)
    place = view.value(op.inputs[2]) if op.type == 'GatherV2' else 0
    batch_dims = op.get_attr('batch_dims') if 'batch_dims' in op.node_def.attr else 0
    ranks = view.rank(op.inputs[0]), view.rank(op.inputs[1])
    if place is None or ranks[1] is None or op.type != 'ResourceGather' and ranks[0] is None:
        return unknown(op, _NOT_STATIC)
    place = int(place) % (ranks[0] or 1)
    if batch_dims:
        is_inside = params.kind is Kind.PER_EXAMPLE and params[:4] == indices[:4] and (
            params.axis < batch_dims <= place)
        if is_inside:
            return params._replace(is_constant=False).marked([marks])
        return unknown(op, 'takes examples by their places')
    if params.kind is Kind.INDEPENDENT:
        return indices._replace(axis=place + indices.axis).marked([marks])
    if indices.kind is Kind.INDEPENDENT and place != params.axis:
        moved = ranks[1] - 1 if place < params.axis else 0
        return params._replace(axis=params.axis + moved).marked([marks])
    return unknown(op, 'takes examples by their places')


def numbered_rows(op, params, numbers, view):
    """The rows of examples at numbers that are their own: all of them, or those of a mask."""
    place = view.value(op.inputs[2]) if op.type == 'GatherV2' else 0
    is_own = params.kind is Kind.PER_EXAMPLE and params.axis == 0 == place and (
        (params.outer, params.inner) == (numbers.outer, numbers.inner))
    if not is_own or numbers.axis != 0 or view.rank(op.inputs[1]) != 1:
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


# ---- kernels whose first dimension is that of the examples ---------------------------------------

def bias_add(op, states, view):
    """`tf.nn.bias_add`: a vector for the channels, which are the last dimension, or the second."""
    is_last = op.get_attr('data_format') != b'NCHW'
    return elementwise(op, states, view) if is_last else images(0)(op, states, view)


def space_to_batch(op, states, view):
    """`tf.space_to_batch_nd`: blocks of each image, all images after each other for each block."""
    return _rounds(op, states, view, lambda outer, blocks: outer * blocks)


def batch_to_space(op, states, view):
    """`tf.batch_to_space_nd`: the blocks of each image together again."""
    return _rounds(op, states, view, lambda outer, blocks: outer // blocks if (
        outer % blocks == 0) else None)


def _rounds(op, states, view, change):
    state, blocks = states[0], view.value(op.inputs[1])
    if not state.is_by_example:
        return estimate(op, [used(op, each, view) for each in states], view)
    if state.kind is not Kind.PER_EXAMPLE or state.axis != 0 or blocks is None:
        return unknown(op, 'has images that are not the examples')
    outer = change(state.outer, int(np.prod(blocks)))
    if outer is None:
        return unknown(op, 'joins blocks of several examples')
    return state._replace(outer=outer, is_constant=False).marked(states)


def images(position):
    """A rule for kernels that take images [n, …] at an input `position`: convolutions, pooling."""
    def rule(op, states, view):
        """Each image by itself, where the examples are the first dimension."""
        state = states[position]
        others = [each for place, each in enumerate(states) if place != position]
        if not any(each.is_by_example or each.is_total for each in states):
            return estimate(op, [used(op, each, view) for each in states], view)
        if any(each.is_by_example or each.is_total for each in others):
            return unknown(op, 'has weights that are computed from the examples')
        if state.kind is Kind.ONE_EXAMPLE:
            return state.marked(others)
        if state.kind is not Kind.PER_EXAMPLE or state.axis != 0:
            return unknown(op, 'has images that are not the examples')
        return State(Kind.PER_EXAMPLE, 0, state.outer, state.inner).marked(states)
    return rule


def fused_batch_norm(op, states, view):
    """Batch norm in one kernel: in training mode by the mean and the variance of each channel."""
    state = states[0]
    channel = op.get_attr('data_format').decode().find('C')
    results = len(op.outputs)
    if not state.is_by_example:
        return estimate(op, [used(op, each, view) for each in states], view)
    if state.kind is not Kind.PER_EXAMPLE:
        return unknown(op, 'has images that are not the examples')
    parameters = states[1:]
    scaled = [each for each in parameters[:2] if each.kind is not Kind.INDEPENDENT]
    by_channel = all(each.kind is Kind.PER_EXAMPLE and each.is_constant for each in scaled)
    if not op.get_attr('is_training'):
        if any(each.is_by_example for each in parameters):
            return unknown(op, 'has parameters that are computed from the examples')
        return [state.marked(parameters)] + [INDEPENDENT.marked(parameters)] * (results - 1)
    if state.axis == channel:
        if not by_channel:
            return unknown(op, 'has parameters that are computed from the examples')
        return [state] + [per_example(0, state.outer, state.inner).marked([state])] * (results - 1)
    if scaled:
        return unknown(op, 'has parameters that are computed from the examples')
    view.note(op.name, op, 'normalizes by the mean and the variance of the shard')
    mark = frozenset([op.name])
    mean = State(Kind.MEAN, statistics=mark).marked([state])
    variance = mean._replace(estimated=mean.estimated | mark)
    normalized = state._replace(estimated=state.estimated | mark, is_constant=False)
    normalized = normalized.marked(parameters[:2])
    return [normalized, mean, variance] + [variance] * (results - 3)


def reverse_sequence(op, states, view):
    """`tf.reverse_sequence`: along another dimension than the examples', by lengths of theirs."""
    state, lengths = states[0], used(op, states[1], view)
    if not state.is_by_example and not lengths.is_by_example:
        return estimate(op, [used(op, each, view) for each in states], view)
    batch, sequence = op.get_attr('batch_dim'), op.get_attr('seq_dim')
    is_by_example = state.kind is Kind.PER_EXAMPLE and batch == state.axis != sequence
    is_own = lengths.kind is Kind.INDEPENDENT or lengths[:4] == (
        Kind.PER_EXAMPLE, 0, state.outer, state.inner)
    if not is_by_example or not is_own:
        return unknown(op, 'goes along the examples')
    return state._replace(is_constant=False).marked([lengths])
