"""What `transform_gradients` and optimizers take of the model function by a closure."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.cluster.drawn_updates import seeds_of_updates
from towers.errors import ClusterError, GradientError

HELD = {}
slow = pytest.mark.slow


def weight():
    return tf.get_variable('w', [], tf.float64, tf.constant_initializer(1.))


def counting(x, write=lambda size, mean: tf.assign(size, size + mean)):
    """w * mean(x); UPDATE_OPS add the mean to `size`."""
    size = tf.get_variable('size', [], tf.float64, tf.zeros_initializer(), trainable=False)
    update = write(size, tf.reduce_mean(x))
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
    HELD.update(size=size, update=update)
    return weight() * tf.reduce_mean(x)


def in_a_branch(x):
    return counting(x, lambda size, mean: tf.cond(
        mean > 0, lambda: tf.identity(tf.assign_add(size, mean)),
        lambda: tf.constant(0., tf.float64)))


def as_a_group(x):
    return counting(x, lambda size, mean: tf.group(tf.assign_add(size, mean)))


def waits(pairs):
    with tf.control_dependencies([HELD['update']]):
        size = tf.identity(HELD['size'].read_value())
    return [(gradient / (1 + size), variable) for gradient, variable in pairs]


def takes(pairs):
    return [(gradient / (1 + HELD['update']), variable) for gradient, variable in pairs]


class Slower(tf.train.GradientDescentOptimizer):
    """Divides the rate by the size, which it reads after its update."""

    def _prepare(self):
        with tf.control_dependencies([HELD['update']]):
            size = tf.identity(HELD['size'].read_value())
        self._learning_rate_tensor = tf.constant(.1, tf.float64) / (1 + size)


def trained(model_fn, transform=None, examples=6, num_towers=2, optimizer=None, steps=2, **options):
    """The values of all variables after each step, as a list of dicts."""
    with tf.Graph().as_default(), tf.variable_scope('', use_resource=options.pop('resource', True)):
        options = dict(dict(remainder='weight', transform_gradients=transform), **options)
        built = towers.build_towers(
            model_fn, tf.constant(np.arange(1., examples + 1)),
            optimizer or tf.train.GradientDescentOptimizer(tf.constant(.1, tf.float64)), num_towers,
            'mean', check_devices=False, **options)
        with tf.Session(config=tf.ConfigProto(device_count={'CPU': num_towers})) as session:
            session.run(tf.global_variables_initializer())
            found = []
            for _ in range(steps):
                session.run(built.train_op)
                found.append({variable.op.name: session.run(variable)
                              for variable in tf.global_variables()})
            return found


# Mean of the first tower's (or micro-batch's) examples, and of all of them.
SHARDS = [(dict(num_towers=1), 3.5, 3.5), (dict(copies='clone'), 2., 3.5),
          (dict(copies='reuse'), 2., 3.5), (dict(examples=5), 2., 3.),
          (dict(examples=7, num_towers=3), 2., 4.), (dict(num_towers=1, accumulate=2), 2., 3.5),
          (dict(examples=8, copies='reuse', accumulate=2), 1.5, 4.5),
          (dict(copies='reuse', first_scope=False), 2., 3.5)]


@pytest.mark.parametrize('model_fn, way, options, first, mean', [
    (counting, dict(transform=waits)) + SHARDS[1], (counting, dict(transform=waits)) + SHARDS[6],
    (counting, dict(transform=takes)) + SHARDS[3], (as_a_group, dict(transform=waits)) + SHARDS[2],
    (in_a_branch, dict(transform=takes)) + SHARDS[3],
    (in_a_branch, dict(transform=waits)) + SHARDS[7],
    (counting, dict(optimizer=Slower)) + SHARDS[3]] + [
        pytest.param(*case, marks=slow) for case in [
            (counting, dict(transform=waits)) + SHARDS[0],
            (counting, dict(transform=waits)) + SHARDS[4],
            (counting, dict(transform=takes)) + SHARDS[5],
            (in_a_branch, dict(transform=waits)) + SHARDS[6],
            (counting, dict(optimizer=Slower)) + SHARDS[2]]])
def test_the_update_of_the_first_tower_is_the_one_that_runs(model_fn, way, options, first, mean):
    # TensorFlow itself refuses reference variables in branches of control flow v2.
    for resource in (True,) if model_fn is in_a_branch else (True, False):
        way = dict(way)
        if 'optimizer' in way:
            way['optimizer'] = Slower(.1)
        found = trained(model_fn, resource=resource, **dict(way, **options))
        w = 1.
        for step, values in enumerate(found):
            size = (step + 1) * first
            w -= .1 * mean / (1 + size)
            np.testing.assert_allclose([values['size'], values['w']], [size, w], rtol=1e-12)


@pytest.mark.parametrize('options, mean', [
    (dict(examples=7, num_towers=3), 4.), (dict(examples=8, copies='reuse', accumulate=2), 4.5),
    pytest.param(dict(num_towers=1), 3.5, marks=slow),
    pytest.param(dict(copies='reuse', first_scope=False), 3.5, marks=slow)])
def test_a_loss_is_that_of_the_batch(options, mean):
    def model_fn(x):
        HELD['loss'] = weight() * tf.reduce_mean(x)
        return HELD['loss']

    def by_loss(pairs):
        return [(gradient * HELD['loss'], variable) for gradient, variable in pairs]
    w = 1.
    for values in trained(model_fn, by_loss, **options):
        w -= .1 * mean * (w * mean)
        np.testing.assert_allclose(values['w'], w, rtol=1e-12)


def test_a_loss_is_taken_as_it_was_returned():
    def regularized(x):
        w = weight()
        tf.add_to_collection(tf.GraphKeys.REGULARIZATION_LOSSES, .5 * w * w)
        HELD['loss'] = w * tf.reduce_mean(x)
        return HELD['loss']

    def by_loss(pairs):
        return [(gradient * HELD['loss'], variable) for gradient, variable in pairs]
    np.testing.assert_allclose(
        trained(regularized, by_loss, 5, steps=1, regularization='add')[0]['w'],
        1 - .1 * (3. + 1) * 3., rtol=1e-12)


def test_one_of_several_losses():
    def model_fn(x):
        mean = tf.reduce_mean(x)
        other = tf.get_variable('v', [], tf.float64, tf.constant_initializer(2.))
        HELD['loss'] = other * mean * mean
        return dict(loss=dict(a=weight() * mean, b=HELD['loss']))

    def by_loss(pairs):
        return [(gradient * HELD['loss'], variable) for gradient, variable in pairs]
    square = (2. ** 2 * 3 + 4.5 ** 2 * 2) / 5  # mean of the shards' squared means: 2 of 3, 4.5 of 2
    rate = tf.train.GradientDescentOptimizer
    found = trained(model_fn, by_loss, 5, optimizer=dict(a=rate(.1), b=rate(.1)),
                    steps=1, var_list=dict(a=lambda every: [v for v in every if v.op.name == 'w'],
                                            b=lambda every: [v for v in every if v.op.name == 'v'])
                    )[0]
    np.testing.assert_allclose([found['w'], found['v']], [
        1 - .1 * 3 * 2 * square, 2 - .1 * square * 2 * square], rtol=1e-7)


def test_a_tensor_that_depends_on_a_towers_examples_is_refused():
    def model_fn(x):
        HELD['largest'] = tf.reduce_max(x)
        return weight() * tf.reduce_mean(x)

    def by_largest(pairs):
        return [(gradient / HELD['largest'], variable) for gradient, variable in pairs]
    for options in dict(copies='clone'), dict(examples=5), dict(accumulate=2, num_towers=1):
        with pytest.raises(GradientError, match=r'computes with .*Max.*:0, a tensor of the model '
                                                'function that depends on the examples of one '
                                                'tower, .*let UPDATE_OPS write it to a variable'):
            trained(model_fn, by_largest, **options)
    np.testing.assert_allclose(
        trained(model_fn, by_largest, num_towers=1, steps=1)[0]['w'], 1 - .1 * 3.5 / 6)


def test_what_is_shown_and_what_is_the_same_in_all_towers_may_be_taken():
    def model_fn(x):
        step = tf.train.get_or_create_global_step()
        HELD.update(rate=1. / (2. + tf.cast(step, tf.float64)), largest=tf.reduce_max(x))
        return weight() * tf.reduce_mean(x)

    def shown(pairs):
        tf.summary.scalar('largest', HELD['largest'])
        return [(tf.Print(gradient, [HELD['largest'] * 2]) * HELD['rate'], variable)
                for gradient, variable in pairs]
    np.testing.assert_allclose(trained(model_fn, shown, 5, steps=1)[0]['w'], 1 - .1 * 3 / 2)


def test_calls_that_differ_are_refused_where_an_update_is_taken():
    calls = []

    def model_fn(x):
        calls.append(x)
        return counting(x) if len(calls) == 1 else counting(
            x, lambda size, mean: tf.assign_add(size, mean))
    with pytest.raises(GradientError, match='runs an update of tower 1; the first tower, whose '
                                            'updates run, made other operations'):
        trained(model_fn, waits, copies='reuse')


def built_in_a_ring(model_fn, transform):
    ring = towers.Cluster('ring', ['a:1', 'b:1'])
    inputs = tf.data.make_one_shot_iterator(
        tf.data.Dataset.from_tensors(np.ones(4)).repeat()).get_next()
    HELD['batch'] = inputs
    return towers.build_towers(model_fn, inputs, tf.train.GradientDescentOptimizer(.1), 1, 'mean',
                               transform_gradients=transform, cluster=ring)


def test_in_a_ring_a_workers_own_loss_and_batch_are_refused():
    def model_fn(x):
        HELD['loss'] = weight() * tf.reduce_mean(x)
        return HELD['loss']
    with tf.Graph().as_default(), pytest.raises(
            GradientError, match="the loss of one worker's examples"):
        built_in_a_ring(model_fn, lambda pairs: [(g * HELD['loss'], v) for g, v in pairs])
    built = built_in_a_ring(model_fn, lambda pairs: [(g * HELD['batch'][0], v) for g, v in pairs])
    with pytest.raises(ClusterError, match=r"computed from what 'IteratorGetNext' "
                                           r'\(IteratorGetNext\) reads'):
        seeds_of_updates(built)


def test_in_a_ring_a_workers_own_loss_and_batch_may_be_shown():
    def model_fn(x):
        HELD['loss'] = weight() * tf.reduce_mean(x)
        return HELD['loss']
    built = built_in_a_ring(model_fn, lambda pairs: [
        (tf.Print(g, [HELD['loss'], HELD['batch']]), v) for g, v in pairs])
    assert seeds_of_updates(built) == ''


@pytest.mark.parametrize('look', [
    lambda gradient: tf.Print(gradient, [HELD['y']]), pytest.param(
        lambda gradient: (tf.summary.histogram('y', HELD['y']), gradient)[1], marks=slow),
    pytest.param(lambda gradient: _after(
        [tf.Assert(tf.reduce_all(HELD['y'] > 0.), [HELD['y']])], gradient), marks=slow)])
def test_shards_of_other_static_sizes_may_be_shown(look):
    """12 examples on 5 towers: the last one's 2 have another shape than the first one's 3."""
    def model_fn(x):
        HELD['y'] = weight() * x
        return tf.reduce_mean(HELD['y'])
    [values] = trained(model_fn, lambda pairs: [
        (look(gradient), variable) for gradient, variable in pairs], 12, 5, steps=1)
    np.testing.assert_allclose(values['w'], 1. - .1 * 6.5)
    with pytest.raises(GradientError, match='examples of one tower.*Gradients of gradients'):
        trained(model_fn, lambda pairs: [
            (gradient * HELD['y'][0], variable) for gradient, variable in pairs], 12, 5)


def _after(operations, gradient):
    with tf.control_dependencies(operations):
        return tf.identity(gradient)
