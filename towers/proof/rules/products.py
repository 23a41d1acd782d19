"""Rules for products of matrices, as products of tensors whose dimensions have letters.

`tf.matmul(x, w)` is `ij,jk->ik`. The examples have a letter, too: here `i`, of x [n, 4].
"""

import typing

import tensorflow.compat.v1 as tf

from towers.proof.rules.entries import by_example, multiply
from towers.proof.rules.totals import any_by_example, any_of_kind, not_linear, total
from towers.proof.sizes import as_numbers
from towers.proof.states import HAS_OWN_SIZE, NO_STATIC_RANK, Kind, State, unknown
from towers.proof.view import View

_States = typing.Sequence[State]


def matmul(op: tf.Operation, states: _States, view: View) -> State:
    """Products of matrices: the rows of x [n, 4] times w [4, 3] are [n, 3], each of its example.

    x [n, 4], transposed, times y [n, 3] is a sum over the examples, of the products of their rows.
    """
    factors = as_numbers(op, states[:2], view)
    if not any_by_example(factors):
        return multiply(op, factors, view)
    if any_of_kind(factors, Kind.ONE_EXAMPLE):
        return by_example(op, factors, view)
    left_rank, right_rank = [view.rank(tensor) for tensor in list(op.inputs)[:2]]
    if left_rank is None or right_rank is None:
        return unknown(op, NO_STATIC_RANK)
    if op.type == 'MatMul':
        left_is_transposed = op.get_attr('transpose_a')
        right_is_transposed = op.get_attr('transpose_b')
    else:
        left_is_transposed = op.get_attr('adj_x')
        right_is_transposed = op.get_attr('adj_y')
    batch = 'abcdefgh'[:max(left_rank, right_rank) - 2]
    left = _last_letters(batch, left_rank - 2) + ('ji' if left_is_transposed else 'ij')
    right = _last_letters(batch, right_rank - 2) + ('kj' if right_is_transposed else 'jk')
    return _product(op, factors, [left, right], batch + 'ik', view)


def _last_letters(text: str, count: int) -> str:
    """So many letters from the end of a text; none for 0."""
    return text[len(text) - count:]


def einsum(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.einsum`: `bi,ij->bj` is of each example b; `bi,bj->ij` is a sum over them."""
    factors = as_numbers(op, states, view)
    if not any_by_example(factors):
        if len(factors) == 2:
            return multiply(op, factors, view)
        return not_linear(op, factors, view)
    if any_of_kind(factors, Kind.ONE_EXAMPLE):
        return by_example(op, factors, view)
    equation = op.get_attr('equation').decode().replace(' ', '')
    if '.' in equation:
        return unknown(op, 'has an equation with an ellipsis')
    terms, result = equation.split('->')
    return _product(op, factors, terms.split(','), result, view)


def _product(op: tf.Operation, factors: _States, terms: typing.List[str], result: str, view: View):
    """The product of tensors whose dimensions are letters, summed over those not in the result.

    The examples have a letter. In the result, they are where it is; if it is summed over, and all
    factors have the examples there, the result is a sum of one product for each example.

    Args:
      op: the operation.
      factors: the states of the tensors.
      terms: the letters of each tensor.
      result: the letters of the result.
      view: `View`.
    """
    if any(state.is_total for state in factors):
        return unknown(op, 'multiplies examples with a value of all of them')
    letters = set()
    layouts = set()
    for state, term in zip(factors, terms):
        if state.is_by_example:
            letters.add(term[state.axis])
            layouts.add(state.layout._replace(axis=0))
    if len(letters) > 1 or len(layouts) > 1:
        return unknown(op, 'multiplies examples with each other')
    letter = letters.pop()
    layout = layouts.pop()
    is_of_all_factors = True  # whether all factors with the letter have the examples there
    for tensor, state, term in zip(op.inputs, factors, terms):
        if state.is_by_example or letter not in term:
            continue
        is_of_all_factors = False
        shape = view.shape(tensor)
        if shape is None or shape[term.index(letter)] != 1:
            return unknown(op, HAS_OWN_SIZE)
    if letter in result:
        found = State(*layout._replace(axis=result.index(letter)))
        return found.with_marks_of(*factors)
    if not is_of_all_factors:
        return unknown(op, 'adds up over the examples')
    return total(Kind.SUM, op).with_marks_of(*factors)
