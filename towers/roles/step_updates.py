"""The update ops that a step runs: tower 0's, and what other towers run for them.

Tower 0 runs all update ops of the model. With `update_ops='first'` the other towers run of these
only the writes of variables that every tower writes: counters, rows, each tower's own state. With
`'all'` each tower runs its own.

Its test is `tests/roles/test_ownership.py`.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.gradients.tower import Tower
from towers.graph.graph_walk import operation_of, step_operations
from towers.graph.order import fetches_for
from towers.graph.variable_access import metric_variables
from towers.roles.variable_roles import EVERY, Roles
from towers.roles.writes import writes_among, writes_to


class StepUpdate(typing.NamedTuple):
    """An update op of tower 0, and what a step runs for it in the other towers.

    Attributes:
      update_op: the update op, a tensor or an operation.
      of_others: operations of the towers after the first: the writes of variables that every tower
        writes. Tower 0 alone makes the other writes of an update op, such as batch norm's.
    """
    update_op: typing.Any
    of_others: typing.List[tf.Operation]


def updates_of_step(towers: typing.Sequence[Tower], roles: Roles) -> typing.List[StepUpdate]:
    """Lists the update ops that a step runs with `update_ops='first'`.

    Args:
      towers: all towers; with accumulation a `Tower` for each micro-batch of each.
      roles: the roles of the variables.
    """
    state_of_others = [variable.op.name for variable in roles.own_variables(first=1)]
    written_by_every = set(state_of_others + list(metric_variables()) + roles.names(EVERY))
    of_others: typing.Dict[str, typing.List[tf.Operation]] = {}
    for tower in towers[1:]:
        for of_tower_0, update_op in zip(roles.update_ops_of_every_tower, tower.updates):
            operations = of_others.setdefault(operation_of(of_tower_0).name, [])
            operations += writes_for_update_ops(
                tower._replace(updates=[update_op]), written_by_every)
    return [StepUpdate(update_op, of_others.get(operation_of(update_op).name, []))
            for update_op in towers[0].updates]


def all_of_step(updates: typing.Iterable[StepUpdate]) -> list:
    """List of all that a step runs for its update ops: first tower 0's, then what the other towers
    run for them, update op by update op."""
    of_tower_0 = []
    of_others = []
    for each in updates:
        of_tower_0.append(each.update_op)
        of_others += each.of_others
    return of_tower_0 + of_others


def writes_for_update_ops(tower: Tower, names: typing.Iterable[str]) -> typing.List[tf.Operation]:
    """Finds the operations that a step has to run for the update ops of a tower after the first:
    the writes of variables that every tower writes. The first tower alone runs all other update
    ops, such as batch norm's.

    Args:
      tower: the tower.
      names: names of the variables that all towers write: counters, rows, each tower's own state.

    Returns:
      List of the operations to run, in the order of their names.
    """
    variables = set(names)
    if not variables or not tower.updates:
        return []
    operations = step_operations(tower.updates)
    writes = writes_to(writes_among(tower.own(operations)), variables)
    return fetches_for([write.op for write in writes], operations)
