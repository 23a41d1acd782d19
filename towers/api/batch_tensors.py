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
from towers.placement.loop_state import keep_arrays_with_readers, keep_stacks_with_loops
from towers.placement.tower_device import TowerDevice, stages_of
from towers.placement.variable_device import only_device
from towers.proof.analysis import Analysis, analyse
from towers.proof.states import Kind
from towers.whole_batch.predictions import merged_tensor, why_not_merged
from towers.whole_batch.proven import Proven


class BatchTensors:
    """The batch's values of the tensors of a finished model."""

    def __init__(self, tower_set: TowerSet, outputs: ModelOutput):
        """Notes which tensors of the program the build has values of.

        Args:
          tower_set: the towers of the build.
          outputs: the losses, predictions and metrics over the batch.
        """
        self._towers = tower_set
        self._model = tower_set.request.call.model  # `FinishedModel`
        # Tower 0 is an import of the program's operations. The type of `imported` also has None,
        # which it is for a model function.
        self._imported = typing.cast(Imported, tower_set.recorded.imported)
        # The batch's value of each tensor that was asked for, by the tensor's name.
        self._values = self._model.values_of_outputs(outputs)
        self._num_imports = 0
        # What `_exit` has made, by the name of the tensor in the loop.
        self._exits: typing.Dict[str, tf.Tensor] = {}
        self._graph = tf.get_default_graph()
        num_before_build = self._model.operations_before
        self._made_by_build = graph_walk.names_of(self._graph.get_operations()[num_before_build:])

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
        scope = '%s/of_program_%d/' % (
            self._towers.request.split.scope_of_batch, self._next_import())
        with only_device('/cpu:0'), self._graph.name_scope(None):
            return import_again([summary.op], substitutes, scope).tensor(summary)

    def _merged(self, tensor: tf.Tensor) -> tf.Tensor:
        """Computes `tensor` in each tower, and merges the towers' values into the batch's."""
        tower_set = self._towers
        # The operations of the program that compute the tensor, and that no tower has yet.
        missing = self._model.operations_beside(tensor, has=self._all_towers_have)
        self._check_importable(tensor, missing)
        import_index = self._next_import()
        with graph_walk.Recording(self._graph) as imported_into_first:
            values = [self._in_tower(0, tensor, missing, import_index)]
        for index in range(1, len(tower_set.towers)):
            values.append(self._in_tower(index, tensor, missing, import_index))
        proven = tower_set.recorded.proven
        if len(values) > 1:  # a single tower's value is the batch's, and needs no proof
            proven = self._proven_of(values[0], imported_into_first.operations)
            self._check_is_no_sum_of_a_static_size(tensor, values[0], proven)
        request = tower_set.request
        with only_device(request.placement.main), tf.name_scope(request.split.scope_of_batch):
            merged = merged_tensor(values, tower_set.batch, proven)
        if merged is None:
            why = self._why_not(values[0], proven.analysis, import_index)
            raise ModelFunctionError(
                "the batch's value of %s, of shape %s, is not proven from those of the towers "
                '(%s): compute it from built.of(…) of the rows that it is computed from, or pass '
                "ModelOutput(loss, metrics={…}) to build_towers for the mean of the towers' values."
                % (tensor.name, tensor.shape, why))
        return merged

    def _proven_of(self, value: tf.Tensor, imported: typing.List[tf.Operation]) -> Proven:
        """What is proven of the forward pass of tower 0, with a tensor that was imported into it.

        Args:
          value: the tensor.
          imported: the operations that were imported for it.
        """
        recorded = self._towers.recorded
        if value.op.name in recorded.proven.analysis.analysed:
            return recorded.proven
        analysis = analyse(recorded.operations + imported, self._towers.batch.inputs[0], [value])
        # `analysis` is for a batch of any size. A graph of a static batch may hold the batch's size
        # in constants, and take no other batch: then `as_built` tells where its examples are.
        return recorded.proven._replace(analysis=analysis.as_built or analysis)

    def _why_not(self, original: tf.Tensor, analysis: Analysis, import_index: int) -> str:
        """Tells why a tensor of tower 0 has no value for the batch, in the program's own names.

        The operations that it names are imports, such as `tower_0/dense` or
        `tower_0/of_program_1/dense`; the program knows both as `dense`.

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

        The copies leave out what only tower 0 needs, such as updates that only tower 0 runs. An
        `Exit`, which hands a result out of a loop (v1), counts as computed if the loop computes the
        result: `_copied` makes an `Exit` that a copy leaves out.
        """
        if op.name not in self._imported.operations:
            return False
        in_tower_0 = self._imported.operations[op.name]
        if op.type == 'Exit':
            in_tower_0 = in_tower_0.inputs[0].op
        return all(_has_copy(copy_of, in_tower_0) for copy_of in self._towers.copies)

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
        names_of_missing = graph_walk.names_of(missing)
        substitutes = {}
        for op in missing:
            for taken in op.inputs:
                if taken.op.name not in names_of_missing:
                    substitutes[taken.name] = self._copied(index, taken)
        # The missing operations take the tower's results, which the last stage has in most models.
        last_stage = stages_of(self._towers.towers[index].device)[-1]
        part = self._towers.request.split.parts[index]
        scope = '%s/of_program_%d/' % (part.scope, import_index)  # a full name
        with only_device(TowerDevice(last_stage)), self._graph.name_scope(None):
            imported = import_again(missing, substitutes, scope)
        # The program's `tf.map_fn` may fill its array from the batch, beside which TensorFlow has
        # put that operation; the shard in its place may be on another device than the tower.
        operations = list(imported.operations.values())
        keep_stacks_with_loops(operations)
        keep_arrays_with_readers(operations, last_stage)
        return imported.tensor(tensor)

    def _copied(self, index: int, tensor: tf.Tensor) -> tf.Tensor:
        """The tensor that tower `index` has for a tensor of the program; the program's tensor
        itself, if the towers share it."""
        in_tower_0 = self._imported.tensor(tensor)
        is_shared = in_tower_0 is tensor  # the import has left the program's own tensor in place
        if index == 0 or is_shared:
            return in_tower_0
        copy_of = self._towers.copies[index - 1]
        # A copy of a loop hands out only the results that its tower needs, each by an `Exit`.
        is_result_of_loop = in_tower_0.op.type == 'Exit'
        if is_result_of_loop and not _has_copy(copy_of, in_tower_0):
            result_in_loop = in_tower_0.op.inputs[0]
            return self._exit(copy_of(result_in_loop))
        return copy_of(in_tower_0)

    def _exit(self, in_loop: tf.Tensor) -> tf.Tensor:
        """The tensor by which a copy of a loop (v1) hands out a result; it is made once.

        `tf.while_loop` makes an `Exit` for each loop variable; a copy of the loop has only the
        `Exit`s that its tower needs.

        Args:
          in_loop: the result in the copy of the loop, an output of a `Switch`.
        """
        if in_loop.name not in self._exits:
            with only_device(in_loop.device), tf.control_dependencies(None):
                self._exits[in_loop.name] = tf.raw_ops.Exit(data=in_loop)
        return self._exits[in_loop.name]

    def _check_importable(self, tensor: tf.Tensor, operations: typing.List[tf.Operation]) -> None:
        """Refuses a tensor for which imported operations may compute another value than the step.

        An imported operation runs besides the program's own: it would draw other random numbers,
        take the next data, update once more, or read a variable after the step has written it.

        Args:
          tensor: the tensor of the program that is asked for.
          operations: what would be imported for it.
        """
        for op in operations:
            if op.name in self._made_by_build:
                raise InvalidArgumentError(
                    '%s is computed from %s, which the build has made: built.of takes tensors of '
                    'the program.' % (tensor.name, op.name))
            gives_other_values = graph_walk.is_random(op) or op.type.startswith(DRAWS_DATA)
            updates_once_more = OPTIMIZER_UPDATES.search(op.type)
            if gives_other_values or updates_once_more:
                raise InvalidArgumentError(
                    '%s is computed by %s (%s), which the towers do not run: pass the tensor to '
                    'build_towers, in ModelOutput(loss, metrics={…}) or predictions=.' % (
                        tensor.name, op.name, op.type))
        read = variables_read(operations)
        trains = bool(self._towers.request.training.objectives)
        if read and trains:
            raise InvalidArgumentError(
                '%s is computed from the variable %s by operations that the step does not run, and '
                'the step may have written the variable: pass the tensor to build_towers, in '
                'ModelOutput(loss, metrics={…}) or predictions=.' % (tensor.name, read[0].op.name))

    def _check_is_no_sum_of_a_static_size(self, tensor: tf.Tensor, value: tf.Tensor,
                                          proven: Proven) -> None:
        """Refuses a sum over the examples of a model for a batch of static size.

        The sum times 1/32, say, is the mean over a batch of 32. The towers' values of a mean are
        averaged, the towers' values of a sum are added up, and the graph does not tell whether the
        tensor is a mean or a sum.

        Args:
          tensor: the tensor of the program that is asked for.
          value: the tensor of tower 0 for it.
          proven: what is proven of the forward pass that has this tensor.
        """
        size = proven.static_size  # None for a batch of any size, whose mean divides by its shape
        is_sum = proven.analysis.state(value).kind is Kind.SUM
        if is_sum and size is not None:
            raise ModelFunctionError(
                '%s is a sum over the examples, and the model is for %d of them: whether the sum '
                'is divided by that number is not known. Take built.of(…) of the rows, and their '
                'mean or sum; or put towers.batch_sum around a sum.' % (
                    tensor.name, size))


def _has_copy(copy_of: typing.Callable, in_tower_0: typing.Any) -> bool:
    """Whether a copy of tower 0 has a tensor or an operation.

    Args:
      copy_of: the function from a tensor or an operation of tower 0 to the copy's. For one that the
        copy lacks it returns its argument.
      in_tower_0: the tensor or operation of tower 0.
    """
    return copy_of(in_tower_0) is not in_tower_0
