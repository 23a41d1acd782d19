"""Sparse gradients in a ring: every row to its place, few messages, against one device."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.cluster import ring_rows
from towers.cluster.ring_rows import SparseGradients
from towers.errors import ClusterError
from one_process import addresses, together, train


@pytest.mark.parametrize('dtype, largest', [
    (tf.bfloat16, 10), (tf.float16, 2 ** 40 + 3), (tf.float32, 2 ** 24 + 1)])
def test_an_index_travels_exactly_beside_numbers_of_any_type(dtype, largest):
    indices = tf.constant([largest, 0, largest - 1], tf.int64)
    digits = tf.concat(ring_rows._digits(indices, dtype), 1)
    assert digits.dtype == dtype
    with tf.Session() as session:
        np.testing.assert_array_equal(
            session.run(ring_rows._number(digits, dtype, tf.int64)), [largest, 0, largest - 1])


def many_tables(rows, targets):
    """Embeddings of three types and shapes, one looked up twice, one by what the model computes."""
    with tf.variable_scope('net', use_resource=True):
        total = 0.
        for index, (dtype, width) in enumerate([(tf.float64, 3), (tf.float64, 1), (tf.float32, 2)]):
            table = tf.get_variable('table_%d' % index, [11, width], dtype,
                                    tf.random_normal_initializer())
            looked_up = tf.gather(table, rows[:, index]) + tf.gather(table, rows[:, 3])
            total += tf.cast(tf.reduce_sum(tf.tanh(looked_up), 1), tf.float64)
        bias = tf.get_variable('bias', [11], tf.float64, tf.random_normal_initializer())
        chosen = tf.math.argmax(tf.one_hot(rows[:, 0], 11, dtype=tf.float64) * 50. + bias, 1)
        total += tf.gather(bias, chosen)
        return tf.reduce_mean(tf.square(total - targets))


def _batches(sizes):
    random = np.random.RandomState(3)
    return [(random.randint(0, 11, [size, 4]), random.randn(size)) for size in sizes]


@pytest.mark.slow
def test_many_tables_are_trained_as_on_one_device():
    sizes, num_towers = [4, 1, 3], 2
    parts, workers, messages = _batches(sizes), addresses(len(sizes)), []

    def on_build(built):
        messages.append([op for op in tf.get_default_graph().get_operations()
                         if op.type.startswith('Collective') and 'ring' in op.name])
    results = together(lambda rank: train(
        towers.Cluster('ring', workers, rank=rank, uneven=True), many_tables, parts[rank],
        lambda: tf.train.GradientDescentOptimizer(0.125), 2, num_towers, on_build=on_build),
        len(sizes))
    # Of examples, of counts (the rows of the bias are known late), of float32 and of float64.
    assert len(messages[0]) == 4
    with tf.Graph().as_default(), tf.Session() as session:
        loss = many_tables(*[tf.constant(np.concatenate(column)) for column in zip(*parts)])
        variables = tf.trainable_variables()
        gradients = [tf.convert_to_tensor(each) for each in tf.gradients(loss, variables)]
        for variable in variables:
            variable.load(results[0]['first'][variable.op.name], session)
        for variable, expected in zip(variables, session.run(gradients)):
            for result in results:
                np.testing.assert_allclose(
                    result['gradients'][variable.op.name], expected, atol=1e-13,
                    rtol=1e-12 if expected.dtype == np.float64 else 1e-5,
                    err_msg=variable.op.name)
    for name, value in results[0]['last'].items():  # bit for bit
        assert value.tobytes() == results[-1]['last'][name].tobytes(), name


def test_rows_of_unknown_shape_are_named():
    table = tf.Variable(tf.placeholder_with_default(tf.zeros([3, 2]), None), validate_shape=False,
                        name='table')
    slices = tf.IndexedSlices(tf.placeholder(tf.float32), tf.constant([0, 1]))
    with pytest.raises(ClusterError, match="the sparse gradient of 'table' has rows of unknown"):
        SparseGradients([(slices, table)], 0, 2)
