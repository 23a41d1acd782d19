"""The memory that operations of a forward pass take as one stage, and cuts for even stages.

Which results the backward pass keeps is told by the types of the operations: a gradient function
takes the inputs of its operation, its outputs, or neither.

Its test is `tests/capture/test_stage_cuts.py`.
"""

import collections
import typing

import tensorflow.compat.v1 as tf

from towers.graph.graph_walk import bytes_of, is_control_flow, reachable_from, source_through
from towers.graph.op_types import RESHAPES, SIZES
from towers.graph.variable_access import read_from
from towers.recompute.segments import crossing_bytes, size_of

_SLACK = 1.07  # the fullest stage's memory over the best cut's, so that less crosses


class Piece(typing.NamedTuple):
    """Neighbouring operations that stay in one stage; all in bytes.

    Attributes:
      held: kept in the stage all the time for it: variables and their slots.
      kept: activations for its backward pass, of one micro-batch.
      gradients: of its variables.
      transient: allocated only while it runs.
      crossing: the tensors made up to its end that later pieces take.
    """
    held: int
    kept: int
    gradients: int
    transient: int
    crossing: int


class VariableBytes(typing.NamedTuple):
    """The memory that a variable takes in its stage, in bytes."""
    held: int  # all the time, with its slots
    gradient: int


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


def variable_bytes(variable: tf.Variable, slots: typing.Optional[int]) -> VariableBytes:
    """The bytes of a variable with so many slots; `slots` is None where these and the gradient are
    elsewhere."""
    size = bytes_of(variable)
    if slots is None or not getattr(variable, 'trainable', True):
        return VariableBytes(held=size, gradient=0)
    # The session keeps the zeros that slots began with, too.
    return VariableBytes(held=size * (1 + 2 * slots), gradient=size)


def kept_bytes(operations: typing.Sequence[tf.Operation]) -> typing.Counter[str]:
    """Bytes of each operation's results that the backward pass needs: a `Counter` by its name."""
    reading = [op for op in operations if any(map(read_from, op.inputs))]
    trained = reachable_from(reading, operations)
    needed = {}
    for op in operations:
        if op.name not in trained:
            continue
        for tensor in _needed_for_gradient(op, trained):
            tensor = source_through(tensor, RESHAPES)  # whose memory it is
            needed[tensor.name] = tensor
    kept: typing.Counter[str] = collections.Counter()
    for tensor in needed.values():
        is_variable = tensor.dtype == tf.resource or read_from(tensor)
        if tensor.op.type != 'Const' and not is_variable:
            kept[tensor.op.name] += size_of(tensor)
    return kept


def _needed_for_gradient(op: tf.Operation,
                         trained: typing.Container[str]) -> typing.List[tf.Tensor]:
    """The inputs or outputs that the gradient function of an operation takes; `trained` are names
    of the operations that depend on a variable."""
    if op.type in _TAKES_NOTHING:
        return []
    if op.type in _TAKES_OUTPUTS:
        return list(op.outputs)
    inputs = list(op.inputs)
    if op.type not in _PRODUCTS:
        return inputs
    have_gradients = []
    for tensor in inputs:
        have_gradients.append(tensor.op.name in trained or bool(read_from(tensor)))
    needed = []
    for place, tensor in enumerate(inputs):
        others = have_gradients[:place] + have_gradients[place + 1:]
        if any(others):
            needed.append(tensor)
    return needed


class Pieces(typing.NamedTuple):
    """The pieces that operations may be cut into."""
    pieces: typing.List[Piece]
    ends: typing.List[int]  # the place of the last operation of each


def pieces_of(operations: typing.List[tf.Operation], kept: typing.Mapping[str, int],
              variables_of: typing.Mapping[str, typing.Sequence[VariableBytes]]) -> Pieces:
    """Finds the pieces that operations may be cut into.

    Each has something to compute; loops and branches (v1) stay in one piece.

    Args:
      operations: in the order of making.
      kept: as `kept_bytes` returns it; or {}.
      variables_of: {name of an operation: bytes of the variables that it reads first}.
    """
    crossing = crossing_bytes(operations, others=True)
    ends = _ends_of_pieces(operations)
    pieces = []
    begin = 0
    for end in ends:
        held = kept_of_piece = gradients = 0
        for op in operations[begin:end + 1]:
            kept_of_piece += kept.get(op.name, 0)
            for variable in variables_of.get(op.name, ()):
                held += variable.held
                gradients += variable.gradient
        transient = max(map(_transient, operations[begin:end + 1]))
        pieces.append(Piece(held, kept_of_piece, gradients, transient, crossing[end]))
        begin = end + 1
    return Pieces(pieces, ends)


def _ends_of_pieces(operations: typing.Sequence[tf.Operation]) -> typing.List[int]:
    """The place of the last operation of each piece."""
    computing = [place for place, op in enumerate(operations) if op.type != 'Const']
    if not computing:
        return []
    ends = []
    for place in computing[:-1]:
        is_within_control_flow = all(map(is_control_flow, operations[place:place + 2]))
        if not is_within_control_flow:
            ends.append(place)
    return ends + [len(operations) - 1]


def _transient(op: tf.Operation) -> int:
    """Bytes that an operation takes while it runs: results and inputs, or their gradients."""
    if op.type in RESHAPES or op.type == 'Const':
        return 0
    tensors = list(op.inputs) + list(op.outputs)
    return sum(size_of(tensor) for tensor in tensors if tensor.dtype.is_floating)


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
        self._held = 0
        self._kept = 0
        self._worst = 0
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


def cut_evenly(pieces: typing.Sequence[Piece], copies: typing.Sequence[int]) -> typing.List[int]:
    """Where to cut: the place of the last piece of each stage but the last one.

    The fullest stage holds at most 7 % more than with the best cut; of such cuts it takes the cuts
    that the fewest bytes cross, then cuts between layers. `copies` says of each
    stage how many micro-batches' activations it keeps at the same time.
    """
    def can_be_cut(limit: int) -> bool:
        return _latest_cuts(pieces, copies, limit) is not None

    whole = StageCost(max(copies), pieces).memory
    limit = _SLACK * _first(0, whole, can_be_cut)
    cuts: typing.List[int] = []
    for stage in range(len(copies) - 1):
        start = cuts[-1] + 1 if cuts else 0
        first, last = _possible_cuts(pieces, copies[stage:], start, limit)
        middle = (first + last) / 2.
        candidates = []
        for place in range(first, last + 1):
            # Between layers an activation is kept, and variables come next.
            is_between_layers = pieces[place].kept and pieces[place + 1].held
            candidates.append((pieces[place].crossing, not is_between_layers,
                               abs(place - middle), place))
        cuts.append(min(candidates)[-1])
    return cuts


def _possible_cuts(pieces: typing.Sequence[Piece], copies: typing.Sequence[int], start: int,
                   limit: float) -> typing.Tuple[int, int]:
    """`(first, last)`: the first and the last place for the end of a stage, with which neither it
    nor the stages after it hold more than a limit.

    Args:
      pieces: all pieces.
      copies: how many micro-batches' activations are kept at the same time, in this stage and in
        each one after it.
      start: the place of the stage's first piece.
      limit: in bytes.
    """
    def can_end(place: int) -> bool:
        """Whether the stages after this one fit, if this one ends at a place."""
        return _latest_cuts(pieces[place + 1:], copies[1:], limit) is not None

    # The caller has made the limit so high that there are such cuts: they are not None.
    cuts = _latest_cuts(pieces[start:], copies, limit)
    last = start + cuts[0]  # type: ignore[index]
    # The later this stage ends, the less the others hold, so `_first` can bisect.
    return _first(start, last, can_end), last


def _first(low: int, high: int, holds: typing.Callable) -> int:
    """The first number from `low` to `high` for which something holds, as for all later ones."""
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _latest_cuts(pieces: typing.Sequence[Piece], copies: typing.Sequence[int],
                 limit: float) -> typing.Optional[typing.List[int]]:
    """The latest cuts at which no stage holds more than a limit; None where there are none."""
    cuts = []
    place = 0
    for position, copies_of_stage in enumerate(copies):
        num_stages_after = len(copies) - 1 - position
        end = len(pieces) - num_stages_after  # each has a piece
        stage = StageCost(copies_of_stage)
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
