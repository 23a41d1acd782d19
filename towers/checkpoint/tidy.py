"""Puts a directory of checkpoints in order, under `hold_directory`, as no other process writes."""

import os
import re
import typing

import tensorflow.compat.v1 as tf

from towers.arguments import check_instance, directory_name
from towers.checkpoint.files import (STATE_FILE, Newest, describe_safe, files_of, first_line,
                                     inside, list_checkpoints, names_in, read_state, same_series)
from towers.errors import CheckpointError
from towers.safe_files import UNFINISHED

# Names under which TF writes before it renames: of tensors, and of `checkpoint` and `….meta`.
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
    directory = directory_name('directory', directory)
    if newest is not None:
        check_instance('newest', newest, Newest, 'what newest_checkpoint returned')
    try:
        done = ['removed %s, left by a killed writer' % os.path.join(directory, name)
                for name in remove_leftovers(directory)]
        if newest is None:
            return done
        for damaged in newest.skipped:
            for path in files_of(damaged.prefix):
                tf.io.gfile.rename(path, path + '.damaged', overwrite=True)
                done.append('renamed %s to %s.damaged' % (path, os.path.basename(path)))
        state, _ = read_state(directory)
        if state is None or inside(directory, state.model_checkpoint_path) != newest.prefix:
            _write_state(directory, newest.prefix)
            done.append('wrote %s, which names %s' % (os.path.join(directory, STATE_FILE),
                                                      os.path.basename(newest.prefix)))
        return done
    except tf.errors.OpError as error:
        raise CheckpointError('%s cannot be written to: %s. %s' % (
            directory, first_line(error), describe_safe(directory)))


def remove_leftovers(directory):
    """Removes the leftovers of a killed writer from a directory; returns a list of their names.

    Raises:
      tf.errors.OpError: one of them cannot be removed.
    """
    names = names_in(directory)
    state, _ = read_state(directory)
    known = state and set(map(os.path.basename, state.all_model_checkpoint_paths))
    removed = []
    for name in names:
        path = os.path.join(directory, name)
        data = _DATA_FILE.match(name)
        # TF writes the data before the index and deletes it after. If the state file has the
        # checkpoint, or may have had, its index was lost in another way.
        is_half = (data is not None and known is not None and data.group(1) not in known
                   and data.group(1) + '.index' not in names)
        if (is_half or _TEMPORARY_FILE.search(name) or UNFINISHED.search(name)) and (
                not tf.io.gfile.isdir(path)):
            tf.io.gfile.remove(path)
            removed.append(name)
    return removed


def _write_state(directory, newest):
    """Writes the state file as `Saver` does: another name, then renamed; paths are relative."""
    there = list_checkpoints(directory)
    paths = [prefix for prefix in there[:there.index(newest) + 1] if same_series(prefix, newest)]
    if os.path.isabs(directory):
        # Paths in a directory that is relative itself TF makes relative to it.
        paths = [os.path.basename(path) for path in paths]
    tf.train.update_checkpoint_state(directory, paths[-1], paths)
