"""Options of `build_towers` that contradict each other: an `InvalidArgumentError` for each."""

import typing

from towers.api.built import BuiltTowers
from towers.api.options import Memory, Numerics, Pipeline
from towers.errors import InvalidArgumentError, counted
from towers.model.objectives import Objectives
from towers.model.request import Request
from towers.model.requested import ModelCall
from towers.optimizers import has_own_minimize
from towers.placement.devices import MOST_TOWERS, Devices
from towers.placement.tower_device import stages_of


def check_losses(names: typing.List[str], accumulate: int, numerics: Numerics,
                 cluster: typing.Any) -> None:
    """Refuses options that do not go with several losses.

    Args:
      names: the names of the losses.
      accumulate: how many micro-batches each tower has.
      numerics: the option that has the loss scale and the precision.
      cluster: `Cluster` or None.
    """
    # A build has one loss scale, which rises and falls by whether the gradients of a step are
    # finite. With several losses, a step may train by one loss alone.
    if numerics.loss_scale is not None:
        raise _needs_one_loss(names, 'a loss scale (loss_scale=)',
                              "pass precision='bf16' or 'float32', and no loss_scale")
    if numerics.precision == 'fp16':
        raise _needs_one_loss(names, "a loss scale (precision='fp16')",
                              "pass precision='bf16' or 'float32', and no loss_scale")
    if accumulate > 1:
        raise _needs_one_loss(names, 'a number of micro-batches (%d)' % accumulate,
                              'each waits for the gradients of all losses of the micro-batch '
                              'before')
    if cluster is not None:
        raise _needs_one_loss(names, 'cluster=',
                              'each has a train op of its own, and which of these the machines run '
                              'together is not known')


def _needs_one_loss(names: typing.List[str], option: str, reason: str) -> InvalidArgumentError:
    """The error for an option that needs one loss without a name, where losses have names.

    Args:
      names: the names of the losses; there may be only one.
      option: the option, in words.
      reason: why the option needs one loss, or what to do; the error has it if there are several
        losses.
    """
    if len(names) == 1:
        return InvalidArgumentError(
            '%s goes with one loss without a name, and optimizer= is a dict (of %s): pass the '
            'optimizer itself, and have the model function return the loss itself.' % (
                option, names[0]))
    return InvalidArgumentError('%s goes with one loss, and there are several (%s): %s.' % (
        option, ', '.join(names), reason))


def check_micro_batches(devices: Devices, objectives: Objectives, memory: Memory,
                        pipeline: Pipeline) -> None:
    """Refuses micro-batches or stages that contradict each other, the devices or the optimizer.

    Args:
      devices: the devices of the towers.
      objectives: what is trained; empty for an evaluation.
      memory: the option with the micro-batches that run one after the other.
      pipeline: the option with the stages, and with the micro-batches that run through them.
    """
    is_pipeline = pipeline.micro_batches > 1
    if is_pipeline:
        name = 'micro_batches'
        count = pipeline.micro_batches
    else:
        name = 'accumulate'
        count = memory.accumulate
    if is_pipeline and memory.accumulate > 1:
        raise InvalidArgumentError(
            'micro_batches=%d and accumulate=%d: a pipeline adds up the gradients of its '
            'micro-batches, too. Pass micro_batches=%d alone.' % (
                count, memory.accumulate, count * memory.accumulate))
    if count > 1 and not objectives:
        raise InvalidArgumentError(
            '%s=%d, and there is no optimizer: it is for gradients. Evaluate in smaller batches.'
            % (name, count))
    _check_has_stages(devices, pipeline)
    # The build copies the graph for each micro-batch, as for a tower.
    if count * len(devices) > MOST_TOWERS:
        raise InvalidArgumentError(
            '%s=%d on %s: expected %d micro-batches in all at most.' % (
                name, count, counted(len(devices), 'tower'), MOST_TOWERS))


def _check_has_stages(devices: Devices, pipeline: Pipeline) -> None:
    """Refuses a pipeline, and a cut into stages, for towers of one device."""
    has_stages = len(stages_of(devices[0])) > 1
    if has_stages:
        return
    if pipeline.micro_batches > 1:
        raise _without_stages('micro_batches=%d' % pipeline.micro_batches)
    if pipeline.stages is not None:
        raise _without_stages('stages=%.40r' % pipeline.stages)


def _without_stages(option: str) -> InvalidArgumentError:
    """The error for an `option` of stages, where each tower has one device."""
    return InvalidArgumentError(
        "%s, and each tower has one device: pass several a tower, such as devices=[['/gpu:0', "
        "'/gpu:1'], ['/gpu:2', '/gpu:3']]; to cut the batch alone, Memory(accumulate=…)." % option)


def check_variables_of_reuse(earlier: BuiltTowers) -> None:
    """Refuses to make replicas of variables that an earlier build trains without replicas."""
    if earlier.train_op is not None and earlier.replicas is None:
        raise InvalidArgumentError(
            "VariablePlacement('replicated'), but reuse= is a build that trains the same variables "
            "without replicas, so that its updates would not reach this build's replicas: pass "
            "VariablePlacement('replicated') to that build, too, on several towers.")


def check_together(request: Request) -> None:
    """Refuses options of a whole `Request` that contradict each other."""
    training = request.training
    if request.numerics.stateless_random and training.global_step is None:
        raise InvalidArgumentError('stateless_random=True needs a global_step to draw by.')
    _check_recompute(request)
    if request.call.is_finished:
        _check_finished(request.call)
    # Replicas, and cuts into stages, are made for tower 0: the other towers have them as its
    # copies.
    cuts_or_replicas = request.placement.has_replicas or request.memory.cutting is not None
    if request.call.copies == 'reuse' and cuts_or_replicas:
        raise InvalidArgumentError(
            "copies='reuse' goes with neither VariablePlacement('replicated') nor stages=: pass "
            "copies='clone'.")
    _check_own_minimize(request)
    why_towers_exchange_nothing = request.no_batch_values  # None where they can exchange values
    if training.batch_norm == 'sync' and why_towers_exchange_nothing is not None:
        raise InvalidArgumentError("batch_norm='sync': %s." % why_towers_exchange_nothing)


def _check_finished(call: ModelCall) -> None:
    """Refuses options about the call of a model function, where the model is finished."""
    if call.copies == 'reuse':
        raise InvalidArgumentError(
            "copies='reuse' calls a model function for every tower, and the model is finished: "
            "pass copies='clone'.")
    # `reuse=` may be an earlier build: the finished model has the variables of that build.
    if call.earlier is None and call.reuse is not None:
        raise InvalidArgumentError(
            'reuse=%r is for variables that a model function makes, and the model is finished: '
            'leave it out.' % (call.reuse,))


def _check_recompute(request: Request) -> None:
    """Refuses recomputation without a backward pass, and where XLA decides what is kept."""
    recompute = request.memory.recompute
    if recompute is None:
        return
    given = 'recompute=%.80r' % (recompute,)
    if not request.training.objectives:
        raise InvalidArgumentError(
            '%s, and there is no optimizer: without a backward pass nothing is kept for it.'
            % given)
    if request.numerics.xla:
        raise InvalidArgumentError(
            '%s and xla=True: XLA chooses the results that it keeps. Pass one of the two.' % given)


def _check_own_minimize(request: Request) -> None:
    """Refuses an optimizer with a `minimize` of its own together with a loss scale or replicas.

    Such an optimizer computes something between the gradients and their update. With these options
    it would get other gradients for this than it expects: scaled gradients, or the gradients of
    each replica.
    """
    if request.numerics.loss_scale is not None:
        changes = 'loss scale'
    elif request.placement.has_replicas:
        changes = "replica of each variable (VariablePlacement('replicated'))"
    else:
        return
    names = [type(each.optimizer).__name__ for each in request.training.objectives
             if has_own_minimize(each.optimizer)]
    if names:
        raise InvalidArgumentError(
            '%s has a minimize of its own, and there is a %s: its computations between the '
            'gradients and their update would be done to other gradients, too. Put it into '
            'apply_gradients, or into transform_gradients.' % (', '.join(names), changes))
