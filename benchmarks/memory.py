"""Peak memory of a step, contender by contender: of TensorFlow's allocator, and of the process.

Each is started twice, since the allocator that counts is not the one that people have.
"""

from benchmarks import contest, turns

# TF 1.15's plain CPU allocator counts nothing.
_COUNTING = {'TF_CPU_ALLOCATOR_USE_BFC': 'true'}
_STEPS = 8


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
    contenders = [each for each in contenders if not each.label.endswith(('@1', '@2'))]
    if variants:
        known = {each.label for each in contenders}
        contenders += [each for each in contest.combinations(workload, num_towers)
                       if each.label not in known]
    for contender in contenders:
        peaks = {}
        for kind, environment in (('resident', {}), ('allocator', _COUNTING)):
            contender.set_environment(environment)
            peaks[kind] = _peak(contender, kind)
            if contender.failure is not None:
                peaks = {'failure': contender.failure}
                break
        yield contender.label.split('@')[0], peaks


def _peak(contender, kind):
    """Bytes that all its processes took, None where that is not told."""
    try:
        contender.start()
        if contender.failure is None:
            contender.run(_STEPS)
            taken = [answer['bytes'] for answer in contender.ask(kind)]
            return sum(taken) if all(taken) else None
    except turns.ContenderError as error:
        contender.fail(str(error))
    finally:
        contender.close()
    return None
