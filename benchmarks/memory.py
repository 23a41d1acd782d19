"""Peak memory of a step, contender by contender, as TensorFlow's allocator counts it."""

from benchmarks import contest, turns

# TF 1.15's plain CPU allocator counts nothing.
_COUNTING = {'TF_CPU_ALLOCATOR_USE_BFC': 'true'}
_WARM_UP = 3


def measure(workload, num_towers, names=contest.PEERS, variants=True):
    """Yields the peak memory of each contender, one after the other.

    Args:
      workload: name.
      num_towers: N.
      names: peers.
      variants: whether to add the ways of `contest.combinations`.

    Yields:
      (label, {'allocator': bytes or None, 'resident': bytes}), of the floor all its processes
      together; or (label, {'failure': text}).
    """
    contenders = contest.peers(workload, num_towers, names)
    # Threads change nothing here: one of one device's settings is enough.
    contenders = [each for each in contenders if each.label not in ('one_device@1', 'one_device@2')]
    if variants:
        known = {each.label for each in contenders}
        contenders += [each for each in contest.combinations(workload, num_towers)
                       if each.label not in known]
    for contender in contenders:
        contender.set_environment(_COUNTING)
        yield contender.label.split('@')[0], _peak(contender)


def _peak(contender):
    try:
        contender.start()
        if contender.failure is None:
            contender.run(_WARM_UP)
            answers = contender.ask('memory')
            counted = [answer['allocator'] for answer in answers]
            return {'allocator': sum(counted) if all(counted) else None,
                    'resident': sum(answer['resident'] for answer in answers)}
    except turns.ContenderError as error:
        contender.fail(str(error))
    finally:
        contender.close()
    return {'failure': contender.failure}
