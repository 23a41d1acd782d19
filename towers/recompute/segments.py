"""The segments of a forward pass: where to cut it, and which tensors to keep at the cuts.

The operations that can be computed again (`repeatable`), in the order in which they were made, are
cut into segments. At a cut, the tensors that later operations take from earlier ones are kept; the
backward pass computes each segment again from them, but for the last one, with which it begins.
With n layers of equal size and about sqrt(n) segments, the kept tensors and one segment are about
sqrt(n) layers large each (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost").

Its test is `tests/recompute/test_rewrite.py`.
"""

import itertools
import typing

import tensorflow.compat.v1 as tf

from towers.graph.graph_walk import indices_by_name, names_of
from towers.graph.op_types import RESHAPES

# Bytes. Smaller tensors (shapes, counts, scalars) are kept, where the caller does not say what to
# keep.
SMALL = 1024
_UNKNOWN_DIMENSION = 16  # what a dimension of unknown size counts as
_NUM_CANDIDATES = 30  # sizes of segments that are tried, from the whole pass to one operation


def size_of(tensor: tf.Tensor) -> int:
    """Bytes of a tensor. An unknown dimension counts as 16, a tensor of unknown rank as 2 kB."""
    if tensor.shape.ndims is None:
        return 2 * SMALL
    num_elements = 1
    for side in tensor.shape.as_list():
        num_elements *= _UNKNOWN_DIMENSION if side is None else side
    return tensor.dtype.size * num_elements


def crossing_bytes(operations: typing.List[tf.Operation], others: bool) -> typing.List[int]:
    """Counts the bytes that have to be kept at each cut of a list of operations.

    A tensor crosses a cut if an operation before the cut makes it and one after the cut takes it.

    Args:
      operations: the operations, in the order in which they were made.
      others: whether tensors made elsewhere (the input, a variable's value) count, too: from the
        first operation that takes them.

    Returns:
      List of bytes: entry i is for a cut after operation i.
    """
    index_by_name = indices_by_name(operations)
    # By the tensor's name: the tensor; the index of the operation that makes it, or, made
    # elsewhere, is the first to take it; the index of the operation that is the last to take it.
    tensors: typing.Dict[str, tf.Tensor] = {}
    first_index: typing.Dict[str, int] = {}
    last_index: typing.Dict[str, int] = {}
    for index, op in enumerate(operations):
        for tensor in op.inputs:
            is_made_here = tensor.op.name in index_by_name
            counts_from_elsewhere = others and _takes_memory(tensor)
            if is_made_here or counts_from_elsewhere:
                tensors[tensor.name] = tensor
                first_index.setdefault(tensor.name, index_by_name.get(tensor.op.name, index))
                last_index[tensor.name] = index
    # A tensor crosses the cuts from its first index to the one before its last. Entry i of
    # `changes` is by how much more bytes cross the cut after operation i than the cut before it.
    changes = [0] * len(operations)
    for name, tensor in tensors.items():
        if last_index[name] > first_index[name]:
            changes[first_index[name]] += size_of(tensor)
            changes[last_index[name]] -= size_of(tensor)
    return list(itertools.accumulate(changes))


def _takes_memory(tensor: tf.Tensor) -> bool:
    """Whether keeping a tensor takes memory: not for a constant, which is there in any case, nor
    for a handle, whose memory is the variable's."""
    return tensor.op.type != 'Const' and tensor.dtype != tf.resource


def best_cuts(operations: typing.List[tf.Operation], taken: typing.Set[str]) -> typing.List[int]:
    """Chooses the cuts that need the least memory, among the cuts for thirty sizes of segments and
    no cut at all.

    The memory is the bytes that are kept at all cuts, plus the bytes of the largest segment.

    Args:
      operations: the operations that may be computed again, in the order of making.
      taken: names of the tensors that the backward pass takes.

    Returns:
      List of cuts: indices of the operations after which a segment ends, but for the last segment.
    """
    crossing = crossing_bytes(operations, others=False)
    recomputed = [_recomputed_bytes(op, taken) for op in operations]
    total = sum(recomputed)
    candidates: typing.List[typing.List[int]] = [[]]
    if total:
        # Each size is by the same factor smaller than the one before, down to total / (n + 1) for
        # n operations.
        factor = (len(operations) + 1) ** (-1 / _NUM_CANDIDATES)
        for step in range(1, _NUM_CANDIDATES + 1):
            candidates.append(_cuts_for_size(crossing, recomputed, total * factor ** step))
    return min(candidates, key=lambda cuts: _bytes_needed(cuts, crossing, recomputed))


def _recomputed_bytes(op: tf.Operation, taken: typing.Set[str]) -> int:
    """The bytes of an operation's results that are in memory while its segment is differentiated:
    those that the backward pass takes."""
    if op.type in RESHAPES:  # its result is the memory of its input
        return 0
    return sum(size_of(tensor) for tensor in op.outputs if tensor.name in taken)


def _bounds(cuts: typing.Iterable[int], num_operations: int) -> typing.List[typing.Tuple[int, int]]:
    """List of the `(start, end)` of each segment, as for a slice.

    Args:
      cuts: indices of the last operation of each segment but the last.
      num_operations: the number of operations that are cut.
    """
    starts = [0]
    for cut in sorted(cuts):
        starts.append(cut + 1)
    ends = starts[1:] + [num_operations]
    return list(zip(starts, ends))


def _bytes_needed(cuts: typing.List[int], crossing: typing.List[int],
                  recomputed: typing.List[int]) -> int:
    """The bytes that are kept at cuts, plus the bytes of the largest segment between them.

    Args:
      cuts: the cuts.
      crossing: for each operation the bytes that cross a cut after it, see `crossing_bytes`.
      recomputed: for each operation the bytes of its results, see `_recomputed_bytes`.
    """
    bounds = _bounds(cuts, len(recomputed))
    segment_bytes = [sum(recomputed[start:end]) for start, end in bounds]
    return sum(crossing[cut] for cut in cuts) + max(segment_bytes)


def _cuts_for_size(crossing: typing.List[int], recomputed: typing.List[int],
                   largest: float) -> typing.List[int]:
    """Cuts into segments of about `largest` bytes, each cut where the fewest bytes cross.

    Args:
      crossing: for each operation the bytes that cross a cut after it, see `crossing_bytes`.
      recomputed: for each operation the bytes of its results, see `_recomputed_bytes`.
      largest: bytes of a segment.

    Returns:
      List of cuts.
    """
    cuts = []
    start = 0  # the index of the first operation of the segment
    segment_bytes = 0
    for index, op_bytes in enumerate(recomputed):
        segment_bytes += op_bytes
        is_last = index + 1 == len(recomputed)
        if segment_bytes <= largest or is_last:
            continue
        # The cut is in the second half of the segment, since shorter segments need more cuts: where
        # the fewest bytes cross, and at the last of several such places.
        half = _half_way(recomputed, start, index, segment_bytes)
        cut = min(range(half, index + 1), key=lambda place: (crossing[place], -place))
        cuts.append(cut)
        start = cut + 1
        segment_bytes = sum(recomputed[start:index + 1])
    return cuts


def _half_way(recomputed: typing.List[int], start: int, end: int, total: int) -> int:
    """Finds the index before which a segment has half of its bytes.

    Args:
      recomputed: for each operation the bytes of its results.
      start, end: the indices of the first and of the last operation of the segment.
      total: the bytes of the segment.
    """
    index = start
    bytes_before = 0
    while index < end and bytes_before < total / 2:
        bytes_before += recomputed[index]
        index += 1
    return index


# ---- the segments --------------------------------------------------------------------------------

class Segments(typing.NamedTuple):
    """The segments of a forward pass.

    Attributes:
      recomputed: the operations of each segment but the last one, with which the backward pass
        begins.
      kept: names of the tensors that a segment takes from another one.
    """
    recomputed: typing.List[typing.List[tf.Operation]]
    kept: typing.Set[str]


def cut_into_segments(operations: typing.List[tf.Operation], cuts: typing.List[int],
                      stages: typing.Sequence[str]) -> Segments:
    """Cuts operations into segments, and also at the ends of stages: tensors that go from stage to
    stage are kept, so that no stage sends an activation again.

    Args:
      operations: the operations that may be computed again, in the order of making.
      cuts: the index of the last operation of each segment but the last; without any the operations
        are one segment.
      stages: the devices of the tower's stages; () without stages.
    """
    ends = set(cuts)
    if cuts:  # else nothing is recomputed
        ends |= _stage_ends(operations, stages)
    segments = [operations[start:end] for start, end in _bounds(ends, len(operations))]
    return Segments(recomputed=segments[:-1], kept=_taken_from_earlier(segments))


def _taken_from_earlier(segments: typing.List[typing.List[tf.Operation]]) -> typing.Set[str]:
    """Set of the names of the tensors that a segment takes from an earlier one."""
    earlier_operations: typing.Set[str] = set()  # names
    taken = set()
    for segment in segments:
        for op in segment:
            for tensor in op.inputs:
                if tensor.op.name in earlier_operations:
                    taken.add(tensor.name)
        earlier_operations |= names_of(segment)
    return taken


def _stage_ends(operations: typing.List[tf.Operation],
                stages: typing.Sequence[str]) -> typing.Set[int]:
    """Set of the indices of operations after which the next operation is on another stage.

    Operations that the model has put on a device of no stage belong to the segment around them.
    """
    ends = set()
    current_stage = None  # its device
    for index, op in enumerate(operations):
        if op.device not in stages:
            continue
        if current_stage is not None and op.device != current_stage:
            ends.add(index - 1)
        current_stage = op.device
    return ends
