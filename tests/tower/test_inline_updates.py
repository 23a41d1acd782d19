"""towers.inline_updates: what the forward pass writes of shared variables, it writes once."""

import time

import numpy as np
import pytest
import sample_models as samples
import tensorflow.compat.v1 as tf
import tf_slim as slim

import towers
from sample_models import kind_of_variables, of_kinds, sgd, switched  # noqa: F401

X = (np.random.RandomState(0).randn(8, 3) * 2 + 3).astype('float32')
ONES = tf.ones_initializer()
slow = pytest.mark.slow
both_copies = pytest.mark.parametrize('copies', ['clone', pytest.param('reuse', marks=slow)])
two_and_four = pytest.mark.parametrize('count', [2, pytest.param(4, marks=slow)])
MEAN = 'fc/BatchNorm/moving_mean'


def batch_norm(collections=tf.GraphKeys.UPDATE_OPS, decide=lambda: True):
    """slim's, with its updates in a collection or, for None, in the forward pass."""
    def model_fn(x):
        net = slim.fully_connected(
            x, 2, scope='fc', activation_fn=None, weights_initializer=ONES,
            normalizer_fn=slim.batch_norm, normalizer_params=dict(
                updates_collections=collections, is_training=decide(), decay=0.9))
        return tf.reduce_mean(tf.square(net - 1.))
    return model_fn


def counts(x):
    """The new value of a counter is used."""
    w = tf.get_variable('w', [], initializer=ONES)
    count = tf.get_variable('count', [], initializer=tf.zeros_initializer(), trainable=False)
    return tf.reduce_mean(x) * w * tf.identity(tf.assign_add(count, 1.))


def counts_aside(x):
    """It is not."""
    w = tf.get_variable('w', [], initializer=ONES)
    count = tf.get_variable('count', [], initializer=tf.zeros_initializer(), trainable=False)
    with tf.control_dependencies([tf.assign_add(count, 1.)]):
        return tf.reduce_mean(x) * w


def reads_what_it_wrote(x):
    w = tf.get_variable('w', [], initializer=ONES)
    count = tf.get_variable('count', [], initializer=tf.zeros_initializer(), trainable=False)
    with tf.control_dependencies([tf.assign(count, 2. * count + 1.)]):
        return tf.reduce_mean(x) * w * count.read_value()


def spectral_norm(x):
    """Reads the vector that it writes: the first tower writes when the others have read."""
    w = tf.get_variable('w', [3, 3], initializer=tf.constant_initializer(np.arange(9.) / 9 + 0.1))
    u = tf.get_variable('u', [1, 3], initializer=ONES, trainable=False)
    v = tf.nn.l2_normalize(tf.matmul(u, w, transpose_b=True))
    new = tf.stop_gradient(tf.nn.l2_normalize(tf.matmul(v, w)))
    sigma = tf.reduce_sum(tf.matmul(tf.matmul(tf.stop_gradient(v), w), new, transpose_b=True))
    with tf.control_dependencies([tf.assign(u, new)]):
        return tf.reduce_mean(tf.square(tf.matmul(x, w / sigma)))


def average_of_activations(x):
    w = tf.get_variable('w', [], initializer=ONES)
    mean = tf.reduce_mean(x * w, name='mean')
    average = tf.train.ExponentialMovingAverage(0.9)
    with tf.control_dependencies([average.apply([mean])]):
        return tf.identity(mean)


def updates_before_the_loss(x):
    """The usual idiom, but in the model function."""
    loss = batch_norm()(x)
    with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
        return tf.identity(loss)


def late(x):
    """1, in every tower but the first a while later, so that a race is lost."""
    ones = tf.ones([200, 200]) * (1. + 0. * x[0, 0]) / 200.
    for _ in range(5):
        ones = tf.matmul(ones, ones)
    return tf.reduce_sum(ones) / 200.


def in_branch(x, value):
    """The value, computed in a branch of `tf.cond`; both are taken by some number."""
    return tf.cond(tf.reduce_sum(x) > -1e9, value, lambda: tf.constant(0.))


def in_loop(unused_x, value):
    """The value, summed up in a loop and divided."""
    return tf.while_loop(lambda i, _: i < 3, lambda i, total: (i + 1, total + value()),
                         (0, 0.))[1] / 3.


def in_loop_in_branch(x, value):
    return in_branch(x, lambda: in_loop(x, value))


def as_it_is(unused_x, value):
    return value()


def write_in_branch(x, write):
    return tf.cond(tf.reduce_sum(x) > -1e9, lambda: tf.group(write()), tf.no_op)


def write_in_loop(unused_x, write):
    def body(i):
        with tf.control_dependencies([write()]):
            return i + 1
    return tf.while_loop(lambda i: i < 2, body, [tf.identity(0)])


def reads_and_writes(read, write=as_it_is):
    """Reads a count, in control flow say, and then counts."""
    def model_fn(x):
        w = tf.get_variable('w', [], initializer=ONES)
        count = tf.get_variable('count', [], initializer=ONES, trainable=False)
        one = late(x)
        before = read(x, lambda: count * one)
        with tf.control_dependencies([before]):
            written = write(x, lambda: tf.assign_add(count, 1.))
        with tf.control_dependencies([written]):
            return tf.reduce_mean(x) * w * before
    return model_fn


def reads_after_another_write(x):
    """What is read after one variable is written, is read before another one is."""
    w = tf.get_variable('w', [], initializer=ONES)
    steps = tf.get_variable('steps', [], initializer=ONES, trainable=False)
    count = tf.get_variable('count', [], initializer=ONES, trainable=False)
    step = tf.identity(tf.assign_add(steps, 1.))
    with tf.control_dependencies([step]):
        before = count * late(x)
    with tf.control_dependencies([before]):
        written = tf.assign_add(count, 1.)
    with tf.control_dependencies([written]):
        return tf.reduce_mean(x) * w * before * step


def train(model_fn, count, steps=3, **options):
    """(losses, {name: value}, built)"""
    options.setdefault('reduction', 'mean')
    with tf.Graph().as_default() as graph:
        tf.set_random_seed(1)
        built = towers.build_towers(model_fn, tf.constant(X), sgd(0.01), count, **options)
        with tf.Session(config=towers.session_config(built.devices)) as session:
            session.run(tf.global_variables_initializer())
            session.run(tf.local_variables_initializer())
            losses = [session.run([built.loss, built.train_op])[0] for _ in range(steps)]
            values = session.run({v.op.name: v for v in graph.get_collection('variables')})
    return losses, values, built


def on_one_device(model_fn, steps=3):
    with tf.Graph().as_default():
        loss = model_fn(tf.constant(X))
        pairs = sgd(0.01).compute_gradients(loss)
        with tf.control_dependencies([loss] + tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
            train_op = sgd(0.01).apply_gradients(
                [pair for pair in pairs if pair[0] is not None])
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            losses = [session.run([loss, train_op])[0] for _ in range(steps)]
            return losses, session.run({v.op.name: v for v in tf.global_variables()})


def assert_equal(ours, theirs):
    np.testing.assert_allclose(ours[0], theirs[0], 1e-5)
    assert sorted(ours[1]) == sorted(theirs[1])
    for name in theirs[1]:
        np.testing.assert_allclose(ours[1][name], theirs[1][name], 1e-5, 1e-6, err_msg=name)


@both_copies
@two_and_four
@pytest.mark.parametrize('update_ops', ['first', pytest.param('none', marks=slow)])
@pytest.mark.parametrize('model_fn', [
    batch_norm(None), pytest.param(updates_before_the_loss, marks=slow)], ids=['inline', 'idiom'])
def test_moving_averages_are_those_of_update_ops(
        kind_of_variables, copies, count, update_ops, model_fn):  # noqa: F811
    ours = train(model_fn, count, copies=copies, update_ops=update_ops)
    theirs = train(batch_norm(), count, copies='reuse', update_ops=update_ops)
    assert_equal(ours, theirs)
    assert (ours[1][MEAN] != 0.).all() == (update_ops == 'first')


def test_one_tower_is_one_device(kind_of_variables):  # noqa: F811
    assert_equal(train(batch_norm(None), 1), on_one_device(batch_norm(None)))


def test_nobody_writes_if_none_is_to():
    for count in (1, 2):
        assert train(counts_aside, count, update_ops='none')[1]['count'] == 0.


def test_a_step_does_not_run_what_predictions_alone_read():
    def model_fn(x):
        w = tf.get_variable('w', [], initializer=ONES)
        count = tf.get_variable('count', [], initializer=ONES, trainable=False)
        with tf.name_scope('prediction'):
            prediction = in_branch(x, lambda: 2. * count)
        with tf.control_dependencies([tf.assign_add(count, 1.)]):
            return {'loss': tf.reduce_mean(x) * w, 'predictions': prediction}
    with switched('control_flow_v2', False):
        built = train(model_fn, 2, 1)[2]
    step = samples.step_operations([built.train_op])
    assert not [op.name for op in step if '/prediction/' in op.name]


@both_copies
def test_all_towers_write_if_they_are_to(kind_of_variables, copies):  # noqa: F811
    built = train(batch_norm(None), 2, 1, copies=copies, update_ops='all')[2]
    writes = [op for op in samples.step_operations([built.loss])
              if op.type.startswith('Assign') and 'tower_1' in op.name]
    assert len(writes) == 2
    assert 'forward pass     every tower writes ' + MEAN in str(built.plan)


def test_clones_and_calls_do_not_run_the_other_towers_writes(kind_of_variables):  # noqa: F811
    for copies in ('clone', 'reuse'):
        built = train(batch_norm(None), 4, 1, copies=copies)[2]
        writes = [op.name for op in samples.step_operations([built.train_op, built.loss])
                  if op.type.startswith('Assign')]
        assert len(writes) == 2 and all('tower_0' in name for name in writes)
        assert 'tower 0 alone writes %s, fc/BatchNorm/moving_variance' % MEAN in str(built.plan)
        audit = towers.audit(built)
        assert not audit.broken
        assert any(note.startswith('in the forward pass, tower 0 alone writes ' + MEAN)
                   for note in audit.notes)


@both_copies
@pytest.mark.parametrize('training', [True, pytest.param(False, marks=slow)])
def test_in_a_branch_of_control_flow_v1(kind_of_variables, copies, training):  # noqa: F811
    def model_fn(x):
        decide = tf.reduce_sum(x) > (-1e9 if training else 1e9)
        return batch_norm(None, lambda: decide)(x)
    with switched('control_flow_v2', False):
        assert_equal(train(model_fn, 2, copies=copies),
                     train(batch_norm(decide=lambda: training), 2, copies=copies))


@pytest.mark.skipif(tf.version.VERSION < '2', reason='control flow v2')
@both_copies
def test_in_a_branch_of_control_flow_v2_it_is_refused(copies):
    def model_fn(x):
        decide = tf.reduce_sum(x) > -1e9
        return batch_norm(None, lambda: decide)(x)
    with switched('control_flow_v2', True), switched('resource_variables', True):
        with pytest.raises(towers.SharedVariableError) as caught:
            train(model_fn, 2, copies=copies)
        train(model_fn, 1)
        train(model_fn, 2, copies=copies, update_ops='all')
    assert str(caught.value) == (
        'the forward pass of every tower writes variable fc/BatchNorm/moving_mean (operation '
        'tower_0/fc/BatchNorm/cond_1) within a branch or a loop of control flow v2, where it '
        'cannot be left to the first tower: put the update into the collection UPDATE_OPS (slim\'s '
        "updates_collections, by default), return it in 'updates', pass update_ops='all' to have "
        'every tower write, or call tf.disable_control_flow_v2().')


@pytest.mark.skipif(tf.version.VERSION < '2', reason='tf.function')
def test_in_a_function_it_is_refused():
    def model_fn(x):
        count = tf.get_variable('count', [], trainable=False, initializer=tf.zeros_initializer())

        @tf.function
        def counted(x):
            count.assign_add(1.)
            return x + count
        weight = tf.get_variable('weight', [], initializer=tf.ones_initializer())
        return tf.reduce_mean(counted(x)) * weight
    with switched('resource_variables', True):
        with pytest.raises(towers.SharedVariableError) as caught:
            train(model_fn, 2)
    assert 'within a function (tf.function, Defun), where it cannot be left' in str(caught.value)
    assert 'disable_control_flow_v2' not in str(caught.value)


@both_copies
@two_and_four
@pytest.mark.parametrize('model_fn', [counts, counts_aside, reads_what_it_wrote, spectral_norm],
                         ids=lambda model_fn: model_fn.__name__)
def test_what_follows_from_the_variables_is_as_on_one_device(
        kind_of_variables, copies, count, model_fn):  # noqa: F811
    assert_equal(train(model_fn, count, copies=copies), on_one_device(model_fn))


@both_copies
@pytest.mark.parametrize('flow', ['v1', 'v2'])
@pytest.mark.parametrize('read', [
    in_branch, in_loop, pytest.param(in_loop_in_branch, marks=slow)],
                         ids=lambda read: read.__name__)
def test_it_waits_for_what_is_read_in_branches_and_loops(read, flow, copies):
    if flow == 'v2' and read is not in_branch and tf.version.VERSION < '2':
        pytest.skip("TF 1.15 cannot place such a loop that reads another device's variable")
    model_fn = reads_and_writes(read)
    with switched('control_flow_v2', flow == 'v2'), switched('resource_variables', flow == 'v2'):
        assert_equal(train(model_fn, 2, copies=copies), on_one_device(model_fn))


@of_kinds('reference')
@both_copies
@pytest.mark.parametrize('passed', [
    tf.stop_gradient, lambda count: tf.reshape(count, [2])[1], lambda count: count[tf.newaxis, 1],
    pytest.param(lambda count: tf.split(count, 2)[1][0], marks=slow),
    pytest.param(lambda count: tf.reduce_sum(count, [])[0], marks=slow)],
    ids=['stop_gradient', 'reshape', 'newaxis', 'split', 'no_sum'])
def test_it_waits_for_who_takes_what_is_passed_on_of_a_variable(
        kind_of_variables, passed, copies):  # noqa: F811
    """Of a reference variable these pass the memory on, and are done before it is read."""
    def model_fn(x):
        w = tf.get_variable('w', [], initializer=ONES)
        count = tf.get_variable('count', [2], initializer=ONES, trainable=False)
        before = tf.reduce_sum(passed(count) * late(x))
        with tf.control_dependencies([before]):
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign_add(count, [1., 1.]))
        return tf.reduce_mean(x) * w * before
    assert_equal(train(model_fn, 2, copies=copies), on_one_device(model_fn))


def test_where_the_model_leaves_it_open_all_towers_read_before_the_write(
        kind_of_variables):  # noqa: F811
    """What was read of a reference variable is its memory: the first tower read the new value."""
    def first_late(x):
        time.sleep(0.1 * (x[0, 0] == X[0, 0]))
        return np.float32(1.)

    def model_fn(x, ordered=False):
        w = tf.get_variable('w', [], initializer=ONES)
        count = tf.get_variable('count', [], initializer=ONES, trainable=False)
        before = tf.identity(count)
        used = tf.stop_gradient(before) * tf.reshape(tf.py_func(first_late, [x], tf.float32), [])
        with tf.control_dependencies([used] if ordered else [before]):
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign_add(count, 1.))
        return tf.reduce_mean(x) * w * used
    assert_equal(train(model_fn, 2), on_one_device(lambda x: model_fn(x, ordered=True)))


@both_copies
@pytest.mark.parametrize('write', [write_in_branch, write_in_loop],
                         ids=lambda write: write.__name__)
def test_what_branches_and_loops_write_waits(kind_of_variables, write, copies):  # noqa: F811
    model_fn = reads_and_writes(as_it_is, write)
    with switched('control_flow_v2', False):
        assert_equal(train(model_fn, 2, copies=copies), on_one_device(model_fn))


def test_what_a_branch_writes_waits_for_what_a_branch_reads(kind_of_variables):  # noqa: F811
    model_fn = reads_and_writes(in_branch, write_in_branch)
    with switched('control_flow_v2', False):
        assert_equal(train(model_fn, 2), on_one_device(model_fn))


def test_a_constant_after_a_write_of_a_branch_is_of_that_branch(kind_of_variables):  # noqa: F811
    """Of the tower that does not write, too: else it is there whichever branch is taken."""
    def model_fn(x):
        w = tf.get_variable('w', [], initializer=ONES)
        count = tf.get_variable('count', [], initializer=ONES, trainable=False)

        def counted():
            with tf.control_dependencies([tf.assign_add(count, tf.reduce_sum(x))]):
                return tf.constant(5.)
        return tf.reduce_mean(x) * w * tf.cond(
            tf.reduce_sum(x) > 1e9, counted, lambda: tf.constant(2.) * late(x))
    with switched('control_flow_v2', False):
        assert_equal(train(model_fn, 2), on_one_device(model_fn))


@both_copies
def test_it_waits_for_what_is_read_after_another_write(kind_of_variables, copies):  # noqa: F811
    model_fn = reads_after_another_write
    assert_equal(train(model_fn, 2, copies=copies), on_one_device(model_fn))


def test_the_plan_names_what_all_use_of_what_one_writes():
    built = train(counts, 2, 1)[2]
    assert built.plan.inline_updates == 'tower 0 writes, and every tower uses, count'

    def counts_twice(x):
        """What is written of one variable goes into what is written of another."""
        w = tf.get_variable('w', [], initializer=ONES)
        count, total = [tf.get_variable(name, [], initializer=tf.zeros_initializer(),
                                        trainable=False) for name in ('count', 'total')]
        new = tf.assign_add(total, tf.identity(tf.assign_add(count, 1.)))
        return tf.reduce_mean(x) * w * tf.identity(new)
    built = train(counts_twice, 2, 1)[2]
    assert built.plan.inline_updates == 'tower 0 writes, and every tower uses, count, total'


@both_copies
def test_what_is_written_in_a_branch_and_used_there_is_refused(copies):
    def model_fn(x):
        w = tf.get_variable('w', [], initializer=ONES)
        count = tf.get_variable('count', [], initializer=tf.zeros_initializer(), trainable=False)
        return tf.cond(tf.reduce_sum(x) > -1e9,
                       lambda: tf.reduce_mean(x) * w * tf.identity(tf.assign_add(count, 1.)),
                       lambda: tf.reduce_mean(x) * w)
    with switched('control_flow_v2', False):
        with pytest.raises(towers.SharedVariableError, match=(
                r'writes variable count \(operation tower_0/cond/AssignAdd\w*\) within a branch or '
                'a loop, and uses what it has written there, where it cannot be left')):
            train(model_fn, 2, copies=copies)


@both_copies
@pytest.mark.parametrize('count', [
    pytest.param(1, marks=slow), 2, pytest.param(4, marks=slow)])
def test_moving_averages_of_activations(kind_of_variables, copies, count):  # noqa: F811
    """The first tower's; under one device's names."""
    ours = train(average_of_activations, count, 1, copies=copies)
    assert sorted(ours[1]) == sorted(on_one_device(average_of_activations)[1])
    first = X[:len(X) // count].mean()
    np.testing.assert_allclose(ours[1]['mean/ExponentialMovingAverage'], first * 0.1, 1e-5)


@pytest.mark.parametrize('update_ops', ['first', 'all'])
@pytest.mark.skipif(tf.version.VERSION < '2', reason='tf.random.Generator')
def test_generators_of_random_numbers_draw_in_every_tower(update_ops):
    import tensorflow

    def model_fn(x):
        draw = tensorflow.random.Generator.from_seed(1).normal([4])
        w = tf.get_variable('w', [], initializer=ONES)
        return {'loss': w * tf.reduce_mean(x), 'predictions': draw}
    with switched('resource_variables', True):
        built = towers.build_towers(model_fn, tf.constant(X), sgd(), 2, copies='reuse',
                                    update_ops=update_ops)
        drawn = samples.run(built, built.predictions)
    assert len(set(drawn.tolist())) == 8
    first = [op for op in samples.step_operations([built.predictions])
             if op.name.startswith('tower_0/')]
    assert not any(other.name.startswith('tower_1/') for op in first for other in op.control_inputs)
