"""Placeholders that the model function makes, where it is called for each tower."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from one_process import addresses, together, train

HELD = {}
X = np.array([1., 2., 3., 6.])  # mean 3


def number(value=None, shape=()):
    HELD['all'] = HELD.get('all', [])
    HELD['all'].append(tf.placeholder(tf.float64, shape) if value is None
                       else tf.placeholder_with_default(value, shape, 'keep'))
    return HELD['all'][-1]


def weight():
    return tf.get_variable('w', [], tf.float64, tf.constant_initializer(1.))


def with_default(x):
    return weight() * tf.reduce_mean(x) * number(tf.constant(1., tf.float64))


def without(x):
    return weight() * tf.reduce_mean(x) * number()


def in_branches(x):
    keep = number(tf.constant(1., tf.float64))
    return weight() * tf.cond(keep > 0., lambda: tf.reduce_mean(x) * keep, lambda: 0. * keep)


def of_another(x):
    """Its default is computed from another one."""
    return weight() * tf.reduce_mean(x) * number(number(tf.constant(.5, tf.float64)) * 2.)


def a_vector(x):
    return weight() * tf.reduce_mean(x) * tf.reduce_mean(
        number(tf.ones([1], tf.float64), [None]))


def built_of(model_fn, **options):
    HELD.clear()
    return towers.build_towers(
        model_fn, tf.constant(X), tf.train.GradientDescentOptimizer(tf.constant(.1, tf.float64)),
        reduction='mean', **dict(dict(devices=2), **options))


def after_a_step(built, feed):
    """The weight after a step that is fed so; it is 1 before."""
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        session.run(built.train_op, feed)
        return session.run(built.variables[0])


@pytest.mark.parametrize('model_fn, options', [
    (with_default, dict()), (in_branches, dict(devices=4)),
    (a_vector, dict(devices=1, accumulate=2, copies='reuse')),
    (of_another, dict(accumulate=2))] + [pytest.param(*case, marks=pytest.mark.slow) for case in [
        (with_default, dict(variables=towers.VariablePlacement('replicated'))), (with_default,
            dict(first_scope=False)),
        (in_branches, dict(accumulate=2)), (a_vector, dict(devices=4)),
        (of_another, dict(variables=towers.VariablePlacement('replicated')))]])
def test_all_towers_get_what_is_fed_to_any_of_them(model_fn, options):
    built = built_of(model_fn, **options)
    one = [3.] if model_fn is a_vector else 3.
    np.testing.assert_allclose(after_a_step(built, {}), 1. - .1 * 3., rtol=1e-12)
    for placeholder in HELD['all'][1::2] if model_fn is of_another else HELD['all']:
        np.testing.assert_allclose(after_a_step(built, {placeholder: one}), 1. - .1 * 3. * 3.,
                                   rtol=1e-12)
    if model_fn is of_another:
        for placeholder in HELD['all'][::2]:
            np.testing.assert_allclose(after_a_step(built, {placeholder: 3.}), 1. - .1 * 3. * 6.,
                                       rtol=1e-12)


def training(x):
    """`is_training` without a shape; in training the mean is multiplied by 3."""
    HELD.setdefault('all', []).append(tf.placeholder(tf.bool, name='is_training'))
    mean = tf.reduce_mean(x)
    return weight() * tf.cond(HELD['all'][-1], lambda: 3. * mean, lambda: mean)


@pytest.mark.parametrize('options', [dict(), dict(accumulate=2)], ids=str)
def test_a_placeholder_without_a_shape_is_a_number(options):
    built = built_of(training, **options)
    for fed, factor in ((True, 3.), (False, 1.)):
        np.testing.assert_allclose(after_a_step(built, {HELD['all'][-1]: fed}),
                                   1. - .1 * 3. * factor, rtol=1e-12)


def test_examples_for_one_without_a_shape_are_refused():
    """Each tower would get the last one's."""
    built = built_of(lambda x: weight() * tf.reduce_mean(number(shape=None)))
    first, second = HELD['all']
    with pytest.raises(tf.errors.InvalidArgumentError, match='fed something else than a scalar'):
        after_a_step(built, {first: [5.], second: [1., 2.]})


@pytest.mark.parametrize('options', [
    dict(accumulate=2), pytest.param(dict(devices=4), marks=pytest.mark.slow)])
def test_what_a_program_keeps_of_a_placeholder_is_what_it_feeds(options):
    built = built_of(without, **options)
    np.testing.assert_allclose(after_a_step(built, {HELD['all'][-1]: 3.}), 1. - .1 * 3. * 3.,
                               rtol=1e-12)
    with pytest.raises(tf.errors.InvalidArgumentError, match='must feed a value'):
        after_a_step(built, {HELD['all'][0]: 3.})


def test_the_update_and_what_is_shown_get_it_too():
    def model_fn(x):
        keep = number(tf.constant(1., tf.float64))
        return towers.ModelOutput(weight() * tf.reduce_mean(x), metrics={'keep': keep})
    built = built_of(model_fn, transform_gradients=lambda pairs: [
        (gradient * HELD['all'][-1], variable) for gradient, variable in pairs])
    for placeholder in HELD['all']:
        assert after_a_step(built, {placeholder: 2.}) == 1. - .1 * 3. * 2.
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        for placeholder in HELD['all']:
            assert session.run(built.metrics['keep'], {placeholder: 2.}) == 2.


def test_a_default_that_is_the_shard_is_each_towers_own():
    built = built_of(lambda x: weight() * tf.reduce_mean(number(x, [None])))
    np.testing.assert_allclose(after_a_step(built, {HELD['all'][0]: [5.]}),
                               1. - .1 * (5. + 4.5) / 2.)


def test_examples_are_each_towers_own():
    built = built_of(lambda x: weight() * tf.reduce_mean(number(shape=[None])))
    first, second = HELD['all']
    np.testing.assert_allclose(after_a_step(built, {first: [5.], second: [1., 2.]}),
                               1. - .1 * (5. + 1.5) / 2.)


def test_calls_that_make_other_placeholders_are_left_alone():
    def model_fn(x):
        if not HELD.get('all'):
            number(tf.constant(1., tf.float64))
        return weight() * tf.reduce_mean(x) * HELD['all'][0]
    built = built_of(model_fn)
    assert after_a_step(built, {HELD['all'][0]: 2.}) == 1. - .1 * 3. * 2.


def test_in_a_ring_each_worker_feeds_its_own():
    """Gradients are of 2 workers with 2 towers each: (3 * 2 + 5 * 1) / 2."""
    workers, values = addresses(2), [X, X + 2.]

    def work(rank):
        def model_fn(x):
            made.append(tf.placeholder_with_default(
                tf.constant(2. - rank, tf.float64), [], 'keep'))
            return weight() * tf.reduce_mean(x) * made[-1]
        made = []
        return train(towers.Cluster('ring', workers, rank=rank), model_fn, (values[rank],),
                     lambda: tf.train.GradientDescentOptimizer(tf.constant(.1, tf.float64)), 1,
                     num_towers=2)
    for result in together(work, 2):
        np.testing.assert_allclose(result['last']['w'], 1. - .1 * 5.5, rtol=1e-12)
