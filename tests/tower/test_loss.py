"""Registered losses: which are computed once, which in every tower; and in a later build."""

import numpy as np
import pytest
import sample_models as samples
import tensorflow.compat.v1 as tf

import towers
from sample_models import sgd

X = np.float64([1., 2., 3., 6.])  # of two towers the means are 1.5 and 4.5
REPLICATED = dict(variables=towers.VariablePlacement('replicated'))


def registers(activity):
    """The mean of x w; registered are 5 w, and with `activity` the mean of 2 x w."""
    def model(x):
        w = tf.get_variable('w', [], tf.float64, tf.ones_initializer())
        tf.add_to_collection(tf.GraphKeys.REGULARIZATION_LOSSES, 5. * w)
        if activity:
            tf.add_to_collection(tf.GraphKeys.REGULARIZATION_LOSSES, 2. * tf.reduce_mean(x * w))
        return tf.reduce_mean(x * w)
    return model


@pytest.mark.parametrize('activity, gradient', [(False, 3. + 5.), (True, 3. + 5. + 2. * 3.)])
def test_a_registered_loss_of_activations_is_of_every_tower(activity, gradient):
    built = towers.build_towers(registers(activity), X, sgd(), 2, 'mean', regularization='add')
    assert samples.run(built, [built.loss, built.gradients[0][0], built.regularization_loss]) == [
        gradient, gradient, 5.]
    assert ('computed once a step' in built.plan.regularization) == (not activity)


@pytest.mark.parametrize('options', [
    {}, pytest.param(REPLICATED, marks=pytest.mark.slow)], ids=str)
def test_a_registered_loss_in_the_models_own_loss_counts_once(options):
    """The gradient of the mean of x w + 2.5 w^2."""
    def model(x):
        w = tf.get_variable('w', [], tf.float64, tf.ones_initializer(),
                            regularizer=lambda variable: 2.5 * variable * variable)
        return tf.reduce_mean(x * w) + tf.losses.get_regularization_loss()
    built = towers.build_towers(model, X, sgd(), 2, 'mean', **options)
    assert samples.run(built, [built.loss, built.gradients[0][0]]) == [3. + 2.5, 3. + 5.]


@pytest.mark.parametrize('copies', ['clone', 'reuse'])
def test_an_optimizer_that_clips_gets_a_registered_loss_with_the_batchs(copies):
    class Clipping(tf.train.GradientDescentOptimizer):
        def compute_gradients(self, *args, **kwargs):
            return [(tf.clip_by_value(gradient, -7., 7.), variable) for gradient, variable
                    in super(Clipping, self).compute_gradients(*args, **kwargs)]
    built = towers.build_towers(registers(False), X, Clipping(.1), 2, 'mean', copies=copies,
                                regularization='add')
    assert samples.run(built, built.gradients[0][0]) == 7.  # of 3 + 5


@pytest.mark.parametrize('options', [
    REPLICATED, pytest.param({}, marks=pytest.mark.slow)], ids=str)
def test_a_second_build_that_reuses_the_weights_has_their_losses(options):
    def model(x):
        w = tf.get_variable('w', [], tf.float64, tf.ones_initializer(),
                            regularizer=lambda variable: 2.5 * variable * variable)
        return tf.reduce_mean(x * w)
    options = dict(options, regularization='add')
    built = towers.build_towers(model, X, sgd(), 2, 'mean', **options)
    again = towers.build_towers(model, 2. * X, sgd(), 2, 'mean', reuse=built,
                                **options)
    assert samples.run(again, [built.loss, again.loss, again.gradients[0][0]]) == [
        3. + 2.5, 6. + 2.5, 6. + 5.]
