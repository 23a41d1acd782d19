"""A finished model: `build_towers` takes its loss in the place of a model function."""

import numpy as np
import pytest
import sample_models as samples
import tensorflow.compat.v1 as tf

import towers
from sample_models import SAMPLES, momentum, relative_difference, sgd, switched

slow = pytest.mark.slow
AS_FUNCTION = False


def placeholders(arrays):
    """A placeholder of any batch size for each array."""
    return tuple(tf.placeholder(array.dtype, (None,) + array.shape[1:]) for array in arrays)


def plain_step(loss, make_optimizer=momentum):
    """The train op of a textbook: the updates run before the optimizer."""
    optimizer = make_optimizer()
    pairs = [pair for pair in optimizer.compute_gradients(loss) if pair[0] is not None]
    with tf.control_dependencies([loss] + [gradient for gradient, _ in pairs]):
        updates = tf.group(*tf.get_collection(tf.GraphKeys.UPDATE_OPS))
    with tf.control_dependencies([updates]):
        return optimizer.apply_gradients(pairs)


def trained(session, fetch, train_op, feed, initial, steps=3):
    """(values of `fetch` at each step, {name: value} of all variables before, and after)."""
    session.run([tf.global_variables_initializer(), tf.local_variables_initializer(),
                 tf.tables_initializer()])
    for variable in tf.global_variables():
        if variable.op.name in initial:
            variable.load(initial[variable.op.name], session)
    variables = {variable.op.name: variable for variable in tf.global_variables()}
    before = session.run(variables)
    values = [session.run([fetch, train_op], feed)[0] for _ in range(steps)]
    return values, before, session.run(variables)


def check_equal(make_loss, arrays, num_towers=2, make_optimizer=momentum, tolerance=1e-12,
                steps=3, feed=None, **options):
    """Trains a program that makes placeholders and a loss, on towers and on one device, and checks
    losses, names and values of all variables: `BuiltTowers`. `feed` gives further feeds."""
    feed = feed or (lambda: {})
    options.setdefault('reduction', 'mean')
    with tf.Graph().as_default():
        inputs = placeholders(arrays)
        loss = None if AS_FUNCTION else make_loss(*inputs)
        built = towers.build_towers(make_loss if AS_FUNCTION else loss, inputs, make_optimizer(), num_towers, **options)
        with tf.Session(config=towers.session_config(built.devices)) as session:
            fed = dict(zip(inputs, arrays), **{})
            fed.update(feed())
            ours, initial, after = trained(session, built.loss, built.train_op, fed, {}, steps)
            of_program = session.run(loss, fed) if not AS_FUNCTION else None
    with tf.Graph().as_default():
        inputs = placeholders(arrays)
        loss = make_loss(*inputs)
        train_op = plain_step(loss, make_optimizer)
        with tf.Session() as session:
            fed = dict(zip(inputs, arrays))
            fed.update(feed())
            theirs, _, expected = trained(session, loss, train_op, fed, initial, steps)
            one_device = session.run(loss, fed)
    assert sorted(after) == sorted(expected)
    for name, value in expected.items():
        assert relative_difference(after[name], value) < tolerance, name
    assert relative_difference(ours, theirs) < tolerance
    assert AS_FUNCTION or relative_difference(of_program, one_device) < tolerance
    return built


@pytest.mark.parametrize('name', list(SAMPLES))
def test_samples(name):
    sample = SAMPLES[name]
    check_equal(sample.model_fn, sample.data(7), 3, remainder='weight', tolerance=1e-6)


# ---- what a graph may hold -----------------------------------------------------------------------

X, Y = samples.vectors(7)


def dense(x, units, name):
    kernel = tf.get_variable(name, [int(x.shape[-1]), units], x.dtype)
    return tf.matmul(x, kernel)


def mean_square(prediction, y):
    return tf.reduce_mean(tf.square(prediction - y))


def branch_on_a_feed(x, y):
    """`is_training` without a shape, and a `keep_prob`."""
    is_training = tf.placeholder(tf.bool, name='is_training')
    scale = tf.placeholder(tf.float64, name='scale')
    h = tf.tanh(dense(x, 4, 'a'))
    extra = tf.get_variable('extra', [4], tf.float64, tf.ones_initializer())
    h = tf.cond(is_training, lambda: h * extra * scale, lambda: h)
    h.set_shape([None, 4])
    return mean_square(dense(h, 3, 'b'), y)


def feed_of_branch():
    graph = tf.get_default_graph()
    return {graph.get_tensor_by_name('is_training:0'): True,
            graph.get_tensor_by_name('scale:0'): 1.5}


def nested_control_flow(x, y):
    """A loop with a branch in it, in a branch of a loop's result; a loop variable is not used."""
    kernel = tf.get_variable('kernel', [6, 6], tf.float64)
    inner = tf.get_variable('inner', [6, 6], tf.float64)

    def step(i, unused_sum, state):
        state = tf.cond(tf.equal(i % 2, 0), lambda: tf.tanh(tf.matmul(state, kernel)),
                        lambda: tf.while_loop(
                            lambda j, _: j < 2, lambda j, s: (j + 1, s + tf.matmul(s, inner)),
                            (0, state))[1])
        return i + 1, unused_sum + tf.reduce_sum(x), state
    zero = tf.zeros([], tf.float64)
    state = tf.cond(tf.reduce_sum(kernel) < 1e9, lambda: tf.while_loop(
        lambda i, *_: i < 3, step, (0, zero, x))[2], lambda: x)
    return mean_square(dense(state, 3, 'b'), y)


def two_rnns(x, y):
    """`scan` and `map_fn`, with arrays of tensors."""
    kernel = tf.get_variable('kernel', [6, 6], tf.float64)
    states = tf.scan(lambda state, _: tf.tanh(tf.matmul(state, kernel)), tf.range(3), x)
    rows = tf.map_fn(lambda row: row * 2. + tf.reduce_sum(kernel), states[-1])
    return mean_square(dense(rows, 3, 'b'), y)


def custom_gradient(x, y):
    """The gradient is a closure over tensors of the program."""
    h = dense(x, 4, 'a')
    factor = tf.exp(tf.reduce_mean(x, 1, keepdims=True))

    @tf.custom_gradient
    def scaled(value):
        def gradient(upstream):
            with tf.control_dependencies([factor]):
                return upstream * factor * tf.tanh(value)
        return value * factor, gradient
    return mean_square(dense(scaled(h), 3, 'b'), y)


def gradient_penalty(x, y):
    """The loss has gradients in it."""
    h = tf.tanh(dense(x, 4, 'a'))
    value = dense(h, 3, 'b')
    gradient, = tf.gradients(value, x)
    return mean_square(value, y) + tf.reduce_mean(
        tf.square(tf.reduce_sum(tf.square(gradient), 1) - 1.))


def python_function(x, y):
    rows = tf.py_func(lambda rows: rows * 2., [x], tf.float64)
    rows.set_shape(x.shape)
    return mean_square(dense(rows, 3, 'a'), y)


def look_up(x, y):
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(
        tf.constant([0, 1, 2], tf.int64), tf.constant([1., 2., 3.], tf.float64)), 0.)
    keys = tf.cast(tf.abs(x[:, 0]) * 2, tf.int64)
    return mean_square(dense(x, 3, 'a') * table.lookup(keys)[:, None], y)


KINDS = {'branch': (branch_on_a_feed, feed_of_branch)}
KINDS.update((each.__name__, (each, None)) for each in [
    nested_control_flow, two_rnns, custom_gradient, gradient_penalty, python_function, look_up])


@pytest.mark.parametrize('variables', ['resource', 'reference'])
@pytest.mark.parametrize('name', list(KINDS))
def test_kinds_of_operations(name, variables):
    make_loss, feed = KINDS[name]
    with switched('resource_variables', variables == 'resource'), switched('control_flow_v2', False):
        check_equal(make_loss, (X, Y), 3, remainder='weight', feed=feed)


@pytest.mark.parametrize('name', list(KINDS))
def test_control_flow_v2(name):
    make_loss, feed = KINDS[name]
    with switched('resource_variables', True), switched('control_flow_v2', True):
        check_equal(make_loss, (X, Y), 3, remainder='weight', feed=feed)
