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
