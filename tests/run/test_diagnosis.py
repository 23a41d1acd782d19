"""The verdict of numbers, and of runs that are made input-bound, compute-bound and balanced."""

import collections
import time

import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.run import diagnosis
from towers.run.diagnosis import Diagnosis, Trial, diagnose

STAGES = collections.OrderedDict([('read', .001), ('decode', .006), ('augment', .002),
                                  ('batch', .0005), ('copy', .0005)])


@pytest.mark.parametrize('pipeline, alone, together, side', [
    (100., 400., 98., 'input'), (89., 100., 80., 'input'), (4000., 100., 99., 'towers'),
    (4000., 100., 40., 'towers'),  # what else the machine did is no reason to blame the input
    (300., 100., 92., 'towers'), (300., 100., 75., 'both'), (100., 100., 95., 'balanced'),
    (105., 100., 52., 'balanced')])
def test_sides(pipeline, alone, together, side):
    assert Diagnosis(pipeline, alone, together, 0., STAGES).side == side


def test_each_stage_takes_what_it_adds_to_those_before(monkeypatch):
    """Stages that run side by side: one that is faster than those before it adds nothing."""
    rates = iter([100., 50., 80., 25., 20.])

    class Steps:
        rate, waiting = 10., 0.

        def __init__(self, *unused):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *unused):
            pass

        def measure(self, seconds):
            pass
    monkeypatch.setattr(diagnosis, 'pipeline_rate', lambda *unused: next(rates))
    monkeypatch.setattr(diagnosis, '_Steps', Steps)
    found = diagnose(None, lambda: None, 1, 4, lambda: collections.OrderedDict.fromkeys(
        ['read', 'decode', 'augment', 'batch']))
    assert found.pipeline == 20.
    assert list(found.stages) == ['read', 'decode', 'augment', 'batch', 'copy']
    assert list(found.stages.values()) == pytest.approx([.01, .01, 0., .02, .01])


def test_sentences_say_by_how_much_and_what_to_change():
    text = str(Diagnosis(100., 400., 98., .7, STAGES))
    assert text.splitlines() == [
        'pipeline alone          100 images/s',
        'towers alone            400 images/s  from their own memory',
        'together                 98 images/s  waiting for input for 70 % of the time',
        '  read                    1 ms an image, 10 %',
        '  decode                  6 ms an image, 60 %',
        '  augment                 2 ms an image, 20 %',
        '  batch                 0.5 ms an image, 5 %',
        '  copy                  0.5 ms an image, 5 %',
        'The input holds the run back: the pipeline delivers 100 of the 400 images/s that the '
        'towers could take, and the run loses 76 % of their speed; decode takes 60 % of the '
        "pipeline's time: store the images no larger than the crops need, or give the pipeline "
        'more processors.']
    assert Diagnosis(1000., 100., 98., 0., STAGES).verdict.startswith(
        'The towers hold the run back: they take 100 images/s, and the pipeline could deliver '
        '1,000, 10 times as many, so that a faster input would bring 2 % at most')
    assert 'together they reach 75, 25 % less' in Diagnosis(300., 100., 75., 0., STAGES).verdict
    assert 'processors that they do not share' in Diagnosis(100., 100., 50., 0., STAGES).verdict
    busy = str(Diagnosis(4000., 100., 40., 0., STAGES))
    assert 'slower than if they took turns (98 images/s)' in busy


def measured(input_seconds, step_seconds, seconds=.15, stage_inputs=False):
    """Pipeline and towers that sleep for each batch, which takes no processor from the other."""
    def sleeper(duration):
        def sleep(value):
            time.sleep(duration)
            return value
        return lambda value: tf.ensure_shape(tf.numpy_function(sleep, [value], value.dtype),
                                             value.shape)

    def batches():
        dataset = tf.data.Dataset.from_tensors(tf.ones([4, 3])).repeat()
        return dataset.map(sleeper(input_seconds)).prefetch(2)

    def trial(staging):
        iterator = tf.data.make_initializable_iterator(batches())

        def model_fn(values):
            weight = tf.get_variable('weight', [3, 1], initializer=tf.ones_initializer())
            slept = tf.stop_gradient(sleeper(step_seconds)(values))
            return tf.reduce_mean(tf.matmul(slept, weight))
        built = towers.build_towers(model_fn, iterator.get_next(),
                                    tf.train.GradientDescentOptimizer(.1), ['/cpu:1', '/cpu:2'],
                                    stage_inputs=staging)
        return Trial(built.train_op, [iterator.initializer],
                     towers.session_config(built.devices), built)
    return diagnose(trial, batches, ['/cpu:1', '/cpu:2'], 4, seconds=seconds,
                    stage_inputs=stage_inputs)


@pytest.mark.slow
@pytest.mark.parametrize('stage_inputs', [False, True])
def test_a_run_made_input_bound(stage_inputs):
    found = measured(.04, 0., stage_inputs=stage_inputs)
    assert found.side == 'input' and found.pipeline <= 4 / .04
    assert found.waiting > .5
    assert 'The input holds the run back' in str(found)


@pytest.mark.slow
@pytest.mark.version_independent
def test_a_run_made_compute_bound():
    found = measured(0., .03)
    assert found.side == 'towers' and found.towers <= 4 / .03
    assert found.waiting < .5
    assert list(found.stages) == ['pipeline', 'copy']


@pytest.mark.slow
def test_a_balanced_run():
    # Python's lock is between the two towers' sleepers and the pipeline's for moments only.
    found = measured(.1, .1, seconds=1.)
    assert .7 < found.pipeline / found.towers < 1.4
