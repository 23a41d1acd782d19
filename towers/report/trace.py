"""A traced step as plain values: what ran when on which device, and what was copied."""

import re
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import InvalidArgumentError
from towers.placement.devices import short_name
from towers.placement.tower_device import without_localhost
from towers.report.parts import COPIES, OTHER, Place, StepParts, places_in_runtime

_NO_OPERATION = ('_SOURCE', '_SINK')
_COPIES_OF_GPU = '/memcpy'  # the end of the name of a row


class Traced(typing.NamedTuple):
    """One operation of a traced step, or one copy.

    Attributes:
      name: of the operation; of a copy, of what sends the tensor.
      type: of the operation, such as `'MatMul'`.
      row: the short name of its device, such as `'/gpu:0'`; of a copy `'/cpu:0 to /gpu:0'`, or
        `'/gpu:0 copies'` where the trace does not tell the other end.
      place: what it is for.
      begin, end: microseconds from the beginning of the step, ints.
    """
    name: str
    type: str
    row: str
    place: Place
    begin: int
    end: int

    @property
    def micros(self) -> int:
        """How long it ran, in microseconds."""
        return self.end - self.begin


class Trace(typing.NamedTuple):
    """A traced step.

    Attributes:
      micros: microseconds from its first operation's beginning to its last one's end.
      operations: list of `Traced`, by their beginnings, without copies.
      copies: list of `Traced`, one for each tensor that came to another device.
      start: the beginning of the step, on the clock of the trace, in microseconds.
    """
    micros: int
    operations: typing.List[Traced]
    copies: typing.List[Traced]
    start: int

    def of_part(self, part: str) -> typing.List[Traced]:
        """The operations of one of the `PARTS`."""
        return [each for each in self.operations if each.place.part == part]

    def by_row(self) -> typing.Dict[str, typing.List[Traced]]:
        """The operations of each device, by its short name; devices by their numbers."""
        found: typing.Dict[str, typing.List[Traced]] = {}
        for operation in self.operations:
            found.setdefault(operation.row, []).append(operation)
        return {row: found[row] for row in sorted(found, key=_row_order)}


def read_trace(metadata: tf.RunMetadata, parts: StepParts) -> Trace:
    """Reads the metadata of a step.

    Args:
      metadata: of a step that was run with `trace_level=tf.RunOptions.FULL_TRACE`.
      parts: the operations of the step.

    Raises:
      InvalidArgumentError: the metadata has no operations.
    """
    records = list(_records(metadata, parts))
    operations = _operations(records, parts, metadata.partition_graphs)
    if not operations:
        raise InvalidArgumentError(
            'run_metadata holds no operations: run the step with options=tf.RunOptions('
            'trace_level=tf.RunOptions.FULL_TRACE, output_partition_graphs=True).')
    copies = _copies_of_gpus(records) + _received(records, metadata.partition_graphs)
    start = min(each.begin for each in operations)
    last = max(each.end for each in operations)
    return Trace(last - start, _from(start, operations), _from(start, copies), start)


class _Record(typing.NamedTuple):
    """A record of a trace.

    Attributes:
      name: of the operation.
      type: of it, '' where it is not known.
      device: its short name.
      begin, end: microseconds on the clock of the trace.
      is_copy: whether it is a copy that a GPU made.
    """
    name: str
    type: str
    device: str
    begin: int
    end: int
    is_copy: bool


def _operations(records: typing.Iterable[_Record], parts: StepParts,
                partitions: typing.Sequence[tf.GraphDef]) -> typing.List[Traced]:
    """The records of operations: all but copies, sends, receives, and the ends of a graph."""
    in_runtime = places_in_runtime(parts, partitions)
    operations = []
    for record in records:
        is_transfer = record.is_copy or record.type in compat.SENDS + compat.RECEIVES
        if is_transfer or record.name in _NO_OPERATION:
            continue
        place = parts.place_of(record.name) or in_runtime.get(record.name) or Place(OTHER)
        operations.append(Traced(
            record.name, record.type, record.device, place, record.begin, record.end))
    return operations


# ---- copies --------------------------------------------------------------------------------------

class _Transfer(typing.NamedTuple):
    """What a send or a receive is about."""
    tensor: str  # its name in the rendezvous
    source: str  # device
    target: str


def _ends_of_transfers(partitions: typing.Sequence[tf.GraphDef]):
    """Which tensor each send and receive of a step is about: dict from names to `_Transfer`s."""
    found = {}
    for partition in partitions:
        for node in partition.node:
            if node.op in compat.SENDS + compat.RECEIVES:
                found[node.name] = _Transfer(
                    node.attr['tensor_name'].s.decode(),
                    _short(node.attr['send_device'].s.decode()),
                    _short(node.attr['recv_device'].s.decode()))
    return found


def _received(records: typing.Iterable[_Record],
              partitions: typing.Sequence[tf.GraphDef]) -> typing.List[Traced]:
    """The copies that receives of a step are.

    A receive begins when its device is ready for it, and waits. The copy begins when the tensor has
    been sent, where both are known.
    """
    ends = _ends_of_transfers(partitions)
    sent = {}
    for record in records:
        if record.type in compat.SENDS and record.name in ends:
            sent[ends[record.name].tensor] = record.end
    copies = []
    for record in records:
        transfer = ends.get(record.name)
        if record.type not in compat.RECEIVES or transfer is None:
            continue
        if transfer.source != transfer.target:
            row = '%s to %s' % (transfer.source, transfer.target)
            begin = max(record.begin, sent.get(transfer.tensor, record.begin))
            copies.append(Traced(transfer.tensor, 'copy', row, Place(COPIES),
                                 begin=min(begin, record.end), end=record.end))
    return copies


def _copies_of_gpus(records: typing.Iterable[_Record]) -> typing.List[Traced]:
    """The copies that GPUs made, of which the trace does not tell the other end."""
    return [Traced(record.name, 'copy', record.device + ' copies', Place(COPIES),
                   record.begin, record.end) for record in records if record.is_copy]


# ---- records of the trace ------------------------------------------------------------------------

def _records(metadata: tf.RunMetadata, parts: StepParts) -> typing.Iterator[_Record]:
    """Yields each `_Record` that says something of its own.

    A GPU has several rows: when its kernels ran (`stream:all`), what was copied (`memcpy`), and
    when the CPU started kernels. The kernels count where they are known.
    """
    devices = list(metadata.step_stats.dev_stats)
    with_kernels = {_short(each.device) for each in devices if _is_all_streams(each.device)}
    for stats in devices:
        device = _short(stats.device)
        if not device or _is_left_out(stats.device, device in with_kernels):
            continue
        is_copy = stats.device.endswith(_COPIES_OF_GPU)
        for node in stats.node_stats:
            name, kind = _name_and_type(node, parts)
            begin = node.all_start_micros + node.op_start_rel_micros
            end = node.all_start_micros + max(node.op_end_rel_micros, node.op_start_rel_micros)
            yield _Record(name, kind, device, begin, end, is_copy)


def _is_all_streams(device: str) -> bool:
    return device.endswith('stream:all')


def _is_left_out(device: str, has_kernels: bool) -> bool:
    """Whether a row of the trace repeats another one, or has copies inside of a device."""
    if _is_all_streams(device) or device.endswith(_COPIES_OF_GPU):
        return False
    is_single_stream = 'stream:' in device or device.endswith('/sync')
    return is_single_stream or has_kernels


def _short(device: str) -> str:
    """The short name of a device, without the stream; '' for what is no device."""
    if 'evice:' not in device:
        return ''
    before_stream = re.split('/stream:|/memcpy|/sync', device)[0]
    return short_name(without_localhost(before_stream))


def _name_and_type(node: typing.Any, parts: StepParts) -> typing.Tuple[str, str]:
    """The name and the type of the operation of a record; the type is '' where it is not known."""
    name, _, kind = node.node_name.partition(':')
    if kind:  # of a kernel on a GPU
        return name, kind
    _, is_labelled, rest = node.timeline_label.partition(' = ')
    if is_labelled:
        return name, rest.partition('(')[0]
    return name, parts.type_of(name)


def _from(start: int, operations: typing.List[Traced]) -> typing.List[Traced]:
    """The operations by their beginnings, in microseconds from the beginning of the step."""
    moved = [each._replace(begin=max(0, each.begin - start), end=max(0, each.end - start))
             for each in operations]
    return sorted(moved, key=lambda each: (each.begin, each.end, each.name))


def _row_order(row: str):
    """The order of devices: by kind, then by number."""
    kind, _, number = row.rpartition(':')
    return kind, int(number) if number.isdigit() else 0, row
