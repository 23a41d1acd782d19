"""Evaluation of a batch of fewer examples than towers."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from case_marks import first_fast

import towers


def model_fn(images):
    """A convolution, a loop; predictions, metrics that count examples, floats and integers."""
    kernel = tf.get_variable('kernel', [3, 3, 3, 16], initializer=tf.random_normal_initializer(
        seed=3))
    net = tf.nn.relu(tf.nn.conv2d(images, kernel, [1, 1, 1, 1], 'SAME'))
    net = tf.while_loop(lambda turn, _: turn < 2, lambda turn, net: (turn + 1, tf.tanh(net)),
                        [0, net])[1]
    logits = tf.reduce_sum(net, [1, 2])
    seen = tf.get_variable('seen', [], tf.int64, tf.zeros_initializer(), trainable=False,
                           collections=[tf.GraphKeys.LOCAL_VARIABLES,
                                        tf.GraphKeys.METRIC_VARIABLES])
    count = tf.assign_add(seen, tf.shape(images, out_type=tf.int64)[0])
    return towers.ModelOutput(tf.reduce_mean(logits), {'logits': logits, 'maps': net}, {
        'mean': tf.metrics.mean(tf.reduce_sum(logits, 1)), 'seen': (seen, count),
        'by class': tf.metrics.mean_per_class_accuracy(
            tf.zeros([tf.shape(images)[0]], tf.int64), tf.argmax(logits, 1), 16)})


def evaluated(devices, examples, batch):
    """Predictions, loss, and the counters of the metrics."""
    with tf.Graph().as_default():
        images = tf.placeholder(tf.float32, [batch, 8, 8, 3])
        built = towers.build_towers(model_fn, (images,), None, devices, remainder='weight')
        feed = {images: np.random.RandomState(0).rand(examples, 8, 8, 3)}
        with tf.Session(config=towers.session_config(built.devices)) as session:
            session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
            session.run([update for _, update in built.metrics.values()], feed)
            return session.run([built.predictions['logits'], built.predictions['maps'], built.loss,
                                tf.get_collection(tf.GraphKeys.METRIC_VARIABLES)], feed)


@pytest.mark.parametrize('devices, examples, batch', first_fast(1, [
    (2, 1, 1), (4, 2, None)]))
def test_towers_without_an_example_leave_the_others_numbers(devices, examples, batch):
    """`batch` is the size that the graph knows."""
    found = evaluated(devices, examples, batch)
    expected = evaluated(1, examples, batch)
    assert found[0].shape == (examples, 16) and found[1].shape == (examples, 8, 8, 16)
    for value, one in zip(found[:3] + found[3], expected[:3] + expected[3]):
        np.testing.assert_allclose(value, one, rtol=2e-5)


def test_a_metric_that_does_not_add_is_refused_by_name():
    def largest(x):
        seen = tf.get_variable('seen', [], collections=[
            tf.GraphKeys.LOCAL_VARIABLES, tf.GraphKeys.METRIC_VARIABLES], trainable=False)
        update = tf.assign(seen, tf.maximum(seen, tf.reduce_max(x)), name='largest')
        return {'metrics': {'largest': (tf.identity(seen), update)}}
    with tf.Graph().as_default():
        x = tf.placeholder(tf.float32, [None])
        built = towers.build_towers(largest, x, None, 2, remainder='weight')
        update = built.metrics['largest'][1]
        with tf.Session(config=towers.session_config(2)) as session:
            session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
            session.run(update, {x: [1., 2., 3.]})
            with pytest.raises(tf.errors.InvalidArgumentError, match='metric of .*largest adds'):
                session.run(update, {x: [1.]})


@pytest.mark.slow
def test_what_training_counts_leaves_padding_out():
    def counting(labels):
        seen = tf.get_variable('seen', [], tf.int32, tf.zeros_initializer(), trainable=False)
        bank = tf.get_variable('bank', [9], tf.float64, tf.zeros_initializer(), trainable=False)
        loss = tf.reduce_mean(tf.cast(labels, tf.float64)) * tf.get_variable(
            'w', [], tf.float64, tf.ones_initializer())
        return {'loss': loss, 'updates': [
            tf.assign_add(seen, tf.shape(labels)[0]),
            tf.scatter_add(bank, labels, tf.ones([tf.shape(labels)[0]], tf.float64))]}
    with tf.Graph().as_default():
        labels = tf.placeholder(tf.int64, [None])
        built = towers.build_towers(counting, labels, tf.train.GradientDescentOptimizer(.1), 4,
                                    remainder='weight')
        seen, bank = [each for name in ('seen', 'bank') for each in tf.global_variables(name)]
        with tf.Session(config=towers.session_config(4)) as session:
            session.run(tf.global_variables_initializer())
            session.run(built.train_op, {labels: [2, 2, 5]})
            assert session.run(seen) == 3
            assert session.run(bank).tolist() == [0, 0, 2, 0, 0, 1, 0, 0, 0]
