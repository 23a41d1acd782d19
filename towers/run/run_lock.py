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
from towers.checkpoint.files import describe_safe
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
    when the process ends, by SIGKILL too; so a file that is left over does no harm. Processes
    forked from the holder hold it as well. It works between machines where their file system
    passes locks on (NFS does, from Linux 2.6.12 on).

    Where there is no flock (some network file systems; paths such as gs://…; Windows) it goes on
    without a lock, and warns by a `RuntimeWarning`.

    Args:
      directory: made if it is missing.

    Yields:
      Whether the directory is locked: False where there is no flock.

    Raises:
      RunLockedError: another run has the directory: which process, on which machine, since when.
      CheckpointError: `directory` is a file, or cannot be made or written to; a `BadFileError`
        where `run.lock` in it is no regular file.
      InvalidArgumentError: `directory` is no name of a directory.
    """
    directory = directory_name('directory', directory)
    if fcntl is None or '://' in directory:
        try:
            tf.io.gfile.makedirs(directory)
        except tf.errors.OpError as error:
            raise _unwritable(directory, error.message)
        _warn_unlocked(directory, 'there are no file locks for it')
        yield False
        return
    try:
        os.makedirs(directory, exist_ok=True)
        # Unbuffered, so that a full disk is an error of the write. Programs that this process
        # starts do not inherit the file (PEP 446).
        lock_file = open(os.path.join(directory, LOCK_FILE), 'a+b', buffering=0, opener=regular)
    except OSError as error:
        raise _unwritable(directory, error.strerror)
    with lock_file:
        no_locks = None
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock_file.truncate(0)
            lock_file.write(_description().encode())
        except BlockingIOError:
            raise RunLockedError(
                '%s is in use by %s. Two runs in one directory would overwrite and delete each '
                "other's checkpoints; nothing was written. Wait for that run, end it, or give this "
                'one another directory.' % (directory, _holder(lock_file)))
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise _unwritable(directory, error.strerror)
            no_locks = error.strerror
        if no_locks:
            _warn_unlocked(directory, 'its file system has no file locks (%s)' % no_locks)
        yield not no_locks


def _description():
    """What the holder writes into the file about itself, a line of JSON."""
    return json.dumps({'pid': os.getpid(), 'host': socket.gethostname(),
                       'started': time.strftime('%Y-%m-%d %H:%M:%S')}) + '\n'


def _holder(lock_file):
    """Who holds the lock, in words, from what the holder has written into the file."""
    lock_file.seek(0)
    try:
        found = parsed(lock_file.read(_MOST_BYTES), {'pid': int, 'host': str, 'started': str})
    except ValueError:
        return 'another process, which has not said yet which one it is'
    pid, host, started = found['pid'], found['host'], found['started']
    text = 'process %s on %s, since %s' % (pid, host, started)
    if pid == os.getpid() and host == socket.gethostname():
        return text + ' (this very process)'
    if host == socket.gethostname() and not _is_alive(pid):
        return text + ' (which has ended, but a process that it started still lives)'
    return text


def _is_alive(pid):
    """Whether there is a process of this number on this machine."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass  # another user's; or no number of a process
    return True


def _unwritable(directory, reason):
    """The `CheckpointError` of a directory that cannot be written to."""
    return CheckpointError(
        '%s cannot be written to: %s. Nothing was written. %s Give a directory that can be made '
        'and written to.' % (directory, reason, describe_safe(directory)))


def _warn_unlocked(directory, reason):
    """Warns that a directory is not locked."""
    warnings.warn('%s is not locked, as %s: see to it yourself that no other run uses it.'
                  % (directory, reason), RuntimeWarning,
                  stacklevel=4)  # the line of the `with` statement, past contextlib
