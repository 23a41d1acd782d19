"""towers.left_over: a build that failed can be tried again in the same graph."""

import pytest
import sample_models as samples
import tensorflow.compat.v1 as tf

import towers
from sample_models import SAMPLES, keras, kind_of_variables, linear, momentum  # noqa: F401
from towers.graph.variable_access import variables_read
from towers.tower.failed_builds import left_scopes


class Broken(Exception):
    pass


def entries(graph):
    return {key: list(graph.get_collection(key)) for key in graph.get_all_collection_keys()
            if graph.get_collection(key)}


def fail(model_fn, data, where, graph, **options):
    """A build that fails in tower 0, in tower 1, or when all towers are there."""
    calls = []

    def broken(*inputs):
        loss = model_fn(*inputs)
        calls.append(None)
        if where == 'tower %d' % (len(calls) - 1):
            raise Broken()
        return loss

    def transform(pairs):
        raise Broken()
    before = entries(graph)
    with pytest.raises(Broken):
        towers.build_towers(broken, data, momentum(), 2, copies='reuse',
                            transform_gradients=transform if where == 'the end' else None,
                            **options)
    assert entries(graph) == before


def trained(built, steps=2):
    """(initial values, values after some steps) of all global variables."""
    variables = {v.op.name: v for v in tf.global_variables()}
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run(tf.global_variables_initializer())
        session.run(tf.local_variables_initializer())
        initial = session.run(variables)
        for _ in range(steps):
            session.run([built.loss, built.train_op])
        return initial, session.run(variables)


@pytest.mark.slow
@pytest.mark.parametrize('options', [{}, dict(variable_device='replicated')],
                         ids=['shared', 'replicated'])
@pytest.mark.parametrize('where', ['tower 0', 'tower 1', 'the end'])
@pytest.mark.parametrize('name', ['slim', 'tf.Variable', 'embedding'])
def test_the_second_attempt_is_as_a_first(kind_of_variables, graph, name, where,  # noqa: F811
                                          options):
    sample = SAMPLES[name]
    data = sample.data(8)
    options = dict(options, regularization='none')
    fail(sample.model_fn, data, where, graph, **options)
    built = towers.build_towers(sample.model_fn, data, momentum(), 2, **options)
    initial, after = trained(built)
    theirs = samples.one_device(sample.model_fn, data, momentum, initial, factor=2)
    assert sorted(after) == sorted(theirs.variables)
    for each in after:
        assert samples.relative_difference(after[each], theirs.variables[each]) < 1e-6
    assert [v.op.name for v in tf.trainable_variables()] == [
        v.op.name for v in built.variables]
    assert not towers.audit(built).broken


@pytest.mark.skipif(not samples.HAS_TF_LAYERS, reason='no tf.layers')
def test_unnamed_layers(graph):
    data = samples.vectors(8)
    fail(samples.tf_layers, data, 'tower 1', graph)
    towers.build_towers(samples.tf_layers, data, momentum(), 2)
    assert samples.names(tf.trainable_variables()) == [
        'dense/bias', 'dense/kernel', 'dense_1/bias', 'dense_1/kernel']


def test_unnamed_layers_of_keras(graph):
    def model_fn(x, y):
        net = keras.layers.Dense(4, dtype='float64')(x)
        return samples.mean_squared_error(keras.layers.Dense(3, dtype='float64')(net), y)
    data = samples.vectors(8)
    fail(model_fn, data, 'tower 1', graph)
    left = [op.name for op in graph.get_operations() if op.type in ('VarHandleOp', 'VariableV2')]
    built = towers.build_towers(model_fn, data, momentum(), 2)
    assert [v.op.name for v in built.variables] == left
    initial, after = trained(built)
    assert all((initial[name] != after[name]).any() for name in left)


def test_initial_values_are_those_of_the_second_attempt(kind_of_variables, graph):  # noqa: F811
    def model_fn(value):
        def model(x):
            made = tf.get_variable('made', [], initializer=tf.constant_initializer(value))
            direct = tf.Variable(value, name='direct')
            return tf.reduce_mean(x) * made * direct
        return model
    data = tf.constant([1., 2.])
    for options in ({}, dict(variable_device='replicated')):
        fail(model_fn(1.), data, 'tower 1', graph, **options)
    built = towers.build_towers(model_fn(5.), data, momentum(), 2, variable_device='replicated')
    initial, _ = trained(built)
    assert initial['made'] == initial['direct'] == 5.
    with tf.Session(config=towers.session_config(built.devices)) as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        assert session.run(built.replicas.variables) == [5., 5.]


def test_an_attempt_after_two_failures_and_another_build(graph):
    data = samples.vectors(8)
    fail(linear, data, 'tower 1', graph)
    fail(linear, data, 'the end', graph)
    built = towers.build_towers(linear, data, momentum(), 2)
    assert samples.names(built.variables + built.slots) == ['kernel', 'kernel/Momentum']
    with pytest.raises(towers.NameScopeError):  # as after any build that is there
        towers.build_towers(linear, data, momentum(), 2, reuse=built)
    with pytest.raises(towers.SharedVariableError, match="'kernel' exists already"):
        towers.build_towers(linear, data, momentum(), 2, name='another')
    with tf.variable_scope('more'):
        other = towers.build_towers(linear, data, momentum(), 2, name='another')
    assert samples.names(other.variables) == ['more/kernel']


def kept_variable():
    kept = []

    def model(x):
        if not kept:
            kept.append(tf.Variable(2., name='w'))
        return tf.reduce_mean(x * kept[0] * tf.get_variable('b', [], initializer=ones()))
    return model, ['b', 'w']


def kept_template():
    template = tf.make_template('T', lambda x: x * tf.get_variable('w', [], initializer=twos()))
    return lambda x: tf.reduce_mean(template(x)), ['T/w']


def kept_layer():
    layer = keras.layers.Dense(1, kernel_initializer='ones', name='d')
    return lambda x: tf.reduce_mean(2. * layer(x[:, None])), ['d/bias', 'd/kernel']


def kept_average():
    average = tf.train.ExponentialMovingAverage(0.5)

    def model(x):
        w = tf.get_variable('w', [], initializer=twos())
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, average.apply([w]))
        return tf.reduce_mean(w * x)
    return model, ['w', 'w/ExponentialMovingAverage']


ones, twos = tf.ones_initializer, lambda: tf.constant_initializer(2.)


@pytest.mark.parametrize('where', ['tower 0', 'tower 1', 'the end'])
@pytest.mark.parametrize('keep', [kept_variable, kept_template, kept_layer, kept_average])
def test_what_the_program_keeps_goes_on(graph, keep, where):
    model, names = keep()
    data = tf.constant([1., 2., 3., 6.])
    fail(model, data, where, graph)
    fail(model, data, where, graph)
    optimizer = momentum()
    built = towers.build_towers(model, data, optimizer, 2, 'mean', copies='reuse')
    trained_names = [name for name in names if 'Average' not in name]
    assert sorted(v.op.name for v in tf.trainable_variables()) == trained_names
    initial, after = trained(built, steps=1)
    assert sorted(after) == sorted(names + [name + '/Momentum' for name in trained_names])
    gradients = {'w': 3., 'b': 6., 'T/w': 3., 'd/bias': 2., 'd/kernel': 6.}
    for name in trained_names:
        assert after[name + '/Momentum'].ravel() == pytest.approx([gradients[name]])
    if keep is kept_average:
        assert [v.op.name for v in tf.moving_average_variables()] == ['w']
        assert after[names[1]] in (initial['w'], (initial['w'] + after['w']) / 2.)
    assert not towers.audit(built).broken


@pytest.mark.parametrize('kept', [False, True], ids=['new optimizer', 'kept optimizer'])
def test_an_optimizer_that_fails_after_its_slots_were_made(graph, kept):
    class Late(tf.train.AdamOptimizer):
        broken = True

        def _finish(self, *arguments):
            if self.broken:
                raise Broken()
            return super(Late, self)._finish(*arguments)

    def build(optimizer):
        return towers.build_towers(linear, data, optimizer, 2)
    data, optimizer = samples.vectors(8), Late(0.1)
    with pytest.raises(Broken):
        build(optimizer)
    optimizer.broken = False
    built = build(optimizer if kept else tf.train.AdamOptimizer(0.1))
    assert samples.names(built.slots) == [
        'beta1_power', 'beta2_power', 'kernel/Adam', 'kernel/Adam_1']
    initial, after = trained(built, steps=1)
    assert sorted(after) == ['beta1_power', 'beta2_power', 'kernel', 'kernel/Adam',
                             'kernel/Adam_1']
    assert after['beta1_power'] == pytest.approx(0.81)
    # Adam's first step, where its first moment is 0.1 times the gradient: a slot that had taken
    # part in an update before, or a second update, would give another one.
    gradient = after['kernel/Adam'] / 0.1
    expected = 0.1 * gradient / (abs(gradient) + 1e-8 / 0.001 ** 0.5)
    assert samples.relative_difference(initial['kernel'] - after['kernel'], expected) < 1e-5


def in_a_new_graph(model, message, **options):
    data = tf.constant([1., 2., 3., 6.])
    fail(model, data, 'tower 1', tf.get_default_graph(), **options)
    with pytest.raises(towers.SharedVariableError) as caught:
        towers.build_towers(model, data, momentum(), 2, **options)
    assert str(caught.value) == message + (
        ' Build in a new graph: `with tf.Graph().as_default():`, or tf.reset_default_graph().')


@pytest.mark.slow
def test_only_scopes_that_were_entered_are_left(graph):
    with pytest.raises(ZeroDivisionError):
        towers.build_towers(lambda x: 1 / 0, tf.zeros([4000, 1]), momentum(), 2, accumulate=1000)
    assert 'tower_0' in left_scopes(graph) and len(left_scopes(graph)) <= 2


def test_a_kept_variable_that_the_model_function_looks_for(graph):
    kept = []

    def model(x):
        if not kept:
            kept.append(tf.Variable(2., name='w'))
        return tf.reduce_mean(x * kept[0]) + sum(map(tf.nn.l2_loss, tf.trainable_variables()))
    in_a_new_graph(model, (
        "variable 'w' is left over from a build that failed, and the program has kept it. The "
        "model function reads the collection 'trainable_variables', where it was not any more."))


def test_a_kept_variable_that_is_regularized_as_it_is_made(graph):
    template = tf.make_template('T', lambda x: x * tf.get_variable(
        'w', [], initializer=twos(), regularizer=tf.nn.l2_loss))
    in_a_new_graph(lambda x: tf.reduce_mean(template(x)), (
        "variable 'T/w' is left over from a build that failed, and the program has kept it. Its "
        'regularization loss was registered as it was made, and is not any more.'),
                   regularization='add')


def test_a_kept_variable_and_another_of_its_name(graph):
    kept = []

    def model(x):
        if not kept:
            kept.append(tf.Variable(2.))
        return tf.reduce_mean(x * kept[0] * tf.Variable(3.))
    in_a_new_graph(model, (
        "a build that failed has left 2 variables that are called 'Variable', and the model "
        'function makes 1 now: which of them it has kept, if any, cannot be told.'))


def test_a_template_of_an_earlier_build_in_the_next(graph):
    model, _ = kept_template()
    data = tf.constant([1., 2., 3., 6.])
    built = towers.build_towers(model, data, momentum(), 2, 'mean',
                                variable_device='replicated')
    other = towers.build_towers(model, data, momentum(), 2, 'mean', name='other', reuse=built,
                                variable_device='replicated')
    assert [[v.op.name for v in graph_reads(tower)] for tower in other.towers] == [
        ['T/w'], ['T/w_replica_1/T/w']]


def graph_reads(tower):
    return variables_read([op for op in tf.get_default_graph().get_operations()
                           if op.name.startswith(tower.name_scope)
                           and op.name not in tower.backward])


def test_get_variable_itself_has_forgotten_what_failed(graph):
    fail(linear, samples.vectors(8), 'tower 1', graph)
    with tf.variable_scope(tf.get_variable_scope(), reuse=True):
        with pytest.raises(ValueError, match='kernel'):
            tf.get_variable('kernel', [6, 3], tf.float64)


@pytest.mark.parametrize('shape, options, found', [
    ([6, 2], {}, 'float64 of shape (6, 3)'),
    ([6, 3], dict(variable_device='/cpu:1'), 'one on /cpu:0')], ids=['shape', 'device'])
def test_what_cannot_be_taken_up_needs_a_new_graph(graph, shape, options, found):
    def other(x, y):
        kernel = tf.get_variable('kernel', shape, x.dtype)
        return tf.reduce_mean(tf.square(tf.matmul(x, kernel)))
    data = samples.vectors(8)
    fail(linear, data, 'tower 1', graph)
    with pytest.raises(towers.SharedVariableError) as caught:
        towers.build_towers(other, data, momentum(), 2, **options)
    assert str(caught.value) == (
        "variable 'kernel' cannot be made as it is asked for: a build that failed has left %s of "
        'that name in this graph, which TensorFlow cannot remove. Build in a new graph: `with '
        'tf.Graph().as_default():`, or tf.reset_default_graph().' % found)


def test_a_meta_graph_can_be_exported(graph, tmp_path):
    fail(linear, samples.vectors(8), 'tower 1', graph)
    towers.build_towers(linear, samples.vectors(8), momentum(), 2)
    path = str(tmp_path / 'model.meta')
    tf.train.export_meta_graph(path)
    names = {variable.op.name for variable in tf.global_variables()}
    with tf.Graph().as_default():
        tf.train.import_meta_graph(path)
        assert {variable.op.name for variable in tf.global_variables()} == names
        assert not [key for key in tf.get_default_graph().get_all_collection_keys()
                    if 'left_over' in str(key)]
