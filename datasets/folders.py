"""Folders: the names in one, or the error about what is none or may not be looked into."""

import os

from datasets.errors import DatasetError


CANNOT_READ = 'Cannot read the folder %s: %s.'


def names_in(folder):
    """Sorted list of the names in a folder.

    Raises:
      DatasetError: it may not be listed; or it may, but what is in it may not be reached, so that
        its files look as if they were not there.
    """
    try:
        names = sorted(os.listdir(folder))
        os.stat(os.path.join(folder, os.curdir))
        return names
    except OSError as error:
        raise DatasetError(CANNOT_READ % (folder, error.strerror or error))


def no_folder(path):
    """The beginning of the error about a path that is no folder."""
    try:
        os.stat(path)
    except PermissionError as error:  # of a folder above it
        return 'Cannot reach the folder %s (%s)' % (path, error.strerror)
    except OSError:
        return 'There is no folder %s' % path
    return '%s is no folder' % path
