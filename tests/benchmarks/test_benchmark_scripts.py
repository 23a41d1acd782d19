"""Programs of benchmarks/ that other tests do not call: that they import, run, and say what they
should, with next to nothing to do."""

import importlib
import os
import pkgutil
import subprocess
import sys

import pytest
import tensorflow.compat.v1 as tf

import benchmarks

# With flags of their own, which are those of train.py too.
SCRIPTS = ('benchmarks.precision_and_xla', 'benchmarks.run_overhead')


def test_every_module_is_imported_without_running():
    names = [name for _, name, _ in pkgutil.walk_packages(benchmarks.__path__, 'benchmarks.')
             if name not in SCRIPTS]
    assert len(names) > 30
    for name in names:
        importlib.import_module(name)
    assert not tf.get_default_graph().get_operations()


@pytest.mark.slow
@pytest.mark.parametrize('argv, line', [
    (['run_overhead.py', '--rounds=1', '--interval=2', '--batch_size=10'],
     'digits, 2 towers, batch 10: '),
    (['precision_and_xla.py', '--workloads=digits', '--rounds=1', '--turn_seconds=0.001',
      '--arms=float32,loss_scale'], 'digits, batch ')], ids=['run_overhead', 'precision_and_xla'])
def test_scripts_of_their_own(argv, line):
    folder = os.path.dirname(benchmarks.__file__)
    done = subprocess.run([sys.executable, os.path.join(folder, argv[0])] + argv[1:],
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True,
                          env=dict(os.environ, TF_CPP_MIN_LOG_LEVEL='3'))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [each for each in lines if each.startswith(line)], done.stdout
    assert len(lines) >= 4
