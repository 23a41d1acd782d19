"""Placeholders that the model function makes are common to all towers."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from case_marks import first_fast

import towers
from sample_models import objective

X = np.array([1., 2., 3., 6.])  # mean 3
HELD = []


def number(value=None, shape=()):
    HELD.append(tf.placeholder(tf.float64, shape) if value is None
                else tf.placeholder_with_default(value, shape, 'keep'))
    return HELD[0]


def weight():
    return tf.get_variable('w', [], tf.float64, tf.constant_initializer(1.))


def without_default(x):
    return weight() * tf.reduce_mean(x) * number()


def with_default(x):
    return weight() * tf.reduce_mean(x) * number(tf.constant(1., tf.float64))


def in_branches(x):
    keep = number(tf.constant(1., tf.float64))
    return weight() * tf.cond(keep > 0., lambda: tf.reduce_mean(x) * keep, lambda: 0. * keep)


def training(x):
    """`is_training` without a shape; in training the mean is multiplied by 3."""
    HELD.append(tf.placeholder_with_default(False, None, name='is_training'))
    mean = tf.reduce_mean(x)
    return weight() * tf.cond(HELD[0], lambda: 3. * mean, lambda: mean)


def built_of(model_fn, **options):
    del HELD[:]
    return towers.build_towers(
        model_fn, X, objective(
            tf.train.GradientDescentOptimizer(tf.constant(.1, tf.float64)), options),
        reduction='mean', **dict(dict(devices=2), **options))


def after_a_step(built, feed):
    """The weight after a step that is fed so; it is 1 before."""
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        session.run(built.train_op, feed)
        return session.run(built.variables[0])


@pytest.mark.parametrize('model_fn, options', first_fast(3, [
    (in_branches, dict(memory=towers.Memory(accumulate=2))), (training, {}), (without_default, {}),
    (with_default, {}), (with_default, dict(variables=towers.VariablePlacement('replicated')))]))
def test_all_towers_get_what_is_fed(model_fn, options):
    built = built_of(model_fn, **options)
    assert len(HELD) == 1  # for all towers
    for feed, factor in ({}, 1.), ({HELD[0]: True if model_fn is training else 3.}, 3.):
        if model_fn is without_default and not feed:
            with pytest.raises(tf.errors.InvalidArgumentError, match='must feed a value'):
                after_a_step(built, feed)
            continue
        np.testing.assert_allclose(after_a_step(built, feed), 1. - .1 * 3. * factor, rtol=1e-12)


def test_a_default_that_is_the_shard_is_each_towers_own():
    built = built_of(lambda x: weight() * tf.reduce_mean(number(x, [None])))
    np.testing.assert_allclose(after_a_step(built, {HELD[0]: [5.]}), 1. - .1 * (5. + 4.5) / 2.)
