"""A step's memory at several batch sizes: the account, the measurement, and the picture."""

import collections
import os
import typing

import tensorflow.compat.v1 as tf

from towers.arguments import check_count, check_say, directory_name
from towers.errors import MeasurementError, MissingPackageError
from towers.memory.account import memory_account
from towers.memory.fit import called_build, check_build, is_out_of_memory
from towers.memory.limits import device_limit
from towers.memory.measure import measure_memory
from towers.memory.plot import draw_memory


class MemoryReport(collections.namedtuple('MemoryReport', 'accounts measured limit path')):
    """Account and measurement at several batch sizes.

    Attributes:
      accounts: list of `MemoryAccount`, one a batch size.
      measured: list of `(batch size, bytes)`, for the batch sizes that were run.
      limit: bytes that a step may take.
      path: name of the picture's file, or None.
    """
    __slots__ = ()


def count_on_cpus():
    """Makes TensorFlow's allocator on CPUs count; to be called before the first session."""
    os.environ.setdefault('TF_CPU_ALLOCATOR_USE_BFC', 'true')


def memory_report(build: typing.Callable, batch_size: int,
                  memory_limit: typing.Optional[int] = None, path: typing.Optional[str] = None,
                  config: typing.Optional[typing.Callable] = None,
                  say: typing.Callable = print) -> MemoryReport:
    """Predicts and measures a step's memory at 1/4, 1/2, 1 and 2 times a batch size.

    Args:
      build: as for `fit_batch_size`.
      batch_size: examples.
      memory_limit: bytes that a step may take; None: all that the devices have.
      path: name of the PNG to write, or None.
      config: function from `built` to the `tf.ConfigProto` of a session; None for
        `session_config`'s.
      say: called with each text: plan, account, a line for each batch size.

    Returns:
      `MemoryReport`.

    Raises:
      MissingPackageError: a picture is wanted and matplotlib is not installed; nothing has been
        run by then.
      InvalidArgumentError: an argument of another kind; `build` returns something else.
    """
    if path is not None:
        path = directory_name('path', path, 'the name of a file, or None')
        _check_matplotlib()
    check_build(build, config)
    check_count('batch_size', batch_size)
    if memory_limit is not None:
        check_count('memory_limit', memory_limit)
    check_say(say)
    accounts, measured = [], []
    with tf.Graph().as_default():
        built, _ = called_build(build, batch_size)
        say(str(built.plan))
        count = len(built.towers)
        limit = memory_limit or device_limit(built.devices, config(built) if config else None)
        account = memory_account(built, batch_size)
        say(str(account))
        unit = sum(built.plan.shares)
        sizes = sorted({max(1, int(batch_size * factor) // unit) * unit
                        for factor in (0.25, 0.5, 1, 2)})
        accounts = [memory_account(built, size) for size in sizes]
    for account in accounts:
        text = 'batch %d: predicted %.1f MB' % (account.batch_size, account.peak / 1e6)
        if account.peak <= limit:
            try:
                with tf.Graph().as_default():
                    built, start = called_build(build, account.batch_size)
                    found = measure_memory(built, start=start,
                                           config=config(built) if config else None)
                measured.append((account.batch_size, found.peak))
                text = found.against(account)
            except tf.errors.ResourceExhaustedError as error:
                if not is_out_of_memory(error):
                    raise
                text += ', and it ran out of memory'
            except MeasurementError as error:
                text += ', not measured: %s' % error
        else:
            text += ', more than the limit, %.1f MB: not run' % (limit / 1e6)
        say(text)
    if path is not None:
        draw_memory(accounts, path, measured, limit, 'memory of a step, %d tower%s' % (
            count, '' if count == 1 else 's'))
        say('picture: %s' % path)
    return MemoryReport(accounts, measured, limit, path)


def _check_matplotlib():
    try:
        import matplotlib  # noqa: F401 pylint: disable=import-outside-toplevel,unused-import
    except ImportError:
        raise MissingPackageError(
            'Plots need matplotlib: pip install matplotlib (the extra plots).') from None
