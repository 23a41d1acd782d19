"""Loops over time that end with the longest example: `tf.nn.dynamic_rnn(sequence_length=lengths)`.

Such a loop makes `min(steps, max(lengths))` iterations, a number that differs between shards. A
result does not depend on this number under a condition on each example and each iteration from the
example's own length on: the iteration leaves the carried value of the example as it is, or writes
zeros into an array. A place of an array in which nothing is written is read as zeros, too.

    h = tf.where(t >= lengths, h, cell(x[t], h))               h stays as it is
    outputs = outputs.write(t, tf.where(t >= lengths, 0, y))   zeros are written

Let the shard make K iterations, and the whole batch more. Then K is less than `steps`, which are
the same for both, and so at least the length of each example of the shard. The iterations from K
on, which the shard does not make, change none of its examples.

The functions here look at the operations of a loop, of control flow v1 or v2; `Loop` and `Carried`
have what differs between these.
"""

import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers.graph import graph_walk
from towers.proof.states import ROW_OF_EACH_EXAMPLE, Kind, State
from towers.proof.view import View

_SAME = ('Identity', 'StopGradient')  # types of operations that give the same numbers


class Loop(typing.NamedTuple):
    """A loop, as the functions of this module read it."""
    test: tf.Tensor  # the condition for one more iteration
    outside: typing.Callable  # (tensor) -> that tensor before the loop, where it enters as it is
    is_counter: typing.Callable  # (tensor) -> whether it is the number of the iteration, from 0


class Carried(typing.NamedTuple):
    """A value that a loop carries, as the functions of this module read it."""
    after: tf.Tensor  # the value after an iteration
    is_before: typing.Callable  # (tensor) -> whether it is this value before the iteration
    begins_empty: bool  # whether it is an array or a list in which nothing is before the loop


class Longest(typing.NamedTuple):
    """The maximum that ends a loop."""
    statistic: str  # the name of the maximum
    lengths: tf.Tensor  # the length of each example, of which it is the maximum


# ---- what ends a loop ----------------------------------------------------------------------------

def longest_of(loop: Loop, view: View) -> typing.Optional[Longest]:
    """The maximum over lengths that ends a loop; None where it ends in another way.

    All other limits of the counter have to be the same for a shard and for the batch.
    """
    limits = _limits_of(loop.test, loop)
    if limits is None:
        return None
    lengths_by_maximum = {}  # {name of a maximum over the examples: of which lengths}
    others = []
    for limit in limits:
        if _is_longest(limit, view):
            lengths_by_maximum[limit.op.name] = _source(limit.op.inputs[0], loop)
        else:
            others.append(limit)
    if len(lengths_by_maximum) != 1:
        return None
    [(statistic, lengths)] = lengths_by_maximum.items()
    if not all(_is_alike(limit, statistic, view) for limit in others):
        return None
    return Longest(statistic, lengths)


def _limits_of(test: tf.Tensor, loop: Loop) -> typing.Optional[typing.List[tf.Tensor]]:
    """The limits in a test that counters are below limits: of `t < min(steps, longest)` these are
    `steps` and `longest`. None of any other test."""
    test = graph_walk.source_through(test, ('Identity',))
    if test.op.type == 'LogicalAnd':
        limits: typing.List[tf.Tensor] = []
        for part in test.op.inputs:
            limits_of_part = _limits_of(part, loop)
            if limits_of_part is None:
                return None
            limits += limits_of_part
        return limits
    if test.op.type != 'Less' or not loop.is_counter(test.op.inputs[0]):
        return None
    return _compared(test.op.inputs[1], loop)


def _compared(limit: tf.Tensor, loop: Loop) -> typing.List[tf.Tensor]:
    """The tensors, before the loop, of which a limit is the minimum or the maximum; else itself."""
    limit = _source(limit, loop)
    if limit.op.type not in ('Minimum', 'Maximum'):
        return [limit]
    left, right = limit.op.inputs
    return _compared(left, loop) + _compared(right, loop)


def _source(tensor: tf.Tensor, loop: Loop) -> tf.Tensor:
    """The tensor, before the loop, that a value is handed on from."""
    entering = loop.outside(graph_walk.source_through(tensor, _SAME))
    return graph_walk.source_through(entering, _SAME)


def _is_longest(limit: tf.Tensor, view: View) -> bool:
    """Whether a limit is the maximum of a vector of one number for each example."""
    if limit.op.type != 'Max':
        return False
    lengths = limit.op.inputs[0]
    state = view.state_or_none(lengths)
    is_vector = view.rank(lengths) == 1
    return is_vector and state is not None and state.layout == ROW_OF_EACH_EXAMPLE


def _is_alike(limit: tf.Tensor, statistic: str, view: View) -> bool:
    """Whether a limit is the same for a shard and for the batch, and does not depend on a maximum.

    Args:
      limit: the tensor.
      statistic: the name of the maximum.
      view: `View`.
    """
    state = view.state_or_none(limit)
    if state is None or state.kind not in (Kind.INDEPENDENT, Kind.SIZES):
        return False
    return not state.depends_on_size and statistic not in state.shard_statistics


def without(state: State, longest: Longest) -> State:
    """A state without the mark of the maximum that ends a loop."""
    return state._replace(shard_statistics=state.shard_statistics - {longest.statistic})


# ---- what an iteration does after the end of an example ------------------------------------------

def is_kept(carried: Carried, longest: Longest, loop: Loop) -> bool:
    """Whether an iteration, from the length of an example on, leaves a carried value as it is; or,
    of an array or a list, writes zeros at the number of the iteration.

    Args:
      carried: the value.
      longest: what ends the loop.
      loop: the loop.
    """
    if carried.is_before(carried.after):
        return True
    write = _write_of(carried.after.op)
    if write is None:
        value = _value_after_end(carried.after, longest, loop)
        return value is not None and carried.is_before(value)
    is_at_counter = loop.is_counter(write.index) and carried.is_before(write.array)
    if not carried.begins_empty or not is_at_counter:
        return False
    element = _value_after_end(write.element, longest, loop)
    return element is not None and _is_zeros(element, loop)


class _Write(typing.NamedTuple):
    """The inputs of an operation that writes an element."""
    array: tf.Tensor  # the flow of the array, or the list, before it
    index: tf.Tensor
    element: tf.Tensor


def _write_of(op: tf.Operation) -> typing.Optional[_Write]:
    """What an operation writes into an array or a list; None of any other operation."""
    if op.type == 'TensorArrayWriteV3':
        _, index, element, flow = op.inputs
        return _Write(flow, index, element)
    if op.type == 'TensorListSetItem':
        list_, index, element = list(op.inputs)[:3]
        return _Write(list_, index, element)
    return None


def _value_after_end(value: tf.Tensor, longest: Longest,
                     loop: Loop) -> typing.Optional[tf.Tensor]:
    """What a value is for an example in an iteration that is not below its length: the `kept` of
    `tf.where(t >= lengths, kept, new)`; None where that is not known.

    Args:
      value: the value.
      longest: what ends the loop; it has the lengths.
      loop: the loop.
    """
    select = graph_walk.source_through(value, ('Identity',)).op
    if select.type not in ('Select', 'SelectV2'):
        return None
    test, kept, _ = select.inputs
    comparison = graph_walk.source_through(test, ('Identity',)).op
    if comparison.type != 'GreaterEqual':
        return None
    counter, lengths = comparison.inputs
    is_by_length = _source(lengths, loop).name == longest.lengths.name
    return kept if loop.is_counter(counter) and is_by_length else None


def _is_zeros(tensor: tf.Tensor, loop: Loop) -> bool:
    """Whether all entries of a tensor are 0."""
    tensor = graph_walk.source_through(loop.outside(tensor), ('Identity',))
    if tensor.op.type == 'ZerosLike':
        return True
    if tensor.op.type == 'Fill':
        tensor = tensor.op.inputs[1]  # the value of all entries
    value = tf.get_static_value(tensor)
    return value is not None and not np.any(value)
