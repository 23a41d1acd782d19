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

from towers.graph.graph_walk import (
    indices_by_name,
    names_of,
    tensors_made,
    tensors_taken,
    with_names,
)
from towers.graph.op_types import RESHAPES

# Bytes. Smaller tensors (shapes, counts, scalars) are kept, where the caller does not say what to
# keep.
SMALL = 1024
_UNKNOWN_DIMENSION = 16  # what a dimension of unknown size counts as
_NUM_CANDIDATES = 30  # sizes of segments that are tried, from the whole pass to one operation


def size_of(tensor: tf.Tensor) -> int:
    """Bytes of a tensor. An unknown dimension counts as 16. A tensor of unknown rank counts as
    2 kB, so that it is not taken for a small one."""
    if tensor.shape.ndims is None:
        return 2 * SMALL
    num_elements = 1
    for size in tensor.shape.as_list():
        if size is None:
            size = _UNKNOWN_DIMENSION
        num_elements *= size
    return tensor.dtype.size * num_elements


class _Span(typing.NamedTuple):
    """From where to where in a list of operations a tensor has to be kept."""
    tensor: tf.Tensor
    first: int
    """Index of the operation that makes the tensor; of a tensor made elsewhere, index of the first
    operation that takes it."""
    last: int  # index of the last operation that takes it


def crossing_bytes(operations: typing.List[tf.Operation],
                   counts_inputs: bool) -> typing.List[int]:
    """Counts the bytes that have to be kept at each cut of a list of operations.

    A tensor crosses a cut if an operation before the cut makes it and one after the cut takes it.

    Args:
      operations: the operations, in the order in which they were made.
      counts_inputs: whether tensors made elsewhere (the model's input, a variable's value) count,
        too: from the first operation that takes them.

    Returns:
      List of bytes: entry i is for a cut after operation i. For a, b(a), c(a, b), whose results
      have 4 bytes each, it is [4, 8, 0].
    """
    # How many more bytes cross the cut after operation i than the cut before it. A tensor crosses
    # the cuts from its first operation to the one before its last.
    changes = [0] * len(operations)
    for span in _spans(operations, counts_inputs):
        if span.last > span.first:  # not for what the beginning of a loop takes from its end
            changes[span.first] += size_of(span.tensor)
            changes[span.last] -= size_of(span.tensor)
    return list(itertools.accumulate(changes))


def _spans(operations: typing.List[tf.Operation], counts_inputs: bool) -> typing.Iterable[_Span]:
    """The `_Span` of each tensor that operations take from each other.

    Args:
      operations: the operations.
      counts_inputs: whether tensors made elsewhere count, too, see `crossing_bytes`.
    """
    index_by_name = indices_by_name(operations)
    spans: typing.Dict[str, _Span] = {}  # by the tensor's name
    for index, op in enumerate(operations):
        for tensor in op.inputs:
            if tensor.name in spans:  # an earlier operation takes it, too
                first = spans[tensor.name].first
            elif tensor.op.name in index_by_name:
                first = index_by_name[tensor.op.name]
            elif counts_inputs and _takes_memory(tensor):
                first = index
            else:
                continue
            spans[tensor.name] = _Span(tensor, first, last=index)
    return spans.values()


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
    crossing = crossing_bytes(operations, counts_inputs=False)
    recomputed = [_recomputed_bytes(op, taken) for op in operations]
    total = sum(recomputed)
    candidates: typing.List[typing.List[int]] = [[]]  # no cut at all
    # Each size is the size before, times a factor below 1. The last size is total / (n + 1) for n
    # operations, less than an average operation.
    factor = (len(operations) + 1) ** (-1 / _NUM_CANDIDATES)
    for exponent in range(1, _NUM_CANDIDATES + 1):
        largest = total * factor ** exponent
        candidates.append(_cuts_for_size(crossing, recomputed, largest))
    return min(candidates, key=lambda cuts: _bytes_needed(cuts, crossing, recomputed))


def _recomputed_bytes(op: tf.Operation, taken: typing.Set[str]) -> int:
    """The bytes of an operation's results that are in memory while its segment is differentiated:
    of the results that the backward pass takes."""
    if op.type in RESHAPES:  # its result is in the memory of its input
        return 0
    return sum(map(size_of, with_names(op.outputs, taken)))


def _slices(cuts: typing.Iterable[int], num_operations: int) -> typing.List[slice]:
    """List of the `slice` of each segment: `[slice(0, 3), slice(3, 5)]` for a cut after operation 2
    of five.

    Args:
      cuts: indices of the last operation of each segment but the last.
      num_operations: the number of operations that are cut.
    """
    slices = []
    start = 0
    for cut in sorted(cuts):
        slices.append(slice(start, cut + 1))
        start = cut + 1
    slices.append(slice(start, num_operations))
    return slices


def _bytes_needed(cuts: typing.List[int], crossing: typing.List[int],
                  recomputed: typing.List[int]) -> int:
    """The bytes that are kept at cuts, plus the bytes of the largest segment between them.

    Args:
      cuts: the cuts.
      crossing: for each operation the bytes that cross a cut after it, see `crossing_bytes`.
      recomputed: for each operation the bytes of its results, see `_recomputed_bytes`.
    """
    segments = _slices(cuts, len(recomputed))
    segment_bytes = [sum(recomputed[segment]) for segment in segments]
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
    for index, op_bytes in enumerate(recomputed[:-1]):  # no cut is after the last operation
        segment_bytes += op_bytes
        if segment_bytes <= largest:
            continue
        # The cut is in the second half of the segment, since shorter segments need more cuts.
        half = _half_way(recomputed, start, index, segment_bytes)
        cut = _cheapest_cut(crossing, half, index)
        cuts.append(cut)
        start = cut + 1
        segment_bytes = sum(recomputed[start:index + 1])
    return cuts


def _cheapest_cut(crossing: typing.List[int], first: int, last: int) -> int:
    """The cut, from `first` to `last`, that the fewest bytes cross; the last one if several do."""
    from_the_last = range(last, first - 1, -1)  # of equal ones `min` takes the one that comes first
    return min(from_the_last, key=crossing.__getitem__)


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
    if cuts:  # without any, nothing is to be recomputed, and the stages need no ends
        ends |= _stage_ends(operations, stages)
    segments = [operations[segment] for segment in _slices(ends, len(operations))]
    return Segments(recomputed=segments[:-1], kept=_taken_from_earlier(segments))


def _taken_from_earlier(segments: typing.List[typing.List[tf.Operation]]) -> typing.Set[str]:
    """Set of the names of the tensors that a segment takes from an earlier one."""
    made_earlier: typing.Set[str] = set()  # names of tensors
    taken: typing.Set[str] = set()
    for segment in segments:
        taken |= made_earlier & names_of(tensors_taken(segment))
        made_earlier |= names_of(tensors_made(segment))
    return taken


def _stage_ends(operations: typing.List[tf.Operation],
                stages: typing.Sequence[str]) -> typing.Set[int]:
    """Set of the indices of operations after which the next operation is on another stage.

    Operations that the model has put on a device of no stage belong to the segment around them.
    """
    on_stages = [index for index, op in enumerate(operations) if op.device in stages]
    ends = set()
    for index, next_index in zip(on_stages, on_stages[1:]):
        if operations[index].device != operations[next_index].device:
            ends.add(next_index - 1)
    return ends
