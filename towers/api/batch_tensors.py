"""The batch's values of the tensors of a finished model, for `BuiltTowers.of`.

    an output of the build              what `built` has of it
    the same for every batch            the tensor itself
    a tensor that the towers compute    the towers' tensors, merged by what is proven of them
    one that is computed from these     what it needs besides is imported into each tower before
"""


import tensorflow.compat.v1 as tf

from towers.copies.tower_set import TowerSet
from towers.errors import InvalidArgumentError
from towers.graph import graph_walk
from towers.graph.import_again import import_again
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
        """`outputs` are those of the batch."""
        self._towers = tower_set
        self._model = tower_set.request.call.model
        self._values = self._model.values_of_outputs(outputs)
        self._imports = 0
        self._graph = tf.get_default_graph()
        operations = self._graph.get_operations()
        self._of_build = graph_walk.names_of(operations[self._model.operations_before:])

    def of(self, tensor: tf.Tensor) -> tf.Tensor:
        """See `BuiltTowers.of`."""
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

    def _merged(self, tensor):
        towers = self._towers
        recorded = self._towers.recorded
        operations = self._model.operations_beside(tensor, self._all_towers_have)
        self._check_beside(tensor, operations)
        with graph_walk.Recording(tf.get_default_graph()) as of_first:
            values = [self._in_tower(0, tensor, operations)]
        values += [self._in_tower(index, tensor, operations)
                   for index in range(1, len(towers.towers))]
        self._imports += 1
        batch = towers.batch
        proven = recorded.proven
        if operations and len(values) > 1:
            analysis = analyse(recorded.operations + of_first.operations, batch.inputs[0],
                               values[:1])
            proven = proven._replace(analysis=analysis.as_built or analysis)
        request = towers.request
        with only_device(request.placement.main), tf.name_scope(request.split.name + 's'):
            return merge_predictions(
                values, batch.weights, batch.sizes if batch.pads else None, proven)

    def _all_towers_have(self, op):
        """Whether the towers have copies of an operation of the program. A copy is left out where
        nothing of a tower needs it but what tower 0 alone does."""
        imported = self._towers.recorded.imported
        if op.name not in imported.operations:
            return False
        of_first = imported.operations[op.name]
        return all(copied(of_first) is not of_first for copied in self._towers.copies)

    def _in_tower(self, index, tensor, operations):
        """A tensor of the program in tower `index`; `operations` are those that it has not yet."""
        imported = self._towers.recorded.imported

        def of_tower(leaf):
            of_first = imported.tensor(leaf)
            is_shared = of_first is leaf
            return of_first if index == 0 or is_shared else (
                self._towers.copies[index - 1](of_first))
        if not operations:
            return of_tower(tensor)
        tower = self._towers.towers[index]
        names = graph_walk.names_of(operations)
        substitutes = {leaf.name: of_tower(leaf) for op in operations for leaf in op.inputs
                       if leaf.op.name not in names}
        part = self._towers.request.split.parts[index]
        graph = tf.get_default_graph()
        scope = '%s/of_program_%d/' % (part.scope, self._imports)
        with only_device(TowerDevice(stages_of(tower.device)[-1])), graph.name_scope(None):
            return import_again(operations, substitutes, scope).tensor(tensor)

    def _check_beside(self, tensor, operations):
        """Refuses a tensor whose value would not be that of the step, beside which it is computed.
        """
        for op in operations:
            if op.name in self._of_build:
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
