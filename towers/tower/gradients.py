"""The backward pass of tower 0: a tower with the gradients of its losses, as a value."""

import collections

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import GradientError, InvalidArgumentError, checked_gradients
from towers.graph import graph_walk
from towers.placement.stages import keep_stacks_with_loops, place_backward
from towers.placement.tower_device import TowerDevice, keep_with_tower
from towers.placement.variable_device import only_device
from towers.recompute.rewrite import rewrite
from towers.tower.objectives import all_pairs, tensors_of
from towers.tower.optimizer_gradients import computed, has_own, has_own_minimize, own_pairs
from towers.tower.outputs import fetches_of
from towers.tower.stateless_random import (check_draws_nothing, give_own_seeds,
                                           give_seeds_of_tower, make_stateless)
from towers.tower.tower import Tower


class Differentiated(collections.namedtuple('Differentiated', [
        'tower', 'operations', 'recomputed', 'random_keys'])):
    """A tower, forward and backward.

    Attributes:
      tower: `Tower`.
      operations: list of all operations that were made for the tower, without those of variables.
      recomputed: list of `Recomputed`, one for each loss; or [].
      random_keys: {name of a constant that holds a seed: name of the random op}.
    """
    __slots__ = ()


def differentiate(recorded, losses, gradients_of, request, shards, number, scale, taken=()):
    """Takes the gradients of the recorded loss: `Differentiated`.

    Args:
      gradients_of: `TowerGradients`.
      number: of the part: 0, but for the recipe's calls after the first.
      scale: the factor of the loss in the combined gradient: a float, or a scalar.
      taken: what a step runs besides what the model function returned.
    """
    graph, output, device = tf.get_default_graph(), recorded.output, request.parts[number].device
    outer = graph.get_name_scope()
    root = outer + '/' if outer else ''
    gradients, of_shard, by_loss, recomputed = [], [], [], []
    start = len(graph.get_operations())
    if request.objectives:
        with tf.device(TowerDevice(device)):
            gradients, of_shard, by_loss = gradients_of.of_tower(
                number, losses.data_loss, scale, shards.inputs[number])
    backward = sum(by_loss, [])
    inside = {op.name for op in recorded.operations + backward}
    keep_with_tower(backward, inside - recorded.owned, device)
    # Only now, since a recomputation in the backward pass has to draw what was drawn before.
    fetches = fetches_of(output) + list(taken) + recorded.updates + tensors_of(all_pairs(gradients))
    keys = _give_seeds(request, recorded.operations, backward, fetches, number)
    with graph_walk.Recording(graph) as again:
        if request.objectives:
            with tf.device(TowerDevice(device)):
                recomputed = [rewrite(request.recompute, recorded.operations, operations, root)
                              for operations in by_loss]
    operations = [op for op in recorded.operations if op.name not in recorded.owned]
    operations += list(losses.operations) + graph.get_operations()[start:]
    backward = frozenset(op.name for op in backward + again.operations)
    part = request.parts[number]
    tower = Tower(
        index=part.tower, micro_batch=part.micro_batch, device=device, name_scope=root,
        inputs=shards.inputs[number], size=shards.sizes[number], loss=output.loss,
        predictions=output.predictions, metrics=output.metrics, gradients=gradients,
        of_shard=of_shard, updates=recorded.updates, variables=recorded.variables,
        data_loss=losses.data_loss,
        forward=frozenset(op.name for op in operations) - backward, backward=backward)
    return Differentiated(tower, operations, recomputed, keys)


def _give_seeds(request, forward, backward, fetches, number):
    """Gives random ops seeds of the step, or of the tower: `Differentiated.random_keys`."""
    is_copied, keys = request.parts_a_call > 1, {}
    if request.random_step is None and not is_copied and not request.parts_before:
        return keys
    graph, number = tf.get_default_graph(), number + request.parts_before
    if request.random_step is not None:
        check_draws_nothing(backward)
        keys = make_stateless(forward, fetches, request.random_step, graph.seed, number)
    keys.update(give_own_seeds(forward + backward, number, graph.seed, request.random_step))
    if number and not is_copied:  # else copies are made, from the seeds as they are
        give_seeds_of_tower(forward + backward, fetches, number, graph)
    return keys


_PLAIN = tf.train.GradientDescentOptimizer(1.)
"""Takes plain gradients, in the place of an optimizer with a `compute_gradients` of its own."""


class TowerGradients:
    """Takes the gradients of a tower's losses.

    Attributes:
      trainable: the variables that any loss is differentiated by.
      scaled_losses: `ScaledLosses` to take gradients with; or None.
    """

    def __init__(self, request, scaled_losses, behind):
        """
        Raises:
          GradientError: a loss trains no variable.
          InvalidArgumentError: `var_list` has something else than trainable variables.
        """
        self.scaled_losses = scaled_losses
        self._request, self._behind, self._graph = request, behind, tf.get_default_graph()
        self._variables_of = self._chosen_variables()  # by the objective's name
        self._factors = {}  # of losses whose optimizers have a compute_gradients of their own
        for each in request.objectives:
            if has_own(each.optimizer):
                with tf.control_dependencies(None), only_device(request.placement.main):
                    # float64 holds a factor of any other type.
                    self._factors[each.name] = tf.constant(1., tf.float64, name='loss_factor')
        self.trainable = list({variable.op.name: variable for chosen in self._variables_of.values()
                               for variable in chosen}.values())

    def _chosen_variables(self):
        """{name of an objective: the variables that its loss trains}."""
        found, candidates = {}, tf.trainable_variables()
        for objective in self._request.objectives:
            named = '' if objective.name is None else ' for %r' % objective.name
            chosen = candidates if objective.var_list is None else self._chosen(
                objective.var_list, 'var_list' + named, candidates)
            if not chosen:
                raise GradientError(
                    'there is no trainable variable%s%s: %s' % (
                        named, ' left by var_list' if objective.var_list is not None else '',
                        'the choices were %s.' % ', '.join(v.op.name for v in candidates[:5])
                        if candidates else 'the model function made none. Pass optimizer=None to '
                        'evaluate it.'))
            found[objective.name] = chosen
        return found

    def _chosen(self, wanted, called, candidates):
        chosen = wanted(list(candidates)) if callable(wanted) else wanted
        try:
            chosen = [compat.keras_variable_value(variable) for variable in chosen]
        except TypeError:
            raise InvalidArgumentError('%s returned %r: expected a list of variables.'
                                       % (called, chosen)) from None
        for place, variable in enumerate(chosen):
            if not isinstance(variable, compat.VARIABLE_TYPES):
                raise InvalidArgumentError('%s holds %r of type %s: expected variables.'
                                           % (called, variable, type(variable).__name__))
            if variable.graph is not self._graph:
                raise InvalidArgumentError('%s holds %r, which belongs to another graph.'
                                           % (called, variable.op.name))
            if any(variable is each for each in chosen[:place]):
                raise InvalidArgumentError('%s holds %r twice: expected each variable once.'
                                           % (called, variable.op.name))
        return chosen

    def of_tower(self, number, data_losses, scale, inputs):
        """Takes the gradients of a tower's losses, in its scope, on its device.

        Args:
          scale: the factor of the loss: a float, or a scalar.
          inputs: the tower's shard.

        Returns:
          `(gradients, of_shard, operations)`: the former two as of a `Tower`; and a list of the
          operations that were made for each loss.
        """
        shard = self._behind.shard_tensors(inputs)
        found = [self._of_objective(number, each, data_losses, scale, shard)
                 for each in self._request.objectives]
        shaped = self._request.objectives.shaped
        return (shaped(pairs for pairs, _, _ in found), shaped(of for _, of, _ in found),
                [operations for _, _, operations in found])

    def made_by_optimizer(self, objective, loss, combined):
        """What the objective's optimizer makes of the combined gradients, see `own_pairs`.

        These gradients themselves where its `compute_gradients` is the usual one: as that returns
        them, with a pair of None for each variable that has no gradient. A program may go by their
        places.
        """
        variables = self._variables_of[objective.name]
        if objective.name in self._factors:
            return own_pairs(objective, loss, combined, variables, self._factors[objective.name],
                             self._request)
        rest = collections.OrderedDict((pair[1].op.name, pair) for pair in combined)
        return [rest.pop(variable.op.name, (None, variable)) for variable in variables] + list(
            rest.values())

    def _of_objective(self, number, objective, data_losses, scale, shard):
        """The pairs of one objective, and the operations that were made for them."""
        data_loss = self._request.objectives.of(objective, data_losses)
        with graph_walk.Recording(self._graph) as backward:
            pairs, of_shard = self._pairs(objective, data_loss, scale, shard)
            # With a scaled loss, a gradient that is not finite skips the step: see `reduce.update`.
            if self._request.numerics.check_numerics and self.scaled_losses is None:
                pairs = checked_gradients(pairs, data_loss, number, self._request.accumulate)
        place_backward(backward.operations, data_loss, self._request.parts[number].device)
        keep_stacks_with_loops(backward.operations)
        return pairs, of_shard, backward.operations

    def _pairs(self, objective, data_loss, scale, shard):
        if isinstance(scale, tf.Tensor):
            data_loss = data_loss * tf.cast(scale, data_loss.dtype)
        elif scale != 1.:  # not by way of tf.cast, which would round a float to float32
            data_loss = data_loss * scale
        if self.scaled_losses is not None:
            data_loss = self.scaled_losses.scaled(data_loss)
        optimizer = objective.optimizer
        if objective.name in self._factors:
            data_loss = data_loss * tf.cast(self._factors[objective.name], data_loss.dtype)
        if objective.name in self._factors or has_own_minimize(optimizer):  # called later
            optimizer = _PLAIN
        pairs = computed(optimizer, data_loss, self._variables_of[objective.name])
        of_shard = list(zip(tf.gradients(data_loss, list(shard)), shard)) if shard else []
        if self.scaled_losses is not None:
            pairs, of_shard = map(self.scaled_losses.unscaled, (pairs, of_shard))
        return pairs, [gradient for gradient, _ in of_shard]
