"""VariablePlacement('replicated'), and updates that write trained variables: replicas follow."""

import numpy as np
import pytest
import sample_models as samples
import tensorflow.compat.v1 as tf

import towers
from sample_models import kind_of_variables  # noqa: F401, a fixture
from towers.reduce.replica_updates import replicas_follow

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


def build(way, devices=2, optimizer=sgd, model=clipped, all_reduce=None, **options):
    return towers.build_towers(
        model(way), in_float32(VECTORS), optimizer(), devices, 'mean',
        variables=towers.VariablePlacement('replicated', all_reduce), **options)


def losses_of(built, steps=4, train_op=None):
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        losses = [session.run([built.loss, train_op or built.train_op])[0] for _ in range(steps)]
        assert built.replicas.variables
        for replica in built.replicas.variables:
            own, theirs = session.run([built.replicas.original(replica), replica])
            assert own.tobytes() == theirs.tobytes()
        return losses


@pytest.mark.parametrize('way, options', [
    ('collection', {}), ('collection', {'update_ops': 'all'})] + [
        pytest.param(*case, marks=pytest.mark.slow) for case in [
            ('collection', {'all_reduce': 'collective'}), ('returned', {})]])
def test_replicas_get_what_an_update_writes(way, options, kind_of_variables):  # noqa: F811
    built = build(way, **options)
    np.testing.assert_allclose(losses_of(built), plain_losses(), rtol=1e-5)
    assert not towers.audit(built).broken


def test_each_replica_is_written_on_its_tower(kind_of_variables):  # noqa: F811
    built = build('collection', 4)
    writes = replicas_follow(built.replicas, tf.get_collection(tf.GraphKeys.UPDATE_OPS), [])
    assert [op.device for op in writes] == ['/device:CPU:%d' % tower for tower in (1, 2, 3)]


def test_what_depends_on_the_batch_leaves_replicas_equal(kind_of_variables):  # noqa: F811
    def by_batch(unused_way):
        def model(features, targets):
            weights = tf.get_variable('w', [features.shape[1], 1])
            mean = tf.reduce_mean(features, 0)[:, tf.newaxis]
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign_add(weights, mean))
            return tf.reduce_mean(tf.square(tf.matmul(features, weights) - targets))
        return model
    # In which order towers read and write is not said; `losses_of` compares the replicas.
    losses_of(build(None, 3, model=by_batch, update_ops='all', remainder='weight'))


def test_each_train_op_of_several_losses_clips_every_replica():
    def two_losses(way):
        def model(features, targets):
            output = clipped(way)(features, targets)
            other = tf.get_variable('v', [features.shape[1], 1])
            other = tf.reduce_mean(tf.square(tf.matmul(features, other) - targets))
            return {'loss': {'critic': output['loss'], 'other': other},
                    'updates': output['updates']}
        return model
    built = build('returned', model=two_losses, optimizer=lambda: {
        'critic': towers.Objective(sgd(), lambda all_of: [
            v for v in all_of if v.op.name == 'w']),
        'other': towers.Objective(sgd(), lambda all_of: [
            v for v in all_of if v.op.name != 'w'])})
    with tf.Session(config=towers.session_config(built.devices)) as session:
        for train_op in (built.train_ops['critic'], built.train_op):
            session.run(tf.global_variables_initializer())
            session.run(built.replicas.refresh())
            losses = [session.run([built.loss['critic'], train_op])[0] for _ in range(4)]
            np.testing.assert_allclose(losses, plain_losses(), rtol=1e-5)


@pytest.mark.parametrize('update_ops', ['first', 'all'])
def test_a_write_of_the_forward_pass_is_refused(update_ops, kind_of_variables):  # noqa: F811
    with pytest.raises(towers.SharedVariableError, match=(
            r'writes the trainable variable w \(operation clip\), .* UPDATE_OPS .* '
            'another VariablePlacement')):
        build('inline', update_ops=update_ops)


def test_a_write_of_the_forward_pass_that_is_left_out_is_not():
    losses = losses_of(build('inline', update_ops='none'))
    np.testing.assert_allclose(losses, plain_losses(way=None), rtol=1e-5)
    assert abs(losses[1] - plain_losses()[1]) > 0.01  # which is clipped


def test_one_that_cannot_be_left_out_is_refused():
    """update_ops='none', and the loss is computed from what the write gives."""
    def in_use(unused_way):
        def model(features, targets):
            weights = tf.get_variable('w', [features.shape[1], 1])
            new = tf.identity(tf.assign(weights, tf.clip_by_value(weights, -.1, .1)))
            return tf.reduce_mean(tf.square(tf.matmul(features, new) - targets))
        return model
    with pytest.raises(towers.SharedVariableError, match='writes the trainable variable w '):
        build(None, model=in_use, update_ops='none')


def test_without_such_an_update_nothing_follows():
    def untouched(unused_way):
        return lambda features, targets: clipped(None)(features, targets)['loss']
    built = build(None, model=untouched)
    made = [op.type for op in built.loss.graph.get_operations() if op.name.startswith('replicas/')]
    assert 'Assign' not in made and 'AssignVariableOp' not in made
