"""The UCI handwritten digits: 1,797 gray images of 8x8 pixels, stored beside this file.

Source, licence (CC BY 4.0) and how the file was made: digits.LICENSE.md.
"""

import hashlib
import io
import os

import numpy as np

from datasets.errors import DatasetError
from towers.errors import InvalidArgumentError

PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'digits.npz')
SHA256 = 'b2dab7b501728c22e9119ad76740b2e17c77a231e42d1e592380d90886f1a05e'

NUM_CLASSES = 10
IMAGE_SHAPE = (8, 8, 1)
NUM_EXAMPLES = {'train': 1437, 'test': 360}

_MAX_INK = 16  # a pixel counts the black dots in a block of 4x4 of the scanned bitmap
_TEST_EVERY = 5


def load_digits(split):
    """The images and labels of one part of the handwritten digits, in the order of the source.

    The split is fixed: of the images sorted by class (a stable sort), every fifth, from the first
    on, is a test image. Every fifth of the *file* would not do: it runs through 0, 1, .. 9 in turns
    at places, and the test set would hold 26 images of one class and 48 of another.

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
    with np.load(io.BytesIO(_read_checked(PATH)), allow_pickle=False) as arrays:
        images, labels = arrays['images'], arrays['labels']

    is_test = np.zeros(len(labels), dtype=bool)
    is_test[np.argsort(labels, kind='stable')[::_TEST_EVERY]] = True
    chosen = is_test if split == 'test' else ~is_test
    return (images[chosen, :, :, np.newaxis].astype(np.float32) / np.float32(_MAX_INK),
            labels[chosen].astype(np.int64))


def _read_checked(path):
    """The bytes of the data file; raises DatasetError unless they are what was published."""
    repair = 'Bring the file back, for example with `git checkout -- datasets/digits.npz`.'
    try:
        with open(path, 'rb') as data_file:
            content = data_file.read()
    except (IOError, OSError) as error:
        raise DatasetError('Cannot read the digits file %s: %s. %s'
                           % (path, error.strerror or error, repair))
    found = hashlib.sha256(content).hexdigest()
    if found != SHA256:
        raise DatasetError(
            'The digits file %s is damaged: it has %s bytes and sha256 %s, expected sha256 %s. %s'
            % (path, format(len(content), ','), found, SHA256, repair))
    return content
