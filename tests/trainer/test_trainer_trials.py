"""trainer.trials: what 'auto' comes to. (`--mode=diagnose` and `memory` run in test_trainer_data
and tests/memory/test_report.)"""

import inspect
import types

from absl.testing import flagsaver
import pytest

import towers
from trainer import diagnosis, trials
from trainer.flags import FLAGS
from trainer.job import Setup
from trainer.resuming import run_settings


@pytest.fixture(autouse=True)
def parsed(monkeypatch, tmp_path):
    monkeypatch.setenv('TF_CPU_ALLOCATOR_USE_BFC', 'true')  # which this sets, for all that follows
    with flagsaver.flagsaver():
        FLAGS(['train.py', '--batch_size=auto', '--train_dir=%s' % tmp_path])
        yield


STEPS = {  # what runs the steps of each
    'choose_batch_size': (towers, 'fit_batch_size'),
    'choose_variable_device': (towers, 'choose_variable_device'),
    'diagnose': (diagnosis, 'diagnose'),
    'show_memory': (towers, 'memory_report')}


def test_all_trials_see_to_bad_examples(monkeypatch):
    """Each runs its steps within `trying`."""
    assert sorted(STEPS) == sorted(
        name for name, value in vars(trials).items() if not name.startswith('_')
        and inspect.isfunction(value) and value.__module__ == trials.__name__
        and name != 'choose_placement')  # which calls one of them
    within, runs = [], []

    def trying(dataset, batch_size, trial, keep=False):
        within.append(dataset)
        trial(print)
        raise KeyError  # what it returns is another matter

    def steps(*arguments, **options):
        assert within
        runs.append(arguments)
    monkeypatch.setattr(trials, 'trying', trying)
    monkeypatch.setattr(trials, '_built', lambda *arguments, **options: (
        types.SimpleNamespace(built=None, iterator=types.SimpleNamespace(initializer=None))))
    monkeypatch.setattr(trials, 'session_config', lambda built: types.SimpleNamespace())
    setup = SETUP._replace(batch_size=4)
    with flagsaver.flagsaver(devices='cpu:0+cpu:1'):
        for name, (module, function) in STEPS.items():
            monkeypatch.setattr(module, function, steps)
            del within[:], runs[:]
            with pytest.raises(KeyError):
                getattr(trials, name)(*[setup, None][:len(inspect.signature(
                    getattr(trials, name)).parameters)])
            assert within == [SETUP.dataset] and len(runs) == 1, name


SETUP = Setup(None, types.SimpleNamespace(num_examples={'train': 1437}), 'auto', None,
                        None)


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
    """All of them have the examples that --remainder gives a step, moved by --augment_shift."""
    asked, built = [], []

    def train_batches(**arguments):
        asked.append(arguments)

    def stages(*unused, **arguments):
        asked.append(arguments)
    data = types.SimpleNamespace(num_examples={'train': 1437}, train_batches=train_batches,
                                 stages=stages)
    setup = Setup(types.SimpleNamespace(image_format={}), data, 1400, None, None)

    def build(given, **unused):
        built.append(given.batch_size)
        return types.SimpleNamespace(train_op=None, built=None, iterator=types.SimpleNamespace(
            initializer=None))
    monkeypatch.setattr(trials, '_built', build)
    monkeypatch.setattr(trials, 'session_config', lambda built: None)

    def diagnose(trial, batches, devices, batch_size, stages, trial_alone, **unused):
        trial_alone()
        trial()
        batches()
        stages()
    monkeypatch.setattr(trials.diagnosis, 'diagnose', diagnose)
    with flagsaver.flagsaver(remainder='weight', augment_shift=2, num_towers=2):
        trials.diagnose(setup)
    assert built == [720, 1400]  # of batches of 1400, 37, 1400, 37, …
    assert [each['remainder'] for each in asked] == ['weight', 'weight']
    assert asked[0]['shift'] == 2
    trials.diagnose(setup)
    assert built[2:] == [1400, 1400]
