"""The plan: what the towers will do, on one screen, before step 1."""

import collections
import itertools
import numbers
import textwrap

import numpy as np
import tensorflow.compat.v1 as tf

from towers import compat
from towers.api.stage_plan import accumulation_line, stages_line
from towers.graph import graph_walk
from towers.graph.nests import leaves_of
from towers.graph.variable_access import metric_variables
from towers.placement.devices import describe_config, needs_config, session_config, short_name
from towers.placement.xla import describe as describe_xla
from towers.tower.batch_losses import whole_batch_line
from towers.tower.objectives import GradientsOfModel, all_pairs
from towers.tower.write_order import updates_that_write

PlannedTower = collections.namedtuple('PlannedTower', 'index device examples owns')
"""A row of the plan: `examples` is an int, or None where the batch is not static; `owns` names
what this tower alone provides."""

_WIDTH = 100  # columns of a screen
_SESSION = 'tf.Session(config=towers.session_config(built.devices)) makes the CPU devices'


class Plan(collections.namedtuple('Plan', [
        'towers', 'batch_size', 'remainder', 'shares', 'reduction', 'optimizer', 'global_step',
        'learning_rate',
        'variable_device', 'num_variables', 'num_trainable', 'parameters', 'parameter_bytes',
        'shared_by_order', 'whole_batch', 'regularization', 'batch_norm', 'without_gradient',
        'how_built',
        'combination', 'stages', 'accumulation', 'recomputation', 'precision', 'loss_scale', 'xla',
        'owners', 'own_state', 'initial_of_first', 'inline_updates', 'session', 'all_towers',
        'cluster', 'cluster_warning', 'adds_up', 'towers_an_update'])):
    """What `build_towers` built, in words; `print(plan)` fits a screen.

    Attributes:
      towers: list of `PlannedTower`.
      batch_size: examples a step: an int, or None where it is not static.
      remainder: as given to `build_towers`.
      shares: the proportions of the parts of a batch: a tuple of ints.
      reduction: as given to `build_towers`.
      optimizer: name of the optimizer's class, or None.
      global_step: one line on who counts the steps, where the optimizer does not; else None.
      learning_rate: one line: the rate, and the effective rate under the reduction.
      variable_device: where variables live, in words.
      num_variables: how many variables the towers share.
      num_trainable: how many of them are trainable.
      parameters: how many numbers these variables hold.
      parameter_bytes: how many bytes these variables take.
      shared_by_order: names of variables that were shared by their order of creation.
      whole_batch: one line on a loss that is no mean over the examples, or None.
      regularization: one line; None where no regularization of the model is known.
      batch_norm: one line; None without an optimizer.
      without_gradient: names of trainable variables that no tower has a gradient of.
      how_built: one line: calls of the model function, and copies.
      combination: one line about gradients that are not simply added up, or None.
      stages: one line about a model on several devices a tower, or None.
      accumulation: one line about the micro-batches of each tower, or None.
      recomputation: one line about operations that the backward pass recomputes, or None.
      precision: one line, or None for float32.
      loss_scale: one line, or None for a loss that is not scaled.
      xla: one line, or None where XLA compiles nothing.
      owners: one line: who writes how many variables; None where the update alone writes.
      own_state: names of the state variables that each tower has of its own, see `local_state`.
      initial_of_first: names of variables whose initial value is computed from the first tower's
        part of the batch (data-dependent initialization); on one device, from the whole batch.
      inline_updates: one line about the variables that the towers' forward pass writes, or None.
      session: one line: threads and memory that `session_config` gives a session of these devices.
      all_towers: how many towers there are, on all machines.
      cluster: one line about the other machines, or None.
      cluster_warning: one line about who can reach this machine, or None.
      adds_up: whether losses are sums over the examples, which are added over towers: with
        `replicate_model_fn` and `Reduction.SUM`.
      towers_an_update: how many of them an update needs: all but those of backup workers, or those
        of one asynchronous worker.
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
        if len(set(self.shares)) > 1 and self.batch_size is None:
            batch += ', shares ' + ' : '.join(map(str, self.shares[:8]))
        width = max(len(_row_name(tower.device)) for tower in self.towers)
        row = '  %%-5s  %%-%ds  %%-8s  %%s' % max(width, 12)
        lines = ['%d tower%s, %s' % (len(sizes), '' if len(sizes) == 1 else 's', batch),
                 row % ('tower', 'device', 'examples', 'does for all')]
        for tower in _some_rows(self.towers):
            lines.append('  ...' if tower is None else row % (
                tower.index, _row_name(tower.device),
                '?' if tower.examples is None else tower.examples, ', '.join(tower.owns) or '-'))
        facts = [
            ('towers', self.how_built if len(sizes) > 1 else None),
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
            ('reduction', None if self.optimizer is None else _reduction(self)),
            ('combination', self.combination),
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
             "of %s is of tower 0's part of the batch, not of all of it" % _briefly(
                 self.initial_of_first)),
            ('no gradient', _some(self.without_gradient))]
        for name, text in facts:
            for part in textwrap.wrap(text or '', _WIDTH - 19):
                lines.append('  %-15s  %s' % (name, part))
                name = ''
        return '\n'.join(line[:_WIDTH] for line in lines)


def make_plan(captured, shards, request, update, joined, num_before):
    """The `Plan` of what `build_towers` has just built.

    Args:
      captured: `Captured`.
      shards: `CutBatch`.
      request: `Request`.
      update: `Update`.
      joined: variables whose gradient is one product for all towers.
      num_before: how many `UPDATE_OPS` from before the towers ride on the train op.
    """
    towers, step, roles = captured.towers, captured.step, captured.roles
    recorded = step.recorded
    update_ops = request.of_tower.update_ops
    cluster = request.cluster if request.objectives else None
    all_towers = len(request.devices) * (1 if cluster is None else cluster.num_workers)
    together = len(request.devices) * (1 if cluster is None else cluster.workers_a_step)
    rows = []
    micro_batches = request.accumulate
    for first in range(0, len(towers), micro_batches):
        tower = towers[first]
        owns = []
        if tower.index == 0 and step.losses.is_once:
            owns.append('regularization')
        if tower.updates and (update_ops == 'all' or update_ops == 'first' and tower.index == 0):
            owns.append('batch-norm updates')
        sizes = [part.size for part in towers[first:first + micro_batches]]
        rows.append(PlannedTower(
            tower.index, tower.device,
            sum(sizes) if all(isinstance(size, int) for size in sizes) else None, owns))
    local = {variable.op.name for variable in tf.local_variables()}
    variables = [v for v in recorded.variables if v.op.name not in local]  # no metric counters
    trained = {variable.op.name for _, variable in all_pairs(update.gradients)}
    counts = [(variable.get_shape().num_elements() or 0, variable.dtype.base_dtype.size)
              for variable in variables]
    return Plan(
        towers=rows,
        batch_size=shards.batch_size if isinstance(shards.batch_size, int) else None,
        remainder=request.remainder, shares=request.shares, reduction=request.reduction,
        optimizer=_optimizers(request, update),
        global_step='counted here, since the optimizer leaves it to its caller: do not add to it'
        if update.counts else None,
        learning_rate=_learning_rates(request, together),
        variable_device=_placed(request, cluster, recorded) + (
            '; updated once and sent to the replicas, since the optimizer cannot be repeated'
            if update.is_sent else ''), num_variables=len(variables),
        num_trainable=_num_trainable(step, request, variables),
        parameters=sum(count for count, _ in counts),
        parameter_bytes=sum(count * size for count, size in counts),
        shared_by_order=[each.variable.op.name for each in recorded.direct
                         if each.variable.op.name not in local]
        if len(towers) > 1 else [],
        whole_batch=whole_batch_line(recorded) if request.objectives and len(towers) > 1 else None,
        regularization=step.losses.description,
        batch_norm=_batch_norm(towers, update_ops, num_before, recorded.in_sync, request.batch_norm)
        if request.objectives else None,
        without_gradient=[variable.op.name for variable in (
            step.gradients.trainable if request.objectives else ())
                          if variable.op.name not in trained],
        how_built=captured.how_built,
        combination=_combination(joined),
        stages=stages_line(captured),
        accumulation=accumulation_line(towers, micro_batches, request.schedule),
        recomputation=_recomputation(step.recomputed, request.of_tower.recompute),
        precision=request.precision_text,
        loss_scale=None if request.loss_scale is None else request.loss_scale.describe(),
        xla=describe_xla(request.devices) if request.numerics.xla else None,
        owners=roles.describe(_num_trainable(step, request, variables), update_ops)
        if len(towers) > 1 else None,
        own_state=[variable.op.name for variable in roles.own_state.variables],
        initial_of_first=_from_shard(variables, towers[0]) if len(towers) > 1 else [],
        inline_updates=_inline_updates(roles.inline_updates, update_ops)
        if len(towers) > 1 else None,
        session=describe_config(session_config(request.devices), request.devices),
        all_towers=all_towers,
        cluster=None if cluster is None else _cluster(cluster, shards.batch_size, all_towers),
        cluster_warning=None if cluster is None else cluster.warning(),
        adds_up=_adds_up(request), towers_an_update=together)


def _placed(request, cluster, recorded):
    """Where the variables are, in words."""
    if cluster is None or cluster.kind != 'ps':
        made = {variable.op.name for variable in recorded.created}
        if request.placement.is_earlier_builds:
            return request.placement.describe()
        devices = sorted({short_name(variable.device) or 'no device' for variable in
                          recorded.variables if variable.op.name not in made})
        before = '' if not devices else '; those from before the build on ' + ', '.join(devices)
        return (request.placement.describe() if made else '') + before[0 if made else 2:]
    return 'the parameter servers, by size, once there is a session'


def _row_name(device):
    """The devices of a tower; the first and the last where all would leave the screen's row."""
    names = short_name(device).split('+')
    if len('+'.join(names)) <= 45 or len(names) <= 2:
        return '+'.join(names)
    return '%s+...+%s (%d devices)' % (names[0], names[-1], len(names))


def _cluster(cluster, batch_size, all_towers):
    """The machines, and the number of towers and examples that a step has on all of them."""
    batch = 'batches of any size'
    if not cluster.synchronous:
        batch = 'those of one worker, and its batch, in each update'
    elif isinstance(batch_size, int):
        count = cluster.workers_a_step
        batch = ('%d examples here a step' % batch_size if cluster.uneven else
                 'batch %s%d = %d x %d' % ('' if count == cluster.num_workers else 'of at least ',
                                           batch_size * count, count, batch_size))
    return '%s; %d towers in all, %s' % (cluster.describe(), all_towers, batch)


# Optimizers whose step scales with the gradient, and those that divide by the gradient's size.
_SCALES_WITH_GRADIENT = ('GradientDescentOptimizer', 'MomentumOptimizer')
_IGNORES_SCALE = ('AdamOptimizer', 'RMSPropOptimizer', 'AdagradOptimizer', 'AdadeltaOptimizer',
                  'AdamWeightDecayOptimizer')


def _reduction(plan):
    is_of_one_worker = plan.towers_an_update == len(plan.towers) < plan.all_towers
    batch = "worker's own batch" if is_of_one_worker else 'batch'
    if plan.towers_an_update == 1:
        return '%s (of one tower: its own gradient)' % plan.reduction
    if plan.adds_up:
        return "sum: the gradient of the sum of the towers' losses"
    if plan.reduction == 'mean':
        return "mean: the gradient of the %s's mean loss" % batch
    return "sum: %d x the gradient of the %s's mean loss" % (plan.towers_an_update, batch)


def _num_trainable(step, request, variables):
    if request.objectives:
        return len(step.gradients.trainable)
    trainable = {variable.op.name for variable in tf.trainable_variables()}
    return sum(variable.op.name in trainable for variable in variables)


def _real(optimizer):
    """The optimizers of a build: the model function's, where it takes gradients by its own."""
    return optimizer.optimizers() if isinstance(optimizer, GradientsOfModel) else [optimizer]


def _adds_up(request):
    """Whether losses are sums over the examples, so that the towers' losses are added up."""
    return request.reduction == 'sum' and any(
        isinstance(each.optimizer, GradientsOfModel) for each in request.objectives)


def _optimizers(request, update):
    if not request.objectives:
        return None
    if request.objectives.names is None:
        return ', '.join(type(each).__name__ for each in _real(request.objectives[0].optimizer))
    return '; '.join('%s: %s, %d variables%s' % (
        each.name, type(each.optimizer).__name__, len(update.gradients[each.name]),
        '' if not update.rides[each.name] else ', %d of the updates' % update.rides[each.name])
                     for each in request.objectives)


def _learning_rates(request, num_towers):
    if not request.objectives:
        return None
    if request.objectives.names is None:
        return '; '.join(dict.fromkeys(_learning_rate(each, request, num_towers)
                                       for each in _real(request.objectives[0].optimizer)))
    return '; '.join('%s: %s' % (each.name, _learning_rate(each.optimizer, request, num_towers))
                     for each in request.objectives)


def _learning_rate(optimizer, request, num_towers):
    rate = compat.optimizer_learning_rate(optimizer)
    if isinstance(rate, (numbers.Real, np.ndarray)):
        text, number = '%g' % rate, float(rate)
    elif isinstance(rate, (tf.Tensor,) + compat.VARIABLE_TYPES):
        text, number = 'the tensor %r' % rate.op.name, None
    else:
        text, number = 'not known to the plan', None
    if request.reduction == 'mean' or num_towers == 1 or _adds_up(request):
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
    """The plan's line about gradients that `sufficient_factors` joins; None where it joins none."""
    if not joined:
        return None
    size = sum(v.get_shape().num_elements() * v.dtype.base_dtype.size for v in joined)
    return ("%d dense layer%s by one product of the towers' factors, which spares %.1f MB a tower"
            % (len(joined), '' if len(joined) == 1 else 's', size / 1e6))


def _recomputation(recomputed, asked):
    operations = sum(each.operations for each in recomputed)
    if not operations:
        return None if asked is None else (
            'nothing: ' + ('no place of the forward pass is worth it' if asked == 'auto' else
                           'the backward pass takes nothing that lies between these results'))
    segments = sum(each.segments for each in recomputed)
    return '%d operations of the forward pass are run again, in %d segment%s' % (
        operations, segments, '' if segments == 1 else 's')


def _batch_norm(towers, update_ops, before, in_sync, batch_norm):
    in_sync = '' if batch_norm == 'shard' else '%d in sync over the whole batch; ' % in_sync
    others = '' if not before else ', %d from before the towers %s' % (
        before, 'run neither' if update_ops == 'none' else 'too')
    if not any(tower.updates for tower in towers):
        return in_sync + 'no update ops' + others
    count = len(towers[0].updates)
    counting = len(updates_that_write(towers, metric_variables())) if update_ops == 'first' else 0
    if counting:
        others += ', %d of the other towers that count metrics' % counting
    return in_sync + {'first': '%d update ops of tower 0 ride on the train op' % count,
            'all': '%d update ops of every tower ride on the train op' % count,
            'none': "nobody's %d update ops run" % count}[update_ops] + others


def _inline_updates(updates, update_ops):
    """The line about shared variables that the forward pass writes."""
    parts = []
    if updates.with_all_towers:
        parts.append('every tower writes ' + _briefly(updates.with_all_towers))
    left_out, used = updates.variables()
    if left_out:
        parts.append('%s writes %s' % ('nobody' if update_ops == 'none' else 'tower 0 alone',
                                       _briefly(left_out)))
    if used:
        parts.append('tower 0 writes, and every tower uses, ' + _briefly(used))
    return '; '.join(parts) or None


def _own_state(names):
    """The line about the towers' own state, and how a program resets it in all towers."""
    if not names:
        return None
    return '%s; tf.variables_initializer(built.own_state) resets every tower' % _some(names, 56)


def _from_shard(variables, first):
    """Names of the variables whose initial value depends on the first tower's part of the batch."""
    inputs = {leaf.op.name for leaf in leaves_of(first.inputs)}
    initializers = [(variable, compat.initializer_of(variable)) for variable in variables]
    return [variable.op.name for variable, op in initializers if op is not None
            and not inputs.isdisjoint(graph_walk.ancestors(op.inputs))]


def _briefly(names, limit=2):
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
