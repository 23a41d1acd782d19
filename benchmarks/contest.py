"""A contest: contenders of one workload and number of towers, shown to do the same, then timed."""

import collections
import os
import time

from benchmarks import same_work, turns
from benchmarks.workloads import WORKLOADS

PEERS = ('towers', 'one_device', 'recipe', 'slim', 'mirrored_graph', 'mirrored_function', 'floor')
# 0 is TF's default: as many as there are cores.
ONE_DEVICE_THREADS = tuple(count for count in (0, 1, 2) if count != os.cpu_count())
PEER_THREADS = (0, 1)  # what session_config gives towers on a machine of few cores, and the default
_MANY_TOWERS = 8  # a contender of InceptionResNet-v2 takes 2.5 GB on 2 towers, 3 on 4
_FIXED_THREADS = ('towers', 'floor')
_FIRST_STEPS = 4
_OF_WHOLE_BATCH = 0.3  # how far batch-norm statistics of whole batch and shards take a first loss


class Effort:
    """How long to measure: rounds, seconds of a turn."""

    def __init__(self, quick):
        self.rounds = 3 if quick else 7
        self.turn_seconds = 0.2 if quick else 1.
        self.probe_rounds = 1 if quick else 2


def spec(workload, num_towers, peer, **more):
    """The `build` command of a contender."""
    chosen = WORKLOADS[workload]
    return dict({'peer': peer, 'workload': workload, 'num_towers': num_towers,
                 'batch': chosen.batch_size(num_towers)}, **more)


def peers(workload, num_towers, names=PEERS, probe=True, known=None):
    """The contenders of a cell of the table of steps.

    Args:
      workload: name.
      num_towers: N.
      names: peers.
      probe: whether peers are there once for each thread setting, for the fastest to go on, or with
        TF's default alone.
      known: dict from a peer to its fastest thread setting, found already: it is there with that
        one alone.
    """
    known = known or {}
    contenders = []
    for name in names:
        if name == 'floor':
            contenders.append(turns.Contender(name, [
                spec(workload, num_towers, name, shard=shard) for shard in range(num_towers)]))
        elif name in _FIXED_THREADS:
            contenders.append(turns.Contender(name, [spec(workload, num_towers, name)]))
        else:
            settings = ONE_DEVICE_THREADS if name == 'one_device' else PEER_THREADS
            if name in known:
                settings = (known[name],)
            elif not probe:
                settings = (0,)
            contenders += [turns.Contender('%s@%d' % (name, threads), [
                spec(workload, num_towers, name, threads=threads)]) for threads in settings]
    return contenders


def combinations(workload, num_towers):
    """Ways to add up gradients, by hand, with one intra-op thread, beside towers and the recipe."""
    def one(label, peer, **options):
        threads = {} if peer in ('towers', 'recipe') else {'threads': 1}
        return turns.Contender(label, [spec(workload, num_towers, peer, options=options,
                                            **threads)])
    return [one('towers', 'towers'), one('recipe', 'recipe'),
            one('add_n', 'add_n'), one('add_n, arithmetic off', 'add_n', arithmetic=False),
            one('chain', 'chain'), one('chain, arithmetic off', 'chain', arithmetic=False)]


def placements(workload, num_towers):
    """Where variables can live. The first CPU is the first tower's: 'beside' moves the towers."""
    return [turns.Contender(label, [spec(workload, num_towers, 'towers', options=options)])
            for label, options in (
                ('first tower', {}),
                ('CPU beside the towers', {'variable_device': '/cpu:0', 'beside': True}),
                ('balanced', {'variable_device': 'balanced'}),
                ('replicated', {'variable_device': 'replicated'}))]


def threads(workload, num_towers):
    """Thread settings for towers, beside the one that `session_config` hands out."""
    return [turns.Contender('towers', [spec(workload, num_towers, 'towers')])] + [
        turns.Contender('%d threads' % count if count else 'TF default',
                        [spec(workload, num_towers, 'towers', threads=count)])
        for count in ONE_DEVICE_THREADS]


def hold(contenders, workload, effort, log):
    """Builds, compares and times contenders; the first one is the one of interest.

    Of a contender that is there with several thread settings (`name@threads`) the fastest goes on,
    as found by a probe. Those are started one name after the other, so that only the fastest of
    each holds memory; whoever has one setting alone is started first, as many at once as there are
    cores.

    Args:
      contenders: list of `Contender`, not started.
      workload: `Workload`.
      effort: `Effort`.
      log: called with lines of text.

    Returns:
      dict: `batch`, `steps` (label to steps of a turn), `seconds` (label to a list, one a round),
      `milliseconds` (label to `spread`), `cpu_milliseconds` (the same of processor time), `ratios`
      (label to `spread` of the first one's over it), `cpu_ratios` (the same of processor time),
      `failures` (label to why it is out),
      `build_seconds`, `threads` (label to the fastest setting), `probe`, `load`, `when`.
    """
    load, ours = os.getloadavg()[0], _plain(contenders[0].label)
    probe, chosen_threads = {}, {}
    try:
        groups = _groups(contenders)
        alone = [group[0] for group in groups if len(group) == 1]
        for group in [alone] + [group for group in groups if len(group) > 1]:
            turns.start_all(group)
            for contender in running(group):
                turns.first_steps(contender, _FIRST_STEPS)
            if group is not alone:
                _keep_fastest(group, effort, probe, chosen_threads)
        for label in [group[0].label for group in groups if len(group) == 1]:
            if '@' in label:
                chosen_threads[_plain(label)] = int(label.split('@')[1])
        compare(contenders, workload)
        for contender in contenders:
            log('%-18s %s' % (contender.label, contender.failure or 'built, same work'))
        racing = running(contenders)
        steps = turns.take_turns(racing, effort.rounds, effort.turn_seconds, log)
        racing = running(racing)
    finally:
        for contender in contenders:
            contender.close()
    seconds = {_plain(each.label): each.seconds for each in racing}
    cpu_seconds = {_plain(each.label): each.cpu_seconds for each in racing}
    return {
        'batch': contenders[0].batch,
        'steps': {_plain(label): count for label, count in steps.items()}, 'seconds': seconds,
        'milliseconds': {label: turns.spread([1e3 * each for each in values])
                         for label, values in seconds.items()},
        'cpu_milliseconds': {label: turns.spread([1e3 * busy for busy in values])
                             for label, values in cpu_seconds.items()},
        'ratios': {label: turns.ratios(seconds[ours], values)
                   for label, values in seconds.items() if label != ours and ours in seconds},
        'cpu_ratios': {label: turns.ratios(cpu_seconds[ours], values)
                       for label, values in cpu_seconds.items()
                       if label != ours and ours in cpu_seconds},
        'failures': {_plain(each.label): each.failure for each in contenders
                     if each.failure and each.failure != _SLOWER},
        'build_seconds': {_plain(each.label): each.build_seconds for each in racing},
        'threads': chosen_threads, 'probe': probe,
        'load': load, 'when': time.strftime('%Y-%m-%d %H:%M:%S')}


def heats(workload, num_towers):
    """Lists of peers that are in memory together; towers are in each.

    Those of a large model take gigabytes each, on many towers more, and the floor is a process a
    tower.
    """
    chosen = WORKLOADS[workload]
    if num_towers == 1 or not (chosen.deep or chosen.large and num_towers >= _MANY_TOWERS):
        return [PEERS]
    if num_towers < _MANY_TOWERS:
        return [PEERS[:-1], ('towers', 'floor')]
    return [('towers', 'one_device', 'recipe'), ('towers', 'slim'), ('towers', 'mirrored_graph'),
            ('towers', 'mirrored_function'), ('towers', 'floor')]


def joined(heats_held):
    """One result of those of several heats; towers' own times are the first one's, and ratios are
    those of the heat in which the other was."""
    whole = dict(heats_held[-1])
    for held in reversed(heats_held[:-1]):
        whole.update({key: dict(whole[key], **value) if isinstance(value, dict) else value
                      for key, value in held.items()})
    return whole


_SLOWER = 'slower than another thread setting'


def running(contenders):
    """Those that have not failed."""
    return [contender for contender in contenders if contender.failure is None]


def compare(contenders, workload):
    """Takes out of the contest whoever does other work than the reference.

    The reference is one device. Where batch norm makes one device's loss another it is whoever
    comes first of the recipe, slim's way and towers.
    """
    def is_whole(label):
        return label.startswith('one_device')
    alive = running(contenders)
    order = ('recipe', 'slim', 'towers')
    if not workload.batch_norm:
        order = ('one_device',) + order
    by_label = {_plain(contender.label): contender for contender in alive}
    reference = next((by_label[label] for label in order if label in by_label), None)
    reference = reference or (alive[0] if alive else None)
    near, along = ((same_work.DEEP_LOSS_TOLERANCE, same_work.DEEP_DIRECTION_TOLERANCE)
                   if workload.deep else (same_work.LOSS_TOLERANCE, same_work.CHANGE_TOLERANCE))
    for contender in alive:
        other_statistics = workload.batch_norm and is_whole(contender.label)
        found = same_work.difference(
            _record(reference), _record(contender),
            first_loss_only=contender.label == 'floor' or other_statistics,
            tolerance=_OF_WHOLE_BATCH if other_statistics else near, direction_tolerance=along)
        if found:
            contender.fail('DIFFERS from %s: %s' % (reference.label, found))


def _record(contender):
    return {'losses': contender.losses, 'checksum': contender.checksum}


def _groups(contenders):
    """Those of one plain label together, in order."""
    groups = collections.OrderedDict()
    for contender in contenders:
        groups.setdefault(_plain(contender.label), []).append(contender)
    return list(groups.values())


def _keep_fastest(group, effort, probe, chosen):
    """Times thread settings of one contender against each other and lets the fastest go on.

    Adds to `probe` the `spread` of each, and to `chosen` the number of threads.
    """
    turns.take_turns(running(group), effort.probe_rounds, effort.turn_seconds)
    timed = {each: turns.spread(each.seconds) for each in running(group)}
    if not timed:
        return
    probe.update((each.label, seconds) for each, seconds in timed.items())
    best = min(timed, key=lambda each: timed[each]['median'])
    for contender in timed:
        if contender is not best:
            contender.fail(_SLOWER)
    chosen[_plain(best.label)] = int(best.label.split('@')[1])


def _plain(label):
    return label.split('@')[0]
