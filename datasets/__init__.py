"""The data sets that train.py knows, by name.

>>> digits = datasets.get_dataset('digits')
>>> images, labels = digits.load('train')
>>> batches = datasets.train_batches(images, labels, batch_size=100, seed=1)

A data set that fits in memory needs one module with a load function and one entry in `_DATASETS`.
"""

import collections

from datasets import digits
from datasets.errors import DatasetError  # noqa: F401 (public here)
from datasets.pipeline import eval_batches, train_batches  # noqa: F401 (public here)
from towers.errors import InvalidArgumentError

Dataset = collections.namedtuple(
    'Dataset', ['name', 'num_classes', 'image_shape', 'num_examples', 'load'])
Dataset.__doc__ = """What a program has to know about a data set before it reads it.

Fields:
  name: what `get_dataset` calls it.
  num_classes: labels are 0 .. num_classes - 1.
  image_shape: (height, width, channels) as stored.
  num_examples: a dict from split ('train', 'test') to its number of images.
  load: `load(split)` gives `(images, labels)` as arrays, float32 [n, height, width, channels] with
    values in 0..1 and int64 [n].
"""

_DATASETS = {
    'digits': Dataset('digits', digits.NUM_CLASSES, digits.IMAGE_SHAPE, digits.NUM_EXAMPLES,
                      digits.load_digits),
}


def get_dataset(name):
    """The `Dataset` of that name.

    Raises:
      InvalidArgumentError: nobody knows the name; the text lists the names that exist.
    """
    if name not in _DATASETS:
        raise InvalidArgumentError('There is no data set %r; choose one of: %s.'
                                   % (name, ', '.join(sorted(_DATASETS))))
    return _DATASETS[name]
