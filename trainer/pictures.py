"""Pictures and tables that train.py writes, by matplotlib (the extra `plots`)."""

import csv
import typing

from towers.memory.report import figure_class
from towers.safe_files import written_whole


def check_can_write(path: str) -> None:
    """Checks a path before the work whose result is written to it.

    Args:
      path: of a picture, which ends in `.png`, or of a table; or ''.

    Raises:
      MissingPackageError: it is a picture, and matplotlib is not installed.
    """
    if path.endswith('.png'):
        figure_class()


def new_axes(title: str, size: typing.Tuple[float, float]) -> typing.Any:
    """The axes of a new figure of matplotlib.

    Args:
      title: of the figure, above the axes.
      size: width and height, in inches.
    """
    figure = figure_class()(figsize=size, dpi=110)  # pyplot's state is the program's
    axes = figure.add_subplot(111)
    axes.set_title(title, fontsize=11, loc='left')
    return axes


def write_picture(axes: typing.Any, path: str) -> None:
    """Writes the figure of `axes` to a path, as a PNG."""
    with written_whole(path, 'wb') as picture:
        axes.figure.savefig(picture, bbox_inches='tight', format='png')


def write_table(rows: typing.Iterable[typing.Sequence], path: str) -> None:
    """Writes rows to the CSV file of a path, the first one with the names of the columns."""
    with written_whole(path, newline='') as table:
        csv.writer(table).writerows(rows)
