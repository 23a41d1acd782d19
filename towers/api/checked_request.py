"""`checked_request`: checks and resolves the arguments of a `build_towers` call.

It makes no operation, so that a bad argument leaves the graph as it was. Its test is
tests/api/test_options.py; test_build.py has the arguments that are refused.
"""

import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.api.built import BuiltTowers, check_same_graph
from towers.api.contradictions import (
    check_losses,
    check_micro_batches,
    check_together,
    check_variables_of_reuse,
)
from towers.api.options import Memory, Numerics, Pipeline, VariablePlacement, checked_objectives
from towers.arguments import check_choice, check_graph_mode, check_instance, check_step_variable
from towers.capture.finished_model import is_finished, output_of_finished
from towers.capture.stage_cuts import Cutting
from towers.errors import InvalidArgumentError, ModelFunctionError
from towers.model.build_context import check_no_failed_build
from towers.model.objectives import Objectives
from towers.model.request import Request
from towers.model.requested import BatchSplit, KeptResults, ModelCall, Part, Training
from towers.optimizers import check_alone, check_learning_rate, number_of_slots
from towers.placement.devices import Devices, check_variable_device, resolve_devices
from towers.placement.numerics import rewrite_field
from towers.placement.tower_device import stages_of
from towers.placement.variable_device import Placement
from towers.reduce.loss_scale import LossScale
from towers.reduce.schedules import kept_at_once
from towers.shards.cut_batch import checked_shares
from towers.variables.variable_scopes import scope_to_enter

REDUCTIONS = ('sum', 'mean')


def checked_request(*, model: typing.Any, optimizer: typing.Any, devices: typing.Any,
                    reduction: typing.Any, remainder: typing.Any, shares: typing.Any,
                    global_step: typing.Any, regularization: typing.Any, update_ops: typing.Any,
                    batch_norm: typing.Any, variables: typing.Any, numerics: typing.Any,
                    memory: typing.Any, pipeline: typing.Any, cluster: typing.Any,
                    copies: typing.Any, reuse: typing.Any) -> Request:
    """Checks the arguments of `build_towers`, whatever they are, and gives the `Request` of them.

    Makes no operation. Raises a subclass of `TowersError` for each bad argument.
    """
    variables = _checked_option('variables', variables, VariablePlacement)
    numerics = _checked_option('numerics', numerics, Numerics)
    memory = _checked_option('memory', memory, Memory)
    pipeline = _checked_option('pipeline', pipeline, Pipeline)
    devices = resolve_devices(devices)
    shares = checked_shares(shares, len(devices), 'towers')
    _check_graph(tf.get_default_graph())
    check_choice('reduction', reduction, REDUCTIONS)
    check_choice('regularization', regularization, ('none', 'add'))
    check_choice('update_ops', update_ops, ('first', 'all', 'none'))
    check_choice('batch_norm', batch_norm, ('shard', 'sync'))
    check_choice('copies', copies, ('clone', 'reuse'))
    objectives = checked_objectives(optimizer)
    for objective in objectives:
        check_learning_rate(objective.optimizer, tf.get_default_graph())
    model = checked_model(model, objectives)
    if global_step is not None:
        check_step_variable(global_step)
    # `Cluster` is in a room above this room, which cannot import its class.
    if cluster is not None and not hasattr(cluster, 'check_build'):
        raise InvalidArgumentError(
            'cluster=%.80r: expected a towers.Cluster, or None.' % (cluster,))
    call = _checked_call(model, copies, reuse)

    # One of the two numbers is 1: `check_micro_batches` refuses both options together.
    accumulate = max(memory.accumulate, pipeline.micro_batches)
    if objectives.names is not None:
        check_losses(objectives.names, accumulate, numerics, cluster)
    check_micro_batches(devices, objectives, memory, pipeline)
    placement = _checked_placement(variables.device, devices, objectives, call.earlier, cluster)
    if numerics.precision != 'float32':
        # TensorFlow rewrites the graph for the precision. `rewrite_field` raises an error where
        # TensorFlow has no such rewrite.
        rewrite_field(numerics.precision, devices)

    request = Request(
        call=call,
        training=Training(objectives, reduction, regularization, update_ops, batch_norm,
                          global_step),
        split=_split(devices, accumulate, shares, remainder, call, cluster),
        devices=devices,
        placement=placement,
        numerics=numerics._replace(loss_scale=_loss_scale(numerics, objectives)),
        memory=_kept_results(memory, pipeline, placement, len(stages_of(devices[0])), objectives),
        cluster=cluster)
    check_together(request)
    _check_cluster(request)
    return request


def _check_graph(graph: tf.Graph) -> None:
    """Refuses a graph, and a place in it, in which no towers can be built: after a build that has
    failed, in eager mode, within a part of a graph, or within `tf.colocate_with`."""
    check_no_failed_build(graph)
    check_graph_mode('the result of build_towers')
    if compat.builds_inner_graph(graph):
        raise InvalidArgumentError(
            'build_towers is called within a branch, a loop, or a function of tf.data, tf.function '
            'or the like, of which a training is no part: call it outside of these. The model '
            'function may make branches and loops.')
    if compat.is_colocating(graph):
        raise InvalidArgumentError('build_towers is called within tf.colocate_with, and each tower '
                                   'is on a device of its own: call it outside.')


def _checked_option(name: str, given: typing.Any, kind: type) -> typing.Any:
    """The option `given` for the argument `name`, checked to be a `kind`; for None the default."""
    if given is None:
        return kind()
    check_instance(name, given, kind, 'a towers.%s, or None' % kind.__name__)
    return given


def checked_model(model: typing.Any, objectives: Objectives) -> typing.Any:
    """The model function itself, or the `ModelOutput` of a finished model.

    Raises:
      ModelFunctionError: the model is neither.
    """
    if is_finished(model):
        trains = bool(objectives)
        return output_of_finished(model, needs_loss=trains, names=objectives.names)
    if isinstance(getattr(model, 'loss', None), tf.Tensor):
        raise ModelFunctionError('model=%.80r is an object with a loss: pass the loss itself, '
                                 'such as model.loss.' % (model,))
    check_model_fn(model)
    return model


def check_model_fn(model_fn: typing.Any) -> None:
    """Raises `ModelFunctionError` for a model function that cannot be called."""
    if is_finished(model_fn):
        raise ModelFunctionError('model_fn=%.80r is a finished model, and a graph is made here: '
                                 'pass a function from a shard to its loss.' % (model_fn,))
    if not callable(model_fn):
        raise ModelFunctionError('model_fn=%.80r cannot be called: expected a function from a '
                                 'shard to its loss, or to build_towers the loss of a model that '
                                 'is in the graph already.' % (model_fn,))
    if hasattr(model_fn, 'get_concrete_function'):
        raise ModelFunctionError('model_fn=%.80r is a tf.function: pass the Python function that '
                                 'it was made of.' % (model_fn,))


def _checked_call(model: typing.Any, copies: str, reuse: typing.Any) -> ModelCall:
    """The `ModelCall` of a checked model; `copies` and `reuse` are arguments of `build_towers`.

    Raises:
      InvalidArgumentError: `reuse` is neither None, a flag of `tf.variable_scope`, nor an earlier
        build of this graph.
    """
    if isinstance(reuse, BuiltTowers):
        check_same_graph('reuse', reuse)
        return ModelCall(model, is_finished(model), copies, reuse=True, earlier=reuse,
                         variable_scope=scope_to_enter(reuse.variable_scope))
    if not (reuse is None or isinstance(reuse, bool) or reuse is tf.AUTO_REUSE):
        raise InvalidArgumentError('reuse=%.80r: expected None, True, tf.AUTO_REUSE, or the '
                                   'result of an earlier build_towers.' % (reuse,))
    return ModelCall(model, is_finished(model), copies, reuse, earlier=None, variable_scope=None)


def _checked_placement(device: typing.Optional[str], devices: Devices, objectives: Objectives,
                       earlier: typing.Optional[BuiltTowers], cluster: typing.Any) -> Placement:
    """The `Placement` of the variables.

    Args:
      device: a device, or a word for a way of placing, see `VariablePlacement`; or None.
      devices: the devices of the towers.
      objectives: what is trained; empty for an evaluation.
      earlier: the build whose variables are shared; or None.
      cluster: `Cluster` or None.

    Raises:
      InvalidArgumentError: the replicas of the variables could not be kept equal.
      DeviceError: TensorFlow does not have the device of a variable.
    """
    trains = bool(objectives)
    # Without a cluster this process trains alone, and refuses variables on parameter servers.
    trains_without_cluster = trains and cluster is None
    earlier_placement = None
    if earlier is not None and device is None:  # the variables stay where that build has put them
        earlier_placement = earlier.placement
    placement = Placement(device, devices, trains, alone=trains_without_cluster,
                          earlier=earlier_placement)
    # Devices that were not checked may be on another machine, which cannot be asked here.
    are_on_this_machine = devices.checked
    if are_on_this_machine and not placement.is_of_earlier_build:
        for variable_device in placement.devices():
            check_variable_device(variable_device, devices)
    if placement.has_replicas and earlier is not None:
        # Updates of the earlier build would write the variables, and not these replicas.
        check_variables_of_reuse(earlier)
    return placement


def _split(devices: Devices, accumulate: int, shares: typing.Sequence[int], remainder: typing.Any,
           call: ModelCall, cluster: typing.Any) -> BatchSplit:
    """The `BatchSplit` of a build.

    Args:
      devices: the device of each tower.
      accumulate: how many micro-batches each tower has.
      shares: the proportions of the towers' shards.
      remainder: what becomes of examples that whole shares leave over, see `cut`.
      call: the model, and how often it is called.
      cluster: `Cluster` or None.
    """
    name = _free_name(devices, accumulate, call)
    parts = _parts(name, devices, accumulate)
    # Each micro-batch of a tower has the tower's share: for shares 3 : 1 and two micro-batches a
    # tower, 3, 3, 1, 1.
    shares_of_parts: typing.List[int] = []
    for share in shares:
        shares_of_parts += [share] * accumulate
    parts_before = 0  # how many parts the machines with a lower rank have
    if cluster is not None:
        parts_before = cluster.rank * len(parts)
    return BatchSplit(parts=parts, shares=tuple(shares_of_parts), remainder=remainder,
                      accumulate=accumulate, parts_before=parts_before, name=name)


def _free_name(devices: Devices, accumulate: int, call: ModelCall) -> str:
    """The beginning of the towers' name scopes: `'tower'`; `'build_2/tower'` for a second build in
    the same graph.

    Args:
      devices: the device of each tower.
      accumulate: how many micro-batches each tower has.
      call: the model, and how often it is called.
    """
    graph = tf.get_default_graph()
    num_without_scope = 0
    if call.copies == 'clone' and not call.is_finished:
        # The first tower is the call of the model function itself, in the caller's name scope.
        num_without_scope = 1
    number_of_build = 1
    name = 'tower'
    while not _are_free(graph, name, _parts(name, devices, accumulate)[num_without_scope:]):
        number_of_build += 1
        name = 'build_%d/tower' % number_of_build
    return name


def _parts(name: str, devices: Devices, accumulate: int) -> typing.List[Part]:
    """The parts of the batch, tower by tower, in the name scopes `tower_0`, `tower_0_micro_1`, …

    Args:
      name: the beginning of the name scopes, such as `'tower'`.
      devices: the device of each tower.
      accumulate: how many micro-batches each tower has.
    """
    parts = []
    for tower, device in enumerate(devices):
        for micro_batch in range(accumulate):
            scope = '%s_%d' % (name, tower)
            if micro_batch:
                scope += '_micro_%d' % micro_batch
            parts.append(Part(tower, micro_batch, device, scope))
    return parts


def _are_free(graph: tf.Graph, name: str, parts: typing.Sequence[Part]) -> bool:
    """Whether the graph does not have the name scopes of a build yet.

    Args:
      graph: the graph of the build.
      name: the beginning of the name scopes, such as `'tower'`.
      parts: the parts of the batch that have a name scope.
    """
    scope_of_batch = name + 's'  # of what is made for the whole batch, such as its loss
    scopes = [part.scope for part in parts] + [scope_of_batch]
    return all(_is_free(graph, scope) for scope in scopes)


def _is_free(graph: tf.Graph, scope: str) -> bool:
    """Whether the graph would give a name scope this name, without a suffix such as `_1`."""
    current = graph.get_name_scope()
    full_name = '%s/%s' % (current, scope) if current else scope
    return graph.unique_name(scope, mark_as_used=False) == full_name


def _loss_scale(numerics: Numerics, objectives: Objectives) -> typing.Optional[LossScale]:
    """The given `LossScale`. If none is given, the default `LossScale` for fp16, else None. None
    for an evaluation."""
    if not objectives:
        return None
    if numerics.loss_scale is None and numerics.precision == 'fp16':
        return LossScale()
    return numerics.loss_scale


def _kept_results(memory: Memory, pipeline: Pipeline, placement: Placement, num_stages: int,
                  objectives: Objectives) -> KeptResults:
    """Which results are kept for the backward pass, and in which order. `memory` is the option with
    the recomputation; the other arguments are those of `_cutting`."""
    schedule = None  # without a pipeline micro-batches run one after the other
    is_pipeline = pipeline.micro_batches > 1
    if is_pipeline:
        schedule = pipeline.schedule
    return KeptResults(recompute=memory.recompute, schedule=schedule,
                       cutting=_cutting(pipeline, placement, num_stages, objectives))


def _cutting(pipeline: Pipeline, placement: Placement, num_stages: int, objectives: Objectives
             ) -> typing.Optional[Cutting]:
    """How the model is to be cut into stages; None where the model function marks them itself.

    Args:
      pipeline: the option with the stages and micro-batches that are asked for.
      placement: the placement of the variables: with `'stage'` a stage has the slots of its
        variables, too.
      num_stages: how many devices a tower has.
      objectives: what is trained, with the optimizers, which know how many slots they make.
    """
    if pipeline.stages is None:
        return None
    # The cuts are where the stages need about equal memory. In a pipeline a stage keeps the results
    # of several micro-batches until their backward passes, the first stage of the most. Without a
    # pipeline each stage keeps the results of one.
    kept_by_stage = [1] * num_stages
    if pipeline.micro_batches > 1:
        kept_by_stage = []
        for stage in range(num_stages):
            kept_by_stage.append(kept_at_once(pipeline.schedule, stage, num_stages,
                                              pipeline.micro_batches))
    trains = bool(objectives)
    slots_a_variable = None  # where variables, and so their slots, are not in the stages
    if placement.by_stage and trains:
        slots_a_variable = max(number_of_slots(each.optimizer) for each in objectives)
    return Cutting(kept_by_stage, trains, slots_a_variable)


def _check_cluster(request: Request) -> None:
    """Raises `ClusterError` for a cluster that does not support what the request asks for, and
    for a program that has variables on parameter servers but passes no cluster."""
    objectives = request.training.objectives
    trains = bool(objectives)
    if not trains:
        return  # an evaluation is of this machine alone, and may read variables on servers
    if request.cluster is None:
        optimizers = [each.optimizer for each in objectives]
        # A `VariablePlacement` that names a server wants variables there.
        check_alone(optimizers, refuses_servers=request.placement.refuses_servers,
                    variables=tf.global_variables())
    else:
        # There is one objective: `check_losses` refuses a cluster where losses have names.
        request.cluster.check_build(
            objectives[0].optimizer, has_replicas=request.placement.has_replicas,
            scales_loss=request.numerics.loss_scale is not None)
