"""Other examples to evaluate than the test set: part of the training set, or images of no label."""

import os

import numpy as np

from datasets.errors import DatasetError
from datasets.image_folder import FolderImages, is_image
from datasets.image_set import ImageSet
from towers.errors import InvalidArgumentError


class _Part:
    """Some of the images of a source of `ImageSet`."""

    def __init__(self, source, numbers):
        self._source, self._numbers = source, [int(number) for number in numbers]

    def __len__(self):
        return len(self._numbers)

    def names(self):
        """Those of the source, of these images."""
        return [self._source.name(number) for number in self._numbers]

    def name(self, number):
        """As of the source."""
        return self._source.name(self._numbers[number])

    def where(self, number):
        """As of the source."""
        return self._source.where(self._numbers[number])

    def image(self, number):
        """As of the source."""
        return self._source.image(self._numbers[number])

    def is_intact(self, number):
        """As of the source."""
        return self._source.is_intact(self._numbers[number])


def with_validation(dataset, part):
    """The data set without every (1 / part)-th training example, and with these as its test set.

    They are the same in every run, and of all classes where files are in the order of classes.

    Args:
      dataset: what `get_dataset` returned.
      part: above 0 and at most 0.5.

    Raises:
      InvalidArgumentError: the data set has no examples of its own, or too few.
    """
    is_files = isinstance(dataset, ImageSet)
    source, good = dataset.good_images('train') if is_files else (None, ())
    count = len(good) if is_files else int(dataset.num_examples['train'])
    every = int(round(1 / part))
    is_held = np.arange(count) % every == every - 1
    numbers = {'train': np.flatnonzero(~is_held), 'test': np.flatnonzero(is_held)}
    if not len(numbers['test']):
        raise InvalidArgumentError('validation=%g of %d training examples is none: give more.' % (
            part, count))
    if is_files:
        return dataset.with_sources({split: _Part(source, good[each])
                                     for split, each in numbers.items()})
    if not hasattr(dataset, 'load'):
        raise InvalidArgumentError(
            'validation=%g: this data set gives batches, and not examples: let its function hold '
            'some out for the test batches.' % part)
    load = dataset.load
    counts = {split: len(each) for split, each in numbers.items()}
    return dataset._replace(num_examples=counts, load=lambda split: tuple(
        each[numbers[split]] for each in load('train')))


def with_unlabelled(dataset, folder):
    """The data set with the images in a folder, and in folders within it, as its test set.

    They are in the order of their paths, and their label is 0.

    Args:
      dataset: `ImageSet`.
      folder: path.

    Raises:
      DatasetError: there are no images.
    """
    paths = sorted(path for parent, _, names in os.walk(folder) for name in names
                   for path in [os.path.join(parent, name)]
                   if is_image(path) and not name.startswith('.'))
    if not paths:
        raise DatasetError('%s has no images: expected JPEG or PNG files.' % folder)
    return dataset.with_sources({'test': FolderImages(paths, [0] * len(paths))})
