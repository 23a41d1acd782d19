"""towers.batch_sum, batch_mean, batch_concat, and batch_norm='sync', against one device."""

import functools
import re

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
import tf_slim as slim
from case_marks import first_fast

import towers
from sample_models import momentum, plain_step, switched, values_after

slow = pytest.mark.slow
X, Y = np.random.RandomState(0).randn(9, 5), np.random.RandomState(1).randn(9, 3)  # 5 and 4
IMAGES = np.random.RandomState(2).randn(9, 4, 4, 3) * 2 + 3
DATA = dict(vectors=(X, Y), images=(IMAGES, Y),
            floats=(IMAGES.astype(np.float32), Y.astype(np.float32)))
WAYS = [{}, dict(reduction='sum'), dict(copies='reuse'),
        dict(variables=towers.VariablePlacement('replicated')),
        dict(memory=towers.Memory(recompute='auto'))]


def variable(name, shape, seed):
    return tf.get_variable(name, shape, tf.float64, tf.glorot_uniform_initializer(seed))


def masked_sequence_loss(x, y):
    """A batch norm by hand, and a loss over the batch's unmasked examples."""
    h = tf.matmul(x, variable('w', [5, 3], 1))
    mean = towers.batch_mean(tf.reduce_mean(h, 0))
    variance = towers.batch_mean(tf.reduce_mean(tf.square(h - mean), 0))
    moving = tf.get_variable('moving', [3], tf.float64, tf.zeros_initializer(), trainable=False)
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign(moving, .9 * moving + .1 * mean))
    h = (h - mean) * tf.rsqrt(variance + 1e-3)
    mask = tf.cast(x[:, 0] > 0, tf.float64)
    total = tf.reduce_sum(tf.reduce_sum((h - y) ** 2, 1) * mask)
    return towers.batch_sum(total) / towers.batch_sum(tf.reduce_sum(mask))


def contrastive_loss(x, y):
    """Each example against all of the batch; integers say which is its own."""
    a, b = tf.matmul(x, variable('w', [5, 4], 1)), tf.matmul(y, variable('u', [3, 4], 2))
    own = tf.cast(x[:, 0] * 1e6, tf.int64)
    is_own = tf.cast(tf.equal(own[:, None], towers.batch_concat(own)[None]), tf.float64)
    logits = tf.matmul(a, towers.batch_concat(b), transpose_b=True)
    return tf.reduce_mean(-tf.reduce_sum(tf.nn.log_softmax(logits) * is_own, 1))


def convolutional(normalize, names=('norm',)):
    def model_fn(x, y):
        h = tf.nn.conv2d(x, variable('k', [3, 3, 3, 3], 1), 1, 'SAME')
        for name in names:
            h = tf.nn.relu(normalize(h, name))
        return tf.reduce_mean((tf.reduce_mean(h, [1, 2]) - y) ** 2)
    return model_fn


def slims(is_training=lambda: True, **options):
    return convolutional(lambda h, name: slim.batch_norm(
        h, is_training=is_training(), scale=True, decay=.5, scope=name, **options))


def in_a_branch(h, name):
    """Layer, averages and all, in a branch of control flow v1 that each step takes or not."""
    return tf.cond(tf.placeholder_with_default(True, []), lambda: slim.batch_norm(
        h, is_training=True, updates_collections=None, fused=h.dtype == tf.float32, decay=.5,
        scope=name), lambda: h)


def by_moments(h, name):
    mean, variance = tf.nn.moments(h, [0, 1, 2])
    return tf.nn.batch_normalization(h, mean, variance, None, variable(name, [h.shape[-1]], 5), .1)


def by_hand(h, name):
    mean = tf.reduce_mean(h, 0)
    variance = tf.reduce_mean(tf.square(h - mean), 0)
    return variable(name, [h.shape[-1]], 5) * (h - mean) / tf.sqrt(variance + .1)


def kerass(h, name):
    return tf.keras.layers.BatchNormalization(momentum=.5, name=name, dtype='float64')(
        h, training=True)


BY_MOMENTS = convolutional(by_moments, ['one', 'two'])
BY_HAND = convolutional(by_hand, ['one', 'two'])


@functools.lru_cache(maxsize=None)  # several tests compare with the same run
def on_one_device(model_fn, data):
    with tf.Graph().as_default(), tf.variable_scope('', use_resource=True), tf.Session() as session:
        losses, values = values_after(session, *plain_step(model_fn, DATA[data], momentum))
        return dict(values, losses=losses)


def in_towers(model_fn, data, num_towers=2, reduction='mean', **options):
    with tf.Graph().as_default():
        rate = .1 if reduction == 'mean' else .1 / num_towers
        built = towers.build_towers(
            model_fn, tuple(map(tf.constant, DATA[data])), tf.train.MomentumOptimizer(rate, .9),
            num_towers, reduction, remainder='weight', **options)
        with tf.Session(config=towers.session_config(built.devices)) as session:
            losses, found = values_after(session, built.loss, built.train_op)
    if reduction == 'sum':  # N times the gradient at 1 / N of the rate: the slots are N times
        found = {name: value / (num_towers if 'Momentum' in name else 1)
                 for name, value in found.items()}
    return dict(found, losses=losses), built


def assert_one_device(model_fn, data='vectors', tolerance=1e-12, but=(), **options):
    ours, built = in_towers(model_fn, data, **options)
    theirs = on_one_device(model_fn, data)
    for name, value in theirs.items():
        if not any(part in name for part in but):
            np.testing.assert_allclose(ours[name], value, tolerance, tolerance, err_msg=name)
    return built


@pytest.mark.parametrize('options', first_fast(1, WAYS[1:]), ids=str)
def test_a_loss_over_what_is_counted_in_the_batch(options):
    assert assert_one_device(masked_sequence_loss, **options).plan.line('whole batch') is None


@slow
@pytest.mark.parametrize('options', [dict(num_towers=4)] + [
    pytest.param(each, marks=slow) for each in WAYS[2:]], ids=str)
def test_negatives_from_the_whole_batch(options):
    assert_one_device(contrastive_loss, **options)


@pytest.mark.slow
def test_in_a_branch_that_all_towers_take_or_leave():
    def model_fn(x, y):
        h = tf.matmul(x, variable('w', [5, 3], 1))
        h = tf.cond(tf.placeholder_with_default(True, []),  # fed, as the step is
                    lambda: h - towers.batch_mean(tf.reduce_mean(h, 0)), lambda: 2. * h)
        return tf.reduce_mean((h - y) ** 2)
    with switched('control_flow_v2', False):
        assert_one_device(model_fn)


@pytest.mark.slow
def test_a_tower_without_an_example_adds_nothing():
    def model_fn(x):
        losses = tf.square(tf.tensordot(x, variable('w', [5], 1), 1) - 1.)
        count = tf.cast(tf.shape(x)[0], tf.float64)
        return towers.batch_sum(tf.reduce_sum(losses)) / towers.batch_sum(count)
    batch = tf.placeholder_with_default(X[:3], [None, 5])
    built = towers.build_towers(model_fn, batch, tf.train.GradientDescentOptimizer(.1), 4,
                                'mean', remainder='weight')
    weights = np.array([.1, .2, .3, .4, .5])
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run(built.variables[0].assign(weights))
        loss, gradient = session.run([built.loss, built.gradients[0][0]])
    left = X[:3].dot(weights) - 1.
    np.testing.assert_allclose(loss, np.mean(left ** 2), 1e-12)
    np.testing.assert_allclose(gradient, 2. * left.dot(X[:3]) / 3, 1e-12)


def test_rows_of_a_batch_with_fewer_examples_than_towers_are_refused():
    with pytest.raises(towers.ModelFunctionError, match='fewer examples than there are towers'):
        towers.build_towers(lambda x: tf.reduce_mean(towers.batch_concat(x * variable('w', [], 1))),
                            tf.constant(X[:1]), tf.train.GradientDescentOptimizer(.1), 2,
                            remainder='weight')


def test_without_towers_they_are_the_tensor_itself():
    x = tf.constant(X)
    values = [towers.batch_sum(x), towers.batch_mean(x), towers.batch_concat(x)]
    assert all(value.op.type == 'Identity' and value.op.inputs[0] is x for value in values)


def in_a_loop(x):
    return tf.while_loop(lambda i, _: i < 2, lambda i, total: (i + 1, total + towers.batch_sum(
        tf.reduce_sum(x))), [tf.constant(0), tf.zeros([], tf.float64)])[1]


@pytest.mark.parametrize('value, options, text', [
    (lambda x: towers.batch_sum(x[0]), dict(memory=towers.Memory(accumulate=4)),
     r'batch_sum\(.*4 micro-batches'),
    (in_a_loop, {}, 'batch_sum.* is in a loop, or in a function or branch'),
    (lambda x: towers.batch_concat(tf.reduce_sum(x)), {}, r'shape=\(\).*\[rows'),
    (lambda x: towers.batch_sum(None), {}, r'batch_sum\(None\): expected a dense tensor'),
    (lambda x: towers.batch_sum(tf.equal(x, 0.)), {}, 'bool.*floats or integers'),
    (lambda x: tf.gradients(towers.batch_sum(x), x)[0], {}, r'a gradient .*through batch_sum\('),
    (lambda x: tf.gradients(by_moments(tf.reshape(x, [-1, 5, 1, 1]), 'norm'), x)[0],
     dict(batch_norm='sync'), 'a gradient through batch norm moments/')])
def test_what_cannot_be_exchanged_is_refused(value, options, text):
    def model_fn(x):
        return tf.reduce_mean(tf.cast(value(x), tf.float64)) * variable('w', [], 1)
    with pytest.raises(towers.ModelFunctionError, match=text):
        towers.build_towers(model_fn, tf.constant(X[:8]), tf.train.GradientDescentOptimizer(.1), 2,
                            **options)


@pytest.mark.parametrize('value, options', [
    (lambda x: towers.batch_sum(tf.reduce_sum(x)), {}),
    (tf.reduce_sum, dict(batch_norm='sync'))])
@pytest.mark.parametrize('kind, fields, why', [
    ('ps', dict(ps=['c:1']), 'on parameter servers exchange gradients alone: use kind='),
    ('ring', dict(every=4), 'with every=4 a step is of one worker')])
def test_machines_that_exchange_no_values_refuse_them(kind, fields, why, value, options):
    """With one tower on each, too: its shard is not the batch."""
    def model_fn(x):
        return tf.cast(value(x), tf.float64) * variable('w', [], 1)
    with pytest.raises(towers.TowersError, match='(batch_sum|sync).*' + why):
        towers.build_towers(model_fn, tf.constant(X[:8]), tf.train.GradientDescentOptimizer(.1),
                            1, cluster=towers.Cluster(kind, ['a:1', 'b:1'], rank=0, **fields),
                            **options)


# ---- batch norm ----------------------------------------------------------------------------------

@pytest.fixture
def mended_slim():
    towers.mend_slim()
    with switched('control_flow_v2', False):
        yield


@pytest.mark.parametrize('model_fn, options', first_fast(0, [
    (slims(lambda: tf.placeholder_with_default(True, []), fused=False), {}),
    (BY_MOMENTS, dict(memory=towers.Memory(recompute='auto'))),
    (slims(fused=False, updates_collections=None), {}),
    (convolutional(in_a_branch), {}),
    (BY_HAND, {})] + [(BY_MOMENTS, each) for each in WAYS[:-1]]))
def test_batch_norm_in_sync_is_that_of_one_device(model_fn, options, mended_slim):
    built = assert_one_device(model_fn, 'images', batch_norm='sync', **options)
    assert built.plan.line('batch norm').startswith(
        '%d in sync over the whole batch' % (2 if model_fn in (BY_MOMENTS, BY_HAND) else 1))


def of_kernels_statistics(x, y):
    """A loss that takes the mean and the variance of a fused batch norm, beside its result."""
    h = tf.cast(tf.reshape(tf.matmul(x, variable('w', [5, 16], 1)), [-1, 2, 2, 4]), tf.float32)
    normal, mean, variance = tf.nn.fused_batch_norm(h, tf.ones([4]), tf.zeros([4]))
    scaled = tf.square(h - mean) / (1. + variance)
    return tf.reduce_mean(tf.cast(tf.square(normal) * [1., 2., 3., 4.] + scaled, tf.float64)) + (
        tf.reduce_mean(tf.square(y)))


@pytest.mark.slow
def test_a_kernels_mean_and_variance_have_no_gradient_in_sync_as_on_one_device():
    built = assert_one_device(of_kernels_statistics, tolerance=2e-5, batch_norm='sync')
    assert built.plan.line('one device').startswith('proven')


def of_masked_rows(x, y):
    """A batch norm over the rows that a mask leaves, and a mean over these rows."""
    kept = x[:, 0] > 0
    h = tf.boolean_mask(tf.matmul(x, variable('w', [5, 3], 1)), kept)
    mean, variance = tf.nn.moments(h, [0])
    h = (h - mean) * tf.rsqrt(variance + 1e-3)
    total = tf.reduce_sum(tf.square(h - tf.boolean_mask(y, kept)))
    return towers.batch_sum(total) / towers.batch_sum(tf.reduce_sum(tf.cast(kept, tf.float64)))


def test_batch_norm_in_sync_over_masked_rows_is_that_of_one_device():
    built = assert_one_device(of_masked_rows, batch_norm='sync')
    assert built.plan.line('one device').startswith('proven: ')


@pytest.mark.parametrize('inside', first_fast(1, [True, False]))
def test_batch_norm_in_sync_by_a_fed_flag_and_control_flow_v2(inside):
    """As of Keras with `training` fed; statistics inside of the branch cannot meet."""
    def layer(h, unused_name):
        def moments():
            return tuple(tf.nn.moments(h, [0, 1, 2]))
        of_batch = moments()
        mean, variance = tf.cond(
            tf.placeholder_with_default(True, []), moments if inside else lambda: of_batch,
            lambda: (tf.zeros_like(of_batch[0]), tf.ones_like(of_batch[1])))
        return (h - mean) * tf.rsqrt(variance + .1)
    with switched('control_flow_v2', True):
        if inside:
            with pytest.raises(towers.ModelFunctionError, match='branch of control flow v2'):
                assert_one_device(convolutional(layer), 'images', batch_norm='sync')
            return
        built = assert_one_device(convolutional(layer), 'images', batch_norm='sync')
    assert built.plan.line('batch norm').startswith('1 in sync')


@pytest.mark.slow
@pytest.mark.skipif(tf.version.VERSION < '2', reason='float64 in the fused layer of TF 1')
def test_batch_norm_of_keras_in_sync(mended_slim):
    # Without towers, nobody runs the updates of Keras' layers.
    assert_one_device(convolutional(kerass), 'images', 1e-10, ['moving'], batch_norm='sync')


@pytest.mark.parametrize('is_in_branch', first_fast(1, [True, False]))
def test_fused_batch_norm_in_sync_is_that_of_one_device(is_in_branch, mended_slim):
    """The kernel is float32 alone; its moving variance has the correction n / (n - 1)."""
    def model_fn(x, y):
        h = slim.conv2d(x, 6, 3, activation_fn=None, biases_initializer=None, scope='conv',
                        weights_initializer=tf.glorot_uniform_initializer(1))
        if is_in_branch:
            h = in_a_branch(h, 'norm')
        else:
            h = slim.batch_norm(h, fused=True, scale=True, decay=.5, scope='norm')
        out = slim.fully_connected(tf.reduce_mean(h, [1, 2]), 3, activation_fn=None, scope='out',
                                   weights_initializer=tf.glorot_uniform_initializer(2))
        return tf.reduce_mean((out - y) ** 2)
    built = assert_one_device(model_fn, 'floats', 2e-5, batch_norm='sync')
    assert built.plan.line('batch norm').startswith('1 in sync over the whole batch')


@pytest.mark.slow
def test_what_normalizes_each_example_alone_stays():
    def layer_norm(h, unused_name):
        mean, variance = tf.nn.moments(h, [1, 2, 3], keepdims=True)
        return (h - mean) * tf.rsqrt(variance + .1)
    built = assert_one_device(convolutional(layer_norm), 'images', batch_norm='sync')
    assert built.plan.line('batch norm').startswith('0 in sync')


def rows_as_channels(h, size):
    """As Keras' LayerNormalization calls the kernel: each example is a channel."""
    h = tf.reshape(tf.reshape(h, [size, 48]), [1, size, 48, 1])
    ones = tf.ones([size])
    norm = tf.nn.fused_batch_norm(tf.transpose(h, [0, 2, 3, 1]), ones, 0. * ones)[0]
    return tf.reshape(tf.transpose(norm, [0, 3, 1, 2]), [size, 4, 4, 3])


def over_the_first_dimension(h, unused_size):
    """Over the pixels of each example, which come first."""
    h = tf.transpose(h, [1, 2, 0, 3])
    mean, variance = tf.nn.moments(h, [0, 1])
    return tf.transpose((h - mean) * tf.rsqrt(variance + .1), [2, 0, 1, 3])


@pytest.mark.parametrize('norm', first_fast(1, [rows_as_channels, over_the_first_dimension]))
def test_norms_of_each_example_stay_wherever_its_dimension_is(norm):
    def model_fn(x, y):
        h = tf.nn.conv2d(x, tf.cast(variable('k', [3, 3, 3, 3], 1), x.dtype), 1, 'SAME')
        h = norm(h, tf.shape(x)[0])
        return tf.reduce_mean((tf.reduce_mean(tf.nn.relu(h), [1, 2]) - y) ** 2)
    built = assert_one_device(model_fn, 'floats', 2e-5, batch_norm='sync')
    assert built.plan.line('batch norm').startswith('0 in sync')


def test_a_norm_that_is_not_proven_to_be_over_the_examples_is_left_alone_and_named():
    """The shard's size is in the shapes of the graph: whose the statistics are is not known."""
    def model_fn(x):
        return tf.reduce_mean(rows_as_channels(x, 1)) * tf.get_variable('w', [])
    plan = towers.build_towers(model_fn, tf.constant(IMAGES[:2].astype(np.float32)),
                               tf.train.GradientDescentOptimizer(.1), 2, batch_norm='sync').plan
    assert re.match('0 in sync over the whole batch; 1 left alone, not proven to be over the '
                    r'examples \(FusedBatchNorm', plan.line('batch norm'))


@pytest.mark.slow
def test_the_mean_of_a_second_call_of_moments_is_in_sync():
    def two_calls(h, unused_name):
        return (h - tf.nn.moments(h, [0, 1, 2])[0]) * tf.rsqrt(
            tf.nn.moments(h, [0, 1, 2])[1] + .1)
    built = assert_one_device(convolutional(two_calls), 'images', batch_norm='sync')
    assert built.plan.line('batch norm').startswith('1 in sync')


@pytest.mark.slow
def test_a_mean_over_the_same_dimensions_in_other_words_is_in_sync():
    def own_mean(h, unused_name):
        mean = tf.reduce_mean(h, [2, 1, -4])
        return (h - mean) * tf.rsqrt(tf.nn.moments(h, [0, 1, 2])[1] + .1)
    assert_one_device(convolutional(own_mean), 'images', batch_norm='sync')


@pytest.mark.skipif(tf.version.VERSION < '2', reason='control flow v2')
def test_a_fused_batch_norm_in_a_branch_of_control_flow_v2_is_refused():
    def model_fn(x):
        scale = tf.get_variable('scale', [3], initializer=tf.ones_initializer())
        return tf.reduce_mean(tf.cond(
            tf.placeholder_with_default(True, []),
            lambda: tf.nn.fused_batch_norm(x, scale, scale)[0], lambda: x))
    with switched('control_flow_v2', True), pytest.raises(
            towers.ModelFunctionError, match="^batch_norm='sync', and batch norm .*flow v2"):
        towers.build_towers(model_fn, tf.constant(IMAGES[:8].astype(np.float32)),
                            tf.train.GradientDescentOptimizer(.1), 2, batch_norm='sync')


@pytest.mark.skipif(tf.version.VERSION < '2', reason='control flow v2')
@pytest.mark.parametrize('kind', first_fast(2, ['fused', 'moments', 'each example']))
def test_a_batch_norm_over_examples_in_a_loop_of_control_flow_v2_is_refused(kind):
    def model_fn(x):
        scale = tf.get_variable('scale', [3], initializer=tf.ones_initializer())

        def normalized(h):
            if kind == 'moments':
                mean, variance = tf.nn.moments(h, [0, 1, 2])
                return tf.nn.batch_normalization(h, mean, variance, scale, scale, .1)
            return tf.nn.fused_batch_norm(h, scale, scale)[0]
        if kind == 'each example':
            return tf.reduce_mean(tf.map_fn(lambda image: normalized(image[tf.newaxis]), x))
        return tf.reduce_mean(tf.while_loop(
            lambda i, _: i < 2, lambda i, h: (i + 1, normalized(h)), [0, x])[1])

    def build():
        return towers.build_towers(
            model_fn, tf.placeholder(tf.float32, [None] + list(IMAGES.shape[1:])),
            tf.train.GradientDescentOptimizer(.1), 2, batch_norm='sync')
    with switched('control_flow_v2', True):
        if kind == 'each example':
            assert build().plan.line('one device').startswith('proven')
        else:
            with pytest.raises(towers.ModelFunctionError, match='are taken in a loop'):
                build()


@pytest.mark.skipif(tf.version.VERSION < '2', reason='a kernel that averages')
def test_a_kernel_that_averages_by_itself_is_refused():
    def model_fn(x):
        scale = tf.get_variable('scale', [3], initializer=tf.ones_initializer())
        return tf.reduce_mean(tf.nn.fused_batch_norm(
            x, scale, scale, scale, scale, exponential_avg_factor=.5)[0])
    with pytest.raises(towers.ModelFunctionError, match='averages by itself: leave exponential_av'):
        towers.build_towers(model_fn, tf.constant(IMAGES[:8].astype(np.float32)),
                            tf.train.GradientDescentOptimizer(.1), 2, batch_norm='sync')
