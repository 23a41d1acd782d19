"""Counters of metrics: every tower counts; an update that reads a counter waits for its turn."""

import time

import numpy as np
import tensorflow.compat.v1 as tf

import towers
from case_marks import first_fast
from sample_models import switched
import pytest

NUMBERS = np.arange(64.)[::-1].reshape(64, 1)  # the largest in the first tower's part


def counter(name, initial=0., shape=(), **options):
    return tf.get_variable(
        name, initializer=tf.fill(shape, tf.constant(initial, tf.float64)), trainable=False,
        collections=[tf.GraphKeys.LOCAL_VARIABLES, tf.GraphKeys.METRIC_VARIABLES], **options)


def running_max(numbers, **options):
    most = counter('most', **options)
    return most.read_value(), tf.assign(most, tf.maximum(most, tf.reduce_max(numbers)))


def last_sum(numbers, **options):
    """Halves what there was, and adds: in another order it is another number."""
    total, count = counter('total', **options), counter('count', **options)
    with tf.control_dependencies([tf.assign_add(count, 1.)]):
        update = tf.assign(total, total / 2 + tf.reduce_sum(numbers))
    return total.read_value(), update


def growing(numbers, **options):
    """A list of all numbers so far, as `streaming_concat` keeps one."""
    kept, size = counter('kept', shape=[64], **options), counter('size', **options)
    begin = tf.cast(size.read_value(), tf.int32)
    added = tf.range(begin, begin + tf.shape(numbers)[0])
    values = tf.scatter_nd(added[:, None], numbers[:, 0], [64])
    with tf.control_dependencies([tf.assign(kept, kept + values)]):
        update = tf.assign_add(size, tf.cast(tf.shape(numbers)[0], tf.float64))
    return kept.read_value(), update


def evaluated(metric, devices, times=1, numbers=NUMBERS, **options):
    with tf.Graph().as_default():
        def model_fn(numbers):
            return {'predictions': numbers, 'metrics': {'m': metric(numbers)}}
        built = towers.build_towers(model_fn, tf.constant(numbers), None, devices, **options)
        value, update = built.metrics['m']
        with tf.Session(config=towers.session_config(built.devices)) as session:
            session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
            for _ in range(times):
                session.run(update)
            return session.run(value)


@pytest.mark.slow
def test_updates_by_the_counters_value_come_in_the_towers_order():
    assert evaluated(running_max, 4) == 63
    np.testing.assert_array_equal(evaluated(growing, 4), NUMBERS[:, 0])
    total = 0.
    for _ in range(3):
        for part in np.split(NUMBERS, 4):
            total = total / 2 + part.sum()
    assert evaluated(last_sum, 4, times=3) == total


def test_each_metric_is_counted_by_itself():
    def model_fn(numbers):
        return {'predictions': numbers, 'metrics': {
            'mean': tf.metrics.mean(numbers), 'max': running_max(numbers)}}
    built = towers.build_towers(model_fn, tf.constant(NUMBERS), None, 2)
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run(tf.local_variables_initializer())
        assert session.run(built.metrics['mean'][1]) == NUMBERS.mean()  # of all towers' counts
        values = {name: value for name, (value, _) in built.metrics.items()}
        assert session.run(values) == {'mean': 31.5, 'max': 0.}
        session.run(built.metrics['max'][1])
        assert session.run(values) == {'mean': 31.5, 'max': 63.}


def test_a_tower_without_an_example_adds_nothing_at_a_single_place():
    def model_fn(numbers):
        sums = counter('sums', shape=[3])
        return {'predictions': numbers, 'metrics': {
            'sums': (sums.read_value(), tf.scatter_add(sums, 1, tf.reduce_sum(numbers)))}}
    numbers = tf.placeholder_with_default(NUMBERS[:2], [None, 1])
    built = towers.build_towers(model_fn, numbers, None, 3, remainder='weight')
    value, update = built.metrics['sums']
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run(tf.local_variables_initializer())
        session.run(update)
        np.testing.assert_array_equal(session.run(value), [0., NUMBERS[:2].sum(), 0.])


@pytest.mark.parametrize('join', first_fast(1, [
    lambda *updates: updates, lambda *updates: [tf.group(updates)]]))
def test_metrics_in_updates_count_as_on_one_device(join):
    """A mean of scalars counts calls, and a tower counts by its examples, of which it has 3 or 2.
    A mean of examples beside it counts those."""
    def model_fn(x):
        loss = tf.reduce_mean(x) * tf.get_variable('w', [], initializer=tf.ones_initializer())
        return {'loss': loss, 'updates': join(
            tf.metrics.mean(tf.reduce_mean(x))[1], tf.metrics.mean(x)[1])}

    def counted(devices):
        with tf.Graph().as_default():
            batch = tf.placeholder_with_default(NUMBERS[:5].astype('float32'), [None, 1])
            built = towers.build_towers(model_fn, batch, tf.train.GradientDescentOptimizer(0.),
                                        devices, remainder='weight')
            with tf.Session(config=towers.session_config(built.devices)) as session:
                session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
                session.run(built.train_op)
                return session.run(tf.get_collection(tf.GraphKeys.METRIC_VARIABLES))
    np.testing.assert_allclose(counted(2), counted(1), 1e-6)
    np.testing.assert_allclose(counted(1), [61., 1., 305., 5.], 1e-6)


def test_counters_by_their_values_in_branches_and_loops():
    def in_branch(numbers):
        most = counter('most')
        return most.read_value(), tf.cond(
            tf.reduce_mean(numbers) > 0,
            lambda: tf.assign(most, tf.maximum(most, tf.reduce_max(numbers))),
            lambda: tf.identity(most))

    def in_loop(numbers):
        total = counter('total')

        def body(row):
            with tf.control_dependencies([tf.assign(total, total / 2 + numbers[row, 0])]):
                return row + 1
        return total.read_value(), tf.while_loop(
            lambda row: row < tf.shape(numbers)[0], body, [0], parallel_iterations=1)
    expected = 0.
    for number in NUMBERS[:, 0]:
        expected = expected / 2 + number
    with switched('control_flow_v2', False):
        assert evaluated(in_branch, 2) == 63
        assert evaluated(in_loop, 2) == expected


def test_a_tower_waits_for_what_a_branch_of_the_one_before_writes():
    """What waits for an `If` of control flow v2 does not wait for its branches."""
    def slow_max(numbers):
        time.sleep((80 - numbers.max()) / 1000)  # later towers read early, and write late
        return numbers.max()

    def running(numbers):
        most = counter('most', use_resource=True)
        return most.read_value(), tf.cond(
            tf.reduce_mean(numbers) > 0,
            lambda: tf.assign(most, tf.maximum(most, tf.py_func(slow_max, [numbers], tf.float64))),
            lambda: tf.identity(most))
    with switched('control_flow_v2', True):
        assert evaluated(running, 4) == 63


# ---- in training ---------------------------------------------------------------------------------

@pytest.mark.slow
def test_metrics_that_ride_on_the_step_count_the_whole_batch():
    def model_fn(numbers):
        weight = tf.get_variable('weight', [1, 1], tf.float64, tf.ones_initializer())
        outputs = tf.matmul(numbers, weight)
        tf.metrics.mean(outputs, name='mae', updates_collections=tf.GraphKeys.UPDATE_OPS)
        examples = tf.get_variable('examples', [], tf.float64, tf.zeros_initializer(),
                                   trainable=False)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign_add(
            examples, tf.cast(tf.shape(numbers)[0], tf.float64)))
        return tf.reduce_mean(outputs)
    built = towers.build_towers(
        model_fn, tf.placeholder_with_default(NUMBERS, [None, 1]),
        tf.train.GradientDescentOptimizer(0.), 2, 'mean', memory=towers.Memory(accumulate=2))
    assert built.plan.line('batch norm') == (
        '2 update ops of tower 0 ride on the train op, 6 of the other towers that count metrics')
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        for _ in range(2):
            session.run(built.train_op)
        found = session.run({variable.op.name: variable for variable in
                             tf.local_variables() + tf.global_variables()})
    assert found['mae/total'] == 2 * NUMBERS.sum() and found['mae/count'] == 2 * 64
    # A count of examples is every tower's, too.
    assert found['examples'] == 2 * 64


def test_a_counter_that_the_forward_pass_writes_by_its_value():
    def model_fn(numbers):
        weight = tf.get_variable('weight', [], tf.float64, tf.ones_initializer())
        with tf.control_dependencies([running_max(numbers)[1]]):
            return tf.reduce_mean(weight * numbers)
    built = towers.build_towers(model_fn, tf.constant(NUMBERS),
                                tf.train.GradientDescentOptimizer(0.), 4, 'mean')
    with tf.Session(config=towers.session_config(built.devices)) as session:
        for _ in range(3):
            session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
            session.run(built.train_op)
            assert session.run(tf.local_variables()[0]) == 63
