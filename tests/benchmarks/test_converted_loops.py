"""The stand-ins of converted programs train alike by hand and by towers."""

import pytest
import sample_models as samples

from benchmarks import converted_loops


@pytest.mark.slow
@pytest.mark.parametrize('name', list(converted_loops.MODELS))
def test_both_ways_have_the_same_losses(name):
    with samples.switched('resource_variables', True):
        found = converted_loops.compare(name, num_towers=2, rounds=1, steps=1)
    by_hand, by_towers = found['losses']['hand'], found['losses']['towers']
    assert by_towers == pytest.approx(by_hand, rel=1e-4)
    assert by_hand[-1] < by_hand[0]
    assert found['ratio']['median'] > 0
