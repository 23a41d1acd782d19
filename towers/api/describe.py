"""The lines of a build's plan: `describe`.

A line is a label and its text; a text that is None or empty is left out of the plan.
"""

import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.api.built import Plan, PlannedTower, briefly
from towers.api.request import Request
from towers.api.train_ops import Update
from towers.capture.record import Recorded
from towers.capture.stage_lines import accumulation_line, stages_line
from towers.copies.tower_set import TowerSet
from towers.errors import counted
from towers.gradients.tower import Tower
from towers.graph import graph_walk
from towers.graph.graph_walk import bytes_of, leaves_of, operation_names
from towers.graph.variable_access import metric_variables
from towers.model.objectives import Objectives, all_pairs, with_parts
from towers.optimizers import describe_learning_rate, is_repeatable
from towers.placement.devices import describe_config, needs_config, session_config, short_name
from towers.placement.numerics import describe_xla, rewrite_field
from towers.proof.stand_ins import static_size
from towers.proof.verdict import Question, verdict_of
from towers.recompute.rewrite import Recomputed
from towers.roles.ownership import FIRST, OWN
from towers.roles.write_order import updates_that_write

Lines = typing.List[typing.Tuple[str, typing.Optional[str]]]


def describe(tower_set: TowerSet, update: Update, num_updates_before: int) -> Plan:
    """The `Plan` of a build.

    Args:
      tower_set: the towers.
      update: of their variables.
      num_updates_before: how many `UPDATE_OPS` there were before the towers.
    """
    request = tower_set.request
    batch = tower_set.batch
    towers = tower_set.towers
    trains = bool(request.training.objectives)
    metric_counters = operation_names(tf.local_variables())
    variables = [variable for variable in tower_set.recorded.variables
                 if variable.op.name not in metric_counters]
    from_shard = []
    if len(towers) > 1:
        from_shard = _initialized_from_shard(variables, towers[0])

    lines = _lines_of_variables(variables, tower_set, update)
    lines += _lines_of_session(request, batch.batch_size)
    if trains:
        lines += _lines_of_training(tower_set, update)
    lines += [
        ('stages', stages_line(towers, tower_set.cuts)),
        ('precision', _precision(request)),
        ('XLA compiles', describe_xla(request.devices) if request.numerics.xla else None),
        ('regularization', tower_set.losses.description),
        ('batch norm', _batch_norm(tower_set, num_updates_before) if trains else None)]
    if len(towers) > 1:
        lines += _lines_of_roles(tower_set)
    if from_shard:
        lines.append(('initial value', "of %s is of tower 0's part of the batch, not of all of it"
                      % briefly(from_shard)))
    with_gradient = operation_names(variable for _, variable in all_pairs(update.gradients))
    without_gradient = [variable.op.name for variable in tower_set.roles.trainable
                        if variable.op.name not in with_gradient]
    lines.append(('no gradient', briefly(without_gradient)))

    return Plan(
        towers=_rows(tower_set),
        lines=[(label, text) for label, text in lines if text],
        batch_size=batch.batch_size if isinstance(batch.batch_size, int) else None,
        remainder=request.split.remainder,
        shares=request.split.shares,
        reduction=request.training.reduction,
        initial_of_first=from_shard)


def _rows(tower_set: TowerSet) -> typing.List[PlannedTower]:
    """The plan's rows."""
    towers = tower_set.towers
    update_ops = tower_set.request.training.update_ops
    accumulate = tower_set.request.split.accumulate
    rows = []
    for start in range(0, len(towers), accumulate):
        tower = towers[start]
        sizes = [micro_batch.size for micro_batch in towers[start:start + accumulate]]
        is_updating = update_ops == 'all' or update_ops == 'first' and tower.index == 0
        owns = ['batch-norm updates'] if tower.updates and is_updating else []
        examples = sum(sizes) if isinstance(sizes[0], int) else None
        rows.append(PlannedTower(tower.index, tower.device, examples, owns))
    return rows


# ---- variables, machines and the session ---------------------------------------------------------

def _lines_of_variables(variables: typing.List[tf.Variable], tower_set: TowerSet, update: Update
                        ) -> Lines:
    """The lines that say how many variables there are, and where."""
    request = tower_set.request
    if request.training.objectives:
        num_trainable = len(tower_set.roles.trainable)
    else:
        num_trainable = len(operation_names(tf.trainable_variables()) & operation_names(variables))
    num_parameters = sum(variable.get_shape().num_elements() or 0 for variable in variables)
    num_bytes = sum(map(bytes_of, variables))
    placed = _placed(request, tower_set.recorded)
    has_replicas = update.train_op is not None and tower_set.roles.replicas is not None
    if has_replicas and not all(is_repeatable(each.optimizer)
                                for each in request.training.objectives):
        placed += ('; updated once and sent to the replicas, since the optimizer may look at more '
                   'than each gradient')
    return [
        ('towers', tower_set.how_built if len(tower_set.towers) > 1 else None),
        ('variables', '%d (%d trainable), %s parameters, %s' % (
            len(variables), num_trainable, '{:,}'.format(num_parameters), _bytes_text(num_bytes))),
        ('variables on', placed)]


def _bytes_text(size: int) -> str:
    """A size in bytes as text: `'41.6 kB'`."""
    if size < 100:
        return counted(size, 'byte')
    if size < 1e5:
        return '%.1f kB' % (size / 1e3)
    return '%.1f MB' % (size / 1e6)


def _placed(request: Request, recorded: Recorded) -> str:
    """Where the variables are, in words."""
    if request.training.objectives and request.cluster is not None and request.cluster.is_served:
        return 'the parameter servers, by size, once there is a session'
    made = operation_names(recorded.created)
    devices_before = set()
    if not request.placement.is_earlier_builds:
        for variable in recorded.variables:
            if variable.op.name not in made:
                devices_before.add(short_name(variable.device) or 'no device')
    texts = []
    if made or not devices_before:
        texts.append(request.placement.describe())
    if devices_before:
        texts.append('those from before the build on ' + ', '.join(sorted(devices_before)))
    return '; '.join(texts)


def _lines_of_session(request: Request, batch_size: typing.Any) -> Lines:
    """The lines about the machines, and about what a session has to be made with.

    `batch_size` is the number of this machine's examples, an int or a scalar.
    """
    lines: Lines = []
    if request.training.objectives and request.cluster is not None:
        lines += [('cluster', _cluster(request.cluster, batch_size, len(request.devices))),
                  ('open to anyone', request.cluster.warning())]
    if needs_config(request.devices):
        lines.append(('session', 'tf.Session(config=towers.session_config(built.devices)) makes '
                      'the CPU devices'))
    config = session_config(request.devices)
    lines.append(('session_config', describe_config(config, request.devices)))
    return lines


def _cluster(cluster: typing.Any, batch_size: typing.Any, num_towers: int) -> str:
    """The machines, and the number of towers and examples that a step has on all of them.

    Args:
      cluster: `Cluster`.
      batch_size: the number of this machine's examples, an int or a scalar.
      num_towers: on this machine.
    """
    count = cluster.num_workers
    if not cluster.synchronous or cluster.has_local_steps:
        batch = 'those of one worker, and its batch, in each update'
    elif not isinstance(batch_size, int):
        batch = 'batches of any size'
    elif cluster.uneven:
        batch = '%d examples here a step' % batch_size
    else:
        batch = 'batch %d = %d x %d' % (batch_size * count, count, batch_size)
    return '%s; %d towers in all, %s' % (cluster.describe(), num_towers * count, batch)


def _precision(request: Request) -> typing.Optional[str]:
    """How the precision is made; None for float32."""
    precision = request.numerics.precision
    if precision == 'float32':
        return None
    return "%s by TensorFlow's rewrite %s; the audit of a step says whether it acts" % (
        precision, rewrite_field(precision, request.devices))


# ---- gradients and optimizers --------------------------------------------------------------------

def _lines_of_training(tower_set: TowerSet, update: Update) -> Lines:
    """The lines about gradients, optimizers and their updates."""
    request = tower_set.request
    counted_here = None
    if update.counts_step:
        counted_here = 'counted here, since the optimizer leaves it to its caller: do not add to it'
    loss_scale = request.numerics.loss_scale
    return [
        ('optimizer', _optimizers(request, update)),
        ('global step', counted_here),
        ('reduction', _reduction(request)),
        ('accumulation', accumulation_line(tower_set.towers, request.split.accumulate,
                                           request.memory.schedule)),
        ('recomputation', _recomputation(tower_set.recomputed, request.memory.recompute)),
        ('learning rate', _learning_rates(request)),
        ('loss scale', None if loss_scale is None else loss_scale.describe()),
        ('one device', _one_device(tower_set))]


def _one_device(tower_set: TowerSet) -> typing.Optional[str]:
    """Whether the towers are proven to be one device, for each loss; None for one tower alone."""
    request = tower_set.request
    recorded = tower_set.recorded
    accumulate = request.split.accumulate
    if len(tower_set.towers) == 1 and request.has_whole_batch:
        return None
    if len(tower_set.towers) == 1:
        name_of_part = 'machine'
    elif accumulate == 1:
        name_of_part = 'tower'
    else:
        name_of_part = 'micro-batch'
    sums_even_shards = (request.training.reduction == 'sum' and tower_set.batch.is_even
                        and accumulate == 1 and request.has_whole_batch)
    question = Question(adds_shards=_losses_are_sums(request) or sums_even_shards,
                        static_size=static_size(tower_set.batch.inputs[0]), names=name_of_part)
    texts = []
    averages = _averages_of_tower_0(tower_set)
    for name, loss in with_parts('loss', recorded.output.loss):
        losses = [loss] + tower_set.losses.added
        read = graph_walk.ancestors(losses)
        question = question._replace(
            shard_averages=[variable for variable in averages if variable in read])
        verdict = verdict_of(losses, recorded.proven.proof, recorded.proven.batch_norms, question)
        if isinstance(recorded.output.loss, dict):
            texts.append('%s: %s' % (name, verdict.text))
        else:
            texts.append(verdict.text)
    return '; '.join(texts) + _whose_batch(request)


def _averages_of_tower_0(tower_set: TowerSet) -> typing.List[str]:
    """Sorted names of the variables that tower 0 writes from means or other statistics of its own
    examples; without the averages of batch norms, which the proof names itself."""
    proven = tower_set.recorded.proven
    of_batch_norms = proven.batch_norms.statistics()
    names = set()
    for writes in proven.analysis.writes.values():
        for write in writes:
            statistics = write.value.reductions | write.value.shard_statistics
            if statistics - of_batch_norms:
                names.add(write.variable)
    return sorted(names.intersection(tower_set.roles.names(FIRST)))


def _whose_batch(request: Request) -> str:
    """What the batch is that the loss is of, where there are several machines."""
    if request.cluster is None:
        return ''
    if request.has_whole_batch:
        return "; the batch is one worker's own"
    return '; the batch is that of all machines'


def _num_towers_of_update(request: Request) -> int:
    """How many towers have a part in each update, on all machines."""
    if request.cluster is None:
        return len(request.devices)
    return len(request.devices) * request.cluster.workers_a_step


def _reduction(request: Request) -> str:
    """The loss whose gradient the combined gradient is, in words."""
    reduction = request.training.reduction
    cluster = request.cluster
    num_towers = _num_towers_of_update(request)
    if num_towers == 1:
        return '%s (of one tower: its own gradient)' % reduction
    if _losses_are_sums(request):
        return "sum: the gradient of the sum of the towers' losses"
    batch = 'batch'
    if cluster is not None and cluster.workers_a_step == 1 and cluster.num_workers > 1:
        batch = "worker's own batch"
    if reduction == 'mean':
        return "mean: the gradient of the %s's mean loss" % batch
    return "sum: %d x the gradient of the %s's mean loss" % (num_towers, batch)


def _losses_are_sums(request: Request) -> bool:
    """Whether losses are sums over the examples, so that the towers' losses are added up."""
    has_optimizer_calls = request.training.objectives.optimizer_calls is not None
    return request.training.reduction == 'sum' and has_optimizer_calls


def _named_optimizers(objectives: Objectives
                      ) -> typing.List[typing.Tuple[typing.Optional[str], typing.Any]]:
    """`[(name of its loss, optimizer)]`, also of optimizers that the model function itself uses."""
    optimizer_calls = objectives.optimizer_calls
    if optimizer_calls is not None:
        return [(None, optimizer) for optimizer in optimizer_calls.optimizers()]
    return [(each.name, each.optimizer) for each in objectives]


def _optimizers(request: Request, update: Update) -> str:
    """The classes of the optimizers; with several losses, also how much each of them updates."""
    objectives = request.training.objectives
    if objectives.names is None:
        return ', '.join(type(optimizer).__name__
                         for _, optimizer in _named_optimizers(objectives))
    texts = []
    for each in objectives:
        text = '%s: %s, %d variables' % (
            each.name, type(each.optimizer).__name__, len(update.gradients[each.name]))
        if update.riding[each.name]:
            text += ', %d of the updates' % update.riding[each.name]
        texts.append(text)
    return '; '.join(texts)


def _learning_rates(request: Request) -> str:
    """The learning rates, and by which factor towers that are added up change them."""
    added = _num_towers_of_update(request)
    if request.training.reduction == 'mean' or _losses_are_sums(request):
        added = 1
    texts = []
    for name, optimizer in _named_optimizers(request.training.objectives):
        text = describe_learning_rate(optimizer, added)
        if name is not None:
            text = '%s: %s' % (name, text)
        if text not in texts:
            texts.append(text)
    return '; '.join(texts)


def _recomputation(recomputed: typing.Sequence[Recomputed], asked: typing.Any
                   ) -> typing.Optional[str]:
    """How much is recomputed; None where nothing is, and none was `asked` for by `Memory`."""
    num_operations = sum(len(each.operations) for each in recomputed)
    if num_operations:
        num_segments = sum(each.segments for each in recomputed)
        return '%d operations of the forward pass are run again, in %s' % (
            num_operations, counted(num_segments, 'segment'))
    if asked is None:
        return None
    if asked == 'auto':
        return 'nothing: no place of the forward pass is worth it'
    return 'nothing: the backward pass takes nothing that lies between these results'


# ---- the writes of the forward pass --------------------------------------------------------------

def _lines_of_roles(tower_set: TowerSet) -> Lines:
    """The lines that say who writes the state that a step changes beside the update."""
    lines: Lines = [('updated by', tower_set.roles.describe(tower_set.request))]
    own_state = tower_set.roles.names(OWN)
    if own_state:
        lines.append(('of each tower', '%s; tf.variables_initializer(built.own_state) resets every '
                      'tower' % briefly(own_state)))
    return lines


def _batch_norm(tower_set: TowerSet, num_updates_before: int) -> str:
    """Whose statistics normalize, and whose `UPDATE_OPS` run with a step."""
    towers = tower_set.towers
    update_ops = tower_set.request.training.update_ops
    others = ''
    if num_updates_before:
        others = ', %d from before the towers %s' % (
            num_updates_before, 'do not run either' if update_ops == 'none' else 'too')
    if not any(tower.updates for tower in towers):
        return _synchronized(tower_set) + 'no update ops' + others
    count = len(towers[0].updates)
    if update_ops == 'none':
        ride = "nobody's %d update ops run" % count
    elif update_ops == 'all':
        ride = '%d update ops of every tower ride on the train op' % count
    else:
        ride = '%d update ops of tower 0 ride on the train op' % count
        num_counting = len(updates_that_write(towers, metric_variables()))
        if num_counting:
            others += ', %d of the other towers that count metrics' % num_counting
    return _synchronized(tower_set) + ride + others


def _synchronized(tower_set: TowerSet) -> str:
    """How many batch norms have the statistics of the whole batch; empty without `'sync'`."""
    if tower_set.request.training.batch_norm != 'sync':
        return ''
    proven = tower_set.recorded.proven
    text = '%d in sync over the whole batch; ' % proven.in_sync
    left_alone = [op.name for op in proven.batch_norms.unproven]
    if left_alone:
        text += '%d left alone, not proven to be over the examples (%s); ' % (
            len(left_alone), briefly(left_alone))
    return text


def _initialized_from_shard(variables: typing.Iterable[tf.Variable], first: Tower
                            ) -> typing.List[str]:
    """Names of the variables whose initial value depends on the first tower's part of the batch."""
    shard = operation_names(leaves_of(first.inputs))
    names = []
    for variable in variables:
        initializer = compat.initializer_of(variable)
        if initializer is not None and shard & graph_walk.ancestors(initializer.inputs):
            names.append(variable.op.name)
    return names
