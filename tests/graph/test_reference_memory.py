"""towers.graph.reference_memory: which kernels pass on the memory of a variable."""

import functools

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from sample_models import kind_of_variables, of_kinds  # noqa: F401, a fixture
from towers import session_config
from towers.graph.variable_access import COMPUTES

pytestmark = pytest.mark.usefixtures('kind_of_variables')


def run(fetches):
    with tf.Session(config=session_config(1)) as session:
        session.run(tf.global_variables_initializer())
        return session.run(fetches)


def pool(kernel, thin):
    return tf.reshape(kernel(tf.reshape(thin, [1, 2, 2, 4]), 1, 1, 'VALID'), [4, 4])


EYE, ONES, ZEROS = np.eye(4, dtype='f'), np.ones([4, 4], 'f'), np.zeros([4, 4], 'f')

def compared(kernel, thin):
    return tf.cast(kernel(x=thin, y=ONES), tf.float32)


# Each with arguments that leave it nothing to do, where there are such.
COMPUTE = {
    'MatMul': lambda thin: tf.matmul(thin, EYE),
    'BatchMatMulV2': lambda thin: tf.matmul(thin[None], EYE[None])[0],
    'Conv2D': lambda thin: tf.reshape(tf.nn.conv2d(
        tf.reshape(thin, [1, 2, 2, 4]), EYE[None, None], [1, 1, 1, 1], 'VALID'), [4, 4]),
    'BiasAdd': lambda thin: tf.nn.bias_add(thin, ZEROS[0]),
    'Add': lambda thin: tf.raw_ops.Add(x=thin, y=ZEROS),
    'AddV2': lambda thin: tf.raw_ops.AddV2(x=thin, y=ZEROS),
    'Sub': lambda thin: tf.subtract(thin, ZEROS), 'Mul': lambda thin: tf.multiply(thin, ONES),
    'RealDiv': lambda thin: tf.realdiv(thin, ONES), 'Relu': tf.nn.relu,
    'ReluGrad': lambda thin: tf.raw_ops.ReluGrad(gradients=thin, features=ONES), 'Tanh': tf.tanh,
    'TanhGrad': lambda thin: tf.raw_ops.TanhGrad(y=ZEROS, dy=thin), 'Sigmoid': tf.sigmoid,
    'SigmoidGrad': lambda thin: tf.raw_ops.SigmoidGrad(y=ONES / 2., dy=thin),
    'Softmax': tf.nn.softmax, 'MaxPool': lambda thin: pool(tf.nn.max_pool2d, thin),
    'AvgPool': lambda thin: pool(tf.nn.avg_pool2d, thin),
    'Gather': lambda thin: tf.raw_ops.Gather(params=thin, indices=[0, 1, 2, 3]),
    'GatherV2': lambda thin: tf.gather(thin, [0, 1, 2, 3]),
    'Square': tf.square, 'Sqrt': tf.sqrt, 'Rsqrt': tf.math.rsqrt, 'Exp': tf.exp, 'Log': tf.math.log,
    'SquaredDifference': lambda thin: tf.math.squared_difference(thin, ZEROS),
    'Neg': tf.negative, 'Abs': tf.abs, 'Maximum': lambda thin: tf.maximum(thin, ZEROS),
    'Minimum': lambda thin: tf.minimum(thin, ONES),
    'ZerosLike': lambda thin: tf.raw_ops.ZerosLike(x=thin),
    'OnesLike': lambda thin: tf.raw_ops.OnesLike(x=thin),
    'Size': lambda thin: ONES * tf.cast(tf.raw_ops.Size(input=thin), tf.float32),
    'Rank': lambda thin: ONES * tf.cast(tf.raw_ops.Rank(input=thin), tf.float32),
    'Shape': lambda thin: ONES * tf.cast(tf.raw_ops.Shape(input=thin)[0], tf.float32)}
for _name in ('Greater', 'GreaterEqual', 'Less', 'LessEqual', 'Equal'):
    COMPUTE[_name] = functools.partial(compared, getattr(tf.raw_ops, _name))


def before_and_after_an_assignment(compute):
    """What a later operation finds of compute(0.5 everywhere), and of compute(a variable that was
    0.5 and has been added to since)."""
    with tf.device('/cpu:0'):
        thin = tf.get_variable('thin', [4, 4], initializer=tf.constant_initializer(0.5))
        computed, alike = compute(thin), compute(tf.constant(ONES / 2.))
        with tf.control_dependencies([computed.op]):
            added = tf.assign_add(thin, ONES)
        with tf.control_dependencies([added.op]):
            found = tf.concat([computed, ZEROS], 0)[:4]
    return run([alike, found])


@of_kinds('reference')
@pytest.mark.parametrize('kind', sorted(COMPUTES))
@pytest.mark.slow
def test_what_counts_as_computing_does_not_pass_memory_on(kind):
    before, after = before_and_after_an_assignment(COMPUTE[kind])
    assert kind in [op.type for op in tf.get_default_graph().get_operations()]
    np.testing.assert_allclose(after, before, rtol=1e-6)


@of_kinds('reference', 'resource')
def test_that_what_passes_memory_on_would_be_seen(kind_of_variables):
    before, after = before_and_after_an_assignment(lambda thin: tf.reshape(thin, [4, 4]))
    assert np.array_equal(before, ONES / 2.)
    assert np.array_equal(after, before + (kind_of_variables == 'reference'))
