"""What the tests of Estimators share."""

import pytest
import tensorflow.compat.v1 as tf

import towers
from towers import compat

needs_estimator = pytest.mark.skipif(not compat.has_estimator(),
                                     reason='this TensorFlow has no Estimator')
TWO = ['/cpu:0', '/cpu:1']
TRAIN, EVAL, PREDICT = 'train', 'eval', 'infer'


def replicated(model_fn, inputs, num_towers=2, reduction=tf.losses.Reduction.MEAN):
    """`(BuiltTowers, EstimatorSpec)` of a function of inputs that returns `(loss, train op)`."""
    built = []

    def of_estimator(features, mode):
        loss, train_op = model_fn(*features)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)
    spec = towers.replicate_model_fn(
        of_estimator, reduction, ['/cpu:%d' % k for k in range(num_towers)],
        on_built=lambda _, each: built.append(each))(tuple(inputs), None, TRAIN)
    return built[0], spec
