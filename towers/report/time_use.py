"""Where the time of a traced step goes, by device and by part, and what runs at the same time."""

import collections
import typing

from towers.report.parts import BACKWARD, COMBINATION, OF_TOWERS
from towers.report.trace import Trace, Traced

Span = typing.Tuple[int, int]
"""A beginning and an end, in microseconds."""


class TimeUse(typing.NamedTuple):
    """The time of a traced step, by device, by part and by tower.

    Attributes:
      micros: the length of the step, in microseconds.
      shares: dict from a device to `{part: microseconds}`. Where operations of several parts run at
        the same time, each of these parts gets the same share of it, so that a device's parts add
        up to the time in which anything ran there.
      exposed: dict from a part to the microseconds in which it ran and no tower computed: the most
        that the step would save without it. Parts that ran at the same time share that time.
      nothing: microseconds in which no operation ran on any device.
      computing: dict from a device to the microseconds in which towers computed on it.
      tower_micros: dict from a tower's index to the microseconds in which it computed on any
        device.
      longest: dict from a device to `{part: its longest operation}`.
      hidden: share of the combination's time that ran before the last operation of a backward pass
        had ended; None without a combination, or without a backward pass.
      most_at_once: the largest number of operations that ran at the same time, on all devices.
    """
    micros: int
    shares: typing.Dict[str, typing.Dict[str, float]]
    exposed: typing.Dict[str, float]
    nothing: float
    computing: typing.Dict[str, int]
    tower_micros: typing.Dict[int, int]
    longest: typing.Dict[str, typing.Dict[str, Traced]]
    hidden: typing.Optional[float]
    most_at_once: int

    def busy(self, device: str) -> float:
        """Microseconds in which anything ran on a device."""
        return sum(self.shares[device].values())


def time_use(trace: Trace) -> TimeUse:
    """Measures where the time of a traced step goes.

    With P(d, t) the parts that run on device d at time t, part p has on d

        share(d, p) = integral over t of [p in P(d, t)] / |P(d, t)|

    and with P(t) the parts that run anywhere, of which none is of a tower,

        exposed(p) = integral over t of [p in P(t)] / |P(t)|.

    Args:
      trace: the step.

    Returns:
      `TimeUse`.
    """
    shares = {}
    computing = {}
    longest = {}
    for device, operations in trace.by_row().items():
        shares[device] = _shares(operations)
        computing[device] = length(union(_spans_of_towers(operations)))
        longest[device] = _longest(operations)
    ran = union(operation.span for operation in trace.operations)
    return TimeUse(
        micros=trace.micros, shares=shares, exposed=_exposed(trace),
        nothing=trace.micros - length(ran), computing=computing,
        tower_micros=_tower_micros(trace), longest=longest, hidden=_hidden(trace),
        most_at_once=_most_at_once(trace))


def union(spans: typing.Iterable[Span]) -> typing.List[Span]:
    """Joins spans that overlap or touch; returns spans that are apart, in order."""
    joined: typing.List[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def length(spans: typing.Iterable[Span]) -> int:
    """The sum of the lengths of spans that are apart."""
    return sum(end - begin for begin, end in spans)


def _spans_of_towers(
        operations: typing.Iterable[Traced]) -> typing.List[Span]:
    """The spans of those operations that belong to forward and backward passes."""
    return [operation.span for operation in operations if operation.place.part in OF_TOWERS]


def _tower_micros(trace: Trace) -> typing.Dict[int, int]:
    """The microseconds in which each tower computed on any device, by its index."""
    spans_of_towers = collections.defaultdict(list)
    for operation in trace.operations:
        place = operation.place
        if place.part in OF_TOWERS and place.tower is not None:
            spans_of_towers[place.tower].append(operation.span)
    return {tower: length(union(spans)) for tower, spans in spans_of_towers.items()}


def _longest(operations: typing.Iterable[Traced]) -> typing.Dict[str, Traced]:
    """The longest operation of each part."""
    longest: typing.Dict[str, Traced] = {}
    for operation in operations:
        part = operation.place.part
        if part not in longest or operation.micros > longest[part].micros:
            longest[part] = operation
    return longest


def _shares(operations: typing.Iterable[Traced]) -> typing.Dict[str, float]:
    """{part: its microseconds}; parts that run at the same time get equal shares of that time."""
    shares: typing.Dict[str, float] = collections.defaultdict(float)
    for begin, end, running in _moments(operations):
        for part in running:
            shares[part] += (end - begin) / float(len(running))
    return dict(shares)


def _exposed(trace: Trace) -> typing.Dict[str, float]:
    """{part: the microseconds in which it ran on any device, and no tower computed}."""
    exposed: typing.Dict[str, float] = collections.defaultdict(float)
    for begin, end, running in _moments(trace.operations):
        towers_compute = not set(OF_TOWERS).isdisjoint(running)
        if towers_compute:
            continue
        for part in running:
            exposed[part] += (end - begin) / float(len(running))
    return dict(exposed)


def _moments(operations: typing.Iterable[Traced]
             ) -> typing.Iterator[typing.Tuple[int, int, typing.Tuple[str, ...]]]:
    """Yields `(begin, end, parts)`: spans in which the same parts run, and at least one does.

    Args:
      operations: operations of one device, or of all, in any order.
    """
    changes = []  # (time, by how many more operations of a part run from then on, the part)
    for operation in operations:
        changes.append((operation.begin, 1, operation.place.part))
        changes.append((operation.end, -1, operation.place.part))
    # Of changes at the same time, -1 is sorted before 1. For an operation that took 0 microseconds
    # the number falls first and then rises again, with no time in between: no span tells of it.
    changes.sort()
    running: typing.Dict[str, int] = {}  # {part: how many operations of it run}
    time_before = 0
    for time, change, part in changes:
        if running and time > time_before:
            yield time_before, time, tuple(running)
        time_before = time
        running[part] = running.get(part, 0) + change
        if running[part] == 0:
            del running[part]


def _most_at_once(trace: Trace) -> int:
    """The largest number of operations that ran at the same time, on all devices."""
    changes = []
    for operation in trace.operations:
        changes.append((operation.begin, 1))
        changes.append((operation.end, -1))
    running = 0
    most = 0
    for _, change in sorted(changes):  # at the same time, ends come before beginnings
        running += change
        most = max(most, running)
    return most


def _hidden(trace: Trace) -> typing.Optional[float]:
    """The share of the combination's time that ran before the last backward pass had ended; None
    without a combination, or without a backward pass."""
    combination = trace.of_part(COMBINATION)
    total = sum(operation.micros for operation in combination)
    end_of_backward = max([operation.end for operation in trace.of_part(BACKWARD)], default=0)
    if not total or not end_of_backward:
        return None
    hidden = 0
    for operation in combination:
        hidden += max(0, min(operation.end, end_of_backward) - operation.begin)
    return float(hidden) / total
