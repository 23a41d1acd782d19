"""Looks at collections by scope, in towers as on one device."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers

X = np.random.RandomState(0).randn(5, 2)


def two_scopes(x):
    """The losses of the scope `generator` alone, by its name."""
    for scope, target in (('generator', 1.), ('other', 5.)):
        with tf.variable_scope(scope):
            w = tf.get_variable('w', [2, 1], tf.float64, tf.constant_initializer(0.5))
            values = tf.matmul(x, w)
            tf.losses.mean_squared_error(tf.fill(tf.shape(values), target), values)
            tf.add_to_collection('kept', values)
            tf.add_to_collection('kept', 'no tensor')
    assert len(tf.get_collection('kept')) == 4
    assert len(tf.get_collection('kept', 'other')) == len(tf.get_collection('kept', 'oth.*l')) == 1
    assert tf.get_collection('kept', 'her') == tf.get_collection('none', 'other') == []
    with tf.name_scope('inner') as inner:
        tf.add_to_collection('kept', tf.identity(values, 'again'))
    assert len(tf.get_collection('kept', inner)) == 1
    losses = tf.losses.get_losses('generator')
    assert len(losses) == 1
    return tf.add_n(losses)


@pytest.mark.parametrize('around, options', [
    (None, dict(devices=2)), ('around', dict(devices=2, first_scope=False))] + [
        pytest.param(*case, marks=pytest.mark.slow) for case in [
            (None, dict(devices=1)), ('around', dict(devices=3, copies='reuse')),
            ('around', dict(devices=2))]])
def test_they_find_what_one_device_finds(options, around):
    with tf.Graph().as_default(), tf.name_scope(around):
        built = towers.build_towers(
            lambda x: two_scopes(x) if around is None else in_scope(x), tf.constant(X),
            tf.train.GradientDescentOptimizer(0.1), reduction='mean', remainder='weight', **options)
        with tf.Session(config=towers.session_config(built.devices)) as session:
            session.run(tf.global_variables_initializer())
            loss = session.run(built.loss)
    np.testing.assert_allclose(loss, np.mean((X.sum(1) * 0.5 - 1) ** 2), rtol=1e-6)


def in_scope(x):
    """As on one device in the scope `around`, where names begin with it."""
    w = tf.get_variable('w', [2, 1], tf.float64, tf.constant_initializer(0.5))
    with tf.name_scope('generator'):
        values = tf.matmul(x, w)
        tf.losses.mean_squared_error(tf.ones_like(values), values)
    assert tf.losses.get_losses('generator') == []
    return tf.add_n(tf.losses.get_losses('around/generator'))
