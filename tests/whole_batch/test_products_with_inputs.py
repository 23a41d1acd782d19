"""Examples that are the nodes of one graph: products with its adjacency matrix."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from finished_programs import dense
from sample_models import sgd

DRAW = np.random.RandomState(0)
ADJACENCY = (DRAW.rand(6, 6) < .5) * 1.
FEATURES, TARGETS = DRAW.randn(6, 4), DRAW.randn(6, 3)


def network(multiply, concat):
    """Two graph convolutions; `multiply` is the product with the adjacency matrix."""
    x, y = tf.placeholder(tf.float64, [None, 4]), tf.placeholder(tf.float64, [None, 3])
    h = tf.tanh(multiply(concat(dense(x, 5, 'a'))))
    h.set_shape([None, 5])
    h = multiply(concat(dense(h, 3, 'b')))
    return x, y, tf.reduce_mean(tf.square(h - y))


def dense_matrix():
    matrix = tf.placeholder(tf.float64, [None, None])
    return (matrix,), lambda h: tf.matmul(matrix, h)


def fed_to_all():
    matrix = tf.placeholder(tf.float64, [6, 6])
    return (), lambda h: tf.matmul(matrix, h)


def sparse_matrix():
    matrix = tf.sparse_placeholder(tf.float64)
    return (matrix,), lambda h: tf.sparse_tensor_dense_matmul(matrix, h)


def second_factor():
    matrix = tf.placeholder(tf.float64, [None, None])
    return (matrix,), lambda h: tf.transpose(
        tf.matmul(h, matrix, transpose_a=True, transpose_b=True))


@pytest.mark.parametrize('make', [dense_matrix] + [
    pytest.param(each, marks=pytest.mark.slow) for each in (
        fed_to_all, sparse_matrix, second_factor)])
def test_a_product_over_the_nodes_of_one_shard_is_refused(make):
    matrix, multiply = make()
    x, y, loss = network(multiply, lambda rows: rows)
    with pytest.raises(towers.ModelFunctionError, match='around these, for those of') as caught:
        towers.build_towers(loss, matrix + (x, y), sgd(), 2, 'mean', remainder='weight')
    assert '\n' not in str(caught.value)


@pytest.mark.parametrize('num_towers', [pytest.param(2, marks=pytest.mark.slow), 3])
def test_with_the_nodes_of_all_shards_towers_equal_one_device(num_towers):
    matrix = tf.placeholder(tf.float64, [None, None])
    x, y, loss = network(lambda h: tf.matmul(matrix, h), towers.batch_concat)
    expected = tf.gradients(loss, tf.trainable_variables())
    built = towers.build_towers(loss, (matrix, x, y), sgd(), num_towers, 'mean')
    with tf.Session(config=towers.session_config(num_towers)) as session:
        session.run(tf.global_variables_initializer())
        ours, theirs = session.run(
            [[built.loss] + [gradient for gradient, _ in built.gradients], [loss] + expected],
            {matrix: ADJACENCY, x: FEATURES, y: TARGETS})
    for mine, other in zip(ours, theirs):
        np.testing.assert_allclose(mine, other, rtol=1e-11)
