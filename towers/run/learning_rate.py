"""`LearningRate`: a rate that is scaled to the number of towers, with a schedule in examples.

Since the schedule counts examples, and not steps, it is the same for every number of towers.
"""

import math
import typing

import tensorflow.compat.v1 as tf

from towers.arguments import check_choice, check_count, check_number
from towers.errors import InvalidArgumentError, counted

RULES = ('none', 'sqrt', 'linear')

# The arguments that each decay takes.
_ARGUMENTS = {
    'none': [],
    'exponential': ['decay_examples', 'decay_rate'],
    'step': ['decay_examples', 'decay_rate'],
    'polynomial': ['decay_examples', 'decay_power'],
    'cosine': ['decay_examples'],
    'cosine_restarts': ['decay_examples', 'restart_growth']}
DECAYS = tuple(_ARGUMENTS)


def scale_learning_rate(base: float, num_towers: int, rule: str) -> float:
    """The learning rate for a batch that is `num_towers` times as large as the one of `base`.

        none    base
        sqrt    base * sqrt(num_towers)    keeps the variance of an update (Krizhevsky 2014, section
                                           5, arXiv:1404.5997); 0.001 on 4 towers is 0.002
        linear  base * num_towers          keeps the expected change an example (ibid.; Goyal et
                                           al. 2017, section 2.1, arXiv:1706.02677)

    The reduction 'sum' multiplies the gradient by num_towers as well. For an optimizer whose step
    is proportional to the gradient (SGD, momentum) that is already a linear scaling.

    Raises:
      InvalidArgumentError: an argument out of range.
    """
    check_number('base', base, above=0, expected='a number above 0')
    check_count('num_towers', num_towers)
    check_choice('rule', rule, RULES)
    factors = {'none': 1, 'sqrt': math.sqrt(num_towers), 'linear': num_towers}
    factor = factors[rule]
    check_number('base=%r and num_towers=%d, as a rate' % (base, num_towers), base * factor,
                 expected='a rate that fits a float32')
    return float(base * factor)


class LearningRate(object):
    """A scaled learning rate with warm-up and decay, as a function of the examples seen.

        rate(e) = ramp(e) * decay(e)
        ramp(e) = start + (peak - start) * min(e / warmup_examples, 1)
        peak    = scale_learning_rate(base, num_towers, rule)
        start   = base where the rule changed the rate, else 0

    The ramp is the gradual warm-up of Goyal et al. 2017 (section 2.2, arXiv:1706.02677): from the
    rate of one device to the scaled one. Where the rule does not change the rate, it begins at 0,
    and the first step does not change the weights. Both factors count from example 0, so that runs
    with and without warm-up have the same rate once the warm-up is over.

        decay              factor decay(e)
        'none'             1
        'exponential'      decay_rate ^ (e / decay_examples)
        'step'             decay_rate ^ floor(e / decay_examples)
        'polynomial'       (1 - min(e / decay_examples, 1)) ^ decay_power
        'cosine'           (1 + cos(pi * min(e / decay_examples, 1))) / 2
        'cosine_restarts'  (1 + cos(pi * p)) / 2, where p in [0, 1) is the place in a period; the
                           first one has decay_examples, each further one restart_growth times the
                           examples of the one before

    Both cosines are from Loshchilov and Hutter 2016 (arXiv:1608.03983).

    Attributes:
      base, num_towers, rule: the arguments.
      peak: the scaled rate, before warm-up and decay.
    """

    def __init__(self, base: float, num_towers: int = 1, rule: str = 'none', *,
                 warmup_examples: int = 0, decay: str = 'none',
                 decay_examples: typing.Optional[int] = None,
                 decay_rate: typing.Optional[float] = None,
                 decay_power: typing.Optional[float] = None,
                 restart_growth: typing.Optional[float] = None):
        """
        Args:
          base, num_towers, rule: as for `scale_learning_rate`: the batch is `num_towers` times as
            large as the one for which `base` was tuned.
          warmup_examples: length of the ramp in examples; 0 for none.
          decay: one of those in the table above.
          decay_examples: examples for one factor of decay_rate ('exponential', 'step'), until the
            rate is 0 ('polynomial', 'cosine'), or until the first restart; an int >= 1.
          decay_rate: a factor in (0, 1]; for 'exponential' and 'step'.
          decay_power: above 0; for 'polynomial'.
          restart_growth: at least 1; for 'cosine_restarts'.

        Raises:
          InvalidArgumentError: an argument out of range, missing for this decay, or unused by it.
        """
        self.peak = scale_learning_rate(base, num_towers, rule)
        self.base = float(base)
        self.num_towers = int(num_towers)
        self.rule = rule
        # The rate at the beginning of the warm-up: `start` of the formula.
        self._start = 0.
        has_changed_rate = self.peak != self.base
        if has_changed_rate:
            self._start = self.base
        check_count('warmup_examples', warmup_examples, 0)
        self._warmup_examples = int(warmup_examples)
        check_choice('decay', decay, DECAYS)
        _check_decay(decay, {'decay_examples': decay_examples, 'decay_rate': decay_rate,
                             'decay_power': decay_power, 'restart_growth': restart_growth})
        self._decay = decay
        # `_check_decay` has seen to it that a decay has what it needs of these.
        self._decay_examples: typing.Any = decay_examples
        self._decay_rate: typing.Any = decay_rate
        self._decay_power: typing.Any = decay_power
        self._restart_growth: typing.Any = restart_growth

    def tensor(self, examples_seen: tf.Tensor) -> tf.Tensor:
        """The rate of the step that comes after `examples_seen` examples, a scalar float32 tensor.

        Args:
          examples_seen: a scalar tensor of an integer type: the examples of all steps before, such
            as `global_step * batch_size`. A large product wants int64.
        """
        is_integer = tf.is_tensor(examples_seen) and examples_seen.dtype.is_integer
        if not is_integer or not examples_seen.shape.is_compatible_with([]):
            raise InvalidArgumentError('examples_seen=%.80r: expected a scalar integer tensor.'
                                       % (examples_seen,))
        with tf.name_scope('learning_rate'):
            # float64: a cosine near its end is a small difference of numbers near 1.
            examples = tf.cast(examples_seen, tf.float64)
            rate = tf.cast(self.peak, tf.float64)
            if self._warmup_examples:
                warmed_up = tf.minimum(examples / self._warmup_examples, 1.)
                rate = self._start + (self.peak - self._start) * warmed_up
            if self._decay != 'none':
                rate *= self._factor(examples)
            return tf.cast(rate, tf.float32)

    def _factor(self, examples: tf.Tensor) -> tf.Tensor:
        """The factor `decay(e)` of the table, a float64 scalar; `examples` is e."""
        periods = examples / self._decay_examples
        if self._decay == 'exponential':
            return self._decay_rate ** periods
        if self._decay == 'step':
            return self._decay_rate ** tf.floor(periods)
        if self._decay == 'polynomial':
            return (1. - tf.minimum(periods, 1.)) ** self._decay_power
        if self._decay == 'cosine':
            return (1. + tf.cos(math.pi * tf.minimum(periods, 1.))) / 2.
        # 'cosine_restarts'
        return (1. + tf.cos(math.pi * self._place_in_period(periods))) / 2.

    def _place_in_period(self, periods: tf.Tensor) -> tf.Tensor:
        """The place in a period of 'cosine_restarts': 0 at its beginning, 1 at the next restart.

        In units of the first period, period i begins at (growth^i - 1) / (growth - 1), and is
        growth^i long. (TensorFlow's `cosine_decay_restarts` computes in float32.)

        Args:
          periods: the examples seen, in units of the first period, a float64 scalar.
        """
        growth = self._restart_growth
        if growth == 1:
            return periods - tf.floor(periods)
        # 1e-9: a restart belongs to the period that it begins, however the logarithm is rounded.
        index = tf.floor(tf.log(1. + periods * (growth - 1.)) / math.log(growth) + 1e-9)
        length = growth ** index
        return (periods - (length - 1.) / (growth - 1.)) / length

    def describe(self) -> str:
        """A line such as `0.002 = 0.001 x sqrt(4), warm-up from 0.001 over 3,594 examples`."""
        text = '%.6g' % self.peak
        if self.rule != 'none':
            factor = 'sqrt(%d)' if self.rule == 'sqrt' else '%d'
            text += (' = %.6g x ' + factor) % (self.base, self.num_towers)
        parts = [text]
        if self._warmup_examples:
            parts.append('warm-up from %.6g over %s' % (
                self._start, counted(self._warmup_examples, 'example')))
        if self._decay != 'none':
            parts.append(self._describe_decay())
        return ', '.join(parts)

    def _describe_decay(self) -> str:
        """The text about the decay, such as `'cosine to 0 over 3,594 examples'`."""
        examples = counted(self._decay_examples, 'example')
        if self._decay == 'exponential':
            return 'x%.6g every %s' % (self._decay_rate, examples)
        if self._decay == 'step':
            return 'in steps x%.6g every %s' % (self._decay_rate, examples)
        if self._decay == 'polynomial':
            return 'to 0 over %s, by the power %.6g' % (examples, self._decay_power)
        if self._decay == 'cosine':
            return 'cosine to 0 over %s' % examples
        # 'cosine_restarts'
        return 'cosine to 0 over %s, then again, each period x%.6g as long' % (
            examples, self._restart_growth)

    __str__ = describe


def _check_decay(decay: str, arguments: typing.Dict[str, typing.Any]) -> None:
    """Raises `InvalidArgumentError` for a decay that lacks an argument, or has one too many.

    Args:
      decay: one of `DECAYS`.
      arguments: {name of an argument: its value, or None if it was not given}, in the order of
        `_ARGUMENTS`.
    """
    wanted = _ARGUMENTS[decay]
    given = {name: value for name, value in arguments.items() if value is not None}
    if list(given) != wanted:  # both are in the order of `_ARGUMENTS`
        raise InvalidArgumentError('decay=%r takes %s, and was given %s.' % (
            decay, ' and '.join(wanted) or 'nothing', ' and '.join(given) or 'nothing'))
    if 'decay_examples' in given:
        check_count('decay_examples', given['decay_examples'])
    if 'decay_rate' in given:
        check_number('decay_rate', given['decay_rate'], above=0, most=1,
                     expected='a number in (0, 1]')
    if 'decay_power' in given:
        check_number('decay_power', given['decay_power'], above=0, expected='a number above 0')
    if 'restart_growth' in given:
        check_number('restart_growth', given['restart_growth'], least=1,
                     expected='a number of at least 1')
