"""The towers of a build with `copies='clone'`: one call of the model function, and copies.

Tower 0 is the model function's graph, or an import of a finished model; the other towers are copies
of it. `call_for_each` makes the towers of `copies='reuse'`. Its test is tests/api/test_build.py.

Words of other modules used here: `Recorded` is the forward pass of tower 0, `Differentiated` the
tower with its forward and backward pass. `Roles` say who writes each variable. A `Substitution` is
what a copy reads in the place of tower 0's inputs. A *step* of a cluster is a step of all workers;
its object tells which part of their examples this machine has.
"""

import contextlib
import functools
import typing

import tensorflow.compat.v1 as tf

from towers.capture.record import Recorded, put_on_devices, record, with_shared_reads
from towers.capture.stage_cuts import StageCuts
from towers.copies.copy import Copies, TowerCopy
from towers.copies.references_in_loops import check_references_in_loops
from towers.copies.substitution import Substitution
from towers.copies.tower_set import TowerSet
from towers.gradients.backward_pass import Differentiated, TowerGradients
from towers.gradients.gradient_pairs import tensors_of
from towers.gradients.stateless_random import give_seeds_of_tower
from towers.gradients.tower import Tower
from towers.graph.graph_walk import leaves_of, operation_names
from towers.graph.waits import Wait
from towers.model.losses import Losses, make_losses
from towers.model.objectives import trained_variables
from towers.model.outputs import fetches_of
from towers.model.request import Request
from towers.reduce.loss_scale import ScaledLosses
from towers.reduce.replicas import make_replicas
from towers.roles.ownership import ownership
from towers.roles.variable_roles import Roles
from towers.roles.write_in_turn import write_in_turn
from towers.roles.write_order import write_after_reads
from towers.shards.batch_inputs import UpstreamVariables
from towers.shards.cut_batch import CutBatch
from towers.whole_batch.batch_values import is_batch_value
from towers.whole_batch.exchange import exchange


class _ShardValues(typing.NamedTuple):
    """Weights and factors, one for each part of the batch; tensors where they differ.

    Two shards of 3 and 1 examples on one machine have the weights 3/4 and 1/4. These are their loss
    factors with `reduction='mean'`; with `'sum'` they are 2 * 3/4 and 2 * 1/4.

    Attributes:
      weights: the weight of each part: its examples over those of the batch.
      loss_factors: for each part, what its loss is multiplied with, so that the plain sum of the
        gradients of all parts, on all machines, is the gradient of the batch.
      call_weights: for each part, what the losses are multiplied with that the model function's own
        optimizers minimize. None for each part where the model function calls no optimizer, and
        where these losses are not multiplied.
    """

    weights: list
    loss_factors: list
    call_weights: list

    def substitutes(self, index: int) -> typing.Dict[str, tf.Tensor]:
        """{name of a tensor of the first part: what part `index` has in its place}."""
        tensors = {}
        for values in self:
            if isinstance(values[0], tf.Tensor):  # else it is a number, or None, for all parts
                tensors[values[0].name] = values[index]
        return tensors


class _FirstCall(typing.NamedTuple):
    """The call of the model function for tower 0, or the import of the finished model.

    Attributes:
      recorded: the call.
      optimizer_fetches: what a step runs of the calls of optimizers in the model function; [] where
        the model function calls no optimizer.
      slots: the variables that these optimizers have made.
    """

    recorded: Recorded
    optimizer_fetches: list
    slots: list


class _FirstTower(typing.NamedTuple):
    """Tower 0, and what was found out about it.

    Attributes:
      call: the call of the model function, or the import of the finished model.
      cuts: where the model was cut into stages; None where it was not.
      roles: the roles of its variables.
      losses: the losses that it differentiates.
      gradients: what differentiates the losses of all towers.
      differentiated: the tower itself, with forward and backward pass.
      values: the weights and factors of the parts.
      step_of_workers: the step of the workers of the cluster; None for this machine alone.
    """

    call: _FirstCall
    cuts: typing.Optional[StageCuts]
    roles: Roles
    losses: Losses
    gradients: TowerGradients
    differentiated: Differentiated
    values: _ShardValues
    step_of_workers: typing.Any

    @property
    def fetches(self) -> list:
        """All tensors and operations that a step needs of the tower."""
        recorded = self.call.recorded
        gradients = tensors_of(self.differentiated.tower.pairs)
        return (fetches_of(recorded.output) + self.call.optimizer_fetches
                + self.roles.inline_updates.update_ops + recorded.updates + gradients)


def call_once_and_copy(request: Request, batch: CutBatch, upstream: UpstreamVariables,
                       scaled_losses: typing.Optional[ScaledLosses]) -> TowerSet:
    """Builds all towers, by one call of the model function, or one import of the finished model.

    Args:
      request: the checked arguments of the build.
      batch: the parts of the batch.
      upstream: the trained variables upstream of the inputs.
      scaled_losses: the loss scale and its variables; None for a build without one.
    """
    # A model function is called in the name scope of the caller, as on one device.
    scope_of_first: typing.ContextManager = contextlib.nullcontext()
    if request.call.is_finished:
        scope_of_first = tf.name_scope(request.split.parts[0].scope)
    with scope_of_first:
        first = _make_first(request, batch, upstream, scaled_losses)
    roles = first.roles
    copies = _copies_of(first, request, batch)
    first_tower = first.differentiated.tower
    # `ownership` turned some of tower 0's writes into updates; copies have none of these.
    towers = [first_tower._replace(updates=first_tower.updates + roles.inline_updates.update_ops)]
    towers += [copy.tower for copy in copies]
    exchanged = exchange_values(towers, request, batch, first.step_of_workers)
    if copies:
        _give_seeds_of_machine(first, request)
    waits = order_writes(request, towers, roles)
    return TowerSet(
        request=request, batch=batch, towers=towers, recorded=first.call.recorded,
        losses=first.losses, gradients=first.gradients, roles=roles, waits=waits,
        recomputed=first.differentiated.recomputed, step_of_workers=first.step_of_workers,
        exchanged=exchanged, cuts=first.cuts, slots=first.call.slots,
        copies=[copy.copy_of for copy in copies],
        how_built=_how_built(request, len(copies)))


def _give_seeds_of_machine(first: _FirstTower, request: Request) -> None:
    """Gives tower 0 of this machine seeds of its own, if this is not the first machine. With the
    program's seeds, tower 0 would draw the same numbers on all machines.

    This comes after the copies, whose seeds are computed from the program's. A tower 0 without
    copies needs no such delay: `differentiate` has given it its seeds.

    Args:
      first: tower 0 of this machine.
      request: the checked arguments of the build.
    """
    number_among_machines = request.split.parts_before
    if number_among_machines > 0:
        give_seeds_of_tower(first.differentiated.operations, first.fetches, number_among_machines)


def _how_built(request: Request, num_copies: int) -> str:
    """The plan's text about the call of the model function and the copies of its graph."""
    made = '1 call of the model function'
    if request.call.is_finished:
        made = '1 import of the finished model'
    copies = '1 copy' if num_copies == 1 else '%d copies' % num_copies
    return '%s, %s of its graph' % (made, copies)


def begin_step(request: Request, batch: CutBatch) -> typing.Any:
    """Begins the step of the workers of the cluster; None for this machine alone.

    Its operations are made after the recorded call. TensorFlow seeds a random operation by its
    number in the graph: operations before the call would give the model other random numbers than
    it has without a cluster.
    """
    if not request.trains_with_machines:
        return None
    with tf.name_scope('machines'):
        return request.cluster.begin_step(batch.batch_size, request.training.reduction)


def factors_of_losses(request: Request, batch: CutBatch, weights: list,
                      step_of_workers: typing.Any) -> list:
    """For each part of the batch, what its loss is multiplied with.

    The sum of the parts' gradients is then the gradient of the mean loss over the batch of all
    machines; with `reduction='sum'` it is this gradient times the number of towers.

    Args:
      request: the checked arguments of the build.
      batch: the parts of the batch.
      weights: for each part, its examples over those of this machine's batch.
      step_of_workers: the step of the workers of the cluster, which `begin_step` has begun; its
        `loss_weight` is this machine's part of all batches. None for this machine alone.
    """
    factor_of_batch = request.factor  # 1, or with 'sum' the number of towers
    if step_of_workers is not None:
        factor_of_batch = factor_of_batch * step_of_workers.loss_weight
    if batch.is_even:
        # Not times 1 / N: with 'sum' the quotient is exactly 1, and 49 * (1 / 49) is not.
        num_parts = len(request.split.parts)
        return [factor_of_batch / num_parts] * num_parts
    return [weight * factor_of_batch for weight in weights]


def exchange_values(towers: typing.List[Tower], request: Request, batch: CutBatch,
                    step_of_workers: typing.Any) -> typing.List[tf.Tensor]:
    """Gives the towers the values of the whole batch, such as the results of `batch_sum`.

    Until then each tower computes with its shard's value in their place.

    Args:
      towers: the towers.
      request: the checked arguments of the build.
      batch: the parts of the batch.
      step_of_workers: the step of the workers of the cluster, whose towers all take part; None
        for this machine alone.

    Returns:
      The exchanged values, see `exchange`.
    """
    workers = None
    if step_of_workers is not None:
        workers = step_of_workers.workers
    return exchange(towers, batch.weights, request.placement.main, workers)


def _as_tensors(weights: list, is_even: bool) -> list:
    """The weights as tensors where they differ, so that a copy can substitute its own.

    Args:
      weights: the weight of each shard.
      is_even: whether all shards have the same size, and so one weight, which may stay a number.
    """
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
    call_weights = _call_weights(request, batch)
    call = _first_call(request, batch, call_weights[0])
    recorded = call.recorded
    step_of_workers = begin_step(request, batch)
    loss_factors = factors_of_losses(request, batch, weights, step_of_workers)
    # `ownership` makes the towers' own state on the device of its stage, so stages come first. It
    # takes writes that become updates out of the forward pass, so it comes before `differentiate`.
    cuts = put_on_devices(recorded, request, request.split.parts[0].device)
    recorded = with_shared_reads(recorded, request)
    call = call._replace(recorded=recorded)
    trained = trained_variables(request.training.objectives)
    # `ownership` gets this function as an argument, since its room is below the room of replicas.
    replicas_maker: typing.Optional[typing.Callable] = None
    if request.placement.has_replicas:
        replicas_maker = make_replicas
    roles = ownership(recorded, request, trained, call.optimizer_fetches, replicas_maker)
    losses = make_losses(recorded, request, index=0)
    gradients = TowerGradients(request, batch, upstream, scaled_losses, roles.trained)
    # Besides the losses and gradients, a step runs what an Estimator's model function makes by its
    # own optimizers, and the writes that `ownership` took out of the forward pass.
    other_fetches = call.optimizer_fetches + roles.inline_updates.update_ops
    differentiated = gradients.differentiate(
        recorded, losses, index=0, scale=loss_factors[0], other_fetches=other_fetches)
    values = _ShardValues(weights, loss_factors, call_weights)
    return _FirstTower(call, cuts, roles, losses, gradients, differentiated, values,
                       step_of_workers)


def _call_weights(request: Request, batch: CutBatch) -> list:
    """For each part of the batch, what the losses are multiplied with that the model function's own
    optimizers minimize: `_ShardValues.call_weights`.

    Args:
      request: the checked arguments of the build.
      batch: the parts of the batch.
    """
    optimizer_calls = request.training.objectives.optimizer_calls
    none_for_each_part: list = [None] * len(batch.sizes)
    if optimizer_calls is None:  # the model function calls no optimizer
        return none_for_each_part
    weights = optimizer_calls.weights(batch)
    if weights is None:  # equal shards whose losses are added up as they are
        return none_for_each_part
    return _as_tensors(weights, batch.is_even)


def _first_call(request: Request, batch: CutBatch, call_weight: typing.Any) -> _FirstCall:
    """Calls the model function for tower 0, or imports the finished model.

    Args:
      request: the checked arguments of the build.
      batch: the parts of the batch.
      call_weight: what the losses are multiplied with that the model function's own optimizers
        minimize; or None.
    """
    optimizer_calls = request.training.objectives.optimizer_calls
    if optimizer_calls is None:  # the model function calls no optimizer
        return _FirstCall(record(request, batch, index=0), optimizer_fetches=[], slots=[])
    context_of_call = functools.partial(optimizer_calls.call, call_weight, request.placement)
    recorded = record(request, batch, index=0, around=context_of_call)
    slots = optimizer_calls.slots()
    # `recorded.variables` has every variable that the call reads. A Saver that the model function
    # makes also reads the slots, which are no variables of the model.
    slot_names = operation_names(slots)
    variables = [each for each in recorded.variables if each.op.name not in slot_names]
    return _FirstCall(recorded._replace(variables=variables), optimizer_calls.fetches(), slots)


def order_writes(request: Request, towers: typing.Sequence[Tower],
                 roles: Roles) -> typing.List[Wait]:
    """Makes the towers' writes of shared variables, other than the update, wait for their reads.

    Args:
      request: the checked arguments of the build.
      towers: the towers.
      roles: the roles of the variables.

    Returns:
      The waits that were made.
    """
    check_references_in_loops(towers)
    update_ops = request.training.update_ops
    has_several_towers = len(towers) > 1
    if update_ops == 'none':
        # No tower writes, unless its loss uses the new value: that use waits for the write already.
        return []
    if has_several_towers:
        if update_ops == 'all':
            return write_in_turn(towers, roles)
        return write_after_reads(towers, roles)
    # The single tower of a model function keeps the order of the program. In two cases this order
    # is not enough: workers that have copies of the variables have to write equal values; and the
    # updates of a finished model are separate operations, which may run before or after the reads.
    workers_write_alike = request.has_copies
    if workers_write_alike or request.call.is_finished:
        return write_after_reads(towers, roles)
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
    # A copy has what is reached from the results of the tower. So of the updates, `copied` has only
    # those that every tower is to run.
    copied = differentiated._replace(
        tower=tower._replace(updates=roles.update_ops_of_every_tower))
    # What tower 0 alone writes may be computed from a value of the whole batch. Every tower gives
    # its part of this value, so copies compute it, even if they need it for nothing else.
    batch_values = [op for op in differentiated.operations if is_batch_value(op)]
    # Every tower also has the gradients that the model function's own optimizers have taken.
    gradients_of_calls = first.call.optimizer_fetches
    copies = Copies(copied, roles.inline_updates,
                    request.split.parts_before,  # from which the seeds of a copy are computed, too
                    other_results=gradients_of_calls + batch_values)
    tower_copies = []
    for index in range(1, len(parts)):
        tower_copies.append(copies.tower(
            _substitution(index, first, request, batch), batch.inputs[index], batch.sizes[index],
            parts[index]))
    return tower_copies


def _substitution(index: int, first: _FirstTower, request: Request,
                  batch: CutBatch) -> Substitution:
    """What a copy reads in the place of tower 0's shard, weights and variables: its own.

    Args:
      index: the index of the copy among the parts of this machine.
      first: tower 0.
      request: the checked arguments of the build.
      batch: the parts of the batch.
    """
    substitutes = first.values.substitutes(index)
    for leaf_of_first, leaf in zip(leaves_of(batch.inputs[0]), leaves_of(batch.inputs[index])):
        substitutes[leaf_of_first.name] = leaf
    # The copy reads its tower's replicas and its own state; other variables are tower 0's.
    variables = first.roles.in_copy(index, micro_batches=request.split.accumulate)
    return Substitution(index, substitutes, variables)
