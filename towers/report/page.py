"""The page of a report: what is drawn, packed as JSON, in one HTML file with style and script.

The JSON is drawn by `page.js`. Times are whole microseconds from the beginning of the step, sizes
bytes. Rows, parts, groups and types are named by their places in these lists:

    title, subtitle   texts
    verdict           a list of [what costs the time, what to change]
    facts             a list of sentences
    micros            length of the step
    parts             [key, title] of each part, in the order of `PARTS`
    rows              [name, 'device' or 'copies', number of lanes]
    groups, types     texts: 'tower 1, micro-batch 2'; 'MatMul'
    operations        a list for each of row, lane, begin, length, part, group and type, with an
                      entry an operation, by their names; keep and rest: the names
    passes            [row, part, group, begin, end] of each span of a tower's pass on a device
    shares            [device, [microseconds of each part]]
    layers            the layers of a stage that is too long, or null: title; rows: [name,
                      microseconds of the forward pass, of the backward pass, operations], with the
                      name '' for what is in no other row; note
    chain             table: [part, device, microseconds, operations, name of the longest], with
                      part -1 for the gaps between operations, in which the device ran something
                      else; a gap with the device '' is time in which the device of the next
                      operation ran nothing; spans: [row, begin, end]
    memory            pools: name, measured and predicted [time, bytes], peaks [measured, predicted]
                      with null for what is not known; note: a text
    transfers         devices; bytes: a row for each that sends; note
    texts             [title, text]
    variables         [name, role, device, shape, bytes, who writes]

A name is stored in two pieces: the number of letters that it has in common with the name before it
(keep), and its other letters (a line of `rest`). Of the 50,000 operations of a large step most
share long scopes.
"""

import collections
import heapq
import html
import json
import os
import re
import typing

from towers.errors import BadFileError
from towers.report.parts import OF_TOWERS, PARTS, Place
from towers.report.time_use import Span, union
from towers.report.trace import Trace, Traced

_HERE = os.path.dirname(os.path.abspath(__file__))
_MOST_LANES = 10  # of a device; what else runs at the same time is drawn on the last one
_LONGEST_WAIT = 0.02  # of the step: a longer wait is drawn as a gap in a pass
_LEAST_LENGTH = 0.02  # of the longest operation of a pass: shorter ones are not drawn in it
_DATA = re.compile(r'<script type="application/json">(.*?)</script>', re.DOTALL)


def written_page(reports: typing.Sequence[dict]) -> str:
    """The text of the page with one report, or with several beside each other.

    Args:
      reports: what is drawn, as `packed_trace` and `step_report` make it.
    """
    data = []
    for report in reports:
        # '</script>' in a text would end the data; JSON may say '<' in this way, too.
        text = json.dumps(report, separators=(',', ':')).replace('<', '\\u003c')
        data.append('<script type="application/json">%s</script>' % text)
    parts = {
        'title': html.escape(reports[0]['title']),
        'style': _file('page.css'),
        'reports': '\n'.join(data),
        'script': _file('page.js'),
    }
    # All in one pass, so that no text that was put in is taken for another place.
    return re.sub(r'\{(title|style|reports|script)\}', lambda found: parts[found.group(1)],
                  _file('page.html'))


def _file(name: str) -> str:
    """The text of a file beside this one."""
    with open(os.path.join(_HERE, name), encoding='utf-8') as opened:
        return opened.read()


def report_in(path: str) -> dict:
    """The (first) report of a page that was written before.

    Raises:
      BadFileError: the file cannot be read, or is no such page.
    """
    try:
        with open(path, encoding='utf-8') as opened:
            found = _DATA.search(opened.read())
        if found is not None:
            return json.loads(found.group(1))
    except (OSError, ValueError) as error:
        raise BadFileError('against=%.80r cannot be read: %s.' % (path, error)) from error
    raise BadFileError('against=%.80r has no report of a step in it: pass a page that '
                       'step_report has written.' % path)


# ---- the trace -----------------------------------------------------------------------------------

def packed_trace(trace: Trace) -> dict:
    """The entries of the page's data that come from the trace.

    Returns:
      A dict with `micros`, `parts`, `rows`, `groups`, `types`, `operations` and `passes`, as the
      module's docstring describes them.
    """
    operations_by_row = _by_row(trace)
    rows = []  # those of the page's data: name, kind, number of lanes
    with_lanes: typing.List[_WithLane] = []
    for row, operations in operations_by_row.items():
        lanes = _lanes(operations)
        kind = 'copies' if operations[0].type == 'copy' else 'device'
        rows.append([row, kind, max(lanes) + 1])
        with_lanes += map(_WithLane, operations, lanes)
    # By name, so that names with a long scope in common follow each other.
    with_lanes.sort(key=lambda packed: (packed.operation.name, packed.operation.begin))
    # '' is the group of operations in no tower, and the type of those of no known type.
    indices = _Indices(
        rows=_Numbered(operations_by_row), parts=_Numbered(PARTS), groups=_Numbered(['']),
        types=_Numbered(['']))
    has_micro_batches = any(operation.place.micro_batch for operation in trace.operations)
    packed_operations = _packed_operations(with_lanes, indices, has_micro_batches)
    packed_passes = _packed_passes(trace, indices, has_micro_batches)
    return {
        'micros': trace.micros, 'parts': list(PARTS.items()), 'rows': rows,
        'groups': indices.groups.values, 'types': indices.types.values,
        'operations': packed_operations, 'passes': packed_passes}


class _WithLane(typing.NamedTuple):
    """An operation, and the lane of its row in which it is drawn."""
    operation: Traced
    lane: int


class _Numbered:
    """A list of different values, which finds the index of a value quickly."""

    def __init__(self, values: typing.Iterable[str]):
        """Begins with these values."""
        self.values = list(values)
        self._indices = {value: index for index, value in enumerate(self.values)}

    def index(self, value: str) -> int:
        """The index of a value, which is added if it is new."""
        if value not in self._indices:
            self._indices[value] = len(self.values)
            self.values.append(value)
        return self._indices[value]


class _Indices(typing.NamedTuple):
    """The lists by whose indices the page's data name rows, parts, groups and types."""
    rows: _Numbered
    parts: _Numbered
    groups: _Numbered
    types: _Numbered


def _packed_operations(with_lanes: typing.Iterable[_WithLane], indices: _Indices,
                       has_micro_batches: bool) -> dict:
    """`operations` of the page's data: a list for each column, with an entry an operation.

    Args:
      with_lanes: the operations, sorted by name.
      indices: the lists that the columns refer to; groups and types are added.
      has_micro_batches: whether any tower has several micro-batches.
    """
    columns: typing.Dict[str, list] = collections.defaultdict(list)
    rest = []
    name_before = ''
    for operation, lane in with_lanes:
        name = operation.name.replace('\n', ' ')  # a line of `rest` is a name
        num_kept = len(os.path.commonprefix([name_before, name]))
        rest.append(name[num_kept:])
        name_before = name
        columns['keep'].append(num_kept)
        columns['row'].append(indices.rows.index(operation.row))
        columns['lane'].append(lane)
        columns['begin'].append(operation.begin)
        columns['length'].append(operation.micros)
        columns['part'].append(indices.parts.index(operation.place.part))
        columns['group'].append(indices.groups.index(_group(operation.place, has_micro_batches)))
        columns['type'].append(indices.types.index(operation.type))
    return dict(columns, rest='\n'.join(rest))


def _packed_passes(trace: Trace, indices: _Indices, has_micro_batches: bool) -> typing.List[list]:
    """`passes` of the page's data: `[row, part, group, begin, end]` of each span.

    Args:
      trace: the step.
      indices: the lists that rows, parts and groups are named by; groups are added.
      has_micro_batches: whether any tower has several micro-batches.
    """
    packed = []
    for (row, place), spans in sorted(_passes(trace).items()):
        row_index = indices.rows.index(row)
        part_index = indices.parts.index(place.part)
        group_index = indices.groups.index(_group(place, has_micro_batches))
        for begin, end in spans:
            packed.append([row_index, part_index, group_index, begin, end])
    return packed


def _by_row(trace: Trace) -> typing.Dict[str, typing.List[Traced]]:
    """The operations of each device, then the copies between each two, by their beginnings."""
    copies: typing.Dict[str, typing.List[Traced]] = {}
    for copy in trace.copies:
        copies.setdefault(copy.row, []).append(copy)
    rows = trace.by_row()
    rows.update(sorted(copies.items()))
    return rows


def _lanes(operations: typing.Sequence[Traced]) -> typing.List[int]:
    """A lane for each operation, so that operations in one lane never run at the same time; except
    in the last one of the `_MOST_LANES`, which has all operations for which there is no other.

    Args:
      operations: operations of one row, in the order of their beginnings.
    """
    lanes = []
    free: typing.List[int] = []  # a heap of the lanes in which nothing runs any more
    running: typing.List[typing.Tuple[int, int]] = []  # a heap of ends and their lanes
    num_lanes = 0
    for operation in operations:
        while running and running[0][0] <= operation.begin:
            _, ended_lane = heapq.heappop(running)
            heapq.heappush(free, ended_lane)
        if free:
            lane = heapq.heappop(free)
        else:
            lane = num_lanes
            num_lanes += 1
        heapq.heappush(running, (operation.end, lane))
        lanes.append(min(lane, _MOST_LANES - 1))
    return lanes


def _group(place: Place, has_micro_batches: bool) -> str:
    """`'tower 1'`, or with micro-batches `'tower 1, micro-batch 2'`; '' for a place in no tower."""
    if place.tower is None:
        return ''
    if has_micro_batches:
        return 'tower %d, micro-batch %d' % (place.tower, place.micro_batch)
    return 'tower %d' % place.tower


def _passes(trace: Trace) -> typing.Dict[typing.Tuple[str, Place], typing.List[Span]]:
    """The time of each pass of each tower on each device: {(row, place): its spans in order}.

    A pass that waits for more than 2 % of the step has a span before and one after the wait.
    Operations that take less than 2 % of the time of the pass's longest operation are left out:
    constants and the like run at the beginning of the step, long before the pass.
    """
    operations_of_passes: typing.Dict[typing.Tuple[str, Place], typing.List[Traced]] = {}
    for operation in trace.operations:
        is_in_pass = operation.place.part in OF_TOWERS  # forward or backward
        if is_in_pass:
            key = (operation.row, operation.place)
            operations_of_passes.setdefault(key, []).append(operation)
    longest_wait = _LONGEST_WAIT * trace.micros
    passes: typing.Dict[typing.Tuple[str, Place], typing.List[Span]] = {}
    for key, operations in operations_of_passes.items():
        least_micros = _LEAST_LENGTH * max(operation.micros for operation in operations)
        spans = union(operation.span for operation in operations
                      if operation.micros >= least_micros)
        passes[key] = _joined_over_waits(spans, longest_wait)
    return passes


def _joined_over_waits(spans: typing.List[Span], longest_wait: float) -> typing.List[Span]:
    """Joins spans between which there is a short wait.

    Args:
      spans: spans that are apart, in order; at least one.
      longest_wait: the longest wait, in microseconds, that is drawn as a part of the span.
    """
    joined = spans[:1]
    for begin, end in spans[1:]:
        begin_before, end_before = joined[-1]
        if begin - end_before > longest_wait:
            joined.append((begin, end))
        else:
            joined[-1] = (begin_before, end)
    return joined
