"""The memory that operations of a forward pass take as one stage, and cuts for even stages.

The types of the operations tell which results are kept for the backward pass: a gradient function
takes the inputs of its operation, the outputs, or neither.

Its test is `tests/capture/test_stage_cuts.py`.
"""

import collections
import typing

import tensorflow.compat.v1 as tf

from towers.graph.graph_walk import (
    by_name,
    bytes_of,
    is_control_flow,
    reachable_from,
    source_through,
)
from towers.graph.op_types import RESHAPES, SIZES
from towers.graph.variable_access import read_from
from towers.recompute.segments import crossing_bytes, size_of

_SLACK = 1.07  # the fullest stage may take 7 % more than at best, so that fewer bytes cross


class Piece(typing.NamedTuple):
    """The memory of neighbouring operations that stay in one stage, in bytes.

    Attributes:
      held: memory that is taken all the time: variables and their slots.
      kept: activations of one micro-batch, which are kept for the backward pass.
      gradients: the gradients of the piece's variables.
      transient: memory that is taken only while an operation runs.
      crossing: the tensors that this piece and earlier pieces make, and that later pieces take.
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


# Types of operations, by what their gradient functions take: no tensor of the operation, or the
# shape of one alone;
_TAKES_NOTHING = RESHAPES | SIZES | frozenset([
    'Add', 'AddN', 'AddV2', 'AvgPool', 'AvgPool3D', 'BatchToSpaceND', 'BiasAdd', 'BroadcastTo',
    'Cast', 'Concat', 'ConcatV2', 'Const', 'DepthToSpace', 'Fill', 'Mean', 'MirrorPad', 'Neg',
    'OnesLike', 'Pack', 'Pad', 'PadV2', 'ResizeBilinear', 'ResizeNearestNeighbor',
    'Reverse', 'ReverseV2', 'Slice', 'SpaceToBatchND', 'SpaceToDepth',
    'Split', 'SplitV', 'StridedSlice', 'Sub', 'Sum', 'Tile', 'Transpose', 'Unpack', 'ZerosLike'])
# its outputs;
_TAKES_OUTPUTS = frozenset([
    'Elu', 'Exp', 'Inv', 'LogSoftmax', 'Reciprocal', 'Relu', 'Relu6', 'Rsqrt', 'Selu', 'Sigmoid',
    'Softmax', 'SoftmaxCrossEntropyWithLogits', 'SparseSoftmaxCrossEntropyWithLogits', 'Sqrt',
    'Tanh'])
# for the gradient of one input, the other input. The gradient functions of all other types take all
# inputs.
_PRODUCTS = frozenset([
    'BatchMatMul', 'BatchMatMulV2', 'BatchMatMulV3', 'Conv2D', 'Conv3D', 'DepthwiseConv2dNative',
    'Einsum', 'MatMul', 'Mul'])


def variable_bytes(variable: tf.Variable, slots: typing.Optional[int]) -> VariableBytes:
    """The bytes that a variable takes in its stage.

    Args:
      variable: the variable.
      slots: how many slots the optimizer keeps beside each trained variable; None where slots and
        gradients are not in the stage.
    """
    size = bytes_of(variable)
    if slots is None or not variable.trainable:
        return VariableBytes(held=size, gradient=0)
    # Each slot counts twice: the session also keeps the zeros that the slot began with, since they
    # are constants, which it has computed once.
    return VariableBytes(held=size * (1 + 2 * slots), gradient=size)


# ---- what the backward pass keeps ----------------------------------------------------------------

def kept_bytes(operations: typing.Sequence[tf.Operation]) -> typing.Counter[str]:
    """Bytes of the results that the backward pass needs: a `Counter` by the name of the operation
    whose results they are.

    Args:
      operations: the operations of the forward pass.
    """
    operations_reading_variables = [op for op in operations if any(map(read_from, op.inputs))]
    # An operation that depends on no variable has no gradient.
    differentiated = reachable_from(operations_reading_variables, operations)
    needed: typing.Dict[str, tf.Tensor] = {}  # by name, since several gradients may take one tensor
    for op in operations:
        if op.name in differentiated:
            tensors = _needed_for_gradient(op, differentiated)
            needed.update(by_name(map(_owner_of_memory, tensors)))
    kept: typing.Counter[str] = collections.Counter()
    for tensor in needed.values():
        if not _is_there_anyway(tensor):
            kept[tensor.op.name] += size_of(tensor)
    return kept


def _is_there_anyway(tensor: tf.Tensor) -> bool:
    """Whether a tensor takes no memory of a step: a constant, or a variable's handle or value."""
    if tensor.op.type == 'Const' or tensor.dtype == tf.resource:
        return True
    return bool(read_from(tensor))


def _owner_of_memory(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor whose memory a tensor has: a reshape hands on its input's memory."""
    return source_through(tensor, RESHAPES)


def _needed_for_gradient(op: tf.Operation,
                         differentiated: typing.Container[str]) -> typing.List[tf.Tensor]:
    """The inputs or outputs that the gradient function of an operation takes; `differentiated` are
    the names of the operations that depend on a variable."""
    if op.type in _TAKES_NOTHING:
        return []
    if op.type in _TAKES_OUTPUTS:
        return list(op.outputs)
    if op.type in _PRODUCTS:
        return _needed_factors(op, differentiated)
    return list(op.inputs)


def _needed_factors(op: tf.Operation,
                    differentiated: typing.Container[str]) -> typing.List[tf.Tensor]:
    """The factors of a product that its gradient function takes: a factor is taken for the gradient
    of the other factor. For x w, with x an input of the model and w a variable, the list has x
    alone, for the gradient of w. Nobody needs the gradient of x, which would take w."""
    have_gradients = []  # for each factor
    for factor in op.inputs:
        is_variable = bool(read_from(factor))
        have_gradients.append(is_variable or factor.op.name in differentiated)
    needed = []
    for index, factor in enumerate(op.inputs):
        have_others_gradients = have_gradients[:index] + have_gradients[index + 1:]
        if any(have_others_gradients):
            needed.append(factor)
    return needed


# ---- pieces --------------------------------------------------------------------------------------

class Pieces(typing.NamedTuple):
    """The pieces that operations may be cut into."""
    pieces: typing.List[Piece]
    ends: typing.List[int]  # for each piece, the index of its last operation


def pieces_of(operations: typing.List[tf.Operation], kept: typing.Mapping[str, int],
              variables_of: typing.Mapping[str, typing.Sequence[VariableBytes]]) -> Pieces:
    """Finds the pieces that operations may be cut into.

    Each piece has something to compute; loops and branches (v1) stay in one piece.

    Args:
      operations: the operations, in the order in which they were made.
      kept: {name of an operation: bytes of its results that the backward pass needs}; {} without a
        backward pass.
      variables_of: {name of an operation: bytes of the variables that it reads first}.
    """
    # Tensors that are made elsewhere count: an input crosses the cuts between the first and the
    # last operation that takes it.
    crossing = crossing_bytes(operations, counts_inputs=True)
    ends = _ends_of_pieces(operations)
    pieces = []
    begin = 0
    for end in ends:
        within = operations[begin:end + 1]
        variables: typing.List[VariableBytes] = []
        for op in within:
            variables += variables_of.get(op.name, ())
        pieces.append(Piece(
            held=sum(variable.held for variable in variables),
            kept=sum(kept.get(op.name, 0) for op in within),
            gradients=sum(variable.gradient for variable in variables),
            transient=max(map(_transient, within)),
            crossing=crossing[end]))
        begin = end + 1
    return Pieces(pieces, ends)


def _ends_of_pieces(operations: typing.Sequence[tf.Operation]) -> typing.List[int]:
    """For each piece, the index of its last operation; [] if nothing is computed.

    A piece ends with an operation that computes. So a constant is in the piece of the next
    operation, which is likely to take it. No piece ends within a loop or branch (v1), nor between
    two loops or branches that follow each other. The last piece ends with the last operation.
    """
    computing = [index for index, op in enumerate(operations) if op.type != 'Const']
    if not computing:
        return []
    ends = []
    all_but_last = computing[:-1]
    for index in all_but_last:
        pair = operations[index:index + 2]  # the operation and the next one
        is_within_control_flow = all(map(is_control_flow, pair))
        if not is_within_control_flow:
            ends.append(index)
    return ends + [len(operations) - 1]


def _transient(op: tf.Operation) -> int:
    """Bytes that an operation takes while it runs: of its results and inputs, or of the gradients
    of these."""
    if op.type in RESHAPES or op.type == 'Const':  # it allocates nothing
        return 0
    tensors = list(op.inputs) + list(op.outputs)
    return sum(size_of(tensor) for tensor in tensors if tensor.dtype.is_floating)


# ---- cuts ----------------------------------------------------------------------------------------

class StageCost:
    """The memory of neighbouring pieces as one stage.

    When the backward pass is at piece j, the activations up to j are still kept, and the gradients
    from j on are there. The activations of other micro-batches count as if their backward passes
    were at piece j, too. So the memory of a stage is

        sum held + max_j (copies * sum_{i <= j} kept_i + transient_j + sum_{i >= j} gradients_i)

    with `copies` micro-batches whose activations are kept at the same time.
    """
    __slots__ = ('_held', '_copies', '_kept', '_worst')

    def __init__(self, copies: int, pieces: typing.Iterable[Piece] = ()):
        """
        Args:
          copies: how many micro-batches' activations are kept at the same time.
          pieces: the pieces of the stage, in order.
        """
        self._copies = copies
        self._held = 0  # sum held
        self._kept = 0  # copies * sum kept
        self._worst = 0  # max_j (…), see the formula above
        for piece in pieces:
            self.add_last(piece)

    @property
    def memory(self) -> int:
        """Bytes at the worst moment of the backward pass."""
        return self._held + self._worst

    def add_last(self, piece: Piece) -> None:
        """Makes the stage larger by a piece at its end.

        The backward pass begins at the new piece, when all activations are kept. The gradients of
        the new piece are still there when the backward pass is at an earlier piece.
        """
        self._held += piece.held
        self._kept += self._copies * piece.kept
        worst_at_earlier_piece = self._worst + piece.gradients
        at_new_piece = self._kept + piece.transient + piece.gradients
        self._worst = max(worst_at_earlier_piece, at_new_piece)


def cut_evenly(pieces: typing.Sequence[Piece], copies: typing.Sequence[int]) -> typing.List[int]:
    """Finds where to cut pieces into stages.

    The fullest stage holds at most 7 % more than it would with the evenest cuts. Within that limit,
    stage by stage, the cut is taken that the fewest bytes cross; see `_best_cut`.

    Args:
      pieces: the pieces, in order.
      copies: for each stage, how many micro-batches' activations it keeps at the same time.

    Returns:
      For each stage but the last one, the index of its last piece.
    """
    def can_be_cut(limit: int) -> bool:
        """Whether there are stages none of which holds more than a limit."""
        return _latest_cuts(pieces, copies, limit) is not None

    memory_of_one_stage = StageCost(max(copies), pieces).memory
    least_limit = _first_number(0, memory_of_one_stage, can_be_cut)
    limit = _SLACK * least_limit
    cuts: typing.List[int] = []
    start = 0  # the first piece of the stage
    for stage in range(len(copies) - 1):  # the last stage ends with the last piece
        first, last = _possible_cuts(pieces, copies[stage:], start, limit)
        cut = _best_cut(pieces, first, last)
        cuts.append(cut)
        start = cut + 1
    return cuts


def _best_cut(pieces: typing.Sequence[Piece], first: int, last: int) -> int:
    """The best of the cuts after the pieces from `first` to `last`: the cut that the fewest bytes
    cross. If several are equal in this, a cut between layers is better than another; if several are
    equal in both, the cut next to the middle is best."""
    middle = (first + last) / 2.

    def rank(index: int) -> typing.Tuple[int, bool, float]:
        """What is to be least at the cut after the piece of an index, the most important first."""
        # A layer ends with an activation that is kept, and the next one begins with variables.
        is_between_layers = bool(pieces[index].kept and pieces[index + 1].held)
        return pieces[index].crossing, not is_between_layers, abs(index - middle)

    return min(range(first, last + 1), key=rank)


def _possible_cuts(pieces: typing.Sequence[Piece], copies: typing.Sequence[int], start: int,
                   limit: float) -> typing.Tuple[int, int]:
    """Finds where a stage may end, so that neither this stage nor the stages after it hold more
    than a limit.

    Args:
      pieces: all pieces.
      copies: how many micro-batches' activations are kept at the same time, in this stage and in
        each stage after it.
      start: the index of the stage's first piece.
      limit: the limit in bytes.

    Returns:
      `(first, last)`: the indices of the first and the last piece at which it may end.
    """
    def can_end(index: int) -> bool:
        """Whether the later stages fit, if this stage ends with the piece of an index."""
        return _latest_cuts(pieces[index + 1:], copies[1:], limit) is not None

    # Not None: the limit of `cut_evenly` leaves room for such cuts.
    latest_cuts = _latest_cuts(pieces[start:], copies, limit)
    last = start + latest_cuts[0]  # type: ignore[index]
    # The later this stage ends, the less the later stages hold: `can_end` is True from some piece
    # on.
    first = _first_number(start, last, can_end)
    return first, last


def _first_number(low: int, high: int, holds: typing.Callable) -> int:
    """The first number from `low` to `high` for which a condition holds, found by bisection: the
    condition has to hold for `high`, and for each number after one for which it holds."""
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _latest_cuts(pieces: typing.Sequence[Piece], copies: typing.Sequence[int],
                 limit: float) -> typing.Optional[typing.List[int]]:
    """The latest cuts at which no stage holds more than a limit; None where there are none.

    Each stage in turn takes as many pieces as it can hold, but leaves one to each stage after it.
    The arguments and the result are as in `cut_evenly`, but for the `limit` in bytes.
    """
    if len(pieces) < len(copies):  # a stage would have no piece
        return None
    cuts = []
    start = 0
    for stage, copies_of_stage in enumerate(copies):
        num_stages_after = len(copies) - 1 - stage
        candidates = pieces[start:len(pieces) - num_stages_after]
        num_pieces = _num_pieces_within(candidates, copies_of_stage, limit)
        if num_pieces == 0:
            return None  # one piece is above the limit
        start += num_pieces
        cuts.append(start - 1)
    if start < len(pieces):
        return None  # the last stage cannot hold all that is left
    return cuts[:-1]  # no cut is after the last stage


def _num_pieces_within(pieces: typing.Sequence[Piece], copies: int, limit: float) -> int:
    """How many of the pieces, from the first on, a stage can take without holding more than a limit
    in bytes; `copies` is how many micro-batches' activations it keeps at the same time."""
    stage = StageCost(copies)
    for count, piece in enumerate(pieces):
        stage.add_last(piece)
        if stage.memory > limit:
            return count
    return len(pieces)
