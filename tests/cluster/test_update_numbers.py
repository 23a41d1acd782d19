"""Numbers that an update of any kind computes with, told apart among workers that each make it."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.cluster.fingerprint import difference, fingerprint

ASYNCHRONOUS = dict(kind='ps', ps=['c:1'], synchronous=False)


class Own(tf.train.Optimizer):
    """An optimizer that writes by `assign`, as BERT's does: `update(variable, gradient)`."""

    def __init__(self, update):
        super(Own, self).__init__(False, 'Own')
        self._update = update

    def apply_gradients(self, pairs, global_step=None, name=None):
        return tf.group(*[self._update(variable, gradient) for gradient, variable in pairs])


def by_rate(rate):
    return lambda variable, gradient: variable.assign(variable - rate * gradient)


def by_moment(decay):
    """The decay is in the write of the moment alone."""
    def update(variable, gradient):
        moment = tf.get_variable(variable.op.name + '/m', variable.shape, trainable=False,
                                 initializer=tf.zeros_initializer())
        with tf.control_dependencies([moment.assign(decay * moment + gradient)]):
            return variable.assign_sub(0.5 * moment.read_value())
    return update


def by_schedule(rate):
    def update(variable, gradient):
        step = tf.cast(tf.train.get_or_create_global_step(), tf.float32)
        return variable.assign_sub(tf.train.exponential_decay(0.5, step, 100, rate) * gradient)
    return update


def by_branch(rate):
    return lambda variable, gradient: tf.cond(
        tf.reduce_sum(gradient) > 0., lambda: variable.assign_sub(rate * gradient).op,
        lambda: tf.no_op())


def of_worker(rank, update=by_rate(0.5), resource=True, examples=4, kind='ring', optimizer=None,
              **fields):
    """What a worker says of a model that an update trains; of its batch only the size is known."""
    transform = fields.pop('transform', None)
    with tf.Graph().as_default():
        cluster = towers.Cluster(kind, ['a:1', 'b:1'], rank=rank, **fields)

        def model_fn(x, rows):
            weight, table = [tf.get_variable(name, shape, use_resource=resource) for name, shape in
                             (('w', [3]), ('table', [9, 3]))]
            return tf.reduce_sum(x * weight + tf.gather(table, rows)) / examples
        built = towers.build_towers(
            model_fn, (tf.placeholder(tf.float32, [examples, 3]),
                       tf.placeholder(tf.int32, [examples])),
            optimizer() if optimizer else Own(lambda variable, gradient: update(
                variable, tf.convert_to_tensor(gradient))), 1, 'mean', cluster=cluster,
            transform_gradients=transform)
        return fingerprint(cluster, built, None, 'Own')


@pytest.mark.parametrize('update, resource, fields', [
    (by_rate, True, ASYNCHRONOUS), (by_branch, True, {})] + [
        pytest.param(*case, marks=pytest.mark.slow) for case in [
            (by_moment, False, ASYNCHRONOUS), (by_schedule, False, {})]])
def test_an_optimizer_that_assigns(update, resource, fields):
    own = of_worker(0, update(0.25), resource, **fields)
    assert difference(own, of_worker(1, update(0.25), resource, **fields)) is None
    assert difference(own, of_worker(1, update(0.125), resource, **fields)) == (
        "its update of 'table%s' computes with 0.125, and that of worker 0 with 0.25" % (
            '/m' if update is by_moment else ''))


def test_a_constant_of_many_numbers():
    def mixed(value):
        return lambda variable, gradient: variable.assign_sub(
            gradient if variable.op.name == 'w' else
            tf.matmul(np.full([9, 9], value, 'f'), gradient))
    own = of_worker(0, mixed(1.))
    assert difference(own, of_worker(1, mixed(1.))) is None
    assert difference(own, of_worker(1, mixed(2.))).startswith(
        "its update of 'table' computes with 81 numbers (checksum ")


def test_a_transformation_of_the_sums():
    def clipped(norm):
        def transform(pairs):
            gradients, _ = tf.clip_by_global_norm([gradient for gradient, _ in pairs], norm)
            return list(zip(gradients, [variable for _, variable in pairs]))
        return transform
    own = of_worker(0, transform=clipped(3.))
    assert difference(own, of_worker(1, transform=clipped(3.))) is None
    assert difference(own, of_worker(1, transform=clipped(7.))) == (
        "its update of 'table' computes with 7, 7, and that of worker 0 with 3, 3")


def test_what_one_worker_prints_of_a_sum_does_not_count():
    def printed(pairs):
        return [(tf.Print(tf.convert_to_tensor(gradient), [tf.norm(tf.convert_to_tensor(gradient)),
                                                           tf.constant(7.)]), variable)
                for gradient, variable in pairs]
    assert difference(of_worker(0, transform=printed), of_worker(1)) is None


@pytest.mark.parametrize('fields', [dict(uneven=True), ASYNCHRONOUS])
@pytest.mark.parametrize('make', [None, lambda: tf.train.AdamOptimizer(0.1)])
def test_a_number_of_examples_is_no_number_of_an_update(make, fields):
    own = of_worker(0, examples=4, optimizer=make, **fields)
    assert difference(own, of_worker(1, examples=6, optimizer=make, **fields)) is None


def test_what_is_computed_from_the_own_batch_does_not_count():
    def update(variable, gradient):
        seen = tf.reduce_sum(tf.get_default_graph().get_tensor_by_name('Placeholder:0'))
        return variable.assign_sub(0.5 * gradient + 0. * (seen * Own.examples))
    Own.examples = 4.
    own = of_worker(0, update)
    Own.examples = 6.
    assert difference(own, of_worker(1, update)) is None


def test_where_the_chief_alone_updates_nothing_is_compared():
    served = dict(kind='ps', ps=['c:1'])
    assert of_worker(1, **served)['updates'] == []


def by_fed(decay):
    """The rate is fed; a decay of weights is computed with it."""
    def update(variable, gradient):
        rate = tf.placeholder(tf.float32)
        return variable.assign(variable - rate * (gradient + decay * variable))
    return update


@pytest.mark.parametrize('fields', [{}, ASYNCHRONOUS])
def test_a_fed_rate_is_no_batch(fields):
    own = of_worker(0, by_fed(0.25), **fields)
    assert difference(own, of_worker(1, by_fed(0.25), **fields)) is None
    assert difference(own, of_worker(1, by_fed(0.125), **fields)) == (
        "its update of 'table' computes with 0.125, and that of worker 0 with 0.25")


@pytest.mark.slow
def test_an_optimizer_of_tensorflows_whose_rate_is_fed():
    def adam(epsilon):
        return tf.train.AdamOptimizer(tf.placeholder(tf.float32, []), epsilon=epsilon)
    own = of_worker(0, optimizer=lambda: adam(1e-8))
    assert difference(own, of_worker(1, optimizer=lambda: adam(1e-8))) is None
    assert 'epsilon' in difference(own, of_worker(1, optimizer=lambda: adam(0.25))) or (
        'computes with' in difference(own, of_worker(1, optimizer=lambda: adam(0.25))))
