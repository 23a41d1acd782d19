"""How far a step goes under sum and mean: exactly N times under SGD, alike under Adam."""

import csv
import statistics

import numpy as np
import pytest

from benchmarks.effective_step import Measured, draw, measure, write_csv
from towers.slim_mend import mend_slim

mend_slim()


@pytest.mark.parametrize('reduction, factor', [
    pytest.param('sum', 4, marks=pytest.mark.slow), ('mean', 1)])
def test_sgd_follows_the_gradients_size(reduction, factor):
    steps = measure('SGD', reduction, 4, steps=2)
    np.testing.assert_allclose(steps, [0.01 * factor] * 2, rtol=1e-3)


@pytest.mark.slow
def test_first_step_of_momentum_is_that_of_sgd():
    assert measure('momentum', 'sum', 4, steps=1)[0] == pytest.approx(0.002 * 4, rel=1e-3)


@pytest.mark.slow
@pytest.mark.version_independent
def test_adam_does_not():
    found = [statistics.median(measure('Adam', reduction, 4, steps=4))
             for reduction in ('sum', 'mean')]
    assert found[0] == pytest.approx(found[1], rel=0.05)


ROWS = [Measured(optimizer, reduction, count, 0.01 * count, float(count))
        for optimizer in ('SGD', 'momentum', 'Adam') for reduction in ('sum', 'mean')
        for count in (1, 2, 4, 8)]


def test_csv(tmp_path):
    write_csv(str(tmp_path / 'step.csv'), ROWS)
    with open(str(tmp_path / 'step.csv')) as opened:
        rows = list(csv.DictReader(opened))
    assert len(rows) == 24
    assert rows[3] == {'optimizer': 'SGD', 'reduction': 'sum', 'towers': '8', 'step': '0.08',
                       'relative': '8.0'}


def test_picture(tmp_path):
    pytest.importorskip('matplotlib')
    draw(ROWS, str(tmp_path / 'step.png'))
    assert (tmp_path / 'step.png').read_bytes().startswith(b'\x89PNG')
