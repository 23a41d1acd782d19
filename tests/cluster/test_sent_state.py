"""What the workers of a ring send each other of what a step writes: by the built step, by hand."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.cluster.fingerprint import difference, fingerprint
from one_process import addresses, together, train

INPUTS = [np.array([1., 3.]), np.array([10., 6.])]  # of the two workers; the mean of all is 5
CLUSTER = towers.Cluster('ring', ['a:1', 'b:1'])


class ByRate(tf.train.GradientDescentOptimizer):
    """Its rate is the variable `rate`, which the update reads."""

    def __init__(self):
        super(ByRate, self).__init__(1.)

    def apply_gradients(self, pairs, global_step=None, name=None):
        rate = state('rate').read_value()
        return super(ByRate, self).apply_gradients(
            [(rate * gradient, variable) for gradient, variable in pairs], global_step, name)


def state(name, shape=(), **options):
    with tf.variable_scope('', use_resource=True, reuse=tf.AUTO_REUSE):
        return tf.get_variable(name, shape, tf.float64, tf.ones_initializer(),
                               **dict(dict(trainable=False), **options))


def writing_rate(new_value):
    """A model whose gradient is the mean of the examples, and whose `UPDATE_OPS` write the rate."""
    def model_fn(inputs):
        rate = state('rate')
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign(rate, new_value(rate)))
        return tf.reduce_mean(inputs) * state('weight', trainable=True)
    return model_fn


def step_number():
    return tf.cast(tf.train.get_or_create_global_step(), tf.float64)


def by_python(number):
    def make(rate):
        value = tf.py_func(lambda step: np.float64(number), [step_number()], tf.float64)
        value.set_shape([])
        return value
    return make


def local(rate):
    return state('local', collections=[tf.GraphKeys.LOCAL_VARIABLES]) * .5


def built(model_fn, optimizer=None, inputs=None, num_towers=2, rank=0, **options):
    fields = {name: options.pop(name) for name in ('uneven', 'active') if name in options}
    return towers.build_towers(
        model_fn, (tf.constant(INPUTS[rank] if inputs is None else inputs),),
        optimizer or tf.train.GradientDescentOptimizer(.125), num_towers, 'mean',
        remainder='weight', global_step=tf.train.get_or_create_global_step(),
        cluster=CLUSTER._replace(rank=rank, **fields), **options)


def names_of(step):
    return [variable.op.name for variable in step.machines.state]


def why_apart(*model_fns, **options):
    """How worker 1's build of the second model differs from worker 0's of the first, or None."""
    found = []
    for rank, model_fn in enumerate(model_fns):
        with tf.Graph().as_default():
            found.append(fingerprint(CLUSTER, built(model_fn, rank=rank, **options), 2))
    return difference(*found)


# ---- state that the update reads, and UPDATE_OPS write ------------------------------------------


@pytest.mark.parametrize('new_value, stateless_random', [
    (by_python(.5), True), (local, True),
    (lambda rate: tf.random.normal([], dtype=tf.float64), True),
    (lambda rate: tf.cond(
        step_number() > 2., lambda: by_python(.5)(rate), lambda: rate * .5), True),
    pytest.param(lambda rate: rate * .5, True, marks=pytest.mark.slow),
    pytest.param(lambda rate: tf.random.normal([], dtype=tf.float64), False,
                 marks=pytest.mark.slow)])
def test_whatever_update_ops_write_and_the_update_reads_is_sent(new_value, stateless_random):
    assert names_of(built(writing_rate(new_value), ByRate(),
                          stateless_random=stateless_random)) == ['rate']


@pytest.mark.parametrize('new_values', [
    [by_python(.5), by_python(.25)],
    pytest.param([lambda rate: rate * .5, lambda rate: rate * .25], marks=pytest.mark.slow)])
def test_worker_0s_rate_is_that_of_all(new_values):
    workers = addresses(2)
    results = together(lambda rank: train(
        towers.Cluster('ring', workers, rank=rank), writing_rate(new_values[rank]),
        (INPUTS[rank],), ByRate, 2), 2)
    second = .25 if new_values[0](0.) == 0. else .5
    for result in results:
        assert result['last']['rate'] == second
        assert result['last']['weight'] == 1. - .5 * 5. - second * 5.


@pytest.mark.slow
def test_stateless_random_numbers_of_worker_0_are_those_of_all():
    workers = addresses(2)
    results = together(lambda rank: train(
        towers.Cluster('ring', workers, rank=rank),
        writing_rate(lambda rate: tf.random.normal([], dtype=tf.float64)), (INPUTS[rank],), ByRate,
        2, stateless_random=True), 2)
    for name in ('rate', 'weight'):
        assert results[0]['last'][name] == results[1]['last'][name] != 1.


# ---- trained variables --------------------------------------------------------------------------


def writing_weight(new_value):
    def model_fn(inputs):
        weight = state('weight', trainable=True)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign(weight, new_value(weight)))
        return tf.reduce_mean(tf.square(inputs - weight))
    return model_fn


@pytest.mark.parametrize('new_value', [
    by_python(.5), local, lambda weight: tf.clip_by_value(weight, -1., 1.),
    lambda weight: weight + tf.random.stateless_normal([], [1, 2], dtype=tf.float64)])
def test_a_trained_variable_that_the_model_writes_is_sent(new_value):
    assert names_of(built(writing_weight(new_value))) == ['weight']


# ---- what all workers compute alike is not sent -------------------------------------------------


def embeddings(ids):
    """Dense and sparse variables of two types; one table looked up twice, one through rows once."""
    total = 0.
    for index, dtype in enumerate([tf.float64, tf.float32, tf.float64]):
        table = tf.get_variable('table_%d' % index, [9, 2], dtype, tf.ones_initializer())
        rows = tf.nn.embedding_lookup(table, tf.cast(ids, tf.int32))
        if index == 2:
            rows += tf.gather(table, tf.unique(tf.cast(ids, tf.int32))[0][:1])
        total += tf.cast(tf.reduce_sum(tf.square(rows), 1), tf.float64)
    bias = tf.get_variable('bias', [], tf.float64, tf.zeros_initializer())
    return tf.reduce_mean(tf.square(total - bias))


def halved(pairs):
    """`transform_gradients` on rows: by their norm."""
    norm = tf.cast(tf.global_norm([tf.cast(getattr(gradient, 'values', gradient), tf.float64)
                                   for gradient, _ in pairs]), tf.float32)
    return [(tf.IndexedSlices(gradient.values / tf.cast(norm, gradient.dtype), gradient.indices,
                              gradient.dense_shape)
             if isinstance(gradient, tf.IndexedSlices) else gradient / tf.cast(
                 norm, gradient.dtype), variable) for gradient, variable in pairs]


@pytest.mark.parametrize('optimizer, options, use_resource', [
    (lambda: tf.train.AdagradOptimizer(.1), dict(transform_gradients=halved), True)] + [
        pytest.param(*case, marks=pytest.mark.slow) for case in [
            (lambda: tf.train.MomentumOptimizer(.1, .9), dict(ends=True), True),
            (lambda: tf.train.MomentumOptimizer(.1, .9), {}, False),
            (lambda: tf.train.AdagradOptimizer(.1), dict(uneven=True), False),
            (lambda: tf.train.AdamOptimizer(.1), {}, True),
            (lambda: tf.train.FtrlOptimizer(.1), dict(uneven=True), True),
            (lambda: tf.train.RMSPropOptimizer(.1), dict(transform_gradients=halved), False)]])
def test_slots_of_embeddings_are_not_sent(optimizer, options, use_resource):
    options = dict(options)
    if options.pop('ends', False):
        options['active'] = tf.placeholder_with_default(1., [])
    with tf.variable_scope('', use_resource=use_resource):
        assert names_of(built(embeddings, optimizer(), **options)) == []


@pytest.mark.slow
@pytest.mark.parametrize('make_optimizer', [
    lambda: tf.train.MomentumOptimizer(.125, .5), lambda: tf.train.AdamOptimizer(.125),
    lambda: tf.train.FtrlOptimizer(.125)])
def test_slots_of_embeddings_stay_equal_bit_for_bit(make_optimizer):
    """The workers have rows of their own, one in common, and one more often than the other."""
    def model_fn(ids):
        with tf.variable_scope('', use_resource=True):
            return embeddings(ids)
    workers, ids = addresses(2), [[0., 1., 1.], [1., 5.]]
    results = together(lambda rank: train(
        towers.Cluster('ring', workers, rank=rank, uneven=True), model_fn,
        (np.array(ids[rank]),), make_optimizer, 4), 2)
    for name, value in results[0]['last'].items():
        assert value.tobytes() == results[1]['last'][name].tobytes(), name
    slots = [name for name in results[0]['last'] if name.startswith('table_0/')]
    assert slots
    table = results[0]['last']['table_0']
    assert all((table[row] != 1.).all() for row in (0, 1, 5)) and (table[2] == 1.).all()


def averaging(inputs):
    """A model that reads moving averages of its weights, which `UPDATE_OPS` make."""
    weight, average = state('weight', [64, 64], trainable=True), state('average', [64, 64])
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign_sub(
        average, (average - weight) * (1. - tf.minimum(
            tf.constant(.5, tf.float64), (1. + step_number()) / (10. + step_number())))))
    return tf.reduce_mean(inputs) * tf.reduce_sum(weight * average)


@pytest.mark.slow
def test_moving_averages_of_the_weights_are_worker_0s():
    workers = addresses(2)
    results = together(lambda rank: train(
        towers.Cluster('ring', workers, rank=rank), averaging, (INPUTS[rank],),
        lambda: tf.train.GradientDescentOptimizer(.125), 3), 2)
    weight = average = 1.
    for step in range(3):
        gradient = 5. * average
        average -= (average - weight) * (1. - min(.5, (1. + step) / (10. + step)))
        weight -= .125 * gradient
    for result in results:
        np.testing.assert_allclose(result['last']['weight'], weight, rtol=1e-12)
        np.testing.assert_allclose(result['last']['average'], average, rtol=1e-12)
    assert results[0]['last']['average'].tobytes() == results[1]['last']['average'].tobytes()
