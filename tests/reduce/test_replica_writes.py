"""VariablePlacement('replicated'), and what writes trained variables beside one gradient each."""

import numpy as np
import pytest
import sample_models as samples
import tensorflow.compat.v1 as tf

import towers
from sample_models import kind_of_variables  # noqa: F401, a fixture
from test_update import BertOptimizer

VECTORS = samples.vectors(8)


def sgd():
    return tf.train.GradientDescentOptimizer(0.1)


def clipped(way, within=0.1):
    """A linear model whose weights are clipped in every step, as a critic's are in a WGAN."""
    def model(features, targets):
        weights = tf.get_variable('w', [features.shape[1], 1], initializer=tf.ones_initializer())
        loss = tf.reduce_mean(tf.square(tf.matmul(features, weights) - targets))
        with tf.control_dependencies([loss]):
            clip = tf.assign(weights, tf.clip_by_value(weights, -within, within), name='clip')
        if way == 'collection':
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, clip)
        elif way == 'inline':
            with tf.control_dependencies([clip]):
                loss = tf.identity(loss)
        return {'loss': loss, 'updates': [clip] if way == 'returned' else None}
    return model


def in_float32(data):
    return tuple(np.asarray(each, np.float32) for each in data)


def plain_losses(steps=4, way='collection'):
    with tf.Graph().as_default():
        loss = clipped(way)(*map(tf.constant, in_float32(VECTORS)))['loss']
        optimizer = sgd()
        pairs = optimizer.compute_gradients(loss)
        with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS) + [loss]):
            train_op = optimizer.apply_gradients(pairs)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            return [session.run([loss, train_op])[0] for _ in range(steps)]


def build(way, devices=2, optimizer=sgd, model=clipped, **options):
    return towers.build_towers(
        model(way), in_float32(VECTORS), optimizer(), devices, 'mean',
        variables=towers.VariablePlacement('replicated'), **options)


def losses_of(built, steps=4, train_op=None):
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        losses = [session.run([built.loss, train_op or built.train_op])[0] for _ in range(steps)]
        assert built.replicas.variables
        for variable in built.variables:
            own, theirs = session.run([variable, built.replicas.replica_of(variable, 1)])
            assert own.tobytes() == theirs.tobytes()
        return losses


@pytest.mark.parametrize('way, options', [
    ('collection', {'update_ops': 'all'})] + [
        pytest.param(*case, marks=pytest.mark.slow) for case in [
            ('collection', {}), ('returned', {})]])
def test_replicas_get_what_an_update_writes(way, options, kind_of_variables):  # noqa: F811
    built = build(way, **options)
    np.testing.assert_allclose(losses_of(built), plain_losses(), rtol=1e-5)
    assert not towers.audit(built).broken


@pytest.mark.parametrize('update_ops', ['first', 'all'])
def test_a_write_of_the_forward_pass_is_refused(update_ops, kind_of_variables):  # noqa: F811
    with pytest.raises(towers.SharedVariableError, match=(
            r'writes the trainable variable w \(operation clip\) .* UPDATE_OPS .* '
            'another VariablePlacement')):
        build('inline', update_ops=update_ops)


@pytest.mark.parametrize('write', [
    lambda weights, features: tf.assign_add(weights, tf.reduce_sum(features, 0)[:, None]),
    lambda weights, features: tf.scatter_add(
        weights, tf.cast(features[:, 0] > 0., tf.int32), features[:, :1])])
def test_a_trained_variable_that_every_tower_writes_has_no_replicas(write):
    """Each tower would add its examples to its own replica alone."""
    def model(features):
        weights = tf.get_variable('w', [6, 1], tf.float64)
        loss = tf.reduce_mean(tf.matmul(features, weights))
        with tf.control_dependencies([loss]):
            return towers.ModelOutput(loss, updates=[write(weights, features)])
    batch = tf.placeholder(tf.float64, [None, 6])
    shared = towers.build_towers(model, (batch,), sgd(), 2)
    assert 'every tower, one after the other: 1' in shared.plan.line('updated by')
    with tf.Graph().as_default(), pytest.raises(
            towers.SharedVariableError, match='every tower writes the trainable variable w in turn'):
        towers.build_towers(model, (tf.placeholder(tf.float64, [None, 6]),), sgd(), 2,
                            variables=towers.VariablePlacement('replicated'))


# ---- optimizers that are not TensorFlow's own: the model's variables are updated, and sent -------

class Changed(tf.train.MomentumOptimizer):
    """Changes its gradients before it applies them."""

    def __init__(self, change):
        super(Changed, self).__init__(0.1, 0.9)
        self._change = change

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        return super(Changed, self).apply_gradients(
            self._change(list(grads_and_vars)), global_step, name)


def by_list(pairs):
    own = [v.op.name for v in tf.trainable_variables()]
    return [(g + v if v.op.name in own else g, v) for g, v in pairs]


def by_another_rate(pairs):
    return [(g * (2. if v.op.name == 'body' else 3.), v) for g, v in pairs]


def by_the_norm_of_all(pairs):
    clipped, _ = tf.clip_by_global_norm([g for g, _ in pairs], 0.1)
    return list(zip(clipped, [v for _, v in pairs]))


class Clips(tf.train.GradientDescentOptimizer):
    """Clips what tf.trainable_variables() lists after a step, which replicas are not in."""

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        applied = super(Clips, self).apply_gradients(grads_and_vars, global_step, name)
        with tf.control_dependencies([applied]):
            return tf.group(*[tf.assign(v, tf.clip_by_value(v, -.1, .1))
                              for v in tf.trainable_variables()])


@pytest.mark.slow
@pytest.mark.parametrize('optimizer', [
    lambda: Changed(by_the_norm_of_all), lambda: Clips(0.1)] + [
        pytest.param(each, marks=pytest.mark.slow) for each in (
            lambda: Changed(by_list), lambda: Changed(by_another_rate), BertOptimizer)])
def test_an_optimizer_of_ones_own_updates_the_models_variables(
        optimizer, kind_of_variables):  # noqa: F811
    data = samples.vectors(12)
    built = samples.check_against_one_device(
        samples.two_layers, data, optimizer, 2, reduction='mean',
        variables=towers.VariablePlacement('replicated')).built
    assert built.plan.line('variables on').endswith(
        'updated once and sent to the replicas, since the optimizer may look at more than each '
        'gradient')
    assert len(built.replicas.variables) == 2 and not built.replicas.slots


def equal_on_both_towers(built):
    """The values of the variables after a step, once each replica is found to be the same bits."""
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        session.run(built.replicas.refresh())
        session.run(built.train_op)
        pairs = session.run([(variable, built.replicas.replica_of(variable, 1))
                             for variable in built.variables])
    for own, other in pairs:
        np.testing.assert_array_equal(own, other)
    return [own for own, _ in pairs]


def test_replicas_follow_what_an_optimizer_writes_without_a_gradient():
    """It clips all trainable variables, and is given the gradient of one."""
    data = samples.vectors(12)
    built = towers.build_towers(
        samples.two_layers, data, towers.Objective(Clips(0.1), var_list=lambda all_of: all_of[:1]),
        2, 'mean', variables=towers.VariablePlacement('replicated'))
    assert all(abs(value).max() <= .1 for value in equal_on_both_towers(built))
