"""Files in folders that others may write to: written whole or not at all, read as data."""

import contextlib
import json
import os
import re
import secrets
import stat
import typing

import tensorflow.compat.v1 as tf

from towers.errors import BadFileError, LogFileError

# The names of unfinished files, which a killed writer leaves. They are random, so that nobody can
# put a link there first.
UNFINISHED = re.compile(r'^\.unfinished-[0-9a-f]{16}$')

SCALAR = (str, int, float, bool, type(None))
"""The form, for `parsed`, of a value that is neither a list nor an object."""

# The first test that is true of an `st_mode` tells the kind.
_KINDS = [(stat.S_ISREG, 'a file'), (stat.S_ISLNK, 'a symbolic link'), (stat.S_ISDIR, 'a folder'),
          (stat.S_ISFIFO, 'a pipe'), (stat.S_ISSOCK, 'a socket'), (lambda mode: True, 'a device')]
# Flags of `os.open`, which Windows has not.
_NO_LINK = getattr(os, 'O_NOFOLLOW', 0)
_NO_WAITING = getattr(os, 'O_NONBLOCK', 0)


@contextlib.contextmanager
def written_whole(path: str, mode: str = 'w', advice: str = '', **options: typing.Any
                  ) -> typing.Iterator[typing.Any]:
    """A context with an open file, which replaces `path` when the block ends without an error.

        with written_whole('predictions.csv', newline='') as table:
            csv.writer(table).writerows(rows)

    It is written beside `path` under another name, synced and renamed: a full disk, an error or a
    kill neither leaves half a file nor destroys the former one.

    Args:
      path: the name of the file.
      mode: 'w', or 'wb' for bytes.
      advice: what to do, as the end of the error's text.
      options: arguments of `open`, for text.

    Yields:
      The open file.

    Raises:
      BadFileError: `path` is something else than a regular file.
      LogFileError: the file cannot be written.
    """
    unfinished = unfinished_beside(path)
    try:
        if os.path.lexists(path):
            check_regular(path, os.lstat(path).st_mode)
        exclusive_mode = mode.replace('w', 'x')  # fails where the name exists already
        with open(unfinished, exclusive_mode, **options) as opened:
            yield opened
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(unfinished, path)
    except OSError as error:
        text = '%s cannot be written: %s. %s' % (path, error.strerror or error, advice)
        raise LogFileError(text.rstrip()) from error
    finally:
        with contextlib.suppress(OSError):  # after the replacement it does not exist any more
            os.remove(unfinished)


@contextlib.contextmanager
def folder_written_whole(path: str) -> typing.Iterator[str]:
    """A context in which to write a folder, which is renamed to `path` when it is whole.

    It works on any file system of TensorFlow, and its errors are TensorFlow's.

    Yields:
      The name of the folder to be made.
    """
    unfinished = unfinished_beside(path)
    try:
        yield unfinished
        tf.io.gfile.rename(unfinished, path)
    except BaseException:
        with contextlib.suppress(tf.errors.OpError):
            tf.io.gfile.rmtree(unfinished)
        raise


def unfinished_beside(path: str) -> str:
    """A new name for an unfinished file in the folder of `path`, see `UNFINISHED`."""
    return os.path.join(os.path.dirname(path), '.unfinished-' + secrets.token_hex(8))


def moved_aside(path: str) -> str:
    """Renames a file to the first of `path.1`, `path.2`, … that is free, and returns that name."""
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


def regular(path: str, flags: int) -> int:
    """An `opener` for `open` that opens regular files only.

    It does not wait, as at a pipe, and it follows a symbolic link only to read.

    Args:
      path: the name of the file.
      flags: the flags of `os.open`.

    Returns:
      The file descriptor.

    Raises:
      BadFileError: `path` is something else than a regular file, or to be written through a link.
      OSError: it cannot be opened.
    """
    only_reads = not flags & (os.O_WRONLY | os.O_RDWR)
    if not only_reads:
        flags |= _NO_LINK
    try:
        opened = os.open(path, flags | _NO_WAITING, 0o666)
    except OSError:
        # What is there may be the reason, as a link or a folder: `check_regular` then says so.
        if os.path.lexists(path):
            status = os.stat(path) if only_reads else os.lstat(path)
            check_regular(path, status.st_mode)
        raise
    try:
        # Some others can be opened, as a pipe or a device. The status is that of the opened file,
        # not of the path, where another process may put something else.
        check_regular(path, os.fstat(opened).st_mode)
    except BadFileError:
        os.close(opened)
        raise
    return opened


def check_regular(path: str, mode: int) -> None:
    """Raises `BadFileError` unless the `st_mode` of a path is that of a regular file."""
    if not stat.S_ISREG(mode):
        kind = next(name for is_kind, name in _KINDS if is_kind(mode))
        raise BadFileError('%s is %s, and a file belongs there: move it away, or give another '
                           'path.' % (path, kind))


def read_data(path: str, most: int = 2 ** 20) -> typing.Optional[bytes]:
    """The bytes of a small regular file, which may be the target of a link; None if it is missing.

    Args:
      path: the name of the file.
      most: the largest number of bytes.

    Raises:
      BadFileError: it has more bytes, or is no regular file.
      OSError: it cannot be read.
    """
    try:
        with open(path, 'rb', opener=regular) as opened:
            size = os.fstat(opened.fileno()).st_size
            if size > most:
                raise BadFileError('%s has %d bytes, and such a file has %d at most: move it away.'
                                   % (path, size, most))
            return opened.read(size)
    except (FileNotFoundError, NotADirectoryError):
        return None


def read_json(path: str, form: typing.Any, advice: str, most: int = 2 ** 20) -> typing.Any:
    """The value in a small JSON file; None if the file is missing.

    Args:
      path: the name of the file.
      form: the form of the value, such as `[int]`, see `parsed`.
      advice: what to do with a bad file, as the end of the error's text.
      most: the largest number of bytes.

    Raises:
      BadFileError: the file has a value of another form, or cannot be read.
    """
    try:
        data = read_data(path, most)
        return None if data is None else parsed(data, form)
    except (OSError, ValueError) as error:
        raise BadFileError('%s cannot be read (%s): %s.' % (
            path, getattr(error, 'strerror', None) or error, advice)) from error


def parsed(data: bytes, form: typing.Any) -> typing.Any:
    """Parses JSON, and checks the keys and types of the value.

    Args:
      data: the JSON, as bytes.
      form: the form of the value: a type; or a tuple of forms, for a value of any of these; or
        `[form]`, for a list whose values have that form; or `{key: form}`, for an object, where the
        key `str` gives the form of all keys that are not named.

    Raises:
      ValueError: it is no JSON, or the value has another form.
    """
    try:
        value = json.loads(data.decode('utf-8'), parse_constant=_no_constant)
    except RecursionError:
        raise ValueError('it is nested too deeply') from None
    if not _has_form(value, form):
        raise ValueError('it has other keys, or values of other types, than such a file has')
    return value


def _no_constant(name: str) -> None:
    """Refuses NaN and the infinities, which Python's JSON allows."""
    raise ValueError('%s is no number of JSON' % name)


def _has_form(value: typing.Any, form: typing.Any) -> bool:
    """Whether a value has a form; `parsed` describes forms."""
    if isinstance(form, dict):
        return type(value) is dict and _has_keys(value, form)
    if isinstance(form, list):
        [form_of_entries] = form
        return type(value) is list and all(_has_form(entry, form_of_entries) for entry in value)
    if isinstance(form, tuple):
        return any(_has_form(value, alternative) for alternative in form)
    return type(value) is form  # not `isinstance`: True is no int in JSON


def _has_keys(value: dict, form: dict) -> bool:
    """Whether an object has all keys of a form, and each of its values has the form of its key."""
    named_keys = set(form) - {str}
    if not named_keys <= set(value):
        return False
    no_form = ()  # a tuple of no alternatives: no value has this form, so no further key is allowed
    form_of_others = form.get(str, no_form)
    return all(_has_form(each, form.get(key, form_of_others)) for key, each in value.items())
