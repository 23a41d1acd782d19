"""Loops over time that end with the longest example: `tf.nn.dynamic_rnn(sequence_length=lengths)`.

Such a loop makes `min(steps, max(lengths))` iterations, a number that differs between shards. Let
an example have the length L. A result does not depend on the number of iterations, if the
iterations L, L + 1, … change nothing for this example: each of them leaves the carried value of the
example as it is, or writes zeros into an array. An array place that is never written is also read
as zeros.

    h = tf.where(t >= lengths, h, cell(x[t], h))               h stays as it is
    outputs = outputs.write(t, tf.where(t >= lengths, 0, y))   zeros are written

Let the shard make K iterations, and the whole batch more. `steps` is the same for the shard and for
the batch, so that K is less than `steps`. Then K is the maximum of the shard's lengths. The
iterations K, K + 1, …, which the batch makes and the shard does not, change no example of the
shard.

A maximum in the limit, as in `max(least, max(lengths))`, has the same effect. Let the limit consist
of minima and maxima of max(lengths) with numbers that are the same for the shard and for the batch.
They keep max(lengths) between a lower and an upper bound. If K is less than the batch's number of
iterations, K is below the upper bound, and so again at least the maximum of the shard's lengths.

A lookup in the loop, such as of word vectors, is excluded. The gradient of the lookup has a row for
each iteration, even if the iteration changes nothing: then a row of zeros. An optimizer with
momentum changes a row of the table even if the row of its gradient is zeros. The gradient of a
shard that makes fewer iterations lacks this row.

The functions of this module read the operations of a loop of control flow v1 or v2. The differences
between the two are in `Loop` and `Carried`. The state of the loop's condition has the mark of the
maximum, a statistic of the shard; `condition_for` removes this mark.
"""

import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers.graph import graph_walk
from towers.proof.rules.common import is_same_on_towers
from towers.proof.states import ROW_OF_EACH_EXAMPLE, State
from towers.proof.view import View

_SAME = ('Identity', 'StopGradient')  # types of operations that give the same numbers
_LOOKUPS = ('Gather', 'GatherV2', 'ResourceGather', 'GatherNd', 'ResourceGatherNd')
"""Types of operations whose gradient has rows only for the rows that were looked up."""


class Loop(typing.NamedTuple):
    """A loop, as the functions of this module read it."""
    test: tf.Tensor  # the condition for one more iteration
    # (tensor) -> the tensor before the loop that it hands on; the tensor itself, if there is none
    outside: typing.Callable
    # (tensor) -> whether the tensor is the number of the iteration, from 0
    is_counter: typing.Callable


class Carried(typing.NamedTuple):
    """A value that a loop carries, as the functions of this module read it."""
    after: tf.Tensor  # the value after an iteration
    is_before: typing.Callable  # (tensor) -> whether the tensor is this value before the iteration
    begins_empty: bool  # whether the value is an array or a list that is empty before the loop


class Longest(typing.NamedTuple):
    """The maximum over the lengths of all examples that ends a loop."""
    statistic: str  # the name of the maximum
    lengths: tf.Tensor  # the vector of the examples' lengths, the input of the maximum


def condition_for(value: Carried, loop: Loop, condition: State, view: View) -> State:
    """The state of the condition that ends a loop, for one of the values that leave the loop.

    The mark of the longest example is removed, if the value does not depend on the longest example
    and an iteration looks up no rows for it.

    Args:
      value: the value.
      loop: the loop, over time.
      condition: the state of the loop's condition.
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
    """The maximum over lengths that ends a loop; None if the loop ends in another way.

    All other limits of the counter have to be the same for a shard and for the batch.
    """
    limits = _limits_of(loop)
    # One maximum may be several of the limits.
    maxima = {limit.op for limit in limits if _is_longest(limit, view)}
    if len(maxima) != 1:
        return None
    maximum = maxima.pop()
    if not all(limit.op is maximum or _is_alike(limit, maximum.name, view) for limit in limits):
        return None
    lengths = _source(maximum.inputs[0], loop)
    if view.is_in_loop(lengths.op):  # each iteration may have other lengths
        return None
    return Longest(statistic=maximum.name, lengths=lengths)


def _limits_of(loop: Loop) -> typing.List[tf.Tensor]:
    """The limits of a loop that runs while counters are below limits: `steps` and `longest` for
    `t < min(steps, longest)`; [] for a loop with any other test."""
    limits: typing.List[tf.Tensor] = []
    for test in _tests_in(loop.test):
        if test.type != 'Less' or not loop.is_counter(test.inputs[0]):
            return []
        limits += _bounds_in(test.inputs[1], loop)
    return limits


def _tests_in(test: tf.Tensor) -> typing.List[tf.Operation]:
    """The operations that make the tests of which a test is the conjunction."""
    op = graph_walk.source_through(test, ('Identity',)).op
    if op.type != 'LogicalAnd':
        return [op]
    left, right = op.inputs
    return _tests_in(left) + _tests_in(right)


def _bounds_in(limit: tf.Tensor, loop: Loop) -> typing.List[tf.Tensor]:
    """The tensors, before the loop, of which a limit is the minimum or the maximum: `steps` and
    `longest` for `min(steps, longest)`. Any other limit is returned itself. The docstring of the
    module says why a maximum has the same effect as a minimum."""
    limit = _source(limit, loop)
    if limit.op.type not in ('Minimum', 'Maximum'):
        return [limit]
    left, right = limit.op.inputs
    return _bounds_in(left, loop) + _bounds_in(right, loop)


def _source(tensor: tf.Tensor, loop: Loop) -> tf.Tensor:
    """The tensor before the loop whose numbers a tensor in the loop hands on."""
    entering = loop.outside(graph_walk.source_through(tensor, _SAME))
    return graph_walk.source_through(entering, _SAME)


def _is_longest(limit: tf.Tensor, view: View) -> bool:
    """Whether a limit is the maximum over a vector with one number for each example."""
    if limit.op.type != 'Max':
        return False
    lengths = limit.op.inputs[0]
    is_vector = view.rank(lengths) == 1
    return is_vector and view.state_so_far(lengths).layout == ROW_OF_EACH_EXAMPLE


def _is_alike(limit: tf.Tensor, statistic: str, view: View) -> bool:
    """Whether a limit is the same for a shard and for the batch, and does not depend on a maximum.

    The limit may have marks of other statistics. These marks stay on the condition, and end the
    proof in any case.

    Args:
      limit: the tensor.
      statistic: the name of the maximum, whose mark is to be removed.
      view: `View`.
    """
    state = view.state_so_far(limit)
    return is_same_on_towers(state) and statistic not in state.shard_statistics


# ---- what an iteration does after the end of an example ------------------------------------------

def _is_kept(carried: Carried, longest: Longest, loop: Loop) -> bool:
    """Whether the iterations L, L + 1, … do not change the part of an example of length L in a
    carried value. For an array or a list: whether iteration t writes zeros for the example, at the
    place t.

    Args:
      carried: the value.
      longest: what ends the loop.
      loop: the loop.
    """
    if carried.is_before(carried.after):  # no iteration changes it
        return True
    if carried.after.op.type in _PLACE_OF_ARRAY:
        return _writes_zeros(carried, longest, loop)
    value = _value_after_end(carried.after, longest, loop)
    return value is not None and carried.is_before(value)


def _looks_up_rows(carried: Carried, view: View) -> bool:
    """Whether an iteration looks up rows of a tensor that is the same on all towers, such as a
    variable.

    Args:
      carried: the value that the iteration computes.
      view: `View`.
    """
    def producers_in_loop(op: tf.Operation) -> typing.Iterable[tf.Operation]:
        """The operations in a loop that compute the inputs of an operation."""
        return filter(view.is_in_loop, graph_walk.producers_of(op))

    operations = graph_walk.reached([carried.after.op], producers_in_loop).values()
    lookups = graph_walk.of_types(operations, _LOOKUPS)
    return any(is_same_on_towers(view.state_so_far(lookup.inputs[0])) for lookup in lookups)


_PLACE_OF_ARRAY = {'TensorArrayWriteV3': -1, 'TensorListSetItem': 0}
"""{type of an operation that writes an element: the place of the input that is the array's flow, or
the list}. The inputs 1 and 2 of both are the place of the element, and the element."""


def _writes_zeros(carried: Carried, longest: Longest, loop: Loop) -> bool:
    """Whether the iterations L, L + 1, … write zeros for an example of length L.

    Places that are never written are read as zeros, too. So it makes no difference that the loop
    makes more iterations for the whole batch, if the array began empty and iteration t writes only
    the place t.

    Args:
      carried: the array or the list after the write.
      longest: what ends the loop.
      loop: the loop.
    """
    write = carried.after.op
    array = write.inputs[_PLACE_OF_ARRAY[write.type]]
    is_into_array = carried.begins_empty and carried.is_before(array)
    if not is_into_array or not loop.is_counter(write.inputs[1]):
        return False
    element = _value_after_end(write.inputs[2], longest, loop)
    return element is not None and _is_zeros(element, loop)


def _value_after_end(value: tf.Tensor, longest: Longest,
                     loop: Loop) -> typing.Optional[tf.Tensor]:
    """The value of an example of length L in the iterations L, L + 1, …: `kept`, if a value is
    `tf.where(t >= lengths, kept, new)`.

    Args:
      value: the value.
      longest: what ends the loop, with the lengths.
      loop: the loop.

    Returns:
      The tensor `kept`; None where the value is computed in another way.
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
    """Whether all entries of a tensor in a loop are known to be 0."""
    tensor = graph_walk.source_through(loop.outside(tensor), ('Identity',))
    if tensor.op.type == 'ZerosLike':
        return True
    if tensor.op.type == 'Fill':
        tensor = tensor.op.inputs[1]  # the value of all entries
    value = tf.get_static_value(tensor)
    return value is not None and not np.any(value)
