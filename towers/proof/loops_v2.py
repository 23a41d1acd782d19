"""Rules for loops of control flow v2, and for the lists of tensors that they write.

As in `loops`: a loop over time goes around until nothing changes; a loop over the examples counts
from 0 to n, and may carry counters and lists alone. A list has the state of its elements.
"""

import tensorflow.compat.v1 as tf

from towers.graph import graph_walk
from towers.proof import loops
from towers.proof.arithmetic import estimate
from towers.proof.sizes import sizes_in, used
from towers.proof.states import INDEPENDENT, ONE_EXAMPLE, Kind, Size, State, per_example, unknown

_SAME = ('Identity',)
_OF_EACH = (Size(0, 1),)  # the length of a list with a place for each example


def argument(op, number, loop, view):
    """The state of a value that a loop carries, at the beginning of an iteration.

    Args:
      op: the loop, of the scratch graph.
      number: which of its values.
      loop: `LoopBody`.
      view: what rules ask of the analysis.
    """
    initial = view.state_or_none(op.inputs[number])
    if initial is None:
        return None
    result = view.state_or_none(loop.results[number])
    if is_over_examples(loop, op, view):
        return _carried_over_examples(op, number, loop, initial, result, view)
    if result is None or _is_kept(number, loop):
        return initial
    return loops.joined(op, [initial, result], view)


def _carried_over_examples(op, number, loop, initial, result, view):
    """The state of a value that a loop over the examples carries."""
    if _counts(op, number, loop):
        return State(Kind.NUMBER)
    is_of_iteration = initial.kind in (Kind.ONE_EXAMPLE, Kind.NUMBER) and (
        op.inputs[number].dtype != tf.variant)
    if is_of_iteration:
        return unknown(op, 'is a loop over the examples in another one')
    if _is_kept(number, loop):
        return initial
    if op.inputs[number].dtype == tf.variant:
        return initial if result is None else loops.joined(op, [initial, result], view)
    return unknown(op, 'carries a value from one example to the next')


def results(op, states, loop, view):
    """The states of the results of a loop."""
    condition = view.state_or_none(loop.condition)
    carried = [view.state_or_none(tensor) for tensor in loop.arguments]
    if condition is None or None in carried:
        return None
    if not is_over_examples(loop, op, view):
        return [loops.chosen(op, state, condition, view) for state in carried]
    found = []
    for number, state in enumerate(carried):
        if state.kind is Kind.NUMBER:
            found.append(State(Kind.SIZES, sizes=(Size(0, 1),)))
        elif _is_kept(number, loop) or op.inputs[number].dtype == tf.variant:
            found.append(state)
        else:
            found.append(unknown(op, 'leaves a loop over the examples'))
    return found


def is_over_examples(loop, op, view):
    """Whether a loop has an iteration for each example: its test is that counters are below n."""
    return _tests_counters(loop.condition, loop, op, view)


def _tests_counters(condition, loop, op, view):
    condition = graph_walk.behind(condition, _SAME)
    if condition.op.type == 'LogicalAnd':
        return all(_tests_counters(each, loop, op, view) for each in condition.op.inputs)
    if condition.op.type != 'Less':
        return False
    counter, limit = [graph_walk.behind(tensor, _SAME) for tensor in condition.op.inputs]
    names = [tensor.name for tensor in loop.arguments]
    if counter.name not in names or not _counts(op, names.index(counter.name), loop):
        return False
    if limit.name in names:
        if not _is_kept(names.index(limit.name), loop):
            return False
        limit = op.inputs[names.index(limit.name)]
    state = view.state_or_none(limit)
    return state is not None and sizes_in(limit, state, view) == (Size(0, 1),)


def _is_kept(number, loop):
    """Whether an iteration hands on a value as it is."""
    return graph_walk.behind(loop.results[number], _SAME).name == loop.arguments[number].name


def _counts(op, number, loop):
    """Whether a carried value is the number of the iteration: from 0, one more each time."""
    step = graph_walk.behind(loop.results[number], _SAME).op
    if step.type not in ('Add', 'AddV2') or loops.number_of(op.inputs[number]) != 0:
        return False
    carried, one = step.inputs
    return loops.number_of(one) == 1 and (
        graph_walk.behind(carried, _SAME).name == loop.arguments[number].name)


# ---- lists --------------------------------------------------------------------------------------

def made(op, states, view):
    """`TensorListReserve`: nothing is written yet, in a list of a number of places."""
    places = sizes_in(op.inputs[1], states[1], view)
    if places is None:
        return unknown(op, 'makes a list of a length that is not static')
    return State(Kind.NOTHING, sizes=places)


def from_tensor(op, states, view):
    """An element for each entry along the first dimension."""
    value = used(op, states[0], view)
    if value.kind is Kind.ROWS and value.axis == 0:
        return unknown(op, 'takes the examples apart')
    if value.kind is Kind.PER_EXAMPLE and value.axis == 0:
        if (value.outer, value.inner) == (1, 1):
            return ONE_EXAMPLE._replace(sizes=_OF_EACH).marked([value])
        return unknown(op, 'takes the examples apart')
    shape = view.shape(op.inputs[0])
    if shape is None or shape[0] is None:
        return unknown(op, 'makes a list of a length that is not static')
    places = (Size(shape[0]),)
    if value.is_by_example:
        return value._replace(axis=value.axis - 1, sizes=places)
    return value._replace(sizes=places)


def length(op, states, view):
    """The number of places of a list."""
    places = states[0].sizes
    return State(Kind.SIZES, sizes=places) if places else unknown(
        op, 'is a length that is not static')


def item(op, states, view):
    """An element: of a list of examples, at the counter of the loop over the examples alone."""
    elements, index = states[0], used(op, states[1], view)
    is_of_example = elements.kind is Kind.ONE_EXAMPLE
    if elements.kind is Kind.NOTHING or (index.kind is Kind.NUMBER) != is_of_example:
        return unknown(op, 'takes elements by their places')
    elements = elements._replace(sizes=())
    if is_of_example:
        return elements
    index = estimate(op, [index], view)
    return index if index.kind is Kind.UNKNOWN else elements.marked([index])


def set_item(op, states, view):
    """One element more, at the loop's counter or at a place that is the same on every tower."""
    elements, index, value = states[0], used(op, states[1], view), used(op, states[2], view)
    if index.kind is Kind.NUMBER:
        if value.kind not in (Kind.ONE_EXAMPLE, Kind.INDEPENDENT):
            return unknown(op, 'writes a value of all examples for each')
        value = ONE_EXAMPLE.marked([value])
    elif index.kind is not Kind.INDEPENDENT or value.kind is Kind.ONE_EXAMPLE:
        return unknown(op, 'writes elements at places that are not known')
    before = elements._replace(sizes=())
    found = loops.joined(op, [before, value.marked([index])], view)
    return found if found.kind is Kind.UNKNOWN else found._replace(sizes=elements.sizes)


def stacked(op, states, view):
    """The elements along a new first dimension."""
    elements = states[0]
    is_of_each = elements.kind is Kind.ONE_EXAMPLE
    if elements.sizes != _OF_EACH if is_of_each else elements.depends_on_length:
        return unknown(op, 'stacks a list that has not one place for each example')
    if elements.kind is Kind.NOTHING:
        return INDEPENDENT
    if is_of_each:
        return per_example(0).marked([elements])
    if elements.is_by_example:
        return elements._replace(axis=elements.axis + 1, is_constant=False, sizes=())
    return elements._replace(sizes=())
