"""The train op of a build; with several losses, a train op for each loss and one for all.

Words of other modules used here: an `Exchange` adds up the gradients of a build over the machines
of a cluster; `ClosureTensors` looks for what a user's function or optimizer takes from the model
function; update ops *ride* on a train op that runs them; `pairs_of_replicas` are the combined
gradients on every tower, where the towers have replicas of the variables.
"""

import collections
import itertools
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
from towers.roles.step_updates import StepUpdate, all_of_step
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
      waits: the control edges by which the update comes after the reads of its variables.
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

    @property
    def applied(self) -> typing.List[tf.Tensor]:
        """The tensors of the gradients that the update applies: to the variables, and to the
        replicas of these."""
        return tensors_of(self.transformed + self.combined.pairs_of_replicas)


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
      redirect: function for operations that wait for updates which may be skipped: it makes them
        wait for what always runs instead. None where no update can be skipped. It was called for
        the operations of the build; `join` calls it once more, for operations that a program makes
        after the build.
      scaled_losses: the loss scale and its counters; None for a build without one.
      waits: the control edges by which the update comes after the reads of its variables.
    """

    applied: typing.List[Applied]
    awaited: tuple
    redirect: typing.Optional[typing.Callable]
    scaled_losses: typing.Optional[WatchedLosses]
    waits: typing.List[Wait]

    @property
    def last_update(self) -> Applied:
        """The update for the last loss. It comes after the updates for the other losses, so its
        train op is the train op of the whole step."""
        return self.applied[-1]


def update_variables(tower_set: TowerSet, outputs: ModelOutput, combined: typing.Any,
                     exchange: typing.Any, collections_before: BuildCollections) -> Update:
    """Makes the train ops: the optimizers' updates, with the update ops that ride on them.

    With several losses there is a train op for each, which computes nothing for the others; and one
    for all, which takes all gradients at the weights before the step, and applies them in the order
    of the losses, so that two optimizers do not write the same variable at the same time.

    Args:
      tower_set: the towers.
      outputs: the losses, predictions and metrics over the batch.
      combined: the gradients over all towers and machines: `Combined`; where losses have names, a
        dict of these.
      exchange: the `Exchange` over machines; None without a cluster.
      collections_before: the collections of the graph as they were before the build.
    """
    request = tower_set.request
    objectives = request.training.objectives
    if not objectives:  # an evaluation
        return Update(
            train_op=None, train_ops={}, slots=[], gradients=[], num_riding={}, replicas=None,
            counts_step=False, scaled_losses=None, machines=None, waits=[])
    steps = _Steps(tower_set, outputs, combined, exchange)
    losses, updates_of_optimizers = _optimizers_gradients(
        tower_set, outputs, combined, collections_before, steps.closures)
    updates: typing.List[StepUpdate] = []
    if request.training.update_ops != 'none':
        updates_of_program = collections_before.updates + updates_of_optimizers
        updates = updates_of_step(tower_set, updates_of_program)

    updates_by_loss: typing.Dict[str, list] = {}  # empty with one loss, which has no name
    if objectives.names is not None:
        updates_by_loss = riding_updates(updates, outputs.loss, tower_set.towers)
    steps_by_loss = steps.by_loss(losses, updates_by_loss)
    joint_step = steps.step(losses, all_of_step(updates))
    all_steps = list(steps_by_loss.values()) + [joint_step]

    train_op = joint_step.last_update.train_op
    if request.split.accumulate > 1:
        check_order([train_op], tower_set.recorded.operations)
    machines = None
    if exchange is not None:
        machines = _machines(exchange, joint_step, tower_set.roles.replicas)
        train_op = machines.train_op
    slots = _slots(all_steps)
    return Update(
        train_op=train_op,
        train_ops=collections.OrderedDict(
            (name, step.last_update.train_op) for name, step in steps_by_loss.items()),
        slots=slots.of_variables,
        gradients=objectives.shaped(_with_gradient(each.transformed) for each in losses),
        num_riding={name: len(riding) for name, riding in updates_by_loss.items()},
        replicas=_with_slots(tower_set.roles.replicas, slots.of_replicas),
        counts_step=joint_step.last_update.counts_step,
        scaled_losses=joint_step.scaled_losses,
        machines=machines,
        waits=list(itertools.chain.from_iterable(step.waits for step in all_steps)))


def _machines(exchange: typing.Any, joint_step: _Step,
              replicas: typing.Optional[Replicas]) -> typing.Any:
    """The `Machines` of a build, by which its workers run steps together. Their `train_op` is a
    step of all machines.

    Args:
      exchange: the `Exchange`, which has combined the gradients over the machines.
      joint_step: the step of all losses on this machine.
      replicas: the other towers' replicas of the trainable variables; None without any.
    """
    names_of_replicated: typing.Tuple[str, ...] = ()
    if replicas is not None:
        names_of_replicated = tuple(replicas.of_variable)
    return exchange.completed(
        update=joint_step.last_update.train_op, awaited=joint_step.awaited,
        replicated=names_of_replicated, redirect=joint_step.redirect)


def _slots(steps: typing.Iterable[_Step]) -> _Slots:
    """The slots that the optimizers have made in some steps."""
    slots = _Slots([], [])
    for step in steps:
        for applied in step.applied:
            slots.of_variables.extend(applied.slots)
            slots.of_replicas.extend(applied.slots_of_replicas)
    return slots


def _with_slots(replicas: typing.Optional[Replicas],
                slots: typing.List[tf.Variable]) -> typing.Optional[Replicas]:
    """The replicas, with the slots that the optimizers have made for them; None without any."""
    if replicas is None:
        return None
    return replicas._replace(slots=slots)


def _with_gradient(pairs: Pairs) -> Pairs:
    """The pairs whose gradient is not None."""
    return [pair for pair in pairs if pair[0] is not None]


def _optimizers_gradients(tower_set: TowerSet, outputs: ModelOutput, combined: typing.Any,
                          collections_before: BuildCollections, closures: ClosureTensors
                          ) -> _OptimizersGradients:
    """Lets each optimizer, and then `transform_gradients`, change the combined gradients.

    Args:
      tower_set: the towers.
      outputs: the losses, predictions and metrics over the batch.
      combined: the combined gradients of each loss, shaped.
      collections_before: the collections of the graph as they were before the build.
      closures: replaces, in the operations made here, the loss of tower 0 by the loss of the batch.
    """
    num_updates_of_model = len(collections_before.new_updates())
    with graph_walk.Recording(tf.get_default_graph()) as made:
        losses = _by_optimizers(tower_set, outputs, combined)
        # New entries are at the end of the collection: the optimizers' updates are behind the
        # model's.
        updates_of_optimizers = collections_before.new_updates()[num_updates_of_model:]
        losses = [_transformed(each, tower_set.request.placement.main) for each in losses]
    # The user's `transform_gradients` may take the loss that the model function has computed, which
    # is tower 0's: `closures` puts the batch's loss in its place.
    transformed_gradients = []
    for each in losses:
        transformed_gradients += tensors_of(each.transformed)
    closures.settle(made.operations, fetches=transformed_gradients)
    return _OptimizersGradients(losses, updates_of_optimizers)


def _by_optimizers(tower_set: TowerSet, outputs: ModelOutput,
                   combined: typing.Any) -> typing.List[_LossGradients]:
    """The losses, each with the gradients that its optimizer makes of the combined gradients.

    If an optimizer overrides `compute_gradients` (to decay the weights, say), that method is
    called. When it asks for the gradients of its loss, it is given the combined gradients. For any
    other optimizer, the gradients are the combined ones, with None for a trained variable that has
    no gradient.

    Args:
      tower_set: the towers.
      outputs: the losses, predictions and metrics over the batch.
      combined: the combined gradients of each loss, shaped.
    """
    objectives = tower_set.request.training.objectives
    losses = []
    for objective in objectives:
        loss = objectives.entry_of(objective, outputs.loss)
        combined_of_loss = objectives.entry_of(objective, combined)
        pairs = tower_set.gradients.pairs_of_optimizer(objective, loss, combined_of_loss.gradients)
        losses.append(_LossGradients(objective, loss, combined_of_loss, transformed=pairs))
    return losses


def _transformed(loss_gradients: _LossGradients, device: str) -> _LossGradients:
    """The loss with its gradients as the user's `transform_gradients` returns them.

    Args:
      loss_gradients: the loss, with the gradients that its optimizer makes.
      device: the device on which the user's function makes its operations.
    """
    objective = loss_gradients.objective
    transformed = call_transform(
        objective.transform_gradients, loss_gradients.transformed, device, objective.name)
    # A program may fetch these gradients in the run that updates their variables.
    return loss_gradients._replace(transformed=safe_to_fetch(transformed))


class _Steps:
    """Makes the steps of a build.

    Attributes:
      closures: replaces, in the operations of an update, the loss of tower 0 by the loss of the
        batch, and refuses other tensors of one tower.
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
        # `ClosureTensors` refuses an update that takes a tensor which depends on the examples of
        # one tower. The combined gradients depend on such tensors, but every update takes them: so
        # `ClosureTensors` has to know them.
        combined_gradients: typing.List[tf.Tensor] = []
        for each in flat(combined):
            combined_gradients += tensors_of(_combined_pairs(each))
        self.closures = ClosureTensors(tower_set, outputs.loss, combined_gradients)
        tower_outputs = [(tower.data_loss, tower.predictions, tower.metrics)
                         for tower in tower_set.towers]
        # A program may fetch these tensors without running a step: they must not wait for a step.
        self._fetchable = fetches_in([outputs] + tower_outputs)

    def by_loss(self, losses: typing.List[_LossGradients],
                updates_by_loss: typing.Dict[str, list]) -> typing.Dict[str, _Step]:
        """Makes a step of each loss alone, {name of the loss: its step}; {} for one loss without a
        name.

        Args:
          losses: the losses, with their gradients.
          updates_by_loss: {name of a loss: the update ops that run in its step}.
        """
        steps = collections.OrderedDict()
        for each in losses:
            name = each.objective.name
            if name is not None:
                steps[name] = self.step([each], updates_by_loss[name])
        return steps

    def step(self, losses: typing.List[_LossGradients], updates: list) -> _Step:
        """Makes the step that trains by some losses, with the update ops that run in it.

        Args:
          losses: the losses, with their gradients.
          updates: the update ops.
        """
        loss_values = [each.loss for each in losses]
        gradients: typing.List[tf.Tensor] = []
        for each in losses:
            gradients += each.applied
        riding = self._riding_updates(updates, readers=loss_values + gradients)
        awaited = loss_values + riding.update_ops
        watched_losses = self._watched_losses(losses)
        applied = self._applied(losses, awaited, gradients, watched_losses)
        if riding.redirect is not None:
            # The optimizers' operations have to run in each step, and may wait for updates that are
            # skipped in a step without a batch. Their waits change before `_hold` looks at them.
            riding.redirect()
        waits = riding.waits
        if self._updates_here:
            train_op = applied[-1].train_op  # it comes after the train ops of the other losses
            waits = waits + self._hold(train_op, losses, awaited)
        return _Step(applied, tuple(awaited), riding.redirect, watched_losses, waits)

    def _watched_losses(self, losses: typing.List[_LossGradients]
                        ) -> typing.Optional[WatchedLosses]:
        """The loss scale, which watches whether the gradients of a step are finite: a step whose
        gradients are not finite is skipped, and the scale changes. None for a build without a loss
        scale."""
        scaled_losses = self._tower_set.gradients.scaled_losses
        if scaled_losses is None:
            return None
        loss, = losses  # a loss scale goes with one loss
        return scaled_losses.watched(loss.combined.gradients)

    def _riding_updates(self, updates: list, readers: list) -> HeldBack:
        """Makes the update ops a part of a step. In a cluster each first waits until the other
        workers have read the variables that it writes.

        Where an update op writes a trained variable, the variable's replicas also get the new
        value.

        Args:
          updates: the update ops of the step.
          readers: the losses and gradients of the step, which read the old values of replicas.

        Returns:
          `HeldBack`, whose `update_ops` are the operations that the optimizers have to wait for.
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
          gradients: the tensors of the gradients that all the losses apply.
          scaled_losses: the loss scale, with which gradients that are not finite change nothing; or
            None.

        Returns:
          The update for each loss.
        """
        tower_set = self._tower_set
        before_updates = awaited + _after_recomputations(tower_set)
        if len(losses) > 1:
            # All gradients are taken at the weights before the step: each update waits for the
            # gradients of all losses.
            before_updates = before_updates + gradients
        global_step = tower_set.request.training.global_step
        applied: typing.List[Applied] = []
        for each in losses:
            predecessors = before_updates + [earlier.train_op for earlier in applied]
            is_last = each is losses[-1]
            counted_step = global_step if is_last else None  # a step by all losses counts once
            to_apply = each.combined._replace(gradients=each.transformed)
            with graph_walk.Recording(tf.get_default_graph()) as made:
                update = apply_update(tower_set, _applier(each, tower_set.copies), to_apply,
                                      counted_step, after=predecessors, scaled_losses=scaled_losses)
            # A user's optimizer may take the loss that the model function has computed, which is
            # tower 0's: `closures` puts the batch's loss in its place. An optimizer that takes
            # another tensor of one tower, or waits for one, is refused; but it may wait for the
            # `predecessors`, as every update does.
            self.closures.settle(made.operations, fetches=[update.train_op],
                                 may_take=predecessors)
            applied.append(update)
        return applied

    def _hold(self, train_op: tf.Operation, losses: typing.List[_LossGradients],
              awaited: list) -> typing.List[Wait]:
        """Makes the writes of the update wait for the operations that read their variables; returns
        these waits.

        A write waits for the gradients. A write of a reference variable also waits for the other
        tensors that a program may fetch together with the step, since these read the variable's
        memory. No operation that computes a tensor of `_fetchable` gets a wait: a program that
        fetches this tensor without a step would run the operations that are waited for.

        Args:
          train_op: the operation that updates the variables.
          losses: the losses of the step, with their gradients.
          awaited: the losses and riding updates that the optimizers wait for.
        """
        combined_gradients: Pairs = []
        fetched_with_step = [each.loss for each in losses]
        for each in losses:
            combined_gradients += _combined_pairs(each.combined)
            fetched_with_step += tensors_of(each.transformed)
        return hold_update(train_op, combined_gradients, fetched=fetched_with_step,
                           awaited=awaited, fetchable=self._fetchable,
                           conditions=self._conditions)


def _combined_pairs(combined: Combined) -> Pairs:
    """The combined gradients of a loss: of the variables, and of the towers' replicas of these."""
    return list(combined.gradients) + combined.pairs_of_replicas


def _after_recomputations(tower_set: TowerSet) -> typing.List[tf.Operation]:
    """List with an operation for each tower, which runs after the tower's recomputations; [] if
    these read no reference variables.

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


def _applier(loss_gradients: _LossGradients, copies: typing.Sequence) -> typing.Any:
    """The object whose `apply_gradients` makes the update by a loss: mostly its optimizer.

    Args:
      loss_gradients: the loss, with its gradients.
      copies: for each tower but the first, a function from a tensor of tower 0 to its copy.
    """
    optimizer = loss_gradients.objective.optimizer
    if isinstance(optimizer, GradientsOfModel):
        # The model function has called optimizers itself, so their updates are in the graph. The
        # object gives them the combined gradients. Where several calls train one variable, it
        # combines the gradients itself, from tower 0's and their copies.
        return optimizer.of_all_towers(copies)
    if has_own_minimize(optimizer):
        # The object has the optimizer's own `minimize` make the update, which needs the loss.
        return OwnMinimize(optimizer, loss_gradients.loss)
    return optimizer
