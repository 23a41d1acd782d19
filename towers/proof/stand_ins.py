"""What stands for the inputs of a batch in the scratch graph: lengths, and states.

A tensor of the batch gets a prime number of examples along its first dimension. Other lengths that
are not static are primes of their own. A constant of the program which is taken for a multiple of
the number of examples gets the value that it would have for the prime.
"""

import itertools
import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers.graph.graph_walk import leaves_of
from towers.proof.states import (
    INDEPENDENT,
    Kind,
    Size,
    State,
    per_example,
    rows,
    sizes_state,
    unknown,
)

_FIRST_PRIME = 10007
_DISTANCE_OF_LENGTHS = 3000
"""From the number of examples to other primes. A convolution or a slice changes a length by a few,
and so makes no other prime the number of examples."""

LEAST_STAND_IN = _FIRST_PRIME + _DISTANCE_OF_LENGTHS
"""The least number that may be a prime which stands for a length that is not static.

There are two sets of such primes. `lengths_of` gives primes from this number on, as lengths of
inputs in the scratch graph. Where a length is not static in the scratch graph either,
`View.stand_in` gives a prime above 2 ** 31, which is a number in a state alone."""

LEAST_FROM_STAND_IN = LEAST_STAND_IN - 1000
"""The least number that a slice, a convolution or a difference may make of such a prime and of a
small number."""

_MOST_DIMENSIONS = 16
_MOST_NUMBERS = 64  # a larger constant is no shape

KINDS_OF_LENGTHS = ('each', 'dimension', 'all', 'none')
"""What stands for the lengths of inputs that are not static, beside the number of examples.

    each         another prime for each length
    dimension    the same prime for the same dimension of all inputs
    all          one prime for all lengths
    none         no prime: these lengths stay not static

Two lengths that the model takes for equal need the same prime. `scratch` tries the kinds in this
order, until shape inference has no objection."""


class StandIn(typing.NamedTuple):
    """What stands for an input in the scratch graph."""
    shape: tf.TensorShape
    state: State


def known_lengths(tensor: tf.Tensor) -> typing.List[typing.Optional[int]]:
    """The lengths of a tensor's dimensions, None where one is not static; [] of a scalar, and where
    the rank is not static."""
    shape = tensor.shape
    return shape.as_list() if shape.ndims else []


# ---- primes --------------------------------------------------------------------------------------

def primes_from(start: int) -> typing.Iterator[int]:
    """The primes from a number on, in order."""
    return filter(_is_prime, itertools.count(start))


def _is_prime(number: int) -> bool:
    """Whether no number from 2 to the root divides a number."""
    return all(number % divisor for divisor in range(2, int(number ** .5) + 1))


def prime_for(operations: typing.List[tf.Operation]) -> int:
    """The first prime, from 10007 on, that divides no length and no integer constant of operations,
    so that no other length is taken for the number of examples."""
    # A prime divides no number that is smaller than itself.
    large_numbers = [number for number in _numbers_in(operations) if number >= _FIRST_PRIME]
    for prime in primes_from(_FIRST_PRIME):
        if all(number % prime for number in large_numbers):
            return prime
    raise AssertionError('there is always one more prime')


def _numbers_in(operations: typing.List[tf.Operation]) -> typing.Set[int]:
    """The static lengths of all tensors, and the numbers in integer constants, which may become
    lengths."""
    numbers: typing.Set[int] = set()
    for op in operations:
        for tensor in op.outputs:
            numbers.update(filter(None, known_lengths(tensor)))  # without None: not static
        if op.type == 'Const' and op.outputs[0].dtype.is_integer:
            numbers.update(_numbers_of_constant(op))
    return numbers


def _numbers_of_constant(op: tf.Operation) -> typing.Set[int]:
    """The numbers in a constant that may be a shape, without their signs; none for a larger
    constant."""
    value = tf.get_static_value(op.outputs[0])
    if value is None or value.size > _MOST_NUMBERS:
        return set()
    return {abs(int(number)) for number in np.ravel(value)}


Lengths = typing.Callable[[int], typing.Optional[int]]
"""A function of a dimension that gives its length, or None."""


def lengths_of(kind: str, examples: int) -> Lengths:
    """What stands for lengths of inputs that are not static, as lengths in the scratch graph.

    Args:
      kind: one of `KINDS_OF_LENGTHS`.
      examples: the number of examples, a prime or the size that the program was built with.
    """
    primes = primes_from(max(LEAST_STAND_IN, examples + _DISTANCE_OF_LENGTHS))
    if kind == 'none':
        return lambda dimension: None
    if kind == 'each':
        return lambda dimension: next(primes)
    first_primes = list(itertools.islice(primes, _MOST_DIMENSIONS))
    if kind == 'dimension':
        return lambda dimension: first_primes[dimension]
    return lambda dimension: first_primes[0]  # 'all'


# ---- constants of a static batch -----------------------------------------------------------------

class SizeConstant(typing.NamedTuple):
    """A constant of the program that is taken for a multiple of the number of examples.

    Either some of its numbers are multiples, as in the shape [50, 4] of a batch of 50; or all its
    entries are equal, and the length of one dimension is a multiple, as in zeros [50, 4].
    """
    # its value in the program
    value: np.ndarray
    # {place among its numbers, in row-major order: how many times the number of examples it is}
    numbers: typing.Dict[int, int]
    # {the dimension: how many times the number of examples its length is}; {} if numbers are
    # multiples
    lengths: typing.Dict[int, int]

    @property
    def most_times(self) -> int:
        """How many times the number of examples its largest number, or length, is."""
        return max([*self.numbers.values(), *self.lengths.values()])

    @property
    def state(self) -> State:
        """The state of the constant."""
        if self.lengths:
            [(axis, times)] = self.lengths.items()  # there is only one
            return per_example(axis, inner=times, is_constant=True)
        sizes = []
        for place, number in enumerate(self.value.flat):
            if place in self.numbers:
                sizes.append(Size(constant=0, per_example=self.numbers[place]))
            else:
                sizes.append(Size(int(number)))
        return sizes_state(sizes)

    def of_batch(self, examples: int):
        """The constant for a batch of another number of examples, as a `TensorProto`."""
        if self.lengths:
            [(axis, times)] = self.lengths.items()  # there is only one
            shape = list(self.value.shape)
            shape[axis] = times * examples
            return tf.make_tensor_proto(self.value.flat[0], shape=shape)
        value = self.value.copy()
        for place, times in self.numbers.items():
            value.flat[place] = times * examples
        return tf.make_tensor_proto(value)


SizeConstants = typing.Dict[str, SizeConstant]
"""{name of a constant of the program: what is taken for a multiple of the number of examples}"""


# ---- inputs --------------------------------------------------------------------------------------

def states_of_inputs(inputs: typing.Any) -> typing.Dict[str, State]:
    """{name of a tensor at which the batch enters: its state}."""
    # Any numbers do: a state does not depend on lengths.
    examples = _FIRST_PRIME
    lengths = lengths_of('none', examples)
    states = {}
    for leaf in leaves_of(inputs):
        if isinstance(leaf, tf.Tensor):
            states[leaf.name] = stand_in_of(leaf, inputs, examples, lengths).state
    return states


def static_size(inputs: typing.Any) -> typing.Optional[int]:
    """The number of examples of a nest of tensors, if the static shape of any tensor has it; else
    None."""
    sizes = _static_sizes(inputs)
    return sizes[0] if sizes else None


def have_one_size(inputs: typing.Any) -> bool:
    """Whether the static numbers of examples that tensors of a nest have are the same number."""
    return len(set(_static_sizes(inputs))) == 1


def have_unknown_lengths(inputs: typing.Any) -> bool:
    """Whether a tensor of a nest has a length, beside its number of examples, that is not
    static."""
    return any(None in known_lengths(leaf)[1:] for leaf in leaves_of(inputs))


def _static_sizes(inputs: typing.Any) -> typing.List[int]:
    """The static numbers of examples of the tensors of a nest, each the first length of a
    tensor."""
    sizes = []
    for leaf in tf.nest.flatten(inputs):
        if leaf is None:  # an absent input
            continue
        sizes += known_lengths(leaf)[:1]
    return [size for size in sizes if size is not None]


def stand_in_of(tensor: tf.Tensor, inputs: typing.Any, examples: int,
                lengths: Lengths) -> StandIn:
    """What stands for a tensor at which the batch enters.

    A scalar is the same on every tower, any other tensor has the examples along dimension 0.

    Args:
      tensor: the tensor; or the indices, the values or the shape of a sparse tensor.
      inputs: nest of all inputs of the batch.
      examples: the number of examples.
      lengths: function of a dimension that gives its length where that is not static.
    """
    sparse = _sparse_input(tensor, inputs)
    if sparse is not None:
        return StandIn(tensor.shape, _state_of_sparse(tensor, sparse))
    if tensor.shape.ndims is None:
        return StandIn(tensor.shape, unknown(tensor.op, 'has no static rank'))
    if tensor.shape.ndims == 0:
        return StandIn(tensor.shape, INDEPENDENT)
    shape = tensor.shape.as_list()
    for dimension, length in enumerate(shape):
        if length is None:
            shape[dimension] = lengths(dimension)
    shape[0] = examples
    return StandIn(tf.TensorShape(shape), per_example(0))


def _sparse_input(tensor: tf.Tensor, inputs: typing.Any) -> typing.Optional[tf.SparseTensor]:
    """The sparse tensor of a nest whose indices, values or shape a tensor is; None for any other
    tensor."""
    for leaf in tf.nest.flatten(inputs):
        if isinstance(leaf, tf.SparseTensor):
            components = [leaf.indices.name, leaf.values.name, leaf.dense_shape.name]
            if tensor.name in components:
                return leaf
    return None


def _state_of_sparse(tensor: tf.Tensor, sparse: tf.SparseTensor) -> State:
    """The state of the indices, the values or the shape of a sparse tensor [n, …].

    Each example has any number of values: the values are ROWS. Indices and values have the same
    rows: the name of the values is the selection of both.
    """
    selection = sparse.values.name
    if tensor.name == sparse.values.name:
        return rows(0, selection)
    if tensor.name == sparse.indices.name:
        return State(Kind.INDICES, selection=selection)
    if sparse.shape.ndims is None or None in sparse.shape.as_list()[1:]:
        return unknown(tensor.op, 'is a shape that is not static')
    sizes = [Size(constant=0, per_example=1)]
    for length in sparse.shape.as_list()[1:]:
        sizes.append(Size(length))
    return sizes_state(sizes)
