"""Running sums, counts and averages that a step writes: the numbers of one device, or said.

`whole_batch.exchanged_sums` exchanges what is summed over the examples; the plan's line `one
device` names what tower 0 writes from its own examples.
"""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from case_marks import first_fast

import towers

BATCH = np.random.RandomState(0).randn(6, 5)
STEPS = 3


def examples(features):
    return tf.cast(tf.shape(features)[0], tf.float64)


UPDATES = {
    'a count, set': lambda v, x, losses: tf.assign(v, v + examples(x)),
    'a count of entries, set': lambda v, x, losses: tf.assign(
        v, v + tf.cast(tf.size(x), tf.float64)),
    'a count and one, added': lambda v, x, losses: tf.assign_add(v, examples(x) + 1.),
    'a sum and a count, set': lambda v, x, losses: tf.assign(
        v, v + tf.reduce_sum(losses) + examples(x)),
    'an average of a sum': lambda v, x, losses: tf.assign(v, .9 * v + .1 * tf.reduce_sum(losses)),
    'an average of a count': lambda v, x, losses: tf.assign(v, .9 * v + .1 * examples(x)),
}


def classes(features):
    """Labels and predictions, each one of 3 classes."""
    return tf.argmax(features[:, :3], 1), tf.argmax(features[:, 2:], 1)


MATRICES = {
    'a confusion matrix': lambda v, x, losses: tf.assign_add(
        v, tf.math.confusion_matrix(*classes(x), num_classes=3, dtype=tf.float64)),
    'rows by class': lambda v, x, losses: tf.assign_add(
        v, tf.math.unsorted_segment_sum(x[:, :3], classes(x)[0], 3)),
}


def trained(update, num_towers, loss_of=tf.reduce_mean, is_finished=False, shape=()):
    """`(plan's line, the variable after some steps)`; on plain TF1 without towers."""
    with tf.Graph().as_default():
        features = tf.placeholder(tf.float64, [None, 5])
        state = tf.get_variable('state', shape, tf.float64, initializer=tf.zeros_initializer(),
                                trainable=False)

        def model_fn(features):
            weights = tf.get_variable('w', [5, 1], tf.float64, initializer=tf.ones_initializer())
            losses = tf.square(tf.matmul(features, weights)[:, 0])
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update(state, features, losses))
            return loss_of(losses)

        optimizer = tf.train.GradientDescentOptimizer(.01)
        if num_towers:
            built = towers.build_towers(model_fn(features) if is_finished else model_fn,
                                        (features,), optimizer, num_towers, 'mean')
            train_op = built.train_op
            line = built.plan.line('one device')
        else:
            loss = model_fn(features)
            with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
                train_op = optimizer.minimize(loss)
            line = None
        with tf.Session(config=towers.session_config(num_towers or 1)) as session:
            session.run(tf.global_variables_initializer())
            for _ in range(STEPS):
                session.run(train_op, {features: BATCH})
            return line, session.run(state)


@pytest.mark.parametrize('case', first_fast(1, sorted(UPDATES)))
def test_sums_and_counts_are_those_of_the_batch(case):
    _, expected = trained(UPDATES[case], 0)
    for num_towers, is_finished in (2, True), (3, False):
        _, found = trained(UPDATES[case], num_towers, is_finished=is_finished)
        np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize('case', sorted(MATRICES))
def test_what_is_added_at_places_of_the_examples_is_that_of_the_batch(case):
    _, expected = trained(MATRICES[case], 0, shape=[3, 3])
    _, found = trained(MATRICES[case], 3, shape=[3, 3])
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert np.any(found)


@pytest.mark.slow
def test_a_sum_that_the_loss_reads_stays_the_shards_there():
    """Its average has the batch's sum; the loss divides the shard's sum by the shard's size."""
    sums = []

    def update(state, features, losses):
        sums.append(tf.reduce_sum(losses))
        return tf.assign(state, .9 * state + .1 * sums[-1])

    def loss_of(losses):
        return sums[-1] / tf.cast(tf.size(losses), tf.float64)

    _, expected = trained(update, 0, loss_of)
    line, found = trained(update, 2, loss_of)
    assert line.startswith('proven: ')
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.slow
def test_an_average_of_tower_0_that_the_loss_reads_is_named():
    """A baseline, as of REINFORCE: of one device it is an average over the batch."""
    def update(state, features, losses):
        mean = tf.reduce_mean(losses)
        states.append(state)
        return tf.assign(state, .5 * state + .5 * mean)

    def loss_of(losses):
        return tf.reduce_mean(tf.square(losses - states[-1].read_value()))
    states = []
    line, _ = trained(update, 2, loss_of)
    assert line.startswith("proven, but for what tower 0 writes from its own examples and the loss "
                           "reads: 'state' (towers.batch_mean takes the mean of the batch)")
