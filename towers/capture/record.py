"""Records the model on shard 0, as `Recorded`: one call of the model function, in the caller's
scopes; or the import of a finished model.

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
from towers.placement.loop_state import keep_arrays_with_readers, keep_stacks_with_loops
from towers.placement.numerics import compiled
from towers.placement.shared_reads import share_reads
from towers.placement.stages import place_forward, says_stages
from towers.placement.tower_device import (
    TowerDevice,
    all_devices,
    check_reads_in_loops,
    stages_of,
)
from towers.shards.cut_batch import CutBatch
from towers.variables.new_variables import DirectVariable, NewVariables
from towers.whole_batch.batch_values import is_batch_value
from towers.whole_batch.proven import Proven, prove


class KerasLosses(typing.NamedTuple):
    """The losses that Keras layers have registered in their calls, as lists of scalars."""
    of_weights: typing.List[tf.Tensor]
    of_activations: typing.List[tf.Tensor]


class Recorded(typing.NamedTuple):
    """A call of the model function, or the import of a finished model.

    Attributes:
      output: what it returned.
      operations: list of the operations that the call made, in order.
      sources: list of the operations that give the shard.
      from_shard: names of the operations that depend on the shard, or on random numbers. Dependence
        through a value of the whole batch (`batch_sum`) does not count: it is the same in each
        tower.
      created, direct, owned, references_elsewhere, opened_scopes: of the variables that the call
        made; the attributes of `NewVariables` with these names.
      variables: the variables that the call made or reads.
      updates: list of the call's `UPDATE_OPS`, of updates of Keras layers, and of returned updates.
      registered: the losses that the call put into `REGULARIZATION_LOSSES`.
      registered_before: the losses that were in `REGULARIZATION_LOSSES` before the call.
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
    references_elsewhere: typing.Set[str]
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
      index: the index of the part: always 0, except with `copies='reuse'`, which makes a call for
        each part.
      around: function without arguments; makes one more context around the call. The optimizers
        that the model function of an Estimator calls need one.
    """
    graph = tf.get_default_graph()
    inputs = batch.inputs[index]
    collections_before = BuildCollections(graph)  # to tell what the call adds to them
    registered_before = registered_losses()
    if index == 0:
        earlier_build = request.call.earlier
        reuse = request.call.reuse
    else:  # copies='reuse': the call shares the variables that the first call has made or found
        earlier_build = None
        reuse = tf.AUTO_REUSE
    new_variables = NewVariables(request.placement, earlier_build)
    # In this context `batch_sum`, and functions like it, find out how the batch is divided.
    context_of_call = call_of_model_fn(
        graph, new_variables, num_parts=request.parts_of_batch,
        has_equal_parts=request.has_equal_workers, no_batch_values=request.no_batch_values)
    with graph_walk.Recording(graph) as made, \
            tf.device(TowerDevice(request.split.parts[index].device)), \
            new_variables.recorded(request.call.variable_scope, reuse), \
            record_keras_calls() as keras, compiled(request.numerics.xla), around(), \
            context_of_call:
        model = _computed(request, batch, index)
        results = _results(model, keras, collections_before, registered_before, request)
        # Statistics of the whole batch become a part of the pass: their operations are recorded.
        proven = prove(made.so_far(), inputs, results.output, results.updates,
                       results.losses_of_examples, request)
    sources = list(map(graph_walk.operation_of, leaves_of(inputs)))
    return Recorded(
        output=proven.output, operations=made.operations, sources=sources,
        from_shard=_names_from_shard(made.operations, sources),
        created=new_variables.created, direct=new_variables.direct, owned=new_variables.owned,
        references_elsewhere=new_variables.references_elsewhere,
        variables=_variables_of(made.operations, new_variables), updates=results.updates,
        registered=results.registered, registered_before=registered_before,
        keras_losses=results.keras_losses, keras_states=keras.states(),
        opened_scopes=new_variables.opened_scopes, proven=proven, imported=model.imported)


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
    """Computes the model on part `index` of the batch, by a call or an import."""
    model = request.call.model
    part = batch.inputs[index]
    if isinstance(model, FinishedModel):
        output, registered, imported = model.import_for(part)
        return _Computed(output, registered, imported)
    batch_size = None
    is_cut = len(request.split.parts) > 1
    if is_cut:
        batch_size = batch.batch_size
    output = _call(model, part, batch_size)
    return _Computed(output, registered=[], imported=None)


def _call(model_fn: typing.Callable, shard: typing.Any, batch_size: typing.Any) -> typing.Any:
    """Calls the model function on a shard.

    Args:
      model_fn: the model function.
      shard: the shard.
      batch_size: the size of the whole batch: an int if it is static, else a scalar; None if the
        shard is the whole batch.

    Raises:
      ModelFunctionError: the function has the size of the whole batch in it.
    """
    try:
        return call_model_fn(model_fn, shard)
    except TowersError:  # it is also a ValueError
        raise
    except ValueError as error:  # of TensorFlow's inference of shapes
        is_static = isinstance(batch_size, int)
        if not is_static or not _names_number(str(error), batch_size):
            raise
        first_line = str(error).split('\n', 1)[0]
        raise ModelFunctionError(
            'the model function fails on a shard (%s), and has the size of the whole batch, %d, '
            'in it: it is called with a part of the batch. Take the size from the input, '
            'tf.shape(x)[0].' % (first_line[:200], batch_size)) from error


def _names_number(text: str, number: int) -> bool:
    """Whether a number occurs in a text, and not as a part of another number."""
    return re.search(r'\b%d\b' % number, text) is not None


class _Results(typing.NamedTuple):
    """What the model has returned and registered.

    Attributes:
      output: what it returned, checked.
      updates: the new `UPDATE_OPS`, the updates of Keras layers, and the returned updates, each
        once.
      registered: the new losses in `REGULARIZATION_LOSSES`.
      keras_losses: the losses of the Keras layers that were called.
    """
    output: ModelOutput
    updates: list
    registered: typing.List[tf.Tensor]
    keras_losses: KerasLosses

    @property
    def losses_of_examples(self) -> typing.List[tf.Tensor]:
        """The losses beside the model's own that may depend on the examples. Losses of weights do
        not depend on them."""
        return self.registered + self.keras_losses.of_activations


def _results(model: _Computed, keras: KerasCalls, collections_before: BuildCollections,
             registered_before: typing.List[tf.Tensor], request: Request) -> _Results:
    """Finds what the model has returned and registered.

    Args:
      model: the model on a part of the batch.
      keras: the calls of Keras layers.
      collections_before: the collections as they were before the model was computed.
      registered_before: the registered losses as they were before the model was computed.
      request: `Request` of the build.
    """
    objectives = request.training.objectives
    needs_loss = bool(objectives)  # without an objective nothing is trained
    output = to_model_output(model.output, needs_loss, objectives.names)
    updates = collections_before.new_updates() + keras.updates() + list(output.updates or ())
    adds_registered = request.training.regularization == 'add'
    keras_losses = _keras_losses(keras, adds_registered)
    registered = without(registered_losses(), registered_before) + model.registered
    return _Results(output, unique(updates), registered, keras_losses)


def _keras_losses(keras: KerasCalls, adds_registered: bool) -> KerasLosses:
    """The losses of the layers that were called.

    Args:
      keras: the calls of layers.
      adds_registered: whether registered losses are added to the model's own. Only then are losses
        of activations asked for, since `activity_losses` refuses a loss that is no scalar.
    """
    of_weights = keras.weight_losses()
    if not adds_registered:
        return KerasLosses(of_weights, of_activations=[])
    return KerasLosses(of_weights, keras.activity_losses())


def _names_from_shard(operations: typing.Iterable[tf.Operation],
                      sources: typing.List[tf.Operation]) -> typing.Set[str]:
    """Finds the operations that depend on the shard, or on random numbers: `Recorded.from_shard`.

    Args:
      operations: the operations of the call.
      sources: the operations that give the shard.
    """
    random = list(filter(graph_walk.is_random, operations))
    # A value of the whole batch is the same on every tower, so no operation depends on the shard
    # through this value.
    others = [op for op in operations if not is_batch_value(op)]
    return graph_walk.reachable_from(sources + random, others)


def _variables_of(operations: typing.Iterable[tf.Operation],
                  new_variables: NewVariables) -> typing.List[tf.Variable]:
    """The variables of a call: first those that it has made, then others that it reads.

    Args:
      operations: the operations of the call.
      new_variables: the variables that the call has made.
    """
    created = new_variables.created
    names_created = graph_walk.operation_names(created)
    read = variables_read(operations, new_variables.owned, created)
    return created + [variable for variable in read if variable.op.name not in names_created]


def put_on_devices(recorded: Recorded, request: Request,
                   device: str) -> typing.Optional[StageCuts]:
    """Puts the recorded forward pass on the devices of its tower, and cuts it into stages.

    Args:
      recorded: the forward pass.
      request: `Request` of the build.
      device: the device, or devices, of the tower.

    Returns:
      How it was cut; None where the model is not cut.
    """
    cuts = None
    operations = recorded.operations
    has_several_devices = len(stages_of(device)) > 1
    cuts_model = request.memory.cutting is not None  # stages='auto'
    if cuts_model and has_several_devices:
        cuts = cut_into_stages(recorded, device, _movable_variables(recorded, request),
                               request.memory.cutting)
    # `place_forward` puts operations on the stages that the model names by `towers.stage`. It also
    # does so for a model that was cut, and that has named some stages.
    if cuts is None or says_stages(operations):
        place_forward(operations, device)
    check_reads_in_loops(operations, [part.device for part in request.split.parts])
    # A model function that takes gradients itself has made the stacks in which loops (v1) keep
    # their values for them.
    keep_stacks_with_loops(operations)
    # `tf.map_fn` fills an array before its loop, perhaps on another stage than the loop's.
    keep_arrays_with_readers(operations, device)
    return cuts


def with_shared_reads(recorded: Recorded, request: Request) -> Recorded:
    """The recorded forward pass with one read of each variable, where that saves transfers.

    This comes after `put_on_devices`, since an operation that leads a value into a loop goes to the
    device of what takes it there.
    """
    devices = all_devices(part.device for part in request.split.parts)
    operations = share_reads(recorded.operations, recorded.owned, devices)
    return recorded._replace(operations=operations)


def _movable_variables(recorded: Recorded, request: Request) -> typing.Set[str]:
    """Set of the names of the variables that go to the stage which reads them first: all that the
    call has made, if the placement of variables is by stage. Variables of an earlier build stay
    where its towers have them."""
    if not request.placement.by_stage:
        return set()
    return graph_walk.operation_names(recorded.created)
