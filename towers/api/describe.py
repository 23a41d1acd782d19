"""`describe`: the plan of a build, with the lines about variables, machines, session and updates.

A line is a label and its text; a line whose text is None or empty is left out of the plan. The
lines about gradients and optimizers are in `training_lines`, the line `one device` in
`equality_line`. The test of all three is tests/api/test_plan.py.

Words of other modules used here: `OWN` is the role of a variable that each tower has, and writes,
for itself; a placement *of an earlier build* leaves the variables where that build has put them; a
repeatable optimizer makes the same update on every tower from the same gradient.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.api.built import Plan, PlannedTower, briefly
from towers.api.equality_line import names_initialized_from_shard
from towers.api.train_ops import Update
from towers.api.training_lines import Lines, lines_of_training
from towers.capture.record import Recorded
from towers.capture.stage_lines import stages_line
from towers.copies.tower_set import TowerSet
from towers.errors import counted
from towers.graph.graph_walk import bytes_of, operation_names
from towers.graph.variable_access import metric_variables
from towers.graph.waits import Wait
from towers.model.objectives import all_pairs
from towers.model.request import Request
from towers.optimizers import is_repeatable
from towers.placement.devices import short_name
from towers.placement.numerics import describe_xla, rewrite_field
from towers.placement.session_config import describe_config, needs_config, session_config
from towers.roles.step_updates import writes_for_update_ops
from towers.roles.variable_roles import OWN, VariableRole


def describe(tower_set: TowerSet, update: Update, num_updates_before: int,
             waits: typing.List[Wait]) -> Plan:
    """The `Plan` of a build.

    Args:
      tower_set: the towers.
      update: the update of the shared variables.
      num_updates_before: how many `UPDATE_OPS` the graph had before the build.
      waits: the waits that all passes of the build have added.
    """
    request = tower_set.request
    variables = _variables_of_model(tower_set.recorded)
    has_several_towers = len(tower_set.towers) > 1
    initialized_from_shard: typing.List[str] = []  # a single tower's part is the whole batch
    if has_several_towers:
        initialized_from_shard = names_initialized_from_shard(
            variables, tower_set.towers[0])
    without_gradient = _names_without_gradient(tower_set, update)

    lines = _lines_of_variables(variables, tower_set, update)
    lines += _lines_of_session(request, tower_set.batch.batch_size)
    if request.training.objectives:
        lines += lines_of_training(tower_set, update)
    lines += _lines_of_model(tower_set, num_updates_before)
    if has_several_towers:
        lines += _lines_of_roles(tower_set)
    if initialized_from_shard:
        lines.append(('initial value', "of %s is of tower 0's part of the batch, not of all of it"
                      % briefly(initialized_from_shard)))
    lines.append(('no gradient', briefly(without_gradient)))

    static_batch_size = None  # for a batch of any size, whose `batch_size` is a tensor
    if isinstance(tower_set.batch.batch_size, int):
        static_batch_size = tower_set.batch.batch_size
    return Plan(
        towers=_rows(tower_set),
        lines=[(label, text) for label, text in lines if text],
        batch_size=static_batch_size,
        remainder=request.split.remainder,
        shares=request.split.shares,
        reduction=request.training.reduction,
        initial_of_first=initialized_from_shard,
        variable_roles=_variable_roles(tower_set, without_gradient),
        waits=waits)


def _variables_of_model(recorded: Recorded) -> typing.List[tf.Variable]:
    """The variables of the model, without local variables, such as the counters of metrics."""
    local_names = operation_names(tf.local_variables())
    return [variable for variable in recorded.variables if variable.op.name not in local_names]


def _names_without_gradient(tower_set: TowerSet, update: Update) -> typing.List[str]:
    """Names of the variables that are to be trained, and that no loss depends on."""
    with_gradient = operation_names(variable for _, variable in all_pairs(update.gradients))
    return [variable.op.name for variable in tower_set.roles.all_trained
            if variable.op.name not in with_gradient]


def _lines_of_model(tower_set: TowerSet, num_updates_before: int) -> Lines:
    """The lines about the stages, the numerics, the registered losses and the batch norms.

    Args:
      tower_set: the towers.
      num_updates_before: how many `UPDATE_OPS` the graph had before the build.
    """
    request = tower_set.request
    lines: Lines = [
        ('stages', stages_line(tower_set.towers, tower_set.cuts)),
        ('precision', _precision(request))]
    if request.numerics.xla:
        lines.append(('XLA compiles', describe_xla(request.devices)))
    lines.append(('regularization', tower_set.losses.description))
    trains = bool(request.training.objectives)
    if trains:
        lines.append(('batch norm', _batch_norm(tower_set, num_updates_before)))
    return lines


def _variable_roles(tower_set: TowerSet,
                    without_gradient: typing.Container[str]) -> typing.List[VariableRole]:
    """The role of each variable: who writes it, and why. The variables of which `tower_set.roles`
    explains nothing are last: no operation of a step writes them.

    Args:
      tower_set: the towers.
      without_gradient: names of the trained variables that no loss depends on.
    """
    explained = []
    for role in tower_set.roles.explain(tower_set.request):
        if role.variable in without_gradient:
            role = role._replace(writer='nobody', reason='no loss depends on it')
        explained.append(role)
    explained_names = {role.variable for role in explained}
    for variable in tower_set.recorded.variables:
        if variable.op.name not in explained_names:
            explained.append(VariableRole(
                variable.op.name, 'nobody', 'it is not trained, and no operation of a step '
                'writes it'))
    return explained


def _rows(tower_set: TowerSet) -> typing.List[PlannedTower]:
    """The plan's rows: one for each tower, whatever the number of its micro-batches."""
    towers = tower_set.towers
    update_ops = tower_set.request.training.update_ops
    accumulate = tower_set.request.split.accumulate
    rows = []
    for start in range(0, len(towers), accumulate):
        micro_batches = towers[start:start + accumulate]
        first = micro_batches[0]
        examples = None
        if isinstance(first.size, int):
            examples = sum(micro_batch.size for micro_batch in micro_batches)
        runs_updates = update_ops == 'all' or (update_ops == 'first' and first.index == 0)
        owns = []
        if first.updates and runs_updates:
            owns.append('batch-norm updates')  # the plan's words for all update ops of a tower
        rows.append(PlannedTower(first.index, first.device, examples, owns))
    return rows


# ---- variables, machines and the session ---------------------------------------------------------

def _lines_of_variables(variables: typing.List[tf.Variable], tower_set: TowerSet, update: Update
                        ) -> Lines:
    """The lines that say how many variables there are, and where.

    Args:
      variables: the variables of the model, without counters of metrics.
      tower_set: the towers.
      update: the update of the variables.
    """
    request = tower_set.request
    trains = bool(request.training.objectives)
    if trains:  # the variables that this build trains: an `Objective` may leave some out
        num_trainable = len(tower_set.roles.all_trained)
    else:
        num_trainable = len(operation_names(tf.trainable_variables()) & operation_names(variables))
    # A variable without a static shape counts as 0 parameters.
    num_parameters = sum(variable.get_shape().num_elements() or 0 for variable in variables)
    num_bytes = sum(map(bytes_of, variables))
    placed = _placed(request, tower_set.recorded)
    if update.replicas is not None:
        placed += _how_replicas_are_updated(request)
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


def _how_replicas_are_updated(request: Request) -> str:
    """The end of the text on where variables are, if they have replicas; `''` if each tower makes
    the optimizer's update of its own replicas."""
    # A repeatable update depends on nothing but the gradient, which is the same on every tower.
    are_repeatable = all(is_repeatable(each.optimizer) for each in request.training.objectives)
    if are_repeatable:
        return ''
    return ('; updated once and sent to the replicas, since the optimizer may look at more than '
            'each gradient')


def _placed(request: Request, recorded: Recorded) -> str:
    """The text after `variables on`: where the variables are."""
    has_parameter_servers = request.trains_with_machines and request.cluster.is_served
    if has_parameter_servers:
        return 'the parameter servers, by size, once there is a session'
    if request.placement.is_of_earlier_build:
        # The text of the earlier build's placement: it says where all variables are.
        return request.placement.describe()
    made = operation_names(recorded.created)
    from_before = [variable for variable in recorded.variables if variable.op.name not in made]
    texts = _devices_from_before(from_before)
    are_all_from_before = from_before and not made
    if not are_all_from_before:
        texts = [request.placement.describe()] + texts
    return '; '.join(texts)


def _devices_from_before(variables: typing.Iterable[tf.Variable]) -> typing.List[str]:
    """The parts of the text after `variables on` about variables that were there before the build;
    [] without any."""
    devices = {short_name(variable.device) for variable in variables}
    texts = []
    named = sorted(devices - {''})
    if named:
        texts.append('those from before the build on ' + ', '.join(named))
    if '' in devices:
        texts.append('those from before the build without a device where TensorFlow puts them: on '
                     'the first GPU, or on /cpu:0')
    return texts


def _lines_of_session(request: Request, batch_size: typing.Any) -> Lines:
    """The lines about the machines, and about the `ConfigProto` that a session needs.

    Args:
      request: the checked arguments of the build.
      batch_size: the number of this machine's examples, an int or a scalar.
    """
    lines: Lines = []
    if request.trains_with_machines:
        lines += [('cluster', _cluster(request.cluster, batch_size, len(request.devices))),
                  ('open to anyone', request.cluster.warning())]
    if needs_config(request.devices):
        lines.append(('session', 'tf.Session(config=towers.session_config(built.devices)) makes '
                      'the CPU devices'))
    config = session_config(request.devices)
    lines.append(('session_config', describe_config(config, request.devices)))
    return lines


def _cluster(cluster: typing.Any, batch_size: typing.Any, num_towers: int) -> str:
    """The text after `cluster`: the machines, and how many towers and examples a step has there.

    Args:
      cluster: `Cluster`.
      batch_size: the number of this machine's examples, an int or a scalar.
      num_towers: how many towers this machine has.
    """
    count = cluster.num_workers
    each_steps_alone = not cluster.synchronous or cluster.has_local_steps
    others_may_have_other_sizes = cluster.uneven
    if each_steps_alone:
        batch = 'those of one worker, and its batch, in each update'
    elif not isinstance(batch_size, int):
        batch = 'batches of any size'
    elif others_may_have_other_sizes:
        batch = '%d examples here a step' % batch_size
    else:
        batch = 'batch %d = %d x %d' % (batch_size * count, count, batch_size)
    return '%s; %d towers in all, %s' % (cluster.describe(), num_towers * count, batch)


def _precision(request: Request) -> typing.Optional[str]:
    """The text after `precision`: which graph rewrite of TensorFlow makes it; None for float32."""
    precision = request.numerics.precision
    if precision == 'float32':
        return None
    return "%s by TensorFlow's rewrite %s; the audit of a step says whether it acts" % (
        precision, rewrite_field(precision, request.devices))


# ---- the writes of the forward pass --------------------------------------------------------------

def _lines_of_roles(tower_set: TowerSet) -> Lines:
    """The lines that say which tower writes the variables that the optimizer does not update."""
    lines: Lines = [('updated by', tower_set.roles.describe(tower_set.request))]
    own_state = tower_set.roles.names(OWN)
    if own_state:
        lines.append(('of each tower', '%s; tf.variables_initializer(built.own_state) resets every '
                      'tower' % briefly(own_state)))
    return lines


def _batch_norm(tower_set: TowerSet, num_updates_before: int) -> str:
    """The text after `batch norm`: whose statistics normalize, and whose `UPDATE_OPS` a step runs.
    """
    update_ops = tower_set.request.training.update_ops
    text = _synchronized(tower_set) + _updates_of_towers(tower_set)
    if num_updates_before:
        do_they_run = 'do not run either' if update_ops == 'none' else 'too'
        text += ', %d from before the towers %s' % (num_updates_before, do_they_run)
    if update_ops == 'first':
        # Every tower counts its own examples, so every tower runs the updates that count metrics.
        other_towers = tower_set.towers[1:]
        num_counting = sum(len(writes_for_update_ops(tower, metric_variables()))
                           for tower in other_towers)
        if num_counting:
            text += ', %d of the other towers that count metrics' % num_counting
    return text


def _updates_of_towers(tower_set: TowerSet) -> str:
    """The text about the update ops of the model: how many, and of which towers they run."""
    request = tower_set.request
    num_updates = len(tower_set.towers[0].updates)
    if num_updates == 0:
        # No other tower has update ops either: it is a copy, or a call of the same function.
        return 'no update ops'
    if request.training.update_ops == 'none':
        return "nobody's %d update ops run" % num_updates
    if request.training.update_ops == 'all':
        word_for_part = 'tower' if request.split.accumulate == 1 else 'micro-batch'
        return '%d update ops of every %s ride on the train op' % (num_updates, word_for_part)
    return '%d update ops of tower 0 ride on the train op' % num_updates


def _synchronized(tower_set: TowerSet) -> str:
    """The text about the batch norms that use the statistics of the whole batch; `''` without
    `batch_norm='sync'`."""
    if tower_set.request.training.batch_norm != 'sync':
        return ''
    proven = tower_set.recorded.proven
    text = '%d in sync over the whole batch; ' % proven.in_sync
    left_alone = [op.name for op in proven.batch_norms.unproven]
    if left_alone:
        text += '%d left alone, not proven to be over the examples (%s); ' % (
            len(left_alone), briefly(left_alone))
    return text
