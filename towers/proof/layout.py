"""Rules for operations that put entries elsewhere: where the examples go.

The entries of a tensor are in row-major order, and an example is found in it by its stride, the
number of entries from one example to the next. In the scratch graph (`scratch`) the number of
examples is a prime that divides no other length, so that exactly one dimension has the examples.
"""

import numpy as np

from towers.proof.arithmetic import estimate
from towers.proof.sizes import arranged, sizes_in, used
from towers.proof.states import INDEPENDENT, Kind, per_example, unknown

NOT_STATIC = 'has an argument that is not static'
_KEEP_UNIFORM = ('Reshape', 'ExpandDims', 'Squeeze', 'Transpose', 'StridedSlice', 'Slice', 'Tile',
                 'Unpack', 'ReverseV2')


def moves(rule):
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
        others = list(states[1:])
        if not (op.type == 'Reshape' and state.is_by_example):  # whose shape has the examples
            others = [used(op, other, view) for other in others]
        for other in others:
            if other.kind not in (Kind.INDEPENDENT, Kind.SIZES):
                return unknown(op, 'moves entries to places that are computed from the examples')
        marks = INDEPENDENT.marked(others)
        if state.kind is Kind.NUMBER:
            return _moved_numbers(op, state, view)
        if not state.is_by_example or state.kind is Kind.ONE_EXAMPLE:
            is_uniform = state.is_uniform and op.type in _KEEP_UNIFORM
            return state._replace(is_uniform=is_uniform).marked([marks])
        return _each_marked(rule(op, state, view), marks)
    guarded.__doc__ = rule.__doc__
    return guarded


def _computes(rule):
    """A rule as `moves` makes one, for an operation that is not linear in the entries."""
    moved = moves(rule)

    def guarded(op, states, view):
        if states[0].is_by_example:
            return moved(op, states, view)
        return estimate(op, states, view)
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

@moves
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
    if not has_examples_at(found[0].axis, op.inputs[1], view):
        return unknown(op, 'has a shape that is another one for another number of examples')
    return found[0]


def has_examples_at(axis, shape, view):
    """Whether a shape, as far as it is known, has the number of examples in one dimension alone."""
    sizes = sizes_in(shape, view.state(shape), view)
    for place, size in enumerate(sizes or ()):
        if size.per_example and (place != axis or size.constant):
            return False
    return True


def _reshaped_behind(op, state, before, after):
    """A reshape of dimensions some of which are not static: right where all dimensions up to that
    of the examples keep their lengths."""
    upto = state.axis + 1
    is_static = before is not None and after is not None
    if is_static and None not in before[:upto] and before[:upto] == after[:upto]:
        return state
    return unknown(op, 'has a shape that is not static')


def _reshaped_rows(op, state, view):
    """A reshape of rows: right where each keeps its number of entries, and none is beside them."""
    before, after = view.shape(op.inputs[0]), view.shape(op.outputs[0])
    if before is None or after is None or after.count(None) != 1:
        return unknown(op, 'has a shape that is not static')
    axis = after.index(None)
    entries_before, entries_after = before[state.axis + 1:], after[axis + 1:]
    is_alone = set(before[:state.axis] + after[:axis]) <= {1}
    if not is_alone or None in entries_before or (
            np.prod(entries_before, dtype=np.int64) != np.prod(entries_after, dtype=np.int64)):
        return unknown(op, 'has a shape that is not static')
    return state._replace(axis=axis)


@moves
def expand_dims(op, state, view):
    """`tf.expand_dims`: a dimension more."""
    place, rank = view.value(op.inputs[1]), view.rank(op.inputs[0])
    if place is None or rank is None:
        return unknown(op, NOT_STATIC)
    place = int(np.ravel(place)[0]) % (rank + 1)
    return state._replace(axis=state.axis + (place <= state.axis))


@moves
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


@moves
def transpose(op, state, view):
    """`tf.transpose`: the dimensions in another order."""
    order = view.value(op.inputs[1])
    if order is None:
        return unknown(op, NOT_STATIC)
    return state._replace(axis=[int(axis) for axis in order].index(state.axis))


# ---- parts of a dimension ------------------------------------------------------------------------

@moves
def pad(op, state, view):
    """`tf.pad`: of other dimensions than the examples'."""
    widths = view.value(op.inputs[1])
    if widths is None:
        return unknown(op, NOT_STATIC)
    if widths[state.axis].any():
        return unknown(op, 'pads the examples')
    return state._replace(is_constant=False)


def tile(op, states, view):
    """`tf.tile`: of other dimensions than the examples', or of what is the same for all of them."""
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


@moves
def _tile_examples(op, state, view):
    multiples = view.value(op.inputs[1])
    if multiples is None:
        return unknown(op, NOT_STATIC)
    times = int(multiples[state.axis])
    if times != 1 and state.kind is not Kind.PER_EXAMPLE:
        return unknown(op, 'repeats rows of which examples have different numbers')
    return state._replace(outer=state.outer * times)


@moves
def strided_slice(op, state, view):
    """`x[:, 1]`, `x[..., None]`: all of the examples, and a part of the other dimensions."""
    return _sliced(op, state, view.rank(op.inputs[0]), list(op.inputs)[1:], view)


def _sliced(op, state, rank, limits, view):
    """The state of a slice between limits: the tensors of begin, end and strides."""
    spec = [view.value(tensor) for tensor in limits]
    if rank is None:
        return unknown(op, 'has a rank that is not static')
    length = np.size(spec[0]) if spec[0] is not None else view.shape(limits[0])[0]
    if length is None:
        return unknown(op, NOT_STATIC)
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
            has_no_limit = masks['begin'] & bit and masks['end'] & bit
            is_whole = has_no_limit and not masks['shrink_axis'] & bit
            if not is_whole and not _takes_all(spec, place, masks, bit, state, view, op):
                return unknown(op, 'takes some of the examples')
            if spec[2] is None or int(spec[2][place]) != 1:
                return unknown(op, 'takes some of the examples, or changes their order')
            return state._replace(axis=result)
        else:
            dimension += 1
            result += 0 if masks['shrink_axis'] & bit else 1
    return state._replace(axis=result + state.axis - dimension)


def strided_slice_gradient(op, states, view):
    """The gradient of `x[:, 1]`: zeros around it, where the slice took all of the examples."""
    sizes = sizes_in(op.inputs[0], states[0], view)
    gradient = used(op, states[-1], view)
    if sizes is None or any(state.kind not in (Kind.INDEPENDENT, Kind.SIZES)
                            for state in states[1:-1]):
        return unknown(op, NOT_STATIC)
    axes = [axis for axis, size in enumerate(sizes) if size.per_example]
    if not axes and not gradient.is_by_example and not gradient.has_offset:
        return gradient
    if len(axes) != 1 or gradient.kind is not Kind.PER_EXAMPLE or sizes[axes[0]].constant:
        return unknown(op, 'takes some of the examples')
    size = sizes[axes[0]].per_example
    sliced = _sliced(op, gradient._replace(axis=axes[0]), len(sizes), list(op.inputs)[1:4], view)
    if sliced.kind is Kind.UNKNOWN or size != gradient.outer * gradient.inner:
        return unknown(op, 'takes some of the examples')
    if sliced.axis != gradient.axis:
        return unknown(op, 'takes some of the examples')
    return gradient._replace(axis=axes[0], is_constant=False)


def _takes_all(spec, place, masks, bit, state, view, op):
    """Whether a slice of the examples' dimension begins at 0 and is as long as that dimension."""
    if masks['shrink_axis'] & bit:
        return False
    begins = masks['begin'] & bit or spec[0] is not None and int(spec[0][place]) == 0
    ends = masks['end'] & bit or spec[1] is not None and int(spec[1][place]) >= 2 ** 31 - 1
    return bool(begins and ends)


@moves
def slice_(op, state, view):
    """`tf.slice`: all of the examples."""
    begin, size = view.value(op.inputs[1]), view.value(op.inputs[2])
    if begin is None or size is None:
        return unknown(op, NOT_STATIC)
    if int(begin[state.axis]) != 0 or int(size[state.axis]) != -1:
        return unknown(op, 'takes some of the examples')
    return state


def _in_order(op, state, view):
    """Along other dimensions than the examples'."""
    axes = view.value(op.inputs[2 if op.type == 'Roll' else 1])
    rank = view.rank(op.inputs[0])
    if axes is None or rank is None:
        return unknown(op, NOT_STATIC)
    if state.axis in [int(axis) % rank for axis in np.ravel(axes)]:
        return unknown(op, 'goes along the examples')
    return state._replace(is_constant=False)


# `tf.reverse`, `tf.roll`, `tf.cumsum` are linear; `tf.math.cumprod` is not.
in_order, accumulated = moves(_in_order), _computes(_in_order)


def _on_matrices(op, state, view):
    """Of the last two dimensions."""
    if state.axis >= view.rank(op.inputs[0]) - 2:
        return unknown(op, 'goes along the examples')
    return state._replace(is_constant=False)


# `tf.matrix_band_part`, `tf.matrix_diag` are linear; `tf.matrix_inverse` is not.
band, of_matrices = moves(_on_matrices), _computes(_on_matrices)
