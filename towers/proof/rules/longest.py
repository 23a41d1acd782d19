"""Loops over time that end with the longest example: `tf.nn.dynamic_rnn(sequence_length=lengths)`.

Such a loop makes `min(steps, max(lengths))` iterations, a number that differs between shards. A
result does not depend on this number if the iterations from the length of an example on change
nothing for this example: each of them leaves the carried value of the example as it is, or writes
zeros into an array. A place of an array in which nothing is written is read as zeros, too.

    h = tf.where(t >= lengths, h, cell(x[t], h))               h stays as it is
    outputs = outputs.write(t, tf.where(t >= lengths, 0, y))   zeros are written

Let the shard make K iterations, and the whole batch more. Then K is less than `steps`, which are
the same for both, and so at least the length of each example of the shard. The iterations from K
on, which the shard does not make, change none of its examples.

A maximum in the limit, as in `max(least, max(lengths))`, is as good. Minima and maxima with numbers
that are the same for both, in any order, keep max(lengths) between a lower and an upper bound. If K
is below the number of the batch, it is below the upper bound, and so again at least max(lengths).

A lookup in the loop, as of word vectors, is excluded: its gradient has a row for each iteration, of
zeros for what changes nothing. An optimizer with momentum changes such a row of the table all the
same, and the shard's gradient lacks it.

The functions here look at the operations of a loop, of control flow v1 or v2; `Loop` and `Carried`
have what differs between these. The state of the loop's condition has the mark of the maximum, as
of any statistic of the shard; `condition_for` takes it away.
"""

import itertools
import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers.graph import graph_walk
from towers.proof.rules.common import all_known, is_same_on_towers
from towers.proof.states import ROW_OF_EACH_EXAMPLE, State
from towers.proof.view import View

_SAME = ('Identity', 'StopGradient')  # types of operations that give the same numbers
_LOOKUPS = ('Gather', 'GatherV2', 'ResourceGather', 'GatherNd', 'ResourceGatherNd')
"""Types of the operations whose gradient has rows for what was looked up alone."""


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
    """The maximum over the lengths of all examples that ends a loop."""
    statistic: str  # the name of the maximum
    lengths: tf.Tensor  # the length of each example, of which it is the maximum


def condition_for(value: Carried, loop: Loop, condition: State, view: View) -> State:
    """The state of the condition that ends a loop, for one of the values that leave the loop. It is
    without the mark of the longest example if the value does not depend on the longest example.

    Args:
      value: the value.
      loop: the loop, over time.
      condition: the state of its condition.
      view: `View`.
    """
    longest = _longest_of(loop, view)
    if longest is None or not _is_kept(value, longest, loop):
        return condition
    if _looks_up_rows(value, view):
        return condition
    return condition._replace(shard_statistics=condition.shard_statistics - {longest.statistic})


# ---- what ends a loop ----------------------------------------------------------------------------

def _longest_of(loop: Loop, view: View) -> typing.Optional[Longest]:
    """The maximum over lengths that ends a loop; None where it ends in another way.

    All other limits of the counter have to be the same for a shard and for the batch.
    """
    limits = _limits_of(loop.test, loop)
    if limits is None:
        return None
    # One maximum may be a limit several times.
    maxima = {limit.op for limit in limits if _is_longest(limit, view)}
    if len(maxima) != 1:
        return None
    maximum = maxima.pop()
    other_limits = [limit for limit in limits if limit.op is not maximum]
    if not all(_is_alike(limit, maximum.name, view) for limit in other_limits):
        return None
    lengths = _source(maximum.inputs[0], loop)
    if view.is_in_loop(lengths.op):  # where they may be others in each iteration
        return None
    return Longest(statistic=maximum.name, lengths=lengths)


def _limits_of(test: tf.Tensor, loop: Loop) -> typing.Optional[typing.List[tf.Tensor]]:
    """The limits in a test that counters are below limits: of `t < min(steps, longest)` these are
    `steps` and `longest`.

    Returns:
      The limits; None of any other test.
    """
    test = graph_walk.source_through(test, ('Identity',))
    if test.op.type == 'LogicalAnd':
        return _limits_of_parts(test.op, loop)
    if test.op.type != 'Less':
        return None
    counter, limit = test.op.inputs
    if not loop.is_counter(counter):
        return None
    return _bounds_in(limit, loop)


def _limits_of_parts(conjunction: tf.Operation,
                     loop: Loop) -> typing.Optional[typing.List[tf.Tensor]]:
    """The limits in the two tests of a `LogicalAnd`, as `_limits_of` gives them; None where either
    is another test."""
    limits_of_tests = all_known(_limits_of(test, loop) for test in conjunction.inputs)
    if limits_of_tests is None:
        return None
    return list(itertools.chain.from_iterable(limits_of_tests))


def _bounds_in(limit: tf.Tensor, loop: Loop) -> typing.List[tf.Tensor]:
    """The tensors, before the loop, of which a limit is the minimum or the maximum: of
    `min(steps, longest)` both. Any other limit is returned itself. Why a maximum is as good as a
    minimum: see the module."""
    limit = _source(limit, loop)
    if limit.op.type not in ('Minimum', 'Maximum'):
        return [limit]
    left, right = limit.op.inputs
    return _bounds_in(left, loop) + _bounds_in(right, loop)


def _source(tensor: tf.Tensor, loop: Loop) -> tf.Tensor:
    """The tensor before the loop that a tensor in the loop has the numbers of."""
    entering = loop.outside(graph_walk.source_through(tensor, _SAME))
    return graph_walk.source_through(entering, _SAME)


def _is_longest(limit: tf.Tensor, view: View) -> bool:
    """Whether a limit is the maximum of a vector of one number for each example."""
    if limit.op.type != 'Max':
        return False
    lengths = limit.op.inputs[0]
    if view.rank(lengths) != 1:
        return False
    # In the first round, a tensor of the loop has no state yet.
    state = view.state_or_none(lengths)
    return state is not None and state.layout == ROW_OF_EACH_EXAMPLE


def _is_alike(limit: tf.Tensor, statistic: str, view: View) -> bool:
    """Whether a limit is the same for a shard and for the batch, and does not depend on a maximum.

    Marks of other statistics stay on the condition, so that they end the proof anyway.

    Args:
      limit: the tensor.
      statistic: the name of the maximum, whose mark is to be taken away.
      view: `View`.
    """
    # In the first round, a tensor of the loop has no state yet.
    state = view.state_or_none(limit)
    if state is None or not is_same_on_towers(state):
        return False
    return statistic not in state.shard_statistics


# ---- what an iteration does after the end of an example ------------------------------------------

def _is_kept(carried: Carried, longest: Longest, loop: Loop) -> bool:
    """Whether the iterations from the length of an example on leave the example's part of a carried
    value as it is. Of an array or a list: whether each writes zeros at its own number.

    Args:
      carried: the value.
      longest: what ends the loop.
      loop: the loop.
    """
    if carried.is_before(carried.after):  # no iteration changes it
        return True
    write = _write_of(carried.after.op)
    if write is not None:
        return _writes_zeros(write, carried, longest, loop)
    value = _value_after_end(carried.after, longest, loop)
    return value is not None and carried.is_before(value)


def _looks_up_rows(carried: Carried, view: View) -> bool:
    """Whether an iteration looks up rows of what all towers have alike, such as a variable.

    Args:
      carried: the value that the iteration computes.
      view: `View`.
    """
    def inputs_in_loop(tensor: tf.Tensor) -> typing.List[tf.Tensor]:
        """The inputs of a tensor's operation that are computed in a loop."""
        return [source for source in tensor.op.inputs if view.is_in_loop(source.op)]

    for tensor in graph_walk.reached([carried.after], inputs_in_loop).values():
        if tensor.op.type in _LOOKUPS:
            table = view.state_or_none(tensor.op.inputs[0])
            # In the first round, a tensor of the loop has no state yet.
            if table is None or is_same_on_towers(table):
                return True
    return False


class _Write(typing.NamedTuple):
    """The inputs of an operation that writes an element."""
    array: tf.Tensor  # the flow of the array, or the list, before it
    index: tf.Tensor
    element: tf.Tensor


def _writes_zeros(write: _Write, carried: Carried, longest: Longest, loop: Loop) -> bool:
    """Whether an iteration, from the length of an example on, writes zeros for the example.

    Places that are never written are read as zeros, too. So it makes no difference that the loop of
    the whole batch goes on, if the array began empty and the iteration t writes the place t only.

    Args:
      write: what the iteration writes.
      carried: the array or the list.
      longest: what ends the loop.
      loop: the loop.
    """
    is_into_array = carried.begins_empty and carried.is_before(write.array)
    if not is_into_array or not loop.is_counter(write.index):
        return False
    element = _value_after_end(write.element, longest, loop)
    return element is not None and _is_zeros(element, loop)


def _write_of(op: tf.Operation) -> typing.Optional[_Write]:
    """What an operation writes into an array or a list; None of any other operation."""
    if op.type == 'TensorArrayWriteV3':
        _, index, element, flow = op.inputs
        return _Write(flow, index, element)
    if op.type == 'TensorListSetItem':
        list_, index, element = op.inputs
        return _Write(list_, index, element)
    return None


def _value_after_end(value: tf.Tensor, longest: Longest,
                     loop: Loop) -> typing.Optional[tf.Tensor]:
    """What a value is for an example in the iterations from its length on: the `kept` of
    `tf.where(t >= lengths, kept, new)`.

    Args:
      value: the value.
      longest: what ends the loop; it has the lengths.
      loop: the loop.

    Returns:
      Tensor; None where the value is no such choice.
    """
    select = graph_walk.source_through(value, ('Identity',)).op
    if select.type not in ('Select', 'SelectV2'):
        return None
    test, kept, _ = select.inputs
    comparison = graph_walk.source_through(test, ('Identity',)).op
    if comparison.type != 'GreaterEqual':
        return None
    counter, lengths = comparison.inputs
    is_by_iteration = loop.is_counter(counter)
    is_by_length = _source(lengths, loop).name == longest.lengths.name
    if not is_by_iteration or not is_by_length:
        return None
    return kept


def _is_zeros(tensor: tf.Tensor, loop: Loop) -> bool:
    """Whether it is known that all entries of a tensor of a loop are 0."""
    tensor = graph_walk.source_through(loop.outside(tensor), ('Identity',))
    if tensor.op.type == 'ZerosLike':
        return True
    if tensor.op.type == 'Fill':
        tensor = tensor.op.inputs[1]  # the value of all entries
    value = tf.get_static_value(tensor)
    return value is not None and not np.any(value)
