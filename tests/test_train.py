"""`train.py` as a user runs it: what it prints and writes, and what no kill can change."""

import collections
import csv
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

from absl.testing import flagsaver
import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf
import tf_slim as slim

import datasets
from models.digits import digits, digits_arg_scope
from towers.compat import mend_slim
from towers.errors import InvalidArgumentError, LogFileError
import train

TRAIN = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), 'train.py')
RUNNER = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'train_runner.py')
PATIENCE = 240  # seconds for what takes some on an idle machine

# One run that much is asked of. Everything that has a place to resume at is switched on: the order
# of the images crosses into a second epoch, they are shifted, there is dropout, Adam has slots and
# beta powers, the rate rises and falls, and weights are averaged.
STEPS = 30
FLAGS = ['--train_steps=%d' % STEPS, '--batch_size=100', '--augment_shift=1', '--eval_steps=7',
         '--log_every=5', '--summary_steps=10', '--average_decay=0.9', '--warmup_epochs=0.5',
         '--decay=exponential', '--decay_epochs=1', '--base_learning_rate=0.01', '--keep=99']
# And one on one tower, with all threads.
ONE_TOWER = ['--train_steps=12', '--batch_size=50', '--num_towers=1', '--augment_shift=1',
             '--optimizer=momentum', '--decay=cosine', '--clip_norm=1', '--reduction=mean',
             '--base_learning_rate=0.05', '--keep=99', '--log_every=4', '--summary_steps=0']


class Runner:
    """The process that forks runs of train.py."""

    def __init__(self, log):
        # Where a user has set nothing, train.py itself keeps TF's messages off the screen.
        environment = {name: value for name, value in os.environ.items()
                       if name != 'TF_CPP_MIN_LOG_LEVEL'}
        with open(str(log), 'w') as stderr:
            self.process = subprocess.Popen([sys.executable, RUNNER], stdin=subprocess.PIPE,
                                            stderr=stderr, env=environment)

    def start(self, folder, argv, before=None):
        return Run(self, folder, argv, before)

    def run(self, folder, argv, status=0, before=None):
        """A run to its end, which has to have that exit status."""
        run = self.start(folder, argv, before)
        assert run.status() == status, run.stdout + run.stderr
        return run


class Run:
    """One run of train.py; its output goes to a folder of its own beside `folder`."""

    def __init__(self, runner, folder, argv, before=None):
        number = 0
        while os.path.exists('%s.%d' % (folder, number)):
            number += 1
        self.output = '%s.%d' % (folder, number)
        os.makedirs(self.output)
        self.train_dir = str(folder)
        line = json.dumps({'argv': ['--train_dir=%s' % folder] + argv, 'output': self.output,
                           'before': before})
        runner.process.stdin.write(line.encode() + b'\n')
        runner.process.stdin.flush()
        wait_until(lambda: os.path.exists(os.path.join(self.output, 'pid')))
        self.pid = int(self._read('pid'))

    def has_ended(self):
        return os.path.exists(os.path.join(self.output, 'status'))

    def status(self):
        """Its exit status, or minus the signal that ended it."""
        wait_until(self.has_ended)
        return int(self._read('status'))

    def send(self, number):
        if not self.has_ended():
            os.kill(self.pid, number)

    @property
    def stdout(self):
        return self._read('stdout')

    @property
    def stderr(self):
        return without_noise(self._read('stderr'))

    def _read(self, name):
        if not os.path.exists(os.path.join(self.output, name)):
            return ''  # the process has not come so far yet
        with open(os.path.join(self.output, name)) as opened:
            return opened.read()


def without_noise(text):
    """What was written on stderr, without what TF itself says on some versions."""
    return ''.join(line for line in text.splitlines(True)
                   if not re.match(r'[IWE]0000 |WARNING: All log messages before absl::', line))


def wait_until(condition, seconds=PATIENCE, pause=0.005):
    deadline = time.time() + seconds
    while not condition():
        assert time.time() < deadline, 'waited for %d seconds' % seconds
        time.sleep(pause)


@pytest.fixture(scope='module')
def runner(tmp_path_factory):
    runner = Runner(tmp_path_factory.mktemp('runner') / 'stderr')
    yield runner
    runner.process.stdin.close()
    runner.process.wait()


@pytest.fixture(scope='module')
def reference(runner, tmp_path_factory):
    """The run with `FLAGS`, never interrupted."""
    folder = tmp_path_factory.mktemp('reference') / 'run'
    return runner.run(folder, FLAGS + ['--save_steps=3', '--export_dir=%s/export' % folder])


def values_of(folder, step):
    """Dict from the names in a checkpoint to arrays."""
    reader = tf.train.NewCheckpointReader('%s/model.ckpt-%d' % (folder, step))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def steps_saved(folder):
    if not os.path.exists(str(folder)):
        return []
    return sorted(int(name[len('model.ckpt-'):-len('.index')]) for name in os.listdir(str(folder))
                  if name.endswith('.index'))


def newest(folder):
    """The step that the state file names."""
    return int(tf.train.latest_checkpoint(str(folder)).rpartition('-')[2])


def names_that_differ(one, other):
    """Names of what is not in both, or not bit by bit the same."""
    return sorted(name for name in set(one) | set(other)
                  if name not in one or name not in other or one[name].dtype != other[name].dtype
                  or one[name].tobytes() != other[name].tobytes())


def metrics(folder):
    with open(os.path.join(str(folder), 'metrics.jsonl')) as log:
        return [json.loads(line, object_pairs_hook=collections.OrderedDict) for line in log]


def untimed(lines):
    """Lines of metrics.jsonl without what depends on the time of day."""
    return [[(name, value) for name, value in line.items()
             if name not in ('images_per_second', 'wall_time')] for line in lines]


def contents(folder):
    """Dict from the names in a folder to what is in these files."""
    found = {}
    for name in os.listdir(str(folder)):
        with open(os.path.join(str(folder), name), 'rb') as opened:
            found[name] = opened.read()
    return found


# ---- a run ---------------------------------------------------------------------------------------

def test_a_run_shows_its_plan_its_audit_and_its_result(reference):
    lines = reference.stdout.splitlines()
    assert lines[0] == '2 towers, batch 100 = 2 x 50'
    assert re.match(r'  0 +/cpu:0 +50 +regularization, batch-norm updates$', lines[2])
    assert re.match(r'  1 +/cpu:1 +50 +-$', lines[3])
    assert '  variables        14 (8 trainable), 58,634 parameters, 0.2 MB' in lines
    assert ('\n  learning rate    0.01, warm-up from 0 over 718 examples, x0.94 every 1,437 examples'
            in reference.stdout)
    assert 'audit: every promise kept' in lines
    accuracy = metrics(reference.train_dir)[-1]['test_accuracy']
    assert 'test accuracy  %.4f on 360 images' % accuracy in lines
    assert accuracy > 0.6
    assert re.match(r'speed +[\d,]+ images/s$', lines[-3])
    assert lines[-2:] == ['checkpoint     %s/model.ckpt-30' % reference.train_dir,
                          'SavedModel     %s/export/30' % reference.train_dir]


def test_a_run_reports_its_progress_in_plain_lines(reference):
    lines = reference.stderr.splitlines()
    assert [line.split('  ')[0] for line in lines] == [
        'step %d/30' % step for step in (1, 5, 7, 10, 14, 15, 20, 21, 25, 28, 30, 30)]
    assert re.match(r'step 5/30  epoch 0\.3  loss \d\.\d+  lr 0\.00\d+  ', lines[1])
    assert re.match(r'step 7/30  test accuracy 0\.\d+, loss \d\.\d+ on 360 examples$', lines[2])


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
            assert line['examples'] == seen and line['epoch'] == pytest.approx(seen / 1437, abs=1e-6)
            # The rate of a step is that of the examples before it.
            rate = 0.01 * min((seen - 100) / 718, 1) * 0.94 ** ((seen - 100) / 1437)
            assert line['learning_rate'] == pytest.approx(rate, rel=1e-6)
    assert lines[-1]['test_examples'] == 360
    assert [name for name in os.listdir(folder) if 'tfevents' in name]


@pytest.mark.slow
def test_with_no_flags_two_towers_learn_the_digits(tmp_path):
    environment = dict(os.environ, TF_CPP_MIN_LOG_LEVEL='3')
    done = subprocess.run([sys.executable, TRAIN], cwd=str(tmp_path), env=environment, check=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)
    assert done.stdout.startswith('2 towers, batch 100 = 2 x 50\n')
    accuracy = float(re.search(r'^test accuracy  (0\.\d{4}|1\.0000) on 360 images$', done.stdout,
                               re.MULTILINE).group(1))
    assert accuracy > 0.97
    # 30 epochs of 1,437 images.
    assert done.stdout.endswith('checkpoint     runs/digits/model.ckpt-432\n')
    assert newest(tmp_path / 'runs' / 'digits') == 432
    assert [line['step'] for line in metrics(tmp_path / 'runs' / 'digits')] == [
        100, 200, 300, 400, 432]


@pytest.mark.slow
def test_copies_on_every_tower_train_the_same_weights_and_resume_everywhere(runner, tmp_path):
    flags = ['--augment_shift=1', '--average_decay=0.9', '--base_learning_rate=0.01',
             '--summary_steps=3', '--save_steps=4', '--keep=99']
    copies = ['--variable_device=replicated']
    runner.run(tmp_path / 'plain', flags + ['--train_steps=9'])
    for steps, more in ((3, copies), (6, []), (9, copies + ['--all_reduce=collective',
                                                            '--audit_runtime'])):
        run = runner.run(tmp_path / 'mixed', flags + more + ['--train_steps=%d' % steps])
        assert ('variables on     every tower (2 copies), all-reduce by ' in run.stdout) == bool(more)
    assert 'BROKEN' not in run.stdout
    ours, theirs = values_of(tmp_path / 'mixed', 9), values_of(tmp_path / 'plain', 9)
    assert sorted(ours) == sorted(theirs)
    for name, expected in theirs.items():
        np.testing.assert_allclose(ours[name], expected, rtol=1e-4, atol=1e-5, err_msg=name)
    evaluated = runner.run(tmp_path / 'mixed', copies + ['--mode=eval'])
    assert re.search(r'^test accuracy  0\.\d{4} on 360 images$', evaluated.stdout, re.MULTILINE)


# ---- flags ---------------------------------------------------------------------------------------

def refusal(capsys, *argv):
    """The line on stderr and the exit status of flags that are refused when they are parsed."""
    with flagsaver.flagsaver(), pytest.raises(SystemExit) as ended:
        train.FLAGS.unparse_flags()
        train.parse_flags(['train.py'] + list(argv))
    assert ended.value.code == 2
    out, error = capsys.readouterr()
    assert out == '' and error.endswith('\n') and error.count('\n') == 1
    assert error.startswith('train.py: ')
    return error[len('train.py: '):-1]


@pytest.mark.parametrize('argv, text', [
    ('--num_towers=2 --devices=/cpu:0', '--num_towers and --devices both say how many towers there '
     'are: give one'),
    ('--train_steps=5 --train_epochs=1', '--train_steps and --train_epochs both say how long to '
     'train: give one'),
    ('--train_epochs=0', '--train_steps and --train_epochs are both 0: there is nothing to do'),
    ('--base_learning_rate=0', '--base_learning_rate=0: expected more than 0'),
    ('--decay=exponential', '--decay=exponential needs --decay_epochs'),
    ('--stop_at_accuracy=0.9', '--stop_at_accuracy is looked at when there is an evaluation: give '
     '--eval_steps'),
    ('--batch_norm_decay=-0.5', '--batch_norm_decay=-0.5: expected 0 to 1, or -1'),
    ('--average_decay=1', '--average_decay=1 would never follow the weights: give less'),
    ('--plan_only --audit_runtime', '--plan_only runs nothing, so there is nothing for '
     '--audit_runtime to check'),
    ('--momentum=0.5', '--momentum is of no use with --optimizer=adam: it goes with momentum or '
     'rmsprop'),
    ('--decay_epochs=2', '--decay_epochs is of no use with --decay=none: it goes with exponential '
     'or cosine'),
    ('--decay=cosine --decay_rate=0.5', '--decay_rate is of no use with --decay=cosine: it goes '
     'with exponential'),
    ('--predictions=a.csv', '--predictions is of no use with --mode=train: it goes with predict'),
    ('--mode=eval --audit_runtime', '--audit_runtime is of no use with --mode=eval: it goes with '
     'train'),
    ('--mode=predict --init_from=a', '--init_from is of no use with --mode=predict: it goes with '
     'train'),
    ('--mode=eval --loss_scale=8', '--loss_scale is of no use with --mode=eval: it goes with train'),
    ('--mode=eval --xla', '--xla is of no use with --mode=eval: it goes with train'),
    ('--loss_scale=inf', '--loss_scale=inf: expected a finite number'),
    ('--plan_only --variable_device=auto', '--variable_device=auto times steps of training, and '
     '--plan_only runs none'),
    ('--mode=eval --variable_device=auto', '--variable_device=auto times steps of training, and '
     '--mode=eval runs none'),
    ('--all_reduce=copy', '--all_reduce is of no use with --variable_device=: it goes with '
     'replicated or auto'),
    ('--train_epochs=nan', '--train_epochs=nan: expected a finite number'),
    ('--decay=cosine --decay_epochs=inf', '--decay_epochs=inf: expected a finite number'),
    ('--base_learning_rate=inf', '--base_learning_rate=inf: expected a finite number'),
    ('digits', "'digits' is no flag: flags begin with --")])
def test_flags_that_contradict_each_other(capsys, argv, text):
    assert refusal(capsys, *argv.split()) == text


@pytest.mark.parametrize('argv, text', [
    ('--batch_size=0', 'flag --batch_size=0: 0 is not a positive integer'),
    ('--batch_size=1.5', "flag --batch_size=1.5: invalid literal for int() with base 10: '1.5'"),
    ('--num_towers=-1', 'flag --num_towers=-1'),
    ('--weight_decay=-1', 'flag --weight_decay=-1'),
    ('--average_decay=1.5', 'flag --average_decay=1.5'),
    ('--seed=4294967296', 'flag --seed=4294967296'),
    ('--mode=test', 'flag --mode=test: value should be one of <train|eval|predict>'),
    ('--lr_scaling=double', 'flag --lr_scaling=double: value should be one of <none|sqrt|linear>'),
    ('--batchsize=100', "Unknown command line flag 'batchsize'. Did you mean: batch_size ?")])
def test_flags_that_make_no_sense(capsys, argv, text):
    assert refusal(capsys, *argv.split()).startswith(text)


def test_flags_that_are_good_are_taken(capsys):
    with flagsaver.flagsaver():
        train.FLAGS.unparse_flags()
        train.parse_flags(['train.py', '--optimizer=momentum', '--momentum=0.5', '--decay=cosine',
                           '--eval_steps=5', '--stop_at_accuracy=0.5', '--devices=/gpu:0,/gpu:2'])
        assert train.FLAGS.momentum == 0.5 and train.FLAGS.devices == '/gpu:0,/gpu:2'
        assert train.train_dir() == os.path.join('runs', 'digits')
    assert capsys.readouterr() == ('', '')


def test_help_is_grouped_and_fits_two_screens(capsys):
    with flagsaver.flagsaver(), pytest.raises(SystemExit) as ended:
        train.parse_flags(['train.py', '--helpshort'])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert len(lines) <= 100 and max(map(len, lines)) <= 100
    own = {flag.name for flag in train.FLAGS.flags_by_module_dict()['train']}
    assert own == set(sum(train.GROUPS.values(), []))
    for group, names in train.GROUPS.items():
        assert group + ':' in lines
        for name in names:
            assert len(re.findall(r'^  --%s ' % name, text, re.MULTILINE)) == 1


@pytest.mark.parametrize('argv, text', [
    ('--num_towers=4 --batch_size=10',
     '--batch_size=10 does not divide among 4 towers: give a multiple of 4'),
    ('--precision=fp16', "precision='fp16': TensorFlow %s has no rewrite to it that works on CPUs. "
     % tf.version.VERSION),
    ('--loss_scale=1e39', 'LossScale(initial=1e+39, '),
    ('--devices=/gpu:7', '/gpu:7 does not exist: TensorFlow sees no GPU here'),
    ('--devices=/cpu:0,/cpu:0', '/cpu:0 is named 2 times in devices='),
    ('--model=digit', "There is no network 'digit'. Did you mean digits? Those there are: "
     'alexnet_v2, digits, inception_resnet_v2, '),
    ('--dataset=mnist', "There is no data set 'mnist'; choose one of: digits, imagenet.")])
def test_what_there_is_not_is_refused_before_anything_is_built(runner, tmp_path, argv, text):
    run = runner.run(tmp_path / 'run', argv.split(), status=2)
    assert run.stderr.startswith('train.py: ' + text)
    assert run.stderr.count('\n') == 1 and run.stdout == ''
    assert not (tmp_path / 'run').exists()


def test_the_exit_status_as_a_shell_sees_it(tmp_path):
    done = subprocess.run(
        [sys.executable, TRAIN, '--batch_size=10', '--num_towers=4', '--train_dir=run'],
        cwd=str(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        universal_newlines=True, env=dict(os.environ, TF_CPP_MIN_LOG_LEVEL='3'))
    assert done.returncode == 2 and done.stdout == ''
    assert without_noise(done.stderr) == (
        'train.py: --batch_size=10 does not divide among 4 towers: give a multiple of 4\n')
    assert os.listdir(str(tmp_path)) == []


# In a quarter of the time: one residual block of each kind in place of 10, 20 and 9.
FEWER_BLOCKS = '''
import models.inception_resnet_v2 as network
repeat = network._repeat
network._repeat = lambda net, scope, times, *args, **kwargs: repeat(net, scope, 1, *args, **kwargs)
'''


@pytest.mark.slow
def test_the_plan_says_what_the_claim_says(runner, tmp_path):
    run = runner.run(tmp_path / 'run', [
        '--plan_only', '--model=inception_resnet_v2', '--num_towers=4', '--batch_size=400',
        '--base_learning_rate=0.001', '--lr_scaling=sqrt'], before=FEWER_BLOCKS)
    lines = run.stdout.splitlines()
    assert lines[0] == '4 towers, batch 400 = 4 x 100'
    assert [line.split()[:3] for line in lines[2:6]] == [
        [str(tower), '/cpu:%d' % tower, '100'] for tower in range(4)]
    assert ('  learning rate    0.002 = 0.001 x sqrt(4); AdamOptimizer steps on a sum (nearly) as '
            'on the mean') in lines
    assert 'audit: every promise kept' in lines
    assert run.stderr == '' and not (tmp_path / 'run').exists()


# ---- evaluation, prediction, export ---------------------------------------------------------------

@pytest.fixture(scope='module')
def predicted(runner, reference, tmp_path_factory):
    """The run of --mode=predict on the reference's checkpoint, and its rows."""
    table = str(tmp_path_factory.mktemp('predicted') / 'rows.csv')
    run = runner.run(reference.train_dir, ['--mode=predict', '--predictions=' + table,
                                           '--devices=/cpu:0', '--batch_size=400'])
    with open(table, newline='') as opened:
        return run, list(csv.DictReader(opened))


@pytest.fixture(scope='module')
def plain_logits(reference):
    """Logits of the test images by a plain program of slim; the checkpoint loads by its names."""
    mend_slim()
    images, _ = datasets.get_dataset('digits').load('test')
    with tf.Graph().as_default(), tf.Session() as session:
        with slim.arg_scope(digits_arg_scope()):
            logits, _ = digits(tf.constant(images), is_training=False)
        # The averages of the weights, as the reference evaluates and exports them.
        names = {variable.op.name + ('/ExponentialMovingAverage' if variable in
                                     tf.trainable_variables() else ''): variable
                 for variable in tf.global_variables()}
        assert len(names) == 14
        tf.train.Saver(names).restore(session, reference.train_dir + '/model.ckpt-30')
        return session.run(logits)


def test_evaluation_alone_is_that_at_the_end_of_training(runner, reference):
    before = contents_without_export(reference.train_dir)
    run = runner.run(reference.train_dir, ['--mode=eval', '--num_towers=3', '--batch_size=70'])
    lines = run.stdout.splitlines()
    accuracy = metrics(reference.train_dir)[-1]['test_accuracy']
    assert lines[-2:] == ['checkpoint     %s/model.ckpt-30, moving averages' % reference.train_dir,
                          'test accuracy  %.4f on 360 images' % accuracy]
    assert lines[-1] in reference.stdout.splitlines()
    assert run.stderr == ''
    assert contents_without_export(reference.train_dir) == before  # it only reads


def contents_without_export(folder):
    return {name: open(os.path.join(folder, name), 'rb').read() for name in os.listdir(folder)
            if name != 'export'}


def test_there_is_a_row_an_image(reference, predicted, plain_logits):
    run, rows = predicted
    _, labels = datasets.get_dataset('digits').load('test')
    assert list(rows[0]) == ['image', 'label', 'predicted', 'probability']
    assert [int(row['image']) for row in rows] == list(range(360))
    assert [int(row['label']) for row in rows] == labels.tolist()
    right = sum(row['label'] == row['predicted'] for row in rows)
    assert right / 360. == pytest.approx(metrics(reference.train_dir)[-1]['test_accuracy'],
                                         abs=1e-12)
    assert [int(row['predicted']) for row in rows] == plain_logits.argmax(1).tolist()
    likely = np.exp(plain_logits - plain_logits.max(1, keepdims=True))
    np.testing.assert_allclose([float(row['probability']) for row in rows],
                               (likely.max(1) / likely.sum(1)), atol=2e-6)
    assert run.stdout.endswith('rows.csv, 360 images\n')


def test_what_is_exported_loads_with_the_v1_loader(reference, plain_logits):
    images, _ = datasets.get_dataset('digits').load('test')
    with tf.Session() as session:
        model = tf.saved_model.load(session, ['serve'], reference.train_dir + '/export/30')
        signature = model.signature_def['serving_default']
        assert signature.method_name == 'tensorflow/serving/predict'
        assert list(signature.inputs) == ['images']
        assert sorted(signature.outputs) == ['classes', 'logits', 'probabilities']
        fetches = {name: info.name for name, info in signature.outputs.items()}
        outputs = session.run(fetches, {signature.inputs['images'].name: images})
        # No towers, and no devices but those that TF gives to saving and restoring.
        assert not [op.name for op in session.graph.get_operations() if 'tower' in op.name
                    or op.device and not op.name.startswith('save')]
    np.testing.assert_allclose(outputs['logits'], plain_logits, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(outputs['classes'], plain_logits.argmax(1))
    np.testing.assert_allclose(outputs['probabilities'].sum(1), np.ones(360), rtol=1e-5)
    assert sorted(os.listdir(reference.train_dir + '/export')) == ['30']


@pytest.mark.skipif(tf.version.VERSION < '2', reason='tf.saved_model.load of TF 2')
def test_what_is_exported_loads_with_the_loader_of_tf_2(reference, plain_logits, tmp_path):
    images, _ = datasets.get_dataset('digits').load('test')
    np.save(str(tmp_path / 'images.npy'), images)
    # In a process of its own, where TF 2 executes eagerly: tests here have a graph around them.
    subprocess.check_call([sys.executable, '-c', (
        'import sys, numpy as np, tensorflow as tf\n'
        'exported, images, logits = sys.argv[1:]\n'
        'serve = tf.saved_model.load(exported).signatures["serving_default"]\n'
        'np.save(logits, serve(images=tf.constant(np.load(images)))["logits"].numpy())'),
        reference.train_dir + '/export/30', str(tmp_path / 'images.npy'),
        str(tmp_path / 'logits.npy')])
    np.testing.assert_allclose(np.load(str(tmp_path / 'logits.npy')), plain_logits, rtol=1e-5,
                               atol=1e-5)


def test_nothing_to_evaluate_and_nowhere_to_write(runner, tmp_path):
    run = runner.run(tmp_path / 'none', ['--mode=eval'], status=1)
    assert run.stderr == ('train.py: %s/none holds no checkpoint: train first, or give the '
                          '--train_dir of a run.\n' % tmp_path)
    assert not (tmp_path / 'none').exists()
    with pytest.raises(LogFileError) as caught:
        train.opened(str(tmp_path / 'none' / 'rows.csv'))
    assert str(caught.value) == ('%s/none/rows.csv cannot be written: No such file or directory. '
                                 'Give another --predictions.' % tmp_path)


# ---- kills ---------------------------------------------------------------------------------------

# Names under which TF writes before it renames, and data without an index.
HALF_WRITTEN = re.compile(r'\.tempstate\d+$|^checkpoint\.tmp')


def half_written(folder):
    names = os.listdir(str(folder)) if os.path.exists(str(folder)) else []
    return [name for name in names if HALF_WRITTEN.search(name) or (
        '.data-' in name and name.split('.data-')[0] + '.index' not in names)]


def named_by_state_file(folder):
    """The step that the state file names, or None."""
    try:
        with open(os.path.join(str(folder), 'checkpoint')) as state:
            found = re.match(r'model_checkpoint_path: "model\.ckpt-(\d+)"', state.read())
    except FileNotFoundError:
        return None
    return found and int(found.group(1))


class Killer:
    """Starts a run again and again, and kills it each time at some moment of its own."""

    def __init__(self, runner, folder, argv, latest, seed):
        self.kills = collections.Counter()
        self.folder = folder
        self._latest = latest
        self._runner = runner
        self._argv = argv
        self._random = random.Random(seed)

    def kill(self, moment):
        """Kills a run at a moment; it must not have ended before that."""
        run = self._runner.start(self.folder, self._argv)
        getattr(self, '_wait_' + moment)(run)
        run.send(signal.SIGKILL)
        assert run.status() == -signal.SIGKILL, run.stdout + run.stderr
        kind = ('in data and index' if half_written(self.folder) else
                'before the state file' if max(steps_saved(self.folder), default=0) > (
                    named_by_state_file(self.folder) or 0) else moment)
        self.kills[kind] += 1

    def _wait_start(self, run):
        time.sleep(self._random.uniform(0, 1.5))

    def _wait_step(self, run):
        before = len(steps_saved(self.folder))
        more = self._random.randint(2, 3)
        self._wait(run, lambda: len(steps_saved(self.folder)) >= before + more)
        time.sleep(self._random.uniform(0, 0.03))

    def _wait_write(self, run):
        self._wait(run, lambda: len(steps_saved(self.folder)) > 1)
        before = len(steps_saved(self.folder))
        self._wait(run, lambda: len(steps_saved(self.folder)) > before)
        self._wait(run, lambda: half_written(self.folder))
        time.sleep(self._random.choice([0, 0, 0.001]))

    def _wait_state(self, run):
        before = len(steps_saved(self.folder))
        self._wait(run, lambda: len(steps_saved(self.folder)) > before + 1)

    def _wait_end(self, run):
        wait_until(lambda: named_by_state_file(self.folder) == STEPS or run.has_ended(), pause=0)

    def _wait(self, run, condition):
        # On a busy machine a run may be far ahead of what is seen of it: it must not end meanwhile.
        wait_until(lambda: condition() or run.has_ended() or max(
            steps_saved(self.folder), default=0) >= self._latest, pause=0)


@pytest.mark.slow
def test_a_run_that_is_killed_ends_as_one_that_is_not(runner, reference, tmp_path, capsys):
    folder = str(tmp_path / 'run')
    killer = Killer(runner, folder, FLAGS + ['--save_steps=1'], latest=STEPS - 8, seed=1)
    for moment in 'start write step state step write start write state end'.split():
        killer.kill(moment)
    end = runner.run(folder, FLAGS + ['--save_steps=1'])
    assert sum(killer.kills.values()) == 10
    assert killer.kills['in data and index'] + killer.kills['before the state file'] >= 1
    assert half_written(folder) == []
    assert '%s holds 30 steps already, and 30 were asked for: evaluating them. Another ' % folder \
        in end.stdout
    assert steps_saved(folder) == list(range(31))
    for step in steps_saved(reference.train_dir):
        assert names_that_differ(values_of(reference.train_dir, step), values_of(folder, step)) == []
    assert untimed(metrics(folder)) == untimed(metrics(reference.train_dir))
    accuracy, = re.findall('test accuracy .*', end.stdout)
    assert accuracy in reference.stdout
    with capsys.disabled():
        print(' [kills: %s] ' % ', '.join('%s %d' % item for item in sorted(killer.kills.items())),
              end='')


@pytest.mark.slow
def test_a_run_on_one_tower_with_all_threads_that_is_killed(runner, tmp_path):
    whole = runner.run(tmp_path / 'whole', ONE_TOWER + ['--save_steps=3'])
    assert whole.stdout.startswith('1 tower, batch 50 = 1 x 50\n')
    folder = str(tmp_path / 'run')
    killer = Killer(runner, folder, ONE_TOWER + ['--save_steps=1'], latest=8, seed=2)
    for moment in ('step', 'write', 'step'):
        killer.kill(moment)
    runner.run(folder, ONE_TOWER + ['--save_steps=1'])
    for step in (0, 3, 6, 9, 12):
        values = values_of(folder, step)
        assert 'Digits/conv1/weights/Momentum' in values
        assert names_that_differ(values_of(whole.train_dir, step), values) == []
    assert untimed(metrics(folder)) == untimed(metrics(whole.train_dir))


# ---- the seed ------------------------------------------------------------------------------------

def test_one_seed_is_one_run_whatever_is_watched(runner, reference, tmp_path):
    runner.run(tmp_path / 'run', FLAGS + ['--save_steps=50', '--summary_steps=0', '--log_every=30',
                                          '--eval_steps=0', '--nocheck_numerics'])
    assert steps_saved(tmp_path / 'run') == [0, 30]
    for step in (0, 30):
        assert names_that_differ(values_of(reference.train_dir, step),
                                 values_of(tmp_path / 'run', step)) == []


def test_another_seed_is_another_run(runner, reference, tmp_path):
    runner.run(tmp_path / 'run', [flag for flag in FLAGS if 'train_steps' not in flag]
               + ['--seed=2', '--train_steps=1', '--save_steps=1'])
    differ = names_that_differ(values_of(reference.train_dir, 0), values_of(tmp_path / 'run', 0))
    # All that is not made of zeros or ones.
    assert differ == sorted('Digits/%s/weights%s' % (layer, what)
                            for layer in ('conv1', 'conv2', 'conv3', 'logits')
                            for what in ('', '/ExponentialMovingAverage'))


# ---- loss scale, XLA, and where variables live --------------------------------------------------

def test_a_step_that_overflows_is_skipped_counted_and_resumed_from(runner, tmp_path):
    flags = ['--loss_scale=3e38', '--batch_size=50', '--save_steps=1', '--log_every=1',
             '--summary_steps=0', '--keep=99', '--augment_shift=1']
    whole, parts = tmp_path / 'whole', tmp_path / 'parts'
    run = runner.run(whole, flags + ['--train_steps=6'])
    lines = metrics(whole)
    skipped = [line['skipped_steps'] for line in lines]
    assert skipped[0] == 1 and skipped == sorted(skipped) and skipped[-1] < 6
    halved = [np.float32('3e38') / 2 ** count for count in [0] + skipped[:-1]]
    assert [line['loss_scale'] for line in lines] == pytest.approx(halved, rel=1e-6)
    assert re.search(r'^step 1/6 .* loss_scale 3e\+38  skipped_steps 1', run.stderr, re.MULTILINE)
    moved = names_that_differ(values_of(whole, 0), values_of(whole, 1))
    assert [name for name in moved if 'moving_' not in name] == [
        'examples_seen', 'global_step', 'towers/loss_scale', 'towers/skipped_steps']
    final = values_of(whole, 6)
    assert final['towers/skipped_steps'] == skipped[-1]
    assert final['towers/good_steps'] == 6 - skipped[-1]  # those that overflow come first
    runner.run(parts, flags + ['--train_steps=3'])
    runner.run(parts, flags + ['--train_steps=6'])
    assert names_that_differ(final, values_of(parts, 6)) == []
    assert [line['skipped_steps'] for line in metrics(parts)] == skipped


def test_a_run_compiled_by_xla(runner, tmp_path):
    flags = ['--train_steps=6', '--batch_size=20', '--log_every=3', '--summary_steps=0']
    run = runner.run(tmp_path / 'xla', flags + ['--xla', '--audit_runtime'])
    assert re.search(r'note    XLA compiled [1-9]\d* clusters for /cpu:0, [1-9]\d* clusters for '
                     r'/cpu:1$', run.stdout, re.MULTILINE)
    runner.run(tmp_path / 'plain', flags)
    for ours, plain in zip(metrics(tmp_path / 'xla'), metrics(tmp_path / 'plain')):
        assert ours['loss'] == pytest.approx(plain['loss'], rel=1e-3)  # Adam makes noise grow


def test_auto_times_placements_once_and_the_run_keeps_to_its_choice(runner, tmp_path):
    flags = ['--batch_size=20', '--summary_steps=0', '--save_steps=2', '--variable_device=auto']
    folder = tmp_path / 'run'
    run = runner.run(folder, flags + ['--train_steps=2'])
    table = run.stdout.splitlines()[:3]
    assert re.match(r'variables on (/cpu:0|balanced): ', table[0])
    assert re.match(r'  /cpu:0 +[\d.]+ ms a step \([\d.]+ to [\d.]+\)$', table[1])
    assert re.match(r'  balanced +[\d.]+ ms a step \([\d.]+ to [\d.]+\)$', table[2])
    # Whatever it was: as if it had been the other one.
    with open(str(folder / 'variable_device.json')) as opened:
        record = json.load(opened)
    taken = record['variable_device']
    assert {'/device:CPU:0': '/cpu:0'}.get(taken, taken) == table[0].split()[2].rstrip(':')
    record['variable_device'] = 'balanced'
    (folder / 'variable_device.json').write_text(json.dumps(record))
    run = runner.run(folder, flags + ['--train_steps=4'])
    assert run.stdout.startswith('variables on balanced: as this run began, see %s/variable_device'
                                 '.json\n' % folder)
    assert '  variables on     balanced over /cpu:0 (' in run.stdout
    # On CPUs sums are the same wherever they are.
    runner.run(tmp_path / 'other', flags[:-1] + ['--train_steps=4'])
    assert names_that_differ(values_of(folder, 4), values_of(tmp_path / 'other', 4)) == []


# ---- the number of towers ------------------------------------------------------------------------

def test_a_run_goes_on_with_another_number_of_towers(runner, tmp_path):
    folder = tmp_path / 'run'
    flags = ['--batch_size=20', '--log_every=1', '--save_steps=4', '--summary_steps=0',
             '--base_learning_rate=0.003']
    for part, towers in enumerate((1, 4, 1)):
        run = runner.run(folder, flags + ['--num_towers=%d' % towers,
                                          '--train_steps=%d' % (8 * part + 8)])
        assert run.stdout.startswith(['1 tower, batch 20 = 1 x 20\n',
                                      '4 towers, batch 20 = 4 x 5\n'][towers == 4])
        if part:
            assert 'going on from %s/model.ckpt-%d\n' % (folder, 8 * part) in run.stdout
    values = values_of(folder, 24)
    assert values['global_step'] == 24 and values['examples_seen'] == 480
    lines = metrics(folder)
    assert [line['step'] for line in lines] == list(range(1, 25))
    assert [line['examples'] for line in lines] == list(range(20, 500, 20))
    losses = [line['loss'] for line in lines]
    assert np.mean(losses[8:16]) < np.mean(losses[:8])
    assert np.mean(losses[16:]) < np.mean(losses[8:16])


def test_a_run_starts_from_what_fits_of_another(runner, reference, tmp_path):
    """Adam's first step is as long as the rate, and this rate is below what float32 resolves."""
    folder = tmp_path / 'run'
    flags = ['--init_from=%s' % reference.train_dir, '--base_learning_rate=1e-12', '--batch_size=20',
             '--augment_shift=1', '--save_steps=1']
    run = runner.run(folder, flags + ['--train_steps=1'])
    assert ('\nfrom %s/model.ckpt-30: took 14 of 14 variables (Digits: 14)\n  of no use here: '
            % reference.train_dir) in run.stdout
    whole, started = values_of(reference.train_dir, 30), values_of(folder, 0)
    taken = [name for name in started if name.startswith('Digits/') and 'Adam' not in name]
    assert len(taken) == 14
    for name in taken:
        assert started[name].tobytes() == whole[name].tobytes(), name
    assert started['global_step'] == 0 and started['examples_seen'] == 0
    assert not started['Digits/conv1/weights/Adam'].any()
    for name in taken:
        if name.endswith('weights'):
            np.testing.assert_allclose(values_of(folder, 1)[name], whole[name], rtol=0, atol=1e-10)
    # Started again, it goes on from its own checkpoint.
    run = runner.run(folder, flags + ['--train_steps=2'])
    assert 'going on from %s/model.ckpt-1\n' % folder in run.stdout and 'took' not in run.stdout


# ---- stops ---------------------------------------------------------------------------------------

LONG = ['--train_steps=1000000', '--batch_size=20', '--log_every=2', '--save_steps=1000000',
        '--summary_steps=0']


def under_way(runner, folder, argv=(), lines=1, before=None):
    """A long run that has written so many lines."""
    run = runner.start(folder, LONG + list(argv), before)
    log = os.path.join(str(folder), 'metrics.jsonl')
    wait_until(lambda: run.has_ended() or os.path.exists(log) and len(metrics(folder)) >= lines)
    assert not run.has_ended(), run.stderr
    return run


def test_signals_end_a_run_in_good_order(runner, tmp_path):
    folder = tmp_path / 'run'
    last = 0
    for number, name in ((signal.SIGTERM, 'SIGTERM'), (signal.SIGINT, 'SIGINT')):
        run = under_way(runner, folder, lines=last // 2 + 2)
        if not last:
            assert_second_run_is_refused(runner, folder, run)
        run.send(number)
        assert run.status() == 128 + number
        step = newest(folder)
        assert step > last
        assert run.stderr.count('\n%s: finishing this step and saving; once more to stop at once\n'
                                % name) == 1
        lines = run.stdout.splitlines()
        assert lines[-1] == 'checkpoint     %s/model.ckpt-%d' % (folder, step)
        # There was no time to evaluate, and metrics.jsonl has what a run has that goes on.
        assert 'test accuracy' not in run.stdout + run.stderr
        assert [line['step'] for line in metrics(folder)] == list(range(2, step + 1, 2))
        assert values_of(folder, step)['examples_seen'] == 20 * step
        if last:
            assert 'going on from %s/model.ckpt-%d' % (folder, last) in lines
        last = step
    assert steps_saved(folder)[0] == 0 and len(steps_saved(folder)) == 3


def assert_second_run_is_refused(runner, folder, first):
    """Another process on the same folder, while the first one is held still."""
    first.send(signal.SIGSTOP)
    try:
        before = contents(folder)
        second = runner.run(folder, LONG, status=1)
        assert re.match(
            r'train\.py: %s is in use by process %d on \S+, since [-\d]+ [:\d]+\. Two runs in one '
            r"directory would overwrite and delete each other's checkpoints; nothing was written\. "
            r'Wait for that run, end it, or give this one another directory\.\n$'
            % (re.escape(str(folder)), first.pid), second.stderr)
        assert contents(folder) == before
    finally:
        first.send(signal.SIGCONT)


# Every save but the first takes a minute.
SLOW_SAVE = '''
import time
from towers.checkpoint_hook import CheckpointHook
save = CheckpointHook._save
def slowly(self, session, step):
    if step:
        print('saving', step, flush=True)
        time.sleep(60)
    return save(self, session, step)
CheckpointHook._save = slowly
'''


def test_a_second_signal_ends_a_run_at_once(runner, tmp_path):
    run = under_way(runner, tmp_path / 'run', before=SLOW_SAVE)
    run.send(signal.SIGTERM)
    wait_until(lambda: 'saving' in run.stdout)
    asked = time.time()
    run.send(signal.SIGINT)
    assert run.status() == 128 + signal.SIGINT
    assert time.time() - asked < 20
    assert newest(tmp_path / 'run') == 0


@pytest.mark.slow
def test_a_signal_during_the_last_save_does_not_cut_it_short(runner, tmp_path):
    folder = tmp_path / 'run'
    run = runner.start(folder, ['--train_steps=2', '--batch_size=20'],
                       before=SLOW_SAVE.replace('60', '2'))
    wait_until(lambda: run.has_ended() or 'saving' in run.stdout)
    run.send(signal.SIGTERM)
    assert run.status() == 128 + signal.SIGTERM
    assert newest(folder) == 2


def test_a_run_that_finds_a_nan_says_where_and_saves_nothing_of_it(runner, tmp_path):
    folder = tmp_path / 'run'
    run = runner.run(folder, ['--base_learning_rate=1e30', '--save_steps=1', '--batch_size=20',
                              '--log_every=1', '--train_steps=20', '--eval_steps=1',
                              '--export_dir=%s/export' % folder], status=1)
    found = re.search(
        r'^train\.py: the loss of tower [01] is (NaN|Inf) in step (\d+)\. Nothing of it was saved\. '
        r'Look at the learning rate, at the inputs of that step, and at logarithms, divisions and '
        r'square roots of 0 in the model\.\n\Z', run.stderr, re.MULTILINE)
    assert found, run.stderr
    step = int(found.group(2))
    assert 2 <= step < 20
    assert newest(folder) == step - 1 == steps_saved(folder)[-1]
    assert values_of(folder, step - 1)['global_step'] == step - 1
    assert half_written(folder) == []
    assert [line['step'] for line in metrics(folder)] == list(range(1, step))
    assert 'checkpoint' not in run.stdout and not (folder / 'export').exists()


def test_a_run_stops_at_an_accuracy_and_stays_there(runner, tmp_path):
    folder = tmp_path / 'run'
    flags = ['--stop_at_accuracy=0.5', '--eval_steps=8', '--train_steps=1000',
             '--base_learning_rate=0.01', '--summary_steps=0', '--save_steps=1000']
    run = runner.run(folder, flags)
    lines = metrics(folder)
    accuracies = [line['test_accuracy'] for line in lines]
    assert accuracies[-1] >= 0.5 and max(accuracies[:-1] or [0]) < 0.5
    step = 8 * len(accuracies)
    assert [line['step'] for line in lines] == list(range(8, step + 1, 8))
    assert newest(folder) == step < 1000
    result = 'test accuracy  %.4f on 360 images' % accuracies[-1]
    assert run.stdout.splitlines()[-1] == 'checkpoint     %s/model.ckpt-%d' % (folder, step)
    assert result in run.stdout.splitlines()
    # Started again (it may have been killed just before its end), it is over.
    before = contents(folder)
    again = runner.run(folder, flags)
    assert result in again.stdout.splitlines()
    assert again.stdout.splitlines()[-1] == run.stdout.splitlines()[-1]
    after = contents(folder)
    assert {name for name in after if after[name] != before.get(name)} <= {'run.lock'}


# ---- checkpoints that cannot be gone on from -------------------------------------------------------

def test_a_checkpoint_of_another_model_is_refused(runner, tmp_path):
    folder = tmp_path / 'run'
    folder.mkdir()
    with tf.Session() as session:
        tf.get_variable('Other/weights', [3, 3, 1, 32])
        tf.get_variable('Digits/conv1/weights', [5, 5, 1, 32])
        tf.train.get_or_create_global_step()
        session.run(tf.global_variables_initializer())
        tf.train.Saver().save(session, str(folder / 'model.ckpt'), 5, write_meta_graph=False)
    before = contents(folder)
    run = runner.run(folder, ['--train_steps=9', '--batch_size=20'], status=1)
    assert run.stderr.startswith(
        'train.py: the checkpoint %s/model.ckpt-5 is of another model: ' % folder)
    assert 'another shape: Digits/conv1/weights ([5, 5, 1, 32] there, [3, 3, 1, 32] here)' \
        in run.stderr
    assert 'only in the checkpoint: Other/weights. Nothing was changed.' in run.stderr
    assert run.stderr.count('\n') == 1
    after = contents(folder)
    assert after.pop('run.lock') and after == before


def test_a_damaged_newest_checkpoint_is_named_and_passed_over_when_told(runner, reference, tmp_path):
    folder = tmp_path / 'run'
    shutil.copytree(reference.train_dir, str(folder))
    data = folder / 'model.ckpt-30.data-00000-of-00001'
    data.write_bytes(data.read_bytes()[:-1000])
    before = {name: (folder / name).read_bytes() for name in os.listdir(str(folder))
              if name not in ('export', 'run.lock')}
    flags = FLAGS + ['--save_steps=3']
    run = runner.run(folder, flags, status=1)
    assert run.stderr.startswith('train.py: %s/model.ckpt-30 is damaged: model.ckpt-30.data-' % folder)
    assert run.stderr.endswith(
        'The one to go on from is %s/model.ckpt-27 (step 27), which is whole: --recover '
        '(recover=True) does so. Or bring the files back from a copy.\n' % folder)
    assert before == {name: (folder / name).read_bytes() for name in os.listdir(str(folder))
                      if name not in ('export', 'run.lock')}
    run = runner.run(folder, flags + ['--recover'])
    assert 'passed over %s/model.ckpt-30 is damaged' % folder in run.stdout
    assert 'going on from %s/model.ckpt-27\n' % folder in run.stdout
    assert names_that_differ(values_of(reference.train_dir, 30), values_of(folder, 30)) == []
    assert untimed(metrics(folder)) == untimed(metrics(reference.train_dir))


# ---- comparing runs ------------------------------------------------------------------------------

def rate_of(*argv):
    """The peak rate of flags, on two towers unless they say otherwise."""
    with flagsaver.flagsaver():
        train.FLAGS.unparse_flags()
        train.parse_flags(['train.py'] + list(argv))
        return train.make_learning_rate(train.FLAGS.num_towers, 1437, 10).peak


def test_the_rate_grows_with_the_batch_it_is_meant_for():
    assert rate_of('--lr_scaling=linear') == pytest.approx(0.002)
    assert rate_of('--lr_scaling=linear', '--base_batch_size=25') == pytest.approx(0.004)
    assert rate_of('--lr_scaling=sqrt', '--base_batch_size=25', '--num_towers=1') == (
        pytest.approx(0.002))
    with pytest.raises(InvalidArgumentError, match='--batch_size=100 is no multiple of '
                                           '--base_batch_size=30'):
        rate_of('--base_batch_size=30')


def test_runs_of_one_seed_begin_alike_and_see_the_same_on_any_number_of_towers(runner, tmp_path):
    found = []
    for name, argv in (('one', ['--num_towers=1', '--batch_size=20', '--train_steps=8']),
                       ('four', ['--num_towers=4', '--batch_size=80', '--train_steps=2']),
                       ('seed', ['--num_towers=1', '--batch_size=20', '--train_steps=8',
                                 '--seed=2'])):
        argv = argv + ['--fingerprint', '--log_every=%d' % (int(argv[2].split('=')[1]) // 2),
                       '--summary_steps=0']
        folder = tmp_path / name
        # Stopped half-way and gone on with: the checksum counts on from where it was.
        half = [flag if not flag.startswith('--train_steps') else
                '--train_steps=%d' % (int(flag.split('=')[1]) // 2) for flag in argv]
        runner.run(folder, half)
        runner.run(folder, argv)
        lines = metrics(folder)
        assert lines[0]['step'] == 0 and lines[-1]['examples'] == 160
        found.append((lines[0]['initial_weights'],
                      [line['examples_checksum'] for line in lines[1:]]))
    assert len(found[0][1]) == 2
    assert found[0] == found[1]
    assert found[0][0] != found[2][0] and found[0][1][0] != found[2][1][0]
