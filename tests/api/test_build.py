"""`build_towers` against plain TF1 on one device, and against numbers worked out by hand."""

import contextlib
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


# ---- the gradient, against one device ------------------------------------------------------------

@pytest.mark.slow
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


# ---- checkpoints ---------------------------------------------------------------------------------

@pytest.mark.parametrize('name, device', [
    ('tf.Variable', 'replicated'), pytest.param('tf.Variable', None, marks=slow),
    pytest.param('slim', None, marks=slow), pytest.param('keras', None, marks=slow)])
def test_checkpoints_serve_one_device_and_towers(name, device, tmpdir):
    """Saved by either program with tf.train.Saver, loaded by the other: same names, same loss."""
    sample = SAMPLES[name]
    arrays = sample.data(4)
    path = os.path.join(str(tmpdir), 'of-towers')
    built = towers.build_towers(sample.model_fn, arrays, tf.train.AdamOptimizer(), 2,
                                reduction='mean', regularization='add',
                                variables=towers.VariablePlacement(device))
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
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


# ---- which variables, which gradients ------------------------------------------------------------

def test_var_list_as_a_function_and_as_a_list():
    built = towers.build_towers(
        two_layers, samples.vectors(4),
        towers.Objective(momentum(),
                         var_list=lambda every: [v for v in every if 'head' in v.op.name]), 2)
    assert names(v for _, v in built.gradients) == ['head']
    assert names(built.slots) == ['head/Momentum']
    again = towers.build_towers(two_layers, samples.vectors(4), towers.Objective(
        sgd(), [v for v in built.variables if 'body' in v.op.name]), 2, reuse=built)
    assert names(v for _, v in again.gradients) == ['body']
    of_iterator = towers.build_towers(two_layers, samples.vectors(4), towers.Objective(
        sgd(), lambda every: reversed(every)), 2, reuse=built)
    assert names(v for _, v in of_iterator.gradients) == ['body', 'head']


def clip(pairs):
    clipped, _ = tf.clip_by_global_norm([gradient for gradient, _ in pairs], 0.01)
    return list(zip(clipped, [variable for _, variable in pairs]))


@pytest.mark.slow
def test_clipping_by_global_norm_equals_one_device():
    ours = check_against_one_device(two_layers, samples.vectors(6), transform=clip,
                                    transform_gradients=clip, reduction='mean')
    norm = np.sqrt(sum(np.sum(gradient ** 2) for gradient in ours.gradients.values()))
    assert norm == pytest.approx(0.01, rel=1e-12)


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


def loss_scaling(optimizer):
    return tf.train.experimental.MixedPrecisionLossScaleOptimizer(optimizer, 'dynamic')


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


@pytest.mark.slow
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
        assert values['count'] == count
        assert loss == pytest.approx(expected.mean(), rel=1e-6)  # no NaN of an empty shard
    assert evaluated.predictions['logits'].device == '/device:CPU:0'


# ---- errors --------------------------------------------------------------------------------------

def makes_a_variable(x, y):
    return tf.reduce_mean(x) * tf.reduce_sum(tf.Variable(tf.zeros([2], tf.float64), name='a'))


class ReturnsNoPairs(tf.train.GradientDescentOptimizer):
    def compute_gradients(self, loss, var_list=None):
        return tf.gradients(loss, var_list)


class ReturnsNoOperation(tf.train.GradientDescentOptimizer):
    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        return None


def of_another_graph():
    with tf.Graph().as_default():
        return tf.get_variable('other', [])


VECTORS = samples.vectors(4)
MISUSES = [
    ('a variable a call', towers.SharedVariableError,
     "makes variable 'tower_0/a' without tf.get_variable.*copies='clone'",
     dict(model=lambda: makes_a_variable, copies='reuse')),
    ('wrong arguments', towers.ModelFunctionError, 'cannot take the inputs',
     dict(model=lambda: lambda x: tf.reduce_mean(x))),
    ('no model function', towers.ModelFunctionError, 'cannot be called',
     dict(model=lambda: 'net')),
    ('no variable', towers.GradientError, 'no trainable variable.*optimizer=None',
     dict(model=lambda: lambda x, y: tf.reduce_mean(x))),
    ('no gradient', towers.GradientError, 'none of the 1 variables has a gradient',
     dict(model=lambda: lambda x, y: tf.stop_gradient(linear(x, y)))),
    ('var_list leaves none', towers.GradientError, 'left by var_list: the choices were kernel',
     dict(optimizer=lambda: towers.Objective(sgd(), lambda every: []))),
    ('var_list of names', towers.InvalidArgumentError, "var_list holds 'kernel' of type str",
     dict(optimizer=lambda: towers.Objective(sgd(), ['kernel']))),
    ('var_list returns None', towers.InvalidArgumentError, 'var_list returned None',
     dict(optimizer=lambda: towers.Objective(sgd(), lambda every: None))),
    ('a variable twice', towers.InvalidArgumentError, "var_list holds 'kernel' twice",
     dict(optimizer=lambda: towers.Objective(sgd(), lambda every: every * 2))),
    ('a variable of another graph', towers.InvalidArgumentError,
     "var_list holds 'other', which belongs to another graph",
     dict(optimizer=lambda: towers.Objective(sgd(), [of_another_graph()]))),
    ('no pairs', towers.GradientError, 'ReturnsNoPairs returned .*a list of .gradient, variable.',
     dict(optimizer=lambda: ReturnsNoPairs(1.))),
    ('no operation', towers.InvalidArgumentError, 'returned None: expected the operation',
     dict(optimizer=lambda: ReturnsNoOperation(1.))),
    ('loss without the shard', towers.ModelFunctionError, 'does not depend on its shard',
     dict(model=lambda: lambda x, y: linear(tf.constant(VECTORS[0]), tf.constant(VECTORS[1])))),
    ('Keras optimizer', towers.InvalidArgumentError, 'tf.train.Optimizer.*Keras',
     dict(optimizer=lambda: keras.optimizers.SGD(0.1))),
    ('reduction', towers.InvalidArgumentError, "'avg': expected one of 'sum', 'mean'",
     dict(reduction='avg'))]


@pytest.mark.parametrize('error, text, misuse', [each[1:] for each in MISUSES],
                         ids=[each[0] for each in MISUSES])
def test_misuse_is_one_typed_line_and_leaves_no_trace(error, text, misuse):
    arguments = dict(model=lambda: linear, inputs=VECTORS, optimizer=sgd, devices=2)
    arguments.update(misuse)
    for name in ('model', 'inputs'):
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


@pytest.mark.parametrize('call', [
    lambda build: tf.cond(tf.placeholder_with_default(True, []), build, lambda: tf.constant(0.)),
    lambda build: tf.while_loop(lambda i: i < 2., lambda i: i + build(), [tf.constant(0.)]),
    lambda build: tf.data.Dataset.range(3).map(
        tf.autograph.experimental.do_not_convert(lambda _: build()))])
@pytest.mark.parametrize('control_flow_v2', [False, True])
def test_a_build_within_a_branch_a_loop_or_a_function_is_refused(call, control_flow_v2, graph):
    def build():
        return towers.build_towers(lambda x: tf.reduce_mean(x * tf.get_variable('w', [2])),
                                   tf.zeros([4, 2]), tf.train.GradientDescentOptimizer(.1), 2).loss
    with samples.switched('control_flow_v2', control_flow_v2), pytest.raises(
            towers.InvalidArgumentError, match='^build_towers is called within a branch, a loop,'):
        call(build)


def test_a_build_beside_another_operation_is_refused(graph):
    with tf.colocate_with(tf.constant(0.)), pytest.raises(
            towers.InvalidArgumentError, match='^build_towers is called within tf.colocate_with'):
        towers.build_towers(samples.slope, tf.zeros([4], tf.float64), None, 2)


def test_a_rate_of_another_graph_is_refused(graph):
    with tf.Graph().as_default():
        optimizer = tf.train.GradientDescentOptimizer(tf.constant(.1, name='rate'))
    with pytest.raises(towers.InvalidArgumentError,
                       match="the learning rate of 'GradientDescentOptimizer' is 'rate:0', which "
                             'belongs to another graph'):
        towers.build_towers(linear, VECTORS, optimizer, 2)
    assert not graph.get_operations()


def test_methods_of_what_a_build_returns_check_their_arguments():
    built = towers.build_towers(linear, VECTORS, sgd(), 2)
    for call, text in [
            (lambda: built.towers[1].has(3), 'name=3 of type int'),
            (lambda: built.towers[1].own(['w']), "an operation='w' of type str"),
            (lambda: built.placement.scope_of('w'), "variable='w' of type str")]:
        with pytest.raises(towers.InvalidArgumentError, match=text):
            call()


def test_a_second_build_has_name_scopes_of_its_own():
    scopes = [towers.build_towers(linear, VECTORS, sgd(), 2, reuse=reuse).towers[1].name_scope
              for reuse in (None, True)]
    with tf.name_scope('around'):
        scopes.append(towers.build_towers(linear, VECTORS, sgd(), 2, reuse=True)
                      .towers[1].name_scope)
    assert scopes == ['tower_1/', 'build_2/tower_1/', 'around/tower_1/']


@pytest.mark.slow
def test_one_tower_is_one_device():
    check_against_one_device(samples.slim_layers, samples.vectors(5), num_towers=1,
                             penalty=samples.l2_of_kernels)


def unnamed(x, size):
    with tf.variable_scope(None, 'dense'):
        return tf.matmul(x, tf.get_variable('w', [x.shape[1], size]))


def unnamed_layers(x):
    return tf.reduce_mean(unnamed(unnamed(x, 3), 1))


@pytest.mark.parametrize('scope', ['model', pytest.param(None, marks=slow)])
def test_scopes_without_a_name_are_numbered_as_in_the_earlier_build(scope):
    x = tf.stop_gradient(unnamed(tf.ones([4, 2]), 3))  # before the model, and of its names
    with tf.variable_scope(scope) if scope else contextlib.nullcontext():
        built = towers.build_towers(unnamed_layers, (x,), towers.Objective(
            tf.train.GradientDescentOptimizer(0.1), var_list=lambda made: made[1:]), 2)
    known = tf.trainable_variables()
    for name in ('test', 'again'):
        tested = towers.build_towers(unnamed_layers, (x,), None, 2, reuse=built)
        assert tested.variables == known[1:]
    assert tf.trainable_variables() == known
    # What the program makes next has the number that it has without towers.
    unnamed(x, 1)
    assert tf.trainable_variables()[-1].op.name == 'dense_%d/w' % (3 if scope is None else 1)
