"""The verdict of numbers, and of runs that are made input-bound, compute-bound and balanced."""

import collections
import time

import pytest
import tensorflow.compat.v1 as tf

import towers
from trainer import diagnosis
from trainer.diagnosis import Diagnosis, Trial, diagnose


def found_of(pipeline, alone, together, waiting=0., **options):
    """A `Diagnosis` with stages that take as long as the pipeline."""
    return Diagnosis(pipeline, alone, together, waiting, collections.OrderedDict(
        (name, share / pipeline) for name, share in (
            ('read', .1), ('decode', .6), ('augment', .2), ('batch', .05), ('copy', .05))),
        **options)


@pytest.mark.parametrize('pipeline, alone, together, side', [
    (100., 400., 98., 'input'), (89., 100., 80., 'input'), (4000., 100., 99., 'towers'),
    (300., 100., 92., 'towers'), (300., 100., 75., 'both'), (100., 100., 95., 'balanced'),
    (105., 100., 52., 'balanced'),
    (4000., 100., 40., 'unclear'),  # what else the machine did is no reason to blame the input
    (46., 200., 62., 'unclear'), (200., 46., 62., 'unclear'), (46., 200., 49., 'input')])
def test_sides(pipeline, alone, together, side):
    assert found_of(pipeline, alone, together).side == side


@pytest.mark.parametrize('pipeline, towers, side', [
    (.25, .25, 'turns'), (.05, .8, 'turns'), (.6, .9, 'both'), (.9, .9, 'both')])
def test_the_processors_that_are_left_tell_turns_from_contention(pipeline, towers, side):
    """To do both at once needs the sum of what each uses, at the rate of the slower one."""
    found = found_of(490., 417., 231., .45, busy=(pipeline, towers, .3))
    assert found.side == side
    # Steps that had their batches at once, and were slow, have not waited for their turn.
    assert found._replace(waiting=.04).side == 'both'
    assert found_of(490., 417., 400., busy=(pipeline, towers, .3)).side == 'towers'
    assert ('take turns' in found.verdict) == (side == 'turns')


def test_turns_are_mended_by_working_ahead():
    own = Diagnosis(490., 417., 231., .5, collections.OrderedDict(pipeline=1 / 490.),
                    (.21, .26, .23))
    assert own.verdict == (
        'Input and towers take turns: alone the pipeline delivers 490 and the towers take 417 '
        "images/s, together they reach 231 of 417, and 77 % of the processors' time is left; make "
        'the next batch during the step: add .prefetch(2) at the end of the pipeline, or a larger '
        'one where it has that.')
    assert 'together                231 images/s  waiting for input for 50 % of the time, ' \
        'processors 23 % busy' in str(own).splitlines()
    ahead = found_of(490., 417., 231., .5, busy=(.21, .26, .23)).verdict
    assert 'prefetch' not in ahead and '--inter_op_threads' in ahead  # these pipelines prefetch


@pytest.mark.parametrize('input_ms, busy, step_ms, step_busy, ahead, side', [
    # Towers that keep the processors busy, and an input that waits for a disk: they overlap well.
    (40, .01, 60, .99, False, 'turns'), (40, .01, 60, .99, True, 'towers'),
    (60, .01, 40, .99, False, 'turns'), (60, .01, 40, .99, True, 'input'),
    (40, .99, 60, .01, False, 'turns'),  # towers on devices
    (60, .99, 40, .05, False, 'turns'), (60, .99, 40, .05, True, 'input'),
    (50, 0., 50, 0., False, 'turns'), (50, 0., 50, 0., True, 'balanced'),
    (50, .5, 50, .5, False, 'turns'), (50, .5, 50, .45, True, 'balanced'),
    (50, .7, 50, .7, False, 'turns'),
    (50, .8, 50, .8, False, 'both'),  # 85 % is all that can be had
    (50, 1., 50, 1., False, 'both'), (50, 1., 50, 1., True, 'both'),
    (40, .9, 60, .9, True, 'both'), (60, .9, 40, .9, True, 'both'),
    (90, .9, 10, .9, True, 'input'),  # faster towers would bring little
    (10, 1., 90, .5, True, 'towers'), (30, 1., 60, 1., True, 'both'),
    (2, 0., 60, 1., False, 'towers'), (60, 0., 2, 1., False, 'input')])
def test_what_processors_do_for_tells_who_is_to_blame(input_ms, busy, step_ms, step_busy, ahead,
                                                      side):
    """Runs of which all times are known, with an input that works ahead or does not."""
    assert constructed(input_ms, busy, step_ms, step_busy, ahead).side == side


def constructed(input_ms, busy, step_ms, step_busy, ahead):
    needed = input_ms * busy + step_ms * step_busy
    taken = max(input_ms, step_ms, needed) if ahead else input_ms + step_ms
    waited = taken - step_ms if ahead else input_ms
    return Diagnosis(8e3 / input_ms, 8e3 / step_ms, 8e3 / taken, waited / taken,
                     {'pipeline': input_ms / 8e3}, (busy, step_busy, needed / taken))


def test_processors_that_other_programs_use_are_not_left():
    """Of two processors one is another program's: nothing would overlap better than it does."""
    found = found_of(100., 100., 50., .5, busy=(.48, .48, .48), others=.5)
    assert found.side == 'both'
    assert found._replace(others=0.).side == 'turns'
    assert '50 % with other programs' in str(found)
    # Who needs next to none has not waited for them: 3 % here, of the 3 % that are left.
    found = found_of(257., 254., 117., .5, busy=(.02, .01, .01), others=.97)
    assert found.side == 'turns'
    assert "117 of 254, and the two need 3 % of the processors' time; make" in found.verdict
    assert found._replace(busy=(.2, .1, .02)).side == 'both'


def test_steady_measurements_are_not_said_to_be_too_short():
    steady = found_of(4000., 100., 40., spread=.03)
    assert steady.side == 'unclear' and 'longer' not in steady.verdict
    assert 'differs by 3 % at most' in steady.verdict
    unsteady = found_of(4000., 100., 40., spread=.5)
    assert 'differ by 50 %' in unsteady.verdict and 'measure again, longer' in unsteady.verdict
    # Who reached 62 together could have done so alone.
    assert found_of(46., 200., 62., spread=.03).side == 'input'
    assert 'delivers 62 of the 200' in found_of(46., 200., 62., spread=.03).verdict
    assert found_of(200., 46., 62., spread=.03).side == 'towers'
    stages = Diagnosis(100., 400., 98., 0., {'read': .02, 'batch': 0.}, spread=.03)
    assert stages.side == 'input' and 'read' not in stages.verdict


@pytest.mark.parametrize('numbers, waiting, busy, side', [
    ((960e3, 8e3, 9.5e3), .03, (.6, .5, .6), 'towers'),
    ((960e3, 13e3, 9e3), .01, (.6, .8, .5), 'towers'),
    ((960e3, 13e3, 9e3), .3, (.6, .8, .5), 'unclear'),  # the steps say otherwise
    ((45e3, 13e3, 15e3), .01, (.6, .8, .5), 'unclear'),  # the input takes processors from towers
    ((15e3, 13e3, 5e3), .01, (.0, .8, .5), 'unclear'),  # about as fast
    ((100., 8e3, 150.), .9, (.6, .5, .6), 'input'),
    ((100., 300., 150.), .9, (.6, .5, .6), 'unclear')])
def test_a_side_that_is_certain_although_numbers_are_rough(numbers, waiting, busy, side):
    found = found_of(*numbers, waiting=waiting, busy=busy, spread=.5)
    assert found.contradiction and found.side == side
    if side != 'unclear':
        assert found.verdict.startswith('The %s hold' % side) and 'rough' in found.verdict


def test_measurements_that_contradict_each_other_have_no_verdict():
    for found, what in (
            (found_of(46., 200., 62.), 'together they reached 62 images/s, and the pipeline alone '
                                       'just 46'),
            (found_of(4000., 100., 40.), 'together they are slower than if they took turns (98 '
                                         'images/s)'),
            (Diagnosis(100., 400., 98., 0., {'read': .02, 'batch': 0.}),
             'the first stages of the pipeline took longer than the whole of it')):
        assert found.verdict == (
            'The measurements contradict each other: %s; in the run itself steps waited for input '
            'for 0 %% of their time, which speaks against the input; something else used the '
            'processors, or they were too short: measure again, longer: --diagnose_seconds=15.'
            % what)
        assert str(found).endswith(found.verdict)


def test_each_stage_takes_what_it_adds_to_those_before(monkeypatch):
    """Stages that run side by side: one that is faster than those before it adds nothing."""
    rates = iter([100., 50., 80., 25.])

    class Measured:
        waiting, busy, spread, others = 0., .5, .02, .1

        def __init__(self, *unused, **unused_options):
            self.rate = next(rates, 10.)

        def __enter__(self):
            return self

        def __exit__(self, *unused):
            pass

        def measure(self, seconds):
            pass
    monkeypatch.setattr(diagnosis, 'PipelineSpeed', Measured)
    monkeypatch.setattr(diagnosis, 'StepsSpeed', Measured)
    said = []
    found = diagnose(None, lambda: None, ['/cpu:0'], 4, lambda: collections.OrderedDict.fromkeys(
        ['read', 'decode', 'augment', 'batch']), say=said.append)
    # No stage that copies: from CPU to CPU that is a pointer.
    assert found.pipeline == 25. and found.busy == (.5, .5, .5)
    assert found.spread == .02 and found.others == .1
    assert list(found.stages) == ['read', 'decode', 'augment', 'batch']
    assert list(found.stages.values()) == pytest.approx([.01, .01, 0., .02])
    assert said == ['measuring      6 times 5 s, with warm-ups about 38 s, and the time to build '
                    'the towers twice']


def test_sentences_say_by_how_much_and_what_to_change():
    text = str(found_of(100., 400., 98., .7))
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
    assert found_of(1000., 100., 98.).verdict.startswith(
        'The towers hold the run back: they take 100 images/s, and the pipeline could deliver '
        '1,000, 10 times as many, so that a faster input would bring 2 % at most')
    assert 'together they reach 75, 25 % less' in found_of(300., 100., 75.).verdict
    assert 'processors that they do not share' in found_of(100., 100., 50.).verdict


def measured(input_seconds, step_seconds, seconds=.15, ahead=2, fail=None, **options):
    """Pipeline and towers that sleep for each batch, which takes no processor from the other."""
    def sleeper(duration):
        def sleep(value):
            time.sleep(duration)
            if fail is not None:
                fail()
            return value
        return lambda value: tf.ensure_shape(tf.numpy_function(sleep, [value], value.dtype),
                                             value.shape)

    def batches():
        dataset = tf.data.Dataset.from_tensors(tf.ones([4, 3])).repeat()
        dataset = dataset.map(sleeper(input_seconds))
        if ahead:
            return dataset.prefetch(ahead)
        options = tf.data.Options()
        if hasattr(options.experimental_optimization, 'inject_prefetch'):  # by newer TensorFlows
            options.experimental_optimization.inject_prefetch = False
        return dataset.with_options(options)

    def trial():
        iterator = tf.data.make_initializable_iterator(batches())

        def model_fn(values):
            weight = tf.get_variable('weight', [3, 1], initializer=tf.ones_initializer())
            slept = tf.stop_gradient(sleeper(step_seconds)(values))
            return tf.reduce_mean(tf.matmul(slept, weight))
        built = towers.build_towers(model_fn, iterator.get_next(),
                                    tf.train.GradientDescentOptimizer(.1), ['/cpu:1', '/cpu:2'])
        return Trial(built.train_op, [iterator.initializer],
                     towers.session_config(built.devices), built)
    return diagnose(trial, batches, ['/cpu:1', '/cpu:2'], 4, seconds=seconds, **options)


@pytest.mark.slow
def test_a_run_made_input_bound():
    found = measured(.04, 0., seconds=.9)
    assert found.side == 'input' and found.pipeline <= 4 / .04
    assert found.waiting > .5
    assert 'The input holds the run back' in str(found)


@pytest.mark.slow
def test_a_pipeline_that_does_not_work_ahead():
    found = measured(.05, .05, seconds=.6, ahead=0)
    assert found.side in ('turns', 'unclear')  # on a busy machine they are slower than in turns
    assert max(found.busy) < .7


@pytest.mark.parametrize('failing', [  # of the pipeline alone, and of the towers with it
    pytest.param(4, marks=pytest.mark.slow), 30])
@pytest.mark.slow
def test_a_measurement_begins_anew_when_what_failed_is_taken_out(failing):
    calls, mended = [], []

    def fail():
        calls.append(1)
        if len(calls) > failing and not mended:
            raise ValueError('rotten')

    def mend(error):
        mended.append(str(error))
        return True
    assert measured(.002, 0., seconds=.02, fail=fail, mend=mend).together > 0
    assert len(mended) == 1 and 'rotten' in mended[0]


@pytest.mark.slow
def test_what_cannot_be_taken_out_is_raised():
    def fail():
        raise ValueError('rotten')
    with pytest.raises(tf.errors.OpError, match='rotten'):
        measured(0., 0., seconds=.02, fail=fail)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_said_as_in_training():
    def trial():
        def model_fn(values):
            weight = tf.get_variable('weight', [], initializer=tf.ones_initializer())
            return tf.reduce_mean(tf.log(-values) * weight)
        iterator = tf.data.make_initializable_iterator(batches())
        built = towers.build_towers(model_fn, iterator.get_next(),
                                    tf.train.GradientDescentOptimizer(.1), ['/cpu:0'],
                                    numerics=towers.Numerics(check_numerics=True))
        return Trial(built.train_op, [iterator.initializer], None, built)

    def batches():
        return tf.data.Dataset.from_tensors(tf.ones([4])).repeat()
    with pytest.raises(towers.NonFiniteError, match='the loss of tower 0 is NaN'):
        diagnose(trial, batches, ['/cpu:0'], 4, seconds=.02)
