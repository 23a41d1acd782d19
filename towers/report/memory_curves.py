"""The memory of a traced step over its time, beside the memory that its graph predicts."""

import collections
import typing

import tensorflow.compat.v1 as tf

from towers.api.built import BuiltTowers
from towers.errors import InvalidArgumentError
from towers.memory.account import account_of_run
from towers.memory.measure import peaks_of, uses_of
from towers.memory.simulation import Run
from towers.memory.step_graph import shard_sizes, step_of
from towers.placement.devices import is_gpu, short_name
from towers.report.trace import Trace

_MOST_POINTS = 400  # of a curve

Point = typing.Tuple[int, int]
"""Microseconds from the beginning of the step, and the bytes in use from then on."""


class Pool(typing.NamedTuple):
    """The memory of one GPU, or the one that the CPUs of a process share.

    Attributes:
      name: the device's short name, or 'CPUs'.
      measured, predicted: lists of `Point`s.
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
      note: a text: what is not known, and why.
    """
    pools: typing.List[Pool]
    note: str


def memory_curves(built: BuiltTowers, metadata: tf.RunMetadata, trace: Trace,
                  batch_size: typing.Optional[int] = None) -> MemoryCurves:
    """The memory of a traced step, measured and predicted.

    Measured are the bytes in use at the end of each operation, as the allocators told. The
    prediction runs the operations in an order of its own, see `simulation`: what it holds after the
    k-th operation that takes memory is drawn at the time at which the k-th of these began.

    Args:
      built: the result of `build_towers`.
      metadata: of the step.
      trace: what was read from it.
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
    peaks = {device: peak.bytes for device, peak in peaks_of(metadata).items()}
    pools = []
    for device in sorted(set(measured) | set(predicted)):
        curve, predicted_peak = predicted.get(device, ([], None))
        pools.append(Pool(short_name(device) or 'CPUs', _thinned(measured.get(device, [])),
                          _thinned(curve), peaks.get(device), predicted_peak))
    notes.append('solid: measured; dashed: predicted from the graph. The prediction leaves out '
                 "cuDNN's workspace, what the allocator keeps for later, and NCCL's buffers")
    return MemoryCurves(pools, '; '.join(notes) + '.')


def _measured(metadata: tf.RunMetadata, trace: Trace) -> typing.Dict[str, typing.List[Point]]:
    """Bytes in use at the end of each operation: dict from a device ('' for all CPUs)."""
    curves: typing.Dict[str, typing.List[Point]] = collections.defaultdict(list)
    for use in uses_of(metadata):
        curves[use.device].append((min(max(0, use.end - trace.start), trace.micros), use.bytes))
    return {device: sorted(points) for device, points in curves.items()}


def _predicted(built: BuiltTowers, trace: Trace, batch_size: typing.Optional[int]
               ) -> typing.Dict[str, typing.Tuple[typing.List[Point], int]]:
    """The curve and the peak of each GPU, or, under '', of all CPUs together."""
    if batch_size is not None:
        shard_sizes(built, batch_size)  # raises where it does not divide
    step = step_of(built, batch_size)
    run = Run(step)
    account = account_of_run(built, step, run, batch_size)
    begins = _begins_of(trace)
    found = {}
    for pool in account.pools():
        device = pool.device or None
        simulated_peak = run.peaks[device].bytes if device in run.peaks else 0
        always_held = pool.peak - simulated_peak  # constants, and the allocator's own
        points = []
        for time, count in _simulated(run, device, begins):
            points.append((min(time, trace.micros), count + always_held))
        found[pool.device if is_gpu(pool.device) else ''] = (points, pool.peak)
    return found


def _begins_of(trace: Trace):
    """When each operation of a step began first: dict by name."""
    begins: typing.Dict[str, int] = {}
    for operation in trace.operations:
        begins.setdefault(operation.name, operation.begin)
    return begins


def _simulated(run: Run, device: typing.Optional[str], begins: typing.Dict[str, int]):
    """Yields `Point`s of a simulated step, at times of the traced one.

    Args:
      run: the simulated step.
      device: whose memory; None for that of all devices.
      begins: when operations began.
    """
    changes: typing.Dict[int, int] = collections.defaultdict(int)  # of the bytes, by event
    makers: typing.Dict[int, str] = {}  # the operation that an event came with
    for buffer in run.buffers:
        if device not in (None, buffer.device):
            continue
        changes[buffer.since] += buffer.size
        maker = buffer.owner(buffer.since)[0].name
        if buffer.variable is None and maker in begins:
            makers[buffer.since] = maker
        if buffer.until is not None:
            changes[buffer.until] -= buffer.size
    times = sorted(begins[name] for name in set(makers.values()))
    in_use = 0
    begun: typing.Set[str] = set()
    for event in sorted(changes):
        in_use += changes[event]
        if event in makers:
            begun.add(makers[event])
        yield (times[len(begun) - 1] if begun else 0), in_use


def _thinned(points: typing.List[Point]) -> typing.List[Point]:
    """The largest point of each of some equal pieces of a curve, so that its peak stays."""
    if len(points) <= _MOST_POINTS:
        return points
    size = len(points) / float(_MOST_POINTS)
    found = []
    for piece in range(_MOST_POINTS):
        some = points[int(piece * size):int((piece + 1) * size)]
        found.append(max(some, key=lambda point: point[1]))
    return found
