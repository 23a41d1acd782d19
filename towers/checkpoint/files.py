"""Checkpoints as files: which is the newest, and whether it is whole.

`tf.train.Saver` writes a checkpoint in this order: the data, the index, and the state file
`checkpoint`, which names the newest one, each under another name first; only then does it delete
the oldest one. So at whatever moment a process is killed, a checkpoint that the state file names is
whole; another one may be incomplete. TF notices damage when it reads: by CRCs.
"""

import contextlib
import os
import re
import typing

import numpy as np
import tensorflow.compat.v1 as tf
from google.protobuf import text_format

from towers.arguments import check_flag, directory_name
from towers.errors import BadFileError, CheckpointError, reason_of, shown
from towers.safe_files import check_regular, read_data

STATE_FILE = 'checkpoint'

# The errors of TF's checkpoint reader for damaged files: TF 1.15 mostly DataLossError and
# OutOfRangeError, TF 2 a plain OpError or, as it translates its own errors, one of Python's.
READ_ERRORS = (tf.errors.OpError, RuntimeError, IndexError, ValueError)

MOST_STEPS = 2 ** 53
"""The largest value that a counter in a checkpoint may have; above it, sums and products
overflow."""

_MOST_BYTES = 2 ** 26  # of the state file, which names every checkpoint that is kept
_STEP = re.compile(r'-(\d+)$')
_V1_FILE = re.compile(r'.\.ckpt(-\d+)?$')


class Damaged(typing.NamedTuple):
    """A checkpoint, or the state file, that cannot be used; `str` says why.

    Attributes:
      prefix: the checkpoint's prefix, or the path of the state file.
      step: the checkpoint's step; None where it is not known, and for the state file.
      reason: what is wrong with it, such as `'is missing'`: a sentence that begins with the prefix.
    """
    prefix: str
    step: typing.Optional[int]
    reason: str

    def __str__(self):
        return shown('%s %s' % (self.prefix, self.reason))


class Newest(typing.NamedTuple):
    """The checkpoint to go on from.

    Attributes:
      prefix: the argument for `Saver.restore`.
      step: the step in its name, else the value of its `global_step`, else None.
      skipped: list of `Damaged`, newest first: the checkpoints that `recover=True` passed over.
    """
    prefix: str
    step: typing.Optional[int]
    skipped: typing.List[Damaged]


class State(typing.NamedTuple):
    """The content of the state file of a directory.

    Attributes:
      content: the `CheckpointState` in it; None where the file is missing or damaged.
      fault: what is wrong with the file, in words; None where it is fine or missing.
    """
    content: typing.Any
    fault: typing.Optional[str]


class NewestNamed(typing.NamedTuple):
    """The newest checkpoint of a directory, according to its state file.

    Attributes:
      prefix: the checkpoint's prefix; None where it is not known, or there is none.
      fault: what is wrong with the state file, in words; None where it is fine.
    """
    prefix: typing.Optional[str]
    fault: typing.Optional[str]


# ---- the newest checkpoint -----------------------------------------------------------------------

def newest_checkpoint(directory: str, recover: bool = False) -> typing.Optional[Newest]:
    """Finds the checkpoint to go on from, and reads every tensor of it to see that it is whole.

    The newest checkpoint is the one that the state file `checkpoint` names. Where there is no state
    file, it is the only finished checkpoint: a process that is killed in its first save leaves such
    a directory. Nothing is changed in the directory.

    Args:
      directory: the folder of the checkpoints. It may have been moved or copied: of the paths in
        the state file only the last part counts.
      recover: if the newest checkpoint is damaged, or it is not known which it is, take the last
        whole one (by the step in its name). The ones passed over are in `skipped`.

    Returns:
      `Newest`, or None for a directory that is missing or has no checkpoint.

    Raises:
      CheckpointError: without `recover`, if the newest checkpoint is damaged or the state file is
        lost, damaged, or names files that are gone; with `recover`, if no checkpoint is whole. Or
        `directory` is no directory. A `BadFileError` where a file is no regular file, or the
        `global_step` in it no step.
    """
    directory = directory_name('directory', directory)
    check_flag('recover', recover)
    checkpoints = list_checkpoints(directory)
    named = newest_named(directory, checkpoints)
    if named.prefix is None and named.fault is None:
        return None
    skipped = []
    if named.prefix is not None:
        candidates = with_older(named.prefix, checkpoints)
    else:
        candidates = checkpoints
        skipped.append(Damaged(os.path.join(directory, STATE_FILE), None, str(named.fault)))
    whole = None
    for prefix in reversed(candidates):
        reason = damage(prefix)
        if reason is None:
            whole = Newest(prefix, step_of(prefix), skipped)
            break
        skipped.append(Damaged(prefix, step_of(prefix), reason))
    if whole is not None and (recover or not skipped):
        return whole
    faults = '; '.join(str(each) for each in skipped)
    if whole is None:
        raise CheckpointError('%s. No other checkpoint there can be used: bring the files back '
                              'from a copy, or start anew in another directory.' % faults)
    raise CheckpointError(
        '%s. The one to go on from is %s (step %s), which is whole: --recover (recover=True) does '
        'so. Or bring the files back from a copy.' % (faults, whole.prefix, whole.step))


def with_older(prefix: str, checkpoints: typing.List[str]) -> typing.List[str]:
    """List of the checkpoints up to one of them, which have the same name but for the step.

    Args:
      prefix: the prefix of that checkpoint, which is the last one of the list.
      checkpoints: the prefixes of all checkpoints, by step.
    """
    older = checkpoints[:checkpoints.index(prefix)]
    return [each for each in older if same_series(each, prefix)] + [prefix]


def newest_named(directory: str, checkpoints: typing.List[str]) -> NewestNamed:
    """Finds the newest checkpoint of a directory by its state file, without reading the checkpoint.

    Args:
      directory: the directory.
      checkpoints: the prefixes of the checkpoints in it.
    """
    state = read_state(directory)
    if state.fault is not None:
        return NewestNamed(None, state.fault)
    if state.content is not None:
        prefix = inside(directory, state.content.model_checkpoint_path)
        if prefix in checkpoints:
            return NewestNamed(prefix, None)
        return NewestNamed(None, 'names %s as the newest checkpoint, which is not there' % (
            os.path.basename(prefix)))
    if len(checkpoints) > 1:
        return NewestNamed(None, 'is missing, and only it says which of the %d checkpoints is the '
                                 'newest' % len(checkpoints))
    return NewestNamed(checkpoints[0] if checkpoints else None, None)


def newest_prefix(directory: str) -> typing.Optional[str]:
    """The prefix of the newest checkpoint of a directory, according to the state file; None if it
    is not known. The checkpoint itself is not read."""
    return newest_named(directory, list_checkpoints(directory)).prefix


def describe_safe(directory: str) -> str:
    """The sentence for errors about writing that says which checkpoint of a directory is whole."""
    newest = None
    try:
        if tf.io.gfile.isdir(directory):
            newest = newest_checkpoint(directory, recover=True)
    except CheckpointError as error:
        return 'No checkpoint there is safe: %s' % error
    if newest is None:
        return 'There is no checkpoint there.'
    return 'Safe and whole is %s (step %s).' % (newest.prefix, newest.step)


# ---- the content of a checkpoint -----------------------------------------------------------------

def damage(prefix: str) -> typing.Optional[str]:
    """Reads every tensor of a checkpoint, V1 or V2, to see whether it is whole.

    Returns:
      None if it is; else what is wrong: `'is damaged: …'`, with the name of the file.
    """
    try:
        reader = reader_of(prefix)
        names = sorted(reader.get_variable_to_shape_map())
    except READ_ERRORS as error:
        path = prefix + '.index'
        if not tf.io.gfile.exists(path):
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
      The error with which it cannot be read, one of `READ_ERRORS`; None if it can.
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
      READ_ERRORS: it cannot be read.
      BadFileError: one of its files is a pipe or the like, for which TensorFlow would wait.
    """
    for path in files_of(prefix):
        if os.path.exists(path):  # on a file system of Python's
            check_regular(path, os.stat(path).st_mode)
    return tf.train.NewCheckpointReader(prefix)


def counter_in(prefix: str, name: str) -> int:
    """Reads a counter in a checkpoint, such as `global_step`.

    Args:
      prefix: the checkpoint's prefix.
      name: the name of the counter.

    Raises:
      BadFileError: it is no whole number from 0 to `MOST_STEPS`.
      READ_ERRORS: it cannot be read, or is not there.
    """
    value = np.asarray(reader_of(prefix).get_tensor(name))
    is_number = not value.shape and value.dtype.kind in 'iuf'
    if not is_number or not 0 <= value <= MOST_STEPS or value != int(value):
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
        return None  # not there; or damaged, which is for `damage` to say


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
    keys = {}  # {prefix: (step, time)}, to sort by
    for name in names_in(directory):
        path = os.path.join(directory, name)
        if shown(name) != name:  # no name of a checkpoint
            continue
        if name.endswith('.index'):
            prefix = path[:-len('.index')]
        elif _V1_FILE.search(name) and not tf.io.gfile.isdir(path):
            prefix = path
        else:
            continue
        step = step_of(prefix)
        with contextlib.suppress(tf.errors.NotFoundError):  # gone by now, or a link to nothing
            keys[prefix] = (-1 if step is None else step, tf.io.gfile.stat(path).mtime_nsec)
    return sorted(keys, key=lambda prefix: keys[prefix])


def _check_no_pattern(directory: str) -> None:
    """Raises `CheckpointError` for a directory whose name TensorFlow takes for a pattern that does
    not match the directory."""
    if not re.search(r'[\[\\]', directory) or not tf.io.gfile.exists(directory):
        return
    if not tf.io.gfile.glob(directory.rstrip('/')):
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
    """
    single_files = [prefix + '.meta', prefix + '.index', prefix]
    data_files = sorted(tf.io.gfile.glob(prefix + '.data-?????-of-?????'))
    return [path for path in single_files if tf.io.gfile.exists(path)] + data_files


# ---- the state file ------------------------------------------------------------------------------

def read_state(directory: str) -> State:
    """Reads the state file of a directory.

    Not by `tf.train.get_checkpoint_state`, which waits for a pipe and logs the file's content.
    """
    path = os.path.join(directory, STATE_FILE)
    if not tf.io.gfile.exists(path):
        return State(content=None, fault=None)
    state = tf.train.generate_checkpoint_state_proto('/', '/')
    state.Clear()
    try:
        if '://' in path:
            with tf.io.gfile.GFile(path, 'rb') as opened:
                data = opened.read(_MOST_BYTES)
        else:
            data = read_data(path, _MOST_BYTES)
        text_format.Parse(data.decode('utf-8'), state)
    except (tf.errors.OpError, OSError, ValueError, text_format.ParseError):
        state.Clear()
    if not state.model_checkpoint_path:
        return State(None, 'is damaged, and only it says which checkpoint is the newest')
    return State(state, None)


def state_checkpoints(directory: str, checkpoints: typing.List[str]) -> typing.List[str]:
    """Lists the checkpoints that the state file of a directory names, the oldest first.

    Args:
      directory: the directory.
      checkpoints: the prefixes of the checkpoints in it; others are left out.
    """
    state = read_state(directory).content
    if state is None:
        return []
    known = [inside(directory, path) for path in state.all_model_checkpoint_paths]
    return [prefix for prefix in known if prefix in checkpoints]


def inside(directory: str, path: str) -> str:
    """The path in `directory` of a checkpoint that its state file names by another path, since the
    directory may have been moved."""
    return os.path.join(directory, os.path.basename(path))
