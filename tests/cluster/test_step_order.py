"""Which build a program steps next, by what it has stepped."""

import pytest

from towers.cluster.step_order import StepOrder


@pytest.mark.parametrize('made, following', [
    ('', 'x'), ('d', 'd'), ('dg', 'd'), ('dgd', 'g'), ('dddgddd', 'g'), ('dddgdd', 'd'),
    ('dddgd', 'd'), ('dddg', 'd'), ('wwwwdgdg', 'd'), ('wwwwdgd', 'g'), ('wwwwd', 'w'),
    ('gddgddg', 'd'), ('gddgdd', 'g')])
def test_what_came_after_the_same_steps_before(made, following):
    order = StepOrder()
    for each in made:
        order.note(each)
    assert order.next('x') == following
