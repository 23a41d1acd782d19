"""The towers of a build: tower 0 recorded and differentiated, the others as copies of it."""

import collections
import contextlib

import tensorflow.compat.v1 as tf

from towers.api.request import no_batch_values
from towers.api.reuse import call_for_each_tower
from towers.reduce.loss_scale import ScaledLosses
from towers.tower.batch_values import exchange, is_batch_value
from towers.tower.copy import Copies, leaves_of, map_leaves
from towers.tower.gradients import takes_plain_gradients
from towers.tower.inner_training import check_no_own_optimizer
from towers.tower.objectives import GradientsOfModel, flat, map_shaped, tensors_of
from towers.tower.ownership import ownership
from towers.tower.record import record
from towers.tower.regularization import RegisteredLosses
from towers.tower.step import differentiate, fetches_of, put_on_devices
from towers.tower.substitution import Substitution
from towers.tower.tower_seeds import give_seeds_of_tower


class Captured(collections.namedtuple('Captured', [
        'towers', 'step', 'roles', 'cuts', 'of_shards', 'slots', 'how_built'])):
    """The towers of a build.

    Attributes:
      towers: list of `Tower`, one for each of the request's parts.
      step: `Step` of tower 0.
      roles: `Roles`: what each variable is to the towers.
      cuts: `StageCuts`, where the model was cut into stages; or None.
      of_shards: the gradients of all towers' shards, see `BehindBatch`: a list of `Step.of_shard`.
      slots: variables that the model function's own optimizers have made: a list.
      how_built: the plan's line about calls and copies.
    """
    __slots__ = ()


def capture(request, shards, behind):
    """Builds all towers: `Captured`.

    Args:
      request: `Request`.
      shards: `CutBatch`, one for each of the request's parts.
      behind: `BehindBatch`: the trained variables that the batch is computed from.
    """
    options, placement, first = request.of_tower, request.placement, request.parts[0]
    weights = _as_tensors(shards.weights, shards.is_even)
    scales = [request.factor / len(request.parts) if shards.is_even else weight * request.factor
              for weight in weights]
    scaled_losses = None
    if request.loss_scale is not None:
        scaled_losses = ScaledLosses(request.loss_scale, request.name + 's', placement)
    if request.copies == 'reuse':
        steps, roles = call_for_each_tower(request, shards, scaled_losses, behind,
                                           no_batch_values(request.accumulate, request.cluster))
        exchange([step.tower for step in steps], shards.weights, placement.main)
        return Captured([step.tower for step in steps], steps[0], roles, None,
                        [step.of_shard for step in steps], [],
                        '%d calls of the model function' % len(steps))
    registered = RegisteredLosses(tf.get_default_graph())
    of_model = next((each.optimizer for each in options.objectives
                     if isinstance(each.optimizer, GradientsOfModel)), None)
    of_calls = [None] if of_model is None else _as_tensors(of_model.weights(shards), shards.is_even)
    recorded = record(
        options.model_fn, shards.inputs[0], first.device, placement, options.objectives,
        registered, options.variable_scope, options.reuse, options.earlier, options.xla,
        options.adds_registered, contextlib.nullcontext if of_model is None else (
            lambda: of_model.call(of_calls[0], shards.is_even, placement)),
        shards.batch_size, len(request.parts),
        no_batch_values(request.accumulate, request.cluster),
        request.batch_norm)
    taken, slots = ([], []) if of_model is None else (of_model.fetches(), of_model.slots())
    names_of_slots = {slot.op.name for slot in slots}  # which a Saver made there reads
    recorded = recorded._replace(variables=[
        each for each in recorded.variables if each.op.name not in names_of_slots])
    cuts = put_on_devices(recorded, first.device, placement, options.cutting)
    if of_model is None:
        check_no_own_optimizer(recorded, options.objectives)
    roles = ownership(recorded, shards.sizes[0], options, len(request.parts), request.replicas,
                      taken)
    step = differentiate(
        recorded, options, placement, registered, first.device, shards.inputs[0], shards.sizes[0],
        scales[0], scaled_losses, takes_plain_gradients(
            options.objectives), len(request.parts), taken,
        shard=behind.shard_tensors(shards.inputs[0]))
    towers, of_shards = copies_of(step, roles, request, shards, [weights, scales, of_calls],
                                  of_model)
    towers.insert(0, step.tower)
    exchange(towers, shards.weights, placement.main)
    if options.called.parts_before and len(towers) > 1:
        give_seeds_of_tower(
            step.operations, fetches_of(recorded.output) + taken + recorded.updates + tensors_of(
                step.tower.pairs), options.called.parts_before, tf.get_default_graph())
    roles.inline_updates.wait_for_readers(towers, roles.of_every_tower)
    return Captured(towers, step, roles, cuts, [step.of_shard] + of_shards, slots,
                    _how_built(len(towers)))


def copies_of(step, roles, request, shards, by_shard, of_model=None):
    """The towers after the first: a list of `Tower`; and their `Step.of_shard`s.

    Args:
      step: `Step` of tower 0.
      roles: `Roles`.
      request: `Request`.
      shards: `CutBatch`.
      by_shard: lists of further values with one for each shard; tensors among them are exchanged.
      of_model: `GradientsOfModel`, which is told of each copy; or None.
    """
    if len(request.parts) == 1:
        return [], []
    copies = Copies(
        step.tower, step.operations, step.losses.shared | roles.inline_updates.shared,
        roles.inline_updates.left_out, roles.inline_updates.in_functions,
        request.of_tower.called, step.random_keys,
        ([] if of_model is None else of_model.fetches()) + [
            gradient for some in flat(step.of_shard) for gradient in some]
        # What tower 0 alone writes may be computed from all towers' parts.
        + [op for op in step.operations if is_batch_value(op)])
    towers, of_shards = [], []
    for number, part in list(enumerate(request.parts))[1:]:
        exchanged = dict(zip((leaf.name for leaf in leaves_of(shards.inputs[0])),
                             leaves_of(shards.inputs[number])))
        exchanged.update((each[0].name, each[number]) for each in by_shard
                         if isinstance(each[0], tf.Tensor))
        substitution = Substitution(number, exchanged, roles.in_tower(number, request.accumulate))
        tower, copied = copies.tower(substitution, shards.inputs[number], shards.sizes[number],
                                     part)
        towers.append(tower)
        of_shards.append(map_shaped(lambda some: map_leaves(copied, some), step.of_shard))
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
