"""towers.recompute: dropout in a function that the backward pass calls again."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.graph import graph_walk
from towers.tower.recomputed_draws import recomputed_draws

slow = pytest.mark.slow
START = np.linspace(1., 2., 6).astype(np.float32)


def by_hand(function):
    """A recomputation as programs write it on `tf.custom_gradient`, for every version."""
    def call(*inputs):
        @tf.custom_gradient
        def recomputing(*inputs):
            def gradient(*upstream, **unused_variables):
                again = [tf.identity(each) for each in inputs]
                with tf.control_dependencies(upstream):
                    outputs = function(*again)
                return tf.gradients(outputs, again, upstream[0])
            return function(*inputs), gradient
        return recomputing(*inputs)
    return call


def by_tensorflow(function):
    return lambda *inputs: tf.recompute_grad(function)(*inputs)


WAYS = {'by_hand': by_hand, 'recompute_grad': by_tensorflow}


def model(way, seed=None, depth=1):
    """Its prediction is what is left of the weights: the gradient shows which mask it was taken of.
    """
    def block(x):
        return tf.nn.dropout(x * x, rate=0.5, seed=seed)

    def nested(x):
        return WAYS[way](block)(x * 1.) + 0. * x

    def model_fn(x):
        w = tf.get_variable('w', initializer=START)
        y = WAYS[way](block if depth == 1 else nested)(w + 0. * x[0, 0])
        return towers.ModelOutput(tf.reduce_sum(y), predictions=y[tf.newaxis])
    return model_fn


def check_gradients(model_fn, num_towers=2, slope=None, stateless=True, steps=3):
    """Runs steps and compares each tower's gradient with the mask of its forward pass.

    Returns:
      What was left of the weights: [steps, towers, 6].
    """
    with tf.Graph().as_default():
        tf.set_random_seed(5)
        tf.get_variable_scope().set_use_resource(True)
        step = tf.train.get_or_create_global_step()
        built = towers.build_towers(
            model_fn, tf.ones([num_towers, 1]), tf.train.GradientDescentOptimizer(0.), num_towers,
            reduction='sum', global_step=step, numerics=towers.Numerics(stateless_random=stateless))
        left = []
        with tf.Session(config=towers.session_config(built.devices)) as session:
            session.run(tf.global_variables_initializer())
            for _ in range(steps):
                shown, gradients, _ = session.run([
                    built.predictions, [tower.gradients[0][0] for tower in built.towers],
                    built.train_op])
                left.append(shown)
                # y = 2 mask w^2, so dy/dw = 4 mask w.
                expected = np.where(shown > 0, 4. * START, 0.) if slope is None else slope(shown)
                np.testing.assert_allclose(gradients, expected, rtol=1e-5)
        return np.array(left)


@pytest.mark.parametrize('seed, depth', [(None, 1), pytest.param(3, 2, marks=slow)])
@pytest.mark.parametrize('way', list(WAYS))
@pytest.mark.slow
def test_the_gradient_is_of_the_mask_of_the_forward_pass(way, seed, depth):
    left = check_gradients(model(way, seed, depth))
    assert len({each.tobytes() for each in left.reshape([6, 6])}) >= 5
    again = check_gradients(model(way, seed, depth), steps=1)
    np.testing.assert_array_equal(left[:1], again)  # by names, seed and step alone


@pytest.mark.parametrize('way', list(WAYS))
def test_with_a_seed_it_is_right_without_stateless_random_too(way):
    check_gradients(model(way, 3), stateless=False)


def test_two_draws_with_equal_seeds_are_equal_as_they_are_without():
    def model_fn(x):
        w = tf.get_variable('w', initializer=START)
        one, other = (tf.nn.dropout(w, rate=0.5, seed=3) for _ in range(2))
        return towers.ModelOutput(tf.reduce_sum(one * other) + 0. * x[0, 0],
                                  predictions=(one * other)[tf.newaxis])
    left = check_gradients(model_fn, 1, slope=lambda shown: np.where(shown > 0, 8. * START, 0.))
    assert 0 < (left == 0).mean() < 0.9  # were the masks two, 3 in 4 would be zero


def test_two_blocks_of_the_same_inputs_are_told_apart():
    def model_fn(x):
        w = tf.get_variable('w', initializer=START)
        one, other = (by_hand(lambda x: tf.nn.dropout(x, rate=0.5))(w) for _ in range(2))
        y = one + 10. * other
        return towers.ModelOutput(tf.reduce_sum(y) + 0. * x[0, 0], predictions=y[tf.newaxis])
    check_gradients(model_fn, slope=lambda shown: np.round(shown / START))


def test_noise_of_the_gradients_own_is_no_recomputation(graph):
    """The same expression as in the forward pass, but of the gradient."""
    step = tf.train.get_or_create_global_step()

    def model_fn(x):
        w = tf.get_variable('w', initializer=START, use_resource=True)

        @tf.custom_gradient
        def noisy(x):
            return (x + 0.1 * tf.random.normal([6]),
                    lambda upstream: upstream + 0.1 * tf.random.normal([6]))
        y = noisy(w + 0. * x[0, 0])
        return towers.ModelOutput(tf.reduce_sum(y), predictions=y[tf.newaxis])
    built = towers.build_towers(model_fn, tf.ones([1, 1]), tf.train.GradientDescentOptimizer(0.),
                                1, global_step=step,
                                numerics=towers.Numerics(stateless_random=True))
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        shown, gradient = session.run([built.predictions, built.gradients[0][0]])
    noises = np.array([shown[0] - START, gradient - 1.])
    assert 0. < np.abs(noises).max() < 1. and np.abs(noises[0] - noises[1]).min() > 1e-4


def test_only_what_is_proven_is_paired(graph):
    with graph_walk.Recording(graph) as forward:
        w = tf.constant(START)

        @tf.custom_gradient
        def block(x):
            def gradient(upstream):
                same = tf.nn.dropout(tf.identity(x), rate=0.5)
                other_rate = tf.nn.dropout(tf.identity(x), rate=0.25)
                of_gradient = tf.nn.dropout(upstream, rate=0.5)
                return upstream * same * other_rate * of_gradient
            return tf.nn.dropout(x, rate=0.5), gradient
        y = block(w)
    with graph_walk.Recording(graph) as backward:
        tf.gradients(y, w)
    first, = [op.name for op in forward.operations if graph_walk.is_random(op)]
    same, _, _ = [op.name for op in backward.operations if graph_walk.is_random(op)]
    assert recomputed_draws(forward.operations, backward.operations) == {same: first}


def test_which_of_two_equal_draws_is_repeated_cannot_be_told(graph):
    with graph_walk.Recording(graph) as forward:
        w = tf.constant(START)

        @tf.custom_gradient
        def block(x):
            def gradient(*upstream):
                return sum(upstream) * tf.nn.dropout(tf.identity(x), rate=0.5)
            return [tf.nn.dropout(x, rate=0.5), tf.nn.dropout(x, rate=0.5)], gradient
        one, other = block(w)
    with graph_walk.Recording(graph) as backward:
        tf.gradients(one + other, w)
    for operations, count in ((forward.operations, 2), (backward.operations, 1)):
        assert sum(map(graph_walk.is_random, operations)) == count
    assert recomputed_draws(forward.operations, backward.operations) == {}


@pytest.mark.parametrize('way, stateless', [('by_hand', True), ('recompute_grad', False)])
def test_a_counted_seed_that_is_handed_to_a_recomputation(way, stateless):
    """As Keras 3 draws: both passes get one seed, and each tower a seed of its own."""
    def model_fn(x):
        w = tf.get_variable('w', initializer=START)
        state = tf.get_variable('state', initializer=np.array([1., 1.], np.float32),
                                trainable=False, use_resource=True)
        seed = tf.identity(state)

        def block(x, seed):
            drawn = tf.random.stateless_uniform([6], tf.cast(seed, tf.int32))
            return x * tf.cast(drawn < 0.5, tf.float32)
        y = WAYS[way](block)(w + 0. * x[0, 0], seed)
        with tf.control_dependencies([seed]):
            counted = state.assign_add([0., 1.], read_value=False)
        return towers.ModelOutput(tf.reduce_sum(y), predictions=y[tf.newaxis], updates=[counted])
    left = check_gradients(model_fn, stateless=stateless,
                           slope=lambda shown: np.where(shown > 0, 1., 0.))
    assert len({(each > 0).tobytes() for each in left.reshape([6, 6])}) >= 5
