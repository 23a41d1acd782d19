"""What hooks take to count steps and examples."""

import io

import pytest
import tensorflow.compat.v1 as tf

from towers.errors import InvalidArgumentError
from towers.run.step_clock import StepCounts
from towers.run.summaries import Summaries, SummaryHook
from trainer.progress import ProgressHook


def line_of(make_hook):
    """The line of step 4 that a `ProgressHook` writes, up to its epoch."""
    with tf.Graph().as_default(), io.StringIO() as stream:
        step = tf.train.get_or_create_global_step()
        examples = tf.get_variable('examples', dtype=tf.int64, initializer=tf.constant(7, tf.int64))
        hook, train_op = make_hook(step, examples, stream), tf.assign_add(step, 1).op
        with tf.train.MonitoredSession(hooks=[hook]) as session:
            for _ in range(4):
                session.run(train_op)
        return '  '.join(stream.getvalue().splitlines()[-1].split('  ')[:2])


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


def test_counts_are_given_once_and_are_all_there(tmp_path):
    counts = StepCounts(tf.train.get_or_create_global_step(), 10)
    no_summaries = Summaries({}, {}, None)
    for hook, text in (
            (lambda: SummaryHook(no_summaries, counts, str(tmp_path), 10),
             'batch_size=10 is given twice, since StepCounts holds it: leave it out.'),
            (lambda: SummaryHook(no_summaries, counts.global_step, str(tmp_path)),
             'batch_size=None: expected a whole number of at least 1.')):
        with pytest.raises(InvalidArgumentError) as caught:
            hook()
        assert str(caught.value) == text
    SummaryHook(no_summaries, counts, str(tmp_path))
