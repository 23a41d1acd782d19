"""The backward pass of a tower: a tower with the gradients of its losses, as a value."""

import collections
import contextlib
import typing

import tensorflow.compat.v1 as tf

from towers.capture.record import Recorded
from towers.errors import ModelFunctionError
from towers.gradients.gradient_pairs import gradients_of, tensors_of
from towers.gradients.optimizer_methods import OwnComputeGradients, computed_pairs
from towers.gradients.stateless_random import (
    Keys,
    check_draws_nothing,
    give_own_seeds,
    give_seeds_of_tower,
    make_stateless,
)
from towers.gradients.tower import Tower
from towers.graph.graph_walk import Recording, names_of, without_names
from towers.model.losses import Losses
from towers.model.outputs import fetches_of
from towers.model.request import Request
from towers.nonfinite import checked_gradients
from towers.optimizers import has_own_compute_gradients, has_own_minimize
from towers.placement.loop_state import keep_stacks_with_loops
from towers.placement.stages import place_backward
from towers.placement.tower_device import TowerDevice, keep_with_tower
from towers.recompute.rewrite import Recomputed, rewrite
from towers.shards.batch_inputs import UpstreamVariables
from towers.shards.cut_batch import CutBatch

_TAKES_PLAIN_GRADIENTS = tf.train.GradientDescentOptimizer(1.)
"""Takes a tower's gradients in the place of an optimizer whose own method is called later. Its
learning rate does not matter, since it updates nothing."""


class Differentiated(typing.NamedTuple):
    """A tower with its gradients, and what is needed to copy it.

    Attributes:
      tower: the tower.
      operations: all operations that were made for the tower, but for its variables' operations.
      recomputed: for each loss, the operations that its backward pass recomputes.
      random_keys: the constants in the seeds of its random operations, which copies change.
    """
    tower: Tower
    operations: typing.List[tf.Operation]
    recomputed: typing.List[Recomputed]
    random_keys: Keys


class _ObjectiveGradients(typing.NamedTuple):
    """The gradients of one loss.

    Attributes:
      pairs: `(gradient, variable)` of each trained variable.
      shard_gradients: the gradients of the shard's tensors that are computed from trained
        variables.
      operations: all operations that were made for `pairs` and `shard_gradients`.
    """
    pairs: typing.List[tuple]
    shard_gradients: typing.List[tf.Tensor]
    operations: typing.List[tf.Operation]


class _TowerResults(typing.NamedTuple):
    """The gradients of a tower, and the names of its operations.

    Attributes:
      pairs, shard_gradients: as in `_ObjectiveGradients`; with several losses each is a dict by the
        name of the loss.
      forward: names of the operations of the forward pass.
      backward: names of the operations of the backward pass.
    """
    pairs: typing.Any
    shard_gradients: typing.Any
    forward: typing.FrozenSet[str]
    backward: typing.FrozenSet[str]


class TowerGradients:
    """Differentiates the losses of towers.

    Attributes:
      scaled_losses: `ScaledLosses`, or None.
      upstream: the trained variables upstream of the inputs.
    """

    def __init__(self, request: Request, batch: CutBatch, upstream: UpstreamVariables,
                 scaled_losses: typing.Any,
                 trained: typing.Dict[typing.Optional[str], list]):
        """
        Args:
          request: `Request` of the build.
          batch: the shards.
          upstream: the trained variables upstream of the inputs.
          scaled_losses: `ScaledLosses`, or None.
          trained: {name of an objective: the variables that it trains}.
        """
        self.scaled_losses = scaled_losses
        self.upstream = upstream
        self._request = request
        self._batch = batch
        self._trained = trained
        # {name of an objective: its optimizer's own `compute_gradients`}
        self._own_methods: typing.Dict[typing.Optional[str], OwnComputeGradients] = {}
        for objective in request.training.objectives:
            if has_own_compute_gradients(objective.optimizer):
                self._own_methods[objective.name] = OwnComputeGradients(
                    objective.optimizer, trained[objective.name], request)

    def differentiate(self, recorded: Recorded, losses: Losses, index: int, scale: typing.Any,
                      other_fetches: typing.Sequence = ()) -> Differentiated:
        """Takes the gradients of the recorded losses of one part of the batch.

        Args:
          recorded: the forward pass of this part.
          losses: the losses to differentiate.
          index: the index of the part among the parts of this machine.
          scale: the factor of the losses: a float, or a scalar tensor.
          other_fetches: tensors and operations that a step runs besides the results of the model
            function.

        Returns:
          `Differentiated`: the tower.
        """
        request = self._request
        device = request.split.parts[index].device
        graph = tf.get_default_graph()
        scope = graph.get_name_scope()
        root = scope + '/' if scope else ''
        forward = recorded.operations
        with Recording(graph) as made:
            by_objective = self._differentiate_objectives(losses, index, device, scale)
            backward = self._backward_operations(by_objective, recorded, device)
            fetches = fetches_of(recorded.output) + list(other_fetches) + recorded.updates
            for each in by_objective:
                fetches += tensors_of(each.pairs)
            # The seeds are given after the backward pass is made: random operations in it that draw
            # the same numbers again must get the same seeds. They are given before the backward
            # pass is rewritten, since recomputation copies random operations with their seeds.
            keys = _give_seeds(request, forward, backward, fetches, index)
            with Recording(graph) as recomputation, tf.device(TowerDevice(device)):
                recomputed = [rewrite(request.memory.recompute, forward, each.operations, root)
                              for each in by_objective]
        own_forward = without_names(forward, recorded.owned)
        operations = own_forward + losses.operations + made.operations
        results = self._results(by_objective, operations, backward + recomputation.operations)
        tower = self._tower(recorded, losses, index, root, results)
        return Differentiated(tower, operations, recomputed, keys)

    def _results(self, by_objective: typing.List[_ObjectiveGradients],
                 operations: typing.Sequence[tf.Operation],
                 backward: typing.Sequence[tf.Operation]) -> _TowerResults:
        """The gradients of a tower, and the names of its operations.

        Args:
          by_objective: the gradients of each loss.
          operations: all operations of the tower. An operation that is not in `backward` counts as
            the forward pass, such as the loss times its weight, or a new seed.
          backward: the operations of the backward pass, with the recomputed operations.
        """
        objectives = self._request.training.objectives
        backward_names = frozenset(names_of(backward))
        return _TowerResults(
            pairs=objectives.shaped(each.pairs for each in by_objective),
            shard_gradients=objectives.shaped(each.shard_gradients for each in by_objective),
            forward=frozenset(names_of(operations)) - backward_names, backward=backward_names)

    def _backward_operations(self, by_objective: typing.List[_ObjectiveGradients],
                             recorded: Recorded, device: str) -> typing.List[tf.Operation]:
        """The operations of the backward pass, which are kept within their tower.

        Args:
          by_objective: the gradients of each loss.
          recorded: the forward pass.
          device: the device of the tower.
        """
        backward: typing.List[tf.Operation] = []
        for each in by_objective:
            backward += each.operations
        if recorded.imported is not None:
            # The forward pass is an import. A gradient function, such as the closure of a
            # `tf.custom_gradient`, may take tensors of the original: the import's replace them.
            recorded.imported.redirect(backward)
        names_of_tower = names_of(recorded.operations + backward) - recorded.owned
        # TensorFlow colocates some gradients with a variable, which may be on another device.
        keep_with_tower(backward, names_of_tower, device)
        return backward

    def _differentiate_objectives(self, losses: Losses, index: int, device: str,
                                  scale: typing.Any) -> typing.List[_ObjectiveGradients]:
        """List of the gradients of each loss, in the order of the objectives.

        Args:
          losses: the losses to differentiate.
          index: the index of the part of the batch among the parts of this machine.
          device: the device of the part.
          scale: the factor of the losses: a float, or a scalar tensor.
        """
        with tf.device(TowerDevice(device)):
            return [self._differentiate_objective(index, objective, losses.data_loss, scale)
                    for objective in self._request.training.objectives]

    def _tower(self, recorded: Recorded, losses: Losses, index: int, root: str,
               results: _TowerResults) -> Tower:
        """The `Tower` of a part of the batch.

        Args:
          recorded: the forward pass of this part.
          losses: the losses that were differentiated.
          index: the index of the part among the parts of this machine.
          root: the name scope of the tower, with a slash at its end; or ''.
          results: the gradients of the part, and the names of its operations.
        """
        part = self._request.split.parts[index]
        return Tower(
            index=part.tower, micro_batch=part.micro_batch, device=part.device, name_scope=root,
            inputs=self._batch.inputs[index], size=self._batch.sizes[index],
            loss=recorded.output.loss, predictions=recorded.output.predictions,
            metrics=recorded.output.metrics, updates=recorded.updates,
            variables=recorded.variables, data_loss=losses.data_loss,
            gradients=results.pairs, of_shard=results.shard_gradients,
            forward=results.forward, backward=results.backward)

    def pairs_of_optimizer(self, objective: typing.Any, loss: tf.Tensor, combined: list) -> list:
        """Makes the `(gradient, variable)` pairs that an optimizer is to apply.

        Args:
          objective: the loss's name, optimizer and variables.
          loss: the mean loss of the batch.
          combined: the combined gradients, as pairs.

        Returns:
          If the optimizer has its own `compute_gradients`, the pairs that this method makes from
          the combined gradients. Else a pair for each variable that this loss trains, in the order
          of the variables, then all other combined pairs. A variable that the loss does not depend
          on has a pair with the gradient None, so that a program finds each variable at the index
          that it expects.
        """
        if objective.name in self._own_methods:
            return self._own_methods[objective.name].pairs(loss, combined)
        pairs_left = collections.OrderedDict(
            (variable.op.name, (gradient, variable)) for gradient, variable in combined)
        pairs = []
        for variable in self._trained[objective.name]:
            pair_without_gradient = (None, variable)
            pairs.append(pairs_left.pop(variable.op.name, pair_without_gradient))
        # `pairs_left` has pairs here if an Estimator's model function calls its optimizers itself
        # (`GradientsOfModel`), and differentiates by variables that the loss does not train.
        return pairs + list(pairs_left.values())

    def _differentiate_objective(self, index: int, objective: typing.Any, data_losses: typing.Any,
                                 scale: typing.Any) -> _ObjectiveGradients:
        """Takes the gradients of the loss of one objective.

        Args:
          index: the index of the part of the batch among the parts of this machine.
          objective: the loss's name, optimizer and variables.
          data_losses: one loss, or a dict by the name of the objective.
          scale: the factor of the loss: a float, or a scalar tensor.
        """
        request = self._request
        data_loss = request.training.objectives.entry_of(objective, data_losses)
        # The tensors of the shard that are computed from trained variables.
        inputs_from_variables = self.upstream.shard_tensors(self._batch.inputs[index])
        shard_pairs: typing.List[tuple] = []
        with Recording(tf.get_default_graph()) as made:
            loss = self._scaled(data_loss, objective, scale)
            optimizer = self._optimizer_of_tower(objective)
            with _naming_unbounded_loops():
                pairs = computed_pairs(optimizer, loss, self._trained[objective.name])
            if inputs_from_variables:
                gradients = tf.gradients(loss, inputs_from_variables)
                shard_pairs = list(zip(gradients, inputs_from_variables))
            # With a scaled loss, a gradient that is not finite is no error: the step is skipped.
            if self.scaled_losses is not None:
                pairs = self.scaled_losses.unscaled(pairs)
                shard_pairs = self.scaled_losses.unscaled(shard_pairs)
            elif request.numerics.check_numerics:
                pairs = checked_gradients(pairs, data_loss, index, request.split.accumulate)
        place_backward(made.operations, data_loss, request.split.parts[index].device)
        # TensorFlow puts the stack of a loop on the device of a variable, if the stack keeps the
        # variable's values: the stack is moved to the device of the loop.
        keep_stacks_with_loops(made.operations)
        return _ObjectiveGradients(pairs, gradients_of(shard_pairs), made.operations)

    def _optimizer_of_tower(self, objective: typing.Any) -> tf.train.Optimizer:
        """The optimizer that takes the gradients of a loss in a tower: the optimizer of the
        objective, unless it has its own `compute_gradients` or `minimize`. Such a method is called
        later, once, for the combined gradients; another optimizer takes the tower's gradients."""
        optimizer = objective.optimizer
        has_own_method = objective.name in self._own_methods or has_own_minimize(optimizer)
        return _TAKES_PLAIN_GRADIENTS if has_own_method else optimizer

    def _scaled(self, loss: tf.Tensor, objective: typing.Any, scale: typing.Any) -> tf.Tensor:
        """The loss times all factors that its gradients are to have: the weight of the part; with
        micro-batches, a 1 that is computed from the loss (`_one_after`); the loss scale, for half
        precision; and the factor of an optimizer's own `compute_gradients`.

        Args:
          loss: the loss of a part of the batch.
          objective: the loss's name, optimizer and variables.
          scale: the weight of the part: a float, or a scalar tensor.
        """
        data_loss = loss
        if isinstance(scale, tf.Tensor):
            loss = loss * tf.cast(scale, loss.dtype)
        elif scale != 1.:  # without tf.cast, which would round a Python float to float32
            loss = loss * scale
        if self._request.split.accumulate > 1:
            loss = loss * _one_after(data_loss)
        if self.scaled_losses is not None:
            loss = self.scaled_losses.scaled(loss)
        if objective.name in self._own_methods:
            loss = loss * tf.cast(self._own_methods[objective.name].factor, loss.dtype)
        return loss


def _one_after(loss: tf.Tensor) -> tf.Tensor:
    """Makes a scalar 1 of the loss's dtype that is computed from the loss.

    The loss is multiplied by this 1, so that all gradients are computed from the loss. Without it,
    the first gradients of a backward pass would be constants where shapes are static: the gradient
    of a mean over images is a constant of the images' size. TensorFlow would compute such constants
    before the step (on CPUs, up to 10 MB each), and keep the constants of all micro-batches as long
    as the session lives.
    """
    one = tf.ones([], loss.dtype)
    one_by_choice = tf.where(tf.is_nan(loss), one, one)  # TensorFlow does not see that it is 1
    return tf.stop_gradient(one_by_choice)  # the gradient of the loss is not taken through it


@contextlib.contextmanager
def _naming_unbounded_loops() -> typing.Iterator[None]:
    """A context in which gradients are taken. It raises a `ModelFunctionError` where TensorFlow
    cannot differentiate a loop (v1) that XLA is to compile, since the loop may have any number of
    iterations: the values that it keeps for the backward pass need a static size."""
    try:
        yield
    except ValueError as error:
        if 'inside XLA while_loop' not in str(error):
            raise
        raise ModelFunctionError(
            'XLA is to compile a tf.while_loop without maximum_iterations, and TensorFlow cannot '
            'differentiate it (%s): pass maximum_iterations= to it, as tf.nn.dynamic_rnn does, or '
            'build without Numerics(xla=True).' % str(error).split('\n', 1)[0]) from error


def _give_seeds(request: Request, forward: list, backward: list, fetches: list,
                index: int) -> Keys:
    """Gives random operations seeds that depend on the part of the batch and, with
    `stateless_random`, on the step.

    A tower that is copied keeps the seeds in the attributes of its operations: the copies compute
    their seeds from these.

    Args:
      request: `Request` of the build.
      forward: the operations of the forward pass of one part of the batch.
      backward: the operations of its backward pass.
      fetches: what a step fetches of the part.
      index: the index of the part among the parts of this machine.

    Returns:
      The `Keys` of the new seeds.
    """
    step = request.random_step  # None without `stateless_random`
    is_copied = request.num_parts_of_call > 1  # the other parts get copies of this part
    is_of_first_machine = request.split.parts_before == 0
    # With copies='reuse', the model function is called for each tower. On one machine the program's
    # seeds then stay, as in a hand-written loop that calls the model function for each tower.
    if step is None and not is_copied and is_of_first_machine:
        return {}
    graph_seed = tf.get_default_graph().seed
    part = request.split.parts_before + index  # among the parts of all machines
    keys = {}
    if step is not None:
        check_draws_nothing(backward)  # since the twins are made for the forward pass alone
        keys = make_stateless(forward, fetches, step, graph_seed, part)
    keys.update(give_own_seeds(forward + backward, part, graph_seed, step))
    draws_as_program = part == 0
    if not draws_as_program and not is_copied:
        give_seeds_of_tower(forward + backward, fetches, part)
    return keys
