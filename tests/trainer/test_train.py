"""`train.py` as a user runs it: what it prints and writes, on how many towers, from what seed."""

import glob
import json
import os
import re
import shutil

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from towers import compat
from train_runs import metrics, newest, steps_saved, values_of
from trainer.flags import profiled_steps


@pytest.mark.slow
def test_a_run_shows_its_plan_its_audit_and_its_result(reference):
    lines = reference.stdout.splitlines()
    assert lines[:2] == [
        '2 towers, batch 100 = 2 x 50, on /cpu:0, /cpu:1',
        '  variables        14 (8 trainable), 58,634 parameters, 0.2 MB, on /cpu:0']
    assert ('\n  learning rate    0.01, warm-up from 0 over 718 examples, x0.94 every 1,437 '
            'examples' in reference.stdout)
    assert re.search(r'^audit: every promise kept; 0\.\d+ MB a step are sent between devices$',
                     reference.stdout, re.MULTILINE)
    assert lines.index('--plan shows all of the plan and of the audit') < 14
    accuracy = metrics(reference.train_dir)[-1]['test_accuracy']
    assert 'test accuracy  %.4f on 360 images' % accuracy in lines
    assert accuracy > 0.6
    assert re.match(r'speed +[\d,]+ images/s$', lines[-3])
    assert reference.stderr == ''
    assert [line.split('  ')[0] for line in lines if line.startswith('step ')] == [
        'step %d/30' % step for step in (1, 5, 7, 10, 14, 15, 20, 21, 25, 28, 30, 30)]
    assert lines[-2:] == ['checkpoint     %s/model.ckpt-30' % reference.train_dir,
                          'SavedModel     %s/export/30' % reference.train_dir]


def test_a_run_writes_checkpoints_and_metrics(reference):
    folder = reference.train_dir
    assert steps_saved(folder) == list(range(0, 31, 3))
    assert newest(folder) == 30
    values = values_of(folder, 30)
    assert values['global_step'] == 30 and values['examples_seen'] == 3000
    assert {name.split('/')[0] for name in values} == {
        'Digits', 'global_step', 'examples_seen', 'beta1_power', 'beta2_power'}
    assert {name.split('/', 3)[-1] for name in values if name.startswith('Digits/conv1/w')} == {
        'weights', 'Adam', 'Adam_1', 'ExponentialMovingAverage'}
    lines = metrics(folder)
    assert [line['step'] for line in lines] == [5, 7, 10, 14, 15, 20, 21, 25, 28, 30]
    assert [line['step'] for line in lines if 'test_accuracy' in line] == [7, 14, 21, 28, 30]
    assert [line['step'] for line in lines if 'loss' in line] == [5, 10, 15, 20, 25, 30]
    for line in lines:
        if 'loss' in line:
            seen = line['step'] * 100
            assert line['examples'] == seen
            assert line['epoch'] == pytest.approx(seen / 1437, abs=1e-6)
            # The rate of a step is that of the examples before it.
            rate = 0.01 * min((seen - 100) / 718, 1) * 0.94 ** ((seen - 100) / 1437)
            assert line['learning_rate'] == pytest.approx(rate, rel=1e-6)
    assert lines[-1]['test_examples'] == 360
    assert [name for name in os.listdir(folder) if 'tfevents' in name]


@pytest.mark.slow
def test_what_a_run_writes_for_tensorboard(runner, tmp_path):
    runner.run(tmp_path / 'run', ['--train_steps=2', '--summary_steps=2', '--batch_size=20',
                                  '--config={"histograms": true, "summary_images": 2}'])
    path, = (tmp_path / 'run').glob('events*')
    tags, graph = set(), tf.GraphDef()
    for event in tf.train.summary_iterator(str(path)):
        graph.MergeFromString(event.graph_def)
        tags |= {value.tag for value in event.summary.value}
    names = {node.name for node in graph.node}
    assert 'Digits/conv1/Conv2D' in names
    assert not [name for name in names if 'tower_1/Digits' in name]
    assert {'input/image/0', 'input/image/1', 'weights/Digits/conv1/weights',
            'gradients/Digits/conv1/weights', 'train/noise_scale', 'train/loss',
            'test/accuracy'} <= tags
    assert 'input/image/2' not in tags


# ---- the number of towers ------------------------------------------------------------------------

@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_towers(runner, tmp_path):
    folder = tmp_path / 'run'
    flags = ['--batch_size=20', '--log_every=1', '--save_steps=4', '--summary_steps=0',
             '--base_learning_rate=0.003']
    for part, towers in enumerate((1, 4)):
        run = runner.run(folder, flags + ['--num_towers=%d' % towers,
                                          '--train_steps=%d' % (8 * part + 8)])
        assert run.stdout.startswith(['1 tower, batch 20 = 1 x 20, on ',
                                      '4 towers, batch 20 = 4 x 5, on '][towers == 4])
        if part:
            assert 'going on from %s/model.ckpt-%d\n' % (folder, 8 * part) in run.stdout
    values = values_of(folder, 16)
    assert values['global_step'] == 16 and values['examples_seen'] == 320
    lines = metrics(folder)
    assert [line['step'] for line in lines] == list(range(1, 17))
    assert [line['examples'] for line in lines] == list(range(20, 340, 20))
    losses = [line['loss'] for line in lines]
    # The draws of dropout make less of a difference than eight steps do at the start.
    assert np.mean(losses[8:]) < np.mean(losses[:8])


OTHER_VERSIONS_FLAGS = [
    '--optimizer=momentum', '--base_learning_rate=0.0003', '--batch_size=20',
    '--config={"augment_shift": 1}',
    '--decay=cosine', '--decay_epochs=1', '--log_every=5', '--save_steps=10', '--summary_steps=0',
    '--train_steps=20']


@pytest.mark.slow
def test_a_run_goes_on_with_another_version_of_tensorflow(runner, tmp_path):
    """tests/data/run_tf…: `train.py --train_steps=10 --keep=1` with these flags under that one."""
    other = 'run_tf1.15' if tf.version.VERSION >= '2' else 'run_tf2.21'
    begun = os.path.join(os.path.dirname(os.path.dirname(__file__)), 'data', other)
    shutil.copytree(begun, str(tmp_path / 'mixed'))
    runner.run(tmp_path / 'whole', OTHER_VERSIONS_FLAGS)
    run = runner.run(tmp_path / 'mixed', OTHER_VERSIONS_FLAGS)
    assert 'going on from %s/model.ckpt-10\n' % (tmp_path / 'mixed') in run.stdout
    ours, whole = values_of(tmp_path / 'mixed', 20), values_of(tmp_path / 'whole', 20)
    assert sorted(ours) == sorted(whole) and ours['global_step'] == 20
    for name, expected in whole.items():
        # Kernels round otherwise; a hundred times as much on a machine with other kernels.
        assert np.linalg.norm(ours[name] - expected) <= 1e-3 * np.linalg.norm(expected), name
    lines = metrics(tmp_path / 'mixed')
    assert [line['step'] for line in lines] == [5, 10, 15, 20]
    for line, expected in zip(lines, metrics(tmp_path / 'whole')):
        assert line['learning_rate'] == pytest.approx(expected['learning_rate'], rel=1e-6)
        # Other images, shifts or dropout would be another loss of these 20 examples.
        assert line['loss'] == pytest.approx(expected['loss'], rel=1e-3)


@pytest.mark.slow
def test_a_run_starts_from_what_fits_of_another(runner, reference, tmp_path):
    folder = tmp_path / 'run'
    flags = ['--init_from=%s' % reference.train_dir, '--batch_size=20', '--save_steps=1']
    run = runner.run(folder, flags + ['--train_steps=1'])
    assert ('\nfrom %s/model.ckpt-30: took 14 of 14 variables (Digits: 14)\n  of no use here: '
            % reference.train_dir) in run.stdout
    whole, started = values_of(reference.train_dir, 30), values_of(folder, 0)
    taken = [name for name in started if name.startswith('Digits/') and 'Adam' not in name]
    assert len(taken) == 14
    for name in taken:
        assert started[name].tobytes() == whole[name].tobytes(), name
    assert started['global_step'] == 0 and not started['Digits/conv1/weights/Adam'].any()
    # Started again, it goes on from its own checkpoint.
    run = runner.run(folder, flags + ['--train_steps=2'])
    assert 'going on from %s/model.ckpt-1\n' % folder in run.stdout and 'took' not in run.stdout


# ---- `--deterministic`: TensorFlow's own switch is on, and two runs end with the same bits -------

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


@pytest.mark.slow
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


# ---- `--profile_steps`: a trace for Chrome with a row a tower, and TensorBoard's profile ---------

@pytest.mark.slow
def test_traces_of_a_run(runner, tmp_path):
    run = runner.run(tmp_path / 'run', ['--train_steps=8', '--profile_steps=4,6', '--log_every=1'])
    folder = str(tmp_path / 'run' / 'profile')
    assert 'trace          %s/timeline-4.json\n' % folder in run.stdout
    traces = [name for name in os.listdir(folder) if name.startswith('timeline-')]
    assert traces == ['timeline-4.json']
    with open(os.path.join(folder, traces[0])) as opened:
        events = json.load(opened)['traceEvents']
    rows = {event['args']['name']: event['pid'] for event in events if event['name'] ==
            'process_name'}
    for tower in range(2):
        row, = [pid for name, pid in rows.items() if 'CPU:%d Compute' % tower in name]
        kinds = {event['name'] for event in events if event['pid'] == row}
        assert any('Conv2DBackpropFilter' in kind for kind in kinds)  # by oneDNN as _MklNative…
    profiles = glob.glob(os.path.join(folder, 'plugins', 'profile', '*', '*.xplane.pb'))
    if compat.TF_VERSION < (2, 2):
        assert profiles == [] and 'no profile     for TensorBoard' in run.stdout
    else:
        assert len(profiles) == 1 or compat.TF_VERSION < (2, 4)
        assert 'profile        tensorboard --logdir=%s\n' % folder in run.stdout


@pytest.mark.slow
def test_a_report_of_a_step(runner, tmp_path):
    run = runner.run(tmp_path / 'run', ['--train_steps=4', '--report=3', '--log_every=1'])
    path = str(tmp_path / 'run' / 'step-3.html')
    assert 'report         %s\n' % path in run.stdout
    with open(path, encoding='utf-8') as opened:
        assert '2 towers on /cpu:0, /cpu:1, batch ' in opened.read()


def test_what_is_no_pair_of_steps():
    for text in ('', '100', '1,5', '5,5', '7,5', '2,3,4', '-2,3', '2.5,3', '2,x', '2,' + '9' * 13):
        assert profiled_steps(text) is None
    assert profiled_steps('2,3') == (2, 3)
