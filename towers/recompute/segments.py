"""Which tensors of a forward pass to keep for the backward pass, and which to compute again.

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

# Calls of Python, which may draw or count even where their type is not stateful.
_PYTHON = frozenset(['PyFunc', 'PyFuncStateless', 'EagerPyFunc'])
# Bytes; tensors up to this size (shapes, counts, scalars) are kept where nobody says what to keep.
_SMALL = 1024
_UNKNOWN_DIMENSION = 16
_SIZES_TRIED = 30  # of segments, from the whole forward pass down to one operation


# ---- which operations may run twice --------------------------------------------------------------

def repeatable_operations(forward: typing.List[tf.Operation], taken: typing.Set[str],
                          keeps_small: bool) -> typing.List[tf.Operation]:
    """The operations of a forward pass that are worth computing again, in the same order.

    Each of them gives the same result when it runs again, and a tensor that the backward pass takes
    is computed from it.

    Args:
      forward: the operations of the forward pass, in the order in which they were made.
      taken: names of the tensors that the backward pass takes.
      keeps_small: whether small floating tensors are kept. Small integers are in any case.

    Raises:
      InvalidArgumentError: the model writes a trained reference variable.
    """
    place = {op.name: index for index, op in enumerate(forward)}
    from_references = _computed_from_references(forward)
    from_random = graph_walk.reachable_from(filter(_draws, forward), forward)
    repeatable = collections.OrderedDict()
    for op in forward:
        if not _may_run_twice(op) or op.name in from_references:
            continue
        if _takes_a_later_result(op, place):
            continue
        if all(_is_kept_for_its_size(tensor, keeps_small) for tensor in op.outputs):
            continue
        # A mask has a fourth of the size of the random numbers that it is made from.
        if op.name in from_random and _is_mask(op):
            continue
        repeatable[op.name] = op
    return _those_needed(repeatable, taken)


def _is_mask(op: tf.Operation) -> bool:
    """Whether all results of an operation are of type bool."""
    return all(tensor.dtype == tf.bool for tensor in op.outputs)


def _may_run_twice(op: tf.Operation) -> bool:
    """Whether an operation draws no numbers, has no state, is in no loop or branch, and calls no
    function (loops and branches of control flow v2, `tf.function`s, Python)."""
    if not op.inputs or not op.outputs:
        return False
    if op.op_def.is_stateful or _draws(op) or op.type in _PYTHON:
        return False
    if graph_walk.is_control_flow(op) or functions_of(op.node_def):
        return False
    if op.type == 'PlaceholderWithDefault':  # a shard, or a value of the whole batch
        return False
    tensors = list(op.inputs) + list(op.outputs)
    return all(_is_plain_value(tensor) for tensor in tensors)


def _draws(op: tf.Operation) -> bool:
    """Whether an operation makes random numbers, with a state or from a seed that it takes."""
    return graph_walk.is_random(op) or graph_walk.seed_position(op) is not None


def _is_plain_value(tensor: tf.Tensor) -> bool:
    """Whether a tensor is neither a handle nor a reference, whose content may change."""
    is_handle = tensor.dtype in (tf.resource, tf.variant)
    is_reference = tensor.dtype != tensor.dtype.base_dtype
    return not is_handle and not is_reference


def _takes_a_later_result(op: tf.Operation, place: typing.Dict[str, int]) -> bool:
    """Whether an operation was given the result of one that was made after it, as in a loop.

    `place` has the place of each operation of the forward pass by its name; what is not of the
    forward pass was made before it.
    """
    producer_names = names_of(producers_of(op))
    return any(place.get(name, -1) > place[op.name] for name in producer_names)


def _is_kept_for_its_size(tensor: tf.Tensor, keeps_small: bool) -> bool:
    """Whether a tensor is so small that it is kept: an integer, or any with `keeps_small`."""
    if size_of(tensor) > _SMALL:
        return False
    return keeps_small or not tensor.dtype.is_floating


def _those_needed(repeatable: typing.Dict[str, tf.Operation],
                  taken: typing.Set[str]) -> typing.List[tf.Operation]:
    """The operations, of a dict by name, from which a tensor in `taken` is computed: a list."""
    needed = set()
    for name, op in reversed(list(repeatable.items())):
        is_taken = not taken.isdisjoint(names_of(op.outputs))
        if is_taken or name in needed:
            needed.add(name)
            needed |= names_of(producers_of(op))
    return [op for name, op in repeatable.items() if name in needed]


def trained_references(forward: typing.List[tf.Operation]) -> typing.List[tf.Operation]:
    """The operations of the trained reference variables that a forward pass computes with.

    The memory of such a variable may hold another value when it is read again. Variables that the
    towers make are no references; those made before the towers on TF 1 may be.
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
    """Names of operations computed from reference variables that are not trained.

    A step may write these variables before they are read again. The update of the trained ones
    waits for the recomputation.

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
    """Raises `InvalidArgumentError` where a forward pass writes a variable of the names `trained`.
    """
    writes = Writes(forward[0].graph)
    for op in forward:
        for name in trained.intersection(writes.of(op)):
            raise InvalidArgumentError(
                'recompute=, and the model computes with the reference variable %s, which %s '
                'writes before it is read again: make it with use_resource=True, or in a model '
                'function.' % (name, op.name))


# ---- where to cut --------------------------------------------------------------------------------

def size_of(tensor: tf.Tensor) -> int:
    """Bytes of a tensor; an unknown dimension counts as 16, a tensor of unknown rank as 2 kB."""
    if tensor.shape.ndims is None:
        return 2 * _SMALL
    sides = [_UNKNOWN_DIMENSION if side is None else side for side in tensor.shape.as_list()]
    return tensor.dtype.size * int(np.prod(sides, dtype=np.int64))


def crossing_bytes(operations: typing.List[tf.Operation], others: bool) -> typing.List[int]:
    """Bytes that have to be kept where a list of operations is cut, for a cut after each of them.

    These are the tensors that operations up to the cut make and operations behind it take.

    Args:
      operations: the operations, in the order in which they were made.
      others: whether tensors made elsewhere (the input, a variable's value) count, too: from the
        first operation that takes them.
    """
    place = {op.name: index for index, op in enumerate(operations)}
    tensors: typing.Dict[str, tf.Tensor] = {}
    first_place: typing.Dict[str, int] = {}
    last_place: typing.Dict[str, int] = {}
    for index, op in enumerate(operations):
        for tensor in op.inputs:
            is_made_here = tensor.op.name in place
            if not is_made_here and not (others and _takes_memory(tensor)):
                continue
            tensors[tensor.name] = tensor
            first_place.setdefault(tensor.name, place.get(tensor.op.name, index))
            last_place[tensor.name] = index
    change = [0] * len(operations)  # of the bytes, from the cut before an operation to that after
    for name, tensor in tensors.items():
        if last_place[name] > first_place[name]:
            change[first_place[name]] += size_of(tensor)
            change[last_place[name]] -= size_of(tensor)
    return list(itertools.accumulate(change))


def _takes_memory(tensor: tf.Tensor) -> bool:
    """Whether a tensor has memory of its own that it keeps: a constant has it in any case, and that
    of a handle belongs to its variable."""
    return tensor.op.type != 'Const' and tensor.dtype != tf.resource


def best_cuts(operations: typing.List[tf.Operation], taken: typing.Set[str]) -> typing.List[int]:
    """The cheapest cuts among those for thirty sizes of segments.

    A cut is the place of the last operation of a segment; the last segment has none. The cost is
    the bytes kept at the cuts plus those of the largest segment.

    Args:
      operations: the operations that may be computed again, in the order of making.
      taken: names of the tensors that the backward pass takes.
    """
    crossing = crossing_bytes(operations, others=False)
    recomputed = [_recomputed_bytes(op, taken) for op in operations]
    total = sum(recomputed)
    candidates: typing.List[typing.List[int]] = [[]]
    if total:
        for step in range(1, _SIZES_TRIED + 1):
            fraction = math.exp(-step * math.log(len(operations) + 1) / _SIZES_TRIED)
            candidates.append(_cuts_at(crossing, recomputed, total * fraction))
    return min(candidates, key=lambda cuts: _cost(cuts, crossing, recomputed))


def _recomputed_bytes(op: tf.Operation, taken: typing.Set[str]) -> int:
    """Bytes of an operation's results that are in memory while its segment is differentiated."""
    if op.type in RESHAPES:  # the memory of its input
        return 0
    return sum(size_of(tensor) for tensor in op.outputs if tensor.name in taken)


def _bounds(cuts: typing.Iterable[int], num_operations: int) -> typing.List[typing.Tuple[int, int]]:
    """The start and the end of each segment, as of a slice, in a list of so many operations."""
    starts = [0]
    for cut in sorted(cuts):
        starts.append(cut + 1)
    ends = starts[1:] + [num_operations]
    return list(zip(starts, ends))


def _cost(cuts: typing.List[int], crossing: typing.List[int],
          recomputed: typing.List[int]) -> int:
    """Bytes kept at the cuts, plus those of the largest segment between them.

    `crossing` has the bytes that cross behind each operation, `recomputed` those of its results.
    """
    bounds = _bounds(cuts, len(recomputed))
    segment_bytes = [sum(recomputed[start:end]) for start, end in bounds]
    return sum(crossing[cut] for cut in cuts) + max(segment_bytes)


def _cuts_at(crossing: typing.List[int], recomputed: typing.List[int],
             largest: float) -> typing.List[int]:
    """The cuts into segments of about `largest` bytes, each where the fewest bytes cross.

    `crossing` has the bytes that cross behind each operation, `recomputed` those of its results.
    """
    cuts = []
    start = 0  # of the segment
    segment_bytes = 0
    for index, op_bytes in enumerate(recomputed):
        segment_bytes += op_bytes
        is_last = index + 1 == len(recomputed)
        if segment_bytes <= largest or is_last:
            continue
        # The cut is in the second half of the stretch, since more cuts cost more, too.
        half = _half_way(recomputed, start, index, segment_bytes)
        cut = min(range(half, index + 1), key=lambda place: (crossing[place], -place))
        cuts.append(cut)
        start = cut + 1
        segment_bytes = sum(recomputed[start:index + 1])
    return cuts


def _half_way(recomputed: typing.List[int], start: int, end: int, total: int) -> int:
    """The first place from `start` on before which half of the `total` bytes are; `end` at most."""
    place = start
    passed = 0
    while place < end and passed < total / 2:
        passed += recomputed[place]
        place += 1
    return place


# ---- the segments --------------------------------------------------------------------------------

class Segments(typing.NamedTuple):
    """How a forward pass is recomputed.

    Attributes:
      recomputed: the operations of each segment but the last one, with which the backward pass
        begins.
      kept: names of the tensors that a segment takes from another one.
    """
    recomputed: typing.List[typing.List[tf.Operation]]
    kept: typing.Set[str]


def cut_into_segments(operations: typing.List[tf.Operation], cuts: typing.List[int],
                      stages: typing.Sequence[str]) -> Segments:
    """Cuts operations into segments.

    Tensors that go from stage to stage are kept, so that no stage sends an activation again.

    Args:
      operations: the operations that may be computed again, in the order of making.
      cuts: the place of the last operation of each segment but the last.
      stages: the devices of the tower's stages; () without stages.
    """
    ends = set(cuts)
    if cuts:
        ends |= _stage_ends(operations, stages)
    segments = [operations[start:end] for start, end in _bounds(ends, len(operations))]
    return Segments(recomputed=segments[:-1], kept=_taken_from_earlier(segments))


def _taken_from_earlier(segments: typing.List[typing.List[tf.Operation]]) -> typing.Set[str]:
    """The names of the tensors that a segment takes from an earlier one."""
    made_earlier: typing.Set[str] = set()  # names of operations
    taken = set()
    for segment in segments:
        for op in segment:
            taken |= names_of(tensor for tensor in op.inputs if tensor.op.name in made_earlier)
        made_earlier |= names_of(segment)
    return taken


def _stage_ends(operations: typing.List[tf.Operation],
                stages: typing.Sequence[str]) -> typing.Set[int]:
    """The places of operations after which the next one is on another stage: a set.

    Operations that the model has put on a device of no stage belong to the segment around them.
    """
    ends = set()
    stage = None
    for place, op in enumerate(operations):
        if op.device not in stages:
            continue
        if stage is not None and op.device != stage:
            ends.add(place - 1)
        stage = op.device
    return ends
