"""Updates that ride on the train op: what they wait for, and when they are left out."""

import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.cluster.member import start_server
from towers.reduce.update_gates import held_back
from one_process import addresses, together, train


def variable(name, resource=True):
    return tf.get_variable(name, [], tf.float32, tf.zeros_initializer(), use_resource=resource)


def in_a_branch(one):
    return tf.cond(tf.constant(True), lambda: tf.assign_add(one, 1.), lambda: tf.constant(0.))


def in_a_loop(one):
    def add(turn):
        with tf.control_dependencies([tf.assign_add(one, 0.5)]):
            return turn + 1
    return tf.while_loop(lambda turn: turn < 2, add, [tf.constant(0)])


def in_a_group(one):
    return tf.group(tf.assign_sub(one, -1.), name='both')


@pytest.mark.parametrize('make, resource, is_v1', [
    (in_a_group, False, True), (in_a_group, True, False), (in_a_branch, True, True),
    (in_a_branch, True, False), (in_a_loop, False, True), (in_a_loop, True, False)])
def test_an_update_waits_and_is_left_out(make, resource, is_v1):
    """Each adds 1 to a variable where there is a batch, after another variable has got its value.

    Control flow v2, which a TF1 program turns off, takes no reference variables."""
    was_v2 = tf.control_flow_v2_enabled()
    (tf.disable_control_flow_v2 if is_v1 else tf.enable_control_flow_v2)()
    try:
        one = variable('one', resource)
        update = make(one)
    finally:
        (tf.enable_control_flow_v2 if was_v2 else tf.disable_control_flow_v2)()
    seen, fail = variable('seen'), tf.placeholder(tf.float32, [])
    active = tf.placeholder(tf.float32, [])
    with tf.control_dependencies([tf.check_numerics(fail, 'the gate')]):
        gate = tf.assign(seen, one + 10.).op  # before the update
    [end], _ = held_back([update], [gate], active, [])
    with tf.control_dependencies([end]):
        goes_on = tf.constant(5)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for has_batch, value in ((1., 1.), (0., 1.), (1., 2.)):
            assert session.run(goes_on, {active: has_batch, fail: 0.}) == 5
            assert session.run(one) == value
        assert session.run(seen) == 11.
        with pytest.raises(tf.errors.InvalidArgumentError):
            session.run(goes_on, {active: 1., fail: np.inf})
        assert session.run(one) == 2.


def test_what_is_made_later_and_waits_for_an_update_runs_in_either_case():
    one, active = variable('one'), tf.placeholder(tf.float32, [])
    update = tf.assign_add(one, 1.)
    [end], redirect = held_back([update], [], active, [])
    with tf.control_dependencies([update]):
        later = tf.constant(5)
    with tf.control_dependencies([later, end]):
        goes_on = tf.constant(6)
    for _ in range(2):  # the second time there is nothing to do
        redirect()
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for has_batch, value in ((1., 1.), (0., 1.), (1., 2.)):
            assert session.run([later, goes_on], {active: has_batch}) == [5, 6]
            assert session.run(one) == value


def test_without_active_it_only_waits():
    one, fail = variable('one'), tf.placeholder(tf.float32, [])
    update = in_a_group(one)
    assert held_back([update], [], None, []) == ([update], None)
    gate = tf.check_numerics(fail, 'the gate').op
    assert held_back([update], [gate], None, []) == ([update], None)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        with pytest.raises(tf.errors.InvalidArgumentError):
            session.run(update, {fail: np.inf})
        assert session.run(one) == 0.
        session.run(update, {fail: 0.})
        assert session.run(one) == 1.


def test_what_the_loss_takes_along_is_left_as_it_is():
    """A loss that is fetched without a step must not wait for all machines."""
    one = variable('one')
    update = tf.assign_add(one, 1.)
    with tf.control_dependencies([update]):
        loss = tf.identity(one)
    gate = tf.check_numerics(tf.constant(np.inf), 'the gate').op
    held_back([update], [gate], None, [loss])
    assert gate not in update.op.control_inputs
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        assert session.run(loss) == 1.


@pytest.mark.slow
def test_the_chiefs_moving_average_is_written_after_all_workers_have_read_it():
    """It is on the server: a slow worker read what the chief had written in the same step.

    By hand, with x_0 = 1 and x_1 = 3 and the average m: the gradient is the mean of (x_r - m); the
    chief's update is m <- m + (1 - m) / 2."""
    workers, ps = addresses(2, 1)
    make = lambda job, rank: towers.Cluster('ps', workers, ps, job, rank)
    server = start_server(make('ps', 0), make('ps', 0).session_config(tf.ConfigProto()))
    assert server

    def model_fn(x):
        weight, mean = [tf.get_variable(name, [], tf.float64, tf.zeros_initializer(),
                                        use_resource=True, trainable=name == 'w')
                        for name in ('w', 'mean')]
        first = tf.reduce_mean(x)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS,
                             tf.assign_add(mean, 0.5 * (first - mean)))

        def late(number):
            time.sleep(0.3 if number > 2. else 0.)
            return number
        with tf.control_dependencies([tf.py_func(late, [first], tf.float64)]):
            return weight * (first - mean.read_value())
    results = together(lambda rank: train(
        make('worker', rank), model_fn, (np.array([1. + 2. * rank]),),
        lambda: tf.train.GradientDescentOptimizer(1.), 3), 2)
    weight = mean = 0.
    for _ in range(3):
        weight -= 2. - mean
        mean += 0.5 * (1. - mean)
    assert results[0]['last']['w'] == pytest.approx(weight, rel=1e-12)
    assert results[0]['last']['mean'] == pytest.approx(mean, rel=1e-12)
