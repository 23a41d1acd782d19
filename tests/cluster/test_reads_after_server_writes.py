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


def clipped(built):
    return tf.group(*[tf.assign(w, tf.clip_by_value(w, -1.5, 1.5)) for w in built.variables])


def average(built):
    return tf.train.ExponentialMovingAverage(0.).apply(built.variables)


def of_two_servers(built):
    """One operation takes values from both servers."""
    a, b = built.variables
    return copied(a + 10. * b)


def read_in_a_loop(built):
    """A loop that counts to three adds up the weights."""
    return copied(tf.while_loop(lambda i, s: i < 3, lambda i, s: (i + 1, s + built.variables[0]),
                                [tf.constant(0), tf.zeros([2], tf.float64)])[1])


AFTER_TWO_STEPS = {  # each step subtracts 1
    clipped: {'a': -1.5, 'b': -1.5},
    average: {'a': -2., 'a/ExponentialMovingAverage': -2., 'b/ExponentialMovingAverage': -2.},
    of_two_servers: {'copy': -22.}, read_in_a_loop: {'copy': -6.}}


@pytest.mark.parametrize('after', [
    of_two_servers, read_in_a_loop, pytest.param(average, marks=pytest.mark.slow),
    pytest.param(clipped, marks=pytest.mark.slow)])
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


@pytest.mark.slow
def test_the_other_worker_sees_the_chiefs_update():
    """The gradient is the mean of 1 and 2. `w` is read as a whole, and by `read_value`."""
    cluster_of = serve(2)

    def work(rank):
        with tf.Graph().as_default():
            built = build(cluster_of(rank))
            with tf.control_dependencies([built.train_op]):
                seen = [tf.identity(built.variables[0]), built.variables[1].read_value()]
            with towers.join(cluster_of(rank), built, start_timeout=30.) as member:
                with member.session() as session:
                    return [value.tolist() for value in session.run(seen)]
    assert together(work, 2) == [[[-1.5, -1.5], [-1.5, -1.5]]] * 2


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


def test_a_write_in_the_same_branch_is_refused(graph):
    w = tf.get_variable('w', [2], use_resource=False)

    def branch():
        with tf.control_dependencies([tf.assign_sub(w, [1., 1.], name='write')]):
            return tf.add(w, 1., name='late')
    with switched('control_flow_v2', False):
        tf.cond(tf.placeholder(tf.bool, []), branch, lambda: tf.zeros([2]))
    with pytest.raises(ClusterError, match="'cond/late' takes .* 'cond/write' writes it in the "
                       'same loop or branch'):
        read_after_writes(graph, [w])
