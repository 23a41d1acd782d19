"""What waits for a step on parameter servers reads the weights from after it, as on one machine."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.cluster.member import start_server
from towers.cluster.reads_after_server_writes import read_after_writes
from towers.errors import ClusterError
from one_process import addresses, together
from sample_models import switched


def two_weights(numbers):
    """The gradient of each weight is the mean of the numbers; TF1's reference variables."""
    weights = [tf.get_variable(name, [2], tf.float64, tf.zeros_initializer(), use_resource=False)
               for name in ('a', 'b')]
    return tf.reduce_mean(numbers) * (tf.reduce_sum(weights[0]) + tf.reduce_sum(weights[1]))


def copies():
    return [tf.get_variable('copy_' + name, [2], tf.float64, tf.zeros_initializer(),
                            trainable=False, use_resource=False) for name in ('a', 'b')]


def clipped(built):
    return tf.group(*[tf.assign(w, tf.clip_by_value(w, -1.5, 1.5)) for w in built.variables])


def average(built):
    averages = tf.train.ExponentialMovingAverage(0.)
    return averages.apply(built.variables)


def of_two_servers(built):
    """One operation takes values from both servers."""
    a, b = built.variables
    return tf.group(*[tf.assign(copy, a + 10. * b) for copy in copies()])


def read_in_a_loop(built):
    """A loop that counts to three adds up the weights."""
    total = tf.while_loop(lambda i, s: i < 3, lambda i, s: (i + 1, s + built.variables[0]),
                          [tf.constant(0), tf.zeros([2], tf.float64)])[1]
    return tf.group(*[tf.assign(copy, total) for copy in copies()])


def fetched(session, names):
    variables = [v for v in tf.global_variables() if v.op.name in names]
    return {v.op.name: value for v, value in zip(variables, session.run_step_fn(
        lambda step_context: step_context.session.run(variables)))}


AFTER_TWO_STEPS = {  # each step subtracts 1
    clipped: {'a': -1.5, 'b': -1.5},
    average: {'a': -2., 'a/ExponentialMovingAverage': -2., 'b/ExponentialMovingAverage': -2.},
    of_two_servers: {'copy_a': -22., 'copy_b': -22.},
    read_in_a_loop: {'copy_a': -6., 'copy_b': -6.}}


@pytest.mark.parametrize('on_servers, after', [
    (True, of_two_servers), (True, read_in_a_loop), (False, average),
    pytest.param(True, average, marks=pytest.mark.slow),
    pytest.param(True, clipped, marks=pytest.mark.slow)])
def test_what_waits_for_the_step_sees_what_it_wrote(graph, on_servers, after):
    """By hand; the same program without a cluster gives the same."""
    expected = AFTER_TWO_STEPS[after]
    cluster, (worker, *ps) = None, addresses(3)
    if on_servers:
        cluster = towers.Cluster('ps', [worker], ps)
        servers = [start_server(each, each.session_config(tf.ConfigProto())) for each in (
            towers.Cluster('ps', [worker], ps, 'ps', rank) for rank in range(2))]
        assert len(servers) == 2
    with switched('control_flow_v2', False):
        built = towers.build_towers(two_weights, tf.ones([4], tf.float64),
                                    tf.train.GradientDescentOptimizer(1.), 1, 'mean',
                                    cluster=cluster)
        with tf.control_dependencies([built.train_op]):
            step = after(built)
    if on_servers:
        with towers.join(cluster, built, start_timeout=30.) as member, member.session() as session:
            values = [session.run(step), session.run(step), fetched(session, expected)][-1]
    else:
        with tf.train.MonitoredSession() as session:
            values = [session.run(step), session.run(step), fetched(session, expected)][-1]
    assert sorted(values) == sorted(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(values[name], [value] * 2, err_msg=name)


@pytest.mark.slow
def test_the_other_worker_sees_the_chiefs_update():
    """The gradient is the mean of 1 and 2. `w` is read as a whole, and by `read_value`."""
    workers, ps = addresses(2, 1)
    make = lambda job, rank: towers.Cluster('ps', workers, ps, job, rank)
    server = start_server(make('ps', 0), make('ps', 0).session_config(tf.ConfigProto()))
    assert server

    def work(rank):
        with tf.Graph().as_default():
            built = towers.build_towers(
                two_weights, tf.fill([4], tf.constant(1. + rank, tf.float64)),
                tf.train.GradientDescentOptimizer(1.), 1, 'mean', cluster=make('worker', rank))
            with tf.control_dependencies([built.train_op]):
                seen = [tf.identity(built.variables[0]), built.variables[1].read_value()]
            with towers.join(make('worker', rank), built, start_timeout=30.) as member:
                with member.session() as session:
                    return [value.tolist() for value in session.run(seen)]
    assert together(work, 2) == [[[-1.5, -1.5], [-1.5, -1.5]]] * 2


def test_what_does_not_wait_is_left_as_it_is(graph):
    """The forward and backward pass, the update and its slots: no read is added."""
    built = towers.build_towers(two_weights, tf.ones([4], tf.float64),
                                tf.train.AdamOptimizer(1.), 2, 'mean',
                                global_step=tf.train.get_or_create_global_step())
    tf.train.Saver()
    tf.global_variables_initializer()
    before = len(graph.get_operations())
    assert read_after_writes(graph, tf.global_variables(), built.train_op) == []
    assert len(graph.get_operations()) == before


def test_reads_are_shared_and_made_once(graph):
    w = tf.get_variable('w', [2], use_resource=False)
    update = tf.assign_sub(w, [1., 1.])
    with tf.control_dependencies([update]):
        first, second = w + 1., w * 2.
    [read] = read_after_writes(graph, [w, w])
    assert read.type == 'Identity' and read.inputs[0].op is w.op
    assert read.control_inputs == [update.op] and read.colocation_groups() == [b'loc:@w']
    assert [op.op.inputs[0].op is read for op in (first, second)] == [True, True]


@pytest.mark.parametrize('waits_for_both', [True, False])
def test_a_value_of_another_shape_that_is_made_before_the_write(graph, waits_for_both):
    w = tf.get_variable('w', [2], use_resource=False)
    flat = tf.reshape(w, [1, 2])
    if not waits_for_both:
        tf.reduce_sum(flat)
    with tf.control_dependencies([tf.assign_sub(w, [1., 1.])]):
        tf.add(flat, 1., name='late')
    if waits_for_both:
        [read] = read_after_writes(graph, [w])
        assert flat.op.inputs[0].op is read
        return
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
