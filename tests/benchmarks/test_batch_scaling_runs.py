"""Running a set: in order, resumable, stopped cleanly."""

import os
import signal
import subprocess
import sys
import time

import pytest

from benchmarks.batch_scaling import results

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@pytest.mark.slow
def test_a_signal_stops_the_run_under_way_and_the_set_goes_on_later(tmp_path):
    """Real runs on the digits; the CSV; nothing run twice."""
    folder = str(tmp_path / 'set')
    command = [sys.executable, '-m', 'benchmarks.batch_scaling', '--model=digits', '--seeds=1',
               '--arms=one,sqrt', '--batch_size=25', '--examples=6000', '--evaluations=2',
               '--num_towers=2', '--noplots', '--directory=' + folder]

    def start():
        return subprocess.Popen(command, cwd=ROOT, env=dict(os.environ, TF_CPP_MIN_LOG_LEVEL='3'),
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                universal_newlines=True)

    def steps_of(arm):
        return [line['step'] for line in results.read_metrics('%s/%s/seed-1' % (folder, arm))]

    stopped, deadline = start(), time.time() + 120
    while len(steps_of('one')) < 2 and time.time() < deadline:
        time.sleep(0.02)
    stopped.send_signal(signal.SIGTERM)
    _, said = stopped.communicate()
    assert said.count('stopping: the run finishes its step and saves') == 1
    # It is no failure, it has saved, and nothing was begun after it.
    assert 'FAILED' not in said and not steps_of('sqrt')
    assert any(name.startswith('model.ckpt-') for name in os.listdir(folder + '/one/seed-1'))
    for finished in (0, 2):
        process = start()
        _, said = process.communicate()
        assert process.returncode == 0, said
        assert said.count('finished already') == finished
    assert steps_of('one') == sorted(set(steps_of('one')))
    found = results.read_csv(folder + '/batch_scaling.csv')
    assert [(each.arm.key, each.status) for each in found] == [
        ('one', 'finished'), ('sqrt', 'finished')]
    assert [[point.examples for point in each.points] for each in found] == [[3000, 6000]] * 2
