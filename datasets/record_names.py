"""Which split a TFRecord file is of, by its name.

Names in use: `train-00000-of-01024` (ImageNet), `flowers_train_00000-of-00005.tfrecord` (slim), and
either without a number; with a number also `train_00000-of-00005`, `flowers_train-00000-of-00005`.
What comes before the word is the user's own, and may have such a word in it:
`re_train_flowers_validation_00000-of-00001.tfrecord` is one to test on.
"""

import glob
import os
import re

from datasets.errors import DatasetError
from datasets.folders import names_in

_WORDS = {'train': ('train',), 'test': ('validation', 'test')}
# Forms of names, the best first: as ImageNet has them, as slim does; and, in folders that have
# neither, those where a number has to follow, since files of other kinds have such names as well.
_USUAL, _NUMBERED = ('%s-*', '*_%s_*'), ('%s_*', '*_%s-*')
_FORMS = {split: [form % word for form in _USUAL + _NUMBERED for word in words]
          for split, words in _WORDS.items()}
_WORD = re.compile(r'(^|_)(train|validation|test)(?=([-_])(\d?))')
_NUMBER = re.compile(r'[-_]\d+[-_]of[-_]\d+')
_SHOWN = 5  # names, in an error


def record_paths(data_dir, split):
    """`(pattern, paths)`: the files of a split are those of the first pattern that has any.

    Args:
      data_dir: their folder.
      split: 'train' or 'test'.

    Returns:
      The pattern with its folder, and the sorted paths of its files; the first pattern of all and
      an empty list if there are none.

    Raises:
      DatasetError: a file would be of both splits.
    """
    # The folder is a name, whatever is in it: only the files' part is a pattern.
    patterns = [os.path.join(glob.escape(data_dir), form) for form in _FORMS[split]]
    for pattern in patterns:
        paths = [path for path in sorted(glob.glob(pattern))
                 if os.path.isfile(path) and _form(path) == os.path.basename(pattern)]
        if paths:
            return pattern, paths
    return patterns[0], []


def other_record_paths(data_dir, split, taken):
    """Sorted paths of the files that are of a split by their names, but for those `taken`."""
    found = set()
    for form in _FORMS[split]:
        found.update(path for path in glob.glob(os.path.join(glob.escape(data_dir), form))
                     if os.path.isfile(path) and _form(path) == form)
    return sorted(found - set(taken))


def is_record_name(path):
    """Whether a file is one of TFRecords by its name."""
    return _form(path) is not None


def no_files(data_dir, split):
    """The text of the error about a folder without files of a split."""
    forms, words = _FORMS[split], _WORDS[split]
    usual, numbered = forms[:2 * len(words)], forms[2 * len(words):]
    names = [name for name in names_in(data_dir) if not name.startswith('.')]
    # Those of the other split are no names to be mended, and may be many.
    other = set(record_paths(data_dir, 'test' if split == 'train' else 'train')[1])
    names = [name for name in names if os.path.join(data_dir, name) not in other] or names
    more = len(names) - _SHOWN
    there = 'The folder has %s%s.' % (
        ', '.join(names[:_SHOWN]), ' and %d more' % more if more > 0 else '')
    return ('There are no files %s to %s on: expected TFRecords named %s, or with a number %s. '
            '%s' % (os.path.join(data_dir, forms[0]), split, ', '.join(usual),
                    ', '.join(form[:-1] + '00000-of-00005' for form in numbered),
                    there if names else 'The folder is empty.'))


def _form(path):
    """The form by which a file's name says its split; None if it does not.

    What says it is the word right before the number of the file. Where none stands there, all words
    of the name have to say the same.
    """
    name = os.path.basename(path)
    numbers = [match.start() for match in _NUMBER.finditer(name)]
    found = []  # of each word: (split, form, whether the number of the file follows)
    for match in _WORD.finditer(name):
        before, word, after, digit = match.groups()
        form = ('*' + before if before else '') + '%s' + after + '*'
        split = 'train' if word == 'train' else 'test'
        found.append((split, form % word if form in _USUAL or digit else None,
                      match.end() in numbers))
    numbered = [form for _, form, is_numbered in found if is_numbered]
    if numbered:
        return numbered[-1]
    forms = [form for _, form, _ in found if form is not None]
    if forms and len({split for split, _, _ in found}) > 1:
        raise DatasetError('%s is to train on and to test on by its name: expected train, '
                           'validation or test right before its number, as in '
                           'flowers_train_00000-of-00005.tfrecord. Give it another name, or move '
                           'it away.' % path)
    return forms[0] if forms else None
