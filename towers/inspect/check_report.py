"""The report of `check_towers`: differences of two runs, values left out, the likely cause."""

import collections

import numpy as np

Difference = collections.namedtuple('Difference', 'what name relative')
"""`what` is 'initial value', 'loss', 'gradient', 'variable' or 'slot'; `relative` the largest
difference over the largest absolute value (inf where one side lacks it)."""

LeftOut = collections.namedtuple('LeftOut', 'name why')
"""A variable that is not compared, by its name on one device, and why, in a few words."""

ROUNDING = 'its gradient is zero but for rounding'
SHARD_VARIANCE = 'a moving variance, under same_shards'


class TowersReport(collections.namedtuple('TowersReport', [
        'equal', 'worst', 'tolerance', 'first', 'cause', 'compared', 'towers', 'steps',
        'reduction', 'not_finite', 'left_out', 'workers'])):
    """The result of `check_towers`; print it.

    Attributes:
      equal: whether everything is finite and agrees to within the tolerance.
      worst: the `Difference` with the largest relative value.
      tolerance: the relative difference that counts as equal.
      first: the first `Difference` beyond the tolerance, in the order in which a step computes
        values; None when equal.
      cause: the likely cause, one sentence; None when equal.
      compared: number of values compared.
      towers: how many towers were run.
      steps: how many steps.
      reduction: as given.
      not_finite: the first `Difference` of which either side holds a NaN or an infinity, in the
        order in which a step computes things; None where all values are finite.
      left_out: list of `LeftOut`: the variables that are not compared; nor are their slots.
      workers: how many workers the towers were of; 1 without a cluster.
    """
    __slots__ = ()

    def __str__(self):
        ran = '%d tower%s%s against one device on the full batch, %d steps, reduction %s' % (
            self.towers, '' if self.towers == 1 else 's',
            '' if self.workers == 1 else ' of %d workers' % self.workers, self.steps,
            self.reduction)
        if self.not_finite is not None:
            text = 'NOT finite: %s %s holds a NaN or an infinity: %s. Likely cause: %s' % (
                self.not_finite.what, self.not_finite.name, ran, self.cause)
        elif self.equal:
            text = 'equal to within %.1e (largest: %s %s): %s; %d values compared' % (
                self.worst.relative, self.worst.what, self.worst.name, ran, self.compared)
        else:
            text = 'NOT equal: %s %s differs by %.1e (allowed %.1e): %s. Likely cause: %s' % (
                self.first.what, self.first.name, self.first.relative, self.tolerance, ran,
                self.cause)
        return text + ''.join('\nnot compared (%s): %s' % (why, ', '.join(
            each.name for each in self.left_out if each.why == why))
                              for why in (ROUNDING, SHARD_VARIANCE)
                              if any(each.why == why for each in self.left_out))


def not_compared(one, many, noise, same_shards):
    """The variables that are left out of the comparison of two runs: list of `LeftOut`, by name.

    Args:
      one, many: dicts from kind to dict from name to array.
      noise: the largest element of a gradient that rounding alone may make. A bias in front of a
        batch norm has the gradient zero, computed as the remainder of a sum. (Adam's step is as
        large for it as for any other gradient, which shows in the moving mean; that of momentum SGD
        is not.)
      same_shards: whether the batch repeats one shard, so that moving variances are the shard's.
    """
    found = {name: ROUNDING for name in set(one['gradient']) & set(many['gradient'])
             if noise and _largest(one['gradient'][name]) <= noise
             and _largest(many['gradient'][name]) <= noise}
    if same_shards:
        found.update((name, SHARD_VARIANCE) for name in set(one['variable']) | set(many['variable'])
                     if name.endswith('moving_variance'))
    return [LeftOut(name, why) for name, why in sorted(found.items())]


def compare(one, many, noise, left_out):
    """The `Difference`s of two runs.

    Args:
      one, many: dicts from kind to dict from name to array.
      noise: the amount that rounding may add to any element of a gradient.
      left_out: names of variables that are not compared, nor are their gradients and slots.
    """
    differences = []
    for what in ('loss', 'gradient', 'variable', 'slot'):
        for name in sorted(set(one[what]) | set(many[what])):
            if name in left_out or any(name.startswith(each + '/') for each in left_out):
                continue
            if name not in one[what] or name not in many[what]:
                differences.append(Difference(what, name, float('inf')))
                continue
            values = [one[what][name], many[what][name]]
            if what in ('variable', 'slot'):
                values = _without_noise(values, [run['gradient'].get(
                    name if what == 'variable' else name.rsplit('/', 1)[0])
                                                 for run in (one, many)], noise)
            differences.append(Difference(
                what, name, _relative(values[0], values[1], noise if what == 'gradient' else 0.)))
    return differences


def _without_noise(values, gradients, noise):
    """Values of a variable on two sides, without the elements whose gradient is rounding alone.

    Such an element is a part of a variable that the loss does not depend on (the keys' part of the
    bias in front of a softmax over products), where an optimizer makes a step of rounding.
    """
    if any(each is None or np.shape(each) != np.shape(values[0]) for each in gradients):
        return values
    sizes = np.maximum(*[np.abs(_as_numbers(each)) for each in gradients])
    is_noise = (sizes > 0) & (sizes <= noise)
    if sizes.shape != np.shape(values[0]) or not is_noise.any():
        return values
    return [np.where(is_noise, 0, _as_numbers(value)) for value in values]


def compare_initial_values(one, many):
    """The `Difference`s of the initial values that towers compute from a part of the batch."""
    on_one, on_many = dict(one.get('initial', ())), many.get('initial value', {})
    return [Difference('initial value', name, _relative(on_one[name], value, 0.)
                       if name in on_one else float('inf'))
            for name, value in sorted(on_many.items())]


def _largest(array):
    return np.abs(array).max() if array.size else 0.


def _relative(one, many, noise):
    one, many = _as_numbers(one), _as_numbers(many)
    if one.shape != many.shape:
        return float('inf')
    if one.dtype.kind not in 'fiub':
        return 0. if np.array_equal(one, many) else float('inf')
    one, many = one.astype(np.float64), many.astype(np.float64)
    if not np.array_equal(np.isfinite(one), np.isfinite(many)):
        return float('inf')
    finite = np.isfinite(one)
    largest, difference = _largest(one[finite]), _largest(one[finite] - many[finite])
    if difference <= noise:
        return 0.
    return float(difference / largest) if largest else float(difference)


def _as_numbers(value):
    """An array of numpy's own real numbers: of complex ones, their two parts; of bfloat16, which to
    numpy is no number, float32."""
    value = np.asarray(value)
    if value.dtype.kind == 'c':
        return np.stack([value.real, value.imag])
    return value.astype(np.float32) if value.dtype.name == 'bfloat16' else value


def is_finite(run, difference):
    """Whether one run's side of a `Difference` holds no NaN and no infinity."""
    if difference.what == 'initial value':
        value = dict(run.get('initial', run.get('initial value', ()))).get(difference.name)
    else:
        value = run[difference.what].get(difference.name)
    if value is None:
        return True
    value = _as_numbers(value)
    return value.dtype.kind != 'f' or bool(np.all(np.isfinite(value)))


def why_not_finite(difference, one, many):
    """The cause that a report gives for a value that is not finite."""
    sides = [side for side, run in (('one device', one), ('the towers', many))
             if not is_finite(run, difference)]
    return ('%s: a division by zero, a logarithm of zero or a learning rate that is too large, in '
            'the model or in what it was given.' % (
                'both sides, so the model itself makes it' if len(sides) == 2
                else 'only %s' % sides[0]))


def likely_cause(first, one, traits, sum_of_losses, num_parts):
    """The cause that a report gives for the first `Difference`, told by the model's `Traits`."""
    if first.what == 'initial value':
        return ("the initial value of %s is computed from the batch, and towers have that of tower "
                "0's part of it: compute it from the whole batch, before build_towers, or start "
                'from a checkpoint of one device.' % first.name)
    if first.relative == float('inf') and first.what in ('variable', 'slot', 'gradient'):
        return ('%s %s exists on one side only: an unshared variable, or one whose name depends '
                'on the tower.' % (first.what, first.name))
    full = float(sum(value for name, value in one['loss'].items()
                     if name == 'of step 1' or name.startswith('of step 1 ')))
    if full and abs(sum_of_losses - full) < 0.5 * abs(sum_of_losses / num_parts - full):
        return ('the loss sums over the batch (the towers\' losses add up to the full one): return '
                'the mean over examples.')
    if traits.random:
        return ('random numbers in the model (%s), such as dropout: each tower draws its own. '
                'Check it with dropout off.' % ', '.join(traits.random))
    if traits.batch_norm:
        return ('batch norm: each tower normalizes with the statistics of its own shard. Check '
                'with same_shards=True, where these agree, or with batch norm in inference mode.')
    if first.name in traits.updated:
        return ("an update (UPDATE_OPS) of %s: towers have that of tower 0's examples, unless "
                "update_ops='all' has every tower write." % first.name)
    return ('something that mixes the examples of a batch other than by the mean of a loss, such '
            'as a statistic of the batch, or a loss divided by a count that differs by shard.')
