"""The memory that operations of a forward pass take as one stage, and cuts for even stages.

Which results the backward pass keeps is told by the types of the operations: a gradient function
takes the inputs of its operation, its outputs, or neither.
"""

import collections
import typing

import tensorflow.compat.v1 as tf

from towers.graph.graph_walk import behind, bytes_of, is_control_flow, reachable_from
from towers.graph.op_types import RESHAPES, SIZES
from towers.graph.variable_access import read_from
from towers.recompute.segments import crossing_bytes, size_of

_SLACK = 1.07  # the fullest stage's memory over the best cut's, so that less crosses

Piece = collections.namedtuple('Piece', 'held kept gradients transient crossing')
"""Neighbouring operations that stay in one stage; all in bytes.

Fields:
  held: kept in the stage all the time for it: variables and their slots.
  kept: activations for its backward pass, of one micro-batch.
  gradients: of its variables.
  transient: allocated only while it runs.
  crossing: the tensors made up to its end that later pieces take.
"""

# The gradient takes shapes at the most.
_TAKES_NOTHING = RESHAPES | SIZES | frozenset([
    'Add', 'AddN', 'AddV2', 'AvgPool', 'AvgPool3D', 'BatchToSpaceND', 'BiasAdd', 'BroadcastTo',
    'Cast', 'Concat', 'ConcatV2', 'Const', 'DepthToSpace', 'Fill', 'Mean', 'MirrorPad', 'Neg',
    'OnesLike', 'Pack', 'Pad', 'PadV2', 'ResizeBilinear', 'ResizeNearestNeighbor',
    'Reverse', 'ReverseV2', 'Slice', 'SpaceToBatchND', 'SpaceToDepth',
    'Split', 'SplitV', 'StridedSlice', 'Sub', 'Sum', 'Tile', 'Transpose', 'Unpack', 'ZerosLike'])
_TAKES_OUTPUTS = frozenset([
    'Elu', 'Exp', 'Inv', 'LogSoftmax', 'Reciprocal', 'Relu', 'Relu6', 'Rsqrt', 'Selu', 'Sigmoid',
    'Softmax', 'SoftmaxCrossEntropyWithLogits', 'SparseSoftmaxCrossEntropyWithLogits', 'Sqrt',
    'Tanh'])
# An input is taken for the gradient of the other one only.
_PRODUCTS = frozenset([
    'BatchMatMul', 'BatchMatMulV2', 'BatchMatMulV3', 'Conv2D', 'Conv3D', 'DepthwiseConv2dNative',
    'Einsum', 'MatMul', 'Mul'])


def variable_bytes(variable, slots):
    """`(held, gradient)`: bytes of a variable with its slots (None: elsewhere); of its gradient."""
    size = bytes_of(variable)
    if slots is None or not getattr(variable, 'trainable', True):
        return size, 0
    return size * (1 + 2 * slots), size  # the session keeps the zeros that slots began with, too


def kept_bytes(operations):
    """Bytes of each operation's results that the backward pass needs: a `Counter` by its name."""
    trained = reachable_from([op for op in operations if any(map(read_from, op.inputs))],
                             operations)
    taken = {}
    for op in operations:
        if op.name in trained and op.type not in _TAKES_NOTHING:
            found = op.outputs if op.type in _TAKES_OUTPUTS else op.inputs
            if op.type in _PRODUCTS:
                has_gradient = [tensor.op.name in trained or bool(read_from(tensor))
                                for tensor in op.inputs]
                found = [tensor for place, tensor in enumerate(op.inputs) if any(
                    has_gradient[:place] + has_gradient[place + 1:])]
            for tensor in found:
                tensor = behind(tensor, RESHAPES)  # whose memory it is
                taken[tensor.name] = tensor
    kept = collections.Counter()
    for tensor in taken.values():
        if tensor.dtype != tf.resource and tensor.op.type != 'Const' and not read_from(tensor):
            kept[tensor.op.name] += size_of(tensor)
    return kept


def pieces_of(mine, kept, variables_of):
    """`(pieces, ends)`: the `Piece`s that operations may be cut into, and the last place of each.

    Each has something to compute; loops and branches (v1) stay in one piece. `kept` is as of
    `kept_bytes`, or {}; `variables_of` has by operation the `variable_bytes` of the variables that
    it reads first.
    """
    crossing, pieces, begin = crossing_bytes(mine, others=True), [], 0
    computing = [place for place, op in enumerate(mine) if op.type != 'Const']
    ends = [place for place in computing[:-1] if not all(
        map(is_control_flow, mine[place:place + 2]))] + [len(mine) - 1] * bool(computing)
    for place in ends:
        own = mine[begin:place + 1]
        variables = [each for one in own for each in variables_of.get(one.name, ())]
        pieces.append(Piece(
            sum(held for held, _ in variables), sum(kept.get(one.name, 0) for one in own),
            sum(gradient for _, gradient in variables), max(map(_transient, own)), crossing[place]))
        begin = place + 1
    return pieces, ends


def _transient(op):
    """Bytes that an operation takes while it runs: results and inputs, or their gradients."""
    return 0 if op.type in RESHAPES or op.type == 'Const' else sum(
        size_of(tensor) for tensor in list(op.inputs) + list(op.outputs)
        if tensor.dtype.is_floating)


class StageCost:
    """The memory of neighbouring pieces as one stage.

    When the backward pass is at piece j, the activations up to j are still kept, and the gradients
    from j on are there. So the memory of a stage is

        sum held + max_j (copies * sum_{i <= j} kept_i + transient_j + sum_{i >= j} gradients_i)
    with `copies` micro-batches whose activations are kept at the same time.
    """
    __slots__ = ('_held', '_copies', '_kept', '_worst')

    def __init__(self, copies: int, pieces: typing.Iterable[Piece] = ()):
        self._copies = copies
        self._held = self._kept = self._worst = 0
        for piece in pieces:
            self.add_last(piece)

    @property
    def memory(self) -> int:
        """Bytes at its worst moment."""
        return self._held + self._worst

    def add_last(self, piece: Piece) -> None:
        """Makes the stage larger."""
        self._held += piece.held
        self._kept += self._copies * piece.kept
        self._worst = piece.gradients + max(self._worst, self._kept + piece.transient)


def cut_evenly(pieces, copies):
    """Where to cut: the place of the last `Piece` of each stage but the last one. The fullest stage
    holds at most 7 % more than with the best cut; of such cuts it takes the cuts that the fewest
    bytes cross, then cuts between layers. `copies` are as of `StageCost`, one a stage."""
    limit, cuts = _SLACK * _first(
        0, StageCost(max(copies), pieces).memory,
        lambda limit: _latest(pieces, copies, limit) is not None), []
    for number in range(len(copies) - 1):
        start = cuts[-1] + 1 if cuts else 0
        last = _latest(pieces[start:], copies[number:], limit)[0] + start
        first = _first(start, last, lambda place: _latest(
            pieces[place + 1:], copies[number + 1:], limit) is not None)
        middle = (first + last) / 2.
        cuts.append(min(range(first, last + 1), key=lambda place: (
            # Between layers an activation is kept, and variables come next.
            pieces[place].crossing, not (pieces[place].kept and pieces[place + 1].held),
            abs(place - middle))))
    return cuts


def _first(low, high, holds):
    """The first number from `low` to `high` for which something holds, as for all later ones."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def _latest(pieces, copies, limit):
    """The latest cuts at which no stage holds more than a limit; None where there are none."""
    cuts, place = [], 0
    for number, each in enumerate(copies):
        stage, end = StageCost(each), len(pieces) - (len(copies) - 1 - number)
        begin = place
        while place < end:
            stage.add_last(pieces[place])
            if stage.memory > limit:
                break
            place += 1
        if place == begin:
            return None
        cuts.append(place - 1)
    return cuts[:-1] if place == len(pieces) else None
