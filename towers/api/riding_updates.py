"""Update ops, such as batch norm's: which of them run with a step, and on which train op they ride.

Its test is tests/api/test_train_ops.py.
"""

import collections
import typing

import tensorflow.compat.v1 as tf

from towers.copies.tower_set import TowerSet
from towers.gradients.tower import Tower
from towers.graph import graph_walk
from towers.roles.write_order import updates_of_other_towers


def updates_of_step(tower_set: TowerSet, updates_before: list) -> list:
    """The updates that run with a step: of the towers, and the `UPDATE_OPS` from before the build.

    It is for `update_ops` of `'first'` and `'all'`; with `'none'` no update runs.

    Args:
      tower_set: the towers.
      updates_before: the `UPDATE_OPS` from before the build.
    """
    towers = tower_set.towers
    if tower_set.request.training.update_ops == 'all':
        updates: list = []
        for tower in towers:
            updates += tower.updates
        return updates + list(updates_before)
    # With 'first', a step runs all updates of tower 0, and from the other towers only the updates
    # of variables that every tower writes.
    of_other_towers = updates_of_other_towers(towers, tower_set.roles)
    return list(towers[0].updates) + list(updates_before) + of_other_towers


def riding_updates(updates: list, losses: typing.Dict[str, tf.Tensor],
                   towers: typing.Sequence[Tower]) -> typing.Dict[str, list]:
    """{name of a loss: the updates that ride on its train op}.

    The updates of a batch norm of the critic, say, ride on the critic's loss. They also ride on the
    generator's loss, if this loss is computed from the same call of the critic.

    An update *needs* the operations of towers that it is computed from, and that some loss is also
    computed from. The update rides on each loss whose computation has all the operations that it
    needs; where no loss has all of them, on each loss whose computation has some. An update that
    needs no operation, such as a counter's, rides on every loss.

    Args:
      updates: the update ops of a step.
      losses: {name: loss over the batch}.
      towers: the towers.
    """
    computed_for: typing.Dict[str, typing.Set[str]] = collections.OrderedDict()
    riding: typing.Dict[str, list] = collections.OrderedDict()
    for name, loss in losses.items():
        computed_for[name] = _operations_of_towers(loss, towers)
        riding[name] = []
    computed_for_any = set().union(*computed_for.values())
    for update in updates:
        # An operation that no loss is computed from, such as the update's own assignment, does not
        # tell with which loss the update belongs.
        needed = graph_walk.names_of(graph_walk.step_operations([update])) & computed_for_any
        with_all = [name for name in losses if needed <= computed_for[name]]
        with_some = [name for name in losses if needed & computed_for[name]]
        for name in with_all or with_some:
            riding[name].append(update)
    return riding


def _operations_of_towers(loss: tf.Tensor, towers: typing.Sequence[Tower]) -> typing.Set[str]:
    """The names of the towers' operations that a loss is computed from."""
    names = set()
    for name in graph_walk.ancestors([loss]):
        if any(tower.has(name) for tower in towers):
            names.add(name)
    return names
