"""The verdict on a traced step: what costs it the most, in numbers, and what to change."""

import typing

import tensorflow.compat.v1 as tf

from towers.api.built import BuiltTowers
from towers.graph.graph_walk import bytes_of
from towers.model.objectives import all_pairs
from towers.placement.devices import has_gpus, short_name
from towers.placement.tower_device import all_devices, stages_of
from towers.report.chain import Link
from towers.report.parts import (
    COMBINATION,
    EXCHANGE,
    INPUT,
    OF_TOWERS,
    OTHER,
    OUTPUTS,
    UPDATE,
)
from towers.report.time_use import TimeUse

_LEAST_SHARE = 0.05  # what costs a smaller share of the step is not in the verdict
_MOST_OF_BYTES = 0.8  # a variable that has more of all variables' bytes is named
_MOST_OF_TIME = 0.8  # a device that does more of some parts than that is named with them


class Finding(typing.NamedTuple):
    """Something that costs time in a step.

    Attributes:
      share: the largest time that the step would save without it, as a share of the step.
      text: a sentence with the cost, without a full stop.
      advice: what to change; the sentence goes on with it after a colon.
    """
    share: float
    text: str
    advice: str

    def __str__(self):
        return '%s: %s.' % (self.text, self.advice)


def verdict(built: BuiltTowers, use: TimeUse, chain: typing.Sequence[Link]) -> typing.List[Finding]:
    """All that costs a step at least 5 % of its time.

    The cost of a part is the time in which the part ran and no tower computed. The cost of a stage
    or a tower that computes longer than the others is the time by which it exceeds the mean of all.

    The cost of the longest chain is the time in which its next operation has not begun, though the
    device of that operation runs nothing (`Link.idle`). Time in which no device at all runs
    anything does not count, since it is a finding of its own.

    Args:
      built: the result of `build_towers`.
      use: the time of its step, by device and by part.
      chain: the longest chain of its operations.

    Returns:
      At least one `Finding`, the most costly one first; but the waits for threads that CPU devices
      share come last.
    """
    found = _exposed_parts(built, use) + _findings_of_long_stage(built, use)
    found += _long_tower(built, use)
    found.append(_nothing_runs(use))
    waits = _waits_of_chain(built, use, chain)
    if has_gpus(built.devices):
        found.append(waits)
        found.sort(key=lambda finding: -finding.share)
    else:
        # Devices of CPUs wait for the processors and threads that they share. That comes last, also
        # with the largest share: it tells of the machine, and the others of the step.
        found.sort(key=lambda finding: -finding.share)
        found.append(waits)
    worth_saying = [finding for finding in found if finding.share >= _LEAST_SHARE]
    if worth_saying:
        return worth_saying
    return [_only_computes(use)]


def _nothing_runs(use: TimeUse) -> Finding:
    """The `Finding` about the time in which nothing runs on any device."""
    return Finding(
        use.nothing / use.micros,
        'During %s of the step nothing runs on any device: the time goes into the beginning of '
        'operations and into copies' % _percent(use.nothing, use.micros),
        'larger shards, so that the same number of operations does more')


def _only_computes(use: TimeUse) -> Finding:
    """The `Finding` about a step in which nothing else is worth a finding."""
    computing = max(use.computing.values())
    return Finding(
        0., 'Towers compute during %s of the step, and nothing else takes 5 %% of it' % _percent(
            computing, use.micros),
        'only faster kernels, a lower precision (Numerics) or fewer computations make it shorter')


def _waits_of_chain(built: BuiltTowers, use: TimeUse, chain: typing.Sequence[Link]) -> Finding:
    """The `Finding` about the time in which the next operation of the longest chain waits, its
    device runs nothing, and another device runs something."""
    idle = sum(link.idle for link in chain)
    # All of the time in which no device runs anything is in `idle`, and has a finding of its own.
    micros = idle - use.nothing
    if has_gpus(built.devices):
        text = 'for a copy from another device, or for a thread'
        advice = ('see the rows of copies in the timeline, of which '
                  "VariablePlacement('replicated') makes fewer")
    else:
        text = 'for a processor or a thread, which the CPU devices of a process share'
        advice = 'more processors, fewer towers, or session_config(…, inter_op_threads=…)'
    return Finding(
        micros / use.micros, 'During %s of the step the next operation of the longest chain waits '
        'on an idle device %s' % (_percent(micros, use.micros), text), advice)


# ---- parts that run while the towers wait --------------------------------------------------------

def _exposed_parts(built: BuiltTowers, use: TimeUse) -> typing.List[Finding]:
    """A `Finding` for each part that ran while no tower computed; see `_parts_to_name`."""
    advice = _advice_by_part(built, use)
    found = []
    for parts in _parts_to_name(use):
        micros = sum(use.exposed[part] for part in parts)
        subject = ' and '.join(_SUBJECTS[part] for part in parts)
        verb = 'takes' if len(parts) == 1 else 'take'
        # `use.longest` has all devices: the longest operation may be on any of them.
        text = '%s %s %s of the step%s, while %s; the longest operation is %s' % (
            subject[0].upper() + subject[1:], verb, _percent(micros, use.micros),
            _where(parts, use), _who_waits(built), _longest_operation(use, use.longest, parts))
        found.append(Finding(micros / use.micros, text, advice[parts[0]]))
    return found


def _advice_by_part(built: BuiltTowers, use: TimeUse) -> typing.Dict[str, str]:
    """{part: what to change where it costs time}, for all parts but the towers' own."""
    advice = {
        INPUT: 'make batches while a step runs, with dataset.map(…, num_parallel_calls=…) and, '
               'last, dataset.prefetch(…), or with towers.staged, which also brings the shards to '
               'the towers; if that does not do, read and prepare less for each example',
        COMBINATION: _advice_on_variables(built),
        UPDATE: _advice_on_variables(built),
        EXCHANGE: "values of the whole batch (batch_norm='sync', batch_sum) make all towers wait "
                  'for each other: exchange fewer of them, or larger shards',
        OUTPUTS: 'fetch predictions and metrics in fewer steps',
        OTHER: 'see the operations of this part in the timeline',
    }
    if INPUT in use.exposed:
        # With prefetching the input and the rest of the step run at the same time.
        rest = use.micros - use.exposed[INPUT]
        longer_one = max(rest, use.exposed[INPUT])
        advice[INPUT] += '. Prefetching alone brings the step to %.1f ms at best' % (
            longer_one / 1e3)
    return advice


def _parts_to_name(use: TimeUse) -> typing.List[typing.Tuple[str, ...]]:
    """The parts that ran while no tower computed, in groups: each finding is about one group.

    Each part is a group of its own. Only combination and update are in one group, since the same
    advice helps, if both cost at least `_LEAST_SHARE`.
    """
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


def _where(parts: typing.Sequence[str], use: TimeUse) -> str:
    """`' on /cpu:0'` if that device does most of the given parts; else `''`."""
    micros = {}
    for device, shares in use.shares.items():
        micros[device] = sum(shares.get(part, 0) for part in parts)
    busiest = max(micros, key=lambda device: micros[device])
    does_most = micros[busiest] > _MOST_OF_TIME * sum(micros.values())
    return ' on %s' % busiest if does_most else ''


def _longest_operation(use: TimeUse, devices: typing.Iterable[str],
                       parts: typing.Sequence[str]) -> str:
    """The name and time of the longest operation of some parts on some devices, such as
    `'Adam/update_w/ResourceApplyAdam, 12.3 ms'`."""
    candidates = []
    for device in devices:
        longest_by_part = use.longest.get(device, {})
        candidates += [longest_by_part[part] for part in parts if part in longest_by_part]
    longest = max(candidates, key=lambda operation: operation.micros)
    return '%s, %.2f ms' % (longest.name, longest.micros / 1e3)


def _who_waits(built: BuiltTowers) -> str:
    """The text about the towers that wait: `'both towers wait'`."""
    num_towers = len(built.devices)
    if num_towers == 1:
        return 'the tower waits'
    if num_towers == 2:
        return 'both towers wait'
    return 'all %d towers wait' % num_towers


def _advice_on_variables(built: BuiltTowers) -> str:
    """The advice for combination and update: another placement of the variables, or fewer updates.
    """
    if len(built.devices) == 1:
        return 'an optimizer with fewer slots, or fewer and larger variables'
    has_replicas = built.replicas is not None
    has_cluster = built.machines is not None
    if has_replicas or has_cluster:  # no other placement makes the update shorter
        return 'larger shards, or Memory(accumulate=…), so that fewer updates are made'
    has_stages = len(stages_of(built.devices[0])) > 1  # towers with stages have no replicas
    if has_stages:
        return "try variables=towers.VariablePlacement('stage')"
    devices = {short_name(variable.device) for variable in built.variables}
    if len(devices) > 1:
        return "try variables=towers.VariablePlacement('replicated')" + _on_largest_variable(built)
    return ("all variables are on %s: spread them, and the update, over the towers' devices with "
            "variables=towers.VariablePlacement('balanced') or VariablePlacement('replicated')" % (
                ', '.join(devices)) + _on_largest_variable(built))


def _on_largest_variable(built: BuiltTowers) -> str:
    """The end of an advice to spread the variables: what helps more where one variable has more
    than 80 % of their bytes, as each variable stays whole; else ''.

    It is '' for sparse gradients, too: their update takes a few rows, and not the whole variable.
    """
    bytes_of_variables = {}
    for gradient, variable in all_pairs(built.gradients):
        if isinstance(gradient, tf.IndexedSlices):
            return ''
        if gradient is not None:
            bytes_of_variables[variable.op.name] = bytes_of(variable)
    total = sum(bytes_of_variables.values())
    for name, size in bytes_of_variables.items():
        if size > _MOST_OF_BYTES * total:
            return (". But '%s' alone has %s of their bytes, and each variable is updated as a "
                    'whole: larger shards, or Memory(accumulate=…), help more, since they make '
                    'fewer updates for the same examples' % (name, _percent(size, total)))
    return ''


# ---- towers and stages that are longer than the others -------------------------------------------

class LongStage(typing.NamedTuple):
    """The stage of a tower that computes the longest.

    Attributes:
      tower: the index of the tower.
      devices: the short names of the devices of the tower's stages.
      micros_of_stages: for each stage the microseconds in which it computed.
    """
    tower: int
    devices: typing.List[str]
    micros_of_stages: typing.List[int]

    @property
    def stage(self) -> int:
        """The index of the stage."""
        return self.micros_of_stages.index(max(self.micros_of_stages))

    @property
    def device(self) -> str:
        """The short name of the stage's device."""
        return self.devices[self.stage]

    @property
    def mean(self) -> float:
        """The microseconds that each stage would compute if all had the same length."""
        return sum(self.micros_of_stages) / float(len(self.devices))

    @property
    def excess(self) -> float:
        """The microseconds by which the stage exceeds the mean."""
        return max(self.micros_of_stages) - self.mean


def long_stage(built: BuiltTowers, use: TimeUse) -> typing.Optional[LongStage]:
    """The stage that exceeds the mean of its tower's stages by the most, where that costs a step at
    least 5 % of its time; None for towers without stages, and where it costs less."""
    candidates = []
    # Towers on the same devices count once: their time on a device is measured together.
    for tower_device in dict.fromkeys(built.devices):
        devices = list(map(short_name, stages_of(tower_device)))
        micros_of_stages = [use.computing.get(device, 0) for device in devices]
        if len(devices) > 1 and any(micros_of_stages):  # it has stages, and something ran there
            tower = built.devices.index(tower_device)
            candidates.append(LongStage(tower, devices, micros_of_stages))
    if not candidates:
        return None
    longest = max(candidates, key=lambda candidate: candidate.excess)
    return longest if longest.excess >= _LEAST_SHARE * use.micros else None


def _findings_of_long_stage(built: BuiltTowers, use: TimeUse) -> typing.List[Finding]:
    """A `Finding` for the `long_stage`; [] if there is none."""
    longest = long_stage(built, use)
    if longest is None:
        return []
    return [Finding(
        longest.excess / use.micros, _long_stage_in_words(longest, use),
        'move layers from this stage to the others (with towers.stage in the model function; the '
        "page has a table of them), or let Pipeline(stages='auto') choose the cuts"
        + _on_shared_processors(built, use))]


def _long_stage_in_words(longest: LongStage, use: TimeUse) -> str:
    """The text about the stage of a tower that computes the longest."""
    shares = [_percent(micros, use.micros) for micros in longest.micros_of_stages]
    stage = longest.stage
    other_shares = shares[:stage] + shares[stage + 1:]
    return ('Stage %d of tower %d, on %s, computes %s of the step, and the other stage%s only %s; '
            'stages of one length would compute %s each; the longest operation is %s' % (
                stage, longest.tower, longest.device, shares[stage],
                's' if len(other_shares) > 1 else '', ' and '.join(other_shares),
                _percent(longest.mean, use.micros),
                _longest_operation(use, [longest.device], OF_TOWERS)))


def _on_shared_processors(built: BuiltTowers, use: TimeUse) -> str:
    """The end of the advice to move layers to other stages: a warning where that may not help.

    It helps only if the devices compute at the same time. CPU devices share the processors of the
    machine: in the step at most `use.most_at_once` operations ran at the same time.

    Returns:
      The warning; '' on GPUs, and where as many operations ran at once as there are devices.
    """
    num_devices = len(all_devices(built.devices))
    if has_gpus(built.devices) or use.most_at_once >= num_devices:
        return ''
    return (', which helps where each device has a processor of its own: here at most %d '
            'operations ran at once on %d devices' % (use.most_at_once, num_devices))


def _long_tower(built: BuiltTowers, use: TimeUse) -> typing.List[Finding]:
    """A `Finding` for the tower that computes the longest, compared with the mean of the towers.

    Returns:
      A list of one; [] for one tower, and for towers that share devices.
    """
    if len(use.tower_micros) < 2:
        return []
    share_devices = len(set(built.devices)) < len(built.devices)
    if share_devices:  # then an operation of one tower may be long since another tower computes
        return []
    slowest = max(use.tower_micros, key=lambda tower: use.tower_micros[tower])
    micros = use.tower_micros[slowest]
    mean = sum(use.tower_micros.values()) / float(len(use.tower_micros))
    text = 'Tower %d, on %s, computes %s of the step, the mean of the towers is %s' % (
        slowest, short_name(built.devices[slowest]), _percent(micros, use.micros),
        _percent(mean, use.micros))
    if has_gpus(built.devices):
        advice = 'give it fewer examples with shares=, or look for what else uses its device'
    else:
        advice = ('trace another step, as CPU devices share the processors and chance decides who '
                  'waits; if it is always this tower, give it fewer examples with shares=')
    return [Finding((micros - mean) / use.micros, text, advice)]


def _percent(part: float, whole: float) -> str:
    """`'12 %'`: a part of the whole."""
    return '%.0f %%' % (100. * part / whole)
