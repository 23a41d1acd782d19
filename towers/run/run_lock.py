"""Locks a directory, so that one process at a time has a run in it."""

import contextlib
import errno
import json
import os
import socket
import time
import warnings
import typing

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

import tensorflow.compat.v1 as tf

from towers.arguments import directory_name
from towers.checkpoint.files import describe_safe, first_line
from towers.errors import CheckpointError, RunLockedError
from towers.safe_files import parsed, regular

LOCK_FILE = 'run.lock'
_MOST_BYTES = 4096  # that are read of it

# Errors of flock on file systems that have no locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)


@contextlib.contextmanager
def hold_directory(directory: str) -> typing.Iterator[bool]:
    """Keeps other runs out of a directory while the `with` block lasts.

        with towers.hold_directory(train_dir):
            newest = towers.newest_checkpoint(train_dir)
            ...

    It takes the kernel's lock (`flock`) on the file `run.lock` in the directory, which is released
    when the process ends, by SIGKILL too; so a file that is left over does no harm. Where there is
    no flock (some network file systems; paths such as gs://…; Windows) it goes on without a lock,
    and warns by a `RuntimeWarning`.

    Args:
      directory: made if it is missing.

    Yields:
      Whether the directory is locked: False where there is no flock.

    Raises:
      RunLockedError: another run has the directory: which process, on which machine, since when.
      CheckpointError: `directory` is a file, or cannot be made or written to; a `BadFileError`
        where `run.lock` in it is no regular file.
    """
    directory = directory_name('directory', directory)
    with contextlib.ExitStack() as stack:
        try:
            tf.io.gfile.makedirs(directory)
            unlocked = 'there are no file locks for it'
            if fcntl is not None and '://' not in directory:
                # Unbuffered, so that a full disk is an error of the write. Programs that this
                # process starts do not inherit the file (PEP 446).
                lock_file = stack.enter_context(open(
                    os.path.join(directory, LOCK_FILE), 'a+b', buffering=0, opener=regular))
                unlocked = _locked(directory, lock_file)
        except (OSError, tf.errors.OpError) as error:
            raise CheckpointError(
                '%s cannot be written to: %s. Nothing was written. %s Give a directory that can be '
                'made and written to.' % (directory, getattr(error, 'strerror', None)
                                          or first_line(error), describe_safe(directory)))
        if unlocked:
            warnings.warn('%s is not locked, as %s: see to it yourself that no other run uses it.'
                          % (directory, unlocked), RuntimeWarning,
                          stacklevel=3)  # the line of the `with` statement, past contextlib
        yield not unlocked


def _locked(directory, lock_file):
    """Locks the file and writes into it who holds it; returns None, or why there is no lock."""
    try:
        fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RunLockedError(
            '%s is in use by %s. Two runs in one directory would overwrite and delete each '
            "other's checkpoints; nothing was written. Wait for that run, end it, or give this "
            'one another directory.' % (directory, _holder(lock_file)))
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return 'its file system has no file locks (%s)' % error.strerror
    lock_file.truncate(0)
    lock_file.write(json.dumps({
        'pid': os.getpid(), 'host': socket.gethostname(),
        'started': time.strftime('%Y-%m-%d %H:%M:%S')}).encode() + b'\n')
    return None


def _holder(lock_file):
    """Who holds the lock, in words, from what the holder has written into the file."""
    lock_file.seek(0)
    try:
        found = parsed(lock_file.read(_MOST_BYTES), {'pid': int, 'host': str, 'started': str})
    except ValueError:
        return 'another process, which has not said yet which one it is'
    return 'process %(pid)s on %(host)s, since %(started)s' % found
