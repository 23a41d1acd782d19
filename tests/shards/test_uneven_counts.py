"""Metrics of scalars, and of shards without an example, count as on one device."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers

X = np.random.RandomState(0).rand(12, 3)
BATCHES = [X[:5], X[5:11], X[11:]]


def model(x):
    w = tf.get_variable('w', [3], tf.float64, tf.constant_initializer([1., 2., 3.]))
    of_example = tf.reduce_sum(x * w, 1)
    loss = tf.reduce_mean(of_example)  # NaN of nothing
    count = tf.cast(tf.shape(x)[0], tf.float32)
    return {'loss': loss, 'metrics': {
        'of loss': tf.metrics.mean(loss), 'by size': tf.metrics.mean(loss, weights=count),
        'of vector': tf.metrics.mean_tensor(tf.reduce_mean(x, 0)),
        'of examples': tf.metrics.mean(of_example)}}


@pytest.mark.parametrize('devices, static, trains', [
    (2, False, True), pytest.param(3, False, True, marks=pytest.mark.slow), pytest.param(2, False, False, marks=pytest.mark.slow),
    pytest.param(2, True, True, marks=pytest.mark.slow)])
def test_they_are_those_of_one_device(devices, static, trains):
    found = []
    for count in (1, devices):
        with tf.Graph().as_default():
            batch = tf.constant(X[:5]) if static else tf.placeholder(tf.float64, [None, 3])
            built = towers.build_towers(
                model, batch, tf.train.GradientDescentOptimizer(0.) if trains else None, count,
                'mean', remainder='weight')
            with tf.Session(config=towers.session_config(built.devices)) as session:
                session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
                for each in BATCHES[:1] if static else BATCHES:
                    session.run([update for _, update in built.metrics.values()],
                                {} if static else {batch: each})
                found.append(session.run({name: value for name, (value, _)
                                          in built.metrics.items()}))
    one, several = found
    for name in one:
        np.testing.assert_allclose(several[name], one[name], rtol=1e-6, err_msg=name)
    of_examples = X @ [1, 2, 3]
    batches = [of_examples[:5], of_examples[5:11], of_examples[11:]][:1 if static else 3]
    assert several['of loss'] == pytest.approx(np.mean([each.mean() for each in batches]))
    assert several['of examples'] == pytest.approx(np.concatenate(batches).mean())
