"""The lines of a build's plan: `describe`."""

import tensorflow.compat.v1 as tf

from towers import compat
from towers.api.built import Plan, PlannedTower, briefly
from towers.capture.stage_cuts import accumulation_line, stages_line
from towers.errors import counted
from towers.graph import graph_walk
from towers.graph.graph_walk import bytes_of, leaves_of
from towers.graph.variable_access import metric_variables
from towers.model.objectives import all_pairs, with_parts
from towers.optimizers import describe_learning_rate, is_repeatable
from towers.placement.devices import describe_config, needs_config, session_config, short_name
from towers.placement.numerics import describe_xla, rewrite_field
from towers.proof.stand_ins import static_size
from towers.proof.verdict import Question, verdict_of
from towers.roles.ownership import OWN
from towers.roles.write_order import updates_that_write


def describe(tower_set, update, num_before):
    """The `Plan` of a build; `num_before` of its `UPDATE_OPS` are from before the towers."""
    request, batch = tower_set.request, tower_set.batch
    local = {variable.op.name for variable in tf.local_variables()}  # metric counters
    variables = [v for v in tower_set.recorded.variables if v.op.name not in local]
    cluster = request.cluster if request.training.objectives else None
    from_shard = _from_shard(variables, tower_set.towers[0]) if len(tower_set.towers) > 1 else []
    trained = {variable.op.name for _, variable in all_pairs(update.gradients)}
    lines = _of_variables(variables, tower_set, update)
    if cluster is not None:
        lines += [('cluster', _cluster(cluster, batch.batch_size, len(request.devices))),
                  ('open to anyone', cluster.warning())]
    lines += [
        ('session', 'tf.Session(config=towers.session_config(built.devices)) makes the CPU devices'
         if needs_config(request.devices) else None),
        ('session_config', describe_config(session_config(request.devices), request.devices))]
    if request.training.objectives:
        lines += _of_training(tower_set, update)
    lines += [
        ('stages', stages_line(tower_set.towers, tower_set.cuts)),
        ('precision', _precision(request)),
        ('XLA compiles', describe_xla(request.devices) if request.numerics.xla else None),
        ('regularization', tower_set.losses.description),
        ('batch norm', _batch_norm(tower_set, num_before) if request.training.objectives
         else None)]
    if len(tower_set.towers) > 1:
        own = tower_set.roles.names(OWN)
        lines += [('who writes', tower_set.roles.describe(request)),
                  ('of each tower', own and '%s; tf.variables_initializer(built.own_state) resets '
                   'every tower' % briefly(own))]
    lines += [
        ('initial value', from_shard and (
            "of %s is of tower 0's part of the batch, not of all of it" % briefly(from_shard))),
        ('no gradient', briefly([each.op.name for each in tower_set.roles.trainable
                                 if each.op.name not in trained]))]
    return Plan(
        towers=_rows(tower_set), lines=[(label, text) for label, text in lines if text],
        batch_size=batch.batch_size if isinstance(batch.batch_size, int) else None,
        remainder=request.split.remainder, shares=request.split.shares,
        reduction=request.training.reduction,
        initial_of_first=from_shard)


def _precision(request):
    """How the precision is made; None for float32."""
    precision = request.numerics.precision
    if precision == 'float32':
        return None
    return "%s by TensorFlow's rewrite %s; the audit of a step says whether it acts" % (
        precision, rewrite_field(precision, request.devices))


def _rows(tower_set):
    """The plan's rows: a list of `PlannedTower`."""
    rows, towers, update_ops = [], tower_set.towers, tower_set.request.training.update_ops
    accumulate = tower_set.request.split.accumulate
    for first in range(0, len(towers), accumulate):
        tower, sizes = towers[first], [part.size for part in towers[first:first + accumulate]]
        owns = tower.updates and (update_ops == 'all' or update_ops == 'first' and not tower.index)
        rows.append(PlannedTower(
            tower.index, tower.device, sum(sizes) if isinstance(sizes[0], int) else None,
            ['batch-norm updates'] * bool(owns)))
    return rows


def _of_variables(variables, tower_set, update):
    """The lines that say how many variables there are, and where."""
    request = tower_set.request
    size = sum(map(bytes_of, variables))
    names = {variable.op.name for variable in variables}
    trainable = tower_set.roles.trainable if request.training.objectives else [
        each for each in tf.trainable_variables() if each.op.name in names]
    is_sent = update.train_op is not None and tower_set.roles.replicas is not None and not all(
        is_repeatable(each.optimizer) for each in request.training.objectives)
    return [
        ('towers', tower_set.how_built if len(tower_set.towers) > 1 else None),
        ('variables', '%d (%d trainable), %s parameters, %s' % (
            len(variables), len(trainable),
            '{:,}'.format(sum(each.get_shape().num_elements() or 0 for each in variables)),
            _bytes_text(size))),
        ('variables on', _placed(request, tower_set.recorded) + (
            '; updated once and sent to the replicas, since the optimizer may look at more than '
            'each gradient' if is_sent else ''))]


def _bytes_text(size):
    """A size as text: `'41.6 kB'`."""
    if size < 100:
        return counted(size, 'byte')
    if size < 1e5:
        return '%.1f kB' % (size / 1e3)
    return '%.1f MB' % (size / 1e6)


def _placed(request, recorded):
    """Where the variables are, in words."""
    cluster = request.cluster if request.training.objectives else None
    if cluster is not None and cluster.is_served:
        return 'the parameter servers, by size, once there is a session'
    made = {variable.op.name for variable in recorded.created}
    before = [] if request.placement.is_earlier_builds else sorted(
        {short_name(variable.device) or 'no device' for variable in recorded.variables
         if variable.op.name not in made})
    return '; '.join([request.placement.describe()] * bool(made or not before) + [
        'those from before the build on ' + ', '.join(before)] * bool(before))


def _cluster(cluster, batch_size, num_towers):
    """The machines, and the number of towers and examples that a step has on all of them."""
    batch = 'batches of any size'
    if not cluster.synchronous or cluster.has_local_steps:
        batch = 'those of one worker, and its batch, in each update'
    elif isinstance(batch_size, int):
        count = cluster.num_workers
        batch = '%d examples here a step' % batch_size if cluster.uneven else (
            'batch %d = %d x %d' % (batch_size * count, count, batch_size))
    return '%s; %d towers in all, %s' % (
        cluster.describe(), num_towers * cluster.num_workers, batch)


def _of_training(tower_set, update):
    """The lines about gradients, optimizers and their updates."""
    request = tower_set.request
    return [
        ('optimizer', _optimizers(request, update)),
        ('global step', 'counted here, since the optimizer leaves it to its caller: do not add to '
         'it' if update.counts else None),
        ('reduction', _gradient(request)),
        ('accumulation', accumulation_line(tower_set.towers, request.split.accumulate,
                                           request.memory.schedule)),
        ('recomputation', _recomputation(tower_set.recomputed, request.memory.recompute)),
        ('learning rate', _learning_rates(request)),
        ('loss scale', request.numerics.loss_scale and request.numerics.loss_scale.describe()),
        ('one device', _one_device(tower_set))]


def _one_device(tower_set):
    """Whether the towers are proven to be one device, for each loss; None for one tower alone."""
    request, recorded = tower_set.request, tower_set.recorded
    if len(tower_set.towers) == 1 and request.has_whole_batch:
        return None
    question = Question(
        adds_shards=_adds_up(request) or (
            request.training.reduction == 'sum' and tower_set.batch.is_even
            and request.split.accumulate == 1
            and request.has_whole_batch),
        static_size=static_size(tower_set.batch.inputs[0]),
        names=('machine' if len(tower_set.towers) == 1 else
               'tower' if request.split.accumulate == 1 else 'micro-batch'))
    lines = []
    for name, loss in with_parts('loss', recorded.output.loss):
        verdict = verdict_of([loss] + tower_set.losses.added, recorded.proven.proof,
                             recorded.proven.batch_norms, question)
        several = isinstance(recorded.output.loss, dict)
        lines.append('%s: %s' % (name, verdict.text) if several else verdict.text)
    return '; '.join(lines) + _of_machines(request)


def _of_machines(request):
    """What the batch is that the loss is of, where there are several machines."""
    if request.has_whole_batch and request.cluster is None:
        return ''
    if request.has_whole_batch:
        return "; the batch is one worker's own"
    return '; the batch is that of all machines'


def _together(request):
    """How many towers have a part in each update, on all machines."""
    return len(request.devices) * (
        1 if request.cluster is None else request.cluster.workers_a_step)


def _gradient(request):
    """The loss whose gradient the combined gradient is, in words."""
    together = _together(request)
    if together == 1:
        return '%s (of one tower: its own gradient)' % request.training.reduction
    if _adds_up(request):
        return "sum: the gradient of the sum of the towers' losses"
    is_of_one_worker = request.cluster is not None and (
        request.cluster.workers_a_step == 1 < request.cluster.num_workers)
    batch = "worker's own batch" if is_of_one_worker else 'batch'
    if request.training.reduction == 'mean':
        return "mean: the gradient of the %s's mean loss" % batch
    return "sum: %d x the gradient of the %s's mean loss" % (together, batch)


def _optimizers_of(objectives):
    """`[(name of its loss, optimizer)]`, also of optimizers that the model function itself uses."""
    of_model = objectives.of_model
    return [(each.name, each.optimizer) for each in objectives] if of_model is None else [
        (None, each) for each in of_model.optimizers()]


def _adds_up(request):
    """Whether losses are sums over the examples, so that the towers' losses are added up."""
    return request.training.reduction == 'sum' and request.training.objectives.of_model is not None


def _optimizers(request, update):
    if request.training.objectives.names is None:
        return ', '.join(type(each).__name__
                         for _, each in _optimizers_of(request.training.objectives))
    return '; '.join('%s: %s, %d variables%s' % (
        each.name, type(each.optimizer).__name__, len(update.gradients[each.name]),
        '' if not update.rides[each.name] else ', %d of the updates' % update.rides[each.name])
                     for each in request.training.objectives)


def _learning_rates(request):
    added = 1 if request.training.reduction == 'mean' or _adds_up(request) else _together(request)
    return '; '.join(dict.fromkeys(
        ('' if name is None else name + ': ') + describe_learning_rate(optimizer, added)
        for name, optimizer in _optimizers_of(request.training.objectives)))


def _recomputation(recomputed, asked):
    operations = sum(len(each.operations) for each in recomputed)
    if not operations:
        return None if asked is None else (
            'nothing: ' + ('no place of the forward pass is worth it' if asked == 'auto' else
                           'the backward pass takes nothing that lies between these results'))
    segments = sum(each.segments for each in recomputed)
    return '%d operations of the forward pass are run again, in %d segment%s' % (
        operations, segments, '' if segments == 1 else 's')


def _batch_norm(tower_set, before):
    towers, request = tower_set.towers, tower_set.request
    update_ops = request.training.update_ops
    in_sync = ''
    if request.training.batch_norm == 'sync':
        proven = tower_set.recorded.proven
        in_sync = '%d in sync over the whole batch; ' % proven.in_sync
        left_alone = proven.batch_norms.unproven
        if left_alone:
            in_sync += '%d left alone, not proven to be over the examples (%s); ' % (
                len(left_alone), briefly([op.name for op in left_alone]))
    others = '' if not before else ', %d from before the towers %s' % (
        before, 'do not run either' if update_ops == 'none' else 'too')
    if not any(tower.updates for tower in towers):
        return in_sync + 'no update ops' + others
    count = len(towers[0].updates)
    counting = len(updates_that_write(towers, metric_variables())) if update_ops == 'first' else 0
    if counting:
        others += ', %d of the other towers that count metrics' % counting
    return in_sync + {'first': '%d update ops of tower 0 ride on the train op' % count,
                      'all': '%d update ops of every tower ride on the train op' % count,
                      'none': "nobody's %d update ops run" % count}[update_ops] + others


def _from_shard(variables, first):
    """Names of the variables whose initial value depends on the first tower's part of the batch."""
    inputs = {leaf.op.name for leaf in leaves_of(first.inputs)}
    initializers = [(variable, compat.initializer_of(variable)) for variable in variables]
    return [variable.op.name for variable, op in initializers if op is not None
            and not inputs.isdisjoint(graph_walk.ancestors(op.inputs))]
