"""Rules for the lists of tensors that loops of control flow v2 write: a list has the state of its
elements, and `State.sizes` is its length.

As in `arrays`, a list with an element for each of n examples has elements of the state ONE_EXAMPLE.
In the graph a list is a scalar of the type `tf.variant`.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.proof.contexts import NUMBER_OF_EXAMPLES
from towers.proof.rules import loops
from towers.proof.rules.arrays import element_at
from towers.proof.rules.common import TAKES_APART, TAKES_BY_PLACES, is_of_batch
from towers.proof.sizes import Sizes, as_number, as_numbers, sizes_in
from towers.proof.states import (
    INDEPENDENT,
    ONE_EXAMPLE,
    ROW_OF_EACH_EXAMPLE,
    Kind,
    Size,
    State,
    per_example,
    sizes_state,
    unknown,
)
from towers.proof.view import View

_States = typing.Sequence[State]

_NO_STATIC_LENGTH = 'makes a list of a length that is not static'


def _list_of(element: State, length: Sizes) -> State:
    """The state of a list with elements of a state.

    Args:
      element: the state of the elements.
      length: the number of places of the list, the sizes of a scalar.
    """
    return element._replace(sizes=length)


def _element_of(list_: State) -> State:
    """The state of the elements of a list."""
    return list_._replace(sizes=())


# ---- new lists -----------------------------------------------------------------------------------

def empty_list(op: tf.Operation, states: _States, view: View) -> State:
    """`TensorListReserve`: nothing is written yet, in a list of a number of places."""
    length = sizes_in(op.inputs[1], states[1], view)
    if length is None:
        return unknown(op, _NO_STATIC_LENGTH)
    return State(Kind.EMPTY, sizes=length)


def list_from_tensor(op: tf.Operation, states: _States, view: View) -> State:
    """`unstack`: an element for each entry along the first dimension; of x [n, 4], an example."""
    value = as_number(op, states[0], view)
    is_apart_by_example = is_of_batch(value) and value.axis == 0
    if is_apart_by_example:
        if value.layout != ROW_OF_EACH_EXAMPLE:
            return unknown(op, TAKES_APART)
        return _list_of(ONE_EXAMPLE, NUMBER_OF_EXAMPLES).with_marks_of(value)
    shape = view.shape(op.inputs[0])
    if shape is None or shape[0] is None:
        return unknown(op, _NO_STATIC_LENGTH)
    element = value
    if value.is_by_example:  # along a later dimension, as time-major x [time, n, 4]
        element = value._replace(axis=value.axis - 1)
    return _list_of(element, (Size(shape[0]),))


# ---- elements ------------------------------------------------------------------------------------

def list_length(op: tf.Operation, states: _States, view: View) -> State:
    """The number of places of a list."""
    length = states[0].sizes
    if not length:
        return unknown(op, 'is a length that is not static')
    return sizes_state(length)


def list_item(op: tf.Operation, states: _States, view: View) -> State:
    """An element: of a list of examples, at the counter of the loop over the examples alone."""
    list_ = states[0]
    index = as_number(op, states[1], view)
    if list_.kind is Kind.EMPTY:
        return unknown(op, TAKES_BY_PLACES)
    return element_at(op, _element_of(list_), index, view)


def list_with_item(op: tf.Operation, states: _States, view: View) -> State:
    """One element more, at the loop's counter or at a place that is the same on every tower.

    The other elements are those from before, so that an element may have either state.
    """
    list_ = states[0]
    index, value = as_numbers(op, states[1:], view)
    is_at_counter = index.is_position_of_each
    if is_at_counter:
        if value.kind not in (Kind.ONE_EXAMPLE, Kind.INDEPENDENT):
            return unknown(op, 'writes a value of all examples for each')
        value = ONE_EXAMPLE.with_marks_of(value)
    elif index.kind is not Kind.INDEPENDENT or Kind.ONE_EXAMPLE in (list_.kind, value.kind):
        # A place that is the same on every tower is that of no example.
        return unknown(op, 'writes elements at places that are not known')
    element = loops.either(op, [_element_of(list_), value.with_marks_of(index)], view)
    if element.kind is Kind.UNKNOWN:
        return element
    return _list_of(element, list_.sizes)


# ---- back to a tensor ----------------------------------------------------------------------------

def list_stack(op: tf.Operation, states: _States, view: View) -> State:
    """`stack`: the elements along a new first dimension; n examples [d] give [n, d]."""
    list_ = states[0]
    is_of_each = list_.kind is Kind.ONE_EXAMPLE
    if is_of_each:
        has_right_length = list_.sizes == NUMBER_OF_EXAMPLES
    else:
        has_right_length = not list_.depends_on_length
    if not has_right_length:
        return unknown(op, 'stacks a list that has not one place for each example')
    if list_.kind is Kind.EMPTY:  # TensorFlow gives zeros
        return INDEPENDENT
    if is_of_each:
        return per_example(0).with_marks_of(list_)
    element = _element_of(list_)
    if element.is_by_example:
        return element._replace(axis=element.axis + 1, is_constant=False)
    return element
