"""`--mode=check_data`: reads a data set once, and says what is in it."""

import collections
import os

import numpy as np

from datasets.bad_examples import Bad
from datasets.damages import counted, number_of
from datasets.errors import DatasetError
from datasets.image_folder import is_image, is_special, is_test_folder
from datasets.record_names import is_record_name
from towers.errors import shown

_LISTED = 20  # classes


def check_data(dataset, say=print):
    """Reads and decodes every example, and says what there is: classes, sizes, bad examples.

    Args:
      dataset: as of `datasets.get_dataset`.
      say: called with each line.

    Returns:
      How many examples and files are bad.
    """
    bad = []
    for split in ('train', 'test'):
        report = _check_split(dataset, split)
        for line in report.lines(split, dataset.num_classes, getattr(dataset, 'classes', None)):
            say(line)
        others = dataset.not_taken(split) if hasattr(dataset, 'not_taken') else ()
        for kind, paths in _left_alone(others):
            say('  left alone   %d %s, such as %s' % (len(paths), kind, shown(paths[0])))
        bad += report.bad
    say('check          %s' % (counted(bad) if bad else 'every example can be used'))
    return number_of(bad)


class _Report:

    def __init__(self):
        self.labels, self.sizes = collections.Counter(), collections.Counter()
        self.bad = []

    def lines(self, split, num_classes, classes):
        """What was found, line by line."""
        count = sum(self.labels.values())
        examples = [bad for bad in self.bad if bad.number is not None]
        files = len(self.bad) - len(examples)
        yield '%-14s %s images that can be used, %d bad%s' % (
            split, '{:,}'.format(count), len(examples),
            ', and %s' % counted([bad for bad in self.bad if bad.number is None]) if files else '')
        if count:
            counts = [self.labels[label] for label in range(num_classes)]
            yield '  classes      %d of %d, %d to %d images each' % (
                sum(number > 0 for number in counts), num_classes, min(counts), max(counts))
            present = [(label, number) for label, number in enumerate(counts)
                       if number or num_classes <= _LISTED]
            for label, number in present[:_LISTED]:
                yield '    %5d %-20s %s' % (label, shown(classes[label]) if classes else '',
                                            '{:,}'.format(number))
            if len(present) > _LISTED:
                yield '    ... %d more' % (len(present) - _LISTED)
            if len(present) < num_classes:  # of so many, those without one are counted
                yield '    %d of the %d classes have no image' % (num_classes - len(present),
                                                                  num_classes)
            heights, widths, channels = zip(*self.sizes.elements())
            yield '  height       %s' % _range(heights)
            yield '  width        %s' % _range(widths)
            yield '  channels     %s' % ', '.join('%d: %s' % (each, '{:,}'.format(number)) for
                                                  each, number in sorted(
                                                      collections.Counter(channels).items()))
        for bad in self.bad:  # all: what is not listed would have to be found one run at a time
            yield '  bad          %s' % bad.text


def _left_alone(paths):
    """Pairs of a text and the paths that it is true of, for what stands among images."""
    found = collections.OrderedDict()
    for path in paths:
        if os.path.isdir(path) and is_test_folder(path):
            kind = 'folder%s of test images that %s not read, since there is one that comes before'
        elif os.path.isdir(path):
            kind = 'folder%s in a class folder that %s not looked into'
        elif is_special(path):
            kind = 'pipe%s or the like that %s no file'
        elif is_image(path):
            kind = 'image%s beside the class folders that %s of no class'
        elif is_record_name(path):
            kind = 'file%s that %s of this part by name and not read, since others come before'
        else:
            kind = 'file%s that %s no JPEG or PNG by name'
        found.setdefault(kind, []).append(path)
    return [(kind % (('', 'is') if len(each) == 1 else ('s', 'are')), each)
            for kind, each in found.items()]


def _range(values):
    return '%d to %d pixels, median %d' % (min(values), max(values), np.median(values))


def _check_split(dataset, split):
    report = _Report()
    if hasattr(dataset, 'look'):
        report.bad += [bad for bad in dataset.skipped.examples
                       if bad.split == split and bad.number is None]
        for number in range(dataset.num_examples[split]):
            try:
                size, label = dataset.look(split, number, checksum=True)
            except DatasetError as error:
                report.bad.append(Bad(split, number, -1, str(error)))
                continue
            report.sizes[size] += 1
            report.labels[label] += 1
    elif hasattr(dataset, 'load'):
        images, labels = dataset.load(split)
        good = (labels >= 0) & (labels < dataset.num_classes) & np.isfinite(images).all((1, 2, 3))
        report.bad += [
            Bad(split, int(number), -1, 'example %d of the %s set has the label %d, or pixels that '
                'are not finite' % (number, split, labels[number]))
            for number in np.flatnonzero(~good)]
        report.labels.update(labels[good].tolist())
        report.sizes[images.shape[1:]] += int(good.sum())
    else:
        raise DatasetError('%s is no set of files that could be checked.' % dataset.name)
    return report
