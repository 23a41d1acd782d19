"""Checkpoints as files: what is in a checkpoint, in a directory of checkpoints, in its state file.

Its test is `tests/checkpoint/test_checkpoint_files.py`.
"""

import contextlib
import os
import re
import typing

import numpy as np
import tensorflow.compat.v1 as tf
from google.protobuf import text_format

from towers.errors import BadFileError, CheckpointError, reason_of, shown
from towers.safe_files import check_regular, read_data

STATE_FILE = 'checkpoint'

# The errors that TF's checkpoint reader raises for damaged files: TF 1.15 mostly DataLossError and
# OutOfRangeError; TF 2 a plain OpError, or an error of Python into which it translates its own.
READ_ERRORS = (tf.errors.OpError, RuntimeError, IndexError, ValueError)

MOST_STEPS = 2 ** 53
"""The largest value that a counter in a checkpoint may have; above it, sums and products
overflow."""

_MOST_BYTES = 2 ** 26  # of the state file, which names every checkpoint that is kept
_STEP = re.compile(r'-(\d+)$')
_V1_FILE = re.compile(r'.\.ckpt(-\d+)?$')


class State(typing.NamedTuple):
    """The content of the state file of a directory.

    Attributes:
      content: the `CheckpointState` in it; None where the file is missing or damaged.
      fault: what is wrong with the file, in words; None where it is fine or missing.
    """
    content: typing.Any
    fault: typing.Optional[str]


# ---- the content of a checkpoint -----------------------------------------------------------------

def damage(prefix: str) -> typing.Optional[str]:
    """Reads every tensor of a checkpoint, V1 or V2, to see whether it is whole.

    Returns:
      None if it is whole; else what is wrong: `'is damaged: …'`, with the name of the file.

    Raises:
      BadFileError: a file of it is no regular file; or its `global_step` is no step, so that no run
        has written it.
    """
    try:
        reader = reader_of(prefix)
        names = sorted(reader.get_variable_to_shape_map())
    except READ_ERRORS as error:
        path = prefix + '.index'
        if not tf.io.gfile.exists(path):  # a V1 checkpoint is one file
            path = prefix
        return 'is damaged: %s: %s' % (os.path.basename(path), first_line(error))
    for name in names:
        fault = _read_error(reader, prefix, name)
        if fault is not None:
            return 'is damaged: %s: tensor %s: %s' % (_data_files(prefix), name, first_line(fault))
    return None


def _read_error(reader: typing.Any, prefix: str, name: str) -> typing.Optional[Exception]:
    """Reads a tensor of a checkpoint.

    Args:
      reader: TensorFlow's reader of the checkpoint.
      prefix: the checkpoint's prefix.
      name: the name of the tensor.

    Returns:
      The error that the reader raised, one of `READ_ERRORS`; None if the tensor could be read.

    Raises:
      BadFileError: the tensor is the `global_step`, and its value is no step.
    """
    try:
        reader.get_tensor(name)
        if name == 'global_step':
            counter_in(prefix, name)
    except tf.errors.UnimplementedError:
        return None  # no damage: the reader of V1 files knows few dtypes, and not float16
    except READ_ERRORS as error:
        return error
    return None


def _data_files(prefix: str) -> str:
    """The names of a checkpoint's data files, as text."""
    names = [os.path.basename(path) for path in files_of(prefix) if '.data-' in path]
    return ', '.join(names) or 'no data file'


def reader_of(prefix: str) -> typing.Any:
    """Opens a checkpoint, and returns TensorFlow's `CheckpointReader` of it.

    Raises:
      READ_ERRORS: the checkpoint cannot be read.
      BadFileError: one of its files is a pipe or the like, for which TensorFlow would wait.
    """
    for path in files_of(prefix):
        is_local = os.path.exists(path)  # not at an address such as gs://…
        if is_local:
            check_regular(path, os.stat(path).st_mode)
    return tf.train.NewCheckpointReader(prefix)


def counter_in(prefix: str, name: str) -> int:
    """Reads a counter in a checkpoint, such as `global_step`.

    Args:
      prefix: the checkpoint's prefix.
      name: the name of the counter.

    Raises:
      BadFileError: its value is no whole number from 0 to `MOST_STEPS`.
      READ_ERRORS: the counter cannot be read, or is not there.
    """
    value = np.asarray(reader_of(prefix).get_tensor(name))
    is_number = value.shape == () and value.dtype.kind in 'iuf'  # int, unsigned int, float
    is_in_range = is_number and 0 <= value <= MOST_STEPS
    if not is_in_range or value != int(value):
        raise BadFileError('%s: its %s is %.60r, of type %s: expected a whole number from 0 to '
                           '2^53. Give the checkpoint of a run.' % (
                               prefix, name, value.tolist(), value.dtype.name))
    return int(value)


def first_line(error: Exception) -> str:
    """The text of a TF error in one line, without the op and the stack of its creation."""
    return reason_of(error).rstrip('.')


def step_of(prefix: str) -> typing.Optional[int]:
    """The step in a checkpoint's name, `…-500`, else its tensor `global_step`, else None."""
    match = _STEP.search(prefix)
    if match:
        return int(match.group(1))
    try:
        return counter_in(prefix, 'global_step')
    except READ_ERRORS + (BadFileError,):
        return None  # there is no `global_step`; or it is damaged, which `damage` reports


def same_series(prefix: str, other: str) -> bool:
    """Whether the names of two checkpoints differ in the step only."""
    return _name_without_step(prefix) == _name_without_step(other)


def _name_without_step(prefix: str) -> str:
    """The name of a checkpoint without its step: `'model.ckpt'` for `'/run/model.ckpt-500'`."""
    return _STEP.sub('', os.path.basename(prefix))


# ---- the files of a directory --------------------------------------------------------------------

def list_checkpoints(directory: str) -> typing.List[str]:
    """List of the prefixes of the checkpoints in a directory, V1 or V2, by step, then by age.

    Raises:
      CheckpointError: `directory` is something other than a directory, cannot be read, or has a
        name that TF takes for a pattern: its `Saver` writes there, but finds nothing again.
    """
    _check_no_pattern(directory)
    step_and_time = {}  # {prefix: (step, time of the file)}, to sort by
    for name in names_in(directory):
        path = os.path.join(directory, name)
        prefix = _prefix_by_file(path)
        if prefix is None:
            continue
        step = step_of(prefix)
        if step is None:
            step = -1  # unknown: before all others
        with contextlib.suppress(tf.errors.NotFoundError):  # gone by now, or a link to nothing
            step_and_time[prefix] = (step, tf.io.gfile.stat(path).mtime_nsec)
    return sorted(step_and_time, key=lambda prefix: step_and_time[prefix])


def _prefix_by_file(path: str) -> typing.Optional[str]:
    """The prefix of a checkpoint, if the file is the index of that, or is a V1 checkpoint; None for
    any other file."""
    name = os.path.basename(path)
    has_control_characters = shown(name) != name  # no writer of checkpoints makes such a name
    if has_control_characters:
        return None
    if name.endswith('.index'):
        return path[:-len('.index')]
    if _V1_FILE.search(name) and not tf.io.gfile.isdir(path):
        return path
    return None


def _check_no_pattern(directory: str) -> None:
    """Raises `CheckpointError` for a directory whose name TensorFlow takes for a pattern that does
    not match the directory."""
    may_be_pattern = re.search(r'[\[\\]', directory)
    if not may_be_pattern or not tf.io.gfile.exists(directory):
        return
    matches = tf.io.gfile.glob(directory.rstrip('/'))
    if not matches:
        raise CheckpointError(
            '%s is a pattern to TensorFlow, for its [ ] or \\: it would write checkpoints '
            'there and not find them again. Give a directory without these in its path.'
            % directory)


def names_in(directory: str) -> typing.List[str]:
    """Sorted list of the names in a directory; [] if it is missing.

    Raises `CheckpointError` for a file, and for a directory that cannot be read.
    """
    if not tf.io.gfile.exists(directory):
        return []
    if not tf.io.gfile.isdir(directory):
        raise CheckpointError('%s is a file: expected a directory of checkpoints.' % directory)
    try:
        return sorted(name.rstrip('/') for name in tf.io.gfile.listdir(directory))
    except tf.errors.OpError as error:
        raise CheckpointError('%s cannot be read: %s. Give a directory that can be.' % (
            directory, first_line(error)))


def files_of(prefix: str) -> typing.List[str]:
    """List of the paths of a checkpoint's files, in the order in which TF deletes them: data last.

    A process that deletes or renames the files in this order, and is killed, leaves data without an
    index. Nothing takes that for a checkpoint.
    """
    single_files = [prefix + '.meta', prefix + '.index', prefix]
    data_files = sorted(tf.io.gfile.glob(prefix + '.data-?????-of-?????'))
    return [path for path in single_files if tf.io.gfile.exists(path)] + data_files


# ---- the state file ------------------------------------------------------------------------------

def read_state(directory: str) -> State:
    """Reads the state file of a directory.

    It does not use `tf.train.get_checkpoint_state`, which waits for a pipe and logs the file's
    content.
    """
    path = os.path.join(directory, STATE_FILE)
    if not tf.io.gfile.exists(path):
        return State(content=None, fault=None)
    # An empty `CheckpointState`: TensorFlow exports the function, and not the type.
    content = tf.train.generate_checkpoint_state_proto('/', '/')
    content.Clear()
    try:
        data = _data_in(path)
        if data is None:  # gone by now
            return State(content=None, fault=None)
        text_format.Parse(data.decode('utf-8'), content)
    except (tf.errors.OpError, OSError, ValueError, text_format.ParseError):
        content.Clear()  # removes what was parsed before the error
    if not content.model_checkpoint_path:
        return State(content=None,
                     fault='is damaged, and only it says which checkpoint is the newest')
    return State(content, fault=None)


def _data_in(path: str) -> typing.Optional[bytes]:
    """The bytes in a state file, on this machine or at an address such as `gs://…`; None if a local
    file is missing."""
    if '://' not in path:
        return read_data(path, _MOST_BYTES)
    with tf.io.gfile.GFile(path, 'rb') as opened:
        return opened.read(_MOST_BYTES)


def state_checkpoints(directory: str, checkpoints: typing.List[str]) -> typing.List[str]:
    """Lists the checkpoints that the state file of a directory names, the oldest first.

    Args:
      directory: the directory.
      checkpoints: the prefixes of the checkpoints in it. The state file may name others, which the
        list leaves out.
    """
    content = read_state(directory).content
    if content is None:
        return []
    named = [inside(directory, path) for path in content.all_model_checkpoint_paths]
    return [prefix for prefix in named if prefix in checkpoints]


def inside(directory: str, path: str) -> str:
    """The path in `directory` of a checkpoint that its state file names by another path, since the
    directory may have been moved."""
    return os.path.join(directory, os.path.basename(path))
