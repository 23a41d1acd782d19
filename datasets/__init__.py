"""The data sets that train.py knows, by name.

>>> digits = datasets.get_dataset('digits')
>>> images, labels = digits.load('train')
>>> batches = datasets.train_batches(images, labels, batch_size=100, seed=1)

A data set that fits in memory needs a load function and an entry in `_IN_MEMORY`; one of image
files needs a source like `FolderImages` and an entry in `_IN_FOLDERS`.
"""

import collections
import functools

import numpy as np

from datasets import digits
from datasets.check_data import check_data  # noqa: F401 (public here)
from datasets.errors import (BadExampleError, DatasetError, OwnDataError,  # noqa: F401 (public)
                             OwnModelError)
from datasets.image_folder import folder_splits
from datasets.image_records import count_classes, labels_path, record_splits
from datasets.image_set import ImageSet
from datasets.imagenet import imagenet
from datasets.keras_sets import SETS, load_keras_set
from datasets.own import own_set
from datasets.pipeline import eval_batches, train_batches  # noqa: F401 (public here)
from datasets.synthetic import Synthetic
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
        """`datasets.train_batches` of the training images; takes its other arguments.

        Raises:
          BadExampleError: a label is no class.
        """
        return train_batches(*self._checked('train'), **arguments)

    def eval_batches(self, **arguments):
        """`datasets.eval_batches` of the test images; as `train_batches`."""
        return eval_batches(*self._checked('test'), **arguments)

    def _checked(self, split):
        images, labels = self.load(split)
        wrong = np.flatnonzero((labels < 0) | (labels >= self.num_classes))
        if len(wrong):
            raise BadExampleError(
                'Example %d of the %s set of %s has the label %d, which is not in 0 .. %d%s: its '
                'files are damaged. Remove them, and fetch them again; --mode=check_data lists all '
                'such examples.' % (
                    wrong[0], split, self.name, labels[wrong[0]], self.num_classes - 1,
                    '' if len(wrong) == 1 else ', and %d more have such labels' % (len(wrong) - 1)))
        return images, labels


def _keras_set(name):
    known = SETS[name]
    # Loading takes seconds, and training and evaluation take one split each.
    return Dataset(name, known.num_classes, known.image_shape, known.num_examples,
                   functools.partial(load_keras_set, name))


def _tfrecords(data_dir, num_classes=0, background_class=False, **options):
    counted_in = None if num_classes else labels_path(data_dir)
    num_classes = num_classes or count_classes(data_dir)
    if not num_classes:
        raise InvalidArgumentError('TFRecords do not say how many classes there are, and %s has no '
                                   'labels.txt: give --num_classes.' % data_dir)
    return ImageSet('tfrecords', record_splits(data_dir), num_classes + bool(background_class),
                    counted_in=counted_in, **options)


def _folder(data_dir, **options):
    classes, splits = folder_splits(data_dir)
    return ImageSet('folder', splits, len(classes), classes, **options)


_IN_MEMORY = dict([('digits', Dataset('digits', digits.NUM_CLASSES, digits.IMAGE_SHAPE,
                                      digits.NUM_EXAMPLES, digits.load_digits))]
                  + [(name, _keras_set(name)) for name in SETS])
_IN_FOLDERS = {'imagenet': imagenet, 'tfrecords': _tfrecords, 'folder': _folder}
_COUNTED = ('tfrecords', 'synthetic')  # those that have to be told how many classes there are


def get_dataset(name, data_dir=None, num_classes=0, background_class=False, **options):
    """The data set of that name.

    Args:
      name: 'digits', 'mnist', 'fashion_mnist', 'cifar10', 'cifar100', 'imagenet', 'tfrecords',
        'folder' or 'synthetic'; or 'module:function', see `own`.
      data_dir: folder of its files, for 'imagenet', 'tfrecords' and 'folder'.
      num_classes: for 'tfrecords' and 'synthetic'; 0: as many as the labels.txt of the TFRecords
        lists, and 1000 of 'synthetic'.
      background_class: for 'tfrecords': labels begin at 1, and 0 is one class more.
      **options: for those that are files: `augment` and `bad_list` of `ImageSet`.

    Raises:
      InvalidArgumentError: nobody knows the name (the text lists the names that exist); or it
        needs a folder and none is given, or the other way round.
      DatasetError: the folder is missing, or does not hold the data set.
    """
    if ':' in name:
        return own_set(name, data_dir)
    if name not in _IN_FOLDERS and name != 'synthetic' and name not in _IN_MEMORY:
        raise InvalidArgumentError('There is no data set %r; choose one of: %s; or module:function.'
                                   % (name, ', '.join(sorted(list(_IN_MEMORY) + list(_IN_FOLDERS)
                                                             + ['synthetic']))))
    if (num_classes and name not in _COUNTED) or (background_class and name != 'tfrecords'):
        raise InvalidArgumentError('The data set %r has its own number of classes: leave '
                                   'num_classes=%r and background_class=%r out.' % (
                                       name, num_classes, background_class))
    if name in _IN_FOLDERS:
        if data_dir is None:
            raise InvalidArgumentError('The data set %r needs a data_dir, the folder of its files.'
                                       % name)
        if name == 'tfrecords':
            options.update(num_classes=num_classes, background_class=background_class)
        return _IN_FOLDERS[name](data_dir, **options)
    if data_dir is not None:
        raise InvalidArgumentError('The data set %r is %s and takes no data_dir (%r): leave it out.'
                                   % (name, "in Keras' cache" if name in SETS
                                      else 'part of this package', data_dir))
    return Synthetic(num_classes or 1000) if name == 'synthetic' else _IN_MEMORY[name]
