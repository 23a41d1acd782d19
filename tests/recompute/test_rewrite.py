"""The backward pass with recomputation: the same numbers, run once and later, of less memory."""

import contextlib

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from sample_models import objective
from case_marks import first_fast

X = np.random.RandomState(0).rand(8, 6, 6, 3).astype(np.float32)
slow = pytest.mark.slow


def variable(name, shape, **options):
    return tf.get_variable(name, shape, initializer=tf.random_normal_initializer(
        stddev=.3, seed=len(name) + sum(shape)), **options)


def convolution(images, name):
    with tf.variable_scope(name, reuse=tf.AUTO_REUSE):
        kernel = variable('kernel', [3, 3, images.shape[-1], 4])
        images = tf.nn.conv2d(images, kernel, [1, 1, 1, 1], 'SAME')
        return tf.nn.relu(tf.nn.bias_add(images, variable('bias', [4])))


def normalized(images, name):
    """Fused batch norm with moving averages, as layers have it."""
    with tf.variable_scope(name):
        mean = tf.get_variable('mean', [4], initializer=tf.zeros_initializer(), trainable=False)
        images, batch_mean, _ = tf.nn.fused_batch_norm(
            images, variable('scale', [4]), variable('offset', [4]))
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign_sub(mean, .1 * (mean - batch_mean)))
        return images


def deep(images):
    images = convolution(images, 'first')
    for layer in range(5):
        with tf.name_scope('block%d' % layer):
            inside = normalized(convolution(images, 'a%d' % layer), 'n%d' % layer)
            images += tf.nn.dropout(convolution(inside, 'shared'), rate=.2, seed=layer)
    return {'loss': tf.reduce_mean(tf.square(images)), 'predictions': images}


def numbers(model_fn, recompute, resource=False, steps=3, devices=1, check=None, accumulate=1,
            **options):
    """(loss, gradients, variables after some steps), and the plan's line."""
    with tf.Graph().as_default():
        tf.set_random_seed(1)
        with tf.variable_scope('', use_resource=resource):
            built = towers.build_towers(
                model_fn, tf.constant(X), objective(
                    options.pop('optimizer', None) or tf.train.MomentumOptimizer(.05, .9), options),
                devices, memory=towers.Memory(accumulate, recompute), **options)
        if check is not None:
            check(built)
        assert not towers.audit(built).broken
        # One operation after the other: sums of several threads differ in the last bit.
        config = towers.session_config(built.devices)
        config.intra_op_parallelism_threads = config.inter_op_parallelism_threads = 1
        # Nor are those of the operations that it joins, where a copy is joined with another one.
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        with tf.Session(config=config) as session:
            session.run(tf.global_variables_initializer())
            session.run(tf.local_variables_initializer())
            found = [session.run([built.loss] + [
                gradient for _, pairs in towers_pairs(built) for gradient, _ in pairs])]
            for _ in range(steps):
                session.run(built.train_op)
            found += session.run(tf.global_variables())
    return tf.nest.flatten(found), built.plan.line('recomputation')


def towers_pairs(built):
    return built.gradients.items() if isinstance(built.gradients, dict) else [('', built.gradients)]


@pytest.mark.slow
@pytest.mark.parametrize(
    'options', [dict(recompute=['block1', 'block3/', 'block2/add'])] + [
        pytest.param(options, marks=slow)
        for options in (dict(resource=True), dict(devices=2),
                        dict(accumulate=2), dict(devices=2, copies='reuse'),
                        dict(devices=2, variables=towers.VariablePlacement('replicated')),
                        dict(numerics=towers.Numerics(check_numerics=True)),
                        dict(numerics=towers.Numerics(loss_scale=towers.LossScale(initial=8.))))
    ],
    ids=lambda options: '-'.join(options) or 'plain')
def test_the_numbers_are_the_same_to_the_last_bit(options):
    options = dict(options)
    recompute = options.pop('recompute', 'auto')
    wanted, text = numbers(deep, None, **options)
    assert text is None
    found, text = numbers(deep, recompute, **options)
    assert 'operations of the forward pass are run again, in' in text
    assert len(found) == len(wanted)
    for one, other in zip(wanted, found):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize('draw, size', first_fast(1, [
    (lambda x: tf.image.extract_glimpse(x, [8, 8], tf.ones([8, 2])), 8),  # noise around the image
    (lambda x: tf.nn.fractional_max_pool(x, [1., 1.2, 1.2, 1.])[0], 5),
    (lambda x: tf.nn.fractional_avg_pool(x, [1., 1.2, 1.2, 1.])[0], 5),
    (lambda x: tf.py_func(lambda x: x + np.random.rand(*x.shape).astype(np.float32), [x],
                          tf.float32, stateful=False), 6)]),
                         ids=['glimpse', 'max_pool', 'avg_pool', 'python'])
def test_what_draws_without_saying_so_is_run_once(draw, size):
    """The gradient of the weights is the mean of what they were multiplied by."""
    def model(images):
        drawn = draw(tf.stop_gradient(images * 2.))
        drawn.set_shape([8, size, size, 3])
        net = tf.sin(drawn)
        product = tf.multiply(net, variable('w', [size, size, 3]), 'product')
        return {'loss': tf.reduce_mean(tf.reduce_sum(product, [1, 2, 3])) + 0. * tf.reduce_sum(
            tf.square(product)), 'predictions': net}
    built = towers.build_towers(
        model, tf.constant(X), tf.train.GradientDescentOptimizer(.1), 1,
        memory=towers.Memory(recompute=['product']))
    assert 'run again' in built.plan.line('recomputation')
    with tf.Session(config=towers.session_config(1)) as session:
        session.run(tf.global_variables_initializer())
        net, (gradient, _) = session.run([built.predictions, built.gradients[0]])
    np.testing.assert_allclose(gradient, net.mean(0), rtol=0, atol=1e-6)


def of_one_block(images, wait=()):
    with tf.name_scope('block3'), tf.control_dependencies(list(wait)):
        return tf.reduce_mean(convolution(images, 'first'))


@pytest.mark.parametrize('options, text', [
    (dict(memory=towers.Memory(recompute=['blok3'])), "such as 'block3'"),
    (dict(memory=towers.Memory(recompute=['nowhere'])),
     "has 'nowhere', and the model has no operation or scope of this"),
    (dict(memory=towers.Memory(recompute='auto'), optimizer=None),
     'without a backward pass nothing is kept'),
    (dict(memory=towers.Memory(recompute='auto'), numerics=towers.Numerics(xla=True)),
     'XLA chooses the results'),
    (dict(memory=towers.Memory(recompute='auto'), before=True),
     'the model computes with the reference variable first/kernel, which Assign writes before')])
def test_errors(options, text):
    model = of_one_block
    options = dict(dict(optimizer=tf.train.GradientDescentOptimizer(.1)), **options)
    with tf.Graph().as_default(), pytest.raises(towers.InvalidArgumentError) as error:
        if options.pop('before', False):
            with tf.variable_scope('', reuse=tf.AUTO_REUSE, use_resource=False):
                convolution(tf.constant(X), 'first')
            kernel = tf.trainable_variables()[0]

            def model(images):
                return of_one_block(images, [tf.assign(kernel, kernel * .9).op])
        towers.build_towers(model, tf.constant(X), devices=1, **options)
    assert text in str(error.value)


PEAKS = """
import tensorflow.compat.v1 as tf
import numpy as np
import towers
tf.disable_eager_execution()

def deep(x):
    for layer in range(depth):
        w = tf.get_variable('w%d' % layer, [32, 32], initializer=tf.random_normal_initializer(
            stddev=.1, seed=layer))
        x += tf.nn.relu(tf.matmul(x, w))
    return tf.reduce_mean(tf.square(x))

for depth, recompute in (16, None), (16, 'auto'), (64, None), (64, 'auto'):
    with tf.Graph().as_default():
        built = towers.build_towers(deep, np.ones([4096, 32], np.float32),
                                    tf.train.GradientDescentOptimizer(1e-3), 1,
                                    memory=towers.Memory(recompute=recompute))
        print(towers.measure_memory(built).peak)
"""


@pytest.mark.slow
def test_memory_grows_as_the_root_of_the_depth(runner, tmp_path):
    run = runner.source(PEAKS, tmp_path, TF_CPU_ALLOCATOR_USE_BFC='true')
    peaks = [int(line) for line in run.stdout.split()]
    shallow, deep_ = peaks[:2], peaks[2:]
    activation = 4096 * 32 * 4
    assert deep_[0] > 64 * 2 * activation * .9
    assert deep_[1] < .4 * deep_[0]
    # Four times as deep, twice as much (and the weights, and what an operation needs to run).
    assert deep_[1] < 2.6 * shallow[1]


@pytest.mark.slow
def test_a_model_that_writes_what_it_reads():
    """Spectral norm: the memory that was read holds something else when it is run again."""
    def model(images):
        x = tf.reshape(images, [-1, 108])[:, :48]
        w = variable('w', [48, 300])
        u = tf.get_variable('u', [1, 48], initializer=tf.ones_initializer(), trainable=False)
        v = tf.stop_gradient(tf.nn.l2_normalize(tf.matmul(u, w)))
        after = tf.stop_gradient(tf.nn.l2_normalize(tf.matmul(v, w, transpose_b=True)))
        sigma = tf.reduce_sum(tf.matmul(v, w, transpose_b=True) * after)
        with tf.control_dependencies([tf.assign(u, after)]):
            return tf.reduce_mean(tf.square(tf.sin(tf.tanh(tf.matmul(x, w / sigma), 'kept'))))
    wanted, _ = numbers(model, None, resource=True)
    found, text = numbers(model, ['kept'], resource=True)
    assert 'run again' in text
    for one, other in zip(wanted, found):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_segments_do_not_wait_for_each_other():
    """A small product of two branches: the gradient of each takes recomputed values of both."""
    def model(images):
        rows = tf.reshape(images, [36, 24])
        branches = []
        for name in 'one', 'two', 'three':
            with tf.name_scope(name):
                branches.append(tf.tanh(tf.sin(tf.matmul(rows, variable(name, [24, 8])))))
        product = tf.matmul(branches[0], branches[1], transpose_a=True)
        return tf.reduce_mean(tf.square(product)) + tf.reduce_mean(tf.square(branches[2]))

    options = dict(optimizer=tf.train.GradientDescentOptimizer(.1))
    plain, _ = numbers(model, None, **options)
    again, line = numbers(model, ['one', 'two', 'three'], **options)
    assert line.startswith('5 operations of the forward pass are run again')
    for one, other in zip(plain, again):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize('options', [
    dict(pipeline=towers.Pipeline(stages='auto'), memory=towers.Memory(recompute='auto')),
    pytest.param(dict(memory=towers.Memory(recompute=['layer5'])), marks=slow),
    pytest.param(dict(memory=towers.Memory(recompute='auto'),
                      pipeline=towers.Pipeline(micro_batches=2)), marks=slow)])
def test_each_operation_is_run_again_on_its_stage(options):
    """And no activation crosses a second time, though a segment reaches over two stages."""
    options = dict(options)
    by_hand = getattr(options.get('pipeline'), 'stages', None) is None

    def model(x):
        for layer in range(8):
            with tf.variable_scope('layer%d' % layer), (
                    towers.stage(layer // 4) if by_hand else contextlib.nullcontext()):
                x = tf.tanh(tf.matmul(x, variable('w', [16, 16])))
        return tf.reduce_mean(tf.square(x))
    built = towers.build_towers(
        model, np.random.RandomState(1).rand(128, 16).astype(np.float32),
        tf.train.GradientDescentOptimizer(.1), '/cpu:0+/cpu:1,/cpu:2+/cpu:3', 'mean', **options)
    graph = built.loss.graph
    for tower in built.towers:
        again = [op for op in graph.get_operations()
                 if op.name.startswith(tower.name_scope + 'recompute/') and op.type == 'Tanh']
        assert again
        for op in again:
            origin = tower.name_scope + op.name.split('/segment_')[1].split('/', 1)[1]
            assert op.device == graph.get_operation_by_name(origin).device, op.name
        first, second = tower.device.stages
        crossing = {tensor.name for op in graph.get_operations() for tensor in op.inputs
                    if tower.has(op.name) and tensor.op.device == first
                    and op.device == second and tensor.shape.ndims == 2
                    and tower.has(tensor.op.name) and tensor.op.type != 'ReadVariableOp'}
        assert len(crossing) == 1, crossing
    assert not towers.audit(built).broken
