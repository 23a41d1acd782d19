"""What the forward pass writes of shared variables is written once, after all reads."""

import numpy as np
import pytest
import sample_models as samples
import tensorflow.compat.v1 as tf
import tf_slim as slim
from case_marks import first_fast

import towers
from sample_models import sgd, switched

X = (np.random.RandomState(0).randn(8, 3) * 2 + 3).astype('float32')
ONES = tf.ones_initializer()
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


def as_it_is(unused_x, value):
    return value()


def write_in_branch(unused_x, write):
    return tf.cond(tf.placeholder_with_default(True, []), lambda: tf.group(write()), tf.no_op)


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


def build(model_fn, count=2, **options):
    return towers.build_towers(model_fn, tf.constant(X), sgd(0.01), count, **options)


def train(model_fn, count=2, steps=3, fed=(), **options):
    """(losses, {name: value}); `fed` names a placeholder that is fed True, False, True."""
    with tf.Graph().as_default() as graph:
        tf.set_random_seed(1)
        built = build(model_fn, count, reduction='mean', **options)
        with tf.Session(config=towers.session_config(built.devices)) as session:
            session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
            losses = [session.run([built.loss, built.train_op], {
                each: step != 1 for each in fed})[0] for step in range(steps)]
            values = session.run({v.op.name: v for v in graph.get_collection('variables')})
    return losses, values


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


@pytest.mark.slow
def test_moving_averages_are_those_of_update_ops():
    ours = train(batch_norm(None))
    assert_equal(ours, train(batch_norm(), copies='reuse'))
    assert (ours[1][MEAN] != 0.).all()


@pytest.mark.parametrize('update_ops, count, written', [
    ('none', 1, 0.), ('none', 2, 0.), ('all', 2, 2.)])
def test_nobody_or_everybody_writes_if_the_caller_says_so(update_ops, count, written):
    assert train(counts_aside, count, 1, update_ops=update_ops)[1]['count'] == written


@pytest.mark.parametrize('count', first_fast(1, [4, 1]))
def test_nobody_writes_for_a_metric_if_the_caller_says_so(count):
    """The update_op of a metric waits for a write by an update op."""
    def model_fn(x):
        write = tf.assign_add(tf.get_variable('count', [], initializer=ONES, trainable=False), 1.)
        with tf.control_dependencies([write]):
            mean = tf.metrics.mean(tf.identity(x))
        loss = tf.reduce_mean(x) * tf.get_variable('w', [], initializer=ONES)
        return towers.ModelOutput(loss, metrics={'mean': mean}, updates=[write])
    built = build(model_fn, count, update_ops='none')
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        session.run(built.metrics['mean'][1])
        assert session.run(tf.global_variables('count')) == [1.]
        np.testing.assert_allclose(session.run(built.metrics['mean'][0]), X.mean(), 1e-5)


def test_a_step_does_not_run_the_other_towers_writes():
    built = build(batch_norm(None))
    writes = [op.name for op in samples.step_operations([built.train_op, built.loss])
              if op.type.startswith('Assign')]
    assert len(writes) == 2 and not any('tower_' in name for name in writes)
    assert 'tower 0 alone: 2 averages and counters' in str(built.plan)
    assert not towers.audit(built).broken


@pytest.mark.slow
@pytest.mark.parametrize('v2, accumulate', [(True, 1), (False, 2)])
def test_batch_norm_whose_mode_is_fed_is_as_with_its_updates_collection(v2, accumulate):
    def trained(collection):
        def model_fn(x):
            is_training = tf.placeholder_with_default(True, [], name='is_training')
            return batch_norm(collection, lambda: is_training)(x)
        return train(model_fn, fed=['is_training:0'], memory=towers.Memory(accumulate=accumulate))
    with switched('control_flow_v2', v2), switched('resource_variables', True):
        assert_equal(trained(None), trained(tf.GraphKeys.UPDATE_OPS))


def counts_of_all_kinds(x):
    total = 0.
    for model_fn in (counts, counts_aside, reads_what_it_wrote):
        with tf.variable_scope(model_fn.__name__):
            total += model_fn(x)
    return total


@pytest.mark.parametrize('model_fn', first_fast(1, [
    counts_of_all_kinds, spectral_norm, reads_after_another_write]))
def test_what_follows_from_the_variables_is_as_on_one_device(model_fn):
    assert_equal(train(model_fn, 4), on_one_device(model_fn))


@pytest.mark.parametrize('read, write, flow', first_fast(1, [
    (in_branch, as_it_is, 'v2'), (in_loop, as_it_is, 'v2'), (in_branch, write_in_branch, 'v1')]))
def test_what_is_written_waits_for_what_is_read_in_branches_and_loops(read, write, flow):
    if flow == 'v2' and read is in_loop and tf.version.VERSION < '2':
        pytest.skip("TF 1.15 cannot place such a loop that reads another device's variable")
    model_fn = reads_and_writes(read, write)
    with switched('control_flow_v2', flow == 'v2'), switched('resource_variables', flow == 'v2'):
        assert_equal(train(model_fn), on_one_device(model_fn))


@pytest.mark.slow
def test_a_constant_after_a_write_of_a_branch_is_of_that_branch():
    """Of the tower that does not write, too: else it is there whichever branch is taken."""
    def model_fn(x):
        w = tf.get_variable('w', [], initializer=ONES)
        count = tf.get_variable('count', [], initializer=ONES, trainable=False)

        def counted():
            with tf.control_dependencies([tf.assign_add(count, 1.)]):
                return tf.constant(5.)
        return tf.reduce_mean(x) * w * tf.cond(
            tf.placeholder_with_default(False, []), counted, lambda: tf.constant(2.) * late(x))
    with switched('control_flow_v2', False):
        assert_equal(train(model_fn), on_one_device(model_fn))


def uses_what_a_branch_wrote(x, count):
    return tf.cond(tf.placeholder_with_default(True, []),
                   lambda: tf.reduce_mean(x) * tf.identity(tf.assign_add(count, 1.)),
                   lambda: tf.reduce_mean(x))


def writes_in_a_function(x, count):
    @tf.function
    def counted(x):
        count.assign_add(1.)
        return x + count
    return tf.reduce_mean(counted(x))


def reads_after_a_branch(x, count):
    written = tf.cond(tf.placeholder_with_default(True, []),
                      lambda: tf.group(tf.assign_add(count, 1.)), lambda: tf.no_op())
    with tf.control_dependencies([written]):
        return tf.reduce_mean(x) * count.read_value()


@pytest.mark.parametrize('value, v2, text', [
    (uses_what_a_branch_wrote, False, r'variable count \(operation cond/AssignAdd\w*\) within a '
     'branch or a loop, and uses what it has written there, where it cannot be left'),
    (reads_after_a_branch, False, 'within a branch or a loop, and uses what it has written there'),
    (reads_after_a_branch, True, 'within a branch or a loop of control flow v2, where it cannot'),
    pytest.param(writes_in_a_function, False, 'within a function',
                 marks=pytest.mark.skipif(tf.version.VERSION < '2', reason='tf.function'))])
def test_a_write_that_cannot_be_left_to_one_tower_is_refused(value, v2, text):
    def model_fn(x):
        count = tf.get_variable('count', [], initializer=tf.zeros_initializer(), trainable=False)
        return value(x, count) * tf.get_variable('w', [], initializer=ONES)
    with switched('control_flow_v2', v2), switched('resource_variables', True):
        with pytest.raises(towers.SharedVariableError, match=text):
            build(model_fn)


@pytest.mark.parametrize('order', first_fast(1, [-1, 1]))
def test_a_step_of_one_loss_writes_no_average_of_layers_that_only_another_loss_needs(order):
    def norm(x):
        with tf.variable_scope('norm', reuse=tf.AUTO_REUSE):
            mean = tf.get_variable('mean', [], tf.float64, tf.zeros_initializer(), trainable=False)
        with tf.control_dependencies([tf.assign_sub(mean, (mean - tf.reduce_mean(x)) * .1)]):
            return x - tf.reduce_mean(x)

    def model_fn(images, noise):
        made = noise * tf.get_variable('g', [], tf.float64, tf.ones_initializer())
        real, of_made = [norm(x) * tf.get_variable(name, [], tf.float64, tf.ones_initializer())
                         for name, x in (('d', images), ('d2', made))[::order]][::order]
        return {'loss': {'d': tf.reduce_mean(real) + tf.reduce_mean(of_made),
                         'g': tf.reduce_mean(tf.square(of_made - 1.))}}
    images, noise = tf.placeholder(tf.float64, [4]), tf.placeholder(tf.float64, [4])
    built = towers.build_towers(model_fn, (images, noise), {
        name: tf.train.GradientDescentOptimizer(0.) for name in 'dg'}, 2, 'mean')
    mean, = [each for each in tf.global_variables() if each.op.name == 'norm/mean']
    with tf.Session(config=towers.session_config(2)) as session:
        session.run(tf.global_variables_initializer())
        session.run(built.train_ops['g'], {noise: [1.] * 4})  # without images
        np.testing.assert_allclose(session.run(mean), .1, rtol=1e-12)
        session.run(built.train_ops['d'], {images: [100.] * 4, noise: [1.] * 4})
        np.testing.assert_allclose(session.run(mean), .1 + 9.99 + .09, rtol=1e-12)
