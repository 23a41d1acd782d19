"""Rules for `tf.TensorArray`s: an array has the state of its elements.

An array in which a loop over the examples writes at its counter, or which has an element for each
entry of a tensor [n, …], has elements of the state ONE_EXAMPLE; they may be read at the counter of
such a loop alone. An array over time has elements of any other state.

An operation on an array takes its handle, which names it, first, and its flow last. The flow is a
number without meaning that each operation hands to the next, so that they run in this order. So it
carries the marks, and the end of a proof, from writes to reads. The states of the elements are in
`view.arrays`, by the name of the operation that made the array, its maker.

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
      The state of the result; None as long as nothing is written to an array that is read.
    """
    if op.type == 'TensorArrayV3':  # which makes one, in which nothing is yet
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

    Conditions decide what is written there, and the flow that comes out has their marks. A read
    that takes an earlier flow, and waits for the loop by a control edge alone, has not.
    """
    writes = view.arrays.writes_in_choices(maker.name)
    if not writes:  # so that there is no need to walk through the graph
        return False
    flow = op.inputs[-1]
    has_all_writes = writes <= graph_walk.ancestors([flow])
    return not has_all_writes


# The rules below have these parameters:
#   op: the operation on the array
#   states: of its inputs, sizes as numbers; the first one is the handle, the last one the flow
#   view: `View`
#   maker: the operation `TensorArrayV3` that made the array

# ---- the number of elements ----------------------------------------------------------------------

def _size(op: tf.Operation, states: _States, view: View, maker: tf.Operation) -> State:
    """The number of elements: the size that the array was made with; or n, where a loop over the
    examples has written one in each iteration."""
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
    """Whether an array that was made empty comes out of a loop over the examples, each iteration of
    which writes an element at its number.

    The flow goes from TensorArrayV3 of size 0 -> Enter -> Merge -> Switch -> TensorArrayWriteV3 ->
    NextIteration -> the Merge again; and from the Switch to the Exit. It is followed back here.
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
    """`unstack`: an element for each entry along the first dimension; of x [n, …] an example."""
    element = _element_unstacked(op, value=states[2], indices=states[1])
    return _written(op, element, view, maker)


def _element_unstacked(op: tf.Operation, value: State, indices: State) -> State:
    """The state of the elements that a tensor is taken apart into.

        x [n, 4]          each element is an example, if it gets the number of the example
        x [time, n, 4]    each element [n, 4] is of the batch
        x [8, 4]          a value without the examples: each element is of the same state
        x [5, 4]          of one example, in a loop over them: refused. Elements of the state
                          ONE_EXAMPLE may be read at the number of the example, which would choose
                          one of the 5 by it

    Args:
      op: the operation `TensorArrayScatterV3`.
      value: the state of the tensor.
      indices: the state of the numbers of the elements, for each entry along its first dimension.
    """
    is_apart_by_example = is_of_batch(value) and value.axis == 0
    if is_apart_by_example:
        is_by_its_number = value.layout == ROW_OF_EACH_EXAMPLE and indices.is_position_of_each
        if not is_by_its_number:
            return unknown(op, TAKES_APART)
        return ONE_EXAMPLE.with_marks_of(value)
    if indices.kind is not Kind.INDEPENDENT:
        return unknown(op, 'writes elements at places that are computed from the examples')
    if value.kind is Kind.ONE_EXAMPLE:
        return unknown(op, 'takes the values of one example apart')
    if is_of_batch(value):  # its examples are along a later dimension
        return value._replace(axis=value.axis - 1)
    return value


def _write(op: tf.Operation, states: _States, view: View, maker: tf.Operation) -> State:
    """One element, at the loop's counter or at a place that is the same on every tower."""
    element = _element_written(op, value=states[2], index=states[1])
    return _written(op, element, view, maker)


def _element_written(op: tf.Operation, value: State, index: State) -> State:
    """The state of an element that is written.

    At the counter of a loop over the examples, the element is of the example of the iteration. At a
    place that is the same on every tower it is of the state of the value.

    Args:
      op: the operation `TensorArrayWriteV3`.
      value: the state of what is written.
      index: the state of the place, a scalar.
    """
    if value.kind is Kind.UNKNOWN:
        return value
    is_at_counter = index.is_position_of_each
    if is_at_counter:
        if value.kind not in (Kind.ONE_EXAMPLE, Kind.INDEPENDENT):
            return unknown(op, 'writes a value of all examples for each')
        return ONE_EXAMPLE.with_marks_of(value)
    if index.kind is not Kind.INDEPENDENT:
        return unknown(op, 'writes elements at places that are not known')
    if value.kind is Kind.ONE_EXAMPLE:
        return unknown(op, 'writes a value of one example at a place that is not its own')
    return value.with_marks_of(index)


def _written(op: tf.Operation, element: State, view: View, maker: tf.Operation) -> State:
    """Notes the state of an element that is written; the result is the state of the flow.

    An array to which two operations write has elements of the one and of the other: what is read
    may be either.
    """
    if element.is_position:  # elements may come together again in another order, and several times
        element = unknown(op, COMPUTES_WITH_POSITIONS)
    written_before = view.arrays.written(maker.name)
    if written_before is not None:
        element = _either_element(op, written_before, element, view)
    # In a branch or a loop, conditions decide whether the operation runs: see `_misses_writes`.
    is_in_choice = bool(contexts.conditions_around(op, view))
    view.arrays.write(maker.name, element, in_choice=op.name if is_in_choice else None)
    return INDEPENDENT


def _either_element(op: tf.Operation, written_before: State, element: State, view: View) -> State:
    """The state of the elements of an array to which two operations write.

    An array that has an element for each example has no others. A place that is the same on every
    tower is that of no example, and may be left by the writes of the examples: they may be in a
    branch that is not taken.

    Args:
      op: the operation that writes.
      written_before: the state of what another one has written.
      element: the state of what it writes.
      view: `View`.
    """
    if kinds_of([written_before, element]) == {Kind.ONE_EXAMPLE, Kind.INDEPENDENT}:
        return unknown(op, 'writes elements at places that are not known')
    return either(op, [written_before, element], view)


# ---- reads ---------------------------------------------------------------------------------------

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

        an element for each example    may be read in the iteration of this example alone, at the
                                       counter of the loop
        any other element              may be read at any place but a position of an example; it is
                                       marked with a mean by which the place is computed

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
    # In another shard an example has another number, by which it would get another element.
    if is_at_counter:
        return unknown(op, TAKES_BY_PLACES)
    choice = not_linear(op, [index], view)  # unknown, if the place is of one example
    if choice.kind is Kind.UNKNOWN:
        return choice
    return element.with_marks_of(choice)


def _gather(op: tf.Operation, states: _States, view: View,
            maker: tf.Operation) -> typing.Optional[State]:
    """`stack`: the elements along a new first dimension.

        n examples [d]             [n, d], if each of them is taken, in their order
        elements [n, d] by time    [time, n, d], with the examples along dimension 1
        elements without examples  of their state: the entries of means are means
    """
    indices = states[1]
    element = view.arrays.element(maker.name)
    if element is None:  # nothing is written yet
        return None
    not_known = first_unknown([element, indices])
    if not_known is not None:
        return not_known
    if element.kind is Kind.ONE_EXAMPLE:
        if not indices.is_position_of_each:
            return unknown(op, 'takes some of the examples, or changes their order')
        return per_example(0).with_marks_of(element)
    if indices.kind is not Kind.INDEPENDENT:
        return unknown(op, TAKES_BY_PLACES)
    if element.is_by_example:
        # The elements of other iterations may be other ones, so that they are not constant.
        element = element._replace(axis=element.axis + 1, is_constant=False)
    return element.with_marks_of(indices)


# All types of the table's row but for `TensorArrayV3`.
_RULES = {'TensorArraySizeV3': _size, 'TensorArrayScatterV3': _scatter,
          'TensorArrayWriteV3': _write, 'TensorArrayReadV3': _read,
          'TensorArrayGatherV3': _gather}
