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


class Noisy(tf.train.GradientDescentOptimizer):
    """Adds noise within the optimizer, as Langevin dynamics does."""

    def _apply_dense(self, grad, var):
        return super(Noisy, self)._apply_dense(grad + tf.random.normal([3]), var)

    def _resource_apply_dense(self, grad, handle):
        return super(Noisy, self)._resource_apply_dense(grad + tf.random.normal([3]), handle)


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


def read_from_a_queue():
    queue = tf.FIFOQueue(3, tf.float32, [[3]])
    return queue.dequeue()


def pipeline():
    return tf.data.make_one_shot_iterator(
        tf.data.Dataset.from_tensors(np.ones(3, 'f')).repeat()).get_next()


@pytest.mark.parametrize('options, operation', [
    (lambda: dict(transform=adding(lambda: tf.random.normal([3]))), 'RandomStandardNormal'),
    (lambda: dict(transform=adding(lambda: tf.random.normal([3], seed=7))),
     'RandomStandardNormal'),
    (lambda: dict(transform=adding(lambda: tf.cast(tf.timestamp(), tf.float32))), 'Timestamp'),
    (lambda: dict(transform=adding(read_from_a_queue)), 'QueueDequeueV2'),
    (lambda: dict(transform=adding(pipeline)), 'IteratorGetNext'),
    (lambda: dict(transform=written(lambda: tf.random.uniform([]))), 'RandomUniform'),
    (lambda: dict(transform=written(lambda: tf.reduce_mean(TAKEN['inputs']))),
     'PlaceholderWithDefault'),
    (lambda: dict(optimizer=Noisy(.1)), 'RandomStandardNormal'),
    (lambda: dict(optimizer=tf.train.AdamOptimizer(by_python())), 'PyFunc')])
def test_what_differs_by_worker_is_refused_by_name(options, operation):
    with pytest.raises(ClusterError, match=r"'.+' \(%s\) has a part in the update, which every "
                                           'worker makes by itself' % operation):
        build(**options())


def test_also_in_a_branch():
    with pytest.raises(ClusterError, match='has a part in the update'):
        build(adding(in_a_branch))


@pytest.mark.parametrize('cluster', [
    None, towers.Cluster('ring', ['a:1']), RING._replace(kind='ps', ps=['c:1']),
    RING._replace(kind='ps', ps=['c:1'], synchronous=False)])
def test_where_there_is_one_update_or_one_set_of_weights_nothing_is_refused(cluster):
    build(adding(lambda: tf.random.normal([3])), cluster=cluster)


class DecayedAdam(tf.train.Optimizer):
    """Adam with decayed weights, as BERT's: `assign`s, a rate by a norm as LAMB's and LARS'."""

    def __init__(self, rate):
        super(DecayedAdam, self).__init__(False, 'DecayedAdam')
        self._rate = rate

    def apply_gradients(self, pairs, global_step=None, name=None):
        writes = []
        for gradient, variable in pairs:
            moment = tf.get_variable(variable.op.name + '/m', variable.shape, trainable=False,
                                     initializer=tf.zeros_initializer())
            following = .9 * moment + .1 * gradient
            update = following / (1e-6 + tf.sqrt(tf.abs(following))) + .01 * variable
            trust = tf.where(tf.norm(update) > 0., tf.norm(variable) / tf.norm(update), 1.)
            writes += [variable.assign(variable - self._rate * trust * update),
                       moment.assign(following)]
        return tf.group(*writes)


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
    lambda: dict(optimizer=DecayedAdam(by_schedule()), transform=clipped),
    lambda: dict(optimizer=tf.train.MomentumOptimizer(tf.placeholder(tf.float32), .9)),
    lambda: dict(optimizer=tf.train.MomentumOptimizer(
        tf.placeholder_with_default(.1, None), .9)),
    lambda: dict(optimizer=tf.train.MomentumOptimizer(
        tf.get_variable('rate', [], trainable=False), .9)),
    lambda: dict(transform=adding(noise_by_the_step)),
    lambda: dict(transform=written(lambda: by_schedule())),
    lambda: dict(transform=lambda pairs: [
        (tf.Print(gradient, [tf.random.normal([]), TAKEN['inputs']]), variable)
        for gradient, variable in pairs])])
def test_what_is_the_same_on_all_workers_is_taken(options):
    assert build(**options()).machines.state == []


@pytest.mark.parametrize('uneven, num_towers', [(False, 2), (True, 1)])
def test_dropout_on_rows_is_none_of_the_update(uneven, num_towers):
    """How many rows this worker sends is a shape of the gradients, which are of the dropout."""
    def of_rows(ids):
        table = tf.get_variable('table', [5, 3])
        return tf.reduce_mean(tf.nn.dropout(tf.nn.embedding_lookup(table, ids), rate=.5))
    towers.build_towers(of_rows, (tf.placeholder(tf.int32, [None]),),
                        tf.train.GradientDescentOptimizer(.1), num_towers, remainder='weight',
                        cluster=RING._replace(uneven=uneven))
