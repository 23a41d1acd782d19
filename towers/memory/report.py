"""A step's memory at several batch sizes: the account, the measurement, and the picture."""

import os
import typing

import tensorflow.compat.v1 as tf

from towers.arguments import check_count, check_say, directory_name
from towers.errors import MeasurementError, MissingPackageError
from towers.memory.account import KINDS, memory_account
from towers.memory.fit import called_build, check_build, is_out_of_memory
from towers.memory.measure import device_limit, measure_memory
from towers.safe_files import written_whole


def count_on_cpus():
    """Makes TensorFlow's allocator on CPUs count; to be called before the first session."""
    os.environ.setdefault('TF_CPU_ALLOCATOR_USE_BFC', 'true')


def memory_report(build: typing.Callable, batch_size: int,
                  memory_limit: typing.Optional[int] = None, path: typing.Optional[str] = None,
                  config: typing.Optional[typing.Callable] = None,
                  say: typing.Callable = print) -> None:
    """Predicts and measures a step's memory at 1/4, 1/2, 1 and 2 times a batch size.

    Args:
      build: as for `fit_batch_size`.
      batch_size: examples.
      memory_limit: bytes that a step may take; None: all that the devices have.
      path: name of the PNG to write, or None.
      config: function from `built` to the `tf.ConfigProto` of a session; None for
        `session_config`'s.
      say: called with each text: plan, account, a line for each batch size.

    Raises:
      MissingPackageError: a picture is wanted and matplotlib is not installed; nothing has been
        run by then.
      LogFileError: the picture cannot be written.
      InvalidArgumentError: an argument of another kind; `build` returns something else.
    """
    if path is not None:
        path = directory_name('path', path, 'the name of a file, or None')
        _figure()
    check_build(build, config)
    check_count('batch_size', batch_size)
    if memory_limit is not None:
        check_count('memory_limit', memory_limit)
    check_say(say)
    with tf.Graph().as_default():
        built, _ = called_build(build, batch_size)
        say(str(built.plan))
        limit = memory_limit or device_limit(built.devices, config(built) if config else None)
        say(str(memory_account(built, batch_size)))
    unit = sum(built.plan.shares)
    accounts, measured = [], []
    for size in sorted({max(1, int(batch_size * factor) // unit) * unit
                        for factor in (0.25, 0.5, 1, 2)}):
        account, peak, text = _of_size(build, size, limit, config)
        accounts.append(account)
        if peak is not None:
            measured.append((size, peak))
        say(text)
    if path is not None:
        _draw(accounts, path, measured, limit, 'memory of a step, %d tower%s' % (
            len(built.towers), '' if len(built.towers) == 1 else 's'))
        say('picture: %s' % path)


def _of_size(build, size, limit, config):
    """`(MemoryAccount, measured bytes or None, text)` of a step at a batch size."""
    with tf.Graph().as_default():
        built, start = called_build(build, size)
        account = memory_account(built, size)
        text = 'batch %d: predicted %.1f MB' % (size, account.peak / 1e6)
        if account.peak > limit:
            return account, None, text + ', more than the limit, %.1f MB: not run' % (limit / 1e6)
        try:
            found = measure_memory(built, start=start, config=config(built) if config else None)
        except tf.errors.ResourceExhaustedError as error:
            if not is_out_of_memory(error):
                raise
            return account, None, text + ', and it ran out of memory'
        except MeasurementError as error:
            return account, None, text + ', not measured: %s' % error
        return account, found.peak, found.against(account)


# Okabe and Ito's colours and tints of them, which the colour-blind can tell apart as neighbours.
_COLOURS = {'parameters': '#0072B2', 'slots': '#56B4E9', 'other variables': '#9ad0ee',
            'initial values': '#cce5f5', 'constants': '#dddddd', 'input': '#000000',
            'activations': '#E69F00', 'forward': '#f5cf7a', 'gradients': '#009E73',
            'backward': '#7fceb9', 'updates': '#CC79A7', 'scratch': '#D55E00',
            'copies': '#F0E442', 'allocator': '#999999'}


def _draw(accounts, path, measured, limit, title):
    """Writes a PNG: the kinds of memory stacked, measured peaks as points, the limit as a line.

    Args:
      accounts: list of `MemoryAccount`, by their batch sizes.
      path: name of the file.
      measured: list of `(batch size, bytes)`.
      limit: bytes that a step may take; far above all else it is said in the title.
      title: title of the picture.

    Raises:
      LogFileError: the file cannot be written.
    """
    figure = _figure()(figsize=(8.4, 4.8), dpi=110)  # without pyplot, whose state is the program's
    axes = figure.add_subplot(111)
    fullest = [max(account.pools(), key=lambda each: each.peak) for account in accounts]
    batches = [account.batch_size for account in accounts]
    highest = max([each.peak for each in fullest] + [bytes_ for _, bytes_ in measured])
    unit, name = (1e9, 'GB') if highest >= 2e9 else (1e6, 'MB')
    kinds = [kind for kind in KINDS if any(each.kinds.get(kind) for each in fullest)]
    rows = [[each.kinds.get(kind, 0) / unit for each in fullest] for kind in kinds]
    colours = [_COLOURS[kind] for kind in kinds]
    axes.stackplot(batches, rows, labels=kinds, colors=colours, linewidth=0)
    axes.set_xlim(min(batches), max(batches))
    axes.plot(batches, [each.peak / unit for each in fullest], color='#333333', label='predicted')
    if measured:
        axes.plot([batch for batch, _ in measured], [bytes_ / unit for _, bytes_ in measured], 'o',
                  color='white', markeredgecolor='black', clip_on=False, zorder=5, label='measured')
    if limit < 3 * highest:
        axes.axhline(limit / unit, color='#cc0000', linestyle='--',
                     label='limit, %.3g %s' % (limit / unit, name))
        highest = max(highest, limit)
    else:
        title += ' (the limit, {:,.0f} {}, is far above)'.format(limit / unit, name)
    axes.set_ylim(0, highest / unit * 1.08)
    axes.set_xticks(batches)
    axes.set_xlabel('batch size, examples of a step over all towers')
    axes.set_ylabel('memory at the worst moment, %s' % name)
    axes.set_title(title, fontsize=11, loc='left')
    handles, names = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], names[::-1], loc='center left', bbox_to_anchor=(1.01, 0.5),
                frameon=False, fontsize=9)
    with written_whole(path, 'wb') as picture:
        figure.savefig(picture, bbox_inches='tight', format='png')


def _figure():
    """The class of matplotlib's figures."""
    try:
        import matplotlib  # noqa: F401 pylint: disable=import-outside-toplevel,unused-import
        from matplotlib.figure import Figure  # pylint: disable=import-outside-toplevel
    except ImportError:
        raise MissingPackageError(
            'Plots need matplotlib: pip install matplotlib (the extra plots).') from None
    return Figure
