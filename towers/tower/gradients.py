"""The backward pass of tower 0: a tower with the gradients of its losses, as a value."""

import collections
import re

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import GradientError
from towers.graph import graph_walk
from towers.nonfinite import checked_gradients
from towers.placement.stages import keep_stacks_with_loops, place_backward
from towers.placement.tower_device import TowerDevice, keep_with_tower
from towers.placement.variable_device import only_device
from towers.recompute.rewrite import rewrite
from towers.tower.objectives import (GradientsOfModel, all_pairs, checked_variables, computes_with,
                                     first_taken, has_own_minimize, listed_pairs,
                                     loss_with_gradients, tensors_of, times)
from towers.tower.outputs import fetches_of
from towers.tower.stateless_random import (check_draws_nothing, give_own_seeds,
                                           give_seeds_of_tower, make_stateless)
from towers.tower.tower import Tower


_OF_GATE = re.compile(r'tuple/control_dependency(_\d+)?$')


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


def differentiate(recorded, losses, gradients_of, request, batch, number, scale, taken=()):
    """Takes the gradients of the recorded loss of part `number` times `scale`, a float or scalar:
    `Differentiated`. The step runs `taken` tensors and operations besides the model function's
    results."""
    graph, output, device = tf.get_default_graph(), recorded.output, request.parts[number].device
    outer = graph.get_name_scope()
    root = outer + '/' if outer else ''
    gradients, of_shard, by_loss, recomputed = [], [], [], []
    start = len(graph.get_operations())
    if request.objectives:
        with tf.device(TowerDevice(device)):
            gradients, of_shard, by_loss = gradients_of.of_tower(
                number, losses.data_loss, scale, batch.inputs[number])
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
        inputs=batch.inputs[number], size=batch.sizes[number], loss=output.loss,
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


def trained_variables(objectives):
    """{name of an objective: the variables that its loss trains}; `GradientError` for none."""
    found, candidates = {}, tf.trainable_variables()
    for objective in objectives:
        named, wanted = '' if objective.name is None else ' for %r' % (
            objective.name), objective.var_list
        chosen = candidates if wanted is None else wanted if not callable(wanted) else (
            checked_variables(wanted(list(candidates)), 'var_list' + named))
        if not chosen:
            raise GradientError(
                'there is no trainable variable%s%s: %s' % (
                    named, '' if wanted is None else ' left by var_list',
                    'the choices were %s.' % ', '.join(v.op.name for v in candidates[:5])
                    if candidates else 'the model function made none. Pass optimizer=None to '
                    'evaluate it.'))
        found[objective.name] = chosen
    return found


class TowerGradients:
    """Takes the gradients of a tower's losses; `scaled_losses` are `ScaledLosses`, or None."""

    def __init__(self, request, scaled_losses, behind, trained):
        self.scaled_losses, self._request, self._behind = scaled_losses, request, behind
        self._trained = trained  # see `Roles`
        self._factors = {}  # of losses whose optimizers have a compute_gradients of their own
        for each in request.objectives:
            if _has_own(each.optimizer):
                with tf.control_dependencies(None), only_device(request.placement.main):
                    # float64 holds a factor of any other type.
                    self._factors[each.name] = tf.constant(1., tf.float64, name='loss_factor')

    def of_tower(self, number, data_losses, scale, inputs):
        """`(gradients, of_shard, [operations of each loss])` of a tower's losses times `scale`."""
        shard = self._behind.shard_tensors(inputs)
        found = [self._of_objective(number, each, data_losses, scale, shard)
                 for each in self._request.objectives]
        shaped = self._request.objectives.shaped
        return (shaped(pairs for pairs, _, _ in found), shaped(of for _, of, _ in found),
                [operations for _, _, operations in found])

    def made_by_optimizer(self, objective, loss, combined):
        """What the objective's optimizer makes of the combined gradients: a pair for each variable,
        with None for one without a gradient, since a program may go by their places."""
        variables = self._trained[objective.name]
        if objective.name in self._factors:
            return _own_pairs(objective, loss, combined, variables,
                              self._factors[objective.name], self._request)
        rest = collections.OrderedDict((pair[1].op.name, pair) for pair in combined)
        return [rest.pop(variable.op.name, (None, variable)) for variable in variables] + list(
            rest.values())

    def _of_objective(self, number, objective, data_losses, scale, shard):
        """The pairs of one objective, and the operations that were made for them."""
        data_loss = self._request.objectives.of(objective, data_losses)
        with graph_walk.Recording(tf.get_default_graph()) as backward:
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
        if objective.name in self._factors:
            data_loss = data_loss * tf.cast(self._factors[objective.name], data_loss.dtype)
        is_called_later = objective.name in self._factors or has_own_minimize(objective.optimizer)
        pairs = _computed(_PLAIN if is_called_later else objective.optimizer, data_loss,
                          self._trained[objective.name])
        of_shard = list(zip(tf.gradients(data_loss, list(shard)), shard)) if shard else []
        if self.scaled_losses is not None:
            pairs, of_shard = map(self.scaled_losses.unscaled, (pairs, of_shard))
        return pairs, [gradient for gradient, _ in of_shard]


def _has_own(optimizer):
    """Whether the towers get their gradients by an optimizer's own `compute_gradients`."""
    if isinstance(optimizer, GradientsOfModel) or has_own_minimize(optimizer):
        return False  # the model function's own, in each call; or `minimize` calls it
    return getattr(optimizer.compute_gradients, '__func__',
                   None) is not tf.train.Optimizer.compute_gradients


def _own_pairs(objective, loss, combined, variables, factor, request):
    """The pairs that an optimizer's own `compute_gradients` makes of the combined gradients. `loss`
    is the mean over this machine's batch; dL/dS takes the place of the constant `factor` in the
    towers' losses."""
    called = 'compute_gradients of ' + type(objective.optimizer).__name__
    reduction = request.factor  # the towers' losses have it already

    def checked(of_loss, factors):
        if of_loss.graph is not loss.graph or compat.in_control_flow(of_loss.op):
            raise GradientError(called + ' takes the gradient of its loss within a branch or a '
                                'loop: take it outside.')
        numbers = [tf.get_static_value(each) for each in [of_loss] + factors]
        if factors and (None in numbers or len(set(map(float, numbers))) > 1):
            raise GradientError(
                called + ' takes gradients of its loss with several factors, by groups of '
                'variables say, and the towers have one backward pass: take them with one factor, '
                'and multiply the gradients.')
        return [gradient for gradient, _ in combined]
    with only_device(request.placement.main):
        with tf.control_dependencies(None):
            surrogate, factors = loss_with_gradients(loss, combined, checked)
        with graph_walk.Recording(loss.graph) as made:
            pairs = _computed(objective.optimizer, surrogate, variables)
            found = tf.cast(first_taken(factors, called), tf.float64) / reduction
        _free_of_gates(found, {op.name for op in made.operations})
        pairs = [(None if gradient is None else times(gradient, reduction), variable)
                 for gradient, variable in pairs]
    if not request.has_whole_batch and computes_with([found], surrogate, combined):
        raise GradientError(
            "%s multiplies its loss by what depends on the value of the loss, which is of one "
            "worker's examples: let UPDATE_OPS write it to a variable, and read the variable."
            % called)
    if request.accumulate > 1 and surrogate.op in graph_walk.step_operations([found]):
        raise GradientError(
            '%s multiplies its loss by what depends on the value of the loss, which is known when '
            'the last micro-batch is done: train without accumulate= and micro_batches=.' % called)
    compat.replace_tensor(surrogate, loss)
    compat.replace_tensor(factor, found)
    return pairs


def _computed(optimizer, loss, variables):
    """What an optimizer's `compute_gradients` returns, as a list of pairs; else `GradientError`."""
    returned = optimizer.compute_gradients(loss, var_list=variables)
    pairs = listed_pairs(returned)
    if not pairs or any(isinstance(variable, (tf.Tensor, tf.IndexedSlices))
                        for _, variable in pairs):
        raise GradientError('compute_gradients of %s returned %.200r: expected a list of '
                            '(gradient, variable) pairs, one for each of its var_list.' % (
                                type(optimizer).__name__, returned))
    return pairs


def _free_of_gates(factor, made):
    """Frees what a factor is computed by from gates, else it would wait for all towers' losses."""
    for op in graph_walk.step_operations([factor]):
        if op.name in made and _OF_GATE.search(op.name):
            compat.set_control_inputs(op, [])
