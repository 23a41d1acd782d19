"""What a step runs and how large its tensors are, at any batch size: as built at that size."""

import pytest
import tensorflow.compat.v1 as tf

import towers
from towers import compat
from towers.errors import InvalidArgumentError
from towers.memory.step_graph import StepGraph

import sample_models


@pytest.fixture(autouse=True)
def without_patches(monkeypatch):
    """As with oneDNN's kernels, which take no memory for patches of images."""
    monkeypatch.setattr(compat, 'uses_onednn', lambda: True)


def conv_net(images, labels):
    """Convolution, batch norm by hand, pooling, dropout, a dense layer."""
    weights = tf.get_variable('conv/weights', [3, 3, 3, 8], use_resource=True)
    net = tf.nn.conv2d(images, weights, [1, 1, 1, 1], 'SAME')
    net, _, _ = tf.nn.fused_batch_norm(
        net, tf.get_variable('gamma', [8], use_resource=True),
        tf.get_variable('beta', [8], use_resource=True))
    net = tf.nn.max_pool(tf.nn.relu(net), [1, 2, 2, 1], [1, 2, 2, 1], 'SAME')
    net = tf.nn.dropout(tf.reshape(net, [-1, 4 * 4 * 8]), rate=0.5)
    net = tf.matmul(net, tf.get_variable('dense/weights', [128, 10], use_resource=True))
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels=labels, logits=net))


def recurrent(features, labels):
    """A hand-unrolled network with a state of zeros."""
    weights = tf.get_variable('weights', [80, 64], use_resource=True)
    steps = tf.unstack(features, axis=1)
    state = tf.zeros([tf.shape(features)[0], 64])
    for each in steps:
        state = tf.tanh(tf.matmul(tf.concat([each, state], 1), weights))
    return sample_models.mean_squared_error(tf.reduce_sum(state, 1), tf.cast(labels, tf.float32))


def built_with(model, batch, known, num_towers, **options):
    shape = [8, 8, 3] if model is conv_net else [5, 16]
    x = tf.placeholder(tf.float32, [batch if known else None] + shape)
    y = tf.placeholder(tf.int64, [batch if known else None])
    return towers.build_towers(model, (x, y), tf.train.MomentumOptimizer(0.1, 0.9), num_towers,
                               **options)


def account(model, batch, at, known=True, num_towers=2, **options):
    with tf.Graph().as_default():
        built = built_with(model, batch, known, num_towers, **options)
        return towers.memory_account(built, at)


@pytest.mark.slow
@pytest.mark.parametrize('model, known, tolerance', [
    (conv_net, True, 0.1), (recurrent, False, 0.02),
    pytest.param(recurrent, True, 0.1, marks=pytest.mark.slow),
    pytest.param(conv_net, False, 0.02, marks=pytest.mark.slow)])
def test_any_size_is_near_what_a_build_of_that_size_has(model, known, tolerance):
    """A known size is scaled, an unknown one inferred."""
    expected, found = account(model, 96, None), account(model, 24 if known else None, 96, known)
    assert found.batch_size == 96
    assert found.peak == pytest.approx(expected.peak, rel=tolerance)
    for kind in ('parameters', 'slots', 'initial values'):
        assert found.together.kinds.get(kind) == expected.together.kinds.get(kind), kind
    assert found.together.kinds['activations'] == pytest.approx(
        expected.together.kinds['activations'], rel=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize('size, text', [
    (25, 'batch_size=25 does not divide among 2 towers: give a multiple of 2.'),
    (1, 'batch_size=1 does not divide among 2 towers: give a multiple of 2.'),
    (0, 'batch_size=0: expected a whole number of at least 1.'),
    (True, 'batch_size=True: expected a whole number of at least 1.')])
def test_sizes_that_make_no_sense(size, text):
    with pytest.raises(InvalidArgumentError) as caught:
        account(conv_net, 24, size)
    assert str(caught.value) == text
    with pytest.raises(InvalidArgumentError, match='has no static size'):
        account(conv_net, None, None, known=False)


def test_a_sparse_batch_of_unknown_size_is_refused():
    def model(batch):
        return tf.reduce_mean(tf.sparse.sparse_dense_matmul(
            batch, tf.get_variable('weights', [64, 32])))
    built = towers.build_towers(model, tf.sparse_placeholder(tf.float32, [None, 64]),
                                tf.train.GradientDescentOptimizer(.1), 2)
    with pytest.raises(InvalidArgumentError, match='the batch is sparse, and of no static size'):
        towers.memory_account(built, 48)


@pytest.mark.slow
def test_the_graph_is_left_as_it_was():
    with tf.Graph().as_default() as graph:
        built = built_with(conv_net, None, False, 2)
        before = graph.as_graph_def().SerializeToString(deterministic=True)
        towers.memory_account(built, 64)
        assert graph.as_graph_def().SerializeToString(deterministic=True) == before


def test_what_is_computed_of_constants_and_shapes_is_folded():
    x = tf.placeholder(tf.float32, [3, 4])
    zeros = tf.fill(tf.raw_ops.Shape(input=x, name='shape'), 0., name='zeros')
    step = StepGraph([x + zeros + tf.random_uniform([3, 4], name='drawn')])
    assert step.by_name['shape'].folded and step.by_name['zeros'].folded
    assert step.by_name['zeros'].sizes == [48]
    assert not step.by_name['drawn/RandomUniform'].folded


def test_a_size_that_is_not_known_is_that_of_the_largest_input_and_named():
    step = StepGraph([tf.unique(tf.placeholder(tf.int32, [100]), name='unique')[0]])
    assert step.by_name['unique'].sizes == [400, 400]  # the second is known: an index each
    assert step.unknown == ['unique']
