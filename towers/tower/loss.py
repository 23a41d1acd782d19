"""The loss of each tower, and the part of it that is computed once for all of them."""

import tensorflow.compat.v1 as tf

from towers.errors import ModelFunctionError
from towers.graph import graph_walk
from towers.graph.invariance import varying_operations
from towers.graph.same_value import is_computed_from
from towers.placement.variable_device import only_device
from towers.tower.objectives import flat, with_parts
from towers.tower.regularization import RegisteredLosses, split_loss


class TowerLosses:
    """Makes the loss that each tower differentiates.

    The loss is what the model function returns; with `regularization='add'` every registered loss
    that is not in it yet is added. For tower k of weight w_k:

        loss of the build = sum_k w_k data_loss_k + regularization_loss

    Attributes:
      registered: `RegisteredLosses`.
      regularization_loss: scalar or None, known after `finish`.
    """

    def __init__(self, graph, placement, adds_registered, takes_out):
        """
        Args:
          graph: the `tf.Graph`.
          placement: `Placement`, which says where `regularization_loss` is computed.
          adds_registered: whether registered losses are added.
          takes_out: whether a term may be computed outside of the towers at all: not if the
            optimizer's `compute_gradients` gives something else than the plain gradient.
        """
        self.registered = RegisteredLosses(graph)
        self.regularization_loss = None
        self._placement = placement
        self._adds_registered = adds_registered
        self._takes_out = takes_out
        self._own = None      # the part that is taken out of the first tower's loss
        self._added = []      # registered losses, computed once instead of in every tower
        self._num_added = 0
        self._inside = None   # registered losses in the model's own loss; None: not known
        self._num_outside = 0
        self._needs_registered = False  # whether the model's own loss has registered ones in it
        self._calls = 0
        self._root = ''  # the first tower's name scope
        self._varying = set()  # names of operations not proven to be the same in every tower

    def note_call(self, index, made, inputs, loss, root, replicated=(), name_of_original=None):
        """Call this when the model function's call for a tower has ended.

        Args:
          index: the tower's number.
          made: the operations that the call made.
          inputs: the operations of the tower's shard.
          loss: scalar, as the model function returned it; a dict of several; or None.
          root: the tower's name scope.
          replicated: the variables that later towers have replicas of.
          name_of_original: function from a replica's name to its variable's; None without replicas.

        Raises:
          ModelFunctionError: the call registered other losses than the first call.
        """
        self._calls += 1
        self._varying |= varying_operations(made, inputs)
        if index == 0:
            self._root = root
            self.registered.note_first_tower(
                self._varying, graph_walk.reachable_from(inputs, made, control=True), replicated)
            return
        if self.registered.missing() < 0:
            self.registered.leave_out_repeated(flat(loss) if loss is not None else [], made,
                                               (self._root, root), name_of_original)
        missing = self.registered.missing()
        if missing and (self._adds_registered or self._needs_registered):
            raise ModelFunctionError(
                'the call of the model function for tower %d leaves %d %s registered losses '
                '(tf.GraphKeys.REGULARIZATION_LOSSES) than the first one did, so its loss is '
                "another. Register them in every call; or pass copies='clone' (and no "
                "VariablePlacement('replicated')), which calls it once."
                % (index, abs(missing), 'fewer' if missing > 0 else 'more'))

    def data_loss(self, index, loss, keras_losses, variables):
        """The loss that a tower differentiates.

        Args:
          index: the tower's number.
          loss: scalar, as the model function returned it; or a dict of several.
          keras_losses: `(of weights, of activations)`: lists of scalars, the losses of the Keras
            layers that the call has called. Keras makes losses of weights anew at each request;
            they are given for the first tower at least, since the plan names them.
          variables: the variables of the model.

        Returns:
          A scalar of the same dtype; with several losses a dict of scalars.

        Raises:
          ModelFunctionError: the loss is the same for every shard.
        """
        for name, each in with_parts('loss', loss):
            if each.op.name not in self._varying:
                raise ModelFunctionError(
                    'the %s of tower %d does not depend on its shard: the model function has to '
                    'use the inputs that it is called with, not tensors from around it.' % (
                        name, index))
        losses = self.registered.of_before(variables) + self.registered.of_tower()
        inside = self._inside_of(loss, losses)
        if index == 0:
            self._needs_registered = inside is None or bool(inside)
        of_weights, of_activations = keras_losses
        # A program may itself have registered a loss that its Keras layers hold.
        of_weights = [each for each in of_weights if not is_computed_from(losses, each)]
        losses += of_weights + of_activations
        known = graph_walk.ancestors(flat(loss))
        keras_inside = [each for each in of_weights if is_computed_from(flat(loss), each)] + [
            each for each in of_activations if each.op.name in known]
        if inside is not None:
            inside = inside + keras_inside
        outside = [each for each in losses
                   if not any(each is other for other in (inside or []) + keras_inside)]
        if index == 0:
            self._inside = inside
            self._num_outside = len(outside)
        data = loss
        if index == 0 and self._takes_out and not isinstance(loss, dict):
            data, self._own = split_loss(loss, self._varying)
        if not self._adds_registered:
            return data
        if isinstance(loss, dict):
            raise ModelFunctionError(
                "regularization='add', and the model function returned several losses (%s): which "
                'of them it belongs to is not known here.' % ', '.join(loss))
        once = [each for each in outside
                if self._takes_out and each.op.name not in self._varying]
        if index == 0:
            self._added, self._num_added = once, len(outside)
        own = [each for each in outside if not any(each is other for other in once)]
        return tf.add_n([data] + _cast(own, data.dtype)) if own else data

    def _inside_of(self, loss, losses):
        """The registered losses among `losses` that a loss is computed from; None: not known."""
        inside = [self.registered.parts_of(each, losses) for each in flat(loss)]
        return None if None in inside else [part for parts in inside for part in parts]

    def finish(self, weight, dtype):
        """Adds up the regularization that is computed once; call this when all towers are built.

        Args:
          weight: the first tower's weight in the mean: a float or a scalar. Where the model
            function was called for each tower, each tower's loss has the model's own
            regularization in it, so that the first tower's part counts by its weight only.
          dtype: the dtype of the loss.
        """
        parts = _cast(self._added, dtype)
        if self._own is not None:
            own = self._own
            if self._calls > 1:
                own = own * (weight if isinstance(weight, float) else tf.cast(weight, dtype))
            parts.insert(0, own)
        if parts:
            with only_device(self._placement.of_weights), tf.name_scope('regularization'):
                self.regularization_loss = tf.add_n(parts)

    @property
    def is_once(self):
        """Whether all regularization that was found is computed once a step."""
        return (self.regularization_loss is not None and len(self._added) == self._num_added
                and not (self._inside and self._own is None) and self._calls == 1)

    def describe(self):
        """The plan's line about the regularization; None where none was found."""
        facts = []
        if self._num_added:
            facts.append('%s added' % _count(self._num_added))
        elif self._num_outside and self._inside is not None:
            return "%s %s not part of the loss: regularization='add' adds %s" % (
                _count(self._num_outside), 'is' if self._num_outside == 1 else 'are',
                'it' if self._num_outside == 1 else 'them')
        if self._own is not None or self._inside:
            facts.append("in the model's own loss")
        if not facts:
            return None
        return ' and '.join(facts) + ', counted once' + (
            ', computed once a step' if self.is_once else '')


def _cast(losses, dtype):
    return [tf.cast(loss, dtype) for loss in losses]


def _count(number):
    return '%d registered loss%s' % (number, '' if number == 1 else 'es')
