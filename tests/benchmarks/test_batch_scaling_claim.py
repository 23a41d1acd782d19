"""The verdict on the claim, in every outcome, from made-up numbers."""

import pytest

from benchmarks.batch_scaling.claim import judge, sentences
from scaling_samples import result


def runs(name, *ends):
    """A run a seed, with that accuracy at the end and the loss 1 - accuracy."""
    return [result(name, seed + 1, [0.5, 0.6, end], [1., 0.5, 1 - end])
            for seed, end in enumerate(ends)]


def outcomes(base, claim):
    return [verdict.outcome for verdict in judge(base, claim)]


def test_better_and_worse_by_more_than_the_spread():
    low, high = (0.80, 0.82), (0.90, 0.91)
    assert outcomes(runs('one', *low), runs('sqrt', *high)) == ['better'] * 3
    assert outcomes(runs('one', *high), runs('sqrt', *low)) == ['worse'] * 3


def test_seeds_are_compared_with_themselves_and_more_of_them_tell_more():
    """Arms that differ by 0.02 in every seed, while the seeds themselves are far apart."""
    low, high = (0.5, 0.7, 0.9), (0.521, 0.719, 0.92)
    assert outcomes(runs('one', *low), runs('sqrt', *high))[:2] == ['better'] * 2
    differences = (0.03, -0.01)
    spreads = [judge(runs('one', *[0.5] * 2 * times),
                     runs('sqrt', *[0.5 + each for each in differences * times]))[0]
               for times in (1, 16)]
    assert [verdict.outcome for verdict in spreads] == ['even', 'better']
    assert spreads[0].spread == pytest.approx(0.04)
    assert spreads[1].spread == pytest.approx(2 * 0.02 / 31 ** .5)


def test_sentences_when_it_held():
    lines = sentences(runs('one', 0.80, 0.82) + runs('sqrt', 0.90, 0.91))
    assert lines[0] == ('Here the claim held: 4 x 25 at 0.002 against 1 x 25 at 0.001, both after '
                        '600 examples, in 6 steps against 24.')
    assert lines[1] == ('Test accuracy at the end: 0.9050 against 0.8100, a difference of +0.0950 '
                        '(+0.1000, +0.0900 by seed), better by more than twice its standard error, '
                        '0.0100.')
    assert lines[2].startswith('Test loss at the end: 0.0950 against 0.1900, a difference of '
                               '-0.0950 (-0.1000, -0.0900 by seed), better by')
    assert len(lines) == 4


def test_sentences_when_a_run_failed():
    broken = result('sqrt', 2, [0.5], [1.], status='failed', reason='NaN in tower 1')
    lines = sentences(runs('one', 0.8, 0.82) + runs('sqrt', 0.9) + [broken])
    assert lines[0].startswith('The claim did not hold in every run (4 x 25 at 0.002, seed 2: NaN '
                               'in tower 1); where both ran to the end the claim held: ')
    lines = sentences(runs('one', 0.8, 0.82) + [broken])
    assert lines == ['The claim cannot be judged: no seed of both 4 x 25 at 0.002 and 1 x 25 at '
                     '0.001 is finished (4 x 25 at 0.002, seed 2: NaN in tower 1).']
