"""towers.compat: slim's layers give the numbers of TF 1.15, by hand; texts and switches."""

import re
import sys
import threading

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from sample_models import switched
from towers import compat, errors, mend_slim

slim = pytest.importorskip('tf_slim', reason='tf-slim is not installed')

LOST = compat.TF_VERSION >= (2, 15)  # where slim's batch norm is lost

# Two examples, two channels: means 2 and 4, variances 1 and 4.
EXAMPLES = np.array([[1., 2.], [3., 6.]], np.float32)
IMAGES = EXAMPLES.reshape([2, 1, 1, 2])


@pytest.fixture(autouse=True)
def mended_slim_in_a_graph():
    mend_slim()
    with tf.Graph().as_default():
        yield


def _variable(name):
    found, = [v for v in tf.global_variables() if v.op.name == name]
    return found


def _names():
    return sorted(variable.op.name for variable in tf.global_variables())


def _run_once(fetches, then=()):
    """Initializes, runs `fetches`, and then `then`, whose values it returns."""
    with tf.Session() as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        first = session.run(fetches)
        return first, session.run(list(then))


def test_leaves_the_modules_of_tensorflow_alone():
    ops = sys.modules['tensorflow.python.framework.ops']
    assert ops.GraphKeys is tf.GraphKeys
    assert hasattr(ops, 'Tensor') != LOST


@pytest.mark.parametrize('named', [False, True], ids=['default', 'collection given'])
@pytest.mark.parametrize('inputs', [
    EXAMPLES,  # of which slim makes images, and fuses
    pytest.param(IMAGES, marks=pytest.mark.slow)])
def test_batch_norm(inputs, named):
    given = {'updates_collections': tf.GraphKeys.UPDATE_OPS} if named else {}
    with slim.arg_scope([slim.batch_norm], decay=0.9, epsilon=0.5, **given):
        outputs = slim.batch_norm(tf.constant(inputs), scale=True)
    assert _names() == ['BatchNorm/beta', 'BatchNorm/gamma', 'BatchNorm/moving_mean',
                        'BatchNorm/moving_variance']
    updates = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
    assert len(updates) == 2
    (values, _), moving = _run_once([outputs, updates], [
        _variable('BatchNorm/moving_mean'), _variable('BatchNorm/moving_variance')])
    np.testing.assert_allclose(
        values.reshape([2, 2]),
        np.array([[-1., -2.], [1., 2.]]) / np.sqrt(np.array([1.5, 4.5])), rtol=1e-5)
    np.testing.assert_allclose(moving[0], [0.2, 0.4], rtol=1e-5)
    np.testing.assert_allclose(moving[1], 0.9 + 0.1 * np.array([2., 8.]), rtol=1e-5)  # of n - 1


def test_batch_norm_that_updates_in_place():
    outputs = slim.batch_norm(tf.constant(IMAGES), decay=0.9, updates_collections=None)
    assert tf.get_collection(tf.GraphKeys.UPDATE_OPS) == []
    _, (mean,) = _run_once(outputs, [_variable('BatchNorm/moving_mean')])
    np.testing.assert_allclose(mean, [0.2, 0.4], rtol=1e-5)


@pytest.mark.parametrize('layer, inputs, shape', [
    (lambda x, **k: slim.conv2d(x, 2, 1, scope='layer', **k), IMAGES, [1, 1, 2, 2]),
    (lambda x, **k: slim.fully_connected(x, 2, scope='layer', **k), EXAMPLES, [2, 2]),
], ids=['conv2d', 'fully_connected'])
def test_batch_norm_of_a_layer(layer, inputs, shape):
    with slim.arg_scope([slim.conv2d, slim.fully_connected],
                        normalizer_fn=slim.batch_norm, normalizer_params={'decay': 0.9},
                        weights_regularizer=slim.l2_regularizer(0.5),
                        weights_initializer=tf.ones_initializer()):
        layer(tf.constant(inputs))
    assert _names() == ['layer/BatchNorm/beta', 'layer/BatchNorm/moving_mean',
                        'layer/BatchNorm/moving_variance', 'layer/weights']
    assert _variable('layer/weights').shape.as_list() == shape
    updates = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
    (_, loss), (mean,) = _run_once([updates, tf.losses.get_regularization_loss()],
                                   [_variable('layer/BatchNorm/moving_mean')])
    np.testing.assert_allclose(mean, [0.6, 0.6], rtol=1e-5)  # of the sums 3 and 9
    np.testing.assert_allclose(loss, 1.0)                    # 0.5 * 4 / 2


@pytest.mark.parametrize('norm, after', [(0., 2.4), (1., 2.9)], ids=['plain', 'clipped'])
def test_create_train_op(norm, after):
    weight = slim.model_variable('w', shape=[], initializer=tf.constant_initializer(3.))
    train = slim.learning.create_train_op(weight * weight, tf.train.GradientDescentOptimizer(0.1),
                                          clip_gradient_norm=norm)
    _, (value, step) = _run_once(train, [weight, tf.train.get_global_step()])
    np.testing.assert_allclose([value, step], [after, 1], rtol=1e-6)


def test_local_and_global_variable():
    local = slim.local_variable(3., name='local')
    anywhere = slim.global_variable(4., name='anywhere')
    assert [v.op.name for v in tf.local_variables()] == ['local']
    assert _names() == ['anywhere']
    assert _run_once([local, anywhere])[0] == [3., 4.]


@pytest.mark.skipif(not LOST, reason='TensorFlow %s has what slim needs' % tf.__version__)
@pytest.mark.parametrize('dtype, given, word', [
    (tf.float32, {'renorm': True}, 'renorm'),
    (tf.float32, {'adjustment': lambda shape: (1., 0.)}, 'adjustment'),
    (tf.float32, {'fused': False, 'param_regularizers': {'beta': abs}}, 'param_regularizers'),
    (tf.float16, {'fused': False}, 'float16'),
], ids=['renorm', 'adjustment', 'regularizer', 'half'])
def test_batch_norm_refuses_what_it_would_leave_out(dtype, given, word):
    images = tf.constant(IMAGES, dtype)
    with pytest.raises(errors.InvalidArgumentError, match=word):
        slim.batch_norm(images, **given)
    with slim.arg_scope([slim.batch_norm], **given):
        with pytest.raises(errors.InvalidArgumentError, match=word):
            slim.conv2d(images, 2, 1, normalizer_fn=slim.batch_norm)
    assert _names() in ([], ['Conv/weights'])


def test_shapes_are_written_as_python_writes_tuples():
    shapes = ({'image': tf.TensorShape([4, 8]), 'other': (tf.TensorShape([]),)},
        tf.TensorShape([4]))
    assert compat.shapes_text(shapes) == '({image: (4, 8), other: (())}, (4,))'
    assert re.match(r'\(\((\?|None), 8\)\)$', compat.shapes_text((tf.TensorShape([None, 8]),)))


def test_threads_that_need_the_control_flow_of_tf_1_take_turns():
    def in_block():
        with compat.control_flow_v1():
            seen.append(tf.control_flow_v2_enabled())
    seen, thread = [], threading.Thread(target=in_block)
    with switched('control_flow_v2', True):
        with compat.control_flow_v1():
            thread.start()
            thread.join(.2)
            assert thread.is_alive() and not seen
        thread.join()
        assert seen == [False]
        assert tf.control_flow_v2_enabled()


def test_what_the_runtime_makes_of_a_product_is_a_product():
    for op_type in ('MatMul', '_MklMatMul', '_MklNativeMatMul', '_FusedMatMul',
                    '_MklNativeFusedMatMul'):
        assert compat.computed_operation(op_type) == 'MatMul', op_type
