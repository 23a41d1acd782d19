"""Trained variables, and slots, that the model writes from its batch: against numbers by hand."""

import contextlib

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.cluster.fingerprint import difference, fingerprint
from towers.errors import ClusterError
from one_process import addresses, together, train
from sample_models import switched

INPUTS = [np.array([1., 3.]), np.array([10., 6.])]  # of the two workers
RATE = .125
CLUSTER = towers.Cluster('ring', ['a:1', 'b:1'])


def center():
    """A trained variable of float64."""
    return tf.get_variable('center', [], tf.float64, tf.zeros_initializer())


def model(how):
    """The center of the examples: trained, and drawn to their mean by the model."""
    def write(inputs, value):
        return tf.assign_sub(value, .5 * (value - tf.reduce_mean(inputs)))

    def model_fn(inputs):
        value = center()
        loss = tf.reduce_mean(tf.square(inputs - value))
        if how == 'inline':
            with tf.control_dependencies([loss]):
                written = write(inputs, value)
            with tf.control_dependencies([written]):
                return tf.identity(loss)
        if how == 'branch':
            update = tf.cond(tf.reduce_mean(inputs) > 0.,
                             lambda: tf.identity(write(inputs, value)), lambda: value + 0.)
        else:
            update = write(inputs, value)
        if how == 'updates':
            return towers.ModelOutput(loss, updates=[update])
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
        return loss
    return model_fn


def by_hand(steps=3):
    value = 0.
    for _ in range(steps):
        gradient = -2. * (np.mean(INPUTS) - value)
        value += .5 * (INPUTS[0].mean() - value) - RATE * gradient
    return value


@pytest.mark.parametrize('how, use_resource', [('collection', True)] + [
    pytest.param(*case, marks=pytest.mark.slow) for case in [
        ('collection', False), ('inline', True), ('inline', False), ('updates', True),
        ('branch', True)]])
def test_the_models_write_of_worker_0_comes_before_the_update_of_all(how, use_resource):
    workers = addresses(2)

    def work(rank):
        def model_fn(inputs):
            with tf.variable_scope('', use_resource=use_resource):
                return model(how)(inputs)
        return train(towers.Cluster('ring', workers, rank=rank), model_fn, (INPUTS[rank],),
                     lambda: tf.train.GradientDescentOptimizer(RATE), 3)
    # References in branches are of v1; the switch is one for all threads.
    with contextlib.nullcontext() if use_resource else switched('control_flow_v2', False):
        results = together(work, 2)
    for result in results:
        np.testing.assert_allclose(result['last']['center'], by_hand(), rtol=1e-12)


def built(model_fn, optimizer=None, inputs=None, **options):
    fields = {name: options.pop(name) for name in ('uneven',) if name in options}
    return towers.build_towers(
        model_fn, (tf.constant(INPUTS[0] if inputs is None else inputs),),
        optimizer or tf.train.GradientDescentOptimizer(RATE), 2, 'mean', remainder='weight',
        global_step=tf.train.get_or_create_global_step(),
        cluster=CLUSTER._replace(**fields), **options)


def state_of(model_fn, *given, **options):
    return [variable.op.name for variable in built(model_fn, *given, **options).machines.state]


def clipping(inputs):
    """A model that clips its center in `UPDATE_OPS`."""
    value = center()
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign(value, tf.clip_by_value(value, -1, 1)))
    return tf.reduce_mean(tf.square(inputs - value))


@pytest.mark.parametrize('use_resource', [False, True])
@pytest.mark.parametrize('uneven', [False, True])
def test_what_is_written_from_no_batch_is_sent_as_well(uneven, use_resource):
    with tf.variable_scope('', use_resource=use_resource):
        assert state_of(clipping, tf.train.AdamOptimizer(RATE), uneven=uneven) == ['center']


def test_what_is_written_from_such_a_variable_is_sent_as_well():
    def model_fn(inputs):
        with tf.variable_scope('other'):
            other = center()
        update = tf.assign(center(), tf.reduce_mean(inputs))
        with tf.control_dependencies([update]):
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign(other, center() + 0.))
        tf.get_variable_scope().reuse_variables()
        return tf.reduce_mean(tf.square(inputs - center())) + other ** 2
    with tf.variable_scope('', use_resource=True, reuse=tf.AUTO_REUSE):
        assert state_of(model_fn) == ['center', 'other/center']


@pytest.mark.slow
@pytest.mark.parametrize('use_resource', [True, False])
def test_a_slot_that_the_model_writes_is_worker_0s_before_the_update(use_resource):
    workers = addresses(2)

    def work(rank):
        optimizer = tf.train.MomentumOptimizer(RATE, .5)

        def model_fn(inputs):
            with tf.variable_scope('', use_resource=use_resource):
                value = center()
                slot = tf.get_variable('slot', [], tf.float64, tf.zeros_initializer(),
                                       trainable=False)
            optimizer._slots['momentum'] = {  # pylint: disable=protected-access
                (value.graph, value.op.name): slot}
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS,
                                 tf.assign(slot, tf.reduce_mean(inputs)))
            return tf.reduce_mean(value * inputs)
        return train(towers.Cluster('ring', workers, rank=rank), model_fn, (INPUTS[rank],),
                     lambda: optimizer, 3)
    results = together(work, 2)
    # The slot is 2, the mean of worker 0's examples; the gradient the mean of all, 5.
    for result in results:
        np.testing.assert_allclose(result['last']['center'], -3 * RATE * (.5 * 2. + 5.),
                                   rtol=1e-12)
        np.testing.assert_allclose(result['last']['slot'], .5 * 2. + 5., rtol=1e-12)


def test_a_forward_pass_that_computes_with_what_it_has_written_is_refused():
    def model_fn(inputs):
        value = center()
        with tf.control_dependencies([tf.assign(value, tf.reduce_mean(inputs))]):
            return tf.reduce_mean(tf.square(inputs * value.read_value()))
    with tf.variable_scope('', use_resource=True), pytest.raises(
            ClusterError, match="forward pass writes the trained variable 'center' .* UPDATE_OPS"):
        built(model_fn)


def test_replicas_of_such_a_variable_are_refused():
    with tf.variable_scope('', use_resource=True), pytest.raises(
            ClusterError, match="'replicated'.* the model writes the trained variable 'center'"):
        built(model('collection'), variables=towers.VariablePlacement('replicated'))


def test_batches_that_are_constants_of_the_graph_may_differ():
    found = []
    for rank in range(2):
        with tf.Graph().as_default():
            step = built(model('collection'), inputs=INPUTS[rank])
            found.append(fingerprint(CLUSTER, step, 2))
    assert difference(found[0], found[1]) is None
