"""Batches of static size: which numbers of the graph would be others for another batch.

Of x [50, 4], `tf.shape(x)[0]` is the constant 50, and does not show where it came from. A graph of
a static batch is therefore analysed up to three times:

1. For a prime number of examples, with each constant as it is (`scratch`). What is proven so holds
   if no number comes from the size of the batch.
2. For the size that it has (`Analysis.as_built`), where operations take no other, or sums over the
   examples are divided by a number. This tells where the examples are in this graph, and nothing of
   another batch. The roles of written variables, batch norms in sync and predictions go by it.
3. For a prime again, with some constants read as the number of examples, or a multiple of it
   (`Analysis.as_read`). What is proven so holds if these, and no other numbers, come from the size
   of the batch: the graph with these constants replaced is the graph of another batch.

This module finds the constants to read so. A tensor that goes together with the examples has to
have as many entries as they have; so it is followed back to the constant that gives it its length:

    x [50, 4] * tf.random_uniform([50, 4])      the first number of the shape
    tf.concat([x, tf.zeros([50, 8])], 1)        the first dimension of zeros
    tf.reshape(x [50, 3, 4], [150, 4])          the first number of the shape, three times 50
    tf.reduce_sum(losses [50]) / 50.            the divisor; where two could be, neither is read

A wrong reading proves nothing that is false: the verdict tells the reading as its condition.
"""

import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers.graph import graph_walk
from towers.graph.op_types import QUOTIENTS, SAME_NUMBERS
from towers.proof.rules import entries, joining, reductions
from towers.proof.stand_ins import ReadConstant, Readings
from towers.proof.states import INDEPENDENT, Kind, State
from towers.proof.table import RULES

_States = typing.Dict[str, State]
_MOST_NUMBERS = 64  # of a vector of sizes


class Found(typing.NamedTuple):
    """The constants that are read as computed from the number of examples."""
    readings: Readings
    other_divisors: typing.List[str]  # names of divisors any of which could be, but not all


def read_sizes(operations: typing.List[tf.Operation], states: _States, size: int) -> Found:
    """Finds the constants to read as computed from the number of examples.

    Args:
      operations: list of the operations of the forward pass.
      states: of their tensors, in the graph as it was built.
      size: the static number of examples.
    """
    if size < 2:  # of which every number is a multiple
        return Found({}, [])
    reader = _Reader(states, size)
    for op in operations:
        reader.read_inputs(op)
    other_divisors = reader.read_divisors(operations)
    return Found(reader.readings, other_divisors)


class _Reader:
    """Follows tensors that go together with the examples back to constants.

    Attributes:
      readings: what was found: `Readings`.
    """

    def __init__(self, states: _States, size: int):
        """Args:
          states: of the tensors, in the graph as it was built.
          size: the static number of examples.
        """
        self.readings: Readings = {}
        self._states = states
        self._size = size
        self._seen: typing.Set[typing.Tuple[str, int, int]] = set()  # lengths that were read

    def _state(self, tensor: tf.Tensor) -> State:
        """The state of a tensor; what was not analysed is the same on every tower."""
        return self._states.get(tensor.name, INDEPENDENT)

    # ---- what has to be of the batch

    def read_inputs(self, op: tf.Operation) -> None:
        """Reads the inputs of an operation that go together with the examples."""
        for result, tensors in _together(op):
            state = self._state(result)
            if state.kind is not Kind.PER_EXAMPLE:
                continue
            times = state.outer * state.inner
            if op.type in _SHAPE_ARGUMENTS:
                self._read_number(op.inputs[_SHAPE_ARGUMENTS[op.type]], state.axis, times)
            for tensor in tensors:
                if self._state(tensor).kind is Kind.INDEPENDENT:
                    self._read_length(tensor, _aligned(state.axis, result, tensor), times)

    def read_divisors(self, operations: typing.List[tf.Operation]) -> typing.List[str]:
        """Reads the divisors of sums over the examples, but none of those that divide the same sum
        one after the other.

        Returns:
          The names of these.
        """
        quotients = [op for op in operations if self._divides_sum(op)]
        before = {op.name: graph_walk.ancestors([op.inputs[0]]) for op in quotients}
        several = []
        for op in quotients:
            others = [other for other in quotients if other is not op and (
                other.name in before[op.name] or op.name in before[other.name])]
            if others:
                several.append(op.inputs[1].op.name)
            else:
                self._read_number(op.inputs[1], 0, self._times(op.inputs[1]))
        return several

    def _divides_sum(self, op: tf.Operation) -> bool:
        """Whether an operation divides a sum over the examples by a multiple of their number."""
        if op.type not in QUOTIENTS:
            return False
        dividend = self._state(op.inputs[0])
        return dividend.kind is Kind.SUM and not dividend.is_constant and (
            self._times(op.inputs[1]) > 0)

    def _times(self, tensor: tf.Tensor) -> int:
        """How many times the number of examples a static scalar is; 0 for any other tensor."""
        value = tf.get_static_value(tensor)
        is_number = value is not None and not value.shape and value > 0
        if not is_number or value % self._size:
            return 0
        return int(value) // self._size

    # ---- back to constants

    def _read_length(self, tensor: tf.Tensor, axis: int, times: int) -> None:
        """Reads the length of a dimension, of a tensor that is the same on every tower.

        Args:
          tensor: the tensor.
          axis: the dimension; less than 0 where the tensor lacks it.
          times: how many times the number of examples the length has to be.
        """
        shape = tensor.shape.as_list() if tensor.shape.ndims else []
        is_new = (tensor.name, axis, times) not in self._seen
        self._seen.add((tensor.name, axis, times))
        if not is_new or not 0 <= axis < len(shape) or shape[axis] != times * self._size:
            return
        op = tensor.op
        if op.type == 'Const':
            self._read_constant(op, {}, {axis: times})
        elif op.type in _SHAPES_OF_RESULTS:
            self._read_number(op.inputs[_SHAPES_OF_RESULTS[op.type]], axis, times)
        elif op.type == 'ExpandDims':
            place = self._place(op.inputs[1], len(shape))
            if place is not None and place != axis:
                self._read_length(op.inputs[0], axis - (place < axis), times)
        elif op.type == 'Tile':
            self._read_number(op.inputs[1], axis, times)
        elif op.type in _BY_ENTRY or op.type in _HAND_ON:
            for source in op.inputs:
                self._read_length(source, _aligned(axis, tensor, source), times)

    def _place(self, tensor: tf.Tensor, rank: int) -> typing.Optional[int]:
        """A dimension that is a static argument, from 0; None where it is not static."""
        value = tf.get_static_value(tensor)
        return None if value is None else int(np.ravel(value)[0]) % rank

    def _read_number(self, tensor: tf.Tensor, place: int, times: int) -> None:
        """Reads a number of a vector, or a scalar, that is the same on every tower.

        Args:
          tensor: the vector, such as a shape.
          place: of the number.
          times: how many times the number of examples it has to be.
        """
        number: typing.Optional[_Number] = _Number(tensor, place, times)
        while number is not None and number.tensor.op.type != 'Const':
            source_of = _SOURCES.get(number.tensor.op.type)
            number = None if source_of is None else source_of(number, self._size)
        if number is None:
            return
        value = tf.get_static_value(number.tensor)
        is_vector = value.size == 1 or value.dtype.kind in 'iu' and value.size <= _MOST_NUMBERS
        if not is_vector or number.place >= value.size:
            return
        if value.flat[number.place] == number.times * self._size:
            self._read_constant(number.tensor.op, {number.place: number.times}, {})

    def _read_constant(self, op: tf.Operation, numbers: typing.Dict[int, int],
                       lengths: typing.Dict[int, int]) -> None:
        """Adds numbers, or lengths of a uniform constant, to what is read of it. What cannot be
        read both ways stays as it is."""
        value = tf.get_static_value(op.outputs[0])
        before = self.readings.get(op.name, ReadConstant(value, {}, {}))
        found = ReadConstant(value, dict(before.numbers), dict(before.lengths))
        found.numbers.update(numbers)
        found.lengths.update(lengths)
        is_uniform = value.size > 0 and (value == value.flat[0]).all()
        can_be_read = not found.lengths or (
            is_uniform and len(found.lengths) == 1 and not found.numbers)
        if can_be_read:
            self.readings[op.name] = found


# ---- where a number comes from -------------------------------------------------------------------

class _Number(typing.NamedTuple):
    """A number of a vector, or a scalar."""
    tensor: tf.Tensor
    place: int  # of the number in the vector
    times: int  # how many times the number of examples it has to be


def _handed_on(number: _Number, size: int) -> typing.Optional[_Number]:
    """The same number of the first input."""
    return number._replace(tensor=number.tensor.op.inputs[0])


def _sliced(number: _Number, size: int) -> typing.Optional[_Number]:
    """The number `shape[1]` of a vector."""
    op = number.tensor.op
    begin = tf.get_static_value(op.inputs[1])
    is_index = op.get_attr('shrink_axis_mask') == 1 and op.inputs[0].shape.ndims == 1
    if begin is None or not is_index:
        return None
    return number._replace(tensor=op.inputs[0], place=int(begin[0]))


def _factor(number: _Number, size: int) -> typing.Optional[_Number]:
    """The factor of a product that comes from the number of examples, unless either could."""
    tensors = list(number.tensor.op.inputs)
    values = [tf.get_static_value(tensor) for tensor in tensors]
    if any(value is None or value.shape or value < 1 for value in values):
        return None
    found = []
    for tensor, value, other in zip(tensors, values, values[::-1]):
        if number.times % other == 0 and value == number.times // other * size:
            found.append(number._replace(tensor=tensor, times=number.times // int(other)))
    return found[0] if len(found) == 1 else None


def _stacked(number: _Number, size: int) -> typing.Optional[_Number]:
    """One of the scalars of `tf.stack([n, 4])`."""
    op = number.tensor.op
    if op.inputs[0].shape.ndims != 0:
        return None
    return number._replace(tensor=op.inputs[number.place], place=0)


def _joined(number: _Number, size: int) -> typing.Optional[_Number]:
    """A number of one of the vectors of `tf.concat([[n], [4]], 0)`."""
    place = number.place
    for part in list(number.tensor.op.inputs)[:-1]:
        length = part.shape.num_elements()
        if length is None:
            return None
        if place < length:
            return number._replace(tensor=part, place=place)
        place -= length
    return None


# ---- operations ----------------------------------------------------------------------------------

_SOURCES: typing.Dict[str, typing.Callable] = dict(
    {name: _handed_on for name in SAME_NUMBERS},
    StridedSlice=_sliced, Mul=_factor, Pack=_stacked, ConcatV2=_joined)
"""{type of an operation: the function from a number of its result to that of an input}"""

_SHAPE_ARGUMENTS = {'Reshape': 1, 'BroadcastTo': 1, 'Conv2DBackpropInput': 0,
                    'Conv3DBackpropInputV2': 0, 'DepthwiseConv2dNativeBackpropInput': 0}
"""{type of an operation on examples: the place of its argument that is the result's shape}"""

_SHAPES_OF_RESULTS = {'Fill': 0, 'BroadcastTo': 1, 'RandomUniform': 0, 'RandomStandardNormal': 0,
                      'TruncatedNormal': 0, 'StatelessRandomUniform': 0,
                      'StatelessRandomUniformV2': 0, 'StatelessRandomNormal': 0,
                      'StatelessRandomNormalV2': 0}
"""The same of operations that make a tensor of a shape."""

_HAND_ON = frozenset(['Identity', 'Cast', 'StopGradient', 'Enter', 'Switch', 'ZerosLike',
                      'OnesLike'])
_BY_ENTRY = frozenset(name for name, row in RULES.items() if row.rule in (
    entries.elementwise, entries.add, entries.multiply, entries.divide, entries.select,
    entries.linear))
_BESIDE = frozenset(name for name, row in RULES.items() if row.rule in (
    joining.concat, reductions.along_last))
_LOOPS = ('While', 'StatelessWhile')


def _together(op: tf.Operation
              ) -> typing.List[typing.Tuple[tf.Tensor, typing.List[tf.Tensor]]]:
    """`[(result, the inputs that have as many examples as it has)]` of an operation; [] where there
    are none."""
    tensors = list(op.inputs)
    if op.type in _LOOPS:
        return [(result, [tensor]) for result, tensor in zip(op.outputs, tensors)]
    if op.type in ('Merge', 'ReverseSequence') or op.type in _BY_ENTRY or op.type in _BESIDE:
        return [(op.outputs[0], tensors)]
    if op.type == 'CTCLoss':  # its last input has the length of each example
        return [(op.outputs[0], tensors[-1:])]
    if op.type in _SHAPE_ARGUMENTS:
        return [(op.outputs[0], [])]
    return []


def _aligned(axis: int, result: tf.Tensor, tensor: tf.Tensor) -> int:
    """The dimension of a tensor that broadcasting aligns with one of a result."""
    ranks = result.shape.ndims, tensor.shape.ndims
    return axis if None in ranks else axis - ranks[0] + ranks[1]
