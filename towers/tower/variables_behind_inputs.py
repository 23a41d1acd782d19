"""Trained variables behind the batch: an embedding that was looked up before the build, say.

A tower's gradient ends at its shard. A variable that the batch itself is computed from gets its
gradient once, from those of all towers with respect to their shards:

    dL/dv = sum over the inputs x of (dL/dx)^T dx/dv,   dL/dx = the towers' dL_k/dx_k, in order
"""

import tensorflow.compat.v1 as tf

from towers import compat
from towers.errors import InputError
from towers.graph import graph_walk
from towers.placement.variable_device import only_device
from towers.tower.batch_inputs import with_sparse_tensors


def _trained_behind(leaf):
    """Names of the trainable variables that a leaf of a nest has a gradient to: a sorted list."""
    if not isinstance(leaf, (tf.Tensor,) + compat.VARIABLE_TYPES) or not leaf.dtype.is_floating:
        return []
    return sorted({variable.op.name for variable in tf.trainable_variables()} &
                  graph_walk.ancestors([leaf], ends=('StopGradient',)))


def check_nothing_is_trained_behind(inputs):
    """Raises `InputError` for inputs that have a gradient to a trainable variable.

    Args:
      inputs: a nest of tensors, arrays and variables; no operation is made.
    """
    for leaf in tf.nest.flatten(with_sparse_tensors(inputs), expand_composites=True):
        for name in _trained_behind(leaf):
            raise InputError(
                'the input %s is computed from the trainable variable %s, and the gradient of a '
                'tower ends at its inputs: compute it in the model function, or pass its '
                'tf.stop_gradient.' % (leaf.name, name))


class VariablesBehindInputs:
    """The trainable variables that the inputs of a build are computed from.

    Attributes:
      inputs: the nest of inputs, behind which no gradient is taken.
    """

    def __init__(self, inputs, trains):
        """
        Args:
          inputs: the inputs of `build_towers`.
          trains: whether there is an optimizer.

        Raises:
          InputError: a sparse tensor is computed from a trainable variable.
        """
        leaves = tf.nest.flatten(inputs)
        if trains:
            check_nothing_is_trained_behind(
                [leaf for leaf in leaves if isinstance(leaf, tf.SparseTensor)])
        behind = [_trained_behind(leaf) if trains else () for leaf in leaves]
        leaves = [tf.convert_to_tensor(leaf) if names else leaf
                  for leaf, names in zip(leaves, behind)]
        self._of_leaves = [leaf if names else None for leaf, names in zip(leaves, behind)]
        names = set().union(*behind)
        self._variables = [each for each in tf.trainable_variables() if each.op.name in names]
        self.inputs = inputs if not names else tf.nest.pack_sequence_as(inputs, [
            tf.stop_gradient(leaf) if each else leaf for leaf, each in zip(leaves, behind)])

    def shard_tensors(self, shard):
        """The tensors of a shard behind which trained variables are: a list."""
        return [tensor for tensor, leaf in zip(tf.nest.flatten(shard), self._of_leaves)
                if leaf is not None]

    def gradients(self, of_shards, sizes, trained):
        """`[[(gradient, variable)]]`, as `combine` takes further gradients; [] without any.

        Args:
          of_shards: for each shard, the gradients with respect to `shard_tensors`; None for an
            input that the loss does not depend on.
          sizes: examples in each shard; padding behind them gets no gradient.
          trained: list of the variables that are trained.
        """
        trained = {variable.op.name for variable in trained}
        variables = [each for each in self._variables if each.op.name in trained]
        if not variables:
            return []
        leaves = [leaf for leaf in self._of_leaves if leaf is not None]
        ys, grads = [], []
        with tf.name_scope('behind_batch'):
            for leaf, parts in zip(leaves, zip(*of_shards)):
                if parts[0] is None:
                    continue
                with only_device(leaf.device or None):
                    parts = [tf.convert_to_tensor(part)[:size]
                             for part, size in zip(parts, sizes)]
                    grads.append(tf.concat(parts, 0))
                    ys.append(leaf[:sum(sizes)])  # a remainder may have been dropped
            if not ys:
                return []
            return [list(zip(tf.gradients(ys, variables, grads), variables))]
