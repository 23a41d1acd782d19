"""Running a set: in order, resumable, stopped cleanly."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from benchmarks.batch_scaling import results, runs
from benchmarks.batch_scaling.arms import make_arms, make_runs
from scaling_samples import settings

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

# Stands for train.py: takes its flags, writes its metrics.jsonl, resumes, and stops on SIGINT. What
# a file `<arm>-<seed>` beside it says is done in the step after the second evaluation.
TRAIN = '''
import json, os, signal, sys, time
flags = dict(flag[2:].partition('=')[::2] for flag in sys.argv[1:])
folder, here = flags['train_dir'], os.path.dirname(os.path.abspath(__file__))
arm, seed = folder.split(os.sep)[-2:]
with open(os.path.join(here, 'started'), 'a') as started:
    started.write('%s-%s\\n' % (arm, flags['seed']))
path = os.path.join(folder, 'metrics.jsonl')
step = 0
if os.path.exists(path):
    with open(path) as log:
        step = [json.loads(line)['step'] for line in log][-1]
stopped = []
signal.signal(signal.SIGINT, lambda *_: stopped.append(1))
batch, last = int(flags['batch_size']), int(flags['train_steps'])
interval = int(flags['eval_steps'])
order = os.path.join(here, '%s-%s' % (arm, flags['seed']))
with open(path, 'a') as log:
    if step == 0:
        log.write(json.dumps({'step': 0, 'examples': 0}) + '\\n')
    while step < last and not stopped:
        if step == 2 * interval and os.path.exists(order):
            with open(order) as opened:
                exec(opened.read())
        step += 1
        line = {'step': step, 'examples': step * batch, 'images_per_second': 100.}
        if step % interval == 0:
            line.update(test_accuracy=step / last, test_loss=1 - step / last)
        log.write(json.dumps(line) + '\\n')
        log.flush()
for name in ('model.ckpt-%d.index' % step, 'model.ckpt-%d.data' % step):
    open(os.path.join(folder, name), 'w').close()
sys.exit(130 if stopped else 0)
'''


@pytest.fixture
def train(tmp_path):
    path = tmp_path / 'train.py'
    path.write_text(textwrap.dedent(TRAIN))
    return path


def started(train):
    path = train.parent / 'started'
    return path.read_text().split() if path.exists() else []


def the_set(train):
    return make_runs(settings(), make_arms(settings(), ['one', 'sqrt']),
                     str(train.parent / 'runs'))


def go(train, the_runs):
    said = []
    runner = runs.Runner(the_runs, 600, train=str(train), say=said.append)
    runner.run()
    return runner.stopped, '\n'.join(said)


def statuses(the_runs):
    return [runs.status(run, 600)[0] for run in the_runs]


@pytest.mark.slow
def test_a_signal_stops_the_run_under_way_and_the_set_goes_on_later(train):
    (train.parent / 'sqrt-1').write_text('while not stopped: time.sleep(0.01)')
    the_runs = the_set(train)

    def stop():
        deadline = time.time() + 120
        while len(results.read_metrics(the_runs[1].folder)) < 5 and time.time() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)
    threading.Thread(target=stop).start()
    stopped, text = go(train, the_runs)
    assert stopped and text.count('stopping: the run finishes its step and saves') == 1
    # It is no failure, it has saved, and nothing was begun after it.
    assert statuses(the_runs) == ['finished', 'stopped', 'not run yet', 'not run yet']
    assert 'model.ckpt-5.index' in os.listdir(the_runs[1].folder)
    (train.parent / 'sqrt-1').unlink()
    go(train, the_runs)
    assert started(train) == ['one-1', 'sqrt-1', 'sqrt-1', 'one-2', 'sqrt-2']
    assert statuses(the_runs) == ['finished'] * 4
    assert [line['step'] for line in results.read_metrics(the_runs[1].folder)] == list(range(7))


@pytest.mark.slow
def test_the_whole_command_on_the_digits(tmp_path):
    """Real runs; the CSV; nothing run twice."""
    command = [sys.executable, '-m', 'benchmarks.batch_scaling', '--model=digits', '--seeds=1',
               '--arms=one,sqrt', '--batch_size=25', '--examples=300', '--evaluations=1',
               '--num_towers=2', '--noplots',
               '--directory=%s/set' % tmp_path]
    environment = dict(os.environ, TF_CPP_MIN_LOG_LEVEL='3')
    for again in (False, True):
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, universal_newlines=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stderr.count('finished already') == (2 if again else 0)
    found = results.read_csv(str(tmp_path / 'set' / 'batch_scaling.csv'))
    assert [each.arm.key for each in found] == ['one', 'sqrt']
    assert {each.status for each in found} == {'finished'}
    assert [[point.examples for point in each.points] for each in found] == [[300]] * 2
    with open(str(tmp_path / 'set' / 'sqrt' / 'seed-1' / 'flags.json')) as opened:
        assert '--num_towers=2' in json.load(opened)
