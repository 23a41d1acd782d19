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
        # A mask (bool) has a fourth of the size of the random numbers that it is made from.
        if op.name in from_random and all(tensor.dtype == tf.bool for tensor in op.outputs):
            continue
        repeatable[op.name] = op
    return _those_needed(repeatable, taken)


def _may_run_twice(op):
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
    return all(_is_plain_value(tensor) for tensor in list(op.inputs) + list(op.outputs))


def _draws(op):
    """Whether an operation makes random numbers, with a state or from a seed that it takes."""
    return graph_walk.is_random(op) or graph_walk.seed_position(op) is not None


def _is_plain_value(tensor):
    """Whether a tensor is neither a handle nor a reference, whose content may change."""
    is_handle = tensor.dtype in (tf.resource, tf.variant)
    is_reference = tensor.dtype != tensor.dtype.base_dtype
    return not is_handle and not is_reference


def _takes_a_later_result(op, place):
    """Whether an operation was given the result of one that was made after it, as in a loop."""
    return any(place.get(tensor.op.name, -1) > place[op.name] for tensor in op.inputs)


def _is_kept_for_its_size(tensor, keeps_small):
    """Whether a tensor is so small that it is kept: an integer, or any with `keeps_small`."""
    if size_of(tensor) > _SMALL:
        return False
    return keeps_small or not tensor.dtype.is_floating


def _those_needed(repeatable, taken):
    """The operations, of a dict by name, from which a tensor in `taken` is computed: a list."""
    needed = set()
    for name, op in reversed(list(repeatable.items())):
        if name in needed or names_of(op.outputs) & taken:
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


def _computed_from_references(forward):
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
    others = [op for op in graph.get_operations()
              if op.type in REFERENCE_VARIABLES and op.name not in trained]
    if not others:
        return set()
    return graph_walk.reachable_from(others, graph.get_operations())


def _check_no_writes(forward, trained):
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


def _takes_memory(tensor):
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


def _recomputed_bytes(op, taken):
    """Bytes of an operation's results that are in memory while its segment is differentiated."""
    if op.type in RESHAPES:  # the memory of its input
        return 0
    return sum(size_of(tensor) for tensor in op.outputs if tensor.name in taken)


def _cost(cuts, crossing, recomputed):
    """Bytes kept at the cuts, plus those of the largest segment between them."""
    bounds = [0] + [cut + 1 for cut in cuts] + [len(recomputed)]
    segment_bytes = [sum(recomputed[start:end]) for start, end in zip(bounds, bounds[1:])]
    return sum(crossing[cut] for cut in cuts) + max(segment_bytes)


def _cuts_at(crossing, recomputed, largest):
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


def _half_way(recomputed, start, end, total):
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
    bounds = [0] + sorted(end + 1 for end in ends) + [len(operations)]
    parts = [operations[start:end] for start, end in zip(bounds, bounds[1:])]
    segment_number = {op.name: number for number, part in enumerate(parts) for op in part}
    kept = set()
    for op in operations:
        for tensor in op.inputs:
            made_in = segment_number.get(tensor.op.name)
            if made_in is not None and made_in < segment_number[op.name]:
                kept.add(tensor.name)
    return Segments(parts[:-1], kept)


def _stage_ends(operations, stages):
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
