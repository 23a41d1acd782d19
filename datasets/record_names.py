"""Which split a TFRecord file is of, by its name.

Names in use: `train-00000-of-01024` (ImageNet), `flowers_train_00000-of-00005.tfrecord` (slim), and
either without a number. What comes before the word is the user's own, and may have such a word in
it: `re_train_flowers_validation_00000-of-00001.tfrecord` is one to test on.
"""

import glob
import os
import re

from datasets.errors import DatasetError

# Of each split the words, the best first, as ImageNet's names have them, and then as slim's do.
_FORMS = {'train': ('train-*', '*_train_*'),
          'test': ('validation-*', 'test-*', '*_validation_*', '*_test_*')}
_WORD = re.compile(r'(?:^(train|validation|test)(?=-)|_(train|validation|test)(?=_))')
_NUMBER = re.compile(r'[-_]\d+[-_]of[-_]\d+')


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


def _form(path):
    """The form by which a file's name says its split; None if it does not.

    What says it is the word right before the number of the file. Where none stands there, all words
    of the name have to say the same.
    """
    name = os.path.basename(path)
    numbers = [match.start() for match in _NUMBER.finditer(name)]
    found = [('%s-*' % match.group(1) if match.group(1) else '*_%s_*' % match.group(2),
              match.end()) for match in _WORD.finditer(name)]
    numbered = [form for form, end in found if end in numbers]
    if numbered or not found:
        return numbered[-1] if numbered else None
    if len({form in _FORMS['train'] for form, _ in found}) > 1:
        raise DatasetError('%s is to train on and to test on by its name: expected train, '
                           'validation or test right before its number, as in '
                           'flowers_train_00000-of-00005.tfrecord. Give it another name, or move '
                           'it away.' % path)
    return found[0][0]
