"""A model with sparse and dense gradients, batches for several machines, and the plain TF1 program
on one device that they stand for."""

import numpy as np
import tensorflow.compat.v1 as tf


def sparse_and_dense(rows, targets):
    """Mean squared error of an embedding, which has repeated rows, and two dense layers."""
    with tf.variable_scope('net', use_resource=True):
        table = tf.get_variable('table', [11, 3], tf.float64, tf.random_normal_initializer())
        hidden = tf.reduce_sum(tf.gather(table, rows), 1)
        for layer in range(2):
            kernel = tf.get_variable('kernel_%d' % layer, [3, 3], tf.float64,
                                     tf.random_normal_initializer())
            hidden = tf.tanh(tf.matmul(hidden, kernel))
        bias = tf.get_variable('bias', [], tf.float64, tf.zeros_initializer())
        return tf.reduce_mean(tf.square(tf.reduce_sum(hidden, 1) + bias - targets))


def batches(sizes, seed=3):
    random = np.random.RandomState(seed)
    return [(random.randint(0, 11, [size, 4]), random.randn(size)) for size in sizes]


def on_one_device(parts, start, steps, factor, rate=0.125):
    """Plain TF1 on the examples of all: `(gradients of step 1, variables after the last)`."""
    with tf.Graph().as_default(), tf.Session() as session:
        loss = sparse_and_dense(*[tf.constant(np.concatenate(column)) for column in zip(*parts)])
        variables = tf.trainable_variables()
        gradients = [tf.convert_to_tensor(each) * factor for each in tf.gradients(loss, variables)]
        update = [tf.assign_sub(variable, rate * gradient)
                  for gradient, variable in zip(gradients, variables)]
        for variable in variables:
            variable.load(start[variable.op.name], session)
        names = [variable.op.name for variable in variables]
        first = dict(zip(names, session.run(gradients)))
        for _ in range(steps):
            session.run(update)
        return first, dict(zip(names, session.run(variables)))


def close(one, other):
    assert one and set(one) <= set(other)
    for name in one:
        np.testing.assert_allclose(other[name], one[name], rtol=1e-12, atol=1e-13, err_msg=name)
