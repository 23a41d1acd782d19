"""`--deterministic`: TensorFlow's own switch is on, and two runs end with the same bits."""

import numpy as np

from towers import compat
from train_runs import values_of

# At the end of the run: does TensorFlow refuse random numbers without a seed?
SHOWN = '''
import atexit, os
def show():
    import tensorflow.compat.v1 as tf
    try:
        with tf.Graph().as_default():
            tf.random.uniform([])
        print('is on:', os.environ.get('TF_DETERMINISTIC_OPS'))
    except RuntimeError as error:
        print('is on:', 'determinism' in str(error))
atexit.register(show)
'''


def test_deterministic_operations(runner, tmp_path):
    flags = ['--train_steps=3', '--batch_size=20', '--config={"augment_shift": 1}']
    run = runner.run(tmp_path / 'run', flags + ['--deterministic', '--export_dir=%s' % tmp_path],
                     before=SHOWN)
    assert 'input wait' not in run.stdout
    assert 'is on: %s\n' % (True if compat.TF_VERSION >= (2, 8) else 1) in run.stdout
    runner.run(tmp_path / 'again', flags + ['--deterministic'])
    ours, others = values_of(tmp_path / 'run', 3), values_of(tmp_path / 'again', 3)
    assert set(ours) == set(others)
    for name in ours:
        np.testing.assert_array_equal(ours[name], others[name], name)
