"""`update_ops='all'`: the towers write shared variables one after the other.

So N towers' moving averages are N steps of the average, as one device would take them with N
batches. There are two kinds of turns. If forward passes write a variable, a tower's forward and
backward passes take it when the tower before has done with it. An update op takes its variable when
the passes of all towers have read it, and the same update op of the tower before has run.

State that each tower has for itself needs no turn: its reads and writes keep the order that the
program gives them.

The first micro-batches of all towers come first, then their second micro-batches, and so on: the
micro-batches are computed in this order.

Its test is `tests/roles/test_write_order.py`.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.errors import SharedVariableError
from towers.gradients.tower import Tower
from towers.graph.graph_walk import (
    ancestors,
    by_name,
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
    turns_of,
    variables_named,
)
from towers.roles.variable_roles import FIRST, Roles
from towers.roles.write_order import add_waits


def write_in_turn(towers: typing.Sequence[Tower], roles: Roles) -> typing.List[Wait]:
    """Makes the writes of shared variables by all towers come one tower after the other.

    Args:
      towers: all towers; with accumulation a `Tower` for each micro-batch of each.
      roles: the roles of the variables: where tower 0 alone would write by `update_ops='first'`
        (the role `FIRST`), all towers write here.

    Returns:
      What waits for what.

    Raises:
      SharedVariableError: the new value of an update op is computed from a value of its variable
        that the forward pass has read, and so without what the tower before has written.
    """
    finder = Writes(tf.get_default_graph())
    variables = variables_named(roles.names(FIRST))
    in_order_of_turns = sorted(towers, key=lambda tower: (tower.micro_batch, tower.index))
    passes = by_name(step_operations(fetches_without_updates(in_order_of_turns)))
    waits = _take_turns_in_passes(in_order_of_turns, variables, passes, finder)
    return waits + _take_turns_in_update_ops(in_order_of_turns, variables, passes, finder)


def _take_turns_in_update_ops(towers: typing.Sequence[Tower], variables: Variables,
                              passes: Operations, finder: Writes) -> typing.List[Wait]:
    """Makes the writes by an update op wait for what the passes read, and for the same update op of
    the tower before; returns what waits for what.

    Args:
      towers: the towers, in the order of their turns.
      variables: the variables that towers write, in their forward passes or by update ops.
      passes: the operations of the forward and backward passes.
      finder: finds the writes of the graph.
    """
    writes: typing.List[TowerWrite] = []
    turns_of_towers = []
    for index, tower in enumerate(towers):
        turns: typing.List[Turn] = []
        for operations in _operations_by_update_op(tower, towers, passes):
            writes += _checked_writes(operations, variables, passes, tower, index, finder)
            turns += turns_of(tower, operations, variables, finder)
        turns_of_towers.append(turns)
    waits = _make_wait_for_passes(towers, writes, passes, finder)
    return waits + take_turns(turns_of_towers, finder)


def _take_turns_in_passes(towers: typing.Sequence[Tower], variables: Variables,
                          passes: Operations, finder: Writes) -> typing.List[Wait]:
    """Makes towers take variables in turn that their forward passes write; returns what waits for
    what.

    Args:
      towers: the towers, in the order of their turns.
      variables: the variables that towers write, in their forward passes or by update ops.
      passes: the operations of the forward and backward passes.
      finder: finds the writes of the graph.
    """
    written_in_passes = {}
    for name, variable in variables.items():
        writers = names_of(finder.writers_of(variable))
        if writers & passes.keys():
            written_in_passes[name] = variable
    turns_of_towers = [turns_of(tower, passes.values(), written_in_passes, finder)
                       for tower in towers]
    return take_turns(turns_of_towers, finder)


def _checked_writes(operations: typing.Iterable[tf.Operation], variables: Variables,
                    passes: Operations, tower: Tower, index: int,
                    finder: Writes) -> typing.List[TowerWrite]:
    """Finds the writes of an update op of a tower; refuses one that the towers cannot do in turn.

    Args:
      operations: the operations that run for the update op.
      variables: the variables whose writes are found.
      passes: the operations of the forward and backward passes.
      tower: the tower.
      index: the index of the tower in the order of the turns.
      finder: finds the writes of the graph.
    """
    writes = []
    for op in operations:
        written = only_named(variables, finder.written_by(op))
        if not written:
            continue
        _check_reads_anew(op, written, tower, passes)
        # `has_role_every` is False: with `update_ops='all'` the variables have the role `FIRST`,
        # though every tower writes them. `take_turns` orders these writes; `write_order` orders
        # the towers' writes of variables with the role `EVERY` alone.
        writes += [TowerWrite(index, op, name, has_role_every=False) for name in written]
    return writes


def _make_wait_for_passes(towers: typing.Sequence[Tower], writes: typing.List[TowerWrite],
                          passes: Operations, finder: Writes) -> typing.List[Wait]:
    """Makes the writes of update ops wait for what the passes read; returns what waits for what.

    Args:
      towers: the towers, in the order of their turns.
      writes: the writes by update ops of the towers.
      passes: the operations of the forward and backward passes.
      finder: finds the writes of the graph.
    """
    takers = takers_of({write.variable_name for write in writes}, finder)
    frames = Frames(list(passes.values()) + [write.op for write in writes])
    holds = find_holds(towers, passes, writes, takers, frames)
    waits = Waits(held_by(holds))
    add_waits(holds, waits)
    return waits.put_into_graph(finder)


def _operations_by_update_op(tower: Tower, towers: typing.Sequence[Tower],
                             passes: Operations) -> typing.List[typing.List[tf.Operation]]:
    """For each update op of a tower, lists the operations that it runs beside the passes.

    `take_turns` puts an update op after the one at the same position in the tower before. Where the
    towers have different numbers of update ops, since with `copies='reuse'` a call of the model
    function may make some that another call does not make, the positions do not tell which are the
    same: then all update ops of a tower count as one.

    Args:
      tower: the tower.
      towers: all towers.
      passes: the operations of the forward and backward passes.
    """
    numbers_of_update_ops = {len(each.updates) for each in towers}
    has_same_update_ops = len(numbers_of_update_ops) == 1
    if not has_same_update_ops:
        return [_operations_beside(passes, tower, tower.updates)]
    return [_operations_beside(passes, tower, [update_op]) for update_op in tower.updates]


def _operations_beside(passes: Operations, tower: Tower,
                       update_ops: list) -> typing.List[tf.Operation]:
    """List of the operations of a tower that update ops run, without those of the passes."""
    return without_names(tower.own(step_operations(update_ops)), passes)


def _check_reads_anew(op: tf.Operation, variables: Variables, tower: Tower,
                      passes: Operations) -> None:
    """Refuses an update op whose new value is computed from a value of its variable that the
    forward pass has read.

    The passes of all towers read before the first update op writes, and so the same value: with
    `assign(v, 0.9 * v_read + 0.1 * mean)` each tower would discard what the tower before has
    written.

    Args:
      op: the operation that writes.
      variables: the variables that it writes.
      tower: the tower that it belongs to.
      passes: the operations of the forward and backward passes.
    """
    new_values = [tensor for tensor in op.inputs if not is_variable(tensor)]
    upstream = ancestors(new_values)
    upstream_in_passes = with_names(passes.values(), upstream)
    for take in takes_from_outside(tower, upstream_in_passes, variables):
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
