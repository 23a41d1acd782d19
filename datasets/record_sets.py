"""Sets of TFRecord files whose names count them: what is missing, and what does not belong there.

A set has the beginning, the count and the ending of its names in common, as those of
train-00000-of-00008 or flowers_train_00000-of-00005.tfrecord.
"""

import collections
import os
import re

from datasets.damages import Damage
from datasets.errors import DatasetError

_SHARD = re.compile(r'(.*?)(\d+)([-_]of[-_])(\d+)(.*)', re.S)
_NAMED = 3  # missing files; of more the numbers are given
_SHOWN = 8  # ranges of such numbers, in an error


class _Set(collections.namedtuple('_Set', 'begin of ending')):
    """A set: the folder and beginning of its names, `-of-00008`, and their ending."""
    __slots__ = ()

    def count(self):
        """How many files its names count."""
        return int(self.of[4:])

    def digits(self, number):
        """The number of one of its files as its name has it."""
        return '%0*d' % (len(self.of) - 4, number)

    def name(self, number):
        """The name of one of its files."""
        return '%s%s%s%s' % (self.begin, self.digits(number), self.of, self.ending)

    def numbers(self, found):
        """The numbers that its files should have; some sets begin with 1."""
        first = 1 if 0 not in found and self.count() in found else 0
        return range(first, first + self.count())

    def __str__(self):
        return '%s*%s%s' % self


def strays_of(paths):
    """Of files some of whose names count them, those that no set has: a list of paths.

    Files without a count; copies of others by another ending (train-00001-of-00004.bak); numbers
    beyond the count (train-00003-of-00003); files of a set that is not whole, beside a whole one
    of the same beginning.
    """
    counted = {path: _SHARD.match(os.path.basename(path)) for path in paths}
    if not any(counted.values()):
        return []
    places = {path: found.groups()[:4] for path, found in counted.items() if found}
    endings = collections.Counter(counted[path].group(5) for path in places)

    def rank(path):
        ending = counted[path].group(5)
        return -endings[ending], len(ending), ending
    strays = [path for path in paths if path not in places or any(
        places[other] == places[path] and rank(other) < rank(path) for other in places)]
    sets = _sets([path for path in paths if path not in strays])
    whole = {each.begin for each, found in sets.items() if not _missing(each, found)}
    for each, found in sets.items():
        is_stray = each.begin in whole and _missing(each, found)
        strays += [path for number, some in found.items() for path in some
                   if is_stray or number not in each.numbers(found)]
    return sorted(strays)


def same_files(paths):
    """Of sorted paths, those that lead by a link to the file of an earlier one: a dict to that one.
    """
    files, found = {}, {}
    for path in paths:
        try:
            state = os.stat(path)
        except OSError:  # it has gone since, which whoever reads it says
            continue
        # Size and time as well: the numbers that some network file systems give are not unique.
        first = files.setdefault((state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns),
                                 path)
        if first != path:
            found[path] = first
    return found


def missing_of(paths):
    """A `Damage` for each set of files whose names count more of them than there are.

    Raises:
      DatasetError: two whole sets are the same but for their count.
    """
    damages, whole = [], {}
    for each, found in sorted(_sets(paths).items()):
        missing = _missing(each, found)
        other = whole.setdefault((each.begin, each.ending), each) if not missing else each
        if other != each:
            raise DatasetError(
                'The files %s and %s are two whole sets: written anew in another number of files, '
                'say, with each example in both. Move one set away, or give it another name.'
                % (other, each))
        if missing:
            damages.append(_damage(each, missing))
    return damages


def _missing(each, found):
    """The numbers of the files that a set lacks: list of the first and last ones of ranges."""
    wanted = each.numbers(found)
    there = sorted(number for number in found if number in wanted)
    return [(before + 1, after - 1)
            for before, after in zip([wanted.start - 1] + there, there + [wanted.stop])
            if after - before > 1]


def _damage(each, missing):
    """The `Damage` of a set that lacks files, see `_missing`."""
    count = sum(last - first + 1 for first, last in missing)
    if count <= _NAMED:
        parts = [each.name(number) for first, last in missing for number in range(first, last + 1)]
    else:
        parts = [each.digits(first) + ('' if first == last else ' to ' + each.digits(last))
                 for first, last in missing]

    def text(most):
        more = sum(last - first + 1 for first, last in missing[most:])
        return '%d of the %d files %s %s missing: %s%s%s. Copy %s again.' % (
            count, each.count(), each, 'is' if count == 1 else 'are',
            '' if count <= _NAMED else 'those numbered ', ', '.join(parts[:most]),
            ' and %d more' % more if more else '', 'it' if count == 1 else 'them')
    return Damage(text(len(parts)), count, text(_SHOWN))


def _sets(paths):
    """`{_Set: {number: paths}}` of files; those without a count are left out."""
    sets = {}
    for path in paths:
        folder, name = os.path.split(path)
        counted = _SHARD.match(name)
        if counted:
            begin, number, of, count, rest = counted.groups()
            glued = max(0, len(number) - len(count))  # digits that end the name before the number
            # Some names have a checksum after the count, each its own.
            ending = rest if rest[:1] in ('', '.') else '*' + os.path.splitext(rest)[1]
            key = _Set(os.path.join(folder, begin + number[:glued]), of + count, ending)
            sets.setdefault(key, {}).setdefault(int(number[glued:]), []).append(path)
    return sets
