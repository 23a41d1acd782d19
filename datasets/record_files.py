"""Which TFRecord files of a folder are to train on, which to test on, and whether all are there.

`train-00000-of-01024` (ImageNet), `flowers_train_00000-of-00005.tfrecord` (slim) and other names
with `train`, `validation` or `test` right before a number and a count; or, where a folder has none
of these, names that end in `.tfrecord` or `.tfrecords` with one of these words.

Its test is tests/datasets/test_tfrecords.py.
"""

import os
import re
import typing

from datasets.errors import DatasetError, names_in

_WORDS = {'train': ('train',), 'test': ('validation', 'test')}
_COUNTED = re.compile(
    r'(?P<begin>|.*[-_])(?P<word>train|validation|test)[-_](?P<number>\d+)'
    r'(?P<end>[-_]of[-_](?P<count>\d+).*)', re.S)
_PLAIN = re.compile(r'(?:|.*[-_.])(?P<word>train|validation|test)(?:[-_.].*|)\.tfrecords?', re.S)


def record_paths(folder: str) -> typing.Dict[str, typing.List[str]]:
    """Sorted paths of the files of each split: `{'train': paths, 'test': paths}`. The test split
    has the files named `validation`; where there are none, the files named `test`.

    Raises:
      DatasetError: the folder cannot be read, has no files of a split, or lacks some of the files
        that the names count.
    """
    matches = _matches(folder)
    paths = {}
    for split, words in _WORDS.items():
        files = _files_of(matches, words)
        if not files:
            raise DatasetError(
                'There are no TFRecords to %s on in %s: expected names such as %s.' % (
                    split, folder, ' or '.join('%s-00000-of-00005' % word for word in words)))
        have_counts = files[0].re is _COUNTED
        if have_counts:
            _check_whole(folder, files)
        paths[split] = [os.path.join(folder, match.group()) for match in files]
    return paths


def _files_of(matches: typing.List[typing.Match],
              words: typing.Tuple[str, ...]) -> typing.List[typing.Match]:
    """The matches with one of the `words`, the first that any match has; [] if no match has one."""
    for word in words:
        files = [match for match in matches if match.group('word') == word]
        if files:
            return files
    return []


def _matches(folder: str) -> typing.List[typing.Match]:
    """The matches of the names of files with `_COUNTED`; if there is none, with `_PLAIN`."""
    names = []
    for name in names_in(folder):
        is_hidden = name.startswith('.')
        if not is_hidden and os.path.isfile(os.path.join(folder, name)):
            names.append(name)
    for pattern in (_COUNTED, _PLAIN):
        found = [pattern.fullmatch(name) for name in names]
        matches = [match for match in found if match is not None]
        if matches:
            return matches
    return []


class _Set(typing.NamedTuple):
    """Files whose names are alike but for their numbers."""
    files: typing.Dict[int, typing.Match]  # by number

    @property
    def example(self) -> typing.Match:
        """The match of the name of one of the files."""
        return next(iter(self.files.values()))


def _check_whole(folder: str, matches: typing.List[typing.Match]):
    """Raises `DatasetError` where the names of files count other files than there are.

    A copy under another ending (train-00001-of-00004.bak) and the rest of a set that was written
    anew in another number of files would give examples twice. Of train-00000-of-00002 and
    train-00000-of-00003, the name before the number is `train-`, the names after it are
    `-of-00002` and `-of-00003`: they are of two sets.

    Args:
      folder: the folder of the files, for the error.
      matches: the matches of their names with `_COUNTED`.
    """
    sets = {}  # {the name before its number: {the name after its number: the `_Set`}}
    for match in matches:
        sets_by_end = sets.setdefault(match.group('begin'), {})
        files = sets_by_end.setdefault(match.group('end'), _Set({})).files
        files[int(match.group('number'))] = match
    for sets_by_end in sets.values():
        first, *others = sets_by_end.values()
        if others:
            raise DatasetError(
                '%s and %s of %s are of two sets of files, which would give examples twice: move '
                'those of one set away.' % (
                    first.example.group(), others[0].example.group(), folder))
        _check_counted(folder, first)


def _check_counted(folder: str, one_set: _Set):
    """Raises `DatasetError` where the names of a `_Set` count other files than it has."""
    files = one_set.files
    example = one_set.example
    count = int(example.group('count'))
    numbers_begin_at_one = 0 not in files and count in files  # 1 to `count`, else 0 to count - 1
    first = 1 if numbers_begin_at_one else 0
    lacking = [number for number in range(first, first + count) if number not in files]
    if not lacking and len(files) == count:
        return
    missing = ''
    if lacking:
        missing = ', from %d on: number %d is missing' % (first, lacking[0])
    raise DatasetError(
        '%s has %d files %s*%s, and the names count %d%s: copy those that are missing '
        'again, or move these away.' % (
            folder, len(files), example.group()[:example.start('number')], example.group('end'),
            count, missing))
