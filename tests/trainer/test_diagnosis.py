"""The verdict of numbers, and of runs that are made input-bound; how long a step waits."""

import collections
import time
import types

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from trainer import diagnosis
from trainer.diagnosis import Diagnosis, diagnose, steps_of
from trainer.input_wait import timed_batch


def found_of(pipeline, alone, together, waiting=0.):
    """A `Diagnosis` with stages that take as long as the pipeline."""
    return Diagnosis(pipeline, alone, together, waiting, collections.OrderedDict(
        (name, share / pipeline) for name, share in (
            ('read', .1), ('decode', .6), ('augment', .2), ('batch', .1))))


@pytest.mark.parametrize('pipeline, alone, together, side', [
    (100., 400., 98., 'input'), (89., 100., 80., 'input'), (4000., 100., 99., 'towers'),
    (300., 100., 92., 'towers'), (300., 100., 75., 'both'), (100., 100., 95., 'towers'),
    (105., 100., 52., 'both')])
def test_sides(pipeline, alone, together, side):
    assert found_of(pipeline, alone, together).side == side


def test_sentences_say_by_how_much_and_what_to_change():
    assert str(found_of(100., 400., 98., .7)).splitlines() == [
        'pipeline alone          100 images/s',
        'towers alone            400 images/s  on a batch in memory',
        'together                 98 images/s  waiting for input for 70 % of the time',
        '  read                    1 ms each, 10 %',
        '  decode                  6 ms each, 60 %',
        '  augment                 2 ms each, 20 %',
        '  batch                   1 ms each, 10 %',
        'The input holds the run back, which loses 76 % of the speed of the towers; decode takes '
        "60 % of the pipeline's time: store the images no larger than the crops need, or give the "
        'pipeline more processors.']
    assert found_of(1000., 100., 98.).verdict.startswith(
        'The towers hold the run back: a faster input would bring 2 % at most')
    assert 'the run loses 25 % of the speed' in found_of(300., 100., 75.).verdict
    for pipeline, alone in ((46., 200.), (200., 46.)):  # one alone is slower than both together
        assert 'measure again, longer' in str(found_of(pipeline, alone, 62.))


def test_each_stage_takes_what_it_adds_to_those_before(monkeypatch):
    """Stages that run side by side: one that is faster than those before it adds nothing."""
    rates = iter([100., 50., 80., 25., 40., 20.])

    class Measured:
        waiting = .5

        def __init__(self, build):
            self.rate = next(rates)

        def __enter__(self):
            return self

        def __exit__(self, *unused):
            pass

        def measure(self, seconds):
            pass
    monkeypatch.setattr(diagnosis, '_Measured', Measured)
    said = []
    found = diagnose(None, None, 4, lambda: collections.OrderedDict.fromkeys(
        ['read', 'decode', 'augment', 'batch']), say=said.append)
    assert found[:4] == (25., 40., 20., .5)
    assert list(found.stages) == ['read', 'decode', 'augment', 'batch']
    assert list(found.stages.values()) == pytest.approx([.01, .01, 0., .02])
    assert said == ['measuring      6 times 5 s, with warm-ups about 38 s, and the time to build '
                    'the towers twice']


def slow(value):
    """Passes a value on, 20 ms later."""
    def sleep(value):
        time.sleep(.02)
        return value
    return tf.ensure_shape(tf.numpy_function(sleep, [value], value.dtype), value.shape)


def training_of(batches, model_fn):
    """The `Steps` of two towers on a dataset."""
    iterator = tf.data.make_initializable_iterator(batches)
    batch, waited = timed_batch(iterator)
    built = towers.build_towers(model_fn, batch, tf.train.GradientDescentOptimizer(.1),
                                ['/cpu:0', '/cpu:1'], remainder='weight',
                                numerics=towers.Numerics(check_numerics=True))
    return steps_of(types.SimpleNamespace(train_op=built.train_op, built=built, iterator=iterator,
                                          input_wait=waited),
                    towers.session_config(2))


def linear(values):
    weight = tf.get_variable('weight', [3, 1], initializer=tf.ones_initializer())
    return tf.reduce_mean(tf.matmul(values, weight))


def test_a_run_made_input_bound_and_its_examples():
    """Batches of 6, 6 and 2 examples, that are 20 ms late each."""
    def batches():
        return tf.data.Dataset.from_tensor_slices(np.ones([14, 3], np.float32)).batch(
            6).repeat().map(slow)

    def train(is_held):
        return training_of(batches().take(1).cache().repeat() if is_held else batches(), linear)
    found = diagnose(train, batches, 6, seconds=.5)
    assert found.side == 'input' and found.waiting > .5
    assert found.pipeline < 6 / .02 < found.towers and found.together < 6 / .02
    assert 'The input holds the run back' in str(found)


def test_a_loss_that_is_not_finite_is_said_as_in_training():
    def batches():
        return tf.data.Dataset.from_tensors(tf.ones([4, 3])).repeat()
    with pytest.raises(towers.NonFiniteError, match='the loss of tower . is NaN'):
        diagnose(lambda is_held: training_of(batches(), lambda x: tf.log(-linear(x))), batches, 4,
                 seconds=.02)


def test_how_long_a_step_waits_for_its_batch():
    """The batch passes through as it was, sparse tensors too."""
    def element(number):
        sparse = tf.sparse.from_dense(tf.stack([number, 0]))
        return {'sparse': sparse, 'slow': slow(number)}
    iterator = tf.data.make_initializable_iterator(tf.data.Dataset.range(1, 4).map(element))
    batch, waited = timed_batch(iterator)
    with tf.Session() as session:
        session.run(iterator.initializer)
        for number in (1, 2, 3):
            found, seconds = session.run([batch, waited])
            assert found['slow'] == number and list(found['sparse'].values) == [number]
            assert .015 < seconds < 10
        with pytest.raises(tf.errors.OutOfRangeError):
            session.run(batch)
