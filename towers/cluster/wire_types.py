"""In which types a ring sends the values of variables, and adds up gradients.

TensorFlow's collective operations have kernels for few types of numbers. The others travel as one
of these that holds them without loss: cast, or with their bits as they are.
"""

import tensorflow.compat.v1 as tf

from towers import compat

_CAST = (  # types that every version sends, and what each of them holds without loss
    (tf.float32, (tf.float32, tf.float16, tf.bfloat16)), (tf.float64, (tf.float64,)),
    (tf.int32, (tf.int32, tf.bool, tf.uint8, tf.int8, tf.int16, tf.uint16)),
    (tf.int64, (tf.int64, tf.uint32)))
_BITS = (tf.uint64, tf.complex64, tf.complex128)
"""Types whose bits are sent as int64: two of them for a complex128."""

_PARTS = {tf.complex64: tf.float32, tf.complex128: tf.float64}
"""Complex types, and the type of their real and imaginary parts."""


def sent_type(dtype):
    """The type in which values travel; None for what is no number, or a quantized one."""
    return tf.int64 if dtype in _BITS else next(
        (sent for sent, dtypes in _CAST if dtype in dtypes), None)


def sent_shape(shape, dtype):
    """The shape in which values of a static shape travel."""
    return tf.TensorShape(shape.as_list() + [2]) if dtype == tf.complex128 else shape


def to_sent(value):
    """A tensor as it travels."""
    dtype = value.dtype.base_dtype
    return (tf.bitcast if dtype in _BITS else tf.cast)(value, sent_type(dtype))


def from_sent(value, dtype):
    """A tensor as it was before `to_sent`, of that type."""
    return (tf.bitcast if dtype in _BITS else tf.cast)(value, dtype)


def to_added(gradient):
    """A dense gradient as numbers of a type that can be added up over the workers."""
    dtype = gradient.dtype.base_dtype
    if dtype in _PARTS:
        return tf.bitcast(gradient, _PARTS[dtype])
    return gradient if dtype in compat.COLLECTIVE_DTYPES else tf.cast(gradient, tf.float32)


def from_added(total, dtype):
    """A sum of what `to_added` has made, in the gradients' own type."""
    return (tf.bitcast if dtype in _PARTS else tf.cast)(total, dtype)
