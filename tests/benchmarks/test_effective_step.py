"""How far a step goes under sum and mean: exactly N times under SGD, alike under Adam."""


import numpy as np
import pytest

from benchmarks.effective_step import measure
from towers.slim_mend import mend_slim

mend_slim()


@pytest.mark.parametrize('reduction, factor', [
    pytest.param('sum', 4, marks=pytest.mark.slow), ('mean', 1)])
def test_sgd_follows_the_gradients_size(reduction, factor):
    steps = measure('SGD', reduction, 4, steps=2)
    np.testing.assert_allclose(steps, [0.01 * factor] * 2, rtol=1e-3)
