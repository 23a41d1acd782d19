"""Rules for kernels on images: the first dimension has the images, and so the examples.

Each of the `outer` x n x `inner` entries along the first dimension is an image. An example may have
several images, such as the frames of a video. A kernel treats each image by itself, by weights that
all towers share.

Where no input has entries of single examples, `not_linear` gives the state of the result: the same
on every tower, or marked with the means and sums that it is computed from. A rule below
`for_examples` is not asked about such inputs.

A result has `is_constant=False` where the rule does not follow whether the entries are the same for
each example; this is always sound (`State.is_constant`).
"""

import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers.proof.rules.common import (
    GOES_ALONG_EXAMPLES,
    Results,
    any_by_example,
    has_examples_first,
    is_set,
    is_shared_or_at,
    kinds_of,
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
    """The state of the result of a kernel on images, by the state of the images:

        a mean or a sum over the examples     unknown: there is no rule for it
        the same on every tower               the same on every tower
        of one example                        of this example
        of the batch, along dimension 0       of the batch, along dimension 0
        of the batch, elsewhere               unknown: an image would be of several examples

    Args:
      op: the operation.
      state: the state of the images.
      weights: the states of the other inputs.
      view: `View`.
    """
    if not kinds_of(weights) <= {Kind.INDEPENDENT}:
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
    height and width, the dimensions -3 and -2. In [n, 8, 3] dimension -3 has the examples: the mean
    would be over the examples."""
    has_dimension_of_examples = view.rank(op.inputs[0]) == 4
    if has_examples_first(states[0]) and not has_dimension_of_examples:
        return unknown(op, _NO_IMAGES)
    return images(op, states, view)


def bias_add(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.nn.bias_add(x [n, 8, 8, 3], b [3])`: b has a number for each channel. The channels are
    along the last dimension, or along dimension 1."""
    has_channels_last = op.get_attr('data_format') != b'NCHW'
    if has_channels_last:  # the bias broadcasts, as in a sum
        return elementwise(op, states, view)
    return images(op, states, view)


def images_of_shape(op: tf.Operation, states: _States, view: View) -> State:
    """The gradient of a convolution, a transposed convolution, or the gradient of a mean pooling:
    images of a given shape, such as (n, 8, 8, 3). Only the first number of the shape may depend on
    n."""
    if not has_examples_at(0, op.inputs[0], view):
        return unknown(op, 'has a shape that is another one for another number of examples')
    shape, *weights, gradient = states  # a pooling has no weights
    # The n in the shape is the number of images. The values of the result do not depend on it.
    shape_without_examples = INDEPENDENT.with_marks_of(shape)
    return _of_images(op, gradient, [shape_without_examples, *weights], view)


@for_examples
def gradient_of_maxima(op: tf.Operation, states: _States, view: View) -> State:
    """The gradient of `tf.nn.max_pool`, of x [n, 8, 8, 3], the maxima [n, 4, 4, 3] and their
    gradient: each image by itself."""
    state, *others = states[:3]
    arguments = states[3:]  # of MaxPoolGradV2: the lengths and the steps of the windows
    if not kinds_of(arguments) <= {Kind.INDEPENDENT}:
        return unknown(op, _OWN_PARAMETERS)
    have_same_images = all(other.layout == state.layout for other in others)
    if not has_examples_first(state) or not have_same_images:
        return unknown(op, _NO_IMAGES)
    return state._replace(is_constant=False).with_marks_of(*states)


def largest_places(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.nn.max_pool_with_argmax`: the maxima, and their places within each image.

    With `include_batch_in_index=True` the places count through all images of the shard: refused.
    """
    if is_set(op, 'include_batch_in_index'):
        return unknown(op, 'numbers the entries of all examples')
    return images(op, states, view)


# ---- blocks of images ----------------------------------------------------------------------------

@for_examples
def space_to_batch(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.space_to_batch_nd`: [n, 8, 8, 3] in 4 blocks is [4 n, 4, 4, 3].

    The first blocks of all images come first, then the second blocks of all images: 4 rounds.
    """
    state = states[0]
    blocks = _blocks_of_each_image(op, view)
    if not has_examples_first(state):
        return unknown(op, _NO_IMAGES)
    # The operation may pad images of ones with zeros: `is_constant=False`, which is always sound.
    return state._replace(outer=state.outer * blocks, is_constant=False).with_marks_of(*states)


@for_examples
def batch_to_space(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.batch_to_space_nd`: [4 n, 4, 4, 3], 4 blocks of each image, is [n, 8, 8, 3] again.

    The operation takes the first n entries for the first blocks of all images, the next n entries
    for the second blocks, and so on. So the blocks of an image have to be in different rounds: 4
    rounds of blocks are 1 round of images, 8 rounds of blocks are 2 rounds of images.
    """
    state = states[0]
    blocks = _blocks_of_each_image(op, view)
    if not has_examples_first(state):
        return unknown(op, _NO_IMAGES)
    rounds, rest = divmod(state.outer, blocks)
    if rest:  # such as 4 rounds, where an image has 8 blocks
        return unknown(op, 'joins blocks of several examples')
    return state._replace(outer=rounds, is_constant=False).with_marks_of(*states)


def _blocks_of_each_image(op: tf.Operation, view: View) -> int:
    """The number of blocks of an image, by the second input: (2, 2) makes 4 blocks."""
    block_shape = static_value(op.inputs[1], op, view)
    return int(np.prod(block_shape))


# ---- batch norm ----------------------------------------------------------------------------------

@for_examples
def fused_batch_norm(op: tf.Operation, states: _States, view: View) -> Results:
    """Batch norm in one kernel, of x [n, 8, 8, 3]: each channel by a mean and a variance.

        at inference                      the mean and the variance are parameters
        in training mode                  the mean and the variance are over all images of the shard
        in training mode, where the       the mean and the variance are of one example each: Keras
        channels are the examples,        computes a layer norm in this way, by a reshape
        [1, n, 64, 1] in NCHW

    Returns:
      The states of the normalized images, the mean, the variance and, if the kernel has these
      results, the values that it keeps for its gradient.
    """
    state = states[0]
    if state.kind is not Kind.PER_EXAMPLE:
        return unknown(op, _NO_IMAGES)
    parameters = states[1:]
    if not op.get_attr('is_training'):
        return _normalized_by_parameters(op, state, parameters)
    scale_and_offset = parameters[:2]  # the other two, mean and variance, are for inference
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

    The mean is a mean over the examples. The variance is not linear: the states of the variance and
    of the normalized images are marked with this batch norm. The results from the fourth on, which
    the kernel keeps for its gradient, are computed from the mean and the variance.
    """
    if not kinds_of(scale_and_offset) <= {Kind.INDEPENDENT}:
        return unknown(op, _OWN_PARAMETERS)
    view.note(op.name, op, 'normalizes by the mean and the variance of the shard')
    mean = total(Kind.MEAN, op).with_marks_of(state)
    variance = mean.with_shard_statistics([op.name])
    normalized = state._replace(is_constant=False).with_shard_statistics([op.name])
    normalized = normalized.with_marks_of(*scale_and_offset)
    kept_for_gradient = [variance] * (len(op.outputs) - 3)
    return [normalized, mean, variance, *kept_for_gradient]


def _with_statistics(op: tf.Operation, normalized: State, statistic: State) -> typing.List[State]:
    """The states of all results: of the normalized images, then one state for each statistic."""
    statistics = len(op.outputs) - 1
    return [normalized] + [statistic] * statistics


def _is_alike_for_examples(parameter: State, channels: State) -> bool:
    """Whether a scale or an offset, a vector with a number for each channel, is the same on every
    tower and for each example.

    The vector may be ones [n], as Keras makes them for a layer norm of n examples. A vector [3 n]
    must have the layout of the channels. Let it be (1, 2, 3, 1, 2, 3, …), the same three numbers
    for each example. If the channels are three rounds of the examples, example 0 gets the number 1
    for its first channel, but example 1 gets the number 2.

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

    A sequence goes along the dimension `seq_dim`, here 1. Each entry along the dimension
    `batch_dim`, here 0, is a sequence. The examples have to be along `batch_dim`.
    """
    state, lengths = states
    # TensorFlow refuses a `seq_dim` that equals `batch_dim`. So no sequence goes along the examples
    # if the examples are along `batch_dim`.
    are_along_batch_dim = state.axis == op.get_attr('batch_dim')
    if state.kind is not Kind.PER_EXAMPLE or not are_along_batch_dim:
        return unknown(op, GOES_ALONG_EXAMPLES)
    length_of_each_sequence = vector_along_examples(state)
    if not is_shared_or_at(lengths, length_of_each_sequence.layout):
        return unknown(op, GOES_ALONG_EXAMPLES)
    return state._replace(is_constant=False).with_marks_of(lengths)
