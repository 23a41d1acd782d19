"""towers.left_over: a build that failed can be tried again in the same graph."""

import pytest
import sample_models as samples
import tensorflow.compat.v1 as tf

import towers
from sample_models import SAMPLES, keras, kind_of_variables, linear, momentum  # noqa: F401


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
