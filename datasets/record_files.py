"""Which TFRecord files of a folder are to train on, which to test on, and whether all are there.

`train-00000-of-01024` (ImageNet), `flowers_train_00000-of-00005.tfrecord` (slim) and other names
with `train`, `validation` or `test` right before a number and a count; or, where a folder has none
of these, names that end in `.tfrecord` or `.tfrecords` with one of these words.
"""

import collections
import os
import re

from datasets.errors import DatasetError, names_in

_WORDS = {'train': ('train',), 'test': ('validation', 'test')}
_COUNTED = re.compile(
    r'(?P<begin>|.*[-_])(?P<word>train|validation|test)[-_](?P<number>\d+)'
    r'(?P<end>[-_]of[-_](?P<count>\d+).*)', re.S)
_PLAIN = re.compile(r'(?:|.*[-_.])(?P<word>train|validation|test)(?:[-_.].*|)\.tfrecords?', re.S)


def record_paths(folder):
    """Sorted paths of the files of each split: `{'train': paths, 'test': paths}`. To test on are
    the files of `validation`, or of `test` where there are none.

    Raises:
      DatasetError: the folder cannot be read, has no files of a split, or lacks some of those that
        the names count.
    """
    names = [name for name in names_in(folder) if not name.startswith('.')
             and os.path.isfile(os.path.join(folder, name))]
    found = ([_COUNTED.fullmatch(name) for name in names if _COUNTED.fullmatch(name)]
             or [_PLAIN.fullmatch(name) for name in names if _PLAIN.fullmatch(name)])
    paths = {}
    for split, words in _WORDS.items():
        files = next(filter(None, ([each for each in found if each.group('word') == word]
                                   for word in words)), [])
        if not files:
            raise DatasetError(
                'There are no TFRecords to %s on in %s: expected names such as %s.' % (
                    split, folder, ' or '.join('%s-00000-of-00005' % word for word in words)))
        if files[0].re is _COUNTED:
            _check_whole(folder, files)
        paths[split] = [os.path.join(folder, each.group()) for each in files]
    return paths


def _check_whole(folder, files):
    """Raises `DatasetError` where the names of matches count more files, or others, than there are.

    A copy under another ending (train-00001-of-00004.bak) and the rest of a set that was written
    anew in another number of files would give examples twice.
    """
    sets = collections.defaultdict(dict)
    for each in files:
        ends = sets[each.group('begin')]
        ends.setdefault(each.group('end'), {})[int(each.group('number'))] = each
    for ends in sets.values():
        examples = [next(iter(numbered.values())) for numbered in ends.values()]
        if len(examples) > 1:
            raise DatasetError(
                '%s and %s of %s are of two sets of files, which would give examples twice: move '
                'those of one set away.' % (examples[0].group(), examples[1].group(), folder))
        (numbered,), example = ends.values(), examples[0]
        count = int(example.group('count'))
        first = 1 if 0 not in numbered and count in numbered else 0
        wanted = (number for number in range(first, first + count) if number not in numbered)
        lacking = next(wanted, None)
        if lacking is not None or len(numbered) != count:
            raise DatasetError(
                '%s has %d files %s*%s, and the names count %d%s: copy those that are missing '
                'again, or move these away.' % (
                    folder, len(numbered), example.group()[:example.start('number')],
                    example.group('end'), count, '' if lacking is None else
                    ', from %d on: number %d is missing' % (first, lacking)))
