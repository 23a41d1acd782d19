"""`Trace`: a traced step as plain values: what ran when on which device, and what was copied."""

import re
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import InvalidArgumentError
from towers.placement.devices import short_name
from towers.placement.tower_device import without_localhost
from towers.report.parts import COPIES, OTHER, Place, StepParts, places_in_runtime

_NO_OPERATION = ('_SOURCE', '_SINK', 'RecvTensor', 'RecvBuf')
"""Names under which TensorFlow traces what is no operation: the ends of a graph, and the message
from another process by which a receive, which is traced as well, gets its tensor."""
_COPIES_OF_GPU = '/memcpy'  # the name of a device ends so in the records of its copies
_NO_DEVICE = ''  # the short name of what is no device


class Traced(typing.NamedTuple):
    """One operation of a traced step, or one copy.

    Attributes:
      name: the name of the operation; for a copy, of the tensor.
      type: the type of the operation, such as `'MatMul'`; `'copy'` for a copy.
      row: the short name of its device, such as `'/gpu:0'`; for a copy `'/cpu:0 to /gpu:0'`, or
        `'/gpu:0 copies'` where the trace does not tell the other end.
      place: the part of the step, and the tower, that it belongs to.
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
        """The time that it took, in microseconds."""
        return self.end - self.begin

    @property
    def span(self) -> typing.Tuple[int, int]:
        """Its beginning and its end."""
        return self.begin, self.end


class Trace(typing.NamedTuple):
    """A traced step.

    Attributes:
      micros: microseconds from its first operation's beginning to its last one's end.
      operations: list of `Traced`, sorted by their beginnings, without copies.
      copies: list of `Traced`, one for each tensor that was copied to another device.
      start: the beginning of the step, on the clock of the trace, in microseconds.
    """
    micros: int
    operations: typing.List[Traced]
    copies: typing.List[Traced]
    start: int

    def of_part(self, part: str) -> typing.List[Traced]:
        """The operations of one of the `PARTS`."""
        return [operation for operation in self.operations if operation.place.part == part]

    def by_row(self) -> typing.Dict[str, typing.List[Traced]]:
        """{short name of a device: its operations}, devices sorted by kind and number."""
        rows: typing.Dict[str, typing.List[Traced]] = {}
        for operation in self.operations:
            rows.setdefault(operation.row, []).append(operation)
        return {row: rows[row] for row in sorted(rows, key=_row_order)}


def read_trace(metadata: tf.RunMetadata, parts: StepParts) -> Trace:
    """Reads the metadata of a step.

    Args:
      metadata: the metadata of a step that was run with `trace_level=tf.RunOptions.FULL_TRACE`.
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
    start = min(operation.begin for operation in operations)
    end = max(operation.end for operation in operations)
    return Trace(end - start, _since(start, operations), _since(start, copies), start)


class _Record(typing.NamedTuple):
    """A record of a trace.

    Attributes:
      name: the name of the operation.
      type: the type of the operation; '' where it is not known.
      device: the short name of the device.
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
    """The operations of the step: all records except copies, sends, receives, and the ends of a
    graph.

    Args:
      records: the records of the trace.
      parts: the operations of the step.
      partitions: `tf.RunMetadata.partition_graphs`, the graphs that the runtime ran.
    """
    in_runtime = places_in_runtime(parts, partitions)
    operations = []
    for record in records:
        is_transfer = record.is_copy or record.type in compat.SENDS + compat.RECEIVES
        if is_transfer or record.name in _NO_OPERATION:
            continue
        place = parts.place_of(record.name)
        if place is None:  # the runtime has added the operation
            place = in_runtime.get(record.name, Place(OTHER))
        operations.append(Traced(
            record.name, record.type, record.device, place, record.begin, record.end))
    return operations


# ---- copies --------------------------------------------------------------------------------------

class _Transfer(typing.NamedTuple):
    """The transfer of a tensor from one device to another.

    Attributes:
      tensor: the name of the tensor, which its send and its receive share.
      source: the short name of the device that sends it.
      target: the short name of the device that receives it.
    """
    tensor: str
    source: str
    target: str


def _transfers_by_name(partitions: typing.Sequence[tf.GraphDef]
                       ) -> typing.Dict[str, _Transfer]:
    """{name of a send or a receive of a step: its `_Transfer`}."""
    transfers = {}
    for partition in partitions:
        for node in partition.node:
            if node.op in compat.SENDS + compat.RECEIVES:
                transfers[node.name] = _Transfer(
                    node.attr['tensor_name'].s.decode(),
                    _short(node.attr['send_device'].s.decode()),
                    _short(node.attr['recv_device'].s.decode()))
    return transfers


def _received(records: typing.Iterable[_Record],
              partitions: typing.Sequence[tf.GraphDef]) -> typing.List[Traced]:
    """A copy for each receive of the step.

    A receive begins when its device is ready for it, and waits for the tensor. So the copy begins
    when the tensor is sent, where the trace has the send, too. It never begins after its end: the
    send may be of another run of a loop.

    Args:
      records: the records of the trace.
      partitions: `tf.RunMetadata.partition_graphs`, the graphs that the runtime ran.
    """
    transfers = _transfers_by_name(partitions)
    ends_of_sends = {}  # {name of a tensor: the time at which it has been sent}
    for record in records:
        if record.type in compat.SENDS and record.name in transfers:
            ends_of_sends[transfers[record.name].tensor] = record.end
    copies = []
    for record in records:
        if record.type not in compat.RECEIVES or record.name not in transfers:
            continue
        transfer = transfers[record.name]
        if transfer.source == transfer.target:  # sent within a device: nothing is copied
            continue
        row = '%s to %s' % (transfer.source, transfer.target)
        begin = max(record.begin, ends_of_sends.get(transfer.tensor, record.begin))
        copies.append(Traced(transfer.tensor, 'copy', row, Place(COPIES),
                             begin=min(begin, record.end), end=record.end))
    return copies


def _copies_of_gpus(records: typing.Iterable[_Record]) -> typing.List[Traced]:
    """The copies that GPUs made; the trace does not tell from or to which device."""
    return [Traced(record.name, 'copy', record.device + ' copies', Place(COPIES),
                   record.begin, record.end) for record in records if record.is_copy]


# ---- records of the trace ------------------------------------------------------------------------

def _records(metadata: tf.RunMetadata, parts: StepParts) -> typing.Iterator[_Record]:
    """Yields the records of the trace, each operation once.

    The records are listed by traced devices. A CPU is one of these. A GPU is several, and some of
    them repeat the records of others:

        /device:GPU:0               the times at which the CPU started the kernels
        /device:GPU:0/stream:all    the times of the kernels
        /device:GPU:0/stream:7      those of one stream
        /device:GPU:0/memcpy        copies from and to the GPU
        /device:GPU:0/sync          copies inside of the GPU

    What is no device at all is left out.
    """
    stats_of_devices = list(metadata.step_stats.dev_stats)
    with_kernels = {_short(stats.device) for stats in stats_of_devices
                    if _is_all_streams(stats.device)}
    for stats in stats_of_devices:
        device = _short(stats.device)
        if device == _NO_DEVICE:
            continue
        if not _is_kept(stats.device, has_kernels=device in with_kernels):
            continue
        is_copy = stats.device.endswith(_COPIES_OF_GPU)
        for node in stats.node_stats:
            name, op_type = _name_and_type(node, parts)
            begin = node.all_start_micros + node.op_start_rel_micros
            # A record without an end counts as one without a length.
            end = node.all_start_micros + max(node.op_end_rel_micros, node.op_start_rel_micros)
            yield _Record(name, op_type, device, begin, end, is_copy)


def _is_all_streams(device: str) -> bool:
    """Whether the records of this traced device are the kernels of all streams of a GPU."""
    return device.endswith('stream:all')


def _is_kept(device: str, has_kernels: bool) -> bool:
    """Whether the records of a traced device are read; see the table in `_records`.

    Args:
      device: the name of the device in the trace.
      has_kernels: whether the trace has the kernels of all streams of the same CPU or GPU.
    """
    if _is_all_streams(device) or device.endswith(_COPIES_OF_GPU):
        return True
    is_single_stream = 'stream:' in device  # its kernels are in `stream:all`, too
    is_inside_of_gpu = device.endswith('/sync')  # copies that reach no other device
    if is_single_stream or is_inside_of_gpu:
        return False
    # The CPU or GPU itself. The times at which kernels were started are read only where the times
    # of the kernels are not known. Of a CPU there are no kernels in the trace.
    return not has_kernels


def _short(device: str) -> str:
    """The short name of a device of the trace, without its stream; `_NO_DEVICE` for what is none.
    """
    if 'evice:' not in device:
        return _NO_DEVICE
    before_stream = re.split('/stream:|/memcpy|/sync', device)[0]
    return short_name(without_localhost(before_stream))


def _name_and_type(node: typing.Any, parts: StepParts) -> typing.Tuple[str, str]:
    """The name and the type of the operation of a record; the type is '' where it is not known."""
    # The name of a kernel on a GPU is 'name:type'; the label of an operation is 'name = type(...)'.
    name, _, op_type = node.node_name.partition(':')
    if op_type:
        return name, op_type
    _, is_labelled, after_name = node.timeline_label.partition(' = ')
    if is_labelled:
        return name, after_name.partition('(')[0]
    return name, parts.type_of(name)


def _since(start: int, operations: typing.List[Traced]) -> typing.List[Traced]:
    """The operations with times from `start` on, sorted by their beginnings. Time before `start`,
    at which a copy may have begun, counts as 0."""
    moved = []
    for operation in operations:
        moved.append(operation._replace(begin=max(0, operation.begin - start),
                                        end=max(0, operation.end - start)))
    return sorted(moved, key=lambda operation: (operation.begin, operation.end, operation.name))


def _row_order(row: str) -> typing.Tuple[str, int, str]:
    """The key by which devices are sorted: their kind, then their number."""
    kind, _, index = row.rpartition(':')
    number = int(index) if index.isdigit() else 0
    return kind, number, row
