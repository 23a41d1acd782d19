"""Loops over time that end with the longest example: `tf.nn.dynamic_rnn(sequence_length=lengths)`.

The number of their iterations is `min(steps, max(lengths))`, which another shard has otherwise. A
result does not depend on it where each iteration from an example's own length on leaves what is
carried of that example as it is, or writes zeros into an array: places in which nothing is written
are read as zeros.

Let the shard make K iterations, and the whole batch more. Then K is less than `steps`, which are
the same for both, and so at least the length of each example of the shard. The iterations from K
on, which the shard does not make, change none of its examples.
"""

import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers.graph import graph_walk
from towers.proof.states import ROW_OF_EACH_EXAMPLE, Kind, State

_SAME = ('Identity', 'StopGradient')


class Loop(typing.NamedTuple):
    """A loop, as the functions of this module read it."""
    test: tf.Tensor  # the condition for one more iteration
    outside: typing.Callable  # (tensor) -> that tensor before the loop, where it enters as it is
    is_counter: typing.Callable  # (tensor) -> whether it is the number of the iteration, from 0


class Longest(typing.NamedTuple):
    """The maximum that ends a loop."""
    statistic: str  # the name of the maximum
    lengths: tf.Tensor  # the length of each example, of which it is the maximum


def longest_of(loop: Loop, view) -> typing.Optional[Longest]:
    """The maximum over lengths that ends a loop; None where it ends in another way.

    Args:
      loop: `Loop`.
      view: what rules ask of the analysis.
    """
    found: typing.Dict[str, tf.Tensor] = {}
    others: typing.List[tf.Tensor] = []
    if not _read_test(loop.test, loop, view, found, others) or len(found) != 1:
        return None
    [(statistic, lengths)] = found.items()
    for tensor in others:
        state = view.state_or_none(tensor)
        is_same = state is not None and not state.depends_on_size and (
            state.kind in (Kind.INDEPENDENT, Kind.SIZES))
        if not is_same or statistic in state.shard_statistics:
            return None
    return Longest(statistic, lengths)


def _read_test(test, loop, view, found, others):
    """Whether a test is that counters are below limits; the maxima of these limits go into `found`,
    all else that they are made of into `others`."""
    test = graph_walk.source_through(test, ('Identity',))
    if test.op.type == 'LogicalAnd':
        tests = [_read_test(each, loop, view, found, others) for each in test.op.inputs]
        return all(tests)
    if test.op.type != 'Less' or not loop.is_counter(test.op.inputs[0]):
        return False
    limits = [test.op.inputs[1]]
    while limits:
        limit = _source(limits.pop(), loop)
        if limit.op.type in ('Minimum', 'Maximum'):
            limits += list(limit.op.inputs)
        elif limit.op.type == 'Max' and _is_length_of_each(limit.op.inputs[0], view):
            found[limit.op.name] = _source(limit.op.inputs[0], loop)
        else:
            others.append(limit)
    return True


def _source(tensor, loop):
    """The tensor, before the loop, that a value is handed on from."""
    return graph_walk.source_through(loop.outside(graph_walk.source_through(tensor, _SAME)), _SAME)


def _is_length_of_each(tensor, view):
    """Whether a tensor is a vector of one number for each example."""
    state = view.state_or_none(tensor)
    return state is not None and view.rank(tensor) == 1 and state.layout == ROW_OF_EACH_EXAMPLE


def is_kept(value: tf.Tensor, is_before: typing.Callable, is_empty: bool, longest: Longest,
            loop: Loop) -> bool:
    """Whether what an iteration makes of a carried value is, from the length of an example on, the
    value before it; or that array or list, with zeros written at the number of the iteration.

    Args:
      value: the carried value after an iteration.
      is_before: (tensor) -> whether it is that value before the iteration.
      is_empty: whether it is an array or a list in which nothing is written before the loop.
      longest: `Longest`, what ends the loop.
      loop: `Loop`.
    """
    def is_zeros(tensor):
        return _is_zeros(tensor, loop)

    if is_before(value):
        return True
    if value.op.type == 'TensorArrayWriteV3':
        _, index, element, before = value.op.inputs
    elif value.op.type == 'TensorListSetItem':
        before, index, element = list(value.op.inputs)[:3]
    else:
        return _is_chosen(value, longest, loop, is_before)
    return is_empty and loop.is_counter(index) and is_before(before) and (
        _is_chosen(element, longest, loop, is_zeros))


def _is_over(test: tf.Tensor, longest: Longest, loop: Loop) -> bool:
    """Whether a test is that, for each example, an iteration is not below its length."""
    test = graph_walk.source_through(test, ('Identity',))
    if test.op.type != 'GreaterEqual':
        return False
    counter, lengths = test.op.inputs
    return loop.is_counter(counter) and _source(lengths, loop).name == longest.lengths.name


def _is_chosen(value: tf.Tensor, longest: Longest, loop: Loop, is_taken: typing.Callable) -> bool:
    """Whether from the length of each example on a value is one that `is_taken`."""
    value = graph_walk.source_through(value, ('Identity',))
    if value.op.type not in ('Select', 'SelectV2'):
        return False
    test, taken, _ = value.op.inputs
    return _is_over(test, longest, loop) and is_taken(taken)


def _is_zeros(tensor: tf.Tensor, loop: Loop) -> bool:
    """Whether all entries of a tensor are 0."""
    tensor = graph_walk.source_through(loop.outside(tensor), ('Identity',))
    if tensor.op.type == 'ZerosLike':
        return True
    if tensor.op.type == 'Fill':
        tensor = tensor.op.inputs[1]
    value = tf.get_static_value(tensor)
    return value is not None and not np.any(value)


def without(state: State, longest: Longest) -> State:
    """A state without the mark of the maximum that ends a loop."""
    return state._replace(shard_statistics=state.shard_statistics - {longest.statistic})
