"""One captured step: tower 0 with its backward pass, and what the passes after it read of it."""

import collections

import tensorflow.compat.v1 as tf

from towers.graph import graph_walk
from towers.nonfinite import checked_loss
from towers.placement.loop_state_devices import keep_arrays_with_readers
from towers.placement.loop_state_devices import keep_stacks_with_loops
from towers.placement.stages import place_forward, says_stages
from towers.placement.tower_device import (BackwardDevice, TowerDevice, keep_off_resources,
                                           keep_reads_in_loops, keep_with_tower, stages_of)
from towers.placement.variable_device import only_device
from towers.placement.xla import explained
from towers.tower.gradients import TowerGradients
from towers.tower.losses import make_losses, no_losses
from towers.tower.objectives import all_pairs, flat, map_shaped, tensors_of
from towers.tower.recomputed_draws import recomputed_draws
from towers.tower.stage_cuts import cut_into_stages
from towers.tower.stateless_random import give_own_seeds, make_stateless
from towers.tower.tower import Tower
from towers.tower.tower_seeds import give_seeds_of_tower


class Step(collections.namedtuple('Step', [
        'tower', 'recorded', 'operations', 'losses', 'gradients', 'of_shard', 'recomputed',
        'random_ops', 'random_keys'])):
    """Tower 0, forward and backward.

    Attributes:
      tower: `Tower`.
      recorded: `Recorded`: the call of the model function.
      operations: list of all operations that were made for the tower, without those of variables.
      losses: `Losses`.
      gradients: `TowerGradients`; None without an optimizer.
      of_shard: the gradients of tensors of the shard, see `BehindBatch`; shaped as the losses are.
      recomputed: list of `Recomputed`, one for each loss; or [].
      random_ops: `(replaced, kept)` random ops, see `make_stateless`; or None.
      random_keys: {name of a constant that holds a seed: name of the random op}.
    """
    __slots__ = ()


def put_on_devices(recorded, device, placement, cutting=None):
    """Puts the recorded forward pass on the devices of its tower; cuts it into stages.

    Args:
      recorded: `Recorded`.
      device: the tower's device, or `StagedDevices`.
      placement: `Placement` of the variables.
      cutting: `Cutting`; None where the model is not cut.

    Returns:
      `StageCuts`, or None.
    """
    cuts, operations = None, recorded.operations
    if cutting is not None and len(stages_of(device)) > 1:
        made_on = [variable.device for variable in recorded.variables]
        # Variables of an earlier build stay where its towers have them.
        movable = {variable.op.name for variable in recorded.created
                   } if placement.by_stage else ()
        cuts = cut_into_stages(operations, recorded.variables, recorded.owned, device, movable,
                               cutting)
        for variable, before in zip(recorded.variables, made_on):
            placement.note_moved(variable, before)
    if cuts is None or says_stages(operations):
        place_forward(operations, device)
    keep_reads_in_loops(operations)
    keep_stacks_with_loops(operations)  # of gradients that the model function takes itself
    keep_arrays_with_readers(operations, device)
    return cuts


def differentiate(recorded, options, placement, registered, device, inputs, size, scale,
                  scaled_losses=None, takes_out=True, num_towers=1, taken=(), number=0, shard=(),
                  taker=None):
    """Takes the gradients of the recorded loss: `Step`.

    Args:
      recorded: `Recorded`.
      options: `TowerOptions`.
      placement: `Placement` of the variables.
      registered: `RegisteredLosses`.
      device: the tower's device.
      inputs: the tower's shard.
      size: examples in it.
      scale: the factor of the loss in the combined gradient: a float, or a scalar.
      scaled_losses: `ScaledLosses`; or None.
      takes_out: whether regularization may be taken out of the loss, see `make_losses`.
      num_towers: how many towers this machine has.
      taken: what a step runs besides what the model function returned.
      number: the tower's number.
      shard: tensors of the shard that gradients are taken of, too, see `BehindBatch`.
      taker: `TowerGradients` of the tower before, whose factor of the loss this one has, too.
    """
    graph, output = tf.get_default_graph(), recorded.output
    outer = graph.get_name_scope()
    root = outer + '/' if outer else ''
    if output.loss is None:
        losses = no_losses(registered, recorded.varying)
    else:
        with graph_walk.Recording(graph) as of_loss, \
                only_device(_device_of_loss(output.loss, device)):
            losses = make_losses(recorded, registered, options.adds_registered, takes_out,
                                 placement)
            if options.check_numerics:
                losses = losses._replace(data_loss=map_shaped(lambda loss: checked_loss(
                    loss, number, options.micro_batches), losses.data_loss))
    gradients, backward, of_shard, recomputed = [], [], [], []
    if options.objectives and taker is None:
        taker = TowerGradients(options, placement, graph, scaled_losses)
    start = len(graph.get_operations())
    if options.objectives:
        with tf.device(BackwardDevice(device)), explained(options.xla):
            gradients, of_shard, backward = taker.of_tower(
                number, device, losses.data_loss, scale, shard)
    keep_reads_in_loops(sum(backward, []))
    if any(each.gradient_options.get('colocate_gradients_with_ops')
           for each in options.objectives):
        inside = {op.name for op in recorded.operations + sum(backward, [])}
        keep_with_tower(sum(backward, []), inside - recorded.owned, device)
    keep_off_resources(sum(backward, []))
    # Only now, since a recomputation in the backward pass has to draw what was drawn before.
    keys = {}
    fetches = fetches_of(output) + list(taken) + recorded.updates + tensors_of(all_pairs(gradients))
    random_ops = _give_seeds(options, recorded.operations, sum(backward, []), fetches, keys,
                             num_towers, number)
    with graph_walk.Recording(graph) as again:
        if options.objectives:
            with tf.device(BackwardDevice(device)):
                gradients, recomputed = taker.with_recomputation(
                    root, recorded.operations, backward, gradients)
    operations = [op for op in recorded.operations if op.name not in recorded.owned]
    if output.loss is not None:
        operations += of_loss.operations
    operations += graph.get_operations()[start:]
    backward = frozenset(op.name for some in backward + [again.operations] for op in some)
    tower = Tower(number, device, root, inputs, size, output.loss, output.predictions,
                  output.metrics, gradients, recorded.updates, recorded.variables,
                  losses.data_loss, 0, frozenset(
                      op.name for op in operations) - backward, backward)
    return Step(tower, recorded, operations, losses, taker, of_shard, recomputed, random_ops, keys)


def _give_seeds(options, forward, backward, fetches, keys, num_towers, number):
    """Gives random ops seeds of the step, or of the tower; see `Step.random_ops`."""
    names = options.called
    if options.random_step is None and num_towers == 1 and not names.parts_before:
        return None
    graph, repeats, random_ops = tf.get_default_graph(), {}, None
    if options.random_step is not None:
        repeats = recomputed_draws(forward, backward)
        random_ops = make_stateless(forward + backward, fetches, options.random_step, graph.seed,
                                    keys, repeats, names)
    number += names.parts_before
    give_own_seeds(forward + backward, number, graph.seed, options.random_step, keys, repeats,
                   names)
    if number and num_towers == 1:  # else copies are made, from the seeds as they are
        give_seeds_of_tower(forward + backward, fetches, number, graph)
    return random_ops


def _device_of_loss(loss, device):
    """The device for operations on the loss: the loss's own in a tower of several stages."""
    there = flat(loss)[0].op.device
    return TowerDevice(there, stages_of(device)) if there in stages_of(device) else (
        TowerDevice(device))


def fetches_of(output):
    """The tensors that a model function returned to be computed, as a flat list."""
    return [tensor for tensor in tf.nest.flatten(
        [output.loss, output.predictions, output.metrics], expand_composites=True)
            if isinstance(getattr(tensor, 'op', tensor), tf.Operation)]
