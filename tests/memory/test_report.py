"""The report on four batch sizes, and its picture."""

import sys

import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.errors import MissingPackageError
from towers.memory import report
from towers.memory.measure import MeasuredMemory


def build(batch_size):
    weights = tf.get_variable('weights', [100, 50], use_resource=True)
    return towers.build_towers(
        lambda x: tf.reduce_mean(tf.sigmoid(tf.matmul(x, weights))),
        (tf.random_uniform([batch_size, 100]),), tf.train.MomentumOptimizer(0.1, 0.9), 2), []


def measured(built, **unused):
    return MeasuredMemory({'': 10 ** 6}, {'': 'x'}, built.plan.batch_size)


@pytest.mark.slow
def test_four_sizes_that_divide_and_the_limit(monkeypatch):
    monkeypatch.setattr(report, 'measure_memory', measured)
    lines = []
    with tf.Graph().as_default():
        limit = towers.memory_account(build(20)[0]).peak
    towers.memory_report(build, 42, limit, say=lines.append)
    not_run = 'more than the limit, %.1f MB: not run' % (limit / 1e6)
    assert [(line.split(':')[0], 'measured 1.0 MB' in line, line.endswith(not_run))
            for line in lines if line.startswith('batch ')] == [
                ('batch 10', True, False), ('batch 20', True, False),
                ('batch 42', False, True), ('batch 84', False, True)]
    assert any('memory of a step, batch 42' in line for line in lines)


def test_a_picture_without_matplotlib_is_refused_first(monkeypatch):
    monkeypatch.setitem(sys.modules, 'matplotlib', None)
    with pytest.raises(MissingPackageError, match=r'\(the extra plots\)'):
        towers.memory_report(None, 8, 10 ** 6, 'memory.png')


def test_the_picture_says_what_it_shows(monkeypatch, tmp_path):
    pytest.importorskip('matplotlib')
    from matplotlib.figure import Figure
    monkeypatch.setattr(report, 'measure_memory', measured)
    drawn, path, save = [], tmp_path / 'a.png', Figure.savefig
    monkeypatch.setattr(Figure, 'savefig', lambda figure, *args, **kwargs: (
        drawn.append(figure), save(figure, *args, **kwargs)))
    towers.memory_report(build, 64, 2 * 10 ** 6, str(path), say=lambda line: None)
    assert path.read_bytes()[:4] == b'\x89PNG'
    axes, = drawn[0].axes
    assert axes.get_xlabel() == 'batch size, examples of a step over all towers'
    assert axes.get_ylabel() == 'memory at the worst moment, MB'
    names = axes.get_legend_handles_labels()[1]
    assert {'predicted', 'measured', 'limit, 2 MB', 'parameters', 'slots'} <= set(names)
    predicted = next(line for line in axes.lines if line.get_label() == 'predicted')
    assert list(predicted.get_xdata()) == [16, 32, 64, 128]
    with tf.Graph().as_default():
        assert predicted.get_ydata()[2] == towers.memory_account(build(64)[0]).peak / 1e6
    with pytest.raises(towers.LogFileError, match='/dev/full is a device'):
        towers.memory_report(build, 64, path='/dev/full', say=lambda line: None)


@pytest.mark.slow
def test_train_py_says_where_memory_goes_and_fits_a_batch(runner, tmp_path):
    folder = tmp_path / 'run'
    output = runner.run(folder, ['--mode=memory', '--batch_size=64',
                                 '--config={"memory_limit": 30}']).stdout
    assert 'memory of a step, batch 64' in output and 'batch 128: predicted' in output
    output = runner.run(folder, ['--batch_size=auto', '--config={"memory_limit": 40}',
                                 '--train_steps=2', '--num_towers=1']).stdout
    assert ' MB predicted of 40.0 MB' in output and 'test accuracy' in output
