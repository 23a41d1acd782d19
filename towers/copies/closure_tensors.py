"""Tensors that a closure takes from the model function into the update.

A model function may leave a tensor where `transform_gradients`, or an optimizer, finds it: in a
list, or as an attribute of the model. It is then of one tower, the first or the last one, by how
the towers are made. In place of a loss the update takes the mean over the batch. Any other tensor
that depends on a tower's examples is refused; a tensor without them is the same in all towers.
"""

import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.copies.tower_set import TowerSet
from towers.errors import GradientError
from towers.gradients.optimizer_methods import computes_with
from towers.graph import graph_walk
from towers.graph.graph_walk import operation_names
from towers.graph.op_types import VARIABLE_OPS
from towers.graph.variable_access import Writes
from towers.model.objectives import flat
from towers.model.outputs import weighted_sum
from towers.placement.variable_device import only_device


class ClosureTensors:
    """The tensors that the operations of an update take from the model function.

    Args:
      tower_set: `TowerSet`.
      losses: the means over the batch, shaped.
      gradients: list of the tensors of the combined gradients, which the update takes anyway.
    """

    def __init__(self, tower_set: TowerSet, losses: typing.Any, gradients: list):
        self._towers = tower_set.towers
        self._recorded = tower_set.recorded
        self._request = tower_set.request
        self._weights = tower_set.batch.weights
        self._losses = flat(losses)
        self._gradients = gradients
        self._made: typing.List[tf.Operation] = []  # of the update
        trained = operation_names(tower_set.roles.trainable)
        self._own_state = [variable for variable in tower_set.roles.own_variables()
                           if variable.op.name not in trained]
        # Name of the tensor of a tower's loss -> name of the loss, None where there is only one.
        self._names_of_losses: typing.Dict[str, typing.Optional[str]] = {}
        for tower in self._towers:
            if isinstance(tower.loss, dict):
                for name, loss in tower.loss.items():
                    self._names_of_losses[loss.name] = name
            else:
                self._names_of_losses[tower.loss.name] = None
        self._means: typing.Dict[typing.Optional[str], tf.Tensor] = {}
        """{name of a loss: its mean over the batch}, where the update takes it."""

    def settle(self, made: list, fetches: list, after: typing.Sequence = ()) -> None:
        """Gives the operations of an update the batch's losses, and refuses other tensors of a
        tower.

        Args:
          made: the operations, besides those of earlier calls.
          fetches: what a step runs of them.
          after: operations that they may take, too.
        """
        self._made = self._made + made
        is_one_part = len(self._towers) == 1 and self._request.has_whole_batch
        objectives = self._request.training.objectives
        if is_one_part or objectives.optimizer_calls is not None:  # whose calls settle it
            return
        for op in self._made:
            for position, tensor in enumerate(op.inputs):
                if tensor.name in self._names_of_losses:
                    name = self._names_of_losses[tensor.name]
                    compat.replace_input(op, position, self._mean(name))
        known = self._gradients + list(after) + list(self._towers[0].updates)
        self._check_of_no_tower(fetches, known)
        if not self._request.has_whole_batch:
            self._check_of_no_worker(fetches)

    def _mean(self, name: typing.Optional[str]) -> tf.Tensor:
        """The mean over the batch of the loss of that name, made when it is first asked for."""
        if name not in self._means:
            losses = [tower.loss if name is None else tower.loss[name] for tower in self._towers]
            with tf.control_dependencies(None), only_device(self._request.placement.main), \
                    tf.name_scope(self._request.split.name + 's'):
                self._means[name] = weighted_sum(losses, self._weights)
        return self._means[name]

    # ---- what is of one tower --------------------------------------------------------------------

    def _check_of_no_tower(self, fetches: list, known: list) -> None:
        """Refuses operations that take values of one tower's examples, and that a step for some
        `fetches` runs. They may take `known` tensors and operations, and wait for the towers'
        losses."""
        taken = self._taken_from_model(known)
        if not taken:
            return
        of_one_tower = self._names_of_one_tower()
        step = graph_walk.names_of(graph_walk.step_operations(fetches))
        for op, source in taken:
            if op.name in step and graph_walk.operation_of(source).name in of_one_tower:
                raise GradientError(
                    'transform_gradients, or the optimizer, takes %s of the model function, which '
                    "depends on the examples of one tower: take the loss, which is the batch's, or "
                    'let UPDATE_OPS write it to a variable, and read the variable. Gradients of '
                    'gradients take such tensors, too.' % source.name)

    def _taken_from_model(self, known: list) -> typing.List[tuple]:
        """`[(operation of the update, tensor or operation of the model function that it takes)]`,
        but for `known` ones; variables are of no tower, but for a tower's own state."""
        names_of_model = operation_names(self._own_state)
        for op in self._recorded.operations:
            if op.type not in VARIABLE_OPS:
                names_of_model.add(op.name)
        names_of_model -= operation_names(known)
        losses = set()
        for tower in self._towers:
            losses |= operation_names(flat(tower.loss))
        taken: typing.List[tuple] = []
        for op in self._made:
            for tensor in op.inputs:
                if tensor.op.name in names_of_model:
                    taken.append((op, tensor))
            for other in op.control_inputs:
                if other.name in names_of_model and other.name not in losses:
                    taken.append((op, other))
        return taken

    def _names_of_one_tower(self) -> typing.Set[str]:
        """The names of the operations of the model function whose results are one tower's: computed
        from its shard, drawn, written, or read from the tower's own state."""
        recorded = self._recorded
        finder = Writes(tf.get_default_graph())
        sources = list(recorded.sources)
        sources += [variable.op for variable in self._own_state]
        for op in recorded.operations:
            is_write = op.name not in recorded.owned and finder.of(op)
            if is_write or graph_walk.is_random(op):
                sources.append(op)
        return graph_walk.reachable_from(sources, recorded.operations, control=True)

    # ---- what is of one machine ------------------------------------------------------------------

    def _check_of_no_worker(self, fetches: list) -> None:
        """Refuses operations that compute with the losses over this machine's batch, for tensors
        among the `fetches`, or for what is written to trained variables."""
        finder = Writes(tf.get_default_graph())
        trained = operation_names(tf.trainable_variables())
        values = [fetch for fetch in fetches if isinstance(fetch, tf.Tensor)]
        updates = [fetch for fetch in fetches if not isinstance(fetch, tf.Tensor)]
        names = graph_walk.names_of(self._made)
        for op in graph_walk.step_operations(updates):
            if op.name in names and trained.intersection(finder.of(op)):
                values += op.inputs
        for loss in self._losses + list(self._means.values()):
            if computes_with(values, loss, self._gradients):
                raise GradientError(
                    "transform_gradients, or the optimizer, computes with the loss of one worker's "
                    'examples: let UPDATE_OPS write it to a variable, and read the variable.')
