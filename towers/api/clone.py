"""`copies='clone'`: tower 0 is the program as it is called once; the others are copies of it."""

import contextlib

import tensorflow.compat.v1 as tf

from towers.reduce.replicas import make_replicas
from towers.tower.batch_values import exchange, is_batch_value
from towers.tower.copy import Copies, leaves_of, map_leaves
from towers.tower.differentiate import differentiate
from towers.tower.gradients import TowerGradients
from towers.tower.inline_updates import wait_for_readers
from towers.tower.inner_training import check_no_own_optimizer
from towers.tower.losses import make_losses
from towers.tower.objectives import GradientsOfModel, flat, map_shaped, tensors_of
from towers.tower.outputs import fetches_of
from towers.tower.ownership import ownership
from towers.tower.record import put_on_devices, record
from towers.tower.regularization import RegisteredLosses
from towers.tower.substitution import Substitution
from towers.tower.tower import TowerSet
from towers.tower.tower_seeds import give_seeds_of_tower


def call_once_and_copy(request, shards, behind, scaled_losses):
    """Builds all towers, by one call of the model function: `TowerSet`.

    Args:
      request: `Request`.
      shards: `CutBatch`, one for each of the request's parts.
      behind: `VariablesBehindInputs`.
      scaled_losses: `ScaledLosses`; or None.
    """
    weights = _as_tensors(shards.weights, shards.is_even)
    scales = [request.factor / len(request.parts) if shards.is_even else weight * request.factor
              for weight in weights]
    of_model = next((each.optimizer for each in request.objectives
                     if isinstance(each.optimizer, GradientsOfModel)), None)
    of_calls = [None] if of_model is None else _as_tensors(of_model.weights(shards), shards.is_even)
    registered = RegisteredLosses(tf.get_default_graph())
    recorded = record(
        request, shards, 0, registered, contextlib.nullcontext if of_model is None else (
            lambda: of_model.call(of_calls[0], shards.is_even, request.placement)))
    taken, slots = ([], []) if of_model is None else (of_model.fetches(), of_model.slots())
    names_of_slots = {slot.op.name for slot in slots}  # which a Saver made there reads
    recorded = recorded._replace(variables=[
        each for each in recorded.variables if each.op.name not in names_of_slots])
    cuts = put_on_devices(recorded, request, request.parts[0].device)
    if of_model is None:
        check_no_own_optimizer(recorded, request.objectives)
    roles = ownership(recorded, request, shards.sizes[0], taken, None if (
        request.placement.all_reduce is None) else make_replicas)
    losses = make_losses(recorded, request, 0)
    gradients = TowerGradients(request, scaled_losses, behind)
    first = differentiate(recorded, losses, gradients, request, shards, 0, scales[0], taken)
    others, of_shards = copies_of(first, losses, roles, request, shards,
                                  [weights, scales, of_calls], of_model)
    towers = [first.tower] + others
    exchange(towers, shards.weights, request.placement.main)
    if request.names.parts_before and others:
        give_seeds_of_tower(
            first.operations, fetches_of(recorded.output) + taken + recorded.updates + tensors_of(
                first.tower.pairs), request.names.parts_before, tf.get_default_graph())
    towers, late = wait_for_readers(roles.inline_updates, towers, request, roles.of_every_tower)
    return TowerSet(
        towers=towers, recorded=recorded, losses=losses, gradients=gradients, roles=roles,
        late=late, of_shards=[first.of_shard] + of_shards, recomputed=first.recomputed,
        how_built=_how_built(len(towers)), cuts=cuts, slots=slots)


def copies_of(first, losses, roles, request, shards, by_shard, of_model=None):
    """The towers after the first: a list of `Tower`; and their `Differentiated.of_shard`s.

    Args:
      first: `Differentiated`: tower 0.
      losses: `Losses`.
      roles: `Roles`.
      request: `Request`.
      shards: `CutBatch`.
      by_shard: lists of further values with one for each shard; tensors among them are exchanged.
      of_model: `GradientsOfModel`, which is told of each copy; or None.
    """
    if len(request.parts) == 1:
        return [], []
    further = [gradient for some in flat(first.of_shard) for gradient in some]
    # What tower 0 alone writes may be computed from all towers' parts.
    further += [op for op in first.operations if is_batch_value(op)]
    updates, towers, of_shards = roles.inline_updates, [], []
    copies = Copies(
        first.tower, first.operations, shared=losses.shared | updates.shared,
        left_out=updates.left_out, left_alone=updates.in_functions, names=request.names,
        random_keys=first.random_keys,
        further=further if of_model is None else of_model.fetches() + further)
    for number, part in list(enumerate(request.parts))[1:]:
        exchanged = dict(zip((leaf.name for leaf in leaves_of(shards.inputs[0])),
                             leaves_of(shards.inputs[number])))
        exchanged.update((each[0].name, each[number]) for each in by_shard
                         if isinstance(each[0], tf.Tensor))
        substitution = Substitution(number, exchanged, roles.in_tower(number, request.accumulate))
        tower, copied = copies.tower(substitution, shards.inputs[number], shards.sizes[number],
                                     part)
        towers.append(tower)
        of_shards.append(map_shaped(lambda some: map_leaves(copied, some), first.of_shard))
        if of_model is not None:
            of_model.note_copy(copied)
    return towers, of_shards


def _as_tensors(weights, is_even):
    """Weights of shards; tensors where they differ, so that a copy can have another."""
    if is_even or weights is None:
        return weights or [None]
    with tf.name_scope('shards'), tf.device('/cpu:0'):
        return [tf.constant(weight, tf.float64) if isinstance(weight, float) else weight
                for weight in weights]


def _how_built(count):
    if count == 1:
        return '1 call of the model function'
    return '1 call of the model function, %d cop%s of its graph' % (
        count - 1, 'y' if count == 2 else 'ies')
