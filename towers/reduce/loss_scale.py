"""Loss scaling: keeps small gradients above zero in half precision; an overflow skips the step."""

import typing

import tensorflow.compat.v1 as tf

from towers.arguments import check_count, check_number
from towers.errors import GradientError, InvalidArgumentError
from towers.gradients.gradient_pairs import map_values
from towers.placement.variable_device import Placement, only_device

_LARGEST = float(tf.float32.max)


class _Rule(typing.NamedTuple):
    """The fields of `LossScale`, which checks them."""

    initial: float
    growth_steps: int
    factor: float
    least: float
    most: float


class LossScale(_Rule):
    """How the scale S of a loss moves, for float16, whose numbers lie between 6e-8 and 65,504.

        gradient = d(S * loss) / S
        a gradient that is not finite, in any tower:  S <- max(S / factor, least); no update
        `growth_steps` finite steps since S changed:  S <- min(S * factor, most)

    That is TF's `DynamicLossScale`, with a bound above. Powers of two leave every digit of a
    gradient as it is.

    Attributes:
      initial: S of the first step.
      growth_steps: finite steps in a row after which S grows; 0 keeps S from growing.
      factor: the factor by which S grows and shrinks, above 1.
      least: S never falls below this.
      most: S never rises above this.
    """
    __slots__ = ()

    def __new__(cls, initial: float = 2. ** 15, growth_steps: int = 2000, factor: float = 2.,
                least: float = 1., most: float = 2. ** 24):
        """Makes the rule; raises `InvalidArgumentError` unless 0 < least <= initial <= most and
        factor > 1."""
        numbers = {'initial': initial, 'factor': factor, 'least': least, 'most': most}
        for name, value in numbers.items():
            check_number(name, value, above=0, most=_LARGEST, expected='a positive float32')
        check_count('growth_steps', growth_steps, least=0)
        if not least <= initial <= most or factor <= 1:
            raise InvalidArgumentError(
                'LossScale(initial=%r, factor=%r, least=%r, most=%r): expected least <= initial <= '
                'most, and a factor above 1, such as 2.' % (initial, factor, least, most))
        return super(LossScale, cls).__new__(cls, float(initial), int(growth_steps), float(factor),
                                             float(least), float(most))

    def describe(self) -> str:
        """One line for the plan."""
        line = 'loss x %g at first, / %g and the step skipped on overflow' % (
            self.initial, self.factor)
        if self.growth_steps:
            growth_steps = '{:,}'.format(self.growth_steps)
            line += ', x %g after %s steps without' % (self.factor, growth_steps)
        return line


class ScaledLosses:
    """The loss scale of a build, in variables that a checkpoint has. It scales losses, and takes
    the scale out of their gradients.

    Attributes:
      rule: `LossScale`.
      placement: `Placement` of the variables.
      value: the variable with the scale.
      good_steps: the variable with the count of finite steps since the scale changed.
      skipped: the variable with the count of skipped steps.
      scale: float32 scalar, the scale that the step uses.
    """

    def __init__(self, rule: LossScale, name: str, placement: Placement):
        """Makes the variables.

        Args:
          rule: how the scale moves.
          name: the name scope of the variables.
          placement: the placement of the build's variables.
        """
        self.rule = rule
        self.placement = placement
        with only_device(placement.main):
            self.value = _variable(name + '/loss_scale', rule.initial, tf.float32)
            self.good_steps = _variable(name + '/good_steps', 0, tf.int64)
            self.skipped = _variable(name + '/skipped_steps', 0, tf.int64)
            self.scale = self.value.read_value()

    def scaled(self, loss: tf.Tensor) -> tf.Tensor:
        """The loss times the scale, in the loss's dtype."""
        return loss * tf.cast(self.scale, loss.dtype)

    def unscaled(self, pairs: list) -> list:
        """The `(gradient, variable)` pairs of a scaled loss, divided by the scale again.

        Raises `GradientError` for a gradient in half precision: divided by the scale, it would
        become zero, which the scale is to prevent.
        """
        for gradient, variable in pairs:
            is_half = gradient is not None and gradient.dtype.size < tf.float32.size
            if is_half:
                raise GradientError(
                    'the gradient of %r is %s: a scaled loss needs variables in float32, which '
                    'operations may well read in half precision.' % (
                        variable.op.name, gradient.dtype.base_dtype.name))
        return [(self._unscaled(gradient), variable) for gradient, variable in pairs]

    def _unscaled(self, gradient: typing.Any) -> typing.Any:
        """A gradient divided by the scale; None for None."""
        if gradient is None:
            return None
        # A division, not a product with the inverse: the inverse of a scale above 2 ** 126 would be
        # flushed to zero.
        return map_values(lambda values: values / tf.cast(self.scale, values.dtype), gradient)

    def watched(self, gradients: list) -> 'WatchedLosses':
        """Checks in each step whether the combined gradients are finite.

        Args:
          gradients: the `(gradient, variable)` pairs, before the user's function transforms them:
            the function might hide an Inf.
        """
        are_finite = []  # of each gradient, on the device of its variable
        for gradient, variable in gradients:
            values = gradient
            if isinstance(gradient, tf.IndexedSlices):
                values = gradient.values
            with self.placement.scope_of(variable):
                are_finite.append(tf.reduce_all(tf.is_finite(values)))
        with only_device(self.placement.main):
            is_finite = tf.reduce_all(tf.stack(are_finite))
            is_skipped = tf.cast(tf.logical_not(is_finite), tf.int64)
            return WatchedLosses(self, is_finite, self.skipped.read_value() + is_skipped)


def _variable(name: str, value: float, dtype: tf.DType) -> tf.Variable:
    """Makes a variable of the loss scale. It is a resource variable, so that a fetched value is the
    one that the step has read, and never a later one."""
    return tf.Variable(value, trainable=False, name=name, dtype=dtype, use_resource=True)


class WatchedLosses(typing.NamedTuple):
    """The loss scale of a build, with a check of the step's gradients. To fetch its tensors changes
    nothing.

    Attributes:
      losses: the `ScaledLosses`.
      is_finite: bool scalar, whether all gradients of the step are finite.
      skipped_steps: int64 scalar, the skipped steps so far, this one included.
    """

    losses: ScaledLosses
    is_finite: tf.Tensor
    skipped_steps: tf.Tensor

    @property
    def scale(self) -> tf.Tensor:
        """float32 scalar, the scale that the step uses."""
        return self.losses.scale

    @property
    def variables(self) -> typing.List[tf.Variable]:
        """The variables that hold scale and counts."""
        return [self.losses.value, self.losses.good_steps, self.losses.skipped]

    def update(self) -> tf.Operation:
        """The operation that moves the scale and the counts after a step, by the formula of
        `LossScale`:

            the step                     scale      good steps
            overflows                    smaller    0
            is the last of growth_steps  larger     0
            is another good one          stays      one more
        """
        losses = self.losses
        rule = losses.rule
        with only_device(losses.placement.main):
            good_steps = losses.good_steps.read_value() + 1  # this one included, if it is good
            if rule.growth_steps:
                grows = good_steps >= rule.growth_steps
            else:  # 0 is for a scale that never grows
                grows = tf.constant(False)
            larger = tf.minimum(self.scale * rule.factor, rule.most)
            smaller = tf.maximum(self.scale / rule.factor, rule.least)
            scale_if_finite = tf.where_v2(grows, larger, self.scale)
            new_scale = tf.where_v2(self.is_finite, scale_if_finite, smaller)
            scale_stays = tf.logical_and(self.is_finite, tf.logical_not(grows))
            new_good_steps = tf.where_v2(scale_stays, good_steps, tf.zeros([], tf.int64))
            return tf.group(losses.value.assign(new_scale),
                            losses.good_steps.assign(new_good_steps),
                            losses.skipped.assign(self.skipped_steps))
