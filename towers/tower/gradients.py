"""Gradients of tower 0, for each loss: chooses the variables, checks, recomputes activations."""

import collections

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import GradientError, InvalidArgumentError
from towers.graph import graph_walk
from towers.nonfinite import checked_gradients
from towers.placement.loop_state_devices import keep_stacks_with_loops
from towers.placement.stages import place_backward
from towers.placement.variable_device import only_device
from towers.recompute.rewrite import rewrite
from towers.tower.objectives import GradientsOfModel
from towers.tower.optimizer_gradients import OwnGradients, computed, has_own
from towers.tower.optimizer_minimize import has_own_minimize

_PLAIN = tf.train.GradientDescentOptimizer(1.)
"""Takes plain gradients, in the place of an optimizer with a `compute_gradients` of its own."""


class TowerGradients:
    """Takes the gradients of a tower's losses.

    Attributes:
      trainable: the variables that any loss is differentiated by.
      scaled_losses: `ScaledLosses` to take gradients with; or None.
      own: `OwnGradients`: what the optimizers make of the combined gradients themselves.
    """

    def __init__(self, request, scaled_losses, behind):
        """
        Args:
          request: `Request`.
          scaled_losses: `ScaledLosses` to take gradients with; or None.
          behind: `VariablesBehindInputs`.

        Raises:
          GradientError: a loss trains no variable.
          InvalidArgumentError: `var_list` has something else than trainable variables.
        """
        self.scaled_losses = scaled_losses
        self.own = OwnGradients([each for each in request.objectives
                                 if not has_own_minimize(each.optimizer)], request)
        self._request, self._behind, self._graph = request, behind, tf.get_default_graph()
        self._variables_of = self._chosen_variables()  # by the objective's name
        self.trainable = list({variable.op.name: variable for chosen in self._variables_of.values()
                               for variable in chosen}.values())

    def _chosen_variables(self):
        """{name of an objective: the variables that its loss trains}."""
        found = {}
        candidates = tf.trainable_variables()
        for objective in self._request.objectives:
            wanted = objective.var_list
            chosen = candidates if wanted is None else self._chosen(objective, candidates)
            if not chosen:
                raise GradientError(
                    'there is no trainable variable%s%s: %s' % (
                        '' if objective.name is None else ' for the loss %r' % objective.name,
                        ' left by var_list' if wanted is not None else '',
                        'the choices were %s.' % ', '.join(v.op.name for v in candidates[:5])
                        if candidates else 'the model function made none. Pass optimizer=None to '
                        'evaluate it.'))
            found[objective.name] = chosen
        return found

    def of_tower(self, number, data_losses, scale, inputs):
        """Takes the gradients of a tower's losses, in its scope, on its device.

        Args:
          number: the tower's number.
          data_losses: a loss, or a dict of losses by name.
          scale: the factor of the loss: a float, or a scalar.
          inputs: the tower's shard.

        Returns:
          `(gradients, of_shard, operations)`: lists of `(gradient, variable)`, one for each loss,
          shaped as the losses are; lists of the gradients of tensors of the shard behind which
          trained variables are, so, too; and a list of the operations that were made for each loss.
        """
        shard = self._behind.shard_tensors(inputs)
        found = [self._of_objective(number, each, data_losses, scale, shard)
                 for each in self._request.objectives]
        shaped = self._request.objectives.shaped
        return (shaped(pairs for pairs, _, _ in found), shaped(of for _, of, _ in found),
                [operations for _, _, operations in found])

    def with_recomputation(self, root, forward, backward, gradients):
        """`(gradients, recomputed)`: from a backward pass that recomputes what is not kept.

        Args:
          root: the name scope that the towers are built in.
          forward: list of the operations of the forward pass.
          backward: the lists of operations that `of_tower` returned.
          gradients: the gradients that `of_tower` returned.

        Returns:
          The gradients, shaped as the losses are; and a list of `Recomputed`, one for each loss.
        """
        return gradients, [rewrite(self._request.recompute, forward, operations, root)
                           for operations in backward]

    def made_by_optimizer(self, objective, loss, combined):
        """What the objective's optimizer makes of the combined gradients, see `OwnGradients.pairs`.

        These gradients themselves where its `compute_gradients` is the usual one: as that returns
        them, with a pair of None for each variable that has no gradient. A program may go by their
        places.
        """
        variables = self._variables_of[objective.name]
        if self.own.are_of(objective):
            return self.own.pairs(objective, loss, combined, variables)
        rest = collections.OrderedDict((pair[1].op.name, pair) for pair in combined)
        return [rest.pop(variable.op.name, (None, variable)) for variable in variables] + list(
            rest.values())

    def of_regularization(self, loss):
        """`[[(gradient, variable)]]` of the regularization, counted once; [] where there is none.

        Args:
          loss: scalar, or None.
        """
        if loss is None:
            return []
        factor = self._request.factor
        with only_device(self._request.placement.of_weights):
            options = dict(self._request.objectives[0].gradient_options)
            gate = options.pop('gate_gradients', tf.train.Optimizer.GATE_OP)
            gradients = tf.gradients(loss if factor == 1 else loss * factor, self.trainable,
                                     gate_gradients=gate == tf.train.Optimizer.GATE_OP, **options)
        if all(gradient is None for gradient in gradients):
            return []
        return [list(zip(gradients, self.trainable))]

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
        if self.own.are_of(objective):
            data_loss, optimizer = self.own.multiplied(objective, data_loss), _PLAIN
        elif has_own_minimize(optimizer):  # which calls its compute_gradients itself
            optimizer = _PLAIN
        pairs = computed(optimizer, data_loss, self._variables_of[objective.name],
                         objective.gradient_options)
        of_shard = list(zip(tf.gradients(data_loss, list(shard)), shard)) if shard else []
        if self.scaled_losses is not None:
            pairs, of_shard = map(self.scaled_losses.unscaled, (pairs, of_shard))
        return pairs, [gradient for gradient, _ in of_shard]

    def _chosen(self, objective, candidates):
        wanted = objective.var_list
        name = 'var_list' if objective.name is None else 'var_list for %r' % objective.name
        chosen = wanted(list(candidates)) if callable(wanted) else wanted
        try:
            chosen = [compat.keras_variable_value(variable) for variable in chosen]
        except TypeError:
            raise InvalidArgumentError('%s returned %r: expected a list of variables.'
                                       % (name, chosen)) from None
        for variable in chosen:
            if not isinstance(variable, compat.VARIABLE_TYPES):
                raise InvalidArgumentError('%s holds %r of type %s: expected variables.'
                                           % (name, variable, type(variable).__name__))
            if variable.graph is not self._graph:
                raise InvalidArgumentError('%s holds %r, which belongs to another graph.'
                                           % (name, variable.op.name))
        for variable in chosen:
            if sum(variable is each for each in chosen) > 1:
                raise InvalidArgumentError('%s holds %r twice: expected each variable once.'
                                           % (name, variable.op.name))
        return chosen


def takes_plain_gradients(objectives):
    """Whether the gradient of one term of the loss may be taken by itself, outside of the towers.

    Not for an optimizer with a `compute_gradients` of its own, whose factor of the loss the towers
    multiply with. With `GATE_GRAPH` no gradient is used before all of them
    are there. With several losses no term is taken out: it may be in more than one.
    """
    return (objectives.names is None
            and not any(each.gradient_options.get('gate_gradients') == tf.train.Optimizer.GATE_GRAPH
                        or isinstance(each.optimizer, GradientsOfModel) or has_own(each.optimizer)
                        for each in objectives))
