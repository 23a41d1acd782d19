"""What is written beside the step of synchronous parameter servers, and what comes after the
chief's last one."""

import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from case_marks import first_fast

import towers
from towers.cluster.server_placement import check_writes, read_after_writes, spread
from towers.errors import ClusterError
from one_process import StopWithoutSignals, halving, in_sessions, serve, together

CHIEF = towers.Cluster('ps', ['a:1', 'b:1'], ['c:1'])


@pytest.mark.slow
def test_a_loss_is_of_the_weights_before_the_update():
    """A part of the loss that no gradient is of reads the weight 0.4 seconds late."""
    def slowly(number):
        time.sleep(0.4)
        return number

    def build(cluster):
        def model_fn(numbers):
            w = tf.get_variable('w', [], tf.float64, tf.constant_initializer(8.))
            late = tf.py_func(slowly, [tf.reduce_sum(numbers)], tf.float64)
            with tf.control_dependencies([late]):
                read_late = tf.stop_gradient(w.read_value())
            return tf.reduce_mean(numbers) * w * w / 2. + read_late
        return towers.build_towers(model_fn, tf.constant([1.], tf.float64),
                                   tf.train.GradientDescentOptimizer(.5), 1, 'mean',
                                   cluster=cluster)
    found = in_sessions(serve(2), lambda session, built, rank: [
        session.run([built.loss, built.train_op])[0] for _ in range(2)], build)
    assert found == [[40., 12.]] * 2  # 8 * 8 / 2 + 8, 4 * 4 / 2 + 4


def test_what_is_loaded_and_what_reads_the_weights_is_no_write_beside_the_step(graph):
    built = halving(CHIEF, global_step=tf.train.get_or_create_global_step())
    with tf.control_dependencies([built.train_op]):
        tf.train.ExponentialMovingAverage(0.5).apply(built.variables)
    tf.global_variables_initializer()
    saver = tf.train.Saver()
    tf.assign(built.variables[0], tf.placeholder(tf.float64, []))
    tf.assign_add(built.global_step, 1)
    check_writes(graph, built)
    assert saver


@pytest.mark.parametrize('count, synchronous', first_fast(2, [(2, True), (1, True), (2, False)]))
def test_weights_that_are_clipped_beside_the_step_are_refused(graph, count, synchronous):
    """With one worker, or asynchronous ones, they may be."""
    cluster = towers.Cluster('ps', ['a:1', 'b:1'][:count], ['c:1'], synchronous=synchronous)
    built = halving(cluster)
    [w] = built.variables
    tf.assign(w, tf.clip_by_value(w, -1., 1.))
    if count > 1 and synchronous:
        with pytest.raises(ClusterError, match=(
                "writes the trained variable 'w' beside built.train_op, and other workers may read "
                'it before or after that: put the write into the collection UPDATE_OPS')):
            spread(cluster, built, tf.train.Scaffold())
    else:
        spread(cluster, built, tf.train.Scaffold())


@pytest.mark.slow
def test_no_step_seems_to_be_made_after_the_chiefs_last():
    """The chief makes two; no hook sees the steps of the other."""
    cluster_of = serve(2)

    def work(rank):
        with tf.Graph().as_default():
            cluster = cluster_of(rank)
            built = halving(cluster)
            stop, losses = StopWithoutSignals(cluster, built), []
            fetches = [built.loss, built.train_op]
            with towers.join(cluster, built, start_timeout=30., dead_after=20.) as member:
                with member.session([stop]) as session:
                    while not session.should_stop() and (rank or len(losses) < 2):
                        losses.append(session.run_step_fn(
                            lambda step_context: step_context.session.run(fetches))[0])
            return losses, stop.is_told
    assert together(work, 2) == [([8., 2.], True), ([24., 6.], True)]


@pytest.mark.slow
def test_what_waits_for_the_step_sees_what_it_wrote_on_both_servers(graph):
    """Each step subtracts 1 from both weights, TF1's reference variables."""
    cluster = serve(1, 2)(0)
    a, b = [tf.get_variable(name, [2], tf.float64, tf.zeros_initializer(), use_resource=False)
            for name in ('a', 'b')]
    built = towers.build_towers(
        lambda x: tf.reduce_mean(x) * (tf.reduce_sum(a) + tf.reduce_sum(b)),
        tf.ones([4], tf.float64), tf.train.GradientDescentOptimizer(1.), 1, 'mean',
        cluster=cluster)
    copy = tf.get_variable('copy', [2], tf.float64, tf.zeros_initializer(), trainable=False)
    with tf.control_dependencies([built.train_op]):
        step = tf.assign(copy, a + 10. * b)
    with towers.join(cluster, built, start_timeout=30.) as member, member.session() as session:
        for count in (1, 2):
            session.run(step)
            np.testing.assert_array_equal(session.run(copy), [-11. * count] * 2)


def test_a_value_of_another_shape_is_refused(graph):
    w = tf.get_variable('w', [2], use_resource=False)
    flat = tf.reshape(w, [1, 2])
    with tf.control_dependencies([tf.assign_sub(w, [1., 1.])]):
        tf.add(flat, 1., name='late')
    with pytest.raises(ClusterError, match=(
            "^'late' takes the value of the variable 'w' after a write that it waits for. 'w' is a "
            'reference variable on a parameter server, .* Make it with .*use_resource=True')):
        read_after_writes(graph, [w])
