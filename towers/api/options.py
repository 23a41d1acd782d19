"""Arguments of `build_towers` that travel together, and are checked together."""

import collections
import numbers
import typing

from towers.arguments import check_choice, check_count, check_flag, check_function
from towers.errors import InvalidArgumentError
from towers.placement.devices import canonical_device
from towers.placement.precision import check_precision
from towers.placement.variable_device import BALANCED, BY_STAGE, REPLICATED
from towers.reduce.all_reduce import METHODS
from towers.reduce.loss_scale import LossScale
from towers.reduce.micro_batches import SCHEDULES


class VariablePlacement(collections.namedtuple('VariablePlacement', 'device all_reduce')):
    """Where the shared variables live.

    Attributes:
      device: None (`/cpu:0`; the GPU when there is just one), a device name,
        `'balanced'`, `'stage'`, `'replicated'`, or a device function. `'stage'`: each variable is
        on the first tower's device of the stage that makes it. `'replicated'`: each tower has its
        own replica of every trainable variable (the model's own is the first tower's), and updates
        it with the combined gradient. The same numbers, the same checkpoints; the replicas are
        local variables, so a plain session runs `tf.local_variables_initializer()` after it has
        restored a checkpoint (`MonitoredSession` does so by itself). A program that writes weights
        itself makes the operation `built.replicas.refresh()` with its graph, and runs it after the
        write. An optimizer whose `apply_gradients` mixes variables (a global norm) is refused,
        since it would see each variable N times: mix them in `transform_gradients`. Without an
        optimizer no replicas are made.
      all_reduce: for `device='replicated'`: `'copy'` (the default: each sum is made on one
        of the towers and sent to the others), `'collective'` (TF's ring) or `'nccl'` (GPUs of one
        machine); see `all_reduce`.
    """
    __slots__ = ()

    def __new__(cls, device: typing.Any = None, all_reduce: typing.Optional[str] = None):
        if isinstance(device, str) and device not in (BALANCED, REPLICATED, BY_STAGE):
            canonical_device(device)
        elif device is not None and not isinstance(device, str):
            check_function('device', device, 1, "None, a device name, 'balanced', 'replicated', "
                           "'stage', or a device function, from an operation to a device")
        if all_reduce is not None:
            check_choice('all_reduce', all_reduce, METHODS)
            if device != REPLICATED:
                raise InvalidArgumentError(
                    "all_reduce=%r goes with device='replicated', and that is %r: with one set of "
                    'variables there is no all-reduce.' % (all_reduce, device))
        return super(VariablePlacement, cls).__new__(cls, device, all_reduce)


class Memory(collections.namedtuple('Memory', 'accumulate recompute')):
    """Less memory for a tower, for the same gradient.

    Attributes:
      accumulate: k, into how many micro-batches each tower's shard is cut. They run one after the
        other, in the memory of one, and one update applies the sum of their gradients: the gradient
        is the same, and `global_step`, rate and summaries count one step. Batch norm normalizes
        each micro-batch by itself; its moving averages are updated by the first micro-batch.
        `BuiltTowers.towers` has an entry for each micro-batch.
      recompute: `'auto'`: only results at some places of the forward pass are kept, about the
        square root of its length; the backward pass recomputes the rest from them. The numbers are
        the same, for less memory and about a third more time. Or a list of names of operations or
        scopes of the model whose results are kept. None: all are kept. See `recompute.rewrite`.
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
      micro_batches: M, into how many micro-batches a tower cuts its shard: while a stage works on
        one, the stage before works on the next; gradients are added up as by `Memory.accumulate`.
      schedule: of the micro-batches: `'one_forward_one_backward'`, or `'all_forward'`, see
        `stage_order`.
      stages: `'auto'`: the first tower's graph is cut into as many stages as a tower has devices,
        each with about the same memory, see `cut_into_stages`. None: by the model's own `stage`s.
    """
    __slots__ = ()

    def __new__(cls, micro_batches: int = 1, schedule: str = 'one_forward_one_backward',
                stages: typing.Optional[str] = None):
        check_count('micro_batches', micro_batches)
        check_choice('schedule', schedule, SCHEDULES)
        if stages is not None and not (isinstance(stages, str) and stages == 'auto'):
            raise InvalidArgumentError(
                "stages=%.80r: expected 'auto', for as many as a tower has devices, or None. Where "
                'they are cut by hand, the model function says, by towers.stage(number).' % (
                    stages,))
        return super(Pipeline, cls).__new__(cls, int(micro_batches), schedule, stages)


class Numerics(collections.namedtuple('Numerics', [
        'precision', 'loss_scale', 'xla', 'check_numerics', 'stateless_random'])):
    """The precision of the towers' numbers, their randomness, and numbers that are not finite.

    Attributes:
      precision: `'float32'`; or `'bf16'` or `'fp16'`, by TensorFlow's own graph rewrite, which is
        tried out first, in a session of its own (not for devices that were resolved by
        `check=False`: TF keeps the GPU options of a process's first session for all). The session's
        config has to ask for it too: `use_precision(config, precision, built.devices)`.
      loss_scale: `LossScale`; None: the default one with `'fp16'`, none with the others. With one,
        a step in which the gradient of at least one tower is not finite changes no weight and no
        slot, and is counted in `scaled_losses.skipped_steps`; `global_step` counts it too.
        Batch-norm statistics follow every forward pass, also in a skipped step.
        `check_numerics` then fails a step only for its loss, or at the least scale.
      xla: whether XLA compiles each tower's forward and backward pass, see `xla`; what comes after
        them (combination, update) is not compiled.
      check_numerics: a NaN or an infinity in a tower's loss or gradient fails the step, naming the
        tower and the variable; see `nonfinite`.
      stateless_random: dropout and other random ops of the model draw numbers that depend on the
        graph-level seed, the op's name and `global_step` alone, so that a run that resumes draws
        the same numbers as a run without a break; see `stateless_random`.
    """
    __slots__ = ()

    def __new__(cls, precision: str = 'float32', loss_scale: typing.Optional[LossScale] = None,
                xla: bool = False, check_numerics: bool = False, stateless_random: bool = False):
        check_precision(precision)
        if loss_scale is not None and not isinstance(loss_scale, LossScale):
            raise InvalidArgumentError(
                'loss_scale=%.80r: expected a LossScale, such as LossScale(initial=%s), or None.'
                % (loss_scale, '%g' % loss_scale if isinstance(loss_scale, numbers.Real)
                   and not isinstance(loss_scale, bool) else '2. ** 15'))
        for name, flag in (('xla', xla), ('check_numerics', check_numerics),
                           ('stateless_random', stateless_random)):
            check_flag(name, flag)
        return super(Numerics, cls).__new__(cls, precision, loss_scale, xla, check_numerics,
                                            stateless_random)

    def scale_of_loss(self):
        """The given `LossScale`, or the default one of the precision; or None."""
        return LossScale() if self.loss_scale is None and self.precision == 'fp16' else (
            self.loss_scale)
