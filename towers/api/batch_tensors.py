"""The batch's values of the tensors of a finished model, for `BuiltTowers.of`.

    tensor of the program                            its value for the batch
    an output that was given to `build_towers`       the tensor in `built`
    does not depend on the inputs                    the tensor itself
    the towers compute it                            the towers' tensors, merged by what is proven
    is computed from what the towers compute         the same; the operations between are imported
                                                     into each tower first
"""

import typing

import tensorflow.compat.v1 as tf

from towers.copies.tower_set import TowerSet
from towers.errors import InvalidArgumentError
from towers.graph import graph_walk
from towers.graph.import_again import Imported, import_again
from towers.graph.op_types import DRAWS_DATA
from towers.graph.variable_access import variables_read
from towers.model.outputs import ModelOutput
from towers.optimizers import OPTIMIZER_UPDATES
from towers.placement.tower_device import TowerDevice, stages_of
from towers.placement.variable_device import only_device
from towers.proof.analysis import analyse
from towers.whole_batch.predictions import merge_predictions


class BatchTensors:
    """The batch's values of the tensors of a finished model."""

    def __init__(self, tower_set: TowerSet, outputs: ModelOutput):
        """Notes which tensors of the program the build has values of.

        Args:
          tower_set: the towers of the build.
          outputs: the losses, predictions and metrics over the batch.
        """
        self._towers = tower_set
        self._model = tower_set.request.call.model
        # A finished model always has an import.
        self._imported = typing.cast(Imported, tower_set.recorded.imported)
        # The batch's value of each tensor that was asked for, by the tensor's name.
        self._values = self._model.values_of_outputs(outputs)
        self._num_imports = 0
        self._graph = tf.get_default_graph()
        operations = self._graph.get_operations()
        self._made_by_build = graph_walk.names_of(operations[self._model.operations_before:])

    def of(self, tensor: tf.Tensor) -> tf.Tensor:
        """The value of `tensor` for the batch; `BuiltTowers.of` describes it."""
        if not tensor.graph is tf.get_default_graph() is self._graph:
            raise InvalidArgumentError('%s: expected a tensor of the graph of the build, under '
                                       'that as the default graph.' % tensor.name)
        if not tensor.graph.is_fetchable(tensor.op):
            raise InvalidArgumentError('%s is in a loop or a branch, and no step fetches it: pass '
                                       'a result of that.' % tensor.name)
        if tensor.name not in self._values:
            if tensor.op.name not in self._model.depending_on_inputs():
                return tensor
            self._values[tensor.name] = self._merged(tensor)
        return self._values[tensor.name]

    def _merged(self, tensor: tf.Tensor) -> tf.Tensor:
        """Computes `tensor` in each tower, and merges the towers' values into the batch's."""
        tower_set = self._towers
        recorded = tower_set.recorded
        batch = tower_set.batch
        missing = self._model.operations_beside(tensor, self._all_towers_have)
        self._check_beside(tensor, missing)
        with graph_walk.Recording(tf.get_default_graph()) as imported_into_first:
            values = [self._in_tower(0, tensor, missing)]
        for index in range(1, len(tower_set.towers)):
            values.append(self._in_tower(index, tensor, missing))
        self._num_imports += 1
        proven = recorded.proven
        if missing and len(values) > 1:
            analysis = analyse(recorded.operations + imported_into_first.operations,
                               batch.inputs[0], values[:1])
            proven = proven._replace(analysis=analysis.as_built or analysis)
        request = tower_set.request
        with only_device(request.placement.main), tf.name_scope(request.split.name + 's'):
            return merge_predictions(
                values, batch.weights, batch.sizes if batch.pads else None, proven)

    def _all_towers_have(self, op: tf.Operation) -> bool:
        """Whether every tower computes an operation of the program.

        The copies leave out what only tower 0 needs, such as updates that tower 0 alone runs.
        """
        if op.name not in self._imported.operations:
            return False
        of_first = self._imported.operations[op.name]
        return all(copied(of_first) is not of_first for copied in self._towers.copies)

    def _in_tower(self, index: int, tensor: tf.Tensor, missing: typing.List[tf.Operation]
                  ) -> tf.Tensor:
        """Gives the tensor of tower `index` for a tensor of the program.

        Args:
          index: the index of the tower.
          tensor: the tensor of the program.
          missing: the operations of the program, between what the towers compute and `tensor`, to
            be imported into the tower.
        """
        if not missing:
            return self._copied(index, tensor)
        names = graph_walk.names_of(missing)
        substitutes = {}
        for op in missing:
            for leaf in op.inputs:
                if leaf.op.name not in names:
                    substitutes[leaf.name] = self._copied(index, leaf)
        last_stage = stages_of(self._towers.towers[index].device)[-1]
        part = self._towers.request.split.parts[index]
        scope = '%s/of_program_%d/' % (part.scope, self._num_imports)
        with only_device(TowerDevice(last_stage)), tf.get_default_graph().name_scope(None):
            return import_again(missing, substitutes, scope).tensor(tensor)

    def _copied(self, index: int, tensor: tf.Tensor) -> tf.Tensor:
        """The tensor that tower `index` has for one of the program; itself, if towers share it."""
        of_first = self._imported.tensor(tensor)
        is_shared = of_first is tensor
        if index == 0 or is_shared:
            return of_first
        return self._towers.copies[index - 1](of_first)

    def _check_beside(self, tensor: tf.Tensor, operations: typing.List[tf.Operation]) -> None:
        """Refuses a tensor that would not have the value which the step computes with.

        Args:
          tensor: the tensor of the program that is asked for.
          operations: what would be run for it beside the step.
        """
        for op in operations:
            if op.name in self._made_by_build:
                raise InvalidArgumentError(
                    '%s is computed from %s, which the build has made: built.of takes tensors of '
                    'the program.' % (tensor.name, op.name))
            if graph_walk.is_random(op) or op.type.startswith(DRAWS_DATA) or (
                    OPTIMIZER_UPDATES.search(op.type)):
                raise InvalidArgumentError(
                    '%s is computed by %s (%s), which the towers do not run: pass the tensor to '
                    'build_towers, in ModelOutput(loss, metrics={…}) or predictions=.' % (
                        tensor.name, op.name, op.type))
        read = variables_read(operations)
        if read and self._towers.request.training.objectives:
            raise InvalidArgumentError(
                '%s reads the variable %s beside the step, which may have written it: pass the '
                'tensor to build_towers, in ModelOutput(loss, metrics={…}) or predictions=.' % (
                    tensor.name, read[0].op.name))
