"""`memory_report`: the account beside the measurement at four batch sizes, as text and picture."""

import typing

import tensorflow.compat.v1 as tf

from towers.arguments import check_count, check_say, checked_path
from towers.errors import MeasurementError, MissingPackageError, counted
from towers.memory.account import memory_account
from towers.memory.account_table import KINDS, MemoryAccount
from towers.memory.limits import checked_limit, device_limit, is_out_of_memory
from towers.memory.measure import called_build, check_build, config_of, measure_memory
from towers.safe_files import written_whole

_SHARES_OF_BATCH = (0.25, 0.5, 1, 2)
_GB_FROM = 2e9  # bytes; the unit of the picture is GB if its highest peak has so many


class _Unit(typing.NamedTuple):
    """A unit of memory, for the vertical axis of the picture."""
    bytes: float
    name: str


_MB = _Unit(1e6, 'MB')
_GB = _Unit(1e9, 'GB')


class _Point(typing.NamedTuple):
    """A step at one batch size.

    Attributes:
      account: the account of its memory.
      measured: the measured peak in bytes; None where the step was not run, or did not fit.
      text: the report's line about the account and the measurement.
    """

    account: MemoryAccount
    measured: typing.Optional[int]
    text: str


def memory_report(build: typing.Callable, batch_size: int,
                  memory_limit: typing.Optional[float] = None, path: typing.Optional[str] = None,
                  config: typing.Optional[typing.Callable] = None,
                  say: typing.Callable = print) -> None:
    """Predicts and measures a step's memory at 1/4, 1/2, 1 and 2 times a batch size.

    Args:
      build: the function that `fit_batch_size` takes.
      batch_size: examples of a step.
      memory_limit: bytes that a step may take; None: all that the devices have.
      path: name of the PNG to write, or None.
      config: function from `built` to the `tf.ConfigProto` of a session; None for
        `session_config`'s.
      say: called with each text: plan, account, a line for each batch size.

    Raises:
      MissingPackageError: a picture is wanted and matplotlib is not installed; no step has been run
        by then.
      LogFileError: the picture cannot be written.
      InvalidArgumentError: an argument of another kind; `build` returns something else.
    """
    if path is not None:
        path = checked_path('path', path, 'the name of a file, or None')
        figure_class()  # raises now, and not after all steps, if matplotlib is missing
    check_build(build, config)
    check_count('batch_size', batch_size)
    limit = checked_limit(memory_limit)
    check_say(say)
    with tf.Graph().as_default():
        built, _ = called_build(build, batch_size)
        say(str(built.plan))
        if limit is None:
            limit = device_limit(built.devices, config_of(built, config))
        say(str(memory_account(built, batch_size)))
    points = []
    unit = sum(built.plan.shares)  # size of the smallest batch with an example for each tower
    for size in _batch_sizes(batch_size, unit):
        point = _point(build, size, limit, config)
        say(point.text)
        points.append(point)
    if path is not None:
        _draw(points, path, limit, 'memory of a step, ' + counted(len(built.towers), 'tower'))
        say('picture: %s' % path)


def _batch_sizes(batch_size: int, unit: int) -> typing.List[int]:
    """Sorted list of the batch sizes of a report: [6, 12, 27, 54] for 27 on three towers.

    Args:
      batch_size: the batch size that the report is about.
      unit: the batch sizes are multiples of it, so that they divide among the towers.
    """
    sizes = set()
    for share in _SHARES_OF_BATCH:
        num_units = int(batch_size * share) // unit
        sizes.add(max(1, num_units) * unit)
    return sorted(sizes)


def _point(build: typing.Callable, size: int, limit: float,
           config: typing.Optional[typing.Callable]) -> _Point:
    """Predicts the memory of a step at a batch size, and runs the step if the account says that it
    fits.

    Args:
      build, config: the functions that `fit_batch_size` takes.
      size: examples of a step.
      limit: bytes that it may take.
    """
    with tf.Graph().as_default():
        built, start = called_build(build, size)
        account = memory_account(built, size)
        text = 'batch %d: predicted %.1f MB, ' % (size, account.peak / 1e6)
        if account.peak > limit:
            text += 'more than the limit, %.1f MB: not run' % (limit / 1e6)
            return _Point(account, None, text)
        try:
            measured = measure_memory(built, start=start, config=config_of(built, config))
        except tf.errors.ResourceExhaustedError as error:
            if not is_out_of_memory(error):
                raise
            return _Point(account, None, text + 'and it ran out of memory')
        except MeasurementError as error:
            return _Point(account, None, text + 'not measured: %s' % error)
        return _Point(account, measured.peak, measured.against(account))


# ---- the picture ---------------------------------------------------------------------------------

def _draw(points: typing.List[_Point], path: str, limit: float, title: str) -> None:
    """Writes a PNG: the kinds of memory stacked, measured peaks as points, the limit as a line.

    Args:
      points: the steps, in the order of their batch sizes.
      path: name of the file.
      limit: bytes that a step may take.
      title: title of the picture.
    """
    # Without pyplot, whose state belongs to the program.
    figure = figure_class()(figsize=(8.4, 4.8), dpi=110)
    axes = figure.add_subplot(111)
    peaks = [point.account.peak for point in points]
    peaks += [point.measured for point in points if point.measured is not None]
    highest = float(max(peaks))
    unit = _GB if highest >= _GB_FROM else _MB
    batch_sizes = [point.account.batch_size for point in points]
    axes.set_xlim(batch_sizes[0], batch_sizes[-1])
    axes.set_xticks(batch_sizes)
    _draw_predicted(axes, points, unit)
    _draw_measured(axes, points, unit)
    axes.axhline(limit / unit.bytes, color='#cc0000', linestyle='--',
                 label='limit, %.6g %s' % (limit / unit.bytes, unit.name))
    top = highest
    if limit < 3 * highest:  # else the peaks would be flat below the limit
        top = max(highest, limit)
    axes.set_ylim(0, top / unit.bytes * 1.08)  # with some room above
    axes.set_xlabel('batch size, examples of a step over all towers')
    axes.set_ylabel('memory at the worst moment, %s' % unit.name)
    axes.set_title(title, fontsize=11, loc='left')
    axes.legend(loc='center left', bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
    with written_whole(path, 'wb') as picture:
        figure.savefig(picture, bbox_inches='tight', format='png')


def _draw_predicted(axes: typing.Any, points: typing.List[_Point], unit: _Unit) -> None:
    """Draws the accounts over the batch sizes: the kinds of memory on top of each other, and their
    sum, the predicted peak, as a line.

    Args:
      axes: matplotlib's axes.
      points: the steps, in the order of their batch sizes.
      unit: the unit of the vertical axis.
    """
    batch_sizes = [point.account.batch_size for point in points]
    # The accounts of each step's fullest memory, whose peak is `MemoryAccount.peak`.
    accounts = [point.account.fullest() for point in points]
    heights = {}  # {kind: its height at each batch size}, without kinds that never take memory
    for kind in KINDS:
        heights_of_kind = [account.kinds.get(kind, 0) / unit.bytes for account in accounts]
        if any(heights_of_kind):
            heights[kind] = heights_of_kind
    axes.stackplot(batch_sizes, list(heights.values()), labels=list(heights),
                   colors=[KINDS[kind] for kind in heights], linewidth=0)
    peaks = [account.peak / unit.bytes for account in accounts]
    axes.plot(batch_sizes, peaks, color='#333333', label='predicted')


def _draw_measured(axes: typing.Any, points: typing.List[_Point], unit: _Unit) -> None:
    """Draws a dot for each step that was measured; the arguments are those of `_draw_predicted`."""
    heights = {}  # {batch size: height}
    for point in points:
        if point.measured is not None:
            heights[point.account.batch_size] = point.measured / unit.bytes
    if heights:  # else the legend would name dots that are not there
        axes.plot(list(heights), list(heights.values()), 'o', color='white',
                  markeredgecolor='black', clip_on=False, zorder=5, label='measured')


def figure_class() -> type:
    """The class of matplotlib's figures.

    Raises:
      MissingPackageError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401 pylint: disable=import-outside-toplevel,unused-import
        from matplotlib.figure import Figure  # pylint: disable=import-outside-toplevel
    except ImportError:
        raise MissingPackageError(
            'Plots need matplotlib: pip install matplotlib (the extra plots).') from None
    return Figure
