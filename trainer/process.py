"""How the process of train.py ends.

    0      the run has ended, or was asked to stop by a flag
    1      the run failed: data, checkpoint, memory, a NaN, another machine
    2      the flags are at fault; nothing was written
    128+n  the signal n ended it, after its checkpoint was saved

A user's mistake is one line on standard error, in the words of flags. Only errors of this program
itself, and errors in the user's own functions, have a traceback.
"""

import contextlib
import re
import signal
import typing

import tensorflow.compat.v1 as tf

import datasets
import towers
from trainer.command_line import refuse, say
from trainer.data import input_failure, own_failure, show_cause

# Errors of a run (status 1); all other `TowersError`s are about the flags (status 2).
_FAILURES = (datasets.BadExampleError, datasets.OwnDataError, datasets.OwnModelError,
             towers.AuditError, towers.CheckpointError, towers.ClusterError, towers.InputError,
             towers.LogFileError, towers.NonFiniteError, towers.OutOfMemoryError,
             towers.RunLockedError)


def run(main: typing.Callable[[list], int], argv: typing.List[str]) -> int:
    """Runs a main function; a user's mistake is one line on standard error, not a traceback.

    Args:
      main: function of the arguments that returns an exit status.
      argv: the arguments that are no flags, the program first.

    Returns:
      The exit status: what `main` returned; 1 after an error of the run; or the status of a signal.

    Raises:
      SystemExit: the flags are wrong (status 2).
      Exception: any error that is no mistake of the user, unchanged.
    """
    try:
        with _interruptible():
            return main(argv)
    # `refuse` exits with status 2, and `_failed` returns 1. A `BadFileError` is a fault of the
    # flags that name the file. It comes first, since it is also a `CheckpointError`, which is among
    # `_FAILURES`.
    except towers.BadFileError as error:
        refuse(error)
    except _FAILURES as error:
        return _failed(error)
    except towers.TowersError as error:
        refuse(error)
    except tf.errors.OpError as error:
        failure = _failure_of_step(error)
        if failure is None:
            raise
        return _failed(failure)
    except KeyboardInterrupt:  # before the first step, where there is nothing to save
        return status_of_signal(signal.SIGINT)


def _failure_of_step(error: tf.errors.OpError) -> typing.Any:
    """What has failed in a step, as an exception or a text: memory, the user's own code, or the
    input; None if it is something else.

    Args:
      error: TensorFlow's error.
    """
    if isinstance(error, tf.errors.ResourceExhaustedError):
        found = re.search(r'OOM when allocating tensor with shape\[[\d,]*\]', str(error))
        tensor = ': ' + found.group() if found else ''
        return ('there is not enough memory%s. Give a smaller --batch_size or --image_size, or '
                'more towers on other devices.' % tensor)
    return own_failure(error) or input_failure(error)


@contextlib.contextmanager
def _interruptible() -> typing.Iterator[None]:
    """A context in which Ctrl-C is a `KeyboardInterrupt`.

    train.py has set the handler to `SIG_DFL` for the time of its imports. A process that ignores
    SIGINT, as a process in the background of a script does, goes on ignoring it.
    """
    former = signal.getsignal(signal.SIGINT)
    if former is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)


def status_of_signal(number: typing.Optional[int]) -> int:
    """The exit status of a program that the signal of this number has ended; 0 for None."""
    return 0 if number is None else 128 + number


def _failed(error: typing.Any) -> int:
    """Says an error of a run in one line, and shows the traceback of the user's own code in it.

    Args:
      error: an exception, or a text.

    Returns:
      The exit status.
    """
    if isinstance(error, (datasets.OwnDataError, datasets.OwnModelError)):
        show_cause(error)
    say(error)
    return 1
