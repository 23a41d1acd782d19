"""Rules for loops of control flow v2: `While`, whose condition and body are functions.

The body of a loop is imported into the scratch graph (`functions`). The arguments of the body are
placeholders, one for each value that the loop carries:

    before the loop     `loop.inputs[i]`
    in an iteration     `body.arguments[i]` at its beginning, `body.results[i]` after it
    after the loop      `loop.outputs[i]`

As in `loops`, the analysis goes around a loop over time until no state changes. A loop over the
examples counts from 0 to n. It may carry only counters, lists of tensors, and values that no
iteration changes: any other value would go from one example to the next.
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
    number: int  # the value's index among the inputs of the loop

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
        """Whether the value is a list of tensors."""
        return self.initial.dtype == tf.variant

    @property
    def is_kept(self) -> bool:
        """Whether an iteration hands the value on unchanged."""
        return self.is_argument(self.result)

    @property
    def is_counter(self) -> bool:
        """Whether the value is the number of the iteration: it begins at 0, and each iteration adds
        1."""
        step = _behind_identities(self.result).op
        if step.type not in ('Add', 'AddV2') or constant_of(self.initial) != 0:
            return False
        carried, increment = step.inputs
        return self.is_argument(carried) and constant_of(increment) == 1

    def is_argument(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor of an iteration is this value at the beginning of the iteration."""
        return _behind_identities(tensor).name == self.argument.name


def _behind_identities(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor that `Identity` operations hand on to a tensor."""
    return graph_walk.source_through(tensor, ('Identity',))


def _carried_values(op: tf.Operation, body: LoopBody) -> typing.List[Carried]:
    """The values that a loop carries, in the order of its inputs."""
    return [Carried(op, body, number) for number in range(len(body.arguments))]


def _carried_as(tensor: tf.Tensor, op: tf.Operation, body: LoopBody) -> typing.Optional[Carried]:
    """The value that a loop carries whose argument is a tensor of an iteration; None for any other
    tensor."""
    for carried in _carried_values(op, body):
        if carried.is_argument(tensor):
            return carried
    return None


# ---- the beginning of an iteration ---------------------------------------------------------------

def argument(carried: Carried, view: View) -> typing.Optional[State]:
    """The state of the argument for a value that a loop carries: the value at the beginning of an
    iteration.

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
    """The state of a value that is from before the loop, or from the previous iteration.

    Args:
      carried: the value.
      initial: the state of the value before the loop.
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
      initial: the state of the value before the loop.
      view: `View`.
    """
    if carried.is_counter:
        return State(Kind.POSITION)
    if carried.is_list:
        return _list_over_examples(carried, initial, view)
    # The initial value may be the example, or the number, of an iteration of another loop around
    # this loop. Here it would have the same state as the example, or the number, of an iteration of
    # this loop.
    if initial.kind in (Kind.ONE_EXAMPLE, Kind.POSITION):
        return unknown(carried.loop, 'is a loop over the examples in another one')
    if carried.is_kept:
        return initial
    return unknown(carried.loop, 'carries a value from one example to the next')


def _list_over_examples(carried: Carried, initial: State, view: View) -> State:
    """The state of a list that a loop over the examples carries.

    Each iteration may leave the list as it is, or write the element of its own example. An element
    at a place that all iterations share is refused, since the next iteration could read it.

    Args:
      carried: the list.
      initial: the state of the list before the loop.
      view: `View`.
    """
    state = _initial_or_result(carried, initial, view)
    if state.kind is Kind.UNKNOWN:  # the state has its reason already
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
    """The states of the results of a loop: of each carried value, after the last iteration.

    Args:
      op: the loop, of the scratch graph.
      body: the body of the loop.
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
    """The state of a value after a loop over time. The loop's condition tells how many iterations a
    tower makes. If two towers may make different numbers of iterations, the value depends on the
    shard, as behind a branch.

    Args:
      carried: the value.
      state: the state of the value at the beginning of an iteration.
      condition: the state of the condition.
      view: `View`.
    """
    condition_of_end = _condition_of_end(carried, condition, view)
    return loops.in_branch(carried.loop, state, condition_of_end, view)


def _after_examples(carried: Carried, state: State) -> State:
    """The state of a value after a loop over n examples: the counter is n, lists have n elements,
    and a value that no iteration changes keeps its state. Any other value would be the last
    example's, and is refused.

    Args:
      carried: the value.
      state: the state of the value at the beginning of an iteration.
    """
    if state.kind is Kind.POSITION:
        return State(Kind.SIZES, sizes=NUMBER_OF_EXAMPLES)
    if carried.is_kept or carried.is_list:
        return state
    return unknown(carried.loop, 'leaves a loop over the examples')


def _condition_of_end(carried: Carried, condition: State, view: View) -> State:
    """The state of the condition that ends a loop over time, for one of the values that leave the
    loop.

    `longest.condition_for` takes the mark of the longest example away, if the value does not depend
    on the longest example. The function works on loops of control flow v1 and v2. So it gets a
    `longest.Loop` and a `longest.Carried`, which find in a loop of v2 the test, the counter, and
    the value at the beginning and the end of an iteration.

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
    """The tensor before the loop that a tensor in the loop hands on; a tensor that the loop
    computes is returned itself."""
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
    """Whether a loop has an iteration for each example: it runs while its counters are below n."""
    return _is_below_examples(body.condition, op, body, view)


def _is_below_examples(test: tf.Tensor, op: tf.Operation, body: LoopBody, view: View) -> bool:
    """Whether a test of a loop is that counters are below the number of examples: `i < n`; or
    `i < n and i_of_lists < n`, as in `tf.map_fn`.

    Args:
      test: the condition for one more iteration, or a part of this condition.
      op: the loop.
      body: the body of the loop.
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
    if carried_limit is not None and not carried_limit.is_kept:  # the limit changes
        return False
    limit = _before_loop(limit, op, body)
    return sizes_in(limit, view.state_so_far(limit), view) == NUMBER_OF_EXAMPLES
