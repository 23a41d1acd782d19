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
_COUNTED = re.compile(r'(|.*[-_])(train|validation|test)([-_])(\d+)([-_]of[-_])(\d+)(.*)', re.S)
_PLAIN = re.compile(r'(?:|.*[-_.])(train|validation|test)(?:[-_.].*|)\.tfrecords?', re.S)
_SHOWN = 5  # names, in an error


def record_paths(folder):
    """Sorted paths of the files of each split, and of others that have names of a split.

    Returns:
      `({'train': paths, 'test': paths}, others)`. To test on are the files of `validation`, or of
      `test` where there are none; `others` are files whose kind of name is not taken.

    Raises:
      DatasetError: the folder cannot be read, has no files of a split, or lacks some of those that
        the names count.
    """
    names = [name for name in names_in(folder) if not name.startswith('.')
             and os.path.isfile(os.path.join(folder, name))]
    by_word = {pattern: collections.defaultdict(list) for pattern in (_COUNTED, _PLAIN)}
    for pattern, group in ((_COUNTED, 2), (_PLAIN, 1)):
        for name in names:
            found = pattern.fullmatch(name)
            if found:
                by_word[pattern][found.group(group)].append(name)
    taken = by_word[_COUNTED] or by_word[_PLAIN]
    splits = {split: next((taken[word] for word in words if taken[word]), [])
              for split, words in _WORDS.items()}
    for split, found in splits.items():
        if not found:
            raise DatasetError(
                'There are no TFRecords to %s on in %s: expected names such as %s. The folder has '
                '%s.' % (split, folder, ' or '.join('%s-00000-of-00005' % word
                                                    for word in _WORDS[split]),
                         ', '.join(names[:_SHOWN]) + (' and %d more' % (len(names) - _SHOWN)
                                                      if len(names) > _SHOWN else '')
                         if names else 'no files'))
        _check_whole(folder, found)
    used = set(splits['train'] + splits['test'])
    others = {name for found in by_word.values() for some in found.values() for name in some}
    return ({split: [os.path.join(folder, name) for name in found]
             for split, found in splits.items()},
            [os.path.join(folder, name) for name in sorted(others - used)])


def _check_whole(folder, names):
    """Raises `DatasetError` where the names count more files, or others, than there are.

    A copy under another ending (train-00001-of-00004.bak) and the rest of a set that was written
    anew in another number of files are sets that lack files, too: read, they would give examples
    twice.
    """
    sets = collections.defaultdict(dict)
    for name in names:
        found = _COUNTED.fullmatch(name)
        if found:
            begin, word, dash, number, of, count, ending = found.groups()
            sets[begin + word + dash, of + count, ending][int(number)] = name
    for (begin, of, ending), found in sorted(sets.items()):
        count = int(of[4:])
        first = 1 if 0 not in found and count in found else 0
        wrong = [name for number, name in found.items() if not first <= number < first + count]
        if wrong:
            raise DatasetError('The number of %s is beyond the count in its name: give it another '
                               'name, or move it away.' % os.path.join(folder, wrong[0]))
        lacking = count - len(found)
        if lacking:
            number = next(each for each in range(first, first + count) if each not in found)
            raise DatasetError(
                '%d of the %d files %s*%s%s %s missing, such as %s%0*d%s%s: copy %s again, or move '
                '%s away if it belongs to no such set.' % (
                    lacking, count, os.path.join(folder, begin), of, ending,
                    'is' if lacking == 1 else 'are', begin, len(of) - 4, number, of, ending,
                    'it' if lacking == 1 else 'them', sorted(found.values())[0]))
    twice = collections.Counter(begin for begin, _, _ in sets)
    for (begin, of, ending) in sorted(sets):
        if twice[begin] > 1:
            raise DatasetError(
                '%s*%s%s is one of %d whole sets of the same name: each example would be there '
                'twice. Move the others away.' % (
                    os.path.join(folder, begin), of, ending, twice[begin]))
