"""What stops `train.py`: signals, NaN, an accuracy, a directory in use, a checkpoint of no use."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from train_runs import (FLAGS, TRAIN, contents, half_written, metrics, names_that_differ, newest,
                        steps_saved, untimed, values_of, wait_until)


LONG = ['--train_steps=1000000', '--batch_size=20', '--log_every=2', '--save_steps=1000000',
        '--summary_steps=0']


def under_way(runner, folder, argv=(), lines=1, before=None):
    """A long run that has written so many lines."""
    run = runner.start(folder, LONG + list(argv), before)
    log = os.path.join(str(folder), 'metrics.jsonl')
    wait_until(lambda: run.has_ended() or os.path.exists(log) and len(metrics(folder)) >= lines)
    assert not run.has_ended(), run.stderr
    return run


@pytest.mark.slow
def test_signals_end_a_run_in_good_order(runner, tmp_path):
    folder = tmp_path / 'run'
    last = 0
    for number, name in ((signal.SIGTERM, 'SIGTERM'), (signal.SIGINT, 'SIGINT')):
        run = under_way(runner, folder, lines=last // 2 + 2)
        if not last:
            assert_second_run_is_refused(runner, folder, run)
        run.send(number)
        assert run.status() == 128 + number
        step = newest(folder)
        assert step > last
        assert run.stderr.count('\n%s: finishing this step and saving; once more to stop at once\n'
                                % name) == 1
        lines = run.stdout.splitlines()
        assert lines[-1] == 'checkpoint     %s/model.ckpt-%d' % (folder, step)
        # There was no time to evaluate, and metrics.jsonl has what a run has that goes on.
        assert 'test accuracy' not in run.stdout + run.stderr
        assert [line['step'] for line in metrics(folder)] == list(range(2, step + 1, 2))
        assert values_of(folder, step)['examples_seen'] == 20 * step
        if last:
            assert 'going on from %s/model.ckpt-%d' % (folder, last) in lines
        last = step
    assert steps_saved(folder)[0] == 0 and len(steps_saved(folder)) == 3


@pytest.mark.slow
def test_sigusr1_saves_and_the_run_goes_on_until_its_minutes_are_over(runner, tmp_path):
    folder = tmp_path / 'run'
    run = under_way(runner, folder, ['--max_minutes=0.2'])
    run.send(signal.SIGUSR1)
    wait_until(lambda: len(steps_saved(folder)) > 1)
    assert run.status() == 0 and run.stderr == ''
    begin, asked, last = steps_saved(folder)
    assert begin == 0 < asked < last
    assert values_of(folder, asked)['examples_seen'] == 20 * asked
    assert 'test accuracy' in run.stdout
    with open(str(folder / 'ended.json')) as opened:
        assert json.load(opened) == {'step': last}


def assert_second_run_is_refused(runner, folder, first):
    """Another process on the same folder, while the first one is held still."""
    first.send(signal.SIGSTOP)
    try:
        before = contents(folder)
        second = runner.run(folder, LONG, status=1)
        assert re.match(
            r'train\.py: %s is in use by process %d on \S+, since [-\d]+ [:\d]+\. Two runs in one '
            r"directory would overwrite and delete each other's checkpoints; nothing was written\. "
            r'Wait for that run, end it, or give this one another directory\.\n$'
            % (re.escape(str(folder)), first.pid), second.stderr)
        runner.run(folder, LONG + ['--plan_only'])  # it only looks at the graph
        assert contents(folder) == before
    finally:
        first.send(signal.SIGCONT)


# Every save but the first takes a minute.
SLOW_SAVE = '''
import time
from towers.run.checkpoint_hook import CheckpointHook
save = CheckpointHook._save
def slowly(self, session, step):
    if step:
        print('saving', step, flush=True)
        time.sleep(60)
    return save(self, session, step)
CheckpointHook._save = slowly
'''


@pytest.mark.slow
def test_a_second_signal_ends_a_run_at_once(runner, tmp_path):
    run = under_way(runner, tmp_path / 'run', before=SLOW_SAVE)
    run.send(signal.SIGTERM)
    wait_until(lambda: 'saving' in run.stdout)
    asked = time.time()
    run.send(signal.SIGINT)
    assert run.status() == 128 + signal.SIGINT
    assert time.time() - asked < 20
    assert newest(tmp_path / 'run') == 0


@pytest.mark.slow
def test_a_signal_during_the_last_save_does_not_cut_it_short(runner, tmp_path):
    folder = tmp_path / 'run'
    run = runner.start(folder, ['--train_steps=2', '--batch_size=20'],
                       before=SLOW_SAVE.replace('60', '2'))
    wait_until(lambda: run.has_ended() or 'saving' in run.stdout)
    run.send(signal.SIGTERM)
    assert run.status() == 128 + signal.SIGTERM
    assert newest(folder) == 2


@pytest.mark.slow
def test_a_run_that_finds_a_nan_says_where_and_saves_nothing_of_it(runner, tmp_path):
    folder = tmp_path / 'run'
    run = runner.run(folder, ['--base_learning_rate=1e30', '--save_steps=1', '--batch_size=20',
                              '--log_every=1', '--train_steps=20', '--eval_steps=1',
                              '--export_dir=%s/export' % folder], status=1)
    found = re.search(
        r'^train\.py: the loss of tower [01] is (NaN|Inf) in step (\d+)\. Nothing of it was '
        r'saved\. Look at the learning rate, at the inputs of that step, and at logarithms, '
        r'divisions and square roots of 0 in the model\.\n\Z', run.stderr, re.MULTILINE)
    assert found, run.stderr
    step = int(found.group(2))
    assert 2 <= step < 20
    assert newest(folder) == step - 1 == steps_saved(folder)[-1]
    assert values_of(folder, step - 1)['global_step'] == step - 1
    assert half_written(folder) == []
    assert [line['step'] for line in metrics(folder)] == list(range(1, step))
    assert 'checkpoint' not in run.stdout and not (folder / 'export').exists()


@pytest.mark.slow
def test_a_run_stops_at_an_accuracy_and_stays_there(runner, tmp_path):
    folder = tmp_path / 'run'
    flags = ['--config={"stop_at_accuracy": 0.5}', '--eval_steps=8', '--train_steps=1000',
             '--base_learning_rate=0.01', '--summary_steps=0', '--save_steps=1000']
    run = runner.run(folder, flags)
    lines = metrics(folder)
    accuracies = [line['test_accuracy'] for line in lines]
    assert accuracies[-1] >= 0.5 and max(accuracies[:-1] or [0]) < 0.5
    step = 8 * len(accuracies)
    assert [line['step'] for line in lines] == list(range(8, step + 1, 8))
    assert newest(folder) == step < 1000
    result = 'test accuracy  %.4f on 360 images' % accuracies[-1]
    assert run.stdout.splitlines()[-1] == 'checkpoint     %s/model.ckpt-%d' % (folder, step)
    assert result in run.stdout.splitlines()
    # Started again (it may have been killed just before its end), it is over.
    before = contents(folder)
    again = runner.run(folder, flags)
    assert result in again.stdout.splitlines()
    assert again.stdout.splitlines()[-1] == run.stdout.splitlines()[-1]
    after = contents(folder)
    assert {name for name in after if after[name] != before.get(name)} <= {'run.lock'}


# ---- a terminal or a reader that is gone ---------------------------------------------------------

@pytest.mark.slow
def test_a_lost_terminal_ends_a_run_in_good_order_and_nohup_does_not(runner, tmp_path):
    run = under_way(runner, tmp_path / 'run')
    run.send(signal.SIGHUP)
    assert run.status() == 128 + signal.SIGHUP
    step = newest(tmp_path / 'run')
    assert step > 0 and values_of(tmp_path / 'run', step)['examples_seen'] == 20 * step
    assert '\nSIGHUP: finishing this step and saving' in run.stderr
    ignoring = 'import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)'
    run = under_way(runner, tmp_path / 'run', lines=step // 2 + 1, before=ignoring)
    run.send(signal.SIGHUP)
    lines = len(metrics(tmp_path / 'run'))
    wait_until(lambda: len(metrics(tmp_path / 'run')) > lines + 3 or run.has_ended())
    run.send(signal.SIGTERM)
    assert run.status() == 128 + signal.SIGTERM and 'SIGHUP' not in run.stderr


# Standard output is a pipe whose reader ends when it has read the text.
HEAD = '''
import os
read_end, write_end = os.pipe()
if os.fork() == 0:
    os.close(write_end)
    seen = b''
    while %r not in seen:
        seen += os.read(read_end, 1)
    os._exit(0)
os.close(read_end)
os.dup2(write_end, 1)
os.close(write_end)
'''

# Standard output is a pipe that nobody reads, from the start.
UNREAD = '''
import os
read_end, write_end = os.pipe()
os.close(read_end)
os.dup2(write_end, 1)
os.close(write_end)
'''


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_ends_a_run_in_good_order(runner, tmp_path):
    folder = tmp_path / 'run'
    run = runner.start(folder, LONG, before=HEAD % b'step 2/')
    assert run.status() == 128 + signal.SIGHUP
    assert run.stderr == '\nSIGHUP: finishing this step and saving; once more to stop at once\n'
    step = newest(folder)
    assert step > 0 and values_of(folder, step)['examples_seen'] == 20 * step
    assert [line['step'] for line in metrics(folder)] == list(range(2, step + 1, 2))
    # One that never read is nothing to begin a run for.
    run = runner.start(tmp_path / 'other', LONG, before=UNREAD)
    assert run.status() == -signal.SIGHUP and not steps_saved(tmp_path / 'other')
    for argv in (['--help'], ['--mode=eval']):
        run = runner.start(folder, argv, before=UNREAD)
        assert run.status() == -signal.SIGHUP and run.stderr == ''


@pytest.mark.slow
def test_predictions_are_written_whole_or_not_at_all(runner, reference, tmp_path):
    path = tmp_path / 'predictions.csv'
    path.write_text('of before')
    limit = 'import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))'
    flags = ['--mode=predict', '--predictions=%s' % path]
    shutil.copytree(reference.train_dir, str(tmp_path / 'run'))
    run = runner.run(tmp_path / 'run', flags, status=1, before=limit)
    assert run.stderr == (
        'train.py: %s cannot be written: File too large. Give another --predictions.\n' % path)
    assert path.read_text() == 'of before'
    assert [name for name in os.listdir(str(tmp_path)) if 'predictions' in name] == [path.name]
    runner.run(tmp_path / 'run', flags)
    assert path.read_text().startswith('image,label,predicted,probability\n0,')
    assert path.read_text().count('\n') == 361
    run = runner.run(tmp_path / 'run', ['--mode=predict', '--predictions=/dev/stdout'])
    assert run.stdout.count('\n') > 361


# ---- Ctrl-C while Python imports -----------------------------------------------------------------

def test_ctrl_c_while_importing_leaves_no_traceback(tmp_path):
    (tmp_path / 'absl').mkdir()
    (tmp_path / 'absl' / '__init__.py').write_text(
        "import time\nopen('importing', 'w').close()\ntime.sleep(60)\n")
    process = subprocess.Popen([sys.executable, TRAIN], cwd=str(tmp_path), stderr=subprocess.PIPE,
                               env=dict(os.environ, PYTHONPATH=str(tmp_path)))
    wait_until(lambda: (tmp_path / 'importing').exists())
    process.send_signal(signal.SIGINT)
    assert process.communicate()[1] == b''
    assert process.returncode == -signal.SIGINT  # 130 to a shell


# ---- checkpoints that cannot be gone on from -----------------------------------------------------

@pytest.mark.slow
def test_a_damaged_newest_checkpoint_is_named_and_passed_over_when_told(
        runner, reference, tmp_path):
    folder = tmp_path / 'run'
    shutil.copytree(reference.train_dir, str(folder))
    data = folder / 'model.ckpt-30.data-00000-of-00001'
    data.write_bytes(data.read_bytes()[:-1000])
    before = {name: (folder / name).read_bytes() for name in os.listdir(str(folder))
              if name not in ('export', 'run.lock')}
    flags = FLAGS + ['--save_steps=3']
    run = runner.run(folder, flags, status=1)
    assert run.stderr.startswith('train.py: %s/model.ckpt-30 is damaged: model.ckpt-30.data-'
                                 % folder)
    assert run.stderr.endswith(
        'The one to go on from is %s/model.ckpt-27 (step 27), which is whole: '
        'recover of --config does so. Or bring the files back from a copy.\n' % folder)
    assert before == {name: (folder / name).read_bytes() for name in os.listdir(str(folder))
                      if name not in ('export', 'run.lock')}
    run = runner.run(folder, flags + ['--config={"recover": true}'])
    assert 'passed over %s/model.ckpt-30 is damaged' % folder in run.stdout
    assert 'going on from %s/model.ckpt-27\n' % folder in run.stdout
    assert names_that_differ(values_of(reference.train_dir, 30), values_of(folder, 30)) == []
    assert untimed(metrics(folder)) == untimed(metrics(reference.train_dir))
