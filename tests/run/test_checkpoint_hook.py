"""When `CheckpointHook` saves, and what it keeps."""

import os
import resource

import pytest
import tensorflow.compat.v1 as tf
from case_marks import first_fast

from checkpoint_runs import DATA, Recorder, error_of_run, run, saved_steps, value_of
from towers.checkpoint.newest import Newest, newest_checkpoint
from towers.errors import InvalidArgumentError
from towers.run.checkpoint_hook import CheckpointHook


def test_it_saves_at_the_start_at_the_multiples_and_at_the_end(tmpdir):
    directory = str(tmpdir.join('made', 'for', 'it'))
    recorder = Recorder()
    run(directory, 8, save_steps=3, listeners=[recorder])
    assert recorder.calls == ['begin', 'before 0', 'after 0', 'before 3', 'after 3', 'before 6',
                              'after 6', 'before 8', 'after 8', 'end 8']
    assert saved_steps(directory) == [0, 3, 6, 8]
    for step in (0, 3, 6, 8):
        assert value_of(directory + '/model.ckpt-%d' % step) == step
    assert newest_checkpoint(directory) == Newest(directory + '/model.ckpt-8', 8, [])
    # No graph beside them, and the directory can be moved.
    assert not [name for name in os.listdir(directory) if 'meta' in name or 'pbtxt' in name]
    with open(directory + '/checkpoint') as state:
        assert directory not in state.read()


def test_a_call_of_several_steps_saves_where_it_passes_a_multiple(tmpdir):
    step = tf.train.get_or_create_global_step()
    three_steps = tf.assign_add(step, 3)
    hook = CheckpointHook(str(tmpdir), step, save_steps=4, keep=10)
    with tf.train.MonitoredSession(hooks=[hook]) as session:
        for _ in range(5):
            session.run(three_steps)
    assert saved_steps(str(tmpdir))[:2] == [0, 6]


@pytest.mark.slow
def test_a_run_that_goes_on_saves_at_the_same_steps_and_no_step_twice(tmpdir):
    directory = str(tmpdir)
    run(directory, 5, save_steps=3)
    written = {name: os.stat(str(tmpdir.join(name))).st_mtime_ns for name in os.listdir(directory)
               if 'ckpt-5' in name}
    recorder = Recorder()
    run(directory, 10, save_steps=3, listeners=[recorder], keep=10)
    assert [call for call in recorder.calls if 'after' in call] == ['after 6', 'after 9',
                                                                    'after 10']
    assert saved_steps(directory) == [0, 3, 5, 6, 9, 10]
    assert {name: os.stat(str(tmpdir.join(name))).st_mtime_ns for name in written} == written
    # Nothing left to do: nothing is written.
    recorder = Recorder()
    run(directory, 0, save_steps=3, listeners=[recorder])
    assert recorder.calls == ['begin', 'end 10']


@pytest.mark.slow
def test_keep_counts_across_restarts_and_deletes_only_what_the_state_file_knows(tmpdir):
    directory = str(tmpdir)
    run(directory, 4, save_steps=1, keep=3)
    assert saved_steps(directory) == [2, 3, 4]
    # More from now on; then fewer at once, not one less with each save.
    run(directory, 7, save_steps=1, keep=5)
    assert saved_steps(directory) == [3, 4, 5, 6, 7]
    run(directory, 8, save_steps=1, keep=2)
    assert saved_steps(directory) == [7, 8]
    for suffix in ('.index', DATA):
        tmpdir.join('model.ckpt-7' + suffix).copy(tmpdir.join('model.ckpt-70' + suffix))
    run(directory, 9, save_steps=1, keep=1)
    assert saved_steps(directory) == [9, 70]
    run(directory, 12, save_steps=1, keep=None)
    assert saved_steps(directory) == [9, 10, 11, 12, 70]


@pytest.mark.parametrize('step', first_fast(1, [4, 0]))
def test_a_listener_stops_the_run(tmpdir, step):
    recorder, other = Recorder(stop_at=step), Recorder()
    run(str(tmpdir), 100, save_steps=2, listeners=[recorder, other])
    assert saved_steps(str(tmpdir)) == list(range(0, step + 1, 2))
    assert other.calls[-2:] == ['after %d' % step, 'end %d' % step]


@pytest.mark.slow
def test_a_legacy_loop_takes_the_hook_as_it_is(tmpdir):
    # A MonitoredTrainingSession that restores by itself, and whose saver the hook takes.
    for steps in (3, 7):
        with tf.Graph().as_default():
            step = tf.train.get_or_create_global_step()
            train_op = tf.assign_add(step, 1)
            hooks = [CheckpointHook(str(tmpdir), step, save_steps=2, keep=3),
                     tf.train.StopAtStepHook(last_step=steps)]
            with tf.train.MonitoredTrainingSession(
                    checkpoint_dir=str(tmpdir), save_checkpoint_secs=None, hooks=hooks,
                    save_checkpoint_steps=None, log_step_count_steps=None) as session:
                assert len(tf.get_collection(tf.GraphKeys.SAVERS)) == 1
                while not session.should_stop():
                    session.run(train_op)
    assert saved_steps(str(tmpdir)) == [4, 6, 7]


def test_the_saver_that_is_given_is_used(tmpdir):
    step = tf.train.get_or_create_global_step()
    tf.get_variable('not_saved', [])
    saver = tf.train.Saver([step], max_to_keep=9, write_version=tf.train.SaverDef.V1)
    hook = CheckpointHook(str(tmpdir), step, save_steps=1, keep=2, saver=saver)
    increment = tf.assign_add(step, 1)
    with tf.train.MonitoredSession(hooks=[hook]) as session:
        for _ in range(3):
            session.run(increment)
    assert sorted(os.listdir(str(tmpdir))) == ['checkpoint', 'model.ckpt-2', 'model.ckpt-3']
    assert newest_checkpoint(str(tmpdir)).step == 3


@pytest.mark.parametrize('options', [{'save_steps': 0}, {'save_steps': None}, {'keep': 0}])
def test_arguments_that_make_no_sense(options):
    with pytest.raises(InvalidArgumentError, match='expected a whole number of at least 1'):
        CheckpointHook('anywhere', tf.train.get_or_create_global_step(), **options)


# ---- What `CheckpointHook` says, and leaves, when it cannot save or should not -------------------

@pytest.mark.slow
def test_a_run_that_was_not_restored_writes_nothing(tmpdir):
    directory = str(tmpdir)
    run(directory, 6, save_steps=3)
    before = sorted(os.listdir(directory))
    assert error_of_run(directory, 9, save_steps=3, restore=False) == (
        'the newest checkpoint in %s is of step 6, but the session starts from step 0: it was not '
        'restored. Nothing was written. Restore it (towers.newest_checkpoint finds it), or give '
        'another directory.' % directory)
    assert sorted(os.listdir(directory)) == before


@pytest.mark.slow
def test_a_lost_state_file_stops_a_run_that_did_not_look(tmpdir):
    directory = str(tmpdir)
    run(directory, 6, save_steps=3)
    tmpdir.join('checkpoint').remove()
    assert error_of_run(directory, 9, save_steps=3, restore=False) == (
        '{0}/checkpoint is missing, and only it says which of the 3 checkpoints is the newest. '
        'Nothing was written. Call towers.newest_checkpoint, to choose one, and '
        'towers.tidy_directory before the session is made, or give another directory.'.format(
            directory))


@pytest.mark.slow
def test_a_save_that_hits_a_limit_is_an_error_that_says_what_is_safe(tmpdir):
    # A real failure of the file system. To TF it is an OutOfRangeError, at which a
    # MonitoredSession would end as if all were well.
    directory = str(tmpdir)
    size = 20000
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(step):
        if step == 5:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        text = error_of_run(directory, 100, save_steps=2, size=size, at_step=limit)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert text.startswith('step 6 could not be saved in %s: %s/model.ckpt-6.data-00000-of-00001.'
                           'tempstate' % (directory, directory))
    assert text.endswith(
        '; File too large. Safe and whole is %s/model.ckpt-4 (step 4). The steps since then are '
        'lost. Make room or make the directory writable, and start again: the run goes on from '
        'there.' % directory)
    assert sorted(os.listdir(directory)) == sorted(['checkpoint'] + [
        'model.ckpt-%d%s' % (step, suffix) for step in (0, 2, 4) for suffix in ('.index', DATA)])
    run(directory, 8, save_steps=2, size=size)
    assert saved_steps(directory) == [0, 2, 4, 6, 8]
    assert value_of(directory + '/model.ckpt-8') == 8


def test_what_tf_raises_becomes_one_line(tmpdir, monkeypatch):
    save = tf.train.Saver.save

    def fail(self, session, path, global_step, **options):
        if global_step == 2:  # as TF 2.21 puts a full disk
            raise tf.errors.ResourceExhaustedError(
                None, None, "Graph execution error:\n\nDetected at node 'save/SaveV2' defined at "
                '(most recent call last):\n    File "a.py", line 3, in <module>\nNode: '
                "'save/SaveV2'\nm.ckpt-2.index.tempstate83; No space left on device\n\t [[{{node "
                'save/SaveV2}}]]')
        return save(self, session, path, global_step, **options)
    monkeypatch.setattr(tf.train.Saver, 'save', fail)
    assert error_of_run(str(tmpdir), 3, save_steps=1) == (
        'step 2 could not be saved in {0}: m.ckpt-2.index.tempstate83; No space left on device. '
        'Safe and whole is {0}/model.ckpt-1 (step 1). The steps since then are lost. Make room or '
        'make the directory writable, and start again: the run goes on from there.'.format(tmpdir))


def test_a_lost_machine_is_left_to_the_session(tmpdir, monkeypatch):
    def fail(*unused_args, **unused_options):
        raise tf.errors.UnavailableError(None, None, 'Socket closed')
    monkeypatch.setattr(tf.train.Saver, 'save', fail)
    step = tf.train.get_or_create_global_step()
    hook = CheckpointHook(str(tmpdir), step, save_steps=1)
    hook.begin()
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        with pytest.raises(tf.errors.UnavailableError):
            hook.after_create_session(session, None)
