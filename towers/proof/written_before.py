"""Reads of variables that the forward pass has written before: they give the written value.

A read before all writes gives what every tower has alike. A read behind a write, as of a counter
that the forward pass counts up, depends on what was written, and so perhaps on the examples.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.graph import graph_walk
from towers.graph.op_types import READS, VARIABLE_OPS
from towers.graph.variable_access import Writes, read_from


class WrittenBefore(typing.NamedTuple):
    """The operations of a forward pass that take variables after it has written them."""
    reads: typing.Dict[str, typing.List[str]]  # {name of a read: tensors that were written before}
    calls: typing.FrozenSet[str]  # names of calls of functions that take such a variable


def find_written_before(operations: list, in_functions: list) -> WrittenBefore:
    """Finds the reads and the calls that get values which were written before.

    Args:
      operations: list of the operations of the forward pass.
      in_functions: list of those of the bodies of functions that they call.
    """
    reads = _reads(operations)
    reads.update(_reads(in_functions))
    return WrittenBefore(reads, _calls(operations))


def _reads(operations: typing.List[tf.Operation]) -> typing.Dict[str, typing.List[str]]:
    """The reads of the variables that the same operations write, if they wrote them before."""
    if not operations:
        return {}
    writes = _writes_by_variable(operations)
    all_writes = [op for ops in writes.values() for op in ops]
    after_any = graph_walk.reachable_from(all_writes, operations, control=True)
    found: typing.Dict[str, typing.List[str]] = {}
    for op in operations:
        is_read = op.type in READS or op.type == 'Identity'
        if not is_read or op.name not in after_any:
            continue
        for variable in read_from(op.inputs[0]):
            before = writes.get(variable.name, [])
            if op in before:
                continue
            if op.name in graph_walk.reachable_from(before, operations, control=True):
                found.setdefault(op.name, []).extend(_written_values(before))
    return found


def _writes_by_variable(operations: typing.List[tf.Operation]):
    """{name of a variable: list of the operations that write it}."""
    finder = Writes(operations[0].graph)
    found: typing.Dict[str, list] = {}
    for op in operations:
        if _may_write(op):
            for name in finder.of(op):
                found.setdefault(name, []).append(op)
    return found


def _may_write(op: tf.Operation):
    """Whether an operation is neither a variable nor a random number, which has a state, too."""
    return op.type not in VARIABLE_OPS and not graph_walk.is_random(op)


def _written_values(writes: typing.List[tf.Operation]) -> typing.List[str]:
    """The names of the tensors that some operations write: all inputs behind the variable."""
    names = []
    for op in writes:
        names += [tensor.name for tensor in list(op.inputs)[1:]]
    return names


def _calls(operations: typing.List[tf.Operation]) -> typing.FrozenSet[str]:
    """The names of the calls of functions that take a variable which was written before."""
    if not operations:
        return frozenset()
    finder = Writes(operations[0].graph)
    writes = {}  # {operation: names of the variables that it writes}
    for op in operations:
        written = finder.of(op) if _may_write(op) else []
        if written:
            writes[op] = written
    if not writes:
        return frozenset()
    found = set()
    for call in operations:
        if not finder.within_function(call):
            continue
        variables = _variables_of(call)
        before = [op for op, written in writes.items()
                  if op is not call and not variables.isdisjoint(written)]
        if before and call.name in graph_walk.reachable_from(before, operations, control=True):
            found.add(call.name)
    return frozenset(found)


def _variables_of(call):
    """The names of the variables that a call takes."""
    names = set()
    for tensor in call.inputs:
        names.update(source.name for source in read_from(tensor))
    return names
