"""The sentence of a diagnosis: which side limits a run, by how much, and what to change."""

BEHIND = .9  # a speed below this share of another one counts as slower
BARELY = .05  # a share of waiting, or of the processors, that does not count
IDLE = .1  # a share of the processors from which on some are left
ROUNDS = 3  # of measuring the pipeline, the towers, and both together

_ADVICE = {
    'read': 'put the files on a faster disk, or in memory',
    'decode': 'store the images no larger than the crops need, or give the pipeline more '
              'processors',
    'augment': 'distort less (--augment=crop leaves the colours, --augment=none everything), or '
               'give the pipeline more processors',
    'batch': 'make the batch from fewer copies, or give the pipeline more processors',
    'copy': 'copy fewer bytes: let the model make numbers of the images on the devices',
    None: 'make the pipeline cheaper an example, let it run in parallel '
          '(dataset.map(..., num_parallel_calls)) and ahead (dataset.prefetch), or give it more '
          'processors'}


def sentence(found):
    """The verdict of a `Diagnosis`."""
    if found.contradiction and found.side != 'unclear':
        return _rough(found)
    return _SENTENCES[found.side](found)


def _rough(found):
    """Of a side that is certain, though the measurements contradict each other."""
    if found.side == 'input':
        sides = ('input holds', 'towers could take', shown_rate(found.towers / found.pipeline),
                 'pipeline delivers')
        advice = 'which a faster one would give back: ' + _slowest(found)[1]
    else:
        sides = ('towers hold', 'pipeline could deliver', shown_rate(found.pipeline / found.towers),
                 'towers take')
        advice = ('so that a faster one would bring next to nothing; more or faster devices, '
                  'or a cheaper model, would bring more')
    return (
        'The %s the run back, although the numbers are rough, since something else used the '
        'processors meanwhile: the %s about %s times as many images/s as the %s, and steps '
        'waited for input for %.0f %% of their time, %s.' % (
            sides + (100 * found.waiting, advice)))


def _unclear(found):
    again = 'measure again, longer: --diagnose_seconds=%g' % max(10., 3 * found.seconds)
    if found.is_steady:
        cause = ('each was measured %d times and differs by %.0f %% at most, so that something '
                 'else uses the processors all the time, or the two have more threads than '
                 'processors: end the one, or give fewer threads, and measure again' % (
                     ROUNDS, 100 * found.spread))
    elif found.spread is not None:
        cause = ('measurements of the same thing differ by %.0f %%, since something else used '
                 'the processors, or they were too short: %s' % (100 * found.spread, again))
    else:
        cause = 'something else used the processors, or they were too short: ' + again
    return 'The measurements contradict each other: %s; in the run itself steps waited for ' \
        'input for %.0f %% of their time, which %s; %s.' % (
            found.contradiction, 100 * found.waiting,
            'points to the input' if found.waiting >= .5 else
            'speaks against the input' if found.waiting < BARELY else 'does not decide it',
            cause)


def _turns(found):
    wholly = found.together * BEHIND < found.in_turns
    if 'batch' in found.stages:  # pipelines of this program, which prefetch
        ahead = ('give both more threads (--inter_op_threads), or take the time out of the slower '
                 'one')
    else:
        ahead = 'add .prefetch(2) at the end of the pipeline, or a larger one where it has that'
    return (
        'Input and towers take turns%s: alone the pipeline delivers %s and the towers take '
        '%s images/s, together they reach %s of %s, and %s; make the next batch during the step: '
        '%s.' % (
            '' if wholly else ' for part of the time', *map(shown_rate, (
                found.pipeline, found.towers, found.together, found.at_best())),
            '%.0f %% of the processors\' time is left' % (100 * found.idle())
            if found.idle() > IDLE else
            'the two need %.0f %% of the processors\' time' % (100 * found.needed()), ahead))


def _input(found):
    pipeline, towers = found.at_least()
    slowest, advice = _slowest(found)
    return (
        'The input holds the run back: the pipeline delivers %s of the %s images/s that '
        'the towers could take, and the run loses %.0f %% of their speed; %s%s.' % (
            shown_rate(pipeline), shown_rate(towers), _lost(found),
            '' if slowest is None else '%s takes %.0f %% of the pipeline\'s time: ' % (
                slowest, 100 * found.stages[slowest] / sum(found.stages.values())), advice))


def _towers(found):
    pipeline, towers = found.at_least()
    return (
        'The towers hold the run back: they take %s images/s, and the pipeline could '
        'deliver %s, %s times as many, so that a faster input would bring %.0f %% at most; '
        'more or faster devices, or a cheaper model, would bring more.' % (
            shown_rate(towers), shown_rate(pipeline), shown_rate(pipeline / towers),
            100 * (towers / found.together - 1)))


def _both(found):
    return (
        'Input and towers hold each other back, on the same processors: alone the pipeline '
        'delivers %s and the towers take %s images/s, together they reach %s, %.0f %% less '
        'than the towers alone; %s, or make the input on other processors.' % (
            *map(shown_rate, (found.pipeline, found.towers, found.together)), _lost(found),
            _slowest(found)[1]))


def _balanced(found):
    pipeline, towers = found.at_least()
    return (
        'Neither side holds the run back alone: the pipeline delivers %s and the towers take '
        '%s images/s, and together they reach %s; a faster run needs both%s.' % (
            shown_rate(pipeline), shown_rate(towers), shown_rate(found.together),
            ', or processors that they do not share'
            if found.together < BEHIND * min(pipeline, towers) else ''))


def _lost(found):
    """Percent of the towers' speed that the run loses."""
    return 100 * (1 - found.together / found.at_least()[1])


def _slowest(found):
    """`(name, advice)` of the slowest of the pipeline's stages; the name is None where there is
    one stage, or their times contradict each other."""
    if len(found.stages) < 2 or not found.stages_agree:
        return None, _ADVICE[None]
    name = max(found.stages, key=found.stages.get)
    return name, _ADVICE.get(name, _ADVICE[None])


_SENTENCES = {'unclear': _unclear, 'turns': _turns, 'input': _input, 'towers': _towers,
              'both': _both, 'balanced': _balanced}


def shown_rate(rate):
    """A rate as text: `'1,234'`, `'3.4'`."""
    return ('{:,.0f}' if rate >= 10 else '{:.2g}').format(rate)
