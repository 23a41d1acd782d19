"""The towers of a build with `copies='clone'`: one call of the model function, and copies.

Tower 0 is the model function's graph, or an import of a finished model; the other towers are copies
of it. `call_for_each` makes the towers of `copies='reuse'`. Its test is tests/api/test_build.py.
"""

import contextlib
import typing

import tensorflow.compat.v1 as tf

from towers.capture.record import Recorded, put_on_devices, record
from towers.capture.stage_cuts import StageCuts
from towers.copies.copy import Copies, TowerCopy
from towers.copies.substitution import Substitution
from towers.copies.tower_set import TowerSet
from towers.gradients.backward_pass import Differentiated, TowerGradients
from towers.gradients.gradient_pairs import tensors_of
from towers.gradients.stateless_random import give_seeds_of_tower
from towers.gradients.tower import Tower
from towers.graph import graph_walk
from towers.graph.graph_walk import leaves_of, operation_names
from towers.graph.variable_access import Writes, metric_variables
from towers.graph.waits import Wait
from towers.model.losses import Losses, make_losses
from towers.model.objectives import trained_variables
from towers.model.outputs import fetches_of
from towers.model.request import Request
from towers.optimizers import GradientsOfModel
from towers.reduce.loss_scale import ScaledLosses
from towers.reduce.replicas import make_replicas
from towers.roles.ownership import EVERY, Roles, ownership
from towers.roles.write_in_turn import write_in_turn
from towers.roles.write_order import check_references_in_loops, write_after_reads
from towers.shards.batch_inputs import UpstreamVariables
from towers.shards.cut_batch import CutBatch
from towers.whole_batch.batch_values import is_batch_value
from towers.whole_batch.exchange import exchange


class _ShardValues(typing.NamedTuple):
    """Values of which each part of the batch has its own; tensors where they differ.

    Attributes:
      weights: the weight of each part: its examples over those of the batch.
      loss_factors: for each part, what its loss is multiplied with, so that the plain sum of all
        parts' gradients, of those on other machines, too, is the batch's.
      call_weights: for each part, what the losses are multiplied with that the model function's own
        optimizers minimize; [None] where it calls none.
    """

    weights: list
    loss_factors: list
    call_weights: list

    def substitutes(self, index: int) -> typing.Dict[str, tf.Tensor]:
        """{name of a tensor of the first part: what part `index` has in its place}."""
        return {values[0].name: values[index] for values in self
                if isinstance(values[0], tf.Tensor)}


class _FirstTower(typing.NamedTuple):
    """Tower 0, and what was found out about it.

    Attributes:
      recorded: the call of the model function, or the import of the finished model.
      cuts: where the model was cut into stages; None where it was not.
      roles: the roles of its variables.
      losses: the losses that it differentiates.
      gradients: what differentiates the losses of all towers.
      differentiated: the tower itself, with forward and backward pass.
      values: the weights and factors of the parts.
      step: the step of the workers of the cluster; None for this machine alone.
      optimizer_fetches: what a step runs of the calls of optimizers in the model function; [] where
        it calls none.
      slots: the variables that these optimizers have made.
    """

    recorded: Recorded
    cuts: typing.Optional[StageCuts]
    roles: Roles
    losses: Losses
    gradients: TowerGradients
    differentiated: Differentiated
    values: _ShardValues
    step: typing.Any
    optimizer_fetches: list
    slots: list

    @property
    def fetches(self) -> list:
        """All tensors and operations that a step needs of the tower."""
        recorded = self.recorded
        gradients = tensors_of(self.differentiated.tower.pairs)
        return (fetches_of(recorded.output) + self.optimizer_fetches
                + self.roles.inline_updates.updates + recorded.updates + gradients)


def call_once_and_copy(request: Request, batch: CutBatch, upstream: UpstreamVariables,
                       scaled_losses: typing.Optional[ScaledLosses]) -> TowerSet:
    """Builds all towers, by one call of the model function, or one import of the finished model.

    Args:
      request: the checked arguments of the build.
      batch: the parts of the batch.
      upstream: the trained variables upstream of the inputs.
      scaled_losses: the loss scale and its variables; None for a build without one.
    """
    scope_of_import: typing.ContextManager = contextlib.nullcontext()
    if request.call.is_finished:
        scope_of_import = tf.name_scope(request.split.parts[0].scope)
    with scope_of_import:
        first = _make_first(request, batch, upstream, scaled_losses)
    roles = first.roles
    copies = _copies_of(first, request, batch)
    first_tower = first.differentiated.tower
    # `ownership` turned some of tower 0's writes into updates; copies have none of these.
    towers = [first_tower._replace(updates=first_tower.updates + roles.inline_updates.updates)]
    towers += [copy.tower for copy in copies]
    exchanged = exchange_values(towers, request, batch, first.step)
    parts_before = request.split.parts_before
    if parts_before and copies:
        # Each copy computes its seeds from tower 0's, so tower 0 gets its own after all copies.
        give_seeds_of_tower(first.differentiated.operations, first.fetches, parts_before)
    waits = order_writes(request, towers, roles)
    return TowerSet(
        request=request, batch=batch, towers=towers, recorded=first.recorded, losses=first.losses,
        gradients=first.gradients, roles=roles, waits=waits,
        recomputed=first.differentiated.recomputed, step=first.step, exchanged=exchanged,
        cuts=first.cuts, slots=first.slots, copies=[copy.copy_of for copy in copies],
        how_built=_how_built(request, len(copies)))


def _how_built(request: Request, num_copies: int) -> str:
    """The plan's text about the call of the model function and the copies of its graph."""
    made = '1 call of the model function'
    if request.call.is_finished:
        made = '1 import of the finished model'
    copies = '1 copy' if num_copies == 1 else '%d copies' % num_copies
    return '%s, %s of its graph' % (made, copies)


def begin_step(request: Request, batch: CutBatch) -> typing.Any:
    """Begins the step of the workers of the cluster; None for this machine alone.

    Its operations are made after the recorded call: TensorFlow numbers operations, and draws the
    seeds of random ops by these numbers, which have to be as without a cluster.
    """
    if not request.trains_with_machines:
        return None
    with tf.name_scope('machines'):
        return request.cluster.begin_step(batch.batch_size, request.training.reduction)


def shares_of_loss(request: Request, batch: CutBatch, weights: list, step: typing.Any) -> list:
    """The factors of the parts' losses, see `_ShardValues`.

    Args:
      request: the checked arguments of the build.
      batch: the parts of the batch.
      weights: for each part, its examples over those of this machine's batch.
      step: what `begin_step` returned; its `loss_weight` is this machine's part of all batches.
    """
    factor = request.factor
    if step is not None:
        factor = factor * step.loss_weight
    if batch.is_even:
        num_parts = len(request.split.parts)
        return [factor / num_parts] * num_parts
    return [weight * factor for weight in weights]


def exchange_values(towers: typing.List[Tower], request: Request, batch: CutBatch,
                    step: typing.Any) -> typing.List[tf.Tensor]:
    """Exchanges the towers' values of the whole batch, such as those of `batch_sum`.

    Args:
      towers: the towers, which begin with the shards' values and end with the batch's.
      request: the checked arguments of the build.
      batch: the parts of the batch.
      step: what `begin_step` returned.

    Returns:
      The exchanged values, see `exchange`.
    """
    workers = None if step is None else step.workers
    return exchange(towers, batch.weights, request.placement.main, workers)


def _as_tensors(weights: typing.Optional[list], is_even: bool) -> list:
    """The weights as tensors where they differ, so that a copy can substitute its own.

    Args:
      weights: the weight of each shard; None or [] without weights.
      is_even: whether all shards have the same size.

    Returns:
      One weight for each shard, or [None].
    """
    if not weights:
        return [None]
    if is_even:
        return weights
    tensors = []
    with tf.name_scope('shards'), tf.device('/cpu:0'):
        for weight in weights:
            if isinstance(weight, float):
                weight = tf.constant(weight, tf.float64)
            tensors.append(weight)
    return tensors


def _make_first(request: Request, batch: CutBatch, upstream: UpstreamVariables,
                scaled_losses: typing.Optional[ScaledLosses]) -> _FirstTower:
    """Builds tower 0; the arguments are those of `call_once_and_copy`."""
    weights = _as_tensors(batch.weights, batch.is_even)
    call_weights: list = [None]
    optimizer_calls = request.training.objectives.optimizer_calls
    if optimizer_calls is None:
        recorded = record(request, batch, 0)
        optimizer_fetches: list = []
        slots: list = []
    else:
        call_weights = _as_tensors(optimizer_calls.weights(batch), batch.is_even)
        recorded, optimizer_fetches, slots = _recorded_with_optimizer_calls(
            request, batch, optimizer_calls, call_weights[0])
    step = begin_step(request, batch)
    values = _ShardValues(weights, shares_of_loss(request, batch, weights, step), call_weights)
    # `ownership` makes the towers' own state on the device of its stage, so stages come first. It
    # takes writes that become updates out of the forward pass, so it comes before `differentiate`.
    cuts = put_on_devices(recorded, request, request.split.parts[0].device)
    trained = trained_variables(request.training.objectives)
    roles = ownership(recorded, request, trained, optimizer_fetches,
                      make_replicas if request.placement.has_replicas else None)
    losses = make_losses(recorded, request, 0)
    gradients = TowerGradients(request, batch, upstream, scaled_losses, roles.trained)
    differentiated = gradients.differentiate(
        recorded, losses, 0, values.loss_factors[0],
        optimizer_fetches + roles.inline_updates.updates)
    return _FirstTower(recorded, cuts, roles, losses, gradients, differentiated, values, step,
                       optimizer_fetches, slots)


def _recorded_with_optimizer_calls(
        request: Request, batch: CutBatch, optimizer_calls: GradientsOfModel,
        weight: typing.Any) -> typing.Tuple[Recorded, list, list]:
    """Records the call of a model function that calls optimizers of its own.

    Args:
      request: the checked arguments of the build.
      batch: the parts of the batch.
      optimizer_calls: what takes the place of the optimizers during the call.
      weight: what the losses are multiplied with that the optimizers minimize.

    Returns:
      `(the recorded call, what a step runs of the optimizers' calls, the slots that the optimizers
      have made)`.
    """
    recorded = record(request, batch, 0, lambda: optimizer_calls.call(weight, request.placement))
    slots = optimizer_calls.slots()
    # A Saver that the model function makes reads them; yet they are no variables of the model.
    slot_names = operation_names(slots)
    variables = [each for each in recorded.variables if each.op.name not in slot_names]
    return recorded._replace(variables=variables), optimizer_calls.fetches(), slots


def order_writes(request: Request, towers: typing.Sequence[Tower],
                 roles: Roles) -> typing.List[Wait]:
    """Makes the towers' writes of shared variables, other than the update, wait for their reads.

    Args:
      request: the checked arguments of the build.
      towers: the towers.
      roles: the roles of the variables.

    Returns:
      What waits for what.
    """
    check_references_in_loops(towers)
    update_ops = request.training.update_ops
    # A single tower needs an order in two cases: workers that have copies of the variables have to
    # write equal values; and the updates of a finished model are operations of their own, which
    # would come before or after the reads.
    needs_order = len(towers) > 1 or request.has_copies or request.call.is_finished
    if update_ops == 'first' and needs_order:
        return write_after_reads(towers, roles)
    if update_ops == 'all' and len(towers) > 1:
        return write_in_turn(towers, roles)
    return []


def _copies_of(first: _FirstTower, request: Request, batch: CutBatch) -> typing.List[TowerCopy]:
    """Copies tower 0 once for each other part of the batch; [] where there is one part.

    Args:
      first: tower 0.
      request: the checked arguments of the build.
      batch: the parts of the batch.
    """
    parts = request.split.parts
    if len(parts) == 1:
        return []
    differentiated = first.differentiated
    roles = first.roles
    tower = differentiated.tower
    updates = _updates_of_every_tower(tower.updates, roles, request)
    copied = differentiated._replace(tower=tower._replace(updates=updates))
    # What only tower 0 writes may be computed from a value of the whole batch, which every tower
    # gives its part of: so copies compute these values, even if they need them for nothing else.
    batch_values = [op for op in differentiated.operations if is_batch_value(op)]
    copies = Copies(copied, roles.inline_updates, request.split.parts_before,
                    first.optimizer_fetches + batch_values)
    leaves_of_first = leaves_of(batch.inputs[0])
    tower_copies = []
    for index in range(1, len(parts)):
        substitutes = first.values.substitutes(index)
        for leaf_of_first, leaf in zip(leaves_of_first, leaves_of(batch.inputs[index])):
            substitutes[leaf_of_first.name] = leaf
        variables = roles.in_copy(index, request.split.accumulate)
        tower_copies.append(copies.tower(
            Substitution(index, substitutes, variables), batch.inputs[index],
            batch.sizes[index], parts[index]))
    return tower_copies


def _updates_of_every_tower(updates: list, roles: Roles, request: Request) -> list:
    """The updates among those of tower 0 that a step runs in every tower.

    With `update_ops='first'` these are the updates of variables that each tower has for itself, of
    the counters of metrics, and of variables that every tower writes in turn.

    Args:
      updates: the updates of tower 0.
      roles: the roles of the variables.
      request: the checked arguments of the build.
    """
    update_ops = request.training.update_ops
    if update_ops == 'all':
        return updates
    if update_ops == 'none' or not request.training.objectives:
        return []
    written_by_every = set(roles.own_state) | set(metric_variables()) | set(roles.names(EVERY))
    if not written_by_every:
        return []
    writes = Writes(tf.get_default_graph())
    operations = graph_walk.step_operations(updates)
    writers = [op for op in operations if not written_by_every.isdisjoint(writes.written_by(op))]
    # An update may be a group of writes, or a value behind one.
    waiting_for_writers = graph_walk.reachable_from(writers, operations, control=True)
    return [update for update in updates
            if graph_walk.operation_of(update).name in waiting_for_writers]
