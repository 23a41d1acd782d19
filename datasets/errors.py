"""The errors of a data set whose files cannot be used; folders that cannot be read.

Its test is tests/datasets/test_sets.py.
"""

import os
import typing

from towers.errors import TowersError, shown


class DatasetError(TowersError, IOError):
    """A data set's file is missing or is not the file it should be.

    Its text is one line that can be encoded, whatever the names in it: see `shown`.
    """

    def __init__(self, text: str):
        super(DatasetError, self).__init__(shown(text))


class BadExampleError(DatasetError):
    """An example that cannot be used: damaged, of another kind, or with a label out of range."""


class OwnDataError(DatasetError):
    """A user's own pipeline raised an error, ended, or gives what no network can be trained on;
    `__cause__` is what it raised."""


class OwnModelError(DatasetError):
    """A user's own model function raised an error, or a step of it failed; `__cause__` is that
    error."""


def names_in(folder: str) -> typing.List[str]:
    """The names in a folder, sorted.

    Raises:
      DatasetError: there is no such folder; it may not be listed; or it may be listed, but its
        contents may not be reached, so that its files look as if they were not there.
    """
    try:
        names = sorted(os.listdir(folder))
        os.stat(os.path.join(folder, os.curdir))  # fails where the contents may not be reached
        return names
    except OSError as error:
        raise DatasetError('Cannot read the folder %s: %s.' % (folder, error.strerror or error))
