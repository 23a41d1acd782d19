"""How much of the combination ran while a tower was still at its backward pass, from a trace."""

import collections
import re

OperationTime = collections.namedtuple('OperationTime', 'name begin end')
"""One kernel of a traced step: name, and microseconds on one clock."""

_COMBINATION = 'combine_gradients'


def operation_times(metadata):
    """List of `OperationTime` from the `RunMetadata` of a FULL_TRACE step."""
    return [OperationTime(node.node_name.split(':')[0],
                          node.all_start_micros + node.op_start_rel_micros,
                          node.all_start_micros + node.op_end_rel_micros)
            for device in metadata.step_stats.dev_stats for node in device.node_stats]


def overlapped(times):
    """The share of the combination that ran before the slowest tower's last gradient was there.

    Args:
      times: list of `OperationTime` of a step of `build_towers`, whose operations are told apart by
        their name scopes, see `programs.tell_tower_0`.

    Returns:
      dict: `share` of the time of the combination's operations, `combination` and `backward` (to
      the last gradient, from the step's first operation) in milliseconds, `operations`.

    Raises:
      ValueError: there is no combination, or no gradient, in the trace.
    """
    added = [each for each in times if each.name.split('/')[0] == _COMBINATION]
    gradients = [each for each in times
                 if each.name.startswith('tower_') and '/gradients' in each.name]
    if not added or not gradients:
        raise ValueError('%d operations of the combination and %d of gradients among %d traced' % (
            len(added), len(gradients), len(times)))
    last = max(each.end for each in gradients)
    total = sum(each.end - each.begin for each in added)
    before = sum(max(0, min(each.end, last) - each.begin) for each in added)
    return {'share': float(before) / total if total else 0., 'combination': total / 1e3,
            'backward': (last - min(each.begin for each in times)) / 1e3,
            'operations': len(added), 'timeline': timeline(times)}


def timeline(times):
    """What ran when, for a picture.

    Args:
      times: list of `OperationTime` of a step of `build_towers`.

    Returns:
      list of `[row, kind, spans]`: the rows are the towers by number, 'combination', and 'update'
      for all that is in neither: the cutting of the batch, the loss of all towers, the update;
      the kinds 'forward', 'backward', 'combination' and 'update'; the spans lists of
      `[begin, end]` in milliseconds from the step's first operation, sorted and apart.
    """
    first = min(each.begin for each in times)
    spans = collections.defaultdict(list)
    for each in sorted(times, key=lambda each: each.begin):
        begin, end = (each.begin - first) / 1e3, (each.end - first) / 1e3
        merged = spans[_row_and_kind(each.name)]
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    return [[row, kind, spans[row, kind]] for row, kind in sorted(spans, key=_order)]


def _row_and_kind(name):
    tower = re.match('tower_([0-9]+)/', name)
    if tower:
        return 'tower ' + tower.group(1), 'backward' if '/gradients' in name else 'forward'
    kind = 'combination' if name.split('/')[0] == _COMBINATION else 'update'
    return kind, kind


def _order(row_and_kind):
    row, kind = row_and_kind
    place = ('combination', 'update').index(row) + 1 if not row.startswith('tower') else 0
    return (place, len(row), row, kind == 'backward')
