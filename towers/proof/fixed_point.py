"""The fixed point of the states: through the scratch graph, in rounds, until nothing changes.

Without loops one round is enough, since each operation comes after its inputs. A loop needs some
more rounds: at first the state of a value that it carries is known from the value before the loop
alone, and then it changes with the value that comes back from an iteration.
"""

import collections
import itertools
import typing

import tensorflow.compat.v1 as tf

from towers.graph import graph_walk
from towers.graph.op_types import CONTROL_FLOW
from towers.proof.functions import Bodies, import_bodies
from towers.proof.scratch import Scratch
from towers.proof.stand_ins import known_lengths
from towers.proof.states import OTHER_DIMENSIONS, Kind, State, unknown
from towers.proof.transfer import Transfer
from towers.proof.view import View
from towers.proof.written_before import (
    ProgramOrder,
    WrittenBefore,
    find_written_before,
    values_written,
)

_IS_STATIC = 'has a static length in this graph where the batch has none'
_MOST_ROUNDS = 60  # a bound, in case that states of a loop change for ever


class Settled(typing.NamedTuple):
    """A scratch graph whose tensors have their states."""
    view: View
    operations: typing.List[tf.Operation]  # of the scratch graph, each behind its inputs


def settle(scratch: Scratch, program: ProgramOrder) -> Settled:
    """Finds the states of all tensors of a scratch graph.

    Args:
      scratch: `Scratch`, whose graph gets the bodies of the functions that it calls.
      program: `ProgramOrder` of the operations of the program that this graph has once more.
    """
    graph = scratch.graph
    # In an empty graph nothing is called.
    program_graph = program.operations[0].graph if program.operations else graph
    bodies = import_bodies(graph, program_graph)
    written_before = find_written_before(program, graph, bodies)
    program_ops = graph_walk.by_name(program.operations)
    view = View(scratch, bodies, program_ops, written_before.reads)
    operations = _in_order(graph, _needed_first(graph, bodies, written_before))
    program_ops_of_any_size = {} if scratch.has_static_batch else program_ops
    rounds = _Rounds(
        view, Transfer(view, written_before), scratch.is_prime, program_ops_of_any_size)
    rounds.go_around(operations)
    rounds.mark_without_state(operations)
    # The scratch graph lacks these operations, the program does not.
    for name, reason in scratch.left_out.items():
        for tensor in program_ops[name].outputs:
            view.states[tensor.name] = State(Kind.UNKNOWN, reason=reason)
    return Settled(view, operations)


class _Rounds:
    """Rounds through the operations of a scratch graph."""

    def __init__(self, view: View, transfer: Transfer, is_prime: bool,
                 program_ops: typing.Mapping[str, tf.Operation]):
        """Args:
          view: `View`, whose states are set.
          transfer: `Transfer`, which gives the states of an operation's results.
          is_prime: whether the number of examples is a prime, so that lengths tell of them.
          program_ops: {name: operation} of the program, if its batch has no static size; else {}.
        """
        self._view = view
        self._transfer = transfer
        self._lengths = _LengthsOfExamples(view.examples) if is_prime else None
        self._program_ops = program_ops
        self._initial = frozenset(view.states)  # names of the tensors at which the pass begins
        self._visits = 0  # the number of visits until now
        # {name of an operation: the number of its last visit}, and {name of a tensor: the number of
        # the visit that changed its state last}
        self._last_visit: typing.Dict[str, int] = {}
        self._last_change = dict.fromkeys(view.states, 0)

    def go_around(self, operations: typing.List[tf.Operation]) -> None:
        """Goes around until nothing changes: no state of a tensor, and no state of the elements of
        an array, which the view keeps beside the states of tensors. If there are changes in all
        `_MOST_ROUNDS` rounds, all states become unknown."""
        for _ in range(_MOST_ROUNDS):
            has_changed = self._go_around_once(operations)
            if not has_changed:
                return
        # A change may not have reached all tensors that it affects: no state that was found holds.
        for op in operations:
            if not self._has_initial_state(op):
                self._set(op, _unknown_results(
                    op, 'is in a graph with a loop whose end was not found'))

    def _go_around_once(self, operations: typing.List[tf.Operation]) -> bool:
        """Visits the operations whose results may change. Returns whether anything has changed."""
        visits_before = self._visits
        self._view.arrays.begin_round()
        for op in operations:
            if self._may_change(op):
                self._visit(op)
        has_state_changed = max(self._last_change.values(), default=0) > visits_before
        return has_state_changed or not self._view.arrays.are_settled

    def mark_without_state(self, operations: typing.List[tf.Operation]) -> None:
        """Makes the tensors unknown that have no state, since no input of the pass reaches them."""
        for op in operations:
            if any(tensor.name not in self._view.states for tensor in op.outputs):
                self._set(op, _unknown_results(op, 'has no value that is known'))

    def _may_change(self, op: tf.Operation) -> bool:
        """Whether an operation may give other states than at its last visit."""
        if op.name not in self._last_visit:
            return True
        depends_on_condition = op.type in CONTROL_FLOW
        depends_on_elements = op.type.startswith('TensorArray')  # of the array, in `View.arrays`
        if depends_on_condition or depends_on_elements or self._transfer.looks_further(op):
            return True
        last_visit = self._last_visit[op.name]
        return any(self._last_change.get(tensor.name, 0) > last_visit for tensor in op.inputs)

    def _has_initial_state(self, op: tf.Operation) -> bool:
        """Whether the forward pass begins at an operation, a placeholder or a size constant, whose
        state then stays as it is."""
        return op.name + ':0' in self._initial

    def _visit(self, op: tf.Operation) -> None:
        """Sets the states of an operation's results by the states that its inputs have now."""
        self._visits += 1
        self._last_visit[op.name] = self._visits
        if self._has_initial_state(op):
            return
        states = [self._view.state_or_none(tensor) for tensor in op.inputs]
        results = self._transfer.results(op, states)
        if results is None:  # a state that is needed for them is not there yet
            return
        self._set(op, results)

    def _set(self, op: tf.Operation, results: typing.List[State]) -> None:
        """Sets the states of an operation's results, and notes what has changed.

        A state that contradicts shape inference is not set: a rule that has the examples along
        dimension 0 of [3, n] is wrong, whatever the reason, and the result is unknown.

        Args:
          op: the operation.
          results: a state for each of its results.
        """
        for tensor, state in zip(op.outputs, results):
            if self._lengths is not None and not self._lengths.agree(tensor, state):
                state = unknown(op, OTHER_DIMENSIONS)
            elif self._is_static_in_program(tensor, state):
                state = unknown(op, _IS_STATIC)
            name = tensor.name
            if self._view.states.get(name) != state:
                self._view.states[name] = state
                self._last_change[name] = self._visits

    def _is_static_in_program(self, tensor: tf.Tensor, state: State) -> bool:
        """Whether a tensor has, in the program's graph, a static length along the examples of a
        batch that has no static size: then TensorFlow has inferred a shape that is wrong.

        For example, its shape inference takes the cross entropies of logits [?, 4] and labels
        [1, 4] for a vector of length 1, and the kernel computes an entry for each example. The
        gradient of their mean then lacks the division by the number of examples.
        """
        op = self._program_ops.get(tensor.op.name)
        if op is None or state.kind is not Kind.PER_EXAMPLE or tensor.dtype == tf.variant:
            return False
        lengths = known_lengths(op.outputs[tensor.value_index])
        return state.axis < len(lengths) and lengths[state.axis] is not None


class _LengthsOfExamples:
    """The lengths of dimensions that have the examples, by shape inference: the lengths that are
    multiples of the number of examples, a prime that divides no other length
    (`stand_ins.prime_for`)."""

    def __init__(self, examples: int):
        """Begins with no tensor.

        Args:
          examples: the number of examples, a prime.
        """
        self._examples = examples
        # {name of a tensor: {dimension: length}}
        self._known_lengths: typing.Dict[str, typing.Dict[int, int]] = {}

    def agree(self, tensor: tf.Tensor, state: State) -> bool:
        """Whether a state does not contradict what shape inference says of a tensor.

        A contradiction comes from a rule that is wrong: this check is the net under all rules. Or
        it comes from a graph that makes a result of the size of the program's own batch
        (`analysis._holds_size`).

        PER_EXAMPLE with the examples along dimension 0 contradicts the shapes [3, n] and [3, 4],
        but neither [n, 4] nor [?, 4]. INDEPENDENT, or a mean, contradicts [n, 4].
        """
        is_list = tensor.dtype == tf.variant  # it has the state of its elements, and another shape
        says_no_dimension = state.kind is Kind.UNKNOWN or state.is_position
        if is_list or says_no_dimension:
            return True
        lengths = self._lengths_of(tensor)
        if state.kind is not Kind.PER_EXAMPLE:
            return not lengths
        if not lengths:
            return _may_be_not_static(tensor, state.axis)
        return lengths == {state.axis: state.entries_of_each * self._examples}

    def _lengths_of(self, tensor: tf.Tensor) -> typing.Dict[int, int]:
        """{dimension: its length} of the dimensions that have the examples."""
        if tensor.name not in self._known_lengths:
            lengths = {}
            for axis, length in enumerate(known_lengths(tensor)):
                if length and length % self._examples == 0:  # neither unknown nor empty
                    lengths[axis] = length
            self._known_lengths[tensor.name] = lengths
        return self._known_lengths[tensor.name]


def _may_be_not_static(tensor: tf.Tensor, axis: int) -> bool:
    """Whether a tensor may have a dimension of a length that is not static."""
    if tensor.shape.ndims is None:
        return True
    if tensor.shape.ndims == 0:  # the flow of an array, with the state of the array's elements
        return True
    lengths = known_lengths(tensor)
    return axis < len(lengths) and lengths[axis] is None


def _unknown_results(op: tf.Operation, why: str) -> typing.List[State]:
    """The states of the results of an operation about which nothing is proven, one for each."""
    return [unknown(op, why)] * len(op.outputs)


# ---- the order of the operations -----------------------------------------------------------------

_NeededFirst = typing.Dict[str, typing.List[tf.Tensor]]
"""{name of an operation: the tensors that have their states before it, beside its inputs}"""


def _needed_first(graph: tf.Graph, bodies: Bodies, written_before: WrittenBefore) -> _NeededFirst:
    """Tensors that need their states before an operation, beside its inputs.

        a call              the results of the functions' bodies
        a loop (v2)         the results of its body, and its condition
        what a loop (v2)    the value before the loop
        carries
        a read              the values that were written before it

    Args:
      graph: the scratch graph.
      bodies: `Bodies` of the functions that it calls.
      written_before: its reads behind writes, and takers of memory behind writes.
    """
    found: _NeededFirst = collections.defaultdict(list)
    for name, branches in bodies.branch_results.items():
        found[name] += itertools.chain.from_iterable(branches)
    for name, loop in bodies.loops.items():
        found[name] += loop.results + [loop.condition]
    for name, initial_value in bodies.initial_values.items():
        found[name].append(initial_value)
    for name, writes in itertools.chain(
            written_before.reads.items(), written_before.takers_of_memory.items()):
        for write in writes:
            found[name] += values_written(write, graph) or []
    return found


def _in_order(graph: tf.Graph, needed_first: _NeededFirst) -> typing.List[tf.Operation]:
    """The operations of a graph, each after its inputs, and after what it needs first.

    A value that comes back from an iteration (`NextIteration`) is not waited for: it is computed
    from the `Merge` that takes it. The walk is depth-first; it has a stack of its own, since the
    graph may be deeper than Python's.
    """
    seen: typing.Set[str] = set()
    ordered = []
    for first in graph.get_operations():
        stack = [(first, False)]  # pairs of an operation and whether all before it is in order
        while stack:
            op, is_ready = stack.pop()
            if is_ready:
                ordered.append(op)
                continue
            if op.name in seen:
                continue
            seen.add(op.name)
            stack.append((op, True))
            for tensor in list(op.inputs) + needed_first.get(op.name, []):
                if tensor.op.type != 'NextIteration' and tensor.op.name not in seen:
                    stack.append((tensor.op, False))
    return ordered
