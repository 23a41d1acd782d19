"""A model that is in the graph already, in the place of a model function.

Most TF1 programs build their network of placeholders, and then minimize its loss. What the outputs
of such a model need, cut at its inputs, is imported once. The import is what a call of a model
function would have made:

    an input                 ->  shard 0
    what keeps state         ->  itself: variables, placeholders, tables, queues, iterators
    any other operation      ->  tower_0/…, with its loops and branches

The program's own operations stay as they are. They compute on one device, if they are fetched.
"""

import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import InputError, InvalidArgumentError, ModelFunctionError
from towers.graph import graph_walk
from towers.graph.graph_walk import fetches_in, leaves_of, map_leaves
from towers.graph.import_again import Imported, defining_operations, import_again
from towers.graph.op_types import DRAWS_DATA, PLACEHOLDERS, keeps_state
from towers.model.build_context import updates_of_no_build
from towers.model.losses import registered_losses
from towers.model.objectives import with_parts
from towers.model.outputs import ModelOutput, to_model_output
from towers.optimizers import OPTIMIZER_UPDATES
from towers.shards.batch_inputs import checked_inputs


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


class Entries(typing.NamedTuple):
    """Where the batch enters a finished model."""
    of_model: typing.Any
    """A nest of the tensors of the model that hold the batch."""
    batch: typing.Any
    """A nest of the same structure: the batch itself, mostly the same tensors."""


def entries_of(inputs: typing.Any) -> Entries:
    """The `Entries` of the inputs of a build: a nest of tensors of the model, or a dict from these
    to the tensors of the batch that take their places."""
    if isinstance(inputs, dict) and inputs and all(
            isinstance(key, (tf.Tensor, tf.SparseTensor)) for key in inputs):
        return Entries(tuple(inputs.keys()), tuple(inputs.values()))
    return Entries(inputs, inputs)


class OutputsOfBatch(typing.NamedTuple):
    """The batch's values of a program's own tensors."""
    values: typing.Dict[str, tf.Tensor]
    """{name of a tensor of the program: its value over all towers}."""
    from_inputs: typing.FrozenSet[str]
    """Names of the program's operations that depend on the batch."""

    def of(self, tensor: tf.Tensor) -> tf.Tensor:
        """See `BuiltTowers.of`."""
        if tensor.name in self.values:
            return self.values[tensor.name]
        if tensor.op.name not in self.from_inputs:
            return tensor
        raise InvalidArgumentError(
            '%s depends on the batch, and is no output of this build: pass it in '
            'ModelOutput(loss, metrics={…}) for its mean over the examples, or in predictions= for '
            'its rows.' % tensor.name)


class FinishedModel:
    """The operations that a model's outputs need, cut at the inputs of the build.

    Attributes:
      output: `ModelOutput` of the program's own tensors. Its updates are those that the program
        returned, and those in `UPDATE_OPS` that are the model's.
    """

    def __init__(self, output: ModelOutput, entries: Entries, num_parts: int):
        """Checks the model, and makes no operation. `num_parts` is how many parts a batch has."""
        self._graph = tf.get_default_graph()
        checked = checked_inputs(entries.of_model)
        _check_leaves(checked)
        _check_static_size(checked, checked_inputs(entries.batch), num_parts)
        self._inputs = leaves_of(entries.of_model)
        self._input_names = {tensor.name for tensor in self._inputs}
        self._input_operations = {tensor.op.name for tensor in self._inputs}
        registered = registered_losses()
        self._everything = self._graph.get_operations()
        self._from_inputs = graph_walk.reachable_from(
            [tensor.op for tensor in self._inputs], self._everything, control=True)
        self._registered = [loss for loss in registered if loss.op.name in self._from_inputs]
        self.output = output._replace(updates=self._updates(output))
        needed = self._needed(fetches_in(tuple(self.output)) + self._registered)
        self._operations = [op for op in self._everything
                            if op.name in needed and not self._is_shared(op)]
        self._shared = [op for op in needed.values() if self._is_shared(op)]
        self._check_operations()
        self._check_inputs(checked)
        self._check_losses()

    def import_for(self, shard: typing.Any) -> ImportedModel:
        """Imports the model into the current name scope, with a shard in the place of the batch."""
        scope = self._graph.get_name_scope() + '/'
        substitutes = {tensor.name: of_shard for tensor, of_shard
                       in zip(self._inputs, leaves_of(shard))}
        substitutes.update(self._scalars(scope))
        try:
            imported = import_again(self._operations, substitutes, scope)
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

    def outputs_of_batch(self, merged: ModelOutput) -> 'OutputsOfBatch':
        """The batch's values of the program's tensors; `merged` is the output over all towers."""
        values = {}
        for of_program, of_batch in zip((self.output.loss, self.output.predictions,
                                         self.output.metrics), merged):
            pairs = zip(tf.nest.flatten(of_program), tf.nest.flatten(of_batch))
            values.update((tensor.name, value) for tensor, value in pairs
                          if isinstance(tensor, tf.Tensor))
        return OutputsOfBatch(values, frozenset(self._from_inputs))

    def plan_lines(self) -> typing.List[typing.Tuple[str, str]]:
        """Lines for the plan of the build: `[(label, text)]`."""
        losses = [loss for _, loss in with_parts('loss', self.output.loss) if loss is not None]
        shared = sorted(op.name for op in self._shared if op.type in PLACEHOLDERS)
        lines = []
        if losses:
            lines.append(('to fetch', 'built.loss, built.of(tensor); %s itself, and what else the '
                          'program has made, is computed on one device beside the towers'
                          % losses[0].name))
        if shared:
            lines.append(('fed to all', ', '.join(shared) + ': the same for all examples'))
        return lines

    # ---- what is imported ------------------------------------------------------------------------

    def _updates(self, output):
        """The updates that the program returned, and those of `UPDATE_OPS` that depend on the
        inputs, or that the outputs wait for."""
        needed = self._needed(fetches_in(tuple(output)))
        listed = [update for update in updates_of_no_build(self._graph)
                  if _operation(update).name in self._from_inputs
                  or _operation(update).name in needed]
        given = [update for update in output.updates or ()
                 if not self._waits_for_keras_input(update)]
        return list({_operation(update).name: update for update in given + listed}.values())

    def _waits_for_keras_input(self, update):
        """Whether an update is one of those by which Keras 2 has defined a model, on a
        `keras.Input` that is no input of the build: it can never run."""
        return any(compat.is_keras_input(op) for op in self._needed([update]).values())

    def _needed(self, fetches):
        """{name: operation} of all that some tensors and operations need, up to the inputs and to
        what keeps state."""
        contexts = set()

        def needs(op):
            if self._is_shared(op):
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
        if any(tensor.shape.as_list()[:1] != [None] for tensor in self._inputs):
            return  # then a side of the batch's size may be among them
        for op in self._operations:
            for tensor in op.outputs:
                imported.tensor(tensor).set_shape(tensor.shape)

    # ---- checks ----------------------------------------------------------------------------------

    def _check_operations(self):
        for op in self._operations + self._shared:
            if op.type.startswith(DRAWS_DATA):
                raise InputError(
                    'the model computes with %s (%s), of which a step takes the next elements, and '
                    'each tower would take others: pass its results as inputs, all that the model '
                    'needs.' % (op.outputs[0].name, op.type))
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

    def _check_inputs(self, checked):
        taken = {tensor.name for op in self._operations for tensor in op.inputs}
        taken.update(fetch.name for fetch in fetches_in(tuple(self.output)))
        for path, leaf in checked.leaves:
            tensors = leaves_of([leaf])
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
