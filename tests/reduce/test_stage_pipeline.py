"""Micro-batches through stages: loops, branches and counters in a model; the rows of a schedule."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.graph.graph_walk import reachable_from
from towers.reduce.micro_batches import stage_order

X, Y = np.random.RandomState(0).rand(12, 6), np.random.RandomState(1).rand(12, 2)
slow = pytest.mark.slow
ONE = [['/cpu:0', '/cpu:1']]
TWO = [['/cpu:0', '/cpu:1'], ['/cpu:2', '/cpu:3']]


def variable(name, shape):
    value = np.random.RandomState(len(name) + sum(shape)).randn(*shape) * .3
    return tf.get_variable(name, shape, tf.float64, tf.constant_initializer(value))


def dense(x, name, size):
    return tf.tanh(tf.matmul(x, variable(name, [int(x.shape[1]), size])))


def loss_of(x, y):
    return tf.reduce_mean(tf.square(dense(x, 'out', 2) - y))


def branch(x, y):
    """The branch that is not taken never runs: nothing may wait for it."""
    with towers.stage(0):
        x = dense(x, 'first', 6)
        one, other = variable('one', [6, 6]), variable('other', [6, 6])
        x = tf.cond(tf.reduce_sum(tf.ones([2])) > 1, lambda: tf.tanh(tf.matmul(x, one)),
                    lambda: tf.tanh(tf.matmul(x, other)))
    with towers.stage(1):
        return loss_of(x, y)


def loop(stage):
    def model(x, y):
        with towers.stage(0):
            x = dense(x, 'first', 6)
        with towers.stage(stage):
            weights = variable('weights', [6, 6])
            x = tf.while_loop(
                lambda i, _: i < 3, lambda i, each: (i + 1, tf.tanh(tf.matmul(
                    tf.concat([each[:, :3], each[:, 3:]], 1), weights))), (tf.constant(0), x))[1]
        with towers.stage(1):
            return loss_of(x, y)
    return model


def trained(model_fn, devices, resource, **options):
    with tf.Graph().as_default():
        step = tf.train.get_or_create_global_step()
        with tf.variable_scope('', use_resource=resource):
            built = towers.build_towers(model_fn, (tf.constant(X), tf.constant(Y)),
                                        tf.train.AdamOptimizer(.05), devices, 'mean',
                                        global_step=step, **options)
        config = towers.session_config(built.devices)
        config.operation_timeout_in_ms = 60000  # where everything waits for everything
        with tf.Session(config=config) as session:
            session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
            for _ in range(3):
                session.run(built.train_op)
            variables = tf.global_variables()
            return dict(zip([v.op.name for v in variables], session.run(variables)))


@pytest.mark.parametrize(
    'model_fn, runs, version, resource',
    [(branch, [(ONE, dict(pipeline=towers.Pipeline(micro_batches=3)))], 'v1', True),
     (loop(0), [(1, dict(memory=towers.Memory(accumulate=3)))], 'v1', True)] + [
         pytest.param(*case, marks=slow) for case in [(
             branch,
             [(TWO, dict(pipeline=towers.Pipeline(micro_batches=3, schedule='all_forward')))], 'v2',
             True), (loop(0), [(ONE, dict(pipeline=towers.Pipeline(micro_batches=2)))], 'v2', True)]
     ],
    ids=['branch', 'loop', 'branch on two', 'loop in the first stage'])
@pytest.mark.slow
def test_loops_and_branches(model_fn, runs, version, resource):
    if resource and version == 'v2' and model_fn is not branch and tf.version.VERSION < '2':
        pytest.skip('on TF 1 such a loop has to be on the device of its variables')
    was = tf.control_flow_v2_enabled()
    (tf.disable_control_flow_v2 if version == 'v1' else tf.enable_control_flow_v2)()
    try:
        one = trained(model_fn, 1, resource)
        assert one['global_step'] == 3
        for devices, options in runs:
            found = trained(model_fn, devices, resource, **options)
            for name in one:
                np.testing.assert_allclose(found[name], one[name], rtol=0, atol=1e-12,
                                           err_msg='%s %s' % (name, options))
    finally:
        (tf.enable_control_flow_v2 if was else tf.disable_control_flow_v2)()


def test_a_stage_adds_up_gradients_before_its_next_pass():
    """The second stage: f0 b0 f1 b1, the sum of both, f2: it holds a sum, not two gradients."""
    def model(x, y):
        with towers.stage(0):
            x = dense(x, 'first', 6)
        with towers.stage(1):
            return loss_of(x, y)
    built = towers.build_towers(model, (tf.constant(X), tf.constant(Y)),
                                tf.train.GradientDescentOptimizer(.1), ONE,
                                pipeline=towers.Pipeline(micro_batches=3))
    operations = tf.get_default_graph().get_operations()
    sums = [op for op in operations if 'accumulate_gradients' in op.name and op.type == 'AddN'
            and op.device == '/device:CPU:1']
    assert len(sums) == 2  # of 'out', for the second and for the third micro-batch
    after = reachable_from(sums[:1], operations, control=True)
    assert built.towers[2].loss.op.name in after
    assert built.towers[1].loss.op.name not in after


def test_the_row_of_each_stage():
    def row(*arguments):
        return ' '.join('%s%d' % (what[0], number) for what, number in stage_order(*arguments))
    assert row('all_forward', 0, 2, 3) == row('all_forward', 1, 2, 3) == 'f0 f1 f2 b2 b1 b0'
    name = 'one_forward_one_backward'
    assert row(name, 0, 3, 4) == 'f0 f1 f2 b0 f3 b1 b2 b3'
    assert row(name, 1, 3, 4) == 'f0 f1 b0 f2 b1 f3 b2 b3'
    assert row(name, 2, 3, 4) == 'f0 b0 f1 b1 f2 b2 f3 b3'
    assert row(name, 0, 3, 1) == 'f0 b0' and row(name, 0, 1, 2) == 'f0 b0 f1 b1'
