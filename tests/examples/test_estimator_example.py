"""examples/estimator.py, for a few steps."""

import pytest

from towers import compat


@pytest.mark.slow
@pytest.mark.skipif(not compat.has_estimator(), reason='this TensorFlow has no Estimator')
def test_the_example_learns(tmpdir, capsys):
    from examples import estimator
    accuracy = estimator.main(['--steps', '40', '--model_dir', str(tmpdir)])
    assert accuracy > 0.8
    assert 'after 40 steps' in capsys.readouterr().out
