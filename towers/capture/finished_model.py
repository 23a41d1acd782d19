"""A model that is in the graph already, in the place of a model function.

Most TF1 programs build their network of placeholders, and then minimize its loss. What the outputs
of such a model need, cut at its inputs, is imported once. The import is what a call of a model
function would have made:

    an input                 ->  shard 0
    what keeps state         ->  itself: variables, placeholders, tables, queues, iterators
    any other operation      ->  tower_0/…, with its loops and branches

The program's own operations stay as they are. They compute on one device, if they are fetched.
"""

import re
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.capture.model_inputs import WAYS_OUT, Entries, checked_entries
from towers.errors import InputError, ModelFunctionError, TowersError
from towers.graph import graph_walk
from towers.graph.graph_walk import (
    fetches_in,
    leaves_of,
    map_leaves,
    names_of,
    operation_names,
    operation_of,
)
from towers.graph.import_again import Imported, defining_operations, import_again
from towers.graph.op_types import (
    ADDS,
    ADDS_ROWS,
    DRAWS_DATA,
    FEEDS_DATA,
    PLACEHOLDERS,
    SETS,
    VARIABLE_OPS,
    keeps_state,
)
from towers.graph.variable_access import Writes, initializers, metric_variables
from towers.model.build_context import updates_of_no_build
from towers.model.losses import registered_losses
from towers.model.objectives import with_parts
from towers.model.outputs import ModelOutput, to_model_output
from towers.optimizers import OPTIMIZER_UPDATES
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
    """Whether the model of a build is a finished one, as tensors or as `FinishedModel`."""
    if isinstance(model, (dict, ModelOutput)):
        return bool(fetches_in(model))
    return isinstance(model, (tf.Tensor, FinishedModel))


def output_of_finished(model: typing.Any, needs_loss: bool,
                       names: typing.Optional[typing.List[str]]) -> ModelOutput:
    """The `ModelOutput` of a loss, a dict of losses, or a `ModelOutput`. `needs_loss` says whether
    there is an optimizer; `names` are the names of several losses, or None."""
    if isinstance(model, dict):
        has_fields = set(model) <= set(ModelOutput._fields)
        model = ModelOutput(**model) if has_fields else ModelOutput(loss=model)
    for fetch in fetches_in(tuple(model) if isinstance(model, ModelOutput) else model):
        if fetch.graph is not tf.get_default_graph():
            raise ModelFunctionError(
                'model: %s is of another graph than the default one: call build_towers under the '
                'tf.Graph() of the model.' % fetch.name)
    return to_model_output(model, needs_loss, names)


class FinishedModel:
    """The operations that a model's outputs need, cut at the inputs of the build.

    Attributes:
      output: `ModelOutput` of the program's own tensors. Its updates are those that the program
        returned, and those in `UPDATE_OPS` that are the model's.
      operations_before: how many operations the graph had before those of the towers.
    """

    def __init__(self, output: ModelOutput, entries: Entries, num_parts: int):
        """Checks the model, and makes no operation. `num_parts` is how many parts a batch has."""
        self._graph = tf.get_default_graph()
        self._axes = entries.axes
        self._fed = entries.fed  # {name of an input: the tensor that is fed in its place}
        checked = checked_entries(entries, num_parts)
        self._inputs = leaves_of(entries.of_model)
        self._input_names = names_of(self._inputs)
        self._input_operations = operation_names(self._inputs)
        registered = registered_losses()
        self._everything = self._graph.get_operations()
        self.operations_before = len(self._everything)
        self._from_inputs = self._reachable_from_inputs(self._everything)
        self._registered = [loss for loss in registered if loss.op.name in self._from_inputs]
        self.output = output._replace(updates=self._updates(output))
        needed = self._needed(fetches_in(tuple(self.output)) + self._registered)
        self._operations: typing.List[tf.Operation] = []  # that are imported
        for op in self._everything:
            if op.name in needed and not self._is_shared(op):
                self._operations.append(op)
        self._shared = list(filter(self._is_shared, needed.values()))
        self._check_operations()
        self._check_shared()
        self._check_inputs(checked, list(map(leaves_of, tf.nest.flatten(entries.of_model))))
        self._check_losses()
        self._asserted_scalars: typing.Dict[str, tf.Tensor] = {}

    def _reachable_from_inputs(self, operations: typing.Iterable[tf.Operation],
                               control: bool = True) -> typing.Set[str]:
        """The names of those operations that depend on the batch, by data and, unless `control` is
        False, by control edges."""
        return graph_walk.reachable_from(
            list(map(operation_of, self._inputs)), operations, control=control)

    def _no_import(self, why: str, scope: str) -> TowersError:
        """The error for a model that cannot be imported into a name scope with a part of the batch,
        or with one number for a placeholder without a shape; `why` is TensorFlow's sentence."""
        named = set(re.findall(r'[\w./-]+', why))
        for op in self._operations:
            if scope + op.name not in named:
                continue
            upstream = graph_walk.ancestors(op.inputs)
            for fed in self._without_shape():
                if fed.op.name in upstream:
                    return InputError(
                        'the placeholder %s has no shape, and is not fed one number, as those that '
                        'are no inputs are (%s). %s' % (fed.name, why, _INSTEAD_OF_A_NUMBER))
        return ModelFunctionError(
            'the model cannot be computed for a part of the batch (%s). %s' % (why, WAYS_OUT))

    def assert_scalars(self) -> None:
        """Makes assertions that what is fed to placeholders without a shape is one number each: a
        batch that was fed there would enter every tower whole."""
        with tf.name_scope('same_for_all_examples'), tf.device(None), tf.device('/cpu:0'):
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

    def _without_shape(self) -> typing.List[tf.Tensor]:
        """The placeholders that are fed to all towers, and have no static rank."""
        return [op.outputs[0] for op in self._shared
                if op.type in PLACEHOLDERS and op.outputs[0].shape.ndims is None]

    def import_for(self, shard: typing.Any) -> ImportedModel:
        """Imports the model into the current name scope, with a shard in the place of the batch."""
        scope = self._graph.get_name_scope() + '/'
        substitutes = self._shard_as_in_model(shard, scope)
        substitutes.update(self._asserted_scalars)
        try:
            imported = import_again(self._operations, substitutes, scope, mark_import)
        except TowersError:
            raise
        except ValueError as error:  # of TensorFlow's inference of shapes
            raise self._no_import(str(error).split('\n', 1)[0][:200], scope) from error
        self._keep_shapes(imported)
        output = ModelOutput(*map_leaves(imported.leaf, tuple(self.output)))
        registered = [imported.tensor(loss) for loss in self._registered]
        return ImportedModel(output, registered, imported)

    def check_runs_no_update(self) -> None:
        """Refuses a build under `tf.control_dependencies` of the model's updates: these would run
        on one device, too."""
        waits_for = names_of(compat.current_control_inputs(self._graph))
        for update in self.output.updates:
            if operation_of(update).name in waits_for:
                raise ModelFunctionError(
                    'build_towers is called under tf.control_dependencies of %s, which its train '
                    'op runs by itself: call it outside of that block.' % operation_of(update).name)

    def values_of_outputs(self, merged: ModelOutput) -> typing.Dict[str, tf.Tensor]:
        """What to fetch in the place of each tensor that the build was given: `{its name: the
        tensor}`.

        A loss, a prediction or a metric gives its value over all towers. An input in whose place
        the caller feeds another tensor gives that tensor.

        Args:
          merged: the output over all towers.
        """
        values = dict(self._fed)
        own = self.output
        for of_program, of_batch in (
                (own.loss, merged.loss), (own.predictions, merged.predictions),
                (own.metrics, merged.metrics)):
            for tensor, value in zip(tf.nest.flatten(of_program), tf.nest.flatten(of_batch)):
                if isinstance(tensor, tf.Tensor):
                    values[tensor.name] = value
        return values

    def depending_on_inputs(self) -> typing.Set[str]:
        """The names of the operations that depend on the batch, also of those that were made after
        the model."""
        return self._reachable_from_inputs(self._graph.get_operations())

    def operations_beside(self, tensor: tf.Tensor,
                          has: typing.Callable[[tf.Operation], bool]) -> typing.List[tf.Operation]:
        """The operations of the program that a tensor needs beside those that towers have, in the
        order in which they were made.

        Args:
          tensor: a tensor of the program.
          has: function of an operation: whether all towers have it.
        """
        def is_end(op: tf.Operation) -> bool:
            """Whether the search ends at an operation: all towers have it, or share it."""
            if self._is_shared(op):
                return True
            contexts = compat.contexts_around(op)
            if op.type == 'Exit':  # its result is outside of the loop
                contexts = contexts[1:]
            return has(op) and not contexts

        needed = self._needed([tensor], is_end)
        beside = []
        for op in self._graph.get_operations():
            if op.name in needed and not is_end(op):
                beside.append(op)
        return beside

    def plan_lines(self) -> typing.List[typing.Tuple[str, str]]:
        """Lines for the plan of the build: `[(label, text)]`."""
        losses = [loss for _, loss in with_parts('loss', self.output.loss) if loss is not None]
        shared = sorted(op.name for op in self._shared if op.type in PLACEHOLDERS)
        lines = []
        if losses:
            text = ('built.loss, built.of(tensor), also of a merged summary; %s itself, and what '
                    'else the program has made, is computed on one device beside the towers, of '
                    'weights before or after the update' % losses[0].name)
            if self._fed:
                text += ', if %s is fed, too' % min(self._fed)
            lines.append(('to fetch', text))
        for tensor in self._inputs:
            upstream = graph_walk.ancestors(tensor.op.inputs) & self._input_operations
            if upstream:
                lines.append(('computed whole', '%s, from %s, on one device, unless it is fed' % (
                    tensor.name, min(upstream))))
        if shared:
            text = ', '.join(shared) + ': the same for all examples'
            without_shape = sorted(tensor.op.name for tensor in self._without_shape())
            if without_shape:
                text += '; one number for %s, of no shape' % ', '.join(without_shape)
            lines.append(('fed to all', text))
        forgotten = self._writes_perhaps_forgotten()
        if forgotten:
            names = ', '.join(forgotten[:2])
            if len(forgotten) > 2:
                names += ' and %d more' % (len(forgotten) - 2)
            lines.append(('not run', names + (
                ': what depends on the batch is written into variables that are not trained; if it '
                'belongs to a step, pass ModelOutput(loss, updates=[...])')))
        return lines

    def _writes_perhaps_forgotten(self) -> typing.List[str]:
        """Names of the operations that write a value of the batch, are not in the step, and may
        belong to it. Left out: writes that only touch trained variables, their slots, or metrics.
        """
        from_batch = self._reachable_from_inputs(self._everything, control=False)
        computed = self._needed(fetches_in(tuple(self.output))).keys() | initializers()
        trained = operation_names(tf.trainable_variables())
        counters = metric_variables().keys()
        types = SETS | ADDS | ADDS_ROWS
        finder = Writes(self._graph)
        forgotten = []
        for op in self._everything:
            if op.type not in types or op.name not in from_batch or op.name in computed:
                continue
            for variable in set(finder.of(op)) - trained - counters:
                # An optimizer's slots are named so: w/Adam.
                is_slot = variable.rsplit('/', 1)[0] in trained
                if not is_slot:
                    forgotten.append(op.name)
                    break
        return forgotten

    # ---- what is imported ------------------------------------------------------------------------

    def _updates(self, output: ModelOutput) -> list:
        """The updates of the model, each once; a step runs them after all towers' reads.

        Of what the program returned, all but updates of a `keras.Input`, which no step can run. Of
        `UPDATE_OPS`, of the Keras 2 layers of a functional model and of Keras 3 layers, the updates
        that depend on the inputs, that the outputs wait for, or that write a variable from which
        the outputs are computed, such as a counter.
        """
        updates = {}  # by the name of the operation
        for update in output.updates or ():
            if not self._waits_for_keras_input(update):
                updates[operation_of(update).name] = update
        needed = self._needed(fetches_in(tuple(output)))
        variables = {name for name, op in needed.items() if op.type in VARIABLE_OPS}
        of_keras = compat.keras_updates_behind(needed.values()) + self._keras_3_updates()
        for update in updates_of_no_build(self._graph) + of_keras:
            name = operation_of(update).name
            is_of_model = name in self._from_inputs or name in needed
            if is_of_model or self._writes_any(update, variables):
                updates[name] = update
        return list(updates.values())

    def _keras_3_updates(self) -> typing.List[tf.Operation]:
        """The writes that were made in calls of Keras 3 layers, and that depend on the inputs or on
        a variable, as the counter of a dropout does. Others set weights that a layer was given."""
        types = SETS | ADDS | ADDS_ROWS
        left_out = initializers()
        writes = []
        for op in self._everything:
            if op.type not in types or op.name in left_out or compat.in_control_flow(op):
                continue
            depends = op.name in self._from_inputs or op.type not in SETS or any(
                each.type in VARIABLE_OPS for each in self._needed([op.inputs[1]]).values())
            if depends and compat.is_made_in_keras_3_call(op):
                writes.append(op)
        return writes

    def _writes_any(self, update: typing.Any, variables: typing.Set[str]) -> bool:
        """Whether an update writes any of the variables of these names."""
        finder = Writes(self._graph)
        operations = self._needed([update]).values()
        return any(variables.intersection(finder.of(op)) for op in operations)

    def _waits_for_keras_input(self, update: typing.Any) -> bool:
        """Whether an update is one of those by which Keras 2 has defined a model, on a
        `keras.Input` that is no input of the build: it can never run."""
        return any(map(compat.is_keras_input, self._needed([update]).values()))

    def _needed(self, fetches: typing.Iterable,
                is_end: typing.Optional[typing.Callable] = None) -> typing.Dict[str, tf.Operation]:
        """{name: operation} of all that some tensors and operations need, up to the inputs and to
        what keeps state; or up to where the function `is_end` of an operation is True."""
        contexts: typing.Set[str] = set()  # names of loops and branches that were looked at
        ends = is_end or self._is_shared

        def needs(op: tf.Operation) -> typing.List[tf.Operation]:
            """What one operation needs directly, with what makes the loops around it."""
            if ends(op):
                return []
            needed = [tensor.op for tensor in op.inputs if tensor.name not in self._input_names]
            for other in op.control_inputs:
                if other.name not in self._input_operations:
                    needed.append(other)
            for context in compat.contexts_around(op):
                if context.name not in contexts:
                    contexts.add(context.name)
                    needed += defining_operations(context)
            return needed

        starts = [fetch for fetch in fetches if fetch.name not in self._input_names]
        return graph_walk.reached(map(operation_of, starts), needs)

    def _is_shared(self, op: tf.Operation) -> bool:
        """Whether an operation keeps state, or is fed: it is not imported."""
        if op.type == 'PlaceholderWithDefault':
            return op.name not in self._from_inputs
        return op.type in PLACEHOLDERS or keeps_state(op)

    def _shard_as_in_model(self, shard: typing.Any, scope: str) -> typing.Dict[str, tf.Tensor]:
        """{name of an input of the model: the shard's tensor, with the model's order of
        dimensions}; operations for that are made in a name scope."""
        substitutes = dict(zip((tensor.name for tensor in self._inputs), leaves_of(shard)))
        for name, batch_axis in self._axes.items():
            if name in substitutes:
                with tf.name_scope(scope + 'batch_axis/'):
                    substitutes[name] = batch_axis.as_in_model(substitutes[name])
        return substitutes

    def _keep_shapes(self, imported: Imported) -> None:
        """Gives the imports the shapes that Python code has set, which are in no `GraphDef`."""
        if any(map(self._has_static_size, self._inputs)):
            return  # then a side of the batch's size may be among them
        for op in self._operations:
            for tensor in op.outputs:
                imported.tensor(tensor).set_shape(tensor.shape)

    def _has_static_size(self, tensor: tf.Tensor) -> bool:
        """Whether an input has a static number of examples, or is a scalar."""
        if tensor.shape.ndims is None:
            return False
        axis = self._axes[tensor.name].axis if tensor.name in self._axes else 0
        return tensor.shape.as_list()[axis:axis + 1] != [None]

    # ---- checks ----------------------------------------------------------------------------------

    def _check_operations(self) -> None:
        """Refuses a model that needs operations which only one tower may run."""
        for op in self._operations + self._shared:
            if op.type.startswith(DRAWS_DATA):
                raise InputError(
                    'the model computes with %s (%s), of which a step takes the next elements, and '
                    'each tower would take others: pass its results as inputs, all that the model '
                    'needs.' % (op.outputs[0].name, op.type))
            if op.type.startswith(FEEDS_DATA):
                raise ModelFunctionError(
                    'the model waits for %s (%s), which puts elements into a queue: each tower '
                    'would do so. Leave that to the queue runners.' % (op.name, op.type))
            if OPTIMIZER_UPDATES.search(op.type):
                raise ModelFunctionError(
                    'the model waits for %s, which updates a variable: pass the loss as it is '
                    'before an optimizer minimizes it.' % op.name)

    def _check_shared(self) -> None:
        """Refuses a model that needs a placeholder which may hold a batch, and is no input."""
        for op in self._shared:
            if op.type not in PLACEHOLDERS:
                continue
            shape = op.outputs[0].shape
            if shape.ndims and shape.as_list()[0] is None:
                raise InputError(
                    'the model computes with the placeholder %s of shape %s, which may hold a '
                    'batch, and each tower would compute with all of it: pass it as one of the '
                    'inputs; or, if it is the same for all examples, give it a static first '
                    'dimension, such as [4].' % (op.outputs[0].name, shape))

    def _check_inputs(self, checked: Inputs,
                      inputs_by_leaf: typing.Sequence[typing.List[tf.Tensor]]) -> None:
        """Refuses inputs that the model does not need, and one that is given twice.
        `inputs_by_leaf` has the tensors of the model for each leaf of the `checked` ones."""
        read = names_of(fetches_in(tuple(self.output)))
        for op in self._operations:
            read |= names_of(op.inputs)
        path_of: typing.Dict[str, str] = {}  # of each tensor
        for (path, _), tensors in zip(checked.leaves, inputs_by_leaf):
            if not tensors:
                continue
            earlier = path_of.setdefault(tensors[0].name, path)
            if earlier != path:
                raise InputError('%s and %s are the same tensor, %s: pass it once.' % (
                    earlier, path, tensors[0].name))
            if read.isdisjoint(names_of(tensors)):
                raise InputError(
                    '%s (%s) does not reach the loss, or another output of the model: if the model '
                    'is computed from what this one is computed from, or into, pass that; if a '
                    'metric alone needs it, pass ModelOutput(loss, metrics={…}); and leave it out, '
                    'if the model does not need it.' % (path, tensors[0].name))

    def _check_losses(self) -> None:
        """Refuses a loss that does not depend on the inputs."""
        reached = self._reachable_from_inputs(self._operations)
        for name, loss in with_parts('loss', self.output.loss):
            if loss is not None and loss.op.name not in reached:
                raise ModelFunctionError(
                    'the %s, %s, does not depend on the inputs: every tower would compute the '
                    'same.' % (name, loss.name))
