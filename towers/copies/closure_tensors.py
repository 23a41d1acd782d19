"""Tensors that the update takes from the model function, by a closure.

A model function may leave a tensor where `transform_gradients`, or an optimizer, finds it: in a
list, or as an attribute of the model. That tensor belongs to one tower. If it is the tower's loss,
the update gets the mean over the batch in its place. Any other tensor that depends on the tower's
examples is refused; one that does not is the same in all towers.

Words of other modules used here:

    `TowerSet.has_one_shard`      one tower computes on all examples of a step
    `Request.has_whole_batch`     this machine has all examples of a step; else it is one of several
                                  workers, each of which has a batch of its own
    `Objectives.optimizer_calls`  the optimizers that the model function has called itself, as the
                                  model function of an Estimator does; None where `build_towers` got
                                  the optimizer
    `Recorded`                    the call of the model function: the `operations` that it has made;
                                  in `owned` the names of the operations that came with a variable;
                                  and the `sources`, operations that give the shard
    `Roles.own_variables`         variables of which each tower has its own, such as the state of a
                                  stateful RNN
    `Tower.loss`                  the loss as the model function returned it
    `Tower.data_loss`             the loss that is differentiated: the build may have added
                                  registered losses to it
"""

import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.copies.tower_set import TowerSet
from towers.errors import GradientError
from towers.gradients.optimizer_methods import computes_with
from towers.gradients.tower import Tower
from towers.graph import graph_walk
from towers.graph.graph_walk import operation_names
from towers.graph.op_types import VARIABLE_OPS
from towers.graph.variable_access import Writes
from towers.model.objectives import flat
from towers.model.outputs import weighted_sum
from towers.placement.variable_device import only_device


class _Taken(typing.NamedTuple):
    """What an operation of the update takes from the model function, or waits for in it."""
    op: tf.Operation  # of the update
    source: typing.Union[tf.Tensor, tf.Operation]  # of the model function


class ClosureTensors:
    """The tensors that the operations of an update take from the model function."""

    def __init__(self, tower_set: TowerSet, losses: typing.Any, gradients: list):
        """
        Args:
          tower_set: the towers.
          losses: the means of `Tower.data_loss` over the batch: one tensor, or a dict by name.
          gradients: list of the tensors of the combined gradients, which any update takes.
        """
        self._has_one_shard = tower_set.has_one_shard
        self._towers = tower_set.towers
        self._recorded = tower_set.recorded
        self._request = tower_set.request
        self._weights = tower_set.batch.weights
        self._losses = flat(losses)
        self._gradients = gradients
        self._made: typing.List[tf.Operation] = []  # the operations of the update
        trained = operation_names(tower_set.roles.all_trained)
        # State of single towers, which no update may take. The one tower of a worker may have state
        # that is trained (several towers may not): then the update has to take it.
        self._own_state = [variable for variable in tower_set.roles.own_variables()
                           if variable.op.name not in trained]
        # {name of the tensor of a tower's loss: name of the loss, None where there is only one}
        self._names_of_losses: typing.Dict[str, typing.Optional[str]] = {}
        for tower in self._towers:
            for name, loss in _losses_by_name(tower).items():
                self._names_of_losses[loss.name] = name
        # {name of a loss, None where there is only one: the mean of `Tower.loss` over the batch}.
        # A mean is made, and added here, when an update takes the loss.
        self._means: typing.Dict[typing.Optional[str], tf.Tensor] = {}

    def settle(self, made: list, fetches: list, may_take: typing.Sequence = ()) -> None:
        """Replaces a tower's loss by the batch's loss in the inputs of an update's operations, and
        refuses other tensors that depend on one tower's examples.

        Args:
          made: the operations of the update that were made since the last call.
          fetches: the tensors and operations of the update that a step runs.
          may_take: tensors and operations that the update may take or wait for.

        Raises:
          GradientError: an update takes another tensor that depends on one tower's examples.
        """
        self._made = self._made + made
        if self._has_one_shard:
            return  # the tower has all examples: its loss and its tensors are the batch's
        if self._request.training.objectives.optimizer_calls is not None:
            return  # the model function has made the update itself, from tensors of its tower
        self._take_means_of_losses()
        # The update ops of tower 0, such as batch norm's, count as update ops of the whole batch.
        allowed = self._gradients + list(may_take) + list(self._towers[0].updates)
        self._check_takes_nothing_of_tower(fetches, allowed)
        if not self._request.has_whole_batch:
            self._check_takes_nothing_of_worker(fetches)

    def _take_means_of_losses(self) -> None:
        """Replaces each tower's loss, where an operation of the update takes it, by the mean of the
        loss over the batch."""
        for op in self._made:
            for position, tensor in enumerate(op.inputs):
                if tensor.name in self._names_of_losses:
                    name = self._names_of_losses[tensor.name]
                    compat.replace_input(op, position, self._mean(name))

    def _mean(self, name: typing.Optional[str]) -> tf.Tensor:
        """The mean over the batch of the loss `name`, which is None for the only loss. The first
        call makes the mean."""
        if name not in self._means:
            losses = [_losses_by_name(tower)[name] for tower in self._towers]
            # The mean waits for the towers' losses alone. `tf.control_dependencies` that are open
            # around the build are for the update, and not for the mean.
            with tf.control_dependencies(None), only_device(self._request.placement.main), \
                    tf.name_scope(self._request.split.scope_of_batch):
                self._means[name] = weighted_sum(losses, self._weights)
        return self._means[name]

    # ---- tensors of one tower --------------------------------------------------------------------

    def _check_takes_nothing_of_tower(self, fetches: list, allowed: list) -> None:
        """Refuses operations of the update that take tensors which depend on one tower's examples.

        Args:
          fetches: tensors and operations that a step runs. Operations that these do not need are
            not checked.
          allowed: tensors and operations that the update may take.
        """
        taken = self._taken_from_model(allowed)
        if not taken:
            return
        of_one_tower = self._names_of_one_tower()
        step = graph_walk.names_of(graph_walk.step_operations(fetches))
        for op, source in taken:
            source_name = graph_walk.operation_of(source).name
            if op.name in step and source_name in of_one_tower:
                raise GradientError(
                    'transform_gradients, or the optimizer, takes %s of the model function, which '
                    "depends on the examples of one tower: take the loss, which is the batch's, or "
                    'let UPDATE_OPS write it to a variable, and read the variable. Gradients of '
                    'gradients take such tensors, too.' % source.name)

    def _taken_from_model(self, allowed: list) -> typing.List[_Taken]:
        """Lists the tensors of the model function that the update takes, and the operations of the
        model function that it waits for. Shared variables are not in the list.

        Args:
          allowed: tensors and operations that are not in the list either.
        """
        not_to_take = self._names_of_model() - operation_names(allowed)
        # An update may wait for a tower's loss, since a control edge carries no value.
        not_to_await = set(not_to_take)
        for tower in self._towers:
            not_to_await -= operation_names(flat(tower.loss))
        taken: typing.List[_Taken] = []
        for op in self._made:
            taken += [_Taken(op, tensor) for tensor in op.inputs
                      if tensor.op.name in not_to_take]
            taken += [_Taken(op, other) for other in op.control_inputs
                      if other.name in not_to_await]
        return taken

    def _names_of_model(self) -> typing.Set[str]:
        """Set of the names of the operations that the call of the model function has made. Of the
        variables, it has only the variables of which each tower has its own."""
        operations = [op for op in self._recorded.operations if op.type not in VARIABLE_OPS]
        return graph_walk.names_of(operations) | operation_names(self._own_state)

    def _names_of_one_tower(self) -> typing.Set[str]:
        """Set of the names of the operations of the model function whose results differ from tower
        to tower: they are computed from the shard, from random numbers, from what the model writes,
        or from a tower's own state."""
        recorded = self._recorded
        finder = Writes(tf.get_default_graph())
        sources = list(recorded.sources)  # the operations that give the shard
        sources += [variable.op for variable in self._own_state]
        for op in recorded.operations:
            # The operations that came with a variable, such as its initializer, run in no step.
            runs_in_step = op.name not in recorded.owned
            is_write = runs_in_step and finder.written_by(op)
            if is_write or graph_walk.is_random(op):
                sources.append(op)
        # `control`: along control edges as well, since a read that waits for a write gives the
        # written value.
        return graph_walk.reachable_from(sources, recorded.operations, control=True)

    # ---- tensors of one machine ------------------------------------------------------------------

    def _check_takes_nothing_of_worker(self, fetches: list) -> None:
        """Refuses an update that computes with the loss over this machine's batch: each machine has
        another loss, and so the machines' weights would become different.

        Args:
          fetches: what a step runs: gradients for the optimizer (tensors), or operations that
            update variables.
        """
        gradients = [fetch for fetch in fetches if isinstance(fetch, tf.Tensor)]
        updates = [fetch for fetch in fetches if not isinstance(fetch, tf.Tensor)]
        becomes_weights = gradients + self._written_to_trained(updates)
        losses_of_worker = self._losses + list(self._means.values())
        for loss in losses_of_worker:
            # `known`: the search ends at the combined gradients. They are computed from the losses
            # as well, but as sums over all workers they are the same on each machine.
            if computes_with(becomes_weights, loss, known=self._gradients):
                raise GradientError(
                    "transform_gradients, or the optimizer, computes with the loss of one worker's "
                    'examples: let UPDATE_OPS write it to a variable, and read the variable.')

    def _written_to_trained(self, updates: list) -> typing.List[tf.Tensor]:
        """The inputs of the operations with which an update writes trainable variables.

        Args:
          updates: the operations of the update that a step runs. Operations of the model for which
            they only wait, such as its update ops, do not count.
        """
        finder = Writes(tf.get_default_graph())
        trainable = operation_names(tf.trainable_variables())
        names_in_update = graph_walk.names_of(self._made)
        written: typing.List[tf.Tensor] = []
        for op in graph_walk.step_operations(updates):
            if op.name not in names_in_update:
                continue  # the update only waits for it
            writes_trainable = not trainable.isdisjoint(finder.written_by(op))
            if writes_trainable:
                written += op.inputs
        return written


def _losses_by_name(tower: Tower) -> typing.Dict[typing.Optional[str], tf.Tensor]:
    """{name of a loss: a tower's loss}; the name of an only loss is None."""
    if isinstance(tower.loss, dict):
        return tower.loss
    return {None: tower.loss}
