"""`build_towers`: from a model function, or a finished model, to a data-parallel train op."""

import inspect
import typing

import tensorflow.compat.v1 as tf

from towers.api.batch_tensors import BatchTensors
from towers.api.built import BuiltTowers, Plan
from towers.api.call_for_each import call_for_each_tower
from towers.api.checked_request import checked_request
from towers.api.describe import describe
from towers.api.make_towers import call_once_and_copy
from towers.api.options import Memory, Numerics, Objective, Pipeline, VariablePlacement
from towers.api.train_ops import Update, update_variables
from towers.capture.finished_model import FinishedModel
from towers.capture.model_inputs import Entries, entries_of
from towers.copies.tower_set import TowerSet, share_reads_in_towers
from towers.errors import InputError, counted
from towers.graph.graph_walk import operation_names
from towers.graph.waits import Wait
from towers.model.build_context import BuildCollections, check_not_nested
from towers.model.objectives import map_shaped, naming_loss, perhaps_trained
from towers.model.outputs import ModelOutput, merge_metrics, weighted_sum
from towers.model.request import Request
from towers.placement.variable_device import only_device
from towers.reduce.combination import Combined, all_reduce, combine
from towers.reduce.loss_scale import ScaledLosses
from towers.reduce.micro_batches import add_up_micro_batches
from towers.reduce.replicas import check_updates_all_replicas
from towers.roles.metric_counters import join_counters
from towers.shards.batch_inputs import (
    UpstreamVariables,
    check_nothing_is_trained_upstream,
    checked_inputs,
    upstream_variables,
)
from towers.shards.cut_batch import CutBatch, checked_size, cut
from towers.shards.cut_inputs import Shards
from towers.variables.tf1_variables import tf1_variables
from towers.variables.variable_scopes import full_scope_name
from towers.whole_batch.predictions import merge_predictions


def build_towers(model: typing.Any, inputs: typing.Any, optimizer: typing.Any,
                 devices: typing.Union[None, int, str, typing.Sequence] = None,
                 reduction: str = 'sum', *, remainder: str = 'error',
                 shares: typing.Optional[typing.Sequence[int]] = None,
                 global_step: typing.Optional[tf.Variable] = None,
                 regularization: str = 'none', update_ops: str = 'first',
                 batch_norm: str = 'shard',
                 variables: typing.Optional[VariablePlacement] = None,
                 numerics: typing.Optional[Numerics] = None,
                 memory: typing.Optional[Memory] = None,
                 pipeline: typing.Optional[Pipeline] = None, cluster: typing.Any = None,
                 copies: str = 'clone', reuse: typing.Any = None) -> BuiltTowers:
    """Builds a model on several devices and trains these towers as one, data-parallel.

    The batch is cut into a shard per tower on the CPU; each tower computes its shard's loss and
    gradients on its device; `combine_gradients` sums them per variable where the variable lives;
    one `apply_gradients` updates the variables, which all towers share. With `n_k` of the batch's
    `n` examples on tower k of N, a loss `L_k` there and regularization R, the gradient of a
    variable is

        mean:  sum_k (n_k / n) dL_k + dR      (the full batch's mean loss on one device)
        sum:   N (sum_k (n_k / n) dL_k + dR)  (the hand-written tower loop, for equal shards)

    Args:
      model: a model function: ordinary TF1 code, called with a shard, once or once per tower
        (`copies`): as `model(*inputs)` where `inputs` is a plain tuple or list, else as
        `model(inputs)`. It returns a scalar loss, the mean over the shard's examples; or a dict or
        `ModelOutput` with `loss`, `predictions`, `metrics` and `updates`. Or a finished model: such
        a loss, dict or `ModelOutput` of tensors that are in the graph already, see
        `finished_model`.
      inputs: the batch: a nest of tensors [n, …], dense or sparse, of any dtype; or `Shards`, a
        batch that is cut already; or the result of `staged`, whose shards are on the towers'
        devices before a step begins. For a finished model: the tensors of its graph at which the
        batch enters, such as its placeholders, which are fed as before; or a dict from these to
        the tensors of the batch that take their places. `BatchAxis` names a tensor whose examples
        are along another dimension than the first.
      optimizer: a `tf.train.Optimizer`, or None for evaluation and prediction; or an `Objective`,
        an optimizer with the variables to train and a function of their gradients. Or a dict of
        either by name, for a model function whose `loss` is a dict of losses by these names (a
        GAN's `{'discriminator': …, 'generator': …}`): see `BuiltTowers.train_ops`.
      devices: None, a count, or names, as `resolve_devices` takes them; or the result of
        `resolve_devices`, for devices that are not on this machine.
      reduction: `'sum'` or `'mean'`, as above.
      remainder: treatment of a batch that does not divide: `'error'`, `'weight'` (uneven shards,
        weighted by their size), or `'drop'`; see `split_batch`.
      shares: the proportions of the shards, an integer per tower: `[3, 1]` for a device that is
        three times as fast as the other. None: equal shards.
      global_step: variable that the train op increases by one, or None.
      regularization: `'none'`: the loss is the model function's, as in a plain TF1
        program. `'add'` adds each registered loss (`REGULARIZATION_LOSSES`, and losses of the Keras
        layers that were called), unless the model's loss is already computed from it. Every tower
        computes it, and it counts once, since the towers' weights add up.
      update_ops: the towers whose batch-norm updates run with the train op: `'first'`, `'all'` or
        `'none'`. With `'all'` one tower's updates come after the other's, as in N steps of one
        device; with micro-batches, one micro-batch's come after the other's, as in N steps for each
        micro-batch. `UPDATE_OPS` from before the towers, unless they belong to another build, also
        run with the train op, except with `'none'`. The same holds for writes in the forward pass
        itself (`updates_collections=None`), see `inline_updates`. Each tower has its own local
        variables if the forward pass writes them, see `ownership`.
      batch_norm: `'shard'`: batch norm uses the statistics of each tower's shard; `'sync'`: the
        statistics of the whole batch, as on one device, see `sync_batch_norm`.
      variables: `VariablePlacement`: the devices of the variables, and how replicas stay equal.
      numerics: `Numerics`: precision, loss scale, XLA, checks of numbers, random numbers by step.
      memory: `Memory`: micro-batches one after the other, recomputation.
      pipeline: `Pipeline`: stages and micro-batches of towers with several devices.
      cluster: `Cluster`: the machines that train the same model, each with its own towers. `loss`,
        `predictions` and `metrics` are then of this machine's batch, the gradient of all
        machines' batches. See `join`.
      copies: `'clone'`: the model function is called once, in the caller's scopes, and the towers
        after the first are copies of its graph, forward and backward, in the name scopes `tower_1`,
        `tower_2`, … (of a second build `build_2/tower_1`, …). All towers share its tables, queues,
        iterators and placeholders; a seeded random op has another seed in each copy. `'reuse'`: a
        call for each tower under `variable_scope` reuse, as in the hand-written tower loop, with
        the limits of that loop; see `call_for_each`.
      reuse: for the first tower: None, True or `tf.AUTO_REUSE` as in `tf.variable_scope`; or the
        `BuiltTowers` of an earlier build, to share its variables, also variables made without
        `get_variable`, in the scope of that build.

    Returns:
      `BuiltTowers`.

    Raises:
      TowersError: one of its subclasses, for every bad argument, if possible before any op is made.
        After an error the graph's collections are restored, but its operations stay, since
        TensorFlow cannot remove them: make the next build in a new graph.
    """
    # All arguments are checked before any operation is made.
    request = checked_request(
        model=model, optimizer=optimizer, devices=devices, reduction=reduction,
        remainder=remainder, shares=shares, global_step=global_step,
        regularization=regularization, update_ops=update_ops, batch_norm=batch_norm,
        variables=variables, numerics=numerics, memory=memory, pipeline=pipeline, cluster=cluster,
        copies=copies, reuse=reuse)
    graph = tf.get_default_graph()
    check_not_nested(graph)
    finished = None
    # The updates of a finished model are in the graph before the build, but belong to the towers.
    updates_of_finished: typing.Sequence = ()
    if request.call.is_finished:
        entries = entries_of(inputs)
        inputs = entries.batch
        finished = _finished_model(request, entries)
        request = request._replace(call=request.call._replace(model=finished))
        updates_of_finished = finished.output.updates
    else:
        check_inputs(request, inputs)

    collections_before = BuildCollections(graph, updates_of_finished)
    if request.call.copies == 'reuse':
        make_towers = call_for_each_tower
    else:
        make_towers = call_once_and_copy
    with collections_before.of_build(), tf1_variables(graph):
        batch, upstream = split(request, inputs)
        if finished is not None:
            # A check in each step: what is fed to a placeholder without a shape, and is no input,
            # has to be one number. It makes operations, so it is not with the checks above.
            finished.assert_scalars()
        scaled_losses = _scaled_losses(request)
        tower_set = make_towers(request, batch, upstream, scaled_losses)
        share_reads_in_towers(tower_set)
        outputs, metric_waits = merge_outputs(tower_set)
        combined = combine_towers(tower_set)
        exchange = None
        if request.trains_with_machines:
            combined, exchange = combine_machines(tower_set, combined, outputs.loss)
        update = update_variables(tower_set, outputs, combined, exchange, collections_before)
    plan = describe(tower_set, update, len(collections_before.updates),
                    waits=tower_set.waits + metric_waits + update.waits)
    batch_tensors = None  # a model function has no tensors before the build
    if finished is not None:
        plan = plan._replace(lines=plan.lines + finished.plan_lines())
        batch_tensors = BatchTensors(tower_set, outputs)
    built = _result(tower_set, outputs, update, plan, batch_tensors)
    if built.machines is not None:
        # Lists the complete build in the graph, where `join` and sessions find all builds.
        built.machines.note(built)
    return built


def _finished_model(request: Request, entries: Entries) -> FinishedModel:
    """Checks a finished model, and the batch that is to be cut.

    Args:
      request: the checked arguments of the build; its model is the `ModelOutput` of the program.
      entries: where the batch enters the model, and the batch.
    """
    check_inputs(request, entries.batch)
    finished = FinishedModel(request.call.model, entries, len(request.split.parts))
    finished.check_runs_no_update()
    return finished


def _result(tower_set: TowerSet, outputs: ModelOutput, update: Update, plan: Plan,
            batch_tensors: typing.Optional[BatchTensors]) -> BuiltTowers:
    """What `build_towers` returns.

    Args:
      tower_set: the towers.
      outputs: losses, predictions and metrics over the batch.
      update: the update of the shared variables.
      plan: the plan of the build.
      batch_tensors: gives the batch's values of a finished model's tensors; None for a model
        function.
    """
    request = tower_set.request
    recorded = tower_set.recorded
    return BuiltTowers(
        train_op=update.train_op, train_ops=update.train_ops, loss=outputs.loss,
        predictions=outputs.predictions, metrics=outputs.metrics, gradients=update.gradients,
        variables=recorded.variables, slots=update.slots + list(tower_set.slots),
        towers=tower_set.towers, global_step=request.training.global_step,
        devices=request.devices, placement=request.placement,
        direct_variables=tuple(recorded.direct), plan=plan, batch_tensors=batch_tensors,
        replicas=update.replicas, precision=request.numerics.precision,
        scaled_losses=update.scaled_losses, xla=request.numerics.xla,
        variable_scope=full_scope_name(request.call.variable_scope), machines=update.machines,
        own_state=tower_set.roles.own_variables(),
        made=frozenset(operation_names(recorded.created)),
        opened_scopes=recorded.opened_scopes)


def check_build_arguments(*given: typing.Any, **named: typing.Any) -> None:
    """Raises the errors of `build_towers` for all arguments but the inputs; makes no operation.

    It is for callers that make the inputs before they call `build_towers` with the same arguments.

    Args:
      *given, **named: the arguments of the call of `build_towers`.
    """
    bound = inspect.signature(build_towers).bind(*given, **named)
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    del arguments['inputs']
    checked_request(**arguments)


def check_inputs(request: Request, inputs: typing.Any) -> None:
    """Raises `InputError` for inputs that cannot be cut; before any operation is made."""
    if isinstance(inputs, Shards):
        _check_shards(request, inputs)
        return
    size = checked_inputs(inputs).size
    batch_split = request.split
    num_parts = len(batch_split.parts)
    is_pipeline = request.memory.schedule is not None
    if is_pipeline and size is not None and size < num_parts:
        # `checked_size` would ask for a larger batch, as it does with accumulate=. For a pipeline
        # the advice is fewer micro-batches.
        raise InputError('%d examples are fewer than the %d micro-batches of %s: pass a '
                         'smaller micro_batches=.' % (
                             size, num_parts, counted(len(request.devices), 'tower')))
    checked_size(inputs, batch_split.shares, batch_split.remainder, batch_split.word_for_parts)


def _check_shards(request: Request, shards: Shards) -> None:
    """Raises `InputError` for shards, a batch that is cut already, with options about the cutting,
    with a finished model, or from variables that the build trains."""
    split = request.split
    if request.call.is_finished:
        raise InputError('the inputs are cut into shards already, and the model is finished: '
                         'pass the tensors of its graph at which the whole batch enters.')
    if split.remainder != 'error':
        raise InputError('the inputs are cut into shards already: leave remainder= out.')
    has_equal_shares = set(split.shares) == {1}
    if not has_equal_shares:
        raise InputError('the inputs are cut into shards already: leave shares= out.')
    if split.accumulate > 1:
        raise InputError('the inputs are cut already, a shard for each tower, and accumulate= '
                         'or micro_batches= cut each into %d: pass the tensors of a batch '
                         'instead.' % split.accumulate)
    if request.training.objectives:
        check_nothing_is_trained_upstream(
            shards.batches, perhaps_trained(request.training.objectives))
    shards.check(request.devices)


def split(request: Request, inputs: typing.Any
          ) -> typing.Tuple[CutBatch, UpstreamVariables]:
    """Cuts the batch into its parts, and finds the trained variables that it is computed from.

    Args:
      request: the checked arguments of the build.
      inputs: the batch, or `Shards`, which is cut already.

    Returns:
      `(the parts, the trained variables upstream of the inputs)`.
    """
    if isinstance(inputs, Shards):
        no_upstream = UpstreamVariables()  # `check_inputs` refuses shards from trained variables
        return inputs.cut(), no_upstream
    trains = bool(request.training.objectives)
    if trains:
        upstream = upstream_variables(inputs, perhaps_trained(request.training.objectives))
    else:
        upstream = UpstreamVariables(inputs, variables=())
    batch_split = request.split
    batch = cut(upstream.inputs, batch_split.shares, batch_split.remainder,
                batch_split.word_for_parts)
    return batch, upstream


def _scaled_losses(request: Request) -> typing.Optional[ScaledLosses]:
    """Makes the variables of the loss scale; None for a build without one."""
    if request.numerics.loss_scale is None:
        return None
    return ScaledLosses(request.numerics.loss_scale, request.split.scope_of_batch,
                        request.placement)


class _MergedOutputs(typing.NamedTuple):
    """The outputs of all towers, merged into outputs of the whole batch, as one device has them."""
    outputs: ModelOutput
    waits: typing.List[Wait]  # the control edges by which the towers count metrics in turn


def merge_outputs(tower_set: TowerSet) -> _MergedOutputs:
    """Merges the losses, predictions and metrics of the towers into the batch's.

    Counters of metrics, which all towers share, are made to count one tower after the other.

    Returns:
      `_MergedOutputs`: the outputs of the batch, whose loss is a dict where losses have names, and
      the waits that were made.
    """
    request = tower_set.request
    batch = tower_set.batch
    towers = tower_set.towers

    def loss_of_batch(*losses_of_towers: tf.Tensor) -> tf.Tensor:
        """The loss over the batch, from the values that one loss has in the towers."""
        return weighted_sum(losses_of_towers, batch.weights)

    with only_device(request.placement.main), tf.name_scope(request.split.scope_of_batch):
        loss = None
        if towers[0].data_loss is not None:  # a model without a loss gives predictions alone
            loss = map_shaped(loss_of_batch, *[tower.data_loss for tower in towers])
        metrics = merge_metrics([tower.metrics for tower in towers], batch.weights,
                                inputs=batch.inputs[0])
        waits = join_counters(towers, batch.weights, tower_set.roles)
        predictions = merge_predictions([tower.predictions for tower in towers], batch,
                                        tower_set.recorded.proven)
        return _MergedOutputs(ModelOutput(loss, predictions, metrics), waits)


def combine_towers(tower_set: TowerSet) -> typing.Any:
    """Combines the gradients of all towers, variable by variable.

    Returns:
      `Combined`; where losses have names, a dict of these by the name of the loss.
    """
    request = tower_set.request
    towers = tower_set.towers
    objectives = request.training.objectives
    if not objectives:
        return Combined([])
    gradients = [tower.gradients for tower in towers]
    if request.split.accumulate > 1:
        gradients = add_up_micro_batches(towers, request.split.accumulate, request.memory.schedule)
    # Gradients with respect to the shards: they go on to the variables upstream of the inputs.
    gradients_of_shards = [tower.of_shard for tower in towers]
    combined = []
    for objective in objectives:
        combined.append(_combine_objective(tower_set, objective, gradients, gradients_of_shards))
    return objectives.shaped(combined)


def _combine_objective(tower_set: TowerSet, objective: Objective, gradients: list,
                       gradients_of_shards: list) -> Combined:
    """Combines the gradients of one loss.

    Args:
      tower_set: the towers.
      objective: the loss's optimizer, and what it trains.
      gradients: for each tower its `(gradient, variable)` pairs; where losses have names, a dict of
        these.
      gradients_of_shards: for each part of the batch the gradients with respect to its shard, by
        which variables upstream of the inputs are trained; where losses have names, a dict of
        these.
    """
    request = tower_set.request
    objectives = request.training.objectives
    pairs_of_towers = [objectives.entry_of(objective, each) for each in gradients]
    shard_gradients = [objectives.entry_of(objective, each) for each in gradients_of_shards]
    # A variable upstream of the inputs gets one gradient, from all shards. It is added to the
    # towers' gradients as if it were another tower's, since the model itself may read the variable.
    pairs_upstream = tower_set.gradients.upstream.gradients(
        shard_gradients, tower_set.batch.sizes, tower_set.roles.trained[objective.name])
    with tf.name_scope('combine_gradients'), naming_loss(objective.name):
        has_replicas = request.placement.has_replicas
        check_updates_all_replicas(
            tower_set.roles.all_trained, num_towers=len(request.devices) if has_replicas else 1)
        if has_replicas:
            return all_reduce(pairs_of_towers, pairs_upstream, request.devices)
        return Combined(combine(pairs_of_towers + pairs_upstream))


def combine_machines(tower_set: TowerSet, combined: Combined,
                     loss: tf.Tensor) -> typing.Tuple[Combined, typing.Any]:
    """Combines the gradients over all machines.

    Args:
      tower_set: the towers of this machine.
      combined: the gradients over the towers of this machine. A cluster goes with one loss without
        a name, so this is one `Combined`.
      loss: the loss of this machine's batch; it reads the weights before they change.

    Returns:
      `(the gradients over all machines, the Exchange that combines them)`.
    """
    request = tower_set.request
    with tf.name_scope('combine_machines'):
        # A worker that stopped before it has given its part of the exchanged values of the whole
        # batch would let the others wait: so the end of a step waits for these values.
        exchange = tower_set.step_of_workers.combine(
            combined.gradients, loss, values=tower_set.exchanged)
    gradients_on_towers: typing.Optional[typing.Dict[str, list]] = None
    if request.placement.has_replicas:
        # Every replica gets the same gradient: the gradient over all machines.
        gradients_on_towers = {}
        for gradient, variable in exchange.gradients:
            gradients_on_towers[variable.op.name] = [gradient] * len(request.devices)
    return Combined(exchange.gradients, on_towers=gradients_on_towers), exchange
