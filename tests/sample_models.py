"""Model functions, one of each kind that people write, and the plain TF1 program they stand for.

`one_device` is the reference of the numeric tests: a program for the whole batch on one device, as
it stands in a textbook. It shares no code with `towers`.
"""

import collections
import contextlib
import time

import numpy as np
import pytest
import tensorflow
import tensorflow.compat.v1 as tf
import tf_slim as slim

import towers

towers.mend_slim()
keras = tensorflow.keras

DECAY = 1. / 32  # of the L2 losses below, DECAY * sum(w ** 2); exact in Keras' float32 too


def _has(look_up):
    try:
        return look_up() is not None
    except (AttributeError, ImportError):  # gone, or only there with tf-keras
        return False


HAS_TF_LAYERS = _has(lambda: tf.layers.dense)
HAS_RNN_CELLS = _has(lambda: tf.nn.rnn_cell.LSTMCell)


def slowly(value):
    """The same value, 0.15 seconds later."""
    def after_a_while(array):
        time.sleep(.15)
        return array
    later = tf.py_func(after_a_while, [value], value.dtype)
    later.set_shape(value.shape)
    return later


@contextlib.contextmanager
def switched(what, on):
    """Turns 'resource_variables' or 'control_flow_v2' on or off in a `with` block."""
    before = getattr(tf, what + '_enabled')()
    getattr(tf, ('enable_' if on else 'disable_') + what)()
    try:
        yield
    finally:
        getattr(tf, ('enable_' if before else 'disable_') + what)()


@pytest.fixture(params=['resource'])
def kind_of_variables(request):
    """Each with the control flow it comes with: v1's on 1.15 and with tf.disable_v2_behavior()."""
    resource = request.param == 'resource'
    with switched('resource_variables', resource), switched(
            'control_flow_v2', resource and tf.version.VERSION > '2'):
        yield request.param


def of_kinds(*kinds):
    """For tests of what tells the kinds of variables apart: each of these is fast."""
    return pytest.mark.parametrize('kind_of_variables', kinds, indirect=True)


# ---- data ---------------------------------------------------------------------------------------

def vectors(count, dtype='float64'):
    """(x [count, 6], y [count, 3])"""
    random = np.random.RandomState(count)
    return random.randn(count, 6).astype(dtype), random.randn(count, 3).astype(dtype)


def tokens(count, dtype='float64'):
    """(ids [count, 4] below 7, y [count, 3]): some rows are used by one tower, some by all."""
    random = np.random.RandomState(count)
    return random.randint(0, 7, [count, 4]), random.randn(count, 3).astype(dtype)


def sequences(count):
    """(x [count, 5, 2], y [count, 3])"""
    random = np.random.RandomState(count)
    return random.randn(count, 5, 2), random.randn(count, 3)


# ---- models -------------------------------------------------------------------------------------

def mean_squared_error(prediction, target):
    return tf.reduce_mean(tf.square(prediction - target))


def linear(x, y):
    kernel = tf.get_variable('kernel', [6, 3], x.dtype)
    return mean_squared_error(tf.matmul(x, kernel), y)


def two_layers(x, y):
    body = tf.get_variable('body', [6, 3], tf.float64)
    head = tf.get_variable('head', [3, 3], tf.float64)
    return mean_squared_error(tf.matmul(tf.matmul(x, body), head), y)


def slope(x):
    """mean(w * x), whose gradient is mean(x)."""
    w = tf.get_variable('w', [], tf.float64, tf.constant_initializer(2.))
    return tf.reduce_mean(w * x)


def slim_layers(x, y):
    l2 = slim.l2_regularizer(2 * DECAY)  # slim's is half the sum of squares
    net = slim.fully_connected(x, 5, activation_fn=tf.tanh, weights_regularizer=l2)
    net = slim.fully_connected(net, 3, activation_fn=None, weights_regularizer=l2)
    return mean_squared_error(net, y)


def embedding(ids, y):
    table = tf.get_variable('table', [7, 3], y.dtype)
    kernel = tf.get_variable('kernel', [3, 3], y.dtype)
    rows = tf.nn.embedding_lookup(table, ids)
    return mean_squared_error(tf.matmul(tf.reduce_mean(rows, 1), kernel), y)


def tf_layers(x, y):
    def l2(kernel):
        return DECAY * tf.reduce_sum(tf.square(kernel))
    net = tf.layers.dense(x, 5, activation=tf.tanh, kernel_regularizer=l2)
    return mean_squared_error(tf.layers.dense(net, 3, kernel_regularizer=l2), y)


def keras_layers(x, y):
    l2 = keras.regularizers.l2(DECAY)
    net = keras.layers.Dense(5, 'tanh', kernel_regularizer=l2, dtype='float64', name='hidden')(x)
    net = keras.layers.Dense(3, kernel_regularizer=l2, dtype='float64', name='output')(net)
    return mean_squared_error(net, y)


def dynamic_rnn(x, y):
    cell = tf.nn.rnn_cell.LSTMCell(3, dtype=tf.float64)
    _, state = tf.nn.dynamic_rnn(cell, x, dtype=tf.float64)
    return mean_squared_error(state.h, y)


def while_loop_rnn(x, y):
    with tf.variable_scope('rnn'):
        inwards = tf.get_variable('inwards', [2, 3], tf.float64)
        onwards = tf.get_variable('onwards', [3, 3], tf.float64)

    def step(i, state):
        return i + 1, tf.tanh(tf.matmul(x[:, i], inwards) + tf.matmul(state, onwards))
    start = (tf.constant(0), tf.zeros([tf.shape(x)[0], 3], tf.float64))
    _, state = tf.while_loop(lambda i, _: i < 5, step, start,
                             shape_invariants=(tf.TensorShape([]), tf.TensorShape([None, 3])))
    return mean_squared_error(state, y)


def plain_variables(x, y):
    random = np.random.RandomState(7)
    with tf.name_scope('model'):
        kernel = tf.Variable(random.randn(6, 3), name='kernel')
        bias = tf.Variable(tf.zeros([3], tf.float64))  # no name: 'Variable'
    return mean_squared_error(tf.matmul(x, kernel) + bias, y)


Sample = collections.namedtuple('Sample', 'model_fn data decays')
"""`decays`: whether its kernels have registered L2 losses, DECAY * sum(w ** 2)."""

SAMPLES = collections.OrderedDict([
    ('slim', Sample(slim_layers, vectors, True)),
    ('embedding', Sample(embedding, tokens, False)),
    ('keras', Sample(keras_layers, vectors, True)),
    ('while_loop', Sample(while_loop_rnn, sequences, False)),
    ('tf.Variable', Sample(plain_variables, vectors, False))])
if HAS_TF_LAYERS:
    SAMPLES['tf.layers'] = Sample(tf_layers, vectors, True)
if HAS_RNN_CELLS:
    SAMPLES['dynamic_rnn'] = Sample(dynamic_rnn, sequences, False)


def l2_of_kernels(variables):
    """What the regularizers of the samples above come to, written by hand."""
    kernels = [v for v in variables if v.op.name.endswith(('weights', 'kernel'))]
    return DECAY * tf.add_n([tf.reduce_sum(tf.square(kernel)) for kernel in kernels])


# ---- the two programs ---------------------------------------------------------------------------

Run = collections.namedtuple('Run', 'initial losses gradients variables built')
"""`initial`, `gradients` (of the first step, dense) and `variables` (after the last step, slots
included): dicts from names to arrays."""


def one_device(model_fn, arrays, make_optimizer, initial, steps=2, factor=1., penalty=None,
               transform=None):
    """Trains on the whole batch on one device, from the given values of the variables."""
    with tf.Graph().as_default():
        with tf.variable_scope(tf.get_variable_scope()):
            loss = model_fn(*[tf.constant(array) for array in arrays])
        if penalty is not None:
            loss += penalty(tf.trainable_variables())
        optimizer = make_optimizer()
        pairs = optimizer.compute_gradients(loss * factor)
        pairs = [(gradient, variable) for gradient, variable in pairs if gradient is not None]
        if transform is not None:
            pairs = transform(pairs)
        with tf.control_dependencies([loss] + tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
            train_op = optimizer.apply_gradients(pairs)
        return _train(tf.Session(), loss, pairs, train_op, steps, initial, None)


def objective(optimizer, options):
    """The optimizer with those of the `options` that are an `Objective`'s, which are taken out."""
    own = {name: options.pop(name) for name in ('var_list', 'transform_gradients')
           if name in options}
    return towers.Objective(optimizer, **own) if own else optimizer


def on_towers(model_fn, arrays, make_optimizer, num_towers, steps=2, **options):
    """The same with `build_towers`, on virtual CPUs."""
    with tf.Graph().as_default():
        built = towers.build_towers(model_fn, tuple(arrays), objective(make_optimizer(), options),
                                    num_towers, **options)
        session = tf.Session(config=towers.session_config(built.devices))
        return _train(session, built.loss, built.gradients, built.train_op, steps, {}, built)


def _train(session, loss, pairs, train_op, steps, initial, built):
    dense = {v.op.name: tf.convert_to_tensor(gradient) for gradient, v in pairs}
    with session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        for variable in tf.global_variables():
            if variable.op.name in initial:
                variable.load(initial[variable.op.name], session)
        before = session.run({v.op.name: v for v in tf.global_variables()})
        gradients = session.run(dense)
        losses = [session.run([loss, train_op])[0] for _ in range(steps)]
        after = session.run({v.op.name: v for v in tf.global_variables()})
    return Run(before, losses, gradients, after, built)


def plain_step(model_fn, arrays, make_optimizer):
    """(loss, train op) of the whole batch on one device: the updates run before the optimizer."""
    optimizer, loss = make_optimizer(), model_fn(*map(tf.constant, arrays))
    pairs = [pair for pair in optimizer.compute_gradients(loss) if pair[0] is not None]
    with tf.control_dependencies([loss] + [gradient for gradient, _ in pairs]):
        updates = tf.group(*tf.get_collection(tf.GraphKeys.UPDATE_OPS))
    with tf.control_dependencies([updates]):
        return loss, optimizer.apply_gradients(pairs)


def values_after(session, loss, train_op, steps=3):
    """(losses, {name of a global variable: value}); Boolean defaults are fed True, False, True."""
    session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
    fed = [op.outputs[0] for op in session.graph.get_operations()
           if op.type == 'PlaceholderWithDefault' and op.outputs[0].dtype == tf.bool]
    losses = [session.run([loss, train_op], {each: step != 1 for each in fed})[0]
              for step in range(steps)]
    return losses, session.run({each.op.name: each for each in tf.global_variables()})


def assert_equal_runs(run, reference, tolerance=1e-12):
    """Every gradient, variable and slot of both agrees to that relative difference."""
    for field in ('gradients', 'variables'):
        ours, theirs = getattr(run, field), getattr(reference, field)
        assert sorted(ours) == sorted(theirs)
        for name in theirs:
            assert relative_difference(ours[name], theirs[name]) < tolerance, (field, name)
    assert relative_difference(run.losses, reference.losses) < tolerance


def relative_difference(one, other):
    one, other = np.asarray(one), np.asarray(other)
    assert one.shape == other.shape
    largest = np.abs(other).max() if other.size else 0
    return np.abs(one - other).max() / largest if largest else np.abs(one).max()


def check_against_one_device(model_fn, arrays, make_optimizer=None, num_towers=2, penalty=None,
                             transform=None, tolerance=1e-12, **options):
    """Trains on towers and on one device; `options` are of `build_towers`. Returns the former."""
    make_optimizer = make_optimizer or momentum
    if penalty is not None:
        options.setdefault('regularization', 'add')
    ours = on_towers(model_fn, arrays, make_optimizer, num_towers, **options)
    factor = num_towers if options.get('reduction', 'sum') == 'sum' else 1
    plain = one_device(model_fn, arrays, make_optimizer, ours.initial, factor=factor,
                       penalty=penalty, transform=transform)
    assert_equal_runs(ours, plain, tolerance)
    return ours


def momentum():
    return tf.train.MomentumOptimizer(0.1, 0.9)


def sgd(rate=0.5):
    return tf.train.GradientDescentOptimizer(rate)


def run(built, fetches, feed=None):
    """Initializes everything and runs the fetches once."""
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer(),
                     tf.tables_initializer()])
        return session.run(fetches, feed)


def names(variables):
    return sorted(variable.op.name for variable in variables)


def step_operations(fetches):
    """The operations that a run of the fetches executes."""
    pending = [getattr(fetch, 'op', fetch) for fetch in fetches]
    found = set(pending)
    while pending:
        op = pending.pop()
        for other in [tensor.op for tensor in op.inputs] + list(op.control_inputs):
            if other not in found:
                found.add(other)
                pending.append(other)
    return found


def mutable_table():
    """A table that changes, whose content `tf.train.Saver` keeps."""
    experimental = getattr(tf.lookup, 'experimental', None)
    if hasattr(experimental, 'MutableHashTable'):
        return experimental.MutableHashTable(tf.int64, tf.int64, -1, name='table')
    from tensorflow.contrib.lookup import MutableHashTable  # TF 1.15
    return MutableHashTable(tf.int64, tf.int64, -1, name='table')
