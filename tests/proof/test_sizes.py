"""Arithmetic of numbers with the number of examples n in them: right for every n, or None."""

import pytest
import tensorflow.compat.v1 as tf

from towers.proof import sizes
from towers.proof.states import Kind, Size, sizes_state

N, TWICE, FIVE = Size(0, 1), Size(0, 2), Size(5)
PRIME = Size(13007)  # may stand in for a length that is not static


@pytest.mark.parametrize('function, one, other, expected', [
    (sizes.plus, N, FIVE, Size(5, 1)),
    (sizes.minus, N, FIVE, Size(-5, 1)),
    (sizes.minus, PRIME, FIVE, Size(13002)),
    (sizes.minus, PRIME, PRIME, None),
    (sizes.minus, Size(13002), Size(13009), None),
    (sizes.plus, PRIME, Size(-13009), None),
    (sizes.product, TWICE, FIVE, Size(0, 10)),
    (sizes.product, FIVE, Size(1, 1), Size(5, 5)),
    (sizes.product, N, N, None),
    (sizes.quotient, TWICE, Size(2), N),
    (sizes.quotient, TWICE, N, Size(2)),
    (sizes.quotient, N, Size(2), None),  # which rounds
    (sizes.quotient, Size(1, 2), N, None),
    (sizes.quotient, N, Size(0), None),
    (sizes.quotient, PRIME, PRIME, None),
    (sizes.quotient, Size(0, 13008), Size(2), None),
    (sizes.quotient, Size(0, 13008), TWICE, None),
    (sizes.quotient, Size(0, 13008), N, Size(13008)),
    (sizes.floor_quotient, Size(800), Size(64), Size(12)),
    (sizes.floor_quotient, Size(-800), Size(64), Size(-13)),
    (sizes.floor_quotient, PRIME, Size(64), Size(203)),  # no length of an input has a prime
    (sizes.floor_quotient, Size(2 ** 31 + 11), Size(64), None),
    (sizes.floor_quotient, Size(800), Size(0), None),
    (sizes.floor_quotient, TWICE, Size(2), N),
    (sizes.floor_quotient, N, Size(2), None),
    (sizes.larger, N, Size(1), N),  # of 1 or more examples
    (sizes.larger, N, Size(2), None),
    (sizes.larger, Size(-1, 1), N, N),
    (sizes.larger, PRIME, FIVE, None)])
def test_arithmetic(function, one, other, expected):
    assert function(one, other) == expected


def test_a_product_of_all_has_one_factor_that_is_not_constant():
    assert sizes.product_of_all([Size(3), TWICE, FIVE]) == Size(0, 30)
    assert sizes.product_of_all([N, FIVE, N]) is None


class View:
    """A view that keeps what is noted."""

    def __init__(self):
        self.noted = []

    def note(self, statistic, op, why):
        self.noted.append(statistic)


@pytest.mark.parametrize('numbers, kind, noted', [
    ([FIVE], Kind.INDEPENDENT, []),
    ([N, TWICE], Kind.SUM, []),  # counts
    ([Size(1, 1)], Kind.INDEPENDENT, ['op']),
    ([N, FIVE], Kind.INDEPENDENT, ['op'])])
def test_sizes_as_numbers(numbers, kind, noted):
    view, op = View(), tf.no_op('op')
    state = sizes.as_number(op, sizes_state(numbers), view)
    assert (state.kind, view.noted) == (kind, noted)
    assert state.shard_statistics == frozenset(noted)
