"""Rules for tensors that are made with a given shape: fills, random numbers, ranges, broadcasts.

A tensor that is made with a shape (2 n, 4) has entries of the examples along its first dimension.
"""

import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.graph import graph_walk
from towers.graph.op_types import ADDS, SETS
from towers.proof.contexts import NUMBER_OF_EXAMPLES
from towers.proof.rules.common import (
    axes_of_examples,
    is_broadcast_along,
    is_multiple_of_examples,
    is_same_on_towers,
    kinds_of,
    required,
    static_rank,
)
from towers.proof.sizes import Sizes, as_number, sizes_in
from towers.proof.states import INDEPENDENT, Kind, Size, State, per_example, unknown
from towers.proof.view import View

_States = typing.Sequence[State]

_NO_SHAPE_OF_EXAMPLES = 'has a shape that is not known to be of the examples'
_UNIFORM = INDEPENDENT._replace(is_uniform=True)
"""The state of a tensor that is the same on every tower, and has equal entries."""


def tensor_of_shape(op: tf.Operation, shape: typing.Optional[Sizes], shape_state: State) -> State:
    """The state of a tensor of a given shape whose values do not depend on the examples.

    Ones of the shape (2 n, 4) are of the examples, with two entries of each example. Ones of the
    shape (3, 4) are the same on every tower. Ones of the shape (n, n) or (n + 1,) are unknown.

    Args:
      op: the operation that makes the tensor.
      shape: its shape; None where it is not known.
      shape_state: the state of the input that has the shape.

    Raises:
      NotKnown: the shape is not known, and may depend on the examples.
    """
    if shape_state.kind is Kind.INDEPENDENT:  # even where the shape is not static
        return _UNIFORM
    known_shape = required(shape, op, _NO_SHAPE_OF_EXAMPLES)
    axes = axes_of_examples(known_shape)
    if not axes:
        return _UNIFORM
    axis = axes[0]
    length = known_shape[axis]
    if len(axes) > 1 or not is_multiple_of_examples(length):
        return unknown(op, 'has a shape that is not a multiple of the number of examples')
    return per_example(axis, inner=length.per_example, is_constant=True)


def repeated(op: tf.Operation, tensor: tf.Tensor, value: State, shape: typing.Optional[Sizes],
             shape_state: State, view: View) -> State:
    """The state of a value that an operation repeats along the dimensions of a shape: w [1, 4]
    becomes [n, 4], the same row for each example.

    The value must have one entry along the examples' dimension of the shape, or lack the dimension.
    Three rows, w [3, 4], fit batches of one size only; or the result would have them in turn, so
    that an example would get another row in another shard.

    Args:
      op: the operation.
      tensor: the value.
      value: its state, with sizes as numbers.
      shape: the shape; of a tile, the numbers of repetitions; None where it is not known.
      shape_state: the state of the shape.
      view: `View`.
    """
    if value.kind is not Kind.INDEPENDENT:
        return unknown(op, 'repeats %s' % value.kind.value)
    result = tensor_of_shape(op, shape, shape_state).with_marks_of(value, shape_state)
    if result.kind is Kind.PER_EXAMPLE:
        axis_from_end = result.axis - static_rank(op.outputs[0], op, view)
        if not is_broadcast_along(axis_from_end, tensor, view):
            return unknown(op, 'repeats several entries as often as there are examples')
        return result
    # `tensor_of_shape` supposes equal entries. The entries of a vector (1, 2) are not equal.
    has_equal_entries = value.is_uniform or view.rank(tensor) == 0
    return result._replace(is_uniform=result.is_uniform and has_equal_entries)


def fill(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.fill`, `tf.zeros`: the same value for every example, if a dimension of the shape is the
    examples'. The value must not depend on the shard, not even on the number of examples."""
    shape_state, value_state = states
    shape = sizes_in(op.inputs[0], shape_state, view)
    value = as_number(op, value_state, view)
    return repeated(op, op.inputs[1], value, shape, shape_state, view)


def zeros_like(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.zeros_like`, `tf.ones_like`: zeros or ones of the shape of a tensor.

        like x [n, 4]                  PER_EXAMPLE, constant
        like x [rows, 4]               ROWS, as many of each example as in x
        like a value of one example    ONE_EXAMPLE, since each example may have another shape
        like a mean, …                 the same on every tower, with equal entries

    The result has the marks of the tensor, since a statistic of the shard may have decided its
    shape.
    """
    state = states[0]
    if state.kind is Kind.PER_EXAMPLE:
        return state._replace(is_constant=True)
    if state.kind in (Kind.ROWS, Kind.ONE_EXAMPLE):
        return state
    return _UNIFORM.with_marks_of(state)


def random_numbers(op: tf.Operation, states: _States, view: View) -> State:
    """Random numbers of a shape: for (n, 4) each example has 4 numbers of its own, as on one
    device.

    Numbers that a stateless operation computes from a seed are the same on every tower, if the
    towers have the seed in common: those for the examples by their places in the shard, so that the
    first examples of all shards get the same numbers.
    """
    shape_state = states[0]
    parameters = states[1:]
    if not kinds_of(parameters) <= {Kind.INDEPENDENT}:
        return unknown(op, 'draws from a distribution of the examples')
    shape = sizes_in(op.inputs[0], shape_state, view)
    result = tensor_of_shape(op, shape, shape_state)
    if op.type.startswith('Stateless') and not _has_seed_of_each_tower(op, parameters, view):
        if result.kind is not Kind.INDEPENDENT:
            return unknown(op, 'draws the same numbers for the examples of each shard')
        return result._replace(is_uniform=False).with_marks_of(*states)
    # `tensor_of_shape` supposes one value for all examples. Here each example draws its own.
    return result._replace(is_constant=False, is_random=True).with_marks_of(*states)


def _has_seed_of_each_tower(op: tf.Operation, parameters: _States, view: View) -> bool:
    """Whether a stateless random operation has another seed on each tower: the seed is drawn by the
    tower; or it is computed from a variable that the forward pass counts up, as in Keras 3, so that
    `gradients.stateless_random.give_own_seeds` gives each tower a seed of its own."""
    if any(state.is_random for state in parameters):
        return True
    if compat.in_control_flow(op):  # there `give_own_seeds` leaves the seed as it is
        return False
    before_seed = graph_walk.ancestors(list(op.inputs)[1:])
    return any(other.type in SETS | ADDS and other.inputs[0].op.name in before_seed
               for other in view.graph.get_operations())


def range_of(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.range(n)`: the numbers 0, 1, …, n - 1 are the positions of the examples in the shard.

    A range between limits that all towers share is the same on every tower. Any other range that
    depends on n, such as `tf.range(2 n)`, is unknown.
    """
    if all(map(is_same_on_towers, states)):
        return INDEPENDENT.with_marks_of(*states)
    if not kinds_of(states) <= {Kind.INDEPENDENT, Kind.SIZES}:
        return unknown(op, 'has a length that is computed from the examples')
    if end_of_count(op.inputs, states, view) == NUMBER_OF_EXAMPLES:
        return State(Kind.POSITION)
    return unknown(op, 'numbers the examples of the shard')


def end_of_count(limits: typing.Iterable[tf.Tensor], states: typing.Iterable[State],
                 view: View) -> typing.Optional[Sizes]:
    """The end of a range that counts from 0 in steps of 1: (n,) for `tf.range(n)`. None for any
    other range, and where the end is not known.

    Args:
      limits: the begin, end and step of the range, each a scalar.
      states: their states.
      view: `View`.
    """
    begin, end, step = [sizes_in(*limit, view) for limit in zip(limits, states)]
    is_from_0_by_1 = begin == (Size(0),) and step == (Size(1),)
    return end if is_from_0_by_1 else None


def broadcast_to(op: tf.Operation, states: _States, view: View) -> State:
    """`tf.broadcast_to`.

    A value [4] or [1, 4] that is the same on every tower becomes a value [n, 4] with a row for each
    example. A value [n, 4] of the examples may get new dimensions, as [2, n, 4].
    """
    value_state, shape_state = states
    shape = sizes_in(op.inputs[1], shape_state, view)
    value = as_number(op, value_state, view)
    if value.kind is Kind.PER_EXAMPLE:
        shape = required(shape, op, _NO_SHAPE_OF_EXAMPLES)
        rank = static_rank(op.inputs[0], op, view)
        new_dimensions = len(shape) - rank  # broadcasting puts these first
        return _broadcast_examples(op, value, shape, new_dimensions)
    return repeated(op, op.inputs[0], value, shape, shape_state, view)


def _broadcast_examples(op: tf.Operation, value: State, shape: Sizes, new_dimensions: int) -> State:
    """The state of values of the examples that are broadcast to a shape.

    The examples' dimension in the shape must be the examples' dimension of the values. An n in
    another dimension, as in the shape (n, n) for x [n] or [n, 1], would repeat the examples.

    Args:
      op: the operation.
      value: the state of the values, PER_EXAMPLE.
      shape: the shape.
      new_dimensions: how many dimensions the shape has before the dimensions of the values.
    """
    axis = value.axis + new_dimensions
    if axes_of_examples(shape) not in ([axis], []):
        return unknown(op, 'repeats the examples')
    return value._replace(axis=axis)
