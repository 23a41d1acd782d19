"""What stops `train.py`: signals, its minutes, a terminal or a reader that is gone."""

import os
import signal
import subprocess
import sys

import pytest

from train_runs import TRAIN, metrics, newest, steps_saved, values_of, wait_until

LONG = ['--train_steps=1000000', '--batch_size=20', '--log_every=2', '--save_steps=1000000',
        '--summary_steps=0']


def under_way(runner, folder, argv=(), lines=1):
    """A long run that has written so many lines."""
    run = runner.start(folder, LONG + list(argv))
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
    run = under_way(runner, folder)
    run.send(signal.SIGUSR1)
    wait_until(lambda: len(steps_saved(folder)) > 1)
    begin, asked = steps_saved(folder)
    assert begin == 0 < asked
    assert values_of(folder, asked)['examples_seen'] == 20 * asked
    wait_until(lambda: metrics(folder)[-1]['step'] > asked or run.has_ended())
    run.send(signal.SIGTERM)
    assert run.status() == 128 + signal.SIGTERM and run.stderr.count('\n') == 2, run.stderr
    assert 'checkpoint     %s/model.ckpt-%d\n' % (folder, asked) in run.stdout
    told = newest(folder)
    run = runner.run(folder, LONG + ['--max_minutes=0.02'])
    assert run.stderr == '' and newest(folder) > told > asked
    assert 'test accuracy' in run.stdout and 'stopped: by --max_minutes' in run.stdout
    assert 'checkpoint     %s/model.ckpt-%d\n' % (folder, newest(folder)) in run.stdout
    assert not (folder / 'ended.json').exists()  # an evaluator waits for the next start


# ---- a terminal or a reader that is gone ---------------------------------------------------------

# Standard output is a pipe that nobody reads, from the start or from the text on.
UNREAD = '''
import os
read_end, write_end = os.pipe()
os.close(read_end)
os.dup2(write_end, 1)
os.close(write_end)
'''
HEAD = UNREAD.replace('os.close(read_end)', '''
if os.fork() == 0:
    os.close(write_end)
    seen = b''
    while %r not in seen:
        seen += os.read(read_end, 1)
    os._exit(0)
os.close(read_end)''')


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
    run = runner.start(folder, ['--help'], before=UNREAD)
    assert run.status() == -signal.SIGHUP and run.stderr == ''


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
