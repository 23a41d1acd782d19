"""Operations that write variables, and the choice of some of them by names.

Its test is `tests/roles/test_inline_updates.py`.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.capture.record import Recorded
from towers.graph.graph_walk import is_random, reachable_from, without_names
from towers.graph.variable_access import Writes, initializers


class Write(typing.NamedTuple):
    """An operation that writes variables."""
    op: tf.Operation
    variables: typing.List[str]  # their names


def writes_by(writes: typing.Iterable[Write], names: typing.Container[str]) -> typing.List[Write]:
    """List of the writes by operations of these names."""
    return [write for write in writes if write.op.name in names]


def writes_not_by(writes: typing.Iterable[Write],
                  names: typing.Container[str]) -> typing.List[Write]:
    """List of the writes whose operations have none of these names."""
    return [write for write in writes if write.op.name not in names]


def writes_to(writes: typing.Iterable[Write], variables: typing.Set[str]) -> typing.List[Write]:
    """List of the writes of any variable of these names."""
    return [write for write in writes if not variables.isdisjoint(write.variables)]


def writes_of_call(recorded: Recorded) -> typing.List[Write]:
    """List of the writes of a call of the model function.

    Initial values are left out, since they are no writes of a step: neither the graph's
    initializers, nor the operations that belong to the variables of the call (`recorded.owned`).
    The state of random generators is left out, since each tower draws for itself.
    """
    left_out = initializers() | recorded.owned
    writes = writes_among(without_names(recorded.operations, left_out))
    return [write for write in writes if not is_random(write.op)]


def writes_among(operations: typing.Iterable[tf.Operation]) -> typing.List[Write]:
    """List of the writes of variables among operations."""
    finder = Writes(tf.get_default_graph())
    writes = []
    for op in operations:
        variables = finder.written_by(op)
        if variables:
            writes.append(Write(op, variables))
    return writes


def after_kept_writes(operations: typing.Sequence[tf.Operation],
                      left_out: typing.Container[str]) -> typing.Set[str]:
    """Set of the names of the writes among operations that are not in `left_out`, and of the
    operations that wait for one of these.

    Args:
      operations: the operations.
      left_out: names of writes.
    """
    kept = [write.op for write in writes_not_by(writes_among(operations), left_out)]
    if not kept:
        return set()
    return reachable_from(kept, operations, control=True)
