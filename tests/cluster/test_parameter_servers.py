"""Parameter servers: several servers in one process, against one device on all examples."""

import threading

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.cluster.server_placement import spread_over_servers
from towers.errors import ClusterError
from machine_samples import batches, close, on_one_device, sparse_and_dense
from one_process import addresses, averaged, halving, in_sessions, serve, together, train
from sample_models import switched


@pytest.mark.parametrize('sizes, num_ps, num_towers, reduction', [
    ([4, 4], 1, 1, 'mean'), pytest.param([5, 3, 1], 2, 2, 'sum', marks=pytest.mark.slow)])
def test_gradients_and_weights_are_those_of_one_device(sizes, num_ps, num_towers, reduction):
    parts, make = batches(sizes), serve(len(sizes), num_ps, uneven=len(set(sizes)) > 1)
    results = together(lambda rank: train(
        make(rank), sparse_and_dense, parts[rank],
        lambda: tf.train.GradientDescentOptimizer(0.125), 2, num_towers, reduction), len(sizes))
    factor = len(sizes) * num_towers if reduction == 'sum' else 1
    gradients, weights = on_one_device(parts, results[0]['first'], 2, factor)
    close(gradients, results[0]['gradients'])
    close(weights, results[0]['last'])


ROWS = [[2, 0, 2, 2], [0, 1, 2, 2]]


def looked_up(rows):
    """The gradient of a row is how often it occurs, over the number of rows."""
    table = tf.get_variable('table', [3, 1], tf.float64, tf.zeros_initializer(), use_resource=True)
    return tf.reduce_mean(tf.gather(table, rows))


@pytest.mark.slow
@pytest.mark.parametrize('count, fields, counted', [
    (2, {}, [2, 1, 5]), (1, {'synchronous': False}, [1, 0, 3])])
def test_transform_gradients_gets_each_row_once(count, fields, counted):
    """By hand: of two workers' rows two are row 0, one is row 1, five are row 2. The norm of rows
    that come twice is less, and Adam's step is another."""
    make = serve(count, **fields)
    seen = []

    def transform(pairs):
        [(gradient, table)] = pairs
        seen.append(table.op.name)
        norm = tf.sqrt(tf.reduce_sum(tf.square(gradient.values)))
        return [(tf.IndexedSlices(gradient.values + norm, gradient.indices,
                                  gradient.dense_shape), table)]
    results = together(lambda rank: train(
        make(rank), looked_up, (np.array(ROWS[rank]),),
        lambda: towers.Objective(tf.train.AdamOptimizer(0.5, epsilon=1.),
                                 transform_gradients=transform), 1), count)
    gradient = np.array(counted) / (4. * count)
    gradient[gradient > 0] += np.sqrt(np.sum(gradient ** 2))
    np.testing.assert_allclose(results[0]['gradients']['table'][:, 0], gradient, rtol=1e-12)
    rate = 0.5 * np.sqrt(1 - 0.999) / (1 - 0.9)
    moved = -rate * 0.1 * gradient / (np.sqrt(0.001) * gradient + 1.)
    np.testing.assert_allclose(results[0]['last']['table'][:, 0], moved, rtol=1e-4)
    assert seen == ['table'] * count


def dense_mean(numbers):
    return tf.reduce_mean(numbers) * tf.get_variable('w', [], tf.float64, tf.zeros_initializer(),
                                                     use_resource=True)


@pytest.mark.slow
def test_what_comes_after_a_step_is_the_chiefs():
    """The gradient is the mean of 1 and 2: the weight is -1.5, then -3. By hand, their average with
    decay 0.5, from 0; twice a step it is another."""
    make = serve(2)
    here = {}
    results = together(lambda rank: train(
        make(rank), dense_mean, (np.full([4], 1. + rank),),
        lambda: tf.train.GradientDescentOptimizer(1.), 2, step_of=averaged,
        on_build=lambda built: here.update({rank: built.updates_here})), 2)
    assert here == {0: True, 1: False}
    assert results[0]['last']['w'] == -3.
    assert results[0]['last']['w/ExponentialMovingAverage'] == 0.5 * (0.5 * -1.5) + 0.5 * -3.


@pytest.mark.slow
def test_what_another_run_has_left_on_the_servers_is_dropped():
    """Gradients of one that was killed, and tokens. The gradient is the mean of 1 and 2."""
    make = serve(2)

    def leave():
        server = tf.train.Server({'ps': [make(0).ps[0]], 'other': addresses(1)}, 'other', 0)
        with tf.Graph().as_default(), tf.device('/job:ps/task:0'):
            sums = tf.ConditionalAccumulator(tf.float64, [], shared_name='served/sums/w',
                                             reduction_type='SUM')
            tokens = tf.FIFOQueue(-1, tf.int64, [[]], shared_name='served/tokens_1')
            with tf.Session(server.target) as session:
                session.run([sums.apply_grad(tf.constant(100., tf.float64), local_step=7),
                             tokens.enqueue([7])])
    leave()
    results = together(lambda rank: train(
        make(rank), dense_mean, (np.full([4], 1. + rank),),
        lambda: tf.train.GradientDescentOptimizer(1.), 2), 2)
    assert [result['last']['w'] for result in results] == [-3.] * 2


@pytest.mark.slow
def test_asynchronous_workers_apply_their_own_gradients_and_the_plan_says_so():
    """Two workers, each with a gradient of 4 times the number of its own towers."""
    make, plans = serve(2, synchronous=False), []
    results = together(lambda rank: train(
        make(rank), dense_mean, (np.full([4], 4.),),
        lambda: tf.train.GradientDescentOptimizer(.5), 1, 2, 'sum',
        on_build=lambda built: plans.append(built.plan)), 2)
    assert [result['gradients']['w'] for result in results] == [8., 8.]
    # The worker that comes last sees both updates.
    assert min(result['last']['w'] for result in results) == -.5 * 8. * 2
    plan = ' '.join(str(plans[0]).split())
    for text in ('4 towers in all, those of one worker, and its batch, in each update',
                 "sum: 2 x the gradient of the worker's own batch's mean loss",
                 '0.5; on the sum, steps as 2 x 0.5 = 1 would on the mean'):
        assert text in plan


@pytest.mark.slow
def test_a_program_that_enables_control_flow_v2_trains():
    """On 1.15 no queue may be in a loop of v2. The switch is the whole process's."""
    building = threading.Lock()

    def build(cluster):
        with building:
            return halving(cluster)

    def work(session, built, rank):
        for _ in range(2):
            session.run(built.train_op)
        return session.run(built.variables[0])
    with switched('control_flow_v2', True):
        assert in_sessions(serve(2), work, build)[0] == 2.


@pytest.mark.slow
def test_a_server_that_does_not_answer_is_named():
    cluster = towers.Cluster('ps', *addresses(1, 1))
    built = towers.build_towers(lambda x: tf.reduce_mean(x * tf.get_variable('w', [])),
                                tf.zeros([4]), tf.train.GradientDescentOptimizer(0.1), 1, 'mean',
                                cluster=cluster)
    with pytest.raises(ClusterError, match=r'ps 0 \(127.0.0.1:\d+\) does not answer'):
        with towers.join(cluster, built, start_timeout=0.5):
            pass


@pytest.mark.slow
def test_variables_are_spread_by_size_and_everything_else_is_on_the_worker(graph):
    cluster = towers.Cluster('ps', ['a:1', 'b:1'], ['c:1', 'd:1'], rank=1)

    def model_fn(rows):
        table = tf.get_variable('table', [100, 4])
        small = [tf.get_variable('small_%d' % place, [30, 4]) for place in range(3)]
        return tf.reduce_mean(tf.gather(table, rows) + sum(
            tf.reduce_mean(each) for each in small))
    built = towers.build_towers(model_fn, tf.zeros([4], tf.int64),
                                tf.train.MomentumOptimizer(0.1, 0.9), 2, 'mean', cluster=cluster)
    saver = tf.train.Saver()
    tasks = spread_over_servers(cluster, graph, [variable for _, variable in built.gradients])
    assert [tasks[name] for name in ('table', 'small_0', 'small_1', 'small_2')] == [0, 1, 1, 1]
    for name in ('table', 'small_0', 'small_1', 'small_2'):  # slots beside their variables
        assert tasks[name + '/Momentum'] == tasks[name]
    for op in graph.get_operations():
        spec = tf.DeviceSpec.from_string(op.device)
        assert (spec.job, spec.task) in (('ps', 0), ('ps', 1), ('worker', 1)), op.name
        if 'tower_1' in op.name and op.type in ('MatMul', 'Mean', 'AddV2'):
            assert (spec.job, spec.device_index) == ('worker', 1), op.name
        if op.type in ('SaveV2', 'RestoreV2'):
            assert spec.job == 'worker', op.name
    assert saver


def test_rows_are_sent_to_the_worker_and_not_their_table(graph):
    cluster = towers.Cluster('ps', ['a:1', 'b:1'], ['c:1'])

    def model_fn(rows):
        table, small = tf.get_variable('table', [100, 4]), tf.get_variable('small', [2, 4])
        by_place = tf.gather_nd(table, tf.expand_dims(rows, 1))
        return tf.reduce_mean(tf.gather(table, rows) * tf.gather(small, rows // 50) + by_place)
    built = towers.build_towers(model_fn, tf.zeros([4], tf.int64),
                                tf.train.GradientDescentOptimizer(0.1), 1, 'mean', cluster=cluster)
    spread_over_servers(cluster, graph, [variable for _, variable in built.gradients])
    for op in graph.get_operations():
        if op.type in ('ResourceGather', 'ResourceGatherNd'):
            assert '/job:ps' in op.device, op.name
        if '/job:worker' in op.device:  # what it takes from a server
            assert all(tensor.shape.num_elements() < 400 for tensor in op.inputs
                       if '/job:ps' in tensor.op.device and tensor.op.type not in (
                           'SparseAccumulatorTakeGradient', 'PreventGradient')), op.name


@pytest.mark.slow
def test_a_table_that_tensorflow_cuts_is_on_all_servers(graph):
    cluster = towers.Cluster('ps', ['a:1', 'b:1'], ['c:1', 'd:1'])
    cut = tf.min_max_variable_partitioner(len(cluster.ps), min_slice_size=1000)

    def model_fn(rows):
        table = tf.get_variable('table', [1000, 4], partitioner=cut)
        small = tf.get_variable('small', [4], partitioner=cut)
        return tf.reduce_mean(tf.nn.embedding_lookup(table, rows, 'div') + small)
    built = towers.build_towers(model_fn, tf.zeros([4], tf.int64),
                                tf.train.GradientDescentOptimizer(0.1), 2, 'mean', cluster=cluster)
    tasks = spread_over_servers(cluster, graph, [variable for _, variable in built.gradients])
    parts = {name: task for name, task in tasks.items() if name.startswith('table')}
    assert sorted(parts.values()) == [0, 1]
    assert [name for name in tasks if name.startswith('small')] == ['small/part_0']
