"""Other examples to evaluate than the test set: part of the training set, or unlabelled images.

Its test is tests/datasets/test_sets.py.
"""

import os
import typing

import numpy as np

from datasets.errors import DatasetError
from datasets.image_folder import FolderImages, is_image
from datasets.image_set import ImageSet
from towers.errors import InvalidArgumentError


def with_validation(dataset: typing.Any, part: float) -> typing.Any:
    """The data set without every (1 / part)-th training example, and with these as its test set.

    The examples of the test set are the same in every run. They are of all classes, if the files
    are in the order of classes.

    Args:
      dataset: a data set of `get_dataset`.
      part: the part of the training examples, above 0 and at most 0.5.

    Raises:
      InvalidArgumentError: the data set gives no single examples, or has too few.
    """
    if isinstance(dataset, ImageSet):
        # In the place of an example that the list of bad examples leaves out, `numbers` has the
        # next good example a second time. No example must be both trained on and tested on.
        numbers = np.unique(dataset.numbers['train'])
        source = dataset.sources['train']
        training, validation = _parts(numbers, part)
        return dataset.with_images({'train': (source, training), 'test': (source, validation)})
    if not hasattr(dataset, 'load'):
        raise InvalidArgumentError(
            'validation=%g: this data set gives batches, and not examples: let its function hold '
            'some out for the test batches.' % part)
    training, validation = _parts(np.arange(dataset.num_examples['train']), part)
    numbers = {'train': training, 'test': validation}

    def load(split: str) -> tuple:
        """The images and labels of a split: both splits are parts of the training set."""
        images, labels = dataset.load('train')
        return images[numbers[split]], labels[numbers[split]]
    num_examples = {'train': len(training), 'test': len(validation)}
    return dataset._replace(num_examples=num_examples, load=load)


def _parts(numbers: np.ndarray, part: float):
    """`(training, validation)`: the numbers of the examples to train on, and the numbers of the
    examples that are held out, a `part` of all."""
    every = int(round(1 / part))
    is_held_out = np.arange(len(numbers)) % every == every - 1
    if not is_held_out.any():
        raise InvalidArgumentError('validation=%g of %d training examples is none: give more.' % (
            part, len(numbers)))
    return numbers[~is_held_out], numbers[is_held_out]


def with_unlabelled(dataset: ImageSet, folder: str) -> ImageSet:
    """The data set with the images in a folder, and in folders within it, as its test set.

    The images are in the order of their paths, and their label is 0.

    Args:
      dataset: `ImageSet`.
      folder: path.

    Raises:
      DatasetError: there are no images.
    """
    paths = []
    for parent, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(parent, name)
            if not name.startswith('.') and is_image(path):
                paths.append(path)
    if not paths:
        raise DatasetError('%s has no images: expected JPEG or PNG files.' % folder)
    paths.sort()
    images = FolderImages(paths, [0] * len(paths))
    return dataset.with_images({'test': (images, np.arange(len(paths)))})
