"""A tower's part of the contract: where it computes, what of its loss counts, what is shared.

Through `build_towers`, as nobody builds a tower alone.
"""

import numpy as np
import sample_models as samples
import tensorflow.compat.v1 as tf
import tf_slim as slim

import towers
from sample_models import momentum, sgd
import pytest

# ---- updates -------------------------------------------------------------------------------------

def slim_batch_norm(x):
    w = tf.get_variable('w', [2], x.dtype, tf.ones_initializer())
    return tf.reduce_mean(tf.square(slim.batch_norm(x * w, decay=0.75, scope='bn') - 1.))


def test_the_first_towers_batch_norm_updates_ride_on_the_train_op():
    x = np.array([[1., 2.], [3., 6.], [50., 60.], [70., 90.]], 'float32')
    built = towers.build_towers(slim_batch_norm, x, sgd(0.), 2)
    means = [v for v in built.variables if v.op.name == 'bn/moving_mean']
    variances = [v for v in built.variables if v.op.name == 'bn/moving_variance']
    assert len(means) == len(variances) == 1
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run(tf.global_variables_initializer())
        session.run(built.train_op)
        mean, variance = session.run(means + variances)
        # 0.75 * 0 + 0.25 * the mean of [1, 3] and [2, 6]; a second step goes on from there
        np.testing.assert_allclose(mean, [0.5, 1.], rtol=1e-5)
        # 0.75 * 1 + 0.25 * the variance of two numbers 2 and 4 apart, sometimes by n - 1
        assert any(np.allclose(variance, [0.75 + 0.25 * 1. * k, 0.75 + 0.25 * 4. * k])
                   for k in (1., 2.))
        session.run(built.train_op)
        np.testing.assert_allclose(session.run(means)[0], [0.875, 1.75], rtol=1e-5)


# ---- a graph for GPUs, built and not run ---------------------------------------------------------

def _l2(w):
    return samples.DECAY * tf.reduce_sum(tf.square(w))


def conv_net(x, y):
    net = slim.conv2d(x, 8, 3, normalizer_fn=slim.batch_norm, weights_regularizer=_l2)
    net = slim.dropout(slim.flatten(net), 0.5)
    table = tf.get_variable('table', [10, 4])
    rows = tf.nn.embedding_lookup(table, tf.cast(y, tf.int32))
    logits = slim.fully_connected(tf.concat([net, rows], 1), 10, activation_fn=None,
                                  weights_regularizer=_l2)
    plain = tf.Variable(tf.zeros([10]), name='plain')
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(
        logits=logits + plain, labels=y))


def images(count):
    return np.zeros([count, 6, 6, 1], 'float32'), np.zeros([count], 'int64')


@pytest.mark.slow
def test_every_operation_of_a_graph_for_gpus_is_on_its_device():
    built = towers.build_towers(conv_net, images(6), tf.train.AdamOptimizer(),
                                towers.resolve_devices(['/gpu:2', '/gpu:0', '/cpu:1'], check=False))
    assert built.devices == ('/device:GPU:2', '/device:GPU:0', '/device:CPU:1')
    assert {v.device for v in built.variables + built.slots} == {'/device:CPU:0'}
    every = samples.step_operations([built.train_op, built.loss])
    for tower in built.towers:
        gradients = [op for op in every if op.name in tower.backward]
        mine = [op for op in every if op.name in tower.forward] + gradients
        assert len(mine) > 100 and len(gradients) > 50
        kinds = {op.type for op in mine}
        assert {'Conv2D', 'Conv2DBackpropFilter', 'MatMul', 'BiasAdd'} <= kinds
        for op in mine:
            # What stands beside its variable: reads of it, gathers from it, its batch-norm update.
            beside = any(tensor.dtype == tf.resource for tensor in op.inputs) or (
                op.colocation_groups() != [b'loc:@' + op.name.encode()])
            assert op.device in ([tower.device, '/device:CPU:0', ''] if beside
                                 else [tower.device]), op.name
        floats = [op for op in mine if op.type in (
            'Conv2D', 'Conv2DBackpropFilter', 'MatMul', 'BiasAdd', 'Relu', 'ReluGrad', 'AddN',
            'BiasAddGrad', 'FusedBatchNormV3', 'FusedBatchNormGradV3', 'RandomUniform', 'ConcatV2')]
        assert {op.device for op in floats} == {tower.device}
    for op in every:  # the combination and the update, on the variables' device
        if op.name.startswith(('combine_gradients/', 'Adam')) and 'Read' not in op.type:
            assert op.device in ('/device:CPU:0', ''), op.name
            assert op.device or not op.outputs or 'Assign' in op.type, op.name
    assert not towers.audit(built).broken


def test_a_device_inside_the_model_function_keeps_the_variables_pinned():
    def model_fn(x, y):
        with tf.device('/cpu:0'):
            x = x * 2.
            table = tf.get_variable('table', [6, 3], tf.float64)
            kernel = tf.Variable(np.ones([3, 3]), name='kernel')
        with tf.device('/gpu:7'):
            bias = tf.get_variable('bias', [3], tf.float64)
        return samples.mean_squared_error(tf.matmul(tf.matmul(x, table), kernel) + bias, y)
    built = towers.build_towers(model_fn, samples.vectors(4), momentum(),
                                towers.resolve_devices(['/gpu:0', '/gpu:1'], check=False),
                                variables=towers.VariablePlacement('/gpu:1'))
    assert {v.device for v in built.variables + built.slots} == {'/device:GPU:1'}
    audit = towers.audit(built)
    assert audit.broken == []
    for tower in (0, 1):
        scope = 'tower_1/' if tower else ''
        assert ("2 operations of tower %d on /cpu:0 by the model's own tf.device: %smul, %smul/y"
                % (tower, scope, scope)) in audit.notes
