"""TensorArrays and stacks of loops of control flow v1: across stages, and of resource variables."""

import numpy as np
import pytest
import sample_models as samples
from sample_models import switched
import tensorflow.compat.v1 as tf

import towers
from towers import compat
from towers.errors import InvalidArgumentError
from towers.reduce.micro_batches import check_order

X = np.random.RandomState(0).randn(12, 4)


def mapped(x):
    with towers.stage(0):
        w = tf.get_variable('w', [4, 4], tf.float64, tf.random_normal_initializer(seed=1))
        x = tf.tanh(tf.matmul(x, w))
    with towers.stage(1):
        x = tf.map_fn(lambda row: tf.sin(2. * row), x)
    return tf.reduce_mean(tf.square(x))  # in no stage: where its data are, on the last one


@pytest.mark.slow
@pytest.mark.parametrize('options', [
    dict(devices='/cpu:0+/cpu:1'), dict(devices=2),
    dict(devices='/cpu:0+/cpu:1,/cpu:2+/cpu:3', copies='reuse'),
    dict(devices='/cpu:0+/cpu:1,/cpu:2+/cpu:3', pipeline=towers.Pipeline(micro_batches=3))],
                         ids=lambda options: '-'.join(map(str, options.values())))
def test_the_array_is_with_the_loop_that_reads_it(options):
    with switched('control_flow_v2', False):
        report = towers.check_towers(mapped, X, **options)
    assert report.equal and report.worst.relative < 1e-9, report


def time_major(x):
    """Two recurrent layers, each a loop over the first dimension, a layer a stage."""
    net = tf.transpose(x[:, :, None], [1, 0, 2])
    for layer in range(2):
        with towers.stage(layer), tf.variable_scope('layer%d' % layer):
            w = tf.get_variable('w', [], tf.float64, tf.constant_initializer(0.5))
            net = tf.scan(lambda state, row: tf.tanh(w * (state + row)), net,
                          tf.zeros_like(net[0]))
    return tf.reduce_mean(tf.square(net[-1] - 1))


@pytest.mark.slow
@pytest.mark.parametrize('copies, micro_batches', [('clone', 2), ('reuse', 1)])
def test_loops_over_time_a_layer_a_stage(copies, micro_batches):
    with switched('control_flow_v2', False):
        report = towers.check_towers(
            time_major, X, devices=[['/cpu:0', '/cpu:1'], ['/cpu:2', '/cpu:3']], copies=copies,
            pipeline=towers.Pipeline(micro_batches=micro_batches))
    assert report.equal, report


def test_a_circle_through_a_loop_is_found():
    """The way out of a loop waits for all that its turns take, not for what enters it alone."""
    with switched('control_flow_v2', False):
        gate = tf.no_op('gate')
        with tf.control_dependencies([gate]):
            taken = tf.identity(tf.ones([]), 'taken')
        _, total, _ = tf.while_loop(  # nothing takes the last value: no step computes it
            lambda turn, *_: turn < 3,
            lambda turn, total, last: (turn + 1, total + taken, 2 * total), [0, 0., 0.])
    check_order([total])
    compat.add_control_inputs(gate, [total.op])
    with pytest.raises(InvalidArgumentError, match='wait for a later one'):
        check_order([total])


def nested(x, y):
    w = tf.get_variable('w', [6, 3], tf.float64, tf.glorot_uniform_initializer(seed=1))

    def inner(i, total):
        return i + 1, total + tf.tanh(tf.matmul(x, w) * total)

    def outer(i, total):
        return i + 1, tf.while_loop(lambda i, _: i < 2, inner, (0, total))[1]
    total = tf.while_loop(lambda i, _: i < 2, outer, (0, tf.ones_like(y)))[1]
    return samples.mean_squared_error(total, y)


def in_a_branch(x, y):
    w = tf.get_variable('w', [6, 3], tf.float64, tf.glorot_uniform_initializer(seed=1))

    def step(i, total):
        return i + 1, tf.cond(i > 0, lambda: total * tf.matmul(x, w), lambda: total + 1)
    return samples.mean_squared_error(
        tf.while_loop(lambda i, _: i < 3, step, (0, tf.ones_like(y)))[1], y)


@pytest.mark.slow
@pytest.mark.parametrize('model_fn, make, options', [
    (nested, samples.vectors, dict(variables=towers.VariablePlacement('balanced')))] + [
        pytest.param(*case, marks=pytest.mark.slow) for case in [
            (in_a_branch, samples.vectors, dict(copies='clone')),
            (samples.while_loop_rnn, samples.sequences, dict(copies='reuse'))]])
def test_stacks_of_resource_variables_of_another_device(model_fn, make, options):
    if model_fn is in_a_branch and tf.version.VERSION < '2':
        pytest.skip('TF 1.15 has no gradient of a variable that is read in a branch in a loop')
    with switched('control_flow_v2', False):
        report = towers.check_towers(model_fn, make(6), devices=['/cpu:1', '/cpu:2'], **options)
    assert report.equal and report.worst.relative < 1e-9, report


@pytest.mark.slow
def test_a_loop_over_the_images_of_a_shard_runs_on_its_tower():
    """Its array is filled from the shard, on the CPU; an operation is colocated with a read."""
    def model_fn(images):
        images = tf.map_fn(tf.image.per_image_standardization, images)
        return tf.reduce_mean((images * tf.get_variable('w', [3]) - 1.) ** 2)
    images = np.random.RandomState(0).rand(4, 8, 8, 3).astype(np.float32)
    assert towers.check_towers(model_fn, (images,)).equal
