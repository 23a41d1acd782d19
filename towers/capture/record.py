"""Records the model on shard 0, as a value: one call of the model function, in the caller's scopes;
or the import of a finished model."""

import collections
import contextlib
import re

import tensorflow.compat.v1 as tf

from towers.capture.finished_model import FinishedModel
from towers.capture.stage_cuts import cut_into_stages
from towers.errors import ModelFunctionError, TowersError
from towers.graph import graph_walk
from towers.graph.graph_walk import leaves_of
from towers.graph.variable_access import variables_read
from towers.model.build_context import BuildCollections, call_of_model_fn, without
from towers.model.keras_calls import record_keras_calls, unique
from towers.model.losses import registered_losses
from towers.model.outputs import call_model_fn, to_model_output
from towers.placement.numerics import compiled
from towers.placement.stages import (
    keep_arrays_with_readers,
    keep_stacks_with_loops,
    place_forward,
    says_stages,
)
from towers.placement.tower_device import TowerDevice, check_reads_in_loops, stages_of
from towers.variables.new_variables import NewVariables
from towers.whole_batch.batch_values import is_batch_value
from towers.whole_batch.proven import prove


class Recorded(collections.namedtuple('Recorded', [
        'output', 'operations', 'sources', 'from_shard', 'created', 'direct', 'owned', 'variables',
        'updates', 'registered', 'registered_before', 'keras_losses', 'keras_states',
        'opened_scopes', 'proven', 'imported'])):
    """A call of the model function, or the import of a finished model.

    Attributes:
      output: `ModelOutput`.
      operations: list of the operations that the call made, in order.
      sources: list of the operations of the shard.
      from_shard: names of the operations that depend on the shard, or on random numbers; dependence
        through `batch_sum` and its like does not count.
      created, direct, owned, opened_scopes: as of `NewVariables`.
      variables: the variables that the call made or reads.
      updates: list of the call's `UPDATE_OPS`, of updates of Keras layers, and of returned updates.
      registered, registered_before: the losses that the call put into `REGULARIZATION_LOSSES`, and
        the losses that were there before the build.
      keras_losses: `(of weights, of activations)`: the losses of the Keras layers that were called.
      keras_states: the variables that Keras layers call their state.
      proven: `Proven`: where the examples are in its tensors, and which batch norms have the
        statistics of the whole batch.
      imported: `Imported`, of a finished model; None where a model function was called.
    """
    __slots__ = ()


def record(request, batch, number, around=contextlib.nullcontext):
    """Calls the model function on part `number` of the batch, 0 but for the recipe's later calls,
    or imports the finished model for it: `Recorded`. `around` makes a further context of that."""
    graph, inputs, parts = tf.get_default_graph(), batch.inputs[number], len(request.split.parts)
    before, registered_before = BuildCollections(graph), registered_losses()
    made_variables = NewVariables(request.placement, None if number else request.call.earlier)
    reuse = tf.AUTO_REUSE if number else request.call.reuse
    adds_registered = request.training.regularization == 'add'
    with graph_walk.Recording(graph) as made, \
            tf.device(TowerDevice(request.split.parts[number].device)):
        with made_variables.recorded(request.call.variable_scope, reuse), \
                record_keras_calls() as keras, compiled(request.numerics.xla), around(), \
                call_of_model_fn(graph, made_variables, parts, request.no_batch_values):
            if isinstance(request.call.model, FinishedModel):
                returned, registered, imported = request.call.model.import_for(inputs)
            else:
                whole_size = batch.batch_size if parts > 1 else None
                returned = _call(request.call.model, inputs, whole_size)
                registered, imported = [], None
            objectives = request.training.objectives
            output = to_model_output(returned, bool(objectives), objectives.names)
            updates = unique(before.new_updates() + keras.updates() + list(output.updates or ()))
            keras_losses = keras.weight_losses(), keras.activity_losses() if adds_registered else []
            registered = without(registered_losses(), registered_before) + registered
            proven = prove(made.so_far(), inputs, output, updates,
                           registered + keras_losses[1], request)
            output = proven.output
    sources = [leaf.op for leaf in leaves_of(inputs)]
    read = variables_read(made.operations, made_variables.owned, made_variables.created)
    names = {variable.op.name for variable in made_variables.created}
    return Recorded(
        output=output, operations=made.operations, sources=sources,
        from_shard=graph_walk.reachable_from(
            sources + list(filter(graph_walk.is_random, made.operations)),
            [op for op in made.operations if not is_batch_value(op)]),
        created=made_variables.created, direct=made_variables.direct, owned=made_variables.owned,
        variables=made_variables.created + [each for each in read if each.op.name not in names],
        updates=updates,
        registered=registered,
        registered_before=registered_before, keras_losses=keras_losses,
        keras_states=keras.states(), opened_scopes=made_variables.opened_scopes, proven=proven,
        imported=imported)


def put_on_devices(recorded, request, device):
    """Puts the recorded forward pass on the devices of its tower; cuts it into stages: `StageCuts`,
    or None where the model is not cut."""
    cuts, operations = None, recorded.operations
    if request.memory.cutting is not None and len(stages_of(device)) > 1:
        # Variables of an earlier build stay where its towers have them.
        movable = {variable.op.name for variable in recorded.created
                   } if request.placement.by_stage else ()
        cuts = cut_into_stages(recorded, device, movable, request.memory.cutting)
    if cuts is None or says_stages(operations):
        place_forward(operations, device)
    check_reads_in_loops(operations, [part.device for part in request.split.parts])
    keep_stacks_with_loops(operations)  # of gradients that the model function takes itself
    keep_arrays_with_readers(operations, device)
    return cuts


def _call(model_fn, inputs, batch_size):
    try:
        return call_model_fn(model_fn, inputs)
    except ValueError as error:  # of TensorFlow's inference of shapes
        if (not isinstance(batch_size, int) or isinstance(error, TowersError)
                or not re.search(r'\b%d\b' % batch_size, str(error))):
            raise
        raise ModelFunctionError(
            'the model function fails on a shard (%s), and has the size of the whole batch, %d, '
            'in it: it is called with a part of the batch. Take the size from the input, '
            'tf.shape(x)[0].' % (str(error).split('\n', 1)[0][:200], batch_size)) from error
