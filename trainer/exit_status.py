"""The exit status of train.py: 1 of a run that fails, 2 of flags, 128 and more of a signal."""

import contextlib
import errno
import re
import signal
import sys

import tensorflow.compat.v1 as tf

import datasets
import towers
from trainer.command_line import refuse, say
from trainer.data import input_failure, own_failure, show_cause
from trainer.output_stream import OutputStream

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
      OutputLostError: see `lasting_output`.
    """
    try:
        with _interruptible():
            return main(argv)
    except towers.OutputLostError:
        raise
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


# ---- Output that is lost -------------------------------------------------------------------------

@contextlib.contextmanager
def lasting_output():
    """Runs a program's main with `OutputStream`s as `sys.stdout` and `sys.stderr`, and exits.

    If standard output is lost, the exit status is 141 (128 plus SIGPIPE) where its reader is gone,
    as a shell expects of a program in a pipe; else 1, and a line on standard error says so. Another
    status that the program itself exits with, such as after a signal, stays.

    Raises:
      SystemExit: always.
    """
    former = sys.stdout, sys.stderr
    sys.stdout = output = OutputStream(sys.stdout)
    sys.stderr = OutputStream(sys.stderr, on_lost=lambda error: None)
    status = 0
    try:
        with contextlib.suppress(towers.OutputLostError):
            try:
                yield
            except SystemExit as ended:
                status = ended.code
            output.flush()
        if output.lost is not None and status in (0, None, 128 + signal.SIGPIPE):
            status = _status_of_loss(output.lost)
            if status == 1:
                say('standard output cannot be written: %s' % output.lost.strerror)
    finally:
        sys.stdout, sys.stderr = former
    sys.exit(status)


def _status_of_loss(error):
    """The exit status of a program whose output was lost with this `OSError`."""
    return 128 + signal.SIGPIPE if error.errno in (errno.EPIPE, errno.EIO) else 1
