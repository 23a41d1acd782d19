"""What an update that every worker makes may be computed from; all else is refused by name."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.errors import ClusterError

RING = towers.Cluster('ring', ['a:1', 'b:1'])
ASYNCHRONOUS = RING._replace(kind='ps', ps=['c:1'], synchronous=False)
TAKEN = {}


def model_fn(inputs):
    TAKEN['inputs'] = inputs
    return tf.reduce_mean(tf.nn.dropout(inputs * tf.get_variable('weight', [3]), rate=.5))


def build(make=None, make_rate=lambda: .1, cluster=RING):
    """With gradients to which `make()` is added, and a rate."""
    step = tf.train.get_or_create_global_step()
    return towers.build_towers(
        model_fn, (tf.ones([4, 3]),), tf.train.AdamOptimizer(make_rate()), 2, global_step=step,
        cluster=cluster, transform_gradients=make and (lambda pairs: [
            (gradient + make(), variable) for gradient, variable in pairs]))


def by_python():
    rate = tf.py_func(lambda step: np.float32(.1), [tf.train.get_global_step()], tf.float32)
    rate.set_shape([])
    return rate


def in_a_branch():
    return tf.cond(tf.train.get_global_step() > 3, lambda: tf.random.normal([3]),
                   lambda: tf.zeros([3]))


def written():
    """A variable that is written from the batch."""
    state = tf.get_variable('state', [], trainable=False, use_resource=True)
    with tf.control_dependencies([tf.assign(state, tf.reduce_mean(TAKEN['inputs']))]):
        return state.read_value()


@pytest.mark.parametrize('options, operation', [
    (dict(make=lambda: tf.random.normal([3])), 'RandomStandardNormal'),
    (dict(make=in_a_branch), '[A-Za-z]*'), (dict(make=written), 'PlaceholderWithDefault'),
    (dict(make_rate=by_python), 'PyFunc')])
def test_what_differs_by_worker_is_refused_by_name(options, operation):
    with pytest.raises(ClusterError, match=r"'.+' \(%s\) has a part in the update, which every "
                                           'worker makes by itself' % operation):
        build(**options)


def by_schedule():
    step = tf.cast(tf.train.get_global_step(), tf.float32)
    return tf.train.polynomial_decay(.1, step, 100, 0.) * tf.minimum(1., step / 10.)


def noise_by_the_step():
    return tf.random.stateless_normal(
        [3], tf.stack([tf.constant(1, tf.int64), tf.train.get_global_step()]))


@pytest.mark.parametrize('options', [
    dict(make_rate=by_schedule), dict(make=noise_by_the_step),
    dict(make=lambda: tf.Print(0., [TAKEN['inputs']])),
    dict(make=lambda: tf.random.normal([3]), cluster=ASYNCHRONOUS)])
def test_what_is_the_same_on_all_workers_or_of_one_set_of_weights_is_taken(options):
    assert not getattr(build(**options).machines, 'state', [])
