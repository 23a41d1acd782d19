"""The exit status of train.py: 1 of a run that fails, 2 of flags, 128 and more of a signal."""

import contextlib
import re
import signal

import tensorflow.compat.v1 as tf

import datasets
import towers
from trainer.command_line import refuse, say
from trainer.data import input_failure, own_failure, show_cause

# Errors of a run (status 1); the other `TowersError`s are about the flags (status 2).
_FAILURES = (datasets.BadExampleError, datasets.OwnDataError, datasets.OwnModelError,
             towers.AuditError, towers.CheckpointError, towers.ClusterError, towers.LogFileError,
             towers.NonFiniteError, towers.OutOfMemoryError, towers.RunLockedError)


def run(main, argv):
    """Runs a main function and returns its exit status; a user's mistake is one line on standard
    error, not a traceback.

    Args:
      main: function of `argv` that returns an exit status.
      argv: list of strings.

    Raises:
      SystemExit: with status 2, about the flags.
    """
    try:
        with _interruptible():
            return main(argv)
    except towers.BadFileError as error:
        refuse(error)
    except _FAILURES as error:
        return _failed(error)
    except towers.TowersError as error:
        refuse(error)
    except tf.errors.ResourceExhaustedError as error:
        found = re.search(r'OOM when allocating tensor with shape\[[\d,]*\]', str(error))
        return _failed('there is not enough memory%s. Give a smaller --batch_size or --image_size, '
                       'or more towers on other devices.' % (
                           ': ' + found.group() if found else ''))
    except tf.errors.OpError as error:
        failure = own_failure(error) or input_failure(error)
        if failure is None:
            raise
        return _failed(failure)
    except KeyboardInterrupt:  # before the first step, where there is nothing to save
        return status_of_signal(signal.SIGINT)


@contextlib.contextmanager
def _interruptible():
    """Makes Ctrl-C a `KeyboardInterrupt` in the block, unless the process ignores it."""
    former = signal.getsignal(signal.SIGINT)
    if former is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)


def status_of_signal(number):
    """The exit status of a program that a signal of this number has ended; of None 0."""
    return 0 if number is None else 128 + number


def _failed(error):
    """Says an error of a run, or a text, in one line; returns the exit status."""
    if isinstance(error, (datasets.OwnDataError, datasets.OwnModelError)):
        show_cause(error)
    say(error)
    return 1
