"""Tensors that a closure takes from the model function into the update.

A model function may leave a tensor where `transform_gradients`, or an optimizer, finds it: in a
list, or as an attribute of the model. It is then of one tower, the first or the last one, by how
the towers are made. In place of a loss the update takes the mean over the batch. Any other tensor
that depends on a tower's examples is refused; one that depends on none is the same in all towers.
"""

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import GradientError
from towers.graph import graph_walk
from towers.graph.op_types import VARIABLE_OPS
from towers.graph.variable_access import Writes
from towers.tower.optimizer_methods import computes_with


def losses_by_tensor(towers):
    """{name of the tensor of a tower's loss: name of the loss, None where there is only one}."""
    return {loss.name: name for tower in towers for name, loss in (
        tower.loss.items() if isinstance(tower.loss, dict) else [(None, tower.loss)])
            if isinstance(loss, tf.Tensor)}


def take_losses_of_batch(made, losses, whole_loss):
    """Gives operations `made` the loss of the batch, which `whole_loss` makes for a loss's name,
    where they take the loss of a tower; `losses` are these names by those of the tensors."""
    for op in made:
        for position, tensor in enumerate(op.inputs):
            if tensor.name in losses:
                compat.replace_input(op, position, whole_loss(losses[tensor.name]))


def check_of_no_tower(made, fetches, known, losses, recorded, own_state):
    """Refuses operations `made` for `fetches` that take what depends on one tower's examples.

    That is what depends on its shard, or on what the model function draws, writes, or reads of
    `own_state`. They may take `known` ones, the gradients and the first tower's updates, and wait
    for the towers' `losses`.
    """
    called = {op.name for op in recorded.operations if op.type not in VARIABLE_OPS}.union(
        variable.op.name for variable in own_state).difference(
            getattr(each, 'op', each).name for each in known)
    losses = {loss.op.name for loss in losses}
    taken = [(op, each) for op in made for each in list(op.inputs) + list(op.control_inputs)
             if getattr(each, 'op', each).name in called and each.name not in losses]
    if not taken:
        return
    writes, step = Writes(made[0].graph), {op.name for op in graph_walk.step_operations(fetches)}
    of_one_tower = graph_walk.reachable_from(
        list(recorded.sources) + [variable.op for variable in own_state]
        + [op for op in recorded.operations if graph_walk.is_random(op) or (
            op.name not in recorded.owned and writes.of(op))],
        recorded.operations, control=True)
    for op, each in taken:
        if op.name in step and getattr(each, 'op', each).name in of_one_tower:
            raise GradientError(
                'transform_gradients, or the optimizer, takes %s of the model function, which '
                "depends on the examples of one tower: take the loss, which is the batch's, or let "
                'UPDATE_OPS write it to a variable, and read the variable. Gradients of gradients '
                'take such tensors, too.' % each.name)


def check_of_no_worker(made, fetches, losses, combined):
    """Refuses an update that computes with the losses over this machine's batch; `combined` are the
    gradients over all machines.
    """
    names, writes = {op.name for op in made}, Writes(losses[0].graph)
    trained = {variable.op.name for variable in tf.trainable_variables()}
    updates = [each for each in fetches if not isinstance(each, tf.Tensor)]
    values = [each for each in fetches if isinstance(each, tf.Tensor)] + [
        tensor for op in graph_walk.step_operations(updates)
        if op.name in names and trained.intersection(writes.of(op)) for tensor in op.inputs]
    if any(computes_with(values, loss, combined) for loss in losses):
        raise GradientError(
            "transform_gradients, or the optimizer, computes with the loss of one worker's "
            'examples: let UPDATE_OPS write it to a variable, and read the variable.')
