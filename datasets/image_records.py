"""Images in TFRecords of TensorFlow's usual form: `image/encoded` and `image/class/label`.

A folder holds train-* and validation-* (or test-*). Labels are 0 .. n - 1; or, as the conversion
scripts of slim and TPU write ImageNet, 1 .. n, where 0 is a background class that the network
counts as one more.
"""

import glob
import os

import tensorflow.compat.v1 as tf

from datasets.errors import DatasetError
from datasets.image_folder import no_folder
from datasets.tfrecords import Records

# As ImageNet's are named, and as slim's flowers are.
_TRAIN = ('train-*', '*_train_*')
_TEST = ('validation-*', 'test-*', '*_validation_*', '*_test_*')


class RecordImages:
    """The images of one split; a source of `ImageSet`."""

    def __init__(self, pattern, skip_damaged=False):
        self._records = Records(pattern, skip_damaged)
        self.damages = self._records.damages

    def __len__(self):
        return len(self._records)

    def where(self, number):
        """File, number and offset of a record."""
        return self._records.where(number)

    def image(self, number):
        """`(encoded, label)` of an image.

        Raises:
          DatasetError: the record cannot be read, is no `tf.train.Example`, or lacks a feature.
        """
        data = self._records.read(number)
        example = tf.train.Example()
        try:
            example.ParseFromString(data)
            features = example.features.feature
            return (_only(features, 'image/encoded', 'bytes_list'),
                    _only(features, 'image/class/label', 'int64_list'))
        except DatasetError:
            raise
        except Exception as error:  # of a protobuf version's own type
            raise DatasetError('%s is no tf.train.Example: %s' % (self.where(number), error))

    def is_intact(self, number):
        """Whether a record has the checksum that is written behind it."""
        return self._records.is_intact(number)


def _only(features, name, kind):
    if name not in features:
        raise DatasetError('has no feature %r, but %s' % (
            name, ', '.join(repr(each) for each in sorted(features)) or 'none at all'))
    found = features[name].WhichOneof('kind')
    if found not in (kind, None):
        raise DatasetError('has a feature %r of the kind %s: expected %s' % (name, found, kind))
    values = getattr(features[name], kind).value
    if len(values) != 1:
        raise DatasetError('has %d values of %r: expected one' % (len(values), name))
    return values[0]


def record_splits(data_dir, skip_damaged=False):
    """{'train': RecordImages, 'test': RecordImages} of a folder.

    Raises:
      DatasetError: no such folder or files, or damaged ones.
    """
    if not os.path.isdir(data_dir):
        raise DatasetError('%s: expected one with the TFRecords train-* and '
                           'validation-*.' % no_folder(data_dir))
    return {split: RecordImages(_pattern(data_dir, names), skip_damaged)
            for split, names in (('train', _TRAIN), ('test', _TEST))}


def _pattern(data_dir, names):
    """The first of the patterns that any file has; the first of all if none has."""
    # The folder is a name, whatever is in it: only the files' part is a pattern.
    patterns = [os.path.join(glob.escape(data_dir), name) for name in names]
    return next((pattern for pattern in patterns if glob.glob(pattern)), patterns[0])


def count_classes(data_dir):
    """How many classes the `labels.txt` of slim's conversion scripts lists; None without one."""
    path = os.path.join(data_dir, 'labels.txt')
    if not os.path.exists(path):
        return None
    with open(path, 'rb') as lines:  # the names may be of any encoding: they are but counted
        return len([line for line in lines if line.strip()])
