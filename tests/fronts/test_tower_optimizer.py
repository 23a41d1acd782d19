"""`TowerOptimizer` outside of `replicate_model_fn`: it only passes on."""

from estimator_runs import needs_estimator
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers


def square_loss():
    w = tf.get_variable('w', initializer=tf.constant([3., 4.], tf.float64))
    return tf.reduce_sum(tf.square(w)) / 2, w


def test_it_is_an_optimizer_and_passes_on():
    loss, w = square_loss()
    real = tf.train.MomentumOptimizer(0.125, 0.5)
    optimizer = towers.TowerOptimizer(real)
    assert isinstance(optimizer, tf.train.Optimizer)
    step = tf.train.get_or_create_global_step()
    train_op = optimizer.minimize(loss, global_step=step)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(train_op)
        session.run(train_op)
        # m = w, then m / 2 + 7/8 w; w - m / 8
        assert session.run(w) == pytest.approx(np.array([3., 4.]) * (7 / 8. - 11 / 64.), rel=1e-14)
        assert session.run(step) == 2
    assert optimizer.get_name() == 'Momentum'
    assert optimizer.get_slot_names() == ['momentum']
    assert optimizer.get_slot(w, 'momentum') is real.get_slot(w, 'momentum')
    assert [v.op.name for v in optimizer.variables()] == ['w/Momentum']


def test_a_minimize_of_its_own_is_passed_on():
    loss, w = square_loss()
    train_op = towers.TowerOptimizer(Halving(1.)).minimize(loss)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(train_op)
        assert session.run(w).tolist() == [1.5, 2.]


def test_a_function_is_called_once():
    made = []

    def make():
        made.append(tf.train.GradientDescentOptimizer(tf.constant(1., tf.float64)))
        return made[-1]
    optimizer = towers.TowerOptimizer(make)
    assert not made
    loss, w = square_loss()
    train_op = optimizer.minimize(loss)
    assert optimizer.get_name() == 'GradientDescent' and len(made) == 1
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(train_op)
        assert session.run(w).tolist() == [0., 0.]


@pytest.mark.parametrize('given, text', [
    (3, '^optimizer_or_optimizer_fn=3 has no'),
    (None, r'are none\), or a function without arguments that returns one\.$'),
    (lambda: 3, r'^optimizer_or_optimizer_fn\(\) of TowerOptimizer=3 has no .*are none\)\.$')])
def test_what_is_no_optimizer(given, text):
    with pytest.raises(towers.InvalidArgumentError, match=text) as raised:
        towers.TowerOptimizer(given).minimize(square_loss()[0])
    assert isinstance(raised.value, ValueError)


class Halving(tf.train.GradientDescentOptimizer):
    """Halves the gradients in its own `minimize`."""

    def minimize(self, loss, global_step=None, var_list=None):
        return self.apply_gradients([(gradient / 2, v) for gradient, v in self.compute_gradients(
            loss, var_list)], global_step)


@needs_estimator
def test_a_minimize_of_its_own_is_refused_in_towers():
    def model_fn(features, labels, mode):
        del labels
        loss, _ = square_loss()
        loss *= tf.reduce_mean(features)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=towers.TowerOptimizer(
            Halving(1.)).minimize(loss))
    with pytest.raises(
            towers.InvalidArgumentError,
                match='Halving has a minimize of its own, which replicate'):
        towers.replicate_model_fn(model_fn, devices=['/cpu:0', '/cpu:1'])(
            tf.ones([4], tf.float64), None, tf.estimator.ModeKeys.TRAIN)
