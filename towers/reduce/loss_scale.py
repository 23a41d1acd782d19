"""Loss scaling: keeps small gradients above zero in half precision; an overflow skips the step."""

import collections
import typing

import tensorflow.compat.v1 as tf

from towers.arguments import check_count, check_number
from towers.errors import GradientError, InvalidArgumentError
from towers.placement.variable_device import Placement, only_device
from towers.tower.gradient_pairs import map_values

_LARGEST = float(tf.float32.max)


class LossScale(collections.namedtuple('LossScale', 'initial growth_steps factor least most')):
    """How the scale S of a loss moves, for float16, whose numbers lie between 6e-8 and 65,504.

        gradient = d(S * loss) / S
        a gradient that is not finite, in any tower:  S <- max(S / factor, least); no update
        `growth_steps` finite steps since S changed:  S <- min(S * factor, most)

    That is TF's `DynamicLossScale`, with a bound above. Powers of two leave every digit of a
    gradient as it is.

    Attributes:
      initial: S of the first step.
      growth_steps: finite steps in a row after which S grows; 0 keeps it from growing.
      factor: by which it grows and shrinks, above 1.
      least: S never falls below this.
      most: S never rises above this.
    """
    __slots__ = ()

    def __new__(cls, initial: float = 2. ** 15, growth_steps: int = 2000, factor: float = 2.,
                least: float = 1., most: float = 2. ** 24):
        """Raises `InvalidArgumentError` unless 0 < least <= initial <= most, factor > 1."""
        for name, value in (('initial', initial), ('factor', factor), ('least', least),
                            ('most', most)):
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
        return 'loss x %g at first, / %g and the step skipped on overflow%s' % (
            self.initial, self.factor, ', x %g after %s steps without' % (
                self.factor, '{:,}'.format(self.growth_steps)) if self.growth_steps else '')


class ScaledLosses:
    """The scale of one graph, in variables that are saved with the rest; scales losses.

    Attributes:
      rule: `LossScale`.
      placement: `Placement` of the variables.
      value, good_steps, skipped: the variables: the scale; counts of the finite steps since it
        changed, and of skipped steps.
      scale: float32 scalar, the scale that the step uses.
    """

    def __init__(self, rule: LossScale, name: str, placement: Placement):
        self.rule, self.placement = rule, placement

        def variable(last, value, dtype):
            # A resource variable: a fetched value is the one that was read, never a later one.
            return tf.Variable(value, trainable=False, name='%s/%s' % (name, last), dtype=dtype,
                               use_resource=True)
        with only_device(placement.main):
            self.value = variable('loss_scale', rule.initial, tf.float32)
            self.good_steps = variable('good_steps', 0, tf.int64)
            self.skipped = variable('skipped_steps', 0, tf.int64)
            self.scale = self.value.read_value()

    def scaled(self, loss: tf.Tensor) -> tf.Tensor:
        """The loss times the scale, in the loss's dtype."""
        return loss * tf.cast(self.scale, loss.dtype)

    def unscaled(self, pairs: list) -> list:
        """The `(gradient, variable)` pairs of a scaled loss, divided by the scale again."""
        for gradient, variable in pairs:
            if gradient is not None and gradient.dtype.size < 4:
                raise GradientError(
                    'the gradient of %r is %s: a scaled loss needs variables in float32, which '
                    'operations may well read in half precision.' % (
                        variable.op.name, gradient.dtype.base_dtype.name))
        # Divided: the inverse of a scale above 2 ** 126 would be flushed to zero.
        return [(gradient if gradient is None else map_values(
            lambda values: values / tf.cast(self.scale, values.dtype), gradient), variable)
                for gradient, variable in pairs]

    def watched(self, gradients: list) -> 'WatchedLosses':
        """The `WatchedLosses` of combined gradients, before a transformation might hide an Inf."""
        flags = []
        for gradient, variable in gradients:
            with self.placement.scope_of(variable):
                flags.append(tf.reduce_all(tf.is_finite(getattr(gradient, 'values', gradient))))
        with only_device(self.placement.main):
            is_finite = tf.reduce_all(tf.stack(flags))
            return WatchedLosses(self, is_finite, self.skipped.read_value() + tf.cast(
                tf.logical_not(is_finite), tf.int64))


class WatchedLosses(collections.namedtuple('WatchedLosses', 'losses is_finite skipped_steps')):
    """`ScaledLosses` with a check of the step's gradients.

    Attributes:
      is_finite: bool scalar, whether all gradients of the step are finite.
      skipped_steps: int64 scalar, the number of skipped steps so far, this step included. To fetch
        it, or `scale`, changes nothing.
    """
    __slots__ = ()

    @property
    def scale(self) -> tf.Tensor:
        """float32 scalar, the scale that the step uses."""
        return self.losses.scale

    @property
    def variables(self) -> typing.List[tf.Variable]:
        """The variables that hold scale and counts."""
        return [self.losses.value, self.losses.good_steps, self.losses.skipped]

    def update(self) -> tf.Operation:
        """The operation that moves the scale and the counts after a step."""
        value, good_steps, skipped = self.variables
        rule = self.losses.rule
        with only_device(self.losses.placement.main):
            good = good_steps.read_value() + 1
            grows = (good >= rule.growth_steps) if rule.growth_steps else tf.constant(False)
            grown = tf.where_v2(grows, tf.minimum(self.scale * rule.factor, rule.most), self.scale)
            shrunk = tf.maximum(self.scale / rule.factor, rule.least)
            return tf.group(
                value.assign(tf.where_v2(self.is_finite, grown, shrunk)),
                good_steps.assign(tf.where_v2(
                    tf.logical_and(self.is_finite, tf.logical_not(grows)), good,
                    tf.zeros([], tf.int64))),
                skipped.assign(self.skipped_steps))
