"""Rule for the dimensions over which gradients are summed, since broadcasting repeats a factor."""

import typing

import tensorflow.compat.v1 as tf

from towers.proof.rules.common import Results, required
from towers.proof.sizes import Sizes, sizes_in
from towers.proof.states import Size, State, sizes_state, unknown
from towers.proof.view import View

_States = typing.Sequence[State]


def broadcast_gradient_args(op: tf.Operation, states: _States, view: View) -> Results:
    """The dimensions over which the gradient of each factor of a product is summed: for
    x [n, 4] * w [4], no dimension for x; and dimension 0 for w, which broadcasting repeats along
    this dimension.

    In a batch of one example, the length of x along dimension 0 is 1, and TensorFlow sums the
    gradient of x over dimension 0, too. This changes no number, if the sum keeps its dimensions, or
    is reshaped to the shape of x afterwards. If any other operation takes the dimensions, nothing
    is proven.

    Returns:
      The states of the two vectors of dimensions; or one state for both.
    """
    one, other = [required(sizes_in(*shape, view), op, 'compares shapes that are not known')
                  for shape in zip(op.inputs, states)]
    if not all(map(_goes_to_reshaped_sums, op.outputs)):
        return unknown(op, 'tells dimensions to another operation than the sum of a gradient')
    if one == other:  # then TensorFlow names no dimension, not even one of length 1
        return [sizes_state([]), sizes_state([])]
    rank = max(len(one), len(other))
    one = _with_rank(one, rank)
    other = _with_rank(other, rank)
    if not all(map(_go_together, one, other)):
        return unknown(op, 'compares lengths that are not known to be equal')
    return [_axes_of_one_entry(one), _axes_of_one_entry(other)]


_ONE = Size(1)


def _with_rank(shape: Sizes, rank: int) -> Sizes:
    """A shape of a given rank: with dimensions of length 1 in front, as many as the shape lacks."""
    return (_ONE,) * (rank - len(shape)) + shape


def _go_together(length: Size, other_length: Size) -> bool:
    """Whether two lengths are known to be equal, or one length is 1, so that it broadcasts."""
    return length == other_length or _ONE in (length, other_length)


def _axes_of_one_entry(shape: Sizes) -> State:
    """The dimensions of a factor that have the length 1, as sizes: broadcasting repeats the factor
    along these dimensions."""
    return sizes_state(Size(axis) for axis, length in enumerate(shape) if length == _ONE)


def _goes_to_reshaped_sums(axes: tf.Tensor) -> bool:
    """Whether only sums of the form `_is_reshaped_sum` take a vector of dimensions."""
    return all(map(_is_reshaped_sum, axes.consumers()))


def _is_reshaped_sum(op: tf.Operation) -> bool:
    """Whether an operation is a sum that keeps its dimensions, or that only `Reshape`s take."""
    if op.type != 'Sum':
        return False
    takers = op.outputs[0].consumers()
    return op.get_attr('keep_dims') or all(taker.type == 'Reshape' for taker in takers)
