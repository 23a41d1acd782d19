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


def trained_behind(tensor, names):
    """Those of the names of variables that a tensor has a gradient to: a set."""
    return graph_walk.ancestors([tensor], ends=('StopGradient',)) & set(names)


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
        self.inputs = inputs
        trainable = {variable.op.name: variable for variable in tf.trainable_variables()}
        self._of_leaves, self._variables = [], []
        if not trains or not trainable:
            return
        dense, names = [tf.convert_to_tensor(leaf) if isinstance(leaf, compat.VARIABLE_TYPES)
                        else leaf for leaf in tf.nest.flatten(inputs)], set()
        for leaf in dense:
            if isinstance(leaf, tf.Tensor) and leaf.dtype.is_floating:
                found = trained_behind(leaf, trainable)
                names |= found
                self._of_leaves.append(leaf if found else None)
                continue
            self._of_leaves.append(None)
            if isinstance(leaf, tf.SparseTensor):
                for name in sorted(trained_behind(leaf.values, trainable)):
                    raise InputError(
                        'a sparse tensor among the inputs (%s) is computed from the trainable '
                        'variable %s: compute it in the model function, or pass '
                        'tf.stop_gradient of its values.' % (leaf.values.name, name))
        self._variables = [trainable[name] for name in sorted(names)]
        if self._variables:
            self.inputs = tf.nest.pack_sequence_as(inputs, [
                each if leaf is None else tf.stop_gradient(leaf)
                for each, leaf in zip(dense, self._of_leaves)])

    def shard_tensors(self, shard):
        """The tensors of a shard behind which trained variables are: a list."""
        return [tensor for tensor, leaf in zip(tf.nest.flatten(shard), self._of_leaves)
                if leaf is not None] if self._variables else []

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
