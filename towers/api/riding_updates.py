"""Update ops, such as batch norm's: which of them run with a step, and on which train op they ride.

Its test is tests/api/test_train_ops.py.
"""

import collections
import typing

import tensorflow.compat.v1 as tf

from towers.copies.tower_set import TowerSet
from towers.gradients.tower import Tower
from towers.graph import graph_walk
from towers.graph.variable_access import metric_variables
from towers.roles.ownership import EVERY
from towers.roles.write_order import updates_that_write


def updates_of_step(tower_set: TowerSet, updates_before: list) -> list:
    """The updates that run with a step: those of one tower or all, and those from before the build.
    """
    towers = tower_set.towers
    others = list(updates_before)
    if tower_set.request.training.update_ops == 'first':
        own_state = [variable.op.name for variable in tower_set.roles.own_variables(1)]
        written_by_all = own_state + list(metric_variables()) + tower_set.roles.names(EVERY)
        others += updates_that_write(towers, written_by_all)
        towers = towers[:1]
    updates: list = []
    for tower in towers:
        updates += tower.updates
    return updates + others


def riding_updates(updates: list, losses: typing.Dict[str, tf.Tensor],
                   towers: typing.Sequence[Tower]) -> typing.Dict[str, list]:
    """{name of a loss: the updates that ride on its train op}.

    An update rides on each loss whose computation has all operations of towers that the update
    needs; where there is no such loss, on each loss whose computation has some of them.
    """
    computed_for = collections.OrderedDict()  # {name of a loss: names of the towers' operations}
    for name, loss in losses.items():
        computed_for[name] = {op for op in graph_walk.ancestors([loss])
                              if any(tower.has(op) for tower in towers)}
    computed_for_any = set().union(*computed_for.values())
    riding: typing.Dict[str, list] = collections.OrderedDict((name, []) for name in losses)
    for update in updates:
        needed = graph_walk.names_of(graph_walk.step_operations([update])) & computed_for_any
        with_all = [name for name, computed in computed_for.items() if needed <= computed]
        with_some = [name for name, computed in computed_for.items() if needed & computed]
        for name in with_all or with_some:
            riding[name].append(update)
    return riding
