"""`step_report`: a traced step as one page that explains where its time and its memory go."""

import collections
import os
import typing

import tensorflow.compat.v1 as tf

from towers.api.built import BuiltTowers
from towers.arguments import check_count, check_instance, checked_path
from towers.cluster.machines import on_own_devices
from towers.errors import counted
from towers.inspect.audit import (
    Transfers,
    audit,
    operations_of_step,
    transfers_of,
    why_not_audited,
)
from towers.placement.devices import short_name
from towers.report.chain import GAP, Link, longest_chain, parts_of_chain
from towers.report.examples import examples_of_step
from towers.report.memory_curves import MemoryCurves, memory_curves
from towers.report.page import packed_trace, report_in, written_page
from towers.report.parts import COMBINATION, OTHER, PARTS, StepParts
from towers.report.stage_layers import layers_of_stage
from towers.report.time_use import TimeUse, time_use
from towers.report.trace import Trace, read_trace
from towers.report.variable_rows import variable_rows
from towers.report.verdict import LongStage, long_stage, verdict
from towers.safe_files import written_whole

_WIDTH_OF_PAGE = 2000  # points: a shorter piece of the step is not seen


class StepReport(typing.NamedTuple):
    """What a page says, in short.

    Attributes:
      path: the path of the page.
      verdict: list of sentences: what costs the step time, the worst first, with advice.
      milliseconds: length of the step.
      shares: dict from a device's short name to `{part: share of the step}`, as the page draws it;
        the rest of the step the device waits.
    """
    path: str
    verdict: typing.List[str]
    milliseconds: float
    shares: typing.Dict[str, typing.Dict[str, float]]

    def __str__(self):
        lines = ['report of a step of %.2f ms: %s' % (self.milliseconds, self.path)]
        lines += ['  ' + sentence for sentence in self.verdict]
        return '\n'.join(lines)


def step_report(built: BuiltTowers, run_metadata: tf.RunMetadata, path: str,
                against: typing.Optional[str] = None, *,
                batch_size: typing.Optional[int] = None,
                title: typing.Optional[str] = None) -> StepReport:
    """Writes a traced step as a page: one HTML file, which needs no network and no server.

    The page has a timeline with a row a device, and one for the copies between each two; where the
    time goes, by device and part; the longest chain of operations; memory, measured and predicted;
    the bytes between devices; plan, proof, audit and variables; and above all a verdict.

    >>> metadata = tf.RunMetadata()
    >>> session.run(built.train_op, run_metadata=metadata, options=tf.RunOptions(
    ...     trace_level=tf.RunOptions.FULL_TRACE, output_partition_graphs=True))
    >>> print(towers.step_report(built, metadata, 'step.html'))

    The part of the step that an operation belongs to follows from what the build knows of its
    towers, and from what depends on the operation; see `StepParts`. An operation of no such part
    belongs to the part `'other'`. The first steps of a session are slower than the rest: trace a
    later one.

    Args:
      built: the result of `build_towers`.
      run_metadata: the metadata of one step of it, run as above. Without `output_partition_graphs`
        the copies between devices are not known, nor the parts of operations that TensorFlow adds.
      path: name of the file to be written.
      against: name of a page that was written before: both are drawn beside each other, in the same
        scale of time; None for only this one.
      batch_size: examples of the step, for the prediction of its memory; None for the size that the
        towers were built with.
      title: the title of the page; None for one that names devices and batch.

    Returns:
      `StepReport`; `print` it for the verdict.

    Raises:
      InvalidArgumentError: an argument of another kind; the metadata has no operations.
      BadFileError: `against` is no such page.
      LogFileError: the page cannot be written.
    """
    check_instance('built', built, BuiltTowers, 'the result of build_towers')
    check_instance('run_metadata', run_metadata, tf.RunMetadata, 'a tf.RunMetadata')
    path = checked_path('path', path, 'the name of a file')
    if batch_size is not None:
        check_count('batch_size', batch_size)
    reports_beside = []
    if against is not None:
        against = checked_path('against', against, 'the name of a file, or None')
        reports_beside.append(report_in(against))
    run_metadata = on_own_devices(built, run_metadata)
    parts = StepParts(built)
    trace = read_trace(run_metadata, parts)
    use = time_use(trace)
    chain = longest_chain(trace, parts)
    findings = verdict(built, use, chain)
    examples = examples_of_step(built, run_metadata)
    data = packed_trace(trace)
    data.update(
        title=title or _title(built, examples), subtitle=_subtitle(built, trace, examples),
        verdict=[[finding.text, finding.advice] for finding in findings], facts=_facts(trace, use),
        shares=_shares(use), layers=_layers(built, trace, use, parts),
        chain=_chain(chain, data['rows'], trace.micros),
        memory=_memory(memory_curves(built, run_metadata, trace, batch_size)),
        transfers=_transfers(transfers_of(operations_of_step(built))),
        texts=_texts(built, run_metadata),
        variables=[list(row) for row in variable_rows(built, parts)])
    with written_whole(path, encoding='utf-8') as opened:
        opened.write(written_page([data] + reports_beside))
    return StepReport(path, verdict=[str(finding) for finding in findings],
                      milliseconds=trace.micros / 1e3, shares=_shares_of_step(use))


def _shares_of_step(use: TimeUse) -> typing.Dict[str, typing.Dict[str, float]]:
    """{device: {part: share of the step}}: the shares of the time use, over the step's length."""
    shares = {}
    for device, micros_of_parts in use.shares.items():
        shares[device] = {part: micros / use.micros for part, micros in micros_of_parts.items()}
    return shares


def _title(built: BuiltTowers, examples: typing.Optional[int]) -> str:
    """The title of a page: `'2 towers on /cpu:0, /cpu:1, batch 64'`.

    Args:
      built: the result of `build_towers`.
      examples: the number of examples of the step; None where it is not known.
    """
    towers = counted(len(built.devices), 'tower')
    devices = ', '.join(map(short_name, built.devices))
    if examples is None:
        return '%s on %s, a batch of any size' % (towers, devices)
    return '%s on %s, batch %d' % (towers, devices, examples)


def _subtitle(built: BuiltTowers, trace: Trace, examples: typing.Optional[int]) -> str:
    """The sentences below the title: the length of the step, its examples a second, and what it was
    run with.

    Args:
      built: the result of `build_towers`.
      trace: the step.
      examples: the number of examples of the step; None where it is not known.
    """
    text = 'A step of %.2f ms' % (trace.micros / 1e3)
    if examples is not None:
        of_whom = '' if built.machines is None else ' of this worker'
        text += ' for %s%s: %s a second' % (
            counted(examples, 'example'), of_whom, _three_digits(1e6 * examples / trace.micros))
    return ('%s. Traced with TensorFlow %s on %s; tracing itself takes some microseconds an '
            'operation.' % (text, tf.version.VERSION, counted(_num_processors(), 'processor')))


def _three_digits(number: float) -> str:
    """A number with at least three digits: `'12,345'`, `'11.4'`, `'0.123'`."""
    if number >= 100:
        return '{:,.0f}'.format(number)
    return '%.3g' % number


def _num_processors() -> int:
    """The number of processors that this process may use: so many threads TensorFlow has by
    default."""
    if hasattr(os, 'sched_getaffinity'):  # Linux alone has it
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # None where Python cannot tell


# ---- pieces of the page --------------------------------------------------------------------------

def _shares(use: TimeUse) -> list:
    """`shares` of the page's data: `[device, microseconds of each part]` for each device."""
    rows = []
    for device, micros_of_parts in use.shares.items():
        rows.append([device, [round(micros_of_parts.get(part, 0)) for part in PARTS]])
    return rows


def _facts(trace: Trace, use: TimeUse) -> typing.List[str]:
    """The sentences below the table of shares: what it does not show, and how to read it."""
    facts = []
    worth_saying = .01 * trace.micros
    if use.hidden is not None and _micros_of_part(trace, COMBINATION) > worth_saying:
        facts.append('%.0f %% of the combination of gradients ran while a tower was still at its '
                     'backward pass.' % (100 * use.hidden))
    if _micros_of_part(trace, OTHER) > worth_saying:
        others = trace.of_part(OTHER)
        longest = max(others, key=lambda operation: operation.micros)
        facts.append('%d operations belong to no part that the build names. The longest, %s, takes '
                     '%.2f ms.' % (len(others), longest.name, longest.micros / 1e3))
    if not trace.copies:
        facts.append('The trace has no copies between devices: CPUs of one process hand tensors '
                     'over without any, and some versions of TensorFlow do not trace them.')
    facts.append('At most %s ran at the same time, on all devices together; this process may use '
                 '%s.' % (counted(use.most_at_once, 'operation'),
                          counted(_num_processors(), 'processor')))
    facts.append('Where operations of several parts run on a device at the same time, each part '
                 'gets the same share of that time. CPUs of one process share its processors: two '
                 'that compute at the same time may each take longer.')
    return facts


def _layers(built: BuiltTowers, trace: Trace, use: TimeUse,
            parts: StepParts) -> typing.Optional[dict]:
    """`layers` of the page's data: the layers of a stage that is too long; None if none is."""
    longest = long_stage(built, use)
    if longest is None:
        return None
    layers = layers_of_stage(trace, parts, built.towers, longest.tower, longest.device)
    title = 'The layers of stage %d of tower %d, on %s' % (
        longest.stage, longest.tower, longest.device)
    rows = [list(layer) for layer in layers]
    return {'title': title, 'rows': rows, 'note': _note_of_layers(longest)}


def _note_of_layers(longest: LongStage) -> str:
    """The text above the table of a stage's layers: which of them can be moved, and how much."""
    last_stage = len(longest.devices) - 1
    moves = []
    if longest.stage > 0:
        moves.append('the first ones to stage %d' % (longest.stage - 1))
    if longest.stage < last_stage:
        moves.append('the last ones to stage %d' % (longest.stage + 1))
    return ('The stage computes %.2f ms longer than the mean of its tower. The layers are in the '
            'order of the forward pass: move %s. Times are sums over micro-batches.' % (
                longest.excess / 1e3, ', or '.join(moves)))


def _micros_of_part(trace: Trace, part: str) -> int:
    """The sum of the microseconds of the operations of one of the `PARTS`."""
    return sum(operation.micros for operation in trace.of_part(part))


def _chain(links: typing.Sequence[Link], rows: typing.Sequence[list], micros: int) -> dict:
    """`chain` of the page's data: a table of its parts, and its spans `[row, begin, end]`.

    Args:
      links: the chain.
      rows: the rows of the page.
      micros: the length of the step.
    """
    keys = list(PARTS)
    table = []
    for chain_part in parts_of_chain(links):
        part = -1
        if chain_part.part != GAP:
            part = keys.index(chain_part.part)
        table.append([part, chain_part.device, chain_part.micros, chain_part.num_entries,
                      chain_part.longest])
    return {'table': table,
            'spans': _spans_of_chain(links, rows, closest=micros // _WIDTH_OF_PAGE)}


def _spans_of_chain(links: typing.Sequence[Link], rows: typing.Sequence[list],
                    closest: int) -> typing.List[list]:
    """The spans of the chain, `[row, begin, end]` each.

    Args:
      links: the chain.
      rows: the rows of the page.
      closest: operations of one row that are at most so many microseconds apart give one span: on
        the page they would not be seen apart.
    """
    row_indices = {name: index for index, (name, _, _) in enumerate(rows)}
    spans: typing.List[list] = []
    row_before = None
    end_before = 0
    for link in links:
        row = row_indices[link.operation.row]
        begin, end = link.operation.span
        if row == row_before and begin - end_before <= closest:
            spans[-1][2] = end
        else:
            spans.append([row, begin, end])
        row_before = row
        end_before = end
    return spans


def _memory(curves: MemoryCurves) -> dict:
    """`memory` of the page's data: the curves of each pool of memory, and a note."""
    pools = []
    for pool in curves.pools:
        pools.append({'name': pool.name, 'measured': pool.measured, 'predicted': pool.predicted,
                      'peaks': [pool.measured_peak, pool.predicted_peak]})
    return {'pools': pools, 'note': curves.note}


def _transfers(transfers: typing.Sequence[Transfers]) -> dict:
    """`transfers` of the page's data: a matrix of the bytes between devices, and a note."""
    names: typing.Set[str] = set()
    sent: typing.Counter[typing.Tuple[str, str]] = collections.Counter()
    unknown = 0
    for pair in transfers:
        names |= {pair.source, pair.target}
        sent[pair.source, pair.target] += pair.bytes
        unknown += pair.unknown
    devices = sorted(names)
    matrix = []
    for source in devices:
        matrix.append([sent[source, target] for target in devices])
    note = 'From the graph, rows send to columns.'
    if unknown:
        note += ' %d tensors of unknown size are not counted.' % unknown
    return {'devices': list(map(short_name, devices)), 'bytes': matrix, 'note': note}


def _texts(built: BuiltTowers, run_metadata: tf.RunMetadata) -> list:
    """`texts` of the page's data, `[title, text]` each: the plan, the proof and the audit."""
    proof = built.plan.line('one device') or 'the plan says nothing'
    return [['Plan', str(built.plan)], ['Equality with one device', proof],
            ['Audit', _audit_text(built, run_metadata)]]


def _audit_text(built: BuiltTowers, run_metadata: tf.RunMetadata) -> str:
    """The audit of the build and of the step, or why there is none."""
    why_not = why_not_audited(built)
    if why_not is not None:
        return 'none: ' + why_not
    # With the graphs that the runtime ran, the audit also checks where it has put operations.
    has_graphs = bool(run_metadata.partition_graphs)
    return str(audit(built, run_metadata if has_graphs else None))
