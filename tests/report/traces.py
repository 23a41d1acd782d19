"""Traces made by hand, and towers whose step is known to be slow for one reason."""

import time

import numpy as np
import tensorflow.compat.v1 as tf

import towers
from towers.report.parts import Place
from towers.report.trace import Trace, Traced

FULL = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE, output_partition_graphs=True)


def ran(row, part, begin, end, name='op', tower=None):
    return Traced(name, 'Op', row, Place(part, tower), begin, end)


def trace_of(*operations, copies=()):
    return Trace(max(each.end for each in operations), sorted(
        operations, key=lambda each: each.begin), list(copies), 0)


def traced_step(built, steps=3, start=()):
    """The metadata of a step, after some others."""
    metadata = tf.RunMetadata()
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        session.run(list(start))
        for _ in range(steps):
            session.run(built.train_op)
        session.run(built.train_op, options=FULL, run_metadata=metadata)
    return metadata


def dense(width, hidden):
    """A model function of two layers."""
    def model(x, y):
        first = tf.get_variable('first', [width, hidden])
        second = tf.get_variable('second', [hidden, 1])
        return tf.reduce_mean(tf.square(tf.matmul(tf.nn.relu(tf.matmul(x, first)), second) - y))
    return model


def batch(examples, width):
    return tf.constant(np.ones([examples, width], np.float32)), tf.ones([examples, 1])


def build(model, inputs, **options):
    options.setdefault('devices', 2)
    return towers.build_towers(model, inputs, tf.train.AdamOptimizer(), reduction='mean', **options)


def slow_update():
    """Few examples and many weights, all on one device."""
    return build(dense(16, 1000000), batch(2, 16)), ()


def slow_input():
    """An input that takes a quarter of a second a batch."""
    def read(x):
        time.sleep(.25)
        return x
    data = tf.data.Dataset.from_tensors(np.ones([8, 16], np.float32)).repeat()
    data = data.map(lambda x: tf.ensure_shape(tf.py_func(read, [x], tf.float32), [8, 16]))
    iterator = tf.data.make_initializable_iterator(data)
    return build(dense(16, 100), (iterator.get_next(), tf.ones([8, 1]))), [iterator.initializer]


def long_stage():
    """Two stages, the first of which does nearly all of the work."""
    def model(x, y):
        with towers.stage(0):
            weights = tf.get_variable('weights', [300, 300])
            for _ in range(12):
                x = tf.nn.relu(tf.matmul(x, weights))
        with towers.stage(1):
            return tf.reduce_mean(tf.square(tf.matmul(x, tf.get_variable('head', [300, 1])) - y))
    return build(model, batch(4000, 300), devices=[['/cpu:0', '/cpu:1']],
                 pipeline=towers.Pipeline(4)), ()


