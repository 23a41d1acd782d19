"""What hooks take to count steps and examples."""

import io

import pytest
import tensorflow.compat.v1 as tf

from towers.errors import InvalidArgumentError
from towers.run.step_clock import StepCounts
from towers.run.summaries import Summaries, SummaryHook
from trainer.progress import ProgressHook


def line_of(make_hook):
    """The line of step 4 that a `ProgressHook` writes, its step and epoch."""
    with tf.Graph().as_default(), io.StringIO() as stream:
        step = tf.train.get_or_create_global_step()
        examples = tf.get_variable('examples', dtype=tf.int64, initializer=tf.constant(7, tf.int64))
        hook, train_op = make_hook(step, examples, stream), tf.assign_add(step, 1).op
        with tf.train.MonitoredSession(hooks=[hook]) as session:
            for _ in range(4):
                session.run(train_op)
        fields = stream.getvalue().splitlines()[-1].split('  ')
        return '  '.join([fields[0], fields[-1]])


@pytest.mark.slow
def test_examples_are_counted_by_their_variable_or_by_steps():
    hooks = [
        lambda step, examples, stream: ProgressHook(
            {}, StepCounts(step, 10, examples_per_epoch=70, last_step=4, examples=examples),
            stream=stream),
        lambda step, examples, stream: ProgressHook(
            {}, StepCounts(step, 10, examples_per_epoch=16, last_step=4), stream=stream)]
    assert [line_of(make_hook) for make_hook in hooks] == ['step 4/4  epoch 0.1',
                                                           'step 4/4  epoch 2.5']


def test_a_batch_size_that_is_none(tmp_path):
    with pytest.raises(InvalidArgumentError, match='batch_size=0: expected a whole number'):
        SummaryHook(Summaries({}, {}, None), StepCounts(tf.train.get_or_create_global_step(), 0),
                    str(tmp_path))
