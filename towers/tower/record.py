"""Records the model function: one call on shard 0, in the caller's scopes, as a value."""

import collections
import contextlib
import re

import tensorflow.compat.v1 as tf

from towers.errors import ModelFunctionError, TowersError
from towers.graph import graph_walk
from towers.graph.invariance import varying_operations
from towers.graph.nests import leaves_of, map_leaves
from towers.graph.variable_access import variables_read
from towers.placement.tower_device import TowerDevice
from towers.placement.xla import compiled
from towers.tower.batch_values import is_batch_value
from towers.tower.keras_calls import record_keras_calls
from towers.tower.refused_builds import call_of_model_fn
from towers.tower.outputs import call_model_fn, to_model_output
from towers.tower.sync_batch_norm import synchronize
from towers.tower.variables import NewVariables


class Recorded(collections.namedtuple('Recorded', [
        'output', 'operations', 'sources', 'varying', 'from_shard', 'created', 'direct', 'owned',
        'variables', 'updates', 'keras_losses', 'keras_layers', 'keras_states', 'opened_scopes',
        'in_sync'])):
    """A call of the model function.

    Attributes:
      output: `ModelOutput`.
      operations: list of the operations that the call made, in order.
      sources: list of the operations of the shard.
      varying: names of the operations that are not proven to be the same in every tower.
      from_shard: names of the operations that depend on the shard, or on random numbers, otherwise
        than by a value of the whole batch.
      created: the variables that the call made.
      direct: `DirectVariable`s, see `NewVariables`.
      owned: names of the operations that are parts of the created variables.
      variables: the variables that the call made or reads.
      updates: list of the call's `UPDATE_OPS`, of updates of Keras layers, and of returned updates.
      keras_losses: `(of weights, of activations)`: the losses of the Keras layers that were called.
      keras_layers: how many Keras layers were called.
      keras_states: the variables that Keras layers call their state.
      opened_scopes: dict, how often each variable scope had been opened before the call.
      in_sync: how many batch norms have the statistics of the whole batch.
    """
    __slots__ = ()


def record(model_fn, inputs, device, placement, objectives, registered, scope=None, reuse=None,
           earlier=None, xla=False, adds_registered=False, around=contextlib.nullcontext,
           batch_size=None, parts=1, no_batch_values=None, batch_norm='shard'):
    """Calls the model function: `Recorded`.

    Args:
      model_fn, scope, reuse: as for `build_towers` (`variable_scope=`, `reuse=`).
      inputs: the first tower's shard.
      device: the first tower's device.
      placement: `Placement` of the variables.
      objectives: `Objectives`.
      registered: `RegisteredLosses`.
      earlier: `BuiltTowers`, an earlier build whose variables are shared; or None.
      xla: whether XLA compiles the call.
      adds_registered: whether losses of Keras layers are added to the model's own.
      around: a further context of the call.
      batch_size: examples of the whole batch: an int, or a tensor.
      parts: how many parts the batch has.
      batch_norm: as for `build_towers`.
      no_batch_values: why the parts cannot exchange values, see `batch_values`; or None.

    Raises:
      TowersError: one of its subclasses: what the function returned, or how it made variables.
    """
    graph = tf.get_default_graph()
    before = _updates(graph)
    made_variables = NewVariables(placement, earlier, registered.of_variable)
    with graph_walk.Recording(graph) as made, tf.device(TowerDevice(device)):
        with made_variables.recorded(scope, reuse), record_keras_calls() as keras, \
                compiled(xla), around(), call_of_model_fn(graph, parts, no_batch_values):
            returned = _called(model_fn, inputs, batch_size if parts > 1 else None)
            in_sync, instead = synchronize(made.so_far(), graph) if (
                batch_norm == 'sync' and parts > 1) else (0, {})
        output = to_model_output(returned, 0, bool(objectives), objectives.names)
        if instead:
            output = type(output)(*map_leaves(
                lambda leaf: instead.get(leaf.name, leaf), tuple(output)))
        keras_losses = keras.weight_losses(), keras.activity_losses() if adds_registered else []
        keras_updates = keras.updates()
    registered.note_call()
    sources = [leaf.op for leaf in leaves_of(inputs)]
    known = set(map(id, before))
    updates = [entry for entry in _updates(graph) if id(entry) not in known]
    read = variables_read(made.operations, made_variables.owned, made_variables.created)
    names = {variable.op.name for variable in made_variables.created}
    return Recorded(
        output, made.operations, sources, varying_operations(made.operations, sources),
        graph_walk.reachable_from(
            sources + list(filter(graph_walk.is_random, made.operations)),
            [op for op in made.operations if not is_batch_value(op)]),
        made_variables.created, made_variables.direct, made_variables.owned,
        made_variables.created + [each for each in read if each.op.name not in names],
        _unique(updates + keras_updates + list(output.updates or ())),
        keras_losses, len(keras.layers), keras.states(), made_variables.opened_scopes, in_sync)


def _called(model_fn, inputs, batch_size):
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


def _updates(graph):
    return list(graph.get_collection(tf.GraphKeys.UPDATE_OPS))


def _unique(entries):
    seen = set()
    return [entry for entry in entries if not (id(entry) in seen or seen.add(id(entry)))]
