"""The train op of a build; with several losses, a train op for each loss and one for all."""

import collections
import functools

import tensorflow.compat.v1 as tf

from towers.graph import graph_walk
from towers.graph.nests import fetches_in
from towers.graph.variable_access import metric_variables
from towers.nonfinite import checked_at_least_scale
from towers.placement.variable_device import only_device
from towers.reduce.replicas import follow_updates
from towers.reduce.update import apply_update, checked_transform
from towers.reduce.update_order import hold_back, hold_update
from towers.tower.closure_tensors import (check_of_no_tower, check_of_no_worker,
                                          losses_by_tensor, take_losses_of_batch)
from towers.tower.objectives import GradientsOfModel, flat, map_shaped, tensors_of
from towers.tower.optimizer_gradients import Minimizing, has_own_minimize
from towers.tower.outputs import weighted_mean
from towers.tower.write_order import updates_that_write

Update = collections.namedtuple(
    'Update', 'train_op train_ops slots gradients rides slots_of_replicas counts before redirect '
    'scaled_losses', defaults=((), False, (), None, None))
"""The operations of the update, as `update_variables` returns them.

Fields:
  train_op: operation of one step of all losses; None without an optimizer.
  train_ops: dict from the name of a loss to the operation of a step of that loss alone; empty where
    there is one loss.
  slots: the variables that the optimizers made.
  gradients: the combined and transformed gradients: list of pairs, or dict of lists by loss.
  rides: dict from the name of a loss to the number of updates, such as batch norm's, that ride on
    its train op; empty with one loss.
  slots_of_replicas: the variables that they made for replicas.
  counts: whether the global step is counted here, since the optimizer leaves it to its caller.
  before: tuple of the tensors and operations that the optimizer waits for: the loss, and the
    updates that ride on the train op; with several losses ().
  redirect: as `hold_back` returns it; or None.
  scaled_losses: `ScaledLosses` that watch the gradients; or None.
"""


def update_variables(tower_set, request, outputs, combined, shards, collections_before,
                     machines=None):
    """Makes the update of the shared variables, and puts other updates onto it: `Update`.

    Args:
      tower_set: `TowerSet`.
      request: `Request`.
      outputs: `Outputs`; its loss is a scalar, or a dict of scalars by name.
      combined: `CombinedTowers`, or dict of `CombinedTowers` by name.
      shards: `CutBatch`.
      collections_before: `BuildCollections`.
      machines: the object that has combined gradients across machines; or None.
    """
    if not request.objectives:
        return Update(train_op=None, train_ops={}, slots=[], gradients=[], rides={})
    settle = _settling(tower_set, request, outputs, combined, shards)
    of, of_towers = request.objectives.of, collections_before.new_updates()
    with graph_walk.Recording(tf.get_default_graph()) as made:
        gradients = request.objectives.shaped(
            tower_set.gradients.made_by_optimizer(
                each, of(each, outputs.loss), of(each, combined).gradients)
            for each in request.objectives)
        of_optimizers = collections_before.new_updates()[len(of_towers):]
        gradients = request.objectives.shaped(
            checked_transform(each.transform_gradients, of(each, gradients), request.placement,
                              each.name)
            for each in request.objectives)
    made = made.operations
    settle(made, [
        tensor for pairs in flat(gradients) for tensor in tensors_of(pairs)], ())
    updates = _updates(tower_set, request.update_ops, collections_before.updates, of_optimizers)
    if request.objectives.names is None:
        update = _of_one_loss(tower_set, request, outputs, gradients, combined, updates, machines,
                              made, settle)
    else:
        update = _of_several(tower_set, request, outputs, gradients, combined, updates, made,
                             settle)
    return update._replace(gradients=map_shaped(
        lambda pairs: [pair for pair in pairs if pair[0] is not None], update.gradients))


def _settling(tower_set, request, outputs, combined, shards):
    """The function that settles what operations of the update take by a closure.

    It takes all operations that were made so far (what an optimizer has kept of its
    compute_gradients comes with them), what they are made for, and tensors and operations that they
    may take; see `closure_tensors`.
    """
    towers, means = tower_set.towers, {}
    is_one_part = len(towers) == 1 and request.has_whole_batch
    of_model = any(isinstance(each.optimizer, GradientsOfModel) for each in request.objectives)
    trained = {variable.op.name for variable in tower_set.gradients.trainable}

    def whole_loss(name):
        if name not in means:
            losses = [tower.loss if name is None else tower.loss[name] for tower in towers]
            with tf.control_dependencies(None), only_device(request.placement.main), \
                    tf.name_scope(request.name + 's'):
                means[name] = weighted_mean(losses, shards.weights)
        return means[name]

    def settle(made, fetches, after):
        if is_one_part or of_model:  # whose results are the calls' own
            return
        take_losses_of_batch(made, losses_by_tensor(towers), whole_loss)
        known = [tensor for each in flat(combined) for tensor in _read_for(each.gradients, each)]
        check_of_no_tower(
            made, fetches, known + list(after) + list(towers[0].updates),
            [loss for tower in towers for loss in flat(tower.loss)], tower_set.recorded,
            [variable for variable in tower_set.roles.own_variables()
             if variable.op.name not in trained])
        if not request.has_whole_batch:
            check_of_no_worker(made, fetches, flat(outputs.loss) + list(means.values()),
                               [(tensor, None) for tensor in known])
    return settle


def _of_one_loss(tower_set, request, outputs, gradients, combined, updates, machines, made,
                 settle):
    towers = tower_set.towers
    scaled_losses, on_skip = tower_set.gradients.scaled_losses, None
    if scaled_losses is not None:
        scaled_losses = scaled_losses.watching(combined.gradients)
        if request.numerics.check_numerics:
            on_skip = functools.partial(checked_at_least_scale, combined.gradients, scaled_losses)
    loss = outputs.loss
    updates_here = machines is None or machines.updates_here
    updates += follow_updates(tower_set.roles.replicas, updates,
                              [loss] + _read_for(gradients, combined))
    gates, computed = machines.gates if machines is not None else [], _computed(outputs, towers)
    redirect = None
    if machines is not None and updates_here:
        updates, redirect = hold_back(updates, gates, request.cluster.active, computed)
    after = [loss] + updates
    applied, operations = _apply(
        tower_set, request, request.objectives[0], loss, gradients, combined, after,
        global_step=request.global_step, scaled_losses=scaled_losses, on_skip=on_skip)
    settle(made + operations, [applied.train_op], after)
    if redirect is not None:
        redirect()  # the optimizer may wait for updates by itself
    if updates_here:
        hold_update(applied.train_op, _all_of(combined), after, computed, gates)
    return Update(train_op=applied.train_op, train_ops={}, slots=applied.slots,
                  gradients=gradients, rides={}, slots_of_replicas=applied.slots_of_replicas,
                  counts=applied.counts, before=tuple(after), redirect=redirect,
                  scaled_losses=scaled_losses)


def _apply(tower_set, request, objective, loss, gradients, combined, after, **further):
    """Applies the gradients of a loss: `(Applied, list of the operations that this has made)`."""
    optimizer = objective.optimizer
    if has_own_minimize(optimizer):
        optimizer = Minimizing(optimizer, loss)
    with graph_walk.Recording(tf.get_default_graph()) as made:
        applied = apply_update(
            optimizer, gradients, placement=request.placement,
            variables=tower_set.recorded.variables, after=after,
            replicas=tower_set.roles.replicas,
            on_towers=combined.on_towers, **further)
    return applied, made.operations


def _computed(outputs, towers):
    """The tensors and operations that can be fetched without a step."""
    shown = [outputs] + [(tower.data_loss, tower.predictions, tower.metrics) for tower in towers]
    return fetches_in(shown)


def _of_several(tower_set, request, outputs, gradients, combined, updates, made, settle):
    """A train op for each loss, which computes nothing for the others; and one for all losses.

    The train op for all losses takes all gradients at the weights before the step, and applies them
    in the order of the losses: two optimizers do not write the same variable at the same time.
    """
    towers, losses = tower_set.towers, outputs.loss
    riding, computed = _riding(updates, losses, towers), _computed(outputs, towers)
    train_ops, slots, of_replicas, applied = collections.OrderedDict(), [], [], []
    joint_after = flat(losses) + updates + [
        tensor for pairs in flat(gradients) for tensor in tensors_of(pairs)]
    joint_after += follow_updates(tower_set.roles.replicas, updates, joint_after + [
        tensor for each in flat(combined) for tensor in _read_for([], each)])
    for each in request.objectives:
        after = [losses[each.name]] + riding[each.name]
        after += follow_updates(
            tower_set.roles.replicas, riding[each.name],
            after + _read_for(gradients[each.name], combined[each.name]))
        one, operations = _apply(
            tower_set, request, each, losses[each.name], gradients[each.name],
            combined[each.name], after, global_step=request.global_step)
        train_ops[each.name], made = one.train_op, made + operations
        settle(made, [one.train_op], after)
        hold_update(train_ops[each.name], _all_of(combined[each.name]), after, computed)
        slots, of_replicas = slots + one.slots, of_replicas + one.slots_of_replicas
    for each in request.objectives:
        joint, operations = _apply(
            tower_set, request, each, losses[each.name], gradients[each.name],
            combined[each.name], joint_after + applied, global_step=None)
        made = made + operations
        settle(made, [joint.train_op], joint_after)
        train_op, slots = joint.train_op, slots + joint.slots
        of_replicas += joint.slots_of_replicas
        applied = [train_op]
    hold_update(applied[-1], [pair for part in flat(combined) for pair in _all_of(part)],
                flat(losses) + updates, computed)
    if request.global_step is not None:
        with tf.control_dependencies(applied), only_device(request.global_step.device or None):
            train_op = tf.group(*(applied + [tf.assign_add(
                request.global_step, tf.ones([], request.global_step.dtype.base_dtype)).op]))
    return Update(train_op=train_op, train_ops=train_ops, slots=slots, gradients=gradients,
                  rides={name: len(ops) for name, ops in riding.items()},
                  slots_of_replicas=of_replicas, counts=one.counts)


def _read_for(gradients, combined):
    """The tensors of the gradients that the optimizer gets, and of their replicas on each tower."""
    return tensors_of([pair for pair in list(gradients) + _on_towers(combined)
                       if pair[0] is not None])


def _all_of(combined):
    """The combined gradients with those that the replicas get: list of pairs; variable or None."""
    return list(combined.gradients) + _on_towers(combined)


def _on_towers(combined):
    return [(gradient, None) for every in (combined.on_towers or {}).values()
            for gradient in every]


def _riding(updates, losses, towers):
    """{name of a loss: the updates that ride on its train op}.

    An update, such as batch norm's, is computed from activations of its layer. It rides on the
    train op of a loss that is computed from the same activations: the step then computes nothing
    else for it. An update that needs activations of several losses (an average of both, one group
    of all updates) would ride nowhere and be lost where losses are trained in turn: it rides on
    each of those losses.
    """
    known = {name: {op for op in graph_walk.ancestors([loss])
                    if any(tower.has(op) for tower in towers)} for name, loss in losses.items()}
    of_any = set().union(*known.values())
    needs = [{op.name for op in graph_walk.step_operations([update])} & of_any
             for update in updates]
    fits = [any(need <= own for own in known.values()) for need in needs]
    return map_shaped(lambda own: [
        update for update, need, fits_one in zip(updates, needs, fits)
        if need <= own or not fits_one and need & own], known)


def _updates(tower_set, update_ops, before, of_optimizers):
    towers = tower_set.towers
    if update_ops == 'none':
        return []
    chosen, others = towers, list(before)
    if update_ops == 'first':
        chosen = towers[:1]
        roles = tower_set.roles
        others += updates_that_write(towers, [
            variable.op.name for variable in roles.own_variables(1)]
            + list(metric_variables()) + roles.names('every'))
    return [update for tower in chosen for update in tower.updates] + others + of_optimizers
