"""Registered losses that a later call of the model function leaves once too often."""

import numpy as np
import pytest
import sample_models as samples
import tensorflow.compat.v1 as tf
import tf_slim as slim

import towers
from sample_models import two_layers, sgd

VECTORS = samples.vectors(8)
REPLICATED = {'variables': towers.VariablePlacement('replicated')}


def layer(inputs, scope, **options):
    return slim.fully_connected(
        inputs, 6, tf.tanh, weights_regularizer=slim.l2_regularizer(.1), scope=scope,
        weights_initializer=tf.ones_initializer(), biases_initializer=None, **options)


def called_twice(total, scale=1.):
    """A slim layer that is called twice; `total` makes the loss of that of the data."""
    def model(features, targets):
        hidden = layer(layer(features, 'shared'), 'shared', reuse=True)
        return total(scale * tf.reduce_mean(tf.square(hidden[:, :3] - targets)))
    return model


def get_total_loss(data):
    tf.losses.add_loss(data)
    return tf.losses.get_total_loss()


def one_by_one(data):
    return data + sum(tf.losses.get_regularization_losses())


def in_a_list(data):
    return data + tf.reduce_sum(tf.losses.get_regularization_losses())


def by_hand(total):
    def model(features, targets):
        data = two_layers(features, targets)
        with tf.variable_scope('', reuse=True):
            weights = tf.get_variable('head', dtype=tf.float64)
        with tf.name_scope('mine/Regularizer'):
            loss = 0.1 * tf.nn.l2_loss(weights)
        tf.add_to_collection(tf.GraphKeys.REGULARIZATION_LOSSES, loss)
        return total(data)
    return model


@pytest.mark.parametrize('model, options, total', [
    (called_twice, REPLICATED, get_total_loss)] + [
        pytest.param(*case, marks=pytest.mark.slow) for case in [
            (by_hand, {'copies': 'reuse'}, in_a_list), (by_hand, {'copies': 'reuse'}, one_by_one),
            (by_hand, REPLICATED, in_a_list),
            (by_hand, REPLICATED, one_by_one)]])
def test_it_counts_once_in_the_models_own_loss(model, options, total):
    samples.check_against_one_device(model(total), VECTORS, None, 2,
                                     reduction='mean', **options)


@pytest.mark.parametrize('options', [
    {'copies': 'reuse'}, pytest.param(REPLICATED, marks=pytest.mark.slow)])
def test_it_counts_once_where_it_is_added(options):
    ours = samples.check_against_one_device(
        by_hand(lambda data: data), VECTORS, None, 4, reduction='mean', regularization='add',
        penalty=lambda unused: tf.losses.get_regularization_loss(), **options)
    assert ours.built.plan.regularization.startswith('1 registered loss added')


def test_it_is_refused_where_something_else_is_made_of_it():
    with pytest.raises(towers.ModelFunctionError, match='leaves 1 more registered losses'):
        towers.build_towers(called_twice(lambda data: data + tf.sqrt(
            tf.losses.get_regularization_losses()[-1])), VECTORS, sgd(), 2, **REPLICATED)


@pytest.mark.parametrize('regularization', ['none', 'add'])
def test_one_that_a_later_call_leaves_out_is_refused(regularization):
    calls = []

    def model(features, targets):
        data = two_layers(features, targets)
        if not calls:
            with tf.variable_scope('', reuse=True):
                tf.add_to_collection(tf.GraphKeys.REGULARIZATION_LOSSES, 0.1 * tf.nn.l2_loss(
                    tf.get_variable('head', dtype=tf.float64)))
        calls.append(features)
        return one_by_one(data) if regularization == 'none' else data
    with pytest.raises(towers.ModelFunctionError, match='tower 1 leaves 1 fewer registered losses'):
        towers.build_towers(model, VECTORS, sgd(), 2, copies='reuse',
                            regularization=regularization)


@pytest.mark.parametrize('options, total', [
    (dict(REPLICATED, regularization='add'), lambda data: data),
    pytest.param(REPLICATED, one_by_one, marks=pytest.mark.slow)])
def test_a_second_build_that_reuses_the_weights(options, total):
    def losses(session, steps):
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        return [session.run(step)[0] for step in steps * 2]
    first, second = called_twice(total), called_twice(total, 2.)
    built = towers.build_towers(first, VECTORS, sgd(), 2, 'mean', **options)
    again = towers.build_towers(second, VECTORS, sgd(), 2, 'mean', reuse=built, name='again',
                                **options)
    with tf.Session(config=towers.session_config(built.devices)) as session:
        ours = losses(session, [(built.loss, built.train_op), (again.loss, again.train_op)])
    with tf.Graph().as_default(), tf.Session() as session:
        steps = []
        for model, reuse in ((first, False), (second, True)):
            with tf.variable_scope('', reuse=reuse):
                data = model(*map(tf.constant, VECTORS))
            if 'regularization' in options:
                data += tf.losses.get_regularization_loss()
            steps.append((data, sgd().minimize(data)))
        np.testing.assert_allclose(ours, losses(session, steps), rtol=1e-9)
