"""Rules for products of matrices, as products of tensors whose dimensions have letters; and for
linear equations.

`tf.matmul(x, w)` is `ij,jk->ik`: the product is summed over `j`, a letter that is not in the
result. The examples' dimension has a letter, too: here `i`, of x [n, 4].
"""

import typing

import tensorflow.compat.v1 as tf

from towers.proof.rules.common import (
    COUPLES_EXAMPLES,
    any_by_example,
    any_of_kind,
    has_examples_last,
    has_one_entry_along,
    is_of_batch,
    required,
    state_of_layout,
    static_rank,
)
from towers.proof.rules.entries import by_example, multiply
from towers.proof.rules.totals import not_linear, total
from towers.proof.states import HAS_OWN_SIZE, Kind, Layout, State, unknown
from towers.proof.view import View

_States = typing.Sequence[State]

_LETTERS = 'abcdefgh'  # for the dimensions of a `tf.matmul` before the last two


class _Equation(typing.NamedTuple):
    """The equation of a product, such as `ij,jk->ik`."""
    factors: typing.List[str]  # the letters of each factor, one letter for each dimension
    result: str  # the letters of the result


# ---- operations ----------------------------------------------------------------------------------

def matmul(op: tf.Operation, states: _States, view: View) -> State:
    """Products of matrices: x [n, 4] times w [4, 3] is [n, 3], a row for each example.

    x [n, 4], transposed, times y [n, 3] is a sum over the examples: of each example's row of x
    times its row of y.
    """
    if not any_by_example(states):  # linear in each factor, as a product of numbers is
        return multiply(op, states, view)
    if any_of_kind(states, Kind.ONE_EXAMPLE):  # all dimensions are of the one example
        return by_example(op, states, view)
    left_rank = static_rank(op.inputs[0], op, view)
    right_rank = static_rank(op.inputs[1], op, view)
    return _product(op, states, _equation_of_matmul(op, left_rank, right_rank), view)


def _equation_of_matmul(op: tf.Operation, left_rank: int, right_rank: int) -> _Equation:
    """The equation of a product of matrices: `ij,jk->ik`; of a transposed left factor `ji,jk->ik`.

    Tensors [8, 2, 3] and [8, 3, 4] hold 8 matrices each; the dimension of length 8 gets a letter of
    its own: `aij,ajk->aik`. The dimensions before the last two are aligned from the right, as
    broadcasting does it: [5, 8, 2, 3] and [8, 3, 4] have `abij,bjk->abik`.

    Args:
      op: `MatMul`, or one of the kinds of `BatchMatMul`.
      left_rank: the number of dimensions of the first factor.
      right_rank: the number of dimensions of the second factor.
    """
    if op.type == 'MatMul':
        left_is_transposed = op.get_attr('transpose_a')
        right_is_transposed = op.get_attr('transpose_b')
    else:
        left_is_transposed = op.get_attr('adj_x')
        right_is_transposed = op.get_attr('adj_y')
    left = 'ji' if left_is_transposed else 'ij'
    right = 'kj' if right_is_transposed else 'jk'
    batch = _LETTERS[:max(left_rank, right_rank) - 2]
    batch_of_left = _last_letters(batch, left_rank - 2)
    batch_of_right = _last_letters(batch, right_rank - 2)
    return _Equation([batch_of_left + left, batch_of_right + right], batch + 'ik')


def _last_letters(text: str, count: int) -> str:
    """The last `count` letters of a text; none for 0."""
    return text[len(text) - count:]


def einsum(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.einsum`: `bi,ij->bj` has a row for each example b; `bi,bj->ij` is a sum over examples."""
    if not any_by_example(states):
        is_product_of_two = len(states) == 2
        if is_product_of_two:  # linear in each factor, as a product of numbers is
            return multiply(op, states, view)
        return not_linear(op, states, view)
    if any_of_kind(states, Kind.ONE_EXAMPLE):  # all letters are of the one example
        return by_example(op, states, view)
    text = op.get_attr('equation').decode().replace(' ', '')
    if '.' in text:
        return unknown(op, 'has an equation with an ellipsis')
    terms, result = text.split('->')
    return _product(op, states, _Equation(terms.split(','), result), view)


def cross(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.linalg.cross(x [n, 3], y [n, 3])`: a vector of each example, along the last dimension.

    The entries of the result are differences of products, `x[e, 1] * y[e, 2] - x[e, 2] * y[e, 1]`.
    So the result is linear in x and in y, as a product of numbers is: where neither has examples,
    `multiply` gives its state.
    """
    for tensor, state in zip(op.inputs, states):
        # In x [4, n] a vector along the last dimension has an entry of each example.
        if has_examples_last(state, static_rank(tensor, op, view)):
            return unknown(op, COUPLES_EXAMPLES)
    return multiply(op, states, view)


def solution(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.linalg.solve(a, b)`, `tf.linalg.triangular_solve(a, b)`: the matrix x for which a x = b.

        a [n, 4, 4], b [n, 4, 3]    x [n, 4, 3]: the equations of each example by themselves
        a [4, 4], b [4, n]          x [4, n]: each column of x is computed from that column of b
        a [4, 4], b a mean          x is a mean: it is linear in b
    """
    matrix, right_side = states
    if not any_by_example(states):
        is_shared_matrix = matrix.kind is Kind.INDEPENDENT
        return right_side if is_shared_matrix else not_linear(op, states, view)
    rank = static_rank(op.outputs[0], op, view)
    if has_examples_last(right_side, static_rank(op.inputs[1], op, view)):
        return _solution_by_column(op, matrix, right_side, rank)
    solutions = by_example(op, states, view)
    are_within_equations = is_of_batch(solutions) and solutions.axis >= rank - 2
    return unknown(op, COUPLES_EXAMPLES) if are_within_equations else solutions


def _solution_by_column(op: tf.Operation, matrix: State, right_side: State, rank: int) -> State:
    """The solution where the columns of the right side belong to the examples.

    Args:
      op: the operation.
      matrix: the state of the matrix, which has to be the same for all columns.
      right_side: the state of the right side, with the examples along its last dimension.
      rank: the number of dimensions of the solution.
    """
    if matrix.kind is not Kind.INDEPENDENT:
        return unknown(op, COUPLES_EXAMPLES)
    return right_side._replace(axis=rank - 1, is_constant=False).with_marks_of(matrix)


# ---- by letters ----------------------------------------------------------------------------------

def _product(op: tf.Operation, factors: _States, equation: _Equation, view: View) -> State:
    """The product of tensors whose dimensions have letters; at least one factor is of the batch.

    The examples' dimension has one letter. If the result has this letter, as in `bi,ij->bj`, the
    examples of the result are along the letter's dimension. If the result lacks the letter, as in
    `bi,bj->ij`, it is a sum over the examples. A factor without examples may have the letter only
    for a dimension of length 1, which broadcasts; then the result has to have the letter.

    Args:
      op: the operation.
      factors: the states of the factors.
      equation: `_Equation`.
      view: `View`.
    """
    if any_of_kind(factors, Kind.MEAN, Kind.SUM, Kind.SHARE):
        return unknown(op, 'multiplies examples with a value of all of them')
    letter, layout = required(
        _examples_of(factors, equation), op, 'multiplies examples with each other')
    if _is_diagonal(letter, equation):
        return unknown(op, COUPLES_EXAMPLES)
    shared = _shared_along(op, factors, equation, letter)
    if not all(has_one_entry_along(factor.axis, factor.tensor, view) for factor in shared):
        return unknown(op, HAS_OWN_SIZE)
    if letter in equation.result:
        axis = equation.result.index(letter)
        return state_of_layout(layout._replace(axis=axis)).with_marks_of(*factors)
    if shared:  # TensorFlow broadcasts no dimension that is summed over
        return unknown(op, 'adds up over the examples')
    return total(Kind.SUM, op).with_marks_of(*factors)


def _is_diagonal(letter: str, equation: _Equation) -> bool:
    """Whether a factor or the result has the letter of the examples twice, as in `bb->b`: it is a
    matrix of examples by examples, and the product takes or makes its diagonal."""
    return any(letters.count(letter) > 1 for letters in [*equation.factors, equation.result])


class _Examples(typing.NamedTuple):
    """Where the examples are in all factors that have them."""
    letter: str  # the letter of the examples' dimension
    layout: Layout  # its axis is always 0, since the letter tells the dimension in each factor


def _examples_of(factors: _States, equation: _Equation) -> typing.Optional[_Examples]:
    """Where the examples are in the factors.

    Returns:
      `_Examples`; None where two factors have the examples along different letters, or in different
      layouts, so that the product would multiply different examples.
    """
    found = set()
    for state, letters in zip(factors, equation.factors):
        if state.is_by_example:
            layout_without_axis = state.layout._replace(axis=0)
            found.add(_Examples(letters[state.axis], layout_without_axis))
    return found.pop() if len(found) == 1 else None


class _SharedFactor(typing.NamedTuple):
    """A factor without examples that has the letter of the examples."""
    tensor: tf.Tensor
    axis: int  # the dimension with that letter


def _shared_along(op: tf.Operation, factors: _States, equation: _Equation,
                  letter: str) -> typing.List[_SharedFactor]:
    """The factors without examples that have the letter of the examples.

    Args:
      op: the operation.
      factors: the states of the factors.
      equation: `_Equation`.
      letter: the letter of the examples' dimension.
    """
    shared = []
    for tensor, state, letters in zip(op.inputs, factors, equation.factors):
        if letter in letters and not state.is_by_example:
            shared.append(_SharedFactor(tensor, letters.index(letter)))
    return shared
