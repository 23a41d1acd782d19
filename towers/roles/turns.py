"""Turns of the towers: each takes some variables when the tower before has done with them.

Its tests are `tests/roles/test_metric_counters.py` and `test_write_order.py`.
"""

import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import SharedVariableError
from towers.gradients.tower import Tower
from towers.graph.graph_walk import by_name
from towers.graph.order import Wait, Waits, operations_to_await
from towers.graph.variable_access import Writes, read_from
from towers.placement.variable_device import only_device


class Take(typing.NamedTuple):
    """An operation of a tower that gets a variable, or its value, from outside of the tower."""
    op: tf.Operation
    position: int  # of the input
    variable: tf.Variable


class Turn(typing.NamedTuple):
    """The operations of a tower that use some variables, when it is its turn.

    Attributes:
      scope: the name scope of the tower.
      takes: how the tower gets the variables.
      ends: operations that come after all that it does with them.
    """
    scope: str
    takes: typing.List[Take]
    ends: typing.List[tf.Operation]


def takes_from_outside(tower: Tower, operations: typing.Iterable[tf.Operation],
                       variables: typing.Dict[str, tf.Variable]) -> typing.List[Take]:
    """Lists the takes of a tower: where its operations get any of the variables.

    Args:
      tower: the tower.
      operations: operations, of which only the tower's own count.
      variables: {name: variable}.
    """
    inside = by_name(op for op in tower.own(operations) if op.name not in variables)
    takes = []
    for op in inside.values():
        for position, tensor in enumerate(op.inputs):
            if tensor.op.name in inside:
                continue
            for source in read_from(tensor):
                if source.name in variables:
                    takes.append(Take(op, position, variables[source.name]))
    return takes


def take_turns(turns_of_towers: typing.Sequence[typing.Sequence[Turn]],
               finder: Writes) -> typing.List[Wait]:
    """Makes towers take their variables one after the other; returns what waits for what.

    Args:
      turns_of_towers: the turns of each tower. Turns at the same position in these lists, such as
        those of one update, come after each other; a step that runs one in a tower runs it in the
        tower before.
      finder: finds the writes of the graph.
    """
    taking = []
    for turns in turns_of_towers:
        for turn in turns:
            taking += [take.op for take in turn.takes]
    waits = Waits(taking)
    for turns_before, turns_after in zip(turns_of_towers, turns_of_towers[1:]):
        for former, later in zip(turns_before, turns_after):
            if not former.ends:
                continue
            for take in later.takes:
                _make_take_after(take, former.ends, later.scope, waits, finder)
    return waits.put_into_graph(finder)


def _make_take_after(take: Take, ends: typing.Sequence[tf.Operation], scope: str, waits: Waits,
                     finder: Writes) -> None:
    """Makes an operation take a variable, or its value, after others.

    Args:
      take: the operation, and what it takes.
      ends: the operations to wait for.
      scope: the name scope of the tower that takes.
      waits: the waits, which are added to.
      finder: finds the writes of the graph.
    """
    reason = 'it takes variable %s in its turn, after the tower before' % take.variable.op.name
    for end in ends:
        if not waits.add(take.op, end, reason):
            raise SharedVariableError(
                'the towers take variable %s one after the other, and operation %s of the one '
                'before waits for %s of the next: let no tower wait for a later one.' % (
                    take.variable.op.name, end.name, take.op.name))
    if take.op.inputs[take.position].op is take.variable.op:
        return
    # It takes a value that was read once for all towers: from now on it has a read of its own.
    awaited = []
    for end in ends:
        awaited += operations_to_await(end, finder)
    device = take.variable.device or None
    with tf.control_dependencies(awaited), tf.name_scope(scope), only_device(device):
        compat.replace_input(take.op, take.position, take.variable.read_value())
