"""Which tensors of a forward pass to keep for the backward pass, and which to compute again.

The operations that can be computed again, in the order in which they were made, are cut into
segments. At a cut, the tensors that later operations take from earlier ones are kept: few where the
graph is narrow, such as between two blocks. Within a segment nothing is kept; the backward pass,
when it gets there, computes the segment again from the tensors kept before it. With n layers of
equal size and about sqrt(n) segments, the kept tensors and one segment are about sqrt(n) layers
large each (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"). The backward pass
begins with the last segment, so all of that segment is kept.
"""

import collections
import math

import tensorflow.compat.v1 as tf

from towers.graph import graph_walk
from towers.graph.edit import functions_of
from towers.graph.op_types import RESHAPES
from towers.graph.variable_access import REFERENCE_VARIABLES, takers_of_memory

# Python, which may draw or count whatever its caller says of state.
_PYTHON = frozenset(['PyFunc', 'PyFuncStateless', 'EagerPyFunc'])
# Bytes; tensors up to this size (shapes, counts, scalars) are kept where nobody says what to keep.
_SMALL = 1024


def is_repeatable(op):
    """Whether an operation may run twice: it gives the same result and has no side effects.

    Operations that draw numbers, read or write state, are in a loop or a branch, or call a function
    (loops and branches of control flow v2, `tf.function`s, Python) may not.
    """
    return bool(op.inputs) and bool(op.outputs) and not (
        op.op_def.is_stateful or graph_walk.is_random(op)
        or graph_walk.seed_position(op) is not None or graph_walk.is_control_flow(op)
        or functions_of(op.node_def) or op.type in _PYTHON
        or op.type == 'PlaceholderWithDefault'  # a shard, or a value of the whole batch
        or any(tensor.dtype == tf.resource or tensor.dtype == tf.variant
               or tensor.dtype != tensor.dtype.base_dtype  # a reference
               for tensor in list(op.inputs) + list(op.outputs)))


def repeatable_operations(forward, taken, keeps_small=True):
    """The operations of a forward pass that may be computed again for the backward pass.

    Args:
      forward: list of operations in the order in which they were made.
      taken: names of the tensors that the backward pass takes.
      keeps_small: whether small floating tensors are kept, too, as small integers are.

    Returns:
      `OrderedDict` from names to operations, each after the operations that it reads. Only
      operations that a taken tensor is computed from are there.
    """
    place, repeatable = {op.name: index for index, op in enumerate(forward)}, {}
    random = graph_walk.reachable_from([op for op in forward if graph_walk.is_random(op)
                                        or graph_walk.seed_position(op) is not None], forward)
    # Of a reference variable the memory may hold another value when it is read again.
    references = set().union(*[takers_of_memory(op, lambda _: False) for op in
                               forward[0].graph.get_operations() if op.type in REFERENCE_VARIABLES])
    for index, op in enumerate(forward):
        if not is_repeatable(op) or op.name in references or any(
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
    return collections.OrderedDict((name, op) for name, op in repeatable.items() if name in needed)


def size_of(tensor, unknown=16):
    """Bytes of a tensor; an unknown dimension counts as 16, a tensor of unknown rank as 2 kB."""
    if tensor.shape.ndims is None:
        return 2 * _SMALL
    size = tensor.dtype.size
    for dimension in tensor.shape.as_list():
        size *= unknown if dimension is None else dimension
    return size


class Line:
    """The repeatable operations in a row, with the cost of each place to cut.

    Attributes:
      operations: list of operations.
      crossing: for each operation, bytes of the tensors made up to it that later operations take.
      weight: for each operation, bytes of its outputs that the backward pass takes.
    """

    def __init__(self, operations, taken):
        """
        Args:
          operations: `OrderedDict` of `repeatable_operations`.
          taken: names of the tensors that the backward pass takes.
        """
        self.operations = list(operations.values())
        place = {name: index for index, name in enumerate(operations)}
        last = {}  # index of the last operation that takes a tensor
        for index, op in enumerate(self.operations):
            for tensor in op.inputs:
                if tensor.op.name in place:
                    last[tensor.name] = index
        change = [0] * (len(self.operations) + 1)
        for index, op in enumerate(self.operations):
            for tensor in op.outputs:
                if last.get(tensor.name, index) > index:
                    change[index] += size_of(tensor)
                    change[last[tensor.name]] -= size_of(tensor)
        self.crossing, bytes_now = [], 0
        for each in change[:-1]:
            bytes_now += each
            self.crossing.append(bytes_now)
        self.weight = [0 if op.type in RESHAPES else sum(
            size_of(tensor) for tensor in op.outputs if tensor.name in taken)
                       for op in self.operations]

    def cuts_at(self, largest):
        """Places to cut into segments of about `largest` bytes, each where the fewest bytes cross.

        Returns:
          `(cuts, cost)`: the indices of the last operations of all segments but the last one, a
          list; and their `cost`.
        """
        cuts, start, total = [], 0, 0
        for index, weight in enumerate(self.weight):
            total += weight
            if total <= largest or index + 1 == len(self.weight):
                continue
            # The cut is in the second half of the stretch, since more cuts cost more, too.
            half, seen = start, 0
            while half < index and seen < total / 2:
                seen += self.weight[half]
                half += 1
            cut = min(range(half, index + 1), key=lambda place: (self.crossing[place], -place))
            cuts.append(cut)
            start = cut + 1
            total = sum(self.weight[start:index + 1])
        return cuts, self.cost(cuts)

    def cost(self, cuts):
        """The bytes that are kept at some cuts plus the bytes of the largest segment."""
        bounds = [0] + [cut + 1 for cut in cuts] + [len(self.weight)]
        return sum(self.crossing[cut] for cut in cuts) + max(
            sum(self.weight[start:end]) for start, end in zip(bounds, bounds[1:]))

    def best_cuts(self):
        """The cuts of the least cost among those for thirty sizes of segments; [] for no cut."""
        total = sum(self.weight)
        if not total:
            return []
        best = ([], self.cost([]))
        for step in range(1, 31):
            found = self.cuts_at(total * math.exp(-step * math.log(len(self.weight) + 1) / 30))
            if found[1] < best[1]:
                best = found
        return best[0]


def segments(line, cuts):
    """The segments to recompute: all but the last one.

    Args:
      line: `Line`.
      cuts: list of indices of the last operations of all segments but the last one.

    Returns:
      `(list of lists of operations, names of the tensors that are kept)`.
    """
    bounds = [0] + [cut + 1 for cut in cuts] + [len(line.operations)]
    of_segment = {}
    for number, (start, end) in enumerate(zip(bounds, bounds[1:])):
        of_segment.update((op.name, number) for op in line.operations[start:end])
    kept = set()
    for op in line.operations:
        for tensor in op.inputs:
            if of_segment.get(tensor.op.name, len(bounds)) < of_segment[op.name]:
                kept.add(tensor.name)
    return [line.operations[start:end] for start, end in zip(bounds, bounds[1:-1])], kept


def segments_of_blocks(blocks, operations, forward):
    """The segments of marked blocks; tensors that other operations take from a block are kept.

    Args:
      blocks: list of lists of operations.
      operations: `OrderedDict` of `repeatable_operations`.
      forward: list of all operations of the forward pass.

    Returns:
      As `segments`.
    """
    block_of = {op.name: number for number, block in enumerate(blocks) for op in block}
    kept = {tensor.name for op in forward for tensor in op.inputs
            if tensor.op.name in block_of and block_of.get(op.name) != block_of[tensor.op.name]}
    parts = [[op for op in block if op.name in operations] for block in blocks]
    return [part for part in parts if part], kept


def within_stages(parts, kept, stages):
    """Splits segments that reach over several stages of a tower.

    What goes from stage to stage is kept, so that no stage sends an activation again.

    Args:
      parts: list of lists of operations.
      kept: set of the names of the tensors that are kept; those are added to it.
      stages: the devices of the tower's stages.

    Returns:
      List of lists of operations.
    """
    found = []
    for part in parts:
        of_stage, there = collections.OrderedDict(), None
        stage_of = {}
        for op in part:
            # What the model has put on another device stays with what was made before it.
            there = op.device if op.device in stages or there is None else there
            of_stage.setdefault(there, []).append(op)
            stage_of[op.name] = there
            kept.update(tensor.name for tensor in op.inputs
                        if stage_of.get(tensor.op.name, there) != there)
        found.extend(of_stage.values())
    return found
