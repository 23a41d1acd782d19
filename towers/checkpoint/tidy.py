"""Puts a directory of checkpoints in order before a run writes into it.

The caller has to hold the directory (`hold_directory`), so that no other process writes there.

Its test is `tests/checkpoint/test_checkpoint_tidy.py`.
"""

import os
import re
import typing

import tensorflow.compat.v1 as tf

from towers.arguments import check_instance, checked_path
from towers.checkpoint.files import (
    STATE_FILE,
    files_of,
    first_line,
    inside,
    list_checkpoints,
    names_in,
    read_state,
)
from towers.checkpoint.newest import Newest, describe_safe, with_older
from towers.errors import CheckpointError
from towers.safe_files import UNFINISHED

# Names under which TF writes a file before it renames it: tensors, `checkpoint`, and `….meta`.
_TEMPORARY_FILE = re.compile(r'\.tempstate\d+$|^checkpoint\.tmp[0-9a-f]{32}$'
                             r'|\.meta\.tmp[0-9a-f]{32}$')
_DATA_FILE = re.compile(r'^(.+\.ckpt(?:-\d+)?)\.data-\d{5}-of-\d{5}$')


def tidy_directory(directory: str, newest: typing.Optional[Newest]) -> typing.List[str]:
    """Brings a directory into order before a run writes into it.

    Removes the leftovers of a killed writer: files under the temporary names that TF uses, and data
    files without an index that the state file does not know. Renames the checkpoints that
    `recover=True` passed over to `….damaged`, so that they are not taken for checkpoints again, and
    writes a state file that names `newest`. A whole checkpoint that the state file does not know
    stays: a user may keep it on purpose.

    Args:
      directory: the folder of the checkpoints.
      newest: the result of `newest_checkpoint`: a `Newest`, or None for no checkpoint.

    Returns:
      List of lines that say what was done; empty if there was nothing to do.

    Raises:
      CheckpointError: the directory cannot be written to.
    """
    directory = checked_path('directory', directory)
    if newest is not None:
        check_instance('newest', newest, Newest, 'what newest_checkpoint returned')
    try:
        return _tidied(directory, newest)
    except tf.errors.OpError as error:
        raise CheckpointError('%s cannot be written to: %s. %s' % (
            directory, first_line(error), describe_safe(directory)))


def _tidied(directory: str, newest: typing.Optional[Newest]) -> typing.List[str]:
    """Tidies a directory, and returns lines that say what was done.

    Args:
      directory: the directory.
      newest: the checkpoint to go on from; None for no checkpoint.
    """
    done = []
    for name in remove_leftovers(directory):
        done.append('removed %s, left by a killed writer' % os.path.join(directory, name))
    if newest is None:
        return done
    for damaged in newest.skipped:
        for path in files_of(damaged.prefix):
            tf.io.gfile.rename(path, path + '.damaged', overwrite=True)
            done.append('renamed %s to %s.damaged' % (path, os.path.basename(path)))
    if _named_in_state(directory) != newest.prefix:
        _write_state(directory, newest.prefix)
        done.append('wrote %s, which names %s' % (
            os.path.join(directory, STATE_FILE), os.path.basename(newest.prefix)))
    return done


def _named_in_state(directory: str) -> typing.Optional[str]:
    """The prefix of the checkpoint that the state file of a directory names as the newest; None if
    there is no state file, or a damaged one."""
    content = read_state(directory).content
    if content is None:
        return None
    return inside(directory, content.model_checkpoint_path)


def remove_leftovers(directory: str) -> typing.List[str]:
    """Removes the leftovers of a killed writer from a directory, and returns their names.

    Raises:
      tf.errors.OpError: a leftover cannot be removed.
    """
    names = names_in(directory)
    content = read_state(directory).content
    known = None  # the names of the checkpoints in the state file
    if content is not None:
        known = {os.path.basename(path) for path in content.all_model_checkpoint_paths}
    removed = []
    for name in names:
        path = os.path.join(directory, name)
        # A directory of such a name is the user's own.
        if _is_leftover(name, names, known) and not tf.io.gfile.isdir(path):
            tf.io.gfile.remove(path)
            removed.append(name)
    return removed


def _is_leftover(name: str, names: typing.Container[str],
                 known: typing.Optional[typing.Container[str]]) -> bool:
    """Whether a file is, by its name, a leftover of a killed writer: TensorFlow, or
    `towers.safe_files`.

    Args:
      name: the name of the file.
      names: the names of all files of the directory.
      known: the names of the checkpoints in the state file; None where there is no state file.
    """
    if _TEMPORARY_FILE.search(name) or UNFINISHED.search(name):
        return True
    return _is_leftover_data(name, names, known)


def _is_leftover_data(name: str, names: typing.Container[str],
                      known: typing.Optional[typing.Container[str]]) -> bool:
    """Whether a file is the data of a checkpoint that a killed process was writing or deleting.

    Such a checkpoint has data and no index: TensorFlow writes the data before the index, and
    deletes the index before the data. Nor does the state file name it: TensorFlow names a new
    checkpoint there when its index is written, and strikes an old one out before it deletes it.

    If the state file names the checkpoint, its data stays: the index was lost in another way. If
    there is no state file, all data stays, since the file may have named any checkpoint.

    Args:
      name: the name of the file.
      names: the names of all files of the directory.
      known: the names of the checkpoints in the state file; None where there is no state file.
    """
    data = _DATA_FILE.match(name)
    if data is None or known is None:
        return False
    checkpoint = data.group(1)
    return checkpoint not in known and checkpoint + '.index' not in names


def _write_state(directory: str, newest: str) -> None:
    """Writes the state file of a directory, as `Saver` does: under another name, then renamed.

    It names the checkpoints without their folder, so that the directory can be moved.

    Args:
      directory: the directory.
      newest: the prefix of the checkpoint that the state file is to name as the newest.
    """
    paths = with_older(newest, list_checkpoints(directory))
    if os.path.isabs(directory):  # for a relative directory TF itself removes the folder
        paths = [os.path.basename(path) for path in paths]
    tf.train.update_checkpoint_state(directory, paths[-1], paths)
