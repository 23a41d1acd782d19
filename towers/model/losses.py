"""The loss that a tower differentiates.

It is the loss that the model function returns; with `regularization='add'` every registered loss
that is not in it yet is added. A term that is the same in every tower, such as the L2 loss of the
weights, counts once, since the towers' weights w_k add up to 1 (to N for `reduction='sum'`):

    loss of the build = sum_k w_k data_loss_k
"""

import collections

import tensorflow.compat.v1 as tf

from towers.errors import ModelFunctionError
from towers.graph import graph_walk
from towers.graph.graph_walk import is_computed_from
from towers.graph.op_types import PLACEHOLDERS
from towers.model.objectives import flat, map_shaped
from towers.nonfinite import checked_loss
from towers.placement.tower_device import TowerDevice, stages_of
from towers.placement.variable_device import only_device


class Losses(collections.namedtuple('Losses', 'data_loss description operations added')):
    """The loss that a tower differentiates, a scalar; or a dict by name, or None.

    Attributes:
      description: the plan's line about the regularization; None where none was found.
      operations: list of the operations that were made for it.
      added: list of the registered losses that were added to the model's own.
    """
    __slots__ = ()


def make_losses(recorded, request, number):
    """Makes the loss that a tower differentiates from the loss of its model: `Losses`."""
    loss = recorded.output.loss
    if loss is None:
        return Losses(None, None, [], [])
    _check_depends_on_shard(recorded)
    with graph_walk.Recording(tf.get_default_graph()) as made, \
            only_device(_device_of_loss(loss, request.split.parts[number].device)):
        inside, outside = _registered(recorded)
        adds = request.training.regularization == 'add'
        if adds and isinstance(loss, dict):
            raise ModelFunctionError(
                "regularization='add', and the model function returned several losses (%s): which "
                'of them it belongs to is not known here.' % ', '.join(loss))
        if adds and outside:
            loss = tf.add_n([loss] + [tf.cast(each, loss.dtype) for each in outside])
        if request.numerics.check_numerics:
            loss = map_shaped(
                lambda each: checked_loss(each, number, request.split.accumulate), loss)
    return Losses(loss, _described(len(inside), len(outside), adds), made.operations,
                  outside if adds else [])


def _check_depends_on_shard(recorded):
    """Refuses a model none of whose losses is computed from the shard: every tower would compute
    the same, or a whole batch of its own."""
    depends = graph_walk.reachable_from(recorded.sources, recorded.operations, control=True)
    losses = flat(recorded.output.loss)
    if any(loss.op.name in depends for loss in losses):
        return
    behind = graph_walk.ancestors(losses)
    own = [op for op in recorded.operations
           if op.name in behind and op.type in PLACEHOLDERS and op.outputs[0].shape.ndims != 0]
    why = 'not tensors from around it'
    if own:
        why = ('not a placeholder of its own (%s, of shape %s), from which every tower computes '
               'the whole fed batch: pass that in inputs' % (own[0].name, own[0].outputs[0].shape))
    raise ModelFunctionError(
        'the loss of tower 0 does not depend on its shard: the model function has to use the '
        'inputs that it is called with, %s.' % why)


def registered_losses():
    """The losses in `REGULARIZATION_LOSSES`, as tensors: a list.

    TF 2 registers objects, which make new operations at each use, so that it cannot be told whether
    a loss has one in it. In the collection they are exchanged for tensors, as TF 1 registers them.
    """
    listed = tf.get_collection_ref(tf.GraphKeys.REGULARIZATION_LOSSES)
    for place, loss in enumerate(listed):
        if loss is not None and not isinstance(loss, tf.Tensor):
            with tf.control_dependencies(None):
                listed[place] = tf.convert_to_tensor(loss)
    return [loss for loss in listed if loss is not None]


def _registered(recorded):
    """`(inside, outside)`: the losses that belong to the model, in its own loss or not."""
    registered = list(recorded.registered)
    of_weights, of_activations = recorded.keras_losses
    # A call of the recipe may register the losses of the call before anew, or not.
    before = [each for each in _of_before(recorded) if not is_computed_from(registered, each)]
    if recorded.imported is None:
        registered += before
    else:  # the loss of a finished model has imports of them
        of_weights = of_weights + before
    # A program may itself have registered a loss that its Keras layers hold.
    of_weights = [each for each in of_weights if not is_computed_from(registered, each)]
    losses, inside, outside = flat(recorded.output.loss), [], []
    known = graph_walk.ancestors(losses)
    for each in registered + of_activations:  # another loss may have the same formula
        (inside if each.op.name in known else outside).append(each)
    for each in of_weights:
        (inside if is_computed_from(losses, each) else outside).append(each)
    return inside, outside


def _of_before(recorded):
    """The losses from before the towers that regularize the model's variables; not losses of an
    earlier build's activations."""
    names = {variable.op.name for variable in recorded.variables}
    return [loss for loss in recorded.registered_before
            if graph_walk.ancestors([loss]) & names and not _depends_on_a_batch(loss)]


def _depends_on_a_batch(loss):
    """Whether a loss needs a placeholder or an iterator that is no scalar, such as an L2 factor."""
    sources = map(loss.graph.get_operation_by_name, graph_walk.ancestors([loss]))
    return any((op.type in PLACEHOLDERS or op.type == 'IteratorGetNext')
               and any(output.shape.ndims != 0 for output in op.outputs) for op in sources)


def _device_of_loss(loss, device):
    """The device for operations on the loss: the loss's own in a tower of several stages."""
    there, stages = flat(loss)[0].op.device, stages_of(device)
    return TowerDevice(there, stages) if there in stages else TowerDevice(device)


def _described(num_inside, num_outside, adds):
    outside = '%d registered loss%s' % (num_outside, '' if num_outside == 1 else 'es')
    if num_outside and not adds:
        return outside + " not in the model's loss: regularization='add' adds what is missing"
    facts = [outside + ' added'] * bool(num_outside)
    facts += ["in the model's own loss"] * bool(num_inside)
    return ' and '.join(facts) + ', counted once' if facts else None
