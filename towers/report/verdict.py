"""The verdict on a traced step: what costs it the most, in numbers, and what to change."""

import typing

from towers.api.built import BuiltTowers
from towers.placement.devices import is_gpu, short_name
from towers.placement.tower_device import all_devices, stages_of
from towers.report.chain import Link
from towers.report.parts import COMBINATION, EXCHANGE, INPUT, OTHER, OUTPUTS, UPDATE
from towers.report.time_use import TimeUse

_LEAST_SHARE = 0.05  # of the step, below which nothing is said


class Finding(typing.NamedTuple):
    """Something that costs a step time.

    Attributes:
      share: what the step would gain without it, at the most, as a share of the step.
      text: a sentence with the number.
      advice: what to try.
    """
    share: float
    text: str
    advice: str


def findings(built: BuiltTowers, use: TimeUse,
             chain: typing.Sequence[Link]) -> typing.List[Finding]:
    """All that costs a step at least 5 % of its time, the worst first.

    The cost of a part is the time in which it ran and no tower computed; of a stage or a tower that
    computes longer than the others, how much longer than their mean; of the longest chain, the time
    between its operations in which something else ran.

    Args:
      built: the result of `build_towers`.
      use: where the time of its step went.
      chain: the longest chain of its operations.
    """
    found = _exposed_parts(built, use) + _long_stage(built, use) + _long_tower(built, use)
    found.append(_waits_of_chain(built, use, chain))
    found.append(Finding(
        use.nothing / use.micros,
        'during %s of the step no operation runs on any device (copies, and the beginning of '
        'operations)' % _percent(use.nothing, use.micros),
        'larger shards make the same number of operations do more; session_config gives each tower '
        'a thread of its own'))
    worth_saying = [each for each in found if each.share >= _LEAST_SHARE]
    return sorted(worth_saying, key=lambda each: -each.share)


def verdict(built: BuiltTowers, use: TimeUse, chain: typing.Sequence[Link]) -> typing.List[str]:
    """Sentences with numbers and advice, the most important one first; at least one.

    Args:
      built: the result of `build_towers`.
      use: where the time of its step went.
      chain: the longest chain of its operations.
    """
    sentences = ['%s: %s.' % (each.text[0].upper() + each.text[1:], each.advice)
                 for each in findings(built, use, chain)]
    if sentences:
        return sentences
    computing = max(use.computing.values())
    return ['Towers compute during %s of the step, and nothing else takes 5 %% of it: only faster '
            'kernels, a lower precision (Numerics) or fewer computations make it shorter.' % (
                _percent(computing, use.micros))]


def _waits_of_chain(built: BuiltTowers, use: TimeUse, chain: typing.Sequence[Link]):
    """The `Finding` of the time in which the longest chain waits and something else runs."""
    gaps = sum(link.gap for link in chain)
    micros = max(0, gaps - use.nothing)
    if any(is_gpu(device) for device in all_devices(built.devices)):
        advice = ('see the rows of copies in the timeline, of which '
                  "VariablePlacement('replicated') makes fewer")
    else:
        advice = ('CPUs of one process share its processors and threads: fewer towers, or more '
                  'processors')
    return Finding(
        micros / use.micros,
        'operations of the longest chain wait for a thread or a copy during %s of the step, while '
        'others run' % _percent(micros, use.micros), advice)


# ---- parts that run while the towers wait --------------------------------------------------------

def _exposed_parts(built: BuiltTowers, use: TimeUse):
    """A `Finding` for each part that ran while no tower computed; see `_parts_to_name`."""
    advice = {
        INPUT: 'read ahead with prefetch and parallel calls of map, or bring shards to the towers '
               'before the step with towers.staged',
        COMBINATION: _advice_on_variables(built),
        UPDATE: _advice_on_variables(built),
        EXCHANGE: "values of the whole batch (batch_norm='sync', batch_sum) make all towers wait "
                  'for each other: exchange fewer of them, or larger shards',
        OUTPUTS: 'fetch predictions and metrics in fewer steps',
        OTHER: 'see the operations of this part in the timeline',
    }
    found = []
    for parts in _parts_to_name(use):
        micros = sum(use.exposed[part] for part in parts)
        subject = ' and '.join(_SUBJECTS[part] for part in parts)
        text = '%s %s %s of the step%s, while %s' % (
            subject, 'take' if len(parts) > 1 else 'takes', _percent(micros, use.micros),
            _where(parts, use), _who_waits(built))
        found.append(Finding(micros / use.micros, text, advice[parts[0]]))
    return found


def _parts_to_name(use: TimeUse) -> typing.List[typing.Tuple[str, ...]]:
    """The parts that ran while no tower computed, each by itself; but combination and update, for
    which the same helps, together where both take their time."""
    least = _LEAST_SHARE * use.micros
    found: typing.List[typing.Tuple[str, ...]] = []
    where_variables_are = (COMBINATION, UPDATE)
    are_joined = all(use.exposed.get(part, 0) >= least for part in where_variables_are)
    if are_joined:
        found.append(where_variables_are)
    for part in use.exposed:
        if not are_joined or part not in where_variables_are:
            found.append((part,))
    return found


_SUBJECTS = {
    INPUT: 'the input',
    COMBINATION: 'the combination of gradients',
    UPDATE: 'the update',
    EXCHANGE: 'the exchange of values of the whole batch',
    OUTPUTS: 'the loss and the predictions of the batch',
    OTHER: 'what belongs to no part',
}


def _where(parts: typing.Sequence[str], use: TimeUse):
    """`' on /cpu:0'`, where a device does most of some parts; else an empty text."""
    micros = {}
    for device, shares in use.shares.items():
        micros[device] = sum(shares.get(part, 0) for part in parts)
    device = max(micros, key=lambda each: micros[each])
    is_most = micros[device] > 0.8 * sum(micros.values())
    return ' on %s' % device if is_most else ''


def _who_waits(built: BuiltTowers):
    count = len(built.devices)
    if count == 1:
        return 'the tower waits'
    return 'both towers wait' if count == 2 else 'all %d towers wait' % count


def _advice_on_variables(built: BuiltTowers):
    """What else could be done with the variables, by where they are now."""
    if len(built.devices) == 1:
        return 'an optimizer with fewer slots, or fewer and larger variables'
    devices = {variable.device for variable in built.variables}
    if built.replicas is not None or built.machines is not None:
        return 'larger shards, or Memory(accumulate=…), so that fewer updates are made'
    if len(stages_of(built.devices[0])) > 1:  # which have no replicas
        return "try VariablePlacement('stage')"
    if len(devices) > 1:
        return "try VariablePlacement('replicated')"
    return "try VariablePlacement('balanced') or VariablePlacement('replicated')"


# ---- towers and stages that are longer than the others -------------------------------------------

def _long_stage(built: BuiltTowers, use: TimeUse):
    """A `Finding` for the stage that computes longer than the mean of its tower's stages, of the
    tower where that costs the most: a list of one or none."""
    found = []
    for index, tower_device in enumerate(dict.fromkeys(built.devices)):
        devices = [short_name(each) for each in stages_of(tower_device)]
        micros = [use.computing.get(device, 0) for device in devices]
        if len(devices) == 1 or not any(micros):
            continue
        longest = micros.index(max(micros))
        others = [each for place, each in enumerate(micros) if place != longest]
        excess = max(micros) - sum(micros) / float(len(micros))
        text = 'stage %d of tower %d, on %s, computes %s of the step, the other%s %s' % (
            longest, index, devices[longest], _percent(max(micros), use.micros),
            's' if len(others) > 1 else '',
            ' and '.join(_percent(each, use.micros) for each in others))
        found.append(Finding(
            excess / use.micros, text,
            "move layers from this stage to the others (towers.stage, or Pipeline(stages='auto'))"))
    return sorted(found, key=lambda each: -each.share)[:1]


def _long_tower(built: BuiltTowers, use: TimeUse):
    """A `Finding` for the tower that computes longer than the mean of the towers."""
    micros = [sum(use.computing.get(short_name(each), 0) for each in stages_of(device))
              for device in built.devices]
    if len(micros) == 1 or not any(micros) or len(set(built.devices)) < len(built.devices):
        return []
    slowest = micros.index(max(micros))
    mean = sum(micros) / float(len(micros))
    text = 'tower %d, on %s, computes %s of the step, the mean of the towers is %s' % (
        slowest, short_name(built.devices[slowest]), _percent(max(micros), use.micros),
        _percent(mean, use.micros))
    return [Finding((max(micros) - mean) / use.micros, text,
                    'give it fewer examples with shares=, or look for what else uses its device')]


def _percent(part: float, whole: float) -> str:
    return '%.0f %%' % (100. * part / whole)
