"""What `CheckpointHook` says, and leaves, when it cannot save or should not."""

import os
import resource

import pytest
import tensorflow.compat.v1 as tf
from checkpoint_runs import DATA, error_of_run, run, saved_steps, value_of

from towers.run.checkpoint_hook import CheckpointHook


def test_a_run_that_was_not_restored_writes_nothing(tmpdir):
    directory = str(tmpdir)
    run(directory, 6, save_steps=3)
    before = sorted(os.listdir(directory))
    assert error_of_run(directory, 9, save_steps=3, restore=False) == (
        'the newest checkpoint in %s is of step 6, but the session starts from step 0: it was not '
        'restored. Nothing was written. Restore it (towers.newest_checkpoint finds it), or give '
        'another directory.' % directory)
    assert sorted(os.listdir(directory)) == before


def test_a_lost_state_file_stops_a_run_that_did_not_look(tmpdir):
    directory = str(tmpdir)
    run(directory, 6, save_steps=3)
    tmpdir.join('checkpoint').remove()
    assert error_of_run(directory, 9, save_steps=3, restore=False) == (
        '{0}/checkpoint is missing, and only it says which of the 3 checkpoints is the newest. '
        'Nothing was written. Call towers.newest_checkpoint, to choose one, and '
        'towers.tidy_directory before the session is made, or give another directory.'.format(
            directory))


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


@pytest.mark.parametrize('error, reason', [
    # As TF 1.15 and 2.21 put them, on a full and on a read-only disk.
    (tf.errors.ResourceExhaustedError(
        None, None, "Graph execution error:\n\nDetected at node 'save/SaveV2' defined at (most "
        "recent call last):\n    File \"a.py\", line 3, in <module>\nNode: 'save/SaveV2'\n"
        'm.ckpt-2.index.tempstate83; No space left on device\n\t [[{{node save/SaveV2}}]]'),
     'm.ckpt-2.index.tempstate83; No space left on device'),
    (tf.errors.PermissionDeniedError(None, None, 'm.ckpt-2; Read-only file system\n\t [['),
     'm.ckpt-2; Read-only file system'),
    (OSError(28, 'No space left on device'), '[Errno 28] No space left on device')])
def test_what_tf_raises_becomes_one_line(tmpdir, monkeypatch, error, reason):
    save = tf.train.Saver.save

    def fail(self, session, path, global_step, **options):
        if global_step == 2:
            raise error
        return save(self, session, path, global_step, **options)
    monkeypatch.setattr(tf.train.Saver, 'save', fail)
    assert error_of_run(str(tmpdir), 3, save_steps=1) == (
        'step 2 could not be saved in {0}: {1}. Safe and whole is {0}/model.ckpt-1 (step 1). The '
        'steps since then are lost. Make room or make the directory writable, and start again: '
        'the run goes on from there.'.format(tmpdir, reason))


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
