"""The longest chain of a traced step: what each operation waited for last, from the end back."""

import bisect
import collections
import typing

from towers.report.parts import StepParts, operations_waited_for
from towers.report.time_use import union
from towers.report.trace import Trace, Traced

_MOST_LINKS = 100000  # a loop's operations run many times


class Link(typing.NamedTuple):
    """An operation of the chain.

    Attributes:
      operation: what ran.
      gap: microseconds between the end of the link before, or the beginning of the step, and its
        own beginning.
      idle: those of them in which nothing ran on its device: a copy from another device, or a wait
        for a free thread. In the others its device ran something else.
    """
    operation: Traced
    gap: int
    idle: int


def longest_chain(trace: Trace, parts: StepParts) -> typing.List[Link]:
    """The chain of operations that the end of a step waited for, first one first.

    It begins with the operation that ended last, and goes from each to that one of the operations
    which it waits for, by data or by control, that ended last before it began. An operation that is
    not in the trace (folded, or joined with another one) stands for those that it waits for.

    Args:
      trace: the step.
      parts: the operations of the step.

    Returns:
      list of `Link`.
    """
    runs = _Runs(trace)
    current = max(trace.operations, key=lambda each: each.end)
    chain = [current]
    seen = {current}
    while len(chain) < _MOST_LINKS:
        before = [runs.last_before(name, current.begin)
                  for name in _names_before(current.name, parts, runs)]
        known = [each for each in before if each is not None and each not in seen]
        if not known:
            break
        current = max(known, key=lambda each: each.end)
        seen.add(current)
        chain.append(current)
    busy = {row: _Spans(operations) for row, operations in trace.by_row().items()}
    links = []
    end = 0
    for operation in reversed(chain):
        gap = max(0, operation.begin - end)
        busy_in_gap = busy[operation.row].between(operation.begin - gap, operation.begin)
        links.append(Link(operation, gap, gap - busy_in_gap))
        end = operation.end
    return links


class _Spans:
    """When anything ran on a device."""

    def __init__(self, operations: typing.Iterable[Traced]):
        self._spans = union((each.begin, each.end) for each in operations)
        self._ends = [end for _, end in self._spans]

    def between(self, begin: int, end: int) -> int:
        """Microseconds between two times in which something ran."""
        micros = 0
        for span in self._spans[bisect.bisect_right(self._ends, begin):]:
            if span[0] >= end:
                break
            micros += min(span[1], end) - max(span[0], begin)
        return micros


class _Runs:
    """When each operation ran; in a loop it ran several times."""

    def __init__(self, trace: Trace):
        self._of: typing.Dict[str, typing.List[Traced]] = collections.defaultdict(list)
        for each in sorted(trace.operations, key=lambda each: each.end):
            self._of[each.name].append(each)
        self._ends = {name: [each.end for each in runs] for name, runs in self._of.items()}

    def __contains__(self, name: str):
        return name in self._of

    def last_before(self, name: str, time: int) -> typing.Optional[Traced]:
        """The last run of an operation that had ended by a time; None if there is none."""
        place = bisect.bisect_right(self._ends[name], time)
        return self._of[name][place - 1] if place else None


def _names_before(name: str, parts: StepParts, runs: _Runs) -> typing.List[str]:
    """Names of the traced operations that an operation waits for, by way of others or not."""
    operation = parts.operation(name)
    stack = [] if operation is None else operations_waited_for(operation)
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
            stack.extend(operations_waited_for(op))
    return found


class ChainPart(typing.NamedTuple):
    """What operations of one part on one device take of the longest chain.

    Attributes:
      part: one of the `PARTS`; '' for the time between the chain's operations.
      device: where they ran; of the time between the device that ran something else, or '' for the
        time in which the operation's device ran nothing.
      micros: their microseconds.
      number: how many operations, or gaps.
      longest: the name of the longest one; of the gaps, the one before which it was.
    """
    part: str
    device: str
    micros: int
    number: int
    longest: str


def parts_of_chain(chain: typing.Sequence[Link]) -> typing.List[ChainPart]:
    """The chain by part and device, the longest first."""
    pieces = collections.defaultdict(list)
    for link in chain:
        operation = link.operation
        key = (operation.place.part, operation.row)
        pieces[key].append((operation.micros, operation.name))
        name_before = 'before ' + operation.name
        if link.idle:
            pieces['', ''].append((link.idle, name_before))
        if link.gap > link.idle:
            pieces['', operation.row].append((link.gap - link.idle, name_before))
    found = []
    for (part, device), some in pieces.items():
        micros = sum(each for each, _ in some)
        found.append(ChainPart(part, device, micros, len(some), max(some)[1]))
    return sorted(found, key=lambda each: -each.micros)
