"""train.py as an evaluator: evaluates the checkpoints of a run, until the run ends.

The evaluator is a process beside the run, on the same machine or on another machine that shares the
folder. The two processes share only files: the run's checkpoints, and `ended.json`, which says that
no more checkpoints will come. The evaluator writes `evaluator.jsonl`, and otherwise only reads. Its
test is tests/trainer/test_evaluations.py.
"""

import contextlib
import json
import os
import signal
import sys
import time
import typing

import tensorflow.compat.v1 as tf

import towers
from towers.checkpoint.files import READ_ERRORS, step_of
from towers.checkpoint.newest import newest_prefix
from towers.safe_files import read_json, written_whole
from trainer.flags import FLAGS, train_dir
from trainer.job import Setup, make_evaluation
from trainer.metrics_log import MetricsLog
from trainer.results import evaluate

FILE = 'evaluator.jsonl'
END = 'ended.json'  # a file of a run that has ended and will not go on


def say_ended(directory: str, step: int) -> None:
    """Writes the file `END` into the folder of a run: it has ended for good, with this step."""
    with written_whole(os.path.join(directory, END)) as opened:
        json.dump({'step': step}, opened)


def say_goes_on(directory: str) -> None:
    """Removes the file `END` from the folder of a run, which may have ended before."""
    with contextlib.suppress(OSError):  # mostly there is no such file
        os.remove(os.path.join(directory, END))


def evaluate_run(setup: Setup) -> None:
    """Evaluates each new checkpoint of --train_dir, up to the last checkpoint of the run.

    Each checkpoint is evaluated in a graph of its own, as with `--mode=eval`.

    Args:
      setup: the model and its data.
    """
    def evaluated(prefix: str) -> dict:
        """The results of a checkpoint."""
        with tf.Graph().as_default():
            tf.set_random_seed(FLAGS.seed)
            return evaluate(make_evaluation(setup), setup, prefix)
    evaluate_checkpoints(evaluated, train_dir())


def evaluate_checkpoints(evaluate: typing.Callable[[str], dict], directory: str,
                         pause: float = 1.) -> None:
    """Evaluates each new checkpoint of a run; the results become lines of `FILE` in its folder.

    It always takes the newest checkpoint. Older checkpoints that were saved during the evaluation
    before are passed over.

    Args:
      evaluate: function from the prefix of a checkpoint to a dict of results.
      directory: the folder of the run.
      pause: seconds from one look into the folder to the next.
    """
    log = _ResultsLog(directory)
    print('waiting        for checkpoints in %s; the results go to %s' % (
        directory, log.path), flush=True)
    is_new_run = newest_prefix(directory) is None
    if is_new_run:
        log.begin_run()
    with _stopped_by_sigterm():
        for prefix in _new_checkpoints(directory, pause):
            results = _results_unless_replaced(evaluate, prefix)
            if results is None:
                print('passed over    %s: replaced while it was read' % os.path.basename(prefix),
                      flush=True)
                continue
            step = step_of(prefix) or 0  # a checkpoint without a step counts as the run's beginning
            log.add(step, results)
    # The loop ends only after a checkpoint: `prefix` is the last checkpoint's.
    print('evaluated      the last step, %s: ended' % step_of(prefix), flush=True)


class _ResultsLog:
    """The file `FILE` in the folder of a run: a line with the results of each checkpoint.

    Attributes:
      path: the name of the file.
    """

    def __init__(self, directory: str):
        """`directory` is the folder of the run."""
        self.path = os.path.join(directory, FILE)
        self._log = MetricsLog(self.path)
        self._latest_step: typing.Optional[int] = None  # None before the first checkpoint

    def begin_run(self) -> None:
        """Renames the log of an earlier run, if there is one."""
        if os.path.exists(self.path):
            self._resume(0, is_new=True)

    def add(self, step: int, results: dict) -> None:
        """Writes the results of a checkpoint as the line of its step, and syncs the file.

        Lines of later steps are cut. An earlier evaluator may have left such lines. Or this
        evaluator has written them, and then the run has gone back to an earlier step.

        Args:
          step: the step of the checkpoint.
          results: the results.
        """
        went_back = self._latest_step is not None and step < self._latest_step
        if self._latest_step is None or went_back:
            self._resume(step)
        self._latest_step = step
        line = {'test_' + name: value for name, value in results.items()}
        self._log.add(step, dict(line, wall_time=round(time.time(), 3)))
        self._log.sync()

    def _resume(self, step: int, is_new: bool = False) -> None:
        """Prepares the log for results from a step on, by `MetricsLog.resume`, and prints the line
        that this returns."""
        line = self._log.resume(step, is_new)
        if line is not None:
            print(line, flush=True)


def _results_unless_replaced(evaluate: typing.Callable[[str], dict],
                             prefix: str) -> typing.Optional[dict]:
    """The results of a checkpoint; None if the run has deleted it while it was read.

    Args:
      evaluate: function from the prefix of a checkpoint to a dict of results.
      prefix: the prefix of the checkpoint.
    """
    try:
        return evaluate(prefix)
    except READ_ERRORS + (tf.errors.OpError, towers.CheckpointError):
        is_there = os.path.exists(prefix + '.index')
        if is_there:  # then the error has another reason
            raise
        return None


def _new_checkpoints(directory: str, pause: float) -> typing.Iterator[str]:
    """Yields the prefix of each new checkpoint of a run, up to the last checkpoint of the run.

    Args:
      directory: the folder of the run.
      pause: seconds from one look into the folder to the next.
    """
    latest = None
    while True:
        newest = newest_prefix(directory)
        if newest is not None and newest != latest:
            latest = newest
            yield newest
        elif newest is not None and _has_ended(directory, newest):
            return
        else:
            time.sleep(pause)


def _has_ended(directory: str, newest: str) -> bool:
    """Whether the run in a folder has ended with its newest checkpoint, of this prefix."""
    end = read_json(os.path.join(directory, END), {'step': int}, 'delete it')
    return end is not None and end['step'] == step_of(newest)


@contextlib.contextmanager
def _stopped_by_sigterm() -> typing.Iterator[None]:
    """A context in which SIGTERM ends the process. Without a handler it would not end the first
    process of a container: the kernel ignores signals for which this process has no handler."""
    def stop(number: int, unused_frame: typing.Any) -> None:
        """The handler of the signal."""
        sys.exit(128 + number)
    former = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)
