"""The plan's lines about stages and micro-batches.

Its test is `tests/capture/test_stage_cuts.py`.
"""

import collections
import typing

import tensorflow.compat.v1 as tf

from towers.capture.stage_cuts import StageCuts
from towers.graph.graph_walk import devices_of
from towers.placement.devices import short_name
from towers.placement.stages import says_stages
from towers.placement.tower_device import stages_of


def stages_line(towers: typing.Sequence,
                cuts: typing.Optional[StageCuts]) -> typing.Optional[str]:
    """How the model is spread over the devices of a tower; None for one device.

    For a model that names no stages, and was cut, the line has the cuts. For a model that names
    stages, the line has the number of operations of each stage.

    Args:
      towers: the `Tower`s of the build.
      cuts: how the forward pass was cut into stages; None where it was not.
    """
    devices = stages_of(towers[0].device)
    if len(devices) == 1:
        return None
    operations = _operations_of_first(towers)
    model_names_stages = says_stages(operations)
    if cuts is not None and not model_names_stages:
        return _cuts_text(devices, cuts)
    text = _counts_text(devices, operations)
    others_are_idle = len(_stages_used(towers, operations)) == 1
    if cuts is not None:
        text += '; only what the model has put in no towers.stage is cut by itself'
    elif others_are_idle:
        text += " (stages='auto' cuts a model that names no towers.stage)"
    return text


def _counts_text(devices: typing.Sequence[str], operations: typing.Iterable[tf.Operation]) -> str:
    """The devices of a tower, each with how many of the tower's operations are there."""
    count = collections.Counter(op.device for op in operations)
    facts = []
    for device in devices:
        content = 'no stage of the model is there'
        if count[device]:
            content = '%d operations' % count[device]
        facts.append('%s: %s' % (short_name(device), content))
    return ', '.join(facts)


def _cuts_text(devices: typing.Sequence[str], cuts: StageCuts) -> str:
    """The devices of a tower, each with its share of the memory, and the cuts between them."""
    names = list(map(short_name, devices))
    shares = ['%.0f%%' % (100 * share) for share in cuts.memory]
    text = '%s %s' % (names[0], shares[0])
    # A cut comes before each stage but the first one.
    for operation, size, name, share in zip(cuts.names, cuts.crossing, names[1:], shares[1:]):
        text += ', after %s (%.1f MB cross) %s %s' % (operation, size / 1e6, name, share)
    return text


def _operations_of_first(towers: typing.Sequence) -> typing.List[tf.Operation]:
    """The operations of the first of the `Tower`s; with accumulation, of its first micro-batch."""
    return [op for op in tf.get_default_graph().get_operations() if towers[0].has(op.name)]


def _stages_used(towers: typing.Sequence,
                 operations: typing.Iterable[tf.Operation]) -> typing.Set[str]:
    """The devices of a tower on which the model has operations: only these are stages."""
    return devices_of(operations).intersection(stages_of(towers[0].device))


def _sizes_text(towers: typing.Sequence) -> str:
    """The sizes of the towers' micro-batches, ` of 8` or ` of 8 or 7`; '' if none is static."""
    static_sizes = {tower.size for tower in towers if isinstance(tower.size, int)}
    if not static_sizes:
        return ''
    largest_first = sorted(static_sizes, reverse=True)
    return ' of ' + ' or '.join(map(str, largest_first))


def accumulation_line(towers: typing.Sequence, micro_batches: int,
                      schedule: typing.Optional[str]) -> typing.Optional[str]:
    """How each tower's micro-batches run, and how long a pipeline's stages wait; None for one
    micro-batch.

    With m micro-batches through s equal stages, a step lasts m + s - 1 periods, in each of which a
    stage computes one micro-batch or waits. Each stage waits in s - 1 of these periods.

    Args:
      towers: the `Tower`s of the build.
      micro_batches: how many micro-batches each tower has.
      schedule: the order of the micro-batches in the stages, such as `'one_forward_one_backward'`;
        None where they run one after the other.
    """
    if micro_batches == 1:
        return None
    text = '%d micro-batches%s a tower' % (micro_batches, _sizes_text(towers))
    if schedule is None:
        return text + ', one after the other, for one update'
    num_stages = len(_stages_used(towers, _operations_of_first(towers)))
    schedule = schedule.replace('_', ' ')
    if num_stages == 1:
        return '%s through one stage, %s' % (text, schedule)
    waiting_share = (num_stages - 1.) / (micro_batches + num_stages - 1)
    return '%s through %d stages, %s; of equal stages each waits %.0f%% of the time' % (
        text, num_stages, schedule, 100 * waiting_share)
