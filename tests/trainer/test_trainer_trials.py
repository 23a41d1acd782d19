"""trainer.trials: what 'auto' comes to; the verdict of numbers, and of a run made input-bound."""

import time
import types

from absl.testing import flagsaver
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import datasets
import towers
from trainer import trials
from trainer.flags import FLAGS
from trainer.job import Setup
from trainer.run_settings import run_settings
from trainer.trials import Diagnosis


@pytest.fixture(autouse=True)
def parsed(monkeypatch, tmp_path):
    monkeypatch.setenv('TF_CPU_ALLOCATOR_USE_BFC', 'true')  # which this sets, for all that follows
    with flagsaver.flagsaver():
        FLAGS(['train.py', '--batch_size=auto', '--train_dir=%s' % tmp_path])
        yield


SETUP = Setup(types.SimpleNamespace(unit='image'),
              types.SimpleNamespace(num_examples={'train': 1437}), 'auto')


@pytest.mark.parametrize('trial, module, steps', [
    (trials.choose_batch_size, towers, 'fit_batch_size'), (trials.diagnose, trials, '_timed'),
    (trials.show_memory, towers, 'memory_report')])
def test_a_failure_of_the_users_own_data_is_named(monkeypatch, trial, module, steps):
    def fail(*arguments, **options):
        raise tf.errors.InvalidArgumentError(None, None, 'rotten\n\t [[IteratorGetNext]]')
    monkeypatch.setattr(module, steps, fail)
    with flagsaver.flagsaver(dataset='own:data'):
        with pytest.raises(datasets.OwnDataError, match='own:data: a batch could not be made'):
            trial(SETUP._replace(batch_size=4))


def fitted(build, first, memory_limit, say, config, most):
    """Stands for `fit_batch_size`: a batch of 14 parts."""
    assert most == 1437
    return types.SimpleNamespace(batch_size=14 * first)


def test_a_run_keeps_the_batch_that_it_was_last_started_with(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(towers, 'fit_batch_size', fitted)
    assert trials.choose_batch_size(SETUP) == 28  # a new run, on 2 towers
    run_settings(60).write()
    assert trials.choose_batch_size(SETUP) == 60
    assert capsys.readouterr().out == 'batch 60: as the run in %s was last started\n' % tmp_path
    with flagsaver.flagsaver(num_towers=7):  # which 60 does not divide among
        assert trials.choose_batch_size(SETUP) == 98
    assert FLAGS.batch_size == 'auto'


# ---- Diagnosis -----------------------------------------------------------------------------------

def test_sides_and_sentences():
    for pipeline, together, side in ((25., 24., 'input'), (89., 80., 'input'), (300., 92., 'towers'),
                                     (300., 75., 'both'), (100., 95., 'towers')):
        assert Diagnosis(pipeline, 100., together, 0., 'image').side == side
    lines = str(Diagnosis(100., 400., 98., .7, 'image')).splitlines()
    assert lines[:3] == [
        'pipeline alone          100 images/s',
        'towers alone            400 images/s  on a batch in memory',
        'together                 98 images/s  waiting for input for 70 % of the time']
    assert lines[3].startswith('The input holds the run back, which loses 76 % of the speed of the')
    assert Diagnosis(1000., 100., 98., 0., 'image').verdict.startswith(
        'The towers hold the run back: a faster input would bring 2 % at most')
    assert 'the run loses 25 % of the speed' in Diagnosis(300., 100., 75., 0., 'image').verdict
    both = Diagnosis(300., 100., 75., 0., 'image')
    assert 'more inter_op_threads of --config' in both.verdict  # which is no flag
    for pipeline, alone in ((46., 200.), (200., 46.)):  # one alone is slower than both together
        assert 'Measure again, longer' in str(Diagnosis(pipeline, alone, 62., 0., 'image'))


def slow(value):
    """Passes a value on, 20 ms later."""
    def sleep(value):
        time.sleep(.02)
        return value
    return tf.ensure_shape(tf.numpy_function(sleep, [value], value.dtype), value.shape)


class Linear:
    """A model of batches of three numbers, as train.py takes one."""
    image_format, unit, regularization = {}, 'example', 'none'

    def model_fn(self, unused_mode):
        return lambda values: tf.reduce_mean(tf.matmul(values, tf.get_variable('weight', [3, 1])))


@pytest.mark.slow
def test_a_run_made_input_bound(capsys):
    """Batches of 6 examples that are 20 ms late each, of which the towers alone have one."""
    asked = []

    def train_batches(**arguments):
        asked.append(arguments)
        return tf.data.Dataset.from_tensors(np.ones([6, 3], np.float32)).repeat().map(slow)
    setup = Setup(Linear(), types.SimpleNamespace(
        train_batches=train_batches, num_examples={'train': 14}), 6)
    with flagsaver.flagsaver(diagnose_seconds=.5, remainder='drop', augment_shift=2):
        found = trials.diagnose(setup)
    assert [(each['remainder'], each['shift']) for each in asked] == [('drop', 2)] * 3
    assert found.side == 'input' and found.waiting > .5 and found.unit == 'example'
    assert found.pipeline < 6 / .02 < found.towers and found.together < 6 / .02
    assert capsys.readouterr().out.startswith('measuring      3 times 0.5 s, with warm-ups about 2')
