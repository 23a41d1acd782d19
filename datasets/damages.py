"""What is wrong with whole files of a data set, and how many bad ones there are, as text."""

import collections

from datasets.folders import CANNOT_READ

Damage = collections.namedtuple('Damage', 'text count short')
Damage.__new__.__defaults__ = (1, '')
"""What is wrong with whole files of a split.

Fields:
  text: which files, and what is wrong.
  count: how many files it is about.
  short: the same for an error, where the text may be long; '' where it is not.
"""

# Of a file of records, which would give examples twice.
STRAY = ('%s does not fit the names of the other files, such as %s: move it away, or name it as '
         'they are')
TWICE = ('%s is the same file as %s, by a link, and its examples would be there twice: put the '
         'file in its place that has this name, or remove it')

# Of a class folder.
NO_IMAGES = 'The folder %s has no images: expected files %s.'


def number_of(found):
    """How many a list of `Bad`s counts as."""
    return sum(bad.count for bad in found)


def counted(found):
    """How many of a list of `Bad`s there are, as text: '1 damaged file (…), 2 bad examples'."""
    whole = [bad for bad in found if bad.number is None]
    empty, closed = (sum(bad.text.startswith(text.split('%s')[0]) for bad in whole)
                     for text in (NO_IMAGES, CANNOT_READ))
    surplus = sum(text.split('%s')[1] in bad.text for text in (STRAY, TWICE) for bad in whole)
    files, examples = number_of(whole) - empty - closed - surplus, len(found) - len(whole)
    parts = []
    if files:
        parts.append('%d damaged file%s (what %s lost is not counted)' % (
            files, '' if files == 1 else 's', 'it has' if files == 1 else 'they have'))
    if surplus:
        parts.append('%d file%s left out beside the others' % (
            surplus, '' if surplus == 1 else 's'))
    if empty:
        parts.append('%d class folder%s without images' % (empty, '' if empty == 1 else 's'))
    if closed:
        parts.append('%d class folder%s that cannot be read' % (closed, '' if closed == 1 else 's'))
    if examples or not whole:
        parts.append('%d bad example%s' % (examples, '' if examples == 1 else 's'))
    return ', '.join(parts)
