"""Flags of `train.py`: which are refused, with what words, and what the good ones make."""

import re

from absl.testing import flagsaver
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.errors import InvalidArgumentError
from towers.placement.devices import check_variable_device
from trainer import flags
from trainer.command_line import in_flags, parse_flags
from trainer.contradictions import contradiction, without_effect
from trainer.flags import FLAGS, GROUPS, train_dir
from trainer.optimizer import clip, make_learning_rate
from trainer.resuming import RESUMING, run_settings


def refusal(capsys, *argv):
    """The line on stderr and the exit status of flags that are refused when they are parsed."""
    with flagsaver.flagsaver(), pytest.raises(SystemExit) as ended:
        FLAGS.unparse_flags()
        parse_flags(['train.py'] + list(argv))
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
    ('--mode=predict --predictions=', '--predictions is empty: name a file to write'),
    ('--export_dir=/dev/null/x', '--export_dir=/dev/null/x cannot be written to: name a folder'),
    ('--decay=exponential', '--decay=exponential needs --decay_epochs'),
    ('--stop_at_accuracy=0.9', '--stop_at_accuracy is looked at when there is an evaluation: give '
     '--eval_steps'),
    ('--batch_norm_decay=-0.5', '--batch_norm_decay=-0.5: expected 0 to 1, or -1'),
    ('--micro_batches=4 --accumulate=2', "--micro_batches=4 and --accumulate=2: a pipeline adds up "
     'the gradients of its micro-batches, too: give --micro_batches=8 alone'),
    ('--average_decay=1', '--average_decay=1 would never follow the weights: give less'),
    ('--plan_only --audit_runtime', '--plan_only runs nothing, so there is nothing for '
     '--audit_runtime to check'),
    ('--momentum=0.5', '--momentum is of no use with --optimizer=adam: it goes with momentum or '
     'rmsprop or lars'),
    ('--mode=diagnose --deterministic', '--mode=diagnose tells the time in a step, which TensorFlow '
     'refuses with --deterministic: leave it out'),
    ('--model=a:b --dataset=c:d --weight_decay=0.1', '--weight_decay is of no use with --model=a:b: '
     'it goes with a network by name'),
    ('--profile_steps=100', '--profile_steps=100: expected two steps, the first one above 1 and '
     'below the second, such as 100,105'),
    ('--profile_steps=1,5', '--profile_steps=1,5: expected two steps, the first one above 1 and '
     'below the second, such as 100,105'),
    ('--profile_steps=9,9', '--profile_steps=9,9: expected two steps, the first one above 1 and '
     'below the second, such as 100,105'),
    ('--optimizer=lars', '--optimizer=lars adds its decay to the gradient of the mean loss, and '
     '--reduction=sum multiplies that by the towers: give --reduction=mean'),
    ('--decay_epochs=2', '--decay_epochs is of no use with --decay=none: it goes with exponential '
     'or cosine'),
    ('--decay=cosine --decay_rate=0.5', '--decay_rate is of no use with --decay=cosine: it goes '
     'with exponential'),
    ('--predictions=a.csv', '--predictions is of no use with --mode=train: it goes with predict'),
    ('--mode=eval --audit_runtime', '--audit_runtime is of no use with --mode=eval: it goes with '
     'train'),
    ('--mode=predict --init_from=a', '--init_from is of no use with --mode=predict: it goes with '
     'train'),
    ('--mode=eval --loss_scale=8',
     '--loss_scale is of no use with --mode=eval: it goes with train or memory'),
    ('--mode=eval --xla', '--xla is of no use with --mode=eval: it goes with train or memory'),
    ('--plan_only --variable_device=auto', '--variable_device=auto times steps of training, and '
     '--plan_only runs none'),
    ('--mode=eval --variable_device=auto', '--variable_device=auto times steps of training, and '
     '--mode=eval runs none'),
    ('--all_reduce=copy', '--all_reduce is of no use with --variable_device=: it goes with '
     'replicated or auto'),
    ('--mode=diagnose --plan_only', '--mode=diagnose makes no plan: leave out --plan_only'),
    ('--plan_only --export_dir=a', '--plan_only runs nothing, so there is nothing for --export_dir '
     'to write'),
    ('--variable_device=auto --batch_size=auto', '--variable_device=auto times steps of a batch, '
     'and --batch_size=auto finds the batch that fits with the variables in their place: give one '
     'of the two'),
    ('--recompute=,', "--recompute=, names nothing: give 'auto', or names"),
    ('--schedule=all_forward', '--schedule is of no use with --micro_batches=1: it orders several'),
    ('--cluster=ring', '--cluster=ring does not say which machines: set TF_CONFIG, or give '
     '--worker_hosts, --job_name and --task_index; on one machine, python -m towers.launch starts '
     'all processes'),
    ('--cluster=ps', '--cluster=ps does not say which machines: set TF_CONFIG, or give '
     '--worker_hosts, --ps_hosts, --job_name and --task_index; on one machine, python -m '
     'towers.launch --ps=1 starts all processes'),
    ('--train_epochs=nan', '--train_epochs=nan: expected a finite number'),
    ('--base_learning_rate=nan', '--base_learning_rate=nan: expected a finite number'),
    ('digits', "'digits' is no flag: flags begin with --")])
def test_flags_that_contradict_each_other(capsys, argv, text):
    assert refusal(capsys, *argv.split()) == text


@pytest.mark.parametrize('argv, text', [
    ('--batch_size=abc', "flag --batch_size=abc: expected a whole number, or 'auto'"),
    ('--batch_size=0', 'flag --batch_size=0: 0 is not an integer in the range [1, 1000000]'),
    ('--decay=cosine --decay_epochs=inf', 'flag --decay_epochs=inf: inf is not a number in the '
     'range [0, 1000000]'),
    ('--image_size=100000', 'flag --image_size=100000: 100000 is not an integer in the range '
     '[0, 4096]'),
    ('--train_epochs=1e300', 'flag --train_epochs=1e300: 1e+300 is not a number in the range '
     '[0, 1000000]'),
    ('--train_steps=100000000000000000000', 'flag --train_steps=100000000000000000000: '
     '100000000000000000000 is not an integer in the range [0, 1000000000000]'),
    ('--num_towers=1000000', 'flag --num_towers=1000000: 1000000 is not an integer in the range '
     '[1, 10000]'),
    ('--loss_scale=1e39', 'flag --loss_scale=1e39: 1e+39 is not a number in the range [0, 3e+38]'),
    ('--batch_size=1.5', 'flag --batch_size=1.5: expected a whole number'),
    ('--batch_size=nan', 'flag --batch_size=nan: expected a whole number'),
    ('--momentum=much', 'flag --momentum=much: expected a number'),
    ('--xla=7', 'flag --xla=7: expected true or false'),
    ('--num_towers=-1', 'flag --num_towers=-1'),
    ('--weight_decay=-1', 'flag --weight_decay=-1'),
    ('--average_decay=1.5', 'flag --average_decay=1.5'),
    ('--seed=4294967296', 'flag --seed=4294967296'),
    ('--mode=test', 'flag --mode=test: value should be one of '
                    '<train|eval|predict|check_data|diagnose|memory>'),
    ('--lr_scaling=double', 'flag --lr_scaling=double: value should be one of <none|sqrt|linear>'),
    ('--train_dir=caf\udce9', r"--train_dir='caf\udce9' is no UTF-8, and TensorFlow opens no other "
     'names: give another'),
    ('--export_dir=caf\udce9', r"--export_dir='caf\udce9' is no UTF-8"),
    ('--init_from=caf\udce9', r"--init_from='caf\udce9' is no UTF-8"),
    ('--train_dir=a\0b', r"--train_dir='a\x00b' has a NUL in it, as no path has: give another"),
    ('--data_dir=gs://a/b', '--data_dir=gs://a/b is no path of this machine, and --init_from and '
     '--export_dir alone take others: give one, such as that where it is mounted'),
    ('--train_dir=file://a/b', '--train_dir=file://a/b is no path of this machine, '),
    ('--init_from=nothing://a/b', '--init_from=nothing://a/b cannot be reached: File system scheme '
     "'nothing' not implemented"),
    ('--batchsize=100', "Unknown command line flag 'batchsize'. Did you mean: batch_size ?")])
def test_flags_that_make_no_sense(capsys, argv, text):
    assert refusal(capsys, *argv.split()).startswith(text)


def test_paths_are_those_that_a_shell_would_make_of_them(monkeypatch):
    monkeypatch.setenv('HOME', '/home/me')
    with flagsaver.flagsaver():
        FLAGS.unparse_flags()
        parse_flags(['train.py', '--train_dir=~/run', '--init_from=file:///a/~b'])
        assert (train_dir(), FLAGS.init_from) == ('/home/me/run', '/a/~b')


def test_every_number_has_a_most(capsys):
    for name in sum(GROUPS.values(), []):
        if isinstance(FLAGS[name].default, (int, float)) and not isinstance(
                FLAGS[name].default, bool):
            for value in ('1e300', str(10 ** 40)):
                assert refusal(capsys, '--%s=%s' % (name, value)).startswith('flag --%s=' % name)


def test_the_most_of_each_number_fits_into_what_tensorflow_counts_with():
    assert flags.MOST_STEPS * flags.MOST_EXAMPLES < 2 ** 63
    assert flags.MOST_EPOCHS * 1300000 + flags.MOST_EXAMPLES < 2 ** 63  # ImageNet
    assert flags.MOST_CHECKPOINTS < 2 ** 31
    assert np.isfinite(np.float32(flags.MOST_FLOAT))


@pytest.mark.parametrize('text, ours', [
    ("/gpu:1 does not exist: no GPU. Name another device, or pass resolve_devices(…, check=False) to "
     'build the graph for another machine.',
     '/gpu:1 does not exist: no GPU. Name another device, or see its plan with --plan_only.'),
    ("precision='fp16': expected", '--precision=fp16: expected'),
    ('devices=5, but', '--num_towers=5, but'),
    ('xla=True: the model has', '--xla=True: the model has'),
    ('Got weight_decay=-1.0, expected a number', 'Got --weight_decay=-1.0, expected a number'),
    ('all_reduce=\'nccl\' needs', '--all_reduce=nccl needs'),
    ("VariablePlacement('replicated'), and", '--variable_device=replicated, and'),
    ('--seed=3, was 1', '--seed=3, was 1'),
    ('runs/seed=1/model.ckpt-3 is damaged', 'runs/seed=1/model.ckpt-3 is damaged'),
    ('seed=1/model.ckpt-3 is damaged', 'seed=1/model.ckpt-3 is damaged'),
    ('whole: --recover (recover=True) does so.', 'whole: --recover does so.'),
    ('with --init_from=a/b (towers.init_from).', 'with --init_from=a/b.'),
    ('delete it to choose anew, or name a variable_device.',
     'delete it to choose anew, or name a --variable_device.'),
    ('Set it, or give create_aux_logits=False.', 'Set it, or give --aux_loss_weight=0.'),
    ("Use f(soft_placement=3).", "Use f(soft_placement=3).")])
def test_errors_speak_of_flags(text, ours):
    assert in_flags(text) == ours


def test_what_a_run_that_goes_on_makes_of_each_flag():
    """Each flag is in one class; a new one has to be put into one."""
    own = [flag.name for flag in FLAGS.flags_by_module_dict()['trainer.flags']]
    classed = sum(RESUMING.values(), [])
    assert sorted(classed) == sorted(own)
    assert set(RESUMING) == {None, 'harmless', 'changes the run', 'state'}


@pytest.mark.parametrize('argv, kind', [
    ([], 'harmless'), (['--decay=cosine'], 'changes the run'),
    (['--decay=cosine', '--decay_epochs=3'], 'harmless')])
def test_a_longer_run_is_another_one_only_where_the_rate_falls_until_its_end(argv, kind, tmp_path):
    def settings(*argv):
        with flagsaver.flagsaver():
            FLAGS.unparse_flags()
            parse_flags(['train.py'] + list(argv))
            return run_settings(FLAGS.batch_size)
    for name in ('train_steps', 'train_epochs'):
        settings('--%s=5' % name, *argv).begin(str(tmp_path))
        (difference,), problem = settings('--%s=9' % name, *argv).compare(str(tmp_path))
        assert problem is None and re.match(
            r'--%s=9(\.0)?, was 5(\.0)?$' % name, difference.text)
        assert difference.kind == kind


def test_clipping_is_by_the_norm_of_all_gradients():
    with flagsaver.flagsaver():
        FLAGS.unparse_flags()
        parse_flags(['train.py', '--clip_norm=2.5'])
        first, second = clip([(tf.constant([3.]), 'w'), (tf.constant([0., 4.]), 'b')])
    with tf.Session() as session:
        assert [each.tolist() for each in session.run([first[0], second[0]])] == [[1.5], [0., 2.]]
    assert (first[1], second[1]) == ('w', 'b')


def test_help_is_grouped_and_fits_three_screens(capsys):
    with flagsaver.flagsaver(), pytest.raises(SystemExit) as ended:
        parse_flags(['train.py', '--helpshort'])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert len(lines) <= 150 and max(map(len, lines)) <= 100
    own = {flag.name for flag in FLAGS.flags_by_module_dict()['trainer.flags']}
    assert own == set(sum(GROUPS.values(), []))
    for group, names in GROUPS.items():
        assert group + ':' in lines
        for name in names:
            assert len(re.findall(r'^  --%s ' % name, text, re.MULTILINE)) == 1


WHAT_THERE_IS_NOT = [
    ('--num_towers=4 --batch_size=10',
     '--batch_size=10 does not divide among 4 towers: give a multiple of 4'),
    ('--shares=3,1,a', "shares=[3, 1, 'a'] for 2 towers: expected a list with a whole number"),
    ('--shares=3,2 --batch_size=64',
     '--batch_size=64 does not divide among 2 towers: give a multiple of 5'),
    ('--cluster=ps --worker_hosts=a:1', '--cluster=ps does not say which parameter servers: give '
     '--ps_hosts, or --cluster=ring, which needs none'),
    ('--devices=/gpu:7', '/gpu:7 does not exist: TensorFlow sees no GPU here. Name another device, '
     'or see its plan with --plan_only.'),
    ('--model=digit', "There is no network 'digit'. Did you mean digits? Those there are: "
     'alexnet_v2, digits, inception_resnet_v2, '),
    ('--precision=fp16', "--precision=fp16: TensorFlow %s has no rewrite to it that works on CPUs. "
     % tf.version.VERSION),
    ('--cluster=ring --worker_hosts=a:1 --ps_hosts=b:2', '--cluster=ring has no parameter servers, '
     'and b:2 is one: leave it out, or use --cluster=ps.'),
    ('--dataset=:f', '--dataset=:f: expected module:function, such as flowers:batches'),
    ('--augment_shift=8', '--augment_shift=8 moves images of 8 x 8 pixels out of sight: give less'),
    ('--decay=cosine --decay_epochs=1e-9', '--decay_epochs=1e-09 is less than one of the 1437 '
     'examples of an epoch: give more'),
    ('--devices=/job:worker/task:0/cpu:0,/cpu:1', '/job:worker/task:0/cpu:0 does not exist: '
     'without a cluster the one job of this program is localhost. Name another device, or see its '
     'plan with --plan_only.'),
    ('--variable_device=/job:ps/cpu:0', '/job:ps/cpu:0 does not exist: without a cluster'),
    ('--variable_device=/gpu:0', '/gpu:0 does not exist: TensorFlow sees no GPU here'),
    ('--devices=/cpu:0,/cpu:0', '/cpu:0 is named 2 times in --devices=/cpu:0,/cpu:0: give each '
     'tower a device of its own.'),
    ('--data_dir=here', "The data set 'digits' is part of this package and takes no --data_dir "
     "('here'): leave it out."),
    ('--model=resnet_v1_50 --batch_norm_decay=1', 'Got --batch_norm_decay=1.0, expected a number '
     'of at least 0 and below 1'),
    ('--dataset=svhn', "There is no data set 'svhn'; choose one of: cifar10, ")]


@pytest.mark.parametrize('argv, text', WHAT_THERE_IS_NOT[:4] + [
    pytest.param(*case, marks=pytest.mark.slow) for case in WHAT_THERE_IS_NOT[4:]])
def test_what_there_is_not_is_refused_before_anything_is_built(runner, tmp_path, argv, text):
    run = runner.run(tmp_path / 'run', argv.split(), status=2)
    # Where the environment hides GPUs the text says so.
    said = re.sub(r' \(CUDA_VISIBLE_DEVICES=[^)]*\)', '', run.stderr)
    assert said.startswith('train.py: ' + text)
    assert run.stderr.count('\n') == 1 and run.stdout == ''
    assert not (tmp_path / 'run').exists()


@pytest.mark.slow
def test_names_to_keep_are_told_as_the_flag(runner, tmp_path):
    run = runner.run(tmp_path / 'run', ['--recompute=nope,conv', '--plan_only'], status=2)
    assert run.stderr.startswith("train.py: --recompute=nope,conv has 'nope', and the model has no "
                                 'operation or scope of this name')


def rate_of(*argv):
    """The peak rate of flags, on two towers unless they say otherwise."""
    with flagsaver.flagsaver():
        FLAGS.unparse_flags()
        parse_flags(['train.py'] + list(argv))
        return make_learning_rate(FLAGS.batch_size,
                                              FLAGS.num_towers, 1437, 10).peak


def test_the_rate_grows_with_the_batch_it_is_meant_for():
    assert rate_of('--lr_scaling=linear') == pytest.approx(0.002)
    assert rate_of('--lr_scaling=linear', '--base_batch_size=25') == pytest.approx(0.004)
    assert rate_of('--lr_scaling=sqrt', '--base_batch_size=25', '--num_towers=1') == (
        pytest.approx(0.002))
    with pytest.raises(InvalidArgumentError, match='--batch_size=100 is no multiple of '
                                           '--base_batch_size=30'):
        rate_of('--base_batch_size=30')


@pytest.mark.parametrize('argv, names', [
    ('--optimizer=sgd --accumulate=2', []),
    ('--mode=eval --optimizer=sgd --accumulate=2 --batch_size=7 --model=digits',
     ['accumulate', 'optimizer']),
    ('--mode=predict --train_steps=5 --seed=2', ['train_steps']),
    ('--mode=memory --optimizer=sgd --save_steps=3 --accumulate=2', ['save_steps']),
    ('--mode=diagnose --decay=cosine --recompute=auto', ['decay']),
    ('--mode=check_data --model=vgg_a --augment=crop --dataset=folder', ['model'])])
def test_flags_that_the_mode_does_not_look_at_are_told(argv, names):
    with flagsaver.flagsaver():
        FLAGS.unparse_flags()
        parse_flags(['train.py'] + argv.split())
        assert without_effect() == names


def test_machines_that_would_each_train_alone(monkeypatch):
    with flagsaver.flagsaver():
        monkeypatch.setenv('TF_CONFIG', '{"cluster": {"worker": ["a:1", "b:1"], "ps": ["c:1"]}}')
        assert contradiction(set()) == (
            'TF_CONFIG names 3 tasks, and without --cluster each would train alone: give '
            '--cluster=ring or --cluster=ps, or unset TF_CONFIG')
        for other in ('{"cluster": {"worker": ["a:1"]}}', '{"cluster": []}', 'nothing', '{}'):
            monkeypatch.setenv('TF_CONFIG', other)
            assert contradiction(set()) is None


def test_advice_names_no_arguments_of_python():
    error = pytest.raises(towers.DeviceError, check_variable_device, '/device:CPU:5',
                          ('/device:CPU:0', '/device:CPU:1')).value
    assert in_flags(str(error)) == (
        "--variable_device=/cpu:5: the session of these towers has the CPU devices /cpu:0 to "
        '/cpu:1. Name one of them.')
