"""Whether the claim held: N x B at r sqrt(N) does as well per example as 1 x B at r."""

import collections
import statistics

from benchmarks.batch_scaling.results import finished

Measure = collections.namedtuple('Measure', 'name value sign digits')
MEASURES = [
    Measure('test accuracy at the end', lambda result: result.points[-1].accuracy, 1, 4),
    Measure('test loss at the end', lambda result: result.points[-1].loss, -1, 4),
    Measure('test accuracy on the way (mean of all evaluations)',
            lambda result: sum(p.accuracy for p in result.points) / len(result.points), 1, 4)]

OTHERS = [('same', 'no scaling'), ('linear', 'linear scaling'),
          ('big', 'the same batch and rate without towers'),
          ('sync', 'the same with batch norm in sync')]

Verdict = collections.namedtuple('Verdict',
                                 'measure outcome base claim difference differences spread')
Verdict.__doc__ = """How the claim came out in one measure.

Fields:
  measure: `Measure`.
  outcome: 'better' or 'worse' by more than the spread; 'even', within it; with one seed 'higher'
    or 'lower', or 'equal', since nothing is known of the spread.
  base, claim: mean over the seeds of both arms.
  difference: claim - base, the mean of `differences`.
  differences: of each seed, which both arms began with the same weights and the same order.
  spread: twice the standard error of `difference`, or None with one seed. With two seeds that is
    how far their differences are apart.
"""


def judge(base, claim):
    """The verdicts, one a measure.

    Args:
      base, claim: lists of `RunResult` of the two arms. Compared are the seeds that both finished;
        there has to be one.
    """
    pairs = _pairs(base, claim)
    verdicts = []
    for measure in MEASURES:
        values = [[measure.value(result) for result in side] for side in zip(*pairs)]
        means = [sum(side) / len(side) for side in values]
        difference = means[1] - means[0]
        differences = [after - before for before, after in zip(*values)]
        spread = None
        if len(pairs) > 1:
            spread = 2. * statistics.stdev(differences) / len(pairs) ** 0.5
            outcome = 'even'
            if abs(difference) > spread * (1 + 1e-6):  # equal ones are equal, however rounded
                outcome = 'better' if difference * measure.sign > 0 else 'worse'
        elif difference == 0:
            outcome = 'equal'
        else:
            outcome = 'higher' if difference > 0 else 'lower'
        verdicts.append(Verdict(measure, outcome, means[0], means[1], difference, differences,
                                spread))
    return verdicts


def sentences(results):
    """What the runs say about the claim: a list of sentences, the verdict first.

    Args:
      results: all `RunResult`s of a set.
    """
    base = [result for result in results if result.arm.kind == 'one']
    claims = {}
    for result in results:
        if result.arm.kind == 'sqrt':
            claims.setdefault(result.arm, []).append(result)
    if not base or not claims:
        return ['The claim was not tried: that takes the arms one and sqrt.']
    lines = []
    for claim in claims.values():
        lines += _about(base, claim) + _beside(results, claim)
    return lines


def _about(base, claim):
    names = (claim[0].arm.label, base[0].arm.label)
    unfinished = [result for result in base + claim if result.status != 'finished']
    if not _pairs(base, claim):
        return ['The claim cannot be judged: no seed of both %s and %s is finished%s.' % (
            names + (_reasons(unfinished),))]
    verdicts = judge(base, claim)
    good = [v for v in verdicts if _holds(v)]
    bad = [v for v in verdicts if not _holds(v)]
    if unfinished:
        head = 'The claim did not hold in every run%s; where both ran to the end' % (
            _reasons(unfinished))
    else:
        head = 'Here'
    seeds = len(verdicts[0].differences)
    one = seeds == 1
    if not bad:
        head += ' the claim held'
        if not one and any(v.outcome == 'even' for v in good):
            head += ' as far as %d seeds can tell' % seeds
    elif not good:
        head += ' the claim did not hold'
    else:
        head += ' the claim held in %s, and not in %s' % (_names(good), _names(bad))
    pair = _pairs(base, claim)[0]
    examples = pair[0].points[-1].examples
    head += ': %s against %s, both after %s examples, in %d steps against %d.' % (
        names + ('{:,}'.format(examples), examples // pair[1].arm.batch_size,
                 examples // pair[0].arm.batch_size))
    lines = [head] + [_in_measure(verdict) for verdict in verdicts]
    if one:
        lines.append('One seed tells nothing about chance: give --seeds=3 or more.')
    return lines


def _beside(results, claim):
    """What the arms that are not the claim's say about it, a line each."""
    lines = []
    for kind, words in OTHERS:
        arms = {}
        for result in results:
            if result.arm.kind == kind and result.arm.batch_size == claim[0].arm.batch_size and (
                    result.arm.warmup_epochs in (0., claim[0].arm.warmup_epochs)):
                arms.setdefault(result.arm, []).append(result)
        for arm, runs in arms.items():
            if _pairs(runs, claim):
                lines.append('%s against %s, %s: %s.'
                             % (claim[0].arm.label, arm.label, words, '; '.join(
                    '%s %+.*f%s' % (verdict.measure.name.split(' (')[0], verdict.measure.digits,
                                    verdict.difference, '' if verdict.spread is None else
                                    ' (spread %.*f)' % (verdict.measure.digits, verdict.spread))
                    for verdict in judge(runs, claim))))
    return lines


def _holds(verdict):
    """As good or better. With one seed, any disadvantage counts."""
    if verdict.outcome in ('better', 'even', 'equal'):
        return True
    return verdict.outcome != 'worse' and verdict.difference * verdict.measure.sign > 0


def _in_measure(verdict):
    measure = verdict.measure
    text = '%s: %.*f against %.*f, a difference of %+.*f' % (
        measure.name.capitalize(), measure.digits, verdict.claim, measure.digits, verdict.base,
        measure.digits, verdict.difference)
    if verdict.spread is None:
        return text + '.'
    text += ' (%s by seed)' % ', '.join('%+.*f' % (measure.digits, each)
                                        for each in verdict.differences)
    spread = 'twice its standard error, %.*f' % (measure.digits, verdict.spread)
    if verdict.outcome == 'even':
        return text + ', which is within %s: no difference can be told.' % spread
    return text + ', %s by more than %s.' % (verdict.outcome, spread)


def _names(verdicts):
    return ' and '.join(verdict.measure.name.split(' (')[0] for verdict in verdicts)


def _reasons(unfinished):
    if not unfinished:
        return ''
    return ' (%s)' % '; '.join('%s, seed %d: %s' % (
        result.arm.label, result.seed, result.reason or result.status) for result in unfinished)


def _pairs(base, claim):
    """`(base, claim)` for each seed that both have finished, by seed."""
    bases = {result.seed: result for result in finished(base)}
    claims = {result.seed: result for result in finished(claim)}
    return [(bases[seed], claims[seed]) for seed in sorted(set(bases) & set(claims))]
