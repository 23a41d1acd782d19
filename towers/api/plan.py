"""The plan: a description of the build on one screen, before step 1."""

import collections
import itertools
import textwrap

from towers.placement.devices import short_name

PlannedTower = collections.namedtuple('PlannedTower', 'index device examples owns')
"""A row of the plan: `examples` is an int, or None where the batch is not static; `owns` names
what this tower alone provides."""

_WIDTH = 100  # columns of a screen


class Plan(collections.namedtuple('Plan', [
        'towers', 'lines', 'batch_size', 'remainder', 'shares', 'reduction', 'all_towers',
        'parameter_bytes', 'initial_of_first'])):
    """The description of a build; `print(plan)` fits a screen.

    Attributes:
      towers: list of `PlannedTower`.
      lines: list of `(label, text)`, as they are printed below the towers.
      batch_size: examples per step: an int, or None if not static.
      remainder: as given to `build_towers`.
      shares: the proportions of the shards: a tuple of ints.
      reduction: as given to `build_towers`.
      all_towers: the number of towers on all machines.
      parameter_bytes: the bytes of the model's variables.
      initial_of_first: names of variables whose initial value is computed from the first tower's
        part of the batch (data-dependent initialization); on one device, from the whole batch.
    """
    __slots__ = ()

    def line(self, label):
        """The text behind a label, such as `'batch norm'`; None where the plan has no such line."""
        return dict(self.lines).get(label)

    def with_line(self, label, text):
        """This plan with another text behind one of its labels."""
        return self._replace(lines=[(each, text if each == label else old)
                                    for each, old in self.lines])

    def __str__(self):
        width = max(len(_row_name(tower.device)) for tower in self.towers)
        row = '  %%-5s  %%-%ds  %%-8s  %%s' % max(width, 12)
        lines = [self._batch(), row % ('tower', 'device', 'examples', 'does for all')]
        few = len(self.towers) <= 10
        for tower in self.towers if few else self.towers[:8] + [None] + self.towers[-1:]:
            lines.append('  ...' if tower is None else row % (
                tower.index, _row_name(tower.device),
                '?' if tower.examples is None else tower.examples, ', '.join(tower.owns) or '-'))
        for label, text in self.lines:
            for part in textwrap.wrap(text, _WIDTH - 19):
                lines.append('  %-15s  %s' % (label, part))
                label = ''
        return '\n'.join(line[:_WIDTH] for line in lines)

    def _batch(self):
        """The first line: how many towers, and how the batch is cut."""
        sizes = [tower.examples for tower in self.towers]
        if self.batch_size is None:
            batch = 'a batch of any size'
            if len(sizes) > 1:
                batch += ', a remainder: ' + self.remainder
            if len(set(self.shares)) > 1:
                batch += ', shares ' + ' : '.join(map(str, self.shares[:8]))
        elif len(set(sizes)) > 1 and len(sizes) <= 8:
            batch = 'batch %d = %s' % (self.batch_size, ' + '.join(map(str, sizes)))
        else:
            batch = 'batch %d = %s' % (self.batch_size, ' + '.join(
                '%d x %d' % (len(list(group)), size) for size, group in itertools.groupby(sizes)))
        return '%d tower%s, %s' % (len(sizes), '' if len(sizes) == 1 else 's', batch)


def _row_name(device):
    """The devices of a tower; the first and the last where all would leave the screen's row."""
    names = short_name(device).split('+')
    if len('+'.join(names)) <= 45 or len(names) <= 2:
        return '+'.join(names)
    return '%s+...+%s (%d devices)' % (names[0], names[-1], len(names))


def briefly(names, limit=2):
    """The first names, and how many more there are: `'a, b and 3 more'`."""
    more = '' if len(names) <= limit else ' and %d more' % (len(names) - limit)
    return ', '.join(names[:limit]) + more
