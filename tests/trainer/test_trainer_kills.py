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


class Killer:
    """Starts a run again and again, and kills it each time at some moment of its own."""

    def __init__(self, runner, folder, argv, latest, seed):
        self.cut_short = 0  # how many kills left a checkpoint that was not wholly written
        self.folder = folder
        self._latest = latest
        self._runner = runner
        self._argv = argv
        self._random = random.Random(seed)

    def kill(self, moment):
        """Kills a run at a moment; it must not have ended before that."""
        run = self._runner.start(self.folder, self._argv)
        getattr(self, '_wait_' + moment)(run)
        run.send(signal.SIGKILL)
        assert run.status() == -signal.SIGKILL, run.stdout + run.stderr
        self.cut_short += bool(half_written(self.folder)) or max(
            steps_saved(self.folder), default=0) > (named_by_state_file(self.folder) or 0)

    def _wait_start(self, run):
        time.sleep(self._random.uniform(0, 1.5))

    def _wait_step(self, run):
        before = len(steps_saved(self.folder))
        more = self._random.randint(2, 3)
        self._wait(run, lambda: len(steps_saved(self.folder)) >= before + more)
        time.sleep(self._random.uniform(0, 0.03))

    def _wait_write(self, run):
        self._wait(run, lambda: len(steps_saved(self.folder)) > 1)
        before = len(steps_saved(self.folder))
        self._wait(run, lambda: len(steps_saved(self.folder)) > before)
        # Held still before it is looked at again: on a busy machine it may have gone on meanwhile.
        self._wait(run, lambda: half_written(self.folder) and self._is_half_written_still(run))

    def _is_half_written_still(self, run):
        time.sleep(self._random.choice([0, 0, 0.001]))
        run.send(signal.SIGSTOP)
        time.sleep(0.001)
        if half_written(self.folder):
            return True
        run.send(signal.SIGCONT)
        return False

    def _wait_state(self, run):
        before = len(steps_saved(self.folder))
        self._wait(run, lambda: len(steps_saved(self.folder)) > before + 1)

    def _wait_end(self, run):
        wait_until(lambda: named_by_state_file(self.folder) == STEPS or run.has_ended(), pause=0)

    def _wait(self, run, condition):
        # On a busy machine a run may be far ahead of what is seen of it: it must not end meanwhile.
        wait_until(lambda: condition() or run.has_ended() or max(
            steps_saved(self.folder), default=0) >= self._latest, pause=0)


@pytest.mark.slow
def test_a_run_that_is_killed_ends_as_one_that_is_not(runner, reference, tmp_path):
    folder = str(tmp_path / 'run')
    killer = Killer(runner, folder, FLAGS + ['--save_steps=1'], latest=STEPS - 8, seed=1)
    for moment in 'start write step write state end'.split():
        killer.kill(moment)
    end = runner.run(folder, FLAGS + ['--save_steps=1'])
    assert killer.cut_short
    assert half_written(folder) == []
    assert '%s holds 30 steps already, and 30 were asked for: evaluating them. Another ' % folder \
        in end.stdout
    assert steps_saved(folder) == list(range(31))
    for step in steps_saved(reference.train_dir):
        assert names_that_differ(values_of(reference.train_dir, step),
                                 values_of(folder, step)) == []
    assert untimed(metrics(folder)) == untimed(metrics(reference.train_dir))
    accuracy = re.findall('test accuracy .*', end.stdout)[-1]  # after the lines of progress
    assert accuracy in reference.stdout
