"""`training_session`: what it finds in a directory, in which order it acts, how it ends."""

import os
import re

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from checkpoint_runs import DATA

import towers
from towers.checkpoint.files import newest_checkpoint
from towers.errors import CheckpointError, NonFiniteError, RunLockedError, checked_loss
from towers.run.run_lock import hold_directory
from towers.run.training_session import training_session


class Recorder(tf.train.SessionRunHook):
    """Writes down when it is called, and what is saved by then."""

    def __init__(self, name, calls, folder):
        def note(what):
            newest = tf.train.latest_checkpoint(folder)
            calls.append('%s %s, saved %s' % (name, what, newest and newest.split('-')[-1]))
        self.after_create_session = lambda session, coord: note('created')
        self.after_run = lambda run_context, run_values: note('run')
        self.end = lambda session: note('end')


def run(folder, steps, save_steps=2, bad_step=None, fail=None, hooks=(), width=3, optimizer=None,
        **options):
    """A run up to a step: `(lines that it said, value of w)`; w grows by 1 a step."""
    with tf.Graph().as_default():
        step = tf.train.get_or_create_global_step()
        w = tf.get_variable('w', [width], initializer=tf.zeros_initializer())
        loss = tf.reduce_sum(w)
        if bad_step:
            loss *= tf.where(tf.equal(tf.cast(step, tf.int32), bad_step - 1), np.nan, 1.)
        with tf.control_dependencies([checked_loss(loss, 1)]):
            train_op = tf.group(tf.assign_add(w, tf.ones([width])), tf.assign_add(step, 1))
        if optimizer:
            train_op = optimizer.minimize(-loss, step)
        if 'initial_values' in options:
            options['initial_values'] = towers.init_from(options['initial_values'])
        lines = []
        with training_session(str(folder), step, list(hooks), save_steps=save_steps,
                              say=lines.append, **options) as session:
            done = session.run_step_fn(lambda step_context: int(step_context.session.run(step)))
            value = None
            while done < steps:
                session.run(train_op)
                done += 1
                if done == fail:
                    raise FloatingPointError('of the program')
            value = session.run_step_fn(lambda step_context: step_context.session.run(w)).tolist()
        return lines, value


def saved(folder):
    return sorted(int(name[len('model.ckpt-'):-len('.index')]) for name in os.listdir(str(folder))
                  if name.endswith('.index'))


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != 'run.lock'}


def test_it_starts_and_goes_on(tmp_path):
    folder = tmp_path / 'made' / 'for it'
    assert run(folder, 5) == ([], [5.] * 3)
    assert saved(folder) == [0, 2, 4, 5]
    assert run(folder, 7) == (['going on from %s/model.ckpt-5' % folder], [7.] * 3)
    assert saved(folder) == [2, 4, 5, 6, 7]
    assert run(folder, 7, keep=2) == (['going on from %s/model.ckpt-7' % folder], [7.] * 3)
    assert run(folder, 8, keep=2)[1] == [8.] * 3
    assert saved(folder) == [7, 8]


def test_the_order_of_hooks(tmp_path):
    """Those that may find a step bad come before the one that saves it, `last_hooks` after it."""
    calls = []
    first, last = (Recorder(name, calls, str(tmp_path)) for name in ('first', 'last'))
    run(tmp_path, 3, hooks=[first], last_hooks=[last])
    assert calls == ['first created, saved None', 'last created, saved 0',
                     'first run, saved 0', 'last run, saved 0',
                     'first run, saved 0', 'last run, saved 2',
                     'first run, saved 2', 'last run, saved 2',
                     'first end, saved 2', 'last end, saved 3']


def test_the_directory_is_for_one_process_from_before_the_session_until_after_it(tmp_path):
    def refused(unused_session=None):
        with pytest.raises(RunLockedError, match='is in use by process %d' % os.getpid()):
            with hold_directory(str(tmp_path)):
                pass
    hook = tf.train.SessionRunHook()
    hook.begin = hook.end = refused
    run(tmp_path, 2, hooks=[hook])
    with hold_directory(str(tmp_path)):
        before = contents(tmp_path)
        with pytest.raises(RunLockedError):
            run(tmp_path, 4)
        assert contents(tmp_path) == before
    with pytest.raises(FloatingPointError):
        run(tmp_path, 20, save_steps=4, fail=6)
    assert saved(tmp_path) == [0, 2, 4]  # nothing after the error
    with hold_directory(str(tmp_path)):
        pass  # it is free again


def test_a_nan_is_an_error_with_the_step_and_nothing_of_it_is_saved(tmp_path):
    for start, bad_step in ((0, 1), (5, 8)):
        folder = tmp_path / ('%d %d' % (start, bad_step))
        if start:
            run(folder, start)
        with pytest.raises(NonFiniteError) as caught:
            run(folder, 20, save_steps=1, bad_step=bad_step)
        assert str(caught.value).startswith('the loss of tower 1 is NaN in step %d. ' % bad_step)
        assert caught.value.__cause__ is None and caught.value.__suppress_context__
        newest = newest_checkpoint(str(folder))
        assert newest.step == bad_step - 1
        assert tf.train.load_variable(newest.prefix, 'w').tolist() == [bad_step - 1.] * 3


def damaged(folder, step):
    path = folder / ('model.ckpt-%d%s' % (step, DATA))
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(bytes(content))


def test_a_damaged_newest_checkpoint(tmp_path):
    run(tmp_path, 6)
    damaged(tmp_path, 6)
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match='model.ckpt-6 is damaged: .* is .*model.ckpt-4 .step '
                       '4., which is whole: --recover .recover=True. does so'):
        run(tmp_path, 8)
    assert contents(tmp_path) == before
    lines, value = run(tmp_path, 8, recover=True)
    assert value == [8.] * 3 and saved(tmp_path) == [0, 2, 4, 6, 8]
    assert lines[0].startswith('passed over %s/model.ckpt-6 is damaged: ' % tmp_path)
    assert lines[1] == 'going on from %s/model.ckpt-4' % tmp_path
    # A run that needs no recovering is not changed by the flag.
    assert run(tmp_path, 9, recover=True)[0] == ['going on from %s/model.ckpt-8' % tmp_path]


@pytest.mark.parametrize('options, names', [
    ({'width': 4}, r'another shape: w \(\[3\] there, \[4\] here\)'),
    ({'optimizer': tf.train.MomentumOptimizer(1., 0.5)}, 'not in the checkpoint: w/Momentum')])
def test_a_checkpoint_of_another_model_is_refused_before_the_session(tmp_path, options, names):
    run(tmp_path, 4)
    before, calls, asked = contents(tmp_path), [], []
    with pytest.raises(CheckpointError, match='is of another model: .*' + names):
        run(tmp_path, 8, hooks=[Recorder('any', calls, str(tmp_path))],
            check=lambda *arguments: asked.append(arguments) or [], **options)
    assert contents(tmp_path) == before and calls == []
    (newest, text, dropped), = asked  # a program may compare more
    assert newest.step == 4 and dropped is None and re.search(names, text)


@pytest.mark.slow
def test_a_session_that_is_lost_goes_on_from_what_the_run_saved_last(tmp_path):
    """And not from what was the newest when the program started."""
    class FailsOnce(tf.train.SessionRunHook):
        def __init__(self):
            self.steps, self.failed = [], False

        def after_create_session(self, session, coord):
            self.steps.append(int(session.run(tf.train.get_global_step())))

        def after_run(self, run_context, run_values):
            if not self.failed and run_context.session.run(tf.train.get_global_step()) == 11:
                self.failed = True
                raise tf.errors.UnavailableError(None, None, 'gone')
    run(tmp_path, 5)
    hook = FailsOnce()
    with tf.Graph().as_default():
        step = tf.train.get_or_create_global_step()
        w = tf.get_variable('w', [3], initializer=tf.zeros_initializer())
        train_op = tf.group(tf.assign_add(w, tf.ones([3])), tf.assign_add(step, 1))
        with training_session(str(tmp_path), step, [
                hook, tf.train.StopAtStepHook(last_step=14)], save_steps=4, keep=2,
                say=lambda line: None) as session:
            while not session.should_stop():
                session.run(train_op)
    assert hook.failed and hook.steps == [5, 8]
    assert tf.train.latest_checkpoint(str(tmp_path)).endswith('-14')


def test_without_a_config_it_takes_that_of_the_towers(tmp_path):
    built = towers.build_towers(
        lambda x: tf.reduce_mean(x * tf.get_variable('w', initializer=1.)),
        np.ones([4], np.float32), tf.train.GradientDescentOptimizer(1.), 4,
        global_step=tf.train.get_or_create_global_step())
    with training_session(str(tmp_path), built.global_step, [
            tf.train.StopAtStepHook(last_step=3)], say=lambda line: None) as session:
        devices = session.run_step_fn(
            lambda step_context: step_context.session.list_devices())
        assert sum(device.device_type == 'CPU' for device in devices) == 4
        while not session.should_stop():
            session.run(built.train_op)


def test_state_that_is_dropped_is_said(tmp_path):
    asked = []
    run(tmp_path, 2, optimizer=tf.train.MomentumOptimizer(1., 0.5))
    lines, _ = run(tmp_path, 3, check=lambda *arguments: asked.append(arguments) or ['more'])
    text = ('the checkpoint %s/model.ckpt-2 holds state that the checkpoints to come would be '
            'without: w/Momentum' % tmp_path)
    assert lines == ['going on from %s/model.ckpt-2' % tmp_path, text, 'more']
    assert [arguments[1:] for arguments in asked] == [(None, text)]
