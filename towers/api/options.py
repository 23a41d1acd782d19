"""Arguments of `build_towers` that belong together: frozen objects that check their fields."""

import typing

from towers.arguments import check_choice, check_count, check_flag, check_function, check_instance
from towers.errors import InvalidArgumentError
from towers.model.objectives import Objectives, checked_variables
from towers.model.requested import NumericsFields
from towers.optimizers import check_optimizer
from towers.placement.devices import canonical_device
from towers.placement.numerics import PRECISIONS
from towers.placement.variable_device import BALANCED, BY_STAGE, REPLICATED
from towers.reduce.loss_scale import LossScale
from towers.reduce.schedules import SCHEDULES


class _VariablePlacementFields(typing.NamedTuple):
    """The fields of `VariablePlacement`, which checks them."""

    device: typing.Optional[str]


class VariablePlacement(_VariablePlacementFields):
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
        """Raises `InvalidArgumentError` for a `device` that is neither a word nor a name."""
        is_text = isinstance(device, str)
        is_word = is_text and device in (BALANCED, REPLICATED, BY_STAGE)
        is_name = is_text and ':' in device
        if not (device is None or is_word or is_name):
            raise InvalidArgumentError(
                "device=%.80r: expected None, a device's name, with a number, or 'balanced', "
                "'replicated' or 'stage' (not a device function)." % (device,))
        if is_name:
            canonical_device(device)  # raises for what is not the name of one device
        return super(VariablePlacement, cls).__new__(cls, device)


class _MemoryFields(typing.NamedTuple):
    """The fields of `Memory`, which checks them."""

    accumulate: int
    recompute: typing.Union[None, str, typing.Sequence[str]]


class Memory(_MemoryFields):
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
        """Raises `InvalidArgumentError` for an `accumulate` that is no count, or a `recompute` that
        is neither `'auto'` nor a list of names."""
        check_count('accumulate', accumulate)
        is_auto = isinstance(recompute, str) and recompute == 'auto'
        if not (recompute is None or is_auto or _are_names(recompute)):
            raise InvalidArgumentError(
                "recompute=%.80r: expected 'auto', a list of names of operations or scopes of the "
                'model whose results are kept, or None.' % (recompute,))
        return super(Memory, cls).__new__(cls, int(accumulate), recompute)


def _are_names(given: typing.Any) -> bool:
    """Whether `given` is a list of at least one name of an operation or scope."""
    if not isinstance(given, (list, tuple)) or not given:
        return False
    return all(isinstance(name, str) and name.rstrip('/') for name in given)


class _PipelineFields(typing.NamedTuple):
    """The fields of `Pipeline`, which checks them."""

    micro_batches: int
    schedule: str
    stages: typing.Optional[str]


class Pipeline(_PipelineFields):
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
        """Raises `InvalidArgumentError` for `micro_batches` that are no count, an unknown
        `schedule`, or other `stages` than `'auto'`."""
        check_count('micro_batches', micro_batches)
        check_choice('schedule', schedule, SCHEDULES)
        is_auto = isinstance(stages, str) and stages == 'auto'
        if stages is not None and not is_auto:
            raise InvalidArgumentError(
                "stages=%.80r: expected 'auto', for as many as a tower has devices, or None, for "
                'the stages that the model function marks with towers.stage(number).' % (stages,))
        return super(Pipeline, cls).__new__(cls, int(micro_batches), schedule, stages)


class Numerics(NumericsFields):
    """Precision, random numbers, and checks for numbers that are not finite.

    Attributes:
      precision: `'float32'`; or `'bf16'` or `'fp16'`, by TensorFlow's own graph rewrite. The
        session's config has to ask for it too: `use_precision(config, precision, built.devices)`.
      loss_scale: `LossScale`; None: the default `LossScale` with `'fp16'`, no loss scale with the
        other precisions. With a loss scale, a step in which the gradient of at least one tower is
        not finite changes no weight and no slot. `scaled_losses.skipped_steps` counts such a step,
        and so does `global_step`.
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
        """Raises `InvalidArgumentError` for a field of another type, or an unknown `precision`."""
        check_choice('precision', precision, PRECISIONS)
        if loss_scale is not None:
            check_instance('loss_scale', loss_scale, LossScale,
                           'a LossScale, such as LossScale(initial=2. ** 15), or None')
        check_flag('xla', xla)
        check_flag('check_numerics', check_numerics)
        check_flag('stateless_random', stateless_random)
        return super(Numerics, cls).__new__(cls, precision, loss_scale, xla, check_numerics,
                                            stateless_random)


class _ObjectiveFields(typing.NamedTuple):
    """The fields of `Objective`, which checks them."""

    optimizer: typing.Any
    var_list: typing.Any
    transform_gradients: typing.Optional[typing.Callable]
    name: typing.Optional[str]


class Objective(_ObjectiveFields):
    """An optimizer with its variables and gradient transformation, for `build_towers`.

    >>> towers.build_towers(model_fn, inputs, towers.Objective(
    ...     tf.train.AdamOptimizer(0.001), transform_gradients=clip_by_norm), 4, 'mean')

    Attributes:
      optimizer: a `tf.train.Optimizer`. If it overrides `compute_gradients` or `minimize`, that
        method is called once, for the whole batch.
      var_list: the variables to train: a list, or a function from the list of all trainable
        variables to a list of some; None for all.
      transform_gradients: a function from the combined `(gradient, variable)` pairs to the pairs to
        apply, such as `tf.clip_by_global_norm`. A variable without a gradient has a pair with None.
      name: the name of the loss in the dict that the model function returns; None for one loss.
    """
    __slots__ = ()

    def __new__(cls, optimizer: typing.Any, var_list: typing.Any = None,
                transform_gradients: typing.Optional[typing.Callable] = None):
        """Raises `InvalidArgumentError` for a field that is not what its line above says."""
        check_optimizer(optimizer, or_else='')
        var_list = _checked_var_list(var_list)
        if transform_gradients is not None:
            check_function('transform_gradients', transform_gradients, 1,
                           'a function from (gradient, variable) pairs to such pairs')
        name = None  # `checked_objectives` gives the name, from the dict of optimizers
        return super(Objective, cls).__new__(cls, optimizer, var_list, transform_gradients, name)


def checked_objectives(optimizer: typing.Any) -> Objectives:
    """The `Objectives` in `optimizer=` of `build_towers`: one for each loss; empty for None.

    Raises:
      InvalidArgumentError: `optimizer` is no optimizer, and no dict of optimizers by names of
        losses.
    """
    if optimizer is None:
        return Objectives([])
    if not isinstance(optimizer, dict):
        return Objectives([_objective(optimizer, 'optimizer')])
    if not optimizer or not all(isinstance(name, str) for name in optimizer):
        raise InvalidArgumentError('optimizer=%.200r: expected an optimizer for each loss by its '
                                   'name, one optimizer, or None to evaluate.' % (optimizer,))
    objectives = []
    for name, given in optimizer.items():
        objective = _objective(given, 'optimizer[%r]' % name)
        objectives.append(objective._replace(name=name))
    num_optimizers = len({id(objective.optimizer) for objective in objectives})
    if num_optimizers < len(objectives):
        raise InvalidArgumentError('optimizer=%.200r: expected an optimizer of its own for each '
                                   'loss, since it keeps slots by variable.' % (optimizer,))
    return Objectives(objectives)


def _objective(given: typing.Any, argument: str) -> Objective:
    """The `Objective` of an optimizer, or the given one; errors name the `argument`."""
    if isinstance(given, Objective):
        return given
    also_taken = 'a towers.Objective'  # besides an optimizer, for the error
    if argument == 'optimizer':  # no entry of a dict of optimizers
        also_taken += ', or None to evaluate'
    check_optimizer(given, argument, or_else=also_taken)
    return Objective(given)


def _checked_var_list(var_list: typing.Any) -> typing.Any:
    """The `var_list` of an `Objective`: None, a function, or a list with each variable once.

    Raises `InvalidArgumentError` for anything else.
    """
    expected = ('None, a list of variables, or a function from all trainable variables to such a '
                'list')
    if callable(var_list):
        check_function('var_list', var_list, 1, expected)
    elif var_list is not None:
        if not isinstance(var_list, (list, tuple)) or not var_list:
            raise InvalidArgumentError('var_list=%.80r: expected %s.' % (var_list, expected))
        return checked_variables(var_list, 'var_list')
    return var_list
