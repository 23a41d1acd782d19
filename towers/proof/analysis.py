"""The analysis: the state of each tensor of a forward pass, from its inputs to its results."""

import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers import compat
from towers.graph import graph_walk
from towers.graph.graph_walk import leaves_of
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
from towers.graph.variable_access import Writes, read_from
from towers.proof import loops, loops_v2
from towers.proof.functions import import_bodies
from towers.proof.scratch import make_scratch, states_of_inputs, static_size
from towers.proof.sizes import sizes_in, used
from towers.proof.states import (
    INDEPENDENT,
    TAKES_NO_OTHER_BATCH,
    Kind,
    Reason,
    Size,
    State,
    unknown,
)
from towers.proof.table import RULES
from towers.proof.written import Written, written_by

_MOST_ROUNDS = 60  # through the loops, until nothing changes

# Operations that give another value at each run, and so to each tower.
_OWN_VALUES = ('IteratorGetNext', 'QueueDequeue', 'ReaderRead', 'PyFunc', 'EagerPyFunc',
               'Unstage', 'OrderedMap', 'Barrier')

# Those that keep a state which is the same on every tower, or of which `_late_read` takes care.
_KNOWN_STATE = frozenset(
    'HashTable HashTableV2 InitializeTable InitializeTableV2 InitializeTableFromTextFile '
    'InitializeTableFromTextFileV2 LookupTableSize LookupTableSizeV2 LookupTableImport '
    'LookupTableImportV2 VarIsInitializedOp IsVariableInitialized VariableShape Assert'.split()
) | VARIABLE_OPS | READS | SETS | ADDS | ADDS_ROWS | frozenset(CALLS)


class Analysis(typing.NamedTuple):
    """Where the examples are in each tensor of a forward pass."""
    states: typing.Dict[str, State]  # {name of a tensor: its state}
    reasons: typing.Dict[str, Reason]  # {statistic of the shard: the use that is not linear}
    operations: typing.List[str]  # names of the operations that were looked at
    random: typing.List[str]  # names of those that draw random numbers
    writes: typing.Dict[str, typing.List[Written]]  # {name of an operation: what it writes}
    averages: typing.FrozenSet[str]  # the statistics that are means over examples or rows of them
    made: typing.FrozenSet[str]  # names of all operations of the forward pass
    scalars: typing.List[str]  # placeholders of no known shape, which are taken for scalars
    as_built: typing.Optional['Analysis'] = None
    """Where the graph takes no batch of another size: the analysis for the size that it has. It
    tells where the examples are in this graph, and nothing of one for another batch."""

    @property
    def looked_at(self) -> typing.Set[str]:
        """The names of the operations that were looked at."""
        return set(self.operations)

    def in_order(self, names: typing.Iterable[str]) -> typing.List[str]:
        """Names of operations in the order of the forward pass; those in functions are last."""
        places = {name: place for place, name in enumerate(self.operations)}
        return sorted(names, key=lambda name: (places.get(name, len(places)), name))

    def is_average(self, op: tf.Operation) -> bool:
        """Whether an operation is a mean over the examples, or over rows of them."""
        return op.name in self.averages

    def of(self, tensor: tf.Tensor) -> State:
        """The state of a tensor; what is not in the forward pass is the same on every tower."""
        if tensor.name not in self.states and tensor.op.name in self.made:
            return unknown(tensor.op, 'was not looked at')
        return self.states.get(tensor.name, INDEPENDENT)


NOTHING = Analysis({}, {}, [], [], {}, frozenset(), frozenset(), [])
"""The analysis of nothing, where one tower has the whole batch."""


class Loop(typing.NamedTuple):
    """A loop of control flow v1."""
    is_over_examples: bool  # whether it has an iteration for each example, and counts them
    condition: State  # of the test for one more iteration


def analyse(operations: list, inputs: typing.Any, fetches: list) -> Analysis:
    """Tells where the examples are in the tensors that some fetches need.

    Args:
      operations: list of the operations of the recorded forward pass.
      inputs: nest of tensors at which the batch enters, each with the examples along its first
        dimension.
      fetches: list of tensors and operations.

    Returns:
      `Analysis`.
    """
    ends = {leaf.op.name for leaf in leaves_of(inputs)}
    made = {op.name for op in operations}
    found = graph_walk.reached(
        [getattr(fetch, 'op', fetch) for fetch in fetches],
        lambda op: () if op.name in ends else [
            each for each in graph_walk.inputs_of(op) + _conditions(op) if each.name in made])
    needed = [op for op in operations if op.name in found and op.name not in ends]
    scratch = make_scratch(needed, inputs)
    analysis = _of_scratch(scratch, needed, inputs, made)
    holds_size = any(
        state.reason is not None and state.reason.why == TAKES_NO_OTHER_BATCH
        for state in analysis.states.values())
    if holds_size and scratch.has_static_batch:
        as_built = make_scratch(needed, inputs, static_size(inputs))
        return analysis._replace(as_built=_of_scratch(as_built, needed, inputs, made))
    return analysis


def _of_scratch(scratch, needed, inputs, made):
    analysis = _Walk(scratch, needed).walked()
    return analysis._replace(made=frozenset(made),
                             states=dict(analysis.states, **states_of_inputs(inputs)))


def _conditions(op):
    """The operations that compute the condition of the branches that end at a `Merge`."""
    if op.type not in ('Merge', 'RefMerge'):
        return []
    conditions = [compat.condition_around(tensor.op) for tensor in op.inputs]
    return [condition.op for condition in conditions if condition is not None]


class _Walk:
    """One walk through the scratch graph; what rules ask of it is their `view`."""

    def __init__(self, scratch, needed):
        self.examples, self._is_prime = scratch.examples, scratch.is_prime
        self._graph, self._cuts = scratch.graph, scratch.cuts
        self._given_ops = {op.name: op for op in needed}
        self._given, self._states = scratch.given, dict(scratch.given)
        self._reads = scratch.reads
        self._reasons, self._values = {}, {}
        self._elements, self._written, self._lengths = {}, {}, {}
        self._frames = {}
        self._names = {tensor.name for op in scratch.graph.get_operations()
                       for tensor in op.outputs}
        self._bodies, self._memory = import_bodies(scratch.graph), {}
        self._arguments = {}
        for name, loop in self._bodies.loops.items():
            op = scratch.graph.get_operation_by_name(name)
            self._arguments.update(
                (tensor.op.name, (op, number)) for number, tensor in enumerate(loop.arguments))
        self._with_bodies = self._arguments.keys() | self._bodies.results.keys() | (
            self._bodies.loops.keys() | set(self._bodies.left_out))
        self._late_reads = _reads_of_written(needed)
        inside = [scratch.graph.get_operation_by_name(name) for name in self._bodies.callers]
        self._late_reads.update(_reads_of_written(inside))
        self._late_calls = _calls_that_read_written(needed)
        self._has_static_batch = scratch.has_static_batch
        self._scalars = scratch.scalars

    def walked(self) -> Analysis:
        """Goes around until nothing changes: the `Analysis`."""
        operations = _in_order(self._graph, self._needed_first())
        self._changed = set(self._states)
        self._settle(operations)
        self._mark_the_rest(operations)
        names = [op.name for op in operations if op.name in self._given_ops]
        return Analysis(
            states=self._states, reasons=self._reasons, operations=names,
            random=[op.name for op in operations if graph_walk.is_random(op)],
            writes=self._writes(operations), averages=self._averages(), made=frozenset(names),
            scalars=self._scalars)

    def _needed_first(self):
        """{name of an operation: the tensors that have their states before it, beside its inputs}:
        results of bodies, and values that were written before a read."""
        found = _needed_first(self._graph, self._bodies)
        names = {tensor.name: tensor for op in self._graph.get_operations()
                 for tensor in op.outputs} if self._late_reads else {}
        for name, written in self._late_reads.items():
            found.setdefault(name, []).extend(names[each] for each in written if each in names)
        return found

    def _settle(self, operations):
        """Goes around until nothing changes; what has not settled is not known."""
        for number in range(_MOST_ROUNDS):
            _before, self._written = dict(self._states), {}
            changed_before, self._changed = self._changed, set()
            for op in operations:
                if not number or self._may_change(op, changed_before):
                    self._visit(op)
            is_done = not self._changed and self._elements == self._written
            self._elements = self._written
            if is_done:
                return
        for op in operations:  # a change may not have reached all that it goes to
            if op.name + ':0' not in self._given:
                self._set(op, unknown(op, 'is in a graph with a loop whose end was not found'))

    def _mark_the_rest(self, operations):
        """Marks what has no state: cut operations, and what no input reaches."""
        for name, reason in self._cuts.items():
            for tensor in self._given_ops[name].outputs:
                self._states[tensor.name] = State(Kind.UNKNOWN, reason=reason)
        for op in operations:
            if any(tensor.name not in self._states for tensor in op.outputs):
                self._set(op, unknown(op, 'has no value that is known'))

    def _may_change(self, op, changed_before):
        """Whether an operation may give another state than in the round before."""
        looks_further = op.name in self._late_reads or op.name in self._bodies.results or (
            op.name in self._bodies.loops or op.name in self._arguments)
        if looks_further or op.type in CONTROL_FLOW or op.type.startswith('TensorArray'):
            return True
        return any(tensor.name in self._changed or tensor.name in changed_before
                   for tensor in op.inputs)

    def _writes(self, operations):
        """{name of an operation of the program: list of `Written`}."""
        found = {}
        for op in operations:
            written = written_by(op, self)
            if written is not None:
                found.setdefault(self._bodies.callers.get(op.name, op.name), []).append(written)
        return found

    def _averages(self):
        """The names of the statistics that are means."""
        found = set()
        for state in self._states.values():
            if state.kind is Kind.MEAN:
                found |= state.statistics
        for name in self._reasons:
            if self._graph.get_operation_by_name(name).type == 'Mean':
                found.add(name)
        return frozenset(found)

    def _visit(self, op):
        if op.name + ':0' in self._given:
            return
        states = [self._states.get(tensor.name) for tensor in op.inputs]
        found = self._found(op, states)
        if found is not None:
            self._set(op, self._with_own_gradient(op, found))

    def _with_own_gradient(self, op, found):
        """Marks the results of an operation whose gradient is the program's own."""
        given = self._given_ops.get(op.name)
        has_own = op.name in self._bodies.own_gradients or (
            given is not None and _has_own_gradient(given))
        if not has_own:
            return found
        self.note(op.name, op, 'has a gradient of its own, which may not be linear')
        mark = INDEPENDENT._replace(estimated=frozenset([op.name]))
        if isinstance(found, State):
            return found.marked([mark])
        return [state.marked([mark]) for state in found]

    def _set(self, op, found):
        if isinstance(found, State):
            found = [found] * len(op.outputs)
        for tensor, state in zip(op.outputs, found):
            if not self._is_possible(tensor, state):
                state = unknown(op, 'has the examples in other dimensions than it should')
            if self._states.get(tensor.name) != state:
                self._states[tensor.name] = state
                self._changed.add(tensor.name)

    def _is_possible(self, tensor, state):
        """Whether a state says of the examples' dimension what shape inference does."""
        if not self._is_prime or state.kind in (Kind.UNKNOWN, Kind.NUMBER, Kind.PLACES):
            return True
        if tensor.name not in self._lengths:
            shape = tensor.shape.as_list() if tensor.shape.ndims else []
            self._lengths[tensor.name] = {axis: length for axis, length in enumerate(shape)
                                          if length and length % self.examples == 0}
        lengths = self._lengths[tensor.name]
        if state.kind is not Kind.PER_EXAMPLE:
            return not lengths
        shape = tensor.shape.as_list() if tensor.shape.ndims else None
        if not lengths:
            return shape is None or state.axis < len(shape) and shape[state.axis] is None
        return lengths == {state.axis: state.outer * state.inner * self.examples}

    def _found(self, op, states):
        """The state of each result, or of all; None where an input has none yet."""
        given = self._given_ops.get(op.name)
        if given is not None and batch_value_kind(given) is not None:
            return None if None in states else self._of_whole_batch(op, states[0], given)
        if op.name in self._late_reads:
            return self._late_read(op, states)
        if op.name in self._late_calls:
            return unknown(op, 'reads a variable that the forward pass has written before')
        if op.name in self._with_bodies:
            return self._by_function(op, states)
        row = RULES.get(op.type)
        if row is None:
            return None if None in states else self._without_rule(op, states)
        if None in states and op.type not in ('Merge', 'RefMerge'):
            return None
        if not states:
            return row.rule(op, [], self)
        if all(state is None for state in states):
            return None
        return self._by_rule(row, op, states)

    def _by_function(self, op, states):
        """The results of a call or a loop by its body; the state of a value that a loop carries."""
        if op.name in self._bodies.left_out:
            return unknown(op, TAKES_NO_OTHER_BATCH)
        if op.name in self._bodies.results:
            return None if None in states else self._by_bodies(op, states)
        if op.name in self._bodies.loops:
            return loops_v2.results(op, states, self._bodies.loops[op.name], self)
        loop, number = self._arguments[op.name]
        return loops_v2.argument(loop, number, self._bodies.loops[loop.name], self)

    def _by_rule(self, row, op, states):
        """The states that the row of an operation gives, with the marks of all inputs."""
        refused = self._refused(row, op, states)
        if refused is not None:
            return refused
        if not row.takes_sizes:
            states = [used(op, state, self) for state in states]
        found = row.rule(op, states, self)
        if found is None or not row.looks_at_values:
            return found
        known = [state for state in states if state is not None]
        results = [found] if isinstance(found, State) else found
        if row.by_entry:
            is_uniform = self._makes_uniform(op, known)
            results = [result._replace(is_uniform=is_uniform and result.kind is Kind.INDEPENDENT)
                       for result in results]
        if not row.cancels:
            results = [self._accounted(op, known, result) for result in results]
        results = [result.marked(known) for result in results]
        return results[0] if isinstance(found, State) else results

    def _refused(self, row, op, states):
        """The state of results where the rule of a row does not look at inputs such as these."""
        for state in states:
            if state is None:
                continue
            if state.kind is Kind.UNKNOWN and not row.takes_unknown:
                return state
            if state.kind in (Kind.NUMBER, Kind.PLACES) and not row.takes_numbers:
                return unknown(op, 'computes with the numbers of the examples')
        return None

    def _accounted(self, op, states, result):
        """Marks a result with each mean, sum and share that went into it, unless it is one itself:
        then the rule has looked at them."""
        if result.is_total or result.kind in (Kind.SHARE, Kind.UNKNOWN):
            return result
        totals = [state for state in states if state.is_total or state.kind is Kind.SHARE]
        statistics = frozenset().union(*(state.statistics for state in totals))
        for name in statistics - result.estimated:
            self.note(name, op, "depends on a value of all examples ('%s')" % name)
        return result._replace(estimated=result.estimated | statistics)

    def _makes_uniform(self, op, states):
        """Whether one input is uniform, and all others are single numbers."""
        wide = [state for tensor, state in zip(op.inputs, states) if self.rank(tensor) != 0]
        return len(wide) == 1 and wide[0].is_uniform

    def _by_bodies(self, op, states):
        """The results of a call, by the bodies of the functions that it may run."""
        found = []
        for results in zip(*self._bodies.results[op.name]):
            ends = [self._states.get(tensor.name) for tensor in results]
            if None in ends:
                return None
            state = loops.joined(op, loops.branch_states(results, ends, self), self)
            if op.type in BRANCHES_V2:
                state = loops.chosen(op, state, states[0], self)
            found.append(state)
        return found

    def _without_rule(self, op, states):
        """An operation in no row of the table."""
        for state in states:
            if state.kind is Kind.UNKNOWN:
                return state
        if op.type.startswith(_OWN_VALUES):
            return unknown(op, 'gives another value to each tower')
        if op.op_def.is_stateful and op.type not in _KNOWN_STATE and not graph_walk.is_random(op):
            return unknown(op, 'keeps a state of which nothing is known')
        states = [used(op, state, self) for state in states]
        if all(state.kind is Kind.INDEPENDENT for state in states):
            marked = INDEPENDENT.marked(states)
            return marked._replace(is_random=marked.is_random or graph_walk.is_random(op),
                                   is_uniform=op.type == 'Const' and _is_uniform(op))
        if all(state.kind is Kind.ONE_EXAMPLE or state.kind is Kind.INDEPENDENT
               for state in states) and not op.op_def.is_stateful:
            return State(Kind.ONE_EXAMPLE).marked(states)
        return unknown(op, 'has no rule')

    def _of_whole_batch(self, op, state, given):
        """A value of all towers: the batch's, where it is taken of such a value of each tower."""
        kind = batch_value_kind(given)
        rules = {'sum': (Kind.SUM,), 'mean': (Kind.MEAN, Kind.INDEPENDENT),
                 'concat': (Kind.PER_EXAMPLE, Kind.ROWS)}
        is_count = kind == 'sum' and state.is_count
        is_right = state.kind in rules[kind] and not (kind == 'concat' and state.axis) or is_count
        if is_right and not (kind == 'sum' and state.has_offset):
            return INDEPENDENT.marked([state])
        if state.kind is Kind.UNKNOWN:
            return state
        self.note(op.name, op, 'takes a %s over the towers of %s' % (kind, state.kind.value))
        return INDEPENDENT._replace(estimated=state.estimated | {op.name})

    def _late_read(self, op, states):
        """A read of a variable after the forward pass has written it."""
        written = [self._states.get(name) for name in self._late_reads[op.name]]
        if None in written or None in states:
            return None
        for state in list(written):
            if state.kind is Kind.UNKNOWN:
                return state
        value = INDEPENDENT
        if not all(state.kind is Kind.INDEPENDENT and not state.estimated for state in written):
            self.note(op.name, op, 'reads what was computed from the examples of the shard')
            value = INDEPENDENT.marked(written)._replace(estimated=frozenset([op.name]))
        if len(states) == 1:
            return value
        return self._by_rule(RULES[op.type], op, [value] + states[1:])  # rows of the variable

    # ---- what rules ask ----------------------------------------------------------------------

    def state(self, tensor) -> State:
        """The state of a tensor of the scratch graph."""
        return self._states[tensor.name]

    def variables_read(self, tensor) -> typing.List[str]:
        """The names of the variables whose values a tensor consists of."""
        return self._reads.get(tensor.name) or [source.name for source in read_from(tensor)]

    def state_or_none(self, tensor) -> typing.Optional[State]:
        """The state of a tensor of the scratch graph; None where it has none yet."""
        return self._states.get(tensor.name)

    def shape(self, tensor) -> typing.Optional[list]:
        """The lengths of the dimensions in the scratch graph, None where not static; or None."""
        rank = self.rank(tensor)
        if rank is None:
            return None
        shape = tensor.shape.as_list() if tensor.shape.ndims is not None else [None] * rank
        given = self._given_ops.get(tensor.op.name)
        if None not in shape:
            return shape
        if given is not None and not self._has_static_batch:
            known = given.outputs[tensor.value_index].shape.as_list()
            shape = [length or other for length, other in zip(shape, known)]
        state = self._states.get(tensor.name)
        if state is not None and state.kind is Kind.PER_EXAMPLE:
            shape[state.axis] = state.outer * state.inner * self.examples
        return shape

    def rank(self, tensor) -> typing.Optional[int]:
        """The number of dimensions; in loops the program's graph may know it alone."""
        if tensor.shape.ndims is not None:
            return tensor.shape.ndims
        given = self._given_ops.get(tensor.op.name)
        return None if given is None else given.outputs[tensor.value_index].shape.ndims

    def value(self, tensor):
        """The static value of a tensor that is the same on every tower; or None."""
        state = self._states.get(tensor.name, INDEPENDENT)
        if state.kind is Kind.SIZES and not state.depends_on_size:
            numbers = np.array([size.constant for size in state.sizes], np.int64)
            rank = self.rank(tensor)
            if rank is None or rank > 1:
                return None
            return numbers if rank else numbers[0]
        if state.kind is not Kind.INDEPENDENT:
            return None
        if tensor.name not in self._values:
            self._values[tensor.name] = tf.get_static_value(tensor)
        return self._values[tensor.name]

    def note(self, statistic: str, op, why: str) -> None:
        """Notes why a statistic of the shard ends a proof, and at which operation."""
        self._reasons.setdefault(statistic, Reason(op.name, op.type, why))

    def bodies_of(self, op) -> typing.Optional[typing.List[list]]:
        """The results of the bodies that a call may run; None for any other operation."""
        return self._bodies.results.get(op.name)

    def remembered(self, function, tensor, argument, meanwhile):
        """The result of a function of a tensor, computed once; `meanwhile` it is taken to be that,
        where a loop leads back to the tensor."""
        key = function, tensor.name, argument
        if key not in self._memory:
            self._memory[key] = meanwhile
            self._memory[key] = function(tensor, argument, self)
        return self._memory[key]

    def frame_is_over_examples(self, enter) -> bool:
        """Whether the loop that a value enters has an iteration for each example."""
        name = enter.get_attr('frame_name')
        if name not in self._frames:
            enters = [op for op in self._graph.get_operations()
                      if op.type in ('Enter', 'RefEnter') and op.get_attr('frame_name') == name]
            readers = [reader for op in enters for reader in op.outputs[0].consumers()]
            self._frames[name] = [reader for reader in readers if reader.type == 'Merge']
        return any(self.loop_of(merge).is_over_examples for merge in self._frames[name])

    def is_loop_condition(self, tensor) -> bool:
        """Whether a tensor is the test of a loop, not the condition of a branch."""
        return tensor.op.type == 'LoopCond'

    def loop_of(self, op) -> Loop:
        """The loop that a `Merge` or an `Exit` belongs to."""
        if op.type == 'Exit':
            op = op.inputs[0].op.inputs[0].op
        test = next(reader.inputs[1].op for reader in op.outputs[0].consumers()
                    if reader.type in ('Switch', 'RefSwitch'))
        condition = test.inputs[0]
        state = self._states.get(condition.name, INDEPENDENT)
        return Loop(self._counts_examples(condition), state)

    def _counts_examples(self, condition):
        """Whether a test is that a counter from 0 on is below the number of examples."""
        if condition.op.type == 'LogicalAnd':
            return all(map(self._counts_examples, condition.op.inputs))
        if condition.op.type != 'Less':
            return False
        counter, limit = condition.op.inputs
        counter = graph_walk.behind(counter, ('Identity',))
        if counter.op.type != 'Merge' or limit.name not in self._states:
            return False
        back = [tensor for tensor in counter.op.inputs if tensor.op.type == 'NextIteration']
        return bool(back) and loops.counts(counter.op, back[0]) and (
            sizes_in(limit, self._states[limit.name], self) == (Size(0, 1),))

    def is_array_flow(self, tensor) -> bool:
        """Whether a tensor orders the operations on an array, and has no value of its own."""
        source = graph_walk.behind(
            tensor, ('Identity', 'NextIteration', 'Switch', 'Exit', 'Merge', 'Enter'))
        return source.op.type.startswith('TensorArray')

    def conditions_of(self, merge) -> typing.List[typing.Optional[State]]:
        """The states of the conditions of the branches that end at a `Merge`; None of one that has
        none yet."""
        found = []
        for tensor in merge.inputs:
            if tensor.op.type in ('Switch', 'RefSwitch'):
                found.append(tensor.op.inputs[1].name)
                continue
            given = self._given_ops.get(tensor.op.name)
            condition = None if given is None else compat.condition_around(given)
            if condition is not None:
                found.append(condition.name)
        return [self._states.get(name) for name in dict.fromkeys(found) if name in self._names]

    def conditions_around(self, op) -> typing.List[State]:
        """The states of the conditions of all branches and loops around an operation."""
        found = [results_of for name, results_of in self._conditions_of_calls()
                 if op.name.startswith(name + '/')]
        given = self._given_ops.get(op.name)
        names = [] if given is None else compat.conditions_around(given)
        found += [self._states[name] for name in names if name in self._states]
        return [used(op, state, self) for state in found]

    def _conditions_of_calls(self):
        """`[(name of a branch or loop of control flow v2, state of its condition)]`."""
        found = [(name, loop.condition) for name, loop in self._bodies.loops.items()]
        for name in self._bodies.results:
            call = self._graph.get_operation_by_name(name)
            if call.type in BRANCHES_V2:
                found.append((name, call.inputs[0]))
        return [(name, self._states[tensor.name]) for name, tensor in found
                if tensor.name in self._states]

    def element(self, name) -> typing.Optional[State]:
        """The state of the elements of an array; None where none is written yet."""
        return self._written.get(name, self._elements.get(name))

    def write_array(self, name, op, state) -> State:
        """Notes the state of an element that is written: the state of the array's flow."""
        before = self._written.get(name)
        if before is not None:
            state = loops.joined(op, [before, state], self)
        self._written[name] = state
        return INDEPENDENT

    def array_size(self, name) -> State:
        """The state of the number of elements of an array."""
        return loops.size_of_array(self._graph.get_operation_by_name(name), self)


def _is_uniform(constant):
    """Whether all entries of a constant are equal."""
    value = tf.get_static_value(constant.outputs[0])
    return value is not None and value.size > 1 and bool((value == value.flat[0]).all())


def _has_own_gradient(op):
    """Whether `tf.custom_gradient` or `gradient_override_map` gave an operation its gradient."""
    attributes = op.node_def.attr
    return '_gradient_op_type' in attributes and batch_value_kind(op) is None


def _needed_first(graph, bodies):
    """{name of an operation: the tensors that have their states before it, beside its inputs}."""
    found = {name: [tensor for branch in results for tensor in branch]
             for name, results in bodies.results.items()}
    for name, loop in bodies.loops.items():
        found[name] = loop.results + [loop.condition]
        for argument, initial in zip(loop.arguments, graph.get_operation_by_name(name).inputs):
            found[argument.op.name] = [initial]
    return found


def _in_order(graph, needed_first):
    """The operations of a graph, each after its inputs but for the back edges of loops, and after
    the tensors that it `needs first`."""
    done, ordered = set(), []
    for first in graph.get_operations():
        stack = [(first, False)]
        while stack:
            op, is_ready = stack.pop()
            if is_ready:
                ordered.append(op)
                continue
            if op.name in done:
                continue
            done.add(op.name)
            stack.append((op, True))
            stack += [(tensor.op, False)
                      for tensor in list(op.inputs) + needed_first.get(op.name, [])
                      if tensor.op.type != 'NextIteration' and tensor.op.name not in done]
    return ordered


def _calls_that_read_written(operations):
    """The names of the calls of functions that take a variable which was written before."""
    if not operations:
        return frozenset()
    finder, found = Writes(operations[0].graph), set()
    writes = {op.name: finder.of(op) for op in operations
              if op.type not in VARIABLE_OPS and not graph_walk.is_random(op)}
    writing = [op for op in operations if writes.get(op.name)]
    for call in [op for op in operations if finder.within_function(op)] if writing else []:
        taken = {source.name for tensor in call.inputs for source in read_from(tensor)}
        before = [op for op in writing if op is not call and taken & set(writes[op.name])]
        if before and call.name in graph_walk.reachable_from(before, operations, control=True):
            found.add(call.name)
    return frozenset(found)


def _reads_of_written(operations):
    """{name of a read: [tensors whose values were written before it]}, of the variables that these
    operations write."""
    if not operations:
        return {}
    finder, writes, found = Writes(operations[0].graph), {}, {}
    for op in operations:
        if op.type not in VARIABLE_OPS and not graph_walk.is_random(op):
            for name in finder.of(op):
                writes.setdefault(name, []).append(op)
    all_writes = [op for ops in writes.values() for op in ops]
    after_any = graph_walk.reachable_from(all_writes, operations, control=True)
    for op in operations:
        if op.name not in after_any or op.type not in READS and op.type != 'Identity':
            continue
        for source in read_from(op.inputs[0]):
            ops = writes.get(source.name, [])
            if op not in ops and op.name in graph_walk.reachable_from(
                    ops, operations, control=True):
                found.setdefault(op.name, []).extend(
                    tensor.name for write in ops for tensor in list(write.inputs)[1:])
    return found
