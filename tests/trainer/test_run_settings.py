"""trainer.run_settings: what a run was started with, and what differs when it goes on."""

import json
import os

import pytest
import tensorflow.compat.v1 as tf

from towers.errors import CheckpointError
from towers.run.training_session import training_session
from trainer.flags import CHANGES, HARMLESS, STATE
from trainer.run_settings import Difference, RunSettings
from case_marks import first_fast

KINDS = {'seed': CHANGES, 'log_every': HARMLESS, 'optimizer': STATE}


def settings(folder, seed=1, log_every=100, optimizer='adam', name='', **more):
    return RunSettings(dict(more, seed=seed, log_every=log_every, optimizer=optimizer, name=name),
                       KINDS, str(folder))


def read(folder):
    with open(os.path.join(str(folder), 'settings.json')) as opened:
        return json.load(opened)['settings']


def test_differences_by_kind(tmp_path):
    settings(tmp_path, gone=3).write()  # of an older version
    assert settings(tmp_path, new=1).compare() == []
    differences = settings(tmp_path, 2, 5, 'sgd', 'x').compare()
    assert differences == [Difference('seed', 1, 2, CHANGES),
                           Difference('log_every', 100, 5, HARMLESS),
                           Difference('optimizer', 'adam', 'sgd', STATE),
                           Difference('name', '', 'x', CHANGES)]
    assert list(map(str, differences)) == [
        '--seed=2, was 1: changes the run from here on',
        '--log_every=5, was 100: no change to the run',
        '--optimizer=sgd, was adam: changes the run from here on',
        "--name=x, was '': changes the run from here on"]


@pytest.mark.parametrize('was, now, same', [
    (1, 1.0, True), (4e-5, 4e-5, True), (0.1 + 0.2, 0.3, False), (True, 1, False),
    ([], '', True), (None, '', True), (None, None, True), ('1', 1, False), ('a', '', False)])
def test_values_that_are_the_same(tmp_path, was, now, same):
    RunSettings({'a': was}, {}, str(tmp_path)).write()
    assert bool(RunSettings({'a': now}, {}, str(tmp_path)).compare()) != same


def test_what_a_file_says_is_shown_as_text_of_a_line(tmp_path):
    path = tmp_path / 'settings.json'
    path.write_text(json.dumps({'settings': {'name': '\x1b[2J\nx' + 'y' * 999}, 'changes': []}))
    (difference,) = settings(tmp_path, name='a').compare()
    assert difference.text == r'--name=a, was \x1b[2J\nx' + 'y' * 294


def test_a_missing_file_is_said_and_a_deleted_runs_is_kept(tmp_path, capsys):
    assert settings(tmp_path).check(None, None, None) == [
        '%s/settings.json is missing (an older run, perhaps): whether settings have changed cannot '
        'be told' % tmp_path]
    settings(tmp_path).write()
    settings(tmp_path, 2).write()
    assert capsys.readouterr().out == (
        '{0}/settings.json was that of an earlier run, whose checkpoints are gone: renamed to '
        '{0}/settings.json.1\n'.format(tmp_path))
    assert read(tmp_path)['seed'] == 2


# ---- in a session --------------------------------------------------------------------------------

def run(folder, steps, rule, **values):
    """Trains `w`; returns the lines that the session said."""
    lines, the_settings = [], settings(folder, **values)
    with tf.Graph().as_default():
        step = tf.train.get_or_create_global_step()
        w = tf.get_variable('w', [3], initializer=tf.ones_initializer())
        train_op = rule.minimize(tf.reduce_sum(tf.square(w)), step)
        with training_session(str(folder), step, [the_settings], save_steps=2,
                              say=lines.append, check=the_settings.check) as session:
            for _ in range(steps):
                session.run(train_op)
    return lines


def momentum():
    return tf.train.MomentumOptimizer(0.1, 0.9)


def sgd():
    return tf.train.GradientDescentOptimizer(0.1)


@pytest.mark.slow
def test_a_run_that_goes_on_says_what_changed(tmp_path):
    assert run(tmp_path, 2, sgd()) == []
    # Another value of state that drops nothing is a change.
    assert run(tmp_path, 2, sgd(), seed=5, optimizer='sgd') == [
        'going on from %s/model.ckpt-2' % tmp_path, '--seed=5, was 1: changes the run from here on',
        '--optimizer=sgd, was adam: changes the run from here on']
    assert read(tmp_path)['seed'] == 5


@pytest.mark.parametrize('first, second, names, text', first_fast(1, [
    (momentum, sgd, ('momentum', 'sgd'), r'--optimizer=sgd, was momentum: the checkpoint \S+-2 '
     r'holds state that the checkpoints to come would be without: w/Momentum\. Nothing was '
     r'changed\. Go on with --optimizer=momentum\. Or begin another run in '),
    (sgd, momentum, ('sgd', 'momentum'), r'--optimizer=momentum, was sgd: the checkpoint \S+-2 is '
     r'of another model: 1 of the 3 variables of this model differ: not in the checkpoint: '
     r'w/Momentum\. Nothing was changed\. Go on with --optimizer=sgd\. Or begin another run in ')]))
def test_state_is_neither_dropped_nor_made_up(tmp_path, first, second, names, text):
    run(tmp_path, 2, first(), optimizer=names[0])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(CheckpointError, match=text):
        run(tmp_path, 2, second(), optimizer=names[1])
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert {name for name in after if after[name] != before.get(name)} <= {'run.lock'}
    # As for a program that does not say which setting it is, or a run that had none.
    (tmp_path / 'settings.json').unlink()
    with pytest.raises(CheckpointError, match='^the checkpoint .*w/Momentum'):
        run(tmp_path, 2, second(), optimizer=names[1])
