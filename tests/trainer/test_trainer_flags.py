"""Flags of `train.py`: which are refused, with what words, and what the good ones make."""

import contextlib
import os
import re
import subprocess
import sys

from absl.testing import flagsaver
import pytest
import tensorflow.compat.v1 as tf

from datasets import epochs, preprocessing
import towers
from towers.cluster.cluster import KINDS
from towers.errors import InvalidArgumentError
from towers.run import learning_rate
from trainer import flags
from trainer.arguments import clip, make_learning_rate
from trainer.command_line import in_flags, parse_flags
from trainer.contradictions import contradiction
from trainer.flags import FLAGS, GROUPS, train_dir
from trainer.run_settings import run_settings


ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@contextlib.contextmanager
def parsed(*argv):
    """A block with the flags that a command line gives."""
    with flagsaver.flagsaver():
        FLAGS.unparse_flags()
        parse_flags(['train.py'] + list(argv))
        yield


def refusal(capsys, *argv):
    """The line on stderr and the exit status of flags that are refused when they are parsed."""
    with pytest.raises(SystemExit) as ended, parsed(*argv):
        pass
    assert ended.value.code == 2
    out, error = capsys.readouterr()
    assert out == '' and error.endswith('\n') and error.count('\n') == 1
    assert error.startswith('train.py: ')
    return error[len('train.py: '):-1]


@pytest.mark.parametrize('argv, text', [
    ('--train_steps=5 --train_epochs=1', '--train_steps and --train_epochs both say how long to '
     'train: give one'),
    ('--export_dir=/dev/null/x', '--export_dir=/dev/null/x cannot be written to: name a folder'),
    ('--decay=exponential', '--decay=exponential needs --decay_epochs'),
    ('--config={"stop_at_accuracy":0.9}', 'stop_at_accuracy of --config is looked at when there '
     'is an evaluation: give --eval_steps'),
    ('--config={"micro_batches":4} --accumulate=2', 'micro_batches=4 of --config and '
     '--accumulate=2: a pipeline adds up the gradients of its micro-batches, too: give '
     'micro_batches=8 of --config alone'),
    ('--momentum=0.5', '--momentum is of no use with --optimizer=adam: it goes with momentum or '
     'rmsprop or lars'),
    ('--mode=diagnose --deterministic', '--mode=diagnose tells the time in a step, which '
     'TensorFlow refuses with --deterministic: leave it out'),
    ('--model=a:b --dataset=c:d --weight_decay=0.1 --config={"label_smoothing":0.1}',
     'label_smoothing of --config is of no use with --model=a:b: it goes with a network by name'),
    ('--profile_steps=100', '--profile_steps=100: expected two steps, the first one above 1 and '
     'below the second, such as 100,105'),
    ('--optimizer=lars', '--optimizer=lars adds its decay to the gradient of the mean loss, and '
     '--reduction=sum multiplies that by the towers: give --reduction=mean'),
    ('--cluster=ps', '--cluster=ps does not say which machines: set TF_CONFIG; on one machine, '
     'python -m towers.launch starts all processes'),
    ('--augment_shift=2', 'augment_shift is no flag: give --config=\'{"augment_shift": …}\', or a '
     'JSON file that has it'),
    ('--config={"keeps":3}', "--config: there is no option 'keeps': did you mean keep?"),
    ('--config={"seed":3}', "--config: there is no option 'seed', but a flag --seed: give that"),
    ('--config={"qqqqq":3}', "--config: there is no option 'qqqqq'; --help lists those there are"),
    ('--config={"keep":1.5}', '--config: keep is 1.5: expected a whole number'),
    ('--config={"remainder":"most"}', 'flag remainder=most of --config: value should be one of '
     '<carry|drop>'),
    ('--config={"keep":0}', 'flag keep=0 of --config: 0 is not an integer in the range '
     '[1, 1000000]'),
    ('--config={"keep":', '--config={"keep": is no JSON: Expecting value: line 1 column 9 '
     '(char 8)'),
    ('--config=none.json', '--config=none.json does not exist: name a JSON file, or give '
     '{"label_smoothing": 0.1}'),
    ('--job_name=evaluator --batch_size=auto', '--batch_size=auto is of training, and '
     '--job_name=evaluator does not train: give a number'),
    ('--decay=step', '--decay=step needs --decay_epochs'),
    ('--decay=cosine_restarts', '--decay=cosine_restarts needs --decay_epochs'),
    ('--config={"decay_power":2}', 'decay_power of --config is of no use with --decay=none: it goes '
     'with polynomial'),
    ('--mode=eval --config={"confusion":"m.txt"}', 'confusion=m.txt of --config: expected a name '
     'that ends in .png or .csv'),
    ('--hooks=mine', '--hooks=mine: expected module:function'),
    ('--sweep=seed=1 --plan_only', '--sweep starts runs one after the other on this machine: leave '
     'out --cluster, --job_name and --plan_only'),
    ('--recompute=,', "--recompute=, names nothing: give 'auto', or names"),
    ('--base_learning_rate=nan', '--base_learning_rate=nan: expected a finite number'),
    ('digits', "'digits' is no flag: flags begin with --")])
def test_flags_that_contradict_each_other(capsys, argv, text):
    assert refusal(capsys, *argv.split()) == text


@pytest.mark.parametrize('argv, text', [
    ('--batch_size=abc', "flag --batch_size=abc: expected a whole number, or 'auto'"),
    ('--train_steps=100000000000000000000', 'flag --train_steps=100000000000000000000: '
     '100000000000000000000 is not an integer in the range [0, 1000000000000]'),
    ('--config={"loss_scale":1e39}', 'flag loss_scale=1e+39 of --config: 1e+39 is not a number in '
     'the range [0, 3e+38]'),
    ('--momentum=much', 'flag --momentum=much: expected a number'),
    ('--plan_only=7', 'flag --plan_only=7: expected true or false'),
    ('--train_dir=caf\udce9', r"--train_dir='caf\udce9' is no UTF-8, and TensorFlow opens no other "
     'names: give another'),
    ('--train_dir=a\0b', r"--train_dir='a\x00b' has a NUL in it, as no path has: give another"),
    ('--data_dir=gs://a/b', '--data_dir=gs://a/b is no path of this machine, and --init_from and '
     '--export_dir alone take others: give one, such as that where it is mounted'),
    ('--init_from=nothing://a/b', '--init_from=nothing://a/b cannot be reached: File system scheme '
     "'nothing' not implemented"),
    ('--batchsize=100', "Unknown command line flag 'batchsize'. Did you mean: batch_size ?")])
def test_flags_that_make_no_sense(capsys, argv, text):
    assert refusal(capsys, *argv.split()).startswith(text)


def test_paths_are_those_that_a_shell_would_make_of_them(monkeypatch):
    monkeypatch.setenv('HOME', '/home/me')
    with parsed('--train_dir=~/run', '--init_from=file:///a/~b'):
        assert (train_dir(), FLAGS.init_from) == ('/home/me/run', '/a/~b')


@pytest.mark.parametrize('text, ours', [
    ("/gpu:1 does not exist: no GPU. Name another device, or pass resolve_devices(…, check=False) "
     'to build the graph for another machine.',
     '/gpu:1 does not exist: no GPU. Name another device, or see its plan with --plan_only.'),
    ("precision='fp16': expected", '--precision=fp16: expected'),
    ("VariablePlacement('replicated'), and", '--variable_device=replicated, and'),
    ('whole: --recover (recover=True) does so.', 'whole: recover of --config does so.'),
    ('Set it, or give create_aux_logits=False.', 'Set it, or give aux_loss_weight=0 of --config.'),
    ("Use f(soft_placement=3).", "Use f(soft_placement=3).")])
def test_errors_speak_of_flags(text, ours):
    assert in_flags(text) == ours


def test_there_are_50_flags_each_with_a_sentence():
    assert len(flags.FLAGS_BY_NAME) <= 50
    defined = {flag.name for flag in FLAGS.flags_by_module_dict()['trainer.flags']}
    assert defined == set(flags.SETTINGS)
    for setting in flags.SETTINGS.values():
        assert setting.kind in (flags.ONCE, flags.HARMLESS, flags.CHANGES, flags.STATE)
        assert setting.text[-1] not in '.:;' and len(setting.text) > 10


def test_words_are_those_of_the_modules_that_take_them():
    words = {name: setting.limits for name, setting in flags.SETTINGS.items()}
    assert words['precision'] == list(towers.PRECISIONS)
    assert words['cluster'] == [''] + list(KINDS)
    assert words['augment'] == list(preprocessing.AUGMENTS)
    assert words['remainder'] == list(epochs.REMAINDERS)
    assert words['lr_scaling'] == list(learning_rate.RULES)
    assert words['decay'] == list(learning_rate.DECAYS)


def test_flags_are_checked_without_tensorflow():
    program = ("import sys, trainer.command_line, trainer.sweep, trainer.output\n"
               "trainer.command_line.parse_flags(['train.py', '--seed=2'])\n"
               "assert 'tensorflow' not in sys.modules and 'numpy' not in sys.modules")
    subprocess.run([sys.executable, '-c', program], check=True, cwd=ROOT)


@pytest.mark.parametrize('argv, rates', [
    # 100 images a step; an epoch has 1,000. The rate after so many examples:
    ('--decay=step --decay_epochs=2 --decay_rate=0.5', {1999: 1., 2000: .5, 4000: .25}),
    ('--decay=polynomial', {0: 1., 2500: .75, 10000: 0.}),
    ('--decay=polynomial --config={"decay_power":2}', {5000: .25}),
    ('--decay=cosine', {5000: .5, 10000: 0.}),
    ('--decay=cosine_restarts --decay_epochs=1', {500: .5, 1000: 1., 2000: .5, 3000: 1.})])
def test_schedules(argv, rates):
    with parsed('--base_learning_rate=1', *argv.split()):
        rate = make_learning_rate(100, 1, 1000, 10000)
    with tf.Session() as session:
        for examples, value in rates.items():
            tensor = rate.tensor(tf.constant(examples, tf.int64))
            assert session.run(tensor) == pytest.approx(value, abs=1e-7), examples


def test_options_come_from_files_and_json_and_the_last_one_counts(tmp_path):
    path = tmp_path / 'run.json'
    path.write_text('{"augment_shift": 2, "keep": 3, "loss_scale": 8, "xla": true, '
                    '"shares": "3,1"}')
    with parsed('--config=%s' % path, '--config={"keep": 9}'):
        assert (FLAGS.augment_shift, FLAGS.keep, FLAGS.loss_scale, FLAGS.xla, FLAGS.shares) == (
            2, 9, 8., True, '3,1')
        assert run_settings(100).values['augment_shift'] == 2


@pytest.mark.parametrize('argv, kind', [
    ([], 'harmless'), (['--decay=cosine'], 'changes the run'),
    (['--decay=cosine', '--decay_epochs=3'], 'harmless')])
def test_a_longer_run_is_another_one_only_where_the_rate_falls_until_its_end(argv, kind, tmp_path):
    def settings(*argv):
        with parsed('--train_dir=%s' % tmp_path, *argv):
            return run_settings(FLAGS.batch_size)
    for name in ('train_steps', 'train_epochs'):
        settings('--%s=5' % name, *argv).write()
        (difference,) = settings('--%s=9' % name, *argv).compare()
        assert re.match(
            r'--%s=9(\.0)?, was 5(\.0)?$' % name, difference.text)
        assert difference.kind == kind


def test_clipping_is_by_the_norm_of_all_gradients():
    with parsed('--clip_norm=2.5'):
        first, second = clip([(tf.constant([3.]), 'w'), (tf.constant([0., 4.]), 'b')])
    with tf.Session() as session:
        assert [each.tolist() for each in session.run([first[0], second[0]])] == [[1.5], [0., 2.]]
    assert (first[1], second[1]) == ('w', 'b')


def test_help_is_grouped_and_fits_two_screens(capsys):
    with pytest.raises(SystemExit) as ended, parsed('--help'):
        pass
    assert ended.value.code == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert len(lines) <= 100 and max(map(len, lines)) <= 100
    for group, settings in GROUPS.items():
        assert group + ':' in lines
        for setting in settings:
            assert len(re.findall(r'^  --%s ' % setting.name, text, re.MULTILINE)) == 1
    assert all(re.search(r'\b%s\b' % option.name, text.split('Options of --config')[1])
               for option in flags.OPTIONS)


@pytest.mark.parametrize('argv, text', [
    ('--num_towers=4 --batch_size=10',
     '--batch_size=10 does not divide among 4 towers: give a multiple of 4'),
    pytest.param('--devices=/gpu:7', '/gpu:7 does not exist: TensorFlow sees no GPU here. Name '
                 'another device, or see its plan with --plan_only.', marks=pytest.mark.slow),
    pytest.param('--model=digit', "There is no network 'digit'. Did you mean digits? Those there "
                 'are: alexnet_v2, digits, inception_resnet_v2, ', marks=pytest.mark.slow)])
def test_what_there_is_not_is_refused_before_anything_is_built(runner, tmp_path, argv, text):
    run = runner.run(tmp_path / 'run', argv.split(), status=2)
    # Where the environment hides GPUs the text says so.
    said = re.sub(r' \(CUDA_VISIBLE_DEVICES=[^)]*\)', '', run.stderr)
    assert said.startswith('train.py: ' + text)
    assert run.stderr.count('\n') == 1 and run.stdout == ''
    assert not (tmp_path / 'run').exists()


def rate_of(*argv):
    """The peak rate of flags, on two towers unless they say otherwise."""
    with parsed(*argv):
        return make_learning_rate(FLAGS.batch_size, FLAGS.num_towers, 1437, 10).peak


def test_the_rate_grows_with_the_batch_it_is_meant_for():
    assert rate_of('--lr_scaling=linear') == pytest.approx(0.002)
    with parsed('--lr_scaling=linear'):
        assert make_learning_rate(100, 2, 1437, 10, workers=3).peak == pytest.approx(0.006)
    assert rate_of('--lr_scaling=linear', '--batch_size=99', '--config={"shares": "2,1"}') == (
        pytest.approx(0.002))
    assert rate_of('--lr_scaling=linear', '--config={"base_batch_size": 25}') == (
        pytest.approx(0.004))
    assert rate_of('--lr_scaling=sqrt', '--config={"base_batch_size": 25}',
                   '--num_towers=1') == pytest.approx(0.002)
    for argv, text in (
            ('--config={"base_batch_size": 30}', '--batch_size=100 is no multiple of --base_batch_'),
            ('--decay=cosine  --decay_epochs=1e-9', '--decay_epochs=1e-09 is less than one of the')):
        with pytest.raises(InvalidArgumentError, match=text):
            rate_of(*argv.split('  '))


def test_machines_that_would_each_train_alone(monkeypatch):
    with flagsaver.flagsaver():
        monkeypatch.setenv('TF_CONFIG', '{"cluster": {"worker": ["a:1", "b:1"], "ps": ["c:1"]}}')
        assert contradiction(set()) == (
            'TF_CONFIG names 3 tasks, and without --cluster each would train alone: give '
            '--cluster=ring or --cluster=ps, or unset TF_CONFIG')
        for other in ('{"cluster": {"worker": ["a:1"]}}', '{"cluster": []}', 'nothing', '{}'):
            monkeypatch.setenv('TF_CONFIG', other)
            assert contradiction(set()) is None
