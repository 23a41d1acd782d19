"""Rules for operations that change dimensions, repeat entries, or go along dimensions.

Each rule says where the examples are in the result. A rule below `moves_entries` is asked about
values of the batch alone: `state` is PER_EXAMPLE or ROWS, with the examples along `state.axis`. For
all other values `moves` has the answer. A result has `is_constant=False` where the rule does not
follow whether the entries are the same for each example; this is always sound
(`State.is_constant`).
"""

import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers.proof.rules.common import (
    GOES_ALONG_EXAMPLES,
    OWN_ARGUMENTS,
    Results,
    any_by_example,
    are_shared_arguments,
    are_zeros,
    static_axes,
    static_entry,
    static_rank,
    static_value,
    with_new_dimension,
    without_dimensions,
)
from towers.proof.rules.fills import repeated
from towers.proof.rules.moves import computes_entries, moves_entries
from towers.proof.rules.totals import sum_of_totals
from towers.proof.sizes import as_number
from towers.proof.states import Kind, State, unknown
from towers.proof.view import View

_States = typing.Sequence[State]


# ---- the dimensions ------------------------------------------------------------------------------

@moves_entries
def expand_dims(op: tf.Operation, state: State, view: View) -> State:
    """`tf.expand_dims(x [n, 4], 0)`: [1, n, 4] has the examples along dimension 1."""
    axis = static_value(op.inputs[1], op, view)
    rank = static_rank(op.inputs[0], op, view)
    place = int(np.ravel(axis)[0]) % (rank + 1)  # -1 is the last dimension of the result
    return with_new_dimension(state, place)


@moves_entries
def squeeze(op: tf.Operation, state: State, view: View) -> State:
    """`tf.squeeze(x [1, n, 4], [0])`: [n, 4]. The call has to name the dimensions to drop: else a
    shard of one example would lose the examples' dimension."""
    rank = static_rank(op.inputs[0], op, view)
    dropped = [axis % rank for axis in op.get_attr('squeeze_dims')]
    if not dropped:
        return unknown(op, 'drops every dimension of length 1, and so that of a single example: '
                           'pass axis=')
    if state.axis in dropped:
        return unknown(op, "drops the examples' dimension")
    return without_dimensions(state, dropped)


@moves_entries
def transpose(op: tf.Operation, state: State, view: View) -> State:
    """`tf.transpose(x [n, 3, 4], [1, 0, 2])`: [3, n, 4], with the examples along dimension 1."""
    order = static_value(op.inputs[1], op, view)
    axes_before = [int(axis) for axis in order]  # for each dimension of the result, its old number
    return state._replace(axis=axes_before.index(state.axis))


# ---- more entries --------------------------------------------------------------------------------

@moves_entries
def pad(op: tf.Operation, state: State, view: View) -> State:
    """`tf.pad` along other dimensions than the examples': zeros around means are means of zeros."""
    widths = static_entry(op.inputs[1], state.axis, op, view)  # before and after the examples
    if widths.any():
        return unknown(op, 'pads the examples')
    return state._replace(is_constant=False)


def pad_with(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.pad(x, widths, constant_values=c)`: as `pad`, with c in the place of 0.

    With c around it a mean of f is a mean of f with c around it; a sum gets an offset, unless c
    is 0.
    """
    padded = pad(op, states, view)  # unknown, if c is computed from the examples
    return _beside_padding(op, padded, states, view)


def _beside_padding(op: tf.Operation, entries: State, states: _States, view: View) -> State:
    """The state of a result that has moved entries, and everywhere else the padding, a number.

    Such a result is the sum of two tensors: one has the entries and zeros, the other has the
    padding and zeros.

    Args:
      op: the operation, whose last input is the padding.
      entries: the state of the moved entries, as if the padding were 0.
      states: the states of its inputs.
      view: `View`.
    """
    if not entries.is_total_or_share or are_zeros(op.inputs[-1], view):
        return entries
    padding = states[-1]
    return sum_of_totals(op, [entries, padding], view)


def tile(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.tile`: the entries, repeated as often as the multiples say.

        x [n, 4], multiples (1, 3)    each example has more entries: [n, 12]
        x [n, 4], multiples (2, 1)    two rounds of all examples: [2 n, 4]
        w [1, 4], multiples (n, 1)    the same row for each example: [n, 4]
    """
    value, multiples = states
    may_repeat_for_each = multiples.kind is Kind.SIZES  # n may be among the multiples
    if may_repeat_for_each and not value.is_by_example:
        # Sizes that are tiled, as [n] is, are numbers like any others.
        number = as_number(op, value, view)
        return repeated(op, op.inputs[0], number, multiples.sizes, multiples, view)
    return _tiled(op, states, view)


@moves_entries
def _tiled(op: tf.Operation, state: State, view: View) -> State:
    """`tf.tile(x [n, 4], [2, 3])`: [2 n, 12], with all examples twice, one round after the other.

    `moves_entries` also gives the states of tiled values without examples.
    """
    times = int(static_entry(op.inputs[1], state.axis, op, view))
    if times != 1 and state.kind is not Kind.PER_EXAMPLE:
        return unknown(op, 'repeats rows of which examples have different numbers')
    return state._replace(outer=state.outer * times)


# ---- along dimensions ----------------------------------------------------------------------------

def _along_axes(op: tf.Operation, state: State, view: View) -> State:
    """`tf.reverse`, `tf.roll`, `tf.cumsum`, `tf.math.cumprod`: along another dimension than the
    examples', each example by itself."""
    place_of_axes = 2 if op.type == 'Roll' else 1  # tf.roll(x, shift, axis), tf.cumsum(x, axis)
    rank = static_rank(op.inputs[0], op, view)
    if state.axis in static_axes(op.inputs[place_of_axes], rank, op, view):
        return unknown(op, GOES_ALONG_EXAMPLES)
    return state._replace(is_constant=False)


along_axes = moves_entries(_along_axes)
"""The rule for `tf.reverse`, `tf.roll` and `tf.cumsum`, which are linear."""

cumulative_product = computes_entries(_along_axes)
"""The rule for `tf.math.cumprod`, which is not linear."""


def _on_last(op: tf.Operation, state: State, tensor: tf.Tensor, number: int, view: View) -> State:
    """The state of the results of an operation that treats each vector along the last dimension, or
    each matrix along the last two, by itself. The examples have to be along an earlier dimension.

    Args:
      op: the operation.
      state: the state of its first input, PER_EXAMPLE or ROWS.
      tensor: the first input; or the result, if the operation makes a matrix of each vector. Both
        have the same dimensions before the vectors or matrices.
      number: the number of last dimensions: 1 for vectors, 2 for matrices.
      view: `View`.
    """
    rank = static_rank(tensor, op, view)
    goes_along_examples = state.axis >= rank - number
    if goes_along_examples:
        return unknown(op, GOES_ALONG_EXAMPLES)
    return state._replace(is_constant=False)


@moves_entries
def fourier(op: tf.Operation, state: State, view: View) -> State:
    """`tf.signal.fft(x [n, 4])`, `tf.signal.ifft2d(x [n, 3, 4])`: a linear transform along the last
    dimension, or along the last two or three, of each example by itself.

    `tf.signal.rfft` gets the lengths of the transform as a second input. They change the lengths of
    the last dimensions alone.
    """
    number = _DIMENSIONS_BY_SUFFIX.get(op.type[-2:], 1)
    return _on_last(op, state, op.inputs[0], number, view)


_DIMENSIONS_BY_SUFFIX = {'2D': 2, '3D': 3}
"""How many dimensions a transform goes along, by the end of its type: `FFT2D`, `IRFFT3D`."""


# ---- on matrices ---------------------------------------------------------------------------------

def _on_matrices(op: tf.Operation, state: State, view: View) -> State:
    """`tf.matrix_band_part`, `tf.matrix_diag_part`, `tf.matrix_inverse`: each matrix [3, 3] of
    x [n, 3, 3], along the last two dimensions, by itself."""
    return _on_last(op, state, op.inputs[0], 2, view)


matrix_band = moves_entries(_on_matrices)
"""The rule for `tf.matrix_band_part` and `tf.matrix_diag_part`, which are linear."""

matrix_function = computes_entries(_on_matrices)
"""The rule for `tf.matrix_inverse` and other functions of matrices that are not linear."""


def diagonals_of_matrices(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.linalg.diag_part(x [n, 3, 3])`: [n, 3], the diagonal of each matrix; or [n, 2, 3], where
    MatrixDiagPartV3 gets the numbers of the first and the last of several diagonals.

    Behind the shorter diagonals is a padding. It makes of a sum a sum with an offset, unless it
    is 0.
    """
    diagonals = matrix_band(op, states, view)  # unknown, if the padding is of the examples
    return _beside_padding(op, diagonals, states, view)


def matrix_of_diagonal(op: tf.Operation, states: _States, view: View) -> Results:
    """`tf.linalg.diag(d [n, 3])`: [n, 3, 3], each vector on the diagonal of a matrix of its own.

    Each entry of the result is an entry of d, or the padding around the diagonal. So the result is
    the sum of two matrices: one has the entries of d and zeros, the other has the padding and
    zeros. The matrix of a mean is a mean. The matrix of a sum is a sum without an offset, if the
    padding is 0.
    """
    if any_by_example(states):
        return _matrices_of_diagonals(op, states, view)
    diagonal = states[0]
    # MatrixDiagV2 and V3 have the padding as their last input, MatrixDiag pads with 0.
    has_zeros_around = len(states) == 1 or are_zeros(op.inputs[-1], view)
    terms = [diagonal] if has_zeros_around else [diagonal, states[-1]]
    return sum_of_totals(op, terms, view)


@moves_entries
def _matrices_of_diagonals(op: tf.Operation, state: State, view: View) -> State:
    """The state of matrices [n, 3, 3] with the diagonals d [n, 3]; or with several diagonals each,
    d [n, 2, 3], where MatrixDiagV3 gets the numbers of the first and the last diagonal.

    The matrices are along the last two dimensions of the result. In [n, n], with d [n] on its
    diagonal, the examples would be along both: this is refused.
    """
    return _on_last(op, state, op.outputs[0], 2, view)


def matrix_with_diagonal(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.linalg.set_diag(x [n, 3, 3], d [n, 3])`: each matrix with its own diagonal.

    Where x and d are means over the examples, each entry of the result is an entry of x or of d,
    and so a mean.
    """
    # MatrixSetDiagV2 and V3 have a third input, the number of the diagonal: an argument.
    matrices, diagonals, *arguments = states
    if not are_shared_arguments(arguments):
        return unknown(op, OWN_ARGUMENTS)
    if not any_by_example([matrices, diagonals]):
        return sum_of_totals(op, [matrices, diagonals], view)
    rank = static_rank(op.inputs[0], op, view)
    have_same_examples = matrices.layout == diagonals.layout
    # Examples along one of the last two dimensions, [n, n], are mixed by the diagonal.
    are_matrices_of_one = matrices.axis < rank - 2
    if not have_same_examples or not are_matrices_of_one:
        return unknown(op, 'sets diagonals that are not known to be of the same examples')
    return matrices._replace(is_constant=False).with_marks_of(*states)
