"""Rules for the lists of tensors that loops of control flow v2 write: a list has the state of its
elements, and `State.sizes` is its length.

As in `arrays`, the elements of a list with one element for each of n examples have the state
ONE_EXAMPLE. In the graph a list is a scalar of the type `tf.variant`.

Words of other modules: an index with `is_position_of_each` is the counter of a loop over the
examples; a list with `depends_on_length` may have another length in another shard.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.proof.contexts import NUMBER_OF_EXAMPLES
from towers.proof.rules import loops
from towers.proof.rules.arrays import element_at
from towers.proof.rules.common import (
    COMPUTES_WITH_POSITIONS,
    TAKES_APART,
    TAKES_BY_PLACES,
    is_of_batch,
    required,
)
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
_NO_PLACE_OF_EACH = 'stacks a list that has not one place for each example'


def _list_of(element: State, length: Sizes) -> State:
    """The state of a list, by the state of its elements.

    Args:
      element: the state of the elements.
      length: the number of places of the list: one size, in a tuple.
    """
    return element._replace(sizes=length)


def _element_of(list_: State) -> State:
    """The state of the elements of a list."""
    return list_._replace(sizes=())


# ---- new lists -----------------------------------------------------------------------------------

def empty_list(op: tf.Operation, states: _States, view: View) -> State:
    """`TensorListReserve`: a list with a number of places, in which nothing is written yet."""
    length = required(sizes_in(op.inputs[1], states[1], view), op, _NO_STATIC_LENGTH)
    return State(Kind.EMPTY, sizes=length)


def list_from_tensor(op: tf.Operation, states: _States, view: View) -> State:
    """`unstack`: an element for each entry along the first dimension.

        x [n, 4]          n elements, each of one example
        x [2 n, 4]        unknown: the element at e is not known to be of example e
        x [time, n, 4]    elements [n, 4] of the batch, as many as the static length says
        x [8, 4]          8 elements of the state of x, if x is without the examples
        x [5, 4]          unknown, if x is of one example, in a loop over the examples. A read at
                          the counter of the loop is allowed for elements of the state ONE_EXAMPLE:
                          such a read would choose one of the 5 elements by the example's number
    """
    value = states[0]
    is_apart_by_example = is_of_batch(value) and value.axis == 0
    if is_apart_by_example:
        if value.layout != ROW_OF_EACH_EXAMPLE:
            return unknown(op, TAKES_APART)
        return _list_of(ONE_EXAMPLE, NUMBER_OF_EXAMPLES).with_marks_of(value)
    if value.kind is Kind.ONE_EXAMPLE:
        return unknown(op, 'takes the values of one example apart')
    shape = required(view.shape(op.inputs[0]), op, _NO_STATIC_LENGTH)
    length = required(shape[0], op, _NO_STATIC_LENGTH)
    element = value
    if is_of_batch(value):  # its examples are along a later dimension
        element = value._replace(axis=value.axis - 1)
    return _list_of(element, (Size(length),))


# ---- elements ------------------------------------------------------------------------------------

def list_length(op: tf.Operation, states: _States, view: View) -> State:
    """The number of places of a list."""
    length = states[0].sizes
    if not length:
        return unknown(op, 'is a length that is not static')
    return sizes_state(length)


def list_item(op: tf.Operation, states: _States, view: View) -> State:
    """An element of a list. A list of examples may be read only at the counter of a loop over the
    examples."""
    list_ = states[0]
    index = as_number(op, states[1], view)
    if list_.kind is Kind.EMPTY:  # no element is written that could be read here
        return unknown(op, TAKES_BY_PLACES)
    return element_at(op, _element_of(list_), index, view)


def list_with_item(op: tf.Operation, states: _States, view: View) -> State:
    """The list with one element written.

    All other elements stay. So an element that is read later may have the state of the old
    elements, or the state of the new element.
    """
    list_ = states[0]
    may_grow = 'resize_if_index_out_of_bounds' in op.node_def.attr and op.get_attr(
        'resize_if_index_out_of_bounds')  # with `dynamic_size=True`
    if may_grow:
        return unknown(op, _NO_STATIC_LENGTH)
    # The state of a list is the state of its elements, but `State.sizes` has the list's length. So
    # elements of the kind SIZES could not keep their `sizes`: sizes are converted to numbers.
    index, value = as_numbers(op, states[1:], view)
    new_element = _element_written(op, list_, index, value)
    if new_element.kind is Kind.UNKNOWN:  # its place or its value is not known
        return new_element
    element = loops.either(op, [_element_of(list_), new_element], view)
    if element.kind is Kind.UNKNOWN:  # the elements have no state in common: the proof ends here
        return element
    return _list_of(element, list_.sizes)


def _element_written(op: tf.Operation, list_: State, index: State, value: State) -> State:
    """The state of an element that is written at the counter of a loop over the examples, or at a
    place that is the same on every tower.

    Args:
      op: the operation `TensorListSetItem`.
      list_: the state of the list before.
      index: the state of the place, a scalar.
      value: the state of the value that is written.
    """
    is_at_counter = index.is_position_of_each
    if is_at_counter:
        if value.kind not in (Kind.ONE_EXAMPLE, Kind.INDEPENDENT):
            return unknown(op, 'writes a value of all examples for each')
        return ONE_EXAMPLE.with_marks_of(value, index)
    if value.is_position:  # elements may come together again in another order, and several times
        return unknown(op, COMPUTES_WITH_POSITIONS)
    if index.kind is not Kind.INDEPENDENT:
        return unknown(op, 'writes elements at places that are not known')
    # A place that is the same on every tower belongs to no example. So no value of one example may
    # be written there, and no value into a list that has an element for each example.
    if Kind.ONE_EXAMPLE in (list_.kind, value.kind):
        return unknown(op, 'writes elements at places that are not known')
    return value.with_marks_of(index)


# ---- back to a tensor ----------------------------------------------------------------------------

def list_stack(op: tf.Operation, states: _States, view: View) -> State:
    """`stack`: the elements along a new first dimension.

        n examples [d]             [n, d]
        elements [n, d] by time    [time, n, d], with the examples along dimension 1
        elements without examples  the state of the elements: entries that are means stay means

    A list of examples must have n elements. Any other list must have a length that is the same on
    every tower.
    """
    list_ = states[0]
    if list_.kind is Kind.ONE_EXAMPLE:
        if list_.sizes != NUMBER_OF_EXAMPLES:
            return unknown(op, _NO_PLACE_OF_EACH)
        return per_example(0).with_marks_of(list_)
    has_constant_length = not list_.depends_on_length
    if not has_constant_length:
        return unknown(op, _NO_PLACE_OF_EACH)
    if list_.kind is Kind.EMPTY:  # TensorFlow gives zeros
        return INDEPENDENT
    element = _element_of(list_)
    if element.is_by_example:
        # The elements of other iterations may have other values. Whether each element is the same
        # for all examples is not followed: `is_constant=False` is always sound.
        return element._replace(axis=element.axis + 1, is_constant=False)
    return element
