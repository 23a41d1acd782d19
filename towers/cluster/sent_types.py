"""The types in which numbers travel between workers.

TensorFlow's collectives and Horovod send few types. Variables and values of a forward pass are
converted to a type that is sent, without loss. Gradients, which are rounded anyway, are converted
to a float type.

Its tests are `tests/cluster/test_ring.py` and `tests/cluster/test_horovod.py`.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.errors import ClusterError

# {a type that every version sends: the types whose numbers it holds without loss}
_HELD_WITHOUT_LOSS = {
    tf.float32: (tf.float32, tf.float16, tf.bfloat16),
    tf.float64: (tf.float64,),
    tf.int32: (tf.int32, tf.bool, tf.uint8, tf.int8, tf.int16, tf.uint16),
    tf.int64: (tf.int64, tf.uint32),
}


def type_of_sent_gradient(dtype: tf.DType) -> tf.DType:
    """The type in which gradients of a type are sent, and added up: float64 for float64, else
    float32. A sum of float16 gradients overflows where their mean does not."""
    return tf.float64 if dtype.base_dtype == tf.float64 else tf.float32


def type_of_sent_value(tensor: tf.Tensor) -> tf.DType:
    """The type in which a value of the forward pass is sent, and added up; raises `ClusterError` if
    no type holds its numbers."""
    sent = _type_without_loss(tensor.dtype)
    if sent is None:
        raise ClusterError(
            'value %r of the whole batch is %s, which workers cannot add up: cast it to a float, '
            'or to int64.' % (tensor.op.name, tensor.dtype.name))
    return sent


def type_of_sent_variable(variable: tf.Variable) -> tf.DType:
    """The type in which a variable is sent from worker 0 to the others; raises `ClusterError` if no
    type holds its numbers, or if its shape, which every worker has to know, is not static."""
    dtype = variable.dtype.base_dtype
    sent = _type_without_loss(dtype)
    if sent is None or not variable.get_shape().is_fully_defined():
        raise ClusterError(
            'variable %r is %s of shape %s, which worker 0 cannot send to the others: make it a '
            'local variable, or one of a number type and a static shape.' % (
                variable.op.name, dtype.name, variable.get_shape()))
    return sent


def _type_without_loss(dtype: tf.DType) -> typing.Optional[tf.DType]:
    """The type in which numbers of type `dtype` are sent without loss; None if there is none."""
    for sent, held in _HELD_WITHOUT_LOSS.items():
        if dtype in held:
            return sent
    return None
