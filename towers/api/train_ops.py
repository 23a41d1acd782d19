"""The train op of a build; with several losses, a train op for each loss and one for all."""

import collections

import tensorflow.compat.v1 as tf

from towers.graph import graph_walk
from towers.graph.graph_walk import fetches_in
from towers.graph.variable_access import metric_variables
from towers.placement.variable_device import only_device
from towers.reduce.replicas import follow_updates
from towers.reduce.update import apply_update, checked_transform
from towers.tower.closure_tensors import (check_of_no_tower, check_of_no_worker,
                                          losses_by_tensor, take_losses_of_batch)
from towers.tower.objectives import GradientsOfModel, flat, map_shaped, tensors_of
from towers.tower.optimizer_gradients import Minimizing, has_own_minimize
from towers.tower.outputs import weighted_mean
from towers.tower.write_order import hold_back, hold_update, updates_that_write

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
  before: tuple of the tensors and operations that the optimizer waits for: the losses, and the
    updates that ride on the train op.
  redirect: as `hold_back` returns it; or None.
  scaled_losses: `ScaledLosses` that watch the gradients; or None.
"""


def update_variables(tower_set, request, outputs, combined, shards, collections_before,
                     machines=None):
    """Makes the update of the shared variables, and puts other updates onto it: `Update`.

    With several losses there is a train op for each, which computes nothing for the others; and one
    for all, which takes all gradients at the weights before the step, and applies them in the order
    of the losses: two optimizers do not write the same variable at the same time.

    Args:
      tower_set: `TowerSet`.
      request: `Request`.
      outputs: `Outputs`; its loss is a scalar, or a dict of scalars by name.
      combined: `Combined`, or dict of `Combined` by name.
      shards: `CutBatch`.
      collections_before: `BuildCollections`.
      machines: the object that has combined gradients across machines; or None.
    """
    objectives = request.objectives
    if not objectives:
        return Update(train_op=None, train_ops={}, slots=[], gradients=[], rides={})
    of, of_towers = objectives.of, collections_before.new_updates()
    settle = _settling(tower_set, request, outputs, combined, shards)
    with graph_walk.Recording(tf.get_default_graph()) as made:
        gradients = objectives.shaped(
            tower_set.gradients.made_by_optimizer(
                each, of(each, outputs.loss), of(each, combined).gradients)
            for each in objectives)
        of_optimizers = collections_before.new_updates()[len(of_towers):]
        gradients = objectives.shaped(
            checked_transform(each.transform_gradients, of(each, gradients),
                              request.placement.main, each.name)
            for each in objectives)
    made = made.operations
    settle(made, [
        tensor for pairs in flat(gradients) for tensor in tensors_of(pairs)], ())
    updates = _updates(tower_set, request.update_ops, collections_before.updates, of_optimizers)
    steps = _Steps(tower_set, request, outputs, combined, gradients, machines, settle, made)
    riding = {} if objectives.names is None else _riding(updates, outputs.loss, tower_set.towers)
    alone = [steps.of([each], riding[each.name]) for each in objectives if riding]
    joint = steps.of(list(objectives), updates)
    return joint._replace(
        train_ops=collections.OrderedDict(
            (each.name, step.train_op) for each, step in zip(objectives, alone)),
        slots=sum((step.slots for step in alone + [joint]), []),
        slots_of_replicas=sum((step.slots_of_replicas for step in alone + [joint]), []),
        rides={name: len(each) for name, each in riding.items()},
        gradients=map_shaped(lambda pairs: [pair for pair in pairs if pair[0] is not None],
                             gradients))


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


class _Steps:
    """Makes train ops: of one loss, or of several at once."""

    def __init__(self, tower_set, request, outputs, combined, gradients, machines, settle, made):
        self._tower_set, self._request, self._outputs = tower_set, request, outputs
        self._combined, self._gradients, self._machines = combined, gradients, machines
        self._settle, self._made = settle, made
        self._computed = _computed(outputs, tower_set.towers)

    def of(self, objectives, updates):
        """The `Update` by some of the losses, with updates that ride on it.

        Args:
          objectives: list of `Objective`; their optimizers write one after the other.
          updates: list of operations or tensors.
        """
        request, machines, replicas = self._request, self._machines, self._tower_set.roles.replicas
        of, updates = request.objectives.of, list(updates)
        combined = [of(each, self._combined) for each in objectives]
        losses = [of(each, self._outputs.loss) for each in objectives]
        read = [tensor for each, summed in zip(objectives, combined)
                for tensor in _read_for(of(each, self._gradients), summed)]
        updates += follow_updates(replicas, updates, losses + read)
        gates, redirect = machines.gates if machines is not None else [], None
        updates_here = machines is None or machines.updates_here
        if machines is not None and updates_here:
            updates, redirect = hold_back(updates, gates, request.cluster.active, self._computed)
        scaled_losses = self._tower_set.gradients.scaled_losses
        if scaled_losses is not None:  # of one loss
            scaled_losses = scaled_losses.watching(combined[0].gradients)
        before, slots, slots_of_replicas = losses + updates, [], []
        after = before + (read if len(objectives) > 1 else [])
        for each, summed in zip(objectives, combined):
            applied = self._apply(each, summed, after, each is objectives[-1], scaled_losses)
            after = after + [applied.train_op]
            slots, slots_of_replicas = slots + applied.slots, (
                slots_of_replicas + applied.slots_of_replicas)
        if redirect is not None:
            redirect()  # the optimizer may wait for updates by itself
        if updates_here:
            hold_update(applied.train_op, [pair for each in combined for pair in _all_of(each)],
                        before, self._computed, gates)
        return Update(train_op=applied.train_op, train_ops={}, slots=slots, gradients=[], rides={},
                      slots_of_replicas=slots_of_replicas, counts=applied.counts,
                      before=tuple(before), redirect=redirect, scaled_losses=scaled_losses)

    def _apply(self, objective, combined, after, is_last, scaled_losses):
        """The `Applied` gradients of a loss; the last one counts the step."""
        request, optimizer, of = self._request, objective.optimizer, self._request.objectives.of
        if has_own_minimize(optimizer):
            optimizer = Minimizing(optimizer, of(objective, self._outputs.loss))
        with graph_walk.Recording(tf.get_default_graph()) as made:
            applied = apply_update(
                optimizer, of(objective, self._gradients),
                request.global_step if is_last else None, placement=request.placement,
                variables=self._tower_set.recorded.variables, after=after,
                replicas=self._tower_set.roles.replicas, on_towers=combined.on_towers,
                scaled_losses=scaled_losses)
        self._made = self._made + made.operations
        self._settle(self._made, [applied.train_op], after)
        return applied


def _computed(outputs, towers):
    """The tensors and operations that can be fetched without a step."""
    shown = [outputs] + [(tower.data_loss, tower.predictions, tower.metrics) for tower in towers]
    return fetches_in(shown)


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
