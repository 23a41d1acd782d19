"""Rules for loops of control flow v2.

As in `loops`: a loop over time goes around until nothing changes; a loop over the examples counts
from 0 to n, and may carry counters and lists of tensors alone. The body of a loop is in the scratch
graph, with placeholders, its arguments, for the values that it carries (`functions`).
"""

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
        return self.loop.inputs[self.number].dtype == tf.variant

    @property
    def is_kept(self) -> bool:
        """Whether an iteration hands it on as it is."""
        return _behind_identities(self.result).name == self.argument.name

    @property
    def is_counter(self) -> bool:
        """Whether it is the number of the iteration: from 0, one more each time."""
        step = _behind_identities(self.result).op
        if step.type not in ('Add', 'AddV2') or constant_of(self.initial) != 0:
            return False
        carried, increment = step.inputs
        is_of_argument = _behind_identities(carried).name == self.argument.name
        return is_of_argument and constant_of(increment) == 1


def _behind_identities(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor that is handed on as this one."""
    return graph_walk.source_through(tensor, ('Identity',))


def argument(carried: Carried, view: View) -> typing.Optional[State]:
    """The state of a value that a loop carries, at the beginning of an iteration.

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
    """The state of a value from before the loop, or from the iteration before."""
    result = view.state_or_none(carried.result)
    if result is None or carried.is_kept:
        return initial
    return loops.either(carried.loop, [initial, result], view)


def _carried_over_examples(carried: Carried, initial: State, view: View) -> State:
    """The state of a value that a loop over the examples carries."""
    if carried.is_counter:
        return State(Kind.POSITION)
    if carried.is_list:
        return _list_over_examples(carried, initial, view)
    if initial.kind in (Kind.ONE_EXAMPLE, Kind.POSITION):
        return unknown(carried.loop, 'is a loop over the examples in another one')
    if carried.is_kept:
        return initial
    return unknown(carried.loop, 'carries a value from one example to the next')


def _list_over_examples(carried: Carried, initial: State, view: View) -> State:
    """The state of a list that a loop over the examples carries: each iteration leaves it as it is,
    or writes the element of its example. What it writes at a place of all examples, the next one
    could read."""
    found = _initial_or_result(carried, initial, view)
    is_of_each = found.kind in (Kind.ONE_EXAMPLE, Kind.EMPTY, Kind.UNKNOWN)
    if is_of_each or carried.is_kept or view.state_or_none(carried.result) is None:
        return found
    return unknown(carried.loop, 'carries a value from one example to the next')


def results(op: tf.Operation, body: LoopBody, view: View) -> typing.Optional[typing.List[State]]:
    """The states of the results of a loop, whose number of iterations all towers have alike.

    A loop over n examples leaves its counter, which is n then, and lists of n elements.

    Args:
      op: the loop, of the scratch graph.
      body: its `LoopBody`.
      view: `View`.

    Returns:
      List of states; None as long as what it carries has none.
    """
    condition = view.state_or_none(body.condition)
    if condition is None:
        return None
    is_of_examples = is_over_examples(op, body, view)
    loop = longest.Loop(body.condition, _Frame(op, body).before_loop, _Frame(op, body).is_counter)
    end = None if is_of_examples else longest.longest_of(loop, view)
    found = []
    for number, tensor in enumerate(body.arguments):
        carried = Carried(op, body, number)
        state = view.state_or_none(tensor)
        if state is None:
            return None
        if not is_of_examples:
            its_end = condition
            if end is not None and _is_kept_by(end, loop, carried, view):
                its_end = longest.without(condition, end)
            found.append(loops.in_branch(op, state, its_end, view))
        elif state.kind is Kind.POSITION:
            found.append(State(Kind.SIZES, sizes=NUMBER_OF_EXAMPLES))
        elif carried.is_kept or carried.is_list:
            found.append(state)
        else:
            found.append(unknown(op, 'leaves a loop over the examples'))
    return found


class _Frame(typing.NamedTuple):
    """A loop, for the questions of `longest`."""
    op: tf.Operation
    body: LoopBody

    def carried(self, tensor: tf.Tensor) -> typing.Optional[Carried]:
        """The value of the loop that a tensor is at the beginning of an iteration; else None."""
        tensor = _behind_identities(tensor)
        for number, argument_tensor in enumerate(self.body.arguments):
            if argument_tensor.name == tensor.name:
                return Carried(self.op, self.body, number)
        return None

    def before_loop(self, tensor: tf.Tensor) -> tf.Tensor:
        """The tensor that enters the loop as it is; a tensor of the loop's own is itself."""
        carried = self.carried(tensor)
        if carried is None or not carried.is_kept:
            return _behind_identities(tensor)
        return _behind_identities(carried.initial)

    def is_counter(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor is the number of the iteration."""
        carried = self.carried(tensor)
        return carried is not None and carried.is_counter


def _is_kept_by(end: longest.Longest, loop: longest.Loop, carried: Carried, view: View) -> bool:
    """Whether a carried value does not depend on the maximum of the lengths that ends the loop."""
    def is_before(tensor):
        return _behind_identities(tensor).name == carried.argument.name

    is_empty = view.state(carried.initial).kind is Kind.EMPTY
    value = _behind_identities(carried.result)
    return longest.is_kept(value, is_before, is_empty, end, loop)


def is_over_examples(op: tf.Operation, body: LoopBody, view: View) -> bool:
    """Whether a loop has an iteration for each example: its test is that counters are below n."""
    return _tests_counters(body.condition, op, body, view)


def _tests_counters(condition: tf.Tensor, op: tf.Operation, body: LoopBody, view: View):
    """Whether a condition is that counters are below the number of examples."""
    condition = _behind_identities(condition)
    if condition.op.type == 'LogicalAnd':
        return all(_tests_counters(each, op, body, view) for each in condition.op.inputs)
    if condition.op.type != 'Less':
        return False
    carried = {tensor.name: Carried(op, body, number)
               for number, tensor in enumerate(body.arguments)}
    counter_tensor, limit = [_behind_identities(tensor) for tensor in condition.op.inputs]
    counter = carried.get(counter_tensor.name)
    if counter is None or not counter.is_counter:
        return False
    carried_limit = carried.get(limit.name)
    if carried_limit is not None:
        if not carried_limit.is_kept:
            return False
        limit = carried_limit.initial
    state = view.state_or_none(limit)
    return state is not None and sizes_in(limit, state, view) == NUMBER_OF_EXAMPLES
