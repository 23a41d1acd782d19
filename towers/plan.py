"""The plan: what the towers will do, on one screen, before step 1."""

import collections
import itertools
import textwrap

import tensorflow.compat.v1 as tf

from towers import compat
from towers.devices import short_name

PlannedTower = collections.namedtuple('PlannedTower', 'index device examples owns')
"""A row of the plan: `examples` is an int, or None where the batch is not static; `owns` names
what this tower alone provides."""


_WIDTH = 100  # columns of a screen


class Plan(collections.namedtuple('Plan', [
        'towers', 'batch_size', 'remainder', 'reduction', 'optimizer', 'learning_rate',
        'variable_device', 'num_variables', 'num_trainable', 'parameters', 'parameter_bytes',
        'shared_by_order', 'regularization', 'batch_norm', 'without_gradient', 'how_built',
        'combination', 'precision', 'loss_scale', 'xla'])):
    """What `build_towers` built, in words; `print(plan)` fits a screen.

    Attributes:
      towers: list of `PlannedTower`.
      batch_size: examples a step: an int, or None where it is not static.
      remainder, reduction: as given to `build_towers`.
      optimizer: name of the optimizer's class, or None.
      learning_rate: one line: the rate and what the reduction makes of it.
      variable_device: where variables live, in words.
      num_variables, num_trainable, parameters, parameter_bytes: of the shared variables.
      shared_by_order: names of variables that were shared by their order of creation.
      regularization, batch_norm: one line each.
      without_gradient: names of trainable variables that no tower has a gradient of.
      how_built: one line: calls of the model function, and clones.
      combination: one line about gradients that are not simply added up, or None.
      precision, loss_scale, xla: one line each, or None for float32, an unscaled loss, and none.
    """
    __slots__ = ()

    def __str__(self):
        sizes = [tower.examples for tower in self.towers]
        if self.batch_size is None:
            batch = 'a batch of any size'
        elif len(set(sizes)) > 1 and len(sizes) <= 8:
            batch = 'batch %d = %s' % (self.batch_size, ' + '.join(map(str, sizes)))
        else:
            batch = 'batch %d = %s' % (self.batch_size, ' + '.join(
                '%d x %d' % (len(list(group)), size) for size, group in itertools.groupby(sizes)))
        if len(sizes) > 1 and self.batch_size is None:
            batch += ', a remainder: ' + self.remainder
        width = max(len(short_name(tower.device)) for tower in self.towers)
        row = '  %%-5s  %%-%ds  %%-8s  %%s' % max(width, 12)
        lines = ['%d tower%s, %s' % (len(sizes), '' if len(sizes) == 1 else 's', batch),
                 row % ('tower', 'device', 'examples', 'alone provides')]
        for tower in _some_rows(self.towers):
            lines.append('  ...' if tower is None else row % (
                tower.index, short_name(tower.device),
                '?' if tower.examples is None else tower.examples, ', '.join(tower.owns) or '-'))
        facts = [
            ('towers', self.how_built if len(sizes) > 1 else None),
            ('variables', '%d (%d trainable), %s parameters, %.1f MB' % (
                self.num_variables, self.num_trainable, '{:,}'.format(self.parameters),
                self.parameter_bytes / 1e6)),
            ('variables on', self.variable_device),
            ('shared by order', _some(self.shared_by_order)),
            ('optimizer', self.optimizer),
            ('reduction', None if self.optimizer is None else _reduction(self)),
            ('combination', self.combination),
            ('learning rate', self.learning_rate),
            ('precision', self.precision),
            ('loss scale', self.loss_scale),
            ('XLA compiles', self.xla),
            ('regularization', self.regularization),
            ('batch norm', self.batch_norm),
            ('no gradient', _some(self.without_gradient))]
        for name, text in facts:
            for part in textwrap.wrap(text or '', _WIDTH - 19):
                lines.append('  %-15s  %s' % (name, part))
                name = ''
        return '\n'.join(line[:_WIDTH] for line in lines)


def make_plan(builder, towers, shards, placement, gradients, joined, optimizer, reduction,
              remainder, update_ops, learning_rate, how_built):
    """The `Plan` of what `build_towers` has just built from these parts."""
    rows = []
    for tower in towers:
        owns = []
        if tower.index == 0 and builder.regularization_loss is not None:
            owns.append('regularization')
        if tower.updates and (update_ops == 'all' or update_ops == 'first' and tower.index == 0):
            owns.append('batch-norm updates')
        rows.append(PlannedTower(tower.index, tower.device,
                                 tower.size if isinstance(tower.size, int) else None, owns))
    local = {variable.op.name for variable in tf.local_variables()}
    variables = [v for v in builder.variables if v.op.name not in local]  # no metric counters
    trained = {variable.op.name for _, variable in gradients}
    counts = [(variable.get_shape().num_elements() or 0, variable.dtype.base_dtype.size)
              for variable in variables]
    return Plan(
        towers=rows,
        batch_size=shards.batch_size if isinstance(shards.batch_size, int) else None,
        remainder=remainder, reduction=reduction,
        optimizer=None if optimizer is None else type(optimizer).__name__,
        learning_rate=None if optimizer is None else
        _learning_rate(optimizer, learning_rate, reduction, len(towers)),
        variable_device=placement.describe(), num_variables=len(variables),
        num_trainable=len(builder.trainable), parameters=sum(count for count, _ in counts),
        parameter_bytes=sum(count * size for count, size in counts),
        shared_by_order=[each.variable.op.name for each in builder.direct_variables
                         if each.variable.op.name not in local]
        if len(towers) > 1 else [],
        regularization=builder.regularization_source + (
            ', counted once, computed once a step' if builder.regularization_loss is not None
            else ''),
        batch_norm=_batch_norm(towers, update_ops) if optimizer is not None else None,
        without_gradient=[variable.op.name for variable in builder.trainable
                          if optimizer is not None and variable.op.name not in trained],
        how_built=how_built,
        combination=_combination(joined),
        precision=None, loss_scale=None, xla=None)


# What scales with the gradient, and what (nearly) does not, since it divides by its size.
_SCALES_WITH_GRADIENT = ('GradientDescentOptimizer', 'MomentumOptimizer')
_IGNORES_SCALE = ('AdamOptimizer', 'RMSPropOptimizer', 'AdagradOptimizer', 'AdadeltaOptimizer',
                  'AdamWeightDecayOptimizer')


def _reduction(plan):
    if len(plan.towers) == 1:
        return '%s (of one tower: its own gradient)' % plan.reduction
    if plan.reduction == 'mean':
        return "mean: the gradient of the batch's mean loss"
    return "sum: %d x the gradient of the batch's mean loss" % len(plan.towers)


def _learning_rate(optimizer, given, reduction, num_towers):
    rate = compat.optimizer_learning_rate(optimizer) if given is None else given
    if hasattr(rate, 'describe'):
        text, number = rate.describe(), getattr(rate, 'peak', None)
    elif isinstance(rate, (int, float)):
        text, number = '%g' % rate, rate
    elif isinstance(rate, (tf.Tensor,) + compat.VARIABLE_TYPES):
        text, number = 'the tensor %r' % rate.op.name, None
    else:
        text, number = 'not known to the plan', None
    if reduction == 'mean' or num_towers == 1:
        return text
    kind = type(optimizer).__name__
    if kind in _SCALES_WITH_GRADIENT:
        by_mean = '%d x %s%s' % (num_towers, 'the rate' if number is None else '%g' % number,
                                 '' if number is None else ' = %g' % (num_towers * number))
        return '%s; on the sum, steps as %s would on the mean' % (text, by_mean)
    if kind in _IGNORES_SCALE:
        return '%s; %s steps on a sum (nearly) as on the mean' % (text, kind)
    return '%s; applied to a sum of %d' % (text, num_towers)


def _combination(joined):
    """What `factors` made of the gradients of these variables."""
    if not joined:
        return None
    size = sum(v.get_shape().num_elements() * v.dtype.base_dtype.size for v in joined)
    return "%d dense layer%s by one product of the towers' factors, which spares %.1f MB a tower" % (
        len(joined), '' if len(joined) == 1 else 's', size / 1e6)


def _batch_norm(towers, update_ops):
    if not any(tower.updates for tower in towers):
        return 'no update ops'
    count = len(towers[0].updates)
    return {'first': '%d update ops of tower 0 ride on the train op' % count,
            'all': '%d update ops of every tower ride on the train op' % count,
            'none': "nobody's %d update ops run" % count}[update_ops]


def _some(names):
    """As many of the names as fit a line, one at least (or its end), and the count of the rest."""
    if not names:
        return None
    for limit in (3, 2, 1):
        more = '' if len(names) <= limit else ' and %d more' % (len(names) - limit)
        text = ', '.join(names[:limit]) + more
        if len(text) <= _WIDTH - 19:
            return text
    return '...' + names[0][len(text) + 3 - (_WIDTH - 19):] + more


def _some_rows(rows, limit=10):
    if len(rows) <= limit:
        return rows
    return rows[:limit - 2] + [None] + rows[-1:]
