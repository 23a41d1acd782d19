"""The loss that a tower differentiates, and the part of it that is computed once for all towers.

The loss is what the model function returns; with `regularization='add'` every registered loss
that is not in it yet is added. With the weight w_k of tower k:

    loss of the build = sum_k w_k data_loss_k + regularization_loss
"""

import collections

import tensorflow.compat.v1 as tf

from towers.errors import ModelFunctionError
from towers.graph import graph_walk
from towers.graph.same_value import is_computed_from
from towers.nonfinite import checked_loss
from towers.placement.tower_device import TowerDevice, stages_of
from towers.placement.variable_device import only_device
from towers.tower.gradients import takes_plain_gradients
from towers.tower.objectives import flat, map_shaped, with_parts
from towers.tower.regularization import split_loss


class Losses(collections.namedtuple('Losses', [
        'data_loss', 'regularization_loss', 'shared', 'is_once', 'description', 'operations'])):
    """The parts of a build's loss.

    Attributes:
      data_loss: scalar that tower 0 differentiates; with several losses a dict of scalars by name.
      regularization_loss: scalar, computed once for all towers; or None.
      shared: names of the operations of registered losses that are the same in every tower.
      is_once: whether all regularization that was found is computed once a step.
      description: the plan's line about the regularization; None where none was found.
      operations: list of the operations that were made for it.
    """
    __slots__ = ()


def make_losses(recorded, request, number):
    """Splits the loss that the model function returned: `Losses`.

    Args:
      recorded: `Recorded`.
      request: `Request`.
      number: the tower's number.

    Raises:
      ModelFunctionError: the loss is the same for every shard.
    """
    loss = recorded.output.loss
    if loss is None:
        return Losses(None, None, _shared(recorded), False, None, [])
    with graph_walk.Recording(tf.get_default_graph()) as made, \
            only_device(_device_of_loss(loss, request.parts[number].device)):
        losses = _split(recorded, request)
        if request.numerics.check_numerics:
            losses = losses._replace(data_loss=map_shaped(
                lambda each: checked_loss(each, number, request.accumulate), losses.data_loss))
    return losses._replace(operations=made.operations)


def _split(recorded, request):
    loss, varying, registered = recorded.output.loss, recorded.varying, recorded.registered
    adds_registered = request.regularization == 'add'
    # The recipe leaves regularization in each tower's loss: it counts once, as weights add up.
    takes_out = request.copies == 'clone' and takes_plain_gradients(request.objectives)
    for name, each in with_parts('loss', loss):
        if each.op.name not in varying:
            raise ModelFunctionError(
                'the %s of tower 0 does not depend on its shard: the model function has to '
                'use the inputs that it is called with, not tensors from around it.' % name)
    if adds_registered and isinstance(loss, dict):
        raise ModelFunctionError(
            "regularization='add', and the model function returned several losses (%s): which "
            'of them it belongs to is not known here.' % ', '.join(loss))
    losses = registered.of_before(recorded.variables) + registered.made
    inside, of_keras, keras_inside = _inside(recorded, losses)
    taken = (inside or []) + keras_inside
    outside = [each for each in losses + of_keras if not any(each is other for other in taken)]
    own, data = None, loss
    if takes_out and not isinstance(loss, dict):
        data, own = split_loss(loss, varying)
    once = [each for each in outside if takes_out and each.op.name not in varying]
    if adds_registered:
        added = [each for each in outside if not any(each is other for other in once)]
        data = tf.add_n([data] + _cast(added, data.dtype)) if added else data
    else:
        once = []
    parts = ([] if own is None else [own]) + _cast(once, flat(loss)[0].dtype)
    total = None
    if parts:
        with only_device(request.placement.of_weights), tf.name_scope('regularization'):
            total = tf.add_n(parts)
    is_found = None if inside is None else bool(inside or keras_inside)
    is_once = (total is not None and (not adds_registered or len(once) == len(outside))
               and not (is_found and own is None))
    return Losses(data, total, _shared(recorded),
                  is_once, _described(len(outside), adds_registered, is_found, own is not None,
                                      is_once), ())


def _shared(recorded):
    return frozenset(loss.op.name for loss in recorded.registered.made
                     if loss.op.name not in recorded.varying)


def _device_of_loss(loss, device):
    """The device for operations on the loss: the loss's own in a tower of several stages."""
    there = flat(loss)[0].op.device
    return TowerDevice(there, stages_of(device)) if there in stages_of(device) else (
        TowerDevice(device))


def _inside(recorded, losses):
    """`(inside, of_keras, keras_inside)`: registered losses in the model's own loss (None: not
    known); the losses of Keras layers; and those of them that are in the model's own loss."""
    loss = flat(recorded.output.loss)
    parts = [recorded.registered.parts_of(each, losses) for each in loss]
    inside = None if None in parts else [part for some in parts for part in some]
    of_weights, of_activations = recorded.keras_losses
    # A program may itself have registered a loss that its Keras layers hold.
    of_weights = [each for each in of_weights if not is_computed_from(losses, each)]
    known = graph_walk.ancestors(loss)
    return inside, of_weights + of_activations, [
        each for each in of_weights if is_computed_from(loss, each)] + [
            each for each in of_activations if each.op.name in known]


def _described(num_outside, adds_registered, is_inside, is_taken_out, is_once):
    facts = []
    if adds_registered and num_outside:
        facts.append('%s added' % _count(num_outside))
    elif num_outside and is_inside is not None:
        return "%s %s not part of the loss: regularization='add' adds %s" % (
            _count(num_outside), 'is' if num_outside == 1 else 'are',
            'it' if num_outside == 1 else 'them')
    if is_taken_out or is_inside:
        facts.append("in the model's own loss")
    if not facts:
        return None
    return ' and '.join(facts) + ', counted once' + (', computed once a step' if is_once else '')


def _cast(losses, dtype):
    return [tf.cast(loss, dtype) for loss in losses]


def _count(number):
    return '%d registered loss%s' % (number, '' if number == 1 else 'es')
