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
from towers.proof.rules.common import (
    any_by_example,
    any_position,
    fits_examples_as_built,
    kinds_of,
)
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
    """The state of a value behind a condition: it is computed in a branch that the condition takes,
    or is the one of two values that the condition chooses.

        a condition that is the same on every tower    all towers take the same branch: the value
                                                       stays as it is
        a condition of one example, in a loop over     chooses a value of this example, or one that
        the examples                                   all examples have alike: the choice is of
                                                       this example
        a mean or a sum of the shard                   towers may take other branches: the value is
                                                       marked with it
        any other condition                            nothing is known of the value

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
      The state; None if a condition has no state yet, as one that a loop computes has none in the
      first round of the analysis. A later round sets it.
    """
    conditions = contexts.conditions_of(op, view)
    if not conditions:
        return unknown(op, 'ends a branch whose condition is not known')
    state = either(op, branch_states(op.inputs, states, view), view)
    for condition in conditions:
        if condition is None:  # it has no state yet
            return None
        state = in_branch(op, state, condition, view)
    return state


def branch_states(tensors: typing.Iterable[tf.Tensor], states: _PerhapsStates,
                  view: View) -> _States:
    """The states of the results of branches, as far as they are known, for `either`.

    In a graph as built, with a static batch of 8 examples, `either` takes uniform values [8, 4],
    such as zeros, for zeros of the 8 examples. Of the result of a branch that is not certain:
    TensorFlow lets the other branch have the result x [n, 4] of any n. So a result of a static
    shape does not count as uniform here. Zeros whose shape is not static, as of `tf.zeros_like(x)`,
    have the shape of the batch.

    Args:
      tensors: a result of each branch.
      states: their states.
      view: `View`.
    """
    known = []
    for tensor, state in zip(tensors, states):
        if state is None:
            continue
        if _has_static_shape(tensor, view):
            state = state._replace(is_uniform=False)
        known.append(state)
    return known


def _has_static_shape(tensor: tf.Tensor, view: View) -> bool:
    """Whether all lengths of a tensor are static."""
    shape = view.shape(tensor)
    return shape is not None and None not in shape


def either(op: tf.Operation, states: _States, view: View) -> State:
    """The state of a tensor that has one of several values, by a choice that all towers make alike.

        values of one and the same state        that state
        a list in which nothing is written,     the other list's state, if it has the same length
        and another list
        an unknown value and any other          unknown
        values [n, …] of the examples           of the examples, if all have them in the same place
        positions and any other                 unknown
        means, sums and constants               what their sum is: a mean and a constant, a mean
        sizes                                   numbers; n counts as a sum

    Args:
      op: the operation that chooses, to which a refusal points.
      states: the states of the values, at least one.
      view: `View`.
    """
    if not _have_one_length(states):
        return unknown(op, 'joins lists of different lengths')
    written = [state for state in states if state.kind is not Kind.EMPTY]
    if not written:  # all of them are lists in which nothing is written
        return states[0]
    are_all_alike = len(set(written)) == 1
    if are_all_alike:
        return written[0]
    not_known = first_unknown(written)
    if not_known is not None:
        return not_known
    # A choice between two sizes is no size that a shape could have: n counts as a sum from here on.
    without_sizes = as_numbers(op, written, view)
    if any_by_example(without_sizes):
        return _either_of_examples(op, without_sizes, view).with_marks_of(*written)
    if any_position(without_sizes):
        return unknown(op, 'joins the positions of the examples')
    # All towers choose alike. So a choice between the means of f and of g is a mean, of f or of g,
    # as their sum is one; and so it is with sums and constants.
    return sum_of_totals(op, without_sizes, view)


def _have_one_length(states: _States) -> bool:
    """Whether the values are lists of tensors of one length, or no lists at all.

    `State.sizes` is the length of a list, and () of a value that is none. Only SIZES have other
    numbers there; of an UNKNOWN value it is not known what it is.
    """
    lengths = {state.sizes for state in states if state.kind not in (Kind.SIZES, Kind.UNKNOWN)}
    return len(lengths) <= 1


def _either_of_examples(op: tf.Operation, states: _States, view: View) -> State:
    """The state of a tensor that has one of several values, where one of them at least has entries
    of single examples: all others have to have the examples in the same place.

    Args:
      op: the operation that chooses.
      states: the states of the values.
      view: `View`.
    """
    # In a graph as built, with a static batch of 8 examples, zeros [8, 4], with which a recurrent
    # cell begins, go with values that have the examples in any place: all others decide on it.
    deciding = [state for state in states if not fits_examples_as_built(state, view)]
    # In the iteration of an example, the choice is between a value of this example and one that all
    # examples have alike: neither depends on another example.
    if kinds_of(deciding) == {Kind.ONE_EXAMPLE, Kind.INDEPENDENT}:
        return ONE_EXAMPLE
    layouts = {state.layout for state in deciding}
    if len(layouts) > 1:
        return unknown(op, 'joins values in which the examples are in other places')
    is_constant = all(state.is_constant for state in deciding)
    return deciding[0]._replace(is_constant=is_constant)


# ---- the values that a loop carries --------------------------------------------------------------

def enter(op: tf.Operation, states: _States, view: View) -> State:
    """`Enter`, where a value comes into a loop: the same value.

    What an iteration over the examples has, its example or its number, may not enter a second loop
    over the examples: there it could not be told from those of that loop.
    """
    state = states[0]
    is_of_iteration = state.kind is Kind.ONE_EXAMPLE or _may_be_number(op.inputs[0], state, view)
    if is_of_iteration and contexts.frame_is_over_examples(op, view):
        return unknown(op, 'enters a loop over the examples from another one')
    return state


def _may_be_number(tensor: tf.Tensor, state: State, view: View) -> bool:
    """Whether a tensor may be the number of the iteration of a loop over the examples: a POSITION
    that is a scalar. A vector of this state has the positions of all examples."""
    may_be_scalar = view.rank(tensor) in (0, None)
    return state.kind is Kind.POSITION and may_be_scalar


def _carried(op: tf.Operation, states: _States, back: tf.Tensor, view: View) -> State:
    """The state of a value that a loop carries, at the `Merge` where its iterations begin.

    In a loop over time this is the value before the loop, or that after an iteration. In a loop
    over the examples only counters and the flows of arrays may go from one iteration to the next,
    since the next one is of another example.

    Args:
      op: the `Merge`.
      states: of the value before the loop, and after an iteration. The second one is not there in
        the first round of the analysis, which comes to the iteration later.
      back: the value after an iteration.
      view: `View`.
    """
    loop = contexts.loop_of(op, view)
    if not loop.is_over_examples:
        return either(op, states, view)
    if contexts.is_counter(op, back):
        return State(Kind.POSITION)
    is_first_round = len(states) == 1
    if is_first_round:
        return states[0]
    if contexts.is_array_flow(back):
        return _carried_flow(op, states)
    return unknown(op, 'carries a value from one example to the next')


def _carried_flow(op: tf.Operation, states: _States) -> State:
    """The state of an array's flow, a tensor without numbers that orders the operations on the
    array. It carries the marks of all writes, and the end of a proof in one of them.

    It is of the example of an iteration where a condition of the example decides what is written:
    what the array has after all iterations then depends on all examples.
    """
    if any_by_example(states):
        return unknown(op, 'writes an array by a condition of single examples')
    return first_unknown(states) or states[0].with_marks_of(*states)


# ---- the end of a loop ---------------------------------------------------------------------------

def exit_loop(op: tf.Operation, states: _States, view: View) -> State:
    """`Exit`: the value after the last iteration.

        of a loop over time      as behind a branch (`in_branch`): the condition tells how many
                                 iterations a tower makes, and where it depends on the shard, towers
                                 may make other numbers of them
        of a loop over the       its counter is n at the end; its arrays have n elements; any other
        n examples               value would be that of the last example, and is refused
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
    depend on that. It works on loops of control flow v1 and v2, so that it is told here how to find
    in a loop of v1 the test, the counter, and the value at the beginning and the end of an
    iteration (`longest.Loop`, `longest.Carried`).

    Args:
      leaving: the `Exit` of the value.
      loop: the loop.
      view: `View`.
    """
    switch_op = leaving.inputs[0].op
    merge_op = switch_op.inputs[0].op
    loop_cond = switch_op.inputs[1].op
    value_after_iteration = contexts.back_edge(merge_op)
    if value_after_iteration is None:  # no loop as TensorFlow builds it
        return loop.condition
    loop_over_time = longest.Loop(
        test=loop_cond.inputs[0], outside=_before_loop, is_counter=_is_counter)
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
