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
from benchmarks import step_overhead

# With flags of their own, which are those of train.py too.
SCRIPTS = ('benchmarks.precision_and_xla', 'benchmarks.run_overhead')


def test_every_module_is_imported_without_running():
    names = [name for _, name, _ in pkgutil.walk_packages(benchmarks.__path__, 'benchmarks.')
             if name not in SCRIPTS]
    assert len(names) > 30
    for name in names:
        importlib.import_module(name)
    assert not tf.get_default_graph().get_operations()


def test_every_way_of_running_a_step_runs_it(monkeypatch):
    counted = []

    def timed(run, steps):
        counted.append(steps)
        run()
        return 1e-3
    monkeypatch.setattr(step_overhead, '_timed', timed)
    for way in (step_overhead._plain, step_overhead._callable, step_overhead._fetching,
                step_overhead._monitored):
        with tf.Graph().as_default():
            assert way(graph(), 3) == 1e-3
    assert counted == [3] * 4
    built = graph()
    assert step_overhead._with_hooks(built, 3, every=2, save_every=2) > 0


def graph():
    step = tf.train.get_or_create_global_step()
    examples = tf.get_variable('examples_seen', [], tf.int64, tf.zeros_initializer())
    values = [('loss', tf.placeholder_with_default(1., [])),
              ('learning_rate', tf.placeholder_with_default(1., []))]
    return step_overhead.Graph(step, examples, values, tf.group(
        step.assign_add(1, read_value=False), examples.assign_add(1, read_value=False)))


@pytest.mark.slow
@pytest.mark.version_independent
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
