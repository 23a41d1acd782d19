"""Flags of `train.py`: which are refused, with what words, and what the good ones make."""

import os
import re
import subprocess
import sys

from absl.testing import flagsaver
import pytest
import tensorflow.compat.v1 as tf

from train_runs import TRAIN, without_noise
from towers.errors import InvalidArgumentError
import train


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
    ('--variable_device=/gpu:0', '/gpu:0 does not exist: TensorFlow sees no GPU here'),
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
