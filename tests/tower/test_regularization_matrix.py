"""N towers against a plain TF1 program on one device, for losses with terms of the weights.

Shapes of the finished loss, and ways to register L2.
"""

import itertools

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
import tf_slim as slim

import sample_models as samples
import towers

X = np.arange(24, dtype=np.float64).reshape(8, 3) / 10. - 1.
KEY = tf.GraphKeys.REGULARIZATION_LOSSES
keras = tf.keras


# ---- ways to have a registered L2 loss of a kernel [3, 1] ----------------------------------------

def l2(w):
    return 0.3 * tf.reduce_sum(tf.square(w))


def by_get_variable(x):
    return tf.matmul(x, tf.get_variable('w', [3, 1], x.dtype, regularizer=l2))


def by_slim(x):
    return slim.fully_connected(x, 1, activation_fn=None, weights_regularizer=l2)


def by_hand(x):
    w = tf.get_variable('w', [3, 1], x.dtype)
    tf.add_to_collection(KEY, l2(w))
    return tf.matmul(x, w)


def by_keras(x):
    """A layer whose losses the program registers, as it has those of its other layers."""
    layer = keras.layers.Dense(1, use_bias=False, kernel_regularizer=l2, dtype=x.dtype.name,
                               name='keras')
    out = layer(x)
    for loss in layer.losses:
        tf.add_to_collection(KEY, loss)
    return out


def by_tf_layers(x):
    return tf.layers.dense(x, 1, kernel_regularizer=l2)


WAYS = {
    'get_variable': by_get_variable, 'slim': by_slim, 'hand': by_hand, 'keras': by_keras}
if samples.HAS_TF_LAYERS:
    WAYS['tf.layers'] = by_tf_layers


# ---- shapes of the finished loss, of the data's d and the regularization's r ---------------------

def not_nan(total):
    return tf.where(tf.is_nan(total), tf.zeros_like(total), total)


SHAPES = {
    'sum': lambda d, r: d + r,
    'where': lambda d, r: not_nan(d + r),
    'stop_gradient of a part': lambda d, r: d + tf.stop_gradient(r) + r,
    'after an assertion': lambda d, r: after_assertion(d, r),
    'loop v1': lambda d, r: tf.while_loop(lambda i, t: i < 2, lambda i, t: (i + 1, t + r),
                                          (tf.constant(0), d))[1],
    'cond on data': lambda d, r: tf.cond(d > 0., lambda: tf.constant(2., d.dtype),
                                         lambda: tf.constant(2., d.dtype)) * r + d,
}


def after_assertion(d, r):
    with tf.control_dependencies([tf.Assert(d > -1e6, [d])]):
        return tf.identity(d) + tf.identity(r)


def model_of(way, shape):
    def model_fn(x):
        out = way(x)
        d = tf.reduce_mean(tf.square(out - 1.))
        return shape(d, tf.losses.get_regularization_loss())
    return model_fn


def check(model_fn, arrays=(X,), num_towers=2, reduction='mean', plain=None, tolerance=1e-12,
          **options):
    """Asserts that towers train as plain TF1 does; `plain` is the model of one device."""
    ours = samples.on_towers(model_fn, arrays, samples.momentum, num_towers, steps=2,
                             reduction=reduction, **options)
    theirs = samples.one_device(plain or model_fn, arrays, samples.momentum, ours.initial,
                                steps=2, factor=num_towers if reduction == 'sum' else 1)
    samples.assert_equal_runs(ours, theirs, tolerance)
    return ours


@pytest.mark.parametrize('shape', [
    shape if shape == 'where' else pytest.param(shape, marks=pytest.mark.slow)
    for shape in sorted(SHAPES)])
def test_every_shape_of_a_loss_with_registered_terms(shape):
    """Each by another way to register, by copies and by calls, by turns; `'add'` adds nothing."""
    number = sorted(SHAPES).index(shape)
    way = sorted(WAYS)[number % len(WAYS)]
    check(model_of(WAYS[way], SHAPES[shape]), num_towers=2 + number % 2, remainder='weight',
          copies='reuse' if way == 'slim' else 'clone', regularization='add',
          reduction=('mean', 'sum')[number // 2 % 2])


@pytest.mark.slow
@pytest.mark.parametrize('way, copies', [('slim', 'reuse'), ('keras', 'clone')])
def test_registered_losses_are_added_once(way, copies):
    def model_fn(x):
        return tf.reduce_mean(tf.square(WAYS[way](x) - 1.))

    def plain(x):
        return model_fn(x) + tf.losses.get_regularization_loss()
    ours = check(model_fn, plain=plain, regularization='add', copies=copies)
    assert ours.built.plan.regularization == (
        '1 registered loss added, counted once' + (
            ', computed once a step' if copies == 'clone' else ''))


def test_keras_losses_that_the_loss_has_already_are_not_added_again():
    """Keras makes them anew each time that it is asked for them."""
    def model_fn(x):
        layer = keras.layers.Dense(1, kernel_regularizer=l2, dtype='float64', name='dense')
        net = keras.Sequential([layer], name='net')
        outputs = tf.cast(net(tf.cast(x, tf.float64)), tf.float64)
        return tf.reduce_mean(tf.square(outputs - 1.)) + tf.add_n(net.losses)
    ours = check(model_fn, regularization='add')
    assert "in the model's own loss" in ours.built.plan.regularization
    assert 'added' not in ours.built.plan.regularization


@pytest.mark.slow
def test_a_loss_of_activations_that_is_computed_as_the_models_own_is_added():
    """It is another loss, that happens to have the same formula."""
    def model_fn(x):
        layer = keras.layers.Dense(1, dtype='float64', name='dense',
                                   activity_regularizer=lambda out: tf.reduce_sum(out * out))
        out = layer(tf.cast(x, tf.float64))
        return tf.reduce_sum(out * out) / tf.cast(tf.shape(out)[0], tf.float64)

    def once(x):
        return 2. * model_fn(x)  # Keras divides by the size of the batch, too
    check(model_fn, plain=once, regularization='add')


# ---- what a model function draws itself ----------------------------------------------------------

@pytest.mark.parametrize('source', ['iterator', 'py_func'])
def test_each_towers_draw_counts_for_itself(source):
    """Whichever tower draws which: 1 and 2."""
    drawn = itertools.count(1)
    iterator = tf.data.make_one_shot_iterator(tf.data.Dataset.range(1, 100))

    def draw():
        if source == 'iterator':
            return tf.cast(iterator.get_next(), tf.float64)
        return tf.reshape(tf.py_func(lambda: np.float64(next(drawn)), [], tf.float64), [])

    def model_fn(x):
        w = tf.get_variable('w', [], x.dtype, tf.constant_initializer(2.))
        return tf.reduce_mean(w * x) + draw() * w * w
    built = towers.build_towers(model_fn, np.zeros(8), samples.sgd(), 2, 'mean')
    # d/dw of mean(draw) w^2 at w = 2.
    assert samples.run(built, built.gradients[0][0]) == (1 + 2) / 2. * 2 * 2.


@pytest.fixture
def control_flow():
    """Switches control flow v2 on or off, for the test."""
    before = tf.control_flow_v2_enabled()

    def switch(v2):
        (tf.enable_control_flow_v2 if v2 else tf.disable_control_flow_v2)()
    yield switch
    switch(before)


@pytest.mark.parametrize('v2', [False, pytest.param(True, marks=pytest.mark.slow)],
                         ids=['v1', 'v2'])
def test_terms_that_depend_on_the_data_by_control_alone(v2, control_flow):
    """Each shard takes a branch of its own: 2 l2 here, 1 l2 there."""
    control_flow(v2)
    x = np.float64([1., 1., -1., -1.])

    def model_fn(x):
        w = tf.get_variable('w', [], tf.float64, tf.constant_initializer(2.))
        factor = tf.cond(tf.reduce_mean(x) > 0., lambda: tf.constant(2., tf.float64),
                         lambda: tf.constant(1., tf.float64))
        return tf.reduce_mean(w * x) + factor * 0.5 * w * w
    built = towers.build_towers(model_fn, x, samples.sgd(), 2, 'mean')
    # (1 + 2 w) / 2 + (-1 + w) / 2 with w = 2; loss (2 + 4) / 2 + (-2 + 2) / 2
    assert samples.run(built, [built.gradients[0][0], built.loss]) == [3., 3.]


def test_a_gradient_that_is_overridden_around_the_total():
    name = 'NegatedTotal'
    tf.RegisterGradient(name)(lambda op, gradient: -gradient)

    def model_fn(x):
        w = tf.get_variable('w', [], tf.float64, tf.constant_initializer(2.))
        with tf.get_default_graph().gradient_override_map({'Identity': name}):
            return tf.identity(tf.reduce_mean(w * x) + w * w)
    built = towers.build_towers(model_fn, np.zeros(4), samples.sgd(), 2, 'mean')
    assert samples.run(built, built.gradients[0][0]) == -4.


def test_a_term_of_the_first_call_alone():
    """The pattern `if not reuse: loss += l2`: that tower's loss has it, at that tower's weight."""
    calls = []

    def model_fn(x):
        calls.append(1)
        w = tf.get_variable('w', [], tf.float64, tf.constant_initializer(2.))
        loss = tf.reduce_mean(w * x)
        return loss + w * w if len(calls) == 1 else loss
    built = towers.build_towers(model_fn, np.ones(4), samples.sgd(), 2, 'mean', copies='reuse')
    assert samples.run(built, [built.gradients[0][0], built.loss]) == [3., 4.]


def with_shared_layers(x):
    """Two calls of a layer register the loss of its kernel once, on one device."""
    def layer(x, name, reuse=None):
        return slim.fully_connected(x, 3, None, weights_regularizer=l2, scope=name, reuse=reuse)
    out = layer(layer(layer(x, 'alone'), 'shared'), 'shared', True)
    return tf.reduce_mean(tf.square(out - 1.))


@pytest.mark.slow
def test_the_loss_of_a_shared_layer_counts_once():
    def plain(x):
        return with_shared_layers(x) + tf.add_n(tf.losses.get_regularization_losses())
    ours = check(with_shared_layers, plain=plain, regularization='add')
    assert str(ours.built.plan).count(
        '2 registered losses added, counted once, computed once a step') == 1
