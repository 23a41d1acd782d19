"""The segments of a forward pass: which tensors to keep for the backward pass, and which to compute
again.

The operations that can be computed again, in the order in which they were made, are cut into
segments. At a cut, the tensors that later operations take from earlier ones are kept; the backward
pass computes each segment again from them, but for the last one, with which it begins. With n
layers of equal size and about sqrt(n) segments, the kept tensors and one segment are about sqrt(n)
layers large each (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost").
"""

import collections
import itertools
import math
import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers.errors import InvalidArgumentError
from towers.graph import graph_walk
from towers.graph.edit import functions_of
from towers.graph.graph_walk import names_of, producers_of
from towers.graph.op_types import RESHAPES
from towers.graph.variable_access import REFERENCE_VARIABLES, Writes

# Calls of Python functions, which may draw or count even if their type is not stateful.
_PYTHON = frozenset(['PyFunc', 'PyFuncStateless', 'EagerPyFunc'])
# Bytes. Smaller tensors (shapes, counts, scalars) are kept, where the caller does not say what to
# keep.
_SMALL = 1024
_UNKNOWN_DIMENSION = 16  # what a dimension of unknown size counts as
_NUM_CANDIDATES = 30  # sizes of segments that are tried, from the whole pass to one operation


# ---- which operations may run twice --------------------------------------------------------------

def repeatable_operations(forward: typing.List[tf.Operation], taken: typing.Set[str],
                          keeps_small: bool) -> typing.List[tf.Operation]:
    """Finds the operations of a forward pass that can be computed again, and are worth it.

    Each of them gives the same result when it runs again, and a tensor that the backward pass takes
    is computed from it.

    Args:
      forward: the operations of the forward pass, in the order in which they were made.
      taken: names of the tensors that the backward pass takes.
      keeps_small: whether small floating tensors are kept. Small integers are in any case.

    Returns:
      List of the operations, in the order of `forward`.

    Raises:
      InvalidArgumentError: the model writes a trained reference variable.
    """
    index_by_name = {op.name: index for index, op in enumerate(forward)}
    from_references = _computed_from_references(forward)
    from_random = graph_walk.reachable_from(filter(_draws, forward), forward)
    repeatable = collections.OrderedDict()
    for op in forward:
        if not _may_run_twice(op) or op.name in from_references:
            continue
        if _takes_a_later_result(op, index_by_name):
            continue
        if all(_is_kept_for_its_size(tensor, keeps_small) for tensor in op.outputs):
            continue
        # A mask has a fourth of the size of the random numbers that it is made from.
        if op.name in from_random and _is_mask(op):
            continue
        repeatable[op.name] = op
    return _needed_for(repeatable, taken)


def _is_mask(op: tf.Operation) -> bool:
    """Whether all results of an operation are of type bool."""
    return all(tensor.dtype == tf.bool for tensor in op.outputs)


def _may_run_twice(op: tf.Operation) -> bool:
    """Whether an operation gives the same results each time that it runs in a step.

    Not: what has no inputs or outputs, draws numbers, has a state, is in a loop or a branch (v1),
    or calls a function (control flow v2, `tf.function`, Python).
    """
    if not op.inputs or not op.outputs:
        return False
    if op.op_def.is_stateful or _draws(op) or op.type in _PYTHON:
        return False
    if graph_walk.is_control_flow(op) or functions_of(op.node_def):
        return False
    if op.type == 'PlaceholderWithDefault':  # a shard, or a value of the whole batch
        return False
    tensors = list(op.inputs) + list(op.outputs)
    return all(map(_is_plain_value, tensors))


def _draws(op: tf.Operation) -> bool:
    """Whether an operation draws random numbers, by a generator or from a seed that it takes."""
    return graph_walk.is_random(op) or graph_walk.seed_position(op) is not None


def _is_plain_value(tensor: tf.Tensor) -> bool:
    """Whether a tensor is a value, and not a handle or a reference, whose content may change."""
    is_handle = tensor.dtype in (tf.resource, tf.variant)
    is_reference = tensor.dtype != tensor.dtype.base_dtype
    return not is_handle and not is_reference


def _takes_a_later_result(op: tf.Operation, index_by_name: typing.Dict[str, int]) -> bool:
    """Whether an operation takes the result of one that was made after it, as happens in a loop.

    Args:
      op: the operation.
      index_by_name: {name of an operation of the forward pass: its index in the order of making};
        other operations were made before.
    """
    producer_names = names_of(producers_of(op))
    latest_producer = max(index_by_name.get(name, -1) for name in producer_names)
    return latest_producer > index_by_name[op.name]


def _is_kept_for_its_size(tensor: tf.Tensor, keeps_small: bool) -> bool:
    """Whether a tensor is kept because it is small: any one with `keeps_small`, else integers only.
    """
    if size_of(tensor) > _SMALL:
        return False
    return keeps_small or not tensor.dtype.is_floating


def _needed_for(repeatable: typing.Dict[str, tf.Operation],
                taken: typing.Set[str]) -> typing.List[tf.Operation]:
    """Leaves out the operations that nothing of the backward pass is computed from.

    Args:
      repeatable: {name: operation}, in the order in which they were made.
      taken: names of the tensors that the backward pass takes.

    Returns:
      List of the others, in the same order.
    """
    needed = set()
    for name, op in reversed(list(repeatable.items())):
        is_taken = not taken.isdisjoint(names_of(op.outputs))
        if is_taken or name in needed:
            needed.add(name)
            needed |= names_of(producers_of(op))
    return [op for name, op in repeatable.items() if name in needed]


def trained_references(forward: typing.List[tf.Operation]) -> typing.List[tf.Operation]:
    """List of the operations of the trained reference variables that a forward pass computes with.

    The memory of such a variable may hold another value when it is read again. Variables that a
    build makes are resource variables; those made before it, on TF 1, may be reference variables.
    """
    references = [variable.op for variable in tf.trainable_variables()
                  if variable.op.type in REFERENCE_VARIABLES]
    if not references:
        return []
    operations = forward[0].graph.get_operations()
    forward_names = names_of(forward)
    return [op for op in references
            if forward_names & graph_walk.reachable_from([op], operations)]


def _computed_from_references(forward: typing.List[tf.Operation]) -> typing.Set[str]:
    """Finds the operations that must not be computed again, since they are computed from reference
    variables: a step may have written these by then.

    Operations computed from trained variables are left out: the update of a trained reference
    variable waits for the recomputation, and the model must not write it.

    Returns:
      Set of the names of the operations.

    Raises:
      InvalidArgumentError: the forward pass writes a trained reference variable.
    """
    graph = forward[0].graph
    trained = names_of(trained_references(forward))
    if trained:
        _check_no_writes(forward, trained)
    operations = graph.get_operations()
    references = [op for op in operations if op.type in REFERENCE_VARIABLES]
    not_trained = [op for op in references if op.name not in trained]
    if not not_trained:
        return set()
    return graph_walk.reachable_from(not_trained, operations)


def _check_no_writes(forward: typing.List[tf.Operation], trained: typing.Set[str]) -> None:
    """Raises `InvalidArgumentError` if a forward pass writes a reference variable whose name is in
    `trained`."""
    writes = Writes(forward[0].graph)
    for op in forward:
        for name in trained.intersection(writes.of(op)):
            raise InvalidArgumentError(
                'recompute=, and the model computes with the reference variable %s, which %s '
                'writes before it is read again: make it with use_resource=True, or in a model '
                'function.' % (name, op.name))


# ---- where to cut --------------------------------------------------------------------------------

def size_of(tensor: tf.Tensor) -> int:
    """Bytes of a tensor. An unknown dimension counts as 16, a tensor of unknown rank as 2 kB."""
    if tensor.shape.ndims is None:
        return 2 * _SMALL
    sides = [_UNKNOWN_DIMENSION if side is None else side for side in tensor.shape.as_list()]
    return tensor.dtype.size * int(np.prod(sides, dtype=np.int64))


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
    index_by_name = {op.name: index for index, op in enumerate(operations)}
    tensors: typing.Dict[str, tf.Tensor] = {}
    first_index: typing.Dict[str, int] = {}
    last_index: typing.Dict[str, int] = {}
    for index, op in enumerate(operations):
        for tensor in op.inputs:
            is_made_here = tensor.op.name in index_by_name
            is_counted = is_made_here or (others and _takes_memory(tensor))
            if not is_counted:
                continue
            tensors[tensor.name] = tensor
            first_index.setdefault(tensor.name, index_by_name.get(tensor.op.name, index))
            last_index[tensor.name] = index
    # Entry i is the difference between the cuts after and before operation i.
    change = [0] * len(operations)
    for name, tensor in tensors.items():
        if last_index[name] > first_index[name]:
            change[first_index[name]] += size_of(tensor)
            change[last_index[name]] -= size_of(tensor)
    return list(itertools.accumulate(change))


def _takes_memory(tensor: tf.Tensor) -> bool:
    """Whether keeping a tensor takes memory: not for a constant, which is there in any case, nor
    for a handle, whose memory is the variable's."""
    return tensor.op.type != 'Const' and tensor.dtype != tf.resource


def best_cuts(operations: typing.List[tf.Operation], taken: typing.Set[str]) -> typing.List[int]:
    """Chooses the cuts that need the least memory, among those for thirty sizes of segments.

    The cost of some cuts is the bytes that are kept at them, plus those of the largest segment.

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
        for step in range(1, _NUM_CANDIDATES + 1):
            fraction = math.exp(-step * math.log(len(operations) + 1) / _NUM_CANDIDATES)
            candidates.append(_cuts_for_size(crossing, recomputed, total * fraction))
    return min(candidates, key=lambda cuts: _cost(cuts, crossing, recomputed))


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


def _cost(cuts: typing.List[int], crossing: typing.List[int],
          recomputed: typing.List[int]) -> int:
    """The bytes kept at some cuts, plus those of the largest segment between them.

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
    start = 0  # of the segment
    segment_bytes = 0
    for index, op_bytes in enumerate(recomputed):
        segment_bytes += op_bytes
        is_last = index + 1 == len(recomputed)
        if segment_bytes <= largest or is_last:
            continue
        # The cut is in the second half of the segment: shorter segments need more cuts. Of places
        # where as few bytes cross, it is the last one.
        half = _half_way(recomputed, start, index, segment_bytes)
        cut = min(range(half, index + 1), key=lambda place: (crossing[place], -place))
        cuts.append(cut)
        start = cut + 1
        segment_bytes = sum(recomputed[start:index + 1])
    return cuts


def _half_way(recomputed: typing.List[int], start: int, end: int, total: int) -> int:
    """Finds the index up to which a segment has half of its bytes.

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
    if cuts:
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
    """Set of the indices of operations after which the next one is on another stage.

    Operations that the model has put on a device of no stage belong to the segment around them.
    """
    ends = set()
    stage_device = None
    for index, op in enumerate(operations):
        if op.device not in stages:
            continue
        if stage_device is not None and op.device != stage_device:
            ends.add(index - 1)
        stage_device = op.device
    return ends
