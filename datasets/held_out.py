"""Other examples to evaluate than the test set: part of the training set, or images of no label."""

import os

import numpy as np

from datasets.errors import DatasetError
from datasets.image_folder import FolderImages, is_image
from datasets.image_set import ImageSet
from towers.errors import InvalidArgumentError


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
    if not is_files and not hasattr(dataset, 'load'):
        raise InvalidArgumentError(
            'validation=%g: this data set gives batches, and not examples: let its function hold '
            'some out for the test batches.' % part)
    numbers = np.unique(dataset.numbers['train']) if is_files else np.arange(
        dataset.num_examples['train'])
    every = int(round(1 / part))
    is_held = np.arange(len(numbers)) % every == every - 1
    if not is_held.any():
        raise InvalidArgumentError('validation=%g of %d training examples is none: give more.' % (
            part, len(numbers)))
    numbers = {'train': numbers[~is_held], 'test': numbers[is_held]}
    if is_files:
        return dataset.with_images({split: (dataset.sources['train'], each)
                                    for split, each in numbers.items()})
    return dataset._replace(
        num_examples={split: len(each) for split, each in numbers.items()},
        load=lambda split: tuple(each[numbers[split]] for each in dataset.load('train')))


def with_unlabelled(dataset, folder):
    """The data set with the images in a folder, and in folders within it, as its test set.

    They are in the order of their paths, and their label is 0.

    Args:
      dataset: `ImageSet`.
      folder: path.

    Raises:
      DatasetError: there are no images.
    """
    paths = sorted(os.path.join(parent, name) for parent, _, names in os.walk(folder)
                   for name in names if not name.startswith('.'))
    paths = [path for path in paths if is_image(path)]
    if not paths:
        raise DatasetError('%s has no images: expected JPEG or PNG files.' % folder)
    return dataset.with_images({'test': (FolderImages(paths, [0] * len(paths)),
                                         np.arange(len(paths)))})
