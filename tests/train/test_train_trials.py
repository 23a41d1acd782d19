"""train_trials: what 'auto' comes to. (`--mode=diagnose` and `memory` run in test_train_data and
tests/memory/test_report.)"""

import types

from absl.testing import flagsaver
import pytest

import towers
import train_flags
import train_job
import train_trials


@pytest.fixture(autouse=True)
def parsed(monkeypatch, tmp_path):
    monkeypatch.setenv('TF_CPU_ALLOCATOR_USE_BFC', 'true')  # which this sets, for all that follows
    with flagsaver.flagsaver():
        train_flags.FLAGS(['train.py', '--batch_size=auto', '--train_dir=%s' % tmp_path])
        yield


SETUP = train_job.Setup(None, types.SimpleNamespace(num_examples={'train': 1437}), 'auto', None,
                        None)


def fitted(*arguments):
    """Stands for `fit_batch_size`: a batch of 14 parts."""
    assert arguments[-1] == 1437
    return types.SimpleNamespace(batch_size=14 * arguments[1])


def test_a_run_keeps_the_batch_that_it_was_last_started_with(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(towers, 'fit_batch_size', fitted)
    assert train_trials.choose_batch_size(SETUP) == 28  # a new run, on 2 towers
    train_flags.run_settings(60).begin(str(tmp_path))
    assert train_trials.choose_batch_size(SETUP) == 60
    assert capsys.readouterr().out == 'batch 60: as the run in %s was last started\n' % tmp_path
    with flagsaver.flagsaver(num_towers=7):  # which 60 does not divide among
        assert train_trials.choose_batch_size(SETUP) == 98
    assert train_flags.FLAGS.batch_size == 'auto'


def test_diagnosis_measures_the_batches_of_the_run(monkeypatch):
    """All of them have the examples that --remainder gives a step, moved by --augment_shift."""
    asked, built = [], []

    def train_batches(**arguments):
        asked.append(arguments)

    def stages(*unused, **arguments):
        asked.append(arguments)
    data = types.SimpleNamespace(num_examples={'train': 1437}, train_batches=train_batches,
                                 stages=stages)
    setup = train_job.Setup(types.SimpleNamespace(image_format={}), data, 1400, None, None)

    def build(given, **unused):
        built.append(given.batch_size)
        return types.SimpleNamespace(train_op=None, built=None, iterator=types.SimpleNamespace(
            initializer=None))
    monkeypatch.setattr(train_trials, '_built', build)
    monkeypatch.setattr(train_trials, 'session_config', lambda built: None)

    def diagnose(trial, batches, devices, batch_size, stages, **unused):
        for staging in ('first', False):
            trial(staging)
        batches()
        stages()
    monkeypatch.setattr(train_trials.diagnosis, 'diagnose', diagnose)
    with flagsaver.flagsaver(remainder='weight', augment_shift=2, num_towers=2):
        train_trials.diagnose(setup)
    assert built == [720, 1400]  # of batches of 1400, 37, 1400, 37, …
    assert [each['remainder'] for each in asked] == ['weight', 'weight']
    assert asked[0]['shift'] == 2
    train_trials.diagnose(setup)
    assert built[2:] == [1400, 1400]
