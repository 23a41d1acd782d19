"""models.inception_resnet_v2 against the facts of slim's, and its blocks against numpy."""

import inspect
import json
import os
import re

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
import tf_slim as slim

from models import inception_resnet_v2 as module
from sample_networks import fewer_blocks
from towers.slim_mend import mend_slim

mend_slim()

with open(os.path.join(os.path.dirname(os.path.dirname(__file__)), 'data',
                       'inception_resnet_v2_variables.json')) as _facts_file:
    FACTS = json.load(_facts_file)

# Padded layers of stride 2 halve the 299 pixels and round up.
ALIGNED = {'Conv2d_1a_3x3': [150, 150, 32], 'Conv2d_2a_3x3': [150, 150, 32],
           'Conv2d_2b_3x3': [150, 150, 64], 'MaxPool_3a_3x3': [75, 75, 64],
           'Conv2d_3b_1x1': [75, 75, 80], 'Conv2d_4a_3x3': [75, 75, 192],
           'MaxPool_5a_3x3': [38, 38, 192], 'Mixed_5b': [38, 38, 320],
           'Mixed_6a': [19, 19, 1088], 'PreAuxLogits': [19, 19, 1088],
           'Mixed_7a': [10, 10, 2080], 'Conv2d_7b_1x1': [10, 10, 1536]}
BASE_END_POINTS = list(ALIGNED)
BLOCKS = {  # depth that the network uses the block at
    'block35': (module.block35, 320),
    'block17': (module.block17, 1088),
    'block8': (module.block8, 2080),
}


def images(side, batch=2):
    return tf.placeholder(tf.float32, [batch, side, side, 3])


def shapes(end_points):
    return {name: tensor.get_shape().as_list() for name, tensor in end_points.items()}


def variables():
    trainable = {v.op.name for v in tf.trainable_variables()}
    return sorted([v.op.name, v.get_shape().as_list(), v.op.name in trainable]
                  for v in tf.global_variables())


def is_built(name):
    """Whether a variable of the network is in one that has each of its repeated blocks once."""
    return not re.search(r'/Repeat\w*/block\d+_([2-9]|1\d|20)/', name)



def dilated_operations(graph):
    """TF carries out dilation as a regrouping of pixels around an ordinary convolution, except on
    versions that leave it to the convolution."""
    return [op for op in graph.get_operations() if op.type == 'SpaceToBatchND'
            or op.type == 'Conv2D' and list(op.get_attr('dilations')) != [1, 1, 1, 1]]


def count(collection):
    return len(tf.get_collection(collection))


# ---- the facts ----------------------------------------------------------------------------------


@pytest.mark.parametrize('name', sorted(FACTS['signatures']))
def test_signature(name):
    parts = []
    for parameter in inspect.signature(getattr(module, name)).parameters.values():
        default = parameter.default
        parts.append(parameter.name if default is parameter.empty else '%s=%s' % (
            parameter.name, 'tf.nn.relu' if default is tf.nn.relu else repr(default)))
    assert '(%s)' % ', '.join(parts) == FACTS['signatures'][name]


@pytest.mark.slow
def test_everything_inside_the_arg_scope(monkeypatch):
    """With one block in the place of several; test_registry has how many those are."""
    fewer_blocks(monkeypatch, 1)
    with slim.arg_scope(module.inception_resnet_v2_arg_scope()):
        logits, end_points = module.inception_resnet_v2(images(299))
    assert variables() == sorted(each for each in FACTS['variables'] if is_built(each[0]))
    assert count(tf.GraphKeys.UPDATE_OPS) == len(tf.global_variables('.*/moving_'))
    assert count(tf.GraphKeys.REGULARIZATION_LOSSES) == len(
        [each for each in tf.trainable_variables() if 'BatchNorm' not in each.op.name])
    assert shapes(end_points) == FACTS['endpoints']
    assert logits is end_points['Logits']


def test_arg_scope_arguments():
    elsewhere = []
    with slim.arg_scope(module.inception_resnet_v2_arg_scope(
            weight_decay=0.5, batch_norm_decay=0.75, batch_norm_epsilon=3.0,
            activation_fn=tf.nn.relu6, batch_norm_updates_collections='elsewhere')):
        made = slim.conv2d(tf.zeros([1, 2, 2, 3]), 4, 1)
        elsewhere = tf.get_collection('elsewhere')
        slim.fully_connected(tf.zeros([1, 2]), 3)
    assert made.op.type == 'Relu6'
    assert len(elsewhere) == 2
    # Of the convolution's weights, and of the linear layer's weights and biases.
    assert count(tf.GraphKeys.REGULARIZATION_LOSSES) == 3
    weights = tf.trainable_variables('Conv/weights')[0]
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(elsewhere)
        loss, value = session.run([tf.losses.get_regularization_losses()[0], weights])
        variance = session.run(tf.global_variables('Conv/BatchNorm/moving_variance')[0])
    np.testing.assert_allclose(loss, 0.5 * np.sum(value ** 2) / 2, rtol=1e-6)
    np.testing.assert_allclose(variance, 0.75, rtol=1e-6)  # from 1 a quarter of the way to 0


# ---- endpoints ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_aligned_feature_maps(monkeypatch):
    fewer_blocks(monkeypatch, 1)
    net, end_points = module.inception_resnet_v2_base(images(299), align_feature_maps=True)
    assert shapes(end_points) == {name: [2] + shape for name, shape in ALIGNED.items()}
    assert net is end_points['Conv2d_7b_1x1']


@pytest.mark.slow
def test_output_stride_8_has_the_same_weights_and_dilates_block17(graph, monkeypatch):
    fewer_blocks(monkeypatch, 1)
    net, end_points = module.inception_resnet_v2_base(
        images(299), 'PreAuxLogits', output_stride=8)
    assert shapes(end_points)['Mixed_6a'] == [2, 33, 33, 1088]
    assert net.get_shape().as_list() == [2, 33, 33, 1088]
    assert [variable for variable in variables() if variable[0].endswith('/weights')] == sorted(
        variable for variable in FACTS['variables'] if variable[0].endswith('/weights') and
        is_built(variable[0]) and not re.search(
            '/(Mixed_7a|Repeat_2|Block8|Conv2d_7b_1x1|AuxLogits|Logits)/', variable[0]))
    dilated = dilated_operations(graph)
    assert len([op for op in dilated if '/Conv2d_0b_1x7/' in op.name]) == 1
    assert all('/block17_' in op.name for op in dilated)


@pytest.mark.slow
def test_inference_is_finite_and_repeatable(monkeypatch):
    fewer_blocks(monkeypatch, 1)
    with slim.arg_scope(module.inception_resnet_v2_arg_scope()):
        _, end_points = module.inception_resnet_v2(
            tf.random_uniform([1, 107, 107, 3], seed=1), 5, is_training=False)
    assert count(tf.GraphKeys.UPDATE_OPS) == 0
    assert shapes(end_points)['AuxLogits'] == [1, 5]
    predictions = end_points['Predictions']
    flat, pooled = end_points['PreLogitsFlatten'], end_points['global_pool']
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        predicted, kept, before = session.run([predictions, flat, pooled])
    np.testing.assert_allclose(np.sum(predicted, axis=1), 1, rtol=1e-5)
    np.testing.assert_array_equal(kept, before[:, 0, 0, :])  # no dropout


# ---- image sizes and other mistakes -------------------------------------------------------------


@pytest.mark.slow
def test_final_endpoint_at_its_least_image_size(graph, monkeypatch):
    fewer_blocks(monkeypatch, 1)
    net, end_points = module.inception_resnet_v2_base(images(43), 'Mixed_6a')
    assert net.get_shape().as_list()[1:3] == [1, 1]
    assert list(end_points) == BASE_END_POINTS[:BASE_END_POINTS.index('Mixed_6a') + 1]
    assert net is end_points['Mixed_6a']
    inputs = {tensor.name for op in graph.get_operations() for tensor in op.inputs}
    assert net.name not in inputs  # nothing is built after it
    assert not dilated_operations(graph)


@pytest.mark.parametrize('shape, arguments, text', [
    ([2, 106, 299, 3], {}, 'at least 107 x 107 pixels for auxiliary logits'),
    ([2, 74, 75, 3], {'create_aux_logits': False}, 'at least 75 x 75 pixels'),
    ([2, None, 299, 3], {}, 'known height and width for auxiliary logits'),
    ([2, 299, 299], {}, r'\[batch, height, width, channels\]')])
def test_images_that_do_not_do(graph, shape, arguments, text):
    inputs = tf.placeholder(tf.float32, shape)
    with pytest.raises(ValueError, match=text):
        module.inception_resnet_v2(inputs, 11, **arguments)
    assert len(graph.get_operations()) == 1


@pytest.mark.parametrize('arguments, text', [
    ({'final_endpoint': 'Mixed_8a'}, r'final_endpoint \(Mixed_8a\) not recognized'),
    ({'output_stride': 32}, 'output_stride must be 8 or 16'),
    ({'output_stride': 8}, 'only supported up to the PreAuxLogits')])
def test_bad_arguments_of_the_base(graph, arguments, text):
    inputs = images(299)
    with pytest.raises(ValueError, match=text):
        module.inception_resnet_v2_base(inputs, **arguments)
    assert len(graph.get_operations()) == 1


# ---- blocks -------------------------------------------------------------------------------------


@pytest.mark.parametrize('name', sorted(BLOCKS))
@pytest.mark.slow
def test_block_against_numpy(name):
    """On one pixel only the middle of each window counts, so a convolution is a matrix product."""
    block, depth = BLOCKS[name]
    random = np.random.RandomState(1)
    value = random.randn(2, 1, 1, depth).astype(np.float32)
    result = block(tf.constant(value), scale=0.3, scope='block')

    weights = {}
    for variable in tf.trainable_variables():
        shape = variable.get_shape().as_list()
        weights[variable.op.name] = (
            random.randn(*shape) / np.sqrt(shape[-2] if len(shape) > 1 else 1)).astype(np.float32)

    def product(net, scope):
        kernel = weights['block/%s/weights' % scope]
        height, width = kernel.shape[:2]
        return net.dot(kernel[height // 2, width // 2]) + weights['block/%s/biases' % scope]

    layers = {
        'block35': (['Conv2d_1x1'], ['Conv2d_0a_1x1', 'Conv2d_0b_3x3'],
                    ['Conv2d_0a_1x1', 'Conv2d_0b_3x3', 'Conv2d_0c_3x3']),
        'block17': (['Conv2d_1x1'], ['Conv2d_0a_1x1', 'Conv2d_0b_1x7', 'Conv2d_0c_7x1']),
        'block8': (['Conv2d_1x1'], ['Conv2d_0a_1x1', 'Conv2d_0b_1x3', 'Conv2d_0c_3x1']),
    }[name]
    flat = value[:, 0, 0, :]
    branches = []
    for index, scopes in enumerate(layers):
        net = flat
        for scope in scopes:
            net = np.maximum(product(net, 'Branch_%d/%s' % (index, scope)), 0)
        branches.append(net)
    mixed = np.concatenate(branches, axis=1)
    expected = np.maximum(flat + 0.3 * product(mixed, 'Conv2d_1x1'), 0)

    with tf.Session() as session:
        for variable in tf.trainable_variables():
            variable.load(weights[variable.op.name], session)
        np.testing.assert_allclose(
            session.run(result)[:, 0, 0, :], expected, rtol=1e-4, atol=1e-4)
