"""Learning rates: the scaling rules and the schedules, against numbers worked out by hand."""

import math

import pytest
import tensorflow.compat.v1 as tf

from towers.errors import InvalidArgumentError
from towers.run.learning_rate import LearningRate, scale_learning_rate


@pytest.mark.parametrize('base, num_towers, rule, expected', [
    (0.001, 4, 'sqrt', 0.002),  # the InceptionResNet claim
    (0.001, 4, 'linear', 0.004), (0.001, 4, 'none', 0.001), (0.5, 1, 'sqrt', 0.5),
    (0.01, 2, 'sqrt', 0.01414213562373095)])
def test_scaling_rules(base, num_towers, rule, expected):
    scaled = scale_learning_rate(base, num_towers, rule)
    assert isinstance(scaled, float)
    assert scaled == pytest.approx(expected, rel=1e-15)
    assert LearningRate(base, num_towers, rule).peak == scaled


@pytest.mark.parametrize('rate, expected', [
    (LearningRate(0.001), {0: 0.001, 10 ** 12: 0.001}),
    # From the rate of one device to the scaled one; from 0 where nothing was scaled.
    (LearningRate(0.001, 4, 'sqrt', warmup_examples=1000),
     {0: 0.001, 250: 0.00125, 500: 0.0015, 999: 0.001999, 1000: 0.002, 5000: 0.002}),
    (LearningRate(0.5, 4, 'none', warmup_examples=100),
     {0: 0, 1: 0.005, 50: 0.25, 100: 0.5, 101: 0.5}),
    (LearningRate(0.1, decay='exponential', decay_examples=200, decay_rate=0.25),
     {0: 0.1, 100: 0.05, 200: 0.025, 300: 0.0125, 400: 0.00625}),
    # cos of 0, 60, 90, 120, 180 degrees: 1, 1/2, 0, -1/2, -1.
    (LearningRate(0.2, decay='cosine', decay_examples=1200),
     {0: 0.2, 400: 0.15, 600: 0.1, 800: 0.05, 1200: 0, 5000: 0}),
    (LearningRate(0.4, decay='step', decay_examples=100, decay_rate=0.5),
     {0: 0.4, 99: 0.4, 100: 0.2, 250: 0.1}),
    (LearningRate(0.4, decay='polynomial', decay_examples=100, decay_power=2.),
     {0: 0.4, 50: 0.1, 90: 0.004, 100: 0, 500: 0}),
    # Periods of 120, 360, 1080 examples: they begin at 0, 120, 480, 1560.
    (LearningRate(0.2, decay='cosine_restarts', decay_examples=120, restart_growth=3.),
     {0: 0.2, 40: 0.15, 60: 0.1, 120: 0.2, 240: 0.15, 300: 0.1, 480: 0.2, 1020: 0.1, 1560: 0.2,
      120 * 121: 0.2}),  # log 243 / log 3 is below 5 in float64
    (LearningRate(0.2, decay='cosine_restarts', decay_examples=120, restart_growth=1.),
     {0: 0.2, 60: 0.1, 120: 0.2, 180: 0.1, 640: 0.15}),
    # Its end keeps its digits: (1 - cos x) / 2 = x^2 / 4 for small x, here pi / 10^4.
    (LearningRate(1, decay='cosine', decay_examples=10 ** 6),
     {10 ** 6 - 100: math.pi ** 2 / 4e8}),
    # Warm-up and decay multiply, and both count from zero: 0.1, 0.25, 0.4, 0.4; 1, 1/2, 1/4, 1/16.
    (LearningRate(0.1, 4, 'linear', warmup_examples=200, decay='exponential', decay_examples=100,
                  decay_rate=0.5), {0: 0.1, 100: 0.125, 200: 0.1, 400: 0.025})])
def test_rates_of_the_schedules(rate, expected):
    examples = tf.placeholder(tf.int64, [])
    tensor = rate.tensor(examples)
    assert tensor.dtype == tf.float32 and tensor.shape.as_list() == []
    with tf.Session() as session:
        for seen, value in expected.items():
            got = session.run(tensor, {examples: seen})
            assert got == pytest.approx(value, rel=1e-6, abs=1e-18), seen


@pytest.mark.parametrize('arguments, expected', [
    (dict(num_towers=4, rule='linear'), '0.004 = 0.001 x 4'),
    (dict(num_towers=4, rule='sqrt', warmup_examples=1437, decay='exponential',
          decay_examples=2874, decay_rate=0.94),
     '0.002 = 0.001 x sqrt(4), warm-up from 0.001 over 1,437 examples, x0.94 every 2,874 examples'),
    (dict(decay='step', decay_examples=10, decay_rate=0.1),
     '0.001, in steps x0.1 every 10 examples'),
    (dict(decay='polynomial', decay_examples=10, decay_power=1),
     '0.001, to 0 over 10 examples, by the power 1'),
    (dict(decay='cosine_restarts', decay_examples=10, restart_growth=2),
     '0.001, cosine to 0 over 10 examples, then again, each period x2 as long'),
    (dict(warmup_examples=1, decay='cosine', decay_examples=50000),
     '0.001, warm-up from 0 over 1 example, cosine to 0 over 50,000 examples')])
def test_describe(arguments, expected):
    assert str(LearningRate(0.001, **arguments)) == expected


@pytest.mark.parametrize('arguments, text', [
    (dict(base=0), 'base=0: expected a number above 0'),
    (dict(base=float('nan')), 'base=nan'),
    (dict(rule='square'), "rule='square': expected one of 'none', 'sqrt', 'linear'"),
    (dict(decay='stairs'), "decay='stairs': expected one of 'none', 'exponential', 'step', 'poly"),
    (dict(decay='exponential', decay_rate=0.9),
     "decay='exponential' takes decay_examples and decay_rate, and was given decay_rate"),
    (dict(decay='none', decay_examples=9), "decay='none' takes nothing, and was given decay_ex"),
    (dict(decay='polynomial', decay_examples=9, decay_power=0), 'decay_power=0: expected a number a'),
    (dict(decay='cosine_restarts', decay_examples=9, restart_growth=.5), 'restart_growth=0.5: exp'),
    (dict(decay='exponential', decay_examples=9, decay_rate=1.5), 'decay_rate=1.5: expected a num')])
def test_bad_arguments_are_named(arguments, text):
    with pytest.raises(InvalidArgumentError, match=text):
        LearningRate(**dict(dict(base=0.001), **arguments))


def test_what_is_no_count_of_examples():
    for seen in (100, tf.constant(1.5), tf.constant([1, 2])):
        with pytest.raises(InvalidArgumentError, match='^examples_seen=.*: expected a scalar int'):
            LearningRate(0.001).tensor(seen)
