"""Where a step's time goes, from its own trace: input, towers, combination, update.

The trace is a `RunMetadata` of `RunOptions.FULL_TRACE`. Operations are told apart by the name
scopes that `build_towers` and `programs.tell_tower_0` give them: losses of the weights and their
gradient, which a tower makes for all, are of that tower. Operations run side by side, so that their
times add up to more than the step takes: what counts here is the time that a part covers, the
length of the union of the intervals in which at least one of its operations runs.
"""

import collections
import re

PARTS = ('input', 'towers', 'combination', 'update', 'other')

Split = collections.namedtuple('Split', 'step covered exposed not_overlapped')
Split.__doc__ = """Seconds of one step.

Fields:
  step: from the first operation's start to the last one's end.
  covered: dict from the names in `PARTS` to the time in which at least one operation of the part
    ran. Parts overlap: the sum may be more than `step`.
  exposed: dict likewise: the time of that in which no tower computed, which is what the part adds
    to the step.
  not_overlapped: the time in which something else ran and no tower computed.
"""

_TOWER = re.compile(r'(^|/)tower_\d+(/|$)')
_INPUT = re.compile(r'(^|/)(IteratorGetNext|OneShotIterator|Iterator|split(_\d+)?|split_batch|'
                    r'shards?)(_\d+)?(/|$)')
# Waiting for another device is no work. Newer versions write '_Recv', older ones 'RecvAsync' too.
_WAITS = re.compile(r'= *_?(Host)?(Recv|Send)\(|(^|/)_?(Host)?(Recv|Send)')


def part_of(name, update_scopes):
    """The part in `PARTS` that an operation belongs to.

    Args:
      name: the operation's, as in the trace: grappler's prefixes and suffixes are allowed.
      update_scopes: names of the scopes of the optimizer's update, such as ('Adam',).
    """
    parts = name.split('/')
    if _TOWER.search(name):
        return 'towers'
    if 'combine_gradients' in parts:
        return 'combination'
    if any(scope in parts for scope in update_scopes):
        return 'update'
    if _INPUT.search(name):
        return 'input'
    return 'other'


def split_trace(step_stats, update_scopes):
    """The `Split` of a step.

    Args:
      step_stats: `RunMetadata.step_stats`.
      update_scopes: as for `part_of`.

    Raises:
      ValueError: the trace is empty: it was not a FULL_TRACE.
    """
    intervals = collections.defaultdict(list)
    for device in step_stats.dev_stats:
        # '…/stream:all' repeats what a GPU's own rows hold.
        if 'stream:' in device.device and not device.device.endswith('stream:all'):
            continue
        for node in device.node_stats:
            if node.node_name in ('_SOURCE', '_SINK') or _WAITS.search(
                    node.timeline_label) or _WAITS.search(node.node_name):
                continue
            begin = node.all_start_micros
            intervals[part_of(node.node_name, update_scopes)].append(
                (begin, begin + node.all_end_rel_micros))
    if not intervals:
        raise ValueError('The trace holds no operations: run the step with '
                         'tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE).')
    every = [interval for part in intervals.values() for interval in part]
    towers = union(intervals['towers'])
    covered, exposed = {}, {}
    for part in PARTS:
        own = union(intervals[part])
        covered[part] = _length(own) / 1e6
        exposed[part] = covered[part] if part == 'towers' else (
            _length(union(own + towers)) - _length(towers)) / 1e6
    step = (max(end for _, end in every) - min(begin for begin, _ in every)) / 1e6
    return Split(step, covered, exposed, (_length(union(every)) - _length(towers)) / 1e6)


def union(intervals):
    """The intervals (begin, end) joined where they overlap or touch, by begin."""
    joined = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def _length(intervals):
    return sum(end - begin for begin, end in intervals)
