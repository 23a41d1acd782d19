"""Where a line of pieces is cut, by numbers made by hand."""

import pytest

from towers.tower.balanced_partition import Piece, StageCost, cut_evenly


def piece(kept=0, crossing=1, held=0, gradients=0, transient=0):
    return Piece(held, kept, gradients, transient, crossing)


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


def test_it_is_cut_where_the_least_crosses_but_not_at_any_price():
    crossing = [9] * 100
    crossing[50], crossing[60] = 5, 1
    pieces = [piece(kept=1, crossing=each) for each in crossing]
    assert cut_evenly(pieces, [1, 1]) == [50]  # 51 is within 7 % of 50, 61 is not


def test_it_is_cut_between_layers():
    """Not between a product and its activation function, where as much crosses."""
    product, function = piece(held=1), piece(kept=1)
    assert cut_evenly([product, function] * 20, [1, 1]) == [19]
    assert cut_evenly([function, product] * 20, [1, 1]) in ([18], [20])


def test_a_stage_of_a_pipeline_keeps_as_many_micro_batches_as_stages_follow():
    pieces = [piece(kept=1) for _ in range(12)]
    assert cut_evenly(pieces, [1, 1]) == [5]
    assert cut_evenly(pieces, [2, 1]) == [3]  # 4 kept twice, 8 kept once


def test_each_stage_has_a_piece_however_large_one_is():
    pieces = [piece(held=1)] * 3 + [piece(held=1000)]
    cuts = cut_evenly(pieces, [1, 1, 1, 1])
    assert cuts == [0, 1, 2]
    assert cut_evenly(pieces, [1, 1]) in ([0], [1], [2])  # nothing to go by


def test_the_costliest_of_any_stages_is_near_the_best():
    """Against all ways to cut twelve pieces of many sizes into three."""
    sizes = [7, 1, 30, 2, 2, 14, 9, 1, 1, 25, 3, 11]
    pieces = [piece(held=size) for size in sizes]

    def costliest(cuts):
        bounds = [0] + [cut + 1 for cut in cuts] + [len(sizes)]
        return max(sum(sizes[a:b]) for a, b in zip(bounds, bounds[1:]))
    best = min(costliest([a, b]) for a in range(10) for b in range(a + 1, 11))
    assert costliest(cut_evenly(pieces, [1, 1, 1])) <= 1.07 * best * 1.001
