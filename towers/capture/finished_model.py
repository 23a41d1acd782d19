"""A model that is in the graph already, in the place of a model function.

Most TF1 programs build their network of placeholders, and then minimize its loss. What the outputs
of such a model need, cut at its inputs, is imported once. The import is what a call of a model
function would have made:

    an input                 ->  shard 0
    what keeps state         ->  itself: variables, placeholders, tables, queues, iterators
    any other operation      ->  tower_0/…, with its loops and branches

The program's own operations stay as they are. They compute on one device, if they are fetched.
"""

import dataclasses
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.arguments import check_instance
from towers.errors import InputError, ModelFunctionError, TowersError
from towers.graph import graph_walk
from towers.graph.graph_walk import fetches_in, leaves_of, map_leaves
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
from towers.shards.batch_inputs import checked_inputs
from towers.whole_batch.batch_values import mark_import


class ImportedModel(typing.NamedTuple):
    """What a call of a model function would have returned and registered."""
    output: ModelOutput
    registered: typing.List[tf.Tensor]
    """The registered losses that depend on the shard."""
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
        model = ModelOutput(**model) if set(model) <= set(ModelOutput._fields) else (
            ModelOutput(loss=model))
    fetches = fetches_in(tuple(model)) if isinstance(model, ModelOutput) else [model]
    for fetch in fetches:
        if fetch.graph is not tf.get_default_graph():
            raise ModelFunctionError(
                'model: %s is of another graph than the default one: call build_towers under the '
                'tf.Graph() of the model.' % fetch.name)
    return to_model_output(model, needs_loss, names)


_WAYS_OUT = (
    'Build the model for any batch size (placeholders [None, …], tf.shape(x)[0] for the size); or '
    'for the size of a part, and pass {x: batch} as inputs, a tensor of all parts for each x.')


@dataclasses.dataclass(frozen=True, eq=False)
class BatchAxis:
    """A tensor of a finished model whose examples are along another dimension than the first.

    In `build_towers(model.loss, (BatchAxis(model.words, 1), model.labels), …)` the placeholder
    `model.words` [time, examples] is fed as before. The batch is cut along that dimension, and each
    tower gets its part in the same order of dimensions.

    Attributes:
      tensor: a dense tensor of known rank, where the batch enters the model.
      axis: the dimension of its examples, an int from 0 to the rank, without that.

    Raises:
      InputError: a tensor that has no such dimension.
      InvalidArgumentError: `tensor` is no dense tensor.
    """
    tensor: tf.Tensor
    axis: int

    def __post_init__(self):
        check_instance('tensor', self.tensor, tf.Tensor, 'a dense tensor of a finished model')
        rank = self.tensor.shape.ndims
        if rank is None or type(self.axis) is not int or not 0 <= self.axis < rank:
            raise InputError(
                'BatchAxis(%s, %.80r): the tensor has the shape %s, and expected is the number of '
                'one of its dimensions, from 0 on.' % (
                    self.tensor.name, self.axis, self.tensor.shape))

    def order(self) -> typing.List[int]:
        """The dimensions of the tensor with that of the examples as the first."""
        others = [axis for axis in range(self.tensor.shape.ndims) if axis != self.axis]
        return [self.axis] + others


class Entries(typing.NamedTuple):
    """Where the batch enters a finished model: three nests of one structure."""
    of_model: typing.Any
    """The tensors of the model that hold the batch."""
    by_example: typing.Any
    """The same with the examples along the first dimension."""
    batch: typing.Any
    """The batch itself with the examples along the first dimension, mostly the same tensors."""
    axes: typing.Dict[str, BatchAxis]
    """{name of a tensor of the model: its axis}, where that is not the first."""


def entries_of(inputs: typing.Any) -> Entries:
    """The `Entries` of the inputs of a build: a nest of tensors of the model, or a dict from these
    to the tensors of the batch that take their places. A `BatchAxis` makes a transposition."""
    if is_by_tensor(inputs):
        given, batch = tuple(inputs.keys()), tuple(inputs.values())
    else:
        given, batch = inputs, inputs
    axes = {leaf.tensor.name: leaf for leaf in tf.nest.flatten([given, batch])
            if isinstance(leaf, BatchAxis)}
    if not axes:
        return Entries(given, given, batch, axes)
    for leaf in axes.values():
        if leaf.tensor.graph is not tf.get_default_graph():
            raise InputError('%s of a BatchAxis is of another graph than the default one.'
                             % leaf.tensor.name)
    with tf.name_scope('batch_axis'), tf.device('/cpu:0'):
        turned = {name: tf.transpose(leaf.tensor, leaf.order()) for name, leaf in axes.items()}

    def by_example(leaf):
        return turned[leaf.tensor.name] if isinstance(leaf, BatchAxis) else leaf

    def of_model(leaf):
        return leaf.tensor if isinstance(leaf, BatchAxis) else leaf
    return Entries(tf.nest.map_structure(of_model, given), tf.nest.map_structure(by_example, given),
                   tf.nest.map_structure(by_example, batch), axes)


def is_by_tensor(inputs: typing.Any) -> bool:
    """Whether inputs are a dict from tensors of the model to those that take their places."""
    return isinstance(inputs, dict) and bool(inputs) and all(
        isinstance(key, (tf.Tensor, tf.SparseTensor, BatchAxis)) for key in inputs)


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
        checked = checked_inputs(entries.by_example)
        _check_leaves(checked)
        _check_static_size(checked, checked_inputs(entries.batch), num_parts)
        self._inputs = leaves_of(entries.of_model)
        self._input_names = {tensor.name for tensor in self._inputs}
        self._input_operations = {tensor.op.name for tensor in self._inputs}
        registered = registered_losses()
        self._everything = self._graph.get_operations()
        self.operations_before = len(self._everything)
        self._from_inputs = graph_walk.reachable_from(
            [tensor.op for tensor in self._inputs], self._everything, control=True)
        self._registered = [loss for loss in registered if loss.op.name in self._from_inputs]
        self.output = output._replace(updates=self._updates(output))
        needed = self._needed(fetches_in(tuple(self.output)) + self._registered)
        self._operations = [op for op in self._everything
                            if op.name in needed and not self._is_shared(op)]
        self._shared = [op for op in needed.values() if self._is_shared(op)]
        self._check_operations()
        self._check_inputs(checked, list(map(leaves_of, tf.nest.flatten(entries.of_model))))
        self._check_losses()

    def import_for(self, shard: typing.Any) -> ImportedModel:
        """Imports the model into the current name scope, with a shard in the place of the batch."""
        scope = self._graph.get_name_scope() + '/'
        substitutes = self._shard_as_in_model(shard, scope)
        substitutes.update(self._scalars(scope))
        try:
            imported = import_again(self._operations, substitutes, scope, mark_import)
        except TowersError:
            raise
        except ValueError as error:  # of TensorFlow's inference of shapes
            raise ModelFunctionError(
                'the model cannot be computed for a part of the batch (%s). %s' % (
                    str(error).split('\n', 1)[0][:200], _WAYS_OUT)) from error
        self._keep_shapes(imported)
        output = ModelOutput(*map_leaves(imported.leaf, tuple(self.output)))
        registered = [imported.tensor(loss) for loss in self._registered]
        return ImportedModel(output, registered, imported)

    def check_runs_no_update(self) -> None:
        """Refuses a build under `tf.control_dependencies` of the model's updates: these would run
        on one device, too."""
        waits_for = {op.name for op in compat.current_control_inputs(self._graph)}
        for update in self.output.updates:
            if _operation(update).name in waits_for:
                raise ModelFunctionError(
                    'build_towers is called under tf.control_dependencies of %s, which its train '
                    'op runs by itself: call it outside of that block.' % _operation(update).name)

    def values_of_outputs(self, merged: ModelOutput) -> typing.Dict[str, tf.Tensor]:
        """{name of a tensor of the program: its value over all towers}, of the tensors that the
        build was given; `merged` is the output over all towers."""
        values = {}
        for of_program, of_batch in zip((self.output.loss, self.output.predictions,
                                         self.output.metrics), merged):
            pairs = zip(tf.nest.flatten(of_program), tf.nest.flatten(of_batch))
            values.update((tensor.name, value) for tensor, value in pairs
                          if isinstance(tensor, tf.Tensor))
        return values

    def depending_on_inputs(self) -> typing.Set[str]:
        """The names of the operations that depend on the batch, also of those that were made after
        the model."""
        return graph_walk.reachable_from(
            [tensor.op for tensor in self._inputs], self._graph.get_operations(), control=True)

    def operations_beside(self, tensor: tf.Tensor,
                          has: typing.Callable[[tf.Operation], bool]) -> typing.List[tf.Operation]:
        """The operations of the program that a tensor needs beside those that towers have, in the
        order in which they were made.

        Args:
          tensor: a tensor of the program.
          has: function of an operation: whether all towers have it.
        """
        def is_end(op):
            return self._is_shared(op) or has(op) and not compat.contexts_around(op)
        needed = self._needed([tensor], is_end)
        return [op for op in self._graph.get_operations()
                if op.name in needed and not is_end(op)]

    def plan_lines(self) -> typing.List[typing.Tuple[str, str]]:
        """Lines for the plan of the build: `[(label, text)]`."""
        losses = [loss for _, loss in with_parts('loss', self.output.loss) if loss is not None]
        shared = sorted(op.name for op in self._shared if op.type in PLACEHOLDERS)
        lines = []
        if losses:
            lines.append(('to fetch', 'built.loss, built.of(tensor); %s itself, and what else the '
                          'program has made, is computed on one device beside the towers, of '
                          'weights before or after the update'
                          % losses[0].name))
        if shared:
            lines.append(('fed to all', ', '.join(shared) + ': the same for all examples'))
        left_out = self._writes_left_out()
        if left_out:
            more = '' if len(left_out) <= 2 else ' and %d more' % (len(left_out) - 2)
            lines.append(('not run', '%s%s: what depends on the batch is written into variables '
                          'that are not trained; if it belongs to a step, pass ModelOutput(loss, '
                          'updates=[...])' % (', '.join(left_out[:2]), more)))
        return lines

    def _writes_left_out(self):
        """The names of the program's writes of what depends on the batch that no step runs, and of
        which nothing says that they are not the model's: no metric, no part of an optimizer."""
        from_batch = graph_walk.reachable_from(
            [tensor.op for tensor in self._inputs], self._everything)
        computed = self._needed(fetches_in(tuple(self.output))).keys() | initializers()
        trained = {variable.op.name for variable in tf.trainable_variables()}
        known = trained | metric_variables().keys()
        writes = Writes(self._graph)
        found = []
        for op in self._everything:
            is_write = op.type in SETS or op.type in ADDS or op.type in ADDS_ROWS
            if not is_write or op.name not in from_batch or op.name in computed:
                continue
            written = [name for name in writes.of(op) if name not in known]
            # An optimizer's slots are named so: w/Adam.
            if any(name.rsplit('/', 1)[0] not in trained for name in written):
                found.append(op.name)
        return found

    # ---- what is imported ------------------------------------------------------------------------

    def _updates(self, output):
        """The updates that the program returned, and those of `UPDATE_OPS`, and of the Keras layers
        of a functional model, that are the model's.

        These depend on the inputs, or the outputs wait for them, or they write a variable that the
        outputs are computed from, such as a counter: they are to come after all towers' reads.
        """
        needed = self._needed(fetches_in(tuple(output)))
        of_keras = compat.keras_updates_behind(needed.values())
        variables = {name for name, op in needed.items() if op.type in VARIABLE_OPS}
        finder = Writes(self._graph)
        listed = []
        for update in updates_of_no_build(self._graph) + of_keras:
            name = _operation(update).name
            if name in self._from_inputs or name in needed or variables.intersection(
                    self._written(update, finder)):
                listed.append(update)
        given = [update for update in output.updates or ()
                 if not self._waits_for_keras_input(update)]
        return list({_operation(update).name: update for update in given + listed}.values())

    def _written(self, update, finder):
        """The names of the variables that an update writes: a list."""
        return [name for op in self._needed([update]).values() for name in finder.of(op)]

    def _waits_for_keras_input(self, update):
        """Whether an update is one of those by which Keras 2 has defined a model, on a
        `keras.Input` that is no input of the build: it can never run."""
        return any(compat.is_keras_input(op) for op in self._needed([update]).values())

    def _needed(self, fetches, is_end=None):
        """{name: operation} of all that some tensors and operations need, up to the inputs and to
        what keeps state; or up to where the function `is_end` of an operation is True."""
        contexts = set()
        is_end = is_end or self._is_shared

        def needs(op):
            if is_end(op):
                return []
            needed = [tensor.op for tensor in op.inputs if tensor.name not in self._input_names]
            needed += [other for other in op.control_inputs
                       if other.name not in self._input_operations]
            for context in compat.contexts_around(op):
                if context.name not in contexts:
                    contexts.add(context.name)
                    needed += defining_operations(context)
            return needed
        ends = [fetch for fetch in fetches if fetch.name not in self._input_names]
        return graph_walk.reached(list(map(_operation, ends)), needs)

    def _is_shared(self, op):
        """Whether an operation keeps state, or is fed: it is not imported."""
        if op.type == 'PlaceholderWithDefault':
            return op.name not in self._from_inputs
        return op.type in PLACEHOLDERS or keeps_state(op)

    def _shard_as_in_model(self, shard, scope):
        """{name of an input of the model: the shard's tensor, with the model's order of dimensions}
        """
        substitutes = {tensor.name: of_shard for tensor, of_shard
                       in zip(self._inputs, leaves_of(shard))}
        for name, of_model in self._axes.items():
            if name in substitutes:
                order = of_model.order()
                inverse = [order.index(axis) for axis in range(len(order))]
                with tf.name_scope(scope + 'batch_axis/'):
                    substitutes[name] = tf.transpose(substitutes[name], inverse)
        return substitutes

    def _scalars(self, scope):
        """Substitutes of the placeholders without a shape, {name: tensor}: scalars, or the step
        fails. Of a batch that was fed there each tower would compute with all of it."""
        substitutes = {}
        with tf.name_scope(scope + 'same_for_all_examples/'):
            for op in self._shared:
                if op.type in PLACEHOLDERS and op.outputs[0].shape.ndims is None:
                    substitutes[op.outputs[0].name] = tf.ensure_shape(
                        op.outputs[0], [], name=op.name.replace('/', '_'))
        return substitutes

    def _keep_shapes(self, imported):
        """Gives the imports the shapes that Python code has set, which are in no `GraphDef`."""
        if any(self._has_static_size(tensor) for tensor in self._inputs):
            return  # then a side of the batch's size may be among them
        for op in self._operations:
            for tensor in op.outputs:
                imported.tensor(tensor).set_shape(tensor.shape)

    def _has_static_size(self, tensor):
        if tensor.shape.ndims is None:
            return False
        axis = self._axes[tensor.name].axis if tensor.name in self._axes else 0
        return tensor.shape.as_list()[axis:axis + 1] != [None]

    # ---- checks ----------------------------------------------------------------------------------

    def _check_operations(self):
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
        for op in self._shared:
            shape = op.outputs[0].shape
            if op.type in PLACEHOLDERS and shape.ndims and shape.as_list()[0] is None:
                raise InputError(
                    'the model computes with the placeholder %s of shape %s, which may hold a '
                    'batch, and each tower would compute with all of it: pass it as one of the '
                    'inputs; or, if it is the same for all examples, set its first dimension, by '
                    'its set_shape.' % (op.outputs[0].name, shape))

    def _check_inputs(self, checked, inputs_by_leaf):
        taken = {tensor.name for op in self._operations for tensor in op.inputs}
        taken.update(fetch.name for fetch in fetches_in(tuple(self.output)))
        for (path, _), tensors in zip(checked.leaves, inputs_by_leaf):
            if tensors and taken.isdisjoint(tensor.name for tensor in tensors):
                raise InputError(
                    '%s (%s) does not reach the loss, or another output of the model: pass the '
                    'tensors that it is computed from, such as its placeholders.' % (
                        path, tensors[0].name))
            behind = set().union(*(graph_walk.ancestors(tensor.op.inputs) for tensor in tensors))
            others = behind & self._input_operations
            if others:
                raise InputError(
                    '%s (%s) is computed from another of the inputs, %s: pass one of the two.'
                    % (path, tensors[0].name, min(others)))

    def _check_losses(self):
        reached = graph_walk.reachable_from(
            [tensor.op for tensor in self._inputs], self._operations, control=True)
        for name, loss in with_parts('loss', self.output.loss):
            if loss is not None and loss.op.name not in reached:
                raise ModelFunctionError(
                    'the %s, %s, does not depend on the inputs: every tower would compute the '
                    'same.' % (name, loss.name))


def _check_leaves(checked):
    for path, leaf in checked.leaves:
        if leaf is not None and not isinstance(leaf, (tf.Tensor, tf.SparseTensor)):
            raise InputError(
                '%s is a %s: the inputs of a finished model are the tensors of its graph at which '
                'the batch enters, such as its placeholders.' % (path, type(leaf).__name__))


def _check_static_size(of_model, batch, num_parts):
    """Refuses a model for a batch of a static size that a part of the batch does not have."""
    if of_model.size is None or num_parts == 1 or batch.size == num_parts * of_model.size:
        return
    path = next(path for path, _ in of_model.leaves if path not in of_model.unknown)
    raise InputError(
        '%s has the static size %d, which may be in constants of the finished model, and a part of '
        'the batch has another one. %s' % (path, of_model.size, _WAYS_OUT))


def _operation(fetch):
    """The operation of a tensor, or of a variable; an operation itself."""
    return getattr(fetch, 'op', fetch)
