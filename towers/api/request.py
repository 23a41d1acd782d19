"""The arguments of one `build_towers` call, checked and resolved before any operation is made."""

import collections
import itertools
import typing

import tensorflow.compat.v1 as tf

from towers.api.built import BuiltTowers, check_same_graph
from towers.api.options import Memory, Numerics, Pipeline, VariablePlacement, checked_objectives
from towers.arguments import check_choice, check_graph_mode, check_instance, check_step_variable
from towers.capture.finished_model import is_finished, output_of_finished
from towers.capture.stage_cuts import Cutting
from towers.errors import InvalidArgumentError, ModelFunctionError
from towers.model.build_context import check_no_failed_build
from towers.optimizers import check_alone, has_own_minimize, number_of_slots
from towers.placement.devices import MOST_TOWERS, check_variable_device, resolve_devices
from towers.placement.numerics import rewrite_field
from towers.placement.tower_device import stages_of
from towers.placement.variable_device import Placement
from towers.reduce.loss_scale import LossScale
from towers.reduce.micro_batches import kept_at_once
from towers.shards.cut_batch import checked_shares
from towers.variables.new_variables import scope_to_enter

REDUCTIONS = ('sum', 'mean')
_CHOICES = dict(reduction=REDUCTIONS, regularization=('none', 'add'),
                update_ops=('first', 'all', 'none'), batch_norm=('shard', 'sync'),
                copies=('clone', 'reuse'))


class Request(collections.namedtuple('Request', [
        'model', 'objectives', 'devices', 'reduction', 'remainder', 'shares', 'global_step',
        'regularization', 'update_ops', 'batch_norm', 'numerics', 'recompute', 'cluster', 'copies',
        'reuse', 'earlier', 'variable_scope', 'name', 'parts_before', 'parts',
        'accumulate', 'schedule', 'cutting', 'placement', 'loss_scale',
        'no_batch_values', 'precision_text'])):
    """The checked arguments of a call; arguments under their own names, and:

    Attributes:
      model: a model function; or, of a finished model, its `ModelOutput`, and then the
        `FinishedModel`.
      shares: the proportions of the parts, see `checked_shares`.
      reuse: as the variable scope of the model takes it.
      earlier: `BuiltTowers`, whose variables are shared; or None.
      variable_scope: the scope to enter for the model; None for the caller's.
      name: prefix of the towers' name scopes: `'tower'`; of a second build `'build_2/tower'`.
      parts_before: how many parts the machines before this one have, for seeds of random ops.
      parts: list of `Part`, in the order of the batch: tower by tower, then by micro-batch.
      accumulate: how many micro-batches each tower has.
      schedule: the order of micro-batches in the stages; None for one after the other.
      cutting: `Cutting`; None where the model is not cut into stages.
      loss_scale: `LossScale` or None: the given one, or the default for the precision.
      no_batch_values: why the parts of the batch cannot exchange values in this build; or None.
      precision_text: the plan's line about the precision; None for float32.
    """
    __slots__ = ()

    @property
    def is_finished(self) -> bool:
        """Whether the model is in the graph already."""
        return is_finished(self.model)

    @property
    def factor(self) -> float:
        """1 for the gradient of the mean over the batch, N for the recipe's sum: a float."""
        return 1. if self.reduction == 'mean' else float(len(self.devices))

    @property
    def parts_a_call(self) -> int:
        """How many parts of the batch one call of the model function serves."""
        return len(self.parts) if self.copies == 'clone' else 1

    @property
    def has_whole_batch(self) -> bool:
        """Whether no other machine has a part in the batch of a step."""
        return self.cluster is None or self.cluster.workers_a_step == 1

    @property
    def random_step(self) -> typing.Optional[tf.Variable]:
        """The step that random ops draw by; None where they are left as they are."""
        return self.global_step if self.numerics.stateless_random else None

    @property
    def served_rank(self) -> typing.Optional[int]:
        """The number of this worker, where several make one step on parameter servers; or None."""
        return None if self.cluster is None else self.cluster.served_rank

    @property
    def has_copies(self) -> bool:
        """Whether each of several workers has the variables, as in a ring."""
        return self.cluster is not None and self.cluster.has_copies


Part = collections.namedtuple('Part', 'tower micro_batch device scope')
"""The place of a shard: numbers of its tower and of the micro-batch there; device; name scope."""


def checked_request(*, model, optimizer, devices, reduction, remainder, shares, global_step,
                    regularization, update_ops, batch_norm, variables, numerics, memory, pipeline,
                    cluster, copies, reuse):
    """Checks the arguments of `build_towers`, before any operation is made: the `Request`."""
    for name, given, kind in (
            ('variables', variables, VariablePlacement), ('numerics', numerics, Numerics),
            ('memory', memory, Memory), ('pipeline', pipeline, Pipeline)):
        if given is not None:
            check_instance(name, given, kind, 'a towers.%s, or None' % kind.__name__)
    variables, numerics = variables or VariablePlacement(), numerics or Numerics()
    memory, pipeline = memory or Memory(), pipeline or Pipeline()
    devices = resolve_devices(devices)
    shares = checked_shares(shares, len(devices), 'towers')
    check_no_failed_build(tf.get_default_graph())
    check_graph_mode('the result of build_towers')
    for argument, given in dict(
            reduction=reduction, regularization=regularization, update_ops=update_ops,
            batch_norm=batch_norm, copies=copies).items():
        check_choice(argument, given, _CHOICES[argument])
    objectives = checked_objectives(optimizer)
    model = checked_model(model, objectives)
    if global_step is not None:
        check_step_variable(global_step)
    if not (cluster is None or hasattr(cluster, 'check_build')):
        raise InvalidArgumentError(
            'cluster=%.80r: expected a towers.Cluster, or None.' % (cluster,))
    earlier, variable_scope = _checked_reuse(reuse)
    loss_scale = numerics.loss_scale if objectives else None
    if objectives and loss_scale is None and numerics.precision == 'fp16':
        loss_scale = LossScale()
    accumulate = max(memory.accumulate, pipeline.micro_batches)
    if objectives.names is not None:
        _check_losses(objectives.names, accumulate, numerics, cluster)
    _check_micro_batches(devices, objectives, memory, pipeline)
    placement = _checked_placement(variables, devices, objectives, earlier, cluster)
    # The first tower is the model function's call itself, in the scope of the build.
    num_without_scope = 1 if copies == 'clone' and not is_finished(model) else 0
    name, parts = _named_parts(tf.get_default_graph(), devices, accumulate, num_without_scope)
    request = Request(
        model=model, objectives=objectives, devices=devices, reduction=reduction,
        remainder=remainder, shares=tuple(each for each in shares for _ in range(accumulate)),
        global_step=global_step, regularization=regularization, update_ops=update_ops,
        batch_norm=batch_norm, numerics=numerics, recompute=memory.recompute, cluster=cluster,
        copies=copies, reuse=reuse if earlier is None else True, earlier=earlier,
        variable_scope=variable_scope, name=name,
        parts_before=0 if cluster is None else cluster.rank * len(parts), parts=parts,
        accumulate=accumulate, schedule=pipeline.schedule if pipeline.micro_batches > 1 else None,
        cutting=_cutting(pipeline, placement, len(stages_of(devices[0])), objectives),
        placement=placement, loss_scale=loss_scale,
        no_batch_values=_no_batch_values(accumulate, cluster),
        precision_text=None if numerics.precision == 'float32' else (
            "%s by TensorFlow's rewrite %s; the audit of a step says whether it acts" % (
                numerics.precision, rewrite_field(numerics.precision, devices))))
    _check_together(request)
    if cluster is not None and objectives:
        cluster.check_build(objectives[0].optimizer, placement.has_replicas, loss_scale is not None)
    elif objectives:
        check_alone([each.optimizer for each in objectives], placement.leaves_servers,
                    tf.global_variables())
    return request


def checked_model(model, objectives):
    """A model function, or the `ModelOutput` of a finished model. Raises `ModelFunctionError` for
    what is neither."""
    if is_finished(model):
        return output_of_finished(model, bool(objectives), objectives.names)
    if isinstance(getattr(model, 'loss', None), tf.Tensor):
        raise ModelFunctionError('model=%.80r is an object with a loss: pass the loss itself, '
                                 'such as model.loss.' % (model,))
    check_model_fn(model)
    return model


def check_model_fn(model_fn):
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


def _checked_placement(variables, devices, objectives, earlier, cluster):
    """The `Placement` of the variables; checks that their replicas can be kept equal."""
    placement = Placement(variables.device, devices, bool(objectives),
                          alone=bool(objectives) and cluster is None,
                          earlier=None if earlier is None or variables.device is not None
                          else earlier.placement)
    if devices.checked and not placement.is_earlier_builds:
        for device in placement.devices():
            check_variable_device(device, devices)
    if placement.has_replicas and earlier is not None and (
            earlier.train_op is not None and earlier.replicas is None):
        raise InvalidArgumentError(
            "VariablePlacement('replicated'), but reuse= is a build that trains the same variables "
            "without replicas, so that its updates would not reach this build's replicas: pass "
            "VariablePlacement('replicated') to that build, too, on several towers.")
    return placement


def _checked_reuse(reuse):
    """`(build whose variables are shared, scope to enter)`; `(None, None)` without one."""
    if isinstance(reuse, BuiltTowers):
        check_same_graph('reuse', reuse)
        return reuse, scope_to_enter(reuse.variable_scope)
    if not (reuse is None or isinstance(reuse, bool) or reuse is tf.AUTO_REUSE):
        raise InvalidArgumentError('reuse=%.80r: expected None, True, tf.AUTO_REUSE, or the '
                                   'result of an earlier build_towers.' % (reuse,))
    return None, None


def _raise_first(contradictions):
    """Raises `InvalidArgumentError` with the text of the first `(is it so, text)` that is so."""
    for is_so, text in contradictions:
        if is_so:
            raise InvalidArgumentError(text)


def _check_losses(names, count, numerics, cluster):
    """Raises `InvalidArgumentError` for options that do not go with several losses."""
    _raise_first([(is_so, '%s goes with one loss, and there are several (%s): %s.' % (
        what, ', '.join(names), because)) for is_so, what, because in [
            (numerics.loss_scale is not None or numerics.precision == 'fp16',
             'a loss scale (%s)' % (
                 "precision='fp16'" if numerics.loss_scale is None else 'loss_scale='),
             "pass precision='bf16' or 'float32', and no loss_scale"),
            (count > 1, 'a number of micro-batches (%d)' % count,
             'each waits for the gradients of all losses of the micro-batch before'),
            (cluster is not None, 'cluster=',
             'which of their steps the machines take together is not known here')]])


def _check_micro_batches(devices, objectives, memory, pipeline):
    """Raises `InvalidArgumentError` for micro-batches or stages that do not go with the rest."""
    is_pipeline, has_stages = pipeline.micro_batches > 1, len(stages_of(devices[0])) > 1
    name, count = (('micro_batches', pipeline.micro_batches) if is_pipeline else
                   ('accumulate', memory.accumulate))
    _raise_first([
        (is_pipeline and memory.accumulate > 1,
         'micro_batches=%d and accumulate=%d: a pipeline adds up the gradients of its '
         'micro-batches, too. Pass micro_batches=%d alone.' % (
             count, memory.accumulate, count * memory.accumulate)),
        (count > 1 and not objectives,
         '%s=%d, and there is no optimizer: it is for gradients. Evaluate in smaller batches.' % (
             name, count)),
        ((is_pipeline or pipeline.stages is not None) and not has_stages,
         '%s, and each tower has one device: pass several a tower, such as devices=[[\'/gpu:0\', '
         "'/gpu:1'], ['/gpu:2', '/gpu:3']]; to cut the batch alone, Memory(accumulate=…)." % (
             'micro_batches=%d' % count if is_pipeline else 'stages=%.40r' % pipeline.stages)),
        (count * len(devices) > MOST_TOWERS,
         '%s=%d on %d tower%s: expected %d micro-batches in all at most.' % (
             name, count, len(devices), '' if len(devices) == 1 else 's', MOST_TOWERS))])


def _check_together(request):
    """Raises `InvalidArgumentError` for other options that contradict each other."""
    minimizing = ', '.join(type(each.optimizer).__name__ for each in request.objectives
                           if has_own_minimize(each.optimizer))
    recompute = None if request.recompute is None else '%.80r' % (request.recompute,)
    has_replicas, loss_scale = request.placement.has_replicas, request.loss_scale
    _raise_first([
        (request.numerics.stateless_random and request.global_step is None,
         'stateless_random=True needs a global_step to draw by.'),
        (recompute and not request.objectives,
         'recompute=%s, and there is no optimizer: without a backward pass nothing is kept for '
         'it.' % recompute),
        (recompute and request.numerics.xla,
         'recompute=%s and xla=True: XLA chooses the results that it keeps. Pass one of the two.'
         % recompute),
        (request.is_finished and request.copies == 'reuse',
         "copies='reuse' calls a model function for every tower, and the model is finished: pass "
         "copies='clone'."),
        (request.is_finished and request.earlier is None and request.reuse is not None,
         'reuse=%r is for variables that a model function makes, and the model is finished: leave '
         'it out.' % (request.reuse,)),
        (request.copies == 'reuse' and (has_replicas or request.cutting is not None),
         "copies='reuse' goes with neither VariablePlacement('replicated') nor stages=: pass "
         "copies='clone'."),
        (minimizing and (loss_scale is not None or has_replicas),
         '%s has a minimize of its own, and there is a %s: its computations between the '
         'gradients and their update would be done to other gradients, too. Put it into '
         'apply_gradients, or into transform_gradients.' % (
             minimizing, 'loss scale' if loss_scale is not None else
             "replica of each variable (VariablePlacement('replicated'))")),
        (request.batch_norm == 'sync' and request.no_batch_values is not None,
         "batch_norm='sync': %s." % request.no_batch_values)])


def _cutting(pipeline, placement, num_stages, objectives):
    """`Cutting` into stages; None where the model is not cut."""
    if pipeline.stages is None:
        return None
    copies = [1] * num_stages if pipeline.micro_batches == 1 else [
        kept_at_once(pipeline.schedule, stage, num_stages, pipeline.micro_batches)
        for stage in range(num_stages)]
    slots = max([number_of_slots(each.optimizer) for each in objectives], default=None)
    return Cutting(copies, bool(objectives), slots if placement.by_stage else None)


def _no_batch_values(accumulate, cluster):
    """Why the parts of a batch cannot exchange values in a build; or None."""
    if accumulate > 1:
        return ('a tower has %d micro-batches, which are not there at the same time: build without '
                'micro-batches (Memory, Pipeline)' % accumulate)
    return None if cluster is None else (
        'the batch is on several machines, which do not exchange it: build without cluster=')


def _named_parts(graph, devices, accumulate, num_without_scope):
    """`(prefix of the towers' name scopes, list of Part)`: scopes that the graph does not have.
    `num_without_scope` first parts use none."""
    around = graph.get_name_scope()
    for number in itertools.count(1):
        name = 'tower' if number == 1 else 'build_%d/tower' % number
        parts = [Part(tower, micro_batch, device, '%s_%d' % (name, tower)
                      + ('_micro_%d' % micro_batch if micro_batch else ''))
                 for tower, device in enumerate(devices) for micro_batch in range(accumulate)]
        scopes = [part.scope for part in parts[num_without_scope:]] + [name + 's']
        if all(graph.unique_name(scope, mark_as_used=False) == (
                '%s/%s' % (around, scope) if around else scope) for scope in scopes):
            return name, parts
