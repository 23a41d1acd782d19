"""Numbers drawn by towers of several machines, by seeds: those of one machine, and no two alike."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers import compat

KINDS = ('dropout', 'branch', 'loop')


def noise(seed):
    """A model function of an example; it draws by an operation, in a branch and in a loop."""
    def model_fn(inputs):
        weight = tf.get_variable('weight', [], initializer=tf.ones_initializer())
        kept = tf.nn.dropout(inputs, rate=.5, seed=seed)
        branch = tf.cond(tf.placeholder_with_default(True, []),
                         lambda: tf.random_normal([1, 64], seed=seed) + 0. * inputs,
                         lambda: inputs)
        loop = tf.while_loop(
            lambda turn, _: turn < 2,
            lambda turn, total: [turn + 1, total + tf.random_normal([1, 64], seed=seed)],
            [0, tf.zeros([1, 64])], parallel_iterations=1)[1]
        return towers.ModelOutput(weight * tf.reduce_mean(kept * branch * loop),
                                  dict(zip(KINDS, (kept, branch, loop))))
    return model_fn


def drawn(cluster, num_towers, seed, graph_seed=5, **options):
    """{kind: [2, 64] for each tower of this machine, or micro-batch}: its draws in two steps."""
    with tf.Graph().as_default():
        tf.set_random_seed(graph_seed)
        step = tf.train.get_or_create_global_step()
        micro_batches = options['memory'].accumulate if 'memory' in options else 1
        built = towers.build_towers(
            noise(seed), (tf.ones([num_towers * micro_batches, 64]),),
            tf.train.GradientDescentOptimizer(.1), num_towers, global_step=step, cluster=cluster,
            **options)
        with tf.Session(config=towers.session_config(built.devices)) as session:
            session.run(tf.global_variables_initializer())
            # A step draws once, whatever is fetched of it.
            both = [session.run([tower.predictions for tower in built.towers]) for _ in range(2)]
    return {kind: [np.concatenate([step[part][kind] for step in both])
                   for part in range(len(built.towers))] for kind in KINDS}


def of_machines(num_towers, seed, **options):
    """The same of two machines, one after the other."""
    parts = [drawn(towers.Cluster('ring', ['a:1', 'b:1'], rank=rank), num_towers, seed, **options)
             for rank in range(2)]
    return {kind: parts[0][kind] + parts[1][kind] for kind in KINDS}


@pytest.fixture(params=['v1', 'v2'])
def control_flow(request):
    """Branches and loops of both kinds; in those of v2, functions, seeds count from zero."""
    was = tf.control_flow_v2_enabled()
    (tf.enable_control_flow_v2 if request.param == 'v2' else tf.disable_control_flow_v2)()
    yield request.param
    (tf.enable_control_flow_v2 if was else tf.disable_control_flow_v2)()


@pytest.mark.parametrize('num_towers, options, control_flow', [(2, {}, 'v2')] + [
    pytest.param(*case, marks=pytest.mark.slow) for case in [
        (2, {}, 'v1'), (1, dict(memory=towers.Memory(accumulate=2)), 'v2')]],
        indirect=['control_flow'])
def test_with_seeds_of_operations_machines_draw_what_one_draws(num_towers, options, control_flow):
    one = drawn(None, 2 * num_towers, 3, **options)
    several = of_machines(num_towers, 3, **options)
    for kind in KINDS:
        np.testing.assert_array_equal(several[kind], one[kind], kind)
        assert len({each.tobytes() for each in one[kind]}) == len(one[kind]), kind


@pytest.mark.slow
@pytest.mark.parametrize('copies, control_flow', [('clone', 'v2'), ('clone', 'v1')],
                         indirect=['control_flow'])
def test_with_a_graph_level_seed_no_two_towers_draw_alike(copies, control_flow):
    several = of_machines(1, None, copies=copies)
    one = drawn(None, 2, None, copies=copies)
    for kind in KINDS:
        assert len({each.tobytes() for each in several[kind]}) == 2, kind
        if copies == 'clone' and compat.TF_VERSION >= (2, 0):
            np.testing.assert_array_equal(several[kind], one[kind], kind)
