"""What an update of any kind is computed by, told apart among workers that each make it."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.cluster.fingerprint import difference, fingerprint
from test_sent_state import built, names_of, why_apart

ASYNCHRONOUS = dict(kind='ps', ps=['c:1'], synchronous=False)
ADVICE = '. Give the same optimizer, learning rate and transform_gradients on every worker'


class Own(tf.train.Optimizer):
    """An optimizer that writes by `assign`, as BERT's does: `update(variable, gradient)`."""

    def __init__(self, update):
        super(Own, self).__init__(False, 'Own')
        self._update = update

    def apply_gradients(self, pairs, global_step=None, name=None):
        return tf.group(*[self._update(variable, tf.convert_to_tensor(gradient))
                          for gradient, variable in pairs])


def by_rate(rate):
    return Own(lambda variable, gradient: variable.assign(variable - rate * gradient))


def by_moment(decay):
    """The decay is in the write of the moment alone."""
    def update(variable, gradient):
        moment = tf.get_variable(variable.op.name + '/m', variable.shape, trainable=False,
                                 initializer=tf.zeros_initializer())
        with tf.control_dependencies([moment.assign(decay * moment + gradient)]):
            return variable.assign_sub(0.5 * moment.read_value())
    return Own(update)


def by_schedule(rate):
    def update(variable, gradient):
        step = tf.cast(tf.train.get_or_create_global_step(), tf.float32)
        return variable.assign_sub(tf.train.exponential_decay(0.5, step, 100, rate) * gradient)
    return Own(update)


def by_branch(rate):
    return Own(lambda variable, gradient: tf.cond(
        tf.reduce_sum(gradient) > 0., lambda: variable.assign_sub(rate * gradient).op,
        lambda: tf.no_op()))


def by_fed(decay):
    """The rate is fed; a decay of weights is computed with it."""
    def update(variable, gradient):
        rate = tf.placeholder(tf.float32)
        return variable.assign(variable - rate * (gradient + decay * variable))
    return Own(update)


def by_matrix(value):
    return Own(lambda variable, gradient: variable.assign_sub(
        gradient if variable.op.name == 'w' else
        tf.matmul(np.full([9, 9], value, 'f'), gradient)))


def of_worker(rank, make_optimizer=lambda: by_rate(0.5), resource=True, examples=4, kind='ring',
              transform=None, **fields):
    """What a worker says of a model that an update trains; of its batch only the size is known."""
    with tf.Graph().as_default():
        cluster = towers.Cluster(kind, ['a:1', 'b:1'], rank=rank, **fields)

        def model_fn(x, rows):
            weight, table = [tf.get_variable(name, shape, use_resource=resource) for name, shape in
                             (('w', [3]), ('table', [9, 3]))]
            return tf.reduce_sum(x * weight + tf.gather(table, rows)) / examples
        step = towers.build_towers(
            model_fn, (tf.placeholder(tf.float32, [examples, 3]),
                       tf.placeholder(tf.int32, [examples])),
            make_optimizer(), 1, 'mean', cluster=cluster, transform_gradients=transform)
        return fingerprint(cluster, step, None, 'Own')


def of_two(one, other, **options):
    """How the updates of two workers differ by their optimizers; those of two alike do not."""
    own = of_worker(0, one, **options)
    assert difference(own, of_worker(1, one, **options)) is None
    return difference(own, of_worker(1, other, **options))


@pytest.mark.parametrize('make, name, operation, resource, fields', [
    (by_rate, 'table', 'Mul', False, {}), (by_rate, 'table', 'Mul', True, ASYNCHRONOUS),
    (by_moment, 'table/m', 'Mul', False, ASYNCHRONOUS), (by_moment, 'table/m', 'Mul', True, {}),
    (by_schedule, 'table', 'Pow', False, {}), (by_branch, 'table', 'Mul', True, {}),
    (by_fed, 'table', 'Mul', True, {}), (by_fed, 'table', 'Mul', True, ASYNCHRONOUS)])
def test_an_optimizer_that_assigns(make, name, operation, resource, fields):
    assert of_two(lambda: make(0.25), lambda: make(0.125), resource=resource, **fields) == (
        'its update of %r is computed by 1 %s with 0.125, and that of worker 0 by 1 %s with 0.25%s'
        % (name, operation, operation, ADVICE))


@pytest.mark.parametrize('resource', [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize('one, other, text', [
    (lambda: tf.train.GradientDescentOptimizer(0.1),
     lambda: tf.train.GradientDescentOptimizer(0.2), 'with 0.200000003'),
    (lambda: tf.train.MomentumOptimizer(0.1, 0.9),
     lambda: tf.train.MomentumOptimizer(0.1, 0.5), 'with 0.5'),
    (lambda: tf.train.MomentumOptimizer(0.1, 0.9),
     lambda: tf.train.MomentumOptimizer(0.1, 0.9, use_nesterov=True), 'use_nesterov=True'),
    (lambda: tf.train.AdamOptimizer(tf.placeholder(tf.float32, [])),
     lambda: tf.train.AdamOptimizer(tf.placeholder(tf.float32, []), epsilon=0.25), 'with 0.25')])
@pytest.mark.parametrize('fields', [{}, ASYNCHRONOUS])
def test_an_optimizer_of_tensorflows(one, other, text, resource, fields):
    why = of_two(one, other, resource=resource, **fields)
    assert why.startswith("its update of 'table' is computed by 1 ") and text in why


def test_a_constant_of_many_numbers():
    assert of_two(lambda: by_matrix(1.), lambda: by_matrix(2.)).startswith(
        "its update of 'table' is computed by 1 MatMul with 81 numbers (checksum ")


def clipped(norm):
    def transform(pairs):
        gradients, _ = tf.clip_by_global_norm([gradient for gradient, _ in pairs], norm)
        return list(zip(gradients, [variable for _, variable in pairs]))
    return transform


def changed(change):
    """`transform_gradients` that changes each gradient."""
    return lambda pairs: [(change(tf.convert_to_tensor(gradient)), variable)
                          for gradient, variable in pairs]


def printed(gradient):
    return tf.Print(gradient, [tf.norm(gradient), tf.constant(7.)])


@pytest.mark.parametrize('one, other, text', [
    (clipped(3.), clipped(3.), None), (changed(printed), None, None),
    (changed(tf.identity), None, None), (clipped(3.), clipped(7.), 'with 7'),
    (changed(tf.identity), changed(tf.sign), '1 Sign, and that of worker 0 by fewer operations')])
def test_a_transformation_of_the_sums(one, other, text):
    why = difference(of_worker(0, transform=one), of_worker(1, transform=other))
    assert why is None if text is None else (
        why.startswith("its update of 'table' is computed by") and text in why)


@pytest.mark.parametrize('fields', [dict(uneven=True), ASYNCHRONOUS])
@pytest.mark.parametrize('make', [lambda: by_rate(.5), lambda: tf.train.AdamOptimizer(0.1)])
def test_a_number_of_examples_is_no_number_of_an_update(make, fields):
    own = of_worker(0, make, examples=4, **fields)
    assert difference(own, of_worker(1, make, examples=6, **fields)) is None


@pytest.mark.parametrize('resource', [True, False])
def test_nor_is_what_the_gradient_of_a_scalar_is_computed_by(resource):
    def update(examples):
        with tf.Graph().as_default():
            cluster = towers.Cluster(workers=['a:1', 'b:1'], **ASYNCHRONOUS)
            step = towers.build_towers(
                lambda x: tf.reduce_mean(x * tf.get_variable('w', [], use_resource=resource)),
                tf.ones([examples]), tf.train.GradientDescentOptimizer(0.5), 1, 'mean',
                cluster=cluster)
            return fingerprint(cluster, step, None)['update']
    assert update(2) == update(4) is not None


def test_where_the_chief_alone_updates_nothing_is_compared():
    assert of_worker(1, kind='ps', ps=['c:1'])['update'] is None


class Complex(tf.train.GradientDescentOptimizer):
    def _valid_dtypes(self):
        return {tf.complex64, tf.complex128, tf.float16, tf.float32, tf.float64}


@pytest.mark.parametrize('use_resource', [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize('dtype', [
    tf.complex64, pytest.param(tf.complex128, marks=pytest.mark.slow),
    pytest.param(tf.float16, marks=pytest.mark.slow)], ids=['complex64', 'complex128', 'float16'])
def test_a_sent_variable_of_any_type_is_no_other_update(dtype, use_resource):
    def model_fn(inputs):
        with tf.variable_scope('', use_resource=use_resource):
            center = tf.get_variable('center', [2], dtype, tf.zeros_initializer())
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign(
            center, center * .5 + tf.cast(tf.reduce_mean(inputs), dtype)))
        return tf.reduce_mean(tf.square(inputs - tf.cast(tf.reduce_sum(
            tf.math.real(center)), tf.float64)))
    assert names_of(built(model_fn, Complex(.125))) == ['center']
    assert why_apart(model_fn, model_fn, optimizer=Complex(.125)) is None
