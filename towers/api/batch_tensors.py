"""The batch's values of the tensors of a finished model, for `BuiltTowers.of`.

    tensor of the program                            its value for the batch
    an output that was given to `build_towers`       the tensor in `built`
    does not depend on the inputs                    the tensor itself
    the towers compute it                            the towers' tensors, merged by what is proven
    is computed from what the towers compute         the same; the operations between are imported
                                                     into each tower first
    is a summary                                     a summary of the batch's values

Its test is `tests/api/test_batch_tensors.py`.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.copies.tower_set import TowerSet
from towers.errors import InvalidArgumentError, ModelFunctionError
from towers.graph import graph_walk
from towers.graph.import_again import Imported, import_again
from towers.graph.op_types import DRAWS_DATA, SUMMARIES
from towers.graph.variable_access import variables_read
from towers.model.outputs import ModelOutput
from towers.optimizers import OPTIMIZER_UPDATES
from towers.placement.tower_device import TowerDevice, stages_of
from towers.placement.variable_device import only_device
from towers.proof.analysis import Analysis, analyse
from towers.proof.states import Kind
from towers.whole_batch.predictions import merged_tensor, why_not_merged


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
        # Results that copies of loops hand out, by the name of the tensor in the loop.
        self._exits: typing.Dict[str, tf.Tensor] = {}
        self._graph = tf.get_default_graph()
        operations = self._graph.get_operations()
        self._made_by_build = graph_walk.names_of(operations[self._model.operations_before:])

    def of(self, tensor: tf.Tensor) -> tf.Tensor:
        """The value of `tensor` for the batch; `BuiltTowers.of` describes it."""
        is_of_build = tensor.graph is self._graph and tf.get_default_graph() is self._graph
        if not is_of_build:
            raise InvalidArgumentError('%s: expected a tensor of the graph of the build, under '
                                       'that as the default graph.' % tensor.name)
        if not tensor.graph.is_fetchable(tensor.op):
            raise InvalidArgumentError('%s is in a loop or a branch, and no step fetches it: pass '
                                       'a result of that.' % tensor.name)
        if tensor.name in self._values:
            return self._values[tensor.name]
        is_same_for_any_batch = tensor.op.name not in self._model.depending_on_inputs()
        if is_same_for_any_batch:
            return tensor
        if tensor.op.type in SUMMARIES:
            value = self._summary(tensor)
        else:
            value = self._merged(tensor)
        self._values[tensor.name] = value
        return value

    def _summary(self, summary: tf.Tensor) -> tf.Tensor:
        """Imports a summary of the program, to which the batch's values are given."""
        substitutes = {tensor.name: self.of(tensor) for tensor in summary.op.inputs}
        scope = '%ss/of_program_%d/' % (self._towers.request.split.name, self._next_import())
        with only_device('/cpu:0'), self._graph.name_scope(None):
            return import_again([summary.op], substitutes, scope).tensor(summary)

    def _merged(self, tensor: tf.Tensor) -> tf.Tensor:
        """Computes `tensor` in each tower, and merges the towers' values into the batch's."""
        tower_set = self._towers
        batch = tower_set.batch
        missing = self._model.operations_beside(tensor, self._all_towers_have)
        self._check_beside(tensor, missing)
        import_index = self._next_import()
        with graph_walk.Recording(self._graph) as imported_into_first:
            values = [self._in_tower(0, tensor, missing, import_index)]
        for index in range(1, len(tower_set.towers)):
            values.append(self._in_tower(index, tensor, missing, import_index))
        recorded = tower_set.recorded
        proven = recorded.proven
        is_analysed = values[0].op.name in proven.analysis.analysed
        if len(values) > 1 and not is_analysed:
            analysis = analyse(recorded.operations + imported_into_first.operations,
                               batch.inputs[0], values[:1])
            # Where the graph takes no other batch than its own, that of this one tells.
            proven = proven._replace(analysis=analysis.as_built or analysis)
        self._check_is_no_sum_of_a_static_size(tensor, values, proven)
        request = tower_set.request
        with only_device(request.placement.main), tf.name_scope(request.split.name + 's'):
            merged = merged_tensor(values, batch, proven)
        if merged is None:
            why = self._why_not(values[0], proven.analysis, import_index)
            raise ModelFunctionError(
                "the batch's value of %s, of shape %s, is not proven from those of the towers "
                '(%s): compute it from built.of(…) of the rows that it is computed from, or pass '
                "ModelOutput(loss, metrics={…}) to build_towers for the mean of the towers' values."
                % (tensor.name, tensor.shape, why))
        return merged

    def _why_not(self, original: tf.Tensor, analysis: Analysis, import_index: int) -> str:
        """Tells why a tensor of tower 0 has no value for the batch, in the program's own names.

        Args:
          original: the tensor of tower 0.
          analysis: an analysis that includes the tensor.
          import_index: the index in the name scope of the operations imported for the tensor.
        """
        why = why_not_merged(original, self._towers.recorded.proven._replace(analysis=analysis))
        scope = self._imported.scope
        scope_of_imported = '%sof_program_%d/' % (scope, import_index)
        return why.replace("'" + scope_of_imported, "'").replace("'" + scope, "'")

    def _next_import(self) -> int:
        """Returns the index of a new name scope, for operations of the program."""
        self._num_imports += 1
        return self._num_imports - 1

    def _all_towers_have(self, op: tf.Operation) -> bool:
        """Whether every tower computes an operation of the program.

        The copies leave out what only tower 0 needs, such as updates that only tower 0 runs. Where
        they leave out the `Exit` of a loop (v1), it is made from what they have of the loop.
        """
        if op.name not in self._imported.operations:
            return False
        original = self._imported.operations[op.name]
        if op.type == 'Exit':
            original = original.inputs[0].op
        return all(copied(original) is not original for copied in self._towers.copies)

    def _in_tower(self, index: int, tensor: tf.Tensor, missing: typing.List[tf.Operation],
                  import_index: int) -> tf.Tensor:
        """Gives the tensor of tower `index` for a tensor of the program.

        Args:
          index: the index of the tower.
          tensor: the tensor of the program.
          missing: the operations of the program, between what the towers compute and `tensor`, to
            be imported into the tower.
          import_index: the index in the name scope in which they are imported.
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
        scope = '%s/of_program_%d/' % (part.scope, import_index)
        with only_device(TowerDevice(last_stage)), self._graph.name_scope(None):
            return import_again(missing, substitutes, scope).tensor(tensor)

    def _copied(self, index: int, tensor: tf.Tensor) -> tf.Tensor:
        """The tensor that tower `index` has for one of the program; itself, if towers share it."""
        original = self._imported.tensor(tensor)
        is_shared = original is tensor
        if index == 0 or is_shared:
            return original
        copied = self._towers.copies[index - 1]
        if original.op.type == 'Exit' and copied(original) is original:
            return self._exit(copied(original.op.inputs[0]))
        return copied(original)

    def _exit(self, in_loop: tf.Tensor) -> tf.Tensor:
        """Makes the tensor by which a loop (v1) hands out a result; `in_loop` is the result in the
        loop, an output of a `Switch`."""
        if in_loop.name not in self._exits:
            with tf.device(None), tf.device(in_loop.device), tf.control_dependencies(None):
                self._exits[in_loop.name] = tf.raw_ops.Exit(data=in_loop)
        return self._exits[in_loop.name]

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
            # A run of its own would give other values, or update once more.
            gives_other_values = graph_walk.is_random(op) or op.type.startswith(DRAWS_DATA)
            if gives_other_values or OPTIMIZER_UPDATES.search(op.type):
                raise InvalidArgumentError(
                    '%s is computed by %s (%s), which the towers do not run: pass the tensor to '
                    'build_towers, in ModelOutput(loss, metrics={…}) or predictions=.' % (
                        tensor.name, op.name, op.type))
        read = variables_read(operations)
        if read and self._towers.request.training.objectives:
            raise InvalidArgumentError(
                '%s is computed from the variable %s by operations that the step does not run, and '
                'the step may have written the variable: pass the tensor to build_towers, in '
                'ModelOutput(loss, metrics={…}) or predictions=.' % (tensor.name, read[0].op.name))

    def _check_is_no_sum_of_a_static_size(self, tensor: tf.Tensor, values: typing.List[tf.Tensor],
                                          proven: typing.Any) -> None:
        """Refuses a sum over the examples of a model for a batch of static size, since it may have
        been divided by that size.

        Args:
          tensor: the tensor of the program that is asked for.
          values: the towers' tensors for it.
          proven: `Proven`, with the analysis that has looked at these.
        """
        if len(values) == 1 or proven.static_size is None:
            return
        if proven.analysis.state(values[0]).kind is Kind.SUM:
            raise ModelFunctionError(
                '%s is a sum over the examples, and the model is for %d of them: whether the sum '
                'is divided by that number is not known. Take built.of(…) of the rows, and their '
                'mean or sum; or put towers.batch_sum around a sum.' % (
                    tensor.name, proven.static_size))
