"""Rules for the lists of tensors that loops of control flow v2 write: a list has the state of its
elements, and `State.sizes` is its length.

As in `arrays`, a list with an element for each of n examples has elements of the state ONE_EXAMPLE.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.proof.contexts import NUMBER_OF_EXAMPLES
from towers.proof.rules import loops
from towers.proof.rules.arrays import element_at
from towers.proof.sizes import as_number, as_numbers, sizes_in
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
_APART = 'takes the examples apart'


def empty_list(op: tf.Operation, states: _States, view: View) -> State:
    """`TensorListReserve`: nothing is written yet, in a list of a number of places."""
    length = sizes_in(op.inputs[1], states[1], view)
    if length is None:
        return unknown(op, _NO_STATIC_LENGTH)
    return State(Kind.EMPTY, sizes=length)


def list_from_tensor(op: tf.Operation, states: _States, view: View) -> State:
    """An element for each entry along the first dimension; of x [n, 4], an example."""
    value = as_number(op, states[0], view)
    is_along_examples = value.axis == 0 and value.kind in (Kind.PER_EXAMPLE, Kind.ROWS)
    if is_along_examples:
        if value.layout != ROW_OF_EACH_EXAMPLE:
            return unknown(op, _APART)
        return ONE_EXAMPLE._replace(sizes=NUMBER_OF_EXAMPLES).with_marks_of(value)
    shape = view.shape(op.inputs[0])
    if shape is None or shape[0] is None:
        return unknown(op, _NO_STATIC_LENGTH)
    length = (Size(shape[0]),)
    if value.is_by_example:
        return value._replace(axis=value.axis - 1, sizes=length)
    return value._replace(sizes=length)


def list_length(op: tf.Operation, states: _States, view: View) -> State:
    """The number of places of a list."""
    length = states[0].sizes
    if not length:
        return unknown(op, 'is a length that is not static')
    return sizes_state(length)


def list_item(op: tf.Operation, states: _States, view: View) -> State:
    """An element: of a list of examples, at the counter of the loop over the examples alone."""
    elements = states[0]
    index = as_number(op, states[1], view)
    if elements.kind is Kind.EMPTY:
        return unknown(op, 'takes elements by their places')
    return element_at(op, elements._replace(sizes=()), index, view)


def list_with_item(op: tf.Operation, states: _States, view: View) -> State:
    """One element more, at the loop's counter or at a place that is the same on every tower."""
    elements = states[0]
    index, value = as_numbers(op, states[1:], view)
    if index.kind is Kind.POSITION:
        if value.kind not in (Kind.ONE_EXAMPLE, Kind.INDEPENDENT):
            return unknown(op, 'writes a value of all examples for each')
        value = ONE_EXAMPLE.with_marks_of(value)
    elif index.kind is not Kind.INDEPENDENT or Kind.ONE_EXAMPLE in (elements.kind, value.kind):
        return unknown(op, 'writes elements at places that are not known')
    before = elements._replace(sizes=())
    after = loops.either(op, [before, value.with_marks_of(index)], view)
    if after.kind is Kind.UNKNOWN:
        return after
    return after._replace(sizes=elements.sizes)


def list_stack(op: tf.Operation, states: _States, view: View) -> State:
    """The elements along a new first dimension; n examples [d] give [n, d]."""
    elements = states[0]
    is_of_each = elements.kind is Kind.ONE_EXAMPLE
    if is_of_each:
        has_right_length = elements.sizes == NUMBER_OF_EXAMPLES
    else:
        has_right_length = not elements.depends_on_length
    if not has_right_length:
        return unknown(op, 'stacks a list that has not one place for each example')
    if elements.kind is Kind.EMPTY:
        return INDEPENDENT
    if is_of_each:
        return per_example(0).with_marks_of(elements)
    if elements.is_by_example:
        return elements._replace(axis=elements.axis + 1, is_constant=False, sizes=())
    return elements._replace(sizes=())
