"""Operations that an update is made by, told apart among workers that each make it."""

import pytest
import tensorflow.compat.v1 as tf

from towers.cluster.fingerprint import difference
from test_step_writes import built, names_of, state, why_apart
from test_update_numbers import ASYNCHRONOUS, Own, of_worker


def nesterov(is_used):
    return lambda: tf.train.MomentumOptimizer(0.1, 0.9, use_nesterov=is_used)


def changed(change):
    """`transform_gradients` that changes each gradient."""
    return lambda pairs: [(change(tf.convert_to_tensor(gradient)), variable)
                          for gradient, variable in pairs]


def by_branch(change):
    """An optimizer that changes a gradient in a branch, which writes the variable."""
    def update(variable, gradient):
        return tf.cond(tf.reduce_sum(gradient) > 0.,
                       lambda: variable.assign_sub(change(gradient)).op, lambda: tf.no_op())
    return lambda: Own(lambda variable, gradient: update(
        variable, tf.convert_to_tensor(gradient)))


@pytest.mark.parametrize('resource, fields', [
    (True, {}), pytest.param(False, ASYNCHRONOUS, marks=pytest.mark.slow)])
def test_an_attribute_of_an_optimizer(resource, fields):
    own = of_worker(0, resource=resource, optimizer=nesterov(False), **fields)
    assert difference(own, of_worker(1, resource=resource, optimizer=nesterov(False),
                                     **fields)) is None
    why = difference(own, of_worker(1, resource=resource, optimizer=nesterov(True), **fields))
    assert why.startswith("its update of 'table' is made by 1 ") and (
        'use_nesterov=True, and that of worker 0 by 1 ' in why)


@pytest.mark.parametrize('fields', [{}, pytest.param(ASYNCHRONOUS, marks=pytest.mark.slow)])
def test_another_transformation(fields):
    own = of_worker(0, transform=changed(tf.identity), **fields)
    assert difference(own, of_worker(1, **dict(fields, transform=None))) is None
    assert difference(own, of_worker(1, transform=changed(tf.sign), **fields)) == (
        "its update of 'table' is made by 1 Sign, and that of worker 0 by fewer operations. Give "
        'the same optimizer and transform_gradients on every worker')


@pytest.mark.slow
def test_what_a_branch_writes():
    own = of_worker(0, optimizer=by_branch(tf.square))
    assert difference(own, of_worker(1, optimizer=by_branch(tf.square))) is None
    assert "its update of 'table' is made by 1 Tanh, and that of worker 0 by 1 Square" in (
        difference(own, of_worker(1, optimizer=by_branch(tf.tanh))))


class Complex(tf.train.GradientDescentOptimizer):
    def _valid_dtypes(self):
        return {tf.complex64, tf.complex128, tf.float16, tf.float32, tf.float64}


@pytest.mark.parametrize('dtype, use_resource', [(tf.complex64, True)] + [
    pytest.param(*case, marks=pytest.mark.slow) for case in [
        (tf.complex128, False), (tf.float16, True)]])
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


@pytest.mark.parametrize('dtype', [
    tf.complex128, pytest.param(tf.uint64, marks=pytest.mark.slow)])
def test_what_the_update_writes_from_the_batch_is_sent_in_any_type(dtype):
    """`transform_gradients` writes it, so that the message comes after the sums."""
    taken = []

    def model_fn(inputs):
        taken[:] = [tf.reduce_mean(inputs)]
        return tf.reduce_mean(inputs) * state('weight', trainable=True)

    def transform(pairs):
        seen = tf.get_variable('seen', [], dtype, tf.zeros_initializer(), trainable=False,
                               use_resource=True)
        as_type = lambda value: tf.bitcast(value, dtype) if dtype == tf.uint64 else tf.cast(
            value, dtype)
        with tf.control_dependencies([tf.assign(seen, as_type(taken[0] + pairs[0][0]))]):
            value = seen.read_value()
        value = tf.bitcast(value, tf.float64) if dtype == tf.uint64 else tf.math.real(value)
        return [(gradient * value, variable) for gradient, variable in pairs]
    assert names_of(built(model_fn, transform_gradients=transform)) == ['seen']
    assert why_apart(model_fn, model_fn, transform_gradients=transform) is None
