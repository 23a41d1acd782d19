"""Update ops, such as batch norm's: which of them run with a step, and on which train op they ride.

Its test is tests/api/test_train_ops.py.

Words of other modules used here: a `StepUpdate` is an update op of tower 0, with what the other
towers run for it (`roles/step_updates`).
"""

import collections
import typing

import tensorflow.compat.v1 as tf

from towers.copies.tower_set import TowerSet
from towers.gradients.tower import Tower
from towers.graph import graph_walk
from towers.roles import step_updates
from towers.roles.step_updates import StepUpdate, all_of_step


def updates_of_step(tower_set: TowerSet, updates_before: list) -> typing.List[StepUpdate]:
    """The update ops that run with a step: of the towers, and the `UPDATE_OPS` from before the
    build.

    It is for `update_ops` of `'first'` and `'all'`; with `'none'` no update op runs.

    Args:
      tower_set: the towers.
      updates_before: the `UPDATE_OPS` from before the build.
    """
    towers = tower_set.towers
    updates: typing.List[StepUpdate] = []
    without_others: list = []  # update ops for which the other towers run nothing
    if tower_set.request.training.update_ops == 'all':
        for tower in towers:
            without_others += tower.updates
    else:
        updates = step_updates.updates_of_step(towers, tower_set.roles)
    without_others += updates_before
    return updates + [StepUpdate(update_op, of_others=[]) for update_op in without_others]


def riding_updates(updates: typing.Iterable[StepUpdate], losses: typing.Dict[str, tf.Tensor],
                   towers: typing.Sequence[Tower]) -> typing.Dict[str, list]:
    """{name of a loss: the update ops that ride on its train op}.

    The update ops of a batch norm of the critic, say, ride on the critic's loss. They also ride on
    the generator's loss, if this loss is computed from the same call of the critic.

    An update op *needs* the operations of towers that it is computed from, and that some loss is
    also computed from. It rides on each loss whose computation has all the operations that it
    needs; where no loss has all of them, on each loss whose computation has some. An update op that
    needs no operation, such as a counter's, rides on every loss. What the other towers run for an
    update op rides where it rides: also where it is a group, of which they run single writes.

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
    for each in updates:
        # An operation that no loss is computed from, such as the assignment of the update op
        # itself, does not tell with which loss it belongs.
        run_by_update_op = graph_walk.names_of(graph_walk.step_operations([each.update_op]))
        needed = run_by_update_op & computed_for_any
        with_all = [name for name in losses if needed <= computed_for[name]]
        with_some = [name for name in losses if needed & computed_for[name]]
        for name in with_all or with_some:
            riding[name] += all_of_step([each])
    return riding


def _operations_of_towers(loss: tf.Tensor, towers: typing.Sequence[Tower]) -> typing.Set[str]:
    """The names of the towers' operations that a loss is computed from."""
    names = set()
    for name in graph_walk.ancestors([loss]):
        if any(tower.has(name) for tower in towers):
            names.add(name)
    return names
