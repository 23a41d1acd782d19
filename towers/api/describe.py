"""Finds what the plan says: `describe`."""

import numbers

import numpy as np
import tensorflow.compat.v1 as tf

from towers import compat
from towers.api.plan import Plan, PlannedTower, briefly
from towers.api.stage_plan import accumulation_line, stages_line
from towers.graph import graph_walk
from towers.graph.nests import leaves_of
from towers.graph.variable_access import metric_variables
from towers.placement.devices import describe_config, session_config, short_name
from towers.placement.xla import describe as describe_xla
from towers.reduce.replicas import is_repeatable
from towers.tower.losses import whole_batch_line
from towers.tower.objectives import GradientsOfModel, all_pairs
from towers.tower.write_order import updates_that_write


def describe(tower_set, shards, request, update, num_before):
    """The `Plan` of what `build_towers` has just built.

    Args:
      tower_set: `TowerSet`.
      shards: `CutBatch`.
      request: `Request`.
      update: `Update`.
      num_before: how many `UPDATE_OPS` from before the towers ride on the train op.
    """
    trains, towers = bool(request.objectives), tower_set.towers
    return Plan(
        towers=_rows(tower_set, request), remainder=request.remainder, shares=request.shares,
        batch_size=shards.batch_size if isinstance(shards.batch_size, int) else None,
        how_built=tower_set.how_built, stages=stages_line(tower_set),
        accumulation=accumulation_line(towers, request.accumulate, request.schedule),
        session=describe_config(session_config(request.devices), request.devices),
        precision=request.precision_text,
        xla=describe_xla(request.devices) if request.numerics.xla else None,
        reduction=request.reduction, optimizer=_optimizers(request, update),
        global_step='counted here, since the optimizer leaves it to its caller: do not add to it'
        if update.counts else None,
        loss_scale=None if request.loss_scale is None else request.loss_scale.describe(),
        recomputation=_recomputation(tower_set.recomputed, request.recompute),
        regularization=tower_set.losses.description,
        batch_norm=_batch_norm(tower_set, request, num_before) if trains else None,
        whole_batch=whole_batch_line(tower_set.recorded) if trains and len(towers) > 1 else None,
        **dict(_of_machines(shards, request), **_of_variables(tower_set, request, update)))


def _rows(tower_set, request):
    """The plan's rows: a list of `PlannedTower`."""
    rows, towers, update_ops = [], tower_set.towers, request.update_ops
    for first in range(0, len(towers), request.accumulate):
        tower, owns = towers[first], []
        if tower.updates and (update_ops == 'all' or update_ops == 'first' and tower.index == 0):
            owns.append('batch-norm updates')
        sizes = [part.size for part in towers[first:first + request.accumulate]]
        rows.append(PlannedTower(
            tower.index, tower.device,
            sum(sizes) if all(isinstance(size, int) for size in sizes) else None, owns))
    return rows


def _of_machines(shards, request):
    """The plan's fields that say how many towers make a step, on all machines."""
    cluster = request.cluster if request.objectives else None
    all_towers, together = [len(request.devices) * count for count in (
        (1, 1) if cluster is None else (cluster.num_workers, cluster.workers_a_step))]
    return dict(
        all_towers=all_towers,
        gradient=_gradient(request, all_towers, together) if request.objectives else None,
        learning_rate=_learning_rates(request, together),
        cluster=None if cluster is None else _cluster(cluster, shards.batch_size, all_towers),
        cluster_warning=None if cluster is None else cluster.warning())


def _of_variables(tower_set, request, update):
    """The plan's fields that say where the variables are, and who writes them."""
    several, recorded, roles = len(tower_set.towers) > 1, tower_set.recorded, tower_set.roles
    local = {variable.op.name for variable in tf.local_variables()}
    variables = [v for v in recorded.variables if v.op.name not in local]  # no metric counters
    trained = {variable.op.name for _, variable in all_pairs(update.gradients)}
    names = {variable.op.name for variable in variables}
    trainable = tower_set.gradients.trainable if request.objectives else [
        each for each in tf.trainable_variables() if each.op.name in names]
    counts = [(variable.get_shape().num_elements() or 0, variable.dtype.base_dtype.size)
              for variable in variables]
    return dict(
        variable_device=_placed(request, recorded) + (
            '; updated once and sent to the replicas, since the optimizer may look at more than '
            'each gradient'
            if roles.replicas is not None and update.train_op is not None and not all(
                is_repeatable(each.optimizer) for each in request.objectives) else ''),
        num_variables=len(variables), num_trainable=len(trainable),
        parameters=sum(count for count, _ in counts),
        parameter_bytes=sum(count * size for count, size in counts),
        shared_by_order=[each.variable.op.name for each in recorded.direct
                         if each.variable.op.name not in local] if several else [],
        without_gradient=[variable.op.name for variable in tower_set.gradients.trainable
                          if variable.op.name not in trained],
        owners=roles.describe(len(trainable), request.update_ops) if several else None,
        own_state=[variable.op.name for variable in roles.own_state.variables],
        initial_of_first=_from_shard(variables, tower_set.towers[0]) if several else [],
        inline_updates=_inline_updates(roles.inline_updates, request.update_ops)
        if several else None)


def _placed(request, recorded):
    """Where the variables are, in words."""
    cluster = request.cluster if request.objectives else None
    if cluster is None or cluster.kind != 'ps':
        made = {variable.op.name for variable in recorded.created}
        placed = request.placement.describe(recorded.variables)
        if request.placement.is_earlier_builds:
            return placed
        devices = sorted({short_name(variable.device) or 'no device' for variable in
                          recorded.variables if variable.op.name not in made})
        before = '' if not devices else '; those from before the build on ' + ', '.join(devices)
        return (placed if made else '') + before[0 if made else 2:]
    return 'the parameter servers, by size, once there is a session'


def _cluster(cluster, batch_size, all_towers):
    """The machines, and the number of towers and examples that a step has on all of them."""
    batch = 'batches of any size'
    if not cluster.synchronous or cluster.has_local_steps:
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
                  'AdamWeightDecayOptimizer', 'LAMBOptimizer')


def _gradient(request, all_towers, together):
    """What the combined gradient is, in words; see `Plan.gradient`."""
    if together == 1:
        return '%s (of one tower: its own gradient)' % request.reduction
    if _adds_up(request):
        return "sum: the gradient of the sum of the towers' losses"
    is_of_one_worker = together == len(request.devices) < all_towers
    batch = "worker's own batch" if is_of_one_worker else 'batch'
    if request.reduction == 'mean':
        return "mean: the gradient of the %s's mean loss" % batch
    return "sum: %d x the gradient of the %s's mean loss" % (together, batch)


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


def _recomputation(recomputed, asked):
    operations = sum(each.operations for each in recomputed)
    if not operations:
        return None if asked is None else (
            'nothing: ' + ('no place of the forward pass is worth it' if asked == 'auto' else
                           'the backward pass takes nothing that lies between these results'))
    segments = sum(each.segments for each in recomputed)
    return '%d operations of the forward pass are run again, in %d segment%s' % (
        operations, segments, '' if segments == 1 else 's')


def _batch_norm(tower_set, request, before):
    towers, update_ops = tower_set.towers, request.update_ops
    in_sync = '' if request.batch_norm == 'shard' else (
        '%d in sync over the whole batch; ' % tower_set.recorded.in_sync)
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
        parts.append('every tower writes ' + briefly(updates.with_all_towers))
    left_out, used = updates.variables()
    if left_out:
        parts.append('%s writes %s' % ('nobody' if update_ops == 'none' else 'tower 0 alone',
                                       briefly(left_out)))
    if used:
        parts.append('tower 0 writes, and every tower uses, ' + briefly(used))
    return '; '.join(parts) or None


def _from_shard(variables, first):
    """Names of the variables whose initial value depends on the first tower's part of the batch."""
    inputs = {leaf.op.name for leaf in leaves_of(first.inputs)}
    initializers = [(variable, compat.initializer_of(variable)) for variable in variables]
    return [variable.op.name for variable, op in initializers if op is not None
            and not inputs.isdisjoint(graph_walk.ancestors(op.inputs))]
