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

    The condition may be

        the same on every tower        all towers take the same branch: the value stays as it is
        of one example, in a loop      a value of this example, or one that all examples have alike,
        over the examples              is chosen by this example, and so is of it
        a mean or a sum of the shard   towers may take other branches: the value is marked with it

    and by any other condition nothing is known of the value.

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
      The states of its two results, the value and the number of the branch that it came from; None
      as long as they are not known.
    """
    value_after_iteration = contexts.back_edge(op)
    if value_after_iteration is None:
        value = _end_of_branch(op, states, view)
    else:
        known = [state for state in states if state is not None]
        value = _carried(op, known, value_after_iteration, view)
    if value is None:
        return None
    return [value, unknown(op, 'tells which branch was taken')]


def _end_of_branch(op: tf.Operation, states: _PerhapsStates, view: View) -> typing.Optional[State]:
    """The state of the value at a `Merge` that ends a branch. It depends on the conditions by which
    the branches of the two inputs are taken, too: for a `tf.cond` this is one condition.

    Returns:
      The state; None if a condition has no state yet, as in the first round one that a loop
      computes. A later round of the analysis sets it.
    """
    conditions = contexts.conditions_of(op, view)
    if not conditions:
        return unknown(op, 'ends a branch whose condition is not known')
    state = either(op, branch_states(op.inputs, states, view), view)
    for condition in conditions:
        if condition is None:
            return None
        state = in_branch(op, state, condition, view)
    return state


def branch_states(tensors: typing.Iterable[tf.Tensor], states: _PerhapsStates,
                  view: View) -> _States:
    """The states of the results of branches, as far as they are known, for `either`.

    A uniform value, such as zeros, may stand for zeros of each example (`State.is_uniform`). Zeros
    of a static shape [8, 4] may not: TensorFlow lets the other branch have the result x [n, 4], so
    that 8 need not be the number of examples. Zeros whose shape is not static, as those of
    `tf.zeros_like(x)`, have the shape of the batch.

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
        has_static_shape = shape is not None and None not in shape
        if has_static_shape:
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
    if not written:
        return states[0]
    first = written[0]
    if all(state == first for state in written):
        return first
    not_known = first_unknown(written)
    if not_known is not None:
        return not_known
    # A choice between two sizes is no size that a shape could have: n counts as a sum from here on.
    without_sizes = as_numbers(op, written, view)
    if any_by_example(without_sizes):
        return _either_of_examples(op, without_sizes, view).with_marks_of(*written)
    if any(state.is_position for state in without_sizes):
        return unknown(op, 'joins the positions of the examples')
    # All towers choose alike. So a choice between the means of f and of g is a mean, of f or of g,
    # as their sum is one; and so it is with sums and constants. The result has all marks already.
    return sum_of_totals(op, without_sizes, view)


def _either_of_examples(op: tf.Operation, states: _States, view: View) -> State:
    """The state of a tensor that has one of several values, where one of them at least has entries
    of single examples: all others have to have the examples in the same place.

    Args:
      op: the operation that chooses.
      states: the states of the values.
      view: `View`.
    """
    values = states
    if view.is_as_built:
        # As built, nothing tells zeros [8, 4] of 8 examples, with which a recurrent cell begins,
        # from other zeros [8, 4]: uniform values have no say about the place of the examples.
        values = [state for state in states if not state.is_uniform]
    kinds = {state.kind for state in values}
    # In the iteration of an example, the choice is between a value of this example and one that all
    # examples have alike: neither depends on another example.
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
    # A scalar POSITION is the number of an iteration; a vector has the positions of all examples.
    may_be_scalar = view.rank(op.inputs[0]) in (0, None)
    is_number_of_iteration = state.kind is Kind.POSITION and may_be_scalar
    is_of_iteration = state.kind is Kind.ONE_EXAMPLE or is_number_of_iteration
    if is_of_iteration and contexts.frame_is_over_examples(op, view):
        return unknown(op, 'enters a loop over the examples from another one')
    return state


def _carried(op: tf.Operation, states: _States, back: tf.Tensor, view: View) -> State:
    """The state of a value that a loop carries, at the `Merge` where its iterations begin.

    In a loop over time this is the value before the loop, or that after an iteration. In a loop
    over the examples only counters and the flows of arrays may go from one iteration to the next,
    since the next one is of another example.

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
    """The state of an array's flow, a tensor without numbers that orders the operations on the
    array. It carries the marks of all writes, and the end of a proof in one of them."""
    return first_unknown(states) or states[0].with_marks_of(*states)


# ---- the end of a loop ---------------------------------------------------------------------------

def exit_loop(op: tf.Operation, states: _States, view: View) -> State:
    """`Exit`: the value after the last iteration.

    The condition of a loop over time tells how many iterations a tower makes. If towers may make
    other numbers of them, the value depends on the shard, as behind a branch (`in_branch`). A loop
    over n examples makes n iterations. Out of it come its counter, which is n at the end, and
    arrays of n elements; anything else is that of the last example.
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
    """The state of the condition that ends a loop over time, for one of the values that leave it.

    `longest.condition_for` takes the mark of the longest example away where the value does not
    depend on that. This function finds in the graph what it asks for.

    Args:
      leaving: the `Exit` of the value.
      loop: the loop.
      view: `View`.
    """
    switch_op = leaving.inputs[0].op
    merge_op = switch_op.inputs[0].op
    test = switch_op.inputs[1].op
    value_after_iteration = contexts.back_edge(merge_op)
    if value_after_iteration is None or test.type != 'LoopCond':
        return loop.condition
    loop_over_time = longest.Loop(
        test=test.inputs[0], outside=_before_loop, is_counter=_is_counter)
    value = longest.Carried(
        after=graph_walk.source_through(value_after_iteration, ('NextIteration', 'Identity')),
        is_before=functools.partial(_is_carried_by, merge_op),
        begins_empty=_before_loop(merge_op.inputs[0]).op.type == 'TensorArrayV3')
    return longest.condition_for(value, loop_over_time, loop.condition, view)


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
