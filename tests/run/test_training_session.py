"""`training_session`: what it finds in a directory, in which order it acts, how it ends."""

import errno
import os
import re
import signal
import socket
import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from checkpoint_runs import DATA

import towers
from towers.checkpoint.newest import newest_checkpoint
from towers.errors import CheckpointError, InvalidArgumentError, NonFiniteError, RunLockedError
from towers.nonfinite import checked_loss
from towers.run import training_session as module
from towers.run.training_session import hold_directory, training_session
from case_marks import first_fast


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


@pytest.mark.slow
def test_it_starts_and_goes_on(tmp_path):
    folder = tmp_path / 'made' / 'for it'
    assert run(folder, 5) == ([], [5.] * 3)
    assert saved(folder) == [0, 2, 4, 5]
    assert run(folder, 7) == (['going on from %s/model.ckpt-5' % folder], [7.] * 3)
    assert saved(folder) == [2, 4, 5, 6, 7]


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_nan_is_an_error_with_the_step_and_nothing_of_it_is_saved(tmp_path):
    run(tmp_path, 5)
    with pytest.raises(NonFiniteError, match='^the loss of tower 1 is NaN in step 8. ') as caught:
        run(tmp_path, 20, save_steps=1, bad_step=8)
    assert caught.value.__cause__ is None and caught.value.__suppress_context__
    newest = newest_checkpoint(str(tmp_path))
    assert newest.step == 7
    assert tf.train.load_variable(newest.prefix, 'w').tolist() == [7.] * 3


def damaged(folder, step):
    path = folder / ('model.ckpt-%d%s' % (step, DATA))
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.slow
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


@pytest.mark.parametrize('options, names', first_fast(1, [
    ({'width': 4}, r'another shape: w \(\[3\] there, \[4\] here\)'),
    ({'optimizer': tf.train.MomentumOptimizer(1., 0.5)}, 'not in the checkpoint: w/Momentum')]))
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
    class Fails(tf.train.SessionRunHook):
        def __init__(self):
            self.steps, self.failures = [], {11: None, 13: 12}  # step, and which to damage

        def after_create_session(self, session, coord):
            self.steps.append(int(session.run(tf.train.get_global_step())))

        def after_run(self, run_context, run_values):
            step = int(run_context.session.run(tf.train.get_global_step()))
            if step in self.failures:
                bad = self.failures.pop(step)
                if bad is not None:
                    damaged(tmp_path, bad)
                raise tf.errors.UnavailableError(None, None, 'gone')
    run(tmp_path, 5)
    hook = Fails()
    with tf.Graph().as_default():
        step = tf.train.get_or_create_global_step()
        w = tf.get_variable('w', [3], initializer=tf.zeros_initializer())
        train_op = tf.group(tf.assign_add(w, tf.ones([3])), tf.assign_add(step, 1))
        with training_session(str(tmp_path), step, [
                hook, tf.train.StopAtStepHook(last_step=14)], save_steps=4, keep=2,
                say=lambda line: None, recover=True) as session:
            while not session.should_stop():
                session.run(train_op)
    assert hook.failures == {} and hook.steps == [5, 8, 8]
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


def test_a_saver_that_gives_a_variable_another_name_is_refused_before_the_run(tmp_path):
    step = tf.train.get_or_create_global_step()
    w = tf.get_variable('w', [2])
    average = tf.get_variable('w/average', [2])
    for add in (lambda saver: saver, lambda saver: tf.add_to_collection('savers', saver)):
        saver = tf.train.Saver({'old/w': w, 'global_step': step})
        with pytest.raises(InvalidArgumentError, match="keeps variable w under the name 'old/w'"):
            with training_session(str(tmp_path), step, [], saver=add(saver)):
                pass
        assert not os.listdir(str(tmp_path))
    # As the swapping_saver of contrib's MovingAverageOptimizer has them.
    swapped = tf.train.Saver({'w': average, 'w/average': w, 'global_step': step})
    for _ in range(2):
        with training_session(str(tmp_path), step, [], saver=swapped, say=lambda line: None):
            pass


@pytest.mark.slow
def test_state_that_is_dropped_is_said(tmp_path):
    asked = []
    run(tmp_path, 2, optimizer=tf.train.MomentumOptimizer(1., 0.5))
    lines, _ = run(tmp_path, 3, check=lambda *arguments: asked.append(arguments) or ['more'])
    text = ('the checkpoint %s/model.ckpt-2 holds state that the checkpoints to come would be '
            'without: w/Momentum' % tmp_path)
    assert lines == ['going on from %s/model.ckpt-2' % tmp_path, text, 'more']
    assert [arguments[1:] for arguments in asked] == [(None, text)]


# ---- The lock of the directory -------------------------------------------------------------------

def test_a_second_process_is_refused_until_the_first_is_killed(tmpdir):
    directory, before = str(tmpdir.join('made', 'for', 'it')), time.time()
    read_end, write_end = os.pipe()
    holder = os.fork()
    if holder == 0:
        with hold_directory(directory):
            os.write(write_end, b'held')
            time.sleep(60)
    try:
        os.read(read_end, 4)
        with pytest.raises(RunLockedError) as caught:
            with hold_directory(directory):
                pytest.fail('two processes hold one directory')
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
    text = str(caught.value)
    start = '%s is in use by process %d on %s, since ' % (directory, holder, socket.gethostname())
    assert text.startswith(start) and text.endswith(
        "Two runs in one directory would overwrite and delete each other's checkpoints; nothing "
        'was written. Wait for that run, end it, or give this one another directory.')
    since = time.mktime(time.strptime(text[len(start):][:19], '%Y-%m-%d %H:%M:%S'))
    assert before - 1 <= since <= time.time()
    # What the killed one wrote is still there, and says nothing.
    lock = tmpdir.join('made', 'for', 'it', 'run.lock')
    assert lock.read().startswith('process %d on ' % holder)
    with hold_directory(directory) as locked:
        assert locked is True and lock.read().startswith('process %d on ' % os.getpid())
        lock.write('')
        with pytest.raises(RunLockedError, match='is in use by another process, which has not said '
                                                 'yet which one it is. Two runs'):
            with hold_directory(directory):
                pass


def test_a_file_in_the_place_of_the_directory(tmpdir):
    tmpdir.join('file').write('')
    for path in ('file', 'file/below'):
        with pytest.raises(CheckpointError) as caught:
            with hold_directory(str(tmpdir.join(path))):
                pass
        assert str(caught.value).startswith('%s cannot be written to: ' % tmpdir.join(path))
        assert str(caught.value).endswith(
            '. Nothing was written. There is no checkpoint there. Give a directory that can be '
            'made and written to.')


def test_a_file_system_without_locks(tmpdir, monkeypatch):
    def flock(*unused_args):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    monkeypatch.setattr(module.fcntl, 'flock', flock)
    with pytest.warns(RuntimeWarning) as warned:
        with hold_directory(str(tmpdir)) as locked:
            assert locked is False
    assert [str(warning.message) for warning in warned] == [
        '%s is not locked, as its file system has no file locks (%s): see to it yourself that no '
        'other run uses it.' % (tmpdir, os.strerror(errno.ENOLCK))]
    assert warned[0].filename == __file__
