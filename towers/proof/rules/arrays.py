"""Rules for `tf.TensorArray`s: an array has the state of its elements.

An array in which a loop over the examples writes at its counter, or which has an element for each
entry of a tensor [n, …], has elements of the state ONE_EXAMPLE; they may be read at the counter of
such a loop alone. An array over time has elements of any other state.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.graph import graph_walk
from towers.proof import contexts
from towers.proof.contexts import HAND_ON_IN_LOOP
from towers.proof.rules.loops import either
from towers.proof.rules.totals import not_linear
from towers.proof.sizes import as_numbers, sizes_in
from towers.proof.states import (
    INDEPENDENT,
    ONE_EXAMPLE,
    ROW_OF_EACH_EXAMPLE,
    Kind,
    State,
    per_example,
    unknown,
)
from towers.proof.view import View

_States = typing.List[State]


def array(op: tf.Operation, states: _States, view: View) -> typing.Optional[State]:
    """An operation on an array, which a handle names and whose flow orders the operations.

    The flow has no numbers, but carries the marks and the end of a proof from writes to reads: the
    marks of the written values, and of the places at which they are.

    Returns:
      The state of the result; None as long as nothing is written to an array that is read.
    """
    if op.type == 'TensorArrayV3':
        return INDEPENDENT
    flow = states[-1]
    if flow.kind is Kind.UNKNOWN:
        return flow
    rule = _RULES.get(op.type)
    if rule is None:
        return unknown(op, 'has no rule')
    maker = graph_walk.source_through(op.inputs[0], HAND_ON_IN_LOOP | {'Merge'}).op
    numbers = as_numbers(op, states, view)
    found = rule(op, numbers, view, maker)
    return None if found is None else found.with_marks_of(*numbers)


# The rules below have these parameters:
#   op: the operation on the array
#   states: of its inputs; the first one is the handle, the last one the flow
#   view: `View`
#   maker: the operation `TensorArrayV3` that made the array

def _size(op: tf.Operation, states: _States, view: View, maker: tf.Operation) -> State:
    """The number of elements: the size that the array was made with; or n, where a loop over the
    examples has written one in each iteration."""
    if _is_written_for_each(op.inputs[1], view):
        return State(Kind.SIZES, sizes=contexts.NUMBER_OF_EXAMPLES)
    if maker.get_attr('dynamic_size'):
        return unknown(maker, 'has elements added to it')
    sizes = sizes_in(maker.inputs[0], view.state(maker.inputs[0]), view)
    if sizes is None:
        return unknown(maker, 'has a size that is not static')
    return State(Kind.SIZES, sizes=sizes)


def _is_written_for_each(flow, view: View) -> bool:
    """Whether an array that was made empty comes out of a loop over the examples, each iteration of
    which writes an element at its number."""
    leaving = graph_walk.source_through(flow, ('Identity',)).op
    if leaving.type != 'Exit' or not contexts.loop_of(leaving, view).is_over_examples:
        return False
    merge = leaving.inputs[0].op.inputs[0].op
    back = contexts.back_edge(merge)
    maker = graph_walk.source_through(merge.inputs[0], ('Identity', 'Enter')).op
    if back is None or maker.type != 'TensorArrayV3' or contexts.constant_of(maker.inputs[0]) != 0:
        return False
    write = graph_walk.source_through(back, ('NextIteration', 'Identity')).op
    if write.type != 'TensorArrayWriteV3':
        return False
    _, index, _, before = write.inputs
    is_carried = graph_walk.source_through(before, ('Identity', 'Switch')).op is merge
    return is_carried and view.state(index).kind is Kind.POSITION


def _scatter(op: tf.Operation, states: _States, view: View, maker: tf.Operation) -> State:
    """`unstack`: an element for each entry along the first dimension; of x [n, …] an example."""
    indices, value = states[1], states[2]
    is_along_examples = value.axis == 0 and value.kind in (Kind.PER_EXAMPLE, Kind.ROWS)
    if is_along_examples:
        is_by_number = value.layout == ROW_OF_EACH_EXAMPLE and indices.kind is Kind.POSITION
        if is_by_number:
            element = ONE_EXAMPLE.with_marks_of(value)
        else:
            element = unknown(op, 'takes the examples apart')
    elif indices.kind is not Kind.INDEPENDENT:
        element = unknown(op, 'writes elements at places that are computed from the examples')
    elif value.kind in (Kind.PER_EXAMPLE, Kind.ROWS):
        element = value._replace(axis=value.axis - 1)
    else:
        element = value
    return _written(op, element, view, maker)


def _write(op: tf.Operation, states: _States, view: View, maker: tf.Operation) -> State:
    """One element, at the loop's counter or at a place that is the same on every tower."""
    index, value = states[1], states[2]
    if value.kind is Kind.UNKNOWN:
        element = value
    elif index.kind is Kind.POSITION:
        if value.kind not in (Kind.ONE_EXAMPLE, Kind.INDEPENDENT):
            element = unknown(op, 'writes a value of all examples for each')
        else:
            element = ONE_EXAMPLE.with_marks_of(value)
    elif index.kind is not Kind.INDEPENDENT:
        element = unknown(op, 'writes elements at places that are not known')
    elif value.kind is Kind.ONE_EXAMPLE:
        element = unknown(op, 'writes a value of one example at a place that is not its own')
    else:
        element = value.with_marks_of(index)
    return _written(op, element, view, maker)


def _written(op: tf.Operation, element: State, view: View, maker: tf.Operation) -> State:
    """Notes the state of an element that is written; the result is the state of the flow.

    An array that is written in two places has elements that may be of either.
    """
    before = view.arrays.written(maker.name)
    if before is not None:
        element = either(op, [before, element], view)
    view.arrays.write(maker.name, element)
    return INDEPENDENT


def _read(op: tf.Operation, states: _States, view: View,
          maker: tf.Operation) -> typing.Optional[State]:
    """One element: of an array of examples, at the counter of the loop over the examples alone."""
    index = states[1]
    element = view.arrays.element(maker.name)
    if element is None:
        return None
    return element_at(op, element, index, view)


def element_at(op: tf.Operation, element: State, index: State, view: View) -> State:
    """The state of an element that is read from an array or a list.

    Args:
      op: the operation that reads.
      element: the state of the elements.
      index: the state of the place that is read, a scalar.
      view: `View`.
    """
    if element.kind is Kind.UNKNOWN:
        return element
    is_of_example = element.kind is Kind.ONE_EXAMPLE
    is_at_counter = index.kind is Kind.POSITION
    if is_of_example != is_at_counter:
        return unknown(op, 'takes elements by their places')
    if is_of_example:
        return element
    index = not_linear(op, [index], view)
    if index.kind is Kind.UNKNOWN:
        return index
    return element.with_marks_of(index)


def _gather(op: tf.Operation, states: _States, view: View,
            maker: tf.Operation) -> typing.Optional[State]:
    """`stack`: the elements along a new first dimension; n examples [d] give [n, d]."""
    indices = states[1]
    element = view.arrays.element(maker.name)
    if element is None or element.kind is Kind.UNKNOWN:
        return element
    if element.kind is Kind.ONE_EXAMPLE:
        if indices.kind is not Kind.POSITION:
            return unknown(op, 'takes some of the examples, or changes their order')
        return per_example(0).with_marks_of(element)
    if indices.kind is Kind.UNKNOWN:
        return indices
    if indices.kind is not Kind.INDEPENDENT:
        return unknown(op, 'takes elements by their places')
    if element.is_by_example:
        moved = element._replace(axis=element.axis + 1, is_constant=False)
        return moved.with_marks_of(indices)
    return element.with_marks_of(indices)


_RULES = {'TensorArraySizeV3': _size, 'TensorArrayScatterV3': _scatter,
          'TensorArrayWriteV3': _write, 'TensorArrayReadV3': _read,
          'TensorArrayGatherV3': _gather}
