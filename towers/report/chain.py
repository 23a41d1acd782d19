"""The longest chain of a traced step: what each operation waited for last, from the end back."""

import bisect
import collections
import typing

from towers.graph.graph_walk import inputs_of
from towers.report.parts import StepParts
from towers.report.time_use import union
from towers.report.trace import Trace, Traced

_MOST_LINKS = 100000  # a loop could make the chain longer without end


class Link(typing.NamedTuple):
    """An operation of the chain.

    Attributes:
      operation: the traced operation.
      gap: the microseconds from the end of the link before, or the beginning of the step, to the
        beginning of this one.
      idle: the microseconds of the gap in which nothing ran on the operation's device: it waited
        for a copy from another device, or for a free thread. In the rest of the gap its device ran
        something else.
    """
    operation: Traced
    gap: int
    idle: int


def longest_chain(trace: Trace, parts: StepParts) -> typing.List[Link]:
    """The chain of operations that the end of a step waited for, first one first.

    The chain is found from its end. Its last link is the operation that ended last. The link before
    a link is one of the operations that the link waits for, by data or by control: the one that
    ended last before the link began. An operation that is not in the trace (folded, or joined with
    another one) stands for those that it waits for. Of a chain with more than `_MOST_LINKS` links
    only the last ones are found.

    Args:
      trace: the step.
      parts: the operations of the step.

    Returns:
      list of `Link`.
    """
    chain = _from_the_end(trace, parts)
    chain.reverse()
    busy = {row: _Spans(operations) for row, operations in trace.by_row().items()}
    links = []
    end_before = 0
    for operation in chain:
        gap = operation.begin - end_before
        busy_in_gap = busy[operation.row].between(end_before, operation.begin)
        links.append(Link(operation, gap, idle=gap - busy_in_gap))
        end_before = operation.end
    return links


def _from_the_end(trace: Trace, parts: StepParts) -> typing.List[Traced]:
    """The operations of the longest chain, the last one first; see `longest_chain`."""
    runs = _Runs(trace)
    current = max(trace.operations, key=lambda operation: operation.end)
    chain = [current]
    seen = {current}
    while len(chain) < _MOST_LINKS:
        candidates = []
        for name in _names_before(current.name, parts, runs):
            run = runs.last_before(name, current.begin)
            # Two operations of a loop that took 0 microseconds, at the same time, each come before
            # the other: without `seen` the chain would go round between them.
            if run is not None and run not in seen:
                candidates.append(run)
        if not candidates:
            break
        current = max(candidates, key=lambda operation: operation.end)
        seen.add(current)
        chain.append(current)
    return chain


class _Spans:
    """The spans of time in which anything ran on a device."""

    def __init__(self, operations: typing.Iterable[Traced]):
        """Joins the times of the device's operations."""
        self._spans = union(operation.span for operation in operations)
        self._ends = [end for _, end in self._spans]

    def between(self, begin: int, end: int) -> int:
        """The microseconds from `begin` to `end` in which something ran."""
        micros = 0
        first = bisect.bisect_right(self._ends, begin)  # the spans before it have ended
        for span_begin, span_end in self._spans[first:]:
            if span_begin >= end:
                break
            micros += min(span_end, end) - max(span_begin, begin)
        return micros


class _Runs:
    """The runs of each operation of a traced step: one, or in a loop several."""

    def __init__(self, trace: Trace):
        """Sorts the runs of each operation by their ends."""
        self._runs: typing.Dict[str, typing.List[Traced]] = collections.defaultdict(list)
        for run in sorted(trace.operations, key=lambda operation: operation.end):
            self._runs[run.name].append(run)
        self._ends = {name: [run.end for run in runs] for name, runs in self._runs.items()}

    def __contains__(self, name: str) -> bool:
        """Whether the trace has an operation of this name."""
        return name in self._runs

    def last_before(self, name: str, time: int) -> typing.Optional[Traced]:
        """The last run of an operation that ended at or before `time`; None if there is none."""
        num_ended = bisect.bisect_right(self._ends[name], time)
        if num_ended == 0:
            return None
        return self._runs[name][num_ended - 1]


def _names_before(name: str, parts: StepParts, runs: _Runs) -> typing.List[str]:
    """The names of the traced operations that an operation waits for, directly or by way of
    operations that are not in the trace."""
    operation = parts.operation(name)  # None if the runtime has added it
    stack = [] if operation is None else inputs_of(operation)
    seen = set()
    found = []
    while stack:
        op = stack.pop()
        if op.name in seen:
            continue
        seen.add(op.name)
        if op.name in runs:
            found.append(op.name)
        else:
            stack.extend(inputs_of(op))
    return found


GAP = ''  # the part of the gaps between the operations of a chain


class ChainPart(typing.NamedTuple):
    """The operations of the longest chain that belong to one part and ran on one device; or gaps
    between its operations.

    Attributes:
      part: one of the `PARTS`; `GAP` for the gaps.
      device: the short name of the device. For gaps, the device that ran something else during
        them; '' for the time in which the next operation's device ran nothing.
      micros: the sum of their microseconds.
      num_entries: the number of operations, or of gaps.
      longest: the name of the longest operation; for the gaps `'before '` and the name of the
        operation before which the longest gap was.
    """
    part: str
    device: str
    micros: int
    num_entries: int
    longest: str


def parts_of_chain(chain: typing.Sequence[Link]) -> typing.List[ChainPart]:
    """The chain by part and device, and its gaps, the longest first."""
    groups = collections.defaultdict(list)  # {(part, device): [(microseconds, name)]}
    for link in chain:
        operation = link.operation
        part = operation.place.part
        device = operation.row
        groups[part, device].append((operation.micros, operation.name))
        # The gap before it: the time in which its device ran nothing, and the rest.
        name_of_gap = 'before ' + operation.name
        if link.idle > 0:
            groups[GAP, ''].append((link.idle, name_of_gap))
        busy_in_gap = link.gap - link.idle
        if busy_in_gap > 0:
            groups[GAP, device].append((busy_in_gap, name_of_gap))
    chain_parts = []
    for (part, device), entries in groups.items():
        micros = sum(entry_micros for entry_micros, _ in entries)
        _, longest = max(entries)
        chain_parts.append(ChainPart(part, device, micros, len(entries), longest))
    return sorted(chain_parts, key=lambda chain_part: -chain_part.micros)
