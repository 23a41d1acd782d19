"""Rules for `tf.TensorArray`s: an array has the state of its elements.

The elements of an array have the state ONE_EXAMPLE, if a loop over the examples writes the array at
its counter, or if a tensor [n, …] is unstacked into the array. Such elements may be read only at
the counter of a loop over the examples. The elements of an array over time have any other state.

The first input of an operation on an array is the handle, which names the array. The last input is
the array's flow: a number without meaning that each operation hands to the next, so that they run
in this order. In the analysis the state of the flow carries marks, and the end of a proof, from
writes to reads. The states of the elements are in `view.arrays`, by the name of the array's maker,
the operation `TensorArrayV3`.

Words of other modules: an index with `is_position_of_each` is the counter of a loop over the
examples, or `tf.range(n)`; `ROW_OF_EACH_EXAMPLE` is the layout of x [n, …], whose row e is of
example e.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.graph import graph_walk
from towers.proof import contexts
from towers.proof.rules.common import (
    COMPUTES_WITH_POSITIONS,
    TAKES_APART,
    TAKES_BY_PLACES,
    is_of_batch,
    kinds_of,
)
from towers.proof.rules.loops import either
from towers.proof.rules.totals import not_linear
from towers.proof.sizes import as_numbers, sizes_in
from towers.proof.states import (
    INDEPENDENT,
    ONE_EXAMPLE,
    ROW_OF_EACH_EXAMPLE,
    Kind,
    State,
    first_unknown,
    per_example,
    unknown,
)
from towers.proof.view import View

_States = typing.List[State]


def array(op: tf.Operation, states: _States, view: View) -> typing.Optional[State]:
    """An operation on an array: by `_RULES`, with the marks of all inputs.

    Returns:
      The state of the result; None for a read, as long as the analysis has found no write.
    """
    if op.type == 'TensorArrayV3':  # makes an array, in which nothing is written yet
        return INDEPENDENT
    flow = states[-1]
    if flow.kind is Kind.UNKNOWN:  # the proof has ended at an earlier operation on the array
        return flow
    rule = _RULES[op.type]
    makers = {source.op for source in contexts.sources_of_carried(op.inputs[0])}
    if len(makers) != 1:
        return unknown(op, 'takes one of several arrays')
    maker = makers.pop()
    states = as_numbers(op, states, view)
    found = rule(op, states, view, maker)
    if found is None:
        return None
    if op.type in _READS and _misses_writes(op, view, maker):
        return unknown(op, 'reads an array beside a branch or a loop that writes it')
    return found.with_marks_of(*states)


_READS = ('TensorArrayReadV3', 'TensorArrayGatherV3', 'TensorArraySizeV3')


def _misses_writes(op: tf.Operation, view: View, maker: tf.Operation) -> bool:
    """Whether an operation reads an array without the flow of a branch or a loop that writes it.

    In a branch or a loop, conditions decide what is written. The flow that leaves the branch or the
    loop has the marks of these conditions. A read that takes an earlier flow, and waits for the
    loop by a control edge alone, lacks these marks.
    """
    writes = view.arrays.writes_in_choices(maker.name)
    if not writes:  # saves the walk through the graph
        return False
    flow = op.inputs[-1]
    has_all_writes = writes <= graph_walk.ancestors([flow])
    return not has_all_writes


# The rules below have these parameters:
#   op: the operation on the array
#   states: the states of its inputs, with sizes as numbers; the handle is first, the flow last
#   view: `View`
#   maker: the operation `TensorArrayV3` that made the array

# ---- the number of elements ----------------------------------------------------------------------

def _size(op: tf.Operation, states: _States, view: View, maker: tf.Operation) -> State:
    """The number of elements: the size that the array was made with; or n, if a loop over the
    examples has written one element in each iteration."""
    flow = op.inputs[1]
    if _is_written_for_each(flow, view):
        return State(Kind.SIZES, sizes=contexts.NUMBER_OF_EXAMPLES)
    if maker.get_attr('dynamic_size'):
        return unknown(maker, 'has elements added to it')
    size = maker.inputs[0]
    sizes = sizes_in(size, view.state(size), view)
    if sizes is None:
        return unknown(maker, 'has a size that is not static')
    return State(Kind.SIZES, sizes=sizes)


def _is_written_for_each(flow: tf.Tensor, view: View) -> bool:
    """Whether an array that was made empty comes out of a loop over the examples in which each
    iteration writes one element, at the number of the iteration.

    The flow goes from a TensorArrayV3 of size 0 -> Enter -> Merge -> Switch -> TensorArrayWriteV3
    -> NextIteration -> the Merge again; and from the Switch to the Exit. This function follows the
    flow back from the Exit.
    """
    leaving = graph_walk.source_through(flow, ('Identity',)).op
    if leaving.type != 'Exit' or not contexts.loop_of(leaving, view).is_over_examples:
        return False
    switch = leaving.inputs[0].op
    merge = switch.inputs[0].op
    maker = graph_walk.source_through(merge.inputs[0], ('Identity', 'Enter')).op
    if maker.type != 'TensorArrayV3' or contexts.constant_of(maker.inputs[0]) != 0:
        return False
    flow_after_iteration = contexts.back_edge(merge)
    if flow_after_iteration is None:
        return False
    write = graph_walk.source_through(flow_after_iteration, ('NextIteration', 'Identity')).op
    if write.type != 'TensorArrayWriteV3':
        return False
    _, index, _, flow_before = write.inputs
    is_only_write = graph_walk.source_through(flow_before, ('Identity', 'Switch')).op is merge
    return is_only_write and view.state(index).is_position_of_each


# ---- writes --------------------------------------------------------------------------------------

def _scatter(op: tf.Operation, states: _States, view: View, maker: tf.Operation) -> State:
    """`unstack`: an element for each entry along the first dimension; for x [n, …] each element is
    of one example."""
    _, indices, value, _ = states
    element = element_unstacked(op, value)
    if element.kind is not Kind.UNKNOWN and not _are_places_of(element, indices):
        element = unknown(op, 'writes elements at places that are computed from the examples')
    return _written(op, element, view, maker)


def _are_places_of(element: State, indices: State) -> bool:
    """Whether places are those of elements along a dimension: of elements of the examples, the
    examples' numbers; of all others, places that are the same on every tower."""
    if element.kind is Kind.ONE_EXAMPLE:
        return indices.is_position_of_each
    return indices.kind is Kind.INDEPENDENT


def element_unstacked(op: tf.Operation, value: State) -> State:
    """The state of the elements that a tensor is taken apart into, along its first dimension.

        x [n, 4]          ONE_EXAMPLE, if the element at e is read as that of example e
        x [2 n, 4]        unknown: the element at e is not of example e
        x [time, n, 4]    each element [n, 4] is of the batch
        x [8, 4]          the state of x, if x is without the examples
        x [5, 4]          unknown, if x is of one example, in a loop over the examples. A read at
                          the counter of the loop is allowed for elements of the state ONE_EXAMPLE:
                          such a read would choose one of the 5 elements by the example's number

    Args:
      op: the operation that takes the tensor apart.
      value: the state of the tensor.
    """
    if value.layout == ROW_OF_EACH_EXAMPLE:
        return ONE_EXAMPLE.with_marks_of(value)
    if value.kind is Kind.ONE_EXAMPLE:
        return unknown(op, 'takes the values of one example apart')
    if not is_of_batch(value):
        return value
    if value.axis == 0:
        return unknown(op, TAKES_APART)
    return value._replace(axis=value.axis - 1)


def _write(op: tf.Operation, states: _States, view: View, maker: tf.Operation) -> State:
    """Writes one element, at a loop's counter or at a place that is the same on every tower."""
    _, index, value, _ = states
    return _written(op, element_written(op, value, index), view, maker)


def element_written(op: tf.Operation, value: State, index: State) -> State:
    """The state of an element that is written to an array or a list.

    At the counter of a loop over the examples, the element is of the example of the iteration. At a
    place that is the same on every tower, the element has the state of the value.

    Args:
      op: the operation that writes.
      value: the state of the value that is written.
      index: the state of the place, a scalar.
    """
    if value.kind is Kind.UNKNOWN:
        return value
    is_at_counter = index.is_position_of_each
    if is_at_counter:
        if value.kind not in (Kind.ONE_EXAMPLE, Kind.INDEPENDENT):
            return unknown(op, 'writes a value of all examples for each')
        return ONE_EXAMPLE.with_marks_of(value, index)
    if index.kind is not Kind.INDEPENDENT:
        return unknown(op, 'writes elements at places that are not known')
    if value.kind is Kind.ONE_EXAMPLE:
        return unknown(op, 'writes a value of one example at a place that is not its own')
    return value.with_marks_of(index)


def _written(op: tf.Operation, element: State, view: View, maker: tf.Operation) -> State:
    """Notes the state of an element that is written; the result is the state of the flow.

    If two operations write to an array, an element that is read may be from either.
    """
    if element.is_position:  # elements may come together again in another order, and several times
        element = unknown(op, COMPUTES_WITH_POSITIONS)
    written_before = view.arrays.written(maker.name)
    if written_before is not None:
        element = either_element(op, written_before, element, view)
    # In a branch or a loop, conditions decide whether the operation runs: see `_misses_writes`.
    is_in_choice = bool(contexts.conditions_around(op, view))
    view.arrays.write(maker.name, element, in_choice=op.name if is_in_choice else None)
    return INDEPENDENT


def either_element(op: tf.Operation, written_before: State, element: State, view: View) -> State:
    """The state of the elements of an array or a list to which two operations write.

    An array with an element for each example must have no other elements. A place that is the same
    on every tower belongs to no example. The element at such a place may stay there, if the writes
    of the examples are in a branch that is not taken; a read of an example would then get it.

    Args:
      op: the operation that writes.
      written_before: the state of the elements that earlier operations have written.
      element: the state of the element that this operation writes.
      view: `View`.
    """
    if kinds_of([written_before, element]) == {Kind.ONE_EXAMPLE, Kind.INDEPENDENT}:
        return unknown(op, 'writes elements at places that are not known')
    return either(op, [written_before, element], view)


# ---- reads ---------------------------------------------------------------------------------------

def _read(op: tf.Operation, states: _States, view: View,
          maker: tf.Operation) -> typing.Optional[State]:
    """Reads one element. An array of examples may be read only at the counter of a loop over the
    examples."""
    index = states[1]
    element = view.arrays.element(maker.name)
    if element is None:
        return None
    return element_at(op, element, index, view)


def element_at(op: tf.Operation, element: State, index: State, view: View) -> State:
    """The state of an element that is read from an array or a list.

        an element for each example    may be read only in the iteration of its example, at the
                                       counter of the loop
        any other element              may be read at any place but a position of an example. If the
                                       place is a mean or a sum, the element gets the mark of this
                                       mean or sum

    Args:
      op: the operation that reads.
      element: the state of the elements.
      index: the state of the place that is read, a scalar.
      view: `View`.
    """
    if element.kind is Kind.UNKNOWN:
        return element
    is_at_counter = index.is_position_of_each
    if element.kind is Kind.ONE_EXAMPLE:
        if is_at_counter:
            return element
        return unknown(op, TAKES_BY_PLACES)
    # In another shard an example has another number, and so would read another element.
    if is_at_counter:
        return unknown(op, TAKES_BY_PLACES)
    choice = not_linear(op, [index], view)  # unknown, if the place is of one example
    if choice.kind is Kind.UNKNOWN:
        return choice
    return element.with_marks_of(choice)


def _gather(op: tf.Operation, states: _States, view: View,
            maker: tf.Operation) -> typing.Optional[State]:
    """`stack`: the elements along a new first dimension.

        n examples [d]             [n, d], if all elements are taken, in their order
        elements [n, d] by time    [time, n, d], with the examples along dimension 1
        elements without examples  the state of the elements: entries that are means stay means
    """
    indices = states[1]
    element = view.arrays.element(maker.name)
    if element is None:  # nothing is written yet
        return None
    not_known = first_unknown([element, indices])
    if not_known is not None:
        return not_known
    if not _are_places_of(element, indices):
        return unknown(op, TAKES_BY_PLACES)
    return stacked(element).with_marks_of(indices)


def stacked(element: State) -> State:
    """The state of a tensor that has elements of a given state along a new first dimension, in
    their order: those of the examples all, or any others."""
    if element.kind is Kind.ONE_EXAMPLE:
        return per_example(0).with_marks_of(element)
    if is_of_batch(element):
        # The elements of other iterations may have other values. Whether each element is the same
        # for all examples is not followed: `is_constant=False` is always sound.
        return element._replace(axis=element.axis + 1, is_constant=False)
    return element


# All types in the row of `array` in the table, but for `TensorArrayV3`: see `array`.
_RULES = {'TensorArraySizeV3': _size, 'TensorArrayScatterV3': _scatter,
          'TensorArrayWriteV3': _write, 'TensorArrayReadV3': _read,
          'TensorArrayGatherV3': _gather}
