"""Batches of static size: which numbers of the graph would differ for a batch of another size.

Of x [50, 4], `tf.shape(x)[0]` is the constant 50, and does not show where it came from. A graph of
a static batch is therefore analysed up to three times:

1. For a prime number of examples, with each constant as it is (`scratch`). What is proven so holds
   if no number comes from the size of the batch.
2. For the size that it has (`Analysis.as_built`), where operations take no other size, or make
   results of this size. This tells where the examples are in this graph, and nothing of another
   batch. The roles of written variables, batch norms in sync and predictions go by it.
3. For a prime again, with some constants taken for multiples of the number of examples
   (`Analysis.with_size_constants`). What is proven so holds if these, and no other numbers, come
   from the size of the batch: with these constants replaced, it is the graph for another batch.

This module finds these constants, the size constants. A tensor that an operation combines with the
examples, for instance entry by entry, must have as many entries as there are examples. So the
tensor is followed back to the constant that gives it its length:

    x [50, 4] * tf.random_uniform([50, 4])      the first number of the shape
    tf.concat([x, tf.zeros([50, 8])], 1)        the first dimension of zeros
    tf.reshape(x [50, 3, 4], [150, 4])          the first number of the shape, three times 50
    x [50, 4][:50]                              the end of the slice
    tf.reduce_sum(losses [50]) / 50.            the divisor; of two such divisors, neither
    … / tf.reduce_sum(tf.ones([50]))            the first dimension of the ones

A constant that is taken for a size constant by mistake proves nothing that is false: the verdict
names the size constants in its condition.

In all of this module `times` says how many times the number of examples a number, or a length, has
to be.

Words of other modules used here: `QUOTIENTS`: the types of the operations that divide their first
input by the second; of a `State`, `axis`: the dimension along which the examples are,
`entries_of_each`: how many entries of each example are along it, and `is_constant`: whether the
value is known to be the same for each example; of a `SizeConstant`, `numbers` and `lengths`: which
of its numbers, or dimensions, are multiples of the number of examples.
"""

import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers.graph import graph_walk
from towers.graph.graph_walk import names_of
from towers.graph.op_types import LOOPS_V2, QUOTIENTS
from towers.proof.rules import entries, joining, recurrent, reductions
from towers.proof.stand_ins import SizeConstant, SizeConstants, known_lengths
from towers.proof.states import INDEPENDENT, Kind, State
from towers.proof.table import RULES
from towers.proof.traced_numbers import (
    Number,
    has_item_for_each_dimension,
    static_scalar,
    traced_to_constant,
)

_States = typing.Dict[str, State]
_LARGEST_SHAPE = 64  # a constant with more numbers is no shape

# ---- what is known of operations -----------------------------------------------------------------

_SHAPES_OF_RESULTS_WITH_EXAMPLES = {
    'Reshape': 1, 'BroadcastTo': 1, 'Conv2DBackpropInput': 0, 'Conv3DBackpropInputV2': 0,
    'DepthwiseConv2dNativeBackpropInput': 0, 'AvgPoolGrad': 0, 'AvgPool3DGrad': 0}
"""{type of an operation on examples: the place of the input that is the shape of its result}"""

_LENGTHS_OF_RESULTS = {
    'Fill': 0, 'BroadcastTo': 1, 'RandomUniform': 0, 'RandomStandardNormal': 0,
    'TruncatedNormal': 0, 'StatelessRandomUniform': 0, 'StatelessRandomUniformV2': 0,
    'StatelessRandomNormal': 0, 'StatelessRandomNormalV2': 0, 'Tile': 1}
"""{type of an operation that makes a tensor: the place of the input that gives its lengths}

That input is the shape of the tensor, or, of `Tile`, how often each dimension is repeated."""

_KEEPS_LENGTHS = frozenset([
    'Identity', 'Cast', 'StopGradient', 'Enter', 'Switch', 'ZerosLike', 'OnesLike'])


def _types_with_rule(*rules: typing.Callable) -> typing.FrozenSet[str]:
    """The types of the operations whose row in the table has any of these rules."""
    return frozenset(name for name, row in RULES.items() if row.rule in rules)


_BY_ENTRY = _types_with_rule(entries.elementwise, entries.add, entries.multiply, entries.divide,
                             entries.select, entries.linear)
# Concatenations; losses that take the logits and the labels of each example; and recurrent cells,
# which take x and the state of each example.
_BESIDE_EACH_OTHER = _types_with_rule(
    joining.concat, reductions.along_last, recurrent.cell, recurrent.lstm_over_time)
_ALL_INPUTS_WITH_EXAMPLES = _BY_ENTRY | _BESIDE_EACH_OTHER | {'Merge', 'ReverseSequence'}
"""The types of operations of which each input has as many examples as the result, or none."""


class _Result(typing.NamedTuple):
    """A result of an operation, and the inputs that go together with it."""
    tensor: tf.Tensor
    inputs: typing.List[tf.Tensor]  # if the result has the examples, these have to have as many


def _results_with_inputs(op: tf.Operation) -> typing.List[_Result]:
    """Some results of an operation, each with the inputs that have to have as many examples as the
    result; [] for an operation for which no such inputs are known."""
    if op.type in LOOPS_V2:
        return [_Result(result, [initial]) for result, initial in zip(op.outputs, op.inputs)]
    if op.type in _ALL_INPUTS_WITH_EXAMPLES:
        return [_Result(op.outputs[0], list(op.inputs))]
    if op.type == 'CTCLoss':
        sequence_lengths = op.inputs[3]  # a length for each example
        return [_Result(op.outputs[0], [sequence_lengths])]
    return []


def _aligned(axis: int, result: tf.Tensor, tensor: tf.Tensor) -> int:
    """The dimension of an input that broadcasting aligns with a dimension of the result, beginning
    with the last dimensions; less than 0 where the input lacks it.

    Args:
      axis: the dimension of the result.
      result: the result.
      tensor: the input.
    """
    if result.shape.ndims is None or tensor.shape.ndims is None:
        # The ranks count as equal. If they are not, this may be a wrong dimension: then the search
        # ends, unless that dimension happens to have the length (`_has_length`).
        return axis
    return axis - result.shape.ndims + tensor.shape.ndims


# ---- the search for size constants ---------------------------------------------------------------

class Found(typing.NamedTuple):
    """The size constants of a forward pass."""
    size_constants: SizeConstants
    # Names of the divisors that were not followed. Several of them divide one sum: one alone can
    # come from the number of examples, and nothing tells which.
    other_divisors: typing.List[str]


def find_size_constants(operations: typing.List[tf.Operation], states: _States,
                        batch_size: int) -> Found:
    """Finds the constants to take for multiples of the number of examples.

    Args:
      operations: list of the operations of the forward pass.
      states: the states of their tensors, in the graph as it was built.
      batch_size: the static number of examples.
    """
    if batch_size < 2:  # every number is a multiple of 1
        return Found({}, [])
    search = _Search(states, batch_size)
    for op in operations:
        search.follow_inputs(op)
    other_divisors = search.follow_divisors(operations)
    return Found(search.size_constants, other_divisors)


def divisors_of_values(operations: typing.Iterable[tf.Operation], states: _States,
                       batch_size: int) -> typing.List[str]:
    """The names of the constants that divide values of the examples, and are multiples of the
    static number of examples.

    Nothing in the graph tells whether such a constant was computed from that number: of x [50, 4],
    the 50. in `x / 50.` may be a temperature; the gradient of `tf.reduce_mean(x)` divides by 200.

    Args:
      operations: the operations of the forward pass.
      states: the states of their tensors.
      batch_size: the static number of examples.
    """
    if batch_size < 2:  # every number is a multiple of 1
        return []
    search = _Search(states, batch_size)
    return [op.inputs[1].op.name for op in operations if search.divides_values(op)]


class _Search:
    """Follows tensors that go together with the examples back to constants.

    Attributes:
      size_constants: what was found: `SizeConstants`.
    """

    def __init__(self, states: _States, batch_size: int):
        """Args:
          states: the states of the tensors, in the graph as it was built.
          batch_size: the static number of examples.
        """
        self.size_constants: SizeConstants = {}
        self._states = states
        self._batch_size = batch_size
        # name of a tensor, dimension, `times`: the lengths that were followed
        self._seen: typing.Set[typing.Tuple[str, int, int]] = set()

    def _state(self, tensor: tf.Tensor) -> State:
        """The state of a tensor; a tensor that was not analysed is the same on every tower."""
        return self._states.get(tensor.name, INDEPENDENT)

    # ---- lengths and numbers that have to come from the size of the batch

    def follow_inputs(self, op: tf.Operation) -> None:
        """Follows the inputs of an operation that go together with the examples in its result.

        In `x [50, 4] * noise [50, 4]` the result has the examples along dimension 0, so that the
        first length of the noise has to be their number. An input that has the examples itself, as
        x has, gets its length from the batch, and is not followed.
        """
        if op.type in _SHAPES_OF_RESULTS_WITH_EXAMPLES:
            self._follow_shape_of_result(op)
        if op.type == 'StridedSlice':
            self._follow_end_of_slice(op)
        for result in _results_with_inputs(op):
            state = self._state(result.tensor)
            if state.kind is not Kind.PER_EXAMPLE:
                continue
            for tensor in result.inputs:
                if self._state(tensor).kind is Kind.INDEPENDENT:
                    axis = _aligned(state.axis, result.tensor, tensor)
                    self._follow_length(tensor, axis, times=state.entries_of_each)

    def _follow_shape_of_result(self, op: tf.Operation) -> None:
        """Follows the number of examples in the input that is the shape of an operation's result:
        in `tf.reshape(x, [50, 12])` the first number of the shape."""
        state = self._state(op.outputs[0])
        if state.kind is Kind.PER_EXAMPLE:
            shape = op.inputs[_SHAPES_OF_RESULTS_WITH_EXAMPLES[op.type]]
            self._follow_number(
                Number(shape, place=state.axis, times=state.entries_of_each))

    def _follow_end_of_slice(self, op: tf.Operation) -> None:
        """Follows the end of a slice that takes all examples of x [50, 4]: in
        `tf.strided_slice(x, (0, 0), (50, 3))` the first number of the end."""
        value, _, end, _ = op.inputs
        state = self._state(value)
        number_of_items = end.shape.num_elements()
        if state.kind is not Kind.PER_EXAMPLE or number_of_items is None:
            return
        if not has_item_for_each_dimension(op):
            return
        takes_all = self._state(op.outputs[0]).kind is Kind.PER_EXAMPLE
        has_end = state.axis < number_of_items and not op.get_attr('end_mask') & 1 << state.axis
        if takes_all and has_end:
            self._follow_number(Number(end, place=state.axis, times=state.entries_of_each))

    def follow_divisors(self, operations: typing.List[tf.Operation]) -> typing.List[str]:
        """Follows the divisors of sums over the examples, but no divisors that divide the same sum
        one after the other: only one of these can come from the number of examples.

        Returns:
          The names of the divisors that were not followed.
        """
        quotients = [op for op in operations if self._divides_sum(op)]
        in_chain = _in_chain_with_another(quotients)
        not_followed = []
        for op in quotients:
            divisor = op.inputs[1]
            if op.name in in_chain:
                not_followed.append(divisor.op.name)
            else:
                self._follow_divisor(divisor)
        return not_followed

    def _divides_sum(self, op: tf.Operation) -> bool:
        """Whether an operation divides a sum over the examples by a multiple of their number."""
        if op.type not in QUOTIENTS:
            return False
        dividend = self._state(op.inputs[0])
        # The sum of the same value for each example is a multiple of their number. In
        # `tf.reduce_sum(tf.ones_like(y)) / 50.` no values of the examples are divided.
        is_number_of_examples = dividend.is_constant
        is_sum = dividend.kind is Kind.SUM and not is_number_of_examples
        return is_sum and self._times_of_divisor(op.inputs[1]) > 0

    def divides_values(self, op: tf.Operation) -> bool:
        """Whether an operation divides values of the examples by a multiple of their number."""
        if op.type not in QUOTIENTS or not self._state(op.inputs[0]).is_by_example:
            return False
        return self._times_of(op.inputs[1]) > 0

    def _times_of_divisor(self, divisor: tf.Tensor) -> int:
        """How many times the number of examples a divisor is; 0 for a divisor that is no multiple.

        A multiple is a static number, as in `total / 50.`, or the sum of ones [50], as in
        `tf.losses`.
        """
        if divisor.op.type == 'Sum':
            ones = divisor.op.inputs[0]
            return self._times_of_length(ones)
        return self._times_of(divisor)

    def _follow_divisor(self, divisor: tf.Tensor) -> None:
        """Follows a divisor that is a multiple of the number of examples."""
        times = self._times_of_divisor(divisor)
        if divisor.op.type == 'Sum':
            ones = divisor.op.inputs[0]
            self._follow_length(ones, axis=0, times=times)
        else:
            self._follow_number(Number(divisor, place=0, times=times))

    def _times_of(self, tensor: tf.Tensor) -> int:
        """How many times the number of examples a static scalar is; 0 for any other tensor."""
        value = static_scalar(tensor)
        if value is None or value <= 0 or value % self._batch_size:
            return 0
        return int(value) // self._batch_size

    def _times_of_length(self, tensor: tf.Tensor) -> int:
        """How many times the number of examples the first length of a tensor is; 0 where it is no
        multiple, and for a tensor with the examples, whose length is their number in any batch."""
        lengths = known_lengths(tensor)
        if not lengths or self._state(tensor).kind is not Kind.INDEPENDENT:
            return 0
        length = lengths[0]
        if length is None or length % self._batch_size:
            return 0
        return length // self._batch_size

    # ---- back to constants

    def _follow_length(self, tensor: tf.Tensor, axis: int, times: int) -> None:
        """Follows a tensor that is the same on every tower back to the number that gives one of its
        dimensions its length.

        Args:
          tensor: the tensor.
          axis: the dimension; less than 0 where the tensor lacks it.
          times: how many times the number of examples the length has to be.
        """
        key = tensor.name, axis, times
        if key in self._seen:
            return
        self._seen.add(key)
        if not _has_length(tensor, axis, times * self._batch_size):
            # The tensor is the same for all examples: beside x [50, 4], a tensor [4] or [1, 4] is
            # broadcast.
            return
        op = tensor.op
        if op.type == 'Const':
            self._add_constant(op, numbers={}, lengths={axis: times})
        elif op.type in _LENGTHS_OF_RESULTS:
            lengths = op.inputs[_LENGTHS_OF_RESULTS[op.type]]
            self._follow_number(Number(lengths, place=axis, times=times))
        elif op.type == 'ExpandDims':
            self._follow_length_before_new_dimension(op, axis, times)
        elif op.type in _BY_ENTRY or op.type in _KEEPS_LENGTHS:
            for source in op.inputs:
                self._follow_length(source, _aligned(axis, tensor, source), times)

    def _follow_length_before_new_dimension(self, op: tf.Operation, axis: int, times: int) -> None:
        """Follows a length of the result of `tf.expand_dims` back to the length of its input.

        Args:
          op: the operation.
          axis: the dimension of its result.
          times: how many times the number of examples the length has to be.
        """
        place = tf.get_static_value(op.inputs[1])
        if place is None:
            return
        new_axis = int(np.ravel(place)[0]) % op.outputs[0].shape.ndims
        # The new dimension has the length 1, and so is not the dimension that is followed.
        axis_of_input = axis if axis < new_axis else axis - 1
        self._follow_length(op.inputs[0], axis_of_input, times)

    def _follow_number(self, number: Number) -> None:
        """Follows a number that is the same on every tower back to the constant that has it. The
        constant is no size constant if it has another number at that place."""
        in_constant = traced_to_constant(number, self._batch_size)
        if in_constant is None:
            return
        value = tf.get_static_value(in_constant.tensor)
        is_shape = value.dtype.kind in 'iu' and value.size <= _LARGEST_SHAPE
        is_single = value.size == 1  # of any type: a divisor, 50.
        place = in_constant.place
        if place >= value.size or not (is_shape or is_single):
            return
        if value.flat[place] == in_constant.times * self._batch_size:
            self._add_constant(in_constant.tensor.op, {place: in_constant.times}, lengths={})

    def _add_constant(self, op: tf.Operation, numbers: typing.Dict[int, int],
                      lengths: typing.Dict[int, int]) -> None:
        """Adds a constant to the size constants, with what was found of it before.

        For another batch the constant has to be made anew. Zeros [50, 4] become zeros [n, 4]. What
        different numbers [50, 4], or zeros [50, 50], become is not known: such a constant stays as
        it is.

        Args:
          op: the constant.
          numbers: {place of a number in it: `times`}.
          lengths: {dimension of it: `times`}.
        """
        value = tf.get_static_value(op.outputs[0])
        before = self.size_constants.get(op.name, SizeConstant(value, {}, {}))
        found = SizeConstant(
            value, {**before.numbers, **numbers}, {**before.lengths, **lengths})
        if _can_be_made_anew(found):
            self.size_constants[op.name] = found


def _can_be_made_anew(constant: SizeConstant) -> bool:
    """Whether it is known what a constant becomes for a batch of another size: either some of its
    numbers change; or one of its lengths changes, and all its entries are equal."""
    if not constant.lengths:
        return True
    value = constant.value
    has_equal_entries = value.size > 0 and (value == value.flat[0]).all()
    has_only_one_length = len(constant.lengths) == 1 and not constant.numbers
    return has_equal_entries and has_only_one_length


def _has_length(tensor: tf.Tensor, axis: int, length: int) -> bool:
    """Whether a tensor has this static length along a dimension; False where it lacks the
    dimension."""
    lengths = known_lengths(tensor)
    return 0 <= axis < len(lengths) and lengths[axis] == length


def _in_chain_with_another(quotients: typing.List[tf.Operation]) -> typing.Set[str]:
    """The names of the quotients that divide the result of another quotient, or whose result
    another quotient divides: both of `(total / 50.) / 100.`."""
    names = names_of(quotients)
    in_chain: typing.Set[str] = set()
    for op in quotients:
        names_before = graph_walk.ancestors([op.inputs[0]])
        quotients_before = (names_before & names) - {op.name}  # in a loop it comes before itself
        if quotients_before:
            in_chain |= quotients_before | {op.name}
    return in_chain
