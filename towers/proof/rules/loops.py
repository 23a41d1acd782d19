"""Rules for loops and branches of control flow v1.

    a loop      Enter -> Merge -> Switch -> body -> NextIteration -> back to the Merge
                                         \\-> Exit
    a branch    Switch, by its condition -> operations of either branch -> Merge

A loop over time treats the states that it carries as any value; the analysis goes around until
nothing changes. A loop over the examples (`tf.map_fn`) counts from 0 to n: in its iteration e, an
element that is read at the counter is the example e. It may carry counters and arrays alone, since
everything else goes from one example to the next.
"""

import functools
import typing

import tensorflow.compat.v1 as tf

from towers.graph import graph_walk
from towers.proof import contexts
from towers.proof.rules import longest
from towers.proof.rules.common import any_by_example
from towers.proof.rules.totals import not_linear, sum_of_totals
from towers.proof.sizes import as_number, as_numbers
from towers.proof.states import ONE_EXAMPLE, Kind, State, first_unknown, unknown
from towers.proof.view import View

_States = typing.List[State]
_PerhapsStates = typing.Sequence[typing.Optional[State]]  # None of one that has none yet


def identity(op: tf.Operation, states: _States, view: View) -> State:
    """`Identity`, `NextIteration`: the same value has the same state."""
    return states[0]


def identities(op: tf.Operation, states: _States, view: View) -> _States:
    """`IdentityN`: the same values have the same states."""
    return list(states)


# ---- branches ------------------------------------------------------------------------------------

def switch(op: tf.Operation, states: _States, view: View) -> State:
    """`Switch`, where a branch begins: a value x [n, …] is the same x in the branch that is taken.

    At the test of a loop, the value goes on to the next iteration, or to the `Exit`. Whether all
    towers make the same number of iterations is asked at the `Exit` (`exit_loop`).
    """
    value, condition = states
    is_test_of_loop = op.inputs[1].op.type == 'LoopCond'
    if is_test_of_loop:
        return value
    return in_branch(op, value, condition, view)


def in_branch(op: tf.Operation, value: State, condition: State, view: View) -> State:
    """The state of a value that there is, or that is chosen, by the condition of a branch.

        the same on every tower    all towers take the same branch
        of one example             in a loop over the examples: the value is of this example, too
        of the mean of the shard   one tower may take another branch than the next: the value is
                                   marked with that mean

    Args:
      op: the operation that a refusal points to.
      value: the state of the value.
      condition: the state of the condition.
      view: `View`.
    """
    condition = as_number(op, condition, view)
    if condition.kind is Kind.UNKNOWN:
        return condition
    if condition.kind is Kind.INDEPENDENT:
        return value.with_marks_of(condition)
    if condition.kind is Kind.ONE_EXAMPLE and value.kind in (Kind.ONE_EXAMPLE, Kind.INDEPENDENT):
        return ONE_EXAMPLE.with_marks_of(value, condition)
    if condition.is_total:
        choice = not_linear(op, [condition], view, 'chooses a branch by the examples')
        return value.with_marks_of(choice)
    return unknown(op, 'chooses a branch by the examples')


def merge(op: tf.Operation, states: _PerhapsStates,
          view: View) -> typing.Optional[typing.List[State]]:
    """`Merge`, the end of a branch, or the beginning of an iteration: either of the two values.

    Returns:
      The states of the value and of the number of the branch; None as long as a condition has none.
    """
    branch_number = unknown(op, 'tells which branch was taken')
    back = contexts.back_edge(op)
    if back is not None:  # a loop, whose value after an iteration comes back here
        known = [state for state in states if state is not None]
        return [_carried(op, known, back, view), branch_number]
    conditions = contexts.conditions_of(op, view)
    if not conditions:
        return [unknown(op, 'ends a branch whose condition is not known'), branch_number]
    state = either(op, branch_states(op.inputs, states, view), view)
    for condition in conditions:
        if condition is None:
            return None
        state = in_branch(op, state, condition, view)
    return [state, branch_number]


def branch_states(tensors: typing.Iterable[tf.Tensor], states: _PerhapsStates,
                  view: View) -> _States:
    """The states of the results of branches, as far as they are known.

    A uniform value, such as zeros, may stand for zeros of each example (`State.is_uniform`). As the
    result of a branch whose other result is [n, 4] it may not, if it has a shape of its own, as
    zeros [8, 4]. Zeros like another tensor, whose shape is not static, have the batch's.

    Args:
      tensors: a result of each branch.
      states: their states.
      view: `View`.
    """
    known = []
    for tensor, state in zip(tensors, states):
        if state is None:
            continue
        shape = view.shape(tensor)
        has_own_shape = shape is not None and None not in shape
        if has_own_shape:
            state = state._replace(is_uniform=False)
        known.append(state)
    return known


def either(op: tf.Operation, states: _States, view: View) -> State:
    """The state of a tensor that has one of several values, by a choice that all towers make alike.

    A choice between a mean and a constant is a mean, and one between values [n, …] of the examples
    is of the examples, where all values have them in the same place.

    Args:
      op: the operation that chooses, to which a refusal points.
      states: the states of the values, at least one.
      view: `View`.
    """
    # A list in which nothing is written yet fits any other list, so that the others decide.
    written = [state for state in states if state.kind is not Kind.EMPTY]
    states = written or states[:1]
    if all(state == states[0] for state in states):
        return states[0]
    not_known = first_unknown(states)
    if not_known is not None:
        return not_known
    numbers = as_numbers(op, states, view)
    if any_by_example(numbers):
        return _either_of_examples(op, numbers, view).with_marks_of(*states)
    if any(state.is_position for state in numbers):
        return unknown(op, 'joins numbers of the examples')
    # All towers choose alike, so one of f and g is of the kind that f + g is.
    return sum_of_totals(op, numbers, view)


def _either_of_examples(op: tf.Operation, states: _States, view: View) -> State:
    """One of several values of the examples, which have them in the same place."""
    values = states
    # In a graph of the program's own, static size of a batch, states only tell where the examples
    # are in this very graph. There, uniform values, such as the zeros [8, 4] that a recurrent cell
    # begins with, fit any place.
    has_size_of_program = view.is_as_built
    if has_size_of_program:
        values = [state for state in states if not state.is_uniform]
    # In the iteration of an example, either a value of this example or one that all examples have.
    kinds = {state.kind for state in values}
    if kinds == {Kind.ONE_EXAMPLE, Kind.INDEPENDENT}:
        return ONE_EXAMPLE
    layouts = {state.layout for state in values}
    if len(layouts) > 1:
        return unknown(op, 'joins values in which the examples are in other places')
    is_constant = all(state.is_constant for state in values)
    return values[0]._replace(is_constant=is_constant)


# ---- the values that a loop carries --------------------------------------------------------------

def enter(op: tf.Operation, states: _States, view: View) -> State:
    """`Enter`, where a value comes into a loop: the same value.

    What an iteration over the examples has, its example or its number, may not enter a second loop
    over the examples: there it could not be told from those of that loop.
    """
    state = states[0]
    may_be_scalar = view.rank(op.inputs[0]) in (0, None)  # unlike the positions [n] of all examples
    is_counter = state.kind is Kind.POSITION and may_be_scalar
    is_of_iteration = state.kind is Kind.ONE_EXAMPLE or is_counter
    if is_of_iteration and contexts.frame_is_over_examples(op, view):
        return unknown(op, 'enters a loop over the examples from another one')
    return state


def _carried(op: tf.Operation, states: _States, back: tf.Tensor, view: View) -> State:
    """The state of a value that a loop carries, at the `Merge` where its iterations begin.

    Args:
      op: the `Merge`.
      states: of the value before the loop, and after an iteration where it is known.
      back: the value after an iteration.
      view: `View`.
    """
    loop = contexts.loop_of(op, view)
    if not loop.is_over_examples:
        return either(op, states, view)
    if contexts.is_counter(op, back):
        return State(Kind.POSITION)
    is_first_round = len(states) < 2  # the value after an iteration has no state yet
    if is_first_round:
        return states[0]
    if contexts.is_array_flow(back):
        return _carried_flow(states)
    return unknown(op, 'carries a value from one example to the next')


def _carried_flow(states: _States) -> State:
    """The flow of an array, a tensor without numbers that orders the operations on it: it carries
    the marks of all writes, and the end of a proof in one of them."""
    return first_unknown(states) or states[0].with_marks_of(*states)


# ---- the end of a loop ---------------------------------------------------------------------------

def exit_loop(op: tf.Operation, states: _States, view: View) -> State:
    """`Exit`: the value after the last iteration. All towers have to make the same number of
    iterations; otherwise the value depends on the shard.

    Out of a loop over n examples come its counter, which is n at the end, and arrays of n elements.
    """
    state = states[0]
    loop = contexts.loop_of(op, view)
    if not loop.is_over_examples:
        return in_branch(op, state, _condition_of_end(op, loop, view), view)
    if state.kind is Kind.POSITION:
        return State(Kind.SIZES, sizes=contexts.NUMBER_OF_EXAMPLES)
    if contexts.is_array_flow(op.inputs[0]):
        return state
    return unknown(op, 'leaves a loop over the examples')


def _condition_of_end(leaving: tf.Operation, loop: contexts.Loop, view: View) -> State:
    """The state of the condition that ends a loop, for one of the values that leave it.

    Where the loop ends with the longest example, and the value does not depend on that, the state
    is without the mark of the maximum of the lengths (`longest`).

    Args:
      leaving: the `Exit` of the value.
      loop: the loop.
      view: `View`.
    """
    switch_op = leaving.inputs[0].op
    merge_op = switch_op.inputs[0].op
    test = switch_op.inputs[1].op
    back = contexts.back_edge(merge_op)
    if back is None or test.type != 'LoopCond':
        return loop.condition
    frame = longest.Loop(test.inputs[0], _before_loop, _is_counter)
    longest_example = longest.longest_of(frame, view)
    if longest_example is None:
        return loop.condition
    value = longest.Carried(
        after=graph_walk.source_through(back, ('NextIteration', 'Identity')),
        is_before=functools.partial(_is_carried_by, merge_op),
        begins_empty=_before_loop(merge_op.inputs[0]).op.type == 'TensorArrayV3')
    if longest.is_kept(value, longest_example, frame):
        return longest.without(loop.condition, longest_example)
    return loop.condition


def _before_loop(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor that enters a loop as it is; a tensor of the loop's own is returned itself."""
    return graph_walk.source_through(tensor, ('Identity', 'Enter', 'RefEnter'))


def _is_carried_by(merge_op: tf.Operation, tensor: tf.Tensor) -> bool:
    """Whether a tensor of a loop is the value at a `Merge`, where its iterations begin."""
    return graph_walk.source_through(tensor, ('Identity', 'Switch')).op is merge_op


def _is_counter(tensor: tf.Tensor) -> bool:
    """Whether a tensor of a loop is the number of the iteration."""
    merge_op = graph_walk.source_through(tensor, ('Identity', 'Switch')).op
    if merge_op.type != 'Merge':
        return False
    back = contexts.back_edge(merge_op)
    return back is not None and contexts.is_counter(merge_op, back)
