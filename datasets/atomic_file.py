"""Writes files whole or not at all."""

import contextlib
import os
import stat

from towers.errors import LogFileError, TowersError


@contextlib.contextmanager
def written_whole(path, advice='', **options):
    """A file that replaces `path` when the `with` block ends without an error.

        with written_whole('predictions.csv', newline='') as table:
            csv.writer(table).writerows(rows)

    It is written beside `path` under another name, synced and renamed: a full disk or a kill leaves
    neither half a file nor destroys the former one. A path that is no plain file, such as a pipe or
    `/dev/stdout`, is written to directly.

    Args:
      path: of the file; a symbolic link is followed.
      advice: what to do, as the end of the error's text.
      options: of `open`, for text.

    Yields:
      The open file.

    Raises:
      LogFileError: the file cannot be made, written or renamed.
      BrokenPipeError: the reader of a pipe is gone.
    """
    try:
        target = os.path.realpath(path)
        if _is_special(path, target):
            with open(path, 'a', **options) as opened:
                yield opened
            return
        unfinished = target + '.new'
        try:
            with open(unfinished, 'w', **options) as opened:
                yield opened
                opened.flush()
                os.fsync(opened.fileno())
            os.replace(unfinished, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.remove(unfinished)
            raise
    except (TowersError, BrokenPipeError):
        raise
    except OSError as error:
        raise LogFileError('%s cannot be written: %s.%s' % (
            path, error.strerror or error, ' ' + advice if advice else '')) from error


def _is_special(path, target):
    """Whether a path is a device, a pipe, or a file that a process has open (`/proc/…/fd/…`)."""
    return (os.path.abspath(path).startswith(('/dev/', '/proc/'))
            or os.path.exists(target) and not stat.S_ISREG(os.stat(target).st_mode))


def moved_aside(path):
    """Renames a file to the first of `path.1`, `path.2`, … that is free, and returns that name.

    Raises:
      LogFileError: it cannot be renamed.
    """
    number = 1
    while os.path.lexists('%s.%d' % (path, number)):
        number += 1
    aside = '%s.%d' % (path, number)
    try:
        os.rename(path, aside)
    except OSError as error:
        raise LogFileError('%s cannot be renamed to %s: %s.' % (
            path, aside, error.strerror)) from error
    return aside
