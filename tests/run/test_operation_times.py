"""Seconds of operations from a trace, and what they belong to."""

import re

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.run.operation_times import kernel_seconds, times_of_model

X = np.random.RandomState(0).rand(16, 6)


def model(x):
    for name in ('a', 'b'):
        w = tf.get_variable(name, [6, 6], tf.float64, tf.ones_initializer())
        x = x + tf.tanh(tf.matmul(x, w, name='%s_product' % name), name='%s_tanh' % name)
    return tf.reduce_mean(x, name='loss')


def build(devices=1, stages=None):
    return towers.build_towers(model, tf.constant(X), tf.train.MomentumOptimizer(.1, .9), devices,
                               'mean', pipeline=towers.Pipeline(stages=stages))


def trace(devices):
    """`RunMetadata` of `{device: [(name, label, microseconds)]}`."""
    metadata = tf.RunMetadata()
    for device, nodes in devices.items():
        stats = metadata.step_stats.dev_stats.add(device=device)
        for name, label, microseconds in nodes:
            stats.node_stats.add(node_name=name, timeline_label=label, op_start_rel_micros=5,
                                 op_end_rel_micros=5 + microseconds)
    return metadata


def test_kernels_of_cpus_and_of_streams():
    found = kernel_seconds(trace({
        '/job:localhost/replica:0/task:0/device:CPU:0': [
            ('a', 'a = MatMul(x)', 100), ('a', 'a = MatMul(x)', 50),  # in a loop, say
            ('c', 'c = _Recv()', 900), ('d', 'd = _HostSend(a)', 900)],
        '/job:localhost/replica:0/task:0/device:GPU:0': [('b', 'b = MatMul(x)', 7)],  # launched
        '/job:localhost/replica:0/task:0/device:GPU:0/stream:all': [('b:MatMul', 'kernel', 2000)],
        '/job:localhost/replica:0/task:0/device:GPU:0/stream:13': [('b:MatMul', 'kernel', 2000)]}))
    assert found == pytest.approx({'a': 150e-6, 'b': 2e-3})


def test_what_the_time_of_an_operation_belongs_to():
    built = build()
    graph = tf.get_default_graph()
    backward = {op.name for op in graph.get_operations() if op.name in built.towers[0].backward}
    products = sorted(name for name in backward if 'a_product_grad/MatMul' in name)
    sums = [name for name in backward if graph.get_operation_by_name(name).type == 'AddN']
    updates = [op.name for op in graph.get_operations()
               if 'ApplyMomentum' in op.type and 'update_b/' in op.name]
    assert len(products) == 2 and len(sums) == 1 and len(updates) == 1
    times = times_of_model({
        'a_product': 1., products[0]: 2., products[1]: 4., 'b_tanh/inner/of_it': 8.,
        sums[0]: 16., updates[0]: 32., 'elsewhere': 64., 'towers/loss': 128.}, built)
    # The gradient of a's sum comes from b's product and from b's sum; the product is the first.
    assert times.operations == {'a_product': 7., 'b_tanh': 8., 'b_product': 16.}
    assert times.variables == {'b': 32.}
    assert times.seconds == 63.


def test_the_times_of_a_real_step_cut_the_model():
    with tf.Graph().as_default():
        times = towers.operation_times(build(), warm_up=1, steps=1)
    assert {'a_product', 'a_tanh', 'b_product', 'b_tanh'} <= set(times.operations)
    assert 0 < times.seconds < 60 and set(times.variables) == {'a', 'b'}
    built = build('/cpu:0+/cpu:1', towers.AutoStages('time', times))
    shares = [int(each) for each in re.findall(r'(\d+)% of the time', built.plan.stages)]
    assert len(shares) == 2 and 99 <= sum(shares) <= 101
    assert {tf.get_default_graph().get_operation_by_name(name).device
            for name in ('a_product', 'b_product')} == {'/device:CPU:0', '/device:CPU:1'}


def test_queues_are_filled():
    """`tf.train.batch`: without its threads the first step would wait for ever."""
    batch = tf.train.batch([tf.constant(X[0])], 16)
    built = towers.build_towers(model, batch, tf.train.GradientDescentOptimizer(.1), 1)
    config = towers.session_config(built.devices)
    config.operation_timeout_in_ms = 20000
    times = towers.operation_times(built, warm_up=1, steps=1, config=config)
    assert {'a_product', 'b_product'} <= set(times.operations)


@pytest.mark.parametrize('kind, text', [
    ('placeholder', "feed a value for placeholder tensor 'batch'.*pass feed_dict= with a batch"),
    ('iterator', 'not initialized.*pass start='),
    ('short', 'the input ended before the steps were run: give it more batches')])
def test_a_step_without_its_input(kind, text):
    data = tf.data.Dataset.from_tensor_slices(np.ones([4, 3], np.float32)).batch(4)
    inputs = {'placeholder': lambda: tf.placeholder(tf.float32, [4, 3], 'batch'),
              'iterator': lambda: tf.data.make_initializable_iterator(data).get_next(),
              'short': lambda: tf.data.make_one_shot_iterator(data).get_next()}[kind]()

    def of_mean(x):
        return tf.reduce_mean(x * tf.get_variable('w', [3]))
    built = towers.build_towers(of_mean, inputs, tf.train.GradientDescentOptimizer(.1), 1)
    with pytest.raises(towers.MeasurementError, match=text):
        towers.operation_times(built)
