"""Reads of variables that the forward pass has written before: they give the written value.

A read before all writes gives a value that is the same on every tower. A read behind a write, as of
a counter that the forward pass counts up, depends on the written value, and on whether the write
has run: so perhaps on the examples. Writes and reads may be in bodies of functions (`functions`).
There a call stands for the operations that it runs: a write comes before a read if the call around
the write does. In a loop, every write comes before every read, since the read may be in the next
iteration.

The value of a reference variable is its memory. A snapshot of it (`Identity`) may share that
memory, so that an operation which takes a snapshot from before the write gets the written value.

Words of other modules used here: `READS`, `SETS`, `ADDS`, `ADDS_ROWS`: the types of the operations
that take a variable to read it, to set it, to add to it, or to rows of it; `HAND_ON_MEMORY`: those
whose result may be the memory of their input; `branches_not_running`: the branches of a `tf.cond`
that do not run in the steps in which an operation does.
"""

import collections
import functools
import typing

import tensorflow.compat.v1 as tf

from towers.graph import graph_walk
from towers.graph.op_types import ADDS, ADDS_ROWS, HAND_ON_MEMORY, READS, SETS, VARIABLE_OPS
from towers.graph.variable_access import (
    REFERENCE_VARIABLES,
    Branch,
    Writes,
    branch_of,
    branches_not_running,
    is_variable,
    read_from,
)
from towers.proof.contexts import conditions_around
from towers.proof.functions import Bodies
from towers.proof.sizes import as_numbers
from towers.proof.states import INDEPENDENT, State, first_unknown, if_complete, unknown
from towers.proof.view import View

_MAY_READ = READS | {'Identity'}
"""The types of operations that may read a variable; an `Identity` reads a reference variable."""

_Names = typing.Dict[str, typing.List[str]]
_Followers = typing.Dict[str, typing.List[tf.Operation]]
"""{name of an operation: the operations that wait for it directly}"""
_Writes = typing.Dict[str, typing.List[tf.Operation]]
"""{name of a variable: the operations that write it}"""


class ProgramOrder(typing.NamedTuple):
    """The operations of a forward pass, what they write, and which wait for which. A pass that is
    analysed more than once has the same in each scratch graph."""
    operations: typing.List[tf.Operation]
    variables_written: _Names  # {name of an operation: names of the variables that it may write}
    followers: _Followers


def order_of_program(operations: typing.List[tf.Operation]) -> ProgramOrder:
    """Finds what the operations of a forward pass write, and which of them wait for which."""
    return ProgramOrder(operations, _variables_written(operations), _followers(operations))


def _followers(operations: typing.List[tf.Operation]) -> _Followers:
    """`{name of an operation: those of some operations that wait for it directly}`."""
    followers: _Followers = collections.defaultdict(list)
    for op in operations:
        for source in graph_walk.inputs_of(op):
            followers[source.name].append(op)
    return followers


class WrittenBefore(typing.NamedTuple):
    """The operations of a scratch graph that take variables after the forward pass wrote them."""
    # {name of a read: names of the operations that wrote its variable before}
    reads: _Names
    # {name of another operation that takes the memory of a reference variable: names of the
    # operations that wrote this variable before}
    takers_of_memory: _Names


def find_written_before(program: ProgramOrder, graph: tf.Graph, bodies: Bodies) -> WrittenBefore:
    """Finds the operations that get values which were written before.

    Args:
      program: `ProgramOrder` of the operations of the forward pass.
      graph: `tf.Graph` that has them once more, and the bodies of functions that they call.
      bodies: `Bodies` of these functions.
    """
    in_bodies = graph_walk.operations_named(graph, bodies.outermost_calls)
    operations = program.operations + in_bodies
    variables_written = {**program.variables_written, **_variables_written(in_bodies)}
    writes = _writes_by_variable(operations, variables_written, bodies)
    if not writes:
        return WrittenBefore({}, {})
    order = _Order(program, in_bodies, bodies)
    reads = _reads_behind_writes(operations, writes, order)
    takers_of_memory: _Names = {}
    # A resource variable has no memory that other operations could take.
    for variable in _reference_variables(sorted(writes), operations[0].graph):
        for taker, names in _takers_of_memory(variable, writes[variable.name], order).items():
            is_read = taker in reads  # as an `Identity`, which also takes the memory
            if not is_read:
                takers_of_memory[taker] = names
    return WrittenBefore(reads, takers_of_memory)


def _reference_variables(names: typing.Iterable[str],
                         program: tf.Graph) -> typing.List[tf.Operation]:
    """The reference variables of a program that have these names. The body of a function may have
    variables of its own, of which the program has no operation."""
    variables = [graph_walk.operation_named(program, name) for name in names]
    return [variable for variable in variables
            if variable is not None and variable.type in REFERENCE_VARIABLES]


def _reads_behind_writes(operations: typing.List[tf.Operation], writes: _Writes,
                         order: '_Order') -> _Names:
    """`{name of a read: names of the operations that write its variable before}`.

    Args:
      operations: list of the operations among which the reads are.
      writes: the operations that write variables.
      order: `_Order` of the operations.
    """
    found: _Names = {}
    for op in graph_walk.of_types(operations, _MAY_READ):
        for variable in sorted(graph_walk.names_of(read_from(op.inputs[0])) & writes.keys()):
            for write in writes[variable]:
                if order.is_before(write.name, op.name):
                    found.setdefault(op.name, []).append(write.name)
    return found


def state_after_writes(op: tf.Operation, names: typing.List[str],
                       view: View) -> typing.Optional[State]:
    """The state of a variable after some writes: the same on every tower, if each written value is
    the same, and each condition under which a value is written; else a statistic of the shard.

    Args:
      op: the operation that takes the variable.
      names: the names of the operations that write the variable.
      view: `View` of the scratch graph.

    Returns:
      The state; None as long as a written value has none.
    """
    if any(values_written(name, view.graph) is None for name in names):
        return unknown(op, 'takes a variable that was written before, in an unknown way')
    decisive = _decisive_states(names, view)
    if decisive is None:
        return None
    not_known = first_unknown(decisive)
    if not_known is not None:
        return not_known
    numbers = as_numbers(op, decisive, view)
    is_random = any(state.is_random for state in numbers)
    value = INDEPENDENT._replace(is_random=is_random)
    if all(state.is_alike_on_towers for state in numbers):
        return value
    # The mark of this operation ends the proof by itself, whatever the written values depend on.
    view.note(op.name, op, 'reads what was computed from the examples of the shard')
    return value.with_shard_statistics([op.name])


def _decisive_states(names: typing.List[str], view: View) -> typing.Optional[typing.List[State]]:
    """The states that decide the value of a variable after some writes: of the written values, and
    of the conditions under which they are written; None as long as a value has no state.

    Args:
      names: the names of the operations that write the variable. Each is an assign, an add or a
        scatter (`values_written`).
      view: `View` of the scratch graph.
    """
    decisive: typing.List[State] = []
    for name in names:
        write = view.graph.get_operation_by_name(name)
        values = if_complete(list(map(view.state_or_none, _behind_variable(write))))
        if values is None:
            return None
        decisive += values
        decisive += conditions_around(write, view)
    return decisive


def values_written(name: str, graph: tf.Graph) -> typing.Optional[typing.List[tf.Tensor]]:
    """The values that an operation of a scratch graph writes to a variable: its inputs behind the
    variable, with the indices of rows; None where the values are not among its inputs, as for a
    call of a function."""
    op = graph_walk.operation_named(graph, name)
    if op is None or op.type not in SETS | ADDS | ADDS_ROWS:
        return None
    return _behind_variable(op)


def _behind_variable(write: tf.Operation) -> typing.List[tf.Tensor]:
    """The inputs of an assign, an add or a scatter that come after the variable."""
    return list(write.inputs)[1:]


# ---- writes --------------------------------------------------------------------------------------

def _variables_written(operations: typing.List[tf.Operation]) -> _Names:
    """`{name of an operation: names of the variables that it may write}`, of those operations of
    one graph that write any."""
    if not operations:
        return {}
    finder = Writes(operations[0].graph)
    found: _Names = {}
    for op in operations:
        variables = finder.written_by(op) if _may_write(op) else []
        if variables:
            found[op.name] = variables
    return found


def _writes_by_variable(operations: typing.List[tf.Operation], variables_written: _Names,
                        bodies: Bodies) -> _Writes:
    """`{name of a variable: list of the operations that write it}`.

    Where a function writes a variable, the call of the function writes it. The list has the
    operation of the body, whose inputs tell the written value. The list has the call where no
    operation of the body is known to write the variable.

    Args:
      operations: list of the operations of the forward pass, and behind them of bodies.
      variables_written: {name of an operation: names of the variables that it may write}.
      bodies: `Bodies`.
    """
    found: _Writes = {}
    # {name of a call: names of the variables that operations of its body write}
    written_in_body: typing.Dict[str, typing.Set[str]] = {}
    for op in reversed(operations):  # so that a body comes before its call
        variables = set(variables_written.get(op.name, []))
        for variable in variables - written_in_body.get(op.name, set()):
            found.setdefault(variable, []).append(op)
            for call in _calls_around(op.name, bodies):
                written_in_body.setdefault(call, set()).add(variable)
    return found


def _may_write(op: tf.Operation) -> bool:
    """Whether an operation may write a variable of the model. A variable itself writes nothing; an
    operation that draws random numbers writes the variable of its generator alone."""
    return op.type not in VARIABLE_OPS and not graph_walk.is_random(op)


def _takers_of_memory(variable: tf.Operation, writes: typing.List[tf.Operation],
                      order: '_Order') -> _Names:
    """The operations that get what was written to a reference variable, though they take a snapshot
    from before the write: `{name of such an operation: names of the writes}`.

        snapshot = tf.identity(v)       may be the memory of v itself
        write = tf.assign(v, mean)      after the snapshot
        tf.add(snapshot, 1.)            after the write: gets the mean

    Args:
      variable: the variable, an operation of the program.
      writes: the operations that write it.
      order: `_Order` of the operations of the forward pass.
    """
    found: _Names = {}
    for write in writes:
        for taker in _takers_after(variable, write, order):
            overwrites_memory = taker.type in SETS  # so that it uses no value written before
            if not overwrites_memory:
                found.setdefault(taker.name, []).append(write.name)
    return found


def _takers_after(variable: tf.Operation, write: tf.Operation,
                  order: '_Order') -> typing.List[tf.Operation]:
    """The operations that take the memory of a reference variable after a write, from an operation
    that has handed it on before the write.

    Args:
      variable: the variable.
      write: an operation that writes it.
      order: `_Order` of the operations of the forward pass.
    """
    # The branches (v1) that do not run if the write does, as the other branch of its `tf.cond`.
    not_running = branches_not_running(write)
    takers_of = functools.partial(_takers_of_memory_from, variable, not_running)
    found = []
    for source in graph_walk.reached([variable], takers_of).values():
        # A source behind the write has the state of the written value, and its takers go by that
        # state.
        if order.is_before(write.name, source.name):
            continue
        for taker in takers_of(source):
            if taker is not write and order.is_before(write.name, taker.name):
                found.append(taker)
    return found


def _takers_of_memory_from(variable: tf.Operation, not_running: typing.Container[Branch],
                           source: tf.Operation) -> typing.List[tf.Operation]:
    """The operations that take those outputs of an operation that may be a variable's memory.

    Args:
      variable: the reference variable.
      not_running: the branches whose outputs do not count.
      source: the variable, or an operation that takes its memory.
    """
    hands_memory_on = source is variable or source.type in HAND_ON_MEMORY
    takers: typing.List[tf.Operation] = []
    for output in source.outputs:
        # The result of an `Assign` has the reference type that the memory of a variable has.
        has_type_of_variable = is_variable(output)
        may_be_memory = hands_memory_on or has_type_of_variable
        if may_be_memory and branch_of(output) not in not_running:
            takers += output.consumers()
    return takers


# ---- order ---------------------------------------------------------------------------------------

def _calls_around(name: str, bodies: Bodies) -> typing.List[str]:
    """The names of the calls that run the operation of a name, the outermost one first."""
    calls: typing.List[str] = []
    while name in bodies.innermost_calls:
        name = bodies.innermost_calls[name]
        calls.insert(0, name)
    return calls


class _Order:
    """Which operations wait for which, across the bodies of functions."""

    def __init__(self, program: ProgramOrder, in_bodies: typing.List[tf.Operation],
                 bodies: Bodies):
        """Args:
          program: `ProgramOrder` of the operations of the forward pass.
          in_bodies: list of the operations of the bodies that it calls.
          bodies: `Bodies`.
        """
        self._bodies = bodies
        self._operations = graph_walk.by_name(program.operations + in_bodies)
        self._followers = program.followers
        self._followers_in_bodies = _followers(in_bodies)
        # {name of an operation: names of all operations that wait for it}, found when asked for
        self._waiting: typing.Dict[str, typing.Set[str]] = {}

    def is_before(self, name: str, other_name: str) -> bool:
        """Whether an operation runs before another operation, or may run before it in a loop around
        both.

        An operation in the body of a function runs when its call does. So, from the outermost call
        on, the first two calls that differ are compared; the operation itself counts as its last
        call.
        """
        calls = _calls_around(name, self._bodies) + [name]
        other_calls = _calls_around(other_name, self._bodies) + [other_name]
        for call, other_call in zip(calls, other_calls):
            if call != other_call:
                return other_call in self._names_waiting_for(call)
            if call in self._bodies.loops:  # the other operation may be in the next iteration
                return True
        return True  # one of the two is a call, which runs the other operation at some time

    def _names_waiting_for(self, name: str) -> typing.Set[str]:
        """The names of the operations that wait for an operation, its own among them."""
        if name not in self._waiting:
            self._waiting[name] = set(graph_walk.reached(
                [self._operations[name]], self._waiting_directly))
        return self._waiting[name]

    def _waiting_directly(self, op: tf.Operation) -> typing.List[tf.Operation]:
        """The operations that wait for an operation directly."""
        return self._followers.get(op.name, []) + self._followers_in_bodies.get(op.name, [])
