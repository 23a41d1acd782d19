"""Which tensors of a forward pass to keep for the backward pass, and which to compute again.

The operations that can be computed again, in the order in which they were made, are cut into
segments. At a cut, the tensors that later operations take from earlier ones are kept; the backward
pass computes each segment again from them, but for the last one, with which it begins. With n
layers of equal size and about sqrt(n) segments, the kept tensors and one segment are about sqrt(n)
layers large each (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost").
"""

import itertools
import math

import numpy as np
import tensorflow.compat.v1 as tf

from towers.errors import InvalidArgumentError
from towers.graph import graph_walk
from towers.graph.edit import functions_of
from towers.graph.op_types import RESHAPES
from towers.graph.variable_access import REFERENCE_VARIABLES

# Calls of Python, which may draw or count even where their type is not stateful.
_PYTHON = frozenset(['PyFunc', 'PyFuncStateless', 'EagerPyFunc'])
# Bytes; tensors up to this size (shapes, counts, scalars) are kept where nobody says what to keep.
_SMALL = 1024


def _may_run_twice(op):
    """Whether an operation draws no numbers, has no state, is in no loop or branch, and calls no
    function (loops and branches of control flow v2, `tf.function`s, Python)."""
    return bool(op.inputs) and bool(op.outputs) and not (
        op.op_def.is_stateful or _draws(op) or graph_walk.is_control_flow(op)
        or functions_of(op.node_def) or op.type in _PYTHON
        or op.type == 'PlaceholderWithDefault'  # a shard, or a value of the whole batch
        or any(tensor.dtype == tf.resource or tensor.dtype == tf.variant
               or tensor.dtype != tensor.dtype.base_dtype  # a reference
               for tensor in list(op.inputs) + list(op.outputs)))


def _draws(op):
    return graph_walk.is_random(op) or graph_walk.seed_position(op) is not None


def repeatable_operations(forward, taken, keeps_small):
    """The operations of a forward pass that may be computed again for the backward pass, in order.

    A tensor in `taken` is computed from each. With `keeps_small`, small floating tensors are kept,
    as small integers are. Raises `InvalidArgumentError` where the model computes with a trained
    reference variable.
    """
    place, repeatable = {op.name: index for index, op in enumerate(forward)}, {}
    random = graph_walk.reachable_from(filter(_draws, forward), forward)
    references = _computed_from_references(forward)
    for index, op in enumerate(forward):
        if not _may_run_twice(op) or op.name in references or any(
                place.get(tensor.op.name, -1) > index for tensor in op.inputs):
            continue
        if all(size_of(tensor) <= _SMALL and (keeps_small or not tensor.dtype.is_floating)
               for tensor in op.outputs):
            continue
        # A mask (bool) has a fourth of the size of the random numbers that it is made from.
        if op.name in random and all(tensor.dtype == tf.bool for tensor in op.outputs):
            continue
        repeatable[op.name] = op
    needed = {name for name, op in repeatable.items()
              if any(tensor.name in taken for tensor in op.outputs)}
    for name in reversed(list(repeatable)):
        if name in needed:
            needed.update(tensor.op.name for tensor in repeatable[name].inputs
                          if tensor.op.name in repeatable)
    return [op for name, op in repeatable.items() if name in needed]


def _computed_from_references(forward):
    """Names of operations computed from reference variables, whose memory may hold another value
    when it is read again; raises for trained ones, made before the towers on TF 1."""
    names, operations = {op.name for op in forward}, forward[0].graph.get_operations()
    sources = [op for op in operations if op.type in REFERENCE_VARIABLES]
    found = graph_walk.reachable_from(sources, operations) if sources else set()
    for op in (variable.op for variable in tf.trainable_variables()) if found & names else ():
        if op.name in found and names & graph_walk.reachable_from([op], operations):
            raise InvalidArgumentError(
                'recompute=, and the model computes with the reference variable %s, which may hold '
                'another value when it is read again: make it with use_resource=True, or in the '
                'model function.' % op.name)
    return found


def size_of(tensor: tf.Tensor) -> int:
    """Bytes of a tensor; an unknown dimension counts as 16, a tensor of unknown rank as 2 kB."""
    if tensor.shape.ndims is None:
        return 2 * _SMALL
    return tensor.dtype.size * int(np.prod(
        [16 if side is None else side for side in tensor.shape.as_list()], dtype=np.int64))


def crossing_bytes(operations, others):
    """For each operation of a list, bytes of the tensors made up to it that later ones take; with
    `others`, also of those made elsewhere (the input, a variable's value), from the first that
    takes them."""
    place = {op.name: index for index, op in enumerate(operations)}
    made, last, tensors = {}, {}, {}
    for index, op in enumerate(operations):
        for tensor in op.inputs:
            if tensor.op.name in place or others and (
                    tensor.op.type != 'Const' and tensor.dtype != tf.resource):
                tensors[tensor.name] = tensor
                made.setdefault(tensor.name, place.get(tensor.op.name, index))
                last[tensor.name] = index
    change = [0] * (len(operations) + 1)
    for name, tensor in tensors.items():
        if last[name] > made[name]:
            change[made[name]] += size_of(tensor)
            change[last[name]] -= size_of(tensor)
    return list(itertools.accumulate(change[:-1]))


def best_cuts(operations, taken):
    """The cuts of the least cost among those for thirty sizes of segments: the places of the last
    operations of all segments but the last one. The cost is the bytes kept at the cuts plus those
    of the largest segment."""
    crossing = crossing_bytes(operations, others=False)
    weight = [0 if op.type in RESHAPES else sum(
        size_of(tensor) for tensor in op.outputs if tensor.name in taken) for op in operations]
    total = sum(weight)

    def cost(cuts):
        bounds = [0] + [cut + 1 for cut in cuts] + [len(weight)]
        return sum(crossing[cut] for cut in cuts) + max(
            sum(weight[start:end]) for start, end in zip(bounds, bounds[1:]))
    return min([[]] + [
        _cuts_at(crossing, weight, total * math.exp(-step * math.log(len(weight) + 1) / 30))
        for step in range(1, 31)] * bool(total), key=cost)


def _cuts_at(crossing, weight, largest):
    """The cuts into segments of about `largest` bytes, each where the fewest bytes cross."""
    cuts, start, total = [], 0, 0
    for index, each in enumerate(weight):
        total += each
        if total <= largest or index + 1 == len(weight):
            continue
        # The cut is in the second half of the stretch, since more cuts cost more, too.
        half, seen = start, 0
        while half < index and seen < total / 2:
            seen += weight[half]
            half += 1
        cuts.append(min(range(half, index + 1), key=lambda place: (crossing[place], -place)))
        start = cuts[-1] + 1
        total = sum(weight[start:index + 1])
    return cuts


def segments(operations, cuts, stages):
    """The segments to recompute, all but the last one; and the names of the tensors that are kept.

    Tensors that go from stage to stage are kept, so that no stage sends an activation again.
    """
    there = None  # operations that the model has put on a device of no stage open no segment
    for place, op in enumerate(operations):
        if op.device in stages and cuts:
            if there not in (None, op.device):
                cuts = cuts + [place - 1]
            there = op.device
    bounds = [0] + sorted({cut + 1 for cut in cuts}) + [len(operations)]
    parts = [operations[start:end] for start, end in zip(bounds, bounds[1:])]
    of_segment = {op.name: number for number, part in enumerate(parts) for op in part}
    kept = {tensor.name for op in operations for tensor in op.inputs
            if of_segment.get(tensor.op.name, len(parts)) < of_segment[op.name]}
    return parts[:-1], kept
