"""`update_ops='all'`: the towers write shared variables one after the other.

So N towers' moving averages are N steps of the average, as one device would take them with N
batches. There are two kinds of turns. In the forward pass, a tower takes a variable that forward
passes write when the tower before has done with it. An update takes its variable when all forward
passes have read it, and the same update of the tower before has run.

The first micro-batches of all towers come first, then their second micro-batches, and so on: the
micro-batches are computed in this order.

Its test is `tests/roles/test_write_order.py`.
"""

import collections
import typing

import tensorflow.compat.v1 as tf

from towers.errors import SharedVariableError
from towers.gradients.tower import Tower
from towers.graph.graph_walk import (
    ancestors,
    by_name,
    in_order_of_names,
    names_of,
    step_operations,
    takers_of_results,
    with_names,
    without_names,
)
from towers.graph.op_types import is_fused_batch_norm
from towers.graph.order import Frames
from towers.graph.variable_access import Writes, is_variable
from towers.graph.waits import Wait, Waits
from towers.roles.reads_before_writes import (
    Operations,
    TowerWrite,
    fetches_without_updates,
    find_holds,
    held_by,
    takers_of,
)
from towers.roles.turns import (
    Turn,
    Variables,
    only_named,
    take_turns,
    takes_from_outside,
    variables_named,
)
from towers.roles.variable_roles import FIRST, Roles
from towers.roles.write_order import add_waits


def write_in_turn(towers: typing.Sequence[Tower], roles: Roles) -> typing.List[Wait]:
    """Makes the writes of shared variables by all towers come one tower after the other.

    Args:
      towers: all towers.
      roles: the roles of the variables: where tower 0 alone would write by `update_ops='first'`
        (the role `FIRST`), all towers write here.

    Returns:
      What waits for what.

    Raises:
      SharedVariableError: the new value of an update is computed from a value of its variable that
        the forward pass has read, before the tower before has written it.
    """
    finder = Writes(tf.get_default_graph())
    variables = variables_named(roles.names(FIRST))
    in_order_of_turns = sorted(towers, key=lambda tower: (tower.micro_batch, tower.index))
    forward = by_name(step_operations(fetches_without_updates(in_order_of_turns)))
    waits = _take_turns_in_forward_pass(in_order_of_turns, variables, forward, finder)
    return waits + _take_turns_in_updates(in_order_of_turns, variables, forward, finder)


def _take_turns_in_updates(towers: typing.Sequence[Tower], variables: Variables,
                           forward: Operations, finder: Writes) -> typing.List[Wait]:
    """Makes the writes by an update wait for what the forward passes read, and for the same update
    of the tower before; returns what waits for what.

    Args:
      towers: the towers, in the order of their turns.
      variables: the variables that towers write, in their forward passes or by updates.
      forward: the operations of the forward passes.
      finder: finds the writes of the graph.
    """
    writes: typing.List[TowerWrite] = []
    turns_of_towers = []
    for index, tower in enumerate(towers):
        turns: typing.List[Turn] = []
        for operations in _operations_by_update(tower, towers, forward):
            writes += _checked_writes(operations, variables, forward, tower, index, finder)
            turns += _turns(tower, operations, variables, finder)
        turns_of_towers.append(turns)
    waits = _make_wait_for_forward_passes(towers, writes, forward, finder)
    return waits + take_turns(turns_of_towers, finder)


def _take_turns_in_forward_pass(towers: typing.Sequence[Tower], variables: Variables,
                                forward: Operations, finder: Writes) -> typing.List[Wait]:
    """Makes towers take variables in turn that their forward passes write; returns what waits for
    what.

    Args:
      towers: the towers, in the order of their turns.
      variables: the variables that towers write, in their forward passes or by updates.
      forward: the operations of the forward passes.
      finder: finds the writes of the graph.
    """
    written_in_forward_pass = {}
    for name, variable in variables.items():
        writers = names_of(finder.writers_of(variable))
        if writers & forward.keys():
            written_in_forward_pass[name] = variable
    turns_of_towers = [_turns(tower, forward.values(), written_in_forward_pass, finder)
                       for tower in towers]
    return take_turns(turns_of_towers, finder)


def _checked_writes(operations: typing.Iterable[tf.Operation], variables: Variables,
                    forward: Operations, tower: Tower, index: int,
                    finder: Writes) -> typing.List[TowerWrite]:
    """Finds the writes of an update of a tower; refuses one that the towers cannot do in turn.

    Args:
      operations: the operations of the update.
      variables: the variables whose writes are found.
      forward: the operations of the forward passes.
      tower: the tower.
      index: the index of the tower in the order of the turns.
      finder: finds the writes of the graph.
    """
    writes = []
    for op in operations:
        written = only_named(variables, finder.written_by(op))
        if not written:
            continue
        _check_reads_anew(op, written, tower, forward)
        # `has_role_every` is False: with `update_ops='all'` the variables have the role `FIRST`,
        # though every tower writes them. `take_turns` orders these writes; `write_order` orders
        # the towers' writes of variables with the role `EVERY` alone.
        writes += [TowerWrite(index, op, name, has_role_every=False) for name in written]
    return writes


def _make_wait_for_forward_passes(towers: typing.Sequence[Tower], writes: typing.List[TowerWrite],
                                  forward: Operations, finder: Writes) -> typing.List[Wait]:
    """Makes the writes of updates wait for what the forward passes read; returns what waits for
    what.

    Args:
      towers: the towers, in the order of their turns.
      writes: the writes by updates of the towers.
      forward: the operations of the forward passes.
      finder: finds the writes of the graph.
    """
    takers = takers_of({write.variable for write in writes}, finder)
    frames = Frames(list(forward.values()) + [write.op for write in writes])
    holds = find_holds(towers, forward, writes, takers, frames)
    waits = Waits(held_by(holds))
    add_waits(holds, waits)
    return waits.put_into_graph(finder)


def _operations_by_update(tower: Tower, towers: typing.Sequence[Tower],
                          forward: Operations) -> typing.List[typing.List[tf.Operation]]:
    """For each update of a tower, lists the operations that it runs beside the forward passes.

    `take_turns` puts an update after the update at the same position in the tower before. Where the
    towers have different numbers of updates, the positions do not tell which updates are the same:
    then all updates of a tower count as one.

    Args:
      tower: the tower.
      towers: all towers.
      forward: the operations of the forward passes.
    """
    numbers_of_updates = {len(each.updates) for each in towers}
    has_same_updates = len(numbers_of_updates) == 1
    if not has_same_updates:
        return [_operations_beside(forward, tower, tower.updates)]
    return [_operations_beside(forward, tower, [update]) for update in tower.updates]


def _operations_beside(forward: Operations, tower: Tower,
                       updates: list) -> typing.List[tf.Operation]:
    """List of the operations of a tower that updates run, without operations of forward passes."""
    return without_names(tower.own(step_operations(updates)), forward)


def _check_reads_anew(op: tf.Operation, variables: Variables, tower: Tower,
                      forward: Operations) -> None:
    """Refuses an update whose new value is computed from a value of its variable that the forward
    pass has read.

    The forward passes of all towers read before the first update, and so the same value: with
    `assign(v, 0.9 * v_read + 0.1 * mean)` each tower would discard the update of the tower before.

    Args:
      op: the operation of the update.
      variables: the variables that it writes.
      tower: the tower that it belongs to.
      forward: the operations of the forward passes.
    """
    new_values = [tensor for tensor in op.inputs if not is_variable(tensor)]
    upstream = ancestors(new_values)
    upstream_in_forward_pass = with_names(forward.values(), upstream)
    for take in takes_from_outside(tower, upstream_in_forward_pass, variables):
        if _is_value_used(take.op, upstream):
            raise SharedVariableError(
                "update_ops='all', and the update of variable %s (operation %s) starts from a "
                'value that the forward pass has read (operation %s), so that it would be the last '
                "tower's alone: read the variable in the update, or pass update_ops='first'." % (
                    take.variable.op.name, op.name, take.op.name))


def _is_value_used(read: tf.Operation, upstream: typing.Container[str]) -> bool:
    """Whether the new value of a variable depends on the value that it had when an operation took
    it.

    A fused batch norm in training takes the moving averages of its layer and does not use them.

    Args:
      read: the operation that takes the variable: a read; of a reference variable, perhaps the
        batch norm itself.
      upstream: names of the operations that the new value is computed from.
    """
    if _ignores_averages(read):  # the batch norm takes the reference variable itself
        return False
    takers = with_names(takers_of_results([read]), upstream)
    return not all(map(_ignores_averages, takers))


def _ignores_averages(op: tf.Operation) -> bool:
    """Whether an operation is a fused batch norm in training that does not use the averages which
    it takes.

    Its kernel gives factor * (statistic of the batch) + (1 - factor) * (old average). With the
    factor 1 this is the statistic alone.
    """
    if not is_fused_batch_norm(op.type) or not op.get_attr('is_training'):
        return False
    attributes = op.node_def.attr
    if 'exponential_avg_factor' not in attributes:  # TensorFlow 1 has no factor, which is as 1
        return True
    return attributes['exponential_avg_factor'].f == 1.


def _turns(tower: Tower, operations: typing.Iterable[tf.Operation], variables: Variables,
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
