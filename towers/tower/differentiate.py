"""Takes the gradients of the recorded loss: a tower with its backward pass, as a value."""

import collections

import tensorflow.compat.v1 as tf

from towers.graph import graph_walk
from towers.placement.tower_device import TowerDevice, keep_off_resources, keep_with_tower
from towers.placement.xla import explained
from towers.tower.objectives import all_pairs, tensors_of
from towers.tower.outputs import fetches_of
from towers.tower.recomputed_draws import recomputed_draws
from towers.tower.stateless_random import give_own_seeds, make_stateless
from towers.tower.tower import Tower
from towers.tower.tower_seeds import give_seeds_of_tower


class Differentiated(collections.namedtuple('Differentiated', [
        'tower', 'operations', 'of_shard', 'recomputed', 'random_keys'])):
    """A tower, forward and backward.

    Attributes:
      tower: `Tower`.
      operations: list of all operations that were made for the tower, without those of variables.
      of_shard: the gradients of tensors of the shard, see `VariablesBehindInputs`; shaped as the
        losses are.
      recomputed: list of `Recomputed`, one for each loss; or [].
      random_keys: {name of a constant that holds a seed: name of the random op}.
    """
    __slots__ = ()


def differentiate(recorded, losses, gradients_of, request, shards, number, scale, taken=()):
    """Takes the gradients of the recorded loss: `Differentiated`.

    Args:
      recorded: `Recorded`.
      losses: `Losses` of this call.
      gradients_of: `TowerGradients`.
      request: `Request`.
      shards: `CutBatch`.
      number: the tower's number: 0, but for the recipe's calls after the first.
      scale: the factor of the loss in the combined gradient: a float, or a scalar.
      taken: what a step runs besides what the model function returned.
    """
    graph, output, device = tf.get_default_graph(), recorded.output, request.parts[number].device
    outer = graph.get_name_scope()
    root = outer + '/' if outer else ''
    gradients, of_shard, by_loss, recomputed = [], [], [], []
    start = len(graph.get_operations())
    if request.objectives:
        with tf.device(TowerDevice(device)), explained(request.numerics.xla):
            gradients, of_shard, by_loss = gradients_of.of_tower(
                number, losses.data_loss, scale, shards.inputs[number])
    backward = sum(by_loss, [])
    if any(each.gradient_options.get('colocate_gradients_with_ops')
           for each in request.objectives):
        inside = {op.name for op in recorded.operations + backward}
        keep_with_tower(backward, inside - recorded.owned, device)
    keep_off_resources(backward)
    # Only now, since a recomputation in the backward pass has to draw what was drawn before.
    fetches = fetches_of(output) + list(taken) + recorded.updates + tensors_of(all_pairs(gradients))
    keys = _give_seeds(request, recorded.operations, backward, fetches, number)
    with graph_walk.Recording(graph) as again:
        if request.objectives:
            with tf.device(TowerDevice(device)):
                gradients, recomputed = gradients_of.with_recomputation(
                    root, recorded.operations, by_loss, gradients)
    operations = [op for op in recorded.operations if op.name not in recorded.owned]
    operations += list(losses.operations) + graph.get_operations()[start:]
    backward = frozenset(op.name for op in backward + again.operations)
    tower = Tower(
        index=number, device=device, name_scope=root, inputs=shards.inputs[number],
        size=shards.sizes[number], loss=output.loss, predictions=output.predictions,
        metrics=output.metrics, gradients=gradients, updates=recorded.updates,
        variables=recorded.variables, data_loss=losses.data_loss, micro_batch=0,
        forward=frozenset(op.name for op in operations) - backward, backward=backward)
    return Differentiated(tower, operations, of_shard, recomputed, keys)


def _give_seeds(request, forward, backward, fetches, number):
    """Gives random ops seeds of the step, or of the tower: `Differentiated.random_keys`."""
    names, is_copied, keys = request.names, request.parts_a_call > 1, {}
    if request.random_step is None and not is_copied and not names.parts_before:
        return keys
    graph, repeats, number = tf.get_default_graph(), {}, number + names.parts_before
    if request.random_step is not None:
        repeats = recomputed_draws(forward, backward)
        make_stateless(forward + backward, fetches, request.random_step, graph.seed, keys, repeats,
                       names)
    give_own_seeds(forward + backward, number, graph.seed, request.random_step, keys, repeats,
                   names)
    if number and not is_copied:  # else copies are made, from the seeds as they are
        give_seeds_of_tower(forward + backward, fetches, number, graph)
    return keys
