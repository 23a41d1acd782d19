"""Images in TFRecords of TensorFlow's usual form: `image/encoded` and `image/class/label`.

A folder holds train-* and validation-* (or test-*). Labels are 0 .. n - 1; or, as the conversion
scripts of slim and TPU write ImageNet, 1 .. n, where 0 is a background class that the network
counts as one more.
"""

import os
import re

import tensorflow.compat.v1 as tf

from datasets.errors import DatasetError
from datasets.folders import names_in, no_folder
from datasets.record_names import no_files, other_record_paths, record_paths
from datasets.tfrecords import Records
from towers.safe_files import read_data

# UTF-8 may begin with a mark.
_MOST_BYTES = 2 ** 26  # of labels.txt
_NUMBERED_LINE = re.compile(b'(?:\xef\xbb\xbf)?\\s*(\\d{1,9})\\s*:')


class RecordImages:
    """The images of one split; a source of `ImageSet`."""

    def __init__(self, pattern, paths, skip_damaged=False, others=()):
        """
        Args:
          pattern, paths, skip_damaged: as for `Records`.
          others: paths of files that have names of the split, too, and are left alone.
        """
        self._records = Records(pattern, skip_damaged, paths)
        self.damages, self.others = self._records.damages, others

    def __len__(self):
        return len(self._records)

    def where(self, number):
        """File, number and offset of a record."""
        return self._records.where(number)

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

    def is_intact(self, number):
        """Whether a record has the checksum that is written behind it."""
        return self._records.is_intact(number)


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


def record_splits(data_dir, skip_damaged=False):
    """{'train': RecordImages, 'test': RecordImages} of a folder.

    Raises:
      DatasetError: no such folder or files, a folder that cannot be read, damaged files, or one
        that would be of both splits.
    """
    if not os.path.isdir(data_dir):
        raise DatasetError('%s: expected one with the TFRecords train-* and '
                           'validation-*.' % no_folder(data_dir))
    names_in(data_dir)  # where that is not allowed, nothing seems to be in it
    found = {split: record_paths(data_dir, split) for split in ('train', 'test')}
    for split, (_, paths) in found.items():
        if not paths:
            raise DatasetError(no_files(data_dir, split))
    return {split: RecordImages(pattern, paths, skip_damaged,
                                other_record_paths(data_dir, split, paths))
            for split, (pattern, paths) in found.items()}


def labels_path(data_dir):
    """The path of the `labels.txt` of slim's conversion scripts."""
    return os.path.join(data_dir, 'labels.txt')


def count_classes(data_dir, background_class=False):
    """How many classes the `labels.txt` of a folder lists; None without one.

    A line is `0:daisy`, as slim writes it, or a name alone, on all lines.

    Args:
      data_dir: the folder.
      background_class: labels begin at 1, and so may the numbers in the file.

    Raises:
      DatasetError: it lists none, cannot be read, or its numbers are not 0, 1, 2, … each once.
    """
    path = labels_path(data_dir)
    try:
        data = read_data(path, _MOST_BYTES)
        if data is None:
            return None
        # The names may be of any encoding: they are but counted.
        lines = [line for line in data.splitlines() if line.strip()]
    except OSError as error:
        raise DatasetError('Cannot read %s: %s.' % (path, error.strerror or error))
    if not lines:
        raise DatasetError('%s lists no class: expected a line for each, such as 0:daisy; or give '
                           '--num_classes.' % path)
    numbers = [int(found.group(1)) for found in map(_NUMBERED_LINE.match, lines) if found]
    if numbers:
        _check_numbers(path, numbers, len(lines), background_class)
    return len(lines)


def _check_numbers(path, numbers, count, background_class):
    if len(numbers) < count:
        wrong = '%d of its %d lines have none' % (count - len(numbers), count)
    else:
        first = 1 if background_class and 0 not in numbers else 0
        wanted = set(range(first, first + count))
        lacking = sorted(wanted - set(numbers))
        if not lacking:
            return
        if not background_class and set(numbers) == set(range(1, count + 1)):
            raise DatasetError(
                '%s numbers its %d classes from 1: give --background_class where the labels of the '
                'records begin at 1 as well, or number them from 0.' % (path, count))
        twice = sorted(number for number in set(numbers) if numbers.count(number) > 1)
        wrong = '%d is missing%s' % (lacking[0], ', and %d is there twice' % twice[0] if twice
                                     else '')
    raise DatasetError('%s numbers its classes otherwise than 0, 1, 2 and so on, each once: %s. '
                       'Mend it, or give --num_classes, which is then used in its place.' % (
                           path, wrong))
