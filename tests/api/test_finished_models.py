"""A finished model: `build_towers` takes its loss in the place of a model function."""

import sys

import numpy as np
import pytest
import sample_models as samples
import tensorflow.compat.v1 as tf

import towers
from finished_programs import check_equal, dense, mean_square, placeholders, plain_step
from towers.graph import graph_walk
from sample_models import SAMPLES, momentum, sgd, slowly, switched
from case_marks import first_fast

slow = pytest.mark.slow


@slow
@pytest.mark.parametrize('name', list(SAMPLES))
def test_samples(name):
    sample = SAMPLES[name]
    check_equal(sample.model_fn, sample.data(7), 3, remainder='weight', tolerance=1e-6)


# ---- what a graph may hold -----------------------------------------------------------------------

X, Y = samples.vectors(7)


def branch_on_a_feed(x, y):
    """`is_training` without a shape, and a `keep_prob`."""
    is_training = tf.placeholder(tf.bool, name='is_training')
    scale = tf.placeholder(tf.float64, name='scale')
    h = tf.tanh(dense(x, 4, 'a'))
    extra = tf.get_variable('extra', [4], tf.float64, tf.ones_initializer())
    h = tf.cond(is_training, lambda: h * extra * scale, lambda: h)
    h.set_shape([None, 4])
    return mean_square(dense(h, 3, 'b'), y)


def feed_of_branch():
    graph = tf.get_default_graph()
    return {graph.get_tensor_by_name('is_training:0'): True,
            graph.get_tensor_by_name('scale:0'): 1.5}


def nested_control_flow(x, y):
    """A loop with a branch in it, in a branch of a loop's result; a loop variable is not used."""
    kernel = tf.get_variable('kernel', [6, 6], tf.float64)
    inner = tf.get_variable('inner', [6, 6], tf.float64)

    def step(i, unused_sum, state):
        state = tf.cond(tf.equal(i % 2, 0), lambda: tf.tanh(tf.matmul(state, kernel)),
                        lambda: tf.while_loop(
                            lambda j, _: j < 2, lambda j, s: (j + 1, s + tf.matmul(s, inner)),
                            (0, state))[1])
        return i + 1, unused_sum + tf.reduce_sum(x), state
    zero = tf.zeros([], tf.float64)
    state = tf.cond(tf.reduce_sum(kernel) < 1e9, lambda: tf.while_loop(
        lambda i, *_: i < 3, step, (0, zero, x))[2], lambda: x)
    return mean_square(dense(state, 3, 'b'), y)


def two_rnns(x, y):
    """`scan` and `map_fn`, with arrays of tensors."""
    kernel = tf.get_variable('kernel', [6, 6], tf.float64)
    states = tf.scan(lambda state, _: tf.tanh(tf.matmul(state, kernel)), tf.range(3), x)
    rows = tf.map_fn(lambda row: row * 2. + tf.reduce_sum(kernel), states[-1])
    return mean_square(dense(rows, 3, 'b'), y)


def custom_gradient(x, y):
    """The gradient is a closure over tensors of the program."""
    h = dense(x, 4, 'a')
    factor = tf.exp(tf.reduce_mean(x, 1, keepdims=True))

    @tf.custom_gradient
    def scaled(value):
        def gradient(upstream):
            with tf.control_dependencies([factor]):
                return upstream * factor * tf.tanh(value)
        return value * factor, gradient
    return mean_square(dense(scaled(h), 3, 'b'), y)


def gradient_penalty(x, y):
    """The loss has gradients in it."""
    h = tf.tanh(dense(x, 4, 'a'))
    value = dense(h, 3, 'b')
    gradient, = tf.gradients(value, x)
    return mean_square(value, y) + .001 * tf.reduce_mean(
        tf.square(tf.reduce_sum(tf.square(gradient), 1) - 1.))


def python_function(x, y):
    rows = tf.py_func(lambda rows: rows * 2., [x], tf.float64)
    rows.set_shape(x.shape)
    return mean_square(dense(rows, 3, 'a'), y)


def look_up(x, y):
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(
        tf.constant([0, 1, 2], tf.int64), tf.constant([1., 2., 3.], tf.float64)), 0.)
    keys = tf.cast(tf.abs(x[:, 0]) * 2, tf.int64)
    return mean_square(dense(x, 3, 'a') * table.lookup(keys)[:, None], y)


def traced_function(x, y):
    weights = tf.get_variable('a', [x.shape[-1], 3], tf.float64, use_resource=True)
    return mean_square(tf.function(lambda rows: tf.tanh(tf.matmul(rows, weights)))(x), y)


KINDS = {'branch': (branch_on_a_feed, feed_of_branch)}
KINDS.update((each.__name__, (each, None)) for each in [
    nested_control_flow, two_rnns, custom_gradient, gradient_penalty, python_function, look_up,
    traced_function])


LONG = ('nested_control_flow', 'two_rnns', 'branch', 'gradient_penalty', 'custom_gradient',
        'python_function', 'traced_function')


@slow
@pytest.mark.parametrize('name, variables', [
    (name, variables) for name in KINDS for variables in ('resource', 'reference')
    # In a loop, TF 1.15 cannot differentiate a branch that reads a resource variable.
    if (name, variables) != ('nested_control_flow', 'resource') or tf.version.VERSION > '2'])
def test_kinds_of_operations(name, variables):
    make_loss, feed = KINDS[name]
    with switched('resource_variables', variables == 'resource'), switched('control_flow_v2', False):
        check_equal(make_loss, (X, Y), 3, remainder='weight', feed=feed)


@pytest.mark.slow
@pytest.mark.skipif(tf.version.VERSION < '2', reason='TF 1.15 fails without towers, too')
@pytest.mark.parametrize('name', ['branch', 'custom_gradient'] + [
    pytest.param(name, marks=slow) for name in LONG])
def test_control_flow_v2(name):
    make_loss, feed = KINDS[name]
    with switched('resource_variables', True), switched('control_flow_v2', True):
        check_equal(make_loss, (X, Y), 3, remainder='weight', feed=feed)


# ---- updates and registered losses ---------------------------------------------------------------

def batch_norm(x, y, wait=False):
    """Moving averages in `UPDATE_OPS`, for which the loss waits or not; and a count of steps."""
    h = dense(x, 4, 'a')
    mean, variance = tf.nn.moments(h, [0])
    zeros = dict(dtype=tf.float64, initializer=tf.zeros_initializer(), trainable=False)
    moving = [tf.get_variable(name, [4], **zeros) for name in ('mean', 'variance')]
    updates = [tf.assign_sub(variable, .1 * (variable - value))
               for variable, value in zip(moving, (mean, variance))]
    updates.append(tf.assign_add(tf.get_variable('count', [], **zeros), 1.))
    for update in updates:
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
    h = tf.nn.batch_normalization(h, mean, variance, None, None, 1e-3)
    with tf.control_dependencies(updates if wait else []):
        return mean_square(dense(tf.tanh(h), 3, 'b'), y)


@pytest.mark.slow
@pytest.mark.parametrize('wait', [False, True], ids=['in the collection', 'in the forward pass'])
@pytest.mark.parametrize('variables', ['resource', 'reference'])
def test_updates_run_once_and_batch_norm_in_sync_equals_one_device(variables, wait):
    with switched('resource_variables', variables == 'resource'), switched('control_flow_v2', False):
        built = check_equal(lambda x, y: batch_norm(x, y, wait), (X, Y), 3, remainder='weight',
                            batch_norm='sync')
    assert '1 in sync' in built.plan.line('batch norm')
    steps = {op.name for op in samples.step_operations([built.train_op])}
    of_program = {op.name for op in built.train_op.graph.get_operations() if '/' not in op.name}
    assert not any(name.startswith(('MatMul', 'moments')) for name in steps & of_program)


@pytest.mark.parametrize('use_resource, num_towers, update_ops', first_fast(1, [
    (False, 2, 'first'), (True, 2, 'first'), (True, 1, 'first'), (True, 1, 'all')]))
def test_an_update_of_what_the_model_reads_comes_after_all_towers_reads(
        use_resource, num_towers, update_ops):
    """A count of steps by which the loss is divided; it depends on no input."""
    x = tf.placeholder(tf.float64, [None, 6])
    step = tf.get_variable('step', [], tf.float64, tf.ones_initializer(), trainable=False,
                           use_resource=use_resource)
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign_add(step, 1.))
    one = tf.reduce_mean(dense(slowly(x), 3, 'a') ** 0.)
    with tf.control_dependencies([one]):
        loss = one / (step + 0.)
    built = towers.build_towers(loss, x, samples.sgd(), num_towers, 'mean', remainder='weight',
                                update_ops=update_ops)
    with tf.Session(config=towers.session_config(2)) as session:
        session.run(tf.global_variables_initializer())
        assert [session.run([built.loss, built.train_op], {x: X})[0] for _ in range(3)] == [
            1., 1. / 2., 1. / 3.]


def registers(x, y):
    """An L2 loss and a loss of activations, which are in the loss or not."""
    h = tf.tanh(dense(x, 4, 'a'))
    tf.add_to_collection(tf.GraphKeys.REGULARIZATION_LOSSES, tf.reduce_mean(tf.square(h)))
    tf.get_variable('b', [4, 3], tf.float64,
                    regularizer=lambda kernel: .1 * tf.reduce_sum(tf.square(kernel)))
    with tf.variable_scope(tf.get_variable_scope(), reuse=True):
        return mean_square(dense(h, 3, 'b'), y)


@pytest.mark.slow
@pytest.mark.parametrize('adds', [True, False], ids=['by the model', 'by the build'])
@pytest.mark.parametrize('variables', ['resource', 'reference'])
def test_registered_losses_count_once(variables, adds):
    def total(x, y):
        return registers(x, y) + (tf.losses.get_regularization_loss() if adds else 0.)

    with switched('resource_variables', variables == 'resource'):
        with tf.Graph().as_default():
            inputs = placeholders((X, Y))
            built = towers.build_towers(total(*inputs), inputs, momentum(), 2, 'mean',
                                        regularization='add', remainder='weight')
            ours = one_step(built.loss, built.gradients, inputs)
        with tf.Graph().as_default():
            inputs = placeholders((X, Y))
            loss = registers(*inputs) + tf.losses.get_regularization_loss()
            pairs = momentum().compute_gradients(loss)
            theirs = one_step(loss, pairs, inputs)
    for mine, expected in zip(ours, theirs):
        np.testing.assert_allclose(mine, expected, rtol=1e-12)


def one_step(loss, pairs, inputs, arrays=(X, Y)):
    """[loss, gradient of each variable by name], all variables 0.1, 0.2, …"""
    with tf.Session(config=towers.session_config(4)) as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        for variable in tf.trainable_variables():
            size = variable.shape.num_elements()
            variable.load(np.arange(1., size + 1).reshape(variable.shape) / 10, session)
        by_name = sorted(pairs, key=lambda pair: pair[1].op.name)
        return session.run([loss] + [tf.convert_to_tensor(gradient) for gradient, _ in by_name],
                           dict(zip(inputs, arrays)))


@pytest.mark.slow
def test_the_plan_names_writes_that_no_step_runs():
    """A count of the batch's values is in no collection; metrics and slots are known."""
    x, y = placeholders((X, Y))
    loss = samples.linear(x, y)
    seen = tf.get_variable('seen', [], tf.float64, tf.zeros_initializer(), trainable=False)
    update = tf.assign_add(seen, tf.reduce_sum(x), name='count_up')
    tf.metrics.mean(y, name='metric')
    tf.train.AdamOptimizer().minimize(loss)
    first = towers.build_towers(loss, (x, y), sgd(), 2, 'mean', remainder='weight')
    writes = [op.name for op in seen.op.graph.get_operations()
              if op.name in ('count_up', 'AssignAddVariableOp')]
    assert first.plan.line('not run').startswith(writes[0] + ': what depends on the batch is')
    second = towers.build_towers(towers.ModelOutput(loss, updates=[update]), (x, y), sgd(), 2,
                                 'mean', remainder='weight')
    assert second.plan.line('not run') is None


def test_updates_of_a_functional_keras_model_are_found():
    """Its batch norms have moving averages, which are in no collection."""
    keras = pytest.importorskip('tf_keras' if tf.version.VERSION > '2' else 'tensorflow.keras')
    results = []
    for on_towers in (True, False):
        with tf.Graph().as_default():
            entry, target = keras.Input([6]), tf.placeholder(tf.float32, [None, 3])
            keras.backend.set_learning_phase(1)
            h = keras.layers.Dense(4, kernel_initializer='ones')(entry)
            h = keras.layers.BatchNormalization(momentum=.9)(h)
            output = keras.layers.Dense(3, kernel_initializer='ones')(h)
            model = keras.Model(entry, output)
            loss = mean_square(model.outputs[0], target)
            x = model.inputs[0]
            if on_towers:
                built = towers.build_towers(loss, (x, target), sgd(), 3, 'mean', remainder='weight',
                                            batch_norm='sync')
                train_op = built.train_op
            else:
                pairs = sgd().compute_gradients(loss, model.trainable_weights)
                with tf.control_dependencies([each for each, _ in pairs] + list(model.updates)):
                    train_op = sgd().apply_gradients(pairs)
            variables = {each.op.name: each for each in model.weights}
            with tf.Session(config=towers.session_config(4)) as session:
                session.run(tf.global_variables_initializer())
                for _ in range(3):
                    session.run(train_op, {x: X, target: Y})
                results.append(session.run(variables))
    keras.backend.set_learning_phase(0)
    ours, theirs = results
    assert sum('moving' in name for name in theirs) == 2
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


def cosines(shape, dtype=None):
    return tf.cos(tf.reshape(tf.range(float(np.prod(shape))), shape))


def keras_3_program(x, y):
    """`(loss, {name: variable}, the writes of its layers)`; one layer is called on no input, too,
    and one is frozen."""
    layers = tf.keras.layers
    norm, frozen = layers.BatchNormalization(momentum=.9), layers.BatchNormalization()
    frozen.trainable = False
    network = [layers.Dense(4, kernel_initializer=cosines), norm, frozen,
               layers.Dense(3, kernel_initializer=cosines)]
    norm(tf.ones([5, 4]), training=True)
    h = tf.cast(x, tf.float32)
    for layer in network:
        h = layer(h, training=True) if 'norm' in layer.name else layer(h)
    loss = mean_square(h, tf.cast(y, tf.float32))
    variables = [variable.value for layer in network for variable in layer.variables]
    writes = [op for op in x.graph.get_operations() if op.type == 'AssignVariableOp'
              and x.op.name in graph_walk.ancestors(op.inputs)]
    return loss, {each.op.name: each for each in variables}, writes


@pytest.mark.slow
@pytest.mark.skipif(tf.version.VERSION < '2.16', reason='about Keras 3')
def test_updates_of_keras_3_layers_are_found():
    """They are in no collection, and Keras keeps no list of them."""
    if not issubclass(tf.keras.layers.Layer, getattr(
            sys.modules.get('keras.src.layers.layer'), 'Layer', ())):
        pytest.skip('tf.keras is not Keras 3')
    results = []
    for on_towers in (True, False):
        with tf.Graph().as_default():
            inputs = placeholders((X, Y))
            loss, variables, writes = keras_3_program(*inputs)
            assert len(writes) == 2
            if on_towers:
                train_op = towers.build_towers(loss, inputs, sgd(), 3, 'mean', batch_norm='sync',
                                               remainder='weight').train_op
            else:
                pairs = sgd().compute_gradients(loss)
                with tf.control_dependencies([each for each, _ in pairs if each is not None]):
                    train_op = tf.group(sgd().apply_gradients(pairs), *writes)
            with tf.Session(config=towers.session_config(3)) as session:
                session.run(tf.global_variables_initializer())
                for _ in range(3):
                    session.run(train_op, dict(zip(inputs, (X, Y))))
                results.append(session.run(list(variables.values())))
    for mine, expected in zip(*results):
        np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=1e-5)


def with_values_of_the_batch(x, y):
    """A sum over the batch, a quotient of two sums, a mean's square and rows of all examples."""
    h = tf.tanh(dense(x, 3, 'a'))
    counts = tf.cast(y > 0., tf.float64)
    weighted = towers.batch_sum(tf.reduce_sum(counts * tf.square(h - y))) / (
        towers.batch_sum(tf.reduce_sum(counts)))
    center = towers.batch_mean(tf.reduce_mean(h, 0))
    all_rows = towers.batch_concat(h)
    similar = tf.nn.softmax(tf.matmul(h, all_rows, transpose_b=True))
    kernel = tf.trainable_variables()[0]
    return weighted + tf.reduce_mean(tf.reduce_max(similar, 1)) + tf.reduce_mean(
        tf.square(h - center)) + towers.batch_sum(tf.reduce_sum(h)) + tf.nn.l2_loss(kernel)


@pytest.mark.slow
@pytest.mark.parametrize('num_towers', [1, 3])
def test_values_of_the_whole_batch(num_towers):
    """The program is built before the towers, and its marks are kept."""
    check_equal(with_values_of_the_batch, (X, Y), num_towers, remainder='weight')


def in_a_loop(x, y):
    return tf.reduce_mean(y) * tf.while_loop(lambda i, _: i < 2, lambda i, total: (
        i + 1, total + towers.batch_sum(tf.reduce_sum(x) + total)), (0, tf.zeros([], x.dtype)))[1]


@pytest.mark.parametrize('make_loss, options, text', [
    (with_values_of_the_batch, dict(memory=towers.Memory(accumulate=2)), 'micro-batches'),
    (in_a_loop, {}, 'is in a loop')])
def test_values_of_the_whole_batch_are_refused_where_towers_cannot_meet(make_loss, options, text):
    inputs = placeholders((X, Y))
    with switched('control_flow_v2', False):
        loss = make_loss(*inputs)
    with pytest.raises(towers.ModelFunctionError, match=text):
        towers.build_towers(loss, inputs, sgd(), 2, 'mean', remainder='weight', **options)


# ---- several losses ------------------------------------------------------------------------------

def gan(real, noise):
    def discriminate(x):
        with tf.variable_scope('discriminator', reuse=tf.AUTO_REUSE):
            return dense(tf.tanh(dense(x, 4, 'a')), 1, 'b')
    with tf.variable_scope('generator'):
        fake = dense(noise, 6, 'c')
    on_real, on_fake = discriminate(real), discriminate(fake)
    return {'discriminator': tf.reduce_mean(tf.nn.softplus(on_fake) + tf.nn.softplus(-on_real)),
            'generator': tf.reduce_mean(tf.nn.softplus(-on_fake))}


def scope_of(name):
    return lambda variables: [each for each in variables if each.op.name.startswith(name)]


@pytest.mark.slow
def test_several_losses():
    results = []
    for on_towers in (True, False):
        with tf.Graph().as_default():
            inputs = placeholders((X, Y))
            losses = gan(*inputs)
            optimizers = {name: momentum() for name in losses}
            if on_towers:
                built = towers.build_towers(losses, inputs, {
                    name: towers.Objective(optimizer, var_list=scope_of(name))
                    for name, optimizer in optimizers.items()}, 3, 'mean', remainder='weight')
                steps = built.train_ops
            else:
                steps = {name: optimizer.minimize(
                    losses[name], var_list=scope_of(name)(tf.trainable_variables()))
                         for name, optimizer in optimizers.items()}
            with tf.Session(config=towers.session_config(4)) as session:
                session.run(tf.global_variables_initializer())
                for variable in tf.trainable_variables():
                    size = variable.shape.num_elements()
                    variable.load(np.arange(1., size + 1).reshape(variable.shape) / 10, session)
                for _ in range(3):
                    for name in ('discriminator', 'generator'):
                        session.run(steps[name], dict(zip(inputs, (X, Y))))
                results.append(session.run({each.op.name: each for each in tf.global_variables()}))
    ours, theirs = results
    assert sorted(ours) == sorted(theirs)
    for name in theirs:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-11)


# ---- where the batch comes from ------------------------------------------------------------------

def test_results_of_an_iterator():
    """One draw a step, for all towers; the iterator gives a number, too, which is shared."""
    dataset = tf.data.Dataset.from_tensor_slices((X[:6], Y[:6])).batch(3).repeat()
    x, y = tf.data.make_one_shot_iterator(dataset).get_next()
    loss = samples.linear(x, y)
    built = towers.build_towers(loss, {'x': x, 'y': y}, sgd(), 3, 'mean')
    with tf.Session(config=towers.session_config(3)) as session:
        session.run(tf.global_variables_initializer())
        kernel = session.run(tf.trainable_variables()[0])
        for start in (0, 3, 0):
            expected = np.mean((X[start:start + 3] @ kernel - Y[start:start + 3]) ** 2)
            value, _ = session.run([built.loss, built.train_op])
            np.testing.assert_allclose(value, expected, rtol=1e-12)
            kernel = session.run(tf.trainable_variables()[0])


@pytest.mark.slow
def test_batches_of_a_queue():
    """Queue runners fill it; a step takes one batch, which the towers share out."""
    one, two = tf.train.slice_input_producer([tf.constant(X[:6]), tf.constant(Y[:6])],
                                             shuffle=False)
    x, y = tf.train.batch([one, two], 3, allow_smaller_final_batch=True)
    loss = samples.linear(x, y)
    built = towers.build_towers(loss, (x, y), sgd(), 3, 'mean')
    with tf.Session(config=towers.session_config(3)) as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        kernel = session.run(tf.trainable_variables()[0])
        coordinator = tf.train.Coordinator()
        threads = tf.train.start_queue_runners(session, coordinator)
        for start in (0, 3, 0):
            expected = np.mean((X[start:start + 3] @ kernel - Y[start:start + 3]) ** 2)
            value, _ = session.run([built.loss, built.train_op])
            np.testing.assert_allclose(value, expected, rtol=1e-12)
            kernel = session.run(tf.trainable_variables()[0])
        coordinator.request_stop()
        coordinator.join(threads, stop_grace_period_secs=5)


def test_sparse_placeholder():
    ids, y = tf.sparse_placeholder(tf.int64, [None, 4]), tf.placeholder(tf.float64, [None, 3])
    table = tf.get_variable('table', [7, 3], tf.float64)
    rows = tf.nn.embedding_lookup_sparse(table, ids, None, combiner='mean')
    loss = mean_square(rows, y)
    built = towers.build_towers(loss, (ids, y), sgd(), 2, 'mean')
    rows = np.array([[0, 1], [1, 3], [2, 0], [3, 2]])
    value = tf.SparseTensorValue(rows, np.array([1, 2, 3, 1]), [4, 4])
    with tf.Session(config=towers.session_config(2)) as session:
        session.run(tf.global_variables_initializer())
        ours, theirs = session.run([built.loss, loss], {ids: value, y: Y[:4]})
    np.testing.assert_allclose(ours, theirs, rtol=1e-12)


@pytest.mark.slow
def test_two_builds_of_one_model_and_an_evaluation():
    """The second build leaves the copies of the first alone; updates run once a step."""
    inputs = placeholders((X, Y))
    loss = batch_norm(*inputs)
    first = towers.build_towers(loss, inputs, sgd(), 2, 'mean', remainder='weight')
    second = towers.build_towers(loss, inputs, None, 3, 'mean', remainder='weight', reuse=first)
    assert len(first.towers[0].updates) == 2 and len(second.towers[0].updates) == 2
    with tf.Session(config=towers.session_config(3)) as session:
        session.run(tf.global_variables_initializer())
        session.run([second.loss, first.train_op], dict(zip(inputs, (X, Y))))
        count, = [each for each in tf.global_variables() if each.op.name == 'count']
        assert session.run(count) == 1.


# ---- options -------------------------------------------------------------------------------------

OPTIONS = {
    'accumulate': dict(memory=towers.Memory(accumulate=2)),
    'replicated': dict(variables=towers.VariablePlacement('replicated')),
    'recompute': dict(memory=towers.Memory(recompute=['Tanh'])),
    'check_numerics': dict(numerics=towers.Numerics(check_numerics=True))}


def layers(x, y):
    h = x
    for number in range(4):
        h = tf.tanh(dense(h, 6, 'layer_%d' % number))
    return mean_square(dense(h, 3, 'last'), y)


@slow
@pytest.mark.parametrize('name, variables', [
    (name, variables) for name in OPTIONS for variables in ('resource', 'reference')
    if (name, variables) != ('recompute', 'resource')])
def test_options(name, variables):
    with switched('resource_variables', variables == 'resource'):
        check_equal(layers, (X, Y), 2, remainder='weight', **OPTIONS[name])


@pytest.mark.slow
def test_stages_by_the_device_scopes_of_the_program():
    def staged(x, y):
        with tf.device('/cpu:0'):
            h = tf.tanh(dense(x, 4, 'a'))
        with tf.device('/cpu:1'):
            return mean_square(dense(h, 3, 'b'), y)
    built = check_equal(staged, (X[:4], Y[:4]), [['/cpu:0', '/cpu:1'], ['/cpu:2', '/cpu:3']])
    graph = built.train_op.graph
    devices = {op.device for op in graph.get_operations()
               if op.name.startswith('tower_1/') and op.type == 'MatMul'}
    assert devices == {'/device:CPU:2', '/device:CPU:3'}


# ---- what the program fetches, and where the batch enters ----------------------------------------

@pytest.mark.slow
def test_of_gives_the_values_of_the_batch():
    x, y = placeholders((X, Y))
    rate, keep = tf.constant(.1), tf.placeholder(tf.float64, [], 'keep')
    logits = dense(x, 3, 'kernel') * keep
    accuracy = tf.reduce_mean(tf.cast(logits[:, 0] > y[:, 0], tf.float32))
    loss = mean_square(logits, y)
    built = towers.build_towers(
        towers.ModelOutput(loss, {'logits': logits}, {'accuracy': accuracy}), (x, y), sgd(), 3,
        'mean', remainder='weight')
    tensors = [loss, logits, accuracy]
    of_batch = [built.of(tensor) for tensor in tensors]
    names = {op.name for op in samples.step_operations(of_batch + [built.train_op])}
    assert names.isdisjoint(tensor.op.name for tensor in tensors)
    with tf.Session(config=towers.session_config(3)) as session:
        session.run(tf.global_variables_initializer())
        for ours, theirs in session.run(list(zip(of_batch, tensors)), {x: X, y: Y, keep: .5}):
            np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    assert built.of(rate) is rate
    assert built.plan.line('fed to all') == 'keep: the same for all examples'
    assert loss.name in built.plan.line('to fetch')


def critic(x, action, y):
    with tf.variable_scope('critic', reuse=tf.AUTO_REUSE):
        return mean_square(dense(tf.tanh(dense(x, 4, 'a') + dense(action, 4, 'b')), 3, 'c'), y)


@slow
@pytest.mark.parametrize('is_fed', [True, False])
def test_an_input_that_is_computed_from_another_one(is_fed):
    """An actor's action, which some steps are fed; its gradient is one device's, if they are not."""
    x, y = placeholders((X, Y))
    action = dense(x, 2, 'actor')
    loss = critic(x, action, y)
    expected = tf.gradients(loss, tf.trainable_variables())
    built = towers.build_towers(loss, (x, action, y), sgd(), 2, 'mean', remainder='weight')
    assert built.plan.line('computed whole').startswith(action.name)
    by_name = {variable.op.name: gradient for gradient, variable in built.gradients}
    feed = {x: X, y: Y}
    if is_fed:
        feed[action] = X[:, :2] + 1.
    with tf.Session(config=towers.session_config(2)) as session:
        session.run(tf.global_variables_initializer())
        for variable, gradient in zip(tf.trainable_variables(), expected):
            if is_fed and variable.op.name == 'actor':
                continue
            ours, theirs = session.run([by_name[variable.op.name], gradient], feed)
            np.testing.assert_allclose(ours, theirs, rtol=1e-11, atol=1e-14)


def test_of_is_for_finished_models():
    built = towers.build_towers(samples.linear, (X[:4], Y[:4]), sgd(), 2)
    with pytest.raises(towers.InvalidArgumentError, match='has called a model function'):
        built.of(built.loss)


def test_a_model_for_the_size_of_a_part():
    """The model has constants of its size, 2; the batch has 3 times as many examples."""
    x, y = tf.placeholder(tf.float64, [2, 6]), tf.placeholder(tf.float64, [2, 3])
    h = tf.reshape(dense(x, 3, 'kernel'), [2, 3]) + tf.zeros([2, 3], tf.float64)
    loss = tf.reduce_sum(tf.square(h - y)) / 6.
    batch = tf.placeholder(tf.float64, [6, 6]), tf.placeholder(tf.float64, [6, 3])
    built = towers.build_towers(loss, dict(zip((x, y), batch)), sgd(), 3, 'mean')
    with tf.Session(config=towers.session_config(3)) as session:
        session.run(tf.global_variables_initializer())
        ours = session.run(built.loss, dict(zip(batch, (X[:6], Y[:6]))))
        kernel = session.run(tf.trainable_variables()[0])
    np.testing.assert_allclose(ours, np.mean((X[:6] @ kernel - Y[:6]) ** 2), rtol=1e-12)


def test_a_loss_of_a_static_batch_that_leaves_a_loop():
    """An import of a loop does not know the shapes of its results."""
    with switched('control_flow_v2', False):
        x = tf.placeholder(tf.float64, [2, 6])
        loss = tf.reduce_mean(tf.square(dense(x, 3, 'kernel')))
        _, halved = tf.while_loop(lambda i, _: i < 3, lambda i, value: (i + 1, value / 2.),
                                  (0, loss))
    batch = tf.placeholder(tf.float64, [6, 6])
    built = towers.build_towers(halved, {x: batch}, sgd(), 3, 'mean')
    assert built.plan.line('one device').startswith('proven, if no constant of the model was comp')
    with tf.Session(config=towers.session_config(3)) as session:
        session.run(tf.global_variables_initializer())
        ours, kernel = session.run([built.loss, tf.trainable_variables()[0]], {batch: X[:6]})
    np.testing.assert_allclose(ours, np.mean((X[:6] @ kernel) ** 2) / 8., rtol=1e-12)


def deconvolution(z, size):
    """A transposed convolution, of which the static batch size is in the output's shape, with a
    moving average of its mean: as in the generator of a GAN."""
    h = tf.reshape(dense(z, 8, 'project'), [-1, 2, 2, 2])
    kernel = tf.get_variable('deconv', [3, 3, 2, 2], tf.float64)
    h = tf.nn.conv2d_transpose(h, kernel, [size, 4, 4, 2], [1, 2, 2, 1])
    mean = tf.reduce_mean(h, [0, 1, 2])
    moving = tf.get_variable('moving', [2], tf.float64, tf.zeros_initializer(), trainable=False)
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign_sub(moving, .1 * (moving - mean)))
    return h, tf.reduce_mean(tf.square(h))


def test_a_static_size_in_a_transposed_convolution():
    z, batch = tf.placeholder(tf.float64, [None, 6]), tf.placeholder(tf.float64, [6, 6])
    image, loss = deconvolution(z, 3)
    built = towers.build_towers(towers.ModelOutput(loss, predictions=image), {z: batch}, sgd(), 2,
                                'mean')
    with tf.variable_scope(tf.get_variable_scope(), reuse=True):
        whole, expected = deconvolution(batch, 6)
    with tf.Session(config=towers.session_config(2)) as session:
        session.run(tf.global_variables_initializer())
        ours, theirs = session.run([[built.predictions, built.loss], [whole, expected]],
                                   {batch: X[:6]})
        session.run(built.train_op, {batch: X[:6]})
        moving, = [each for each in tf.global_variables() if each.op.name == 'moving']
        assert session.run(moving).any()
    for mine, other in zip(ours, theirs):
        np.testing.assert_allclose(mine, other, rtol=1e-12)


@pytest.mark.slow
def test_a_model_from_a_meta_graph_file(tmpdir):
    """The program's source is not needed: names of its tensors are enough."""
    path = str(tmpdir.join('model'))
    with tf.Graph().as_default(), switched('control_flow_v2', False):
        inputs = placeholders((X, Y))
        loss = nested_branch(*inputs)
        names = [tensor.name for tensor in inputs + (loss,)]
        expected = plain_step(loss)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            tf.train.Saver().save(session, path)
            session.run(expected, dict(zip(inputs, (X, Y))))
            expected = session.run({each.op.name: each for each in tf.trainable_variables()})
    with tf.Graph().as_default() as graph:
        saver = tf.train.import_meta_graph(path + '.meta')
        x, y, loss = map(graph.get_tensor_by_name, names)
        optimizer = tf.train.MomentumOptimizer(.1, .9, name='Other')  # the file has slots, too
        built = towers.build_towers(loss, (x, y), optimizer, 3, 'mean', remainder='weight')
        with tf.Session(config=towers.session_config(3)) as session:
            session.run(tf.global_variables_initializer())
            saver.restore(session, path)
            session.run(built.train_op, {x: X, y: Y})
            ours = session.run({each.op.name: each for each in tf.trainable_variables()})
    for name, value in expected.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-11)


def nested_branch(x, y):
    extra = tf.get_variable('extra', [6], tf.float64, tf.ones_initializer())
    x = tf.cond(tf.reduce_sum(extra) > 0, lambda: x * extra, lambda: x)
    return mean_square(dense(x, 3, 'b'), y)


# ---- refusals ------------------------------------------------------------------------------------

def finished(**changes):
    """The arguments of a build that is right, with some others: `x`, `y` are its placeholders."""
    x, y = placeholders((X, Y))
    loss = samples.linear(x, y)
    given = dict(model=loss, inputs=(x, y), optimizer=sgd(), devices=2, reduction='mean')
    given.update({name: change(x, y, loss) for name, change in changes.items()})
    return given


def waits_for_training(x, y, loss):
    with tf.control_dependencies([sgd().minimize(loss)]):
        return tf.identity(loss)


def with_a_dequeue(x, y, loss):
    queue = tf.FIFOQueue(3, [tf.float64], [[]])
    return loss * queue.dequeue()


def with_an_enqueue(x, y, loss):
    queue = tf.FIFOQueue(3, [tf.float64])
    with tf.control_dependencies([queue.enqueue(x)]):
        return tf.identity(loss)


def of_a_static_batch(x, y, loss):
    x, y = tf.placeholder(tf.float64, [8, 6]), tf.placeholder(tf.float64, [8, 3])
    STATIC[:] = [x, y]
    with tf.variable_scope(tf.get_variable_scope(), reuse=True):
        return samples.linear(x, y)


STATIC = []


def of_another_graph(x, y, loss):
    with tf.Graph().as_default():
        return samples.linear(*placeholders((X, Y)))


class Program:
    loss = None

    @classmethod
    def made(cls, x, y, loss):
        program = cls()
        program.loss = loss
        return program


@pytest.mark.parametrize('error, text, changes', [
    (towers.InputError, r'inputs\[2\] .* does not reach the loss',
     dict(inputs=lambda x, y, loss: (x, y, tf.placeholder(tf.float64, [None, 2])))),
    (towers.InputError, r'inputs\[0\] and inputs\[2\] are the same tensor, Placeholder:0: pass it',
     dict(inputs=lambda x, y, loss: (x, y, x))),
    (towers.InputError, 'computes with the placeholder .* of shape .*, which may hold a batch',
     dict(inputs=lambda x, y, loss: x)),
    (towers.ModelFunctionError, 'waits for .*, which updates a variable',
     dict(model=waits_for_training)),
    (towers.InputError, 'of which a step takes the next elements', dict(model=with_a_dequeue)),
    (towers.ModelFunctionError, 'which puts elements into a queue', dict(model=with_an_enqueue)),
    (towers.InputError, 'has the static size 8',
     dict(model=of_a_static_batch, inputs=lambda *_: tuple(STATIC))),
    (towers.ModelFunctionError, 'is of another graph', dict(model=of_another_graph)),
    (towers.ModelFunctionError, 'does not depend on the inputs',
     dict(model=lambda x, y, loss: towers.ModelOutput(
         tf.nn.l2_loss(tf.trainable_variables()[0]), predictions=loss))),
    (towers.ModelFunctionError, 'pass the loss itself', dict(model=Program.made)),
    (towers.InputError, 'are the tensors of its graph at which the batch enters',
     dict(inputs=lambda x, y, loss: (X[:4], Y[:4]))),
    (towers.InputError, 'the model is finished', dict(
        inputs=lambda x, y, loss: towers.Shards([(x, y), (x, y)]))),
    (towers.InputError, 'has the static size 8', dict(
        model=of_a_static_batch, inputs=lambda *_: dict(zip(STATIC, placeholders((X, Y)))))),
    (towers.InvalidArgumentError, "copies='reuse' calls", dict(copies=lambda *_: 'reuse')),
    (towers.InvalidArgumentError, 'leave it out', dict(reuse=lambda *_: True))])
def test_refusals_are_one_line_and_make_nothing(error, text, changes):
    if 'model' in changes and 'inputs' in changes:  # the inputs may name what the model makes
        changes = dict(sorted(changes.items()))
        if changes['model'] is of_a_static_batch:
            changes = dict(model=changes['model'], inputs=changes['inputs'])
    given = finished(**changes)
    count = len(tf.get_default_graph().get_operations())
    with pytest.raises(error, match=text) as caught:
        towers.build_towers(**given)
    assert '\n' not in str(caught.value) and len(str(caught.value)) < 450
    assert len(tf.get_default_graph().get_operations()) == count


def test_a_batch_fed_to_a_placeholder_without_a_shape_fails():
    x, y = tf.placeholder(tf.float64, [None, 6]), tf.placeholder(tf.float64, name='target')
    kernel = tf.get_variable('kernel', [6, 3], tf.float64)
    loss = tf.reduce_mean(tf.square(tf.matmul(x, kernel))) * tf.reduce_mean(y)
    built = towers.build_towers(loss, x, sgd(), 2, 'mean')
    assert built.plan.line('fed to all').endswith('one number for target, of no shape')
    with tf.Session(config=towers.session_config(2)) as session:
        session.run(tf.global_variables_initializer())
        session.run(built.train_op, {x: X[:4], y: 2.})
        with pytest.raises(tf.errors.InvalidArgumentError, match=(
                r'towers: the placeholder target:0 has no shape .*It was fed the shape. .4 3.')):
            session.run(built.train_op, {x: X[:4], y: Y[:4]})


def test_a_placeholder_without_a_shape_that_is_no_number_is_named():
    """The shape of random numbers, as the sparse dropout of a graph network has it."""
    x, size = tf.placeholder(tf.float64, [None, 6]), tf.placeholder(tf.int32, name='size')
    noise = tf.random_uniform(size, dtype=tf.float64)
    loss = tf.reduce_mean(dense(x, 3, 'kernel')) + tf.reduce_mean(noise)
    with pytest.raises(towers.InputError, match=(
            r'size:0 has no shape, and is not fed one number, .*RandomUniform.*its shape')) as caught:
        towers.build_towers(loss, x, sgd(), 2, 'mean')
    assert '\n' not in str(caught.value)


def test_a_build_that_waits_for_the_updates_is_refused():
    inputs = placeholders((X, Y))
    loss = batch_norm(*inputs)
    with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
        with pytest.raises(towers.ModelFunctionError, match='call it outside of that block'):
            towers.build_towers(loss, inputs, sgd(), 2, 'mean', remainder='weight')


@pytest.mark.parametrize('read, use_resource, is_open', [
    (tf.identity, False, True), (tf.identity, True, False),
    pytest.param(lambda bank: bank * 1., False, False, marks=slow)])
def test_an_order_of_a_gradients_read_and_an_update_that_the_program_leaves_open(
        read, use_resource, is_open):
    x, y = tf.placeholder(tf.float64, [None, 6]), tf.placeholder(tf.int32, [None])
    bank = tf.get_variable('bank', [3, 4], tf.float64, trainable=False, use_resource=use_resource)
    h = tf.matmul(x, tf.get_variable('w', [6, 4], tf.float64))
    tf.add_to_collection(
        tf.GraphKeys.UPDATE_OPS, tf.scatter_update(bank, y, tf.stop_gradient(h)))
    logits = tf.matmul(h, read(bank), transpose_b=True)
    loss = tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
    built = towers.build_towers(loss, (x, y), momentum(), devices=2, reduction='mean')
    line = built.plan.line('one device')
    assert line.startswith('proven, but for whether a gradient reads' if is_open else 'proven: ')
    assert ("or after: 'bank'" in line) == is_open


def test_a_table_of_the_program_is_the_same_for_all_towers():
    words, y = tf.placeholder(tf.string, [None, 3]), tf.placeholder(tf.float64, [None])
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(['a', 'b'], [0, 1]), 0)
    w = tf.get_variable('w', [2], tf.float64)
    totals = tf.reduce_sum(tf.gather(w, table.lookup(words)), 1)
    built = towers.build_towers(tf.reduce_mean(tf.square(totals - y)), (words, y), momentum(),
                                devices=2, reduction='mean')
    assert built.plan.line('one device').startswith('proven: ')
