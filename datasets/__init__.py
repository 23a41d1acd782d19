"""The data sets that train.py knows, by name.

>>> digits = datasets.get_dataset('digits')
>>> batches = digits.train_batches(batch_size=100, seed=1)

In comes a name, and what the data set needs, such as a folder of files; out comes a data set, which
gives batches for training (`train_batches`, from any example on) and for evaluation
(`eval_batches`). A data set that fits in memory is an `ArraySet`, which needs a load function. A
data set of image files is an `ImageSet`, which needs a source like `FolderImages`. A data set of
the user's own is an `Own`.

Read `epochs` (the order of examples), then `arrays`, `digits` and `keras_sets`; for image files
`record_files`, `tfrecords`, `image_records`, `image_folder`, `preprocessing`, then `image_set`; for
the user's own `own_code` and `own`; and `bad_examples` and `held_out`, which leave examples out.
"""

import os
import typing

from datasets import digits
from datasets.arrays import ArraySet
from datasets.bad_examples import check_data  # noqa: F401 (public here)
from datasets.errors import (  # noqa: F401 (public here)
    BadExampleError,
    DatasetError,
    OwnDataError,
    OwnModelError,
)
from datasets.image_folder import folder_splits
from datasets.image_records import count_classes, record_splits
from datasets.image_set import ImageSet
from datasets.keras_sets import NAMES, keras_set
from datasets.own import own_set
from datasets.synthetic import Synthetic
from towers.errors import InvalidArgumentError

_IN_FOLDERS = ('folder', 'imagenet', 'tfrecords')
_COUNTED = ('tfrecords', 'synthetic')  # data sets that do not know how many classes they have
_IMAGENET_CLASSES = 1001  # labels are 1 .. 1000, and 0 is the background class
_SYNTHETIC_CLASSES = 1000


def get_dataset(name: str, data_dir: typing.Optional[str] = None, num_classes: int = 0,
                background_class: bool = False, **options: typing.Any) -> typing.Any:
    """Makes the data set of this name.

    Args:
      name: 'digits', 'mnist', 'fashion_mnist', 'cifar10', 'cifar100', 'imagenet', 'tfrecords',
        'folder' or 'synthetic'; or 'module:function', see `own`.
      data_dir: folder of its files, for 'imagenet', 'tfrecords' and 'folder'.
      num_classes: for 'tfrecords' and 'synthetic'; 0 for as many as the labels.txt of the TFRecords
        lists, and for 1000 with 'synthetic'.
      background_class: for 'tfrecords', whether labels begin at 1; 0 is then an additional class.
      **options: for data sets of files: `augment` and `bad_list` of `ImageSet`.

    Raises:
      InvalidArgumentError: the name is not known (the text lists the names that exist); the data
        set needs a folder and none is given, or the other way round.
      DatasetError: the folder is missing, or does not hold the data set.
    """
    if ':' in name:
        return own_set(name, data_dir)
    _check_name(name)
    _check_arguments(name, data_dir, num_classes, background_class)
    if name == 'folder':
        classes, splits = folder_splits(data_dir)
        return ImageSet(name, splits, len(classes), classes, **options)
    if name == 'imagenet':
        return ImageSet(name, record_splits(data_dir), _IMAGENET_CLASSES, **options)
    if name == 'tfrecords':
        return _tfrecords(data_dir, num_classes, background_class, **options)
    if name == 'synthetic':
        return Synthetic(num_classes or _SYNTHETIC_CLASSES)
    if name == 'digits':
        return ArraySet(name, digits.NUM_CLASSES, digits.IMAGE_SHAPE, digits.NUM_EXAMPLES,
                        digits.load_digits)
    return keras_set(name)


def _check_name(name: str) -> None:
    """Raises `InvalidArgumentError` for a name that is not known."""
    known = sorted(NAMES + ['digits', 'synthetic'] + list(_IN_FOLDERS))
    if name not in known:
        raise InvalidArgumentError('There is no data set %r; choose one of: %s; or module:function.'
                                   % (name, ', '.join(known)))


def _check_arguments(name: str, data_dir: typing.Optional[str], num_classes: int,
                     background_class: bool):
    """Raises `InvalidArgumentError` for arguments of `get_dataset` that do not fit its `name`."""
    takes_num_classes = name in _COUNTED
    takes_background_class = name == 'tfrecords'
    if (num_classes and not takes_num_classes) or (background_class and not takes_background_class):
        raise InvalidArgumentError('The data set %r has its own number of classes: leave '
                                   'num_classes=%r and background_class=%r out.' % (
                                       name, num_classes, background_class))
    if name in _IN_FOLDERS and data_dir is None:
        raise InvalidArgumentError(
            'The data set %r needs a data_dir, the folder of its files.' % name)
    if name not in _IN_FOLDERS and data_dir is not None:
        place = "in Keras' cache" if name in NAMES else 'part of this package'
        raise InvalidArgumentError('The data set %r is %s and takes no data_dir (%r): leave it out.'
                                   % (name, place, data_dir))


def _tfrecords(data_dir: typing.Any, num_classes: int, background_class: bool,
               **options: typing.Any) -> ImageSet:
    """Makes the data set 'tfrecords'.

    Args:
      data_dir: the folder of the files.
      num_classes: the number of classes, without a background class; 0 to count the lines of
        `labels.txt` in the folder.
      background_class: whether labels begin at 1, and 0 is a class without examples.
      **options: further arguments of `ImageSet`.

    Raises:
      InvalidArgumentError: the number of classes is not known.
    """
    counted_in = None
    if not num_classes:
        counted_in = os.path.join(data_dir, 'labels.txt')
        num_classes = count_classes(counted_in)
    if not num_classes:
        raise InvalidArgumentError('TFRecords do not say how many classes there are, and %s has no '
                                   'labels.txt: give --num_classes.' % data_dir)
    if background_class:
        num_classes += 1
    return ImageSet('tfrecords', record_splits(data_dir), num_classes, counted_in=counted_in,
                    **options)
