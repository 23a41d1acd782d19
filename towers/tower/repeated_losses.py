"""Removes registered losses that a later tower has in addition to those of the first tower.

A layer of slim or tf.layers registers the loss of a variable if the variable is new: on one device,
in the first of the calls that share the variable. A replica is in no list of variables, so a layer
takes it for new in each call, and in a build that reuses another build's variables. A loss that the
model function registers by hand, under a name like a layer's, is registered in each call, and is
shown to later calls as well. These losses are left out here, also of the sums that the model's own
loss makes of them.
"""

import collections

import tensorflow.compat.v1 as tf

from towers import compat
from towers.graph import graph_walk
from towers.graph.variable_access import VARIABLE_OPS
from towers.placement.variable_device import only_device

_SUMS = frozenset(['Add', 'AddV2', 'AddN', 'AccumulateNV2'])


def repeated_losses(first, shown, present, of_layers, relative_names, name_of_original=None):
    """Finds the losses of a later tower that the first tower's registered losses already cover.

    Args:
      first: list of the losses that the first tower has registered.
      shown: list of the first tower's losses that the later tower was shown.
      present: list of the losses that the later tower sees after its call.
      of_layers: function from a loss to whether a layer may have registered it.
      relative_names: two functions, from a loss of the first tower and from a loss of the later
        tower to its name within that tower.
      name_of_original: function from a replica's name to its variable's; None without replicas.

    Returns:
      `(by_hand, of_replicas)`: losses of `shown` that the call has registered itself; and the
      losses of replicas in excess of the first tower's losses of the same variables.
    """
    is_shown = set(map(id, shown))
    own = [loss for loss in present if id(loss) not in is_shown]
    names = {relative_names[1](loss) for loss in own}
    by_hand = [loss for loss in shown if of_layers(loss) and relative_names[0](loss) in names]
    if name_of_original is None:
        return by_hand, []
    is_shown -= set(map(id, by_hand))
    left = collections.Counter(_of_variables(loss, name_of_original) for loss in first
                               if of_layers(loss) and id(loss) not in is_shown)
    of_replicas = []
    for loss in own:
        if of_layers(loss):
            key = _of_variables(loss, name_of_original)
            left[key] -= 1
            if left[key] < 0:
                of_replicas.append(loss)
    return by_hand, of_replicas


def left_out_of_sums(losses, loss, made, root):
    """Removes registered losses from a tower's loss.

    Args:
      losses: list of scalars.
      loss: list of scalars: what the model function returned.
      made: the operations that the tower's call has made.
      root: the tower's name scope.

    Returns:
      Whether they were removed: only where nothing but sums of scalars takes them.
    """
    made = {op.name for op in made}
    inside = graph_walk.ancestors(loss)
    takers = []
    for each in losses:
        if any(each is part for part in loss):
            return False
        for op in each.consumers():
            if op.name not in made or op.name not in inside:
                continue
            further = [taker for taker in op.outputs[0].consumers() if taker.name in inside]
            is_sum = op.type in _SUMS or op.type == 'Pack' and further and all(
                taker.type == 'Sum' for taker in further)
            if not is_sum or compat.in_control_flow(op) or any(
                    other.shape.ndims != 0 for other in op.inputs):
                return False
            takers += [(op, position) for position, other in enumerate(op.inputs)
                       if other.name == each.name]
    for op, position in takers:
        with tf.control_dependencies(None), tf.name_scope(root), only_device(op.device or None):
            compat.replace_input(op, position, tf.zeros([], op.inputs[position].dtype))
    return True


def _of_variables(loss, name_of_original):
    graph = loss.graph
    return frozenset(name_of_original(name) for name in graph_walk.ancestors([loss])
                     if graph.get_operation_by_name(name).type in VARIABLE_OPS)
