"""The UCI handwritten digits: 1,797 gray images of 8x8 pixels, stored beside this file.

Source, licence (CC BY 4.0) and how the file was made: digits.LICENSE.md.

Its test is tests/datasets/test_arrays.py.
"""

import os
import typing
import zipfile
import zlib

import numpy as np

from datasets.errors import DatasetError
from towers.errors import InvalidArgumentError

PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'digits.npz')

NUM_CLASSES = 10
IMAGE_SHAPE = (8, 8, 1)
NUM_EXAMPLES = {'train': 1437, 'test': 360}

_MAX_INK = 16  # a pixel counts the black dots in a block of 4x4 of the scanned bitmap
_TEST_EVERY = 5


def load_digits(split: str) -> typing.Tuple[np.ndarray, np.ndarray]:
    """The images and labels of one part of the handwritten digits, in the order of the source.

    The split is fixed: of the images sorted by class (a stable sort), every fifth, from the first
    on, is a test image. Every fifth image of the *file* would not do: in places the file runs
    through 0, 1, .. 9 in turns, and the test set would hold 26 images of one class and 48 of
    another.

    Args:
      split: 'train' (1,437 images, 139 to 147 a class) or 'test' (360, 35 to 37 a class).

    Returns:
      `(images, labels)`: float32 [n, 8, 8, 1], share of ink in 0..1; int64 [n], the digit 0..9.

    Raises:
      InvalidArgumentError: no such split.
      DatasetError: the file is missing or damaged.
    """
    if split not in NUM_EXAMPLES:
        raise InvalidArgumentError(
            'Got split %r, expected one of %s.' % (split, sorted(NUM_EXAMPLES)))
    try:
        with np.load(PATH, allow_pickle=False) as arrays:
            images = arrays['images']
            labels = arrays['labels']
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DatasetError('Cannot read the digits file %s: %s. Bring the file back, for example '
                           'with `git checkout -- datasets/digits.npz`.' % (PATH, error))
    is_test = np.zeros(len(labels), dtype=bool)
    is_test[np.argsort(labels, kind='stable')[::_TEST_EVERY]] = True
    chosen = is_test if split == 'test' else ~is_test
    ink = images[chosen, :, :, np.newaxis].astype(np.float32)
    return ink / np.float32(_MAX_INK), labels[chosen].astype(np.int64)
