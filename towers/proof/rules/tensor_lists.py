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
from towers.proof.rules.arrays import (
    either_element,
    element_at,
    element_unstacked,
    element_written,
    stacked,
)
from towers.proof.rules.common import (
    COMPUTES_WITH_POSITIONS,
    TAKES_BY_PLACES,
    is_set,
    required,
)
from towers.proof.sizes import Sizes, as_number, as_numbers, sizes_in
from towers.proof.states import (
    INDEPENDENT,
    Kind,
    Size,
    State,
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
    """`unstack`: an element for each entry along the first dimension; n elements for x [n, 4]. Of
    other values, as many elements as the static length says."""
    element = element_unstacked(op, states[0])
    if element.kind is Kind.UNKNOWN:
        return element
    if element.kind is Kind.ONE_EXAMPLE:
        return _list_of(element, NUMBER_OF_EXAMPLES)
    shape = required(view.shape(op.inputs[0]), op, _NO_STATIC_LENGTH)
    length = required(shape[0], op, _NO_STATIC_LENGTH)
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
    may_grow = is_set(op, 'resize_if_index_out_of_bounds')  # with `dynamic_size=True`
    if may_grow:
        return unknown(op, _NO_STATIC_LENGTH)
    # The state of a list is the state of its elements, but `State.sizes` has the list's length. So
    # elements of the kind SIZES could not keep their `sizes`: sizes are converted to numbers.
    index, value = as_numbers(op, states[1:], view)
    if value.is_position:  # elements may come together again in another order, and several times
        return unknown(op, COMPUTES_WITH_POSITIONS)
    new_element = element_written(op, value, index)
    element = either_element(op, _element_of(list_), new_element, view)
    if element.kind is Kind.UNKNOWN:  # the elements have no state in common: the proof ends here
        return element
    return _list_of(element, list_.sizes)


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
        has_all_places = list_.sizes == NUMBER_OF_EXAMPLES
    else:
        has_all_places = not list_.depends_on_length
    if not has_all_places:
        return unknown(op, _NO_PLACE_OF_EACH)
    if list_.kind is Kind.EMPTY:  # TensorFlow gives zeros
        return INDEPENDENT
    return stacked(_element_of(list_))
