"""Clones of the first tower: the graph that another call of the model function gives, up to names
of functions and seeds; and where that cannot be, calls.
"""

import re

import numpy as np
import pytest
import sample_models as samples
import tensorflow.compat.v1 as tf
import tf_slim as slim

from models import registry
import towers
from sample_models import (SAMPLES, assert_equal_runs, keras, linear, mean_squared_error, momentum,
                           run, sgd, switched)
from sample_models import kind_of_variables  # noqa: F401, a fixture
from sample_networks import fewer_blocks
from towers.graph import graph_walk


# ---- models --------------------------------------------------------------------------------------

def images(count):
    """(x [count, 8, 8, 2], y [count, 3])"""
    random = np.random.RandomState(count)
    return random.randn(count, 8, 8, 2).astype('float32'), random.randn(count, 3).astype('float32')


def slim_net(x, y):
    """Convolutions with batch norm, registered L2 losses, and dropout."""
    with slim.arg_scope([slim.conv2d], normalizer_fn=slim.batch_norm,
                        weights_regularizer=slim.l2_regularizer(0.01)):
        net = slim.conv2d(x, 4, 3, scope='conv1')
        net = slim.conv2d(net, 4, 3, stride=2, scope='conv2')
    net = slim.dropout(slim.flatten(net), 0.5, is_training=True)
    tf.losses.mean_squared_error(y, slim.fully_connected(net, 3, activation_fn=None))
    return tf.losses.get_total_loss(add_regularization_losses=False)


def outputs_of_every_kind(x, y):
    """A nest of predictions, sparse ones too; metrics of either kind; updates in no collection."""
    out = tf.matmul(x, tf.get_variable('kernel', [6, 3], x.dtype))
    count = tf.get_variable('count', [], trainable=False, initializer=tf.zeros_initializer())
    return towers.ModelOutput(
        mean_squared_error(out, y),
        predictions={'out': out, 'parts': [out[:, 0], (out[:, 1], None)], 'x': x,
                     'sparse': tf.sparse.from_dense(tf.nn.relu(out)), 'scalar': tf.reduce_max(out)},
        metrics={'error': tf.metrics.mean_squared_error(y, out), 'mean': tf.reduce_mean(out)},
        updates=[tf.assign_add(count, 1.), tf.assign_add(count, 2.).op])


def branches(x, y):
    w = tf.get_variable('w', [6, 3], x.dtype)
    positive = tf.cond(tf.reduce_sum(x) > 0, lambda: tf.matmul(x, w), lambda: -tf.matmul(x, w) + 1)
    return mean_squared_error(positive, y)


def parts_on_a_device_of_their_own(x, y):
    with tf.device('/cpu:0'):
        body = tf.matmul(x, tf.get_variable('body', [6, 3], x.dtype), name='pinned')
    with tf.device('/cpu:3'):
        body = tf.tanh(body, name='elsewhere')
    with tf.device(None):
        body = tf.identity(body, name='anywhere')
    with tf.get_default_graph().colocate_with(body.op):
        body = tf.identity(body, name='beside')
    return mean_squared_error(body, y)


def sparse_inputs(x, y):
    w = tf.get_variable('w', [5, 3], tf.float64)
    return mean_squared_error(tf.sparse.sparse_dense_matmul(x['sparse'], w), y) + (
        0. if x['none'] is None else 1.)


def sparse_batch(count):
    x = tf.SparseTensor([[i, i % 5] for i in range(count)], np.arange(count) + 1., [count, 5])
    return {'sparse': x, 'none': None}, np.ones([count, 3])


def waits(x, y):
    """Waits for what is outside: its shard's operation, and one without any output."""
    with tf.control_dependencies([tf.get_default_graph().get_operation_by_name('around'), x.op]):
        return linear(x, y) + 0.


def vectors_and_an_operation(count):
    tf.no_op(name='around')
    return samples.vectors(count)


def two_loops(x, y):
    """A loop with TensorArrays, and one in a branch."""
    w = tf.get_variable('w', [3, 3], tf.float64)
    rows = tf.map_fn(lambda row: tf.tanh(tf.linalg.matvec(w, row)), y)
    count = tf.cond(tf.reduce_mean(x) > 100., lambda: 3., lambda: tf.while_loop(
        lambda i: i < 2., lambda i: i + 1., [tf.constant(0.)]))
    return mean_squared_error(rows * tf.cast(count, tf.float64), y)


MODELS = [(name, sample.model_fn, sample.data, {}) for name, sample in SAMPLES.items()] + [
    ('slim net', slim_net, images, dict(regularization='add')),
    ('slim net, float32', slim_net, images,
     dict(numerics=towers.Numerics(check_numerics=True), update_ops='none', regularization='add')),
    ('outputs', outputs_of_every_kind, lambda count: samples.vectors(count, 'float32'), {}),
    ('branches', branches, samples.vectors, {}),
    ('devices', parts_on_a_device_of_their_own, samples.vectors, {}),
    ('device elsewhere', linear, samples.vectors,
     dict(variables=towers.VariablePlacement('/cpu:2'))),
    ('balanced', samples.two_layers, samples.vectors,
     dict(variables=towers.VariablePlacement('balanced'))),
    ('sparse inputs', sparse_inputs, sparse_batch, {}),
    ('control inputs', waits, vectors_and_an_operation, {}),
    ('loops', two_loops, samples.vectors, {}),
    ('some variables', samples.two_layers, samples.vectors,
     dict(var_list=lambda every: every[1:])),
    ('mean', linear, samples.vectors, dict(reduction='mean',
        numerics=towers.Numerics(check_numerics=True)))]


def build(copies, model_fn, data, num_towers=3, optimizer=momentum, **options):
    """A build in a graph of its own, with its initial weights by seed."""
    with tf.Graph().as_default():
        tf.set_random_seed(3)
        inputs = data(4 * num_towers) if callable(data) else data
        options.setdefault('devices', num_towers)
        return towers.build_towers(model_fn, inputs, optimizer and optimizer(), copies=copies,
                                   **options)


def graph_of(built):
    leaves = tf.nest.flatten(built.towers[0].inputs, expand_composites=True)
    return next(leaf.graph for leaf in leaves if leaf is not None)


def fetches_of(tower):
    """All that a tower gives, as a flat list of tensors and operations."""
    nest = [tower.loss, tower.data_loss, tower.predictions, tower.metrics, tower.updates,
            [gradient for gradient, _ in tower.gradients]]
    leaves = []
    for leaf in tf.nest.flatten(nest):
        if isinstance(leaf, (tf.SparseTensor, tf.IndexedSlices)):
            leaves += tf.nest.flatten(leaf, expand_composites=True)
        elif leaf is not None:  # what assigning to a variable gives counts as the assignment
            leaves.append(leaf if isinstance(leaf, tf.Tensor) else getattr(leaf, 'op', leaf))
    return leaves


def described(op):
    """What an operation is, but for seeds and the names of functions, which count calls."""
    attributes = {key: value.SerializeToString() for key, value in op.node_def.attr.items()
                  if key not in ('seed', 'seed2', '_class')
                  and value.WhichOneof('value') != 'func' and 'func' not in str(value)[:20]}
    return (op.type, op.device, [tensor.name for tensor in op.inputs],
            sorted(each.name for each in op.control_inputs), attributes,
            sorted(op.colocation_groups()),
            [output.dtype for output in op.outputs])


# ---- equal to calls ------------------------------------------------------------------------------

@pytest.mark.slow
@pytest.mark.parametrize('model_fn, data, options', [each[1:] for each in MODELS],
                         ids=[each[0] for each in MODELS])
def test_the_graph_is_that_of_calls(model_fn, data, options):
    cloned, called = [build(copies, model_fn, data, **options) for copies in ('clone', 'reuse')]
    assert called.plan.how_built == '3 calls of the model function'
    assert cloned.plan.how_built == '1 call of the model function, 2 clones of its graph'
    for one, other in zip(cloned.towers, called.towers):
        assert one[:3] == other[:3] and repr(one.size) == repr(other.size)
        for field in ('loss', 'predictions', 'metrics', 'gradients', 'updates', 'data_loss'):
            ours, theirs = getattr(one, field), getattr(other, field)
            if field == 'gradients':
                assert [v.op.name for _, v in ours] == [v.op.name for _, v in theirs]
                ours, theirs = [g for g, _ in ours], [g for g, _ in theirs]
            if field != 'updates':
                tf.nest.assert_same_structure(ours, theirs)
        names = [leaf.name for leaf in fetches_of(one)]
        assert names == [leaf.name for leaf in fetches_of(other)]
        assert [str(getattr(leaf, 'shape', None)) for leaf in fetches_of(one)] == [
            str(getattr(leaf, 'shape', None)) for leaf in fetches_of(other)]
        ours, theirs = [
            {op.name: described(op) for op in graph_walk.step_operations(fetches_of(tower))
             if op.name.startswith(tower.name_scope)} for tower in (one, other)]
        assert len(ours) > 5
        assert sorted(ours) == sorted(theirs)
        for name in ours:
            assert ours[name] == theirs[name], name
        assert samples.names(one.variables) == samples.names(other.variables)
    assert samples.names(cloned.variables) == samples.names(called.variables)


@pytest.mark.usefixtures('kind_of_variables')
@pytest.mark.parametrize('sample, options', [
    ('embedding', dict()), ('while_loop', dict(reduction='sum', num_towers=3))] + [
        pytest.param(name, dict(), marks=pytest.mark.slow)
        for name in sorted(SAMPLES) if name != 'embedding'])
def test_clones_are_one_device_in_numbers(sample, options):
    model_fn, data, _ = SAMPLES[sample]
    report = towers.check_towers(model_fn, data(12), steps=2, copies='clone', **options)
    assert report.equal, str(report)


@pytest.mark.usefixtures('kind_of_variables')
def test_shards_of_a_size_known_when_the_step_runs():
    x, y = samples.vectors(5)
    with tf.Graph().as_default():
        fed = tf.placeholder_with_default(x, [None, 6]), tf.placeholder_with_default(y, [None, 3])
        built = towers.build_towers(linear, fed, momentum(), 3, 'mean', remainder='weight',
                                    copies='clone')
        session = tf.Session(config=towers.session_config(3))
        ours = samples._train(session, built.loss, built.gradients, built.train_op, 2, {}, built)
    assert_equal_runs(ours, samples.one_device(linear, (x, y), momentum, ours.initial))


def test_each_clone_is_fed_by_its_own_shard():
    built = build('clone', samples.slope, np.arange(6.), optimizer=sgd)
    with graph_of(built).as_default():
        values = run(built, [tower.loss for tower in built.towers],
                     {built.towers[1].inputs: [100., 100.]})
    assert values == [1., 200., 9.]  # mean(2 x)


@pytest.mark.skipif(tf.version.VERSION < '2', reason='control flow v2')
def test_what_the_model_puts_on_a_device_in_a_branch_stays_there():
    """In the function of the branch, where the first tower's device and that look alike."""
    def model_fn(x):
        w = tf.get_variable('w', initializer=2.)

        def branch():
            with tf.device('/cpu:0'):
                pinned = tf.tanh(x * w, name='pinned')
            return tf.reduce_mean(tf.sin(pinned, name='follows'))
        return tf.cond(tf.reduce_sum(x) > 0., branch, lambda: tf.reduce_mean(x * w))
    with samples.switched('control_flow_v2', True), samples.switched('resource_variables', True):
        built = build('clone', model_fn, np.ones(4, np.float32), devices=['/cpu:0', '/cpu:1'],
                      optimizer=sgd)
    library = built.loss.graph.as_graph_def().library.function
    places = {(node.name, node.device) for function in library for node in function.node_def
              if function.signature.name.endswith('__tower_1')
              and node.name in ('pinned', 'follows')}
    assert places == {('pinned', '/device:CPU:0'), ('follows', '/device:CPU:1')}


def test_clones_need_not_be_on_devices_of_one_type():
    built = build('clone', linear, samples.vectors(6), devices=['/gpu:1', '/cpu:0', '/gpu:0'],
                  check_devices=False, variables=towers.VariablePlacement('/cpu:0'))
    for tower in built.towers:
        devices = {op.device for op in graph_walk.step_operations(fetches_of(tower))
                   if op.name.startswith(tower.name_scope)}
        assert devices - {''} <= {tower.device, '/device:CPU:0'} and tower.device in devices


def test_a_job_around_the_towers_and_one_inside():
    def model_fn(x, y):
        w = tf.get_variable('w', [6, 3], x.dtype)
        with tf.device('/job:other'):
            out = tf.matmul(x, w, name='with_job')
        return mean_squared_error(out, y)
    for copies in ('clone', 'reuse'):
        with tf.Graph().as_default() as graph, tf.device('/job:worker/task:1'):
            towers.build_towers(model_fn, samples.vectors(4), sgd(), ['/cpu:1', '/cpu:2'],
                                copies=copies)
            for k, device in enumerate(['/device:CPU:1', '/device:CPU:2']):
                op = graph.get_operation_by_name('tower_%d/with_job' % k)
                assert op.device == '/job:other/task:1' + device


def test_towers_within_a_name_scope():
    with tf.name_scope('train'):
        built = towers.build_towers(slim_net, images(4), sgd(), 2, copies='clone')
    assert built.towers[1].name_scope == 'train/tower_1/'
    inside = [op.name for op in graph_walk.step_operations(fetches_of(built.towers[1]))
              if op.name.startswith('train/tower_1/')]
    assert any('/gradients/train/tower_1/' in name for name in inside)
    shared = {loss.op.name for loss in tf.get_collection(tf.GraphKeys.REGULARIZATION_LOSSES)}
    others = {op.name for op in graph_walk.step_operations(fetches_of(built.towers[1]))}
    assert not any('tower_0' in name for name in others - _ancestors(shared))


def _ancestors(names):
    graph = tf.get_default_graph()
    return {op.name for op in graph_walk.step_operations(
        [graph.get_operation_by_name(name) for name in names])}


def test_collections_hold_what_one_device_leaves():
    built = towers.build_towers(slim_net, images(4), sgd(), 2, copies='clone')
    for key in (tf.GraphKeys.LOSSES, tf.GraphKeys.UPDATE_OPS):
        assert [entry.name.split('/')[0] for entry in tf.get_collection(key)] == (
            ['tower_0'] * len(tf.get_collection(key)))
    assert tf.get_collection(tf.GraphKeys.UPDATE_OPS) == built.towers[0].updates
    assert [update.name.split('/')[0] for update in built.towers[1].updates] == ['tower_1'] * 4


def test_the_model_function_is_called_once():
    calls = []

    def model_fn(x, y):
        calls.append(tf.get_variable_scope().reuse)
        return linear(x, y)
    build('auto', model_fn, samples.vectors, 4)
    assert calls == [False]
    calls.clear()
    build('reuse', model_fn, samples.vectors, 4)
    assert calls == [False, True, True, True]


def test_what_is_not_finite_is_named_by_its_clone():
    def model_fn(x):
        return tf.reduce_mean(x * tf.get_variable('w', [], x.dtype, tf.ones_initializer()))
    built = towers.build_towers(model_fn, np.array([1., 2., np.nan]), sgd(), 3, copies='clone',
                                numerics=towers.Numerics(check_numerics=True))
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        run(built, built.train_op)
    assert 'the loss of tower 2 is NaN in step 7' in str(towers.nonfinite.explained(
        caught.value, 7))


# ---- random numbers ------------------------------------------------------------------------------

def dropout_everywhere(x):
    """Noise by an op, by one with a seed of its own, in a branch and in a loop."""
    w = tf.get_variable('w', [], x.dtype, tf.ones_initializer())
    noise = {'plain': tf.nn.dropout(x, rate=0.5), 'seeded': tf.random_uniform([4], seed=5),
             'branch': tf.cond(tf.reduce_sum(x) > 0, lambda: tf.random_normal([4]),
                               lambda: tf.zeros([4])),
             'loop': tf.while_loop(lambda i, _: i < 3,
                                   lambda i, s: (i + 1, s + tf.random_normal([4])),
                                   [0, tf.zeros([4])],
                                   # Else iterations draw side by side, and which of them drew
                                   # first, so the rounding of the sum, is left to chance.
                                   parallel_iterations=1)[1]}
    return towers.ModelOutput(w * tf.reduce_mean(noise['plain']), predictions=noise)


def noise_of(copies, **options):
    """[towers] of dicts from kind to what each draws in two runs, [2, 4]."""
    built = build(copies, dropout_everywhere, np.ones([12], np.float32), optimizer=sgd, **options)
    with graph_of(built).as_default():
        with tf.Session(config=towers.session_config(3)) as session:
            session.run(tf.global_variables_initializer())
            drawn = [session.run([tower.predictions for tower in built.towers]) for _ in range(2)]
    return [{kind: np.array([each[k][kind] for each in drawn]) for kind in drawn[0][0]}
            for k in range(3)]


@pytest.mark.usefixtures('kind_of_variables')
def test_no_two_clones_draw_the_same_and_builds_agree():
    first, second = noise_of('clone'), noise_of('clone')
    for kind in ('plain', 'seeded', 'branch', 'loop'):
        # Masks of 4 units may agree by chance: over both runs, and only in 'plain'.
        drawn = [tower[kind].tobytes() for tower in first]
        assert len(set(drawn)) == 3, kind
        assert drawn == [tower[kind].tobytes() for tower in second], kind


@pytest.mark.usefixtures('kind_of_variables')
def test_stateless_masks_are_those_of_calls():
    def masks(copies):
        with tf.Graph().as_default():
            tf.set_random_seed(5)
            built = towers.build_towers(
                lambda x: towers.ModelOutput(
                    tf.reduce_mean(tf.nn.dropout(x, rate=0.5)) * tf.get_variable('w', []),
                    predictions=tf.nn.dropout(x, rate=0.5)),
                np.ones([3, 64], np.float32), sgd(), 3, copies=copies, stateless_random=True,
                global_step=tf.train.get_or_create_global_step())
            return run(built, built.predictions)
    cloned = masks('clone')
    assert (cloned == masks('reuse')).all()
    assert len({row.tobytes() for row in cloned}) == 3


# ---- where calls are needed ----------------------------------------------------------------------

def with_a_table(x, y):
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer([0, 1], np.array([1., 2.])), -1.)
    return linear(x, y) * table.lookup(tf.constant(1))


def with_a_queue(x, y):
    queue = tf.FIFOQueue(3, [tf.float64], [[]])
    with tf.control_dependencies([queue.enqueue(1.)]):
        return linear(x, y) * queue.dequeue()


def with_a_placeholder(x, y):
    return linear(x, y) * tf.placeholder_with_default(tf.constant(1., tf.float64), [])


def with_a_python_function(x, y):
    factor = tf.py_func(lambda: 1., [], tf.float64)
    factor.set_shape([])
    return linear(x, y) * factor


def outside_of_its_scope(x, y):
    with tf.name_scope(None):
        factor = tf.constant(1., tf.float64, name='outside')
    return linear(x, y) * factor


def with_a_device_function(x, y):
    with tf.device(lambda op: '/device:CPU:0'):
        factor = tf.constant(1., tf.float64, name='placed')
    return linear(x, y) * factor


def with_the_name_of_a_device(x, y):
    with tf.device(x.op.device):
        factor = tf.constant(1., tf.float64, name='placed')
    return linear(x, y) * factor


def with_a_partitioned_variable(x, y):
    kernel = tf.get_variable('kernel', [6, 3], x.dtype, partitioner=tf.fixed_size_partitioner(2))
    return mean_squared_error(tf.matmul(x, kernel), y)


def with_noise_named_after_a_variable(x, y):
    loss = linear(x, y)
    with tf.name_scope('kernel/'):
        noise = tf.random_uniform([], 1., 2., x.dtype, name='noise')
    return loss * noise


def with_examples_named_after_a_variable(x, y):
    loss = linear(x, y)
    with tf.name_scope('kernel/'):
        factor = tf.reduce_mean(x * x, name='factor')
    return loss * factor


NOT_CLONED = [
    (linear, dict(data=samples.vectors(5), remainder='weight'), 'shards differ in size'),
    # Padded to one size, and still the last one counts nothing.
    (linear, dict(data=samples.vectors(2), remainder='weight'), 'shards differ in size'),
    (with_a_table, {}, r'operation tower_0/\S+ \(\S*HashTable\S*\) keeps state of its own'),
    (with_a_queue, {}, r'operation tower_0/\S+ \(FIFOQueueV2\) keeps state of its own'),
    (with_a_placeholder, {}, r'operation tower_0/\S+ \(PlaceholderWithDefault\) is to be fed'),
    (with_a_python_function, {}, r'operation tower_0/\S+ \(PyFunc\) calls a Python function'),
    (outside_of_its_scope, {}, "operation outside, which the model function made, is outside of "
                               "the tower's name scope"),
    (with_noise_named_after_a_variable, {}, 'operation kernel/noise\\S*, which the model function '
                                            "made, is outside of the tower's name scope"),
    (with_examples_named_after_a_variable, {}, 'operation kernel/factor, which the model function '
                                               "made, is outside of the tower's name scope"),
    (with_a_device_function, {}, 'operation tower_0/placed was put on /device:CPU:0 by a device '
                                 "function, or by the name of an operation's device"),
    (with_the_name_of_a_device, {}, 'operation tower_0/placed was put on /device:CPU:0 by'),
    (with_a_partitioned_variable, {}, r"operation kernel\S*, which the model function made, is "
                                      "outside of the tower's name scope")]


@pytest.mark.parametrize('model_fn, options, reason', NOT_CLONED,
                         ids=[each[0].__name__ for each in NOT_CLONED])
def test_where_it_cannot_clone_it_calls_and_says_why(model_fn, options, reason):
    options = dict(options)
    data = options.pop('data', samples.vectors)
    built = build('auto', model_fn, data, optimizer=sgd, **options)
    text = ' '.join(str(built.plan).split())
    assert re.search('towers 3 calls of the model function: ' + reason, text)
    with pytest.raises(towers.CloneError, match="^copies='clone', but " + reason):
        build('clone', model_fn, data, optimizer=sgd, **options)


def test_nothing_is_left_of_an_attempt_to_clone():
    built, called = [build(copies, with_a_queue, samples.vectors, optimizer=sgd)
                     for copies in ('auto', 'reuse')]
    ours, theirs = [[op.name for op in graph_of(each).get_operations()]
                    for each in (built, called)]
    assert ours == theirs
    with graph_of(built).as_default():
        run(built, built.train_op)


def test_initial_values_that_the_model_reads_are_shared_by_clones():
    """They were made with the variable, random or not, and each call would have been handed them.
    """
    def model_fn(x, y):
        kernel = tf.get_variable('kernel', [6, 3], x.dtype)
        return mean_squared_error(tf.matmul(x, kernel.initial_value + kernel), y)
    built = build('clone', model_fn, samples.vectors, optimizer=sgd)
    assert built.plan.how_built == '1 call of the model function, 2 clones of its graph'


def test_one_tower_has_no_clone():
    built = build('clone', with_a_table, samples.vectors, 1)
    assert built.plan.how_built == '1 call of the model function'
    assert 'model function' not in str(built.plan)


def test_what_a_table_from_around_the_model_function_holds_is_shared():
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(['a', 'b'], [1., 2.]), -1.)
    built = towers.build_towers(
        lambda words: tf.reduce_mean(table.lookup(words) * tf.get_variable(
            'w', [], initializer=tf.ones_initializer())),
        tf.constant(['a', 'b', 'b', 'c']), sgd(), 2, copies='clone')
    assert run(built, [tower.loss for tower in built.towers]) == [1.5, 0.5]


def test_python_functions_that_are_pure_are_cloned():
    def model_fn(x):
        doubled = tf.py_func(lambda each: 2. * each, [x], tf.float64, stateful=False)
        doubled.set_shape(x.shape)
        return tf.reduce_mean(doubled) * tf.get_variable('w', [], tf.float64, tf.ones_initializer())
    built = towers.build_towers(model_fn, np.arange(6.), sgd(), ['/cpu:0', '/cpu:1', '/cpu:2'],
                                copies='clone')
    assert run(built, [tower.loss for tower in built.towers]) == [1., 5., 9.]


# ---- the networks --------------------------------------------------------------------------------

# Of the inceptions, the resnets and the VGGs one stands for all: the others have more of the same
# layers, and tests/models builds each.
@pytest.mark.parametrize('name', ['digits'] + [
    pytest.param(name, marks=pytest.mark.slow) for name in (
        'alexnet_v2', 'vgg_a', 'inception_resnet_v2', 'inception_v3', 'resnet_v2_50')])
def test_networks(name, monkeypatch):
    fewer_blocks(monkeypatch)
    network = registry.get_network(name)
    side = network.image_sizes[0]
    if name == 'digits':
        side = network.default_image_size

    def model_fn(x, y):
        logits, end_points = network.build(x, 10, is_training=True, weight_decay=4e-5)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y,
                                                                             logits=logits))
        if 'AuxLogits' in end_points:
            loss += 0.4 * tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(
                labels=y, logits=end_points['AuxLogits']))
        return loss
    batch = np.zeros([4, side, side, network.default_channels], np.float32), np.zeros([4], np.int32)
    cloned, called = [build(copies, model_fn, batch, 2, sgd) for copies in ('clone', 'reuse')]
    ours, theirs = [
        {op.name: described(op) for op in graph_walk.step_operations(
            fetches_of(built.towers[1])) if op.name.startswith('tower_1/')}
        for built in (cloned, called)]
    assert sorted(ours) == sorted(theirs)
    assert [name for name in ours if ours[name] != theirs[name]] == []
    assert len(ours) > {'inception_resnet_v2': 2000, 'resnet_v2_50': 700}.get(name, 100)


@pytest.mark.parametrize('index', [0, 1])
def test_an_assertion_of_a_clone_names_the_clones_tensor(index):
    def model_fn(x):
        h = tf.identity(x, name='h')
        with tf.control_dependencies([tf.debugging.assert_positive(h)]):
            return tf.reduce_mean(h * tf.get_variable('w', [], initializer=tf.ones_initializer()))
    batch = np.ones([4], np.float32)
    batch[2 * index] = -1.
    # In control flow v2 the text is in a function, which the towers share: it names the first one.
    with samples.switched('control_flow_v2', False):
        built = towers.build_towers(model_fn, batch, tf.train.GradientDescentOptimizer(0.1), 2,
                                    copies='clone')
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run(tf.global_variables_initializer())
        with pytest.raises(tf.errors.InvalidArgumentError) as caught:
            session.run(built.train_op)
    said = str(caught.value).split('\n\nOriginal stack')[0]
    assert 'tower_%d/h:0' % index in said and 'tower_%d/h:0' % (1 - index) not in said
