"""Pictures and tables that train.py writes; pictures need matplotlib (the extra `plots`).

Tests are in tests/trainer/test_confusion.py and test_rate_finder.py.
"""

import csv
import typing

from towers.memory.report import figure_class
from towers.safe_files import written_whole


def check_can_write(path: str) -> None:
    """Checks that matplotlib is installed, if a picture is to be written; to be called before the
    work whose result the picture shows.

    Args:
      path: the path of a picture, which ends in `.png`, or of a table; or ''.

    Raises:
      MissingPackageError: the path is a picture's, and matplotlib is not installed.
    """
    if path.endswith('.png'):
        figure_class()  # imports matplotlib


def new_axes(title: str, size: typing.Tuple[float, float]) -> typing.Any:
    """The axes of a new figure of matplotlib.

    Args:
      title: the title above the axes.
      size: width and height, in inches.
    """
    # A figure of its own, since pyplot would change the state of the whole program.
    figure = figure_class()(figsize=size, dpi=110)
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
