"""The train op of a build; with several losses, a train op for each loss and one for all."""

import collections
import functools

import tensorflow.compat.v1 as tf

from towers.graph import graph_walk
from towers.graph.graph_walk import fetches_in
from towers.graph.variable_access import metric_variables
from towers.optimizers import GradientsOfModel, has_own_minimize
from towers.placement.variable_device import only_device
from towers.reduce.replicas import follow_updates
from towers.reduce.update import apply_update, checked_transform
from towers.tower.closure_tensors import (check_of_no_tower, check_of_no_worker,
                                          losses_by_tensor, take_losses_of_batch)
from towers.tower.gradient_pairs import tensors_of
from towers.tower.objectives import flat, map_shaped
from towers.tower.optimizer_methods import Minimizing
from towers.tower.outputs import weighted_mean
from towers.tower.ownership import EVERY
from towers.tower.write_order import hold_back, hold_update, updates_that_write

Update = collections.namedtuple(
    'Update', 'train_op train_ops slots gradients rides replicas counts before redirect '
    'scaled_losses')
"""The operations of the update, as `update_variables` returns them.

Fields:
  train_op, train_ops, slots, gradients, replicas: as of `BuiltTowers`.
  rides: dict from the name of a loss to the number of updates, such as batch norm's, that ride on
    its train op; empty with one loss.
  counts: whether the global step is counted here, since the optimizer leaves it to its caller.
  before: tuple of the tensors and operations that the optimizer waits for: the losses, and the
    updates that ride on the train op.
  redirect: as `hold_back` returns it; or None.
  scaled_losses: `WatchedLosses`, or None.
"""

_OfLoss = collections.namedtuple('_OfLoss', 'objective loss combined gradients')
"""An objective, its loss over the batch, its `Combined` gradients, and these transformed."""

_Step = collections.namedtuple(
    '_Step', 'train_op slots slots_of_replicas counts before redirect scaled_losses')


def update_variables(tower_set, request, outputs, combined, batch, collections_before,
                     machines=None):
    """Makes the update of the shared variables, and puts other updates onto it: `Update`.

    With several losses there is a train op for each, which computes nothing for the others; and one
    for all, which takes all gradients at the weights before the step, and applies them in the order
    of the losses: two optimizers do not write the same variable at the same time.
    """
    objectives, replicas = request.objectives, tower_set.roles.replicas
    if not objectives:
        return Update(None, {}, [], [], {}, None, False, (), None, None)
    of, of_towers = objectives.of, collections_before.new_updates()
    settle = _settling(tower_set, request, outputs, combined, batch)
    with graph_walk.Recording(tf.get_default_graph()) as made:
        gradients = [tower_set.gradients.made_by_optimizer(
            each, of(each, outputs.loss), of(each, combined).gradients) for each in objectives]
        of_optimizers = collections_before.new_updates()[len(of_towers):]
        of_losses = [_OfLoss(each, of(each, outputs.loss), of(each, combined), checked_transform(
            each.transform_gradients, pairs, request.placement.main, each.name))
                     for each, pairs in zip(objectives, gradients)]
    settle(made.operations, [
        tensor for each in of_losses for tensor in tensors_of(each.gradients)], ())
    updates = _updates(tower_set, request.update_ops, collections_before.updates, of_optimizers)
    shown = fetches_in([outputs] + [(tower.data_loss, tower.predictions, tower.metrics)
                                    for tower in tower_set.towers])  # without a step
    step_of = functools.partial(
        _step, tower_set, request, machines, shown, lambda applying, applied, after: settle(
            made.operations + applying, [applied], after))
    riding = {} if objectives.names is None else _riding(updates, outputs.loss, tower_set.towers)
    alone = [step_of([each], riding[each.objective.name]) for each in of_losses if riding]
    joint = step_of(of_losses, updates)
    return Update(
        train_op=joint.train_op, train_ops=collections.OrderedDict(
            (each.name, step.train_op) for each, step in zip(objectives, alone)),
        slots=sum((step.slots for step in alone + [joint]), []),
        gradients=objectives.shaped([pair for pair in each.gradients if pair[0] is not None]
                                    for each in of_losses),
        rides={name: len(each) for name, each in riding.items()},
        replicas=replicas and replicas._replace(
            slots=sum((step.slots_of_replicas for step in alone + [joint]), [])),
        counts=joint.counts, before=joint.before, redirect=joint.redirect,
        scaled_losses=joint.scaled_losses)


def _settling(tower_set, request, outputs, combined, batch):
    """The function that settles what operations take by a closure, see `closure_tensors`: of these
    operations, what they are made for, and tensors and operations that they may take."""
    towers, means = tower_set.towers, {}
    is_one_part = len(towers) == 1 and request.has_whole_batch
    trained = {variable.op.name for variable in tower_set.roles.trainable}

    def whole_loss(name):
        if name not in means:
            losses = [tower.loss if name is None else tower.loss[name] for tower in towers]
            with tf.control_dependencies(None), only_device(request.placement.main), \
                    tf.name_scope(request.name + 's'):
                means[name] = weighted_mean(losses, batch.weights)
        return means[name]

    def settle(made, fetches, after):
        if is_one_part or request.objectives.of_model is not None:  # which has what its calls made
            return
        take_losses_of_batch(made, losses_by_tensor(towers), whole_loss)
        known = [tensor for each in flat(combined)
                 for tensor in tensors_of(_and_replicas(each.gradients, each))]
        check_of_no_tower(
            made, fetches, known + list(after) + list(towers[0].updates),
            [loss for tower in towers for loss in flat(tower.loss)], tower_set.recorded,
            [variable for variable in tower_set.roles.own_variables()
             if variable.op.name not in trained])
        if not request.has_whole_batch:
            check_of_no_worker(made, fetches, flat(outputs.loss) + list(means.values()),
                               [(tensor, None) for tensor in known])
    return settle


def _step(tower_set, request, machines, shown, settle, of_losses, updates):
    """The `_Step` by some `_OfLoss`es, with updates that ride on it. `shown` are the tensors that
    can be had without a step; `settle` takes the operations that an optimizer has made, the one
    that it returned, and those that it waits for."""
    replicas, losses = tower_set.roles.replicas, [each.loss for each in of_losses]
    read = [tensor for each in of_losses
            for tensor in tensors_of(_and_replicas(each.gradients, each.combined))]
    updates = list(updates) + follow_updates(replicas, updates, losses + read)
    gates, redirect = machines.gates if machines is not None else [], None
    updates_here = machines is None or machines.updates_here
    if machines is not None and updates_here:
        updates, redirect = hold_back(updates, gates, request.cluster.active, shown)
    scaled_losses = tower_set.gradients.scaled_losses
    if scaled_losses is not None:  # of one loss
        scaled_losses = scaled_losses.watched(of_losses[0].combined.gradients)
    # Several optimizers apply what all have taken at the weights before the step.
    before, all_applied, made = losses + updates, [], []
    first = before + (read if len(of_losses) > 1 else [])
    for each in of_losses:
        after = first + [done.train_op for done in all_applied]
        with graph_walk.Recording(tf.get_default_graph()) as applying:
            applied = apply_update(
                _that_applies(each, tower_set.copies), each.gradients,
                request.global_step if each is of_losses[-1] else None,
                placement=request.placement, variables=tower_set.recorded.variables, after=after,
                replicas=replicas, on_towers=each.combined.on_towers, scaled_losses=scaled_losses)
        made = made + applying.operations
        settle(made, applied.train_op, after)
        all_applied.append(applied)
    if redirect is not None:
        redirect()
    if updates_here:
        hold_update(applied.train_op, [
            pair for each in of_losses
            for pair in _and_replicas(each.combined.gradients, each.combined)],
                    before, shown, gates)
    return _Step(applied.train_op, sum((each.slots for each in all_applied), []),
                 sum((each.slots_of_replicas for each in all_applied), []), applied.counts,
                 tuple(before), redirect, scaled_losses)


def _that_applies(of_loss, copies):
    """The optimizer of a loss, or an object with `apply_gradients` in its place."""
    optimizer = of_loss.objective.optimizer
    if isinstance(optimizer, GradientsOfModel):
        return optimizer.of_all_towers(copies)
    return Minimizing(optimizer, of_loss.loss) if has_own_minimize(optimizer) else optimizer


def _and_replicas(gradients, combined):
    """The pairs, with the gradients that the replicas get, which have None for their variable."""
    return list(gradients) + [(gradient, None) for every in (combined.on_towers or {}).values()
                              for gradient in every]


def _riding(updates, losses, towers):
    """{name of a loss: the updates that ride on its train op}: of each loss that is computed from
    an update's activations; of one loss alone, if that is enough for the update."""
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
    others, roles = list(before), tower_set.roles
    if update_ops == 'first':
        others += updates_that_write(towers, [
            variable.op.name for variable in roles.own_variables(1)]
            + list(metric_variables()) + roles.names(EVERY))
        towers = towers[:1]
    return [update for tower in towers for update in tower.updates] + others + of_optimizers
