"""Shared variables that the model function writes by its examples, against one device."""

import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from case_marks import first_fast

import towers
from sample_models import momentum, plain_step, switched, values_after

X = np.random.RandomState(0).randn(12, 6)
LABELS = np.array([0, 1, 2, 3, 0, 1, 0, 2, 1, 3, 2, 0])
OWN_ROWS = np.arange(12)


def model(write, inline=False):
    """A loss to class centers, which `write(centers, rows, features, difference)` updates."""
    def model_fn(x, rows):
        w = tf.get_variable('w', [6, 3], tf.float64, tf.constant_initializer(.1))
        centers = tf.get_variable('centers', [12, 3], tf.float64, tf.constant_initializer(.3),
                                  trainable=False)
        features = tf.matmul(x, w)
        difference = tf.gather(centers, rows) - features
        update = write(centers, rows, features, difference)
        if not inline:
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
            return tf.reduce_mean(tf.square(difference))
        with tf.control_dependencies([update]):
            return tf.identity(tf.reduce_mean(tf.square(difference)))
    return model_fn


def pulls(centers, rows, unused_features, difference):
    return tf.scatter_sub(centers, rows, .1 * difference)


def memorizes(centers, rows, features, difference):
    return tf.scatter_update(centers, rows, features + 0. * difference)  # after the read


def counts(centers, rows, features, difference):
    seen = tf.get_variable('seen', [], tf.int64, tf.zeros_initializer(), trainable=False)
    return tf.group(pulls(centers, rows, features, difference),
                    tf.assign_add(seen, tf.shape(rows, out_type=tf.int64)[0]))


def assert_one_device(model_fn, rows, num_towers, is_resource=False, features=X, **options):
    arrays = features, rows
    with tf.Graph().as_default(), tf.variable_scope('', use_resource=True), tf.Session() as session:
        _, theirs = values_after(session, *plain_step(model_fn, arrays, momentum), steps=2)
    with tf.Graph().as_default(), tf.variable_scope('', use_resource=is_resource):
        batch = [tf.placeholder_with_default(each, [None] + list(each.shape[1:]))
                 for each in arrays]
        built = towers.build_towers(model_fn, tuple(batch), momentum(), num_towers, 'mean',
                                    remainder='weight', **options)
        config = towers.session_config(built.devices)
        config.inter_op_parallelism_threads = 8  # for what sleeps, see `later`
        with tf.Session(config=config) as session:
            _, ours = values_after(session, built.loss, built.train_op, steps=2)
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, 1e-12, err_msg=name)
    return built


@pytest.mark.parametrize(
    'write, rows, inline, num_towers, options',
    first_fast(1, [
        (pulls, LABELS, True, 2, {}),
        (counts, LABELS, False, 2, dict(memory=towers.Memory(accumulate=2))),
        (memorizes, OWN_ROWS, True, 4, {}),
        (memorizes, OWN_ROWS, True, 2, dict(variables=towers.VariablePlacement('replicated')))]))
def test_rows_and_counts_of_examples_are_those_of_one_device(write, rows, inline, num_towers,
                                                             options):
    built = assert_one_device(model(write, inline), rows, num_towers, **options)
    assert 'every %s, one after the other: %d rows and counts of examples' % (
        'micro-batch' if 'memory' in options else 'tower',
        2 if write is counts else 1) in built.plan.line('updated by')


def written_by(scatter):
    def write(centers, rows, features, difference):
        with tf.control_dependencies([difference]):  # after the read
            return scatter(centers, rows, 1. + .1 * tf.tanh(features))
    return write


@pytest.mark.parametrize('scatter, is_resource', [
    (tf.scatter_mul, True), pytest.param(tf.scatter_div, False, marks=pytest.mark.slow),
    pytest.param(tf.scatter_sub, True, marks=pytest.mark.slow), (tf.scatter_update, False),
    (lambda v, rows, values: tf.scatter_nd_update(v, rows[:, None], values), True)])
def test_a_tower_without_an_example_writes_no_rows(scatter, is_resource):
    """It holds a copy of the first example, whose row would be multiplied once more; or set after
    that of the second example, which has the same row."""
    model_fn = model(written_by(scatter), inline=False)
    assert_one_device(model_fn, np.array([3, 3]), 3, is_resource, features=X[:2])


def two_rows_of_each(join):
    """The second row of an example is the first one of the example after the next."""
    def write(centers, rows, features, difference):
        indices = join([rows, (rows + 2) % 12])
        values = join([features + 0. * difference, 2. * features])  # after the read
        return tf.scatter_update(centers, indices, values)
    return write


def selected_in_two_rounds(centers, rows, features, unused_difference):
    chosen = tf.concat([rows > 2, rows > 0], 0)
    indices, values = [tf.boolean_mask(tf.concat(2 * [each], 0), chosen)
                       for each in (rows, features)]
    return tf.scatter_update(centers, indices, values)


def test_rows_of_an_example_that_are_next_to_each_other_are_set_as_on_one_device():
    model_fn = model(two_rows_of_each(lambda parts: tf.stack(parts, 1)))
    assert_one_device(model_fn, OWN_ROWS, 3)


def counted_in(shard_or_batch):
    """The usual center loss: a row moves the less, the more examples of its class there are."""
    def write(centers, rows, unused_features, difference):
        counts = shard_or_batch(tf.reduce_sum(tf.one_hot(rows, 12, dtype=tf.float64), 0))
        return tf.scatter_sub(centers, rows, difference / (1 + tf.gather(counts, rows))[:, None])
    return write


def by_unique(centers, rows, unused_features, difference):
    _, place, counts = tf.unique_with_counts(rows)
    return tf.scatter_sub(centers, rows, difference / tf.cast(
        1 + tf.gather(counts, place), tf.float64)[:, None])


def codebook(statistic):
    """A moving average, as of a VQ-VAE's cluster sizes."""
    def write(centers, rows, features, difference):
        with tf.control_dependencies([difference]):  # after the read
            return tf.assign(centers, .9 * centers + .1 * statistic(rows, features))
    return write


def sizes(rows, unused_features):
    return tf.reduce_sum(tf.one_hot(rows, 12, dtype=tf.float64), 0)[:, None] * tf.ones([12, 3],
                                                                                      tf.float64)


def sums(rows, features):
    return tf.matmul(tf.one_hot(rows, 12, dtype=tf.float64), features, transpose_a=True)


def averages_of_one_product(centers, rows, features, difference):
    other = tf.get_variable('other', [12, 3], tf.float64, tf.zeros_initializer(), trainable=False)
    step = .1 * sums(rows, features)
    with tf.control_dependencies([difference]):  # after the read
        return tf.group(tf.assign(centers, .9 * centers + step), tf.assign(other, .5 * other + step))


@pytest.mark.parametrize('write', first_fast(1, [
    counted_in(towers.batch_sum), averages_of_one_product, codebook(sizes), codebook(sums),
    codebook(lambda *given: towers.batch_sum(sizes(*given)))]))
def test_rows_and_averages_of_sums_over_the_batch_are_those_of_one_device(write):
    assert_one_device(model(write), LABELS, 3)


def test_a_sum_in_an_average_is_refused_where_towers_cannot_meet():
    with pytest.raises(towers.SharedVariableError, match='by a sum over its examples'):
        assert_built(model(codebook(sizes)), memory=towers.Memory(accumulate=2))


def in_order(*updates):
    """A write of class centers that makes several, one after the other, behind the loss's read."""
    def write(centers, rows, features, difference):
        before = difference
        for update in updates:
            with tf.control_dependencies([before]):
                before = update(centers, rows, features, difference)
        return before
    return write


def halves(centers, *unused):
    return tf.assign(centers, .5 * centers.read_value())


def adds_sums(centers, rows, features, unused_difference):
    return tf.assign_add(centers, sums(rows, features))


def adds_one(centers, *unused):
    return tf.assign_add(centers, tf.ones([12, 3], tf.float64))


def scales(centers, rows, features, unused_difference):
    return tf.scatter_mul(centers, rows, 1. + .1 * tf.tanh(features))


@pytest.mark.parametrize('updates, is_resource', first_fast(1, [
    ((halves, adds_sums), False), ((halves, adds_sums), True), ((adds_sums, halves), True),
    ((memorizes, pulls), False), ((pulls, scales), True), ((adds_sums, adds_one), True)]))
def test_writes_of_one_variable_that_every_tower_would_repeat_are_refused(updates, is_resource):
    with pytest.raises(towers.SharedVariableError, match=(
            'writes variable centers 2 times .*operations .*, .*by its examples in one write.*'
            'Write it once, as by assign')):
        with tf.variable_scope('', use_resource=is_resource):
            assert_built(model(in_order(*updates)))


def assert_built(model_fn, **options):
    batch = [tf.placeholder_with_default(each, [None] + list(each.shape[1:]))
             for each in (X, LABELS)]
    towers.build_towers(model_fn, tuple(batch), tf.train.GradientDescentOptimizer(.1), 2, 'mean',
                        **options)


@pytest.mark.parametrize('write', first_fast(0, [
    in_order(pulls, adds_sums), in_order(halves, adds_one),
    in_order(halves, codebook(sums), adds_one)]))
def test_additions_of_every_tower_and_writes_of_tower_0_may_be_several(write):
    assert_one_device(model(write), LABELS, 3)


def counts_steps(*unused):
    steps = tf.get_variable('steps', [], tf.float64, tf.zeros_initializer(), trainable=False)
    return tf.assign_add(steps, 1.)


def pulls_by_steps(centers, rows, unused_features, difference):
    with tf.variable_scope('', reuse=True):
        steps = tf.get_variable('steps', [], tf.float64)
    return tf.scatter_sub(centers, rows, .1 * difference * steps.read_value())


def averages_other(unused_centers, rows, features, unused_difference):
    other = tf.get_variable('other', [12, 3], tf.float64, tf.ones_initializer(), trainable=False)
    return tf.assign(other, .5 * other + .1 * sums(rows, features))


@pytest.mark.parametrize('updates, num_towers, options', first_fast(0, [
    ((counts_steps, pulls), 3, {}),
    ((counts_steps, codebook(sums)), 3, {}),
    ((counts_steps, pulls_by_steps), 3, {}),
    ((averages_other, pulls), 3, {}),
    ((averages_other, counts_steps, pulls_by_steps), 3, {}),
    ((counts_steps, pulls_by_steps), 2, dict(memory=towers.Memory(accumulate=2)))]))
def test_a_write_of_tower_0_that_updates_of_every_tower_wait_for_is_made_once(
        updates, num_towers, options):
    assert_one_device(model(in_order(*updates)), LABELS, num_towers, **options)


def pulls_late_by_other(centers, rows, unused_features, difference):
    """Reads `other`, but only after a while, in each tower but the first."""
    def wait_unless_first_examples(ids):
        if ids[0] != LABELS[0]:
            time.sleep(.05)
        return np.int64(0)
    with tf.variable_scope('', reuse=tf.AUTO_REUSE):
        other = tf.get_variable('other', [12, 3], tf.float64, tf.ones_initializer(),
                                trainable=False)
    with tf.control_dependencies([tf.py_func(wait_unless_first_examples, [rows], tf.int64)]):
        factor = other.read_value()
    return tf.scatter_sub(centers, rows, .1 * difference * factor[0])


def halves_other(*unused):
    with tf.variable_scope('', reuse=True):
        other = tf.get_variable('other', [12, 3], tf.float64)
    return tf.assign(other, .5 * other)


@pytest.mark.slow
def test_a_write_of_tower_0_waits_for_reads_of_updates_that_come_before_it():
    assert_one_device(model(in_order(pulls_late_by_other, halves_other)), LABELS, 3)


LATE_ROWS = np.array([0, 1, 2, 3, 1, 0, 2, 0, 3, 0, 1, 2])  # tower 0 alone begins with row 0


def later(rows):
    """An operation that takes a while, in every tower but the first, so that a race is lost."""
    return tf.py_func(lambda first: time.sleep(.1 * (first > 0)), [rows[0]], [])


def steps_read():
    with tf.variable_scope('', reuse=True):
        return tf.get_variable('steps', [], tf.float64).read_value()


def pulls_late_by_steps(centers, rows, unused_features, difference):
    with tf.control_dependencies([later(rows)]):
        steps = steps_read()
    return tf.scatter_sub(centers, rows, .1 * difference * (1. + steps))


def doubles_steps(*unused):
    with tf.variable_scope('', reuse=True):
        steps = tf.get_variable('steps', [], tf.float64)
    return tf.assign(steps, 2. * steps.read_value())


def counts_calls(*unused):
    """State of each tower, written alike by all."""
    with tf.control_dependencies([later(unused[1])]):
        calls = tf.get_local_variable('calls', [], tf.float64, tf.zeros_initializer())
        return tf.assign_add(calls, 1.)


def pulls_by_calls(centers, rows, unused_features, difference):
    with tf.variable_scope('', reuse=True):
        calls = tf.get_local_variable('calls', [], tf.float64)
    return tf.scatter_sub(centers, rows, .1 * difference * calls.read_value())


def pulls_by_steps_and_calls(*given):
    with tf.control_dependencies([steps_read()]):
        return pulls_by_calls(*given)


@pytest.mark.parametrize('updates, is_inline', first_fast(1, [
    ((counts_steps, pulls_late_by_steps, doubles_steps), True),
    ((counts_steps, pulls_late_by_steps, doubles_steps, pulls_late_by_steps, doubles_steps), False),
    ((counts_calls, counts_steps, pulls_by_calls), False),
    ((counts_calls, counts_steps, pulls_by_calls), True),
    ((counts_calls, counts_steps, pulls_by_steps_and_calls), False),
    ((counts_calls, counts_steps, pulls_by_steps_and_calls), True)]))
@pytest.mark.parametrize('is_resource', first_fast(1, [True, False]))
def test_writes_of_tower_0_between_updates_of_every_tower_come_between_all_of_them(
        updates, is_inline, is_resource):
    """Reads of every tower come after the same writes; no update is lost with such a write."""
    assert_one_device(model(in_order(*updates), is_inline), LATE_ROWS, 3, is_resource)


def keeps_mean(unused_centers, unused_rows, features, unused_difference):
    kept = tf.get_local_variable('kept', [3], tf.float64, tf.zeros_initializer())
    return tf.assign(kept, tf.reduce_mean(features, 0))


def adds_kept(centers, *unused):
    with tf.variable_scope('', reuse=True):
        kept = tf.get_local_variable('kept', [3], tf.float64)
    return tf.assign_add(centers, kept.read_value() * tf.ones([12, 3], tf.float64))


def copies_kept(*given):
    """By way of other state of each tower."""
    copied = tf.get_local_variable('copied', [3], tf.float64, tf.zeros_initializer())
    with tf.variable_scope('', reuse=True):
        kept = tf.get_local_variable('kept', [3], tf.float64)
    with tf.control_dependencies([tf.assign(copied, kept.read_value())]):
        return tf.assign(given[0], copied.read_value() * tf.ones([12, 3], tf.float64))


def metric_of(unused_centers, unused_rows, features, unused_difference):
    value, update = tf.metrics.mean(features[:, 0])
    mean = tf.get_variable('mean', [], tf.float32, tf.zeros_initializer(), trainable=False)
    with tf.control_dependencies([update]):
        return tf.assign(mean, tf.identity(value))


def copies_centers(centers, *unused):
    other = tf.get_variable('other', [12, 3], tf.float64, tf.zeros_initializer(), trainable=False)
    return tf.assign(other, 1. * centers.read_value())


def averages_centers(centers, *unused):
    return tf.train.ExponentialMovingAverage(.9).apply([centers])


def sets_rate(unused_centers, rows, *unused):
    """By what the write of a count gives."""
    seen = tf.get_variable('seen', [], tf.float64, tf.zeros_initializer(), trainable=False)
    rate = tf.get_variable('rate', [], tf.float64, tf.zeros_initializer(), trainable=False)
    return tf.assign(rate, 1. / tf.assign_add(seen, tf.cast(tf.shape(rows)[0], tf.float64)))


@pytest.mark.parametrize('updates, text', first_fast(2, [
    ((keeps_mean, adds_kept), 'variable centers .* takes from variable kept, which holds something'),
    ((pulls, copies_centers), 'reads variable centers .* after its examples have written it'),
    ((sets_rate,), 'reads variable seen .* after its examples have written it'),
    ((keeps_mean, copies_kept), 'variable centers .* takes from variable (kept|copied), which'),
    ((metric_of,), 'variable mean.* takes from variable .*mean/.*, which holds something'),
    ((pulls, averages_centers), 'reads variable centers .* after its examples have written it')]))
@pytest.mark.parametrize('is_resource', first_fast(1, [True, False]))
def test_what_one_tower_has_is_not_written_for_all(updates, text, is_resource):
    with tf.variable_scope('', use_resource=is_resource):
        with pytest.raises(towers.SharedVariableError, match=text):
            assert_built(model(in_order(*updates)))


def reads_at_any_time(centers, rows, features, difference):
    """Nothing says whether the factor is read before or after it is written."""
    factor = tf.get_variable('factor', [], tf.float64, tf.ones_initializer(), trainable=False)
    total = tf.get_variable('total', [], tf.float64, tf.zeros_initializer(), trainable=False)
    with tf.control_dependencies([pulls(centers, rows, features, difference)]):
        counted = tf.assign_add(total, tf.reduce_sum(features) * factor.read_value())
    with tf.control_dependencies([tf.assign(factor, 2.)]):
        return tf.group(counted, pulls(centers, rows, features, difference))


def test_a_read_that_cannot_come_before_a_write_of_tower_0_is_refused():
    with tf.variable_scope('', use_resource=True), pytest.raises(
            towers.SharedVariableError, match='reads variable factor .* before this step writes it '
            '.*but the write comes before what the read waits for in another tower'):
        assert_built(model(reads_at_any_time))


def test_an_update_may_read_what_it_has_written_and_use_it_for_no_write():
    def shown(*given):
        return tf.identity(pulls(*given))
    assert_built(model(shown))


def test_a_sum_that_waits_for_a_write_is_refused_where_each_tower_calls_the_model():
    with pytest.raises(towers.SharedVariableError, match=(
            "copies='reuse', and a value of the whole batch .* waits for a write of variable steps")):
        assert_built(model(in_order(counts_steps, codebook(sums))), copies='reuse')


def in_loop(write, num_iterations):
    """A write of class centers in each iteration of a loop."""
    def write_in_loop(centers, unused_rows, features, difference):
        def body(t):
            with tf.control_dependencies([write(centers)]):
                return t + 1
        with tf.control_dependencies([difference]):
            return tf.while_loop(lambda t: t < num_iterations(features), body, [tf.constant(0)],
                                 parallel_iterations=1)
    return write_in_loop


def in_map(write):
    """A write of class centers for each example, in `tf.map_fn`."""
    def write_in_map(centers, unused_rows, features, difference):
        def of_one(row):
            with tf.control_dependencies([write(centers)]):
                return tf.reduce_sum(row)
        with tf.control_dependencies([difference]):
            return tf.map_fn(of_one, features, parallel_iterations=1)
    return write_in_map


def adds_to_a_row(centers):
    return tf.scatter_add(centers, [0], tf.ones([1, 3], tf.float64))


def counts_up(unused_centers):
    count = tf.get_variable('count', [], tf.int32, tf.zeros_initializer(), trainable=False)
    return tf.count_up_to(count, 1000)


def num_examples(features):
    return tf.shape(features)[0]


@pytest.mark.parametrize('write, is_resource', first_fast(1, [
    (in_map(adds_one), False), (in_map(adds_one), True), (in_map(halves), True),
    (in_map(adds_to_a_row), False), (in_loop(halves, num_examples), True),
    (in_loop(counts_up, num_examples), True)]))
@pytest.mark.parametrize('is_v2', first_fast(1, [False, True]))
def test_a_write_for_each_example_is_refused_whatever_it_writes(write, is_resource, is_v2):
    """The value written is the same on every tower; the number of writes is not."""
    with switched('control_flow_v2', is_v2), tf.Graph().as_default():
        with tf.variable_scope('', use_resource=is_resource or is_v2), pytest.raises(
                towers.SharedVariableError, match='writes variable .* by its examples'):
            assert_built(model(write))


@pytest.mark.parametrize('write', first_fast(0, [halves, adds_to_a_row]))
def test_a_write_in_a_loop_over_time_is_tower_0s(write):
    with switched('control_flow_v2', False):
        write_in_loop = in_loop(write, lambda features: tf.shape(features)[1])
        assert_one_device(model(write_in_loop), LABELS, 3)


def adds(value):
    def write(centers, rows, features, unused_difference):
        added = tf.get_variable('added', [], tf.float64, tf.zeros_initializer(), trainable=False)
        return tf.assign_add(added, value(tf.cast(rows, tf.float64)))
    return write


@pytest.mark.parametrize('value', first_fast(1, [
    lambda rows: tf.constant(4., tf.float64), tf.reduce_sum,
    lambda rows: 2. * tf.cast(tf.shape(rows)[0], tf.float64)]))
def test_constants_are_added_once_and_sums_and_counts_by_every_tower(value):
    """Three towers have four examples each; one device adds the constant once."""
    assert_one_device(model(adds(value)), LABELS, 3)


def test_a_constant_that_may_be_the_size_of_a_shard_is_asked_about():
    def build(constant):
        with tf.Graph().as_default():
            return towers.build_towers(
                model(adds(lambda rows: tf.constant(constant, tf.float64))),
                (tf.constant(X), tf.constant(LABELS)), tf.train.GradientDescentOptimizer(.1), 2)
    with pytest.raises(towers.SharedVariableError, match='adds 6 .*a shard has 6 examples, too'):
        build(6.)
    assert 'tower 0 alone' in build(5.).plan.line('updated by')


@pytest.mark.slow
def test_rows_of_which_the_graph_has_the_number_are_refused():
    write = model(lambda centers, rows, *_: tf.scatter_add(
        centers, rows, tf.ones([6, 3], tf.float64)), inline=True)
    with pytest.raises(towers.SharedVariableError, match='writes variable centers .*the graph has '
                       'the size of a shard, 6, in it.*: pass a batch \\[None, ...\\], and'):
        towers.build_towers(write, (tf.constant(X), tf.constant(LABELS)),
                            tf.train.GradientDescentOptimizer(.1), 2)


@pytest.mark.parametrize('statistic', first_fast(1, [
    lambda rows, features: tf.sqrt(tf.nn.moments(features, [0])[1]),
    lambda rows, features: tf.reduce_max(features),
    lambda rows, features: tf.reduce_sum(features, 0) / tf.cast(tf.shape(features)[0], tf.float64)]))
def test_averages_of_an_estimate_are_tower_0s(statistic):
    built = towers.build_towers(model(codebook(statistic)), (tf.constant(X), tf.constant(LABELS)),
                                tf.train.GradientDescentOptimizer(.1), 2)
    assert 'tower 0 alone' in built.plan.line('updated by')


def at_a_counted_place(centers, rows, features, unused_difference):
    place = tf.get_variable('place', [], tf.int32, tf.zeros_initializer(), trainable=False)
    update = tf.scatter_update(centers, place + tf.range(tf.shape(features)[0]), features)
    with tf.control_dependencies([update]):
        return tf.assign_add(place, 1)


@pytest.mark.parametrize('write, text', first_fast(10, [
    (lambda centers, rows, features, _: tf.assign(centers, tf.reduce_max(features) * tf.ones_like(
        centers)), 'writes variable centers .* by its examples, and no moving average of them'),
    (lambda centers, rows, features, _: tf.assign(centers, tf.clip_by_value(
        centers + tf.reduce_mean(features), 0., 1.)), 'no moving average'),
    (lambda centers, rows, features, difference: tf.cond(
        tf.placeholder_with_default(True, []),
        lambda: tf.group(pulls(centers, rows, features, difference)), tf.no_op),
     'in a branch, a loop or a function'),
    (by_unique, 'writes variable centers .*UniqueWithCounts'),
    (lambda centers, rows, features, _: tf.scatter_add(
        centers, rows, features - tf.reduce_mean(features, 0)), 'computed across the examples'),
    (two_rows_of_each(tf.stack), 'in another order than that of the examples'),
    (two_rows_of_each(lambda parts: tf.concat(parts, 0)), 'put the examples first in its indices'),
    (selected_in_two_rounds, 'put the examples first in its indices'),
    (at_a_counted_place, 'computes with the positions of the examples'),
    (lambda centers, rows, features, _: tf.assign(centers, centers * tf.reduce_mean(features)),
     'no moving average'),
    (lambda centers, rows, features, _: tf.assign(centers, tf.maximum(
        centers, tf.reduce_max(features))), 'no moving average'),
    (lambda centers, rows, features, _: tf.assign(centers, centers + tf.reduce_max(features)),
     'no moving average'),
    (lambda centers, rows, features, _: tf.assign(centers, centers / tf.reduce_max(features)),
     'no moving average')]))
def test_what_no_tower_and_not_every_tower_can_write_is_refused(write, text):
    with pytest.raises(towers.SharedVariableError, match=text):
        towers.build_towers(model(write), tuple(
            tf.placeholder_with_default(each, [None] + list(each.shape[1:]))
            for each in (X, LABELS)), tf.train.GradientDescentOptimizer(.1), 2)


def averages_sampled(features):
    """A moving average of rows that an operation without a rule has chosen, as batch norm in
    charlesq34/pointnet2 has it behind that program's own operations."""
    average = tf.get_variable('average', [3], tf.float64, tf.zeros_initializer(), trainable=False)
    [sampled] = tf.py_func(lambda rows: [rows[:2]], [features], [tf.float64])
    sampled.set_shape([2, 3])
    return tf.assign(average, .9 * average + .1 * tf.reduce_mean(sampled, 0))


def test_an_average_behind_an_operation_without_a_rule_is_refused_or_every_towers():
    def build(**options):
        write = model(lambda centers, rows, features, _: averages_sampled(features))
        return towers.build_towers(write, (tf.constant(X), tf.constant(LABELS)), momentum(), 2,
                                   **options)

    with pytest.raises(towers.SharedVariableError, match=(
            "writes variable average .*PyFunc.*or pass update_ops='all'")), tf.Graph().as_default():
        build()
    built = build(update_ops='all')
    expected = np.zeros(3)
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run(tf.global_variables_initializer())
        session.run(built.train_op)
        [average] = [v for v in tf.global_variables() if v.op.name == 'average']
        for shard in np.split(X, 2):  # w is .1 everywhere before the step
            expected = .9 * expected + .1 * (shard[:2] @ np.full([6, 3], .1)).mean(0)
        np.testing.assert_allclose(session.run(average), expected, 1e-12)


def test_rows_that_the_loss_reads_after_they_are_written_are_refused():
    def model_fn(x, rows):
        centers = tf.get_variable('centers', [4, 6], tf.float64, tf.zeros_initializer(),
                                  trainable=False)
        w = tf.get_variable('w', [6], tf.float64, tf.ones_initializer())
        with tf.control_dependencies([tf.scatter_add(centers, rows, x)]):
            return tf.reduce_mean(w * (tf.gather(centers, rows) - x))
    with pytest.raises(towers.SharedVariableError, match='reads variable centers .* after its'):
        towers.build_towers(model_fn, (tf.constant(X), tf.constant(LABELS)),
                            tf.train.GradientDescentOptimizer(.1), 2)


@pytest.mark.skipif(tf.version.VERSION < '2', reason='TF 1 takes no averages in training')
@pytest.mark.parametrize('is_fed', first_fast(1, [True, False]))
def test_a_fused_batch_norm_may_be_given_its_averages_in_training_as_keras_does(is_fed):
    images = np.random.RandomState(1).randn(8, 2, 2, 3).astype('f')

    def model_fn(x):
        average = tf.get_variable('average', [3], initializer=tf.ones_initializer(),
                                  trainable=False)
        scale = tf.get_variable('scale', [3], initializer=tf.ones_initializer())

        def norm(is_training):
            return tf.nn.fused_batch_norm(x, scale, tf.zeros([3]), average, average,
                                          is_training=is_training)
        y, mean, _ = tf.cond(tf.placeholder_with_default(True, []), lambda: norm(True),
                             lambda: norm(False)) if is_fed else norm(True)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign_sub(
            average, (average - mean) * .1))
        return tf.reduce_mean(tf.square(y - .5))

    with switched('control_flow_v2', True), tf.Graph().as_default():
        built = towers.build_towers(model_fn, tf.constant(images), momentum(), 2, 'mean')
        with tf.Session(config=towers.session_config(built.devices)) as session:
            _, after = values_after(session, built.loss, built.train_op, steps=1)
    np.testing.assert_allclose(
        after['average'], .9 + .1 * images[:4].mean(axis=(0, 1, 2)), rtol=1e-6)


def test_an_average_that_a_branch_writes_beside_its_variable_is_tower_0s():
    """As of Keras, whose operations in a branch of control flow v2 are colocated with it."""
    def model_fn(x):
        w = tf.get_variable('w', [6, 1], tf.float64, tf.ones_initializer())
        average = tf.get_variable('average', [6], tf.float64, tf.ones_initializer(),
                                  trainable=False)
        mean = tf.reduce_mean(x, 0)

        def write():
            with tf.colocate_with(average):
                return tf.assign_sub(average, (average - mean) * tf.constant(.1, tf.float64))
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.cond(
            tf.placeholder_with_default(True, []), write, lambda: tf.identity(average)))
        return tf.reduce_mean(tf.square(tf.matmul(x, w)))

    with switched('control_flow_v2', True), tf.Graph().as_default():
        with tf.variable_scope('', use_resource=True):
            built = towers.build_towers(model_fn, tf.constant(X), momentum(), 2, 'mean')
        with tf.Session(config=towers.session_config(built.devices)) as session:
            _, after = values_after(session, built.loss, built.train_op, steps=1)
    np.testing.assert_allclose(after['average'], .9 + .1 * X[:6].mean(0))


@pytest.mark.parametrize('batch', [
    tf.constant, lambda x: tf.placeholder_with_default(x, [None, 6])])
def test_a_count_in_a_branch_of_control_flow_v2_is_refused(batch):
    def model_fn(x):
        seen = tf.get_variable('seen', [], tf.int32, tf.zeros_initializer(), trainable=False)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.cond(
            tf.placeholder_with_default(True, []), lambda: tf.assign_add(seen, tf.shape(x)[0]),
            lambda: tf.identity(seen)))
        return tf.reduce_mean(x) * tf.get_variable('w', [], tf.float64)

    with switched('control_flow_v2', True), tf.Graph().as_default(), tf.variable_scope(
            '', use_resource=True), pytest.raises(
                towers.SharedVariableError, match='in a branch|of a batch of static size'):
        towers.build_towers(model_fn, batch(X), momentum(), 2, 'mean')


@pytest.mark.parametrize('is_same_variable', first_fast(1, [False, True]))
@pytest.mark.parametrize('by_examples', (False, True))
def test_a_write_in_a_function_is_looked_at_beside_others(is_same_variable, by_examples):
    def model_fn(x):
        w = tf.get_variable('w', [6, 1])
        variables = []
        for name in ('seen', 'total'):
            variables.append(tf.get_variable(name, [6], trainable=False, use_resource=True,
                                             initializer=tf.zeros_initializer()))
        total = variables[not is_same_variable]

        @tf.function
        def update(batch):
            delta = tf.reduce_sum(batch, 0) if by_examples else tf.ones([6])
            first = variables[0].assign_add(tf.ones([6]))
            with tf.control_dependencies([first]):
                second = tf.raw_ops.ResourceApplyGradientDescent(
                    var=total.handle, alpha=-1., delta=delta)
            with tf.control_dependencies([second]):
                return tf.constant(0.)

        return towers.ModelOutput(tf.reduce_mean(tf.matmul(x, w)), updates=[update(x).op])

    with tf.Graph().as_default():
        x = tf.placeholder_with_default(X.astype('float32'), [None, 6])
        if by_examples:
            with pytest.raises(towers.SharedVariableError, match='in another way than by an assign'):
                towers.build_towers(model_fn, x, momentum(), 2)
            return
        built = towers.build_towers(model_fn, x, momentum(), 2)
        with tf.Session(config=towers.session_config(built.devices)) as session:
            _, after = values_after(session, built.loss, built.train_op, steps=1)
        expected = (2., 0.) if is_same_variable else (1., 1.)
        assert (after['seen'][0], after['total'][0]) == expected


@pytest.mark.parametrize('optimizer, reason', [
    (momentum, 'its new value does not depend on the examples'),
    (None, 'update ops alone write it, and without an optimizer no step runs them')])
def test_a_count_of_another_kind_has_its_reason(optimizer, reason):
    def model_fn(x):
        steps = tf.get_variable('steps', [], tf.int32, tf.zeros_initializer(), trainable=False)
        loss = tf.reduce_mean(tf.matmul(x, tf.get_variable('w', [6, 1])))
        return towers.ModelOutput(loss, updates=[tf.count_up_to(steps, 100)])

    with tf.Graph().as_default():
        x = tf.placeholder(tf.float32, [None, 6])
        built = towers.build_towers(model_fn, x, optimizer and optimizer(), 2)
        [role] = [role for role in built.plan.variable_roles if role.variable == 'steps']
        assert role.reason == reason
