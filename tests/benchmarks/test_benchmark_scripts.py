"""Programs of benchmarks/ that other tests do not call: that they import, run, and say what they
should, with next to nothing to do."""

import importlib
import os
import pkgutil

import pytest
import tensorflow.compat.v1 as tf

import benchmarks
from benchmarks.tower_speed import __main__ as speed
from benchmarks.tower_speed.trace_split import PARTS, split_trace

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
def test_the_script_of_its_own(runner, tmp_path):
    path = os.path.join(os.path.dirname(benchmarks.__file__), SCRIPT.partition('.')[2] + '.py')
    done = runner.python([path, '--workloads=digits', '--rounds=1', '--turn_seconds=0.001',
                          '--arms=float32'], tmp_path)
    assert '\ndigits, batch ' in '\n' + done.stdout


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


# ---- A step's time by part, from made-up intervals -----------------------------------------------

def trace(*nodes):
    """StepStats of `(device, name, begin, end, label)`, in microseconds."""
    stats = tf.RunMetadata().step_stats
    devices = {}
    for device, name, begin, end, label in nodes:
        if device not in devices:
            devices[device] = stats.dev_stats.add(device=device)
        devices[device].node_stats.add(node_name=name, all_start_micros=begin,
                                       all_end_rel_micros=end - begin, timeline_label=label)
    return stats


def test_overlapping_times_count_once():
    found = split_trace(trace(
        ('/cpu:0', '_SOURCE', 0, 0, ''),
        ('/cpu:0', 'IteratorGetNext', 1000, 1100, 'it = IteratorGetNext()'),
        ('/cpu:0', 'tower_0/a', 1100, 1500, 'a = Conv2D(x)'),
        ('/cpu:1', 'tower_1/a', 1200, 1700, 'a = Conv2D(x)'),
        ('/cpu:0', 'tower_1/recv', 1000, 9000, 'edge_1_x = _Recv()'),
        ('/cpu:0', 'combine_gradients/AddN', 1600, 1900, 'AddN = AddN(a, b)'),
        ('/cpu:0', 'Adam/update_w', 1900, 2000, 'u = ResourceApplyAdam()'),
        ('/cpu:0', 'AssignAdd', 2100, 2110, '')), ('Adam',))
    assert found.step == pytest.approx(1110e-6)
    assert [found.covered[part] for part in PARTS] == pytest.approx(
        [100e-6, 600e-6, 300e-6, 100e-6, 10e-6])
    # A third of the combination ran beside the slower tower.
    assert [found.exposed[part] for part in PARTS] == pytest.approx(
        [100e-6, 600e-6, 200e-6, 100e-6, 10e-6])
    assert found.not_overlapped == pytest.approx(410e-6)
