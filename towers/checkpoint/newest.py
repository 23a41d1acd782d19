"""The newest checkpoint of a directory: which it is, and whether it is whole.

`tf.train.Saver` writes a checkpoint in this order: the data, the index, and the state file
`checkpoint`, which names the newest checkpoint. It writes each file under another name, and renames
it when it is whole. Only then does it delete the oldest checkpoint. So at whatever moment a process
is killed, each checkpoint that the state file names is whole; a checkpoint that it does not name
may be incomplete. TF notices damage when it reads, by CRCs.

Its test is `tests/checkpoint/test_checkpoint_files.py`.
"""

import os
import typing

import tensorflow.compat.v1 as tf

from towers.arguments import check_flag, checked_path
from towers.checkpoint.files import (
    STATE_FILE,
    damage,
    inside,
    list_checkpoints,
    read_state,
    same_series,
    step_of,
)
from towers.errors import CheckpointError, shown


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


class NewestNamed(typing.NamedTuple):
    """The newest checkpoint of a directory, according to its state file.

    Both attributes are None for a directory without a checkpoint; else exactly one is None.

    Attributes:
      prefix: the checkpoint's prefix; None where it is not known, or there is no checkpoint.
      fault: what is wrong with the state file, in words; None where it is fine.
    """
    prefix: typing.Optional[str]
    fault: typing.Optional[str]


def newest_checkpoint(directory: str, recover: bool = False) -> typing.Optional[Newest]:
    """Finds the checkpoint to go on from, and reads every tensor of it to see that it is whole.

    The newest checkpoint is the one that the state file `checkpoint` names. Where there is no state
    file, it is the only finished checkpoint: a process that is killed in its first save leaves such
    a directory. Nothing is changed in the directory.

    Args:
      directory: the folder of the checkpoints. It may have been moved or copied: of the paths in
        the state file only the last part counts.
      recover: whether to return the last whole checkpoint (by the step in its name) if the newest
        checkpoint is damaged, or not known. `Newest.skipped` has the damaged checkpoints after it.

    Returns:
      `Newest`, or None for a directory that is missing or has no checkpoint.

    Raises:
      CheckpointError: without `recover`, if the newest checkpoint is damaged or the state file is
        lost, damaged, or names files that are gone; with `recover`, if no checkpoint is whole. Or
        `directory` is no directory.
      BadFileError: a file is no regular file, or the `global_step` in it is no step.
    """
    directory = checked_path('directory', directory)
    check_flag('recover', recover)
    checkpoints = list_checkpoints(directory)
    named = newest_named(directory, checkpoints)
    skipped: typing.List[Damaged] = []
    if named.fault is not None:
        state_file = os.path.join(directory, STATE_FILE)
        skipped.append(Damaged(state_file, step=None, reason=named.fault))
        candidates = checkpoints  # any checkpoint may be the newest
    elif named.prefix is not None:
        # Without checkpoints of later steps, which a killed process may have left unfinished.
        candidates = with_older(named.prefix, checkpoints)
    else:
        return None  # there is no checkpoint
    # Also looked for without `recover`: then the error names the checkpoint to go on from.
    whole = _last_whole(candidates, skipped)
    faults = '; '.join(map(str, skipped))
    if whole is None:
        raise CheckpointError('%s. No other checkpoint there can be used: bring the files back '
                              'from a copy, or start anew in another directory.' % faults)
    if skipped and not recover:
        raise CheckpointError(
            '%s. The one to go on from is %s (step %s), which is whole: --recover (recover=True) '
            'does so. Or bring the files back from a copy.' % (faults, whole.prefix, whole.step))
    return whole


def _last_whole(candidates: typing.Sequence[str],
                skipped: typing.List[Damaged]) -> typing.Optional[Newest]:
    """Finds the last of these checkpoints that is whole; None if none is.

    Args:
      candidates: the prefixes of the checkpoints, by step.
      skipped: list to which the damaged checkpoints that come after the whole one are added.
    """
    for prefix in reversed(candidates):
        reason = damage(prefix)
        if reason is None:
            return Newest(prefix, step_of(prefix), skipped)
        skipped.append(Damaged(prefix, step_of(prefix), reason))
    return None


def with_older(prefix: str, checkpoints: typing.List[str]) -> typing.List[str]:
    """List of a checkpoint and the older checkpoints of its run: names differ in the step only.

    Args:
      prefix: the prefix of the checkpoint, which is the last one of the list.
      checkpoints: the prefixes of all checkpoints, by step.
    """
    older = checkpoints[:checkpoints.index(prefix)]
    return [other for other in older if same_series(other, prefix)] + [prefix]


def newest_named(directory: str, checkpoints: typing.List[str]) -> NewestNamed:
    """Finds the newest checkpoint of a directory by its state file, without reading the checkpoint.

    Args:
      directory: the directory.
      checkpoints: the prefixes of the checkpoints in it.
    """
    state = read_state(directory)
    if state.fault is not None:
        return NewestNamed(prefix=None, fault=state.fault)
    if state.content is not None:
        prefix = inside(directory, state.content.model_checkpoint_path)
        if prefix in checkpoints:
            return NewestNamed(prefix, fault=None)
        return NewestNamed(
            prefix=None, fault='names %s as the newest checkpoint, which is not there' % (
                os.path.basename(prefix)))
    # There is no state file.
    if not checkpoints:
        return NewestNamed(prefix=None, fault=None)
    if len(checkpoints) > 1:
        return NewestNamed(
            prefix=None, fault='is missing, and only it says which of the %d checkpoints is the '
                               'newest' % len(checkpoints))
    return NewestNamed(checkpoints[0], fault=None)


def newest_prefix(directory: str) -> typing.Optional[str]:
    """The prefix of the newest checkpoint of a directory, according to the state file; None if it
    is not known. The checkpoint itself is not read."""
    return newest_named(directory, list_checkpoints(directory)).prefix


class Safe(typing.NamedTuple):
    """What is safe in a directory that could not be written to.

    Attributes:
      is_found: whether the directory has a whole checkpoint.
      text: a sentence that says which checkpoint is whole, for errors about writing.
    """
    is_found: bool
    text: str


def describe_safe(directory: str) -> str:
    """The sentence for errors about writing that says which checkpoint of a directory is whole."""
    return safe_checkpoint(directory).text


def safe_checkpoint(directory: str) -> Safe:
    """Finds the last whole checkpoint of a directory, for an error about writing; damaged
    checkpoints are passed over."""
    newest = None
    try:
        if tf.io.gfile.isdir(directory):
            newest = newest_checkpoint(directory, recover=True)
    except CheckpointError as error:
        return Safe(is_found=False, text='No checkpoint there is safe: %s' % error)
    if newest is None:
        return Safe(is_found=False, text='There is no checkpoint there.')
    return Safe(is_found=True,
                text='Safe and whole is %s (step %s).' % (newest.prefix, newest.step))
