"""The train op of a build; with several losses, a train op for each loss and one for all."""

import collections
import typing

import tensorflow.compat.v1 as tf

from towers.api.options import Objective
from towers.api.riding_updates import riding_updates, updates_of_step
from towers.copies.closure_tensors import ClosureTensors
from towers.copies.tower_set import TowerSet
from towers.errors import InvalidArgumentError
from towers.gradients.gradient_pairs import tensors_of
from towers.gradients.optimizer_methods import OwnMinimize
from towers.graph import graph_walk
from towers.graph.graph_walk import fetches_in
from towers.graph.waits import Wait
from towers.model.build_context import BuildCollections
from towers.model.objectives import flat
from towers.model.outputs import ModelOutput
from towers.optimizers import GradientsOfModel, has_own_minimize
from towers.placement.tower_device import stages_of
from towers.placement.variable_device import only_device
from towers.reduce.combination import Combined, Pairs
from towers.reduce.loss_scale import WatchedLosses
from towers.reduce.micro_batches import check_order
from towers.reduce.replicas import Replicas, follow_updates
from towers.reduce.update import (
    Applied,
    apply_update,
    call_transform,
    safe_to_fetch,
)
from towers.roles.update_order import HeldBack, hold_back, hold_update


class Update(typing.NamedTuple):
    """The operations of the update, as `update_variables` returns them.

    Attributes:
      train_op: the operation of one step; None without an optimizer.
      train_ops: {name of a loss: the operation of a step of only that loss}; empty with one loss.
      slots: variables that the optimizer made.
      gradients: `(gradient, variable)` pairs for the optimizer, combined and transformed.
      num_riding: dict from the name of a loss to the number of updates, such as batch norm's, that
        ride on its train op; empty with one loss.
      replicas: the other towers' replicas of the trainable variables; None without any.
      counts_step: whether the train op counts the global step itself, since the optimizer leaves
        it to its caller.
      scaled_losses: the loss scale and its counters; None for a build without one.
      machines: `Machines` of the cluster; None without a cluster.
      waits: what waits for what, so that the update comes after the reads of its variables.
    """

    train_op: typing.Optional[tf.Operation]
    train_ops: typing.Dict[str, tf.Operation]
    slots: typing.List[tf.Variable]
    gradients: typing.Any
    num_riding: typing.Dict[str, int]
    replicas: typing.Optional[Replicas]
    counts_step: bool
    scaled_losses: typing.Optional[WatchedLosses]
    machines: typing.Any
    waits: typing.List[Wait]


class _LossGradients(typing.NamedTuple):
    """A loss with its gradients.

    Attributes:
      objective: the loss's optimizer, and what it trains.
      loss: the scalar over the batch.
      combined: the gradients over all towers and machines.
      transformed: the pairs that the optimizer applies.
    """

    objective: Objective
    loss: tf.Tensor
    combined: Combined
    transformed: Pairs


class _Step(typing.NamedTuple):
    """One step by one loss or several.

    Attributes:
      applied: the update for each loss, in the order of the losses.
      awaited: the losses and riding updates that the optimizers wait for.
      redirect: function that makes operations which wait for skippable updates wait for what
        always runs; None where no update can be skipped.
      scaled_losses: the loss scale and its counters; None for a build without one.
      waits: what waits for what, so that the update comes after the reads of its variables.
    """

    applied: typing.List[Applied]
    awaited: tuple
    redirect: typing.Optional[typing.Callable]
    scaled_losses: typing.Optional[WatchedLosses]
    waits: typing.List[Wait]

    @property
    def last(self) -> Applied:
        """The update for the last loss, which comes after the others."""
        return self.applied[-1]


def update_variables(tower_set: TowerSet, outputs: ModelOutput, combined: typing.Any,
                     exchange: typing.Any, collections_before: BuildCollections) -> Update:
    """Makes the train ops: the optimizers' updates, with the update ops that ride on them.

    With several losses there is a train op for each, which computes nothing for the others; and one
    for all, which takes all gradients at the weights before the step, and applies them in the order
    of the losses: two optimizers do not write the same variable at the same time.

    Args:
      tower_set: the towers.
      outputs: the losses over the batch, among others.
      combined: the gradients over all towers and machines: `Combined`; where losses have names, a
        dict of these.
      exchange: the `Exchange` over machines; None without a cluster.
      collections_before: the collections of the graph as they were before the build.
    """
    request = tower_set.request
    objectives = request.training.objectives
    if not objectives:
        return Update(
            train_op=None, train_ops={}, slots=[], gradients=[], num_riding={}, replicas=None,
            counts_step=False, scaled_losses=None, machines=None, waits=[])
    steps = _Steps(tower_set, outputs, combined, exchange)
    losses, optimizer_updates = _loss_gradients(
        tower_set, outputs, combined, collections_before, steps.closures)
    updates = []
    if request.training.update_ops != 'none':
        updates = updates_of_step(tower_set, collections_before.updates) + optimizer_updates

    riding: typing.Dict[str, list] = {}
    single_steps: typing.Dict[str, _Step] = collections.OrderedDict()  # by the name of the loss
    if objectives.names is not None:
        riding = riding_updates(updates, outputs.loss, tower_set.towers)
        for name, loss_gradients in zip(objectives.names, losses):
            single_steps[name] = steps.step([loss_gradients], riding[name])
    joint_step = steps.step(losses, updates)

    train_op = joint_step.last.train_op
    if request.split.accumulate > 1:
        check_order([train_op], tower_set.recorded.operations)
    replicas = tower_set.roles.replicas
    machines = None
    if exchange is not None:
        names_of_replicated = () if replicas is None else tuple(replicas.of_variable)
        machines = exchange.completed(train_op, joint_step.awaited, names_of_replicated,
                                      joint_step.redirect)
        train_op = machines.train_op
    all_steps = list(single_steps.values()) + [joint_step]
    slots, slots_of_replicas = _slots(all_steps)
    waits: typing.List[Wait] = []
    for step in all_steps:
        waits += step.waits
    if replicas is not None:
        replicas = replicas._replace(slots=slots_of_replicas)
    return Update(
        train_op=train_op,
        train_ops=collections.OrderedDict(
            (name, step.last.train_op) for name, step in single_steps.items()),
        slots=slots,
        gradients=objectives.shaped(_with_gradient(each.transformed) for each in losses),
        num_riding={name: len(updates_of_loss) for name, updates_of_loss in riding.items()},
        replicas=replicas,
        counts_step=joint_step.last.counts_step,
        scaled_losses=joint_step.scaled_losses,
        machines=machines,
        waits=waits)


def _slots(steps: typing.Iterable[_Step]) -> typing.Tuple[list, list]:
    """The slots that the optimizers have made in some steps: `(of the variables, of replicas)`."""
    slots = []
    slots_of_replicas = []
    for step in steps:
        for applied in step.applied:
            slots += applied.slots
            slots_of_replicas += applied.slots_of_replicas
    return slots, slots_of_replicas


def _with_gradient(pairs: Pairs) -> Pairs:
    """The pairs whose gradient is not None."""
    return [pair for pair in pairs if pair[0] is not None]


def _loss_gradients(tower_set: TowerSet, outputs: ModelOutput, combined: typing.Any,
                    collections_before: BuildCollections, closures: ClosureTensors
                    ) -> typing.Tuple[typing.List[_LossGradients], list]:
    """Lets each optimizer, and then `transform_gradients`, change the combined gradients.

    An optimizer with a `compute_gradients` of its own makes pairs of them. With any other, each
    trained variable gets a pair, with None where it has no gradient.

    Args:
      tower_set: the towers.
      outputs: the losses over the batch, among others.
      combined: the combined gradients of each loss, shaped.
      collections_before: the collections of the graph as they were before the build.
      closures: replaces tensors of tower 0, in what is made here, by those of the batch.

    Returns:
      `(the losses with their gradients, the UPDATE_OPS that the optimizers have made)`.
    """
    request = tower_set.request
    objectives = request.training.objectives
    num_updates = len(collections_before.new_updates())  # of the model; an optimizer may add some
    with graph_walk.Recording(tf.get_default_graph()) as made:
        optimizer_pairs = []
        for objective in objectives:
            loss = objectives.of(objective, outputs.loss)
            gradients = objectives.of(objective, combined).gradients
            optimizer_pairs.append(
                tower_set.gradients.pairs_of_optimizer(objective, loss, gradients))
        optimizer_updates = collections_before.new_updates()[num_updates:]
        losses = []
        for objective, pairs in zip(objectives, optimizer_pairs):
            transformed = call_transform(
                objective.transform_gradients, pairs, request.placement.main, objective.name)
            losses.append(_LossGradients(
                objective, objectives.of(objective, outputs.loss),
                objectives.of(objective, combined), safe_to_fetch(transformed)))
    # A transformation may have used the loss of tower 0, as its program has it at hand.
    applied_gradients = []
    for each in losses:
        applied_gradients += tensors_of(each.transformed)
    closures.settle(made.operations, applied_gradients)
    return losses, optimizer_updates


class _Steps:
    """Makes the steps of a build.

    Attributes:
      closures: replaces, in the operations of an update, the loss of tower 0 by that of the batch,
        and refuses other tensors of one tower.
    """

    def __init__(self, tower_set: TowerSet, outputs: ModelOutput, combined: typing.Any,
                 exchange: typing.Any):
        """Notes what the steps have in common; the arguments are those of `update_variables`."""
        self._tower_set = tower_set
        self._exchange = exchange
        # Whether this process makes the update: with parameter servers the chief alone does.
        self._updates_here = exchange is None or exchange.updates_here
        # What every write of a step waits for.
        self._conditions = [] if exchange is None else exchange.conditions
        combined_gradients = []
        for each in flat(combined):
            combined_gradients += tensors_of(list(each.gradients) + each.pairs_of_replicas)
        self.closures = ClosureTensors(tower_set, outputs.loss, combined_gradients)
        tower_outputs = [(tower.data_loss, tower.predictions, tower.metrics)
                         for tower in tower_set.towers]
        # A program may fetch these without running a step.
        self._fetchable = fetches_in([outputs] + tower_outputs)

    def step(self, losses: typing.List[_LossGradients], updates: list) -> _Step:
        """Makes the step that trains by some losses, with the update ops that run in it.

        Args:
          losses: the losses, with their gradients.
          updates: the update ops.
        """
        loss_values = [each.loss for each in losses]
        gradients = []
        for each in losses:
            gradients += tensors_of(each.transformed + each.combined.pairs_of_replicas)
        riding = self._riding_updates(updates, readers=loss_values + gradients)
        scaled_losses = self._tower_set.gradients.scaled_losses
        if scaled_losses is not None:  # there is one loss then
            scaled_losses = scaled_losses.watched(losses[0].combined.gradients)
        awaited = loss_values + riding.updates
        applied = self._applied(losses, awaited, gradients, scaled_losses)
        if riding.redirect is not None:
            riding.redirect()  # the optimizers' operations, before their order is found
        waits = riding.waits
        if self._updates_here:
            waits = waits + self._hold(applied[-1].train_op, losses, awaited)
        return _Step(applied, tuple(awaited), riding.redirect, scaled_losses, waits)

    def _riding_updates(self, updates: list, readers: list) -> HeldBack:
        """Makes the operations that run the updates in a step, which the optimizers wait for.

        Args:
          updates: the update ops of the step.
          readers: what reads the replicas of variables; these take the updated values after it.

        Returns:
          The operations, as `HeldBack.updates`; `_Step` describes its `redirect`.
        """
        tower_set = self._tower_set
        riding = updates + follow_updates(tower_set.roles.replicas, updates, readers)
        has_others_to_wait_for = self._exchange is not None and self._updates_here
        if not has_others_to_wait_for:
            return HeldBack(riding, redirect=None, waits=[])
        return hold_back(riding, conditions=self._conditions,
                         active=tower_set.request.cluster.active, fetchable=self._fetchable)

    def _applied(self, losses: typing.List[_LossGradients], awaited: list, gradients: list,
                 scaled_losses: typing.Optional[WatchedLosses]) -> typing.List[Applied]:
        """Applies the gradients of each loss, one loss after the other.

        Args:
          losses: the losses of the step, with their gradients.
          awaited: the losses and riding updates, which come before every update.
          gradients: the tensors of all losses' gradients.
          scaled_losses: the loss scale, with which gradients that are not finite change nothing; or
            None.

        Returns:
          The update for each loss.
        """
        tower_set = self._tower_set
        before_updates = awaited + _recomputations(tower_set)
        if len(losses) > 1:
            # Several optimizers apply gradients that all were taken at the weights before the step.
            before_updates = before_updates + gradients
        global_step = tower_set.request.training.global_step
        applied: typing.List[Applied] = []
        for each in losses:
            predecessors = before_updates + [earlier.train_op for earlier in applied]
            is_last = each is losses[-1]
            counted_step = global_step if is_last else None  # a step of all losses counts once
            with graph_walk.Recording(tf.get_default_graph()) as made:
                update = apply_update(
                    tower_set, _applying(each, tower_set.copies),
                    each.combined._replace(gradients=each.transformed), counted_step, predecessors,
                    scaled_losses)
            # An optimizer may have taken the loss of tower 0, as its program has it at hand.
            self.closures.settle(made.operations, [update.train_op], predecessors)
            applied.append(update)
        return applied

    def _hold(self, train_op: tf.Operation, losses: typing.List[_LossGradients],
              awaited: list) -> typing.List[Wait]:
        """Makes the writes of the update wait for what reads their variables; returns what waits
        for what.

        Args:
          train_op: the operation that updates the variables.
          losses: the losses of the step, with their gradients.
          awaited: the losses and riding updates that the optimizers wait for.
        """
        gradients: Pairs = []
        fetched = [each.loss for each in losses]
        for each in losses:
            gradients += list(each.combined.gradients) + each.combined.pairs_of_replicas
            fetched += tensors_of(each.transformed)
        return hold_update(train_op, gradients, fetched, awaited=awaited,
                           fetchable=self._fetchable, conditions=self._conditions)


def _recomputations(tower_set: TowerSet) -> typing.List[tf.Operation]:
    """For each tower an operation after all recomputations that read reference variables.

    The update writes such variables, so it has to wait for these operations. [] where no
    recomputation reads a reference variable.
    """
    recomputed_by_first = []
    for each in tower_set.recomputed:
        if each.reads_references:
            recomputed_by_first += each.operations
    if not recomputed_by_first:
        return []
    if tower_set.request.call.copies == 'reuse':
        raise InvalidArgumentError(
            "recompute=, copies='reuse', and the model computes with reference variables, which "
            "an update may write before they are read again: make them with use_resource=True, or "
            "pass copies='clone'.")
    recomputed_by_tower = [recomputed_by_first]
    for copied in tower_set.copies:
        recomputed_by_tower.append([copied(op) for op in recomputed_by_first])
    done = []
    for tower, operations in zip(tower_set.towers, recomputed_by_tower):
        with only_device(stages_of(tower.device)[0]):
            done.append(tf.group(*operations))
    return done


def _applying(loss_gradients: _LossGradients, copies: typing.Sequence) -> typing.Any:
    """What applies the gradients of a loss: its optimizer, or an object in the optimizer's place.

    Where the model function calls optimizers itself, the object makes the updates of these calls,
    for which it takes the copies of what a call has taken in tower 0. Where an optimizer has a
    `minimize` of its own, the object calls that, which needs the loss.

    Args:
      loss_gradients: the loss, with its gradients.
      copies: for each tower but the first, a function from a tensor of tower 0 to its copy.

    Returns:
      An object with `apply_gradients`.
    """
    optimizer = loss_gradients.objective.optimizer
    if isinstance(optimizer, GradientsOfModel):  # the optimizers that the model function calls
        return optimizer.of_all_towers(copies)
    if has_own_minimize(optimizer):
        return OwnMinimize(optimizer, loss_gradients.loss)
    return optimizer
