"""Rules for loops and branches of control flow v1.

    a loop      Enter -> Merge -> Switch -> body -> NextIteration -> back to the Merge
                                         \\-> Exit
    a branch    Switch, by its condition -> operations of either branch -> Merge

A loop over time may carry any value from one iteration to the next. The analysis goes around the
loop until no state changes. A loop over the examples (`tf.map_fn`) counts from 0 to n: in iteration
e, an element that is read at the counter is of example e. Such a loop may carry only counters and
arrays: any other value would go from one example to the next.
"""

import functools
import typing

import tensorflow.compat.v1 as tf

from towers.graph import graph_walk
from towers.proof import contexts
from towers.proof.rules import longest
from towers.proof.rules.common import (
    any_by_example,
    fits_examples_as_built,
    kinds_of,
)
from towers.proof.rules.totals import not_linear, sum_of_totals
from towers.proof.sizes import as_number, as_numbers
from towers.proof.states import (
    ONE_EXAMPLE,
    Kind,
    PerhapsStates,
    State,
    first_unknown,
    known_states,
    unknown,
)
from towers.proof.view import View

_States = typing.List[State]


def identity(op: tf.Operation, states: _States, view: View) -> State:
    """`Identity`, `NextIteration`: the same value has the same state."""
    return states[0]


def identities(op: tf.Operation, states: _States, view: View) -> _States:
    """`IdentityN`: the same values have the same states."""
    return list(states)


# ---- branches ------------------------------------------------------------------------------------

def switch(op: tf.Operation, states: _States, view: View) -> State:
    """`Switch`, where a branch begins: a value x [n, …] is the same x in the branch that is taken.

    A `Switch` by the test of a loop hands the value to the next iteration, or to the `Exit`. It
    keeps the state: the rule of the `Exit` (`exit_loop`) asks whether all towers make the same
    number of iterations.
    """
    value, condition = states
    is_test_of_loop = op.inputs[1].op.type == 'LoopCond'
    if is_test_of_loop:
        return value
    return in_branch(op, value, condition, view)


def in_branch(op: tf.Operation, value: State, condition: State, view: View) -> State:
    """The state of a value that depends on a condition: it is computed in a branch that the
    condition takes, or is the one of two values that the condition chooses.

        the condition is the same on every tower    all towers take the same branch: the value keeps
                                                    its state
        the condition is of one example, in a       the chosen value is of this example, or the same
        loop over the examples                      for all examples: the choice is of this example
        the condition is a mean or a sum            two towers may take different branches: the
                                                    value is marked with the mean or the sum
        any other condition                         nothing is known of the value

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


def merge(op: tf.Operation, states: PerhapsStates,
          view: View) -> typing.Optional[typing.List[State]]:
    """`Merge`, the end of a branch, or the beginning of an iteration: the one of two values.

    Returns:
      The states of its two results, the value and the number of the branch that gave the value;
      None as long as the state of the value is not known.
    """
    value_after_iteration = contexts.back_edge(op)
    if value_after_iteration is None:
        value = _end_of_branch(op, states, view)
    else:
        value = _carried(op, known_states(states), value_after_iteration, view)
    if value is None:
        return None
    return [value, unknown(op, 'tells which branch was taken')]


def _end_of_branch(op: tf.Operation, states: PerhapsStates, view: View) -> typing.Optional[State]:
    """The state of the value at a `Merge` that ends a branch. The value also depends on the
    conditions by which the branches of its two inputs are taken: for a `tf.cond`, one condition.

    Returns:
      The state; None if a condition has no state yet. A condition that a loop computes has no state
      in the first round of the analysis, and gets its state in a later round.
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


def branch_states(tensors: typing.Iterable[tf.Tensor], states: PerhapsStates,
                  view: View) -> _States:
    """The states of the results of branches for `either`, without the results that have no state
    yet.

    In a graph as built, with a static batch of 8 examples, `either` takes uniform values [8, 4],
    such as zeros, for zeros of the 8 examples. For the result of a branch this is not certain: it
    may have the static shape [8, 4], and the other branch the result x [n, 4] for any n, which
    TensorFlow allows. So a result of a static shape does not count as uniform here. Zeros whose
    shape is not static, as of `tf.zeros_like(x)`, have the shape of the batch, and stay uniform.

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

        values of one and the same state        this state
        a list in which nothing is written,     the other list's state, if both have the same length
        and another list
        an unknown value and any other          unknown
        values [n, …] of the examples           of the examples, if all values have the examples in
                                                the same place
        positions and any other                 unknown
        means, sums and constants               the state of their sum: a mean, for a mean and a
                                                constant
        sizes                                   numbers: n counts as a sum

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
    # All towers choose alike. So a choice between the means of f and of g is a mean, as their sum
    # is. In the same way, a choice between sums or constants has the state of their sum. Positions
    # have no sum: the state is unknown.
    return sum_of_totals(op, without_sizes, view)


def _have_one_length(states: _States) -> bool:
    """Whether the values are lists of tensors of one length, or no lists at all.

    `State.sizes` is the length of a list, and () for a value that is no list. States of two kinds
    are left out: in SIZES the field has other numbers; an UNKNOWN value may be a list or not.
    """
    lengths = {state.sizes for state in states if state.kind not in (Kind.SIZES, Kind.UNKNOWN)}
    return len(lengths) <= 1


def _either_of_examples(op: tf.Operation, states: _States, view: View) -> State:
    """The state of a tensor that has one of several values, of which at least one has entries of
    single examples: all other values must have the examples in the same place.

    Args:
      op: the operation that chooses.
      states: the states of the values.
      view: `View`.
    """
    # A recurrent cell may begin with zeros [8, 4], in a graph as built with a static batch of 8
    # examples. These zeros fit any layout of the examples: all other values decide on the layout.
    deciding = [state for state in states if not fits_examples_as_built(state, view)]
    # In the iteration of an example, the choice is between a value of this example and a value that
    # is the same for all examples: neither depends on another example.
    if kinds_of(deciding) == {Kind.ONE_EXAMPLE, Kind.INDEPENDENT}:
        return ONE_EXAMPLE
    # The layout has the kind of the state: so a mean beside [n, 4], or beside a value of one
    # example, has another layout, and is refused as well.
    layouts = {state.layout for state in deciding}
    if len(layouts) > 1:
        return unknown(op, 'joins values of the examples with values that have them in other '
                           'places, or nowhere')
    is_constant = all(state.is_constant for state in deciding)
    return deciding[0]._replace(is_constant=is_constant)


# ---- the values that a loop carries --------------------------------------------------------------

def enter(op: tf.Operation, states: _States, view: View) -> State:
    """`Enter`, where a value comes into a loop: the same value.

    The example, or the number, of an iteration of a loop over the examples may not enter a second
    loop over the examples. There it would have the same state as the example, or the number, of the
    second loop's iteration.
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
    """The state of a value that a loop carries, at the `Merge` where the iterations begin.

    In a loop over time this is the value before the loop, or the value after an iteration. In a
    loop over the examples only counters and the flows of arrays may go from one iteration to the
    next, since the next iteration is of another example.

    Args:
      op: the `Merge`.
      states: the state of the value before the loop, then the state after an iteration. The second
        state is missing in the first round of the analysis, which comes to the iteration later.
      back: the value after an iteration.
      view: `View`.
    """
    loop = contexts.loop_of(op, view)
    if not loop.is_over_examples:
        return either(op, states, view)
    if contexts.is_counter(op):
        return State(Kind.POSITION)
    is_first_round = len(states) == 1
    if is_first_round:
        return states[0]
    if contexts.is_array_flow(back):
        return _carried_flow(op, states)
    return unknown(op, 'carries a value from one example to the next')


def _carried_flow(op: tf.Operation, states: _States) -> State:
    """The state of an array's flow: the tensor, without numbers of its own, that orders the
    operations on the array. The state carries the marks of all writes. It is UNKNOWN, if the proof
    has ended at a write.

    The flow has the state ONE_EXAMPLE, if a condition of the example decides what is written. Then
    the array after all iterations depends on all examples: this is refused.
    """
    if any_by_example(states):
        return unknown(op, 'writes an array by a condition of single examples')
    return first_unknown(states) or states[0].with_marks_of(*states)


# ---- the end of a loop ---------------------------------------------------------------------------

def exit_loop(op: tf.Operation, states: _States, view: View) -> State:
    """`Exit`: the value after the last iteration.

        of a loop over time      as behind a branch (`in_branch`): the condition tells how many
                                 iterations a tower makes. If it depends on the shard, two towers
                                 may make different numbers of iterations
        of a loop over the       the counter is n at the end; the arrays have n elements; any other
        n examples               value would be the last example's, and is refused
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
    """The state of the condition that ends a loop over time, for one of the values that leave the
    loop.

    `longest.condition_for` takes the mark of the longest example away, if the value does not depend
    on the longest example. The function works on loops of control flow v1 and v2. So it gets a
    `longest.Loop` and a `longest.Carried`, which find in a loop of v1 the test, the counter, and
    the value at the beginning and the end of an iteration.

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
    """The tensor before the loop that a tensor in the loop hands on; a tensor that the loop
    computes is returned itself."""
    return graph_walk.source_through(tensor, ('Identity', 'Enter', 'RefEnter'))


def _is_carried_by(merge_op: tf.Operation, tensor: tf.Tensor) -> bool:
    """Whether a tensor of a loop is the value at a `Merge`, where the iterations begin."""
    return graph_walk.source_through(tensor, ('Identity', 'Switch')).op is merge_op


def _is_counter(tensor: tf.Tensor) -> bool:
    """Whether a tensor of a loop is the number of the iteration."""
    return contexts.is_counter(graph_walk.source_through(tensor, ('Identity', 'Switch')).op)
