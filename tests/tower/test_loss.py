"""towers.tower.loss: which registered losses are computed once, and which in every tower."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers

X = np.float64([1., 2., 3., 6.])  # of two towers the means are 1.5 and 4.5


def registers(activity):
    """The mean of x w; registered are 5 w, and with `activity` the mean of 2 x w."""
    def model(x):
        w = tf.get_variable('w', [], tf.float64, tf.ones_initializer())
        tf.add_to_collection(tf.GraphKeys.REGULARIZATION_LOSSES, 5. * w)
        if activity:
            tf.add_to_collection(tf.GraphKeys.REGULARIZATION_LOSSES, 2. * tf.reduce_mean(x * w))
        return tf.reduce_mean(x * w)
    return model


@pytest.mark.parametrize('copies', ['clone', 'reuse'])
@pytest.mark.parametrize('activity, gradient, once', [(False, 3. + 5., True),
                                                      (True, 3. + 5. + 2. * 3., False)])
def test_a_registered_loss_of_activations_is_of_every_tower(activity, gradient, once, copies):
    built = towers.build_towers(registers(activity), tf.constant(X),
                                tf.train.GradientDescentOptimizer(.1), 2, 'mean',
                                regularization='add', copies=copies)
    with tf.Session(config=towers.session_config(2)) as session:
        session.run(tf.global_variables_initializer())
        assert session.run([built.loss, built.gradients[0][0]]) == [gradient, gradient]
        assert session.run(built.regularization_loss) == 5.
    assert ('computed once a step' in built.plan.regularization) == (once and copies == 'clone')


@pytest.mark.parametrize('variable_device', [None, 'replicated'])
def test_a_loss_that_the_first_tower_registered_is_of_every_towers_loss(variable_device):
    """The gradient of the mean of x w + 2.5 w^2; a later tower has a replica of w, or none."""
    def model(x):
        w = tf.get_variable('w', [], tf.float64, tf.ones_initializer(),
                            regularizer=lambda variable: 2.5 * variable * variable)
        return tf.reduce_mean(x * w) + tf.losses.get_regularization_loss()
    built = towers.build_towers(model, tf.constant(X), tf.train.GradientDescentOptimizer(.1), 2,
                                'mean', copies='reuse',
                                variables=towers.VariablePlacement(variable_device))
    with tf.Session(config=towers.session_config(2)) as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        assert session.run([built.loss, built.gradients[0][0]]) == [3. + 2.5, 3. + 5.]


@pytest.mark.parametrize('copies', ['clone', 'reuse'])
def test_an_optimizer_that_clips_gets_a_registered_loss_with_the_batchs(copies):
    class Clipping(tf.train.GradientDescentOptimizer):
        def compute_gradients(self, *args, **kwargs):
            return [(tf.clip_by_value(gradient, -7., 7.), variable) for gradient, variable
                    in super(Clipping, self).compute_gradients(*args, **kwargs)]
    built = towers.build_towers(registers(False), tf.constant(X), Clipping(.1), 2, 'mean',
                                regularization='add', copies=copies)
    with tf.Session(config=towers.session_config(2)) as session:
        session.run(tf.global_variables_initializer())
        assert session.run(built.gradients[0][0]) == 7.  # of 3 + 5
