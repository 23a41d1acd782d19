"""State that training reads or writes: worker 0's on all workers, against one machine by hand."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.cluster.member import start_server
from towers.errors import SharedVariableError
from towers.graph.graph_walk import step_operations
from one_process import addresses, together, train

INPUTS = [np.array([1., 3.]), np.array([10., 6.])]  # of the two workers


def centred(how):
    """A model that subtracts a running mean, which its first tower writes."""
    def model_fn(inputs):
        weight = tf.get_variable('weight', [], tf.float64, tf.ones_initializer())
        mean = tf.get_variable('mean', [], tf.float64, tf.zeros_initializer(), trainable=False)
        loss = weight * tf.reduce_mean(tf.square(inputs - mean))
        with tf.control_dependencies([loss]):
            write = tf.assign(mean, .5 * mean + .5 * tf.reduce_mean(inputs))
        if how == 'collection':
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, write)
            return loss
        with tf.control_dependencies([write]):
            return tf.identity(loss)
    return model_fn


@pytest.mark.parametrize('how, use_resource', [
    ('collection', True), pytest.param('collection', False, marks=pytest.mark.slow),
    pytest.param('inline', True, marks=pytest.mark.slow)])
def test_every_worker_reads_what_worker_0_has_written(how, use_resource):
    workers = addresses(2)

    def work(rank):
        def model_fn(inputs):
            with tf.variable_scope('', use_resource=use_resource):
                return centred(how)(inputs)
        return train(towers.Cluster('ring', workers, rank=rank), model_fn, (INPUTS[rank],),
                     lambda: tf.train.GradientDescentOptimizer(2. ** -7), 3)
    results = together(work, 2)
    weight, mean = 1., 0.
    for _ in range(3):
        weight -= 2. ** -7 * np.mean([np.mean((part - mean) ** 2) for part in INPUTS])
        mean = .5 * mean + .5 * INPUTS[0].mean()
    for result in results:
        np.testing.assert_allclose(result['last']['weight'], weight, rtol=1e-12)
        np.testing.assert_allclose(result['last']['mean'], mean, rtol=1e-12)


def messages(model_fn, **options):
    built = towers.build_towers(
        model_fn, (tf.constant([[1., 2.], [3., 4.]]),), tf.train.MomentumOptimizer(.1, .9), 2,
        global_step=tf.train.get_or_create_global_step(),
        cluster=towers.Cluster('ring', ['a:1', 'b:1']), **options)
    return built, [op for op in tf.get_default_graph().get_operations()
                   if op.type == 'CollectiveBcastSend' and not op.name.startswith('tell/')]


def test_the_write_waits_for_who_takes_the_memory_of_a_reference_variable():
    """Also on a worker of one tower, which stands for another tower of one machine."""
    def model_fn(inputs):
        mean = tf.get_variable('mean', [2], trainable=False, use_resource=False)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign(
            mean, tf.reduce_mean(inputs, 0), name='write'))
        return tf.reduce_mean(tf.multiply(inputs * tf.get_variable('weight', [2]), tf.reshape(
            tf.stop_gradient(mean), [1, 2]), name='taken'))
    messages(model_fn)
    graph = tf.get_default_graph()
    for number in range(2):
        assert graph.get_operation_by_name('tower_%d/taken' % number) in step_operations(
            [graph.get_operation_by_name('tower_0/write')])


def test_batch_norm_and_the_global_step_are_not_sent():
    towers.mend_slim()
    import tf_slim as slim

    def model_fn(inputs):
        weight = tf.get_variable('weight', [2])
        net = tf.nn.dropout(slim.batch_norm(inputs * weight), rate=.5)
        return tf.reduce_mean(net) * tf.cast(tf.train.get_global_step(), tf.float32)
    built, sent = messages(model_fn, stateless_random=True)
    assert not sent and built.train_op is not None


def test_the_state_of_a_power_iteration_is_sent():
    """It is computed from the weights, in the forward pass, and its new value is used."""
    def model_fn(inputs):
        weight = tf.get_variable('weight', [2, 2])
        vector = tf.get_variable('vector', [1, 2], trainable=False)
        with tf.control_dependencies([tf.assign(vector, tf.nn.l2_normalize(
                tf.matmul(vector, weight)))]):
            return tf.reduce_mean(tf.matmul(inputs, weight) / tf.reduce_sum(
                tf.matmul(vector.read_value(), weight)))
    _, sent = messages(model_fn)
    assert len(sent) == 1


def normalizing(inputs):
    """Batch norm that writes its moving average in the forward pass, which training does not read.
    """
    with tf.variable_scope('net', use_resource=True):
        weight = tf.get_variable('weight', [], tf.float64, tf.ones_initializer())
        mean = tf.get_variable('mean', [], tf.float64, tf.zeros_initializer(), trainable=False)
        write = tf.assign(mean, .5 * mean + .5 * tf.reduce_mean(inputs))
        with tf.control_dependencies([write]):
            return tf.reduce_mean(tf.square(weight * inputs))


@pytest.mark.parametrize('num_towers', [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_chief_alone_writes_in_the_forward_pass(num_towers):
    workers, ps = addresses(2, 1)
    server = start_server(towers.Cluster('ps', workers, ps, 'ps'), tf.ConfigProto())
    results = together(lambda rank: train(
        towers.Cluster('ps', workers, ps, rank=rank), normalizing,
        ([np.arange(4.), 100. + np.arange(4.)][rank],),
        lambda: tf.train.GradientDescentOptimizer(2. ** -20), 3, num_towers), 2)
    assert server
    # The mean of 0..3, or of 0 and 1 with two towers, half, three quarters and 7/8 of it.
    assert results[0]['last']['net/mean'] == (1.5 if num_towers == 1 else .5) * 7 / 8


def test_what_the_forward_pass_writes_and_reads_is_refused():
    def model_fn(inputs):
        count = tf.get_variable('count', [], tf.float64, tf.zeros_initializer(), trainable=False,
                                use_resource=True)
        with tf.control_dependencies([tf.assign_add(count, 1.)]):
            return tf.reduce_mean(inputs * tf.get_variable('weight', [], tf.float64)
                                  * count.read_value())
    for rank in range(2):
        with tf.Graph().as_default():
            with pytest.raises(SharedVariableError, match='writes variable count .* UPDATE_OPS'):
                towers.build_towers(
                    model_fn, (tf.ones([4], tf.float64),), tf.train.GradientDescentOptimizer(.1), 1,
                    cluster=towers.Cluster('ps', ['a:1', 'a:2'], ['b:1'], rank=rank))


@pytest.mark.parametrize('use_resource', [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_write_waits_for_the_one_tower_of_its_worker(use_resource):
    """What the loss takes the value by: of a reference variable the subtraction itself."""
    def model_fn(inputs):
        with tf.variable_scope('', use_resource=use_resource):
            weight, mean = tf.get_variable('weight', []), tf.get_variable('mean', [],
                                                                          trainable=False)
            written.append(tf.assign(mean, tf.reduce_mean(inputs)))
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, written[0])
            taken.append(weight * inputs - mean)
            return tf.reduce_mean(taken[0])
    written, taken = [], []
    towers.build_towers(model_fn, (tf.ones([2]),), tf.train.GradientDescentOptimizer(.1), 1,
                        cluster=towers.Cluster('ring', ['a:1', 'b:1']))
    write = next(op for op in step_operations([written[0]]) if 'Assign' in op.type)
    reads = taken[0].op if not use_resource else next(
        tensor.op for tensor in taken[0].op.inputs if tensor.op.type == 'ReadVariableOp')
    assert reads in write.control_inputs
