"""Rules for loops of control flow v2: `While`, whose condition and body are functions.

The body of a loop is in the scratch graph (`functions`), with placeholders, its arguments, for the
values that it carries:

    before the loop     `loop.inputs[i]`
    in an iteration     `body.arguments[i]` at its beginning, `body.results[i]` after it
    after the loop      `loop.outputs[i]`

As in `loops`: a loop over time goes around until nothing changes; a loop over the examples counts
from 0 to n, and may carry counters and lists of tensors alone, since everything else goes from one
example to the next.
"""

import functools
import typing

import tensorflow.compat.v1 as tf

from towers.graph import graph_walk
from towers.proof.contexts import NUMBER_OF_EXAMPLES, constant_of
from towers.proof.functions import LoopBody
from towers.proof.rules import longest, loops
from towers.proof.sizes import sizes_in
from towers.proof.states import Kind, State, unknown
from towers.proof.view import View


class Carried(typing.NamedTuple):
    """A value that a loop carries."""
    loop: tf.Operation  # of the scratch graph
    body: LoopBody
    number: int  # among the values of the loop

    @property
    def argument(self) -> tf.Tensor:
        """The value at the beginning of an iteration."""
        return self.body.arguments[self.number]

    @property
    def initial(self) -> tf.Tensor:
        """The value before the loop."""
        return self.loop.inputs[self.number]

    @property
    def result(self) -> tf.Tensor:
        """The value after an iteration."""
        return self.body.results[self.number]

    @property
    def is_list(self) -> bool:
        """Whether it is a list of tensors."""
        return self.initial.dtype == tf.variant

    @property
    def is_kept(self) -> bool:
        """Whether an iteration hands it on as it is."""
        return self.is_argument(self.result)

    @property
    def is_counter(self) -> bool:
        """Whether it is the number of the iteration: from 0, one more each time."""
        step = _behind_identities(self.result).op
        if step.type not in ('Add', 'AddV2') or constant_of(self.initial) != 0:
            return False
        carried, increment = step.inputs
        return self.is_argument(carried) and constant_of(increment) == 1

    def is_argument(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor of an iteration is this value at its beginning."""
        return _behind_identities(tensor).name == self.argument.name


def _behind_identities(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor that `Identity` operations hand on as this one."""
    return graph_walk.source_through(tensor, ('Identity',))


def _carried_values(op: tf.Operation, body: LoopBody) -> typing.List[Carried]:
    """The values that a loop carries, in the order of its inputs."""
    return [Carried(op, body, number) for number in range(len(body.arguments))]


def _carried_as(tensor: tf.Tensor, op: tf.Operation, body: LoopBody) -> typing.Optional[Carried]:
    """The carried value whose argument a tensor of an iteration is; None for any other tensor."""
    for carried in _carried_values(op, body):
        if carried.is_argument(tensor):
            return carried
    return None


# ---- the beginning of an iteration ---------------------------------------------------------------

def argument(carried: Carried, view: View) -> typing.Optional[State]:
    """The state of a value that a loop carries, at the beginning of an iteration: that of its
    argument.

    Returns:
      The state; None as long as the value before the loop has none.
    """
    initial = view.state_or_none(carried.initial)
    if initial is None:
        return None
    if is_over_examples(carried.loop, carried.body, view):
        return _carried_over_examples(carried, initial, view)
    return _initial_or_result(carried, initial, view)


def _initial_or_result(carried: Carried, initial: State, view: View) -> State:
    """The state of a value that is from before the loop, or from the iteration before.

    Args:
      carried: the value.
      initial: the state that it has before the loop.
      view: `View`.
    """
    result = view.state_or_none(carried.result)
    if result is None:  # in the first round of the analysis, which comes to the result later
        return initial
    if carried.is_kept:
        return initial
    return loops.either(carried.loop, [initial, result], view)


def _carried_over_examples(carried: Carried, initial: State, view: View) -> State:
    """The state of a value that a loop over the examples carries, at the beginning of an iteration.

    Args:
      carried: the value.
      initial: the state that it has before the loop.
      view: `View`.
    """
    if carried.is_counter:
        return State(Kind.POSITION)
    if carried.is_list:
        return _list_over_examples(carried, initial, view)
    # What an iteration of another loop around this one has, its example or its number, could not
    # be told here from what an iteration of this loop has.
    if initial.kind in (Kind.ONE_EXAMPLE, Kind.POSITION):
        return unknown(carried.loop, 'is a loop over the examples in another one')
    if carried.is_kept:
        return initial
    return unknown(carried.loop, 'carries a value from one example to the next')


def _list_over_examples(carried: Carried, initial: State, view: View) -> State:
    """The state of a list that a loop over the examples carries.

    Each iteration may leave the list as it is, or write the element of its example. An element at a
    place that all iterations share is refused, since the next iteration could read it.

    Args:
      carried: the list.
      initial: the state that it has before the loop.
      view: `View`.
    """
    state = _initial_or_result(carried, initial, view)
    if state.kind is Kind.UNKNOWN:  # which has a reason already
        return state
    if carried.is_kept:  # no iteration writes
        return state
    is_first_round = view.state_or_none(carried.result) is None
    if is_first_round:  # of the analysis, which comes to the writes of the iteration later
        return state
    may_have_elements_of_examples = state.kind in (Kind.ONE_EXAMPLE, Kind.EMPTY)
    if may_have_elements_of_examples:
        return state
    return unknown(carried.loop, 'carries a value from one example to the next')


# ---- the end of a loop ---------------------------------------------------------------------------

def results(op: tf.Operation, body: LoopBody, view: View) -> typing.Optional[typing.List[State]]:
    """The states of the results of a loop, the values that it carries after the last iteration.

    Args:
      op: the loop, of the scratch graph.
      body: its `LoopBody`.
      view: `View`.

    Returns:
      List of states; None as long as the condition or a carried value has no state.
    """
    condition = view.state_or_none(body.condition)
    if condition is None:
        return None
    is_over_time = not is_over_examples(op, body, view)
    found = []
    for carried in _carried_values(op, body):
        state = view.state_or_none(carried.argument)
        if state is None:
            return None
        if is_over_time:
            found.append(_after_time(carried, state, condition, view))
        else:
            found.append(_after_examples(carried, state))
    return found


def _after_time(carried: Carried, state: State, condition: State, view: View) -> State:
    """The state of a value after a loop over time. Its condition tells how many iterations a tower
    makes; if towers may make other numbers of them, the value depends on the shard, as behind a
    branch.

    Args:
      carried: the value.
      state: its state at the beginning of an iteration.
      condition: the state of the condition.
      view: `View`.
    """
    condition_of_end = _condition_of_end(carried, condition, view)
    return loops.in_branch(carried.loop, state, condition_of_end, view)


def _after_examples(carried: Carried, state: State) -> State:
    """The state of a value after a loop over n examples: the counter is n, lists have n elements,
    and a value that no iteration changes is as before. Any other value would be that of the last
    example, and is refused.

    Args:
      carried: the value.
      state: its state at the beginning of an iteration.
    """
    if state.kind is Kind.POSITION:
        return State(Kind.SIZES, sizes=NUMBER_OF_EXAMPLES)
    if carried.is_kept or carried.is_list:
        return state
    return unknown(carried.loop, 'leaves a loop over the examples')


def _condition_of_end(carried: Carried, condition: State, view: View) -> State:
    """The state of the condition that ends a loop over time, for one of the values that leave it.

    `longest.condition_for` takes the mark of the longest example away where the value does not
    depend on that. It works on loops of control flow v1 and v2, so that it is told here how to find
    in a loop of v2 the test, the counter, and the value at the beginning and the end of an
    iteration (`longest.Loop`, `longest.Carried`).

    Args:
      carried: the value.
      condition: the state of the condition.
      view: `View`.
    """
    op = carried.loop
    body = carried.body
    loop_over_time = longest.Loop(
        test=body.condition,
        outside=functools.partial(_before_loop, op=op, body=body),
        is_counter=functools.partial(_is_counter, op=op, body=body))
    value = longest.Carried(
        after=_behind_identities(carried.result),
        is_before=carried.is_argument,
        begins_empty=view.state(carried.initial).kind is Kind.EMPTY)
    return longest.condition_for(value, loop_over_time, condition, view)


def _before_loop(tensor: tf.Tensor, op: tf.Operation, body: LoopBody) -> tf.Tensor:
    """The tensor that enters a loop as it is; a tensor of the loop's own is returned itself."""
    carried = _carried_as(tensor, op, body)
    if carried is None or not carried.is_kept:
        return _behind_identities(tensor)
    return _behind_identities(carried.initial)


def _is_counter(tensor: tf.Tensor, op: tf.Operation, body: LoopBody) -> bool:
    """Whether a tensor of a loop is the number of the iteration."""
    carried = _carried_as(tensor, op, body)
    return carried is not None and carried.is_counter


# ---- loops over the examples ---------------------------------------------------------------------

def is_over_examples(op: tf.Operation, body: LoopBody, view: View) -> bool:
    """Whether a loop has an iteration for each example: its test is that counters are below n."""
    return _is_below_examples(body.condition, op, body, view)


def _is_below_examples(test: tf.Tensor, op: tf.Operation, body: LoopBody, view: View) -> bool:
    """Whether a test of a loop is that counters are below the number of examples: `i < n`, or, as
    `tf.map_fn` has it, `i < n and i_of_lists < n`.

    Args:
      test: the condition for one more iteration, or a part of it.
      op: the loop.
      body: its `LoopBody`.
      view: `View`.
    """
    test = _behind_identities(test)
    if test.op.type == 'LogicalAnd':
        return all(_is_below_examples(part, op, body, view) for part in test.op.inputs)
    if test.op.type != 'Less':
        return False
    counter, limit = test.op.inputs
    if not _is_counter(counter, op, body):
        return False
    carried_limit = _carried_as(limit, op, body)
    if carried_limit is not None and not carried_limit.is_kept:  # another one in each iteration
        return False
    limit = _before_loop(limit, op, body)
    limit_state = view.state_or_none(limit)
    return limit_state is not None and sizes_in(limit, limit_state, view) == NUMBER_OF_EXAMPLES
