"""What stands for the inputs of a batch in the scratch graph: lengths, and states.

A tensor of the batch gets a prime number of examples along its first dimension. Other lengths that
are not static are primes of their own.
"""

import itertools
import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers.graph.graph_walk import leaves_of
from towers.proof.states import (
    INDEPENDENT,
    Kind,
    Reason,
    Size,
    State,
    per_example,
    rows,
    sizes_state,
)

_FIRST_PRIME = 10007
_TO_LENGTHS = 3000  # no other length comes near that of the batch by a convolution or a slice
_MOST_DIMENSIONS = 16
_MOST_NUMBERS = 64  # of a constant that may be a shape

KINDS_OF_LENGTHS = ('each', 'dimension', 'all', 'none')
"""What stands for lengths that are not static: each another prime; the same one for the same
dimension of several inputs, or for all, since they may have to be equal; or none."""


class StandIn(typing.NamedTuple):
    """What stands for an input in the scratch graph."""
    shape: tf.TensorShape
    state: State


# ---- primes --------------------------------------------------------------------------------------

def primes_from(start: int) -> typing.Iterator[int]:
    """The primes from a number on, in order."""
    return filter(_is_prime, itertools.count(start))


def _is_prime(number: int) -> bool:
    """Whether no number from 2 to the root divides a number."""
    return all(number % divisor for divisor in range(2, int(number ** .5) + 1))


def prime_for(operations: typing.List[tf.Operation]) -> int:
    """The first prime, from 10007 on, that divides no length and no integer constant of operations,
    so that no length is taken for that of the batch."""
    large = [number for number in _numbers_in(operations) if number >= _FIRST_PRIME]
    for prime in primes_from(_FIRST_PRIME):
        if all(number % prime for number in large):
            return prime
    raise AssertionError('there is always one more prime')


def _numbers_in(operations: typing.List[tf.Operation]) -> typing.Set[int]:
    """The static lengths of all tensors, and the numbers in integer constants."""
    numbers: typing.Set[int] = set()
    for op in operations:
        for tensor in op.outputs:
            if tensor.shape.ndims:
                numbers.update(length for length in tensor.shape.as_list() if length)
        if op.type == 'Const' and op.outputs[0].dtype.is_integer:
            value = tf.get_static_value(op.outputs[0])
            if value is not None and value.size <= _MOST_NUMBERS:
                numbers.update(abs(int(number)) for number in np.ravel(value))
    return numbers


Lengths = typing.Callable[[int], typing.Optional[int]]
"""A function of a dimension that gives its length, or None."""


def lengths_of(kind: str, prime: int) -> Lengths:
    """What stands for lengths that are not static.

    Args:
      kind: one of `KINDS_OF_LENGTHS`.
      prime: the number of examples.
    """
    primes = primes_from(prime + _TO_LENGTHS)
    if kind == 'none':
        return lambda dimension: None
    if kind == 'each':
        return lambda dimension: next(primes)
    by_dimension = list(itertools.islice(primes, _MOST_DIMENSIONS))
    if kind == 'dimension':
        return lambda dimension: by_dimension[dimension]
    return lambda dimension: by_dimension[0]


# ---- constants of a static batch -----------------------------------------------------------------

class ReadConstant(typing.NamedTuple):
    """A constant of the program that is read as computed from the number of examples."""
    value: np.ndarray  # as it is in the program
    # {place among its numbers, in row-major order: how many times the number of examples it is}
    numbers: typing.Dict[int, int]
    # {dimension: how many times the number of examples its length is}, where all entries are equal
    lengths: typing.Dict[int, int]

    @property
    def is_multiple(self) -> bool:
        """Whether a number is twice the number of examples, or more."""
        return max([*self.numbers.values(), *self.lengths.values()]) > 1

    @property
    def state(self) -> State:
        """The state of the constant, read so."""
        if self.lengths:
            [(axis, times)] = self.lengths.items()
            return per_example(axis, inner=times, is_constant=True)
        sizes = [Size(0, self.numbers[place]) if place in self.numbers else Size(int(number))
                 for place, number in enumerate(self.value.flat)]
        return sizes_state(sizes)

    def of_batch(self, examples: int):
        """The value for a batch of another number of examples."""
        if not self.lengths:
            value = self.value.copy()
            for place, times in self.numbers.items():
                value.flat[place] = times * examples
            return tf.make_tensor_proto(value)
        [(axis, times)] = self.lengths.items()
        shape = list(self.value.shape)
        shape[axis] = times * examples
        return tf.make_tensor_proto(self.value.flat[0], shape=shape)


Readings = typing.Dict[str, ReadConstant]
"""{name of a constant: how it is read}"""


# ---- inputs --------------------------------------------------------------------------------------

def states_of_inputs(inputs: typing.Any) -> typing.Dict[str, State]:
    """{name of a tensor at which the batch enters: its state}."""
    lengths = lengths_of('none', _FIRST_PRIME)
    tensors = [leaf for leaf in leaves_of(inputs) if isinstance(leaf, tf.Tensor)]
    return {tensor.name: stand_in_of(tensor, inputs, _FIRST_PRIME, lengths).state
            for tensor in tensors}


def static_size(inputs: typing.Any) -> typing.Optional[int]:
    """The number of examples of a nest of tensors, where any of them says it; else None."""
    for leaf in tf.nest.flatten(inputs):
        if leaf is None or not leaf.shape.ndims:
            continue
        examples = leaf.shape.as_list()[0]
        if examples is not None:
            return examples
    return None


def have_one_size(inputs: typing.Any) -> bool:
    """Whether all tensors of a nest that say their number of examples say the same."""
    leaves = [leaf for leaf in tf.nest.flatten(inputs) if leaf is not None and leaf.shape.ndims]
    sizes = {leaf.shape.as_list()[0] for leaf in leaves}
    return len(sizes - {None}) == 1


def stand_in_of(tensor: tf.Tensor, inputs: typing.Any, prime: int, lengths: Lengths) -> StandIn:
    """What stands for a tensor at which the batch enters.

    A scalar is the same on every tower, any other tensor has the examples along dimension 0.

    Args:
      tensor: the tensor, or one of those of a sparse tensor.
      inputs: nest of all of them.
      prime: the number of examples.
      lengths: function of a dimension that gives its length where that is not static.
    """
    sparse = _sparse_input(tensor, inputs)
    if sparse is not None:
        return StandIn(tensor.shape, _state_of_sparse(tensor, sparse))
    if tensor.shape.ndims is None:
        reason = Reason(tensor.op.name, tensor.op.type, 'has no static rank')
        return StandIn(tensor.shape, State(Kind.UNKNOWN, reason=reason))
    if tensor.shape.ndims == 0:
        return StandIn(tensor.shape, INDEPENDENT)
    shape = [lengths(dimension) if length is None else length
             for dimension, length in enumerate(tensor.shape.as_list())]
    shape[0] = prime
    return StandIn(tf.TensorShape(shape), per_example(0))


def _sparse_input(tensor: tf.Tensor, inputs: typing.Any) -> typing.Optional[tf.SparseTensor]:
    """The sparse tensor of a nest that a tensor is a part of; None for others."""
    for leaf in tf.nest.flatten(inputs):
        if isinstance(leaf, tf.SparseTensor):
            parts = [leaf.indices.name, leaf.values.name, leaf.dense_shape.name]
            if tensor.name in parts:
                return leaf
    return None


def _state_of_sparse(tensor: tf.Tensor, sparse: tf.SparseTensor) -> State:
    """The state of the indices, the values or the shape of a sparse tensor [n, …]."""
    selection = sparse.values.name
    if tensor.name == sparse.values.name:
        return rows(0, selection)
    if tensor.name == sparse.indices.name:
        return State(Kind.INDICES, selection=selection)
    lengths = None if sparse.shape.ndims is None else sparse.shape.as_list()
    if lengths is None or None in lengths[1:]:
        reason = Reason(tensor.op.name, tensor.op.type, 'is a shape that is not static')
        return State(Kind.UNKNOWN, reason=reason)
    return sizes_state([Size(0, 1)] + [Size(length) for length in lengths[1:]])
