"""From the states of an operation's inputs to the states of its results.

For most operations the table of rules gives the states of the results (`by_table`). Three kinds of
operations need more than the states of their inputs: an operation that gives a value of all towers
(`towers.batch_sum` and its like); an operation that takes a variable which the forward pass has
written before; and a call of a function or a loop of control flow v2, for which its body is needed.

Words of other modules used here: of `WrittenBefore`, `reads`: operations that read a variable after
the forward pass has written it, and `takers_of_memory`: others that take the memory of such a
variable; of `Bodies`, `branch_results`: the results of the functions that a call may run, `loops`:
the bodies of loops v2, and `left_out`: calls whose bodies take no batch of another size;
`batch_value_role`: the role of a value of all towers, such as 'sum'.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.graph.op_types import BRANCHES_V2, batch_value_role
from towers.proof.by_table import Results, states_by_row, states_by_table
from towers.proof.rules import loops, loops_v2
from towers.proof.rules.totals import marks_of_totals
from towers.proof.states import (
    INDEPENDENT,
    TAKES_NO_OTHER_BATCH,
    Kind,
    PerhapsStates,
    State,
    if_complete,
    unknown,
)
from towers.proof.table import RULES
from towers.proof.view import View
from towers.proof.written_before import WrittenBefore, state_after_writes

_BYTES_OF_INTEGER = 4  # of the narrowest integers that count the examples of any batch


class Transfer:
    """Gives the states of an operation's results by the states of its inputs."""

    def __init__(self, view: View, written_before: WrittenBefore):
        """Finds the values that loops of control flow v2 carry, whose bodies the view has.

        Args:
          view: `View` of the scratch graph.
          written_before: the operations that take variables after the forward pass wrote them.
        """
        self._view = view
        self._written_before = written_before
        # {name of an argument of the body of a loop v2: the value of the loop that it stands for}
        self._carried: typing.Dict[str, loops_v2.Carried] = {}
        for name, body in view.bodies.loops.items():
            loop = view.graph.get_operation_by_name(name)
            for number, argument in enumerate(body.arguments):
                if argument.op.name in view.bodies.initial_values:  # else it is a handle
                    self._carried[argument.op.name] = loops_v2.Carried(loop, body, number)

    def looks_further(self, op: tf.Operation) -> bool:
        """Whether the results depend on states of other tensors than the operation's inputs: then
        they may change in a round of `fixed_point` in which the states of the inputs do not.

        The results of an operation that takes a written variable depend on the written values. The
        results of a call or a loop, and the values that a loop carries, depend on the results of
        the body. A rule with an answer for unknown inputs finds the answer by tensors further
        upstream, since the state of an unknown input tells nothing.
        """
        takes_written = op.name in self._written_before.reads or (
            op.name in self._written_before.takers_of_memory)
        row = RULES.get(op.type)
        looks_upstream = row is not None and row.takes_unknown
        return takes_written or looks_upstream or self._has_body(op)

    def results(self, op: tf.Operation,
                states: PerhapsStates) -> typing.Optional[typing.List[State]]:
        """The states of the results of an operation.

        Args:
          op: an operation of the scratch graph.
          states: the states of its inputs, None where one has none yet.

        Returns:
          List of states, one a result; None as long as a state that they need is not there.
        """
        found = self._results_of_kind(op, states)
        if found is None:
            return None
        if isinstance(found, State):  # one state for all results
            found = [found] * len(op.outputs)
        results = []
        for tensor, state in zip(op.outputs, found):
            state = self._without_overflow(tensor, state)
            state = self._without_selection_in_loop(op, state)
            results.append(self._with_mark_of_own_gradient(op, state))
        return results

    def _results_of_kind(self, op: tf.Operation, states: PerhapsStates) -> Results:
        """The states of the results, by the kind of the operation; `results` completes them."""
        kind_of_batch_value = self._kind_of_batch_value(op)
        if kind_of_batch_value is not None:
            return self._over_towers(op, states[0], kind_of_batch_value)
        if op.name in self._written_before.reads:
            return self._read_of_written(op, states)
        if op.name in self._written_before.takers_of_memory:
            return self._taker_of_written_memory(op, states)
        return self._by_body_or_table(op, states)

    def _by_body_or_table(self, op: tf.Operation, states: PerhapsStates) -> Results:
        """The results of an operation, by the body of the function that it calls, or by its row of
        the table."""
        if self._has_body(op):
            return self._by_body(op, states)
        return states_by_table(op, states, self._view)

    # ---- what holds for the results of all operations

    def _without_overflow(self, tensor: tf.Tensor, state: State) -> State:
        """The state of a result. It is no mean, sum or share where the type of the result holds
        small integers alone: a sum of 256 ones is 0 in a uint8, and so not the sum of the shards'
        sums.

        Args:
          tensor: the result.
          state: the state that the result has if nothing overflows.
        """
        is_narrow = tensor.dtype.is_integer and tensor.dtype.size < _BYTES_OF_INTEGER
        if is_narrow and state.is_total_or_share:
            return marks_of_totals(tensor.op, [state], self._view, 'may overflow its type')
        return state

    def _without_selection_in_loop(self, op: tf.Operation, state: State) -> State:
        """The state of a result; unknown where an operation in a loop selects rows. It selects
        other rows in each iteration, and `State.selection` has the name of the operation alone, so
        that these rows would count as the same."""
        selecting_operation = state.selection.split(':')[0]
        if selecting_operation == op.name and self._view.is_in_loop(op):
            return unknown(op, 'selects other rows in each iteration of a loop')
        return state

    def _with_mark_of_own_gradient(self, op: tf.Operation, state: State) -> State:
        """The state of a result, marked where its operation has a gradient of the program's own:
        the towers' gradients add up to the batch's only where a gradient is linear."""
        if not self._has_own_gradient(op):
            return state
        self._view.note(op.name, op, 'has a gradient of its own, which may not be linear')
        return state.with_shard_statistics([op.name])

    def _has_own_gradient(self, op: tf.Operation) -> bool:
        """Whether the program gave an operation a gradient of its own: `tf.custom_gradient`, or
        `gradient_override_map`."""
        calls_function_with_own_gradient = op.name in self._view.bodies.with_own_gradient
        if calls_function_with_own_gradient:
            return True
        # An operation in the body of a function is not among these: if it has a gradient of its
        # own, the call of that function gets the mark (`Bodies.with_own_gradient`).
        if op.name not in self._view.with_own_gradient:
            return False
        # To a value of all towers not the program, but this package gave a gradient, which is
        # linear: the sum over the towers (`batch_values`).
        return self._kind_of_batch_value(op) is None

    # ---- a value of all towers

    def _kind_of_batch_value(self, op: tf.Operation) -> typing.Optional[str]:
        """The kind of the value of the whole batch that an operation gives; None for an operation
        that gives no such value."""
        original = self._view.program_op(op)
        return None if original is None else batch_value_role(original)

    def _over_towers(self, op: tf.Operation, state: typing.Optional[State], kind: str) -> Results:
        """The state of a value that is taken over all towers. It is the value of the whole batch,
        if the value of the shard has the right state: the sum of the towers' sums is the sum of the
        batch, for example.

        Args:
          op: the operation that marks the value.
          state: the state of the shard's value. Of several values in one tensor, as for 'moments',
            the state tells nothing of the single values.
          kind: see `Mark.kind` of `batch_values`.
        """
        if state is None or state.kind is Kind.UNKNOWN:
            return state
        if kind == 'moments':
            return self._moments_over_towers(op, is_random=state.is_random)
        is_of_whole_batch = _IS_OF_WHOLE_BATCH[kind]
        are_rows_in_order = state.kind is not Kind.ROWS or self._view.is_of_one_round(
            state.selection)
        if is_of_whole_batch(state) and are_rows_in_order:
            return INDEPENDENT.with_marks_of(state)
        self._view.note(
            op.name, op, 'takes a %s over the towers of %s' % (kind, state.kind.value))
        return INDEPENDENT.with_shard_statistics(state.shard_statistics | {op.name})

    def _moments_over_towers(self, op: tf.Operation, is_random: bool) -> State:
        """The state of the moments of all towers' values: they are the moments of the whole batch.
        `sync_batch_norm` alone takes them, from the moments of each shard.

        They have the marks of the values, and not those of the operation's input: the variance of
        the shard is also marked with the mean of the shard, on which the variance of the batch does
        not depend.

        Args:
          op: the operation that marks the moments.
          is_random: whether random numbers take part in them.
        """
        values = self._values_of_moments(op)
        return INDEPENDENT._replace(is_random=is_random).with_marks_of(*values)

    def _values_of_moments(self, op: tf.Operation) -> typing.List[State]:
        """The states of the values whose moments are taken over the towers. The marked operation
        takes the moments of a shard, `concat([reshape(mean(values)), variance, count])`.

        [] after the exchange, when the operation takes a row of all towers' moments in their place:
        such moments have no marks of a shard.
        """
        joined = op.inputs[0].op
        was_exchanged = joined.type != 'ConcatV2'
        if was_exchanged:
            return []
        reshaped_mean = joined.inputs[0].op
        mean = reshaped_mean.inputs[0].op
        return [self._view.state(mean.inputs[0])]

    # ---- a variable that was written before

    def _read_of_written(self, op: tf.Operation, states: PerhapsStates) -> Results:
        """The results of a read of a variable after the forward pass has written it: the written
        value, or some of its rows (`ResourceGather`)."""
        known = if_complete(states)
        if known is None:  # an input has no state yet
            return None
        value = state_after_writes(op, self._written_before.reads[op.name], self._view)
        if value is None or value.kind is Kind.UNKNOWN:
            return value
        states_of_indices = known[1:]  # the first input is the variable
        if not states_of_indices:
            return value
        return states_by_row(RULES[op.type], op, [value] + states_of_indices, self._view)

    def _taker_of_written_memory(self, op: tf.Operation, states: PerhapsStates) -> Results:
        """The results of an operation that takes the memory of a variable after the forward pass
        has written to it.

        The operation gets the value before the writes, or the written value. The value before them
        is the same on every tower, and the states of the inputs go by it. If the written values are
        the same on every tower as well, these states hold in both cases.
        """
        writes = self._written_before.takers_of_memory[op.name]
        memory_after_writes = state_after_writes(op, writes, self._view)
        if memory_after_writes is None:  # a written value has no state yet
            return None
        if not memory_after_writes.is_alike_on_towers:
            return unknown(op, 'takes the memory of a variable that was written before')
        return self._by_body_or_table(op, states)

    # ---- by the body of a function

    def _has_body(self, op: tf.Operation) -> bool:
        """Whether an operation calls a function, or is a value that a loop v2 carries."""
        bodies = self._view.bodies
        is_call = bodies.has_body_of(op.name) or op.name in bodies.left_out
        return is_call or op.name in self._carried

    def _by_body(self, op: tf.Operation, states: PerhapsStates) -> Results:
        """The results of a call or a loop by its body; the state of a value that a loop carries."""
        bodies = self._view.bodies
        if op.name in bodies.left_out:  # since shape inference refuses its body
            return unknown(op, TAKES_NO_OTHER_BATCH)
        if op.name in bodies.branch_results:
            known = if_complete(states)
            return None if known is None else self._by_branches(op, known)
        if op.name in bodies.loops:
            return loops_v2.results(op, bodies.loops[op.name], self._view)
        return loops_v2.argument(self._carried[op.name], self._view)

    def _by_branches(self, op: tf.Operation, states: typing.List[State]) -> Results:
        """The results of a call, by the bodies of the functions that it may run.

        Args:
          op: the call of one function; or an `If` or a `Case`, which calls one function for each
            branch, and whose first input is the condition.
          states: the states of its inputs.
        """
        found = []
        results_of_branches = self._view.bodies.branch_results[op.name]
        # `alternatives`: one result of the call, as each of the branches gives it.
        for alternatives in zip(*results_of_branches):
            known = if_complete(list(map(self._view.state_or_none, alternatives)))
            if known is None:
                return None
            # Not all that is known of a value counts if it may be another branch's instead.
            alternative_states = loops.branch_states(alternatives, known, self._view)
            state = loops.either(op, alternative_states, self._view)
            if op.type in BRANCHES_V2:
                condition = states[0]
                state = loops.in_branch(op, state, condition, self._view)
            found.append(state)
        return found


# ---- values of the whole batch -------------------------------------------------------------------

def _adds_up(state: State) -> bool:
    """Whether the sum of the towers' values is the value of the batch."""
    is_sum = state.kind is Kind.SUM or state.is_count
    return is_sum and not state.has_offset


def _averages(state: State) -> bool:
    """Whether the mean of the towers' values, weighted by examples, is the value of the batch."""
    return state.kind in (Kind.MEAN, Kind.INDEPENDENT)


def _concatenates(state: State) -> bool:
    """Whether the towers' values, one after the other along dimension 0, are the value of the
    batch. With two rounds of all examples they are not: they have both rounds of shard 0 first."""
    is_of_batch = state.kind in (Kind.PER_EXAMPLE, Kind.ROWS)
    return is_of_batch and state.axis == 0 and state.outer == 1


_IS_OF_WHOLE_BATCH = {'sum': _adds_up, 'mean': _averages, 'concat': _concatenates}
"""{what is taken over the towers: whether a state of the shard's value makes it the batch's}"""
