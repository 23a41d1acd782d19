"""What waits for a step on parameter servers reads the weights from after it, as on one machine."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.cluster.reads_after_server_writes import read_after_writes
from towers.errors import ClusterError
from one_process import serve, together
from sample_models import switched


def build(cluster=None):
    """The gradient of each weight is the mean of the numbers, which are 1 on worker 0 and 2 on
    worker 1; the weights are TF1's reference variables."""
    weights = [tf.get_variable(name, [2], tf.float64, tf.zeros_initializer(), use_resource=False)
               for name in ('a', 'b')]
    numbers = tf.fill([4], tf.constant(2. if cluster and cluster.rank else 1., tf.float64))
    return towers.build_towers(
        lambda x: tf.reduce_mean(x) * (tf.reduce_sum(weights[0]) + tf.reduce_sum(weights[1])),
        numbers, tf.train.GradientDescentOptimizer(1.), 1, 'mean', cluster=cluster)


def copied(value):
    return tf.assign(tf.get_variable('copy', [2], tf.float64, tf.zeros_initializer(),
                                     trainable=False, use_resource=False), value)


def average(built):
    return tf.train.ExponentialMovingAverage(0.).apply(built.variables)


def of_two_servers(built):
    """One operation takes values from both servers."""
    a, b = built.variables
    return copied(a + 10. * b)


AFTER_TWO_STEPS = {  # each step subtracts 1
    average: {'a': -2., 'a/ExponentialMovingAverage': -2., 'b/ExponentialMovingAverage': -2.},
    of_two_servers: {'copy': -22.}}


@pytest.mark.parametrize('after', [
    of_two_servers, pytest.param(average, marks=pytest.mark.slow)])
def test_what_waits_for_the_step_sees_what_it_wrote(graph, after):
    expected, cluster = AFTER_TWO_STEPS[after], serve(1, 2)(0)
    with switched('control_flow_v2', False):
        built = build(cluster)
        with tf.control_dependencies([built.train_op]):
            step = after(built)
    fetched = [variable for variable in tf.global_variables() if variable.op.name in expected]
    with towers.join(cluster, built, start_timeout=30.) as member, member.session() as session:
        for _ in range(2):
            session.run(step)
        values = session.run_step_fn(lambda step_context: step_context.session.run(fetched))
    assert len(values) == len(expected)
    for variable, value in zip(fetched, values):
        np.testing.assert_array_equal(value, [expected[variable.op.name]] * 2)


def test_a_value_of_another_shape_that_others_take_before_the_write_is_refused(graph):
    w = tf.get_variable('w', [2], use_resource=False)
    flat = tf.reshape(w, [1, 2])
    tf.reduce_sum(flat)
    with tf.control_dependencies([tf.assign_sub(w, [1., 1.])]):
        tf.add(flat, 1., name='late')
    with pytest.raises(ClusterError, match=(
            "^'late' takes the value of the variable 'w' after a write that it waits for. 'w' is a "
            "reference variable on a parameter server, .* 'Reshape' passes its value on to what "
            'does not wait for that, too. Make it with .*use_resource=True')):
        read_after_writes(graph, [w])
