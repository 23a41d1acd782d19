"""What a loss is computed by, told apart among workers, and what of it may differ."""

import json

import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.cluster.fingerprint import difference, fingerprint
from towers.cluster.forward_digest import difference_of_forward


def of_worker(rank, model_fn, batch=8, kind='ring', shape=(3,), devices=1, **options):
    """The fingerprint of a worker, as another one gets it; `batch=None` is not known before."""
    fields = {name: options.pop(name) for name in ('ps', 'uneven') if name in options}
    if kind == 'ps':
        fields['ps'] = ['c:1']
    with tf.Graph().as_default():
        tf.set_random_seed(rank)
        cluster = towers.Cluster(kind, ['a:1', 'b:1'], rank=rank, **fields)
        step = tf.train.get_or_create_global_step()
        built = towers.build_towers(
            model_fn, tf.placeholder(tf.float32, (batch,) + tuple(shape)),
            tf.train.GradientDescentOptimizer(0.1), devices, 'mean', cluster=cluster,
            global_step=step, check_devices=False, **options)
        return json.loads(json.dumps(fingerprint(cluster, built, None, 'SGD')))


def squares(x):
    return tf.square(x * tf.get_variable('w', [3]))


def weighted(first, second):
    def model_fn(x):
        y = squares(x)
        return first * tf.reduce_mean(y) + second * tf.reduce_mean(tf.abs(y))
    return model_fn


def by_branch(factor, v2=True):
    def model_fn(x):
        y = squares(x)
        with control_flow(v2):
            return tf.cond(tf.reduce_sum(x) > 0., lambda: factor * tf.reduce_mean(y),
                           lambda: tf.reduce_mean(y))
    return model_fn


def by_loop(factor, v2=True, looks=False):
    def model_fn(x):
        y = squares(x)

        def body(i, z):
            z = z * factor + y
            return i + 1, tf.Print(z, [i], 'seen') if looks else z
        with control_flow(v2):
            return tf.reduce_mean(tf.while_loop(lambda i, z: i < 3, body, [0, y])[1])
    return model_fn


class control_flow:
    """Control flow v2, or v1, in a `with` block."""

    def __init__(self, v2):
        self._v2 = v2

    def __enter__(self):
        self._before = tf.control_flow_v2_enabled()
        self._switch(self._v2)

    def __exit__(self, *unused):
        self._switch(self._before)

    @staticmethod
    def _switch(v2):
        (tf.enable_control_flow_v2 if v2 else tf.disable_control_flow_v2)()


def convolved(stride=1, padding='SAME'):
    def model_fn(x):
        images = tf.nn.conv2d(x, tf.get_variable('k', [3, 3, 2, 4]), [1, stride, stride, 1],
                              padding)
        return tf.reduce_mean(tf.square(images))
    return model_fn


def dropped(keep, **seed):
    return lambda x: tf.reduce_mean(tf.nn.dropout(squares(x), keep_prob=keep, **seed))


def stateless(seed):
    return lambda x: tf.reduce_mean(squares(x) * tf.random.stateless_uniform([3], seed=seed))


IMAGES = dict(shape=(8, 8, 2))
slow = pytest.mark.slow
MUL = 'its model is another one: its loss is computed by 1 Mul more than that of worker 0'
NUMBERS = 'its loss is computed with other numbers: '


@pytest.mark.parametrize('own, other, text, options', [
    (lambda x: tf.reduce_mean(squares(x)), lambda x: 2. * tf.reduce_mean(squares(x)), MUL, {}),
    pytest.param(lambda x: 2. * tf.reduce_mean(squares(x)), lambda x: tf.reduce_mean(squares(x)),
                 MUL.replace('more', 'fewer'), dict(kind='ps'), marks=slow),
    (weighted(1., 2.), weighted(1., 0.5), NUMBERS + 'Mul by 0.5, and that of worker 0 Mul by 2',
     {}),
    (weighted(1., 2.), weighted(2., 1.), 'are put together otherwise', dict(batch=None)),
    (convolved(), convolved(padding='VALID'), 'padding=VALID', IMAGES),
    (by_branch(2.), by_branch(3.), 'Mul by 3, and that of worker 0 Mul by 2', {}),
    (by_loop(2., False), by_loop(3., False), 'by 3', {})] + [
        pytest.param(*case, marks=slow) for case in [
            (dropped(0.5), dropped(0.75), NUMBERS, {}),
            (convolved(), convolved(2), NUMBERS + 'Conv2D ', IMAGES),
            (by_branch(2., False), by_branch(3., False), 'Mul by 3', {}),
            (by_loop(2.), by_loop(3.), 'Mul by 3, and that of worker 0 Mul by 2', {}),
            (lambda x: tf.reduce_mean(tf.nn.relu(squares(x) - 1.)),
             lambda x: tf.reduce_mean(tf.nn.relu(1. - squares(x))), 'are put together otherwise',
             {})]])
def test_another_loss_is_named(own, other, text, options):
    assert text in difference(of_worker(0, own, **options), of_worker(1, other, **options))


def test_a_number_from_outside_of_the_towers():
    def fingerprint_of(rank, number):
        with tf.Graph().as_default():
            factor = tf.constant(number)
            cluster = towers.Cluster('ring', ['a:1', 'b:1'], rank=rank)
            built = towers.build_towers(
                lambda x: factor * tf.reduce_mean(squares(x)), tf.ones([8, 3]),
                tf.train.GradientDescentOptimizer(0.1), 1, 'mean', cluster=cluster)
            return fingerprint(cluster, built, 8, 'SGD')
    assert 'Mul by 3, and that of worker 0 Mul by 2' in difference(fingerprint_of(0, 2.),
                                                                   fingerprint_of(1, 3.))


def looked_at(x):
    """As `squares`, with all that looks at numbers and changes none."""
    x = tf.Print(tf.identity(x, 'named'), [x, tf.reduce_sum(x)], 'seen', first_n=3)
    with tf.control_dependencies([tf.debugging.assert_less(x, 7.), tf.print('x', x)]):
        y = tf.identity(tf.check_numerics(squares(x), 'y'))
    tf.summary.scalar('mean', tf.reduce_mean(y))
    with tf.device('/cpu:0'), tf.name_scope('last'):
        return tf.reduce_mean(y, name='of_this_worker')


def rows_of(rank):
    """A model that has a worker's data within it."""
    return lambda x: tf.reduce_mean(squares(x)) + tf.reduce_sum(
        tf.gather(tf.constant([1., 2. + rank]), [rank]) + tf.gather(tf.constant([3., 4.]), rank))


@pytest.mark.parametrize('own, other, options', [
    (lambda x: tf.reduce_mean(squares(x)), looked_at, {}),
    pytest.param(by_loop(2.), by_loop(2., looks=True), {}, marks=slow),
    pytest.param(by_loop(2., False), by_loop(2., False, looks=True), {}, marks=slow),
    pytest.param(dropped(0.5, seed=3), dropped(0.5, seed=4), {}, marks=slow),
    pytest.param(dropped(0.5), dropped(0.5), dict(stateless_random=True), marks=slow),
    pytest.param(stateless([1, 2]), stateless([3, 4]), {}, marks=slow),
    (rows_of(0), rows_of(1), {}),
    (lambda x: tf.reduce_mean(squares(x)) + tf.nn.l2_loss(x) + tf.reduce_sum(x),
     lambda x: tf.reduce_sum(x) + tf.reduce_mean(squares(x)) + tf.nn.l2_loss(x), {})])
def test_what_may_differ(own, other, options):
    own, other = of_worker(0, own, **options), of_worker(1, other, **options)
    assert difference_of_forward(own['forward'], other['forward']) is None


def divided(examples):
    return lambda x: tf.reduce_sum(tf.reshape(squares(x), [examples, 3])) / examples


@pytest.mark.slow
def test_numbers_that_follow_the_size_of_the_batch():
    own, other = [of_worker(rank, divided(size), size, uneven=True)
                  for rank, size in enumerate([24, 8])]
    assert difference(own, other) is None
    doubled = of_worker(1, lambda x: 2. * divided(8)(x), 8, uneven=True)
    assert difference(own, doubled).startswith(MUL)
    # TensorFlow makes a constant of a shape that it knows.
    whole = of_worker(1, lambda x: tf.reduce_mean(x) * 0. + divided(8)(x), None, uneven=True)
    assert difference(own, whole) is None


def layered(x):
    return tf.reduce_mean(tf.square(batch_norm(x, 'bn')))


def batch_norm(x, name):
    scale, mean = tf.get_variable(name + '/gamma', [3]), tf.get_variable(
        name + '/mean', [3], trainable=False)
    moments, variance = tf.nn.moments(x, [0])
    with tf.control_dependencies([tf.assign_sub(mean, 0.1 * (mean - moments))]):
        return tf.nn.batch_normalization(x, moments, variance, None, scale, 1e-3)


def embedded(x):
    rows = tf.nn.embedding_lookup(tf.get_variable('table', [9, 3]), tf.cast(x[:, 0], tf.int32))
    return tf.reduce_mean(tf.nn.dropout(rows * x, keep_prob=0.5))


@pytest.mark.parametrize('model_fn, options', [
    (layered, dict(kind='ps', batch=None, remainder='weight'))] + [
        pytest.param(*case, marks=slow) for case in [
            (embedded, dict(devices=2)), (layered, {}), (embedded, dict(devices=2, copies='reuse')),
            (embedded, dict(batch=None, remainder='weight')),
            (layered, dict(recompute='auto', accumulate=2)), (layered, dict(first_scope=False)),
            (embedded, dict(stateless_random=True)), (layered,
                dict(numerics=towers.Numerics(check_numerics=True)))]])
def test_equal_workers(model_fn, options):
    own, other = [of_worker(rank, model_fn, **options)['forward'] for rank in (0, 1)]
    assert own['types'] and own == other
