"""Where a line of pieces is cut, by numbers made by hand."""

import pytest

from towers.tower.balanced_partition import Piece, StageCost, cut_between, cut_evenly


def piece(kept=0, seconds=0, crossing=1, held=0, gradients=0, transient=0):
    return Piece(held, kept, gradients, transient, seconds, crossing)


def test_the_memory_of_a_stage_is_that_of_its_worst_moment():
    """Whichever end it is made larger at."""
    pieces = [piece(kept=10, transient=2, held=100, gradients=1), piece(kept=5, transient=8),
              piece(kept=1, transient=1, held=200, gradients=50)]
    # With the backward pass at the first piece: its 10, and all gradients. At the second: 10 + 5,
    # 8, and the last one's gradient. At the last: 16, 1, and that.
    assert StageCost(1, pieces).memory == 300 + max(10 + 2 + 51, 15 + 8 + 50, 16 + 1 + 50)
    assert StageCost(3, pieces).memory == 300 + max(30 + 2 + 51, 45 + 8 + 50, 48 + 1 + 50)
    for copies in (1, 3):
        other = StageCost(copies)
        for each in reversed(pieces):
            other.add_first(each)
        assert other.memory == StageCost(copies, pieces).memory


@pytest.mark.parametrize('balance, cut', [
    ('memory', 2),  # 300 and 300 bytes, 3 and 15 seconds
    ('time', 5),    # 540 and 60 bytes, 9 and 9 seconds
    ('both', 3)])   # 400 bytes over 300, 14 seconds over 9: 1.56 times; one further 480 over 300
def test_what_is_balanced(balance, cut):
    """Eight pieces: the memory is in the first ones, the time in the last ones."""
    pieces = [piece(kept=kept, seconds=seconds) for kept, seconds in zip(
        [100, 100, 100, 100, 80, 60, 40, 20], [1, 1, 1, 1, 2, 3, 4, 5])]
    assert cut_evenly(pieces, [1, 1], balance) == [cut]


def test_it_is_cut_where_the_least_crosses_but_not_at_any_price():
    crossing = [9] * 100
    crossing[50], crossing[60] = 5, 1
    pieces = [piece(seconds=1, crossing=each) for each in crossing]
    assert cut_evenly(pieces, [1, 1], 'time') == [50]  # 51 is within 7 % of 50, 61 is not


def test_it_is_cut_between_layers():
    """Not between a product and its activation function, where as much crosses."""
    product, function = piece(seconds=1, held=1), piece(kept=1)
    assert cut_evenly([product, function] * 20, [1, 1], 'time') == [19]
    assert cut_evenly([function, product] * 20, [1, 1], 'time') in ([18], [20])


def test_a_stage_of_a_pipeline_keeps_as_many_micro_batches_as_stages_follow():
    pieces = [piece(kept=1) for _ in range(12)]
    assert cut_evenly(pieces, [1, 1], 'memory') == [5]
    assert cut_evenly(pieces, [2, 1], 'memory') == [3]  # 4 kept twice, 8 kept once


def test_each_stage_has_a_piece_however_large_one_is():
    pieces = [piece(seconds=1)] * 3 + [piece(seconds=1000)]
    cuts = cut_evenly(pieces, [1, 1, 1, 1], 'time')
    assert cuts == [0, 1, 2]
    assert cut_evenly(pieces, [1, 1], 'memory') in ([0], [1], [2])  # nothing to go by


def test_the_costliest_of_any_stages_is_near_the_best():
    """Against all ways to cut twelve pieces of many sizes into three."""
    sizes = [7, 1, 30, 2, 2, 14, 9, 1, 1, 25, 3, 11]
    pieces = [piece(seconds=size) for size in sizes]

    def costliest(cuts):
        bounds = [0] + [cut + 1 for cut in cuts] + [len(sizes)]
        return max(sum(sizes[a:b]) for a, b in zip(bounds, bounds[1:]))
    best = min(costliest([a, b]) for a in range(10) for b in range(a + 1, 11))
    assert costliest(cut_evenly(pieces, [1, 1, 1], 'time')) <= 1.07 * best * 1.001


def test_cuts_between_what_is_somewhere_already():
    pieces = [piece(crossing=each) for each in (9, 3, 2, 5, 9, 9)]
    assert cut_between(pieces, [{0}, set(), set(), set(), {1}, set()]) == [2]
    assert cut_between(pieces, [{0}, {0}, {1}, {1}, set(), {2}]) == [1, 3]
    assert cut_between(pieces, [{0}, {1}, {0}, {1}, set(), set()]) is None  # back and forth
    assert cut_between(pieces, [set(), set(), set(), {1}, set(), set()]) is None
