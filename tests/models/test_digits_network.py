"""models.digits: shapes, parameters, what it registers."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
import tf_slim as slim

from models.digits import digits, digits_arg_scope
from towers.slim_mend import mend_slim

mend_slim()


def build(batch=None, is_training=True, reuse=None, scope_arguments=None, **arguments):
    images = tf.placeholder(tf.float32, [batch, 8, 8, 1])
    with slim.arg_scope(digits_arg_scope(**(scope_arguments or {}))):
        return digits(images, is_training=is_training, reuse=reuse, **arguments)


def trainable_shapes():
    return {v.op.name: v.get_shape().as_list() for v in tf.trainable_variables()}


def test_end_points():
    logits, end_points = build()
    assert {name: tensor.get_shape().as_list() for name, tensor in end_points.items()} == {
        'conv1': [None, 8, 8, 32], 'conv2': [None, 8, 8, 64], 'pool2': [None, 4, 4, 64],
        'conv3': [None, 4, 4, 64], 'pool3': [None, 2, 2, 64],
        'Logits': [None, 10], 'Predictions': [None, 10]}
    assert logits is end_points['Logits']
    assert digits.default_image_size == 8


def test_parameters():
    build()
    assert trainable_shapes() == {
        'Digits/conv1/weights': [3, 3, 1, 32], 'Digits/conv1/BatchNorm/beta': [32],
        'Digits/conv2/weights': [3, 3, 32, 64], 'Digits/conv2/BatchNorm/beta': [64],
        'Digits/conv3/weights': [3, 3, 64, 64], 'Digits/conv3/BatchNorm/beta': [64],
        'Digits/logits/weights': [256, 10], 'Digits/logits/biases': [10]}
    assert sum(int(np.prod(shape)) for shape in trainable_shapes().values()) == 58314
    assert '58,314' in digits.__doc__
    assert len(tf.global_variables()) == 8 + 6  # moving means and variances


def test_updates_and_dropout_belong_to_training(graph):
    build(is_training=True)
    assert len(tf.get_collection(tf.GraphKeys.UPDATE_OPS)) == 6
    randoms = [op for op in graph.get_operations() if op.type == 'RandomUniform'
               and '/dropout/' in op.name]
    assert len(randoms) == 1
    before = len(tf.global_variables()), len(tf.losses.get_regularization_losses())
    build(is_training=False, reuse=True)
    assert len(tf.get_collection(tf.GraphKeys.UPDATE_OPS)) == 6
    assert randoms == [op for op in graph.get_operations() if op.type == 'RandomUniform'
                       and '/dropout/' in op.name]
    assert before == (len(tf.global_variables()), len(tf.losses.get_regularization_losses()))


@pytest.mark.parametrize('shape', [[2, 3, 8, 1], [2, 8, None, 1], [2, 64], None])
def test_images_that_do_not_do(graph, shape):
    images = tf.placeholder(tf.float32, shape)
    with pytest.raises(ValueError, match='at least 4 x 4'):
        digits(images)
    assert len(graph.get_operations()) == 1
