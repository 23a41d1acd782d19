"""Slots of optimizers that a model function calls: there where one device has them, or refused."""

from estimator_runs import needs_estimator, replicated, TRAIN, TWO
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers import TowerOptimizer, replicate_model_fn

pytestmark = needs_estimator
X = np.random.RandomState(0).randn(8, 4)
train = tf.train


def network(x):
    w = tf.get_variable('net/w', [4, 3], tf.float64, tf.constant_initializer(np.ones([4, 3]) / 8))
    b = tf.get_variable('net/b', [3], tf.float64, tf.zeros_initializer())
    return tf.reduce_mean(tf.square(tf.matmul(x, w) + b - 1))


def there():
    return [(v.op.name, tf.DeviceSpec.from_string(v.device or '/device:CPU:0').to_string())
            for v in tf.global_variables()]


class OwnApply(train.MomentumOptimizer):
    """Makes slots in scopes of its own, so that nobody knows their names before."""

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        with tf.variable_scope('own'):
            return super().apply_gradients(grads_and_vars, global_step, name)


def by_one(make):
    def call(loss, wrap):
        optimizer = wrap(make())
        return optimizer.minimize(loss, train.get_or_create_global_step()), [optimizer]
    return call


def in_scopes(loss, wrap):
    optimizer = wrap(train.AdamOptimizer(0.125))
    with tf.variable_scope('training'), tf.name_scope('adam'):
        return optimizer.minimize(loss), [optimizer]


def where_reuse_is_on(loss, wrap):
    optimizer = wrap(train.MomentumOptimizer(0.125, 0.5))
    with tf.variable_scope('', reuse=tf.AUTO_REUSE):
        return optimizer.minimize(loss), [optimizer]


def of_the_same_variables(loss, wrap):
    optimizers = [wrap(train.AdamOptimizer(0.125)) for _ in range(2)]
    first = optimizers[0].minimize(loss)
    with tf.control_dependencies([first]):
        return optimizers[1].minimize(loss), optimizers


def one_within_another(loss, wrap):
    optimizer = wrap(wrap(train.MomentumOptimizer(0.125, 0.5)))
    return optimizer.minimize(loss), [optimizer]


@pytest.mark.parametrize('training', [
    by_one(lambda: train.AdagradDAOptimizer(0.125, train.get_or_create_global_step())),
    by_one(lambda: train.RMSPropOptimizer(0.125, momentum=0.5, centered=True)),
    by_one(lambda: train.FtrlOptimizer(0.125)),
    in_scopes, of_the_same_variables, one_within_another, where_reuse_is_on])
def test_they_are_there_after_the_call_as_on_one_device(training):
    def run(loss, train_op):
        with tf.Session(config=towers.session_config(2)) as session:
            session.run(tf.global_variables_initializer())
            session.run(train_op)
            return session.run(loss)
    with tf.Graph().as_default():
        loss = network(tf.constant(X))
        train_op, optimizers = training(loss, lambda optimizer: optimizer)
        expected = there()
        of_optimizers = [[v.op.name for v in each.variables()] for each in optimizers]
        loss_after = run(loss, train_op)
    seen = []

    def model_fn(x):
        loss = network(x)
        train_op, optimizers = training(loss, TowerOptimizer)
        seen.append((there(), [[v.op.name for v in each.variables()] for each in optimizers]))
        seen.append([optimizers[0].get_slot(v, name).op.name for v in tf.trainable_variables()
                     for name in optimizers[0].get_slot_names()])
        return loss, train_op
    _, spec = replicated(model_fn, [X])
    assert seen[0] == (expected, of_optimizers) and set(seen[1]) <= {name for name, _ in expected}
    assert there() == expected
    assert run(spec.loss, spec.train_op) == pytest.approx(loss_after, rel=1e-12)


def test_weights_from_a_checkpoint_by_their_scope(tmpdir):
    path = str(tmpdir.join('trained'))
    with tf.Graph().as_default(), tf.Session() as session:
        network(tf.constant(X))
        session.run(tf.global_variables_initializer())
        session.run(tf.global_variables()[1].assign([1.5, 2.5, 3.5]))
        train.Saver().save(session, path)
    seen = []

    def model_fn(x):
        loss = network(x)
        train.init_from_checkpoint(path, {'net/': 'net/'})  # where no slot is yet
        seen.extend(each.op.name for each in tf.global_variables())
        return loss, TowerOptimizer(train.AdamOptimizer(0.125)).minimize(loss)
    _, spec = replicated(model_fn, [X])
    assert seen == ['net/w', 'net/b']
    with tf.Session(config=towers.session_config(TWO)) as session:
        session.run(tf.global_variables_initializer())
        np.testing.assert_array_equal(session.run(tf.global_variables()[1]), [1.5, 2.5, 3.5])
        session.run(spec.train_op)
        np.testing.assert_allclose(session.run(tf.global_variables()[1]), [1.375, 2.375, 3.375],
                                   rtol=1e-6)


def test_sync_replicas_has_those_of_the_one_inside():
    seen, sync = [], train.SyncReplicasOptimizer(train.AdamOptimizer(0.125), 1, 1)

    def model_fn(x):
        loss = network(x)
        with tf.name_scope('training'):
            train_op = TowerOptimizer(sync).minimize(loss, train.get_or_create_global_step())
        seen.extend(there())
        return loss, train_op
    replicated(model_fn, [X])
    sync.ready_for_local_init_op.mark_used()
    assert seen == there() and ('beta1_power', '/device:CPU:0') in seen


def test_a_build_that_fails_takes_them_along():
    def model_fn(x):
        TowerOptimizer(train.AdamOptimizer(0.125)).minimize(network(x))
        assert len(tf.global_variables()) == 8
        raise KeyError('mine')
    with pytest.raises(KeyError, match='mine'):
        replicated(model_fn, [X])
    assert not tf.global_variables()


# ---- what is returned in an EstimatorSpec --------------------------------------------------------

def specified(make_optimizer, **make):
    """A model function whose spec has a scaffold, or hooks, made after the optimizer was called."""
    def model_fn(features, labels, mode):
        loss = network(features)
        train_op = TowerOptimizer(make_optimizer()).minimize(loss, train.get_global_step())
        more = {name: function() for name, function in make.items()}
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op, **more)
    return model_fn


def whole(**saver):
    return train.Scaffold(saver=train.Saver(**saver))


def test_an_estimator_goes_on_from_its_checkpoint(tmpdir):
    def batches():
        return tf.data.Dataset.from_tensor_slices((X, X)).repeat().batch(4)
    names = []
    for devices in (['/cpu:0'], TWO):
        directory = str(tmpdir.join(str(len(devices))))
        for _ in range(2):
            trained = tf.estimator.Estimator(
                replicate_model_fn(specified(lambda: train.AdamOptimizer(0.125), scaffold=whole),
                                   devices=devices), directory,
                config=tf.estimator.RunConfig(session_config=towers.session_config(TWO)))
            trained.train(batches, steps=2)
        names.append({name: trained.get_variable_value(name) for name, _ in
                      train.list_variables(directory)})
    assert sorted(names[0]) == ['beta1_power', 'beta2_power', 'global_step', 'net/b', 'net/b/Adam',
                                'net/b/Adam_1', 'net/w', 'net/w/Adam', 'net/w/Adam_1']
    assert sorted(names[1]) == sorted(names[0]) and names[1]['global_step'] == 4
    for name, value in names[0].items():
        np.testing.assert_allclose(names[1][name], value, rtol=1e-9, err_msg=name)


def in_the_collection():
    tf.add_to_collection(tf.GraphKeys.SAVERS, train.Saver())


@pytest.mark.parametrize('make', [
    dict(scaffold=whole), dict(scaffold=in_the_collection),
    dict(training_chief_hooks=lambda: [train.CheckpointSaverHook(
        'nowhere', save_steps=1, saver=train.Saver())])])
def test_a_saver_that_lacks_the_slots_of_an_apply_gradients_of_its_own(make):
    train.get_or_create_global_step()
    with pytest.raises(towers.ModelFunctionError,
                       match="lacks 'own/net/w/Momentum'.*defer_build=True"):
        replicate_model_fn(specified(lambda: OwnApply(0.125, 0.5), **make), devices=TWO)(
            X, X, TRAIN)


@pytest.mark.parametrize('scaffold', [
    lambda: whole(defer_build=True), lambda: whole(var_list=tf.trainable_variables())])
def test_what_lacks_no_variable_without_intention(scaffold):
    train.get_or_create_global_step()
    replicate_model_fn(specified(lambda: OwnApply(0.125, 0.5), scaffold=scaffold), devices=TWO)(
        X, X, TRAIN)
    assert [name for name, _ in there()][-2:] == ['own/net/w/Momentum', 'own/net/b/Momentum']
