"""`out_of_memory_explained`: what is said, and advised, when a step runs out of memory."""

import contextlib
import re
import typing

import tensorflow.compat.v1 as tf

from towers.api.built import BuiltTowers
from towers.arguments import check_count, check_instance, checked_path
from towers.errors import InvalidArgumentError, OutOfMemoryError
from towers.memory.account import memory_account
from towers.memory.fit import largest_batch
from towers.memory.limits import checked_limit, device_limit, is_out_of_memory
from towers.placement.devices import has_gpus, short_name

# The name of an operation in an error's text: `{{node name}}`, or `[[name …` in older texts.
_NODE = re.compile(r'\{\{node (?P<new>[^}]+)\}\}|\[\[(?:node )?(?P<old>[^\s\]{]+)')


@contextlib.contextmanager
def out_of_memory_explained(built: BuiltTowers, directory: typing.Optional[str] = None,
                            memory_limit: typing.Optional[float] = None,
                            batch_size: typing.Optional[int] = None) -> typing.Iterator[None]:
    """A context in which a step that runs out of memory raises an `OutOfMemoryError` with advice.

    >>> with towers.out_of_memory_explained(built):  # around a MonitoredTrainingSession as well
    ...     session.run(built.train_op)

    Args:
      built: the result of `build_towers`.
      directory: the directory of the run's checkpoints, or None.
      memory_limit: bytes that a step may take, see `largest_batch`; None: all the memory that the
        devices have.
      batch_size: examples of the step; without it a batch of no static size gets no advice.

    Raises:
      OutOfMemoryError: in place of the `tf.errors.ResourceExhaustedError`, which is its cause.
      InvalidArgumentError: an argument of another kind.
    """
    check_instance('built', built, BuiltTowers, 'the result of build_towers')
    if directory is not None:
        checked_path('directory', directory, 'the name of a directory, or None')
    limit = checked_limit(memory_limit)
    if batch_size is not None:
        check_count('batch_size', batch_size)
    try:
        yield
    except tf.errors.ResourceExhaustedError as error:
        if not is_out_of_memory(error):
            raise
        sentences = [_failure(error, built)]
        is_size_known = batch_size is not None or built.plan.batch_size is not None
        if is_size_known:  # else there is no account
            sentences += _advice(built, batch_size, limit)
        sentences += _where_the_run_goes_on(directory)
        raise OutOfMemoryError(' '.join(sentences)) from error


def _failure(error: tf.errors.OpError, built: BuiltTowers) -> str:
    """The sentence that says where memory ran out, with the first line of TensorFlow's error.

    Args:
      error: the error of the step.
      built: the towers.
    """
    first_line = str(error.message).split('\n')[0]
    message = ' '.join(first_line.split())  # without double spaces
    name = _operation_in(error)
    if name is None:
        return 'The step ran out of memory: %s.' % message
    owner = 'The step'  # for an operation of no tower
    for tower in built.towers:
        if tower.has(name):
            owner = 'Tower %d on %s' % (tower.index, short_name(tower.device))
            break
    return '%s ran out of memory in %s: %s.' % (owner, name, message)


def _operation_in(error: tf.errors.OpError) -> typing.Optional[str]:
    """The name of the operation at which an error of TensorFlow was raised; None if no name
    is in the error."""
    op = getattr(error, 'op', None)  # None for an operation made for the run, such as a copy
    if op is not None:
        return op.name
    found = _NODE.search(str(error))
    if found is None:
        return None
    return found.group('new') or found.group('old')


def _where_the_run_goes_on(directory: typing.Optional[str]) -> typing.List[str]:
    """List of the sentence that names the latest checkpoint; [] if there is no checkpoint, or no
    directory was given."""
    checkpoint = tf.train.latest_checkpoint(directory) if directory else None
    if checkpoint is None:
        return []
    return ['Nothing of this step was saved; the run goes on from %s.' % checkpoint]


def _advice(built: BuiltTowers, batch_size: typing.Optional[int],
            limit: typing.Optional[int]) -> typing.List[str]:
    """List of sentences: what a step takes, the largest batch that should fit, and what to do.

    Args:
      built: the towers.
      batch_size: examples of the step; None for the static size of the batch.
      limit: bytes of memory that a step may take; None for all that the devices have.
    """
    if limit is None:
        limit = device_limit(built.devices)
    try:
        account = memory_account(built, batch_size)
    except InvalidArgumentError as error:  # for a sparse batch, say, which has no account
        return [str(error)]
    examples: typing.Any = account.batch_size  # given or static, so never None here
    needed = ('A step of batch %d takes %.1f MB at its worst moment, by the account; there are '
              '%.1f MB. The largest of it: %s.' % (
                  examples, account.peak / 1e6, limit / 1e6, account.largest()))
    try:
        fitted = largest_batch(built, limit)
    except OutOfMemoryError:
        return [needed, 'No batch fits, not one example a tower.']
    return [
        needed,
        'The largest batch that should fit: %d, %d a tower.' % (
            fitted.batch_size, fitted.per_tower),
        _ways_to_save(built, _num_micro_batches(examples, fitted.batch_size))]


def _num_micro_batches(batch_size: int, size_that_fits: int) -> int:
    """The least number of micro-batches with which each micro-batch of the batch fits. It is at
    least 2, since the whole batch did not fit, whatever the account says."""
    rounded_up = -(-batch_size // size_that_fits)
    return max(2, rounded_up)


def _ways_to_save(built: BuiltTowers, num_micro_batches: int) -> str:
    """The sentence that says how a step with the same batch takes less memory."""
    others = ' (CPUs share one memory)'  # so that more CPUs do not help
    if has_gpus(built.devices):
        others = '; more devices, as towers or as stages of one'
    return ('Less memory for the same batch: memory=towers.Memory(accumulate=%d), or '
            "Memory(recompute='auto')%s." % (num_micro_batches, others))
