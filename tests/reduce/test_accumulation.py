"""Several micro-batches a tower for one update, against the whole batch at once."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from sample_models import switched
from towers.graph.graph_walk import reachable_from, step_operations

slow = pytest.mark.slow
RANDOM = np.random.RandomState(0)
X, WORDS = RANDOM.rand(16, 3), np.arange(16) % 5


def model(x, words):
    """Dense and sparse gradients, an L2 term, and a variable that is trained by neither."""
    def variable(name, shape, value):
        return tf.get_variable(name, shape, tf.float64, tf.constant_initializer(value))
    w, rows = variable('w', [3, 4], .5), variable('rows', [5, 4], .25)
    variable('unused', [], 1.)
    hidden = tf.tanh(tf.matmul(x, w)) * tf.nn.embedding_lookup(rows, words)
    return {'loss': tf.reduce_mean(tf.square(tf.reduce_sum(hidden, 1) - 1))
                    + .01 * tf.nn.l2_loss(w),
            'predictions': hidden,
            'metrics': {'mean': tf.reduce_mean(hidden), 'of inputs': tf.reduce_mean(x)}}


def trained(devices, accumulate, steps=6, model_fn=model, inputs=(X, WORDS), **options):
    """(variables by name, predictions and metrics after the last step, the build)"""
    with tf.Graph().as_default():
        step = tf.train.get_or_create_global_step()
        rate = tf.train.exponential_decay(.1, step, 1, .9)
        built = towers.build_towers(
            model_fn, tuple(map(tf.constant, inputs)), tf.train.MomentumOptimizer(rate, .9),
            devices, options.pop('reduction', 'mean'), global_step=step,
            memory=towers.Memory(accumulate=accumulate),
            **options)
        assert not towers.audit(built).broken
        with tf.Session(config=towers.session_config(built.devices)) as session:
            session.run(tf.global_variables_initializer())
            session.run(tf.local_variables_initializer())
            for _ in range(steps):
                session.run(built.train_op)
            variables = tf.global_variables()
            found = dict(zip([v.op.name for v in variables], session.run(variables)))
            outputs = session.run([each for each in (built.loss, built.predictions, built.metrics)
                                   if each is not None])
    return found, outputs, built


def assert_same(one, other):
    (values, outputs, _), (found, seen, _) = one, other
    assert set(values) == set(found)
    for name in values:
        np.testing.assert_allclose(found[name], values[name], rtol=0, atol=1e-12, err_msg=name)
    for each, wanted in zip(tf.nest.flatten(seen), tf.nest.flatten(outputs)):
        np.testing.assert_allclose(each, wanted, rtol=0, atol=1e-12)


@pytest.fixture(scope='module')
def at_once():
    return trained(1, 1)


@pytest.mark.parametrize('devices, accumulate, options', [
    (2, 2, {})] + [
        pytest.param(*case, marks=slow) for case in [
            (1, 3, dict(remainder='weight', copies='reuse')),
            (2, 2, dict(variables=towers.VariablePlacement('balanced'))),
            (2, 2, dict(variables=towers.VariablePlacement('replicated'))),
            (2, 9, dict(remainder='weight'))]])
def test_the_weights_are_those_of_the_whole_batch(at_once, devices, accumulate, options):
    found = trained(devices, accumulate, **options)
    assert_same(at_once, found)
    assert found[0]['global_step'] == 6
    built = found[2]
    assert len(built.towers) == devices * accumulate and len(built.devices) == devices
    kinds = {v.op.name: type(g) for g, v in built.gradients}
    assert kinds['rows'] is tf.IndexedSlices and 'unused' not in kinds


@pytest.mark.slow
def test_a_micro_batch_waits_for_the_sums_of_the_one_before():
    with tf.Graph().as_default() as graph:
        built = towers.build_towers(model, (tf.constant(X), tf.constant(WORDS)),
                                    tf.train.GradientDescentOptimizer(.1), 2,
                                    memory=towers.Memory(accumulate=4))
        operations = graph.get_operations()
        step = step_operations([built.train_op])
        for index, part in enumerate(built.towers):
            # What is computed from constants alone is folded, once for all micro-batches.
            varying = reachable_from([leaf.op for leaf in part.inputs] + [
                variable.op for variable in built.variables], operations)
            own = {op.name for op in step if part.has(op.name) and op.name in varying}
            assert own
            for gradient, _ in built.towers[index - 1].pairs if index % 4 else ():
                for tensor in tf.nest.flatten(gradient, expand_composites=True):
                    assert tensor is None or own <= reachable_from(
                        [tensor.op], operations, control=True)
        assert not own & {op.name for op in step_operations([tf.global_variables_initializer()])}
        for part, device in zip(built.towers, ['/device:CPU:0'] * 4 + ['/device:CPU:1'] * 4):
            assert part.device == device


def state(x, uses_new=False):
    """Inline: the loss waits for a write of what every micro-batch reads."""
    mean = tf.get_variable('mean', [], tf.float64, tf.constant_initializer(.5), trainable=False,
                           use_resource=True)
    w = tf.get_variable('w', [], tf.float64, tf.ones_initializer())
    before = tf.tanh(x * w - mean)
    with tf.control_dependencies([before]):
        after = tf.assign(mean, mean * .9, name='decayed')
    with tf.control_dependencies([after]):
        return tf.reduce_mean(tf.square(before * after if uses_new else before))


def test_micro_batches_that_would_wait_for_each_other_are_refused():
    with tf.Graph().as_default():
        with pytest.raises(towers.InvalidArgumentError, match='makes an earlier one wait for a '
                           r'later one \(operation decayed\)'):
            towers.build_towers(lambda x: state(x, True), tf.constant([1., 2.], tf.float64),
                                tf.train.GradientDescentOptimizer(.1), 1,
                                memory=towers.Memory(accumulate=2))


@pytest.mark.parametrize('counts, options', [
    ((2, 2), {}),
    pytest.param((2, 4), dict(variables=towers.VariablePlacement('replicated')), marks=slow)])
def test_a_write_in_the_forward_pass_comes_after_all_micro_batches_have_read(counts, options):
    found = trained(counts[0], counts[1], 3, state, (X[:, 0],), **options)
    assert_same(trained(1, 1, 3, state, (X[:, 0],)), found)
    assert found[0]['mean'] == .5 * .9 * .9 * .9


def looping(x):
    w = tf.get_variable('w', [], tf.float64, tf.constant_initializer(.5))
    # What follows from constants alone is within the loop as well, so it cannot wait for others.
    total = tf.while_loop(lambda i, _: i < 3, lambda i, each: (
        i + 1, each * w + tf.fill([], tf.constant(.1, tf.float64))), (tf.constant(0), x))[1]
    return tf.cond(tf.reduce_mean(x) > 0, lambda: tf.reduce_mean(total * w),
                   lambda: tf.reduce_mean(total))


@slow
@pytest.mark.parametrize('version', ['v1', 'v2'])
def test_loops_and_branches(version):
    with switched('control_flow_v2', version == 'v2'):
        report = towers.check_towers(looping, X[:, 0], devices=1,
                                     memory=towers.Memory(accumulate=2))
    assert report.equal and report.worst.relative < 1e-9, report


@pytest.mark.parametrize('options, text', [
    (dict(memory=towers.Memory(accumulate=2), optimizer=None),
     'accumulate=2, and there is no optimizer'),
    (dict(memory=towers.Memory(accumulate=10 ** 18)),
     'accumulate=1000000000000000000 on 1 tower: expected 10000 micro-batches in all at most.'),
    (dict(memory=towers.Memory(accumulate=5001), devices=2),
     'accumulate=5001 on 2 towers: expected 10000 micro-batches in all at most.'),
    (dict(pipeline=towers.Pipeline(micro_batches=10 ** 5), devices=['/cpu:0+/cpu:1']),
     'micro_batches=100000 on 1 tower: expected 10000 micro-batches in all at most.'),
    (dict(memory=towers.Memory(accumulate=10000)), 'does not divide among 10000 micro-batches'),
    (dict(memory=towers.Memory(accumulate=5)), 'does not divide among 5 micro-batches'),
    (dict(memory=towers.Memory(accumulate=2),
          optimizer={'a': tf.train.GradientDescentOptimizer(.1)}),
     'goes with one loss')])
def test_errors_come_before_any_operation(options, text):
    options = dict(dict(optimizer=tf.train.GradientDescentOptimizer(.1), devices=1), **options)
    with tf.Graph().as_default() as graph:
        inputs = tf.constant(X), tf.constant(WORDS)
        before = len(graph.get_operations())
        with pytest.raises(towers.TowersError) as error:
            towers.build_towers(model, inputs, **options)
        assert text in str(error.value)
        assert len(graph.get_operations()) == before


def with_table(x, words):
    """The keys of the table are computed by operations that a step runs, too."""
    keys = tf.range(5, dtype=tf.int64) + 0
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(
        keys, tf.constant([4, 3, 2, 1, 0], tf.int64)), -1)
    found = model(x, table.lookup(words))
    found['loss'] += 0. * tf.cast(keys[0], tf.float64)
    return found


@pytest.mark.parametrize('devices, options', [
    (1, dict(memory=towers.Memory(accumulate=2))), pytest.param(
        [['/cpu:0', '/cpu:1']], dict(pipeline=towers.Pipeline(micro_batches=2, stages='auto')),
        marks=slow)],
                         ids=['one device', 'stages'])
@pytest.mark.slow
def test_a_table_is_filled_before_the_first_step(devices, options):
    """What names the table of a later micro-batch waits for no step: its initializer runs it."""
    def run(devices, **options):
        with tf.Graph().as_default():
            built = towers.build_towers(
                with_table, (tf.constant(X), tf.constant(WORDS)),
                tf.train.MomentumOptimizer(.1, .9), devices, 'mean', **options)
            with tf.Session(config=towers.session_config(built.devices)) as session:
                session.run([tf.global_variables_initializer(), tf.tables_initializer()])
                return [session.run([built.loss, built.train_op])[0] for _ in range(3)]
    np.testing.assert_allclose(run(devices, **options), run(1), rtol=0, atol=1e-12)


def convolutions(images):
    """Its first gradient is a constant of the size of the last layer, and it has a constant mask."""
    net = images
    for layer in range(3):
        weights = tf.get_variable('w%d' % layer, [3, 3, net.shape[-1], 16])
        net = tf.nn.relu(tf.nn.conv2d(net, weights, [1, 1, 1, 1], 'SAME'))
    mask = tf.matrix_band_part(tf.ones([32, 32]), -1, 0)
    return tf.reduce_mean(tf.square(net * mask[:, :, None]))


def largest_use(micro_batches):
    """(number of large constants that a step has, bytes of its batch, bytes in use at the most; 0
    where TensorFlow's allocator does not count)."""
    images = np.zeros([2 * micro_batches, 32, 32, 3], 'float32')
    with tf.Graph().as_default():
        fed = tf.placeholder(tf.float32, images.shape)
        built = towers.build_towers(convolutions, fed, tf.train.GradientDescentOptimizer(.1), 1,
                                    memory=towers.Memory(accumulate=micro_batches))
        metadata = tf.RunMetadata()
        with tf.Session(config=towers.session_config(built.devices)) as session:
            session.run(tf.global_variables_initializer())
            for _ in range(2):
                session.run(built.train_op, {fed: images}, tf.RunOptions(
                    trace_level=tf.RunOptions.FULL_TRACE, output_partition_graphs=True), metadata)
    constants = sum(node.op == 'Const' and node.ByteSize() > 2000
                    for graph in metadata.partition_graphs for node in graph.node)
    peak = max(use.allocator_bytes_in_use for device in metadata.step_stats.dev_stats
               for node in device.node_stats for use in node.memory)
    return constants, images.nbytes, peak


def test_memory_does_not_grow_with_the_number_of_micro_batches():
    constants, batch, peak = largest_use(2)
    more_constants, larger_batch, larger_peak = largest_use(4)
    assert more_constants == constants
    layer = 2 * 32 * 32 * 16 * 4  # bytes of a micro-batch's activations in one layer
    assert larger_peak - peak <= larger_batch - batch + layer
