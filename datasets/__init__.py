"""The data sets that train.py knows, by name.

>>> digits = datasets.get_dataset('digits')
>>> images, labels = digits.load('train')
>>> batches = datasets.train_batches(images, labels, batch_size=100, seed=1)

A data set that fits in memory needs one module with a load function and one entry in `_IN_MEMORY`;
one that does not needs a class like `ImageNet` and one entry in `_IN_FOLDERS`.
"""

import collections

from datasets import digits
from datasets.errors import DatasetError  # noqa: F401 (public here)
from datasets.imagenet import ImageNet
from datasets.pipeline import eval_batches, train_batches  # noqa: F401 (public here)
from towers.errors import InvalidArgumentError


class Dataset(collections.namedtuple(
        'Dataset', ['name', 'num_classes', 'image_shape', 'num_examples', 'load'])):
    """A data set that fits in memory. `train_batches` and `eval_batches`, and the fields but
    `load`, are what every data set has.

    Fields:
      name: what `get_dataset` calls it.
      num_classes: labels are 0 .. num_classes - 1.
      image_shape: (height, width, channels) as stored.
      num_examples: a dict from split ('train', 'test') to its number of images.
      load: `load(split)` gives `(images, labels)` as arrays, float32 [n, height, width, channels]
        with values in 0..1 and int64 [n].
    """
    __slots__ = ()

    def train_batches(self, **arguments):
        """`datasets.train_batches` of the training images; takes its other arguments."""
        return train_batches(*self.load('train'), **arguments)

    def eval_batches(self, **arguments):
        """`datasets.eval_batches` of the test images; takes its other arguments."""
        return eval_batches(*self.load('test'), **arguments)


_IN_MEMORY = {
    'digits': Dataset('digits', digits.NUM_CLASSES, digits.IMAGE_SHAPE, digits.NUM_EXAMPLES,
                      digits.load_digits),
}
_IN_FOLDERS = {'imagenet': ImageNet}


def get_dataset(name, data_dir=None):
    """The data set of that name.

    Args:
      name: 'digits' or 'imagenet'.
      data_dir: folder of its files, for those that are not part of this package: 'imagenet'.

    Raises:
      InvalidArgumentError: nobody knows the name (the text lists the names that exist); or it
        needs a folder and none is given, or the other way round.
      DatasetError: the folder is missing, or does not hold the data set.
    """
    if name in _IN_MEMORY:
        if data_dir is not None:
            raise InvalidArgumentError('The data set %r is part of this package and takes no '
                                       'data_dir (%r): leave it out.' % (name, data_dir))
        return _IN_MEMORY[name]
    if name in _IN_FOLDERS:
        if data_dir is None:
            raise InvalidArgumentError('The data set %r needs a data_dir, the folder of its files.'
                                       % name)
        return _IN_FOLDERS[name](data_dir)
    raise InvalidArgumentError('There is no data set %r; choose one of: %s.' % (
        name, ', '.join(sorted(list(_IN_MEMORY) + list(_IN_FOLDERS)))))
