"""Terms of the weights in the loss count once, by whatever way they are registered or added."""

import itertools

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
import tf_slim as slim
from case_marks import first_fast

import sample_models as samples
import towers
from sample_models import sgd, switched

X = np.arange(24, dtype=np.float64).reshape(8, 3) / 10. - 1.
FOUR = np.float64([1., 2., 3., 6.])  # of two towers the means are 1.5 and 4.5
KEY = tf.GraphKeys.REGULARIZATION_LOSSES
REPLICATED = dict(variables=towers.VariablePlacement('replicated'))
keras = tf.keras


def l2(w):
    return 0.3 * tf.reduce_sum(tf.square(w))


# ---- ways to have a registered L2 loss of a kernel [3, 1] ----------------------------------------

def by_get_variable(x):
    return tf.matmul(x, tf.get_variable('w', [3, 1], x.dtype, regularizer=l2))


def by_keras(x):
    """A layer whose losses the program registers, as it has those of its other layers."""
    layer = keras.layers.Dense(1, use_bias=False, kernel_regularizer=l2, dtype=x.dtype.name,
                               name='keras')
    out = layer(x)
    for loss in layer.losses:
        tf.add_to_collection(KEY, loss)
    return out


def with_a_shared_layer(x):
    """Two calls of a layer register the loss of its kernel once, on one device."""
    def layer(x, reuse=None):
        return slim.fully_connected(x, 3, None, weights_regularizer=l2, scope='s', reuse=reuse)
    return layer(layer(x), True)


WAYS = [with_a_shared_layer, by_get_variable, by_keras]


def check(model_fn, num_towers=2, plain=None, **options):
    """Asserts that towers train as plain TF1 does; `plain` is the model of one device."""
    ours = samples.on_towers(model_fn, (X,), samples.momentum, num_towers, steps=2,
                             reduction='mean', **options)
    theirs = samples.one_device(plain or model_fn, (X,), samples.momentum, ours.initial, steps=2)
    samples.assert_equal_runs(ours, theirs, 1e-12)
    return ours


@pytest.mark.parametrize('is_in_loss', first_fast(1, [False, True]))
@pytest.mark.parametrize('way', first_fast(1, WAYS), ids=lambda way: way.__name__)
def test_registered_losses_count_once(way, is_in_loss):
    def plain(x):
        return tf.reduce_mean(tf.square(way(x) - 1.)) + tf.losses.get_regularization_loss()

    def data(x):
        return tf.reduce_mean(tf.square(way(x) - 1.))
    ours = check(plain if is_in_loss else data, num_towers=3, plain=plain, remainder='weight',
                 regularization='add')
    assert ours.built.plan.line('regularization') == (
        "in the model's own loss, counted once" if is_in_loss else
        '1 registered loss added, counted once')


@pytest.mark.slow
def test_keras_losses_that_the_loss_has_already_are_not_added_again():
    """Keras makes them anew each time that it is asked for them."""
    def model_fn(x):
        layer = keras.layers.Dense(1, kernel_regularizer=l2, dtype='float64', name='dense')
        net = keras.Sequential([layer], name='net')
        outputs = tf.cast(net(tf.cast(x, tf.float64)), tf.float64)
        return tf.reduce_mean(tf.square(outputs - 1.)) + tf.add_n(net.losses)
    ours = check(model_fn, regularization='add')
    assert ours.built.plan.line('regularization') == "in the model's own loss, counted once"


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


class Clipping(tf.train.GradientDescentOptimizer):
    def compute_gradients(self, *args, **kwargs):
        return [(tf.clip_by_value(gradient, -7., 7.), variable) for gradient, variable
                in super(Clipping, self).compute_gradients(*args, **kwargs)]


@pytest.mark.parametrize('activity, optimizer, gradient', [
    (True, sgd(), 3. + 5. + 2. * 3.), (False, Clipping(.1), 7.),
    pytest.param(False, sgd(), 3. + 5., marks=pytest.mark.slow)])
def test_a_registered_loss_of_activations_is_of_each_shard(activity, optimizer, gradient):
    """The mean of x w; registered are 5 w, and with `activity` the mean of 2 x w."""
    def model(x):
        w = tf.get_variable('w', [], tf.float64, tf.ones_initializer())
        tf.add_to_collection(KEY, 5. * w)
        if activity:
            tf.add_to_collection(KEY, 2. * tf.reduce_mean(x * w))
        return tf.reduce_mean(x * w)
    built = towers.build_towers(model, FOUR, optimizer, 2, 'mean', regularization='add')
    assert samples.run(built, built.gradients[0][0]) == gradient


@pytest.mark.parametrize('options', first_fast(1, [REPLICATED, {}]), ids=str)
def test_a_second_build_that_reuses_the_weights_has_their_losses(options):
    def model(x):
        w = tf.get_variable('w', [], tf.float64, tf.ones_initializer(),
                            regularizer=lambda variable: 2.5 * variable * variable)
        return tf.reduce_mean(x * w)
    options = dict(options, regularization='add')
    built = towers.build_towers(model, FOUR, sgd(), 2, 'mean', **options)
    again = towers.build_towers(model, 2. * FOUR, sgd(), 2, 'mean', reuse=built, **options)
    assert samples.run(again, [built.loss, again.loss, again.gradients[0][0]]) == [
        3. + 2.5, 6. + 2.5, 6. + 5.]


# ---- what a model function draws itself ----------------------------------------------------------

@pytest.mark.parametrize('source', first_fast(1, ['iterator', 'py_func']))
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
    built = towers.build_towers(model_fn, np.zeros(8), sgd(), 2, 'mean')
    # d/dw of mean(draw) w^2 at w = 2.
    assert samples.run(built, built.gradients[0][0]) == (1 + 2) / 2. * 2 * 2.


@pytest.mark.parametrize('v2', first_fast(1, [True, False]))
def test_terms_that_depend_on_the_data_by_control_alone(v2):
    """Each shard takes a branch of its own: 2 l2 here, 1 l2 there."""
    def model_fn(x):
        w = tf.get_variable('w', [], tf.float64, tf.constant_initializer(2.))
        factor = tf.cond(tf.reduce_mean(x) > 0., lambda: tf.constant(2., tf.float64),
                         lambda: tf.constant(1., tf.float64))
        return tf.reduce_mean(w * x) + factor * 0.5 * w * w
    with switched('control_flow_v2', v2):
        built = towers.build_towers(model_fn, np.float64([1., 1., -1., -1.]), sgd(), 2, 'mean')
    # (1 + 2 w) / 2 + (-1 + w) / 2 with w = 2; loss (2 + 4) / 2 + (-2 + 2) / 2
    assert samples.run(built, [built.gradients[0][0], built.loss]) == [3., 3.]


def test_a_term_of_the_first_call_alone():
    """The pattern `if not reuse: loss += l2`: that tower's loss has it, at that tower's weight."""
    calls = []

    def model_fn(x):
        calls.append(1)
        w = tf.get_variable('w', [], tf.float64, tf.constant_initializer(2.))
        loss = tf.reduce_mean(w * x)
        return loss + w * w if len(calls) == 1 else loss
    built = towers.build_towers(model_fn, np.ones(4), sgd(), 2, 'mean', copies='reuse')
    assert samples.run(built, [built.gradients[0][0], built.loss]) == [3., 4.]
