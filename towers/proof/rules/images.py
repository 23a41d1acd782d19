"""Rules for kernels whose first dimension is that of the images, and so of the examples."""

import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers.proof.rules.entries import elementwise
from towers.proof.rules.layout import has_examples_at
from towers.proof.rules.totals import any_by_example, not_linear, total
from towers.proof.sizes import as_number
from towers.proof.states import INDEPENDENT, Kind, State, per_example, unknown
from towers.proof.view import View

_States = typing.Sequence[State]

_NO_IMAGES = 'has images that are not the examples'
_OWN_PARAMETERS = 'has parameters that are computed from the examples'
_OWN_WEIGHTS = 'has weights that are computed from the examples'
_GOES_ALONG = 'goes along the examples'


# ---- convolutions, pooling -----------------------------------------------------------------------

def images(op: tf.Operation, states: _States, view: View) -> State:
    """A kernel that takes images [n, 8, 8, 3] and weights: each image by itself."""
    return _of_images(op, states[0], states[1:], view)


def _of_images(op: tf.Operation, state: State, others: _States, view: View):
    """The result of a kernel on images.

    Args:
      op: the operation.
      state: of the images.
      others: of its other inputs, such as weights.
      view: `View`.
    """
    is_of_batch = state.is_by_example or state.is_total
    has_own_weights = any(other.is_by_example or other.is_total for other in others)
    if not is_of_batch and not has_own_weights:
        return not_linear(op, [state, *others], view)
    if has_own_weights:
        return unknown(op, _OWN_WEIGHTS)
    if state.kind is Kind.ONE_EXAMPLE:
        return state.with_marks_of(*others)
    if state.kind is not Kind.PER_EXAMPLE or state.axis != 0:
        return unknown(op, _NO_IMAGES)
    if op.type == 'AdjustContrastv2' and view.rank(op.inputs[0]) != 4:
        return unknown(op, _NO_IMAGES)
    return per_example(0, state.outer, state.inner).with_marks_of(state, *others)


def bias_add(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.nn.bias_add(x [n, 8, 8, 3], b [3])`: a number for each channel, which are the last
    dimension, or the second one."""
    has_channels_last = op.get_attr('data_format') != b'NCHW'
    if has_channels_last:
        return elementwise(op, states, view)
    return images(op, states, view)


def transposed_convolution(op: tf.Operation, states: _States, view: View) -> State:
    """The gradient of a convolution: images [n, 8, 8, 3] of a shape that is given, whose first
    number alone is of the examples."""
    if not has_examples_at(0, op.inputs[0], view):
        return unknown(op, 'has a shape that is another one for another number of examples')
    shape, weights, gradient = states
    return _of_images(op, gradient, [INDEPENDENT.with_marks_of(shape), weights], view)


def largest_places(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.nn.max_pool_with_argmax`: maxima and their places within each image."""
    attributes = op.node_def.attr
    if 'include_batch_in_index' in attributes and op.get_attr('include_batch_in_index'):
        return unknown(op, 'numbers the entries of all examples')
    return images(op, states, view)


def space_to_batch(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.space_to_batch_nd`: [n, 8, 8, 3] in 4 blocks is [4 n, 4, 4, 3], all images after each
    other for each block."""
    state = states[0]
    blocks = view.value(op.inputs[1])
    if not state.is_by_example:
        return not_linear(op, states, view)
    if blocks is None or not _are_images(state):
        return unknown(op, _NO_IMAGES)
    outer = state.outer * int(np.prod(blocks))
    return state._replace(outer=outer, is_constant=False).with_marks_of(*states)


def batch_to_space(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.batch_to_space_nd`: the blocks [4 n, 4, 4, 3] of each image together again."""
    state = states[0]
    blocks = view.value(op.inputs[1])
    if not state.is_by_example:
        return not_linear(op, states, view)
    if blocks is None or not _are_images(state):
        return unknown(op, _NO_IMAGES)
    count = int(np.prod(blocks))
    if state.outer % count:
        return unknown(op, 'joins blocks of several examples')
    return state._replace(outer=state.outer // count, is_constant=False).with_marks_of(*states)


def _are_images(state: State) -> bool:
    """Whether the examples are the first dimension."""
    return state.kind is Kind.PER_EXAMPLE and state.axis == 0


# ---- batch norm ----------------------------------------------------------------------------------

def fused_batch_norm(op: tf.Operation, states: _States, view: View) -> typing.Union[
        State, typing.List[State]]:
    """Batch norm in one kernel, of x [n, 8, 8, 3]: each channel by a mean and a variance.

    At inference, these are parameters. In training mode they are of all images of the shard: the
    normalized images are marked with them, and the variance, which is not linear, too. Where the
    channels are the examples (a norm of each example, by a reshape), they are of single ones.
    """
    state = states[0]
    parameters = states[1:]
    if not state.is_by_example:
        return not_linear(op, states, view)
    if state.kind is not Kind.PER_EXAMPLE:
        return unknown(op, _NO_IMAGES)
    if not op.get_attr('is_training'):
        if any_by_example(parameters):
            return unknown(op, _OWN_PARAMETERS)
        normalized = state.with_marks_of(*parameters)
        return _with_statistics(op, normalized, INDEPENDENT.with_marks_of(*parameters))
    scale_and_offset = parameters[:2]
    channel_axis = op.get_attr('data_format').decode().find('C')
    if state.axis == channel_axis:
        if not all(_is_alike_for_examples(each, state) for each in scale_and_offset):
            return unknown(op, _OWN_PARAMETERS)
        of_each = per_example(0, state.outer, state.inner).with_marks_of(state)
        return _with_statistics(op, state, of_each)
    if any(each.kind is not Kind.INDEPENDENT for each in scale_and_offset):
        return unknown(op, _OWN_PARAMETERS)
    view.note(op.name, op, 'normalizes by the mean and the variance of the shard')
    mean = total(Kind.MEAN, op).with_marks_of(state)
    variance = mean.with_shard_statistics([op.name])
    normalized = state._replace(is_constant=False).with_shard_statistics([op.name])
    normalized = normalized.with_marks_of(*scale_and_offset)
    return [normalized, mean] + [variance] * (len(op.outputs) - 2)


def _with_statistics(op: tf.Operation, normalized: State, statistic: State) -> typing.List[State]:
    """The states of all results: the normalized images, and statistics of the same state."""
    return [normalized] + [statistic] * (len(op.outputs) - 1)


def _is_alike_for_examples(parameter: State, channels: State) -> bool:
    """Whether a scale or an offset [channels] is the same on every tower, and for each example.

    Its examples are where those of the channels are: of channels 3 n, all examples three times,
    numbers 3 n of which three neighbours belong to an example are not the same for each.

    Args:
      parameter: the state of the scale or the offset.
      channels: the state of the images, with the examples along the channels.
    """
    own = per_example(0, channels.outer, channels.inner)
    is_same_for_each = parameter.layout == own.layout and parameter.is_constant
    return parameter.kind is Kind.INDEPENDENT or is_same_for_each


# ---- sequences -----------------------------------------------------------------------------------

def reverse_sequence(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.reverse_sequence(x [n, time, 4], lengths [n])`: each sequence by its own length."""
    state = states[0]
    lengths = as_number(op, states[1], view)
    if not any_by_example([state, lengths]):
        return not_linear(op, states, view)
    goes_along_other = op.get_attr('seq_dim') != state.axis == op.get_attr('batch_dim')
    if state.kind is not Kind.PER_EXAMPLE or not goes_along_other:
        return unknown(op, _GOES_ALONG)
    of_each = per_example(0, state.outer, state.inner)
    if lengths.kind is not Kind.INDEPENDENT and lengths.layout != of_each.layout:
        return unknown(op, _GOES_ALONG)
    return state._replace(is_constant=False).with_marks_of(lengths)
