"""Variables, updates and summaries that an optimizer makes in `compute_gradients`."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from towers.errors import SharedVariableError

BATCH = np.array([1., 2., 6.])


class Scaled(tf.train.GradientDescentOptimizer):
    """Scales the loss by a variable, and counts in another how often gradients were taken."""

    def __init__(self, make, rate=.1):
        super(Scaled, self).__init__(tf.constant(rate, tf.float64))
        self.make = make

    def compute_gradients(self, loss, *args, **options):
        with tf.name_scope('scaling'):
            scale = self.make('scale', 64.)
            seen = self.make('seen', 0.)
        tf.summary.scalar('scaled', loss * scale)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign_add(seen, 1.))
        pairs = super(Scaled, self).compute_gradients(loss * scale, *args, **options)
        return [(gradient / scale, variable) for gradient, variable in pairs]


def by_get_variable(name, value):
    with tf.variable_scope('scaling', reuse=tf.AUTO_REUSE):
        return tf.get_variable(name, [], tf.float64, tf.constant_initializer(value),
                               trainable=False)


def by_variable(name, value):
    return tf.Variable(tf.constant(value, tf.float64), name=name, trainable=False)


def model_fn(x):
    return tf.reduce_mean(x) * tf.get_variable('w', [], tf.float64, tf.ones_initializer())


@pytest.mark.parametrize('make', [by_get_variable, by_variable])
@pytest.mark.parametrize('num_towers, options', [
    (1, {}), (2, dict(copies='reuse')), (2, dict(remainder='weight')), (3, dict(copies='clone')),
    (1, dict(accumulate=3)), (3, dict(first_scope=False, copies='reuse'))])
@pytest.mark.parametrize('use_resource', [True, False])
def test_as_on_one_device(make, num_towers, options, use_resource, tmp_path):
    with tf.variable_scope('', use_resource=use_resource):
        inputs = BATCH[:2] if num_towers == 2 and 'remainder' not in options else BATCH
        built = towers.build_towers(
            model_fn, tf.constant(inputs), Scaled(make), num_towers, 'mean',
            global_step=tf.train.get_or_create_global_step(), check_devices=False, **options)
    assert sorted(variable.op.name for variable in tf.global_variables()) == [
        'global_step', 'scaling/scale', 'scaling/seen', 'w']
    assert [variable.op.name for variable in tf.trainable_variables()] == ['w']
    assert all(variable.device == '/device:CPU:0' for variable in tf.global_variables('scaling'))
    assert len(tf.get_collection(tf.GraphKeys.SUMMARIES)) == 1
    assert len(tf.get_collection(tf.GraphKeys.UPDATE_OPS)) == 1
    config = tf.ConfigProto(device_count={'CPU': num_towers})
    with tf.Session(config=config) as session:
        session.run(tf.global_variables_initializer())
        for _ in range(2):
            session.run(built.train_op)
        w, seen = session.run([tf.trainable_variables()[0], tf.global_variables('scaling/seen')[0]])
        np.testing.assert_allclose([w, seen], [1 - .2 * inputs.mean(), 2.], rtol=1e-12)
        path = tf.train.Saver().save(session, str(tmp_path / 'model'))
    assert 'scaling/scale' in dict(tf.train.list_variables(path))


def test_within_scopes_of_the_program():
    with tf.name_scope('train'), tf.variable_scope('net'):
        towers.build_towers(model_fn, tf.constant(BATCH[:2]), Scaled(by_variable), 2, 'mean',
                            check_devices=False)
    assert sorted(variable.op.name for variable in tf.global_variables()) == [
        'net/w', 'train/net/scaling/scale', 'train/net/scaling/seen']


def test_with_several_losses_each_optimizer_has_its_own():
    def of_two(x):
        return {'loss': {name: tf.reduce_mean(x) * tf.get_variable(
            name, [], tf.float64, tf.ones_initializer()) for name in ('a', 'b')}}
    built = towers.build_towers(
        of_two, tf.constant(BATCH[:2]), dict(a=Scaled(by_variable), b=Scaled(by_variable, 1.)), 2,
        'mean', var_list=dict(a=lambda every: every[:1], b=lambda every: every[1:]),
        copies='reuse', check_devices=False)
    assert len(tf.global_variables('scaling')) == 4
    with tf.Session(config=tf.ConfigProto(device_count={'CPU': 2})) as session:
        session.run(tf.global_variables_initializer())
        session.run(built.train_op)
        np.testing.assert_allclose(session.run(tf.trainable_variables()), [1 - .15, 1 - 1.5])
        assert session.run(tf.global_variables('scaling.*seen')) == [1., 1.]


def test_a_variable_of_a_later_tower_alone_is_refused():
    calls = []

    def make(name, value):
        calls.append(name)
        return by_variable(name + 'r' * (len(calls) > 2), value)
    with pytest.raises(SharedVariableError, match="makes variable 'scaler' in tower 1, and did not "
                                                  'in the first tower'):
        towers.build_towers(model_fn, tf.constant(BATCH[:2]), Scaled(make), 2, 'mean',
                            copies='reuse', check_devices=False)
