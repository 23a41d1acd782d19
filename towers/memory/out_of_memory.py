"""The error, and the advice in it, when a step runs out of memory."""

import contextlib
import re
import typing

import tensorflow.compat.v1 as tf

from towers.arguments import check_count, check_instance, directory_name
from towers.api.built import BuiltTowers
from towers.errors import OutOfMemoryError
from towers.memory.account import memory_account
from towers.memory.fit import device_limit, is_out_of_memory, largest_batch
from towers.placement.devices import is_gpu, short_name

_TENSOR = re.compile(r'shape\[([\d,]*)\](?: and type (\w+))?(?: on (\S+))?')
_NODE = re.compile(r'\{\{node ([^}]+)\}\}|\[\[(?:node )?([^\s\]{]+)')


def out_of_memory(error, built, checkpoint=None, memory_limit=None, batch_size=None):
    """The `OutOfMemoryError` with the request that failed in a step, and what to do.

    Args:
      error: the `tf.errors.ResourceExhaustedError` that the step raised.
      built: what `build_towers` returned.
      checkpoint: name of the run's newest checkpoint, or None where it is not known.
      memory_limit: bytes of each memory; None: all that the devices have.
      batch_size: examples of the step, needed where the batch has no static size.

    Returns:
      `OutOfMemoryError`; None for an error about something else, such as a full disk.
    """
    if not is_out_of_memory(error):
        return None
    name = _node_name(error)
    lines = ['%s ran out of memory%s%s.' % (
        _who(name, built), ' in %s' % name if name else '', _wanted(error))]
    limit = memory_limit or device_limit(built.devices)
    if batch_size is not None or built.plan.batch_size is not None:
        account = memory_account(built, batch_size)
        lines.append('A step of batch %d takes %s at its worst moment, by the account; there are '
                     '%s. The largest of it: %s.' % (
                         account.batch_size, _megabytes(account.peak), _megabytes(limit),
                         account.largest()))
        try:
            fitted = largest_batch(built, limit)
            lines.append('The largest batch that should fit: %d, %d a tower.' % (
                fitted.batch_size, fitted.per_tower))
            pieces = max(2, -(-account.batch_size // fitted.batch_size))
            lines.append('Less memory for the same batch: memory=towers.Memory(accumulate=%d), or '
                         "Memory(recompute='auto')%s." % (
                             pieces, '; more devices, as towers or as stages of one' if any(
                                 map(is_gpu, built.devices)) else ' (CPUs share one memory)'))
        except OutOfMemoryError:
            lines.append('No batch fits, not one example a tower.')
    if checkpoint:
        lines.append('Nothing of this step was saved; the run goes on from %s.' % checkpoint)
    return OutOfMemoryError(' '.join(lines))


@contextlib.contextmanager
def out_of_memory_explained(built: BuiltTowers, directory: typing.Optional[str] = None,
                            memory_limit: typing.Optional[int] = None,
                            batch_size: typing.Optional[int] = None) -> typing.Iterator[None]:
    """A context in which a step that runs out of memory raises an `OutOfMemoryError` with advice.

    >>> with towers.out_of_memory_explained(built):  # around a MonitoredTrainingSession as well
    ...     session.run(built.train_op)

    Args:
      built: what `build_towers` returned.
      directory: of the run's checkpoints, or None.
      memory_limit, batch_size: see `out_of_memory`.

    Raises:
      OutOfMemoryError: in place of the `tf.errors.ResourceExhaustedError`, which is its cause.
      InvalidArgumentError: an argument of another kind.
    """
    check_instance('built', built, BuiltTowers, 'what build_towers returned')
    if directory is not None:
        directory_name('directory', directory, 'the name of a directory, or None')
    for name, value in (('memory_limit', memory_limit), ('batch_size', batch_size)):
        if value is not None:
            check_count(name, value)
    try:
        yield
    except tf.errors.ResourceExhaustedError as error:
        reason = out_of_memory(error, built,
                               tf.train.latest_checkpoint(directory) if directory else None,
                               memory_limit, batch_size)
        if reason is None:
            raise
        raise reason from error


def _node_name(error):
    op = getattr(error, 'op', None)
    if op is not None:
        return op.name
    found = _NODE.search(str(error))
    return (found.group(1) or found.group(2)) if found else None


def _who(name, built):
    if name:
        for tower in built.towers:
            if tower.has(name):
                return 'Tower %d on %s' % (tower.index, short_name(tower.device))
    return 'The step, outside of the towers,' if name else 'The step'


def _wanted(error):
    found = _TENSOR.search(str(error))
    if found is None:
        return ''
    shape = [int(side) for side in found.group(1).split(',') if side]
    size = tf.as_dtype(found.group(2) or 'float').size * tf.TensorShape(shape).num_elements()
    return ', for a tensor of shape %s (%s, %s)' % (
        shape, found.group(2) or 'float', _megabytes(size))


def _megabytes(count):
    return '{:,.1f} MB'.format(count / 1e6)
