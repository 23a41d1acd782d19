"""Records the model on shard 0, as a value: one call of the model function, in the caller's scopes;
or the import of a finished model.

Its tests are `tests/api/test_build.py` and `test_reuse.py`.
"""

import contextlib
import re
import typing

import tensorflow.compat.v1 as tf

from towers.capture.finished_model import FinishedModel
from towers.capture.stage_cuts import StageCuts, cut_into_stages
from towers.errors import ModelFunctionError, TowersError
from towers.graph import graph_walk
from towers.graph.graph_walk import leaves_of
from towers.graph.import_again import Imported
from towers.graph.variable_access import variables_read
from towers.model.build_context import BuildCollections, call_of_model_fn, without
from towers.model.keras_calls import KerasCalls, record_keras_calls, unique
from towers.model.losses import registered_losses
from towers.model.outputs import ModelOutput, call_model_fn, to_model_output
from towers.model.request import Request
from towers.placement.numerics import compiled
from towers.placement.stages import (
    keep_arrays_with_readers,
    keep_stacks_with_loops,
    place_forward,
    says_stages,
)
from towers.placement.tower_device import TowerDevice, check_reads_in_loops, stages_of
from towers.shards.cut_batch import CutBatch
from towers.variables.new_variables import DirectVariable, NewVariables
from towers.whole_batch.batch_values import is_batch_value
from towers.whole_batch.proven import Proven, prove


class KerasLosses(typing.NamedTuple):
    """The losses of the Keras layers that were called, each a list of scalars."""
    of_weights: typing.List[tf.Tensor]
    of_activations: typing.List[tf.Tensor]


class Recorded(typing.NamedTuple):
    """A call of the model function, or the import of a finished model.

    Attributes:
      output: what it returned.
      operations: list of the operations that the call made, in order.
      sources: list of the operations of the shard.
      from_shard: names of the operations that depend on the shard, or on random numbers; dependence
        through `batch_sum` and its like does not count.
      created, direct, owned, opened_scopes: of the variables that it made, see `NewVariables`.
      variables: the variables that the call made or reads.
      updates: list of the call's `UPDATE_OPS`, of updates of Keras layers, and of returned updates.
      registered: the losses that the call put into `REGULARIZATION_LOSSES`.
      registered_before: the losses that were there before the build.
      keras_losses: the losses of Keras layers.
      keras_states: the variables that Keras layers call their state.
      proven: where the examples are in its tensors, and which batch norms have the statistics of
        the whole batch.
      imported: the import of a finished model; None where a model function was called.
    """
    output: ModelOutput
    operations: typing.List[tf.Operation]
    sources: typing.List[tf.Operation]
    from_shard: typing.Set[str]
    created: typing.List[tf.Variable]
    direct: typing.List[DirectVariable]
    owned: typing.Set[str]
    variables: typing.List[tf.Variable]
    updates: list
    registered: typing.List[tf.Tensor]
    registered_before: typing.List[tf.Tensor]
    keras_losses: KerasLosses
    keras_states: typing.List[tf.Variable]
    opened_scopes: typing.Any
    proven: Proven
    imported: typing.Optional[Imported]


def record(request: Request, batch: CutBatch, index: int,
           around: typing.Callable = contextlib.nullcontext) -> Recorded:
    """Calls the model function on a part of the batch, or imports the finished model for it.

    Args:
      request: `Request` of the build.
      batch: the shards.
      index: of the part: 0, but with `copies='reuse'`, which makes a call for each.
      around: makes a further context of the call.
    """
    graph = tf.get_default_graph()
    inputs = batch.inputs[index]
    objectives = request.training.objectives
    before = BuildCollections(graph)
    registered_before = registered_losses()
    # With copies='reuse' later calls share the variables of the first one.
    new_variables = NewVariables(request.placement, None if index else request.call.earlier)
    reuse = tf.AUTO_REUSE if index else request.call.reuse
    with graph_walk.Recording(graph) as made, \
            tf.device(TowerDevice(request.split.parts[index].device)), \
            new_variables.recorded(request.call.variable_scope, reuse), \
            record_keras_calls() as keras, compiled(request.numerics.xla), around(), \
            call_of_model_fn(graph, new_variables, request.parts_of_batch,
                             request.has_equal_workers, request.no_batch_values,
                             request.no_batch_rows):
        model = _computed(request, batch, index)
        output = to_model_output(model.output, bool(objectives), objectives.names)
        updates = unique(before.new_updates() + keras.updates() + list(output.updates or ()))
        keras_losses = _keras_losses(keras, request.training.regularization == 'add')
        registered = without(registered_losses(), registered_before) + model.registered
        proven = prove(made.so_far(), inputs, output, updates,
                       registered + keras_losses.of_activations, request)
    sources = list(map(graph_walk.operation_of, leaves_of(inputs)))
    return Recorded(
        output=proven.output, operations=made.operations, sources=sources,
        from_shard=_names_from_shard(made.operations, sources),
        created=new_variables.created, direct=new_variables.direct, owned=new_variables.owned,
        variables=_variables_of(made.operations, new_variables), updates=updates,
        registered=registered, registered_before=registered_before, keras_losses=keras_losses,
        keras_states=keras.states(), opened_scopes=new_variables.opened_scopes, proven=proven,
        imported=model.imported)


class _Computed(typing.NamedTuple):
    """The model on a part of the batch.

    Attributes:
      output: what the model function returned; or the `ModelOutput` of a finished model.
      registered: the registered losses of a finished model that depend on the part.
      imported: the import of a finished model; or None.
    """
    output: typing.Any
    registered: typing.List[tf.Tensor]
    imported: typing.Optional[Imported]


def _computed(request: Request, batch: CutBatch, index: int) -> _Computed:
    """Computes the model on the part of that index, by a call or an import."""
    model = request.call.model
    if isinstance(model, FinishedModel):
        return _Computed(*model.import_for(batch.inputs[index]))
    size_of_batch = batch.batch_size if len(request.split.parts) > 1 else None
    return _Computed(_call(model, batch.inputs[index], size_of_batch), [], None)


def _call(model_fn: typing.Callable, inputs: typing.Any, size_of_batch: typing.Any) -> typing.Any:
    """Calls the model function on a shard of a batch of a size, an int if that is static."""
    try:
        return call_model_fn(model_fn, inputs)
    except ValueError as error:  # of TensorFlow's inference of shapes
        if isinstance(error, TowersError) or not isinstance(size_of_batch, int):
            raise
        if not re.search(r'\b%d\b' % size_of_batch, str(error)):
            raise
        raise ModelFunctionError(
            'the model function fails on a shard (%s), and has the size of the whole batch, %d, '
            'in it: it is called with a part of the batch. Take the size from the input, '
            'tf.shape(x)[0].' % (str(error).split('\n', 1)[0][:200], size_of_batch)) from error


def _keras_losses(keras: KerasCalls, adds_registered: bool) -> KerasLosses:
    """The losses of the layers that were called; those of activations only where registered losses
    are added to the model's own."""
    of_weights = keras.weight_losses()
    return KerasLosses(of_weights, keras.activity_losses() if adds_registered else [])


def _names_from_shard(operations: typing.Iterable[tf.Operation],
                      sources: typing.List[tf.Operation]) -> typing.Set[str]:
    """`Recorded.from_shard` of a call with these operations, and these of its shard."""
    random = list(filter(graph_walk.is_random, operations))
    of_one_tower = [op for op in operations if not is_batch_value(op)]
    return graph_walk.reachable_from(sources + random, of_one_tower)


def _variables_of(operations: typing.Iterable[tf.Operation],
                  new_variables: NewVariables) -> typing.List[tf.Variable]:
    """The variables that a call with these operations has made, and then others that it reads."""
    created = new_variables.created
    names = graph_walk.operation_names(created)
    read = variables_read(operations, new_variables.owned, created)
    return created + [variable for variable in read if variable.op.name not in names]


def put_on_devices(recorded: Recorded, request: Request,
                   device: str) -> typing.Optional[StageCuts]:
    """Puts the recorded forward pass on the devices of its tower, and cuts it into stages.

    Args:
      recorded: the forward pass.
      request: `Request` of the build.
      device: of the tower.

    Returns:
      How it was cut; None where the model is not cut.
    """
    cuts = None
    operations = recorded.operations
    if request.memory.cutting is not None and len(stages_of(device)) > 1:
        movable: typing.Set[str] = set()
        if request.placement.by_stage:
            # Variables of an earlier build stay where its towers have them.
            movable = graph_walk.operation_names(recorded.created)
        cuts = cut_into_stages(recorded, device, movable, request.memory.cutting)
    if cuts is None or says_stages(operations):
        place_forward(operations, device)
    check_reads_in_loops(operations, [part.device for part in request.split.parts])
    keep_stacks_with_loops(operations)  # of gradients that the model function takes itself
    keep_arrays_with_readers(operations, device)
    return cuts
