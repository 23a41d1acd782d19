"""The hook that reports a step of a running session."""

import sample_models as samples
import tensorflow.compat.v1 as tf

import towers
from sample_models import linear, sgd
from towers.report.page import report_in
import pytest

VECTORS = samples.vectors(4)


def run(hook, built, steps):
    with tf.train.MonitoredTrainingSession(
            hooks=[hook], config=towers.session_config(built.devices)) as session:
        for _ in range(steps):
            session.run(built.train_op)


def test_one_step_of_a_session_is_reported(tmp_path):
    said = []
    built = towers.build_towers(linear, VECTORS, sgd(), 2,
                                global_step=tf.train.get_or_create_global_step())
    path = tmp_path / 'step.html'
    run(towers.StepReportHook(built, 3, str(path), say=said.append), built, 4)
    assert report_in(str(path))['title'] == '2 towers on /cpu:0, /cpu:1, batch 4'
    assert said[0] == 'report         %s' % path and len(said) > 1


def test_a_page_that_cannot_be_written_is_said_and_the_session_goes_on(tmp_path):
    said = []
    built = towers.build_towers(linear, VECTORS, sgd(), 2)
    run(towers.StepReportHook(built, 1, str(tmp_path / 'no' / 'step.html'), say=said.append),
        built, 2)
    assert len(said) == 1 and said[0].startswith('no report      of step 1: ')


@pytest.mark.slow
def test_a_session_that_begins_later_says_so(tmp_path):
    said = []
    step = tf.get_variable('global_step', [], tf.int64, tf.constant_initializer(7),
                           trainable=False)
    built = towers.build_towers(linear, VECTORS, sgd(), 2, global_step=step)
    run(towers.StepReportHook(built, 7, str(tmp_path / 'step.html'), say=said.append), built, 1)
    assert said == ['no report      of step 7: the run goes on from step 7']
