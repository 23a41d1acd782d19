"""towers.run.choose_placement: which placement is taken, and why."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.errors import InvalidArgumentError
from towers.run import choose_placement
from towers.run.choose_placement import (Timing, Trial, choose_variable_device, decide,
                                         placement_candidates)

CPUS = ('/device:CPU:0', '/device:CPU:1')
GPUS = ('/device:GPU:0', '/device:GPU:1')


def test_candidates_are_the_simplest_first_each_once():
    assert placement_candidates(CPUS) == ['/device:CPU:0', 'balanced', 'replicated']
    assert placement_candidates(GPUS) == [
        '/device:CPU:0', '/device:GPU:0', 'balanced', 'replicated']
    # One tower has nothing to replicate.
    assert placement_candidates(CPUS[1:]) == ['/device:CPU:0', '/device:CPU:1', 'balanced']
    # Towers of several devices may have each variable where it is read.
    assert placement_candidates('/cpu:0+/cpu:1') == ['/device:CPU:0', 'balanced', 'stage']
    assert placement_candidates('/cpu:1+/cpu:0,/cpu:2+/cpu:3') == [
        '/device:CPU:0', '/device:CPU:1', 'balanced', 'stage']


# ---- the decision --------------------------------------------------------------------------------

def timings(**milliseconds):
    return [Timing(name, [0.001 * each for each in values], None)
            for name, values in milliseconds.items()]


@pytest.mark.parametrize('given, taken, reason', [
    (dict(cpu=[10, 11, 12], gpu=[5, 6, 7]), 'gpu', 'the fastest'),
    (dict(cpu=[5, 6, 7], gpu=[10, 11, 12]), 'cpu', 'the fastest'),
    # The CPU's median is within what the GPU took.
    (dict(cpu=[7.1, 7.2, 7.3], gpu=[5, 6, 7.5]), 'cpu',
     'no slower than gpu beyond the spread of the turns, and simpler'),
    # They overlap, but neither median does.
    (dict(cpu=[6.5, 8, 9], gpu=[5, 6, 7]), 'gpu', 'the fastest'),
    (dict(cpu=[20, 20, 20], gpu=[5, 6, 7], balanced=[5, 5.5, 6]), 'gpu',
     'no slower than balanced beyond the spread of the turns, and simpler')])
def test_the_fastest_wins_and_ties_go_to_the_simplest(given, taken, reason):
    choice = decide(timings(**given))
    assert (choice.variable_device, choice.reason) == (taken, reason)


# ---- what is run ---------------------------------------------------------------------------------

class Clock:
    """Time as it passes for the steps of `build`: each takes what its placement is given."""

    def __init__(self, monkeypatch, **seconds):
        self.now = 0.
        self.seconds = {'/device:CPU:0': seconds['cpu'], 'balanced': seconds['balanced']}
        self.steps = []
        monkeypatch.setattr(choose_placement.time, 'perf_counter', lambda: self.now)

    def pass_by(self, candidate):
        self.now += self.seconds[candidate]
        self.steps.append(candidate)


def build(candidate, clock=None, devices=CPUS):
    """A trial of one variable; its input comes from an iterator that has to be started."""
    with tf.device('/cpu:0'):
        iterator = tf.data.make_initializable_iterator(
            tf.data.Dataset.from_tensors(np.ones([4], 'float32')).repeat())
        x = iterator.get_next()
    built = towers.build_towers(
        lambda x: tf.reduce_mean(x * tf.get_variable('w', [], initializer=tf.ones_initializer())),
        x, tf.train.MomentumOptimizer(0.1, 0.9), devices,
        variables=towers.VariablePlacement(candidate))
    train_op = built.train_op
    if clock is not None:
        with tf.control_dependencies([train_op]):
            train_op = tf.py_func(lambda: clock.pass_by(candidate), [], [])
    return Trial(train_op, [iterator.initializer], towers.session_config(built.devices))


def test_queues_are_filled():
    """`tf.train.batch`: without its threads the first step would wait for ever."""
    def queued(candidate):
        built = towers.build_towers(
            lambda x: tf.reduce_mean(x * tf.get_variable('w', [])), tf.train.batch(
                [tf.ones([])], 4), tf.train.MomentumOptimizer(0.1, 0.9), CPUS)
        config = towers.session_config(built.devices)
        config.operation_timeout_in_ms = 20000
        return Trial(built.train_op, [], config)
    choice = choose_variable_device(queued, ['/cpu:0'], turns=1, turn_seconds=0.01, warm_up=1)
    assert [timing.problem for timing in choice.timings] == [None]


def test_candidates_take_turns_and_the_fastest_is_taken(monkeypatch):
    clock = Clock(monkeypatch, cpu=0.02, balanced=0.01)
    choice = choose_variable_device(lambda candidate: build(candidate, clock),
                                    ['/device:CPU:0', 'balanced'], turns=3, turn_seconds=0.025,
                                    warm_up=2)
    assert choice.variable_device == 'balanced' and choice.reason == 'the fastest'
    cpu, balanced = choice.timings
    assert cpu.seconds == pytest.approx([0.02] * 3)
    assert balanced.seconds == pytest.approx([0.01] * 3)
    assert clock.steps == (['/device:CPU:0'] * 2 + ['balanced'] * 2  # warm-up
                           + ['/device:CPU:0'] * 2 + ['balanced'] * 2  # 0.02 s of the fastest
                           + ['balanced'] * 2 + ['/device:CPU:0'] * 2  # the other way round
                           + ['/device:CPU:0'] * 2 + ['balanced'] * 2)


def test_one_that_fails_to_build_or_to_run_is_named_with_the_reason():
    def some_fail(candidate):
        if candidate == 'broken':
            raise InvalidArgumentError('it makes no sense')
        trial = build('/cpu:0')
        if candidate == 'breaks':
            with tf.control_dependencies([trial.train_op]):
                bad = tf.debugging.check_numerics(tf.log(tf.zeros([])), 'my check')
            return trial._replace(train_op=bad)
        return trial
    choice = choose_variable_device(some_fail, ['broken', 'breaks', 'balanced'], turns=1,
                                    turn_seconds=0.)
    assert choice.variable_device == 'balanced'
    assert choice.reason == 'the only one that is possible'
    assert choice.timings[0].problem == 'it makes no sense'
    assert 'my check' in choice.timings[1].problem and '\n' not in choice.timings[1].problem


def test_a_nan_is_an_error_of_the_run_and_of_no_placement():
    def diverges(candidate):
        count = tf.get_local_variable('count', [], initializer=tf.zeros_initializer())
        x = tf.log(4. - tf.assign_add(count, 1.)) * tf.ones([2])
        built = towers.build_towers(
            lambda x: tf.reduce_mean(x) * tf.get_variable('w', initializer=1.), x,
            tf.train.GradientDescentOptimizer(0.1), CPUS,
            variables=towers.VariablePlacement(candidate),
            numerics=towers.Numerics(check_numerics=True))
        return Trial(built.train_op, [], towers.session_config(built.devices))
    with pytest.raises(towers.NonFiniteError, match=(
            r'^the loss of tower [01] is -?(Inf|NaN) in step 4\.')):
        choose_variable_device(diverges, ['/cpu:0', 'balanced'], turns=4, turn_seconds=0.,
                               warm_up=2)


@pytest.mark.slow
def test_an_input_that_fails_is_an_error_of_no_placement():
    """It would be left out for it, and another one, which comes less far, be chosen."""
    def fails_later(candidate):
        with tf.device('/cpu:0'):
            iterator = tf.data.make_initializable_iterator(
                tf.data.Dataset.range(5 if candidate == '/cpu:0' else 9).repeat().map(_below_five))
            x = iterator.get_next()
        built = towers.build_towers(
            lambda x: tf.reduce_mean(x) * tf.get_variable('w', initializer=1.), x,
            tf.train.GradientDescentOptimizer(0.1), CPUS,
            variables=towers.VariablePlacement(candidate))
        return Trial(built.train_op, [iterator.initializer], towers.session_config(built.devices))
    with pytest.raises(tf.errors.InvalidArgumentError, match='five or more'):
        choose_variable_device(fails_later, ['/cpu:0', 'balanced'], turns=9, turn_seconds=0.,
                               warm_up=1)


def _below_five(number):
    check = tf.raw_ops.Assert(condition=number < 5, data=['five or more'])
    with tf.control_dependencies([check]):
        return tf.fill([4], tf.cast(number, tf.float32))


def test_arguments_that_make_no_sense_and_candidates_of_which_none_is_possible():
    for arguments in (dict(candidates=['a', 'a']), dict(candidates=['a'], turns=0)):
        with pytest.raises(InvalidArgumentError, match='=0: expected a whole|expected different'):
            choose_variable_device(build, **arguments)

    def fail(candidate):
        raise InvalidArgumentError('of ' + candidate)
    with pytest.raises(InvalidArgumentError, match='^of a$'):  # the first one's
        choose_variable_device(fail, ['a', 'b'])
