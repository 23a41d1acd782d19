"""train.py as an evaluator: evaluates the checkpoints of a run, until it ends."""

import contextlib
import json
import os
import signal
import sys
import time

import tensorflow.compat.v1 as tf

import towers
from towers.checkpoint.files import READ_ERRORS, newest_prefix, step_of
from towers.safe_files import read_json, written_whole
from trainer.flags import FLAGS, train_dir
from trainer.job import make_evaluation
from trainer.metrics_log import MetricsLog
from trainer.results import evaluate

FILE = 'evaluator.jsonl'
END = 'ended.json'  # a file of a run that has ended and will not go on


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
    """Evaluates each new checkpoint of --train_dir, up to the one with which the run ends."""
    def evaluated(prefix):
        with tf.Graph().as_default():
            tf.set_random_seed(FLAGS.seed)
            return evaluate(make_evaluation(setup), setup, prefix)
    evaluate_checkpoints(evaluated, train_dir())


def evaluate_checkpoints(evaluate, directory, pause=1.):
    """Evaluates each new checkpoint of a run's directory; the results become lines of `FILE` there.

    It takes the newest one; those that came while another one was evaluated are passed over.
    `evaluate` is a function of the prefix of a checkpoint, and returns a dict of results; `pause`
    is seconds from one look to the next.
    """
    log = MetricsLog(os.path.join(directory, FILE))

    def resume(step, is_new=False):
        told = log.resume(step, is_new)
        if told is not None:
            print(told, flush=True)
    print('waiting        for checkpoints in %s; the results go to %s' % (
        directory, log.path), flush=True)
    if newest_prefix(directory) is None and os.path.exists(log.path):
        resume(0, is_new=True)
    seen, step = None, None
    with _stopped_by_sigterm():
        while True:
            newest = newest_prefix(directory)
            if newest is None or newest == seen:
                if newest is not None and _has_ended(directory, newest):
                    break
                time.sleep(pause)
                continue
            seen = newest
            try:
                results = evaluate(newest)
            except READ_ERRORS + (tf.errors.OpError, towers.CheckpointError):
                if os.path.exists(newest + '.index'):
                    raise
                print('passed over    %s: replaced while it was read' % os.path.basename(newest),
                      flush=True)
                continue
            before, step = step, step_of(newest) or 0
            if before is None or step < before:  # a run that began again goes back
                resume(step)
            log.add(step, dict({'test_' + name: value for name, value in results.items()},
                               wall_time=round(time.time(), 3)))
            log.sync()
    print('evaluated      the last step, %d: ended' % step_of(newest), flush=True)


def _has_ended(directory, newest):
    """Whether a run has ended with its newest checkpoint."""
    end = read_json(os.path.join(directory, END), {'step': int}, 'delete it')
    return end is not None and end['step'] == step_of(newest)


@contextlib.contextmanager
def _stopped_by_sigterm():
    """A block that SIGTERM ends, also in the first process of a container, which would ignore it.
    """
    def stop(number, unused_frame):
        sys.exit(128 + number)
    former = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)
