"""Images in TFRecords of TensorFlow's usual form: `image/encoded` and `image/class/label`.

A folder holds train-* and validation-* (or test-*). Labels are 0 .. n - 1; or, as the conversion
scripts of slim and TPU write ImageNet, 1 .. n, where 0 is a background class that the network
counts as one more.
"""

import os

import tensorflow.compat.v1 as tf

from datasets.errors import DatasetError
from datasets.image_folder import no_folder
from datasets.record_names import record_paths
from datasets.tfrecords import Records


class RecordImages:
    """The images of one split; a source of `ImageSet`."""

    def __init__(self, pattern, paths, skip_damaged=False):
        self._records = Records(pattern, skip_damaged, paths)
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
      DatasetError: no such folder or files, damaged ones, or one that would be of both splits.
    """
    if not os.path.isdir(data_dir):
        raise DatasetError('%s: expected one with the TFRecords train-* and '
                           'validation-*.' % no_folder(data_dir))
    found = {split: record_paths(data_dir, split) for split in ('train', 'test')}
    return {split: RecordImages(pattern, paths, skip_damaged)
            for split, (pattern, paths) in found.items()}


def count_classes(data_dir):
    """How many classes the `labels.txt` of slim's conversion scripts lists; None without one."""
    path = os.path.join(data_dir, 'labels.txt')
    if not os.path.exists(path):
        return None
    with open(path, 'rb') as lines:  # the names may be of any encoding: they are but counted
        return len([line for line in lines if line.strip()])
