"""The report of `check_towers`: differences of two runs, values left out, the likely cause."""

import collections

import numpy as np

Difference = collections.namedtuple('Difference', 'what name relative')
"""`what` is 'initial value', 'loss', 'gradient', 'variable' or 'slot'; `relative` the largest
difference over the largest absolute value (inf where one side lacks it)."""

LeftOut = collections.namedtuple('LeftOut', 'name why')
"""A variable that is not compared, by its name on one device, and why, in a few words."""

_NO_GRADIENT = 'its gradient is zero but for rounding'
_SHARD_VARIANCE = 'a moving variance, under same_shards'

_Rounding = collections.namedtuple('_Rounding', 'tolerance noise')
# Sums in another order differ in the last digits, and steps make that grow.
_ROUNDING = {'float64': _Rounding(1e-9, 1e-14), 'float32': _Rounding(1e-4, 1e-6),
             'float16': _Rounding(2e-2, 2e-3), 'bfloat16': _Rounding(0.1, 2e-2)}


class TowersReport(collections.namedtuple('TowersReport', [
        'equal', 'worst', 'tolerance', 'first', 'cause', 'compared', 'towers', 'steps',
        'reduction', 'not_finite', 'left_out', 'workers', 'proof'])):
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
      proof: the plan's line about one device, a text that begins with `proven` or `not proven`; or
        None, for one tower or with a cluster.
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
        if self.proof is not None:
            text = '%s\n%s' % (self.proof, text)
        return text + ''.join('\nnot compared (%s): %s' % (why, ', '.join(
            each.name for each in self.left_out if each.why == why))
                              for why in (_NO_GRADIENT, _SHARD_VARIANCE)
                              if any(each.why == why for each in self.left_out))


def report_on(one, many, traits, tolerance, sum_of_losses, parts, same_shards, **ran):
    """The `TowersReport` of two runs.

    Args:
      one, many: dicts from kind to dict from name to array: of one device, and of the towers.
      traits: `Traits` of the model.
      sum_of_losses: the sum of the towers' losses in the first step.
      parts: into how many parts a batch is cut.
      **ran: the fields of the report that say what was run.
    """
    rounding, proof = _ROUNDING[traits.coarsest], many.pop('proof', None)
    tolerance = rounding.tolerance if tolerance is None else tolerance
    # The largest element of a gradient that rounding alone may make. A bias in front of a batch
    # norm has the gradient zero, computed as the remainder of a sum. (Adam's step is as large for
    # it as for any other gradient, which shows in the moving mean.)
    noise = rounding.noise * max([_largest(each) for each in one['gradient'].values()] or [0.])
    left_out = _not_compared(one, many, noise, same_shards)
    differences = _compare(one, many, noise, [each.name for each in left_out])
    beyond = [each for each in differences if not each.relative <= tolerance]
    not_finite = next((each for each in differences if not (
        _is_finite(one, each) and _is_finite(many, each))), None)
    cause = None
    if not_finite is not None:
        cause = ('%s: a division by zero, a logarithm of zero or a learning rate that is too '
                 'large, in the model or in what it was given.' % (
                     'only the towers' if _is_finite(one, not_finite) else 'only one device'
                     if _is_finite(many, not_finite) else
                     'both sides, so the model itself makes it'))
    elif beyond:
        cause = _likely_cause(beyond[0], one, traits, sum_of_losses, parts)
        if is_certain(proof) and not traits.random and beyond[0].what != 'initial value':
            cause += (' The plan says that equality is proven: this is an error of towers itself, '
                      'please report it with the model.')
    return TowersReport(
        equal=not beyond and not_finite is None, tolerance=tolerance, cause=cause,
        worst=max(differences, key=lambda difference: difference.relative),
        first=beyond[0] if beyond else None, compared=len(differences), not_finite=not_finite,
        left_out=left_out, proof=proof, **ran)


def is_certain(proof):
    """Whether a plan's line says that equality is proven, without a condition."""
    return proof is not None and proof.startswith('proven: ')


def _not_compared(one, many, noise, same_shards):
    """The variables left out of the comparison, as `LeftOut`s by name: those whose gradient
    is noise; where the batch repeats one shard, moving variances."""
    found = {name: _NO_GRADIENT for name in set(one['gradient']) & set(many['gradient'])
             if noise and _largest(one['gradient'][name]) <= noise
             and _largest(many['gradient'][name]) <= noise}
    if same_shards:
        found.update((name, _SHARD_VARIANCE) for name in set(one['variable'])
                     | set(many['variable']) if name.endswith('moving_variance'))
    return [LeftOut(name, why) for name, why in sorted(found.items())]


def _compare(one, many, noise, left_out):
    """The `Difference`s of two runs, without the gradients, values and slots of some variables."""
    differences = []
    for what in ('initial value', 'loss', 'gradient', 'variable', 'slot'):
        on_one, on_many = one.get(what, {}), many.get(what, {})
        for name in sorted(set(on_one) | set(on_many)):
            if name in left_out or any(name.startswith(each + '/') for each in left_out):
                continue
            relative = float('inf')
            if name in on_one and name in on_many:
                values = [on_one[name], on_many[name]]
                if what in ('variable', 'slot'):
                    values = _without_noise(values, [run['gradient'].get(
                        name if what == 'variable' else name.rsplit('/', 1)[0])
                                                     for run in (one, many)], noise)
                relative = _relative(*values, noise if what == 'gradient' else 0.)
            differences.append(Difference(what, name, relative))
    return differences


def _without_noise(values, gradients, noise):
    """Values of a variable on two sides, without the elements whose gradient is rounding alone: the
    loss does not depend on these (the keys' part of the bias in front of a softmax over products),
    and an optimizer makes a step of rounding."""
    if any(each is None or np.shape(each) != np.shape(values[0]) for each in gradients):
        return values
    sizes = np.maximum(*[np.abs(_as_numbers(each)) for each in gradients])
    is_noise = (sizes > 0) & (sizes <= noise)
    if sizes.shape != np.shape(values[0]) or not is_noise.any():
        return values
    return [np.where(is_noise, 0, _as_numbers(value)) for value in values]


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


def _is_finite(run, difference):
    """Whether one run's side of a `Difference` holds no NaN and no infinity."""
    value = run.get(difference.what, {}).get(difference.name)
    value = _as_numbers(0 if value is None else value)
    return value.dtype.kind != 'f' or bool(np.all(np.isfinite(value)))


def _likely_cause(first, one, traits, sum_of_losses, num_parts):
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
