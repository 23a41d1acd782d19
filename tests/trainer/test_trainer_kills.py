"""Runs of `train.py` that are killed at any moment end as those that are not, bit by bit."""

import os
import random
import re
import signal
import time

import pytest

from train_runs import (FLAGS, STEPS, half_written, metrics, names_that_differ, steps_saved,
                        untimed, values_of, wait_until)


def named_by_state_file(folder):
    """The step that the state file names, or None."""
    try:
        with open(os.path.join(str(folder), 'checkpoint')) as state:
            found = re.match(r'model_checkpoint_path: "model\.ckpt-(\d+)"', state.read())
    except FileNotFoundError:
        return None
    return found and int(found.group(1))


def half_written_and_held(run, folder):
    """Whether a run is half way through a checkpoint; it is then held still, since on a busy machine
    it may go on before it is looked at again."""
    if not half_written(folder):
        return False
    run.send(signal.SIGSTOP)
    time.sleep(0.001)
    if not half_written(folder):
        run.send(signal.SIGCONT)
        return False
    return True


@pytest.mark.slow
def test_a_run_that_is_killed_ends_as_one_that_is_not(runner, reference, tmp_path):
    folder, numbers = str(tmp_path / 'run'), random.Random(1)
    cut_short = 0  # how many kills left a checkpoint that was not wholly written
    for moment in ('start', 'write', 'write', 'saved', 'end'):
        run, before = runner.start(folder, FLAGS + ['--save_steps=1']), len(steps_saved(folder))
        if moment == 'start':
            time.sleep(numbers.uniform(0, 1.5))
        elif moment == 'end':
            wait_until(lambda: named_by_state_file(folder) == STEPS or run.has_ended(), pause=0)
        else:  # on a busy machine a run may be far ahead of what is seen of it
            wait_until(lambda: run.has_ended() or max(steps_saved(folder), default=0) >= STEPS - 8
                       or len(steps_saved(folder)) > max(1, before) and (
                           moment == 'saved' or half_written_and_held(run, folder)), pause=0)
        run.send(signal.SIGKILL)
        assert run.status() == -signal.SIGKILL, run.stdout + run.stderr
        cut_short += bool(half_written(folder)) or max(
            steps_saved(folder), default=0) > (named_by_state_file(folder) or 0)
    end = runner.run(folder, FLAGS + ['--save_steps=1'])
    assert cut_short and half_written(folder) == []
    assert '%s holds 30 steps already, and 30 were asked for: evaluating them. Another ' % folder \
        in end.stdout
    assert steps_saved(folder) == list(range(31))
    for step in steps_saved(reference.train_dir):
        assert names_that_differ(values_of(reference.train_dir, step),
                                 values_of(folder, step)) == []
    assert untimed(metrics(folder)) == untimed(metrics(reference.train_dir))
    accuracy = re.findall('test accuracy .*', end.stdout)[-1]  # after the lines of progress
    assert accuracy in reference.stdout
