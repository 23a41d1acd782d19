"""record_keras_calls: updates and losses of each call, worked out by hand, for every Keras."""

import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers import compat
from towers import errors
from towers.model.keras_calls import record_keras_calls

try:
    import tf_keras
except ImportError:
    tf_keras = None

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

# Two towers' examples: means (2, 4) and (6, 0), variances (1, 4) and (4, 1).
EXAMPLES = (np.array([[1., 2.], [3., 6.]], np.float32), np.array([[4., 1.], [8., -1.]], np.float32))


@pytest.fixture(autouse=True)
def in_a_graph():
    with tf.Graph().as_default():
        yield


@pytest.fixture(params=['tf.keras', 'tf_keras'])
def keras(request):
    """Keras as tf.keras has it (of 1.15, 2.15 or 3), and tf_keras beside it."""
    if request.param == 'tf_keras' and tf_keras is None:
        pytest.skip('tf_keras is not installed')
    return tf_keras if request.param == 'tf_keras' else tf.keras


@pytest.fixture
def keras_2(keras):
    if _is_keras_3(keras):
        pytest.skip('not about Keras 3')
    return keras


@pytest.fixture
def keras_3(keras):
    if not _is_keras_3(keras):
        pytest.skip('about Keras 3 only')
    return keras


def _is_keras_3(keras):
    return issubclass(keras.layers.Layer, getattr(sys.modules.get('keras.src.layers.layer'),
                                                  'Layer', ()))


def _examples(tower=0):
    return tf.placeholder_with_default(EXAMPLES[tower], [None, 2])


def _norm(keras, **given):
    return keras.layers.BatchNormalization(momentum=0.9, **given)


def _ones(keras, units=1, **given):
    return keras.layers.Dense(units, use_bias=False, kernel_initializer='ones', **given)


def _l2(keras, factor):
    return keras.regularizers.l2(factor)


def _variables(layer):
    return [compat.keras_variable_value(each) for each in layer.variables]


def _session(*layers):
    session = tf.Session()
    session.run([variable.initializer for layer in layers
                 for variable in _variables(layer)])
    session.run(tf.global_variables_initializer())
    return session


def _moving(session, norm):
    return [session.run(value) for value in _variables(norm)[-2:]]


def _values(tensors):
    with _session() as session:
        return session.run(tensors)


def _methods():
    return [vars(base).get(name) for base in compat.keras_base_layers()
            for name in ('__call__', 'add_loss', 'add_update')]


def test_updates_of_batch_norm_unless_it_is_frozen(keras):
    for trainable, moved in ((True, ([0.2, 0.4], [1.0, 1.3])), (False, None)):
        norm = _norm(keras)
        norm.trainable = trainable
        with record_keras_calls() as record:
            norm(_examples(), training=True)
        assert record.layers == [norm] and len(record.updates()) == 2 * trainable
        if trainable:
            with _session(norm) as session:
                session.run(record.updates())
                np.testing.assert_allclose(_moving(session, norm), moved, rtol=1e-6)


def test_weight_losses_are_made_once_for_a_shared_part(keras):
    part = _ones(keras, 3, kernel_regularizer=_l2(keras, 0.5))
    first = keras.Sequential([part, _ones(keras, 1, kernel_regularizer=_l2(keras, 0.1))])
    second = keras.Sequential([part, _ones(keras, 1)])
    with record_keras_calls() as record:
        for layer in (first, second, part, first):
            layer(_examples())
    assert record.layers == [first, second, part]
    np.testing.assert_allclose(sorted(_values(record.weight_losses())), [0.3, 3.0], rtol=1e-6)
    assert record.activity_losses() == []


def test_losses_that_a_layer_adds(keras):
    class Adds(keras.layers.Layer):
        def call(self, inputs):
            self.add_loss(tf.reduce_sum(inputs))
            return inputs

    class AddsOnePerExample(keras.layers.Layer):
        def call(self, inputs):
            self.add_loss(tf.reduce_sum(inputs, axis=1))
            return inputs

    with record_keras_calls() as record:
        Adds()(_examples())
    assert _values(record.activity_losses()) == [12.]
    with record_keras_calls() as record:
        AddsOnePerExample()(_examples())
    with pytest.raises(errors.ModelFunctionError, match='adds_one_per_example'):
        record.activity_losses()


def test_nothing_from_a_branch_of_a_cond(keras):
    with record_keras_calls() as record:
        layer = _norm(keras, beta_regularizer=_l2(keras, 0.5), activity_regularizer=_l2(keras, 1.))
        layer.build((None, 2))
        tf.cond(tf.placeholder_with_default(True, []),
                lambda: layer(_examples(), training=True), _examples)
    assert record.layers == [layer]
    assert record.updates() == []
    assert _values(record.weight_losses()) == [0.] and record.activity_losses() == []


def test_each_tower_has_a_dropout_mask_of_its_own(keras):
    dense, dropout = keras.layers.Dense(1), keras.layers.Dropout(0.5)

    def model_fn(x):
        dropped = dropout(x, training=True)
        return {'loss': tf.reduce_mean(dense(dropped)), 'predictions': dropped}

    built = towers.build_towers(model_fn, tf.ones([4, 64]),
                                tf.train.GradientDescentOptimizer(0.1), 2)
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run(tf.global_variables_initializer())
        for _ in range(3):
            _, (first, second) = session.run(
                [built.train_op, [tower.predictions for tower in built.towers]])
            assert (first != second).any() and 20 < np.count_nonzero(first) < 108


def test_values_assigned_while_building_are_no_updates(keras_3):
    class Counts(keras_3.layers.Layer):
        def build(self, unused_shape):
            self.ready = self.add_weight(shape=(2,), initializer='zeros')
            self.ready.assign(tf.ones([2]))
            self.calls = self.add_weight(shape=(), initializer='zeros', trainable=False)

        def call(self, inputs):
            self.calls.assign_add(1.)
            return inputs * self.ready

    layer = Counts()
    with record_keras_calls() as record:
        layer(_examples())
        keras_3.layers.Embedding(2, 1, weights=[np.ones([2, 1])])(tf.constant([1]))
    update, = record.updates()
    with _session(*record.layers) as session:
        session.run(update)
        session.run(update)
        np.testing.assert_allclose(session.run(layer.calls.value), 2.)
        np.testing.assert_allclose(session.run(layer.ready.value), [0., 0.])


@pytest.mark.parametrize('registers', [False, True])
def test_a_loss_of_a_layer_that_the_program_has_registered_counts_once(keras, registers):
    """The gradient of the mean of x w + w^2 / 2: the mean of 1, 3, 4 and 8, and w."""
    def model(x):
        dense = _ones(keras, kernel_regularizer=_l2(keras, 0.5))
        outputs = dense(x)
        if registers:
            tf.add_to_collection(tf.GraphKeys.REGULARIZATION_LOSSES, dense.losses[0])
        return tf.reduce_mean(outputs)
    built = towers.build_towers(model, tf.constant(np.concatenate(EXAMPLES)[:, :1]),
                                tf.train.GradientDescentOptimizer(0.1), 2, 'mean',
                                regularization='add')
    with tf.Session(config=towers.session_config(2)) as session:
        session.run(tf.global_variables_initializer())
        np.testing.assert_allclose(session.run(built.gradients[0][0]), [[4. + 1.]])


def test_legacy_layers_are_left_out(keras_2):
    layers = _legacy_layers(keras_2)
    with record_keras_calls() as record:
        with tf.variable_scope('legacy'):
            hidden = layers.batch_normalization(_examples(), training=True)
            layers.dense(hidden, 1, kernel_regularizer=_l2(keras_2, 0.5),
                         kernel_initializer=tf.ones_initializer())
    assert record.layers == []
    assert record.updates() == record.weight_losses() == record.activity_losses() == []
    assert len(tf.get_collection(tf.GraphKeys.UPDATE_OPS)) == 2
    assert _values(tf.get_collection(tf.GraphKeys.REGULARIZATION_LOSSES)) == [1.]


def _legacy_layers(keras):
    if keras is tf.keras:
        return tf.layers
    legacy = pytest.importorskip('tf_keras.api._v1.keras', reason='tf_keras has no legacy layers')
    return legacy.__internal__.legacy.layers


def test_the_classes_are_put_back(keras):
    keras.layers.Dense(1)(_examples())  # Keras 2 imports some of itself when a layer is first made
    before = _methods()
    with pytest.raises(ZeroDivisionError):
        with record_keras_calls():
            wrapped = _methods()
            with record_keras_calls():
                assert _methods() != wrapped
            assert _methods() == wrapped
            1 / 0  # pylint: disable=pointless-statement
    assert all(w is not b for w, b in zip(wrapped, before) if b is not None)
    assert any(before) and _methods() == before


@pytest.mark.slow
@pytest.mark.parametrize('legacy, keras', [('0', 'tf.keras'), ('1', 'tf.keras'), ('0', 'tf_keras')])
def test_keras_first_used_in_the_block(legacy, keras):
    """That of `tf.keras` is recorded, and another one is refused."""
    if 'tf_keras' in keras + 'tf_keras' * int(legacy) and tf_keras is None:
        pytest.skip('tf_keras is not installed')
    environment = dict(os.environ, TF_USE_LEGACY_KERAS=legacy)
    program = (
        'import tensorflow.compat.v1 as tf\n'
        'from towers.model.keras_calls import record_keras_calls\n'
        'with tf.Graph().as_default():\n'
        '    with record_keras_calls() as record:\n'
        '        import tensorflow.compat.v1%s\n'
        '        %s.layers.BatchNormalization()(tf.ones([2, 2]), training=True)\n'
        '    assert len(record.layers) == 1, record.layers\n'
        '    assert len(record.updates()) == 2, record.updates()\n') % (
            ', tf_keras' * (keras == 'tf_keras'), keras)
    done = subprocess.run([sys.executable, '-c', program], cwd=ROOT, env=environment,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)
    if keras == 'tf_keras':
        assert 'the model function imports tf_keras, whose layers it calls unseen' in done.stderr
    else:
        assert done.returncode == 0, done.stderr


# ---- Keras models in build_towers ---------------------------------------------------------------

def _normed(keras):
    x = keras.Input((2,))
    normed = keras.layers.BatchNormalization(momentum=0.9, name='norm')(x)
    return keras.Model(x, _ones(keras, kernel_regularizer=_l2(keras, 0.5),
                                activity_regularizer=_l2(keras, 0.25))(normed))


@pytest.mark.parametrize('where', ['inside', pytest.param('compiled', marks=pytest.mark.slow)])
def test_a_model_trains_in_towers(keras, where):
    made = []
    if where == 'compiled':
        made.append(_normed(keras))
        made[0].compile('sgd', 'mse')

    def model_fn(x):
        if where == 'inside':
            made.append(_normed(keras))
        return tf.reduce_mean(made[0](x, training=True))
    built = towers.build_towers(model_fn, tf.constant(np.concatenate(EXAMPLES)),
                                tf.train.GradientDescentOptimizer(0.), 2, 'mean',
                                regularization='add')
    assert len(built.variables) == 5
    with tf.Session(config=towers.session_config(2)) as session:
        session.run(tf.global_variables_initializer())
        session.run([variable.initializer for variable in _variables(made[0])])
        # The kernel's 0.5 * (1 + 1) once; the mean of what is normed is 0; of its square, summed
        # over the two columns: both are +-1 in the two examples, equal or opposite in sign.
        signs = [(np.sign(each - each.mean(0)).sum(1) ** 2).mean() for each in EXAMPLES]
        np.testing.assert_allclose(session.run(built.loss), 1. + 0.25 * np.mean(signs), rtol=2e-3)
        session.run(built.train_op)
        norm = made[0].get_layer('norm')
        np.testing.assert_allclose(_moving(session, norm)[0], [0.2, 0.4], rtol=1e-5)


def test_towers_under_a_learning_phase(keras_2):
    model = _normed(keras_2)
    built = towers.build_towers(lambda x: tf.reduce_mean(model(x)),
                                tf.constant(np.concatenate(EXAMPLES)),
                                tf.train.GradientDescentOptimizer(0.), ['/cpu:1', '/cpu:2'], 'mean')
    phase = keras_2.backend.learning_phase()
    with tf.Session(config=towers.session_config(3)) as session:
        session.run(tf.global_variables_initializer())
        session.run(built.train_op)
        np.testing.assert_allclose(_moving(session, model.get_layer('norm'))[0], [0., 0.])
        np.testing.assert_allclose(session.run(built.loss),
                                   np.concatenate(EXAMPLES).sum(1).mean() / np.sqrt(1.001),
                                   rtol=1e-5)
        session.run(built.train_op, {phase: True})
        np.testing.assert_allclose(_moving(session, model.get_layer('norm'))[0], [0.2, 0.4],
                                   rtol=1e-5)
