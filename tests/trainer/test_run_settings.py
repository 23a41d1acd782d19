"""trainer.run_settings: what a run was started with, and what differs when it goes on."""

import json
import os

import pytest
import tensorflow.compat.v1 as tf

from towers.errors import BadFileError, CheckpointError
from towers.run.training_session import training_session
from trainer.flags import CHANGES, HARMLESS, STATE
from trainer.run_settings import Difference, RunSettings, SettingsHook, recorded_setting

KINDS = {'seed': CHANGES, 'log_every': HARMLESS, 'optimizer': STATE, 'name': CHANGES,
         'fast': CHANGES}


def settings(seed=1, log_every=100, optimizer='adam', name='', fast=False):
    return RunSettings([('seed', seed), ('log_every', log_every), ('optimizer', optimizer),
                        ('name', name), ('fast', fast)], KINDS)


def read(folder):
    with open(os.path.join(str(folder), 'settings.json')) as opened:
        return json.load(opened)


def test_differences_by_kind(tmp_path):
    settings().begin(str(tmp_path))
    assert settings().compare(str(tmp_path)) == []
    differences = settings(2, 5, 'sgd', fast=True).compare(str(tmp_path))
    assert differences == [Difference('seed', 1, 2, CHANGES, '--seed=2, was 1'),
                           Difference('log_every', 100, 5, HARMLESS, '--log_every=5, was 100'),
                           Difference('optimizer', 'adam', 'sgd', STATE,
                                      '--optimizer=sgd, was adam'),
                           Difference('fast', False, True, CHANGES, '--fast=True, was False')]
    assert [str(each) for each in differences[:2]] == [
        '--seed=2, was 1: changes the run from here on',
        '--log_every=5, was 100: no change to the run']
    (difference,) = settings(name='x').compare(str(tmp_path))
    assert str(difference) == "--name=x, was '': changes the run from here on"


@pytest.mark.parametrize('was, now, same', [
    (1, 1.0, True), (4e-5, 4e-5, True), (0.1 + 0.2, 0.3, False), (True, 1, False),
    (0, False, False), (None, '', False), (None, None, True), ('1', 1, False)])
def test_values_that_are_the_same(tmp_path, was, now, same):
    RunSettings({'a': was}, {'a': CHANGES}).begin(str(tmp_path))
    assert RunSettings({'a': now}, {'a': CHANGES}).compare(str(tmp_path)) == [] or not same
    assert bool(RunSettings({'a': now}, {'a': CHANGES}).compare(str(tmp_path))) != same


def test_a_setting_that_a_version_before_did_not_have_is_no_difference(tmp_path):
    RunSettings({'seed': 1, 'gone': 3}, {'seed': CHANGES, 'gone': STATE}).begin(str(tmp_path))
    assert settings(log_every=7).compare(str(tmp_path)) == []
    settings(log_every=7).record(str(tmp_path), 3, [])
    assert read(tmp_path)['settings']['log_every'] == 7 and 'gone' not in read(tmp_path)['settings']


@pytest.mark.parametrize('content', ['', '{"settings": {"se', '[]', '{"settings": 3}', '\x00\xff',
                                     '{"settings": {"seed": [[]]}, "changes": []}'])
def test_a_file_that_holds_something_else_is_refused(tmp_path, content):
    path = tmp_path / 'settings.json'
    path.write_text(content)
    for call in (settings().compare, lambda folder: settings().record(folder, 5, []),
                 lambda folder: recorded_setting(folder, 'seed')):
        with pytest.raises(BadFileError) as caught:
            call(str(tmp_path))
        assert str(caught.value).startswith('%s cannot be read (' % path)
        assert str(caught.value).endswith(
            '): move it away, to go on without a look at what has changed.')
    assert path.read_text() == content


def test_what_a_file_says_is_shown_as_text_of_a_line(tmp_path):
    path = tmp_path / 'settings.json'
    path.write_text(json.dumps({'settings': {'name': '\x1b[2J\nx' + 'y' * 999}, 'changes': []}))
    (difference,) = settings(name='a').compare(str(tmp_path))
    assert difference.text == r'--name=a, was \x1b[2J\nx' + 'y' * 294


def test_a_missing_file_is_said_and_written(tmp_path):
    assert settings().compare(str(tmp_path)) is None
    hook = SettingsHook(settings(), str(tmp_path))
    assert hook.check(None, None, None) == [
        '%s/settings.json is missing (an older run, perhaps): whether settings have changed cannot '
        'be told' % tmp_path]
    settings().record(str(tmp_path), 5, [])
    assert read(tmp_path)['settings']['optimizer'] == 'adam'


def test_a_deleted_runs_settings_are_kept(tmp_path):
    settings().begin(str(tmp_path))
    former = (tmp_path / 'settings.json').read_bytes()
    (line,) = settings(2).begin(str(tmp_path))
    assert line == ('{0}/settings.json was that of an earlier run, whose checkpoints are gone: '
                    'renamed to {0}/settings.json.1'.format(tmp_path))
    assert (tmp_path / 'settings.json.1').read_bytes() == former and read(
        tmp_path)['settings']['seed'] == 2


# ---- in a session --------------------------------------------------------------------------------

def run(folder, steps, optimizer, the_settings, hooks=()):
    """Trains `w`; returns the lines that the session said."""
    lines = []
    with tf.Graph().as_default():
        step = tf.train.get_or_create_global_step()
        w = tf.get_variable('w', [3], initializer=tf.ones_initializer())
        train_op = optimizer.minimize(tf.reduce_sum(tf.square(w)), step)
        settings_hook = SettingsHook(the_settings, str(folder), lines.append)
        with training_session(str(folder), step, [settings_hook] + list(hooks), save_steps=2,
                              say=lines.append, check=settings_hook.check) as session:
            session.run_steps(train_op, steps)
    return lines


def momentum():
    return tf.train.MomentumOptimizer(0.1, 0.9)


def sgd():
    return tf.train.GradientDescentOptimizer(0.1)


def test_a_run_that_goes_on_says_what_changed(tmp_path):
    assert run(tmp_path, 2, momentum(), settings(optimizer='momentum')) == []
    lines = run(tmp_path, 2, momentum(), settings(optimizer='momentum', seed=5))
    assert lines == ['going on from %s/model.ckpt-2' % tmp_path,
                     '--seed=5, was 1: changes the run from here on']
    (change,) = read(tmp_path)['changes']
    assert change['step'] == 2 and change['setting'] == 'seed'


@pytest.mark.parametrize('first, second, names, text', [
    (momentum, sgd, ('momentum', 'sgd'), r'--optimizer=sgd, was momentum: the checkpoint \S+-2 '
     r'holds state that the checkpoints to come would be without: w/Momentum\. Nothing was '
     r'changed\. Go on with --optimizer=momentum\. Or begin another run in '),
    (sgd, momentum, ('sgd', 'momentum'), r'--optimizer=momentum, was sgd: the checkpoint \S+-2 is '
     r'of another model: 1 of the 3 variables of this model differ: not in the checkpoint: '
     r'w/Momentum\. Nothing was changed\. Go on with --optimizer=sgd\. Or begin another run in ')])
def test_state_is_neither_dropped_nor_made_up(tmp_path, first, second, names, text):
    run(tmp_path, 2, first(), settings(optimizer=names[0]))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(CheckpointError, match=text):
        run(tmp_path, 2, second(), settings(optimizer=names[1]))
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert {name for name in after if after[name] != before.get(name)} <= {'run.lock'}
    # As for a program that does not say which setting it is, or a run that had none.
    (tmp_path / 'settings.json').unlink()
    with pytest.raises(CheckpointError, match='^the checkpoint .*w/Momentum'):
        run(tmp_path, 2, second(), settings(optimizer=names[1]))


def test_another_value_of_state_that_drops_nothing_is_a_change(tmp_path):
    run(tmp_path, 2, sgd(), settings(optimizer='sgd'))
    lines = run(tmp_path, 2, sgd(), settings(optimizer='sgd too'))
    assert lines[1] == '--optimizer=sgd too, was sgd: changes the run from here on'


class Stops(tf.train.SessionRunHook):
    """Ends the program before the session is there, as a signal does."""

    def begin(self):
        raise KeyboardInterrupt


class SeesSettings(tf.train.SessionRunHook):
    def __init__(self, folder):
        self._folder, self.seen = folder, None

    def after_create_session(self, session, coord):
        self.seen = [name for name in sorted(os.listdir(str(self._folder))) if name != 'run.lock']


def test_settings_are_those_of_a_run_that_began(tmp_path):
    folder = tmp_path / 'run'
    with pytest.raises(KeyboardInterrupt):
        run(folder, 3, sgd(), settings(1), [Stops()])
    assert not (folder / 'settings.json').exists()
    sees = SeesSettings(folder)
    assert run(folder, 3, sgd(), settings(2), [sees]) == []
    assert read(folder)['settings']['seed'] == 2 and read(folder)['changes'] == []
    # Before the first checkpoint, from which a run would go on without them.
    assert sees.seen == ['settings.json']
