"""`build_towers` against plain TF1 on one device, and against numbers worked out by hand."""

import os

import numpy as np
import pytest
import sample_models as samples
import tensorflow.compat.v1 as tf

import towers
from sample_models import (SAMPLES, check_against_one_device, keras, linear, momentum, names, run,
                           sgd, slope, switched, two_layers)

slow = pytest.mark.slow

# ---- the gradient, by hand -----------------------------------------------------------------------

@pytest.mark.parametrize('reduction, gradient', [('mean', 3.5), ('sum', 7.)])
def test_gradient_and_loss_of_two_towers_by_hand(reduction, gradient):
    built = towers.build_towers(slope, np.array([1., 2., 3., 4., 5., 6.]), sgd(), 2, reduction)
    (combined, variable), = built.gradients
    of_towers = [tower.gradients[0][0] for tower in built.towers]
    share = 0.5 if reduction == 'mean' else 1.
    assert run(built, [combined, of_towers, built.loss, [t.loss for t in built.towers]]) == [
        gradient, [2. * share, 5. * share], 7., [4., 10.]]
    # One step: 2 - 0.5 * gradient; the loss is the one before it.
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run(tf.global_variables_initializer())
        assert session.run([built.loss, built.train_op])[0] == 7.
        assert session.run(variable) == 2. - 0.5 * gradient


@pytest.mark.parametrize('static, reduction, factor', [(True, 'mean', 1.), (False, 'sum', 3.)],
                         ids=['static', 'dynamic'])
def test_uneven_shards_count_by_their_size(static, reduction, factor):
    batch = np.array([1., 2., 3., 4., 5., 6., 70.])  # 3 + 2 + 2, mean 13
    x = tf.constant(batch) if static else tf.placeholder(tf.float64, [None])
    built = towers.build_towers(slope, x, sgd(), 3, reduction, remainder='weight')
    feed = None if static else {x: batch}
    combined, of_towers, loss, of_shards = run(
        built, [built.gradients[0][0], [tower.gradients[0][0] for tower in built.towers],
                built.loss, [tower.loss for tower in built.towers]], feed)
    np.testing.assert_allclose(combined, 13. * factor, rtol=1e-15)
    np.testing.assert_allclose(of_towers, np.array([6., 9., 76.]) / 7 * factor, rtol=1e-15)
    assert loss == pytest.approx(26., rel=1e-15)
    assert of_shards == [4., 9., 76.]


@pytest.mark.parametrize('static', [pytest.param(True, marks=slow), False],
                         ids=['static', 'dynamic'])
def test_fewer_examples_than_towers_put_no_nan_into_gradients(static):
    x = tf.constant([3., 5.], tf.float64) if static else tf.placeholder(tf.float64, [None])
    built = towers.build_towers(slope, x, sgd(), 4, 'sum', remainder='weight')
    combined, of_towers, loss = run(
        built, [built.gradients[0][0], [tower.gradients[0][0] for tower in built.towers],
                built.loss], None if static else {x: [3., 5.]})
    assert (combined, of_towers, loss) == (16., [6., 10., 0., 0.], 8.)


# ---- the gradient, against one device ------------------------------------------------------------

@pytest.mark.parametrize('name', [
    name if name == 'slim' else pytest.param(name, marks=slow)
    for name in SAMPLES])
def test_models_train_as_on_one_device(name):
    sample = SAMPLES[name]
    penalty = samples.l2_of_kernels if sample.decays else None
    check_against_one_device(sample.model_fn, sample.data(7), num_towers=3, reduction='sum',
                             penalty=penalty, remainder='weight')


# Control flow v2 of TF 1.15 cannot read a variable of another device in a loop, towers or not.
@pytest.mark.parametrize('version', ['v1', pytest.param('v2', marks=slow)])
def test_loops_and_branches_of_either_control_flow(version):
    def with_branch(x, y):
        kernel = tf.get_variable('kernel', [2, 2], tf.float64)
        return samples.while_loop_rnn(tf.cond(
            tf.reduce_sum(kernel) < 1e9, lambda: tf.tensordot(x, kernel, 1), lambda: x), y)
    with switched('control_flow_v2', version == 'v2'):
        check_against_one_device(with_branch, samples.sequences(6), reduction='mean')


def test_a_sparse_gradient_stays_sparse_with_its_rows():
    def model_fn(ids):
        table = tf.get_variable('table', [5, 2], tf.float64)
        return tf.reduce_mean(tf.reduce_sum(tf.gather(table, ids), 1))
    built = towers.build_towers(model_fn, np.array([0, 3, 3, 4]), sgd(), 2, 'mean')
    (combined, _), = built.gradients
    assert isinstance(combined, tf.IndexedSlices)
    indices, values = run(built, [combined.indices, combined.values])
    assert sorted(indices) == [0, 3, 3, 4]
    np.testing.assert_allclose(values, np.full([4, 2], 0.25))


# ---- checkpoints ---------------------------------------------------------------------------------

@pytest.mark.parametrize('name', ['tf.Variable', pytest.param('slim', marks=slow),
                                  pytest.param('keras', marks=slow)])
def test_checkpoints_serve_one_device_and_towers(name, tmpdir):
    """Saved by either program with tf.train.Saver, loaded by the other: same names, same loss."""
    sample = SAMPLES[name]
    arrays = sample.data(4)
    path = os.path.join(str(tmpdir), 'of-towers')
    built = towers.build_towers(sample.model_fn, arrays, tf.train.AdamOptimizer(), 2,
                                reduction='mean', regularization='add')
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run(tf.global_variables_initializer())
        session.run(built.train_op)
        tf.train.Saver().save(session, path)
        loss = session.run(built.loss)
        session.run(built.train_op)
        trained = session.run(built.variables[0])
    with tf.Graph().as_default():
        single = sample.model_fn(*[tf.constant(array) for array in arrays])
        if sample.decays:
            single += samples.l2_of_kernels(tf.trainable_variables())
        train_op = tf.train.AdamOptimizer().minimize(single)
        with tf.Session() as session:
            tf.train.Saver().restore(session, path)
            assert session.run(single) == pytest.approx(loss, rel=1e-12)
            session.run(train_op)
            kernel, = [v for v in tf.global_variables()
                       if v.op.name == built.variables[0].op.name]
            assert samples.relative_difference(session.run(kernel), trained) < 1e-12


# ---- inputs --------------------------------------------------------------------------------------

def test_inputs_of_any_structure():
    sparse = tf.SparseTensor([[0, 1], [1, 0], [3, 2], [3, 0]], [1., 2., 3., 4.], [4, 3])
    inputs = {'words': tf.constant(['a', 'b', 'a', 'c']),
              'nested': (tf.constant([1., 2., 3., 4.]), None, [tf.constant([[1], [2], [3], [4]])]),
              'sparse': sparse}
    seen = []

    def model_fn(features):
        seen.append(features)
        w = tf.get_variable('w', [3, 1], initializer=tf.ones_initializer())
        is_a = tf.cast(tf.equal(features['words'], 'a'), tf.float32)
        first, nothing, (ids,) = features['nested']
        assert nothing is None
        rows = tf.squeeze(tf.sparse.sparse_dense_matmul(features['sparse'], w), 1)
        return tf.reduce_mean(rows * is_a + first + tf.cast(ids[:, 0], tf.float32) * w[0, 0])
    built = towers.build_towers(model_fn, inputs, sgd(), 2, 'mean')
    assert sorted(seen[0]) == ['nested', 'sparse', 'words']
    loss, gradient = run(built, [built.loss, built.gradients[0][0]])
    # rows: 1, 2, 0, 7; is_a: 1, 0, 1, 0; first and ids: 1, 2, 3, 4
    assert loss == (1 + 0 + 0 + 0 + 10 + 10) / 4.
    # d/dw: rows of 'a' have a 1 at column 1; ids at column 0
    assert gradient.ravel().tolist() == [10. / 4, 1. / 4, 0.]


# ---- which variables, which gradients ------------------------------------------------------------

def test_var_list_as_a_function_and_as_a_list():
    built = towers.build_towers(
        two_layers, samples.vectors(4),
        towers.Objective(momentum(),
                         var_list=lambda every: [v for v in every if 'head' in v.op.name]), 2)
    assert names(v for _, v in built.gradients) == ['head']
    assert names(built.slots) == ['head/Momentum']
    again = towers.build_towers(two_layers,
                                samples.vectors(4),
                                towers.Objective(
                                    sgd(),
                                    var_list=[v for v in built.variables if 'body' in v.op.name]),
                                2,
                                reuse=built)
    assert names(v for _, v in again.gradients) == ['body']
    of_iterator = towers.build_towers(two_layers,
                                      samples.vectors(4),
                                      towers.Objective(sgd(),
                                                       var_list=lambda every: reversed(every)),
                                      2,
                                      reuse=built)
    assert names(v for _, v in of_iterator.gradients) == ['body', 'head']


def test_var_list_of_a_keras_model():
    model = keras.Sequential([keras.layers.Dense(3, name='a'), keras.layers.Dense(3, name='b')])
    model.build((None, 6))
    built = towers.build_towers(
        lambda x, y: samples.mean_squared_error(model(x), y), samples.vectors(4, 'float32'),
        towers.Objective(sgd(), var_list=model.layers[1].trainable_variables), 2)
    assert [v.op.name.split('/')[-2:] for _, v in built.gradients] == [['b', 'kernel'],
                                                                       ['b', 'bias']]


def clip(pairs):
    clipped, _ = tf.clip_by_global_norm([gradient for gradient, _ in pairs], 0.01)
    return list(zip(clipped, [variable for _, variable in pairs]))


def test_clipping_by_global_norm_equals_one_device():
    ours = check_against_one_device(two_layers, samples.vectors(6), transform=clip,
                                    transform_gradients=clip, reduction='mean')
    norm = np.sqrt(sum(np.sum(gradient ** 2) for gradient in ours.gradients.values()))
    assert norm == pytest.approx(0.01, rel=1e-12)


@pytest.mark.parametrize('returned', [None, [], [(None,)]])
def test_a_transformation_that_returns_something_else(returned):
    with pytest.raises(towers.InvalidArgumentError, match='transform_gradients returned'):
        towers.build_towers(two_layers, samples.vectors(6),
                            towers.Objective(sgd(), transform_gradients=lambda pairs: returned), 2)


def test_a_variable_with_a_gradient_in_some_towers_only():
    calls = []

    def model_fn(x):
        calls.append(x)
        w = tf.get_variable('w', [], tf.float64, tf.ones_initializer())
        extra = tf.get_variable('extra', [], tf.float64, tf.ones_initializer())
        return tf.reduce_mean(x * w) + (tf.reduce_mean(x * extra) if len(calls) == 2 else 0.)
    built = towers.build_towers(model_fn, np.array([1., 2., 3.]), sgd(), 3, 'mean', copies='reuse')
    gradients = dict((v.op.name, gradient) for gradient, v in built.gradients)
    np.testing.assert_allclose(run(built, [gradients['w'], gradients['extra']]), [2., 2. / 3])


# ---- optimizers and the global step --------------------------------------------------------------

class AdamWeightDecayOptimizer(tf.train.Optimizer):
    """BERT's: makes its slots with get_variable, in apply_gradients, and forgets the global step.

    Written after the description of the algorithm (Adam without bias correction, decoupled decay).
    """

    def __init__(self, rate, decay=0.01, exclude=('bias',)):
        super(AdamWeightDecayOptimizer, self).__init__(False, 'AdamWeightDecayOptimizer')
        self._rate, self._decay, self._exclude = rate, decay, exclude

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        assignments = []
        for gradient, variable in grads_and_vars:
            if gradient is None:
                continue
            m, v = [tf.get_variable(variable.op.name + '/' + slot, variable.shape.as_list(),
                                    variable.dtype.base_dtype, tf.zeros_initializer(),
                                    trainable=False) for slot in ('adam_m', 'adam_v')]
            next_m = 0.9 * m + 0.1 * gradient
            next_v = 0.999 * v + 0.001 * tf.square(gradient)
            update = next_m / (tf.sqrt(next_v) + 1e-6)
            if not any(word in variable.op.name for word in self._exclude):
                update += self._decay * variable
            assignments += [variable.assign(variable - self._rate * update), m.assign(next_m),
                            v.assign(next_v)]
        return tf.group(*assignments, name=name)


@pytest.mark.parametrize('make_optimizer, dtype', [
    (lambda: tf.train.AdamOptimizer(0.01), 'float64'),
    # float32 is all that TF has kernels for.
    pytest.param(lambda: tf.train.ProximalAdagradOptimizer(0.1), 'float32', marks=slow),
    pytest.param(lambda: tf.train.RMSPropOptimizer(0.01, centered=True), 'float64', marks=slow),
    pytest.param(lambda: tf.train.FtrlOptimizer(0.1, l2_regularization_strength=0.01), 'float64',
                 marks=slow)], ids=['adam', 'proximal adagrad', 'rmsprop', 'ftrl'])
def test_optimizers_step_as_on_one_device(make_optimizer, dtype):
    """On an embedding, so that dense and sparse gradients are applied, and slots of both kinds."""
    check_against_one_device(samples.embedding, samples.tokens(6, dtype), make_optimizer,
                             reduction='mean', tolerance=1e-5 if dtype == 'float32' else 1e-11)


@pytest.mark.parametrize('make_optimizer, counts', [
    (lambda: AdamWeightDecayOptimizer(0.01), True), (sgd, False)])
def test_the_plan_says_who_counts_the_steps(make_optimizer, counts):
    built = towers.build_towers(linear, samples.vectors(6), make_optimizer(), 2,
                                numerics=towers.Numerics(loss_scale=towers.LossScale()),
                                global_step=tf.train.create_global_step())
    assert ('global step      counted here' in str(built.plan)) == counts
    assert (built.plan.line('global step') is not None) == counts


def loss_scaling(optimizer):
    return tf.train.experimental.MixedPrecisionLossScaleOptimizer(optimizer, 'dynamic')


@pytest.mark.parametrize('make', [
    sgd, pytest.param(lambda: AdamWeightDecayOptimizer(0.1), marks=slow),
    lambda: loss_scaling(AdamWeightDecayOptimizer(0.1))],
    ids=['sgd', 'forgets it', 'loss scaling, forgets it'])
def test_the_global_step_goes_up_by_one(make):
    step = tf.train.get_or_create_global_step()
    optimizer = make()
    built = towers.build_towers(linear, samples.vectors(4, 'float32'), optimizer, 2,
                                global_step=step)
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run(tf.global_variables_initializer())
        for expected in (1, 2):
            session.run(built.train_op)
            assert session.run(step) == expected


def test_a_step_that_loss_scaling_skips_is_not_counted():
    step = tf.train.get_or_create_global_step()
    x, y = tf.placeholder(tf.float32, [4, 6]), tf.placeholder(tf.float32, [4, 3])
    built = towers.build_towers(linear, (x, y), loss_scaling(sgd()), 2, global_step=step)
    arrays = samples.vectors(4, 'float32')
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run(tf.global_variables_initializer())
        session.run(built.train_op, {x: arrays[0], y: arrays[1]})
        session.run(built.train_op, {x: arrays[0] * np.inf, y: arrays[1]})
        assert session.run(step) == 1
        assert np.all(np.isfinite(session.run(built.variables[0])))


# ---- evaluation ----------------------------------------------------------------------------------

def classifier(x):
    kernel = tf.get_variable('kernel', [2, 3], initializer=tf.ones_initializer())
    scale = tf.Variable(2., name='scale')
    logits = tf.matmul(x, kernel) * scale
    return {'loss': tf.reduce_mean(logits),
            'predictions': {'logits': logits, 'count': tf.shape(x)[0], 'first': x[:, 0]}}


def test_predictions_come_back_in_batch_order_for_any_batch():
    """Also with a short last batch, and with fewer examples than towers."""
    trained = towers.build_towers(classifier, np.ones([4, 2], 'float32'), sgd(), 2)
    x = tf.placeholder(tf.float32, [None, 2])
    evaluated = towers.build_towers(classifier, x, None, 3, reuse=trained,
                                    remainder='weight')
    assert evaluated.train_op is None and evaluated.gradients == [] == evaluated.slots
    assert evaluated.variables == trained.variables
    assert len(tf.global_variables()) == 2
    for count in (7, 1):
        batch = np.arange(2. * count).reshape(count, 2)
        values, loss = run(evaluated, [evaluated.predictions, evaluated.loss], {x: batch})
        expected = 2 * batch @ np.ones([2, 3])
        assert values['logits'].tolist() == expected.tolist()
        assert values['first'].tolist() == batch[:, 0].tolist()
        base, more = divmod(count, 3)
        assert values['count'].tolist() == [
            base + (tower < more) for tower in range(min(3, count))]
        assert loss == pytest.approx(expected.mean(), rel=1e-6)  # no NaN of an empty shard
    assert evaluated.predictions['logits'].device == '/device:CPU:0'


def test_evaluation_may_use_part_of_the_variables_and_counters_of_its_own():
    def model_fn(x, training):
        main = tf.Variable(2., name='main')
        out = {'loss': tf.reduce_mean(main * x)}
        if training:
            auxiliary = tf.Variable(5., name='auxiliary')
            out['loss'] += tf.reduce_mean(auxiliary * x)
        else:
            out['metrics'] = {'mean': tf.metrics.mean(main * x)}
        return out
    x = np.arange(4, dtype='float32')
    built = towers.build_towers(lambda x: model_fn(x, True), x, sgd(), 2)
    evaluated = towers.build_towers(lambda x: model_fn(x, False), x, None, 2, reuse=built)
    third = towers.build_towers(lambda x: model_fn(x, False), x, None, 2, reuse=evaluated)
    assert names(tf.trainable_variables()) == ['auxiliary', 'main']
    with tf.Session(config=towers.session_config(2)) as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        session.run(evaluated.metrics['mean'][1])
        assert session.run([evaluated.metrics['mean'][0], third.metrics['mean'][0]]) == [3., 0.]


# ---- metrics -------------------------------------------------------------------------------------

def test_metrics_share_their_counters():
    def model_fn(x, label):
        w = tf.get_variable('w', [], initializer=tf.ones_initializer())
        guess = tf.cast(x * w > 0.5, tf.int64)
        return {'loss': tf.reduce_mean(w * x), 'metrics': {
            'accuracy': tf.metrics.accuracy(label, guess), 'mean': tf.reduce_mean(x)}}
    x = tf.placeholder(tf.float32, [None])
    label = tf.placeholder(tf.int64, [None])
    built = towers.build_towers(model_fn, (x, label), sgd(0.), 3, remainder='weight')
    assert len(tf.local_variables()) == 2
    value, update = built.metrics['accuracy']
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        session.run(update, {x: [0., 1., 0., 1.], label: [0, 1, 1, 1]})
        session.run(update, {x: [0., 1., 0.], label: [1, 0, 0]})
        assert session.run(value) == pytest.approx(4 / 7.)
        assert session.run(built.metrics['mean'], {x: [1., 2., 3., 10.], label: [0] * 4}) == 4.
    assert not towers.audit(built).broken


# ---- errors --------------------------------------------------------------------------------------

def makes_a_variable(x, y):
    return tf.reduce_mean(x) * tf.reduce_sum(tf.Variable(tf.zeros([2], tf.float64), name='a'))


def with_scopes_that_count_calls():
    calls = []

    def model_fn(x, y):
        calls.append(1)
        with tf.variable_scope('call_%d' % len(calls)):
            return linear(x, y)
    return model_fn


VECTORS = samples.vectors(4)
MISUSES = [
    ('batch 10 on 4 towers', towers.InputError,
     'batch of 10 does not divide among 4 towers.*batch of (8|12)',
     dict(inputs=samples.vectors(10), devices=4)),
    ('absent gpu', towers.DeviceError, '/gpu:7 does not exist.*check=False',
     dict(devices=['/gpu:7', '/cpu:0'])),
    ('a tf.Variable a call', towers.SharedVariableError,
     "tower 1 makes variable 'a'.*copies='clone'",
     dict(model_fn=lambda: makes_a_variable, copies='reuse')),
    ('names that count calls', towers.SharedVariableError,
     "tower 1 makes variable 'call_2/kernel'.*copies='clone'",
     dict(model_fn=with_scopes_that_count_calls, copies='reuse')),
    ('wrong arguments', towers.ModelFunctionError, 'cannot take the inputs',
     dict(model_fn=lambda: lambda x: tf.reduce_mean(x))),
    ('no model function', towers.ModelFunctionError, 'cannot be called',
     dict(model_fn=lambda: 'net')),
    ('no variable', towers.GradientError, 'no trainable variable.*optimizer=None',
     dict(model_fn=lambda: lambda x, y: tf.reduce_mean(x))),
    ('no gradient', towers.GradientError, 'none of the 1 variables has a gradient',
     dict(model_fn=lambda: lambda x, y: tf.stop_gradient(linear(x, y)))),
    ('var_list leaves none', towers.GradientError, 'left by var_list: the choices were kernel',
     dict(optimizer=lambda: towers.Objective(sgd(), lambda every: []))),
    ('variables on a GPU that is not there', towers.DeviceError, '/gpu:6 does not exist: ',
     dict(variables=towers.VariablePlacement('/gpu:6'))),
    ('var_list of names', towers.InvalidArgumentError, "var_list holds 'kernel' of type str",
     dict(optimizer=lambda: towers.Objective(sgd(), ['kernel']))),
    ('var_list returns None', towers.InvalidArgumentError, 'var_list returned None',
     dict(optimizer=lambda: towers.Objective(sgd(), lambda every: None))),
    ('loss without the shard', towers.ModelFunctionError, 'does not depend on its shard',
     dict(model_fn=lambda: lambda x, y: linear(tf.constant(VECTORS[0]), tf.constant(VECTORS[1])))),
    ('Keras optimizer', towers.InvalidArgumentError, 'tf.train.Optimizer.*Keras',
     dict(optimizer=lambda: keras.optimizers.SGD(0.1))),
    ('reduction', towers.InvalidArgumentError, "'avg': expected one of 'sum', 'mean'",
     dict(reduction='avg')),
    ('remainder', towers.InvalidArgumentError, "expected one of 'error', 'weight', 'drop'",
     dict(remainder='pad')),
    ('copies', towers.InvalidArgumentError, "'copy': expected one of 'clone', 'reuse'",
     dict(copies='copy')),
    ('regularization', towers.InvalidArgumentError, "expected one of 'none', 'add'",
     dict(regularization=None)),
    ('transform', towers.InvalidArgumentError, 'a function from .gradient, variable. pairs',
     dict(optimizer=lambda: towers.Objective(sgd(), transform_gradients=[]))),
]


@pytest.mark.parametrize('error, text, misuse', [each[1:] for each in MISUSES],
                         ids=[each[0] for each in MISUSES])
def test_misuse_is_one_typed_line_and_leaves_no_trace(error, text, misuse):
    arguments = dict(model_fn=lambda: linear, inputs=VECTORS, optimizer=sgd, devices=2)
    arguments.update(misuse)
    for name in ('model_fn', 'inputs'):
        if callable(arguments[name]):
            arguments[name] = arguments[name]()
    before = tf.global_variables()
    with pytest.raises(error, match=text) as caught:
        arguments['optimizer'] = arguments['optimizer']()
        before = tf.global_variables()  # a Keras optimizer makes some
        towers.build_towers(**arguments)
    assert isinstance(caught.value, towers.TowersError)
    assert '\n' not in str(caught.value) and len(str(caught.value)) < 450
    assert tf.global_variables() == before and not tf.trainable_variables()


def test_a_second_build_has_name_scopes_of_its_own():
    scopes = [towers.build_towers(linear, VECTORS, sgd(), 2, reuse=reuse).towers[1].name_scope
              for reuse in (None, True)]
    with tf.name_scope('around'):
        scopes.append(towers.build_towers(linear, VECTORS, sgd(), 2, reuse=True)
                      .towers[1].name_scope)
    assert scopes == ['tower_1/', 'build_2/tower_1/', 'around/tower_1/']


def test_eager_mode():
    with tf.init_scope():  # out of the graph of this test
        if not tf.executing_eagerly():
            pytest.skip('TF 1.15 runs eagerly only for the whole process')
        with pytest.raises(towers.InvalidArgumentError, match=r'tf\.Graph\(\)\.as_default'):
            towers.build_towers(linear, VECTORS, sgd(), 2)


def test_one_tower_is_one_device():
    check_against_one_device(samples.slim_layers, samples.vectors(5), num_towers=1,
                             penalty=samples.l2_of_kernels)


def test_the_first_tower_has_the_names_of_one_device():
    def model_fn(x):
        with tf.variable_scope('layer'):
            w = tf.get_variable('w', [], tf.float64, tf.ones_initializer())
        mean = tf.Variable(0., trainable=False, name='mean', dtype=tf.float64)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign(mean, tf.reduce_mean(x)))
        return tf.reduce_mean(tf.square(tf.multiply(x, w, name='product')))
    with tf.name_scope('around'):
        built = towers.build_towers(model_fn, np.array([1., 2., 3., 4.]),
                                    tf.train.GradientDescentOptimizer(0.125), 2, 'mean')
    graph = tf.get_default_graph()
    assert graph.get_operation_by_name('around/product').device == '/device:CPU:0'
    assert graph.get_operation_by_name('around/tower_1/product').device == '/device:CPU:1'
    assert [v.op.name for v in tf.global_variables()] == ['layer/w', 'around/mean']
    assert [tower.name_scope for tower in built.towers] == ['around/', 'around/tower_1/']
    with tf.Session(config=towers.session_config(2)) as session:
        session.run(tf.global_variables_initializer())
        session.run(built.train_op)
        assert session.run(built.variables) == [1. - 0.125 * 2 * 7.5, 1.5]
    assert not towers.audit(built).broken
    towers.compat.set_device(graph.get_operation_by_name('around/product'), '/device:CPU:1')
    broken, = towers.audit(built).broken
    assert '1 operation of tower 0 off /cpu:0: around/product on /cpu:1' in broken
