"""Random ops of a model: the same numbers in a step whenever it is run, others in every other."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from sample_models import switched
from towers.graph import graph_walk
from towers.gradients.stateless_random import _TWINS, make_initial_values_stateless, make_stateless

# The numbers of each kind of op at step 7 under graph seed 1: bit by bit the same from TF 1.15.5,
# 2.15.1 and 2.21.0 (where a logarithm or a sine is in them, on the machines that were tried).
KINDS = [
    ('RandomUniform', lambda: tf.random.uniform([3]), np.float32,
     [0.2156914472579956, 0.8123193979263306, 0.8755764961242676]),
    ('RandomUniform', lambda: tf.random.uniform([2], dtype=tf.float16), np.float16,
     [0.0478515625, 0.8837890625]),
    ('RandomUniform', lambda: tf.random.uniform([2], dtype=tf.float64), np.float64,
     [0.7534536886219396, 0.7549739446523562]),
    ('RandomStandardNormal', lambda: tf.random.normal([3]), np.float32,
     [-1.9844235181808472, -0.3425125479698181, 1.682700276374817]),
    ('TruncatedNormal', lambda: tf.random.truncated_normal([3]), np.float32,
     [-0.4282946288585663, -1.2246335744857788, 1.305159568786621]),
    ('RandomUniformInt', lambda: tf.random.uniform([5], 0, 100, dtype=tf.int32), np.int32,
     [50, 90, 68, 35, 24]),
    ('RandomUniformInt', lambda: tf.random.uniform([3], 0, 10 ** 12, dtype=tf.int64), np.int64,
     [941847682962, 881439052865, 264725315007]),
    ('Multinomial', lambda: tf.random.multinomial(tf.constant([[0., 1., 2.]]), 6), np.int64,
     [[2, 2, 2, 2, 2, 0]])]


def replaced(build, step):
    """Tensors that `build` makes, with stateless twins, and how many twins there are."""
    with graph_walk.Recording(tf.get_default_graph()) as made:
        tensors = tf.nest.map_structure(tf.identity, build())
    return tensors, len(make_stateless(made.operations, tf.nest.flatten(tensors), step, 1))


def test_every_kind_draws_the_same_on_every_version():
    assert {kind for kind, _, _, _ in KINDS} == set(_TWINS)
    with tf.Session() as session:
        tensors, counts = replaced(lambda: [build() for _, build, _, _ in KINDS],
                                   tf.constant(7, tf.int64))
        assert counts == len(KINDS)
        for drawn, (_, _, dtype, expected) in zip(session.run(tensors), KINDS):
            assert drawn.dtype == dtype
            np.testing.assert_array_equal(drawn, np.array(expected, dtype))


def in_loop_and_branch(step):
    """(drawn outside, drawn inside of both), [2] each."""
    outside = tf.random.uniform([2])
    _, loop = tf.while_loop(lambda i, _: i < 3,
                            lambda i, x: (i + 1, x + tf.random.uniform([2]) + 0. * outside),
                            [0, tf.zeros([2])])
    branch = tf.cond(step >= 0, lambda: tf.random.uniform([2]) + 0. * outside,
                     lambda: tf.zeros([2]))
    return outside, loop + branch


@pytest.mark.parametrize('control_flow_v2', [False, True])
def test_loops_and_branches_keep_their_draws(control_flow_v2):
    with switched('control_flow_v2', control_flow_v2), tf.Graph().as_default(), \
            tf.Session() as session:
        step = tf.placeholder_with_default(tf.constant(3, tf.int64), [])
        (outside, inside), counts = replaced(lambda: in_loop_and_branch(step), step)
        assert counts == 1
        first, second = session.run([outside, inside]), session.run([outside, inside])
        assert (first[0] == second[0]).all() and (first[1] != second[1]).all()
        # Were all three draws of the loop the same one, this would be 3 u + v.
        assert 0 < first[1].min() and first[1].max() < 4


# ---- in towers ----------------------------------------------------------------------------------

def dropout_model(x):
    """A model whose loss and prediction show what was dropped out: x is all ones."""
    w = tf.get_variable('w', [8], initializer=tf.random_uniform_initializer(1., 2.))
    noise = tf.nn.dropout(x, rate=0.5)
    return towers.ModelOutput(tf.reduce_mean(tf.reduce_sum(noise * w, 1)), predictions=noise)


def masks(start, steps, stateless=True, unrelated=0):
    """What a run that starts at a step drops out: [steps, 8, 8], and the initial weights."""
    with tf.Graph().as_default():
        for _ in range(unrelated):
            tf.constant(0.)
        tf.set_random_seed(5)
        step = tf.train.get_or_create_global_step()
        built = towers.build_towers(dropout_model, tf.ones([8, 8]),
                                    tf.train.GradientDescentOptimizer(0.), 2, global_step=step,
                                    numerics=towers.Numerics(stateless_random=stateless))
        with tf.Session(config=towers.session_config(built.devices)) as session:
            session.run(tf.global_variables_initializer())
            weights = session.run(built.variables[0])
            session.run(step.assign(start))
            drawn = [session.run([built.train_op, built.predictions, built.gradients[0][0]])
                     for _ in range(steps)]
        for _, mask, gradient in drawn:
            # The gradient is of the mask that was shown: 2 x the mean over the batch.
            np.testing.assert_allclose(gradient, 2 * mask.mean(0), rtol=1e-5)
        return np.array([mask for _, mask, _ in drawn]), weights


@pytest.mark.slow
def test_a_run_that_resumes_draws_what_it_would_have_drawn():
    """By the seed, the names and the step, not by the rest of the graph."""
    whole, weights = masks(0, 4)
    resumed, _ = masks(2, 2, unrelated=7)
    assert (resumed == whole[2:]).all()
    assert set(np.unique(whole)) == {0., 2.}
    # Every step and every tower has its own.
    shards = whole.reshape([8, 32])
    assert len({shard.tobytes() for shard in shards}) == 8
    # Initial weights are as without.
    assert weights.tolist() == masks(0, 1, stateless=False)[1].tolist()
    assert 1 <= weights.min() and len(set(weights)) == 8


def counted_draws(num_towers, stateless=False):
    """What each tower draws in 4 steps by a seed that each call counts up, as Keras 3 does, and by
    a seed that none does: [step, tower, 2, 6]."""
    def model_fn(x):
        weights = tf.get_variable('weights', [6], initializer=tf.ones_initializer())
        state, fixed = [tf.get_variable(name, [2], tf.int32, tf.ones_initializer(),
                                        trainable=False) for name in ('state', 'fixed')]
        drawn = tf.stack([tf.random.stateless_uniform([6], seed)
                          for seed in (tf.identity(state), 4 * fixed)])
        with tf.control_dependencies([drawn]):
            counted = state.assign_add([0, 1], read_value=False)
        return {'loss': tf.reduce_sum(drawn * weights) * tf.reduce_mean(x),
                'predictions': drawn[tf.newaxis], 'updates': [counted]}
    with tf.Graph().as_default():
        tf.set_random_seed(5)
        built = towers.build_towers(
            model_fn, tf.ones([num_towers]), tf.train.GradientDescentOptimizer(0.1), num_towers,
            global_step=tf.train.get_or_create_global_step(),
            numerics=towers.Numerics(stateless_random=stateless))
        with tf.Session(config=towers.session_config(built.devices)) as session:
            session.run(tf.global_variables_initializer())
            return np.array([session.run([built.train_op, [
                tower.predictions for tower in built.towers]])[1] for _ in range(4)])[:, :, 0]


@pytest.mark.parametrize('stateless', [True, pytest.param(False, marks=pytest.mark.slow)])
def test_towers_that_share_a_counted_seed_draw_numbers_of_their_own(stateless):
    drawn = counted_draws(2, stateless)
    assert not (drawn[:, 0, 0] == drawn[:, 1, 0]).any()
    with tf.Session() as session:
        plain = session.run([tf.random.stateless_uniform([6], seed)
                             for seed in [[4, 4]] + [[1, 1 + step] for step in range(4)]])
    # A seed of the model's own stays.
    np.testing.assert_array_equal(drawn[:, :, 1], np.broadcast_to(plain[0], (4, 2, 6)))
    if stateless:  # by name and step alone, in every run
        np.testing.assert_array_equal(drawn, counted_draws(2, stateless))
    else:  # tower 0 draws what the model does by itself
        np.testing.assert_array_equal(drawn[:, 0, 0], plain[1:])


# ---- initial values ------------------------------------------------------------------------------

INITIALIZERS = [tf.glorot_uniform_initializer(), tf.truncated_normal_initializer(),
                tf.random_normal_initializer(), tf.orthogonal_initializer()]


def initial_values(graph_seed, ops_before=0, stateless=True):
    with tf.Graph().as_default(), tf.Session() as session:
        tf.set_random_seed(graph_seed)
        for _ in range(ops_before):
            tf.placeholder(tf.float32)
        variables = [tf.get_variable('v%d' % i, [3, 4], initializer=initializer)
                     for i, initializer in enumerate(INITIALIZERS)]
        variables.append(tf.get_variable('c', initializer=tf.ones([2])))
        if stateless:
            assert len(make_initial_values_stateless(variables, graph_seed)) == 4
        session.run(tf.global_variables_initializer())
        return session.run(variables)


@pytest.mark.slow
def test_initial_values_depend_on_seed_and_names_alone():
    values = initial_values(1)
    for one, other in zip(values, initial_values(1, ops_before=7)):
        np.testing.assert_array_equal(one, other)
    for one, other in zip(values[:4], initial_values(2)):
        assert not np.array_equal(one, other)
    assert not np.array_equal(values[0], values[1])
    np.testing.assert_array_equal(values[4], [1, 1])
    # So that this test would see it if nothing were replaced: TF's own op seeds count ops, too.
    assert not np.array_equal(values[0], initial_values(1, stateless=False)[0])


@pytest.mark.slow
def test_machines_draw_what_their_towers_draw_on_one_machine():
    def drawn(cluster, num_towers):
        """Of a build alone, which needs nothing of the other machines."""
        with tf.Graph().as_default():
            tf.set_random_seed(5)
            built = towers.build_towers(
                dropout_model, tf.ones([2 * num_towers, 8]), tf.train.GradientDescentOptimizer(.1),
                num_towers, global_step=tf.train.get_or_create_global_step(), cluster=cluster,
                numerics=towers.Numerics(stateless_random=True))
            with tf.Session(config=towers.session_config(built.devices)) as session:
                session.run(tf.global_variables_initializer())
                return session.run(built.predictions)
    machines = [drawn(towers.Cluster('ring', ['a:1', 'b:1'], rank=rank), 2) for rank in range(2)]
    np.testing.assert_array_equal(np.concatenate(machines), drawn(None, 4))
    assert not np.array_equal(machines[0], machines[1])


def test_a_block_that_the_backward_pass_computes_again_is_refused():
    def model_fn(x):
        w = tf.get_variable('w', [6], use_resource=True)
        return tf.reduce_sum(tf.recompute_grad(lambda x: tf.nn.dropout(x * x, rate=0.5))(
            w + 0. * x[0, 0]))
    tf.get_variable_scope().set_use_resource(True)
    with pytest.raises(towers.GradientError, match='^stateless_random=True, and the backward pass '
                                                   'draws random numbers .*: use towers.Memory'):
        towers.build_towers(
            model_fn, tf.ones([2, 1]), tf.train.GradientDescentOptimizer(0.), 2,
            global_step=tf.train.get_or_create_global_step(),
            numerics=towers.Numerics(stateless_random=True))
