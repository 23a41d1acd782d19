"""Rules for kernels whose first dimension is that of the images, and so of the examples.

An image is one of `outer` x n x `inner` entries along the first dimension: each frame of a video,
say, is an image. A kernel treats each image by itself, by weights that all towers share.

Where no input has entries of single examples, `not_linear` says what the result is: the same on
every tower, or marked with the means and sums that it is computed from. A rule below `for_examples`
is asked about all other inputs alone.
"""

import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers.proof.rules.common import (
    GOES_ALONG_EXAMPLES,
    Results,
    any_by_example,
    has_examples_first,
    is_shared_or_at,
    static_value,
    vector_along_examples,
)
from towers.proof.rules.entries import elementwise
from towers.proof.rules.reshapes import has_examples_at
from towers.proof.rules.totals import for_examples, not_linear, total
from towers.proof.states import (
    INDEPENDENT,
    Kind,
    State,
    per_example,
    unknown,
)
from towers.proof.view import View

_States = typing.Sequence[State]

_NO_IMAGES = 'has images that are not the examples'
_OWN_PARAMETERS = 'has parameters that are computed from the examples'
_OWN_WEIGHTS = 'has weights that are computed from the examples'


# ---- convolutions, pooling -----------------------------------------------------------------------

def images(op: tf.Operation, states: _States, view: View) -> State:
    """A kernel that takes images [n, 8, 8, 3] and weights: each image by itself."""
    return _of_images(op, states[0], states[1:], view)


def _of_images(op: tf.Operation, state: State, weights: _States, view: View) -> State:
    """The result of a kernel on images, by the state of the images:

        a mean or a sum over the examples     refused: there is no rule
        the same on every tower               the same on every tower
        of one example                        of that example
        of the examples, along dimension 0    each image by itself, with the examples there
        of the examples, elsewhere            refused: an image would be of several examples

    Args:
      op: the operation.
      state: of the images.
      weights: the states of its other inputs.
      view: `View`.
    """
    if any(other.is_by_example or other.is_total for other in weights):
        return unknown(op, _OWN_WEIGHTS)
    if state.is_total:
        return unknown(op, _NO_IMAGES)
    if not state.is_by_example:
        return not_linear(op, [state, *weights], view)
    if state.kind is Kind.ONE_EXAMPLE:
        return state.with_marks_of(*weights)
    if not has_examples_first(state):
        return unknown(op, _NO_IMAGES)
    return per_example(0, state.outer, state.inner).with_marks_of(state, *weights)


def adjusted_contrast(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.image.adjust_contrast(x [n, 8, 8, 3], 2.)`: each channel of each image by its mean over
    height and width, the dimensions -3 and -2. Of [n, 8, 3] that would be over the examples."""
    has_dimension_of_examples = view.rank(op.inputs[0]) == 4
    if has_examples_first(states[0]) and not has_dimension_of_examples:
        return unknown(op, _NO_IMAGES)
    return images(op, states, view)


def bias_add(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.nn.bias_add(x [n, 8, 8, 3], b [3])`: a number for each channel, which are the last
    dimension, or the second one."""
    has_channels_last = op.get_attr('data_format') != b'NCHW'
    if has_channels_last:  # so that the bias broadcasts, as in a sum
        return elementwise(op, states, view)
    return images(op, states, view)


def transposed_convolution(op: tf.Operation, states: _States, view: View) -> State:
    """The gradient of a convolution, or a transposed one: images [n, 8, 8, 3] of a given shape,
    whose first number alone may be of the examples."""
    if not has_examples_at(0, op.inputs[0], view):
        return unknown(op, 'has a shape that is another one for another number of examples')
    shape, weights, gradient = states
    # The number n in the shape is that of the images, and no number that a result depends on.
    shape_without_examples = INDEPENDENT.with_marks_of(shape)
    return _of_images(op, gradient, [shape_without_examples, weights], view)


def largest_places(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.nn.max_pool_with_argmax`: maxima and their places within each image."""
    attributes = op.node_def.attr
    if 'include_batch_in_index' in attributes and op.get_attr('include_batch_in_index'):
        return unknown(op, 'numbers the entries of all examples')
    return images(op, states, view)


# ---- blocks of images ----------------------------------------------------------------------------

@for_examples
def space_to_batch(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.space_to_batch_nd`: [n, 8, 8, 3] in 4 blocks is [4 n, 4, 4, 3].

    The first blocks of all images come first, then the second ones of all: 4 rounds.
    """
    state = states[0]
    blocks = _blocks_of_each_image(op, view)
    if not has_examples_first(state):
        return unknown(op, _NO_IMAGES)
    # The operation may put zeros around the images, so that ones are not constant any more.
    return state._replace(outer=state.outer * blocks, is_constant=False).with_marks_of(*states)


@for_examples
def batch_to_space(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.batch_to_space_nd`: [4 n, 4, 4, 3], 4 blocks of each image, is [n, 8, 8, 3] again.

    It takes the first n entries for the first blocks of all images, and so on, so that the 4 blocks
    have to be 4 rounds; 8 rounds are then 2 rounds of images.
    """
    state = states[0]
    blocks = _blocks_of_each_image(op, view)
    if not has_examples_first(state):
        return unknown(op, _NO_IMAGES)
    rounds, rest = divmod(state.outer, blocks)
    if rest:  # 4 rounds, of which it makes images of 8 blocks
        return unknown(op, 'joins blocks of several examples')
    return state._replace(outer=rounds, is_constant=False).with_marks_of(*states)


def _blocks_of_each_image(op: tf.Operation, view: View) -> int:
    """The number of blocks of an image, by the second input: (2, 2) makes 4 of them."""
    block_shape = static_value(op.inputs[1], op, view)
    return int(np.prod(block_shape))


# ---- batch norm ----------------------------------------------------------------------------------

@for_examples
def fused_batch_norm(op: tf.Operation, states: _States, view: View) -> Results:
    """Batch norm in one kernel, of x [n, 8, 8, 3]: each channel by a mean and a variance.

        at inference                       the mean and the variance are parameters
        in training mode                   they are of all images of the shard
        of [1, n, 64, 1], a channel each   they are of single examples: a layer norm by a reshape

    Returns:
      The states of the normalized images, the mean, the variance and, if the kernel gives them,
      what it keeps for its gradient.
    """
    state = states[0]
    if state.kind is not Kind.PER_EXAMPLE:
        return unknown(op, _NO_IMAGES)
    parameters = states[1:]
    if not op.get_attr('is_training'):
        return _normalized_by_parameters(op, state, parameters)
    scale_and_offset = parameters[:2]  # a mean and a variance are no inputs in training mode
    dimensions = op.get_attr('data_format').decode()  # 'NHWC': number, height, width, channels
    if state.axis == dimensions.find('C'):
        return _normalized_by_example(op, state, scale_and_offset)
    return _normalized_by_batch(op, state, scale_and_offset, view)


def _normalized_by_parameters(op: tf.Operation, state: State, parameters: _States) -> Results:
    """The results of a batch norm whose mean and variance are the same on every tower."""
    if any_by_example(parameters):
        return unknown(op, _OWN_PARAMETERS)
    statistic = INDEPENDENT.with_marks_of(*parameters)
    return _with_statistics(op, state.with_marks_of(*parameters), statistic)


def _normalized_by_example(op: tf.Operation, state: State, scale_and_offset: _States) -> Results:
    """The results of a batch norm whose channels are the examples: each by its own statistics."""
    if not all(_is_alike_for_examples(parameter, state) for parameter in scale_and_offset):
        return unknown(op, _OWN_PARAMETERS)
    statistic_of_each_channel = vector_along_examples(state).with_marks_of(state)
    return _with_statistics(op, state, statistic_of_each_channel)


def _normalized_by_batch(op: tf.Operation, state: State, scale_and_offset: _States,
                         view: View) -> Results:
    """The results of a batch norm by the statistics of all images of the shard.

    The mean is one over the examples. The variance is not linear, so that it and the normalized
    images are marked with this batch norm. What the kernel keeps for its gradient, in its results
    from the fourth on, is computed from both.
    """
    if any(parameter.kind is not Kind.INDEPENDENT for parameter in scale_and_offset):
        return unknown(op, _OWN_PARAMETERS)
    view.note(op.name, op, 'normalizes by the mean and the variance of the shard')
    mean = total(Kind.MEAN, op).with_marks_of(state)
    variance = mean.with_shard_statistics([op.name])
    normalized = state._replace(is_constant=False).with_shard_statistics([op.name])
    normalized = normalized.with_marks_of(*scale_and_offset)
    kept_for_gradient = [variance] * (len(op.outputs) - 3)
    return [normalized, mean, variance, *kept_for_gradient]


def _with_statistics(op: tf.Operation, normalized: State, statistic: State) -> typing.List[State]:
    """The states of all results: of the normalized images, and of each statistic the same."""
    statistics = len(op.outputs) - 1
    return [normalized] + [statistic] * statistics


def _is_alike_for_examples(parameter: State, channels: State) -> bool:
    """Whether a scale or an offset, a vector with a number for each channel, is the same on every
    tower and for each example.

    It may be ones [n], as Keras makes them for a layer norm of n examples. A vector [3 n] has to
    have the layout of the channels. Say it is (1, 2, 3, 1, 2, 3, …), the same three numbers for
    each example. If the channels are three rounds of the examples, example 0 gets the 1 of it for
    its first channel, but example 1 gets the 2.

    Args:
      parameter: the state of the scale or the offset.
      channels: the state of the images, with the examples along the channels.
    """
    if parameter.kind is Kind.INDEPENDENT:
        return True
    number_of_each_channel = vector_along_examples(channels)
    return parameter.layout == number_of_each_channel.layout and parameter.is_constant


# ---- sequences -----------------------------------------------------------------------------------

@for_examples
def reverse_sequence(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.reverse_sequence(x [n, time, 4], lengths [n])`: each sequence by its own length.

    A sequence goes along `seq_dim`, the dimension 1 here; the entries along `batch_dim`, 0 here,
    are the sequences, and have to be of the examples.
    """
    state, lengths = states
    # TensorFlow refuses a `seq_dim` that is the `batch_dim`: no sequence goes along the examples
    # where the sequences are theirs.
    are_along_batch_dim = state.axis == op.get_attr('batch_dim')
    if state.kind is not Kind.PER_EXAMPLE or not are_along_batch_dim:
        return unknown(op, GOES_ALONG_EXAMPLES)
    length_of_each_sequence = vector_along_examples(state)
    if not is_shared_or_at(lengths, length_of_each_sequence.layout):
        return unknown(op, GOES_ALONG_EXAMPLES)
    return state._replace(is_constant=False).with_marks_of(lengths)
