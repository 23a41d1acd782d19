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


class _OptimizersGradients(typing.NamedTuple):
    """What the optimizers and the functions `transform_gradients` make of the combined gradients.

    Attributes:
      losses: the losses, in the order of the objectives, with their gradients.
      updates: the `UPDATE_OPS` that the optimizers have made meanwhile.
    """

    losses: typing.List[_LossGradients]
    updates: list


class _Slots(typing.NamedTuple):
    """The slots that the optimizers have made, of the variables and of the replicas."""

    of_variables: typing.List[tf.Variable]
    of_replicas: typing.List[tf.Variable]


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
    losses, updates_of_optimizers = _optimizers_gradients(
        tower_set, outputs, combined, collections_before, steps.closures)
    updates = []
    if request.training.update_ops != 'none':
        updates = updates_of_step(tower_set, collections_before.updates) + updates_of_optimizers

    train_ops: typing.Dict[str, tf.Operation] = collections.OrderedDict()
    num_riding: typing.Dict[str, int] = {}
    all_steps: typing.List[_Step] = []
    if objectives.names is not None:
        updates_by_loss = riding_updates(updates, outputs.loss, tower_set.towers)
        for name, loss_gradients in zip(objectives.names, losses):
            step_of_loss = steps.step([loss_gradients], updates_by_loss[name])
            train_ops[name] = step_of_loss.last.train_op
            num_riding[name] = len(updates_by_loss[name])
            all_steps.append(step_of_loss)
    joint_step = steps.step(losses, updates)
    all_steps.append(joint_step)

    train_op = joint_step.last.train_op
    if request.split.accumulate > 1:
        check_order([train_op], tower_set.recorded.operations)
    machines = None
    if exchange is not None:
        machines = _machines(exchange, joint_step, tower_set.roles.replicas)
        train_op = machines.train_op
    slots = _slots(all_steps)
    replicas = tower_set.roles.replicas
    if replicas is not None:
        replicas = replicas._replace(slots=slots.of_replicas)
    waits: typing.List[Wait] = []
    for step in all_steps:
        waits += step.waits
    return Update(
        train_op=train_op,
        train_ops=train_ops,
        slots=slots.of_variables,
        gradients=objectives.shaped(_with_gradient(each.transformed) for each in losses),
        num_riding=num_riding,
        replicas=replicas,
        counts_step=joint_step.last.counts_step,
        scaled_losses=joint_step.scaled_losses,
        machines=machines,
        waits=waits)


def _machines(exchange: typing.Any, joint_step: _Step,
              replicas: typing.Optional[Replicas]) -> typing.Any:
    """The `Machines` of a build: its `train_op` is a step of all machines.

    Args:
      exchange: the `Exchange` over machines.
      joint_step: the step of all losses on this machine.
      replicas: the other towers' replicas of the trainable variables; None without any.
    """
    names_of_replicated: typing.Tuple[str, ...] = ()
    if replicas is not None:
        names_of_replicated = tuple(replicas.of_variable)
    return exchange.completed(joint_step.last.train_op, joint_step.awaited, names_of_replicated,
                              joint_step.redirect)


def _slots(steps: typing.Iterable[_Step]) -> _Slots:
    """The slots that the optimizers have made in some steps."""
    slots = _Slots([], [])
    for step in steps:
        for applied in step.applied:
            slots.of_variables.extend(applied.slots)
            slots.of_replicas.extend(applied.slots_of_replicas)
    return slots


def _with_gradient(pairs: Pairs) -> Pairs:
    """The pairs whose gradient is not None."""
    return [pair for pair in pairs if pair[0] is not None]


def _optimizers_gradients(tower_set: TowerSet, outputs: ModelOutput, combined: typing.Any,
                          collections_before: BuildCollections, closures: ClosureTensors
                          ) -> _OptimizersGradients:
    """Lets each optimizer, and then `transform_gradients`, change the combined gradients.

    Of an optimizer with a `compute_gradients` of its own, the pairs are those that this method
    returns, which gets the combined gradients for its own. With any other optimizer, each trained
    variable gets a pair, with None where it has no gradient.

    Args:
      tower_set: the towers.
      outputs: the losses over the batch, among others.
      combined: the combined gradients of each loss, shaped.
      collections_before: the collections of the graph as they were before the build.
      closures: replaces the loss of tower 0, in what is made here, by that of the batch.
    """
    request = tower_set.request
    objectives = request.training.objectives
    num_updates_of_model = len(collections_before.new_updates())
    with graph_walk.Recording(tf.get_default_graph()) as made:
        optimizer_pairs = []  # for each objective, the pairs that its optimizer makes
        for objective in objectives:
            loss = objectives.of(objective, outputs.loss)
            gradients = objectives.of(objective, combined).gradients
            optimizer_pairs.append(
                tower_set.gradients.pairs_of_optimizer(objective, loss, gradients))
        # New entries are at the end of the collection: behind the model's, those of the optimizers.
        updates_of_optimizers = collections_before.new_updates()[num_updates_of_model:]
        losses = []
        for objective, pairs in zip(objectives, optimizer_pairs):
            transformed = call_transform(
                objective.transform_gradients, pairs, request.placement.main, objective.name)
            # A program may fetch these gradients in the run that updates their variables.
            fetchable_pairs = safe_to_fetch(transformed)
            losses.append(_LossGradients(
                objective, objectives.of(objective, outputs.loss),
                objectives.of(objective, combined), fetchable_pairs))
    # The user's `transform_gradients` may take the loss that the model function has computed, which
    # is tower 0's: `closures` puts the batch's loss in its place.
    transformed_gradients = []
    for each in losses:
        transformed_gradients += tensors_of(each.transformed)
    closures.settle(made.operations, fetches=transformed_gradients)
    return _OptimizersGradients(losses, updates_of_optimizers)


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
        self._has_machines = exchange is not None
        # Whether this process makes the update: with parameter servers the chief alone does.
        self._updates_here = exchange is None or exchange.updates_here
        # After these operations all workers have read the variables: each write waits for them.
        self._conditions = [] if exchange is None else exchange.conditions
        combined_gradients = []
        for each in flat(combined):
            combined_gradients += tensors_of(list(each.gradients) + each.pairs_of_replicas)
        self.closures = ClosureTensors(tower_set, outputs.loss, combined_gradients)
        tower_outputs = [(tower.data_loss, tower.predictions, tower.metrics)
                         for tower in tower_set.towers]
        # A program may fetch these without running a step: they must not wait for one.
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
        if scaled_losses is not None:  # there is one loss then, whose gradients may be infinite
            scaled_losses = scaled_losses.watched(losses[0].combined.gradients)
        awaited = loss_values + riding.updates
        applied = self._applied(losses, awaited, gradients, scaled_losses)
        if riding.redirect is not None:
            # The optimizers' operations may wait for updates that are skipped in a step without a
            # batch. They are to run in each step; `hold_update` finds their order after that.
            riding.redirect()
        waits = riding.waits
        if self._updates_here:
            train_op = applied[-1].train_op  # it comes after those of the other losses
            waits = waits + self._hold(train_op, losses, awaited)
        return _Step(applied, tuple(awaited), riding.redirect, scaled_losses, waits)

    def _riding_updates(self, updates: list, readers: list) -> HeldBack:
        """Makes the operations that run the updates in a step, which the optimizers wait for.

        Where an update writes a trained variable, its replicas get the new value, too.

        Args:
          updates: the update ops of the step.
          readers: the losses and gradients of the step, which read the old values of replicas.

        Returns:
          The operations, as `HeldBack.updates`; `_Step` describes its `redirect`.
        """
        tower_set = self._tower_set
        riding = updates + follow_updates(tower_set.roles.replicas, updates, after=readers)
        # One machine alone waits for nobody, and a worker that leaves the update to the chief never
        # runs these operations.
        waits_for_other_workers = self._has_machines and self._updates_here
        if not waits_for_other_workers:
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
        before_updates = awaited + _after_recomputations(tower_set)
        if len(losses) > 1:
            # Several optimizers apply gradients that all were taken at the weights before the step.
            before_updates = before_updates + gradients
        global_step = tower_set.request.training.global_step
        applied: typing.List[Applied] = []
        for each in losses:
            predecessors = before_updates + [earlier.train_op for earlier in applied]
            is_last = each is losses[-1]
            counted_step = global_step if is_last else None  # a step of all losses counts once
            to_apply = each.combined._replace(gradients=each.transformed)
            with graph_walk.Recording(tf.get_default_graph()) as made:
                update = apply_update(tower_set, _applying(each, tower_set.copies), to_apply,
                                      counted_step, after=predecessors, scaled_losses=scaled_losses)
            # A user's optimizer may take the loss that the model function has computed, which is
            # tower 0's: `closures` puts the batch's loss in its place.
            self.closures.settle(made.operations, fetches=[update.train_op], after=predecessors)
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
        computed_before = [each.loss for each in losses]
        for each in losses:
            gradients += list(each.combined.gradients) + each.combined.pairs_of_replicas
            computed_before += tensors_of(each.transformed)
        return hold_update(train_op, gradients, fetched=computed_before, awaited=awaited,
                           fetchable=self._fetchable, conditions=self._conditions)


def _after_recomputations(tower_set: TowerSet) -> typing.List[tf.Operation]:
    """For each tower an operation that runs after its recomputations, if these read reference
    variables; else [].

    The backward pass recomputes activations late in a step, and takes the memory of a reference
    variable as it is then. So the update, which writes that memory, has to wait.
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
    for copy_of in tower_set.copies:
        recomputed_by_tower.append([copy_of(op) for op in recomputed_by_first])
    ends = []
    for tower, operations in zip(tower_set.towers, recomputed_by_tower):
        first_stage = stages_of(tower.device)[0]  # any would do: the end computes nothing
        with only_device(first_stage):
            ends.append(tf.group(*operations))
    return ends


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
