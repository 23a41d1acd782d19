"""The types in which a ring sends values: nothing of them is lost."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from towers.cluster import wire_types
from towers.cluster.ring_rows import SparseGradients
from towers.errors import ClusterError

KINDS = ['bool', 'uint8', 'uint16', 'uint32', 'uint64', 'int8', 'int16', 'int32', 'int64',
         'float16', 'float32', 'float64', 'complex64', 'complex128']


def test_every_type_of_number_comes_back_bit_for_bit():
    draw = np.random.RandomState(0)
    given, back = [], []
    for kind in KINDS:
        dtype = tf.as_dtype(kind)
        value = draw.randint(0, 2, 6).astype(bool) if dtype == tf.bool else np.frombuffer(
            draw.bytes(6 * dtype.size), dtype.as_numpy_dtype)
        given.append(np.nan_to_num(value.reshape(2, 3)) if dtype.is_floating else
                     value.reshape(2, 3))
        sent = wire_types.to_sent(tf.constant(given[-1]))
        assert sent.dtype == wire_types.sent_type(dtype)
        assert sent.shape == wire_types.sent_shape(tf.TensorShape([2, 3]), dtype)
        back.append(wire_types.from_sent(sent, dtype))
    with tf.Session() as session:
        for kind, before, after in zip(KINDS, given, session.run(back)):
            assert after.tobytes() == before.tobytes(), kind


@pytest.mark.parametrize('dtype', [tf.complex64, tf.complex128])
def test_complex_gradients_are_added_with_their_imaginary_parts(dtype):
    gradients = [tf.constant([1. + 2.j, 3. - 4.j], dtype), tf.constant([.5j, 1.], dtype)]
    total = wire_types.from_added(sum(map(wire_types.to_added, gradients)), dtype)
    with tf.Session() as session:
        np.testing.assert_array_equal(session.run(total), [1. + 2.5j, 4. - 4.j])


def test_complex_rows_are_refused():
    table = tf.get_variable('table', [4, 2], tf.complex64, initializer=tf.zeros_initializer())
    rows = tf.IndexedSlices(tf.zeros([1, 2], tf.complex64), tf.constant([1]), tf.constant([4, 2]))
    with pytest.raises(ClusterError, match="gradient of 'table' has rows of complex64"):
        SparseGradients([(rows, table)], 0, 2)
