"""Numbers computed from shapes: sums and products with the number of examples n in them.

A size is `constant + per_example * n`. A result that is not of this form (a square of n, a rounded
quotient, a comparison with a number) is no size. A value that depends on such a result is marked,
since the result is another number on a shard than on the batch.

A length that is not static is the same on every tower, and yet not known. A large prime stands in
for it, and sizes are computed with this prime as with any other number. The prime does not tell
what becomes of the length where a quotient is rounded, or where two numbers are compared.

Words of other modules used here: `LEAST_FROM_STAND_IN`, the least number that may be such a prime,
or be computed from one; of a state of the kind SIZES, `depends_on_size`: n is in one of its sizes,
and `is_count`: all its sizes are multiples of n.
"""

import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers.proof.stand_ins import LEAST_FROM_STAND_IN
from towers.proof.states import INDEPENDENT, Kind, Size, State
from towers.proof.view import View

Sizes = typing.Tuple[Size, ...]

MOST_NUMBERS = 64
"""A tensor with more numbers is taken for no shape: to follow each of them would take long."""

_LEAST_FROM_LARGE_PRIME = 2 ** 30
"""The least number that may be computed from a prime of `View.stand_in`, all of which are larger
than 2 ** 31. Without primes for the lengths of inputs, all smaller numbers are what they are."""

_PerhapsSize = typing.Optional[Size]
"""None where the number is not of the form of a size, so that nothing is known of it."""


# ---- arithmetic ----------------------------------------------------------------------------------

def plus(one: Size, other: Size) -> _PerhapsSize:
    """The sum of two sizes; None where one of them is negative, and the sum may be a difference of
    two lengths that are not static: see `minus`."""
    may_be_difference = min(*one, *other) < 0
    if may_be_difference and _all_may_stand_in(one, other):
        return None
    return Size(one.constant + other.constant, one.per_example + other.per_example)


def minus(one: Size, other: Size) -> _PerhapsSize:
    """The difference of two sizes; None for two lengths that are not static, since one prime may
    stand in for both lengths, and two primes differ by another number than the two lengths."""
    if _all_may_stand_in(one, other):
        return None
    return Size(one.constant - other.constant, one.per_example - other.per_example)


def product(one: Size, other: Size) -> _PerhapsSize:
    """The product of two sizes, as 3 * (4 + 2n) = 12 + 6n; None where neither is constant."""
    if not other.per_example:
        return Size(one.constant * other.constant, one.per_example * other.constant)
    if not one.per_example:
        return Size(one.constant * other.constant, one.constant * other.per_example)
    return None


def quotient(one: Size, other: Size) -> _PerhapsSize:
    """The quotient of two sizes, if there is no remainder whatever n is; else None.

        (4 + 6n) / 2 = 2 + 3n        6n / 2n = 3        n / 2 is rounded for an odd n
    """
    # One prime may stand in for two lengths: the quotient is 1 here, and another number in a run.
    if _all_may_stand_in(one, other):
        return None
    # L / 1 and L n / n are L, whatever the length L is. The prime tells nothing of any other
    # quotient: it is odd, so that (L + 1) / 2 has no remainder here, and has a remainder for an
    # even L.
    leaves_lengths = other in (Size(1), Size(0, 1))
    if _may_stand_in(one) and not leaves_lengths:
        return None
    if other.per_example:
        return _quotient_of_multiples(one, other)
    return _quotient_by_constant(one, other.constant)


def floor_quotient(one: Size, other: Size) -> _PerhapsSize:
    """The quotient of two sizes, rounded down: 800 // 64 = 12. Of sizes with n in them it is the
    exact quotient, if there is one.

    To be called only if no prime stands for a length of an input (`View.has_stand_ins`), which is
    not checked here. Else a constant may have been computed from such a prime, as the length of
    `x[:, ::2]` is, and would be another one in a run.
    """
    are_constants = not one.per_example and not other.per_example
    are_known = max(map(abs, one + other)) < _LEAST_FROM_LARGE_PRIME
    if are_constants and are_known and other.constant > 0:
        return Size(one.constant // other.constant)
    return quotient(one, other)


def _quotient_by_constant(size: Size, divisor: int) -> _PerhapsSize:
    """The quotient by a constant, as (4 + 6n) / 2; None where the constant is not positive, or
    there is a remainder."""
    if divisor <= 0:
        return None
    rounded = Size(size.constant // divisor, size.per_example // divisor)
    is_exact = product(rounded, Size(divisor)) == size
    return rounded if is_exact else None


def _quotient_of_multiples(one: Size, other: Size) -> _PerhapsSize:
    """The quotient of two multiples of n, as 6n / 2n; None where a size is no multiple of n, or
    there is a remainder."""
    are_multiples = not one.constant and not other.constant
    if are_multiples and one.per_example % other.per_example == 0:
        return Size(one.per_example // other.per_example)
    return None


def remainder(one: Size, other: Size) -> _PerhapsSize:
    """The remainder of the division of two sizes; None where a size is not constant, or the second
    size is not positive, or a prime may be in a size."""
    are_constants = not one.per_example and not other.per_example
    if not are_constants or other.constant <= 0:
        return None
    if _any_may_stand_in(one, other):
        return None
    return Size(one.constant % other.constant)


def _may_stand_in(size: Size) -> bool:
    """Whether a size may have the prime in it that stands in for a length which is not static."""
    return max(map(abs, size)) >= LEAST_FROM_STAND_IN


def _any_may_stand_in(*sizes: Size) -> bool:
    """Whether any of the sizes may have a prime in it that stands in for a length."""
    return any(map(_may_stand_in, sizes))


def _all_may_stand_in(*sizes: Size) -> bool:
    """Whether all of the sizes may have a prime in them that stands in for a length."""
    return all(map(_may_stand_in, sizes))


def larger(one: Size, other: Size) -> _PerhapsSize:
    """The maximum of two sizes, if the same size is the larger one for every n from 1 on; else
    None.

    The difference of the two sizes is linear in n. So it has the same sign for every n, if it has
    this sign for n = 1 and does not move to the other sign as n grows. `2 + n` is always larger
    than 2; which of `2n` and 5 is larger depends on n.
    """
    if _any_may_stand_in(one, other):
        return None
    difference = Size(one.constant - other.constant, one.per_example - other.per_example)
    difference_at_1 = difference.per_example + difference.constant
    if difference_at_1 >= 0 and difference.per_example >= 0:
        return one
    if difference_at_1 <= 0 and difference.per_example <= 0:
        return other
    return None


def product_of_all(sizes: typing.Iterable[Size]) -> _PerhapsSize:
    """The product of sizes; None where more than one of them is not constant."""
    total = Size(1)
    for size in sizes:
        next_total = product(total, size)
        if next_total is None:
            return None
        total = next_total
    return total


# ---- tensors -------------------------------------------------------------------------------------

def sizes_in(tensor: tf.Tensor, state: State, view: View) -> typing.Optional[Sizes]:
    """The numbers of a tensor of sizes, or of at most `MOST_NUMBERS` static integers, in row-major
    order; None for any other tensor.

    Args:
      tensor: the tensor.
      state: its state.
      view: `View`.
    """
    if state.kind is Kind.SIZES:
        return state.sizes
    if state.kind is not Kind.INDEPENDENT:
        return None
    value = view.value(tensor)
    if value is None or value.size > MOST_NUMBERS:
        return None
    if not np.issubdtype(value.dtype, np.integer):
        return None
    return tuple(Size(int(number)) for number in np.ravel(value))


def sizes_of_dimensions(tensor: tf.Tensor, state: State, view: View) -> typing.Optional[Sizes]:
    """The shape of a tensor as sizes; None where the length of a dimension is not known.

    Args:
      tensor: the tensor.
      state: its state.
      view: `View`.
    """
    shape = view.shape(tensor)
    # Of ROWS, each example may have any number.
    if shape is None or state.kind in (Kind.UNKNOWN, Kind.ROWS):
        return None
    sizes = []
    for axis, length in enumerate(shape):
        size = _size_of_dimension(tensor, axis, length, state, view)
        if size is None:
            return None
        sizes.append(size)
    return tuple(sizes)


def _size_of_dimension(tensor: tf.Tensor, axis: int, length: typing.Optional[int], state: State,
                       view: View) -> _PerhapsSize:
    """The length of a dimension as a size; where it is not static, the prime that stands in for it.
    None where a length that is not static may differ between towers, or between iterations.

    Args:
      tensor: the tensor.
      axis: the dimension.
      length: its length in the scratch graph; None where that is not static.
      state: the state of the tensor.
      view: `View`.
    """
    if state.kind is Kind.PER_EXAMPLE and axis == state.axis:
        return Size(constant=0, per_example=state.entries_of_each)
    if length is not None:
        return Size(length)
    # ONE_EXAMPLE has the length of the example of an iteration, which may differ between examples.
    # None is always sound: so all other kinds, such as a MEAN [L], give None without being told
    # apart.
    if state.kind not in (Kind.INDEPENDENT, Kind.PER_EXAMPLE):
        return None
    prime = view.stand_in(tensor, axis)  # None in a loop: each iteration may have another length
    return None if prime is None else Size(prime)


def as_number(op: tf.Operation, state: State, view: View) -> State:
    """The state of an input, where an operation takes sizes as any other numbers.

    Constant sizes are the same on every tower. Multiples of the number of examples n are counts,
    which are sums: n is the sum of 1 over the examples. Any other use of n marks the result with a
    statistic of the shard.

    Args:
      op: the operation.
      state: the state of its input.
      view: `View`, in which the use of n is noted.
    """
    if state.kind is not Kind.SIZES:
        return state
    if not state.depends_on_size:
        return INDEPENDENT.with_marks_of(state)
    if state.is_count:  # 3n is the sum of a 3 for each example
        count = State(Kind.SUM, is_constant=True, reductions=frozenset([op.name]))
        return count.with_marks_of(state)
    view.note(op.name, op, 'uses the number of examples')
    return INDEPENDENT.with_shard_statistics(state.shard_statistics | {op.name})


def as_numbers(op: tf.Operation, states: typing.Sequence[State], view: View) -> typing.List[State]:
    """The states of inputs, where an operation takes sizes as any other numbers: `as_number` for
    each.

    Args:
      op: the operation.
      states: the states of its inputs.
      view: `View`, in which the use of n is noted.
    """
    return [as_number(op, state, view) for state in states]
