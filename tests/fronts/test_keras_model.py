"""ParallelModel beside the same Keras model on one device, by numbers and devices.

TF 1.15's `multi_gpu_model` has been seen to fail at saving a model and its weights,
ModelCheckpoint, summary, the gradients' devices, batch norm, and scalar outputs.
"""

import collections

import numpy as np
import pytest
import tensorflow
import tensorflow.compat.v1 as tf

import towers
from towers import compat

try:
    import tf_keras
except ImportError:
    tf_keras = None

RANDOM = np.random.RandomState(0)
X = RANDOM.randn(20, 6).astype('float32')
Y = RANDOM.randn(20, 3).astype('float32')
Z = RANDOM.randn(20, 2).astype('float32')
DEVICES = ['/cpu:0', '/cpu:2']  # a hole


def _is_keras_3():
    return compat.is_keras_3(tensorflow.keras.layers.Layer())


@pytest.fixture(params=['tf.keras', 'tf_keras'])
def keras(request):
    if request.param == 'tf_keras' and tf_keras is None:
        pytest.skip('tf_keras is not installed')
    keras = tf_keras if request.param == 'tf_keras' else tensorflow.keras
    if request.param == 'tf.keras' and _is_keras_3():
        pytest.skip('fit of Keras 3 does not work in graph mode')
    if request.param == 'tf_keras' and keras is tensorflow.keras:
        pytest.skip('is tf.keras')
    return keras


@pytest.fixture(autouse=True)
def session(request):
    """Keras' session, with four CPUs, for the graph of the test."""
    backend = None
    if 'keras' in request.fixturenames:
        keras = request.getfixturevalue('keras')
        with tf.Graph().as_default():
            backend = compat.keras_backend_of(_dense_model(keras))
        made = tf.Session(config=towers.session_config(4))
        backend.set_session(made)
    yield backend
    if backend is not None:
        made.close()
        backend.set_session(None)


def _dense_model(keras):
    x = keras.Input((6,))
    hidden = keras.layers.Dense(5, 'tanh')(x)
    return keras.Model(x, keras.layers.Dense(3, name='out')(hidden))


def _two_outputs(keras):
    one, other = keras.Input((6,), name='one'), keras.Input((2,), name='other')
    both = keras.layers.concatenate([keras.layers.Dense(4, 'tanh')(one), other])
    return keras.Model([one, other], [keras.layers.Dense(3, name='first')(both),
                                      keras.layers.Dense(2, name='second')(both)])


def _dict_of_outputs(keras):
    model = _two_outputs(keras)
    return keras.Model(dict(zip(['one', 'other'], model.inputs)),
                       dict(zip(['z', 'a'], model.outputs)))


def _norm_model(keras, momentum=0.5):
    x = keras.Input((6,))
    normed = keras.layers.BatchNormalization(momentum=momentum, name='norm')(x)
    return keras.Model(x, keras.layers.Dense(3)(normed))


def _sgd(keras, rate=0.1):
    return getattr(keras.optimizers, 'legacy', keras.optimizers).SGD(rate)


def _adam(keras):
    return getattr(keras.optimizers, 'legacy', keras.optimizers).Adam(0.01)


def _fitted(model, weights, x, y, optimizer, batch_size=8, losses='mse', **given):
    """The weights after two epochs, and the history."""
    model.compile(optimizer, losses)
    model.set_weights(weights)
    history = model.fit(x, y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0, **given)
    return model.get_weights(), history.history


def _assert_close(ours, theirs, tolerance=2e-6):
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def _compare(keras, make, x, y, losses='mse', devices=None, make_optimizer=_sgd, batch_size=8):
    """Fits a model on one device and on several, from the same weights; returns both models."""
    plain, inner = make(keras), make(keras)
    model = towers.ParallelModel(inner, devices or DEVICES)
    weights = plain.get_weights()
    reference, history = _fitted(plain, weights, x, y, make_optimizer(keras), batch_size, losses)
    ours, our_history = _fitted(model, weights, x, y, make_optimizer(keras), batch_size, losses)
    assert max(np.abs(after - before).max() for after, before in zip(reference, weights)) > 1e-3
    _assert_close(ours, reference)
    _assert_close(our_history['loss'], history['loss'])
    return model, plain


def test_is_a_keras_model_in_the_default_graph(keras, graph, tmp_path):
    inner = _dense_model(keras)
    model = towers.ParallelModel(inner, DEVICES)
    assert isinstance(model, keras.Model)
    assert model.outputs[0].graph is graph and model.inner_model is inner
    assert model.devices == ('/device:CPU:0', '/device:CPU:2')
    assert '/cpu:2' in str(model.plan) and '2 towers' in str(model.plan)
    assert '4 (4 trainable), 53 parameters' in str(model.plan)
    lines, of_inner = [], []
    model.summary(print_fn=lambda line, **_: lines.append(line))
    inner.summary(print_fn=lambda line, **_: of_inner.append(line))
    assert lines == of_inner and any('out (Dense)' in line for line in lines)
    for call in (keras.models.clone_model, lambda model: model.to_json(),
                 lambda model: keras.models.save_model(
                     model, str(tmp_path / 'model.h5'))):
        with pytest.raises(towers.InvalidArgumentError, match=r'clone_model\(p.inner_model\)'):
            call(model)
    clone = towers.ParallelModel(keras.models.clone_model(inner), DEVICES)
    assert clone.count_params() == model.count_params()


def _masked_rows(keras):
    x = keras.Input((3,), dtype='int32')
    rows = keras.layers.Embedding(5, 4, mask_zero=True)(x)
    return keras.Model(x, keras.layers.Dense(2)(rows))


def _nested(keras):
    inner = keras.Sequential([keras.layers.Dense(4, 'tanh', input_shape=(6,))], name='body')
    return keras.Sequential([inner, keras.layers.Dense(3)])


def _regularized(keras):
    x, l2 = keras.Input((6,)), keras.regularizers.l2
    hidden = keras.layers.Dense(4, kernel_regularizer=l2(0.1), activity_regularizer=l2(0.2))(x)
    return keras.Model(x, keras.layers.Dense(3, bias_regularizer=l2(0.3))(hidden))


TOKENS = np.array([[1, 2, 0], [3, 0, 0], [1, 1, 1], [2, 0, 0], [4, 3, 0]])
# 5, 5, and 1, which does not divide among two devices.
UNEVEN = X[:11], Y[:11]


@pytest.mark.parametrize('make, batch, options', [
    (_dense_model, UNEVEN, dict(devices=1, batch_size=5)),
    (_dense_model, UNEVEN, dict(batch_size=5)),
    (_dense_model, UNEVEN, dict(make_optimizer=lambda _: tf.train.MomentumOptimizer(0.1, 0.9))),
    (_dict_of_outputs, ({'one': X, 'other': Z}, {'first': Y, 'second': Z}), {}),
    (_nested, (X, Y), {}), (_masked_rows, (TOKENS, RANDOM.randn(5, 3, 2)), {}),
    (_regularized, (X[:13], Y[:13]), dict(devices=3)),
    (_regularized, (X[:1], Y[:1]), dict(devices=3))])  # the first device has the one example
def test_fit_predict_and_evaluate_are_those_of_one_device(keras, graph, make, batch, options):
    model, plain = _compare(keras, make, *batch, **options)
    assert len(model.losses) == len(plain.losses)
    assert model.output_names == model.inner_model.output_names
    for batch_size in (20, 7, 3, 1):
        _assert_close(model.predict(batch[0], batch_size), plain.predict(batch[0]), 1e-5)
    if make in (_dense_model, _nested):
        weights = RANDOM.rand(len(batch[0]))
        _assert_close([model.test_on_batch(*batch, weights)],
                      [plain.test_on_batch(*batch, weights)])
    if make is _masked_rows:  # gradients of rows stay sparse
        assert any(op.type == 'ResourceScatterAdd' and 'training' in op.name
                   for op in graph.get_operations())


def test_gradients_are_on_the_devices_of_the_copies(keras, graph):
    with tf.device('/cpu:2'):
        inner = _dense_model(keras)
    model = towers.ParallelModel(inner, ['/cpu:1', '/cpu:3'])
    model.compile(_sgd(keras), 'mse')
    model.train_on_batch(X, Y)
    found = collections.Counter(op.device for op in graph.get_operations()
                                if op.type in ('MatMul', 'TanhGrad', 'BiasAddGrad')
                                and 'training/' in op.name)
    # Two layers: two products for weights and one for the hidden layer, a TanhGrad, two sums; and
    # on TF 2 a product for the input.
    assert sorted(found) == ['/device:CPU:1', '/device:CPU:3']
    assert set(found.values()) <= {6, 7} and len(set(found.values())) == 1


@pytest.mark.parametrize('count', [1, 17])
def test_batch_norm_moves_once_and_is_never_nan(keras, count):
    inner = _norm_model(keras)
    model = towers.ParallelModel(inner, 2)
    model.compile(_sgd(keras, 0.), 'mse')
    model.fit(X[:count], Y[:count], batch_size=16, shuffle=False, epochs=1, verbose=0)
    moved = inner.get_layer('norm').get_weights()[2]
    # The first of two parts of each batch: 8 of 16 and 1 of 1, or just the one.
    expected = np.zeros(6)
    for first in ([X[:8], X[16:17]] if count == 17 else [X[:1]]):
        expected = 0.5 * expected + 0.5 * first.mean(0)
    np.testing.assert_allclose(moved, expected, rtol=1e-5, atol=1e-6)
    assert np.isfinite(inner.get_layer('norm').get_weights()[3]).all()
    assert np.isfinite(model.predict(X[:3])).all()


def test_a_scalar_output_gets_a_batch_dimension(keras):
    x, y = keras.Input((6,)), keras.Input((3,))
    prediction = keras.layers.Dense(3)(x)
    loss = keras.layers.Lambda(lambda pair: tf.reduce_mean(tf.square(pair[0] - pair[1])),
                               name='loss')([prediction, y])
    inner = keras.Model([x, y], [prediction, loss])
    model = towers.ParallelModel(inner, DEVICES)
    assert model.output_names[1] == 'loss' and model.outputs[1].shape.as_list() == [None, 1]
    predictions, losses = model.predict([X[:5], Y[:5]])
    each = np.square(predictions - Y[:5]).mean(1)
    # Three examples on the first device and two on the second: the mean is that of all five.
    np.testing.assert_allclose(losses[:, 0], [each[:3].mean()] * 3 + [each[3:].mean()] * 2,
                               rtol=1e-5)
    model.add_loss(tf.reduce_mean(model.outputs[1]))
    model.compile(_sgd(keras), [None, None])
    plain = keras.Sequential([keras.layers.Dense(3, input_shape=(6,))])
    plain.compile(_sgd(keras), 'mse')
    plain.set_weights(model.get_weights())
    for _ in range(2):
        loss_of_all = model.train_on_batch([X[:5], Y[:5]])
        _assert_close([np.ravel(loss_of_all)[0]], [plain.train_on_batch(X[:5], Y[:5])])
    _assert_close(model.get_weights(), plain.get_weights())


def test_models_and_weights_are_saved_for_one_device(keras, tmp_path):
    model = towers.ParallelModel(_dense_model(keras), DEVICES)
    model.compile(_adam(keras), 'mse')
    model.fit(X, Y, batch_size=8, epochs=1, verbose=0)
    model.save(str(tmp_path / 'model.h5'))
    loaded = keras.models.load_model(str(tmp_path / 'model.h5'))
    assert [layer.name for layer in loaded.layers] == [layer.name for layer in
                                                       model.inner_model.layers]
    assert not hasattr(loaded, 'inner_model')
    for each in (model, loaded):  # with the state of the optimizer: both go on alike
        each.train_on_batch(X, Y)
    _assert_close(loaded.get_weights(), model.get_weights())
    weights, plain = str(tmp_path / 'weights.h5'), _dense_model(keras)
    plain.save_weights(weights)
    model.load_weights(weights)
    _assert_close(model.get_weights(), plain.get_weights(), 0)
    model.set_weights([weight + 1 for weight in plain.get_weights()])
    model.save_weights(weights)
    plain.load_weights(weights)
    _assert_close(plain.get_weights(), model.inner_model.get_weights(), 0)


@pytest.mark.parametrize('losses, activation, how', [
    ('binary_crossentropy', 'sigmoid', 'layer'), ('categorical_crossentropy', 'softmax', 'lambda'),
    ('sparse_categorical_crossentropy', 'softmax', 'layer')])
def test_cross_entropies_take_the_logits_as_on_one_device(keras, losses, activation, how):
    """The outputs are 0 and 1, of which the loss has no gradient, and a far smaller value."""
    def make(keras):
        last = (keras.layers.Activation(activation) if how == 'layer' else
                keras.layers.Lambda(getattr(tf.nn, activation)))
        model = keras.Sequential([keras.layers.Dense(3, input_shape=(6,)), last])
        model.set_weights([100 * np.random.RandomState(1).randn(6, 3), np.zeros(3)])
        return model
    classes = np.arange(20) % 3
    y = classes if losses.startswith('sparse') else np.eye(3)[classes]
    model, plain = _compare(keras, make, X, y, losses, make_optimizer=lambda keras: _sgd(keras, 9.))
    assert plain.evaluate(X, y, verbose=0) > 20
    for count in (20, 1):
        _assert_close(model.predict(X[:count]), plain.predict(X[:count]), 1e-4)


@pytest.mark.skipif(tf.version.VERSION < '2', reason="TF 2's rule")
@pytest.mark.parametrize('kind', ['float64', 'float16'])
def test_inputs_and_outputs_keep_their_types(keras, kind):
    """Under TF 2's rule for types, by which a layer casts its inputs to its own type."""
    if keras is not tensorflow.keras:
        pytest.skip('the rule is switched on by tf.keras')
    rule = tf.keras.layers
    rule.enable_v2_dtype_behavior()
    try:
        x = keras.Input((1,), dtype=kind)
        inner = keras.Model(x, keras.layers.Lambda(lambda x: x + 1, dtype=kind)(x))
        model = towers.ParallelModel(inner, DEVICES)
    finally:
        rule.disable_v2_dtype_behavior()
    given = np.linspace(0, 1, 5)[:, None].astype(kind)
    assert model.inputs[0].dtype == model.outputs[0].dtype == kind
    assert (model.predict(given) == given + 1).all()


def test_updates_in_the_graphs_collection_are_those_of_the_first_copy(keras, session):
    count = tf.get_variable('count', [], initializer=tf.zeros_initializer(), trainable=False)

    def counting(inputs):
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign_add(count, 1.))
        return inputs * 1.
    x = keras.Input((6,))
    inner = keras.Model(x, keras.layers.Dense(3)(keras.layers.Lambda(counting)(x)))
    model = towers.ParallelModel(inner, DEVICES)
    model.compile(_sgd(keras), 'mse')
    session.get_session().run(count.initializer)
    for _ in range(2):
        model.train_on_batch(X, Y)
    assert session.get_session().run(count) == 2.


def test_copies_have_dropout_masks_of_their_own(keras, session):
    x = keras.Input((200,))
    model = towers.ParallelModel(keras.Model(x, keras.layers.Dropout(0.5)(x)), DEVICES)
    run = keras.backend.function([model.input, session.learning_phase()], [model.output])
    steps = [run([np.ones([4, 200]), 1])[0] for _ in range(2)]
    masks = [step[rows].tolist() for step in steps for rows in (slice(0, 2), slice(2, 4))]
    assert all(one != other for i, one in enumerate(masks) for other in masks[:i])
    assert (run([np.ones([4, 200]), 0])[0] == 1).all()


def test_cells_that_drop_draw_for_each_copy(keras):
    ones = np.ones((6, 2, 40), 'float32')
    cells = [keras.layers.SimpleRNNCell(40, 'linear', kernel_initializer='identity', dropout=0.5),
             keras.layers.SimpleRNNCell(40, 'linear', kernel_initializer='identity')]
    inner = keras.Sequential([keras.layers.RNN(cells, input_shape=(2, 40), unroll=True)])
    model = towers.ParallelModel(inner, DEVICES)
    phase = compat.keras_backend_of(inner).symbolic_learning_phase()
    session = compat.keras_backend_of(inner).get_session()
    model.predict(ones[:1])  # which initializes
    for count in (6, 5, 1):
        dropped = session.run(model.outputs[0], {model.inputs[0]: ones[:count], phase: True})
        assert len({row.tobytes() for row in dropped}) == count  # no mask twice


def test_metrics_that_are_added_to_it(keras):
    histories = []
    for make in (lambda model: model, lambda model: towers.ParallelModel(model, DEVICES)):
        model = make(_dense_model(keras))
        model.add_metric(tf.reduce_mean(model.outputs[0] ** 2), name='squared', aggregation='mean')
        model.compile(_sgd(keras, 0.), 'mse', metrics=['mae'])
        histories.append(model.fit(X, 0 * Y, 8, verbose=0, shuffle=False).history)
    assert sorted(histories[1]) == sorted(histories[0])
    np.testing.assert_allclose(histories[1]['squared'], np.mean(  # as Keras: the mean over batches
        [np.mean(model.predict(X[at:at + 8]) ** 2) for at in (0, 8, 16)]), rtol=1e-5)


def test_rnn_with_initial_state(keras, graph):
    sequences, state = RANDOM.randn(7, 4, 2), RANDOM.randn(7, 3)

    def make(keras):
        x, start = keras.Input((4, 2)), keras.Input((3,))
        return keras.Model([x, start], keras.layers.SimpleRNN(3)(x, initial_state=[start]))
    plain, inner = make(keras), make(keras)
    model = towers.ParallelModel(inner, ['/cpu:1', '/cpu:2'])
    for each in (plain, model):  # their gradients, before a session sees TF 2's loops
        each.compile(_sgd(keras), 'mse')
        each._make_train_function()  # pylint: disable=protected-access
    model.set_weights(plain.get_weights())
    for count in (7, 1):
        for each in (plain, model):
            each.train_on_batch([sequences[:count], state[:count]], state[:count])
    _assert_close(model.get_weights(), plain.get_weights())
    devices = {op.device for op in graph.get_operations() if op.name.startswith('training')
               and 'parallel_model_towers/copies/tower_' in op.name
               and op.type in ('MatMul', 'While', 'StatelessWhile', 'PartitionedCall',
                               'StatefulPartitionedCall')}
    assert devices == {'/device:CPU:1', '/device:CPU:2'}


def test_frozen_layers(keras):
    def make(keras):
        model = _norm_model(keras)
        model.layers[-1].trainable = False
        return model
    inner = make(keras)
    model = towers.ParallelModel(inner, DEVICES)
    assert len(model.trainable_weights) == 2
    inner.get_layer('norm').trainable = False  # after the copies were made
    inner.layers[-1].trainable = True
    model.compile(_sgd(keras), 'mse')
    before = inner.get_layer('norm').get_weights()
    inner.trainable = False  # after compile: Keras trains what it was told then
    model.train_on_batch(X, Y)
    assert not model.trainable and inner.layers[-1].trainable is False
    _assert_close(inner.get_layer('norm').get_weights(), before, 0)
    inner.trainable = True
    model.trainable = False
    assert not inner.layers[-1].trainable


def test_inside_another_model(keras, graph):
    inner = _norm_model(keras)
    parallel = towers.ParallelModel(inner, DEVICES)
    z = keras.Input((2,))
    generator = keras.layers.Dense(6)
    both = keras.Model(z, parallel(generator(z)))
    both.compile(_sgd(keras), 'mse')
    assert len(both.trainable_weights) == 2 + 4
    before = both.get_weights()
    both.train_on_batch(Z, Y)
    after = both.get_weights()
    assert all(np.abs(one - other).max() > 0 for one, other in zip(before, after))
    # The moving statistics are those of the first copy's half.
    half = Z[:10].dot(before[0]) + before[1]
    np.testing.assert_allclose(inner.get_layer('norm').get_weights()[2], 0.5 * half.mean(0),
                               rtol=1e-4, atol=1e-5)


# ---- errors -------------------------------------------------------------------------------------

def _error(kind, call, *texts):
    with pytest.raises(kind) as caught:
        call()
    for text in texts:
        assert text in str(caught.value)


def _stateful(keras):
    return keras.Sequential([keras.layers.GRU(3, stateful=True, name='keeps',
                                              batch_input_shape=(4, 5, 2))])


def _with_metric(keras):
    model = _dense_model(keras)
    model.add_metric(tf.reduce_mean(model.outputs[0]), name='mean_output', aggregation='mean')
    return model


def _ragged(keras):
    x = keras.Input((None,), ragged=True, name='words')
    return keras.Model(x, keras.layers.Lambda(lambda each: each.to_tensor())(x))


def _sparse(keras):
    x = keras.Input((6,), sparse=True)
    return keras.Model(x, keras.layers.Lambda(tf.sparse.to_dense)(x))


def _with_a_parallel_model(keras):
    x = keras.Input((6,))
    return keras.Model(x, towers.ParallelModel(_dense_model(keras), DEVICES)(x))


@pytest.mark.parametrize('make, texts', [
    (_stateful, ["'keeps'", 'stateful', 'initial_state=']),
    (_with_metric, ['metric', 'compile(metrics=']),
    (_ragged, ["the input 'words', a RaggedTensor"]),
    (_sparse, ['a SparseTensor: give it a dense input']),
    (_with_a_parallel_model, ['holds a ParallelModel already']),
    (lambda keras: towers.ParallelModel(_dense_model(keras), 2), ['inner_model']),
    (lambda keras: keras.Sequential([keras.layers.Dense(3)]),
     ['has no inputs yet', 'input_shape=', 'build_towers'])])
def test_models_that_cannot_be_copied_are_refused_by_name(keras, make, texts):
    inner = make(keras)
    _error(towers.InvalidArgumentError, lambda: towers.ParallelModel(inner, DEVICES), *texts)


def test_what_is_no_model_of_this_graph(keras):
    inner = _dense_model(keras)
    with tf.Graph().as_default():
        _error(towers.InvalidArgumentError, lambda: towers.ParallelModel(inner, 2),
               'another graph')
    _error(towers.InvalidArgumentError, lambda: towers.ParallelModel('model', 2),
           'a tf.keras or tf_keras model')
    _error(towers.DeviceError, lambda: towers.ParallelModel(inner, '/cpu:0+/cpu:1'),
           'ParallelModel: /cpu:0+/cpu:1 is one tower on 2 devices', 'build_towers')


def test_a_subclassed_model_that_has_inputs(keras):
    class Subclassed(keras.Model):
        def __init__(self):
            super().__init__(name='mine')
            self.dense = keras.layers.Dense(3)

        def call(self, inputs):
            return self.dense(inputs)
    model = Subclassed()
    expected = model.predict(X)
    _error(towers.InvalidArgumentError, lambda: towers.ParallelModel(model, 2),
           "the model 'mine' is a subclassed model of type Subclassed", 'keras.Model(x, model(x))')
    x = keras.Input((6,))
    _assert_close([towers.ParallelModel(keras.Model(x, model(x)), DEVICES).predict(X)], [expected])


def test_in_the_model_function_of_build_towers(keras):
    model = towers.ParallelModel(_dense_model(keras), DEVICES)
    _error(towers.ModelFunctionError,
           lambda: towers.build_towers(lambda x: tf.reduce_mean(model(x)), tf.constant(X), None, 2),
           'the inner_model of a ParallelModel')


def test_optimizer_that_cannot_train_in_graphs(keras):
    if not hasattr(keras.optimizers, 'legacy'):
        pytest.skip('all can')
    model = towers.ParallelModel(_dense_model(keras), 2)
    _error(towers.InvalidArgumentError, lambda: model.compile(keras.optimizers.Adam(), 'mse'),
           'keras.optimizers.legacy.Adam', "'adam'")


def test_keras_3_says_what_to_use():
    if not _is_keras_3():
        pytest.skip('not about Keras 3')
    model = tensorflow.keras.Sequential([tensorflow.keras.layers.Dense(3)])
    _error(towers.MissingPackageError, lambda: towers.ParallelModel(model, 2), 'Keras 3',
           'build_towers', 'TF_USE_LEGACY_KERAS=1', 'tf-keras')
