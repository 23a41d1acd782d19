"""train.py as an evaluator: evaluates the checkpoints of a run, until it ends.

It is a process beside the run, on this machine or on another one that shares the folder. The two
share only files: the run's checkpoints, and `ended.json`, which says that no more will come. The
evaluator writes `evaluator.jsonl`, and otherwise only reads. Its test is
tests/trainer/test_evaluations.py.
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
    """Evaluates each new checkpoint of --train_dir, up to the one with which the run ends.

    Each is evaluated in a graph of its own, as with `--mode=eval`.

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

    It always takes the newest checkpoint; older ones, saved while it evaluated another, are passed
    over.

    Args:
      evaluate: function from the prefix of a checkpoint to a dict of results.
      directory: the folder of the run.
      pause: seconds from one look into the folder to the next.
    """
    log = MetricsLog(os.path.join(directory, FILE))
    print('waiting        for checkpoints in %s; the results go to %s' % (
        directory, log.path), flush=True)
    is_new_run = newest_prefix(directory) is None
    if is_new_run and os.path.exists(log.path):  # a log of an earlier run, which is renamed
        _resume(log, 0, is_new=True)
    former_step = None  # that of the checkpoint that was evaluated last
    with _stopped_by_sigterm():
        for prefix in _new_checkpoints(directory, pause):
            results = _results_unless_replaced(evaluate, prefix)
            if results is None:
                print('passed over    %s: replaced while it was read' % os.path.basename(prefix),
                      flush=True)
                continue
            step = step_of(prefix) or 0  # a checkpoint without a step counts as the run's beginning
            is_first_here = former_step is None  # an earlier evaluator may have left lines
            went_back = former_step is not None and step < former_step  # the run has begun again
            if is_first_here or went_back:
                _resume(log, step)  # cuts the lines of later steps
            former_step = step
            _log_results(log, step, results)
    # The loop ends only after a checkpoint: `prefix` is that of the last one.
    print('evaluated      the last step, %s: ended' % step_of(prefix), flush=True)


def _log_results(log: MetricsLog, step: int, results: dict) -> None:
    """Writes the results of a checkpoint as the line of its step, and syncs the file."""
    entry = {'test_' + name: value for name, value in results.items()}
    log.add(step, dict(entry, wall_time=round(time.time(), 3)))
    log.sync()


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


def _resume(log: MetricsLog, step: int, is_new: bool = False) -> None:
    """Prepares a log for results from a step on, see `MetricsLog.resume`, and prints what it did.
    """
    line = log.resume(step, is_new)
    if line is not None:
        print(line, flush=True)


def _new_checkpoints(directory: str, pause: float) -> typing.Iterator[str]:
    """Yields the prefix of each new checkpoint of a run, up to the one with which the run ends.

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
    """A context in which SIGTERM ends the process, also the first process of a container, in which
    the kernel ignores a signal without a handler."""
    def stop(number: int, unused_frame: typing.Any) -> None:
        """The handler of the signal."""
        sys.exit(128 + number)
    former = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)
