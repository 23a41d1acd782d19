"""Images in TFRecords of TensorFlow's usual form: `image/encoded` and `image/class/label`.

A folder holds train-* and validation-* (or test-*). Labels are 0 .. n - 1; or, as the conversion
scripts of slim and TPU write ImageNet, 1 .. n, where 0 is a background class: the network then has
n + 1 classes.

Its test is tests/datasets/test_sets.py.
"""

import os
import typing

import tensorflow.compat.v1 as tf

from datasets.errors import DatasetError
from datasets.record_files import record_paths
from datasets.tfrecords import Records
from towers.safe_files import read_data

_MOST_BYTES = 2 ** 26  # of labels.txt


class RecordImages(Records):
    """The images of one split; a source of `ImageSet`."""

    def names(self) -> typing.List[str]:
        """List of the files' names. Images are numbered in the order of the files."""
        return [os.path.basename(path) for path in self.paths]

    def image(self, number: int) -> typing.Tuple[bytes, int]:
        """`(encoded, label)` of an image.

        Raises:
          DatasetError: the record cannot be read, is no `tf.train.Example`, or lacks a feature; the
            text begins with a verb, to follow the name of the file.
        """
        data = self.read(number)
        example = tf.train.Example()
        try:
            example.ParseFromString(data)
        except Exception as error:  # versions of protobuf raise errors of different types
            raise DatasetError('is no tf.train.Example: %s' % error)
        return (_only(example, 'image/encoded', 'bytes_list'),
                _only(example, 'image/class/label', 'int64_list'))


def _only(example: tf.train.Example, name: str, kind: str):
    """The only value of the feature of a `name`, in a list of a `kind`, of a `tf.train.Example`."""
    features = example.features.feature
    if name not in features:
        names = ', '.join(repr(each) for each in sorted(features))
        raise DatasetError('has no feature %r, but %s' % (
            name, names or 'none at all: is it a tf.train.Example?'))
    values = getattr(features[name], kind).value
    if len(values) != 1:
        raise DatasetError('has a feature %r of the kind %s with %d values of %s: expected one' % (
            name, features[name].WhichOneof('kind'), len(values), kind))
    return values[0]


def record_splits(data_dir: str) -> typing.Dict[str, RecordImages]:
    """The images of a folder: a dict from 'train' and 'test' to `RecordImages`.

    Raises:
      DatasetError: no such folder or files, a folder that cannot be read, damaged files.
    """
    return {split: RecordImages(paths) for split, paths in record_paths(data_dir).items()}


def count_classes(path: str) -> typing.Optional[int]:
    """How many classes a `labels.txt` of slim's conversion scripts lists, a line each; None where
    there is no such file.

    Raises:
      DatasetError: the file lists no class, or cannot be read.
    """
    try:
        data = read_data(path, _MOST_BYTES)
    except OSError as error:
        raise DatasetError('Cannot read %s: %s.' % (path, error.strerror or error))
    if data is None:
        return None
    # The lines are only counted, as bytes: the names in them may be of any encoding.
    count = len([line for line in data.splitlines() if line.strip()])
    if not count:
        raise DatasetError('%s lists no class: expected a line for each, such as 0:daisy; or give '
                           '--num_classes.' % path)
    return count
