"""The benchmark of joined gradients: both ways train alike, and are what they are called."""

import argparse

import pytest

from benchmarks import joined_gradients
from benchmarks.joined_gradients import Arm, add, compare, join, parse_cells


def count_products(combine, num_towers):
    """How many products make the gradient that the update of a layer's weights gets."""
    arm = Arm(combine, 2, 8, num_towers, 4)
    arm.close()
    update, = [op for op in arm.train_op.control_inputs if 'update_dense1/weights' in op.name]
    gradient = update.inputs[3]  # of the variable, its momentum, the rate, the gradient, …
    terms = gradient.op.inputs if gradient.op.type == 'AddN' else [gradient]
    made_by = [term.op.inputs[0].op if term.op.type == 'Identity' else term.op for term in terms]
    return [op.type for op in made_by].count('MatMul')


@pytest.mark.parametrize('combine, count', [(add, 3), (join, 1)])
def test_ways(combine, count):
    assert count_products(combine, 3) == count


@pytest.mark.slow
def test_both_train_alike():
    arms = [Arm(combine, 2, 8, 3, 4) for combine in (add, join)]
    before = [arm.loss() for arm in arms]
    for arm in arms:
        for _ in range(50):
            arm.turn(1)
    after = [arm.loss() for arm in arms]
    for arm in arms:
        arm.close()
    assert before[0] == before[1]
    assert after[0] == pytest.approx(after[1], rel=1e-5)
    assert after[0] < before[0]


def test_ratio_is_of_joined_over_added(monkeypatch):
    def turn(arm, steps):
        arm.seconds.append(2. if arm.combine is join else 4.)
        arm.cpu_seconds.append(3. if arm.combine is join else 4.)
    build = Arm.__init__

    def build_and_note(arm, combine, *options):
        arm.combine = combine
        build(arm, combine, *options)
    monkeypatch.setattr(Arm, '__init__', build_and_note)
    monkeypatch.setattr(Arm, 'turn', turn)
    added, wall, cpu = compare(1, 8, 2, 2, 3, 0.)
    assert (added, wall['median'], cpu['median']) == (4., 0.5, 0.75)


@pytest.mark.slow
def test_ways_that_differ_are_no_comparison(monkeypatch):
    monkeypatch.setattr(joined_gradients, 'join', lambda gradients: 3. * gradients[0])
    with pytest.raises(ValueError, match='lead to losses of'):
        compare(2, 8, 2, 4, 200, 0.)


def test_cells():
    assert parse_cells('3x4096:2x16,1x8:4x2') == [(3, 4096, 2, 16), (1, 8, 4, 2)]
    for text in ('', '3x4096', '3x4096:2', '3x4096:2xa', '0x8:2x2'):
        with pytest.raises(argparse.ArgumentTypeError, match='LAYERSxWIDTH:TOWERSxEXAMPLES'):
            parse_cells(text)
