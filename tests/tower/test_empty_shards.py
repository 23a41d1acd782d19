"""Evaluation of a batch of fewer examples than towers, by models of convolutions."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers

SHAPES = [8, 8, 3]


def conv(net, filters, width=3, scope='conv', **options):
    with tf.variable_scope(scope):
        kernel = tf.get_variable('kernel', [width, width, int(net.shape[-1]), filters], net.dtype,
                                 tf.random_normal_initializer(seed=3))
        bias = tf.get_variable('bias', [filters], net.dtype, tf.ones_initializer())
        return tf.nn.bias_add(tf.nn.conv2d(net, kernel, [1, 1, 1, 1], 'SAME', **options), bias)


def network(images):
    """Two convolutions, a pool, a sum of two ways, two ways side by side, a linear layer."""
    net = tf.nn.relu(conv(images, 16, scope='a'))
    net = tf.nn.max_pool(net, [1, 2, 2, 1], [1, 2, 2, 1], 'VALID')
    net = tf.nn.relu(net + conv(net, 16, scope='b'))
    net = tf.pad(net, [[0, 0], [1, 1], [1, 1], [0, 0]])
    net = tf.concat([conv(net, 16, scope='c'), conv(net, 8, 1, scope='d')], -1)
    flat = tf.reshape(net, [-1, int(np.prod(net.shape.as_list()[1:]))])
    return tf.matmul(flat, tf.get_variable('weights', [flat.shape[1], 4],
                                           initializer=tf.random_normal_initializer(seed=3)))


def build(model_fn, devices, batch=None):
    images = tf.placeholder(tf.float32, [batch] + SHAPES)
    return images, towers.build_towers(model_fn, (images,), None, devices, remainder='weight')


def run(fetches, built, feed, prepare=()):
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        session.run(list(prepare), feed)
        return session.run(fetches, feed)


def evaluated(devices, examples, batch=None):
    """Logits, and the metric's sum of logits and its count."""
    def model_fn(images):
        logits = network(images)
        return towers.ModelOutput(tf.reduce_mean(logits), logits,
                                  {'mean': tf.metrics.mean(tf.reduce_sum(logits, 1))})

    with tf.Graph().as_default():
        images, built = build(model_fn, devices, batch)
        feed = {images: np.random.RandomState(0).rand(*([examples] + SHAPES))}
        counters = tf.get_collection(tf.GraphKeys.METRIC_VARIABLES)
        return run([built.predictions, built.loss, counters], built, feed,
                   [built.metrics['mean'][1]])


@pytest.mark.parametrize('devices, examples, batch', [
    (3, 5, None), pytest.param(2, 1, 1, marks=pytest.mark.slow),
    pytest.param(4, 2, None, marks=pytest.mark.slow)])
def test_towers_without_an_example_leave_the_others_numbers(devices, examples, batch):
    """`batch` is what the graph knows: the shapes of a shard without examples then say so."""
    logits, loss, counters = evaluated(devices, examples, batch)
    expected, expected_loss, expected_counters = evaluated(1, examples)
    assert logits.shape == (examples, 4)
    np.testing.assert_allclose(logits, expected, rtol=2e-5)
    np.testing.assert_allclose(loss, expected_loss, rtol=2e-5)
    np.testing.assert_allclose(counters, expected_counters, rtol=2e-5)
    assert counters[1] == examples


def operations_in(scope):
    return [op for op in tf.get_default_graph().get_operations() if op.name.startswith(scope)]


def test_a_region_is_entered_once_and_left_once():
    def model_fn(images):
        net = tf.nn.relu(conv(images, 4, scope='a'))
        return {'predictions': tf.reduce_mean(conv(net, 4, scope='b'), [1, 2])}

    with tf.Graph().as_default() as graph:
        build(model_fn, 3)
        added = {tower: [op for op in operations_in('tower_%d/empty_shard' % tower)]
                 for tower in range(3)}
        assert not added[0]
        for tower in (1, 2):
            assert {op.device for op in added[tower]} == {'/device:CPU:%d' % tower}
            ensured, = [op for op in added[tower] if op.type == 'EnsureShape']
            cut, = [op.outputs[0] for op in added[tower] if any(
                taker.type == 'Mean' for taker in op.outputs[0].consumers())]
            assert [taker.name for taker in ensured.outputs[0].consumers()] == [
                'tower_%d/a/Conv2D' % tower]
            assert cut.op.inputs[0].name == 'tower_%d/b/BiasAdd:0' % tower
            assert cut.shape.as_list() == [None, 8, 8, 4]
            # What grappler joins to one operation stays side by side.
            bias = graph.get_operation_by_name('tower_%d/a/BiasAdd' % tower)
            assert bias.inputs[0].op.type == 'Conv2D'
            assert [taker.type for taker in bias.outputs[0].consumers()] == ['Relu']


def test_predictions_of_a_region_have_no_row_of_zeros():
    """Results of convolutions themselves, of the whole batch and of a tower without examples."""
    def model_fn(images):
        with tf.variable_scope('raw'):
            raw = tf.nn.conv2d(images, tf.get_variable('kernel', [8, 8, 3, 5]), [1, 1, 1, 1],
                               'VALID')
        net = conv(images, 4, scope='a')
        return {'predictions': {'raw': raw, 'first': net,
                                'last': tf.reduce_sum(conv(net, 4, scope='b'), [1, 2, 3])}}

    with tf.Graph().as_default():
        images, built = build(model_fn, 2)
        whole, of_tower = run([built.predictions, built.towers[1].predictions], built,
                              {images: np.ones([1] + SHAPES)})
    assert {name: value.shape for name, value in whole.items()} == {
        'raw': (1, 1, 1, 5), 'first': (1, 8, 8, 4), 'last': (1,)}
    assert {name: value.shape for name, value in of_tower.items()} == {
        'raw': (0, 1, 1, 5), 'first': (0, 8, 8, 4), 'last': (0,)}


@pytest.mark.parametrize('batch, optimizer, remainder', [
    (4, None, 'weight'), (None, None, 'error'), (None, 'sgd', 'weight')])
def test_nothing_is_added_where_no_shard_is_empty(batch, optimizer, remainder):
    with tf.Graph().as_default():
        images = tf.placeholder(tf.float32, [batch] + SHAPES)
        towers.build_towers(lambda images: tf.reduce_mean(conv(images, 4)), (images,),
                            optimizer and tf.train.GradientDescentOptimizer(.1), 2,
                            remainder=remainder)
        assert not operations_in('tower_1/empty_shard')


def test_convolutions_in_loops_and_branches_are_left_as_they_are():
    def model_fn(images):
        turns = tf.while_loop(lambda turn, net: turn < 2,
                              lambda turn, net: (turn + 1, conv(net, 3, scope='a')), [0, images])
        return {'predictions': tf.reduce_sum(turns[1], [1, 2, 3])}

    with tf.Graph().as_default():
        images, built = build(model_fn, 2)
        assert not operations_in('tower_1/empty_shard')
        assert run(built.predictions, built, {images: np.ones([2] + SHAPES)}).shape == (2,)
