"""Arguments of `build_towers` that travel together, and are checked together."""

import collections
import typing

from towers.arguments import check_choice, check_count, check_flag, check_function, check_instance
from towers.errors import InvalidArgumentError
from towers.model.objectives import Objectives, checked_variables
from towers.optimizers import check_optimizer
from towers.placement.devices import canonical_device
from towers.placement.numerics import PRECISIONS
from towers.placement.variable_device import BALANCED, BY_STAGE, REPLICATED
from towers.reduce.loss_scale import LossScale
from towers.reduce.micro_batches import SCHEDULES


class VariablePlacement(collections.namedtuple('VariablePlacement', 'device')):
    """The devices of the shared variables.

    Attributes:
      device: None (`/cpu:0`; the GPU when the only tower is on a GPU), a device name,
        `'balanced'`, `'stage'`, or `'replicated'`. `'stage'`: each variable is on the first tower's
        device of the stage that makes it. `'replicated'`: each tower has its
        own replica of every trainable variable (the model's variable is the first tower's replica),
        and updates it with the combined gradient. Numbers and checkpoints stay the same. The other
        replicas are local variables: a plain session runs `tf.local_variables_initializer()` after
        it has restored a checkpoint (`MonitoredSession` does this itself). A program that writes
        weights itself makes the operation `built.replicas.refresh()` with its graph, and runs it
        after the write. An optimizer other than TensorFlow's own may mix variables (a global norm):
        it updates the model's variables once, and their values are sent to the replicas. Without an
        optimizer no replicas are made.
    """
    __slots__ = ()

    def __new__(cls, device: typing.Any = None):
        if device is not None and not (isinstance(device, str) and (
                ':' in device or device in (BALANCED, REPLICATED, BY_STAGE))):
            raise InvalidArgumentError(
                "device=%.80r: expected None, a device's name, with a number, or 'balanced', "
                "'replicated' or 'stage' (not a device function)." % (device,))
        if device is not None and ':' in device:
            canonical_device(device)
        return super(VariablePlacement, cls).__new__(cls, device)


class Memory(collections.namedtuple('Memory', 'accumulate recompute')):
    """Ways to reduce a tower's memory that do not change the gradient.

    Attributes:
      accumulate: the number of micro-batches in each tower's shard. They run one after the other,
        in the memory of one, and one update applies the sum of their gradients: the gradient is the
        same, and `global_step`, rate and summaries count one step. Batch norm normalizes each
        micro-batch by itself; the first micro-batch updates its moving averages.
        `BuiltTowers.towers` has an entry for each micro-batch.
      recompute: `'auto'`: of n results of the forward pass about sqrt(n) are kept; the backward
        pass recomputes the rest from them. The numbers are the same, for less memory and about a
        third more time. Or a list of names of operations or scopes of the model whose results are
        kept. None: all are kept. See `recompute.rewrite`.
    """
    __slots__ = ()

    def __new__(cls, accumulate: int = 1,
                recompute: typing.Union[None, str, typing.Sequence[str]] = None):
        check_count('accumulate', accumulate)
        if not (recompute is None or isinstance(recompute, str) and recompute == 'auto'
                or isinstance(recompute, (list, tuple)) and recompute
                and all(isinstance(name, str) and name.rstrip('/') for name in recompute)):
            raise InvalidArgumentError(
                "recompute=%.80r: expected 'auto', a list of names of operations or scopes of the "
                'model whose results are kept, or None.' % (recompute,))
        return super(Memory, cls).__new__(cls, int(accumulate), recompute)


class Pipeline(collections.namedtuple('Pipeline', 'micro_batches schedule stages')):
    """The stages of towers that have several devices each, and the micro-batches in them.

    Attributes:
      micro_batches: the number of micro-batches in a tower's shard. While a stage works on one,
        the stage before works on the next; gradients are summed as by `Memory.accumulate`.
      schedule: the order of the micro-batches, `'one_forward_one_backward'` or `'all_forward'`, see
        `stage_order`.
      stages: `'auto'`: the first tower's graph is cut into as many stages as a tower has devices,
        with about the same memory each, see `cut_into_stages`. None: the model's own `stage`s.
    """
    __slots__ = ()

    def __new__(cls, micro_batches: int = 1, schedule: str = 'one_forward_one_backward',
                stages: typing.Optional[str] = None):
        check_count('micro_batches', micro_batches)
        check_choice('schedule', schedule, SCHEDULES)
        if stages is not None and not (isinstance(stages, str) and stages == 'auto'):
            raise InvalidArgumentError(
                "stages=%.80r: expected 'auto', for as many as a tower has devices, or None, for "
                'the stages that the model function marks with towers.stage(number).' % (stages,))
        return super(Pipeline, cls).__new__(cls, int(micro_batches), schedule, stages)


class Numerics(collections.namedtuple('Numerics', [
        'precision', 'loss_scale', 'xla', 'check_numerics', 'stateless_random'])):
    """Precision, random numbers, and checks for numbers that are not finite.

    Attributes:
      precision: `'float32'`; or `'bf16'` or `'fp16'`, by TensorFlow's own graph rewrite. The
        session's config has to ask for it too: `use_precision(config, precision, built.devices)`.
      loss_scale: `LossScale`; None: the default one with `'fp16'`, none with the others. With one,
        a step in which the gradient of at least one tower is not finite changes no weight and no
        slot, and is counted in `scaled_losses.skipped_steps`; `global_step` counts it too.
        Batch-norm statistics follow every forward pass, also in a skipped step.
        `check_numerics` then fails a step only for its loss, or at the least scale.
      xla: whether XLA compiles each tower's forward and backward pass, see `xla`. Combination and
        update are not compiled.
      check_numerics: a NaN or an infinity in a tower's loss or gradient fails the step, naming the
        tower and the variable; see `errors`.
      stateless_random: dropout and other random ops of the model draw numbers that depend on the
        graph-level seed, the op's name and `global_step` alone, so that a run that resumes draws
        the same numbers as a run without a break; see `stateless_random`.
    """
    __slots__ = ()

    def __new__(cls, precision: str = 'float32', loss_scale: typing.Optional[LossScale] = None,
                xla: bool = False, check_numerics: bool = False, stateless_random: bool = False):
        check_choice('precision', precision, PRECISIONS)
        if loss_scale is not None:
            check_instance('loss_scale', loss_scale, LossScale,
                           'a LossScale, such as LossScale(initial=2. ** 15), or None')
        for name, flag in (('xla', xla), ('check_numerics', check_numerics),
                           ('stateless_random', stateless_random)):
            check_flag(name, flag)
        return super(Numerics, cls).__new__(cls, precision, loss_scale, xla, check_numerics,
                                            stateless_random)


class Objective(collections.namedtuple('Objective', [
        'optimizer', 'var_list', 'transform_gradients', 'name'])):
    """An optimizer with its variables and gradient transformation, for `build_towers`.

    >>> towers.build_towers(model_fn, inputs, towers.Objective(
    ...     tf.train.AdamOptimizer(0.001), transform_gradients=clip_by_norm), 4, 'mean')

    Attributes:
      optimizer: a `tf.train.Optimizer`. If it overrides `compute_gradients` or `minimize`, that is
        called once, for the whole batch.
      var_list: the variables to train: a list, or a function from the list of all trainable
        variables to a list of some; None for all.
      transform_gradients: a function from the combined `(gradient, variable)` pairs to the pairs to
        apply, such as `tf.clip_by_global_norm`. A variable without a gradient has a pair with None.
      name: the name of the loss in the dict that the model function returns; None for one loss.
    """
    __slots__ = ()

    def __new__(cls, optimizer: typing.Any, var_list: typing.Any = None,
                transform_gradients: typing.Optional[typing.Callable] = None):
        check_optimizer(optimizer, or_else='')
        var_list = _checked_var_list(var_list)
        if transform_gradients is not None:
            check_function('transform_gradients', transform_gradients, 1,
                           'a function from (gradient, variable) pairs to such pairs')
        return super(Objective, cls).__new__(cls, optimizer, var_list, transform_gradients, None)


def checked_objectives(optimizer):
    """The `Objectives` of the `optimizer=` of `build_towers`."""
    if not isinstance(optimizer, dict):
        return Objectives([] if optimizer is None else [_objective(optimizer, 'optimizer')])
    if not optimizer or not all(isinstance(name, str) for name in optimizer):
        raise InvalidArgumentError('optimizer=%.200r: expected an optimizer for each loss by its '
                                   'name, one optimizer, or None to evaluate.' % (optimizer,))
    objectives = [_objective(each, 'optimizer[%r]' % name)._replace(name=name)
                  for name, each in optimizer.items()]
    if len({id(each.optimizer) for each in objectives}) < len(objectives):
        raise InvalidArgumentError('optimizer=%.200r: expected an optimizer of its own for each '
                                   'loss, since it keeps slots by variable.' % (optimizer,))
    return Objectives(objectives)


def _objective(given, argument):
    if isinstance(given, Objective):
        return given
    check_optimizer(given, argument, or_else='a towers.Objective' + (
        ', or None to evaluate' if argument == 'optimizer' else ''))
    return Objective(given)


def _checked_var_list(var_list):
    """None, a function, or a list of variables; else `InvalidArgumentError`."""
    expected = ('None, a list of variables, or a function from all trainable variables to such a '
                'list')
    if callable(var_list):
        check_function('var_list', var_list, 1, expected)
    elif var_list is not None:
        if not isinstance(var_list, (list, tuple)) or not var_list:
            raise InvalidArgumentError('var_list=%.80r: expected %s.' % (var_list, expected))
        return checked_variables(var_list, 'var_list')
    return var_list
