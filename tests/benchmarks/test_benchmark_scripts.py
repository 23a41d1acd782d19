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
from benchmarks.tower_speed import __main__ as speed

# With flags of its own, which are those of train.py too.
SCRIPT = 'benchmarks.precision_and_xla'


def test_every_module_is_imported_without_running():
    names = [name for _, name, _ in pkgutil.walk_packages(benchmarks.__path__, 'benchmarks.')
             if name != SCRIPT]
    assert len(names) > 30
    for name in names:
        importlib.import_module(name)
    assert not tf.get_default_graph().get_operations()


@pytest.mark.slow
def test_the_script_of_its_own():
    done = subprocess.run(
        [sys.executable, '-m', SCRIPT, '--workloads=digits', '--rounds=1', '--turn_seconds=0.001',
         '--arms=float32,loss_scale'], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        universal_newlines=True, env=dict(os.environ, TF_CPP_MIN_LOG_LEVEL='3'),
        cwd=os.path.dirname(os.path.dirname(benchmarks.__file__)))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [each for each in lines if each.startswith('digits, batch ')], done.stdout
    assert len(lines) >= 4


# ---- A real cell of the speed benchmark ----------------------------------------------------------

@pytest.mark.slow
def test_a_cell_is_measured_once(tmp_path, capsys):
    def go(*argv):
        status = speed.main(speed.parse([
            '--quick', '--noplots', '--towers=2', '--directory=%s' % tmp_path] + list(argv)))
        return status, capsys.readouterr().out

    done = go()
    assert not done[0], done
    names = [name for name in os.listdir(str(tmp_path)) if name.endswith('.json')]
    assert names == ['2-towers-batch-64.json']  # both kinds, measured once
    first = os.stat(str(tmp_path / names[0])).st_mtime_ns
    assert go() == done
    assert os.stat(str(tmp_path / names[0])).st_mtime_ns == first
