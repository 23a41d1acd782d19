"""The memory of a traced step over its time, beside the memory that its graph predicts.

Words of `memory/` that are used here: a `Run` simulates a step, as a sequence of numbered events at
which memory is taken or given back; a `Buffer` is one piece of memory, from the event `since` to
the event `until`; an account is the predicted memory of a step by its use.
"""

import collections
import typing

import tensorflow.compat.v1 as tf

from towers.api.built import BuiltTowers
from towers.errors import InvalidArgumentError
from towers.memory.account import account_of_run
from towers.memory.buffers import Buffer
from towers.memory.measure import peaks_of, uses_of
from towers.memory.simulation import Run
from towers.memory.tower_step import shard_sizes, step_of
from towers.placement.devices import has_gpus, short_name
from towers.report.trace import Trace

_MOST_POINTS = 400  # of a curve

Point = typing.Tuple[int, int]
"""Microseconds from the beginning of the step, and the bytes in use from then on."""


class Pool(typing.NamedTuple):
    """The memory of one GPU, or the memory that all CPUs of a process share.

    Attributes:
      name: the device's short name, or 'CPUs'.
      measured, predicted: the curves, lists of `Point`s; empty where they are not known.
      measured_peak, predicted_peak: bytes; None where they are not known.
    """
    name: str
    measured: typing.List[Point]
    predicted: typing.List[Point]
    measured_peak: typing.Optional[int]
    predicted_peak: typing.Optional[int]


class MemoryCurves(typing.NamedTuple):
    """The memory of a step.

    Attributes:
      pools: list of `Pool`.
      note: a text that says what is not known, and why.
    """
    pools: typing.List[Pool]
    note: str


def memory_curves(built: BuiltTowers, metadata: tf.RunMetadata, trace: Trace,
                  batch_size: typing.Optional[int] = None) -> MemoryCurves:
    """The memory of a traced step, measured and predicted.

    The measured curve has the bytes in use at the end of each operation, as the allocators report
    them. The predicted curve simulates the step. A simulation has no times, and its operations run
    in another order than those of the step. So the memory after the first operation that takes
    some is drawn at the time at which the first such operation of the trace began, the memory after
    the second one at the time of the second, and so on.

    Args:
      built: the result of `build_towers`.
      metadata: the `tf.RunMetadata` of the step.
      trace: the trace that was read from it.
      batch_size: examples of the step; None for the size that the towers were built with.
    """
    notes = []
    measured = _measured(metadata, trace)
    if not measured:
        notes.append("not measured: TensorFlow's allocator on CPUs counts only with "
                     'TF_CPU_ALLOCATOR_USE_BFC=true in the environment')
    predicted = {}
    try:
        predicted = _predicted(built, trace, batch_size)
    except InvalidArgumentError as error:
        notes.append('not predicted: %s' % error)
    measured_peaks = {device: peak.bytes for device, peak in peaks_of(metadata).items()}
    if measured:
        notes.append('solid: measured')
    if predicted:
        of_gpus = "cuDNN's workspace, and " if has_gpus(built.devices) else ''
        notes.append('dashed: predicted from the graph, without %swhat the allocator keeps for '
                     'later' % of_gpus)
    pools = _pools(measured, measured_peaks, predicted)
    return MemoryCurves(pools, '; '.join(notes) + '.')


def _pools(measured: typing.Mapping[str, typing.List[Point]],
           measured_peaks: typing.Mapping[str, int],
           predicted: typing.Mapping[str, '_Prediction']) -> typing.List[Pool]:
    """A `Pool` for each memory that was measured or predicted.

    Args:
      measured: {device, or '' for all CPUs: the measured curve}.
      measured_peaks: {device, or '' for all CPUs: bytes}.
      predicted: {device, or '' for all CPUs: the prediction}.
    """
    pools = []
    for device in sorted(measured.keys() | predicted.keys()):
        prediction = predicted.get(device, _NOT_PREDICTED)
        pools.append(Pool(
            name=short_name(device) or 'CPUs',
            measured=_thinned(measured.get(device, [])), predicted=_thinned(prediction.curve),
            measured_peak=measured_peaks.get(device), predicted_peak=prediction.peak))
    return pools


def _measured(metadata: tf.RunMetadata, trace: Trace) -> typing.Dict[str, typing.List[Point]]:
    """{device, or '' for all CPUs: bytes in use at the end of each operation}."""
    curves: typing.Dict[str, typing.List[Point]] = collections.defaultdict(list)
    for use in uses_of(metadata):
        micros = max(0, use.end - trace.start)
        curves[use.device].append((min(micros, trace.micros), use.bytes))
    return {device: sorted(points) for device, points in curves.items()}


class _Prediction(typing.NamedTuple):
    """The predicted memory of one pool."""
    curve: typing.List[Point]
    peak: typing.Optional[int]  # in bytes; None where it is not known


_NOT_PREDICTED = _Prediction(curve=[], peak=None)


def _predicted(built: BuiltTowers, trace: Trace,
               batch_size: typing.Optional[int]) -> typing.Dict[str, _Prediction]:
    """Predicts the memory of a step: {device, or '' for all CPUs: the prediction}.

    Args:
      built: the result of `build_towers`.
      trace: the traced step, at whose times the points of the curves are.
      batch_size: examples of the step; None for the size that the towers were built with.

    Raises:
      InvalidArgumentError: a size that the towers do not divide.
    """
    if batch_size is not None:
        shard_sizes(built, batch_size)  # raises where it does not divide
    step = step_of(built, batch_size)
    run = Run(step)
    account = account_of_run(built, step, run, batch_size)
    begins = _begins_of(trace)
    predicted = {}
    for pool in account.pools():
        device = pool.device or None  # the simulation has None for '', all CPUs together
        simulated_peak = 0
        if device in run.peaks:
            simulated_peak = run.peaks[device].bytes
        # The account has more than the simulation: constants, and what the allocator itself needs.
        always_held = pool.peak - simulated_peak
        curve = []
        for time, in_use in _simulated(run, device, begins):
            curve.append((time, in_use + always_held))
        predicted[pool.device] = _Prediction(curve, pool.peak)
    return predicted


def _begins_of(trace: Trace) -> typing.Dict[str, int]:
    """{name of an operation: the time at which it began first}."""
    begins: typing.Dict[str, int] = {}
    for operation in trace.operations:
        begins.setdefault(operation.name, operation.begin)
    return begins


def _simulated(run: Run, device: typing.Optional[str], begins: typing.Dict[str, int]
               ) -> typing.Iterator[Point]:
    """Yields the `Point`s of a simulated step, at times of the traced one.

    A simulated step is a sequence of numbered events, at which memory is taken or given back. It
    has no times. If in the simulation the operations a, c and b take memory, one after the other,
    and in the trace a, b and c began after 10, 20 and 30 microseconds, then the events at which
    a, c and b take memory get the times 10, 20 and 30. All other events get the time of the last of
    these before them, or 0.

    Args:
      run: the simulated step.
      device: the device whose memory it is; None for the memory of all devices.
      begins: {name of an operation: the time at which it began in the trace}.
    """
    buffers = [buffer for buffer in run.buffers if device in (None, buffer.device)]
    changes = _changes_of_memory(buffers)
    allocating = _allocating_operations(buffers, begins)
    times = sorted(begins[name] for name in set(allocating.values()))
    in_use = 0
    # The operations that have taken memory so far. One that does so at several events counts once.
    begun: typing.Set[str] = set()
    time = 0
    for event in sorted(changes):
        in_use += changes[event]
        if event in allocating:
            begun.add(allocating[event])
            time = times[len(begun) - 1]
        yield time, in_use


def _changes_of_memory(buffers: typing.Iterable[Buffer]) -> typing.Dict[int, int]:
    """{event of a simulated step: by how many bytes the memory in use grows there}."""
    changes: typing.Dict[int, int] = collections.defaultdict(int)
    for buffer in buffers:
        changes[buffer.since] += buffer.size
        if buffer.until is not None:  # else it is held at the end of the step
            changes[buffer.until] -= buffer.size
    return changes


def _allocating_operations(buffers: typing.Iterable[Buffer], begins: typing.Dict[str, int]
                           ) -> typing.Dict[int, str]:
    """{event of a simulated step: name of the operation of the trace that takes memory there}.

    The memory of a variable is left out, since no operation of a step takes it; and that of an
    operation which is not in the trace, since it has no time.

    Args:
      buffers: the memory that the step takes.
      begins: {name of an operation: the time at which it began in the trace}.
    """
    allocating = {}
    for buffer in buffers:
        is_variable = buffer.variable is not None
        # Later operations may write their results into the same memory: the first one takes it.
        first_operation = buffer.held_output(buffer.since).node
        if not is_variable and first_operation.name in begins:
            allocating[buffer.since] = first_operation.name
    return allocating


def _thinned(points: typing.List[Point]) -> typing.List[Point]:
    """A curve of at most `_MOST_POINTS` points, with the same peak.

    A longer curve is cut into pieces of the same number of points, of which the largest one stays.
    """
    if len(points) <= _MOST_POINTS:
        return points
    points_per_piece = len(points) / float(_MOST_POINTS)
    largest_points = []
    for index in range(_MOST_POINTS):
        piece = points[int(index * points_per_piece):int((index + 1) * points_per_piece)]
        largest_points.append(max(piece, key=lambda point: point[1]))
    return largest_points
