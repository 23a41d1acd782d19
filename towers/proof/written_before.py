"""Reads of variables that the forward pass has written before: they give the written value.

A read before all writes gives what every tower has alike. A read behind a write, as of a counter
that the forward pass counts up, depends on what was written, and on whether it was: so perhaps on
the examples. Writes and reads may be in bodies of functions (`functions`). Of these, a call stands
for what it runs: a write comes before a read if its call does. In a loop, every write comes before
every read, which may be in the next iteration.

The value of a reference variable is its memory. A snapshot of it (`Identity`) may share that
memory, so that an operation which takes a snapshot from before the write gets what was written.
"""

import collections
import typing

import tensorflow.compat.v1 as tf

from towers.graph import graph_walk
from towers.graph.op_types import HAND_ON_MEMORY, READS, SETS, VARIABLE_OPS
from towers.graph.variable_access import (
    REFERENCE_VARIABLES,
    Writes,
    branch_of,
    branches_not_running,
    is_variable,
    read_from,
)
from towers.proof.functions import Bodies

_Names = typing.Dict[str, typing.List[str]]


class WrittenBefore(typing.NamedTuple):
    """The operations of a scratch graph that take variables after the forward pass wrote them."""
    reads: _Names  # {name of a read: names of the operations that wrote before}
    # {name of another operation that takes the memory of a reference variable: the same}
    takers_of_memory: _Names


def find_written_before(program: typing.List[tf.Operation], graph: tf.Graph,
                        bodies: Bodies) -> WrittenBefore:
    """Finds the operations that get values which were written before.

    Args:
      program: list of the operations of the forward pass.
      graph: `tf.Graph` that has them once more, and the bodies of functions that they call.
      bodies: `Bodies` of these.
    """
    operations = program + [graph.get_operation_by_name(name) for name in bodies.callers]
    writes = _writes_by_variable(operations, bodies)
    if not writes:
        return WrittenBefore({}, {})
    order = _Order(operations, bodies)
    reads: _Names = {}
    for op in operations:
        if op.type not in READS and op.type != 'Identity':
            continue
        variables = sorted(graph_walk.names_of(read_from(op.inputs[0])) & writes.keys())
        before = [write.name for name in variables for write in writes[name]
                  if order.is_before(write.name, op.name)]
        if before:
            reads[op.name] = before
    takers_of_memory: _Names = {}
    for name in sorted(writes):
        variable = graph_walk.operation_named(program[0].graph, name)
        if variable is not None and variable.type in REFERENCE_VARIABLES:
            takers = _takers_of_memory(variable, writes[name], order)
            takers_of_memory.update(
                (taker, before) for taker, before in takers.items() if taker not in reads)
    return WrittenBefore(reads, takers_of_memory)


# ---- writes --------------------------------------------------------------------------------------

def _writes_by_variable(operations: typing.List[tf.Operation], bodies: Bodies
                        ) -> typing.Dict[str, typing.List[tf.Operation]]:
    """{name of a variable: list of the operations that write it}.

    A call writes by the operations of its body; itself only where these are not known to write
    what it may write.
    """
    finders: typing.Dict[tf.Graph, Writes] = {}
    found: typing.Dict[str, typing.List[tf.Operation]] = {}
    within: typing.Dict[str, typing.Set[str]] = {}  # {name of a call: variables written in it}
    for op in reversed(operations):  # the bodies of calls first
        if not _may_write(op):
            continue
        finder = finders.setdefault(op.graph, Writes(op.graph))
        for name in set(finder.of(op)) - within.get(op.name, set()):
            found.setdefault(name, []).append(op)
            for call in _calls_around(op.name, bodies)[:-1]:
                within.setdefault(call, set()).add(name)
    return found


def _may_write(op: tf.Operation):
    """Whether an operation is neither a variable nor a random number, which has a state, too."""
    return op.type not in VARIABLE_OPS and not graph_walk.is_random(op)


def _takers_of_memory(variable: tf.Operation, writes: typing.List[tf.Operation],
                      order: '_Order') -> _Names:
    """The operations that take the memory of a reference variable after a write, from one that has
    handed it on before: `{name of an operation: names of the writes}`.

    Args:
      variable: the variable, an operation of the program.
      writes: the operations that write it.
      order: `_Order` of the operations of the forward pass.
    """
    found: _Names = {}
    for write in writes:
        for taker in _takers_after(variable, write, order):
            if taker.type not in SETS:
                found.setdefault(taker.name, []).append(write.name)
    return found


def _takers_after(variable: tf.Operation, write: tf.Operation,
                  order: '_Order') -> typing.List[tf.Operation]:
    """The operations that take the memory of a reference variable after a write of it, from one
    that has handed it on before; but not out of a branch (v1) that does not run where the write
    does. `order` is `_Order`."""
    not_running = branches_not_running(write)

    def next_takers(op: tf.Operation) -> typing.List[tf.Operation]:
        is_handed_on = op is variable or op.type in HAND_ON_MEMORY
        takers: typing.List[tf.Operation] = []
        for output in op.outputs:
            if (is_handed_on or is_variable(output)) and branch_of(output) not in not_running:
                takers += output.consumers()
        return takers

    found = []
    for source in graph_walk.reached([variable], next_takers).values():
        if order.is_before(write.name, source.name):
            continue
        for taker in next_takers(source):
            if taker is not write and order.is_before(write.name, taker.name):
                found.append(taker)
    return found


# ---- order ---------------------------------------------------------------------------------------

def _calls_around(name: str, bodies: Bodies) -> typing.List[str]:
    """The names of the calls that run an operation, the outermost one first; its own at the end."""
    names = [name]
    while name in bodies.direct_callers:
        name = bodies.direct_callers[name]
        names.append(name)
    return names[::-1]


class _Order:
    """Which operations wait for which, across the bodies of functions."""

    def __init__(self, operations: typing.List[tf.Operation], bodies: Bodies):
        """Args:
          operations: list of the operations of the forward pass, and of the bodies it calls.
          bodies: `Bodies`.
        """
        self._bodies = bodies
        self._takers: typing.Dict[str, typing.List[tf.Operation]] = collections.defaultdict(list)
        self._operations = graph_walk.by_name(operations)
        self._after: typing.Dict[str, typing.Set[str]] = {}  # {name: names of what waits for it}
        for op in operations:
            for other in graph_walk.inputs_of(op):
                self._takers[other.name].append(op)

    def is_before(self, one: str, other: str) -> bool:
        """Whether the operation `one` runs before `other`, or may in a loop that both are in."""
        calls, other_calls = [_calls_around(name, self._bodies) for name in (one, other)]
        for call, other_call in zip(calls, other_calls):
            if call != other_call:
                return other_call in self._waiting_for(call)
            if call in self._bodies.loops:
                return True
        return True  # one of them is the call that runs the other

    def _waiting_for(self, name: str) -> typing.Set[str]:
        """The names of the operations that wait for one, itself among them."""
        if name not in self._after:
            self._after[name] = set(graph_walk.reached(
                [self._operations[name]], lambda op: self._takers.get(op.name, ())))
        return self._after[name]
