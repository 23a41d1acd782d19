"""A model that is in the graph already, in the place of a model function.

Most TF1 programs build their network of placeholders, and then minimize its loss. What the outputs
of such a model need, cut at its inputs, is imported once. The import is what a call of a model
function would have made:

    an input                 ->  shard 0
    what keeps state         ->  itself: variables, placeholders, tables, queues, iterators
    any other operation      ->  tower_0/…, with its loops and branches

The program's own operations stay as they are. They compute on one device, if they are fetched.

`ModelGraph` finds what the outputs need, `finished_updates` which updates are the model's, and
`finished_checks` what is refused. `FinishedModel` makes the import, once for each recorded part.
"""

import re
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.capture.finished_checks import (
    check_inputs,
    check_losses,
    check_operations,
    check_shared,
)
from towers.capture.finished_updates import updates_of_model, writes_perhaps_forgotten
from towers.capture.model_graph import ModelGraph
from towers.capture.model_inputs import WAYS_OUT, Entries, checked_entries
from towers.errors import InputError, ModelFunctionError, TowersError
from towers.graph import graph_walk
from towers.graph.graph_walk import fetches_in, leaves_of, map_leaves, names_of, operation_of
from towers.graph.import_again import Imported, import_again
from towers.graph.op_types import PLACEHOLDERS
from towers.model.losses import registered_losses
from towers.model.objectives import with_parts
from towers.model.outputs import ModelOutput, to_model_output
from towers.placement.variable_device import only_device
from towers.shards.batch_inputs import Inputs
from towers.whole_batch.batch_values import mark_import

_INSTEAD_OF_A_NUMBER = (
    'Pass it among the inputs, if it has a part for each example; if it is a size of the batch, '
    'compute that from an input, tf.shape(x)[0]; else give it its shape, such as '
    'tf.placeholder(dtype, [4]).')


class ImportedModel(typing.NamedTuple):
    """What a call of a model function would have returned and registered."""
    output: ModelOutput
    registered: typing.List[tf.Tensor]  # the registered losses that depend on the shard
    imported: Imported


def is_finished(model: typing.Any) -> bool:
    """Whether the model of a build is a finished model, given as tensors or as `FinishedModel`."""
    if isinstance(model, (dict, ModelOutput)):
        return bool(fetches_in(model))
    return isinstance(model, (tf.Tensor, FinishedModel))


def output_of_finished(model: typing.Any, needs_loss: bool,
                       names: typing.Optional[typing.List[str]]) -> ModelOutput:
    """The `ModelOutput` of a finished model that is given as tensors.

    Args:
      model: a loss, a `ModelOutput`, or a dict: of losses by their names, or of the fields of a
        `ModelOutput`.
      needs_loss: whether there is an optimizer.
      names: the names of several losses; None where there is one loss.

    Raises:
      ModelFunctionError: a tensor of another graph than the default one.
    """
    if isinstance(model, dict):
        has_fields = set(model) <= set(ModelOutput._fields)  # {'loss': …, 'metrics': …}
        if has_fields:
            model = ModelOutput(**model)
        else:  # losses by their names
            model = ModelOutput(loss=model)
    for fetch in fetches_in(model):
        if fetch.graph is not tf.get_default_graph():
            raise ModelFunctionError(
                'model: %s is of another graph than the default one: call build_towers under the '
                'tf.Graph() of the model.' % fetch.name)
    return to_model_output(model, needs_loss, names)


class FinishedModel:
    """The operations that a model's outputs need, cut at the inputs of the build.

    Attributes:
      output: `ModelOutput` of the program's own tensors. Its updates are the updates that the
        program gave in it, and those that `updates_of_model` finds in the graph.
      operations_before: how many operations the graph had before the towers were made.
    """

    def __init__(self, output: ModelOutput, entries: Entries, num_parts: int):
        """Checks the model. The only operations that it makes are the losses of regularizers of
        TF 2, which TensorFlow makes when they are asked for (`registered_losses`).

        Args:
          output: the tensors that the program has given as the model.
          entries: where the batch enters the model.
          num_parts: how many parts a batch has.

        Raises:
          InputError, ModelFunctionError: a model that towers cannot compute.
        """
        self._axes = entries.axes
        # {name of a tensor of the model: the tensor of the batch that takes its place}
        self._fed = entries.fed
        checked = checked_entries(entries, num_parts)
        # Before `ModelGraph`, which looks at the operations that are there: a regularizer of TF 2
        # makes its loss only when it is asked for.
        registered = registered_losses()
        self._graph = ModelGraph(leaves_of(entries.of_model))
        self.operations_before = len(self._graph.operations)
        # Other registered losses are the same for every batch, or of another model.
        self._registered = [
            loss for loss in registered if loss.op.name in self._graph.from_inputs]
        self.output = output._replace(updates=updates_of_model(self._graph, output))
        # What the model needs is shared by all towers, or imported for each. Both lists are in the
        # order of making.
        self._shared: typing.List[tf.Operation] = []
        self._operations: typing.List[tf.Operation] = []  # to be imported
        needed = self._graph.needed(fetches_in(self.output) + self._registered)
        for op in self._graph.operations:
            if op.name not in needed:
                continue
            if self._graph.is_shared(op):
                self._shared.append(op)
            else:
                self._operations.append(op)
        self._check(checked, entries)
        # {name of a placeholder's tensor: what towers take instead}, see `assert_scalars`
        self._asserted_scalars: typing.Dict[str, tf.Tensor] = {}

    def _check(self, checked: Inputs, entries: Entries) -> None:
        """Refuses what towers cannot compute, see `finished_checks`.

        Args:
          checked: the inputs of the model, as leaves with their paths.
          entries: where the batch enters the model.
        """
        check_operations(self._operations + self._shared)
        check_shared(self._shared)
        tensors_of_leaves = list(map(leaves_of, tf.nest.flatten(entries.of_model)))
        check_inputs(checked, tensors_of_leaves, self._operations, self.output)
        check_losses(self._graph, self._operations, self.output)

    # ---- the import ------------------------------------------------------------------------------

    def assert_scalars(self) -> None:
        """Makes, for each placeholder without a shape, the assertion that one number is fed to it:
        a batch that is fed to it would enter every tower whole."""
        with tf.name_scope('same_for_all_examples'), only_device('/cpu:0'):
            for fed in self._without_shape():
                is_scalar = tf.Assert(tf.equal(tf.rank(fed), 0), [
                    'towers: the placeholder %s has no shape and is no input of build_towers, so '
                    'that each tower takes all that it is fed, and expected is one number. %s It '
                    'was fed the shape' % (fed.name, _INSTEAD_OF_A_NUMBER),
                    tf.shape(fed)])
                with tf.control_dependencies([is_scalar]):
                    scalar = tf.identity(fed, name=fed.op.name.replace('/', '_'))
                scalar.set_shape([])
                self._asserted_scalars[fed.name] = scalar

    def _placeholders(self) -> typing.List[tf.Operation]:
        """The placeholders that are fed to all towers."""
        return graph_walk.of_types(self._shared, PLACEHOLDERS)

    def _without_shape(self) -> typing.List[tf.Tensor]:
        """The placeholders that are fed to all towers, and have no static rank."""
        fed = [op.outputs[0] for op in self._placeholders()]
        return [tensor for tensor in fed if tensor.shape.ndims is None]

    def import_for(self, shard: typing.Any) -> ImportedModel:
        """Imports the model into the current name scope, with a shard in the place of the batch."""
        scope = self._graph.graph.get_name_scope() + '/'
        substitutes = self._shard_as_in_model(shard, scope)
        substitutes.update(self._asserted_scalars)
        try:
            imported = import_again(self._operations, substitutes, scope, mark_import)
        except TowersError:  # it is also a ValueError
            raise
        except ValueError as error:  # of TensorFlow's inference of shapes
            first_line = str(error).split('\n', 1)[0]
            raise self._import_error(first_line[:200], scope) from error
        self._keep_shapes(imported)
        output = map_leaves(imported.leaf, self.output)
        registered = [imported.tensor(loss) for loss in self._registered]
        return ImportedModel(output, registered, imported)

    def _shard_as_in_model(self, shard: typing.Any, scope: str) -> typing.Dict[str, tf.Tensor]:
        """{name of an input of the model: the tensor of the shard that takes its place}.

        Args:
          shard: the shard, with the examples along the first dimension of each tensor.
          scope: the name scope of the operations that put the examples along the model's dimension.
        """
        substitutes = {}
        for tensor, part in zip(self._graph.inputs, leaves_of(shard)):
            # A `BatchAxis` of a tensor of the batch, as in `{x: BatchAxis(batch, 1)}`, says nothing
            # of the model's `x`, which has the examples first.
            if tensor.name in self._axes:
                with tf.name_scope(scope + 'batch_axis/'):
                    part = self._axes[tensor.name].as_in_model(part)
            substitutes[tensor.name] = part
        return substitutes

    def _keep_shapes(self, imported: Imported) -> None:
        """Gives the imports the shapes that Python code has set, which are in no `GraphDef`. A
        dimension of a model of static size may be the size of the whole batch: of such a model, a
        result of unknown rank, as a loop has, gets its rank alone."""
        has_static_size = any(map(self._has_static_size, self._graph.inputs))
        for op in self._operations:
            for tensor in op.outputs:
                new = imported.tensor(tensor)
                if not has_static_size:
                    new.set_shape(tensor.shape)
                elif new.shape.ndims is None and tensor.shape.ndims is not None:
                    new.set_shape([None] * tensor.shape.ndims)

    def _has_static_size(self, tensor: tf.Tensor) -> bool:
        """Whether an input has a static number of examples."""
        if tensor.shape.ndims is None:
            return False
        axis = 0
        if tensor.name in self._axes:
            axis = self._axes[tensor.name].axis
        return tensor.shape.as_list()[axis] is not None

    def _import_error(self, why: str, scope: str) -> TowersError:
        """The error for a model that cannot be imported with a part of the batch, or with one
        number for a placeholder without a shape.

        Args:
          why: TensorFlow's sentence, which names the import of the operation that fails.
          scope: the name scope of the imports.
        """
        names_in_sentence = set(re.findall(r'[\w./-]+', why))
        inputs_of_failing: typing.List[tf.Tensor] = []
        for op in self._operations:
            if scope + op.name in names_in_sentence:
                inputs_of_failing += op.inputs
        upstream = graph_walk.ancestors(inputs_of_failing)
        for fed in self._without_shape():
            if fed.op.name in upstream:
                return InputError(
                    'the placeholder %s has no shape, and is not fed one number, as those that are '
                    'no inputs are (%s). %s' % (fed.name, why, _INSTEAD_OF_A_NUMBER))
        return ModelFunctionError(
            'the model cannot be computed for a part of the batch (%s). %s' % (why, WAYS_OUT))

    # ---- questions of the build ------------------------------------------------------------------

    def check_runs_no_update(self) -> None:
        """Refuses a build under `tf.control_dependencies` of the model's updates: the block would
        run them on one device, too."""
        awaited = names_of(compat.current_control_inputs(self._graph.graph))
        for update in self.output.updates:
            name = operation_of(update).name
            if name in awaited:
                raise ModelFunctionError(
                    'build_towers is called under tf.control_dependencies of %s, which its train '
                    'op runs by itself: call it outside of that block.' % name)

    def values_of_outputs(self, merged: ModelOutput) -> typing.Dict[str, tf.Tensor]:
        """{name of a tensor that the build was given: the tensor to fetch in its place}.

        A loss, a prediction or a metric gives its value over all towers. An input in whose place
        the caller feeds another tensor gives that tensor.

        Args:
          merged: the output over all towers.
        """
        values = dict(self._fed)
        for field in ('loss', 'predictions', 'metrics'):
            own_leaves = tf.nest.flatten(getattr(self.output, field))
            merged_leaves = tf.nest.flatten(getattr(merged, field))
            for tensor, value in zip(own_leaves, merged_leaves):
                if isinstance(tensor, tf.Tensor):  # else it is a number or None
                    values[tensor.name] = value
        return values

    def depending_on_inputs(self) -> typing.Set[str]:
        """The names of the operations that depend on the batch, also of operations that were made
        after the model."""
        return self._graph.reachable_from_inputs(self._graph.graph.get_operations())

    def operations_beside(self, tensor: tf.Tensor,
                          has: typing.Callable[[tf.Operation], bool]) -> typing.List[tf.Operation]:
        """The operations that `built.of(tensor)` imports for each tower: the operations that a
        tensor of the program needs, and that the towers do not have. They are in the order of
        making.

        Args:
          tensor: a tensor of the program.
          has: function of an operation: whether all towers have it.
        """
        def is_there(op: tf.Operation) -> bool:
            """Whether an operation is not imported, since all towers share it or have it."""
            if self._graph.is_shared(op):
                return True
            # A loop or branch is not imported in parts. So if the towers lack one of its results,
            # all operations in it that this result needs are imported, also operations that the
            # towers have.
            is_in_loop_or_branch = bool(_loops_around_result(op))
            return has(op) and not is_in_loop_or_branch

        needed = self._graph.needed([tensor], is_end=is_there)
        beside = []
        for op in self._graph.graph.get_operations():
            if op.name in needed and not is_there(op):
                beside.append(op)
        return beside

    # ---- the plan --------------------------------------------------------------------------------

    def plan_lines(self) -> typing.List[typing.Tuple[str, str]]:
        """Lines for the plan of the build: `[(label, text)]`."""
        return (self._lines_to_fetch() + self._lines_computed_whole() + self._lines_fed_to_all()
                + self._lines_not_run())

    def _lines_to_fetch(self) -> typing.List[typing.Tuple[str, str]]:
        """What a program fetches to have the towers' loss, in the place of its own loss tensor; []
        for a model without a loss."""
        losses = [loss for _, loss in with_parts('loss', self.output.loss) if loss is not None]
        if not losses:
            return []
        text = ('built.loss, built.of(tensor), also of a merged summary; %s itself, and what '
                'else the program has made, is computed on one device beside the towers, of '
                'weights before or after the update' % losses[0].name)
        if self._fed:
            one_of_them = min(self._fed)
            text += ', if %s is fed, too' % one_of_them
        return [('to fetch', text)]

    def _lines_computed_whole(self) -> typing.List[typing.Tuple[str, str]]:
        """Which inputs are computed from another input, of the whole batch on one device."""
        lines = []
        for tensor in self._graph.inputs:
            upstream = self._graph.inputs_upstream(tensor)
            if upstream:
                one_of_them = min(upstream)
                lines.append(('computed whole', '%s, from %s, on one device, unless it is fed' % (
                    tensor.name, one_of_them)))
        return lines

    def _lines_fed_to_all(self) -> typing.List[typing.Tuple[str, str]]:
        """Which placeholders are fed to all towers, since they are no inputs; and which of them a
        step asserts to be one number (`assert_scalars`)."""
        names = sorted(op.name for op in self._placeholders())
        if not names:
            return []
        text = ', '.join(names) + ': the same for all examples'
        without_shape = sorted(tensor.op.name for tensor in self._without_shape())
        if without_shape:
            text += '; one number for %s, of no shape' % ', '.join(without_shape)
        return [('fed to all', text)]

    def _lines_not_run(self) -> typing.List[typing.Tuple[str, str]]:
        """Which writes of the program no step runs, though they may belong to it."""
        forgotten = writes_perhaps_forgotten(self._graph, self.output)
        if not forgotten:
            return []
        names = ', '.join(forgotten[:2])
        if len(forgotten) > 2:
            names += ' and %d more' % (len(forgotten) - 2)
        return [('not run', names + (
            ': what depends on the batch is written into variables that are not trained; if it '
            'belongs to a step, pass ModelOutput(loss, updates=[...])'))]


def _loops_around_result(op: tf.Operation) -> list:
    """List of the loops and branches (v1) in which the result of an operation is: the loops and
    branches around the operation. For an `Exit`, which leads a value out of a loop, that loop is
    left out."""
    contexts = compat.contexts_around(op)  # from the inside
    if op.type == 'Exit':
        return contexts[1:]
    return contexts
