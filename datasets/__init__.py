"""The data sets that train.py knows, by name.

>>> digits = datasets.get_dataset('digits')
>>> batches = digits.train_batches(batch_size=100, seed=1)

A data set that fits in memory is an `ArraySet`, which needs a load function; one of image files an
`ImageSet`, which needs a source like `FolderImages`.
"""

import os

from datasets import digits
from datasets.arrays import ArraySet
from datasets.bad_examples import check_data  # noqa: F401 (public here)
from datasets.errors import (BadExampleError, DatasetError, OwnDataError,  # noqa: F401 (public)
                             OwnModelError)
from datasets.image_folder import folder_splits
from datasets.image_records import count_classes, record_splits
from datasets.image_set import ImageSet
from datasets.keras_sets import NAMES, keras_set
from datasets.own import own_set
from datasets.synthetic import Synthetic
from towers.errors import InvalidArgumentError

_IN_FOLDERS = ('folder', 'imagenet', 'tfrecords')
_COUNTED = ('tfrecords', 'synthetic')  # those that have to be told how many classes there are
_IMAGENET_CLASSES = 1001  # labels are 1 .. 1000, and 0 is the background class


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
    known = sorted(NAMES + ['digits', 'synthetic'] + list(_IN_FOLDERS))
    if name not in known:
        raise InvalidArgumentError('There is no data set %r; choose one of: %s; or module:function.'
                                   % (name, ', '.join(known)))
    if (num_classes and name not in _COUNTED) or (background_class and name != 'tfrecords'):
        raise InvalidArgumentError('The data set %r has its own number of classes: leave '
                                   'num_classes=%r and background_class=%r out.' % (
                                       name, num_classes, background_class))
    if (name in _IN_FOLDERS) != (data_dir is not None):
        raise InvalidArgumentError(
            'The data set %r needs a data_dir, the folder of its files.' % name
            if name in _IN_FOLDERS else 'The data set %r is %s and takes no data_dir (%r): leave '
            'it out.' % (name, "in Keras' cache" if name in NAMES else 'part of this package',
                         data_dir))
    if name == 'folder':
        classes, splits = folder_splits(data_dir)
        return ImageSet(name, splits, len(classes), classes, **options)
    if name == 'imagenet':
        return ImageSet(name, record_splits(data_dir), _IMAGENET_CLASSES, **options)
    if name == 'tfrecords':
        return _tfrecords(data_dir, num_classes, background_class, **options)
    if name == 'synthetic':
        return Synthetic(num_classes or 1000)
    return keras_set(name) if name in NAMES else ArraySet(
        name, digits.NUM_CLASSES, digits.IMAGE_SHAPE, digits.NUM_EXAMPLES, digits.load_digits)


def _tfrecords(data_dir, num_classes, background_class, **options):
    counted_in = None if num_classes else os.path.join(data_dir, 'labels.txt')
    num_classes = num_classes or count_classes(counted_in)
    if not num_classes:
        raise InvalidArgumentError('TFRecords do not say how many classes there are, and %s has no '
                                   'labels.txt: give --num_classes.' % data_dir)
    return ImageSet('tfrecords', record_splits(data_dir), num_classes + bool(background_class),
                    counted_in=counted_in, **options)
