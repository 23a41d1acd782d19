"""train.py as an evaluator: evaluates the checkpoints of a run, until it ends."""

import contextlib
import json
import os
import signal
import time

import tensorflow.compat.v1 as tf

import towers
from towers.checkpoint.files import READ_ERRORS, list_checkpoints, newest_prefix, step_of
from towers.safe_files import read_json, written_whole
from trainer.flags import train_dir
from trainer.metrics_log import MetricsLog
from trainer.results import evaluate_in_graph

FILE = 'evaluator.jsonl'
END = 'ended.json'  # a file of a run that has ended for another reason than a signal


def say_ended(directory, step):
    """Writes into the folder of a run that it ended with a step; None: that it goes on."""
    path = os.path.join(directory, END)
    if step is not None:
        with written_whole(path) as opened:
            json.dump({'step': step}, opened)
    else:
        with contextlib.suppress(OSError):  # mostly there is none
            os.remove(path)


def evaluate_run(setup):
    """Evaluates each new checkpoint of --train_dir, up to the one with which the run ends.

    Args:
      setup: `Setup`.

    Returns:
      None at the end; or the number of the signal that came first.
    """
    return evaluate_checkpoints(lambda prefix: evaluate_in_graph(setup, prefix), train_dir())


def evaluate_checkpoints(evaluate, directory, pause=1.):
    """Evaluates each new checkpoint of a directory; the results become lines of `FILE` there.

    It takes the newest one. Those that came while another one was evaluated are passed over, and
    named; the chief may replace them at any moment.

    Args:
      evaluate: function of the prefix of a checkpoint; returns a dict of results.
      directory: of the run.
      pause: seconds from one look to the next.

    Returns:
      None after the last checkpoint; or the number of the signal that came first.
    """
    log = MetricsLog(os.path.join(directory, FILE))
    print('waiting        for checkpoints in %s; the results go to %s' % (
        directory, log.path), flush=True)
    if newest_prefix(directory) is None and os.path.exists(log.path):
        _tell(log.resume(0, is_new=True))
    seen, step = None, None
    with _stopped_by_sigterm():
        try:
            while True:
                newest = newest_prefix(directory)
                if newest is None or newest == seen:
                    if newest is not None and _has_ended(directory, newest):
                        break
                    time.sleep(pause)
                    continue
                _tell_passed_over(directory, seen, newest)
                seen = newest
                try:
                    results = evaluate(newest)
                except READ_ERRORS + (tf.errors.OpError, towers.CheckpointError):
                    if os.path.exists(newest + '.index'):
                        raise
                    print('passed over    %s: replaced while it was read' % os.path.basename(
                        newest), flush=True)
                    continue
                before, step = step, step_of(newest) or 0
                if before is None or step < before:  # a run that began again goes back
                    _tell(log.resume(step))
                log.add(step, dict({'test_' + name: value for name, value in results.items()},
                                   wall_time=round(time.time(), 3)))
                log.sync()
        except _Stopped as stopped:
            return stopped.number
    print('evaluated      the last step, %d: ended' % step_of(newest), flush=True)
    return None


def _has_ended(directory, newest):
    """Whether a run has ended with its newest checkpoint."""
    end = read_json(os.path.join(directory, END), {'step': int}, 'delete it')
    return end is not None and end['step'] == step_of(newest)


class _Stopped(BaseException):
    """Raised by the signal handler, wherever the process is."""

    def __init__(self, number):
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def _stopped_by_sigterm():
    """A block that SIGTERM ends, also in the first process of a container, which would ignore it.
    """
    def stop(number, unused_frame):
        raise _Stopped(number)
    former = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


def _tell_passed_over(directory, seen, newest):
    """Names the checkpoints between two that are evaluated."""
    there = list_checkpoints(directory)  # in the order of their steps
    if seen is None or newest not in there:
        return
    between = [os.path.basename(prefix) for prefix in there[:there.index(newest)]
               if (step_of(prefix) or 0) > (step_of(seen) or 0)]
    if between:
        print('passed over    %s: %s is newer' % (', '.join(between), os.path.basename(newest)),
              flush=True)


def _tell(line):
    if line is not None:
        print(line, flush=True)
