"""examples/keras_fit.py: a short run, and what is saved."""

import os
import re
import subprocess
import sys

import pytest
import tensorflow

from towers import compat

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
try:
    import tf_keras  # noqa: F401, pylint: disable=unused-import
    HAS_KERAS_2 = True
except ImportError:
    HAS_KERAS_2 = not compat.is_keras_3(tensorflow.keras.layers.Layer())


@pytest.mark.slow
def test_it_learns_the_digits_and_saves_the_model(tmp_path):
    path = str(tmp_path / 'model.h5')
    done = subprocess.run(
        [sys.executable, '-m', 'examples.keras_fit', '--devices=2', '--epochs=1',
         '--batch_size=100', '--save=' + path],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True, cwd=ROOT,
        check=False)
    if not HAS_KERAS_2:
        assert done.returncode == 1 and 'tf-keras' in done.stderr.splitlines()[-1]
        assert 'Traceback' not in done.stderr
        return
    assert done.returncode == 0, done.stderr[-2000:]
    assert '2 towers' in done.stdout and '/cpu:1' in done.stdout
    # 1,437 images are 14 batches of 100 and one of 37, which two devices do not divide.
    assert float(re.search(r'^test accuracy: (\S+)$', done.stdout, re.M).group(1)) > 0.3
    assert os.path.getsize(path) > 100000
