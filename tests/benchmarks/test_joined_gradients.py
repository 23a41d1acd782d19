"""The benchmark of joined gradients: both ways train alike, and are what they are called."""


import pytest

from benchmarks import joined_gradients
from benchmarks.joined_gradients import Arm, add, compare, join


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
def test_ways_that_differ_are_no_comparison(monkeypatch):
    monkeypatch.setattr(joined_gradients, 'join', lambda gradients: 3. * gradients[0])
    with pytest.raises(ValueError, match='lead to losses of'):
        compare(2, 8, 2, 4, 200, 0.)
