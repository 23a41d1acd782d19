"""Images in TFRecords of TensorFlow's usual form: `image/encoded` and `image/class/label`.

A folder holds train-* and validation-* (or test-*). Labels are 0 .. n - 1; or, as the conversion
scripts of slim and TPU write ImageNet, 1 .. n, where 0 is a background class that the network
counts as one more.
"""

import os

import tensorflow.compat.v1 as tf

from datasets.errors import DatasetError
from datasets.record_files import record_paths
from datasets.tfrecords import Records
from towers.safe_files import read_data

_MOST_BYTES = 2 ** 26  # of labels.txt


class RecordImages:
    """The images of one split; a source of `ImageSet`."""

    def __init__(self, paths, others=()):
        """
        Args:
          paths: as for `Records`.
          others: paths of files that have names of a split, too, and are left alone.
        """
        self._records, self.others = Records(paths), list(others)
        self.name, self.where = self._records.name, self._records.where
        self.is_intact = self._records.is_intact

    def __len__(self):
        return len(self._records)

    def names(self):
        """What images are numbered by: list of the files' names."""
        return [os.path.basename(path) for path in self._records.paths]

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


def _only(features, name, kind):
    if name not in features:
        raise DatasetError('has no feature %r, but %s' % (
            name, ', '.join(repr(each) for each in sorted(features)) or
            'none at all: is it a tf.train.Example?'))
    found = features[name].WhichOneof('kind')
    if found not in (kind, None):
        raise DatasetError('has a feature %r of the kind %s: expected %s' % (name, found, kind))
    values = getattr(features[name], kind).value
    if len(values) != 1:
        raise DatasetError('has %d values of %r: expected one' % (len(values), name))
    return values[0]


def record_splits(data_dir):
    """{'train': RecordImages, 'test': RecordImages} of a folder.

    Raises:
      DatasetError: no such folder or files, a folder that cannot be read, damaged files.
    """
    paths, others = record_paths(data_dir)
    return {'train': RecordImages(paths['train'], others), 'test': RecordImages(paths['test'])}


def labels_path(data_dir):
    """The path of the `labels.txt` of slim's conversion scripts."""
    return os.path.join(data_dir, 'labels.txt')


def count_classes(data_dir):
    """How many classes the `labels.txt` of a folder lists, a line each; None without one.

    Raises:
      DatasetError: it lists none, or cannot be read.
    """
    path = labels_path(data_dir)
    try:
        data = read_data(path, _MOST_BYTES)
    except OSError as error:
        raise DatasetError('Cannot read %s: %s.' % (path, error.strerror or error))
    if data is None:
        return None
    # The names may be of any encoding: they are but counted.
    count = sum(bool(line.strip()) for line in data.splitlines())
    if not count:
        raise DatasetError('%s lists no class: expected a line for each, such as 0:daisy; or give '
                           '--num_classes.' % path)
    return count
