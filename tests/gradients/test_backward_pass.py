"""Trained variables behind the batch: an embedding that is looked up before the build, say."""

import numpy as np
import pytest
import sample_models as samples
import tensorflow.compat.v1 as tf
from case_marks import first_fast

import towers
from sample_models import mean_squared_error, momentum, names

slow = pytest.mark.slow


def batch_of(count):
    """(rows [count, 3] of a table, examples of a matrix, y): the table's rows are looked up."""
    ids, y = samples.tokens(count)
    table = tf.get_variable('table', [7, 3], tf.float64, tf.random_normal_initializer(seed=1))
    scale = tf.get_variable('scale', [3], tf.float64, tf.ones_initializer())
    return tf.reduce_mean(tf.nn.embedding_lookup(table, ids), 1) * scale, tf.constant(y)


def model(rows, y):
    kernel = tf.get_variable('kernel', [3, 3], tf.float64, tf.random_normal_initializer(seed=2))
    return mean_squared_error(tf.matmul(rows, kernel), y)


def again(rows, y):
    with tf.variable_scope('', reuse=True):
        return model(rows, y)


def trained(count, devices=None, factor=1., **options):
    """{name: value} of the variables after two steps; on one device where `devices` is None."""
    with tf.Graph().as_default():
        tf.get_variable_scope().set_use_resource(True)
        batch = batch_of(count)
        if devices is None:
            loss = factor * model(*batch)
            train_op = momentum().minimize(loss)
        else:
            built = towers.build_towers(model, batch, momentum(), devices, **options)
            train_op = built.train_op
        with tf.Session(config=towers.session_config(devices or 1)) as session:
            session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
            for _ in range(2):
                session.run(train_op)
            return session.run({variable.op.name: variable for variable in tf.global_variables()
                                if 'replica' not in variable.op.name})


REPLICATED = dict(variables=towers.VariablePlacement('replicated'))


@pytest.mark.parametrize('count, devices, factor, options', [
    (2, 3, 1., dict(reduction='mean', remainder='weight')),  # the last shard is padding
    pytest.param(8, 2, 2., {}, marks=slow),  # the sum, as the recipe has it
    pytest.param(8, 2, 1., dict(reduction='mean', memory=towers.Memory(accumulate=2)), marks=slow),
    pytest.param(8, 2, 1., dict(reduction='mean', copies='reuse'), marks=slow),
    pytest.param(8, 2, 1., dict(reduction='mean', numerics=towers.Numerics(
        loss_scale=towers.LossScale(initial=8))), marks=slow),
    pytest.param(8, 2, 1., dict(REPLICATED, reduction='mean'), marks=slow)], ids=str)
def test_they_are_trained_as_on_one_device(count, devices, factor, options):
    ours, plain = trained(count, devices, **options), trained(count, factor=factor)
    for name in ('table', 'scale', 'kernel', 'table/Momentum'):
        np.testing.assert_allclose(ours[name], plain[name], rtol=1e-10, err_msg=name)


def test_only_what_is_trained_gets_a_gradient():
    built = towers.build_towers(
        model, batch_of(4),
        towers.Objective(
            momentum(), var_list=lambda every: [each for each in every if each.op.name != 'table']),
        2)
    assert names(variable for _, variable in built.gradients) == ['kernel', 'scale']
    with tf.Graph().as_default():
        built = towers.build_towers(model, batch_of(4), None, 2)
        assert built.train_op is None  # an evaluation takes none


@pytest.mark.parametrize('as_function', first_fast(1, [True, False]))
def test_a_variable_that_var_list_alone_names_is_trained_as_on_one_device(as_function):
    """It is not trainable, and the batch is complex numbers that are computed from it."""
    def loss_of(spectrum):
        return tf.reduce_mean(tf.abs(spectrum) ** 3)

    def gradient(devices):
        with tf.Graph().as_default():
            table = tf.get_variable('table', [7, 4], tf.float64, trainable=False,
                                    initializer=tf.random_normal_initializer(seed=1))
            spectrum = tf.fft(tf.cast(tf.gather(table, [3, 1, 1, 6]), tf.complex128))
            if devices is None:
                total = tf.gradients(loss_of(spectrum), [table])[0]
            else:
                chosen = (lambda unused: [table]) if as_function else [table]
                built = towers.build_towers(
                    loss_of, spectrum, towers.Objective(momentum(), chosen), devices, 'mean')
                [(total, _)] = built.gradients
            with tf.Session(config=towers.session_config(2)) as session:
                session.run(tf.global_variables_initializer())
                return session.run(tf.convert_to_tensor(total))
    np.testing.assert_allclose(gradient(2), gradient(None), rtol=1e-12)


@slow
def test_of_several_losses_each_trains_them():
    def losses(rows, y):
        return {'loss': {'a': model(rows, y), 'b': tf.reduce_mean(rows)}}
    rows, y = batch_of(4)
    built = towers.build_towers(losses, (rows, y), {'a': momentum(), 'b': momentum()}, 2, 'mean')
    variables = {variable.op.name: variable for variable in tf.trainable_variables()}
    for name, loss in ('a', again(rows, y)), ('b', tf.reduce_mean(rows)):
        of_loss = {variable.op.name: gradient for gradient, variable in built.gradients[name]}
        ours, plain = samples.run(built, [of_loss['scale'], tf.gradients(
            loss, [variables['scale']])[0]])
        np.testing.assert_allclose(ours, plain, rtol=1e-12)


def test_a_loss_trains_only_its_own_variables_before_the_inputs():
    def losses(rows, y):
        with tf.variable_scope('generator'):
            generator = model(rows, y)
        with tf.variable_scope('critic'):
            return {'generator': generator, 'critic': model(rows, y)}

    def chosen(*scopes):
        return [variable for variable in tf.trainable_variables()
                if variable.op.name.startswith(scopes)]

    def after_a_step_of_each(num_towers):
        """{name: value} of the variables; on one device where `num_towers` is 0."""
        with tf.Graph().as_default():
            batch = batch_of(8)
            generator, critic = [tf.train.GradientDescentOptimizer(.1) for _ in range(2)]
            if num_towers:
                built = towers.build_towers(lambda *shard: towers.ModelOutput(losses(*shard)), batch, {
                    'generator': towers.Objective(generator, lambda _: chosen('generator')),
                    'critic': towers.Objective(
                        critic, lambda _: chosen('critic', 'table', 'scale')),
                }, num_towers, 'mean')
                steps = [built.train_ops['generator'], built.train_ops['critic']]
            else:
                found = losses(*batch)
                steps = [
                    generator.minimize(found['generator'], var_list=chosen('generator')),
                    critic.minimize(found['critic'], var_list=chosen('critic', 'table', 'scale'))]
            with tf.Session(config=towers.session_config(2)) as session:
                session.run(tf.global_variables_initializer())
                for step in steps:
                    session.run(step)
                return session.run({variable.op.name: variable
                                    for variable in tf.trainable_variables()})
    expected = after_a_step_of_each(0)
    found = after_a_step_of_each(2)
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-12, err_msg=name)


def test_a_variable_that_is_an_input_is_trained():
    rows = tf.get_variable('rows', [4], tf.float64, tf.constant_initializer([1., 2., 3., 4.]))
    built = towers.build_towers(lambda x: tf.reduce_mean(tf.square(x)) * tf.get_variable(
        'w', [], tf.float64, tf.ones_initializer()), rows, momentum(), 2, 'mean')
    gradient, = [gradient for gradient, variable in built.gradients if variable is rows]
    np.testing.assert_allclose(samples.run(built, gradient), [.5, 1., 1.5, 2.], rtol=1e-12)


def test_a_sparse_input_that_is_computed_from_one_is_refused():
    values = tf.get_variable('values', [4], tf.float64)
    x = tf.SparseTensor([[i, 0] for i in range(4)], values * 2., [4, 1])
    with pytest.raises(towers.InputError, match=(
            r'^the input \S+ is computed from the variable values, which may be trained, and the '
            'gradient of a tower ends at its inputs: compute it in the model function, or pass its ')):
        towers.build_towers(lambda x: 0., x, momentum(), 2)


@pytest.mark.parametrize('devices', first_fast(1, [2, 1]))
def test_all_trained_variables_may_be_behind_the_inputs_of_micro_batches(devices):
    rows = tf.get_variable('rows', [8], tf.float64, tf.ones_initializer())
    built = towers.build_towers(
        lambda x: tf.reduce_mean(tf.square(x)), rows * np.arange(8.), samples.sgd(), devices,
        'mean', memory=towers.Memory(accumulate=2))
    [(gradient, _)] = built.gradients
    np.testing.assert_allclose(samples.run(built, gradient), 2. * np.arange(8.) ** 2 / 8.)
