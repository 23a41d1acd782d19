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
from towers.placement.variable_device import only_device
from towers.tower.objectives import flat, with_parts
from towers.tower.regularization import split_loss


class Losses(collections.namedtuple('Losses', [
        'data_loss', 'regularization_loss', 'shared', 'is_once', 'description'])):
    """The parts of a build's loss.

    Attributes:
      data_loss: scalar that tower 0 differentiates; with several losses a dict of scalars by name.
      regularization_loss: scalar, computed once for all towers; or None.
      shared: names of the operations of registered losses that are the same in every tower.
      is_once: whether all regularization that was found is computed once a step.
      description: the plan's line about the regularization; None where none was found.
    """
    __slots__ = ()


def make_losses(recorded, registered, adds_registered, takes_out, placement):
    """Splits the loss that the model function returned: `Losses`.

    Args:
      recorded: `Recorded`, whose output has a loss.
      registered: `RegisteredLosses`.
      adds_registered: whether registered losses are added.
      takes_out: whether a term may be computed outside of the towers at all: not if the optimizer's
        `compute_gradients` gives something else than the plain gradient.
      placement: `Placement`, which says where `regularization_loss` is computed.

    Raises:
      ModelFunctionError: the loss is the same for every shard.
    """
    loss, varying = recorded.output.loss, recorded.varying
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
    inside, of_keras, keras_inside = _inside(recorded, registered, losses)
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
        with only_device(placement.of_weights), tf.name_scope('regularization'):
            total = tf.add_n(parts)
    is_found = None if inside is None else bool(inside or keras_inside)
    is_once = (total is not None and (not adds_registered or len(once) == len(outside))
               and not (is_found and own is None))
    return Losses(data, total, frozenset(each.op.name for each in registered.invariant(varying)),
                  is_once, _described(len(outside), adds_registered, is_found, own is not None,
                                      is_once))


def no_losses(registered, varying):
    """The `Losses` of a model function that returned no loss."""
    return Losses(None, None, frozenset(each.op.name for each in registered.invariant(varying)),
                  False, None)


def _inside(recorded, registered, losses):
    """`(inside, of_keras, keras_inside)`: registered losses in the model's own loss (None: not
    known); the losses of Keras layers; and those of them that are in the model's own loss."""
    loss = flat(recorded.output.loss)
    parts = [registered.parts_of(each, losses) for each in loss]
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
