"""Rules for loops and branches of control flow v1, and for the arrays that loops write.

A loop over time treats the states that it carries as any value; the analysis goes around until
nothing changes. A loop over the examples (`tf.map_fn`) counts from 0 to n: in its iteration e, an
element that is read at the counter is the example e. It may carry counters and arrays alone, since
everything else goes from one example to the next.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.graph import graph_walk
from towers.proof.arithmetic import estimate, joined_totals
from towers.proof.sizes import sizes_in, used
from towers.proof.states import INDEPENDENT, ONE_EXAMPLE, Kind, Size, State, per_example, unknown

_HAND_ON = frozenset(['Identity', 'Enter', 'RefEnter', 'Exit', 'Switch', 'NextIteration'])


def handed_on(op, states, view):
    """`Identity`, `NextIteration`: the same value."""
    return states[0]


def entered(op, states, view):
    """`Enter`: the same value; a loop over the examples in another one is not looked at."""
    state = states[0]
    is_of_iteration = state.kind is Kind.ONE_EXAMPLE or state.kind is Kind.NUMBER and (
        not view.rank(op.inputs[0]))
    if is_of_iteration and view.frame_is_over_examples(op):
        return unknown(op, 'enters a loop over the examples from another one')
    return state


def all_handed_on(op, states, view):
    """`IdentityN`: the same values."""
    return list(states)


def switch(op, states, view):
    """A branch, or the test of a loop: towers take the same branch where all know the condition."""
    value, condition = states
    if view.is_loop_condition(op.inputs[1]):
        return value
    return chosen(op, value, condition, view)


def chosen(op, value, condition, view) -> State:
    """A value of a branch, by its condition."""
    condition = used(op, condition, view)
    if condition.kind is Kind.UNKNOWN:
        return condition
    if condition.kind is Kind.INDEPENDENT:
        return value.marked([condition])
    if condition.kind is Kind.ONE_EXAMPLE and value.kind in (Kind.ONE_EXAMPLE, Kind.INDEPENDENT):
        return ONE_EXAMPLE.marked([value, condition])
    if condition.is_total:
        return value.marked([estimate(op, [condition], view, 'chooses a branch by the examples')])
    return unknown(op, 'chooses a branch by the examples')


def merge(op, states, view):
    """The end of a branch, or the beginning of an iteration: either of the two values."""
    found = [state for state in states if state is not None]
    back = [tensor for tensor in op.inputs if tensor.op.type == 'NextIteration']
    if back:
        state = _carried(op, found, back[0], view)
    else:
        state = joined(op, branch_states(op.inputs, states, view), view)
        conditions = view.conditions_of(op)
        if None in conditions:
            return None
        if not conditions:
            state = unknown(op, 'ends a branch whose condition is not known')
        for condition in conditions:
            state = chosen(op, state, condition, view)
    return [state, unknown(op, 'tells which branch was taken')]


def branch_states(tensors, states, view) -> typing.List[State]:
    """The states of the ends of branches; a uniform value of a known shape, which is none of the
    batch, does not stand for one of each example."""
    found = []
    for tensor, state in zip(tensors, states):
        shape = view.shape(tensor)
        if state is not None and shape is not None and None not in shape:
            state = state._replace(is_uniform=False)
        if state is not None:
            found.append(state)
    return found


def _carried(op, found, back, view):
    """The state of a value that a loop carries."""
    loop = view.loop_of(op)
    if loop.is_over_examples:
        if counts(op, back):
            return State(Kind.NUMBER)
        if len(found) < 2 or view.is_array_flow(back):
            return found[0]
        return unknown(op, 'carries a value from one example to the next')
    return joined(op, found, view)


def counts(op, back) -> bool:
    """Whether a carried value is the number of the iteration: from 0, one more each time."""
    start = graph_walk.behind(op.inputs[0], ('Enter', 'Identity'))
    step = graph_walk.behind(back, ('NextIteration', 'Identity'))
    if step.op.type not in ('Add', 'AddV2') or number_of(start) != 0:
        return False
    carried, one = step.op.inputs
    return number_of(graph_walk.behind(one, _HAND_ON)) == 1 and (
        graph_walk.behind(carried, ('Identity', 'Switch')).op is op)


def number_of(tensor) -> typing.Optional[int]:
    """The value of a scalar constant; else None."""
    value = tf.get_static_value(tensor)
    return None if value is None or value.shape else int(value)


def joined(op, states, view):
    """The state of a tensor that has one of several values, by a choice that all towers make."""
    states = [state for state in states if state.kind is not Kind.NOTHING] or states[:1]
    first = states[0]
    if all(state == first for state in states):
        return first
    marks = INDEPENDENT.marked(states)
    reasons = [state for state in states if state.kind is Kind.UNKNOWN]
    if reasons:
        return reasons[0]
    states = [used(op, state, view) for state in states]
    if any(state.is_by_example for state in states):
        return _joined_examples(op, states).marked([marks])
    if any(state.kind in (Kind.NUMBER, Kind.PLACES) for state in states):
        return unknown(op, 'joins numbers of the examples')
    return joined_totals(op, states, view)


def _joined_examples(op, states):
    """One of several values of the examples, which have them in the same place."""
    states = [state for state in states if not state.is_uniform]
    kinds = {state.kind for state in states}
    if kinds == {Kind.ONE_EXAMPLE, Kind.INDEPENDENT}:
        return ONE_EXAMPLE
    if len({state[:5] for state in states}) > 1:
        return unknown(op, 'joins values in which the examples are in other places')
    return states[0]._replace(is_constant=all(state.is_constant for state in states))


def left(op, states, view):
    """`Exit`: the value after the last iteration, whose number all towers have to have alike."""
    loop = view.loop_of(op)
    if loop.is_over_examples:
        if states[0].kind is Kind.NUMBER:
            return State(Kind.SIZES, sizes=(Size(0, 1),))
        return states[0] if view.is_array_flow(op.inputs[0]) else unknown(
            op, 'leaves a loop over the examples')
    return chosen(op, states[0], loop.condition, view)


# ---- arrays -------------------------------------------------------------------------------------

def array(op, states, view):
    """Operations on `tf.TensorArray`s: the state of an array is that of its elements."""
    if op.type == 'TensorArrayV3':
        return INDEPENDENT
    flow = states[-1]
    if flow.kind is Kind.UNKNOWN:
        return flow
    states = [used(op, state, view) for state in states]
    name = graph_walk.behind(op.inputs[0], _HAND_ON | {'Merge'}).op.name
    found = _ON_ARRAYS.get(op.type, _no_rule)(op, states, view, name)
    return None if found is None else found.marked([flow])


def _no_rule(op, states, view, name):
    return unknown(op, 'has no rule')


def _size(op, states, view, name):
    return view.array_size(name)


def _scatter(op, states, view, name):
    """`unstack`: an element for each entry along the first dimension."""
    indices, value = states[1], states[2]
    if value.kind is Kind.PER_EXAMPLE and value.axis == 0:
        is_by_number = indices.kind is Kind.NUMBER and (value.outer, value.inner) == (1, 1)
        return view.write_array(name, op, ONE_EXAMPLE.marked([value]) if is_by_number else unknown(
            op, 'takes the examples apart'))
    if value.kind in (Kind.PER_EXAMPLE, Kind.ROWS):
        value = value._replace(axis=value.axis - 1) if value.axis else unknown(
            op, 'takes the examples apart')
    if indices.kind is not Kind.INDEPENDENT:
        value = unknown(op, 'writes elements at places that are computed from the examples')
    return view.write_array(name, op, value)


def _write(op, states, view, name):
    """One element, at the loop's counter or at a place that is the same on every tower."""
    index, value = states[1], used(op, states[2], view)
    if index.kind is Kind.NUMBER:
        is_of_example = value.kind in (Kind.ONE_EXAMPLE, Kind.INDEPENDENT)
        return view.write_array(name, op, ONE_EXAMPLE.marked([value]) if is_of_example else unknown(
            op, 'writes a value of all examples for each'))
    if index.kind is not Kind.INDEPENDENT or value.kind is Kind.ONE_EXAMPLE:
        value = unknown(op, 'writes elements at places that are not known')
    return view.write_array(name, op, value.marked([index]))


def _read(op, states, view, name):
    """One element: of an array of examples, at the counter of the loop over the examples alone."""
    index, element = states[1], view.element(name)
    if element is None:
        return None
    is_of_example = element.kind is Kind.ONE_EXAMPLE
    if (index.kind is Kind.NUMBER) != is_of_example and element.kind is not Kind.UNKNOWN:
        return unknown(op, 'takes elements by their places')
    if is_of_example:
        return element
    index = estimate(op, [index], view)
    return index if index.kind is Kind.UNKNOWN else element.marked([index])


def _gather(op, states, view, name):
    """`stack`: the elements along a new first dimension."""
    indices, element = states[1], view.element(name)
    if element is None:
        return None
    if element.kind is Kind.ONE_EXAMPLE:
        if indices.kind is not Kind.NUMBER:
            return unknown(op, 'takes some of the examples, or changes their order')
        return per_example(0).marked([element])
    if indices.kind is not Kind.INDEPENDENT:
        return unknown(op, 'takes elements by their places')
    if element.is_by_example:
        return element._replace(axis=element.axis + 1, is_constant=False).marked([indices])
    return element.marked([indices])


_ON_ARRAYS = {'TensorArraySizeV3': _size, 'TensorArrayScatterV3': _scatter,
              'TensorArrayWriteV3': _write, 'TensorArrayReadV3': _read,
              'TensorArrayGatherV3': _gather}


def size_of_array(op, view):
    """The state of the number of elements of an array, which it was made with."""
    if op.get_attr('dynamic_size'):
        return unknown(op, 'has elements added to it')
    sizes = sizes_in(op.inputs[0], view.state(op.inputs[0]), view)
    return unknown(op, 'has a size that is not static') if sizes is None else State(
        Kind.SIZES, sizes=sizes)
