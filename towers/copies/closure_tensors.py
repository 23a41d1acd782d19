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
from towers.graph.op_types import VARIABLE_OPS
from towers.graph.variable_access import Writes
from towers.model.objectives import flat
from towers.model.outputs import weighted_mean
from towers.placement.variable_device import only_device


class ClosureTensors:
    """The tensors that the operations of an update take from the model function.

    Args:
      tower_set: `TowerSet`.
      losses: the means over the batch, shaped.
      gradients: list of the tensors of the combined gradients, which the update takes anyway.
    """

    def __init__(self, tower_set: TowerSet, losses: typing.Any, gradients: list):
        self._towers, self._recorded = tower_set.towers, tower_set.recorded
        self._request, self._weights = tower_set.request, tower_set.batch.weights
        self._losses, self._gradients, self._made = flat(losses), gradients, []
        trained = {variable.op.name for variable in tower_set.roles.trainable}
        self._own_state = [variable for variable in tower_set.roles.own_variables()
                           if variable.op.name not in trained]
        # Name of the tensor of a tower's loss -> name of the loss, None where there is only one.
        self._names = {loss.name: name for tower in self._towers for name, loss in (
            tower.loss.items() if isinstance(tower.loss, dict) else [(None, tower.loss)])}
        self._means = {}  # name of a loss -> its mean over the batch, where the update takes it

    def settle(self, made: list, fetches: list, after: typing.Sequence = ()) -> None:
        """Gives operations `made` for `fetches`, and of earlier calls, the batch's losses, and
        refuses other tensors of a tower. They may take operations `after`, too."""
        self._made = self._made + made
        is_one_part = len(self._towers) == 1 and self._request.has_whole_batch
        objectives = self._request.training.objectives
        if is_one_part or objectives.of_model is not None:  # whose calls settle it
            return
        for op in self._made:
            for position, tensor in enumerate(op.inputs):
                if tensor.name in self._names:
                    compat.replace_input(op, position, self._mean(self._names[tensor.name]))
        self._check_of_no_tower(
            fetches, self._gradients + list(after) + list(self._towers[0].updates))
        if not self._request.has_whole_batch:
            self._check_of_no_worker(fetches)

    def _mean(self, name):
        if name not in self._means:
            losses = [tower.loss if name is None else tower.loss[name] for tower in self._towers]
            with tf.control_dependencies(None), only_device(self._request.placement.main), \
                    tf.name_scope(self._request.split.name + 's'):
                self._means[name] = weighted_mean(losses, self._weights)
        return self._means[name]

    def _check_of_no_tower(self, fetches, known):
        """Refuses operations that take values of one tower's examples: computed from its shard, or
        drawn, written, or read from a tower's own state by the model function. They may take
        `known` tensors, and wait for the towers' losses."""
        recorded, own_state = self._recorded, self._own_state
        called = {op.name for op in recorded.operations if op.type not in VARIABLE_OPS}.union(
            variable.op.name for variable in own_state).difference(
                getattr(each, 'op', each).name for each in known)
        losses = {loss.op.name for tower in self._towers for loss in flat(tower.loss)}
        taken = [(op, each) for op in self._made
                 for each in list(op.inputs) + list(op.control_inputs)
                 if getattr(each, 'op', each).name in called and each.name not in losses]
        if not taken:
            return
        writes = Writes(tf.get_default_graph())
        step = {op.name for op in graph_walk.step_operations(fetches)}
        of_one_tower = graph_walk.reachable_from(
            list(recorded.sources) + [variable.op for variable in own_state]
            + [op for op in recorded.operations if graph_walk.is_random(op) or (
                op.name not in recorded.owned and writes.of(op))],
            recorded.operations, control=True)
        for op, each in taken:
            if op.name in step and getattr(each, 'op', each).name in of_one_tower:
                raise GradientError(
                    'transform_gradients, or the optimizer, takes %s of the model function, which '
                    "depends on the examples of one tower: take the loss, which is the batch's, or "
                    'let UPDATE_OPS write it to a variable, and read the variable. Gradients of '
                    'gradients take such tensors, too.' % each.name)

    def _check_of_no_worker(self, fetches):
        """Refuses operations that compute with the losses over this machine's batch."""
        names, writes = {op.name for op in self._made}, Writes(tf.get_default_graph())
        trained = {variable.op.name for variable in tf.trainable_variables()}
        updates = [each for each in fetches if not isinstance(each, tf.Tensor)]
        values = [each for each in fetches if isinstance(each, tf.Tensor)] + [
            tensor for op in graph_walk.step_operations(updates)
            if op.name in names and trained.intersection(writes.of(op)) for tensor in op.inputs]
        if any(computes_with(values, loss, self._gradients)
               for loss in self._losses + list(self._means.values())):
            raise GradientError(
                "transform_gradients, or the optimizer, computes with the loss of one worker's "
                'examples: let UPDATE_OPS write it to a variable, and read the variable.')
