"""The ring: several servers in one process, against one device on all examples."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.cluster import collectives, ring, ring_rows
from towers.errors import ClusterError
from towers.graph.graph_walk import step_operations
from machine_samples import batches, close, on_one_device, sparse_and_dense
from one_process import addresses, together, train
from case_marks import first_fast


@pytest.mark.parametrize('sizes, num_towers, reduction, place', [
    ([5, 2], 2, 'sum', None), pytest.param([4, 4], 2, 'mean', 'replicated', marks=pytest.mark.slow),
    pytest.param([5, 3, 1], 1, 'mean', None, marks=pytest.mark.slow)])
def test_gradients_and_weights_are_those_of_one_device(
        sizes, num_towers, reduction, place, monkeypatch):
    size = {}
    if len(sizes) == 3:  # of a kernel's 9 numbers 5 travel, by halves, and then 4
        size['buffer_mb'] = 40. / 2 ** 20
        monkeypatch.setattr(collectives, '_BYTES_TO_HALVE', 40)
    parts, workers = batches(sizes), addresses(len(sizes))
    results = together(lambda rank: train(
        towers.Cluster('ring', workers, rank=rank, uneven=len(set(sizes)) > 1, **size),
        sparse_and_dense, parts[rank], lambda: tf.train.GradientDescentOptimizer(0.125), 2,
        num_towers, reduction, variables=place and towers.VariablePlacement(place)), len(sizes))
    factor = len(sizes) * num_towers if reduction == 'sum' else 1
    gradients, weights = on_one_device(parts, results[0]['first'], 2, factor)
    close(gradients, results[0]['gradients'])
    close(weights, results[0]['last'])
    for other in results[1:]:  # bit for bit
        for name, value in results[0]['last'].items():
            assert value.tobytes() == other['last'][name].tobytes(), name
        for name, value in results[0]['gradients'].items():
            assert value.tobytes() == other['gradients'][name].tobytes(), name


def test_buffers_are_filled_up_and_hold_one_dtype():
    kinds = [('a', 5, tf.float32), ('b', 2, tf.float64), ('c', 4, tf.float32), ('d', 1, tf.float64),
             ('e', 2, tf.float32), ('f', 11, tf.float32), ('g', 4, tf.float32)]
    pairs = [(tf.zeros([size], dtype), tf.get_variable(name, [size], dtype))
             for name, size, dtype in kinds]
    # From the last: g and e and c, 16 + 8 + 16 bytes; f is too large; d and b; a opens another one.
    assert [''.join(v.op.name for _, v in each) for each in ring.buffers_of(pairs, 40)] == [
        'gec', 'f', 'db', 'a']


WIRES = {'float16': 2. ** -11, 'bfloat16': 2. ** -8}
"""What a number may change by when it is rounded, at most, of its size."""


@pytest.mark.slow
@pytest.mark.parametrize('wire, sizes', [
    ('float16', [4, 4]), pytest.param('bfloat16', [5, 3, 1], marks=pytest.mark.slow)])
def test_dense_gradients_that_travel_as_16_bit_numbers_are_rounded_once(wire, sizes):
    """And added up in float32: each sum is off by the workers' roundings at most, and the same
    bits on all. Rows travel as they are."""
    count = len(sizes)
    parts, workers = batches(sizes), addresses(count)
    results = together(lambda rank: train(
        towers.Cluster('ring', workers, rank=rank, uneven=count == 3, wire=wire), sparse_and_dense,
        parts[rank], lambda: tf.train.GradientDescentOptimizer(0.125), 2), count)
    exact = on_one_device(parts, results[0]['first'], 1, 1)[0]
    own = [on_one_device([part], results[0]['first'], 1, 1)[0] for part in parts]
    changed = 0
    for name, value in results[0]['gradients'].items():
        most = sum(size * np.abs(each[name]) for size, each in zip(sizes, own)) / sum(sizes)
        error = np.abs(value - exact[name])
        assert (error <= WIRES[wire] * most + 1e-6).all(), (name, error.max())
        changed += (error > 1e-6).any()
    assert changed
    for other in results[1:]:
        for name, value in results[0]['last'].items():
            assert value.tobytes() == other['last'][name].tobytes(), name


@pytest.mark.slow
def test_local_steps_are_each_workers_own_until_all_take_the_mean():
    """Weights and momentum, after every second step and at the end.

    By hand: the gradient on worker r is f_r w, with f = 1/4 and 3/4."""
    workers, momentum = addresses(2), 0.5

    def model_fn(x):
        weight = tf.get_variable('w', [], tf.float64, tf.constant_initializer(8.))
        return tf.reduce_mean(x) * tf.square(weight) / 2.

    def work(rank):
        with tf.Graph().as_default():
            cluster = towers.Cluster('ring', workers, rank=rank, every=2)
            built = towers.build_towers(
                model_fn, tf.constant([.25 + .5 * rank], tf.float64),
                tf.train.MomentumOptimizer(1., momentum), 1, 'mean', cluster=cluster)
            assert 'whose mean all take after every 2 steps' in ' '.join(str(built.plan).split())
            seen, variables = [], tf.global_variables()
            with towers.join(cluster, built) as member:
                with member.session() as session:
                    while rank or len(seen) < 5:  # worker 0 ends
                        session.run(built.train_op)
                        seen.append(session.run_step_fn(
                            lambda step_context: step_context.session.run(variables)))
                with tf.Session(member.target, config=member.config) as session:
                    return seen + [session.run(variables)]
    found = together(work, 2)
    weights, slots = np.full([2], 8.), np.zeros([2])
    for step in range(6):
        if step < 5:
            slots = momentum * slots + np.array([.25, .75]) * weights
            weights = weights - slots
        if step % 2:  # after the second step, the fourth one, and the end
            weights, slots = np.full([2], weights.mean()), np.full([2], slots.mean())
        for rank in range(2):
            np.testing.assert_allclose(sorted(found[rank][step]),
                                       sorted([weights[rank], slots[rank]]), 1e-14)


@pytest.mark.parametrize('batches', first_fast(1, [7, 5, 8]))
def test_local_steps_end_on_all_workers_when_the_data_of_one_end(batches):
    """In a step that the other makes: before a mean, and in place of one. Worker 1 alone ends."""
    workers = addresses(2)

    def work(rank):
        with tf.Graph().as_default():
            cluster = towers.Cluster('ring', workers, rank=rank, every=4)
            data = tf.data.Dataset.from_tensors([.25]).repeat(batches if rank else None)
            built = towers.build_towers(
                lambda x: tf.reduce_mean(x) * tf.get_variable('w', [], initializer=(
                    tf.zeros_initializer())), tf.data.make_one_shot_iterator(data).get_next(),
                tf.train.GradientDescentOptimizer(1.), 1, 'mean',
                cluster=cluster)
            with towers.join(cluster, built) as member:
                with member.session() as session:
                    while not session.should_stop():
                        session.run(built.train_op)
                with tf.Session(member.target, config=member.config) as session:
                    return session.run(built.variables)
    (one,), (other,) = together(work, 2)
    # Worker 0 has made one step more, of which each gets a half.
    assert one == other == -.25 * (batches + .5)


@pytest.mark.slow
def test_an_empty_batch_of_all_workers_is_no_end_of_the_data():
    """It is refused: `tf.train.MonitoredSession` takes an end of the data for the end of training."""
    workers = addresses(2)

    def work(rank):
        with tf.Graph().as_default():
            numbers = tf.placeholder(tf.float64, [None])
            weight = tf.get_variable('w', [], tf.float64, tf.zeros_initializer())
            cluster = towers.Cluster('ring', workers, rank=rank, uneven=True)
            built = towers.build_towers(
                lambda shard: tf.reduce_mean(shard) * weight, numbers,
                tf.train.GradientDescentOptimizer(1.), 1, 'mean', remainder='weight',
                cluster=cluster)
            with pytest.raises(towers.TowersError) as caught:
                with towers.join(cluster, built, on_lost=lambda error: None) as member:
                    with member.session() as session:
                        session.run(built.train_op, {numbers: []})
            return str(caught.value)
    said = together(work, 2)
    assert any('needs at least 1 examples and has 0, on this worker' in text for text in said)


@pytest.mark.parametrize('wire', first_fast(1, [None, 'float16']))
def test_each_reduction_waits_for_the_one_before(wire):
    """Else one worker might wait in one of them for a worker that waits in another, or end its
    training while another waits for it. By an edge of its own: that of a constant, such as the
    shape for a reshape, goes with the constant when TensorFlow simplifies the graph."""
    rows, targets = batches([4])[0]
    towers.build_towers(
        sparse_and_dense, (tf.constant(rows), tf.constant(targets)),
        tf.train.GradientDescentOptimizer(0.1), 2, 'mean', remainder='weight',
        cluster=towers.Cluster('ring', ['127.0.0.1:1', '127.0.0.1:2'], uneven=True, wire=wire,
                               buffer_mb=64. / 2 ** 20))  # a buffer for each variable
    operations = tf.get_default_graph().get_operations()
    reductions = sorted((op for op in operations if op.type.startswith('Collective')),
                        key=lambda op: op.get_attr('instance_key'))
    # Of examples; two pieces of each kernel's gradient, and the bias's. Counts, indices and rows of
    # the table travel beside.
    first, dense, rows = reductions[0], reductions[1:-3], reductions[-3:]
    assert len(dense) == 5 and dense[0].type == (
        'CollectiveGather' if wire else 'CollectiveReduce')
    for chain in ([first] + dense, [first] + rows):
        for before, after in zip(chain, chain[1:]):
            assert any(before in [waited] + [each.op for each in waited.inputs]  # a cast, on 1.15
                       for waited in after.control_inputs)


@pytest.mark.slow
def test_momentum_and_types_that_are_no_floats_begin_as_worker_0_has_them():
    def model_fn(inputs):
        weights = tf.get_variable('w', [2], tf.float32, tf.random_normal_initializer())
        flag = tf.get_variable('flag', [3], tf.bool, tf.constant_initializer(True), trainable=False)
        count = tf.get_variable('count', [], tf.int64, tf.constant_initializer(2 ** 60 + 1),
                                trainable=False)
        used = tf.cast(flag[0], tf.float32) + 0. * tf.cast(count, tf.float32)
        return tf.reduce_mean(inputs * weights) * used
    workers = addresses(2)
    results = together(lambda rank: train(
        towers.Cluster('ring', workers, rank=rank), model_fn, (np.ones([4, 2], np.float32),),
        lambda: tf.train.MomentumOptimizer(0.1, 0.9), 3), 2)
    for name, value in results[0]['last'].items():
        assert value.tobytes() == results[1]['last'][name].tobytes(), name
    assert results[1]['last']['count'] == 2 ** 60 + 1
    assert results[1]['last']['global_step'] == 3


def test_a_variable_that_cannot_be_sent_is_named():
    text = tf.get_variable('text', [], tf.string, tf.constant_initializer('x'), trainable=False)
    with pytest.raises(ClusterError, match="variable 'text' is string"):
        collectives.Collectives(towers.Cluster('ring', ['a:1', 'b:2'])).broadcast([text])


def test_rows_of_unknown_shape_are_named():
    table = tf.Variable(tf.placeholder_with_default(tf.zeros([3, 2]), None), validate_shape=False,
                        name='table')
    slices = tf.IndexedSlices(tf.placeholder(tf.float32), tf.constant([0, 1]))
    with pytest.raises(ClusterError, match="variable 'table' is float32 of shape <unknown>, which"):
        towers.Cluster('ring', ['a:1', 'b:2']).begin_step(4, 'mean').combine([(slices, table)], None)


def test_complex_gradients_are_refused():
    table = tf.get_variable('table', [4, 2], tf.complex64, initializer=tf.zeros_initializer())
    rows = tf.IndexedSlices(tf.zeros([1, 2], tf.complex64), tf.constant([1]), tf.constant([4, 2]))
    for gradient in (table + 1., rows):
        with pytest.raises(ClusterError, match="'table' is complex64 of shape .4, 2., which worker 0"):
            towers.Cluster('ring', ['a:1', 'b:2']).begin_step(4, 'mean').combine(
                [(gradient, table)], None)


@pytest.mark.parametrize('index_type', ['int32', 'int64'])
@pytest.mark.parametrize('dtype', ['float16', 'float32', 'float64'])
def test_a_static_number_of_rows_is_sent_with_its_indices(dtype, index_type):
    """Bit for bit, a large index too."""
    table = tf.get_variable('table', [5, 2, 3], dtype, tf.zeros_initializer())
    indices = np.array([4, 2 ** 31 - 2 if index_type == 'int32' else 2 ** 40 + 1, 4], index_type)
    values = np.random.RandomState(0).randn(3, 2, 3).astype(dtype)
    slices = tf.IndexedSlices(tf.constant(values), tf.constant(indices))
    sent = tf.float64 if dtype == 'float64' else tf.float32
    vectors = ring_rows.vectors_of(slices, table, sent)
    by_worker = [tf.stack([vector, vector]) for vector in vectors]  # two workers have the same
    received = ring_rows.slices_of(by_worker[0], by_worker[1], slices, table)
    with tf.Session() as session:
        found = session.run(received)
    assert found.indices.tolist() == indices.tolist() * 2 and found.indices.dtype == index_type
    assert found.values.tobytes() == values.tobytes() * 2


def test_lookups_of_static_numbers_of_rows_are_one_message():
    """Those of a table with fewer rows are sent once each: numbers of rows, indices, rows."""
    def messages(size):
        with tf.Graph().as_default():
            tables = [tf.get_variable(name, [size, 2]) for name in 'ab']
            pairs = [(tf.IndexedSlices(tf.ones([4, 2]), tf.constant([0, 1, 1, 3])), table)
                     for table in tables]
            towers.Cluster('ring', ['a:1', 'b:2']).begin_step(4, 'mean').combine(pairs, None)
            return sum(op.type.startswith('Collective')
                       for op in tf.get_default_graph().get_operations())
    assert [messages(9), messages(3)] == [1, 3]


@pytest.mark.parametrize('width, wire, expected', [
    (4, None, ['CollectiveGather']), (8200, None, ['CollectiveGather', 'CollectiveReduce']),
    pytest.param(4, 'float16', ['CollectiveGather', 'CollectiveGather'], marks=pytest.mark.slow)])
def test_a_step_of_a_static_batch_has_one_message_and_one_for_large_dense_gradients(
        width, wire, expected):
    """On two towers, with two tables: nothing counts rows or examples, nor looks at weights."""
    def model_fn(words):
        tables = [tf.get_variable(name, [50, 2]) for name in 'ab']
        rows = tf.concat([tf.gather(table, words) for table in tables], 2)
        weights = [tf.get_variable(name, [width]) for name in 'vw']
        return tf.reduce_mean(rows) * tf.reduce_mean(weights[0] * weights[1])
    built = towers.build_towers(
        model_fn, (tf.zeros([4, 3], tf.int64),), tf.train.AdagradOptimizer(.1), 2, 'mean',
        cluster=towers.Cluster('ring', ['127.0.0.1:1', '127.0.0.1:2'], wire=wire))
    messages = [op.type for op in step_operations([built.train_op])
                if op.type.startswith('Collective')]
    assert sorted(messages) == expected


def by_types(words):
    """Weights of three types, small beside the rows; two types in which rows are sent."""
    def sum_of(dtype):
        table = tf.get_variable('table_' + dtype, [50, 2], dtype)
        weights = tf.get_variable('weights_' + dtype, [3, 2], dtype)
        bias = tf.get_variable('bias_' + dtype, [], dtype)
        products = tf.gather(table, words) * weights + bias
        return tf.reduce_mean(tf.cast(tf.square(products), tf.float64))
    return sum_of('float16') + sum_of('float32') + sum_of('float64')


@pytest.mark.parametrize('count', first_fast(1, [2, 3]))
def test_small_dense_gradients_beside_rows_are_those_of_one_device(count):
    """With all workers the same bits."""
    words, workers = np.random.RandomState(0).randint(50, size=[2 * count, 3]), addresses(count)
    results = together(lambda rank: train(
        towers.Cluster('ring', workers, rank=rank), by_types, [words[2 * rank:2 * rank + 2]],
        lambda: tf.train.GradientDescentOptimizer(0.125), 2), count)
    with tf.Graph().as_default():
        loss = by_types(tf.constant(words))
        variables = tf.trainable_variables()
        gradients = [tf.convert_to_tensor(each) for each in tf.gradients(loss, variables)]
        with tf.Session() as session:
            given = {each: results[0]['first'][each.op.name] for each in variables}
            session.run([tf.assign(each, value) for each, value in given.items()])
            expected = session.run(gradients)
    for variable, gradient in zip(variables, expected):
        name = variable.op.name
        tolerance = {'float16': 2e-3, 'float32': 1e-5, 'float64': 1e-12}[gradient.dtype.name]
        np.testing.assert_allclose(results[0]['gradients'][name], gradient, tolerance, tolerance)
        for other in results[1:]:
            assert other['last'][name].tobytes() == results[0]['last'][name].tobytes()
