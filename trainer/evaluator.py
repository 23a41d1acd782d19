"""train.py as an evaluator: evaluates the checkpoints of a run, until the last one."""

import contextlib
import os
import signal
import time

import tensorflow.compat.v1 as tf

import towers
from towers.checkpoint.files import READ_ERRORS, list_checkpoints, newest_prefix, step_of
from trainer.flags import FLAGS, train_dir
from trainer.metrics_log import MetricsLog
from trainer.position import last_step, position_of
from trainer.results import evaluate_in_graph

FILE = 'evaluator.jsonl'


def evaluate_run(setup, cluster):
    """Evaluates each new checkpoint of --train_dir, up to the one that ends the run by its flags.

    Args:
      setup: `Setup`.
      cluster: `Cluster` of the run, whose batches and workers say where its last step is.

    Returns:
      None at the end; or the number of the signal that came first.
    """
    return evaluate_checkpoints(
        lambda prefix: evaluate_in_graph(setup, prefix),
        lambda prefix: is_last(setup, cluster, prefix), train_dir(), reaches_accuracy)


def is_last(setup, cluster, prefix):
    """Whether the run ends with a checkpoint, as its flags are.

    Counted from the place of the checkpoint, as the run does when it goes on from there.
    """
    position = position_of(prefix)
    return position is not None and position.step >= last_step(setup, cluster, position)


def reaches_accuracy(step, results):
    """Whether the run stops after a step by --stop_at_accuracy: it looks every --eval_steps."""
    return bool(FLAGS.stop_at_accuracy and step % FLAGS.eval_steps == 0
                and results['accuracy'] >= FLAGS.stop_at_accuracy)


def evaluate_checkpoints(evaluate, ends_with, directory, reaches=lambda step, results: False,
                         pause=1.):
    """Evaluates each new checkpoint of a directory; the results become lines of `FILE` there.

    It takes the newest one. Those that came while another one was evaluated are passed over, and
    named; the chief may replace them at any moment.

    Args:
      evaluate: function of the prefix of a checkpoint; returns a dict of results.
      ends_with: function of the prefix of a checkpoint; returns whether it is the last one.
      directory: of the run.
      reaches: function of a step and its results; returns whether the run ends there by them.
      pause: seconds from one look to the next.

    Returns:
      None after the last checkpoint; or the number of the signal that came first.
    """
    log = MetricsLog(os.path.join(directory, FILE))
    print('waiting        for checkpoints in %s; the results go to %s' % (
        directory, log.path), flush=True)
    if newest_prefix(directory) is None and os.path.exists(log.path):
        _tell(log.resume(0, is_new=True))
    seen, resumed, is_over = None, None, False
    with _stopped_by_sigterm():
        try:
            while not is_over:
                newest = newest_prefix(directory)
                if newest is None or newest == seen:
                    time.sleep(pause)
                    continue
                _tell_passed_over(directory, seen, newest)
                seen = newest
                try:
                    step, is_over = step_of(newest) or 0, ends_with(newest)
                    results = evaluate(newest)
                    is_over = is_over or reaches(step, results)
                except READ_ERRORS + (tf.errors.OpError, towers.CheckpointError):
                    if os.path.exists(newest + '.index'):
                        raise
                    print('passed over    %s: replaced while it was read' % os.path.basename(
                        newest), flush=True)
                    continue
                if resumed is None or step < resumed:  # a run that began again goes back
                    _tell(log.resume(step))
                resumed = step
                log.add(step, dict({'test_' + name: value for name, value in results.items()},
                                        wall_time=round(time.time(), 3)))
                log.sync()
        except _Stopped as stopped:
            return stopped.number
    print('evaluated      the last step, %d: ended' % step, flush=True)
    return None


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
