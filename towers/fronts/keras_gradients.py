"""Puts the gradient operations of several towers, made by one `tf.gradients`, on their devices."""

import re

import tensorflow.compat.v1 as tf

from towers import compat

# A Keras optimizer makes gradients in its own scope `gradients`; TensorFlow makes another in it.
_GRADIENTS = re.compile(r'(?:^|/)(?:gradients(?:_\d+)?/)+')


class GradientDevices:
    """A device function, for `tf.device` around code that takes gradients through several towers.

    Keras' optimizers take the gradient of one loss through all towers of a model, without a device
    or a way to name one. `tf.gradients` names the gradient operations of `<scope>/op` by
    `gradients/<scope>/op_grad/`, and the functions of the gradient of a loop or a branch by the
    scope with `_` for `/`: so the tower's scope in the name tells the device. Gradient operations
    without such a name (zeros for a branch not taken) go to the device of the operations that they
    read; those that read several towers (the sums for a weight) go to the weights' device.

    An operation that has a device already, and any other operation, is left unchanged.
    """

    def __init__(self, builds, merged_on, weights):
        """
        Args:
          builds: list of `BuiltTowers` that the gradient may go through.
          merged_on: the device where batches are cut and outputs merged.
          weights: the variables that the gradient is taken of.
        """
        self._scopes = []
        for built in builds:
            towers = [(tower.name_scope, tower.device) for tower in built.towers]
            around = towers[0][0].rstrip('/').rpartition('/')[0]
            self._scopes += towers + [(around + '/', merged_on)]
        self._of_towers = {device for _, device in self._scopes}
        of_weights = {weight.device for weight in weights}
        self._of_weights = of_weights.pop() if len(of_weights) == 1 else ''

    def __call__(self, op):
        if op.device:
            return op.device
        place = _GRADIENTS.search(op.name)
        if place is not None:
            inside = op.name[place.end():]
            for scope, device in self._scopes:
                if inside.startswith(scope):
                    return device
        function = getattr(op.graph, 'name', None)  # of the body of a loop or a branch
        if isinstance(function, str):
            for scope, device in self._scopes:
                if '_' + scope.replace('/', '_') in '_' + function:
                    return device
        if place is not None and not _of_loop(op):
            read = {tensor.device for tensor in op.inputs} & self._of_towers
            if read:
                return read.pop() if len(read) == 1 else self._of_weights
        return op.device

    def scope(self):
        """The `tf.device` scope."""
        return tf.device(self)


def _of_loop(op):
    """Whether an operation is in a TF1 loop or leads into one.

    The counters of a loop have to be on one device: otherwise the loops of two towers wait for each
    other for ever.
    """
    return op.type == 'Enter' or any(compat.in_control_flow(tensor.op) for tensor in op.inputs)
