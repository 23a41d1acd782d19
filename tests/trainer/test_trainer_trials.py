"""trainer.trials: what 'auto' comes to. (`--mode=diagnose` and `memory` run in test_trainer_data
and tests/memory/test_report.)"""

import types

from absl.testing import flagsaver
import pytest
import tensorflow.compat.v1 as tf

import datasets
import towers
from trainer import diagnosis, trials
from trainer.flags import FLAGS
from trainer.job import Setup
from trainer.run_settings import run_settings


@pytest.fixture(autouse=True)
def parsed(monkeypatch, tmp_path):
    monkeypatch.setenv('TF_CPU_ALLOCATOR_USE_BFC', 'true')  # which this sets, for all that follows
    with flagsaver.flagsaver():
        FLAGS(['train.py', '--batch_size=auto', '--train_dir=%s' % tmp_path])
        yield


SETUP = Setup(types.SimpleNamespace(unit='images'),
              types.SimpleNamespace(num_examples={'train': 1437}), 'auto')


@pytest.mark.parametrize('trial, module, steps', [
    (trials.choose_batch_size, towers, 'fit_batch_size'), (trials.diagnose, diagnosis, 'diagnose'),
    (trials.show_memory, towers, 'memory_report')])
def test_a_failure_of_the_users_own_data_is_named(monkeypatch, trial, module, steps):
    def fail(*arguments, **options):
        raise tf.errors.InvalidArgumentError(None, None, 'rotten\n\t [[IteratorGetNext]]')
    monkeypatch.setattr(module, steps, fail)
    with flagsaver.flagsaver(dataset='own:data'):
        with pytest.raises(datasets.OwnDataError, match='own:data: a batch could not be made'):
            trial(SETUP._replace(batch_size=4))


def fitted(*arguments):
    """Stands for `fit_batch_size`: a batch of 14 parts."""
    assert arguments[-1] == 1437
    return types.SimpleNamespace(batch_size=14 * arguments[1])


def test_a_run_keeps_the_batch_that_it_was_last_started_with(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(towers, 'fit_batch_size', fitted)
    assert trials.choose_batch_size(SETUP) == 28  # a new run, on 2 towers
    run_settings(60).begin(str(tmp_path))
    assert trials.choose_batch_size(SETUP) == 60
    assert capsys.readouterr().out == 'batch 60: as the run in %s was last started\n' % tmp_path
    with flagsaver.flagsaver(num_towers=7):  # which 60 does not divide among
        assert trials.choose_batch_size(SETUP) == 98
    assert FLAGS.batch_size == 'auto'


def test_diagnosis_measures_the_batches_of_the_run(monkeypatch):
    """All of them have the examples that remainder gives a step, moved by augment_shift; the
    towers alone take the first one over and over."""
    asked = []

    def train_batches(**arguments):
        asked.append(arguments)
        return tf.data.Dataset.range(3)

    def stages(*unused, **arguments):
        asked.append(arguments)
    data = types.SimpleNamespace(train_batches=train_batches, stages=stages)
    setup = Setup(types.SimpleNamespace(image_format={}, unit='images'), data, 1400)
    built = []
    monkeypatch.setattr(trials, '_built', lambda setup, **unused: (
        built.append(setup.dataset.train_batches()), types.SimpleNamespace(built=None))[1])
    monkeypatch.setattr(trials, 'session_config', lambda built: None)
    monkeypatch.setattr(diagnosis, 'steps_of', lambda job, config: None)

    def diagnose(train, batches, batch_size, stages, **unused):
        for call in (lambda: train(True), lambda: train(False), batches, stages):
            call()
    monkeypatch.setattr(diagnosis, 'diagnose', diagnose)
    with flagsaver.flagsaver(remainder='drop', augment_shift=2):
        trials.diagnose(setup)
    assert [each['remainder'] for each in asked[2:]] == ['drop', 'drop']
    assert asked[2]['shift'] == 2
    held, others = (tf.data.make_one_shot_iterator(each).get_next() for each in built)
    with tf.Session() as session:
        assert [session.run([held, others]) for _ in range(3)] == [[0, 0], [0, 1], [0, 2]]
