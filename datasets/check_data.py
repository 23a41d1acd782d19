"""`--mode=check_data`: reads a data set once, and says what is in it."""

import collections

import numpy as np

from datasets.bad_examples import write_list
from datasets.errors import DatasetError
from towers.errors import shown

_LISTED = 20  # classes


def check_data(dataset, say=print, bad_list=None):
    """Reads and decodes every example, and says what there is: classes, sizes, bad examples.

    Args:
      dataset: as of `datasets.get_dataset`.
      say: called with each line.
      bad_list: path of the list of bad examples to write, see `bad_examples`; None: none.

    Returns:
      How many examples are bad.

    Raises:
      DatasetError: it is no set of files.
      LogFileError: the list cannot be written.
    """
    listed = []
    for split in ('train', 'test'):
        labels, sizes, bad = _looked_at(dataset, split)
        for line in _lines(split, labels, sizes, bad, dataset.num_classes,
                           getattr(dataset, 'classes', None)):
            say(line)
        others = dataset.not_taken(split) if hasattr(dataset, 'not_taken') else ()
        if others:
            say('  left alone   %d other file%s or folder%s, such as %s' % (
                len(others), *['' if len(others) == 1 else 's'] * 2, shown(others[0])))
        listed += bad
    say('check          %s' % ('every example can be used' if not listed else '%d bad example%s' % (
        len(listed), '' if len(listed) == 1 else 's')))
    if bad_list is not None:
        write_list(bad_list, listed)
        say('list           %s' % shown(bad_list))
    return len(listed)


def _looked_at(dataset, split):
    """`(labels, sizes, bad)`: counts of labels, and of (height, width, channels); and pairs of a
    bad example's name in a list and what is wrong."""
    labels, sizes, bad = collections.Counter(), collections.Counter(), []
    if hasattr(dataset, 'look'):
        for number in range(dataset.num_examples[split]):
            try:
                size, label = dataset.look(split, number)
            except DatasetError as error:
                bad.append((dataset.listed_name(split, number), str(error)))
                continue
            sizes[size] += 1
            labels[label] += 1
    elif hasattr(dataset, 'load'):
        images, found = dataset.load(split)
        good = (found >= 0) & (found < dataset.num_classes) & np.isfinite(images).all((1, 2, 3))
        bad = [('%s/%d' % (split, number), 'example %d of the %s set has the label %d, or pixels '
                'that are not finite' % (number, split, found[number]))
               for number in np.flatnonzero(~good)]
        labels.update(found[good].tolist())
        sizes[images.shape[1:]] += int(good.sum())
    else:
        raise DatasetError('%s is no set of files that could be checked.' % dataset.name)
    return labels, sizes, bad


def _lines(split, labels, sizes, bad, num_classes, classes):
    """The report on a split, line by line."""
    count = sum(labels.values())
    yield '%-14s %s images that can be used, %d bad' % (split, '{:,}'.format(count), len(bad))
    if count:
        counts = [labels[label] for label in range(num_classes)]
        yield '  classes      %d of %d, %d to %d images each' % (
            sum(number > 0 for number in counts), num_classes, min(counts), max(counts))
        present = [(label, number) for label, number in enumerate(counts)
                   if number or num_classes <= _LISTED]
        for label, number in present[:_LISTED]:
            yield '    %5d %-20s %s' % (label, shown(classes[label]) if classes else '',
                                        '{:,}'.format(number))
        if len(present) > _LISTED:
            yield '    ... %d more' % (len(present) - _LISTED)
        heights, widths, channels = zip(*sizes.elements())
        for name, values in (('height', heights), ('width', widths)):
            yield '  %-12s %d to %d pixels, median %d' % (
                name, min(values), max(values), np.median(values))
        yield '  channels     %s' % ', '.join(
            '%d: %s' % (each, '{:,}'.format(number))
            for each, number in sorted(collections.Counter(channels).items()))
    for _, text in bad:
        yield '  bad          %s' % text
