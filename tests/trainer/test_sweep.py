"""trainer.sweep: the runs of a sweep, and a sweep that is stopped and goes on."""

import csv
import os

from absl.testing import flagsaver
import pytest

from train_runs import TRAIN, newest
from trainer.command_line import parse_flags
from trainer.flags import FLAGS
from trainer.sweep import sweep, swept_runs, without_sweep


def test_each_combination_is_a_run_with_a_folder():
    runs = swept_runs(['seed=1,2', '--base_learning_rate=0.1,0.01'], 'runs/s')
    assert [run.folder for run in runs] == [
        'runs/s/seed=1,base_learning_rate=0.1', 'runs/s/seed=1,base_learning_rate=0.01',
        'runs/s/seed=2,base_learning_rate=0.1', 'runs/s/seed=2,base_learning_rate=0.01']
    assert runs[3].flags == ['--seed=2', '--base_learning_rate=0.01',
                             '--train_dir=runs/s/seed=2,base_learning_rate=0.01']


def test_the_command_of_a_run_has_the_other_flags():
    assert without_sweep(['train.py', '--sweep=seed=1,2', '--train_dir', 'a', '--batch_size=8',
                          '--sweep', 'optimizer=sgd,adam', '--nodeterministic']) == [
        'train.py', '--batch_size=8', '--nodeterministic']


@pytest.mark.parametrize('texts, said', [
    (['sead=1,2'], "'sead' is no flag to sweep over"), (['train_dir=a,b'], 'is no flag to sweep'),
    (['seed=1,1'], 'expected different values'), (['seed='], 'expected different values'),
    (['seed=1,2', 'seed=3'], 'seed is swept over already'),
    (['data_dir=a/b,a_b'], "two runs would have the folder 'data_dir=a_b'")])
def test_what_is_no_sweep_is_refused(texts, said, capsys):
    with flagsaver.flagsaver(), pytest.raises(SystemExit) as ended:
        FLAGS(['train.py'])
        swept_runs(texts, 'runs')
    assert ended.value.code == 2 and said in capsys.readouterr().err


# Stands for train.py: it fails with status 3 where a file `fail` is in the folder above.
PROGRAM = '''
import json, os, sys
from trainer.command_line import parse_flags
from trainer.flags import FLAGS, ONCE, SETTINGS, train_dir
parse_flags(sys.argv)
os.makedirs(train_dir(), exist_ok=True)
values = {name: FLAGS[name].value for name, each in SETTINGS.items() if each.kind != ONCE}
if values['batch_size'] == 'auto':
    values['batch_size'] = 50
with open(train_dir() + '/settings.json', 'w') as file:
    json.dump({'settings': values}, file)
with open(train_dir() + '/metrics.jsonl', 'a') as file:
    file.write(json.dumps({"step": FLAGS.train_steps, "test_accuracy": FLAGS.seed / 10}) + "\\n")
if FLAGS.seed == 2 and os.path.exists(train_dir() + '/../fail'):
    sys.exit(3)
with open(train_dir() + '/ended.json', 'w') as file:
    file.write('{}')
with open(train_dir() + '/../runs', 'a') as file:
    file.write('%d:%d ' % (FLAGS.seed, FLAGS.train_steps))
'''


@pytest.fixture
def swept(tmp_path, monkeypatch):
    """Function that sweeps seeds 1, 2 and 3 over the program; returns status and runs so far."""
    (tmp_path / 'program.py').write_text(PROGRAM)
    monkeypatch.setenv('PYTHONPATH', os.path.dirname(TRAIN))

    def run(steps, *flags):
        argv = [str(tmp_path / 'program.py'), '--sweep=seed=1,2,3', '--train_dir=%s' % tmp_path,
                '--train_steps=%d' % steps] + list(flags)
        with flagsaver.flagsaver():
            FLAGS.unparse_flags()
            parse_flags(argv)
            return sweep(argv), (tmp_path / 'runs').read_text().split()
    return run


@pytest.mark.slow
def test_it_stops_with_a_run_that_fails_and_goes_on(swept, tmp_path):
    (tmp_path / 'fail').write_text('')
    assert swept(4) == (3, ['1:4'])
    (tmp_path / 'fail').unlink()
    assert swept(4) == (0, ['1:4', '2:4', '3:4'])  # the first one has ended already
    with open(str(tmp_path / 'sweep.csv'), newline='') as table:
        assert [(row['seed'], row['step']) for row in csv.DictReader(table)] == [
            ('1', '4'), ('2', '4'), ('3', '4')]
    assert swept(8)[1][3:] == ['1:8', '2:8', '3:8']  # a longer run is another one


@pytest.mark.slow
def test_a_run_that_chose_its_batch_has_ended(swept):
    assert swept(4, '--batch_size=auto') == (0, ['1:4', '2:4', '3:4'])
    assert swept(4, '--batch_size=auto') == (0, ['1:4', '2:4', '3:4'])


def test_all_flags_are_checked_before_the_first_run(swept, tmp_path, capsys):
    (tmp_path / 'runs').write_text('')
    with flagsaver.flagsaver(), pytest.raises(SystemExit):
        FLAGS.unparse_flags()
        argv = ['program.py', '--sweep=batch_size=10,many', '--train_dir=%s' % tmp_path]
        parse_flags(argv)
        sweep(argv)
    assert 'flag --batch_size=many: expected a whole number' in capsys.readouterr().err
    assert (tmp_path / 'runs').read_text() == ''


@pytest.mark.slow
def test_a_sweep_that_was_stopped_goes_on(runner, tmp_path):
    folder = tmp_path / 'swept'
    argv = [TRAIN, '--train_dir=%s' % folder, '--sweep=seed=1,2', '--train_steps=4',
            '--batch_size=20', '--summary_steps=0']
    first = runner.python(argv[:2] + argv[3:] + ['--seed=2', '--train_dir=%s/seed=2' % folder],
                          tmp_path)
    assert 'model.ckpt-4' in first.stdout
    run = runner.python(argv, tmp_path)
    assert newest(folder / 'seed=1') == 4
    lines = run.stdout.splitlines()
    assert 'run 1 of 2     %s/seed=1' % folder in lines
    assert lines[lines.index('run 2 of 2     %s/seed=2' % folder) + 1] == (
        '               has ended already')
    with open(str(folder / 'sweep.csv'), newline='') as table:
        rows = list(csv.DictReader(table))
    assert [(row['seed'], row['step']) for row in rows] == [('1', '4'), ('2', '4')]
    assert all(0 <= float(row['test_accuracy']) <= 1 for row in rows)
