"""`replicate_model_fn`: by hand, against one device, and against contrib's where that is there."""

import functools

from estimator_runs import EVAL, needs_estimator, PREDICT, TRAIN, TWO
import numpy as np
import pytest
from sample_models import switched
import tensorflow.compat.v1 as tf

import towers
from towers import TowerOptimizer, replicate_model_fn, compat

HAS_ESTIMATOR = compat.has_estimator()
Reduction = tf.losses.Reduction
FEATURES = {'features': np.array([[1.], [2.]])}
LABELS = np.array([[1.], [2.]])


@pytest.mark.skipif(HAS_ESTIMATOR, reason='this TensorFlow has Estimator')
def test_without_estimator_one_line_says_so():
    with pytest.raises(towers.MissingPackageError) as raised:
        replicate_model_fn(model_fn)
    assert str(raised.value) == (
        'TensorFlow %s has no tf.estimator, which was removed in 2.16: give the loss of the model '
        'function to towers.build_towers, or use TensorFlow 1.15 or 2.15.' % tf.version.VERSION)


def model_fn(mode, features, labels, params):
    c = tf.get_variable('c', [], tf.float64, tf.constant_initializer(10.))
    predictions = tf.multiply(features['features'], c, name='predictions')
    loss = metrics = None
    if labels is not None:
        loss = tf.reduce_sum(tf.abs(predictions - labels))
        metrics = {'error': tf.metrics.mean_absolute_error(labels, predictions),
                   'auc': tf.metrics.auc(tf.equal(labels, 1.), tf.minimum(predictions / 20, 1.))}
    optimizer = TowerOptimizer(tf.train.GradientDescentOptimizer(params['learning_rate']))
    return tf.estimator.EstimatorSpec(
        mode, predictions={'probabilities': predictions}, loss=loss, eval_metric_ops=metrics,
        train_op=None if loss is None else optimizer.minimize(loss, tf.train.get_global_step()))


PARAMS = {'learning_rate': 1.}


def session(devices=TWO):
    result = tf.Session(config=towers.session_config(devices))
    result.run([tf.global_variables_initializer(), tf.local_variables_initializer(),
                tf.tables_initializer()])
    return result


@needs_estimator
@pytest.mark.parametrize('reduction, loss, after', [
    ([], 13.5, 8.5), ([Reduction.SUM], 27., 7.)])
def test_training_by_hand(graph, reduction, loss, after):
    plans = []
    spec = replicate_model_fn(
        model_fn, *reduction, devices=TWO, on_built=lambda mode, built: plans.append(built.plan))(
            FEATURES, LABELS, TRAIN, PARAMS)
    assert [plan.reduction for plan in plans] == [
        'sum' if reduction == [Reduction.SUM] else 'mean']
    c = tf.global_variables()[0]
    assert c.device == '/device:CPU:0'
    with session() as running:
        assert running.run(spec.loss) == loss
        running.run(spec.train_op)
        assert running.run(c) == after
        # Operations of the first tower have their own names.
        assert running.run('predictions:0').tolist() == [[after]]
        assert running.run(spec.predictions['probabilities']).tolist() == [[after], [2 * after]]
    assert graph.get_operation_by_name('tower_1/predictions').device == '/device:CPU:1'


@needs_estimator
def test_evaluation_counts_over_all_towers():
    features, labels = np.arange(1., 6.)[:, None], np.array([1., 2., 1., 3., 1.])[:, None]
    with tf.Graph().as_default():
        one = model_fn(EVAL, {'features': tf.constant(features)}, tf.constant(labels), PARAMS)
        with session(1) as running:
            running.run([update for _, update in one.eval_metric_ops.values()])
            expected = running.run(
                {name: value for name, (value, _) in one.eval_metric_ops.items()})
    spec = replicate_model_fn(model_fn, Reduction.SUM, TWO)(
        {'features': features}, labels, EVAL, PARAMS)
    assert len(tf.local_variables()) == 2 + 4
    with session() as running:
        for _ in range(2):
            running.run([update for _, update in spec.eval_metric_ops.values()])
        found = running.run({name: value for name, (value, _) in spec.eval_metric_ops.items()})
        assert running.run(spec.loss) == np.abs(10 * features - labels).sum()
    assert found == pytest.approx(expected, rel=1e-6)


@needs_estimator
def test_arguments_go_to_those_that_take_them():
    def spec(features, mode=PREDICT):
        return tf.estimator.EstimatorSpec(mode, predictions=features * tf.get_variable(
            'w', [], tf.float64))
    given = []

    def takes_all(features, labels, mode, params, config):
        given.append((mode, params.pop('size'), config))
        return spec(features, mode)

    def takes_more(features, first, labels, params=None):
        given.append((first, params))
        return spec(features)

    class Model:
        def __call__(self, features, mode, **kwargs):
            given.append(sorted(kwargs))
            return spec(features, mode)
    params = {'size': 3}
    for function in (takes_all, functools.partial(takes_more, first=1), Model()):
        with tf.Graph().as_default():
            replicate_model_fn(function, Reduction.SUM, TWO)(np.ones(2), None, PREDICT, params, 'c')
    assert given == [(PREDICT, 3, 'c'), (1, params), ['labels']]
    assert params == {'size': 3}


@needs_estimator
def test_hooks_and_scaffold_are_those_of_the_model_function():
    kinds = ['training_hooks', 'training_chief_hooks', 'evaluation_hooks', 'prediction_hooks']
    hooks = {kind: [tf.train.SessionRunHook()] for kind in kinds}
    scaffold = tf.train.Scaffold()

    def with_hooks(features, labels, mode):
        return model_fn(mode, features, labels, PARAMS)._replace(scaffold=scaffold, **hooks)
    for mode in (TRAIN, EVAL, PREDICT):
        with tf.Graph().as_default():
            spec = replicate_model_fn(with_hooks, devices=TWO)(FEATURES, LABELS, mode)
        assert spec.scaffold is scaffold and spec.mode == mode
        assert all(list(getattr(spec, kind)) == hooks[kind] for kind in kinds)


@needs_estimator
def test_export_outputs_are_merged():
    kinds = tf.estimator.export

    def exports(features, mode):
        w = tf.get_variable('w', [], tf.float64, tf.ones_initializer())
        values = features * w
        return tf.estimator.EstimatorSpec(mode, predictions=values, export_outputs={
            'predict': kinds.PredictOutput({'values': values, 'size': tf.shape(values)[0]}),
            'regression': kinds.RegressionOutput(values),
            'classification': kinds.ClassificationOutput(
                scores=values, classes=tf.as_string(values, precision=0)),
            'classes': kinds.ClassificationOutput(classes=tf.as_string(values, precision=0)),
            'serving_default': kinds.PredictOutput(values)})
    spec = replicate_model_fn(exports, devices=TWO)(np.arange(3.), None, PREDICT)
    outputs = spec.export_outputs
    with session() as running:
        assert running.run(spec.predictions).tolist() == [0., 1., 2.]
        assert {name: each.tolist() for name, each in running.run(
            outputs['predict'].outputs).items()} == {'values': [0., 1., 2.], 'size': 3}
        assert running.run(outputs['regression'].value).tolist() == [0., 1., 2.]
        assert running.run(outputs['classification'].scores).tolist() == [0., 1., 2.]
        assert running.run(outputs['classification'].classes).tolist() == [b'0', b'1', b'2']
        assert outputs['classes'].scores is None
        served = list(outputs['serving_default'].outputs.values())
        assert running.run(served)[0].tolist() == [0, 1, 2]


@needs_estimator
def test_plan_and_audit_know_the_optimizers_of_the_model_function():
    def two_optimizers(features, labels, mode):
        weights = [tf.get_variable(name, []) for name in 'ab']
        loss = tf.reduce_sum(features['features'] * weights[0] * weights[1])
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=tf.group(*[
            TowerOptimizer(make(0.5)).minimize(loss, var_list=[weight]) for make, weight in zip(
                [tf.train.AdamOptimizer, tf.train.GradientDescentOptimizer], weights)]))
    found = []
    replicate_model_fn(two_optimizers, devices=TWO, on_built=lambda *each: found.append(each))(
        {'features': np.ones(4, np.float32)}, np.ones(4), TRAIN)
    (mode, built), = found
    plan = ' '.join(str(built.plan).split())
    assert mode == TRAIN and [v.op.name for _, v in built.gradients] == ['a', 'b']
    assert 'optimizer AdamOptimizer, GradientDescentOptimizer ' in plan
    assert 'learning rate 0.5 ' in plan and 'OptimizerCalls' not in plan
    assert "reduction mean: the gradient of the batch's mean loss" in plan
    assert not towers.audit(built).broken


@needs_estimator
@pytest.mark.parametrize('size, loss, text', [
    (None, tf.reduce_mean, 'not proven: the loss is a mean over the examples, and the towers add up '
     'the means of shards of different sizes; pass tf.losses.Reduction.MEAN, or return the sum over '
     'the examples'),
    (4, tf.reduce_mean, 'the update takes 2 times its gradient'),
    (None, tf.reduce_sum, 'proven: the loss is a sum over the examples, and the towers add up')])
def test_of_added_losses_sums_alone_are_proven_for_shards_of_different_sizes(size, loss, text):
    def one_weight(features, labels, mode):
        mean_or_sum = loss(tf.get_variable('w', []) * features['x'])
        return tf.estimator.EstimatorSpec(mode, loss=mean_or_sum, train_op=TowerOptimizer(
            tf.train.GradientDescentOptimizer(.5)).minimize(mean_or_sum))
    lines = []
    replicate_model_fn(
        one_weight, tf.losses.Reduction.SUM, TWO,
        on_built=lambda mode, built: lines.append(built.plan.line('one device')))(
            {'x': tf.placeholder(tf.float32, [size])}, None, TRAIN)
    assert text in lines[0]


@needs_estimator
def test_another_call_has_scopes_of_its_own(graph):
    build = replicate_model_fn(model_fn, devices=TWO)
    with tf.variable_scope('', reuse=tf.AUTO_REUSE):
        specs = [build(FEATURES, LABELS, mode, PARAMS) for mode in (TRAIN, EVAL)]
    assert len(tf.global_variables()) == 1
    assert any(op.name.startswith('build_2/tower_1/') for op in graph.get_operations())
    assert tf.train.export_meta_graph(graph=graph)
    with session() as running:
        running.run(specs[0].train_op)
        assert running.run(specs[1].loss) == (8.5 - 1) * 3 / 2


@needs_estimator
@pytest.mark.parametrize('arguments, error, text', [
    (dict(loss_reduction=Reduction.NONE), towers.InvalidArgumentError,
     "loss_reduction='none': expected one of 'weighted_mean', 'weighted_sum', "),
    (dict(loss_reduction=None), towers.InvalidArgumentError, 'loss_reduction=None: expected'),
    (dict(devices='/cpu:0+/cpu:1,/cpu:2+/cpu:3'), towers.DeviceError,
     r'replicate_model_fn: /cpu:0\+/cpu:1 is one tower on 2 devices'),
    (dict(devices=['/cpu:0', '/cpu:0']), towers.DeviceError, 'a device of its own, or pass'),
    (dict(model_fn=3), towers.ModelFunctionError, 'model_fn=3 cannot be called'),
    (dict(model_fn=lambda x: x), towers.ModelFunctionError, 'takes no argument features')])
def test_bad_arguments(graph, arguments, error, text):
    with pytest.raises(error, match=text):
        replicate_model_fn(**dict(dict(model_fn=model_fn), **arguments))
    assert not graph.get_operations()


@needs_estimator
@pytest.mark.parametrize('function, arguments, error, text', [
    (model_fn, (FEATURES, LABELS, 'training', PARAMS), towers.InvalidArgumentError,
     "mode='training': expected one of 'eval', 'infer', 'train'"),
    (lambda features: None, (FEATURES, None, PREDICT), towers.ModelFunctionError,
     'returned None of type NoneType: expected a tf.estimator.EstimatorSpec'),
    (lambda features: None, (FEATURES, LABELS, PREDICT), towers.InvalidArgumentError,
     'takes no labels'),
    (model_fn, ({'features': np.ones([3, 1])}, LABELS, TRAIN, PARAMS), towers.InputError,
     'first dimensions of the inputs differ'),
    (HAS_ESTIMATOR and replicate_model_fn(model_fn, devices=TWO),
     (FEATURES, LABELS, PREDICT, PARAMS), towers.ModelFunctionError, 'or a function of replicate_'),
    (model_fn, ({'features': np.ones([2, 1]), 'rate': 0.5}, LABELS, TRAIN, PARAMS),
     towers.InputError, r"^inputs\['features'\]\['rate'\] is a scalar")])
def test_bad_calls(function, arguments, error, text):
    with pytest.raises(error, match=text):
        replicate_model_fn(function, devices=TWO)(*arguments)


@needs_estimator
@pytest.mark.parametrize('called, made, text', [
    (TRAIN, PREDICT, "mode 'train' and returned an EstimatorSpec of mode 'infer' without loss and"),
    (PREDICT, EVAL, "mode 'infer' and returned an EstimatorSpec of mode 'eval' without predictio"),
    (TRAIN, EVAL, "mode 'train' and returned an EstimatorSpec of mode 'eval' without train_op")])
def test_a_spec_of_another_mode(called, made, text):
    def of_one_mode(features):
        features = tf.convert_to_tensor(features)
        loss = tf.reduce_mean(features * tf.get_variable('w', [], tf.float64))
        TowerOptimizer(tf.train.GradientDescentOptimizer(1.)).minimize(loss)
        return tf.estimator.EstimatorSpec(
            made, **({'predictions': features} if made == PREDICT else {'loss': loss}))
    with pytest.raises(towers.ModelFunctionError, match=text):
        replicate_model_fn(of_one_mode, devices=TWO)(np.ones([2, 1]), None, called)


# ---- an Estimator's own loop ---------------------------------------------------------------------

NUMBERS = np.random.RandomState(0)
X = NUMBERS.randn(23, 5)
Y = NUMBERS.randint(3, size=23)


def network(features, labels, mode, params):
    logits = features['x']
    numbers = np.random.RandomState(1)
    for layer, width in enumerate([4, 3]):
        with tf.variable_scope('layer_%d' % layer):
            shape = [logits.shape.as_list()[-1], width]
            w = tf.get_variable('w', shape, tf.float64, tf.constant_initializer(
                numbers.randn(*shape)))
            b = tf.get_variable('b', [width], tf.float64, tf.zeros_initializer())
            logits = tf.tanh(tf.matmul(logits, w) + b)
    predictions = {'class': tf.argmax(logits, 1), 'logits': logits}
    if mode == PREDICT:
        return tf.estimator.EstimatorSpec(mode, predictions, export_outputs={
            'serving_default': tf.estimator.export.PredictOutput(predictions)})
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(
        logits=logits, labels=labels), name='cross_entropy')
    wrapped = params['wrapper'] if params else TowerOptimizer
    with tf.variable_scope('training'):
        train_op = wrapped(tf.train.MomentumOptimizer(0.125, 0.5)).minimize(
            loss, tf.train.get_global_step())
    # A saver of all variables, made by the model function, has the optimizer's.
    scaffold = tf.train.Scaffold(saver=tf.train.Saver()) if mode == TRAIN else None
    return tf.estimator.EstimatorSpec(mode, predictions, loss, train_op, eval_metric_ops={
        'accuracy': tf.metrics.accuracy(labels, predictions['class'])}, scaffold=scaffold)


def input_fn(size=len(Y), repeat=True):
    data = tf.data.Dataset.from_tensor_slices(({'x': X[:size]}, Y[:size]))
    return (data.repeat() if repeat else data).batch(6)


def estimator(directory, devices=TWO, function=None, params=None):
    return tf.estimator.Estimator(
        function or replicate_model_fn(network, devices=devices), str(directory), params=params,
        config=tf.estimator.RunConfig(session_config=towers.session_config(TWO)))


def weights_of(trained):
    return {name: trained.get_variable_value(name) for name in trained.get_variable_names()}


class Named(tf.train.SessionRunHook):
    """Fetches by name what one device calls so."""

    def before_run(self, run_context):
        return tf.train.SessionRunArgs(['cross_entropy:0'])


@needs_estimator
def test_an_estimator_trains_evaluates_predicts_and_exports_as_on_one_device(tmpdir):
    several, one = [estimator(tmpdir.join(str(len(devices))), devices)
                    for devices in (TWO, ['/cpu:0'])]
    batches = functools.partial(input_fn, repeat=False)
    results = []
    for each in (several, one):
        each.train(batches, steps=3, hooks=[Named()])
        each.train(batches, steps=4)  # goes on from the checkpoint, to the end of the data: 6 6 6 5
        results.append((each.evaluate(batches), list(each.predict(batches))))
    found, expected = map(weights_of, (several, one))
    assert sorted(found) == sorted(expected) and len(found) == 9
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-12, atol=1e-14,
                                   err_msg=name)
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    assert len(results[0][1]) == 23
    np.testing.assert_allclose([each['logits'] for each in results[0][1]],
                               [each['logits'] for each in results[1][1]], rtol=1e-12, atol=1e-14)
    exported = several.export_saved_model(
        str(tmpdir.join('saved')), tf.estimator.export.build_raw_serving_input_receiver_fn(
            {'x': tf.placeholder(tf.float64, [None, 5], 'x')}))
    with tf.Graph().as_default(), tf.Session(config=towers.session_config(TWO)) as running:
        saved = tf.saved_model.loader.load(running, ['serve'], exported.decode())
        signature = saved.signature_def['serving_default']
        for size in (1, 5):
            np.testing.assert_allclose(
                running.run(signature.outputs['logits'].name, {
                    signature.inputs['x'].name: X[:size]}),
                [each['logits'] for each in results[0][1]][:size], rtol=1e-12)


@needs_estimator
def test_a_sync_replicas_optimizer_and_its_hook():
    def synchronized(features, labels, mode):
        c = tf.get_variable('c', [], tf.float64, tf.constant_initializer(10.))
        loss = tf.reduce_sum(tf.abs(features['features'] * c - labels))
        sync = tf.train.SyncReplicasOptimizer(tf.train.GradientDescentOptimizer(1.), 1)
        hook = sync.make_session_run_hook(True, num_tokens=0)  # else it may read before the update
        return tf.estimator.EstimatorSpec(
            mode, loss=loss, training_hooks=[hook],
            train_op=TowerOptimizer(sync).minimize(loss, tf.train.get_or_create_global_step()))
    spec = replicate_model_fn(synchronized, Reduction.SUM, TWO)(FEATURES, LABELS, TRAIN)
    # An Estimator's own session waits 120 s for the queue at the end.
    with tf.train.MonitoredTrainingSession(
            config=towers.session_config(TWO), hooks=spec.training_hooks,
            stop_grace_period_secs=1) as running:
        running.run(spec.train_op)
        assert running.run(tf.global_variables()[0]) == 7.


# ---- canned Estimators ---------------------------------------------------------------------------

@needs_estimator
def test_the_model_function_of_a_canned_estimator_trains_as_on_one_device(tmpdir):
    values = np.random.RandomState(0).randn(7, 2).astype(np.float32)
    words = tf.SparseTensorValue([[row, 0] for row in range(7)], list('abcdabc'), [7, 1])
    column = tf.feature_column
    columns = [column.numeric_column('value', [2]), column.embedding_column(
        column.categorical_column_with_vocabulary_list('word', list('abc')), 3)]
    initial, results = None, []
    for devices in (['/cpu:0'], TWO):
        with tf.Graph().as_default():
            tf.train.create_global_step()
            canned = tf.estimator.DNNClassifier(
                [4], columns, str(tmpdir), optimizer=TowerOptimizer(
                    tf.train.AdagradOptimizer(0.125)))
            spec = replicate_model_fn(canned.model_fn, Reduction.SUM, devices)(
                {'word': tf.SparseTensor.from_value(words), 'value': tf.constant(values)},
                tf.constant((values[:, :1] > 0).astype(np.int64)), TRAIN, config=canned.config)
            with session(devices) as running:
                variables = {v.op.name: v for v in tf.global_variables()}
                initial = initial or running.run(variables)
                for name, variable in variables.items():
                    variable.load(initial[name], running)
                losses = [running.run([spec.loss, spec.train_op])[0] for _ in range(3)]
                results.append((losses, running.run(variables)))
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-4)
    assert sorted(results[1][1]) == sorted(results[0][1])
    for name, value in results[0][1].items():
        np.testing.assert_allclose(results[1][1][name], value, 1e-4, 1e-6, err_msg=name)


# ---- contrib's own -------------------------------------------------------------------------------

def contrib():
    import tensorflow
    return tensorflow.contrib.estimator


needs_contrib = pytest.mark.skipif(not tf.version.VERSION.startswith('1.'),
                                   reason='tf.contrib is in TensorFlow 1 alone')


@needs_contrib
@pytest.mark.parametrize('reduction, num_devices', [(Reduction.SUM, 2), (Reduction.MEAN, 3)])
def test_the_weights_of_contribs_own(reduction, num_devices):
    devices, found = ['/cpu:%d' % k for k in range(num_devices)], []
    for front in (contrib(), towers):
        with tf.Graph().as_default(), switched('resource_variables', True):
            tf.train.create_global_step()
            spec = front.replicate_model_fn(network, reduction, devices)(
                {'x': tf.constant(X[:18])}, tf.constant(Y[:18]), TRAIN,
                {'wrapper': front.TowerOptimizer})
            with session(devices) as running:
                losses = [running.run([spec.loss, spec.train_op])[0] for _ in range(6)]
                found.append((losses, running.run({v.op.name: v for v in tf.global_variables()
                                                   if 'Momentum' not in v.op.name})))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-14)
    assert len(found[0][1]) == 5
    for name, value in found[0][1].items():
        assert np.array_equal(found[1][1][name], value), name


# ---- TowerOptimizer alone ------------------------------------------------------------------------

def square_loss():
    w = tf.get_variable('w', initializer=tf.constant([3., 4.], tf.float64))
    return tf.reduce_sum(tf.square(w)) / 2, w


@pytest.mark.parametrize('is_made', [False, True])
def test_it_is_an_optimizer_and_passes_on(is_made):
    loss, w = square_loss()
    real, calls = tf.train.MomentumOptimizer(0.125, 0.5), []
    optimizer = TowerOptimizer((lambda: calls.append(1) or real) if is_made else real)
    assert isinstance(optimizer, tf.train.Optimizer) and not calls
    step = tf.train.get_or_create_global_step()
    train_op = optimizer.minimize(loss, global_step=step)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(train_op)
        session.run(train_op)
        # m = w, then m / 2 + 7/8 w; w - m / 8
        assert session.run(w) == pytest.approx(np.array([3., 4.]) * (7 / 8. - 11 / 64.), rel=1e-14)
        assert session.run(step) == 2
    assert optimizer.get_name() == 'Momentum'
    assert optimizer.get_slot_names() == ['momentum']
    assert optimizer.get_slot(w, 'momentum') is real.get_slot(w, 'momentum')
    assert [v.op.name for v in optimizer.variables()] == ['w/Momentum']
    assert len(calls) == is_made


def test_a_minimize_of_its_own_is_passed_on():
    loss, w = square_loss()
    train_op = TowerOptimizer(Halving(1.)).minimize(loss)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(train_op)
        assert session.run(w).tolist() == [1.5, 2.]


@pytest.mark.parametrize('given, text', [
    (3, '^optimizer_or_optimizer_fn=3 has no'),
    (None, r'are none\), or a function without arguments that returns one\.$'),
    (lambda: 3, r'^optimizer_or_optimizer_fn\(\) of TowerOptimizer=3 has no .*are none\)\.$')])
def test_what_is_no_optimizer(given, text):
    with pytest.raises(towers.InvalidArgumentError, match=text) as raised:
        TowerOptimizer(given).minimize(square_loss()[0])
    assert isinstance(raised.value, ValueError)


class Halving(tf.train.GradientDescentOptimizer):
    """Halves the gradients in its own `minimize`."""

    def minimize(self, loss, global_step=None, var_list=None):
        return self.apply_gradients([(gradient / 2, v) for gradient, v in self.compute_gradients(
            loss, var_list)], global_step)


@needs_estimator
def test_a_minimize_of_its_own_is_refused_in_towers():
    def model_fn(features, labels, mode):
        del labels
        loss, _ = square_loss()
        loss *= tf.reduce_mean(features)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=TowerOptimizer(
            Halving(1.)).minimize(loss))
    with pytest.raises(towers.InvalidArgumentError, match='Halving has a minimize of its own'):
        replicate_model_fn(model_fn, devices=TWO)(tf.ones([4], tf.float64), None, TRAIN)
