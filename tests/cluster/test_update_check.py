"""What an update that every worker makes may be computed from; all else is refused by name."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.errors import ClusterError

RING = towers.Cluster('ring', ['a:1', 'b:1'])
TAKEN = {}


def model_fn(inputs):
    weight = tf.get_variable('weight', [3])
    TAKEN['inputs'] = inputs
    return tf.reduce_mean(tf.nn.dropout(inputs * weight, rate=.5))


def build(transform=None, optimizer=None, cluster=RING, inputs=None, model_fn=model_fn, **options):
    return towers.build_towers(
        model_fn, (tf.ones([4, 3]) if inputs is None else inputs,),
        optimizer or tf.train.AdamOptimizer(.1), 2, remainder='weight',
        global_step=tf.train.get_or_create_global_step(), cluster=cluster,
        transform_gradients=transform, **options)


def adding(make):
    """`transform_gradients` that adds a tensor to each gradient."""
    return lambda pairs: [(gradient + make(), variable) for gradient, variable in pairs]


def by_python():
    rate = tf.py_func(lambda step: np.float32(.1), [tf.train.get_or_create_global_step()],
                      tf.float32)
    rate.set_shape([])
    return rate


def in_a_branch():
    return tf.cond(tf.train.get_or_create_global_step() > 3, lambda: tf.random.normal([3]),
                   lambda: tf.zeros([3]))


def written(new_value):
    """`transform_gradients` writes a variable, and multiplies gradients by it."""
    def transform(pairs):
        state = tf.get_variable('state', [], trainable=False, use_resource=True)
        with tf.control_dependencies([tf.assign(state, new_value())]):
            return [(gradient * state.read_value(), variable) for gradient, variable in pairs]
    return transform


@pytest.mark.parametrize('options, operation', [
    (lambda: dict(transform=adding(lambda: tf.random.normal([3]))), 'RandomStandardNormal'),
    (lambda: dict(transform=adding(in_a_branch)), '[A-Za-z]*'),
    (lambda: dict(transform=written(lambda: tf.reduce_mean(TAKEN['inputs']))),
     'PlaceholderWithDefault'),
    (lambda: dict(optimizer=tf.train.AdamOptimizer(by_python())), 'PyFunc')])
def test_what_differs_by_worker_is_refused_by_name(options, operation):
    with pytest.raises(ClusterError, match=r"'.+' \(%s\) has a part in the update, which every "
                                           'worker makes by itself' % operation):
        build(**options())


@pytest.mark.parametrize('cluster', [
    towers.Cluster('ring', ['a:1']), RING._replace(kind='ps', ps=['c:1'], synchronous=False)])
def test_where_there_is_one_update_or_one_set_of_weights_nothing_is_refused(cluster):
    build(adding(lambda: tf.random.normal([3])), cluster=cluster)


def by_schedule():
    step = tf.cast(tf.train.get_or_create_global_step(), tf.float32)
    return tf.train.polynomial_decay(.1, step, 100, 0.) * tf.minimum(1., step / 10.)


def clipped(pairs):
    gradients, _ = tf.clip_by_global_norm([gradient for gradient, _ in pairs], 1.)
    return list(zip(gradients, [variable for _, variable in pairs]))


def noise_by_the_step():
    return tf.random.stateless_normal(
        [3], tf.stack([tf.constant(1, tf.int64), tf.train.get_global_step()]))


@pytest.mark.parametrize('options', [
    lambda: dict(optimizer=tf.train.AdamOptimizer(by_schedule()), transform=clipped),
    lambda: dict(transform=adding(noise_by_the_step)),
    lambda: dict(transform=written(by_schedule)),
    lambda: dict(transform=lambda pairs: [
        (tf.Print(gradient, [tf.random.normal([]), TAKEN['inputs']]), variable)
        for gradient, variable in pairs])])
def test_what_is_the_same_on_all_workers_is_taken(options):
    assert build(**options()).machines.state == []
