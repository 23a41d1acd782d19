"""When `CheckpointHook` saves, and what it keeps."""

import os

import pytest
import tensorflow.compat.v1 as tf
from checkpoint_runs import DATA, Recorder, run, saved_steps, value_of

from towers.checkpoint.files import Newest, newest_checkpoint
from towers.run.checkpoint_hook import CheckpointHook
from towers.errors import InvalidArgumentError


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


def test_a_listener_stops_the_run(tmpdir):
    recorder, other = Recorder(stop_at=4), Recorder()
    run(str(tmpdir), 100, save_steps=2, listeners=[recorder, other])
    assert saved_steps(str(tmpdir)) == [0, 2, 4]
    assert other.calls[-2:] == ['after 4', 'end 4']


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


def test_several_savers_in_the_graph_are_one_too_many(tmpdir):
    step = tf.train.get_or_create_global_step()
    for _ in range(2):
        tf.add_to_collection(tf.GraphKeys.SAVERS, tf.train.Saver())
    with pytest.raises(InvalidArgumentError, match='2 savers in its collection SAVERS: say which'):
        CheckpointHook(str(tmpdir), step, save_steps=1).begin()
