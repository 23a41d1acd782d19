"""The backward pass of a tower: a tower with the gradients of its losses, as a value."""

import collections
import typing

import tensorflow.compat.v1 as tf

from towers.gradients.gradient_pairs import tensors_of
from towers.gradients.optimizer_methods import OwnComputeGradients, computed_pairs
from towers.gradients.stateless_random import (
    check_draws_nothing,
    give_own_seeds,
    give_seeds_of_tower,
    make_stateless,
)
from towers.gradients.tower import Tower
from towers.graph import graph_walk
from towers.model.losses import Losses
from towers.model.objectives import all_pairs
from towers.model.outputs import fetches_of
from towers.nonfinite import checked_gradients
from towers.optimizers import has_own_compute_gradients, has_own_minimize
from towers.placement.stages import keep_stacks_with_loops, place_backward
from towers.placement.tower_device import TowerDevice, keep_with_tower
from towers.recompute.rewrite import rewrite
from towers.shards.batch_inputs import VariablesBehindInputs
from towers.shards.cut_batch import CutBatch

_PLAIN = tf.train.GradientDescentOptimizer(1.)
"""Takes plain gradients, in the place of an optimizer whose own method is called later."""


class Differentiated(collections.namedtuple('Differentiated', [
        'tower', 'operations', 'recomputed', 'random_keys'])):
    """A tower, forward and backward.

    Attributes:
      tower: `Tower`.
      operations: list of all operations that were made for the tower, without parts of variables.
      recomputed: list of `Recomputed`, one for each loss; or [].
      random_keys: {name of a constant that holds a seed: name of the random op}.
    """
    __slots__ = ()


class TowerGradients:
    """Differentiates the losses of towers.

    Attributes:
      scaled_losses: `ScaledLosses`, or None.
      behind: `VariablesBehindInputs`.
    """

    def __init__(self, request: typing.Any, batch: CutBatch, behind: VariablesBehindInputs,
                 scaled_losses: typing.Any, trained: dict):
        """`trained` is as of `Roles`."""
        self.scaled_losses, self.behind = scaled_losses, behind
        self._request, self._batch, self._trained = request, batch, trained
        self._own = {each.name: OwnComputeGradients(each.optimizer, trained[each.name], request)
                     for each in request.training.objectives
                     if has_own_compute_gradients(each.optimizer)}

    def differentiate(self, recorded: typing.Any, losses: Losses, number: int, scale: typing.Any,
                      taken: typing.Sequence = ()) -> Differentiated:
        """Takes the gradients of the recorded losses of part `number` times `scale`, a float or
        scalar: `Differentiated`. The step runs `taken` tensors and operations besides the model
        function's results."""
        request, batch, part = self._request, self._batch, self._request.split.parts[number]
        graph, output, forward = tf.get_default_graph(), recorded.output, recorded.operations
        outer = graph.get_name_scope()
        root, start = outer + '/' if outer else '', len(graph.get_operations())
        with tf.device(TowerDevice(part.device)):
            found = [self._of_objective(number, each, losses.data_loss, scale)
                     for each in request.training.objectives]
        gradients, of_shard = [request.training.objectives.shaped(each[place] for each in found)
                               for place in range(2)]
        by_loss = [operations for _, _, operations in found]
        backward = sum(by_loss, [])
        if recorded.imported is not None:
            recorded.imported.redirect(backward)
        keep_with_tower(backward, {op.name for op in forward + backward} - recorded.owned,
                        part.device)
        # Only now, since a recomputation in the backward pass has to draw the same numbers.
        fetches = fetches_of(output) + list(taken) + recorded.updates + tensors_of(
            all_pairs(gradients))
        keys = _give_seeds(request, forward, backward, fetches, number)
        with graph_walk.Recording(graph) as again, tf.device(TowerDevice(part.device)):
            recomputed = [rewrite(request.memory.recompute, forward, operations, root)
                          for operations in by_loss]
        operations = [op for op in forward if op.name not in recorded.owned]
        operations += list(losses.operations) + graph.get_operations()[start:]
        backward = frozenset(op.name for op in backward + again.operations)
        tower = Tower(
            index=part.tower, micro_batch=part.micro_batch, device=part.device, name_scope=root,
            inputs=batch.inputs[number], size=batch.sizes[number], loss=output.loss,
            predictions=output.predictions, metrics=output.metrics, gradients=gradients,
            of_shard=of_shard, updates=recorded.updates, variables=recorded.variables,
            data_loss=losses.data_loss,
            forward=frozenset(op.name for op in operations) - backward, backward=backward)
        return Differentiated(tower, operations, recomputed, keys)

    def pairs_of_optimizer(self, objective: typing.Any, loss: tf.Tensor, combined: list) -> list:
        """The pairs that the objective's optimizer makes of the combined gradients. A variable
        without a gradient has a pair with None, since a program may go by their places."""
        if objective.name in self._own:
            return self._own[objective.name].pairs(loss, combined)
        rest = collections.OrderedDict((pair[1].op.name, pair) for pair in combined)
        return [rest.pop(variable.op.name, (None, variable))
                for variable in self._trained[objective.name]] + list(rest.values())

    def _of_objective(self, number, objective, data_losses, scale):
        """The pairs of one objective, the gradients of tensors of the shard, and the operations
        that were made for both."""
        request, scaled_losses, own = self._request, self.scaled_losses, self._own.get(
            objective.name)
        loss = data_loss = request.training.objectives.of(objective, data_losses)
        shard = self.behind.shard_tensors(self._batch.inputs[number])
        with graph_walk.Recording(tf.get_default_graph()) as backward:
            if isinstance(scale, tf.Tensor):
                loss = loss * tf.cast(scale, loss.dtype)
            elif scale != 1.:  # not by way of tf.cast, which would round a float to float32
                loss = loss * scale
            if request.split.accumulate > 1:
                loss = loss * _one_when_there(data_loss)
            if scaled_losses is not None:
                loss = scaled_losses.scaled(loss)
            if own is not None:
                loss = loss * tf.cast(own.factor, loss.dtype)
            is_called_later = own is not None or has_own_minimize(objective.optimizer)
            pairs = computed_pairs(_PLAIN if is_called_later else objective.optimizer, loss,
                                   self._trained[objective.name])
            of_shard = list(zip(tf.gradients(loss, list(shard)), shard)) if shard else []
            # With a scaled loss, a gradient that is not finite skips the step: see `reduce.update`.
            if scaled_losses is not None:
                pairs, of_shard = map(scaled_losses.unscaled, (pairs, of_shard))
            elif request.numerics.check_numerics:
                pairs = checked_gradients(pairs, data_loss, number, request.split.accumulate)
        place_backward(backward.operations, data_loss, request.split.parts[number].device)
        keep_stacks_with_loops(backward.operations)
        return pairs, [gradient for gradient, _ in of_shard], backward.operations


def _one_when_there(loss):
    """1, in the loss' dtype, as soon as the loss is there.

    Else the first gradients of a micro-batch are constants where shapes are static: those of a mean
    over images have the images' size. TensorFlow folds them (on CPUs, up to 10 MB each), and keeps
    the constants of all micro-batches from the beginning of a session to its end.
    """
    one = tf.ones([], loss.dtype)
    return tf.stop_gradient(tf.where(tf.is_nan(loss), one, one))


def _give_seeds(request, forward, backward, fetches, number):
    """Gives random ops seeds of the step, or of the tower: `Differentiated.random_keys`."""
    is_copied, keys = request.parts_a_call > 1, {}
    if request.random_step is None and not is_copied and not request.split.parts_before:
        return keys
    graph, number = tf.get_default_graph(), number + request.split.parts_before
    if request.random_step is not None:
        check_draws_nothing(backward)
        keys = make_stateless(forward, fetches, request.random_step, graph.seed, number)
    keys.update(give_own_seeds(forward + backward, number, graph.seed, request.random_step))
    if number and not is_copied:  # else copies are made, from the seeds as they are
        give_seeds_of_tower(forward + backward, fetches, number)
    return keys
