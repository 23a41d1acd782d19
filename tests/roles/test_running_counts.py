"""Running sums, counts and averages that a step writes: the numbers of one device, or said.

`whole_batch.exchanged_sums` exchanges what is summed over the examples; the plan's line `one
device` names what tower 0, or each tower for itself, writes from its own examples.
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


@pytest.mark.parametrize('case', first_fast(1, sorted(MATRICES, reverse=True)))
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


def made(name, collection):
    """`(variable, its value before a step writes it)`."""
    variable = tf.get_variable(name, [], tf.float64, initializer=tf.ones_initializer(),
                               trainable=False, collections=[collection])
    return variable, variable.read_value() + 0.


def line_of_model(model_fn, size=None, **options):
    """The plan's line of a model function of features `[size, 5]`, on two towers."""
    features = tf.placeholder(tf.float64, [size, 5])
    built = towers.build_towers(model_fn, (features,), tf.train.GradientDescentOptimizer(.01), 2,
                                'mean', **options)
    return built.plan.line('one device')


def line_of_state(value, is_read=True):
    """The plan's line of a loss that is divided by a local variable `v`, if `is_read`; a step sets
    it to `value(features, losses, its value before)`."""
    def model_fn(features):
        losses = tf.square(tf.matmul(features, tf.get_variable('w', [5, 1], tf.float64))[:, 0])
        variable, before = made('v', tf.GraphKeys.LOCAL_VARIABLES)
        with tf.control_dependencies([before]):
            write = tf.assign(variable, value(features, losses, before))
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, write)
        loss = tf.reduce_mean(losses)
        return loss / before if is_read else loss
    return line_of_model(model_fn)


OF_TOWERS = ("proven, but for state that each tower keeps of its own examples and the loss reads: "
             "'v' (towers.batch_sum and batch_mean give values of all towers): ")


def by_way_of_another(features, losses, before):
    """The value that another variable had, to which a step writes the number of examples."""
    other, other_before = made('other', tf.GraphKeys.LOCAL_VARIABLES)
    with tf.control_dependencies([other_before]):
        write = tf.assign(other, examples(features))
    with tf.control_dependencies([write]):
        return tf.identity(other_before)


@pytest.mark.parametrize('value, beginning', first_fast(2, [
    (lambda x, losses, before: before + examples(x), OF_TOWERS),
    (lambda x, losses, before: before + 1., 'proven: '),
    (lambda x, losses, before: tf.reduce_max(losses), OF_TOWERS),
    (lambda x, losses, before: tf.random_uniform([], dtype=tf.float64), OF_TOWERS),
    (by_way_of_another, OF_TOWERS.replace("'v'", "'other'")),
    (lambda x, losses, before: towers.batch_sum(tf.reduce_sum(losses)), 'proven: ')]),
    ids=['count', 'steps', 'maximum', 'random', 'by way of another', 'of the batch'])
def test_state_of_a_tower_that_the_loss_reads_is_named(value, beginning):
    assert line_of_state(value).startswith(beginning)


def test_a_counter_of_a_metric_that_the_loss_reads_is_named():
    """A tower reads it when those before it have added, and a constant is added by each."""
    def model_fn(x):
        count = tf.get_variable('count', [], tf.float64, tf.zeros_initializer(), trainable=False,
                                collections=[tf.GraphKeys.METRIC_VARIABLES])
        before = count.read_value()
        with tf.control_dependencies([before]):
            counted = tf.assign_add(count, 1.)
        loss = tf.reduce_mean(tf.square(tf.matmul(x, tf.get_variable('w', [5, 1], tf.float64))))
        return towers.ModelOutput(loss / (1. + before), updates=[counted])
    assert line_of_model(model_fn).startswith(
        "proven, but for counters of metrics, to which each tower adds in its turn, that the loss "
        "or the update reads: 'count' (")


@pytest.mark.parametrize('use_resource', [False, True])
def test_a_variable_that_a_gradient_reads_and_an_update_op_writes_is_named(use_resource):
    """Of a reference variable, one device's gradient under `tf.control_dependencies(update_ops)`
    takes what they have written. The build makes a resource variable in either case."""
    def model_fn(features):
        count = tf.get_variable('count', [], tf.float64, tf.ones_initializer(), trainable=False,
                                use_resource=use_resource)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign_add(count, 1.))
        w = tf.get_variable('w', [5, 1], tf.float64)
        return tf.reduce_mean(tf.square(tf.matmul(features, w))) * count
    line = line_of_model(model_fn)
    if use_resource:
        assert line.startswith('proven: ')
    else:
        assert line.startswith(
            'proven, but for whether a gradient reads a reference variable before an update op '
            "writes it, as it does in towers, or after: 'count' (with use_resource=True this ")


@pytest.mark.slow
def test_state_of_a_tower_that_the_loss_does_not_read_is_not_named():
    line = line_of_state(lambda x, losses, before: before + examples(x), is_read=False)
    assert line.startswith('proven: ')


@pytest.mark.parametrize('value, beginning', [
    (tf.reduce_mean, "proven, but for what tower 0 writes from its own examples beside the loss: "
                     "'average' (towers.batch_mean takes the mean of the batch): "),
    (lambda x: towers.batch_mean(tf.reduce_mean(x)), 'proven: '),
    (lambda x: tf.constant(3., tf.float64), 'proven: ')])
def test_an_average_of_a_tower_that_the_loss_does_not_read_is_named(value, beginning):
    def model_fn(x):
        average = tf.get_variable('average', [], tf.float64, trainable=False)
        loss = tf.reduce_mean(tf.square(tf.matmul(x, tf.get_variable('w', [5, 1], tf.float64))))
        return towers.ModelOutput(loss, updates=[
            tf.assign(average, .9 * average + .1 * value(x))])
    assert line_of_model(model_fn).startswith(beginning)


def test_a_counter_that_the_update_alone_reads_and_every_tower_writes_is_named():
    def model_fn(x):
        counter = tf.get_variable('counter', [], tf.float64, trainable=False)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign_add(counter, 1.))
        return tf.reduce_mean(tf.square(tf.matmul(x, tf.get_variable('w', [5, 1], tf.float64))))
    assert line_of_model(model_fn).startswith('proven: ')
    with tf.variable_scope('all'):
        assert line_of_model(model_fn, update_ops='all').startswith(
            "proven, but for what every tower writes in its turn (update_ops='all'): 'all/counter' (")


def test_an_initial_value_from_the_examples_of_a_tower_is_named():
    def model_fn(x):
        center = tf.get_variable('center', initializer=tf.reduce_mean(x, 0), use_resource=True)
        return tf.reduce_mean(tf.square(x - center))
    features = tf.placeholder_with_default(np.ones([4, 5]), [None, 5])
    line = towers.build_towers(model_fn, (features,), tf.train.GradientDescentOptimizer(.01), 2,
                               'mean').plan.line('one device')
    assert line.startswith(
        "proven, but for initial values that are computed from the examples of a tower: 'center' (")


def test_the_static_size_of_a_shard_that_a_variable_keeps_is_named():
    def model_fn(features):
        variable, before = made('v', tf.GraphKeys.GLOBAL_VARIABLES)
        size = tf.constant(float(int(features.shape[0])), tf.float64)
        with tf.control_dependencies([before]):
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign(variable, size))
        weights = tf.get_variable('w', [5, 1], tf.float64)
        return tf.reduce_sum(tf.square(tf.matmul(features, weights))) / size * before
    line = line_of_model(model_fn, size=6)
    assert line.startswith('proven, if 3 in 1 operation (')
    assert "but for what tower 0 writes from its own examples and the loss reads: 'v' (" in line


@pytest.mark.parametrize('size, beginning', [
    (8, "not proven: '"), (None, 'proven, but for what tower 0 writes ')])
def test_a_variable_that_a_loop_over_the_static_size_writes_is_not_proven(size, beginning):
    """Of the loss `mean / v`, where 4 iterations, as many as a shard has examples, write v."""
    def model_fn(features):
        variable, before = made('v', tf.GraphKeys.GLOBAL_VARIABLES)

        def decay(step):
            with tf.control_dependencies([tf.assign(variable, variable.read_value() * .9)]):
                return step + 1
        with tf.control_dependencies([before]):
            steps = tf.while_loop(lambda step: step < 4, decay, [0], parallel_iterations=1)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.group(steps))
        return tf.reduce_mean(tf.matmul(features, tf.get_variable('w', [5, 1], tf.float64))) / before
    was_v2 = tf.control_flow_v2_enabled()
    tf.disable_control_flow_v2()
    try:
        assert line_of_model(model_fn, size=size).startswith(beginning)
    finally:
        if was_v2:
            tf.enable_control_flow_v2()


def frozen(x):
    """A batch norm of averages, to which a step writes the statistics of a second call."""
    averages = [made(name, tf.GraphKeys.GLOBAL_VARIABLES) for name in ('mean', 'variance')]
    values = tf.matmul(x, tf.get_variable('w', [5, 1], tf.float64))[:, 0]
    (_, mean), (_, variance) = averages
    loss = tf.reduce_mean(tf.square((values - mean) / tf.sqrt(variance + 1e-3)))
    with tf.control_dependencies([loss]):
        statistics = tf.nn.moments(tf.identity(values), [0])
        tf.nn.batch_normalization(values, *statistics, offset=None, scale=None,
                                  variance_epsilon=1e-3)
        for (variable, before), statistic in zip(averages, statistics):
            write = tf.assign(variable, .7 * before + .3 * statistic)
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, write)
    return loss


@pytest.mark.parametrize('options, beginning', first_fast(1, [
    ({}, "proven, but for what tower 0 writes from its own examples and the loss reads: 'mean', "
         "'variance' (towers.batch_mean takes the mean of the batch): "),
    (dict(update_ops='none'), 'proven: '),
    (dict(batch_norm='sync'), 'proven: ')]), ids=str)
def test_averages_of_a_batch_norm_that_the_loss_reads_alone_are_named(options, beginning):
    assert line_of_model(frozen, **options).startswith(beginning)


def counted(x):
    """A loss that is divided by a counter of steps, the same on every tower."""
    variable, before = made('steps', tf.GraphKeys.GLOBAL_VARIABLES)
    with tf.control_dependencies([before]):
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign_add(variable, 1.))
    return tf.reduce_mean(tf.square(tf.matmul(x, tf.get_variable('w', [5, 1], tf.float64)))) / before


def test_what_a_learning_rate_is_computed_from_is_named():
    def model_fn(x):
        with tf.variable_scope('rate', reuse=True):
            variable = tf.get_variable('v', [], tf.float64)
        before = variable.read_value() + 0.
        losses = tf.square(tf.matmul(x, tf.get_variable('w', [5, 1], tf.float64)))
        with tf.control_dependencies([before]):
            tf.add_to_collection(
                tf.GraphKeys.UPDATE_OPS, tf.assign(variable, tf.reduce_mean(losses)))
        return tf.reduce_mean(losses)
    with tf.variable_scope('rate'):
        rate = tf.get_variable('v', [], tf.float64, tf.ones_initializer(), trainable=False)
    features = tf.placeholder(tf.float64, [None, 5])
    optimizer = tf.train.GradientDescentOptimizer(.1 / (1. + rate.read_value()))
    built = towers.build_towers(model_fn, (features,), optimizer, 2, 'mean')
    assert built.plan.line('one device').startswith(
        "proven, but for what is written from the examples of a tower and the update reads: "
        "'rate/v': ")


@pytest.mark.parametrize('written, conditions', [
    (tf.reduce_mean, 'but for what is written from the examples of a tower and the update reads: '
     "'v', "),
    (lambda x: towers.batch_mean(tf.reduce_mean(x)), '')])
def test_what_a_transformation_of_gradients_reads_is_named(written, conditions):
    """On one device the read may come before the write or after it."""
    def model_fn(x):
        variable = tf.get_variable('v', [], tf.float64, tf.ones_initializer(), trainable=False)
        kept.append(variable)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign(variable, written(x)))
        return tf.reduce_mean(tf.matmul(x, tf.get_variable('w', [5, 1], tf.float64)))

    def scaled(pairs):
        return [(gradient * kept[0].read_value(), variable) for gradient, variable in pairs]
    kept = []
    features = tf.placeholder(tf.float64, [None, 5])
    objective = towers.Objective(tf.train.GradientDescentOptimizer(.1), transform_gradients=scaled)
    line = towers.build_towers(model_fn, (features,), objective, 2, 'mean').plan.line('one device')
    assert line.startswith(
        "proven, %sbut for whether a transformation of the gradients reads a variable before an "
        "update op writes it, or after: 'v': " % conditions)


def averaged(x):
    """A loss that is divided by a moving average, which an update reads anew."""
    variable, before = made('mean', tf.GraphKeys.GLOBAL_VARIABLES)
    values = tf.square(tf.matmul(x, tf.get_variable('w', [5, 1], tf.float64)))
    with tf.control_dependencies([before]):
        average = .7 * variable.read_value() + .3 * tf.reduce_mean(values)
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign(variable, average))
    return tf.reduce_mean(values) / before


@pytest.mark.parametrize('model_fn, names', first_fast(1, [
    (counted, "'steps'"), (averaged, "'mean'")]))
def test_what_every_tower_writes_in_its_turn_is_named_as_that(model_fn, names):
    assert line_of_model(model_fn, update_ops='all').startswith(
        "proven, but for what every tower writes in its turn (update_ops='all'): "
        "%s (with update_ops='first' tower 0 alone writes): " % names)
