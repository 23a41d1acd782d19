"""Loops and branches of control flow v2 in a model that is cut into stages."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from sample_models import switched
from towers.graph.library import functions_of

X = np.random.RandomState(0).rand(12, 6)
DEVICES = [['/cpu:0', '/cpu:1']]


def layers(x, loops):
    for index in range(4):
        w = tf.get_variable('w%d' % index, [6, 6], tf.float64,
                            tf.random_normal_initializer(stddev=.5, seed=index))
        if index in (1, 3) and loops:
            x = tf.cond(tf.reduce_sum(x) > -1e9, lambda: x + tf.tanh(tf.matmul(x, w)), lambda: x)
            x = tf.while_loop(lambda i, _: i < 3, lambda i, each: (
                i + 1, tf.tanh(tf.matmul(each, w))), (tf.constant(0), x))[1]
        else:
            x = x + tf.tanh(tf.matmul(x, w))
    return tf.reduce_mean(x)


def with_loops(x):
    return layers(x, True)


def with_averages(x):
    """The first value of a reference variable's average is that of a branch, beside it."""
    averages = tf.train.ExponentialMovingAverage(.5)
    loss = layers(x, False)
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, averages.apply(tf.trainable_variables()))
    return loss


def check_bodies():
    """Every body is where the operation is that runs it; returns the devices of bodies."""
    graph, found = tf.get_default_graph(), set()
    library = {each.signature.name: each for each in graph.as_graph_def().library.function}
    for op in graph.get_operations():
        for name in functions_of(op.node_def) & set(library) if op.device else ():
            for node in library[name].node_def:
                if node.device:
                    assert node.device == op.device, (op.name, node.name)
                    found.add(op.device)
    return found


@pytest.mark.slow
def test_bodies_are_with_the_operations_that_run_them():
    """Those of the gradients, too; TensorFlow would run them in the first stage."""
    with switched('control_flow_v2', True), tf.variable_scope('', use_resource=True):
        report = towers.check_towers(with_loops, X, devices=DEVICES,
                                     pipeline=towers.Pipeline(stages='auto'), steps=1)
        assert report.equal, report
        towers.build_towers(with_loops, tf.constant(X), tf.train.GradientDescentOptimizer(.1),
                            DEVICES, 'mean', pipeline=towers.Pipeline(stages='auto'))
        assert len(check_bodies()) > 1


def test_a_branch_beside_a_variable_that_moves():
    """TensorFlow said "Cannot colocate nodes"."""
    with switched('control_flow_v2', True), tf.variable_scope('', use_resource=False):
        built = towers.build_towers(
            with_averages, tf.constant(X), tf.train.GradientDescentOptimizer(.1), DEVICES, 'mean',
            pipeline=towers.Pipeline(stages='auto'))
        check_bodies()
        with tf.Session(config=towers.session_config(built.devices)) as session:
            try:
                session.run(tf.global_variables_initializer())
            except tf.errors.FailedPreconditionError:
                pass  # as on one device: a branch may read the variable before it has its value
