"""The learning rate: scaled to the number of towers, with a schedule counted in examples, which is
the same for every number of towers."""

import math
import typing

import tensorflow.compat.v1 as tf

from towers.arguments import check_choice, check_count, check_number
from towers.errors import InvalidArgumentError, counted

RULES = ('none', 'sqrt', 'linear')
DECAYS = ('none', 'exponential', 'cosine')


def scale_learning_rate(base: float, num_towers: int, rule: str) -> float:
    """The learning rate for a batch that is `num_towers` times the one `base` was tuned for.

        none    base
        sqrt    base * sqrt(num_towers)    keeps the variance of an update (Krizhevsky 2014, section
                                           5, arXiv:1404.5997); 0.001 on 4 towers is 0.002
        linear  base * num_towers          keeps the expected change an example (ibid.; Goyal et
                                           al. 2017, section 2.1, arXiv:1706.02677)

    A reduction 'sum' multiplies the gradient by num_towers as well. For an optimizer that follows
    the gradient's size (SGD, momentum) that is a linear scaling of its own.

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
    rate of one device to the scaled one. Where nothing was scaled it comes from 0, and the first
    step does not move the weights. Both factors count from example 0, so that runs with and without
    warm-up have the same rate once the warm-up is over.

        decay          factor decay(e)
        'none'         1
        'exponential'  decay_rate ^ (e / decay_examples)
        'cosine'       (1 + cos(pi * min(e / decay_examples, 1))) / 2       (Loshchilov and Hutter
                       2016, arXiv:1608.03983, without restarts)

    Attributes:
      base, num_towers, rule: as given.
      peak: the scaled rate, before warm-up and decay.
    """

    def __init__(self, base: float, num_towers: int = 1, rule: str = 'none', *,
                 warmup_examples: int = 0, decay: str = 'none',
                 decay_examples: typing.Optional[int] = None,
                 decay_rate: typing.Optional[float] = None):
        """
        Args:
          base, num_towers, rule: as for `scale_learning_rate`: by `num_towers` times the batch is
            larger than the one `base` was tuned for.
          warmup_examples: length of the ramp in examples, 0 for none.
          decay: 'none', 'exponential' or 'cosine'.
          decay_examples: examples for one factor of decay_rate ('exponential') or until the rate is
            0 ('cosine'), an int >= 1.
          decay_rate: in (0, 1]; for 'exponential'.

        Raises:
          InvalidArgumentError: an argument out of range, missing for this decay, or unused by it.
        """
        self.peak = scale_learning_rate(base, num_towers, rule)
        self.base = float(base)
        self.num_towers = int(num_towers)
        self.rule = rule
        self._start = 0. if self.peak == self.base else self.base  # of the warm-up
        check_count('warmup_examples', warmup_examples, 0)
        self._warmup_examples = int(warmup_examples)
        check_choice('decay', decay, DECAYS)
        _check_decay(decay, decay_examples, decay_rate)
        self._decay = decay
        # `_check_decay` has seen to it that a decay has what it needs of these.
        self._decay_examples: typing.Any = decay_examples
        self._decay_rate: typing.Any = decay_rate

    def tensor(self, examples_seen: tf.Tensor) -> tf.Tensor:
        """The rate of the step that comes after `examples_seen` examples, a scalar float32 tensor.

        Args:
          examples_seen: a scalar tensor of an integer type: the examples of all steps before, such
            as `global_step * batch_size`. A large product wants int64.
        """
        if not (tf.is_tensor(examples_seen) and examples_seen.dtype.is_integer
                and examples_seen.shape.is_compatible_with([])):
            raise InvalidArgumentError('examples_seen=%.80r: expected a scalar integer tensor.'
                                       % (examples_seen,))
        with tf.name_scope('learning_rate'):
            # float64: a cosine near its end is a small difference of numbers near 1.
            examples = tf.cast(examples_seen, tf.float64)
            rate = tf.cast(self.peak, tf.float64)
            if self._warmup_examples:
                warmed_up = tf.minimum(examples / self._warmup_examples, 1.)
                rate = self._start + (self.peak - self._start) * warmed_up
            if self._decay == 'exponential':
                rate *= self._decay_rate ** (examples / self._decay_examples)
            elif self._decay == 'cosine':
                decayed = tf.minimum(examples / self._decay_examples, 1.)
                rate *= (1. + tf.cos(math.pi * decayed)) / 2.
            return tf.cast(rate, tf.float32)

    def describe(self) -> str:
        """One line, such as `0.002 = 0.001 x sqrt(4), warm-up from 0.001 over 3,594 examples`."""
        text = '%.6g' % self.peak
        if self.rule != 'none':
            factor = 'sqrt(%d)' if self.rule == 'sqrt' else '%d'
            text += (' = %.6g x ' + factor) % (self.base, self.num_towers)
        parts = [text]
        if self._warmup_examples:
            parts.append('warm-up from %.6g over %s' % (
                self._start, counted(self._warmup_examples, 'example')))
        if self._decay == 'exponential':
            parts.append('x%.6g every %s' % (
                self._decay_rate, counted(self._decay_examples, 'example')))
        elif self._decay == 'cosine':
            parts.append('cosine to 0 over %s' % counted(self._decay_examples, 'example'))
        return ', '.join(parts)

    __str__ = describe


_ARGUMENTS_OF_DECAY = {'none': [], 'cosine': ['decay_examples'],
                       'exponential': ['decay_examples', 'decay_rate']}


def _check_decay(decay: str, decay_examples: typing.Optional[int],
                 decay_rate: typing.Optional[float]) -> None:
    """Raises `InvalidArgumentError` unless a decay has the arguments it needs and no others."""
    needed = _ARGUMENTS_OF_DECAY[decay]
    given = []
    if decay_examples is not None:
        given.append('decay_examples')
    if decay_rate is not None:
        given.append('decay_rate')
    if given != needed:
        raise InvalidArgumentError('decay=%r takes %s, and was given %s.' % (
            decay, ' and '.join(needed) or 'nothing', ' and '.join(given) or 'nothing'))
    if given:
        check_count('decay_examples', decay_examples)
    if 'decay_rate' in given:
        check_number('decay_rate', decay_rate, above=0, most=1, expected='a number in (0, 1]')
