"""A step that takes long says so while it does, and whether it waits for its input."""

import threading
import time

import pytest
import tensorflow.compat.v1 as tf

from towers.run.input_watch import InputWatchHook
from towers.run.long_steps import LongStepHook
from towers.run.step_loop import LoopSession

SECONDS = 0.2


def blocked_at(value, number, release):
    def wait(given):
        if given == number:
            assert release.wait(20.)
        return given
    return tf.ensure_shape(tf.numpy_function(wait, [value], value.dtype), value.shape)


def lines_of(blocked, reason, session_class, steps=4):
    """The lines of a run whose step 2 is released by the second line with this reason.

    TensorFlow may take so long to prepare the first step that it has lines, too.
    """
    release, said = threading.Event(), []

    def say(line):
        said.append(line)
        if len([line for line in said if line.endswith(reason)]) == 2:
            release.set()
    dataset = tf.data.Dataset.range(steps)
    if blocked == 'input':
        dataset = dataset.map(lambda number: blocked_at(number, 2, release))
    value = tf.data.make_one_shot_iterator(dataset).get_next()
    if blocked == 'work':
        value = blocked_at(value, 2, release)
    total = tf.get_variable('total', [], tf.int64, tf.zeros_initializer())
    train_op = tf.group(tf.assign_add(total, value),
                        tf.assign_add(tf.train.get_or_create_global_step(), 1))
    watch = InputWatchHook(train_op, say=None)
    hook = LongStepHook(watch.watch, SECONDS, say)
    with session_class(hooks=[watch, hook]) as session:
        if session_class is LoopSession:
            assert session.run_steps(train_op, steps) == steps
        else:
            for _ in range(steps):
                session.run(train_op)
        assert session.run_step_fn(lambda step_context: step_context.session.run(total)) == 6
    return said


@pytest.mark.parametrize('session_class, blocked, reason', [
    (LoopSession, 'input', 'its input has not come'), pytest.param(
        tf.train.MonitoredSession, 'work', 'its input is there, its operations work',
        marks=pytest.mark.slow)])
def test_a_blocked_step_says_what_it_waits_for_and_again(session_class, blocked, reason):
    begin = time.time()
    said = lines_of(blocked, reason, session_class)
    assert len(said) >= 2 and time.time() - begin >= 2 * SECONDS
    assert all(line.startswith('waiting        this step has taken ') for line in said)
    assert said[-1].endswith(' s so far: ' + reason) and said[-2].endswith(reason)


def test_steps_that_are_not_long_say_nothing_and_the_thread_ends():
    said = []
    train_op = tf.assign_add(tf.train.get_or_create_global_step(), 1).op
    watch = InputWatchHook(train_op, say=None)
    with tf.train.MonitoredSession(hooks=[watch, LongStepHook(watch.watch, 20., said.append)]) as s:
        for _ in range(3):
            s.run(train_op)
        names = [thread.name for thread in threading.enumerate()]
        assert names.count('towers-long-steps') == 1
    assert not said
    for thread in threading.enumerate():
        if thread.name == 'towers-long-steps':
            thread.join(10.)
            assert not thread.is_alive()
