"""The plan: a description of the build on one screen, before step 1."""

import collections
import itertools
import textwrap

from towers.placement.devices import needs_config, short_name

PlannedTower = collections.namedtuple('PlannedTower', 'index device examples owns')
"""A row of the plan: `examples` is an int, or None where the batch is not static; `owns` names
what this tower alone provides."""

_WIDTH = 100  # columns of a screen
_SESSION = 'tf.Session(config=towers.session_config(built.devices)) makes the CPU devices'


class Plan(collections.namedtuple('Plan', [
        'towers', 'batch_size', 'remainder', 'shares', 'reduction', 'gradient', 'optimizer',
        'global_step', 'learning_rate', 'variable_device', 'num_variables', 'num_trainable',
        'parameters', 'parameter_bytes', 'shared_by_order', 'whole_batch', 'regularization',
        'batch_norm', 'without_gradient', 'how_built', 'stages', 'accumulation', 'recomputation',
        'precision', 'loss_scale', 'xla', 'owners', 'own_state',
        'initial_of_first', 'inline_updates', 'session', 'all_towers', 'cluster',
        'cluster_warning'])):
    """The description of a build; `print(plan)` fits a screen.

    Attributes:
      towers: list of `PlannedTower`.
      batch_size: examples per step: an int, or None if not static.
      remainder: as given to `build_towers`.
      shares: the proportions of the shards: a tuple of ints.
      reduction: as given to `build_towers`.
      gradient: one line: the meaning of the combined gradient; None without an optimizer.
      optimizer: name of the optimizer's class, or None.
      global_step: one line on who counts the steps, where the optimizer does not; else None.
      learning_rate: one line: the rate, and the effective rate under the reduction.
      variable_device: the devices of the variables, in words.
      num_variables: the number of variables that the towers share.
      num_trainable: the number of trainable ones among them.
      parameters: the number of elements of these variables.
      parameter_bytes: the bytes of these variables.
      shared_by_order: names of variables that were shared by their order of creation.
      whole_batch: one line about a loss that is not a mean over the examples, or None.
      regularization: one line; None if the model registers no regularization.
      batch_norm: one line; None without an optimizer.
      without_gradient: names of trainable variables without a gradient in any tower.
      how_built: one line: calls of the model function, and copies.
      stages: one line about a model on several devices a tower, or None.
      accumulation: one line about the micro-batches of each tower, or None.
      recomputation: one line about operations that the backward pass recomputes, or None.
      precision: one line, or None for float32.
      loss_scale: one line, or None without a loss scale.
      xla: one line, or None without XLA.
      owners: one line: the number of variables by their writer; None if only the update writes.
      own_state: names of the state variables that are separate in each tower, see `ownership`.
      initial_of_first: names of variables whose initial value is computed from the first tower's
        part of the batch (data-dependent initialization); on one device, from the whole batch.
      inline_updates: one line about the variables that the towers' forward pass writes, or None.
      session: one line: threads and memory that `session_config` gives a session of these devices.
      all_towers: the number of towers on all machines.
      cluster: one line about the other machines, or None.
      cluster_warning: one line about open access to this machine, or None.
    """
    __slots__ = ()

    def __str__(self):
        width = max(len(_row_name(tower.device)) for tower in self.towers)
        row = '  %%-5s  %%-%ds  %%-8s  %%s' % max(width, 12)
        lines = [self._batch(), row % ('tower', 'device', 'examples', 'does for all')]
        for tower in _some_rows(self.towers):
            lines.append('  ...' if tower is None else row % (
                tower.index, _row_name(tower.device),
                '?' if tower.examples is None else tower.examples, ', '.join(tower.owns) or '-'))
        for label, text in self._facts():
            for part in textwrap.wrap(text or '', _WIDTH - 19):
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

    def _facts(self):
        """The lines below the rows: a list of `(label, text or None)`."""
        return [
            ('towers', self.how_built if len(self.towers) > 1 else None),
            ('variables', '%d (%d trainable), %s parameters, %s' % (
                self.num_variables, self.num_trainable, '{:,}'.format(self.parameters),
                '%.1f MB' % (self.parameter_bytes / 1e6) if self.parameter_bytes >= 1e5 else
                '%.1f kB' % (self.parameter_bytes / 1e3))),
            ('variables on', self.variable_device),
            ('shared by order', _some(self.shared_by_order)),
            ('cluster', self.cluster),
            ('open to anyone', self.cluster_warning),
            ('session', _SESSION if needs_config([tower.device for tower in self.towers])
             else None),
            ('session_config', self.session),
            ('optimizer', self.optimizer),
            ('global step', self.global_step),
            ('reduction', self.gradient),
            ('stages', self.stages),
            ('accumulation', self.accumulation),
            ('recomputation', self.recomputation),
            ('learning rate', self.learning_rate),
            ('precision', self.precision),
            ('loss scale', self.loss_scale),
            ('XLA compiles', self.xla),
            ('whole batch', self.whole_batch),
            ('regularization', self.regularization),
            ('batch norm', self.batch_norm),
            ('who writes', self.owners),
            ('forward pass', self.inline_updates),
            ('of each tower', _own_state(self.own_state)),
            ('initial value', None if not self.initial_of_first else
             "of %s is of tower 0's part of the batch, not of all of it" % briefly(
                 self.initial_of_first)),
            ('no gradient', _some(self.without_gradient))]


def _row_name(device):
    """The devices of a tower; the first and the last where all would leave the screen's row."""
    names = short_name(device).split('+')
    if len('+'.join(names)) <= 45 or len(names) <= 2:
        return '+'.join(names)
    return '%s+...+%s (%d devices)' % (names[0], names[-1], len(names))


def _own_state(names):
    """The line about the towers' own state, and how a program resets it in all towers."""
    if not names:
        return None
    return '%s; tf.variables_initializer(built.own_state) resets every tower' % _some(names, 56)


def briefly(names, limit=2):
    """The first names, and how many more there are: `'a, b and 3 more'`."""
    more = '' if len(names) <= limit else ' and %d more' % (len(names) - limit)
    return ', '.join(names[:limit]) + more


def _some(names, spare=0):
    """As many names as fit a line, at least one (or its end), and the count of the others."""
    width = _WIDTH - 19 - spare
    if not names:
        return None
    for limit in (3, 2, 1):
        more = '' if len(names) <= limit else ' and %d more' % (len(names) - limit)
        text = ', '.join(names[:limit]) + more
        if len(text) <= width:
            return text
    return '...' + names[0][len(text) + 3 - width:] + more


def _some_rows(rows, limit=10):
    if len(rows) <= limit:
        return rows
    return rows[:limit - 2] + [None] + rows[-1:]
