"""How fast pipelines and steps are said to be: by the examples that they had."""

import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from trainer import speeds
from trainer.diagnosis import Trial
from trainer.speeds import PipelineSpeed, StepsSpeed


@pytest.fixture
def steps_of_a_second(monkeypatch):
    """A measurement of 4 steps that seem to take a second."""
    def speed_of(step, seconds, on_start):
        on_start()
        return speeds.Speed(sum(step() for _ in range(4)), .5, 0.)
    monkeypatch.setattr(speeds, 'speed_of', speed_of)


def short_ones():
    """Batches of 6, 6, 2, 6, 6, 2, …"""
    return tf.data.Dataset.from_tensor_slices(np.ones([14, 3], np.float32)).batch(6).repeat()


@pytest.mark.parametrize('devices', [(), ['/cpu:1', '/cpu:2']])
def test_examples_of_a_pipeline(steps_of_a_second, devices):
    with PipelineSpeed(short_ones, 6, devices) as pipeline:
        pipeline.measure(0)
    assert pipeline.rate == 6 + 6 + 2 + 6
    with PipelineSpeed(lambda: tf.data.Dataset.from_tensors(1.).repeat(), 6) as pipeline:
        pipeline.measure(0)
    assert pipeline.rate == 4 * 6  # nothing to count them by


def training_of(batches, model_fn, **options):
    """A function that builds a training in the default graph, and returns its `Trial`."""
    def trial():
        iterator = tf.data.make_initializable_iterator(batches())
        built = towers.build_towers(model_fn, iterator.get_next(),
                                    tf.train.GradientDescentOptimizer(.1), ['/cpu:1', '/cpu:2'],
                                    **options)
        return Trial(built.train_op, [iterator.initializer],
                     towers.session_config(built.devices), built)
    return trial


@pytest.mark.parametrize('holds_batch, examples', [(False, 6 + 6 + 2 + 6), (True, 4 * 6)])
def test_examples_of_steps(steps_of_a_second, holds_batch, examples):
    def model_fn(values):
        weight = tf.get_variable('weight', [3, 1], initializer=tf.ones_initializer())
        return tf.reduce_mean(tf.matmul(values, weight))
    with StepsSpeed(training_of(short_ones, model_fn, remainder='weight'), holds_batch) as steps:
        steps.measure(0)
    assert steps.rate == examples and (steps.waiting == 0) == holds_batch


def test_processor_time_of_others(monkeypatch):
    """Of two processors this program uses a tenth, and a quarter is idle."""
    now = [0.]

    def step():
        now[0] += .1
        return 5
    monkeypatch.setattr(time, 'perf_counter', lambda: now[0])
    monkeypatch.setattr(time, 'process_time', lambda: .2 * now[0])
    monkeypatch.setattr(speeds, '_processors', lambda: 2)
    for idle, others in ((.5, .65), (float('nan'), 0.)):
        monkeypatch.setattr(speeds, '_idle_seconds', lambda idle=idle: idle * now[0])
        assert speeds.speed_of(step, 2.) == pytest.approx((50., .1, others))
