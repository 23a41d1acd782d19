"""What `transform_gradients` and optimizers take of the model function by a closure."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.errors import GradientError

HELD = {}
slow = pytest.mark.slow


def weight():
    return tf.get_variable('w', [], tf.float64, tf.constant_initializer(1.))


def counting(x):
    """w * mean(x); UPDATE_OPS average the mean in `size`."""
    size = tf.get_variable('size', [], tf.float64, tf.zeros_initializer(), trainable=False)
    update = tf.assign(size, .5 * size + tf.reduce_mean(x))
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
    HELD.update(size=size, update=update)
    return weight() * tf.reduce_mean(x)


def waits(pairs):
    with tf.control_dependencies([HELD['update']]):
        size = tf.identity(HELD['size'].read_value())
    return [(gradient / (1 + size), variable) for gradient, variable in pairs]


def takes(pairs):
    return [(gradient / (1 + HELD['update']), variable) for gradient, variable in pairs]


def trained(model_fn, transform=None, examples=6, num_towers=2, optimizer=None, steps=1, **options):
    """The values of all variables after each step, as a list of dicts."""
    with tf.Graph().as_default():
        built = towers.build_towers(
            model_fn, tf.constant(np.arange(1., examples + 1)),
            optimizer if isinstance(optimizer, dict) else towers.Objective(
                optimizer or tf.train.GradientDescentOptimizer(tf.constant(.1, tf.float64)),
                transform_gradients=transform), num_towers, 'mean', remainder='weight', **options)
        with tf.Session(config=towers.session_config(num_towers)) as session:
            session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
            found = []
            for _ in range(steps):
                session.run(built.train_op)
                found.append(session.run({variable.op.name: variable
                                          for variable in tf.global_variables()}))
            return found


@pytest.mark.parametrize('transform, options', [(waits, {}), pytest.param(
    takes, dict(num_towers=1, memory=towers.Memory(accumulate=2)), marks=slow)])
def test_an_update_of_the_first_tower_may_be_taken(transform, options):
    """2 is the mean of the first tower's (or micro-batch's) examples; that of all is 3.5."""
    w, size = 1., 0.
    for values in trained(counting, transform, steps=2, **options):
        size = .5 * size + 2.
        w -= .1 * 3.5 / (1 + size)
        np.testing.assert_allclose([values['size'], values['w']], [size, w], rtol=1e-12)


def test_an_update_of_the_recipes_last_tower_is_refused():
    with pytest.raises(GradientError, match='takes tower_1.* of the model function, which depends'):
        trained(counting, takes, copies='reuse')


def by_loss(pairs):
    return [(gradient * HELD['loss'], variable) for gradient, variable in pairs]


@pytest.mark.parametrize('options, mean', [
    (dict(examples=7, num_towers=3), 4.),
    pytest.param(dict(examples=8, copies='reuse', memory=towers.Memory(accumulate=2)), 4.5,
                 marks=pytest.mark.slow)])
def test_a_loss_is_that_of_the_batch(options, mean):
    """As it was returned: without what `regularization='add'` adds."""
    def model_fn(x):
        w = weight()
        tf.add_to_collection(tf.GraphKeys.REGULARIZATION_LOSSES, .5 * w * w)
        HELD['loss'] = w * tf.reduce_mean(x)
        return HELD['loss']
    w = 1.
    for values in trained(model_fn, by_loss, steps=2, regularization='add', **options):
        w -= .1 * (mean + w) * (w * mean)
        np.testing.assert_allclose(values['w'], w, rtol=1e-12)


def test_one_of_several_losses():
    def model_fn(x):
        mean, v = tf.reduce_mean(x), tf.get_variable('v', [], tf.float64, tf.ones_initializer())
        HELD['loss'] = v * mean * mean
        return dict(loss=dict(a=weight() * mean, b=HELD['loss']))
    square = (2. ** 2 * 3 + 4.5 ** 2 * 2) / 5  # mean of the shards' squared means: 2 of 3, 4.5 of 2
    rate = tf.train.GradientDescentOptimizer
    found = trained(model_fn, by_loss, 5, optimizer={
        loss: towers.Objective(
            rate(.1), lambda every, name=name: [each for each in every if each.op.name == name],
            by_loss) for loss, name in (('a', 'w'), ('b', 'v'))})[0]
    np.testing.assert_allclose([found['w'], found['v']], [
        1 - .1 * 3 * square, 1 - .1 * square * square], rtol=1e-7)


def the_largest(x):
    return tf.reduce_max(x)


def drawn(x):
    return 1. + tf.random_uniform([], dtype=tf.float64)


def of_own_state(x):
    state = tf.get_local_variable('state', [], tf.float64, tf.zeros_initializer())
    read = state.read_value()
    with tf.control_dependencies([read]):
        HELD['written'] = [tf.assign(state, tf.reduce_mean(x))]
    return read


def rate(x):
    return 1. / (2. + tf.cast(tf.train.get_or_create_global_step(), tf.float64))


def keeping(make):
    def model_fn(x):
        HELD.clear()
        HELD['kept'] = make(x)
        with tf.control_dependencies(HELD.get('written', [])):
            return weight() * tf.reduce_mean(x)
    return model_fn


def by_held(pairs):
    return [(gradient * HELD['kept'], variable) for gradient, variable in pairs]


def checked(pairs):
    with tf.control_dependencies([tf.Assert(HELD['kept'] > 0., [HELD['kept']])]):
        return [(tf.identity(gradient), variable) for gradient, variable in pairs]


def shown(pairs):
    tf.summary.scalar('largest', HELD['kept'])
    return pairs


REFUSED = (r'^transform_gradients, or the optimizer, takes \S+ of the model function, which '
           "depends on the examples of one tower: take the loss, which is the batch's, or let "
           'UPDATE_OPS write it to a variable, and read the variable')


@pytest.mark.parametrize('make, transform, options', [
    (the_largest, checked, {}), (drawn, by_held, {}), (of_own_state, by_held, {}),
    (the_largest, by_held, dict(copies='reuse')),
    (the_largest, by_held, dict(memory=towers.Memory(accumulate=2), num_towers=1))])
def test_what_is_of_one_tower_is_refused(make, transform, options):
    with pytest.raises(GradientError, match=REFUSED):
        trained(keeping(make), transform, **options)


def second_order(pairs):
    [(gradient, variable)] = pairs
    return [(gradient + tf.gradients(gradient, [variable])[0], variable)]


@pytest.mark.slow
def test_gradients_of_gradients_are_the_batchs_or_refused():
    [values] = trained(lambda x: .5 * weight() ** 2. * tf.reduce_mean(x), second_order)
    np.testing.assert_allclose(values['w'], 1. - .1 * (3.5 + 3.5))
    with pytest.raises(GradientError, match=REFUSED + '.*Gradients of gradients take such'):
        trained(lambda x: tf.reduce_mean(tf.tanh(weight() * x)), second_order)


@pytest.mark.parametrize('make, transform, num_towers, factor', [
    (the_largest, by_held, 1, 6.),  # the one tower's examples are the batch
    (the_largest, shown, 2, 1.),  # the update does not run it
    (rate, by_held, 2, .5)])  # it depends on no example
def test_other_tensors_may_be_taken(make, transform, num_towers, factor):
    [values] = trained(keeping(make), transform, num_towers=num_towers)
    np.testing.assert_allclose(values['w'], 1 - .1 * 3.5 * factor)


def built_in_a_ring(transform):
    def model_fn(x):
        HELD['loss'] = weight() * tf.reduce_mean(x)
        return HELD['loss']
    ring = towers.Cluster('ring', ['a:1', 'b:1'])
    HELD['batch'] = tf.data.make_one_shot_iterator(
        tf.data.Dataset.from_tensors(np.ones(4)).repeat()).get_next()
    return towers.build_towers(model_fn, HELD['batch'],
                               towers.Objective(tf.train.GradientDescentOptimizer(.1),
                                                transform_gradients=transform), 1,
                               'mean', cluster=ring)


def test_in_a_ring_a_workers_own_loss_is_refused_and_may_be_shown():
    """The batch itself in the update is for `DriftHook` to find."""
    with tf.Graph().as_default(), pytest.raises(
            GradientError, match="the loss of one worker's examples"):
        built_in_a_ring(lambda pairs: [(g * HELD['loss'], v) for g, v in pairs])
    built = built_in_a_ring(lambda pairs: [
        (tf.Print(g, [HELD['loss'], HELD['batch']]), v) for g, v in pairs])
    assert isinstance(built.train_op, tf.Operation)
