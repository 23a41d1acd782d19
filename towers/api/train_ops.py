"""The train op of a build; with several losses, a train op for each loss and one for all."""

import collections

import tensorflow.compat.v1 as tf

from towers.copies.closure_tensors import ClosureTensors
from towers.errors import InvalidArgumentError
from towers.gradients.gradient_pairs import tensors_of
from towers.gradients.optimizer_methods import OwnMinimize
from towers.graph import graph_walk
from towers.graph.graph_walk import fetches_in
from towers.graph.variable_access import metric_variables
from towers.model.objectives import flat, map_shaped
from towers.optimizers import GradientsOfModel, has_own_minimize
from towers.placement.tower_device import stages_of
from towers.placement.variable_device import only_device
from towers.reduce.micro_batches import check_order
from towers.reduce.replicas import follow_updates
from towers.reduce.update import apply_update, as_the_update_takes_them, checked_transform
from towers.roles.ownership import EVERY
from towers.roles.write_order import hold_back, hold_update, updates_that_write

Update = collections.namedtuple(
    'Update', 'train_op train_ops slots gradients rides replicas counts scaled_losses machines')
"""The operations of the update, as `update_variables` returns them.

Fields:
  train_op, train_ops, slots, gradients, replicas: as of `BuiltTowers`.
  rides: dict from the name of a loss to the number of updates, such as batch norm's, that ride on
    its train op; empty with one loss.
  counts: whether the global step is counted here, since the optimizer leaves it to its caller.
  scaled_losses: `WatchedLosses`, or None.
  machines: `Machines`, or None without a cluster.
"""

_OfLoss = collections.namedtuple('_OfLoss', 'objective loss combined gradients')
"""An objective, its loss over the batch, its `Combined` gradients, and these transformed."""

_Step = collections.namedtuple('_Step', 'applied before redirect scaled_losses')
"""One step: list of `Applied`, by loss; the tuple of losses and riding updates that the optimizer
waits for; `redirect` as of `hold_back`; `WatchedLosses`, or None."""


def update_variables(tower_set, outputs, combined, exchange, collections_before):
    """Makes the update of the shared variables, and puts other updates onto it: `Update`.

    With several losses there is a train op for each, which computes nothing for the others; and one
    for all, which takes all gradients at the weights before the step, and applies them in the order
    of the losses: two optimizers do not write the same variable at the same time.
    """
    request, replicas = tower_set.request, tower_set.roles.replicas
    objectives = request.training.objectives
    if not objectives:
        return Update(None, {}, [], [], {}, None, False, None, None)
    of, of_towers = objectives.of, collections_before.new_updates()
    steps = _Steps(tower_set, outputs, combined, exchange)
    with graph_walk.Recording(tf.get_default_graph()) as made:
        gradients = [tower_set.gradients.pairs_of_optimizer(
            each, of(each, outputs.loss), of(each, combined).gradients) for each in objectives]
        of_optimizers = collections_before.new_updates()[len(of_towers):]
        of_losses = []
        for objective, pairs in zip(objectives, gradients):
            transformed = checked_transform(
                objective.transform_gradients, pairs, request.placement.main, objective.name)
            of_losses.append(_OfLoss(
                objective, of(objective, outputs.loss), of(objective, combined),
                as_the_update_takes_them(transformed)))
    steps.closures.settle(made.operations, [
        tensor for each in of_losses for tensor in tensors_of(each.gradients)])
    updates = _updates(tower_set, collections_before.updates) + of_optimizers if (
        request.training.update_ops != 'none') else []
    riding = {} if objectives.names is None else _riding(updates, outputs.loss, tower_set.towers)
    alone = [steps.step([each], riding[each.objective.name]) for each in of_losses if riding]
    joint = steps.step(of_losses, updates)
    train_op, applied = joint.applied[-1].train_op, sum(
        (step.applied for step in alone + [joint]), [])
    if request.split.accumulate > 1:
        check_order([train_op])
    machines = None
    if exchange is not None:
        replicated = () if replicas is None else tuple(replicas.of_variable)
        machines = exchange.step(train_op, joint.before, replicated, joint.redirect)
        train_op = machines.train_op
    return Update(
        train_op=train_op, train_ops=collections.OrderedDict(
            (each.name, step.applied[-1].train_op) for each, step in zip(objectives, alone)),
        slots=sum((each.slots for each in applied), []),
        gradients=objectives.shaped([pair for pair in each.gradients if pair[0] is not None]
                                    for each in of_losses),
        rides={name: len(each) for name, each in riding.items()},
        replicas=replicas and replicas._replace(
            slots=sum((each.slots_of_replicas for each in applied), [])),
        counts=joint.applied[-1].counts, scaled_losses=joint.scaled_losses, machines=machines)


class _Steps:
    """Makes the steps of a build; `closures` are its `ClosureTensors`."""

    def __init__(self, tower_set, outputs, combined, exchange):
        self._tower_set, self._exchange = tower_set, exchange
        self.closures = ClosureTensors(tower_set, outputs.loss, [
            tensor for each in flat(combined)
            for tensor in tensors_of(list(each.gradients) + each.of_replicas)])
        self._shown = fetches_in([outputs] + [  # can be had without a step
            (tower.data_loss, tower.predictions, tower.metrics) for tower in tower_set.towers])

    def step(self, of_losses, updates):
        """The `_Step` by some `_OfLoss`es, with updates that ride on it."""
        tower_set, exchange = self._tower_set, self._exchange
        losses, read = [each.loss for each in of_losses], [
            tensor for each in of_losses
            for tensor in tensors_of(each.gradients + each.combined.of_replicas)]
        updates = updates + follow_updates(tower_set.roles.replicas, updates, losses + read)
        awaited, redirect = exchange.conditions if exchange is not None else [], None
        updates_here = exchange is None or exchange.updates_here
        if exchange is not None and updates_here:
            updates, redirect = hold_back(
                updates, awaited, tower_set.request.cluster.active, self._shown)
        scaled_losses = tower_set.gradients.scaled_losses
        if scaled_losses is not None:  # of one loss
            scaled_losses = scaled_losses.watched(of_losses[0].combined.gradients)
        # Several optimizers apply gradients that all were taken at the weights before the step.
        before, applied = losses + updates, []
        first = before + _recomputations(tower_set) + (read if len(of_losses) > 1 else [])
        global_step = tower_set.request.training.global_step
        for each in of_losses:
            after = first + [done.train_op for done in applied]
            with graph_walk.Recording(tf.get_default_graph()) as made:
                applied.append(apply_update(
                    tower_set, _applying(each, tower_set.copies),
                    each.combined._replace(gradients=each.gradients),
                    global_step if each is of_losses[-1] else None, after,
                    scaled_losses))
            self.closures.settle(made.operations, [applied[-1].train_op], after)
        if redirect is not None:
            redirect()
        if updates_here:
            combined = []
            transformed = []
            for each in of_losses:
                combined += list(each.combined.gradients) + each.combined.of_replicas
                transformed += each.gradients
            hold_update(applied[-1].train_op, combined, losses + tensors_of(transformed), before,
                        self._shown, awaited)
        return _Step(applied, tuple(before), redirect, scaled_losses)


def _recomputations(tower_set):
    """An operation for each tower, after the recomputation of what was computed from reference
    variables; [] without such. The update, which writes these, has to wait for it."""
    first = [op for each in tower_set.recomputed if each.reads_references
             for op in each.operations]
    if not first:
        return []
    if tower_set.request.call.copies == 'reuse':
        raise InvalidArgumentError(
            "recompute=, copies='reuse', and the model computes with reference variables, which "
            "an update may write before they are read again: make them with use_resource=True, or "
            "pass copies='clone'.")
    of_towers = [first] + [list(map(copied, first)) for copied in tower_set.copies]
    done = []
    for tower, operations in zip(tower_set.towers, of_towers):
        with only_device(stages_of(tower.device)[0]):
            done.append(tf.group(*operations))
    return done


def _applying(of_loss, copies):
    """The optimizer of a loss, or an object with `apply_gradients` in its place."""
    optimizer = of_loss.objective.optimizer
    if isinstance(optimizer, GradientsOfModel):
        return optimizer.of_all_towers(copies)
    return OwnMinimize(optimizer, of_loss.loss) if has_own_minimize(optimizer) else optimizer


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


def _updates(tower_set, before):
    """The updates that run with a step: from `before` the towers, and of one or all towers."""
    towers, others, roles = tower_set.towers, list(before), tower_set.roles
    if tower_set.request.training.update_ops == 'first':
        others += updates_that_write(towers, [
            variable.op.name for variable in roles.own_variables(1)]
            + list(metric_variables()) + roles.names(EVERY))
        towers = towers[:1]
    return [update for tower in towers for update in tower.updates] + others
