"""From the states of an operation's inputs to the states of its results.

Most operations have a row in the table of rules. Those without are: a value of all towers
(`towers.batch_sum` and its like), a read of what the forward pass has written before, a call of a
function, whose body tells; and any operation none of whose inputs depends on the examples.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.graph import graph_walk
from towers.graph.op_types import (
    ADDS,
    ADDS_ROWS,
    BRANCHES_V2,
    CALLS,
    CONTROL_FLOW,
    READS,
    SETS,
    VARIABLE_OPS,
    batch_value_kind,
)
from towers.proof import contexts
from towers.proof.rules import loops, loops_v2
from towers.proof.rules.totals import marks_of_totals
from towers.proof.sizes import as_numbers
from towers.proof.states import (
    INDEPENDENT,
    ONE_EXAMPLE,
    TAKES_NO_OTHER_BATCH,
    Kind,
    State,
    unknown,
)
from towers.proof.table import RULES, Row
from towers.proof.view import View
from towers.proof.written_before import WrittenBefore

_BYTES_OF_INTEGER = 4  # of the narrowest integers that count the examples of any batch
_MERGES = ('Merge', 'RefMerge')  # have a result as soon as one input has

# Operations that give another value at each run, and so to each tower.
_OWN_VALUES = ('IteratorGetNext', 'QueueDequeue', 'ReaderRead', 'PyFunc', 'EagerPyFunc',
               'Unstage', 'OrderedMap', 'Barrier')

# Those that keep a state which is the same on every tower, or of which `written_before` takes care.
_KNOWN_STATE = frozenset(
    'HashTable HashTableV2 InitializeTable InitializeTableV2 InitializeTableFromTextFile '
    'InitializeTableFromTextFileV2 LookupTableSize LookupTableSizeV2 LookupTableImport '
    'LookupTableImportV2 VarIsInitializedOp IsVariableInitialized VariableShape Assert'.split()
) | VARIABLE_OPS | READS | SETS | ADDS | ADDS_ROWS | frozenset(CALLS)

# What may be taken over the towers: the states of the shard's value whose value of the whole batch
# it gives. A count may be added up, too.
_OVER_TOWERS = {'sum': (Kind.SUM,), 'mean': (Kind.MEAN, Kind.INDEPENDENT),
                'concat': (Kind.PER_EXAMPLE, Kind.ROWS)}

_Found = typing.Union[State, typing.List[State], None]
"""The state of all results, or of each; None as long as a state that it needs is not there."""

_Inputs = typing.Sequence[typing.Optional[State]]
"""The states of the inputs of an operation, None where one has none yet."""


class Transfer:
    """The states of results by those of inputs."""

    def __init__(self, view: View, written_before: WrittenBefore):
        """Finds the values that loops of control flow v2 carry, whose bodies the view has."""
        self._view = view
        self._written_before = written_before
        self._carried = {}  # {name of an argument of the body of a loop v2: `Carried`}
        for name, body in view.bodies.loops.items():
            loop = view.graph.get_operation_by_name(name)
            for number, tensor in enumerate(body.arguments):
                if tensor is not loop.inputs[number]:  # no handle
                    self._carried[tensor.op.name] = loops_v2.Carried(loop, body, number)

    def looks_further(self, op: tf.Operation) -> bool:
        """Whether the results depend on states of other tensors than the operation's inputs."""
        bodies = self._view.bodies
        return any(op.name in names for names in self._written_before) or (
            op.name in self._carried or op.name in bodies.results or op.name in bodies.loops)

    def results(self, op: tf.Operation, states: _Inputs) -> typing.Optional[typing.List[State]]:
        """The states of the results of an operation.

        Args:
          op: of the scratch graph.
          states: of its inputs, None where one has none yet.

        Returns:
          List of states, one a result; None as long as a state that they need is not there.
        """
        found = self._found(op, states)
        if found is None:
            return None
        if isinstance(found, State):
            found = [found] * len(op.outputs)
        found = [self._without_overflow(op, tensor, state)
                 for tensor, state in zip(op.outputs, found)]
        found = [self._of_one_iteration(op, state) for state in found]
        if self._has_own_gradient(op):
            self._view.note(op.name, op, 'has a gradient of its own, which may not be linear')
            return [state.with_shard_statistics([op.name]) for state in found]
        return found

    def _without_overflow(self, op: tf.Operation, tensor: tf.Tensor, state: State) -> State:
        """The state of a result, which is no mean, sum or share where its type holds small integers
        alone: a sum of 256 ones is 0 there, and so no sum of those of the shards."""
        is_narrow = tensor.dtype.is_integer and tensor.dtype.size < _BYTES_OF_INTEGER
        if not (state.is_over_all and is_narrow):
            return state
        return marks_of_totals(op, [state], self._view, 'may overflow its type')

    def _of_one_iteration(self, op: tf.Operation, state: State) -> State:
        """The state of a result, of which nothing is proven where an operation in a loop selects
        rows: it selects others in each iteration, and its name tells them not apart."""
        is_selected_here = state.selection.split(':')[0] == op.name
        if is_selected_here and self._view.is_in_loop(op):
            return unknown(op, 'selects other rows in each iteration of a loop')
        return state

    def _found(self, op: tf.Operation, states: _Inputs) -> _Found:
        """The states of results, without the mark of a gradient of the program's own."""
        original = self._view.program_op(op)
        known = _if_complete(states)
        kind = None if original is None else batch_value_kind(original)
        if kind is not None:
            return self._over_towers(op, states[0], kind)
        if op.name in self._written_before.reads:
            return None if known is None else self._read_of_written(op, known)
        if op.name in self._written_before.takers_of_memory:
            late = self._written(op, self._written_before.takers_of_memory[op.name])
            if late is None:
                return None
            if not late.is_alike_on_towers:
                return unknown(op, 'takes the memory of a variable that was written before')
        if self._is_with_body(op):
            return self._by_body(op, states)
        row = RULES.get(op.type)
        if row is None:
            return None if known is None else self._without_rule(op, known)
        has_any = any(state is not None for state in states)
        is_ready = known is not None or op.type in _MERGES and has_any
        return self._by_rule(row, op, states) if is_ready else None

    def _has_own_gradient(self, op: tf.Operation):
        """Whether the program gave an operation a gradient of its own: `tf.custom_gradient`, or
        `gradient_override_map`."""
        if op.name in self._view.bodies.own_gradients:
            return True
        original = self._view.program_op(op)
        if original is None or batch_value_kind(original) is not None:
            return False
        return '_gradient_op_type' in original.node_def.attr

    # ---- by a row of the table

    def _by_rule(self, row: Row, op: tf.Operation, states: _Inputs) -> _Found:
        """The states that the row of an operation gives, with the marks of all inputs."""
        refused = _refused(row, op, states)
        if refused is not None:
            return refused
        known = [state for state in states if state is not None]
        if not row.takes_sizes:
            known = as_numbers(op, known, self._view)
        found = row.rule(op, states if row.takes_unknown else known, self._view)
        if found is None or not row.keeps_marks:
            return found
        results = [found] if isinstance(found, State) else found
        is_of_one = _is_of_one_example(op, known)
        finished = []
        for result in results:
            if is_of_one and result.kind is Kind.UNKNOWN:
                result = ONE_EXAMPLE
            finished.append(self._finished(row, op, known, result))
        return finished[0] if isinstance(found, State) else finished

    def _finished(self, row: Row, op: tf.Operation, states: typing.List[State],
                  result: State) -> State:
        """A result with what its row leaves to be done.

        Args:
          row: the row of the operation.
          op: the operation.
          states: of its inputs.
          result: the state that the rule of the row gives.
        """
        if row.keeps_uniform:
            is_uniform = result.kind is Kind.INDEPENDENT and self._makes_uniform(op, states)
            result = result._replace(is_uniform=is_uniform)
        if not row.accounts_for_totals:
            result = self._marked_with_totals(row, op, states, result)
        return result.with_marks_of(*states)

    def _marked_with_totals(self, row: Row, op: tf.Operation, states: typing.List[State],
                            result: State) -> State:
        """Marks a result with each mean, sum and share that went into it, but not with those in
        which it is linear: where it is one itself, those among the inputs that its row names.

        All other inputs are arguments: a total as an axis, or the number of examples as one,
        chooses what a result without examples is.
        """
        if result.kind is Kind.UNKNOWN:
            return result
        linear_in = range(len(states))[row.linear_in]
        used = [] if result.is_over_all else [states[place] for place in linear_in]
        arguments = [state for place, state in enumerate(states) if place not in linear_in]
        if result.is_over_all or result.kind is Kind.INDEPENDENT:
            arguments = as_numbers(op, arguments, self._view)
        used += arguments
        names: typing.Set[str] = set()
        for state in used:
            if state.is_over_all:
                names |= state.reductions
        for name in names - result.shard_statistics:
            self._view.note(name, op, "depends on a value of all examples ('%s')" % name)
        return result.with_shard_statistics(names).with_marks_of(*used)

    def _makes_uniform(self, op: tf.Operation, states: typing.List[State]) -> bool:
        """Whether one input is uniform, and all others are single numbers."""
        wide = [state for tensor, state in zip(op.inputs, states) if self._view.rank(tensor) != 0]
        return len(wide) == 1 and wide[0].is_uniform

    # ---- without a row

    def _without_rule(self, op: tf.Operation, states: typing.List[State]) -> State:
        """The state of the results of an operation in no row of the table.

        Of inputs that are the same on every tower it makes what is, and of one example, in a loop
        over them, what belongs to that example.
        """
        for state in states:
            if state.kind is Kind.UNKNOWN:
                return state
        is_random = graph_walk.is_random(op)
        if op.type.startswith(_OWN_VALUES):
            return unknown(op, 'gives another value to each tower')
        if op.op_def.is_stateful and op.type not in _KNOWN_STATE and not is_random:
            return unknown(op, 'keeps a state of which nothing is known')
        numbers = as_numbers(op, states, self._view)
        kinds = {state.kind for state in numbers}
        if kinds <= {Kind.INDEPENDENT}:
            result = INDEPENDENT.with_marks_of(*numbers)
            return result._replace(is_random=result.is_random or is_random,
                                   is_uniform=_is_uniform_constant(op))
        if kinds <= {Kind.INDEPENDENT, Kind.ONE_EXAMPLE} and not op.op_def.is_stateful:
            return State(Kind.ONE_EXAMPLE).with_marks_of(*numbers)
        return unknown(op, 'has no rule')

    def _over_towers(self, op: tf.Operation, state: typing.Optional[State], kind: str) -> _Found:
        """A value that is taken over all towers is the whole batch's, if the shard's has the right
        state: the sum of the towers' sums is the batch's, for example.

        Args:
          op: the operation that marks the value.
          state: of the shard's value.
          kind: what is taken over the towers: 'sum', 'mean', 'concat' or 'moments'.
        """
        if state is None or state.kind is Kind.UNKNOWN:
            return state
        if kind == 'moments':  # which `sync_batch_norm` alone makes, of statistics that it makes
            return INDEPENDENT._replace(is_random=state.is_random)
        is_right = state.kind in _OVER_TOWERS[kind]
        if kind == 'sum':
            is_right = (is_right or state.is_count) and not state.has_offset
        if kind == 'concat':
            is_right = is_right and state.axis == 0
        if is_right:
            return INDEPENDENT.with_marks_of(state)
        self._view.note(
            op.name, op, 'takes a %s over the towers of %s' % (kind, state.kind.value))
        return INDEPENDENT.with_shard_statistics(state.shard_statistics | {op.name})

    def _read_of_written(self, op: tf.Operation, states: typing.List[State]) -> _Found:
        """A read of a variable after the forward pass has written it gives the written value, or
        some of its rows."""
        value = self._written(op, self._written_before.reads[op.name])
        if value is None or value.kind is Kind.UNKNOWN:
            return value
        if len(states) == 1:
            return value
        return self._by_rule(RULES[op.type], op, [value] + states[1:])  # rows of the variable

    def _written(self, op: tf.Operation, names: typing.List[str]) -> typing.Optional[State]:
        """The state of a variable after some writes: the same on every tower, if all have written
        the same, each by the same choice; else a statistic of the shard.

        Args:
          op: the operation that takes the variable.
          names: of the operations that write it.
        """
        found: typing.List[typing.Optional[State]] = []
        for name in names:
            values = values_written(name, self._view.graph)
            if values is None:
                return unknown(op, 'takes a variable that was written before, in an unknown way')
            found += [self._view.state_or_none(tensor) for tensor in values]
            write = self._view.graph.get_operation_by_name(name)
            found += contexts.conditions_around(write, self._view)
        written = _if_complete(found)
        if written is None:
            return None
        for state in written:
            if state.kind is Kind.UNKNOWN:
                return state
        numbers = as_numbers(op, written, self._view)
        is_random = any(state.is_random for state in numbers)
        value = INDEPENDENT._replace(is_random=is_random)
        if all(state.is_alike_on_towers for state in numbers):
            return value
        self._view.note(op.name, op, 'reads what was computed from the examples of the shard')
        return value.with_shard_statistics([op.name])

    # ---- by the body of a function

    def _is_with_body(self, op: tf.Operation):
        """Whether an operation calls a function, or is a value that a loop v2 carries."""
        bodies = self._view.bodies
        return op.name in bodies.results or op.name in bodies.loops or (
            op.name in bodies.left_out or op.name in self._carried)

    def _by_body(self, op: tf.Operation, states: _Inputs) -> _Found:
        """The results of a call or a loop by its body; the state of a value that a loop carries."""
        bodies = self._view.bodies
        if op.name in bodies.left_out:
            return unknown(op, TAKES_NO_OTHER_BATCH)
        if op.name in bodies.results:
            known = _if_complete(states)
            return None if known is None else self._by_branches(op, known)
        if op.name in bodies.loops:
            return loops_v2.results(op, bodies.loops[op.name], self._view)
        return loops_v2.argument(self._carried[op.name], self._view)

    def _by_branches(self, op: tf.Operation, states: typing.List[State]) -> _Found:
        """The results of a call, by the bodies of the functions that it may run."""
        found = []
        for results in zip(*self._view.bodies.results[op.name]):
            ends = _if_complete([self._view.state_or_none(tensor) for tensor in results])
            if ends is None:
                return None
            state = loops.either(op, loops.branch_states(results, ends, self._view), self._view)
            if op.type in BRANCHES_V2:
                state = loops.in_branch(op, state, states[0], self._view)
            found.append(state)
        return found


def values_written(name: str, graph: tf.Graph) -> typing.Optional[typing.List[tf.Tensor]]:
    """The values that an operation of a scratch graph writes to a variable: its inputs behind the
    variable; None where it does not tell, as a call of a function."""
    op = graph_walk.operation_named(graph, name)
    if op is None or op.type not in SETS | ADDS | ADDS_ROWS:
        return None
    return list(op.inputs)[1:]


def _if_complete(states: _Inputs) -> typing.Optional[typing.List[State]]:
    """The states, where each of them is there; else None."""
    known = [state for state in states if state is not None]
    return known if len(known) == len(states) else None


def _refused(row: Row, op: tf.Operation, states: _Inputs) -> typing.Optional[State]:
    """The state of results where the rule of a row has no answer for inputs such as these."""
    for state in states:
        if state is None:
            continue
        if state.kind is Kind.UNKNOWN and not row.takes_unknown:
            return state
        if state.is_position and not row.takes_positions:
            return unknown(op, 'computes with the numbers of the examples')
    return None


def _is_of_one_example(op: tf.Operation, states: typing.List[State]) -> bool:
    """Whether the results of an operation are functions of one example, whatever it computes."""
    holds_state = op.op_def.is_stateful or op.type in CONTROL_FLOW or any(
        tensor.dtype in (tf.resource, tf.variant) for tensor in list(op.inputs) + op.outputs)
    kinds = {state.kind for state in states if state.kind is not Kind.SIZES}
    depends_on_size = any(state.depends_on_size for state in states)
    return not holds_state and not depends_on_size and Kind.ONE_EXAMPLE in kinds and (
        kinds <= {Kind.ONE_EXAMPLE, Kind.INDEPENDENT})


def _is_uniform_constant(op: tf.Operation):
    """Whether an operation is a constant all of whose entries are equal."""
    if op.type != 'Const':
        return False
    value = tf.get_static_value(op.outputs[0])
    return value is not None and value.size > 1 and bool((value == value.flat[0]).all())
