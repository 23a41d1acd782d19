"""Parameter servers: several servers in one process, against one device on all examples."""

import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.cluster import parameter_servers
from towers.cluster.fingerprint import difference, fingerprint
from towers.cluster.server_placement import servers_of_variables, spread_over_servers
from towers.errors import ClusterError
from machine_samples import batches, close, on_one_device, sparse_and_dense
from one_process import addresses, averaged, serve, together, train


def served(sizes, num_ps, steps=2, num_towers=1, reduction='mean', **fields):
    """Results of all workers, with servers of their own."""
    make, parts = serve(len(sizes), num_ps, **fields), batches(sizes)
    results = together(lambda rank: train(
        make(rank), sparse_and_dense, parts[rank],
        lambda: tf.train.GradientDescentOptimizer(0.125), steps, num_towers, reduction),
        len(sizes))
    return parts, results


@pytest.mark.parametrize('sizes, num_ps, num_towers, reduction', [
    ([4, 4], 1, 1, 'mean'), pytest.param([5, 3, 1], 2, 2, 'sum', marks=pytest.mark.slow)])
def test_gradients_and_weights_are_those_of_one_device(sizes, num_ps, num_towers, reduction):
    parts, results = served(sizes, num_ps, 2, num_towers, reduction,
                            uneven=len(set(sizes)) > 1)
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
    (2, {}, [2, 1, 5]), (1, {}, [1, 0, 3]), (1, {'synchronous': False}, [1, 0, 3])])
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
        lambda: tf.train.AdamOptimizer(0.5, epsilon=1.), 1, transform_gradients=transform), count)
    gradient = np.array(counted) / (4. * count)
    gradient[gradient > 0] += np.sqrt(np.sum(gradient ** 2))
    np.testing.assert_allclose(results[0]['gradients']['table'][:, 0], gradient, rtol=1e-12)
    rate = 0.5 * np.sqrt(1 - 0.999) / (1 - 0.9)
    moved = -rate * 0.1 * gradient / (np.sqrt(0.001) * gradient + 1.)
    np.testing.assert_allclose(results[0]['last']['table'][:, 0], moved, rtol=1e-4)
    assert seen == ['table'] * count


@pytest.mark.parametrize('optimizer', [
    lambda: tf.train.AdagradOptimizer(0.5),
    pytest.param(lambda: tf.train.FtrlOptimizer(0.5), marks=pytest.mark.slow)])
def test_optimizers_see_a_row_of_two_workers_as_one(optimizer):
    """Against plain TF1 with the rows added up by hand."""
    make = serve(2)
    results = together(lambda rank: train(
        make(rank), looked_up, (np.array(ROWS[rank]),), optimizer, 2), 2)
    with tf.Graph().as_default(), tf.Session() as session:
        table = tf.get_variable('table', [3, 1], tf.float64, tf.zeros_initializer(),
                                use_resource=True)
        update = optimizer().apply_gradients([(tf.IndexedSlices(
            tf.constant([[2 / 8.], [1 / 8.], [5 / 8.]], tf.float64), tf.constant([0, 1, 2])),
            table)])
        session.run(tf.global_variables_initializer())
        for _ in range(2):
            session.run(update)
        for variable in tf.global_variables():
            np.testing.assert_allclose(results[0]['last'][variable.op.name], session.run(variable),
                                       rtol=1e-9, err_msg=variable.op.name)


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


def test_asynchronous_workers_all_update():
    for count, synchronous in ((2, False), (1, True)):
        cluster = towers.Cluster('ps', ['a:1', 'b:1'][:count], ['c:1'], rank=count - 1,
                                 synchronous=synchronous)
        assert cluster.machines(4, 'mean', 1).updates_here


@pytest.mark.slow
@pytest.mark.parametrize('reduction, factor', [('mean', 1.), ('sum', 2.)])
def test_a_step_does_not_wait_for_backup_workers(reduction, factor):
    """The gradient is the mean of those that came, two of 1, 2 and 4, or all three; or twice it: a
    step needs two."""
    make = serve(3, backup_workers=1)
    results = together(lambda rank: train(
        make(rank), dense_mean, (np.full([4], 2. ** rank),),
        lambda: tf.train.GradientDescentOptimizer(1.), 1, 1, reduction), 3)
    possible = [factor * sum(each) / len(each) for each in ((1, 2), (1, 4), (2, 4), (1, 2, 4))]
    assert np.isclose(possible, results[0]['gradients']['w'], rtol=1e-12).sum() == 1


def test_backup_workers_and_sparse_gradients_are_refused():
    cluster = towers.Cluster('ps', ['a:1', 'b:1'], ['c:1'], backup_workers=1)
    with pytest.raises(ClusterError, match='is sparse'):
        towers.build_towers(sparse_and_dense, tuple(map(tf.constant, batches([4])[0])),
                            tf.train.GradientDescentOptimizer(1.), 1, 'mean', cluster=cluster)


@pytest.mark.slow
def test_asynchronous_workers_apply_their_own_gradients():
    parts, results = served([4, 4], 1, steps=1, synchronous=False)
    for part, result in zip(parts, results):
        # From the weights of then, which the other may have moved: the bias is the first to tell.
        assert result['last']['global_step'] in (1, 2)
    assert max(result['last']['global_step'] for result in results) == 2


@pytest.mark.parametrize('num_towers, reduction, texts', [
    (2, 'sum', ["sum: 2 x the gradient of the worker's own batch's mean loss",
                '0.5; on the sum, steps as 2 x 0.5 = 1 would on the mean']),
    pytest.param(1, 'sum', ['sum (of one tower: its own gradient)'], marks=pytest.mark.slow),
    pytest.param(2, 'mean', ["mean: the gradient of the worker's own batch's mean loss"],
                 marks=pytest.mark.slow)])
def test_the_plan_of_asynchronous_workers_says_what_each_applies(num_towers, reduction, texts):
    """Three workers, each with a gradient of 4 times the factor of its own towers."""
    make = serve(3, synchronous=False)
    plans = []
    results = together(lambda rank: train(
        make(rank), dense_mean, (np.full([4], 4.),),
        lambda: tf.train.GradientDescentOptimizer(.5), 1, num_towers, reduction,
        on_build=lambda built: plans.append(built.plan)), 3)
    factor = num_towers if reduction == 'sum' else 1
    assert [result['gradients']['w'] for result in results] == [4. * factor] * 3
    # The worker that comes last sees all three updates.
    assert min(result['last']['w'] for result in results) == -.5 * 4. * factor * 3
    assert plans[0].all_towers == 3 * num_towers and plans[0].towers_an_update == num_towers
    plan = ' '.join(str(plans[0]).split())
    assert '%d towers in all, those of one worker, and its batch, in each update' % (
        3 * num_towers) in plan
    for text in texts:
        assert text in plan


@pytest.mark.slow
def test_another_model_is_refused_by_name():
    make = serve(2)

    def work(rank):
        with tf.Graph().as_default():
            step = tf.train.get_or_create_global_step()
            built = towers.build_towers(
                lambda x: tf.reduce_mean(x * tf.get_variable('w', [rank + 1])), tf.zeros([4, 1]),
                tf.train.GradientDescentOptimizer(0.1), 1, 'mean', global_step=step,
                cluster=make(rank))
            with towers.join(make(rank), built, start_timeout=30., say=said.append):
                deadline = time.monotonic() + 30.
                while not said and time.monotonic() < deadline:
                    time.sleep(0.05)
    said = []
    with pytest.raises(ClusterError, match="worker 1 .* does not belong .* variable 'w' is float32 "
                       r'\(2,\), and that of worker 0 float32 \(1,\)'):
        together(work, 2)
    assert said == ["refused        worker 1: its model is another one: variable 'w' is float32 "
                    '(2,), and that of worker 0 float32 (1,)']  # by the chief


def test_a_server_that_does_not_answer_is_named():
    cluster = towers.Cluster('ps', *addresses(1, 1))
    built = towers.build_towers(lambda x: tf.reduce_mean(x * tf.get_variable('w', [])),
                                tf.zeros([4]), tf.train.GradientDescentOptimizer(0.1), 1, 'mean',
                                cluster=cluster)
    with pytest.raises(ClusterError, match=r'ps 0 \(127.0.0.1:\d+\) at .* does not answer'):
        with towers.join(cluster, built, start_timeout=0.5):
            pass


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


def of_order(rank, names, chief_only=()):
    """(servers of variables, of accumulators, fingerprint) of a model that makes its variables in
    this order; those whose names are in capitals are not trained."""
    with tf.Graph().as_default() as graph:
        cluster = towers.Cluster('ps', ['a:1', 'b:1'], ['c:1', 'd:1'], rank=rank)
        sizes = {'a': 4, 'b': 2, 'c': 3, 'D': 4, 'E': 1}
        built = towers.build_towers(
            lambda x: sum(tf.reduce_mean(x * tf.get_variable(
                name, [sizes[name]], trainable=name.islower())) for name in names), tf.ones([4, 1]),
            tf.train.AdamOptimizer(0.1), 1, 'mean', cluster=cluster)
        for name, size in chief_only:
            tf.get_variable(name, [size])
        trained = [variable for _, variable in built.gradients]
        sums = {op.get_attr('shared_name').decode().rpartition('/')[2]: op.device
                for op in graph.get_operations() if op.type.endswith('ConditionalAccumulator')}
        servers = servers_of_variables(cluster, graph, trained)
        said = dict(fingerprint(cluster, built, 4), servers=servers)
        return servers, sums, said


def test_variables_are_on_the_same_servers_in_whatever_order_they_are_made():
    servers, sums, said = of_order(0, 'abcDE')
    assert {name: servers[name] for name in 'abcDE'} == {'a': 0, 'b': 1, 'c': 1, 'D': 0, 'E': 1}
    assert {name: '/task:%d/' % servers[name] in device for name, device in sums.items()} == {
        'a': True, 'b': True, 'c': True}
    for names in ('cDEba', 'EDbca'):
        assert of_order(1, names)[:2] == (servers, sums)
    assert difference(said, of_order(1, 'EDbca')[2]) is None


def test_a_worker_that_spreads_other_variables_is_refused():
    said = [of_order(rank, 'abcDE', [('average', 9)] * (rank == 0))[2] for rank in (0, 1)]
    assert difference(*said) == (
        "its variable 'D' is on ps 0, and that of worker 0 on ps 1, since the two spread other "
        'variables: make the same ones on all workers, also those that the chief alone needs')


@pytest.mark.parametrize('resource', [True, pytest.param(False, marks=pytest.mark.slow)])
def test_rows_are_sent_to_the_worker_and_not_their_table(graph, resource):
    cluster = towers.Cluster('ps', ['a:1', 'b:1'], ['c:1'])

    def model_fn(rows):
        table, small = [tf.get_variable(name, [count, 4], use_resource=resource)
                        for name, count in (('table', 100), ('small', 2))]
        by_place = tf.gather_nd(table, tf.expand_dims(rows, 1))
        return tf.reduce_mean(tf.gather(table, rows) * tf.gather(small, rows // 50) + by_place)
    built = towers.build_towers(model_fn, tf.zeros([4], tf.int64),
                                tf.train.GradientDescentOptimizer(0.1), 1, 'mean', cluster=cluster)
    spread_over_servers(cluster, graph, [variable for _, variable in built.gradients])
    for op in graph.get_operations():
        of_table = op.type in ('Gather', 'GatherV2', 'GatherNd') and (
            op.outputs[0].op.inputs[0].shape.as_list() == [100, 4])
        if of_table or op.type == 'ResourceGather':
            assert '/job:ps' in op.device, op.name
        elif op.type.startswith('Gather'):  # as many rows as the table has, or more
            assert '/job:worker' in op.device, op.name
        if '/job:worker' in op.device:  # what it takes from a server
            assert all(tensor.shape.num_elements() < 400 for tensor in op.inputs
                       if '/job:ps' in tensor.op.device
                       and tensor.op.type not in ('SparseAccumulatorTakeGradient', 'IdentityN')
                       ), op.name


@pytest.mark.parametrize('resource', [True, pytest.param(False, marks=pytest.mark.slow)])
def test_what_is_colocated_with_a_variable_is_on_its_server(graph, resource):
    """Adam's powers of beta are with the first variable; a reference variable of another server
    is an error of TensorFlow's, when the session is made."""
    cluster = towers.Cluster('ps', ['a:1', 'b:1'], ['c:1', 'd:1'])

    def model_fn(rows):
        table = tf.get_variable('a', [9, 4], use_resource=resource)
        return tf.reduce_mean(tf.gather(table, rows) * tf.get_variable(
            'b', [4], use_resource=resource))
    built = towers.build_towers(model_fn, tf.zeros([4], tf.int64), tf.train.AdamOptimizer(0.1), 1,
                                'mean', cluster=cluster)
    tasks = spread_over_servers(cluster, graph, [variable for _, variable in built.gradients])
    assert tasks['beta1_power'] == tasks['beta2_power'] == tasks['a'] == 0 and tasks['b'] == 1
    for op in graph.get_operations():
        for group in op.colocation_groups():
            name = group.decode('utf-8').partition('loc:@')[2]
            if name in tasks:
                assert '/task:%d/' % tasks[name] in op.device, (op.name, name)


def test_a_large_embedding_is_cut_into_a_part_a_server(graph):
    cluster = towers.Cluster('ps', ['a:1', 'b:1'], ['c:1', 'd:1'], partition_bytes=1000)

    def model_fn(rows):
        table = tf.get_variable('table', [1000, 4], partitioner=cluster.partitioner())
        small = tf.get_variable('small', [4], partitioner=cluster.partitioner())
        return tf.reduce_mean(tf.nn.embedding_lookup(table, rows, 'div') + small)
    built = towers.build_towers(model_fn, tf.zeros([4], tf.int64),
                                tf.train.GradientDescentOptimizer(0.1), 2, 'mean', cluster=cluster)
    tasks = spread_over_servers(cluster, graph, [variable for _, variable in built.gradients])
    parts = {name: task for name, task in tasks.items() if name.startswith('table')}
    assert sorted(parts.values()) == [0, 1]
    assert [name for name in tasks if name.startswith('small')] == ['small/part_0']
    assert towers.Cluster('ps', ['a:1'], ['c:1']).partitioner() is None
