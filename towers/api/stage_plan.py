"""The plan's lines about stages and micro-batches."""

import collections

import tensorflow.compat.v1 as tf

from towers.placement.devices import short_name
from towers.placement.stages import remark_on_stages, says_stages
from towers.placement.tower_device import stages_of
from towers.tower.stage_cuts import describe as describe_cuts


def stages_line(tower_set):
    """How the model is spread over the devices of a tower; None for one device."""
    towers, device = tower_set.towers, tower_set.towers[0].device
    if len(stages_of(device)) == 1:
        return None
    operations = _operations_of_first(towers)
    by_itself = tower_set.cuts is not None
    if by_itself and not says_stages(operations):
        text = describe_cuts(tower_set.cuts, device)
    else:
        count = collections.Counter(op.device for op in operations)
        text = ', '.join('%s: %s' % (short_name(name), '%d operations' % count[name]
                                     if count[name] else 'no stage of the model is there')
                         for name in stages_of(device))
        if by_itself:
            text += '; only what the model has put in no towers.stage is cut by itself'
        elif len(_stages_in_use(towers)) == 1:
            text += " (stages='auto' cuts a model that names no towers.stage)"
    return text + remark_on_stages(
        [op for op in operations if op.name not in towers[0].backward], device)


def _operations_of_first(towers):
    """The operations of the first tower, or of its first micro-batch."""
    first = towers[0]
    return [op for op in tf.get_default_graph().get_operations() if first.has(op.name)]


def _stages_in_use(towers):
    """The devices of the first tower on which something of the model is."""
    found = {op.device for op in _operations_of_first(towers)}
    return [name for name in stages_of(towers[0].device) if name in found]


def accumulation_line(towers, micro_batches, schedule):
    """How each tower's micro-batches run, and how long a pipeline's stages wait; None for one.

    Stages in which the model has nothing are none of the pipeline's.
    """
    if micro_batches == 1:
        return None
    sizes = sorted({tower.size for tower in towers if isinstance(tower.size, int)})
    text = '%d micro-batches%s a tower' % (
        micro_batches, '' if not sizes else ' of ' + ' or '.join(map(str, sizes[::-1])))
    if schedule is None:
        return text + ', one after the other, for one update'
    stages, schedule = len(_stages_in_use(towers)), schedule.replace('_', ' ')
    if stages == 1:
        return '%s through one stage, %s' % (text, schedule)
    return '%s through %d stages, %s; of equal stages each waits %.0f%% of the time' % (
        text, stages, schedule, 100 * (stages - 1.) / (micro_batches + stages - 1))
