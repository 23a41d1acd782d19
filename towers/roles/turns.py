"""Turns of the towers: each takes the variables in question when the tower before has done with
them.

With `a += 1` in each tower, tower k's read of a has to come after tower k - 1's write. The read is
a *take* of tower k's turn, the write an *end* of tower k - 1's turn: each take of a turn waits for
the ends of the turn before.

Its tests are `tests/roles/test_metric_counters.py` and `test_write_order.py`.
"""

import collections
import itertools
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import SharedVariableError
from towers.gradients.tower import Tower
from towers.graph.graph_walk import (
    by_name,
    in_order_of_names,
    names_of,
    variables_by_name,
    without_names,
)
from towers.graph.order import Frames
from towers.graph.variable_access import Writes, read_from
from towers.graph.waits import Wait, Waits, operations_to_await
from towers.placement.variable_device import only_device

Variables = typing.Dict[str, tf.Variable]
"""{name of a variable: the variable}."""


class Take(typing.NamedTuple):
    """An operation of a tower that gets a variable, or its value, from outside of the tower."""
    op: tf.Operation
    position: int  # of the input by which it gets the variable
    variable: tf.Variable


class Turn(typing.NamedTuple):
    """The operations of a tower that use variables when it is the tower's turn.

    Attributes:
      scope: the name scope of the tower.
      takes: how the tower gets the variables.
      ends: operations that come after all that the tower does with the variables.
    """
    scope: str
    takes: typing.List[Take]
    ends: typing.List[tf.Operation]


def variables_named(names: typing.Iterable[str]) -> Variables:
    """{name: variable} of the graph's variables that have these names."""
    return only_named(variables_by_name(tf.global_variables() + tf.local_variables()), names)


def only_named(variables: Variables, names: typing.Iterable[str]) -> Variables:
    """{name: variable} of the given variables that have one of these names. Names of other
    variables do not count."""
    return {name: variables[name] for name in names if name in variables}


def takes_from_outside(tower: Tower, operations: typing.Iterable[tf.Operation],
                       variables: Variables) -> typing.List[Take]:
    """Lists the takes of a tower: where its operations get any of the variables.

    Of `Identity(a + 1)`, in a tower, the addition takes the variable a, and the identity does not.
    An operation takes a variable as its handle or reference, or as a value that was read outside
    of the tower.

    Args:
      tower: the tower.
      operations: operations; only the tower's own operations among them count.
      variables: the variables. Their operations may be among tower 0's. All towers share them, so
        they count as outside of every tower.
    """
    inside = by_name(without_names(tower.own(operations), variables))
    takes = []
    for op in inside.values():
        for position, tensor in enumerate(op.inputs):
            if tensor.op.name in inside:
                continue  # the tower has computed it
            names = names_of(read_from(tensor)) & variables.keys()
            takes += [Take(op, position, variables[name]) for name in sorted(names)]
    return takes


def turns_of(tower: Tower, operations: typing.Iterable[tf.Operation], variables: Variables,
             finder: Writes) -> typing.List[Turn]:
    """List of the turns of a tower: one for each variable, in the order of their names.

    A turn ends when all of the tower's operations that use the variable (read it, write it, or
    compute with its memory) have run.

    Args:
      tower: the tower.
      operations: operations, in no order; only the tower's own operations among them count.
      variables: the variables.
      finder: finds the writes of the graph.
    """
    own = by_name(tower.own(operations))
    frames = Frames(list(own.values()))
    takes_by_variable = collections.defaultdict(list)
    for take in takes_from_outside(tower, own.values(), variables):
        takes_by_variable[take.variable.op.name].append(take)
    turns = []
    for name, variable in sorted(variables.items()):
        names_of_uses = names_of(finder.readers(variable.op) + finder.takers(variable.op))
        ends = {}
        for name_of_use in names_of_uses & own.keys():
            ends.update(by_name(_early_end(own[name_of_use], frames, tower)))
        turns.append(Turn(tower.name_scope, takes_by_variable[name], in_order_of_names(ends)))
    return turns


def _early_end(op: tf.Operation, frames: Frames, tower: Tower) -> typing.List[tf.Operation]:
    """Finds an operation by which others can wait for `op`: `op` itself; or, if `op` is in a loop
    or a branch, an operation outside that comes after it.

    Returns:
      A list of this one operation. An operation of the forward pass is preferred, since the
      backward pass comes late. [] if nothing outside of the loop or branch depends on `op`.
    """
    ends = frames.ends(op)
    in_forward_pass = without_names(ends, tower.backward)
    return (in_forward_pass or ends)[:1]


def take_turns(turns_of_towers: typing.Sequence[typing.Sequence[Turn]],
               finder: Writes) -> typing.List[Wait]:
    """Makes towers take their variables one after the other; returns what waits for what.

    Args:
      turns_of_towers: the turns of each tower. A turn comes after the turn at the same position in
        the list of the tower before, such as the turn for the same update op. So a step that runs a
        turn of one tower also runs the turns at this position of all towers before it.
      finder: finds the writes of the graph.
    """
    taking = []
    for turn in itertools.chain.from_iterable(turns_of_towers):
        taking += [take.op for take in turn.takes]
    waits = Waits(taking)  # only what takes a variable gets a new wait
    for turns_of_former, turns_of_later in zip(turns_of_towers, turns_of_towers[1:]):
        for former, later in zip(turns_of_former, turns_of_later):
            _make_turn_after(later, former.ends, waits, finder)
    return waits.put_into_graph(finder)


def _make_turn_after(turn: Turn, ends: typing.Sequence[tf.Operation], waits: Waits,
                     finder: Writes) -> None:
    """Makes a tower take its variables after the turn of the tower before.

    Args:
      turn: the turn.
      ends: the ends of the turn before; none where that tower does nothing with the variables.
      waits: the waits, which are added to.
      finder: finds the writes of the graph.
    """
    if not ends:
        return
    for take in turn.takes:
        _wait_for_ends(take, ends, waits)
        takes_variable_itself = take.op.inputs[take.position].op is take.variable.op
        if not takes_variable_itself:
            # The operation takes a value that was read once for all towers, before the turns. From
            # now on it takes the value of a read of its own.
            _give_own_read(take, ends, turn.scope, finder)


def _wait_for_ends(take: Take, ends: typing.Sequence[tf.Operation], waits: Waits) -> None:
    """Notes in `waits` that a take comes after the ends of the turn before."""
    reason = 'it takes variable %s in its turn, after the tower before' % take.variable.op.name
    for end in ends:
        if not waits.add(take.op, end, reason):
            raise SharedVariableError(
                'the towers take variable %s one after the other, and operation %s of the one '
                'before waits for %s of the next: let no tower wait for a later one.' % (
                    take.variable.op.name, end.name, take.op.name))


def _give_own_read(take: Take, ends: typing.Sequence[tf.Operation], scope: str,
                   finder: Writes) -> None:
    """Makes a new read of a variable, which waits for the turn before. An operation then takes the
    new read's value in the place of an earlier read's.

    Args:
      take: the operation, and what it takes.
      ends: the ends of the turn before, which the new read waits for.
      scope: the name scope of the tower that takes.
      finder: finds the writes of the graph.
    """
    awaited = []
    for end in ends:
        awaited += operations_to_await(end, finder)
    variable = take.variable
    with tf.control_dependencies(awaited), tf.name_scope(scope), \
            only_device(variable.device or None):
        compat.replace_input(take.op, take.position, variable.read_value())
