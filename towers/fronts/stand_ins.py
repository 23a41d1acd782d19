"""Stand-ins of gradients: operations that hand a gradient on to an optimizer's update.

The update is made with stand-ins of the first tower's gradients. When the other towers are there,
each stand-in gets the gradient of all towers as its input, see `optimizer_calls`. The test of this
module is tests/fronts/test_optimizer_calls.py.
"""

import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.placement.variable_device import only_device


def stand_in_of(gradient: typing.Any, variable: tf.Variable) -> typing.Any:
    """A stand-in for a gradient, on the device of its variable; None for a gradient of None."""
    if gradient is None:
        return None
    device = variable.device or None  # TensorFlow says '' for a variable without a device
    with only_device(device):
        if not isinstance(gradient, tf.IndexedSlices):
            return tf.identity(gradient, 'gradient')
        values = _stand_in_of_rows(gradient.values)
        indices = _stand_in_of_rows(gradient.indices)
        return tf.IndexedSlices(values, indices, gradient.dense_shape)


def _stand_in_of_rows(tensor: tf.Tensor) -> tf.Tensor:
    """A stand-in for the values or the indices of a sparse gradient, a tensor [n, …].

    Its static shape is [?, …], since all towers together have more rows than the first one. The
    placeholder is there for this shape alone: `connect` gives the `Identity` another input.
    """
    shape = tf.TensorShape([None]).concatenate(tensor.shape[1:])
    return tf.identity(tf.placeholder_with_default(tensor, shape))


def connect(stand_in: typing.Any, gradient: typing.Any,
            predecessors: typing.Sequence[tf.Operation]) -> None:
    """Makes a stand-in hand on another gradient, when operations before it have run.

    Args:
      stand_in: the result of `stand_in_of`.
      gradient: the gradient of all towers, dense or sparse as the first tower's.
      predecessors: the operations to wait for.
    """
    for identity, component in zip(_components(stand_in), _components(gradient)):
        compat.replace_input(identity.op, 0, component)
        compat.add_control_inputs(identity.op, predecessors)


def _components(gradient: typing.Any) -> typing.List[tf.Tensor]:
    """The tensors of a gradient that differ from tower to tower: one, or values and indices."""
    if isinstance(gradient, tf.IndexedSlices):
        return [gradient.values, gradient.indices]
    return [gradient]


def one_if_any(size: typing.Any) -> typing.Any:
    """1 for a shard that has any example, else 0: its weight where losses are added up.

    Args:
      size: the number of examples in the shard, an int or a scalar.

    Returns:
      A float, or a float64 scalar, as the weights of a mean are.
    """
    if isinstance(size, int):
        return float(size > 0)
    return tf.cast(size > 0, tf.float64)
