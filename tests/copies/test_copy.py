"""One recorded call of the model function, and copies of its graph for the other towers."""

import numpy as np
import pytest
import sample_models as samples
import tensorflow.compat.v1 as tf

import towers
from sample_models import linear, mean_squared_error, run, sgd
from case_marks import first_fast

slow = pytest.mark.slow
IS_V2 = tf.version.VERSION > '2'
CONTROL_FLOW = pytest.mark.parametrize('control_flow_v2', [
    True, pytest.param(False, marks=slow)] if IS_V2 else [False])
X = np.array([1., 2., 3., 6.])  # on two towers the means are 1.5 and 4.5


def build(model_fn, data, devices=2, **options):
    options.setdefault('optimizer', sgd())
    return towers.build_towers(model_fn, data, devices=devices, **options)


def weight(value=1.):
    return tf.get_variable('w', [], tf.float64, tf.constant_initializer(value))


def convolutions(x, y):
    """What a network has: layers of several kinds, a branch, a loop, dropout, batch norm."""
    net = samples.slim.batch_norm(samples.slim.conv2d(x, 4, 3), is_training=True)
    net = tf.cond(tf.reduce_sum(x) > 0., lambda: tf.nn.relu(net), lambda: tf.tanh(net))
    net = tf.while_loop(lambda i, _: i < 2, lambda i, each: (i + 1, each * 0.5), [0, net])[1]
    net = tf.nn.dropout(samples.slim.flatten(net), rate=0.5)
    tf.losses.mean_squared_error(y, samples.slim.fully_connected(net, 3))
    return tf.losses.get_total_loss()


def images(count):
    random = np.random.RandomState(count)
    return random.randn(count, 8, 8, 2).astype('float32'), random.randn(count, 3).astype('float32')


# ---- one call, and what stands in the graph ------------------------------------------------------

def test_the_model_function_is_called_once_and_the_recipe_once_per_tower():
    calls = []

    def model_fn(x, y):
        calls.append((tf.get_default_graph().get_name_scope(), tf.get_variable_scope().reuse))
        return linear(x, y)
    built = build(model_fn, samples.vectors(4), 2)
    assert calls == [('', False)]
    assert built.plan.line('towers') == '1 call of the model function, 1 copy of its graph'
    del calls[:]
    with tf.Graph().as_default():
        built = build(model_fn, samples.vectors(4), 2, copies='reuse')
        assert built.plan.line('towers') == '2 calls of the model function'
    assert [(scope, bool(reuse)) for scope, reuse in calls] == [
        ('tower_0', False), ('tower_1', True)]


@pytest.mark.parametrize('scope', [None, pytest.param('train', marks=slow)])
def test_tower_0_is_the_program_itself_and_copies_are_under_names_of_their_own(scope):
    root = scope + '/' if scope else ''
    with tf.Graph().as_default() as one:
        batch = [tf.constant(each) for each in images(4)]
        tf.get_variable_scope().set_use_resource(True)
        with tf.name_scope(scope):
            convolutions(*batch)
        expected = [op.name for op in one.get_operations()][2:]
    batch = [tf.constant(each) for each in images(4)]
    with tf.name_scope(scope):
        built = build(convolutions, batch)
    graph = tf.get_default_graph()
    assert set(expected) <= {op.name for op in graph.get_operations()}
    assert [tower.name_scope for tower in built.towers] == [root, root + 'tower_1/']
    first, second = [samples.step_operations([tower.loss] + [each for each, _ in tower.gradients])
                     for tower in built.towers]
    assert not [op.name for op in first if 'tower_1/' in op.name]
    copied = {op.name: op for op in second if 'tower_1/' in op.name}
    assert len(copied) > 100
    for name, op in copied.items():
        of_first = graph.get_operation_by_name(name.replace('tower_1/', ''))
        assert op.type == of_first.type and op.device in (
            of_first.device, of_first.device.replace('CPU:0', 'CPU:1'))
        assert [each.name.replace('tower_1/', '') for each in op.outputs] == [
            each.name for each in of_first.outputs]
    assert [str(each.shape) for each, _ in built.towers[1].gradients] == [
        str(variable.shape) for variable in built.variables if variable.trainable]


@pytest.mark.slow
def test_outputs_of_every_kind_are_copied():
    def model_fn(x, y):
        out = tf.matmul(x, tf.get_variable('kernel', [6, 3], x.dtype))
        count = tf.get_variable('count', [], trainable=False, initializer=tf.zeros_initializer())
        return towers.ModelOutput(
            mean_squared_error(out, y),
            predictions={'out': out, 'parts': [out[:, 0], (out[:, 1], None)], 'x': x,
                         'sparse': tf.sparse.from_dense(tf.nn.relu(out)),
                         'scalar': tf.reduce_mean(out)},
            metrics={'error': tf.metrics.mean_squared_error(y, out), 'mean': tf.reduce_mean(out)},
            updates=[tf.assign_add(count, 1.), tf.assign_add(count, 2.).op])
    x, y = samples.vectors(4)
    built = build(model_fn, (x, y), update_ops='all')
    first, second = built.towers
    for field in ('predictions', 'metrics'):
        tf.nest.assert_same_structure(getattr(first, field), getattr(second, field))
    shown = run(built, {key: second.predictions[key] for key in ('x', 'out', 'sparse')})
    np.testing.assert_array_equal(shown['x'], x[2:])
    np.testing.assert_array_equal(shown['sparse'].values, shown['out'][shown['out'] > 0.])
    assert [update.name for update in second.updates] == [
        'tower_1/' + update.name for update in first.updates]


# ---- numbers -------------------------------------------------------------------------------------

def branches_and_loops(x, y):
    """A branch, a loop with TensorArrays, and a loop in a branch."""
    w = tf.get_variable('w', [3, 3], tf.float64)
    rows = tf.map_fn(lambda row: tf.tanh(tf.linalg.matvec(w, row)), y)
    rows = tf.cond(tf.reduce_sum(rows) > 100., lambda: rows, lambda: tf.matmul(rows, w) + 1.)
    count = tf.cond(tf.reduce_mean(x) > 100., lambda: 3., lambda: tf.while_loop(
        lambda i: i < 2., lambda i: i + 1., [tf.constant(0.)]))
    return mean_squared_error(rows * tf.cast(count, tf.float64), y)


@tf.custom_gradient
def doubled_backward(x):
    return tf.identity(x), lambda gradient: 2. * gradient


def custom_gradients(x, y):
    """A gradient by a Python function, and one that is overridden by its name."""
    loss = doubled_backward(linear(x, y))
    with tf.get_default_graph().gradient_override_map({'Identity': 'TestOfCopyTripled'}):
        return tf.identity(loss)


@tf.RegisterGradient('TestOfCopyTripled')
def _tripled(op, gradient):
    return 3. * gradient


def with_what_keeps_state(x, y):
    """A table, a queue, an iterator, a Python function."""
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer([0, 1], np.array([1., 2.])), -1.)
    queue = tf.FIFOQueue(3, [tf.float64], [[]])
    with tf.control_dependencies([queue.enqueue(3.)]):
        factor = queue.dequeue() * table.lookup(tf.constant(1))
    factor *= tf.data.make_one_shot_iterator(
        tf.data.Dataset.from_tensors(np.float64(2.)).repeat()).get_next()
    doubled = tf.py_func(lambda each: 2. * each, [x], tf.float64)
    doubled.set_shape(x.shape)
    return linear(doubled, y) * factor


def with_names_of_a_variables_scope(x, y):
    loss = linear(x, y)
    with tf.name_scope('kernel/'):
        return loss + tf.reduce_mean(x * x, name='squares')


def with_the_initial_value(x, y):
    kernel = tf.get_variable('kernel', initializer=tf.eye(6, 3, dtype=tf.float64))
    return mean_squared_error(tf.matmul(x, kernel.initial_value + kernel), y)


@pytest.mark.parametrize('model_fn', first_fast(1, [
    custom_gradients, with_what_keeps_state, with_names_of_a_variables_scope,
    with_the_initial_value]))
def test_a_model_of_every_kind_is_one_device_in_numbers(model_fn):
    report = towers.check_towers(model_fn, samples.vectors(4), sgd, steps=1)
    assert report.equal, str(report)


@pytest.mark.slow
@CONTROL_FLOW
def test_branches_and_loops_are_one_device_in_numbers(control_flow_v2):
    with samples.switched('control_flow_v2', control_flow_v2):
        report = towers.check_towers(branches_and_loops, samples.vectors(4), sgd, steps=1)
    assert report.equal, str(report)


@pytest.mark.slow
def test_a_sparse_batch_and_none_in_the_nest():
    x = tf.SparseTensorValue([[i, i % 5] for i in range(6)], np.arange(6) + 1., [6, 5])
    report = towers.check_towers(lambda x, y: mean_squared_error(tf.sparse.sparse_dense_matmul(
        x['sparse'], tf.get_variable('w', [5, 3], tf.float64)), y), (
            {'sparse': x, 'none': None}, np.ones([6, 3])), sgd, steps=1)
    assert report.equal, str(report)


# ---- devices -------------------------------------------------------------------------------------

def test_jobs_around_the_towers_and_devices_inside(graph):
    def model_fn(x, y):
        out = tf.matmul(x, tf.get_variable('w', [6, 3], x.dtype))
        with tf.device('/job:other'):
            out = tf.tanh(out, name='with_job')
        with tf.device('/cpu:0'):
            out = tf.tanh(out, name='pinned')
        with tf.device(None):
            out = tf.identity(out, name='anywhere')
        with graph.colocate_with(out.op):
            return mean_squared_error(tf.identity(out, name='beside'), y)
    with tf.device('/job:worker/task:1'):
        build(model_fn, samples.vectors(4), ['/cpu:1', '/cpu:2'])
    for prefix, device in ('', '/device:CPU:1'), ('tower_1/', '/device:CPU:2'):
        places = [graph.get_operation_by_name(prefix + name).device
                  for name in ('with_job', 'pinned', 'anywhere', 'beside')]
        assert places == ['/job:other/task:1' + device, '/job:worker/task:1/device:CPU:0', '', '']


@pytest.mark.skipif(not IS_V2, reason='control flow v2')
def test_in_a_branch_what_is_on_the_first_towers_device_is_on_the_copys(graph):
    def model_fn(x):
        def branch():
            with tf.device('/cpu:3'):
                pinned = tf.tanh(x * weight(), name='pinned')
            return tf.reduce_mean(tf.sin(pinned, name='follows'))
        return tf.cond(tf.reduce_sum(x) > 0., branch, lambda: tf.reduce_mean(x * weight(2.)))
    with samples.switched('control_flow_v2', True), tf.variable_scope('', reuse=tf.AUTO_REUSE):
        built = build(model_fn, X, ['/cpu:0', '/cpu:1'])
    places = {(node.name, node.device) for function in graph.as_graph_def().library.function
              for node in function.node_def if function.signature.name.endswith('__tower_1')
              and node.name in ('pinned', 'follows')}
    assert places == {('pinned', '/device:CPU:3'), ('follows', '/device:CPU:1')}
    with tf.Session(config=towers.session_config(4)) as session:
        session.run(tf.global_variables_initializer())
        session.run(built.train_op)


# ---- what cannot be copied -----------------------------------------------------------------------

def test_what_cannot_be_copied_is_named():
    def model_fn(x):
        return tf.reduce_mean(x * weight()) * tf.cond(
            x[0] > 0., lambda: tf.placeholder_with_default(np.float64(1.), []), lambda: x[0])
    with samples.switched('control_flow_v2', False), pytest.raises(towers.CloneError, match=(
            r"^operation cond\S* \(PlaceholderW.*, which the model.*pass copies='reuse'")):
        build(model_fn, X, ['/cpu:0', '/cpu:1'])
    with tf.Graph().as_default():
        assert build(model_fn, X, 1).plan.line('towers') is None


def test_a_gradient_of_python_code_is_refused_and_python_code_without_one_is_copied():
    """TensorFlow keeps what the code has computed by a name, which two copies would share."""
    def cubed(x):
        value = tf.py_function(lambda x: x ** 3, [x], tf.float64)
        value.set_shape(x.shape)
        return value

    with tf.Graph().as_default(), pytest.raises(towers.CloneError, match=(
            "^operation .*EagerPyFunc is the gradient of a tf.py_function, .*copies='reuse'")):
        build(lambda x: tf.reduce_mean(cubed(x * weight(2.))), X, ['/cpu:0', '/cpu:1'])

    def without_gradient(x):
        with tf.name_scope('cubed_grad'):  # a name as of a gradient
            return tf.reduce_mean(cubed(x) * weight(2.))
    built = build(without_gradient, X, ['/cpu:0', '/cpu:1'])
    with tf.Session(config=towers.session_config(2)) as session:
        session.run(tf.global_variables_initializer())
        np.testing.assert_allclose(session.run(built.loss), np.mean(X ** 3 * 2.))


# ---- what a copy leaves out ----------------------------------------------------------------------

def test_an_update_that_no_step_runs_has_no_copy(graph):
    """One of an average; the state of a tower is each tower's."""
    def model_fn(x):
        average = tf.get_variable('average', [], tf.float64, trainable=False)
        state = tf.get_local_variable('state', [], tf.float64, tf.zeros_initializer())
        for update in (tf.assign(average, tf.reduce_mean(x), name='of_average'),
                       tf.assign(state, tf.reduce_sum(x), name='of_state')):
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
        return tf.reduce_mean(x * weight())
    built = build(model_fn, X)
    assert [len(tower.updates) for tower in built.towers] == [2, 1]
    made = [op.name for op in graph.get_operations()]
    assert 'tower_1/of_state' in made and 'tower_1/of_average' not in made
    with tf.Session(config=towers.session_config(2)) as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        session.run(built.train_op)
        assert session.run(built.own_state) == [3., 9.]
        assert session.run(tf.global_variables()[0]) == 1.5  # of tower 0


# ---- functions -----------------------------------------------------------------------------------

def test_a_defun_whose_gradient_is_a_defun():
    from tensorflow.python.framework import function  # no public name leads to it on TF 2

    @function.Defun(tf.float64, tf.float64)
    def gradient(x, of_result):
        return 5. * x * of_result  # not 2 x, so that it is seen to count

    @function.Defun(tf.float64, grad_func=gradient)
    def square(x):
        return x * x

    def model_fn(x):
        squares = square(x * weight())
        squares.set_shape(x.shape)
        return tf.reduce_mean(squares)
    built = build(model_fn, X, reduction='mean')
    np.testing.assert_allclose(run(built, built.gradients[0][0]), 5. * np.mean(X ** 2))
